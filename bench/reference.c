//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
// Programs for comparison. They parse a plain IPv4 frame with UDP, and have no checks and counters beyond their
// purpose.
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <stddef.h>
#include "../bpf/map.h"

char _license[] SEC("license") = "Dual BSD/GPL";

// NEXT is TCX_NEXT: the next program sees the packet, as with conforming packets of shapectl.
enum { NEXT = -1, DROP = 2 };

#define inline static __always_inline
#define PROGRAM(name, verdict) SEC("tc") int name(struct __sk_buff *skb) { (void)skb; return verdict; }

// The loader sets the number of entries of maps, a power of two, and the last index of arrays.
const volatile __u32 last;

struct frame {
	struct ethhdr ethernet;
	struct iphdr ip;
	__u32 ports;
} __attribute__((packed));

inline void *header(struct __sk_buff *skb, __u32 bytes)
{
	void *data = (void *)(long)skb->data;

	return data + bytes <= (void *)(long)skb->data_end ? data : NULL;
}

PROGRAM(empty, NEXT)
PROGRAM(clock, (bpf_ktime_get_ns(), NEXT))
PROGRAM(sink, DROP)

// GCRA at a fixed rate has a TAT in a word. BURST is never used up, in ns.
struct line {
	__u64 value;
} __attribute__((aligned(64)));
#define BURST (1ull << 30)

// An LPM trie: from the destination to the number of its prefix, which has a word.
struct key {
	__u32 bits, address;
};
MAP(trie, LPM_TRIE, BPF_F_NO_PREALLOC, struct key, __u32);
MAP(words, ARRAY, 0, __u32, struct line);

inline __u32 *find(struct __sk_buff *skb)
{
	struct frame *f = header(skb, sizeof(*f));

	return f ? bpf_map_lookup_elem(&trie, &(struct key){32, f->ip.daddr}) : NULL;
}

// The number is read, so that the lookup is not in vain.
inline int known(__u32 *number)
{
	return number && *number == ~0u ? DROP : NEXT;
}

inline int charge(__u32 *number)
{
	__u64 now = number ? bpf_ktime_get_ns() : 0;
	struct line *word = number ? bpf_map_lookup_elem(&words, number) : NULL;

	if (word) {
		__u64 old = word->value, tat = (old > now ? old : now) + 1;

		if (tat - now <= BURST)
			__sync_val_compare_and_swap(&word->value, old, tat);
	}
	return NEXT;
}

PROGRAM(lookup, known(find(skb)))
PROGRAM(charged, charge(find(skb)))

// A limiter as they are often written: a hash map from the 5-tuple to the TAT of the flow. It has no atomic operation: two
// CPUs admit more than one.
struct flow {
	__u32 source, destination, ports, protocol;
};
MAP(flows, LRU_HASH, 0, struct flow, __u64);

inline int limit(struct __sk_buff *skb)
{
	struct frame *f = header(skb, sizeof(*f));

	if (!f)
		return NEXT;

	struct flow key = {f->ip.saddr, f->ip.daddr, f->ports, f->ip.protocol};
	__u64 now = bpf_ktime_get_ns(), *tat = bpf_map_lookup_elem(&flows, &key);

	if (!tat) {
		bpf_map_update_elem(&flows, &key, &now, BPF_ANY);
		return NEXT;
	}
	__u64 next = (*tat > now ? *tat : now) + (skb->len >> 4);

	if (next - now > BURST)
		return DROP;
	*tat = next;
	return NEXT;
}

PROGRAM(flow_map, limit(skb))

// Reads the clock and one cache line, selected by a hash of the source address. Every limiter with as many buckets does at
// least this. The lines are in pages of 4 KiB, like large arrays of the kernel.
MAP(lines, ARRAY, BPF_F_MMAPABLE, __u32, struct line);

inline int touch(struct __sk_buff *skb)
{
	struct frame *f = header(skb, sizeof(*f));
	__u32 i = f ? f->ip.saddr * 0x9e3779b97f4a7c15ull >> 32 & last : 0;

	bpf_ktime_get_ns();
	struct line *l = bpf_map_lookup_elem(&lines, &i);

	return l && l->value ? DROP : NEXT;
}

PROGRAM(memory, touch(skb))

// The clock, and a word that all CPUs share.
struct line shared;

inline int swap(void)
{
	bpf_ktime_get_ns();
	for (int i = 0; i < 8; i++) {
		__u64 old = *(volatile __u64 *)&shared.value;

		if (__sync_val_compare_and_swap(&shared.value, old, old + 1) == old)
			break;
	}
	return NEXT;
}

PROGRAM(shared_word, swap())

// A walk writes the next address of a list in random order into each packet, and calls another program: a test run repeats
// a single packet. A list is cheaper than random numbers, and the CPU prefetches it.
MAP(addresses, ARRAY, 0, __u32, __u32);
MAP(chain, PROG_ARRAY, 0, __u32, __u32);
__u32 cursor;

inline int walk(struct __sk_buff *skb, __u32 at)
{
	__u32 i = cursor++ & last, *address = bpf_map_lookup_elem(&addresses, &i);
	struct frame *f = header(skb, sizeof(*f));

	if (f && address) {
		*(__u32 *)((void *)f + at) = *address;
		bpf_tail_call(skb, &chain, 0);
	}
	return DROP;
}

PROGRAM(walk_source, walk(skb, offsetof(struct frame, ip.saddr)))
PROGRAM(walk_destination, walk(skb, offsetof(struct frame, ip.daddr)))

// Counts the packets and bytes that arrive, and the time of the last frame: of all, or by the last byte of the destination.
struct count {
	__u64 packets, bytes, last;
};
MAP(counts, ARRAY, 0, __u32, struct count);

inline int count(struct __sk_buff *skb, int verdict)
{
	const __u32 tcp_headers = 14 + 20 + 32; // of Ethernet, IPv4, and TCP with timestamps
	__u32 i = 0, segments = skb->gso_segs;

	if (last)
		bpf_skb_load_bytes(skb, offsetof(struct frame, ip.daddr) + 3, &i, 1);
	struct count *c = bpf_map_lookup_elem(&counts, &i);

	if (c) {
		__sync_fetch_and_add(&c->packets, 1);
		// A GSO packet has the headers of its first segment only.
		__sync_fetch_and_add(&c->bytes, skb->len + (segments ? segments - 1 : 0) * tcp_headers);
		c->last = bpf_ktime_get_ns();
	}
	return verdict;
}

PROGRAM(count_pass, count(skb, NEXT))
PROGRAM(count_drop, count(skb, DROP))
