/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * When the fair clocks of a rule and its pools are advanced: one of them if it is due, and those above before it. The pool
 * above may leave less than the rate of a pool. So its members would compete there, first come, first served. Therefore the
 * clock of a pool is not faster than the one above lets it be, and slower the less room is left to the pool there.
 */
#ifndef SHAPECTL_CLOCK_H
#define SHAPECTL_CLOCK_H

#include "pool.h"

/* Finds what the pool above leaves to a member. */
__noinline int look_above(struct bound *b)
{
	const struct cold_params *cold;
	__u64 handle, may, ahead = 0;
	struct limit_at at;
	struct share *s;
	__u32 weight;

	if (!b)
		return 0;
	b->weight = 0;
	if (!b->pool || !limit_in(b->member, b->phase, b->now, &at))
		return 0;
	weight = at.rule->cold[at.version.index & 1].weight;
	if (!limit_in(b->pool - 1, b->phase, b->now, &at) || !(at.params->flags & RULE_SHARE_MEMBER))
		return 0;
	cold = &at.rule->cold[at.version.index & 1];
	s = share_of(cold);
	if (!s)
		return 0;
	b->weight = weight;
	b->v = READ_ONCE(s->v);
	/* If nobody is active there, the clock stands still. */
	b->units = (__s32)READ_ONCE(s->weight) > 0 ? 0 : fair_units(at.rated, b->passed);
	may = may_be_ahead(s, weight);
	if (may < (__u64)SHARED_BYTES * OWN_PACKETS << FAIR_BITS)
		may = (__u64)SHARED_BYTES * OWN_PACKETS << FAIR_BITS;
	b->may = may;
	b->credit = most_credit(at.rated);
	if (b->credit > may / 2)
		b->credit = may / 2;
	handle = find_handle(hash4(~at.params->salt, 0, 0, b->member, 0));
	if (handle)
		ahead = ahead_of(s, cold, READ_ONCE(bucket_of(handle)->tat)) * weight;
	b->room = free_part(at.params, cold, whole_level(at.params, at.rated->limit, level_of(&at, &at.rule->shared)));
	may = (may >> FREE_BITS) * b->room;
	ahead = ahead < may ? ((may - ahead) << FREE_BITS) / may : 0;
	if (b->room > ahead)
		b->room = ahead;
	return 0;
}

/* Adds to a bound what is guaranteed to the member beside it. */
__noinline int add_guarantee(struct bound *b, __u32 id)
{
	struct limit_at at;
	__u64 level, room;

	if (!b || !limit_in(id, b->phase, b->now, &at))
		return 0;
	b->units += fair_units(at.params, b->passed);
	b->may += at.params->limit >> (UNIT_BITS - FAIR_BITS);
	level = level_of(&at, &at.rule->shared);
	if (level >= at.params->limit)
		return 0;
	room = (at.params->limit - level) / (at.params->limit >> FREE_BITS);
	if (b->room < room)
		b->room = room;
	return 0;
}

/* Advances the fair clock of a rule or pool, if that was long ago and no other CPU does it. */
__noinline int keep_clock(struct bound *b)
{
	const struct cold_params *cold;
	struct limit_at at;
	struct share *s;

	if (!b || !limit_in(b->id, b->phase, b->now, &at))
		return 0;
	cold = &at.rule->cold[at.version.index & 1];
	s = share_of(cold);
	if (!s || b->now - READ_ONCE(s->last) < cold->step || __sync_lock_test_and_set(&s->lock, 1))
		return 0;
	b->passed = b->now - s->last;
	if (b->passed > 4ULL * REST_NS)
		b->passed = 4ULL * REST_NS;
	look_above(b);
	if (b->weight && at.params->flags & RULE_GUARANTEE)
		add_guarantee(b, cold->second);
	advance_clock(s, at.rated, cold, at.params, level_of(&at, &at.rule->shared), b);
	__sync_lock_test_and_set(&s->lock, 0);
	return 0;
}

/* The clocks of a rule or pool and of those above. */
struct clocks {
	struct bound b;
	__u32 first;  /* where it begins */
	__u32 at;     /* where it is */
	__u32 height; /* the number of pools above the first */
	__u32 below;  /* the next one below is directly within the pool that bounds it */
};

static __always_inline const struct params *params_at(__u32 id, __u32 phase)
{
	const struct rule *rule = rule_of(id);

	return rule ? params_of(rule, version_in(rule, phase).index) : NULL;
}

static long walk_up(__u64 i, struct clocks *w)
{
	const struct params *params = params_at(w->at, w->b.phase);

	(void)i;
	if (!params || !(params->flags & RULE_WITHIN))
		return 1;
	w->at = params->within;
	return 0;
}

static long count_up(__u64 i, struct clocks *w)
{
	if (walk_up(i, w))
		return 1;
	w->height = i + 1;
	return 0;
}

/* Keeps the clock of the next one from the top down. */
static long keep_next(__u64 i, struct clocks *w)
{
	const struct params *params;

	if (i > w->height)
		return 1;
	w->at = w->first;
	bpf_loop(w->height - i, walk_up, w, 0);
	params = params_at(w->at, w->b.phase);
	if (!params)
		return 1;
	if (w->below)
		w->b.member = w->at;
	w->below = false;
	if (params->flags & RULE_SHARES) {
		w->b.id = w->at;
		keep_clock(&w->b);
		w->b.pool = w->at + 1;
		w->below = true;
	} else if (params->flags & RULE_GUARANTEE) {
		w->b.pool = 0; /* its packets pass the pools above */
	}
	return 0;
}

/* Whether the fair clock of a rule or pool must be advanced. */
__noinline int is_late(__u32 id, __u32 phase, __u64 now)
{
	const struct rule *rule = rule_of(id);
	const struct cold_params *cold;
	const struct share *s;

	if (!rule)
		return false;
	cold = &rule->cold[version_in(rule, phase).index & 1];
	s = share_of(cold);
	return s && now - READ_ONCE(s->last) >= cold->step;
}

/*
 * Advances the fair clocks of a rule and of all pools above it that are late, from the top down. Packets that are refused do
 * not get to the pools above.
 */
__noinline int keep_times(__u32 id, __u32 phase, __u64 now)
{
	struct clocks c = { .b.now = now, .b.phase = phase, .first = id, .at = id };

	bpf_loop(MAX_DEPTH, count_up, &c, 0);
	bpf_loop(MAX_DEPTH + 1, keep_next, &c, 0);
	return 0;
}

#endif
