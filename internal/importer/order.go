package importer

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/pkg/policy"
)

// side is the address of a packet that an entry looks at.
type side uint8

const (
	either side = iota // none: all packets of its family
	toward             // the destination
	from               // the source
)

func (s side) match() policy.Match {
	if s == from {
		return policy.MatchSrc
	}
	return policy.MatchDst
}

func (s side) String() string {
	return [...]string{"any address", "destination", "source"}[s]
}

// An entry is what a tool does to the packets of a network. Tools go through
// their entries in order until one is final; rules have no order, and the
// longest prefix decides.
type entry struct {
	key    tableKey
	side   side
	prefix netip.Prefix

	limit *limit // nil for an exception: its packets pass
	drops bool   // or for a ban: they do not
	// Packets of the entry (those that conform, where it has a limit) skip what
	// follows, up to the entry of this index; 0 where they go on.
	until int
	// What exceeds the limit goes on up to the entry of this index, which drops it; 0 where the limit drops it.
	excessUntil int
	// Only some packets of the network are meant: those that have this, too. There is no rule for them.
	partial string
	// An exception or a ban that is of no key is for packets that enter and leave these devices; nil for any.
	in, out []string
	hook    string // of nft; some hooks never see the same packet
	// It is for what is left over, and nobody misses it if that is nothing.
	fallback bool

	where, comment string
}

// A limit is what holds an entry's packets down. Entries that have the same one share its bucket.
type limit struct {
	rate     policy.Rate
	capacity uint64 // bytes
	excess   policy.Excess
	each     policy.Each
	framing  policy.Framing

	where, comment string
}

var (
	otherSide = reason{"limit by the other address", "one direction of a device goes by one side, destination or source",
		"no rule was made; set it on the other device that these packets pass, or by hand with match: on a device of its own"}
	unreached = reason{"limit that was never reached", "what came before it already decided over all of its packets",
		"no rule was made, as it did nothing"}
	stacked = reason{"limits one upon the other", "packets were held to both, and here the longest prefix alone decides",
		"lower the narrower one if the wider one is to hold, or set the wider one on another device"}
	otherHook = reason{"limits of packets at different hooks", "one was for what is forwarded and one for what this host sends or gets, and here the longest prefix alone decides over all",
		"see whether the rules are meant for all packets"}
	sameNetwork = reason{"second limit of a network", "a network of a device and direction has one rule", "the lower rate was kept"}
	exceptions  = reason{"exception", "these packets were not held to the limits that follow, and here they are",
		"nothing is to be done if they are few; raise the rates otherwise"}
)

// also adds to what is asked of packets.
func also(asks, what string) string {
	if asks == "" || what == "" {
		return asks + what
	}
	return asks + ", " + what
}

// ruleset makes rules of entries.
type ruleset struct {
	*collector
	entries []entry
	told    map[string]bool // exceptions, which several tables may have
}

// make makes rules of all entries; each device and direction has its own order.
func (s *ruleset) make() {
	var keys []tableKey
	for _, e := range s.entries {
		if e.limit != nil && !slices.Contains(keys, e.key) {
			keys = append(keys, e.key)
		}
	}
	users := map[*limit][]entry{}
	var limits []*limit
	for _, key := range keys {
		for _, e := range s.table(key) {
			if users[e.limit] == nil {
				limits = append(limits, e.limit)
			}
			users[e.limit] = append(users[e.limit], e)
		}
	}
	for _, l := range limits {
		if len(users[l]) > 1 && l.each.Kind == policy.EachAll {
			s.leave(shared, l.where, "%v for %s together", l.rate, sharers(users[l]))
		}
	}
}

// sharers says who shares a limit.
func sharers(entries []entry) string {
	elsewhere := slices.ContainsFunc(entries, func(e entry) bool { return e.key != entries[0].key })
	words := make([]string, len(entries))
	for i, e := range entries {
		words[i] = name(e.prefix)
		if elsewhere {
			words[i] += fmt.Sprintf(" on %s %v", e.key.device, e.key.direction)
		}
	}
	return some(words)
}

// A table is one device and direction on its way from entries to rules.
type table struct {
	*ruleset
	key     tableKey
	match   policy.Match
	indices []int
	final   map[netip.Prefix]int  // the entry that ends the way for longest
	limits  map[netip.Prefix]int  // entries that become rules
	holes   []int                 // exceptions
	some    []int                 // exceptions for which there can be no rule
	open    map[netip.Prefix]bool // exceptions that become rules
}

