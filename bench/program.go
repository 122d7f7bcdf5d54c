package main

import (
	"bytes"
	_ "embed"
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

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
	owned
	empty, clock *ebpf.Program
}

func program() {
	var l lab
	defer l.Close()
	l.empty, l.clock = l.plain("empty"), l.plain("clock")
	onLastCPU(func() {
		l.kinds()
		for _, ipv6 := range []bool{false, true} {
			for _, n := range unlessQuick([]int{1, 100, 10_000, 100_000, 1_000_000}, []int{1, 100, 1000}) {
				l.prefixes(ipv6, n)
			}
		}
		for _, n := range unlessQuick([]int{1, 1 << 10, 1 << 16, 1 << 20, 1 << 22}, []int{1, 1 << 10, 1 << 12}) {
			l.flows(n)
		}
	})
	l.twoCPUs()
}

// An arm is a subject of a contest.
type arm struct {
	subject, note string
	program       *ebpf.Program
	walks         bool // behind a walk, whose cost is subtracted
}

// contest runs arms in turns with a packet, and calls each with the costs of each round in ns. The first two are those of
// the empty program and the clock program. walk is the clock program behind a walk; it may be nil.
func (l *lab) contest(rounds int, packet []byte, walk *ebpf.Program, arms []arm, each func(costs []float64)) {
	arms = append([]arm{{program: l.empty}, {program: l.clock}}, arms...)
	if walk != nil {
		arms = append(arms, arm{program: walk})
	}
	for _, a := range arms {
		nanoseconds(a.program, packet, 10_000) // to warm up
	}
	interleave(rounds, len(arms), func(i int) float64 {
		if arms[i].walks || arms[i].program == walk { // packets that need different memory
			return nanoseconds(arms[i].program, packet, 100_000)
		}
		return nanoseconds(arms[i].program, packet, 50_000)
	}, func(costs []float64) {
		for i, a := range arms {
			if a.walks {
				costs[i] -= costs[len(costs)-1] - costs[1]
			}
		}
		each(costs)
	})
}

// addCosts records the costs of arms in one round of a case.
func addCosts(name string, arms []arm, clock float64, costs []float64) {
	for i, a := range arms {
		add(name, a.subject, "ns", a.note, costs[i])
		add(name, a.subject, "x clock", a.note, costs[i]/clock)
	}
}

// nanoseconds returns the mean CPU time of a run of a program. It is the time of this
// thread, without that of other users of the CPU.
func nanoseconds(p *ebpf.Program, packet []byte, repeat int) float64 {
	now := func() int64 {
		var t unix.Timespec
		unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
		return t.Nano()
	}
	start := now()
	_, _, err := p.Benchmark(packet, repeat, func() { start = now() })
	check(err)
	return float64(now()-start) / float64(repeat)
}

// loaded loads the program with rules, and returns both.
func (o *owned) loaded(size maps.Size, rules []policy.Rule) (*ebpf.Program, *maps.Set) {
	var secret [12]uint32 // constant, so that each run uses the same slots
	random := newRandom()
	for i := range secret {
		secret[i] = random.Uint32()
	}
	store := must(maps.New(size, bpf.AbiHook{L2Bytes: ethernetBytes, Secret: secret}))
	o.keep(func() { store.Close() })
	p := must(datapath.Load(store, store.Hook()))
	o.keep(func() { p.Close() })
	set := store.View(0)
	check(set.Load(rules))
	return p, set
}

func name(a policy.Algorithm) string { return "shapectl " + a.String() }

// generous returns a rule to which all packets conform.
func generous(p netip.Prefix, a policy.Algorithm) policy.Rule {
	return policy.Rule{Prefix: p, Rate: policy.MaxRate, Capacity: 1 << 30, Algorithm: a}
}

// kinds measures one bucket that is always the same, by bucket scope.
func (l *lab) kinds() {
	say("  one rule and one bucket")
	for _, k := range []struct {
		column string
		ipv6   bool
		prefix netip.Prefix
		each   policy.Each
	}{
		{"no rule matches, IPv4", false, everything6, policy.Each{}},
		{"no rule matches, IPv6", true, everything, policy.Each{}},
		{"all, IPv4", false, everything, policy.Each{}},
		{"all, IPv6", true, everything6, policy.Each{}},
		{"host, IPv4", false, everything, policy.Each{Kind: policy.EachHost}},
		{"host, IPv6", true, everything6, policy.Each{Kind: policy.EachHost}},
		{"/64, IPv6", true, everything6, policy.Each{Kind: policy.EachSubnet, Bits: 64}},
		{"flow, IPv4", false, everything, policy.Each{Kind: policy.EachFlow}},
		{"flow, IPv6", true, everything6, policy.Each{Kind: policy.EachFlow}},
	} {
		var made owned
		arms := []arm{{subject: emptyProgram}, {subject: clockProgram}} // in every contest
		for _, a := range algorithms {
			rule := generous(k.prefix, a)
			rule.Each = k.each
			p, _ := made.loaded(maps.Size{Rules: 1, Buckets: 1024}, []policy.Rule{rule})
			arms = append(arms, arm{subject: name(a), program: p})
		}
		l.contest(rounds(61), udp(k.ipv6), nil, arms[2:], func(costs []float64) {
			addCosts("One rule, one bucket: "+k.column, arms, costs[1], costs)
		})
		made.Close()
	}
}

