/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Events: the moments at which a bucket begins to have excess packets. Each process that listens has a slot with a lease,
 * which it renews, a ring buffer, and a memory of what it was told. While nobody listens, an excess packet costs one load
 * and one branch more, and other packets nothing.
 */
#ifndef SHAPECTL_EVENTS_H
#define SHAPECTL_EVENTS_H

#include "climb.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, LISTENERS);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_ARRAY);
		__uint(map_flags, BPF_F_MMAPABLE);
		__uint(max_entries, 1);
		__uint(key_size, sizeof(__u32));
		__uint(value_size, sizeof(struct listener));
	});
} listeners SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, LISTENERS);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_RINGBUF);
		__uint(max_entries, 1 << 16);
	});
} rings SEC(".maps");

/* After so long without an excess packet, the next one begins an episode. */
#define QUIET_NS 1000000000ULL

/* The time of an episode is written only so often, because CPUs share it. */
#define REMEMBER_NS (QUIET_NS >> 4)

enum memory {
	MEMORY_KNOWS, /* the packet goes on with an episode, */
	MEMORY_NEW,   /* begins one, */
	MEMORY_FULL,  /* or which of the two is not known: the episodes of the line are all of others, and go on */
};

static __always_inline enum memory remember(struct listener *l, __u64 tag, __u64 now, __u64 quiet)
{
	struct episode *line = &l->episodes[(tag >> 32 & (EPISODE_LINES - 1)) * LINE_EPISODES];
	__u32 at = LINE_EPISODES, i;
	bool known = false, same;
	__u64 last;

	for (i = 0; i < LINE_EPISODES; i++) {
		last = READ_ONCE(line[i].last);
		same = READ_ONCE(line[i].tag) == tag;
		if (same || (!known && (!last || last + QUIET_NS <= now)))
			at = i;
		known |= same;
	}
	if (at == LINE_EPISODES)
		return MEMORY_FULL;
	line += at;
	last = known ? READ_ONCE(line->last) : 0;
	if (!known)
		WRITE_ONCE(line->tag, tag);
	if (!known || last + REMEMBER_NS < now)
		WRITE_ONCE(line->last, now);
	return !known || last + quiet <= now ? MEMORY_NEW : MEMORY_KNOWS;
}

/*
 * Tells the listener in a slot of an event. Beyond its most in a tick, it only learns how many were left out. Not static, so
 * that the verifier checks it once for all slots.
 */
__noinline int tell_one(__u32 cpu, __u64 tag, __u64 quiet, __u32 slot)
{
	struct event *e = &work_of(cpu)->event;
	struct listener *l;
	__u32 first = 0;
	void *map;

	if (slot >= LISTENERS || READ_ONCE(change.leases[slot]) <= e->time)
		return 0;
	map = bpf_map_lookup_elem(&listeners, &slot);
	if (!map)
		return 0;
	l = bpf_map_lookup_elem(map, &first);
	if (!l || !(READ_ONCE(l->kinds) >> (e->kind & 31) & 1))
		return 0;
	switch (remember(l, tag, e->time, quiet)) {
	case MEMORY_KNOWS:
		return 0;
	case MEMORY_NEW:
		if (READ_ONCE(l->tick) != tick(e->time)) {
			WRITE_ONCE(l->tick, tick(e->time));
			WRITE_ONCE(l->told, 0);
		}
		map = bpf_map_lookup_elem(&rings, &slot);
		e->left_out = READ_ONCE(l->left_out);
		if (map && __sync_fetch_and_add(&l->told, 1) < READ_ONCE(l->most) && !bpf_ringbuf_output(map, e, sizeof(*e), 0))
			return 0;
		break;
	case MEMORY_FULL:
		break;
	}
	__sync_fetch_and_add(&l->left_out, 1);
	return 0;
}

/*
 * Whether a key has room in its guarantee, and not only for this packet: it was refused just before, and some room may
 * be there since. A key without a slot has all room.
 */
