/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Longest-prefix match of an address. Policies use few prefix lengths, so each
 * length in use is looked up in turn, longest first, in a hash table of cache
 * lines, one per family. A trie would visit a node for each bit in which prefixes
 * differ.
 */
#ifndef SHAPECTL_PREFIX_H
#define SHAPECTL_PREFIX_H

#include "maps.h"
#include "packet.h"
#include "rule.h"

/* ORed to an address, gives the key of its prefix of that length: length << 32 | host bits. */
static __always_inline __u64 by4(__u32 length)
{
	return (__u64)length << 32 | (__u32)~hook.masks[length & NO_LENGTH][0];
}

/*
 * One round of mixing. A multiplication carries bits only upwards, so the upper
 * bits are folded onto the lower ones before the next multiplication. A single
 * multiplication (multiply-shift) is not enough: with one secret in a hundred it
 * maps consecutive prefixes to a few lines. Use only bits 26 and up of the result.
 */
static __always_inline __u64 stir(__u64 h, __u64 multiplier)
{
	return (h ^ h >> 28) * multiplier;
}

static __always_inline __u64 hash4_prefix(__u64 key)
{
	__u64 multiplier = hook.multiplier; /* one load, because hook is volatile */

	return stir(key * multiplier, multiplier);
}

/* Adds length and second word to products with the secret, so no choice of addresses cancels them. */
static __always_inline __u64 hash6_prefix(__u64 addr0, __u64 addr1, __u64 length)
{
	__u64 multiplier = hook.multiplier;
	__u64 h = stir(addr0 * multiplier + length, multiplier);

	return stir(stir(h + addr1, multiplier), multiplier);
}

/* The first line of a prefix with that hash. */
static __always_inline __u32 prefix_line(__u64 hash)
{
	return hash >> 40;
}

/* Whether a prefix with that hash may exist. */
static __always_inline bool in_filter(__u64 hash)
{
	__u64 word = filter[MASKED(hash >> 32, filter_mask)];

	return word >> (hash >> 26 & 63) & word >> (hash >> 58) & 1;
}

/*
 * A search of the lines after the first. It uses bpf_loop, because without
 * CAP_PERFMON the verifier would follow each iteration of a loop, even beyond the
 * last.
 */
struct search {
	__u64 key[2];
	__u32 length;
	__u32 line; /* searched last */
	__u32 id;   /* the result: id of the rule plus one, or 0 */
};

/* All ones if different is 0, else 0. The asm keeps the compiler from using a branch. */
static __always_inline __u32 if_same(__u64 different)
{
	/* A number below 2^32 minus one is negative only for 0. */
	different = (different >> 32 | (__u32)different) - 1;
	asm volatile("" : "+r"(different));
	return (__s64)different >> 63;
}

/*
 * The id of the rule plus one, or 0. Without branches: each would double the paths
 * of the verifier, and the CPU would mispredict half of them.
 */
static __always_inline __u32 in_line4(const struct prefixes4 *line, __u64 key)
{
	__u32 id = 0, i;

#pragma unroll
	for (i = 0; i < LINE_PREFIXES4; i++)
		id |= line->id[i] & if_same(line->key[i] ^ key);
	return id;
}

static __always_inline __u32 in_line6(const struct prefixes6 *line, __u64 addr0, __u64 addr1, __u32 length)
{
	__u32 id = 0, i;

#pragma unroll
	for (i = 0; i < LINE_PREFIXES6; i++)
		id |= line->id[i] &
		      if_same((line->addr[i][0] ^ addr0) | (line->addr[i][1] ^ addr1) | (line->length[i] ^ length));
	return id;
}

static __always_inline const struct prefixes4 *line4_at(__u32 number)
{
	return &prefixes4[number & HOOK(prefixes4_mask)];
}

static __always_inline const struct prefixes6 *line6_at(__u32 number)
{
	return &prefixes6[number & HOOK(prefixes6_mask)];
}

