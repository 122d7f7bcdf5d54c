//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Programs that look at packets while a process wants to know, and that never change or
 * drop one. They have maps of their own and know nothing of those of shapectl.c. One of
 * each pair runs before all other tcx programs of the device, the other behind them: a
 * packet that only the first one sees was dropped in between.
 *
 * rtt_before and rtt_behind follow TCP flows, docs/watch.md. talkers_before and
 * talkers_behind count hosts or flows.
 */
#include <linux/pkt_cls.h>
#include "nat.h"
#include "map.h"

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

/* What has a budget. */
enum expense {
	SAMPLES = 0,
	ELEMENTS = 1, /* new flows, hosts and talkers */
};

/* Constants of a loaded program, beside those of struct hook. */
struct watching {
	__u32 sample_mask; /* a flow is followed if its hash has none of these bits */
	__u32 most[2];	   /* by enum expense, for each CPU and window */
	__u32 by_flow;	   /* talkers are flows, not hosts */
	__u32 of_host;	   /* of one host, which may be behind NAT */
	__s32 overhead;	   /* talkers: bytes a segment */
	__u32 mpu;
};

const volatile struct watching settings;

/* A prefix of a rule on a hook. */
struct prefix {
	__u32 length; /* in bits, with those of hook */
	__u32 hook;   /* see rule_for */
	__u32 addr[4];
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
	struct counts counts[2]; /* while it does not limit, and while it does */
};

/* A host of a rule: what the rule matches of a packet. */
struct host {
	__u32 rule; /* its place in the map rules, or NO_RULE */
	__u32 addr[4];
};

/* A segment whose acknowledgement is awaited. */
struct stamp {
	__u64 word; /* the sequence number after it << 32 | its timestamp value; 0 for none */
	__u64 time;
};

/* One direction of a flow. */
struct half {
	struct host host; /* of the last packet */
	__u32 highest; /* sequence number after all that was seen */
	__u32 from;    /* what ends up to here is no sample, as it was sent again (Karn) */
	__u32 acked;
	__u32 segment; /* bytes of the largest one */
	__u32 syn_end; /* sequence number after the SYN */
	__u32 pending; /* the CPU plus one that saw a packet before the other programs, and not behind them */
	__u16 ecn;     /* of that packet */
	__u16 seen;    /* a segment, so that the numbers count */
	__u32 end;     /* sequence number after it */
	__u32 left;    /* sequence number after all that came out behind the other programs */
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
	/* Of the packet that was acknowledged, and of its acknowledgement: */
	struct host host[2];
	__u32 limited[2]; /* the rule, or with STATE_BY_KEY the host, limited at the end of the round trip */
};

struct spending {
	__u64 window;
	__u32 spent[2]; /* by enum expense */
	__u64 lost[2];	/* beyond the budget, or without room */
};

/* On the wire: what came before the other programs, and what was still there behind them. */
struct traffic {
	__u64 packets;
	__u64 bytes;
	__u64 passed_packets;
	__u64 passed_bytes;
};

MAP(prefixes, LPM_TRIE, BPF_F_NO_PREALLOC, struct prefix, __u32); /* the place of the rule; of talkers 0 for the one that counts */
MAP(rules, ARRAY, BPF_F_MMAPABLE, __u32, struct state);
MAP(hosts, LRU_HASH, 0, struct host, struct state);
MAP(flows, LRU_HASH, 0, struct key, struct flow);	/* the id is that of the device, see load_followed */
MAP(talkers, LRU_HASH, 0, struct key, struct traffic);	/* the id is 0; a host is in src */
MAP(budget, PERCPU_ARRAY, 0, __u32, struct spending);
MAP(total, PERCPU_ARRAY, 0, __u32, struct traffic);

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12);
} samples SEC(".maps");

/* For bpf2go. */
const enum state_flag *keep_flags __attribute__((unused));
const enum expense *keep_expense __attribute__((unused));
const struct round_trip *keep_round_trip __attribute__((unused));

