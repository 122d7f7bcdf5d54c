/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The fair clock of a shared bucket: see struct share in abi.h. fair.h finds the sharers.
 *
 * Sharers that are active together get rate * weight / (sum of weights), and what they leave is for the others at once: that
 * is weighted max-min fairness. A sharer may be ahead of the clock by some packets. Where the bucket has less room than a
 * packet for each sharer, its level decides how fast the clock runs, so that packets find room when their turn comes.
 */
#ifndef SHAPECTL_SHARE_H
#define SHAPECTL_SHARE_H

#include "look.h"

enum {
	FREE_BITS = 8,	   /* fraction bits of the free part of a bucket */
	SPEED_BITS = 8,	   /* fraction bits of the speed of the clock */
	SLOWEST = 2,	   /* octaves by which the clock is slower than the rate where the bucket is full */
	OCTAVES = 4,	   /* by which it is faster where the bucket is empty, */
	MORE = 3,	   /* and by so many more if it nearly is */
	MOST_MS = 150,	   /* all sharers together may be ahead by half of the bucket, but at most this time at the rate */
	ALONE = 2,	   /* a sharer that is alone may be ahead by so many times more, */
	SMALL = 64 << 10,  /* but by three quarters of a bucket, and three eighths of one of up to so many bytes: bursts need room */
	OWN_PACKETS = 2,   /* by which a sharer may always be ahead, where a quarter of the bucket is free */
	ROOM_PART = 2,	   /* a packet must leave room for light ones. Of a larger one, only this part of the bucket counts */
	FORGIVEN = 6,	   /* a debt beyond so many times what a sharer may be ahead, and so many packets, is forgiven */
	ROOM_OCTAVES = 3,  /* the clock is faster by so many octaves where the pool above leaves all room than where it leaves none: */
	ROOM_LEAST = 72,   /* then it runs at (1 + ROOM_LEAST / 2^FREE_BITS) / 2 of what that lets pass, or light ones fall behind */
	ABOVE_BITS = 40,   /* the clock above counts as advanced by at most 2^ABOVE_BITS */
	CREDIT_BITS = 2,   /* light sharers may be ahead together by 2^-CREDIT_BITS of the bucket, and by half of what all may */
	MANY_SHARERS = 1 << 15, /* with more than these, hosts or flows, the clock is fast, so that they do not fill the table */
	RUSH = 7,	   /* by these octaves: a bin is much wider than a small packet */
	REST_NS = 1 << 30, /* without a packet for four times this, nobody is active any more */
};

/* A CPU that read its time before another one is slower by less than this. */
#define STALL_NS (1ULL << 40)

static __always_inline __u64 lesser(__u64 a, __u64 b)
{
	return a < b ? a : b;
}

/* The shares by their number plus one. */
static __always_inline struct share *share_of(__u32 number)
{
	number--;
	return bpf_map_lookup_elem(&shares, &number);
}

/* The fair units that all sharers together get at a rate, in a time of up to 2^33 ns. */
static __always_inline __u64 fair_units(__u64 rate, __u64 ns)
{
	rate >>= UNIT_BITS - FAIR_BITS;
	return ns * (rate >> 32) + (ns * low_half(rate) >> 32);
}

static __always_inline __u64 fair_tat(__u64 tat)
{
	return tat & ~(TAT_BUSY | TAT_COARSE);
}

/* The TAT of a new sharer: in a bin that v has left, so it has no weight on the wheels yet. */
static __always_inline __u64 new_tat(const struct share *s)
{
	return fair_tat(READ_ONCE(s->v) - (1ULL << s->fine_shift));
}

/*
 * How far a sharer is ahead of the clock, in fair units; 0 if it is not active. If charges of several CPUs have
 * made the weight too small, all sharers begin anew.
 */
