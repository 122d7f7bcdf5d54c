package sandbox

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
)

// unit is what a packet is called.
func (r *Request) unit() string { return cmp.Or(r.Unit, "packet") }

// says tells what a limit did to a load.
func (r *Request) says(o *Outcome) string {
	s, p, begin := &o.Summary, &o.Packets, uint64(0)
	if s.OfferedPackets == 0 {
		return "Nothing is sent."
	}
	if r.Trace != "" {
		begin = s.FirstNS
	}
	var says []string
	say := func(format string, args ...any) { says = append(says, fmt.Sprintf(format, args...)) }
	if !s.Complete {
		say("The load is cut after %d packets, at %s.", MaxPackets, report.About(s.FirstNS+s.DurationNS-begin))
	}
	passed := fmt.Sprintf("%d of %s pass", s.PassedPackets, plain.Count(s.OfferedPackets, r.unit()))
	if s.DroppedPackets > 0 {
		passed += fmt.Sprintf("; dropped: %d, the first at %s", s.DroppedPackets, report.About(p.TimeNS[slices.Index(p.Verdict, "drop")]-begin))
	}
	say("%s.", passed)
	if s.ExcessPackets != s.DroppedPackets {
		say("Excess: %d.", s.ExcessPackets)
	}
	if s.DelayedPackets > 0 {
		say("Queued: %d, for %s on average and %s at most.", s.DelayedPackets, report.About(s.MeanDelayNS), report.About(s.LongestDelayNS))
	}
	if s.MarkedPackets > 0 {
		say("Marked by ECN: %d.", s.MarkedPackets)
	}
	full, most, things := float64(o.rule.Capacity+o.rule.Queue), float64(s.HighestLevelBytes), "bytes"
	if size := p.Bytes[0]; r.unit() == "request" && slices.Min(p.Bytes) == slices.Max(p.Bytes) {
		full, most, things = full/float64(size), most/float64(size), "requests"
	}
	say("The highest level is %s of %s %s.", hundredths(most), hundredths(full), things)
	var parts []string
	for i, sender := range r.Senders {
		offered, passed, longest := p.of(i)
		part := fmt.Sprintf("%s: %d of %d pass", plain.Line(cmp.Or(sender.Name, fmt.Sprintf("sender %d", i+1))), passed, offered)
		if longest > 0 {
			part += ", the longest wait is " + report.About(longest)
		}
		parts = append(parts, part)
	}
	if len(parts) > 1 {
		say("By sender: %s.", strings.Join(parts, "; "))
	}
	return strings.Join(says, " ")
}

// of returns what happened to the packets of a sender, with their longest wait in ns.
func (c *Columns) of(sender int) (offered, passed, longest uint64) {
	for i, from := range c.Sender {
		if from != sender {
			continue
		}
		offered++
		if departs := c.DepartNS[i]; departs != nil {
			passed++
			longest = max(longest, *departs-c.TimeNS[i])
		}
	}
	return offered, passed, longest
}

// compare tells how the limits differ.
func (r *Request) compare(all []*Outcome) string {
	var says []string
	for _, o := range all {
		if s := &o.Summary; o.Error == "" {
			text := fmt.Sprintf("%s passes %d of %s", o.Name, s.PassedPackets, plain.Count(s.OfferedPackets, r.unit()))
			if s.DelayedPackets > 0 {
				text += " after up to " + report.About(s.LongestDelayNS)
			}
			says = append(says, text)
		}
	}
	return strings.Join(says, "; ") + "."
}

func hundredths(v float64) string { return strconv.FormatFloat(math.Round(v*100)/100, 'f', -1, 64) }
