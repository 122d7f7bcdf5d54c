/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Parses an skb: addresses, ports, ECN bits, and its size on the wire. */
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
#include "hook.h"

#define VLAN_BYTES 4
#define MAX_TAGS (1 << 13) /* 32 KiB of them */
#define IPV6_EXTENSIONS 256 /* at least 2 KiB of them, more than an Ethernet frame holds */

#define IP_OFFSET 0x1fff

/* Neighbour discovery, RFC 4861. */
#define ND_ROUTER_SOLICITATION 133
#define ND_ROUTER_ADVERTISEMENT 134
#define ND_SOLICITATION 135
#define ND_REDIRECT 137
#define ND_HOP_LIMIT 255
#define ND_BYTES 1280 /* IPv6's least MTU: RFC 6980 forbids fragments */

#define ETH_P_FRAME 0x6558	/* transparent Ethernet bridging (RFC 1701): a frame, in GRE and Geneve */
#define TUNNELS 4		/* nested tunnels that are followed */
#define GSO_BY_FRAGS 0xffff	/* a gso_size: segments of different sizes, as in SCTP (linux/skbuff.h) */
#define SCTP_BYTES 12		/* common header, RFC 9260 */

/* Assumed length of unreadable headers, the maximum: two tags, IPv6, and TCP with all options. */
#define UNREAD_BYTES (ETH_HLEN + 2 * VLAN_BYTES + sizeof(struct ipv6hdr) + 60)

/*
 * The variable ip has the offset of the IP header, and IS_IPV6. It is the only
 * result of parsing that is kept. Other fields are read where they are needed,
 * which most packets never reach.
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
	bool headless; /* no transport header follows, as in a later fragment */
};

/* The far address, which rules match, in a header inside the packet. */
#define FAR(l3, header) \
	((l3) + (HOOK(match_src) ? __builtin_offsetof(struct header, saddr) : __builtin_offsetof(struct header, daddr)))

/* Finds the IP header in the linear part, if no tag is before it. Returns the IP version, or 0. */
static __always_inline __u32 plain_header(struct __sk_buff *skb, void **l3)
{
	void *data_end = (void *)(long)skb->data_end;
	__u32 proto = skb->protocol;

	*l3 = (void *)(long)skb->data + HOOK(l2_bytes);
	if (*l3 + sizeof(struct iphdr) > data_end)
		return 0;
	if (HOOK(l2_bytes))
		proto = ((__be16 *)*l3)[-1];
	if (likely(proto == bpf_htons(ETH_P_IP) && *(__u8 *)*l3 >> 4 == 4))
		return 4;
	if (proto == bpf_htons(ETH_P_IPV6) && *l3 + sizeof(struct ipv6hdr) <= data_end && *(__u8 *)*l3 >> 4 == 6)
		return 6;
	return 0;
}

static __always_inline bool is_extension(__u8 proto)
{
	return proto == IPPROTO_HOPOPTS || proto == IPPROTO_ROUTING || proto == IPPROTO_DSTOPTS ||
	       proto == IPPROTO_FRAGMENT || proto == IPPROTO_AH || proto == IPPROTO_MH ||
	       proto == 139 /* HIP, RFC 7401 */ || proto == 140 /* Shim6, RFC 5533 */;
}

/* Iteration over the extension headers of an IPv6 packet. */
struct walk {
	struct __sk_buff *skb;
	__u32 l4; /* offset of the header that proto names */
	__u8 proto;
	__u8 headless;
	__u16 pad;
};

static long next_header(__u64 i, struct walk *w)
{
	__u8 ext[4]; /* next header, length, and the offset of a fragment header */

	(void)i;
	if (!is_extension(w->proto) || bpf_skb_load_bytes(w->skb, w->l4, ext, sizeof(ext)))
		return 1;
	if (w->proto == IPPROTO_FRAGMENT) {
		w->l4 += 8;
		w->headless = ext[2] || ext[3] & 0xf8;
	} else if (w->proto == IPPROTO_AH) {
		w->l4 += (ext[1] + 2) * 4; /* RFC 4302, 2.2 */
	} else {
		w->l4 += (ext[1] + 1) * 8; /* RFC 8200, 4.3 */
	}
	w->proto = ext[0];
	return w->headless & 1; /* 0 or 1, for the verifier */
}

