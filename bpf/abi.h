/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the program and user space agree on: the maps, and the layout of what is
 * in them. bpf2go makes the Go types from this file, so neither side is written
 * twice.
 *
 * The byte clock. Each rule keeps its buckets on a clock of its own,
 * which counts what the rate lets through instead of nanoseconds:
 *
 *	V(t) = base + rate_units * t		in units of 2^-UNIT_BITS byte, mod 2^64
 *
 * A bucket is one word, its theoretical arrival time (TAT) on that clock: the
 * reading of V at which it will have drained. Its level is TAT - V(t). Adding
 * a packet adds its size, which is exact at any rate, and rounding V can not
 * accumulate, as V is computed from t afresh each time. A new rate changes
 * rate_units, and base so that V does not jump: no bucket is touched, and each
 * level stays exactly what it was.
 *
 * The clock wraps (after six minutes at 400 Gbit/s, 160 days at 10 Mbit/s), so a
 * bucket also says when it was last charged, in ticks of 2^TICK_BITS ns. One
 * that lay idle for longer than the rule needs to drain it is empty, whatever
 * its TAT seems to say.
 */
#ifndef SHAPECTL_ABI_H
#define SHAPECTL_ABI_H

#include <linux/types.h>

/* Enums, so that Go sees them too. */
enum layout {
	UNIT_BITS = 20,
	TICK_BITS = 30,
	LINE_SLOTS = 4,
	PACKET_BITS = 24, /* no packet counts as 2^PACKET_BITS bytes or more */
	MAX_WAIT_S = 9, /* no packet waits longer */
	SPARSE_BITS = 11, /* a sparse flow sends 2^SPARSE_BITS bytes at most in the time that a full queue takes */
	SECRET_WORDS = 12,
	LINE_PREFIXES4 = 5,
	LINE_PREFIXES6 = 3,
	SPILL_LINES = 32, /* lines in a row to look for a prefix in; a million IPv6 prefixes need more with probability 10^-18 */
	LENGTHS4 = 33,
	LENGTHS6 = 129,
	NO_LENGTH = 255, /* no prefix has it */
	RULE_MAPS = 8,	/* a store that grows gets another map of rules: buckets stay where they are */
	LABEL_BYTES = 40, /* in one part of a label: an element of a hash map takes 56 more */
};

/* Low bit of a TAT: a CPU is allocating the slot to another key, or moving it. V is even. */
#define TAT_BUSY 1ULL

/* All that a rule can be besides its numbers, in one word, so that the fast path tests few bits. */
enum rule_flag {
	RULE_LEAKY = 1 << 0, /* else GCRA */
	RULE_UNLIMITED = 1 << 1,
	RULE_FRAMING = 1 << 2, /* overhead or mpu are not 0 */
	RULE_PENALTY = 1 << 3,
	RULE_FAIL_CLOSED = 1 << 4,
	RULE_ECN = 1 << 5,     /* excess packets are marked, */
	RULE_PASS = 1 << 6,    /* or passed; else dropped */
	RULE_HOST = 1 << 7,    /* bucket scope: each host, */
	RULE_SUBNET = 1 << 8,
	RULE_FLOW = 1 << 9,    /* else all packets */
	RULE_ABSENT = 1 << 10, /* these parameters say that there is no such rule */
	RULE_SHADOW = 1 << 11, /* a shadow counts the same packets */
	RULE_DELAY = 1 << 12,  /* packets in the bucket are queued, */
	RULE_SPARSE = 1 << 13, /* but not those of sparse flows */
	RULE_LABEL = 1 << 14,  /* the map labels has a text for people */
};

#define RULE_EACH (RULE_HOST | RULE_SUBNET | RULE_FLOW)

struct bucket {
	__u64 tat;   /* units on the rule's byte clock */
	__u32 tick;  /* when it was last charged */
	__u32 fingerprint; /* of the key, odd in its first line, even in its second; 0 where no key has the slot */
};

/* The parameters of a rule that packets need: one cache line. */
struct params {
	__u64 rate_units; /* units per ns, 32.32 fixed point */
	__u64 base;	/* units */
	__u64 limit;   /* units: up to this level packets conform; the capacity, with the queue behind it */
	__u64 burst;   /* units, with RULE_DELAY: up to this level packets are not delayed */
	__u64 penalty; /* units, with RULE_PENALTY: the level that an excess packet leaves */
	__u32 idle;	/* ticks after which a bucket has drained for sure */
	__u32 salt;	/* tells this rule's keys from another's */
	__s16 overhead; /* bytes a segment */
	__u16 mpu;	/* bytes a segment */
	__u32 flags;	/* enum rule_flag */
	__u32 each_bits; /* of a subnet: 0 to 128 */
	__u32 shadow;	/* with RULE_SHADOW the id of its limit, which has no prefix */
};

