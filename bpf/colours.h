/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Rules whose packets get colours: two buckets, and an action for each colour. Each meter only decides; this file charges.
 *
 * The first bucket is that of the CIR, the second one that of the limit beside it. They are charged one after the other,
 * each by a CAS: first the second one, then for a green packet the first one. By the clock of a packet, levels only rise.
 * So if a packet has no room, it has none later. A green packet that loses its room in the first bucket in between is
 * yellow, as it has what a yellow packet takes. Only with RFC 2697 it may be red, and gives that back. Until it is charged
 * to the first bucket, it is only in the total. So yellow packets may have less room by its size, but never more.
 */
#ifndef SHAPECTL_COLOURS_H
#define SHAPECTL_COLOURS_H

#include "events.h"
#include "pool_fast.h"
#include "rfc4115.c"
#include "shadow.h"
#include "srtcm.c"
#include "trtcm.c"

/* TCX_NEXT under tcx: later programs and filters still see the packet. */
#define NEXT TC_ACT_UNSPEC
#define DROP TC_ACT_SHOT

/* One of the two limits of a rule, with a bucket. */
struct half {
	struct rule *rule;
	const struct params *params;
	struct bucket *bucket;
	__u64 v;
	__u64 tat;
	__u64 level;
	__u32 seen;
	__u32 fingerprint;
};

/* Reads the level of a bucket if it has the fingerprint. Returns false if another CPU is changing it. */
static __always_inline bool read_half(struct half *h, __u64 now)
{
	__u32 charged;

	h->tat = read_tat(h->bucket, &charged);
	if (!is_still(h->bucket, h->fingerprint, h->tat))
		return false;
	h->level = level_at(h->params, h->v, now, h->tat, charged);
	return true;
}

static __always_inline enum colour meter(const struct half *first, const struct half *second, enum colour in, __u64 cost,
					 __u64 level, __u64 *level2)
{
	__u32 flags = first->params->flags;

	if (flags & RULE_TRTCM)
		return trtcm(in, cost, level, first->params->limit, *level2, second->params->limit);
	if (flags & RULE_SRTCM)
		return srtcm(in, cost, level, first->params->limit, level2, second->params->limit);
	return rfc4115(in, cost, level, first->params->limit, *level2, second->params->limit);
}

/*
 * The colour of a packet, and the TATs of both buckets before it and after it. All are words: without CAP_PERFMON, the
 * verifier refuses smaller ones where the compiler keeps pointers, too.
 */
struct judgement {
	__u64 tat, after;
	__u64 tat2, after2;
	__u64 colour;
	__u64 paid; /* the second bucket was charged, also by a former attempt */
};

/* Decides the colour of a packet. */
static __always_inline void judge_colour(const struct half *first, const struct half *second, __u64 cost, enum colour in,
					 struct judgement *j)
{
	__u64 level2 = second->level;

	j->tat = first->tat;
	j->tat2 = second->tat;
	if (j->paid)
		level2 = level2 > cost ? level2 - cost : 0;
	j->colour = meter(first, second, in, cost, first->level, &level2);
	j->after2 = second->v + level2 + cost;
	j->after = first->v + first->level + cost;
}

/* Whether the second bucket must be charged. */
static __always_inline bool pays(const struct judgement *j, __u32 flags)
{
	return !j->paid && j->colour != RED && !(j->colour == GREEN && flags & RULE_RFC4115);
}

/* A packet that gets a colour on the slow path. No padding: the verifier refuses arguments with unwritten bytes. */
struct colouring {
	struct charge c;
	__u64 phase;
	struct judgement j;
	__u32 ip;
	__u16 class; /* the incoming traffic class, */
	__u16 in;    /* and by it the incoming enum colour */
	struct size wire;
};

static __always_inline __u64 least(__u64 a, __u64 b)
{
	return a < b ? a : b;
}