static __always_inline __u64 ahead_of(const struct share *s, __u64 tat)
{
	__u64 ahead = fair_tat(tat) - READ_ONCE(s->v);

	return ahead < (__u64)FAIR_BINS << s->coarse_shift && (__s32)READ_ONCE(s->weight) > 0 ? ahead : 0;
}

/* The wheels begin behind all TATs, so nobody is active. */
static __always_inline void restart_clock(struct share *s, const struct cold_params *cold)
{
	__u16 shift = s->coarse_shift > cold->coarse_shift ? s->coarse_shift : cold->coarse_shift;

	WRITE_ONCE(s->v, (s->v + (2ULL * FAIR_BINS << shift)) & ~((1ULL << shift) - 1));
	__builtin_memset(s->bin, 0, sizeof(s->bin));
	s->weight = 0;
	s->rest = 0;
	s->skip = 0;
	s->credit = (__u64)1 << 62; /* soon cut to what is allowed */
	s->fine_shift = cold->fine_shift;
	s->coarse_shift = cold->coarse_shift;
}

/*
 * How fast the clock runs, with SPEED_BITS fraction bits: 2^(OCTAVES * free / capacity - SLOWEST) times the rate. So it keeps
 * half of the bucket free, for bursts; of a queue three quarters, so that packets wait less. 2^x is approximated by
 * straight lines.
 */
static __always_inline __u64 clock_speed(const struct stage *st)
{
	__u64 capacity = st->limit >> UNIT_BITS, free, x;

	free = st->level < st->limit ? capacity - (st->level >> UNIT_BITS) : 0;
	/* Octaves above the slowest speed, with 16 fraction bits. */
	x = (free << 16) * OCTAVES / capacity;
	x = (0x10000 + (x & 0xffff)) << (x >> 16) >> (16 + SLOWEST - SPEED_BITS);
	if ((st->flags & (RULE_DELAY | RULE_LEAKY)) == RULE_DELAY) /* behind a burst */
		x /= 2;
	return free > capacity - capacity / 16 ? x << MORE : x;
}

/* The bin of a TAT. */
static __always_inline __u32 bin_of(const struct share *s, __u64 tat)
{
	if (tat & TAT_COARSE)
		return FAIR_BINS + (tat >> s->coarse_shift & (FAIR_BINS - 1));
	return tat >> s->fine_shift & (FAIR_BINS - 1);
}

/* Removes the weight of a bin that v leaves. */
static __always_inline void leave_bin(struct share *s, __u32 bin)
{
	__u32 gone = __sync_lock_test_and_set(&s->bin[bin], 0);

	__sync_fetch_and_sub(&s->weight, gone);
}

/*
 * Advances v to the end of a bin, or by all of rest. After FAIR_BINS bins the fine wheel is empty, so the next ones are coarse.
 * Returns 1 if rest has no more.
 */
static long leave_next(__u64 i, struct share **share)
{
	struct share *s = *share;
	bool fine = i < FAIR_BINS;
	__u64 v = s->v, bin, to;
	__s32 weight;

	bin = 1ULL << (fine ? s->fine_shift : s->coarse_shift);
	to = bin - (v & (bin - 1));
	weight = READ_ONCE(s->weight);
	if (weight <= 0)
		return 1;
	if (s->rest / weight < to) {
		WRITE_ONCE(s->v, v + s->rest / weight);
		s->rest %= weight;
		return 1;
	}
	s->rest -= to * weight;
	if (fine)
		leave_bin(s, v >> s->fine_shift & (FAIR_BINS - 1));
	if (!((v + to) & ((1ULL << s->coarse_shift) - 1)))
		leave_bin(s, FAIR_BINS + (v >> s->coarse_shift & (FAIR_BINS - 1)));
	WRITE_ONCE(s->v, v + to);
	return 0;
}

