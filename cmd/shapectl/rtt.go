package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/observe"
	"github.com/shapectl/shapectl/internal/report"
)

const (
	usualRTTInterval = 5 * time.Second
	// rttStep is how often rtt looks whether rules limit.
	rttStep = 100 * time.Millisecond
)

func rttCommand(e *env) *cobra.Command {
	interval, oneIn := usualRTTInterval, uint32(1)
	cmd := &cobra.Command{
		Use:   "rtt [DEV [ingress|egress [CIDR|any]] | ADDRESS|CIDR|NAME|PLAN [ingress|egress]] [flags]",
		Short: "Measure TCP round-trip times and retransmissions under limits",
		Long: `Measure whether limits slow TCP down. The command follows the TCP flows of rules for a few seconds. It compares
round-trip times and retransmissions while a rule is limiting with those at other times. A rule is limiting until one
second after it last dropped, delayed or marked a packet. If each host has its own bucket, this applies to each host.

LIMITED and OTHERWISE are median round-trip times between the device and the receivers, including the delay in the
rule's queue; P95 is the 95th percentile. SENDER is the median between the device and the senders. RESENT is the share
of packets with payload that were sent again. For a single rule, its hosts are listed, too.

The measuring programs are attached only while this command runs. They need Linux 6.6. The arguments are those of
'shapectl show'.`,
		Example: `  shapectl rtt
  shapectl rtt eth0 egress --interval 30s
  shapectl rtt 10.0.3.7
  shapectl rtt eth0 egress 10.0.0.0/24 -j`,
		Args:              args(0, 3),
		ValidArgsFunction: e.orPool(e.labelled(e.completeNetwork, nameAndPlanOf)),
		RunE: func(cmd *cobra.Command, given []string) error {
			if err := checkInterval(cmd, interval); err != nil {
				return err
			}
			if !isOneIn(oneIn) {
				return inputf("rtt: --one-in %d is out of range; use a power of two up to 65536", oneIn)
			}
			want, search, err := parseSearch("rtt", given)
			if err != nil {
				return err
			}
			return e.rtt(want, search, interval, oneIn)
		},
	}
	cmd.Flags().Var(duration(&interval), "interval", "measure over this `time` (default: 5s)")
	cmd.Flags().Uint32Var(&oneIn, "one-in", oneIn, "follow one flow in `N`, a power of two; for busy devices")
	return cmd
}

// isOneIn reports whether one flow in n can be followed: n is a power of two up to 65536.
func isOneIn(n uint32) bool { return bits.OnesCount32(n) == 1 && n <= 1<<16 }

func (e *env) rtt(want filterRules, search bool, interval time.Duration, oneIn uint32) error {
	s, err := e.readRules(&want, search, reads{})
	if s == nil {
		return err
	}
	rules := slices.DeleteFunc(slices.Clone(s.found), func(it *live.Item) bool { return it.IsPool() })
	seen := report.RTTs{Rules: []report.RTT{}}
	switch {
	case len(rules) == 0:
	case e.rtts != nil:
		reading, failed := e.rtts.Latest(e.context())
		if reading.Interval == 0 {
			return fmt.Errorf("rtt: %w", e.advise(cmp.Or(failed, errors.New("nothing was measured yet"))))
		}
		if failed != nil {
			err = errors.Join(err, e.degraded("rtt: %w", failed))
		}
		seen = reading.Report(rules)
	default:
		o, wrong := e.options()
		if wrong != nil {
			return wrong
		}
		reader := &live.Reader{Options: o, Netns: e.netns}
		defer reader.Close()
		reading, failed := e.observe(reader, rules, interval, oneIn)
		switch {
		case reading.Interval == 0:
			return fmt.Errorf("rtt: %w", e.advise(failed))
		case failed != nil:
			err = errors.Join(err, e.degraded("rtt: %w", failed))
		}
		seen = reading.Report(rules)
	}
	written := e.print(seen, func(w io.Writer) error {
		switch {
		case len(rules) == 0:
			_, err := fmt.Fprintln(w, want.none())
			return err
		case len(seen.Rules) == 0:
			_, err := fmt.Fprintf(w, "no TCP packets with payload in %v\n", interval)
			return err
		}
		return seen.Text(w, e.columns)
	})
	return errors.Join(err, written)
}

// observe looks at the packets of rules for some time. With an error about some of the devices comes what was measured on others.
func (e *env) observe(reader *live.Reader, rules []*live.Item, interval time.Duration, oneIn uint32) (out observe.Reading, err error) {
	chosen := map[live.Key]bool{}
	for i := range rules {
		chosen[rules[i].Key] = true
	}
	o, err := observe.Start(observe.Options{Netns: e.netns, OneIn: oneIn})
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, o.Close()) }()
	for end := time.Now().Add(interval); ; {
		now, unread := reader.Read(live.What{})
		if now == nil {
			return out, unread
		}
		var follow []*live.Item
		for i := range now.Items {
			if it := &now.Items[i]; chosen[it.Key] {
				follow = append(follow, it)
			}
		}
		failed := o.Follow(follow)
		if !time.Now().Before(end) {
			out, err = o.Read()
			return out, errors.Join(err, failed)
		}
		if err := e.wait(min(rttStep, time.Until(end))); err != nil {
			return out, err
		}
	}
}
