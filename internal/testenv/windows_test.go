package testenv

import (
	"math/rand/v2"
	"testing"
)

// Windows finds the same extremes as a comparison of each window.
func TestWindows(t *testing.T) {
	seed := Seed(t)
	for i := range uint64(50) {
		roll := rand.New(rand.NewPCG(seed, i))
		rate := 8_000_000 * (1 + roll.Uint64N(100_000)) // a multiple of 1/1000 byte per ns
		var w Windows
		var begins []int64 // millionths of a byte, passed less allowed, before each packet
		net := int64(0)
		for range 200 {
			passed := roll.Uint64N(2000) * roll.Uint64N(2)
			begins = append(begins, net)
			net += int64(passed) * 1e6
			most, least := w.Packet(passed)
			wantMost, wantLeast := int64(-1<<62), int64(1<<62)
			for _, begin := range begins {
				wantMost, wantLeast = max(wantMost, net-begin), min(wantLeast, net-begin)
			}
			if most != wantMost || least != wantLeast {
				t.Fatalf("trace %d, packet %d: %d and %d, want %d and %d", i, len(begins), most, least, wantMost, wantLeast)
			}
			ns := roll.Int64N(3000) - 100
			w.Leak(rate, ns)
			net -= int64(rate/8_000_000) * ns * 1000
			if roll.IntN(20) == 0 {
				w.Raise(-5)
				net -= 5e6
			}
		}
	}
}
