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

/* Where a header has the address that rules go by. */
#define FAR_OFFSET(header)                                         \
	(hook.match_src ? __builtin_offsetof(struct header, saddr) \
			: __builtin_offsetof(struct header, daddr))

/*
 * What of a packet is IP: the offset of the header, and IS_IPV6. It is all that
 * is kept of what was parsed. Whatever else is needed is read where it is
 * needed, which for most packets is nowhere.
 */
#define IS_IPV6 (1 << 16)

static __always_inline __u32 l3_of(__u32 ip)
{
	return ip & (IS_IPV6 - 1);
}

/* What follows the IP header and its extensions. */
struct transport {
	__u32 l4; /* its offset */
	__u8 proto;
	bool headless; /* a later fragment: no transport header follows */
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

/* The address that rules go by in a header that is in the packet. */
static __always_inline const void *far4(const struct iphdr *ip)
{
	if (hook.match_src)
		return AT(ip, __builtin_offsetof(struct iphdr, saddr));
	return AT(ip, __builtin_offsetof(struct iphdr, daddr));
}

static __always_inline const void *far6(const struct ipv6hdr *ip)
{
	if (hook.match_src)
		return AT(ip, __builtin_offsetof(struct ipv6hdr, saddr));
	return AT(ip, __builtin_offsetof(struct ipv6hdr, daddr));
}

static __always_inline bool is_extension(__u8 proto)
{
	return proto == IPPROTO_HOPOPTS || proto == IPPROTO_ROUTING || proto == IPPROTO_DSTOPTS ||
	       proto == IPPROTO_FRAGMENT || proto == IPPROTO_AH || proto == IPPROTO_MH ||
	       proto == 139 /* HIP, RFC 7401 */ || proto == 140 /* Shim6, RFC 5533 */;
}

static __always_inline int transport_ipv4(struct __sk_buff *skb, __u32 ip, struct transport *t)
{
	struct iphdr h;

	if (bpf_skb_load_bytes(skb, l3_of(ip), &h, sizeof(h)))
		return -1;
	t->l4 = l3_of(ip) + h.ihl * 4;
	t->proto = h.protocol;
	/* A header that claims to be shorter than it is has addresses, and no more. */
	t->headless = h.ihl < sizeof(h) / 4 || (h.frag_off & bpf_htons(IP_OFFSET));
	return 0;
}

/*
 * Finds what follows the IP header. It steps over extension headers; what lies
 * beyond the bound is told by the header it stopped at. Not inlined: the verifier
 * looks at it once, not once for each way to it, and the common way is short.
 */
__noinline int find_transport(struct __sk_buff *skb, __u32 ip, struct transport *t)
{
	__u8 ext[4]; /* next header, length, and of a fragment header its offset */
	int i;

	if (!t)
		return -1;
	if (!(ip & IS_IPV6))
		return transport_ipv4(skb, ip, t);
	t->headless = false;
	t->l4 = l3_of(ip) + sizeof(struct ipv6hdr);
	if (bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct ipv6hdr, nexthdr), &t->proto, 1))
		return -1;
	for (i = 0; i < IPV6_EXTENSIONS && is_extension(t->proto); i++) {
		if (bpf_skb_load_bytes(skb, t->l4, ext, sizeof(ext)))
			break;
		if (t->proto == IPPROTO_FRAGMENT) {
			t->l4 += 8;
			t->headless = ext[2] || ext[3] & 0xf8;
		} else if (t->proto == IPPROTO_AH) {
			t->l4 += (ext[1] + 2) * 4; /* RFC 4302, 2.2 */
		} else {
			t->l4 += (ext[1] + 1) * 8; /* RFC 8200, 4.3 */
		}
		t->proto = ext[0];
		if (t->headless)
			return 0;
	}
	if (is_extension(t->proto))
		t->headless = true;
	return 0;
}

/*
 * Neighbour discovery, without which IPv6 is mute. A node ignores it from
 * further away (RFC 4861, 7.1), so nobody can hide behind it.
 */
__noinline int is_discovery(struct __sk_buff *skb, __u32 ip)
{
	struct transport t = {};
	__u8 hops, type;

	if (find_transport(skb, ip, &t) || t.proto != IPPROTO_ICMPV6 || t.headless)
		return false;
	return !bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct ipv6hdr, hop_limit), &hops, 1) &&
	       hops == ND_HOP_LIMIT && !bpf_skb_load_bytes(skb, t.l4, &type, 1) && type >= ND_FIRST && type <= ND_LAST;
}

/* Whether there may be more to an IPv6 packet than what it is at first sight. */
static __always_inline bool maybe_discovery(__u8 proto)
{
	return proto != IPPROTO_UDP && proto != IPPROTO_TCP && (proto == IPPROTO_ICMPV6 || is_extension(proto));
}

static __always_inline bool is_tag(__be16 proto)
{
	return proto == bpf_htons(ETH_P_8021Q) || proto == bpf_htons(ETH_P_8021AD);
}

/*
 * Where the IP packet is behind VLAN tags, or where headers lie outside the
 * linear part; negative if there is none. It copies what it reads.
 */
