package report

import (
	"cmp"
	"slices"
	"time"
)

// Worst is the order of rules that drop most now, and then of those nearest to their rate. It needs an interval.
const Worst = "worst"

// worst compares by Worst. What a pool drops is in the counters of rules, too, so rules come before pools.
func worst(a, b *Rule) int {
	dropped := func(r *Rule) float64 {
		if r.IsPool() {
			return 0
		}
		return number(r.DroppedBits, 0)
	}
	return cmp.Or(
		cmp.Compare(dropped(b), dropped(a)),
		cmp.Compare(number(b.ExcessPercent, 0), number(a.ExcessPercent, 0)),
		cmp.Compare(number(b.UsePercent, -1), number(a.UsePercent, -1)),
		cmp.Compare(number(b.UseBits, -1), number(a.UseBits, -1)),
	)
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
	sorted.Sort(Worst, false)
	if fullest == nil {
		fullest = []FullBucket{}
	}
	return Top{at.Format(time.RFC3339Nano), uint64(interval), sorted, fullest, revertsInNS}
}
