/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the two programs and user space agree on: the maps, and the layout of
 * what is in them. bpf2go makes the Go types from this file, so neither side
 * is written twice.
 *
 * The byte clock. A rule's buckets are kept on a clock of the rule's own,
 * which counts what the rate lets through instead of nanoseconds:
 *
 *	V(t) = base + slope * t		in units of 2^-UNIT_BITS byte, mod 2^64
 *
 * A bucket is one word, its theoretical arrival time (TAT) on that clock: the
 * reading of V at which it will have drained. Its level is TAT - V(t). Adding
 * a packet adds its size, which is exact at any rate, and rounding V can not
 * accumulate, as V is computed from t afresh each time. A new rate changes
 * slope, and base so that V does not jump: no bucket is touched, and each one
 * owes exactly the bytes that it owed.
 *
 * The clock wraps (after six minutes at 400 Gbit/s, years at 10 Mbit/s), so a
 * bucket also says when it was last charged, in ticks of 2^TICK_BITS ns. One
 * that lay idle for longer than the rule needs to drain it is empty, whatever
 * its TAT seems to say.
 */
#ifndef SHAPECTL_ABI_H
#define SHAPECTL_ABI_H

#include <linux/types.h>

/* Enums, so that Go sees them too. */
enum layout {
	/* Raised when a change makes pinned maps of an older build unreadable. */
	LAYOUT_VERSION = 1,
	UNIT_BITS = 20,
	TICK_BITS = 30,
	LINE_SLOTS = 4,
	PACKET_BITS = 24, /* no packet counts as 2^PACKET_BITS bytes or more */
	SECRET_WORDS = 12,
	LINE_PREFIXES = 3,
	SPILL_LINES = 8, /* how many lines in a row to look for a prefix in */
	LENGTH_IPV4 = 129,
	LENGTHS_LIST = 256, /* of which 129 can be in use */
};

/* Low bit of a TAT: a CPU is giving the slot to another key. V is even. */
#define TAT_TAKEN 1ULL

enum algorithm {
	ALGORITHM_GCRA,
	ALGORITHM_LEAKY,
};

enum each {
	EACH_ALL,
	EACH_SUBNET, /* hosts, too: subnets of 32 or 128 bits */
	EACH_FLOW,
};

enum excess {
	EXCESS_DROP,
	EXCESS_ECN,
	EXCESS_PASS,
};

enum rule_flag {
	RULE_UNLIMITED = 1,
	RULE_FAIL_CLOSED = 2,
	RULE_PENALTY = 4,
};

struct rule {
	/* What a packet needs: one cache line, and of the next one each_mask. */
	__u64 slope;	/* units per ns, 32.32 fixed point */
	__u64 base;	/* units */
	__u64 capacity; /* units */
	__u64 penalty;	/* units: the level an overflow leaves behind */
	__u32 idle;	/* ticks after which a bucket has drained for sure */
	__u32 id;	/* index into own_buckets and counters */
	__u32 salt;	/* tells this rule's keys from another's */
	__s16 overhead; /* bytes a segment */
	__u16 mpu;	/* bytes a segment */
	__u8 algorithm;
	__u8 each;
	__u8 each_bits; /* 0 to 128; for people, who do not read masks */
	__u8 excess;
	__u8 flags;
	__u8 pad[11];
	__u32 each_mask[4]; /* what a sharer's addresses have in common, in network order */
	/* What was asked for, kept for people: the data path does not read it. */
	__u64 rate_bits;
	__u64 capacity_bytes;
	__u64 penalty_ns;
	__u64 reserved[3];
};

struct bucket {
	__u64 tat;   /* units on the rule's byte clock; 0 where never used */
	__u32 tick;  /* when it was last charged */
	__u32 print; /* fingerprint of the key; 0 where no key has the slot */
};

/* What a rule keeps when it is changed. */
struct own {
	struct bucket bucket; /* everybody's with EACH_ALL, the spare one elsewhere */
	__u32 version;	      /* which of the rule's two versions is in force: 0 or 1 */
	__u8 pad[44];	      /* no two rules' buckets share a cache line */
};

/* One cache line is all that finding a bucket touches. */
struct line {
	struct bucket slot[LINE_SLOTS];
};

/* Who has a slot; addresses and ports in network order. For a subnet only src is set. */
struct key {
	__u32 id; /* the rule's */
	__u32 src[4];
	__u32 dst[4];
	__u16 sport;
	__u16 dport;
	__u8 proto;
	__u8 family; /* 4 or 6 */
	__u8 pad[6]; /* an array map rounds up to 8 bytes */
};

/* passed + dropped is all that matched; excess is what did not conform, whatever became of it. */
struct counters {
	__u64 passed_packets;
	__u64 passed_bytes;
	__u64 excess_packets;
	__u64 excess_bytes;
	__u64 dropped_packets;
	__u64 dropped_bytes;
	__u64 marked_packets;
	__u64 unsure_packets;
};

/*
 * Prefixes, each with the id of its rule plus one, or 0 where a place is free:
 * a place is filled before its id is written, which is one store, so a packet
 * finds a prefix or does not. A prefix has its place in the line that its hash
 * names; where that is full, spill says to look in the next one too.
 */
struct prefixes {
	__u32 addr[LINE_PREFIXES][4]; /* masked, in network order; of IPv4 the first word */
	__u32 id[LINE_PREFIXES];
	__u8 length[LINE_PREFIXES]; /* IPv4's come after IPv6's: LENGTH_IPV4 + bits */
	__u8 spill;
};

/* A prefix length, as in struct prefixes, and the mask that makes an address such a prefix. */
struct length {
	__u32 mask[4]; /* in network order */
	__u32 length;
};

/*
 * The prefix lengths in use, longest first, in two versions like a rule. Each
 * has a list for IPv4 and one for IPv6: list 2 * version + (1 for IPv6).
 */
struct lengths {
	__u32 version;
	__u32 pad;
	__u32 count[4];
	struct length list[4 * LENGTHS_LIST];
};

/* Set when a hook is made; what the verifier knows to be constant costs nothing. */
struct hook {
	__u32 line_mask; /* lines in table - 1 */
	__u32 prefix_mask; /* lines in prefixes - 1 */
	__u8 l2_bytes;	 /* 14 for Ethernet, 0 for a device without a link header */
	__u8 ingress;
	__u8 match_src;
	__u8 virtual_clock; /* time is skb->tstamp: tests and replay */
	__u32 secret[SECRET_WORDS]; /* random, so that nobody can aim at a bucket */
	/* For user space. */
	__u32 layout; /* LAYOUT_VERSION of the build that made it */
	__u32 ifindex;
	__u8 build[8];	 /* of the programs */
	__u8 device[16]; /* its name then */
};

_Static_assert(sizeof(struct rule) == 128, "a rule is two cache lines, the hot one first");
_Static_assert(__builtin_offsetof(struct rule, each_mask) == 64, "what a packet needs is one cache line");
_Static_assert(sizeof(struct own) == 64, "an own bucket is a cache line");
_Static_assert(sizeof(struct line) == 64, "four slots are a cache line");
_Static_assert(sizeof(struct prefixes) == 64, "three prefixes are a cache line");
_Static_assert(sizeof(struct lengths) % 8 == 0, "an array map rounds up to 8 bytes");
_Static_assert(sizeof(struct counters) == 64, "a rule's counters are a cache line");

#endif
