/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The bucket of a rule or of its shadow: whether a packet conforms to it, and its charge. */
#ifndef SHAPECTL_CHARGE_H
#define SHAPECTL_CHARGE_H

#include "fair.h"

enum verdict {
	VERDICT_PASS,
	VERDICT_EXCESS,	 /* the rule has no room, */
	VERDICT_REFUSED, /* or a pool above it */
	VERDICT_MARK,
	VERDICT_DELAY, /* conforms, and is queued */
	VERDICT_CONTENDED, /* the bucket could not be updated in time */
	VERDICT_AGAIN, /* another CPU has just changed the bucket: try again */
	VERDICT_LATE, /* a fair clock must be advanced first */
};

/*
 * Packets of all sizes share the bucket of a rule with shares, and a pool. A small one would always find room before a large
 * one. So a large packet conforms if one of SHARED_BYTES would, and is charged as a whole.
 */
static __always_inline __u64 tested(const struct work *w, __u32 flags)
{
	__u64 bytes = w->bytes, cost = w->cost;

	return flags & (RULE_SHARES | RULE_POOL) && bytes > SHARED_BYTES ? (__u64)SHARED_BYTES << UNIT_BITS : cost;
}

/* Whether a packet conforms to the bucket of a stage: to an empty one, as most are, by any algorithm. */
static __always_inline bool conforms(const struct stage *s, __u32 flags, __u64 least)
{
	__u64 v = s->start - s->level;

	if (!s->level)
		return true;
	return flags & RULE_LEAKY ? leaky(s->limit, v, least, s->start) : gcra(s->limit, v, least, s->start);
}

/* Whether an excess packet may be marked: marked packets may fill the bucket to twice its limit. */
static __always_inline bool may_mark(const struct work *w, const struct stage *s, __u32 flags)
{
	return flags & RULE_ECN && w->ect && s->level + w->cost <= 2 * s->limit;
}

static __always_inline void penalise(const struct work *w, const struct stage *s, const struct params *params, struct bucket *b)
{
	__u64 tat = leaky_penalty(cold_of(params), s->start - s->level, s->start);

	if (tat != s->start)
		set_tat(b, s->tat, tat, w->now);
}

/* Charges the shared bucket of a stage that was looked at, if it has room. The spill bucket has neither marks nor a penalty. */
static __always_inline enum verdict charge_shared(const struct work *w, struct stage *s, struct rule *rule, const struct params *params,
						  __u32 flags)
{
	__u64 least = tested(w, flags);

	if (conforms(s, flags, least) && take(&rule->shared, s, w->now, w->cost, least))
		return VERDICT_PASS;
	if (may_mark(w, s, flags)) {
		charge_to(&rule->shared, s, w->now, w->cost);
		return VERDICT_MARK;
	}
	if (flags & RULE_PENALTY)
		penalise(w, s, params, &rule->shared);
	return VERDICT_EXCESS;
}

/* Looks at the bucket in the slot of a stage. Returns false if another CPU has it, or it has another key by now. */
__noinline int look_at_slot(__u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, i);
	const struct rule *rule = rule_of(s->id);
	const struct bucket *b = bucket_of(s->slot);

	if (!rule)
		return false;
	look_at(s, rule, params_of(rule, s->set), s->set, b, w->now);
	return is_still(b, s->slot, s->tat);
}

/* Charges the bucket in the slot of a stage as charge_shared does, by CAS: the slot may get another key. */
__noinline int charge_slot(__u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, i);
	const struct rule *rule = rule_of(s->id);
	struct bucket *b = bucket_of(s->slot);
	enum verdict verdict = VERDICT_PASS;

	if (!rule || !look_at_slot(cpu, i))
		return VERDICT_AGAIN;
	if (!conforms(s, s->flags, tested(w, s->flags))) {
		verdict = VERDICT_MARK;
		if (!may_mark(w, s, s->flags)) {
			if (s->flags & RULE_PENALTY)
				penalise(w, s, params_of(rule, s->set), b);
			return VERDICT_EXCESS;
		}
	}
	return set_tat(b, s->tat, s->start + w->cost, w->now) ? verdict : VERDICT_AGAIN;
}

/* Attempts to charge the bucket of the key that was sought, which gets a slot if it has none. */
__noinline int charge_key(__u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, i);

	s->slot = find_handle(w->hash);
	if (s->slot)
		return charge_slot(cpu, i);
	switch (get_slot(cpu)) {
	case GOT_CHARGED:
		s->slot = find_handle(w->hash);
		s->level = 0;
		return VERDICT_PASS;
	case GOT_NO_ROOM:
		return VERDICT_CONTENDED;
	}
	return VERDICT_AGAIN;
}

/* Charges a packet to the bucket of a stage, of its key, or to the spill bucket if the key cannot get a slot. */
__noinline int decide(struct __sk_buff *skb, __u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, i);
	struct rule *rule = rule_of(s->id);
	enum verdict verdict = VERDICT_AGAIN;
	const struct params *params;
	__u32 flags = s->flags, tries;

	if (!rule)
		return VERDICT_CONTENDED;
	if (flags & RULE_UNLIMITED)
		return VERDICT_PASS;
	params = params_of(rule, s->set);
	if (flags & RULE_EACH) {
		seek_at(skb, cpu, s, params);
		w->key.id = s->id;
		/* After an edit, a new key may have less room than the limit. */
		w->opening = params->flags & RULE_EDITED || s->set & SET_REVERTED ? 0 : w->cost;
#pragma unroll
		for (tries = 0; tries < TRIES; tries++) {
			verdict = charge_key(cpu, i);
			if (verdict != VERDICT_AGAIN)
				break;
		}
		if (verdict < VERDICT_CONTENDED)
			return verdict;
		__sync_fetch_and_add(&rule->spilled_packets, w->packets);
		look_at_limit(cpu, i, s->id);
		flags &= ~(RULE_ECN | RULE_PENALTY);
	}
	return charge_shared(w, s, rule, params, flags);
}

#endif
