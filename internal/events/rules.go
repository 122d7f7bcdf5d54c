package events

import (
	"errors"
	"fmt"
	"hash/maphash"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
)

// To read rules takes at most 1 / rest of the time, however often they change.
const rest = 20

// manyRules is the number of rules of a namespace beyond which only their number is told.
const manyRules = 1 << 17

// rules are those in force, as they were when they were last read.
type rules struct {
	seed      maphash.Seed
	of        map[hook]*digest        // nil if they were not read yet
	had       map[string]bool         // devices that have rules, or had
	clustered map[netip.Prefix]string // pools with a cluster
	stamp     maps.Stamp              // when they were read
	next      time.Time               // not before
}

// A hook is the rules of a direction of a device. Without a device it is the pools.
type hook struct {
	ifindex   int
	direction string
}

// A digest is the rules of a hook.
type digest struct {
	device  string
	rules   map[netip.Prefix]uint64 // a hash of each; nil if there are too many
	sum     uint64                  // of all hashes
	n       int
	waiting map[netip.Prefix]bool // whose guarantee waits for room
	names   map[netip.Prefix]string
}

// lookAtRules reads the rules again if they may have changed, and tells how.
func (s *session) lookAtRules() error {
	r := &s.rules
	if r.had == nil {
		r.seed, r.had = maphash.MakeSeed(), map[string]bool{}
	}
	now, clustered := map[hook]*digest{}, map[netip.Prefix]string{}
	begun := time.Now()
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
				r.read(store, s.nameOf, now, clustered)
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
	}
	was := r.of
	r.of, r.clustered = now, clustered
	if was == nil {
		return nil
	}
	for at, d := range now {
		s.compare(at, was[at], d)
	}
	for at, d := range was {
		if now[at] == nil {
			s.compare(at, d, nil)
		}
	}
	return nil
}

// read reads all rules of a store.
func (r *rules) read(store *maps.Store, nameOf func(*maps.Set) string, into map[hook]*digest, clustered map[netip.Prefix]string) {
	var sets []*digest
	total := 0
	for set, rule := range store.EveryRule() {
		number := int(set.Number())
		for len(sets) <= number {
			sets = append(sets, nil)
		}
		d := sets[number]
		if d == nil {
			d = &digest{rules: map[netip.Prefix]uint64{}, names: map[netip.Prefix]string{}}
			at := hook{set.Ifindex(), directionOf(set)}
			if set.IsPools() {
				at.ifindex = 0
			} else {
				d.device = nameOf(set)
				r.had[d.device] = true
			}
			sets[number], into[at] = d, d
		}
		if rule.Cluster.Name != "" {
			clustered[rule.Prefix] = rule.Label.Name
		}
		hash := maphash.Comparable(r.seed, rule.Rule)
		d.n++
		d.sum += hash
		if total++; total <= manyRules {
			d.rules[rule.Prefix] = hash
			if rule.Label.Name != "" {
				d.names[rule.Prefix] = rule.Label.Name
			}
		}
		if rule.Label.Waits != 0 {
			if d.waiting == nil {
				d.waiting = map[netip.Prefix]bool{}
			}
			d.waiting[rule.Prefix] = true
		}
	}
	if total > manyRules {
		for _, d := range into {
			d.rules, d.names = nil, nil
		}
	}
}

// compare tells how the rules of a hook have changed. Either may be nil.
func (s *session) compare(at hook, was, now *digest) {
	if was == nil {
		was = &digest{device: now.device, rules: map[netip.Prefix]uint64{}}
	}
	if now == nil {
		now = &digest{device: was.device, rules: map[netip.Prefix]uint64{}}
	}
	for prefix := range now.waiting {
		if !was.waiting[prefix] {
			s.tell(now.event(at, report.GuaranteeFails, "its guarantee waits, because the pool above has no room for it", prefix))
		}
	}
	if was.n == now.n && was.sum == now.sum {
		return
	}
	if was.n > 0 && was.rules == nil || now.n > 0 && now.rules == nil {
		s.tell(now.event(at, report.RulesChanged, fmt.Sprintf("%d rules are in force, after %d", now.n, was.n)))
		return
	}
	var d maps.Difference
	var which []netip.Prefix
	var rules []report.ChangedRule
	note := func(of *digest, prefix netip.Prefix) {
		rule := report.ChangedRule{Name: of.names[prefix]}
		if at.ifindex != 0 {
			rule.Network = prefix.String()
		}
		which, rules = append(which, prefix), append(rules, rule)
	}
	named := now
	for prefix, hash := range now.rules {
		switch before, had := was.rules[prefix]; {
		case !had:
			d.Added++
		case before != hash:
			d.Changed++
		default:
			continue
		}
		note(now, prefix)
	}
	for prefix := range was.rules {
		if _, has := now.rules[prefix]; !has {
			d.Removed++
			named = was
			note(was, prefix)
		}
	}
	if len(which) > 1 {
		which = nil
	}
	thing := "rule"
	if at.ifindex == 0 {
		thing = "pool"
	}
	says := report.Changes{d.Added, d.Changed, d.Removed}.Words(thing, "added", "changed", "removed")
	e := named.event(at, report.RulesChanged, says, which...)
	e.Changed = rules
	s.tell(e)
}

// event is about one rule of the hook, or about several.
func (d *digest) event(at hook, kind, says string, which ...netip.Prefix) report.Event {
	e := report.Event{Kind: kind, Device: d.device, Direction: at.direction}
	subject := ""
	for _, prefix := range which {
		e.Name = d.names[prefix]
		if at.ifindex == 0 {
			e.Pool = e.Name
			subject = fmt.Sprintf("pool %q", e.Name)
		} else {
			e.Network = prefix.String()
		}
	}
	if subject == "" {
		subject = e.Rule()
	}
	if subject == "" {
		subject = "pools"
	}
	e.Sentence = subject + ": " + says
	return e
}
