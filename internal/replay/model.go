package replay

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Model is the engine in user space. It has a bucket for each bucket key, unless the bucket
// is empty.
type Model struct {
	compiled
	stages     []*stage // rules, then pools
	buckets    table[model.Bucket]
	guarantees table[model.Bucket]
	pairs      table[model.Pair] // of rules with colours

	// Of a packet: its rule and the pools above.
	climbed []*stage
	states  []model.Stage
}

// A stage is a rule or pool.
type stage struct {
	rule      policy.Rule
	limit     *model.Limit
	guarantee *model.Limit // nil for none
	together  model.Bucket // of all keys of the guarantee
	share     *model.Share // nil for none
	sharers   table[model.Sharer]
	shared    model.Bucket    // if all its packets share one
	coloured  *model.Coloured // nil without colours
	others    []model.Other
	used      []table[model.Bucket] // of others
	seen      table[uint64]         // ns: until then packets of a flow begin none
	zone      *time.Location        // of the quota
	pair      model.Pair            // if all its packets share one
	fifo      uint64                // ns: until then sparse flows are queued, too

	// Of a packet.
	bucket, guaranteed, flow *model.Bucket
}

func newStage(r policy.Rule) *stage {
	s := &stage{rule: r, limit: model.NewLimit(r)}
	s.bucket = &s.shared
	if guaranteed, ok := r.Guaranteed(); ok {
		s.guarantee = model.NewLimit(guaranteed)
	}
	if r.Share.Kind != policy.ShareNone {
		s.share = &model.Share{ShareParams: s.limit.ShareParams(), ByMember: r.Share.Kind == policy.ShareMember, Last: model.NotYet}
		s.sharers = newTable[model.Sharer]()
	}
	for _, o := range model.NewOthers(r) {
		s.others, s.used = append(s.others, o), append(s.used, newTable[model.Bucket]())
	}
	s.seen = newTable[uint64]()
	if q := r.Also.Quota; q.Bytes != 0 && q.Period.Rolling() == 0 {
		s.zone, _ = r.Also.Zone.Location() // the rule was validated
	}
	if r.Algorithm.HasColours() {
		s.coloured = model.NewColoured(r)
	}
	return s
}

// NewModel returns an engine with empty buckets.
func NewModel(l Limits) *Model {
	m := &Model{compiled: compile(l), buckets: newTable[model.Bucket](), guarantees: newTable[model.Bucket](), pairs: newTable[model.Pair]()}
	for _, r := range m.rules {
		m.stages = append(m.stages, newStage(r))
	}
	return m
}

// Offer implements Engine.
func (m *Model) Offer(t *trace.Packet) (Result, error) {
	p := read(t)
	r := Result{Rule: m.match(p), Limited: p.ip && !p.nd, Time: t.Time, Bytes: t.Bytes}
	if r.Rule == NoRule {
		return r, nil
	}
	s := m.stages[r.Rule]
	r.Bytes = model.Counted(t.Bytes, s.rule.Framing)
	r.key, r.sharer = m.key(r.Rule, p), m.sharer(r.Rule, p)
	if s.coloured != nil {
		m.colour(&r, p)
		return r, nil
	}
	m.buckets.sweep(func(k bucketKey, b *model.Bucket) bool { return drained(m.stages[k.rule].limit, *b, t.Time) })
	if s.rule.Each.Kind != policy.EachAll {
		s.bucket = m.buckets.get(r.key)
	}
	offered := model.Packet{Time: t.Time, Bytes: r.Bytes, ECT: p.ect}
	if s.rule.Within != "" || s.share != nil || s.others != nil {
		m.climb(&r, p, offered)
		return r, nil
	}
	o := s.limit.Offer(s.bucket, m.flow(r.Rule, p), r.Time < s.fifo, offered)
	r.Verdict, r.Excess, r.Level, r.Wait = o.Verdict, o.Excess, o.Level, o.Departure-t.Time
	if r.Verdict == model.Drop {
		r.RefusedBy = m.names[r.Rule]
	}
	return r, nil
}

// colour offers a packet to its rule, which has colours.
func (m *Model) colour(r *Result, p packet) {
	m.pairs.sweep(func(k bucketKey, pair *model.Pair) bool {
		return m.stages[k.rule].coloured.Levels(*pair, r.Time-min(r.Time, slack)) == model.Levels{}
	})
	s := m.stages[r.Rule]
	pair, c := &s.pair, &s.rule.Colours
	if s.rule.Each.Kind != policy.EachAll {
		pair = m.pairs.get(r.key)
	}
	r.Colour = s.coloured.Offer(pair, r.Time, r.Bytes, c.In.Of(p.dscp))
	levels := s.coloured.Levels(*pair, r.Time)
	r.Level, r.Second = levels.First, s.coloured.E(levels)
	r.Excess, r.DSCP = r.Colour != policy.Green, p.dscp
	switch action := c.Action(r.Colour); {
	case action == policy.ActionDrop, action == policy.ActionECN && !p.ect:
		r.Verdict, r.DSCP, r.RefusedBy = model.Drop, 0, m.names[r.Rule]
	case action == policy.ActionECN:
		r.Verdict = model.Mark
	case action < policy.ActionPass:
		r.DSCP = uint8(action - policy.SetDSCP(0))
	}
}

// flow is the bucket of a packet's flow in a rule or pool; nil unless sparse flows go first there.
func (m *Model) flow(number int, p packet) *model.Bucket {
	if m.stages[number].rule.Order != policy.SparseFirst {
		return nil
	}
	return m.buckets.get(bucketKey{number, p.flow})
}

