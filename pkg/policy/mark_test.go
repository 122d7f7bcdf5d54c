package policy

import (
	"net/netip"
	"strings"
	"testing"
)

// A mark or VLAN is written where a network is, and comes back as it was. Nothing else is in their block.
func TestMarks(t *testing.T) {
	for written, want := range map[string]string{
		"mark:0x10": "mark:0x10", "mark:16": "mark:0x10", "mark:0xffffffff": "mark:0xffffffff", "vlan:1": "vlan:1", "vlan:4094": "vlan:4094",
	} {
		p, err := ParsePrefix(written)
		if err != nil || CIDR(p) != want || NetworkText(p) != want || !IsMark(p) {
			t.Errorf("%s: %v, %v", written, CIDR(p), err)
		}
		r, err := Limit{Rate: 1e6, Each: Each{EachSubnet, 24}}.Rule(p)
		if says := r.Says(MatchDst); err != nil || !strings.HasPrefix(says, "each /24 subnet with "+want+" gets 1mbit") {
			t.Errorf("%s: %s, %v", written, says, err)
		}
	}
	for written, says := range map[string]string{
		"mark:0": "write a number from 1", "mark:0x100000000": "write a number from 1", "mark:": "write a number", "mark:-1": "write a number", "mark:010": "write a number", "vlan:0b1": "vlan:1 to",
		"mark:0x10/0xff": "has a mask", "vlan:0": "vlan:1 to vlan:4094", "vlan:4095": "vlan:1 to vlan:4094", "vlan:x": "not a VLAN",
		"100::1:0:10": "write mark:0x10", "100::/64": "write mark:0x10", "100::ffff/128": "write mark:0x10",
	} {
		if p, err := ParsePrefix(written); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, %v", written, p, err)
		}
	}
	for _, text := range []string{"100::/63", "100:0:0:1::1/128", "::/0", "10.0.0.1/32"} {
		if p, err := ParsePrefix(text); err != nil || IsMark(p) {
			t.Errorf("%s: %v", text, err)
		}
	}
	for _, text := range []string{"100::1:0:0/128", "100::2:0:fff/128", "100::3:0:1/128", "100::1:0:10/127"} {
		r := Rule{Prefix: netip.MustParsePrefix(text), Rate: 1e6, Capacity: 1e6}
		if err := r.Validate(); err == nil {
			t.Errorf("%s is a rule", text)
		}
	}
}
