/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The layout of the maps, which the program and user space share. bpf2go
 * generates the Go types from this file.
 *
 * The byte clock. Each rule has a clock that counts the bytes that its rate
 * allows instead of nanoseconds:
 *
 *	V(t) = base + rate_units * t		in units of 2^-UNIT_BITS byte, mod 2^64
 *
 * A bucket is one word, its theoretical arrival time (TAT) on that clock: the
 * value of V at which the bucket is empty. Its level is TAT - V(t). A packet
 * adds its size, which is exact at any rate. Rounding errors do not accumulate,
 * because V is always computed from t. An edit begins another clock, and writes no bucket: see struct clock.
 *
 * The clock wraps (after six minutes at 400 Gbit/s, 160 days at 10 Mbit/s). A
 * bucket therefore also stores the time of its last charge, in ticks of
 * 2^TICK_BITS ns. A bucket that was idle for longer than it takes to drain is
 * empty, whatever its TAT.
 */
#ifndef SHAPECTL_ABI_H
#define SHAPECTL_ABI_H

#include <linux/types.h>

/* Enums, so that Go sees them too. */
enum layout {
	UNIT_BITS = 20,
	TICK_BITS = 30,
	TICKS_AHEAD = 1, /* by which the tick of a bucket may be ahead of a packet, because the clocks of CPUs differ, */
	TICKS_LATE = 1 << 20, /* or because a CPU stood still between reading the time and the charge: 13 days */
	LINE_SLOTS = 4,
	PACKET_BITS = 24, /* no packet counts as 2^PACKET_BITS bytes or more */
	MAX_DEPTH = 16, /* the largest number of pools above a rule */
	SHARED_BYTES = 1514, /* where packets of all sizes share a bucket, larger ones conform as one of this size */
	FAIR_BITS = 8,
	SHARE_FLAGS = 10, /* from the flag of a bucket scope to that of a share */
	FAIR_BINS = 64,
	FREE_WHOLE_BITS = 42,
	MAX_WAIT_S = 9, /* the longest time for which a packet is queued */
	QUOTA_BITS = 8, /* a quota is in units of 2^-QUOTA_BITS byte */
	AHEAD_BITS = 58, /* less than 2^AHEAD_BITS of these may be ahead of a quota */
	CALENDARS = 64,
	PERIODS = 128, /* of a calendar that are known: a power of two */
	/* While a full queue drains, a sparse flow sends at most a part of SPARSE_PARTS of it, */
	SPARSE_PARTS = 16,
	SPARSE_BITS = 11, /* but at least 2^SPARSE_BITS bytes, */
	SPARSE_MORE = 3,  /* and at most 2^SPARSE_MORE times as many */
	STAGES = 32, /* a rule and the pools above it, then */
	STAGE_SECOND = 17, /* a second limit, or a guarantee, */
	STAGE_SHADOW = 18, /* a shadow, */
	STAGE_ALSO = 19, /* one of other limits, */
	STAGE_SEEN = 20, /* and a flow by that: see also.h */
	SECRET_WORDS = 12,
	/* In skb->cb, for climb: where the IP header is, the id of the rule, and the time in two words. */
	IP_CB = 0,
	RULE_CB = 1, /* with the phase at PHASE_CB, and KEPT_CB if the fair clocks are those of now, or SHADOW_CB for a shadow */
	NOW_CB = 2,
	VIEW_CB = 4, /* the number of the view, from the small program of a hook (LoadCaller in internal/program) */
	LINE_PREFIXES4 = 5,
	LINE_PREFIXES6 = 3,
	SPILL_LINES = 32, /* consecutive lines that may have a prefix; a million IPv6 prefixes need more with probability 10^-18 */
	LENGTHS4 = 33,
	LENGTHS6 = 129,
	MARK_LENGTH = 254, /* of the prefix of a mark or VLAN, which is no address */
	NO_LENGTH = 255, /* no prefix has it */
	KINDS = 16,	/* of hooks */
	RULE_MAPS = 8,	/* a store grows by another map of rules, so that buckets stay in place */
	LABEL_BYTES = 40, /* in one part of a label: an element of a hash map takes 56 more */
	LISTENERS = 8,	  /* processes that may listen to events at once */
	EPISODE_LINES = 1024, /* a power of two */
	LINE_EPISODES = 4,
};

