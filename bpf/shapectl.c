//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The two programs of a hook. shapectl parses and matches a packet, and decides by itself if its rule is only a bucket, or one for
 * each key. Else it calls climb, which knows all that a rule can have.
 */
#include <linux/pkt_cls.h>
#include "events.h"
#include "prefix.h"

/* TCX_NEXT under tcx: later programs and filters still see the packet. */
#define NEXT TC_ACT_UNSPEC
#define DROP TC_ACT_SHOT

/* What shapectl leaves to climb. */
#define NOT_PLAIN \
	(RULE_UNLIMITED | RULE_FRAMING | RULE_PENALTY | RULE_ECN | RULE_PASS | RULE_ABSENT | RULE_SHADOW | RULE_DELAY | RULE_WITHIN | \
	 RULE_GUARANTEE | RULE_SHARES | RULE_COLOURS | RULE_NAT | RULE_ALSO)

/* The verdict of --fail for a packet that climb was not called for, or cannot decide because it is busy. */
static __noinline int fail(struct __sk_buff *skb, __u32 ip, __u32 id)
{
	struct rule *rule = rule_of(id);
	const struct params *params;
	__u32 bytes, packets;
	struct counters *c;
	__u64 wire;

	if (!rule)
		return NEXT;
	params = params_of(rule, set_in(rule, phase_at(time_ns(skb))));
	wire = measure(skb, ip, cold_of(params)->overhead, cold_of(params)->mpu);
	bytes = wire;
	packets = wire >> 32;
	c = counters_of(rule);
	c->contended_packets += packets;
	if (packets > 1)
		__sync_fetch_and_add(&rule->extra_packets, packets - 1);
	if (params->flags & RULE_FAIL_CLOSED) {
		c->dropped_packets += packets;
		c->dropped_bytes += bytes;
		return DROP;
	}
	c->passed_packets += packets;
	c->passed_bytes += bytes;
	return NEXT;
}

/* Counts a packet that is one packet on the wire. */
static __always_inline int count_one(struct __sk_buff *skb, struct rule *rule, bool passes)
{
	struct counters *c = counters_of(rule);

	if (passes) {
		c->passed_packets++;
		c->passed_bytes += skb->len;
		return NEXT;
	}
	c->dropped_packets++;
	c->dropped_bytes += skb->len;
	return DROP;
}

/* Returned for packets that climb decides. */
#define CLIMB (-2)

/* A packet of a key that has a slot. */
static __always_inline int apply_each(struct __sk_buff *skb, __u32 ip, struct rule *rule, __u32 set, __u64 now)
{
	const struct params *params = params_of(rule, set);
	__u64 hash, slot, cost;
	struct bucket *b;
	struct stage s;
	struct key key;

	if (params->flags & RULE_FLOW) {
		if (!parse_plain(skb, ip, true, &key))
			return CLIMB;
		hash = hash_flow(&key, ip, params->salt);
	} else {
		if (!parse_plain(skb, ip, false, &key))
			return CLIMB;
		mask_far(key.src, params->flags, cold_of(params)->each_bits);
		hash = hash_flow(&key, ip, params->salt);
	}
	slot = find_handle(hash);
	if (!slot)
		return CLIMB;
	b = bucket_of(slot);
	look_at(&s, rule, params, set, b, now);
	if (!is_still(b, slot, s.tat))
		return CLIMB;
	cost = (__u64)skb->len << UNIT_BITS;
	if (conforms(&s, params->flags, cost))
		return set_tat(b, s.tat, s.start + cost, now) ? count_one(skb, rule, true) : CLIMB;
	return is_heard() ? CLIMB : count_one(skb, rule, false); /* climb tells of it */
}

/* Whether a packet is several on the wire, or its size is not skb->len. */
static __always_inline bool is_several(struct __sk_buff *skb)
{
	return skb->gso_size || skb->vlan_proto;
}

/* Applies a rule: if it is only a bucket, and the packet one packet on the wire. */
static __always_inline int apply(struct __sk_buff *skb, __u32 ip, __u32 id)
{
	__u64 now, cost;
	struct rule *rule = rule_of(id);
	const struct params *params;
	__u32 set, phase;
	struct stage s;
	int answer;
	bool passes;

	if (!rule)
		return NEXT;
	now = time_ns(skb);
	phase = phase_at(now);
	set = set_in(rule, phase);
	params = params_of(rule, set);
	if (unlikely(params->flags & (NOT_PLAIN | RULE_EACH))) {
		if (!(params->flags & NOT_PLAIN)) {
			answer = is_several(skb) ? CLIMB : apply_each(skb, ip, rule, set, now);
			if (answer != CLIMB)
				return answer;
		} else if (unlikely(params->flags & RULE_ABSENT)) {
			id = match_present(skb, ip, phase);
			if (!id)
				return NEXT;
			id--;
		}
		goto climb;
	}
	if (unlikely(is_several(skb)))
		goto climb;
	look_at(&s, rule, params, set, &rule->shared, now);
	cost = (__u64)skb->len << UNIT_BITS;
	passes = conforms(&s, params->flags, cost);
	if (passes) {
		raise_tick(&rule->shared, &s.tat, s.start, s.start, tick(now));
		passes = take(&rule->shared, &s, cost) || keeps(&rule->shared, &s, cost, cost);
	}
	if (passes || !is_heard())
		return count_one(skb, rule, passes);
	/* climb tells of it */
climb:
	skb->cb[IP_CB] = ip;
	skb->cb[RULE_CB] = id | phase << PHASE_CB;
	skb->cb[NOW_CB] = now;
	skb->cb[NOW_CB + 1] = now >> 32;
	bpf_tail_call(skb, &programs, HOOK(kind));
	return fail(skb, ip, id);
}

