/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Limits: which parameters are in force, what a bucket holds by them, and how it is charged. */
#ifndef SHAPECTL_LOOK_H
#define SHAPECTL_LOOK_H

#include "maps.h"
#include "gcra.c"
#include "leaky.c"

/* Further back than any CPU's clock, for a bucket that is empty. */
#define LONG_AGO (1ULL << 59)

/* The number of maps is a constant to the verifier, which removes the lookups in the others. */
#define IS_LAST_RULE_MAP(n) ((n) + 1 == RULE_MAPS || HOOK(rule_maps) == (n) + 1)

#define LOOKUP_IN_RULE_MAP(map, n)                                      \
	if (IS_LAST_RULE_MAP(n) || id < HOOK(first_id[(n) + 1])) {      \
		id -= HOOK(first_id[n]);                                \
		return bpf_map_lookup_elem(&map, &id);                  \
	}

static __always_inline struct rule *rule_of(__u32 id)
{
	if (IS_LAST_RULE_MAP(0) || id < HOOK(first_id[1]))
		return bpf_map_lookup_elem(&rules, &id);
	LOOKUP_IN_RULE_MAP(rules1, 1)
	LOOKUP_IN_RULE_MAP(rules2, 2)
	LOOKUP_IN_RULE_MAP(rules3, 3)
	LOOKUP_IN_RULE_MAP(rules4, 4)
	LOOKUP_IN_RULE_MAP(rules5, 5)
	LOOKUP_IN_RULE_MAP(rules6, 6)
	LOOKUP_IN_RULE_MAP(rules7, 7)
	return NULL;
}

static __always_inline struct counters *counters_on(struct rule *rule, __u32 cpu)
{
	return &rule->counters[MASKED(cpu, cpu_mask)];
}

static __always_inline struct counters *counters_of(struct rule *rule)
{
	return counters_on(rule, bpf_get_smp_processor_id());
}

/* The packet on a CPU. */
static __always_inline struct work *work_of(__u32 cpu)
{
	return KEPT(&works[MASKED(cpu, cpu_mask)]);
}

static __always_inline struct stage *stage_of(struct work *w, __u32 i)
{
	return KEPT(&w->stage[i & (STAGES - 1)]);
}

static __always_inline void count(__u64 *packets, __u64 *bytes, const struct work *w)
{
	*packets += w->packets;
	*bytes += w->bytes;
}

/* Counts packets on the wire beyond the first, so that user space can compute the number of skbs. */
static __always_inline void count_extra(struct rule *rule, const struct work *w)
{
	if (unlikely(w->packets > 1))
		__sync_fetch_and_add(&rule->extra_packets, w->packets - 1);
}

/* A CPU may see PHASE_BY_TIME before the new times. The old ones are NEVER, so it uses PHASE_BEFORE. */
static __always_inline __u32 phase_at(__u64 now)
{
	__u64 phase = READ_ONCE(change.phase);

	if (likely(phase < PHASE_BY_TIME))
		return phase;
	if (now < change.from)
		return PHASE_BEFORE;
	if (now < change.until)
		return PHASE_AFTER;
	return phase == PHASE_BY_TIME ? PHASE_REVERTED : PHASE_BEFORE;
}

/* Which parameters of a limit are in force: enum set, in the lowest bits. */
static __always_inline __u32 set_in(const struct rule *rule, __u32 phase)
{
	return READ_ONCE(rule->sets) >> phase;
}

static __always_inline const struct params *params_of(const struct rule *rule, __u32 set)
{
	return KEPT(&rule->params[set & SET_SECOND]);
}

/* Those of the same set. Both arrays have elements of one cache line. */
static __always_inline const struct cold_params *cold_of(const struct params *params)
{
	_Static_assert(sizeof(struct params) == sizeof(struct cold_params), "one index scales both");
	return (const void *)params + (__builtin_offsetof(struct rule, cold) - __builtin_offsetof(struct rule, params));
}

/*
 * The parameters of the lease in force that have the rate of a pool with RULE_LEASED. A lease is overwritten only after all
 * packets that may see it.
 */
