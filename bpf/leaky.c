//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The leaky bucket as a meter (ITU-T I.371, Annex A, continuous-state form): a
 * packet conforms if what it adds fits. It may have a penalty: a packet that
 * does not fit leaves the bucket full, or full and as much above as leaks in
 * the time for which it is to stay full.
 */
#include "limit.h"

static __always_inline struct metered meter(const struct rule *rule, __u64 level, __u64 cost)
{
	/* A packet bigger than the bucket waits for an empty one, then owes all of itself. */
	if (!level || level + cost <= rule->capacity)
		return (struct metered){ .level = level + cost, .conforms = true };
	if (rule->flags & RULE_PENALTY && level < rule->penalty)
		level = rule->penalty;
	return (struct metered){ .level = level };
}

SEC("tc")
int shapectl_leaky(struct __sk_buff *skb)
{
	return limit(skb, ALGORITHM_LEAKY);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
