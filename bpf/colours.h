/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Rules whose packets get colours: two buckets, and an action for each colour. Each meter only decides; this file charges.
 *
 * The first bucket is that of the CIR, the second one that of the limit beside it. They are charged one after the other,
 * each by a CAS: first the second one, then for a green packet the first one. By the clock of a packet, levels only rise.
 * So if a packet has no room, it has none later. A green packet that loses its room in the first bucket in between is
 * yellow, as it has what a yellow packet takes. Only with RFC 2697 it may be red, and gives that back. Until it is charged
 * to the first bucket, it is only in the total. So yellow packets may have less room by its size, but never more.
 */
#ifndef SHAPECTL_COLOURS_H
#define SHAPECTL_COLOURS_H

#include "also.h"

/*
 * The colour of a packet of the size cost, from the levels of its two buckets. It came with the colour in, GREEN without colours
 * from outside.
 *
 *	RFC 2697	green if level + cost <= CBS; else yellow if level2 + cost <= min(level, CBS) + EBS; else red
 *	RFC 2698	red if level2 + cost > PBS; else yellow if level + cost > CBS; else green
 *	RFC 4115	green if level + cost <= CBS; else yellow if level2 + cost <= EBS; else red
 *
 * A token bucket of an RFC has its size less the level here. The first limit is the CBS, the second one the PBS or EBS. With
 * RFC 2697 that is CBS + EBS, and level2 is CBS + EBS - Tc - Te, to which green packets add, too: as a token that does not go to Tc
 * goes to Te, both levels fall at the CIR until they are 0. One bucket with two thresholds would be wrong: yellow packets would
 * delay green ones. Marks or a penalty before a change may leave level above CBS, or above level2. That is no room for E.
 */
static __always_inline enum colour meter(__u32 flags, enum colour in, __u64 cost, __u64 level, __u64 limit, __u64 *level2, __u64 limit2)
{
	__u64 more, no_green, no_yellow; /* 1 or 0: without branches, as levels are */

	if (flags & RULE_SRTCM) {
		more = level - *level2;
		*level2 += more & ((more >> 63) - 1);
		more = limit - level;
		limit2 -= more & ((more >> 63) - 1);
	}
	no_green = (limit - level - cost) >> 63 | (in != GREEN);
	no_yellow = (limit2 - *level2 - cost) >> 63 | (in == RED);
	if (flags & RULE_TRTCM)
		return no_yellow * RED + (no_green & ~no_yellow);
	return no_green * (YELLOW + no_yellow);
}

/*
 * Attempts to give a packet its colour and to charge its two buckets, which are in a slot or shared. Returns false if another CPU
 * was faster.
 */
static __always_inline bool colour_by(struct work *w, const struct stage *first, struct bucket *b,
				      const struct stage *second, struct bucket *b2)
{
	__u64 level2 = second->level, v2 = second->start - second->level, cost = w->cost;

	if (!is_still(b, first->slot, first->tat) || !is_still(b2, second->slot, second->tat))
		return false;
	if (w->paid)
		level2 = level2 > cost ? level2 - cost : 0;
	w->colour = meter(first->flags, w->colour_in, cost, first->level, first->limit, &level2, second->limit);
	if (w->colour == RED) {
		/* What has drained meanwhile is not given back. */
		if (w->paid && second->level >= cost &&
		    __sync_val_compare_and_swap(&b2->tat, second->tat, second->tat - cost) != second->tat)
			return false;
		w->paid = false;
		return true;
	}
	if (!w->paid && !(w->colour == GREEN && first->flags & RULE_RFC4115)) {
		if (!set_tat(b2, second->tat, v2 + level2 + cost, w->now))
			return false;
		w->paid = true;
	}
	return w->colour != GREEN || set_tat(b, first->tat, first->start + cost, w->now);
}

/* An attempt to give a packet its colour, by the buckets of its key or the shared ones. */
__noinline int colour_pair(struct __sk_buff *skb, __u32 cpu, __u32 each)
{
	struct work *w = work_of(cpu);
	struct stage *first = w->stage, *second = stage_of(w, STAGE_SECOND);
	struct rule *rule = rule_of(first->id), *other = rule_of(second->id);
	struct bucket *b, *b2;
	int got;

	if (!rule || !other)
		return GOT_NONE;
	if (each) {
		got = look_at_key(skb, cpu, 0);
		if (got == GOT_SLOT)
			got = look_at_key(skb, cpu, STAGE_SECOND);
		if (got != GOT_SLOT)
			return got;
		b = bucket_of(first->slot);
		b2 = bucket_of(second->slot);
	} else {
		b = &rule->shared;
		b2 = &other->shared;
		first->slot = second->slot = 0;
		look_at(first, rule, params_of(rule, first->set), first->set, b, w->now);
		look_at(second, other, params_of(other, second->set), second->set, b2, w->now);
	}
	return colour_by(w, first, b, second, b2) ? GOT_CHARGED : GOT_NONE;
}

