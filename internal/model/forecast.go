package model

import (
	"math"
	"slices"
	"sort"
)

// A Test is how a stage judges a packet by itself.
type Test struct {
	Conforms   bool // to the bucket
	Share      ShareVerdict
	Guarantees bool // the packet conforms to the guarantee
}

// Tests returns how each stage judges a packet by itself. Climb asks no stage above one that refuses or guarantees
// the packet.
func Tests(stages []Stage, p Packet) []Test {
	tests := make([]Test, len(stages))
	stages, load := after(stages, 0), Heavy
	for i, s := range stages {
		conforms := s.RateUnits == 0 || s.Conforms(s.State.Level, p.Bytes)
		tests[i] = Test{conforms, judge(stages, i, p, &load), s.guarantees(p)}
	}
	return tests
}

// Forecast is Climb that leaves clocks and sharers as they are.
func Forecast(stages []Stage, p Packet) Passage { return Climb(after(stages, 0), p) }

// Until returns the time in ns until a packet conforms to a rule and its pools, if no other packet arrives. A
// packet that is marked as excess does not conform.
func Until(stages []Stage, p Packet) uint64 {
	p.ECT = false
	longest := uint64(restNS + 1)
	for i := range stages {
		if s := &stages[i]; s.RateUnits != 0 {
			longest = max(longest, s.drain(s.State.Level))
		}
	}
	return uint64(sort.Search(int(min(longest, math.MaxInt64)), func(ns int) bool {
		later := p
		later.Time += uint64(ns)
		passage := Climb(after(stages, uint64(ns)), later)
		return passage.Refuses == NoStage && !passage.Excess
	}))
}

// after returns the stages as they are after a time in ns in which no packet arrives. Clocks of shares advance with
// the next packet.
func after(stages []Stage, ns uint64) []Stage {
	later := slices.Clone(stages)
	for i := range later {
		s := &later[i]
		s.State.Level = s.drained(s.State.Level, ns)
		if s.Guarantee != nil {
			s.GuaranteeLevel = s.Guarantee.drained(s.GuaranteeLevel, ns)
			s.TogetherLevel = s.Guarantee.drained(s.TogetherLevel, ns)
		}
		if s.Share != nil {
			share, sharer := *s.Share, *s.Sharer
			s.Share, s.Sharer = &share, &sharer
		}
	}
	return later
}

// drained returns a level after a time in ns.
func (m Meter) drained(level, ns uint64) uint64 {
	if ns >= m.drain(level) {
		return 0
	}
	return level - min(level, m.leak(ns))
}
