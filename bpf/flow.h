/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The flow of a packet, as a key without an id, and its hash. */
#ifndef SHAPECTL_FLOW_H
#define SHAPECTL_FLOW_H

#include "packet.h"

static __always_inline __u64 time_ns(struct __sk_buff *skb)
{
	return HOOK(virtual_clock) ? skb->tstamp : bpf_ktime_get_ns();
}

/* The start of a plain packet with ports over IPv4, and over IPv6. */
struct plain4 {
	struct iphdr ip;
	__u32 ports;
};

struct plain6 {
	struct ipv6hdr ip;
	__u32 ports;
};

static __always_inline bool set_ports(struct key *flow, __u8 proto, __u32 ports)
{
	flow->proto = proto;
	flow->sport = ports;
	flow->dport = ports >> 16;
	return true;
}

/* Reads plain headers in the linear part: all of the 5-tuple, or only the far address, into src. Returns false for others. */
static __always_inline bool parse_plain(struct __sk_buff *skb, __u32 ip, bool all, struct key *flow)
{
	void *data_end = (void *)(long)skb->data_end, *l3 = (void *)(long)skb->data + HOOK(l2_bytes);
	const struct plain4 *h4 = l3;
	const struct plain6 *h6 = l3;
	const __u32 *far;

	if (l3_of(ip) != HOOK(l2_bytes))
		return false;
	if (ip & IS_IPV6) {
		if ((void *)(h6 + 1) > data_end)
			return false;
		if (!all) {
			far = FAR(l3, ipv6hdr);
			__builtin_memcpy(flow->src, far, sizeof(flow->src));
			__builtin_memset(flow->dst, 0, sizeof(flow->dst));
			return set_ports(flow, 0, 0);
		}
		__builtin_memcpy(flow->src, &h6->ip.saddr, sizeof(flow->src));
		__builtin_memcpy(flow->dst, &h6->ip.daddr, sizeof(flow->dst));
		if (!has_ports(h6->ip.nexthdr))
			return false;
		return set_ports(flow, h6->ip.nexthdr, h6->ports);
	}
	if ((void *)(h4 + 1) > data_end)
		return false;
	if (!all) {
		far = FAR(l3, iphdr);
		__builtin_memset(flow->src, 0, sizeof(flow->src));
		flow->src[0] = *far;
		flow->dst[0] = 0;
		return set_ports(flow, 0, 0);
	}
	flow->src[0] = h4->ip.saddr;
	flow->dst[0] = h4->ip.daddr;
	if (*(__u8 *)l3 != 0x45 || h4->ip.frag_off & bpf_htons(IP_OFFSET) || !has_ports(h4->ip.protocol))
		return false;
	return set_ports(flow, h4->ip.protocol, h4->ports);
}

/*
 * Reads the fields of the 5-tuple that a packet has, and its family. Returns the offset of its transport header, or 0 if it has
 * none.
 */
static __always_inline __u32 parse_flow(struct __sk_buff *skb, __u32 ip, struct key *flow)
{
	struct transport t = {};
	__u32 ports = 0;

	flow->family = ip & IS_IPV6 ? 6 : 4;
	if (parse_plain(skb, ip, true, flow))
		return l3_of(ip) + (ip & IS_IPV6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
	if (ip & IS_IPV6) {
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct ipv6hdr, saddr), flow->src, sizeof(flow->src));
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct ipv6hdr, daddr), flow->dst, sizeof(flow->dst));
	} else {
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct iphdr, saddr), flow->src, 4);
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct iphdr, daddr), flow->dst, 4);
	}
	if (!find_transport(skb, ip, &t) && !t.headless && has_ports(t.proto))
		bpf_skb_load_bytes(skb, t.l4, &ports, sizeof(ports));
	set_ports(flow, t.proto, ports);
	return t.headless ? 0 : t.l4;
}

/* Masks a far address for a scope of RULE_SUBNET. */
static __always_inline void mask_far(__u32 *far, __u32 scope, __u32 bits)
{
	const volatile __u32 *mask = (const volatile __u32 *)hook.masks[bits & NO_LENGTH];

	if (!(scope & RULE_SUBNET))
		return;
	far[0] &= mask[0];
	far[1] &= mask[1];
	far[2] &= mask[2];
	far[3] &= mask[3];
}

/* A summand of NH (Black et al., UMAC; RFC 4418, 5.2). With secret words two keys collide with probability 2^-32. */
#define NH(i, a, b) \
	((__u64)((__u32)(a) + hook.secret[2 * (i)]) * (__u32)((__u32)(b) + hook.secret[2 * (i) + 1]))

/* Spreads the result of NH over all bits. */
static __always_inline __u64 mix(__u64 h)
{
	h ^= h >> 32;
	h *= 0xc4ceb9fe1a85ec53ULL; /* of murmur3's finalizer (Appleby, public domain) */
	return h ^ h >> 32;
}

/* The hash of a bucket key. */
static __always_inline __u64 hash_flow(const struct key *flow, __u32 ip, __u32 salt)
{
	__u32 ports = (__u32)flow->dport << 16 | flow->sport; /* in the order of a packet */
	__u64 h = NH(0, flow->src[0], flow->dst[0]) + NH(1, ports, salt ^ flow->proto);

	if (ip & IS_IPV6)
		h += NH(2, flow->src[1], flow->dst[1]) + NH(3, flow->src[2], flow->dst[2]) + NH(4, flow->src[3], flow->dst[3]);
	return mix(h);
}

#endif
