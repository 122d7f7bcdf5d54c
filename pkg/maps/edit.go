package maps

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/grace"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

// index is the rules by their prefixes, and what a change of many needs to know of them.
type index struct {
	buckets
	prefixes prefixes.Tables
	known    *known

	// Earlier is what was used of the quota of a place when the store did not have it. May be nil.
	Earlier func(place string) (Used, bool)
}

// known is what a change of many rules needs to know of all rules.
type known struct {
	free   []uint32 // ids that were used before and are free, the next one first
	taking []placed // the limits that take part in a change
}

// A placed limit is a rule in a table of prefixes, or a companion, which has no key.
type placed struct {
	prefixes.Placed
	isNew bool // a change adds it
}

// gather reads all rules. It must be called before anything that it reads is changed. A
// change of one rule does not need it.
func (s *index) gather() *known {
	if s.known != nil {
		return s.known
	}
	k := &known{}
	// By id, because reading a million rules in the order of the tables takes ten times as long.
	rules := make([]prefixes.Placed, s.change.Ids)
	used := make([]bool, len(rules))
	for it := range s.prefixes.All(func(it prefixes.Placed) { // left by a Clear whose process was killed
		s.rule(it.ID).Retired = s.change.Epoch
		s.prefixes.Remove(it.Key)
	}) {
		rules[it.ID], used[it.ID] = it, true
	}
	rules = slices.DeleteFunc(rules, func(it prefixes.Placed) bool { return it.Key == prefixes.Key{} })
	take := func(it prefixes.Placed) {
		old, _ := s.bothPhases(it.ID)
		k.taking = append(k.taking, placed{it, !old.Present()})
	}
	for _, it := range rules {
		for _, id := range s.companionsOf(it.ID) {
			if !used[id] && s.Changes(id) {
				take(prefixes.Placed{ID: id})
			}
			used[id] = true
		}
		if s.Changes(it.ID) {
			take(it)
		}
	}
	for id, inUse := range used {
		if !inUse {
			if r := s.rule(uint32(id)); r.Retired == 0 { // a command was killed before it could say so
				r.Retired = s.change.Epoch
			}
			k.free = append(k.free, uint32(id))
		}
	}
	exists := func(id uint32) bool { return int(id) < len(used) && used[id] }
	freeLost(&s.progress, s.shares, shareOwner, func(id, number uint32) bool { return exists(id) && s.share(id) == number })
	freeLost(&s.progress, s.leases, leaseOwner, func(id, number uint32) bool {
		return exists(id) && (s.rule(id).Cold[0].Lease == number || s.rule(id).Cold[1].Lease == number)
	})
	s.prefixes.Refilter(rules)
	s.known = k
	return k
}

// Put sets a valid rule, in one step for any packet. An existing rule keeps its counters, and its buckets keep their room, up
// to the new capacity. It reports whether anything changed. The error wraps ErrFull where there is no room. A committed change
// of many rules cannot be reverted afterwards.
func (s *Set) Put(rule policy.Rule) (changed bool, err error) {
	s.Store.finishUnlessPending()
	steps := stepsTo(s, []policy.Rule{rule})
	err = s.do(steps, atOnce, nil)
	return len(steps) > 0 && err == nil, err
}

// Load is Put for many rules of different prefixes, each in force as soon as it is set. It
// does not end the last change; rules that take part in that must not be among them.
func (s *Set) Load(rules []policy.Rule) error { return s.do(stepsTo(s, rules), atOnce, nil) }

// LoadPending is Load while a change can revert, for rules that are in force once it has reverted, and steps from these to
// those that are in force now. No packet may see them yet.
func (s *Set) LoadPending(reverted []policy.Rule, now []policy.Difference) error {
	k := s.Store.gather()
	before := len(k.taking)
	if err := s.Load(reverted); err != nil {
		return err
	}
	if err := s.do(now, later, nil); err != nil {
		return err
	}
	for _, it := range k.taking[before:] {
		if !it.isNew {
			s.Store.time(it.ID, s.Store.now(), s.Store.Until())
		}
	}
	s.Store.edited()
	return nil
}

// stepsTo are the differences between a set and rules that shall be in force.
func stepsTo(s *Set, rules []policy.Rule) []policy.Difference {
	steps := make([]policy.Difference, 0, len(rules))
	for i := range rules {
		d := policy.Difference{Want: &rules[i]}
		if e, found := s.Find(d.Want.Prefix); found {
			if e.Rule == *d.Want {
				continue
			}
			have := e.Rule
			d.Have = &have
		}
		steps = append(steps, d)
	}
	return steps
}

// when is when something comes into force.
type when bool

const (
	atOnce when = false
	later  when = true // after the change that is being prepared
)

// progressStep is the number of steps between two calls of progress.
const progressStep = 1 << 12

