package loader

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/pkg/maps"
)

// BPFFS is the file system that holds the pins.
type BPFFS struct {
	Path              string
	Mounted, Writable bool
	// Untrusted is why pins there are not used: the error wraps ErrUntrusted.
	Untrusted error
}

// FindBPFFS tells where pins are kept, or would be. It mounts nothing.
func FindBPFFS(o Options) (BPFFS, error) {
	n, err := locate(o)
	if err != nil {
		return BPFFS{}, err
	}
	path := n.bpffs()
	fs := BPFFS{Path: path}
	if fs.Mounted, err = isBPFFS(path); err != nil || !fs.Mounted {
		return fs, err
	}
	if err := n.trust(); errors.Is(err, ErrUntrusted) {
		fs.Untrusted = err
	}
	// Once it exists, only what is pinned below it needs to be writable.
	if base := filepath.Join(path, "shapectl"); exists(base) {
		path = base
	}
	fs.Writable = unix.Faccessat(unix.AT_FDCWD, path, unix.W_OK|unix.X_OK, unix.AT_EACCESS) == nil
	return fs, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Probe loads the program, with maps of its own, and lets go of it: it tells
// whether this process may and this kernel can, and if it is compiled to machine
// code.
func Probe() (jited bool, err error) {
	set, err := maps.New(maps.Size{Rules: 1, Buckets: noBuckets}, bpf.AbiHook{L2Bytes: ethernetBytes})
	if err != nil {
		return false, err
	}
	defer set.Close()
	p, err := Load(set)
	if err != nil {
		return false, err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return false, fmt.Errorf("ask for the program: %w", err)
	}
	_, err = info.JitedSize()
	return err == nil, nil
}

// OtherBuild reports whether another build of shapectl made the program that is attached.
func (h *Hook) OtherBuild() (bool, error) {
	this, err := build()
	return h.Set.Hook().Build != this, err
}

// Offloads are the features of a device that change what programs see.
type Offloads struct {
	HardwareTC bool // filters may run in hardware
	GRO, LRO   bool // packets are merged on their way in
}

// Offloads asks the driver.
func (d Device) Offloads() (Offloads, error) {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return Offloads{}, fmt.Errorf("open ethtool: %w", err)
	}
	defer e.Close()
	features, err := e.Features(d.Name)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return Offloads{}, nil
	}
	if err != nil {
		return Offloads{}, fmt.Errorf("ask for the offloads of %s: %w", d.Name, err)
	}
	return Offloads{
		HardwareTC: features["hw-tc-offload"],
		GRO:        features["rx-gro"] || features["rx-gro-hw"],
		LRO:        features["rx-lro"],
	}, nil
}

// Addresses reports whether a device has addresses that are valid beyond its link.
func (d Device) Addresses() (ipv4, ipv6 bool, err error) {
	l, err := netlink.LinkByIndex(d.Index)
	if err != nil {
		return false, false, fmt.Errorf("look up device %s: %w", d.Name, err)
	}
	addresses, err := netlink.AddrList(l, netlink.FAMILY_ALL)
	if err != nil {
		return false, false, fmt.Errorf("list the addresses of %s: %w", d.Name, err)
	}
	for _, a := range addresses {
		if a.IP.IsGlobalUnicast() {
			ipv4 = ipv4 || a.IP.To4() != nil
			ipv6 = ipv6 || a.IP.To4() == nil
		}
	}
	return ipv4, ipv6, nil
}

// A Tunnel is where a device sends the packets that it wraps.
type Tunnel struct {
	Remote   netip.Addr // the zero Addr where there is not one alone
	Underlay int        // index of the device that they leave by; 0 if it can not be told
}

// tunnels are the kinds of device that wrap packets in packets.
var tunnels = map[string]bool{
	"ipip": true, "sit": true, "gre": true, "gretap": true, "ip6tnl": true, "ip6gre": true, "ip6gretap": true,
	"vti": true, "vti6": true, "vxlan": true, "geneve": true, "wireguard": true,
}

// Tunnel is nil for a device that is none.
func (d Device) Tunnel() *Tunnel {
	if !tunnels[d.Kind] {
		return nil
	}
	t := new(Tunnel)
	l, err := netlink.LinkByIndex(d.Index)
	if err != nil {
		return t
	}
	remote := remoteOf(l)
	if addr, ok := netip.AddrFromSlice(remote); ok && !addr.IsUnspecified() && !addr.IsMulticast() {
		t.Remote = addr.Unmap()
	}
	if v, ok := l.(*netlink.Vxlan); ok && v.VtepDevIndex != 0 {
		t.Underlay = v.VtepDevIndex
	} else if t.Remote.IsValid() {
		if routes, err := netlink.RouteGet(remote); err == nil && len(routes) > 0 {
			t.Underlay = routes[0].LinkIndex
		}
	}
	return t
}

func remoteOf(l netlink.Link) net.IP {
	switch l := l.(type) {
	case *netlink.Iptun:
		return l.Remote
	case *netlink.Sittun:
		return l.Remote
	case *netlink.Gretun:
		return l.Remote
	case *netlink.Gretap:
		return l.Remote
	case *netlink.Ip6tnl:
		return l.Remote
	case *netlink.Vti:
		return l.Remote
	case *netlink.Vxlan:
		return l.Group
	case *netlink.Geneve:
		return l.Remote
	}
	return nil
}

// HookMode is how the first rule of a device would be attached.
func HookMode(o Options) (Mode, error) {
	switch {
	case o.Mode == Clsact:
		return Clsact, nil
	case HasTCX():
		return TCX, nil
	case o.Mode == TCX:
		return TCX, ErrNoTCX
	}
	return Clsact, nil
}

// Capabilities are the effective ones of this thread.
func Capabilities() (uint64, error) {
	status, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		return 0, fmt.Errorf("read the permissions of this process: %w", err)
	}
	for line := range strings.Lines(string(status)) {
		if hex, ok := strings.CutPrefix(line, "CapEff:"); ok {
			return strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
		}
	}
	return 0, errors.New("read the permissions of this process: /proc/thread-self/status does not tell")
}
