//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* No program: only the types of abi.h, for bpf2go to make Go types from. */
#include "abi.h"

struct abi {
	struct rule rule;
	struct own own;
	struct line line;
	struct key key;
	struct counters counters;
	struct prefixes prefixes;
	struct length length;
	struct lengths lengths;
	struct hook hook;
	enum layout layout;
	enum algorithm algorithm;
	enum each each;
	enum excess excess;
	enum rule_flag flag;
};

const struct abi *keep_types __attribute__((unused));
