package importer

import (
	"fmt"
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
	side     side
	networks []netip.Prefix // of the address; those of all addresses if there is none
	devices  [2][]string    // by which packets enter and leave, by direction; nil for any
	partial  string         // others, which no rule can have
}

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

func (a *conditions) restrict(what string) { a.partial = also(a.partial, what) }

func also(asks, what string) string {
	if asks == "" || what == "" {
		return asks + what
	}
	return asks + ", " + what
}

func (a conditions) with(s side, networks []netip.Prefix) conditions {
	if s != either && a.side != either && s != a.side {
		a.restrict(fmt.Sprintf("%v %s", s, names(networks)))
		return a
	}
	a.side, a.networks = max(a.side, s), common(a.networks, networks)
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
	if a.side != either {
		words = append(words, [...]string{toward: "to", from: "from"}[a.side], names(a.networks))
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
			if wider.Masked().Addr() != first || policy.Last(wider).Compare(last) > 0 {
				break
			}
			widest = wider
		}
		all = append(all, widest)
		first = policy.Last(widest).Next()
	}
	return all
}

// masked returns the network of an address with a mask; false if the mask has gaps.
func masked(address netip.Addr, mask []byte) (netip.Prefix, bool) {
	length, size := net.IPMask(mask).Size()
	return netip.PrefixFrom(address, length).Masked(), size > 0
}
