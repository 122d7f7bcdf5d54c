/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* One bucket: its level, and the charge of a packet. */
#ifndef SHAPECTL_BUCKET_H
#define SHAPECTL_BUCKET_H

#include "gcra.c"
#include "leaky.c"
#include "rule.h"

enum verdict {
	VERDICT_PASS,
	VERDICT_EXCESS,
	VERDICT_REFUSED, /* a pool of the rule has no room */
	VERDICT_MARK,
	VERDICT_DELAY, /* conforms, and is queued */
	VERDICT_CONTENDED, /* the bucket could not be updated in time */
	VERDICT_AGAIN, /* another CPU has just changed the bucket: try again */
	VERDICT_STALE, /* the rule has changed since the packet came: decide again */
};

/*
 * Whether a bucket is empty whatever its TAT, because the byte clock may have
 * wrapped since its last charge. A packet that read its time before the last charge
 * does not find the bucket empty.
 */
static __always_inline bool is_idle(const struct params *params, __u64 now, __u32 charged)
{
	return (__u32)(tick(now) + TICKS_AHEAD + TICKS_LATE - charged) > params->idle + TICKS_LATE;
}

/* The level in units. */
static __always_inline __u64 level_at(const struct params *params, __u64 v, __u64 now, __u64 tat, __u32 charged)
{
	return is_idle(params, now, charged) ? 0 : later(tat, v) - v;
}

/* The TAT and the tick of a bucket. A tick that another CPU raises meanwhile is that of a later TAT. */
static __always_inline __u64 read_tat(const struct bucket *b, __u32 *charged)
{
	__u64 tat;

	*charged = READ_ONCE(b->tick);
	tat = READ_ONCE(b->tat);
	if (likely(READ_ONCE(b->tick) == *charged))
		return tat;
	*charged = READ_ONCE(b->tick);
	return READ_ONCE(b->tat);
}

/* The least level of a bucket by a lease. Its clock may have wrapped since the least TAT. */
static __always_inline __u64 least_level(const struct params *lease, __u64 v, __u64 now)
{
	__u64 level = lease->penalty - v, last = KEPT((__u64)lease->each_bits); /* 64 bits, or its place on the stack is refused */

	return level <= lease->limit && (__s32)(tick(now) - (__u32)last) <= 0 ? level : 0;
}

/*
 * Whether b may be charged, given its TAT that was read before: no CPU is
 * allocating or moving it, and it still has the fingerprint. A shared bucket has
 * none (0). This must precede the CAS: afterwards the bucket may have moved
 * together with the charge.
 */
static __always_inline bool is_still(const struct bucket *b, __u32 fingerprint, __u64 tat)
{
	return !(tat & TAT_BUSY) && (!fingerprint || READ_ONCE(b->fingerprint) == fingerprint);
}

/*
 * Raises the tick of a bucket, before its TAT is set from old to tat. A packet that read its time before a change reverted does
 * not lower it: without the mark of revert_bucket, the bucket would be reverted again, and what was charged since would be lost.
 * By the new tick, an old TAT that has wrapped would be in the future, so it first becomes empty. Returns false if another CPU
 * changed the bucket meanwhile.
 */
static __always_inline bool raise_tick(struct bucket *b, __u64 *old, __u64 tat, __u64 empty, __u32 to)
{
	__u32 charged = READ_ONCE(b->tick);

	if (likely(charged - to <= TICKS_LATE))
		return true;
	if ((__s64)(*old - tat) > 0) {
		if (__sync_val_compare_and_swap(&b->tat, *old, empty) != *old)
			return false;
		*old = empty;
	}
	return __sync_val_compare_and_swap(&b->tick, charged, to) == charged;
}

/* Sets the TAT of a bucket. Returns false if another CPU has changed the bucket meanwhile. */
static __always_inline bool set_tat(struct bucket *b, __u64 old, __u64 tat, __u64 now)
{
	/* Before the CAS: no other CPU must see the new TAT with an older tick. */
	if (unlikely(!raise_tick(b, &old, tat, tat - (1ULL << 61), tick(now))))
		return false;
	/* KEPT keeps the compiler from computing the comparison as a value. */
	return KEPT(__sync_val_compare_and_swap(&b->tat, old, tat)) == old;
}

/* Sets the TAT of a bucket and returns verdict, unless the bucket or its rule has changed meanwhile. */
static __always_inline enum verdict put_tat(const struct rule *rule, __u32 seen, struct bucket *b, __u64 old,
					    __u64 tat, __u64 now, enum verdict verdict)
{
	if (unlikely(!is_current(rule, seen)) || !set_tat(b, old, tat, now))
		return VERDICT_AGAIN;
	return verdict;
}

/* What may happen to an excess packet and its bucket. */
enum excess {
	EXCESS_MARKS = 1 << 0,	   /* the packet may be marked and charged */
	EXCESS_PENALISES = 1 << 1, /* the rule's penalty applies */
	EXCESS_CHARGES = 1 << 2,   /* it is charged all the same */
	EXCESS_ALONE = 1 << 3,	   /* a conforming packet is not charged */
};

/*
 * Charges a packet to b, which must have the fingerprint, when the rule's byte
 * clock is v. One CAS decides, so two CPUs never admit more than one would. An
 * excess packet without a mark or penalty writes nothing. It is excess even if another
 * CPU changes the bucket before its penalty is written. The packet conforms if
 * one of the tested bytes would. Stores the new TAT in charged.
 */
