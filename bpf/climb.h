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

#include "colours.h"

/* Records a host or subnet that a shadow would have affected. */
static __noinline int note_affected(struct __sk_buff *skb, const struct work *w, const struct params *params)
{
	struct affected first = { .packets = w->packets, .bytes = w->bytes }, *value;
	struct affected_key key = { .salt = params->salt, .family = w->ip & IS_IPV6 ? 6 : 4 };

	if (HOOK(nat) && params->flags & RULE_NAT) {
		seek(skb, bpf_get_smp_processor_id(), 0, RULE_NAT, 0);
		__builtin_memcpy(key.addr, w->key.src, sizeof(key.addr));
	} else if (far_address(skb, w->ip, (struct address *)key.addr)) {
		return 0;
	}
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

/* Finds the size of a packet on the wire, by the framing of a limit. */
static __always_inline void weigh(struct __sk_buff *skb, struct work *w, const struct params *params)
{
	__u64 wire = 1ULL << 32 | skb->len;

	if (unlikely(skb->gso_size || skb->vlan_present || params->flags & RULE_FRAMING))
		wire = measure(skb, w->ip, cold_of(params)->overhead, cold_of(params)->mpu);
	w->bytes = wire;
	w->packets = wire >> 32;
	w->cost = (wire & ~0U) << UNIT_BITS;
	w->least = lesser(wire & ~0U, SHARED_BYTES) << UNIT_BITS;
}

/* Charges a packet to the shadow of a pool, if it has one and that has room, and counts it there. */
__noinline int shadow_pool(struct __sk_buff *skb, __u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	const struct stage *s = stage_of(w, i);
	struct stage *to = stage_of(w, STAGE_SHADOW);
	struct rule *rule = rule_of(s->id);
	struct counters *c;

	if (!rule || !(s->flags & RULE_SHADOW) || !look(cpu, STAGE_SHADOW, cold_of(params_of(rule, s->set))->shadow))
		return 0;
	rule = rule_of(to->id);
	if (!rule)
		return 0;
	c = counters_of(rule);
	if (to->level + w->least <= to->limit) {
		charge_to(&rule->shared, to, cpu, STAGE_SHADOW, w->now, w->cost);
	} else {
		count(&c->passed_excess_packets, &c->passed_excess_bytes, w);
		note_affected(skb, w, params_of(rule, to->set));
	}
	count(&c->passed_packets, &c->passed_bytes, w);
	count_extra(rule, w);
	return 0;
}

/* Counts a packet for the shadow of its rule. */
static __always_inline void count_shadow(struct __sk_buff *skb, __u32 cpu, struct work *w, struct rule *rule, const struct params *params)
{
	__s32 action = READ_ONCE(w->action);
	struct counters *c = counters_on(rule, cpu);
	bool coloured = HOOK(colours) && params->flags & RULE_COLOURS, dropped = coloured && action == ACTION_DROP;
	bool excess = coloured ? action >= 0 && w->colour != GREEN : w->verdict == VERDICT_EXCESS;

	count_extra(rule, w);
	if (coloured && action < 0)
		c->contended_packets += w->packets;
	if (coloured ? dropped : excess)
		note_affected(skb, w, params);
	if (dropped) {
		count(&c->dropped_packets, &c->dropped_bytes, w);
		return;
	}
	if (excess)
		count(&c->passed_excess_packets, &c->passed_excess_bytes, w);
	count(&c->passed_packets, &c->passed_bytes, w);
}

/* Debt that guarantees cannot reach: levels must not be above 2^61 units. */
#define MAX_DEBT (1ULL << 60)

enum guaranteed {
	NOT_GUARANTEED = STAGES,
	NOT_JUDGED = -1, /* a fair clock is late, so no pool above tests the packet */
};

/* The units that a packet counts in the shared bucket of a guarantee of each key. Rounds up. */
static __always_inline __u64 part_of(const struct work *w, const struct params *params)
{
	__u32 members = cold_of(params)->members;

	return members ? w->cost / members + 1 : 0;
}

/* Whether a stage tests the packet: nothing below guarantees it, and no fair clock is late. */
static __always_inline bool is_tested(const struct work *w, __u32 i)
{
	return (__s32)i <= w->guaranteed;
}

/* Whether a packet conforms to a guarantee. A key without a slot is guaranteed what all are together. */
__noinline int is_guaranteed(struct __sk_buff *skb, __u32 cpu, __u32 id)
{
	struct work *w = work_of(cpu);
	struct stage *g = stage_of(w, STAGE_SECOND);
	const struct rule *rule = rule_of(id);
	const struct params *params;

	if (!rule || !look(cpu, STAGE_SECOND, id))
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

/* Attempts to charge the bucket of the packet's key in the guarantee that was looked at. */
__noinline int charge_guaranteed_key(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	const struct stage *g = stage_of(w, STAGE_SECOND);
	int got = look_at_key(skb, cpu, STAGE_SECOND);

	if (got != GOT_SLOT)
		return got;
	return set_tat(bucket_of(g->slot), g->tat, g->start + w->cost, w->now) ? GOT_CHARGED : GOT_NONE;
}

/* Charges a guarantee. */
__noinline int charge_guarantee(struct __sk_buff *skb, __u32 cpu, __u32 id)
{
	struct work *w = work_of(cpu);
	struct stage *g = stage_of(w, STAGE_SECOND);
	const struct params *params;
	struct rule *rule = rule_of(id);
	struct counters *c;
	int got = GOT_NONE;
	__u32 tries;

	if (!rule || !look(cpu, STAGE_SECOND, id) || g->flags & RULE_UNLIMITED)
		return 0;
	params = params_of(rule, g->set);
	if (g->level <= MAX_DEBT)
		charge_to(&rule->shared, g, cpu, STAGE_SECOND, w->now, g->flags & RULE_EACH ? part_of(w, params) : w->cost);
	if (g->flags & RULE_EACH)
		for (tries = 0; tries < TRIES / 4 && got == GOT_NONE; tries++)
			got = charge_guaranteed_key(skb, cpu);
	c = counters_of(rule);
	count(&c->passed_packets, &c->passed_bytes, w);
	return 0;
}

/* Flags of a stage that is more than a bucket: for its test, for its charge, and of a rule for its own bucket. */
#define SPECIAL_TEST (RULE_ABSENT | RULE_SHARES | RULE_GUARANTEE | RULE_ECN | RULE_LEASED | RULE_ALSO)
#define SPECIAL_CHARGE (RULE_ABSENT | RULE_GUARANTEE | RULE_DELAY)
#define SPECIAL_RULE (RULE_UNLIMITED | RULE_PENALTY | RULE_ECN | RULE_PASS | RULE_EACH)

/* Tests a stage that is more than a bucket, for its own sake and for what is guaranteed there. */
__noinline int test_special(struct __sk_buff *skb, __u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, i);
	struct rule *rule = rule_of(s->id);
	int verdict = VERDICT_PASS, share;

	if (!rule || s->flags & RULE_ABSENT) {
		s->flags = RULE_ABSENT;
		return VERDICT_PASS;
	}
	if (s->flags & RULE_LEASED)
		look(cpu, i, s->id);
	if (i && is_tested(w, i) && s->level + w->least > s->limit) {
		if (exceed(skb, w, s, params_of(rule, s->set), s->flags, &rule->shared) != VERDICT_MARK)
			return VERDICT_REFUSED;
		w->marks |= 1U << (i & 31);
	}
	/* The load of the sharer below counts only if there is one. */
	if (!i || !(stage_of(w, i - 1)->flags & RULE_SHARES))
		w->load = HEAVY;
	s->share = cold_of(params_of(rule, s->set))->share;
	if (s->flags & RULE_SHARES && is_tested(w, i)) {
		share = judge_stage(skb, cpu, w, i, s, params_of(rule, s->set));
		if (share == SHARE_LATE) {
			w->guaranteed = NOT_JUDGED;
			return VERDICT_PASS;
		}
		if (share >= BEYOND_SHARE || (share != WITHIN_SHARE && !(s->flags & RULE_SPARSE && is_sparse(skb, cpu, i))))
			verdict = i ? VERDICT_REFUSED : s->flags & RULE_PASS ? VERDICT_BEYOND : VERDICT_EXCESS;
		if (!passes(verdict, s->flags))
			return verdict;
	}
	if (s->flags & RULE_GUARANTEE && w->guaranteed == NOT_GUARANTEED &&
	    is_guaranteed(skb, cpu, cold_of(params_of(rule, s->set))->second))
		w->guaranteed = i;
	return verdict;
}

/* Tests a rule whose bucket is not one that drops what is beyond it, as far as the verdict is known before the charge. */
__noinline int test_rule(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	struct stage *s = w->stage;
	struct rule *rule = rule_of(s->id);
	const struct params *params;
	__u32 flags = s->flags;
	struct bucket *b;

	if (!rule || flags & (RULE_UNLIMITED | RULE_PASS))
		return VERDICT_PASS;
	params = params_of(rule, s->set);
	b = &rule->shared;
	if (flags & RULE_EACH) {
		/* The charge decides, but for what comes before it: a penalty begins also if another limit refuses the packet. */
		if (!(flags & (RULE_SHARES | RULE_GUARANTEE | RULE_WITHIN)) && (flags & (RULE_PENALTY | RULE_ALSO)) != (RULE_PENALTY | RULE_ALSO))
			return VERDICT_PASS;
		s->slot = seek_at(skb, cpu, s, params);
		if (!s->slot || !look_at_slot(cpu, 0))
			return VERDICT_PASS;
		b = bucket_of(s->slot);
	}
	if (conforms(s, flags, tested(w, flags)) || exceed(skb, w, s, params, flags, b) == VERDICT_MARK)
		return VERDICT_PASS;
	return VERDICT_EXCESS;
}

/* Whether a pool is tested and charged by calls. Few packets have more than six pools. */
static __always_inline bool is_apart(__u32 i)
{
	return i > 6 || HOOK(rule_maps) > 1;
}

/*
 * Tests a packet in the pool of a stage. Returns the id plus one of the next pool above, or 0 if it was the last one or work.verdict is
 * known.
 */
static __always_inline __u32 test_pool(struct __sk_buff *skb, __u32 cpu, struct work *w, __u32 i, const struct params *params)
{
	const struct stage *s = stage_of(w, i);
	enum verdict verdict;

	w->top = i;
	if (unlikely(params->flags & SPECIAL_TEST)) {
		verdict = test_special(skb, cpu, i);
		if (HOOK(also) && verdict == VERDICT_PASS && s->flags & RULE_ALSO && is_tested(w, i) && !conforms_also(skb, cpu, i))
			verdict = VERDICT_REFUSED;
		if (verdict != VERDICT_PASS) {
			w->verdict = verdict;
			return 0;
		}
	} else if (unlikely(READ_ONCE(s->level) + w->least > s->limit) && is_tested(w, i)) {
		w->verdict = VERDICT_REFUSED;
		return 0;
	}
	return params->within;
}

/* Puts a pool on a stage, and tests it. */
static __always_inline __u32 climb_to(struct __sk_buff *skb, __u32 cpu, struct work *w, __u32 i, __u32 id)
{
	struct stage *s = stage_of(w, i);
	const struct rule *rule = rule_of(id);
	const struct params *params;

	if (!rule)
		return 0;
	params = place(w, s, id, rule);
	look_at(s, rule, params, s->set, &rule->shared, w->now);
	return test_pool(skb, cpu, w, i, params);
}

/* The same by calls. The verifier follows what is in a loop for each pool, and for each map that a rule may be in. */
__noinline __u32 climb_apart(struct __sk_buff *skb, __u32 cpu, __u32 i, __u32 id)
{
	struct work *w = work_of(cpu);
	const struct rule *rule = rule_of(id);

	if (!rule || !look(cpu, i, id))
		return 0;
	return test_pool(skb, cpu, w, i, params_of(rule, READ_ONCE(stage_of(w, i)->set)));
}

/* Tests the pools above a rule, from the lowest on, which has the id next - 1. The verdict stays that of the rule if all pass the packet. */
static __always_inline void ascend(struct __sk_buff *skb, __u32 cpu, struct work *w, __u32 next)
{
	__u32 i;

	for (i = 1; i <= MAX_DEPTH; i++) {
		if (!next)
			break;
		next = is_apart(i) ? climb_apart(skb, cpu, i, next - 1) : climb_to(skb, cpu, w, i, next - 1);
	}
	if (w->guaranteed == NOT_JUDGED)
		w->verdict = VERDICT_LATE;
}

/*
 * Charges a packet to a stage that is more than a bucket and its sharers, or one that is more than a packet, marked or guaranteed: to
 * the bucket of a pool, and to what these flags say.
 */
__noinline int charge_special(struct __sk_buff *skb, __u32 cpu, __u32 i, __u32 flags)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, i);
	struct rule *rule = rule_of(s->id);
	bool waits = false, marked;
	struct counters *c;

	if (!rule || s->flags & RULE_ABSENT)
		return 0;
	if (i && s->level <= MAX_DEBT)
		charge_to(&rule->shared, s, cpu, i, w->now, w->cost);
	if (flags & RULE_DELAY)
		waits = queue_at(skb, cpu, i, skips_queue(skb, cpu, i));
	if (flags & RULE_GUARANTEE && w->guaranteed <= (__s32)i)
		charge_guarantee(skb, cpu, cold_of(params_of(rule, s->set))->second);
	if (!i)
		return 0;
	c = counters_on(rule, cpu);
	count(&c->passed_packets, &c->passed_bytes, w);
	count_extra(rule, w);
	marked = w->marks >> (i & 31) & 1;
	if (!waits && !marked)
		return 0;
	count(&c->passed_excess_packets, &c->passed_excess_bytes, w);
	if (marked)
		c->marked_packets += w->packets;
	w->at = s->id;
	return 0;
}