/* Finds the transport header, behind the IP header and all extension headers. */
static __always_inline int find_transport(struct __sk_buff *skb, __u32 ip, struct transport *t)
{
	struct walk w = { .skb = skb, .l4 = l3_of(ip) + sizeof(struct ipv6hdr) };
	struct iphdr h;

	if (!(ip & IS_IPV6)) {
		if (bpf_skb_load_bytes(skb, l3_of(ip), &h, sizeof(h)))
			return -1;
		t->l4 = l3_of(ip) + h.ihl * 4;
		t->proto = h.protocol;
		/* Uses only the addresses of a header with an invalid length. */
		t->headless = h.ihl < sizeof(h) / 4 || (h.frag_off & bpf_htons(IP_OFFSET));
		return 0;
	}
	if (bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct ipv6hdr, nexthdr), &w.proto, 1))
		return -1;
	bpf_loop(IPV6_EXTENSIONS, next_header, &w, 0);
	t->l4 = w.l4;
	t->proto = w.proto;
	t->headless = w.headless || is_extension(w.proto);
	return 0;
}

static __always_inline bool is_link_local(const __be32 *addr)
{
	return (addr[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000);
}

static __always_inline bool is_multicast(const __be32 *addr)
{
	return (addr[0] & bpf_htonl(0xff000000)) == bpf_htonl(0xff000000);
}

static __always_inline bool is_unspecified(const __be32 *addr)
{
	return !(addr[0] | addr[1] | addr[2] | addr[3]);
}

/* Whether a multicast address is the destination of a type in RFC 4861 (4.1 to 4.5). */
static __always_inline bool is_group_of(__u8 type, const __be32 *dst)
{
	if (dst[0] != bpf_htonl(0xff020000) || dst[1])
		return false;
	if (type == ND_SOLICITATION)
		return dst[2] == bpf_htonl(1) && (dst[3] & bpf_htonl(0xff000000)) == bpf_htonl(0xff000000);
	if (type == ND_ROUTER_SOLICITATION)
		return !dst[2] && dst[3] == bpf_htonl(2);
	return type != ND_REDIRECT && !dst[2] && dst[3] == bpf_htonl(1);
}

/*
 * Genuine neighbour discovery: sent on this link (hop limit 255), small, not
 * fragmented, with addresses that RFC 4861 allows for the type and that no router
 * forwards. Any other packet of such a type may be forwarded traffic.
 */
__noinline int is_discovery(struct __sk_buff *skb, __u32 ip)
{
	struct {
		struct ipv6hdr ip;
		__u8 type, code;
		__u16 check;
	} h;
	const __be32 *src = h.ip.saddr.in6_u.u6_addr32, *dst = h.ip.daddr.in6_u.u6_addr32;

	if (skb->len - l3_of(ip) > ND_BYTES || (skb->gso_size && !HOOK(replay)) ||
	    bpf_skb_load_bytes(skb, l3_of(ip), &h, sizeof(h)))
		return false;
	if (h.ip.nexthdr != IPPROTO_ICMPV6 || h.ip.hop_limit != ND_HOP_LIMIT || h.code ||
	    h.type < ND_ROUTER_SOLICITATION || h.type > ND_REDIRECT ||
	    bpf_ntohs(h.ip.payload_len) > ND_BYTES - sizeof(h.ip))
		return false;
	if ((h.type == ND_ROUTER_ADVERTISEMENT || h.type == ND_REDIRECT) && !is_link_local(src))
		return false;
	if (is_multicast(src))
		return false;
	if (is_unspecified(src) && h.type != ND_SOLICITATION && h.type != ND_ROUTER_SOLICITATION)
		return false;
	if (is_multicast(dst))
		return is_group_of(h.type, dst);
	/* RFC 4291, 2.5.6: routers do not forward link-local addresses. */
	return is_link_local(src) || (is_link_local(dst) && !is_unspecified(src));
}

static __always_inline bool is_tag(__be16 proto)
{
	return proto == bpf_htons(ETH_P_8021Q) || proto == bpf_htons(ETH_P_8021AD);
}

/* Iteration over VLAN tags. */
struct tags {
	struct __sk_buff *skb;
	__u32 l3; /* offset of the header that proto names */
	__be16 proto;
	__u16 pad;
};

static long next_tag(__u64 i, struct tags *w)
{
	(void)i;
	if (!is_tag(w->proto))
		return 1;
	w->l3 += VLAN_BYTES;
	return bpf_skb_load_bytes(w->skb, w->l3 - sizeof(w->proto), &w->proto, sizeof(w->proto)) != 0;
}

/*
 * The IP packet at an offset, or with ETH_P_FRAME in the frame there, behind all VLAN
 * tags. The number of tags is not limited, because Linux strips any number. Negative
 * if there is no complete IP header.
 */
__noinline int find_ip_at(struct __sk_buff *skb, __u32 at, __u32 proto)
{
	struct tags w = { .skb = skb, .l3 = at, .proto = proto };
	__u8 version;

	if (w.proto == bpf_htons(ETH_P_FRAME)) {
		w.l3 += ETH_HLEN;
		if (bpf_skb_load_bytes(skb, w.l3 - sizeof(w.proto), &w.proto, sizeof(w.proto)))
			return -1;
		bpf_loop(MAX_TAGS, next_tag, &w, 0);
	}
	if (bpf_skb_load_bytes(skb, w.l3, &version, sizeof(version)))
		return -1;
	if (w.proto == bpf_htons(ETH_P_IP) && version >> 4 == 4 && w.l3 + sizeof(struct iphdr) <= skb->len)
		return w.l3;
	if (w.proto == bpf_htons(ETH_P_IPV6) && version >> 4 == 6 && w.l3 + sizeof(struct ipv6hdr) <= skb->len)
		return w.l3 | IS_IPV6;
	return -1;
}

/* The outermost IP header of a packet. */
static __always_inline int find_ip(struct __sk_buff *skb)
{
	return find_ip_at(skb, 0, HOOK(l2_bytes) ? bpf_htons(ETH_P_FRAME) : skb->protocol);
}

/* In network order. IPv4 uses the first four bytes. */
struct address {
	__u64 word[2];
};

/* The address that rules match; negative if the packet is too short. */
__noinline int far_address(struct __sk_buff *skb, __u32 ip, struct address *far)
{
	__u32 src = __builtin_offsetof(struct iphdr, saddr), bytes = 4;

	if (!far)
		return -1;
	if (ip & IS_IPV6) {
		src = __builtin_offsetof(struct ipv6hdr, saddr);
		bytes = sizeof(*far);
	}
	return bpf_skb_load_bytes(skb, l3_of(ip) + src + (HOOK(match_src) ? 0 : bytes), far, bytes);
}

static __always_inline bool has_ports(__u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == IPPROTO_SCTP || proto == IPPROTO_DCCP ||
	       proto == IPPROTO_UDPLITE;
}

/* The end of an IP packet by its length field; 0 for a jumbogram (RFC 2675). */
static __always_inline __u32 end_of(struct __sk_buff *skb, __u32 ip)
{
	__u32 offset = ip & IS_IPV6 ? __builtin_offsetof(struct ipv6hdr, payload_len) :
				      __builtin_offsetof(struct iphdr, tot_len);
	__be16 length;

	if (bpf_skb_load_bytes(skb, l3_of(ip) + offset, &length, sizeof(length)) || !length)
		return 0;
	return l3_of(ip) + bpf_ntohs(length) + (ip & IS_IPV6 ? sizeof(struct ipv6hdr) : 0);
}

/* Inside UDP, on any port: Geneve (RFC 8926), VXLAN (RFC 7348) with or without GPE, or plain IP. */
static __always_inline int find_ip_in_udp(struct __sk_buff *skb, __u32 at)
{
	struct {
		__u8 first, second;
		__be16 proto;
	} h;
	__be16 proto = bpf_htons(ETH_P_FRAME);
	int ip;

	at += 8;
	if (bpf_skb_load_bytes(skb, at, &h, sizeof(h)))
		return -1;
	if (h.first >> 4 == 4 || h.first >> 4 == 6) {
		ip = find_ip_at(skb, at, h.first >> 4 == 4 ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6));
		/* Other payload may begin with such a byte. */
		return ip < 0 || end_of(skb, ip) != skb->len ? -1 : ip;
	}
	if (h.first < 0x40 && (h.proto == bpf_htons(ETH_P_FRAME) || h.proto == bpf_htons(ETH_P_IP) ||
			       h.proto == bpf_htons(ETH_P_IPV6))) {
		at += h.first * 4; /* options */
		proto = h.proto;
	} else if (!(h.first & 8)) {
		return -1;
	} else if (h.first & 4) {
		h.proto &= bpf_htons(0xff);
		if (h.proto == bpf_htons(1))
			proto = bpf_htons(ETH_P_IP);
		else if (h.proto == bpf_htons(2))
			proto = bpf_htons(ETH_P_IPV6);
	}
	return find_ip_at(skb, at + 8, proto);
}

