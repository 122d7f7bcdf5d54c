package maps

import (
	"errors"
	"iter"
	"net/netip"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/labels"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrFull means that the store has no room for another rule.
var ErrFull = errors.New("no room for another rule")

// An Entry is a rule in force, with the id of its bucket and counters.
type Entry struct {
	policy.Rule
	ID uint32
}

// rules are the rules of all sets and their shadows, by id. The change says which of their versions packets see.
type rules struct {
	progress
	hook   *bpf.AbiHook
	arrays [][]byte // of each map of rules
	shares []bpf.AbiShare
	labels labels.Labels
}

// limits are rules, pools and their companions, as a policy has them.
type limits struct {
	clocks
	names map[uint32]string // of pools, while many rules are read; else nil
}

// ruleSize is how many bytes a rule takes, with its counters for each CPU.
func ruleSize(hook *bpf.AbiHook) uint32 {
	return uint32(unsafe.Offsetof(bpf.AbiRule{}.Counters)) + (hook.CpuMask+1)*uint32(unsafe.Sizeof(bpf.AbiCounters{}))
}

// rule is a rule in the memory that packets read and charge.
func (rs *rules) rule(id uint32) *bpf.AbiRule {
	n := len(rs.arrays) - 1
	for id < rs.hook.FirstId[n] {
		n--
	}
	return (*bpf.AbiRule)(unsafe.Pointer(&rs.arrays[n][uint64(id-rs.hook.FirstId[n])*uint64(ruleSize(rs.hook))]))
}

// countersOf are the counters of a rule, for each CPU.
func (rs *rules) countersOf(id uint32) []bpf.AbiCounters {
	return unsafe.Slice((*bpf.AbiCounters)(unsafe.Pointer(&rs.rule(id).Counters)), rs.hook.CpuMask+1)
}

// room is how many rules the store can hold.
func (rs *rules) room() uint32 {
	n := len(rs.arrays) - 1
	return rs.hook.FirstId[n] + uint32(len(rs.arrays[n]))/ruleSize(rs.hook)
}

func (rs *rules) version(id, n uint32) params.Version {
	r := rs.rule(id)
	return params.Version{AbiParams: &r.Params[n&1], AbiColdParams: &r.Cold[n&1], Clock: &r.Params[n&1].Clock, Next: &r.Next[n&1], Index: n & 1}
}

// versions are the versions of a rule in force, or both while it takes part in a change.
func (rs *rules) versions(id uint32) iter.Seq[params.Version] {
	return func(yield func(params.Version) bool) {
		before, after := rs.bothPhases(id)
		if yield(before) && rs.Changes(id) {
			yield(after)
		}
	}
}

// versionIn is the version of a rule that packets see in a phase of the change: set_in of bpf/look.h.
func (rs *rules) versionIn(id uint32, in phase) params.Version {
	n := atomic.LoadUint32(&rs.rule(id).Sets) >> in
	v := rs.version(id, n)
	if n&setReverted != 0 {
		v = rs.afterRevert(id, v)
	}
	return v
}

// afterRevert is a version from before a change once that has reverted.
func (rs *rules) afterRevert(id uint32, v params.Version) params.Version {
	r := rs.rule(id)
	v.Clock, v.Next, v.Reverted = &r.Reverted, &r.Next[2], true
	return v
}

// current is the version of a rule that packets see now.
func (rs *rules) current(id uint32) params.Version { return rs.versionIn(id, rs.phase()) }

// Rules are the rules in force, in the order of policy.ComparePrefix.
func (s *Set) Rules() []Entry { return collect(s.Store, s.number, itself)[s.number] }

// Policy are Rules without ids.
func (s *Set) Policy() []policy.Rule { return collect(s.Store, s.number, withoutID)[s.number] }

// AllRules are the Rules of each set, by its number. It reads the tables once.
func (s *Store) AllRules() [][]Entry { return collect(s, prefixes.AllViews, itself) }

// Policies are AllRules without ids.
func (s *Store) Policies() [][]policy.Rule { return collect(s, prefixes.AllViews, withoutID) }

func itself(e Entry) Entry          { return e }
func withoutID(e Entry) policy.Rule { return e.Rule }

// collect returns what of each rule that is in force in a view, or in prefixes.AllViews, by view.
func collect[T any](s *Store, view uint32, what func(Entry) T) [][]T {
	lists := s.ordered(view)
	all := make([][]T, len(lists))
	for set, e := range s.inForce(lists) {
		n := set.number
		if all[n] == nil {
			all[n] = make([]T, 0, len(lists[n]))
		}
		all[n] = append(all[n], what(e))
	}
	return all
}

// EveryRule are the Rules of all sets, one by one. It reads the tables once.
func (s *Store) EveryRule() iter.Seq2[*Set, Entry] { return s.inForce(s.ordered(prefixes.AllViews)) }

// A listed rule is a rule with its prefix.
type listed struct {
	id     uint32
	prefix netip.Prefix
}

// ordered are the rules of a view, or of prefixes.AllViews, by view, in the order of policy.ComparePrefix.
func (s *Store) ordered(view uint32) [][]listed {
	lists := make([][]listed, len(s.prefixes.Views))
	for it := range s.prefixes.ByID(view) {
		lists[it.View] = append(lists[it.View], listed{it.ID, s.prefixes.Prefix(it.View, it.Key)})
	}
	for _, list := range lists {
		// Usually they are in order, because a policy's rules get their ids in order.
		slices.SortFunc(list, func(a, b listed) int { return policy.ComparePrefix(a.prefix, b.prefix) })
	}
	return lists
}

// inForce are those rules of lists, by view, that are in force.
func (s *Store) inForce(lists [][]listed) iter.Seq2[*Set, Entry] {
	return func(yield func(*Set, Entry) bool) {
		now, rules := s.phase(), 0
		for _, list := range lists {
			rules += len(list)
		}
		defer s.labels.Fetch(rules)()
		s.names = map[uint32]string{}
		defer func() { s.names = nil }()
		for number, list := range lists {
			set := s.View(uint32(number))
			for _, at := range list {
				if v := s.versionIn(at.id, now); v.Present() && !yield(set, s.entry(at.id, at.prefix, v, now)) {
					return
				}
			}
		}
	}
}

// A Trait is what a rule may be.
type Trait func(*rules, uint32) bool

// Traits of rules.
var (
	Exists    Trait = func(*rules, uint32) bool { return true } // in any phase of a change
	InForce   Trait = func(rs *rules, id uint32) bool { return rs.current(id).Present() }
	TakesPart Trait = (*rules).Changes // in a change
	// Delays packets, by itself or by a pool that it draws from, in any phase of a change.
	Delays Trait = func(rs *rules, id uint32) bool { return rs.delays(id, policy.MaxDepth) }
)

// Any reports whether any rule of the set has a trait.
func (s *Set) Any(has Trait) bool {
	for f := range s.Store.prefixes.All(nil) {
		if f.View == s.number && has(&s.Store.rules, f.ID) {
			return true
		}
	}
	return false
}

// Have reports for each set, by number, whether any of its rules has a trait. It needs one pass for all sets.
func (s *Store) Have(has Trait) []bool {
	have, left := make([]bool, len(s.prefixes.Views)), 0
	for number := range have {
		if s.prefixes.InUse(uint32(number)) != (prefixes.Lengths{}) {
			left++
		}
	}
	for f := range s.prefixes.All(nil) {
		if left == 0 {
			break
		}
		if !have[f.View] && has(&s.rules, f.ID) {
			have[f.View] = true
			left--
		}
	}
	return have
}

// delays is Delays with at most so many pools above the rule.
func (rs *rules) delays(id uint32, pools int) bool {
	for v := range rs.versions(id) {
		if v.Present() && (v.Flags&params.Delay != 0 || v.Flags&params.Within != 0 && pools > 0 && rs.delays(v.Within-1, pools-1)) {
			return true
		}
	}
	return false
}

// Match is the rule with the longest prefix that contains an address.
func (s *Set) Match(a netip.Addr) (Entry, bool) {
	for bits := a.BitLen(); bits >= 0; bits-- {
		if p, err := a.Prefix(bits); err == nil && !policy.IsMark(p) {
			if e, ok := s.Find(p); ok {
				return e, true
			}
		}
	}
	return Entry{}, false
}

// Marks are the marks and VLANs that rules are for.
func (s *Set) Marks() (all []netip.Prefix) {
	if !s.Store.prefixes.InUse(s.number).HasMarks() {
		return nil
	}
	for f := range s.Store.prefixes.ByID(s.number) {
		if p := s.Store.prefixes.Prefix(s.number, f.Key); policy.IsMark(p) && s.Has(p) {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, policy.ComparePrefix)
	return all
}

// MatchAny is the rule that matches all addresses of the family, if there is one. same is
// false if some address may match another rule.
func (s *Set) MatchAny(ipv6 bool) (e Entry, found, same bool) {
	all := policy.Everything[0]
	if ipv6 {
		all = policy.Everything[1]
	}
	if s.Store.prefixes.InUse(s.number).HasOther(all) {
		return Entry{}, false, false
	}
	e, found = s.Find(all)
	return e, found, true
}

// Find is the rule with exactly this prefix.
func (s *Set) Find(p netip.Prefix) (Entry, bool) {
	id, found := s.Store.prefixes.Find(s.number, p)
	if !found {
		return Entry{}, false
	}
	now := s.Store.phase()
	v := s.Store.versionIn(id, now)
	return s.Store.entry(id, p, v, now), v.Present()
}

// Has reports whether Find finds a rule, without its texts.
func (s *Set) Has(p netip.Prefix) bool {
	id, found := s.Store.prefixes.Find(s.number, p)
	return found && s.Store.current(id).Present()
}

// entry is a rule as one of its versions has it.
func (ls *limits) entry(id uint32, p netip.Prefix, v params.Version, in phase) Entry {
	other := func(id uint32) params.Version { return ls.versionIn(id, in) }
	e := Entry{v.Decode(p, other, func(id uint32) string { return ls.poolName(id, in) }), id}
	if v.Flags&params.Label != 0 {
		t := ls.labels.Read(id, v.Index)
		e.Label, e.Cluster, e.Adapt, e.Also = t.Label, t.Cluster, t.Adapt, t.Also
	}
	return e
}

// discardLabels deletes the labels of both versions of a rule.
func (rs *rules) discardLabels(id uint32) {
	rs.labels.Discard(id, rs.version(id, 0))
	rs.labels.Discard(id, rs.version(id, 1))
}

// FetchLabels reads all labels at once, if so many rules are to be read, and keeps them until forget is called.
func (rs *rules) FetchLabels(rules int) (forget func()) { return rs.labels.Fetch(rules) }