/* Counts a packet that the last pool refused. */
__noinline int refuse(__u32 cpu)
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
	return 0;
}

/* Charges a packet to the pools above its rule. */
static __always_inline void charge_pools(struct __sk_buff *skb, __u32 cpu, struct work *w)
{
	struct counters *c;
	struct rule *rule;
	struct stage *s;
	__u32 i, flags, special = SPECIAL_CHARGE;

	if (unlikely(w->marks || w->packets > 1 || w->guaranteed != NOT_GUARANTEED))
		special = ~0U;
	for (i = 1; i <= MAX_DEPTH; i++) {
		if (i > w->top)
			break;
		s = stage_of(w, i);
		flags = s->flags;
		if (HOOK(also) && unlikely(flags & RULE_ALSO))
			charge_also(skb, cpu, i);
		if (unlikely(flags & RULE_SHARES))
			charge_share(skb, cpu, i);
		if (is_apart(i) || unlikely(flags & special)) {
			charge_special(skb, cpu, i, flags);
			continue;
		}
		rule = rule_of(s->id);
		if (!rule)
			break;
		charge_to(&rule->shared, s, cpu, i, w->now, w->cost);
		c = counters_on(rule, cpu);
		count(&c->passed_packets, &c->passed_bytes, w);
	}
}

