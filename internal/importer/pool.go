package importer

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	overbooked = reason{lowers, "lowered guarantee", "a pool guarantees no more than its rate",
		"all within such a pool get 3/4, 1/2, 3/8 and so on of theirs; lower some in the source, or raise the rate"}
)

var pools tableKey

// addPool adds a pool, below pools that were added before, and returns its name; "" if it is not valid.
// The name is a title and an ending, with a number between them if another pool has that name.
func (c *collector) addPool(title, ending string, r policy.Rule, where string) policy.Within {
	for n := 1; ; n++ {
		end := ending
		if n > 1 {
			end = fmt.Sprintf(" #%d", n) + ending
		}
		r.Label.Name = ended(title, end)
		r.Pool, r.Prefix = true, policy.PoolKey(r.Label.Name)
		if c.origins[place{pools, r.Prefix}] != nil {
			continue
		}
		if !c.add(pools, 0, r, where) {
			return ""
		}
		return policy.Within(r.Label.Name)
	}
}

// ended returns a text with an ending, where the text is cut if both are too long for a name.
func ended(text, ending string) string {
	return strings.TrimSpace(cut(text, max(0, policy.MaxName-len(ending))) + ending)
}

// A promise is what is guaranteed to a rule or pool, or to all within a pool.
type promise struct{ kept, other uint64 } // kept: that of protected circuits

func (p *promise) add(more promise) { p.kept, p.other = p.kept+more.kept, p.other+more.other }
func (p promise) sum() uint64       { return p.kept + p.other }

// A fraction is 1 or 3, divided by a power of two: 1, 3/4, 1/2, 3/8 and so on. Its steps are that large so that a change of one
// guarantee seldom changes those of others.
type fraction struct{ times, shift uint }

func (f fraction) of(rate uint64) uint64 { return rate * uint64(f.times) >> f.shift }

// fractionOf returns the largest one of a rate that has room.
func fractionOf(rate, room uint64) fraction {
	f := fraction{times: 1}
	for f.of(rate) > room {
		if f.times == 1 {
			f = fraction{3, f.shift + 2}
		} else {
			f = fraction{1, f.shift - 1}
		}
	}
	return f
}

// A ledger has what is guaranteed within pools.
type ledger struct {
	pools  []policy.Rule
	at     map[policy.Within]int
	within []promise // by pool: to all that are directly within it
	own    map[*policy.Rule]promise
}

// enter enters what is guaranteed to a rule, or to a pool and its members.
func (l *ledger) enter(r *policy.Rule, isKept bool, members promise) {
	sum := min(max(uint64(r.Guarantee), members.sum()), uint64(r.Rate))
	kept := min(members.kept, sum)
	if isKept {
		kept = sum
	}
	if r.Guarantee != 0 {
		r.Guarantee = policy.Guarantee(sum)
	}
	l.own[r] = promise{kept, sum - kept}
	if i, found := l.at[r.Within]; found {
		l.within[i].add(l.own[r])
	}
}

// leave returns what the pools above a rule or pool leave of what is guaranteed to it, and why that is less.
func (l *ledger) leave(r *policy.Rule) (g policy.Guarantee, why string) {
	own := l.own[r]
	for name := r.Within; name != ""; {
		p, in := &l.pools[l.at[name]], l.within[l.at[name]]
		room := uint64(p.Rate)
		if name = p.Within; in.sum() <= room {
			continue
		}
		if why == "" {
			why = fmt.Sprintf("%v are guaranteed within %q, whose rate is %v", policy.Rate(in.sum()), p.Label.Name, p.Rate)
		}
		if in.kept <= room {
			own.other = fractionOf(in.other, room-in.kept).of(own.other)
		} else { // not even those that are protected fit
			f := fractionOf(in.sum(), room)
			own = promise{f.of(own.kept), f.of(own.other)}
		}
	}
	if g = policy.Guarantee(own.sum()); g < policy.Guarantee(policy.MinRate) {
		g = 0
	}
	return g, why
}

// balance makes the guarantees within each pool add up to no more than its rate, and keeps those of protected circuits if
// they fit. A pool's own guarantee is raised to that of its members, because LibreQoS and htb give them theirs, too.
func (c *collector) balance() {
	t := c.tables[pools]
	if t == nil {
		return
	}
	l := ledger{t.Rules, map[policy.Within]int{}, make([]promise, len(t.Rules)), map[*policy.Rule]promise{}}
	for i := range t.Rules {
		l.at[policy.Within(t.Rules[i].Label.Name)] = i
	}
	for key, of := range c.tables {
		for i := range of.Rules {
			if r := &of.Rules[i]; key != pools {
				l.enter(r, c.origins[place{key, r.Prefix}].kept, promise{})
			}
		}
	}
	for i := range slices.Backward(t.Rules) {
		l.enter(&t.Rules[i], c.origins[place{pools, t.Rules[i].Prefix}].kept, l.within[i])
	}
	type loss struct {
		policy.Guarantee
		where, what string
	}
	var losses []loss
	for key, of := range c.tables {
		for k := range of.Rules {
			r := &of.Rules[k]
			before, o := r.Guarantee, c.origins[place{key, r.Prefix}]
			if before == 0 {
				continue
			}
			after, why := l.leave(r)
			if r.Guarantee = after; after < before {
				losses = append(losses, loss{before - after, o.where, fmt.Sprintf("%s: %v of %v, because %s", o.who, after, before, why)})
			}
		}
	}
	slices.SortFunc(losses, func(a, b loss) int {
		return cmp.Or(cmp.Compare(b.Guarantee, a.Guarantee), strings.Compare(a.what, b.what))
	})
	why := overbooked
	why.Advice += c.protect
	for _, l := range losses {
		c.leave(why, l.where, "%s", l.what)
	}
}
