/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The hash table of buckets, by bucket key.
 *
 * An empty bucket holds no state, so its slot may be allocated to any key. Nothing
 * is evicted, no timer runs, and a flood of new keys can only get slots with empty
 * buckets.
 *
 * A key has its slot in one of two lines of the table. It gets a slot of its first
 * line if possible, else of its second. If both are full, a bucket in one of them
 * that is in its first line moves to its second line.
 *
 * A slot is allocated in three steps. A CAS locks it by TAT_BUSY, if the bucket is
 * still empty. Then the key and its fingerprint are written. A new TAT without
 * TAT_BUSY unlocks it. Whoever charges a bucket checks the fingerprint between
 * reading the TAT and the CAS, so no charge goes to a wrong key. (A CPU that reorders
 * loads, as arm64 may, can charge one packet to the next key of a slot.)
 *
 * The key that is sought is that of the packet: work.hash and, for a new slot, work.key.
 */
#ifndef SHAPECTL_TABLE_H
#define SHAPECTL_TABLE_H

#include "flow.h"
#include "look.h"
#include "share.h"

/* An upper bound for the difference between the clocks of two CPUs. */
#define SKEW_NS (1 << 20)

static __always_inline struct line *line_at(__u32 number)
{
	return &table[MASKED(number, line_mask)];
}

/* The bucket in a slot of the table, by its number. */
static __always_inline struct bucket *slot_at(__u32 number)
{
	return &((struct bucket *)table)[MASKED(number, slot_mask)];
}

static __always_inline __u32 line_of(__u64 hash)
{
	return MASKED(hash, line_mask);
}

static __always_inline __u32 fingerprint_of(__u64 hash)
{
	return hash >> 32 | 1;
}

/*
 * The line of a key whose first line was full, computed from that line and the
 * fingerprint. The key has another fingerprint there, so two lines do not make it
 * more likely that two keys are confused.
 */
static __always_inline __u32 second_line(__u32 line, __u32 fingerprint)
{
	return MASKED(line ^ fingerprint >> 3, line_mask);
}

static __always_inline __u32 second_fingerprint(__u32 fingerprint)
{
	return fingerprint > 1 ? fingerprint - 1 : 2; /* 0 is no fingerprint */
}

/* The preferred slot of a key in a line, which is searched first. */
static __always_inline __u32 home_of(__u32 fingerprint)
{
	return fingerprint >> 1 & (LINE_SLOTS - 1);
}

/* Whether a bucket of a limit has what a new one has. The id of a limit that is gone may be that of another one by now. */
static __always_inline bool is_empty_by(__u32 id, __u32 phase, __u64 now, __u64 tat, __u32 charged)
{
	const struct rule *rule = rule_of(id);
	const struct params *params;
	const struct clock *c;
	__u32 set;
	__u64 v;

	if (!rule)
		return true;
	set = set_in(rule, phase);
	if (params_of(rule, set)->flags & RULE_ABSENT) /* it is about to come, or may come back */
		return false;
	params = rated(rule, &set, now);
	c = clock_of(rule, params, set);
	v = clock_at(c, params, now);
	if (HOOK(also) && is_over(cold_of(params_of(rule, set))->calendar, now, charged))
		return true;
	return level_of(c, params, set, v, now, tat, charged) == least_level(rule, params, set, now);
}

/*
 * Whether the slot may be allocated: its bucket is empty by the clock of the key's
 * limit, and has been for long enough that CPUs with a slower clock agree.
 */
__noinline int is_empty(__u32 slot, __u64 tat, __u64 now)
{
	const struct share *share;
	const struct rule *rule;
	const struct key *key;
	__u32 phase = phase_at(now); /* an edit is not in force before it begins */

	key = bpf_map_lookup_elem(&keys, &slot);
	if (!key)
		return 0;
	now = now < SKEW_NS ? 0 : now - SKEW_NS;
	if (HOOK(pools) && key->sharer) {
		rule = rule_of(key->id);
		if (!rule)
			return 0;
		share = share_of(cold_of(params_of(rule, set_in(rule, phase)))->share);
		/* Without packets, nobody advances the clock: it begins anew then, behind nobody. */
		return !share || (__s64)(now - READ_ONCE(share->last)) > 4LL * REST_NS || !ahead_of(share, tat);
	}
	return is_empty_by(key->id, phase, now, tat, READ_ONCE(slot_at(slot)->tick));
}

