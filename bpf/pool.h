/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Pools: buckets that rules and other pools draw from. A pool is a rule without a
 * prefix. A packet passes if its rule and all pools above conform, and is then charged
 * to all of them. If one refuses, nothing is charged.
 *
 * First all pools are tested, from the lowest on. Then the rule's bucket decides by its
 * CAS. Then the pools are charged, whatever their level is by now: packets of other
 * CPUs may have come in between, one of each CPU. What they overshoot stays charged, so
 * the long run is exact. A refund would not be exact, because a bucket drains meanwhile.
 *
 * A guarantee is a limit of its own. A packet that conforms to it passes all pools above,
 * and is charged to them even beyond their capacity. The guarantees within a pool are not
 * above its rate, so this debt is bounded by their bursts.
 *
 * Packets of all sizes share a pool. A small one would always find room before a large
 * one. So a large packet conforms if one of SHARED_BYTES would, and is charged as a whole.
 */
#ifndef SHAPECTL_POOL_H
#define SHAPECTL_POOL_H

#include "charge.h"

/* Debt that guarantees cannot reach: levels must stay below 2^62 units. */
#define MAX_DEBT (1ULL << 60)

/* A rule or pool and its parameters in the phase of a packet. */
struct limit_at {
	struct rule *rule;
	const struct params *params;
	const struct params *rated; /* those with the rate, see rated */
	struct version version;
	__u64 least; /* units: the least level of the shared bucket */
	__u64 ticks; /* ns: the time for ticks, see tick_time */
	__u64 v;
};

/* Returns false if there is no such rule, or if it or its bucket changes just now. */
static __always_inline bool limit_in(__u32 id, __u32 phase, __u64 now, struct limit_at *at)
{
	at->rule = rule_of(id);
	if (!at->rule)
		return false;
	at->version = version_in(at->rule, phase);
	at->params = params_of(at->rule, at->version.index);
	at->ticks = at->version.reverted ? now + (1ULL << TICK_BITS) : now;
	at->rated = at->params;
	at->least = 0;
	if (at->version.reverted && !has_lease(at->rule) && !revert_bucket(at->rule, at->version.index, &at->rule->shared))
		return false;
	if (at->params->flags & RULE_LEASED) {
		at->rated = lease_of(at->params, now);
		if (!at->rated)
			return false;
		at->v = byte_clock(at->rated, at->rated->base, now);
		at->least = least_level(at->rated, at->v, now);
	} else {
		at->v = clock_of(at->rule, at->version.index, at->version.reverted, now);
	}
	/* Else v may be of two changes, and an empty bucket would get it as its TAT. */
	return is_current(at->rule, at->version.seen);
}

static __always_inline __u64 level_of(const struct limit_at *at, const struct bucket *b)
{
	__u32 charged;
	__u64 tat = read_tat(b, &charged);

	return later(level_at(at->rated, at->v, at->ticks, tat, charged), at->least);
}

/* Charges units to the shared bucket whatever its level is. Returns the level before. */
static __always_inline __u64 charge_anyway(const struct limit_at *at, __u64 cost)
{
	struct bucket *b = &at->rule->shared;
	__u64 old, level, start;
	__u32 charged;

	old = read_tat(b, &charged);
	level = later(level_at(at->rated, at->v, at->ticks, old, charged), at->least);
	if (level > MAX_DEBT)
		return level;
	start = at->v + level;
	raise_tick(b, &old, start, start, tick(at->ticks)); /* or another CPU does */
	/* If another CPU was faster, the bucket is not empty any more. */
	if (start != old && __sync_val_compare_and_swap(&b->tat, old, start + cost) == old)
		return level;
	__sync_fetch_and_add(&b->tat, cost);
	return level;
}

