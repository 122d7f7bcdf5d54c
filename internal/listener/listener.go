// Package listener has packets tell processes of events. Each process that listens has one of a few slots, a lease on it, and a
// ring buffer.
package listener

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/step"
)

// ErrFull means that as many processes listen to events as can.
var ErrFull = errors.New("too many processes listen to events")

// ErrLost means that a listener did not renew its lease in time, so its slot was freed.
var ErrLost = errors.New("the listener's lease has ended")

// Lease is how long a listener is told of events without Renew. A listener that was killed costs nothing after it.
const Lease = 3 * time.Second

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

// Slots are those of a network namespace.
type Slots struct {
	Change           *bpf.AbiChange
	Rings, Listeners *ebpf.Map // by slot
	Secret           [bpf.AbiLayoutSECRET_WORDS]uint32
	Now              func() uint64 // the data path's time in ns
}

// A Listener has a slot, so packets tell it of events.
type Listener struct {
	slots Slots
	slot  uint32
	lease uint64    // ns: until when the slot is this listener's
	told  *ebpf.Map // what it wants, and what it was told
	rings *ebpf.Map
	ring  *ringbuf.Reader
}

// Listen lets packets tell of events: of these kinds, and at most so many in a second. The maps must be open for writing.
// The error may wrap ErrFull.
func (s Slots) Listen(most uint32, kinds ...EventKind) (_ *Listener, err error) {
	s.Drop()
	l := &Listener{slots: s}
	if !l.claim() {
		return nil, fmt.Errorf("%w: %d do", ErrFull, len(s.Change.Leases))
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
	wants := bpf.AbiListener{Most: most}
	for _, kind := range kinds {
		wants.Kinds |= 1 << kind
	}
	if l.rings, err = ebpf.NewMap(spec.Maps[bpf.ShapectlMapRings].InnerMap); err == nil {
		l.told, err = ebpf.NewMap(spec.Maps[bpf.ShapectlMapListeners].InnerMap)
	}
	if err == nil {
		err = l.told.Put(uint32(0), wants)
	}
	if err != nil {
		return nil, fmt.Errorf("make a map for events: %w", err)
	}
	if l.ring, err = ringbuf.NewReader(l.rings); err != nil {
		return nil, fmt.Errorf("read events: %w", err)
	}
	// The ring comes first, as packets look for the other one first.
	for _, into := range []struct{ all, own *ebpf.Map }{{s.Rings, l.rings}, {s.Listeners, l.told}} {
		if err := step.Try("listen"); err != nil {
			return nil, err
		}
		if err := into.all.Put(l.slot, into.own); err != nil {
			return nil, fmt.Errorf("listen to events: %w", err)
		}
	}
	return l, l.Renew()
}

// claim takes a free slot.
func (l *Listener) claim() bool {
	s := l.slots
	now := s.Now()
	for slot := range s.Change.Leases {
		word := &s.Change.Leases[slot]
		if old := atomic.LoadUint64(word); old <= now && atomic.CompareAndSwapUint64(word, old, now+uint64(Lease)) {
			l.slot, l.lease = uint32(slot), now+uint64(Lease)
			return true
		}
	}
	return false
}

// Renew goes on listening. The error wraps ErrLost if that was not done for longer than Lease.
func (l *Listener) Renew() error {
	s := l.slots
	until := s.Now() + uint64(Lease)
	if !atomic.CompareAndSwapUint64(&s.Change.Leases[l.slot], l.lease, until) {
		return ErrLost
	}
	l.lease = until
	for {
		old := atomic.LoadUint64(&s.Change.ListenedUntil)
		if old >= until || atomic.CompareAndSwapUint64(&s.Change.ListenedUntil, old, until) {
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
		return Event{}, fmt.Errorf("read events: one of %d bytes", len(record.RawSample))
	}
	return *(*Event)(unsafe.Pointer(&record.RawSample[0])), nil
}

// Moves goes on with the slots of another store of the namespace, and reports whether packets of its hooks find the listener:
// whether that was derived, as then it shares the maps of listeners, and the secret.
func (l *Listener) Moves(to Slots) bool {
	if l.slots.Secret != to.Secret {
		return false
	}
	l.slots = to
	return true
}

// LeftOut is how many events this listener was not told of so far.
func (l *Listener) LeftOut() uint64 {
	var told bpf.AbiListener
	_ = l.told.Lookup(uint32(0), &told) // an array of one element has that
	return told.LeftOut
}

// Close stops listening, and frees the slot.
func (l *Listener) Close() error {
	var errs []error
	if l.Renew() == nil { // else the slot is another's
		errs = append(errs, l.slots.free(l.slot, l.lease))
	}
	if l.ring != nil {
		errs = append(errs, l.ring.Close())
	}
	return errors.Join(append(errs, l.rings.Close(), l.told.Close())...)
}

// free frees a slot that the caller has claimed until lease.
func (s Slots) free(slot uint32, lease uint64) (err error) {
	for _, m := range []*ebpf.Map{s.Rings, s.Listeners} {
		if e := m.Delete(slot); e != nil && !errors.Is(e, ebpf.ErrKeyNotExist) {
			err = errors.Join(err, fmt.Errorf("stop listening to events: %w", e))
		}
	}
	atomic.CompareAndSwapUint64(&s.Change.Leases[slot], lease, 0)
	old, until := atomic.LoadUint64(&s.Change.ListenedUntil), uint64(0)
	for i := range s.Change.Leases {
		until = max(until, atomic.LoadUint64(&s.Change.Leases[i]))
	}
	if until < s.Now() {
		until = 0
	}
	atomic.CompareAndSwapUint64(&s.Change.ListenedUntil, old, until) // if another has renewed its lease, the word is right
	return err
}

// Drop frees the slots of listeners that were killed.
func (s Slots) Drop() {
	now := s.Now()
	for slot := range s.Change.Leases {
		word, claim := &s.Change.Leases[slot], now+uint64(Lease)
		if old := atomic.LoadUint64(word); old != 0 && old < now && atomic.CompareAndSwapUint64(word, old, claim) {
			s.free(uint32(slot), claim) // an error leaves it for the next one
		}
	}
}
