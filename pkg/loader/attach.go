package loader

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrNoTCX means that tcx was asked for and the kernel, older than 6.6, has none.
var ErrNoTCX = errors.New("this kernel has no tcx (Linux 6.6 does)")

// ErrNoClsact means that neither tcx nor the qdisc that stands in for it is there.
var ErrNoClsact = errors.New("this kernel has neither tcx nor a clsact qdisc")

type filter = *netlink.BpfFilter

// attachTCX attaches a program ahead of all others: what they do to a packet,
// or where they end the chain, comes after the limit.
func attachTCX(p *ebpf.Program, index int, d policy.Direction) (link.Link, error) {
	if err := step.Try("attach a program to tcx"); err != nil {
		return nil, err
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: p, Attach: netinfo.TCXType(d), Anchor: link.Head()})
	if errors.Is(err, ebpf.ErrNotSupported) {
		return nil, ErrNoTCX
	}
	if err != nil {
		return nil, fmt.Errorf("attach to tcx: %w", err)
	}
	return l, nil
}

func bpfFilters(index int, d policy.Direction) ([]filter, error) {
	all, err := netinfo.Filters(index, d)
	if err != nil {
		return nil, err
	}
	var found []filter
	for _, f := range all {
		if b, ok := f.(filter); ok && b.Id != 0 {
			found = append(found, b)
		}
	}
	return found, nil
}

// attachClsact adds a direct-action filter for a program, at the first priority
// that is free. The clsact qdisc stays for good: others may come to rely on it,
// and empty it does nothing.
func attachClsact(p *ebpf.Program, index int, d policy.Direction) (filter, error) {
	l, err := netlink.LinkByIndex(index)
	if err != nil {
		return nil, fmt.Errorf("look up device %d: %w", index, err)
	}
	if err := ensureClsact(l, d); err != nil {
		return nil, err
	}
	all, err := netinfo.Filters(index, d)
	if err != nil {
		return nil, err
	}
	priority := uint16(1)
	for slices.ContainsFunc(all, func(f netlink.Filter) bool { return f.Attrs().Priority == priority }) {
		priority++
	}
	f := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: index, Parent: netinfo.FilterParent(d), Handle: 1, Protocol: unix.ETH_P_ALL, Priority: priority,
		},
		Fd: p.FD(), Name: programName, DirectAction: true,
	}
	if err := step.Try("add a filter"); err != nil {
		return nil, err
	}
	if err := netlink.FilterAdd(f); err != nil {
		return nil, fmt.Errorf("add a filter to clsact: %w", err)
	}
	return f, nil
}

func ensureClsact(l netlink.Link, d policy.Direction) error {
	qdiscs, err := netlink.QdiscList(l)
	if err != nil {
		return fmt.Errorf("list the qdiscs: %w", err)
	}
	for _, q := range qdiscs {
		switch q.Type() {
		case "clsact":
			return nil
		case "ingress":
			if d == policy.Ingress {
				return nil
			}
			return errors.New("add a clsact qdisc: an ingress qdisc is in its place, which has no egress side; " +
				"if nothing needs it, remove it with 'tc qdisc del dev " + plain.Word(l.Attrs().Name) + " ingress'")
		}
	}
	if err := step.Try("add a clsact qdisc"); err != nil {
		return err
	}
	err = netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0),
	}})
	if errors.Is(err, unix.ENOENT) {
		return ErrNoClsact
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add a clsact qdisc: %w", err)
	}
	return nil
}

// swapClsact puts another program in a filter's place; no packet goes unseen.
func swapClsact(p *ebpf.Program, old filter) error {
	next := *old
	next.Fd, next.Id = p.FD(), 0
	if err := step.Try("replace the program of a filter"); err != nil {
		return err
	}
	if err := netlink.FilterReplace(&next); err != nil {
		return fmt.Errorf("replace the program of a filter: %w", err)
	}
	return nil
}