#define KEPT_CB (1U << 31)
#define SHADOW_CB (1U << 30)
#define PHASE_CB 27
#define RULE_CB_MASK ((1U << PHASE_CB) - 1)

#define NEVER_NS (~0ULL >> 1) /* policy.Never */

/* Low bit of a TAT: a CPU is allocating the slot to another key, or moving it. V is even. */
#define TAT_BUSY 1ULL
/* The next bit, of a TAT on a fair clock: it is in the coarse wheel. */
#define TAT_COARSE 2ULL

/* The options of a rule, in one word: one test finds all that shapectl leaves to climb. */
enum rule_flag {
	RULE_LEAKY = 1 << 0, /* else GCRA */
	RULE_UNLIMITED = 1 << 1,
	RULE_FRAMING = 1 << 2, /* overhead or mpu is not 0 */
	RULE_PENALTY = 1 << 3,
	RULE_FAIL_CLOSED = 1 << 4,
	RULE_ECN = 1 << 5,     /* excess packets are marked, */
	RULE_PASS = 1 << 6,    /* or passed; else dropped */
	RULE_HOST = 1 << 7,    /* bucket scope: each host, */
	RULE_SUBNET = 1 << 8,
	RULE_FLOW = 1 << 9,    /* else all packets */
	RULE_ABSENT = 1 << 10, /* with these parameters the rule does not exist */
	RULE_SHADOW = 1 << 11, /* a shadow counts the same packets */
	RULE_DELAY = 1 << 12,  /* packets beyond the burst are queued, */
	RULE_SPARSE = 1 << 13, /* but not those of sparse flows */
	RULE_LABEL = 1 << 14,  /* the map labels has a text for people */
	RULE_WITHIN = 1 << 15, /* packets are charged to a pool, too */
	RULE_GUARANTEE = 1 << 16, /* conforming packets of another limit pass the pools */
	RULE_SHARE_HOST = RULE_HOST << SHARE_FLAGS, /* fair shares of the shared bucket: of each host, */
	RULE_SHARE_SUBNET = RULE_SUBNET << SHARE_FLAGS,
	RULE_SHARE_FLOW = RULE_FLOW << SHARE_FLAGS,
	RULE_SHARE_MEMBER = 1 << 20, /* or of each rule and pool within the pool */
	RULE_POOL = 1 << 21,	 /* a pool or its guarantee: guarantees below may raise the level beyond the capacity */
	RULE_NAT = 1 << 22,    /* hosts and subnets are those behind NAT, not far ones */
	RULE_LEASED = 1 << 23, /* the rate of a pool, and what follows from it, is that of a lease */
	RULE_SRTCM = 1 << 24,  /* packets have colours, by RFC 2697, */
	RULE_TRTCM = 1 << 25,  /* by RFC 2698, */
	RULE_RFC4115 = 1 << 26,
	RULE_AWARE = 1 << 27,  /* they come with colours, by DSCP */
	RULE_EDITED = 1 << 28, /* buckets from before an edit may need the floor of the clock, and its fresh */
	RULE_RELEASED = 1 << 29, /* once the change has reverted, the other set of the lease is in force */
	RULE_ALSO = 1 << 30,   /* packets must conform to another limit, too: see also.h */
};

#define RULE_EACH (RULE_HOST | RULE_SUBNET | RULE_FLOW)
#define RULE_COLOURS (RULE_SRTCM | RULE_TRTCM | RULE_RFC4115)
#define RULE_SHARES (RULE_SHARE_HOST | RULE_SHARE_SUBNET | RULE_SHARE_FLOW | RULE_SHARE_MEMBER)

struct bucket {
	__u64 tat;   /* units on the rule's byte clock */
	__u32 tick;  /* when it was last charged; of a sharer the bytes of its largest packet since it became active */
	__u32 fingerprint; /* of the key: odd in its first line, even in its second, 0 if free; of a member its pool's salt */
};

/*
 * The clock of a limit. An edit writes no bucket. It begins another clock at a time t, by which every bucket has the
 * room that it had:
 *
 *	V'(t) = V(t) + free - free'	with the limit, or of a queue its burst, as what may be free
 *
 * Where that grew, a bucket that was idle would have more room at once. So V(t) becomes the floor, below which no TAT
 * counts. The axis of TATs is never rewritten, so one floor serves any number of edits, reverts and leases.
 */
