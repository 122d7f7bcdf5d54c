/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The slow path of charges. It handles every packet and rule: keys without a slot,
 * contended buckets, queues, and all that the fast path does not handle.
 */
#ifndef SHAPECTL_CHARGE_H
#define SHAPECTL_CHARGE_H

#include "key.h"
#include "queue.h"

/* A packet on the slow path. No padding: the verifier refuses arguments with unwritten bytes. */
struct packet {
	__u64 now;
	__u64 phase;
	__u32 ip;
	__u32 id; /* of the rule that decides, or of its shadow */
	struct version version; /* of the rule */
	struct size wire;
};

static __always_inline void count(__u64 *packets, __u64 *bytes, const struct size *wire)
{
	*packets += wire->packets;
	*bytes += wire->bytes;
}

/* Counts wire packets beyond the first, so that user space can compute the number of skbs. */
static __always_inline void count_extra(struct rule *rule, __u32 packets)
{
	if (packets > 1)
		__sync_fetch_and_add(&rule->extra_packets, packets - 1);
}

/* A charge that tries several buckets in turn. */
struct charge {
	__u64 now;
	__u64 tat;	   /* of the bucket after the charge */
	__u64 before;	   /* units that leave before the packet; if not 0, the bucket is that of its flow; of a sharer the TAT before the charge */
	__u32 line;	   /* the first line of the key, */
	__u32 fingerprint; /* and the key's fingerprint there */
	__u32 bytes;	   /* on the wire */
	__u32 weight;	   /* of a sharer */
	struct key key;	   /* only its id for the shared bucket */
	struct version version;
	__u16 excess; /* enum excess */
	__u16 fifo;   /* the packet is queued even if its flow is sparse */
	enum verdict verdict;
};

/* The time for ticks. After a change reverted it is one tick ahead, which marks later charges. */
static __always_inline __u64 tick_time(const struct charge *c)
{
	return c->version.reverted ? c->now + (1ULL << TICK_BITS) : c->now;
}

/* Numbers the slots that a key may have: first those of its first line, then those of its second. */
#define KEY_SLOTS (2 * LINE_SLOTS)

static __always_inline __u32 line_with(const struct charge *c, __u32 slot)
{
	return slot < LINE_SLOTS ? c->line : second_line(c->line, c->fingerprint);
}

/* The slot's number in the table. */
static __always_inline __u32 number_of(const struct charge *c, __u32 slot)
{
	return line_with(c, slot) * LINE_SLOTS + (slot & (LINE_SLOTS - 1));
}

static __always_inline __u32 fingerprint_in(const struct charge *c, __u32 slot)
{
	return slot < LINE_SLOTS ? c->fingerprint : second_fingerprint(c->fingerprint);
}

/*
 * The number of slots that a key has. With idle, KEY_SLOTS if a slot of its lines
 * is locked, as the number is not known then. Reads the first line first, because
 * buckets move from there to the second.
 */
__noinline __u64 count_slots(struct charge *c, __u32 idle)
{
	__u32 number = c ? c->line : 0, barrier = 0;
	struct line *line = line_at(number);
	__u64 slots;

	if (!c || (idle && is_busy(line)))
		return KEY_SLOTS;
	slots = slots_with(line, c->fingerprint);
	__sync_lock_test_and_set(&barrier, 1);
	number = second_line(c->line, c->fingerprint);
	line = line_at(number);
	if (idle && is_busy(line))
		return KEY_SLOTS;
	return slots + slots_with(line, second_fingerprint(c->fingerprint));
}

/* Not a value of any byte clock, because TAT_BUSY is set. */
#define STALE_CLOCK (~0ULL)

/* The rule's byte clock, or that of its shares, or STALE_CLOCK if the rule has changed meanwhile. */
__noinline __u64 charge_clock(struct charge *c)
{
	const struct params *params;
	const struct share *share;
	const struct rule *rule;
	__u32 id;
	__u64 v;

	if (!c)
		return STALE_CLOCK;
	id = c->key.id; /* a copy: Linux 6.1 accepts only a key on the stack */
	rule = rule_of(id);
	if (!rule)
		return STALE_CLOCK;
	if (HOOK(pools) && c->key.sharer) {
		share = share_of(&rule->cold[c->version.index & 1]);
		/* In a bin that v has left: a new sharer has no weight on the wheels yet. */
		return share ? fair_tat(READ_ONCE(share->v) - (1ULL << rule->cold[c->version.index & 1].fine_shift)) : STALE_CLOCK;
	}
	v = rated_clock(rule, &c->version, c->now, &params);
	return is_current(rule, c->version.seen) ? v : STALE_CLOCK;
}

