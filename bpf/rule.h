/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Rules: from an id to its rule, and which of a rule's two versions is in force. */
#ifndef SHAPECTL_RULE_H
#define SHAPECTL_RULE_H

#include <stdbool.h>
#include "abi.h"
#include "maps.h"

#define READ_ONCE(x) (*(volatile typeof(x) *)&(x))
#define WRITE_ONCE(x, v) (*(volatile typeof(x) *)&(x) = (v))

/* How many maps there are is a constant to the verifier, which leaves out the rest. */
static __always_inline struct rule *rule_of(__u32 id)
{
	if (hook.rule_maps == 1 || id < hook.first_id[1])
		return bpf_map_lookup_elem(&rules, &id);
	if (hook.rule_maps == 2 || id < hook.first_id[2]) {
		id -= hook.first_id[1];
		return bpf_map_lookup_elem(&rules1, &id);
	}
	if (hook.rule_maps == 3 || id < hook.first_id[3]) {
		id -= hook.first_id[2];
		return bpf_map_lookup_elem(&rules2, &id);
	}
	id -= hook.first_id[3];
	return bpf_map_lookup_elem(&rules3, &id);
}

/* What is in force of all that takes part in a change. */
enum side {
	SIDE_BEFORE = 0,
	SIDE_AFTER = 1,
	SIDE_BACK = 2, /* as before, as nobody has confirmed the change in time */
};

static __always_inline __u32 side_at(__u64 now)
{
	__u64 view = READ_ONCE(change.view);

	if (view != VIEW_TIMED)
		return view;
	if (now < change.from)
		return SIDE_BEFORE;
	return now < change.until ? SIDE_AFTER : SIDE_BACK;
}

/*
 * The version of a rule that packets go by on a side of the change, and
 * VERSION_REBASED if its byte clock does. Read once for a packet, which then
 * goes by it to its end.
 */
static __always_inline __u32 version_of(const struct rule *rule, __u32 side)
{
	__u32 version = READ_ONCE(rule->version);

	if (!(version & VERSION_CHANGES))
		return version & 1;
	return ((version ^ side) & 1) | (side & VERSION_REBASED);
}

/* The compiler is kept from working the address out anew each time. */
static __always_inline const struct terms *terms_of(const struct rule *rule, __u32 version)
{
	const struct terms *terms = &rule->terms[version & 1];

	asm volatile("" : "+r"(terms));
	return terms;
}

static __always_inline struct counters *counters_of(struct rule *rule)
{
	return &rule->counters[bpf_get_smp_processor_id() & hook.cpu_mask];
}

/* base + slope * now modulo 2^64, the 32 fraction bits of the slope cut off after the product, not before. */
static __always_inline __u64 byte_clock(const struct terms *terms, __u64 base, __u64 now)
{
	__u64 slope = terms->slope, low = (__u32)now;
	__u64 v = (now >> 32) * slope + low * (slope >> 32) + (low * (__u32)slope >> 32);

	return (base + v) & ~TAT_TAKEN;
}

/* The byte clock of a version. */
static __always_inline __u64 clock_of(const struct terms *terms, __u32 version, __u64 now)
{
	/* Both are read, as without CAP_PERFMON no pointer may depend on which it is. */
	__u64 base = READ_ONCE(terms->base), rebase = READ_ONCE(terms->rebase);

	return byte_clock(terms, version & VERSION_REBASED ? rebase : base, now);
}

#endif
