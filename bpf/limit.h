/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A packet's way: parse, match, charge, act, count. What most packets need is
 * inline and short; everything else is in functions of its own, which start
 * anew from what they are told, so that nothing has to be kept for them.
 */
#ifndef SHAPECTL_LIMIT_H
#define SHAPECTL_LIMIT_H

#include <linux/pkt_cls.h>
#include "bucket.h"
#include "packet.h"
#include "prefix.h"

/* Under tcx this is TCX_NEXT: later programs, and the legacy filters, still see the packet. */
#define NEXT TC_ACT_UNSPEC
#define DROP TC_ACT_SHOT

static __always_inline __u64 time_ns(struct __sk_buff *skb)
{
	return hook.virtual_clock ? skb->tstamp : bpf_ktime_get_ns();
}

/* Who shares a bucket: the masked address, or the 5-tuple as far as the packet has one. */
static __noinline void make_key(struct __sk_buff *skb, __u32 ip, const __u32 mask[4], __u32 flags, struct key *key)
{
	struct transport t = {};
	__u32 i;

	key->family = ip & IS_IPV6 ? 6 : 4;
	if (!(flags & RULE_FLOW)) {
		far_address(skb, ip, (struct address *)key->src);
		if (flags & RULE_SUBNET)
#pragma unroll
			for (i = 0; i < 4; i++)
				key->src[i] &= mask[i];
		return;
	}
	if (ip & IS_IPV6) {
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct ipv6hdr, saddr), key->src, 16);
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct ipv6hdr, daddr), key->dst, 16);
	} else {
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct iphdr, saddr), key->src, 4);
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct iphdr, daddr), key->dst, 4);
	}
	if (find_transport(skb, ip, &t))
		return;
	key->proto = t.proto;
	if (!t.headless && has_ports(t.proto))
		bpf_skb_load_bytes(skb, t.l4, &key->sport, 2 * sizeof(key->sport));
}

/* The rule of the longest prefix among those that there are on a side of a change: its id plus one, or 0. */
struct present {
	__u64 addr[2];
	__u32 ipv6;
	__u32 use; /* the version of the lengths */
	__u32 side;
	__u32 id;
};

static long present_next(__u64 i, struct present *p)
{
	const struct rule *rule;
	__u32 id = 0;

	if (p->ipv6) {
		const struct length6 *by = &lengths.use[p->use & 1].list6[i & (LENGTHS6 - 1)];
		__u64 addr0 = p->addr[0] & by->mask[0], addr1 = p->addr[1] & by->mask[1];

		id = find6(addr0, addr1, by->length, hash6_prefix(addr0, addr1, by->length));
	} else if (i < LENGTHS4) { /* There are never more; the verifier wants to see that. */
		__u64 key = key4(lengths.use[p->use & 1].list4[i], p->addr[0]);

		id = find4(key, hash4_prefix(key));
	}
	if (!id)
		return 0;
	rule = rule_of(id - 1);
	if (!rule || terms_of(rule, version_of(rule, p->side))->flags & RULE_ABSENT)
		return 0;
	p->id = id;
	return 1;
}

__noinline __u32 match_present(struct __sk_buff *skb, __u32 ip, __u32 side)
{
	struct present p = { .ipv6 = ip & IS_IPV6, .use = lengths.version & 1, .side = side };
	struct address far = {};

	if (far_address(skb, ip, &far))
		return 0;
	p.addr[0] = far.word[0];
	p.addr[1] = far.word[1];
	bpf_loop(p.ipv6 ? lengths.use[p.use & 1].count6 : lengths.use[p.use & 1].count4, present_next, &p, 0);
	return p.id;
}

/* Beyond this a sender's own departure time is none. */
#define OWN_TIME_NS (1ULL << 35)

/* Has fq, or that of the ifb, send a packet no earlier. Not possible of one that enters with a tag left in its frame. */
static __always_inline bool leave_at(struct __sk_buff *skb, __u64 time)
{
	if (!bpf_skb_set_tstamp(skb, time, BPF_SKB_TSTAMP_DELIVERY_MONO))
		return true;
	/* A device that it leaves by needs no type of the time. */
	if (!hook.ingress)
		skb->tstamp = time;
	return !hook.ingress;
}

