package report

import (
	"fmt"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A QuotaUse is how much of a quota is used.
type QuotaUse struct {
	UsedBytes uint64  `json:"quota_used_bytes"`
	LeftBytes uint64  `json:"quota_left_bytes"`
	EndsNS    *uint64 `json:"quota_ends_in_ns"`
	UsedUp    bool    `json:"used_up"`              // whether then is in force
	ThenBits  uint64  `json:"then_bits_per_second"` // rate once the quota is used up; 0 if packets are dropped then

	then policy.Then
}

// NewQuotaUse is the use of a quota of a; nil without one.
func NewQuotaUse(a policy.Also, q maps.Quota) *QuotaUse {
	if a.Quota.Bytes == 0 {
		return nil
	}
	use := &QuotaUse{UsedBytes: q.UsedBytes, LeftBytes: q.LeftBytes, EndsNS: history.NotZero(q.EndsNS), UsedUp: q.UsedUp(), then: a.Then}
	if a.Then != policy.ThenDrop {
		use.ThenBits = uint64(a.Then)
	}
	return use
}

func (q *QuotaUse) text() string {
	then, until := "packets are dropped", "it comes back steadily"
	if q.ThenBits != 0 {
		then = q.then.String() + " is in force"
	}
	if q.EndsNS != nil {
		until = "the period ends in " + longTime(*q.EndsNS)
	}
	if q.UsedUp {
		return fmt.Sprintf("used up (%s), so %s; %s", Bytes(q.UsedBytes), then, until)
	}
	return fmt.Sprintf("%s used, %s left, then %s; %s", Bytes(q.UsedBytes), Bytes(q.LeftBytes), then, until)
}

// leftText is what is left of a quota, or which limit is in force instead.
func leftText(left uint64, q maps.Quota, then policy.Then) string {
	if q.UsedUp() {
		return "used up: " + then.String()
	}
	return Bytes(left)
}

// longTime is About for days.
func longTime(ns uint64) string {
	const day = 24 * 3600e9
	if ns < 3*day {
		return About(ns)
	}
	return plain.Count(int(ns/day), "day")
}
