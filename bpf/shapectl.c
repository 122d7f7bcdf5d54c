//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The program of a hook: parse, match, charge, act, count. The fast path is inline
 * and short. All else is in functions that start again from the packet and the id
 * of its rule, so the fast path keeps no state for them.
 */
#include <linux/pkt_cls.h>
#include "colours.h"
#include "pool_fast.h"
#include "prefix.h"
#include "shadow.h"

/* Whether a packet passes by the verdict of its rule. */
static __always_inline bool passes(enum verdict verdict, __u32 flags)
{
	if (verdict == VERDICT_EXCESS)
		return flags & RULE_PASS;
	if (verdict == VERDICT_CONTENDED || verdict == VERDICT_STALE)
		return !(flags & RULE_FAIL_CLOSED);
	return verdict != VERDICT_REFUSED;
}

/* For an excess packet, at is the rule or pool that had too little room, and id the rule. */
static __always_inline int act(struct __sk_buff *skb, __u32 ip, struct rule *rule, __u32 flags,
			       const struct size *wire, enum verdict verdict, __u32 id, __u32 at)
{
	struct counters *c = counters_of(rule);
	__u32 ifb;

	if (verdict == VERDICT_MARK && set_class(skb, ip, ~0, CE))
		verdict = VERDICT_CONTENDED;
	if (verdict == VERDICT_STALE)
		verdict = VERDICT_CONTENDED;
	if (verdict == VERDICT_CONTENDED)
		c->contended_packets += wire->packets;
	if (!passes(verdict, flags)) {
		count(&c->dropped_packets, &c->dropped_bytes, wire);
		if (is_heard())
			tell(skb, ip, id, at, verdict);
		return DROP;
	}
	if (verdict == VERDICT_EXCESS || verdict == VERDICT_MARK || verdict == VERDICT_DELAY) {
		count(&c->passed_excess_packets, &c->passed_excess_bytes, wire);
		if (is_heard())
			tell(skb, ip, id, at, verdict);
	}
	if (verdict == VERDICT_MARK)
		c->marked_packets += wire->packets;
	count(&c->passed_packets, &c->passed_bytes, wire);
	/* All packets of the rule, so that none overtakes a delayed packet. A pool may delay, too. */
	if (HOOK(ingress) && flags & (HOOK(pools) ? RULE_DELAY | RULE_WITHIN : RULE_DELAY)) {
		ifb = READ_ONCE(view_of(skb)->ifb);
		if (ifb)
			return bpf_redirect(ifb, 0);
	}
	return NEXT;
}

/* A longest-prefix match among the rules that exist in a phase of a change. */
struct present {
	struct __sk_buff *skb;
	__u64 addr[2];
	__u32 ipv6;
	__u32 use; /* version of the view's lists */
	__u32 phase;
	__u32 id; /* of the rule plus one, or 0 */
};

static long present_next(__u64 i, struct present *p)
{
	const struct view *view = view_of(p->skb);
	__u64 addr0, addr1;
	const struct rule *rule;
	__u32 id, length;

	if (i >= (p->ipv6 ? LENGTHS6 : LENGTHS4)) /* Never true, but the verifier needs the bound. */
		return 1;
	if (p->ipv6) {
		length = view->use[p->use & 1].list6[i];
		addr0 = (p->addr[0] & hook.masks[length][0]) ^ view->mix6[0];
		addr1 = (p->addr[1] & hook.masks[length][1]) ^ view->mix6[1];
		id = find6(addr0, addr1, length, hash6_prefix(addr0, addr1, length));
	} else {
		addr0 = view->mix4 | by4(view->use[p->use & 1].list4[i]) | p->addr[0];
		id = find4(addr0, hash4_prefix(addr0));
	}
	if (!id)
		return 0;
	rule = rule_of(id - 1);
	if (!rule || params_of(rule, version_in(rule, p->phase).index)->flags & RULE_ABSENT)
		return 0;
	p->id = id;
	return 1;
}

