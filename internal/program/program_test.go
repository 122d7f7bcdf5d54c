package program

import (
	"net/netip"
	"slices"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The lists of prefix lengths may change while a packet is being matched. The packet still finds its
// rule. So that they change at that moment, the test inserts a store where the search by lengths begins.
func TestLengthsChangeDuringAMatch(t *testing.T) {
	testenv.Root(t)
	v4, v6 := make([]byte, 60), make([]byte, 80)
	v4[12], v4[14], v6[12], v6[13], v6[14] = 0x08, 0x45, 0x86, 0xdd, 0x60
	copy(v4[14+16:], netip.MustParseAddr("10.0.0.200").AsSlice())
	copy(v6[14+24:], netip.MustParseAddr("2001:db8::200").AsSlice())
	for _, c := range []struct {
		search       string
		wide, single netip.Prefix
		frame        []byte
	}{
		{"match4_from", netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("10.0.0.7/32"), v4},
		{"match6_from", netip.MustParsePrefix("2001:db8::/64"), netip.MustParsePrefix("2001:db8::7/128"), v6},
	} {
		t.Run(c.search, func(t *testing.T) {
			// With room and this secret, each prefix has a line of its own, so the packet's first look is enough for one length.
			hook := bpf.AbiHook{L2Bytes: netinfo.EthernetBytes, Secret: [12]uint32{10: 0xa0761d64, 11: 0x78bd642f}}
			store, err := maps.New(maps.Size{Rules: 256}, hook)
			testenv.Must(t, err)
			set := store.View(0)
			t.Cleanup(func() { set.Store.Close() })
			// Version 1 of the lists has one length, and then version 0 has both.
			for _, prefix := range []netip.Prefix{c.wide, c.single} {
				_, err := set.Put(policy.Rule{Prefix: prefix, Rate: 1_000_000, Capacity: 10_000})
				testenv.Must(t, err)
			}
			spec, err := bpf.Spec()
			testenv.Must(t, err)
			code := spec.Programs[Name].Instructions
			at := slices.IndexFunc(code, func(i asm.Instruction) bool { return i.Symbol() == c.search })
			change := asm.Instructions{
				asm.LoadMapValue(asm.R0, store.Replacements()[".data.views"].FD(), uint32(unsafe.Offsetof(bpf.AbiView{}.Version))),
				asm.StoreImm(asm.R0, 0, 1, asm.Word),
			}
			change[0].Metadata, code[at].Metadata = code[at].Metadata, change[0].Metadata // the function begins here now
			spec.Programs[Name].Instructions = slices.Insert(code, at, change...)
			p, err := load(spec, Name, store.Replacements(), store.Hook())
			testenv.Must(t, err)
			t.Cleanup(func() { p.Close() })
			_, err = p.Run(&ebpf.RunOptions{Data: c.frame})
			testenv.Must(t, err)
			if _, found := set.Find(c.single); found {
				t.Error("the lists have not changed")
			}
			rule, _ := set.Find(c.wide)
			if passed := set.Store.Counters(rule.ID).PassedPackets; passed != 1 {
				t.Errorf("the rule for %v passed %d packets, want 1", c.wide, passed)
			}
		})
	}
}

// The verifier accepts the programs for each kind of hook, with pools, with colours, and with both. It looks at few
// instructions, so they load quickly on any kernel.
func TestVerifierAcceptsAll(t *testing.T) {
	testenv.Root(t)
	for i, size := range []maps.Size{{Pools: true, Colours: true, NAT: true, Marks: true, Also: true, Affected: 8}, {Pools: true}, {}, {Colours: true}} {
		size.Rules, size.Buckets = 256, 1<<16
		store, err := maps.New(size, bpf.AbiHook{})
		testenv.Must(t, err)
		defer store.Close()
		for k := range Kinds {
			if i > 0 && int(k)%3 != i-1 {
				continue // a kind differs from another one only in constants
			}
			p, err := Load(store, k.Settings(store.Hook()))
			if err != nil {
				t.Fatalf("kind %d, %+v: %+v", k, size, err)
			}
			defer p.Close()
			if n := verified(t, store, k, p); n > 65_000 {
				t.Errorf("kind %d, %+v: the verifier looks at %d instructions", k, size, n)
			}
		}
	}
}

// verified returns how many instructions the verifier looked at for the programs of a kind.
func verified(t *testing.T, store *maps.Store, k Kind, p *ebpf.Program) (n uint32) {
	t.Helper()
	var climb *ebpf.Program
	testenv.Must(t, k.Family().maps(store)[bpf.ShapectlMapPrograms].Lookup(uint32(k), &climb))
	defer climb.Close()
	for _, p := range []*ebpf.Program{p, climb} {
		info, err := p.Info()
		testenv.Must(t, err)
		looked, ok := info.VerifiedInstructions()
		if !ok {
			testenv.Skip(t, "the kernel does not tell how many instructions it has verified")
		}
		n += looked
	}
	return n
}
