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
#include "look.h"

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
 * A search of the lines that may have a prefix. It uses bpf_loop after the first,
 * because without CAP_PERFMON the verifier would follow each iteration of a loop,
 * even beyond the last.
 */
struct search {
	__u64 key[2];
	__u32 length;
	__u32 line; /* the next one */
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
	const struct prefixes4 *line = line4_at(s->line++);

	(void)n;
	s->id = in_line4(line, s->key[0]);
	return s->id || line->used <= LINE_PREFIXES4;
}

static long search_line6(__u64 n, struct search *s)
{
	const struct prefixes6 *line = line6_at(s->line++);

	(void)n;
	s->id = in_line6(line, s->key[0], s->key[1], s->length);
	return s->id || line->used <= LINE_PREFIXES6;
}

/* As a phase: absent rules match, too. */
#define ANY_PHASE (~0U)

/* The id of the rule plus one, or 0 if it does not exist in a phase of a change. */
static __always_inline __u32 present(__u32 id, __u32 phase)
{
	const struct rule *rule;

	if (!id || phase == ANY_PHASE)
		return id;
	rule = rule_of(id - 1);
	return rule && !(params_of(rule, set_in(rule, phase))->flags & RULE_ABSENT) ? id : 0;
}

/* The id plus one of the rule with exactly that prefix in a phase, or 0. */
__noinline __u32 find4(__u64 key, __u64 hash, __u32 phase)
{
	struct search s = { .key = { key }, .line = prefix_line(hash) };

	if (!search_line4(0, &s))
		bpf_loop(SPILL_LINES - 1, search_line4, &s, 0);
	return present(s.id, phase);
}

__noinline __u32 find6(__u64 addr0, __u64 addr1, __u32 length, __u64 hash, __u32 phase)
{
	struct search s = { .key = { addr0, addr1 }, .length = length, .line = prefix_line(hash) };

	if (!search_line6(0, &s))
		bpf_loop(SPILL_LINES - 1, search_line6, &s, 0);
	return present(s.id, phase);
}

static __always_inline __u32 try_length4(const struct view *view, __u32 addr, __u32 length, __u32 phase)
{
	__u64 key = view->mix4 | addr | by4(length), hash = hash4_prefix(key);

	return in_filter(hash) ? find4(key, hash, phase) : 0;
}

static __always_inline __u32 try_length6(const struct view *view, __u64 addr0, __u64 addr1, __u32 length, __u32 phase)
{
	__u64 first = (addr0 & hook.masks[length][0]) ^ view->mix6[0];
	__u64 second = (addr1 & hook.masks[length][1]) ^ view->mix6[1];
	__u64 hash = hash6_prefix(first, second, length);

	return in_filter(hash) ? find6(first, second, length, hash, phase) : 0;
}

/* A search by the lengths in use, starting at one of them. */
struct search_lengths {
	struct __sk_buff *skb;
	__u64 addr[2];
	__u32 use; /* version of the view's lists */
	__u32 from, count;
	__u32 phase;
	__u32 id;
};

static long next_length4(__u64 n, struct search_lengths *s)
{
	const struct view *view = view_of(s->skb);
	__u32 i = s->from + n;

	if (i >= sizeof(view->use[0].list)) /* Never true, but the verifier needs the bound. */
		return 1;
	s->id = try_length4(view, s->addr[0], view->use[s->use & 1].list[i], s->phase);
	return s->id != 0;
}

/* Lengths per iteration: an iteration of bpf_loop costs as much as half a length. */
#define ROUND6 4

static long next_lengths6(__u64 round, struct search_lengths *s)
{
	const struct view *view = view_of(s->skb);
	__u32 first = s->from + round * ROUND6, i;
	const __u8 *lengths;

	if (first >= sizeof(view->use[0].list))
		return 1;
	/* Before first is compared with count: without CAP_PERFMON the verifier then refuses the addition. */
	lengths = KEPT(&view->use[s->use & 1].list[first]);
#pragma unroll
	for (i = 0; i < ROUND6; i++) {
		if (first + i >= s->count)
			return 1;
		s->id = try_length6(view, s->addr[0], s->addr[1], lengths[i], s->phase);
		if (s->id)
			return 1;
	}
	return 0;
}

