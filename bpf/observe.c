//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Programs that look at packets while a process wants to know, and that never change or
 * drop one. They have maps of their own and know nothing of those of shapectl.c. One of
 * each pair runs before all other tcx programs of the device, the other behind them: a
 * packet that only the first one sees was dropped in between.
 *
 * rtt_before and rtt_behind follow TCP flows, docs/rtt.md. talkers_before and
 * talkers_behind count hosts or flows.
 */
#include <linux/pkt_cls.h>
#include "packet.h"

#define NEXT TC_ACT_UNSPEC

#define STAMPS 8 /* segments of a direction whose acknowledgement is awaited */
#define STAMP_NS (10ULL * 1000 * 1000 * 1000) /* an acknowledgement that takes longer is none */
#define SAMPLE_NS (1000ULL * 1000) /* between two samples of one direction of a flow */
#define LIMITED_NS (1000ULL * 1000 * 1000) /* how long a rule counts as limiting since it last did */
#define DELAY_NS (1000ULL * 1000) /* packets that are queued for less do not count as delayed */
#define WINDOW_BITS 27 /* budgets are for 2^WINDOW_BITS ns */
#define FAR_JUMP (1 << 26) /* bytes: a sequence number so far from the others starts a new count */
#define MAX_WINDOW (1 << 30) /* bytes that can await acknowledgement, RFC 7323, 2.3 */
/*
 * The largest segment that most paths carry. A receiver acknowledges at once what is more
 * than a segment (RFC 9293, 3.8.6.3), but may delay the acknowledgement of less.
 */
#define FULL_SEGMENT 1448
#define NO_RULE (~0U)
#define OPTIONS 40 /* bytes of TCP options */

/* Constants of a loaded program, beside those of struct hook. */
struct watching {
	__u32 sample_mask; /* a flow is followed if its hash has none of these bits */
	__u32 samples;	   /* at most, for each CPU and window */
	__u32 flows;	   /* new ones, at most, for each CPU and window */
	__u32 by_flow;	   /* talkers are flows, not hosts */
	__u32 secret[10];  /* random, so that no sender chooses whether his flows are followed */
};

const volatile struct watching settings;

/* A prefix of a rule on a hook. */
struct prefix {
	__u32 length; /* in bits, with those of hook */
	__u32 hook;   /* see hook_number */
	__u32 addr[4];
};

struct match {
	__u32 rule; /* its place in the map rules */
	__s16 overhead;
	__u16 mpu;
};

/* Of packets with payload, in those flows that are followed. */
struct counts {
	__u64 packets;
	__u64 bytes; /* of payload */
	__u64 again_packets; /* below the highest sequence number seen */
	__u64 again_bytes;
};

enum state_flag {
	STATE_BY_KEY = 1 << 0, /* each host has its own limit, so one that is refused says nothing about others */
	STATE_UNSEEN = 1 << 1, /* the program behind does not see its packets, even if they pass */
};

/* A rule, or one host of it. */
struct state {
	__u64 limited_until; /* ns: until then it counts as limiting */
	__u32 flags;	     /* enum state_flag, of a rule */
	__u32 pad;
	struct counts counts[2]; /* while it does not limit, and while it does */
};

struct host {
	__u32 rule;
	__u32 addr[4];
};

/* Near is the side of this host, far is beyond the device. Addresses and ports are in network order. */
struct flow_key {
	__u32 ifindex;
	__u32 family; /* 4 or 6 */
	__u32 near[4];
	__u32 far[4];
	__u16 near_port;
	__u16 far_port;
};

/* A segment whose acknowledgement is awaited. */
struct stamp {
	__u64 word; /* the sequence number after it << 32 | its timestamp value; 0 for none */
	__u64 time;
};

enum half_flag {
	HALF_SEEN = 1 << 0,
	HALF_BY_FAR = 1 << 1, /* its rule matches the far address */
};

/* One direction of a flow. */
struct half {
	__u32 highest; /* sequence number after all that was seen */
	__u32 from;    /* what ends up to here is no sample, as it was sent again (Karn) */
	__u32 acked;
	__u32 segment; /* bytes of the largest one */
	__u32 syn_end; /* sequence number after the SYN */
	__u32 rule;    /* of the last packet */
	__u32 flags;
	__u32 pending; /* the CPU plus one that saw a packet before the other programs, and not behind them */
	__u32 ecn;     /* of that packet */
	__u32 end;     /* sequence number after it */
	__u32 left;    /* sequence number after all that came out behind the other programs */
	__u32 pad;
	__u64 departs; /* its skb->tstamp */
	__u64 next;    /* ns: no sample before */
	struct stamp stamps[STAMPS];
};