/*
 * What has to leave before a packet that was charged, and left the bucket with
 * that level, in units.
 */
static __always_inline __u64 units_before(const struct terms *terms, __u64 bytes, __u64 level)
{
	__u64 cost = bytes << UNIT_BITS, free = terms->at_once > cost ? terms->at_once - cost : 0;

	level -= cost; /* as the packet found it */
	return level > free ? level - free : 0;
}

/*
 * Of a packet before which so many units are to leave: the time at which it
 * leaves itself. A sender that wants to be later than that is, but by no more
 * than the queue is long: what it spreads over that time it could let leave at
 * one moment. What does not wait is what conforms at once, and a packet that was
 * bigger than all of that and found the bucket empty; anything else leaves when it would conform.
 */
static __always_inline enum verdict hold_back(struct __sk_buff *skb, __u32 ip, const struct terms *terms,
					      const struct details *details, __u64 now, __u64 before)
{
	__u64 own = skb->tstamp, wait = drain_ns(terms->slope, before), leaves = now + wait;

	if (!hook.ingress && own > leaves && own - leaves <= OWN_TIME_NS) {
		leaves = now + drain_ns(terms->slope, terms->capacity - terms->at_once);
		if (own < leaves)
			leaves = own;
		leave_at(skb, leaves);
	} else if (wait && !leave_at(skb, leaves)) {
		return VERDICT_UNSURE;
	}
	if (!wait)
		return VERDICT_PASS;
	return wait > details->ecn_above_ns && ecn_of(skb, ip) ? VERDICT_MARK : VERDICT_DELAY;
}

static __always_inline void keep_order(struct rule *rule, __u64 until)
{
	if (READ_ONCE(rule->in_order) < until)
		WRITE_ONCE(rule->in_order, until);
}

/*
 * The same after the long way. A flow for which there is no room in the table
 * waits, and so do all until it has left: by then it may have room, and nothing
 * there that tells of this packet.
 */
__noinline enum verdict hold_back_slowly(struct __sk_buff *skb, __u32 ip, const struct slow *s)
{
	const struct terms *terms;
	struct rule *rule;
	__u32 id;

	if (!s)
		return VERDICT_UNSURE;
	id = s->key.id;
	rule = rule_of(id);
	if (!rule)
		return VERDICT_UNSURE;
	terms = terms_of(rule, s->version);
	if (s->verdict != VERDICT_PASS && s->verdict != VERDICT_DELAY)
		keep_order(rule, s->now + drain_ns(terms->slope, s->wait));
	return hold_back(skb, ip, terms, &rule->details[s->version & 1], s->now, s->verdict == VERDICT_PASS ? 0 : s->wait);
}

/* Whether it is not known of all that waits by a rule whose it is. */
static __always_inline bool keeps_order(const struct rule *rule, const struct slow *s)
{
	return s->now < READ_ONCE(rule->in_order) ||
	       (s->version & VERSION_REBASED && s->now < change.until + MAX_WAIT_S * 1000000000ULL);
}

/* Where the bucket is in the table of whom flags say that there is one for. Not static, like charge_once. */
__noinline int look_for(struct __sk_buff *skb, __u32 ip, __u32 flags, struct slow *s)
{
	const struct rule *rule;
	__u64 hash;
	__u32 id;

	if (!s)
		return 0;
	id = s->key.id;
	rule = rule_of(id);
	if (!rule)
		return 0;
	make_key(skb, ip, rule->details[s->version & 1].each_mask, flags, &s->key);
	hash = hash_key(&s->key, terms_of(rule, s->version)->salt);
	s->line = line_of(hash);
	s->print = print_of(hash);
	s->in_order = keeps_order(rule, s);
	return 0;
}

/*
 * Charges any packet to its bucket, by a version that was resolved; to the spill
 * bucket where its key has no slot and can take none. Strangers share that one,
 * so it has neither penalties nor marks beyond the capacity: either would let
 * whoever sends most shut all others out.
 */
