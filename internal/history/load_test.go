package history

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// A load is rules whose counters grow.
type load struct {
	random  *rand.Rand
	reading Reading
	step    func(r *rand.Rand, i int) Counters // what a rule counts in an interval
}

func newLoad(rules int, step func(*rand.Rand, int) Counters) *load {
	l := &load{random: rand.New(rand.NewPCG(1, 2)), step: step}
	l.reading = Reading{Time: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), Mono: 12345678900, Policy: "sha256:0"}
	for i := range rules {
		s := Series{Key: Key{"eth0", []string{"egress", "ingress"}[i%2], fmt.Sprintf("10.%d.%d.%d/32", i/2>>16, i/2>>8&255, i/2&255), ""},
			Name: fmt.Sprintf("home-%d", i/2), Plan: "50", Within: fmt.Sprintf("ap-%d", i/100), Rate: 50e6, Capacity: 1875000, Guarantee: 5e6, Excess: "drop"}
		l.reading.Samples = append(l.reading.Samples, Sample{Series: s})
	}
	return l
}

// next is the reading after an interval.
func (l *load) next() Reading {
	jitter := time.Duration(l.random.IntN(2e6)) - 1e6
	l.reading.Time, l.reading.Mono = l.reading.Time.Add(10*time.Second+jitter), l.reading.Mono+uint64(10*time.Second+jitter)
	samples := make([]Sample, len(l.reading.Samples))
	for i, s := range l.reading.Samples {
		d := l.step(l.random, i)
		s.Passed, s.Dropped, s.Refused = s.Passed+d.Passed, s.Dropped+d.Dropped, s.Refused+d.Refused
		samples[i] = s
	}
	l.reading.Samples = samples
	return l.reading
}

// randomUse is the worst case: all rules are busy, and nothing can be told from what they did before.
func randomUse(r *rand.Rand, _ int) Counters {
	return Counters{Passed: r.Uint64N(1.25e9), Dropped: r.Uint64N(1.25e9)}
}

// mixedUse is as on a host with subscribers: most are idle, some have a little traffic, few are at their rate.
func mixedUse(r *rand.Rand, i int) Counters {
	switch kind := (i*7919 + r.IntN(20)) % 1000; {
	case kind < 700:
		return Counters{}
	case kind < 930:
		return Counters{Passed: 60 + r.Uint64N(40)*uint64(60+r.IntN(1400))}
	case kind < 980:
		return Counters{Passed: uint64(r.ExpFloat64() * 2e6), Dropped: 1514 * uint64(r.IntN(2)*r.IntN(20))}
	default:
		return Counters{Passed: 62500000 - 1514*r.Uint64N(6), Dropped: 1514 * r.Uint64N(4000)}
	}
}
