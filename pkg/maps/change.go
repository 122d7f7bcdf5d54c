package maps

import (
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/grace"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A change of many rules has these steps. A process may be killed in any of them: packets
// then see the rules from before the change, or those from after it.
//
//	Prepare   writes the versions that no packet reads; the rules take part from then on
//	Time      has all clocks go on from each other at the moments when the change begins and reverts
//	Arm       one store before that moment, which lets the change begin then and revert at until
//	Commit    after it has begun, if it is to last
//	ReadyRevert, TimeRevert, Revert   let a change that has begun revert at a moment
//	Finish    forgets the parameters that are not in force; any later change begins with it
//
// Revert is possible until Finish.

// A phase of a change is what packets see of all that takes part in it.
type phase uint64

const (
	phaseBefore   = phase(bpf.AbiPhasePHASE_BEFORE)
	phaseAfter    = phase(bpf.AbiPhasePHASE_AFTER)
	phaseReverted = phase(bpf.AbiPhasePHASE_REVERTED)
	phaseByTime   = phase(bpf.AbiPhasePHASE_BY_TIME)
	phaseRollback = phase(bpf.AbiPhasePHASE_ROLLBACK)
)

const setReverted = uint32(bpf.AbiSetSET_REVERTED)

// Never is the time at which a change ends that is to last.
const Never = uint64(math.MaxUint64)

// progress is the phase of the change of many rules.
type progress struct {
	change  *bpf.AbiChange
	pinned  *ebpf.Map // that holds the change
	now     func() uint64
	virtual bool // see UseClock
	after   bool // see Store.Reverted
}

// phase is the one that packets see now. It reads the clock only where it must, as that takes a while.
func (p *progress) phase() phase {
	if p.after {
		return phaseReverted
	}
	at := phase(atomic.LoadUint64(&p.change.Phase))
	if at < phaseByTime {
		return at
	}
	switch now := p.now(); {
	case now < atomic.LoadUint64(&p.change.From):
		return phaseBefore
	case now < atomic.LoadUint64(&p.change.Until):
		return phaseAfter
	case at == phaseRollback:
		return phaseBefore
	}
	return phaseReverted
}

// UseClock replaces Now as the data path's time in ns, for tests and replay. Nothing is late then.
func (p *progress) UseClock(now func() uint64) { p.now, p.virtual = now, true }

// store writes a word of the change, from which packets and later commands learn its phase.
func store[T ~uint64](what string, word *uint64, value T) {
	step.Store(what)
	atomic.StoreUint64(word, uint64(value))
}

// ChangeState is the state of a change.
type ChangeState string

const (
	NoChange  ChangeState = ""
	Armed     ChangeState = "armed"     // begins within MaxLead
	Pending   ChangeState = "pending"   // in force; reverts unless it is confirmed
	Committed ChangeState = "committed" // in force; Revert is still possible
	Expired   ChangeState = "expired"   // reverted, as nobody confirmed it
)

// Change is the state of the last change, and when (ns) an armed one begins, a pending
// one reverts, or an expired one reverted.
func (p *progress) Change() (state ChangeState, at uint64) {
	from, until := atomic.LoadUint64(&p.change.From), atomic.LoadUint64(&p.change.Until)
	stored := phase(atomic.LoadUint64(&p.change.Phase))
	switch now := p.phase(); {
	case now == phaseBefore && stored == phaseByTime:
		return Armed, from
	case now == phaseReverted, now == phaseBefore && stored == phaseRollback:
		return Expired, until
	case now == phaseBefore:
		return NoChange, 0
	case stored != phaseAfter && until != Never:
		return Pending, until
	}
	return Committed, 0
}

// Difference is how many rules a change adds, removes and alters.
type Difference struct{ Added, Removed, Changed int }

func (d *Difference) count(had, has bool) {
	switch {
	case !had:
		d.Added++
	case !has:
		d.Removed++
	default:
		d.Changed++
	}
}

// Count counts steps.
func Count(steps []policy.Difference) (d Difference) {
	for _, s := range steps {
		d.count(s.Have != nil, s.Want != nil)
	}
	return d
}

// Prepare readies the set for steps of valid rules. Packets see nothing of them yet.
// progress is called now and then with the number of steps that are ready. The error
// wraps ErrFull where there is no room; Abandon then undoes what was done.
func (s *Set) Prepare(steps []policy.Difference, progress func(ready int)) error {
	k := s.Store.gather()
	if phase(s.Store.change.Phase) != phaseBefore { // of other sets, too, the last change is over
		s.Store.Finish()
	}
	// Packets may have seen the phase of the last change, and would now see rules take part in this one.
	grace.Wait(s.Store.change, s.Store.change.Removed)
	k.taking = slices.Grow(k.taking, len(steps))
	return s.do(steps, later, progress)
}

// Abandon undoes what Prepare did, also in a process that was killed before Arm.
func (s *index) Abandon() {
	s.gather()
	s.Finish()
	s.prefixes.Trim(prefixes.AllViews)
}

// takesPart marks a rule: from now on, the phase of the change selects its parameters.
func (s *index) takesPart(it placed) {
	r, k := s.rule(it.ID), s.gather()
	step.Store("let a rule take part")
	before := r.Sets & 1
	atomic.StoreUint32(&r.Sets, before<<phaseBefore|(before^1)<<phaseAfter|(before|setReverted)<<phaseReverted)
	k.taking = append(k.taking, it)
}

// MaxLead is how long in ns before a change begins Time may be called.
const MaxLead = 1 << model.TickBits

// Time has the clocks of all rules that take part go on from each other at from (ns), when the change begins, and at until,
// when it reverts if nobody confirms it.
func (s *index) Time(from, until uint64) {
	step.Store("set byte clocks")
	s.eachTaking(func(id uint32) { s.time(id, from, until) })
	store("say when a change begins", &s.change.From, from)
	store("say when a change reverts", &s.change.Until, until)
}

// TimeRevert has the clocks from before the change go on from those after it at a moment (ns), for Revert. Until that, nobody uses
// them: not even a revert of the change at its end.
func (s *index) TimeRevert(at uint64) {
	step.Store("set byte clocks")
	s.eachTaking(func(id uint32) {
		old, next := s.bothPhases(id)
		s.continueClock(id, next, old, at)
	})
}

// bothPhases are a rule's versions before the change and after it.
func (rs *rules) bothPhases(id uint32) (before, after params.Version) {
	n := rs.rule(id).Sets
	return rs.version(id, n), rs.version(id, n^1)
}

// Begins is when the last change with a Time begins or began, in ns; 0 after End and Finish.
func (p *progress) Begins() uint64 {
	if from := atomic.LoadUint64(&p.change.From); from != Never {
		return from
	}
	return 0
}

// Until is when the last change with a Time reverts or reverted, in ns; Never if it lasts, 0 if there never was one.
func (p *progress) Until() uint64 { return atomic.LoadUint64(&p.change.Until) }

// End rules out a later Revert of a change that is not pending.
func (p *progress) End() { store("say that a change lasts", &p.change.From, uint64(0)) }

// Arm lets the change begin and revert at the moments of Time. The error may wrap ErrLate.
func (p *progress) Arm() error {
	return p.before(p.change.From, "arm a change", p.change.Until, phaseByTime)
}

// Confirm lets a pending change last. The error may wrap ErrLate.
func (p *progress) Confirm() error {
	return p.before(p.change.Until, "confirm a change", Never, phaseAfter)
}

// Revert lets a change that is in force revert at a future moment (ns), and not later than a pending change does. The
// error may wrap ErrLate.
func (p *progress) Revert(at uint64) error {
	return p.before(at, "revert a change", at, phaseRollback)
}

// Reverts reports whether Revert was called for the change. TimeRevert would move clocks that packets are about to use.
func (p *progress) Reverts() bool { return phase(p.change.Phase) == phaseRollback }

// A Stamp is another one after any change of rules, and once a change begins, ends or is confirmed.
type Stamp struct {
	State                ChangeState
	edits, begins, until uint64
}

// Stamp is that of the rules as they are now.
func (p *progress) Stamp() Stamp {
	state, _ := p.Change()
	return Stamp{state, atomic.LoadUint64(&p.change.Edits), p.Begins(), p.Until()}
}

// A Watch tells whether rules are as they were at a Stamp. It keeps nothing else of their store open.
type Watch struct {
	progress
	was    Stamp
	memory []byte
}

// Watch watches the rules from a stamp on.
func (s *Store) Watch(was Stamp) (*Watch, error) {
	memory, err := s.memoryOf(changeMap)
	if err != nil {
		return nil, err
	}
	return &Watch{progress{change: (*bpf.AbiChange)(unsafe.Pointer(&memory[0])), now: s.now}, was, memory}, nil
}

// Same reports whether the rules are as they were. A nil Watch knows nothing.
func (w *Watch) Same() bool { return w != nil && w.Stamp() == w.was }

// Close ends the watch.
func (w *Watch) Close() {
	if w != nil {
		unix.Munmap(w.memory)
	}
}

// edited makes the stamp another one.
func (p *progress) edited() { atomic.AddUint64(&p.change.Edits, 1) }

// Commit follows the beginning of a change. A change without an end is in force for good then.
func (p *progress) Commit() {
	if atomic.LoadUint64(&p.change.Until) == Never {
		store("commit a change", &p.change.Phase, phaseAfter)
	}
}

// Undone is what a revert of the change that is in force does.
func (s *Set) Undone() (d Difference) {
	for _, it := range s.Store.gather().taking {
		if it.Key != (prefixes.Key{}) && it.View == s.number {
			old, next := s.Store.bothPhases(it.ID)
			d.count(next.Present(), old.Present())
		}
	}
	return d
}

// Finish ends a change for good: the parameters in force stay, and the others are
// forgotten. Without a change it does nothing. A pending change must be confirmed or
// reverted first, and a change that a killed process prepared must be abandoned.
func (s *index) Finish() {
	c := s.change
	if phase(c.Phase) == phaseBefore && (s.known == nil || len(s.known.taking) == 0) {
		return
	}
	k := s.gather()
	on := s.phase()
	if on == phaseReverted || phase(c.Phase) == phaseRollback {
		grace.Wait(s.change, c.Epoch) // packets may still use the other parameters, or what keepReverted writes
	}
	taking := k.taking
	k.taking = nil
	for _, t := range taking {
		v := s.versionIn(t.ID, on)
		if on == phaseReverted {
			s.keepReverted(t.ID, v)
		}
		s.switchTo(t.ID, v.Index, "finish a rule")
		switch companion := t.Key == (prefixes.Key{}); {
		case !companion:
			if s.freeUnused(t.ID); !v.Present() {
				s.remove(t.Placed)
			}
		case v.Present():
			s.freeUnused(t.ID)
		default:
			s.free(t.ID)
		}
	}
	s.prefixes.Trim(prefixes.AllViews)
	// Packets that have seen a rule take part must still find the phase that it is in.
	grace.Wait(s.change, c.Epoch)
	c.Removed = c.Epoch // until now, packets have seen another view
	store("forget a change", &c.Phase, phaseBefore)
	store("let no change begin", &c.From, Never) // a wait before the next one
	s.edited()
}

// finishUnlessPending is Finish for changes of rules that take no part in a pending change.
func (s *index) finishUnlessPending() {
	if state, _ := s.Change(); state != Pending {
		s.Finish()
	}
}

// Changes reports whether the rule with this ID takes part in a change.
func (rs *rules) Changes(id uint32) bool {
	n := rs.rule(id).Sets
	return (n>>phaseAfter^n>>phaseBefore)&1 != 0
}

// eachTaking calls f for each rule and shadow that takes part, on all CPUs. New rules are
// left out: their buckets are empty.
func (s *index) eachTaking(f func(id uint32)) {
	taking := s.gather().taking
	inParts(len(taking), func(from, to int) {
		for _, t := range taking[from:to] {
			if !t.isNew {
				f(t.ID)
			}
		}
	})
}

// inParts calls f for parts of many things on all CPUs at once, as the moment of a change is near.
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
