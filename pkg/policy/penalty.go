package policy

import (
	"fmt"
	"strings"
	"time"
)

// MaxPenalty is the longest penalty.
const MaxPenalty = 24 * time.Hour

// PenaltyKind is the kind of a Penalty.
type PenaltyKind uint8

const (
	PenaltyNone PenaltyKind = iota
	PenaltyFill             // each excess packet fills the bucket
	PenaltyHold             // each excess packet keeps the bucket full for Penalty.Duration
)

// Penalty is what an excess packet does to its bucket. Duration is above zero and at most
// MaxPenalty for PenaltyHold, and zero for other kinds.
type Penalty struct {
	Kind     PenaltyKind
	Duration time.Duration
}

var penaltyNames = []string{PenaltyNone: "none", PenaltyFill: "fill", PenaltyHold: "time"}

func (p Penalty) String() string {
	if p.Kind == PenaltyHold {
		return timeString(p.Duration)
	}
	return nameOf(p.Kind, penaltyNames)
}

// Set parses "none", "fill", or a time such as "30s" in s, ms, us or ns.
func (p *Penalty) Set(s string) (err error) {
	var v Penalty
	switch s {
	case "none":
	case "fill":
		v.Kind = PenaltyFill
	default:
		v.Kind = PenaltyHold
		if v.Duration, err = parseTime("penalty", s, "none, fill or 30s"); err == nil {
			err = v.validate()
		}
	}
	if err == nil {
		*p = v
	}
	return err
}

func (p Penalty) Type() string { return strings.Join(penaltyNames, "|") }

func (p Penalty) validate() error {
	if err := checkName(p.Kind, "penalty", penaltyNames); err != nil {
		return err
	}
	switch {
	case p.Kind == PenaltyHold && p.Duration <= 0:
		return fmt.Errorf("penalty of %v is not above zero; write one such as 30s", p.Duration)
	case p.Kind != PenaltyHold && p.Duration != 0:
		return fmt.Errorf("penalty %v takes no time; leave out %v", p, p.Duration)
	case p.Duration > MaxPenalty:
		return fmt.Errorf("penalty %s is longer than %s, the longest penalty; shorten it", timeString(p.Duration), timeString(MaxPenalty))
	}
	return nil
}

func checkPenalty(r *Rule) error {
	if err := r.Penalty.validate(); err != nil {
		return err
	}
	if room := maxLevel - r.Capacity; bytesIn(r.Penalty.Duration, r.Rate) > room {
		return fmt.Errorf("penalty %v at %v is more than a bucket can count; shorten it to %ds or less, or lower the rate",
			r.Penalty, r.Rate, 8*room/uint64(r.Rate))
	}
	return nil
}
