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

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/observe"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/top"
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
	s, err := e.readRules(&want, search, reads{})
	if s == nil {
		return err
	}
	host, rules := "", slices.DeleteFunc(slices.Clone(s.found), func(it *live.Item) bool { return it.IsPool() })
	if want.address.IsValid() {
		host = want.address.String()
		rules = slices.CompactFunc(rules, func(a, b *live.Item) bool { return a.Place == b.Place }) // the first decides
	}
	switch {
	case len(rules) == 0 && len(s.found) > 0:
		return inputf("talkers: %s is a pool; name one of its rules", plain.Line(s.found[0].Key.Pool))
	case len(rules) == 0:
		return missingError{inputf("talkers: %s", want.none())}
	case len(rules) > mostCounted:
		return inputf("talkers: %d rules match; name at most %d", len(rules), mostCounted)
	}
	var lookers []*ruleLooker
	defer func() {
		for _, l := range lookers {
			err = errors.Join(err, l.Close())
		}
	}()
	for _, it := range rules {
		l := e.look(s.Items, it, host)
		lookers = append(lookers, l)
		if l.failed != nil {
			return fmt.Errorf("talkers: %w", e.advise(l.failed))
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

// A ruleLooker watches the hosts of a rule, or the flows of one of them: what they send, and their buckets.
type ruleLooker struct {
	e       *env
	rule    *live.Item
	host    string           // whose flows; "" for the hosts
	talkers *observe.Talkers // nil where this process cannot count
	failed  error            // why talkers is nil

	buckets map[string]report.Bucket // the fullest ones of the rule
	of      *live.Item               // the rule as it was with them
	next    time.Time                // not before are they read again
}

const (
	mostBuckets = 1000
	// restFactor is how much longer than a pass over the table the pause after it is: a large table must not keep a CPU busy.
	restFactor = 200
)

// look watches one of all rules.
func (e *env) look(all []live.Item, rule *live.Item, host string) *ruleLooker {
	l, o := &ruleLooker{e: e, rule: rule, host: host}, observe.TalkersOf(all, rule.Limit)
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
	return l
}

// Look implements top.Source.
func (s *topSource) Look(rule *live.Item, host string) (top.Looker, error) {
	return s.e.look(s.all.Load().Items, rule, host), nil
}

// Read implements top.Looker.
func (l *ruleLooker) Read() (report.RuleTalkers, error) {
	failed := l.readBuckets()
	rule := report.NewRule(l.rule)
	out := report.NewRuleTalkers(&rule, l.host)
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
		t.LevelBytes, t.FullPercent = b.LevelBytes, new(l.of.FullPercent(b.LevelBytes).N)
	}
	return t
}

// readBuckets reads the buckets of the rule, if it has several and the last time is long enough ago.
func (l *ruleLooker) readBuckets() error {
	began := time.Now()
	if l.rule.Scope() == "" || began.Before(l.next) {
		return nil
	}
	e, _ := l.e.inner()
	want := filterRules{command: "read buckets", device: l.rule.Device, direction: &l.rule.Place.Direction, networks: networks{l.rule.Prefix}}
	s, err := e.readRules(&want, false, reads{buckets: true})
	l.next = began.Add(restFactor * time.Since(began))
	if s == nil {
		return err
	}
	l.buckets = map[string]report.Bucket{}
	if len(s.found) == 0 {
		return errRuleGone
	}
	l.of = s.found[0]
	fullest := s.buckets[l.of]
	slices.SortFunc(fullest, func(a, b live.Bucket) int { return cmp.Compare(b.Bytes, a.Bytes) })
	for _, b := range fullest[:min(len(fullest), mostBuckets)] {
		l.buckets[b.Name] = report.NewBucket(l.of, b)
	}
	return nil
}

// Close implements top.Looker.
func (l *ruleLooker) Close() error {
	if l.talkers == nil {
		return nil
	}
	return l.talkers.Close()
}
