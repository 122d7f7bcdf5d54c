package report

import (
	"fmt"
	"time"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A QuotaUse is how much of a quota is used.
type QuotaUse struct {
	Bytes     uint64  `json:"quota_bytes"` // of a period, without the grace
	UsedBytes uint64  `json:"quota_used_bytes"`
	LeftBytes uint64  `json:"quota_left_bytes"`
	EndsNS    *uint64 `json:"quota_ends_in_ns"`
	UsedUp    bool    `json:"used_up"`              // whether then is in force
	ThenBits  uint64  `json:"then_bits_per_second"` // rate once the quota is used up; 0 if packets are dropped then

	also policy.Also
}

// NewQuotaUse is the use of a quota of a; nil without one.
func NewQuotaUse(a policy.Also, q maps.Quota) *QuotaUse {
	if a.Quota.Bytes == 0 {
		return nil
	}
	use := &QuotaUse{Bytes: a.Quota.Bytes, UsedBytes: q.UsedBytes, LeftBytes: q.LeftBytes, EndsNS: history.NotZero(q.EndsNS), UsedUp: q.UsedUp(), also: a}
	if a.Then != policy.ThenDrop {
		use.ThenBits = uint64(a.Then)
	}
	return use
}

func (q *QuotaUse) text() string {
	then, until := "packets are dropped", "it comes back steadily"
	if q.ThenBits != 0 {
		then = q.also.Then.String() + " is in force"
	}
	if q.EndsNS != nil {
		until = "the period ends in " + longTime(*q.EndsNS)
	}
	if q.UsedUp {
		return fmt.Sprintf("used up (%s), so %s; %s", Bytes(q.UsedBytes), then, until)
	}
	return fmt.Sprintf("%s used, %s left, then %s; %s", Bytes(q.UsedBytes), Bytes(q.LeftBytes), then, until)
}

// usedUp says what who has got instead of the full rate, and until when; "" while something is left.
func (q *QuotaUse) usedUp(who string) string {
	if q == nil || !q.UsedUp {
		return ""
	}
	gets, until := "nothing", "enough of it comes back"
	if q.ThenBits != 0 {
		gets = q.also.Then.String()
	}
	if q.EndsNS != nil {
		end := time.Now().Add(time.Duration(*q.EndsNS)).Round(time.Minute) // periods begin with a minute; the figure is a second old
		if in, err := q.also.Zone.Location(); err == nil {
			end = end.In(in)
		}
		if until = end.Format("2006-01-02 15:04"); q.also.Zone != "" {
			until += " (" + string(q.also.Zone) + ")"
		}
	}
	return fmt.Sprintf("%s has used up its quota of %s and gets %s until %s", who, Bytes(q.Bytes), gets, until)
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
