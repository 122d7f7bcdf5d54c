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
	clock *ebpf.Program
}

func program() {
	var l lab
	defer l.Close()
	l.clock = l.plain("clock")
	onLastCPU(func() {
		for _, n := range unlessQuick([]int{1, 100, 10_000, 100_000, 1_000_000}, []int{1, 100, 1000}) {
			l.prefixes(n)
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
}

// programsOf are those of arms.
func programsOf(arms []arm) (programs []*ebpf.Program) {
	for _, a := range arms {
		programs = append(programs, a.program)
	}
	return programs
}

// contest runs arms behind a walk through addresses, in turns, and records their costs in ns without that of the walk.
func (l *lab) contest(name string, rounds int, walk string, addresses []netip.Addr, arms []arm) {
	var made owned
	defer made.Close()
	programs := append([]*ebpf.Program{l.clock}, made.walk(walk, addresses, append([]*ebpf.Program{l.clock}, programsOf(arms)...)...)...)
	for _, p := range programs {
		nanoseconds(p, udp(), 10_000) // to warm up
	}
	interleave(rounds, len(programs), func(i int) float64 {
		return nanoseconds(programs[i], udp(), 100_000)
	}, func(costs []float64) {
		for i, a := range arms {
			add(name, a.subject, "ns", a.note, costs[2+i]-(costs[1]-costs[0]))
		}
	})
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

// prefixes compares rules for up to a million prefixes with an LPM trie of the same prefixes.
func (l *lab) prefixes(n int) {
	say("  %s prefixes", count(n))
	var made owned
	defer made.Close()
	random := newRandom()
	prefixes := mixedPrefixes(random, false, n)
	var arms []arm
	for _, a := range algorithms {
		rules := make([]policy.Rule, n)
		for i, p := range prefixes {
			rules[i] = generous(p, a)
		}
		p, _ := made.loaded(maps.Size{Rules: uint32(n), Buckets: 1}, rules)
		arms = append(arms, arm{subject: name(a), program: p})
	}
	bare, maps := made.reference("lookup", n, nil)
	for i, p := range prefixes {
		key := append(binary.NativeEndian.AppendUint32(nil, uint32(p.Bits())), p.Addr().AsSlice()...)
		check(maps["trie"].Put(key, uint32(i)))
	}
	charged, _ := made.reference("charged", n, sharedMaps{"trie": maps["trie"]})
	arms = append(arms,
		arm{subject: "LPM trie", note: "lookup only: no clock, no bucket", program: bare},
		arm{subject: "LPM trie, clock and bucket", note: "fixed rate, no counters", program: charged})
	// So many addresses that one is no longer in the cache when the walk repeats.
	addresses := make([]netip.Addr, unlessQuick(1<<20, 1<<14))
	for i := range addresses {
		addresses[i] = addressIn(random, prefixes[random.IntN(n)])
	}
	l.contest("IPv4 prefixes, addresses in all prefixes: "+count(n), rounds(17), "walk_destination", addresses, arms)
}

// flows compares up to four million non-empty buckets with a hash map of as many keys.
func (l *lab) flows(n int) {
	say("  %s live flows", count(n))
	// Two slots per flow, in our table and in the hash map: a full one would measure the case without a slot.
	room := 2 * n
	var made owned
	defer made.Close()
	var arms []arm
	for _, a := range algorithms {
		// So slow that a packet takes more than a minute to drain; so large that none is excess.
		p, _ := made.loaded(maps.Size{Rules: 1, Buckets: uint32(room)}, []policy.Rule{{
			Prefix: everything, Rate: policy.MinRate, Capacity: policy.MaxCapacity,
			Algorithm: a, Each: policy.Each{Kind: policy.EachFlow},
		}})
		arms = append(arms, arm{subject: name(a), program: p})
	}
	flowMap, _ := made.reference("flow_map", max(room, 1024), nil)
	memory, _ := made.reference("memory", max(room/4, 1), nil)
	arms = append(arms, arm{subject: "LRU hash map", note: "not atomic, no counters", program: flowMap}, arm{subject: memoryFloor, program: memory})
	addresses := scrambled(n)
	for _, p := range made.walk("walk_source", addresses, programsOf(arms)...) {
		nanoseconds(p, udp(), n) // now no bucket is empty
	}
	// The order differs from that of the first packets: hash maps allocate elements one
	// after the other, and would be read in the order of memory otherwise.
	newRandom().Shuffle(n, func(i, j int) { addresses[i], addresses[j] = addresses[j], addresses[i] })
	l.contest("Live flows, in random order: "+count(n), rounds(31), "walk_source", addresses, arms)
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
	same := udp()
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

// walk returns programs behind a walk through addresses. Their number must be a power of two.
func (o *owned) walk(name string, addresses []netip.Addr, programs ...*ebpf.Program) (behind []*ebpf.Program) {
	var shared sharedMaps
	for _, then := range programs {
		p, maps := o.reference(name, len(addresses), shared)
		check(maps["chain"].Put(uint32(0), then))
		if shared == nil {
			shared = sharedMaps{"addresses": maps["addresses"]}
			for i, a := range addresses {
				check(maps["addresses"].Put(uint32(i), a.AsSlice()))
			}
		}
		behind = append(behind, p)
	}
	return behind
}

const (
	ethernetBytes = 14
	ipv4Dest      = ethernetBytes + 16 // offset in a frame
)

// udp returns a UDP frame of 64 bytes on an Ethernet.
func udp() []byte {
	const head = "000000000000000000000000" + "0800" + "450000320000000040110000" + "c0000201" + "0a000001" + "13880035" + "001e0000"
	const payload = 22
	return append(must(hex.DecodeString(head)), make([]byte, payload)...)
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

// addressIn returns a random address of an IPv4 prefix.
func addressIn(r *rand.Rand, p netip.Prefix) netip.Addr {
	host := r.Uint32() & uint32(uint64(0xffffffff)>>p.Bits())
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, binary.BigEndian.Uint32(p.Addr().AsSlice())|host)))
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