// prefixes compares rules for up to a million prefixes with an LPM trie of the same prefixes.
func (l *lab) prefixes(ipv6 bool, n int) {
	family, suffix := "IPv4", "4"
	if ipv6 {
		family, suffix = "IPv6", "6"
	}
	say("  %s prefixes, %s", count(n), family)
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
		p, _ := made.loaded(maps.Size{Rules: uint32(n), Buckets: 1}, rules)
		arms = append(arms, arm{subject: name(a), program: p})
	}
	bare, maps := made.reference("trie_"+suffix, n, nil)
	for i, p := range prefixes {
		key := append(binary.NativeEndian.AppendUint32(nil, uint32(p.Bits())), p.Addr().AsSlice()...)
		check(maps["trie"+suffix].Put(key, uint32(i)))
	}
	charged, _ := made.reference("charged_"+suffix, n, sharedMaps{"trie" + suffix: maps["trie"+suffix]})
	arms = append(arms,
		arm{subject: "LPM trie", note: "lookup only: no clock, no bucket", program: bare},
		arm{subject: "LPM trie, clock and bucket", note: "fixed rate, no counters", program: charged})
	inside := func() netip.Addr { return addressIn(random, prefixes[random.IntN(n)]) }
	// A long walk has so many addresses that one is no longer in the cache when the walk repeats.
	long := unlessQuick(1<<20, 1<<14)
	for _, pattern := range []struct {
		table   string
		address func() netip.Addr
		many    int
	}{
		{"one address", inside, 1},
		{"addresses in all prefixes", inside, long},
		{"any address", func() netip.Addr { return randomAddress(random, ipv6) }, long},
	} {
		addresses := make([]netip.Addr, pattern.many)
		for i := range addresses {
			addresses[i] = pattern.address()
		}
		walk, walking := l.walking(&made, "walk_"+suffix, addresses, arms)
		title := family + " prefixes, " + pattern.table + ": " + count(n)
		l.contest(rounds(17), udp(ipv6), walk, walking, func(costs []float64) {
			addCosts(title, walking, costs[1], costs[2:])
			for i := range algorithms {
				add(title, arms[i].subject, "x trie", "", costs[2+i]/costs[4])
				add(title, arms[i].subject, "x trie, clock and bucket", "", costs[2+i]/costs[5])
			}
		})
	}
}

// walking returns arms behind a walk, and the clock program behind it.
func (l *lab) walking(o *owned, name string, addresses []netip.Addr, arms []arm) (clock *ebpf.Program, walking []arm) {
	programs := []*ebpf.Program{l.clock}
	for _, a := range arms {
		programs = append(programs, a.program)
	}
	programs = o.walk(name, addresses, programs...)
	for i, a := range arms {
		a.program, a.walks = programs[1+i], true
		walking = append(walking, a)
	}
	return programs[0], walking
}

const lruMap = "LRU hash map"

