//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The generic cell rate algorithm, virtual scheduling form (ITU-T I.371, Annex
 * A), for packets of any size on a byte clock: TAT is max(TAT, t) for a packet
 * that finds it, max(TAT, t) + n once it has passed, and a packet conforms if
 * that stays within the capacity from now.
 */
#include "limit.h"

/* A packet bigger than the bucket waits for an empty one, then owes all of itself. */
static __always_inline bool conforms(const struct terms *terms, __u64 level, __u64 cost)
{
	/* Times since now: max(TAT, t) is level, and t is 0. */
	return !level || level + cost <= terms->capacity;
}

static __always_inline __u64 after_excess(const struct terms *terms, __u64 level)
{
	(void)terms;
	return level;
}

SEC("tc")
int shapectl_gcra(struct __sk_buff *skb)
{
	return limit(skb, 0);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
