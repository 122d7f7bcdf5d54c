// Package line turns a line, such as that of a home or an office, into a policy: its rates, what its link adds to
// packets, and who shares it. It also finds the rules and pools of a line among others. It does no I/O.
package line

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// Percent is the part of the line's rate that its pools get, so that packets queue here and not in the modem.
	Percent = 95
	// dropPercent is that of downloads that nothing can queue: without it, pings are slow and parts unequal.
	dropPercent = 85
	// minPart is the part of a pool's rate below which it does not adapt, unless somebody says so.
	minPart = 5
	// wait is how long excess packets may be queued. A TCP connection with a round trip of 20 ms needs half of that.
	wait = 30 * time.Millisecond
	// dropBurst is the burst where excess packets are dropped instead. It takes the place of the queue.
	dropBurst = 50 * time.Millisecond
	// leastQueue holds a few packets where the rate is so low that wait would not. In bytes.
	leastQueue = 16 << 10
	// burst is two full packets, so that the modem queues almost nothing.
	burst = 3028
)

// A Line is what is known of a line, and what it shall be limited to.
type Line struct {
	Device     string
	Up         Direction // what leaves the device
	Down       Direction
	Link       string // as policy.ParseFraming parses it; "" for nothing
	Share      policy.ShareKind
	NAT        bool   // hosts have one address on the line
	Inside     bool   // the default route leaves by another device, so it is not known what uploads are
	Why        string // why the line is shared like this, for a comment; may be ""
	Adapt      bool
	Reflectors []string // with Adapt: whose round-trip times count; none for the default ones
	Command    string   // the command line that asks for all this
}

// A Direction is a direction of a line.
type Direction struct {
	Rate  policy.Rate  // of the line; 0 if there is no limit
	Match policy.Match // the address of packets that rules match
	Down  bool         // it enters the device
	Drops bool         // excess packets are marked or dropped, as nothing can queue them
	Why   string       // why it drops, for a comment; may be ""
	Min   policy.Rate  // the least rate of a pool that adapts; 0 for the default
}

// Percent is the part of the rate that the pool of a direction gets.
func (d Direction) Percent() policy.Rate {
	if d.Down && d.Drops {
		return dropPercent
	}
	return Percent
}

// PoolRate is the rate of the pool of a direction.
func (d Direction) PoolRate() policy.Rate {
	return max(d.Rate/100*d.Percent()+d.Rate%100*d.Percent()/100, policy.MinRate)
}

// Queue is how much the queue holds, or without one the burst: a time at the rate, or a size.
func (d Direction) Queue() string {
	wait := wait
	if d.Drops {
		wait = dropBurst
	}
	if d.PoolRate()/8*policy.Rate(wait/time.Millisecond)/1000 < leastQueue {
		return fmt.Sprintf("%dkb", leastQueue>>10)
	}
	return wait.String()
}

// LeastRate is the rate below which a pool does not adapt.
func (d Direction) LeastRate() policy.Rate {
	if d.Min != 0 {
		return d.Min
	}
	return max(d.PoolRate()/minPart, policy.MinRate)
}

// Queues reports whether excess packets are queued, in one direction at least.
func (l Line) Queues() bool {
	return l.Up.Rate != 0 && !l.Up.Drops || l.Down.Rate != 0 && !l.Down.Drops
}

// Policy is the policy of a line, in YAML with comments. The error is for a device that a policy cannot name.
func (l Line) Policy() ([]byte, error) {
	device, err := policyfile.DeviceKey(l.Device)
	if err != nil {
		return nil, err
	}
	w := &writer{}
	w.line(0, "# The line on %s, made by:", plain.Line(l.Device))
	w.line(0, "#")
	w.line(0, "#     %s", plain.Line(l.Command))
	w.line(0, "#")
	setup := ""
	if l.Queues() {
		setup = " --setup-fq"
	}
	w.line(0, "# 'shapectl apply FILE%s --confirm 60s' brings this into force. It removes all limits of the host that are not in", setup)
	w.line(0, "# the file: if there are others, add them. 'shapectl export' prints all that are in force.")
	w.line(0, "devices:")
	w.line(1, "%s:", device)
	if l.Link != "" {
		w.line(2, "# What the link adds to each packet counts, too.")
		w.line(2, "defaults: {overhead: %s}", l.Link)
	}
	l.direction(w, policy.Egress, l.Up, "# Uploads: what leaves %s.")
	l.direction(w, policy.Ingress, l.Down, "# Downloads: what enters %s.")
	return []byte(w.String()), nil
}

func (l Line) direction(w *writer, direction policy.Direction, d Direction, what string) {
	if d.Rate == 0 {
		return
	}
	w.line(2, what, plain.Line(l.Device))
	w.line(2, "%v:", direction)
	if d.Match != direction.FarSide() {
		w.line(3, "%-22s  # rules match the address of the host on this side", "match: "+d.Match.String())
	}
	w.line(3, "pool:")
	w.option("rate: "+d.PoolRate().String(), fmt.Sprintf("%d %% of %v, so that packets queue here and not in the modem", d.Percent(), d.Rate))
	if d.Drops {
		if d.Why != "" {
			w.line(4, "# %s.", d.Why)
		}
		w.option("excess: ecn", "excess packets are marked if their hosts use ECN, else dropped")
		w.option("capacity: "+d.Queue(), "burst")
	} else {
		w.option("excess: delay", "excess packets are queued")
		w.option("queue: "+d.Queue(), "the longest queue; beyond it, packets are dropped")
		w.option("order: sparse-first", "calls, games and pings do not wait behind downloads")
		w.option(fmt.Sprintf("capacity: %d", burst), "burst: two packets")
	}
	share := policy.Share{Kind: l.Share}.String()
	if l.Why != "" {
		w.line(4, "# %s.", l.Why)
	}
	w.option("share: "+share, "each "+share+" gets an equal part of the rate while it is used up")
	if l.NAT {
		w.option("nat: true", "hosts are those behind NAT, which conntrack knows")
	}
	if l.Adapt {
		w.option("adapt-min: "+d.LeastRate().String(), "'shapectl serve' lowers the rate so far while the line is slow")
		if len(l.Reflectors) > 0 {
			w.option("adapt-to: "+strconv.Quote(strings.Join(l.Reflectors, ",")), "whose round-trip times tell that")
		}
	}
	w.option("line: "+strconv.Quote(l.Device), "'shapectl line' knows its pools by this")
	w.line(3, "%-22s  # all packets of IPv4 and IPv6 are within the pool", "any: {}")
}

// A writer writes lines in YAML.
type writer struct{ strings.Builder }

func (w *writer) line(depth int, format string, args ...any) {
	fmt.Fprintf(w, strings.Repeat("  ", depth)+format+"\n", args...)
}

// option writes an option of a pool, with a comment.
func (w *writer) option(text, comment string) { w.line(4, "%-20s  # %s", text, comment) }
