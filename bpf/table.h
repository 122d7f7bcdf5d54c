/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The table in which bucket keys find their buckets.
 *
 * An empty bucket holds no state, so its slot may go to any key. Nothing is
 * evicted, no timer runs, and a spray of new keys can take only slots with empty
 * buckets.
 *
 * A key has its slot in one of two lines of the table. It allocates one of the
 * first if it can, else one of the second; where both are full, a bucket that has
 * its slot in its own first line moves to its second.
 *
 * A slot changes hands in three steps: CAS sets TAT_BUSY, which only succeeds
 * while the bucket is as empty as it was when it was looked at; the key and its
 * fingerprint are written; a new TAT without TAT_BUSY hands it over. Whoever
 * charges a bucket looks at the fingerprint again between reading its TAT and the
 * CAS, so no charge goes astray.
 */
#ifndef SHAPECTL_TABLE_H
#define SHAPECTL_TABLE_H

#include "bucket.h"

/* How often to try a bucket that others keep changing, or a rule; beyond that it is contended. */
#define TRIES 16

/* More than the clocks of two CPUs can differ. */
#define SKEW_NS (1 << 20)

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

static __always_inline struct line *line_at(__u32 number)
{
	return &table[MASKED(number, line_mask)];
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
 * Where a key has its slot if its first line had none left: another line, which
 * its fingerprint leads to from the first. There the fingerprint is another one,
 * too, so that two keys are as unlikely to be taken for each other as with one line.
 */
static __always_inline __u32 second_line(__u32 line, __u32 fingerprint)
{
	return MASKED(line ^ fingerprint >> 3, line_mask);
}

static __always_inline __u32 second_fingerprint(__u32 fingerprint)
{
	return fingerprint > 1 ? fingerprint - 1 : 2; /* 0 is no fingerprint */
}

/* The slot of a line that a key takes if it can, and is looked for in first. */
static __always_inline __u32 home_of(__u32 fingerprint)
{
	return fingerprint >> 1 & (LINE_SLOTS - 1);
}

/*
 * Whether any key may have the slot: its bucket is empty by the clock of the rule
 * that its key belongs to, and for long enough that no CPU whose clock is behind
 * would think otherwise.
 */
static __noinline int is_empty(__u32 slot, const struct bucket *b, __u64 tat, __u64 now)
{
	__u32 charged = READ_ONCE(b->tick);
	const struct params *params;
	const struct rule *rule;
	const struct key *key;
	struct version version;

	key = bpf_map_lookup_elem(&keys, &slot);
	if (!key)
		return 0;
	rule = rule_of(key->id);
	if (!rule)
		return 0;
	now = now < SKEW_NS ? 0 : now - SKEW_NS;
	version = version_in(rule, phase_at(now));
	params = params_of(rule, version.index);
	/* Its level may be more than the reverted rule can hold, but for no longer than if charged then. */
	if (version.reverted && is_from_before(charged))
		charged = tick(change.until);
	return !level_at(params, clock_of(rule, version.index, version.reverted, now), now, tat, charged);
}

/* No key has it, and nobody is allocating it. */
static __always_inline bool is_free(const struct bucket *b)
{
	return !READ_ONCE(b->fingerprint) && !READ_ONCE(b->tat);
}

/*
 * Which slot of a line a new key should allocate: one that no key has, or else an
 * empty one, its home first, lest two keys keep taking the same one from each
 * other. LINE_SLOTS if there is none. Not inlined, so that to the verifier any
 * slot may be the answer.
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
		if (is_empty(number * LINE_SLOTS + slot, &line->slot[slot], tat, now))
			return slot;
	}
	return LINE_SLOTS;
}

/* Sets TAT_BUSY of a slot, of which the bucket is b, if no key has it, or if it is still empty. */
static __always_inline bool lock_slot(__u32 slot, struct bucket *b, __u64 now)
{
	__u64 tat = READ_ONCE(b->tat);

	return !(tat & TAT_BUSY) && (is_free(b) || is_empty(slot, b, tat, now)) &&
	       __sync_val_compare_and_swap(&b->tat, tat, tat | TAT_BUSY) == tat;
}

/* 1 if the slot has the fingerprint; the compiler is kept from making a branch of it. */
static __always_inline __u64 slot_is(const struct bucket *b, __u32 fingerprint)
{
	__u64 other = READ_ONCE(b->fingerprint) ^ fingerprint;

	other--;
	asm volatile("" : "+r"(other));
	return other >> 63;
}

/* How many slots of a line have it. */
static __always_inline __u64 slots_with(const struct line *line, __u32 fingerprint)
{
	return slot_is(&line->slot[0], fingerprint) + slot_is(&line->slot[1], fingerprint) +
	       slot_is(&line->slot[2], fingerprint) + slot_is(&line->slot[3], fingerprint);
}

/*
 * Which slot of a line has it; LINE_SLOTS if none. Without branches: which one
 * it is cannot be predicted, and a wrong guess costs more than all of this.
 */
static __always_inline __u32 slot_of(const struct line *line, __u32 fingerprint)
{
	__u64 is0 = slot_is(&line->slot[0], fingerprint), is1 = slot_is(&line->slot[1], fingerprint);
	__u64 is2 = slot_is(&line->slot[2], fingerprint), is3 = slot_is(&line->slot[3], fingerprint);

	/* Two for a moment, while one of two CPUs gives way: which one is not known yet. */
	if (is0 + is1 + is2 + is3 != 1)
		return LINE_SLOTS;
	/* Sums and a mask, as the verifier of Linux 6.1 loses the range of an or. */
	return (is1 + is2 * 2 + is3 * 3) & (LINE_SLOTS - 1);
}

static __always_inline struct bucket *find_slot(struct line *line, __u32 fingerprint)
{
	__u32 slot = slot_of(line, fingerprint);

	return slot < LINE_SLOTS ? KEPT(&line->slot[slot]) : NULL;
}

/* The bucket of a key, if it is in the key's first line, or with second in its second, and the fingerprint there. */
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

/* Whether a slot of a line is changing hands. */
static __always_inline bool is_busy(const struct line *line)
{
	return (READ_ONCE(line->slot[0].tat) | READ_ONCE(line->slot[1].tat) | READ_ONCE(line->slot[2].tat) |
		READ_ONCE(line->slot[3].tat)) & TAT_BUSY;
}

#endif