// table makes the rules of one device and direction, and returns the entries with a limit that they are made of.
func (s *ruleset) table(key tableKey) (made []entry) {
	t := &table{ruleset: s, key: key, final: map[netip.Prefix]int{}, limits: map[netip.Prefix]int{}, open: map[netip.Prefix]bool{}}
	for i, e := range s.entries {
		if e.key == key || e.key == (tableKey{}) && e.prefix.IsValid() {
			t.indices = append(t.indices, i)
		}
	}
	t.match = t.side().match()
	for _, i := range t.indices {
		t.take(i)
	}
	var kept []int
	for _, i := range t.limits {
		kept = append(kept, i)
	}
	slices.Sort(kept)
	t.stacked(kept)
	t.excepted(kept)
	open := t.exempt()
	for _, i := range kept {
		e := s.entries[i]
		if t.joined(e) {
			continue
		}
		r := policy.Rule{
			Prefix: e.prefix, Rate: e.limit.rate, Capacity: e.limit.capacity,
			Excess: e.limit.excess, Each: e.limit.each.Canonical(e.prefix), Framing: e.limit.framing,
		}
		if s.add(key, t.match, r, e.where, e.comment) {
			made = append(made, e)
		}
	}
	for _, i := range open {
		e := s.entries[i]
		s.add(key, t.match, policy.Rule{Prefix: e.prefix, Rate: policy.Unlimited}, e.where, e.comment)
	}
	return made
}

// side is that by which most limits go, or the far one.
func (t *table) side() side {
	var count [from + 1]int
	for _, i := range t.indices {
		if t.entries[i].limit != nil {
			count[t.entries[i].side]++
		}
	}
	far, near := toward, from
	if t.key.direction == policy.Ingress {
		far, near = from, toward
	}
	if count[near] > count[far] {
		return near
	}
	return far
}

// take takes the next entry.
func (t *table) take(i int) {
	e := t.entries[i]
	partial := e.partial != ""
	if e.key == (tableKey{}) {
		here, there := e.out, e.in
		if t.key.direction == policy.Ingress {
			here, there = e.in, e.out
		}
		if here != nil && !slices.Contains(here, t.key.device) || len(there) == 1 && there[0] == t.key.device {
			return // what enters and leaves by the same device is not worth a word
		}
		partial = partial || there != nil
	}
	if e.side != either && e.side.match() != t.match {
		if e.limit != nil {
			t.leave(otherSide, e.where, "%v by %v for %s", e.limit.rate, e.side, name(e.prefix))
			return
		}
		partial = true
	}
	if before, covered := t.ended(e.prefix, i); covered {
		if e.limit != nil && e.limit != t.entries[before].limit && !e.fallback {
			t.leave(unreached, e.where, "%v for %s comes after %s", e.limit.rate, name(e.prefix), t.entries[before].where)
		}
		return
	}
	switch {
	case partial && !e.drops:
		t.some = append(t.some, i)
		return
	case partial:
		return
	case e.limit != nil:
		t.keep(i)
	case !e.drops:
		t.holes = append(t.holes, i)
	}
	if old, found := t.final[e.prefix]; e.until > i && (!found || t.entries[old].until < e.until) {
		t.final[e.prefix] = i
	}
}

// ended reports whether packets of p never come to entry i, and which entry sees to that.
func (t *table) ended(p netip.Prefix, i int) (int, bool) {
	return t.around(p, p.Bits(), func(wide netip.Prefix) (int, bool) {
		f, found := t.final[wide]
		return f, found && t.entries[f].until > i
	})
}

// around asks find about the networks that hold p, from one of length bits to the widest.
func (t *table) around(p netip.Prefix, bits int, find func(netip.Prefix) (int, bool)) (int, bool) {
	for ; bits >= 0; bits-- {
		if i, found := find(netip.PrefixFrom(p.Addr(), bits).Masked()); found {
			return i, true
		}
	}
	return 0, false
}

// keep makes an entry a rule's, or the one there is if that is stricter.
func (t *table) keep(i int) {
	e := t.entries[i]
	old, found := t.limits[e.prefix]
	if found {
		if t.entries[old].limit == e.limit {
			return
		}
		stricter, other := t.entries[old], e
		if e.limit.rate < t.entries[old].limit.rate {
			stricter, other = e, t.entries[old]
			t.limits[e.prefix] = i
		}
		t.leave(sameNetwork, other.where, "%v for %s, which has %v", other.limit.rate, name(e.prefix), stricter.limit.rate)
		return
	}
	t.limits[e.prefix] = i
}

