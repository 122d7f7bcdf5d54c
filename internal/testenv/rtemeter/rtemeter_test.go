package rtemeter_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/internal/testenv/rtemeter"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Every packet has the colour that DPDK gives it.
func TestColoursAsInDPDK(t *testing.T) {
	seed := testenv.Seed(t)
	const traces, packets = 1000, 300
	for _, algorithm := range []policy.Algorithm{policy.SRTCM, policy.TRTCM, policy.RFC4115} {
		for _, aware := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/aware=%v", algorithm, aware), func(t *testing.T) {
				dpdk := rtemeter.Start(t)
				var colours [3]int
				for i := range traces {
					r := rand.New(rand.NewPCG(seed, uint64(i)))
					trace := dpdk.Trace(r, algorithm, aware, packets)
					l, p, start := model.NewColoured(trace.Rule), model.Pair{}, r.Uint64N(1<<50)
					for k, packet := range trace.Packets {
						before := p
						got := l.Offer(&p, start+packet.Time, packet.Bytes, packet.In)
						if got != packet.Colour {
							t.Fatalf("trace %d, packet %d, %d bytes at %d + %d ns, in %v: %v, DPDK %v\nrule %+v\nmeter %+v\nbuckets %+v",
								i, k, packet.Bytes, start, packet.Time, packet.In, got, packet.Colour, trace.Rule, l, before)
						}
						colours[got]++
					}
				}
				t.Logf("packets by colour: %v", colours)
				if min(colours[0], colours[1], colours[2]) < traces*packets/50 {
					t.Error("the traces miss their purpose")
				}
			})
		}
	}
}
