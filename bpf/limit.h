/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A packet's way: parse, match, charge, act, count. */
#ifndef SHAPECTL_LIMIT_H
#define SHAPECTL_LIMIT_H

#include <linux/pkt_cls.h>
#include "bucket.h"
#include "packet.h"
#include "prefix.h"

/* Under tcx this is TCX_NEXT: later programs, and the legacy filters, still see the packet. */
#define NEXT TC_ACT_UNSPEC
#define DROP TC_ACT_SHOT

static __always_inline __u64 time_ns(struct __sk_buff *skb)
{
	return hook.virtual_clock ? skb->tstamp : bpf_ktime_get_ns();
}

/* Both ports as they are in the packet; false if it ends before. A helper only where there are tags, options or extensions. */
static __always_inline bool load_ports(struct __sk_buff *skb, const struct packet *p, __u16 ports[2])
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end, *at;

	if (p->l4 == ETH_HLEN + sizeof(struct iphdr)) {
		at = AT(data, ETH_HLEN + sizeof(struct iphdr));
		if (at + 2 * sizeof(ports[0]) <= data_end) {
			__builtin_memcpy(ports, at, 2 * sizeof(ports[0]));
			return true;
		}
	} else if (p->l4 == ETH_HLEN + sizeof(struct ipv6hdr)) {
		at = AT(data, ETH_HLEN + sizeof(struct ipv6hdr));
		if (at + 2 * sizeof(ports[0]) <= data_end) {
			__builtin_memcpy(ports, at, 2 * sizeof(ports[0]));
			return true;
		}
	}
	return !bpf_skb_load_bytes(skb, p->l4, ports, 2 * sizeof(ports[0]));
}

/* Who shares a bucket: the masked address, or the 5-tuple as far as the packet has one. */
static __always_inline void make_key(struct __sk_buff *skb, const struct rule *rule, const struct packet *p,
				     struct key *key)
{
	const __u32 *addr = far_side(p);
	__u16 ports[2];
	__u32 i;

	__builtin_memset(key, 0, sizeof(*key));
	key->id = rule->id;
	key->family = p->family;
	if (rule->each == EACH_FLOW) {
		__builtin_memcpy(key->src, p->src, sizeof(key->src));
		__builtin_memcpy(key->dst, p->dst, sizeof(key->dst));
		key->proto = p->proto;
		if (!p->headless && has_ports(p->proto) && load_ports(skb, p, ports)) {
			key->sport = ports[0];
			key->dport = ports[1];
		}
		return;
	}
#pragma unroll
	for (i = 0; i < 4; i++)
		key->src[i] = addr[i] & rule->each_mask[i];
}

static __always_inline enum verdict charge(struct __sk_buff *skb, const struct rule *rule, const struct packet *p,
					   struct own *own, __u64 bytes)
{
	struct bucket *bucket = &own->bucket;
	enum verdict verdict = VERDICT_AGAIN;
	struct key key, *sharer = NULL;
	struct charge c;
	__u32 number = 0;

	c.now = time_ns(skb);
	c.v = byte_clock(rule, c.now);
	c.cost = bytes << UNIT_BITS;
	c.print = 0;
	c.ect = rule->excess == EXCESS_ECN && p->ecn;
	if (rule->each != EACH_ALL) {
		struct line *line;
		__u64 hash;

		sharer = &key;
		make_key(skb, rule, p, sharer);
		hash = hash_key(&key, rule->salt);
		number = (__u32)hash & hook.line_mask;
		c.print = hash >> 32 | 1;
		line = bpf_map_lookup_elem(&table, &number);
		bucket = line ? find_slot(line, c.print) : NULL;
	}
	if (bucket)
		verdict = charge_bucket(rule, bucket, &c);
	if (verdict == VERDICT_AGAIN)
		verdict = charge_slowly(rule, sharer, own, &c, number);
	return verdict;
}

static __always_inline int limit(struct __sk_buff *skb, enum algorithm algorithm)
{
	enum verdict verdict = VERDICT_PASS;
	const struct rule *rule;
	struct counters *count;
	bool marked, dropped;
	struct packet p = {};
	struct own *own;
	__u64 bytes;
	__u32 id;

	if (!parse_packet(skb, &p) || p.nd)
		return NEXT;
	id = match(&p);
	if (!id--)
		return NEXT;
	own = bpf_map_lookup_elem(&own_buckets, &id);
	count = bpf_map_lookup_elem(&counters, &id);
	if (!own || !count)
		return NEXT;
	rule = rule_of(id, own);
	/* The other algorithm's program, next in the chain, sees to its own rules. */
	if (!rule || rule->algorithm != algorithm)
		return NEXT;

	bytes = wire_bytes(skb, &p, rule->overhead, rule->mpu);
	if (!(rule->flags & RULE_UNLIMITED))
		verdict = charge(skb, rule, &p, own, bytes);

	marked = verdict == VERDICT_MARK;
	if (marked && mark_ce(skb, &p))
		verdict = VERDICT_UNSURE, marked = false;
	dropped = (verdict == VERDICT_EXCESS && rule->excess != EXCESS_PASS) ||
		  (verdict == VERDICT_UNSURE && rule->flags & RULE_FAIL_CLOSED);

	if (verdict != VERDICT_PASS) {
		if (verdict == VERDICT_EXCESS || marked) {
			count->excess_packets++;
			count->excess_bytes += bytes;
		}
		count->marked_packets += marked;
		count->unsure_packets += verdict == VERDICT_UNSURE;
	}
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
