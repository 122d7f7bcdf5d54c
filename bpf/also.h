/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Other limits of a rule or pool, to which its packets must conform as well: a quota, one of new flows, and one of packets. They are
 * a chain. After a quota comes the limit that is in force while it is used up, if any packets pass then.
 *
 * Each is a bucket as any other. They differ in what they count:
 *
 *	COUNTS_PACKETS	each packet on the wire as one byte
 *	COUNTS_FLOWS	the first packet of a flow as one byte, and others not. A flow that was idle for SEEN_NS, or for more than half of it, is new again.
 *	COUNTS_QUOTA	units of 2^-QUOTA_BITS byte, so that a level can be petabytes
 *
 * A quota comes back at a rate, or all at once by a calendar: then its clock stands still, and a bucket that was last charged before
 * the period began is empty. A period begins with the first tick of buckets that does not begin before its time. A TAT that is less than
 * 2^AHEAD_BITS behind that clock is volume ahead, by a top-up: the level stays 0 until it is used.
 *
 * They are tested before anything is charged, as pools are. So each other CPU may overshoot by one packet, which stays charged.
 */
#ifndef SHAPECTL_ALSO_H
#define SHAPECTL_ALSO_H

#include "charge.h"

#define MAX_ALSO 4
#define SEEN_NS 30000000000ULL
#define SYN 0x02
#define ACK 0x10

/* What a packet counts as in a limit. */
static __always_inline __u64 cost_in(const struct work *w, __u32 counts, bool is_new)
{
	if (counts == COUNTS_PACKETS)
		return (__u64)w->packets << UNIT_BITS;
	if (counts == COUNTS_FLOWS)
		return is_new ? 1ULL << UNIT_BITS : 0;
	return counts == COUNTS_QUOTA ? w->cost >> (UNIT_BITS - QUOTA_BITS) : w->cost;
}

/*
 * Whether a packet is the first one of its flow, by a limit of new flows. Of TCP, that is a SYN, or what is too short to tell. Sought
 * is the flow's slot.
 */
__noinline int is_new_flow(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	const struct stage *s = stage_of(w, STAGE_ALSO);
	const struct rule *rule = rule_of(s->id);
	const struct params *params;
	struct transport t = {};
	struct stage *flow = stage_of(w, STAGE_SEEN);
	__u64 slot;
	__u8 flags;

	if (!rule)
		return false;
	params = params_of(rule, s->set);
	slot = seek(skb, cpu, params->salt, RULE_FLOW, 0);
	if (w->flow.proto == IPPROTO_TCP)
		return !find_transport(skb, w->ip, &t) && !t.headless &&
		       (bpf_skb_load_bytes(skb, t.l4 + 13 /* RFC 9293 3.1 */, &flags, sizeof(flags)) || (flags & (SYN | ACK)) == SYN);
	if (!slot)
		return true;
	look_at(flow, rule, params, s->set, bucket_of(slot), w->now);
	return !flow->level;
}

/* Attempts to remember the flow of a packet. */
__noinline int try_seen(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	const struct stage *s = stage_of(w, STAGE_ALSO);
	const struct rule *rule = rule_of(s->id);
	const struct params *params;
	struct stage *flow = stage_of(w, STAGE_SEEN);
	struct bucket *b;
	__u64 slot, seen;

	if (!rule)
		return GOT_NO_SLOT;
	params = params_of(rule, s->set);
	slot = seek(skb, cpu, params->salt, RULE_FLOW, 0);
	if (!slot) {
		w->key.id = s->id;
		return get_slot(cpu);
	}
	b = bucket_of(slot);
	look_at(flow, rule, params, s->set, b, w->now);
	if (!is_still(b, slot, flow->tat))
		return GOT_NONE;
	seen = byte_clock(params->rate_units, 0, SEEN_NS);
	if (flow->level > seen / 2)
		return GOT_SLOT;
	return set_tat(b, flow->tat, flow->start - flow->level + seen, w->now) ? GOT_SLOT : GOT_NONE;
}

/* The next limit of a chain plus one, or 0. */
static __always_inline __u32 also_of(const struct rule *rule, __u32 set)
{
	const struct params *params = params_of(rule, set);

	return params->flags & RULE_ALSO ? cold_of(params)->also + 1 : 0;
}

/* Set in the result of apply_also if a packet conforms. The rest is enum unit. */
#define ALSO_FITS 8

/* Charges a packet to the bucket that was looked at. Returns false if another CPU was faster. */
static __always_inline bool charge_looked(struct stage *g, struct rule *rule, __u32 cpu, const struct work *w, __u64 cost)
{
	if (g->slot)
		return set_tat(bucket_of(g->slot), g->tat, g->start + cost, w->now);
	charge_to(&rule->shared, g, cpu, STAGE_ALSO, w->now, cost);
	return true;
}

/*
 * Puts one of these limits on STAGE_ALSO, and tests a packet there or charges it. A key without a slot has the spill bucket, as has
 * one that other CPUs keep changing. A quota is charged only if it has room. Returns ALSO_FITS and enum unit.
 */
