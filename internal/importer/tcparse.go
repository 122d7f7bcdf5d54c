package importer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Constants that package nl lacks: linux/pkt_cls.h, linux/tc_act and linux/pkt_sched.h.
const (
	policeRate64     = 8
	policePeakRate64 = 9
	policePktRate64  = 10

	u32Flags      = 11
	u32Pad        = 12
	matchAllCount = 4

	basicClass, basicEmatches, basicActions, basicPolice = 1, 2, 3, 4
	ematchHeader                                         = 1

	stabBase = 1

	cakeRate64, cakeCells, cakeMode, cakeOverhead, cakeRaw, cakeMPU = 2, 4, 5, 6, 12, 14
	cakeATM                                                         = 1 // of cakeCells
	cakeFlows                                                       = 4 // of cakeMode

	sizeofTcmsg = 20
)

// fields is a structure of the kernel. Its length depends on the kernel version; missing
// fields are 0.
type fields []byte

func (f fields) bytes(at, n int) []byte {
	if at+n > len(f) {
		return make([]byte, n)
	}
	return f[at : at+n]
}

func (f fields) u8(at int) uint8    { return f.bytes(at, 1)[0] }
func (f fields) u16(at int) uint16  { return binary.NativeEndian.Uint16(f.bytes(at, 2)) }
func (f fields) u32(at int) uint32  { return binary.NativeEndian.Uint32(f.bytes(at, 4)) }
func (f fields) u64(at int) uint64  { return binary.NativeEndian.Uint64(f.bytes(at, 8)) }
func (f fields) be32(at int) uint32 { return binary.BigEndian.Uint32(f.bytes(at, 4)) }

// attributes are netlink attributes by type.
type attributes map[uint16]fields

// parseAttributes is nl.ParseRouteAttr for messages that may be cut off.
func parseAttributes(b []byte) (attributes, error) {
	a := attributes{}
	for f := fields(b); len(f) >= unix.SizeofRtAttr; {
		length := int(f.u16(0))
		if length < unix.SizeofRtAttr || length > len(f) {
			return nil, fmt.Errorf("an attribute has %d bytes, and %d are left", length, len(f))
		}
		a[f.u16(2)&nl.NLA_TYPE_MASK] = f[unix.SizeofRtAttr:length]
		const aligned = unix.RTA_ALIGNTO
		f = f[min((length+aligned-1)/aligned*aligned, len(f)):]
	}
	return a, nil
}

// nested returns the attributes within one, which may be missing.
func (a attributes) nested(t uint16) (attributes, error) { return parseAttributes(a[t]) }

// text returns a string without the terminating zero.
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
	kind           string
	handle, parent uint32
	info           uint32
	attributes     attributes
	options        attributes
}

func parseObject(m []byte) (o object, err error) {
	if len(m) < sizeofTcmsg {
		return o, errors.New("the message is too short")
	}
	head := fields(m)
	o = object{handle: head.u32(8), parent: head.u32(12), info: head.u32(16)}
	if o.attributes, err = parseAttributes(m[sizeofTcmsg:]); err != nil {
		return o, err
	}
	o.kind = o.attributes.text(nl.TCA_KIND)
	switch o.kind {
	case "htb", "tbf", "fq", "cake", "u32", "flower", "matchall", "fw", "basic", "bpf":
		// The options of other kinds may be a structure without attributes.
		o.options, err = o.attributes.nested(nl.TCA_OPTIONS)
	}
	return o, err
}

// priority orders the filters of a place.
func (o object) priority() uint16 { return uint16(o.info >> 16) }

// protocol returns the protocol of a filter's packets.
func (o object) protocol() uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], uint16(o.info))
	return binary.BigEndian.Uint16(b[:])
}

// A control is a parsed Dump.
type control struct {
	Dump
	qdiscs, classes []object
	filters         map[uint32][]object
	inner           map[uint32]bool    // classes with children
	seen            map[uint32]bool    // places whose filters were read
	met             map[u32Filter]bool // filters that packets can reach
}

