package policy

import (
	"strings"
	"testing"
)

var tablet = MAC{0x3c, 0x22, 0xfb, 0x12, 0x34, 0x56}

func TestParseMAC(t *testing.T) {
	for _, s := range []string{"3c:22:fb:12:34:56", "3C-22-FB-12-34-56", "3c22.fb12.3456"} {
		if m, err := ParseMAC(s); err != nil || m != tablet || !IsMAC(s) {
			t.Errorf("%s: %v, %v", s, m, err)
		}
	}
	for s, want := range map[string]string{
		"3c:22:fb:12:34":          "does not have six bytes",
		"3c:22:fb:12:34:56:78:9a": "does not have six bytes",
		"00:00:00:00:00:00":       "that no host has",
		"01:00:5e:00:00:01":       "one of a group",
		"FF-FF-FF-FF-FF-FF":       "one of a group",
	} {
		if _, err := ParseMAC(s); err == nil || !strings.Contains(err.Error(), want) || !IsMAC(s) {
			t.Errorf("%s: %v, want %s", s, err, want)
		}
	}
	for _, s := range []string{"", "any", "10.0.0.1", "2001:db8::1", "face-book", "a-b", "3c:22:fb:12:34:5g"} {
		if IsMAC(s) {
			t.Errorf("%q is taken for a MAC address", s)
		}
	}
	if _, err := ParsePrefix("3c:22:fb:12:34:56"); err == nil || !strings.Contains(err.Error(), "is a MAC address; a policy can limit") {
		t.Error(err)
	}
}
