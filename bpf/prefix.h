/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From an address to its rule: the longest prefix. Policies use few prefix
 * lengths, so each length in use is looked up in turn, longest first, in a hash
 * table of whole cache lines, one for each family. A trie would visit a node for
 * each bit in which prefixes differ.
 */
#ifndef SHAPECTL_PREFIX_H
#define SHAPECTL_PREFIX_H

#include "bucket.h"
#include "packet.h"

/* Fibonacci hashing (Knuth, 6.4): the upper half of the product depends on every bit. */
#define FIBONACCI 0x9e3779b97f4a7c15ULL

/* A key of IPv4 is all there is to a prefix: length << 32 | masked address. */
static __always_inline __u64 key4(__u64 length, __u32 addr)
{
	return length & (addr | ~0ULL << 32);
}

static __always_inline __u64 hash4_prefix(__u64 key)
{
	return key * FIBONACCI;
}

static __always_inline __u64 hash6_prefix(__u64 addr0, __u64 addr1, __u64 length)
{
	__u64 h = (addr0 + length) * FIBONACCI;

	return ((h ^ h >> 32) + addr1) * FIBONACCI;
}

/* Whether a prefix with that hash may be there. */
static __always_inline bool in_filter(const struct filter *f, __u64 hash)
{
	__u64 word = f->word[hash >> 40 & hook.filter_mask];

	return word >> (hash >> 34 & 63) & word >> (hash >> 58) & 1;
}

/*
 * The long way to a prefix that is not in the first place of its line: all
 * places, and the lines after it. A loop is bpf_loop's, as without CAP_PERFMON
 * the verifier would go through each time around, and past the last.
 */
struct search {
	__u64 key[2];
	__u32 length;
	__u32 line; /* to look into next */
	__u32 id;   /* what was found: the id of the rule plus one */
};

static long search_line4(__u64 n, struct search *s)
{
	const struct prefixes4 *line = bpf_map_lookup_elem(&prefixes4, &s->line);
	__u32 i;

	(void)n;
	if (!line)
		return 1;
#pragma unroll
	for (i = 0; i < LINE_PREFIXES4; i++)
		if (line->key[i] == s->key[0] && line->id[i]) {
			s->id = READ_ONCE(line->id[i]);
			return 1;
		}
	s->line = (s->line + 1) & hook.prefixes4_mask;
	return line->used <= LINE_PREFIXES4;
}

__noinline __u32 search4(__u64 key)
{
	struct search s = { .key = { key }, .line = hash4_prefix(key) >> 32 & hook.prefixes4_mask };

	bpf_loop(SPILL_LINES, search_line4, &s, 0);
	return s.id;
}

static long search_line6(__u64 n, struct search *s)
{
	const struct prefixes6 *line = bpf_map_lookup_elem(&prefixes6, &s->line);
	__u32 i;

	(void)n;
	if (!line)
		return 1;
#pragma unroll
	for (i = 0; i < LINE_PREFIXES6; i++)
		if (line->addr[i][0] == s->key[0] && line->addr[i][1] == s->key[1] && line->length[i] == s->length &&
		    line->id[i]) {
			s->id = READ_ONCE(line->id[i]);
			return 1;
		}
	s->line = (s->line + 1) & hook.prefixes6_mask;
	return line->used <= LINE_PREFIXES6;
}

__noinline __u32 search6(__u64 addr0, __u64 addr1, __u32 length)
{
	struct search s = { .key = { addr0, addr1 }, .length = length, .line = hash6_prefix(addr0, addr1, length) >> 32 & hook.prefixes6_mask };

	bpf_loop(SPILL_LINES, search_line6, &s, 0);
	return s.id;
}

/*
 * The id plus one of the rule that an address has by one prefix length, or 0. A
 * prefix is never in a later place while the first one has its key: a new one
 * goes into the first that is free.
 */
static __always_inline __u32 match4_by(__u64 length, __u32 addr)
{
	__u64 key = key4(length, addr);
	__u32 number = hash4_prefix(key) >> 32 & hook.prefixes4_mask;
	const struct prefixes4 *line;

	line = bpf_map_lookup_elem(&prefixes4, &number);
	if (!line)
		return 0;
	if (line->key[0] == key)
		return line->id[0];
	return line->used > 1 ? search4(key) : 0;
}

