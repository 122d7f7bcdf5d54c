// Package sandbox runs the model on loads that people make up, to show what a limit does: the two meters
// and the queue side by side. It touches no device. The work and the answer are bounded, whatever is asked.
package sandbox

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/replay"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Request is a limit and a load.
type Request struct {
	// Limit has the options of a limit as on the command line. The algorithm is that of the queue.
	Limit     map[string]string `json:"limit"`
	Senders   []Sender          `json:"senders,omitempty"`
	Trace     string            `json:"trace,omitempty"`     // instead of senders: a CSV of time_ns,bytes, as for replay
	Direction string            `json:"direction,omitempty"` // of the rule: egress (default) or ingress
	// Unit is what a packet is called: packet (default) or request.
	Unit string `json:"unit,omitempty"`
	// DrawPackets is how many packets the answer lists for each limit at most; 0 for the default.
	DrawPackets int `json:"draw_packets,omitempty"`

	recorded  []trace.Packet
	direction policy.Direction
}

// A Result is what happened to a load.
type Result struct {
	Says   string    `json:"says"` // compares the limits
	Limits []Outcome `json:"limits"`
}

// An Outcome is what one limit did. With an error, it has only a name and the error.
type Outcome struct {
	Name      string `json:"name"` // gcra, leaky or queue
	Error     string `json:"error,omitempty"`
	Sentence  string `json:"sentence"`
	Says      string `json:"says"`    // what happened
	Command   string `json:"command"` // that sets the limit; empty if it cannot be set
	NoCommand string `json:"no_command,omitempty"`

	Complete bool            `json:"complete"` // false if the load was cut
	Thinned  bool            `json:"thinned"`  // not every packet is listed
	Summary  report.Replay   `json:"summary"`
	Senders  []SenderOutcome `json:"senders"`
	// FirstDroppedNS is null if nothing is dropped.
	FirstDroppedNS *uint64 `json:"first_dropped_ns"`
	Drawing

	rule     policy.Rule
	verdicts []model.Verdict
	drawer   *drawer // nil after an error
}

// A SenderOutcome is what happened to the packets of a sender.
type SenderOutcome struct {
	Name           string `json:"name"`
	OfferedPackets uint64 `json:"offered_packets"`
	PassedPackets  uint64 `json:"passed_packets"`
	PassedBytes    uint64 `json:"passed_bytes"`
	DroppedPackets uint64 `json:"dropped_packets"`
	MarkedPackets  uint64 `json:"marked_packets"`
	LongestDelayNS uint64 `json:"longest_delay_ns"`
}

// network is the network of the rule. All hosts of a load are in it.
var network = netip.MustParsePrefix("10.0.0.0/24")

const device, l2Bytes = "eth0", 14

// options of a limit that a sandbox has: those that need neither pools nor people.
var options = []string{"rate", "capacity", "algorithm", "each", "excess", "queue", "ecn-above", "order", "penalty", "overhead", "mpu", "share"}

// limit returns the limit as it was asked for.
func (r *Request) limit() (l policy.Limit, err error) {
	for _, key := range slices.Sorted(maps.Keys(r.Limit)) {
		if !slices.Contains(options, policy.LimitKey(key)) {
			return l, fmt.Errorf("%.40q is no option of a sandbox; use %s", key, plain.List(options))
		}
		if r.Limit[key] == "" {
			continue
		}
		if err := l.Set(key, r.Limit[key]); err != nil {
			return l, err
		}
	}
	switch {
	case l.Rate == 0:
		return l, errors.New("rate is missing; say how much, such as 10mbit")
	case l.Rate == policy.Unlimited:
		return l, errors.New("rate unlimited would pass everything; write a rate such as 10mbit")
	case l.Algorithm.HasColours():
		return l, fmt.Errorf("a sandbox compares gcra, leaky and the queue, so algorithm %v has no use; see its colours with 'shapectl replay'", l.Algorithm)
	case l.Excess == policy.Delay:
		return l, errors.New("excess delay is the queue, which is always shown; use drop, ecn or pass for the meters")
	case l.Each.Kind == policy.EachSubnet || l.Share.Kind == policy.ShareSubnet || l.Share.Kind == policy.ShareMember:
		return l, errors.New("a sandbox has hosts and flows, but no subnets; use each all, host or flow, and share host or flow")
	}
	return l, nil
}

// check checks the load.
func (r *Request) check() (err error) {
	r.direction = policy.Egress
	if r.Direction != "" {
		if err := r.direction.Set(r.Direction); err != nil {
			return err
		}
	}
	switch {
	case r.Unit != "" && r.Unit != "packet" && r.Unit != "request":
		return fmt.Errorf("the unit %.40q is unknown; use packet or request", r.Unit)
	case r.DrawPackets < 0 || r.DrawPackets > MaxPackets:
		return fmt.Errorf("draw_packets of %d is out of range; use 1 to %d", r.DrawPackets, MaxPackets)
	case (r.Trace == "") == (len(r.Senders) == 0):
		return errors.New("the load is missing; give either senders or a trace")
	case len(r.Senders) > MaxSenders:
		return fmt.Errorf("%d senders; at most %d can send", len(r.Senders), MaxSenders)
	}
	if r.Trace != "" {
		r.recorded, err = readTrace(r.Trace)
		if err != nil {
			return fmt.Errorf("trace: %w", err)
		}
	}
	for i := range r.Senders {
		if err := r.Senders[i].check(); err != nil {
			return fmt.Errorf("sender %d: %w", i+1, err)
		}
	}
	return nil
}

