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
 * reading the TAT and the CAS, so no charge goes to a wrong key.
 */
#ifndef SHAPECTL_TABLE_H
#define SHAPECTL_TABLE_H

#include "bucket.h"
#include "share.h"

/* Attempts to update a bucket before it counts as contended. */
#define TRIES 16

/* An upper bound for the difference between the clocks of two CPUs. */
#define SKEW_NS (1 << 20)

/* A summand of NH (Black et al., UMAC; RFC 4418, 5.2). With secret words two keys collide with probability 2^-32. */
#define NH(i, a, b) \
	((__u64)((__u32)(a) + hook.secret[2 * (i)]) * (__u32)((__u32)(b) + hook.secret[2 * (i) + 1]))

/* Spreads the result of NH over all bits. */
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
	__u32 ports = (__u32)k->dport << 16 | k->sport; /* in the order of a packet */

	if (k->family == 6)
		return hash6(salt, k->proto, ports, k->src, k->dst);
	return hash4(salt, k->proto, ports, k->src[0], k->dst[0]);
}

static __always_inline struct line *line_at(__u32 number)
{
	return &table[MASKED(number, line_mask)];
}

/* The bucket in a slot of the table, by its number. */
static __always_inline struct bucket *slot_at(__u32 number)
{
	return &line_at(number / LINE_SLOTS)->slot[number & (LINE_SLOTS - 1)];
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

static __always_inline struct bucket *second_of(__u32 slot)
{
	return KEPT(&seconds[MASKED(slot / LINE_SLOTS, seconds_mask)].slot[slot & (LINE_SLOTS - 1)]);
}

/* is_empty for the second bucket of a slot. If the rule has no colours any more, its id may be that of another rule by now. */
static __always_inline bool is_second_empty(__u32 slot, const struct key *key, __u64 now)
{
	const struct bucket *b = second_of(slot);
	__u32 charged = READ_ONCE(b->tick);
	const struct rule *rule = rule_at(&key->second);
	struct version version;

	if (!rule)
		return true;
	version = version_in(rule, phase_at(now));
	if (version.reverted && is_from_before(charged))
		charged = tick(change.until);
	return !level_at(params_of(rule, version.index), clock_of(rule, version.index, version.reverted, now), now, READ_ONCE(b->tat),
			 charged);
}

/*
 * Whether the slot may be allocated: its bucket is empty by the clock of the key's
 * rule, and has been for long enough that CPUs with a slower clock agree.
 */
__noinline int is_empty(__u32 slot, __u64 tat, __u64 now)
{
	const struct cold_params *cold;
	const struct params *params;
	const struct share *share;
	const struct rule *rule;
	const struct key *key;
	struct version version;
	__u32 charged;
	__u64 v;

	key = bpf_map_lookup_elem(&keys, &slot);
	if (!key)
		return 0;
	now = now < SKEW_NS ? 0 : now - SKEW_NS;
	if (HOOK(colours) && key->paired && !is_second_empty(slot, key, now))
		return 0;
	rule = rule_at(&key->id);
	if (!rule)
		return 0;
	version = version_in(rule, phase_at(now));
	if (HOOK(pools) && key->sharer) {
		cold = &rule->cold[version.index & 1];
		share = share_of(cold);
		return !share || !ahead_of(share, cold, tat);
	}
	charged = READ_ONCE(slot_at(slot)->tick);
	/* Its level may exceed the capacity of the reverted rule, but drains as if charged at that time. */
	if (version.reverted && is_from_before(charged))
		charged = tick(change.until);
	v = rated_clock(rule, &version, now, &params);
	return !level_at(params, v, now, tat, charged);
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
	struct line *line = line_at(number);
	__u32 i, slot;
	__u64 tat;

#pragma unroll
	for (i = 0; i < LINE_SLOTS; i++) {
		slot = (i + home_of(fingerprint)) & (LINE_SLOTS - 1);
		if (is_free(&line->slot[slot]))
			return slot;
	}
#pragma unroll
	for (i = 0; i < LINE_SLOTS; i++) {
		slot = (i + home_of(fingerprint)) & (LINE_SLOTS - 1);
		tat = READ_ONCE(line->slot[slot].tat);
		if (is_empty(number * LINE_SLOTS + slot, tat, now))
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

static __always_inline struct bucket *find_slot(struct line *line, __u32 fingerprint)
{
	__u32 slot = slot_of(line, fingerprint);

	return slot < LINE_SLOTS ? KEPT(&line->slot[slot]) : NULL;
}

/* The bucket of a key in its first line, or with second also in its second, and its fingerprint there. */
static __always_inline struct bucket *find_bucket(__u64 hash, bool second, __u32 *fingerprint)
{
	struct line *line = line_at(hash);
	struct bucket *slot;

	*fingerprint = fingerprint_of(hash);
	slot = KEPT(&line->slot[home_of(*fingerprint)]);
	if (READ_ONCE(slot->fingerprint) == *fingerprint)
		return slot;
	slot = find_slot(line, *fingerprint);
	if (slot || !second)
		return slot;
	line = line_at(second_line(hash, *fingerprint));
	*fingerprint = second_fingerprint(*fingerprint);
	return find_slot(line, *fingerprint);
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
	__u32 number = line_of(hash), fingerprint = fingerprint_of(hash), slot = home_of(fingerprint);
	struct line *line = line_at(number);

	if (READ_ONCE(line->slot[slot].fingerprint) != fingerprint)
		slot = slot_of(line, fingerprint);
	if (slot == LINE_SLOTS) {
		number = second_line(number, fingerprint);
		fingerprint = second_fingerprint(fingerprint);
		slot = slot_of(line_at(number), fingerprint);
	}
	return slot < LINE_SLOTS ? slot_handle(number * LINE_SLOTS + slot, fingerprint) : 0;
}

/* The fingerprint of a second bucket, by that of the key and the id of the second limit. */
static __always_inline __u32 second_bucket_print(__u32 fingerprint, __u32 id)
{
	return fingerprint ? fingerprint ^ id << 1 : 0;
}

/* Empties the second bucket of a key in a slot that is locked. */
static __noinline void clear_second(__u32 slot, __u32 fingerprint, const struct key *key, __u64 now)
{
	struct bucket *b = second_of(slot);
	const struct rule *rule = rule_at(&key->second);
	struct version version;
	__u64 v;

	if (!rule)
		return;
	version = version_in(rule, phase_at(now));
	v = clock_of(rule, version.index, version.reverted, now);
	WRITE_ONCE(b->fingerprint, second_bucket_print(fingerprint, key->second));
	/* A TAT in the past, for CPUs with a slower clock. After a revert, there is nothing to revert. */
	WRITE_ONCE(b->tick, tick(now) + version.reverted);
	__sync_lock_test_and_set(&b->tat, v - (1ULL << 61));
}

/* Whether a slot of a line is being allocated or moved. */
static __always_inline bool is_busy(const struct line *line)
{
	return (READ_ONCE(line->slot[0].tat) | READ_ONCE(line->slot[1].tat) | READ_ONCE(line->slot[2].tat) |
		READ_ONCE(line->slot[3].tat)) & TAT_BUSY;
}

#endif