static const struct flow no_flow = { .half = { { .host.rule = NO_RULE }, { .host.rule = NO_RULE } } };
static const struct state no_state;
static const struct traffic no_traffic;

static __always_inline bool is_before(__u32 a, __u32 b)
{
	return (__s32)(a - b) < 0;
}

static __always_inline __u32 later(__u32 a, __u32 b)
{
	return is_before(a, b) ? b : a;
}

/* Spends one of a budget. Returns what this CPU has spent, or NULL if it must not spend more in this window. */
static __always_inline struct spending *spend(__u64 now, enum expense what)
{
	__u32 zero = 0;
	struct spending *b = bpf_map_lookup_elem(&budget, &zero);

	if (!b)
		return NULL;
	if (b->window != now >> WINDOW_BITS) {
		b->window = now >> WINDOW_BITS;
		b->spent[SAMPLES] = b->spent[ELEMENTS] = 0;
	}
	if (b->spent[what] >= settings.most[what]) {
		b->lost[what]++;
		return NULL;
	}
	b->spent[what]++;
	return b;
}

/* The value of a key in an LRU map, which gets one if the budget allows that. */
static __always_inline void *value_of(void *map, const void *key, const void *none, __u64 now)
{
	void *value = bpf_map_lookup_elem(map, key);

	if (value || !spend(now, ELEMENTS))
		return value;
	bpf_map_update_elem(map, key, none, BPF_NOEXIST);
	return bpf_map_lookup_elem(map, key);
}

/* A packet. */
struct packet {
	struct key flow;
	__u32 ip; /* see packet.h */
	__u32 l4; /* offset of the transport header, 0 for none */
};

/* Parses a packet. Returns false if it is not IP. */
static __always_inline bool load_packet(struct __sk_buff *skb, struct packet *p)
{
	__u32 family;
	void *l3;
	int ip;

	family = plain_header(skb, &l3);
	ip = family == 4 ? HOOK(l2_bytes) : family == 6 ? HOOK(l2_bytes) | IS_IPV6 : find_ip(skb);
	__builtin_memset(p, 0, sizeof(*p));
	if (ip < 0)
		return false;
	p->ip = ip;
	p->l4 = parse_flow(skb, ip, &p->flow);
	return true;
}

/* The rule that matches an address. Each hook has two numbers here: for IPv4 and IPv6. */
static __always_inline __u32 rule_for(struct __sk_buff *skb, __u32 ip, const __u32 *addr)
{
	struct prefix key = { .length = 32 + (ip & IS_IPV6 ? 128 : 32) };
	const __u32 *rule;

	key.hook = skb->ifindex << 2 | (HOOK(ingress) ? 2 : 0) | !!(ip & IS_IPV6);
	__builtin_memcpy(key.addr, addr, sizeof(key.addr));
	rule = bpf_map_lookup_elem(&prefixes, &key);
	return rule ? *rule : NO_RULE;
}

/* Swaps the ends of a flow. */
static __always_inline void turn(struct key *flow)
{
	struct key way = *flow;

	__builtin_memcpy(flow->src, way.dst, sizeof(flow->src));
	__builtin_memcpy(flow->dst, way.src, sizeof(flow->dst));
	flow->sport = way.dport;
	flow->dport = way.sport;
}

/* Parses a TCP packet of a flow that is followed. Both directions have one key, as the packets have it that leave the device. */
static __always_inline bool load_followed(struct __sk_buff *skb, struct packet *p)
{
	if (!load_packet(skb, p) || p->flow.proto != IPPROTO_TCP || !p->l4)
		return false;
	p->flow.id = skb->ifindex;
	if (HOOK(ingress))
		turn(&p->flow);
	return !settings.sample_mask || !(hash_flow(&p->flow, p->ip, p->flow.id) >> 40 & settings.sample_mask);
}

