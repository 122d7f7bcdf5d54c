package maps

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

// known is what a change has to know of all rules, gathered at the first one.
type known struct {
	free    []uint32       // ids that no rule has, the next one last
	freed   []uint32       // those that rules had since, the next one first, after all of free
	lengths []lengthCounts // of each view
	taking  []participant  // the rules and shadows that take part in a change
}

// room is how many ids no rule has.
func (k *known) room() int { return len(k.free) + len(k.freed) }

// gather has to be called before anything is changed that it looks at.
func (s *Store) gather() *known {
	if s.known != nil {
		return s.known
	}
	k, rules := &known{lengths: make([]lengthCounts, len(s.views))}, s.allByID()
	used := make([]bool, s.Size().Rules)
	for _, at := range rules {
		k.lengths[s.rule(at.id).View][lengthOf(at.prefix)]++
		r := s.rule(at.id)
		used[at.id] = true
		changes := r.Version&versionChanges != 0
		for n := range uint32(2) {
			if v := s.version(at.id, n); v.Flags&ruleShadow != 0 && (changes || n == r.Version&1) {
				if !used[v.Shadow] && s.rule(v.Shadow).Version&versionChanges != 0 {
					k.taking = append(k.taking, participant{id: v.Shadow})
				}
				used[v.Shadow] = true
			}
		}
		if changes {
			k.taking = append(k.taking, participant(at))
		}
	}
	// Ids that were never used need no waiting, so they come first.
	var before []uint32
	for id := range slices.Backward(used) {
		switch {
		case used[id]:
		case s.rule(uint32(id)).Retired == 0:
			k.free = append(k.free, uint32(id))
		default:
			before = append(before, uint32(id))
		}
	}
	k.free = append(before, k.free...)
	s.refilter(rules)
	s.known = k
	return k
}

// Put sets a valid rule, in one step for any packet. A rule that was there keeps
// its counters, and each bucket its level, up to the new capacity. It reports
// whether anything was changed. The error wraps ErrFull where there is no room.
// A change of many that was committed cannot be taken back any more.
func (s *Set) Put(rule policy.Rule) (changed bool, err error) {
	s.finishUnlessPending()
	return s.put(rule)
}

func (s *Set) put(rule policy.Rule) (changed bool, err error) {
	d := policy.Difference{Want: &rule}
	if e, found := s.Find(rule.Prefix); found {
		if e.Rule == rule {
			return false, nil
		}
		d.Have = &e.Rule
	}
	if err := s.checkRoom(d); err != nil {
		return false, err
	}
	return true, s.do(d, atOnce)
}

// IDs is how many ids of rules and shadows it takes to do steps.
func IDs(steps ...policy.Difference) (ids uint32) {
	for _, d := range steps {
		if d.Want == nil {
			continue
		}
		var have policy.Rule
		if d.Have == nil {
			ids++
		} else {
			have = *d.Have
		}
		if _, ok := newShadow(have, *d.Want); ok {
			ids++
		}
	}
	return ids
}

// Room is how many ids no rule has.
func (s *Store) Room() uint32 { return uint32(s.gather().room()) }

func (s *Set) checkRoom(steps ...policy.Difference) error {
	if ids := IDs(steps...); ids > 0 && ids > s.Room() {
		return fmt.Errorf("%w: it holds %d", ErrFull, s.Size().Rules)
	}
	return nil
}

// when is from when on something is in force.
type when bool

const (
	atOnce when = false
	later  when = true // after the change that is being prepared
)

// do brings a rule from what it is to what it is to be. For what was is there, the
// set must have the rule.
func (s *Set) do(d policy.Difference, at when) error {
	if d.Have == nil {
		return s.add(*d.Want, at)
	}
	place := s.findPrefix(d.Have.Prefix)
	if id := *place - 1; d.Want != nil {
		s.alter(id, *d.Have, *d.Want, at)
	} else {
		s.drop(id, d.Have.Prefix, place, at)
	}
	return nil
}

// Load is Put for many rules, each in force as soon as it is set. It stops at the
// first error. The last change goes on; rules that take part in it must not be among them.
func (s *Set) Load(rules []policy.Rule) error {
	var more lengthCounts
	for _, r := range rules {
		more[lengthOf(r.Prefix)]++
	}
	defer s.expectLengths(&more)()
	for _, r := range rules {
		if _, err := s.put(r); err != nil {
			return err
		}
	}
	return nil
}

