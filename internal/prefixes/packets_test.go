package prefixes_test

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A store holds as many rules as it was made for, with any prefixes. Packets and commands
// find each rule, also after half of them were deleted and set again.
func TestAnyPrefixesFillAHook(t *testing.T) {
	testenv.Root(t)
	room := testenv.Rounds(t, 512)
	for name, set := range prefixes.PrefixSets(room) {
		t.Run(name, func(t *testing.T) {
			var rules []policy.Rule
			seen := map[netip.Prefix]bool{}
			for _, p := range set {
				if !seen[p] {
					rules = append(rules, policy.Rule{Prefix: p, Rate: policy.MaxRate, Capacity: 1 << 20})
				}
				seen[p] = true
			}
			roll := rand.New(rand.NewPCG(1, 1))
			hook := bpf.AbiHook{L2Bytes: 14, VirtualClock: 1}
			for i := range hook.Secret {
				hook.Secret[i] = roll.Uint32()
			}
			store, err := maps.New(maps.Size{Rules: uint32(len(rules))}, hook)
			testenv.Must(t, err)
			defer store.Close()
			p, err := program.Load(store, store.Hook())
			testenv.Must(t, err)
			defer p.Close()
			const now = uint64(1e9)
			store.UseClock(func() uint64 { return now })
			packets, context := map[netip.Prefix]uint64{}, make([]byte, 192) // struct __sk_buff
			binary.NativeEndian.PutUint64(context[152:], now)
			hooked := store.View(0)
			testenv.Must(t, hooked.Load(rules))
			check := func() {
				t.Helper()
				for _, rule := range rules {
					e, found := hooked.Find(rule.Prefix)
					if !found || e.Rule != rule {
						t.Fatalf("found %+v of %v", e, rule.Prefix)
					}
					// The first address of a prefix is in the longest one that begins there.
					decides, _ := hooked.Match(rule.Prefix.Addr())
					_, err := p.Run(&ebpf.RunOptions{Data: frameTo(rule.Prefix.Addr()), Context: context})
					testenv.Must(t, err)
					packets[decides.Prefix]++
				}
				for _, rule := range rules {
					e, _ := hooked.Find(rule.Prefix)
					if got := store.Counters(e.ID).PassedPackets; got != packets[rule.Prefix] {
						t.Fatalf("%d packets were counted under %v, want %d", got, rule.Prefix, packets[rule.Prefix])
					}
				}
			}
			check()
			roll.Shuffle(len(rules), func(i, j int) { rules[i], rules[j] = rules[j], rules[i] })
			for _, rule := range rules[:len(rules)/2] {
				if !hooked.Delete(rule.Prefix) {
					t.Fatalf("%v is not there to be deleted", rule.Prefix)
				}
				delete(packets, rule.Prefix)
			}
			testenv.Must(t, hooked.Load(rules))
			check()
		})
	}
}

// frameTo is a UDP packet to an address.
func frameTo(to netip.Addr) []byte {
	b := make([]byte, 14, 100)
	if to.Is4() {
		b[12], b[13] = 0x08, 0x00
		b = append(b, 0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1)
	} else {
		binary.BigEndian.PutUint16(b[12:], 0x86dd)
		b = append(append(b, 0x60, 0, 0, 0, 0, 0, 17, 64), netip.MustParseAddr("2001:db8::1").AsSlice()...)
	}
	return append(b, to.AsSlice()...)[:cap(b)]
}
