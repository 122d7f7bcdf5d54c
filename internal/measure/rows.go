// Package measure reads rules and pools, once or again and again, and measures what they did in between.
package measure

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Sampled keeps the counters of rules that were read at a time. The function measures what the same rules did since then.
func Sampled(rules report.Rules, began uint64) (since func(now report.Rules, at uint64)) {
	samples := make(map[report.Key]report.Sample, len(rules))
	for i := range rules {
		samples[rules[i].Key()] = rules[i].Sample()
	}
	return func(now report.Rules, at uint64) {
		for i := range now {
			if sample, ok := samples[now[i].Key()]; ok {
				now[i].Since(sample, at-began)
			}
		}
	}
}

// A Found is a rule or pool that is to be read.
type Found struct {
	*maps.Entry
	Hook    *loader.Hook
	Decides *bool // whether it decides over the address that was searched for; nil for other searches
}

// Details are what to read of rules beside parameters and counters.
type Details struct {
	Sentences bool
	Buckets   bool    // that are not empty
	Active    bool    // their number, and that of active sharers
	Affected  bool    // the hosts that shadows would have affected
	Sharers   bool    // the number of active sharers
	PoolRates bool    // the rates of the pools of rules that have no other
	At        *uint64 // becomes the time at which counters are read; nil for nobody to know
}

// Rows are rules with these details. With the error come those that could be read.
func (read Details) Rows(found []Found) (report.Rules, error) {
	rules := make(report.Rules, 0, len(found))
	if read.At != nil {
		*read.At = maps.Now()
	}
	var affected map[uint32][]maps.Affected
	for i, m := range found {
		if read.Affected && (i == 0 || m.Hook != found[i-1].Hook) {
			var err error
			if affected, err = m.Hook.Set.Affected(); err != nil {
				return rules, err
			}
		}
		r := row(m.Hook, *m.Entry, affected[m.ID])
		if read.Sentences {
			r.Sentence = m.Sentence(m.Hook.Name(), m.Hook.Direction, m.Hook.Match())
		}
		r.Decides = m.Decides
		rules = append(rules, r)
	}
	if len(found) > 0 && (read.Buckets || read.Active) {
		read.addBuckets(rules, found)
	}
	if i := slices.IndexFunc(found, func(m Found) bool { return m.Pool }); i >= 0 {
		losses := found[i].Hook.Set.Store.Losses()
		for i, m := range found {
			if m.Pool {
				rules[i].Lost(losses[m.ID])
			}
		}
	}
	if read.Active || read.Sharers {
		addSharers(rules, found)
	}
	if read.PoolRates {
		addPoolRates(rules, found)
	}
	return rules, nil
}

// addPoolRates adds the rates of their pools to rules that have only these.
func addPoolRates(rules report.Rules, found []Found) {
	rates := map[policy.Within]report.PoolRate{}
	for i, m := range found {
		if m.Within == "" || m.Rate != policy.Unlimited {
			continue
		}
		rate, known := rates[m.Within]
		if !known {
			pools := m.Hook.Set.Store.Pools()
			if entry, ok := pools.Find(policy.PoolKey(string(m.Within))); ok {
				pool := report.NewRule("", 0, 0, entry.Rule, maps.Counters{}, 0)
				addLease(&pool, pools, entry)
				rate = pool.PoolRate()
			}
			rates[m.Within] = rate
		}
		rules[i].SetPoolRate(rate)
	}
}

// addSharers adds the number of active sharers to rules and pools with shares.
func addSharers(rules report.Rules, found []Found) {
	var active map[uint32]int
	for i, m := range found {
		if m.Share.Kind == policy.ShareNone {
			continue
		}
		if active == nil {
			active = m.Hook.Set.Store.ActiveSharers() // of all hooks
		}
		sharers := uint64(active[m.ID])
		rules[i].ActiveSharers = &sharers
	}
}

