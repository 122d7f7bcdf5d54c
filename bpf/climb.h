/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Pools: buckets that rules and other pools draw from. A pool is a rule without a
 * prefix. A packet passes if its rule and all pools above conform, and is then charged
 * to all of them. If one refuses, nothing is charged.
 *
 * First the rule is tested, then all pools from the lowest on. Then the rule's bucket decides.
 * Then the pools are charged, whatever their level is by now: packets of other
 * CPUs may have come in between, one of each CPU. What they overshoot stays charged, so
 * the long run is exact. A refund would not be exact, because a bucket drains meanwhile.
 *
 * A guarantee is a limit of its own. A packet that conforms to it passes all pools above,
 * and is charged to them even beyond their capacity. The guarantees within a pool are not
 * above its rate, so this debt is bounded by their bursts.
 */
#ifndef SHAPECTL_CLIMB_H
#define SHAPECTL_CLIMB_H

#include "charge.h"

/* Records a host or subnet that a shadow would have affected. */
static __noinline int note_affected(struct __sk_buff *skb, const struct work *w, const struct params *params)
{
	struct affected first = { .packets = w->packets, .bytes = w->bytes }, *value;
	struct affected_key key = { .salt = params->salt, .family = w->ip & IS_IPV6 ? 6 : 4 };

	if (far_address(skb, w->ip, (struct address *)key.addr))
		return 0;
	mask_far(key.addr, params->flags, cold_of(params)->each_bits);
	value = bpf_map_lookup_elem(&affected, &key);
	if (!value && bpf_map_update_elem(&affected, &key, &first, BPF_NOEXIST))
		value = bpf_map_lookup_elem(&affected, &key);
	if (value) {
		__sync_fetch_and_add(&value->packets, first.packets);
		__sync_fetch_and_add(&value->bytes, first.bytes);
	}
	return 0;
}

/* Debt that guarantees cannot reach: levels must stay below 2^62 units. */
#define MAX_DEBT (1ULL << 60)

#define NOT_GUARANTEED STAGES

/* The units that a packet counts in the shared bucket of a guarantee of each key. Rounds up. */
static __always_inline __u64 part_of(const struct work *w, const struct params *params)
{
	__u32 members = cold_of(params)->members;

	return members ? w->cost / members + 1 : 0;
}

/* Whether a packet conforms to a guarantee. A key without a slot is guaranteed what all are together. */
__noinline int is_guaranteed(struct __sk_buff *skb, __u32 cpu, __u32 id)
{
	struct work *w = work_of(cpu);
	struct stage *g = stage_of(w, STAGE_SECOND);
	const struct rule *rule = rule_of(id);
	const struct params *params;

	if (!rule || !look_at_limit(cpu, STAGE_SECOND, id))
		return false;
	if (g->flags & RULE_UNLIMITED)
		return true;
	params = params_of(rule, g->set);
	if (g->flags & RULE_EACH) {
		if (g->level && g->level + part_of(w, params) > g->limit)
			return false;
		g->slot = seek_at(skb, cpu, g, params);
		if (!g->slot)
			return true;
		if (!look_at_slot(cpu, STAGE_SECOND))
			return false;
	}
	return conforms(g, 0, tested(w, g->flags));
}

/* Charges a guarantee. */
__noinline int charge_guarantee(struct __sk_buff *skb, __u32 cpu, __u32 id)
{
	struct work *w = work_of(cpu);
	struct stage *g = stage_of(w, STAGE_SECOND);
	const struct params *params;
	struct rule *rule = rule_of(id);
	struct counters *c;

	if (!rule || !look_at_limit(cpu, STAGE_SECOND, id) || g->flags & RULE_UNLIMITED)
		return 0;
	params = params_of(rule, g->set);
	if (g->level <= MAX_DEBT)
		charge_to(&rule->shared, g, w->now, g->flags & RULE_EACH ? part_of(w, params) : w->cost);
	if (g->flags & RULE_EACH) {
		g->slot = seek_at(skb, cpu, g, params);
		if (!g->slot) {
			w->key.id = id;
			w->opening = w->cost;
			get_slot(cpu);
		} else if (look_at_slot(cpu, STAGE_SECOND)) {
			set_tat(bucket_of(g->slot), g->tat, g->start + w->cost, w->now);
		}
	}
	c = counters_of(rule);
	count(&c->passed_packets, &c->passed_bytes, w);
	return 0;
}

/* The id of the second limit of a stage. */
static __always_inline __u32 second_at(const struct stage *s)
{
	const struct rule *rule = rule_of(s->id);

	return rule ? cold_of(params_of(rule, s->set))->second : 0;
}