static __always_inline bool is_within_guarantee(struct __sk_buff *skb, __u32 cpu, __u32 id)
{
	struct work *w = work_of(cpu);
	struct stage *g = stage_of(w, STAGE_SECOND);
	const struct rule *rule = rule_of(id);

	if (!rule || !look(cpu, STAGE_SECOND, id))
		return false;
	if (g->flags & RULE_EACH) {
		g->slot = seek_at(skb, cpu, g, params_of(rule, g->set));
		if (!g->slot)
			return true;
		look_at_slot(cpu, STAGE_SECOND);
	}
	return g->level + 2 * w->cost <= g->limit;
}

/* Fills in the key, the level and the capacity of an event, and makes work.hash that of what identifies its bucket. */
__noinline int describe(struct __sk_buff *skb, __u32 cpu)
{
	struct work *w = work_of(cpu);
	struct event *e = &w->event;
	struct stage *s = stage_of(w, STAGE_SHADOW);
	const struct params *params, *by;
	struct rule *rule = rule_of(w->at);
	__u32 set, unit;
	__u64 hash;

	if (!rule || !look(cpu, STAGE_SHADOW, w->at))
		return 0;
	params = params_of(rule, s->set);
	s->slot = seek_at(skb, cpu, s, params);
	e->key = w->flow;
	narrow(&e->key, w->stage->flags & RULE_FLOW, 0); /* the whole far address */
	e->key.id = w->id;
	if (!(s->flags & RULE_EACH))
		w->hash = mix(w->at == w->id ? params->salt : (__u64)w->at << 32 | w->id);
	else if (s->slot)
		look_at_slot(cpu, STAGE_SHADOW);
	if (HOOK(nat) && params->flags & RULE_NAT && !e->key.proto) { /* not a flow */
		hash = w->hash;
		seek(skb, cpu, 0, RULE_NAT, 0);
		__builtin_memcpy(e->key.src, w->key.src, sizeof(e->key.src));
		w->hash = hash;
	}
	set = s->set;
	by = rated(rule, &set, w->now);
	unit = w->at != w->id && !(s->flags & RULE_POOL) && params->within == COUNTS_QUOTA ? QUOTA_BITS : UNIT_BITS;
	e->level = (s->level + (1ULL << unit) - 1) >> unit;
	e->capacity = ((s->flags & (RULE_DELAY | RULE_LEAKY)) == RULE_DELAY ? by->burst : by->limit) >> unit;
	return 0;
}

/* Tells listeners of an excess packet, or of one that was marked or delayed. */
__noinline int tell(struct __sk_buff *skb, __u32 cpu, __u32 verdict)
{
	struct work *w = work_of(cpu);
	__u64 now = w->now, until = READ_ONCE(change.listened_until), tag, quiet = QUIET_NS;
	struct event *e = &w->event;
	const struct stage *s = w->stage;
	const struct cold_params *cold;
	const struct rule *rule;
	__u32 slot, flags;

	if (now >= until) {
		/* Nobody listens any more. A listener that was killed costs packets nothing from now on. */
		__sync_val_compare_and_swap(&change.listened_until, until, 0);
		return 0;
	}
	rule = rule_of(w->id);
	if (!rule || verdict == VERDICT_CONTENDED)
		return 0;
	cold = cold_of(params_of(rule, s->set));
	flags = s->flags;
	e->time = now;
	e->limit = w->at;
	e->kind = EVENT_OVERFLOW;
	e->fate = verdict < VERDICT_EXCESS ? verdict : FATE_DROPPED;
	describe(skb, cpu);
	tag = w->hash;
	if (is_excess(verdict) && flags & RULE_PENALTY) {
		e->kind = EVENT_PENALTY;
		quiet = later(quiet, cold->long_ns);
	}
	if (verdict == VERDICT_REFUSED && w->at != w->id && flags & RULE_GUARANTEE && is_within_guarantee(skb, cpu, cold->second))
		e->kind = EVENT_GUARANTEE;
	tag += e->kind << 4 | e->fate;
	for (slot = 0; slot < LISTENERS; slot++)
		tell_one(cpu, tag, quiet, slot);
	return 0;
}

/* Whether to call tell for an excess packet. */
static __always_inline bool is_heard(void)
{
	return unlikely(READ_ONCE(change.listened_until));
}

#endif
