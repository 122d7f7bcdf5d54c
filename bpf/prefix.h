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

/* All ones if different is 0, else 0. The asm keeps the compiler from using a branch. */
static __always_inline __u32 if_same(__u64 different)
{
	/* A number below 2^32 minus one is negative only for 0. */
	different = (different >> 32 | (__u32)different) - 1;
	asm volatile("" : "+r"(different));
	return (__s64)different >> 63;
}

static __always_inline const struct prefixes4 *line4_at(__u32 number)
{
	return &prefixes4[number & HOOK(prefixes4_mask)];
}

static __always_inline const struct prefixes6 *line6_at(__u32 number)
{
	return &prefixes6[number & HOOK(prefixes6_mask)];
}

/* Instead of an id: the prefix does not exist. */
#define NOWHERE (~0U)

/*
 * The id plus one of the rule whose prefix is in a line, NOWHERE, or 0 if the next line may have it. Without branches: the CPU
 * would mispredict half of them.
 */
__noinline __u32 in_line4(__u32 number, __u64 key)
{
	const struct prefixes4 *line = line4_at(number);
	__u32 id = 0, i;

	for (i = 0; i < LINE_PREFIXES4; i++)
		id |= line->id[i] & if_same(line->key[i] ^ key);
	return id || line->used > LINE_PREFIXES4 ? id : NOWHERE;
}

__noinline __u32 in_line6(__u32 number, __u64 addr0, __u64 addr1, __u32 length)
{
	const struct prefixes6 *line = line6_at(number);
	__u32 id = 0, i;

	for (i = 0; i < LINE_PREFIXES6; i++)
		id |= line->id[i] &
		      if_same((line->addr[i][0] ^ addr0) | (line->addr[i][1] ^ addr1) | (line->length[i] ^ length));
	return id || line->used > LINE_PREFIXES6 ? id : NOWHERE;
}

/* As a phase: absent rules match, too. */
#define ANY_PHASE (~0U)

/* The id of the rule plus one that was found, or 0 if it does not exist in a phase of a change. */
static __always_inline __u32 present(__u32 id, __u32 phase)
{
	const struct rule *rule;

	if (id == NOWHERE)
		return 0;
	if (phase == ANY_PHASE)
		return id;
	rule = rule_of(id - 1);
	return rule && !(params_of(rule, set_in(rule, phase))->flags & RULE_ABSENT) ? id : 0;
}

/* The id plus one of the rule with the prefix of that length in a phase, or 0. */
__noinline __u32 find4(struct __sk_buff *skb, __u32 addr, __u32 length, __u32 phase)
{
	__u64 key = view_of(skb)->mix4 | addr | by4(length), hash = hash4_prefix(key);
	__u32 id = NOWHERE, i;

	if (!in_filter(hash))
		return 0;
	for (i = 0; i < SPILL_LINES; i++) {
		id = in_line4(prefix_line(hash) + i, key);
		if (id)
			break;
	}
	return present(id, phase);
}

__noinline __u32 find6(struct __sk_buff *skb, __u64 addr0, __u64 addr1, __u32 length, __u32 phase)
{
	const struct view *view = view_of(skb);
	__u64 first = (addr0 & hook.masks[length & NO_LENGTH][0]) ^ view->mix6[0];
	__u64 second = (addr1 & hook.masks[length & NO_LENGTH][1]) ^ view->mix6[1];
	__u64 hash = hash6_prefix(first, second, length);
	__u32 id = NOWHERE, i;

	if (!in_filter(hash))
		return 0;
	for (i = 0; i < SPILL_LINES; i++) {
		id = in_line6(prefix_line(hash) + i, first, second, length);
		if (id)
			break;
	}
	return present(id, phase);
}

/*
 * Search by all lengths in use but one that was tried, or NO_LENGTH. The lists may have changed since the caller read them, so it
 * passes the length itself.
 */
__noinline __u32 match4_from(struct __sk_buff *skb, __u32 addr, __u32 tried, __u32 phase)
{
	const struct view *view = view_of(skb);
	__u32 use = READ_ONCE(view->version) & 1, count = view->use[use].count4, id, i;
	const __u8 *list = &view->use[use].list[LENGTHS6];

	for (i = list[0] == tried; i < LENGTHS4 && i < count; i++) {
		id = find4(skb, addr, list[i], phase);
		if (id)
			return id;
	}
	return 0;
}

__noinline __u32 match6_from(struct __sk_buff *skb, __u64 addr0, __u64 addr1, __u32 tried, __u32 phase)
{
	const struct view *view = view_of(skb);
	__u32 use = READ_ONCE(view->version) & 1, count = view->use[use].count6, id, i;
	const __u8 *list = view->use[use].list;

	for (i = list[0] == tried; i < LENGTHS6 && i < count; i++) {
		id = find6(skb, addr0, addr1, list[i], phase);
		if (id)
			return id;
	}
	return 0;
}

