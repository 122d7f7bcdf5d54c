// Package report turns rules and what became of their packets into what people
// and programs read: tables and JSON. It writes to an io.Writer and knows
// nothing of kernels; only it knows columns and the names in the JSON.
package report

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Rule is all that is known of a rule.
type Rule struct {
	Device    string `json:"device"`
	Direction string `json:"direction"`
	CIDR      string `json:"cidr"`
	Name      string `json:"name"`
	Note      string `json:"note"`
	Plan      string `json:"plan"`
	Match     string `json:"match"`
	Algorithm string `json:"algorithm"`
	Each      string `json:"each"`
	Excess    string `json:"excess"`
	Penalty   string `json:"penalty"`
	Fail      string `json:"fail"`
	// Rate and capacity are null for an unlimited rule.
	RateBits      *uint64 `json:"rate_bits_per_second"`
	CapacityBytes *uint64 `json:"capacity_bytes"`
	Queue
	Unlimited        bool   `json:"unlimited"`
	OverheadBytes    int16  `json:"overhead_bytes"`
	MPUBytes         uint16 `json:"mpu_bytes"`
	Attached         *bool  `json:"attached"` // null where it is not known
	State            string `json:"state"`
	Hook             string `json:"hook"`
	LevelBytes       uint64 `json:"level_bytes"`
	PassedPackets    uint64 `json:"passed_packets"`
	PassedBytes      uint64 `json:"passed_bytes"`
	ExcessPackets    uint64 `json:"excess_packets"`
	ExcessBytes      uint64 `json:"excess_bytes"`
	DroppedPackets   uint64 `json:"dropped_packets"`
	DroppedBytes     uint64 `json:"dropped_bytes"`
	DelayedPackets   uint64 `json:"delayed_packets"`
	DelayedBytes     uint64 `json:"delayed_bytes"`
	MarkedPackets    uint64 `json:"marked_packets"`
	ContendedPackets uint64 `json:"contended_packets"`
	UnsurePackets    uint64 `json:"unsure_packets"` // the same by its former name, for one release
	ExemptPackets    uint64 `json:"exempt_packets"`
	SKBs             uint64 `json:"skbs"`            // passed and dropped, where packets are those on the wire
	SpilledPackets   uint64 `json:"spilled_packets"` // of all that matched: charged to the spill bucket
	Sentence         string `json:"sentence"`
	// RevertsInNS is null unless the rule came with a change that waits to be confirmed.
	RevertsInNS *uint64 `json:"reverts_in_ns"`
	// Shadow is null for a rule without one.
	Shadow *Shadow `json:"shadow"`
	// Buckets is null unless it was asked for.
	Buckets []Bucket `json:"buckets"`
}

// A Bucket is a sharer of a rule that owes something.
type Bucket struct {
	Sharer     string `json:"sharer"`
	LevelBytes uint64 `json:"level_bytes"`
	// WaitNS is how long a full packet that came now would wait; null where it
	// would be dropped, and where the rule holds nothing back.
	WaitNS *uint64 `json:"wait_ns"`
}

// NewRule puts together what is known of a rule: its parameters, its counters and the level of its own bucket, in
// bytes. Whether it is in force, and until when, is for the caller.
func NewRule(device string, d policy.Direction, match policy.Match, r policy.Rule, c maps.Counters, level uint64) Rule {
	rate, capacity := limit(r)
	return Rule{
		Device: device, Direction: d.String(), CIDR: r.Prefix.String(), Match: match.String(),
		Name: r.Label.Name, Note: r.Label.Note, Plan: r.Label.Plan,
		Algorithm: r.Algorithm.String(), Each: r.Each.String(), Excess: r.Excess.String(),
		Penalty: r.Penalty.String(), Fail: r.Fail.String(), RateBits: rate, CapacityBytes: capacity, Unlimited: rate == nil,
		OverheadBytes: r.Framing.Overhead, MPUBytes: r.Framing.MPU, LevelBytes: level,
		PassedPackets: c.PassedPackets, PassedBytes: c.PassedBytes,
		ExcessPackets: c.ExcessPackets, ExcessBytes: c.ExcessBytes,
		DroppedPackets: c.DroppedPackets, DroppedBytes: c.DroppedBytes,
		DelayedPackets: c.DelayedPackets, DelayedBytes: c.DelayedBytes,
		Queue: NewQueue(r), MarkedPackets: c.MarkedPackets, ContendedPackets: c.ContendedPackets, UnsurePackets: c.ContendedPackets,
		ExemptPackets: c.ExemptPackets, SpilledPackets: c.SpilledPackets, SKBs: c.SKBs(),
		Sentence: r.Sentence(device, d, match),
	}
}

