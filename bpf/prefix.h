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

static __always_inline const __u32 *far_side(const struct packet *p)
{
	return hook.match_src ? p->src : p->dst;
}

/* The leading bits of word i of an address, in network order. */
static __always_inline __u32 leading(__u32 word, __u32 i, __u32 bits)
{
	if (bits >= 32 * (i + 1))
		return word;
	return bits <= 32 * i ? 0 : word & bpf_htonl(~0U << (32 * (i + 1) - bits & 31));
}

/* What is looked for: an address, then its leading bits. */
struct target {
	__u32 addr[4];
	__u32 length; /* as in struct prefixes */
	__u32 line;
};

static __always_inline void aim(struct target *t, const __u32 *addr, __u8 family, __u32 bits)
{
	__u32 i;

	t->addr[0] = leading(addr[0], 0, bits);
	t->length = LENGTH_IPV4 + bits;
	if (family == 6) {
#pragma unroll
		for (i = 1; i < 4; i++)
			t->addr[i] = leading(addr[i], i, bits);
		t->length = bits;
	}
	t->line = hash_prefix(t->addr, t->length);
}

/* The id of the rule plus one, or 0. */
static __always_inline __u32 in_line(const struct prefixes *line, const struct target *t)
{
	__u32 id = 0, i;

#pragma unroll
	for (i = 0; i < LINE_PREFIXES; i++) {
		const __u32 *a = line->addr[i];

		if (a[0] == t->addr[0] && line->length[i] == t->length &&
		    (t->length >= LENGTH_IPV4 ||
		     (a[1] == t->addr[1] && a[2] == t->addr[2] && a[3] == t->addr[3])))
			id |= READ_ONCE(line->id[i]);
	}
	return id;
}

/* One prefix length, in all lines that it may be in. */
__noinline __u32 match_length(const struct packet *p, __u32 bits)
{
	struct prefixes *line;
	struct target t = {};
	__u32 i, id;

	if (!p)
		return 0;
	aim(&t, far_side(p), p->family, bits);
	for (i = 0; i < SPILL_LINES; i++) {
		t.line &= hook.prefix_mask;
		line = bpf_map_lookup_elem(&prefixes, &t.line);
		if (!line)
			return 0;
		id = in_line(line, &t);
		if (id || !line->spill)
			return id;
		t.line++;
	}
	return 0;
}

/* All prefix lengths in use. */
__noinline __u32 match_lengths(const struct packet *p)
{
	const struct lengths *use;
	__u32 zero = 0, id = 0, v, i;

	if (!p)
		return 0;
	use = bpf_map_lookup_elem(&lengths, &zero);
	if (!use)
		return 0;
	v = READ_ONCE(use->version) & 1;
	if (p->family == 4) {
		for (i = 0; i < sizeof(use->bits4[0]) && i < use->count4[v] && !id; i++)
			id = match_length(p, use->bits4[v][i]);
	} else {
		for (i = 0; i < sizeof(use->bits6[0]) && i < use->count6[v] && !id; i++)
			id = match_length(p, use->bits6[v][i]);
	}
	return id;
}

/* The id of the rule that decides, plus one, or 0: the longest length at once, the rest only if need be. */
static __always_inline __u32 match(const struct packet *p)
{
	const struct prefixes *line;
	const struct lengths *use;
	__u32 zero = 0, v, id, count, bits;
	struct target t;

	use = bpf_map_lookup_elem(&lengths, &zero);
	if (!use)
		return 0;
	v = READ_ONCE(use->version) & 1;
	count = p->family == 4 ? use->count4[v] : use->count6[v];
	bits = p->family == 4 ? use->bits4[v][0] : use->bits6[v][0];
	if (!count)
		return 0;
	aim(&t, far_side(p), p->family, bits);
	t.line &= hook.prefix_mask;
	line = bpf_map_lookup_elem(&prefixes, &t.line);
	if (!line)
		return 0;
	id = in_line(line, &t);
	if (!id && (count > 1 || line->spill))
		id = match_lengths(p);
	return id;
}

#endif