/* revert_bucket for the sum of both buckets: E keeps its level up to EBS. It must precede that for the first bucket. */
static __always_inline int revert_total(const struct rule *rule, __u32 index, const struct bucket *b, const struct rule *second,
					__u32 second_index, struct bucket *sum)
{
	const struct first_params *cold = (const void *)&rule->cold[index & 1];
	__u64 tat = READ_ONCE(sum->tat), v, level, total, cbs;

	if (tat & TAT_BUSY || !is_from_before(READ_ONCE(sum->tick)))
		return 1;
	level = level_at_revert(rule, index, READ_ONCE(b->tat), READ_ONCE(b->tick), &v);
	total = level_at_revert(second, second_index, tat, READ_ONCE(sum->tick), &v);
	cbs = params_of(rule, index)->limit;
	return put_at_revert(sum, tat, v, least(level, cbs) + least(total - least(total, level), cold->second_limit - cbs));
}

/* revert_bucket for both buckets. */
__noinline int revert_pair(struct colouring *k, __u32 slot)
{
	struct rule *rule, *second;
	struct bucket *b, *other;
	struct version version;
	__u32 id;

	rule = k ? rule_of(k->c.key.id) : NULL;
	if (!rule)
		return 0;
	id = rule->cold[k->c.version.index & 1].second;
	b = slot < KEY_SLOTS ? slot_at(number_of(&k->c, slot)) : &rule->shared;
	second = rule_of(id);
	if (!second)
		return 0;
	other = slot < KEY_SLOTS ? second_of(number_of(&k->c, slot)) : &second->shared;
	version = version_in(second, k->phase);
	if (version.reverted && !(params_of(second, version.index)->flags & RULE_TOTAL ?
					  revert_total(rule, k->c.version.index, b, second, version.index, other) :
					  revert_bucket(second, version.index, other)))
		return 0;
	return revert_bucket(rule, k->c.version.index, b);
}

/* The first or second limit of a packet, and its bucket in a slot that the key may have, or with KEY_SLOTS the shared one. */
static __always_inline bool find_half(struct colouring *k, __u32 slot, bool second, struct half *h)
{
	struct version version = k->c.version;
	__u32 id = k->c.key.id;

	h->rule = rule_of(id);
	if (!h->rule)
		return false;
	if (second) {
		id = h->rule->cold[version.index & 1].second;
		h->rule = rule_of(id);
		if (!h->rule)
			return false;
		version = version_in(h->rule, k->phase);
	}
	h->params = params_of(h->rule, version.index);
	h->seen = version.seen;
	h->bucket = &h->rule->shared;
	h->fingerprint = 0;
	if (slot < KEY_SLOTS) {
		h->fingerprint = fingerprint_in(&k->c, slot);
		if (second)
			h->fingerprint = second_bucket_print(h->fingerprint, id);
		id = number_of(&k->c, slot);
		h->bucket = second ? second_of(id) : slot_at(id);
	}
	h->v = clock_of(h->rule, version.index, version.reverted, k->c.now);
	return true;
}

/* judge_colour for the slow path. Not static, like charge_once. */
__noinline int judge_slow(struct colouring *k, __u32 slot)
{
	__u64 cost = k ? (__u64)k->c.bytes << UNIT_BITS : 0;
	struct half first, second;

	if (!k || !find_half(k, slot, false, &first) || !find_half(k, slot, true, &second) ||
	    !read_half(&first, tick_time(&k->c)) || !read_half(&second, tick_time(&k->c)))
		return false;
	judge_colour(&first, &second, cost, k->in, &k->j);
	if (k->j.paid && k->j.colour == RED) {
		/* What has drained meanwhile is not given back. */
		if (second.level >= cost && __sync_val_compare_and_swap(&second.bucket->tat, second.tat, second.tat - cost) != second.tat)
			return false;
		k->j.paid = false;
	}
	return is_current(first.rule, first.seen);
}

/* Sets the TAT of one of the buckets to that after the packet. */
__noinline enum verdict put_half(struct colouring *k, __u32 slot, __u32 second)
{
	struct half h;

	if (!k || !find_half(k, slot, second, &h))
		return VERDICT_AGAIN;
	return put_tat(h.rule, h.seen, h.bucket, second ? k->j.tat2 : k->j.tat, second ? k->j.after2 : k->j.after, tick_time(&k->c),
		       VERDICT_PASS);
}

