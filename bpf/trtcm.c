//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The two rate three color marker, RFC 2698. Section 3, of a packet of B bytes at the time t:
 *
 *	o If the packet has been precolored as red or if Tp(t)-B < 0, the packet is red, else
 *	o if the packet has been precolored as yellow or if Tc(t)-B < 0, the packet is yellow and Tp is decremented by B, else
 *	o the packet is green and both Tp and Tc are decremented by B
 *
 * Without colours from outside all packets come in green.
 *
 *	RFC 2698	here
 *	CBS - Tc	level, which falls at the CIR
 *	PBS - Tp	peak, which falls at the PIR
 */
#ifndef SHAPECTL_TRTCM_C
#define SHAPECTL_TRTCM_C

#include "meter.h"

static __always_inline enum colour trtcm(enum colour in, __u64 cost, __u64 level, __u64 cbs, __u64 peak, __u64 pbs)
{
	if (in == RED || peak + cost > pbs)
		return RED;
	return in == YELLOW || level + cost > cbs ? YELLOW : GREEN;
}

#endif
