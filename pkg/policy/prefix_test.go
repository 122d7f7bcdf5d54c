package policy

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
)

func TestParsePrefix(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.0/24":        "10.0.0.0/24",
		"10.0.0.5":           "10.0.0.5/32",
		"10.0.0.5/32":        "10.0.0.5/32",
		"0.0.0.0/0":          "0.0.0.0/0",
		"::/0":               "::/0",
		"2001:DB8::/32":      "2001:db8::/32",
		"2001:db8::1":        "2001:db8::1/128",
		"2001:db8:0:0::/128": "2001:db8::/128",
		"64:ff9b::1.2.3.4":   "64:ff9b::102:304/128",
	} {
		if got, err := ParsePrefix(in); err != nil || got != netip.MustParsePrefix(want) {
			t.Errorf("ParsePrefix(%q) = %v, %v; want %s", in, got, err, want)
		}
	}
	for in, part := range map[string]string{
		"10.0.0.5/24":            "network 10.0.0.5/24 has host bits set; did you mean 10.0.0.0/24 or 10.0.0.5/32?",
		"2001:db8::1/64":         "did you mean 2001:db8::/64 or 2001:db8::1/128?",
		"::ffff:10.0.0.0/120":    "IPv4 written as IPv6; did you mean 10.0.0.0/24?",
		"::ffff:10.0.0.5":        "did you mean 10.0.0.5/32?",
		"::ffff:0:0/90":          "did you mean 0.0.0.0/0?",
		"fe80::1%eth0":           "zone",
		"fe80::%eth0/64":         "zone",
		"":                       "not a CIDR or an address",
		"/24":                    "not a CIDR or an address",
		"10.0.0/24":              "not a CIDR or an address",
		"010.0.0.0/8":            "not a CIDR or an address",
		"localhost\n":            "not a CIDR or an address",
		"10.0.0.0/33":            "use /0 to /32",
		"::/129":                 "use /0 to /128",
		"10.0.0.0/":              "bad prefix length",
		"10.0.0.0/08":            "bad prefix length",
		"10.0.0.0/255.0.0.0":     "bad prefix length",
		strings.Repeat("1", 1e6): "not a CIDR or an address",
	} {
		got, err := ParsePrefix(in)
		wantError(t, err, "network ", part)
		if got.IsValid() {
			t.Errorf("%q is refused, but returned %v", in, got)
		}
	}
}

func TestParseNetworks(t *testing.T) {
	for in, want := range map[string]string{
		"any": "[0.0.0.0/0 ::/0]", "0.0.0.0/0": "[0.0.0.0/0]", "10.0.0.9": "[10.0.0.9/32]",
	} {
		if got, err := ParseNetworks(in); err != nil || fmt.Sprint(got) != want {
			t.Errorf("ParseNetworks(%q) = %v, %v; want %s", in, got, err, want)
		}
	}
	_, err := ParseNetworks("Any")
	wantError(t, err, "network ", "not a CIDR")
}

func FuzzParsePrefix(f *testing.F) {
	for _, seed := range []string{"10.0.0.0/24", "10.0.0.5/24", "10.0.0.5", "::/0", "2001:db8::/32", "::ffff:1.2.3.4/128", "fe80::1%eth0", "1.2.3.4/08", "1.2.3.4/33"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ParsePrefix(s)
		want := oraclePrefix(s)
		if want == "" {
			if err == nil {
				t.Fatalf("ParsePrefix(%q) = %v, want an error", s, got)
			}
			wantOneLine(t, err)
			return
		}
		if err != nil || got.String() != want {
			t.Fatalf("ParsePrefix(%q) = %v, %v; want %s", s, got, err, want)
		}
		if back, err := ParsePrefix(got.String()); err != nil || back != got {
			t.Fatalf("ParsePrefix(%q) = %v, %v", got, back, err)
		}
	})
}

// oraclePrefix parses s with package net; it is empty if s must be refused.
func oraclePrefix(s string) string {
	_, length, ok := strings.Cut(s, "/")
	if !ok {
		length = "128"
		if !strings.Contains(s, ":") {
			length = "32"
		}
		s += "/" + length
	}
	ip, network, err := net.ParseCIDR(s)
	mapped := strings.Contains(s, ":") && ip.To4() != nil
	if err != nil || mapped || !ip.Equal(network.IP) || len(length) > 1 && length[0] == '0' {
		return ""
	}
	return network.String()
}
