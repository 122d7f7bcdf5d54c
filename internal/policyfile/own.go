package policyfile

import (
	"fmt"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/pkg/policy"
)

// ownPool reads the pool of a device or direction. The rules there draw from it unless they say otherwise, so it returns
// the defaults for them. In the section of a pattern, the pool is named after the pattern until the device is known.
func (r *reader) ownPool(s *section, given map[string]*entry, direction string, defaults parcel) parcel {
	e := given["pool"]
	if e == nil {
		return defaults
	}
	if own := given["defaults"]; own != nil {
		for _, part := range own.value.entries {
			if part.key.text == "within" {
				r.errorf(&part.key, "within names the pool of all rules here, and so does pool in line %d; remove one of them", r.line(e.key.start))
			}
		}
	}
	name, above := s.poolName(direction), policy.Within("")
	if ofDevice := s.poolName(""); direction != "" && len(s.own) > 0 && s.own[0].rule.Label.Name == ofDevice {
		above = policy.Within(ofDevice)
	}
	if other := r.pools[name]; other != nil {
		r.errorf(&e.key, "pool %q of the device is also among the pools; rename that one", name)
		return parcel{bad: true}.within(defaults)
	}
	p := r.pool(e, name, above, defaults)
	if p == nil {
		return parcel{bad: true}.within(defaults)
	}
	s.own = append(s.own, p)
	return parcel{parts: []part{{key: "within", text: name, at: p.at}}}.within(defaults)
}

// owns reports whether a pool is of the section, which may be nil.
func (s *section) owns(name string) bool {
	return s != nil && slices.ContainsFunc(s.own, func(p *pool) bool { return p.rule.Label.Name == name })
}

// poolOn returns the name that a pool has on a device of the section: own pools are named after the device.
func (s *section) poolOn(name policy.Within, device string) policy.Within {
	for _, p := range s.own {
		if string(name) == p.rule.Label.Name {
			return policy.Within(s.onDevice(string(name), device))
		}
	}
	return name
}

// onDevice returns the name that a pool which the section defines has on a device.
func (s *section) onDevice(pool, device string) string {
	if !s.pattern {
		return pool
	}
	return device + strings.TrimPrefix(pool, s.key)
}

// DeviceOfPool returns the device that a pool belongs to, if it belongs to any: its name begins with that of the device.
func DeviceOfPool(name string) string {
	device, _, _ := strings.Cut(name, " ")
	return device
}

// SideOfHost returns the device and direction whose host has the limit that is in a pool; false for other pools.
func SideOfHost(p *policy.Rule) (device string, d policy.Direction, ok bool) {
	_, _, ok = p.Follows()
	words := strings.SplitN(p.Label.Name, " ", 3)
	return words[0], d, ok && len(words) == 3 && d.Set(words[1]) == nil
}

// NameOfHost returns the name of the host that has a pool, which SideOfHost must be true for.
func NameOfHost(p *policy.Rule) string { return strings.SplitN(p.Label.Name, " ", 3)[2] }

// OwnPools returns the pools that the file defines for one device, which have its name: that of the device, and those of
// its directions and hosts. The error is for a device that several patterns match, or a name that a pool cannot have.
func (f *File) OwnPools(d Device) (pools []policy.Rule, err error) {
	s, err := f.section(d.Name)
	if s == nil || err != nil {
		return nil, err
	}
	return f.poolsOn(s, d, append(slices.Clone(s.own), s.hostPools()...))
}

// poolsOn returns pools that the section defines as they are on a device.
func (f *File) poolsOn(s *section, d Device, own []*pool) (pools []policy.Rule, err error) {
	for _, p := range own {
		pool := p.rule
		name := s.onDevice(p.rule.Label.Name, d.Name)
		if err := policy.CheckPoolName(name); err != nil {
			return nil, f.errorAt(p.at, err.Error())
		}
		if other := f.pools[name]; other != nil {
			return nil, f.errorAt(p.at, fmt.Sprintf("pool %q of the device is also in line %d; rename that one", name, f.line(other.at)))
		}
		pool.Label.Name, pool.Prefix, pool.Within = name, policy.PoolKey(name), s.poolOn(p.rule.Within, d.Name)
		pools = append(pools, pool)
	}
	return pools, nil
}

// named returns the pool of the file with a name, or the one of a device that has it; nil for none.
func (f *File) named(pool string) *pool {
	if p := f.pools[pool]; p != nil {
		return p
	}
	device := DeviceOfPool(pool)
	if s, _ := f.section(device); s != nil {
		for _, p := range append(slices.Clone(s.own), s.hostPools()...) {
			if s.onDevice(p.rule.Label.Name, device) == pool {
				return p
			}
		}
	}
	return nil
}
