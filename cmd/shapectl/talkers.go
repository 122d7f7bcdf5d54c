package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/observe"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/top"
	"github.com/shapectl/shapectl/pkg/loader"
)

type talkersOptions struct {
	interval time.Duration
	top      int
}

// mostCounted is for how many rules talkers counts at once: each takes two programs on a device.
const mostCounted = 10

func talkersCommand(e *env) *cobra.Command {
	o := talkersOptions{interval: usualInterval}
	cmd := &cobra.Command{
		Use:   "talkers DEV [ingress|egress [CIDR|any]] | ADDRESS|CIDR|NAME|PLAN [ingress|egress] [flags]",
		Short: "Measure which hosts or flows use a rule most",
		Long: `Measure which hosts use a rule most. With an ADDRESS, the command measures which flows of this host use it most. Those
that offer most come first.

OFFERED is what the rule was offered, PASSED what left the rule again, LEVEL and FULL how full the bucket of the host or
flow is, if it has one of its own.

The programs that count are attached only while this command runs. They need Linux 6.6. The arguments are those of
'shapectl show'. 'shapectl top' shows the same on a screen: press enter on a rule.`,
		Example: `  shapectl talkers eth0 egress 10.0.0.0/16
  shapectl talkers alice --interval 10s
  shapectl talkers 10.0.3.7 egress -j`,
		Args:              args(1, 3),
		ValidArgsFunction: e.orPool(e.labelled(e.completeNetwork, nameAndPlanOf)),
		RunE: func(cmd *cobra.Command, given []string) error {
			if err := checkInterval(cmd, o.interval); err != nil {
				return err
			}
			if o.top < 1 {
				return inputf("talkers: --top %d shows nothing; use 1 or more", o.top)
			}
			want, search, err := parseSearch("talkers", given)
			if err != nil {
				return err
			}
			return e.talkers(want, search, o)
		},
	}
	cmd.Flags().Var(duration(&o.interval), "interval", "measure over this `time` (default: 1s)")
	cmd.Flags().IntVar(&o.top, "top", 20, "show only the first `N`")
	return cmd
}

func (e *env) talkers(want filterRules, search bool, o talkersOptions) (err error) {
	found, _, err := e.rules(&want, search, measure.Details{})
	if found == nil {
		return err
	}
	_, rules := found.Split()
	rules.SortByDevice()
	host := ""
	if want.address.IsValid() {
		host = want.address.String()
		rules = slices.CompactFunc(rules, func(a, b report.Rule) bool { return a.Device == b.Device && a.Direction == b.Direction }) // the first decides
	}
	switch {
	case len(rules) == 0 && len(found) > 0:
		return inputf("talkers: %s is a pool; name one of its rules", plain.Line(found[0].Name))
	case len(rules) == 0:
		return missingError{inputf("talkers: %s", want.none())}
	case len(rules) > mostCounted:
		return inputf("talkers: %d rules match; name at most %d", len(rules), mostCounted)
	}
	all, err := e.allRules()
	if err != nil {
		return fmt.Errorf("talkers: %w", e.advise(err))
	}
	var lookers []*ruleLooker
	defer func() {
		for _, l := range lookers {
			err = errors.Join(err, l.Close())
		}
	}()
	for i := range rules {
		l, failed := e.look(all, &rules[i], host)
		if l != nil {
			lookers = append(lookers, l)
		}
		if failed == nil {
			failed = l.failed
		}
		if failed != nil {
			return fmt.Errorf("talkers: %w", e.advise(failed))
		}
	}
	if err := e.wait(o.interval); err != nil {
		return err
	}
	seen := report.Talkers{IntervalNS: uint64(o.interval), Rules: []report.RuleTalkers{}}
	for _, l := range lookers {
		one, failed := l.Read()
		if failed != nil {
			err = errors.Join(err, e.degraded("talkers: %w", failed))
		}
		one.Talkers = slices.DeleteFunc(one.Talkers, func(t report.Talker) bool { return t.OfferedBits == nil }) // only a bucket is left
		one.LeftOut = max(len(one.Talkers)-o.top, 0)
		one.Talkers = one.Talkers[:len(one.Talkers)-one.LeftOut]
		seen.Rules = append(seen.Rules, one)
	}
	return errors.Join(err, e.print(seen, func(w io.Writer) error { return seen.Text(w, e.columns) }))
}

// allRules are the rules of this network namespace, as far as they can be read.
func (e *env) allRules() (report.Rules, error) {
	o, err := e.options()
	if err != nil {
		return nil, err
	}
	reader := &measure.Reader{Options: o, Netns: e.netns}
	defer reader.Close()
	now, err := reader.Read(measure.What{})
	if now == nil {
		return nil, err
	}
	return now.Rules, nil
}

// A ruleLooker watches the hosts of a rule, or the flows of one of them: what they send, and their buckets.
type ruleLooker struct {
	e       *env
	rule    *report.Rule
	host    string           // whose flows; "" for the hosts
	talkers *observe.Talkers // nil where this process cannot count
	failed  error            // why talkers is nil

	buckets map[string]report.Bucket // the fullest ones of the rule
	of      report.Rule              // the rule as it was with them
	next    time.Time                // not before are they read again
}

