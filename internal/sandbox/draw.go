package sandbox

import (
	"slices"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/replay"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// defaultDrawn packets are more than a picture can tell apart.
	defaultDrawn = 1200
	bins         = 100
)

// A Drawing is what a picture of a run needs. Times are on the clock of the load.
type Drawing struct {
	FromNS     uint64  `json:"from_ns"`
	UntilNS    uint64  `json:"until_ns"`    // the last departure
	BurstBytes uint64  `json:"burst_bytes"` // up to this level packets are not queued; 0 if all are
	FullBytes  uint64  `json:"full_bytes"`  // burst and queue
	Packets    Columns `json:"packets"`
	Levels     []Level `json:"levels"` // of each bucket
	Bins       Bins    `json:"bins"`
}

// Columns are packets, in the order of the load. If they are not all, each part of the load keeps its extremes.
type Columns struct {
	TimeNS      []uint64  `json:"time_ns"`
	Bytes       []uint64  `json:"bytes"`
	Sender      []int     `json:"sender"`
	Verdict     []string  `json:"verdict"`
	Conforms    []bool    `json:"conforms"`
	DepartNS    []*uint64 `json:"depart_ns"` // null if dropped
	WaitNS      []uint64  `json:"wait_ns"`
	BeforeBytes []uint64  `json:"level_before_bytes"`
	AfterBytes  []uint64  `json:"level_bytes"`
}

// A Level is the level of a bucket as a line.
type Level struct {
	Bucket int      `json:"bucket"` // the first sender of its packets
	TimeNS []uint64 `json:"time_ns"`
	Bytes  []uint64 `json:"level_bytes"`
}

// Bins are bytes in equal parts of the time. Packets pass when they depart.
type Bins struct {
	WidthNS      uint64   `json:"width_ns"`
	OfferedBytes []uint64 `json:"offered_bytes"`
	PassedBytes  []uint64 `json:"passed_bytes"`
	DroppedBytes []uint64 `json:"dropped_bytes"`
}

// A met is a packet that met the limit.
type met struct {
	replay.Result
	sender int
	before uint64 // units: the level of its bucket
}

type drawer struct {
	limit   *model.Limit
	rule    policy.Rule
	from    uint64         // ns: the begin of the load, or later than its first packet
	buckets []model.Bucket // as in the engine
	all     []met
}

func newDrawer(rule policy.Rule, from uint64, senders int) *drawer {
	return &drawer{limit: model.NewLimit(rule), rule: rule, from: from, buckets: make([]model.Bucket, senders)}
}

// bucket numbers the buckets by their first sender.
func (d *drawer) bucket(sender int) int {
	if d.rule.Each.Kind == policy.EachAll {
		return 0
	}
	return sender
}

func (d *drawer) add(sender int, r replay.Result) {
	b := &d.buckets[d.bucket(sender)]
	d.all = append(d.all, met{r, sender, d.limit.Level(*b, r.Time)})
	*b = d.limit.WithLevel(r.Level, r.Time)
}

// drawing returns the drawing of at most that many packets, and whether some are missing.
func (d *drawer) drawing(most int) (w Drawing, thinned bool) {
	w.FullBytes, w.BurstBytes = d.limit.Capacity>>model.UnitBits, d.limit.Burst>>model.UnitBits
	if d.rule.Excess != policy.Delay {
		w.BurstBytes = w.FullBytes
	}
	if w.FromNS = d.from; len(d.all) > 0 {
		w.FromNS, w.UntilNS = min(d.from, d.all[0].Time), d.all[0].Time
	}
	byBucket, every := make([][]int, len(d.buckets)), make([]int, len(d.all))
	for i, m := range d.all {
		every[i] = i
		w.FromNS, w.UntilNS = min(w.FromNS, m.Time), max(w.UntilNS, m.Time)
		if !dropped(m.Result) {
			w.UntilNS = max(w.UntilNS, m.Departure())
		}
		bucket := d.bucket(m.sender)
		byBucket[bucket] = append(byBucket[bucket], i)
	}
	w.Bins = d.bins(w.FromNS, w.UntilNS)
	w.Levels = []Level{}
	for bucket, packets := range byBucket {
		if len(packets) > 0 {
			level := d.level(packets, most/len(byBucket), w.UntilNS)
			level.Bucket = bucket
			w.Levels = append(w.Levels, level)
		}
	}
	drawn := d.thin(every, most)
	w.Packets = d.columns(drawn)
	return w, len(drawn) < len(d.all)
}

