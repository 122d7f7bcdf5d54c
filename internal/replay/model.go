package replay

import (
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Model is the engine that needs no kernel: the model's arithmetic, and a bucket
// for whoever owes something.
type Model struct {
	compiled
	meters  []model.Meter
	own     []model.Bucket // of rules with one for all
	buckets map[sharer]*model.Bucket
	sweepAt int
	era     era
}

// NewModel makes an engine with empty buckets.
func NewModel(l Limits) *Model {
	m := &Model{compiled: compile(l), own: make([]model.Bucket, len(l.Rules)), buckets: map[sharer]*model.Bucket{}, sweepAt: firstSweep, era: newEra(l)}
	for _, r := range l.Rules {
		meter := model.Meter{}
		if r.Rate != policy.Unlimited {
			meter = maps.Meter(r)
		}
		m.meters = append(m.meters, meter)
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
		clear(m.own)
		clear(m.buckets)
	}
	p := read(t)
	r := Result{Rule: m.match(p), Limited: p.ip && !p.nd, Time: t.Time, Bytes: t.Bytes}
	if r.Rule == NoRule {
		return r, nil
	}
	rule := &m.Rules[r.Rule]
	r.Bytes = counted(rule.Framing, t.Bytes)
	r.sharer = m.sharer(r.Rule, p)
	if rule.Rate == policy.Unlimited {
		return r, nil
	}
	bucket, meter := m.bucket(r.sharer, t.Time), &m.meters[r.Rule]
	found := meter.Level(*bucket, t.Time)
	switch meter.Offer(bucket, t.Time, r.Bytes, rule.Excess == policy.ECN && p.ect) {
	case model.Pass:
		if rule.Excess == policy.Delay && !m.ahead(r, p, meter.Before(found, r.Bytes)) {
			r.hold(meter.Held(found, r.Bytes), rule, p.ect)
		}
	case model.Mark:
		r.Verdict, r.Excess = Mark, true
	case model.Excess:
		r.Excess = true
		if rule.Excess != policy.Pass {
			r.Verdict = Drop
		}
	}
	r.Level = meter.Level(*bucket, t.Time)
	return r, nil
}

// ahead reports whether a packet goes ahead of so many units that are to leave before it.
func (m *Model) ahead(r Result, p packet, before uint64) bool {
	if before == 0 || m.Rules[r.Rule].Order != policy.SparseFirst {
		return false
	}
	return m.meters[r.Rule].Ahead(m.slot(flowOf(r.Rule, p), r.Time), r.Time, r.Bytes, before, false)
}

// hold holds a packet that conforms back for so many ns.
func (r *Result) hold(ns uint64, rule *policy.Rule, ect bool) {
	if ns == 0 {
		return
	}
	r.Held, r.Verdict = ns, Delay
	if ect && ns > uint64(rule.ECNAbove) {
		r.Verdict = Mark
	}
}

func (m *Model) bucket(s sharer, now uint64) *model.Bucket {
	if m.Rules[s.rule].Each.Kind == policy.EachAll {
		return &m.own[s.rule]
	}
	return m.slot(s, now)
}

func (m *Model) slot(s sharer, now uint64) *model.Bucket {
	b := m.buckets[s]
	if b == nil {
		if len(m.buckets) >= m.sweepAt {
			m.sweep(now)
		}
		b = &model.Bucket{}
		m.buckets[s] = b
	}
	return b
}

const (
	firstSweep = 1 << 16
	// slack is how far a trace may step back in time and find buckets as they were.
	slack = uint64(100 * time.Millisecond)
)

// sweep forgets buckets that have drained: they are as new ones. It comes when
// there are twice as many as the last one left, so it costs each packet little.
func (m *Model) sweep(now uint64) {
	for s, b := range m.buckets {
		if drained(m.meters[s.rule], *b, now) {
			delete(m.buckets, s)
		}
	}
	m.sweepAt = max(firstSweep, 2*len(m.buckets))
}

func drained(m model.Meter, b model.Bucket, now uint64) bool {
	return m.Level(b, now-min(now, slack)) == 0
}

// Close implements Engine.
func (m *Model) Close() error { return nil }
