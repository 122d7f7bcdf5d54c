package history

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"
)

// A day of 10 000 rules fits into 200 MB, in memory and in a file, even if all are busy and no value can be told from others.
// With -short, only the limit is tested, with less than that.
func TestDay(t *testing.T) {
	readings, rules, limits := 8640, 10000, Limits{Boot: "b"}
	if testing.Short() {
		readings, rules, limits.Bytes = 1000, 400, 3_000_000
	}
	for _, test := range []struct {
		name string
		use  func(*rand.Rand, int) Counters
	}{{"random", randomUse}, {"mixed", mixedUse}} {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "h")
			h, err := Open(path, limits, func(s string) { t.Log(s) })
			if err != nil {
				t.Fatal(err)
			}
			l := newLoad(rules, test.use)
			first := l.reading.Time
			var adding, longest time.Duration
			largest := int64(0)
			for range readings {
				r := l.next()
				began := time.Now()
				h.Add(r)
				took := time.Since(began)
				adding, longest = adding+took, max(longest, took)
				if info, err := os.Stat(path); err != nil {
					t.Fatal(err)
				} else {
					largest = max(largest, info.Size())
				}
			}
			last := l.reading
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			t.Logf("file %d kB, heap %d kB, kept %v in %d chunks; a reading takes %v, at most %v", largest/1000, m.HeapAlloc/1000, h.length(), len(h.kept), adding/time.Duration(readings), longest)
			if largest > h.limits.Bytes {
				t.Errorf("the file has %d bytes, more than %d", largest, h.limits.Bytes)
			}
			began := time.Now()
			n, sum := 0, Counters{}
			key := last.Samples[321].Key
			if err := h.Query(Query{first, last.Time, func(s *Series) bool { return s.Key == key }}, func(it Interval) {
				n++
				sum.add(it.Counters)
			}); err != nil {
				t.Fatal(err)
			}
			t.Logf("a query takes %v, %d intervals", time.Since(began), n)
			if n > readings-1 || n < readings-1 && !testing.Short() {
				t.Errorf("there are %d intervals of %d", n, readings-1)
			}
			if sum.Passed > last.Samples[321].Passed || sum.Passed == 0 && test.name == "random" {
				t.Errorf("%d bytes passed, of %d", sum.Passed, last.Samples[321].Passed)
			}
			if err := h.Close(); err != nil {
				t.Fatal(err)
			}
			began = time.Now()
			if h, err = Open(path, limits, func(s string) { t.Log(s) }); err != nil {
				t.Fatal(err)
			}
			t.Logf("opening it again takes %v", time.Since(began))
			testClose(t, h)
		})
	}
}

func testClose(t *testing.T, h *History) {
	t.Helper()
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}
