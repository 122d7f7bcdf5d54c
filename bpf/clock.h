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
	/* From memory, or without CAP_PERFMON the verifier knows it on some paths and refuses it as an index. */
	WRITE_ONCE(b->room, find_handle(hash4(~at.params->salt, 0, 0, b->member, 0)));
	handle = READ_ONCE(b->room);
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

/*
 * The next rule or pool from the top down: advances its fair clock, if that was long ago and no other CPU does it. b has the pool
 * that bounds it, and then itself.
 */
__noinline int keep_clock(struct bound *b, __u32 id)
{
	const struct cold_params *cold;
	struct limit_at at;
	struct share *s;

	if (!b)
		return 0;
	if (b->member == NO_MEMBER)
		b->member = id;
	if (!limit_in(id, b->phase, b->now, &at))
		return 0;
	if (!(at.params->flags & RULE_SHARES)) {
		if (at.params->flags & RULE_GUARANTEE)
			b->pool = 0; /* its packets pass the pools above */
		return 0;
	}
	cold = &at.rule->cold[at.version.index & 1];
	s = share_of(cold);
	if (s && b->now - READ_ONCE(s->last) >= cold->step && !__sync_lock_test_and_set(&s->lock, 1)) {
		b->passed = b->now - s->last;
		if (b->passed > 4ULL * REST_NS)
			b->passed = 4ULL * REST_NS;
		look_above(b);
		if (b->weight && at.params->flags & RULE_GUARANTEE)
			add_guarantee(b, cold->second);
		advance_clock(s, at.rated, cold, at.params, level_of(&at, &at.rule->shared), b);
		__sync_lock_test_and_set(&s->lock, 0);
	}
	b->pool = id + 1;
	b->member = NO_MEMBER;
	return 0;
}

/* The id plus one of the pool directly above a rule or pool, or 0. */
__noinline __u32 pool_above(__u32 id, __u32 phase)
{
	const struct rule *rule = rule_of(id);
	const struct params *params;

	if (!rule)
		return 0;
	params = params_of(rule, version_in(rule, phase).index);
	return params->flags & RULE_WITHIN ? params->within + 1 : 0;
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
	struct bound b = { .now = now, .phase = phase };
	volatile __u32 path[MAX_DEPTH] = {}; /* the ids plus one of those above; volatile, as it takes more stack otherwise */
	__u32 i;

	/* Without CAP_PERFMON, the verifier accepts constant offsets in the stack only. */
#pragma unroll
	for (i = 0; i < MAX_DEPTH; i++) {
		path[i] = pool_above(i ? path[i - 1] - 1 : id, phase);
		if (!path[i])
			break;
	}
#pragma unroll
	for (i = MAX_DEPTH; i > 0; i--) {
		if (path[i - 1])
			keep_clock(&b, path[i - 1] - 1);
	}
	keep_clock(&b, id);
	return 0;
}

#endif
