package policy

import (
	"errors"
	"fmt"
)

// Shadow is a limit that is only proposed: it counts what it would have
// refused of the packets of a rule, in buckets of its own, by the rule's
// algorithm. The zero Shadow is none.
type Shadow struct {
	Rate     Rate   // not Unlimited
	Capacity uint64 // bytes, MinCapacity to MaxCapacity
	Each     Each
	Penalty  Penalty
	Framing  Framing
}

// NewShadow is the shadow that proposes a rule.
func NewShadow(proposed Rule) Shadow {
	return Shadow{
		Rate: proposed.Rate, Capacity: proposed.Capacity, Each: proposed.Each,
		Penalty: proposed.Penalty, Framing: proposed.Framing,
	}
}

// Proposed is the rule that r's shadow would be in its place; false if it has none.
func (r Rule) Proposed() (proposed Rule, ok bool) {
	s := r.Shadow
	return Rule{
		Prefix: r.Prefix, Rate: s.Rate, Capacity: s.Capacity, Algorithm: r.Algorithm,
		Each: s.Each, Penalty: s.Penalty, Framing: s.Framing,
	}, s != Shadow{}
}

func (r *Rule) validateShadow() error {
	if r.Shadow == (Shadow{}) {
		return nil
	}
	proposed, _ := r.Proposed()
	err := proposed.Validate()
	if proposed.Rate == Unlimited {
		err = errors.New("rate unlimited would refuse nothing; leave the shadow out")
	}
	if err != nil {
		return fmt.Errorf("shadow: %w", err)
	}
	return nil
}
