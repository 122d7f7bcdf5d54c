/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Buckets: how one is charged, and the table in which keys find theirs.
 *
 * A drained bucket says nothing, so its slot may go to any key. Nothing is
 * evicted, no timer runs, and a spray of new keys can take only slots that
 * nobody owes anything on.
 *
 * A key has its slot in one of two lines of the table. It takes one of the first
 * if it can, else one of the second; where both are full, a bucket that has its
 * slot in its own first line moves to its second.
 *
 * A slot changes hands in three steps: CAS sets TAT_TAKEN, which only succeeds
 * while the bucket is as drained as it was when it was looked at; the key and
 * its fingerprint are written; a new TAT without TAT_TAKEN hands it over. Whoever
 * charges a bucket looks at the fingerprint again between reading its TAT and the
 * CAS, so no charge goes astray.
 */
#ifndef SHAPECTL_BUCKET_H
#define SHAPECTL_BUCKET_H

#include "rule.h"

/* How often to try a bucket that other CPUs keep changing; beyond, the verdict is unsure. */
#define TRIES 16

/* More than the clocks of two CPUs can differ. */
#define SKEW_NS (1 << 20)

enum verdict {
	VERDICT_PASS,
	VERDICT_EXCESS,
	VERDICT_MARK,
	VERDICT_DELAY, /* conforms, and waits */
	VERDICT_UNSURE,
	VERDICT_AGAIN, /* another CPU was there: look again */
};

/* What the two meters define, on levels and costs in units: whether a packet fits, and what level excess leaves. */
static bool conforms(const struct terms *terms, __u64 level, __u64 cost);
static __u64 after_excess(const struct terms *terms, __u64 level);

static __always_inline __u32 tick(__u64 now)
{
	return now >> TICK_BITS;
}

/* Bytes still owed, in units. A clock that steps back by up to a tick is no reason to forgive any. */
static __always_inline __u64 level_at(const struct terms *terms, __u64 v, __u64 now, __u64 tat, __u32 charged)
{
	__u64 level = tat - v;

	if ((__s64)level <= 0 || (__u32)(tick(now) + 1 - charged) > terms->idle)
		return 0;
	return level;
}

/*
 * How long it takes to leak so many units, to the nearest ns, if that is less than
 * 17 s: units * 2^32 / slope, worked out 16 bits at a time. Of a slope beyond
 * 120 mbit the last 13 bits are left out, which is less than 1 ns in 8 s.
 */
static __always_inline __u64 drain_ns(__u64 slope, __u64 units)
{
	__u64 high;

	if (!slope)
		return 0;
	if (slope >> 46) {
		slope >>= 13;
		high = units / slope;
		units = (units - high * slope) << 3;
		high = (high << 3) + units / slope;
		units %= slope;
	} else {
		units <<= 16;
		high = units / slope;
		units %= slope;
	}
	return (high << 16) + ((units << 16) + slope / 2) / slope;
}

/*
 * Whether b, whose TAT was read before, may be charged: nobody is taking or moving
 * it, and it has that fingerprint, 0 for a rule's own bucket, which never changes
 * hands. Not after the CAS: the bucket may have moved then, with the charge.
 */
static __always_inline bool is_still(const struct bucket *b, __u32 print, __u64 tat)
{
	return !(tat & TAT_TAKEN) && (!print || READ_ONCE(b->print) == print);
}

/* Makes its level another one, if nobody else has changed it; verdict is then the answer. */
static __always_inline enum verdict put_level(struct bucket *b, __u64 tat, __u64 v, __u64 level, __u64 now,
					      enum verdict verdict)
{
	/* Before the CAS: a charge must not be seen with the tick of an older one. */
	if (READ_ONCE(b->tick) != tick(now))
		WRITE_ONCE(b->tick, tick(now));
	return __sync_val_compare_and_swap(&b->tat, tat, v + level) == tat ? verdict : VERDICT_AGAIN;
}

/*
 * Charges b, which must have that fingerprint, with a packet of so many bytes
 * when the rule's byte clock shows v, unless it is excess. ect says that it may
 * be marked instead, penalised that excess has the rule's penalty. One CAS
 * decides, so two CPUs never admit more than one would; excess without a penalty
 * writes nothing at all. given is the TAT that the bucket has then.
 */
