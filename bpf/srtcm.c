//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The single rate three color marker, RFC 2697. Its section 3 in short, of a packet of B bytes at the time t:
 *
 *	o If the packet has been precolored as green and Tc(t)-B >= 0, the packet is green and Tc is decremented by B
 *	o else if the packet has been precolored as green or yellow and if Te(t)-B >= 0, the packet is yellow and Te is
 *	  decremented by B
 *	o else the packet is red and neither Tc nor Te is decremented
 *
 * Without colours from outside all packets come in green. Tokens at the CIR go to Te only while Tc is CBS.
 *
 *	RFC 2697			here
 *	CBS - Tc			level
 *	CBS + EBS			both
 *	both - Tc - Te			total, to which green and yellow packets add B
 *
 * Both fall at the CIR until they are 0: a token that does not go to Tc goes to Te. So each is one TAT. One TAT with two
 * thresholds would be wrong: yellow packets would delay green ones. The total is at least the level; it is less after a
 * change from an algorithm without colours.
 */
#ifndef SHAPECTL_SRTCM_C
#define SHAPECTL_SRTCM_C

#include "meter.h"

static __always_inline enum colour srtcm(enum colour in, __u64 cost, __u64 level, __u64 cbs, __u64 *total, __u64 both)
{
	if (*total < level)
		*total = level;
	if (in == GREEN && level + cost <= cbs)
		return GREEN;
	if (in != RED && *total + cost <= level + both - cbs)
		return YELLOW;
	return RED;
}

#endif