/* Passes neighbour discovery, and counts it for the matching rule. */
__noinline int exempt(struct __sk_buff *skb, __u32 ip)
{
	__u32 id = match_present(skb, ip, phase_at(time_ns(skb)));
	struct rule *rule = id ? rule_of(id - 1) : NULL;

	if (rule)
		__sync_fetch_and_add(&rule->exempt_packets, 1);
	return NEXT;
}

/* Counts a frame that no rule limits, because it is not IP. PPPoE carries IP so. */
__noinline int count_other(struct __sk_buff *skb)
{
	struct view *view = view_of(skb);

	if (skb->protocol != bpf_htons(ETH_P_ARP)) {
		__sync_fetch_and_add(&view->other_frames, 1);
		__sync_fetch_and_add(&view->other_bytes, skb->len);
	}
	return NEXT;
}

/*
 * Matches packets with VLAN tags, or with headers outside the linear part. Returns the IP header in the upper half, and the id of
 * the rule plus one, or 0.
 */
__noinline __u64 match_slow(struct __sk_buff *skb)
{
	int ip = find_ip(skb);

	if (ip < 0) {
		count_other(skb);
		return 0;
	}
	if (ip & IS_IPV6 && is_discovery(skb, ip)) {
		exempt(skb, ip);
		return 0;
	}
	return (__u64)ip << 32 | match_present(skb, ip, ANY_PHASE);
}

static __always_inline int limit(struct __sk_buff *skb)
{
	__u32 ip = HOOK(l2_bytes), id;
	const __u64 *far;
	__u64 match;
	void *l3;

	switch (plain_header(skb, &l3)) {
	case 4:
		id = match4(skb, *(__u32 *)FAR(l3, iphdr));
		break;
	case 6:
		ip |= IS_IPV6;
		if (((struct ipv6hdr *)l3)->nexthdr == IPPROTO_ICMPV6 && is_discovery(skb, ip))
			return exempt(skb, ip);
		far = FAR(l3, ipv6hdr);
		id = match6(skb, far[0], far[1]);
		break;
	default:
		match = match_slow(skb);
		ip = match >> 32;
		id = match;
	}
	return id ? apply(skb, ip, id - 1) : NEXT;
}

SEC("tc")
int shapectl(struct __sk_buff *skb)
{
	return limit(skb);
}

/*
 * What a cgroup_skb program returns: 1 passes. On egress 2 drops as a qdisc does (NET_XMIT_DROP), so TCP slows down. After 0, the
 * sender would get an error.
 */
static __always_inline int cgroup_answer(int answer)
{
	if (answer != DROP)
		return 1;
	return HOOK(ingress) ? 0 : 2;
}

/* Both directions have this type of program, because all that are in one array must have the same. */
SEC("cgroup_skb/egress")
int shapectl_cgroup(struct __sk_buff *skb)
{
	return cgroup_answer(limit(skb));
}

/* Begins with a packet of a rule or its shadow: finds the parameters in force, its size, and the level of the rule's shared bucket. */
static __always_inline struct rule *begin(struct __sk_buff *skb, struct work *w, struct stage *s, const struct params **params)
{
	__u32 id = skb->cb[RULE_CB] & RULE_CB_MASK;
	struct rule *rule;

	w->now = (__u64)skb->cb[NOW_CB + 1] << 32 | skb->cb[NOW_CB];
	w->phase = skb->cb[RULE_CB] >> PHASE_CB & 7;
	w->ip = skb->cb[IP_CB];
	w->longest = w->latest = 0;
	w->top = w->marks = w->parsed = 0;
	w->id = w->at = id;
	s->slot = 0;
	rule = rule_of(id);
	if (!rule)
		return NULL;
	*params = place(w, s, id, rule);
	weigh(skb, w, *params);
	if (!HOOK(colours) || !((*params)->flags & RULE_COLOURS))
		look_at(s, rule, *params, s->set, &rule->shared, w->now);
	return rule;
}

/* What happens to a packet with this verdict by its queues and marks. */
static __always_inline enum verdict settle(struct __sk_buff *skb, struct work *w, enum verdict verdict, enum at at)
{
	if (at == AT_DEVICE && verdict == VERDICT_PASS && w->longest)
		verdict = VERDICT_DELAY;
	if (at == AT_DEVICE && (w->longest || w->latest) && !depart(skb, w))
		return VERDICT_CONTENDED;
	if (w->marks && verdict != VERDICT_CONTENDED)
		verdict = VERDICT_MARK;
	return verdict == VERDICT_MARK && mark(skb, w->ip, at) ? VERDICT_CONTENDED : verdict;
}

