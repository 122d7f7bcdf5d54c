package explain

import (
	"math"
	"slices"
	"sort"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A test is how a stage judges a packet by itself.
type test struct {
	conforms   bool // to the bucket
	share      model.ShareVerdict
	guarantees bool // the packet conforms to the guarantee
}

// tests returns how each stage judges a packet by itself. model.Climb asks no stage above one that refuses or guarantees the
// packet.
func tests(stages []model.Stage, p model.Packet) []test {
	tests := make([]test, len(stages))
	stages, load := later(stages, 0), model.Heavy
	for i, s := range stages {
		conforms := s.RateUnits == 0 || s.Conforms(s.State.Level, p.Bytes)
		tests[i] = test{conforms, model.JudgeStage(stages, i, p, &load), s.Guarantees(p)}
	}
	return tests
}

// forecast is model.Climb that leaves clocks and sharers as they are.
func forecast(stages []model.Stage, p model.Packet) model.Passage {
	return model.Climb(later(stages, 0), p)
}

// waits returns the time in ns until a packet conforms to a rule and its pools, if no other packet arrives. A packet that is
// marked as excess does not conform.
func waits(stages []model.Stage, p model.Packet) uint64 {
	p.ECT = false
	return uint64(sort.Search(math.MaxInt64, func(ns int) bool {
		then := p
		then.Time += uint64(ns)
		passage := model.Climb(later(stages, uint64(ns)), then)
		return passage.Refuses == model.NoStage && !passage.Excess
	}))
}

// later returns the stages as they are after a time in ns in which no packet arrives. Clocks of shares advance with the next
// packet.
func later(stages []model.Stage, ns uint64) []model.Stage {
	to := slices.Clone(stages)
	for i := range to {
		s := &to[i]
		s.State.Level = s.Drained(s.State.Level, ns)
		if s.Guarantee != nil {
			s.GuaranteeLevel = s.Guarantee.Drained(s.GuaranteeLevel, ns)
			s.TogetherLevel = s.Guarantee.Drained(s.TogetherLevel, ns)
		}
		s.Others = slices.Clone(s.Others)
		for j := range s.Others {
			s.Others[j] = s.Others[j].After(ns)
		}
		if s.Share != nil {
			share, sharer := *s.Share, *s.Sharer
			s.Share, s.Sharer = &share, &sharer
		}
	}
	return to
}

// until returns the time in ns until a packet (bytes below 2^model.PacketBits) that arrives with a colour would be green, if no
// other packet arrives. It is nil if the packet never will: it is larger than the burst size, or arrives with another colour.
func until(l *model.Coloured, s model.Levels, bytes uint64, in policy.Colour) *uint64 {
	ns := sort.Search(math.MaxInt64, func(ns int) bool {
		colour, _ := l.Decide(model.Levels{First: l.First.Drained(s.First, uint64(ns)), Second: l.Second.Drained(s.Second, uint64(ns))}, bytes, in)
		return colour == policy.Green
	})
	if ns == math.MaxInt64 {
		return nil
	}
	return new(uint64(ns))
}

// room returns how many packets of a size, arriving now one after the other, would be green. Packets of 0 bytes count as one unit.
func room(l *model.Coloured, s model.Levels, bytes uint64) uint64 {
	cost := max(bytes<<model.UnitBits, 1)
	packets := func(level, capacity uint64) uint64 { return (capacity - min(level, capacity)) / cost }
	first := packets(s.First, l.First.Capacity)
	if l.Kind == policy.TRTCM {
		first = min(first, packets(l.E(s), l.Burst()))
	}
	return first
}