/* Whether no key has the slot, and no CPU is allocating it. */
static __always_inline bool is_free(const struct bucket *b)
{
	return !READ_ONCE(b->fingerprint) && !READ_ONCE(b->tat);
}

/*
 * The slot of a line to allocate for a new key, or LINE_SLOTS if there is none: a
 * free slot, else one with an empty bucket. The search starts at the key's home, so
 * that two keys do not keep replacing each other. Not inlined, so that the verifier
 * assumes any result.
 */
__noinline __u64 spare_slot(__u32 number, __u32 fingerprint, __u64 now)
{
	const struct line *line = line_at(number);
	__u32 i, slot;

	for (i = 0; i < 2 * LINE_SLOTS; i++) {
		slot = (i + home_of(fingerprint)) & (LINE_SLOTS - 1);
		if (i < LINE_SLOTS ? is_free(&line->slot[slot]) :
				     is_empty(number * LINE_SLOTS + slot, READ_ONCE(line->slot[slot].tat), now))
			return slot;
	}
	return LINE_SLOTS;
}

/* Sets TAT_BUSY of a slot with bucket b, if the slot is free or the bucket is still empty. */
static __always_inline bool lock_slot(__u32 slot, struct bucket *b, __u64 now)
{
	__u64 tat = READ_ONCE(b->tat);

	return !(tat & TAT_BUSY) && (is_free(b) || is_empty(slot, tat, now)) &&
	       __sync_val_compare_and_swap(&b->tat, tat, tat | TAT_BUSY) == tat;
}

/* 1 if the slot has the fingerprint, else 0. The asm keeps the compiler from using a branch. */
static __always_inline __u64 slot_is(const struct bucket *b, __u32 fingerprint)
{
	__u64 other = READ_ONCE(b->fingerprint) ^ fingerprint;

	other--;
	asm volatile("" : "+r"(other));
	return other >> 63;
}

/* The number of slots of a line with the fingerprint. */
static __always_inline __u64 slots_with(const struct line *line, __u32 fingerprint)
{
	return slot_is(&line->slot[0], fingerprint) + slot_is(&line->slot[1], fingerprint) +
	       slot_is(&line->slot[2], fingerprint) + slot_is(&line->slot[3], fingerprint);
}

/*
 * The slot of a line with the fingerprint, or LINE_SLOTS. Without branches: the CPU
 * cannot predict the slot, and a misprediction costs more than the sums.
 */
static __always_inline __u32 slot_of(const struct line *line, __u32 fingerprint)
{
	__u64 is0 = slot_is(&line->slot[0], fingerprint), is1 = slot_is(&line->slot[1], fingerprint);
	__u64 is2 = slot_is(&line->slot[2], fingerprint), is3 = slot_is(&line->slot[3], fingerprint);

	/* There are two for a moment, until one of two CPUs frees its slot. */
	if (is0 + is1 + is2 + is3 != 1)
		return LINE_SLOTS;
	/* Sums and a mask, because the verifier of Linux 6.1 loses the range of an or. */
	return (is1 + is2 * 2 + is3 * 3) & (LINE_SLOTS - 1);
}

/* A slot of the table and its fingerprint, in one word; never 0. */
static __always_inline __u64 slot_handle(__u32 slot, __u32 fingerprint)
{
	return (__u64)slot << 32 | fingerprint;
}

static __always_inline struct bucket *bucket_of(__u64 handle)
{
	return KEPT(slot_at(handle >> 32));
}