/* The units that a packet counts in the shared bucket of a guarantee of each key. Rounds up. */
static __always_inline __u64 part_of(const struct limit_at *at, __u32 bytes)
{
	__u32 members = at->rule->cold[at->version.index & 1].members;

	return members ? ((__u64)bytes << UNIT_BITS) / members + 1 : 0;
}

/* Whether a packet conforms to a limit whose bucket is in a slot of the table, or else the shared bucket. */
static __noinline int conforms_in(const struct packet *p, __u32 id, __u32 slot)
{
	struct limit_at at;
	struct bucket *b;
	__u64 level, least;

	if (!limit_in(id, p->phase, p->now, &at))
		return false;
	if (at.params->flags & RULE_UNLIMITED)
		return true;
	least = (__u64)tested_bytes(at.params, p->wire.bytes) << UNIT_BITS;
	if (slot == NO_SLOT && at.params->flags & RULE_TOGETHER)
		least = part_of(&at, p->wire.bytes);
	b = slot == NO_SLOT ? &at.rule->shared : slot_at(slot);
	if (at.version.reverted)
		revert_bucket(at.rule, at.version.index, b);
	level = level_of(&at, b);
	return !level || level + least <= at.rated->limit;
}

/*
 * Whether a packet conforms to a rule or guarantee by itself, as far as that is known before it is
 * charged. A key without a slot has the spill bucket, or is guaranteed what all are together.
 */
__noinline int conforms(struct __sk_buff *skb, const struct packet *p, __u32 id)
{
	struct charge c = {};
	struct rule *rule;
	__u32 slot, flags;

	if (!p)
		return false;
	c.key.id = id;
	rule = rule_of(c.key.id);
	if (!rule)
		return false;
	c.version = version_in(rule, p->phase);
	flags = params_of(rule, c.version.index)->flags;
	slot = KEY_SLOTS;
	if (flags & RULE_EACH) {
		c.now = p->now;
		find_lines(skb, p->ip, flags, &c);
		slot = slot_of_key(&c);
	}
	if (slot < KEY_SLOTS && !conforms_in(p, id, number_of(&c, slot)))
		return false;
	return slot < KEY_SLOTS && !(flags & RULE_TOGETHER) ? true : conforms_in(p, id, NO_SLOT);
}

/* Charges a packet to the guarantee of all keys together, if each has one. */
__noinline int charge_together(const struct packet *p, __u32 id)
{
	struct limit_at at;

	if (p && limit_in(id, p->phase, p->now, &at) && at.params->flags & RULE_TOGETHER)
		charge_anyway(&at, part_of(&at, p->wire.bytes));
	return 0;
}

/* Charges the guarantee of a rule to which a packet conforms. */
__noinline int charge_guarantee(struct __sk_buff *skb, const struct packet *p, __u32 id)
{
	struct charge c = { .verdict = VERDICT_AGAIN, .excess = EXCESS_CHARGES };
	const struct params *params;
	struct counters *counters;
	struct rule *rule;

	if (!p)
		return 0;
	rule = rule_of(id);
	if (!rule)
		return 0;
	c.now = p->now;
	c.bytes = p->wire.bytes;
	c.key.id = id;
	c.version = version_in(rule, p->phase);
	params = params_of(rule, c.version.index);
	if (params->flags & RULE_EACH) {
		find_lines(skb, p->ip, params->flags, &c);
		bpf_loop(TRIES, try_slot, &c, 0);
	} else {
		bpf_loop(TRIES, try_shared, &c, 0);
	}
	counters = counters_of(rule);
	count(&counters->passed_packets, &counters->passed_bytes, &p->wire);
	return 0;
}

/*
 * Makes the key of the sharer of a packet in the bucket c->key.id, and finds its lines. A member is what is directly
 * within the pool.
 */