__noinline enum verdict charge_slowly(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 version, __u64 framed)
{
	struct slow s = {
		.key.id = id,
		.version = version,
		.bytes = BYTES_OF(framed),
		.packets = PACKETS_OF(framed),
		.verdict = VERDICT_AGAIN,
	};
	const struct terms *terms;
	const struct rule *rule;

	rule = rule_of(id);
	if (!rule)
		return VERDICT_UNSURE;
	terms = terms_of(rule, version);
	s.now = time_ns(skb);
	s.ect = terms->flags & RULE_ECN && ecn_of(skb, ip);
	if (terms->flags & RULE_EACH) {
		look_for(skb, ip, terms->flags, &s);
		bpf_loop(TRIES, try_slot, &s, 0);
		if (s.verdict != VERDICT_UNSURE && s.verdict != VERDICT_AGAIN)
			goto charged;
		s.spilled = true;
		s.ect = false;
	}
	bpf_loop(TRIES, try_own, &s, 0);
charged:
	if (s.verdict == VERDICT_PASS && terms->flags & RULE_DELAY) {
		s.wait = units_before(terms, s.bytes, s.tat - clock_of(terms, version, s.now));
		if (s.wait && terms->flags & RULE_SPARSE) {
			look_for(skb, ip, RULE_FLOW, &s);
			bpf_loop(TRIES, try_slot, &s, 0);
		} else if (s.wait) {
			s.verdict = VERDICT_DELAY;
		}
		return hold_back_slowly(skb, ip, &s);
	}
	return s.verdict == VERDICT_AGAIN ? VERDICT_UNSURE : s.verdict;
}

/* The start of a plain TCP or UDP packet over IPv4, and over IPv6. */
struct plain4 {
	struct iphdr ip;
	__u32 ports;
};

struct plain6 {
	struct ipv6hdr ip;
	__u32 ports;
};

/*
 * What make_key and hash_key lead to, where that takes no more than a look at
 * plain headers; 0 elsewhere.
 */
static __always_inline __u64 hash_plainly(struct __sk_buff *skb, __u32 ip, const __u32 mask[4], __u32 salt, __u32 flags)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end, *l3;

	if (l3_of(ip) == ETH_HLEN)
		l3 = AT(data, ETH_HLEN);
	else if (!l3_of(ip))
		l3 = AT(data, 0);
	else
		return 0;
	if (ip & IS_IPV6) {
		const struct plain6 *h = l3;
		const __u32 *far = far6(l3);
		__u32 none[4] = {};

		if ((void *)(h + 1) > data_end)
			return 0;
		if (flags & RULE_HOST)
			return hash6(salt, 0, 0, far, none);
		if (flags & RULE_SUBNET) {
			__u32 subnet[4] = { far[0] & mask[0], far[1] & mask[1], far[2] & mask[2], far[3] & mask[3] };

			return hash6(salt, 0, 0, subnet, none);
		}
		if (h->ip.nexthdr != IPPROTO_UDP && h->ip.nexthdr != IPPROTO_TCP)
			return 0;
		return hash6(salt, h->ip.nexthdr, h->ports, h->ip.saddr.in6_u.u6_addr32, h->ip.daddr.in6_u.u6_addr32);
	} else {
		const struct plain4 *h = l3;

		if ((void *)(h + 1) > data_end)
			return 0;
		if (!(flags & RULE_FLOW))
			return hash4(salt, 0, 0, *(__u32 *)far4(l3) & (flags & RULE_SUBNET ? mask[0] : ~0U), 0);
		if (*(__u8 *)l3 != 0x45 || h->ip.frag_off & bpf_htons(IP_OFFSET) ||
		    (h->ip.protocol != IPPROTO_UDP && h->ip.protocol != IPPROTO_TCP))
			return 0;
		return hash4(salt, h->ip.protocol, h->ports, h->ip.saddr, h->ip.daddr);
	}
}

/* The slot of a host or flow, if it has one in its first line, or with second in its second, and the fingerprint there. */
static __always_inline struct bucket *find_bucket(__u64 hash, bool second, __u32 *print)
{
	__u32 number = line_of(hash);
	struct bucket *slot;
	struct line *line;

	*print = print_of(hash);
	line = bpf_map_lookup_elem(&table, &number);
	if (!line)
		return NULL;
	slot = &line->slot[home_of(*print)];
	if (READ_ONCE(slot->print) == *print)
		return slot;
	slot = find_slot(line, *print);
	if (slot || !second)
		return slot;
	number = second_line(number, *print);
	*print = second_print(*print);
	line = bpf_map_lookup_elem(&table, &number);
	return line ? find_slot(line, *print) : NULL;
}