/* The handle of a key's slot, or 0. */
static __always_inline __u64 find_handle(__u64 hash)
{
	__u32 number = line_of(hash), fingerprint = fingerprint_of(hash), slot = number * LINE_SLOTS + home_of(fingerprint);

	if (likely(READ_ONCE(slot_at(slot)->fingerprint) == fingerprint))
		return slot_handle(slot, fingerprint);
	slot = slot_of(line_at(number), fingerprint);
	if (slot == LINE_SLOTS) {
		number = second_line(number, fingerprint);
		fingerprint = second_fingerprint(fingerprint);
		slot = slot_of(line_at(number), fingerprint);
	}
	return slot < LINE_SLOTS ? slot_handle(number * LINE_SLOTS + slot, fingerprint) : 0;
}

/* Whether a slot of a line is being allocated or moved. */
static __always_inline bool is_busy(const struct line *line)
{
	return (READ_ONCE(line->slot[0].tat) | READ_ONCE(line->slot[1].tat) | READ_ONCE(line->slot[2].tat) |
		READ_ONCE(line->slot[3].tat)) & TAT_BUSY;
}

/* Numbers the slots that a key may have: first those of its first line, then those of its second. */
#define KEY_SLOTS (2 * LINE_SLOTS)

static __always_inline __u32 line_with(__u64 hash, __u32 slot)
{
	return slot < LINE_SLOTS ? line_of(hash) : second_line(hash, fingerprint_of(hash));
}

static __always_inline __u32 fingerprint_in(__u64 hash, __u32 slot)
{
	return slot < LINE_SLOTS ? fingerprint_of(hash) : second_fingerprint(fingerprint_of(hash));
}

/*
 * The number of slots that a key has. With idle, KEY_SLOTS if a slot of its lines
 * is locked, as the number is not known then. Reads the first line first, because
 * buckets move from there to the second.
 */
__noinline __u64 count_slots(__u64 hash, __u32 idle)
{
	const struct line *line = line_at(line_of(hash));
	__u32 barrier = 0;
	__u64 slots;

	if (idle && is_busy(line))
		return KEY_SLOTS;
	slots = slots_with(line, fingerprint_of(hash));
	__sync_lock_test_and_set(&barrier, 1);
	line = line_at(line_with(hash, LINE_SLOTS));
	if (idle && is_busy(line))
		return KEY_SLOTS;
	return slots + slots_with(line, fingerprint_in(hash, LINE_SLOTS));
}

/* Not a value of any clock, because TAT_BUSY is set. */
#define NO_CLOCK (~0ULL)

/* The TAT of an empty bucket of the key, which is that of a sharer or in a limit. */
__noinline __u64 empty_tat(__u32 cpu)
{
	struct work *w = work_of(cpu);
	const struct params *params;
	const struct share *share;
	const struct rule *rule;
	__u32 set;

	rule = rule_of(w->key.id);
	if (!rule)
		return NO_CLOCK;
	set = set_in(rule, w->phase);
	params = params_of(rule, set);
	if (HOOK(pools) && w->key.sharer) {
		share = share_of(cold_of(params)->share);
		return share ? new_tat(share) : NO_CLOCK;
	}
	params = rated(rule, &set, w->now);
	return clock_at(clock_of(rule, params, set), params, w->now) - LONG_AGO; /* also for packets with an earlier time */
}

enum got {
	GOT_NONE,    /* try again: a slot with an empty bucket, or another CPU was faster, or a bucket has moved */
	GOT_SLOT,    /* it had one, */
	GOT_CHARGED, /* and its bucket is charged */
	GOT_NO_SLOT,
};

/* Allocates a slot to a key that has none, if the slot is still empty. The key finds it when it tries again. */
__noinline int allocate_slot(__u32 cpu, __u32 i)
{
	struct work *w = work_of(cpu);
	__u32 number = line_with(w->hash, i), slot = number * LINE_SLOTS + (i & (LINE_SLOTS - 1));
	struct key *owner = bpf_map_lookup_elem(&keys, &slot);
	struct bucket *b;
	__u64 tat;

	/* Another CPU may be allocating a slot to the same key. */
	if (!owner || count_slots(w->hash, true))
		return GOT_NONE;
	tat = empty_tat(cpu);
	b = slot_at(slot);
	if (tat == NO_CLOCK || !lock_slot(slot, b, w->now))
		return GOT_NONE;
	*owner = w->key;
	/*
	 * A full barrier between the store and the count: if two CPUs allocate two
	 * slots to one key, at least one of them sees both and frees its slot.
	 */
	__sync_lock_test_and_set(&b->fingerprint, fingerprint_in(w->hash, i));
	if (count_slots(w->hash, false) > 1) {
		WRITE_ONCE(b->fingerprint, 0);
		__sync_lock_test_and_set(&b->tat, 0);
		return GOT_NONE;
	}
	WRITE_ONCE(b->tick, tick(w->now));
	__sync_lock_test_and_set(&b->tat, tat);
	return GOT_NONE;
}