__noinline int find_sharer(struct __sk_buff *skb, __u32 ip, __u32 member, struct charge *c)
{
	const struct params *params;
	const struct rule *rule;
	__u32 id, flags;
	__u64 hash;

	if (!c)
		return 0;
	id = c->key.id;
	rule = rule_of(id);
	if (!rule)
		return 0;
	params = params_of(rule, c->version.index);
	flags = params->flags >> SHARE_FLAGS;
	if (params->flags & RULE_SHARE_MEMBER)
		c->key.src[0] = member;
	else
		make_key(skb, ip, rule->cold[c->version.index & 1].share_bits, flags, &c->key);
	c->key.sharer = 1;
	/* Flows of sparse-first have the same keys. */
	hash = hash_key(&c->key, ~params->salt);
	c->line = line_of(hash);
	c->fingerprint = fingerprint_of(hash);
	return 0;
}

/* How to apply a rule. */
enum attempt {
	ATTEMPT_AGAIN = 1 << 0, /* return UNDONE if the rule has changed meanwhile */
	ATTEMPT_KEPT = 1 << 1,	/* the fair clocks are those of now: do not return LATE */
};

/*
 * A packet on its way up through the pools of its rule, which is at level 0. Above the level that guarantees the
 * packet, pools are not asked.
 */
struct climb {
	__u64 longest;	 /* ns: for which a queue delays the packet */
	__u64 before;	 /* units that leave before the packet from the queue of this level */
	__u32 id;	 /* of the rule or pool at this level, */
	__u32 member;	 /* and of that below, */
	__u16 weight;	 /* which has this weight */
	__u8 level;
	__u8 guaranteed; /* the level, or NOT_GUARANTEED */
	__u32 marks;	 /* a bit for each level that marks the packet, */
	__u32 lights;  /* and for each whose sharer is light */
	__u32 at;	 /* the rule or pool that had too little room; of several that mark or delay the packet the last */
	__u8 delayed;	 /* the longest is the queue of a pool */
	__u8 answer;	 /* of this level: enum climb_answer */
	__u8 load;	 /* of the last sharer, see judge */
	__u8 attempt;	 /* enum attempt */
	__u32 late;	 /* a fair clock must be advanced first; no padding: the verifier refuses arguments with unwritten bytes */
};

#define NOT_GUARANTEED (MAX_DEPTH + 1)

enum climb_answer {
	CLIMB_REFUSES = 1 << 0,
	CLIMB_SHARES = 1 << 1,
	CLIMB_MARKS = 1 << 2, /* an excess packet may be marked */
	CLIMB_SPARSE = 1 << 3, /* sparse flows go first */
	CLIMB_CHARGED = 1 << 4,
	CLIMB_CHANGES = 1 << 5, /* just now */
};

/* Goes to the next pool, if there is one. */
__noinline int climb_up(const struct packet *p, struct climb *c)
{
	const struct params *params;
	struct rule *rule;
	__u32 id, index;

	if (!p || !c)
		return false;
	id = c->id;
	rule = rule_of(id);
	if (!rule || c->level >= MAX_DEPTH)
		return false;
	index = version_in(rule, p->phase).index;
	params = params_of(rule, index);
	if (!(params->flags & RULE_WITHIN))
		return false;
	c->weight = rule->cold[index & 1].weight;
	c->member = id;
	c->id = params->within;
	c->level++;
	return true;
}

