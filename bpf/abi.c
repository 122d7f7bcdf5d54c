//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Not a program: references the types of abi.h, so that bpf2go generates Go types. */
#include "abi.h"

struct abi {
	struct params params;
	struct clock clock;
	struct cold_params cold;
	struct second_params second;
	struct line line;
	struct key key;
	struct counters counters;
	struct prefixes4 prefixes4;
	struct prefixes6 prefixes6;
	struct view view;
	struct change change;
	struct label_key label_key;
	struct label label;
	struct affected_key affected_key;
	struct affected affected;
	struct hook hook;
	struct share share;
	struct lease lease;
	struct calendar calendar;
	enum unit unit;
	struct work work;
	struct event event;
	struct listener listener;
	enum event_kind event_kind;
	enum fate fate;
	enum colour colour;
	enum action action;
	enum layout layout;
	enum rule_flag flag;
	enum phase phase;
	enum set set;
	enum scan scan;
	struct rule rule; /* last, because of its flexible array */
};

const struct abi *keep_types __attribute__((unused));
