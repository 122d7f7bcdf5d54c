//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The generic cell rate algorithm in its virtual scheduling form (ITU-T I.371,
 * Annex A), for packets of any size on a byte clock.
 *
 *	I.371				here
 *	t_a	arrival time		v, the byte clock when the packet arrives
 *	TAT	theoretical arrival	tat
 *	T	increment		cost, the packet's size: the clock counts bytes
 *	tau	tolerance		limit - least: I.371 compares before it adds T, this after
 *
 * least is cost, but less for a large packet that shares the bucket with small ones.
 *
 *	conforming if TAT <= t_a + tau; the charge is TAT = max(t_a, TAT) + T
 */
#ifndef SHAPECTL_GCRA_C
#define SHAPECTL_GCRA_C

#include "meter.h"

static __always_inline bool gcra(__u64 limit, __u64 v, __u64 least, __u64 tat)
{
	__u64 start = later(tat, v);

	/* A packet larger than the bucket conforms to an empty one. */
	return start == v || start + least - v <= limit;
}

#endif