/* Tests the level of a pool for a packet that nothing below guarantees. */
__noinline int test_pool(struct __sk_buff *skb, const struct packet *p, struct climb *c)
{
	const struct cold_params *cold;
	__u64 level, least;
	struct limit_at at;

	if (!p || !c)
		return 0;
	c->answer = 0;
	if (!revert_leased(c->id, p->phase) || !limit_in(c->id, p->phase, p->now, &at)) {
		c->answer = CLIMB_CHANGES;
		return 0;
	}
	if (at.params->flags & RULE_ABSENT)
		return 0;
	cold = &at.rule->cold[at.version.index & 1];
	least = p->wire.bytes < SHARED_BYTES ? p->wire.bytes : SHARED_BYTES;
	level = level_of(&at, &at.rule->shared);
	if (at.params->flags & RULE_SHARES)
		c->answer |= CLIMB_SHARES;
	if (at.params->flags & RULE_SPARSE)
		c->answer |= CLIMB_SPARSE;
	if (marks_excess(at.params, cold) && ecn_of(skb, p->ip))
		c->answer |= CLIMB_MARKS;
	if (level + (least << UNIT_BITS) > at.rated->limit) {
		if (at.params->flags & RULE_ECN && c->answer & CLIMB_MARKS && level + ((__u64)p->wire.bytes << UNIT_BITS) <= 2 * at.rated->limit)
			c->marks |= 1 << (c->level & 31);
		else
			c->answer |= CLIMB_REFUSES;
	}
	if (at.params->flags & RULE_GUARANTEE && conforms_in(p, cold->second, NO_SLOT))
		c->guaranteed = c->level;
	return 0;
}

/* Charges a packet to the guarantee of a pool. */
__noinline int charge_pool_guarantee(const struct packet *p, __u32 id)
{
	struct counters *counters;
	struct limit_at at;

	if (!p || !limit_in(id, p->phase, p->now, &at))
		return 0;
	charge_anyway(&at, (__u64)p->wire.bytes << UNIT_BITS);
	counters = counters_of(at.rule);
	count(&counters->passed_packets, &counters->passed_bytes, &p->wire);
	return 0;
}

/* Charges a packet to a pool. */
__noinline int charge_pool(const struct packet *p, struct climb *c)
{
	struct limit_at at;
	__u64 level;

	if (!p || !c)
		return 0;
	c->answer = 0;
	c->before = 0;
	if (!revert_leased(c->id, p->phase) || !limit_in(c->id, p->phase, p->now, &at) || at.params->flags & RULE_ABSENT)
		return 0;
	c->answer = CLIMB_CHARGED;
	level = charge_anyway(&at, (__u64)p->wire.bytes << UNIT_BITS);
	if (at.params->flags & RULE_DELAY)
		c->before = units_before(at.rated, p->wire.bytes, level + ((__u64)p->wire.bytes << UNIT_BITS));
	if (c->before && at.params->flags & RULE_SPARSE)
		c->answer |= CLIMB_SPARSE;
	if (at.params->flags & RULE_SHARES && c->guaranteed >= c->level)
		c->answer |= CLIMB_SHARES;
	else if (at.params->flags & RULE_SHARES)
		skip_sharers(&at.rule->cold[at.version.index & 1], p->wire.bytes);
	return 0;
}

/* Lets a packet skip the queue of a pool to which it was charged, if its flow is sparse. */
__noinline int skip_queue(struct __sk_buff *skb, const struct packet *p, struct climb *to)
{
	struct charge c = { .verdict = VERDICT_AGAIN };
	struct rule *rule;

	if (!p || !to)
		return 0;
	c.key.id = to->id;
	rule = rule_of(c.key.id);
	if (!rule)
		return 0;
	c.now = p->now;
	c.bytes = p->wire.bytes;
	c.before = to->before;
	c.version = version_in(rule, p->phase);
	if (skips_queue(skb, p->ip, &c))
		to->before = 0;
	return 0;
}

/* Whether the flow of a packet is sparse in a queue of a rule or pool, as far as that is known before it is charged. */
__noinline int is_sparse(struct __sk_buff *skb, const struct packet *p, __u32 id)
{
	const struct params *params;
	enum verdict verdict;
	struct charge c = {};
	struct bucket *b;
	struct rule *rule;
	__u64 v, level = 0;
	__u32 slot;

	if (!p)
		return false;
	c.key.id = id;
	c.now = p->now;
	rule = rule_of(c.key.id);
	if (!rule)
		return false;
	c.version = version_in(rule, p->phase);
	find_lines(skb, p->ip, RULE_FLOW, &c);
	slot = slot_of_key(&c);
	v = rated_clock(rule, &c.version, c.now, &params);
	if (slot < KEY_SLOTS) {
		b = slot_at(number_of(&c, slot));
		level = level_at(params, v, c.now, READ_ONCE(b->tat), READ_ONCE(b->tick));
	}
	flow_level(params, 0, p->wire.bytes, c.fifo, level, &verdict);
	return verdict == VERDICT_PASS;
}

