package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/observe"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/top"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// mostCounted is for how many rules top counts hosts or flows at once: each takes two programs on a device.
const mostCounted = 10

// Look implements top.Source.
func (s *topSource) Look(ctx context.Context, at top.Subject, see func(top.Seen)) (err error) {
	if at.By == "rtt" {
		return s.lookAtRTTs(ctx, see)
	}
	rules := []*live.Item{at.Rule}
	if at.Rule == nil {
		if rules, at.Host, err = s.counted(); err != nil {
			return err
		}
	}
	lookers := make([]*ruleLooker, len(rules))
	for i, it := range rules {
		l := &ruleLooker{topSource: s, rule: it, host: at.Host, byFlow: at.By == "flow"}
		if lookers[i], l.failed = l, l.start(); l.failed != nil && !s.onScreen {
			return fmt.Errorf("top: %w", s.e.advise(l.failed))
		}
		defer func() { err = errors.Join(err, l.close()) }()
	}
	for wait(ctx, s.interval) == nil {
		var seen top.Seen
		for _, l := range lookers {
			use, failed := l.read()
			seen.Uses, seen.Err = append(seen.Uses, use), errors.Join(seen.Err, failed)
		}
		see(seen)
	}
	return nil
}

// counted are the rules that the arguments choose, and the host if they name one.
func (s *topSource) counted() (rules []*live.Item, host string, err error) {
	found, want, err := s.find(s.all.Load())
	if err != nil {
		return nil, "", err
	}
	rules = withoutPools(found)
	if want.address.IsValid() {
		host = want.address.String()
		rules = slices.CompactFunc(rules, func(a, b *live.Item) bool { return a.Place == b.Place }) // the first decides
	}
	switch {
	case len(rules) == 0 && len(found) > 0:
		err = inputf("top: %s is a pool; name one of its rules", plain.Line(found[0].Key.Pool))
	case len(rules) == 0:
		err = missingError{inputf("top: %s", want.none())}
	case len(rules) > mostCounted:
		err = inputf("top: %d rules match; name at most %d", len(rules), mostCounted)
	}
	return rules, host, err
}

func withoutPools(found []*live.Item) []*live.Item {
	return slices.DeleteFunc(slices.Clone(found), func(it *live.Item) bool { return it.IsPool() })
}

// A ruleLooker watches the hosts or flows of a rule: what they send, and their buckets.
type ruleLooker struct {
	*topSource
	rule    *live.Item
	host    string // whose; "" for all
	byFlow  bool
	talkers *observe.Talkers // nil where this process cannot count
	failed  error            // why

	buckets map[string]live.Part // the fullest ones of the rule
	next    time.Time            // not before are they read again
}

const (
	mostBuckets = 1000
	// restFactor is how much longer than a pass over the table the pause after it is: a large table must not keep a CPU busy.
	restFactor = 200
)

// start begins to count.
func (l *ruleLooker) start() (err error) {
	if policy.IsCgroup(l.rule.Device) {
		return inputf("hosts and flows are counted on network devices, and %s is a cgroup", plain.Line(l.rule.Device))
	}
	o := observe.TalkersOf(l.all.Load().Items, l.rule.Limit)
	o.Netns, o.ByFlow = l.e.netns, l.byFlow
	if subnet, err := netip.ParsePrefix(l.host); err == nil {
		o.Network, o.OfHost = subnet, true
	} else if address, err := netip.ParseAddr(l.host); err == nil {
		o.Network, o.Except, o.OfHost = netip.PrefixFrom(address, address.BitLen()), nil, true
	}
	l.talkers, err = observe.StartTalkers(o)
	return err
}

func (l *ruleLooker) close() error {
	if l.failed != nil {
		return nil
	}
	return l.talkers.Close()
}

