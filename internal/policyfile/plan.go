package policyfile

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"unicode"

	"github.com/shapectl/shapectl/pkg/policy"
)

// value returns the plan as a value in YAML.
func (p *plan) value() string {
	d := p.Draft
	if p.shown != p.key {
		d.Name = p.shown
		d.Mark(policy.FindOption("name"))
	}
	if given := d.Given(); len(given) == 1 && given[0].Name == "rate" {
		return value(given[0], &d)
	}
	return "{" + inBraces(&d) + "}"
}

// followers counts the rules and notes of the rules that follow a plan, to find the most
// common ones. The first one wins a tie.
type followers struct {
	all   int
	rules map[policy.Rule]int // by rule without network, label and pool
	most  policy.Rule         // an example of the most common rule, without its label and pool
	notes map[string]int
	note  string // the most common note
}

func (f *followers) add(r *policy.Rule) {
	one := *r
	if r.Within != "" && r.Rate == policy.Unlimited {
		one.Rate = 0 // a follower that names no pool is an error then
	}
	one.Label, one.Within = policy.Label{}, ""
	f.all++
	if count(f.rules, withoutNetwork(one)) > f.rules[withoutNetwork(f.most)] {
		f.most = one
	}
	if count(f.notes, r.Label.Note) > f.notes[f.note] {
		f.note = r.Label.Note
	}
}

func withoutNetwork(r policy.Rule) policy.Rule {
	r.Prefix = netip.Prefix{}
	return r
}

// count adds one to the count of a key and returns it. It ignores new keys when there are
// too many.
func count[K comparable](counts map[K]int, key K) int {
	if _, known := counts[key]; known || len(counts) < maxKnown {
		counts[key]++
	}
	return counts[key]
}

// plansOf derives plans from the rules that follow them, by how the plans are shown. A plan
// gets the most common limit of its rules, and a note if more than half of them have it. It gets no pool: somebody who
// follows the plan later would share the pool of others.
func plansOf(tables map[string][]policy.Table) map[string]*plan {
	of := map[string]*followers{}
	for _, device := range slices.Sorted(maps.Keys(tables)) {
		for _, t := range tables[device] {
			for i := range t.Rules {
				shown := t.Rules[i].Label.Plan
				if shown == "" {
					continue
				}
				if of[shown] == nil {
					of[shown] = &followers{rules: map[policy.Rule]int{}, notes: map[string]int{}}
				}
				of[shown].add(&t.Rules[i])
			}
		}
	}
	plans, used := map[string]*plan{}, map[string]bool{}
	names := slices.Sorted(maps.Keys(of))
	for _, valid := range []bool{true, false} { // a name that is a valid key is the key
		for _, shown := range names {
			if validPlan(shown) == valid {
				key := planKey(shown, used)
				used[key] = true
				plans[shown] = &plan{parcel: parcel{Draft: of[shown].draft()}, key: key, shown: shown}
			}
		}
	}
	return plans
}

// draft is what the plan gives.
func (f *followers) draft() policy.Draft {
	most := f.most
	most.Rate = cmp.Or(most.Rate, policy.Unlimited)
	d := policy.Draft{}.Missing(&most)
	if f.most.Rate == 0 {
		d.Drop(policy.FindOption("rate"))
	}
	if f.note != "" && f.all > 1 && 2*f.notes[f.note] > f.all {
		d.Note = f.note
		d.Mark(policy.FindOption("note"))
	}
	return d
}

// planKey returns a valid key for the name of a plan that is not used yet.
func planKey(shown string, used map[string]bool) string {
	key := strings.Trim(strings.Map(func(c rune) rune {
		if unicode.IsLetter(c) || unicode.IsDigit(c) || strings.ContainsRune("-_.", c) {
			return c
		}
		return '-'
	}, shown), "-")
	if !validPlan(key) {
		key = strings.TrimSuffix("plan-"+key, "-")
	}
	free := key
	for n := 2; used[free]; n++ {
		free = fmt.Sprintf("%s-%d", key, n)
	}
	return free
}