struct flow {
	struct half half[2]; /* packets that leave the device, and that enter it */
};

/* A round trip between the device and one end of the flow. */
struct round_trip {
	__u64 rtt;
	__u32 rule[2]; /* of the packet that was acknowledged, and of its acknowledgement; NO_RULE for none */
	__u32 near[4];
	__u32 far[4];
	__u32 limited; /* bits: those of rule[0] and rule[1] that limited at the end of the round trip */
	__u8 family;
	__u8 ingress; /* the acknowledged packet entered the device */
	__u8 by_far;  /* bits: those of rule[0] and rule[1] that match the far address */
	__u8 pad;
};

struct spending {
	__u64 window;
	__u32 samples;
	__u32 flows;
	__u64 lost_samples; /* beyond the budget, or without room */
	__u64 lost_flows;
};

/* A host that sends, or with by_flow a flow. A host is in src. */
struct talker {
	__u32 src[4];
	__u32 dst[4];
	__u16 sport;
	__u16 dport;
	__u8 proto;
	__u8 family;
	__u16 pad;
};

/* On the wire: what came before the other programs, and what was still there behind them. */
struct traffic {
	__u64 packets;
	__u64 bytes;
	__u64 passed_packets;
	__u64 passed_bytes;
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1);
	__type(key, struct prefix);
	__type(value, struct match);
} prefixes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct state);
} rules SEC(".maps");

#define LRU(name, key_type, value_type)              \
	struct {                                     \
		__uint(type, BPF_MAP_TYPE_LRU_HASH); \
		__uint(max_entries, 1);              \
		__type(key, struct key_type);        \
		__type(value, struct value_type);    \
	} name SEC(".maps")

LRU(hosts, host, state);
LRU(flows, flow_key, flow);
LRU(talkers, talker, traffic);

#define EACH_CPU(name, value_type)                        \
	struct {                                          \
		__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY); \
		__uint(max_entries, 1);                   \
		__type(key, __u32);                       \
		__type(value, struct value_type);         \
	} name SEC(".maps")

EACH_CPU(budget, spending);
EACH_CPU(total, traffic);

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12);
} samples SEC(".maps");

/* For bpf2go. */
const enum state_flag *keep_flags __attribute__((unused));
const struct round_trip *keep_round_trip __attribute__((unused));

static const struct flow no_flow;
static const struct state no_state;
static const struct traffic no_traffic;

static __always_inline __u64 time_ns(struct __sk_buff *skb)
{
	return HOOK(virtual_clock) ? skb->tstamp : bpf_ktime_get_ns();
}

static __always_inline bool is_before(__u32 a, __u32 b)
{
	return (__s32)(a - b) < 0;
}

/* Whether this CPU may still spend one of what at points to in the budget of this window. */
static __always_inline struct spending *budget_at(__u64 now)
{
	__u32 zero = 0;
	struct spending *b = bpf_map_lookup_elem(&budget, &zero);

	if (b && b->window != now >> WINDOW_BITS) {
		b->window = now >> WINDOW_BITS;
		b->samples = 0;
		b->flows = 0;
	}
	return b;
}

static __always_inline bool may_add(__u64 now)
{
	struct spending *b = budget_at(now);

	if (!b)
		return false;
	if (b->flows >= settings.flows) {
		b->lost_flows++;
		return false;
	}
	b->flows++;
	return true;
}

/* Numbers the hooks for prefixes, each twice: for IPv4 and IPv6. */
static __always_inline __u32 hook_number(struct __sk_buff *skb, bool ipv6)
{
	return skb->ifindex << 2 | (HOOK(ingress) ? 2 : 0) | ipv6;
}

/* Whether rules match the far address. */
static __always_inline bool is_by_far(void)
{
	return !HOOK(match_src) == !HOOK(ingress);
}

