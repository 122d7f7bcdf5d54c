package policy

import "time"

// DefaultCapacity is the capacity in bytes of a rule that does not say one.
func DefaultCapacity(r Rate) uint64 {
	return max(128<<10, bytesIn(100*time.Millisecond, r))
}