/*
 * Allocates a slot to a key that has none, if the slot is still empty. Charges the
 * new bucket, unless it is that of a flow: it is empty, so the packet conforms. The
 * line is looked up again, because without CAP_PERFMON the verifier refuses
 * arithmetic on a pointer argument.
 */
__noinline enum verdict allocate_slot(struct charge *c, __u32 i)
{
	struct line *line;
	struct bucket *b;
	struct key *owner;
	__u32 number, slot;
	__u64 tat;

	if (!c)
		return VERDICT_CONTENDED;
	number = line_with(c, i);
	slot = number * LINE_SLOTS + (i & (LINE_SLOTS - 1));
	line = line_at(number);
	owner = bpf_map_lookup_elem(&keys, &slot);
	if (!owner)
		return VERDICT_CONTENDED;
	/* Another CPU may be allocating a slot to the same key. */
	if (count_slots(c, true))
		return VERDICT_AGAIN;
	tat = charge_clock(c);
	if (tat == STALE_CLOCK)
		return VERDICT_STALE;
	b = &line->slot[i & (LINE_SLOTS - 1)];
	if (!lock_slot(slot, b, c->now))
		return VERDICT_AGAIN;
	*owner = c->key;
	if (HOOK(colours) && c->key.paired)
		clear_second(slot, fingerprint_in(c, i), owner, c->now);
	/*
	 * A full barrier between the store and the count: if two CPUs allocate two
	 * slots to one key, at least one of them sees both and frees its slot.
	 */
	__sync_lock_test_and_set(&b->fingerprint, fingerprint_in(c, i));
	if (count_slots(c, false) > 1) {
		WRITE_ONCE(b->fingerprint, 0);
		__sync_lock_test_and_set(&b->tat, 0);
		return VERDICT_AGAIN;
	}
	WRITE_ONCE(b->tick, tick(tick_time(c)));
	if (!c->before)
		tat = c->tat = tat + ((__u64)c->bytes << UNIT_BITS);
	else if (HOOK(colours) && c->key.paired)
		tat -= 1ULL << 61; /* empty for packets with an earlier time, too, as in clear_second */
	__sync_lock_test_and_set(&b->tat, tat);
	return c->before ? VERDICT_AGAIN : VERDICT_PASS;
}

/* Not a slot of the table. */
#define NO_SLOT (~0U)

/*
 * Locks a slot of the table to which the bucket in slot i of the key's lines can
 * move: a spare slot of that bucket's second line.
 */
__noinline __u32 lock_next(struct charge *c, __u32 i)
{
	__u32 number = c ? line_with(c, i) : 0, fingerprint;
	struct line *line = line_at(number);
	__u64 spare;

	if (!c)
		return NO_SLOT;
	fingerprint = READ_ONCE(line->slot[i & (LINE_SLOTS - 1)].fingerprint);
	if (!(fingerprint & 1))
		return NO_SLOT;
	number = second_line(number, fingerprint);
	spare = spare_slot(number, fingerprint, c->now);
	line = line_at(number);
	if (spare >= LINE_SLOTS)
		return NO_SLOT;
	number = number * LINE_SLOTS + spare;
	return lock_slot(number, &line->slot[spare], c->now) ? number : NO_SLOT;
}

/* Moves the second bucket of a locked slot to another locked slot, where it has this fingerprint. Returns whether it did. */
static __always_inline bool move_second(__u32 from, __u32 to, __u32 fingerprint)
{
	struct bucket *b = second_of(from), *next = second_of(to);
	__u64 tat = READ_ONCE(b->tat);

	/* A CPU that finds it locked finds it in its new place when it tries again. */
	if (tat & TAT_BUSY || __sync_val_compare_and_swap(&b->tat, tat, tat | TAT_BUSY) != tat)
		return false;
	WRITE_ONCE(next->tick, READ_ONCE(b->tick));
	__sync_lock_test_and_set(&next->fingerprint, fingerprint);
	__sync_lock_test_and_set(&next->tat, tat);
	WRITE_ONCE(b->fingerprint, 0);
	__sync_lock_test_and_set(&b->tat, 0);
	return true;
}

/*
 * Moves the bucket to the locked slot, which frees its slot for the key. Returns
 * whether it did. Buckets only move from their first line to their second, so a
 * CPU that reads the first line and then the second finds them. Both slots are
 * locked during the move, so nobody charges the bucket.
 */
