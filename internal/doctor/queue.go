package doctor

import (
	"fmt"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Queue is what holds back the packets of a side whose rules delay.
type Queue struct {
	// State is of the device on egress, of the ifb on ingress.
	State fq.State
	// Ifb is that by which what enters is held back; nil on egress, and where it is not there.
	Ifb *fq.Ifb
}

// delaying are the rules that delay what exceeds.
func (s Side) delaying() []Rule {
	return slices.DeleteFunc(s.Limits.limited(), func(r Rule) bool { return r.Excess != policy.Delay })
}

// waiting is how many packets may have to wait for one of the rules, and for how long.
func waiting(rules []Rule) (packets uint32, longest time.Duration) {
	limits := make([]policy.Rule, len(rules))
	for i, r := range rules {
		limits[i] = r.Rule
	}
	return loader.Waiting(limits)
}

func checkQueue(f Facts, s Side, _ *Device) []report.Finding {
	delaying := s.delaying()
	switch {
	case len(delaying) == 0 && s.HasOurFQ:
		return s.finding(report.Note, "queue", "the device has the fq that --setup-fq has set, and no rule that delays",
			fmt.Sprintf("%s puts back what there was; other rules there would go, too", s.flush(f.Netns)))
	case len(delaying) == 0:
		return nil
	case s.Direction == policy.Ingress && s.Limits.State == loader.Moved:
		return s.finding(report.Failed, "queue",
			"the device has moved to another network namespace, and the ifb by which its packets are held back has not: those that conform are lost there: "+
				prefixes(delaying), fmt.Sprintf("%s here", s.flush(f.Netns)))
	case !s.inForce() || s.Queue == nil:
		return nil
	case s.Direction == policy.Ingress:
		if findings := s.checkIfb(delaying); findings != nil {
			return findings
		}
	}
	return s.checkFQ(f, delaying)
}

// checkIfb finds what keeps packets from coming out of the ifb again.
func (s Side) checkIfb(delaying []Rule) []report.Finding {
	again := "set one of them again, which makes it anew"
	switch ifb := s.Queue.Ifb; {
	case ifb == nil:
		return s.finding(report.Failed, "queue", "the ifb by which packets are held back is gone: those that conform are lost: "+prefixes(delaying), again)
	case !ifb.Up:
		return s.finding(report.Failed, "queue", ifb.Name+", by which packets are held back, is down: those that conform are lost: "+prefixes(delaying), again)
	}
	return nil
}

func (s Side) checkFQ(f Facts, delaying []Rule) []report.Finding {
	q := s.Queue.State
	packets, longest := waiting(delaying)
	device := s.Name
	mend := "--setup-fq with " + plain.Suggest(f.Netns, "set") + " or 'apply', or: " + q.Command(device, f.Netns, packets)
	if s.Queue.Ifb != nil {
		device = s.Queue.Ifb.Name
		mend = "set one of the rules again, which mends that"
	}
	if !q.HasFQ {
		return s.finding(report.Failed, "queue",
			fmt.Sprintf("nothing is held back, as %s has the qdisc %s and only fq does that: what should wait leaves at once, and more is dropped: %s",
				device, q.Kind, prefixes(delaying)), mend)
	}
	var findings []report.Finding
	if q.Horizon <= longest {
		becomes := "is sent too early"
		if q.HorizonDrop {
			becomes = "is dropped"
		}
		findings = append(findings, s.finding(report.Failed, "queue",
			fmt.Sprintf("the fq of %s holds packets back for %v at most, and rules do for up to %v: what is to wait longer %s, and counts as passed",
				device, q.Horizon, longest.Round(time.Millisecond), becomes), "shorten the wait (--capacity or --queue), or "+mend)...)
	}
	if !q.Room(packets) {
		findings = append(findings, s.finding(report.Warning, "queue",
			fmt.Sprintf("up to %d packets may have to wait, and the fq of %s holds %d, and %d of one flow: it drops what is more, which counts as passed",
				packets, device, q.Limit, q.FlowLimit), mend)...)
	}
	if q.Drops > 0 {
		findings = append(findings, s.finding(report.Warning, "queue",
			fmt.Sprintf("the fq of %s has dropped %s by limits of its own, since it was made: those of rules count as passed", device, plain.Count(q.Drops, "packet")),
			fmt.Sprintf("'tc -s qdisc show dev %s' tells by which", plain.Word(device)))...)
	}
	if s.Queue.Ifb == nil && !q.TellsApart() {
		findings = append(findings, s.finding(report.Note, "queue",
			fmt.Sprintf("the fq of %s holds packets back that have to wait, and tells only %s apart of what no connected socket sends: "+
				"packets, forwarded ones too, may wait for others' that share one", device, plain.Count(q.Flows, "flow")),
			"to tell more apart: "+q.Command(device, f.Netns, packets))...)
	}
	if findings == nil {
		findings = s.finding(report.OK, "queue", fmt.Sprintf("the fq of %s holds packets back that have to wait", device), "")
	}
	return findings
}
