package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Any is the word for all networks of Everything.
const Any = "any"

// Everything is the networks of all addresses, IPv4 first.
var Everything = [...]netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}

// ParseNetworks parses a network as ParsePrefix does, or Any, which is Everything.
func ParseNetworks(s string) ([]netip.Prefix, error) {
	if s == Any {
		return Everything[:], nil
	}
	p, err := ParsePrefix(s)
	if err != nil {
		return nil, err
	}
	return []netip.Prefix{p}, nil
}

// ParsePrefix parses an IPv4 or IPv6 network (10.0.0.0/24), an address, which is a
// network by itself, or a mark or VLAN. Host bits, zones and IPv4 written as IPv6 are errors.
func ParsePrefix(s string) (netip.Prefix, error) {
	if kind, value, is := strings.Cut(s, ":"); is && slices.Contains(markKinds, kind) {
		return parseMark(s, kind, value)
	}
	address, length, hasLength := strings.Cut(s, "/")
	addr, err := netip.ParseAddr(address)
	if err != nil && IsMAC(address) {
		return netip.Prefix{}, fmt.Errorf("network %.64q is a MAC address; a policy can limit a host by it, and 'shapectl serve' follows its addresses; here, write a network such as 10.0.0.0/24", s)
	}
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("network %.64q is not a CIDR or an address; write one such as 10.0.0.0/24 or 2001:db8::/32", s)
	}
	if addr.Zone() != "" {
		return netip.Prefix{}, fmt.Errorf("network %.64q has a zone; leave out the %% and what follows it", s)
	}
	if !hasLength && addr.IsUnspecified() {
		return netip.Prefix{}, fmt.Errorf("network %q is a single address that no host has; did you mean %v/0?", s, addr)
	}
	prefix := netip.PrefixFrom(addr, addr.BitLen())
	if hasLength {
		if prefix, err = netip.ParsePrefix(s); err != nil {
			return netip.Prefix{}, fmt.Errorf("network %.64q has the bad prefix length %.16q; use /0 to /%d", s, length, addr.BitLen())
		}
	}
	err = checkPrefix(prefix)
	if err == nil && IsMark(prefix) {
		err = errMarks(prefix)
	}
	if err != nil {
		return netip.Prefix{}, err
	}
	return prefix, nil
}

// NetworkText returns a network as people read it: a single address without its length.
func NetworkText(p netip.Prefix) string {
	if IsHost(p) {
		return p.Addr().String()
	}
	return CIDR(p)
}

// Last returns the last address of a network.
func Last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// IsHost reports whether a network is a single address.
func IsHost(p netip.Prefix) bool { return p.IsSingleIP() && !IsMark(p) }

func checkPrefix(p netip.Prefix) error {
	addr, network := p.Addr(), p.Masked()
	switch {
	case !p.IsValid():
		return errors.New("network is not set; write one such as 10.0.0.0/24")
	case addr.Is4In6():
		return fmt.Errorf("network %v is IPv4 written as IPv6; did you mean %v?", p, netip.PrefixFrom(addr.Unmap(), max(0, p.Bits()-96)).Masked())
	case p != network:
		return fmt.Errorf("network %v has host bits set; did you mean %v or %v/%d?", p, network, addr, addr.BitLen())
	case marks.Overlaps(p) && p.Bits() >= marks.Bits() && !IsMark(p):
		return errMarks(p)
	}
	return nil
}
