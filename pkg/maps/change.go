package maps

import (
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A change of many rules goes by these steps, in all but the last of which a
// process may be killed: what packets see is then as before, or as after.
//
//	Prepare   writes the versions that no packet reads; rules take part from then on
//	Settle    readies buckets for other byte clocks
//	Time      makes all byte clocks agree at the moment when the change is to begin
//	Arm       the one store that lets it begin then; and end at until, unless it is confirmed
//	Commit    once it has begun and is to last
//	Settle, TimeBack, Back   let a change that has begun end at another moment
//	Finish    forgets the parameters that are not in force; whatever changes a rule begins with it
//
// Until Finish, Back is possible.

// A phase of a change is what packets see of all that takes part in it.
type phase uint64

const (
	phaseBefore   = phase(bpf.AbiPhasePHASE_BEFORE)
	phaseAfter    = phase(bpf.AbiPhasePHASE_AFTER)
	phaseReverted = phase(bpf.AbiPhasePHASE_REVERTED)
	phaseByTime   = phase(bpf.AbiPhasePHASE_BY_TIME)
)

const versionChanges = 1 << 31 // VERSION_CHANGES of abi.h

// Never is the time at which a change ends that is to last.
const Never = uint64(math.MaxUint64)

// progress is how far the change of many rules is.
type progress struct {
	change *bpf.AbiChange
	now    func() uint64 // see UseClock
}

// phase is the one that packets see now. The time is asked for only where it has a say, as that takes a while.
func (p *progress) phase() phase {
	if at := phase(atomic.LoadUint64(&p.change.Phase)); at != phaseByTime {
		return at
	}
	switch now := p.now(); {
	case now < atomic.LoadUint64(&p.change.From):
		return phaseBefore
	case now < atomic.LoadUint64(&p.change.Until):
		return phaseAfter
	}
	return phaseReverted
}

// UseClock makes now the data path's time in ns, where it is not Now: for tests and replay.
func (p *progress) UseClock(now func() uint64) { p.now = now }

// store is for a word of the change, of which packets or later commands learn how far it is.
func store[T ~uint64](what string, word *uint64, value T) {
	step.Store(what)
	atomic.StoreUint64(word, uint64(value))
}

// ChangeState is how far a change is.
type ChangeState string

const (
	NoChange  ChangeState = ""
	Armed     ChangeState = "armed"     // and begins at once
	Pending   ChangeState = "pending"   // in force until Until, unless it is confirmed
	Committed ChangeState = "committed" // in force; Back is still possible
	Expired   ChangeState = "expired"   // nobody confirmed it, and all is as before
)

// Change tells how far the last change is, and when (ns) an armed one begins, a
// pending one ends, or an expired one ended.
func (p *progress) Change() (state ChangeState, at uint64) {
	from, until := atomic.LoadUint64(&p.change.From), atomic.LoadUint64(&p.change.Until)
	byTime := phase(atomic.LoadUint64(&p.change.Phase)) == phaseByTime
	switch p.phase() {
	case phaseBefore:
		if byTime {
			return Armed, from
		}
		return NoChange, 0
	case phaseReverted:
		return Expired, until
	}
	if byTime && until != Never {
		return Pending, until
	}
	return Committed, 0
}

// Difference says how many rules a change adds, takes away, and makes others.
type Difference struct{ Added, Removed, Changed int }

// Count counts steps.
func Count(steps []policy.Difference) (d Difference) {
	for _, s := range steps {
		switch {
		case s.Have == nil:
			d.Added++
		case s.Want == nil:
			d.Removed++
		default:
			d.Changed++
		}
	}
	return d
}

// InForce reports whether any rule is in force.
func (s *Set) InForce() bool {
	now := s.phase()
	for _, id := range s.allPrefixes() {
		if present(s.versionIn(id, now)) {
			return true
		}
	}
	return false
}

// Prepare readies the set for steps of valid rules, of which packets see nothing yet.
// progress is told now and then how many are ready. The error wraps ErrFull where there
// is no room; Abandon undoes what was done until then.
func (s *Set) Prepare(steps []policy.Difference, progress func(ready int)) error {
	k := s.gather()
	if phase(s.change.Phase) != phaseBefore { // of other sets, too, the last change is over
		s.Finish()
	}
	// Packets may have seen the phase of the last change, and would now see rules take part in this one.
	s.waitSince(s.change.Removed)
	k.taking = slices.Grow(k.taking, len(steps))
	return s.do(steps, later, progress)
}

// Abandon takes back what Prepare did, also in a process that was killed before Arm.
func (s *Store) Abandon() {
	s.gather()
	s.Finish()
	s.trimLengths(nil)
}

// takesPart marks a rule: from now on packets go by the phase of the change.
func (s *Store) takesPart(it placed) {
	r, k := s.rule(it.id), s.gather()
	step.Store("let a rule take part")
	atomic.StoreUint32(&r.Version, r.Version|versionChanges)
	k.taking = append(k.taking, it)
}

// MaxLead is how long in ns before a change begins or ends Settle may be.
const MaxLead = 1 << model.TickBits

// Settle readies the buckets of rules that are to change for another clock:
// each one is as if charged just now, as only the clock that is in force can
// tell how long it has been idle.
func (s *Store) Settle() {
	now, on := s.now(), s.phase()
	step.Store("settle buckets")
	s.rewriteTaking(func(id uint32, b *bpf.AbiBucket) {
		if v := s.versionIn(id, on); limited(v) {
			rewriteBucket(b, settleBy(meter(v), now))
		}
	})
}

// Time makes the byte clocks of both sides agree at from (ns), when the change
// is to begin, and at until, when it is to end if nobody confirms it.
func (s *Store) Time(from, until uint64) {
	step.Store("set byte clocks")
	s.eachTaking(func(id uint32) {
		old, next := s.sides(id)
		s.carryOn(id, old, next, from)
		rebase(old, next, until)
	})
	store("say when a change begins", &s.change.From, from)
	store("say when a change ends", &s.change.Until, until)
}

// TimeBack makes the byte clocks of both sides agree at a moment (ns) for Back.
func (s *Store) TimeBack(at uint64) {
	step.Store("set byte clocks")
	s.eachTaking(func(id uint32) {
		old, next := s.sides(id)
		rebase(old, next, at)
	})
}

// rebase has the byte clock of old, once reverted, read at a time (ns) what that of next reads.
func rebase(old, next version, at uint64) {
	back := meter(old)
	if limited(old) && limited(next) {
		back.Continue(meter(next), at)
	}
	old.Rebase = back.Base
}

// sides are a rule's versions before the change and after it.
func (rs *rules) sides(id uint32) (before, after version) {
	n := rs.rule(id).Version
	return rs.version(id, n), rs.version(id, n^1)
}

// Begins is when the last change that Time was called for began or is to begin, in ns; 0 after End or Finish.
func (p *progress) Begins() uint64 {
	if from := atomic.LoadUint64(&p.change.From); from != Never {
		return from
	}
	return 0
}

// End says that the change, which is not pending, is not to be taken back any more.
func (p *progress) End() { store("say that a change lasts", &p.change.From, uint64(0)) }

// Arm lets the change begin and end when Time has said.
func (p *progress) Arm() { store("arm a change", &p.change.Phase, phaseByTime) }

// Confirm lets a pending change last.
func (p *progress) Confirm() {
	store("confirm a change", &p.change.Until, Never)
	store("commit a change", &p.change.Phase, phaseAfter)
}

// Back lets a change that is in force end at a moment that is still to come (ns).
func (p *progress) Back(at uint64) {
	store("say when a change ends", &p.change.Until, at)
	store("take a change back", &p.change.Phase, phaseByTime)
}

// Commit is for when a change has begun. One that has no end is then in force
// for good; buckets owe no more than their rules can hold now.
func (s *Store) Commit() {
	if atomic.LoadUint64(&s.change.Until) == Never {
		store("commit a change", &s.change.Phase, phaseAfter)
	}
	step.Store("clamp buckets")
	s.rewriteTaking(func(id uint32, b *bpf.AbiBucket) {
		old, next := s.sides(id)
		before, after := meter(old), meter(next)
		if !limited(old) || !limited(next) || !after.Shrinks(before) {
			return
		}
		clamp := clampTo(after, s.now)
		rewriteBucket(b, func(b model.Bucket) (model.Bucket, bool) {
			next, wanted := clamp(b)
			return next, wanted && s.phase() == phaseAfter // it may be over already
		})
	})
}

// Undone is what it does to take the change back that is in force.
func (s *Set) Undone() (d Difference) {
	for _, t := range s.gather().taking {
		if !t.prefix.IsValid() || s.rule(t.id).View != s.number {
			continue
		}
		switch old, next := s.sides(t.id); {
		case !present(old):
			d.Removed++
		case !present(next):
			d.Added++
		default:
			d.Changed++
		}
	}
	return d
}

// Finish ends a change for good: what is in force of it stays, and the other
// parameters are forgotten. It does nothing where there is none; a pending one must be
// confirmed or taken back before, and what a killed process has prepared be abandoned.
func (s *Store) Finish() {
	c := s.change
	if phase(c.Phase) == phaseBefore && (s.known == nil || len(s.known.taking) == 0) {
		return
	}
	k := s.gather()
	on := s.phase()
	if on == phaseReverted {
		s.rewriteTaking(func(id uint32, b *bpf.AbiBucket) {
			if old, next := s.sides(id); limited(old) {
				rewriteBucket(b, revertBy(old, next, c.Until))
			}
		})
	}
	taking := k.taking
	k.taking = nil
	for _, t := range taking {
		r := s.rule(t.id)
		v := s.versionIn(t.id, on)
		if on == phaseReverted {
			v.Base = v.Rebase
			if v.Flags&ruleSparse != 0 {
				keepOrderUntil(r, c.Until+uint64(policy.MaxWait)) // as packets did by themselves
			}
		}
		step.Store("finish a rule")
		atomic.StoreUint32(&r.Version, nextVersion(r, uint32(on)&1))
		if !t.prefix.IsValid() {
			continue
		}
		s.freeUnusedShadow(t.id)
		if !present(v) {
			s.View(r.View).remove(t.prefix, t.id)
		}
	}
	s.trimLengths(nil)
	// Packets that have seen a rule take part must still find the phase that it is in.
	s.waitSince(c.Epoch)
	c.Removed = c.Epoch // until now, packets have seen another view
	store("forget a change", &c.Phase, phaseBefore)
	store("let no change begin", &c.From, Never) // a wait before the next one
}

// finishUnlessPending is Finish for whoever changes rules that take no part in a pending change.
func (s *Store) finishUnlessPending() {
	if state, _ := s.Change(); state != Pending {
		s.Finish()
	}
}

// TakesPart reports whether any rule of the set takes part in a change.
func (s *Set) TakesPart() bool {
	takesPart := func(at placed) bool { return s.rule(at.id).Version&versionChanges != 0 }
	return slices.ContainsFunc(byID(s.allPrefixes()), takesPart)
}

// freeUnusedShadow frees the shadow that a rule has only by its parameters that are not in force.
func (s *Store) freeUnusedShadow(id uint32) {
	v, other := s.sides(id)
	if other.Flags&ruleShadow != 0 && !(present(v) && v.Flags&ruleShadow != 0 && v.Shadow == other.Shadow) {
		s.free(other.Shadow)
	}
}

// revertBy does for a bucket of a rule that a change has reverted at until what
// revert_bucket of bpf/bucket.h does for one that is charged, unless that was first.
func revertBy(old, next version, until uint64) func(model.Bucket) (model.Bucket, bool) {
	old.reverted = true
	m := meter(old)
	then := m
	if limited(next) {
		then = meter(next)
	}
	return func(b model.Bucket) (model.Bucket, bool) {
		if int32(b.Tick-model.Tick(until)) > 0 {
			return b, false
		}
		level := then.Level(b, until)
		if m.Shrinks(then) {
			level = min(level, m.Most())
		}
		back := m.WithLevel(level, until)
		back.Tick++
		return back, true
	}
}

// levelOf is what a bucket owes of a rule in the version that is in force.
func (rs *rules) levelOf(id uint32, v version, b model.Bucket, now uint64) uint64 {
	if v.reverted {
		old, next := rs.sides(id)
		b, _ = revertBy(old, next, rs.change.Until)(b)
	}
	return meter(v).Level(b, now)
}

// rewriteTaking changes the buckets of the rules that take part, each one on its
// own: to remember what to do for a million rules takes too long before a change.
func (s *Store) rewriteTaking(rewrite func(id uint32, b *bpf.AbiBucket)) {
	var shared atomic.Bool
	s.eachTaking(func(id uint32) {
		r := s.rule(id)
		rewrite(id, &r.Shared)
		if r.HasSlots != 0 {
			shared.Store(true)
		}
	})
	if !shared.Load() {
		return
	}
	rules := s.room()
	s.eachSlot(func(id uint32, slot *bpf.AbiBucket) {
		if id >= rules {
			return
		}
		if r := s.rule(id); r.HasSlots != 0 && atomic.LoadUint32(&r.Version)&versionChanges != 0 {
			rewrite(id, slot)
		}
	})
}

// eachTaking does something for each rule and shadow that takes part, on all CPUs. New
// ones are left out: their buckets are empty, and nothing was before that they go on from.
func (s *Store) eachTaking(f func(id uint32)) {
	taking := s.gather().taking
	inParts(len(taking), func(from, to int) {
		for _, t := range taking[from:to] {
			if !t.isNew {
				f(t.id)
			}
		}
	})
}

// inParts does something for parts of many things at once, on all CPUs: what is
// readied for a moment has to be ready soon.
func inParts(things int, f func(from, to int)) {
	const least = 1 << 14
	parts := min(runtime.GOMAXPROCS(0), things/least+1)
	if parts == 1 {
		f(0, things)
		return
	}
	var all sync.WaitGroup
	for i := range parts {
		all.Go(func() { f(things*i/parts, things*(i+1)/parts) })
	}
	all.Wait()
}
