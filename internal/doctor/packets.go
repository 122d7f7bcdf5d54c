package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A packet is the largest that may come to a hook.
type packet struct {
	bytes     uint64
	why, less string // why it may be more than a frame, and how to reduce it; "" if it may not, or if nothing does
}

// An entry is the largest packet that may enter a device. In its texts, DEV stands for the device.
type entry struct {
	device string
	packet
}

// lowered is the gso_max_size that is advised.
const lowered = 4096

// biggest is the largest packet of a hook.
func (f Facts) biggest(s Hook, d *Device) packet {
	if s.Direction == policy.Ingress && !d.Loopback {
		return largest(f.entries(d))
	}
	// With ethtool -K gso off or tso off TCP still passes large packets to the hook:
	// these settings only change where behind it they are segmented.
	local := packet{max(d.FullFrame(), uint64(d.GSOMax)), "TCP sends large packets that are segmented later (GSO)", ""}
	if local.bytes > max(d.FullFrame(), lowered) {
		local.less = fmt.Sprintf("ip link set dev %s gso_max_size 4096", plain.Word(s.Name))
	}
	// No device splits a merged packet before it leaves (ip_finish_output_gso checks the segments only).
	forwarded := largest(f.forwarded(d))
	if forwarded.why == "" {
		return local
	}
	return packet{
		max(local.bytes, forwarded.bytes),
		fmt.Sprintf("packets of this host have up to %d bytes (GSO), and forwarded ones up to %d, as %s", local.bytes, forwarded.bytes, forwarded.why),
		and(local.less, forwarded.less),
	}
}

// forwarded are the entries of packets that may be routed or bridged to a device.
func (f Facts) forwarded(d *Device) (entries []entry) {
	routed := slices.ContainsFunc(f.Devices, func(o Device) bool { return o.Index != d.Index && (o.Forwards4 || o.Forwards6) })
	master := f.byIndex[d.Master]
	bridged := master != nil && master.Kind == "bridge"
	for i := range f.Devices {
		o := &f.Devices[i]
		if o.Index != d.Index && o.Up && !silent[o.Kind] && !o.Loopback && !stacked[o.Kind] && (routed || bridged && o.Master == d.Master) {
			entries = append(entries, f.entries(o)...)
		}
	}
	return entries
}

// silent are the kinds of device that no packet enters first.
var silent = map[string]bool{"dummy": true, "ifb": true}

// stacked are the kinds of device whose packets enter another one first.
var stacked = map[string]bool{
	"bridge": true, "bond": true, "team": true, "vlan": true, "macvlan": true, "ipvlan": true, "vrf": true,
}

// entries are those of a device or, if it is stacked, of the devices below.
func (f Facts) entries(d *Device) (entries []entry) {
	if stacked[d.Kind] {
		for i := range f.Devices {
			if o := &f.Devices[i]; o.Master == d.Index || o.Index == d.Parent {
				entries = append(entries, f.entries(o)...)
			}
		}
		if entries != nil {
			return entries
		}
	}
	frame := d.FullFrame()
	e := entry{device: d.Name}
	switch {
	case d.Kind == "veth" || d.Kind == "netkit":
		gso := d.GSOMax // of the other end, most likely, if that is in another namespace
		if peer := f.byIndex[d.Peer]; peer != nil {
			gso = peer.GSOMax
		}
		e.packet = packet{max(frame, uint64(gso)), "packets of the other end of DEV enter before they are segmented (GSO)", ""}
		if e.bytes > max(frame, lowered) {
			e.less = "ip link set dev PEER gso_max_size 4096 at the other end of DEV"
		}
	case d.Kind == "tuntap":
		e.packet = packet{max(frame, 1<<16), "packets of the program that has DEV enter before they are segmented (GSO)",
			"if DEV is of a virtual machine, ethtool -K with tso off there"}
	case d.Offloads.LRO:
		e.packet = packet{max(frame, uint64(d.GROMax)), "frames are merged on arrival at DEV (LRO, GRO)", "ethtool -K DEV lro off gro off"}
	case d.Offloads.GRO || stacked[d.Kind]:
		e.packet = packet{max(frame, uint64(d.GROMax)), "frames are merged on arrival at DEV (GRO)", "ethtool -K DEV gro off"}
	default:
		e.bytes = frame
	}
	return []entry{e}
}

// largest is the largest packet of several entries. It names the devices for each text once.
func largest(entries []entry) (p packet) {
	var order []packet
	names := map[packet][]string{}
	for _, e := range entries {
		p.bytes = max(p.bytes, e.bytes)
		text := packet{why: e.why, less: e.less}
		if e.why == "" {
			continue
		}
		if names[text] == nil {
			order = append(order, text)
		}
		names[text] = append(names[text], e.device)
	}
	for _, text := range order {
		list := plain.List(names[text])
		p.why = and(p.why, strings.ReplaceAll(text.why, "DEV", list))
		switch {
		case text.less != "" && len(names[text]) > 1:
			p.less = and(p.less, text.less+" (DEV: "+list+")")
		default:
			p.less = and(p.less, strings.ReplaceAll(text.less, "DEV", plain.Word(list)))
		}
	}
	return p
}

// and joins two texts, each of which may be empty.
func and(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + ", and " + b
}