static __always_inline const struct params *lease_of(const struct params *params, __u32 set, __u64 now)
{
	__u32 number = cold_of(params)->lease - 1;
	const struct lease *lease = bpf_map_lookup_elem(&leases, &number);
	__u32 which;

	if (!lease)
		return NULL;
	which = READ_ONCE(lease->version);
	if (set & SET_REVERTED && params->flags & RULE_RELEASED)
		which++;
	which &= 1;
	return &lease->set[which].params[now >= READ_ONCE(lease->until[which])];
}

/* The parameters of a set that have the rate, and all that follows from it. Those of a lease have a set of their own. */
static __always_inline const struct params *rated(const struct rule *rule, __u32 *set, __u64 now)
{
	const struct params *params = params_of(rule, *set), *lease;

	if (!HOOK(pools) || likely(!(params->flags & RULE_LEASED)))
		return params;
	lease = lease_of(params, *set, now);
	if (!lease)
		return params;
	*set = 0;
	return lease;
}

/* The rate in force, in units per ns. */
static __always_inline __u64 rate_of(const struct rule *rule, __u32 set, __u64 now)
{
	return rated(rule, &set, now)->rate_units;
}

/*
 * 1 if a bucket is empty whatever its TAT, because the byte clock may have wrapped since its last charge; else 0. A packet that read
 * its time before the last charge does not find the bucket empty. Levels need no branch: each would double what the verifier follows.
 */
static __always_inline __u64 is_idle(__u32 idle, __u64 now, __u32 charged)
{
	__u32 since = tick(now) + TICKS_AHEAD + TICKS_LATE - charged;

	return ((__u64)idle + TICKS_LATE - since) >> 63;
}

/* The tick of a bucket, after its TAT was read. A tick that another CPU raises meanwhile may be that of a later TAT. */
static __always_inline __u32 read_tick(const struct bucket *b, __u64 *tat)
{
	__u32 charged = READ_ONCE(b->tick);

	if (likely(READ_ONCE(b->tat) == *tat))
		return charged;
	*tat = READ_ONCE(b->tat);
	return READ_ONCE(b->tick);
}

static __always_inline const struct clock *clock_of(const struct rule *rule, const struct params *params, __u32 set)
{
	return unlikely(set & SET_REVERTED) ? &rule->reverted : &params->clock;
}

static __always_inline __u64 clock_at(const struct clock *c, const struct params *params, __u64 now)
{
	return byte_clock(params->rate_units, READ_ONCE(c->base), now);
}

/* Whether the clock of a limit began with an edit. */
static __always_inline bool is_edited(const struct params *params, __u32 set)
{
	return (params->flags & RULE_EDITED) | (set & SET_REVERTED);
}

/* The level in units that a bucket with this TAT and tick has at v, which the clock reads. */
static __always_inline __u64 plain_level(__u32 idle, __u64 v, __u64 now, __u64 tat, __u32 charged)
{
	__u64 level = tat - v;

	return level & ((level >> 63 | is_idle(idle, now, charged)) - 1);
}

/* The same by a clock that began with an edit. */
static __always_inline __u64 edited_level(const struct clock *c, __u32 idle, __u64 v, __u64 now, __u64 tat, __u32 charged)
{
	__u64 late = (c->until - tick(now)) >> 31, stale = (charged - c->fresh) >> 31, level = tat - v, more = c->floor - v;

	level &= (level >> 63 | stale | (late & is_idle(idle, now, charged))) - 1;
	more &= (more >> 63 | late) - 1;
	more -= level;
	return level + (more & ((more >> 63) - 1));
}

/* By the clock of either kind. */
static __always_inline __u64 level_of(const struct clock *c, const struct params *params, __u32 set, __u64 v, __u64 now, __u64 tat,
				      __u32 charged)
{
	if (is_edited(params, set))
		return edited_level(c, params->idle, v, now, tat, charged);
	return plain_level(params->idle, v, now, tat, charged);
}

