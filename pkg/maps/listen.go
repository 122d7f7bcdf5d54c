package maps

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrListeners means that as many processes listen to events as can.
var ErrListeners = errors.New("too many processes listen to events")

// ErrLost means that a listener did not renew its lease in time, so its slot was freed.
var ErrLost = errors.New("the listener's lease has ended")

// ListenerLease is how long a listener is told of events without Renew. A listener that was killed costs nothing after it.
const ListenerLease = 3 * time.Second

// An Event is the first excess packet of a bucket after a second without one.
type Event = bpf.AbiEvent

// EventKind is what an event means.
type EventKind = uint16

// Kinds of events that packets cause.
const (
	Overflow       = EventKind(bpf.AbiEventKindEVENT_OVERFLOW)  // a bucket begins to have excess packets
	PenaltyStarts  = EventKind(bpf.AbiEventKindEVENT_PENALTY)   // and its rule has a penalty
	GuaranteeFails = EventKind(bpf.AbiEventKindEVENT_GUARANTEE) // a pool refuses a packet within the guarantee of its key
)

// Fate is what happened to a packet.
type Fate = uint16

// Fates of excess packets.
const (
	Dropped = Fate(bpf.AbiFateFATE_DROPPED)
	Marked  = Fate(bpf.AbiFateFATE_MARKED)
	Delayed = Fate(bpf.AbiFateFATE_DELAYED)
	Passed  = Fate(bpf.AbiFateFATE_PASSED)
)

// A Listener has a slot of the data path, which tells it of events. It uses the memory of its store.
type Listener struct {
	memory // its ring and its own state
	store  *Store
	slot   uint32
	lease  uint64 // ns: until when the slot is this listener's
	ring   *ringbuf.Reader
	told   []bpf.AbiListener
}

// listenerMaps are the maps of listeners. The ring comes first, as packets look for the other one first.
var listenerMaps = []string{bpf.ShapectlMapRings, bpf.ShapectlMapListeners}

// Listen lets packets tell of events: of these kinds, and at most so many in a second. The store must be open for writing.
// The error may wrap ErrListeners.
func (s *Store) Listen(most uint32, kinds ...EventKind) (_ *Listener, err error) {
	s.DropListeners()
	l := &Listener{store: s, memory: memory{maps: map[string]*ebpf.Map{}}}
	if !l.claim() {
		return nil, fmt.Errorf("%w: %d do", ErrListeners, len(s.change.Leases))
	}
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	spec, err := bpf.Spec()
	if err != nil {
		return nil, err
	}
	for _, name := range listenerMaps {
		if l.maps[name], err = ebpf.NewMap(spec.Maps[name].InnerMap); err != nil {
			return nil, fmt.Errorf("make a map for events: %w", err)
		}
	}
	if l.ring, err = ringbuf.NewReader(l.maps[bpf.ShapectlMapRings]); err != nil {
		return nil, fmt.Errorf("read events: %w", err)
	}
	if err := mapArray(&l.memory, bpf.ShapectlMapListeners, 1, &l.told); err != nil {
		return nil, err
	}
	l.told[0].Most = most
	for _, kind := range kinds {
		l.told[0].Kinds |= 1 << kind
	}
	for _, name := range listenerMaps {
		if err := step.Try("listen"); err != nil {
			return nil, err
		}
		if err := s.maps[name].Put(l.slot, l.maps[name]); err != nil {
			return nil, fmt.Errorf("listen to events: %w", err)
		}
	}
	return l, l.Renew()
}

// claim takes a free slot.
func (l *Listener) claim() bool {
	s := l.store
	now := s.now()
	for slot := range s.change.Leases {
		word := &s.change.Leases[slot]
		if old := atomic.LoadUint64(word); old <= now && atomic.CompareAndSwapUint64(word, old, now+uint64(ListenerLease)) {
			l.slot, l.lease = uint32(slot), now+uint64(ListenerLease)
			return true
		}
	}
	return false
}

// Renew goes on listening. The error wraps ErrLost if that was not done for longer than ListenerLease.
func (l *Listener) Renew() error {
	s := l.store
	until := s.now() + uint64(ListenerLease)
	if !atomic.CompareAndSwapUint64(&s.change.Leases[l.slot], l.lease, until) {
		return ErrLost
	}
	l.lease = until
	for {
		old := atomic.LoadUint64(&s.change.ListenedUntil)
		if old >= until || atomic.CompareAndSwapUint64(&s.change.ListenedUntil, old, until) {
			return nil
		}
	}
}

// Next waits for the next event, or until the deadline: the error then wraps os.ErrDeadlineExceeded.
// After Close it wraps os.ErrClosed.
func (l *Listener) Next(deadline time.Time) (Event, error) {
	l.ring.SetDeadline(deadline)
	record, err := l.ring.Read()
	if errors.Is(err, ringbuf.ErrClosed) {
		err = fmt.Errorf("%w: %w", os.ErrClosed, err)
	}
	if err != nil {
		return Event{}, err
	}
	if len(record.RawSample) < int(unsafe.Sizeof(bpf.AbiEvent{})) {
		return Event{}, fmt.Errorf("read events: %w", ErrOtherLayout)
	}
	return *(*Event)(unsafe.Pointer(&record.RawSample[0])), nil
}

// Moves goes on with another store of the namespace, and reports whether packets of its hooks find the listener: whether
// it was derived, as then it shares the maps of listeners.
func (l *Listener) Moves(to *Store) bool {
	if l.store.hook.Secret != to.hook.Secret {
		return false
	}
	l.store = to
	return true
}

// LeftOut is how many events this listener was not told of so far.
func (l *Listener) LeftOut() uint64 { return atomic.LoadUint64(&l.told[0].LeftOut) }