// climb offers a packet to its rule and the pools above.
func (m *Model) climb(r *Result, p packet, offered model.Packet) {
	m.guarantees.sweep(func(k bucketKey, b *model.Bucket) bool { return drained(m.stages[k.rule].guarantee, *b, r.Time) })
	m.climbed, m.states = m.climbed[:0], m.states[:0]
	chain, weight, keys := m.chains[r.Rule], uint64(1), []bucketKey(nil)
	for i, number := range chain {
		s, key := m.stages[number], bucketKey{rule: number}
		if i == 0 {
			key = r.key
		}
		at := model.Stage{Limit: s.limit, Guarantee: s.guarantee, Share: s.share, Weight: weight}
		if s.rule.Rate != policy.Unlimited {
			at.State = model.State{Level: s.limit.Level(*s.bucket, r.Time), FIFO: r.Time < s.fifo, Departs: s.bucket.Departs}
		}
		if s.flow = m.flow(number, p); s.flow != nil {
			at.State.Flow = s.limit.Level(*s.flow, r.Time)
		}
		if s.guarantee != nil {
			s.guaranteed = m.guarantees.get(key)
			at.GuaranteeLevel = s.guarantee.Level(*s.guaranteed, r.Time)
			if s.rule.Each.Kind != policy.EachAll {
				at.Members, at.TogetherLevel = uint64(s.rule.Members), s.guarantee.Level(s.together, r.Time)
			}
		}
		at.Others = s.othersFor(key, p, r.Time)
		if s.share != nil {
			who := bucketKey{number, m.sharer(number, p)}
			if s.rule.Share.Kind == policy.ShareMember {
				who = bucketKey{rule: chain[i-1]}
			}
			s.sharers.sweep(func(_ bucketKey, b *model.Sharer) bool { // those whose weight is in no bin any more
				return int64(b.TAT-s.share.V) < -1<<s.share.CoarseShift
			})
			at.Sharer = s.sharers.get(who)
		}
		m.climbed, m.states, keys = append(m.climbed, s), append(m.states, at), append(keys, key)
		weight = uint64(s.rule.Weight.Value())
	}
	to := model.Climb(m.states, offered)
	for i, s := range m.climbed {
		at := &m.states[i]
		charged := to.Refuses == model.NoStage && (i > 0 || !to.Excess)
		if s.rule.Rate != policy.Unlimited && (charged || to.At[i].Level != at.State.Level) { // or marked, or a penalty
			s.limit.Raise(s.bucket, to.At[i].Level, r.Time)
			s.bucket.Departs = to.At[i].Departs
		}
		if s.flow != nil && to.At[i].Flow != at.State.Flow {
			s.limit.Raise(s.flow, to.At[i].Flow, r.Time)
		}
		if charged || i == 0 && to.At[0].Verdict == model.Mark {
			at.Charged(offered, func(j int, units uint64) {
				if units > 0 {
					at.Others[j].Raise(s.used[j].get(keys[i]), at.Others[j].Level+units, r.Time)
				}
				if at.Others[j].Unit == policy.Flows {
					s.see(p.flow, r.Time)
				}
			})
		}
		to.ChargeSharer(m.states, i, r.Bytes)
		if s.guarantee != nil && to.ChargesGuarantee(i) {
			s.guarantee.Charge(s.guaranteed, r.Time, r.Bytes<<model.UnitBits)
			if at.Members != 0 {
				s.guarantee.Charge(&s.together, r.Time, model.Together(r.Bytes, at.Members))
			}
		}
		if i > 0 {
			r.Pools[i-1] = to.At[i].Level
		}
	}
	r.Verdict, r.Level, r.Wait = to.Verdict, to.At[0].Level, to.Departure-r.Time
	// A packet that a pool marks is excess, like one that its rule marks.
	r.Excess = r.Verdict == model.Drop || r.Wait == 0 && (to.Excess || r.Verdict == model.Mark)
	switch {
	case to.Refuses != model.NoStage:
		r.RefusedBy = m.names[chain[to.Refuses]]
	case to.Guaranteed != model.NoStage:
		r.GuaranteedBy = m.names[chain[to.Guaranteed]]
	}
}

// othersFor are the other limits of a stage for a packet.
func (s *stage) othersFor(key bucketKey, p packet, now uint64) (all []model.Other) {
	for i, o := range s.others {
		if o.Unit == policy.InQuota && s.zone != nil {
			o.Renew(s.rule.Also.Quota.Period, s.zone, now)
		}
		if o.Unit == policy.Flows {
			s.seen.sweep(func(_ bucketKey, until *uint64) bool { return now > *until })
			until, known := s.seen.of[bucketKey{flow: p.flow}]
			if o.New = !known || now >= *until; p.flow.Proto == unix.IPPROTO_TCP {
				o.New = p.syn
			}
		}
		s.used[i].sweep(func(_ bucketKey, b *model.Bucket) bool { return drained(o.Limit, *b, now) })
		o.Level = o.Limit.Level(*s.used[i].get(key), now)
		all = append(all, o)
	}
	return all
}

// see remembers the flow of a packet that passed.
func (s *stage) see(f maps.Flow, now uint64) {
	if until := s.seen.get(bucketKey{flow: f}); f.Proto != unix.IPPROTO_TCP && *until < now+model.SeenNS/2 {
		*until = now + model.SeenNS
	}
}

// Close implements Engine.
func (m *Model) Close() error { return nil }