static __always_inline void count(__u64 *packets, __u64 *bytes, __u64 n, __u64 length)
{
	*packets += n;
	*bytes += length;
}

/* For skbs of more than one packet, so that user space can tell how many skbs there were. */
static __always_inline void count_extra(struct rule *rule, __u64 packets)
{
	if (packets > 1)
		__sync_fetch_and_add(&rule->extra_packets, packets - 1);
}

/* Acts on a verdict of any kind. */
static __always_inline int act(struct __sk_buff *skb, __u32 ip, struct rule *rule, __u32 flags, __u64 packets,
			       __u64 bytes, enum verdict verdict)
{
	struct counters *c = counters_of(rule);

	if (verdict == VERDICT_MARK && mark_ce(skb, ip))
		verdict = VERDICT_UNSURE;
	if (verdict == VERDICT_UNSURE)
		c->unsure_packets += packets;
	if ((verdict == VERDICT_EXCESS && !(flags & RULE_PASS)) ||
	    (verdict == VERDICT_UNSURE && flags & RULE_FAIL_CLOSED)) {
		count(&c->dropped_packets, &c->dropped_bytes, packets, bytes);
		return DROP;
	}
	if (verdict == VERDICT_EXCESS || verdict == VERDICT_MARK || verdict == VERDICT_DELAY)
		count(&c->spared_packets, &c->spared_bytes, packets, bytes);
	if (verdict == VERDICT_MARK)
		c->marked_packets += packets;
	count(&c->passed_packets, &c->passed_bytes, packets, bytes);
	/* Also what need not wait, lest it overtake what does. */
	if (hook.outlet && flags & RULE_DELAY)
		return bpf_redirect(hook.outlet, 0);
	return NEXT;
}

/* Where in skb->cb the first of the two programs leaves the side of the change that it went by. */
#define HANDED 4

/*
 * The side of the change that a packet goes by. While that hangs on the time,
 * the second of the two programs goes by what the first one did.
 */
static __always_inline __u32 side_of(struct __sk_buff *skb, __u32 algorithm)
{
	__u32 mark = (hook.secret[0] & ~7U) | algorithm << 2, side;

	if (READ_ONCE(change.view) != VIEW_TIMED)
		return side_at(0);
	side = skb->cb[HANDED] ^ mark ^ RULE_LEAKY << 2;
	if (side <= SIDE_BACK) {
		skb->cb[HANDED] = 0;
		return side;
	}
	side = side_at(time_ns(skb));
	skb->cb[HANDED] = mark | side;
	return side;
}

/* For a shadow that a packet would not have conformed to: whom it would have hurt. */
__noinline int note_hurt(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 version, __u64 framed)
{
	struct hurt first = { .packets = PACKETS_OF(framed), .bytes = BYTES_OF(framed) }, *hurt;
	struct hurt_key key = { .family = ip & IS_IPV6 ? 6 : 4 };
	const struct rule *rule = rule_of(id);
	__u32 i;

	if (!rule)
		return 0;
	key.salt = terms_of(rule, version)->salt;
	far_address(skb, ip, (struct address *)key.addr);
	if (terms_of(rule, version)->flags & RULE_SUBNET)
#pragma unroll
		for (i = 0; i < 4; i++)
			key.addr[i] &= rule->details[version & 1].each_mask[i];
	hurt = bpf_map_lookup_elem(&hurts, &key);
	if (!hurt && bpf_map_update_elem(&hurts, &key, &first, BPF_NOEXIST))
		hurt = bpf_map_lookup_elem(&hurts, &key);
	if (hurt) {
		__sync_fetch_and_add(&hurt->packets, first.packets);
		__sync_fetch_and_add(&hurt->bytes, first.bytes);
	}
	return 0;
}

/*
 * From the rule of the longest prefix to what decides over a packet: a rule that
 * is in force, of this algorithm, by one of its versions, on a side of the
 * change. 0 if none does. One number, of which the verifier assumes nothing.
 */
