/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A packet's way: parse, match, charge, act, count. What most packets need is
 * inline and short; everything else is in functions of its own, which start
 * anew from what they are told, so that nothing has to be kept for them.
 */
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

/* Who shares a bucket: the masked address, or the 5-tuple as far as the packet has one. */
static __always_inline void make_key(struct __sk_buff *skb, __u32 ip, const __u32 mask[4], __u32 flags, struct key *key)
{
	struct transport t = {};
	struct address far = {};
	__u32 i;

	key->family = ip & IS_IPV6 ? 6 : 4;
	if (!(flags & RULE_FLOW)) {
		far_address(skb, ip, &far);
		__builtin_memcpy(key->src, &far, sizeof(key->src));
		if (flags & RULE_SUBNET)
#pragma unroll
			for (i = 0; i < 4; i++)
				key->src[i] &= mask[i];
		return;
	}
	if (ip & IS_IPV6) {
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct ipv6hdr, saddr), key->src, 16);
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct ipv6hdr, daddr), key->dst, 16);
	} else {
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct iphdr, saddr), key->src, 4);
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct iphdr, daddr), key->dst, 4);
	}
	if (find_transport(skb, ip, &t))
		return;
	key->proto = t.proto;
	if (!t.headless && has_ports(t.proto))
		bpf_skb_load_bytes(skb, t.l4, &key->sport, 2 * sizeof(key->sport));
}

/* Charges any packet to its bucket. Where a key can have none, the rule's own is charged. */
__noinline enum verdict charge_slowly(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 version, __u64 bytes)
{
	struct slow s = { .key.id = id, .version = version, .bytes = bytes, .verdict = VERDICT_AGAIN };
	const struct terms *terms;
	const struct rule *rule;
	__u64 hash;

	rule = bpf_map_lookup_elem(&rules, &id);
	if (!rule)
		return VERDICT_UNSURE;
	terms = terms_of(rule, version);
	s.now = time_ns(skb);
	s.ect = terms->flags & RULE_ECN && ecn_of(skb, ip);
	if (terms->flags & RULE_EACH) {
		make_key(skb, ip, rule->details[version & 1].each_mask, terms->flags, &s.key);
		hash = hash_key(&s.key, terms->salt);
		s.line = line_of(hash);
		s.print = print_of(hash);
		bpf_loop(TRIES, try_slot, &s, 0);
		if (s.verdict != VERDICT_UNSURE && s.verdict != VERDICT_AGAIN)
			return s.verdict;
	}
	bpf_loop(TRIES, try_own, &s, 0);
	return s.verdict == VERDICT_AGAIN ? VERDICT_UNSURE : s.verdict;
}

/* The start of a plain TCP or UDP packet over IPv4, and over IPv6. */
struct plain4 {
	struct iphdr ip;
	__u32 ports;
};

struct plain6 {
	struct ipv6hdr ip;
	__u32 ports;
};

/*
 * What make_key and hash_key lead to, where that takes no more than a look at
 * plain headers; 0 elsewhere.
 */
static __always_inline __u64 hash_plainly(struct __sk_buff *skb, __u32 ip, const __u32 mask[4], __u32 salt, __u32 flags)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end, *l3;

	if (l3_of(ip) == ETH_HLEN)
		l3 = AT(data, ETH_HLEN);
	else if (!l3_of(ip))
		l3 = AT(data, 0);
	else
		return 0;
	if (ip & IS_IPV6) {
		const struct plain6 *h = l3;
		const __u32 *far = far6(l3);
		__u32 none[4] = {};

		if ((void *)(h + 1) > data_end)
			return 0;
		if (flags & RULE_HOST)
			return hash6(salt, 0, 0, far, none);
		if (flags & RULE_SUBNET) {
			__u32 subnet[4] = { far[0] & mask[0], far[1] & mask[1], far[2] & mask[2], far[3] & mask[3] };

			return hash6(salt, 0, 0, subnet, none);
		}
		if (h->ip.nexthdr != IPPROTO_UDP && h->ip.nexthdr != IPPROTO_TCP)
			return 0;
		return hash6(salt, h->ip.nexthdr, h->ports, h->ip.saddr.in6_u.u6_addr32, h->ip.daddr.in6_u.u6_addr32);
	} else {
		const struct plain4 *h = l3;

		if ((void *)(h + 1) > data_end)
			return 0;
		if (!(flags & RULE_FLOW))
			return hash4(salt, 0, 0, *(__u32 *)far4(l3) & (flags & RULE_SUBNET ? mask[0] : ~0U), 0);
		if (*(__u8 *)l3 != 0x45 || h->ip.frag_off & bpf_htons(IP_OFFSET) ||
		    (h->ip.protocol != IPPROTO_UDP && h->ip.protocol != IPPROTO_TCP))
			return 0;
		return hash4(salt, h->ip.protocol, h->ports, h->ip.saddr, h->ip.daddr);
	}
}