/* Counts a packet that was charged to a pool, and charges its guarantee. */
__noinline int count_passed(struct __sk_buff *skb, const struct packet *p, struct climb *c)
{
	const struct cold_params *cold;
	const struct params *params, *by;
	struct counters *counters;
	struct rule *rule;
	__u32 id, index;
	__u64 wait;
	bool marks;

	if (!p || !c)
		return 0;
	id = c->id;
	rule = rule_of(id);
	if (!rule)
		return 0;
	index = version_in(rule, p->phase).index;
	params = params_of(rule, index);
	cold = &rule->cold[index & 1];
	by = rated(params, p->now);
	wait = drain_ns(by->rate_units, c->before);
	if (wait > c->longest) {
		c->longest = wait;
		c->delayed = true;
	}
	if (params->flags & RULE_DELAY)
		keep_later(skb, by, p->now, p->now + c->longest);
	if (wait > cold->ecn_above_ns && ecn_of(skb, p->ip))
		c->marks |= 1 << (c->level & 31);
	marks = c->marks >> (c->level & 31) & 1;
	counters = counters_of(rule);
	count(&counters->passed_packets, &counters->passed_bytes, &p->wire);
	count_extra(rule, p->wire.packets);
	if (marks)
		counters->marked_packets += p->wire.packets;
	if (wait || marks) {
		count(&counters->passed_excess_packets, &counters->passed_excess_bytes, &p->wire);
		c->at = c->id;
	}
	if (c->guaranteed <= c->level && params->flags & RULE_GUARANTEE)
		charge_pool_guarantee(p, cold->second);
	return 0;
}

/* Counts a packet that would pass but for a pool. */
__noinline int count_refused(const struct packet *p, __u32 id)
{
	struct counters *counters;
	struct rule *rule;

	if (!p)
		return 0;
	rule = rule_of(id);
	if (!rule)
		return 0;
	counters = counters_of(rule);
	count(&counters->dropped_packets, &counters->dropped_bytes, &p->wire);
	count_extra(rule, p->wire.packets);
	return 0;
}

/* Lets the queue of a pool delay a packet, which it does for longer than other queues. The sender may request a later time. */
static __always_inline enum verdict queue_in_pool(struct __sk_buff *skb, const struct packet *p, const struct climb *c)
{
	__u64 departure = p->now + c->longest;

	return asks_later(skb, departure) || set_departure(skb, departure) ? VERDICT_DELAY : VERDICT_CONTENDED;
}

/* Judges a packet of a sharer in a slot of the table. */
static __noinline enum share_verdict judge_share(const struct packet *p, const struct climb *c, __u32 slot)
{
	const struct cold_params *cold;
	struct limit_at at;
	struct bucket *b;
	struct share *s;
	__u64 level;

	if (!limit_in(c->id, p->phase, p->now, &at))
		return WITHIN_SHARE;
	cold = &at.rule->cold[at.version.index & 1];
	s = share_of(cold);
	if (!s)
		return WITHIN_SHARE;
	b = slot_at(slot);
	level = whole_level(at.params, at.rated->limit, level_of(&at, &at.rule->shared));
	return judge(s, at.params, cold, level, p->wire.bytes, c->weight, READ_ONCE(b->tat), READ_ONCE(b->tick), c->load);
}

