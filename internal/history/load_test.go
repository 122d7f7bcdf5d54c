package history

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A load is rules and pools whose counters grow.
type load struct {
	random  *rand.Rand
	reading Reading
	busy    int // of a hundred subscribers
	tree    int // pools of several subscribers, which come first
	set     int // subscribers so far
}

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// newLoad is subscribers with a rule in each direction, and a pool each for both, in pools for 50, in one for all.
func newLoad(subscribers, busy int) *load {
	l := &load{random: rand.New(rand.NewPCG(1, 2)), busy: busy, tree: 1 + (subscribers+49)/50}
	l.reading = Reading{Time: noon, Mono: 12345678900}
	l.reading.Samples = append(l.reading.Samples, Sample{Series: &Series{Key: Key{Pool: "isp"}, Rate: 100e9, Capacity: 1e9, Excess: "drop"}})
	for i := range l.tree - 1 {
		l.reading.Samples = append(l.reading.Samples, Sample{Series: &Series{Key: Key{Pool: fmt.Sprintf("ap-%d", i)}, Within: "isp", Rate: 1e9, Capacity: 1e7, Excess: "drop"}})
	}
	l.add(subscribers)
	return l
}

func (l *load) add(subscribers int) {
	for range subscribers {
		i := l.set
		l.set++
		home := fmt.Sprintf("home-%d", i)
		l.reading.Samples = append(l.reading.Samples, Sample{Series: &Series{Key: Key{Pool: home}, Within: fmt.Sprintf("ap-%d", i%(l.tree-1)), Rate: 50e6, Capacity: 1875000, Guarantee: 5e6, Excess: "drop"}})
		for _, direction := range []string{"egress", "ingress"} {
			l.reading.Samples = append(l.reading.Samples, Sample{Series: &Series{Key: Key{"eth0", direction, fmt.Sprintf("10.%d.%d.%d/32", i>>16, i>>8&255, i&255), ""}, Name: home, Plan: "50", Within: home, Excess: "drop"}})
		}
	}
}

// churn replaces some subscribers by others.
func (l *load) churn(subscribers int) {
	for range subscribers {
		at := l.tree + 3*l.random.IntN((len(l.reading.Samples)-l.tree)/3)
		l.reading.Samples = append(append([]Sample(nil), l.reading.Samples[:at]...), l.reading.Samples[at+3:]...)
	}
	l.add(subscribers)
}

// next is the reading after ten seconds: some subscribers are busy, few of them at their rate.
func (l *load) next() Reading {
	jitter := time.Duration(l.random.IntN(2e6)) - 1e6
	l.reading.Time, l.reading.Mono = l.reading.Time.Add(10*time.Second+jitter), l.reading.Mono+uint64(10*time.Second+jitter)
	samples := append([]Sample(nil), l.reading.Samples...)
	for i := l.tree; i < len(samples); i += 3 {
		if (i/3*7919+l.random.IntN(3))%100 >= l.busy {
			continue
		}
		for j := i + 1; j < i+3; j++ {
			d := Counters{Passed: 60 + l.random.Uint64N(40)*uint64(60+l.random.IntN(1400))}
			if kind := (i / 3 * 31) % 100; kind < 20 {
				d = Counters{Passed: 62500000/2 - 1514*l.random.Uint64N(600), Dropped: 1514 * l.random.Uint64N(4000)}
			} else if kind < 50 {
				d.Passed = uint64(l.random.ExpFloat64() * 2e6)
			}
			samples[j].Counters = samples[j].plus(d)
			for _, pool := range []*Sample{&samples[i], &samples[1+i/3%(l.tree-1)], &samples[0]} {
				pool.Counters = pool.plus(Counters{Passed: d.Passed})
			}
			samples[i].Refused += d.Dropped
		}
	}
	l.reading.Samples = samples
	return l.reading
}

func reader(t testing.TB, h *History) *Reader {
	t.Helper()
	r, err := h.Reader()
	testenv.Must(t, err)
	t.Cleanup(func() { r.Close() })
	return r
}
