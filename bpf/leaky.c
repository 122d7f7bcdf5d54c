//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The leaky bucket as a meter (ITU-T I.371, Annex A, continuous-state form): a
 * packet conforms if what it adds fits. It may have a penalty: a packet that
 * does not fit leaves the bucket full, or full and as much above as leaks in
 * the time for which it is to stay full.
 */
#include "limit.h"

/* A packet bigger than the bucket waits for an empty one, then owes all of itself. */
static __always_inline bool conforms(const struct terms *terms, __u64 level, __u64 cost)
{
	return !level || level + cost <= terms->capacity;
}

static __always_inline __u64 after_excess(const struct terms *terms, __u64 level)
{
	return terms->flags & RULE_PENALTY && level < terms->penalty ? terms->penalty : level;
}

SEC("tc")
int shapectl_leaky(struct __sk_buff *skb)
{
	return limit(skb, RULE_LEAKY);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
