/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Queues: the departure time of a packet. The fq qdisc of the device, or of its ifb
 * device, keeps the packet until then (earliest departure time).
 */
#ifndef SHAPECTL_QUEUE_H
#define SHAPECTL_QUEUE_H

#include "bucket.h"
#include "packet.h"

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

/* The units that leave before a packet, given the level after its charge. */
static __always_inline __u64 units_before(const struct params *params, __u64 bytes, __u64 level)
{
	__u64 cost = bytes << UNIT_BITS, free = params->burst > cost ? params->burst - cost : 0;

	level -= cost; /* before the charge */
	return level > free ? level - free : 0;
}

/* Whether the sender of a packet requests a later departure time. */
static __always_inline bool asks_later(const struct __sk_buff *skb, __u64 departure)
{
	return !HOOK(ingress) && skb->tstamp > departure && skb->tstamp - departure <= MAX_SENDER_DELAY_NS;
}

/*
 * Keeps that time, limited to the length of the queue: otherwise packets that were charged over a longer time could leave
 * together. Returns whether there is one.
 */
static __always_inline bool keep_later(struct __sk_buff *skb, const struct params *params, __u64 now, __u64 departure)
{
	__u64 end;

	if (!asks_later(skb, departure))
		return false;
	end = later(departure, now + drain_ns(params->rate_units, params->limit - params->burst));
	set_departure(skb, skb->tstamp < end ? skb->tstamp : end);
	return true;
}

/*
 * Sets the departure time of a packet to the time when the units before it have
 * left, or to a later one that its sender requests. A packet within the burst is not
 * delayed; nor is a larger one if the bucket is empty.
 */
static __always_inline enum verdict queue_packet(struct __sk_buff *skb, __u32 ip, const struct params *params,
						 const struct cold_params *cold, __u64 now, __u64 before)
{
	__u64 wait = drain_ns(params->rate_units, before);

	if (!keep_later(skb, params, now, now + wait) && wait && !set_departure(skb, now + wait))
		return VERDICT_CONTENDED;
	if (!wait)
		return VERDICT_PASS;
	return wait > cold->ecn_above_ns && ecn_of(skb, ip) ? VERDICT_MARK : VERDICT_DELAY;
}

/*
 * The new level of a flow's bucket, for a packet with the units before queued ahead
 * of it. A packet of a sparse flow (RFC 8290: a flow that builds no queue) is not
 * delayed. Its charge is scaled, so that the most that a sparse flow sends fills a bucket as
 * big as the queue. Any other packet raises the level above that until it has left, so no
 * packet overtakes one of the same flow.
 */
static __always_inline __u64 flow_level(const struct params *params, __u64 before, __u64 bytes, bool fifo, __u64 level,
					enum verdict *verdict)
{
	__u64 queue = params->limit - params->burst, parts = queue >> UNIT_BITS, most;

	most = parts >> SPARSE_MORE;
	if (parts > SPARSE_PARTS << SPARSE_BITS)
		parts = SPARSE_PARTS << SPARSE_BITS;
	if (parts < most)
		parts = most;
	if (bytes <= 1 << SPARSE_BITS && !fifo) {
		level += parts * bytes << (UNIT_BITS - SPARSE_BITS);
		if (level <= queue) {
			*verdict = VERDICT_PASS;
			return level;
		}
	}
	*verdict = VERDICT_DELAY;
	return before + queue;
}

#define MAX_WAIT_NS (MAX_WAIT_S * 1000000000ULL)

/* Whether some queued packets of a rule cannot be attributed to a flow. */
static __always_inline bool is_fifo(const struct rule *rule, bool reverted, __u64 now)
{
	return now < READ_ONCE(rule->fifo_until) || (reverted && now < change.until + MAX_WAIT_NS);
}

static __always_inline void keep_fifo(struct rule *rule, __u64 until)
{
	if (READ_ONCE(rule->fifo_until) < until)
		WRITE_ONCE(rule->fifo_until, until);
}

#endif