struct clock {
	__u64 base;  /* units */
	__u64 floor; /* units: the least TAT, */
	__u32 until; /* up to this tick */
	__u32 fresh; /* a bucket that was last charged before this tick was empty at the edit */
};

/* The parameters of a limit that packets need: one cache line. No packet uses them while they are written. */
struct params {
	__u64 rate_units; /* units per ns, 32.32 fixed point */
	__u64 limit;   /* units: packets conform up to this level; the capacity and the queue */
	__u64 burst;   /* units, with RULE_DELAY: packets are not delayed up to this level */
	struct clock clock;
	__u32 idle;	/* ticks after which any bucket is empty */
	__u32 salt;	/* makes this rule's keys differ from those of other rules */
	__u32 flags;	/* enum rule_flag */
	/* With RULE_WITHIN: the id of the pool plus one; with RULE_COLOURS: a byte for each colour, its action; else enum unit. */
	__u32 within;
};

/* Parameters that few packets need, or that are only shown: one cache line. */
struct cold_params {
	__u64 rate_bits; /* per second, as configured */
	__u64 penalty; /* units, with RULE_PENALTY: the level after an excess packet */
	/* With RULE_PENALTY: as configured; with RULE_DELAY: packets that are queued longer are marked, NEVER_NS for none. */
	__u64 long_ns;
	__u32 also;	 /* with RULE_ALSO: the id of the other limit */
	__u32 calendar;	 /* the number of the calendar of a quota plus one; 0 for none */
	__u32 shadow;	 /* with RULE_SHADOW: the id of the shadow, which has no prefix */
	__u32 second;	 /* the id of the guarantee, or with RULE_COLOURS of the second limit */
	/* Of a guarantee of each key: all together count one of so many; of a quota: a cluster that grants its limit; else as configured. */
	__u32 members;
	__u32 share;	   /* the number of the share plus one, also while the other parameters have shares */
	__u32 step;	   /* ns between two advances of the fair clock */
	__u32 lease;	   /* with RULE_LEASED: the number of the lease plus one; in a lease, as next of struct rule */
	__s16 overhead; /* bytes a segment */
	__u16 mpu;	/* bytes a segment */
	__u8 each_bits;	   /* the prefix length of a RULE_SUBNET or RULE_SHARE_SUBNET, 0 to 128 */
	__u8 weight_less_1; /* with RULE_WITHIN: in the shares of the pool */
	/* With RULE_SHARES: */
	__u8 fine_shift;   /* a bin of the share's fine wheel has 2^fine_shift fair units, */
	__u8 coarse_shift; /* and of the coarse one 2^coarse_shift */
};

/* What a limit counts. */
enum unit {
	COUNTS_BYTES = 0,
	COUNTS_PACKETS = 1,
	COUNTS_FLOWS = 2,
	COUNTS_QUOTA = 3,
};

/* When periods begin, in ns of CLOCK_TAI, in ascending order; NEVER_NS if it is not known. */
struct calendar {
	__u64 begins[PERIODS];
	__u8 name[128]; /* for user space */
};

/* The cold parameters of the second limit of a rule with RULE_COLOURS. */
struct second_params {
	__u64 rate_bits;
	__u64 yellow; /* with RULE_AWARE: bit n is set if packets with DSCP n are yellow */
	__u64 red;
	__u64 room[5];
};

enum colour {
	GREEN = 0,
	YELLOW = 1,
	RED = 2,
};

/* What happens to the packets of a colour. Below ACTION_PASS, they get this DSCP. */
enum action {
	ACTION_PASS = 64,
	ACTION_DROP = 65,
	ACTION_ECN = 66,
};

/*
 * Of one rule and CPU, in packets and bytes on the wire. Every packet is either passed or dropped. A second limit passes
 * yellow packets, drops red ones, and has green ones as passed excess, whatever happens to them.
 */
struct counters {
	__u64 passed_packets;
	__u64 passed_bytes;
	__u64 dropped_packets;
	__u64 dropped_bytes;
	__u64 passed_excess_packets; /* of the passed: excess packets, or with RULE_DELAY the delayed packets */
	__u64 passed_excess_bytes;
	__u64 marked_packets;
	__u64 contended_packets;
};

