package importer

import (
	"encoding/json"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// TestVerdict checks the effect of a filter's actions on conforming and excess packets.
func TestVerdict(t *testing.T) {
	police := func(conforming, exceeded int32) action {
		return action{kind: "police", police: policer{
			index: 1, rate: rateSpec{bytes: 1e6}, burst: 1e6 / tick * 10, mtu: unsetMTU, conforming: conforming, exceeded: exceeded,
		}}
	}
	with := func(a action, change func(*policer)) action {
		change(&a.police)
		return a
	}
	gact := func(control int32) action { return action{kind: "gact", control: control} }
	const none = ""
	for _, test := range []struct {
		name    string
		actions []action
		limited bool
		excess  policy.Excess
		ends    bool
		drops   bool
		left    string
	}{
		{"nothing", nil, false, 0, true, false, none},
		{"pass", []action{gact(controlOK)}, false, 0, true, false, none},
		{"drop", []action{gact(controlShot)}, false, 0, true, true, none},
		{"continue", []action{gact(controlNext)}, false, 0, false, false, none},
		{"something that changes packets", []action{{kind: "skbedit"}}, false, 0, false, false, none},
		{"something that changes packets, and pass", []action{{kind: "skbedit"}, gact(controlOK)}, false, 0, true, false, none},
		{"perhaps", []action{{kind: "gact", random: true}}, false, 0, false, false, bans.Kind},
		{"police, drop and pass", []action{police(controlOK, controlShot)}, true, policy.Drop, true, false, none},
		{"police, reclassify", []action{police(controlOK, controlReclassify)}, true, policy.Drop, true, false, none},
		{"police, pass and pass", []action{police(controlOK, controlOK)}, true, policy.Pass, true, false, none},
		{"police, drop and continue", []action{police(controlNext, controlShot)}, true, policy.Drop, false, false, none},
		{"police, drop and pipe", []action{police(controlPipe, controlShot)}, true, policy.Drop, true, false, none},
		{"police, drop and pipe, then continue", []action{police(controlPipe, controlShot), gact(controlNext)}, true, policy.Drop, false, false, none},
		{"police, pipe and pass, then drop", []action{police(controlOK, controlPipe), gact(controlShot)}, true, policy.Drop, true, false, none},
		{"police, pipe and pipe, then drop", []action{police(controlPipe, controlPipe), gact(controlShot)}, false, 0, false, false, bans.Kind},
		{"police, continue", []action{police(controlOK, controlNext)}, false, 0, false, false, goesOn.Kind},
		{"police that drops what conforms", []action{police(controlShot, controlOK)}, false, 0, false, false, bans.Kind},
		{"two policers", []action{police(controlPipe, controlShot), police(controlOK, controlShot)}, false, 0, false, false, severalPolicers.Kind},
		{"a second policer that nothing comes to", []action{police(controlOK, controlShot), police(controlOK, controlShot)}, true, policy.Drop, true, false, none},
		{"police, then elsewhere", []action{police(controlPipe, controlShot), {kind: "mirred", steals: true, to: 3}}, false, 0, false, false, redirects.Kind},
		{"a copy elsewhere", []action{{kind: "mirred", to: 3}, police(controlOK, controlShot)}, true, policy.Drop, true, false, none},
		{"a peak rate", []action{with(police(controlOK, controlShot), func(p *policer) { p.peak = true })}, true, policy.Drop, true, false, peakRate.Kind},
		{"a largest packet", []action{with(police(controlOK, controlShot), func(p *policer) { p.mtu = 1600 })}, true, policy.Drop, true, false, largest.Kind},
		{"cells", []action{with(police(controlOK, controlShot), func(p *policer) { p.rate.linkLayer = 2 })}, true, policy.Drop, true, false, cells.Kind},
		{"an overhead of 300", []action{with(police(controlOK, controlShot), func(p *policer) { p.rate.overhead = 300 })}, true, policy.Drop, true, false, framing.Kind},
		{"packets", []action{with(police(controlOK, controlShot), func(p *policer) { p.rate.bytes, p.packets = 0, true })}, false, 0, false, false, packetRate.Kind},
		{"an average", []action{with(police(controlOK, controlShot), func(p *policer) { p.rate.bytes, p.average = 0, true })}, false, 0, false, false, average.Kind},
		{"a size alone", []action{with(police(controlOK, controlShot), func(p *policer) { p.rate.bytes = 0 })}, false, 0, false, false, bans.Kind},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := &ruleset{collector: newCollector()}
			d := &device{control: control{Dump: Dump{Device: "eth0"}}, ruleset: s, policers: map[uint32]*limit{}}
			v := d.verdict(term{where: "here", actions: test.actions}, policy.Egress)
			left := ""
			for _, l := range s.Left {
				left = l.Kind
			}
			if left != test.left {
				t.Errorf("left: %q, not %q", left, test.left)
			}
			if v.left != (test.left != "" && !test.limited) || (v.limit != nil) != test.limited || (v.until == everyEntry) != test.ends || v.drops != test.drops {
				t.Errorf("verdict: %+v", v)
			}
			if v.limit == nil {
				return
			}
			if v.limit.Excess != test.excess || v.limit.Rate != 8_000_000 || v.limit.Capacity != 10_000 {
				t.Errorf("limit: %+v", v.limit)
			}
		})
	}
}