/* The inner IP packet of a tunnel; negative if there is none, or it cannot be read. */
__noinline int find_inner(struct __sk_buff *skb, struct transport *t)
{
	struct {
		__u8 flags, version;
		__be16 proto;
	} gre; /* RFC 2784, 2890 */
	__u32 at, end;
	int ip;

	if (!t)
		return -1;
	at = t->l4;
	if (t->proto == IPPROTO_IPIP || t->proto == IPPROTO_IPV6)
		return find_ip_at(skb, at, t->proto == IPPROTO_IPIP ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6));
	if (t->proto == IPPROTO_GRE) {
		if (bpf_skb_load_bytes(skb, at, &gre, sizeof(gre)) || gre.flags & 0x40 || gre.version & 7)
			return -1;
		/* Checksum, key and sequence number. */
		at += 4 + (gre.flags >> 7) * 4 + (gre.flags >> 5 & 1) * 4 + (gre.flags >> 4 & 1) * 4;
		return find_ip_at(skb, at, gre.proto);
	}
	if (t->proto != IPPROTO_UDP)
		return -1;
	ip = find_ip_in_udp(skb, at);
	if (ip < 0)
		return -1;
	/*
	 * Each segment of a UDP packet may be a tunnel packet, which GRO merged: then the
	 * inner packet is no longer than the first segment. Without gso_segs the packet
	 * is from a guest, which is not trusted: the larger size counts.
	 */
	end = end_of(skb, ip);
	if (end && end <= at + 8 + skb->gso_size && skb->gso_size != GSO_BY_FRAGS && skb->gso_segs)
		return -1;
	return ip;
}