/* What a sharer may be ahead, in fair units times weight. */
static __always_inline __u64 may_be_ahead(const struct share *s, __u32 weight)
{
	__u64 ahead = READ_ONCE(s->ahead) * weight, more = READ_ONCE(s->more) * weight;
	__s32 all = READ_ONCE(s->weight);

	ahead += all > (__s32)weight ? more * weight / all : more;
	return lesser(ahead, (__u64)READ_ONCE(s->most) << FAIR_BITS);
}

/* What any sharer may be ahead, in bytes. */
static __always_inline __u32 most_ahead(__u64 limit)
{
	__u64 capacity = limit >> UNIT_BITS, most = capacity / 8 * 3;

	if (capacity > SMALL)
		most = lesser(most + 2 * (capacity - SMALL), capacity / 4 * 3);
	return lesser(most, ~0U);
}

/* By how much light sharers may be ahead together, in fair units times weight. */
static __always_inline __u64 most_credit(__u64 limit)
{
	return limit >> (UNIT_BITS - FAIR_BITS + CREDIT_BITS);
}

/*
 * The part of a bucket that is free once it has so many more units, of 1 << FREE_BITS for a quarter of it. Shares are for the
 * whole limit of a pool. With a lease, it is as if the same part of that was free.
 */
static __always_inline __u64 free_part(const struct share *s, const struct params *params, const struct stage *st, __u64 more)
{
	__u64 free = 0, level = st->level + more;

	if (params->flags & RULE_LEASED)
		level = level / (st->limit >> 10) * (params->limit >> 10);
	if (level < params->limit)
		free = ((params->limit - level) >> UNIT_BITS) * READ_ONCE(s->free_factor) >> (FREE_WHOLE_BITS - FREE_BITS - 2);
	return lesser(free, 1 << FREE_BITS);
}

/* The fair units times weight that the pool above leaves since it was last seen. */
static __always_inline __u64 units_within(const struct share *s, const struct bound *b, __u64 skip)
{
	__u64 units = lesser(b->v - s->seen, 1ULL << ABOVE_BITS), x = b->room * ROOM_OCTAVES + ROOM_LEAST;

	units = units * b->weight + b->units - lesser(b->units, skip);
	return units * (((1 << FREE_BITS) + (x & ((1 << FREE_BITS) - 1))) << (x >> FREE_BITS)) >> (FREE_BITS + 1);
}

/* By how many fair units times weight the clock of a stage advances, which the rate and the pool above allow. */
static __always_inline __u64 units_passed(struct share *s, const struct stage *st, __u64 rate, __u64 passed, const struct bound *b)
{
	__u64 units = fair_units(rate, passed), skip = lesser(READ_ONCE(s->skip), units), speed = clock_speed(st);

	if (!(st->flags & RULE_SHARE_MEMBER) && (__s32)READ_ONCE(s->weight) > MANY_SHARERS && speed < 1 << (SPEED_BITS + RUSH))
		speed = 1 << (SPEED_BITS + RUSH);
	if (skip)
		__sync_fetch_and_sub(&s->skip, skip);
	units = (units - skip) * speed >> SPEED_BITS;
	return b->weight ? lesser(units, units_within(s, b, skip)) : units;
}

/* Advances v by fair units times weight, and by what the last advance left. */
static __always_inline void advance_by(struct share *s, __u64 units)
{
	__s32 weight;

	s->rest += units;
	bpf_loop(2 * FAIR_BINS, leave_next, &s, 0);
	weight = READ_ONCE(s->weight);
	s->rest = weight > 0 ? lesser(s->rest, weight) : 0;
}