/* A TCP packet of a flow that is followed. No padding: the verifier refuses arguments with unwritten bytes. */
struct tcp_packet {
	struct flow_key flow;
	__u32 ip; /* as in packet.h */
	__u32 l4; /* offset of the TCP header */
};

enum plain {
	PLAIN_TCP,
	PLAIN_OTHER, /* not TCP */
	NOT_PLAIN,   /* tagged, with options, or not in the linear part */
};

static __always_inline enum plain load_plain(struct __sk_buff *skb, struct tcp_packet *p)
{
	void *data = (void *)(long)skb->data, *data_end = (void *)(long)skb->data_end, *l3;
	__u32 *near = HOOK(ingress) ? p->flow.far : p->flow.near, *far = HOOK(ingress) ? p->flow.near : p->flow.far;
	__be16 proto = skb->protocol;
	const __u16 *ports;

	p->ip = 0;
	l3 = AT(data, 0);
	if (HOOK(l2_bytes)) {
		if (data + ETH_HLEN > data_end)
			return NOT_PLAIN;
		proto = *(__be16 *)AT(data, ETH_HLEN - sizeof(proto));
		l3 = AT(data, ETH_HLEN);
		p->ip = ETH_HLEN;
	}
	if (proto == bpf_htons(ETH_P_IP)) {
		const struct iphdr *ip = l3;

		if (l3 + sizeof(*ip) + 4 > data_end)
			return NOT_PLAIN;
		if (ip->protocol != IPPROTO_TCP || ip->frag_off & bpf_htons(IP_OFFSET))
			return PLAIN_OTHER;
		if (*(__u8 *)l3 != 0x45)
			return NOT_PLAIN;
		near[0] = ip->saddr;
		far[0] = ip->daddr;
		p->flow.family = 4;
		ports = AT(l3, sizeof(*ip));
		p->l4 = p->ip + sizeof(*ip);
	} else if (proto == bpf_htons(ETH_P_IPV6)) {
		const struct ipv6hdr *ip = l3;

		if (l3 + sizeof(*ip) + 4 > data_end)
			return NOT_PLAIN;
		if (ip->nexthdr != IPPROTO_TCP && !is_extension(ip->nexthdr))
			return PLAIN_OTHER;
		if (*(__u8 *)l3 >> 4 != 6 || ip->nexthdr != IPPROTO_TCP)
			return NOT_PLAIN;
		__builtin_memcpy(near, &ip->saddr, 16);
		__builtin_memcpy(far, &ip->daddr, 16);
		p->flow.family = 6;
		ports = AT(l3, sizeof(*ip));
		p->l4 = p->ip + sizeof(*ip);
		p->ip |= IS_IPV6;
	} else {
		return is_tag(proto) ? NOT_PLAIN : PLAIN_OTHER;
	}
	p->flow.near_port = ports[HOOK(ingress) ? 1 : 0];
	p->flow.far_port = ports[HOOK(ingress) ? 0 : 1];
	return PLAIN_TCP;
}

/* For all other packets. Returns 0 if it is a TCP packet with ports. */
__noinline int load_any(struct __sk_buff *skb, struct tcp_packet *p)
{
	struct transport t = {};
	__u32 near, far;
	__u16 ports[2];
	int ip = find_ip(skb);

	if (!p || ip < 0 || find_transport(skb, ip, &t) || t.headless || t.proto != IPPROTO_TCP ||
	    bpf_skb_load_bytes(skb, t.l4, ports, sizeof(ports)))
		return -1;
	p->ip = ip;
	p->l4 = t.l4;
	p->flow.near_port = ports[HOOK(ingress) ? 1 : 0];
	p->flow.far_port = ports[HOOK(ingress) ? 0 : 1];
	if (ip & IS_IPV6) {
		p->flow.family = 6;
		near = l3_of(ip) + __builtin_offsetof(struct ipv6hdr, saddr);
		far = near + 16;
		if (bpf_skb_load_bytes(skb, HOOK(ingress) ? far : near, p->flow.near, 16))
			return -1;
		return bpf_skb_load_bytes(skb, HOOK(ingress) ? near : far, p->flow.far, 16);
	}
	p->flow.family = 4;
	near = l3_of(ip) + __builtin_offsetof(struct iphdr, saddr);
	far = near + 4;
	if (bpf_skb_load_bytes(skb, HOOK(ingress) ? far : near, p->flow.near, 4))
		return -1;
	return bpf_skb_load_bytes(skb, HOOK(ingress) ? near : far, p->flow.far, 4);
}