/*
 * Searches by all lengths in use, of IPv6 not again by the first if that was tried. The lists may have changed since the caller
 * read them, so it passes IS_IPV6 and the length that it tried, or NO_LENGTH.
 */
__noinline __u32 match_from(struct __sk_buff *skb, __u64 addr0, __u64 addr1, __u32 tried, __u32 phase)
{
	const struct view *view = view_of(skb);
	struct search_lengths s = {
		.skb = skb, .addr = { addr0, addr1 }, .use = READ_ONCE(view->version) & 1, .phase = phase,
	};

	if (tried & IS_IPV6) {
		s.count = view->use[s.use].count6;
		s.from = view->use[s.use].list[0] == (tried & NO_LENGTH);
		if (s.count > s.from)
			bpf_loop((s.count - s.from + ROUND6 - 1) / ROUND6, next_lengths6, &s, 0);
	} else {
		s.from = LENGTHS6;
		bpf_loop(view->use[s.use].count4, next_length4, &s, 0);
	}
	return s.id;
}

/* IPv4 lengths that are tried without a loop. Few policies have more. */
#define FEW_LENGTHS 4

/* match_from for IPv4 in any phase. */
__noinline __u32 match4_from(struct __sk_buff *skb, __u32 addr, __u32 tried)
{
	const struct view *view = view_of(skb);
	__u32 use = READ_ONCE(view->version) & 1, count = view->use[use].count4, id, i;
	const __u8 *list = &view->use[use].list[LENGTHS6];

#pragma unroll
	for (i = 0; i < FEW_LENGTHS; i++) {
		if (i >= count)
			return 0;
		id = !i && list[0] == tried ? 0 : try_length4(view, addr, list[i], ANY_PHASE);
		if (id)
			return id;
	}
	return count > FEW_LENGTHS ? match_from(skb, addr, 0, 0, ANY_PHASE) : 0;
}

/* The id plus one of the matching rule of those that exist in a phase, or 0. */
static __always_inline __u32 match_present(struct __sk_buff *skb, __u32 ip, __u32 phase)
{
	struct address far = {};

	if (far_address(skb, ip, &far))
		return 0;
	return match_from(skb, far.word[0], far.word[1], (ip & IS_IPV6) | NO_LENGTH, phase);
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
	if (likely(line->key[0] == key && line->id[0]))
		return line->id[0];
	use = READ_ONCE(view->version) & 1;
	tried = line->used <= 1 ? first >> 32 & NO_LENGTH : NO_LENGTH;
	return view->use[use].count4 > (view->use[use].list[LENGTHS6] == tried) ? match4_from(skb, addr, tried) : 0;
}

static __always_inline __u32 match6(struct __sk_buff *skb, __u64 addr0, __u64 addr1)
{
	const struct view *view = view_of(skb);
	__u32 first = READ_ONCE(view->first6) & NO_LENGTH, use, tried;
	__u64 first0 = (addr0 & hook.masks[first][0]) ^ view->mix6[0];
	__u64 first1 = (addr1 & hook.masks[first][1]) ^ view->mix6[1];
	const struct prefixes6 *line;

	if (IS_BIG)
		return match_from(skb, addr0, addr1, IS_IPV6 | NO_LENGTH, ANY_PHASE);
	line = line6_at(prefix_line(hash6_prefix(first0, first1, first)));
	if (line->addr[0][0] == first0 && line->addr[0][1] == first1 && line->length[0] == first && line->id[0])
		return line->id[0];
	use = READ_ONCE(view->version) & 1;
	tried = line->used <= 1 ? first : NO_LENGTH;
	return view->use[use].count6 > (view->use[use].list[0] == tried) ? match_from(skb, addr0, addr1, IS_IPV6 | tried, ANY_PHASE) : 0;
}

#endif
