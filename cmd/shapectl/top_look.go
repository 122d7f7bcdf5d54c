package main

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/observe"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/top"
	"github.com/shapectl/shapectl/pkg/loader"
)

// A ruleLooker watches the hosts of a rule, or the flows of one of them: what they send, and their buckets.
type ruleLooker struct {
	s       *topSource
	rule    *report.Rule
	talkers *observe.Talkers // nil where this process cannot count
	byFlow  bool
	why     string // talkers is nil

	buckets map[string]report.Bucket // the fullest ones of the rule
	of      report.Rule              // the rule as it was with them
	next    time.Time                // not before are they read again
}

const (
	mostBuckets = 1000
	// restFactor is how much longer than a pass over the table the pause after it is: a large table must not keep a CPU busy.
	restFactor = 200
)

// Look implements top.Source.
func (s *topSource) Look(rule *report.Rule, host string) (top.Looker, error) {
	l := &ruleLooker{s: s, rule: rule, byFlow: host != ""}
	o, err := observe.TalkersOf(*s.all.Load(), rule)
	if err != nil {
		return nil, err
	}
	if o.Netns, o.ByFlow = s.e.netns, l.byFlow; l.byFlow {
		if subnet, err := netip.ParsePrefix(host); err == nil {
			o.Network = subnet
		} else if address, err := netip.ParseAddr(host); err == nil {
			o.Network, o.Except = netip.PrefixFrom(address, address.BitLen()), nil
		}
	}
	if l.talkers, err = observe.StartTalkers(o); err != nil {
		l.talkers, l.why = nil, plain.OneLine(s.e.advise(err))
	}
	return l, nil
}

// Read implements top.Looker.
func (l *ruleLooker) Read() ([]top.Talker, string, error) {
	failed := l.readBuckets()
	note := l.why
	var out []top.Talker
	seen := map[string]bool{}
	if l.talkers != nil {
		reading, err := l.talkers.Read()
		if err != nil {
			note = plain.OneLine(err)
		}
		bits := func(bytes uint64) *uint64 {
			return new(uint64(float64(bytes) * 8e9 / float64(max(reading.Interval, 1))))
		}
		for _, t := range reading.Talkers {
			one := top.Talker{Key: t.Name(l.byFlow), OfferedBits: bits(t.Bytes)}
			if !reading.PassedUnknown {
				one.PassedBits = bits(t.PassedBytes)
			}
			seen[one.Key] = true
			out = append(out, l.filled(one))
		}
		switch {
		case err != nil:
		case reading.Others.Bytes > 0:
			note = "others, not listed for lack of room, offer " + report.Bits(*bits(reading.Others.Bytes))
		case reading.PassedUnknown:
			note = "what passes is unknown here: the device may queue it"
		}
	}
	if l.byFlow {
		return out, note, nil // buckets of other hosts are none of these
	}
	for key := range l.buckets {
		if !seen[key] {
			out = append(out, l.filled(top.Talker{Key: key}))
		}
	}
	slices.SortStableFunc(out, func(a, b top.Talker) int { return cmp.Compare(b.LevelBytes, a.LevelBytes) })
	return out, note, failed
}

// filled adds what is known of the bucket of a host or flow.
func (l *ruleLooker) filled(t top.Talker) top.Talker {
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
	e, _ := l.s.e.inner()
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