/* Tests a stage that is more than a bucket, for its own sake and for what is guaranteed there. */
__noinline int test_special(struct __sk_buff *skb, __u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, i);
	int verdict;

	if (i <= w->guaranteed) {
		if (i && s->level + tested(w, RULE_POOL) > s->limit) {
			if (!(s->flags & RULE_ECN) || s->level + w->cost > 2 * s->limit || !ecn_of(skb, w->ip))
				return VERDICT_REFUSED;
			w->marks |= 1U << (i & 31);
		}
		if (s->flags & RULE_SHARES) {
			s->weight = weight_of(w, i);
			find_sharer(skb, cpu, s);
			verdict = judge_stage(skb, cpu, i);
			if (verdict == SHARE_LATE)
				return VERDICT_LATE;
			if (verdict >= BEYOND_SHARE)
				return VERDICT_REFUSED;
			if (verdict != WITHIN_SHARE && !(s->flags & RULE_SPARSE && is_sparse(skb, cpu, i)))
				return VERDICT_REFUSED;
		}
	}
	if (!(s->flags & RULE_SHARES))
		w->load = HEAVY;
	if (s->flags & RULE_GUARANTEE && w->guaranteed == NOT_GUARANTEED && is_guaranteed(skb, cpu, second_at(s)))
		w->guaranteed = i;
	return VERDICT_PASS;
}

/* What a stage may be beside a bucket. */
#define SPECIAL_TEST (RULE_ABSENT | RULE_SHARES | RULE_GUARANTEE | RULE_ECN)
#define SPECIAL_CHARGE (RULE_ABSENT | RULE_SHARES | RULE_GUARANTEE | RULE_DELAY | RULE_SHADOW)

/* Tests the next pool. */
__noinline int test_pool(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	const struct stage *s;

	if (!look_up(cpu))
		return VERDICT_PASS;
	s = stage_of(w, w->top);
	if (unlikely(s->flags & SPECIAL_TEST))
		return s->flags & RULE_ABSENT ? VERDICT_PASS : test_special(skb, cpu, w->top);
	w->load = HEAVY;
	return s->level + tested(w, RULE_POOL) > s->limit && w->top <= w->guaranteed ? VERDICT_REFUSED : VERDICT_PASS;
}

/* Counts a packet in the shadow of a pool, and charges it there if it has room. */
__noinline int shadow_of_pool(struct __sk_buff *skb, __u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	const struct stage *s = stage_of(w, i);
	struct stage *to = stage_of(w, STAGE_SHADOW);
	struct rule *rule = rule_of(s->id);
	struct counters *c;

	if (!rule || !look_at_limit(cpu, STAGE_SHADOW, cold_of(params_of(rule, s->set))->shadow))
		return 0;
	rule = rule_of(to->id);
	if (!rule)
		return 0;
	c = counters_of(rule);
	if (to->level + tested(w, RULE_POOL) <= to->limit) {
		charge_to(&rule->shared, to, w->now, w->cost);
	} else {
		count(&c->passed_excess_packets, &c->passed_excess_bytes, w);
		note_affected(skb, w, params_of(rule, to->set));
	}
	count(&c->passed_packets, &c->passed_bytes, w);
	count_extra(rule, w);
	return 0;
}

/* Charges what a stage has beside its bucket. */
__noinline int charge_special(struct __sk_buff *skb, __u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	const struct stage *s = stage_of(w, i);
	struct counters *c;
	struct rule *rule;
	bool waits = false;

	if (s->flags & RULE_DELAY)
		waits = queue_at(skb, cpu, i);
	if (s->flags & RULE_SHARES)
		charge_share(skb, cpu, i);
	if (s->flags & RULE_GUARANTEE && w->guaranteed <= i)
		charge_guarantee(skb, cpu, second_at(s));
	if (HOOK(shadows) && i && s->flags & RULE_SHADOW)
		shadow_of_pool(skb, cpu, i);
	if (!i || !(waits || w->marks >> (i & 31) & 1))
		return 0;
	rule = rule_of(s->id);
	if (!rule)
		return 0;
	c = counters_of(rule);
	count(&c->passed_excess_packets, &c->passed_excess_bytes, w);
	if (w->marks >> (i & 31) & 1)
		c->marked_packets += w->packets;
	w->at = s->id;
	return 0;
}

/* Charges a pool. */
__noinline int charge_pool(struct __sk_buff *skb, __u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, i);
	struct rule *rule = rule_of(s->id);
	struct counters *c;

	if (!rule || s->flags & RULE_ABSENT)
		return 0;
	if (likely(s->level <= MAX_DEBT))
		charge_to(&rule->shared, s, w->now, w->cost);
	c = counters_of(rule);
	count(&c->passed_packets, &c->passed_bytes, w);
	count_extra(rule, w);
	if (unlikely(s->flags & SPECIAL_CHARGE || w->marks >> (i & 31) & 1))
		charge_special(skb, cpu, i);
	return 0;
}

