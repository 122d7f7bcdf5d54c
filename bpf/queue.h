/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Queues: the departure time of a packet. The fq qdisc of the device, or of its ifb
 * device, keeps the packet until then (earliest departure time).
 */
#ifndef SHAPECTL_QUEUE_H
#define SHAPECTL_QUEUE_H

#include "key.h"

/* A later timestamp of a sender is not a departure time. */
#define MAX_SENDER_DELAY_NS (1ULL << 35)

/* Returns whether it was set. It fails on ingress for a packet with a VLAN tag in its frame. */
static __always_inline bool set_departure(struct __sk_buff *skb, __u64 time)
{
	if (!bpf_skb_set_tstamp(skb, time, BPF_SKB_TSTAMP_DELIVERY_MONO))
		return true;
	/* On egress a timestamp needs no type. */
	if (!HOOK(ingress))
		skb->tstamp = time;
	return !HOOK(ingress);
}

/* The units that leave before a packet, given the level before its charge. */
static __always_inline __u64 units_before(const struct params *params, __u64 cost, __u64 level)
{
	__u64 free = params->burst > cost ? params->burst - cost : 0;

	return level > free ? level - free : 0;
}

/* Whether the sender of a packet requests a later departure time. */
static __always_inline bool asks_later(const struct __sk_buff *skb, __u64 departure)
{
	return !HOOK(ingress) && skb->tstamp > departure && skb->tstamp - departure <= MAX_SENDER_DELAY_NS;
}

/*
 * The new level of a flow's bucket, for a packet with the units before queued ahead
 * of it. A packet of a sparse flow (RFC 8290: a flow that builds no queue) is not
 * delayed. Its charge is scaled, so that the most that a sparse flow sends fills a bucket as
 * big as the queue. Any other packet raises the level above that until it has left, so no
 * packet overtakes one of the same flow.
 */
static __always_inline __u64 flow_level(const struct params *params, __u64 before, __u64 bytes, bool fifo, __u64 level, bool *sparse)
{
	__u64 queue = params->limit - params->burst, parts = queue >> UNIT_BITS, most;

	most = parts >> SPARSE_MORE;
	if (parts > SPARSE_PARTS << SPARSE_BITS)
		parts = SPARSE_PARTS << SPARSE_BITS;
	if (parts < most)
		parts = most;
	*sparse = false;
	if (bytes <= 1 << SPARSE_BITS && !fifo) {
		level += parts * bytes << (UNIT_BITS - SPARSE_BITS);
		*sparse = level <= queue;
	}
	return *sparse ? level : before + queue;
}

#define MAX_WAIT_NS (MAX_WAIT_S * 1000000000ULL)

/*
 * Whether some queued packets of a stage cannot be attributed to a flow, as after a revert, or while the pool still had another
 * rate, by a lease that has ended.
 */
__noinline int is_fifo(__u32 cpu, __u32 i)
{
	const struct work *w = work_of(cpu);
	const struct stage *s = stage_of(work_of(cpu), i);
	const struct rule *rule = rule_of(s->id);
	__u64 now = w->now, before = now > MAX_WAIT_NS ? now - MAX_WAIT_NS : 0;
	const struct params *then, *is;

	if (!rule || now < READ_ONCE(rule->fifo_until) || (s->set & SET_REVERTED && before < change.until))
		return true;
	if (!HOOK(pools) || !(s->flags & RULE_LEASED))
		return false;
	then = lease_of(params_of(rule, s->set), s->set, before);
	is = lease_of(params_of(rule, s->set), s->set, now);
	return then && is && then->rate_units != is->rate_units;
}

/*
 * Charges a packet to its flow in the queue of a stage, where work.before is queued; with ask only tells. The word is a level on
 * the clock of the queue. Returns whether the flow is sparse, or -1 if another CPU was faster.
 */
__noinline int charge_flow(__u32 cpu, __u32 i, __u64 slot, __u32 ask)
{
	struct work *w = work_of(cpu);
	const struct stage *s = stage_of(w, i);
	const struct rule *rule = rule_of(s->id);
	const struct params *by;
	struct stage flow = {};
	__u32 set = s->set;
	struct bucket *b;
	__u64 level;
	bool sparse;

	if (!rule)
		return -1;
	by = rated(rule, &set, w->now);
	b = bucket_of(slot);
	if (slot)
		look_at(&flow, rule, by, set, b, w->now);
	else
		flow.level = least_level(rule, by, set, w->now);
	if (!ask && !is_still(b, slot, flow.tat))
		return -1;
	level = flow_level(by, w->before, w->bytes, is_fifo(cpu, i), flow.level, &sparse);
	if (!ask && !set_tat(b, flow.tat, flow.start - flow.level + level, w->now))
		return -1;
	return sparse;
}