__noinline int move_bucket(struct charge *c, __u32 i, __u32 to)
{
	struct key *owner, *next_owner;
	struct line *line, *next_line;
	__u32 number, fingerprint, moved = 0;
	struct bucket *b, *next;
	__u64 tat;

	if (!c)
		return 0;
	next_owner = bpf_map_lookup_elem(&keys, &to);
	number = to / LINE_SLOTS;
	next_line = line_at(number);
	number = line_with(c, i);
	line = line_at(number);
	i &= LINE_SLOTS - 1;
	b = &line->slot[i];
	i += number * LINE_SLOTS;
	owner = bpf_map_lookup_elem(&keys, &i);
	if (!owner || !next_owner)
		return 0;
	next = &next_line->slot[to & (LINE_SLOTS - 1)];
	tat = READ_ONCE(b->tat);
	fingerprint = READ_ONCE(b->fingerprint);
	/* The slot may have another bucket by now. */
	if (fingerprint & 1 && second_line(number, fingerprint) == to / LINE_SLOTS && !(tat & TAT_BUSY) &&
	    __sync_val_compare_and_swap(&b->tat, tat, tat | TAT_BUSY) == tat) {
		moved = READ_ONCE(b->fingerprint) == fingerprint;
		if (HOOK(colours) && moved && owner->paired)
			moved = move_second(i, to, second_bucket_print(second_fingerprint(fingerprint), owner->second));
		if (moved) {
			*next_owner = *owner;
			WRITE_ONCE(next->tick, READ_ONCE(b->tick));
			__sync_lock_test_and_set(&next->fingerprint, second_fingerprint(fingerprint));
			__sync_lock_test_and_set(&next->tat, tat);
			WRITE_ONCE(b->fingerprint, 0);
			tat = 0;
		}
		__sync_lock_test_and_set(&b->tat, tat);
	}
	if (!moved)
		__sync_lock_test_and_set(&next->tat, READ_ONCE(next->tat) & ~TAT_BUSY);
	return moved;
}

/*
 * Packets of all sizes share the bucket of a rule with shares, and the guarantee of a pool. A small one would always find room before a large
 * one. So a large packet conforms if one of SHARED_BYTES would, and is charged as a whole.
 */
static __always_inline __u32 tested_bytes(const struct params *params, __u32 bytes)
{
	return params->flags & (RULE_SHARES | RULE_POOL) && bytes > SHARED_BYTES ? SHARED_BYTES : bytes;
}

/*
 * Charges a slot that the key may have, or with KEY_SLOTS the shared bucket. Not
 * static, so that the verifier checks it once and not on each path to it.
 */
__noinline enum verdict charge_once(struct charge *c, __u32 slot)
{
	const struct params *params;
	enum verdict verdict;
	struct bucket *b;
	struct rule *rule;
	struct line *line;
	__u32 id, number, fingerprint = 0;
	__u64 v;

	if (!c)
		return VERDICT_CONTENDED;
	id = c->key.id;
	rule = rule_of(id);
	if (!rule)
		return VERDICT_CONTENDED;
	b = &rule->shared;
	if (slot < KEY_SLOTS) {
		number = line_with(c, slot);
		line = line_at(number);
		b = &line->slot[slot & (LINE_SLOTS - 1)];
		fingerprint = fingerprint_in(c, slot);
	}
	params = params_of(rule, c->version.index);
	if (c->version.reverted && !revert_bucket(rule, c->version.index, b))
		return VERDICT_AGAIN;
	v = clock_of(rule, c->version.index, c->version.reverted, c->now);
	/* KEPT saves stack, of which Linux 6.1 has just enough. */
	verdict = charge_bucket(rule, c->version.seen, params, KEPT(v), b, fingerprint, tick_time(c), c->bytes,
				tested_bytes(params, c->bytes), c->excess, &c->tat);
	return verdict == VERDICT_AGAIN && !is_current(rule, c->version.seen) ? VERDICT_STALE : verdict;
}

/* charge_once for a flow of a sparse-first queue, when the units before are queued there. */
__noinline enum verdict charge_flow(struct charge *c, __u32 slot)
{
	const struct params *params;
	enum verdict verdict;
	struct bucket *b;
	struct rule *rule;
	struct line *line;
	__u64 v, tat, level;
	__u32 id, number, charged;

	if (!c)
		return VERDICT_CONTENDED;
	id = c->key.id;
	rule = rule_of(id);
	if (!rule)
		return VERDICT_CONTENDED;
	number = line_with(c, slot);
	line = line_at(number);
	b = &line->slot[slot & (LINE_SLOTS - 1)];
	if (c->version.reverted && !has_lease(rule) && !revert_bucket(rule, c->version.index, b))
		return VERDICT_AGAIN;
	v = rated_clock(rule, &c->version, c->now, &params);
	tat = read_tat(b, &charged);
	if (!is_still(b, fingerprint_in(c, slot), tat))
		return VERDICT_AGAIN;
	level = flow_level(params, c->before, c->bytes, c->fifo, level_at(params, v, tick_time(c), tat, charged), &verdict);
	verdict = put_tat(rule, c->version.seen, b, tat, v + level, tick_time(c), verdict);
	return verdict == VERDICT_AGAIN && !is_current(rule, c->version.seen) ? VERDICT_STALE : verdict;
}

