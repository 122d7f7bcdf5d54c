/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The fast path through pools, for packets that are one packet on the wire: up to FAST_POOLS pools that neither mark
 * nor delay, and buckets and sharers that have a slot. It decides as pool.h does. What a test finds is kept
 * on the stack for the charge.
 */
#ifndef SHAPECTL_POOL_FAST_H
#define SHAPECTL_POOL_FAST_H

#include "clock.h"

#define FAST_POOLS 4
#define CHARGES_CREDIT (1 << 16)

enum stage_answer {
	STAGE_CONFORMS,
	STAGE_REFUSES,
	STAGE_LATE, /* the fair clock must be advanced first */
	STAGE_SLOW, /* pool.h must decide */
};

static __always_inline __u32 index_at(__u32 seen, __u32 phase)
{
	return (seen & VERSION_CHANGES ? seen ^ phase : seen) & 1;
}

/* The handle of the bucket of a packet's key, or 0 if it has none or its headers are not plain. */
__noinline __u64 find_key(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 phase)
{
	const struct params *params;
	const struct rule *rule = rule_of(id);
	__u64 hash;

	if (!rule)
		return 0;
	params = params_of(rule, index_at(READ_ONCE(rule->version), phase));
	hash = hash_plain(skb, ip, params->each_bits, params->salt, params->flags);
	return hash ? find_handle(hash) : 0;
}

/* A rule or pool that has room for a packet. */
struct stage {
	__u32 id;
	__u32 weight; /* of the sharer, with CHARGES_CREDIT if it is light */
	__u64 sharer; /* its handle, or 0 if none is charged */
	__u64 v;      /* its byte clock */
};

/* A packet on its way up. No padding: the verifier refuses arguments with unwritten bytes. */
struct ascent {
	__u64 now;
	__u64 level;  /* of this bucket, in units */
	__u32 phase;
	__u32 bytes;
	__u32 id;     /* of the next pool */
	__u32 member; /* of what is directly within this rule or pool, */
	__u32 weight; /* and its weight there */
	__u32 guaranteed; /* as in a climb */
	__u32 pool;   /* the last one that was tested */
	__u32 ip;
	__u32 load;   /* of the last sharer, see judge */
	__u32 kept;   /* the fair clocks are those of now */
};

/* Finds the sharer of a packet, and judges it. Returns STAGE_LATE if the time was not kept but must be. */
__noinline enum stage_answer test_sharer(struct __sk_buff *skb, struct ascent *a, struct stage *at)
{
	const struct cold_params *cold;
	const struct params *params;
	const struct rule *rule;
	enum share_verdict verdict;
	struct bucket *b;
	struct share *s;
	__u32 id;
	__u64 hash;

	if (!a || !at)
		return STAGE_SLOW;
	id = at->id;
	rule = rule_of(id);
	if (!rule)
		return STAGE_SLOW;
	params = params_of(rule, index_at(READ_ONCE(rule->version), a->phase));
	cold = cold_of(params);
	s = share_of(cold);
	if (!s)
		return STAGE_SLOW;
	if (!a->kept && a->now - READ_ONCE(s->last) >= cold->step)
		return STAGE_LATE;
	hash = params->flags & RULE_SHARE_MEMBER ? hash4(~params->salt, 0, 0, a->member, 0) :
		hash_plain(skb, a->ip, cold->share_bits, ~params->salt, params->flags >> SHARE_FLAGS);
	if (hash)
		hash = find_handle(hash);
	if (!hash)
		return STAGE_SLOW;
	at->sharer = hash;
	b = bucket_of(hash);
	verdict = judge(s, params, cold, a->level, a->bytes, at->weight, READ_ONCE(b->tat), READ_ONCE(b->tick), a->load);
	a->load = verdict / SHARE_VERDICTS;
	if (a->load == LIGHT)
		at->weight |= CHARGES_CREDIT;
	verdict %= SHARE_VERDICTS;
	if (verdict == BEYOND_DEBT)
		return STAGE_SLOW;
	return verdict == WITHIN_SHARE ? STAGE_CONFORMS : STAGE_REFUSES;
}

/* Charges a packet to a sharer. If other CPUs are faster twice, the sharer is not charged. */
__noinline int charge_tested_sharer(__u32 id, __u32 phase, __u64 handle, __u32 bytes, __u32 weight)
{
	struct bucket *b = bucket_of(handle);
	const struct cold_params *cold;
	const struct rule *rule = rule_of(id);
	struct share *s;
	__u64 old, tat;
	__u32 i;

	if (!rule)
		return 0;
	cold = &rule->cold[index_at(READ_ONCE(rule->version), phase) & 1];
	s = share_of(cold);
	if (!s)
		return 0;
	if (weight & CHARGES_CREDIT)
		spend_credit(s, bytes);
	weight &= CHARGES_CREDIT - 1;
#pragma unroll
	for (i = 0; i < 2; i++) {
		old = READ_ONCE(b->tat);
		if (!is_still(b, handle, old))
			return 0;
		tat = charge_sharer_at(s, cold, b, old, bytes, weight);
		if (tat) {
			move_weight(s, cold, old, tat, weight);
			return 1;
		}
	}
	return 0;
}