// Close stops listening, and frees the slot.
func (l *Listener) Close() error {
	var errs []error
	if l.Renew() == nil { // else the slot is another's
		errs = append(errs, l.store.freeListener(l.slot, l.lease))
	}
	if l.ring != nil {
		errs = append(errs, l.ring.Close())
	}
	return errors.Join(append(errs, l.memory.close())...)
}

// freeListener frees a slot that the caller has claimed until lease.
func (s *Store) freeListener(slot uint32, lease uint64) (err error) {
	for _, name := range listenerMaps {
		if e := s.maps[name].Delete(slot); e != nil && !errors.Is(e, ebpf.ErrKeyNotExist) {
			err = errors.Join(err, fmt.Errorf("stop listening to events: %w", e))
		}
	}
	atomic.CompareAndSwapUint64(&s.change.Leases[slot], lease, 0)
	old, until := atomic.LoadUint64(&s.change.ListenedUntil), uint64(0)
	for i := range s.change.Leases {
		until = max(until, atomic.LoadUint64(&s.change.Leases[i]))
	}
	if until < s.now() {
		until = 0
	}
	atomic.CompareAndSwapUint64(&s.change.ListenedUntil, old, until) // if another has renewed its lease, the word is right
	return err
}

// DropListeners frees the slots of listeners that were killed.
func (s *Store) DropListeners() {
	now := s.now()
	for slot := range s.change.Leases {
		word, claim := &s.change.Leases[slot], now+uint64(ListenerLease)
		if old := atomic.LoadUint64(word); old != 0 && old < now && atomic.CompareAndSwapUint64(word, old, claim) {
			s.freeListener(uint32(slot), claim) // an error leaves it for the next one
		}
	}
}

// Listeners is how many processes listen, and whether excess packets look for listeners.
func (s *Store) Listeners() (n int, heard bool) {
	now := s.now()
	for slot := range s.change.Leases {
		if atomic.LoadUint64(&s.change.Leases[slot]) > now {
			n++
		}
	}
	return n, atomic.LoadUint64(&s.change.ListenedUntil) != 0
}

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

// edited makes the stamp another one.
func (p *progress) edited() { atomic.AddUint64(&p.change.Edits, 1) }

// A Cause is what an event is about, in words of the policy.
type Cause struct {
	Set  *Set       // of the rule
	Rule Entry      // without a prefix if the rule has gone since
	Key  string     // of the bucket, as people read it
	From netip.Addr // of the packet: the address that rules match
	Pool string     // that had too little room; "" if that was the rule
	// Sharer took more than its fair share, of Pool or of the rule; "" if there was too little room. Fair shares refuse
	// what a full pool above does not leave them: then Pool is that one.
	Sharer   string
	Level    uint64 // bytes in the bucket of Pool or the rule
	Capacity uint64 // its bytes
}

// Cause explains an event. ok is false if the store is too old to know its rule.
func (s *Store) Cause(e Event) (c Cause, ok bool) {
	if e.Key.Id >= s.room() || e.Limit >= s.room() || s.rule(e.Key.Id).View >= uint32(len(s.prefixes.Views)) {
		return c, false
	}
	now := s.phase()
	c.Level, c.Capacity = e.Level, e.Capacity
	c.Set = s.View(s.rule(e.Key.Id).View)
	v := s.versionIn(e.Key.Id, now)
	if e.Limit != e.Key.Id {
		c.Pool = s.poolName(e.Limit, now)
	}
	flow := flowOf(e.Key)
	if v.Flags&params.Flow == 0 {
		flow = Flow{Src: flow.Src, Dst: flow.Src} // the far address, whichever side that is
	}
	far := flow.Far(c.Set.Side())
	c.Rule = s.entry(e.Key.Id, netip.Prefix{}, v, now)
	for bits := far.BitLen(); bits >= 0; bits-- {
		p, _ := far.Prefix(bits)
		if id, found := s.prefixes.Find(c.Set.number, p); found && id == e.Key.Id {
			c.Rule.Prefix = p
			break
		}
	}
	if c.From = far; c.Rule.Prefix.IsValid() || c.Rule.Each.Kind != policy.EachAll {
		c.Key = KeyName(c.Rule, c.Set.Side(), flow)
	}
	if e.Kind == Overflow && e.Fate == Dropped && e.Level+uint64(bpf.AbiLayoutSHARED_BYTES) <= e.Capacity {
		s.findSharer(&c, e, flow)
	}
	return c, true
}

// findSharer completes the cause of an event of a bucket that had room: its fair shares refused the packet.
func (s *Store) findSharer(c *Cause, e Event, flow Flow) {
	entries, stages := s.Stages(c.Rule, c.Set.Side(), flow, s.now())
	at := slices.IndexFunc(entries, func(l Entry) bool { return l.ID == e.Limit })
	if at < 0 || entries[at].Share.Kind == policy.ShareNone {
		return
	}
	// The clock of fair shares also goes by the next ones above, if those are of members: see look_above in bpf/fair.h.
	for i := at + 1; i < len(entries); i++ {
		pool := entries[i].Rule
		if pool.Share.Kind == policy.ShareNone && pool.Guarantee == 0 {
			continue
		}
		if pool.Share.Kind != policy.ShareMember {
			break
		}
		if level := model.Bytes(stages[i].State.Level); model.AtRate(level, pool.Capacity, true) {
			at, c.Pool, c.Level, c.Capacity = i, pool.Label.Name, level, pool.Capacity
			break
		}
	}
	c.Sharer = SharerName(entries[at], entries[max(at-1, 0)], c.Set.Side(), flow)
	if share := entries[at].Share.Kind; share == policy.ShareFlow && c.Rule.Each.Kind != policy.EachFlow {
		c.Sharer = "a flow of " + c.From.String() // the event does not have which
	}
}
