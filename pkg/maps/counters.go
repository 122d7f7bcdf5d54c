package maps

import "sync/atomic"

// Counters of one rule, summed over CPUs, since it was set. Passed and dropped
// together are all that matched; excess did not conform, whatever became of it.
type Counters struct {
	PassedPackets, PassedBytes   uint64
	ExcessPackets, ExcessBytes   uint64
	DroppedPackets, DroppedBytes uint64
	MarkedPackets                uint64
	UnsurePackets                uint64
}

// Counters are those of the rule with that id.
func (s *Set) Counters(id uint32) (sum Counters) {
	for i := range s.countersOf(id) {
		c := &s.countersOf(id)[i]
		sum.PassedPackets += atomic.LoadUint64(&c.PassedPackets)
		sum.PassedBytes += atomic.LoadUint64(&c.PassedBytes)
		sum.DroppedPackets += atomic.LoadUint64(&c.DroppedPackets)
		sum.DroppedBytes += atomic.LoadUint64(&c.DroppedBytes)
		sum.ExcessPackets += atomic.LoadUint64(&c.SparedPackets)
		sum.ExcessBytes += atomic.LoadUint64(&c.SparedBytes)
		sum.MarkedPackets += atomic.LoadUint64(&c.MarkedPackets)
		sum.UnsurePackets += atomic.LoadUint64(&c.UnsurePackets)
	}
	sum.ExcessPackets += sum.DroppedPackets
	sum.ExcessBytes += sum.DroppedBytes
	return sum
}
