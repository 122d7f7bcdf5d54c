/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The sharers of a packet: a host, subnet or flow has a slot of the table, and a member of a pool a word of its own. And when
 * fair clocks are advanced: the pool above may leave less than the rate of a pool. So its members would compete there, first
 * come, first served. Therefore the clock of a pool is not faster than the one above lets it be, and slower the less room is
 * left to the pool there.
 */
#ifndef SHAPECTL_FAIR_H
#define SHAPECTL_FAIR_H

#include "queue.h"

/* What draws from the pool of a stage. */
static __always_inline struct rule *member_of(struct work *w, __u32 i)
{
	return rule_of(stage_of(w, i - 1)->id);
}

/* The fair word of a member, if it is one of the pool that has the salt. */
static __always_inline struct bucket *word_of(struct rule *member, __u32 salt)
{
	return member && READ_ONCE(member->fair.fingerprint) == salt ? &member->fair : NULL;
}

/* The weight of the sharer that is a member, or is within one: what draws from the pool of a stage. */
static __always_inline __u32 weight_of(struct work *w, __u32 i, const struct rule *member)
{
	return member ? cold_of(params_of(member, stage_of(w, i - 1)->set))->weight_less_1 + 1 : 1;
}

/* The fair shares of the limit at a stage. */
static __always_inline struct share *share_at(const struct stage *st, const struct rule *rule)
{
	return rule ? share_of(cold_of(params_of(rule, st->set))->share) : NULL;
}

/* Finds what the pool of a stage leaves to its member, in ns that have passed. */
__noinline int look_above(__u32 cpu, __u32 i, __u64 passed)
{
	struct work *w = work_of(cpu);
	const struct stage *above = stage_of(w, i);
	const struct rule *rule = rule_of(above->id);
	struct bound *b = &w->bound;
	const struct params *params;
	const struct bucket *word;
	__u64 may, ahead = 0;
	struct share *s = share_at(above, rule);

	if (!s)
		return 0;
	params = params_of(rule, above->set);
	b->weight = above->weight;
	b->v = READ_ONCE(s->v);
	/* If nobody is active there, the clock stands still. */
	b->units = (__s32)READ_ONCE(s->weight) > 0 ? 0 : fair_units(rate_of(rule, above->set, w->now), passed);
	may = may_be_ahead(s, above->weight);
	if (may < (__u64)SHARED_BYTES * OWN_PACKETS << FAIR_BITS)
		may = (__u64)SHARED_BYTES * OWN_PACKETS << FAIR_BITS;
	b->may = may;
	b->credit = lesser(most_credit(above->limit), may / 2);
	word = word_of(member_of(w, i), params->salt);
	if (word)
		ahead = ahead_of(s, READ_ONCE(word->tat)) * above->weight;
	b->room = free_part(s, params, above, 0);
	may = (may >> FREE_BITS) * b->room;
	b->room = ahead < may ? lesser(b->room, ((may - ahead) << FREE_BITS) / may) : 0;
	return 0;
}

/* Adds to that what is guaranteed to the member beside it. */
__noinline int add_guarantee(__u32 cpu, __u32 id, __u64 passed)
{
	struct work *w = work_of(cpu);
	const struct stage *g = stage_of(w, STAGE_SECOND);
	const struct rule *rule = rule_of(id);
	struct bound *b = &w->bound;
	__u64 room;

	if (!rule || !look(cpu, STAGE_SECOND, id))
		return 0;
	b->units += fair_units(params_of(rule, g->set)->rate_units, passed);
	b->may += g->limit >> (UNIT_BITS - FAIR_BITS);
	if (g->level >= g->limit)
		return 0;
	room = (g->limit - g->level) / (g->limit >> FREE_BITS);
	if (b->room < room)
		b->room = room;
	return 0;
}

/*
 * Advances the fair clock of a stage, if that was long ago and no other CPU does it. The pool of stage above, if not 0, bounds it.
 * Returns the stage that bounds the one below, or 0.
 */
__noinline int keep_clock(__u32 cpu, __u32 i, __u32 above)
{
	struct work *w = work_of(cpu);
	struct stage *st = stage_of(w, i);
	const struct rule *rule = rule_of(st->id);
	const struct cold_params *cold;
	const struct params *params;
	struct share *s;
	__u64 passed;

	if (!(st->flags & RULE_SHARES))
		return st->flags & RULE_GUARANTEE ? 0 : above; /* its packets pass the pools above */
	if (!rule)
		return 0;
	st->weight = weight_of(w, i, i ? member_of(w, i) : NULL);
	params = params_of(rule, st->set);
	cold = cold_of(params);
	s = share_of(cold->share);
	if (!s)
		return 0;
	passed = lesser(w->now - READ_ONCE(s->last), 4ULL * REST_NS);
	w->bound.weight = 0;
	if (above)
		look_above(cpu, above, passed);
	if (w->bound.weight && params->flags & RULE_GUARANTEE)
		add_guarantee(cpu, cold->second, passed);
	if (is_late(s, cold, w->now) && !__sync_lock_test_and_set(&s->lock, 1)) {
		advance_clock(s, st, params, cold, rate_of(rule, st->set, w->now), w->now, &w->bound);
		__sync_lock_test_and_set(&s->lock, 0);
	}
	return st->flags & RULE_SHARE_MEMBER ? i : 0;
}