static __always_inline enum verdict charge_bucket(const struct terms *terms, __u64 v, struct bucket *b, __u32 print,
						  __u64 now, __u64 bytes, bool ect, bool penalised, __u64 *given)
{
	__u64 cost = bytes << UNIT_BITS, tat = READ_ONCE(b->tat), level, after;

	if (!is_still(b, print, tat))
		return VERDICT_AGAIN;
	level = level_at(terms, v, now, tat, READ_ONCE(b->tick));
	if (conforms(terms, level, cost)) {
		*given = v + level + cost;
		return put_level(b, tat, v, level + cost, now, VERDICT_PASS);
	}
	if (ect && level + cost <= 2 * terms->capacity)
		return put_level(b, tat, v, level + cost, now, VERDICT_MARK);
	after = penalised ? after_excess(terms, level) : level;
	if (after == level)
		return VERDICT_EXCESS;
	return put_level(b, tat, v, after, now, VERDICT_EXCESS);
}

/* One term of NH (Black et al., UMAC; RFC 4418, 5.2): with secret words, two keys collide with chance 2^-32. */
#define NH(i, a, b) \
	((__u64)((__u32)(a) + hook.secret[2 * (i)]) * (__u32)((__u32)(b) + hook.secret[2 * (i) + 1]))

/* What NH leaves in its bits is spread over all of them. */
static __always_inline __u64 mix(__u64 h)
{
	h ^= h >> 32;
	h *= 0xc4ceb9fe1a85ec53ULL; /* of murmur3's finalizer (Appleby, public domain) */
	return h ^ h >> 32;
}

static __always_inline __u64 hash4(__u32 salt, __u32 proto, __u32 ports, __u32 src, __u32 dst)
{
	return mix(NH(0, src, dst) + NH(1, ports, salt ^ proto));
}

static __always_inline __u64 hash6(__u32 salt, __u32 proto, __u32 ports, const __u32 src[4], const __u32 dst[4])
{
	return mix(NH(0, src[0], dst[0]) + NH(1, ports, salt ^ proto) + NH(2, src[1], dst[1]) + NH(3, src[2], dst[2]) +
		   NH(4, src[3], dst[3]));
}

static __always_inline __u64 hash_key(const struct key *k, __u32 salt)
{
	__u32 ports = (__u32)k->dport << 16 | k->sport; /* as a packet has them */

	if (k->family == 6)
		return hash6(salt, k->proto, ports, k->src, k->dst);
	return hash4(salt, k->proto, ports, k->src[0], k->dst[0]);
}

static __always_inline __u32 line_of(__u64 hash)
{
	return hash & hook.line_mask;
}

static __always_inline __u32 print_of(__u64 hash)
{
	return hash >> 32 | 1;
}

/*
 * Where a key has its slot if its first line had none left: another line, which
 * its fingerprint leads to from the first. There the fingerprint is another one,
 * too, so that two keys are as unlikely to be taken for each other as with one line.
 */
static __always_inline __u32 second_line(__u32 line, __u32 print)
{
	return (line ^ print >> 3) & hook.line_mask;
}

static __always_inline __u32 second_print(__u32 print)
{
	return print > 1 ? print - 1 : 2; /* 0 is no fingerprint */
}

/* The slot of a line that a key takes if it can, and is looked for in first. */
static __always_inline __u32 home_of(__u32 print)
{
	return print >> 1 & (LINE_SLOTS - 1);
}

/* Not charged since a change went back. Charges since then bear a tick that is one ahead. */
static __always_inline bool is_from_before(__u32 charged)
{
	return (__s32)(charged - tick(change.until)) <= 0;
}

/*
 * Whether anybody may have the slot: its bucket is empty by the clock of the
 * rule that its key belongs to, and for long enough that no CPU whose clock is
 * behind would think otherwise.
 */
static __noinline int drained(__u32 slot, const struct bucket *b, __u64 tat, __u64 now)
{
	__u32 version, charged = READ_ONCE(b->tick);
	const struct terms *terms;
	const struct rule *rule;
	const struct key *key;

	key = bpf_map_lookup_elem(&keys, &slot);
	if (!key)
		return 0;
	rule = rule_of(key->id);
	if (!rule)
		return 0;
	now = now < SKEW_NS ? 0 : now - SKEW_NS;
	version = version_of(rule, side_at(now));
	terms = terms_of(rule, version);
	/* It may owe more than the rule as it is again can hold, but no longer than if charged then. */
	if (version & VERSION_REBASED && is_from_before(charged))
		charged = tick(change.until);
	return !level_at(terms, clock_of(terms, version, now), now, tat, charged);
}

