package importer

import (
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// side is the address of a packet that an entry looks at.
type side uint8

const (
	either side = iota // no address: all packets of the family
	toward             // the destination
	from               // the source
)

func (s side) match() policy.Match {
	if s == from {
		return policy.MatchSrc
	}
	return policy.MatchDst
}

func (s side) String() string {
	return [...]string{"any address", "destination", "source"}[s]
}

// conditions are those that the packets of a filter of tc, or of a rule of nft, must meet.
type conditions struct {
	addresses [3]addresses // by side; those on either are the families
	devices   [2][]string  // by which packets enter and leave, by direction; nil for any
	partial   string       // others, which no rule can have
}

// addresses are a condition on the addresses of one side.
type addresses struct{ only, except []netip.Prefix }

func (a addresses) any() bool { return slices.Equal(a.only, everything) && len(a.except) == 0 }

var everything = policy.Everything[:]

// families returns the networks of all IPv4 addresses, all IPv6 addresses, or both.
func families(four, six bool) (all []netip.Prefix) {
	if four {
		all = append(all, everything[0])
	}
	if six {
		all = append(all, everything[1])
	}
	return all
}

// every returns the conditions that all packets of some families meet.
func every(families []netip.Prefix) conditions {
	return conditions{addresses: [3]addresses{{only: families}, {only: everything}, {only: everything}}}
}

func (a *conditions) restrict(what string) { a.partial = also(a.partial, what) }

func also(asks, what string) string {
	if asks == "" || what == "" {
		return asks + what
	}
	return asks + ", " + what
}

func (a conditions) both() bool { return !a.addresses[toward].any() && !a.addresses[from].any() }

func (a conditions) with(s side, networks []netip.Prefix, not bool) conditions {
	on, before := &a.addresses[s], a.both()
	if not {
		on.except = slices.Concat(on.except, networks)
	} else {
		on.only = common(on.only, networks)
	}
	// A condition on an address, also a negated one, is one on its family, too.
	families := &a.addresses[either].only
	*families = slices.DeleteFunc(slices.Clone(*families), func(all netip.Prefix) bool {
		return !slices.ContainsFunc(networks, all.Overlaps)
	})
	if !before && a.both() {
		a.restrict("both addresses")
	}
	return a
}

func (a conditions) on(d policy.Direction, names []string) conditions {
	if before := a.devices[d]; before != nil {
		names = slices.DeleteFunc(slices.Clone(before), func(n string) bool { return !slices.Contains(names, n) })
		if len(names) == 0 {
			a.restrict("two devices")
		}
	}
	a.devices[d] = names
	return a
}

func (a conditions) impossible() bool {
	return slices.ContainsFunc(a.addresses[:], func(on addresses) bool { return len(on.only) == 0 })
}

// networks returns the side with a condition, and its networks.
func (a conditions) networks() (s side, only, except []netip.Prefix) {
	switch {
	case !a.addresses[toward].any():
		s = toward
	case !a.addresses[from].any():
		s = from
	}
	on, families := a.addresses[s], a.addresses[either].only
	return s, common(on.only, families), common(on.except, families)
}

func common(a, b []netip.Prefix) (both []netip.Prefix) {
	for _, p := range a {
		for _, q := range b {
			switch {
			case !p.Overlaps(q):
			case p.Bits() < q.Bits():
				both = append(both, q)
			default:
				both = append(both, p)
			}
		}
	}
	return both
}

// describe returns the packets for people.
func (a conditions) describe() string {
	words := []string{"packets"}
	for s, preposition := range []string{toward: "to ", from: "from "} {
		if on := a.addresses[s]; !slices.Equal(on.only, everything) && s != int(either) {
			words = append(words, preposition+names(on.only))
		}
		if on := a.addresses[s]; len(on.except) > 0 {
			words = append(words, preposition+"any but "+names(on.except))
		}
	}
	for direction, verb := range []string{policy.Ingress: "entering ", policy.Egress: "leaving "} {
		if a.devices[direction] != nil {
			words = append(words, verb+plain.List(a.devices[direction]))
		}
	}
	if a.partial != "" {
		words = append(words, "with "+a.partial)
	}
	if len(words) == 1 {
		return "all packets"
	}
	return strings.Join(words, " ")
}

// names lists the first networks of all.
func names(all []netip.Prefix) string { return plain.List(networkTexts(all)) }

func networkTexts(all []netip.Prefix) []string {
	words := make([]string, len(all))
	for i, p := range all {
		words[i] = policy.NetworkText(p)
	}
	return words
}

// ranged returns the networks that contain exactly the addresses from first to last.
func ranged(first, last netip.Addr) (all []netip.Prefix) {
	for first.IsValid() && first.Compare(last) <= 0 {
		widest := netip.PrefixFrom(first, first.BitLen())
		for widest.Bits() > 0 {
			wider := netip.PrefixFrom(first, widest.Bits()-1)
			if wider.Masked().Addr() != first || lastOf(wider).Compare(last) > 0 {
				break
			}
			widest = wider
		}
		all = append(all, widest)
		first = lastOf(widest).Next()
	}
	return all
}

func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// masked returns the network of an address with a mask; false if the mask has gaps.
func masked(address netip.Addr, mask []byte) (netip.Prefix, bool) {
	length, size := net.IPMask(mask).Size()
	return netip.PrefixFrom(address, length).Masked(), size > 0
}