// addBuckets adds buckets, or only their number, to the rules that were found.
func (read Details) addBuckets(rules report.Rules, found []Found) {
	add := func(i int, b maps.Bucket) {
		if read.Buckets {
			rules[i].Buckets = append(rules[i].Buckets, bucketOf(found[i].Hook, *found[i].Entry, b))
		}
	}
	entries := make([]maps.Entry, len(found))
	for i, m := range found {
		entries[i] = *m.Entry
		rules[i].ActiveBuckets = new(uint64)
		if read.Buckets {
			rules[i].Buckets = []report.Bucket{}
		}
		b := maps.Bucket{Subnet: m.Prefix, LevelBytes: rules[i].LevelBytes}
		if second := rules[i].SecondLevelBytes; second != nil {
			b.SecondBytes = *second
		}
		if b.LevelBytes|b.SecondBytes > 0 && m.Each.Kind == policy.EachAll {
			add(i, b)
		}
	}
	for i, b := range found[0].Hook.Set.Store.Buckets(entries, maps.Now) { // all hooks share the table
		*rules[i].ActiveBuckets++
		add(i, b)
	}
}

// Describe is all that is known of a rule.
func Describe(h *loader.Hook, entry maps.Entry) report.Rule {
	r := row(h, entry, nil)
	r.Sentence = entry.Sentence(h.Name(), h.Direction, h.Match())
	return r
}

// row is a rule without its sentence; affected may be nil.
func row(h *loader.Hook, entry maps.Entry, affected []maps.Affected) report.Rule {
	level := model.Bytes(h.Set.Store.SharedLevel(entry, maps.Now()))
	var guaranteed maps.Counters
	if guarantee, ok := h.Set.Store.Guarantee(entry); ok {
		guaranteed = h.Set.Store.Counters(guarantee.ID)
	}
	r := report.NewRule(h.Name(), h.Direction, h.Match(), entry.Rule, h.Set.Store.Counters(entry.ID), level)
	r.Guaranteed(guaranteed)
	if entry.Algorithm.HasColours() {
		levels := h.Set.Store.SharedLevels(entry, maps.Now())
		r.LevelBytes, r.SecondLevelBytes = model.Bytes(levels.First), new(model.Bytes(model.NewColoured(entry.Rule).E(levels)))
	}
	addLease(&r, h.Set, entry)
	r.Attached, r.State, r.Hook = new(h.State.InForce()), h.Status(), string(h.Mode)
	if change, until := h.Set.Store.Change(); change == maps.Pending && h.Set.Store.Changes(entry.ID) {
		r.RevertsInNS = Ahead(until)
	}
	if shadow, ok := h.Set.Store.Shadow(entry); ok {
		r.Shadow = report.NewShadow(shadow.Rule, h.Set.Store.Counters(shadow.ID), affected, h.Set.Store.Size().Affected)
	}
	return r
}

// addLease adds the lease of a pool that has one.
func addLease(r *report.Rule, set *maps.Set, entry maps.Entry) {
	if entry.HasLeases() {
		if lease, ok := set.Lease(entry.Prefix); ok {
			r.SetLease(entry.Rule, lease, maps.Now())
		}
	}
}

func bucketOf(h *loader.Hook, entry maps.Entry, b maps.Bucket) report.Bucket {
	out := report.Bucket{Key: b.Flow.String(), LevelBytes: b.LevelBytes}
	if entry.Pool {
		out.Key = "pool"
	} else if b.Subnet.IsValid() {
		out.Key = report.SubnetName(b.Subnet)
	}
	if entry.Algorithm.HasColours() {
		out.SecondLevelBytes = &b.SecondBytes
		return out
	}
	packet := model.Packet{Bytes: model.Counted(h.Device.FullFrame(), entry.Framing)}
	o := model.NewLimit(entry.Rule).Decide(model.State{Level: b.LevelBytes << model.UnitBits, FIFO: true}, packet)
	if entry.Excess == policy.Delay && !o.Excess {
		out.WaitNS = &o.Wait
	}
	return out
}

// MadeBy says who made a change; "" if that is not known.
func MadeBy(pending *loader.PendingError) string {
	if pending == nil {
		return ""
	}
	a := pending.Author
	user, command, known := strings.Cut(a.Who, "\x00")
	if !known {
		return ""
	}
	began := time.Now().Add(-time.Duration(maps.Now() - min(a.Began, maps.Now())))
	return fmt.Sprintf("%s made it with %s at %s", plain.Line(user), plain.Quoted(plain.Line(command)), began.Format(time.TimeOnly))
}

// Ahead is how far a time of maps.Now is ahead, in ns; nil for 0, which is none.
func Ahead(at uint64) *uint64 {
	if at == 0 {
		return nil
	}
	left := at - min(at, maps.Now())
	return &left
}