/*
 * A change that nobody confirmed is over: what b owed at that moment it owes
 * still, up to what the rule as it is again can hold. While the change lasted,
 * its terms were the others. For a bucket that was seen to since, nothing is to
 * be done. 0 if another CPU changed it meanwhile.
 */
static __noinline int bring_back(const struct rule *rule, __u32 version, struct bucket *b)
{
	const struct terms *terms = terms_of(rule, version), *then = terms_of(rule, version ^ 1);
	__u64 most = terms->capacity > terms->penalty ? terms->capacity : terms->penalty;
	__u64 until = change.until, tat = READ_ONCE(b->tat), v, level;
	__u32 charged = READ_ONCE(b->tick);

	if (tat & TAT_TAKEN || !is_from_before(charged))
		return 1;
	if (then->flags & (RULE_UNLIMITED | RULE_ABSENT))
		then = terms;
	v = byte_clock(terms, terms->rebase, until);
	level = level_at(then, v, until, tat, charged);
	if (level > most && (terms->capacity < then->capacity || terms->penalty < then->penalty))
		level = most;
	/* Empty is long ago, also for a CPU whose clock is behind. */
	if (__sync_val_compare_and_swap(&b->tat, tat, level ? v + level : v - (1ULL << 61)) != tat)
		return 0;
	WRITE_ONCE(b->tick, tick(until) + 1);
	return 1;
}

/* No key has it, and nobody is about to give it to one. */
static __always_inline bool is_free(const struct bucket *b)
{
	return !READ_ONCE(b->print) && !READ_ONCE(b->tat);
}

/*
 * Which slot of a line a new key should take: one that no key has, or else one
 * that is drained, its home first, lest two keys keep taking the same one from
 * each other. LINE_SLOTS if there is none. Not inlined, so that to the verifier
 * any slot may be the answer.
 */
__noinline __u32 spare_slot(__u32 number, __u32 print, __u64 now)
{
	struct line *line = bpf_map_lookup_elem(&table, &number);
	__u32 i, slot;
	__u64 tat;

	if (!line)
		return LINE_SLOTS;
#pragma unroll
	for (i = 0; i < LINE_SLOTS; i++) {
		slot = (i + home_of(print)) & (LINE_SLOTS - 1);
		if (is_free(&line->slot[slot]))
			return slot;
	}
#pragma unroll
	for (i = 0; i < LINE_SLOTS; i++) {
		slot = (i + home_of(print)) & (LINE_SLOTS - 1);
		tat = READ_ONCE(line->slot[slot].tat);
		if (drained(number * LINE_SLOTS + slot, &line->slot[slot], tat, now))
			return slot;
	}
	return LINE_SLOTS;
}

/* The long way to charge: for a key that has no slot, and for buckets that others are changing. */
struct slow {
	__u64 now;
	__u64 bytes;
	__u64 tat; /* that the packet has left the bucket with */
	__u64 wait; /* units: what is charged is a flow's own bucket, and so much is to leave before the packet */
	__u32 line;  /* the first of the key's, */
	__u32 print; /* and its fingerprint there */
	struct key key; /* for the rule's own bucket only its id */
	__u32 version;	/* of the rule, as version_of resolves it */
	__u32 packets;	/* on the wire */
	__u16 ect;
	__u8 spilled;  /* charged to the spill bucket */
	__u8 in_order; /* it waits, however little its flow sends */
	enum verdict verdict;
};

/* The time for ticks: one ahead after a change that went back, which tells what was charged since. */
static __always_inline __u64 tick_time(const struct slow *s)
{
	return s->version & VERSION_REBASED ? s->now + (1ULL << TICK_BITS) : s->now;
}

/*
 * What a flow owes that owed level when a packet of it came that others are to
 * leave before. If it is sparse (as RFC 8290 has it: it builds no queue of its
 * own) the packet goes ahead, and is charged so much that 2^SPARSE_BITS bytes
 * fill a bucket as big as the queue. Otherwise the flow owes more than that until
 * the packet has left in its turn: none overtakes one of its own flow.
 */
static __always_inline __u64 flow_owes(const struct terms *terms, const struct slow *s, __u64 level,
				       enum verdict *verdict)
{
	__u64 queue = terms->capacity - terms->at_once, owes;

