package netinfo

import (
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Path returns the programs, filters and qdisc that packets of a direction pass on a device,
// in the kernel's order. In addition to Chain, it has entries at "xdp", "netfilter"
// (nftables chains for this device) and "qdisc" (the root). ours has the programs of
// the caller.
func Path(dev Device, d policy.Direction, ours []ebpf.ProgramID) ([]ChainEntry, error) {
	if dev.IsCgroup() {
		return nil, nil
	}
	chain, err := Chain(dev.Index, d, ours)
	if err != nil {
		return nil, err
	}
	netfilter, err := netfilterChains(dev.Name, d)
	if err != nil {
		return nil, err
	}
	if d == policy.Ingress {
		return slices.Concat(xdp(dev), chain, netfilter), nil
	}
	queue, err := fq.Look(dev.Index)
	root := ChainEntry{At: "qdisc", Name: queue.Kind}
	for _, kind := range queue.Limiters() {
		root.Limits = true
		if !slices.Contains(strings.Fields(root.Name), kind) {
			root.Name += " with " + kind
		}
	}
	return append(slices.Concat(netfilter, chain), root), err // netfilter's egress hook (Linux 5.16) is before tc
}

func xdp(d Device) []ChainEntry {
	if d.XDP == "" {
		return nil
	}
	name := strings.TrimPrefix(ProgramName(ebpf.ProgramID(d.XDPProgram))+", "+d.XDP, ", ")
	return []ChainEntry{{At: "xdp", ID: d.XDPProgram, Name: name}}
}