static __always_inline enum verdict charge_bucket(const struct rule *rule, __u32 seen, const struct params *params,
						  __u64 v, struct bucket *b, __u32 fingerprint, __u64 now,
						  __u64 bytes, __u64 tested, __u32 excess, __u64 *charged)
{
	__u64 cost = bytes << UNIT_BITS, least = tested << UNIT_BITS, old, tat;
	__u32 last;

	tat = old = read_tat(b, &last);
	if (!is_still(b, fingerprint, old))
		return VERDICT_AGAIN;
	if (is_idle(params, now, last))
		tat = v;
	if (params->flags & RULE_LEAKY ? leaky(params, v, cost, least, &tat) : gcra(params, v, cost, least, &tat)) {
		*charged = tat;
		if (excess & EXCESS_ALONE)
			return VERDICT_PASS;
		return put_tat(rule, seen, b, old, tat, now, VERDICT_PASS);
	}
	if (excess & EXCESS_CHARGES)
		return put_tat(rule, seen, b, old, tat + cost, now, VERDICT_PASS);
	if (excess & EXCESS_MARKS && tat - v + cost <= 2 * params->limit)
		return put_tat(rule, seen, b, old, tat + cost, now, VERDICT_MARK);
	if (unlikely(!is_current(rule, seen)))
		return VERDICT_AGAIN;
	if (excess & EXCESS_PENALISES && params->flags & RULE_PENALTY && leaky_penalty(params, v, tat) != tat)
		set_tat(b, old, leaky_penalty(params, v, tat), now);
	return VERDICT_EXCESS;
}

/* Whether the last charge was before the change reverted. Later charges have a tick that is one ahead. */
static __always_inline bool is_from_before(__u32 charged)
{
	return (__s32)(charged - tick(change.until)) <= 0;
}

/* The level of a bucket when the change reverted, on the clock that is in force since, and that clock's time then. */
static __always_inline __u64 level_at_revert(const struct rule *rule, __u32 index, __u64 tat, __u32 charged, __u64 *v)
{
	const struct params *params = params_of(rule, index), *then = params_of(rule, index ^ 1);

	if (then->flags & (RULE_UNLIMITED | RULE_ABSENT))
		then = params;
	*v = byte_clock(params, rule->cold[index & 1].rebase, change.until);
	return level_at(then, *v, change.until, tat, charged);
}

/* Sets the level of a bucket when the change reverted. Returns false if another CPU changed the bucket meanwhile. */
static __always_inline int put_at_revert(struct bucket *b, __u64 tat, __u64 v, __u64 level)
{
	/* An empty bucket gets a TAT in the distant past, for CPUs with a slower clock. */
	if (__sync_val_compare_and_swap(&b->tat, tat, level ? v + level : v - (1ULL << 61)) != tat)
		return 0;
	WRITE_ONCE(b->tick, tick(change.until) + 1);
	return 1;
}

/*
 * Adapts b to the parameters that are in force again since the change reverted. It
 * keeps its level of that moment, limited to what it can now hold, and its debt to guarantees. Does nothing
 * if that was done before. Returns false if another CPU changed the bucket
 * meanwhile.
 */
static __noinline int revert_bucket(const struct rule *rule, __u32 index, struct bucket *b)
{
	const struct params *params = params_of(rule, index), *then = params_of(rule, index ^ 1);
	__u64 tat = READ_ONCE(b->tat), v, level, most;
	__u32 charged = READ_ONCE(b->tick);

	if (tat & TAT_BUSY || !is_from_before(charged))
		return 1;
	if (then->flags & (RULE_UNLIMITED | RULE_ABSENT))
		then = params;
	level = level_at_revert(rule, index, tat, charged, &v);
	if (params->limit < then->limit || params->penalty < then->penalty) {
		most = params->limit > params->penalty ? params->limit : params->penalty;
		if (params->flags & RULE_POOL && level > then->limit)
			most += level - then->limit;
		if (level > most)
			level = most;
	}
	return put_at_revert(b, tat, v, level);
}

/* Whether a pool has a lease before a change or after it. */
static __always_inline bool has_lease(const struct rule *rule)
{
	return (rule->params[0].flags | rule->params[1].flags) & RULE_LEASED;
}

/*
 * The same for a pool that had a lease and has none any more, or the other way round, or had another one. It keeps the room
 * in its bucket. A lease that stays goes on, whatever else of the pool is as before.
 */
static __noinline int revert_leased(__u32 id, __u32 phase)
{
	const struct params *params, *then;
	struct rule *rule = rule_of(id);
	__u64 until = change.until, tat, v, level;
	struct version version;
	struct bucket *b;
	bool was_leased, is_leased;

	if (!rule)
		return 0;
	version = version_in(rule, phase);
	params = params_of(rule, version.index);
	then = params_of(rule, version.index ^ 1);
	b = &rule->shared;
	was_leased = then->flags & RULE_LEASED;
	is_leased = params->flags & RULE_LEASED;
	if (!version.reverted || !is_from_before(READ_ONCE(b->tick)) ||
	    (was_leased == is_leased && (!is_leased || cold_of(params)->lease == cold_of(then)->lease)))
		return 1;
	tat = READ_ONCE(b->tat);
	if (was_leased)
		then = find_lease(then, until);
	if (is_leased)
		params = find_lease(params, until);
	if (!then || !params)
		return 0;
	v = byte_clock(then, then->base, until);
	level = level_at(then, v, until, tat, READ_ONCE(b->tick));
	if (was_leased)
		level = later(level, least_level(then, v, until));
	v = byte_clock(params, params->base, until);
	if (__sync_val_compare_and_swap(&b->tat, tat, v + later(level + params->limit - then->limit, 0)) != tat)
		return 0;
	WRITE_ONCE(b->tick, tick(until) + 1);
	return 1;
}

#endif
