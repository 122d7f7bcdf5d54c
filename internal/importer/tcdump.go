package importer

import (
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netmsg"
)

// A Dump is a device's traffic control as the kernel lists it: netlink messages that begin
// with struct tcmsg.
type Dump struct {
	Device  string
	L2Bytes uint8 // length of the link header that shapectl counts: 14, or 0 for none
	IFB     bool  // it is an ifb device
	Qdiscs  [][]byte
	Classes [][]byte
	Filters map[uint32][][]byte // by qdisc, class or hook
	Roots   []Root
	Devices map[uint32]string // the names of all devices, by index
}

// A Root is the first hash table of u32 filters. For each place of a qdisc, the kernel lists
// the tables of all places.
type Root struct {
	At    uint32 // as in Dump.Filters
	Info  uint32 // priority and protocol, as in struct tcmsg
	Chain uint32
	Table uint32 // its handle
}

// Places of qdiscs and filters other than a qdisc or class.
const (
	atRoot    = netlink.HANDLE_ROOT
	atIngress = netlink.HANDLE_MIN_INGRESS // of clsact
	atEgress  = netlink.HANDLE_MIN_EGRESS
)

// ReadTC reads the traffic control of a device in the calling thread's network namespace.
// l2Bytes is the length of the link header that shapectl counts. It needs no permissions.
func ReadTC(device string, index int, l2Bytes uint8) (d Dump, err error) {
	d = Dump{Device: device, L2Bytes: l2Bytes, Filters: map[uint32][][]byte{}, Devices: map[uint32]string{}}
	links, err := netmsg.List(netlink.LinkList)
	if err != nil {
		return d, fmt.Errorf("list the devices: %w", err)
	}
	for _, l := range links {
		d.Devices[uint32(l.Attrs().Index)] = l.Attrs().Name
		d.IFB = d.IFB || l.Attrs().Index == index && l.Type() == "ifb"
	}
	if d.Qdiscs, err = dump(unix.RTM_GETQDISC, unix.RTM_NEWQDISC, index, 0); err != nil {
		return d, fmt.Errorf("list the qdiscs of %s: %w", device, err)
	}
	if d.Classes, err = dump(unix.RTM_GETTCLASS, unix.RTM_NEWTCLASS, index, 0); err != nil {
		return d, fmt.Errorf("list the classes of %s: %w", device, err)
	}
	c, err := parse(d)
	if err != nil {
		return d, err
	}
	for _, parent := range c.places() {
		found, err := dump(unix.RTM_GETTFILTER, unix.RTM_NEWTFILTER, index, parent)
		if err != nil {
			return d, fmt.Errorf("list the filters of %s at %s: %w", device, handle(parent), err)
		}
		if len(found) == 0 {
			continue
		}
		d.Filters[parent] = found
		if err := d.findRoots(index, parent, found); err != nil {
			return d, err
		}
	}
	return d, nil
}

// findRoots adds the roots of the filters at a place.
func (d *Dump) findRoots(index int, parent uint32, filters [][]byte) error {
	objects, err := d.objects("a filter", filters)
	if err != nil {
		return err
	}
	known := map[Root]bool{}
	for i, o := range objects {
		r := Root{At: parent, Info: o.info, Chain: o.chain()}
		if o.kind != "u32" || known[r] {
			continue
		}
		known[r] = true
		q := nl.NewNetlinkRequest(unix.RTM_GETTFILTER, 0)
		request := &nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(index), Handle: u32Root, Parent: parent, Info: o.info}
		if of := int32(fields(filters[i]).u32(4)); of != int32(index) {
			request.Ifindex, request.Parent = of, o.parent // a shared block
		}
		q.AddData(request)
		q.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated(o.kind)))
		q.AddData(nl.NewRtAttr(nl.TCA_CHAIN, nl.Uint32Attr(r.Chain)))
		answer, err := q.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWTFILTER)
		if err != nil {
			return fmt.Errorf("find the first hash table of %s at %s pref %d: %w", d.Device, handle(parent), o.priority(), err)
		}
		for _, m := range answer {
			r.Table = fields(m).u32(8)
			d.Roots = append(d.Roots, r)
		}
	}
	return nil
}

// dump requests a list. The kernel lists the qdiscs of all devices.
func dump(get, answer, index int, parent uint32) (found [][]byte, err error) {
	all, err := netmsg.List(func() ([][]byte, error) {
		r := nl.NewNetlinkRequest(get, unix.NLM_F_DUMP)
		r.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(index), Parent: parent})
		return r.Execute(unix.NETLINK_ROUTE, uint16(answer))
	})
	if err != nil {
		return nil, err
	}
	for _, m := range all {
		// Filters of a shared block have no device.
		if i := int(int32(fields(m).u32(4))); i == index || get == unix.RTM_GETTFILTER {
			found = append(found, m)
		}
	}
	return found, nil
}
