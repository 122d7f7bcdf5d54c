package importer

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sort"

	"github.com/shapectl/shapectl/pkg/policy"
)

// side is the address of a packet that an entry looks at.
type side uint8

const (
	either side = iota // no address: all packets of the family
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

// prepositions stand before the networks of a side.
var prepositions = [...]string{toward: "to ", from: "from "}

// devices are those by which packets enter and leave, by direction; nil for any.
type devices [2][]string

// describe returns the devices for people.
func (d devices) describe() (words []string) {
	for direction, verb := range []string{policy.Ingress: "entering ", policy.Egress: "leaving "} {
		if d[direction] != nil {
			words = append(words, verb+some(d[direction]))
		}
	}
	return words
}

// An entry is what a tool does to the packets of a network. Tools apply their entries in
// order until one is final. Rules have no order: the longest prefix decides.
type entry struct {
	key    tableKey
	side   side
	prefix netip.Prefix

	limit *limit // nil for an exception, whose packets pass
	drops bool   // the packets are dropped without a limit
	// Packets of the entry, or its conforming packets if it has a limit, skip the entries
	// before this index; 0 if they skip none.
	until int
	// Excess packets go on to the entry before this index, which drops them; 0 if the limit
	// drops them.
	excessUntil int
	// A condition that the packets must meet besides the address. No rule can have it.
	partial string
	devices devices // of an exception or a ban without a key
	hook    string  // of nft; some hooks never see the same packet
	// It is a default for the packets of no other entry. It is not reported if there are none.
	fallback bool

	where   string
	label   policy.Label
	comment string // what the tool itself calls it
}

// A limit is the limit of an entry. Entries with the same limit share its bucket.
type limit struct {
	policy.Rule // without a network

	in *limit // of htb: the class above; nil for none

	packets bool // of nft: it counts packets, not bytes
	over    bool // of nft: its verdict is for excess packets, not for conforming ones
	where   string

	added bool          // its pool was added
	pool  policy.Within // the name of its pool
}

var (
	shared = reason{loosens, "shared rate", "a pool cannot let excess packets pass, so each network has its own rule with the full rate",
		"replace them by one network, or split the rate between them"}
	otherSide = reason{loosens, "limit by the other address", "a direction of a device matches either destinations or sources",
		"no rule was made; set it on another device on the path of these packets, or by hand with match"}
	unreached = reason{other, "limit without packets", "earlier entries decide all of its packets",
		"no rule was made, because it had no effect"}
	stacked = reason{other, "stacked limits", "packets had to conform to both limits, and only the rule with the longest prefix decides",
		"lower the narrower limit, or set the wider one on another device"}
	otherHook = reason{other, "limits at different hooks", "one limit was for forwarded packets and one for packets of this host, and only the rule with the longest prefix decides",
		"check whether the rules should limit all packets"}
	sameNetwork = reason{other, "second limit of a network", "a network of a device and direction has one rule", "the lower rate was kept"}
	exceptions  = reason{other, "exception", "these packets skipped later limits, and the rules limit them",
		"nothing to do if they are few; raise the rates otherwise"}
)

// also joins conditions.
func also(asks, what string) string {
	if asks == "" || what == "" {
		return asks + what
	}
	return asks + ", " + what
}

// ruleset converts entries to rules.
type ruleset struct {
	*collector
	entries  []entry
	reported map[string]bool // exceptions, which several tables may have
}

// enter adds an entry for each network, and returns their indices.
func (s *ruleset) enter(e entry, networks []netip.Prefix) (added []int) {
	for _, e.prefix = range networks {
		added = append(added, len(s.entries))
		s.entries = append(s.entries, e)
	}
	return added
}

// make converts all entries. Each device and direction has its own order. A limit of several networks becomes a pool.
func (s *ruleset) make() {
	var keys []tableKey
	for _, e := range s.entries {
		if e.limit != nil && !slices.Contains(keys, e.key) {
			keys = append(keys, e.key)
		}
	}
	users := map[*limit][]entry{}
	var limits []*limit
	var rules []ruled
	for _, key := range keys {
		for _, r := range s.table(key) {
			rules = append(rules, r)
			l := r.limit
			if l == nil {
				continue
			}
			if users[l] == nil {
				limits = append(limits, l)
			}
			users[l] = append(users[l], r.entry)
		}
	}
	for _, l := range limits {
		if len(users[l]) > 1 && l.Each.Kind == policy.EachAll && l.Excess == policy.Pass {
			s.leave(shared, l.where, "%v for %s together", l.Rate, sharers(users[l]))
		}
	}
	for _, r := range rules {
		l, of := r.limit, policy.Rule{Prefix: r.prefix, Rate: policy.Unlimited, Label: r.label}
		switch {
		case l == nil:
		case len(users[l]) > 1 && l.poolable():
			if of.Within, of.Framing = s.within(l), l.Framing; of.Within == "" {
				continue
			}
		default:
			of = s.below(l)
			of.Prefix, of.Each, of.Label = r.prefix, l.Each.Canonical(r.prefix), r.label
		}
		s.add(r.key, r.match, of, r.where, r.comment)
	}
	for key, t := range s.tables {
		if key != pools { // pools have the order of the source
			policy.SortRules(t.Rules)
		}
	}
}

// poolable reports whether the limit can be that of a pool.
func (l *limit) poolable() bool {
	return l.Each.Kind == policy.EachAll && l.Excess != policy.Pass && l.Rate >= policy.MinRate && l.Rate <= policy.MaxRate
}

// within returns the name of a limit's pool, which it adds at first; for a limit that no pool can have, that of the one above.
func (s *ruleset) within(l *limit) policy.Within {
	switch {
	case l == nil:
		return ""
	case !l.poolable():
		if !l.added {
			l.added = true
			s.leave(outside, l.where, "%d bit/s", uint64(l.Rate))
		}
		return s.within(l.in)
	case !l.added:
		r := s.below(l)
		r.Framing = policy.Framing{}
		l.added, l.pool = true, s.addPool(l.where, "", "", r, l.where)
	}
	return l.pool
}

// below returns the rule of a limit within the pool of the one above.
func (s *ruleset) below(l *limit) policy.Rule {
	r := l.Rule
	if r.Within = s.within(l.in); r.Within == "" {
		r.Guarantee, r.Weight = 0, 0
	}
	return r
}

// sharers lists the networks that share a limit.
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

// A ruled entry becomes a rule.
type ruled struct {
	entry
	key   tableKey
	match policy.Match
}

// A table converts the entries of one device and direction.
type table struct {
	*ruleset
	key     tableKey
	match   policy.Match
	indices []int
	final   map[netip.Prefix]int // by network, the entry that skips the most entries
	rules   map[netip.Prefix]int // entries that become rules: limits, and exceptions from them
	holes   []int                // exceptions
	some    []int                // exceptions that no rule can express
}

// table returns the entries that become rules of one device and direction.
func (s *ruleset) table(key tableKey) (made []ruled) {
	t := &table{ruleset: s, key: key, final: map[netip.Prefix]int{}, rules: map[netip.Prefix]int{}}
	for i, e := range s.entries {
		if e.key == key || e.key == (tableKey{}) && e.prefix.IsValid() {
			t.indices = append(t.indices, i)
		}
	}
	t.match = t.side().match()
	for _, i := range t.indices {
		t.add(i)
	}
	limits := slices.Sorted(maps.Values(t.rules))
	t.stacked(limits)
	t.excepted(limits)
	t.exempt()
	for _, i := range slices.Sorted(maps.Values(t.rules)) {
		e := s.entries[i]
		if wider, found := t.enclosing(e.prefix); found && e.limit != nil && s.entries[wider].limit == e.limit {
			continue // the wider rule has the same bucket
		}
		made = append(made, ruled{e, key, t.match})
	}
	return made
}

// side returns the side that most limits match, or the far one.
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

// add adds the next entry.
func (t *table) add(i int) {
	e := t.entries[i]
	partial := e.partial != ""
	if e.key == (tableKey{}) {
		here, there := e.devices[t.key.direction], e.devices[1-t.key.direction]
		if here != nil && !slices.Contains(here, t.key.device) || len(there) == 1 && there[0] == t.key.device {
			return // packets that enter and leave by the same device are rare
		}
		partial = partial || there != nil
	}
	if e.side != either && e.side.match() != t.match {
		if e.limit != nil {
			t.leave(otherSide, e.where, "%v by %v for %s", e.limit.Rate, e.side, name(e.prefix))
			return
		}
		partial = true
	}
	if before, covered := t.ended(e.prefix, i); covered {
		if e.limit != nil && e.limit != t.entries[before].limit && !e.fallback {
			t.leave(unreached, e.where, "%v for %s comes after %s", e.limit.Rate, name(e.prefix), t.entries[before].where)
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

// ended reports whether packets of p never reach entry i, and which entry prevents it.
func (t *table) ended(p netip.Prefix, i int) (int, bool) {
	return around(t.final, p, p.Bits(), func(f int) bool { return t.entries[f].until > i })
}

// around returns the wanted entry of the longest network that contains p, up to a length.
func around(in map[netip.Prefix]int, p netip.Prefix, bits int, wanted func(i int) bool) (int, bool) {
	for ; bits >= 0; bits-- {
		if i, found := in[netip.PrefixFrom(p.Addr(), bits).Masked()]; found && wanted(i) {
			return i, true
		}
	}
	return 0, false
}

// keep makes an entry a rule, unless its network has a stricter one.
func (t *table) keep(i int) {
	e := t.entries[i]
	before, found := t.rules[e.prefix]
	if !found {
		t.rules[e.prefix] = i
		return
	}
	stricter, other := t.entries[before], e
	if e.limit == stricter.limit {
		return
	}
	if e.limit.Rate < stricter.limit.Rate {
		stricter, other = other, stricter
		t.rules[e.prefix] = i
	}
	t.leave(sameNetwork, other.where, "%v for %s, which has %v", other.limit.Rate, name(e.prefix), stricter.limit.Rate)
}

// apart has hooks of which a packet passes at most one in a direction.
var apart = map[string]bool{"forward": true, "input": true, "output": true}

// stacked reports limits that applied to the same packets.
func (t *table) stacked(limits []int) {
	for _, i := range limits {
		e := t.entries[i]
		wider, found := around(t.rules, e.prefix, e.prefix.Bits()-1, func(w int) bool {
			first, second := t.entries[min(i, w)], max(i, w)
			return t.entries[w].limit != e.limit && (first.until <= second || first.excessUntil > second)
		})
		if found {
			w := t.entries[wider]
			why := stacked
			if e.hook != w.hook && apart[e.hook] && apart[w.hook] {
				why = otherHook
			}
			t.leave(why, e.where, "%v for %s, and %v for %s", e.limit.Rate, name(e.prefix), w.limit.Rate, name(w.prefix))
		}
	}
}

// excepted reports packets that skipped limits because of other conditions than the address
// that is matched.
func (t *table) excepted(limits []int) {
	for _, i := range t.some {
		e := t.entries[i]
		what, sided := name(e.prefix), e.side == either || e.side.match() == t.match
		asks := e.partial
		for _, words := range e.devices.describe() {
			asks = also(asks, words)
		}
		switch {
		case !sided:
			what = also(fmt.Sprintf("%v %s", e.side, what), asks)
		case e.prefix.Bits() == 0:
			what = asks
		case asks != "":
			what += " with " + asks
		}
		if slices.ContainsFunc(limits, func(l int) bool {
			return l > i && l < e.until && (!sided || t.entries[l].prefix.Overlaps(e.prefix))
		}) {
			t.except(e.where, what)
		}
	}
}

// exempt adds exceptions within the network of a limit as rules, the widest first.
func (t *table) exempt() {
	sort.SliceStable(t.holes, func(i, j int) bool {
		return t.entries[t.holes[i]].prefix.Bits() < t.entries[t.holes[j]].prefix.Bits()
	})
	for _, i := range t.holes {
		e := t.entries[i]
		limit := func(from, until int) bool {
			_, found := around(t.rules, e.prefix, e.prefix.Bits(), func(l int) bool {
				return t.entries[l].limit != nil && l >= from && l < until
			})
			return found
		}
		at, taken := t.rules[e.prefix]
		wider, found := t.enclosing(e.prefix)
		switch {
		case taken && t.entries[at].limit != nil || limit(0, i):
			// An earlier limit applies to the exception, so no rule can express it.
			if limit(i, e.until) {
				t.except(e.where, name(e.prefix)+" before another limit")
			}
		case found && wider < e.until && !taken:
			t.rules[e.prefix] = i
		}
	}
}

// enclosing returns the limit of the next wider rule; false if that is an exception, or if
// there is none.
func (t *table) enclosing(p netip.Prefix) (int, bool) {
	w, found := around(t.rules, p, p.Bits()-1, func(int) bool { return true })
	return w, found && t.entries[w].limit != nil
}

// except reports an exception, once for all tables.
func (s *ruleset) except(where, what string) {
	if s.reported == nil {
		s.reported = map[string]bool{}
	}
	if at := where + what; !s.reported[at] {
		s.reported[at] = true
		s.leave(exceptions, where, "%s", what)
	}
}