/* Advances the late fair clocks of a rule and of all pools above it, from the top down. */
__noinline int keep_clocks(__u32 cpu)
{
	struct work *w = work_of(cpu);
	__u32 n, above = 0;

	for (n = 0; n <= MAX_DEPTH; n++) {
		if (n > w->top)
			break;
		above = keep_clock(cpu, w->top - n, above);
	}
	return 0;
}

/* Forgives most of the debt of a sharer. It is from a time with fewer sharers, so the sharer would be locked out until it has
 * drained at its part of now. */
static __always_inline void forgive_debt(const struct stage *st, struct share *s, struct bucket *b)
{
	__u64 tat, less;

	if (!b)
		return;
	tat = READ_ONCE(b->tat);
	less = on_wheel(s, most_debt(may_be_ahead(s, st->weight), READ_ONCE(b->tick)) / st->weight);
	if (is_still(b, st->slot, tat) && __sync_val_compare_and_swap(&b->tat, tat, less) == tat)
		move_weight(s, tat, less, st->weight);
}

/* Seeks the slot of a sharer that is no member. Flows of sparse-first have the same keys, so the salt is another one. */
static __always_inline __u64 seek_sharer(struct __sk_buff *skb, __u32 cpu, const struct params *params)
{
	__u32 scope = params->flags >> SHARE_FLAGS;

	if (HOOK(nat))
		scope |= params->flags & RULE_NAT;
	return seek(skb, cpu, ~params->salt, scope, cold_of(params)->each_bits);
}

/* The word of the sharer of a stage; NULL for a new one. */
static __always_inline struct bucket *sharer_of(const struct stage *st, struct rule *member)
{
	return st->flags & RULE_SHARE_MEMBER ? word_of(member, st->slot) : st->slot ? bucket_of(st->slot) : NULL;
}

/* Judges a packet in the bucket of a stage by its sharer. Keeps in the stage what its charge needs. */
static __always_inline int judge_stage(struct __sk_buff *skb, __u32 cpu, struct work *w, __u32 i, struct stage *st,
				       const struct params *params)
{
	struct rule *member = i ? member_of(w, i) : NULL;
	const struct cold_params *cold = cold_of(params);
	struct share *s = share_of(st->share);
	enum share_verdict verdict;

	if (!s)
		return WITHIN_SHARE;
	if (!(w->again & KEPT_CB) && is_late(s, cold, w->now))
		return SHARE_LATE;
	st->weight = weight_of(w, i, member);
	st->slot = st->flags & RULE_SHARE_MEMBER ? params->salt : seek_sharer(skb, cpu, params);
	verdict = judge(w, st, s, params, sharer_of(st, member));
	st->load = w->load;
	if (verdict == BEYOND_DEBT)
		forgive_debt(st, s, sharer_of(st, member));
	if (verdict != BEYOND_MARK || !(st->flags & RULE_ECN || (st->flags & RULE_DELAY && cold->long_ns != NEVER_NS)) ||
	    !ecn_of(skb, w->ip))
		return verdict;
	w->marks |= 1U << (i & 31);
	return WITHIN_SHARE;
}

/* Gives a member a word on the clock of this pool. What it had was on that of another one. */
static __always_inline void begin_word(const struct share *s, struct bucket *b, __u32 salt)
{
	WRITE_ONCE(b->tat, new_tat(s));
	WRITE_ONCE(b->tick, 0);
	__sync_lock_test_and_set(&b->fingerprint, salt);
}

/* Gets a slot for a new sharer. Returns whether it has one now. */
static __always_inline bool get_sharer(struct __sk_buff *skb, __u32 cpu, struct work *w, struct stage *st)
{
	const struct rule *rule = rule_of(st->id);

	if (!rule)
		return false;
	st->slot = seek_sharer(skb, cpu, params_of(rule, st->set));
	if (st->slot)
		return true;
	w->key.id = st->id;
	w->key.sharer = 1;
	get_slot(cpu);
	st->slot = find_handle(w->hash);
	return st->slot;
}

/* Charges the sharer of a stage. One that gets no slot has no share of its own. */
__noinline int charge_share(struct __sk_buff *skb, __u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	struct stage *st = stage_of(w, i);
	struct share *s = share_of(st->share);
	struct rule *member;
	struct bucket *b;

	if (!s)
		return 0;
	if ((__s32)i > w->guaranteed) { /* not judged */
		__sync_fetch_and_add(&s->skip, (__u64)w->bytes << FAIR_BITS);
		return 0;
	}
	if (st->load == LIGHT)
		__sync_fetch_and_sub(&s->credit, (__u64)w->bytes << FAIR_BITS);
	if (st->flags & RULE_SHARE_MEMBER) {
		member = member_of(w, i);
		if (!member)
			return 0;
		b = &member->fair;
		if (READ_ONCE(b->fingerprint) != (__u32)st->slot)
			begin_word(s, b, st->slot);
	} else {
		if (!st->slot && !get_sharer(skb, cpu, w, st))
			return 0;
		b = bucket_of(st->slot);
	}
	/* If other CPUs are faster twice, the sharer is not charged. */
	if (!charge_word(w, st, s, b))
		charge_word(w, st, s, b);
	return 0;
}

#endif