/* charge_once for two buckets. */
static __always_inline enum verdict charge_both(struct colouring *k, __u32 slot)
{
	const struct rule *rule;
	__u32 id = k->c.key.id;

	rule = rule_of(id);
	if (!rule)
		return VERDICT_CONTENDED;
	if ((k->c.version.reverted && !revert_pair(k, slot)) || !judge_slow(k, slot))
		goto again;
	if (pays(&k->j, params_of(rule, k->c.version.index)->flags)) {
		if (put_half(k, slot, true) != VERDICT_PASS)
			goto again;
		k->j.paid = true;
	}
	if (k->j.colour != GREEN || put_half(k, slot, false) == VERDICT_PASS)
		return VERDICT_PASS;
again:
	return is_current(rule, k->c.version.seen) ? VERDICT_AGAIN : VERDICT_STALE;
}

/* Gives a slot a second bucket, if it has none for this limit: the rule had no colours when the key got the slot. */
__noinline int add_second(struct charge *c, __u32 i)
{
	struct bucket *b, *second;
	__u32 number, fingerprint;
	struct key *owner;
	__u64 tat;

	if (!c)
		return false;
	number = number_of(c, i);
	fingerprint = second_bucket_print(fingerprint_in(c, i), c->key.second);
	second = second_of(number);
	if (READ_ONCE(second->fingerprint) == fingerprint)
		return true;
	b = slot_at(number);
	owner = bpf_map_lookup_elem(&keys, &number);
	tat = READ_ONCE(b->tat);
	if (!owner || !is_still(b, fingerprint_in(c, i), tat) ||
	    __sync_val_compare_and_swap(&b->tat, tat, tat | TAT_BUSY) != tat)
		return false;
	/* Another CPU may have done it meanwhile. */
	if (READ_ONCE(b->fingerprint) == fingerprint_in(c, i) && READ_ONCE(second->fingerprint) != fingerprint) {
		owner->second = c->key.second;
		owner->paired = true;
		clear_second(number, fingerprint_in(c, i), owner, c->now);
	}
	__sync_lock_test_and_set(&b->tat, tat);
	return READ_ONCE(second->fingerprint) == fingerprint;
}

static long try_pair(__u64 i, struct colouring *k)
{
	__u32 slot = slot_of_key(&k->c), to;

	(void)i;
	if (slot < KEY_SLOTS) {
		k->c.verdict = VERDICT_AGAIN;
		if (!add_second(&k->c, slot))
			return 0;
		k->c.verdict = charge_both(k, slot);
		return k->c.verdict != VERDICT_AGAIN;
	}
	slot = slot_for_key(&k->c);
	if (slot < KEY_SLOTS) {
		k->c.verdict = allocate_slot(&k->c, slot);
		return k->c.verdict != VERDICT_AGAIN;
	}
	k->c.verdict = VERDICT_AGAIN;
	for (slot = 0; slot < KEY_SLOTS; slot++) {
		to = lock_next(&k->c, slot);
		if (to != NO_SLOT && move_bucket(&k->c, slot, to))
			return 0;
	}
	k->c.verdict = VERDICT_CONTENDED;
	return 1;
}

static long try_shared_pair(__u64 i, struct colouring *k)
{
	(void)i;
	k->c.verdict = charge_both(k, KEY_SLOTS);
	return k->c.verdict != VERDICT_AGAIN;
}

/* The incoming colour of a packet with this traffic class. */
static __noinline enum colour colour_in(__u32 class, const struct params *params, __u64 phase)
{
	__u32 id = cold_of(params)->second, dscp = class >> 2 & 63;
	const struct second_params *second;
	const struct rule *rule;

	if (!(params->flags & RULE_AWARE))
		return GREEN;
	rule = rule_of(id);
	if (!rule)
		return GREEN;
	second = (const void *)&rule->cold[version_in(rule, phase).index & 1];
	if (second->red >> dscp & 1)
		return RED;
	return second->yellow >> dscp & 1 ? YELLOW : GREEN;
}