// do carries out steps, each of which must start from the rule that the set has. progress
// may be nil. The error wraps ErrFull or ErrNoPool.
func (s *Set) do(steps []policy.Difference, at when, progress func(done int)) (err error) {
	if l := s.Store.Lacks(Needs(steps...)); l.Rules|l.Shares|l.Leases > 0 {
		return fmt.Errorf("%w: it holds %d", ErrFull, s.Store.room())
	}
	if s.data.Clearing != 0 {
		s.Store.gather() // removes the prefixes that a killed process left
		s.data.Clearing = 0
	}
	lengths := s.Store.prefixes.InUse(s.number)
	for _, d := range steps {
		if d.Have == nil {
			lengths[prefixes.LengthOf(d.Want.Prefix)] = true
		}
	}
	s.Store.prefixes.LookFor(s.number, lengths) // of all new prefixes in one step, because each change of the lengths waits for packets
	defer func() {
		s.Store.edited()
		if err != nil {
			s.Store.prefixes.Trim(s.number)
		}
	}()
	for i, d := range steps {
		if d.Want == nil {
			s.drop(d.Have.Prefix)
		} else if err := s.set(d.Have, *d.Want, at); err != nil {
			return err
		}
		if progress != nil && (i+1)%progressStep == 0 {
			progress(i + 1)
		}
	}
	return nil
}

// allocate prepares an id for a new limit, which no packet finds yet.
func (s *Set) allocate() uint32 {
	id := s.Store.change.Ids // no packet has used this one
	if id < s.Store.room() {
		s.Store.change.Ids++
	} else {
		k := s.Store.gather()
		id, k.free = k.free[0], k.free[1:]
	}
	r := s.Store.rule(id)
	if r.Retired != 0 {
		grace.Wait(s.Store.change, r.Retired) // packets may still charge the previous rule of this id
		clear(s.Store.countersOf(id))
	}
	s.Store.freeSlots(id)
	s.Store.discardLabels(id)
	// The salt makes its keys differ from those of other rules.
	absent := bpf.AbiParams{Flags: params.Absent, Salt: rand.Uint32() | 1}
	*r = bpf.AbiRule{Retired: r.Retired, View: s.number, Params: [2]bpf.AbiParams{absent, absent}}
	return id
}

// free frees an id, with its labels, if it was not freed yet.
func (s *index) free(id uint32) {
	r := s.rule(id)
	if a, b := &r.Params[0], &r.Params[1]; a.Flags|a.Idle|b.Flags|b.Idle == 0 {
		return
	}
	s.discardLabels(id)
	s.freeShare(id)
	s.freeLeases(id, 0)
	for i := range r.Params { // its slots are empty, and go by no lease and no calendar
		r.Params[i].Flags, r.Params[i].Idle, r.Cold[i].Lease, r.Cold[i].Calendar = 0, 0, 0, 0
	}
	r.Retired = s.change.Epoch
	if s.known != nil {
		s.known.free = append(s.known.free, id)
	}
}

// set sets up a new rule, which packets find by its prefix from the last store on, or alters one.
func (s *Set) set(have *policy.Rule, want policy.Rule, at when) error {
	if have != nil {
		it, _ := s.find(want.Prefix)
		_, err := s.write(placed{it, false}, &want, *have, want, 0, at)
		return err
	}
	it := prefixes.Placed{View: s.number, Key: s.Store.prefixes.Key(s.number, want.Prefix)}
	id, err := s.write(placed{it, true}, &want, policy.Rule{}, want, 0, at)
	if err == nil {
		err = step.Try("place a prefix")
	}
	if err == nil && !s.Store.prefixes.Place(it.Key, id) {
		err = fmt.Errorf("add prefix %s: %w", policy.CIDR(want.Prefix), ErrFull)
	}
	return err
}

// find is the rule of a prefix, in any phase of a change. Without an id if there is none.
func (s *Set) find(p netip.Prefix) (it prefixes.Placed, found bool) {
	it.View, it.Key = s.number, s.Store.prefixes.Key(s.number, p)
	it.ID, found = s.Store.prefixes.Find(s.number, p)
	return it, found
}

// write writes a limit to the parameters that are not in force, and its companions. With atOnce it switches to them. A new
// limit gets an id, which is returned. It is that of the rule of or of one of its companions. One that is new among the other limits
// of have comes before some of these, of which had has the first.
func (s *Set) write(it placed, of *policy.Rule, have, want policy.Rule, had uint32, at when) (id uint32, err error) {
	pool, err := s.Store.poolOf(want)
	if err != nil {
		return 0, err
	}
	if it.isNew {
		it.ID = s.allocate()
	}
	id = it.ID
	r, old, next := s.Store.rule(id), s.Store.current(id), s.Store.other(id)
	if it.isNew && at == atOnce {
		old, next = next, old
	}
	s.Store.labels.Discard(id, next)
	if err := s.Store.labels.Write(id, next.Index, want); err != nil {
		return 0, err
	}
	ids := old.CompanionIDs()
	if it.isNew {
		ids[params.Chain] = had
	}
	its, err := s.setCompanions(of, have, want, ids, at)
	if err != nil {
		return 0, err
	}
	if hasSlots(want) {
		r.HasSlots = 1 // also if its bucket scope changes to "all": slots stay until they are freed
	}
	calendar, err := s.Store.calendarOf(want)
	if err != nil {
		return 0, err
	}
	share, lease := s.Store.setShare(id, want), s.Store.newLease(id, next, want)
	next.Encode(want, old.Salt, pool, its)
	next.Share, next.Lease, next.Calendar, *next.Next = share, lease, calendar, 0
	keepGranted(old, next)
	s.Store.setLease(id, old, next, want)
	if number := leaseNumber(old); number != 0 && at == later {
		grace.Wait(s.Store.change, s.Store.leases[number-1].Replaced) // Time writes the one that is not in force
	}
	if old.Present() { // With another bucket scope, keys have other buckets. They find the old ones after a revert.
		next.Salt ^= old.Scope() ^ next.Scope()
	}
	if next.Limited() && !old.Limited() {
		now := s.Store.now()
		m := s.Store.meterAt(next, now)
		shared := m.WithLevel(0, now)
		if want.Unit == policy.InQuota {
			shared = s.usedBefore(id, next.Salt, s.place(*of), want, m, now)
		}
		setBucket(&r.Shared, shared)
		if !it.isNew {
			s.Store.freeSlots(id)
		}
	}
	switch {
	case at == later:
		s.Store.takesPart(it)
	case !it.isNew:
		s.Store.promptly(func(now uint64) { s.Store.continueClock(id, old, next, now) })
		s.Store.switchTo(id, next.Index, "switch a rule")
		s.Store.freeUnused(id)
	}
	return id, nil
}

