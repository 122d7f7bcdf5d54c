/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Shadows: limits that only count what they would have refused. */
#ifndef SHAPECTL_SHADOW_H
#define SHAPECTL_SHADOW_H

#include "charge.h"

/* Records a host or subnet that the shadow would have affected. */
static __noinline int note_affected(struct __sk_buff *skb, const struct packet *p, const struct rule *rule)
{
	struct affected first = { .packets = p->wire.packets, .bytes = p->wire.bytes }, *value;
	struct affected_key key = { .family = p->ip & IS_IPV6 ? 6 : 4 };
	const struct params *params = params_of(rule, p->version.index);

	key.salt = params->salt;
	far_address(skb, p->ip, (struct address *)key.addr);
	if (params->flags & RULE_SUBNET)
		mask_address((struct address *)key.addr, params->each_bits);
	value = bpf_map_lookup_elem(&affected, &key);
	if (!value && bpf_map_update_elem(&affected, &key, &first, BPF_NOEXIST))
		value = bpf_map_lookup_elem(&affected, &key);
	if (value) {
		__sync_fetch_and_add(&value->packets, first.packets);
		__sync_fetch_and_add(&value->bytes, first.bytes);
	}
	return 0;
}

/*
 * Charges a packet to the shadow of its rule, if any, and counts the verdict. With again, returns false if the
 * shadow has changed meanwhile.
 */
__noinline int apply_shadow(struct __sk_buff *skb, struct packet *p, __u32 again)
{
	const struct params *params;
	enum verdict verdict;
	struct counters *c;
	struct rule *rule;
	struct version before;
	__u32 id, of;

	if (!p)
		return true;
	id = of = p->id;
	rule = rule_of(id);
	if (!rule)
		return true;
	before = p->version;
	params = params_of(rule, p->version.index);
	if (!(params->flags & RULE_SHADOW))
		return true;
	p->id = id = rule->cold[p->version.index & 1].shadow;
	rule = rule_of(id);
	if (!rule)
		return true;
	p->version = version_in(rule, p->phase);
	params = params_of(rule, p->version.index);
	measure(skb, p->ip, params->overhead, params->mpu, &p->wire);
	verdict = charge_slow(skb, p);
	if (verdict == VERDICT_STALE && again) {
		p->id = of;
		p->version = before;
		return false;
	}
	c = counters_of(rule);
	if (verdict == VERDICT_EXCESS) {
		count(&c->passed_excess_packets, &c->passed_excess_bytes, &p->wire);
		note_affected(skb, p, rule);
	}
	if (verdict == VERDICT_CONTENDED || verdict == VERDICT_STALE)
		c->contended_packets += p->wire.packets;
	count(&c->passed_packets, &c->passed_bytes, &p->wire);
	count_extra(rule, p->wire.packets);
	return true;
}

#endif
