/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The maps of a network namespace. */
#ifndef SHAPECTL_MAPS_H
#define SHAPECTL_MAPS_H

#include "hook.h"
#include "map.h"

/* Commands map these into memory, so values are page-aligned and lines are cache lines. */
#define ARRAY(name, struct_name) MAP(name, ARRAY, BPF_F_MMAPABLE, __u32, struct struct_name)

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
MAP(affected, LRU_HASH, 0, struct affected_key, struct affected);
MAP(labels, HASH, BPF_F_NO_PREALLOC, struct label_key, struct label);

/* Each of these is one value, so programs need no lookup. The loader sets its size. */
struct change change SEC(".data.change");
struct view views[1] SEC(".data.views");
struct prefixes4 prefixes4[1] SEC(".data.prefixes4");
struct prefixes6 prefixes6[1] SEC(".data.prefixes6");
struct line table[1] SEC(".data.table");
struct calendar calendars[1] SEC(".data.calendars");
struct work works[1] SEC(".data.works"); /* one per CPU */

/*
 * A blocked Bloom filter of all prefixes of both families: the two bits of a
 * prefix are in one word. It fits into a cache and avoids nearly all lookups of
 * prefixes that do not exist.
 */
__u64 filter[1] SEC(".data.filter");

/* By kind of hook: the second program, climb. */
struct programs {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, KINDS);
	__type(key, __u32);
	__type(value, __u32);
};

struct programs programs SEC(".maps");

/*
 * The programs of cgroups get these in place of works and programs. All programs in an array have the same type. A packet of a device
 * may interrupt a process that sends.
 */
struct work cgroup_works[1] SEC(".data.cgroup_works");
struct programs cgroup_programs SEC(".maps");

static __always_inline struct view *view_of(struct __sk_buff *skb)
{
	return KEPT(&views[MASKED(skb->cb[VIEW_CB], view_mask)]);
}

#endif
