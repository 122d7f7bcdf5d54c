/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Hosts behind NAT: conntrack knows the address that one has on the inside. */
#ifndef SHAPECTL_NAT_H
#define SHAPECTL_NAT_H

#include "flow.h"

#define CORE __attribute__((preserve_access_index))

/* What is needed of the kernel's types, whose offsets the loader finds. */
struct nf_conntrack_tuple {
	struct {
		union {
			__u32 all[4];
		} u3;
	} CORE src;
} CORE;

struct nf_conntrack_tuple_hash {
	struct nf_conntrack_tuple tuple;
} CORE;

struct nf_conn {
	struct nf_conntrack_tuple_hash tuplehash[2]; /* as the first packet has it, and as replies have it */
} CORE;

struct bpf_ct_opts {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

/* The loader removes these calls where there are no rules with RULE_NAT. */
extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *skb, struct bpf_sock_tuple *tuple, __u32 tuple__sz, struct bpf_ct_opts *opts,
					 __u32 opts__sz) __ksym;
extern void bpf_ct_release(struct nf_conn *ct) __ksym;

/* Finds the address that the near end of a packet has behind NAT. Conntrack tells of TCP and UDP, else addr is theirs. */
static __noinline bool look_inside(struct __sk_buff *skb, __u32 ip, const struct key *flow, __u32 *addr)
{
	const __u32 *far = HOOK(ingress) ? flow->src : flow->dst, *near = HOOK(ingress) ? flow->dst : flow->src;
	__be16 far_port = HOOK(ingress) ? flow->sport : flow->dport, near_port = HOOK(ingress) ? flow->dport : flow->sport;
	struct bpf_ct_opts opts = { .netns_id = BPF_F_CURRENT_NETNS, .l4proto = flow->proto };
	struct bpf_sock_tuple tuple = {};
	__u32 size = sizeof(tuple.ipv4);
	struct nf_conn *ct;

	__builtin_memcpy(addr, near, sizeof(flow->src));
	if (flow->proto != IPPROTO_TCP && flow->proto != IPPROTO_UDP)
		return false;
	/* A packet on the way in has the tuple of its direction; on the way out, the opposite of that. */
	if (ip & IS_IPV6) {
		__builtin_memcpy(tuple.ipv6.saddr, far, sizeof(tuple.ipv6.saddr));
		__builtin_memcpy(tuple.ipv6.daddr, near, sizeof(tuple.ipv6.daddr));
		tuple.ipv6.sport = far_port;
		tuple.ipv6.dport = near_port;
		size = sizeof(tuple.ipv6);
	} else {
		tuple.ipv4.saddr = *far;
		tuple.ipv4.daddr = *near;
		tuple.ipv4.sport = far_port;
		tuple.ipv4.dport = near_port;
	}
	ct = bpf_skb_ct_lookup(skb, &tuple, size, &opts, sizeof(opts));
	if (!ct)
		return false;
	/* Whoever sends the packets of the opposite direction is inside. */
	if (opts.dir)
		__builtin_memcpy(addr, ct->tuplehash[0].tuple.src.u3.all, sizeof(flow->src));
	else
		__builtin_memcpy(addr, ct->tuplehash[1].tuple.src.u3.all, sizeof(flow->src));
	bpf_ct_release(ct);
	return true;
}

#endif
