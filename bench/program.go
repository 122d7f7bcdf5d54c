package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	datapath "github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite "program" runs the programs by BPF_PROG_TEST_RUN: no device, no
// queue, nothing but what a packet costs in them.

var algorithms = []policy.Algorithm{policy.GCRA, policy.Leaky}

// lab is what all cases of the suite share.
type lab struct {
	options
	owned
	empty, clock *ebpf.Program
	cpus         []int
}

func program(ctx context.Context, o options) (results []Result, err error) {
	l := &lab{options: o}
	defer l.Close()
	if l.cpus, err = cpus(); err != nil {
		return nil, err
	}
	if l.empty, err = l.emptyProgram(); err != nil {
		return nil, err
	}
	if l.clock, err = l.clockProgram(); err != nil {
		return nil, err
	}
	// The last CPU: interrupts mostly go to the first one.
	err = pinned(l.cpus[len(l.cpus)-1], func() error {
		for _, part := range []func(context.Context) ([]Result, error){l.kinds, l.excess, l.prefixes, l.flows} {
			more, err := part(ctx)
			if err != nil {
				return err
			}
			results = append(results, more...)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	scaling, err := l.twoCPUs(ctx)
	return append(results, scaling...), err
}

func (l *lab) contest(arms ...arm) contest {
	return contest{empty: l.empty, clock: l.clock, arms: arms}
}

// shapectl loads the program with these rules.
func (o *owned) shapectl(size maps.Size, rules []policy.Rule) (*ebpf.Program, error) {
	store, err := maps.New(size, bpf.AbiHook{L2Bytes: ethernetBytes, Secret: secret()})
	if err != nil {
		return nil, err
	}
	o.add(store)
	p, err := datapath.Load(store, store.Hook())
	if err != nil {
		return nil, err
	}
	o.add(p)
	return p, store.View(0).Load(rules)
}

// secret is one of many: each run is to find the same slots.
func secret() (s [12]uint32) {
	r := newRandom()
	for i := range s {
		s[i] = r.Uint32()
	}
	return s
}

func name(a policy.Algorithm) string { return "shapectl " + a.String() }

// A kind is a rule by who shares its buckets, and a packet that it limits.
type kind struct {
	column string
	ipv6   bool
	each   policy.Each
}

func (k kind) prefix() netip.Prefix {
	if k.ipv6 {
		return netip.MustParsePrefix("2001:db8:1::/48")
	}
	return netip.MustParsePrefix("10.0.0.0/8")
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
	hotPackets  = 50_000  // a sample where all is in the cache
	coldPackets = 100_000 // a sample of packets that each need other memory
	payload     = 22      // 64 bytes on an Ethernet, without FCS
)

// kinds measures one bucket that is always charged, by who shares it.
func (l *lab) kinds(ctx context.Context) (results []Result, err error) {
	l.say("  one rule and one bucket")
	for _, ipv6 := range []bool{false, true} {
		other := kind{ipv6: !ipv6}
		column := "no rule matches, IPv4"
		if ipv6 {
			column = "no rule matches, IPv6"
		}
		more, err := l.oneKind(ctx, column, other, udp(ipv6, payload))
		if err != nil {
			return nil, err
		}
		results = append(results, more...)
	}
	for _, k := range kindsOfRule {
		more, err := l.oneKind(ctx, k.column, k, udp(k.ipv6, payload))
		if err != nil {
			return nil, err
		}
		results = append(results, more...)
	}
	return results, nil
}

func (l *lab) oneKind(ctx context.Context, column string, k kind, packet []byte) ([]Result, error) {
	var made owned
	defer made.Close()
	c := l.contest(arm{subject: emptyProgram, program: l.empty, packet: packet, repeat: hotPackets},
		arm{subject: clockProgram, program: l.clock, packet: packet, repeat: hotPackets})
	for _, a := range algorithms {
		rule := generous(k.prefix(), a)
		rule.Each = k.each
		p, err := made.shapectl(maps.Size{Rules: 1, Buckets: 1024}, []policy.Rule{rule})
		if err != nil {
			return nil, err
		}
		c.arms = append(c.arms, arm{subject: name(a), program: p, packet: packet, repeat: hotPackets})
	}
	of, err := c.run(ctx, l.rounds(61))
	if err != nil {
		return nil, err
	}
	return c.results("one rule, one bucket: "+column, of), nil
}

// excess measures packets that are dropped beside those that pass.
func (l *lab) excess(ctx context.Context) (results []Result, err error) {
	l.say("  packets that are dropped")
	for _, k := range kindsOfRule {
		for _, a := range algorithms {
			r, err := l.dropping(ctx, k, a)
			if err != nil {
				return nil, err
			}
			results = append(results, r)
		}
	}
	return results, nil
}

func (l *lab) dropping(ctx context.Context, k kind, a policy.Algorithm) (Result, error) {
	var made owned
	defer made.Close()
	passing := generous(k.prefix(), a)
	passing.Each = k.each
	dropping := passing
	dropping.Rate, dropping.Capacity = policy.MinRate, policy.MinCapacity
	c := l.contest()
	for _, rule := range []policy.Rule{passing, dropping} {
		p, err := made.shapectl(maps.Size{Rules: 1, Buckets: 1024}, []policy.Rule{rule})
		if err != nil {
			return Result{}, err
		}
		c.arms = append(c.arms, arm{subject: name(a), program: p, packet: udp(k.ipv6, payload), repeat: hotPackets})
	}
	of, err := c.run(ctx, l.rounds(41))
	return newResult("dropped by passed: "+k.column, name(a), unitPassing, ratios(of.arms[1], of.arms[0])), err
}

// prefixes measures rules for up to a million prefixes beside an LPM trie of the same ones.
func (l *lab) prefixes(ctx context.Context) (results []Result, err error) {
	sizes := []int{1, 100, 10_000, 100_000, 1_000_000}
	if l.quick {
		sizes = []int{1, 100, 1000}
	}
	for _, ipv6 := range []bool{false, true} {
		for _, n := range sizes {
			more, err := l.somePrefixes(ctx, ipv6, n)
			if err != nil {
				return nil, fmt.Errorf("%d prefixes: %w", n, err)
			}
			results = append(results, more...)
		}
	}
	return results, nil
}

const trieNote = "only looks the address up: neither clock nor bucket"

func (l *lab) somePrefixes(ctx context.Context, ipv6 bool, n int) (results []Result, err error) {
	family := "IPv4"
	at := int32(ipv4Dest)
	if ipv6 {
		family, at = "IPv6", ipv6Dest
	}
	l.say("  %s prefixes, %s", count(n), family)
	var made owned
	defer made.Close()
	random := newRandom()
	prefixes := mixedPrefixes(random, ipv6, n)

	subjects := []string{}
	var programs []*ebpf.Program
	for _, a := range algorithms {
		rules := make([]policy.Rule, n)
		for i, p := range prefixes {
			rules[i] = generous(p, a)
		}
		p, err := made.shapectl(maps.Size{Rules: uint32(n), Buckets: 1}, rules)
		if err != nil {
			return nil, err
		}
		subjects, programs = append(subjects, name(a)), append(programs, p)
	}
	trie, err := made.trie(prefixes, ipv6)
	if err != nil {
		return nil, err
	}
	p, err := made.trieProgram(trie, ipv6)
	if err != nil {
		return nil, err
	}
	subjects, programs = append(subjects, "LPM trie"), append(programs, p)

	many := walkLength
	if l.quick {
		many = 1 << 14
	}
	inside := func() netip.Addr { return addressIn(random, prefixes[random.IntN(n)]) }
	for _, way := range []struct {
		table   string
		address func() netip.Addr
		many    int
	}{
		{"one address", inside, 1},
		{"addresses in all prefixes", inside, many},
		{"any address", func() netip.Addr { return randomAddress(random, ipv6) }, many},
	} {
		w, err := made.walkOf(ipv6, at, way.many, way.address)
		if err != nil {
			return nil, err
		}
		behind, err := made.before(w, l.clock)
		if err != nil {
			return nil, err
		}
		c := l.contest()
		for i, p := range programs {
			walking, err := made.before(w, p)
			if err != nil {
				return nil, err
			}
			a := arm{subject: subjects[i], program: walking, clock: behind, packet: udp(ipv6, payload), repeat: coldPackets}
			if !ours(a.subject) {
				a.note = trieNote
			}
			c.arms = append(c.arms, a)
		}
		of, err := c.run(ctx, l.rounds(17))
		if err != nil {
			return nil, err
		}
		title := fmt.Sprintf("%s prefixes, %s: %s", family, way.table, count(n))
		results = append(results, c.results(title, of)...)
		last := len(c.arms) - 1
		for i := range last {
			results = append(results, newResult(title, subjects[i], unitTrie, ratios(of.arms[i], of.arms[last])))
		}
	}
	return results, nil
}

// walkLength is how many addresses a walk through many goes through before it
// begins again: so many that each one is long out of the cache by then.
const walkLength = 1 << 20

func (o *owned) walkOf(ipv6 bool, at int32, n int, address func() netip.Addr) (walk, error) {
	if ipv6 {
		list := make([][16]byte, n)
		for i := range list {
			list[i] = address().As16()
		}
		return newWalk(o, list, at)
	}
	list := make([][4]byte, n)
	for i := range list {
		list[i] = address().As4()
	}
	return newWalk(o, list, at)
}

type trieKey4 struct {
	Bits uint32
	Addr [4]byte
}

type trieKey6 struct {
	Bits uint32
	Addr [16]byte
}

// trie is an LPM trie with a number for each prefix.
func (o *owned) trie(prefixes []netip.Prefix, ipv6 bool) (*ebpf.Map, error) {
	spec := ebpf.MapSpec{Type: ebpf.LPMTrie, KeySize: 8, ValueSize: 4, MaxEntries: uint32(len(prefixes)), Flags: noPrealloc}
	if ipv6 {
		spec.KeySize = 20
	}
	m, err := o.newMap(spec)
	if err != nil {
		return nil, err
	}
	values := make([]uint32, len(prefixes))
	keys4, keys6 := make([]trieKey4, 0), make([]trieKey6, 0)
	for i, p := range prefixes {
		values[i] = uint32(i)
		if ipv6 {
			keys6 = append(keys6, trieKey6{uint32(p.Bits()), p.Addr().As16()})
		} else {
			keys4 = append(keys4, trieKey4{uint32(p.Bits()), p.Addr().As4()})
		}
	}
	if ipv6 {
		err = batchPut(m, keys6, values)
	} else {
		err = batchPut(m, keys4, values)
	}
	if err != nil {
		return nil, fmt.Errorf("fill an LPM trie: %w", err)
	}
	return m, nil
}

const noPrealloc = 1 // BPF_F_NO_PREALLOC, without which there is no LPM trie

// roomFor is how many buckets there is room for, for each that is used, in our
// table as in the hash maps beside it: full ones would only measure what is
// done when there is no room.
const roomFor = 2

// flows measures up to four million buckets that owe something, beside hash maps with as many keys.
func (l *lab) flows(ctx context.Context) (results []Result, err error) {
	sizes := []int{1, 1 << 10, 1 << 16, 1 << 20, 1 << 22}
	if l.quick {
		sizes = []int{1, 1 << 10, 1 << 12}
	}
	for _, n := range sizes {
		more, err := l.someFlows(ctx, n)
		if err != nil {
			return nil, fmt.Errorf("%d flows: %w", n, err)
		}
		results = append(results, more...)
	}
	return results, nil
}

func (l *lab) someFlows(ctx context.Context, n int) (results []Result, err error) {
	l.say("  %s live flows", count(n))
	var made owned
	defer made.Close()
	packet := udp(false, payload)
	var subjects []string
	var programs []*ebpf.Program
	add := func(subject string, p *ebpf.Program, err error) error {
		subjects, programs = append(subjects, subject), append(programs, p)
		return err
	}
	for _, a := range algorithms {
		// So slow that one packet is owed for more than a minute; so big that none is excess.
		rule := policy.Rule{
			Prefix: netip.MustParsePrefix("10.0.0.0/8"), Rate: policy.MinRate, Capacity: policy.MaxCapacity,
			Algorithm: a, Each: policy.Each{Kind: policy.EachFlow},
		}
		p, err := made.shapectl(maps.Size{Rules: 1, Buckets: uint32(roomFor * n)}, []policy.Rule{rule})
		if err := add(name(a), p, err); err != nil {
			return nil, err
		}
	}
	for _, other := range []struct {
		subject string
		kind    ebpf.MapType
	}{{lruMap, ebpf.LRUHash}, {hashMap, ebpf.Hash}} {
		m, err := made.newMap(ebpf.MapSpec{Type: other.kind, KeySize: 16, ValueSize: 8, MaxEntries: uint32(max(roomFor*n, 1024))})
		if err != nil {
			return nil, err
		}
		p, err := made.flowProgram(m)
		if err := add(other.subject, p, err); err != nil {
			return nil, err
		}
	}
	p, err := made.floorProgram(uint32(max(roomFor*n/4, 1)))
	if err := add(memoryFloor, p, err); err != nil {
		return nil, err
	}
	// Flows come in another order than they came first: hash maps hand their
	// elements out one after the other, and would be read in that order too.
	addresses := scrambled(uint32(n))
	copy(packet[ipv4Source:], addresses[0][:]) // the very first one found room for sure
	first, err := newWalk(&made, addresses, ipv4Source)
	if err != nil {
		return nil, err
	}
	newRandom().Shuffle(n, func(i, j int) { addresses[i], addresses[j] = addresses[j], addresses[i] })
	w, err := newWalk(&made, addresses, ipv4Source)
	if err != nil {
		return nil, err
	}
	behind, err := made.before(w, l.clock)
	if err != nil {
		return nil, err
	}
	cold, hot := l.contest(), l.contest()
	for i, p := range programs {
		walking, err := made.before(w, p)
		if err != nil {
			return nil, err
		}
		a := arm{subject: subjects[i], packet: packet}
		if !ours(a.subject) && a.subject != memoryFloor {
			a.note = "neither atomic nor counted"
		}
		filling, err := made.before(first, p)
		if err != nil {
			return nil, err
		}
		if _, err := nanoseconds(filling, packet, n); err != nil { // all flows owe now
			return nil, err
		}
		a.program, a.clock, a.repeat = walking, behind, coldPackets
		cold.arms = append(cold.arms, a)
		a.program, a.clock, a.repeat = p, nil, hotPackets
		hot.arms = append(hot.arms, a)
	}
	// Both at once: how cold compares with hot is a figure of its own.
	both := l.contest(slices.Concat(cold.arms, hot.arms)...)
	of, err := both.run(ctx, l.rounds(31))
	if err != nil {
		return nil, err
	}
	k := len(cold.arms)
	inTurn, always := "live flows, each in turn: "+count(n), "live flows, always the same one: "+count(n)
	results = append(results, cold.results(inTurn, costs{of.empty, of.clock, of.arms[:k]})...)
	results = append(results, hot.results(always, costs{of.empty, of.clock, of.arms[k:]})...)
	lru := slices.Index(subjects, lruMap)
	for i, subject := range subjects {
		results = append(results, newResult(inTurn, subject, unitHot, ratios(of.arms[i], of.arms[k+i])))
		if ours(subject) {
			results = append(results, newResult(inTurn, subject, unitLRU, ratios(of.arms[i], of.arms[lru])))
		}
	}
	return results, nil
}

const (
	lruMap  = "LRU hash map"
	hashMap = "hash map"
)
