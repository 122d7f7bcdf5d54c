package report

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ExplainedPool is a pool with the pools above it and what is within it, as measured over an interval.
type ExplainedPool struct {
	Pool string `json:"pool"`
	// LimitedBy is the one of Levels that limited the pool's packets; null if none did.
	LimitedBy *string `json:"limited_by"`
	Levels    []Rule  `json:"levels"`  // the pool and those above it, the lowest first
	Members   []Rule  `json:"members"` // directly within it, those that use most first
}

// ExplainPool finds what limits a pool. The rules are those of the namespace, with its pools.
func (rules Rules) ExplainPool(name string) *ExplainedPool {
	f, p := newForest(rules), &ExplainedPool{Pool: name, Levels: []Rule{}, Members: []Rule{}}
	for above := f.pools[name]; above != nil; above = f.pools[above.Within] {
		p.Levels = append(p.Levels, *above)
	}
	for _, r := range f.within[name] {
		p.Members = append(p.Members, *r)
	}
	Rules(p.Members).Sort("use", false)
	refuses := func(r Rule) bool { return number(r.ExcessPercent, 0) > 0 }
	limiter := slices.IndexFunc(p.Levels, func(r Rule) bool {
		shares := r.Share != (policy.Share{}).String()
		return Limits(uint64(number(r.UseBits, 0)), *r.RateBits, refuses(r), AtRate(r.LevelBytes, *r.CapacityBytes, shares))
	})
	if limiter < 0 {
		limiter = slices.IndexFunc(p.Levels, refuses)
	}
	if limiter >= 0 {
		p.LimitedBy = &p.Levels[limiter].Name
	}
	return p
}

// fewMembers is how many members are listed as text.
const fewMembers = 5

// Text says what limits the pool, and then why.
func (p *ExplainedPool) Text(w io.Writer) error {
	var s strings.Builder
	name := "pool " + p.Pool
	says := name + " limited nobody, and neither did a pool above"
	for i := range p.Levels {
		switch l := &p.Levels[i]; {
		case p.LimitedBy == nil || *p.LimitedBy != l.Name:
		case i == 0:
			says = name + " limited what is within it"
		default:
			says = "pool " + l.Name + " limited " + name
		}
	}
	switch dropped := p.Levels[0].dropped(); {
	case number(dropped, 0) == 0:
	case p.LimitedBy == nil:
		says += "; limits within it dropped " + percentText(*dropped) + " of its packets"
	default:
		says += "; " + percentText(*dropped) + " of the packets of " + p.Pool + " were dropped"
	}
	says = fmt.Sprintf("in the last %.1f s, %s", float64(*p.Levels[0].IntervalNS)/1e9, says)
	s.WriteString(plain.Fold(plain.Line(says), screenWidth, "", "    "))
	for i := range p.Levels {
		fact(&s, "pool", p.Levels[i].poolText())
	}
	others := 0
	for i := range p.Members {
		m := &p.Members[i]
		if i >= fewMembers || number(m.UseBits, 0) == 0 && number(m.dropped(), 0) == 0 {
			others++
			continue
		}
		text := (&row{Rule: m}).name(m.where()) + " uses " + optional(m.UseBits, bitsText)
		if number(m.dropped(), 0) > 0 {
			text += ", and loses " + percentText(*m.dropped())
		}
		fact(&s, "within it", text)
	}
	if others > 0 {
		fact(&s, "within it", fmt.Sprintf("%d more, with less or no use", others))
	}
	_, err := io.WriteString(w, s.String())
	return err
}

// poolText describes a pool as it was measured.
func (r *Rule) poolText() string {
	text := r.Name + ": " + rateText(r.RateBits)
	if r.GuaranteeBits != nil {
		text += ", " + rateText(r.GuaranteeBits) + " guaranteed"
	}
	parts := []string{text, "use not known"} // as it was set anew meanwhile
	if r.UseBits != nil {
		parts[1] = bitsText(*r.UseBits) + " used now"
	}
	if number(r.BorrowedBits, 0) > 0 && r.GuaranteeBits != nil {
		parts[1] += ", " + bitsText(*r.BorrowedBits) + " of it borrowed"
	}
	if sharers := (&Sharing{Share: r.Share, ActiveSharers: r.ActiveSharers}).sharers(); sharers != "" {
		parts = append(parts, sharers)
	}
	if refused := r.refused(); number(refused, 0) > 0 {
		parts = append(parts, percentText(*refused)+" refused")
	}
	return strings.Join(parts, "; ")
}
