package bpf_test

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The percentage of hosts without a slot, by the number of hosts with a level per
// hundred slots. docs/operations.md has these numbers.
func TestTableFill(t *testing.T) {
	t.Parallel()
	promised := []struct {
		hosts   int
		spilled float64 // percent
	}{{50, 0.01}, {75, 0.05}, {90, 1}, {100, 5}}
	const now = uint64(1e12)
	const slots = 1 << 16 // with fewer, chance decides
	run := func(t *testing.T, p netip.Prefix, host func() netip.Addr) {
		r := newRig(t, maps.Size{Rules: 1, Buckets: slots}, egress())
		e := r.put(policy.Rule{
			Prefix: p, Rate: 1_000_000, Capacity: 2000, Algorithm: policy.GCRA, Each: policy.Each{Kind: policy.EachHost},
		}, now)
		hosts := map[netip.Addr]bool{}
		for _, want := range promised {
			for len(hosts) < slots/100*want.hosts {
				to := host()
				if hosts[to] {
					continue
				}
				hosts[to] = true
				_, err := r.program().Run(&ebpf.RunOptions{Data: udp(p.Addr(), to, 0), Context: meta{now: now}.context()})
				testenv.Must(t, err)
			}
			got := 100 * float64(r.set.Store.Counters(e.ID).SpilledPackets) / float64(len(hosts))
			t.Logf("%d hosts for each 100 slots: %.4f %% have none", want.hosts, got)
			if got > want.spilled {
				t.Errorf("%d hosts per 100 slots: %.4f %% have no slot, want at most %v %%", want.hosts, got, want.spilled)
			}
		}
	}
	roll := rand.New(rand.NewPCG(1, 2))
	for name, number := range map[string]func(n uint32) uint64{
		"consecutive": func(n uint32) uint64 { return uint64(n) },
		"random":      func(uint32) uint64 { return roll.Uint64() },
	} {
		t.Run("IPv4 "+name, func(t *testing.T) {
			n := uint32(0)
			run(t, prefix("10.0.0.0/8"), func() netip.Addr {
				n++
				return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, 10<<24|uint32(number(n))&(1<<24-1))))
			})
		})
		t.Run("IPv6 "+name, func(t *testing.T) {
			n := uint32(0)
			run(t, prefix("2001:db8::/32"), func() netip.Addr {
				n++
				return netip.AddrFrom16([16]byte(binary.BigEndian.AppendUint64([]byte{0x20, 1, 0xd, 0xb8, 7: 0}, number(n))))
			})
		})
	}
}
