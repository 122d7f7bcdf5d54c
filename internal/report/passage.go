package report

import (
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Passage is what a packet meets in a rule and the pools above it. Names are the network of a rule, or the name of a pool.
type Passage struct {
	// RefusedBy is the level that the packet exceeds; null where it conforms, and where that is not known.
	RefusedBy *string `json:"refused_by"`
	// RefusedReason is capacity; share where the packet is beyond a fair share; packets, flows or quota where another limit refuses
	// it; "" without RefusedBy.
	RefusedReason string `json:"refused_reason"`
	// BorrowedBy are those of them whose guarantees the packet passes beyond, the lowest first.
	BorrowedBy []string  `json:"borrowed_by"`
	Quota      *QuotaUse `json:"quota"` // what is used of the rule's quota, or of that of a host, subnet or flow; null without one
	// GuaranteedBy has the guarantee that lets the packet pass the pools above; null for none.
	GuaranteedBy *string `json:"guaranteed_by"`
	Sharing
	Pools []PoolLevel `json:"pools"` // above the rule, the lowest first
	// WatchedNS is for how long packets were counted before the answer; 0 if they were not.
	WatchedNS uint64 `json:"watched_ns"`
	// UseBits is the rate of the rule's packets that passed meanwhile; null if they were not counted.
	UseBits *uint64 `json:"use_bits_per_second"`
	// LimitedBy is the level that limited the packets meanwhile; null if none did.
	LimitedBy *string `json:"limited_by"`
	// LimitedReason is packets, flows or quota if that limit of it refused most of the packets that it refused; else "".
	LimitedReason string      `json:"limited_reason"`
	Limited       policy.Also `json:"-"`              // limits of LimitedBy
	RecentPackets uint64      `json:"recent_packets"` // of the rule meanwhile
	RecentDrops   uint64      `json:"recent_drops"`   // the dropped ones among them
}

// Values of RefusedReason.
const (
	Capacity       = "capacity"
	Share          = "share"
	TooManyPackets = "packets"
	TooManyFlows   = "flows"
	UsedUp         = "quota"
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
	Name          string    `json:"name"`
	Within        string    `json:"within"` // "" for no pool
	RateBits      uint64    `json:"rate_bits_per_second"`
	GuaranteeBits *uint64   `json:"guarantee_bits_per_second"` // null for none
	LevelBytes    uint64    `json:"level_bytes"`
	CapacityBytes uint64    `json:"capacity_bytes"`
	HoldsBytes    uint64    `json:"holds_bytes"` // the bucket and its queue together
	Full          bool      `json:"full"`        // as it is while more is offered than its rate
	Conforms      bool      `json:"conforms"`    // it has room for the packet
	WaitNS        uint64    `json:"wait_ns"`     // until it has, if no others come
	Quota         *QuotaUse `json:"quota"`       // what is used of its quota; null without one
	Guarantees    bool      `json:"guarantees"`  // the packet conforms to the pool's guarantee
	Sharing
	// What the pool passed and refused since it was set.
	PassedPackets  uint64 `json:"passed_packets"`
	RefusedPackets uint64 `json:"refused_packets"`
	// What it passed and refused while packets were counted; null and 0 if they were not.
	UseBits        *uint64 `json:"use_bits_per_second"`
	RecentRefusals uint64  `json:"recent_refusals"`

	also policy.Also
}

// A Load is what a rule or pool did while packets were counted.
type Load struct {
	Use, Rate uint64 // bits per second; a rate of 0 is none, or not one for all packets
	Refuses   bool   // packets, or marks or delays them
	Full      bool
	Shares    bool // it has fair shares
	Spends    bool // it used all of its rate, as its bucket was never empty
}

// uses reports whether it used so many percent of its rate.
func (l Load) uses(percent uint64) bool { return l.Rate > 0 && l.Use >= l.Rate/100*percent }

// A level may be the one that limits from so many percent of its rate.
const near, busy = 85, 75

// AtRate reports whether it is full, and not only for a moment.
func (l Load) AtRate() bool { return l.Full && l.uses(near) }

// NoLimiter stands for no level.
const NoLimiter = -1

// Limiter is which of some levels, the lowest first, limited the packets: the lowest one that is near its rate, and
// spends all of it, is full, or refuses packets. If none is, it is the lowest one that refuses packets. But fair shares
// also refuse what a busy pool above does not leave them: then it is that pool.
func Limiter(levels []Load) int {
	if i := slices.IndexFunc(levels, func(l Load) bool { return (l.Refuses || l.Full || l.Spends) && l.uses(near) }); i >= 0 {
		return i
	}
	refusing := slices.IndexFunc(levels, func(l Load) bool { return l.Refuses })
	if refusing < 0 {
		return NoLimiter
	}
	if l := levels[refusing]; l.Shares && !l.uses(near) {
		busiest := refusing
		for i := refusing + 1; i < len(levels); i++ {
			if a, b := levels[i], levels[busiest]; a.uses(busy) && float64(a.Use)*float64(b.Rate) > float64(b.Use)*float64(a.Rate) {
				busiest = i
			}
		}
		return busiest
	}
	return refusing
}

// NewPoolLevel is a pool with a level in units.
func NewPoolLevel(r policy.Rule, level uint64) PoolLevel {
	return PoolLevel{
		Name: r.Label.Name, Within: string(r.Within), RateBits: uint64(r.Rate), GuaranteeBits: history.NotZero(uint64(r.Guarantee)),
		LevelBytes: model.Bytes(level), CapacityBytes: r.Capacity, HoldsBytes: r.Capacity + r.Queue, also: r.Also,
	}
}

// Pool is the number of the pool with a name; -1 for a rule, and for no name.
func (p *Passage) Pool(name *string) int {
	for i := range p.Pools {
		if name != nil && p.Pools[i].Name == *name {
			return i
		}
	}
	return -1
}

// limit names a rule or pool.
func (p *Passage) limit(name *string) string {
	if p.Pool(name) >= 0 {
		return "pool " + *name
	}
	return *name
}

// limitedText says which level limited packets just now, and by which limit.
func (p *Passage) limitedText() string {
	text := "; " + p.limit(p.LimitedBy) + " limited such packets just now"
	switch p.LimitedReason {
	case TooManyPackets:
		text += ", as there were more than " + p.Limited.Packets.String() + " packets per second"
	case TooManyFlows:
		text += ", as there were more than " + p.Limited.Flows.String() + " new flows per second"
	case UsedUp:
		text += ", as its quota is used up"
	}
	return text
}

// FullFrom is the lowest full pool from a number on; -1 for none.
func (p *Passage) FullFrom(from int) int {
	for i := from; i < len(p.Pools); i++ {
		if p.Pools[i].Full {
			return i
		}
	}
	return -1
}

// useText is how much of a rate is used, as far as that is known.
func useText(use *uint64, rate uint64) string {
	text := policy.Rate(rate).String()
	if use != nil {
		text = Bits(*use) + " of " + text
		if *use > rate+rate/20 {
			text += " (its burst)"
		}
	}
	return text
}

// sharers are those that are active, as "2 active members"; "" without shares, and if none is: traffic below the rate has no
// part of it.
func (s *Sharing) sharers() string {
	noun := s.Share
	switch {
	case s.Share == "" || s.Share == (policy.Share{}).String(), s.ActiveSharers != nil && *s.ActiveSharers == 0:
		return ""
	case strings.HasPrefix(s.Share, "/"):
		noun += " subnet"
	}
	if s.ActiveSharers == nil {
		return "its " + noun + "s"
	}
	return plain.Count(*s.ActiveSharers, "active "+noun)
}

// covers says whether the rate of a packet that passes is guaranteed, or who borrows it; "" where nothing is guaranteed.
func (p *Passage) covers() (text string) {
	if len(p.BorrowedBy) > 0 {
		text = ", borrowed by " + strings.Join(p.BorrowedBy, " and ")
	}
	if i := p.Pool(p.GuaranteedBy); i >= 0 {
		return text + ", guaranteed by pool " + p.Pools[i].Name
	}
	if p.GuaranteedBy != nil {
		text += ", guaranteed"
	}
	return text
}

// text describes fair shares; "" without any.
func (s *Sharing) text() string {
	if s.Share == "" || s.Share == (policy.Share{}).String() {
		return ""
	}
	text := "by " + s.Share
	if number(s.ActiveSharers, 0) > 0 {
		text += ", " + countText(*s.ActiveSharers) + " active"
	}
	if s.WithinShare != nil && !*s.WithinShare {
		text += ", " + s.Sharer + " is beyond its share"
	}
	return text
}

// text describes a pool.
func (p *PoolLevel) text() string {
	rule := policy.Rule{Rate: policy.Rate(p.RateBits), Also: p.also}
	text := p.Name + ": " + ratesOf(&rule)
	if p.GuaranteeBits != nil {
		text += ", " + policy.Rate(*p.GuaranteeBits).String() + " guaranteed"
	}
	state := "empty"
	switch use := number(p.UseBits, 0); {
	case use > 0 && p.Full:
		state = "full, " + Bits(*p.UseBits) + " used now"
	case use > 0:
		state = Bits(*p.UseBits) + " used now"
	case p.Full:
		state = "full"
	case rule.AnyRate():
		state = "not full"
	case p.LevelBytes > 0:
		state = percentText(percentOf(p.LevelBytes, p.HoldsBytes)) + " full"
	}
	parts := []string{text, state}
	if p.Quota != nil {
		parts = append(parts, "quota: "+p.Quota.text())
	}
	if number(p.ActiveSharers, 0) > 0 {
		parts = append(parts, p.sharers())
	}
	if all := p.PassedPackets + p.RefusedPackets; all > 0 {
		parts = append(parts, percentText(percentOf(p.RefusedPackets, all))+" refused")
	}
	if p.RecentRefusals > 0 {
		parts[len(parts)-1] += ", " + plain.Count(p.RecentRefusals, "packet") + " just now"
	}
	return strings.Join(parts, "; ")
}
