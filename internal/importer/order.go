package importer

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/pkg/policy"
)

// An entry is what a tool does to the packets of a network. Tools apply their entries in
// order until one is final. Rules have no order: the longest prefix decides.
type entry struct {
	conditions          // the devices matter of exceptions and bans only
	key        tableKey // none for a rule of nft that does not limit
	prefix     netip.Prefix

	limit *limit // nil for an exception, whose packets pass
	drops bool   // the packets are dropped without a limit
	// Packets of the entry skip the entries before this index; 0 if they skip none.
	until int
	hook  string // of nft; some hooks never see the same packet
	where string
	label policy.Label
}

// A limit is the limit of an entry. Entries with the same limit share its bucket.
type limit struct {
	policy.Rule // without a network

	in      *limit // packets must conform to it, too; of htb, the class above, and nest finds the others; nil for none
	packets bool   // of nft: it counts packets, not bytes
	over    bool   // of nft: its verdict is for excess packets, not for conforming ones
	where   string

	order int           // among limits of rules
	users int           // the number of rules
	pool  policy.Within // the name of its pool, once it was added
}

// scoped reports whether the limit has several buckets, so that it cannot become a pool.
func (l *limit) scoped() bool { return l.Each.Kind != policy.EachAll }

// divides reports whether none of the limit's buckets for a network is for part of a network within it.
func (l *limit) divides(whole, part netip.Prefix) bool {
	return whole == part || l.Each.Kind != policy.EachSubnet || int(l.Each.Bits) > part.Bits()
}

// pooled reports whether the limit becomes a pool because several networks have it.
func (l *limit) pooled() bool { return l.users > 1 && !l.scoped() }

func (l *limit) possible() bool { return l.Rate >= policy.MinRate && l.Rate <= policy.MaxRate }

var (
	otherSide = reason{loosens, "limit by the other address", "a direction of a device matches either destinations or sources",
		"no rule was made; set it on another device on the path of these packets, or by hand with match"}
	stacked = reason{loosens, "stacked limits", "packets had to conform to both limits, and no pool can express that",
		"lower the rate of the rule, or set the other limit on another device"}
	otherHook = reason{other, "limits at different hooks", "one limit was for forwarded packets and one for packets of this host, and only the rule with the longest prefix decides",
		"check whether the rules should limit all packets"}
	exceptions = reason{other, "exception", "these packets skipped later limits, and the rules limit them",
		"nothing to do if they are few; raise the rates otherwise"}
)

// enter adds an entry for each network of its conditions, and returns their indices. It lists a limit that no rule can have.
func (s *collector) enter(e entry) (added []int) {
	if e.limit != nil && !e.limit.possible() {
		s.leave(outside, e.limit.where, "%d bit/s for %s", uint64(e.limit.Rate), names(e.networks))
	}
	for _, e.prefix = range e.networks {
		added = append(added, len(s.entries))
		s.entries = append(s.entries, e)
	}
	return added
}

// make converts all entries. Each device and direction has its own order. A limit becomes a pool if several networks
// have it, or if other limits are within it.
func (s *collector) make() {
	var keys []tableKey
	for _, e := range s.entries {
		if e.limit != nil && !slices.Contains(keys, e.key) {
			keys = append(keys, e.key)
		}
	}
	var rules []ruled
	limits := 0
	for _, key := range keys {
		for _, r := range s.table(key) {
			rules = append(rules, r)
			for _, l := range r.limits {
				if l.users++; l.users == 1 {
					limits++
					l.order = limits
				}
			}
		}
	}
	s.nest(rules)
	for _, r := range rules {
		of := policy.Rule{Rate: policy.Unlimited}
		if len(r.limits) > 0 {
			l := r.limits[0]
			switch of = l.Rule; {
			case l.pooled():
				of = policy.Rule{Rate: policy.Unlimited, Within: s.within(l), Framing: l.Framing}
			case len(r.limits) > 1:
				of.Within = s.within(r.limits[1])
			}
			if of.Within == "" {
				of.Guarantee, of.Weight = 0, 0
			}
			of.Each = l.Each.Canonical(r.prefix)
		}
		if of.Prefix, of.Label = r.prefix, r.label; of.Limits() || len(r.limits) == 0 {
			s.add(r.key, r.match, of, r.where)
		}
	}
	for key, t := range s.tables {
		if key != pools { // pools have the order of the source
			policy.SortRules(t.Rules)
		}
	}
}