// Run offers the load to both meters and the queue, to each as if it were alone.
func Run(r Request) (Result, error) {
	l, err := r.limit()
	if err == nil {
		err = r.check()
	}
	if err != nil {
		return Result{}, err
	}
	gcra, leaky, queue := l, l, l
	gcra.Algorithm, leaky.Algorithm, queue.Excess = policy.GCRA, policy.Leaky, policy.Delay
	gcra.Penalty, queue.Penalty = policy.Penalty{}, policy.Penalty{}
	for _, meter := range []*policy.Limit{&gcra, &leaky} {
		meter.Queue, meter.ECNAbove, meter.Order = policy.Capacity{}, 0, policy.FIFO
	}
	if queue.Algorithm == policy.Leaky {
		queue.Queue, queue.Order = policy.Capacity{}, policy.FIFO
	}
	result := Result{}
	for _, of := range []struct {
		name  string
		limit *policy.Limit
	}{{"gcra", &gcra}, {"leaky", &leaky}, {"queue", &queue}} {
		result.Limits = append(result.Limits, r.run(of.name, of.limit))
	}
	r.draw(result.Limits)
	result.Says = r.compare(result.Limits)
	return result, nil
}

// draw draws all runs on the same axis of time.
func (r *Request) draw(all []Outcome) {
	most := r.DrawPackets
	if most == 0 {
		most = defaultDrawn
	}
	from, until := uint64(math.MaxUint64), uint64(0)
	for _, o := range all {
		if o.drawer != nil {
			first, last := o.drawer.span()
			from, until = min(from, first), max(until, last)
		}
	}
	for i := range all {
		if o := &all[i]; o.drawer != nil {
			o.Drawing, o.Thinned = o.drawer.drawing(from, until, most)
			o.Says = r.says(o)
		}
	}
}

// run offers the load to a limit.
func (r *Request) run(name string, l *policy.Limit) Outcome {
	o := Outcome{Name: name, Complete: true}
	rule, err := l.Tiny(network)
	if err != nil {
		return Outcome{Name: name, Error: err.Error()}
	}
	rule = rule.On(l2Bytes)
	limits := replay.Limits{Rules: []policy.Rule{rule}, Match: r.direction.FarSide()}
	o.Sentence = rule.Sentence(device, r.direction, limits.Match)
	o.Command, o.NoCommand = r.command(l)

	engine, summary, load := replay.NewModel(limits), replay.NewSummary(limits), r.load()
	begin := uint64(0)
	if r.recorded != nil {
		begin = math.MaxUint64 // at its first packet
	}
	draw := newDrawer(rule, begin, len(load.sources))
	for i := range load.sources {
		o.Senders = append(o.Senders, SenderOutcome{})
		if i < len(r.Senders) {
			o.Senders[i].Name = r.Senders[i].Name
		}
	}
	var p trace.Packet
	for {
		sender := load.next(&p)
		if sender < 0 {
			break
		}
		if summary.Packets() == MaxPackets {
			o.Complete = false
			break
		}
		result, err := engine.Offer(&p)
		if err != nil {
			return Outcome{Name: name, Error: err.Error()}
		}
		summary.Add(result)
		draw.add(sender, result)
		o.Senders[sender].add(result)
		if o.verdicts = append(o.verdicts, result.Verdict); dropped(result) && o.FirstDroppedNS == nil {
			o.FirstDroppedNS = &result.Time
		}
		load.told(sender, result)
	}
	o.Summary = report.NewReplay(limits, summary)
	o.Summary.Engine, o.Summary.Complete, o.Summary.Sentences = "model", o.Complete, []string{o.Sentence}
	o.rule, o.drawer = rule, draw
	return o
}

func (s *SenderOutcome) add(r replay.Result) {
	s.OfferedPackets++
	if dropped(r) {
		s.DroppedPackets++
		return
	}
	s.PassedPackets++
	s.PassedBytes += r.Bytes
	if r.Verdict == model.Mark {
		s.MarkedPackets++
	}
	s.LongestDelayNS = max(s.LongestDelayNS, r.Wait)
}

// command returns the command that sets the limit, or why it cannot be set.
func (r *Request) command(l *policy.Limit) (command, why string) {
	rule, err := l.Rule(network)
	if err != nil {
		return "", err.Error()
	}
	rule = rule.On(l2Bytes)
	bare, err := policy.Limit{Rate: rule.Rate}.Rule(network)
	if err != nil {
		return "", err.Error()
	}
	command = plain.Command("", "set", device, r.direction.String(), network.String()) + " --rate " + rule.Rate.String()
	for _, c := range policy.Changes(&bare, &rule) {
		command += " --" + c.Option + " " + plain.Word(c.Want)
	}
	if rule.Excess == policy.Delay {
		command += " --setup-fq"
	}
	return command, ""
}