/* limit_in, if no change begins or reverts by time. */
static __always_inline bool limit_now(__u32 id, __u32 phase, __u64 now, struct limit_at *at)
{
	at->rule = rule_of(id);
	if (!at->rule)
		return false;
	at->version = (struct version){ .seen = READ_ONCE(at->rule->version) };
	at->version.index = index_at(at->version.seen, phase);
	at->params = params_of(at->rule, at->version.index);
	at->ticks = now;
	at->v = byte_clock(at->params, at->params->base, now);
	return is_current(at->rule, at->version.seen);
}

/* Charges a packet that is one packet on the wire, and counts it. */
static __always_inline void charge_one(const struct limit_at *at, __u32 bytes)
{
	struct counters *c = counters_of(at->rule);

	charge_anyway(at, (__u64)bytes << UNIT_BITS);
	c->passed_packets++;
	c->passed_bytes += bytes;
}

/* Whether a packet conforms to a bucket by itself. */
static __always_inline bool has_room(const struct params *params, __u64 v, __u64 now, const struct bucket *b, __u32 bytes)
{
	__u64 level = level_at(params, v, now, READ_ONCE(b->tat), READ_ONCE(b->tick));

	return !level || level + ((__u64)tested_bytes(params, bytes) << UNIT_BITS) <= params->limit;
}

/* Whether a packet conforms to a guarantee. With charge it is charged to it, too. */
__noinline enum stage_answer ask_guarantee(__u32 id, __u32 phase, __u64 now, __u32 bytes, __u32 charge)
{
	struct limit_at at;
	__u64 level;

	if (!limit_now(id, phase, now, &at) || at.params->flags & (RULE_UNLIMITED | RULE_EACH))
		return STAGE_SLOW;
	level = level_of(&at, &at.rule->shared);
	if (charge)
		charge_one(&at, bytes);
	return !level || level + ((__u64)tested_bytes(at.params, bytes) << UNIT_BITS) <= at.params->limit ? STAGE_CONFORMS : STAGE_REFUSES;
}

/* Flags that the fast path through pools does not handle in a pool. */
#define POOL_SLOW \
	(RULE_UNLIMITED | RULE_FRAMING | RULE_PENALTY | RULE_ECN | RULE_PASS | RULE_ABSENT | RULE_SHADOW | RULE_DELAY | RULE_SPARSE)

/* Tests the pool a->id, which is at a height above the rule of a packet. Stores its flags, and goes to the next pool. */
static __always_inline enum stage_answer test_stage(struct __sk_buff *skb, struct ascent *a, __u32 height,
						    struct stage *stage, __u32 *flags)
{
	__u32 least = a->bytes < SHARED_BYTES ? a->bytes : SHARED_BYTES;
	enum stage_answer answer = STAGE_CONFORMS;
	struct limit_at at;

	*stage = (struct stage){ .id = a->id, .weight = a->weight };
	a->pool = a->id;
	if (!limit_now(stage->id, a->phase, a->now, &at))
		return STAGE_SLOW;
	stage->v = at.v;
	*flags = at.params->flags;
	a->level = level_of(&at, &at.rule->shared);
	if (*flags & POOL_SLOW || a->level > MAX_DEBT)
		return STAGE_SLOW;
	a->id = at.params->within;
	a->weight = cold_of(at.params)->weight;
	if (a->guaranteed == NOT_GUARANTEED) {
		if (a->level + ((__u64)least << UNIT_BITS) > at.params->limit)
			return STAGE_REFUSES;
		if (*flags & RULE_SHARES)
			answer = test_sharer(skb, a, stage);
		if (answer == STAGE_CONFORMS && *flags & RULE_GUARANTEE) {
			answer = ask_guarantee(cold_of(at.params)->guarantee, a->phase, a->now, a->bytes, false);
			if (answer == STAGE_CONFORMS)
				a->guaranteed = height;
			if (answer == STAGE_REFUSES)
				answer = STAGE_CONFORMS;
		}
	}
	a->member = stage->id;
	return answer;
}

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

/* Charges a packet to a pool that it has tested. */
static __always_inline void charge_stage(const struct ascent *a, __u32 height, const struct stage *stage)
{
	struct limit_at at = { .rule = rule_of(stage->id), .ticks = a->now, .v = stage->v };

	if (!at.rule)
		return;
	at.params = params_of(at.rule, index_at(READ_ONCE(at.rule->version), a->phase));
	charge_one(&at, a->bytes);
	if (stage->sharer)
		charge_tested_sharer(stage->id, a->phase, stage->sharer, a->bytes, stage->weight);
	else if (at.params->flags & RULE_SHARES)
		skip_sharers(cold_of(at.params), a->bytes);
	if (a->guaranteed <= height && at.params->flags & RULE_GUARANTEE)
		ask_guarantee(cold_of(at.params)->guarantee, a->phase, a->now, a->bytes, true);
}

#endif
