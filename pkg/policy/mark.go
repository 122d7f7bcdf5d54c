package policy

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// A rule may be for packets with a mark of the kernel (mark:0x10) or with a VLAN tag (vlan:12), of both families. Its prefix is then
// an address of a block that is for no host (RFC 6666), whose last words are the kind and the value. Packets look for it
// before they look for their address, by a length that no address has: see match_mark in bpf/prefix.h.
var marks = netip.MustParsePrefix("100::/64")

// Kinds are numbers of markKinds, from 1 on.
const (
	kindMark = 1
	kindVLAN = 2
	mostVLAN = 4094
)

var markKinds = []string{"mark", "vlan"}

// IsMark reports whether a prefix stands for a mark or a VLAN.
func IsMark(p netip.Prefix) bool {
	kind, value := markOf(p)
	return kind == kindMark && value != 0 || kind == kindVLAN && value != 0 && value <= mostVLAN
}

func markOf(p netip.Prefix) (kind, value uint32) {
	if p.Bits() != 128 || !marks.Contains(p.Addr()) {
		return 0, 0
	}
	b := p.Addr().As16()
	return binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:])
}

// CIDR is what a rule is for, as commands and files write it.
func CIDR(p netip.Prefix) string {
	if !IsMark(p) {
		return p.String()
	}
	kind, value := markOf(p)
	if kind == kindVLAN {
		return fmt.Sprintf("vlan:%d", value)
	}
	return fmt.Sprintf("mark:%#x", value)
}

// CIDRs are CIDR for several.
func CIDRs(networks []netip.Prefix) (all []string) {
	for _, p := range networks {
		all = append(all, CIDR(p))
	}
	return all
}

func parseMark(s, kind, text string) (netip.Prefix, error) {
	value, err := strconv.ParseUint(text, 0, 32)
	b := marks.Addr().As16()
	binary.BigEndian.PutUint32(b[8:], uint32(slices.Index(markKinds, kind)+1))
	binary.BigEndian.PutUint32(b[12:], uint32(value))
	switch p := netip.PrefixFrom(netip.AddrFrom16(b), 128); {
	case err == nil && IsMark(p) && (text[0] != '0' || text[1]|0x20 == 'x'): // others would take 010 for 10
		return p, nil
	case kind == markKinds[kindVLAN-1]:
		return netip.Prefix{}, fmt.Errorf("network %.64q is not a VLAN; write vlan:1 to vlan:%d", s, mostVLAN)
	case strings.Contains(text, "/"):
		return netip.Prefix{}, fmt.Errorf("network %.64q has a mask; a rule is for one exact mark, so write one rule for each, such as mark:0x10", s)
	}
	return netip.Prefix{}, fmt.Errorf("network %.64q is not a mark; write a number from 1 to 0xffffffff, such as mark:0x10", s)
}

func errMarks(p netip.Prefix) error {
	return fmt.Errorf("network %v is in %v, which is for no host and stands for marks and VLANs here; write mark:0x10 or vlan:12", p, marks)
}
