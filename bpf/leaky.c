//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The leaky bucket as a meter, in its continuous-state form (ITU-T I.371, Annex
 * A). I.371 stores the level X and its time LCT. Here one word encodes both: the
 * time on the byte clock at which the bucket is empty.
 *
 *	I.371				here
 *	t_a	arrival time		v, the byte clock when the packet arrives
 *	X'	X - (t_a - LCT), or 0	level
 *	I	increment		cost, the packet's size
 *	L	limit			limit - least: I.371 compares before it adds I, this after
 *
 *	conforming if X' <= L; the charge is X = X' + I, LCT = t_a
 *
 * I.371 has no penalty. With a penalty, an excess packet leaves the bucket full, or
 * above full by what leaks during the penalty time.
 */
#ifndef SHAPECTL_LEAKY_C
#define SHAPECTL_LEAKY_C

#include "meter.h"

static __always_inline bool leaky(__u64 limit, __u64 v, __u64 least, __u64 tat)
{
	__u64 level = later(tat, v) - v;

	/* A packet larger than the bucket conforms to an empty one. */
	return !level || level + least <= limit;
}

/* The TAT after an excess packet. */
static __always_inline __u64 leaky_penalty(const struct cold_params *cold, __u64 v, __u64 tat)
{
	return later(tat, v + cold->penalty);
}

#endif