/* What a TCP header says. */
struct segment {
	__u32 seq, ack;
	__u32 tsval, tsecr; /* 0 for none */
	__u32 payload; /* bytes */
	__u32 largest; /* bytes of payload of one packet on the wire */
	__be32 flags;  /* TCP_FLAG_SYN and so on */
};

/* Reads a TCP header. Returns false if it is not complete. */
static __noinline bool load_segment(struct __sk_buff *skb, const struct packet *p, struct segment *s)
{
	struct {
		struct tcphdr tcp;
		__be32 option, tsval, tsecr;
	} h;
	__u32 start, end;

	if (bpf_skb_load_bytes(skb, p->l4, &h.tcp, sizeof(h.tcp)) || h.tcp.doff < sizeof(h.tcp) / 4)
		return false;
	s->seq = bpf_ntohl(h.tcp.seq);
	s->ack = bpf_ntohl(h.tcp.ack_seq);
	s->flags = tcp_flag_word(&h.tcp);
	/* Timestamps where RFC 7323 recommends them (appendix A). Only in a SYN they are elsewhere, and not needed. */
	if (h.tcp.doff >= sizeof(h) / 4 && !bpf_skb_load_bytes(skb, p->l4 + sizeof(h.tcp), &h.option, sizeof(h) - sizeof(h.tcp)) &&
	    h.option == bpf_htonl(0x0101080a)) {
		s->tsval = bpf_ntohl(h.tsval);
		s->tsecr = bpf_ntohl(h.tsecr);
	}
	start = p->l4 + h.tcp.doff * 4;
	/* By the IP header, as Ethernet pads short frames. */
	end = end_of(skb, p->ip);
	if (!end || end > skb->len)
		end = skb->len;
	s->payload = end > start ? end - start : 0;
	s->largest = skb->gso_size && skb->gso_size < s->payload ? skb->gso_size : s->payload;
	return true;
}

/* The state that says whether packets of a half are limited: of its rule, or with STATE_BY_KEY of its host. */
static __always_inline struct state *limiter_of(const struct half *half)
{
	struct host host = half->host;
	struct state *rule = bpf_map_lookup_elem(&rules, &host.rule);

	return rule && rule->flags & STATE_BY_KEY ? bpf_map_lookup_elem(&hosts, &host) : rule;
}

static __always_inline bool is_limited(const struct half *half, __u64 now)
{
	const struct state *s = limiter_of(half);

	return s && READ_ONCE(s->limited_until) > now;
}

/* The rule has dropped, delayed or marked a packet of the half. */
static __always_inline void now_limited(const struct half *half, __u64 now)
{
	struct state *s = limiter_of(half);

	if (s)
		WRITE_ONCE(s->limited_until, now + LIMITED_NS);
}

