/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef SHAPECTL_MAP_H
#define SHAPECTL_MAP_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* User space sets the number of elements when it creates a map. */
#define MAP(name, kind, flags, key_type, value_type)   \
	struct {                                       \
		__uint(type, BPF_MAP_TYPE_##kind);     \
		__uint(map_flags, flags);              \
		__uint(max_entries, 1);                \
		__type(key, key_type);                 \
		__type(value, value_type);             \
	} name SEC(".maps")

#endif
