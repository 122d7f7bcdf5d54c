/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The bucket of a rule or of its shadow: whether a packet conforms to it, and its charge. */
#ifndef SHAPECTL_CHARGE_H
#define SHAPECTL_CHARGE_H

#include "fair.h"

enum verdict {
	VERDICT_PASS,
	VERDICT_MARK = FATE_MARKED,
	VERDICT_DELAY = FATE_DELAYED, /* conforms, and is queued */
	VERDICT_BEYOND = FATE_PASSED, /* the rule has no room, but passes what is beyond it */
	VERDICT_EXCESS,	 /* it does not, */
	VERDICT_REFUSED, /* or a pool above has no room */
	VERDICT_CONTENDED, /* the bucket could not be updated in time */
	VERDICT_AGAIN, /* another CPU has just changed the bucket: try again */
	VERDICT_LATE, /* a fair clock must be advanced first */
};

static __always_inline bool is_excess(enum verdict verdict)
{
	return verdict == VERDICT_EXCESS || verdict == VERDICT_BEYOND;
}

/* Whether a packet passes by the verdict of its rule, which has these flags. */
static __always_inline bool passes(enum verdict verdict, __u32 flags)
{
	return verdict < VERDICT_EXCESS || (verdict == VERDICT_CONTENDED && !(flags & RULE_FAIL_CLOSED));
}

/*
 * The units that must have room. Packets of all sizes share the bucket of a rule with shares, and a pool. A small one would always
 * find room before a large one. So a large packet conforms if one of SHARED_BYTES would, and is charged as a whole.
 */
static __always_inline __u64 tested(const struct work *w, __u32 flags)
{
	return flags & (RULE_SHARES | RULE_POOL) ? w->least : w->cost;
}

/* Whether a packet conforms to the bucket of a stage: to an empty one, as most are, by any algorithm. */
static __always_inline bool conforms(const struct stage *s, __u32 flags, __u64 least)
{
	__u64 v = s->start - s->level;

	if (!s->level)
		return true;
	return flags & RULE_LEAKY ? leaky(s->limit, v, least, s->start) : gcra(s->limit, v, least, s->start);
}

/*
 * What happens to a packet that does not conform to the bucket of a stage. Marked packets may fill the bucket to twice its limit.
 * Any other one begins the penalty.
 */
static __always_inline enum verdict exceed(struct __sk_buff *skb, const struct work *w, const struct stage *s,
					   const struct params *params, __u32 flags, struct bucket *b)
{
	__u64 tat;

	if (flags & RULE_ECN && s->level + w->cost <= 2 * s->limit && ecn_of(skb, w->ip))
		return VERDICT_MARK;
	if (flags & RULE_PENALTY) {
		tat = leaky_penalty(cold_of(params), s->start - s->level, s->start);
		if (tat != s->start)
			set_tat(b, s->tat, tat, w->now);
	}
	return flags & RULE_PASS ? VERDICT_BEYOND : VERDICT_EXCESS;
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

/* Looks at the bucket of the packet's key in the limit of a stage. A key that has no slot may get one, for the next attempt. */
__noinline int look_at_key(struct __sk_buff *skb, __u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, i);
	const struct rule *rule = rule_of(s->id);
	const struct params *params;
	struct bucket *b;

	if (!rule)
		return GOT_NONE;
	params = params_of(rule, s->set);
	s->slot = seek_at(skb, cpu, s, params);
	if (!s->slot) {
		w->key.id = s->id;
		return get_slot(cpu);
	}
	b = bucket_of(s->slot);
	look_at(s, rule, params, s->set, b, w->now);
	return is_still(b, s->slot, s->tat) ? GOT_SLOT : GOT_NONE;
}

/* Attempts to charge the bucket of the packet's key. By CAS: the slot may get another key. */
__noinline int charge_key(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	struct stage *s = w->stage;
	const struct rule *rule = rule_of(s->id);
	enum verdict verdict = VERDICT_PASS;
	const struct params *params;
	struct bucket *b;
	int got;

	if (!rule)
		return VERDICT_AGAIN;
	params = params_of(rule, s->set);
	got = look_at_key(skb, cpu, 0);
	if (got != GOT_SLOT)
		return got == GOT_NO_SLOT ? VERDICT_CONTENDED : VERDICT_AGAIN;
	b = bucket_of(s->slot);
	if (!conforms(s, s->flags, tested(w, s->flags)))
		verdict = exceed(skb, w, s, params, s->flags, b);
	if (is_excess(verdict))
		return verdict;
	return set_tat(b, s->tat, s->start + w->cost, w->now) ? verdict : VERDICT_AGAIN;
}

/* Charges the bucket of the packet's key. VERDICT_CONTENDED if that gets no slot: then the spill bucket was looked at. */
__noinline int charge_each(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	struct stage *s = w->stage;
	struct rule *rule = rule_of(s->id);
	const struct params *params;
	int verdict;
	__u32 tries;

	if (!rule)
		return VERDICT_CONTENDED;
	params = params_of(rule, s->set);
	for (tries = 0; tries < TRIES; tries++) {
		verdict = charge_key(skb, cpu);
		if (verdict != VERDICT_AGAIN)
			break;
	}
	if (verdict < VERDICT_CONTENDED)
		return verdict;
	__sync_fetch_and_add(&rule->spilled_packets, w->packets);
	s->slot = 0;
	look_at(s, rule, params, s->set, &rule->shared, w->now);
	return VERDICT_CONTENDED;
}

/*
 * Charges a packet to the bucket of its rule, or to that of its key. Without a slot, it is charged to the spill bucket, which has
 * neither marks nor a penalty.
 */
__noinline int decide(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	struct stage *s = w->stage;
	struct rule *rule = rule_of(s->id);
	enum verdict verdict;
	__u32 flags = s->flags;

	if (!rule || flags & RULE_UNLIMITED)
		return VERDICT_PASS;
	if (flags & RULE_EACH) {
		verdict = charge_each(skb, cpu);
		if (verdict < VERDICT_CONTENDED)
			return verdict;
		flags &= ~(RULE_ECN | RULE_PENALTY);
	}
	if (conforms(s, flags, tested(w, flags))) {
		prepare(&rule->shared, cpu, 0, w->now);
		if (take(&rule->shared, s, w->cost) || keeps(&rule->shared, s, w->cost, tested(w, flags)))
			return VERDICT_PASS;
	}
	verdict = exceed(skb, w, s, params_of(rule, s->set), flags, &rule->shared);
	if (verdict == VERDICT_MARK)
		charge_to(&rule->shared, s, cpu, 0, w->now, w->cost);
	return verdict;
}

#endif
