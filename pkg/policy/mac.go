package policy

import (
	"fmt"
	"net"
	"strings"
)

// MAC is the link-layer address of a host on an Ethernet link; zero for none.
type MAC [6]byte

// ParseMAC parses an address such as 3c:22:fb:12:34:56, also with dashes, or with a dot after each second byte. It must be
// one that a host can have.
func ParseMAC(s string) (m MAC, err error) {
	b, err := net.ParseMAC(s)
	if err != nil || len(b) != len(m) {
		return m, fmt.Errorf("MAC address %.64q does not have six bytes in hexadecimal; write one such as 3c:22:fb:12:34:56", s)
	}
	switch m = MAC(b); {
	case m == MAC{}:
		return m, fmt.Errorf("MAC address %s is one that no host has; write that of the host", s)
	case b[0]&1 != 0:
		return m, fmt.Errorf("MAC address %v is one of a group, not of a host; write that of the host", m)
	}
	return m, nil
}

// IsMAC reports whether a text is meant as a MAC address: at least three bytes in hexadecimal, with colons or dashes.
func IsMAC(s string) bool {
	if _, err := net.ParseMAC(s); err == nil {
		return true
	}
	bytes := strings.FieldsFunc(s, func(c rune) bool { return c == ':' || c == '-' })
	for _, b := range bytes {
		if len(b) > 2 || strings.Trim(b, "0123456789abcdefABCDEF") != "" {
			return false
		}
	}
	return len(bytes) >= 3
}

func (m MAC) String() string {
	if m == (MAC{}) {
		return ""
	}
	return net.HardwareAddr(m[:]).String()
}

// Set parses what String prints, and all else that ParseMAC does.
func (m *MAC) Set(s string) (err error) {
	if *m = (MAC{}); s != "" {
		*m, err = ParseMAC(s)
	}
	return err
}

func (m MAC) Type() string { return "MAC" }

// Called returns how a host is called. Its name may be empty or the MAC address.
func (m MAC) Called(name string) string {
	if name == "" || name == m.String() {
		return m.String()
	}
	return fmt.Sprintf("%s (%v)", name, m)
}