const (
	mostBuckets = 1000
	// restFactor is how much longer than a pass over the table the pause after it is: a large table must not keep a CPU busy.
	restFactor = 200
)

// look watches one of all rules.
func (e *env) look(all report.Rules, rule *report.Rule, host string) (*ruleLooker, error) {
	l := &ruleLooker{e: e, rule: rule, host: host}
	o, err := observe.TalkersOf(all, rule)
	if err != nil {
		return nil, err
	}
	if o.Netns, o.ByFlow = e.netns, host != ""; o.ByFlow {
		if subnet, err := netip.ParsePrefix(host); err == nil {
			o.Network = subnet
		} else if address, err := netip.ParseAddr(host); err == nil {
			o.Network, o.Except = netip.PrefixFrom(address, address.BitLen()), nil
		}
	}
	if l.talkers, l.failed = observe.StartTalkers(o); l.failed != nil {
		l.talkers = nil
	}
	return l, nil
}

// Look implements top.Source.
func (s *topSource) Look(rule *report.Rule, host string) (top.Looker, error) {
	l, err := s.e.look(*s.all.Load(), rule, host)
	if err != nil {
		return nil, err
	}
	return l, nil
}

// Read implements top.Looker.
func (l *ruleLooker) Read() (report.RuleTalkers, error) {
	failed := l.readBuckets()
	out := report.NewRuleTalkers(l.rule, l.host)
	if l.failed != nil {
		out.Note = plain.OneLine(l.e.advise(l.failed))
	}
	seen := map[string]bool{}
	if l.talkers != nil {
		reading, err := l.talkers.Read()
		bits := func(bytes uint64) *uint64 {
			return new(uint64(float64(bytes) * 8e9 / float64(max(reading.Interval, 1))))
		}
		passed := func(bytes uint64) *uint64 {
			if reading.PassedUnknown {
				return nil
			}
			return bits(bytes)
		}
		for _, t := range reading.Talkers {
			one := report.Talker{Key: t.Name(l.host != ""), OfferedBits: bits(t.Bytes), PassedBits: passed(t.PassedBytes)}
			seen[one.Key] = true
			out.Talkers = append(out.Talkers, l.filled(one))
		}
		out.OfferedBits, out.PassedBits = bits(reading.Total.Bytes), passed(reading.Total.PassedBytes)
		switch {
		case err != nil:
			out.Note = plain.OneLine(err)
		case reading.Others.Bytes > 0:
			out.Note = "others, for which there was no room to count, offer " + report.Bits(*bits(reading.Others.Bytes))
		case reading.PassedUnknown:
			out.Note = "passed traffic is unknown here, because the device may queue it"
		}
	}
	if l.host != "" {
		return out, nil // buckets of other hosts are none of these
	}
	var idle []report.Talker
	for key := range l.buckets {
		if !seen[key] {
			idle = append(idle, l.filled(report.Talker{Key: key}))
		}
	}
	slices.SortFunc(idle, func(a, b report.Talker) int {
		return cmp.Or(cmp.Compare(b.LevelBytes, a.LevelBytes), cmp.Compare(a.Key, b.Key))
	})
	out.Talkers = append(out.Talkers, idle...)
	return out, failed
}

// filled adds what is known of the bucket of a host or flow.
func (l *ruleLooker) filled(t report.Talker) report.Talker {
	if b, ok := l.buckets[t.Key]; ok {
		t.LevelBytes, t.FullPercent = b.LevelBytes, new(l.of.FullPercent(b.LevelBytes))
	}
	return t
}

// readBuckets reads the buckets of the rule, if it has several and the last time is long enough ago.
func (l *ruleLooker) readBuckets() error {
	began := time.Now()
	if l.rule.IsShared() || began.Before(l.next) {
		return nil
	}
	direction, prefix, err := ruleAt(l.rule)
	if err != nil {
		return err
	}
	e, _ := l.e.inner()
	var rules report.Rules
	err = e.with(loader.Read, "read buckets", func(n *loader.Namespace) (err error) {
		want := filterRules{device: l.rule.Device, direction: &direction, networks: networks{prefix}}
		rules, err = e.findRules(n, want, measure.Details{Buckets: true})
		return err
	})
	l.next = began.Add(restFactor * time.Since(began))
	if err != nil {
		return err
	}
	l.buckets = map[string]report.Bucket{}
	if len(rules) == 0 {
		return errRuleGone
	}
	l.of = rules[0]
	fullest := l.of.Buckets
	slices.SortFunc(fullest, func(a, b report.Bucket) int { return cmp.Compare(b.LevelBytes, a.LevelBytes) })
	for _, b := range fullest[:min(len(fullest), mostBuckets)] {
		l.buckets[b.Key] = b
	}
	l.of.Buckets = nil
	return nil
}

// Close implements top.Looker.
func (l *ruleLooker) Close() error {
	if l.talkers == nil {
		return nil
	}
	return l.talkers.Close()
}
