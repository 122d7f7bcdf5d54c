/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Buckets: how one is charged, and the table in which keys find theirs.
 *
 * A drained bucket says nothing, so its slot may go to any key. Nothing is
 * evicted, no timer runs, and a spray of new keys can take only slots that
 * nobody owes anything on.
 *
 * A slot changes hands in three steps: CAS sets TAT_TAKEN, which only succeeds
 * while the bucket is as drained as it was when it was looked at; the key and
 * its fingerprint are written; a new TAT without TAT_TAKEN hands it over. Whoever
 * charges a bucket looks at the fingerprint again afterwards, so a charge never
 * goes astray unnoticed.
 */
#ifndef SHAPECTL_BUCKET_H
#define SHAPECTL_BUCKET_H

#include <stdbool.h>
#include "abi.h"
#include "maps.h"

#define READ_ONCE(x) (*(volatile typeof(x) *)&(x))
#define WRITE_ONCE(x, v) (*(volatile typeof(x) *)&(x) = (v))

/* Bounds of two loops that end at once but for contention; beyond: unsure, or the spare bucket. */
#define CHARGE_TRIES 16
#define FIND_TRIES 4

enum verdict {
	VERDICT_PASS,
	VERDICT_EXCESS,
	VERDICT_MARK,
	VERDICT_UNSURE,
	VERDICT_MOVED, /* the slot changed hands: look again */
};

/* What one packet asks of a bucket. */
struct charge {
	__u64 now;   /* ns */
	__u64 v;     /* units: the rule's clock at now */
	__u64 cost;  /* units */
	__u32 print; /* the bucket must have this fingerprint; 0 for a rule's own */
	bool ect;    /* may be marked instead of dropped */
};

/* A meter's answer: the level it leaves, and whether the packet fits. */
struct metered {
	__u64 level; /* units */
	bool conforms;
};

/* Each of gcra.c and leaky.c defines it. */
static struct metered meter(const struct rule *rule, __u64 level, __u64 cost);

static __always_inline __u32 tick(__u64 now)
{
	return now >> TICK_BITS;
}

/* slope * now without its 32 fraction bits: exact, as the product modulo 2^96 would be. */
static __always_inline __u64 byte_clock(const struct rule *rule, __u64 now)
{
	__u64 high = now >> 32, low = (__u32)now;
	__u64 v = high * rule->slope + low * (rule->slope >> 32) + (low * (__u32)rule->slope >> 32);

	return (rule->base + v) & ~TAT_TAKEN;
}

/* Bytes still owed, in units. A clock that steps back by up to a tick is no reason to forgive any. */
static __always_inline __u64 level_at(const struct rule *rule, __u64 v, __u64 now, __u64 tat, __u32 charged)
{
	__u64 level = tat - v;

	if ((__s64)level <= 0 || !tat || (__u32)(tick(now) + 1 - charged) > rule->idle)
		return 0;
	return level;
}

/*
 * Charges b, unless the packet is excess. One CAS decides, so two CPUs never
 * admit more than one would; excess without a penalty writes nothing at all.
 */
__noinline enum verdict charge(const struct rule *rule, struct bucket *b, const struct charge *c)
{
	__u64 tat, seen, level;
	enum verdict verdict;
	struct metered m;
	int i;

	if (!rule || !b || !c)
		return VERDICT_UNSURE;
	tat = READ_ONCE(b->tat);
	for (i = 0; i < CHARGE_TRIES; i++) {
		if (tat & TAT_TAKEN)
			return VERDICT_MOVED;
		level = level_at(rule, c->v, c->now, tat, READ_ONCE(b->tick));
		m = meter(rule, level, c->cost);
		verdict = VERDICT_PASS;
		if (!m.conforms) {
			verdict = VERDICT_EXCESS;
			if (c->ect && level + c->cost <= 2 * rule->capacity) {
				verdict = VERDICT_MARK;
				m.level = level + c->cost;
			}
			if (m.level == level)
				return READ_ONCE(b->print) == c->print ? verdict : VERDICT_MOVED;
		}
		/* Before the CAS: a charge must not be seen with the tick of an older one. */
		if (READ_ONCE(b->tick) != tick(c->now))
			WRITE_ONCE(b->tick, tick(c->now));
		seen = __sync_val_compare_and_swap(&b->tat, tat, c->v + m.level);
		if (seen == tat)
			return READ_ONCE(b->print) == c->print ? verdict : VERDICT_MOVED;
		tat = seen;
	}
	return VERDICT_UNSURE;
}

/* murmur3's finalizer (Appleby, public domain): every bit of the sum moves every bit of the result. */
static __always_inline __u64 mix(__u64 h)
{
	h ^= h >> 33;
	h *= 0xff51afd7ed558ccdULL;
	h ^= h >> 33;
	h *= 0xc4ceb9fe1a85ec53ULL;
	h ^= h >> 33;
	return h;
}

