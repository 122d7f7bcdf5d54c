package bpf_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A flood of spoofed hosts occupies every slot and keeps the spill bucket full. A host
// without a slot still gets its part of the spill bucket's rate: one of the ten packets
// that compete for each conforming one is the host's, and it is first in every tenth
// round. A penalty or the room beyond the capacity of ECN does not change that.
func TestFloodBlocksNoHost(t *testing.T) {
	const (
		size, holds = 1000, 3
		rivals      = 10
		rounds      = 300
		round       = uint64(time.Millisecond) // in which the rate allows one packet
	)
	fill, hold := policy.Penalty{Kind: policy.PenaltyFill}, policy.Penalty{Kind: policy.PenaltyHold, Duration: 30 * time.Second}
	for _, c := range []struct {
		algorithm policy.Algorithm
		penalty   policy.Penalty
		excess    policy.Excess
		fail      policy.Fail
	}{
		{policy.GCRA, policy.Penalty{}, policy.Drop, policy.Open},
		{policy.GCRA, policy.Penalty{}, policy.ECN, policy.Open},
		{policy.Leaky, fill, policy.Drop, policy.Open},
		{policy.Leaky, hold, policy.Drop, policy.Open},
		{policy.Leaky, hold, policy.Drop, policy.Closed},
		{policy.Leaky, hold, policy.ECN, policy.Open},
	} {
		t.Run(fmt.Sprintf("%v penalty %v %v fail %v", c.algorithm, c.penalty, c.excess, c.fail), func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 1, Buckets: 4}, egress())
			e := r.put(policy.Rule{
				Prefix: prefix("10.0.0.0/8"), Rate: 8_000_000, Capacity: holds * size, Each: policy.Each{Kind: policy.EachHost},
				Algorithm: c.algorithm, Penalty: c.penalty, Excess: c.excess, Fail: c.fail,
			}, 0)
			p, now := r.program(), uint64(1e9)
			send := func(host int, ecn uint8) int {
				to := netip.AddrFrom4([4]byte{10, byte(host >> 16), byte(host >> 8), byte(host)})
				frame := ether(typeIPv4, ip4{dst: to.String(), proto: protoUDP, tos: ecn}.with(udpHeader(1, 2), zeros(size-42)))
				verdict, _ := send(t, p, frame, meta{now: now})
				if verdict != next {
					return 0
				}
				return 1
			}
			const capable = 2 // ECT(0)
			holders := func() {
				for host := range 4 {
					send(host, capable)
				}
			}
			for range 2*holds + 1 {
				holders()
			}
			spoofed, got := 4, 0
			for range holds {
				got += send(spoofed, 0)
				spoofed++
			}
			if got != holds {
				t.Fatalf("%d of the first %d packets without a slot passed", got, holds)
			}
			honest, spray, before := 0, 0, r.counters()[e.ID]
			for i := range rounds {
				now += round / 2
				spray += send(spoofed, 0) // excess: there is room for half of it
				spoofed++
				now += round / 2
				holders()
				for turn := range rivals {
					if turn == i%rivals {
						honest += send(1<<23, 0)
						continue
					}
					spray += send(spoofed, capable)
					spoofed++
				}
			}
			if honest != rounds/rivals || spray != rounds-rounds/rivals {
				t.Errorf("%d packets of the host and %d of the flood passed, want %d and %d",
					honest, spray, rounds/rivals, rounds-rounds/rivals)
			}
			if got := since(before, r.counters()[e.ID]).SpilledPackets; got != rounds*(rivals+1) {
				t.Errorf("%d packets were counted as spilled, want %d", got, rounds*(rivals+1))
			}
		})
	}
}