// apart are the hooks of which a packet passes one at most in a direction.
var apart = map[string]bool{"forward": true, "input": true, "output": true}

// stacked tells of limits that applied to the same packets.
func (t *table) stacked(kept []int) {
	for _, i := range kept {
		e := t.entries[i]
		wider, found := t.around(e.prefix, e.prefix.Bits()-1, func(wide netip.Prefix) (int, bool) {
			w, found := t.limits[wide]
			if !found || t.entries[w].limit == e.limit {
				return 0, false
			}
			first, second := min(i, w), max(i, w)
			return w, t.entries[first].until <= second || t.entries[first].excessUntil > second
		})
		if found {
			w := t.entries[wider]
			why := stacked
			if e.hook != w.hook && apart[e.hook] && apart[w.hook] {
				why = otherHook
			}
			t.leave(why, e.where, "%v for %s, and %v for %s", e.limit.rate, name(e.prefix), w.limit.rate, name(w.prefix))
		}
	}
}

// excepted tells of packets that went past limits for more than their address, or for the other one.
func (t *table) excepted(kept []int) {
	for _, i := range t.some {
		e := t.entries[i]
		what, sided := name(e.prefix), e.side == either || e.side.match() == t.match
		asks := e.partial
		if e.in != nil {
			asks = also(asks, "entering "+some(e.in))
		}
		if e.out != nil {
			asks = also(asks, "leaving "+some(e.out))
		}
		switch {
		case !sided:
			what = also(fmt.Sprintf("%v %s", e.side, what), asks)
		case e.prefix.Bits() == 0:
			what = asks
		case asks != "":
			what += " with " + asks
		}
		if slices.ContainsFunc(kept, func(k int) bool {
			return k > i && k < e.until && (!sided || t.entries[k].prefix.Overlaps(e.prefix))
		}) {
			t.except(e.where, what)
		}
	}
}

// exempt returns the exceptions that are to be rules: those in the network of a limit.
func (t *table) exempt() (rules []int) {
	slices.SortStableFunc(t.holes, func(a, b int) int { return t.entries[a].prefix.Bits() - t.entries[b].prefix.Bits() })
	for _, i := range t.holes {
		e := t.entries[i]
		_, limited := t.limits[e.prefix]
		_, held := t.around(e.prefix, e.prefix.Bits(), func(wide netip.Prefix) (int, bool) {
			w, found := t.limits[wide]
			return w, found && w < i
		})
		wider, found := t.enclosing(e.prefix)
		switch {
		case limited || held:
			// A limit that came before the exception holds, so there can be no rule for it.
			t.overruled(i)
		case found && wider < e.until && !t.open[e.prefix]:
			t.open[e.prefix] = true
			rules = append(rules, i)
		}
	}
	return rules
}

// enclosing is the limit of the next wider rule; false if that is an exception, or there is none.
func (t *table) enclosing(p netip.Prefix) (int, bool) {
	w, found := t.around(p, p.Bits()-1, func(wide netip.Prefix) (int, bool) {
		w, found := t.limits[wide]
		if t.open[wide] {
			return -1, true
		}
		return w, found
	})
	return w, found && w >= 0
}

// joined reports whether the next wider rule is of the same bucket, so that there is no need for another.
func (t *table) joined(e entry) bool {
	wider, found := t.enclosing(e.prefix)
	return found && t.entries[wider].limit == e.limit
}

// overruled leaves an exception behind that a limit comes before, if it had an effect on those after it.
func (t *table) overruled(i int) {
	e := t.entries[i]
	_, found := t.around(e.prefix, e.prefix.Bits(), func(wide netip.Prefix) (int, bool) {
		w, found := t.limits[wide]
		return w, found && w > i && w < e.until
	})
	if found {
		t.except(e.where, name(e.prefix)+" before another limit")
	}
}

// except leaves an exception behind, once for all tables.
func (s *ruleset) except(where, what string) {
	if s.told == nil {
		s.told = map[string]bool{}
	}
	if at := where + what; !s.told[at] {
		s.told[at] = true
		s.leave(exceptions, where, "%s", what)
	}
}