static long search_line4(__u64 n, struct search *s)
{
	const struct prefixes4 *line;

	(void)n;
	line = line4_at(++s->line);
	s->id = in_line4(line, s->key[0]);
	return s->id || line->used <= LINE_PREFIXES4;
}

static long search_line6(__u64 n, struct search *s)
{
	const struct prefixes6 *line;

	(void)n;
	line = line6_at(++s->line);
	s->id = in_line6(line, s->key[0], s->key[1], s->length);
	return s->id || line->used <= LINE_PREFIXES6;
}

/* The id plus one of the rule with exactly that prefix, or 0. */
__noinline __u32 find4(__u64 key, __u64 hash)
{
	struct search s = { .key = { key }, .line = prefix_line(hash) };
	const struct prefixes4 *line = line4_at(s.line);

	s.id = in_line4(line, key);
	if (!s.id && line->used > LINE_PREFIXES4)
		bpf_loop(SPILL_LINES - 1, search_line4, &s, 0);
	return s.id;
}

__noinline __u32 find6(__u64 addr0, __u64 addr1, __u32 length, __u64 hash)
{
	struct search s = {
		.key = { addr0, addr1 },
		.length = length,
		.line = prefix_line(hash),
	};
	const struct prefixes6 *line = line6_at(s.line);

	s.id = in_line6(line, addr0, addr1, length);
	if (!s.id && line->used > LINE_PREFIXES6)
		bpf_loop(SPILL_LINES - 1, search_line6, &s, 0);
	return s.id;
}

/* A search by the IPv4 lengths in use. */
struct search4 {
	__u64 key; /* mix4 and the address */
	__u32 count;
	const __u8 *list;
};

/* No lengths are left. */
#define NONE_LEFT (~0U)

/* No loop, because the compiler would keep its state in memory. */
static __always_inline __u32 try_length4(const struct search4 *s, __u32 i)
{
	__u64 key, hash;

	if (i >= s->count)
		return NONE_LEFT;
	key = s->key | by4(s->list[i]);
	hash = hash4_prefix(key);
	return in_filter(hash) ? find4(key, hash) : 0;
}

static __always_inline __u32 try_4_lengths4(const struct search4 *s, __u32 i)
{
	return try_length4(s, i) ?: try_length4(s, i + 1) ?: try_length4(s, i + 2) ?: try_length4(s, i + 3);
}

static __always_inline __u32 try_16_lengths4(const struct search4 *s, __u32 i)
{
	return try_4_lengths4(s, i) ?: try_4_lengths4(s, i + 4) ?: try_4_lengths4(s, i + 8) ?: try_4_lengths4(s, i + 12);
}

/*
 * Searches by all lengths in use, but not again by the first if that was tried. The lists may have
 * changed since the caller read them, so it passes the length that it tried, or NO_LENGTH.
 */
__noinline __u32 match4_from(struct __sk_buff *skb, __u32 addr, __u32 tried)
{
	const struct view *view = view_of(skb);
	__u32 use = READ_ONCE(view->version) & 1, id;
	struct search4 s = {
		.key = view->mix4 | addr, .count = view->use[use].count4, .list = view->use[use].list4,
	};

	id = s.list[0] == tried ? 0 : try_length4(&s, 0);
	id = id ?: try_16_lengths4(&s, 1) ?: try_16_lengths4(&s, 17);
	_Static_assert(LENGTHS4 == 33, "as many as there are lengths");
	return id == NONE_LEFT ? 0 : id;
}

/* A search by the IPv6 lengths in use, starting at one of them. */
struct search6 {
	struct __sk_buff *skb;
	__u64 addr[2];
	__u32 use; /* version of the view's lists */
	__u32 from, count;
	__u32 id;
};

/* Lengths per iteration: an iteration of bpf_loop costs as much as half a length. */
#define ROUND6 8

