package explain

import (
	"fmt"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

var sideNames = map[policy.Match]string{policy.MatchSrc: "source address", policy.MatchDst: "destination address"}

func judgeStop(p *Packets, s *Stop) report.Stop {
	out := report.Stop{Warnings: []string{}, Hides: []report.Brief{}}
	out.BorrowedBy, out.Pools = []string{}, []report.PoolLevel{}
	out.Answer = report.Answer{
		Device: s.Name, Direction: s.Direction.String(), Verdict: "pass", Conforms: true,
		Bytes: countPacket(s.Frame, s.Tags, p.Segments, policy.Framing{}).Bytes,
	}
	match := s.Direction.FarSide()
	if h := s.Hook; h != nil {
		out.Device, out.State, out.Attached, match = h.Name, h.Status, new(h.State.InForce()), h.Match
	}
	out.Match = match.String()
	if address := p.side(match); address.IsValid() {
		out.Address = address.String()
	}
	if s.Undecided {
		out.Verdict, out.Conforms, out.Note = "unknown", false, fmt.Sprintf("it depends on the %s; try --flow %s", sideNames[match], p.anyFlow())
	}
	if s.Unreadable {
		out.Verdict, out.Conforms, out.Note = "unknown", false, "the rules here cannot be read: "+maps.ErrOtherLayout.Error()
	}
	if s.Rule != nil {
		judgeRule(&out, p, s)
	}
	judgePath(&out, s)
	return out
}

// judgePath says what is attached, and how that affects the packets of the rule.
func judgePath(out *report.Stop, s *Stop) {
	if s.Name == "" {
		return // the device is not here
	}
	decides := -1
	if s.Rule != nil {
		decides = deciderOf(s.Path)
	}
	var by delayer
	if delayed(s) {
		by = delayedBy(s)
		out.HeldBack = &by.delays
	}
	out.Chain = []report.Attached{}
	for i, e := range s.Path {
		out.Chain = append(out.Chain, report.Attached{At: e.At, ProgramID: e.ID, Name: e.Name, Ours: e.Ours, Decides: i == decides, Limits: e.Limits})
		switch {
		case e.Ours:
		case s.Rule == nil && isShapectl(e):
			out.Verdict, out.Conforms, out.Note = "unknown", false, loader.ErrElsewhere.Error()
		case i < decides:
			out.Warnings = append(out.Warnings, runsBefore(e))
		case by.reenters:
			out.Warnings = append(out.Warnings, called(e)+" runs after the limit, and does not see packets that enter through the ifb")
		}
		if i == decides {
			out.Chain = append(out.Chain, by.chain...)
		}
	}
	if by.warning != "" {
		out.Warnings = append(out.Warnings, by.warning)
	}
	if by.loses && out.Rule != nil && out.Verdict != "drop" && out.Verdict != "unknown" && !report.NotInForce(out.Attached) {
		out.Verdict, out.Conforms, out.Note = "lost", false, ""
	}
}

// deciderOf is which of a path is shapectl, -1 if none is.
func deciderOf(path []netinfo.ChainEntry) int {
	return slices.IndexFunc(path, func(e netinfo.ChainEntry) bool { return e.Ours })
}

// called is a program, filter or chain by its name, if that is known.
func called(e netinfo.ChainEntry) string {
	if e.ID != 0 && e.Name == "" {
		return fmt.Sprintf("program %d", e.ID)
	}
	return e.Name
}

// isShapectl reports whether a program that is not ours is one of shapectl nevertheless.
func isShapectl(e netinfo.ChainEntry) bool { return strings.HasPrefix(called(e), "shapectl") }

// runsBefore says how a program, filter or chain that is not ours may affect a limit that runs after it.
func runsBefore(e netinfo.ChainEntry) string {
	name := called(e)
	switch {
	case isShapectl(e):
		return name + ", set from another network namespace or another bpffs, limits them before: the lower rate decides"
	case e.At == "xdp":
		return "the XDP program runs before the limit: packets that it drops, sends back or redirects bypass it"
	case e.At == "netfilter":
		return name + " runs before the limit: what it drops or redirects bypasses it"
	}
	return name + " runs before the limit: packets that it drops or redirects, or passes by ending the chain, bypass it"
}

// delayed reports whether a rule is attached that delays, or a pool of which does.
func delayed(s *Stop) bool {
	return s.Rule != nil && (s.Rule.Excess == policy.Delay || s.Rule.Stages.delays()) && deciderOf(s.Path) >= 0
}

// A delayer is the qdisc or ifb device that delays the packets of a rule.
type delayer struct {
	delays   bool
	reenters bool              // packets enter again behind the programs after the limit
	loses    bool              // they do not enter again
	chain    []report.Attached // what they pass after they leave the chain, on ingress
	warning  string            // why no packet is delayed, or all are lost
}

// delayedBy judges the fq qdisc of a device, or the ifb through which packets enter it.
func delayedBy(s *Stop) delayer {
	if s.Direction == policy.Egress {
		if s.Qdisc.HasFQ {
			return delayer{delays: true}
		}
		return delayer{warning: notDelayed(s.Name, s.Qdisc.Kind) + "'shapectl set' with --setup-fq installs fq"}
	}
	const mends = "set one of the rules here again to repair that"
	ifb := s.Ifb
	if ifb == nil {
		return delayer{reenters: true, loses: true, warning: "the ifb device for delayed packets is gone, so packets that conform are lost; " + mends}
	}
	by := delayer{reenters: true, chain: []report.Attached{{At: "ifb", Name: ifb.Name, Ours: true}, {At: "qdisc", Name: ifb.State.Kind}}}
	switch {
	case !ifb.Up:
		by.loses, by.warning = true, ifb.Name+", the ifb device for delayed packets, is down, so packets that conform are lost; "+mends
	case !ifb.State.HasFQ:
		by.warning = notDelayed(ifb.Name, ifb.State.Kind) + mends
	default:
		by.delays = true
	}
	return by
}

// notDelayed says what happens to a rule that delays where the qdisc of its device is not fq.
func notDelayed(device, qdisc string) string {
	return fmt.Sprintf("no packet is delayed: only the fq qdisc does that, and %s has %s. Delayed packets pass at once, and the rate is kept by drops alone; ",
		device, qdisc)
}
