package explain

import (
	"fmt"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/doctor"
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
	out.Chain = []report.Attached{}
	for i, e := range s.Path {
		out.Chain = append(out.Chain, report.Attached{At: e.At, ProgramID: e.ID, Name: e.Name, Ours: e.Ours, Decides: i == decides, Limits: e.Limits})
		switch {
		case e.Ours:
		case s.Rule == nil && isShapectl(e):
			out.Verdict, out.Conforms, out.Note = "unknown", false, loader.ErrElsewhere.Error()
		case i < decides:
			out.Warnings = append(out.Warnings, runsBefore(e))
		case s.Queue != nil && s.Direction == policy.Ingress:
			out.Warnings = append(out.Warnings, called(e)+" runs after the limit, and does not see packets that enter through the ifb")
		}
		if i == decides && s.Queue != nil && s.Queue.Ifb != nil {
			out.Chain = append(out.Chain, report.Attached{At: "ifb", Name: s.Queue.Ifb.Name, Ours: true}, report.Attached{At: "qdisc", Name: s.Queue.Ifb.State.Kind})
		}
	}
	if s.Queue == nil {
		return
	}
	fault, lost := s.Queue.Fault(s.Name, s.Direction)
	out.HeldBack = new(fault == "")
	switch {
	case fault == "":
	case s.Direction == policy.Egress:
		out.Warnings = append(out.Warnings, fault+"; 'shapectl set' with --setup-fq installs fq")
	default:
		out.Warnings = append(out.Warnings, fault+"; "+doctor.Mend)
	}
	if lost && out.Verdict != "drop" && out.Verdict != "unknown" && !report.NotInForce(out.Attached) {
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
