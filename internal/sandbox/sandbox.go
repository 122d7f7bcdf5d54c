// Package sandbox offers loads that people make up to the model of replay, to show what a limit does: the two meters
// and the queue side by side. It touches no device. The work and the answer are bounded, whatever is asked.
package sandbox

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
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

	direction policy.Direction
}

// A Result is what happened to a load.
type Result struct {
	Says   string     `json:"says"` // compares the limits
	Limits []*Outcome `json:"limits"`
}

// An Outcome is what one limit did. With an error, it has only a name and the error.
type Outcome struct {
	Name      string `json:"name"` // gcra, leaky or queue
	Error     string `json:"error,omitempty"`
	Sentence  string `json:"sentence"`
	Says      string `json:"says"`    // what happened
	Command   string `json:"command"` // that sets the limit; empty if it cannot be set
	NoCommand string `json:"no_command,omitempty"`

	Summary report.Replay `json:"summary"`
	Packets Columns       `json:"packets"`
	Rates   replay.Panel  `json:"rates"`

	rule policy.Rule
}

// Columns are all packets, in the order of the load, with the keys of 'shapectl replay -j'.
type Columns struct {
	TimeNS      []uint64  `json:"time_ns"`
	Bytes       []uint64  `json:"bytes"`
	Sender      []int     `json:"sender"`
	Verdict     []string  `json:"verdict"`
	Conforms    []bool    `json:"conforms"`
	DepartNS    []*uint64 `json:"depart_ns"`          // null if dropped
	BeforeBytes []uint64  `json:"level_before_bytes"` // of its bucket
	AfterBytes  []uint64  `json:"level_bytes"`
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

// Run offers the load to both meters and the queue, to each as if it were alone.
func Run(r Request) (result Result, err error) {
	l, err := r.limit()
	if err == nil {
		err = r.check()
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
	for i, limit := range []*policy.Limit{&gcra, &leaky, &queue} {
		if err == nil {
			o := &Outcome{Name: [...]string{"gcra", "leaky", "queue"}[i]}
			result.Limits = append(result.Limits, o)
			err = r.run(o, limit)
		}
	}
	if err != nil {
		return Result{}, err
	}
	result.Says = r.compare(result.Limits)
	return result, nil
}

// run offers the load to a limit. Its error is one of the load.
func (r *Request) run(o *Outcome, l *policy.Limit) error {
	rule, err := l.Tiny(network)
	if err != nil {
		o.Error = err.Error()
		return nil
	}
	load, err := r.load()
	if err != nil {
		return err
	}
	o.rule = rule.On(l2Bytes)
	limits := replay.Limits{Rules: []policy.Rule{o.rule}, Match: r.direction.FarSide()}
	run, limit := replay.NewRun(replay.NewModel(limits), limits), model.NewLimit(o.rule)
	buckets, complete := make([]model.Bucket, MaxSenders), true
	for p := (trace.Packet{}); ; {
		sender, err := load.next(&p)
		if err == io.EOF {
			break
		}
		if complete = run.Packets() < MaxPackets; !complete {
			break
		}
		var result replay.Result
		if err == nil {
			result, err = run.Offer(&p)
		}
		if err != nil {
			return err
		}
		load.told(sender, result)
		b := &buckets[0]
		if o.rule.Each.Kind != policy.EachAll {
			b = &buckets[sender]
		}
		o.Packets.add(sender, result, model.Bytes(limit.Level(*b, result.Time)))
		*b = limit.WithLevel(result.Level, result.Time)
	}
	o.Sentence = o.rule.Sentence(device, r.direction, limits.Match)
	o.Command, o.NoCommand = r.command(l)
	o.Summary = report.NewReplay(limits, run.Summary)
	o.Summary.Engine, o.Summary.Complete, o.Summary.Sentences = "model", complete, []string{o.Sentence}
	o.Rates = run.Rates(int(min(max(run.Packets()/8, 10), 80))) // an interval has some packets
	o.Says = r.says(o)
	return nil
}

func (c *Columns) add(sender int, r replay.Result, before uint64) {
	c.TimeNS, c.Bytes, c.Sender = append(c.TimeNS, r.Time), append(c.Bytes, r.Bytes), append(c.Sender, sender)
	c.Verdict, c.Conforms = append(c.Verdict, r.Verdict.String()), append(c.Conforms, !r.Excess)
	c.BeforeBytes, c.AfterBytes = append(c.BeforeBytes, before), append(c.AfterBytes, r.LevelBytes())
	var departs *uint64
	if r.Verdict != model.Drop {
		departs = new(r.Departure())
	}
	c.DepartNS = append(c.DepartNS, departs)
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

// presets are the cases of textbooks, then those of networks: a list of a name, a title, why it is worth a look, and a
// Request. A request of 1000 bytes a second is 8 kbit/s.
//
//go:embed presets.json
var presets []byte

// Handler answers GET with the presets and POST of a Request with a Result. It reads nothing else and changes nothing.
func Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if r.Method != http.MethodPost {
			_, _ = w.Write(presets) // the client may have left
			return
		}
		var asked Request
		var result any
		from := json.NewDecoder(r.Body)
		from.DisallowUnknownFields()
		err := from.Decode(&asked)
		if err == nil {
			result, err = Run(asked)
		}
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			result = struct {
				Error    string `json:"error"`
				ExitCode int    `json:"exit_code"` // as of the commands: bad input
			}{"sandbox: " + err.Error(), 1}
		}
		_ = json.NewEncoder(w).Encode(result) // the client may have left
	})
}