// thin returns at most that many packets, in groups of which each keeps its lowest and highest level, its
// longest wait and its first packet that is dropped or marked.
func (d *drawer) thin(packets []int, most int) []int {
	const kept = 4
	if len(packets) <= most {
		return packets
	}
	groups := max(most/kept, 1)
	var few []int
	for g := range groups {
		group := packets[len(packets)*g/groups : len(packets)*(g+1)/groups]
		low, high, wait, first := group[0], group[0], group[0], -1
		for _, i := range group {
			m := &d.all[i]
			if m.before < d.all[low].before {
				low = i
			}
			if m.Level > d.all[high].Level {
				high = i
			}
			if m.Wait > d.all[wait].Wait {
				wait = i
			}
			if first < 0 && (m.Excess || m.Verdict == model.Mark) {
				first = i
			}
		}
		keep := []int{low, high, wait}
		if first >= 0 {
			keep = append(keep, first)
		}
		slices.Sort(keep)
		few = append(few, slices.Compact(keep)...)
	}
	return few[:min(len(few), most)]
}

func (d *drawer) columns(drawn []int) (c Columns) {
	n := len(drawn)
	c = Columns{
		TimeNS: make([]uint64, n), Bytes: make([]uint64, n), Sender: make([]int, n), Verdict: make([]string, n), Conforms: make([]bool, n),
		DepartNS: make([]*uint64, n), WaitNS: make([]uint64, n), BeforeBytes: make([]uint64, n), AfterBytes: make([]uint64, n),
	}
	for at, i := range drawn {
		m := &d.all[i]
		c.TimeNS[at], c.Bytes[at], c.Sender[at], c.Verdict[at], c.Conforms[at] = m.Time, m.Bytes, m.sender, m.Verdict.String(), !m.Excess
		c.WaitNS[at], c.BeforeBytes[at], c.AfterBytes[at] = m.Wait, model.Bytes(m.before), m.LevelBytes()
		if !dropped(m.Result) {
			departs := m.Departure()
			c.DepartNS[at] = &departs
		}
	}
	return c
}

// level draws the level of a bucket from its packets: it rises with each, falls at the rate, and stays at 0.
func (d *drawer) level(packets []int, most int, until uint64) (line Level) {
	add := func(at, units uint64) {
		line.TimeNS, line.Bytes = append(line.TimeNS, at), append(line.Bytes, model.Bytes(units))
	}
	before := -1 // the packet before in the bucket, if it is drawn
	drawn := d.thin(packets, most)
	for n, next := 0, 0; n < len(packets); n++ {
		if next == len(drawn) || packets[n] != drawn[next] {
			before = -1
			continue
		}
		next++
		m := &d.all[packets[n]]
		if before >= 0 && m.before == 0 {
			if last := &d.all[before]; last.Level > 0 {
				add(min(d.empty(last), max(m.Time, last.Time)), 0)
			}
		}
		add(m.Time, m.before)
		add(m.Time, m.Level)
		before = packets[n]
	}
	last := &d.all[packets[len(packets)-1]]
	if empty := d.empty(last); empty < until {
		add(empty, 0)
	}
	add(until, d.limit.Level(d.buckets[d.bucket(last.sender)], until))
	return line
}

// empty returns when the bucket of a packet is empty, if no other packet arrives.
func (d *drawer) empty(m *met) uint64 {
	const fraction = 1 << 32 // of the rate
	return m.Time + uint64(float64(m.Level)*fraction/float64(d.limit.RateUnits))
}

// bins returns what was offered and passed over the time.
func (d *drawer) bins(from, until uint64) Bins {
	b := Bins{
		WidthNS:      (until-from)/bins + 1,
		OfferedBytes: make([]uint64, bins), PassedBytes: make([]uint64, bins), DroppedBytes: make([]uint64, bins),
	}
	for _, m := range d.all {
		arrived := (m.Time - from) / b.WidthNS
		b.OfferedBytes[arrived] += m.Bytes
		if dropped(m.Result) {
			b.DroppedBytes[arrived] += m.Bytes
		} else {
			b.PassedBytes[(m.Departure()-from)/b.WidthNS] += m.Bytes
		}
	}
	return b
}
