package report

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/replay"
	"github.com/shapectl/shapectl/pkg/policy"
)

// AppendReplayed appends a line of JSON with the result of a packet. Packets with addresses
// have a rule and a bucket key. Packets of rules with colours have a colour. With pools, a packet has the rule or pool that refused it and the one that guaranteed it.
func AppendReplayed(b []byte, r replay.Result, l replay.Limits, addressed bool) []byte {
	b = strconv.AppendUint(append(b, `{"time_ns":`...), r.Time, 10)
	b = strconv.AppendUint(append(b, `,"bytes":`...), r.Bytes, 10)
	b = append(append(b, `,"verdict":"`...), r.Verdict.String()...)
	b = append(b, `","depart_ns":`...)
	if r.Verdict == model.Drop {
		b = append(b, "null"...)
	} else {
		b = strconv.AppendUint(b, r.Departure(), 10)
	}
	b = strconv.AppendUint(append(b, `,"level_bytes":`...), r.LevelBytes(), 10)
	b = strconv.AppendBool(append(b, `,"conforms":`...), !r.Excess)
	if r.Rule != replay.NoRule && l.Rules[r.Rule].Algorithm.HasColours() {
		b = append(append(b, `,"colour":"`...), r.Colour.String()...)
		b = strconv.AppendUint(append(b, `","second_level_bytes":`...), r.SecondBytes(), 10)
		b = append(b, `,"dscp_out":`...)
		if r.Verdict == model.Drop {
			b = append(b, "null"...)
		} else {
			b = strconv.AppendUint(b, uint64(r.DSCP), 10)
		}
	}
	switch {
	case addressed && r.Rule == replay.NoRule:
		b = append(b, `,"rule":null,"key":null`...)
	case addressed:
		b = l.Rules[r.Rule].Prefix.AppendTo(append(b, `,"rule":"`...))
		b = append(append(b, `","key":"`...), l.Key(r)...)
		b = append(b, '"')
		if l.Rules[r.Rule].Share.Kind != policy.ShareNone {
			b = append(append(b, `,"sharer":"`...), l.Sharer(r)...)
			b = append(b, '"')
		}
	}
	if len(l.Pools) > 0 {
		b = appendName(append(b, `,"refused_by":`...), r.RefusedBy)
		b = appendName(append(b, `,"guaranteed_by":`...), r.GuaranteedBy)
	}
	return append(b, "}\n"...)
}

// appendName appends a name as JSON, null for an empty one.
func appendName(b []byte, name string) []byte {
	if name == "" {
		return append(b, "null"...)
	}
	text, _ := json.Marshal(name) // a string has no error
	return append(b, text...)
}

// A Replay is the effect of limits on a trace.
type Replay struct {
	Trace     string   `json:"trace"`
	Engine    string   `json:"engine"`
	Sentences []string `json:"sentences"` // of each rule, then of each pool

	// Mixed is true if the rules of a policy differ. The next fields are those of the first one.
	Mixed         bool   `json:"mixed"`
	Algorithm     string `json:"algorithm"`
	Match         string `json:"match"`
	Each          string `json:"each"`
	Excess        string `json:"excess"`
	RateBits      uint64 `json:"rate_bits_per_second"`
	CapacityBytes uint64 `json:"capacity_bytes"`
	Queue

	// Complete is true if the trace was read to its end.
	Complete bool `json:"complete"`

	replay.Figures

	limits replay.Limits
}

// NewReplay returns what limits and a summary say. The caller adds the trace, the engine, the
// sentences, and whether it is complete.
func NewReplay(l replay.Limits, s *replay.Summary) Replay {
	rule := l.Rules[0]
	r := Replay{
		Algorithm: rule.Algorithm.String(), Match: l.Match.String(), Each: rule.Each.String(), Excess: rule.Excess.String(),
		RateBits: uint64(rule.Rate), CapacityBytes: rule.Capacity, Queue: NewQueue(rule),
		Figures: s.Sum(), limits: l,
	}
	for _, other := range l.Rules {
		other.Prefix = rule.Prefix
		r.Mixed = r.Mixed || other != rule
	}
	return r
}

// Text writes a table and some lines.
func (r Replay) Text(w io.Writer) error {
	text := bufio.NewWriter(w)
	for _, sentence := range r.Sentences {
		fmt.Fprintln(text, sentence)
	}
	fmt.Fprintln(text)
	r.table(text)
	fmt.Fprintln(text)
	r.facts(text)
	for i, p := range r.Pools {
		if i == 0 {
			fmt.Fprintln(text, "\npools:")
		}
		fmt.Fprintf(text, "    %s: passed %d packets, %d bytes; refused %d packets, %d bytes\n",
			plain.Line(p.Name), p.PassedPackets, p.PassedBytes, p.RefusedPackets, p.RefusedBytes)
	}
	for i, x := range r.MostExcess {
		if i == 0 {
			fmt.Fprintln(text, "\nmost excess:")
		}
		fmt.Fprintf(text, "    %s: %d packets, %d bytes\n", x.Key, x.Packets, x.Bytes)
	}
	return text.Flush()
}

