package policy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// EachKind is a kind of bucket scope.
type EachKind uint8

const (
	EachAll    EachKind = iota // the whole prefix shares one bucket
	EachHost                   // each address
	EachSubnet                 // each subnet of Each.Bits
	EachFlow                   // each 5-tuple
)

// Each is the bucket scope of a rule: who has a bucket of their own. Bits, 0 to 128, is
// the prefix length of an EachSubnet, and zero for other kinds.
type Each struct {
	Kind EachKind
	Bits uint8
}

var eachNames = []string{EachAll: "all", EachHost: "host", EachSubnet: "/N", EachFlow: "flow"}

func (e Each) String() string {
	if e.Kind == EachSubnet {
		return "/" + strconv.Itoa(int(e.Bits))
	}
	return nameOf(e.Kind, eachNames)
}

// Set parses "all", "host", "flow", or a prefix length such as "/64".
func (e *Each) Set(s string) error {
	if length, ok := strings.CutPrefix(s, "/"); ok {
		bits, err := strconv.ParseUint(length, 10, 8)
		if err != nil || bits > 128 {
			return fmt.Errorf("each %.64q is not a prefix length; use /0 to /32 for IPv4, /0 to /128 for IPv6", s)
		}
		*e = Each{EachSubnet, uint8(bits)}
		return nil
	}
	var kind EachKind
	err := setName(&kind, "each", s, eachNames)
	if err == nil {
		*e = Each{Kind: kind}
	}
	return err
}

func (e Each) Type() string { return strings.Join(eachNames, "|") }

// Canonical returns the simplest Each that is the same scope in prefix as e: EachAll for
// the length of the prefix, and EachHost for that of an address.
func (e Each) Canonical(prefix netip.Prefix) Each {
	if e.Kind == EachSubnet {
		switch int(e.Bits) {
		case prefix.Bits():
			return Each{Kind: EachAll}
		case prefix.Addr().BitLen():
			return Each{Kind: EachHost}
		}
	}
	return e
}

func (r *Rule) hasOneBucket() bool { return r.Each.Canonical(r.Prefix).Kind == EachAll }

func (e Each) validate(prefix netip.Prefix) error {
	if err := checkName(e.Kind, "each", eachNames); err != nil {
		return err
	}
	if e.Kind != EachSubnet && e.Bits != 0 {
		return fmt.Errorf("each %v takes no prefix length; leave out /%d", e, e.Bits)
	}
	family := prefix.Addr().BitLen()
	if e.Kind == EachSubnet && (int(e.Bits) < prefix.Bits() || int(e.Bits) > family) {
		return fmt.Errorf("each %v does not divide %v; use /%d to /%d", e, prefix, prefix.Bits(), family)
	}
	return nil
}
