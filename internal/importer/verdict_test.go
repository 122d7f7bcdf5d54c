package importer

import (
	"fmt"
	"maps"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// TestVerdict checks the effect of a filter's actions on conforming and excess packets.
func TestVerdict(t *testing.T) {
	base := func() nl.TcPolice {
		return nl.TcPolice{Index: 1, Action: 2, Rate: nl.TcRateSpec{Rate: 1e6}, Burst: 1e6 / tick * 10, Mtu: 255 << 3}
	}
	with := func(change func(*nl.TcPolice), more attributes) action {
		p := base()
		change(&p)
		a := attributes{nl.TCA_POLICE_TBF: p.Serialize(), nl.TCA_POLICE_RESULT: nl.Uint32Attr(0)}
		maps.Copy(a, more)
		return action{"police", a}
	}
	police := func(conforming, exceeded netlink.TcAct) action {
		return with(func(p *nl.TcPolice) { p.Action = int32(exceeded) }, attributes{nl.TCA_POLICE_RESULT: nl.Uint32Attr(uint32(conforming))})
	}
	gact := func(control netlink.TcAct) action {
		g := nl.TcGen{Action: int32(control)}
		return action{"gact", attributes{nl.TCA_GACT_PARMS: g.Serialize()}}
	}
	mirred := func(way netlink.MirredAct) action {
		m := nl.TcMirred{Eaction: int32(way), Ifindex: 3}
		return action{"mirred", attributes{nl.TCA_MIRRED_PARMS: m.Serialize()}}
	}
	noRate := func(p *nl.TcPolice) { p.Rate.Rate = 0 }
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
		{"pass", []action{gact(netlink.TC_ACT_OK)}, false, 0, true, false, none},
		{"drop", []action{gact(netlink.TC_ACT_SHOT)}, false, 0, true, true, none},
		{"continue", []action{gact(netlink.TC_ACT_UNSPEC)}, false, 0, false, false, none},
		{"something that changes packets", []action{{"skbedit", nil}}, false, 0, false, false, none},
		{"something that changes packets, and pass", []action{{"skbedit", nil}, gact(netlink.TC_ACT_OK)}, false, 0, true, false, none},
		{"perhaps", []action{{"gact", attributes{nl.TCA_GACT_PROB: {1}}}}, false, 0, false, false, unreadable.Kind},
		{"police, drop and pass", []action{police(netlink.TC_ACT_OK, netlink.TC_ACT_SHOT)}, true, policy.Drop, true, false, none},
		{"police, reclassify", []action{police(netlink.TC_ACT_OK, netlink.TC_ACT_RECLASSIFY)}, true, policy.Drop, true, false, none},
		{"police, pass and pass", []action{police(netlink.TC_ACT_OK, netlink.TC_ACT_OK)}, false, 0, false, false, oddPolicer.Kind},
		{"police, drop and continue", []action{police(netlink.TC_ACT_UNSPEC, netlink.TC_ACT_SHOT)}, true, policy.Drop, false, false, none},
		{"police, drop and pipe", []action{police(netlink.TC_ACT_PIPE, netlink.TC_ACT_SHOT)}, true, policy.Drop, true, false, none},
		{"police, drop and pipe, then continue", []action{police(netlink.TC_ACT_PIPE, netlink.TC_ACT_SHOT), gact(netlink.TC_ACT_UNSPEC)}, true, policy.Drop, false, false, none},
		{"police, pipe and pipe, then drop", []action{police(netlink.TC_ACT_PIPE, netlink.TC_ACT_PIPE), gact(netlink.TC_ACT_SHOT)}, false, 0, false, false, oddPolicer.Kind},
		{"police, continue", []action{police(netlink.TC_ACT_OK, netlink.TC_ACT_UNSPEC)}, false, 0, false, false, oddPolicer.Kind},
		{"police that drops what conforms", []action{police(netlink.TC_ACT_SHOT, netlink.TC_ACT_OK)}, false, 0, false, false, oddPolicer.Kind},
		{"two policers", []action{police(netlink.TC_ACT_PIPE, netlink.TC_ACT_SHOT), police(netlink.TC_ACT_OK, netlink.TC_ACT_SHOT)}, false, 0, false, false, oddPolicer.Kind},
		{"a second policer that nothing comes to", []action{police(netlink.TC_ACT_OK, netlink.TC_ACT_SHOT), police(netlink.TC_ACT_OK, netlink.TC_ACT_SHOT)}, true, policy.Drop, true, false, none},
		{"police, then elsewhere", []action{police(netlink.TC_ACT_PIPE, netlink.TC_ACT_SHOT), mirred(netlink.TCA_EGRESS_REDIR)}, false, 0, false, false, redirects.Kind},
		{"a copy elsewhere", []action{mirred(netlink.TCA_EGRESS_MIRROR), police(netlink.TC_ACT_OK, netlink.TC_ACT_SHOT)}, true, policy.Drop, true, false, none},
		{"a peak rate", []action{with(func(p *nl.TcPolice) { p.PeakRate.Rate = 1 }, nil)}, true, policy.Drop, true, false, counted.Kind},
		{"cells", []action{with(func(p *nl.TcPolice) { p.Rate.Linklayer = nl.LINKLAYER_ATM }, nil)}, true, policy.Drop, true, false, counted.Kind},
		{"an overhead of 300", []action{with(func(p *nl.TcPolice) { p.Rate.Overhead = 300 }, nil)}, true, policy.Drop, true, false, counted.Kind},
		{"packets of up to 1000 bytes", []action{with(func(p *nl.TcPolice) { p.Mtu = 1000 }, nil)}, true, policy.Drop, true, false, sized.Kind},
		{"an average", []action{with(noRate, attributes{nl.TCA_POLICE_AVRATE: {1}})}, false, 0, false, false, oddPolicer.Kind},
		{"a size alone", []action{with(noRate, nil)}, false, 0, false, false, oddPolicer.Kind},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newCollector()
			d := &device{Dump: Dump{Device: "eth0"}, collector: s, policers: map[uint32]*limit{}}
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
	if got := burst(0, 1000); got != 1 && got != 0 {
		t.Errorf("no burst is %d", got)
	}
}

func TestBitRate(t *testing.T) {
	for bytes, want := range map[uint64]policy.Rate{
		1: 8, 125_000: 1_000_000, 50_000_000_000: policy.MaxRate, math.MaxUint64: policy.MaxRate + 8, 1 << 61: policy.MaxRate + 8,
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
		{"nothing", ip, nil, "any address 0.0.0.0/0"},
		{"nothing of IPv6", ip6, nil, "any address ::/0"},
		{"nothing of all", all, nil, "any address 0.0.0.0/0, ::/0"},
		{"a destination", ip, []word{{16, 0x0a000005, 0xffffffff}}, "destination 10.0.0.5"},
		{"a source", ip, []word{{12, 0x0a000000, 0xff000000}}, "source 10.0.0.0/8"},
		{"a destination of all", all, []word{{16, 0x0a000000, 0xffffff00}}, "destination 10.0.0.0/24"},
		{"the version of all", all, []word{{0, 0x60000000, 0xf0000000}}, "any address 0.0.0.0/0 with match 60000000/f0000000 at 0"},
		{"a destination of IPv6", ip6, []word{{24, 0x20010db8, 0xffffffff}, {28, 0x00010000, 0xffff0000}}, "destination 2001:db8:1::/48"},
		{"a source of IPv6", ip6, []word{{8, 0x20010db8, 0xffffffff}}, "source 2001:db8::/32"},
		{"a destination of IPv6, of all", all, []word{{24, 0x20010db8, 0xffffffff}}, "destination 2001:db8::/32"},
		{"both", ip, []word{{12, 0x0a000005, 0xffffffff}, {16, 0x0a000006, 0xffffffff}}, "destination 10.0.0.6 with source 10.0.0.5"},
		{"a mask with gaps", ip, []word{{16, 0x0a000005, 0xff0000ff}}, "any address 0.0.0.0/0 with destination 10.0.0.5 with mask ff0000ff"},
		{"a protocol", ip, []word{{8, 0x00060000, 0x00ff0000}, {16, 0x0a000005, 0xffffffff}}, "destination 10.0.0.5 with match 00060000/00ff0000 at 8"},
		{"ports", ip, []word{{20, 0x16, 0xffff}}, "any address 0.0.0.0/0 with match 00000016/0000ffff at 20"},
		{"a tag", vlan, []word{{16, 0x0a000005, 0xffffffff}}, "destination 10.0.0.5 with protocol 0x8100"},
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
			f := term{conditions: conditions{networks: everything}}
			f.header(h, test.protocol)
			got := fmt.Sprintf("%v %s", f.side, names(f.networks))
			if f.partial != "" {
				got += " with " + f.partial
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
			classes = append(classes, &class{TcHtbCopt: nl.TcHtbCopt{Quantum: q}, leaf: true})
		}
		weigh(classes)
		for i, c := range classes {
			if got := uint32(c.weight.Value()); got != test.want[i] {
				t.Errorf("%v: weight %d of %d, not %d", test.quanta, got, c.Quantum, test.want[i])
			}
		}
	}
}

// TestRateAboveCeil gives a class no guarantee that it never gets.
func TestRateAboveCeil(t *testing.T) {
	d := &device{collector: newCollector(), buckets: map[uint32]*limit{}, classes: map[uint32]*class{1: {ceil: rateSpec{bytes: 1e9}}}}
	c := &class{rate: rateSpec{bytes: 2e6}, ceil: rateSpec{bytes: 1e6}}
	if c.Parent = 1; uint64(d.limit(c).Guarantee) != 8e6 {
		t.Errorf("%v are guaranteed", d.limit(c).Guarantee)
	}
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
