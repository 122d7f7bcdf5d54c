package report

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
)

// Talkers are who used rules over an interval.
type Talkers struct {
	IntervalNS uint64        `json:"interval_ns"`
	Rules      []RuleTalkers `json:"rules"`

	rows []live.Row // of all rules
	of   int
	by   string
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

// A Talker is a host or a flow.
type Talker struct {
	Key         string   `json:"key"`
	OfferedBits *uint64  `json:"offered_bits_per_second"`
	PassedBits  *uint64  `json:"passed_bits_per_second"`
	LevelBytes  uint64   `json:"level_bytes"`
	FullPercent *float64 `json:"full_percent"`
	UsedBytes   *uint64  `json:"quota_used_bytes"`
	LeftBytes   *uint64  `json:"quota_left_bytes"`
}

// NewTalkers are those who sent anything, in the order of a view, and of each rule as many as it has.
func NewTalkers(interval time.Duration, uses []live.Use, v live.View) Talkers {
	all := Talkers{IntervalNS: uint64(interval), Rules: []RuleTalkers{}, by: v.By}
	for _, u := range uses {
		rows, of := v.Arrange(slices.DeleteFunc(slices.Clone(u.Parts), func(r live.Row) bool { return !r.Part.Offered.Known }))
		one := RuleTalkers{
			Device: u.Device, Direction: u.Direction, CIDR: u.Network, Name: u.Label.Name, Host: u.Host,
			OfferedBits: bits(u.Offered), PassedBits: bits(u.Passed), Talkers: []Talker{}, LeftOut: of - len(rows), Note: u.Note,
		}
		for _, r := range rows {
			one.Talkers = append(one.Talkers, Talker{r.Part.Name, bits(r.Part.Offered), bits(r.Part.Passed), r.Part.Bytes, percentOrNull(r.Part.Full), r.Part.UsedBytes, r.Part.LeftBytes})
		}
		all.Rules, all.rows, all.of = append(all.Rules, one), append(all.rows, rows...), all.of+of
	}
	all.rows, _ = v.Arrange(all.rows)
	return all
}

// Text writes a line for each rule, and a table of all talkers.
func (all Talkers) Text(w io.Writer, width int) error {
	text := bufio.NewWriter(w)
	for _, r := range all.Rules {
		where := plain.Line(r.Device) + " " + r.Direction + " " + r.CIDR
		if r.Name != "" {
			where = plain.Line(r.Name) + " (" + where + ")"
		}
		if r.Host != "" {
			where = r.Host + " in " + where
		}
		fmt.Fprintf(text, "%s: %s offered, %s passed\n", where, cmp.Or(optional(r.OfferedBits, Bits), "?"), cmp.Or(optional(r.PassedBits, Bits), "?"))
		if r.Note != "" {
			fmt.Fprintln(text, r.Note)
		}
	}
	writeRows(text, all.rows, all.by, width)
	if n := len(all.rows); n < all.of {
		fmt.Fprintf(text, "%d of %s\n", n, plain.Count(all.of, all.by))
	}
	return text.Flush()
}