#define HASH_PAIR(i, a, b) ((__u64)((__u32)(a) + settings.secret[i]) * (__u32)((__u32)(b) + settings.secret[(i) + 1]))

/* NH (RFC 4418, 5.2): both directions of a flow have one hash. */
static __always_inline bool is_followed(const struct flow_key *f)
{
	__u64 h = HASH_PAIR(0, f->near[0], f->far[0]) +
		  HASH_PAIR(2, f->ifindex, (__u32)f->near_port << 16 | f->far_port);

	if (!settings.sample_mask)
		return true;
	if (f->family == 6)
		h += HASH_PAIR(4, f->near[1], f->far[1]) + HASH_PAIR(6, f->near[2], f->far[2]) +
		     HASH_PAIR(8, f->near[3], f->far[3]);
	h ^= h >> 32;
	h *= 0xc4ceb9fe1a85ec53ULL; /* as mix in table.h */
	return !(h >> 40 & settings.sample_mask);
}

static __always_inline bool load_followed(struct __sk_buff *skb, struct tcp_packet *p)
{
	enum plain plain;

	__builtin_memset(p, 0, sizeof(*p));
	plain = load_plain(skb, p);
	if (plain == PLAIN_OTHER || (plain == NOT_PLAIN && load_any(skb, p)))
		return false;
	p->flow.ifindex = skb->ifindex;
	return is_followed(&p->flow);
}

static __always_inline __u32 rule_for(struct __sk_buff *skb, const struct flow_key *f)
{
	struct prefix key = { .length = 32 + (f->family == 6 ? 128 : 32) };
	const struct match *m;

	key.hook = hook_number(skb, f->family == 6);
	if (is_by_far())
		__builtin_memcpy(key.addr, f->far, 16);
	else
		__builtin_memcpy(key.addr, f->near, 16);
	m = bpf_map_lookup_elem(&prefixes, &key);
	return m ? m->rule : NO_RULE;
}

/* What a TCP header says. */
struct segment {
	__u32 seq, ack;
	__u32 tsval, tsecr;
	__u32 payload; /* bytes */
	__u32 packets; /* on the wire */
	__u32 largest; /* bytes of payload of one of them */
	__u16 flags;   /* of the TCP header */
	__u16 stamped; /* tsval and tsecr are there */
};

#define FLAG_FIN 0x01
#define FLAG_SYN 0x02
#define FLAG_RST 0x04
#define FLAG_ACK 0x10

/* Iteration over TCP options. */
struct options {
	struct __sk_buff *skb;
	__u32 at, end;
	__u32 value[2]; /* of timestamps, RFC 7323 */
	__u32 found;
	__u32 pad;
};

static long next_option(__u64 i, struct options *o)
{
	__u8 option[2];

	(void)i;
	if (o->at + sizeof(option) > o->end || bpf_skb_load_bytes(o->skb, o->at, option, sizeof(option)) || !option[0])
		return 1;
	if (option[0] == 1) {
		o->at++;
		return 0;
	}
	if (option[0] == 8 && option[1] == 10) {
		o->found = o->at + 10 <= o->end && !bpf_skb_load_bytes(o->skb, o->at + 2, o->value, sizeof(o->value));
		return 1;
	}
	o->at += option[1];
	return option[1] < 2;
}

