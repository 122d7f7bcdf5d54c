// Package history keeps readings of what rules and pools counted, and tells from them what was delivered.
package history

import "time"

// Counters count bytes since a rule or pool was set. They never decrease, unless it is set anew.
type Counters struct {
	Passed  uint64
	Dropped uint64 // by whatever limit; 0 for a pool
	Refused uint64 // by the pool itself; 0 for a rule
}

func (c Counters) plus(d Counters) Counters {
	return Counters{c.Passed + d.Passed, c.Dropped + d.Dropped, c.Refused + d.Refused}
}

// since is what was counted since earlier. Counters that are lower began anew, so that is all of them.
func (c Counters) since(earlier Counters) (d Counters, anew bool) {
	if c.Passed < earlier.Passed || c.Dropped < earlier.Dropped || c.Refused < earlier.Refused {
		return c, true
	}
	return Counters{c.Passed - earlier.Passed, c.Dropped - earlier.Dropped, c.Refused - earlier.Refused}, false
}

// A Key tells a rule, by its device, direction and network, or a pool from all others, now and later.
type Key struct {
	Device, Direction, Network string
	Pool                       string // "" for a rule
}

// IsPool reports whether the key is of a pool.
func (k Key) IsPool() bool { return k.Pool != "" }

// String is the key as people write it.
func (k Key) String() string {
	if k.IsPool() {
		return "pool " + k.Pool
	}
	return k.Device + " " + k.Direction + " " + k.Network
}

// A Series is a rule or a pool with its parameters. It is never changed once it is part of a Reading.
type Series struct {
	Key
	Name, Plan string // the name of a pool is in the Key
	Within     string // the pool that it draws from; "" for none
	Each       string // bucket scope; "" for one bucket
	Excess     string // what happens to excess packets, with colours to red ones: drop, ecn, pass, delay or dscp:NAME
	Yellow     string // the same for yellow packets; "" without colours
	Rate       uint64 // bits per second, with colours the CIR; 0 for unlimited
	Capacity   uint64 // bytes, with the queue
	Guarantee  uint64 // bits per second; 0 for none
	Aware      bool   // packets come in with colours
	Detached   bool   // it is not in force
	Quota      string // and how much of it is used, in steps of 10 %; "" for none
	Other      string // what refuses packets instead of the rate, or beside it; "" for nothing
}

// A Sample is what a series had counted at one time.
type Sample struct {
	*Series
	Counters
}

// A Reading is all rules and pools at one time.
type Reading struct {
	Time    time.Time // of the wall clock
	Mono    uint64    // ns since boot without sleep: CLOCK_MONOTONIC
	Slept   uint64    // ns that the host slept since boot: CLOCK_BOOTTIME less CLOCK_MONOTONIC
	Samples []Sample

	damaged string // says what of the files since the reading before could not be read; "" for nothing

	boot  string        // the boot that Mono counts from
	every time.Duration // usual time between two readings
}

// Options are what a history is opened with. The zero value of each field stands for the default.
type Options struct {
	Bytes int64  // of all files
	Boot  string // of the host: counters of different boots have nothing to do with each other
}

const (
	DefaultBytes = 200_000_000
	Interval     = 10 * time.Second // between two readings
)