/* charge_once for a sharer, whose weight the caller must move on the wheels. */
__noinline enum verdict charge_sharer(struct charge *c, __u32 slot)
{
	const struct cold_params *cold;
	struct share *share;
	struct bucket *b;
	struct rule *rule;
	struct line *line;
	__u32 id, number;
	__u64 old;

	if (!c)
		return VERDICT_CONTENDED;
	id = c->key.id;
	rule = rule_of(id);
	if (!rule)
		return VERDICT_CONTENDED;
	cold = &rule->cold[c->version.index & 1];
	share = share_of(cold);
	if (!share)
		return VERDICT_CONTENDED;
	number = line_with(c, slot);
	line = line_at(number);
	b = &line->slot[slot & (LINE_SLOTS - 1)];
	old = READ_ONCE(b->tat);
	if (!is_still(b, fingerprint_in(c, slot), old))
		return VERDICT_AGAIN;
	c->tat = charge_sharer_at(share, cold, b, old, c->bytes, c->weight);
	c->before = old;
	return c->tat ? VERDICT_PASS : VERDICT_AGAIN;
}

/* The slot that a key has; KEY_SLOTS for none. */
static __always_inline __u32 slot_of_key(const struct charge *c)
{
	__u32 slot = slot_of(line_at(c->line), c->fingerprint);

	if (slot < LINE_SLOTS)
		return slot;
	return LINE_SLOTS + slot_of(line_at(second_line(c->line, c->fingerprint)), second_fingerprint(c->fingerprint));
}

/* The slot to allocate for a key that has none; KEY_SLOTS for none. */
static __always_inline __u32 slot_for_key(const struct charge *c)
{
	__u32 slot = spare_slot(c->line, c->fingerprint, c->now);

	if (slot < LINE_SLOTS)
		return slot;
	return LINE_SLOTS + spare_slot(second_line(c->line, c->fingerprint), c->fingerprint, c->now);
}

static long try_slot(__u64 i, struct charge *c)
{
	__u32 slot = slot_of_key(c), to;

	(void)i;
	if (slot < KEY_SLOTS) {
		if (HOOK(pools) && c->key.sharer)
			c->verdict = charge_sharer(c, slot);
		else
			c->verdict = c->before ? charge_flow(c, slot) : charge_once(c, slot);
		return c->verdict != VERDICT_AGAIN;
	}
	slot = slot_for_key(c);
	if (slot < KEY_SLOTS) {
		c->verdict = allocate_slot(c, slot);
		return c->verdict != VERDICT_AGAIN;
	}
	c->verdict = VERDICT_AGAIN;
	for (slot = 0; slot < KEY_SLOTS; slot++) {
		to = lock_next(c, slot);
		if (to != NO_SLOT && move_bucket(c, slot, to))
			return 0;
	}
	c->verdict = VERDICT_CONTENDED;
	return 1;
}

static long try_shared(__u64 i, struct charge *c)
{
	(void)i;
	c->verdict = charge_once(c, KEY_SLOTS);
	return c->verdict != VERDICT_AGAIN;
}

/* Whether packets may be queued that came while the pool still had another rate, by a lease that has ended. */
static __always_inline bool lease_ended(const struct params *params, __u64 now)
{
	const struct params *then, *is;

	if (!(params->flags & RULE_LEASED))
		return false;
	then = lease_of(params, now > MAX_WAIT_NS ? now - MAX_WAIT_NS : 0);
	is = lease_of(params, now);
	return then && is && then->rate_units != is->rate_units;
}

/* Makes the bucket key of a packet for the bucket scope in flags, and finds its lines. Not static, like charge_once. */
__noinline int find_lines(struct __sk_buff *skb, __u32 ip, __u32 flags, struct charge *c)
{
	const struct params *params;
	const struct rule *rule;
	__u64 hash;
	__u32 id;

	if (!c)
		return 0;
	id = c->key.id;
	rule = rule_of(id);
	if (!rule)
		return 0;
	params = params_of(rule, c->version.index);
	make_key(skb, ip, params->each_bits, flags, &c->key);
	hash = hash_key(&c->key, params->salt);
	c->line = line_of(hash);
	c->fingerprint = fingerprint_of(hash);
	c->fifo = is_fifo(rule, c->version.reverted, c->now) || (HOOK(pools) && lease_ended(params, c->now));
	return 0;
}