// compare orders false before true.
func compare(a, b bool) int {
	number := map[bool]int{true: 1}
	return number[a] - number[b]
}

// nest orders the limits of each rule, those of fewer networks first, which become pools within the next ones. A pool
// is in one other pool, so limits that have different ones above them in different rules have none, which it reports.
func (s *collector) nest(rules []ruled) {
	above, split := map[*limit]*limit{}, map[*limit]bool{}
	for _, r := range rules {
		slices.SortFunc(r.limits, func(a, b *limit) int {
			return cmp.Or(compare(b.scoped(), a.scoped()), a.users-b.users, a.order-b.order)
		})
		for i, l := range r.limits {
			var next *limit
			if i+1 < min(len(r.limits), policy.MaxDepth) {
				next = r.limits[i+1]
			}
			if before, found := above[l]; i > 0 || l.pooled() {
				split[l] = split[l] || found && before != next
				above[l] = next
			}
		}
	}
	for l, next := range above {
		if l.in == nil && !split[l] {
			l.in = next
		}
	}
	for i := range rules {
		r := &rules[i]
		for k := 1; k < len(r.limits); k++ {
			if l, last := r.limits[k], r.limits[k-1]; (k > 1 || last.pooled()) && last.in != l {
				s.leave(stacked, r.where, "%v for %s, and %v of %s", r.limits[0].Rate, policy.NetworkText(r.prefix), l.Rate, l.where)
				r.limits = slices.Delete(r.limits, k, k+1)
				k--
			}
		}
	}
}

// within returns the name of a limit's pool, which it adds at first.
func (s *collector) within(l *limit) policy.Within {
	if l != nil && l.pool == "" {
		r := l.Rule
		r.Framing = policy.Framing{}
		if r.Within = s.within(l.in); r.Within == "" {
			r.Guarantee, r.Weight = 0, 0
		}
		l.pool = s.addPool(l.where, "", r, l.where)
	}
	if l == nil {
		return ""
	}
	return l.pool
}

// A ruled entry becomes a rule.
type ruled struct {
	entry
	key    tableKey
	match  policy.Match
	limits []*limit // to all of which its packets must conform
}

// A table converts the entries of one device and direction.
type table struct {
	*collector
	key     tableKey
	match   policy.Match
	indices []int
	final   map[netip.Prefix][]int // by network, the entries that skip others
	limits  map[netip.Prefix][]int // by network
	holes   map[netip.Prefix]int   // by network, the first exception
	some    []int                  // exceptions that no rule can express
}

func (s *collector) table(key tableKey) (made []ruled) {
	t := &table{collector: s, key: key, final: map[netip.Prefix][]int{}, limits: map[netip.Prefix][]int{}, holes: map[netip.Prefix]int{}}
	for i, e := range s.entries {
		if e.key == key || e.key == (tableKey{}) && e.prefix.IsValid() {
			t.indices = append(t.indices, i)
		}
	}
	t.match = t.side()
	for _, i := range t.indices {
		t.add(i)
	}
	t.excepted()
	firsts := maps.Clone(t.holes)
	for p, all := range t.limits {
		slices.SortStableFunc(all, func(a, b int) int { return cmp.Compare(t.entries[a].limit.Rate, t.entries[b].limit.Rate) })
		firsts[p] = all[0]
	}
	rules := map[netip.Prefix]ruled{}
	for _, i := range slices.Sorted(maps.Values(firsts)) {
		rules[s.entries[i].prefix] = t.rule(s.entries[i])
	}
	for _, i := range slices.Sorted(maps.Values(firsts)) {
		r := rules[s.entries[i].prefix]
		var wider []*limit
		for bits := r.prefix.Bits() - 1; bits >= 0; bits-- {
			if w, found := rules[netip.PrefixFrom(r.prefix.Addr(), bits).Masked()]; found {
				wider = w.limits
				break
			}
		}
		if !slices.Equal(r.limits, wider) { // else the wider rule has the same buckets
			made = append(made, r)
		}
	}
	return made
}

