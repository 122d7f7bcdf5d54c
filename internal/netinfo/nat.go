package netinfo

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netmsg"
)

// changesSources reports whether the network namespace has a chain in which sources of IPv4 packets may be changed (SNAT): of
// nftables, or of iptables, which uses nftables or has its own table "nat".
func changesSources() (bool, error) {
	// The file is there only if the kernel has these tables.
	tables, err := os.ReadFile("/proc/thread-self/net/ip_tables_names")
	if err == nil && slices.ContainsFunc(bytes.Fields(tables), func(name []byte) bool { return string(name) == "nat" }) {
		return true, nil
	}
	if !hasNFTables() {
		return false, nil
	}
	chains, err := netmsg.List(func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP)
		request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
		return request.Execute(unix.NETLINK_NETFILTER, 0)
	})
	if err == unix.EINVAL || err == unix.EPROTONOSUPPORT {
		return false, nil // the kernel has no nftables
	}
	if err != nil {
		return false, fmt.Errorf("list the chains of nftables: %w", err)
	}
	for _, c := range chains {
		if len(c) < nl.SizeofNfgenmsg {
			return false, errors.New("list the chains of nftables: the kernel's answer is too short")
		}
		if family := c[0]; family != unix.NFPROTO_IPV4 && family != unix.NFPROTO_INET {
			continue
		}
		if changes, err := isSourceNAT(c[nl.SizeofNfgenmsg:]); changes || err != nil {
			return changes, err
		}
	}
	return false, nil
}

// hasNFTables reports whether nftables is in the kernel now. A request would load its module, without which there are no
// chains.
func hasNFTables() bool {
	if _, err := os.Stat("/proc/modules"); errors.Is(err, fs.ErrNotExist) {
		return true // this kernel loads no modules
	}
	if _, err := os.Stat("/sys/module/nf_tables"); err == nil {
		return true
	}
	var name unix.Utsname
	if unix.Uname(&name) != nil {
		return false
	}
	builtin, _ := os.ReadFile("/lib/modules/" + unix.ByteSliceToString(name.Release[:]) + "/modules.builtin")
	return bytes.Contains(builtin, []byte("/nf_tables.ko"))
}

// isSourceNAT reports whether a chain of nftables, by its attributes, is one of type nat for packets that leave.
func isSourceNAT(attributes []byte) (bool, error) {
	var isNAT, leave bool
	err := netmsg.Each(attributes, func(kind uint16, value []byte) error {
		switch kind {
		case unix.NFTA_CHAIN_TYPE:
			isNAT = unix.ByteSliceToString(value) == "nat"
		case unix.NFTA_CHAIN_HOOK:
			return netmsg.Each(value, func(kind uint16, value []byte) error {
				if kind == unix.NFTA_HOOK_HOOKNUM && len(value) == 4 {
					leave = binary.BigEndian.Uint32(value) == unix.NF_INET_POST_ROUTING
				}
				return nil
			})
		}
		return nil
	})
	return isNAT && leave, err
}