/* The id plus one of the rule for a mark or a VLAN, as pkg/policy/mark.go writes it, or 0. */
static __always_inline __u32 find_mark(struct __sk_buff *skb, __u64 kind, __u32 value, __u32 phase)
{
	return value ? find6(skb, bpf_cpu_to_be64(1ULL << 56), bpf_cpu_to_be64(kind << 32 | value), MARK_LENGTH, phase) : 0;
}

/* Iteration over VLAN tags in a frame. Linux skips those without an id. */
struct vids {
	struct __sk_buff *skb;
	__u32 at;
	__u32 id;
};

static long next_vid(__u64 i, struct vids *w)
{
	__be16 tag[2];

	(void)i;
	if (w->id || bpf_skb_load_bytes(w->skb, w->at, tag, sizeof(tag)) || !is_tag(tag[0]))
		return 1;
	w->at += VLAN_BYTES;
	w->id = bpf_ntohs(tag[1]) & 0xfff;
	return 0;
}

/* The id plus one of the rule for the packet's mark, else for its outermost VLAN, or 0. */
__noinline __u32 match_mark(struct __sk_buff *skb, __u32 phase)
{
	const struct view *view = view_of(skb);
	struct vids w = { .skb = skb, .at = 2 * ETH_ALEN };
	__u32 id;

	if (!view->use[READ_ONCE(view->version) & 1].marks)
		return 0;
	id = find_mark(skb, 1, skb->mark, phase);
	if (id)
		return id;
	if (skb->vlan_present)
		w.id = skb->vlan_tci & 0xfff;
	if (HOOK(l2_bytes))
		bpf_loop(MAX_TAGS, next_vid, &w, 0);
	return find_mark(skb, 2, w.id, phase);
}

/* The id plus one of the matching rule of those that exist in a phase, or 0. */
static __always_inline __u32 match_present(struct __sk_buff *skb, __u32 ip, __u32 phase)
{
	struct address far = {};
	__u32 id;

	if (HOOK(scan) == SCAN_MARKS) {
		id = match_mark(skb, phase);
		if (id)
			return id;
	}
	if (far_address(skb, ip, &far))
		return 0;
	return ip & IS_IPV6 ? match6_from(skb, far.word[0], far.word[1], NO_LENGTH, phase) :
			      match4_from(skb, far.word[0], NO_LENGTH, phase);
}

/*
 * The id of the matching rule plus one, or 0. First tries the first place for the
 * longest length, which the view has in one word. That saves reading the version;
 * while it changes, the word has no length.
 */
static __always_inline __u32 match4(struct __sk_buff *skb, __u32 addr)
{
	const struct view *view = view_of(skb);
	__u64 first = READ_ONCE(view->first4), key = first | addr;
	__u32 use, tried, id, scan = HOOK(scan);
	const struct prefixes4 *line;

	if (scan == SCAN_MARKS) {
		id = match_mark(skb, ANY_PHASE);
		if (id)
			return id;
	}
	if (scan)
		return match4_from(skb, addr, NO_LENGTH, ANY_PHASE);
	line = line4_at(prefix_line(hash4_prefix(key)));
	if (likely(line->key[0] == key && line->id[0]))
		return line->id[0];
	use = READ_ONCE(view->version) & 1;
	tried = line->used <= 1 ? first >> 32 & NO_LENGTH : NO_LENGTH;
	return view->use[use].count4 > (view->use[use].list[LENGTHS6] == tried) ? match4_from(skb, addr, tried, ANY_PHASE) : 0;
}

static __always_inline __u32 match6(struct __sk_buff *skb, __u64 addr0, __u64 addr1)
{
	const struct view *view = view_of(skb);
	__u32 first = READ_ONCE(view->first6) & NO_LENGTH, use, tried, id, scan = HOOK(scan);
	__u64 first0 = (addr0 & hook.masks[first][0]) ^ view->mix6[0];
	__u64 first1 = (addr1 & hook.masks[first][1]) ^ view->mix6[1];
	const struct prefixes6 *line;

	if (scan == SCAN_MARKS) {
		id = match_mark(skb, ANY_PHASE);
		if (id)
			return id;
	}
	if (scan)
		return match6_from(skb, addr0, addr1, NO_LENGTH, ANY_PHASE);
	line = line6_at(prefix_line(hash6_prefix(first0, first1, first)));
	if (line->addr[0][0] == first0 && line->addr[0][1] == first1 && line->length[0] == first && line->id[0])
		return line->id[0];
	use = READ_ONCE(view->version) & 1;
	tried = line->used <= 1 ? first : NO_LENGTH;
	return view->use[use].count6 > (view->use[use].list[0] == tried) ? match6_from(skb, addr0, addr1, tried, ANY_PHASE) : 0;
}

#endif