/* charge_slow for a rule with colours: the colour, or the verdict VERDICT_CONTENDED or VERDICT_STALE negated. */
static __noinline int colour_slow(struct __sk_buff *skb, struct colouring *k, __u32 id)
{
	struct rule *rule = rule_of(id);
	const struct params *params;

	if (!rule)
		return -VERDICT_CONTENDED;
	k->c.verdict = VERDICT_AGAIN;
	k->c.version = version_in(rule, k->phase);
	params = params_of(rule, k->c.version.index);
	if (!(params->flags & RULE_COLOURS))
		return -VERDICT_STALE;
	k->c.key = (struct key){ .id = id, .second = cold_of(params)->second, .paired = true };
	measure(skb, k->ip, params->overhead, params->mpu, &k->wire);
	k->c.bytes = k->wire.bytes;
	k->in = colour_in(k->class, params, k->phase);
	if (params->flags & RULE_EACH) {
		find_lines(skb, k->ip, params->flags, &k->c);
		bpf_loop(2 * TRIES, try_pair, k, 0);
		if (k->c.verdict == VERDICT_AGAIN)
			k->c.verdict = VERDICT_CONTENDED;
		if (k->c.verdict == VERDICT_CONTENDED && !k->j.paid)
			__sync_fetch_and_add(&rule->spilled_packets, k->wire.packets);
	}
	if (!(params->flags & RULE_EACH) || (k->c.verdict == VERDICT_CONTENDED && !k->j.paid))
		bpf_loop(2 * TRIES, try_shared_pair, k, 0);
	if (k->c.verdict == VERDICT_PASS)
		return k->j.colour;
	/* The second bucket has it, and the colour is that of its packets. */
	if (k->j.paid)
		return YELLOW;
	return k->c.verdict == VERDICT_STALE ? -VERDICT_STALE : -VERDICT_CONTENDED;
}

/* Counts a packet that is not green for the second limit. A negative colour is none. */
static __always_inline void count_colour(struct rule *second, int colour, const struct size *wire)
{
	struct counters *c = counters_of(second);

	if (colour == YELLOW)
		count(&c->passed_packets, &c->passed_bytes, wire);
	else if (colour == RED)
		count(&c->dropped_packets, &c->dropped_bytes, wire);
	else
		count(&c->passed_excess_packets, &c->passed_excess_bytes, wire);
}

/*
 * While a change may revert by itself, counts a packet that its rule treated as after the change, in the second limit that
 * the rule had before, if it has another one now or none: there, the packet has no colour.
 */
static __noinline int count_between(const struct packet *p)
{
	__u32 id = p->id, seen = p->version.seen;
	const struct params *old, *params;
	struct rule *rule;

	if (!(seen & VERSION_CHANGES) || p->version.index == (seen & 1) || READ_ONCE(change.phase) != PHASE_BY_TIME)
		return 0;
	rule = rule_of(id);
	if (!rule)
		return 0;
	old = params_of(rule, seen);
	params = params_of(rule, p->version.index);
	if (!(old->flags & RULE_COLOURS) || (params->flags & RULE_COLOURS && cold_of(params)->second == cold_of(old)->second))
		return 0;
	id = cold_of(old)->second;
	rule = rule_of(id);
	if (rule)
		count_colour(rule, -1, &p->wire);
	return 0;
}

/* Returned for packets of which listeners are told, where there is stack left for it: red ones, and dropped ones. */
#define TOLD_DROP (-6)
#define TOLD_PASS (-7)
#define TOLD_MARK (-8)

/* Tells listeners of such a packet. Returns what happens to the packet, whatever the answer. */
static __always_inline int tell_colour(struct __sk_buff *skb, __u32 ip, __u32 id, int answer)
{
	if (answer > TOLD_DROP || answer < TOLD_MARK)
		return answer;
	if (is_heard())
		tell(skb, ip, id, id, answer == TOLD_DROP ? VERDICT_EXCESS : answer == TOLD_MARK ? VERDICT_MARK : VERDICT_PASS);
	return answer == TOLD_DROP ? DROP : NEXT;
}

static __always_inline __u32 action_of(const struct params *params, __u32 colour)
{
	return params->within >> (colour & 3) * 8 & 0xff;
}

