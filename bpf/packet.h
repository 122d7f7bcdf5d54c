/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* From an skb to addresses, ports, ECN bits and the bytes that the wire carries. */
#ifndef SHAPECTL_PACKET_H
#define SHAPECTL_PACKET_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include "maps.h"

#define VLAN_BYTES 4
#define IPV6_EXTENSIONS 8

#define IP_OFFSET 0x1fff

#define ND_FIRST 133 /* router solicitation, RFC 4861 */
#define ND_LAST 137  /* redirect */
#define ND_HOP_LIMIT 255

struct packet {
	__u32 src[4];
	__u32 dst[4];
	__u32 l3; /* offset of the IP header */
	__u32 l4; /* offset of what follows it and its extensions */
	__u8 family;
	__u8 proto;
	__u8 ecn;
	__u8 hop_limit; /* of IPv6 */
	bool headless; /* a later fragment: no transport header follows */
	bool nd;       /* neighbour discovery, without which IPv6 is mute */
};

/*
 * A place at a constant offset: without CAP_PERFMON the verifier lets nothing
 * else be added to most pointers, so the compiler must not join branches.
 */
#define AT(start, offset)                              \
	({                                             \
		void *at = (void *)(start) + (offset); \
		asm volatile("" : "+r"(at)::"memory"); \
		at;                                    \
	})

static __always_inline const __u32 *far_side(const struct packet *p)
{
	if (hook.match_src)
		return AT(p, __builtin_offsetof(struct packet, src));
	return AT(p, __builtin_offsetof(struct packet, dst));
}

/* Whether it is a packet that can be matched; its header may be in the packet or copied out of it. */
static __always_inline bool parse_ipv4(const struct iphdr *ip, __u32 l3, struct packet *p)
{
	__u32 header = ip->ihl * 4;

	p->family = 4;
	p->src[0] = ip->saddr;
	p->dst[0] = ip->daddr;
	p->proto = ip->protocol;
	p->ecn = ip->tos & 3;
	p->l3 = l3;
	p->l4 = l3 + header;
	/* A header that claims to be shorter than it is has addresses, and no more. */
	p->headless = header < sizeof(*ip) || (ip->frag_off & bpf_htons(IP_OFFSET));
	return ip->version == 4;
}

static __always_inline bool is_extension(__u8 proto)
{
	return proto == IPPROTO_HOPOPTS || proto == IPPROTO_ROUTING || proto == IPPROTO_DSTOPTS ||
	       proto == IPPROTO_FRAGMENT || proto == IPPROTO_AH || proto == IPPROTO_MH ||
	       proto == 139 /* HIP, RFC 7401 */ || proto == 140 /* Shim6, RFC 5533 */;
}

/*
 * Steps over extension headers; what lies beyond the bound is keyed by its
 * addresses and the header it stopped at. Rare, so not inlined: the verifier
 * looks at it once, not once for each way to it, and the common way is short.
 */
__noinline int walk_ipv6(struct __sk_buff *skb, struct packet *p)
{
	__u8 ext[4]; /* next header, length, and of a fragment header its offset */
	int i;

	if (!p)
		return 0;
	for (i = 0; i < IPV6_EXTENSIONS && is_extension(p->proto); i++) {
		if (bpf_skb_load_bytes(skb, p->l4, ext, sizeof(ext)))
			break;
		if (p->proto == IPPROTO_FRAGMENT) {
			p->l4 += 8;
			p->headless = ext[2] || ext[3] & 0xf8;
		} else if (p->proto == IPPROTO_AH) {
			p->l4 += (ext[1] + 2) * 4; /* RFC 4302, 2.2 */
		} else {
			p->l4 += (ext[1] + 1) * 8; /* RFC 8200, 4.3 */
		}
		p->proto = ext[0];
		if (p->headless)
			return 0;
	}
	if (is_extension(p->proto))
		p->headless = true;
	/* A node ignores discovery from further away (RFC 4861, 7.1), so nobody can hide behind it. */
	p->nd = p->proto == IPPROTO_ICMPV6 && !p->headless && p->hop_limit == ND_HOP_LIMIT &&
		!bpf_skb_load_bytes(skb, p->l4, ext, 1) && ext[0] >= ND_FIRST && ext[0] <= ND_LAST;
	return 0;
}

