package prefixes

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/grace"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	lengthIPv4 = 129                      // lengths of IPv4 follow those of IPv6
	lengthMark = lengthIPv4 + 33          // of marks and VLANs
	noLength   = 255                      // no prefix has it
	noKey4     = noLength<<32 | 1<<32 - 1 // matches no key; its line stays in the cache, as it is the same for all addresses
)

// Lengths are prefix lengths of both families and those of marks, by LengthOf.
type Lengths [lengthMark + 1]bool

// LengthOf is an index for the length and family of a prefix.
func LengthOf(p netip.Prefix) int {
	switch {
	case p.Addr().Is4():
		return lengthIPv4 + p.Bits()
	case policy.IsMark(p):
		return lengthMark
	}
	return p.Bits()
}

// InUse are the lengths that packets of a view look for.
func (t *Tables) InUse(view uint32) (used Lengths) {
	v := &t.Views[view]
	use := &v.Use[atomic.LoadUint32(&v.Version)&1]
	for _, length := range use.List[lengthIPv4:][:use.Count4] {
		used[lengthIPv4+int(length)] = true
	}
	for _, length := range use.List[:use.Count6] {
		used[length] = true
	}
	used[lengthMark] = use.Marks != 0
	return used
}

// LookFor makes packets of a view look for prefixes of just these lengths.
func (t *Tables) LookFor(view uint32, want Lengths) {
	v := &t.Views[view]
	if want == t.InUse(view) && v.First4&(1<<40-1) == first4(v) { // they differ if a process was killed before setFirst
		return
	}
	step.Store("look for other lengths")
	grace.Wait(t.Change, v.Retired) // packets may still use the version that is to be overwritten
	version := atomic.LoadUint32(&v.Version)&1 ^ 1
	use := &v.Use[version]
	use.Count4, use.Count6, use.Marks = 0, 0, 0
	// Packets look for the first of a list before they read its count.
	use.List[lengthIPv4], use.List[0] = noLength, noLength
	for length, used := range slices.Backward(want[:]) {
		switch {
		case used && length == lengthMark:
			use.Marks = 1
		case used && length >= lengthIPv4:
			use.List[lengthIPv4+int(use.Count4)] = uint8(length - lengthIPv4)
			use.Count4++
		case used:
			use.List[use.Count6] = uint8(length)
			use.Count6++
		}
	}
	v.Retired = t.Change.Epoch
	// While there is no first length, packets use the list.
	atomic.StoreUint64(&v.First4, v.Mix4|noKey4)
	atomic.StoreUint32(&v.First6, noLength)
	atomic.StoreUint32(&v.Version, version)
	setFirst(v)
}

// setFirst copies the longest lengths in use to where packets look first.
func setFirst(v *bpf.AbiView) {
	atomic.StoreUint32(&v.First6, uint32(v.Use[v.Version&1].List[0]))
	atomic.StoreUint64(&v.First4, v.Mix4|first4(v))
}

func first4(v *bpf.AbiView) uint64 {
	if use := &v.Use[v.Version&1]; use.Count4 > 0 {
		return by4(int(use.List[lengthIPv4]))
	}
	return noKey4
}

// Trim stops packets from looking for lengths that no prefix of a view, or of AllViews, has.
func (t *Tables) Trim(only uint32) {
	have, left := make([]Lengths, len(t.Views)), 0
	for view := range uint32(len(have)) {
		if only == AllViews || only == view {
			for _, used := range t.InUse(view) {
				if used {
					left++
				}
			}
		}
	}
	for f := range t.All(nil) {
		if left == 0 {
			break
		}
		if length := f.Key.lengthOf(); (only == AllViews || only == f.View) && !have[f.View][length] {
			have[f.View][length] = true
			left--
		}
	}
	for view, lengths := range have {
		if only == AllViews || only == uint32(view) {
			t.LookFor(uint32(view), lengths)
		}
	}
}

// Init initialises the views that were never used.
func (t *Tables) Init() {
	for i := range t.Views {
		if v := &t.Views[i]; v.Mix6 == [2]uint64{} {
			v.Mix4, v.Mix6 = uint64(i)<<40, [2]uint64{rand.Uint64(), rand.Uint64()}
			v.Use[0].List[lengthIPv4], v.Use[0].List[0] = noLength, noLength
			setFirst(v)
		}
	}
}

// HasMarks reports whether there are rules for marks or VLANs.
func (l Lengths) HasMarks() bool { return l[lengthMark] }

// HasOther reports whether there is another length than that of p in its family.
func (l Lengths) HasOther(p netip.Prefix) bool {
	for length, used := range l[:lengthMark] {
		if used && (length < lengthIPv4) == p.Addr().Is6() && length != LengthOf(p) {
			return true
		}
	}
	return false
}
