// Package params turns limits into the parameters that packets read, and back, and parameters into meters.
package params

import (
	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Version is one of the two sets of parameters of a rule.
type Version struct {
	*bpf.AbiParams
	*bpf.AbiColdParams
	Clock    *bpf.AbiClock
	Next     *uint32 // beside the clock: see Meter.Next
	Index    uint32  // 0 or 1
	Reverted bool    // a change has reverted: the clock is another one
}

// Scope tells bucket scopes apart.
func (v Version) Scope() uint32 { return v.Flags&NAT | v.Flags&Each<<8 | uint32(v.EachBits) }

// Limited reports whether the version limits packets.
func (v Version) Limited() bool { return v.Flags&(Unlimited|Absent) == 0 }

// Present is false if the limit does not exist by this version.
func (v Version) Present() bool { return v.Flags&Absent == 0 }

// Meter is the meter of a version that has no lease.
func (v Version) Meter() model.Meter {
	m := model.Meter{RateUnits: v.RateUnits, Base: v.Clock.Base, Capacity: v.Limit, Burst: v.Burst, Penalty: v.Penalty, Idle: v.Idle}
	m.Queues = v.Flags&Delay != 0
	m.Shared = v.Flags&(Pool|Shares) != 0
	m.Edited = v.Reverted || v.Flags&Edited != 0
	m.Floor, m.Until, m.Fresh, m.Next = v.Clock.Floor, v.Clock.Until, v.Clock.Fresh, *v.Next
	return m
}

// Succeed has parameters whose clock no packet uses go on from a meter at a time (ns), and returns their meter.
func (v Version) Succeed(before model.Meter, at uint64) model.Meter {
	m := v.Meter()
	m.Succeed(before, at)
	*v.Clock, *v.Next = bpf.AbiClock{Base: m.Base, Floor: m.Floor, Until: m.Until, Fresh: m.Fresh}, m.Next
	if !v.Reverted {
		v.Flags |= Edited
	}
	return m
}

// Texts are what a rule has in labels.
type Texts struct {
	policy.Label
	policy.Cluster
	policy.Adapt
	policy.Also
}

// TextsOf are the texts of a rule. Other limits that it has need none.
func TextsOf(r policy.Rule) Texts {
	if r.Unit != policy.Bytes {
		return Texts{}
	}
	return Texts{r.Label, r.Cluster, r.Adapt, r.Also}
}

// HasTexts reports whether a rule has any.
func HasTexts(r policy.Rule) bool { return TextsOf(r) != Texts{} }