// limit is the rate and the capacity of a rule, nil for an unlimited one.
func limit(r policy.Rule) (rate, capacity *uint64) {
	if r.Rate == policy.Unlimited {
		return nil, nil
	}
	return (*uint64)(&r.Rate), &r.Capacity
}

// JSON writes a value as one indented document; a list, which may be long, one element after another.
func JSON(w io.Writer, v any) error {
	const indent = "  "
	list := reflect.ValueOf(v)
	if list.Kind() != reflect.Slice || list.Len() == 0 {
		return encoder(w, "", indent).Encode(v)
	}
	var text bytes.Buffer
	one := encoder(&text, indent, indent)
	for i := range list.Len() {
		text.WriteString([]string{"[\n", ",\n"}[min(i, 1)] + indent)
		if err := one.Encode(list.Index(i).Interface()); err != nil {
			return err
		}
		text.Truncate(text.Len() - len("\n"))
		if _, err := text.WriteTo(w); err != nil {
			return err
		}
	}
	_, err := io.WriteString(w, "\n]\n")
	return err
}

func encoder(w io.Writer, prefix, indent string) *json.Encoder {
	e := json.NewEncoder(w)
	e.SetIndent(prefix, indent)
	e.SetEscapeHTML(false)
	return e
}

// Rules are rules to be shown.
type Rules []Rule

// Sentences writes a line for each rule, and what is not as usual with it.
func (rules Rules) Sentences(w io.Writer) error {
	text := bufio.NewWriter(w)
	for _, r := range rules {
		fmt.Fprintln(text, r.Sentence+remark(r))
		buckets(text, r)
	}
	if i := slices.IndexFunc(rules, func(r Rule) bool { return r.RevertsInNS != nil }); i >= 0 {
		fmt.Fprintln(text, reverts(*rules[i].RevertsInNS))
	}
	return text.Flush()
}

// Deleted writes a line for each rule that is no more.
func (rules Rules) Deleted(w io.Writer) error {
	text := bufio.NewWriter(w)
	for _, r := range rules {
		fmt.Fprintln(text, "deleted: "+r.Sentence)
	}
	return text.Flush()
}

// NotInForce reports whether it is known that a rule is not in force, of which attached tells.
func NotInForce(attached *bool) bool { return attached != nil && !*attached }

func remark(r Rule) string {
	switch {
	case r.Attached == nil:
		return "" // said once, for all rules
	case !*r.Attached:
		return " [NOT IN FORCE: " + r.State + "]"
	case r.State != "attached":
		return " [" + r.State + "]"
	}
	return ""
}

func buckets(w io.Writer, r Rule) {
	for _, b := range r.Buckets {
		next := ""
		switch {
		case b.WaitNS != nil:
			next = "; a full packet would wait " + about(*b.WaitNS)
		case r.delays():
			next = "; a full packet would be dropped"
		}
		fmt.Fprintf(w, "    %s owes %d bytes%s\n", b.Sharer, b.LevelBytes, next)
	}
}

// A column of Stats.
type column struct {
	head  string
	shown bool // some are missed by nobody where there is nothing to count
	of    func(Rule) any
}