/* The level of a bucket that was never charged: after an edit, it has no more room than it had. */
static __always_inline __u64 least_level(const struct rule *rule, const struct params *params, __u32 set, __u64 now)
{
	const struct clock *c = clock_of(rule, params, set);
	__u64 v = clock_at(c, params, now);

	return level_of(c, params, set, v, now, v, tick(now));
}

/*
 * The tick with which the present period of a calendar began, which has a number from 1 on. Ticks are by another clock, which does
 * not step. So the time at which this tick began is what counts, and a period begins with the first tick from its time on.
 */
static __always_inline __u32 period_began(__u32 calendar, __u64 now)
{
	const struct calendar *c = KEPT(&calendars[(calendar - 1) & (CALENDARS - 1)]);
	__u64 edge = now & ~((1ULL << TICK_BITS) - 1), wall = HOOK(virtual_clock) ? edge : bpf_ktime_get_tai_ns() - (now - edge);
	__u32 at = 0, next, step;

	for (step = PERIODS / 2; step; step /= 2) { /* without branches, which the verifier would follow */
		next = at + step;
		asm("%0 &= %1" : "+w"(next) : "i"(PERIODS - 1)); /* Linux 6.1 loses the bounds of an OR, which the compiler knows */
		at += ((wall - c->begins[next]) >> 63 ^ 1) * step;
	}
	asm("%0 &= %1" : "+w"(at) : "i"(PERIODS - 1));
	if (c->begins[at] > wall)
		return tick(now) - (1U << 30); /* none that is known */
	return tick(edge - (wall - c->begins[at]) + (1ULL << TICK_BITS) - 1);
}

/* Whether a bucket was last charged before the period of its limit, whose calendar has a number from 1 on. */
static __always_inline bool is_over(__u32 calendar, __u64 now, __u32 charged)
{
	return calendar && (__s32)(charged - period_began(calendar, now)) < 0;
}

/*
 * Looks at a bucket of the limit that a stage has, by the parameters that rated returns. Most buckets are empty, and most floors are
 * below the clock.
 */
static __always_inline void look_at(struct stage *s, const struct rule *rule, const struct params *params, __u32 set,
				    const struct bucket *b, __u64 now)
{
	__u64 v, tat, level = 0;
	const struct clock *c;
	__u32 charged;

	if (unlikely(is_edited(params, set))) {
		c = clock_of(rule, params, set);
		v = clock_at(c, params, now);
		tat = READ_ONCE(b->tat);
		if ((__s64)((v - tat) | (v - c->floor)) < 0) { /* one of them is later */
			charged = read_tick(b, &tat);
			level = edited_level(c, params->idle, v, now, tat, charged);
		}
	} else {
		v = clock_at(&params->clock, params, now);
		tat = READ_ONCE(b->tat);
		if ((__s64)(tat - v) > 0) {
			charged = read_tick(b, &tat);
			level = plain_level(params->idle, v, now, tat, charged);
		}
	}
	s->tat = tat;
	s->level = level;
	s->start = v + level;
	s->limit = params->limit;
}

/* Puts a limit on a stage. Returns the parameters that are in force. */
static __always_inline const struct params *place(const struct work *w, struct stage *s, __u32 id, const struct rule *rule)
{
	__u32 set = set_in(rule, w->phase);
	const struct params *params = params_of(rule, set);

	s->id = id;
	s->set = set;
	s->flags = params->flags;
	return params;
}

/*
 * Puts a limit on a stage, and looks at its shared bucket. Returns false if it is gone. Not static, so that the verifier checks it
 * once and not on each path to it.
 */
__noinline int look(__u32 cpu, __u32 i, __u32 id)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, i);
	const struct rule *rule = rule_of(id);
	__u32 set;

	if (!rule)
		return false;
	place(w, s, id, rule);
	set = s->set;
	look_at(s, rule, rated(rule, &set, w->now), set, &rule->shared, w->now);
	return true;
}

/*
 * Whether b may be charged, given its TAT that was read before: no CPU is
 * allocating or moving it, and it still has the fingerprint. A shared bucket has
 * none (0). This must precede the CAS: afterwards the bucket may have moved
 * together with the charge.
 */