// side returns the address that the first limit matches, or that of the far side.
func (t *table) side() policy.Match {
	for _, i := range t.indices {
		if e := t.entries[i]; e.limit != nil && e.side != either {
			return e.side.match()
		}
	}
	return t.key.direction.FarSide()
}

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
			t.leave(otherSide, e.where, "%v by %v for %s", e.limit.Rate, e.side, policy.NetworkText(e.prefix))
			return
		}
		partial = true
	}
	if t.skipped(e.prefix, i) {
		return
	}
	_, found := t.holes[e.prefix]
	switch {
	case partial:
		if !e.drops {
			t.some = append(t.some, i)
		}
		return
	case e.limit != nil && e.limit.possible():
		t.limits[e.prefix] = append(t.limits[e.prefix], i)
	case e.limit == nil && !e.drops && !found:
		t.holes[e.prefix] = i
	}
	if e.until > i {
		t.final[e.prefix] = append(t.final[e.prefix], i)
	}
}

func (t *table) skipped(p netip.Prefix, i int) (skip bool) {
	around(t.final, p, func(f int) { skip = skip || f < i && t.entries[f].until > i })
	return skip
}

// around calls do for what networks that contain p have, the longest first.
func around(in map[netip.Prefix][]int, p netip.Prefix, do func(i int)) {
	for bits := p.Bits(); bits >= 0; bits-- {
		for _, i := range in[netip.PrefixFrom(p.Addr(), bits).Masked()] {
			do(i)
		}
	}
}

// apart has hooks of which a packet passes at most one in a direction.
var apart = map[string]bool{"forward": true, "input": true, "output": true}

// rule returns the rule of an entry's network, with all limits that its packets must conform to.
func (t *table) rule(of entry) ruled {
	r := ruled{entry: of, key: t.key, match: t.match}
	around(t.limits, of.prefix, func(i int) {
		e := t.entries[i]
		why := stacked
		switch {
		case t.skipped(of.prefix, i) || slices.Contains(r.limits, e.limit):
			return
		case e.hook != r.hook && apart[e.hook] && apart[r.hook]:
			why = otherHook
		case !e.limit.scoped() || e.limit.divides(e.prefix, of.prefix) && !slices.ContainsFunc(r.limits, (*limit).scoped):
			r.hook = e.hook
			for l := e.limit; l != nil && !slices.Contains(r.limits, l); l = l.in {
				r.limits = append(r.limits, l)
			}
			return
		}
		t.leave(why, r.where, "%v for %s, beside the rule of %s", e.limit.Rate, policy.NetworkText(e.prefix), policy.NetworkText(of.prefix))
	})
	return r
}

// excepted reports packets that skipped limits by other conditions than the address that is matched.
func (t *table) excepted() {
	limits := slices.Concat(slices.Collect(maps.Values(t.limits))...)
	for _, i := range t.some {
		e := t.entries[i]
		sided := e.side == either || e.side.match() == t.match
		if slices.ContainsFunc(limits, func(l int) bool {
			return l > i && l < e.until && t.entries[l].limit != e.limit && (!sided || t.entries[l].prefix.Overlaps(e.prefix))
		}) {
			t.leave(exceptions, e.where, "%s", e.describe())
		}
	}
}
