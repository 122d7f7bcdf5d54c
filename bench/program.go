package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	datapath "github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite program runs programs by BPF_PROG_TEST_RUN, without a device or a queue. It
// measures only the cost of a packet in them.

var algorithms = []policy.Algorithm{policy.GCRA, policy.Leaky}

// lab is shared by all cases of the suite.
type lab struct {
	options
	owned
	empty, clock *ebpf.Program
}

func program(ctx context.Context, o options) (err error) {
	l := &lab{options: o}
	defer l.Close()
	if l.empty, err = l.program("empty", exit()); err != nil {
		return err
	}
	if l.clock, err = l.program("clock", slices.Concat(readClock(), exit())); err != nil {
		return err
	}
	if err := onLastCPU(func() error {
		for _, part := range []func(context.Context) error{l.kinds, l.prefixes, l.flows} {
			if err := part(ctx); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return err
	}
	return l.twoCPUs(ctx)
}

// shapectl loads the program with rules.
func (o *owned) shapectl(size maps.Size, rules []policy.Rule) (*ebpf.Program, error) {
	p, _, err := o.loaded(size, rules)
	return p, err
}

// loaded loads the program with rules, and returns both.
func (o *owned) loaded(size maps.Size, rules []policy.Rule) (*ebpf.Program, *maps.Set, error) {
	store, err := maps.New(size, bpf.AbiHook{L2Bytes: ethernetBytes, Secret: secret()})
	if err != nil {
		return nil, nil, err
	}
	o.keep(store)
	p, err := datapath.Load(store, store.Hook())
	if err != nil {
		return nil, nil, err
	}
	o.keep(p)
	set := store.View(0)
	return p, set, set.Load(rules)
}

// secret is constant, so that each run uses the same slots.
func secret() (s [12]uint32) {
	r := newRandom()
	for i := range s {
		s[i] = r.Uint32()
	}
	return s
}

func name(a policy.Algorithm) string { return "shapectl " + a.String() }

// A kind is a bucket scope, and the family of a packet.
type kind struct {
	column string
	ipv6   bool
	each   policy.Each
}

func (k kind) prefix() netip.Prefix {
	if k.ipv6 {
		return everything6
	}
	return everything
}

var kindsOfRule = []kind{
	{"all, IPv4", false, policy.Each{}},
	{"all, IPv6", true, policy.Each{}},
	{"host, IPv4", false, policy.Each{Kind: policy.EachHost}},
	{"host, IPv6", true, policy.Each{Kind: policy.EachHost}},
	{"/64, IPv6", true, policy.Each{Kind: policy.EachSubnet, Bits: 64}},
	{"flow, IPv4", false, policy.Each{Kind: policy.EachFlow}},
	{"flow, IPv6", true, policy.Each{Kind: policy.EachFlow}},
}

const (
	hotPackets  = 50_000  // a sample with all memory in the cache
	coldPackets = 100_000 // a sample of packets that need different memory
	payload     = 22      // 64 bytes on an Ethernet, without FCS
)

// limits returns an arm for each rule, with a packet of a kind and its bucket scope.
func (o *owned) limits(k kind, rules ...policy.Rule) (arms []arm, err error) {
	for _, rule := range rules {
		rule.Each = k.each
		p, err := o.shapectl(maps.Size{Rules: 1, Buckets: 1024}, []policy.Rule{rule})
		if err != nil {
			return nil, err
		}
		arms = append(arms, arm{subject: name(rule.Algorithm), program: p, packet: udp(k.ipv6, payload), repeat: hotPackets})
	}
	return arms, nil
}

// kinds measures one bucket that is always the same, by bucket scope.
func (l *lab) kinds(ctx context.Context) error {
	l.say("  one rule and one bucket")
	if err := l.oneKind(ctx, kind{column: "no rule matches, IPv4"}, everything6); err != nil {
		return err
	}
	if err := l.oneKind(ctx, kind{column: "no rule matches, IPv6", ipv6: true}, everything); err != nil {
		return err
	}
	for _, k := range kindsOfRule {
		if err := l.oneKind(ctx, k, k.prefix()); err != nil {
			return err
		}
	}
	return nil
}

// oneKind measures packets of a kind with a rule for a prefix.
func (l *lab) oneKind(ctx context.Context, k kind, prefix netip.Prefix) error {
	var made owned
	defer made.Close()
	arms, err := made.limits(k, generous(prefix, policy.GCRA), generous(prefix, policy.Leaky))
	if err != nil {
		return err
	}
	packet := arms[0].packet
	arms = append([]arm{
		{subject: emptyProgram, program: l.empty, packet: packet, repeat: hotPackets},
		{subject: clockProgram, program: l.clock, packet: packet, repeat: hotPackets},
	}, arms...)
	return l.contest(ctx, l.rounds(61), arms, func(t turn) { l.addTurn("One rule, one bucket: "+k.column, arms, t) })
}

// prefixes compares rules for up to a million prefixes with an LPM trie of the same prefixes.
func (l *lab) prefixes(ctx context.Context) error {
	sizes := []int{1, 100, 10_000, 100_000, 1_000_000}
	if l.quick {
		sizes = []int{1, 100, 1000}
	}
	for _, ipv6 := range []bool{false, true} {
		for _, n := range sizes {
			if err := l.somePrefixes(ctx, ipv6, n); err != nil {
				return fmt.Errorf("%d prefixes: %w", n, err)
			}
		}
	}
	return nil
}

func (l *lab) somePrefixes(ctx context.Context, ipv6 bool, n int) error {
	family, at := "IPv4", int16(ipv4Dest)
	if ipv6 {
		family, at = "IPv6", ipv6Dest
	}
	l.say("  %s prefixes, %s", count(n), family)
	var made owned
	defer made.Close()
	random := newRandom()
	prefixes := mixedPrefixes(random, ipv6, n)
	var arms []arm
	for _, a := range algorithms {
		rules := make([]policy.Rule, n)
		for i, p := range prefixes {
			rules[i] = generous(p, a)
		}
		p, err := made.shapectl(maps.Size{Rules: uint32(n), Buckets: 1}, rules)
		if err != nil {
			return err
		}
		arms = append(arms, arm{subject: name(a), program: p})
	}
	trie, err := made.trie(prefixes)
	if err != nil {
		return err
	}
	words, err := made.newMap(ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 64, MaxEntries: uint32(n)})
	if err != nil {
		return err
	}
	bare, err := made.trieProgram(trie, ipv6, nil)
	if err != nil {
		return err
	}
	charged, err := made.trieProgram(trie, ipv6, chargeWord(words))
	if err != nil {
		return err
	}
	ours := arms
	arms = append(arms,
		arm{subject: "LPM trie", note: "lookup only: no clock, no bucket", program: bare},
		arm{subject: "LPM trie, clock and bucket", note: "fixed rate, no counters", program: charged})
	many := walkLength
	if l.quick {
		many = 1 << 14
	}
	inside := func() netip.Addr { return addressIn(random, prefixes[random.IntN(n)]) }
	for _, pattern := range []struct {
		table   string
		address func() netip.Addr
		many    int
	}{
		{"one address", inside, 1},
		{"addresses in all prefixes", inside, many},
		{"any address", func() netip.Addr { return randomAddress(random, ipv6) }, many},
	} {
		addresses := make([]netip.Addr, pattern.many)
		for i := range addresses {
			addresses[i] = pattern.address()
		}
		w, err := made.newWalk(addresses, at)
		if err != nil {
			return err
		}
		walking, err := made.walking(w, l.clock, udp(ipv6, payload), arms)
		if err != nil {
			return err
		}
		title := fmt.Sprintf("%s prefixes, %s: %s", family, pattern.table, count(n))
		if err := l.contest(ctx, l.rounds(17), walking, func(t turn) {
			l.addTurn(title, walking, t)
			for i, a := range ours {
				l.add(title, a.subject, unitTrie, "", t.arms[i]/t.arms[len(ours)])
				l.add(title, a.subject, unitTrieBucket, "", t.arms[i]/t.arms[len(ours)+1])
			}
		}); err != nil {
			return err
		}
	}
	return nil
}

// walking returns arms behind a walk.
func (o *owned) walking(w walk, clock *ebpf.Program, packet []byte, arms []arm) (walking []arm, err error) {
	behind, err := o.before(w, clock)
	if err != nil {
		return nil, err
	}
	for _, a := range arms {
		a.clock, a.packet, a.repeat = behind, packet, coldPackets
		if a.program, err = o.before(w, a.program); err != nil {
			return nil, err
		}
		walking = append(walking, a)
	}
	return walking, nil
}

// walkLength is the number of addresses of a long walk: so many that an address is no longer
// in the cache when the walk repeats.
const walkLength = 1 << 20

// trie returns an LPM trie with a number for each prefix, all of one family.
func (o *owned) trie(prefixes []netip.Prefix) (*ebpf.Map, error) {
	const bits = 4 // bytes of the prefix length, before the address
	m, err := o.newMap(ebpf.MapSpec{
		Type: ebpf.LPMTrie, KeySize: bits + uint32(prefixes[0].Addr().BitLen()/8), ValueSize: 4,
		MaxEntries: uint32(len(prefixes)), Flags: noPrealloc,
	})
	if err != nil {
		return nil, err
	}
	for i, p := range prefixes {
		key := binary.NativeEndian.AppendUint32(nil, uint32(p.Bits()))
		if err := m.Put(append(key, p.Addr().AsSlice()...), uint32(i)); err != nil {
			return nil, fmt.Errorf("fill an LPM trie: %w", err)
		}
	}
	return m, nil
}

const noPrealloc = 1 // BPF_F_NO_PREALLOC, required by LPM tries

// roomFor is the number of slots per flow, in our table and in the hash maps: full ones would
// measure the case without a slot.
const roomFor = 2

// flows compares up to four million non-empty buckets with hash maps of as many keys.
func (l *lab) flows(ctx context.Context) error {
	sizes := []int{1, 1 << 10, 1 << 16, 1 << 20, 1 << 22}
	if l.quick {
		sizes = []int{1, 1 << 10, 1 << 12}
	}
	for _, n := range sizes {
		if err := l.someFlows(ctx, n); err != nil {
			return fmt.Errorf("%d flows: %w", n, err)
		}
	}
	return nil
}

func (l *lab) someFlows(ctx context.Context, n int) error {
	l.say("  %s live flows", count(n))
	var made owned
	defer made.Close()
	var hot []arm
	for _, a := range algorithms {
		// So slow that a packet takes more than a minute to drain; so large that none is excess.
		rule := policy.Rule{
			Prefix: everything, Rate: policy.MinRate, Capacity: policy.MaxCapacity,
			Algorithm: a, Each: policy.Each{Kind: policy.EachFlow},
		}
		p, err := made.shapectl(maps.Size{Rules: 1, Buckets: uint32(roomFor * n)}, []policy.Rule{rule})
		if err != nil {
			return err
		}
		hot = append(hot, arm{subject: name(a), program: p})
	}
	lru := len(hot)
	for _, other := range []struct {
		subject string
		kind    ebpf.MapType
	}{{lruMap, ebpf.LRUHash}, {hashMap, ebpf.Hash}} {
		m, err := made.newMap(ebpf.MapSpec{
			Type: other.kind, KeySize: 16, ValueSize: 8, MaxEntries: uint32(max(roomFor*n, 1024)),
		})
		if err != nil {
			return err
		}
		p, err := made.flowProgram(m)
		if err != nil {
			return err
		}
		hot = append(hot, arm{subject: other.subject, note: "not atomic, no counters", program: p})
	}
	p, err := made.floorProgram(uint32(max(roomFor*n/4, 1)))
	if err != nil {
		return err
	}
	hot = append(hot, arm{subject: memoryFloor, program: p})
	// The order differs from that of the first packets: hash maps allocate elements one
	// after the other, and would be read in the order of memory otherwise.
	addresses := scrambled(uint32(n))
	packet := udp(false, payload)
	copy(packet[ipv4Source:], addresses[0].AsSlice()) // the first one certainly has a slot
	first, err := made.newWalk(addresses, ipv4Source)
	if err != nil {
		return err
	}
	newRandom().Shuffle(n, func(i, j int) { addresses[i], addresses[j] = addresses[j], addresses[i] })
	w, err := made.newWalk(addresses, ipv4Source)
	if err != nil {
		return err
	}
	for i := range hot {
		hot[i].packet, hot[i].repeat = packet, hotPackets
		filling, err := made.before(first, hot[i].program)
		if err != nil {
			return err
		}
		if _, err := nanoseconds(filling, packet, n); err != nil { // now no bucket is empty
			return err
		}
	}
	cold, err := made.walking(w, l.clock, packet, hot)
	if err != nil {
		return err
	}
	inTurn, always := "Live flows, in random order: "+count(n), "Live flows, always the same one: "+count(n)
	// Both in one contest, because the ratio of cold to hot is a figure, too.
	return l.contest(ctx, l.rounds(31), slices.Concat(cold, hot), func(t turn) {
		ofHot := turn{t.empty, t.clock, t.arms[len(cold):]}
		l.addTurn(inTurn, cold, t)
		l.addTurn(always, hot, ofHot)
		for i, a := range cold {
			l.add(inTurn, a.subject, unitHot, "", t.arms[i]/ofHot.arms[i])
			if ours(a.subject) {
				l.add(inTurn, a.subject, unitLRU, "", t.arms[i]/t.arms[lru])
			}
		}
	})
}

const (
	lruMap  = "LRU hash map"
	hashMap = "hash map"
)