/* Does what the rule says about packets of a colour. */
static __noinline int act_by_colour(struct __sk_buff *skb, struct rule *rule, const struct params *params, const struct packet *p,
				    __u32 colour)
{
	__u32 second = cold_of(params)->second, action = action_of(params, colour);
	struct counters *c = counters_of(rule);

	if (colour != GREEN) {
		rule = rule_of(second);
		if (rule)
			count_colour(rule, colour, &p->wire);
	}
	if (action == ACTION_DROP || (action == ACTION_ECN && !ecn_of(skb, p->ip))) {
		count(&c->dropped_packets, &c->dropped_bytes, &p->wire);
		return TOLD_DROP;
	}
	if (action == ACTION_ECN) {
		if (set_class(skb, p->ip, ~0, CE))
			c->contended_packets += p->wire.packets;
		else
			c->marked_packets += p->wire.packets;
	} else if (action < ACTION_PASS && traffic_class(skb, p->ip) >> 2 != (int)action && set_class(skb, p->ip, CE, action << 2)) {
		c->contended_packets += p->wire.packets;
	}
	count(&c->passed_packets, &c->passed_bytes, &p->wire);
	if (colour != GREEN)
		count(&c->passed_excess_packets, &c->passed_excess_bytes, &p->wire);
	if (colour != RED)
		return NEXT;
	return action == ACTION_ECN ? TOLD_MARK : TOLD_PASS;
}

/* Charges a packet to the shadow of its rule, and counts the colour. Returns false if the shadow has changed meanwhile. */
static __always_inline bool colour_by_shadow(struct __sk_buff *skb, struct colouring *k, __u32 id)
{
	const struct params *params;
	struct rule *rule, *second;
	struct counters *c;
	__u32 action;
	int colour;

	k->j.paid = false;
	colour = colour_slow(skb, k, id);
	rule = rule_of(id);
	if (!rule || colour == -VERDICT_STALE)
		return false;
	params = params_of(rule, k->c.version.index);
	c = counters_of(rule);
	id = cold_of(params)->second;
	second = rule_of(id);
	if (colour != GREEN && second)
		count_colour(second, colour, &k->wire);
	action = colour < 0 ? ACTION_PASS : action_of(params, colour);
	if (colour < 0)
		c->contended_packets += k->wire.packets;
	if (action == ACTION_DROP || (action == ACTION_ECN && !ecn_of(skb, k->ip))) {
		note_affected(skb, k->ip, &k->wire, params);
		count(&c->dropped_packets, &c->dropped_bytes, &k->wire);
	} else {
		count(&c->passed_packets, &c->passed_bytes, &k->wire);
		if (colour == YELLOW || colour == RED)
			count(&c->passed_excess_packets, &c->passed_excess_bytes, &k->wire);
	}
	count_extra(rule, k->wire.packets);
	return true;
}

/* Gives a packet without a colour the verdict of --fail, and counts it. */
static __always_inline int fail(struct rule *rule, const struct params *params, const struct size *wire)
{
	struct counters *c = counters_of(rule);
	struct rule *second;

	c->contended_packets += wire->packets;
	if (params->flags & RULE_COLOURS) {
		second = rule_at(&cold_of(params)->second);
		if (second)
			count_colour(second, -1, wire);
	}
	if (params->flags & RULE_FAIL_CLOSED) {
		count(&c->dropped_packets, &c->dropped_bytes, wire);
		return DROP;
	}
	count(&c->passed_packets, &c->passed_bytes, wire);
	return NEXT;
}

/* The same if the next program could not be called. */
static __noinline int fail_call(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 phase)
{
	struct rule *rule = rule_of(id);
	const struct params *params;
	struct size wire;

	if (!rule)
		return NEXT;
	params = params_of(rule, version_in(rule, phase).index);
	measure(skb, ip, params->overhead, params->mpu, &wire);
	count_extra(rule, wire.packets);
	return fail(rule, params, &wire);
}

/* Applies a rule with colours to any packet. Returns UNDONE if the rule has changed meanwhile. */
__noinline int apply_colours_slow(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 phase, __u32 paid)
{
	struct colouring k = { .c.now = time_ns(skb), .c.before = 1, .phase = phase, .ip = ip, .j.paid = paid };
	const struct params *params;
	struct rule *rule;
	int answer, colour;

	colour = traffic_class(skb, ip);
	k.class = colour < 0 ? 0 : colour;
	colour = colour_slow(skb, &k, id);
	rule = rule_of(id);
	if (!rule || colour == -VERDICT_STALE)
		return UNDONE;
	params = params_of(rule, k.c.version.index);
	if (colour >= 0) {
		struct packet p = { .ip = ip, .id = id, .version = k.c.version, .wire = k.wire };

		answer = act_by_colour(skb, rule, params, &p, colour);
		count_between(&p);
	} else {
		answer = fail(rule, params, &k.wire);
	}
	count_extra(rule, k.wire.packets);
	if (HOOK(shadows) && params->flags & RULE_SHADOW) {
		id = cold_of(params)->shadow;
		if (!colour_by_shadow(skb, &k, id))
			colour_by_shadow(skb, &k, id);
	}
	return answer;
}

