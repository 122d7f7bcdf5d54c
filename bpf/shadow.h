/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Shadows: limits that only count what they would have refused. */
#ifndef SHAPECTL_SHADOW_H
#define SHAPECTL_SHADOW_H

#include "pool.h"

/* Records a host or subnet that a shadow would have affected. */
static __noinline int note_affected(struct __sk_buff *skb, __u32 ip, const struct size *wire, const struct params *params)
{
	struct affected first = { .packets = wire->packets, .bytes = wire->bytes }, *value;
	struct affected_key key = { .salt = params->salt, .family = ip & IS_IPV6 ? 6 : 4 };

	far_address(skb, ip, (struct address *)key.addr);
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
		note_affected(skb, p->ip, &p->wire, params);
	}
	if (verdict == VERDICT_CONTENDED || verdict == VERDICT_STALE)
		c->contended_packets += p->wire.packets;
	count(&c->passed_packets, &c->passed_bytes, &p->wire);
	count_extra(rule, p->wire.packets);
	return true;
}

/*
 * Charges a packet to the shadow of a pool, if any, and counts the verdict. A packet that a rule or another pool refuses does
 * not get here.
 */
__noinline int apply_pool_shadow(struct __sk_buff *skb, const struct packet *p, __u32 id)
{
	struct counters *c;
	struct limit_at at;
	struct rule *rule;
	__u64 least;

	if (!p)
		return 0;
	rule = rule_of(id);
	if (!rule)
		return 0;
	at.version = version_in(rule, p->phase);
	if (!(params_of(rule, at.version.index)->flags & RULE_SHADOW) ||
	    !limit_in(rule->cold[at.version.index & 1].shadow, p->phase, p->now, &at))
		return 0;
	c = counters_of(at.rule);
	least = p->wire.bytes < SHARED_BYTES ? p->wire.bytes : SHARED_BYTES;
	if (level_of(&at, &at.rule->shared) + (least << UNIT_BITS) <= at.params->limit) {
		charge_anyway(&at, (__u64)p->wire.bytes << UNIT_BITS);
	} else {
		count(&c->passed_excess_packets, &c->passed_excess_bytes, &p->wire);
		note_affected(skb, p->ip, &p->wire, at.params);
	}
	count(&c->passed_packets, &c->passed_bytes, &p->wire);
	count_extra(at.rule, p->wire.packets);
	return 0;
}

#endif