static __always_inline __u32 match6_by(const struct length6 *by, __u64 addr0, __u64 addr1)
{
	const struct prefixes6 *line;
	__u64 length = by->length;
	__u32 number;

	addr0 &= by->mask[0];
	addr1 &= by->mask[1];
	number = hash6_prefix(addr0, addr1, length) >> 32 & hook.prefixes6_mask;
	line = bpf_map_lookup_elem(&prefixes6, &number);
	if (!line)
		return 0;
	if (line->addr[0][0] == addr0 && line->addr[0][1] == addr1 && line->length[0] == length)
		return line->id[0];
	return line->used > 1 ? search6(addr0, addr1, length) : 0;
}

__noinline __u32 probe4(__u64 length, __u32 addr)
{
	return match4_by(length, addr);
}

/* The same by all lengths in use from one on, where the filter does not exclude it. */
__noinline __u32 match4_from(__u32 addr, __u32 use, __u32 from)
{
	__u32 zero = 0, count = lengths.use[use & 1].count4, id;
	const __u64 *list = lengths.use[use & 1].list4;
	const struct filter *f;

	f = bpf_map_lookup_elem(&filter, &zero);
	if (!f)
		return 0;
	/* No loop, in which the compiler would keep all of this in memory. */
#define TRY(i)                                                                            \
	if ((i) >= count)                                                                 \
		return 0;                                                                 \
	if ((i) >= from && in_filter(f, hash4_prefix(key4(list[i], addr)))) {             \
		id = probe4(list[i], addr);                                               \
		if (id)                                                                   \
			return id;                                                        \
	}
#define TRY4(i) TRY(i) TRY(i + 1) TRY(i + 2) TRY(i + 3)
#define TRY16(i) TRY4(i) TRY4(i + 4) TRY4(i + 8) TRY4(i + 12)
	TRY16(0) TRY16(16) TRY(32)
	_Static_assert(LENGTHS4 == 33, "as many times as there are lengths");
#undef TRY16
#undef TRY4
#undef TRY
	return 0;
}

struct rest {
	__u64 addr[2];
	__u32 use; /* the version of the lengths */
	__u32 from;
	__u32 id;
};

static long match_next6(__u64 i, struct rest *r)
{
	const struct length6 *by = &lengths.use[r->use & 1].list6[(r->from + i) & (LENGTHS6 - 1)];
	const struct filter *f;
	__u32 zero = 0;

	f = bpf_map_lookup_elem(&filter, &zero);
	if (f && in_filter(f, hash6_prefix(r->addr[0] & by->mask[0], r->addr[1] & by->mask[1], by->length)))
		r->id = match6_by(by, r->addr[0], r->addr[1]);
	return r->id != 0;
}

__noinline __u32 match6_from(__u64 addr0, __u64 addr1, __u32 use, __u32 from)
{
	struct rest r = { .addr = { addr0, addr1 }, .use = use, .from = from };

	bpf_loop((lengths.use[use & 1].count6 - from) & (LENGTHS6 - 1), match_next6, &r, 0);
	return r.id;
}

/*
 * The id of the rule that decides, plus one, or 0. The longest length of IPv4 is
 * at hand in one word, which saves the version; while it changes, that is none.
 */
static __always_inline __u32 match4(__u32 addr)
{
	__u64 first = READ_ONCE(lengths.first4);
	__u32 id = match4_by(first, addr), use, from;

	if (id)
		return id;
	use = READ_ONCE(lengths.version) & 1;
	from = lengths.use[use].list4[0] == first;
	return lengths.use[use].count4 > from ? match4_from(addr, use, from) : 0;
}

static __always_inline __u32 match6(__u64 addr0, __u64 addr1)
{
	__u32 use = READ_ONCE(lengths.version) & 1;
	__u32 id = match6_by(&lengths.use[use].list6[0], addr0, addr1);

	return id || lengths.use[use].count6 <= 1 ? id : match6_from(addr0, addr1, use, 1);
}

#endif
