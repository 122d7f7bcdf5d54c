package report

import (
	"fmt"
	"strings"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Passage is what a packet meets in a rule and the pools above it.
type Passage struct {
	// RefusedBy is the level that the packet exceeds; null where it conforms, and where that is not known.
	RefusedBy *Refusal `json:"refused_by"`
	// Borrowed says whether the packet passes beyond the guarantees of its rule and pools, of which there are some.
	Borrowed bool `json:"borrowed"`
	// Guaranteed says whether a guarantee lets the packet pass the pools above it.
	Guaranteed bool `json:"guaranteed"`
	// GuaranteedBy is the pool with that guarantee; "" for the rule.
	GuaranteedBy string `json:"guaranteed_by"`
	Sharing
	Pools []PoolLevel `json:"pools"` // above the rule, the lowest first
}

// Refusal is a rule or pool that a packet exceeds.
type Refusal struct {
	Kind   string `json:"kind"`   // rule or pool
	Name   string `json:"name"`   // of the pool, or the network of the rule
	Reason string `json:"reason"` // capacity, or share where the packet is beyond a fair share
	Sharer string `json:"sharer"` // who has that share; "" for capacity
}

// Reasons of a Refusal.
const (
	Capacity = "capacity"
	Share    = "share"
)

// Sharing is the fair shares of a rule or pool.
type Sharing struct {
	Share  string `json:"share"`  // none, host, /N, flow or member
	Sharer string `json:"sharer"` // of the packet; "" without shares, and where it is not known
	// WithinShare says whether the packet is within the fair share of its sharer; null where Sharer is "".
	WithinShare *bool `json:"within_share"`
	// ActiveSharers is how many sharers share now; null without shares, and unless it was asked for.
	ActiveSharers *uint64 `json:"active_sharers"`
}

// PoolLevel is the level of a pool, and what that means for a packet.
type PoolLevel struct {
	Name          string  `json:"name"`
	Within        string  `json:"within"` // "" for no pool
	RateBits      uint64  `json:"rate_bits_per_second"`
	GuaranteeBits *uint64 `json:"guarantee_bits_per_second"` // null for none
	LevelBytes    uint64  `json:"level_bytes"`
	CapacityBytes uint64  `json:"capacity_bytes"`
	Queue
	Conforms   bool `json:"conforms"`   // the pool has room for the packet
	Guarantees bool `json:"guarantees"` // the packet conforms to the pool's guarantee
	Sharing
	// What became of the packets within the pool since it was set; the dropped ones are those that it refused.
	PassedPackets  uint64 `json:"passed_packets"`
	DroppedPackets uint64 `json:"dropped_packets"`
}

// NewPoolLevel is a pool with a level in units.
func NewPoolLevel(r policy.Rule, level uint64) PoolLevel {
	return PoolLevel{
		Name: r.Label.Name, Within: string(r.Within), RateBits: uint64(r.Rate), GuaranteeBits: optionalRate(r.Guarantee),
		LevelBytes: model.Bytes(level), CapacityBytes: r.Capacity, Queue: NewQueue(r),
	}
}

// plain reports whether there are neither pools nor shares, so that the rule's bucket alone decides.
func (p Passage) plain() bool { return len(p.Pools) == 0 && p.Sharing.text() == "" }

// where is the limit that a packet exceeds, as "excess in pool a".
func (r Refusal) where() string {
	in := ""
	if r.Kind == KindPool {
		in = " in pool " + r.Name
	}
	if r.Reason == Share {
		return "beyond the fair share of " + r.Sharer + in
	}
	return "excess" + in
}

// become is what happens to packets now that meet pools or shares.
func (p Stop) become() string {
	r, beyond := p.RefusedBy, ""
	if r != nil && r.Reason == Share {
		beyond = "beyond the fair share of " + r.Sharer + ", and "
	}
	switch {
	case r != nil && p.Verdict == "pass":
		return "are excess, and pass"
	case r != nil && p.Verdict == "mark":
		return "are " + beyond + "marked by ECN now"
	case r != nil:
		return "are " + beyond + "dropped now"
	case p.WaitNS > 0 && p.unheld():
		return "pass now, NOT DELAYED"
	case p.WaitNS > 0 && p.Verdict == "mark":
		return "wait " + about(p.WaitNS) + ", marked by ECN"
	case p.WaitNS > 0:
		return "wait " + about(p.WaitNS)
	}
	return "pass now" + p.covers()
}

// unheld reports whether it is known that nothing delays packets.
func (p Stop) unheld() bool { return p.HeldBack != nil && !*p.HeldBack }

// throughPools is the verdict on a packet that meets pools or shares, and when there will be another one.
func (p Stop) throughPools(s *strings.Builder) {
	text := p.packet()
	switch r := p.RefusedBy; {
	case r != nil:
		fact(s, "now", text+" is "+r.where()+": "+excessBecomes[p.Verdict])
		fact(s, "later", "conforms in "+about(p.WaitNS)+", if no others come")
		return
	case p.Verdict == "lost":
		text += lost
	case p.WaitNS > 0 && p.unheld():
		text += " passes: nothing delays it by " + about(p.WaitNS)
	case p.WaitNS > 0 && p.Verdict == "mark":
		text += " waits " + about(p.WaitNS) + ", and is marked by ECN if it allows that"
	case p.WaitNS > 0:
		text += " waits " + about(p.WaitNS)
	default:
		text += " conforms, and passes" + p.covers()
	}
	fact(s, "now", text)
}

var excessBecomes = map[string]string{
	"drop": "dropped", "mark": "marked by ECN if the packet allows it, else dropped", "pass": "counted, and passes",
}

// covers says whether the rate of a packet that passes is guaranteed; "" where nothing is.
func (p Passage) covers() string {
	switch {
	case p.Guaranteed && p.GuaranteedBy == "":
		return ", guaranteed"
	case p.Guaranteed:
		return ", guaranteed by pool " + p.GuaranteedBy
	case p.Borrowed:
		return ", borrowed"
	}
	return ""
}

// text describes fair shares; "" without any.
func (s Sharing) text() string {
	if s.Share == "" || s.Share == (policy.Share{}).String() {
		return ""
	}
	text := "by " + s.Share
	if s.ActiveSharers != nil {
		text += ", " + countText(*s.ActiveSharers) + " active"
	}
	if s.WithinShare != nil && !*s.WithinShare {
		text += ", " + s.Sharer + " is beyond its share"
	}
	return text
}

// text describes a pool; decides says that it refuses the packet.
func (p PoolLevel) text(decides bool) string {
	text := p.Name
	if decides {
		text += ", decides"
	}
	text += ": " + policy.Rate(p.RateBits).String()
	if p.Within != "" {
		text += " within " + p.Within
	}
	if p.GuaranteeBits != nil {
		text += ", " + policy.Rate(*p.GuaranteeBits).String() + " guaranteed"
	}
	parts := []string{text, p.full()}
	if shares := p.Sharing.text(); shares != "" {
		parts = append(parts, "fair shares "+shares)
	}
	if all := p.PassedPackets + p.DroppedPackets; all > 0 {
		parts = append(parts, fmt.Sprintf("%s of %s refused", percentText(percentOf(p.DroppedPackets, all)), plain.Count(all, "packet")))
	}
	return strings.Join(parts, "; ")
}

// full says how full the bucket and the queue of a pool are together.
func (p PoolLevel) full() string {
	holds := p.holds(p.CapacityBytes)
	if p.LevelBytes == 0 {
		return fmt.Sprintf("empty, of %d bytes", holds)
	}
	return fmt.Sprintf("%d of %d bytes (%s full)", p.LevelBytes, holds, percent(p.LevelBytes, holds))
}