static __always_inline bool parse_ipv6(struct __sk_buff *skb, const struct ipv6hdr *ip, __u32 l3, struct packet *p)
{
	p->family = 6;
	__builtin_memcpy(p->src, &ip->saddr, sizeof(p->src));
	__builtin_memcpy(p->dst, &ip->daddr, sizeof(p->dst));
	p->proto = ip->nexthdr;
	p->hop_limit = ip->hop_limit;
	p->ecn = ip->flow_lbl[0] >> 4 & 3;
	p->l3 = l3;
	p->l4 = l3 + sizeof(*ip);
	if (ip->version != 6)
		return false;
	if (is_extension(p->proto) || p->proto == IPPROTO_ICMPV6)
		walk_ipv6(skb, p);
	return true;
}

static __always_inline bool is_tag(__be16 proto)
{
	return proto == bpf_htons(ETH_P_8021Q) || proto == bpf_htons(ETH_P_8021AD);
}

/* The long way: behind VLAN tags, or where headers lie outside the linear part. It copies what it reads. */
__noinline int parse_slowly(struct __sk_buff *skb, struct packet *p)
{
	__u32 l3 = hook.l2_bytes;
	__be16 proto = skb->protocol;
	union {
		struct iphdr v4;
		struct ipv6hdr v6;
	} ip = {};

	if (!p)
		return false;
	if (hook.l2_bytes && bpf_skb_load_bytes(skb, ETH_HLEN - sizeof(proto), &proto, sizeof(proto)))
		return false;
	/* Not a loop: without CAP_PERFMON the verifier follows it past its end. */
	if (hook.l2_bytes && is_tag(proto)) {
		l3 += VLAN_BYTES;
		if (bpf_skb_load_bytes(skb, l3 - sizeof(proto), &proto, sizeof(proto)))
			return false;
		if (is_tag(proto)) {
			l3 += VLAN_BYTES;
			if (bpf_skb_load_bytes(skb, l3 - sizeof(proto), &proto, sizeof(proto)))
				return false;
		}
	}
	if (proto == bpf_htons(ETH_P_IP))
		return !bpf_skb_load_bytes(skb, l3, &ip.v4, sizeof(ip.v4)) && parse_ipv4(&ip.v4, l3, p);
	if (proto == bpf_htons(ETH_P_IPV6))
		return !bpf_skb_load_bytes(skb, l3, &ip.v6, sizeof(ip.v6)) && parse_ipv6(skb, &ip.v6, l3, p);
	return false;
}

/* False if it is not IP, or nothing that could be matched: not ours. */
static __always_inline bool parse_packet(struct __sk_buff *skb, struct packet *p)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end, *ip;
	__be16 proto;

	if (hook.l2_bytes) {
		struct ethhdr *eth = data;

		if ((void *)(eth + 1) > data_end)
			return parse_slowly(skb, p);
		proto = eth->h_proto;
		ip = AT(data, ETH_HLEN);
	} else {
		proto = skb->protocol;
		ip = AT(data, 0);
	}
	if (proto == bpf_htons(ETH_P_IP) && ip + sizeof(struct iphdr) <= data_end)
		return parse_ipv4(ip, hook.l2_bytes, p);
	if (proto == bpf_htons(ETH_P_IPV6) && ip + sizeof(struct ipv6hdr) <= data_end)
		return parse_ipv6(skb, ip, hook.l2_bytes, p);
	if (proto == bpf_htons(ETH_P_IP) || proto == bpf_htons(ETH_P_IPV6) || is_tag(proto))
		return parse_slowly(skb, p);
	return false;
}

