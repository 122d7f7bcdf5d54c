/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The fast path through pools, for packets that are one packet on the wire: up to four pools that neither mark
 * nor delay, and buckets and sharers that have a slot. It decides as pool.h does. The function of a level tests its
 * pool, calls that of the level above, and charges the pool if the packet passes. So nothing that it tested is looked
 * up again. These functions are global, so that the verifier checks each of them once and not on each path to it.
 */
#ifndef SHAPECTL_POOL_FAST_H
#define SHAPECTL_POOL_FAST_H

#include "clock.h"

/* Returned by functions that did nothing, */
#define UNDONE -2
/* and by those that need keep_times to be called first. */
#define LATE -3

/* Which parameters of a rule are in force, or UNDONE if that depends on the time. */
static __always_inline int timeless_index(__u32 seen)
{
	__u64 phase;

	if (seen & VERSION_CHANGES) {
		phase = READ_ONCE(change.phase);
		if (phase == PHASE_BY_TIME)
			return UNDONE;
		seen ^= phase;
	}
	return seen & 1;
}

static __always_inline __u32 index_at(__u32 seen, __u32 phase)
{
	return (seen & VERSION_CHANGES ? seen ^ phase : seen) & 1;
}

/* The handle of the bucket of a packet's key, or 0 if it has none or its headers are not plain. */
static __noinline __u64 find_key(struct __sk_buff *skb, __u32 ip, const struct params *params)
{
	__u64 hash = hash_plain(skb, ip, params->each_bits, params->salt, params->flags);

	return hash ? find_handle(hash) : 0;
}

/* A packet on its way up. No padding: the verifier refuses arguments with unwritten bytes. */
struct ascent {
	__u64 now;
	__u64 v;      /* the byte clock of the rule, */
	__u64 handle; /* and its bucket, or 0 for the shared one */
	__u64 least;  /* units, for which pools must have room */
	__u32 id;     /* of the rule */
	__u32 seen;   /* its version */
	__u32 bytes;
	__u32 ip;
	__u32 member; /* the rule or pool below the next pool; or the pool that refuses the packet */
	__u32 phase;
	__u32 cpu;
	__u16 unlimited; /* the rule has no rate */
	__u8 kept;	 /* the fair clocks are those of now */
	__u8 load;	 /* of the last sharer, see judge */
};

/* The bucket of the rule of a packet. */
static __always_inline struct bucket *bucket_in(struct rule *rule, const struct ascent *a)
{
	return a->handle ? bucket_of(a->handle) : &rule->shared;
}

/* Its level. */
static __always_inline __u64 level_in(struct rule *rule, const struct params *params, const struct ascent *a)
{
	__u32 charged;
	__u64 tat = read_tat(bucket_in(rule, a), &charged);

	return level_at(params, a->v, a->now, tat, charged);
}

/* A pool or guarantee, and what was seen of its bucket. */
struct stage {
	struct rule *rule;
	const struct params *params;
	__u64 level; /* with a lease as for the whole limit, see whole_level */
	__u64 tat;
	__u64 start; /* the same, or the byte clock if the bucket is empty */
};

enum look {
	LOOK_UNDONE, /* there is no such pool, or it changes just now */
	LOOK_FULL,   /* it has no room for the packet */
	LOOK_ROOM,
};

/* Looks at the bucket by the parameters with the rate. */
static __always_inline enum look look_by(const struct ascent *a, struct stage *at, const struct params *rated, __u32 seen, bool leased)
{
	__u64 v = byte_clock(rated, rated->base, a->now);
	enum look look;
	__u32 charged;

	at->tat = read_tat(&at->rule->shared, &charged);
	at->level = level_at(rated, v, a->now, at->tat, charged);
	if (leased)
		at->level = later(at->level, least_level(rated, v, a->now));
	at->start = KEPT(v + at->level);
	if (!is_current(at->rule, seen))
		return LOOK_UNDONE;
	look = at->level + a->least > rated->limit ? LOOK_FULL : LOOK_ROOM;
	if (leased)
		at->level = whole_level(at->params, rated->limit, at->level);
	return look;
}

static __always_inline enum look look_at(const struct ascent *a, const __u32 *id, struct stage *at, bool may_lease)
{
	const struct params *rated;
	__u32 seen;

	at->rule = rule_at(id);
	if (!at->rule)
		return LOOK_UNDONE;
	seen = READ_ONCE(at->rule->version);
	at->params = params_of(at->rule, index_at(seen, a->phase));
	if (may_lease && unlikely(at->params->flags & RULE_LEASED)) {
		rated = lease_of(at->params, a->now);
		return rated ? look_by(a, at, rated, seen, true) : LOOK_UNDONE;
	}
	return look_by(a, at, at->params, seen, false);
}