// TestBurst converts bursts to ticks like tc, which rounds down twice, and back.
func TestBurst(t *testing.T) {
	for _, test := range []struct{ bytes, rate uint64 }{
		{1600, 125_000}, {10 << 10, 125_000}, {100_000, 1_000_000}, {1 << 20, 12_500_000}, {15 << 10, 1_250_000},
		{10 << 20, 125_000_000}, {100 << 20, 6_250_000_000}, {64 << 10, 1_250_000_000}, {20 << 20, 6_250_000},
	} {
		microseconds := test.bytes * 1_000_000 / test.rate
		ticks := uint32(microseconds * 1000 / tick)
		if got := burst(ticks, test.rate); got != test.bytes {
			t.Errorf("%d bytes at %d bytes/s: %d ticks are %d bytes", test.bytes, test.rate, ticks, got)
		}
	}
	if got := burst(math.MaxUint32, math.MaxUint64); got != math.MaxInt64 {
		t.Errorf("the longest burst is %d", got)
	}
	if got := burst(0, 1000); got != 1 && got != 0 {
		t.Errorf("no burst is %d", got)
	}
}

func TestBitRate(t *testing.T) {
	for bytes, want := range map[uint64]policy.Rate{
		1: 8, 125_000: 1_000_000, 50_000_000_000: policy.MaxRate, math.MaxUint64: policy.MaxRate + 1, 1 << 61: policy.MaxRate + 1,
	} {
		if got := bitRate(bytes); got != want {
			t.Errorf("%d bytes/s are %d, not %d", bytes, got, want)
		}
	}
}

func TestMasked(t *testing.T) {
	for _, test := range []struct {
		mask string
		want int
	}{{"255.255.255.0", 24}, {"255.255.255.255", 32}, {"0.0.0.0", 0}, {"255.240.0.0", 12}, {"255.0.255.0", -1}, {"0.255.0.0", -1}, {"255.170.0.0", -1}} {
		address := netip.MustParseAddr("10.11.12.13")
		p, ok := masked(address, netip.MustParseAddr(test.mask).AsSlice())
		if ok != (test.want >= 0) || ok && p != netip.PrefixFrom(address, test.want).Masked() {
			t.Errorf("%s: %v, %v", test.mask, p, ok)
		}
	}
}

