//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The differentiated service two-rate three-color marker with efficient handling of in-profile traffic, RFC 4115. In
 * short, of a packet of B bytes at the time t:
 *
 *	green packet	if B <= Tc(t), it is green and Tc is decremented by B; else as a yellow packet
 *	yellow packet	if B <= Te(t), it is yellow and Te is decremented by B; else it is red
 *	red packet	it is red
 *
 * Without colours from outside all packets come in green.
 *
 *	RFC 4115	here
 *	CBS - Tc	level, which falls at the CIR
 *	EBS - Te	excess, which falls at the EIR
 */
#ifndef SHAPECTL_RFC4115_C
#define SHAPECTL_RFC4115_C

#include "meter.h"

static __always_inline enum colour rfc4115(enum colour in, __u64 cost, __u64 level, __u64 cbs, __u64 excess, __u64 ebs)
{
	if (in == GREEN && level + cost <= cbs)
		return GREEN;
	return in != RED && excess + cost <= ebs ? YELLOW : RED;
}

#endif