#define DECISION(id, version, side) ((__u64)((side) << 2 | (version)) << 32 | ((id) + 1))
#define ID_OF(decision) ((__u32)(decision)-1)
#define VERSION_OF(decision) ((__u32)((decision) >> 32) & 3)
#define SIDE_OF(decision) ((__u32)((decision) >> 34))

__noinline __u64 decide(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 algorithm)
{
	struct rule *rule = rule_of(id);
	__u32 side, version;

	if (!rule)
		return 0;
	side = side_of(skb, algorithm);
	version = version_of(rule, side);
	if (terms_of(rule, version)->flags & RULE_ABSENT) {
		id = match_present(skb, ip, side) - 1;
		rule = rule_of(id);
		if (!rule)
			return 0;
		version = version_of(rule, side);
	}
	/* The other algorithm's program, next in the chain, sees to its own rules. */
	if ((terms_of(rule, version)->flags & RULE_LEAKY) != algorithm)
		return 0;
	return DECISION(id, version, side);
}

/* The decision for the shadow of the rule that decides over a packet, if that has one. */
__noinline __u64 decide_shadow(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 algorithm)
{
	__u64 decision = decide(skb, ip, id, algorithm);
	const struct terms *terms;
	const struct rule *rule;

	if (!decision)
		return 0;
	rule = rule_of(ID_OF(decision));
	if (!rule)
		return 0;
	terms = terms_of(rule, VERSION_OF(decision));
	if (!(terms->flags & RULE_SHADOW))
		return 0;
	id = terms->shadow;
	rule = rule_of(id);
	if (!rule)
		return 0;
	return DECISION(id, version_of(rule, SIDE_OF(decision)), SIDE_OF(decision));
}

/* Charges a packet to the shadow of its rule, if that has one, and counts what that would have done. */
__noinline int apply_shadow(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 algorithm)
{
	__u64 decision = decide_shadow(skb, ip, id, algorithm), framed;
	const struct terms *terms;
	enum verdict verdict;
	struct counters *c;
	struct rule *rule;

	if (!decision)
		return 0;
	rule = rule_of(ID_OF(decision));
	if (!rule)
		return 0;
	terms = terms_of(rule, VERSION_OF(decision));
	framed = framed_bytes(skb, ip, terms->overhead, terms->mpu);
	verdict = charge_slowly(skb, ip, ID_OF(decision), VERSION_OF(decision), framed);
	c = counters_of(rule);
	if (verdict == VERDICT_EXCESS) {
		count(&c->spared_packets, &c->spared_bytes, PACKETS_OF(framed), BYTES_OF(framed));
		note_hurt(skb, ip, ID_OF(decision), VERSION_OF(decision), framed);
	}
	if (verdict == VERDICT_UNSURE)
		c->unsure_packets += PACKETS_OF(framed);
	count(&c->passed_packets, &c->passed_bytes, PACKETS_OF(framed), BYTES_OF(framed));
	count_extra(rule, PACKETS_OF(framed));
	return 0;
}

/* Applies any rule to any packet. */
__noinline int apply_slowly(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 algorithm)
{
	__u64 decision = decide(skb, ip, id, algorithm), framed;
	enum verdict verdict = VERDICT_PASS;
	const struct terms *terms;
	struct rule *rule;
	__u32 flags;
	int answer;

	if (!decision)
		return NEXT;
	rule = rule_of(ID_OF(decision));
	if (!rule)
		return NEXT;
	terms = terms_of(rule, VERSION_OF(decision));
	flags = terms->flags;
	framed = framed_bytes(skb, ip, terms->overhead, terms->mpu);
	if (!(flags & RULE_UNLIMITED))
		verdict = charge_slowly(skb, ip, ID_OF(decision), VERSION_OF(decision), framed);
	answer = act(skb, ip, rule, flags, PACKETS_OF(framed), BYTES_OF(framed), verdict);
	count_extra(rule, PACKETS_OF(framed));
	return answer;
}

/* What only apply_slowly knows about. */
#define RULE_RARE \
	(RULE_UNLIMITED | RULE_FRAMING | RULE_ECN | RULE_PASS | RULE_FAIL_CLOSED | RULE_ABSENT | RULE_SHADOW | RULE_SPARSE)

