/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A packet's way: parse, match, charge, act, count. */
#ifndef SHAPECTL_LIMIT_H
#define SHAPECTL_LIMIT_H

#include <linux/pkt_cls.h>
#include "bucket.h"
#include "packet.h"

/* Under tcx this is TCX_NEXT: later programs, and the legacy filters, still see the packet. */
#define NEXT TC_ACT_UNSPEC
#define DROP TC_ACT_SHOT

static __always_inline __u64 time_ns(struct __sk_buff *skb)
{
	return hook.virtual_clock ? skb->tstamp : bpf_ktime_get_ns();
}

/* The id of the rule with the longest prefix. */
static __always_inline const __u32 *match(const struct packet *p)
{
	const __u32 *addr = hook.match_src ? p->src : p->dst;

	if (p->family == 4) {
		struct prefix4 key = { .bits = 32, .addr = addr[0] };

		return bpf_map_lookup_elem(&prefixes4, &key);
	} else {
		struct prefix6 key = { .bits = 128 };

		__builtin_memcpy(key.addr, addr, sizeof(key.addr));
		return bpf_map_lookup_elem(&prefixes6, &key);
	}
}

/* Who shares a bucket: the masked address, or the 5-tuple as far as the packet has one. */
static __always_inline void make_key(struct __sk_buff *skb, const struct rule *rule, const struct packet *p,
				     struct key *key)
{
	const __u32 *addr = hook.match_src ? p->src : p->dst;
	__u16 ports[2];
	__u32 i, bits;

	__builtin_memset(key, 0, sizeof(*key));
	key->id = rule->id;
	key->family = p->family;
	if (rule->each == EACH_FLOW) {
		__builtin_memcpy(key->src, p->src, sizeof(key->src));
		__builtin_memcpy(key->dst, p->dst, sizeof(key->dst));
		key->proto = p->proto;
		if (!p->headless && has_ports(p->proto) && !bpf_skb_load_bytes(skb, p->l4, ports, sizeof(ports))) {
			key->sport = ports[0];
			key->dport = ports[1];
		}
		return;
	}
	for (i = 0; i < 4; i++) {
		if (rule->each_bits >= 32 * (i + 1)) {
			key->src[i] = addr[i];
		} else if (rule->each_bits > 32 * i) {
			bits = 32 * (i + 1) - rule->each_bits;
			key->src[i] = addr[i] & bpf_htonl(~0U << (bits & 31));
		}
	}
}

static __always_inline int limit(struct __sk_buff *skb, enum algorithm algorithm)
{
	struct packet p = {};
	enum verdict verdict;
	const struct rule *rule;
	struct counters *count;
	bool marked, dropped;
	struct charge c = {};
	const __u32 *id;
	struct own *own;
	__u64 bytes;

	if (parse_packet(skb, &p) != PARSE_IP || p.nd)
		return NEXT;
	id = match(&p);
	if (!id)
		return NEXT;
	own = bpf_map_lookup_elem(&own_buckets, id);
	count = bpf_map_lookup_elem(&counters, id);
	if (!own || !count)
		return NEXT;
	rule = rule_of(*id, own);
	/* The other algorithm's program, next in the chain, sees to its own rules. */
	if (!rule || rule->algorithm != algorithm)
		return NEXT;

	bytes = wire_bytes(skb, &p, hook.ingress, rule->overhead, rule->mpu);
	if (bytes >> PACKET_BITS) /* segments of a byte, made to overflow something */
		bytes = (1 << PACKET_BITS) - 1;
	if (rule->flags & RULE_UNLIMITED) {
		verdict = VERDICT_PASS;
	} else {
		c.now = time_ns(skb);
		c.v = byte_clock(rule, c.now);
		c.cost = bytes << UNIT_BITS;
		c.ect = rule->excess == EXCESS_ECN && p.ecn;
		if (rule->each == EACH_ALL) {
			verdict = charge(rule, &own->bucket, &c);
		} else {
			struct key key;

			make_key(skb, rule, &p, &key);
			verdict = charge_key(rule, &c, &key, own);
		}
	}

	marked = verdict == VERDICT_MARK;
	if (marked && mark_ce(skb, &p))
		verdict = VERDICT_UNSURE, marked = false;
	dropped = (verdict == VERDICT_EXCESS && rule->excess != EXCESS_PASS) ||
		  (verdict == VERDICT_UNSURE && rule->flags & RULE_FAIL_CLOSED);

	if (verdict == VERDICT_EXCESS || marked) {
		count->excess_packets++;
		count->excess_bytes += bytes;
	}
	count->marked_packets += marked;
	count->unsure_packets += verdict == VERDICT_UNSURE;
	if (dropped) {
		count->dropped_packets++;
		count->dropped_bytes += bytes;
		return DROP;
	}
	count->passed_packets++;
	count->passed_bytes += bytes;
	return NEXT;
}

#endif