/* The segments of a GSO packet on the wire, each with all headers. */
struct gso {
	__u32 len, size, count; /* from the skb; count is 0 if not known yet, as for packets of a guest */
	__u32 header, segments;
	__u32 agrees; /* segments equals count; not a bool, because the verifier refuses padding */
	__u32 in_tunnel;
	__u32 ip;      /* the innermost header so far, */
	__u32 tunnels; /* inside this number of tunnels */
};

/*
 * Considers an end of the headers. UDP payload may be a tunnel or look like one. Of
 * all ends that agree with the kernel's count, selects the one with the most bytes
 * on the wire, so that no sender can reduce its size.
 */
__noinline int may_end_at(struct gso *g, __u32 header, __u32 in_tunnel)
{
	__u32 segments;
	bool agrees;

	if (!g || header >= g->len)
		return 0;
	segments = g->count;
	if (g->size != GSO_BY_FRAGS || !g->count)
		segments = (g->len - header + g->size - 1) / g->size;
	agrees = segments == g->count;
	if (agrees < g->agrees ||
	    (agrees == g->agrees && (__u64)(segments - 1) * header < (__u64)(g->segments - 1) * g->header))
		return 0;
	g->header = header;
	g->segments = segments;
	g->agrees = agrees;
	g->in_tunnel = in_tunnel;
	return 0;
}

/* Reads the headers of an IP packet. Returns whether it contains another IP packet. */
__noinline int read_headers(struct __sk_buff *skb, struct gso *g)
{
	struct transport t = {};
	int inner = -1;
	__u32 most;
	__u8 offset;

	if (!g || find_transport(skb, g->ip, &t))
		return false;
	if (!t.headless) {
		if (t.proto == IPPROTO_TCP &&
		    !bpf_skb_load_bytes(skb, t.l4 + 12 /* data offset, RFC 9293 3.1 */, &offset, sizeof(offset))) {
			may_end_at(g, t.l4 + (offset >> 4) * 4, g->tunnels);
			return false;
		}
		if (t.proto == IPPROTO_SCTP) {
			may_end_at(g, t.l4 + SCTP_BYTES, g->tunnels);
			return false;
		}
		inner = find_inner(skb, &t);
		if (t.proto == IPPROTO_UDP) {
			may_end_at(g, t.l4 + 8, g->tunnels);
			if (inner < 0)
				return false;
		}
		if (inner >= 0 && g->tunnels < TUNNELS) {
			g->ip = inner;
			g->tunnels++;
			return true;
		}
	}
	may_end_at(g, t.l4, g->tunnels);
	if (!g->tunnels && t.proto != IPPROTO_GRE && !is_extension(t.proto))
		return false;
	/* The longest headers that are possible with the count. Extension headers have no maximum. */
	most = g->len - (g->count - 1) * g->size - 1;
	if (!g->count || (most > t.l4 + UNREAD_BYTES && !is_extension(t.proto)))
		most = t.l4 + UNREAD_BYTES;
	may_end_at(g, most, true);
	return false;
}

