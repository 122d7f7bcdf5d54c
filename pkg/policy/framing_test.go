package policy

import (
	"fmt"
	"strings"
	"testing"
)

func TestParseFraming(t *testing.T) {
	for text, want := range map[string]struct{ ethernet, headerless string }{
		"0": {"0", "0"}, "38": {"38", "38"}, "-14": {"-14", "-14"}, "38/84": {"38/84", "38/84"},
		"0/64": {"0/64", "0/64"}, "256/256": {"256/256", "256/256"}, "-64": {"-64", "-64"},
		// tc-cake(8) counts from the IP header, so a full Ethernet frame of 1514
		// bytes takes 1538 on the wire, as its IP packet of 1500 does with 38.
		"raw": {"0", "0"}, "ethernet": {"24/84", "38/84"}, "docsis": {"4/64", "18/64"},
		"pppoe-ptm": {"16", "30"}, "bridged-ptm": {"8", "22"}, "ether-vlan": {"4", "4"},
		"pppoe-ptm,ether-vlan": {"20", "34"}, "ethernet,ether-vlan,ether-vlan": {"32/84", "46/84"},
	} {
		for l2Bytes, want := range map[uint8]string{14: want.ethernet, 0: want.headerless} {
			f, err := ParseFraming(text)
			f = Rule{Framing: f}.On(l2Bytes).Framing
			got := fmt.Sprintf("%d/%d", f.Overhead, f.MPU)
			if got != want && got != want+"/0" || err != nil {
				t.Errorf("%q with a link header of %d bytes: %s, %v; want %s", text, l2Bytes, got, err, want)
			}
		}
	}
	for text, want := range map[string]string{
		"": "unknown", "adsl": "unknown", "38/": "unknown", "1e2": "unknown", "ethernet,": "unknown", "38,ether-vlan": "unknown",
		"257": "use -64 to 256", "-65": "use -64 to 256", "0/257": "use 0 to 256", "0/-1": "use 0 to 256",
		"conservative": "ATM cells", "pppoe-llcsnap": "ATM cells", "ethernet,atm": "ATM cells", "ptm": "64b/65b",
	} {
		if _, err := ParseFraming(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want an error with %q", text, err, want)
		}
	}
}