// read is who used the rule since the last time.
func (l *ruleLooker) read() (use live.Use, err error) {
	use = live.Use{Item: l.rule, Host: l.host}
	err = l.readBuckets()
	if l.failed != nil {
		use.Note = plain.OneLine(l.e.advise(l.failed))
	}
	idle := l.buckets
	if l.host != "" {
		idle = nil // they may be those of other hosts
	}
	seen := map[string]bool{}
	if l.talkers != nil && l.failed == nil {
		reading, failed := l.talkers.Read()
		offered := func(bytes uint64) live.Value {
			return live.Value{N: float64(bytes) * 8e9 / float64(max(reading.Interval, 1)), Known: true}
		}
		passed := func(bytes uint64) live.Value {
			return live.Value{N: offered(bytes).N, Known: !reading.PassedUnknown}
		}
		for _, t := range reading.Talkers {
			p := l.buckets[t.Key]
			p.Name, p.Offered, p.Passed = t.Key, offered(t.Bytes), passed(t.PassedBytes)
			seen[t.Key] = true
			use.Parts = append(use.Parts, l.rule.PartRow(p))
		}
		use.Offered, use.Passed = offered(reading.Total.Bytes), passed(reading.Total.PassedBytes)
		err = errors.Join(err, failed)
		switch {
		case reading.Others.Bytes > 0:
			use.Note = "others, for which there was no room to count, offer " + report.Bits(uint64(offered(reading.Others.Bytes).N))
		case reading.PassedUnknown:
			use.Note = "passed traffic is unknown here, because the device may queue it"
		}
	}
	for key, p := range idle {
		if !seen[key] {
			use.Parts = append(use.Parts, l.rule.PartRow(p))
		}
	}
	return use, err
}

// readBuckets reads the buckets of the rule, if it has several and the last time is long enough ago.
func (l *ruleLooker) readBuckets() error {
	began := time.Now()
	if l.rule.Scope() == "" || began.Before(l.next) {
		return nil
	}
	it := l.all.Load().Find(l.rule.Key)
	if it == nil {
		l.buckets = nil
		return errors.New("the rule was just deleted")
	}
	e, _ := l.e.inner()
	err := e.with(loader.Read, "read buckets", func(n *loader.Namespace) error {
		store, _, err := n.Maps()
		if store == nil {
			return err
		}
		defer store.Close()
		fullest := live.Buckets(store, []*live.Item{it})[0]
		slices.SortFunc(fullest, func(a, b live.Bucket) int { return cmp.Compare(it.FullestPercent(b).N, it.FullestPercent(a).N) })
		l.buckets = map[string]live.Part{}
		for _, b := range fullest[:min(len(fullest), mostBuckets)] {
			l.buckets[b.Name] = live.Part{Bucket: b, Full: it.FullestPercent(b)}
		}
		return nil
	})
	l.next = began.Add(restFactor * time.Since(began))
	return err
}

// rttStep is how often round trips need to know whether rules limit.
const rttStep = 100 * time.Millisecond

// lookAtRTTs measures round trips of the rules that are chosen.
func (s *topSource) lookAtRTTs(ctx context.Context, see func(top.Seen)) error {
	found, _, err := s.find(s.all.Load())
	rules := withoutPools(found)
	if err != nil {
		return err
	}
	saw := func(reading observe.Reading, failed error) error {
		if reading.Interval == 0 {
			return fmt.Errorf("top: %w", s.e.advise(cmp.Or(failed, errors.New("nothing was measured yet"))))
		}
		rtts := reading.Report(rules)
		see(top.Seen{RTTs: &rtts, Err: failed})
		return nil
	}
	if s.e.rtts != nil {
		return saw(s.e.rtts.Latest(ctx))
	}
	o, err := observe.Start(observe.Options{Netns: s.e.netns, OneIn: s.oneIn})
	if err != nil {
		return fmt.Errorf("top: %w", s.e.advise(err))
	}
	reader := &live.Reader{Options: s.reader.Options, Netns: s.e.netns}
	defer reader.Close()
	defer o.Close()
	chosen := map[live.Key]bool{}
	for _, it := range rules {
		chosen[it.Key] = true
	}
	for end := time.Now().Add(s.interval); ; {
		now, unread := reader.Read(live.What{})
		if now == nil {
			return fmt.Errorf("top: %w", s.e.advise(unread))
		}
		failed := o.Follow(slices.DeleteFunc(now.Once(), func(it *live.Item) bool { return !chosen[it.Key] }))
		if !time.Now().Before(end) {
			reading, unread := o.Read()
			if err := saw(reading, errors.Join(unread, failed)); err != nil {
				return err
			}
			end = time.Now().Add(s.interval)
		}
		if wait(ctx, min(rttStep, time.Until(end))) != nil {
			return nil
		}
	}
}
