//go:build guest

package loader

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
)

// Tunnels that not every kernel has.
func TestWireBytesThroughTunnels(t *testing.T) {
	for _, k := range []tunnel{
		vxlan,
		{"Geneve", 14 + 20 + 8 + 8 + 14, func(a netlink.LinkAttrs, _ int, _, remote net.IP) netlink.Link {
			a.MTU = 1450
			return &netlink.Geneve{LinkAttrs: a, ID: 0xf00001, Remote: remote, Dport: 6081}
		}},
		{"GRE", 14 + 20 + 4, func(a netlink.LinkAttrs, below int, local, remote net.IP) netlink.Link {
			return &netlink.Gretun{LinkAttrs: a, Link: uint32(below), Local: local, Remote: remote}
		}},
		{"GRE with a key", 14 + 20 + 8, func(a netlink.LinkAttrs, below int, local, remote net.IP) netlink.Link {
			return &netlink.Gretun{LinkAttrs: a, Link: uint32(below), Local: local, Remote: remote, IKey: 7, OKey: 7}
		}},
		{"GRE of frames", 14 + 20 + 4 + 14, func(a netlink.LinkAttrs, below int, local, remote net.IP) netlink.Link {
			return &netlink.Gretap{LinkAttrs: a, Link: uint32(below), Local: local, Remote: remote}
		}},
		{"IP in IP", 14 + 20, func(a netlink.LinkAttrs, below int, local, remote net.IP) netlink.Link {
			return &netlink.Iptun{LinkAttrs: a, Link: uint32(below), Local: local, Remote: remote}
		}},
	} {
		t.Run(k.name, k.countsAsSent)
	}
}
