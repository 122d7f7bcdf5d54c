package policy

import (
	"errors"
	"fmt"
	"strings"
)

// Shadow is a proposed limit of a rule or pool. It counts the packets that it would have refused,
// in its own buckets and by the rule's algorithm, with the rule's colours and actions. The zero Shadow is none.
type Shadow struct {
	Rate     Rate   // not Unlimited
	Capacity uint64 // bytes, MinCapacity to MaxCapacity
	Each     Each
	Penalty  Penalty
	Framing  Framing

	PIR, EIR Rate   // as in Colours
	PBS, EBS uint64 // as in Colours
}

// NewShadow returns the shadow that proposes a rule.
func NewShadow(proposed Rule) Shadow {
	return Shadow{
		Rate: proposed.Rate, Capacity: proposed.Capacity, Each: proposed.Each,
		Penalty: proposed.Penalty, Framing: proposed.Framing,
		PIR: proposed.Colours.PIR, EIR: proposed.Colours.EIR, PBS: proposed.Colours.PBS, EBS: proposed.Colours.EBS,
	}
}

// Proposed returns the rule that r's shadow proposes; false if r has no shadow.
func (r Rule) Proposed() (proposed Rule, ok bool) {
	s, colours := r.Shadow, r.Colours
	colours.PIR, colours.EIR, colours.PBS, colours.EBS = s.PIR, s.EIR, s.PBS, s.EBS
	return Rule{
		Prefix: r.Prefix, Rate: s.Rate, Capacity: s.Capacity, Algorithm: r.Algorithm,
		Each: s.Each, NAT: r.NAT, Penalty: s.Penalty, Colours: colours, Framing: s.Framing,
	}, s != Shadow{}
}

// shadowOption is the shadow of a limit. Its functions are set below, as they refer to Options.
var shadowOption = &Option{
	Name: "shadow", Help: "limit that only counts, such as rate=5mbit",
	Doc: "a [proposed limit](../operations.md#try-a-limit-without-dropping) that only counts what it would refuse; `none` removes that of defaults or a plan",
}

func init() {
	o := shadowOption
	o.Value = func(l *Limit) Value { return shadowValue{l} }
	o.Copy = func(to, from *Limit) { to.Shadow = from.Shadow }
	o.Text = (*Rule).shadowText
	o.Same = func(a, b *Rule) bool { return a.Shadow == b.Shadow }
	o.resolve, o.check = resolveShadow, checkShadow
	o.needs = []need{{option: "rate", met: limited, usual: true}}
}

// shadowValue is the shadow of a limit, as ParseShadow reads it.
type shadowValue struct{ of *Limit }

func (v shadowValue) Set(s string) (err error) {
	if v.of.Shadow = nil; s != "" {
		v.of.Shadow, err = ParseShadow(s)
	}
	return err
}

func (v shadowValue) String() string {
	if v.of.Shadow == nil {
		return ""
	}
	return v.of.Shadow.shadowText()
}

func (v shadowValue) Type() string { return "limit" }

func (d *Draft) shadowText() string {
	var parts []string
	for _, o := range d.Given() {
		parts = append(parts, o.Name+"="+o.Value(&d.Limit).String())
	}
	return strings.Join(parts, ",")
}

// shadowText is the shadow as ParseShadow reads it, which leaves out what the shadow has of its rule; empty for none.
func (r *Rule) shadowText() string {
	proposed, ok := r.Proposed()
	if !ok {
		return ""
	}
	d := Draft{Limit: Limit{}.inherit(r)}.Missing(&proposed)
	for _, o := range d.Given() {
		if !o.Shadow {
			d.Drop(o)
		}
	}
	return d.shadowText()
}

func resolveShadow(l *Limit, r *Rule) error {
	if r.Shadow = (Shadow{}); l.Shadow == nil {
		return nil
	}
	shadow := l.Shadow.inherit(r)
	proposed, err := shadow.Resolve(r.Prefix)
	if err != nil {
		return fmt.Errorf("shadow: %w", err)
	}
	proposed.Each = proposed.Each.Canonical(r.Prefix)
	r.Shadow = NewShadow(proposed)
	return nil
}

func checkShadow(r *Rule) error {
	if r.Shadow == (Shadow{}) {
		return nil
	}
	proposed, _ := r.Proposed()
	proposed.Pool = r.Pool
	err := proposed.validateOptions()
	if proposed.Rate == Unlimited {
		err = errors.New("rate unlimited would refuse nothing; leave the shadow out")
	}
	if err != nil {
		return fmt.Errorf("shadow: %w", err)
	}
	return nil
}
