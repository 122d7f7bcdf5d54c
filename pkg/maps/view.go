package maps

import (
	"iter"
	"math/rand/v2"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Set is the rules of one hook: a view of the store.
type Set struct {
	*Store
	number uint32
}

// View is the set with that number, which is below Size.Views.
func (s *Store) View(number uint32) *Set { return &Set{s, number} }

// Sets are those that are in use, by number.
func (s *Store) Sets() iter.Seq[*Set] {
	return func(yield func(*Set) bool) {
		for number := range s.views {
			if set := s.View(uint32(number)); set.Ifindex() != 0 && !yield(set) {
				return
			}
		}
	}
}

// Claim takes a set that is not in use for a direction of a device; nil where all are.
func (s *Store) Claim(ifindex int, device string, d policy.Direction, match policy.Match) *Set {
	for number := range s.views {
		set := s.View(uint32(number))
		if set.Ifindex() != 0 {
			continue
		}
		v := set.view()
		s.waitSince(v.Retired) // packets of the hook that had it before
		v.Ingress, v.MatchSrc, v.Attached, v.Ifb = 0, 0, 0, 0
		if d == policy.Ingress {
			v.Ingress = 1
		}
		set.SetSide(match)
		step.Store("claim a view")
		set.SetDevice(ifindex, device)
		return set
	}
	return nil
}

// Release gives up a set without rules, whose hook is attached no more.
func (s *Set) Release() {
	s.view().Retired = s.change.Epoch
	step.Store("release a view")
	atomic.StoreUint32(&s.view().Ifindex, 0)
}

// Number tells programs which set is a packet's.
func (s *Set) Number() uint32 { return s.number }

// Ifindex is the index of the device, 0 where the set is not in use.
func (s *Set) Ifindex() int { return int(atomic.LoadUint32(&s.view().Ifindex)) }

// Device is the name of the device when SetDevice was called.
func (s *Set) Device() string { return unix.ByteSliceToString(s.view().Device[:]) }

// SetDevice says of which device the rules are.
func (s *Set) SetDevice(ifindex int, name string) {
	v := s.view()
	v.Device = [len(v.Device)]uint8{}
	copy(v.Device[:], name)
	atomic.StoreUint32(&v.Ifindex, uint32(ifindex))
}

// Direction is that of the hook.
func (s *Set) Direction() policy.Direction {
	if s.view().Ingress != 0 {
		return policy.Ingress
	}
	return policy.Egress
}

// Attached reports whether the hook was ever attached.
func (s *Set) Attached() bool { return s.view().Attached != 0 }

// SetAttached says that it is.
func (s *Set) SetAttached() {
	step.Store("say that a hook is attached")
	s.view().Attached = 1
}

// Side is the side of packets that prefixes are compared with.
func (s *Set) Side() policy.Match { return policy.Match(s.view().MatchSrc) }

// SetSide is for a set without rules, or with one that is about to be replaced.
func (s *Set) SetSide(match policy.Match) { s.view().MatchSrc = uint8(match) }

// Ifb is the index of the ifb device that delayed packets are sent to, 0 for none.
func (s *Set) Ifb() int { return int(atomic.LoadUint32(&s.view().Ifb)) }

// SetIfb has delayed packets sent to an ifb device, 0 for none.
func (s *Set) SetIfb(index int) {
	step.Store("send to an ifb")
	atomic.StoreUint32(&s.view().Ifb, uint32(index))
}

// view is what the programs see of a set.
func (s *Set) view() *bpf.AbiView { return &s.views[s.number] }

// prepareView makes a view that was never used one without rules.
func (s *Set) prepareView() {
	v := s.view()
	v.Mix4, v.Mix6 = uint64(s.number)<<40, [2]uint64{rand.Uint64(), rand.Uint64()}
	v.Use[0].List4[0], v.Use[0].List6[0] = noLength, noLength
	s.setFirst()
}
