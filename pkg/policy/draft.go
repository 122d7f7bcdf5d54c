package policy

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/internal/plain"
)

// An Origin is where an option of a Draft comes from. It decides what happens to an option that has no use beside the others.
type Origin uint8

const (
	NotGiven Origin = iota
	Usual           // it is a default, or in force: without a use, it goes
	OfPlan          // without a use, it goes if the rule itself gives what that depends on; else it is an error
	Own             // without a use, it is an error
)

// mostOptions is at least the number of Options.
const mostOptions = 56

// A Draft is a limit as somebody writes it, and which of its options are given.
type Draft struct {
	Limit
	from [mostOptions]Origin // by Option.index
}

// Has reports whether an option is given.
func (d *Draft) Has(o *Option) bool { return d.from[o.index] != NotGiven }

// Gives reports whether the option of a name is given.
func (d *Draft) Gives(name string) bool { return d.Has(FindOption(name)) }

// Given lists the options that are given, in the order of Options.
func (d *Draft) Given() (given []*Option) {
	for _, o := range Options {
		if d.Has(o) {
			given = append(given, o)
		}
	}
	return given
}

// Give parses the value of an option and gives it.
func (d *Draft) Give(o *Option, value string) error {
	err := o.Value(&d.Limit).Set(value)
	if err == nil {
		d.Mark(o)
	}
	return err
}

// GiveAll gives options, none twice by an alias, as far as they are possible.
func (d *Draft) GiveAll(options map[string]string, possible func(*Option) bool) error {
	for _, name := range slices.Sorted(maps.Keys(options)) {
		o := FindOption(name)
		switch {
		case o == nil || !possible(o):
			var names []string
			for _, o := range Options {
				if possible(o) {
					names = append(names, o.Name)
				}
			}
			if similar := plain.Similar(name, names); o == nil && similar != "" {
				return fmt.Errorf("unknown option %q; did you mean %q?", name, similar)
			}
			return fmt.Errorf("%.64q is not possible here; use %s", name, oneOf(names))
		case d.Has(o):
			return fmt.Errorf("%s is given twice; remove one of them", o.Name)
		}
		if err := d.Give(o, options[name]); err != nil {
			return err
		}
	}
	return nil
}

// Mark says that an option is given by the value that it has.
func (d *Draft) Mark(o *Option) { d.from[o.index] = Own }

// Take takes an option from another draft, in which it is given.
func (d *Draft) Take(o *Option, from *Draft) {
	o.Copy(&d.Limit, &from.Limit)
	d.from[o.index] = from.from[o.index]
}

// Drop removes an option.
func (d *Draft) Drop(o *Option) {
	o.Copy(&d.Limit, &noLimit)
	d.from[o.index] = NotGiven
}

// As returns the draft with another origin of all that is given.
func (d Draft) As(from Origin) Draft {
	for i := range d.from {
		if d.from[i] != NotGiven {
			d.from[i] = from
		}
	}
	return d
}

// Over returns the draft with what another one gives beside it.
func (d Draft) Over(wider Draft) Draft {
	for _, o := range d.Given() {
		wider.Take(o, &d)
	}
	return wider
}

// settled returns the limit without what has no use and goes. r is the rule or pool that is made, without options.
func (d Draft) settled(r Rule) Limit {
	own := func(name string) bool { o := FindOption(name); return o != nil && d.from[o.index] == Own }
	for _, o := range d.Given() {
		l := &d.Limit
		r.Rate, r.Algorithm, r.Each, r.Excess, r.Penalty, r.Within = l.Rate, l.Algorithm, l.Each, l.Excess, l.Penalty, l.Within
		r.Guarantee, r.Label.Waits, r.Cluster, r.Adapt, r.Colours.Aware = l.Guarantee, l.Waits, l.Cluster, l.Adapt, bool(l.Colours.Aware)
		r.Share, r.Also = l.Share, l.Also
		_ = resolveRate(l, &r)
		idle, decided := false, false // by the rule itself
		for _, n := range o.needs {
			idle, decided = idle || !n.met(&r), decided || own(n.option)
		}
		if from := d.from[o.index]; idle && (from == Usual || from == OfPlan && decided) {
			d.Drop(o)
		}
	}
	return d.Limit
}

// Rule is Limit.Rule of what has a use.
func (d Draft) Rule(prefix netip.Prefix) (Rule, error) {
	return d.settled(Rule{Prefix: prefix}).Rule(prefix)
}

// Pool is Limit.Pool of what has a use.
func (d Draft) Pool(name string) (Rule, error) { return d.settled(Rule{Pool: true}).Pool(name) }

// Missing returns what must be given beside a draft so that it makes r. So a capacity that follows from the rate is not given.
func (d Draft) Missing(r *Rule) (more Draft) {
	l, of := d.Limit, Limit{Rate: r.Rate, Algorithm: r.Algorithm, Each: r.Each, Excess: r.Excess, Within: r.Within}
	l.Rate, l.Algorithm, l.Each, l.Excess, l.Within = of.Rate, of.Algorithm, of.Each, of.Excess, of.Within
	made := *r
	made.Framing = Framing{} // of which a limit without an overhead sets nothing
	for _, o := range Options {
		if o.Decides {
			o.Copy(&l, &d.Limit)
		}
		if !o.Useful(r) {
			o.Copy(&l, &noLimit)
		}
		err := o.resolve(&l, &made)
		made.Each = made.Each.Canonical(r.Prefix)
		if err != nil || !o.Same(&made, r) {
			if more.Give(o, o.Text(r)) != nil {
				more.Mark(o) // r is not valid, and has none
			}
			made = *r
			made.Framing = Framing{}
		}
		if o.Decides {
			o.Copy(&l, &of)
		}
	}
	return more
}
