package report

import (
	"bufio"
	"cmp"
	"fmt"
	"io"

	"github.com/shapectl/shapectl/internal/plain"
)

// Talkers are who used rules over an interval.
type Talkers struct {
	IntervalNS uint64        `json:"interval_ns"`
	Rules      []RuleTalkers `json:"rules"`
}

// RuleTalkers are the hosts that used a rule, or the flows of one of its hosts.
type RuleTalkers struct {
	Device    string `json:"device"`
	Direction string `json:"direction"`
	CIDR      string `json:"cidr"`
	Name      string `json:"name"`
	Host      string `json:"host"`

	OfferedBits *uint64  `json:"offered_bits_per_second"`
	PassedBits  *uint64  `json:"passed_bits_per_second"`
	Talkers     []Talker `json:"talkers"`
	LeftOut     int      `json:"left_out"`
	Note        string   `json:"note"`
}

// NewRuleTalkers are the talkers of a rule, none yet.
func NewRuleTalkers(r *Rule, host string) RuleTalkers {
	return RuleTalkers{Device: r.Device, Direction: r.Direction, CIDR: r.Item.Network, Name: r.Label.Name, Host: host, Talkers: []Talker{}}
}

// A Talker is a host or a flow.
type Talker struct {
	Key         string   `json:"key"`
	OfferedBits *uint64  `json:"offered_bits_per_second"` // nil in a top where this is not known
	PassedBits  *uint64  `json:"passed_bits_per_second"`
	LevelBytes  uint64   `json:"level_bytes"`
	FullPercent *float64 `json:"full_percent"`
}

// Text writes a table for each rule.
func (all Talkers) Text(w io.Writer, width int) error {
	text := bufio.NewWriter(w)
	for i := range all.Rules {
		r := &all.Rules[i]
		if i > 0 {
			fmt.Fprintln(text)
		}
		if err := r.text(text, width); err != nil {
			return err
		}
	}
	return text.Flush()
}

func (t *RuleTalkers) text(w io.Writer, width int) error {
	head, what := "HOST", "host"
	where := plain.Line(t.Device) + " " + t.Direction + " " + t.CIDR
	if t.Name != "" {
		where = plain.Line(t.Name) + " (" + where + ")"
	}
	if t.Host != "" {
		head, what = "FLOW", "flow"
		where = t.Host + " in " + where
	}
	fmt.Fprintf(w, "%s: %s offered, %s passed\n", where, cmp.Or(optional(t.OfferedBits, Bits), "?"), cmp.Or(optional(t.PassedBits, Bits), "?"))
	if len(t.Talkers) > 0 {
		err := writeTable(w, t.Talkers, []column[Talker]{
			{head: head, cell: func(t *Talker) string { return t.Key }, always: true},
			{head: "OFFERED", right: true, always: true, cell: func(t *Talker) string { return optional(t.OfferedBits, Bits) }},
			{head: "PASSED", right: true, cell: func(t *Talker) string { return optional(t.PassedBits, Bits) }},
			{head: "LEVEL", right: true, drop: 1, cell: func(t *Talker) string {
				if t.FullPercent == nil {
					return ""
				}
				return Bytes(t.LevelBytes)
			}},
			{head: "FULL", right: true, drop: 1, cell: func(t *Talker) string { return optional(t.FullPercent, percentText) }},
		}, width)
		if err != nil {
			return err
		}
	}
	if t.LeftOut > 0 {
		fmt.Fprintf(w, "and %s\n", plain.Count(t.LeftOut, "more "+what))
	}
	if t.Note != "" {
		fmt.Fprintln(w, t.Note)
	}
	return nil
}
