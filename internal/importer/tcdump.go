package importer

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netmsg"
)

// A Dump is a device's traffic control as the kernel lists it. The typed lists of package netlink lack what the import needs:
// conditions and actions that the package does not know, actions of basic filters, rates of 64 bits, overheads.
type Dump struct {
	Device  string
	L2Bytes uint8 // length of the link header that shapectl counts: 14, or 0 for none
	IFB     bool  // it is an ifb device
	Qdiscs  []object
	Classes []object
	Filters map[uint32][]object // by qdisc, class or hook
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
	d = Dump{Device: device, L2Bytes: l2Bytes, Filters: map[uint32][]object{}, Devices: map[uint32]string{}}
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
	for _, at := range d.places() {
		if d.Filters[at], err = dump(unix.RTM_GETTFILTER, unix.RTM_NEWTFILTER, index, at); err != nil {
			return d, fmt.Errorf("list the filters of %s at %s: %w", device, handle(at), err)
		}
		if err := d.findRoots(index, at, d.Filters[at]); err != nil {
			return d, err
		}
	}
	return d, nil
}

func (d *Dump) findRoots(index int, parent uint32, filters []object) error {
	for i, o := range filters {
		if o.kind != "u32" || slices.ContainsFunc(filters[:i], func(b object) bool { return b.kind == "u32" && b.Info == o.Info && b.chain() == o.chain() }) {
			continue
		}
		q := nl.NewNetlinkRequest(unix.RTM_GETTFILTER, 0)
		request := &nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(index), Handle: u32Root, Parent: parent, Info: o.Info}
		if o.Ifindex != int32(index) {
			request.Ifindex, request.Parent = o.Ifindex, o.Parent // a shared block
		}
		q.AddData(request)
		q.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated(o.kind)))
		q.AddData(nl.NewRtAttr(nl.TCA_CHAIN, nl.Uint32Attr(o.chain())))
		answer, err := q.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWTFILTER)
		if err != nil {
			return fmt.Errorf("find the first hash table of %s at %s pref %d: %w", d.Device, handle(parent), o.priority(), err)
		}
		for _, m := range answer {
			d.Roots = append(d.Roots, Root{At: parent, Info: o.Info, Chain: o.chain(), Table: decode[nl.TcMsg](m).Handle})
		}
	}
	return nil
}

// dump requests a list. The kernel lists the qdiscs of all devices.
func dump(get, answer, index int, parent uint32) (found []object, err error) {
	all, err := netmsg.List(func() ([][]byte, error) {
		r := nl.NewNetlinkRequest(get, unix.NLM_F_DUMP)
		r.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(index), Parent: parent})
		return r.Execute(unix.NETLINK_ROUTE, uint16(answer))
	})
	for i := 0; i < len(all) && err == nil; i++ {
		var o object
		// Filters of a shared block have no device.
		if o, err = parseObject(all[i]); o.Ifindex == int32(index) || get == unix.RTM_GETTFILTER {
			found = append(found, o)
		}
	}
	return found, err
}

// decode reads a structure of the kernel. Its length depends on the kernel version; missing fields are 0.
func decode[T any](b []byte) (v T) {
	whole := make([]byte, binary.Size(v))
	copy(whole, b)
	_, _ = binary.Decode(whole, binary.NativeEndian, &v) // it is long enough
	return v
}

type attributes map[uint16][]byte

func parseAttributes(b []byte) (attributes, error) {
	a := attributes{}
	return a, netmsg.Each(b, func(kind uint16, value []byte) error { a[kind] = value; return nil })
}

func (a attributes) u32(t uint16) uint32 { return decode[uint32](a[t]) }

func (a attributes) text(t uint16) string { return unix.ByteSliceToString(a[t]) }

// others returns the types that are not among known.
func (a attributes) others(known ...uint16) (types []uint16) {
	for t := range a {
		if !slices.Contains(known, t) {
			types = append(types, t)
		}
	}
	slices.Sort(types)
	return types
}

// An object is a qdisc, class or filter.
type object struct {
	nl.TcMsg
	message    []byte
	kind       string
	attributes attributes
	options    attributes
	actions    []action
}

// An action of a filter.
type action struct {
	kind string
	attributes
}

// filterKinds has the attributes of the kinds of filters that can be read; 0 for none.
var filterKinds = map[string]struct{ class, actions, police uint16 }{
	"u32":      {nl.TCA_U32_CLASSID, nl.TCA_U32_ACT, nl.TCA_U32_POLICE},
	"matchall": {nl.TCA_MATCHALL_CLASSID, nl.TCA_MATCHALL_ACT, 0},
	"flower":   {nl.TCA_FLOWER_CLASSID, nl.TCA_FLOWER_ACT, 0},
}

func parseObject(m []byte) (o object, err error) {
	o.TcMsg, o.message = decode[nl.TcMsg](m), m
	if o.attributes, err = parseAttributes(m[min(nl.SizeofTcMsg, len(m)):]); err != nil {
		return o, err
	}
	o.kind = o.attributes.text(nl.TCA_KIND)
	kind, known := filterKinds[o.kind]
	if !known && !slices.Contains([]string{"htb", "tbf", "fq", "cake", "bpf"}, o.kind) {
		return o, nil // the options of other kinds may be a structure without attributes
	}
	if o.options, err = parseAttributes(o.attributes[nl.TCA_OPTIONS]); err != nil {
		return o, err
	}
	if police := o.options[kind.police]; kind.police != 0 && len(police) > 0 { // the format that is older than lists
		a, err := parseAttributes(police)
		if err != nil {
			return o, err
		}
		o.actions = append(o.actions, action{"police", a})
	}
	if kind.actions == 0 {
		return o, nil
	}
	list, err := parseAttributes(o.options[kind.actions])
	for _, order := range list.others() { // the types give the order
		entry, bad := parseAttributes(list[order])
		if bad != nil {
			return o, bad
		}
		a := action{kind: entry.text(nl.TCA_ACT_KIND)}
		if a.attributes, bad = parseAttributes(entry[nl.TCA_ACT_OPTIONS]); bad != nil {
			return o, bad
		}
		o.actions = append(o.actions, a)
	}
	return o, err
}

func (o object) priority() uint16 { return uint16(o.Info >> 16) }

func (o object) protocol() uint16 {
	return binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, uint16(o.Info)))
}

// chain returns the chain of a filter. Packets begin in chain 0.
func (o object) chain() uint32 { return o.attributes.u32(nl.TCA_CHAIN) }

func (d Dump) parents() map[uint32]bool {
	all := map[uint32]bool{}
	for _, class := range d.Classes {
		if class.Parent>>16 == class.Handle>>16 {
			all[class.Parent] = true
		}
	}
	return all
}

// places returns the places where filters can be.
func (d Dump) places() (at []uint32) {
	for _, q := range d.Qdiscs {
		switch {
		case q.kind == "clsact":
			at = append(at, atIngress, atEgress)
		case q.Handle != 0:
			at = append(at, q.Handle)
		}
	}
	parents := d.parents()
	for _, class := range d.Classes {
		if parents[class.Handle] {
			at = append(at, class.Handle)
		}
	}
	return at
}

// handle formats a handle like tc.
func handle(h uint32) string {
	switch {
	case h == atIngress:
		return "ingress"
	case h == atEgress:
		return "egress"
	case h&0xffff == 0:
		return fmt.Sprintf("%x:", h>>16)
	}
	return fmt.Sprintf("%x:%x", h>>16, h&0xffff)
}