/* Does what follows from the verdict of a rule, and counts it. */
static __always_inline int act(struct __sk_buff *skb, __u32 cpu, struct work *w, struct rule *rule, enum at at)
{
	enum verdict verdict = READ_ONCE(w->verdict); /* so the verifier does not follow each one */
	struct counters *c = counters_on(rule, cpu);
	const struct stage *s = stage_of(w, 0);
	__u32 ifb;

	count_extra(rule, w);
	if (unlikely(verdict | w->longest | w->latest | w->marks)) {
		verdict = settle(skb, w, verdict, at);
		if (verdict == VERDICT_CONTENDED)
			c->contended_packets += w->packets;
		if (verdict != VERDICT_PASS && is_heard())
			tell(skb, cpu, verdict);
		if (!passes(verdict, s->flags)) {
			count(&c->dropped_packets, &c->dropped_bytes, w);
			return DROP;
		}
		if (verdict == VERDICT_BEYOND || verdict == VERDICT_MARK || verdict == VERDICT_DELAY)
			count(&c->passed_excess_packets, &c->passed_excess_bytes, w);
		if (verdict == VERDICT_MARK)
			c->marked_packets += w->packets;
	}
	count(&c->passed_packets, &c->passed_bytes, w);
	/* All packets of the rule, so that none overtakes a delayed packet. A pool may delay, too. */
	if (at == AT_DEVICE && HOOK(ingress) && s->flags & (HOOK(pools) ? RULE_DELAY | RULE_WITHIN : RULE_DELAY)) {
		ifb = READ_ONCE(view_of(skb)->ifb);
		if (ifb)
			return bpf_redirect(ifb, 0);
	}
	return NEXT;
}

/* Applies the shadows of the pools that a packet was charged to, or of the one that refused it. */
__noinline int shadow_pools(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	__u32 i;

	for (i = w->verdict == VERDICT_REFUSED ? w->top : 1; i <= MAX_DEPTH; i++) {
		if (i > w->top)
			break;
		shadow_pool(skb, cpu, i);
	}
	return 0;
}

/* Everything else. It calls itself again if clocks were late, and for the shadow of a rule. */
static __always_inline int climb_from(struct __sk_buff *skb, enum at at)
{
	__u32 cpu = bpf_get_smp_processor_id(), again = skb->cb[RULE_CB] & (KEPT_CB | SHADOW_CB), shadow;
	struct work *w = work_of(cpu);
	struct stage *s = w->stage;
	const struct params *params;
	struct rule *rule;

	/* With real-time kernels, and in test runs, another packet may be in between. */
	if (unlikely(w->busy && !again))
		return fail(skb, skb->cb[IP_CB], skb->cb[RULE_CB] & RULE_CB_MASK);
	w->busy = true;
	w->again = again;
	rule = begin(skb, w, s, &params);
	if (unlikely(!rule || params->flags & RULE_ABSENT)) { /* a shadow may be */
		if (!(again & SHADOW_CB))
			w->answer = NEXT;
		goto done;
	}
	if (HOOK(colours) && s->flags & RULE_COLOURS)
		w->action = colour(skb, cpu, w, rule, params);
	else
		climb_pools(skb, cpu, w, rule, params);
	if (HOOK(shadows) && READ_ONCE(w->again) & SHADOW_CB) {
		count_shadow(skb, cpu, w, rule, params_of(rule, READ_ONCE(s->set)));
		goto done;
	}
	if (HOOK(colours) && s->flags & RULE_COLOURS)
		w->verdict = act_on_colour(skb, cpu, w, rule, at);
	if (HOOK(pools) && unlikely(w->verdict == VERDICT_LATE)) {
		keep_clocks(cpu);
		skb->cb[RULE_CB] = w->id | w->phase << PHASE_CB | KEPT_CB;
		bpf_tail_call(skb, &programs, HOOK(kind));
		w->answer = fail(skb, w->ip, w->id);
		goto done;
	}
	w->answer = act(skb, cpu, w, rule, at);
	if (HOOK(shadows)) {
		shadow_pools(skb, cpu);
		if (READ_ONCE(s->flags) & RULE_SHADOW) {
			shadow = cold_of(params_of(rule, READ_ONCE(s->set)))->shadow;
			skb->cb[RULE_CB] = shadow | w->phase << PHASE_CB | SHADOW_CB;
			bpf_tail_call(skb, &programs, HOOK(kind));
			fail(skb, w->ip, shadow);
		}
	}
done:
	w->busy = false;
	return READ_ONCE(w->answer);
}

SEC("tc")
int climb(struct __sk_buff *skb)
{
	return climb_from(skb, AT_DEVICE);
}

SEC("cgroup_skb/egress")
int climb_cgroup(struct __sk_buff *skb)
{
	return cgroup_answer(climb_from(skb, AT_CGROUP));
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
