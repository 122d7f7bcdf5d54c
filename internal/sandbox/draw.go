package sandbox

import (
	"math"
	"slices"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/replay"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// defaultDrawn packets are more than a picture can tell apart.
	defaultDrawn = 1200
	bins         = 500
)

// A Drawing is what a picture of a run needs. Times are on the clock of the load.
type Drawing struct {
	FromNS     uint64  `json:"from_ns"`
	UntilNS    uint64  `json:"until_ns"`    // somewhat after the last packet of all limits
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

// Bins are all packets, in equal parts of the time. Packets pass when they depart.
type Bins struct {
	WidthNS        uint64   `json:"width_ns"`
	OfferedBytes   []uint64 `json:"offered_bytes"`
	PassedBytes    []uint64 `json:"passed_bytes"`
	OfferedPackets []uint64 `json:"offered_packets"`
	PassedPackets  []uint64 `json:"passed_packets"`
	DroppedPackets []uint64 `json:"dropped_packets"`
}

// A met is a packet that met the limit.
type met struct {
	time, bytes, wait uint64
	before, after     uint64 // units: the level of its bucket
	sender            int
	verdict           model.Verdict
	excess            bool
}

func (m *met) dropped() bool     { return m.verdict == model.Drop }
func (m *met) departure() uint64 { return m.time + m.wait }

type drawer struct {
	limit   *model.Limit
	rule    policy.Rule
	from    uint64         // ns: the begin of the load, or later than its first packet
	buckets []model.Bucket // as in the engine
	all     []met
}

func newDrawer(rule policy.Rule, from uint64, senders int) *drawer {
	return &drawer{limit: model.NewLimit(rule), rule: rule, from: from, buckets: make([]model.Bucket, senders), all: make([]met, 0, 1024)}
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
	d.all = append(d.all, met{r.Time, r.Bytes, r.Wait, d.limit.Level(*b, r.Time), r.Level, sender, r.Verdict, r.Excess})
	*b = d.limit.WithLevel(r.Level, r.Time)
}

// span returns the time of the first packet, or the begin of the load, and a time somewhat after the last one, so that
// a picture shows how the buckets go on.
func (d *drawer) span() (from, until uint64) {
	from, last := d.from, uint64(0)
	for i := range d.all {
		m := &d.all[i]
		from, last = min(from, m.time), max(last, m.time, m.departure())
	}
	room := (last - from) / 20
	if last <= from {
		from, room = min(from, last), math.MaxUint64-last
	}
	until = last
	for i := range d.all {
		if empty := d.empty(&d.all[i]); empty > until {
			until = min(empty, last+room)
		}
	}
	return from, until
}

// drawing returns the drawing of at most that many packets, and whether some are missing.
func (d *drawer) drawing(from, until uint64, most int) (w Drawing, thinned bool) {
	w.FromNS, w.UntilNS, w.Levels = from, until, []Level{}
	w.FullBytes, w.BurstBytes = d.limit.Capacity>>model.UnitBits, d.limit.Burst>>model.UnitBits
	if d.rule.Excess != policy.Delay {
		w.BurstBytes = w.FullBytes
	}
	byBucket, every := make([][]int, len(d.buckets)), make([]int, len(d.all))
	for i := range d.all {
		m := &d.all[i]
		every[i] = i
		bucket := d.bucket(m.sender)
		byBucket[bucket] = append(byBucket[bucket], i)
	}
	for bucket, packets := range byBucket {
		if len(packets) > 0 {
			level := d.level(packets, most/len(byBucket), until)
			level.Bucket = bucket
			w.Levels = append(w.Levels, level)
		}
	}
	w.Bins = d.bins(from, until)
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
			if m.after > d.all[high].after {
				high = i
			}
			if m.wait > d.all[wait].wait {
				wait = i
			}
			if first < 0 && (m.excess || m.verdict == model.Mark) {
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
		c.TimeNS[at], c.Bytes[at], c.Sender[at], c.Verdict[at], c.Conforms[at] = m.time, m.bytes, m.sender, m.verdict.String(), !m.excess
		c.WaitNS[at], c.BeforeBytes[at], c.AfterBytes[at] = m.wait, model.Bytes(m.before), model.Bytes(m.after)
		if !m.dropped() {
			departs := m.departure()
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
			if last := &d.all[before]; last.after > 0 {
				add(min(d.empty(last), max(m.time, last.time)), 0)
			}
		}
		add(m.time, m.before)
		add(m.time, m.after)
		before = packets[n]
	}
	last := &d.all[packets[len(packets)-1]]
	if empty := d.empty(last); empty < until {
		add(empty, 0)
	}
	add(until, d.limit.Level(d.buckets[d.bucket(last.sender)], until))
	return line
}

// empty returns a time when the bucket of a packet has just become empty, if no other packet arrives.
func (d *drawer) empty(m *met) uint64 {
	const fraction = 1 << 32 // of the rate
	return m.time + uint64(math.Ceil(float64(m.after)*fraction/float64(d.limit.RateUnits)))
}

// bins returns what was offered, passed and dropped over the time.
func (d *drawer) bins(from, until uint64) Bins {
	counts := func() []uint64 { return make([]uint64, bins) }
	b := Bins{(until-from)/bins + 1, counts(), counts(), counts(), counts(), counts()}
	for i := range d.all {
		m := &d.all[i]
		arrived := (m.time - from) / b.WidthNS
		b.OfferedBytes[arrived] += m.bytes
		b.OfferedPackets[arrived]++
		if m.dropped() {
			b.DroppedPackets[arrived]++
			continue
		}
		departed := (m.departure() - from) / b.WidthNS
		b.PassedBytes[departed] += m.bytes
		b.PassedPackets[departed]++
	}
	return b
}
