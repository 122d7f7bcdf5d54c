package netinfo

import (
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

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
		path, err := Path(describe(l), d, nil)
		if err != nil {
			return false, err
		}
		for _, e := range path {
			if e.At == "netfilter" || e.At != "xdp" && e.ID != 0 && !strings.HasPrefix(e.Name, "shapectl") {
				return true, nil
			}
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
		filters, err := filtersOf(l.Attrs().Index, parent)
		if err != nil {
			return false, err
		}
		if slices.ContainsFunc(filters, func(f netlink.Filter) bool { return filterMayRedirect(f, to) }) {
			return true, nil
		}
	}
	return false, nil
}

func filterMayRedirect(f netlink.Filter, to int) bool {
	if b, ok := f.(*netlink.BpfFilter); ok {
		return b.Id != 0 && !strings.HasPrefix(b.Name, "shapectl")
	}
	actions, known := actionsOf(f)
	return !known || slices.ContainsFunc(actions, func(a netlink.Action) bool {
		m, ok := a.(*netlink.MirredAction)
		return ok && m.Ifindex == to
	})
}