/* What functions answer that have done nothing. */
#define UNDONE -2

/*
 * Charges a packet that counts as long as it is to a bucket that is at hand; VERDICT_AGAIN if it is not.
 * Only with rarer it knows keys in their second line, and penalties.
 */
static __always_inline enum verdict charge_plainly(struct __sk_buff *skb, __u32 ip, struct rule *rule, __u32 version,
						   const struct terms *terms, __u32 flags, bool rarer, __u64 *now,
						   __u64 *given)
{
	enum verdict verdict;
	struct bucket *bucket;
	__u64 hash, v;
	__u32 print;

	if (flags & RULE_EACH) {
		hash = hash_plainly(skb, ip, rule->details[version].each_mask, terms->salt, flags);
		bucket = hash ? find_bucket(hash, rarer, &print) : NULL;
		if (!bucket)
			return VERDICT_AGAIN;
		*now = time_ns(skb);
		return charge_bucket(terms, byte_clock(terms, terms->base, *now), bucket, print, *now,
				     skb->len, false, rarer, given);
	}
	*now = time_ns(skb);
	v = byte_clock(terms, terms->base, *now);
	verdict = charge_bucket(terms, v, &rule->own, 0, *now, skb->len, false, rarer, given);
	/* With two CPUs on one bucket, that the other was faster is as likely as not. */
	if (verdict == VERDICT_AGAIN)
		verdict = charge_bucket(terms, v, &rule->own, 0, *now, skb->len, false, rarer, given);
	return verdict;
}

/*
 * The version of a rule that is in force, if that does not depend on the time and
 * the rule has nothing rare about it; UNDONE otherwise.
 */
static __always_inline int plain_version(const struct rule *rule, __u32 algorithm)
{
	__u32 version = READ_ONCE(rule->version);
	__u64 view;

	if (version & VERSION_CHANGES) {
		view = READ_ONCE(change.view);
		if (view == VIEW_TIMED)
			return UNDONE;
		version ^= view;
	}
	version &= 1;
	return (terms_of(rule, version)->flags ^ algorithm) & (RULE_LEAKY | RULE_RARE) ? UNDONE : version;
}

/*
 * Applies a rule that has nothing rare about it to a packet that is one of most, if
 * it can: for rules that delay or have a penalty, and for keys that are not in their
 * first line.
 */
__noinline int apply_plainly(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 version)
{
	struct rule *rule = rule_of(id);
	const struct terms *terms;
	enum verdict verdict;
	__u64 now, given = 0;
	__u32 flags;

	if (!rule)
		return UNDONE;
	version &= 1;
	terms = terms_of(rule, version);
	flags = terms->flags;
	verdict = charge_plainly(skb, ip, rule, version, terms, flags, true, &now, &given);
	if (verdict == VERDICT_AGAIN)
		return UNDONE;
	if (verdict == VERDICT_PASS && flags & RULE_DELAY)
		verdict = hold_back(skb, ip, terms, &rule->details[version], now,
				    units_before(terms, skb->len, given - byte_clock(terms, terms->base, now)));
	return act(skb, ip, rule, flags, 1, skb->len, verdict);
}

/* Applies a rule that has nothing rare about it, to a packet whose key may be in its second line. */
__noinline int apply_second(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 algorithm)
{
	struct rule *rule = rule_of(id);
	int version = rule ? plain_version(rule, algorithm) : UNDONE;

	return version < 0 ? UNDONE : apply_plainly(skb, ip, id, version);
}

/*
 * The same for what most packets and rules are: counts as long as it is, and
 * its bucket is at hand and charged by nobody else at this moment. What else
 * there may be is left to the long way, which begins anew.
 */