	if (s->bytes <= 1 << SPARSE_BITS && !s->in_order) {
		owes = level + ((queue >> UNIT_BITS) * s->bytes << (UNIT_BITS - SPARSE_BITS));
		if (owes <= queue) {
			*verdict = VERDICT_PASS;
			return owes;
		}
	}
	*verdict = VERDICT_DELAY;
	return s->wait + queue;
}

/* The slots that a key may have are numbered: those of its first line, then those of its second. */
#define KEY_SLOTS (2 * LINE_SLOTS)

static __always_inline __u32 line_with(const struct slow *s, __u32 slot)
{
	return slot < LINE_SLOTS ? s->line : second_line(s->line, s->print);
}

static __always_inline __u32 print_in(const struct slow *s, __u32 slot)
{
	return slot < LINE_SLOTS ? s->print : second_print(s->print);
}

/* 1 if the slot has the fingerprint; the compiler is kept from making a branch of it. */
static __always_inline __u64 slot_is(const struct bucket *b, __u32 print)
{
	__u64 other = READ_ONCE(b->print) ^ print;

	other--;
	asm volatile("" : "+r"(other));
	return other >> 63;
}

/* How many slots of a line have it. */
static __always_inline __u64 slots_with(const struct line *line, __u32 print)
{
	return slot_is(&line->slot[0], print) + slot_is(&line->slot[1], print) + slot_is(&line->slot[2], print) +
	       slot_is(&line->slot[3], print);
}

/*
 * Which slot of a line has it; LINE_SLOTS if none. Without branches: which one
 * it is can not be predicted, and a wrong guess costs more than all of this.
 */
static __always_inline __u32 slot_of(const struct line *line, __u32 print)
{
	__u64 is0 = slot_is(&line->slot[0], print), is1 = slot_is(&line->slot[1], print);
	__u64 is2 = slot_is(&line->slot[2], print), is3 = slot_is(&line->slot[3], print);

	/* Two for a moment, while one of two CPUs gives way: which one is not to be known yet. */
	if (is0 + is1 + is2 + is3 != 1)
		return LINE_SLOTS;
	/* Sums and a mask, as the verifier of Linux 6.1 loses the range of an or. */
	return (is1 + is2 * 2 + is3 * 3) & (LINE_SLOTS - 1);
}

static __always_inline struct bucket *find_slot(struct line *line, __u32 print)
{
	__u32 slot = slot_of(line, print);

	return slot < LINE_SLOTS ? &line->slot[slot] : NULL;
}

/* Whether a slot of a line is changing hands. */
static __always_inline bool is_busy(const struct line *line)
{
	return (READ_ONCE(line->slot[0].tat) | READ_ONCE(line->slot[1].tat) | READ_ONCE(line->slot[2].tat) |
		READ_ONCE(line->slot[3].tat)) & TAT_TAKEN;
}

/*
 * How many slots a key has; KEY_SLOTS if that is not to be known yet, as a slot of
 * its lines is changing hands and they were to be idle. The first line comes first, as
 * buckets move from there to the second.
 */
__noinline __u64 count_slots(struct slow *s, __u32 idle)
{
	__u32 number = s ? s->line : 0, barrier = 0;
	struct line *line = bpf_map_lookup_elem(&table, &number);
	__u64 slots;

	if (!s || !line || (idle && is_busy(line)))
		return KEY_SLOTS;
	slots = slots_with(line, s->print);
	__sync_lock_test_and_set(&barrier, 1);
	number = second_line(s->line, s->print);
	line = bpf_map_lookup_elem(&table, &number);
	if (!line || (idle && is_busy(line)))
		return KEY_SLOTS;
	return slots + slots_with(line, second_print(s->print));
}

/* Takes a slot, of which the bucket is b, if no key has it, or if it is still drained. */
static __always_inline bool take(__u32 slot, struct bucket *b, __u64 now)
{
	__u64 tat = READ_ONCE(b->tat);

	return !(tat & TAT_TAKEN) && (is_free(b) || drained(slot, b, tat, now)) &&
	       __sync_val_compare_and_swap(&b->tat, tat, tat | TAT_TAKEN) == tat;
}

/*
 * Gives a key that has none a slot, if that is still drained. A new bucket is
 * empty, so its first packet conforms; for a flow's own it has yet to be charged.
 * The line is looked up again, as without CAP_PERFMON nothing may be added to a
 * pointer that was passed.
 */