// Stats writes a table of what became of the packets of each rule.
func (rules Rules) Stats(w io.Writer) error {
	// Escaped here, as a tab writer would take some bytes for its own.
	name := func(r Rule) string { return plain.Line(r.Device) + " " + r.Direction + " " + r.CIDR }
	width := len("RULE")
	for _, r := range rules {
		width = max(width, len(name(r)))
	}
	delays := slices.ContainsFunc(rules, func(r Rule) bool { return r.delays() || r.DelayedPackets > 0 })
	exempt := slices.ContainsFunc(rules, func(r Rule) bool { return r.ExemptPackets > 0 })
	spilled := slices.ContainsFunc(rules, func(r Rule) bool { return r.SpilledPackets > 0 })
	columns := slices.DeleteFunc([]column{
		{"RATE", true, func(r Rule) any { return rateText(r.RateBits) }},
		{"PASSED", true, func(r Rule) any { return r.PassedPackets }},
		{"BYTES", true, func(r Rule) any { return r.PassedBytes }},
		{"EXCESS", true, func(r Rule) any { return r.ExcessPackets }},
		{"BYTES", true, func(r Rule) any { return r.ExcessBytes }},
		{"DROPPED", true, func(r Rule) any { return r.DroppedPackets }},
		{"BYTES", true, func(r Rule) any { return r.DroppedBytes }},
		{"DELAYED", delays, func(r Rule) any { return r.DelayedPackets }},
		{"BYTES", delays, func(r Rule) any { return r.DelayedBytes }},
		{"MARKED", true, func(r Rule) any { return r.MarkedPackets }},
		{"CONTENDED", true, func(r Rule) any { return r.ContendedPackets }},
		{"EXEMPT", exempt, func(r Rule) any { return r.ExemptPackets }},
		{"SPILLED", spilled, func(r Rule) any { return r.SpilledPackets }},
		{"LEVEL", true, func(r Rule) any { return fmt.Sprint(r.LevelBytes, remark(r)) }},
	}, func(c column) bool { return !c.shown })
	text := bufio.NewWriter(w)
	// Numbers go to the right, names to the left.
	t := tabwriter.NewWriter(text, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "%-*s\t", width, "RULE")
	for _, c := range columns {
		fmt.Fprint(t, c.head, "\t")
	}
	for _, r := range rules {
		fmt.Fprintf(t, "\n%-*s\t", width, name(r))
		for _, c := range columns {
			fmt.Fprint(t, c.of(r), "\t")
		}
	}
	fmt.Fprintln(t)
	t.Flush() // into text
	for _, r := range rules {
		if len(r.Buckets) > 0 {
			fmt.Fprintf(text, "%s %s %s:\n", r.Device, r.Direction, r.CIDR)
			buckets(text, r)
		}
	}
	return text.Flush()
}

func rateText(bits *uint64) string {
	if bits == nil {
		return "unlimited"
	}
	return policy.Rate(*bits).String()
}

// An Answer is what would become of a packet.
type Answer struct {
	Device        string  `json:"device"`
	Direction     string  `json:"direction"`
	Address       string  `json:"address"`
	Rule          *string `json:"rule"` // null where none matches
	Bytes         uint64  `json:"bytes"`
	Conforms      bool    `json:"conforms"`
	Verdict       string  `json:"verdict"` // pass, drop, mark or delay
	Sharer        string  `json:"sharer"`  // whose bucket it is
	Spilled       bool    `json:"spilled"` // the table has no room for it: level and verdict are those of the spill bucket
	LevelBytes    uint64  `json:"level_bytes"`
	CapacityBytes *uint64 `json:"capacity_bytes"`
	Queue
	// WaitNS is how long the packet is held back, or if it does not conform, in how long it would.
	WaitNS   uint64 `json:"wait_ns"`
	Attached *bool  `json:"attached"` // null where it is not known
	Sentence string `json:"sentence"`
	Note     string `json:"note"` // what else is to be said, "" for nothing
}