static __noinline __u32 match_present(struct __sk_buff *skb, __u32 ip, __u32 phase)
{
	const struct view *view = view_of(skb);
	struct present p = {
		.skb = skb, .ipv6 = ip & IS_IPV6, .use = READ_ONCE(view->version) & 1, .phase = phase,
	};
	struct address far = {};

	if (far_address(skb, ip, &far))
		return 0;
	p.addr[0] = far.word[0];
	p.addr[1] = far.word[1];
	bpf_loop(p.ipv6 ? view->use[p.use].count6 : view->use[p.use].count4, present_next, &p, 0);
	return p.id;
}

/* decide found a rule with colours: another program applies it. */
#define HAS_COLOURS 2

/*
 * Selects the rule and parameters for a packet in the phase of the change at its
 * time, given the rule of the longest prefix. Returns false if no rule matches.
 */
__noinline int decide(struct __sk_buff *skb, struct packet *p)
{
	struct rule *rule;
	__u32 id, flags;

	if (!p)
		return false;
	id = p->id;
	rule = rule_of(id);
	if (!rule)
		return false;
	p->phase = phase_at(p->now);
	p->version = version_in(rule, p->phase);
	flags = params_of(rule, p->version.index)->flags;
	if (!(flags & RULE_ABSENT))
		return flags & RULE_COLOURS ? HAS_COLOURS : true;
	id = match_present(skb, p->ip, p->phase) - 1;
	rule = rule_of(id);
	if (!rule)
		return false;
	p->id = id;
	p->version = version_in(rule, p->phase);
	flags = params_of(rule, p->version.index)->flags;
	return flags & RULE_COLOURS ? HAS_COLOURS : true;
}

/* Attempts to apply a rule that keeps changing. A CPU may be preempted for as long as several changes take. */
#define DECISIONS 4

static __always_inline __u32 guarantee_of(const struct rule *rule, const struct packet *p)
{
	return rule->cold[p->version.index & 1].second;
}

/* A climb with its packet. */
struct climber {
	struct climb c;
	struct __sk_buff *skb;
	const struct packet *p;
};

/* Tests the next pool of a packet's rule, up to one that refuses the packet or guarantees it. */
static long test_next(__u64 i, struct climber *by)
{
	enum share_verdict share;
	struct climb *c = &by->c;

	(void)i;
	if (!climb_up(by->p, c))
		return 1;
	test_pool(by->skb, by->p, c);
	if (!(c->answer & CLIMB_SHARES))
		c->load = HEAVY;
	if (c->answer & CLIMB_SHARES && !(c->answer & CLIMB_REFUSES)) {
		if (!(by->c.attempt & ATTEMPT_KEPT) && is_late(c->id, by->p->phase, by->p->now)) {
			by->c.late = true;
			return 1;
		}
		share = test_share(by->skb, by->p, c);
		if (share == BEYOND_MARK && c->answer & CLIMB_MARKS)
			c->marks |= 1 << (c->level & 31);
		else if (share != WITHIN_SHARE &&
			 !(share <= BEYOND_SPARSE && c->answer & CLIMB_SPARSE && is_sparse(by->skb, by->p, c->id)))
			c->answer |= CLIMB_REFUSES;
	}
	return c->answer & (CLIMB_REFUSES | CLIMB_CHANGES) || c->guaranteed != NOT_GUARANTEED;
}

/* Charges a packet to the next pool of its rule, from the climb that tested them. */
static long charge_next(__u64 i, struct climber *by)
{
	(void)i;
	if (!climb_up(by->p, &by->c))
		return 1;
	charge_pool(by->p, &by->c);
	if (by->c.answer & CLIMB_SPARSE)
		skip_queue(by->skb, by->p, &by->c);
	if (by->c.answer & CLIMB_CHARGED)
		count_passed(by->skb, by->p, &by->c);
	if (HOOK(shadows))
		apply_pool_shadow(by->skb, by->p, by->c.id);
	if (by->c.answer & CLIMB_SHARES)
		charge_share(by->skb, by->p, &by->c);
	return 0;
}