/* Finds the verdict for a packet by its rule and the pools above, and charges what it passes. */
static __always_inline void climb_pools(struct __sk_buff *skb, __u32 cpu, struct work *w, struct rule *rule, const struct params *params)
{
	struct stage *s = w->stage;
	enum verdict verdict = VERDICT_PASS;
	__u32 flags = params->flags;

	w->guaranteed = NOT_GUARANTEED;
	if (unlikely(flags & SPECIAL_RULE))
		verdict = test_rule(skb, cpu);
	else if (unlikely(s->level && !conforms(s, flags, tested(w, flags))))
		verdict = VERDICT_EXCESS;
	w->verdict = verdict;
	if (HOOK(also) && unlikely(flags & RULE_ALSO) && READ_ONCE(w->verdict) == VERDICT_PASS && !conforms_also(skb, cpu, 0)) {
		w->verdict = flags & RULE_PASS ? VERDICT_BEYOND : VERDICT_EXCESS;
		w->load = HEAVY; /* no share of the rule judges the packet */
	}
	if (HOOK(pools) && unlikely(flags & (RULE_SHARES | RULE_GUARANTEE)) && READ_ONCE(w->verdict) == VERDICT_PASS)
		w->verdict = test_special(skb, cpu, 0);
	if (HOOK(pools) && READ_ONCE(w->verdict) < VERDICT_EXCESS)
		ascend(skb, cpu, w, params->within);
	/* From memory, so that the verifier goes on once and not for each way to get here. */
	verdict = READ_ONCE(w->verdict);
	flags = READ_ONCE(s->flags);
	if (likely(verdict == VERDICT_PASS)) {
		if (unlikely(flags & SPECIAL_RULE)) {
			w->verdict = decide(skb, cpu);
		} else {
			prepare(&rule->shared, cpu, 0, w->now);
			if (unlikely(!take(&rule->shared, s, w->cost)) && !keeps(&rule->shared, s, w->cost, tested(w, flags)))
				w->verdict = VERDICT_EXCESS;
		}
	}
	verdict = READ_ONCE(w->verdict);
	if (unlikely(verdict != VERDICT_PASS)) {
		if (verdict == VERDICT_LATE)
			return;
		if (verdict == VERDICT_REFUSED)
			refuse(cpu);
		if (!passes(verdict, flags)) {
			w->marks = 0;
			if (verdict != VERDICT_REFUSED)
				w->top = 0;
			return;
		}
		if (verdict == VERDICT_BEYOND)
			flags &= RULE_GUARANTEE;
	}
	if (HOOK(pools) && unlikely(flags & RULE_SHARES))
		charge_share(skb, cpu, 0);
	if (HOOK(also) && unlikely(flags & RULE_ALSO))
		charge_also(skb, cpu, 0);
	if (unlikely(flags & SPECIAL_CHARGE))
		charge_special(skb, cpu, 0, flags);
	if (HOOK(pools))
		charge_pools(skb, cpu, w);
}

#endif
