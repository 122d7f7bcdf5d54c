package history

import "time"

// A Delivery is what rules or a pool passed and dropped over time, beside what they were to pass. docs/reference/json.md says
// what the fields are.
type Delivery struct {
	Kind              string           `json:"kind"`
	Device            string           `json:"device"`
	Direction         string           `json:"direction"`
	Networks          []string         `json:"networks"`
	Rules             uint64           `json:"rules"`
	Name              string           `json:"name"`
	Plan              string           `json:"plan"`
	Since             time.Time        `json:"since"`
	Until             time.Time        `json:"until"`
	IntervalNS        uint64           `json:"interval_ns"`
	MeasuredNS        uint64           `json:"measured_ns"`
	RateBits          *uint64          `json:"rate_bits_per_second"`
	CapacityBytes     *uint64          `json:"capacity_bytes"`
	Each              string           `json:"each"`
	GuaranteeBits     *uint64          `json:"guarantee_bits_per_second"`
	Pools             []DeliveryPool   `json:"pools"`
	Aware             bool             `json:"colour_aware"`
	Quota             string           `json:"quota"`
	Other             string           `json:"other_limit"`
	CommittedBits     *uint64          `json:"committed_bits_per_second"`
	CommittedBy       string           `json:"committed_by"`
	OfferedBytes      uint64           `json:"offered_bytes"`
	PassedBytes       uint64           `json:"passed_bytes"`
	DroppedBytes      uint64           `json:"dropped_bytes"`
	RefusedBytes      *uint64          `json:"refused_bytes"`
	Offered           Rates            `json:"offered"`
	Passed            Rates            `json:"passed"`
	FullNS            uint64           `json:"full_ns"`
	Checked           uint64           `json:"checked_intervals"`
	Delivered         uint64           `json:"delivered_intervals"`
	Unchecked         uint64           `json:"unchecked_intervals"`
	Undecided         uint64           `json:"undecided_intervals"`
	WithinBytes       uint64           `json:"offered_within_committed_bytes"`
	WithinPassedBytes uint64           `json:"passed_within_committed_bytes"`
	Missed            []Missed         `json:"missed"`
	Gaps              []DeliveryGap    `json:"gaps"`
	Changes           []DeliveryChange `json:"changes"`
	Periods           []Period         `json:"periods"`
}

// A DeliveryPool is a pool above, as it was at the end.
type DeliveryPool struct {
	Name          string  `json:"name"`
	RateBits      *uint64 `json:"rate_bits_per_second"`
	GuaranteeBits *uint64 `json:"guarantee_bits_per_second"`
}

// Rates are those of a report, in bits per second; null where nothing was measured.
type Rates struct {
	P95       *uint64    `json:"p95_5min_bits_per_second"`
	Largest   *uint64    `json:"largest_bits_per_second"`
	LargestAt *time.Time `json:"largest_at"`
}

// A Span is a part of the time.
type Span struct {
	Begin time.Time `json:"begin"`
	End   time.Time `json:"end"`
}

// A Missed interval is one in which a committed rate was not delivered.
type Missed struct {
	Span
	OfferedBytes uint64 `json:"offered_bytes"`
	PassedBytes  uint64 `json:"passed_bytes"`
	DueBytes     uint64 `json:"due_bytes"`
}

// A DeliveryGap is a time without readings, or without the rules.
type DeliveryGap struct {
	Span
	Reason       string  `json:"reason"`
	OfferedBytes *uint64 `json:"offered_bytes"`
	PassedBytes  *uint64 `json:"passed_bytes"`
}

// Reasons of a DeliveryGap.
const (
	noData    = "no data"
	noReading = "no readings" // nobody read the counters; what they counted meanwhile is known
	restarted = "the host was restarted"
	slept     = "the host slept"
	clockSet  = "the clock was set forward"
	absent    = "no such rule" // others were read meanwhile
)

// A DeliveryChange is a change of parameters, or of the clock. It came between two readings, or was so at the first one.
type DeliveryChange struct {
	Span
	What string `json:"what"`
}

// A Period is five minutes of a report.
type Period struct {
	Span
	MeasuredNS    uint64  `json:"measured_ns"`
	OfferedBits   uint64  `json:"offered_bits_per_second"`
	PassedBits    uint64  `json:"passed_bits_per_second"`
	RateBits      *uint64 `json:"rate_bits_per_second"`
	CommittedBits *uint64 `json:"committed_bits_per_second"`
}

// Kinds of a Delivery.
const (
	KindRule  = "rule"
	KindRules = "rules" // several, summed up
	KindPool  = "pool"
)
