package maps

import (
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/grace"
	"github.com/shapectl/shapectl/internal/labels"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Size is how much a store holds.
type Size struct {
	Views    uint32 // of hooks and of the pools; rounded up to a power of two, at least 2
	Rules    uint32 // shadows included
	Buckets  uint32 // of hosts, subnets and flows; rounded up to a power of two
	Affected uint32 // hosts that shadows would have affected
	Labels   uint32 // parts of labels
	Shares   uint32 // rules and pools with fair shares
	Leases   uint32 // pools with a cluster
	Pools    bool   // there may be pools, and rules with shares
	Colours  bool   // there may be rules with colours
	NAT      bool   // there may be rules for hosts behind NAT
	Marks    bool   // and for marks or VLANs
	Also     bool   // rules may have other limits
}

// Needs is what steps add to a store. Of Buckets and Affected it only says whether they need any, as rules share these.
func Needs(steps ...policy.Difference) (n Size) {
	for _, d := range steps {
		if d.Want == nil {
			continue
		}
		have, want := policy.Rule{}, *d.Want
		if d.Have == nil {
			n.Rules++
		} else {
			have = *d.Have
		}
		n.Rules += params.NewCompanions(have, want)
		n.Labels += uint32(len(labels.Parts(want)))
		shares := want.Share.Kind != policy.ShareNone
		if shares && have.Share.Kind == policy.ShareNone {
			n.Shares++
		}
		if want.HasLeases() {
			n.Leases++
		}
		n.Pools, n.Colours = n.Pools || want.Pool || shares, n.Colours || want.Algorithm.HasColours()
		n.Also = n.Also || want.Also != (policy.Also{})
		n.NAT, n.Marks = n.NAT || want.NAT, n.Marks || policy.IsMark(want.Prefix)
		proposed, shadowed := want.Proposed()
		if shadowed {
			n.Affected = 1
		}
		if hasSlots(want) || hasSlots(proposed) {
			n.Buckets = 1
		}
	}
	return n
}

// Lacks is how many rules, parts of labels, shares and leases are missing for what steps need.
func (s *Store) Lacks(n Size) (l Size) {
	room := s.room() - s.change.Ids
	if room < n.Rules {
		room += uint32(len(s.gather().free))
	}
	l.Rules = n.Rules - min(n.Rules, room)
	if n.Labels > 0 {
		all, have := atomic.LoadUint32(s.labels.Parts)+n.Labels, s.labels.Map.MaxEntries()
		l.Labels = all - min(all, have)
	}
	l.Shares, l.Leases = lacks(n.Shares, s.shares, shareOwner), lacks(n.Leases, s.leases, leaseOwner)
	return l
}

// An owner tells to whom a share or a lease belongs: the id plus one, or 0 and the epoch in which it was freed.
type owner struct{ id, retired *uint32 }

func shareOwner(s *bpf.AbiShare) owner { return owner{&s.Owner, &s.Retired} }
func leaseOwner(l *bpf.AbiLease) owner { return owner{&l.Owner, &l.Retired} }

// lacks is how many of n new shares or leases are missing.
func lacks[T any](n uint32, all []T, of func(*T) owner) uint32 {
	for i := 0; n > 0 && i < len(all); i++ {
		if *of(&all[i]).id == 0 {
			n--
		}
	}
	return n
}

// allocate gives a share or a lease to an id, of which packets know nothing yet, and returns its number plus one; 0 if there is
// no room.
func allocate[T any](p *progress, all []T, of func(*T) owner, id uint32) (number uint32) {
	for i := range all {
		if o := of(&all[i]); *o.id == 0 {
			grace.Wait(p.change, *o.retired)
			*o.id = id + 1
			return uint32(i) + 1
		}
	}
	return 0
}

// freeLost frees the shares or leases that a killed command allocated and no rule has.
func freeLost[T any](p *progress, all []T, of func(*T) owner, has func(id, number uint32) bool) {
	for i := range all {
		if o := of(&all[i]); *o.id != 0 && !has(*o.id-1, uint32(i)+1) {
			*o.id, *o.retired = 0, p.change.Epoch
		}
	}
}
