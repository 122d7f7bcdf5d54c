package policy

import (
	"errors"
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

func (e Each) String() string { return scopeText(e.Kind, e.Bits, eachNames) }
func (e Each) Type() string   { return strings.Join(eachNames, "|") }

// Set parses "all", "host", "flow", or a prefix length such as "/64".
func (e *Each) Set(s string) error {
	kind, bits, err := parseScope[EachKind]("each", s, eachNames)
	if err == nil {
		*e = Each{kind, bits}
	}
	return err
}

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

// tellsHosts reports whether hosts or subnets have buckets or fair shares.
func (r *Rule) tellsHosts() bool {
	return r.Each.Kind == EachHost || r.Each.Kind == EachSubnet || r.Share.Kind == ShareHost || r.Share.Kind == ShareSubnet
}

func (r *Rule) hasOneBucket() bool { return r.Each.Canonical(r.Prefix).Kind == EachAll }

// ShareKind is who gets a fair share of a bucket.
type ShareKind uint8

const (
	ShareNone   ShareKind = iota // nobody: first come, first served
	ShareHost                    // each far address
	ShareSubnet                  // each subnet of Share.Bits
	ShareFlow                    // each 5-tuple
	ShareMember                  // each rule and pool that is directly within the pool
)

// Share is who gets a fair share of a bucket, and for ShareSubnet the prefix length.
type Share struct {
	Kind ShareKind
	Bits uint8
}

var shareNames = []string{ShareNone: none, ShareHost: "host", ShareSubnet: "/N", ShareFlow: "flow", ShareMember: "member"}

func (s Share) String() string { return scopeText(s.Kind, s.Bits, shareNames) }
func (s Share) Type() string   { return strings.Join(shareNames, "|") }

// Set parses "none", "host", "flow", "member", or a prefix length such as "/64".
func (s *Share) Set(text string) error {
	kind, bits, err := parseScope[ShareKind]("share", text, shareNames)
	if err == nil {
		*s = Share{kind, bits}
	}
	return err
}

func checkShare(r *Rule) error {
	if r.Share.Kind == ShareMember && !r.Pool {
		return errors.New("share member is for pools, whose members are rules and pools; use host, /N or flow")
	}
	return checkScope("share", r.Share.Kind, r.Share.Bits, shareNames, r)
}

// subnet is the kind of scope that has a prefix length: EachSubnet and ShareSubnet.
const subnet = 2

func scopeText[K ~uint8](kind K, bits uint8, names []string) string {
	if kind == subnet {
		return "/" + strconv.Itoa(int(bits))
	}
	return nameOf(kind, names)
}

func parseScope[K ~uint8](what, s string, names []string) (kind K, bits uint8, err error) {
	length, ok := strings.CutPrefix(s, "/")
	if !ok {
		err = setName(&kind, what, s, names)
		return kind, 0, err
	}
	n, err := strconv.ParseUint(length, 10, 8)
	if err != nil || n > 128 {
		return 0, 0, fmt.Errorf("%s %.64q is not a prefix length; use /0 to /32 for IPv4, /0 to /128 for IPv6", what, s)
	}
	return subnet, uint8(n), nil
}

// checkScope checks a scope of a rule, or of a pool, which is in no network.
func checkScope[K ~uint8](what string, kind K, bits uint8, names []string, r *Rule) error {
	least, most := r.Prefix.Bits(), r.Prefix.Addr().BitLen()
	if r.Pool {
		least = 0
	}
	switch text := what + " " + scopeText(kind, bits, names); {
	case int(kind) >= len(names):
		return checkName(kind, what, names)
	case kind != subnet && bits != 0:
		return fmt.Errorf("%s takes no prefix length; leave out /%d", text, bits)
	case kind == subnet && r.Pool && int(bits) > most:
		return fmt.Errorf("%s is not a prefix length; use /0 to /%d", text, most)
	case kind == subnet && (int(bits) < least || int(bits) > most):
		return fmt.Errorf("%s does not divide %v; use /%d to /%d", text, r.Prefix, least, most)
	}
	return nil
}