// flows compares up to four million non-empty buckets with a hash map of as many keys.
func (l *lab) flows(n int) {
	say("  %s live flows", count(n))
	// Two slots per flow, in our table and in the hash map: a full one would measure the case without a slot.
	room := 2 * n
	var made owned
	defer made.Close()
	var hot []arm
	for _, a := range algorithms {
		// So slow that a packet takes more than a minute to drain; so large that none is excess.
		p, _ := made.loaded(maps.Size{Rules: 1, Buckets: uint32(room)}, []policy.Rule{{
			Prefix: everything, Rate: policy.MinRate, Capacity: policy.MaxCapacity,
			Algorithm: a, Each: policy.Each{Kind: policy.EachFlow},
		}})
		hot = append(hot, arm{subject: name(a), program: p})
	}
	flowMap, _ := made.reference("flow_map", max(room, 1024), nil)
	memory, _ := made.reference("memory", max(room/4, 1), nil)
	hot = append(hot, arm{subject: lruMap, note: "not atomic, no counters", program: flowMap}, arm{subject: memoryFloor, program: memory})
	addresses := scrambled(n)
	packet := udp(false)
	copy(packet[ipv4Source:], addresses[0].AsSlice()) // the first one certainly has a slot
	_, filling := l.walking(&made, "walk_source", addresses, hot)
	for _, a := range filling {
		nanoseconds(a.program, packet, n) // now no bucket is empty
	}
	// The order differs from that of the first packets: hash maps allocate elements one
	// after the other, and would be read in the order of memory otherwise.
	newRandom().Shuffle(n, func(i, j int) { addresses[i], addresses[j] = addresses[j], addresses[i] })
	walk, cold := l.walking(&made, "walk_source", addresses, hot)
	inTurn := "Live flows, in random order: " + count(n)
	// Both in one contest, because the ratio of cold to hot is a figure, too.
	l.contest(rounds(31), packet, walk, slices.Concat(cold, hot), func(costs []float64) {
		inOrder, same := costs[2:2+len(cold)], costs[2+len(cold):]
		addCosts(inTurn, cold, costs[1], inOrder)
		addCosts("Live flows, always the same one: "+count(n), hot, costs[1], same)
		for i, a := range cold {
			add(inTurn, a.subject, "x one hot", "", inOrder[i]/same[i])
			if ours(a.subject) {
				add(inTurn, a.subject, "x LRU", "", inOrder[i]/inOrder[len(algorithms)])
			}
		}
	})
}

// sharedClock is a reference for the cost of a word that CPUs share.
const sharedClock = "clock, then compare-and-swap of the word"

// twoCPUs measures the throughput of two CPUs, relative to one of them alone.
func (l *lab) twoCPUs() {
	on := cpus()
	if len(on) < 2 {
		say("  two CPUs: this machine has one")
		return
	}
	say("  two CPUs")
	type pair struct {
		column, subject string
		program         *ebpf.Program
		packets         [2][]byte
	}
	var pairs []pair
	same := udp(false)
	other := slices.Clone(same)
	copy(other[ipv4Dest:], netip.MustParseAddr("172.16.0.1").AsSlice())
	for _, a := range algorithms {
		p, _ := l.loaded(maps.Size{Rules: 2, Buckets: 1}, []policy.Rule{
			generous(everything, a), generous(netip.MustParsePrefix("172.16.0.0/12"), a),
		})
		pairs = append(pairs, pair{"one bucket", name(a), p, [2][]byte{same, same}},
			pair{"one bucket each", name(a), p, [2][]byte{same, other}})
	}
	pairs = append(pairs, pair{"one bucket", sharedClock, l.plain("shared_word"), [2][]byte{same, same}},
		pair{"one bucket each", clockProgram, l.clock, [2][]byte{same, same}})
	long := unlessQuick(60*time.Millisecond, 20*time.Millisecond)
	interleave(rounds(31), 2*len(pairs), func(i int) float64 {
		p := pairs[i/2]
		if i%2 == 0 {
			return packetRate(on[1:2], p.program, p.packets, long)
		}
		return packetRate(on[:2], p.program, p.packets, long)
	}, func(rates []float64) {
		for i, p := range pairs {
			alone, both := rates[2*i], rates[2*i+1]
			add("Throughput of two CPUs: "+p.column, p.subject, "x one CPU", "", both/alone)
			add("Time between packets, two CPUs: "+p.column, p.subject, "ns", "", 1e9/both)
		}
	})
}

// packetRate returns the packets per second of some CPUs together. All run for the same time.
func packetRate(on []int, p *ebpf.Program, packets [2][]byte, long time.Duration) (rate float64) {
	rates := make([]float64, len(on))
	var all []func()
	var ready sync.WaitGroup
	ready.Add(len(on))
	for i, cpu := range on {
		all = append(all, func() {
			pinned(cpu, func() {
				ready.Done()
				ready.Wait()
				var ns, bursts float64
				for start := time.Now(); time.Since(start) < long; bursts++ {
					ns += nanoseconds(p, packets[i], 5000)
				}
				rates[i] = 1e9 * bursts / ns
			})
		})
	}
	together(all...)
	for _, r := range rates {
		rate += r
	}
	return rate
}

//go:generate clang-14 -target bpf -mcpu=v3 -O2 -g -Wall -Wextra -Werror -fdebug-compilation-dir . -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu -c reference.c -o reference_bpfel.o
//go:generate llvm-strip-14 -g reference_bpfel.o

//go:embed reference_bpfel.o
var object []byte

// sharedMaps are maps by their names in reference.c.
type sharedMaps map[string]*ebpf.Map