/* Not a slot of the table. */
#define NO_SLOT (~0U)

/*
 * Locks a slot of the table to which the bucket in slot i of the key's lines can
 * move: a spare slot of that bucket's second line.
 */
static __always_inline __u32 lock_next(__u64 hash, __u32 i, __u64 now)
{
	__u32 number = line_with(hash, i), fingerprint;
	__u64 spare;

	fingerprint = READ_ONCE(line_at(number)->slot[i & (LINE_SLOTS - 1)].fingerprint);
	if (!(fingerprint & 1))
		return NO_SLOT;
	number = second_line(number, fingerprint);
	spare = spare_slot(number, fingerprint, now);
	if (spare >= LINE_SLOTS)
		return NO_SLOT;
	number = number * LINE_SLOTS + spare;
	return lock_slot(number, slot_at(number), now) ? number : NO_SLOT;
}

/*
 * Moves the bucket to the locked slot, which frees its own for the key. Returns whether it
 * did. Buckets only move from their first line to their second, so a CPU that reads
 * the first line and then the second finds them. Both slots are locked during the
 * move, so nobody charges the bucket.
 */
__noinline int move_bucket(__u64 hash, __u32 i, __u32 to)
{
	__u32 number = line_with(hash, i), from = number * LINE_SLOTS + (i & (LINE_SLOTS - 1)), fingerprint;
	struct key *owner = bpf_map_lookup_elem(&keys, &from), *next_owner = bpf_map_lookup_elem(&keys, &to);
	struct bucket *b = slot_at(from), *next = slot_at(to);
	__u64 tat;

	if (!owner || !next_owner)
		return false;
	tat = READ_ONCE(b->tat);
	fingerprint = READ_ONCE(b->fingerprint);
	/* The slot may have another bucket by now. */
	if (fingerprint & 1 && second_line(number, fingerprint) == to / LINE_SLOTS && !(tat & TAT_BUSY) &&
	    __sync_val_compare_and_swap(&b->tat, tat, tat | TAT_BUSY) == tat) {
		if (READ_ONCE(b->fingerprint) == fingerprint) {
			*next_owner = *owner;
			WRITE_ONCE(next->tick, READ_ONCE(b->tick));
			__sync_lock_test_and_set(&next->fingerprint, second_fingerprint(fingerprint));
			__sync_lock_test_and_set(&next->tat, tat);
			WRITE_ONCE(b->fingerprint, 0);
			__sync_lock_test_and_set(&b->tat, 0);
			return true;
		}
		__sync_lock_test_and_set(&b->tat, tat);
	}
	__sync_lock_test_and_set(&next->tat, READ_ONCE(next->tat) & ~TAT_BUSY);
	return false;
}

/* Gets a slot for the key. */
__noinline int get_slot(__u32 cpu)
{
	struct work *w = work_of(cpu);
	__u32 slot, to;

	slot = spare_slot(line_of(w->hash), fingerprint_of(w->hash), w->now);
	if (slot == LINE_SLOTS)
		slot += spare_slot(line_with(w->hash, LINE_SLOTS), fingerprint_of(w->hash), w->now);
	if (slot < KEY_SLOTS)
		return allocate_slot(cpu, slot);
	for (slot = 0; slot < KEY_SLOTS; slot++) {
		to = lock_next(w->hash, slot, w->now);
		if (to != NO_SLOT && move_bucket(w->hash, slot, to))
			return GOT_NONE;
	}
	return GOT_NO_SLOT;
}

#endif