__noinline enum verdict take_slot(struct slow *s, __u32 i)
{
	const struct rule *rule;
	struct line *line;
	struct bucket *b;
	struct key *owner;
	__u32 number, id, slot;
	__u64 tat;

	if (!s)
		return VERDICT_UNSURE;
	/* Copies, as Linux 6.1 takes no other keys here. */
	number = line_with(s, i);
	id = s->key.id;
	slot = number * LINE_SLOTS + (i & (LINE_SLOTS - 1));
	line = bpf_map_lookup_elem(&table, &number);
	rule = rule_of(id);
	owner = bpf_map_lookup_elem(&keys, &slot);
	if (!line || !rule || !owner)
		return VERDICT_UNSURE;
	/* One at a time: another CPU may be taking a slot for the same key. */
	if (count_slots(s, true))
		return VERDICT_AGAIN;
	b = &line->slot[i & (LINE_SLOTS - 1)];
	if (!take(slot, b, s->now))
		return VERDICT_AGAIN;
	*owner = s->key;
	/*
	 * A full barrier between telling and looking: of two CPUs that take two
	 * slots for one key, at least one sees the other and gives way.
	 */
	__sync_lock_test_and_set(&b->print, print_in(s, i));
	if (count_slots(s, false) > 1) {
		WRITE_ONCE(b->print, 0);
		__sync_lock_test_and_set(&b->tat, 0);
		return VERDICT_AGAIN;
	}
	WRITE_ONCE(b->tick, tick(tick_time(s)));
	tat = clock_of(terms_of(rule, s->version), s->version, s->now);
	if (!s->wait)
		tat = s->tat = tat + (s->bytes << UNIT_BITS);
	__sync_lock_test_and_set(&b->tat, tat);
	return s->wait ? VERDICT_AGAIN : VERDICT_PASS;
}

/* No slot of the table. */
#define NO_SLOT (~0U)

/*
 * Takes a slot of the table to which the bucket can move that is in a slot which
 * a key may have: one of its second line.
 */
__noinline __u32 take_next(struct slow *s, __u32 i)
{
	__u32 number = s ? line_with(s, i) : 0, print;
	struct line *line = bpf_map_lookup_elem(&table, &number);

	if (!s || !line)
		return NO_SLOT;
	print = READ_ONCE(line->slot[i & (LINE_SLOTS - 1)].print);
	if (!(print & 1))
		return NO_SLOT;
	number = second_line(number, print);
	i = spare_slot(number, print, s->now);
	line = bpf_map_lookup_elem(&table, &number);
	if (!line || i >= LINE_SLOTS)
		return NO_SLOT;
	number = number * LINE_SLOTS + i;
	return take(number, &line->slot[i], s->now) ? number : NO_SLOT;
}

/*
 * Moves it there, so that the key can have its slot: 1 if that was done. Buckets
 * move from their first line to their second and never back, so whoever looks
 * into the first and then into the second finds them. While one moves it is
 * taken, here and there, so nobody charges it.
 */
__noinline int move_bucket(struct slow *s, __u32 i, __u32 to)
{
	struct key *owner, *next_owner;
	struct line *line, *next_line;
	__u32 number, print, moved = 0;
	struct bucket *b, *next;
	__u64 tat;

	if (!s)
		return 0;
	next_owner = bpf_map_lookup_elem(&keys, &to);
	number = to / LINE_SLOTS;
	next_line = bpf_map_lookup_elem(&table, &number);
	number = line_with(s, i);
	line = bpf_map_lookup_elem(&table, &number);
	i &= LINE_SLOTS - 1;
	b = line ? &line->slot[i] : NULL;
	i += number * LINE_SLOTS;
	owner = bpf_map_lookup_elem(&keys, &i);
	if (!b || !next_line || !owner || !next_owner)
		return 0;
	next = &next_line->slot[to & (LINE_SLOTS - 1)];
	tat = READ_ONCE(b->tat);
	print = READ_ONCE(b->print);
	/* Another bucket may be there now. */
	if (print & 1 && second_line(number, print) == to / LINE_SLOTS && !(tat & TAT_TAKEN) &&
	    __sync_val_compare_and_swap(&b->tat, tat, tat | TAT_TAKEN) == tat) {
		moved = READ_ONCE(b->print) == print;
		if (moved) {
			*next_owner = *owner;
			WRITE_ONCE(next->tick, READ_ONCE(b->tick));
			__sync_lock_test_and_set(&next->print, second_print(print));
			__sync_lock_test_and_set(&next->tat, tat);
			WRITE_ONCE(b->print, 0);
			tat = 0;
		}
		__sync_lock_test_and_set(&b->tat, tat);
	}
	if (!moved)
		__sync_lock_test_and_set(&next->tat, READ_ONCE(next->tat) & ~TAT_TAKEN);
	return moved;
}