__noinline int apply_also(struct __sk_buff *skb, __u32 cpu, __u32 id, __u32 charges)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, STAGE_ALSO);
	struct rule *rule = rule_of(id);
	const struct params *params;
	int fits = 0, got;
	bool last;
	__u32 tries, unit, calendar;
	__u64 cost;

	if (!rule)
		return ALSO_FITS;
	for (tries = 0; tries < TRIES / 4; tries++) {
		s->slot = 0;
		look(cpu, STAGE_ALSO, id);
		if (s->flags & RULE_EACH) {
			last = tries + 1 == TRIES / 4;
			got = last ? GOT_NO_SLOT : look_at_key(skb, cpu, STAGE_ALSO);
			if (got == GOT_NONE)
				continue;
			if (got != GOT_SLOT) {
				s->slot = 0;
				look(cpu, STAGE_ALSO, id);
			}
		}
		params = params_of(rule, s->set);
		unit = params->within;
		calendar = cold_of(params)->calendar;
		if (is_over(calendar, w->now, READ_ONCE((s->slot ? bucket_of(s->slot) : &rule->shared)->tick))) {
			s->start -= s->level;
			s->level = 0;
		} else if (calendar && s->start - s->tat < 1ULL << AHEAD_BITS) {
			s->start = s->tat;
		}
		cost = cost_in(w, unit, unit == COUNTS_FLOWS && is_new_flow(skb, cpu));
		fits = (!cost || conforms(s, s->flags, cost) ? ALSO_FITS : 0) | (unit & 3);
		if (!charges || !cost || fits == COUNTS_QUOTA || charge_looked(s, rule, cpu, w, cost))
			break;
	}
	return fits;
}

/* Whether a packet conforms to the other limits of a stage. Counts it at the one that refuses it. */
__noinline int conforms_also(struct __sk_buff *skb, __u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	const struct stage *s = stage_of(w, i);
	struct rule *rule = rule_of(s->id), *refuses = NULL;
	struct counters *c;
	__u32 next, n, fits, last = COUNTS_PACKETS;

	if (!rule)
		return true;
	next = also_of(rule, s->set);
	for (n = 0; n < MAX_ALSO && next; n++) {
		rule = rule_of(next - 1);
		if (!rule)
			break;
		fits = apply_also(skb, cpu, next - 1, false);
		if (fits == (ALSO_FITS | COUNTS_BYTES) && last == COUNTS_QUOTA)
			refuses = NULL; /* the quota is used up */
		else if (refuses)
			break;
		if (!(fits & ALSO_FITS) && !(fits == COUNTS_BYTES && last == (ALSO_FITS | COUNTS_QUOTA))) {
			refuses = rule;
			w->at = next - 1;
		}
		last = fits;
		next = also_of(rule, set_in(rule, w->phase));
	}
	if (!refuses)
		return true;
	c = counters_on(refuses, cpu);
	count(&c->dropped_packets, &c->dropped_bytes, w);
	count_extra(refuses, w);
	return false;
}

/* What follows from the charge to the limit on STAGE_ALSO: its flow is seen, its queue delays the packet, and it counts there. */
__noinline int follow_also(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	const struct stage *s = stage_of(w, STAGE_ALSO);
	struct rule *rule = rule_of(s->id);
	int got = GOT_NONE;
	struct counters *c;
	__u32 tries, unit;

	if (!rule)
		return 0;
	unit = params_of(rule, s->set)->within;
	if (unit == COUNTS_FLOWS && w->flow.proto != IPPROTO_TCP)
		for (tries = 0; tries < TRIES / 4 && got == GOT_NONE; tries++)
			got = try_seen(skb, cpu);
	if (unit == COUNTS_BYTES && s->flags & RULE_DELAY)
		queue_at(skb, cpu, STAGE_ALSO, skips_queue(skb, cpu, STAGE_ALSO));
	c = counters_on(rule, cpu);
	count(&c->passed_packets, &c->passed_bytes, w);
	count_extra(rule, w);
	return 0;
}

/* Charges a packet to the other limits of a stage. */
__noinline int charge_also(struct __sk_buff *skb, __u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	const struct stage *s = stage_of(w, i);
	const struct rule *rule = rule_of(s->id);
	__u32 next, n, fits = 0;

	if (!rule || s->flags & RULE_ABSENT)
		return 0;
	next = also_of(rule, s->set);
	for (n = 0; n < MAX_ALSO && next; n++) {
		rule = rule_of(next - 1);
		if (!rule)
			break;
		if (fits == (ALSO_FITS | COUNTS_QUOTA) && params_of(rule, set_in(rule, w->phase))->within == COUNTS_BYTES) {
			fits = 0;
		} else {
			fits = apply_also(skb, cpu, next - 1, true);
			if (fits != COUNTS_QUOTA)
				follow_also(skb, cpu);
		}
		next = also_of(rule, set_in(rule, w->phase));
	}
	return 0;
}

#endif