/* Parameters that few packets need, or only people. */
struct cold_params {
	__u64 rebase; /* units: base in PHASE_REVERTED */
	__u64 rate_bits; /* as it was asked for */
	__u64 penalty_ns; /* as it was asked for */
	__u64 ecn_above_ns; /* with RULE_DELAY: packets that wait longer are marked */
};

/* Of one rule and CPU, in packets and bytes on the wire. Each packet is passed or dropped. */
struct counters {
	__u64 passed_packets;
	__u64 passed_bytes;
	__u64 dropped_packets;
	__u64 dropped_bytes;
	__u64 spared_packets; /* of the passed: excess packets, or with RULE_DELAY those that were delayed */
	__u64 spared_bytes;
	__u64 marked_packets;
	__u64 contended_packets;
};

/*
 * A rule has two sets of parameters. A change is written to the one that is not
 * in force, then version is raised. A packet looks at version again before it
 * charges a bucket, so it goes by the old parameters or the new ones and never by a
 * mix, however many changes follow each other. Where many rules change at once,
 * version says so, and the phase of the change decides.
 */
struct rule {
	struct bucket shared; /* of all packets, or with RULE_EACH the spill bucket */
	__u64 fifo_until;     /* ns: until then sparse flows are queued, too, as some queued packets have no flow */
	__u32 version;	      /* even or odd: which parameters are in force, or with VERSION_CHANGES were before the change */
	__u32 retired;	      /* change.epoch when the rule went out of force; 0 for never */
	__u32 view;	      /* that the rule is of */
	__u32 has_slots;      /* slots of the table may be the rule's */
	/* Changed by several CPUs. What is written for each packet shares no line with what is only read. */
	__u64 extra_packets;   /* on the wire, beyond the first of each skb that was passed or dropped */
	__u64 exempt_packets;  /* neighbour discovery that this rule would have limited */
	__u64 spilled_packets; /* with RULE_EACH: charged to the spill bucket, as their key had no slot */
	struct params params[2];
	struct cold_params cold[2];
	struct counters counters[]; /* one for each CPU, rounded up to a power of two */
};

/* In rule.version: the rule takes part in the change. */
#define VERSION_CHANGES (1U << 31)

/* How far a change of many rules has come. Each packet sees one phase. */
enum phase {
	PHASE_BEFORE = 0,
	PHASE_AFTER = 1,
	PHASE_REVERTED = 2, /* as before, as nobody confirmed the change in time; byte clocks start from rebase */
	PHASE_BY_TIME = 3,  /* one of the others, which the times of the change tell */
};

/*
 * A change of many rules in one step: each that takes part has its parameters
 * before it and those after it. The times let it begin at a moment for which all
 * byte clocks were made to agree, and revert at another one, without anybody's help.
 */
struct change {
	__u64 phase; /* enum phase */
	__u64 from;  /* ns: when it begins; ~0 for never */
	__u64 until; /* ns: when it reverts; ~0 for never */
	/* For user space. */
	__u32 epoch;   /* from 1 on; raised when no packet sees any more what went out of force before */
	__u32 removed; /* epoch when a prefix was last taken away, or a change ended */
	__u32 ids;     /* of rules and shadows: those from here on were never used */
	__u32 labels;  /* parts of labels in the map, or more after a command was killed */
};

/*
 * The label of one of a rule's two sets of parameters, for user space alone. A text
 * that is longer than a part goes on in the next one.
 */
struct label_key {
	__u32 id;
	__u16 version; /* even or odd, as in rule.version: 0 or 1 */
	__u16 part;
};

struct label {
	__u8 text[LABEL_BYTES];
};

/* Hosts, or subnets of the shadow's bucket scope, that a shadow would have affected. */
struct affected_key {
	__u32 salt; /* the shadow's */
	__u32 family; /* 4 or 6 */
	__u32 addr[4];
};

struct affected {
	__u64 packets;
	__u64 bytes;
};

/* One cache line is all that finding a bucket touches, or two where the first was full when its key came. */
struct line {
	struct bucket slot[LINE_SLOTS];
};