/* Reads a TCP header. Returns 0 if it is complete. */
__noinline int load_segment(struct __sk_buff *skb, const struct tcp_packet *p, struct segment *s)
{
	struct {
		__be16 ports[2];
		__be32 seq, ack;
		__u8 offset, flags;
		__be16 window, sum, urgent;
	} h;
	struct {
		__u32 head;
		__be32 value[2];
	} usual;
	struct options o = { .skb = skb };
	__u32 end;

	if (!p || !s || bpf_skb_load_bytes(skb, p->l4, &h, sizeof(h)) || h.offset < 0x50)
		return -1;
	o.at = p->l4 + sizeof(h);
	o.end = p->l4 + (h.offset >> 4) * 4;
	s->seq = bpf_ntohl(h.seq);
	s->ack = bpf_ntohl(h.ack);
	s->flags = h.flags;
	if (o.end >= o.at + sizeof(usual) && !bpf_skb_load_bytes(skb, o.at, &usual, sizeof(usual)) &&
	    usual.head == bpf_htonl(0x0101080a)) {
		o.value[0] = usual.value[0];
		o.value[1] = usual.value[1];
		o.found = true;
	} else if (o.end > o.at) {
		bpf_loop(OPTIONS, next_option, &o, 0);
	}
	s->stamped = o.found & 1;
	s->tsval = bpf_ntohl(o.value[0]);
	s->tsecr = bpf_ntohl(o.value[1]);
	/* By the IP header, as Ethernet pads short frames. */
	end = end_of(skb, p->ip);
	if (!end || end > skb->len)
		end = skb->len;
	s->payload = end > o.end ? end - o.end : 0;
	s->packets = 1;
	s->largest = s->payload;
	if (skb->gso_size && skb->gso_size < s->payload) {
		s->largest = skb->gso_size;
		s->packets = (s->payload + s->largest - 1) / s->largest;
	}
	return 0;
}

static __always_inline void host_of(struct host *host, const struct half *half, const struct flow_key *f)
{
	host->rule = half->rule;
	if (half->flags & HALF_BY_FAR)
		__builtin_memcpy(host->addr, f->far, 16);
	else
		__builtin_memcpy(host->addr, f->near, 16);
}

/* The state of a rule, or of its host with STATE_BY_KEY, which says whether packets of a half are limited. */
static __always_inline struct state *limiter_of(const struct half *half, const struct flow_key *f)
{
	struct state *rule;
	struct host host;
	__u32 id = half->rule;

	rule = bpf_map_lookup_elem(&rules, &id);
	if (!rule || !(rule->flags & STATE_BY_KEY))
		return rule;
	host_of(&host, half, f);
	return bpf_map_lookup_elem(&hosts, &host);
}

__noinline int is_limited(const struct half *half, const struct flow_key *f, __u64 now)
{
	const struct state *s;

	if (!half || !f || half->rule == NO_RULE)
		return false;
	s = limiter_of(half, f);
	return s && READ_ONCE(s->limited_until) > now;
}

/* The rule has dropped, delayed or marked a packet of the half. */
__noinline int now_limited(const struct half *half, const struct flow_key *f, __u64 now)
{
	struct state *s;

	if (!half || !f || half->rule == NO_RULE)
		return 0;
	s = limiter_of(half, f);
	if (s)
		WRITE_ONCE(s->limited_until, now + LIMITED_NS);
	return 0;
}

/* Awaits the acknowledgement of a segment, if a place is free. */
static __always_inline void put_stamp(struct half *half, __u32 end, __u32 tsval, __u64 now)
{
	struct stamp *stamp;
	__u64 old;

#pragma unroll
	for (int i = 0; i < STAMPS; i++) {
		stamp = &half->stamps[i];
		old = READ_ONCE(stamp->word);
		if (old && is_before(half->acked, old >> 32) && now - stamp->time < STAMP_NS)
			continue;
		/* Another CPU may be reading: the time belongs to no word meanwhile. */
		__sync_lock_test_and_set(&stamp->word, 0);
		WRITE_ONCE(stamp->time, now);
		__sync_lock_test_and_set(&stamp->word, (__u64)end << 32 | tsval);
		return;
	}
}

/* The time of the segment that ends there, and its timestamp value; 0 if there is none. */
static __always_inline __u64 take_stamp(struct half *half, __u32 end, __u32 *tsval)
{
	struct stamp *stamp;
	__u64 word, time;

#pragma unroll
	for (int i = 0; i < STAMPS; i++) {
		stamp = &half->stamps[i];
		word = READ_ONCE(stamp->word);
		if (word >> 32 != end || !word)
			continue;
		time = READ_ONCE(stamp->time);
		if (__sync_val_compare_and_swap(&stamp->word, word, 0) != word)
			return 0;
		*tsval = word;
		return time;
	}
	return 0;
}

static __always_inline void begin_half(struct half *half, const struct segment *s, __u32 end)
{
	half->highest = end;
	half->from = s->seq;
	half->left = s->seq;
	half->acked = s->seq;
	half->segment = 0;
	half->syn_end = s->flags & FLAG_SYN ? end : s->seq;
	half->flags |= HALF_SEEN;
#pragma unroll
	for (int i = 0; i < STAMPS; i++)
		half->stamps[i].word = 0;
}