// hasSlots reports whether hosts, subnets or flows of a rule, sharers of its bucket but for members, or flows that a limit of new ones
// has seen, have slots in the table.
func hasSlots(rule policy.Rule) bool {
	return rule.Each.Kind != policy.EachAll || rule.Order == policy.SparseFirst || rule.Also.Flows != 0 || rule.Unit == policy.Flows ||
		rule.Share.Kind != policy.ShareNone && rule.Share.Kind != policy.ShareMember
}

// other are the parameters of a rule that are not in force, once no packet uses them.
func (rs *rules) other(id uint32) params.Version {
	r := rs.rule(id)
	grace.Wait(rs.change, r.Replaced)
	return rs.version(id, r.Sets^1)
}

// switchTo lets packets see a version of a rule, in all phases of a change.
func (rs *rules) switchTo(id, index uint32, what string) {
	r := rs.rule(id)
	r.Replaced = rs.change.Epoch
	step.Store(what)
	atomic.StoreUint32(&r.Sets, index<<phaseBefore|index<<phaseAfter|index<<phaseReverted)
}

// promptly writes what begins now (ns), and again until that took less than notice: else the clock of a higher rate would have run
// ahead meanwhile. It returns when that begins.
func (rs *rules) promptly(write func(now uint64)) uint64 {
	for {
		now := rs.now()
		write(now)
		if rs.now()-now < uint64(notice) {
			return now
		}
	}
}

// drop marks a rule as absent after the change that is being prepared.
func (s *Set) drop(p netip.Prefix) {
	it, _ := s.find(p)
	old, next := s.Store.current(it.ID), s.Store.other(it.ID)
	s.Store.labels.Discard(it.ID, next)
	*next.AbiParams, *next.AbiColdParams = *old.AbiParams, *old.AbiColdParams
	next.Flags = next.Flags&^params.Label | params.Absent
	s.Store.takesPart(placed{it, false})
}

// Delete removes the rules of networks, each in one step, and reports whether there was one.
func (s *Set) Delete(networks ...netip.Prefix) (deleted bool) {
	s.Store.finishUnlessPending()
	return s.Remove(networks...)
}

// Remove is Delete for rules that go with their device. The last change goes on without them.
func (s *Set) Remove(networks ...netip.Prefix) (removed bool) {
	for _, p := range networks {
		if it, found := s.find(p); found {
			s.Store.remove(it)
			removed = true
		}
	}
	if removed {
		s.Store.prefixes.Trim(s.number)
		s.Store.edited()
	}
	return removed
}

// remove hides a rule from packets, and frees its ids. It does not change the lengths in use.
func (s *index) remove(it prefixes.Placed) {
	s.prefixes.Remove(it.Key) // which has no place if Prepare found no room for it
	s.freeWith(it.ID)
}

// Clear removes all rules of each set in one step. The last change goes on without them. It needs one pass for all sets.
func (s *Store) Clear(sets ...*Set) {
	clears := make([]bool, len(s.prefixes.Views))
	for _, set := range sets {
		clears[set.number] = true
	}
	rules := s.prefixes.ByID(prefixes.AllViews)
	for _, set := range sets {
		set.data.Clearing = 1
		s.prefixes.LookFor(set.number, prefixes.Lengths{}) // from here on packets find none
	}
	for it := range rules {
		if clears[it.View] {
			s.remove(it)
		}
	}
	for _, set := range sets {
		set.data.Clearing = 0
	}
	s.edited()
	if s.known != nil {
		s.known.taking = slices.DeleteFunc(s.known.taking, func(it placed) bool { return clears[s.rule(it.ID).View] })
	}
}

// ClearCounters has all counters begin at 0. No packet may use the rules.
func (s *Set) ClearCounters() {
	for f := range s.Store.prefixes.ByID(s.number) {
		clear(s.Store.countersOf(f.ID))
	}
}