func parse(d Dump) (c control, err error) {
	c = control{Dump: d, filters: map[uint32][]object{}, inner: map[uint32]bool{}, seen: map[uint32]bool{}, met: map[u32Filter]bool{}}
	if c.qdiscs, err = d.objects("a qdisc", d.Qdiscs); err != nil {
		return c, err
	}
	if c.classes, err = d.objects("a class", d.Classes); err != nil {
		return c, err
	}
	for _, class := range c.classes {
		if class.parent>>16 == class.handle>>16 {
			c.inner[class.parent] = true
		}
	}
	for parent, messages := range d.Filters {
		if c.filters[parent], err = d.objects("a filter", messages); err != nil {
			return c, err
		}
	}
	return c, nil
}

func (d Dump) objects(what string, messages [][]byte) (all []object, err error) {
	for _, m := range messages {
		o, err := parseObject(m)
		if err != nil {
			return nil, fmt.Errorf("read %s of %s: %w", what, d.Device, err)
		}
		all = append(all, o)
	}
	return all, nil
}

// places returns the places where filters can be.
func (c control) places() (at []uint32) {
	for _, q := range c.qdiscs {
		switch {
		case q.kind == "clsact":
			at = append(at, atIngress, atEgress)
		case q.handle != 0:
			at = append(at, q.handle)
		}
	}
	for _, class := range c.classes {
		if c.inner[class.handle] {
			at = append(at, class.handle)
		}
	}
	return at
}

// handle formats a handle like tc.
func handle(h uint32) string {
	switch h {
	case atIngress:
		return "ingress"
	case atEgress:
		return "egress"
	}
	if h&0xffff == 0 {
		return fmt.Sprintf("%x:", h>>16)
	}
	return fmt.Sprintf("%x:%x", h>>16, h&0xffff)
}

// A rateSpec is struct tc_ratespec.
type rateSpec struct {
	linkLayer     uint8
	overhead, mpu uint16
	bytes         uint64 // per second
}

func parseRate(f fields, rate64 fields) rateSpec {
	r := rateSpec{linkLayer: f.u8(1) & nl.TC_LINKLAYER_MASK, overhead: f.u16(2), mpu: f.u16(6), bytes: uint64(f.u32(8))}
	if len(rate64) > 0 {
		r.bytes = rate64.u64(0)
	}
	return r
}

// A policer is an action of kind police.
type policer struct {
	index                uint32
	rate                 rateSpec
	peak, average        bool
	packets              bool   // there is a rate in packets
	burst                uint32 // ticks
	mtu                  uint32
	conforming, exceeded int32 // controls, such as controlShot
}

func parsePolicer(a attributes) policer {
	f := a[nl.TCA_POLICE_TBF]
	return policer{
		index: f.u32(0), exceeded: int32(f.u32(4)), burst: f.u32(12), mtu: f.u32(16),
		rate: parseRate(f[min(20, len(f)):], a[policeRate64]),
		peak: f.u32(40) != 0 || len(a[policePeakRate64]) > 0, average: len(a[nl.TCA_POLICE_AVRATE]) > 0,
		packets: len(a[policePktRate64]) > 0, conforming: int32(a[nl.TCA_POLICE_RESULT].u32(0)),
	}
}

// An action is an action of a filter.
type action struct {
	kind    string
	police  policer
	control int32 // of kind gact
	random  bool  // of kind gact: applied at random
	to      uint32
	steals  bool // of kind mirred: the packets leave the device
}

// parseActions parses the actions of a filter: a list, or a policer in the format that is
// older than lists.
func parseActions(list, police fields) (all []action, err error) {
	if len(police) > 0 {
		a, err := parseAttributes(police)
		if err != nil {
			return nil, err
		}
		all = append(all, action{kind: "police", police: parsePolicer(a)})
	}
	// The attribute types give the order.
	entries, err := parseAttributes(list)
	if err != nil {
		return nil, err
	}
	for _, order := range entries.others() {
		entry, err := entries.nested(order)
		if err != nil {
			return nil, err
		}
		a := action{kind: entry.text(nl.TCA_ACT_KIND)}
		switch options, err := entry.nested(nl.TCA_ACT_OPTIONS); {
		case err != nil:
			return nil, err
		case a.kind == "police":
			a.police = parsePolicer(options)
		case a.kind == "gact":
			a.control, a.random = int32(options[nl.TCA_GACT_PARMS].u32(8)), len(options[nl.TCA_GACT_PROB]) > 0
		case a.kind == "mirred":
			parms := options[nl.TCA_MIRRED_PARMS]
			a.to, a.steals = parms.u32(24), parms.u32(20) == 1 || parms.u32(20) == 3
		}
		all = append(all, a)
	}
	return all, nil
}