// TestHeaderAddresses reads addresses from headers of both families.
func TestHeaderAddresses(t *testing.T) {
	type word struct {
		at          int
		value, mask uint32
	}
	const ip, ip6, all, vlan = 0x0800, 0x86dd, 0x0003, 0x8100
	for _, test := range []struct {
		name     string
		protocol uint16
		words    []word
		want     string
	}{
		{"nothing", ip, nil, "packets of 0.0.0.0/0"},
		{"nothing of IPv6", ip6, nil, "packets of ::/0"},
		{"nothing of all", all, nil, "packets of 0.0.0.0/0, ::/0"},
		{"a destination", ip, []word{{16, 0x0a000005, 0xffffffff}}, "packets to 10.0.0.5"},
		{"a source", ip, []word{{12, 0x0a000000, 0xff000000}}, "packets from 10.0.0.0/8"},
		{"a destination of all", all, []word{{16, 0x0a000000, 0xffffff00}}, "packets to 10.0.0.0/24"},
		{"the version of all", all, []word{{0, 0x40000000, 0xf0000000}}, "packets of 0.0.0.0/0"},
		{"the version of IPv6, of all", all, []word{{0, 0x60000000, 0xf0000000}}, "packets of ::/0"},
		{"another version", ip, []word{{0, 0x60000000, 0xf0000000}}, "packets of 0.0.0.0/0 with version 6/f"},
		{"a destination of IPv6", ip6, []word{{24, 0x20010db8, 0xffffffff}, {28, 0x00010000, 0xffff0000}}, "packets to 2001:db8:1::/48"},
		{"a source of IPv6", ip6, []word{{8, 0x20010db8, 0xffffffff}}, "packets from 2001:db8::/32"},
		{"a destination of IPv6, of all", all, []word{{24, 0x20010db8, 0xffffffff}}, "packets to 2001:db8::/32"},
		{"both", ip, []word{{12, 0x0a000005, 0xffffffff}, {16, 0x0a000006, 0xffffffff}}, "packets to 10.0.0.6 with source 10.0.0.5"},
		{"a mask with gaps", ip, []word{{16, 0x0a000005, 0xff0000ff}}, "packets of 0.0.0.0/0 with destination 10.0.0.5 with mask ff0000ff"},
		{"a protocol", ip, []word{{8, 0x00060000, 0x00ff0000}, {16, 0x0a000005, 0xffffffff}}, "packets to 10.0.0.5 with match 00060000/00ff0000 at 8"},
		{"ports", ip, []word{{20, 0x16, 0xffff}}, "packets of 0.0.0.0/0 with match 00000016/0000ffff at 20"},
		{"a tag", vlan, []word{{16, 0x0a000005, 0xffffffff}}, "packets of 0.0.0.0/0, ::/0 with protocol 0x8100"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var h header
			for _, w := range test.words {
				next, possible, within := h.with(w.at, w.value, w.mask)
				if !possible || !within {
					t.Fatalf("word at %d: %v, %v", w.at, possible, within)
				}
				h = next
			}
			var f term
			f.addresses(h, test.protocol)
			got := f.describe()
			if f.side == either {
				got = strings.Replace(got, "packets", "packets of "+names(f.prefixes), 1)
			}
			if got != test.want {
				t.Errorf("it is %q, not %q", got, test.want)
			}
		})
	}
	h, _, _ := header{}.with(16, 0x0a000005, 0xffffffff)
	if _, possible, _ := h.with(16, 0x0a000006, 0x000000ff); possible {
		t.Error("two values of one byte are possible")
	}
	for _, at := range []int{-4, 38, 40, 1 << 20} {
		if _, _, within := h.with(at, 1, 0xffffffff); within {
			t.Errorf("the word at %d is within a header", at)
		}
	}
}

// TestClassDepth refuses classes that are too deep for pools, and those that are above themselves.
func TestClassDepth(t *testing.T) {
	chain := func(n int) (all []object) {
		for i := range n {
			all = append(all, object{kind: "htb", handle: 1<<16 | uint32(i+1), parent: 1<<16 | uint32(i)})
		}
		return all
	}
	for _, test := range []struct {
		name    string
		classes []object
		refused bool
	}{
		{"as deep as can be", chain(policy.MaxDepth), false},
		{"deeper", chain(policy.MaxDepth + 1), true},
		{"its own parent", []object{{kind: "htb", handle: 1<<16 | 1, parent: 1<<16 | 1}}, true},
	} {
		c := control{Dump: Dump{Device: "eth0"}, classes: test.classes, inner: map[uint32]bool{}, seen: map[uint32]bool{}, met: map[u32Filter]bool{}}
		d := &device{control: c, ruleset: &ruleset{collector: newCollector()}, buckets: map[uint32]*limit{}, reported: map[uint32]bool{}}
		if err := d.htb(object{kind: "htb", handle: 1 << 16}); (err != nil) != test.refused {
			t.Errorf("%s: %v", test.name, err)
		}
	}
}

