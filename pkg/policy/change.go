package policy

import (
	"cmp"
	"fmt"
)

// A Change is an option that two rules have with different values. A value that a rule
// does not have is empty.
type Change struct {
	Option     string // the name of an Option, or plan
	Have, Want string // as Option.Text writes them
}

// String is such as "rate 10mbit -> 20mbit". Values of more than one word are quoted.
func (c Change) String() string {
	return fmt.Sprintf("%s %s -> %s", c.Option, quoteIfNeeded(cmp.Or(c.Have, "none")), quoteIfNeeded(cmp.Or(c.Want, "none")))
}

// Changes lists the options in which two rules differ, in the order of Options, then the
// plan. It leaves out options that both rules have by default: a capacity
// that follows from the rate changes with it. It also leaves out options that an unlimited
// rule cannot have, if want is one, but for the other limits that it loses.
func Changes(have, want *Rule) (changes []Change) {
	given, wanted := Draft{}.Missing(have), Draft{}.Missing(want)
	for _, o := range Options {
		leftOut := o.LimitedOnly && want.Rate == Unlimited && o.Same(&Rule{Also: have.Also}, &Rule{Also: want.Also})
		if !o.Same(have, want) && (given.Has(o) || wanted.Has(o)) && !leftOut {
			changes = append(changes, Change{o.Name, o.Text(have), o.Text(want)})
		}
	}
	if have.Label.Plan != want.Label.Plan {
		changes = append(changes, Change{"plan", have.Label.Plan, want.Label.Plan})
	}
	return changes
}