/* Queues the packets of all flows until one has left whose flow has no slot. */
__noinline int queue_all(const struct charge *c)
{
	struct rule *rule;
	__u32 id;

	if (!c)
		return 0;
	id = c->key.id;
	rule = rule_of(id);
	if (rule)
		keep_fifo(rule, c->now + drain_ns(rated(params_of(rule, c->version.index), c->now)->rate_units, c->before));
	return 0;
}

/*
 * Whether a packet skips a queue that delays it, because its flow is sparse. The charge says how many units are before it.
 * If the flow has no slot, a later packet of it could get one and overtake this one.
 */
static __always_inline bool skips_queue(struct __sk_buff *skb, __u32 ip, struct charge *c)
{
	find_lines(skb, ip, RULE_FLOW, c);
	bpf_loop(TRIES, try_slot, c, 0);
	if (c->verdict != VERDICT_PASS && c->verdict != VERDICT_DELAY)
		queue_all(c);
	return c->verdict == VERDICT_PASS;
}

/* queue_packet for the slow path. */
__noinline enum verdict queue_slow(struct __sk_buff *skb, const struct packet *p, __u64 before)
{
	struct rule *rule;
	__u32 id;

	if (!p)
		return VERDICT_CONTENDED;
	id = p->id;
	rule = rule_of(id);
	if (!rule)
		return VERDICT_CONTENDED;
	return queue_packet(skb, p->ip, params_of(rule, p->version.index), &rule->cold[p->version.index & 1], p->now, before);
}

/* Charges the penalty for an excess packet that a pool refuses, too. A key without a slot has none. */
__noinline int penalise(struct __sk_buff *skb, const struct packet *p)
{
	struct charge c = { .excess = EXCESS_PENALISES | EXCESS_ALONE };
	const struct params *params;
	struct rule *rule;
	__u32 slot = KEY_SLOTS;

	if (!p)
		return 0;
	c.key.id = p->id;
	rule = rule_of(c.key.id);
	if (!rule)
		return 0;
	c.now = p->now;
	c.bytes = p->wire.bytes;
	c.version = p->version;
	params = params_of(rule, p->version.index);
	if (params->flags & RULE_EACH) {
		find_lines(skb, p->ip, params->flags, &c);
		slot = slot_of_key(&c);
		if (slot == KEY_SLOTS)
			return 0;
	}
	charge_once(&c, slot);
	return 0;
}

/*
 * Charges a packet to the bucket of its key, or to the spill bucket if the key
 * cannot get a slot. Unrelated keys share the spill bucket, so it has no penalty
 * and no marks beyond the capacity: the largest sender would block all others.
 */
__noinline enum verdict charge_slow(struct __sk_buff *skb, const struct packet *p)
{
	struct charge c = { .verdict = VERDICT_AGAIN, .excess = EXCESS_PENALISES };
	const struct params *params;
	struct rule *rule;

	if (!p)
		return VERDICT_CONTENDED;
	c.key.id = p->id;
	c.now = p->now;
	c.bytes = p->wire.bytes;
	c.version = p->version;
	rule = rule_of(c.key.id);
	if (!rule)
		return VERDICT_CONTENDED;
	params = params_of(rule, p->version.index);
	if (params->flags & RULE_ECN && ecn_of(skb, p->ip))
		c.excess |= EXCESS_MARKS;
	if (params->flags & RULE_EACH) {
		find_lines(skb, p->ip, params->flags, &c);
		bpf_loop(TRIES, try_slot, &c, 0);
		if (c.verdict != VERDICT_CONTENDED && c.verdict != VERDICT_AGAIN)
			goto charged;
		c.excess = 0;
	}
	bpf_loop(TRIES, try_shared, &c, 0);
	if (params->flags & RULE_EACH && c.verdict != VERDICT_AGAIN)
		__sync_fetch_and_add(&rule->spilled_packets, p->wire.packets);
charged:
	if (c.verdict == VERDICT_PASS && params->flags & RULE_DELAY) {
		c.before = units_before(params, p->wire.bytes, c.tat - clock_of(rule, p->version.index, p->version.reverted, p->now));
		if (c.before && params->flags & RULE_SPARSE && skips_queue(skb, p->ip, &c))
			c.before = 0;
		return queue_slow(skb, p, c.before);
	}
	return c.verdict == VERDICT_AGAIN ? VERDICT_CONTENDED : c.verdict;
}

#endif