/* Finds what sharers may be ahead until the next advance. */
static __always_inline void set_bounds(struct share *s, const struct stage *st, const struct params *params, __u64 rate,
				       const struct bound *b)
{
	__u64 together = lesser(fair_units(rate, MOST_MS * 1000000), st->limit >> (UNIT_BITS - FAIR_BITS + 1));
	__u64 credit = most_credit(st->limit), more = ALONE * together;
	__s32 weight = READ_ONCE(s->weight);

	if (b->weight) {
		s->seen = b->v;
		together = lesser(together, b->may);
		more = lesser(more, b->may - together); /* else the sharers together would be beyond the share above */
		credit = lesser(credit, b->credit);
	}
	WRITE_ONCE(s->free_factor, (1ULL << FREE_WHOLE_BITS) / (params->limit >> UNIT_BITS));
	WRITE_ONCE(s->ahead, weight > 1 ? together / weight : together);
	WRITE_ONCE(s->more, weight > 1 ? more / weight : more);
	WRITE_ONCE(s->most, most_ahead(st->limit));
	if ((__s64)READ_ONCE(s->credit) > (__s64)credit)
		WRITE_ONCE(s->credit, credit);
}

/* Whether the clock must be advanced to now. A packet that read its time before another one, which advanced it, finds it in time. */
static __always_inline bool is_late(const struct share *s, const struct cold_params *cold, __u64 now)
{
	__u64 last = READ_ONCE(s->last);

	return now - last >= cold->step && last - now >= STALL_NS;
}

/* Advances the clock of a stage by what the rate, and the pool above, allow. The caller has the lock. */
static __always_inline void advance_clock(struct share *s, const struct stage *st, const struct params *params,
					  const struct cold_params *cold, __u64 rate, __u64 now, const struct bound *b)
{
	__u64 passed = now - s->last, units;

	if (!is_late(s, cold, now)) /* another CPU was faster */
		return;
	s->last = now;
	if (s->fine_shift != cold->fine_shift || s->coarse_shift != cold->coarse_shift || passed > 4ULL * REST_NS) {
		restart_clock(s, cold);
	} else {
		units = units_passed(s, st, rate, passed, b);
		__sync_fetch_and_add(&s->credit, units);
		advance_by(s, units);
	}
	set_bounds(s, st, params, rate, b);
}

/* Whether the weight of a sharer with that TAT is in a bin. It is until v leaves that. */
static __always_inline bool weighs(const struct share *s, __u64 tat)
{
	__u32 shift = tat & TAT_COARSE ? s->coarse_shift : s->fine_shift;

	return (tat >> shift) - (READ_ONCE(s->v) >> shift) < FAIR_BINS && (__s32)READ_ONCE(s->weight) > 0;
}

/* Moves the weight of a sharer from its old TAT to a new one. */
static __always_inline void move_weight(struct share *s, __u64 old, __u64 tat, __u32 weight)
{
	__u32 from = bin_of(s, old), to = bin_of(s, tat);

	if (weighs(s, old)) {
		if (from == to)
			return;
		__sync_fetch_and_sub(&s->bin[from], weight);
	} else {
		__sync_fetch_and_add(&s->weight, weight);
	}
	__sync_fetch_and_add(&s->bin[to], weight);
}

/* A TAT that is so far ahead of v, with the bit that says on which wheel it is. */
static __always_inline __u64 on_wheel(const struct share *s, __u64 ahead)
{
	__u64 v = READ_ONCE(s->v), most = (__u64)(FAIR_BINS - 2) << s->coarse_shift;
	__u64 tat = fair_tat(v + lesser(ahead, most) + TAT_BUSY + TAT_COARSE);
	__u32 fine = s->fine_shift;

	return (tat >> fine) - (v >> fine) < FAIR_BINS ? tat : tat | TAT_COARSE;
}

/*
 * The debt of a sharer in fair units times weight, beyond which it is forgiven. may is how far it may be ahead, largest are
 * the bytes of its largest packet.
 */
static __always_inline __u64 most_debt(__u64 may, __u64 largest)
{
	return FORGIVEN * (may + (largest << FAIR_BITS));
}

/* How far a sharer is from its fair share. */
enum share_verdict {
	WITHIN_SHARE,
	BEYOND_MARK, /* so little beyond that a packet may be marked instead, */
	NEAR_SHARE, /* or that packets of sparse flows pass all the same */
	BEYOND_SHARE,
	BEYOND_DEBT, /* so far beyond that debt is forgiven */
	SHARE_LATE, /* not known: the clock must be advanced first */
};

