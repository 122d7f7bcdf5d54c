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
	view
}

// A view is of which hook a set's rules are, and which prefixes its packets look for.
type view struct {
	number uint32
	data   *bpf.AbiView
}

// View is the set with that number, which is below Size.Views.
func (s *Store) View(number uint32) *Set { return &Set{s, view{number, &s.views[number]}} }

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
		v := set.data
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
	s.data.Retired = s.change.Epoch
	step.Store("release a view")
	atomic.StoreUint32(&s.data.Ifindex, 0)
}

// Number tells programs which set is a packet's.
func (v *view) Number() uint32 { return v.number }

// Ifindex is the index of the device, 0 where the set is not in use.
func (v *view) Ifindex() int { return int(atomic.LoadUint32(&v.data.Ifindex)) }

// Device is the name of the device when SetDevice was called.
func (v *view) Device() string { return unix.ByteSliceToString(v.data.Device[:]) }

// SetDevice says of which device the rules are.
func (v *view) SetDevice(ifindex int, name string) {
	v.data.Device = [len(v.data.Device)]uint8{}
	copy(v.data.Device[:], name)
	atomic.StoreUint32(&v.data.Ifindex, uint32(ifindex))
}

// Direction is that of the hook.
func (v *view) Direction() policy.Direction {
	if v.data.Ingress != 0 {
		return policy.Ingress
	}
	return policy.Egress
}

// Attached reports whether the hook was ever attached.
func (v *view) Attached() bool { return v.data.Attached != 0 }

// SetAttached says that it is.
func (v *view) SetAttached() {
	step.Store("say that a hook is attached")
	v.data.Attached = 1
}

// Side is the side of packets that prefixes are compared with.
func (v *view) Side() policy.Match { return policy.Match(v.data.MatchSrc) }

// SetSide is for a set without rules, or with one that is about to be replaced.
func (v *view) SetSide(match policy.Match) { v.data.MatchSrc = uint8(match) }

// Ifb is the index of the ifb device that delayed packets are sent to, 0 for none.
func (v *view) Ifb() int { return int(atomic.LoadUint32(&v.data.Ifb)) }

// SetIfb has delayed packets sent to an ifb device, 0 for none.
func (v *view) SetIfb(index int) {
	step.Store("send to an ifb")
	atomic.StoreUint32(&v.data.Ifb, uint32(index))
}

// prepare makes a view that was never used one without rules.
func (v *view) prepare() {
	v.data.Mix4, v.data.Mix6 = uint64(v.number)<<40, [2]uint64{rand.Uint64(), rand.Uint64()}
	v.data.Use[0].List4[0], v.data.Use[0].List6[0] = noLength, noLength
	v.setFirst()
}
