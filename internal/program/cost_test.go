//go:build guest

package program

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// TestCost prints what packets and loading cost, in a guest whose clock counts instructions. scripts/kernels-test.sh compares the
// figures with testdata/costs.tsv. A test run sends each packet through the program that a hook attaches. It is the same for
// tcx and clsact. On a device, the instructions of the kernel around it would hide a change of 1 %.
func TestCost(t *testing.T) {
	testenv.Root(t)
	// Otherwise a thread of Go wakes up every 20 µs.
	tasks, err := os.ReadDir("/proc/self/task")
	testenv.Must(t, err)
	for _, task := range tasks {
		testenv.Must(t, os.WriteFile("/proc/"+task.Name()+"/timerslack_ns", []byte("1000000000"), 0))
	}
	for _, c := range []struct {
		name         string
		size         maps.Size
		kind         Kind
		pools, rules []string // options
	}{
		{"plain egress", maps.Size{}, 0, nil, []string{
			"no rule", "algorithm=gcra", "algorithm=gcra each=host", "algorithm=gcra each=flow",
			"algorithm=leaky", "algorithm=leaky each=host", "algorithm=leaky each=flow",
			"IPv6 no rule", "IPv6 algorithm=gcra", "IPv6 each=host", "IPv6 each=flow",
			"rate=8kbit capacity=4kb excess=drop", "rate=8kbit capacity=4kb excess=drop each=host",
			"rate=100mbit capacity=4kb excess=delay queue=8mb", "rate=100mbit algorithm=leaky excess=delay capacity=8mb",
		}},
		{"plain ingress", maps.Size{}, ingress | matchSrc, nil, []string{"each=all", "each=host", "each=flow", "IPv6 each=host"}},
		{"pools egress", maps.Size{Pools: true}, 0, []string{
			"one", "fourth", "third within=fourth", "second within=third", "first within=second", "members share=member",
		}, []string{
			"within=one", "algorithm=leaky within=one", "within=first", "within=members", "within=one guarantee=10gbit",
			"share=host", "share=flow", "algorithm=leaky share=flow", "IPv6 within=first", "IPv6 share=flow",
		}},
		{"colours egress", maps.Size{Colours: true}, 0, nil, []string{
			"algorithm=srtcm", "algorithm=trtcm pir=200gbit", "algorithm=rfc4115 eir=100gbit", "IPv6 algorithm=trtcm pir=200gbit",
		}},
		{"NAT egress", maps.Size{Pools: true, NAT: true}, 0, nil, []string{"share=host", "share=host nat=true", "IPv6 share=host nat=true"}},
		{"other limits egress", maps.Size{Also: true}, 0, nil, []string{
			"each=all", "pps=10m", "new-flows=10m", "quota=4096tb/month then=drop", "quota=4096tb/30d then=drop", "quota=1b/30d then=10gbit",
			"pps=10m new-flows=10m quota=4096tb/month then=drop", "each=host pps=10m", "each=host new-flows=10m", "each=host quota=4096tb/month then=drop",
		}},
		{"all ingress", maps.Size{Pools: true, Colours: true, Affected: 8}, ingress | matchSrc, nil, nil},
	} {
		c.size.Rules, c.size.Buckets, c.size.Views, c.size.Shares, c.size.Labels = 1<<14, 1<<16, 2, 64, 64
		hook := bpf.AbiHook{}
		for i := range hook.Secret {
			hook.Secret[i] = 0x9e3779b9 * uint32(i+1) // the same in each run
		}
		store, err := maps.New(c.size, hook)
		testenv.Must(t, err)
		defer store.Close()
		program, err := Load(store, c.kind.Settings(store.Hook()))
		testenv.Must(t, err)
		defer program.Close()
		fmt.Printf("cost: %d\t%s: instructions that the verifier looks at\n", verified(t, store, c.kind, program), c.name)
		kinds, err := NewKinds()
		testenv.Must(t, err)
		defer kinds.Close()
		testenv.Must(t, kinds.Put(uint32(c.kind), program))
		caller, err := LoadCaller(kinds, c.kind, 0)
		testenv.Must(t, err)
		defer caller.Close()
		for _, options := range c.pools {
			name, options, _ := strings.Cut(options, " ")
			pool, err := limitOf(t, options).Pool(name)
			testenv.Must(t, err)
			_, err = store.Pools().Put(pool)
			testenv.Must(t, err)
		}
		for i, text := range c.rules {
			options, six := strings.CutPrefix(text, "IPv6 ")
			var rounds []time.Duration
			for k := range 3 { // the keys of a rule have a random salt, and may collide with others
				near, prefix := netip.MustParseAddr("192.0.2.1"), netip.MustParsePrefix(fmt.Sprintf("10.%d.%d.0/24", i, k))
				if six {
					near, prefix = netip.MustParseAddr("2001:db8::1"), netip.MustParsePrefix(fmt.Sprintf("2001:db8:%d:%d::/64", 1+i, k))
				}
				if options != "no rule" {
					rule, err := limitOf(t, options).Rule(prefix)
					testenv.Must(t, err)
					_, err = store.View(0).Put(rule)
					testenv.Must(t, err)
				}
				frame := frameOf(near, prefix.Addr().Next())
				if c.kind&matchSrc != 0 {
					frame = frameOf(prefix.Addr().Next(), near)
				}
				for range 5 { // shorter than a tick of the clock, so few are interrupted
					_, packet, err := caller.Benchmark(frame, 200, func() {})
					testenv.Must(t, err)
					rounds = append(rounds, packet)
				}
			}
			slices.Sort(rounds)
			fmt.Printf("cost: %d\t%s: instructions of a packet, %s\n", rounds[len(rounds)/2], c.name, text)
		}
	}
}

// limitOf returns a limit with these options, to which all packets conform unless they say another rate.
func limitOf(t *testing.T, options string) policy.Limit {
	t.Helper()
	l := policy.Limit{Rate: 100e9}
	for option := range strings.FieldsSeq(options) {
		key, value, _ := strings.Cut(option, "=")
		testenv.Must(t, l.Set(key, value))
	}
	return l
}

// frameOf returns the smallest frame with a UDP packet.
func frameOf(src, dst netip.Addr) []byte {
	if src.Is4() {
		return testenv.Frame(src, dst, 60)
	}
	frame := slices.Concat(make([]byte, 12), []byte{0x86, 0xdd, 0x60, 0, 0, 0, 0, 8, 17, 64}, src.AsSlice(), dst.AsSlice())
	return append(frame, 0, 53, 0, 53, 0, 8, 0, 0)
}