/*
 * A rule, a pool, or another limit that one of them has. It has two sets of parameters. A change is written to the set that
 * is not in force, once no packet uses that any more. Then sets selects it: at once, or when many rules change together, in
 * each phase of the change.
 */
struct rule {
	struct bucket shared; /* the shared bucket; with RULE_EACH the spill bucket */
	struct bucket fair;   /* with RULE_WITHIN: its word as a sharer of the pool */
	__u64 departs;	      /* ns: when the last packet departs that is queued in the shared bucket */
	__u64 fifo_until;     /* ns: until then sparse flows are queued, too, because some queued packets have no flow */
	__u32 sets;	      /* SET_BITS for each phase: which parameters are in force, by which clock */
	__u32 replaced;	      /* change.epoch when the other parameters were last in force, 0 for never */
	__u32 retired;	      /* change.epoch when the rule was removed; 0 for never */
	__u32 view;	      /* the rule's view */
	struct clock reverted; /* that of the parameters before the change, once it has reverted */
	/* Several CPUs write these. */
	__u64 extra_packets;   /* on the wire, not counting the first of each skb */
	__u64 exempt_packets;  /* neighbour discovery that matched this rule */
	__u64 spilled_packets; /* with RULE_EACH: charged to the spill bucket, because their key had no slot */
	__u32 has_slots;      /* keys of the rule may have slots of the table */
	__u32 next[3];	      /* for user space, of the clocks of params and reverted: Meter.Next in internal/model */
	struct params params[2];
	struct cold_params cold[2];
	struct counters counters[]; /* one per CPU; their number is rounded up to a power of two */
};

enum set {
	SET_SECOND = 1 << 0,   /* the second parameters, */
	SET_REVERTED = 1 << 1, /* with rule.reverted as the clock */
	SET_BITS = 2,
};

/*
 * A pool with RULE_LEASED has its rate, and all that follows from it, from a lease. Each of its two sets of parameters has a
 * lease of its own, also while a change of many rules is pending. A lease has two versions, and bit 0 of version
 * selects one. A new lease is written to the other one, then version is raised. The first parameters of a lease are in force
 * until its end, then the second ones with the safe share are. Each of these switches is an edit: see struct clock.
 */
struct lease {
	__u32 version;
	/* For user space. */
	__u32 owner;   /* the id of the pool plus one, or 0 */
	__u32 retired; /* change.epoch when it was freed, 0 for never */
	__u32 replaced; /* change.epoch when the one that is not in force was replaced */
	__u64 until[2]; /* ns */
	__u64 known[2]; /* for user space: bits per second, of all hosts together without a lease */
	__u64 epoch[2]; /* for user space: of the store */
	struct {
		struct params params[2];
		struct cold_params cold[2];
	} set[2];
};

/* The phase of a change of many rules: its place in rule.sets. Each packet uses one phase throughout. */
enum phase {
	PHASE_BEFORE = 0,
	PHASE_AFTER = SET_BITS,
	PHASE_REVERTED = 2 * SET_BITS, /* as before, because the change was not confirmed in time, but for the clocks */
	PHASE_BY_TIME = 3 * SET_BITS, /* the times of the change select one of the others */
	PHASE_ROLLBACK = 3 * SET_BITS + 1, /* they do, but at the end the parameters from before have the clocks for it: PHASE_BEFORE */
};

/*
 * A change of many rules in one step. Each of them has its parameters before and
 * after the change. The change begins and reverts by itself, at two times for
 * which all byte clocks were prepared.
 */
struct change {
	__u64 phase; /* enum phase */
	__u64 from;  /* ns: when it begins; ~0 for never */
	__u64 until; /* ns: when it reverts; ~0 for never */
	/* For user space. */
	__u32 epoch;   /* from 1 on; raised when packets no longer use anything that was removed before */
	__u32 removed; /* epoch when a prefix was last removed, or a change ended */
	__u32 ids;     /* of rules and shadows: ids from here on were never used */
	__u32 labels;  /* parts of labels in the map, or more after a command was killed */
	__u64 edits;   /* raised by each command that changed rules */
	__u64 listened_until; /* ns: the latest lease of a listener; the next excess packet sets it to 0 */
	__u64 leases[LISTENERS]; /* ns: the listener of a slot renews it; 0 if the slot is free */
};