// TestWeigh gives classes weights in proportion to their quanta.
func TestWeigh(t *testing.T) {
	for _, test := range []struct{ quanta, want []uint32 }{
		{[]uint32{1500}, []uint32{1}},
		{[]uint32{200_000, 200_000}, []uint32{1, 1}},
		{[]uint32{1500, 4500, 6000}, []uint32{1, 3, 4}},
		{[]uint32{1000, 1001, 200_000}, []uint32{1, 1, 256}},
		{[]uint32{0, 1500}, []uint32{1, 1}},
		{[]uint32{1 << 31, 1<<32 - 1}, []uint32{128, 256}},
	} {
		var classes []*class
		for _, q := range test.quanta {
			classes = append(classes, &class{quantum: q, leaf: true})
		}
		weigh(classes)
		for i, c := range classes {
			if got := uint32(c.weight.Value()); got != test.want[i] {
				t.Errorf("%v: weight %d of %d, not %d", test.quanta, got, c.quantum, test.want[i])
			}
		}
	}
}

// Messages that are cut off or wrong give an error, or are read as far as possible.
func FuzzTC(f *testing.F) {
	for _, name := range captured {
		text, err := os.ReadFile(filepath.Join("testdata", "tc", name+".json"))
		testenv.Must(f, err)
		var dumps []Dump
		testenv.Must(f, json.Unmarshal(text, &dumps))
		for _, d := range dumps {
			for at, filters := range d.Filters {
				for _, m := range filters {
					f.Add(m, at)
				}
			}
			for _, m := range append(d.Qdiscs, d.Classes...) {
				f.Add(m, uint32(0))
			}
		}
	}
	f.Fuzz(func(t *testing.T, message []byte, at uint32) {
		all := [][]byte{message}
		head := fields(message)
		d := Dump{
			Device: "eth0", L2Bytes: 14, Qdiscs: all, Classes: all, Filters: map[uint32][][]byte{at: all, atEgress: all},
			Roots: []Root{{At: at, Info: head.u32(16), Table: head.u32(8) & u32Table}},
		}
		imported, err := TC([]Dump{d}, "")
		if err == nil {
			transcript(t, imported)
		}
	})
}

func FuzzNFT(f *testing.F) {
	for _, name := range []string{"devices", "plans"} {
		text, err := os.ReadFile(filepath.Join("testdata", "nft", name+".json"))
		testenv.Must(f, err)
		f.Add(string(text))
	}
	f.Fuzz(func(t *testing.T, text string) {
		imported, err := NFT("f", strings.NewReader(text), "eth1")
		if err == nil {
			transcript(t, imported)
		}
	})
}

func FuzzLibreQoS(f *testing.F) {
	text, err := os.ReadFile(filepath.Join("testdata", "libreqos", "subscribers.csv"))
	testenv.Must(f, err)
	tree, err := os.ReadFile(filepath.Join("testdata", "libreqos", "network.json"))
	testenv.Must(f, err)
	f.Add(string(text), string(tree))
	f.Add(newHeader+row("10.0.0.1", "2.5", "1"), "{}")
	f.Fuzz(func(t *testing.T, text, network string) {
		imported, err := LibreQoS(File{"f", strings.NewReader(text)}, File{"n", strings.NewReader(network)}, LibreQoSOptions{Device: "eth1", Upload: "eth0"})
		if err == nil {
			transcript(t, imported)
		}
	})
}