/* Returned for packets that need the slow path; the second bucket may have been charged. */
#define SLOW (-4)
#define SLOW_PAID (-5)

/*
 * The fast path: a packet that is one packet on the wire, and existing buckets without contention. The caller has the
 * parameters in force and the version with them. Returns the colour or one of the above.
 */
static __always_inline int colour_fast(struct __sk_buff *skb, __u32 ip, struct rule *rule, const struct params *params, __u32 seen,
				       bool each, bool aware)
{
	const struct first_params *cold = (const void *)cold_of(params);
	struct half first = { .params = params, .bucket = &rule->shared };
	struct params by = {};
	struct half second = { .params = &by };
	struct judgement j = { .paid = false };
	enum colour in = GREEN;
	struct rule *other;
	__u32 line, slot;
	__u64 hash, now;
	int class;

	if (each) {
		hash = hash_plain(skb, ip, params->each_bits, params->salt, params->flags);
		if (!hash)
			goto slow;
		line = line_of(hash);
		first.fingerprint = fingerprint_of(hash);
		slot = home_of(first.fingerprint);
		if (READ_ONCE(line_at(line)->slot[slot].fingerprint) != first.fingerprint)
			slot = slot_of(line_at(line), first.fingerprint);
		if (slot == LINE_SLOTS)
			goto slow;
		first.bucket = KEPT(&line_at(line)->slot[slot & (LINE_SLOTS - 1)]);
		second.bucket = second_of(line * LINE_SLOTS + (slot & (LINE_SLOTS - 1)));
		second.fingerprint = second_bucket_print(first.fingerprint, cold->second);
	} else {
		other = rule_at(&cold->second);
		if (!other)
			goto slow;
		second.bucket = &other->shared;
	}
	now = time_ns(skb);
	if (aware) {
		class = traffic_class(skb, ip);
		if (class < 0)
			goto slow;
		in = colour_in(class, params, phase_at(now));
	}
	first.v = byte_clock(params, params->base, now);
	if (!read_half(&first, now))
		goto slow;
	by.rate_units = cold->second_rate;
	by.limit = cold->second_limit;
	by.idle = cold->second_idle;
	second.v = byte_clock(&by, cold->second_base, now);
	if (!read_half(&second, now))
		goto slow;
	judge_colour(&first, &second, (__u64)skb->len << UNIT_BITS, in, &j);
	if (unlikely(!is_current(rule, seen)) || (pays(&j, params->flags) && !set_tat(second.bucket, j.tat2, j.after2, now)))
		goto slow;
	if (j.colour == GREEN && !set_tat(first.bucket, j.tat, j.after, now))
		return params->flags & RULE_RFC4115 ? SLOW : SLOW_PAID;
	return j.colour;
slow:
	return KEPT(SLOW);
}

/* One function for each common case, because what a case does not need would take registers. */
static __noinline int colour_all(struct __sk_buff *skb, struct rule *rule, const struct params *params, __u32 seen)
{
	return colour_fast(skb, 0, rule, params, seen, false, false);
}

static __noinline int colour_each(struct __sk_buff *skb, __u32 ip, struct rule *rule, const struct params *params, __u32 seen)
{
	return colour_fast(skb, ip, rule, params, seen, true, false);
}

static __noinline int colour_any(struct __sk_buff *skb, __u32 ip, struct rule *rule, const struct params *params, __u32 seen)
{
	if (params->flags & (RULE_FRAMING | RULE_SHADOW))
		return SLOW;
	return colour_fast(skb, ip, rule, params, seen, params->flags & RULE_EACH, true);
}

#endif