// Text says the answer in a few lines.
func (a Answer) Text(w io.Writer) error {
	text := bufio.NewWriter(w)
	switch {
	case a.Rule == nil:
		fmt.Fprintf(text, "%s %s: no rule matches %s; it passes\n", a.Device, a.Direction, a.Address)
	case a.CapacityBytes == nil:
		fmt.Fprintf(text, "%s\n%d bytes would pass\n", a.Sentence, a.Bytes)
	default:
		fmt.Fprintf(text, "%s\n%s; %d bytes %s\n", a.Sentence, a.filled(a.Sharer, a.LevelBytes, *a.CapacityBytes), a.Bytes, a.fate())
		if a.Spilled {
			text.WriteString(noRoom(a.Sharer) + "\n")
		}
	}
	if a.Rule != nil && NotInForce(a.Attached) {
		text.WriteString("the rule is not in force\n")
	}
	if a.Note != "" {
		text.WriteString(a.Note + "\n")
	}
	return text.Flush()
}

func (a Answer) fate() string {
	wait := time.Duration(a.WaitNS)
	switch {
	case !a.Conforms && a.delays():
		return fmt.Sprintf("do not fit the queue now (%s), and would conform in %s", a.Verdict, wait)
	case !a.Conforms:
		return fmt.Sprintf("are excess now (%s) and would conform in %s", a.Verdict, wait)
	case a.WaitNS == 0:
		return "would pass now"
	case a.Verdict == "mark":
		return fmt.Sprintf("would wait %s and pass, marked by ECN where they can be", wait)
	}
	return fmt.Sprintf("would wait %s and pass", wait)
}

// noRoom says why a packet is charged to the spill bucket.
func noRoom(sharer string) string {
	return "the bucket table has no room for " + sharer + ": this is the rule's spill bucket, which it shares with all others without room"
}

func percent(part, whole uint64) string {
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(whole))
}

// Queue is what of a rule's packets may wait.
type Queue struct {
	QueueBytes    uint64 `json:"queue_bytes"`     // 0 for a rule that holds nothing back
	LongestWaitNS uint64 `json:"longest_wait_ns"` // that there can be
	// ECNAboveNS is how long a packet may wait without being marked; null where none is marked for that.
	ECNAboveNS *uint64 `json:"ecn_above_ns"`
	Order      string  `json:"order"` // in which packets leave
	beyond     uint64  // of QueueBytes, those that the capacity does not count
}

// NewQueue is that of a rule.
func NewQueue(r policy.Rule) Queue {
	bytes, longest := r.Waiting()
	q := Queue{QueueBytes: bytes, LongestWaitNS: uint64(longest), Order: r.Order.String(), beyond: r.Queue}
	if bytes > 0 && r.ECNAbove != policy.Never {
		above := uint64(r.ECNAbove)
		q.ECNAboveNS = &above
	}
	return q
}

// holds is what a bucket and its queue hold together.
func (q Queue) holds(capacity uint64) uint64 { return capacity + q.beyond }

// delays says whether the rule holds packets back.
func (q Queue) delays() bool { return q.QueueBytes > 0 }

// filled says how full a sharer's bucket is, and its queue.
func (q Queue) filled(sharer string, level, capacity uint64) string {
	fill := func(level, of uint64) string {
		return fmt.Sprintf("%d of %d bytes (%s full)", level, of, percent(level, of))
	}
	switch {
	case !q.delays():
		return "bucket of " + sharer + ": " + fill(level, capacity)
	case q.beyond == 0:
		return "queue of " + sharer + ": " + fill(level, capacity)
	}
	inside := min(level, capacity)
	return "bucket of " + sharer + ": " + fill(inside, capacity) + ", queue: " + fill(level-inside, q.beyond)
}