/* The slot of a host or flow, if it has one. */
static __always_inline struct bucket *find_bucket(__u64 hash)
{
	__u32 number = line_of(hash), print = print_of(hash);
	struct bucket *slot;
	struct line *line;

	line = bpf_map_lookup_elem(&table, &number);
	if (!line)
		return NULL;
	slot = &line->slot[home_of(print)];
	return READ_ONCE(slot->print) == print ? slot : find_slot(line, print);
}

static __always_inline void count(__u64 *packets, __u64 *bytes, __u64 n)
{
	++*packets;
	*bytes += n;
}

static __always_inline struct counters *counters_of(struct rule *rule)
{
	return &rule->counters[bpf_get_smp_processor_id() & hook.cpu_mask];
}

/* Acts on a verdict of any kind. */
static __always_inline int act(struct __sk_buff *skb, __u32 ip, struct rule *rule, __u32 flags, __u64 bytes,
			       enum verdict verdict)
{
	struct counters *c = counters_of(rule);

	if (verdict == VERDICT_MARK && mark_ce(skb, ip))
		verdict = VERDICT_UNSURE;
	if (verdict == VERDICT_UNSURE)
		c->unsure_packets++;
	if ((verdict == VERDICT_EXCESS && !(flags & RULE_PASS)) ||
	    (verdict == VERDICT_UNSURE && flags & RULE_FAIL_CLOSED)) {
		count(&c->dropped_packets, &c->dropped_bytes, bytes);
		return DROP;
	}
	if (verdict == VERDICT_EXCESS || verdict == VERDICT_MARK)
		count(&c->spared_packets, &c->spared_bytes, bytes);
	c->marked_packets += verdict == VERDICT_MARK;
	count(&c->passed_packets, &c->passed_bytes, bytes);
	return NEXT;
}

/* Applies any rule to any packet. */
__noinline int apply_slowly(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 algorithm)
{
	struct rule *rule = bpf_map_lookup_elem(&rules, &id);
	enum verdict verdict = VERDICT_PASS;
	const struct terms *terms;
	__u32 version, flags;
	__u64 bytes;

	if (!rule)
		return NEXT;
	version = version_of(rule);
	terms = terms_of(rule, version);
	flags = terms->flags;
	/* The other algorithm's program, next in the chain, sees to its own rules. */
	if ((flags & RULE_LEAKY) != algorithm)
		return NEXT;
	bytes = framed_bytes(skb, ip, terms->overhead, terms->mpu);
	if (!(flags & RULE_UNLIMITED))
		verdict = charge_slowly(skb, ip, id, version, bytes);
	return act(skb, ip, rule, flags, bytes, verdict);
}

/* What only apply_slowly knows about. */
#define RULE_RARE (RULE_UNLIMITED | RULE_FRAMING | RULE_ECN | RULE_PASS | RULE_FAIL_CLOSED)

/*
 * The same for what most packets and rules are: counts as long as it is, and
 * its bucket is at hand and charged by nobody else at this moment. What else
 * there may be is left to the long way, which begins anew.
 */