/* Follows what a packet sends. Returns how many of its bytes of payload were sent before. */
__noinline __u32 send_segment(struct half *half, const struct segment *s, __u64 now)
{
	__u32 end, jump, oldest, again = 0, tsval;

	if (!half || !s)
		return 0;
	end = s->seq + s->payload + !!(s->flags & FLAG_SYN) + !!(s->flags & FLAG_FIN);
	if (end == s->seq)
		return 0;
	jump = s->seq - half->highest + FAR_JUMP;
	if (!(half->flags & HALF_SEEN) || jump > 2 * FAR_JUMP || (s->flags & FLAG_SYN && end != half->highest)) {
		begin_half(half, s, end);
	} else if (is_before(s->seq, half->highest)) {
		again = is_before(half->highest, end) ? half->highest - s->seq : s->payload;
		if (again > s->payload)
			again = s->payload;
		/* What was dropped here and is sent again comes to the receiver for the first time. */
		if (is_before(s->seq, half->left)) {
			half->from = half->highest = is_before(half->highest, end) ? end : half->highest;
			return again;
		}
		take_stamp(half, end, &tsval);
	}
	half->end = end;
	if (is_before(half->highest, end))
		half->highest = end;
	if (s->largest > half->segment)
		half->segment = s->largest;
	/*
	 * Sequence numbers compare only within 2 GiB, and a flow may send more than that before it
	 * sends something again, or while its acknowledgements go another way.
	 */
	oldest = half->highest - MAX_WINDOW;
	if (is_before(half->from, oldest))
		half->from = oldest;
	if (is_before(half->acked, oldest))
		half->acked = oldest;
	put_stamp(half, end, s->tsval, now);
	return again;
}

/*
 * The round trip that a packet's acknowledgement ends, or 0. Only the segment that made the
 * receiver acknowledge counts: the acknowledgement ends with it, and covers more than one
 * segment, so the receiver did not delay it.
 */
__noinline __u64 end_round(struct half *half, const struct segment *s, __u64 now)
{
	__u32 fresh, tsval = 0;
	__u64 time;

	if (!half || !s || !(half->flags & HALF_SEEN) || !(s->flags & FLAG_ACK) || s->flags & FLAG_RST)
		return 0;
	if (!is_before(half->acked, s->ack) || is_before(half->highest, s->ack))
		return 0;
	fresh = s->ack - half->acked;
	half->acked = s->ack;
	time = take_stamp(half, s->ack, &tsval);
	if (!time)
		return 0;
	if (!is_before(half->from, s->ack) || time >= now || now - time > STAMP_NS || now < half->next)
		return 0;
	if (s->ack != half->syn_end && fresh <= (half->segment > FULL_SEGMENT ? half->segment : FULL_SEGMENT))
		return 0;
	/* It echoes a later packet: an earlier acknowledgement was lost, or the segment was sent again. */
	if (s->stamped && is_before(tsval, s->tsecr))
		return 0;
	half->next = now + SAMPLE_NS;
	return now - time;
}

static __always_inline void add_counts(struct counts *c, const struct segment *s, __u32 again)
{
	__sync_fetch_and_add(&c->packets, s->packets);
	__sync_fetch_and_add(&c->bytes, s->payload);
	if (again) {
		__sync_fetch_and_add(&c->again_packets, (again + s->largest - 1) / s->largest);
		__sync_fetch_and_add(&c->again_bytes, again);
	}
}

static __always_inline struct counts *counts_of(struct state *state, bool limited)
{
	return limited ? &state->counts[1] : &state->counts[0];
}

__noinline int count_segment(const struct half *half, const struct flow_key *f, const struct segment *s, __u32 again, __u64 now)
{
	struct host host = {};
	struct state *state;
	bool limited;
	__u32 id;

	if (!half || !f || !s || !s->largest)
		return 0;
	id = half->rule;
	host_of(&host, half, f);
	limited = is_limited(half, f, now);
	state = bpf_map_lookup_elem(&rules, &id);
	if (state)
		add_counts(counts_of(state, limited), s, again);
	state = bpf_map_lookup_elem(&hosts, &host);
	if (!state) {
		if (!may_add(now))
			return 0;
		bpf_map_update_elem(&hosts, &host, &no_state, BPF_NOEXIST);
		state = bpf_map_lookup_elem(&hosts, &host);
	}
	if (state)
		add_counts(counts_of(state, limited), s, again);
	return 0;
}

