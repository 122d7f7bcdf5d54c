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

/* How often to try a bucket that other CPUs keep changing; beyond, the verdict is unsure. */
#define TRIES 16

/* More than the clocks of two CPUs can differ. */
#define SKEW_NS (1 << 20)

enum verdict {
	VERDICT_PASS,
	VERDICT_EXCESS,
	VERDICT_MARK,
	VERDICT_UNSURE,
	VERDICT_AGAIN, /* another CPU was there: look again */
};

/* What one packet asks of a bucket. */
struct charge {
	__u64 now;   /* ns */
	__u64 v;     /* units: the rule's clock at now */
	__u64 cost;  /* units */
	__u32 print; /* the bucket must have this fingerprint; 0 for a rule's own */
	__u32 ect;   /* may be marked instead of dropped */
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

/* base + slope * now modulo 2^64, the 32 fraction bits of the slope cut off after the product, not before. */
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

/* The TAT of a bucket that owes so much; 0 would say that it was never charged. */
static __always_inline __u64 owing(__u64 v, __u64 level)
{
	return v + level ?: 2;
}

/*
 * Charges b, unless the packet is excess. One CAS decides, so two CPUs never
 * admit more than one would; excess without a penalty writes nothing at all.
 */
static __always_inline enum verdict charge_bucket(const struct rule *rule, struct bucket *b, const struct charge *c)
{
	enum verdict verdict = VERDICT_PASS;
	__u64 tat = READ_ONCE(b->tat), level;
	struct metered m;

	if (tat & TAT_TAKEN)
		return VERDICT_AGAIN;
	level = level_at(rule, c->v, c->now, tat, READ_ONCE(b->tick));
	m = meter(rule, level, c->cost);
	if (!m.conforms) {
		verdict = VERDICT_EXCESS;
		if (c->ect && level + c->cost <= 2 * rule->capacity) {
			verdict = VERDICT_MARK;
			m.level = level + c->cost;
		}
	}
	if (m.level != level) {
		/* Before the CAS: a charge must not be seen with the tick of an older one. */
		if (READ_ONCE(b->tick) != tick(c->now))
			WRITE_ONCE(b->tick, tick(c->now));
		if (__sync_val_compare_and_swap(&b->tat, tat, owing(c->v, m.level)) != tat)
			return VERDICT_AGAIN;
	}
	return READ_ONCE(b->print) == c->print ? verdict : VERDICT_AGAIN;
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

/*
 * Whether anybody may have the slot: its bucket is empty by the clock of the
 * rule that its key belongs to, and for long enough that no CPU whose clock is
 * behind would think otherwise.
 */
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
	now = now < SKEW_NS ? 0 : now - SKEW_NS;
	return rule && !level_at(rule, byte_clock(rule, now), now, tat, charged);
}

/*
 * Which slot of a line a new key should take: one that no key has, or else one
 * that is drained, the search starting anywhere, lest two keys keep taking the
 * same one from each other. LINE_SLOTS if there is none. Not inlined, so that to
 * the verifier any slot may be the answer.
 */
__noinline __u32 spare_slot(__u32 number, const struct charge *c)
{
	struct line *line = bpf_map_lookup_elem(&table, &number);
	__u32 i, slot;

	if (!line || !c)
		return LINE_SLOTS;
#pragma unroll
	for (i = 0; i < LINE_SLOTS; i++)
		if (!READ_ONCE(line->slot[i].print) && !READ_ONCE(line->slot[i].tat))
			return i;
#pragma unroll
	for (i = 0; i < LINE_SLOTS; i++) {
		slot = (i + (c->print >> 1)) & (LINE_SLOTS - 1);
		if (drained(number * LINE_SLOTS + slot, READ_ONCE(line->slot[slot].tat),
			    READ_ONCE(line->slot[slot].tick), c->now))
			return slot;
	}
	return LINE_SLOTS;
}

/*
 * Gives a key that has none a slot, if that is still drained. A new bucket is
 * empty, so its first packet conforms. The line is looked up again, as without
 * CAP_PERFMON nothing may be added to a pointer that was passed.
 */
__noinline enum verdict take_slot(__u32 number, __u32 i, const struct charge *c, const struct key *key)
{
	struct line *line = bpf_map_lookup_elem(&table, &number);
	bool twice = false;
	struct bucket *b;
	struct key *owner;
	__u32 j, slot;
	__u64 tat;

	if (!line || !c || !key)
		return VERDICT_UNSURE;
	i &= LINE_SLOTS - 1;
	slot = number * LINE_SLOTS + i;
	owner = bpf_map_lookup_elem(&keys, &slot);
	if (!owner)
		return VERDICT_UNSURE;
	/* One at a time: another CPU may be taking a slot of the line for the same key. */
#pragma unroll
	for (j = 0; j < LINE_SLOTS; j++)
		if (READ_ONCE(line->slot[j].tat) & TAT_TAKEN)
			return VERDICT_AGAIN;
	b = &line->slot[i];
	tat = READ_ONCE(b->tat);
	if (tat & TAT_TAKEN || !drained(slot, tat, READ_ONCE(b->tick), c->now) ||
	    __sync_val_compare_and_swap(&b->tat, tat, tat | TAT_TAKEN) != tat)
		return VERDICT_AGAIN;
	*owner = *key;
	/*
	 * A full barrier between telling and looking: of two CPUs that take two
	 * slots for one key, at least one sees the other and gives way.
	 */
	__sync_lock_test_and_set(&b->print, c->print);
#pragma unroll
	for (j = 0; j < LINE_SLOTS; j++)
		twice |= j != i && READ_ONCE(line->slot[j].print) == c->print;
	if (twice) {
		WRITE_ONCE(b->print, 0);
		__sync_lock_test_and_set(&b->tat, 0);
		return VERDICT_AGAIN;
	}
	WRITE_ONCE(b->tick, tick(c->now));
	__sync_lock_test_and_set(&b->tat, owing(c->v, c->cost));
	return VERDICT_PASS;
}

/* 1 if the slot has the fingerprint; the compiler is kept from making a branch of it. */
static __always_inline __u64 slot_is(const struct bucket *b, __u32 print)
{
	__u64 other = READ_ONCE(b->print) ^ print;

	other--;
	asm volatile("" : "+r"(other));
	return other >> 63;
}

/* Without branches: which slot it is can not be predicted, and a wrong guess costs more than all of this. */
static __always_inline struct bucket *find_slot(struct line *line, __u32 print)
{
	__u64 is0 = slot_is(&line->slot[0], print), is1 = slot_is(&line->slot[1], print);
	__u64 is2 = slot_is(&line->slot[2], print), is3 = slot_is(&line->slot[3], print);

	if (!(is0 | is1 | is2 | is3))
		return NULL;
	/* Only one of them is. Sums and a mask, as the verifier of Linux 6.1 loses the range of an or. */
	return &line->slot[(is1 + is2 * 2 + is3 * 3) & (LINE_SLOTS - 1)];
}

/* The long way: for a key without a slot, and for buckets that another CPU is changing. */
struct slow {
	const struct rule *rule;
	const struct key *key;
	struct own *own;
	const struct charge *charge;
	__u32 line;
	enum verdict verdict;
};

static long try_slot(__u64 i, struct slow *s)
{
	struct line *line = bpf_map_lookup_elem(&table, &s->line);
	struct bucket *b;
	__u32 spare;

	(void)i;
	if (!line)
		return 1;
	b = find_slot(line, s->charge->print);
	if (b) {
		s->verdict = charge_bucket(s->rule, b, s->charge);
	} else {
		spare = spare_slot(s->line, s->charge);
		s->verdict = spare < LINE_SLOTS ? take_slot(s->line, spare, s->charge, s->key) : VERDICT_UNSURE;
	}
	return s->verdict != VERDICT_AGAIN;
}

static long try_own(__u64 i, struct slow *s)
{
	(void)i;
	s->verdict = charge_bucket(s->rule, &s->own->bucket, s->charge);
	return s->verdict != VERDICT_AGAIN;
}

/* Where a key can have no bucket, the rule's spare one is charged. */
__noinline enum verdict charge_slowly(const struct rule *rule, const struct key *key, struct own *own,
				      struct charge *c, __u32 line)
{
	struct slow s = { .rule = rule, .key = key, .own = own, .charge = c, .line = line, .verdict = VERDICT_AGAIN };

	if (!rule || !own || !c)
		return VERDICT_UNSURE;
	if (key) {
		bpf_loop(TRIES, try_slot, &s, 0);
		if (s.verdict != VERDICT_UNSURE && s.verdict != VERDICT_AGAIN)
			return s.verdict;
	}
	c->print = 0;
	bpf_loop(TRIES, try_own, &s, 0);
	return s.verdict == VERDICT_AGAIN ? VERDICT_UNSURE : s.verdict;
}

#endif
