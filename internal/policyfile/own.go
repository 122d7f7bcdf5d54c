package policyfile

import (
	"cmp"
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
	return parcel{parts: []part{{key: "within", text: name, at: p.key}}}.within(defaults)
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
			return nil, f.errorAt(p.key, err.Error())
		}
		if other := f.pools[name]; other != nil {
			return nil, f.errorAt(p.key, fmt.Sprintf("pool %q of the device is also in line %d; rename that one", name, f.line(other.key)))
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

// A user is what is within a pool: a pool, or a direction of a device.
type user struct {
	pool, device string
	direction    policy.Direction
}

func usersOf(pools []policy.Rule, live map[string][]policy.Table) map[policy.Within]map[user]bool {
	users := map[policy.Within]map[user]bool{}
	add := func(r *policy.Rule, by user) {
		if r.Within == "" {
			return
		}
		if users[r.Within] == nil {
			users[r.Within] = map[user]bool{}
		}
		users[r.Within][by] = true
	}
	for i := range pools {
		add(&pools[i], user{pool: pools[i].Label.Name})
	}
	for _, tables := range live {
		for _, t := range tables {
			for i := range t.Rules {
				add(&t.Rules[i], user{device: t.Device, direction: t.Direction})
			}
		}
	}
	return users
}

// lent reports whether anything but its own rules and pools is within a pool of a device.
func (m *merger) lent(own []policy.Rule, device string) bool {
	for _, p := range own {
		for by := range m.users[policy.Within(p.Label.Name)] {
			itself := by.device == device && (p.Label.Name == device || p.Label.Name == device+" "+by.direction.String())
			if !itself && !slices.ContainsFunc(own, func(p policy.Rule) bool { return p.Label.Name == by.pool }) {
				return true
			}
		}
	}
	return false
}

// areLive reports whether pools are live as they are.
func (m *merger) areLive(pools []policy.Rule) bool {
	return !slices.ContainsFunc(pools, func(p policy.Rule) bool {
		live := m.livePool(p.Label.Name)
		return live == nil || *live != p
	})
}

func (m *merger) livePool(name string) *policy.Rule {
	i, found := slices.BinarySearchFunc(m.pools, name, func(p policy.Rule, name string) int { return cmp.Compare(p.Label.Name, name) })
	if !found {
		return nil
	}
	return &m.pools[i]
}

// changeOwn changes the pool of a device or direction, if the section defines one.
func (m *merger) changeOwn(c *change, s *section, name string) {
	for _, p := range s.own {
		if p.rule.Label.Name == name {
			live := m.livePool(name)
			m.own[name] = live != nil
			m.changePool(c, p, live)
		}
	}
}

// leaveOwn removes the pools that sections define from those to be written among the pools, and returns them. It also
// removes what patterns have defined for devices that are gone, if nothing is within it.
func (m *merger) leaveOwn(exists map[string]bool) (own []policy.Rule, err error) {
	for name := range m.like.exactly {
		if exists[name] {
			continue
		}
		of, _ := m.like.OwnPools(Device{Name: name})
		if m.lent(of, name) {
			return nil, fmt.Errorf("rules are within a pool that the file defines for device %s, which does not exist; move it to the pools of the file", name)
		}
		for _, p := range of {
			own = append(own, p)
			m.own[p.Label.Name] = false // the live one, if any, is not that of the file
		}
	}
	m.pools = slices.DeleteFunc(m.pools, func(p policy.Rule) bool {
		name := p.Label.Name
		live, defined := m.own[name]
		if live {
			own = append(own, p)
		}
		device := DeviceOfPool(name)
		if defined || exists[device] {
			return defined
		}
		of, _ := m.like.OwnPools(Device{Name: device})
		return !m.lent(of, device) && slices.ContainsFunc(of, func(p policy.Rule) bool { return p.Label.Name == name })
	})
	return own, nil
}
