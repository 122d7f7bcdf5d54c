package doctor

import (
	"fmt"
	"time"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Queue is the qdisc that delays the packets of a hook.
type Queue struct {
	// State is that of the device on egress, and of the ifb device on ingress.
	State fq.State
	// Ifb is the ifb device for delayed packets; nil on egress, and if there is none.
	Ifb *fq.Ifb
}

// QueueOf looks at the queue of a hook.
func QueueOf(index int, d policy.Direction) (*Queue, error) {
	var q Queue
	var err error
	if d == policy.Egress {
		q.State, err = fq.Look(index)
	} else if q.Ifb, err = fq.FindIfb(index); q.Ifb != nil {
		q.State = q.Ifb.State
	}
	return &q, err
}

// Fault is what keeps packets of a direction of a device from being delayed, or from leaving at all, "" for nothing, and what
// to do.
func (q *Queue) Fault(netns, device string, d policy.Direction) (fault, mend string, lost bool) {
	mend = "set one of the rules again to repair that"
	switch {
	case d == policy.Ingress && q.Ifb == nil:
		return "the ifb device for delayed packets is gone: those that conform are lost", mend, true
	case q.Ifb != nil && !q.Ifb.Up:
		return q.Ifb.Name + ", the ifb device for delayed packets, is down: those that conform are lost", mend, true
	case q.Ifb != nil:
		device = q.Ifb.Name
	default:
		mend = q.State.Advice("use --setup-fq with " + plain.Suggest(netns, "set") + " or 'apply'")
	}
	if !q.State.HasFQ {
		fault = fmt.Sprintf("no packet is delayed: only the fq qdisc does that, and %s has %s. Delayed packets leave at once, and more are dropped", device, q.State.Kind)
	}
	return fault, mend, false
}

// delaying are the rules with excess delay, and those in a pool with it.
func (f *Facts) delaying(s *Hook) (rules []Rule) {
	if s.Limits == nil {
		return nil
	}
	for _, r := range s.Limits.Rules {
		if r.Excess == policy.Delay || len(f.queues[r.Within]) > 0 {
			rules = append(rules, r)
		}
	}
	return rules
}

func (f *Facts) checkQueue(s *Hook, _ *Device) {
	delaying := f.delaying(s)
	switch {
	case len(delaying) == 0 && s.HasOurFQ:
		f.say(s, report.Note, "queue", "the device has the fq qdisc of --setup-fq, but no rule that delays packets", f.flush(s)+" brings the default qdisc back; it also deletes other rules there")
		return
	case len(delaying) == 0:
		return
	case s.Direction == policy.Ingress && s.Limits.State == loader.Moved:
		f.say(s, report.Failed, "queue", "the device has moved to another network namespace without its ifb device for delayed packets: those that conform are lost there: "+prefixes(delaying), f.flush(s)+" here")
		return
	case !s.inForce() || s.Queue == nil:
		return
	}
	q, device := s.Queue.State, s.Name
	fault, mend, _ := s.Queue.Fault(f.Netns, s.Name, s.Direction)
	if fault != "" {
		f.say(s, report.Failed, "queue", fault+": "+prefixes(delaying), mend)
		return
	}
	if s.Queue.Ifb != nil {
		device = s.Queue.Ifb.Name
	}
	var limits []policy.Rule
	for _, r := range delaying {
		limits = append(append(limits, r.Rule), f.queues[r.Within]...)
	}
	packets, longest := loader.Waiting(limits)
	enough := true
	if q.Horizon <= longest {
		becomes := "are sent too early"
		if q.HorizonDrop {
			becomes = "are dropped"
		}
		enough = false
		f.say(s, report.Failed, "queue", fmt.Sprintf("the fq of %s delays packets by %v at most, and rules by up to %v: packets with a longer delay %s, and count as passed",
			device, q.Horizon, longest.Round(time.Millisecond), becomes), "shorten the wait (--capacity or --queue), or "+mend)
	}
	if !q.Room(packets) {
		enough = false
		f.say(s, report.Warning, "queue", fmt.Sprintf("up to %d packets may be queued, and the fq of %s has room for %d, and for %d of one flow: it drops the others, which count as passed",
			packets, device, q.Limit, q.FlowLimit), mend)
	}
	if q.Drops > 0 {
		enough = false
		f.say(s, report.Warning, "queue", fmt.Sprintf("the fq of %s has dropped %s by its own limits since it was created; they count as passed", device, plain.Count(q.Drops, "packet")),
			fmt.Sprintf("'tc -s qdisc show dev %s' shows by which", plain.Word(device)))
	}
	if enough {
		f.say(s, report.OK, "queue", fmt.Sprintf("the fq of %s delays packets", device), "")
	}
}
