package netinfo

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/testenv"
)

func TestBehind(t *testing.T) {
	eth0, lan, dmz := Device{Name: "eth0", Index: 2, Master: 5}, Device{Name: "br-lan", Index: 3}, Device{Name: "dmz", Index: 4}
	lo, br := Device{Name: "lo", Index: 1, Loopback: true}, Device{Name: "br0", Index: 5}
	at := func(d Device, network string) inside { return inside{d, netip.MustParsePrefix(network)} }
	wan := at(eth0, "203.0.113.5/24")
	for name, c := range map[string]struct {
		bridged, forwards4, forwards6 bool
		networks                      []inside
		hosts                         bool
		nat                           string
	}{
		"a laptop":                          {networks: []inside{wan, at(lo, "127.0.0.1/8")}},
		"two devices, no forwarding":        {networks: []inside{wan, at(lan, "192.168.1.1/24")}},
		"forwarding, but nobody behind":     {forwards4: true, forwards6: true, networks: []inside{wan, at(lo, "10.9.0.1/32"), at(lan, "169.254.1.1/16"), at(lan, "fe80::1/64")}},
		"a home":                            {forwards4: true, networks: []inside{wan, at(lan, "192.168.1.1/24")}, hosts: true, nat: "br-lan 192.168.1.0/24"},
		"behind another router":             {forwards4: true, networks: []inside{at(eth0, "192.168.0.5/24"), at(lan, "192.168.1.1/24")}, hosts: true, nat: "br-lan 192.168.1.0/24"},
		"public addresses":                  {forwards4: true, networks: []inside{wan, at(dmz, "198.51.100.1/24")}, hosts: true},
		"public and private":                {forwards4: true, networks: []inside{wan, at(dmz, "198.51.100.1/24"), at(lan, "10.0.0.1/8")}, hosts: true, nat: "br-lan 10.0.0.0/8"},
		"one network on both sides":         {forwards4: true, networks: []inside{at(eth0, "192.168.1.5/32"), at(lan, "192.168.1.1/24")}, hosts: true},
		"IPv6":                              {forwards6: true, networks: []inside{wan, at(lan, "2001:db8::1/64"), at(lan, "192.168.1.1/24")}, hosts: true},
		"IPv6, but no forwarding of it":     {networks: []inside{wan, at(lan, "2001:db8::1/64")}},
		"a bridge":                          {bridged: true, networks: []inside{at(br, "192.168.1.5/24")}, hosts: true},
		"a bridge of a router":              {bridged: true, forwards4: true, networks: []inside{at(br, "203.0.113.5/24"), at(lan, "192.168.1.1/24")}, hosts: true, nat: "br-lan 192.168.1.0/24"},
		"a port of what is no bridge":       {forwards4: true, networks: []inside{at(br, "10.1.0.1/24")}, hosts: true, nat: "br0 10.1.0.0/24"},
		"two private ones":                  {forwards4: true, networks: []inside{wan, at(lan, "10.0.0.1/24"), at(dmz, "10.0.1.1/24")}, hosts: true, nat: "br-lan 10.0.0.0/24 dmz 10.0.1.0/24"},
		"CGNAT and ULA":                     {forwards4: true, forwards6: true, networks: []inside{wan, at(lan, "100.64.0.1/24"), at(dmz, "fd00:1::1/64")}, hosts: true, nat: "br-lan 100.64.0.0/24 dmz fd00:1::/64"},
		"a line without an address (PPPoE)": {forwards4: true, networks: []inside{at(lan, "10.0.0.1/24")}, hosts: true, nat: "br-lan 10.0.0.0/24"},
	} {
		b := behind(eth0, c.bridged, c.forwards4, c.forwards6, c.networks)
		nat := ""
		for _, in := range b.NAT {
			nat = strings.TrimSpace(nat + " " + in.Device + " " + in.Network.String())
		}
		if b.Hosts != c.hosts || nat != c.nat {
			t.Errorf("%s: hosts %v, NAT %q; want %v, %q", name, b.Hosts, nat, c.hosts, c.nat)
		}
	}
}

// The kernel is asked as a router has it: addresses, forwarding and the default route.
func TestBehindOfDevices(t *testing.T) {
	testenv.NewNetns(t)
	testenv.Veth(t, "wan", "provider")
	testenv.Veth(t, "lan", "host")
	address := func(device, a string) {
		t.Helper()
		addr, err := netlink.ParseAddr(a)
		testenv.Must(t, err)
		testenv.Must(t, netlink.AddrAdd(testenv.Link(t, device), addr))
	}
	is := func(device string, want Behind) {
		t.Helper()
		d, err := DeviceByName(device)
		testenv.Must(t, err)
		if b, err := d.Behind(); err != nil || fmt.Sprint(b) != fmt.Sprint(want) {
			t.Errorf("behind %s: %+v, %v; want %+v", device, b, err, want)
		}
	}
	address("wan", "203.0.113.5/24")
	address("lan", "192.168.1.1/24")
	testenv.Must(t, os.WriteFile("/proc/sys/net/ipv4/conf/all/forwarding", []byte("0"), 0))
	is("wan", Behind{})
	testenv.Must(t, os.WriteFile("/proc/sys/net/ipv4/conf/all/forwarding", []byte("1"), 0))
	is("wan", Behind{Hosts: true})
	natChain(t, true)
	nat := Behind{Hosts: true, NAT: []Inside{{netip.MustParsePrefix("192.168.1.0/24"), "lan"}}}
	is("wan", nat)
	is("lan", Behind{Hosts: true})
	testenv.Must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: testenv.Link(t, "wan").Attrs().Index, Gw: net.IPv4(203, 0, 113, 1)}))
	is("wan", nat)
	is("lan", Behind{Hosts: true, Line: "wan"})
	testenv.Must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: testenv.Link(t, "lan").Attrs().Index, Gw: net.IPv4(192, 168, 1, 2), Priority: 9}))
	is("lan", Behind{Hosts: true})
}

// natChain makes a chain of nftables in which sources may be changed, or else destinations.
func natChain(t *testing.T, source bool) {
	t.Helper()
	hook := "prerouting priority dstnat"
	if source {
		hook = "postrouting priority srcnat"
	}
	out, err := exec.Command("nft", "add table ip t; add chain ip t c { type nat hook "+hook+"; }").CombinedOutput()
	if err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
}

func TestChangesSources(t *testing.T) {
	is := func(want bool) {
		t.Helper()
		if got, err := changesSources(false); got != want || err != nil {
			t.Errorf("%v, %v", got, err)
		}
	}
	testenv.NewNetns(t)
	is(false)
	natChain(t, false)
	is(false)
	out, err := exec.Command("nft", "add chain ip t filter { type filter hook postrouting priority 0; }").CombinedOutput()
	if err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	is(false)
	testenv.NewNetns(t)
	natChain(t, true)
	is(true)
	for _, iptables := range []string{"iptables-legacy", "iptables-nft"} {
		testenv.NewNetns(t)
		is(false)
		if out, err := exec.Command(iptables, "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE").CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", iptables, err, out)
		}
		is(true)
	}
}