static __always_inline bool is_still(const struct bucket *b, __u32 fingerprint, __u64 tat)
{
	return !(tat & TAT_BUSY) && (!fingerprint || READ_ONCE(b->fingerprint) == fingerprint);
}

/*
 * Raises the tick of a bucket, before its TAT is set from old to tat. A packet that read its time before another one does not
 * lower it. By the new tick, an old TAT that has wrapped would be in the future, so it first becomes empty. Returns false if
 * another CPU changed the bucket meanwhile.
 */
static __always_inline bool raise_tick(struct bucket *b, __u64 *old, __u64 tat, __u64 empty, __u32 to)
{
	__u32 charged = READ_ONCE(b->tick);

	if (likely(charged - to <= TICKS_LATE))
		return true;
	if ((__s64)(*old - tat) > 0) {
		if (__sync_val_compare_and_swap(&b->tat, *old, empty) != *old)
			return false;
		*old = empty;
	}
	return __sync_val_compare_and_swap(&b->tick, charged, to) == charged;
}

/* Sets the TAT of a bucket. Returns false if another CPU has changed the bucket meanwhile. */
static __always_inline bool set_tat(struct bucket *b, __u64 old, __u64 tat, __u64 now)
{
	/* Before the CAS: no other CPU must see the new TAT with an older tick. */
	if (unlikely(!raise_tick(b, &old, tat, tat - LONG_AGO, tick(now))))
		return false;
	/* KEPT keeps the compiler from computing the comparison as a value. */
	return KEPT(__sync_val_compare_and_swap(&b->tat, old, tat)) == old;
}

/* Raises the tick of the shared bucket of a stage, which is charged next: few packets are the first ones in a tick. */
__noinline int raise_shared(__u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	struct stage *s = stage_of(w, i);
	struct rule *rule = rule_of(s->id);
	__u64 tat = s->tat;

	if (rule && raise_tick(&rule->shared, &tat, s->start, s->start, tick(w->now)))
		s->tat = tat;
	return 0;
}

static __always_inline void prepare(const struct bucket *b, __u32 cpu, __u32 i, __u64 now)
{
	if (unlikely(READ_ONCE(b->tick) - tick(now) > TICKS_LATE))
		raise_shared(cpu, i);
}

/*
 * Charges a packet to a shared bucket that was looked at, and whose tick was raised. No loop: if another CPU was faster, the
 * packet takes the next place, and level says what is before that. Returns false if it needs keeps, unless it passes in any case.
 * Meanwhile others see a level that is too high by the packet. So near the limit a packet may be refused that a lock would admit,
 * and never the other way round.
 */
static __always_inline bool take(struct bucket *b, struct stage *s, __u64 cost)
{
	__u64 old, v, from;

	if (s->start != s->tat && likely(KEPT(__sync_val_compare_and_swap(&b->tat, s->tat, s->start + cost)) == s->tat))
		return true;
	old = KEPT(__sync_fetch_and_add(&b->tat, cost));
	if (likely(old == s->start))
		return true;
	v = s->start - s->level;
	from = s->start == s->tat ? v : s->start;
	if ((__s64)(old - from) < 0) { /* charged at an earlier time: from then until now, nothing may be used twice */
		__sync_fetch_and_add(&b->tat, from - old);
		s->level = from - v;
		return true;
	}
	s->level = old - v;
	s->start = s->tat = old;
	return false;
}

/* Charges the shared bucket of a stage, whatever its level is by now. */
static __always_inline void charge_to(struct bucket *b, struct stage *s, __u32 cpu, __u32 i, __u64 now, __u64 cost)
{
	prepare(b, cpu, i, now);
	take(b, s, cost);
}

/* Whether a packet keeps the place that take gave it. Else it is given back. */
static __always_inline bool keeps(struct bucket *b, const struct stage *s, __u64 cost, __u64 least)
{
	if (s->level + least <= s->limit)
		return true;
	__sync_fetch_and_sub(&b->tat, cost);
	return false;
}

#endif
