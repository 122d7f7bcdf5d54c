// Package history keeps what rules and pools passed and refused over time, in memory or in a file, within a fixed size.
package history

import (
	"time"
)

// Counters count bytes since a rule was set. They never decrease, unless it is set anew.
type Counters struct {
	Passed, Dropped uint64 // bytes of the packets that matched
	Refused         uint64 // of a pool: those of the dropped ones that it refused itself
}

// Offered is all that came.
func (c Counters) Offered() uint64 { return c.Passed + c.Dropped }

func (c Counters) columns() [columns]uint64 { return [columns]uint64{c.Passed, c.Dropped, c.Refused} }

func fromColumns(v [columns]uint64) Counters { return Counters{v[0], v[1], v[2]} }

// Since is what was counted since earlier; ok is false where the counters began anew.
func (c Counters) Since(earlier Counters) (d Counters, ok bool) {
	if c.Passed < earlier.Passed || c.Dropped < earlier.Dropped || c.Refused < earlier.Refused {
		return Counters{}, false
	}
	return Counters{c.Passed - earlier.Passed, c.Dropped - earlier.Dropped, c.Refused - earlier.Refused}, true
}

// columns is the number of counters.
const columns = 3

// A Series is a rule or a pool, and its parameters at one time.
type Series struct {
	Key
	Name, Plan string // of a pool, its name is in the Key
	Within     string // the pool that it draws from; "" for none
	Each       string // who has the rate; "" for all together
	Excess     string // what becomes of excess packets, for people
	Coloured   bool   // packets get colours: more than the rate may pass
	Aware      bool   // and come in with them: only green ones have the rate
	Rate       uint64 // bits per second; 0 for unlimited
	Capacity   uint64 // bytes
	Guarantee  uint64 // bits per second; 0 for none
	PoolRate   uint64 // bits per second: the least of the pools above; 0 for unlimited
	Detached   bool   // it is not in force
}

// A Key names a rule by device, direction and network, or a pool.
type Key struct {
	Device, Direction, Network string
	Pool                       string // "" for a rule
}

// String is the key as people write it.
func (k Key) String() string {
	if k.Pool != "" {
		return "pool " + k.Pool
	}
	return k.Device + " " + k.Direction + " " + k.Network
}

// A Sample is what a series had counted at one time.
type Sample struct {
	Series
	Counters
}

// A Reading is all rules and pools at one time.
type Reading struct {
	Time    time.Time // of the wall clock
	Mono    uint64    // ns of a clock that nobody sets
	Policy  string    // hash of the rules in force; "" if it is not known
	Samples []Sample
}

// An Interval is the time between two readings of a series.
type Interval struct {
	Begin, End time.Time     // if the wall clock was set meanwhile, both are by the new time
	Length     time.Duration // by the clock that nobody sets
	Usual      time.Duration // length of an interval
	Series     *Series       // as it was at the end
	Counters                 // what was counted
	Policy     string        // hash of the rules at the end
	// By which part the counters of passed and of other bytes may be too large or too small, as they were rounded. Sums over
	// ten minutes are exact.
	PassedError, DroppedError float64
	// Loose is whether the query has only a part of these ten minutes, so that its sum is not exact.
	Loose bool
	Known bool // the counters are known
	// Gap says why this is more than one interval, or why nothing is known of it.
	Gap Gap
	// ClockStep is by how much the wall clock was set, or stood still while the machine slept.
	ClockStep time.Duration
}

// A Gap is a reason for missing data.
type Gap string

// Gaps.
const (
	NoGap     Gap = ""
	NoReading Gap = "no readings"        // nobody read the counters; what they counted meanwhile is known
	Restarted Gap = "counters restarted" // the rule was set anew, or the machine was started: what was counted is not known
	Absent    Gap = "no such rule"       // others were read meanwhile
)

// Limits bound a history.
type Limits struct {
	Bytes    int64         // of memory, or of the file
	Keep     time.Duration // how much recorded time to keep, if there is room
	Interval time.Duration // between readings; others in between are ignored
	Boot     string        // of the machine: readings of different ones have nothing to do with each other
}

// Defaults.
const (
	DefaultBytes    = 200_000_000
	DefaultKeep     = 32 * 24 * time.Hour // a month, with a day to look back
	DefaultInterval = 10 * time.Second
	fullDay         = 24 * time.Hour // what is to fit into Bytes: values are rounded for it
	chunkReadings   = 60             // readings of a chunk
)
