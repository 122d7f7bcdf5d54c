package events

import (
	"errors"
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// To read rules takes at most 1 / rest of the time, however often they change.
const rest = 20

// rules are those in force, as they were when they were last read.
type rules struct {
	seed      maphash.Seed
	of        map[hook]map[netip.Prefix]known // nil if they were not read yet
	devices   map[int]string                  // that have rules, or had, by index
	had       map[string]bool                 // the same by name
	cgroups   map[string]bool                 // those of had that are cgroups
	clustered map[netip.Prefix]string         // pools with a cluster
	quotas    []quotaOf
	stamp     maps.Stamp // when they were read
	next      time.Time  // not before
}

// A hook is a direction of a device. Without a device it is the pools.
type hook struct {
	ifindex   int
	direction string
}

// A known is a rule as it was read.
type known struct {
	hash  uint64
	name  string
	waits bool // for room for its guarantee
}

// lookAtRules reads the rules again if they may have changed, and tells how.
func (s *session) lookAtRules() error {
	r := &s.rules
	if r.had == nil {
		r.seed, r.had, r.devices = maphash.MakeSeed(), map[string]bool{}, map[int]string{}
		r.cgroups = map[string]bool{}
	}
	was, begun := r.of, time.Now()
	if s.store != nil {
		at := s.store.Stamp()
		if r.of != nil && at == r.stamp || begun.Before(r.next) {
			return nil
		}
		n, err := loader.Read(s.Loader)
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil // later
		}
		if err != nil {
			return err
		}
		store, generation, err := n.Maps()
		ours := err == nil && generation == s.generation // who is told of rules relies on being told of their packets
		if store != nil {
			if ours {
				s.readRules(store)
			}
			store.Close()
		}
		if n.Close(); !ours {
			return nil // later
		}
		r.stamp = at
		r.next = time.Now().Add(min(rest*time.Since(begun), 10*time.Second))
	} else if r.stamp = (maps.Stamp{}); len(r.of) == 0 && r.of != nil {
		return nil
	} else {
		r.of, r.clustered, r.quotas = map[hook]map[netip.Prefix]known{}, nil, nil
	}
	if was == nil {
		return nil
	}
	for at, rules := range r.of {
		s.compare(at, was[at], rules)
	}
	for at, rules := range was {
		if r.of[at] == nil {
			s.compare(at, rules, nil)
		}
	}
	return nil
}

// readRules reads all rules of a store.
func (s *session) readRules(store *maps.Store) {
	r := &s.rules
	r.of, r.clustered, r.quotas = map[hook]map[netip.Prefix]known{}, map[netip.Prefix]string{}, nil
	for set, rule := range store.EveryRule() {
		at := hook{}
		if !set.IsPools() {
			at = hook{set.Ifindex(), set.Direction().String()}
		}
		if r.of[at] == nil && !set.IsPools() {
			name := s.nameOf(set)
			if r.had[name], r.devices[at.ifindex] = true, name; policy.IsCgroup(name) {
				r.cgroups[name] = true
			}
		}
		if r.of[at] == nil {
			r.of[at] = map[netip.Prefix]known{}
		}
		if rule.Cluster.Name != "" {
			r.clustered[rule.Prefix] = rule.Label.Name
		}
		if quota, has := store.Quota(rule); has {
			r.quotas = append(r.quotas, quotaOf{at, rule.Prefix, rule.Label.Name, quota})
		}
		r.of[at][rule.Prefix] = known{maphash.Comparable(r.seed, rule.Rule), rule.Label.Name, rule.Label.Waits != 0}
	}
}

// compare tells how the rules of a hook have changed.
func (s *session) compare(at hook, was, now map[netip.Prefix]known) {
	var changes report.Changes // added, changed and removed
	var which []netip.Prefix
	var changed []report.ChangedRule
	note := func(kind int, prefix netip.Prefix, rule known) {
		changes[kind]++
		which = append(which, prefix)
		c := report.ChangedRule{Name: rule.name}
		if at.ifindex != 0 {
			c.Network = policy.CIDR(prefix)
		}
		changed = append(changed, c)
	}
	for prefix, rule := range now {
		before, had := was[prefix]
		if rule.waits && !before.waits {
			s.tell(s.eventOf(at, report.GuaranteeFails, "its guarantee waits, because the pool above has no room for it", prefix, rule.name))
		}
		if !had {
			note(0, prefix, rule)
		} else if before.hash != rule.hash {
			note(1, prefix, rule)
		}
	}
	for prefix, rule := range was {
		if _, has := now[prefix]; !has {
			note(2, prefix, rule)
		}
	}
	thing := "rule"
	if at.ifindex == 0 {
		thing = "pool"
	}
	if len(which) == 0 {
		return
	}
	prefix, name := netip.Prefix{}, ""
	if len(which) == 1 {
		prefix, name = which[0], changed[0].Name
	}
	e := s.eventOf(at, report.RulesChanged, changes.Words(thing, "added", "changed", "removed"), prefix, name)
	if at.ifindex == 0 && len(which) > 1 {
		var pools []string
		for _, c := range changed {
			pools = append(pools, c.Name)
		}
		slices.SortFunc(pools, plain.Natural)
		e.Sentence += ": " + plain.List(pools)
	}
	e.Changed = changed
	s.tell(e)
}

// eventOf is about one rule of the hook, or about several if it has no prefix.
func (s *session) eventOf(at hook, kind, says string, prefix netip.Prefix, name string) report.Event {
	e := report.Event{Kind: kind, Device: s.rules.devices[at.ifindex], Direction: at.direction, Name: name}
	subject := "pools"
	switch {
	case at.ifindex != 0:
		if prefix.IsValid() {
			e.Network = policy.CIDR(prefix)
		}
		subject = e.Rule()
	case prefix.IsValid():
		e.Pool, subject = name, fmt.Sprintf("pool %q", name)
	}
	e.Sentence = subject + ": " + says
	return e
}