/* Charges a bucket whatever its level is by now. Others can only have raised it since it was looked at. */
static __always_inline void charge_seen(const struct stage *at, const struct ascent *a)
{
	struct counters *c = &at->rule->counters[MASKED(a->cpu, cpu_mask)];
	__u64 cost = (__u64)a->bytes << UNIT_BITS, old = at->tat;
	struct bucket *b = &at->rule->shared;

	raise_tick(b, &old, at->start, at->start, tick(a->now)); /* or another CPU does */
	/* If another CPU was faster, the bucket is not empty any more. */
	if (at->start == old || KEPT(__sync_val_compare_and_swap(&b->tat, old, at->start + cost)) != old)
		__sync_fetch_and_add(&b->tat, cost);
	c->passed_packets++;
	c->passed_bytes += a->bytes;
}

/* Whether a packet conforms to a bucket by itself. */
static __always_inline bool has_room(const struct params *params, __u64 level, __u32 bytes)
{
	return !level || level + ((__u64)tested_bytes(params, bytes) << UNIT_BITS) <= params->limit;
}

/* Tests a packet with a guarantee. With charge it is charged to it, too. */
__noinline int ask_guarantee(const struct ascent *a, __u32 id, __u32 charge)
{
	struct stage at;

	if (!a || !look_at(a, &id, &at, false) || at.params->flags & (RULE_UNLIMITED | RULE_EACH) || at.level > MAX_DEBT)
		return UNDONE;
	if (charge)
		charge_seen(&at, a);
	return has_room(at.params, at.level, a->bytes) ? VERDICT_PASS : VERDICT_EXCESS;
}

/* A sharer that has room for a packet. */
struct sharer {
	struct share *share;
	struct bucket *bucket; /* NULL if none is charged */
	__u32 fingerprint;
	__u16 weight;
	__u16 light;
};

/* Finds the sharer of a packet in a bucket that has the level, and judges it. Sets sharer if it has a slot. */
static __noinline int test_sharer(struct __sk_buff *skb, struct ascent *a, const struct params *params, __u64 level,
				  struct sharer *sharer)
{
	const struct cold_params *cold = cold_of(params);
	struct share *s = share_of(cold);
	enum share_verdict verdict;
	struct bucket *b;
	__u32 fingerprint;
	__u64 hash;

	if (!s)
		return UNDONE;
	if (!a->kept && a->now - READ_ONCE(s->last) >= cold->step)
		return LATE;
	hash = params->flags & RULE_SHARE_MEMBER ? hash4(~params->salt, 0, 0, a->member, 0) :
		hash_plain(skb, a->ip, cold->share_bits, ~params->salt, params->flags >> SHARE_FLAGS);
	b = hash ? find_bucket(hash, true, &fingerprint) : NULL;
	if (!b)
		return UNDONE;
	sharer->share = s;
	sharer->bucket = b;
	sharer->fingerprint = fingerprint;
	verdict = judge(s, params, cold, level, a->bytes, sharer->weight, READ_ONCE(b->tat), READ_ONCE(b->tick), a->load);
	a->load = verdict / SHARE_VERDICTS;
	verdict %= SHARE_VERDICTS;
	if (verdict == BEYOND_DEBT)
		return UNDONE;
	sharer->light = a->load == LIGHT;
	return verdict == WITHIN_SHARE ? VERDICT_PASS : VERDICT_REFUSED;
}

/* Charges a packet to a sharer. If other CPUs are faster twice, the sharer is not charged. */
static __noinline int charge_tested_sharer(const struct ascent *a, const struct params *params, const struct sharer *sharer)
{
	const struct cold_params *cold = cold_of(params);
	struct bucket *b = sharer->bucket;
	__u64 old, tat;
	__u32 tries = 2;

	if (sharer->light)
		spend_credit(sharer->share, a->bytes);
	do {
		old = READ_ONCE(b->tat);
		if (!is_still(b, sharer->fingerprint, old))
			return 0;
		tat = charge_sharer_at(sharer->share, cold, b, old, a->bytes, sharer->weight);
	} while (!tat && --tries);
	if (tat)
		move_weight(sharer->share, cold, old, tat, sharer->weight);
	return 0;
}

