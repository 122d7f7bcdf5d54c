package policyfile

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/pkg/policy"
)

// MaxAddresses is how many addresses of a host have rules in one direction: as many as the kernel's tables of neighbours
// of both families have by default.
const MaxAddresses = 2048

// A host is an entry of a direction by a MAC address: a limit for all addresses that neighbours with it have.
type host struct {
	at   uint32 // the offset of its key
	mac  policy.MAC
	pool *pool       // has the limit; nil if there is none. It is named as the own pools of the section are
	rule policy.Rule // of an address
}

// single stands for each address of a host: limits depend on the length of a prefix, not on the family.
var single = netip.MustParsePrefix("0.0.0.0/32")

// host adds the host of an entry to a direction if it is valid.
func (r *reader) host(d *direction, e *entry) {
	mac, err := policy.ParseMAC(e.key.text)
	if err != nil {
		r.errorf(&e.key, "%w", err)
		return
	}
	for _, other := range d.hosts {
		if other.mac == mac {
			r.errorf(&e.key, "host %v appears twice, first in %s; remove one of them", mac, r.where(other.at))
			return
		}
	}
	if d.match != d.direction.FarSide() {
		r.errorf(&e.key, "host %v is at the far side, but this direction matches %v; move the host to another direction, or remove match in %s",
			mac, d.match, r.where(d.matchAt))
		return
	}
	p := r.limit(&e.value, "a host", hostKeys)
	if p.bad || d.defaults.bad {
		return
	}
	h := &host{at: e.key.start, mac: mac}
	limit := p.draft(d.defaults.Draft)
	limit.Name, limit.Host = cmp.Or(p.Name, mac.String()), mac
	ofRules := limit
	if limit.Rate != policy.Unlimited && limit.Rate != 0 || limit.Also != (policy.Also{}) {
		if h.pool = r.poolOfHost(d, e, p, limit); h.pool == nil {
			return
		}
		ofRules = policy.Draft{Limit: policy.Limit{Within: policy.Within(h.pool.rule.Label.Name), Name: limit.Name, Note: limit.Note, Host: mac}}
		for _, o := range limit.Given() {
			if ofAddress(o) {
				ofRules.Take(o, &limit)
			}
		}
	} else {
		err = onlyWithRate(&ofRules, p)
	}
	if err == nil {
		h.rule, err = ofRules.Rule(single)
	}
	if err != nil {
		r.blame(err, e.key.start, p, d.defaults)
		return
	}
	d.hosts = append(d.hosts, h)
}

// ofAddress reports whether an option of a host that has a limit goes to the rules of its addresses, not to its pool.
func ofAddress(o *policy.Option) bool {
	return o.RuleOnly && !o.LimitedOnly && !o.DependsOn("guarantee")
}

// ofPoolOnly are the options that a host without a rate cannot have: they would be for each of its addresses.
var ofPoolOnly = []string{"guarantee", "members", "weight"}

// onlyWithRate removes these options, which the defaults of a host without a rate have. It is an error if the host or its
// plan has one of them.
func onlyWithRate(d *policy.Draft, p parcel) error {
	for _, key := range ofPoolOnly {
		o := policy.FindOption(key)
		if p.gives(o) {
			return fmt.Errorf("%s is for all addresses of a host together, which have a pool only with a rate or quota; give the host one, or leave this out", key)
		}
		d.Drop(o)
	}
	return nil
}

