/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Events: the moments at which a bucket begins to have excess packets. Each process that listens has a slot with a lease,
 * which it renews, a ring buffer, and a memory of what it was told. While nobody listens, an excess packet costs one load
 * and one branch more, and other packets nothing.
 */
#ifndef SHAPECTL_EVENTS_H
#define SHAPECTL_EVENTS_H

#include "clock.h"

static __always_inline __u64 time_ns(struct __sk_buff *skb)
{
	return HOOK(virtual_clock) ? skb->tstamp : bpf_ktime_get_ns();
}

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
	__u32 first = (tag >> 32 & (EPISODE_LINES - 1)) * LINE_EPISODES, at = LINE_EPISODES, random = tag >> 62, i;
	struct episode *line = &l->episodes[first];
	bool known = false;
	__u64 last;

#pragma unroll
	for (i = 0; i < LINE_EPISODES; i++) {
		if (READ_ONCE(line[i].tag) == tag) {
			at = i;
			known = true;
		}
	}
#pragma unroll
	for (i = 0; i < LINE_EPISODES; i++) {
		last = READ_ONCE(line[i].last);
		if (!known && (!last || last + QUIET_NS <= now))
			at = i;
	}
	if (at == LINE_EPISODES)
		return MEMORY_FULL;
	/* Without CAP_PERFMON, the verifier refuses an offset that it knows to depend on conditions. */
	at = KEPT(at ^ random) ^ random;
	at = KEPT(first + at) & (EPISODE_LINES * LINE_EPISODES - 1);
	line = &l->episodes[at];
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
__noinline int tell_one(struct event *e, __u64 tag, __u64 quiet, __u32 slot)
{
	struct listener *l;
	__u32 first = 0;
	void *map;

	if (!e || slot >= LISTENERS || READ_ONCE(change.leases[slot]) <= e->time)
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

/* The level in units of the shared bucket of a rule or pool, or of the one with the handle. The packet has reverted it. */
__noinline __u64 level_now(__u32 id, __u32 phase, __u64 now, __u64 handle)
{
	struct rule *rule = rule_of(id);
	struct version version;
	const struct bucket *b;
	__u64 v, tat;
	__u32 charged;

	if (!rule)
		return 0;
	version = version_in(rule, phase);
	v = clock_of(rule, version.index, version.reverted, now);
	if (handle) {
		b = bucket_of(handle);
		tat = READ_ONCE(b->tat);
		charged = READ_ONCE(b->tick);
	} else {
		tat = READ_ONCE(rule->shared.tat);
		charged = READ_ONCE(rule->shared.tick);
	}
	return level_at(params_of(rule, version.index), v, version.reverted ? now + (1ULL << TICK_BITS) : now, tat, charged);
}

/* The same for a pool with a lease. */
__noinline __u64 leased_level_now(__u32 id, __u32 phase, __u64 now)
{
	struct limit_at at;

	return limit_in(id, phase, now, &at) ? level_of(&at, &at.rule->shared) : 0;
}

/*
 * Whether a key has room in its guarantee, and not only for this packet: it was refused just before, and some room may
 * be there since. A key without a slot has all room.
 */
__noinline int is_within_guarantee(const struct key *key, __u32 id, __u32 bytes, __u32 phase, __u64 now)
{
	const struct params *params;
	struct rule *rule = rule_of(id);
	__u64 handle = 0, level = 0;

	if (!key || !rule)
		return false;
	params = params_of(rule, version_in(rule, phase).index);
	if (params->flags & RULE_EACH)
		handle = find_handle(hash_key(key, params->salt));
	if (handle || !(params->flags & RULE_EACH))
		level = level_now(id, phase, now, handle);
	return level + ((__u64)bytes << (UNIT_BITS + 1)) <= params->limit;
}

/* What an excess packet of a rule means to listeners. at is the rule or pool that had too little room. */
__noinline int tell(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 at, __u32 verdict)
{
	__u64 now = time_ns(skb), until = READ_ONCE(change.listened_until), tag, handle = 0, quiet = QUIET_NS, limit, burst;
	struct event e = { .time = now, .limit = at, .kind = EVENT_OVERFLOW };
	const struct params *params;
	struct rule *rule;
	__u32 phase, index, flags, slot;

	if (now >= until) {
		/* Nobody listens any more. A listener that was killed costs packets nothing from now on. */
		__sync_val_compare_and_swap(&change.listened_until, until, 0);
		return 0;
	}
	rule = rule_of(id);
	if (!rule || verdict == VERDICT_CONTENDED)
		return 0;
	phase = phase_at(now);
	index = version_in(rule, phase).index;
	params = params_of(rule, index);
	flags = params->flags;
	make_key(skb, ip, params->each_bits, flags, &e.key);
	e.key.id = id;
	if (verdict == VERDICT_MARK)
		e.fate = FATE_MARKED;
	else if (verdict == VERDICT_DELAY)
		e.fate = FATE_DELAYED;
	else if (verdict == VERDICT_PASS || (verdict == VERDICT_EXCESS && flags & RULE_PASS))
		e.fate = FATE_PASSED;
	tag = mix(at == id ? params->salt : (__u64)at << 32 | id);
	if (at == id && flags & RULE_EACH) {
		tag = hash_key(&e.key, params->salt);
		handle = find_handle(tag);
	}
	if (verdict == VERDICT_EXCESS && flags & RULE_PENALTY) {
		e.kind = EVENT_PENALTY;
		quiet = later(quiet, rule->cold[index & 1].penalty_ns);
	}
	if (at != id && verdict == VERDICT_REFUSED && flags & RULE_GUARANTEE &&
	    is_within_guarantee(&e.key, rule->cold[index & 1].second, skb->len, phase, now))
		e.kind = EVENT_GUARANTEE;
	if (flags & RULE_SUBNET)
		far_address(skb, ip, (struct address *)e.key.src);
	rule = rule_of(at);
	if (!rule)
		return 0;
	params = params_of(rule, version_in(rule, phase).index);
	flags = params->flags;
	e.level = (flags & RULE_LEASED ? leased_level_now(at, phase, now) : level_now(at, phase, now, handle)) >> UNIT_BITS;
	params = rated(params, now);
	/* Reads both: see clock_of. */
	limit = READ_ONCE(params->limit);
	burst = READ_ONCE(params->burst);
	e.capacity = ((flags & (RULE_DELAY | RULE_LEAKY)) == RULE_DELAY ? burst : limit) >> UNIT_BITS;
	tag += e.kind << 4 | e.fate;
	for (slot = 0; slot < LISTENERS; slot++)
		tell_one(&e, tag, quiet, slot);
	return 0;
}

/* Whether to call tell for an excess packet. */
static __always_inline bool is_heard(void)
{
	return unlikely(READ_ONCE(change.listened_until));
}

#endif