static __always_inline int apply(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 algorithm)
{
	const struct terms *terms;
	struct bucket *bucket;
	enum verdict verdict;
	struct counters *c;
	__u32 version, flags;
	struct rule *rule;
	__u64 hash, now;

	rule = bpf_map_lookup_elem(&rules, &id);
	if (!rule)
		return NEXT;
	version = version_of(rule);
	terms = terms_of(rule, version);
	flags = terms->flags;
	if ((flags ^ algorithm) & (RULE_LEAKY | RULE_RARE) || skb->gso_size || skb->vlan_present)
		return apply_slowly(skb, ip, id, algorithm);
	/* Touched before the clock is read, which waits for all loads, so that two misses are one. */
	if (IS_BIG)
		READ_ONCE(counters_of(rule)->passed_packets);
	if (flags & RULE_EACH) {
		hash = hash_plainly(skb, ip, rule->details[version].each_mask, terms->salt, flags);
		bucket = hash ? find_bucket(hash) : NULL;
		if (!bucket)
			return apply_slowly(skb, ip, id, algorithm);
		verdict = charge_bucket(terms, bucket, print_of(hash), time_ns(skb), skb->len, false);
	} else {
		now = time_ns(skb);
		verdict = charge_bucket(terms, &rule->own, 0, now, skb->len, false);
		/* With two CPUs on one bucket, that the other was faster is as likely as not. */
		if (verdict == VERDICT_AGAIN)
			verdict = charge_bucket(terms, &rule->own, 0, now, skb->len, false);
	}
	c = counters_of(rule);
	if (verdict == VERDICT_PASS) {
		count(&c->passed_packets, &c->passed_bytes, skb->len);
		return NEXT;
	}
	if (verdict == VERDICT_EXCESS) {
		count(&c->dropped_packets, &c->dropped_bytes, skb->len);
		return DROP;
	}
	return apply_slowly(skb, ip, id, algorithm);
}

/* Where the IP packet is that could not be found at once, and the id plus one of its rule: ip << 32 | id. */
__noinline __u64 find_slowly(struct __sk_buff *skb)
{
	struct address far = {};
	int ip = find_ip(skb);
	__u32 id;

	if (ip < 0 || far_address(skb, ip, &far))
		return 0;
	if (ip & IS_IPV6)
		id = is_discovery(skb, ip) ? 0 : match6_from(far.word[0], far.word[1], lengths.version, 0);
	else
		id = match4_from(far.word[0], lengths.version, 0);
	return (__u64)ip << 32 | id;
}

static __always_inline int limit(struct __sk_buff *skb, __u32 algorithm)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end, *l3;
	__u32 ip = hook.l2_bytes, id;
	const __u64 *far;
	__be16 proto;
	__u64 found;

	if (ip) {
		if (data + ETH_HLEN > data_end)
			return NEXT;
		proto = *(__be16 *)AT(data, ETH_HLEN - sizeof(proto));
		l3 = AT(data, ETH_HLEN);
	} else {
		proto = skb->protocol;
		l3 = AT(data, 0);
	}
	if (proto == bpf_htons(ETH_P_IP) && l3 + sizeof(struct iphdr) <= data_end) {
		if (*(__u8 *)l3 >> 4 != 4)
			return NEXT;
		id = match4(*(__u32 *)far4(l3));
	} else if (proto == bpf_htons(ETH_P_IPV6) && l3 + sizeof(struct ipv6hdr) <= data_end) {
		if (*(__u8 *)l3 >> 4 != 6)
			return NEXT;
		ip |= IS_IPV6;
		if (maybe_discovery(((struct ipv6hdr *)l3)->nexthdr) && is_discovery(skb, ip))
			return NEXT;
		far = far6(l3);
		id = match6(far[0], far[1]);
	} else if (proto == bpf_htons(ETH_P_IP) || proto == bpf_htons(ETH_P_IPV6) || is_tag(proto)) {
		found = find_slowly(skb);
		ip = found >> 32;
		id = found;
	} else {
		return NEXT;
	}
	return id ? apply(skb, ip, id - 1, algorithm) : NEXT;
}

#endif
