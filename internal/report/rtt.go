package report

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/shapectl/shapectl/internal/plain"
)

// RTTs are what an observer measured over an interval.
type RTTs struct {
	IntervalNS uint64 `json:"interval_ns"`
	Rules      []RTT  `json:"rules"` // those with anything measured
	// What was left out, because there was too much of it.
	LeftOutSamples uint64 `json:"left_out_samples"`
	LeftOutFlows   uint64 `json:"left_out_flows"`
	LeftOutRules   int    `json:"left_out_rules"`
}

// RTT is what was measured of the TCP flows of a rule, or of one host of it.
type RTT struct {
	Device     string  `json:"device"`
	Direction  string  `json:"direction"`
	CIDR       string  `json:"cidr"`
	Name       string  `json:"name"`
	Host       string  `json:"host"`
	Limited    RTTPart `json:"limited"`     // while the rule limited: up to a second after it last dropped, delayed or marked a packet
	NotLimited RTTPart `json:"not_limited"` // at all other times
	Hosts      []RTT   `json:"hosts"`       // null for a host
}

// RTTPart is a part of an RTT.
type RTTPart struct {
	Receiver             RTTTimes `json:"receiver_rtt"` // between the device and who receives, with the wait in the queue of the rule
	Sender               RTTTimes `json:"sender_rtt"`   // between the device and who sends
	PayloadPackets       uint64   `json:"payload_packets"`
	PayloadBytes         uint64   `json:"payload_bytes"`
	RetransmittedPackets uint64   `json:"retransmitted_packets"`
	RetransmittedBytes   uint64   `json:"retransmitted_bytes"`
}

// RTTTimes are round-trip times. All are null without samples.
type RTTTimes struct {
	Samples uint64  `json:"samples"`
	MinNS   *uint64 `json:"min_ns"`
	MeanNS  *uint64 `json:"mean_ns"`
	P50NS   *uint64 `json:"p50_ns"`
	P95NS   *uint64 `json:"p95_ns"`
	MaxNS   *uint64 `json:"max_ns"`
}

func (p RTTPart) retransmitted() string {
	if p.PayloadPackets == 0 {
		return ""
	}
	return percentText(percentOf(p.RetransmittedPackets, p.PayloadPackets))
}

// Text writes a line for each rule, and where it is the only one, for each of its hosts.
func (all RTTs) Text(w io.Writer, width int) error {
	if len(all.Rules) == 0 {
		_, err := fmt.Fprintln(w, "no TCP packets with payload")
		return err
	}
	text := bufio.NewWriter(w)
	lines := slices.Clone(all.Rules)
	if len(lines) == 1 {
		lines = append(lines, lines[0].Hosts...)
	}
	slices.SortStableFunc(lines, func(a, b RTT) int { return cmp.Compare(min(len(a.Host), 1), min(len(b.Host), 1)) })
	columns := []column[RTT]{
		{head: "DEVICE", cell: func(r *RTT) string { return plain.Line(r.Device) + " " + r.Direction }, always: true},
		{head: "RULE", cell: func(r *RTT) string { return cmp.Or(plain.Line(r.Name), addressOf(r.CIDR)) }, least: leastName, always: true},
		{head: "HOST", cell: func(r *RTT) string { return r.Host }},
	}
	for _, side := range []struct {
		head string
		part func(*RTT) *RTTPart
	}{
		{"LIMITED", func(r *RTT) *RTTPart { return &r.Limited }}, {"OTHERWISE", func(r *RTT) *RTTPart { return &r.NotLimited }},
	} {
		figure := func(head string, drop int, always bool, cell func(p *RTTPart) string) {
			columns = append(columns, column[RTT]{head: head, right: true, drop: drop, always: always, cell: func(r *RTT) string { return cell(side.part(r)) }})
		}
		figure(side.head, 0, true, func(p *RTTPart) string { return optional(p.Receiver.P50NS, About) })
		figure("P95", 1, false, func(p *RTTPart) string { return optional(p.Receiver.P95NS, About) })
		figure("SENDER", 3, false, func(p *RTTPart) string { return optional(p.Sender.P50NS, About) })
		figure("RESENT", 0, true, func(p *RTTPart) string { return p.retransmitted() })
		figure("SAMPLES", 2, false, func(p *RTTPart) string { return fmt.Sprint(p.Receiver.Samples + p.Sender.Samples) })
	}
	if err := writeTable(text, lines, columns, width); err != nil {
		return err
	}
	if all.LeftOutRules > 0 {
		fmt.Fprintf(text, "%s not measured: there are too many\n", plain.Count(all.LeftOutRules, "rule"))
	}
	if all.LeftOutFlows > 0 {
		fmt.Fprintf(text, "flows and hosts not followed, because too many began at once: %d\n", all.LeftOutFlows)
	}
	if all.LeftOutSamples > 0 {
		fmt.Fprintf(text, "%s left out: there were too many\n", plain.Count(all.LeftOutSamples, "sample"))
	}
	return text.Flush()
}
