/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Times on the byte clock of abi.h, for all meters. */
#ifndef SHAPECTL_METER_H
#define SHAPECTL_METER_H

#include <stdbool.h>
#include "abi.h"

/* The later of two times on a byte clock, which wraps. */
static __always_inline __u64 later(__u64 a, __u64 b)
{
	return (__s64)(a - b) > 0 ? a : b;
}

/* One move, instead of the two shifts that the compiler would use. */
static __always_inline __u64 low_half(__u64 x)
{
	__u32 half;

	asm("%0 = %1" : "=w"(half) : "w"((__u32)x));
	return half;
}

/* base + rate * now modulo 2^64. The 32 fraction bits of the rate are cut off after the multiplication. */
static __always_inline __u64 byte_clock(__u64 rate, __u64 base, __u64 now)
{
	__u64 low = low_half(now);
	__u64 v = (now >> 32) * rate + low * (rate >> 32) + (low * low_half(rate) >> 32);

	return (base + v) & ~TAT_BUSY;
}

static __always_inline __u32 tick(__u64 now)
{
	return now >> TICK_BITS;
}

/*
 * The time that it takes to leak the units, to the nearest ns, but at most 2^34 ns (17 s):
 * units * 2^32 / rate, 16 bits at a time. It ignores the last 13 bits of a rate
 * above 120 Mbit/s, an error of less than 1 ns in 8 s.
 */
static __always_inline __u64 drain_ns(__u64 rate, __u64 units)
{
	__u64 high;

	if (!rate)
		return 0;
	if (units >> 2 >= rate)
		return 1ULL << 34;
	if (rate >> 46) {
		rate >>= 13;
		high = units / rate;
		units = (units - high * rate) << 3;
		high = (high << 3) + units / rate;
		units %= rate;
	} else {
		units <<= 16;
		high = units / rate;
		units %= rate;
	}
	return (high << 16) + ((units << 16) + rate / 2) / rate;
}

#endif
