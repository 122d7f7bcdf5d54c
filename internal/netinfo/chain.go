package netinfo

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netmsg"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A ChainEntry is a program or filter that a packet meets on a device.
type ChainEntry struct {
	At   string // "tcx" or "clsact"; Path has others
	ID   uint32 // of the program; 0 for what is none
	Name string // of the program or filter, "" where it may not be asked for
	Ours bool   // the caller named the program as its own
}

// Chain is what packets of a direction meet at the hooks of traffic control, in
// order; ours are the programs of the caller. Without CAP_NET_ADMIN the error wraps fs.ErrPermission.
func Chain(index int, d policy.Direction, ours []ebpf.ProgramID) ([]ChainEntry, error) {
	var chain []ChainEntry
	ids, err := TCXPrograms(index, d)
	if errors.Is(err, fs.ErrPermission) || err != nil && HasTCX() {
		return nil, err
	}
	for _, id := range ids {
		chain = append(chain, ChainEntry{At: "tcx", ID: uint32(id), Name: ProgramName(id), Ours: slices.Contains(ours, id)})
	}
	filters, err := Filters(index, d)
	if err != nil {
		return nil, err
	}
	for _, f := range filters {
		e := ChainEntry{At: "clsact", Name: fmt.Sprintf("%s filter, priority %d", f.Type(), f.Attrs().Priority)}
		switch b, ok := f.(*netlink.BpfFilter); {
		case ok && b.Id != 0:
			e.ID, e.Name = uint32(b.Id), b.Name
			e.Ours = slices.Contains(ours, ebpf.ProgramID(b.Id))
		case f.Attrs().Handle == 0:
			continue // a filter's head, which the kernel lists too
		}
		chain = append(chain, e)
	}
	return chain, nil
}

// TCXPrograms are the programs on a device's tcx hook, first to last; none where the kernel has no tcx.
// Without CAP_NET_ADMIN the error wraps fs.ErrPermission.
func TCXPrograms(index int, d policy.Direction) ([]ebpf.ProgramID, error) {
	result, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: TCXType(d)})
	// ENOENT before the first program of a device; EINVAL where the kernel has no tcx.
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

// HasTCX reports whether the kernel has tcx, by asking for programs of a device that there may or may not be.
func HasTCX() bool {
	_, err := link.QueryPrograms(link.QueryOptions{Target: 1, Attach: TCXType(policy.Egress)})
	return err == nil || errors.Is(err, unix.ENOENT)
}

// TCXType is the direction as tcx calls it.
func TCXType(d policy.Direction) ebpf.AttachType {
	if d == policy.Ingress {
		return ebpf.AttachTCXIngress
	}
	return ebpf.AttachTCXEgress
}

// Filters are all filters of a device's clsact or ingress qdisc, first to last.
func Filters(index int, d policy.Direction) ([]netlink.Filter, error) {
	l, err := netlink.LinkByIndex(index)
	if err != nil {
		return nil, fmt.Errorf("look up device %d: %w", index, err)
	}
	filters, err := netmsg.List(func() ([]netlink.Filter, error) { return netlink.FilterList(l, FilterParent(d)) })
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil // no such qdisc
	}
	if err != nil {
		return nil, fmt.Errorf("list the filters of %s %s: %w", l.Attrs().Name, d, err)
	}
	return filters, nil
}

// FilterParent is the direction as filters of clsact call it.
func FilterParent(d policy.Direction) uint32 {
	if d == policy.Ingress {
		return netlink.HANDLE_MIN_INGRESS
	}
	return netlink.HANDLE_MIN_EGRESS
}

// ProgramName is "" without CAP_SYS_ADMIN, which it takes to ask for programs of others.
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