// poolOfHost makes the pool of a host with a limit; nil if it is not valid.
func (r *reader) poolOfHost(of *direction, e *entry, said parcel, d policy.Draft) *pool {
	d.Owner = policy.Owner{Device: of.section.device(), Direction: of.direction, Host: d.Name}
	name := d.Owner.String()
	if r.pools[name] != nil {
		r.errorf(&e.key, "pool %q of the host is also among the pools; rename that one", name)
		return nil
	}
	for _, other := range of.hosts {
		if other.pool != nil && other.pool.rule.Label.Name == name {
			r.errorf(&e.key, "host %s has the name of the one in %s, and the name is that of its pool; rename one of them", d.Name, r.where(other.at))
			return nil
		}
	}
	d.Name = ""
	for _, o := range d.Given() {
		// A bucket for each host is what a host has anyway.
		if ofAddress(o) || o.Name == "each" && (d.Each.Kind == policy.EachHost || d.Each.Kind == policy.EachAll) {
			d.Drop(o)
		}
	}
	if shadow := d.Shadow; shadow != nil && shadow.Each.Kind == policy.EachHost {
		own := *shadow
		own.Drop(policy.FindOption("each"))
		d.Shadow = &own
	}
	p := &pool{at: e.key.start}
	var err error
	if d.Share.Kind == policy.ShareMember && said.gives(policy.FindOption("share")) {
		err = errors.New("share member would divide the rate among the addresses of one host; use flow")
	} else {
		p.rule, err = d.Pool(name)
	}
	if err != nil {
		r.blame(err, e.key.start, said, of.defaults)
		return nil
	}
	return p
}

// device is the device of a section, or its pattern.
func (s *section) device() string {
	if s.pattern {
		return s.key
	}
	return s.name()
}

// on is the rule of an address of a host on a device.
func (h *host) on(s *section, d Device) policy.Rule {
	out := h.rule.On(d.L2Bytes)
	if h.pool != nil {
		out.Within = policy.Within(h.pool.on(d.Name))
	} else {
		out.Within = s.poolOn(out.Within, d.Name)
	}
	return out
}

// A Host is what a direction of a device has for the neighbours with a MAC address.
type Host struct {
	MAC       policy.MAC
	Name      string
	Limited   bool          // by a rate of its own or a pool
	Pool      string        // "" for none
	Rules     []policy.Rule // of the addresses that are known
	Direction policy.Direction
}

// HostsOf returns what the file has for the neighbours of a device by their MAC addresses. Two directions may have the same
// one. The error is for a device that several patterns match.
func (f *File) HostsOf(d Device) (hosts []Host, err error) {
	s, err := f.section(d.Name)
	if s == nil || err != nil {
		return nil, err
	}
	for i := range s.tables {
		for _, h := range s.tables[i].hosts {
			hosts = append(hosts, h.of(s, &s.tables[i], d))
		}
	}
	return hosts, nil
}

func (h *host) of(s *section, t *table, d Device) Host {
	rule := h.on(s, d)
	out := Host{MAC: h.mac, Name: rule.Label.Name, Limited: rule.Within != "", Direction: t.direction}
	if h.pool != nil {
		out.Pool = string(rule.Within)
	}
	for _, a := range d.Neighbours[h.mac] {
		rule.Prefix = netip.PrefixFrom(a, a.BitLen())
		out.Rules = append(out.Rules, rule)
	}
	policy.SortRules(out.Rules)
	return out
}

// MACs are the MAC addresses of all hosts of the file.
func (f *File) MACs() map[policy.MAC]bool {
	macs := map[policy.MAC]bool{}
	for i := range f.devices {
		for _, t := range f.devices[i].tables {
			for _, h := range t.hosts {
				macs[h.mac] = true
			}
		}
	}
	return macs
}

// addHosts adds the rules of hosts to the sorted rules of a direction, but not for addresses that have one there.
func (s *section) addHosts(rules []policy.Rule, t *table, d Device) []policy.Rule {
	explicit := len(rules)
	for _, h := range t.hosts {
		of := h.of(s, t, d).Rules
		for _, r := range of[:min(len(of), MaxAddresses)] {
			if _, found := slices.BinarySearchFunc(rules[:explicit], r, func(a, b policy.Rule) int { return policy.ComparePrefix(a.Prefix, b.Prefix) }); !found {
				rules = append(rules, r)
			}
		}
	}
	policy.SortRules(rules)
	return rules
}
