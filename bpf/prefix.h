/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From an address to its rule: the longest prefix. Policies use few prefix
 * lengths, so each length in use is looked up in turn, longest first, in a hash
 * table of whole cache lines. A trie would visit a node for each bit in which
 * prefixes differ.
 */
#ifndef SHAPECTL_PREFIX_H
#define SHAPECTL_PREFIX_H

#include "bucket.h"
#include "packet.h"

/* Fibonacci hashing (Knuth, 6.4): the upper half of the product depends on every bit. */
#define FIBONACCI 0x9e3779b97f4a7c15ULL

static __always_inline __u32 hash_prefix(const __u32 addr[4], __u32 length)
{
	__u64 h = (addr[0] + length) * FIBONACCI;

	if (length < LENGTH_IPV4) {
		h = ((h >> 32) + addr[1]) * FIBONACCI;
		h = ((h >> 32) + addr[2]) * FIBONACCI;
		h = ((h >> 32) + addr[3]) * FIBONACCI;
	}
	return h >> 32;
}

/* What is looked for: the leading bits of an address. */
struct target {
	__u32 addr[4];
	__u32 length; /* as in struct prefixes */
	__u32 line;
};

static __always_inline void aim(struct target *t, const struct packet *p, const struct length *by)
{
	const __u32 *addr = far_side(p);

	t->addr[0] = addr[0] & by->mask[0];
	t->addr[1] = addr[1] & by->mask[1];
	t->addr[2] = addr[2] & by->mask[2];
	t->addr[3] = addr[3] & by->mask[3];
	t->length = by->length;
	t->line = hash_prefix(t->addr, t->length) & hook.prefix_mask;
}

/* All ones if nothing differs, else 0; the compiler is kept from making a branch of it. */
static __always_inline __u32 if_same(__u64 different)
{
	different--;
	asm volatile("" : "+r"(different));
	return (__s64)different >> 63;
}

/* The id of the rule plus one, or 0. No branches: each would double the ways that the verifier has to look at. */
static __always_inline __u32 in_line(const struct prefixes *line, const struct target *t)
{
	__u32 id = 0, i;

#pragma unroll
	for (i = 0; i < LINE_PREFIXES; i++) {
		const __u32 *a = line->addr[i];

		id |= READ_ONCE(line->id[i]) &
		      if_same((a[0] ^ t->addr[0]) | (a[1] ^ t->addr[1]) | (a[2] ^ t->addr[2]) |
			      (a[3] ^ t->addr[3]) | (line->length[i] ^ t->length));
	}
	return id;
}

/*
 * The list of prefix lengths that a packet is to go by. No branch here either:
 * without CAP_PERFMON, what is added to a map's pointer must have one range on
 * all ways there.
 */
static __always_inline __u32 list_of(const struct lengths *use, const struct packet *p)
{
	__u32 ipv6 = p->family >> 1 & 1; /* of 4 and 6 */
	__u32 list = (READ_ONCE(use->version) & 1) << 1 | ipv6;

	/* The verifier of Linux 6.1 loses the range of an or, and the compiler would drop the mask. */
	asm volatile("" : "+r"(list));
	return list & 3;
}

/*
 * The long way. Loops are bpf_loop's, as without CAP_PERFMON the verifier would
 * go through each time around, and past the last.
 */
struct search {
	const struct packet *packet;
	struct target target;
	__u32 first; /* place of the longest prefix length in the lists */
	__u32 id;
};

/* One line of those that a prefix may have spilled into. */
static long search_line(__u64 i, struct search *s)
{
	const struct prefixes *line = bpf_map_lookup_elem(&prefixes, &s->target.line);

	(void)i;
	if (!line)
		return 1;
	s->id = in_line(line, &s->target);
	s->target.line = (s->target.line + 1) & hook.prefix_mask;
	return s->id || !line->spill;
}

/* The id of the rule plus one, or 0, by the prefix length at one place in the lists. */
__noinline __u32 match_length(const struct packet *p, __u32 place)
{
	struct search s = { .packet = p };
	const struct lengths *use;
	__u32 zero = 0;

	if (!p)
		return 0;
	use = bpf_map_lookup_elem(&lengths, &zero);
	if (!use)
		return 0;
	aim(&s.target, p, &use->list[place & (4 * LENGTHS_LIST - 1)]);
	bpf_loop(SPILL_LINES, search_line, &s, 0);
	return s.id;
}

static long search_length(__u64 i, struct search *s)
{
	s->id = match_length(s->packet, s->first + i);
	return s->id != 0;
}

/* The same by so many prefix lengths from a place on. */
__noinline __u32 match_lengths(const struct packet *p, __u32 first, __u32 count)
{
	struct search s = { .packet = p, .first = first };

	if (!p)
		return 0;
	bpf_loop(count & (LENGTHS_LIST - 1), search_length, &s, 0);
	return s.id;
}

/* The id of the rule that decides, plus one, or 0: the longest length at once, the rest only if need be. */
static __always_inline __u32 match(const struct packet *p)
{
	const struct prefixes *line;
	const struct lengths *use;
	__u32 zero = 0, list, id, count;
	struct target t;

	use = bpf_map_lookup_elem(&lengths, &zero);
	if (!use)
		return 0;
	list = list_of(use, p);
	aim(&t, p, &use->list[list * LENGTHS_LIST]);
	line = bpf_map_lookup_elem(&prefixes, &t.line);
	if (!line)
		return 0;
	id = in_line(line, &t);
	count = use->count[list];
	if (!id && (count > 1 || line->spill))
		id = match_lengths(p, list * LENGTHS_LIST, count);
	return id;
}

#endif