/* Whether the bucket of a rule refuses a packet, as far as that is known before the charge. If so, sets the penalty. */
static __always_inline bool rule_refuses(struct __sk_buff *skb, __u32 cpu, struct work *w, struct stage *s, struct rule *rule)
{
	const struct params *params = params_of(rule, s->set);
	struct bucket *b;

	if (s->flags & RULE_UNLIMITED)
		return false;
	if (s->flags & RULE_EACH) {
		s->slot = seek_at(skb, cpu, s, params);
		if (!s->slot || !look_at_slot(cpu, 0))
			return false;
	}
	if (conforms(s, s->flags, tested(w, s->flags)) || may_mark(w, s, s->flags) || s->flags & RULE_PASS)
		return false;
	b = bucket_of(s->slot);
	if (s->flags & RULE_PENALTY) {
		if (s->slot)
			penalise(w, s, params, b);
		else
			penalise(w, s, params, &rule->shared);
	}
	return true;
}

/* Whether a packet passes by the verdict of its rule. */
static __always_inline bool passes(enum verdict verdict, __u32 flags)
{
	if (verdict == VERDICT_EXCESS)
		return flags & RULE_PASS;
	if (verdict == VERDICT_CONTENDED)
		return !(flags & RULE_FAIL_CLOSED);
	return verdict != VERDICT_REFUSED;
}

/* The verdict for a packet whose rule has shares, pools or a guarantee, before it is charged to anything. */
__noinline int ascend(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, 0);
	struct rule *rule = rule_of(w->id);
	int verdict = VERDICT_PASS, above;
	__u32 n;

	if (!rule)
		return VERDICT_PASS;
	w->guaranteed = NOT_GUARANTEED;
	w->marks = 0;
	w->load = HEAVY;
	w->top = 0;
	w->within = s->flags & RULE_WITHIN ? params_of(rule, s->set)->within + 1 : 0;
	if (rule_refuses(skb, cpu, w, s, rule))
		return VERDICT_EXCESS;
	if (s->flags & (RULE_SHARES | RULE_GUARANTEE)) {
		verdict = test_special(skb, cpu, 0);
		if (verdict == VERDICT_REFUSED)
			verdict = VERDICT_EXCESS;
		if (verdict == VERDICT_LATE || !passes(verdict, s->flags))
			return verdict;
		/* The rule passes what is beyond its share. */
		if (verdict == VERDICT_EXCESS && s->flags & RULE_GUARANTEE && is_guaranteed(skb, cpu, second_at(s)))
			w->guaranteed = 0;
	}
#pragma unroll
	for (n = 0; n < MAX_DEPTH; n++) {
		if (!w->within)
			break;
		above = test_pool(skb, cpu);
		if (above != VERDICT_PASS)
			return above;
	}
	return verdict;
}

/* Counts a packet that the last pool refused. */
__noinline int refuse(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	const struct stage *s = stage_of(w, w->top);
	struct rule *rule = rule_of(s->id);
	struct counters *c;

	if (!rule)
		return 0;
	w->at = s->id;
	c = counters_of(rule);
	count(&c->dropped_packets, &c->dropped_bytes, w);
	count_extra(rule, w);
	if (HOOK(shadows) && s->flags & RULE_SHADOW)
		shadow_of_pool(skb, cpu, w->top);
	return 0;
}

/* The verdict for a packet by its rule and the pools above, and the charges of what it passes. */
static __always_inline enum verdict climb_pools(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, 0);
	enum verdict verdict;
	__u32 i;

	if (!HOOK(pools) || !(s->flags & (RULE_SHARES | RULE_GUARANTEE | RULE_WITHIN))) {
		verdict = decide(skb, cpu, 0);
		if (verdict == VERDICT_PASS && s->flags & RULE_DELAY)
			queue_at(skb, cpu, 0);
		return verdict;
	}
	verdict = ascend(skb, cpu);
	if (verdict == VERDICT_LATE) {
		keep_clocks(cpu);
		w->kept = true;
		verdict = ascend(skb, cpu);
	}
	if (verdict == VERDICT_REFUSED)
		refuse(skb, cpu);
	else if (verdict == VERDICT_PASS)
		verdict = decide(skb, cpu, 0);
	if (!passes(verdict, s->flags)) {
		w->marks = 0;
		return verdict;
	}
	if (verdict == VERDICT_EXCESS)
		s->flags &= ~RULE_SHARES;
	if (verdict != VERDICT_PASS)
		s->flags &= ~RULE_DELAY;
	if (s->flags & (RULE_SHARES | RULE_GUARANTEE | RULE_DELAY))
		charge_special(skb, cpu, 0);
#pragma unroll
	for (i = 1; i <= MAX_DEPTH; i++) {
		if (i > w->top)
			break;
		charge_pool(skb, cpu, i);
	}
	return verdict;
}

#endif
