package history

import (
	"flag"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"testing"
	"time"
)

var dayRules = flag.Int("day", 500, "rules of TestDay, in as many parts of 10 000 of the usual limit")

// What a small history needs more, in proportion: the file grows in steps, and buffers of the heap are as large for few rules.
const (
	fixedBytes = 900_000
	fixedHeap  = 1_000_000
)

// A day of 10 000 rules fits into 200 MB, in memory and in a file, even if all are busy and no value can be told from others.
// Usually the test has a part of both, and with -short only two hours; -day 10000 is all of it, in some minutes.
func TestDay(t *testing.T) {
	readings := 8640
	if testing.Short() {
		readings /= 12
	}
	for _, test := range []struct {
		name   string
		use    func(*rand.Rand, int) Counters
		disk   bool
		errors [2]float64 // of passed and of other bytes
	}{
		{"random", randomUse, true, [2]float64{0.02, 0.02}},
		{"random in memory", randomUse, false, [2]float64{0.04, 0.04}},
		{"mixed", mixedUse, true, [2]float64{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			limits, path := Limits{Boot: "b", Bytes: DefaultBytes / 10000 * int64(*dayRules)}, ""
			heapBytes := limits.Bytes
			if *dayRules < 10000 {
				limits.Bytes += fixedBytes
				heapBytes = limits.Bytes + fixedHeap
			}
			if test.disk {
				path = filepath.Join(t.TempDir(), "history")
			}
			decompress(compress(make([]byte, 1<<20))) // what that keeps does not grow with the rules
			l, before := newLoad(*dayRules, test.use), heap()
			h, err := Open(path, limits, func(s string) { t.Error(s) })
			must(t, err)
			defer func() { h.Close() }()
			h.store.unsynced = true // a power loss is not tested
			first := l.next()
			h.Add(first)
			var adding, longest time.Duration
			for range readings - 1 {
				r := l.next()
				began := time.Now()
				h.Add(r)
				took := time.Since(began)
				adding, longest = adding+took, max(longest, took)
			}
			last := l.reading
			info, err := h.file.Stat()
			must(t, err)
			memory := heap() - before
			t.Logf("file %d kB, heap %d kB, %d chunks; a reading takes %v, at most %v", info.Size()/1000, memory/1000, len(h.kept), adding/time.Duration(readings), longest)
			if !test.disk {
				memory += info.Size()
			}
			if info.Size() > limits.Bytes || memory > heapBytes {
				t.Errorf("%d bytes in the file, %d in memory", info.Size(), memory)
			}
			of := *dayRules / 3
			began := time.Now()
			n, sum, off := 0, Counters{}, [2]float64{}
			must(t, h.Query(Query{first.Time, last.Time, func(s *Series) bool { return s.Key == last.Samples[of].Key }}, func(it Interval) {
				n++
				sum.add(it.Counters)
				off = [2]float64{max(off[0], it.PassedError), max(off[1], it.DroppedError)}
			}))
			t.Logf("a query takes %v; values are off by at most %.2f and %.2f %%", time.Since(began), 100*off[0], 100*off[1])
			if off[0] > test.errors[0] || off[1] > test.errors[1] {
				t.Errorf("values are off by %g", off)
			}
			if want, _ := last.Samples[of].Since(first.Samples[of].Counters); n != readings-1 || sum != want {
				t.Errorf("%d intervals of %d, with %v of %v", n, readings-1, sum, want)
			}
			if test.disk {
				must(t, h.Close())
				began = time.Now()
				h, err = Open(path, limits, func(s string) { t.Error(s) })
				must(t, err)
				t.Logf("opening it again takes %v", time.Since(began))
			}
		})
	}
}

// heap is the size of what lives in it.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