/* Reports a round trip of a segment of sent, which a packet of answering ended. */
__noinline int put_sample(const struct half *sent, const struct half *answering, const struct flow_key *f, __u64 rtt, __u64 now)
{
	struct spending *b = budget_at(now);
	struct round_trip *sample;
	__u32 limited;

	if (!sent || !answering || !f || !b)
		return 0;
	if (sent->rule == NO_RULE && answering->rule == NO_RULE)
		return 0;
	limited = is_limited(sent, f, now) | is_limited(answering, f, now) << 1;
	sample = b->samples < settings.samples ? bpf_ringbuf_reserve(&samples, sizeof(*sample), 0) : NULL;
	if (!sample) {
		b->lost_samples++;
		return 0;
	}
	b->samples++;
	sample->rtt = rtt;
	sample->rule[0] = sent->rule;
	sample->rule[1] = answering->rule;
	__builtin_memcpy(sample->near, f->near, 16);
	__builtin_memcpy(sample->far, f->far, 16);
	sample->limited = limited;
	sample->family = f->family;
	sample->ingress = !HOOK(ingress);
	sample->by_far = !!(sent->flags & HALF_BY_FAR) | !!(answering->flags & HALF_BY_FAR) << 1;
	sample->pad = 0;
	bpf_ringbuf_submit(sample, BPF_RB_NO_WAKEUP);
	return 0;
}

/* Whether the program behind sees the packets of a rule that pass. */
static __always_inline bool is_seen(__u32 id)
{
	const struct state *rule = bpf_map_lookup_elem(&rules, &id);

	return rule && !(rule->flags & STATE_UNSEEN);
}

static __always_inline struct half *own_half(struct flow *flow)
{
	return HOOK(ingress) ? &flow->half[1] : &flow->half[0];
}

static __always_inline struct half *other_half(struct flow *flow)
{
	return HOOK(ingress) ? &flow->half[0] : &flow->half[1];
}

__noinline int follow(struct __sk_buff *skb, const struct tcp_packet *p)
{
	struct half *half, *other;
	struct segment s = {};
	__u64 now = time_ns(skb), rtt;
	struct flow *flow;
	__u32 rule, again, cpu = bpf_get_smp_processor_id() + 1;
	bool seen;

	if (!p || load_segment(skb, p, &s))
		return 0;
	rule = rule_for(skb, &p->flow);
	flow = bpf_map_lookup_elem(&flows, &p->flow);
	if (!flow) {
		/* A flow begins with what a rule matches and what can be acknowledged. */
		if (rule == NO_RULE || (!s.payload && !(s.flags & FLAG_SYN)) || !may_add(now))
			return 0;
		bpf_map_update_elem(&flows, &p->flow, &no_flow, BPF_NOEXIST);
		flow = bpf_map_lookup_elem(&flows, &p->flow);
		if (!flow)
			return 0;
		other = other_half(flow);
		other->rule = NO_RULE;
	}
	half = own_half(flow);
	other = other_half(flow);
	half->rule = rule;
	if (is_by_far())
		half->flags |= HALF_BY_FAR;
	else
		half->flags &= ~HALF_BY_FAR;
	seen = is_seen(rule);
	if (seen) {
		/* The last packet did not come out behind the other programs on this CPU. */
		if (READ_ONCE(half->pending) == cpu)
			now_limited(half, &p->flow, now);
		WRITE_ONCE(half->pending, cpu);
		half->ecn = ecn_of(skb, p->ip);
		half->departs = skb->tstamp;
	}
	again = send_segment(half, &s, now);
	if (!seen)
		half->left = half->highest;
	if (rule != NO_RULE)
		count_segment(half, &p->flow, &s, again, now);
	rtt = end_round(other, &s, now);
	if (rtt)
		put_sample(other, half, &p->flow, rtt, now);
	return 0;
}

SEC("tc")
int rtt_before(struct __sk_buff *skb)
{
	struct tcp_packet p;

	if (load_followed(skb, &p))
		follow(skb, &p);
	return NEXT;
}