/* Charges a packet to the bucket of its rule, if that has room. */
__noinline int charge_rule(const struct ascent *a)
{
	const struct params *params;
	enum verdict verdict;
	struct rule *rule;
	__u64 tat;
	__u32 id;

	if (!a)
		return UNDONE;
	id = a->id;
	rule = rule_of(id);
	if (!rule)
		return UNDONE;
	params = params_of(rule, index_at(a->seen, a->phase));
	verdict = charge_bucket(rule, a->seen, params, a->v, bucket_in(rule, a), a->handle, a->now, a->bytes,
				tested_bytes(params, a->bytes), 0, &tat);
	return verdict == VERDICT_AGAIN ? UNDONE : (int)verdict;
}

/* The rule decides after all pools have room. */
static __always_inline int decide_rule(const struct ascent *a)
{
	return a->unlimited ? VERDICT_PASS : charge_rule(a);
}

/* Flags that the fast path through pools does not handle in a pool. */
#define POOL_SLOW \
	(RULE_UNLIMITED | RULE_FRAMING | RULE_PENALTY | RULE_ECN | RULE_PASS | RULE_ABSENT | RULE_SHADOW | RULE_DELAY | RULE_SPARSE)

typedef int level(struct __sk_buff *skb, struct ascent *a, __u32 id, __u32 weight, __u32 guaranteed);

/*
 * Tests a pool, lets those above and the rule decide, and charges the pool if the packet passes. The weight is that of
 * the member below. A packet that is guaranteed there is charged even to a pool without room.
 */
static __always_inline int pass_pool(struct __sk_buff *skb, struct ascent *a, __u32 id, __u32 weight, __u32 guaranteed,
				     level *above)
{
	struct sharer sharer;
	struct stage at;
	enum look look;
	__u32 extra;
	int answer;

	sharer.weight = weight;
	sharer.bucket = NULL;
	if (!a)
		goto undone;
	look = look_at(a, &id, &at, true);
	if (look == LOOK_UNDONE || at.params->flags & POOL_SLOW)
		goto undone;
	extra = KEPT(at.params->flags & (RULE_SHARES | RULE_GUARANTEE));
	if (look == LOOK_FULL) {
		if (!guaranteed)
			goto refused;
		if (at.level > MAX_DEBT)
			goto undone;
	}
	if (unlikely(extra) && !guaranteed) {
		if (extra & RULE_SHARES) {
			answer = test_sharer(skb, a, at.params, at.level, &sharer);
			if (answer == VERDICT_REFUSED)
				goto refused;
			if (answer != VERDICT_PASS)
				return answer;
		}
		if (extra & RULE_GUARANTEE) {
			answer = ask_guarantee(a, cold_of(at.params)->second, false);
			if (answer == UNDONE)
				goto undone;
			guaranteed = answer == VERDICT_PASS;
		}
	}
	if (at.params->flags & RULE_WITHIN) {
		a->member = id;
		if (!(extra & RULE_SHARES))
			a->load = HEAVY;
		answer = above(skb, a, at.params->within, cold_of(at.params)->weight, guaranteed);
	} else {
		answer = decide_rule(a);
	}
	if (answer != VERDICT_PASS)
		return answer;
	charge_seen(&at, a);
	if (unlikely(KEPT(extra))) {
		if (sharer.bucket)
			charge_tested_sharer(a, at.params, &sharer);
		else if (extra & RULE_SHARES)
			skip_sharers(cold_of(at.params), a->bytes);
		if (guaranteed && extra & RULE_GUARANTEE)
			ask_guarantee(a, cold_of(at.params)->second, true);
	}
	return KEPT(VERDICT_PASS);
refused:
	a->member = id;
	return VERDICT_REFUSED;
undone:
	/* The asm keeps the compiler from setting the answer before each jump. */
	return KEPT(UNDONE);
}

static __always_inline int too_high(struct __sk_buff *skb, struct ascent *a, __u32 id, __u32 weight, __u32 guaranteed)
{
	(void)skb, (void)a, (void)id, (void)weight, (void)guaranteed;
	return UNDONE;
}

#define LEVEL(name, above)                                                                                      \
	__noinline int name(struct __sk_buff *skb, struct ascent *a, __u32 id, __u32 weight, __u32 guaranteed) \
	{                                                                                                       \
		return pass_pool(skb, a, id, weight, guaranteed, above);                                        \
	}

LEVEL(level_4, too_high)
LEVEL(level_3, level_4)
LEVEL(level_2, level_3)
LEVEL(level_1, level_2)

/* count_refused for a packet that is one packet on the wire. */
__noinline int count_refused_one(__u32 id, __u32 bytes)
{
	struct rule *rule = rule_of(id);
	struct counters *c;

	if (!rule)
		return 0;
	c = counters_of(rule);
	c->dropped_packets++;
	c->dropped_bytes += bytes;
	return 0;
}

#endif
