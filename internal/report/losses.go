package report

import (
	"maps"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Once are the rules and the pools, each once, and the pools as copies. A device that was deleted may have left rules beside those of a new
// device with its name: these count.
func (all Rules) Once() (rules, pools []*Rule) {
	index := make(map[Key]int, len(all))
	for i := range all {
		r := &all[i]
		if r.IsPool() {
			own := *r // for others may use the reading, too
			pools = append(pools, &own)
			continue
		}
		key := r.Key()
		at, twice := index[key]
		switch {
		case !twice:
			index[key] = len(rules)
			rules = append(rules, r)
		case NotInForce(rules[at].Attached):
			rules[at] = r
		}
	}
	return rules, pools
}

// Losses make counters of the drops of pools.
type Losses struct {
	rules map[Key]loss // what was counted of each rule in the last reading
	pools map[string]loss
}

type loss struct{ packets, bytes uint64 }

// Count makes of the drops of pools a counter. What the rules within a pool lost so far is none: it would fall when a
// rule leaves the pool or goes, and jump when one joins it. So only what a rule loses between two readings counts.
//
// Unless the reading is complete, it is remembered of the other rules what was counted before.
func (l *Losses) Count(rules, pools []*Rule, complete bool) {
	above, sums, seen := make(map[string]string, len(pools)), make(map[string]loss, len(pools)), make(map[Key]loss)
	if !complete {
		maps.Copy(seen, l.rules)
	}
	for _, p := range pools {
		above[p.Name], sums[p.Name] = p.Within, l.pools[p.Name]
	}
	for _, r := range rules {
		if r.Within == "" {
			continue
		}
		key, now := r.Key(), loss{r.DroppedPackets, r.DroppedBytes}
		before, known := l.rules[key]
		seen[key] = now
		if !known || now == before {
			continue
		}
		if now.packets < before.packets || now.bytes < before.bytes {
			before = loss{} // set anew
		}
		pool := r.Within
		for depth := 0; pool != "" && depth < policy.MaxDepth; depth++ {
			sum := sums[pool]
			sums[pool] = loss{sum.packets + now.packets - before.packets, sum.bytes + now.bytes - before.bytes}
			pool = above[pool]
		}
	}
	for _, p := range pools {
		p.DroppedPackets, p.DroppedBytes = sums[p.Name].packets, sums[p.Name].bytes
	}
	l.rules, l.pools = seen, sums
}

// Resume goes on from a reading of an earlier process.
func (l *Losses) Resume(samples []history.Sample) {
	l.rules, l.pools = map[Key]loss{}, map[string]loss{}
	for _, s := range samples {
		switch lost := (loss{bytes: s.Dropped}); {
		case s.Pool != "":
			l.pools[s.Pool] = lost
		case s.Within != "":
			l.rules[s.Key] = lost
		}
	}
}