// expectLengths lets packets look for the lengths of prefixes that are to come
// at once, as for them to look for another takes a wait. What it returns ends
// that for those that did not come.
func (s *Set) expectLengths(more *lengthCounts) (done func()) {
	lengths := s.counts()
	for length, n := range more {
		lengths[length] += n
	}
	step.Store("look for other lengths")
	s.useLengths()
	return func() {
		for length, n := range more {
			lengths[length] -= n
		}
		s.useLengths()
	}
}

// allocate makes an id ready for a new rule, of which no packet knows yet.
func (s *Set) allocate() uint32 {
	k := s.gather()
	var id uint32
	if last := len(k.free) - 1; last >= 0 {
		id, k.free = k.free[last], k.free[:last]
	} else {
		id, k.freed = k.freed[0], k.freed[1:]
	}
	r := s.rule(id)
	if r.Retired != 0 {
		s.waitSince(r.Retired) // packets may have found the id before its last rule was deleted
	}
	s.freeSlots(id)
	clear(s.countersOf(id))
	*r = bpf.AbiRule{Retired: r.Retired, View: s.number}
	return id
}

// free frees an id.
func (s *Store) free(id uint32) {
	k := s.gather()
	s.rule(id).Retired = s.change[0].Epoch
	k.freed = append(k.freed, id)
}

// add sets up all that belongs to a new rule; its prefix, last, has packets find it.
func (s *Set) add(rule policy.Rule, at when) error {
	id := s.allocate()
	s.writeNew(id, rule, s.addShadow(policy.Rule{}, rule, 0, at), at)
	if err := step.Try("place a prefix"); err != nil {
		return err
	}
	return s.addPrefix(rule.Prefix, id)
}

// addShadow is the id of a rule's shadow: the one that it had, unless it is to be another.
func (s *Set) addShadow(have, rule policy.Rule, had uint32, at when) uint32 {
	limit, ok := newShadow(have, rule)
	if !ok {
		return had
	}
	id := s.allocate()
	limit.Prefix = netip.Prefix{} // no packet finds it by one
	s.writeNew(id, limit, 0, at)
	return id
}

// writeNew sets up a limit on an id that is new.
func (s *Set) writeNew(id uint32, rule policy.Rule, shadow uint32, at when) {
	r, v := s.rule(id), s.version(id, 0)
	if at == later {
		v = s.version(id, 1)
	}
	share(r, rule)
	encode(v, rule, newSalt(), shadow)
	empty(&r.Shared, meter(v), s.now())
	if at == later {
		*s.version(id, 0).AbiParams = bpf.AbiParams{Flags: ruleAbsent, Salt: v.Salt}
		s.takesPart(id, rule.Prefix)
	}
}

// newSalt tells the keys of a new rule from those of all others.
func newSalt() uint32 { return rand.Uint32() | 1 }

// HasSlots reports whether a rule gives sharers or flows slots of the table.
func HasSlots(rule policy.Rule) bool {
	return rule.Each.Kind != policy.EachAll || rule.Order == policy.SparseFirst
}

// share remembers that a rule has slots. It has them also while it has one
// bucket for all, until they are freed.
func share(r *bpf.AbiRule, rule policy.Rule) {
	if HasSlots(rule) {
		r.HasSlots = 1
	}
}

// keepOrder is for a rule of which sparse flows are to go first from a time (ns)
// on, of which they did not before, or by other measures: as long as something may
// wait from before, the words of flows do not tell of it, and none goes ahead.
func keepOrder(r *bpf.AbiRule, before, after version, from func() uint64) {
	if after.Flags&ruleSparse == 0 || before.Flags&ruleDelay == 0 || !limited(before) {
		return
	}
	old, new := meter(before), meter(after)
	if before.Flags&ruleSparse == 0 || sharing(before) != sharing(after) ||
		old.RateUnits != new.RateUnits || old.Capacity != new.Capacity || old.Burst != new.Burst {
		keepOrderUntil(r, from()+old.LongestWait())
	}
}

func keepOrderUntil(r *bpf.AbiRule, until uint64) {
	atomic.StoreUint64(&r.FifoUntil, max(until, atomic.LoadUint64(&r.FifoUntil)))
}

// empty makes a bucket owe nothing.
func empty(b *bpf.AbiBucket, m model.Meter, now uint64) {
	e := m.WithLevel(0, now)
	atomic.StoreUint32(&b.Tick, e.Tick)
	atomic.StoreUint64(&b.Tat, e.TAT)
}

// newShadow is the limit of a rule's shadow where the rule had none, or
// another: what one has counted says nothing of the other.
func newShadow(have, rule policy.Rule) (limit policy.Rule, ok bool) {
	limit, ok = rule.Proposed()
	old, had := have.Proposed()
	return limit, ok && !(had && limit == old)
}

