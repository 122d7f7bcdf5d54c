package report

import (
	"time"

	"github.com/shapectl/shapectl/internal/live"
)

// A Top is what rules and pools do now.
type Top struct {
	Time       string `json:"time"`        // RFC 3339
	IntervalNS uint64 `json:"interval_ns"` // over which use and drops were measured; 0 if they were not
	Of         int    `json:"of"`          // how many rows there are without a search and a number of rows
	// Summary is what all rules do together.
	Summary Summary `json:"summary"`
	// Rules are rules and pools, in the order that was asked for.
	Rules []TopRule `json:"rules"`
	// Names are names, in that order; null unless they were asked for. Rules are then those without a name. Of a tree, it is
	// the name that was asked for.
	Names []TopName `json:"names"`
	// The fullest buckets of hosts, subnets and flows, the fullest first.
	Fullest []FullBucket `json:"fullest_buckets"`
	// RevertsInNS is null unless a change is pending.
	RevertsInNS *uint64 `json:"reverts_in_ns"`
}

// A Summary is what all rules do together.
type Summary struct {
	Rules       int    `json:"rules"`
	Pools       int    `json:"pools"`
	Named       int    `json:"named"`                   // rules that have a name
	NotInForce  int    `json:"not_in_force"`            // rules
	Dropping    int    `json:"dropping"`                // rules that drop packets now
	Near        int    `json:"near"`                    // other rules that use at least 90% of their rate
	PassedBits  uint64 `json:"passed_bits_per_second"`  // of all rules
	DroppedBits uint64 `json:"dropped_bits_per_second"` // of all rules
}

// A TopRule is a rule or pool that is a row of a Top.
type TopRule struct {
	Rule
	TopRow
}

// MarshalJSON has the keys of both.
func (r TopRule) MarshalJSON() ([]byte, error) {
	rule, err := r.Rule.MarshalJSON()
	return oneObject(rule, r.TopRow, err)
}

// A TopName is a name that is a row of a Top.
type TopName struct {
	Named
	TopRow
	Plan        string   `json:"plan"`                    // of its first rule
	DroppedBits uint64   `json:"dropped_bits_per_second"` // of all its rules
	UsePercent  *float64 `json:"use_percent"`             // of the direction that uses most of its rate; null where that is not known
}

// A TopRow is what a row of a Top is and does.
type TopRow struct {
	Row      int    `json:"row"`      // its place in the order, from 0; -1 of the name that a tree is of
	Depth    int    `json:"depth"`    // the number of pools above it in a tree
	Below    int    `json:"below"`    // how many rules and pools are directly within it
	Activity string `json:"activity"` // what it does now: out (not in force), dropping, near (its rate), busy or idle
	// FullPercent is the level of its bucket, or of its fullest one, in percent of what that and its queue can hold; null
	// without a limit.
	FullPercent *float64 `json:"full_percent"`
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

// NewTop is the rows of a view.
func NewTop(r *live.Reading, v live.View) Top {
	rows, of := r.Rows(v)
	all := r.Summary(v.Chosen)
	out := Top{
		Time: r.Time.Format(time.RFC3339Nano), IntervalNS: uint64(r.Interval), Of: of, Rules: []TopRule{}, Fullest: []FullBucket{}, RevertsInNS: r.RevertsInNS,
		Summary: Summary{all.Rules, all.Pools, all.Named, all.Out, all.Dropping, all.Near, uint64(all.Passed), uint64(all.Dropped)},
	}
	if v.By == "name" {
		out.Names = []TopName{}
	}
	for i := range rows {
		if row := newTopRow(&rows[i], i); rows[i].Name == nil {
			out.Rules = append(out.Rules, TopRule{NewRule(rows[i].Item), row})
		} else {
			out.Names = append(out.Names, newTopName(&rows[i], row))
		}
	}
	if v.By == "tree" && v.Name != "" {
		names, _ := r.Rows(live.View{By: "name", Name: v.Name, Chosen: v.Chosen})
		for i := range names {
			out.Names = append(out.Names, newTopName(&names[i], newTopRow(&names[i], -1)))
		}
	}
	for _, b := range r.Fullest {
		if v.Chosen == nil || v.Chosen(b.Item) {
			out.Fullest = append(out.Fullest, FullBucket{b.Device, b.Direction, b.Network, b.Label.Name, NewBucket(b.Item, b.Bucket), b.Percent})
		}
	}
	return out
}

func newTopRow(r *live.Row, at int) TopRow {
	row := TopRow{Row: at, Depth: r.Depth, Activity: r.Activity(), FullPercent: knownOrNull(r.Level)}
	if r.Item != nil {
		row.Below = r.Below()
	}
	return row
}

func newTopName(r *live.Row, row TopRow) TopName {
	return TopName{NewNamed(r), row, r.All()[0].Label.Plan, uint64(r.Dropped), knownOrNull(r.OfRate)}
}

// knownOrNull is a percentage of a row, which is negative where it is not known.
func knownOrNull(percent float64) *float64 {
	if percent < 0 {
		return nil
	}
	return &percent
}