/* Applies any rule to any packet. Returns LATE if a fair clock must be advanced first. */
__noinline int apply_slow(struct __sk_buff *skb, struct packet *p, __u32 attempt)
{
	struct climber by = { .skb = skb, .p = p, .c.attempt = attempt, .c.guaranteed = NOT_GUARANTEED, .c.weight = 1 };
	enum verdict verdict = VERDICT_PASS;
	const struct params *params;
	enum share_verdict share;
	struct rule *rule;
	__u32 flags, pools = 0;
	int answer;

	if (!p)
		return NEXT;
	rule = rule_of(p->id);
	if (!rule)
		return NEXT;
	params = params_of(rule, p->version.index);
	flags = params->flags;
	/* Without pools in the namespace, the verifier removes all that asks for these flags. */
	if (HOOK(pools))
		pools = flags & (RULE_SHARES | RULE_WITHIN | RULE_GUARANTEE);
	measure(skb, p->ip, params->overhead, params->mpu, &p->wire);
	by.c.id = by.c.member = by.c.at = p->id;
	if (pools & RULE_SHARES) {
		if (!(by.c.attempt & ATTEMPT_KEPT) && is_late(p->id, p->phase, p->now))
			return LATE;
		share = test_share(skb, p, &by.c);
		if (share == BEYOND_MARK && marks_excess(params, cold_of(params)) && ecn_of(skb, p->ip))
			by.c.marks = 1;
		else if (share != WITHIN_SHARE && !(share <= BEYOND_SPARSE && flags & RULE_SPARSE && is_sparse(skb, p, p->id)))
			verdict = VERDICT_EXCESS;
	}
	/* No pool needs to be asked. */
	if (!passes(verdict, flags))
		goto done;
	if (pools & RULE_GUARANTEE && conforms(skb, p, guarantee_of(rule, p)))
		by.c.guaranteed = 0;
	else if (pools & RULE_WITHIN)
		bpf_loop(MAX_DEPTH, test_next, &by, 0);
	if (by.c.late)
		return LATE;
	if (by.c.answer & CLIMB_CHANGES) {
		verdict = VERDICT_STALE;
	} else if (by.c.answer & CLIMB_REFUSES) {
		verdict = VERDICT_REFUSED;
		if (flags & (RULE_ECN | RULE_PASS) || conforms(skb, p, p->id)) {
			by.c.at = by.c.id;
			count_refused(p, by.c.id);
			if (HOOK(shadows))
				apply_pool_shadow(skb, p, by.c.id);
		} else if (flags & RULE_PENALTY) {
			penalise(skb, p);
			verdict = VERDICT_EXCESS;
		}
	} else if (verdict == VERDICT_PASS && !(flags & RULE_UNLIMITED)) {
		verdict = charge_slow(skb, p);
	}
	if (verdict == VERDICT_STALE && by.c.attempt & ATTEMPT_AGAIN)
		return UNDONE;
	if (!pools || !passes(verdict, flags))
		goto done;
	if (flags & RULE_DELAY && (verdict == VERDICT_DELAY || verdict == VERDICT_MARK))
		by.c.longest = skb->tstamp - p->now; /* the rule's own queue has set it */
	if (pools & RULE_GUARANTEE && !by.c.guaranteed) {
		charge_guarantee(skb, p, guarantee_of(rule, p));
		charge_together(p, guarantee_of(rule, p));
	}
	by.c.id = by.c.member = p->id;
	by.c.weight = 1;
	by.c.level = 0;
	if (pools & RULE_SHARES && verdict != VERDICT_EXCESS)
		charge_share(skb, p, &by.c);
	bpf_loop(MAX_DEPTH, charge_next, &by, 0);
	if (verdict == VERDICT_MARK)
		by.c.marks = 1;
	if (by.c.delayed)
		verdict = queue_in_pool(skb, p, &by.c);
	if (by.c.marks && verdict != VERDICT_CONTENDED)
		verdict = VERDICT_MARK;
done:
	answer = act(skb, p->ip, rule, flags, &p->wire, verdict, p->id, by.c.at);
	count_extra(rule, p->wire.packets);
	return answer;
}