/* One term of NH (Black et al., UMAC; RFC 4418, 5.2): with secret words, two keys collide with chance 2^-32. */
#define NH(i, a, b) \
	((__u64)((__u32)(a) + hook.secret[2 * (i)]) * (__u32)((__u32)(b) + hook.secret[2 * (i) + 1]))

static __always_inline __u64 hash_key(const struct key *k, __u32 salt)
{
	__u64 h = NH(0, k->src[0], k->dst[0]) + NH(1, (__u32)k->sport << 16 | k->dport, salt ^ k->proto);

	if (k->family == 6)
		h += NH(2, k->src[1], k->dst[1]) + NH(3, k->src[2], k->dst[2]) + NH(4, k->src[3], k->dst[3]);
	return mix(h);
}

/* The version of a rule that is in force. */
static __always_inline const struct rule *rule_of(__u32 id, const struct own *own)
{
	__u32 index = id * 2 + (READ_ONCE(own->version) & 1);

	return bpf_map_lookup_elem(&rules, &index);
}

/* Whether anybody may have the slot: its bucket is empty by the clock of the rule that its key belongs to. */
static __always_inline bool drained(__u32 slot, __u64 tat, __u32 charged, __u64 now)
{
	const struct rule *rule;
	const struct own *own;
	const struct key *key;

	if (!tat)
		return true;
	key = bpf_map_lookup_elem(&keys, &slot);
	if (!key)
		return false;
	own = bpf_map_lookup_elem(&own_buckets, &key->id);
	if (!own)
		return false;
	rule = rule_of(key->id, own);
	return rule && !level_at(rule, byte_clock(rule, now), now, tat, charged);
}

/* Takes a drained slot of the line for a key that has none. A new bucket is empty, so its first packet conforms. */
__noinline enum verdict take_slot(struct line *line, __u32 number, const struct charge *c, const struct key *key)
{
	struct key *owner;
	__u32 i, j, slot;

	if (!line || !c || !key)
		return VERDICT_UNSURE;
	for (i = 0; i < LINE_SLOTS; i++) {
		struct bucket *b = &line->slot[i];
		__u64 tat = READ_ONCE(b->tat);

		if (tat & TAT_TAKEN)
			return VERDICT_MOVED;
		slot = number * LINE_SLOTS + i;
		if (!drained(slot, tat, READ_ONCE(b->tick), c->now))
			continue;
		owner = bpf_map_lookup_elem(&keys, &slot);
		if (!owner)
			return VERDICT_UNSURE;
		if (__sync_val_compare_and_swap(&b->tat, tat, tat | TAT_TAKEN) != tat)
			return VERDICT_MOVED;
		*owner = *key;
		/*
		 * A full barrier between telling and looking: of two CPUs that take
		 * two slots for one key, at least one sees the other and gives way.
		 */
		__sync_lock_test_and_set(&b->print, c->print);
		for (j = 0; j < LINE_SLOTS; j++)
			if (j != i && READ_ONCE(line->slot[j].print) == c->print)
				break;
		if (j < LINE_SLOTS) {
			WRITE_ONCE(b->print, 0);
			__sync_lock_test_and_set(&b->tat, 0);
			return VERDICT_MOVED;
		}
		WRITE_ONCE(b->tick, tick(c->now));
		__sync_lock_test_and_set(&b->tat, c->v + c->cost);
		return VERDICT_PASS;
	}
	return VERDICT_UNSURE;
}

/* Charges the bucket of a key; where it can have none, the rule's spare one. */
static __always_inline enum verdict charge_key(const struct rule *rule, struct charge *c, const struct key *key,
					       struct own *spare)
{
	__u64 hash = hash_key(key, rule->salt);
	__u32 number = (__u32)hash & hook.line_mask;
	struct line *line = bpf_map_lookup_elem(&table, &number);
	enum verdict verdict;
	__u32 i, attempt;

	c->print = hash >> 32 | 1;
	for (attempt = 0; line && attempt < FIND_TRIES; attempt++) {
		for (i = 0; i < LINE_SLOTS; i++)
			if (READ_ONCE(line->slot[i].print) == c->print)
				break;
		if (i < LINE_SLOTS)
			verdict = charge(rule, &line->slot[i], c);
		else
			verdict = take_slot(line, number, c, key);
		if (verdict == VERDICT_UNSURE && i == LINE_SLOTS)
			break;
		if (verdict != VERDICT_MOVED)
			return verdict;
	}
	c->print = 0;
	return charge(rule, &spare->bucket, c);
}

#endif
