package maps

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
)

// Counters of one rule, summed over CPUs, since it was set: passed and dropped
// together are all that matched; excess did not conform, whatever became of it.
type Counters = bpf.AbiCounters

// Counters reads those of the rule with that id.
func (s *Set) Counters(id uint32) (Counters, error) {
	var cpus []Counters
	if err := s.maps[bpf.GcraMapCounters].Lookup(id, &cpus); err != nil {
		return Counters{}, fmt.Errorf("read the counters: %w", err)
	}
	var sum Counters
	for _, c := range cpus {
		sum.PassedPackets += c.PassedPackets
		sum.PassedBytes += c.PassedBytes
		sum.ExcessPackets += c.ExcessPackets
		sum.ExcessBytes += c.ExcessBytes
		sum.DroppedPackets += c.DroppedPackets
		sum.DroppedBytes += c.DroppedBytes
		sum.MarkedPackets += c.MarkedPackets
		sum.UnsurePackets += c.UnsurePackets
	}
	return sum, nil
}

func (s *Set) resetCounters(id uint32) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return fmt.Errorf("count the CPUs: %w", err)
	}
	if err := s.maps[bpf.GcraMapCounters].Update(id, make([]Counters, cpus), ebpf.UpdateAny); err != nil {
		return fmt.Errorf("reset the counters: %w", err)
	}
	return nil
}