/*
 * charge_bucket for any version, on a slot that the key may have, or with KEY_SLOTS
 * on the rule's own bucket; flow_owes for a flow's own. Not static, so that the
 * verifier looks at it once, and not at each way to it.
 */
__noinline enum verdict charge_once(struct slow *s, __u32 slot)
{
	const struct terms *terms;
	enum verdict verdict;
	struct bucket *b;
	struct rule *rule;
	struct line *line;
	__u32 id, number, print = 0;
	__u64 v, tat, owes;

	if (!s)
		return VERDICT_UNSURE;
	id = s->key.id;
	rule = rule_of(id);
	if (!rule)
		return VERDICT_UNSURE;
	b = &rule->own;
	if (slot < KEY_SLOTS) {
		number = line_with(s, slot);
		line = bpf_map_lookup_elem(&table, &number);
		if (!line)
			return VERDICT_UNSURE;
		b = &line->slot[slot & (LINE_SLOTS - 1)];
		print = print_in(s, slot);
	}
	terms = terms_of(rule, s->version);
	if (s->version & VERSION_REBASED && !bring_back(rule, s->version, b))
		return VERDICT_AGAIN;
	v = clock_of(terms, s->version, s->now);
	if (!s->wait)
		return charge_bucket(terms, v, b, print, tick_time(s), s->bytes, s->ect, !s->spilled, &s->tat);
	tat = READ_ONCE(b->tat);
	if (!is_still(b, print, tat))
		return VERDICT_AGAIN;
	owes = flow_owes(terms, s, level_at(terms, v, tick_time(s), tat, READ_ONCE(b->tick)), &verdict);
	return put_level(b, tat, v, owes, tick_time(s), verdict);
}

/* Which of the slots that it may have a key has; KEY_SLOTS for none. */
static __always_inline __u32 slot_of_key(const struct slow *s)
{
	struct line *line;
	__u32 number, slot;

	number = s->line;
	line = bpf_map_lookup_elem(&table, &number);
	if (!line)
		return KEY_SLOTS;
	slot = slot_of(line, s->print);
	if (slot < LINE_SLOTS)
		return slot;
	number = second_line(s->line, s->print);
	line = bpf_map_lookup_elem(&table, &number);
	if (!line)
		return KEY_SLOTS;
	return LINE_SLOTS + slot_of(line, second_print(s->print));
}

/* And which it should take if it has none. */
static __always_inline __u32 slot_for_key(const struct slow *s)
{
	__u32 slot = spare_slot(s->line, s->print, s->now);

	if (slot < LINE_SLOTS)
		return slot;
	return LINE_SLOTS + spare_slot(second_line(s->line, s->print), s->print, s->now);
}

static long try_slot(__u64 i, struct slow *s)
{
	__u32 slot = slot_of_key(s), to;

	(void)i;
	if (slot < KEY_SLOTS) {
		s->verdict = charge_once(s, slot);
		return s->verdict != VERDICT_AGAIN;
	}
	slot = slot_for_key(s);
	if (slot < KEY_SLOTS) {
		s->verdict = take_slot(s, slot);
		return s->verdict != VERDICT_AGAIN;
	}
	s->verdict = VERDICT_AGAIN;
	for (slot = 0; slot < KEY_SLOTS; slot++) {
		to = take_next(s, slot);
		if (to != NO_SLOT && move_bucket(s, slot, to))
			return 0;
	}
	s->verdict = VERDICT_UNSURE;
	return 1;
}

static long try_own(__u64 i, struct slow *s)
{
	struct rule *rule;

	(void)i;
	s->verdict = charge_once(s, KEY_SLOTS);
	if (s->verdict == VERDICT_AGAIN)
		return 0;
	rule = rule_of(s->key.id);
	if (rule && s->spilled)
		__sync_fetch_and_add(&rule->spilled_packets, s->packets);
	return 1;
}

#endif