/* Attempts that until one succeeds, or the key gets no slot. */
static __always_inline bool try_colour(struct __sk_buff *skb, __u32 cpu, __u32 each)
{
	int got = GOT_NONE;
	__u32 tries;

	for (tries = 0; tries < TRIES && got == GOT_NONE; tries++)
		got = colour_pair(skb, cpu, each);
	return got == GOT_CHARGED;
}

/* The incoming colour of a packet. */
static __always_inline enum colour colour_in(struct __sk_buff *skb, __u32 ip, const struct params *params)
{
	const struct second_params *second = (const void *)cold_of(params);
	int class = traffic_class(skb, ip);
	__u32 dscp = class < 0 ? 0 : class >> 2 & 63;

	if (second->red >> dscp & 1)
		return RED;
	return second->yellow >> dscp & 1 ? YELLOW : GREEN;
}

/* Counts a packet by its colour, in the counters of the second limit. */
static __always_inline void count_colour(const struct work *w, struct rule *second)
{
	struct counters *c = counters_of(second);

	if (w->colour == GREEN)
		count(&c->passed_excess_packets, &c->passed_excess_bytes, w);
	else if (w->colour == YELLOW)
		count(&c->passed_packets, &c->passed_bytes, w);
	else
		count(&c->dropped_packets, &c->dropped_bytes, w);
}

/* Gives a packet its colour. Returns the action for it, or -1 if other CPUs were faster all the time. */
static __always_inline int colour(struct __sk_buff *skb, __u32 cpu, struct work *w, struct rule *rule, const struct params *params)
{
	const struct stage *s = w->stage;
	struct stage *second = stage_of(w, STAGE_SECOND);
	__u32 id = cold_of(params)->second;
	struct rule *other = rule_of(id);
	bool got = false;
	int action;

	if (!other)
		return -1;
	place(w, second, id, other);
	w->paid = false;
	if (!(w->again & SHADOW_CB)) /* the packet may have another DSCP by now */
		w->colour_in = s->flags & RULE_AWARE ? colour_in(skb, w->ip, params_of(other, second->set)) : GREEN;
	if (s->flags & RULE_EACH) {
		got = try_colour(skb, cpu, true);
		if (!got)
			__sync_fetch_and_add(&rule->spilled_packets, w->packets);
	}
	if (!got && !w->paid) /* what was paid stays with the key */
		got = try_colour(skb, cpu, false);
	if (!got) {
		if (!w->paid)
			return -1;
		w->colour = YELLOW; /* the second bucket has it */
	}
	count_colour(w, other);
	action = params->within >> (w->colour & 3) * 8 & 0xff;
	return action == ACTION_ECN && !ecn_of(skb, w->ip) ? ACTION_DROP : action;
}

/* Does what the rule says about the colour of a packet. Events tell only of red packets. */
static __always_inline enum verdict act_on_colour(struct __sk_buff *skb, __u32 cpu, struct work *w, struct rule *rule, enum at at)
{
	struct counters *c = counters_on(rule, cpu);
	int action = READ_ONCE(w->action), failed = 0;

	if (action < 0)
		return VERDICT_CONTENDED;
	if (action == ACTION_DROP)
		return VERDICT_EXCESS;
	if (action == ACTION_ECN && w->colour == RED)
		return VERDICT_MARK;
	if (action == ACTION_ECN) {
		failed = mark(skb, w->ip, at);
		if (!failed)
			c->marked_packets += w->packets;
	} else if (at == AT_DEVICE && action < ACTION_PASS && traffic_class(skb, w->ip) >> 2 != action) {
		failed = set_class(skb, w->ip, CE, action << 2);
	}
	if (failed)
		c->contended_packets += w->packets;
	if (w->colour == RED)
		return VERDICT_BEYOND;
	if (w->colour == YELLOW)
		count(&c->passed_excess_packets, &c->passed_excess_bytes, w);
	return VERDICT_PASS;
}

#endif
