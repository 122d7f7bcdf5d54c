/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The bucket key of a packet, and the key's hash directly from plain headers. */
#ifndef SHAPECTL_KEY_H
#define SHAPECTL_KEY_H

#include "packet.h"
#include "table.h"

static __always_inline void mask_address(struct address *a, __u32 bits)
{
	a->word[0] &= hook.masks[bits & NO_LENGTH][0];
	a->word[1] &= hook.masks[bits & NO_LENGTH][1];
}

/* The masked far address, or with RULE_FLOW the fields of the 5-tuple that the packet has. */
static __noinline void make_key(struct __sk_buff *skb, __u32 ip, __u32 bits, __u32 flags, struct key *key)
{
	struct address *src = (struct address *)key->src;
	struct transport t = {};

	key->family = ip & IS_IPV6 ? 6 : 4;
	if (!(flags & RULE_FLOW)) {
		far_address(skb, ip, src);
		if (flags & RULE_SUBNET)
			mask_address(src, bits);
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

/* The start of a plain TCP or UDP packet over IPv4, and over IPv6. */
struct plain4 {
	struct iphdr ip;
	__u32 ports;
};

struct plain6 {
	struct ipv6hdr ip;
	__u32 ports;
};

/* hash_key of the key that make_key would make, or 0 if the headers are not plain. */
static __always_inline __u64 hash_plain(struct __sk_buff *skb, __u32 ip, __u32 bits, __u32 salt, __u32 flags)
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
			const __u32 *mask = (const __u32 *)hook.masks[bits & NO_LENGTH];
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
			return hash4(salt, 0, 0, *(__u32 *)far4(l3) & (flags & RULE_SUBNET ? (__u32)hook.masks[bits & NO_LENGTH][0] : ~0U), 0);
		if (*(__u8 *)l3 != 0x45 || h->ip.frag_off & bpf_htons(IP_OFFSET) ||
		    (h->ip.protocol != IPPROTO_UDP && h->ip.protocol != IPPROTO_TCP))
			return 0;
		return hash4(salt, h->ip.protocol, h->ports, h->ip.saddr, h->ip.daddr);
	}
}

#endif