/*
 * The size of a packet on the wire at layer 2, without FCS and preamble: packets << 32 | bytes.
 *
 * On egress wire_len is correct for a GSO packet outside tunnels, unless it was
 * routed and has IPv6 extension headers, which Linux then omits. On ingress it is
 * wrong: the kernel computes it without the link header, and before Linux 6.19
 * without the headers of the segments that GRO merged. Inside tunnels kernels
 * before 6.19 count only the outer headers. So the headers are counted here.
 */
__noinline __u64 measure(struct __sk_buff *skb, __u32 ip, __s32 overhead, __u32 mpu)
{
	struct gso g = { .len = skb->len, .size = skb->gso_size, .count = skb->gso_segs, .segments = 1, .ip = ip };
	__u64 bytes = g.len, segments = 1, header = 0, size = g.size, full, last;
	int i;

	if (size) {
		for (i = 0; i <= TUNNELS; i++)
			if (!read_headers(skb, &g))
				break;
		header = g.header;
		segments = g.segments;
		if (size == GSO_BY_FRAGS)
			size = (g.len - g.header) / g.segments;
		if (!HOOK(replay) && (HOOK(adds_headers) || g.in_tunnel || size != g.size ||
				     skb->wire_len <= bytes + (segments - 1) * header)) {
			bytes += (segments - 1) * header;
		} else {
			/* A guest's packet has no count of segments yet. */
			segments = g.count ?: g.segments;
			bytes = skb->wire_len;
			header = segments > 1 ? (bytes - g.len) / (segments - 1) : 0;
		}
	}
	/* The kernel's lengths do not include a tag in skb metadata. */
	if (skb->vlan_present)
		overhead += VLAN_BYTES;
	/* All segments but the last are full. */
	full = size + header;
	last = bytes - (segments - 1) * full;
	full = (__s64)(full + overhead) < (__s64)mpu ? mpu : full + overhead;
	last = (__s64)(last + overhead) < (__s64)mpu ? mpu : last + overhead;
	bytes = (segments - 1) * full + last;
	/* A sender may forge segments of one byte to cause an overflow. */
	if (bytes >= 1 << PACKET_BITS)
		bytes = (1 << PACKET_BITS) - 1;
	return segments << 32 | bytes;
}

/* The traffic class: DSCP (RFC 2474), and in the two low bits ECN (RFC 3168). Negative if it cannot be read. */
static __always_inline int traffic_class(struct __sk_buff *skb, __u32 ip)
{
	__be16 first;

	if (bpf_skb_load_bytes(skb, l3_of(ip), &first, sizeof(first)))
		return -1;
	return bpf_ntohs(first) >> (ip & IS_IPV6 ? 4 : 0) & 0xff;
}

__noinline int ecn_of(struct __sk_buff *skb, __u32 ip)
{
	int class = traffic_class(skb, ip);

	return class < 0 ? 0 : class & 3;
}

/* Replaces the bits of the traffic class that are not in keep. Returns 0 or an error. */
__noinline int set_class(struct __sk_buff *skb, __u32 ip, __u32 keep, __u32 bits)
{
	__u32 shift = ip & IS_IPV6 ? 4 : 0;
	__be16 old, new;
	int err;

	err = bpf_skb_load_bytes(skb, l3_of(ip), &old, sizeof(old));
	if (err)
		return err;
	new = (old & ~bpf_htons((~keep & 0xff) << shift)) | bpf_htons(bits << shift);
	if (ip & IS_IPV6)
		return bpf_skb_store_bytes(skb, l3_of(ip), &new, sizeof(new), BPF_F_RECOMPUTE_CSUM);
	err = bpf_l3_csum_replace(skb, l3_of(ip) + __builtin_offsetof(struct iphdr, check), old, new, sizeof(new));
	return err ?: bpf_skb_store_bytes(skb, l3_of(ip), &new, sizeof(new), 0);
}

#define CE 3

/* Marks an ECT packet CE. Returns 0 or an error. */
static __always_inline int mark(struct __sk_buff *skb, __u32 ip, enum at at)
{
	return at == AT_CGROUP ? !bpf_skb_ecn_set_ce(skb) : set_class(skb, ip, ~0, CE);
}

#endif