/*
 * The label of one of a rule's two sets of parameters, for user space alone. A text
 * that is longer than a part goes on in the next one.
 */
struct label_key {
	__u32 id;
	__u16 version; /* which set of parameters: 0 or 1 */
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

/*
 * Fair shares of one bucket, by generalized processor sharing in virtual time (Parekh and Gallager, 1993).
 *
 * Each sharer has a slot in the table. Its word is a TAT on the fair clock v, which counts
 * bytes for each unit of weight, in units of 2^-FAIR_BITS byte. While sharers with the weight w
 * in all are active, that is while v is before their TAT, v advances at the rate of the bucket / w.
 * Two wheels tell how w changes, without a list of sharers: a bin has the weight of the sharers
 * whose TAT is there. When v leaves a bin, they are not active any more. TATs far ahead of v are
 * in the coarse wheel, which has wider bins, and have TAT_COARSE set.
 */
struct share {
	__u64 v;
	__u64 last;  /* ns: up to when v was advanced */
	__u64 ahead; /* fair units by which v may be before a sharer's TAT, */
	__u64 more;  /* and those beyond for one that is alone */
	__u64 rest;  /* fair units times weight: what was left of the last advance */
	__u32 weight; /* of the active sharers: the sum of all bins; signed */
	__u32 lock;   /* a CPU is advancing v */
	__u16 fine_shift, coarse_shift; /* for which the bins are */
	/* For user space. */
	__u32 owner;   /* the id of the rule or pool plus one, or 0 */
	__u32 retired; /* change.epoch when it was freed, 0 for never */
	__u32 most;   /* bytes by which any sharer may be ahead */
	__u64 credit; /* fair units times weight: what light sharers may still send, see judge; signed */
	__u64 seen;   /* v of the pool above when this one was last advanced */
	__u64 free_factor; /* times the free bytes of the bucket is 2^FREE_WHOLE_BITS if it is empty */
	__u64 skip;   /* fair units that passed without a charge to a sharer, and that v has not skipped yet */
	__u32 bin[2 * FAIR_BINS]; /* first those of the fine wheel */
};

/* A cache line. A lookup reads one, or two if the first was full when the key got its slot. */
struct line {
	struct bucket slot[LINE_SLOTS];
};

/* The bucket key of a slot. Addresses and ports are in network order. A host or subnet is in src. */
struct key {
	__u32 id; /* the rule's */
	__u32 src[4];
	__u32 dst[4];
	__u16 sport;
	__u16 dport;
	__u8 proto;
	__u8 family; /* 4 or 6 */
	__u8 sharer; /* the slot is that of a sharer */
	__u8 room[5];
	__u64 departs; /* ns: when the last queued packet of the key departs */
};

/* What a packet saw of a limit: one cache line. */
struct stage {
	__u64 start; /* where a charge begins: the TAT, or the time of the byte clock if the bucket is empty */
	__u64 tat;   /* what the bucket's word was */
	__u64 level;
	__u64 limit;
	__u64 slot;  /* of the bucket, or of a sharer, with its fingerprint; 0 for none. Of a member only that */
	__u32 id;
	__u32 set;   /* of its parameters, see set_in */
	__u32 flags;
	__u32 weight; /* in this pool, of the stage below */
	__u32 load;  /* of the sharer, see judge */
	__u32 share; /* see cold_params */
};

enum event_kind {
	EVENT_OVERFLOW = 1,  /* a bucket begins to have excess packets */
	EVENT_PENALTY = 2,   /* and the rule has a penalty */
	EVENT_GUARANTEE = 3, /* a pool refuses a packet of a key that is within its guarantee */
};

/* What happened to the packet. */
enum fate {
	FATE_DROPPED = 0,
	FATE_MARKED = 1,
	FATE_DELAYED = 2,
	FATE_PASSED = 3,
};

/* The first excess packet of an episode. */
struct event {
	__u64 time;	/* ns */
	__u64 level;	/* bytes, as are all others: of the bucket that had too little room, after the packet */
	__u64 capacity;
	__u64 left_out; /* events that this listener was not told of, so far */
	__u32 limit;	/* the id of the rule or pool with that bucket */
	__u16 kind;	/* enum event_kind */
	__u16 fate;	/* enum fate */
	struct key key; /* of the rule; if its bucket scope is not the flow, src is the whole far address */
};

/* What the pool above leaves to a member that has fair shares itself. */
struct bound {
	__u64 v;      /* the fair clock above, */
	__u64 weight; /* and the weight of the member there, or 0 for no bound */
	__u64 units;  /* fair units that pass without moving that clock */
	__u64 may;    /* fair units by which all sharers of the member may be ahead together */
	__u64 credit; /* fair units by which its light sharers may */
	__u64 room;   /* the part of may that is left, of 1 << FREE_BITS */
};

/* A packet, on the CPU that handles it. */
struct work {
	__u64 now;
	__u64 cost;    /* units */
	__u64 least;   /* those of at most SHARED_BYTES of them */
	__u64 before;  /* units that leave before it from a queue */
	__u64 hash;    /* of the key that is sought in the table */
	__u32 ip;      /* see packet.h */
	__u32 id;      /* of the rule that it matched */
	__u32 phase;
	__u32 bytes, packets; /* on the wire */
	__u32 busy;    /* another packet on this CPU has these */
	__u32 again;   /* KEPT_CB if the fair clocks are those of now, SHADOW_CB if the rule is the shadow of another one */
	__u32 at;      /* the id of the limit that had too little room, or last marked or delayed it */
	/* These begin with 0. */
	__u64 longest; /* ns: the longest delay of its queues */
	__u64 latest;  /* ns: the latest departure that its sender may ask for, if it does */
	__u32 top;     /* the last stage */
	__u32 marks;   /* a bit for each stage that marks the packet */
	__u32 parsed;  /* flow is that of the packet */