/* The bucket key of a slot; addresses and ports in network order. For a host or subnet only src is set. */
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

/*
 * Prefixes of all views, each with the id of its rule plus one, or 0 where a place
 * is free: a place is filled before its id is written, which is one store, so a
 * packet finds a prefix or does not. A prefix has its place in the line that its
 * hash names; where that is full, in one of the next.
 */
struct prefixes4 {
	__u64 key[LINE_PREFIXES4]; /* view.mix4 | length << 32 | address in network order, host bits set */
	__u32 id[LINE_PREFIXES4];
	__u32 used; /* places ever filled; more than there are where prefixes went on to the next line */
};

struct prefixes6 {
	__u64 addr[LINE_PREFIXES6][2]; /* masked, in network order, XORed with view.mix6 */
	__u32 id[LINE_PREFIXES6];
	__u8 length[LINE_PREFIXES6];
	__u8 used;
};

/*
 * A hook's part of the tables: one direction of one device. The prefix lengths in
 * use are listed longest first, in two versions, of which one is in force.
 */
struct view {
	__u64 mix4;    /* tells its prefixes from those of other views: its number << 40 */
	__u64 mix6[2]; /* random */
	__u64 first4;  /* mix4 | the longest length of IPv4 << 32 | host bits, once more, in one word */
	__u32 first6;  /* the longest length of IPv6, once more */
	__u32 version; /* of use */
	__u32 ifb;     /* on ingress: the ifb device that queues delayed packets, 0 for none */
	/* For user space. */
	__u32 retired; /* change.epoch when the other version went out of force, 0 for never */
	__u32 ifindex; /* 0 where the number is free */
	__u8 device[16]; /* its name then */
	__u8 ingress;
	__u8 match_src;
	__u8 attached; /* its hook was attached; else a command was killed before that */
	__u8 clearing; /* prefixes that packets do not look for are to go; else a command was killed before that */
	struct {
		__u8 count4, count6;
		__u8 list4[LENGTHS4];
		__u8 list6[LENGTHS6];
	} use[2];
	__u8 room[112];
};

/* What a program is told when it is loaded: for all hooks of a namespace, and for those of its kind. */
struct hook {
	__u64 layout; /* of all maps, see pkg/maps/layout.go; the first word in any layout */
	__u32 line_mask;     /* lines in table - 1 */
	__u32 prefixes4_mask; /* lines in prefixes4 - 1 */
	__u32 prefixes6_mask;
	__u32 filter_mask;   /* words in filter - 1 */
	__u32 cpu_mask;	     /* counters in a rule - 1 */
	__u32 rule_maps;     /* how many maps the rules are in */
	__u32 shadows;	     /* whether rules may have shadows */
	__u32 first_id[RULE_MAPS]; /* that of each */
	__u8 l2_bytes;	 /* 14 for Ethernet, 0 for a device without a link header */
	__u8 ingress;
	__u8 match_src;
	__u8 virtual_clock; /* time is skb->tstamp: tests and replay */
	__u32 view_mask; /* views - 1 */
	__u32 reorders;	 /* the machine may read memory in another order than the program says */
	__u32 replay;	 /* a packet has wire_len bytes in gso_segs segments, whatever is in it */
	__u32 secret[SECRET_WORDS]; /* random, so that nobody can aim at a bucket or a prefix */
	__u64 multiplier; /* for hashes of prefixes: the last two words of secret, made odd */
	__u64 masks[NO_LENGTH + 1][2]; /* of prefix lengths, in network order; of IPv4 the first 32 bits */
	__u8 build[16]; /* for user space: of the programs */
};

_Static_assert(sizeof(struct params) == 64, "what a packet needs of a rule is a cache line");
_Static_assert(__builtin_offsetof(struct rule, counters) == 256, "a rule is four cache lines, and one for each CPU");
_Static_assert(__builtin_offsetof(struct rule, params) == 64, "and what is written has one of its own");
_Static_assert(sizeof(struct line) == 64, "four slots are a cache line");
_Static_assert(sizeof(struct prefixes4) == 64, "five IPv4 prefixes are a cache line");
_Static_assert(sizeof(struct prefixes6) == 64, "three IPv6 prefixes are a cache line");
_Static_assert(sizeof(struct view) == 512, "a view is eight cache lines");
_Static_assert(sizeof(struct counters) == 64, "a rule's counters are a cache line");

#endif
