package sandbox

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// unit is what a packet is called.
func (r *Request) unit() string {
	if r.Unit == "" {
		return "packet"
	}
	return r.Unit
}

// says tells what a limit did to a load.
func (r *Request) says(o *Outcome) string {
	s, unit := &o.Summary, r.unit()
	var says []string
	if !o.Complete {
		says = append(says, fmt.Sprintf("The load is cut after %d packets, at %s.", MaxPackets, span(s.FirstNS+s.DurationNS-o.FromNS)))
	}
	switch {
	case s.OfferedPackets == 0:
		return "Nothing is sent."
	case s.DroppedPackets == 0:
		says = append(says, fmt.Sprintf("All %s pass.", plain.Count(s.OfferedPackets, unit)))
	default:
		says = append(says, fmt.Sprintf("%d of %s pass%s; %s dropped, the first at %s.", s.PassedPackets, plain.Count(s.OfferedPackets, unit),
			plural(s.PassedPackets, "es"), are(s.DroppedPackets), span(*o.FirstDroppedNS-o.FromNS)))
	}
	if o.rule.Excess == policy.Pass && s.ExcessPackets > 0 {
		says = append(says, fmt.Sprintf("%s excess and only counted.", are(s.ExcessPackets)))
	}
	if s.DelayedPackets > 0 {
		says = append(says, fmt.Sprintf("%s in the queue, for %s on average and %s at most.", wait(s.DelayedPackets), span(s.MeanDelayNS), span(s.LongestDelayNS)))
	}
	if s.MarkedPackets > 0 {
		says = append(says, fmt.Sprintf("%s marked by ECN.", are(s.MarkedPackets)))
	}
	says = append(says, fmt.Sprintf("The highest level is %s.", r.level(s.HighestLevelBytes, o.FullBytes)))
	if len(o.Senders) > 1 {
		var parts []string
		for i, of := range o.Senders {
			name := of.Name
			if name == "" {
				name = fmt.Sprintf("sender %d", i+1)
			}
			part := fmt.Sprintf("%s: %d of %d pass", plain.Line(name), of.PassedPackets, of.OfferedPackets)
			if of.LongestDelayNS > 0 {
				part += fmt.Sprintf(", the longest wait is %s", span(of.LongestDelayNS))
			}
			parts = append(parts, part)
		}
		says = append(says, "By sender: "+strings.Join(parts, "; ")+".")
	}
	return strings.Join(says, " ")
}

// level compares a level with the capacity, in requests if all have the same size.
func (r *Request) level(bytes, full uint64) string {
	if size := r.size(); r.unit() == "request" && size > 0 {
		of := func(bytes uint64) string {
			return strconv.FormatFloat(math.Round(float64(bytes)/float64(size)*100)/100, 'f', -1, 64)
		}
		return fmt.Sprintf("%s of %s requests", of(bytes), of(full))
	}
	return fmt.Sprintf("%d of %d bytes", bytes, full)
}

// size is the size of all packets, or 0 if they differ.
func (r *Request) size() (bytes uint64) {
	sizes := func(yield func(uint64) bool) {
		for _, p := range r.recorded {
			if !yield(p.Bytes) {
				return
			}
		}
		for _, s := range r.Senders {
			if !yield(s.Bytes) {
				return
			}
		}
	}
	for size := range sizes {
		if bytes != 0 && size != bytes {
			return 0
		}
		bytes = size
	}
	return bytes
}

// compare tells how the limits differ.
func (r *Request) compare(all []Outcome) string {
	gcra, leaky, queue := &all[0], &all[1], &all[2]
	if gcra.Error != "" || leaky.Error != "" {
		return ""
	}
	says := "GCRA and the leaky bucket give the same verdict for each " + r.unit() + "."
	switch g, l := gcra.Summary.DroppedPackets, leaky.Summary.DroppedPackets; {
	case slices.Equal(gcra.verdicts, leaky.verdicts):
	case g <= l:
		says = fmt.Sprintf("With the penalty, the leaky bucket drops %d instead of %d.", l, g)
	default:
		says = fmt.Sprintf("With the penalty, the leaky bucket drops %d instead of %d, because the senders back off.", l, g)
	}
	if queue.Error != "" {
		return says
	}
	switch g, q := gcra.Summary.DroppedPackets, queue.Summary.DroppedPackets; {
	case q == 0 && g == 0:
		says += " Nothing is dropped"
	case q == g:
		says += " The queue drops as many as GCRA"
	default:
		says += fmt.Sprintf(" The queue drops %d instead of %d", q, g)
	}
	if longest := queue.Summary.LongestDelayNS; longest > 0 {
		return says + fmt.Sprintf(", and %ss wait in the queue for up to %s.", r.unit(), span(longest))
	}
	return says + "."
}

func are(n uint64) string {
	if n == 1 {
		return "1 is"
	}
	return fmt.Sprintf("%d are", n)
}

func wait(n uint64) string {
	if n == 1 {
		return "1 waits"
	}
	return fmt.Sprintf("%d wait", n)
}

// plural returns the ending of a verb after one thing.
func plural(n uint64, one string) string {
	if n == 1 {
		return one
	}
	return ""
}

// span is a time with three digits.
func span(ns uint64) string {
	value, unit := float64(ns), "ns"
	for _, u := range []struct {
		size float64
		name string
	}{{1e9, "s"}, {1e6, "ms"}, {1e3, "us"}} {
		if value >= u.size {
			value, unit = value/u.size, u.name
			break
		}
	}
	if value < 1000 {
		value, _ = strconv.ParseFloat(strconv.FormatFloat(value, 'g', 3, 64), 64)
	}
	return strconv.FormatFloat(math.Round(value*1000)/1000, 'f', -1, 64) + " " + unit
}
