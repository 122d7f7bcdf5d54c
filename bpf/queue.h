/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Queues: when a packet may leave. The fq qdisc, or that of an ifb device, keeps
 * it until then (earliest departure time).
 */
#ifndef SHAPECTL_QUEUE_H
#define SHAPECTL_QUEUE_H

#include "bucket.h"
#include "packet.h"

/* A sender's own departure time that is later than this is not one. */
#define OWN_TIME_NS (1ULL << 35)

/* Fails for a packet that enters with a VLAN tag left in its frame. */
static __always_inline bool set_departure(struct __sk_buff *skb, __u64 time)
{
	if (!bpf_skb_set_tstamp(skb, time, BPF_SKB_TSTAMP_DELIVERY_MONO))
		return true;
	/* On egress the time needs no type. */
	if (!HOOK(ingress))
		skb->tstamp = time;
	return !HOOK(ingress);
}

/* What has to leave before a packet that was charged and left the bucket with that level, in units. */
static __always_inline __u64 units_before(const struct params *params, __u64 bytes, __u64 level)
{
	__u64 cost = bytes << UNIT_BITS, free = params->burst > cost ? params->burst - cost : 0;

	level -= cost; /* as the packet found it */
	return level > free ? level - free : 0;
}

/*
 * Gives a packet its departure time, when so many units have left before it. A
 * sender may ask for a later one, but by no more than the queue is long: packets
 * that it spreads over more time could all leave at one moment. Packets that
 * conform to the burst are not delayed, nor is one larger than that which finds an
 * empty bucket.
 */
static __always_inline enum verdict queue_packet(struct __sk_buff *skb, __u32 ip, const struct params *params,
						 const struct cold_params *cold, __u64 now, __u64 before)
{
	__u64 asked = skb->tstamp, wait = drain_ns(params->rate_units, before), departure = now + wait;

	if (!HOOK(ingress) && asked > departure && asked - departure <= OWN_TIME_NS) {
		departure = now + drain_ns(params->rate_units, params->limit - params->burst);
		if (asked < departure)
			departure = asked;
		set_departure(skb, departure);
	} else if (wait && !set_departure(skb, departure)) {
		return VERDICT_CONTENDED;
	}
	if (!wait)
		return VERDICT_PASS;
	return wait > cold->ecn_above_ns && ecn_of(skb, ip) ? VERDICT_MARK : VERDICT_DELAY;
}

/*
 * The level of a flow's own bucket after a packet of it that has to be queued,
 * where it was at level before. A packet of a sparse flow (as RFC 8290 has it: it
 * builds no queue of its own) goes ahead, and is charged so much that
 * 2^SPARSE_BITS bytes fill a bucket as big as the queue. Any other flow's level is
 * above that until the packet has left in its turn: none overtakes one of its own flow.
 */
static __always_inline __u64 flow_level(const struct params *params, __u64 before, __u64 bytes, bool fifo, __u64 level,
					enum verdict *verdict)
{
	__u64 queue = params->limit - params->burst, next;

	if (bytes <= 1 << SPARSE_BITS && !fifo) {
		next = level + ((queue >> UNIT_BITS) * bytes << (UNIT_BITS - SPARSE_BITS));
		if (next <= queue) {
			*verdict = VERDICT_PASS;
			return next;
		}
	}
	*verdict = VERDICT_DELAY;
	return before + queue;
}

/* Whether some queued packets of a rule cannot be attributed to a flow. */
static __always_inline bool is_fifo(const struct rule *rule, bool reverted, __u64 now)
{
	return now < READ_ONCE(rule->fifo_until) || (reverted && now < change.until + MAX_WAIT_S * 1000000000ULL);
}

static __always_inline void keep_fifo(struct rule *rule, __u64 until)
{
	if (READ_ONCE(rule->fifo_until) < until)
		WRITE_ONCE(rule->fifo_until, until);
}

#endif