/* Whether the flow of a packet is sparse in the queue of a stage, as far as that is known before it is charged. */
static __always_inline bool is_sparse(struct __sk_buff *skb, __u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	const struct stage *s = stage_of(w, i);
	const struct rule *rule = rule_of(s->id);

	if (!rule)
		return false;
	return charge_flow(cpu, i, seek(skb, cpu, params_of(rule, s->set)->salt, RULE_FLOW, 0), true) > 0;
}

/* Attempts to update a bucket before it counts as contended. */
#define TRIES 16

/* An attempt to charge the flow that was sought. Returns also -2 if it cannot get a slot. */
__noinline int try_flow(__u32 cpu, __u32 i)
{
	__u64 slot = find_handle(work_of(cpu)->hash);

	if (slot)
		return charge_flow(cpu, i, slot, false);
	return get_slot(cpu) == GOT_NO_SLOT ? -2 : -1;
}

/*
 * Finds the units that leave before a packet of a stage. Returns whether it skips the queue, because its flow is sparse; negative if
 * the flow has no slot.
 */
__noinline int skips_queue(struct __sk_buff *skb, __u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	const struct stage *s = stage_of(w, i);
	const struct rule *rule = rule_of(s->id);
	int sparse = -1;
	__u32 tries, set = s->set;

	if (!rule)
		return 0;
	w->before = units_before(rated(rule, &set, w->now), w->cost, s->level);
	if (!w->before || !(s->flags & RULE_SPARSE))
		return 0;
	seek(skb, cpu, params_of(rule, s->set)->salt, RULE_FLOW, 0);
	w->key.id = s->id;
	for (tries = 0; tries < TRIES && sparse == -1; tries++)
		sparse = try_flow(cpu, i);
	return sparse;
}

/*
 * Queues a packet that was charged to a stage: it departs when the units before it have left, or later if its sender asks for
 * that, as far as the queue is long. Without that bound, packets that were charged over a longer time could leave together. A
 * packet within the burst is not delayed; nor is a larger one if the bucket is empty. After an edit, it does not depart before
 * those that were queued by another clock. If its flow has no slot, a later packet of that could get one and overtake it, so all
 * flows are queued until it has left. Returns whether it is delayed.
 */
__noinline int queue_at(struct __sk_buff *skb, __u32 cpu, __u32 i, __s32 skips)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, i);
	struct rule *rule = rule_of(s->id);
	__u32 set = s->set, slot = s->slot >> 32;
	__u64 leaves = w->now, last, late, end, rate, queue;
	const struct params *by;
	struct bucket *b;
	__u64 *departs;
	struct key *key;

	if (!rule)
		return false;
	by = rated(rule, &set, w->now);
	rate = by->rate_units;
	queue = by->limit - by->burst;
	b = &rule->shared;
	departs = &rule->departs;
	if (s->flags & RULE_EACH && s->slot) {
		key = bpf_map_lookup_elem(&keys, &slot);
		if (!key)
			return false;
		b = bucket_of(s->slot);
		departs = &key->departs;
	}
	if (skips <= 0) {
		leaves += drain_ns(rate, w->before);
		last = READ_ONCE(*departs);
		late = last - leaves;
		if (unlikely(last > leaves && last - w->now <= MAX_WAIT_NS))
			leaves = last;
		/* Two ns for rounding. What was queued by another clock takes until then, so the bucket has that from now on. */
		if (unlikely(leaves == last && late > 2)) {
			leaves = last + 1;
			if (__sync_val_compare_and_swap(departs, last, leaves) == last)
				__sync_fetch_and_add(&b->tat, byte_clock(rate, 0, late));
		} else if (leaves > w->now) {
			WRITE_ONCE(*departs, leaves);
		}
		if (skips < 0 && READ_ONCE(rule->fifo_until) < leaves)
			WRITE_ONCE(rule->fifo_until, leaves);
	}
	if (unlikely(asks_later(skb, w->now))) {
		end = later(leaves, w->now + drain_ns(rate, queue));
		if (!w->latest || w->latest > end)
			w->latest = end;
	}
	if (leaves - w->now > w->longest) {
		w->longest = leaves - w->now;
		w->at = s->id;
	}
	if (leaves - w->now > cold_of(params_of(rule, s->set))->long_ns && ecn_of(skb, w->ip))
		w->marks |= 1U << (i & 31);
	return leaves > w->now;
}

/* Sets the departure time of a packet that queues have. Returns false if that failed. */
static __always_inline bool depart(struct __sk_buff *skb, const struct work *w)
{
	__u64 leaves = w->now + w->longest;

	if (unlikely(w->latest && asks_later(skb, leaves))) {
		if (skb->tstamp > w->latest)
			set_departure(skb, later(w->latest, leaves));
		return true;
	}
	return !w->longest || set_departure(skb, leaves);
}

#endif