// reference loads a program of reference.c. Its maps have so many entries, unless they are shared.
func (o *owned) reference(name string, entries int, shared sharedMaps) (*ebpf.Program, sharedMaps) {
	spec := must(ebpf.LoadCollectionSpecFromReader(bytes.NewReader(object)))
	check(spec.Variables["last"].Set(uint32(entries - 1)))
	used := map[string]*ebpf.MapSpec{}
	for _, ins := range spec.Programs[name].Instructions {
		if m := spec.Maps[ins.Reference()]; ins.IsLoadFromMap() {
			used[ins.Reference()] = m
			if m.Type != ebpf.ProgramArray && !strings.HasPrefix(m.Name, ".") { // not of variables
				m.MaxEntries = uint32(entries)
			}
		}
	}
	for variable, v := range spec.Variables {
		if used[v.SectionName] == nil {
			delete(spec.Variables, variable)
		}
	}
	spec.Programs, spec.Maps = map[string]*ebpf.ProgramSpec{name: spec.Programs[name]}, used
	c := must(ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: shared}))
	o.keep(c.Close)
	return c.Programs[name], c.Maps
}

// plain loads a program of reference.c without maps.
func (o *owned) plain(name string) *ebpf.Program {
	p, _ := o.reference(name, 1, nil)
	return p
}

// walk returns programs behind a walk through addresses of one family. Their number must be a power of two.
func (o *owned) walk(name string, addresses []netip.Addr, programs ...*ebpf.Program) (behind []*ebpf.Program) {
	list, shared := "addresses4", sharedMaps(nil)
	if addresses[0].Is6() {
		list = "addresses6"
	}
	for _, then := range programs {
		p, maps := o.reference(name, len(addresses), shared)
		check(maps["chain"].Put(uint32(0), then))
		if shared == nil {
			shared = sharedMaps{list: maps[list]}
			for i, a := range addresses {
				check(maps[list].Put(uint32(i), a.AsSlice()))
			}
		}
		behind = append(behind, p)
	}
	return behind
}

const (
	ethernetBytes = 14
	ipv4Source    = ethernetBytes + 12 // offsets in a frame
	ipv4Dest      = ethernetBytes + 16
)

// udp returns a UDP frame of 64 bytes on an Ethernet, or with IPv6 of 84.
func udp(ipv6 bool) []byte {
	head := "000000000000000000000000" + "0800" + "450000320000000040110000" + "c0000201" + "0a000001"
	if ipv6 {
		head = "000000000000000000000000" + "86dd" + "60000000001e1140" +
			"20010db8000000000000000000000001" + "20010db8000100000000000000000001"
	}
	const ports, payload = "13880035" + "001e0000", 22
	return append(must(hex.DecodeString(head+ports)), make([]byte, payload)...)
}

// mixedPrefixes returns n different prefixes of one family, similar to those of a provider.
// IPv4: 40 % /24, 20 % hosts, the rest evenly from /16 to /31. IPv6, only global addresses:
// 40 % /48, 20 % /64, 10 % hosts, the rest evenly from /32 to /63.
func mixedPrefixes(r *rand.Rand, ipv6 bool, n int) []netip.Prefix {
	lengths, least, others := []int{24, 24, 24, 24, 32, 32}, 16, 16
	if ipv6 {
		lengths, least, others = []int{48, 48, 48, 48, 64, 64, 128}, 32, 32
	}
	seen, prefixes := make(map[netip.Prefix]bool, n), make([]netip.Prefix, 0, n)
	for len(prefixes) < n {
		bits := least + r.IntN(others)
		if tenth := r.IntN(10); tenth < len(lengths) {
			bits = lengths[tenth]
		}
		if p := netip.PrefixFrom(randomAddress(r, ipv6), bits).Masked(); !seen[p] {
			seen[p] = true
			prefixes = append(prefixes, p)
		}
	}
	return prefixes
}

// randomAddress returns any IPv4 address, or any global IPv6 address.
func randomAddress(r *rand.Rand, ipv6 bool) netip.Addr {
	var b [16]byte
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	if !ipv6 {
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	b[0] = b[0]&0x1f | 0x20
	return netip.AddrFrom16(b)
}

// addressIn returns a random address of a prefix.
func addressIn(r *rand.Rand, p netip.Prefix) netip.Addr {
	a, in := randomAddress(r, p.Addr().Is6()).AsSlice(), p.Addr().AsSlice()
	for i := range a {
		host := byte(0xff >> min(max(p.Bits()-8*i, 0), 8))
		a[i] = a[i]&host | in[i]
	}
	address, _ := netip.AddrFromSlice(a)
	return address
}

// scrambled returns n different IPv4 addresses without an order.
func scrambled(n int) []netip.Addr {
	addresses := make([]netip.Addr, n)
	for i := range addresses {
		h := uint32(i) * 0x9e3779b1 // an odd factor maps words one to one
		addresses[i] = netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, h)))
	}
	return addresses
}