// nextVersion is one that rule.Version never was, or not for long, so that packets
// see that it is another one. Its parameters are the others if toggle is 1.
func nextVersion(r *bpf.AbiRule, toggle uint32) uint32 {
	return (r.Version + 2 - toggle) &^ versionChanges
}

// alter writes the parameters of a rule that are not in force. At once, it switches to them.
func (s *Set) alter(id uint32, have, rule policy.Rule, at when) {
	r, old := s.rule(id), s.current(id)
	if _, had := have.Proposed(); had {
		s.gather() // its id may become free
	}
	shadow := s.addShadow(have, rule, old.Shadow, at)
	number := nextVersion(r, 1)
	next := s.version(id, number)
	share(r, rule)
	encode(next, rule, old.Salt, shadow)
	// With another bucket scope, keys have other buckets, and find theirs when it is as it was.
	next.Salt ^= sharing(old) ^ sharing(next)
	if limited(next) && !limited(old) {
		empty(&r.Shared, meter(next), s.now())
		s.freeSlots(id)
	}
	if at == later {
		s.takesPart(id, rule.Prefix)
		return
	}
	before, after := meter(old), meter(next)
	continues := limited(old) && limited(next)
	if continues {
		now := s.now()
		s.settle(id, before, now)
		after.Continue(before, now)
		next.Base, next.Rebase = after.Base, after.Base
	}
	keepOrder(r, old, next, s.now)
	step.Store("switch a rule")
	atomic.StoreUint32(&r.Version, number)
	if continues && after.Shrinks(before) {
		s.clamp(id, after)
	}
	for _, unused := range s.unusedShadows(id) {
		s.free(unused)
	}
}

// drop takes a rule away whose prefix has that place. The lengths in use are left as they are.
func (s *Set) drop(id uint32, p netip.Prefix, place *uint32, at when) {
	if at == atOnce {
		s.remove(p, id, place)
		return
	}
	n := s.rule(id).Version
	old, next := s.version(id, n), s.version(id, n^1)
	*next.AbiParams, *next.AbiColdParams = *old.AbiParams, *old.AbiColdParams
	next.Flags |= ruleAbsent
	s.takesPart(id, p)
}

// Delete takes a rule away, and reports whether there was one.
func (s *Set) Delete(p netip.Prefix) bool {
	s.finishUnlessPending()
	place := s.findPrefix(p)
	if place == nil {
		return false
	}
	s.gather()
	s.remove(p, *place-1, place)
	step.Store("look for other lengths")
	s.useLengths()
	return true
}

// remove has packets not find a rule any more, and frees its ids.
func (s *Set) remove(p netip.Prefix, id uint32, place *uint32) {
	s.change[0].Removed = s.change[0].Epoch
	step.Store("remove a prefix")
	atomic.StoreUint32(place, 0)
	if v := s.version(id, s.rule(id).Version); present(v) && v.Flags&ruleShadow != 0 {
		s.free(v.Shadow)
	}
	s.free(id)
	s.counts()[lengthOf(p)]--
}

// Clear puts all rules out of force in one step.
func (s *Set) Clear() {
	s.finishUnlessPending()
	lengths := s.counts()
	counts := *lengths
	clear(lengths[:])
	rules := s.byID()
	step.Store("look for no length")
	s.useLengths() // from here on packets find none
	*lengths = counts
	for _, at := range rules {
		s.remove(at.prefix, at.id, s.placeOf(at.prefix))
	}
	// A change of others goes on; what was this set's has no part in it any more.
	s.known.taking = slices.DeleteFunc(s.known.taking, func(t participant) bool { return s.rule(t.id).View == s.number })
}

// Empty reports whether there is no rule, nor one that a change took away or is to bring.
func (s *Set) Empty() bool {
	for range s.allPrefixes() {
		return false
	}
	return true
}

// MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1

// waitForPackets returns when no program runs any more that ran when it was called.
func waitForPackets() {
	// It is synchronize_rcu(), and programs run as RCU readers. Kernels with
	// nohz_full refuse it; no packet takes anything like this long.
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		time.Sleep(50 * time.Millisecond)
	}
}

// waitSince waits for the packets that may see what went out of force in an epoch, 0 for never.
func (s *Store) waitSince(epoch uint32) {
	now := &s.change[0].Epoch
	if epoch != *now {
		return
	}
	waitForPackets()
	if *now++; *now == 0 {
		*now = 1
	}
}