__noinline int find_ip(struct __sk_buff *skb)
{
	__be16 proto = skb->protocol;
	__u32 l3 = hook.l2_bytes;
	__u8 version, last;

	if (l3 && bpf_skb_load_bytes(skb, ETH_HLEN - sizeof(proto), &proto, sizeof(proto)))
		return -1;
	/* Not a loop: without CAP_PERFMON the verifier follows it past its end. */
	if (l3 && is_tag(proto)) {
		l3 += VLAN_BYTES;
		if (bpf_skb_load_bytes(skb, l3 - sizeof(proto), &proto, sizeof(proto)))
			return -1;
		/* Two at most, with one that the device may have taken off. */
		if (is_tag(proto) && !skb->vlan_present) {
			l3 += VLAN_BYTES;
			if (bpf_skb_load_bytes(skb, l3 - sizeof(proto), &proto, sizeof(proto)))
				return -1;
		}
	}
	if (bpf_skb_load_bytes(skb, l3, &version, sizeof(version)))
		return -1;
	version >>= 4;
	/* Is the whole header there? */
	if (proto == bpf_htons(ETH_P_IP) && version == 4 &&
	    !bpf_skb_load_bytes(skb, l3 + sizeof(struct iphdr) - 1, &last, sizeof(last)))
		return l3;
	if (proto == bpf_htons(ETH_P_IPV6) && version == 6 &&
	    !bpf_skb_load_bytes(skb, l3 + sizeof(struct ipv6hdr) - 1, &last, sizeof(last)))
		return l3 | IS_IPV6;
	return -1;
}

/* In network order; of IPv4 the first four bytes. */
struct address {
	__u64 word[2];
};

/* The address that rules go by; negative if the packet ends before. */
__noinline int far_address(struct __sk_buff *skb, __u32 ip, struct address *far)
{
	if (!far)
		return -1;
	if (ip & IS_IPV6)
		return bpf_skb_load_bytes(skb, l3_of(ip) + FAR_OFFSET(ipv6hdr), far, 16);
	return bpf_skb_load_bytes(skb, l3_of(ip) + FAR_OFFSET(iphdr), far, 4);
}

static __always_inline bool has_ports(__u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == IPPROTO_SCTP || proto == IPPROTO_DCCP ||
	       proto == IPPROTO_UDPLITE;
}

/* Bytes in front of a segment's payload: each segment on the wire repeats them. */
static __always_inline __u32 segment_header(struct __sk_buff *skb, __u32 ip)
{
	struct transport t = {};
	__u8 offset;

	if (find_transport(skb, ip, &t))
		return l3_of(ip);
	if (t.headless)
		return t.l4;
	if (t.proto == IPPROTO_TCP &&
	    !bpf_skb_load_bytes(skb, t.l4 + 12 /* data offset, RFC 9293 3.1 */, &offset, sizeof(offset)))
		return t.l4 + (offset >> 4) * 4;
	return t.proto == IPPROTO_UDP ? t.l4 + 8 : t.l4;
}

/*
 * Bytes on the wire at layer 2, without FCS and preamble, of a packet that is
 * more than its length. On egress wire_len is right for any GSO packet, tunnels
 * too. On ingress it is not: the kernel takes it before it puts the link header
 * back, and to 6.18 without the headers of the segments that GRO merged, so
 * they are counted here.
 */
__noinline __u64 framed_bytes(struct __sk_buff *skb, __u32 ip, __s32 overhead, __u32 mpu)
{
	__u32 size = skb->gso_size, len = skb->len;
	__u64 bytes = len, segments = 1, header = 0, full, last;

	if (size) {
		header = segment_header(skb, ip);
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

/* The byte with the ECN bits, RFC 3168: the low ones of IPv4's, and those above the middle of IPv6's. */
static __always_inline int load_tos(struct __sk_buff *skb, __u32 ip, __u8 *tos)
{
	return bpf_skb_load_bytes(skb, l3_of(ip) + 1, tos, sizeof(*tos));
}

__noinline int ecn_of(struct __sk_buff *skb, __u32 ip)
{
	__u8 tos;

	if (load_tos(skb, ip, &tos))
		return 0;
	return (ip & IS_IPV6 ? tos >> 4 : tos) & 3;
}

/* Congestion experienced; 0 or an error. Only for packets that are ECN-capable. */
__noinline int mark_ce(struct __sk_buff *skb, __u32 ip)
{
	__u32 l3 = l3_of(ip);
	__u8 tos;
	int err;

	err = load_tos(skb, ip, &tos);
	if (err)
		return err;
	if (ip & IS_IPV6) {
		tos |= 0x30;
		return bpf_skb_store_bytes(skb, l3 + 1, &tos, sizeof(tos), BPF_F_RECOMPUTE_CSUM);
	}
	err = bpf_l3_csum_replace(skb, l3 + __builtin_offsetof(struct iphdr, check), bpf_htons(tos),
				  bpf_htons(tos | 3), sizeof(__u16));
	if (err)
		return err;
	tos |= 3;
	return bpf_skb_store_bytes(skb, l3 + 1, &tos, sizeof(tos), 0);
}

#endif
