package replay

import (
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Model is the engine that needs no kernel: the model's verdicts, and a bucket for
// each bucket key that is not empty.
type Model struct {
	compiled
	limits  []*model.Limit
	shared  []model.Bucket // of rules with one for all packets
	buckets map[bucketKey]*model.Bucket
	sweepAt int
	era     era
}

// NewModel makes an engine with empty buckets.
func NewModel(l Limits) *Model {
	m := &Model{compiled: compile(l), shared: make([]model.Bucket, len(l.Rules)), buckets: map[bucketKey]*model.Bucket{}, sweepAt: firstSweep, era: newEra(l)}
	for _, r := range l.Rules {
		m.limits = append(m.limits, model.NewLimit(r))
	}
	return m
}

// Offer implements Engine.
func (m *Model) Offer(t *trace.Packet) (Result, error) {
	another, err := m.era.next(t.Time)
	if err != nil {
		return Result{}, err
	}
	if another {
		clear(m.shared)
		clear(m.buckets)
	}
	p := read(t)
	r := Result{Rule: m.match(p), Limited: p.ip && !p.nd, Time: t.Time, Bytes: t.Bytes}
	if r.Rule == NoRule {
		return r, nil
	}
	rule := &m.Rules[r.Rule]
	r.Bytes = model.Counted(t.Bytes, rule.Framing)
	r.key = m.key(r.Rule, p)
	if len(m.buckets) >= m.sweepAt {
		m.sweep(t.Time)
	}
	bucket, flow := &m.shared[r.Rule], (*model.Bucket)(nil)
	if rule.Each.Kind != policy.EachAll {
		bucket = m.slot(r.key)
	}
	if rule.Order == policy.SparseFirst {
		flow = m.slot(flowOf(r.Rule, p))
	}
	o := m.limits[r.Rule].Offer(bucket, flow, false, model.Packet{Time: t.Time, Bytes: r.Bytes, ECT: p.ect})
	r.Verdict, r.Excess, r.Level, r.Wait = o.Verdict, o.Excess, o.Level, o.Departure-t.Time
	return r, nil
}

func (m *Model) slot(k bucketKey) *model.Bucket {
	b := m.buckets[k]
	if b == nil {
		b = &model.Bucket{}
		m.buckets[k] = b
	}
	return b
}

const (
	firstSweep = 1 << 16
	// slack is how far a trace may step back in time and find buckets as they were.
	slack = uint64(100 * time.Millisecond)
)

// sweep forgets empty buckets, which are as new ones. It comes when
// there are twice as many as the last sweep kept, so it costs each packet little.
func (m *Model) sweep(now uint64) {
	for key, b := range m.buckets {
		if drained(m.limits[key.rule], *b, now) {
			delete(m.buckets, key)
		}
	}
	m.sweepAt = max(firstSweep, 2*len(m.buckets))
}

func drained(l *model.Limit, b model.Bucket, now uint64) bool {
	return l.Level(b, now-min(now, slack)) == 0
}

// Close implements Engine.
func (m *Model) Close() error { return nil }
