/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The constants of a loaded program. */
#ifndef SHAPECTL_HOOK_H
#define SHAPECTL_HOOK_H

#include "abi.h"

#define READ_ONCE(x) (*(volatile typeof(x) *)&(x))
#define WRITE_ONCE(x, v) (*(volatile typeof(x) *)&(x) = (v))

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* Keeps the compiler from computing the pointer again at each use. */
#define KEPT(pointer)                                 \
	({                                            \
		typeof(pointer) kept = pointer;       \
		asm volatile("" : "+r"(kept));        \
		kept;                                 \
	})

/*
 * A field of hook. The loader writes it into the instruction, as Linux does with
 * runtime constants. So it needs no load, and the verifier removes branches that
 * depend on it. See WriteConstants in internal/program.
 */
#define HOOK_CONSTANT(field) \
	(0x5c000000 | sizeof(((struct hook *)0)->field) << 16 | __builtin_offsetof(struct hook, field))
#define HOOK(field)                                                         \
	({                                                                  \
		__u32 value;                                                \
		asm volatile("%0 = %1" : "=w"(value) : "i"(HOOK_CONSTANT(field))); \
		value;                                                      \
	})

/* number & HOOK(field) in one instruction. */
#define MASKED(number, field)                                               \
	({                                                                  \
		__u32 masked = number;                                      \
		asm("%0 &= %1" : "+w"(masked) : "i"(HOOK_CONSTANT(field))); \
		masked;                                                     \
	})

/* What the program that an inline function is in is attached to. */
enum at {
	AT_DEVICE, /* by tcx or a clsact filter */
	AT_CGROUP, /* there a program may only read and mark a packet, and decide over it */
};

const volatile struct hook hook;

#endif
