package explain

import (
	"fmt"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

var sideNames = map[policy.Match]string{policy.MatchSrc: "source address", policy.MatchDst: "destination address"}

func judgeStop(p Packets, s Stop) report.Stop {
	out := report.Stop{Device: s.Name, Direction: s.Direction.String(), Warnings: []string{}, Hides: []report.Brief{}, Verdict: "pass", Attached: new(bool)}
	match := s.Direction.FarSide()
	if h := s.Hook; h != nil {
		out.Device, out.State, out.Attached, match = h.Name, h.Status, h.State.InForce(), h.Match
	}
	out.Match = match.String()
	if address := p.side(match); address.IsValid() {
		out.Address = address.String()
	} else if s.Hook != nil {
		out.Verdict = "unknown"
		out.Note = fmt.Sprintf("the rules here go by the %s; give --flow, which says it", sideNames[match])
	}
	if s.Unreadable {
		out.Verdict, out.Note = "unknown", "the rules here cannot be read, as they were "+maps.ErrOtherLayout.Error()
	}
	if s.Rule != nil {
		judgeRule(&out, p, s)
	}
	judgePath(&out, s)
	return out
}

// judgePath tells what is attached, and what that does to the packets of the rule.
func judgePath(out *report.Stop, s Stop) {
	if s.Name == "" {
		return // the device is not here
	}
	if s.Unlisted {
		out.Warnings = append(out.Warnings, "what else is attached here is not known: to list it takes CAP_NET_ADMIN")
		return
	}
	decides := -1
	if s.Rule != nil {
		decides = deciderOf(s.Path)
	}
	var held holder
	if delayed(s) {
		held = heldBackBy(s)
		out.HeldBack = &held.holds
	}
	out.Chain = []report.Attached{}
	for i, e := range s.Path {
		out.Chain = append(out.Chain, report.Attached{At: e.At, ProgramID: e.ID, Name: e.Name, Ours: e.Ours, Decides: i == decides})
		switch {
		case e.Ours:
		case i < decides:
			out.Warnings = append(out.Warnings, runsBefore(e))
		case held.reenters:
			out.Warnings = append(out.Warnings, called(e)+" runs after the limit, and does not see what comes in through the ifb")
		}
		if i == decides {
			out.Chain = append(out.Chain, held.chain...)
		}
	}
	if held.warning != "" {
		out.Warnings = append(out.Warnings, held.warning)
	}
	if held.loses && out.Bucket != nil && out.Bucket.Conforms {
		out.Verdict, out.Note = "lost", ""
	}
}

// deciderOf is which of a path is shapectl, -1 if none is.
func deciderOf(path []netinfo.ChainEntry) int {
	return slices.IndexFunc(path, func(e netinfo.ChainEntry) bool { return e.Ours })
}

// called is a program, filter or chain by its name, if it may be asked for.
func called(e netinfo.ChainEntry) string {
	if e.ID != 0 && e.Name == "" {
		return fmt.Sprintf("program %d", e.ID)
	}
	return e.Name
}

// runsBefore says what somebody else's that runs before a limit may do to it.
func runsBefore(e netinfo.ChainEntry) string {
	name := called(e)
	switch {
	case strings.HasPrefix(name, "shapectl"):
		return name + ", set from another network namespace or another bpffs, limits them before: the lower rate decides"
	case e.At == "xdp":
		return "the XDP program sees packets first: what it drops, sends back or redirects never gets to the limit"
	case e.At == "netfilter":
		return name + " runs before the limit: what it drops or redirects never gets there"
	}
	return name + " runs before the limit: what it drops, redirects, or passes on by ending the chain never gets there"
}

// delayed reports whether a rule that delays is attached.
func delayed(s Stop) bool {
	return s.Rule != nil && s.Rule.Excess == policy.Delay && deciderOf(s.Path) >= 0
}

// A holder is what holds back the packets of a rule that delays.
type holder struct {
	holds    bool
	reenters bool              // packets come in behind all that runs after the limit
	loses    bool              // they do not come out again
	chain    []report.Attached // what they meet where they leave the chain, on ingress
	warning  string            // why nothing is held back, or all is lost
}

// heldBackBy judges the fq of a device, or the ifb by which packets enter it.
func heldBackBy(s Stop) holder {
	if s.Direction == policy.Egress {
		if s.Qdisc.HasFQ {
			return holder{holds: true}
		}
		return holder{warning: holdsNothing(s.Name, s.Qdisc.Kind) + "'shapectl set' with --setup-fq sets fq"}
	}
	const mends = "set one of the rules here again, which mends that"
	ifb := s.Ifb
	if ifb == nil {
		return holder{reenters: true, loses: true, warning: "the ifb by which packets are held back is gone, so those that conform are lost; " + mends}
	}
	held := holder{reenters: true, chain: []report.Attached{{At: "ifb", Name: ifb.Name, Ours: true}, {At: "qdisc", Name: ifb.State.Kind}}}
	switch {
	case !ifb.Up:
		held.loses, held.warning = true, ifb.Name+", by which packets are held back, is down, so those that conform are lost; "+mends
	case !ifb.State.HasFQ:
		held.warning = holdsNothing(ifb.Name, ifb.State.Kind) + mends
	default:
		held.holds = true
	}
	return held
}

// holdsNothing says what becomes of a rule that delays where the qdisc of its device is not fq.
func holdsNothing(device, qdisc string) string {
	return fmt.Sprintf("nothing is held back, as only the qdisc fq does that, and %s has %s: what is to wait passes at once, and the rate is kept by drops alone; ",
		device, qdisc)
}
