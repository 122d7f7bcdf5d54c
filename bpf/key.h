/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The bucket key of a packet. The packet is parsed once, into work.flow. */
#ifndef SHAPECTL_KEY_H
#define SHAPECTL_KEY_H

#include "nat.h"
#include "table.h"

/* Parses the packet. */
static __always_inline void parse(struct __sk_buff *skb, struct work *w)
{
	w->parsed = true;
	/* A key of IPv4 has nothing in the other words. */
	__builtin_memset(w->flow.src, 0, sizeof(w->flow.src));
	__builtin_memset(w->flow.dst, 0, sizeof(w->flow.dst));
	parse_flow(skb, w->ip, &w->flow);
}

/* Makes a flow the bucket key of a scope: all of its 5-tuple, or only the far address, in src. */
static __always_inline void narrow(struct key *flow, __u32 scope, __u32 bits)
{
	if (scope & RULE_FLOW)
		return;
	if (!HOOK(match_src))
		__builtin_memcpy(flow->src, flow->dst, sizeof(flow->src));
	__builtin_memset(flow->dst, 0, sizeof(flow->dst));
	flow->sport = flow->dport = flow->proto = 0;
	mask_far(flow->src, scope, bits);
}

/* Seeks the packet's key in a scope of RULE_EACH. Returns its slot, or 0. To get a slot, work.key needs the id, too. */
__noinline __u64 seek(struct __sk_buff *skb, __u32 cpu, __u32 salt, __u32 scope, __u32 bits)
{
	struct work *w = work_of(cpu);
	__u64 slot;

	if (!w->parsed)
		parse(skb, w);
	if (scope & RULE_FLOW) {
		w->hash = hash_flow(&w->flow, w->ip, salt);
		slot = find_handle(w->hash);
		if (likely(slot))
			return slot; /* most packets need no copy */
	}
	w->key = w->flow;
	if (HOOK(nat) && KEPT(scope) & RULE_NAT) {
		look_inside(skb, w->ip, &w->flow, w->key.src);
		__builtin_memcpy(w->key.dst, w->key.src, sizeof(w->key.dst)); /* whichever is the far one */
	}
	narrow(&w->key, scope, bits);
	w->hash = hash_flow(&w->key, w->ip, salt);
	return find_handle(w->hash);
}

/* The same in the scope of the limit that a stage has. */
static __always_inline __u64 seek_at(struct __sk_buff *skb, __u32 cpu, const struct stage *s, const struct params *params)
{
	return seek(skb, cpu, params->salt, s->flags, cold_of(params)->each_bits);
}

#endif
