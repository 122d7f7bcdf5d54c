package policyfile

import (
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/pkg/policy"
)

// around returns the defaults for the rules of a device or direction: the wider ones, and over them its own, its pool and
// its label.
func (r *reader) around(s *section, given map[string]*entry, direction string, wider parcel) parcel {
	defaults := r.defaults(wider, given)
	if e := given["pool"]; e != nil {
		if own := given["defaults"]; own != nil {
			for _, part := range own.value.entries {
				if part.key.text == "within" {
					r.errorf(&part.key, "within names the pool of all rules here, and so does pool in %s; remove one of them", r.where(e.key.start))
				}
			}
		}
		within := parcel{bad: true}
		if p := r.ownPool(s, e, direction, defaults); p != nil {
			within = parcel{}
			within.Within = policy.Within(p.rule.Label.Name)
			within.mark(policy.FindOption("within"), p.at)
		}
		defaults = within.over(defaults)
	}
	return r.label(defaults, given)
}

// ownPool reads the pool of a device or direction; nil if it is not valid. In the section of a pattern, it is named after
// the pattern until the device is known.
func (r *reader) ownPool(s *section, e *entry, direction string, defaults parcel) *pool {
	owner, above := policy.Owner{Device: s.device(), Whole: direction == ""}, policy.Within("")
	_ = owner.Direction.Set(direction) // a whole device has none
	if !owner.Whole && len(s.own) > 0 && s.own[0].rule.Label.Owner.Whole {
		above = policy.Within(s.own[0].rule.Label.Name)
	}
	name := owner.String()
	if r.pools[name] != nil {
		r.errorf(&e.key, "pool %q of the device is also among the pools; rename that one", name)
		return nil
	}
	p := r.pool(e, name, above, defaults, nil)
	if p == nil {
		return nil
	}
	if p.rule.Label.Owner != (policy.Owner{}) {
		r.errorf(&e.key, "owner has no use in the pool of a device, which is its owner; leave it out")
	}
	p.rule.Label.Owner = owner
	s.own = append(s.own, p)
	return p
}

// allPools are the pools of the section, and those of its hosts.
func (s *section) allPools() []*pool {
	pools := slices.Clone(s.own)
	for i := range s.tables {
		for _, h := range s.tables[i].hosts {
			if h.pool != nil {
				pools = append(pools, h.pool)
			}
		}
	}
	return pools
}

// owns reports whether a pool is of the section, which may be nil.
func (s *section) owns(name string) bool {
	return s != nil && slices.ContainsFunc(s.own, func(p *pool) bool { return p.rule.Label.Name == name })
}

// poolOn returns the name that a pool has on a device of the section: own pools are named after the device.
func (s *section) poolOn(name policy.Within, device string) policy.Within {
	for _, p := range s.own {
		if string(name) == p.rule.Label.Name {
			return policy.Within(p.on(device))
		}
	}
	return name
}

// on returns the name that a pool which a section defines has on a device.
func (p *pool) on(device string) string {
	owner := p.rule.Label.Owner
	owner.Device = device
	return owner.String()
}

// OwnPools returns the pools that the file defines for one device, which have its name: that of the device, and those of
// its directions and hosts. The error is for a device that several patterns match, or a name that a pool cannot have.
func (f *File) OwnPools(d Device) (pools []policy.Rule, err error) {
	s, err := f.section(d.Name)
	if s == nil || err != nil {
		return nil, err
	}
	for _, p := range s.allPools() {
		pool := p.rule
		name := p.on(d.Name)
		if err := policy.CheckPoolName(name); err != nil {
			return nil, f.errorAt(p.at, err.Error())
		}
		if other := f.pools[name]; other != nil {
			return nil, f.errorAt(p.at, fmt.Sprintf("pool %q of the device is also in %s; rename that one", name, f.where(other.at)))
		}
		pool.Label.Name, pool.Prefix, pool.Within = name, policy.PoolKey(name), s.poolOn(p.rule.Within, d.Name)
		pool.Label.Owner.Device = d.Name
		pools = append(pools, pool)
	}
	return pools, nil
}