func (r *Replay) table(w io.Writer) {
	var aligned strings.Builder
	t := tabwriter.NewWriter(&aligned, 0, 0, 2, ' ', tabwriter.AlignRight)
	rows := []struct {
		name           string
		packets, bytes uint64
		always         bool
	}{
		{"offered", r.OfferedPackets, r.OfferedBytes, true},
		{"passed", r.PassedPackets, r.PassedBytes, true},
		{"excess", r.ExcessPackets, r.ExcessBytes, true},
		{"dropped", r.DroppedPackets, r.DroppedBytes, r.DroppedPackets != r.ExcessPackets},
		{"delayed", r.DelayedPackets, r.DelayedBytes, r.delays() || r.DelayedPackets > 0},
		{"marked", r.MarkedPackets, r.MarkedBytes, r.MarkedPackets > 0},
		{"green", r.GreenPackets, r.GreenBytes, r.limits.HasColours()},
		{"yellow", r.YellowPackets, r.YellowBytes, r.limits.HasColours()},
		{"red", r.RedPackets, r.RedBytes, r.limits.HasColours()},
		{"guaranteed", r.GuaranteedPackets, r.GuaranteedBytes, r.GuaranteedPackets > 0},
		{"borrowed", r.BorrowedPackets, r.BorrowedBytes, r.GuaranteedPackets > 0},
	}
	width := len("offered")
	if r.GuaranteedPackets > 0 {
		width = len("guaranteed")
	}
	fmt.Fprintf(t, "%-*s\tPACKETS\t\tBYTES\t\t\n", width, "")
	for _, row := range rows {
		if row.always {
			fmt.Fprintf(t, "%-*s\t%d\t%s\t%d\t%s\t\n", width, row.name, row.packets, share(row.packets, r.OfferedPackets),
				row.bytes, share(row.bytes, r.OfferedBytes))
		}
	}
	t.Flush() // into memory
	for line := range strings.Lines(aligned.String()) {
		fmt.Fprintln(w, strings.TrimRight(line, " \n")) // the last column has no name
	}
}

func share(part, whole uint64) string {
	if whole == 0 {
		return "-"
	}
	return percent(part, whole)
}

func (r *Replay) facts(w io.Writer) {
	fact := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-18s  %s\n", name, fmt.Sprintf(format, args...))
	}
	if r.OutsidePackets > 0 {
		fact("other addresses", "%d packets, %d bytes: they match no rule", r.OutsidePackets, r.OutsideBytes)
	}
	if r.UnlimitedPackets > 0 {
		fact("never limited", "%d packets, %d bytes: not IP, or neighbour discovery", r.UnlimitedPackets, r.UnlimitedBytes)
	}
	fact("duration", "%s", span(r.DurationNS))
	switch {
	case r.DroppedPackets == 0:
		fact("longest gap", "none: no packet was dropped")
	case r.LongestGapNS == 0 && r.DelayedPackets > 0:
		fact("longest gap", "none: packets were queued at every drop")
	default:
		fact("longest gap", "%s without a passed packet, from %s on", span(r.LongestGapNS), span(r.LongestGapFromNS-min(r.FirstNS, r.LongestGapFromNS)))
	}
	if r.DelayedPackets > 0 {
		fact("longest delay", "%s; the mean of delayed packets is %s", About(r.LongestDelayNS), About(r.MeanDelayNS))
	}
	holds := r.holds(r.CapacityBytes)
	level := func(name string, most, holds uint64) {
		if r.Mixed {
			fact(name, "%d bytes", most)
		} else {
			fact(name, "%d of %d bytes (%s)", most, holds, percent(most, holds))
		}
	}
	switch {
	case !r.limits.HasColours():
		level("highest level", r.HighestLevelBytes, holds)
	case r.Mixed:
		level("highest level", r.HighestLevelBytes, holds)
		level("highest P or E", r.HighestSecondLevelBytes, 0)
	default:
		level("highest level of C", r.HighestLevelBytes, holds)
		rule := &r.limits.Rules[0]
		level("highest level of "+replay.SecondBucket(rule.Algorithm), r.HighestSecondLevelBytes, rule.Colours.Burst())
	}
	switch least := r.LosslessCapacityBytes; {
	case r.OfferedPackets == 0 || !r.limits.Alone():
	case least == nil:
		fact("lossless capacity", "none: it would be above %d bytes", uint64(policy.MaxCapacity))
	case *least == 0:
		fact("lossless capacity", "any: each packet found an empty bucket")
	case holds > r.CapacityBytes:
		fact("lossless capacity", "%d bytes with the queue: the smallest without excess packets", *least)
	default:
		fact("lossless capacity", "%d bytes: the smallest without excess packets", *least)
	}
	if r.SpilledPackets > 0 {
		fact("spill bucket", "%d packets: the kernel's table had no room for their bucket key", r.SpilledPackets)
	}
	if r.ContendedPackets > 0 {
		fact("contended", "%d packets", r.ContendedPackets)
	}
	fact("engine", "%s", r.Engine)
}

// span is a time for people to read.
func span(ns uint64) string {
	if d := time.Duration(ns); d >= 0 {
		return d.String()
	}
	return fmt.Sprintf("%d s", ns/uint64(time.Second))
}