static __always_inline bool has_ports(__u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == IPPROTO_SCTP || proto == IPPROTO_DCCP ||
	       proto == IPPROTO_UDPLITE;
}

/* Bytes in front of a segment's payload: each segment on the wire repeats them. */
static __always_inline __u32 segment_header(struct __sk_buff *skb, const struct packet *p)
{
	__u8 offset;

	if (p->headless)
		return p->l4;
	if (p->proto == IPPROTO_TCP &&
	    !bpf_skb_load_bytes(skb, p->l4 + 12 /* data offset, RFC 9293 3.1 */, &offset, sizeof(offset)))
		return p->l4 + (offset >> 4) * 4;
	return p->proto == IPPROTO_UDP ? p->l4 + 8 : p->l4;
}

/*
 * Bytes on the wire at layer 2, without FCS and preamble, of a packet that is
 * more than its length. On egress wire_len is right for any GSO packet, tunnels
 * too. On ingress it is not: the kernel takes it before it puts the link header
 * back, and to 6.18 without the headers of the segments that GRO merged, so
 * they are counted here.
 */
__noinline __u64 framed_bytes(struct __sk_buff *skb, const struct packet *p, __s32 overhead, __u32 mpu)
{
	__u32 size = skb->gso_size, len = skb->len;
	__u64 bytes = len, segments = 1, header = 0, full, last;

	if (!p)
		return bytes;
	if (size) {
		header = segment_header(skb, p);
		if (header < len)
			segments = (len - header + size - 1) / size;
		if (hook.ingress) {
			bytes += (segments - 1) * header;
		} else if (skb->wire_len > len) {
			/* What a guest hands over has no count of segments yet. */
			segments = skb->gso_segs ?: segments;
			bytes = skb->wire_len;
			header = segments > 1 ? (bytes - len) / (segments - 1) : 0;
		}
	}
	/* A tag in skb metadata is in no length of the kernel's. */
	if (skb->vlan_present)
		overhead += VLAN_BYTES;
	/* All segments but the last are full. */
	full = size + header;
	last = bytes - (segments - 1) * full;
	full = (__s64)(full + overhead) < (__s64)mpu ? mpu : full + overhead;
	last = (__s64)(last + overhead) < (__s64)mpu ? mpu : last + overhead;
	bytes = (segments - 1) * full + last;
	/* Segments of a byte, made to overflow something? */
	return bytes < 1 << PACKET_BITS ? bytes : (1 << PACKET_BITS) - 1;
}

static __always_inline __u64 wire_bytes(struct __sk_buff *skb, const struct packet *p, __s32 overhead, __u32 mpu)
{
	if (skb->gso_size || skb->vlan_present || overhead || mpu)
		return framed_bytes(skb, p, overhead, mpu);
	return skb->len;
}

/* Congestion experienced, RFC 3168; 0 or an error. Only for packets that are ECN-capable. */
__noinline long mark_ce(struct __sk_buff *skb, const struct packet *p)
{
	__u8 tos;
	long err;

	if (!p || p->ecn == 3)
		return 0;
	err = bpf_skb_load_bytes(skb, p->l3 + 1, &tos, sizeof(tos));
	if (err)
		return err;
	if (p->family == 6) {
		tos |= 0x30;
		return bpf_skb_store_bytes(skb, p->l3 + 1, &tos, sizeof(tos), BPF_F_RECOMPUTE_CSUM);
	}
	err = bpf_l3_csum_replace(skb, p->l3 + __builtin_offsetof(struct iphdr, check), bpf_htons(tos),
				  bpf_htons(tos | 3), sizeof(__u16));
	if (err)
		return err;
	tos |= 3;
	return bpf_skb_store_bytes(skb, p->l3 + 1, &tos, sizeof(tos), 0);
}

#endif
