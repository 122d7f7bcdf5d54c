package policy

import (
	"cmp"
	"errors"
	"fmt"
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
		Each: s.Each, Penalty: s.Penalty, Colours: colours, Framing: s.Framing,
	}, s != Shadow{}
}

func (r *Rule) validateShadow() error {
	if r.Shadow == (Shadow{}) {
		return nil
	}
	proposed, _ := r.Proposed()
	var err error
	if r.Pool { // whose prefix is a key, so an option that needs a network is wrong whatever it says
		err = checkPoolOptions(&proposed)
	}
	err = cmp.Or(err, proposed.Validate())
	if proposed.Rate == Unlimited {
		err = errors.New("rate unlimited would refuse nothing; leave the shadow out")
	}
	if err != nil {
		return fmt.Errorf("shadow: %w", err)
	}
	return nil
}