	__s32 guaranteed; /* the first stage that guarantees the packet, or one of enum guaranteed */
	__u32 verdict; /* enum verdict */
	__u32 answer;  /* of the program */
	__u32 load;    /* of the last sharer, see judge */
	__u32 colour_in, colour; /* enum colour: as it came, and by its rule */
	__s32 action;  /* for its colour, or -1 if it got none */
	__u32 paid;    /* its second bucket was charged, also by a former attempt */
	struct bound bound;
	struct key flow; /* all of its 5-tuple */
	struct key key;  /* that is sought, for a slot of its own */
	struct event event;
	struct stage stage[STAGES] __attribute__((aligned(64)));
};

/* Since last, the excess packets of a bucket are no event. */
struct episode {
	__u64 tag; /* a hash of what happens to which bucket */
	__u64 last; /* ns */
};

/* What a process that listens wants, and what it was told. Its lease is in struct change. */
struct listener {
	__u32 kinds; /* a bit for each enum event_kind */
	__u32 most;  /* events in a tick */
	__u32 tick;
	__u32 told; /* events in this tick */
	__u64 left_out;
	__u64 room[5];
	struct episode episodes[EPISODE_LINES * LINE_EPISODES];
};

/*
 * Prefixes of all views, each with the id of its rule plus one, or 0 if the place
 * is free. A place is filled before its id is written by one store, so a packet
 * finds the whole prefix or nothing. A prefix is in the line that its hash
 * selects, or in one of the next lines if that is full.
 */
struct prefixes4 {
	__u64 key[LINE_PREFIXES4]; /* view.mix4 | length << 32 | address in network order, host bits set */
	__u32 id[LINE_PREFIXES4];
	__u32 used; /* places ever filled; more than LINE_PREFIXES4 if prefixes continue in the next line */
};

struct prefixes6 {
	__u64 addr[LINE_PREFIXES6][2]; /* masked, in network order, XORed with view.mix6 */
	__u32 id[LINE_PREFIXES6];
	__u8 length[LINE_PREFIXES6];
	__u8 used;
};

/*
 * A hook's part of the tables. A hook is one direction of one device. The prefix
 * lengths in use are listed longest first for each family, in two versions: one is in force.
 */
struct view {
	__u64 mix4;    /* number of the view << 40, which makes its prefixes differ from those of other views */
	__u64 mix6[2]; /* random */
	__u64 first4;  /* mix4 | longest IPv4 length << 32 | host bits: a copy, in one word */
	__u32 first6;  /* longest IPv6 length: a copy */
	__u32 version; /* bit 0: which use is in force */
	__u32 ifb;     /* on ingress: index of the ifb device that queues delayed packets, 0 for none */
	/* For user space. */
	__u32 retired; /* change.epoch when the other version was replaced, 0 for never */
	__u32 ifindex; /* 0 if the view is free */
	__u8 device[110]; /* its name when the view was allocated, or that of a cgroup */
	__u8 ingress;
	__u8 match_src;
	__u8 attached; /* the hook was attached; 0 if a command was killed before that */
	__u8 clearing; /* unused prefixes are being removed; still set if a command was killed meanwhile */
	struct {
		__u8 count4, count6;
		__u8 marks; /* there are rules for marks or VLANs */
		__u8 list[LENGTHS6 + LENGTHS4]; /* those of IPv4 from LENGTHS6 on */
	} use[2];
	/* Programs count frames here that no rule limits, because they are neither IP nor ARP. */
	__u64 other_frames;
	__u64 other_bytes;
};

/* Whether lookups try all prefix lengths in turn, rather than the longest one first without a list. */
enum scan {
	SCAN_BIG = 1,	/* the tables are too big for a cache */
	SCAN_MARKS = 2, /* and there may be rules for marks or VLANs, which come first */
};

/* Constants of a loaded program: for all hooks of a namespace, and for its kind of hook. */
struct hook {
	__u64 layout; /* of all maps, see pkg/maps/layout.go; the first word of every layout */
	__u32 line_mask;     /* lines in table - 1 */
	__u32 slot_mask;     /* and slots - 1 */
	__u32 prefixes4_mask; /* lines in prefixes4 - 1 */
	__u32 prefixes6_mask;
	__u32 filter_mask;   /* words in filter - 1 */
	__u32 cpu_mask;	     /* counters in a rule - 1 */
	__u32 rule_maps;     /* number of maps of rules */
	__u32 shadows;	     /* rules may have shadows */
	__u32 pools;	     /* there may be pools, and rules with shares */
	__u32 colours;	     /* there may be rules with colours */
	__u32 nat;	     /* and with RULE_NAT, */
	__u32 also;	     /* and with RULE_ALSO */
	__u32 scan;	     /* enum scan */
	__u32 first_id[RULE_MAPS]; /* of each map of rules */
	__u8 l2_bytes;	 /* 14 for Ethernet, 0 for a device without a link header */
	__u8 ingress;
	__u8 match_src;
	__u8 virtual_clock; /* time is skb->tstamp: tests and replay */
	__u32 view_mask; /* views - 1 */
	__u32 kind;	 /* of the hook: the index of its program in programs */
	__u32 adds_headers; /* wire_len is not that of all segments, or cannot be read */
	__u32 replay;	 /* a packet has wire_len bytes in gso_segs segments, whatever its headers say */
	__u32 secret[SECRET_WORDS]; /* random, so that nobody can choose colliding keys or prefixes */
	__u64 multiplier; /* for hashes of prefixes: the last two words of secret, made odd */
	__u64 masks[NO_LENGTH + 1][2]; /* of prefix lengths, in network order; of IPv4 the first 32 bits */
	__u8 build[16]; /* for user space: of the programs */
};

_Static_assert(sizeof(struct params) == 64, "the parameters are one cache line");
_Static_assert(sizeof(struct cold_params) == 64, "the other parameters are one cache line");
_Static_assert(__builtin_offsetof(struct rule, params) == 128, "fields that packets write have their own cache lines");
_Static_assert(__builtin_offsetof(struct rule, counters) == 384, "a rule is six cache lines, and one per CPU");
_Static_assert(sizeof(struct second_params) == sizeof(struct cold_params), "they are in the same place");
_Static_assert(sizeof(struct lease) == 64 + 2 * 256, "the offset of parameters is the sum of two bits");
_Static_assert(sizeof(struct stage) == 64, "a stage is a cache line");
_Static_assert(sizeof(struct line) == 64, "four slots are a cache line");
_Static_assert(sizeof(struct prefixes4) == 64, "five IPv4 prefixes are a cache line");
_Static_assert(sizeof(struct prefixes6) == 64, "three IPv6 prefixes are a cache line");
_Static_assert(sizeof(struct view) == 512, "a view is eight cache lines");
_Static_assert(sizeof(struct event) == 96, "an event has no padding");
_Static_assert(sizeof(struct counters) == 64, "a rule's counters are a cache line");

#endif
