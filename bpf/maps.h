/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The maps of a network namespace. User space sets their sizes when it creates them. */
#ifndef SHAPECTL_MAPS_H
#define SHAPECTL_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "hook.h"

/* Commands map these into memory, so values are page-aligned and lines are cache lines. */
#define ARRAY(name, struct_name)                          \
	struct {                                          \
		__uint(type, BPF_MAP_TYPE_ARRAY);         \
		__uint(map_flags, BPF_F_MMAPABLE);        \
		__uint(max_entries, 1);                   \
		__type(key, __u32);                       \
		__type(value, struct struct_name);        \
	} name SEC(".maps")

ARRAY(rules, rule); /* value_size is set at creation, for the counters of all CPUs */
ARRAY(rules1, rule);
ARRAY(rules2, rule);
ARRAY(rules3, rule);
ARRAY(rules4, rule);
ARRAY(rules5, rule);
ARRAY(rules6, rule);
ARRAY(rules7, rule);
ARRAY(shares, share);
ARRAY(leases, lease);
ARRAY(keys, key); /* by slot: line * LINE_SLOTS + slot in the line */

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct affected_key);
	__type(value, struct affected);
} affected SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1);
	__type(key, struct label_key);
	__type(value, struct label);
} labels SEC(".maps");

/* Each of these is one value, so programs need no lookup. The loader sets its size. */
struct change change SEC(".data.change");
struct view views[1] SEC(".data.views");
struct prefixes4 prefixes4[1] SEC(".data.prefixes4");
struct prefixes6 prefixes6[1] SEC(".data.prefixes6");
struct line table[1] SEC(".data.table");
struct work works[1] SEC(".data.works"); /* one per CPU */

/*
 * A blocked Bloom filter of all prefixes of both families: the two bits of a
 * prefix are in one word. It fits into a cache and avoids nearly all lookups of
 * prefixes that do not exist.
 */
__u64 filter[1] SEC(".data.filter");

/* By kind of hook: the second program, climb. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, KINDS);
	__type(key, __u32);
	__type(value, __u32);
} programs SEC(".maps");

static __always_inline struct view *view_of(struct __sk_buff *skb)
{
	return KEPT(&views[MASKED(skb->cb[VIEW_CB], view_mask)]);
}

#endif
