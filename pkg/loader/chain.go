package loader

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/policy"
)

// A ChainEntry is a program or filter that a packet meets on a device.
type ChainEntry struct {
	At   string // "tcx" or "clsact"; Path has others
	ID   uint32 // of the program; 0 for what is none
	Name string // of the program or filter, "" where it may not be asked for
	Ours bool
}

// Chain is what packets of a direction meet at the hooks of traffic control, in order.
func (n *Namespace) Chain(dev Device, d policy.Direction) ([]ChainEntry, error) {
	var ours []ebpf.ProgramID
	h, err := n.openHook(dev.Index, d)
	if err != nil {
		return nil, err
	}
	if h != nil {
		defer h.Close()
		if ours, err = h.programs(h.generation); err != nil {
			return nil, err
		}
	}
	var chain []ChainEntry
	ids, err := tcxPrograms(dev.Index, d)
	if err != nil && HasTCX() {
		return nil, err
	}
	for _, id := range ids {
		chain = append(chain, ChainEntry{At: "tcx", ID: uint32(id), Name: nameOf(id), Ours: slices.Contains(ours, id)})
	}
	filters, err := filtersOf(dev.Index, d)
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

// nameOf needs CAP_SYS_ADMIN; without it a program has only its number.
func nameOf(id ebpf.ProgramID) string {
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

// HasTCX reports whether the kernel has tcx, by asking for programs of a device that there may or may not be.
func HasTCX() bool {
	_, err := link.QueryPrograms(link.QueryOptions{Target: 1, Attach: tcxType(policy.Egress)})
	return err == nil || errors.Is(err, unix.ENOENT)
}
