/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Rules: lookup by id, and selection of the parameters that are in force. */
#ifndef SHAPECTL_RULE_H
#define SHAPECTL_RULE_H

#include "maps.h"
#include "meter.h"

/* The number of maps is a constant to the verifier, which removes the lookups in the others. */
#define IS_LAST_RULE_MAP(n) ((n) + 1 == RULE_MAPS || HOOK(rule_maps) == (n) + 1)

#define LOOKUP_IN_RULE_MAP(map, n)                                      \
	if (IS_LAST_RULE_MAP(n) || id < HOOK(first_id[(n) + 1])) {      \
		id -= HOOK(first_id[n]);                                \
		return bpf_map_lookup_elem(&map, &id);                  \
	}

static __always_inline struct rule *rule_at(const __u32 *at)
{
	__u32 id;

	if (IS_LAST_RULE_MAP(0) || *at < HOOK(first_id[1]))
		return bpf_map_lookup_elem(&rules, at);
	id = *at;
	LOOKUP_IN_RULE_MAP(rules1, 1)
	LOOKUP_IN_RULE_MAP(rules2, 2)
	LOOKUP_IN_RULE_MAP(rules3, 3)
	LOOKUP_IN_RULE_MAP(rules4, 4)
	LOOKUP_IN_RULE_MAP(rules5, 5)
	LOOKUP_IN_RULE_MAP(rules6, 6)
	LOOKUP_IN_RULE_MAP(rules7, 7)
	return NULL;
}

static __always_inline struct rule *rule_of(__u32 id)
{
	return rule_at(&id);
}

/* A CPU that reorders loads may read the times from before PHASE_BY_TIME, which are never. */
static __always_inline __u32 phase_at(__u64 now)
{
	__u64 phase = READ_ONCE(change.phase);

	if (phase != PHASE_BY_TIME)
		return phase;
	if (now < change.from)
		return PHASE_BEFORE;
	return now < change.until ? PHASE_AFTER : PHASE_REVERTED;
}

/* The parameters of a rule that one packet uses throughout. */
struct version {
	__u32 seen; /* rule.version when the packet came */
	__u16 index;
	__u16 reverted; /* the byte clock starts from rebase */
};

static __always_inline struct version version_in(const struct rule *rule, __u32 phase)
{
	struct version v = { .seen = READ_ONCE(rule->version) };

	v.index = v.seen & 1;
	if (v.seen & VERSION_CHANGES) {
		v.index = (v.seen ^ phase) & 1;
		v.reverted = phase == PHASE_REVERTED;
	}
	return v;
}

/*
 * Whether the parameters that were read after version are consistent. A CPU that
 * reorders loads needs a full barrier first.
 */
static __always_inline bool is_current(const struct rule *rule, __u32 seen)
{
	if (HOOK(reorders)) {
		__u32 barrier = 0;

		__sync_lock_test_and_set(&barrier, 1);
	}
	return READ_ONCE(rule->version) == seen;
}

static __always_inline const struct params *params_of(const struct rule *rule, __u32 index)
{
	return KEPT(&rule->params[index & 1]);
}

/* Those of the same version. Both arrays have elements of one cache line. */
static __always_inline const struct cold_params *cold_of(const struct params *params)
{
	_Static_assert(sizeof(struct params) == sizeof(struct cold_params), "one index scales both");
	return (const void *)params + (__builtin_offsetof(struct rule, cold) - __builtin_offsetof(struct rule, params));
}

static __always_inline struct counters *counters_of(struct rule *rule)
{
	return &rule->counters[MASKED(bpf_get_smp_processor_id(), cpu_mask)];
}

/*
 * The parameters of the lease in force that have the rate of a pool with RULE_LEASED. A lease is overwritten only after all
 * packets that may see it.
 */
static __always_inline const struct params *find_lease(const struct params *params, __u64 now)
{
	__u32 number = cold_of(params)->lease - 1;
	const struct lease *lease = bpf_map_lookup_elem(&leases, &number);
	__u64 set, until, before, at; /* and the mask below: Linux 6.1 loses ranges otherwise */

	if (!lease)
		return NULL;
	set = READ_ONCE(lease->version) & 1;
	until = READ_ONCE(lease->until[set]);
	/* now < until, without a branch: without CAP_PERFMON the verifier accepts one range of an offset only. */
	before = KEPT((~now & until) | (~(now ^ until) & (now - until))) >> 63;
	at = set * sizeof(lease->set[0]) + (before ^ 1) * sizeof(struct params);
	return (const void *)&lease->set[0].params[0] + (KEPT(at) & (sizeof(lease->set[0]) | sizeof(struct params)));
}

/* The same, for functions that have little room on the stack or in registers. */
static __noinline const struct params *lease_of(const struct params *params, __u64 now)
{
	return find_lease(params, now);
}

/* The parameters that have the rate of a rule or pool, and all that follows from it. */
static __always_inline const struct params *rated(const struct params *params, __u64 now)
{
	const struct params *lease;

	if (!(params->flags & RULE_LEASED))
		return params;
	lease = lease_of(params, now);
	return lease ? lease : params;
}

/* The byte clock of a rule. */
static __always_inline __u64 clock_of(const struct rule *rule, __u32 index, bool reverted, __u64 now)
{
	const struct params *params = params_of(rule, index);
	/* Reads both: without CAP_PERFMON the verifier refuses a pointer that depends on a condition. */
	__u64 base = READ_ONCE(params->base), rebase = READ_ONCE(rule->cold[index & 1].rebase);

	return byte_clock(params, reverted ? rebase : base, now);
}

/* Whether packets a little beyond a fair share are marked, if they allow it. */
static __always_inline bool marks_excess(const struct params *params, const struct cold_params *cold)
{
	return params->flags & RULE_ECN || (params->flags & RULE_DELAY && cold->ecn_above_ns != NEVER_NS);
}

/* The byte clock of a rule or pool, and the parameters that it follows: those of a lease, if there is one. */
static __always_inline __u64 rated_clock(const struct rule *rule, const struct version *version, __u64 now,
					 const struct params **by)
{
	const struct params *lease;

	*by = params_of(rule, version->index);
	if (HOOK(pools) && (*by)->flags & RULE_LEASED) {
		lease = find_lease(*by, now);
		if (lease) {
			*by = lease;
			return byte_clock(lease, lease->base, now);
		}
	}
	return clock_of(rule, version->index, version->reverted, now);
}

#endif
