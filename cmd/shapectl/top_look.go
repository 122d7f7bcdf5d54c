package main

import (
	"cmp"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/top"
	"github.com/shapectl/shapectl/pkg/loader"
)

// mostTalkers is how many hosts or flows are listed.
const mostTalkers = 100

// A bucketLooker watches the buckets of a rule.
type bucketLooker struct {
	s    *topSource
	rule *report.Rule
	host string

	talkers []top.Talker
	note    string
	next    time.Time // not before is the table read again
}

// restFactor is how much longer than a pass over the table the pause after it is: a large table must not keep a CPU busy.
const restFactor = 200

// Read implements top.Looker.
func (l *bucketLooker) Read() ([]top.Talker, string, error) {
	if l.host != "" {
		return nil, "the flows of a host are not known", nil
	}
	began := time.Now()
	if began.Before(l.next) {
		return l.talkers, l.note, nil
	}
	e, _ := l.s.e.inner()
	direction, prefix, err := ruleAt(l.rule)
	if err != nil {
		return nil, "", err
	}
	want := filterRules{device: l.rule.Device, direction: &direction, networks: networks{prefix}}
	var rules report.Rules
	err = e.with(loader.Read, "read buckets", func(n *loader.Namespace) error {
		var err error
		rules, err = e.findRules(n, want, measure.Details{Buckets: true})
		return err
	})
	if err != nil || len(rules) == 0 {
		return nil, "", cmpErr(err, errRuleGone)
	}
	l.talkers, l.note = l.talkers[:0], ""
	buckets := rules[0].Buckets
	slices.SortFunc(buckets, func(a, b report.Bucket) int { return cmp.Compare(b.LevelBytes, a.LevelBytes) })
	for _, b := range buckets[:min(len(buckets), mostTalkers)] {
		full := rules[0].FullPercent(b.LevelBytes)
		l.talkers = append(l.talkers, top.Talker{Key: b.Key, LevelBytes: b.LevelBytes, FullPercent: &full})
	}
	l.next = began.Add(restFactor * time.Since(began))
	return l.talkers, l.note, nil
}

// Close implements top.Looker.
func (l *bucketLooker) Close() error { return nil }