/* How much a sharer sends, beside what it may be ahead. */
enum load {
	HEAVY,	/* or a pool without shares is between */
	MODEST, /* it is ahead by at most half */
	LIGHT,	/* with the packet it is ahead by at most an eighth, or it is not active and the packet is small */
};

/* The load of a sharer if it is as small as a light one. Its packet must leave as much of the credit to smaller ones. */
static __always_inline enum load load_if(const struct share *s, bool small, __u64 own)
{
	return (__s64)READ_ONCE(s->credit) > (__s64)(2 * own) && small ? LIGHT : MODEST;
}

/*
 * Judges a packet in the bucket of a stage by the word of its sharer, which is NULL for a new one, and finds its load. A small
 * packet of a sharer that is not active is always within its share. Any other one must leave room for such ones. In a pool
 * above another one, the load so far is that of the sharer below: if it is modest, the packet may be ahead by twice as much here,
 * so that others in that pool do not take all its room; if it is light, the packet is always within its share. Light sharers have
 * a credit, which is what the clock leaves to all sharers. So a flood of new sharers is not light for long. Only shares of
 * members bound the clock below, and so its credit.
 */
static __always_inline enum share_verdict judge(struct work *w, const struct stage *st, const struct share *s,
						const struct params *params, const struct bucket *b)
{
	__u64 ahead = b ? ahead_of(s, READ_ONCE(b->tat)) * st->weight : 0, own = (__u64)w->bytes << FAIR_BITS, most, may, free, debt;
	const __u32 largest = b ? READ_ONCE(b->tick) : 0;
	const __u64 small = 2ULL * SHARED_BYTES << FAIR_BITS;
	enum load below = w->load;

	if ((!ahead && own <= small) || (below == LIGHT && params->flags & RULE_SHARE_MEMBER)) {
		w->load = load_if(s, true, own);
		return WITHIN_SHARE;
	}
	most = may = may_be_ahead(s, st->weight);
	w->load = load_if(s, ahead + own <= may / 8, own);
	if (below != HEAVY) {
		may *= 2;
		if (own < small)
			own = small;
	}
	own *= OWN_PACKETS;
	free = free_part(s, params, st, lesser(w->cost, st->limit / ROOM_PART));
	may = ((may < own ? own : may) >> FREE_BITS) * free;
	if (w->load == MODEST && ahead > may / 2)
		w->load = HEAVY;
	if (ahead <= may && free)
		return WITHIN_SHARE;
	debt = most_debt(most, largest);
	if (ahead <= 2 * may && ahead <= debt)
		return BEYOND_MARK;
	w->load = HEAVY;
	if (ahead > debt)
		return BEYOND_DEBT;
	/* The bucket must not be nearly full, as others find room there. The coarse wheel is little longer. */
	return ahead <= most + most / 4 && free >= 1 << (FREE_BITS - 1) ? NEAR_SHARE : BEYOND_SHARE;
}

/* Charges a packet to the word of a sharer. Returns false if another CPU was faster. */
static __always_inline bool charge_word(const struct work *w, const struct stage *st, struct share *s, struct bucket *b)
{
	__u64 old = READ_ONCE(b->tat), ahead = ahead_of(s, old), units = (__u64)w->bytes << FAIR_BITS, tat;

	if (!is_still(b, st->slot, old))
		return false;
	tat = on_wheel(s, ahead + (units + st->weight - 1) / st->weight);
	if (__sync_val_compare_and_swap(&b->tat, old, tat) != old)
		return false;
	if (!ahead || READ_ONCE(b->tick) < w->bytes) /* not before: an inactive slot may get another key */
		WRITE_ONCE(b->tick, w->bytes);
	move_weight(s, old, tat, st->weight);
	return true;
}

#endif
