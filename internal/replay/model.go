package replay

import (
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Model is the engine in user space. It has a bucket for each bucket key, unless the bucket
// is empty.
type Model struct {
	compiled
	limits  []*model.Limit
	shared  []model.Bucket // by rule, if all its packets share one
	buckets table[model.Bucket]
	era     era
}

// NewModel returns an engine with empty buckets.
func NewModel(l Limits) *Model {
	m := &Model{compiled: compile(l), shared: make([]model.Bucket, len(l.Rules)), buckets: newTable[model.Bucket](), era: newEra(l)}
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
		clear(m.buckets.of)
	}
	p := read(t)
	r := Result{Rule: m.match(p), Limited: p.ip && !p.nd, Time: t.Time, Bytes: t.Bytes}
	if r.Rule == NoRule {
		return r, nil
	}
	rule := &m.Rules[r.Rule]
	r.Bytes = model.Counted(t.Bytes, rule.Framing)
	r.key = m.key(r.Rule, p)
	m.buckets.sweep(func(k bucketKey, b *model.Bucket) bool { return drained(m.limits[k.rule], *b, t.Time) })
	bucket, flow := &m.shared[r.Rule], (*model.Bucket)(nil)
	if rule.Each.Kind != policy.EachAll {
		bucket = m.buckets.get(r.key)
	}
	if rule.Order == policy.SparseFirst {
		flow = m.buckets.get(bucketKey{r.Rule, p.flow})
	}
	o := m.limits[r.Rule].Offer(bucket, flow, false, model.Packet{Time: t.Time, Bytes: r.Bytes, ECT: p.ect})
	r.Verdict, r.Excess, r.Level, r.Wait = o.Verdict, o.Excess, o.Level, o.Departure-t.Time
	return r, nil
}

// Close implements Engine.
func (m *Model) Close() error { return nil }
