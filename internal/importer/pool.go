package importer

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	overbooked = reason{other, "guarantees above the rate of their pool", "a pool guarantees no more than its rate",
		"they were lowered in proportion; lower them in the source, or raise the rate"}
	smallGuarantee = reason{other, "small guarantee", fmt.Sprintf("the least that a pool guarantees is %v", policy.MinRate), "it was left out"}
)

// pools is the key of the table of pools.
var pools tableKey

// addPool adds a pool, below pools that were added before, and returns its name; "" if it is not valid.
// The name is a title and an ending, with an ID or a number between them if another pool has that name.
func (c *collector) addPool(title, id, ending string, r policy.Rule, where string) policy.Within {
	for n := 1; ; n++ {
		end := ending
		switch {
		case n == 2 && id != "":
			end = mark(id) + ending
		case n > 1:
			end = fmt.Sprintf(" #%d", n) + ending
		}
		r.Label.Name = ended(title, end)
		r.Pool, r.Prefix = true, policy.PoolKey(r.Label.Name)
		if _, found := c.origins[place{pools, r.Prefix}]; found {
			continue
		}
		if !c.add(pools, 0, r, where, "") {
			return ""
		}
		return policy.Within(r.Label.Name)
	}
}

// mark returns an ID as the end of a name. It leaves room for the other parts.
func mark(id string) string { return " (" + cut(id, policy.MaxName/2) + ")" }

// ended returns a text with an ending, where the text is cut if both are too long for a name.
func ended(text, ending string) string {
	return strings.TrimSpace(cut(text, max(0, policy.MaxName-len(ending))) + ending)
}

// guarantee returns the guarantee of a rule or pool within a pool; 0 if it is too small.
func (c *collector) guarantee(rate policy.Rate, where string) policy.Guarantee {
	if rate < policy.MinRate {
		c.leave(smallGuarantee, where, "%d bit/s", uint64(rate))
		return 0
	}
	return policy.Guarantee(rate)
}

// balance makes the guarantees within each pool add up to no more than its rate. A pool's own guarantee is raised
// to that of its members, because LibreQoS and htb give them theirs, too. A pool with one member has no shares.
func (c *collector) balance() {
	t := c.tables[pools]
	if t == nil {
		return
	}
	at := map[policy.Within]int{}
	for i := range t.Rules {
		at[policy.Within(t.Rules[i].Label.Name)] = i
	}
	sums, members := make([]uint64, len(t.Rules)), make([]int, len(t.Rules))
	join := func(pool policy.Within, guarantee uint64) {
		if i, found := at[pool]; found {
			sums[i] += guarantee
			members[i]++
		}
	}
	for key, t := range c.tables {
		for i := range t.Rules {
			if r := &t.Rules[i]; key != pools {
				join(r.Within, uint64(r.Guarantee))
			}
		}
	}
	for i := range slices.Backward(t.Rules) {
		p := &t.Rules[i]
		has := min(max(uint64(p.Guarantee), sums[i]), uint64(p.Rate))
		if p.Guarantee != 0 {
			p.Guarantee = policy.Guarantee(has)
		}
		if members[i] < 2 {
			p.Share = policy.Share{}
		}
		join(p.Within, has)
	}
	for i := range t.Rules {
		if p := &t.Rules[i]; sums[i] > uint64(p.Rate) {
			c.leave(overbooked, c.origins[place{pools, p.Prefix}].where, "%v in %q, whose rate is %v", policy.Rate(sums[i]), p.Label.Name, p.Rate)
		}
	}
	for _, of := range c.tables {
		for k := range of.Rules {
			r := &of.Rules[k]
			if i, found := at[r.Within]; found && t.Rules[i].Share == (policy.Share{}) {
				r.Weight = 0
			}
			g := uint64(r.Guarantee)
			for pool := r.Within; pool != ""; {
				i := at[pool]
				if p := &t.Rules[i]; sums[i] > uint64(p.Rate) {
					g = scaled(g, uint64(p.Rate), sums[i])
				}
				pool = t.Rules[i].Within
			}
			if g < uint64(r.Guarantee) {
				r.Guarantee = readable(g)
			}
		}
	}
}

// scaled returns v * by / of, rounded down; by is less than of.
func scaled(v, by, of uint64) uint64 {
	hi, lo := bits.Mul64(v, by)
	q, _ := bits.Div64(hi, lo, of)
	return q
}

// readable rounds a guarantee down to kilobits.
func readable(g uint64) policy.Guarantee {
	if g -= g % 1000; g < uint64(policy.MinRate) {
		return 0
	}
	return policy.Guarantee(g)
}
