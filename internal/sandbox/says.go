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
	"github.com/shapectl/shapectl/pkg/policy"
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
	if s.DroppedPackets == 0 {
		say("All %s pass.", plain.Count(s.OfferedPackets, r.unit()))
	} else {
		say("%d of %s %s; %d %s dropped, the first at %s.", s.PassedPackets, plain.Count(s.OfferedPackets, r.unit()), verb(s.PassedPackets, "passes", "pass"),
			s.DroppedPackets, verb(s.DroppedPackets, "is", "are"), report.About(p.TimeNS[slices.Index(p.Verdict, "drop")]-begin))
	}
	if n := s.ExcessPackets; n > 0 && o.rule.Excess == policy.Pass {
		say("%d %s excess and only counted.", n, verb(n, "is", "are"))
	} else if n > 0 && o.rule.Excess == policy.ECN && r.Trace == "" && !slices.ContainsFunc(r.Senders, func(s Sender) bool { return s.ECN }) {
		say("No sender allows ECN marks.")
	}
	if n := s.DelayedPackets; n > 0 {
		say("%d %s in the queue, for %s on average and %s at most.", n, verb(n, "waits", "wait"), report.About(s.MeanDelayNS), report.About(s.LongestDelayNS))
	}
	if n := s.MarkedPackets; n > 0 {
		say("%d %s marked by ECN.", n, verb(n, "is", "are"))
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
	if all[0].Error != "" || all[1].Error != "" {
		return ""
	}
	g, l, q := &all[0].Summary, &all[1].Summary, &all[2].Summary
	says := "GCRA and the leaky bucket give the same verdict for each " + r.unit() + "."
	if !slices.Equal(all[0].Packets.Verdict, all[1].Packets.Verdict) {
		says = fmt.Sprintf("With the penalty, the leaky bucket drops %d instead of %d", l.DroppedPackets, g.DroppedPackets)
		if g.DroppedPackets > l.DroppedPackets {
			says += ", because the senders back off"
		}
		says += "."
	}
	switch {
	case all[2].Error != "":
		return says
	case g.OfferedPackets != q.OfferedPackets: // the senders react
		says += fmt.Sprintf(" The queue passes %d instead of %d and drops %d instead of %d", q.PassedPackets, g.PassedPackets, q.DroppedPackets, g.DroppedPackets)
	case q.DroppedPackets == 0 && g.DroppedPackets == 0:
		says += " Nothing is dropped"
	case q.DroppedPackets == g.DroppedPackets:
		says += " The queue drops as many as GCRA"
	default:
		says += fmt.Sprintf(" The queue drops %d instead of %d", q.DroppedPackets, g.DroppedPackets)
	}
	if longest := q.LongestDelayNS; longest > 0 {
		says += fmt.Sprintf(", and %ss wait in the queue for up to %s", r.unit(), report.About(longest))
	}
	return says + "."
}

func verb(n uint64, one, several string) string {
	if n == 1 {
		return one
	}
	return several
}

func hundredths(v float64) string { return strconv.FormatFloat(math.Round(v*100)/100, 'f', -1, 64) }
