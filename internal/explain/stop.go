package explain

import (
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/doctor"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

var sideNames = map[policy.Match]string{policy.MatchSrc: "source address", policy.MatchDst: "destination address"}

func judgeStop(p *Packets, s *Stop) report.Stop {
	out := report.Stop{Warnings: []string{}, Hides: []report.Brief{}}
	out.BorrowedBy, out.Pools = []string{}, []report.PoolLevel{}
	out.Answer = report.Answer{
		Device: s.Name, Direction: s.Direction.String(), Verdict: "pass", Conforms: true,
		Bytes: countPacket(s.Frame, s.Tags, policy.Framing{}),
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
	if s.Unreadable != nil {
		out.Verdict, out.Conforms, out.Note = "unknown", false, "the rules here cannot be read: "+plain.OneLine(s.Unreadable)
	}
	if s.Rule != nil {
		judgeRule(&out, p, s)
	}
	if s.Marks != nil && out.Note == "" {
		out.Note = "packets with a mark or VLAN may meet other rules: " + plain.List(policy.CIDRs(s.Marks))
	}
	judgePath(&out, p.Netns, s)
	return out
}

// judgePath says what is attached, and how that affects the packets of the rule.
func judgePath(out *report.Stop, netns string, s *Stop) {
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
		if s.Rule == nil && !e.Ours && e.IsShapectl() {
			out.Verdict, out.Conforms, out.Note = "unknown", false, loader.ErrElsewhere.Error()
		}
		if i == decides && s.Queue != nil && s.Queue.Ifb != nil {
			out.Chain = append(out.Chain, report.Attached{At: "ifb", Name: s.Queue.Ifb.Name, Ours: true}, report.Attached{At: "qdisc", Name: s.Queue.Ifb.State.Kind})
		}
	}
	var delaying []doctor.Rule
	if s.Queue != nil {
		delaying = []doctor.Rule{{Rule: s.Rule.Rule}}
	}
	if decides >= 0 {
		hook := doctor.Hook{Name: s.Name, Direction: s.Direction, Limits: &doctor.Limits{Mode: s.Hook.Mode}, Path: s.Path}
		for _, f := range hook.Beside(netns, delaying) {
			if f.Status == report.Warning || f.Check == "xdp" {
				out.Warnings = append(out.Warnings, f.Finding+"; "+f.Advice)
			}
		}
	}
	if s.Queue == nil {
		return
	}
	fault, mend, lost := s.Queue.Fault(netns, s.Name, s.Direction)
	if out.HeldBack = new(fault == ""); fault != "" {
		out.Warnings = append(out.Warnings, fault+"; "+mend)
	}
	if lost && out.Verdict != "drop" && out.Verdict != "unknown" && !report.NotInForce(out.Attached) {
		out.Verdict, out.Conforms, out.Note = "lost", false, ""
	}
}

// deciderOf is which of a path is shapectl, -1 if none is.
func deciderOf(path []netinfo.ChainEntry) int {
	return slices.IndexFunc(path, func(e netinfo.ChainEntry) bool { return e.Ours })
}
