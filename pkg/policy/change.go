package policy

import (
	"cmp"
	"fmt"
	"strings"
)

// A Change is an option that two rules have with different values. A value that a rule
// does not have is empty.
type Change struct {
	Option     string // the name of an Option, or plan or shadow
	Have, Want string // as Option.Text writes them; a shadow as ParseShadow reads it
}

// String is such as "rate 10mbit -> 20mbit". Values of more than one word are quoted.
func (c Change) String() string {
	return fmt.Sprintf("%s %s -> %s", c.Option, quoteIfNeeded(cmp.Or(c.Have, "none")), quoteIfNeeded(cmp.Or(c.Want, "none")))
}

// Changes lists the options in which two rules differ, in the order of Options, then the
// shadow and the plan. It leaves out options that both rules have by default: a capacity
// that follows from the rate changes with it. It also leaves out options that an unlimited
// rule cannot have, if want is one.
func Changes(have, want *Rule) (changes []Change) {
	for _, o := range Options {
		if o.LimitedOnly && want.Rate == Unlimited {
			continue
		}
		if !o.Same(have, want) && !(o.isDefault(have) && o.isDefault(want)) {
			changes = append(changes, Change{o.Name, o.Text(have), o.Text(want)})
		}
	}
	if have.Shadow != want.Shadow {
		changes = append(changes, Change{"shadow", have.shadowText(), want.shadowText()})
	}
	if have.Label.Plan != want.Label.Plan {
		changes = append(changes, Change{"plan", have.Label.Plan, want.Label.Plan})
	}
	return changes
}

// isDefault reports whether r has the value that the option has where nothing sets it.
func (o *Option) isDefault(r *Rule) bool {
	l := Limit{Rate: r.Rate, Algorithm: r.Algorithm, Excess: r.Excess, Within: r.Within}
	o.Reset(&l)
	return o.isDefaultIn(r, l)
}

// isDefaultIn reports whether r has the value that the option has where only l sets it.
func (o *Option) isDefaultIn(r *Rule, l Limit) bool {
	without := *r
	without.Framing = Framing{} // of which a limit without an overhead sets nothing
	err := o.resolve(&l, &without)
	return err == nil && o.Same(&without, r)
}

// shadowText is the shadow as ParseShadow reads it; empty for none.
func (r *Rule) shadowText() string {
	proposed, ok := r.Proposed()
	if !ok {
		return ""
	}
	inherited := Limit{}.Inherit(r)
	var parts []string
	for _, o := range Options {
		if o.Shadow && !o.isDefaultIn(&proposed, inherited) {
			parts = append(parts, o.Name+"="+o.Text(&proposed))
		}
	}
	return strings.Join(parts, ",")
}