SEC("tc")
int rtt_behind(struct __sk_buff *skb)
{
	struct tcp_packet p;
	struct flow *flow;
	struct half *half;
	bool delayed, marked;
	__u64 now;

	if (!load_followed(skb, &p))
		return NEXT;
	flow = bpf_map_lookup_elem(&flows, &p.flow);
	if (!flow)
		return NEXT;
	half = own_half(flow);
	if (READ_ONCE(half->pending) != bpf_get_smp_processor_id() + 1)
		return NEXT;
	WRITE_ONCE(half->pending, 0);
	if (is_before(half->left, half->end))
		half->left = half->end;
	now = time_ns(skb);
	/* A socket may have set a departure time, too. */
	delayed = !HOOK(ingress) && !HOOK(virtual_clock) && skb->tstamp != half->departs && skb->tstamp > now + DELAY_NS;
	marked = half->ecn && half->ecn != 3 && ecn_of(skb, p.ip) == 3;
	if (delayed || marked)
		now_limited(half, &p.flow, now);
	return NEXT;
}

/* The talker that sends a packet, and its size on the wire. Returns 0 if a prefix matches. */
__noinline int load_talker(struct __sk_buff *skb, struct talker *key, struct size *wire)
{
	struct prefix prefix = {};
	const struct match *m;
	struct transport t = {};
	struct address far = {};
	int ip = find_ip(skb);

	if (!key || !wire || ip < 0 || far_address(skb, ip, &far))
		return -1;
	prefix.hook = hook_number(skb, ip & IS_IPV6);
	prefix.length = 32 + (ip & IS_IPV6 ? 128 : 32);
	__builtin_memcpy(prefix.addr, &far, 16);
	m = bpf_map_lookup_elem(&prefixes, &prefix);
	if (!m || m->rule)
		return -1;
	measure(skb, ip, m->overhead, m->mpu, wire);
	key->family = ip & IS_IPV6 ? 6 : 4;
	if (!settings.by_flow) {
		__builtin_memcpy(key->src, &far, 16);
		return 0;
	}
	if (ip & IS_IPV6) {
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct ipv6hdr, saddr), key->src, 16);
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct ipv6hdr, daddr), key->dst, 16);
	} else {
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct iphdr, saddr), key->src, 4);
		bpf_skb_load_bytes(skb, l3_of(ip) + __builtin_offsetof(struct iphdr, daddr), key->dst, 4);
	}
	if (find_transport(skb, ip, &t))
		return 0;
	key->proto = t.proto;
	if (!t.headless && has_ports(t.proto))
		bpf_skb_load_bytes(skb, t.l4, &key->sport, 2 * sizeof(key->sport));
	return 0;
}

SEC("tc")
int talkers_before(struct __sk_buff *skb)
{
	struct talker key = {};
	struct traffic *t;
	struct size wire = {};
	__u32 zero = 0;

	if (load_talker(skb, &key, &wire))
		return NEXT;
	t = bpf_map_lookup_elem(&total, &zero);
	if (t) {
		t->packets += wire.packets;
		t->bytes += wire.bytes;
	}
	t = bpf_map_lookup_elem(&talkers, &key);
	if (!t) {
		if (!may_add(time_ns(skb)))
			return NEXT;
		bpf_map_update_elem(&talkers, &key, &no_traffic, BPF_NOEXIST);
		t = bpf_map_lookup_elem(&talkers, &key);
	}
	if (t) {
		__sync_fetch_and_add(&t->packets, wire.packets);
		__sync_fetch_and_add(&t->bytes, wire.bytes);
	}
	return NEXT;
}

SEC("tc")
int talkers_behind(struct __sk_buff *skb)
{
	struct talker key = {};
	struct traffic *t;
	struct size wire = {};
	__u32 zero = 0;

	if (load_talker(skb, &key, &wire))
		return NEXT;
	t = bpf_map_lookup_elem(&total, &zero);
	if (t) {
		t->passed_packets += wire.packets;
		t->passed_bytes += wire.bytes;
	}
	t = bpf_map_lookup_elem(&talkers, &key);
	if (t) {
		__sync_fetch_and_add(&t->passed_packets, wire.packets);
		__sync_fetch_and_add(&t->passed_bytes, wire.bytes);
	}
	return NEXT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
