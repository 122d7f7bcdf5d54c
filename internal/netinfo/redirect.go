package netinfo

import (
	"errors"
	"io/fs"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netmsg"
	"github.com/shapectl/shapectl/pkg/policy"
)

// MayRedirectTo reports whether a filter of a device redirects packets to the one with an index, or if something may whose
// actions cannot be read: a program, a filter of another kind, or a chain of nftables.
func MayRedirectTo(index int) (bool, error) {
	links, err := netmsg.List(netlink.LinkList)
	if err != nil {
		return false, err
	}
	for _, l := range links {
		if may, err := mayRedirect(l, index); may || err != nil {
			return may, err
		}
	}
	return false, nil
}

func mayRedirect(l netlink.Link, to int) (bool, error) {
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		ids, err := TCXPrograms(l.Attrs().Index, d)
		if errors.Is(err, fs.ErrPermission) || err != nil && HasTCX() {
			return false, err
		}
		for _, id := range ids {
			if !strings.HasPrefix(ProgramName(id), "shapectl") {
				return true, nil
			}
		}
		chains, err := netfilterChains(l.Attrs().Name, d)
		if len(chains) > 0 || err != nil {
			return len(chains) > 0, err
		}
	}
	qdiscs, err := netmsg.List(func() ([]netlink.Qdisc, error) { return netlink.QdiscList(l) })
	if err != nil {
		return false, err
	}
	parents := []uint32{FilterParent(policy.Egress), FilterParent(policy.Ingress)}
	for _, q := range qdiscs {
		if q.Attrs().Parent != netlink.HANDLE_CLSACT && q.Attrs().Handle != 0 {
			parents = append(parents, q.Attrs().Handle)
		}
	}
	for _, parent := range parents {
		filters, err := netmsg.List(func() ([]netlink.Filter, error) { return netlink.FilterList(l, parent) })
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
			continue // it has no filters
		}
		if err != nil {
			return false, err
		}
		for _, f := range filters {
			if filterMayRedirect(f, to) {
				return true, nil
			}
		}
	}
	return false, nil
}

func filterMayRedirect(f netlink.Filter, to int) bool {
	var actions []netlink.Action
	switch f := f.(type) {
	case *netlink.U32:
		actions = f.Actions
	case *netlink.FwFilter:
		actions = f.Actions
	case *netlink.Flower:
		actions = f.Actions
	case *netlink.MatchAll:
		actions = f.Actions
	case *netlink.BpfFilter:
		return f.Id != 0 && !strings.HasPrefix(f.Name, "shapectl")
	default:
		return true
	}
	for _, a := range actions {
		if m, ok := a.(*netlink.MirredAction); ok && m.Ifindex == to {
			return true
		}
	}
	return false
}