static __always_inline __u32 try_length6(const struct view *view, const struct search6 *s, __u32 length)
{
	__u64 addr0 = (s->addr[0] & hook.masks[length][0]) ^ view->mix6[0];
	__u64 addr1 = (s->addr[1] & hook.masks[length][1]) ^ view->mix6[1];
	__u64 hash = hash6_prefix(addr0, addr1, length);

	return in_filter(hash) ? find6(addr0, addr1, length, hash) : 0;
}

static long next_lengths6(__u64 round, struct search6 *s)
{
	const struct view *view = view_of(s->skb);
	__u32 first = s->from + round * ROUND6, i;
	const __u8 *lengths;

	if (first >= LENGTHS6) /* Never true, but the verifier needs the bound. */
		return 1;
	/* Before first is compared with count: without CAP_PERFMON the verifier then refuses the addition. */
	lengths = KEPT(&view->use[s->use & 1].list6[first]);
#pragma unroll
	for (i = 0; i < ROUND6; i++) {
		if (first + i >= s->count)
			return 1;
		s->id = try_length6(view, s, lengths[i]);
		if (s->id)
			return 1;
	}
	return 0;
}

/* match4_from for IPv6. */
__noinline __u32 match6_from(struct __sk_buff *skb, __u64 addr0, __u64 addr1, __u32 tried)
{
	const struct view *view = view_of(skb);
	struct search6 s = { .skb = skb, .addr = { addr0, addr1 }, .use = READ_ONCE(view->version) & 1 };

	s.count = view->use[s.use].count6;
	s.from = view->use[s.use].list6[0] == tried;
	if (s.count > s.from)
		bpf_loop((s.count - s.from + ROUND6 - 1) / ROUND6, next_lengths6, &s, 0);
	return s.id;
}

/*
 * From 32768 rules on the tables are too big for a cache. Then a lookup costs more
 * than the filter, even for the longest length.
 */
#define IS_BIG (HOOK(prefixes4_mask) >= 1 << 14)

/*
 * The id of the matching rule plus one, or 0. First tries the first place for the
 * longest length, which the view has in one word. That saves reading the version;
 * while it changes, the word has no length.
 */
static __always_inline __u32 match4(struct __sk_buff *skb, __u32 addr)
{
	const struct view *view = view_of(skb);
	__u64 first = READ_ONCE(view->first4), key = first | addr;
	__u32 use, tried;
	const struct prefixes4 *line;

	if (IS_BIG)
		return match4_from(skb, addr, NO_LENGTH);
	line = line4_at(prefix_line(hash4_prefix(key)));
	if (line->key[0] == key && line->id[0])
		return line->id[0];
	use = READ_ONCE(view->version) & 1;
	tried = line->used <= 1 ? first >> 32 & NO_LENGTH : NO_LENGTH;
	return view->use[use].count4 > (view->use[use].list4[0] == tried) ? match4_from(skb, addr, tried) : 0;
}

static __always_inline __u32 match6(struct __sk_buff *skb, __u64 addr0, __u64 addr1)
{
	const struct view *view = view_of(skb);
	__u32 first = READ_ONCE(view->first6) & NO_LENGTH, use, tried;
	__u64 first0 = (addr0 & hook.masks[first][0]) ^ view->mix6[0];
	__u64 first1 = (addr1 & hook.masks[first][1]) ^ view->mix6[1];
	const struct prefixes6 *line;

	if (IS_BIG)
		return match6_from(skb, addr0, addr1, NO_LENGTH);
	line = line6_at(prefix_line(hash6_prefix(first0, first1, first)));
	if (line->addr[0][0] == first0 && line->addr[0][1] == first1 && line->length[0] == first && line->id[0])
		return line->id[0];
	use = READ_ONCE(view->version) & 1;
	tried = line->used <= 1 ? first : NO_LENGTH;
	return view->use[use].count6 > (view->use[use].list6[0] == tried) ? match6_from(skb, addr0, addr1, tried) : 0;
}

#endif