/* Awaits the acknowledgement of a segment, if a place is free. */
static __always_inline void put_stamp(struct half *half, __u32 end, __u32 tsval, __u64 now)
{
	struct stamp *stamp;
	__u64 old;

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

/* Follows what a packet sends. Returns how many of its bytes of payload were sent before. */
static __noinline __u32 send_segment(struct half *half, const struct segment *s, __u64 now)
{
	__u32 end, jump, oldest, again = 0, tsval;

	end = s->seq + s->payload + !!(s->flags & TCP_FLAG_SYN) + !!(s->flags & TCP_FLAG_FIN);
	if (end == s->seq)
		return 0;
	jump = s->seq - half->highest + FAR_JUMP;
	if (!half->seen || jump > 2 * FAR_JUMP || (s->flags & TCP_FLAG_SYN && end != half->highest)) {
		half->seen = true;
		half->highest = end;
		half->from = half->left = half->acked = s->seq;
		half->syn_end = s->flags & TCP_FLAG_SYN ? end : s->seq;
		half->segment = 0;
		__builtin_memset(half->stamps, 0, sizeof(half->stamps));
	} else if (is_before(s->seq, half->highest)) {
		again = half->highest - s->seq;
		if (again > s->payload)
			again = s->payload;
		/* What was dropped here and is sent again comes to the receiver for the first time. */
		if (is_before(s->seq, half->left)) {
			half->from = half->highest = later(half->highest, end);
			return again;
		}
		take_stamp(half, end, &tsval);
	}
	half->end = end;
	half->highest = later(half->highest, end);
	if (s->largest > half->segment)
		half->segment = s->largest;
	/* Numbers compare only within 2 GiB, and a flow may send more before it repeats something or an acknowledgement is seen. */
	oldest = half->highest - MAX_WINDOW;
	half->from = later(half->from, oldest);
	half->acked = later(half->acked, oldest);
	put_stamp(half, end, s->tsval, now);
	return again;
}

/*
 * The round trip that a packet's acknowledgement ends, or 0. Only the segment that made the
 * receiver acknowledge counts: the acknowledgement ends with it, and covers more than one
 * segment, so the receiver did not delay it.
 */
static __noinline __u64 end_round(struct half *half, const struct segment *s, __u64 now)
{
	__u32 fresh, tsval = 0;
	__u64 time;

	if (!half->seen || !(s->flags & TCP_FLAG_ACK) || s->flags & TCP_FLAG_RST)
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
	if (tsval && s->tsecr && is_before(tsval, s->tsecr))
		return 0;
	half->next = now + SAMPLE_NS;
	return now - time;
}

/* Counts a packet with payload for a rule or host. */
static __always_inline void count_segment(struct state *state, bool limited, const struct segment *s, __u32 again)
{
	struct counts *c;

	if (!state)
		return;
	c = &state->counts[limited];
	__sync_fetch_and_add(&c->packets, (s->payload + s->largest - 1) / s->largest);
	__sync_fetch_and_add(&c->bytes, s->payload);
	if (again) {
		__sync_fetch_and_add(&c->again_packets, (again + s->largest - 1) / s->largest);
		__sync_fetch_and_add(&c->again_bytes, again);
	}
}

/* Reports a round trip of a segment of sent, which a packet of answering ended. */
static __always_inline void put_sample(const struct half *sent, const struct half *answering, __u64 rtt, __u64 now)
{
	struct round_trip sample = { .rtt = rtt, .host = { sent->host, answering->host } };
	struct spending *b;

	if (sent->host.rule == NO_RULE && answering->host.rule == NO_RULE)
		return;
	sample.limited[0] = is_limited(sent, now);
	sample.limited[1] = is_limited(answering, now);
	b = spend(now, SAMPLES);
	if (b && bpf_ringbuf_output(&samples, &sample, sizeof(sample), BPF_RB_NO_WAKEUP))
		b->lost[SAMPLES]++;
}

static __always_inline struct half *half_of(struct flow *flow, bool ingress)
{
	return &flow->half[ingress];
}

SEC("tc")
int rtt_before(struct __sk_buff *skb)
{
	__u32 again, cpu = bpf_get_smp_processor_id() + 1;
	struct half *half, *other;
	struct segment s = {};
	struct state *state;
	struct packet p;
	struct flow *flow;
	struct host host;
	bool seen, limited;
	__u64 now, rtt;

	if (!load_followed(skb, &p) || !load_segment(skb, &p, &s))
		return NEXT;
	now = time_ns(skb);
	/* What rules match is usually beyond the device, so it is dst of the key. */
	__builtin_memcpy(host.addr, !HOOK(match_src) == !HOOK(ingress) ? p.flow.dst : p.flow.src, sizeof(host.addr));
	host.rule = rule_for(skb, p.ip, host.addr);
	/* A flow begins with what a rule matches and what can be acknowledged. */
	if (host.rule != NO_RULE && (s.payload || s.flags & TCP_FLAG_SYN))
		flow = value_of(&flows, &p.flow, &no_flow, now);
	else
		flow = bpf_map_lookup_elem(&flows, &p.flow);
	if (!flow)
		return NEXT;
	half = half_of(flow, HOOK(ingress));
	other = half_of(flow, !HOOK(ingress));
	half->host = host;
	state = bpf_map_lookup_elem(&rules, &host.rule);
	seen = state && !(state->flags & STATE_UNSEEN); /* by the program behind, if it passes */
	if (seen) {
		/* The last packet did not come out behind the other programs on this CPU. */
		if (READ_ONCE(half->pending) == cpu)
			now_limited(half, now);
		WRITE_ONCE(half->pending, cpu);
		half->ecn = ecn_of(skb, p.ip);
		half->departs = skb->tstamp;
	}
	again = send_segment(half, &s, now);
	if (!seen)
		half->left = half->highest;
	if (s.payload && host.rule != NO_RULE) {
		limited = is_limited(half, now);
		count_segment(state, limited, &s, again);
		count_segment(value_of(&hosts, &host, &no_state, now), limited, &s, again);
	}
	rtt = end_round(other, &s, now);
	if (rtt)
		put_sample(other, half, rtt, now);
	return NEXT;
}

SEC("tc")
int rtt_behind(struct __sk_buff *skb)
{
	struct packet p;
	struct flow *flow;
	struct half *half;
	bool delayed, marked;
	__u64 now;

	if (!load_followed(skb, &p))
		return NEXT;
	flow = bpf_map_lookup_elem(&flows, &p.flow);
	if (!flow)
		return NEXT;
	half = half_of(flow, HOOK(ingress));
	if (READ_ONCE(half->pending) != bpf_get_smp_processor_id() + 1)
		return NEXT;
	WRITE_ONCE(half->pending, 0);
	half->left = later(half->left, half->end);
	now = time_ns(skb);
	/* A socket may have set a departure time, too. */
	delayed = !HOOK(ingress) && !HOOK(virtual_clock) && skb->tstamp != half->departs && skb->tstamp > now + DELAY_NS;
	marked = half->ecn && half->ecn != CE && ecn_of(skb, p.ip) == CE;
	if (delayed || marked)
		now_limited(half, now);
	return NEXT;
}

static __always_inline void add_traffic(struct traffic *t, __u64 wire, bool passed)
{
	__sync_fetch_and_add(passed ? &t->passed_packets : &t->packets, wire >> 32);
	__sync_fetch_and_add(passed ? &t->passed_bytes : &t->bytes, (__u32)wire);
}

/* Counts a packet for who sends it. */
static __always_inline int count_talker(struct __sk_buff *skb, bool passed)
{
	__u64 wire;
	struct traffic *t;
	struct packet p;
	__u32 far[4], near[4], zero = 0;
	bool counts;

	if (!load_packet(skb, &p))
		return NEXT;
	__builtin_memcpy(far, HOOK(match_src) ? p.flow.src : p.flow.dst, sizeof(far));
	counts = !rule_for(skb, p.ip, far);
	if (HOOK(nat)) {
		if (look_inside(skb, p.ip, &p.flow, near))
			__builtin_memcpy(HOOK(ingress) ? p.flow.dst : p.flow.src, near, sizeof(near));
		if (settings.of_host && !counts)
			counts = !rule_for(skb, p.ip, near);
	}
	if (!counts)
		return NEXT;
	if (!settings.by_flow) {
		p.flow = (struct key){ .family = p.flow.family };
		__builtin_memcpy(p.flow.src, HOOK(nat) ? near : far, sizeof(far));
	}
	wire = measure(skb, p.ip, settings.overhead, settings.mpu);
	t = bpf_map_lookup_elem(&total, &zero);
	if (t)
		add_traffic(t, wire, passed);
	t = passed ? bpf_map_lookup_elem(&talkers, &p.flow) : value_of(&talkers, &p.flow, &no_traffic, time_ns(skb));
	if (t)
		add_traffic(t, wire, passed);
	return NEXT;
}

SEC("tc")
int talkers_before(struct __sk_buff *skb)
{
	return count_talker(skb, false);
}

SEC("tc")
int talkers_behind(struct __sk_buff *skb)
{
	return count_talker(skb, true);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
