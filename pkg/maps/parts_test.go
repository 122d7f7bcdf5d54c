package maps

import (
	"runtime"
	"sync/atomic"
	"testing"
)

// Each of many things is in exactly one part, with any number of CPUs.
func TestInParts(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for _, cpus := range []int{1, 3, 8} {
		runtime.GOMAXPROCS(cpus)
		for _, things := range []int{0, 1, 1 << 14, 1<<14 + 1, 100_003} {
			seen, parts := make([]atomic.Int32, things), atomic.Int32{}
			inParts(things, func(from, to int) {
				parts.Add(1)
				for i := from; i < to; i++ {
					seen[i].Add(1)
				}
			})
			for i := range seen {
				if n := seen[i].Load(); n != 1 {
					t.Fatalf("%d CPUs: the %d. of %d things was seen %d times", cpus, i, things, n)
				}
			}
			if n := int(parts.Load()); n > cpus || things > 100_000 && n != min(cpus, 7) {
				t.Errorf("%d CPUs: %d things in %d parts", cpus, things, n)
			}
		}
	}
}