/* Flags that the fast path does not handle. */
#define RULE_SLOW \
	(RULE_UNLIMITED | RULE_FRAMING | RULE_ECN | RULE_PASS | RULE_FAIL_CLOSED | RULE_ABSENT | RULE_SHADOW | RULE_SPARSE | \
	 RULE_WITHIN | RULE_SHARES | RULE_COLOURS)

/* A rule that the fast path does not handle has colours if it has none of these, and colour_all handles it. */
#define RULE_NOT_COLOUR_ALL ((RULE_SLOW & ~RULE_COLOURS) | RULE_DELAY | RULE_PENALTY | RULE_EACH | RULE_AWARE)

/*
 * The bucket and fingerprint of a packet's key, if its headers are plain and the key
 * has a slot. Searches the second line only if second is set.
 */
static __always_inline struct bucket *existing_bucket(struct __sk_buff *skb, __u32 ip, const struct params *params,
						      bool second, __u32 *fingerprint)
{
	__u64 hash = hash_plain(skb, ip, params->each_bits, params->salt, params->flags);

	return hash ? find_bucket(hash, second, fingerprint) : NULL;
}

/* Applies rules with a delay or penalty, and keys in their second line. Returns UNDONE for others. */
__noinline int apply_fast(struct __sk_buff *skb, __u32 ip, __u32 id)
{
	struct size wire = { .bytes = skb->len, .packets = 1 };
	struct rule *rule = rule_of(id);
	const struct params *params;
	enum verdict verdict;
	struct bucket *bucket;
	__u32 seen, fingerprint = 0;
	__u64 now, v, tat = 0;
	int index;

	if (!rule)
		return UNDONE;
	seen = READ_ONCE(rule->version);
	index = timeless_index(seen);
	if (index < 0)
		return UNDONE;
	params = params_of(rule, index);
	if (params->flags & RULE_SLOW)
		return UNDONE;
	bucket = &rule->shared;
	if (params->flags & RULE_EACH)
		bucket = existing_bucket(skb, ip, params, true, &fingerprint);
	if (!bucket)
		return UNDONE;
	now = time_ns(skb);
	v = byte_clock(params, params->base, now);
	verdict = charge_bucket(rule, seen, params, v, bucket, fingerprint, now, wire.bytes, wire.bytes, EXCESS_PENALISES, &tat);
	if (verdict == VERDICT_AGAIN)
		return UNDONE;
	if (verdict == VERDICT_PASS && params->flags & RULE_DELAY)
		verdict = queue_packet(skb, ip, params, &rule->cold[index & 1], now,
				       units_before(params, wire.bytes, tat - v));
	return act(skb, ip, rule, params->flags, &wire, verdict, id, id);
}

/*
 * Applies a rule with pools or shares to a packet that is one packet on the wire. Returns UNDONE for others, and LATE if
 * the fair clocks are not kept but must be.
 */
