package maps

import (
	"iter"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/grace"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Set is the rules of one hook: a view of the store.
type Set struct {
	Store *Store
	view
}

// A view is the hook of a set, and the prefix lengths that its packets look for.
type view struct {
	number uint32
	data   *bpf.AbiView
}

// View is the set with that number, which is below Size.Views.
func (s *Store) View(number uint32) *Set { return &Set{s, view{number, &s.prefixes.Views[number]}} }

// Sets are the sets in use, by number.
func (s *Store) Sets() iter.Seq[*Set] {
	return func(yield func(*Set) bool) {
		for number := range s.prefixes.Views {
			if set := s.View(uint32(number)); set.Ifindex() != 0 && !yield(set) {
				return
			}
		}
	}
}

// Claim allocates a set for a direction of a device; nil if all are in use.
func (s *Store) Claim(ifindex int, device string, d policy.Direction, match policy.Match) *Set {
	for number := range s.prefixes.Views {
		set := s.View(uint32(number))
		if set.Ifindex() != 0 || set.IsPools() {
			continue
		}
		v := set.data
		grace.Wait(s.change, v.Retired) // for packets of the hook that had it before
		v.Ingress, v.MatchSrc, v.Attached, v.Ifb, v.OtherFrames, v.OtherBytes = 0, 0, 0, 0, 0, 0
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

// Release frees a set without rules. Its hook must be detached.
func (s *Set) Release() {
	s.data.Retired = s.Store.change.Epoch
	step.Store("release a view")
	atomic.StoreUint32(&s.data.Ifindex, 0)
}

// Number is the number by which programs know the set.
func (v view) Number() uint32 { return v.number }

// Ifindex is the index of the device, 0 where the set is not in use.
func (v view) Ifindex() int { return int(atomic.LoadUint32(&v.data.Ifindex)) }

// Device is the name of the device when SetDevice was called.
func (v view) Device() string { return unix.ByteSliceToString(v.data.Device[:]) }

// SetDevice stores the device of the rules.
func (v view) SetDevice(ifindex int, name string) {
	v.data.Device = [len(v.data.Device)]uint8{}
	copy(v.data.Device[:], name)
	atomic.StoreUint32(&v.data.Ifindex, uint32(ifindex))
}

// Direction is that of the hook.
func (v view) Direction() policy.Direction {
	if v.data.Ingress != 0 {
		return policy.Ingress
	}
	return policy.Egress
}

// Attached reports whether the hook was ever attached. If not, a command was killed before that.
func (v view) Attached() bool { return v.data.Attached != 0 }

// SetAttached marks the hook as attached.
func (v view) SetAttached() {
	step.Store("say that a hook is attached")
	v.data.Attached = 1
}

// Side is the address of packets that prefixes are compared with.
func (v view) Side() policy.Match { return policy.Match(v.data.MatchSrc) }

// SetSide sets Side. The set must have no rule, or only one that is about to be replaced.
func (v view) SetSide(match policy.Match) { v.data.MatchSrc = uint8(match) }

// Ifb is the index of the ifb device that delayed packets are sent to, 0 for none.
func (v view) Ifb() int { return int(atomic.LoadUint32(&v.data.Ifb)) }

// SetIfb sends delayed packets to an ifb device; 0 is none.
func (v view) SetIfb(index int) {
	step.Store("send to an ifb")
	atomic.StoreUint32(&v.data.Ifb, uint32(index))
}

// Others are the frames and bytes that passed the hook and that no rule limits, because they are neither IP nor ARP.
func (v view) Others() (frames, bytes uint64) {
	return atomic.LoadUint64(&v.data.OtherFrames), atomic.LoadUint64(&v.data.OtherBytes)
}
