//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* No program: only the types of abi.h, for bpf2go to make Go types from. */
#include "abi.h"

struct abi {
	struct terms terms;
	struct details details;
	struct line line;
	struct key key;
	struct counters counters;
	struct prefixes4 prefixes4;
	struct prefixes6 prefixes6;
	struct length6 length6;
	struct filter filter;
	struct lengths lengths;
	struct change change;
	struct hurt_key hurt_key;
	struct hurt hurt;
	struct hook hook;
	enum layout layout;
	enum rule_flag flag;
	enum view view;
	struct rule rule; /* last, as it ends with an array of any length */
};

const struct abi *keep_types __attribute__((unused));
