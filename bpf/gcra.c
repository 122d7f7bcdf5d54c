//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The generic cell rate algorithm, virtual scheduling form (ITU-T I.371, Annex
 * A), for packets of any size on a byte clock: TAT is max(TAT, t) for a packet
 * that finds it, max(TAT, t) + n once it has passed, and a packet conforms if
 * that stays within the capacity from now.
 */
#include "limit.h"

static __always_inline struct metered meter(const struct rule *rule, __u64 level, __u64 cost)
{
	/* Times since now: max(TAT, t) is level, and t is 0. */
	__u64 tat = level + cost;

	/* A packet bigger than the bucket waits for an empty one, then owes all of itself. */
	if (tat <= rule->capacity || !level)
		return (struct metered){ .level = tat, .conforms = true };
	return (struct metered){ .level = level };
}

SEC("tc")
int shapectl_gcra(struct __sk_buff *skb)
{
	return limit(skb, ALGORITHM_GCRA);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
