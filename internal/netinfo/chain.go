package netinfo

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netmsg"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A ChainEntry is a program or filter that packets pass on a device.
type ChainEntry struct {
	At   string // "tcx" or "clsact"; Path has more
	ID   uint32 // of the program; 0 if the entry is no program
	Name string // of the program or filter; "" without permission to read it
	Ours bool   // the program belongs to the caller
	// Limits: it limits the rate of packets, or of some of them, and is not ours.
	Limits bool
}

// IsShapectl reports whether it is a program of shapectl, whoever attached it.
func (e ChainEntry) IsShapectl() bool { return strings.HasPrefix(e.Name, "shapectl") }

// LookName is the kernel's name of programs of shapectl that only look at packets, for as long as a process lives.
const LookName = "shapectl_look"

// Chain returns the programs and filters of traffic control that packets of a direction
// pass, in order, without those that only look. ours has the programs of the caller. Without CAP_NET_ADMIN the error
// wraps fs.ErrPermission.
func Chain(index int, d policy.Direction, ours []ebpf.ProgramID) ([]ChainEntry, error) {
	var chain []ChainEntry
	if IsCgroup(index) {
		return nil, nil
	}
	ids, err := TCXPrograms(index, d)
	if errors.Is(err, fs.ErrPermission) || err != nil && HasTCX() {
		return nil, err
	}
	for _, id := range ids {
		if name := ProgramName(id); name != LookName {
			chain = append(chain, ChainEntry{At: "tcx", ID: uint32(id), Name: name, Ours: slices.Contains(ours, id)})
		}
	}
	filters, err := Filters(index, d)
	if err != nil {
		return nil, err
	}
	for _, f := range filters {
		e := ChainEntry{At: "clsact", Name: fmt.Sprintf("%s filter, priority %d", f.Type(), f.Attrs().Priority), Limits: polices(f)}
		switch b, ok := f.(*netlink.BpfFilter); {
		case ok && b.Id != 0:
			e.ID, e.Name = uint32(b.Id), b.Name
			e.Ours = slices.Contains(ours, ebpf.ProgramID(b.Id))
		case f.Attrs().Handle == 0:
			continue // the head of a filter, which the kernel also lists
		}
		chain = append(chain, e)
	}
	return slices.Compact(chain), nil // the kernel lists some filters several times, once per table
}

// polices reports whether a filter limits packets to a rate.
func polices(f netlink.Filter) bool {
	var actions []netlink.Action
	switch f := f.(type) {
	case *netlink.U32:
		if actions = f.Actions; f.Police != nil {
			return true
		}
	case *netlink.FwFilter:
		if actions = f.Actions; f.Police != nil {
			return true
		}
	case *netlink.Flower:
		actions = f.Actions
	case *netlink.MatchAll:
		actions = f.Actions
	}
	return slices.ContainsFunc(actions, func(a netlink.Action) bool { return a.Type() == "police" })
}

// TCXPrograms returns the programs on a device's tcx hook, in order; none if the kernel has no tcx.
// Without CAP_NET_ADMIN the error wraps fs.ErrPermission.
func TCXPrograms(index int, d policy.Direction) ([]ebpf.ProgramID, error) {
	result, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: TCXType(d)})
	for errors.Is(err, unix.ENOSPC) { // one was attached between the library's question how many there are and which
		result, err = link.QueryPrograms(link.QueryOptions{Target: index, Attach: TCXType(d)})
	}
	// ENOENT before a device's first program; EINVAL if the kernel has no tcx.
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) && !HasTCX() {
		return nil, nil
	}
	if errors.Is(err, ebpf.ErrNotSupported) { // the library takes a refused query for one that the kernel does not know
		err = unix.EPERM
	}
	if err != nil {
		return nil, fmt.Errorf("list the tcx programs of device %d %s: %w", index, d, err)
	}
	ids := make([]ebpf.ProgramID, len(result.Programs))
	for i, p := range result.Programs {
		ids[i] = p.ID
	}
	return ids, nil
}

// CgroupPrograms returns the programs that packets of a cgroup pass, also those of cgroups above.
func CgroupPrograms(name string, d policy.Direction) (ids []ebpf.ProgramID, err error) {
	dir, _, err := OpenCgroup(name)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	const effective = 1 // BPF_F_QUERY_EFFECTIVE
	result, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: CgroupType(d), QueryFlags: effective})
	if err != nil {
		return nil, fmt.Errorf("list the programs of %s %s: %w", name, d, err)
	}
	for _, p := range result.Programs {
		ids = append(ids, p.ID)
	}
	return ids, nil
}

// HasTCX reports whether the kernel has tcx. It queries a device that may not exist.
func HasTCX() bool {
	_, err := link.QueryPrograms(link.QueryOptions{Target: 1, Attach: TCXType(policy.Egress)})
	return err == nil || errors.Is(err, unix.ENOENT)
}

// TCXType returns the attach type of tcx for a direction.
func TCXType(d policy.Direction) ebpf.AttachType {
	if d == policy.Ingress {
		return ebpf.AttachTCXIngress
	}
	return ebpf.AttachTCXEgress
}

// CgroupType returns the attach type of cgroups for a direction.
func CgroupType(d policy.Direction) ebpf.AttachType {
	if d == policy.Ingress {
		return ebpf.AttachCGroupInetIngress
	}
	return ebpf.AttachCGroupInetEgress
}

// Filters returns all filters of a device's clsact or ingress qdisc, in order.
func Filters(index int, d policy.Direction) ([]netlink.Filter, error) {
	filters, err := filtersOf(index, FilterParent(d))
	if d == policy.Egress && len(filters) > 0 {
		// An ingress qdisc has one list of filters, which the kernel returns for both directions.
		if qdisc, err := FilterQdisc(linkOf(index)); qdisc != "clsact" || err != nil {
			return nil, err
		}
	}
	return filters, err
}

// filtersOf returns the filters of a qdisc; none if there is no such qdisc, or it has no filters.
func filtersOf(index int, parent uint32) ([]netlink.Filter, error) {
	filters, err := netmsg.List(func() ([]netlink.Filter, error) { return netlink.FilterList(linkOf(index), parent) })
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the filters of device %d: %w", index, err)
	}
	return filters, nil
}

// FilterQdisc is the kind of a device's qdisc for filters on both hooks: clsact, ingress, or "" for none.
func FilterQdisc(l netlink.Link) (string, error) {
	qdiscs, err := netmsg.List(func() ([]netlink.Qdisc, error) { return netlink.QdiscList(l) })
	if err != nil {
		return "", fmt.Errorf("list the qdiscs of device %d: %w", l.Attrs().Index, err)
	}
	for _, q := range qdiscs {
		if q.Attrs().Parent == netlink.HANDLE_CLSACT { // of both kinds
			return q.Type(), nil
		}
	}
	return "", nil
}

// FilterParent returns the parent of clsact filters for a direction.
func FilterParent(d policy.Direction) uint32 {
	if d == policy.Ingress {
		return netlink.HANDLE_MIN_INGRESS
	}
	return netlink.HANDLE_MIN_EGRESS
}

// ProgramName returns "" without CAP_SYS_ADMIN, which is needed to read other users' programs.
func ProgramName(id ebpf.ProgramID) string {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return ""
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return ""
	}
	return info.Name
}