__noinline int apply_in_pools(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 kept)
{
	struct ascent a = { .now = time_ns(skb), .id = id, .bytes = skb->len, .ip = ip, .member = id,
			    .phase = READ_ONCE(change.phase), .kept = kept, .cpu = bpf_get_smp_processor_id() };
	struct size wire = { .packets = 1 };
	struct rule *rule = rule_at(&a.id);
	struct sharer sharer;
	const struct params *params;
	struct counters *c;
	bool guaranteed = false;
	int verdict;

	if (!rule || a.phase == PHASE_BY_TIME)
		return UNDONE;
	a.seen = READ_ONCE(rule->version);
	params = params_of(rule, index_at(a.seen, a.phase));
	if (params->flags & ((RULE_SLOW & ~(RULE_UNLIMITED | RULE_WITHIN | RULE_SHARES)) | RULE_DELAY | RULE_PENALTY))
		return UNDONE;
	if (params->flags & RULE_EACH) {
		a.handle = params->flags & RULE_GUARANTEE ? 0 : find_key(skb, ip, params);
		if (!a.handle)
			return UNDONE;
	}
	a.least = (__u64)(a.bytes < SHARED_BYTES ? a.bytes : SHARED_BYTES) << UNIT_BITS;
	a.unlimited = !!(params->flags & RULE_UNLIMITED);
	a.v = byte_clock(params, params->base, a.now);
	sharer.bucket = NULL;
	if (params->flags & RULE_SHARES) {
		sharer.weight = 1;
		verdict = test_sharer(skb, &a, params, level_in(rule, params, &a), &sharer);
		if (verdict == VERDICT_REFUSED)
			goto refused;
		if (verdict != VERDICT_PASS)
			return verdict;
	}
	if (params->flags & RULE_GUARANTEE) {
		verdict = ask_guarantee(&a, cold_of(params)->second, false);
		if (verdict == UNDONE)
			return UNDONE;
		guaranteed = verdict == VERDICT_PASS;
	}
	if (params->flags & RULE_WITHIN)
		verdict = level_1(skb, &a, params->within, cold_of(params)->weight, guaranteed);
	else
		verdict = decide_rule(&a);
	if (verdict < 0)
		return verdict;
	if (verdict != VERDICT_PASS) {
		if (verdict == VERDICT_REFUSED &&
		    (params->flags & RULE_UNLIMITED || has_room(params, level_in(rule, params, &a), a.bytes)))
			count_refused_one(a.member, a.bytes);
		else
			a.member = a.id;
		goto refused;
	}
	if (sharer.bucket)
		charge_tested_sharer(&a, params, &sharer);
	if (guaranteed)
		ask_guarantee(&a, cold_of(params)->second, true);
	wire.bytes = a.bytes;
	return act(skb, a.ip, rule, params->flags, &wire, VERDICT_PASS, 0, 0);
refused:
	wire.bytes = a.bytes;
	c = counters_of(rule);
	count(&c->dropped_packets, &c->dropped_bytes, &wire);
	if (is_heard())
		tell(skb, a.ip, a.id, a.member, VERDICT_REFUSED);
	return DROP;
}

