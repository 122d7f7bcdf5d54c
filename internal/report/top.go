package report

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Worst is the order of rules that are not in force first. Then come those that drop, and pools that refuse, most now, those
// with the largest share of excess packets, and those nearest to their rate. docs/top.md says so.
const Worst = "worst"

// Refusing is the rate of packets that the rule drops or the pool itself refuses. What a pool lets through, rules within it
// may still drop.
func (r *Rule) Refusing() float64 {
	if r.IsPool() {
		return number(r.RefusedBits, 0)
	}
	return number(r.DroppedBits, 0)
}

// idle reports whether the rule is not in force, as far as it is known.
func (r *Rule) idle() bool { return r.Attached != nil && !*r.Attached }

// sortWorst sorts by Worst. full is the level of the fullest bucket in percent, by rule.
func (rules Rules) sortWorst(full map[Key]float64) {
	rules.SortByDevice()
	near := func(r *Rule) float64 { // in whole percent, so that the order is calm
		return math.Round(number(r.UsePercent, full[r.Key()]))
	}
	rules.stable(func(a, b *Rule) int {
		if a.idle() != b.idle() {
			if a.idle() {
				return -1
			}
			return 1
		}
		c := cmp.Compare(b.Refusing(), a.Refusing())
		if c == 0 && a.Refusing() > 0 && a.IsPool() != b.IsPool() { // the same packets: the rule says whose they are
			if a.IsPool() {
				return 1
			}
			return -1
		}
		return cmp.Or(
			c,
			cmp.Compare(number(b.ExcessPercent, 0), number(a.ExcessPercent, 0)),
			cmp.Compare(near(b), near(a)),
			cmp.Compare(number(b.UseBits, 0), number(a.UseBits, 0)),
		)
	})
}

// A Top is what all rules and pools do now.
type Top struct {
	Time       string `json:"time"`        // RFC 3339
	IntervalNS uint64 `json:"interval_ns"` // over which use and drops were measured; 0 if they were not
	// Rules are rules and pools, in the order of Worst.
	Rules []Rule `json:"rules"`
	// The fullest buckets of hosts, subnets and flows, the fullest first.
	Fullest []FullBucket `json:"fullest_buckets"`
	// RevertsInNS is null unless a change is pending.
	RevertsInNS *uint64 `json:"reverts_in_ns"`
}

// A FullBucket is one of the fullest buckets of all rules.
type FullBucket struct {
	Device    string `json:"device"`
	Direction string `json:"direction"`
	CIDR      string `json:"cidr"`
	Name      string `json:"name"` // of the rule; "" for none
	Bucket
	FullPercent float64 `json:"full_percent"` // the level in percent of what the bucket and its queue can hold
}

// RuleKey is the key of the rule.
func (b *FullBucket) RuleKey() Key {
	return Key{Device: b.Device, Direction: b.Direction, Network: b.CIDR}
}

// NewFullBucket is a bucket of a rule.
func NewFullBucket(r *Rule, b Bucket, percent float64) FullBucket {
	return FullBucket{r.Device, r.Direction, r.CIDR, r.Name, b, percent}
}

// NewTop sorts a copy of rules.
func NewTop(at time.Time, interval time.Duration, rules Rules, fullest []FullBucket, revertsInNS *uint64) Top {
	sorted := slices.Clone(rules)
	full := map[Key]float64{}
	for i := range fullest {
		key := fullest[i].RuleKey()
		full[key] = max(full[key], fullest[i].FullPercent)
	}
	sorted.sortWorst(full)
	if fullest == nil {
		fullest = []FullBucket{}
	}
	return Top{at.Format(time.RFC3339Nano), uint64(interval), sorted, fullest, revertsInNS}
}