/* is_near_share for that sharer, if sparse flows go first. Not in judge_share: the verifier would look at both together. */
static __noinline bool is_near(const struct packet *p, const struct climb *c, __u32 slot)
{
	const struct cold_params *cold;
	struct limit_at at;
	struct share *s;
	__u64 level;

	if (!limit_in(c->id, p->phase, p->now, &at) || !(at.params->flags & RULE_SPARSE))
		return false;
	cold = &at.rule->cold[at.version.index & 1];
	s = share_of(cold);
	if (!s)
		return false;
	level = whole_level(at.params, at.rated->limit, level_of(&at, &at.rule->shared));
	return is_near_share(s, at.params, cold, level, c->weight, READ_ONCE(slot_at(slot)->tat));
}

/*
 * Forgives most of a sharer's debt. It is from a time with fewer sharers, so the sharer would be locked out until it
 * has drained at its part of now.
 */
static __noinline void forgive_debt(const struct cold_params *cold, __u32 weight, __u32 slot)
{
	struct bucket *b = slot_at(slot);
	struct share *s = share_of(cold);
	__u64 tat = READ_ONCE(b->tat), less;

	if (!s)
		return;
	less = on_wheel(cold, READ_ONCE(s->v), most_debt(may_be_ahead(s, weight), READ_ONCE(b->tick)) / weight);
	if (__sync_val_compare_and_swap(&b->tat, tat, less) == tat)
		move_weight(s, cold, tat, less, weight);
}

/* Whether a packet is within the fair share of its sharer. The clock must be kept before. */
__noinline enum share_verdict test_share(struct __sk_buff *skb, const struct packet *p, struct climb *at)
{
	enum share_verdict verdict = WITHIN_SHARE;
	struct charge c = {};
	struct rule *rule;
	struct share *s;
	__u32 slot;

	if (!p || !at)
		return WITHIN_SHARE;
	c.key.id = at->id;
	rule = rule_of(c.key.id);
	if (!rule)
		return WITHIN_SHARE;
	c.version = version_in(rule, p->phase);
	find_sharer(skb, p->ip, at->member, &c);
	slot = slot_of_key(&c);
	s = share_of(&rule->cold[c.version.index & 1]);
	if (slot < KEY_SLOTS)
		verdict = judge_share(p, at, number_of(&c, slot));
	else if (s)
		verdict += load_of_new(s, p->wire.bytes) * SHARE_VERDICTS;
	if (verdict == BEYOND_DEBT) {
		forgive_debt(&rule->cold[c.version.index & 1], at->weight, number_of(&c, slot));
		verdict = BEYOND_SHARE;
	} else if (verdict == BEYOND_SHARE && is_near(p, at, number_of(&c, slot))) {
		verdict = BEYOND_SPARSE;
	}
	at->load = verdict / SHARE_VERDICTS;
	if (at->load == LIGHT)
		at->lights |= 1 << (at->level & 31);
	return verdict % SHARE_VERDICTS;
}

/* Charges a packet to its sharer. A sharer that gets no slot has no share of its own. */
__noinline int charge_share(struct __sk_buff *skb, const struct packet *p, const struct climb *at)
{
	struct charge c = { .before = 1, .verdict = VERDICT_AGAIN };
	const struct cold_params *cold;
	struct rule *rule;
	struct share *s;

	if (!p || !at)
		return 0;
	c.key.id = at->id;
	rule = rule_of(c.key.id);
	if (!rule)
		return 0;
	c.now = p->now;
	c.bytes = p->wire.bytes;
	c.weight = at->weight;
	c.version = version_in(rule, p->phase);
	find_sharer(skb, p->ip, at->member, &c);
	bpf_loop(TRIES, try_slot, &c, 0);
	cold = &rule->cold[c.version.index & 1];
	s = share_of(cold);
	if (!s)
		return 0;
	if (at->lights >> (at->level & 31) & 1)
		spend_credit(s, p->wire.bytes);
	if (c.verdict == VERDICT_PASS)
		move_weight(s, cold, c.before, c.tat, c.weight);
	return 0;
}

#endif