/* The fast path: a packet that is one packet on the wire, and an existing bucket without contention. */
static __always_inline int apply(struct __sk_buff *skb, __u32 ip, __u32 id)
{
	const struct params *params;
	__u32 seen, fingerprint;
	enum verdict verdict;
	struct bucket *bucket;
	struct counters *c;
	__u64 now, v, tat;
	struct rule *rule;
	int index, answer;
	struct packet p;

	/* In memory, because passing packets need the registers. */
	WRITE_ONCE(p.ip, ip);
	p.id = id;
	rule = rule_at(&p.id);
	if (!rule)
		return NEXT;
	if (unlikely(skb->gso_size || skb->vlan_proto))
		goto slow;
	seen = READ_ONCE(rule->version);
	index = timeless_index(seen);
	if (unlikely(index < 0))
		goto slow;
	params = params_of(rule, index);
	if (unlikely(params->flags & (RULE_SLOW | RULE_DELAY | RULE_PENALTY))) {
		/* One test finds the most common case of colours. */
		if (HOOK(colours) && !(params->flags & RULE_NOT_COLOUR_ALL)) {
			answer = colour_all(skb, rule, params, seen);
			goto coloured;
		}
		if (HOOK(colours) && params->flags & RULE_COLOURS)
			goto colours;
		if (HOOK(pools) && params->flags & (RULE_WITHIN | RULE_SHARES))
			goto pools;
		goto fast;
	}
	/* Reading the clock waits for all loads. A load before it makes two cache misses overlap. */
	if (IS_BIG)
		READ_ONCE(counters_of(rule)->passed_packets);
	if (params->flags & RULE_EACH) {
		bucket = existing_bucket(skb, READ_ONCE(p.ip), params, false, &fingerprint);
		if (!bucket)
			goto fast;
		now = time_ns(skb);
		v = byte_clock(params, params->base, now);
		verdict = charge_bucket(rule, seen, params, v, bucket, fingerprint, now, skb->len, skb->len, 0, &tat);
	} else {
		now = time_ns(skb);
		v = byte_clock(params, params->base, now);
		verdict = charge_bucket(rule, seen, params, v, &rule->shared, 0, now, skb->len, skb->len, 0, &tat);
		/* With two CPUs on one bucket, half of the first attempts fail. */
		if (verdict == VERDICT_AGAIN)
			verdict = charge_bucket(rule, seen, params, v, &rule->shared, 0, now, skb->len, skb->len, 0, &tat);
	}
	c = counters_of(rule);
	if (verdict == VERDICT_PASS) {
		c->passed_packets++;
		c->passed_bytes += skb->len;
		return NEXT;
	}
	if (verdict == VERDICT_EXCESS) {
		c->dropped_packets++;
		c->dropped_bytes += skb->len;
		if (is_heard())
			tell(skb, READ_ONCE(p.ip), READ_ONCE(p.id), READ_ONCE(p.id), VERDICT_EXCESS);
		return DROP;
	}
	goto fast;
colours:
	if (params->flags & RULE_EACH && !(params->flags & (RULE_AWARE | RULE_FRAMING | RULE_SHADOW)))
		answer = colour_each(skb, READ_ONCE(p.ip), rule, params, seen);
	else
		answer = colour_any(skb, READ_ONCE(p.ip), rule, params, seen);
coloured:
	if (likely(answer == GREEN && (__u8)params->within == ACTION_PASS)) {
		c = counters_of(rule);
		c->passed_packets++;
		c->passed_bytes += skb->len;
		return NEXT;
	}
	if (answer < 0) {
		p.phase = phase_at(time_ns(skb));
		goto colours_slow;
	}
	p.wire = (struct size){ .bytes = skb->len, .packets = 1 };
	answer = act_by_colour(skb, rule, params, &p, answer);
	return tell_colour(skb, READ_ONCE(p.ip), READ_ONCE(p.id), answer);
fast:
	answer = apply_fast(skb, READ_ONCE(p.ip), READ_ONCE(p.id));
	if (answer != UNDONE)
		return answer;
	goto slow;
pools:
	answer = apply_in_pools(skb, READ_ONCE(p.ip), READ_ONCE(p.id), false);
	if (answer == LATE) {
		now = time_ns(skb);
		keep_times(READ_ONCE(p.id), phase_at(now), now);
		answer = apply_in_pools(skb, READ_ONCE(p.ip), READ_ONCE(p.id), true);
	}
	if (answer != UNDONE)
		return answer;
slow:
	p = (struct packet){ .ip = READ_ONCE(p.ip), .id = READ_ONCE(p.id), .now = time_ns(skb) };
#pragma unroll
	for (index = 1; index <= DECISIONS; index++) {
		answer = decide(skb, &p);
		if (!answer)
			return NEXT;
		if (HOOK(colours) && answer == HAS_COLOURS) {
			answer = SLOW;
			goto colours_slow;
		}
		answer = apply_slow(skb, &p, index < DECISIONS ? ATTEMPT_AGAIN : 0);
		if (answer == LATE) {
			keep_times(p.id, p.phase, p.now);
			answer = apply_slow(skb, &p, index < DECISIONS ? ATTEMPT_AGAIN | ATTEMPT_KEPT : ATTEMPT_KEPT);
		}
		if (answer != UNDONE)
			break;
	}
	if (HOOK(colours))
		count_between(&p);
	if (HOOK(shadows) && !apply_shadow(skb, &p, true))
		apply_shadow(skb, &p, false);
	return answer;
colours_slow:
	skb->cb[IP_CB] = p.ip;
	skb->cb[RULE_CB] = p.id;
	skb->cb[PHASE_CB] = p.phase;
	skb->cb[PAID_CB] = answer == SLOW_PAID;
	bpf_tail_call(skb, &programs, KINDS + HOOK(kind));
	return fail_call(skb, p.ip, p.id, p.phase);
}

