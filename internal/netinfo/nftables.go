package netinfo

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netmsg"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A netfilterChain is a chain of nftables.
type netfilterChain struct {
	family      uint8
	table, name string
	kind        string
	hook        uint32
	priority    int32
	devices     []string // a trailing * matches any suffix
}

// From linux/netfilter.h and nf_tables.h.
const (
	inetIngress      = 5 // NF_INET_INGRESS
	hookDevices      = 4 // NFTA_HOOK_DEVS
	devicePrefixAttr = 2 // NFTA_DEVICE_PREFIX
)

// nftables returns the chains that is selects.
func nftables(is func(netfilterChain) bool) (found []netfilterChain, err error) {
	if !hasNftables() {
		return nil, nil
	}
	messages, err := netmsg.List(func() ([][]byte, error) {
		r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP)
		r.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC})
		return r.Execute(unix.NETLINK_NETFILTER, 0)
	})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil // the kernel has no nftables
	}
	if err != nil {
		return nil, fmt.Errorf("list the chains of nftables: %w", err)
	}
	for _, m := range messages {
		c, err := parseChain(m)
		if err != nil {
			return nil, fmt.Errorf("read the chains of nftables: %w", err)
		}
		if is(c) {
			found = append(found, c)
		}
	}
	return found, nil
}

// changesSources reports whether the network namespace has a chain in which sources of packets of a family may be changed (SNAT):
// of nftables, or of iptables, which uses nftables or has its own table "nat".
func changesSources(ipv6 bool) (bool, error) {
	family, names := uint8(unix.NFPROTO_IPV4), "ip_tables_names"
	if ipv6 {
		family, names = unix.NFPROTO_IPV6, "ip6_tables_names"
	}
	// The file is there only if the kernel has these tables.
	tables, err := os.ReadFile("/proc/thread-self/net/" + names)
	if err == nil && slices.ContainsFunc(bytes.Fields(tables), func(name []byte) bool { return string(name) == "nat" }) {
		return true, nil
	}
	found, err := nftables(func(c netfilterChain) bool {
		return (c.family == family || c.family == unix.NFPROTO_INET) && c.kind == "nat" && c.hook == unix.NF_INET_POST_ROUTING
	})
	return len(found) > 0, err
}

// netfilterChains returns the nftables chains on a direction of a device, in order of execution.
func netfilterChains(device string, d policy.Direction) ([]ChainEntry, error) {
	found, err := nftables(func(c netfilterChain) bool { return c.on(device, d) })
	sort.SliceStable(found, func(i, j int) bool { return found[i].priority < found[j].priority })
	var entries []ChainEntry
	for _, c := range found {
		family := "netdev"
		if c.family == unix.NFPROTO_INET {
			family = "inet"
		}
		entries = append(entries, ChainEntry{
			At: "netfilter", Name: fmt.Sprintf("chain %s %s %s (priority %d)", family, c.table, c.name, c.priority),
		})
	}
	return entries, err
}

// hasNftables reports whether there can be chains. A query would load the kernel module,
// which a reading command must not do.
func hasNftables() bool {
	if exists("/sys/module/nf_tables") || !exists("/proc/modules") {
		return true
	}
	var name unix.Utsname
	if unix.Uname(&name) != nil {
		return true
	}
	builtin, err := os.ReadFile(filepath.Join("/lib/modules", unix.ByteSliceToString(name.Release[:]), "modules.builtin"))
	return err == nil && bytes.Contains(builtin, []byte("/nf_tables.ko"))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func parseChain(message []byte) (c netfilterChain, err error) {
	if len(message) < nl.SizeofNfgenmsg {
		return c, unix.EINVAL
	}
	c.family = message[0]
	err = netmsg.Each(message[nl.SizeofNfgenmsg:], func(kind uint16, value []byte) error {
		switch kind {
		case unix.NFTA_CHAIN_TABLE:
			c.table = unix.ByteSliceToString(value)
		case unix.NFTA_CHAIN_NAME:
			c.name = unix.ByteSliceToString(value)
		case unix.NFTA_CHAIN_TYPE:
			c.kind = unix.ByteSliceToString(value)
		case unix.NFTA_CHAIN_HOOK:
			return netmsg.Each(value, c.parseHook)
		}
		return nil
	})
	return c, err
}

func (c *netfilterChain) parseHook(kind uint16, value []byte) error {
	switch {
	case kind == unix.NFTA_HOOK_HOOKNUM && len(value) == 4:
		c.hook = binary.BigEndian.Uint32(value)
	case kind == unix.NFTA_HOOK_PRIORITY && len(value) == 4:
		c.priority = int32(binary.BigEndian.Uint32(value))
	case kind == hookDevices: // has all devices; NFTA_HOOK_DEV only repeats a single one
		return netmsg.Each(value, func(kind uint16, value []byte) error {
			name := unix.ByteSliceToString(value)
			if kind == devicePrefixAttr {
				name += "*"
			}
			c.devices = append(c.devices, name)
			return nil
		})
	}
	return nil
}

func (c netfilterChain) on(device string, d policy.Direction) bool {
	var here bool
	switch c.family {
	case unix.NFPROTO_NETDEV:
		here = c.hook == unix.NF_NETDEV_EGRESS && d == policy.Egress || c.hook == unix.NF_NETDEV_INGRESS && d == policy.Ingress
	case unix.NFPROTO_INET:
		here = c.hook == inetIngress && d == policy.Ingress
	}
	return here && slices.ContainsFunc(c.devices, func(name string) bool {
		prefix, all := strings.CutSuffix(name, "*")
		return name == device || all && strings.HasPrefix(device, prefix)
	})
}