static __always_inline int apply(struct __sk_buff *skb, __u32 ip, __u32 id, __u32 algorithm)
{
	const struct terms *terms;
	enum verdict verdict;
	struct counters *c;
	struct rule *rule;
	int version, done;
	__u64 now, given;
	__u32 flags;

	rule = rule_of(id);
	if (!rule)
		return NEXT;
	version = plain_version(rule, algorithm);
	if (version < 0 || skb->gso_size || skb->vlan_present)
		goto slowly;
	terms = terms_of(rule, version);
	flags = terms->flags;
	if (flags & (RULE_DELAY | RULE_PENALTY)) {
		done = apply_plainly(skb, ip, id, version);
		if (done == UNDONE)
			goto slowly;
		return done;
	}
	/* Touched before the clock is read, which waits for all loads, so that two misses are one. */
	if (IS_BIG)
		READ_ONCE(counters_of(rule)->passed_packets);
	verdict = charge_plainly(skb, ip, rule, version, terms, flags, false, &now, &given);
	c = counters_of(rule);
	if (verdict == VERDICT_PASS) {
		count(&c->passed_packets, &c->passed_bytes, 1, skb->len);
		return NEXT;
	}
	if (verdict == VERDICT_EXCESS) {
		count(&c->dropped_packets, &c->dropped_bytes, 1, skb->len);
		return DROP;
	}
	done = apply_second(skb, ip, id, algorithm);
	if (done != UNDONE)
		return done;
slowly:
	/* Before the packet is told another time than that of now. */
	if (hook.shadows)
		apply_shadow(skb, ip, id, algorithm);
	return apply_slowly(skb, ip, id, algorithm);
}

/* Lets neighbour discovery pass, and counts it with the rule that would have decided over it. */
__noinline int exempt(struct __sk_buff *skb, __u32 ip, __u32 algorithm)
{
	struct address far = {};
	__u64 decision = 0;
	struct rule *rule;
	__u32 id;

	if (far_address(skb, ip, &far))
		return NEXT;
	id = match6_from(far.word[0], far.word[1], lengths.version, 0);
	if (id)
		decision = decide(skb, ip, id - 1, algorithm);
	if (!decision)
		return NEXT;
	rule = rule_of(ID_OF(decision));
	if (rule)
		__sync_fetch_and_add(&rule->exempt_packets, 1);
	return NEXT;
}

/* Where the IP packet is that could not be found at once, and the id plus one of its rule: ip << 32 | id. */
__noinline __u64 find_slowly(struct __sk_buff *skb, __u32 algorithm)
{
	struct address far = {};
	int ip = find_ip(skb);
	__u32 id;

	if (ip < 0 || far_address(skb, ip, &far))
		return 0;
	if (!(ip & IS_IPV6)) {
		id = match4_from(far.word[0], lengths.version, 0);
	} else if (is_discovery(skb, ip)) {
		exempt(skb, ip, algorithm);
		return 0;
	} else {
		id = match6_from(far.word[0], far.word[1], lengths.version, 0);
	}
	return (__u64)ip << 32 | id;
}

static __always_inline int limit(struct __sk_buff *skb, __u32 algorithm)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end, *l3;
	__u32 ip = hook.l2_bytes, id;
	const __u64 *far;
	__be16 proto;
	__u64 found;

	if (ip) {
		if (data + ETH_HLEN > data_end)
			return NEXT;
		proto = *(__be16 *)AT(data, ETH_HLEN - sizeof(proto));
		l3 = AT(data, ETH_HLEN);
	} else {
		proto = skb->protocol;
		l3 = AT(data, 0);
	}
	if (proto == bpf_htons(ETH_P_IP) && l3 + sizeof(struct iphdr) <= data_end) {
		if (*(__u8 *)l3 >> 4 != 4)
			return NEXT;
		id = match4(*(__u32 *)far4(l3));
	} else if (proto == bpf_htons(ETH_P_IPV6) && l3 + sizeof(struct ipv6hdr) <= data_end) {
		if (*(__u8 *)l3 >> 4 != 6)
			return NEXT;
		ip |= IS_IPV6;
		if (((struct ipv6hdr *)l3)->nexthdr == IPPROTO_ICMPV6 && is_discovery(skb, ip))
			return exempt(skb, ip, algorithm);
		far = far6(l3);
		id = match6(far[0], far[1]);
	} else if (proto == bpf_htons(ETH_P_IP) || proto == bpf_htons(ETH_P_IPV6) || is_tag(proto)) {
		found = find_slowly(skb, algorithm);
		ip = found >> 32;
		id = found;
	} else {
		return NEXT;
	}
	return id ? apply(skb, ip, id - 1, algorithm) : NEXT;
}

#endif