/* Passes neighbour discovery, and counts it for the matching rule. */
__noinline int exempt(struct __sk_buff *skb, __u32 ip)
{
	struct packet p = { .ip = ip, .now = time_ns(skb) };
	struct address far = {};
	struct rule *rule;
	__u32 id;

	if (far_address(skb, ip, &far))
		return NEXT;
	id = match6_from(skb, far.word[0], far.word[1], NO_LENGTH);
	if (!id)
		return NEXT;
	p.id = id - 1;
	if (!decide(skb, &p))
		return NEXT;
	id = p.id;
	rule = rule_of(id);
	if (rule)
		__sync_fetch_and_add(&rule->exempt_packets, 1);
	return NEXT;
}

/* The offset of the IP header with IS_IPV6, and the id of the rule plus one, or 0. */
struct match {
	__u32 ip;
	__u32 id;
};

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

/* For packets with VLAN tags, or with headers outside the linear part. */
__noinline int match_slow(struct __sk_buff *skb, struct match *m)
{
	struct address far = {};
	int ip = find_ip(skb);

	if (ip < 0)
		return count_other(skb);
	if (!m || far_address(skb, ip, &far))
		return 0;
	m->ip = ip;
	if (!(ip & IS_IPV6))
		m->id = match4_from(skb, far.word[0], NO_LENGTH);
	else if (is_discovery(skb, ip))
		exempt(skb, ip);
	else
		m->id = match6_from(skb, far.word[0], far.word[1], NO_LENGTH);
	return 0;
}

SEC("tc")
int shapectl(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end, *l3;
	__u32 ip = HOOK(l2_bytes), id;
	struct match found;
	const __u64 *far;
	__be16 proto;

	if (ip) {
		if (data + ETH_HLEN > data_end)
			return NEXT;
		proto = *(__be16 *)AT(data, ETH_HLEN - sizeof(proto));
		l3 = AT(data, ETH_HLEN);
	} else {
		proto = skb->protocol;
		l3 = AT(data, 0);
	}
	if (proto == bpf_htons(ETH_P_IP) && l3 + sizeof(struct iphdr) <= data_end) {
		if (*(__u8 *)l3 >> 4 != 4)
			return NEXT;
		id = match4(skb, *(__u32 *)far4(l3));
	} else if (proto == bpf_htons(ETH_P_IPV6) && l3 + sizeof(struct ipv6hdr) <= data_end) {
		if (*(__u8 *)l3 >> 4 != 6)
			return NEXT;
		ip |= IS_IPV6;
		if (((struct ipv6hdr *)l3)->nexthdr == IPPROTO_ICMPV6 && is_discovery(skb, ip))
			return exempt(skb, ip);
		far = far6(l3);
		id = match6(skb, far[0], far[1]);
	} else if (proto == bpf_htons(ETH_P_IP) || proto == bpf_htons(ETH_P_IPV6) || is_tag(proto)) {
		found = (struct match){};
		match_slow(skb, &found);
		ip = found.ip;
		id = found.id;
	} else {
		return count_other(skb);
	}
	return id ? apply(skb, ip, id - 1) : NEXT;
}

/*
 * The slow path of packets whose rule gives them colours. It is a program of its own, because the verifier bounds what one
 * program does. If the rule has changed meanwhile, the hook's program decides again.
 */
SEC("tc")
int shapectl_colour(struct __sk_buff *skb)
{
	int answer = apply_colours_slow(skb, skb->cb[IP_CB], skb->cb[RULE_CB], skb->cb[PHASE_CB], skb->cb[PAID_CB]);

	if (answer != UNDONE)
		return tell_colour(skb, skb->cb[IP_CB], skb->cb[RULE_CB], answer);
	bpf_tail_call(skb, &programs, HOOK(kind));
	return fail_call(skb, skb->cb[IP_CB], skb->cb[RULE_CB], skb->cb[PHASE_CB]);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
