package importer

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// A term is what a filter does to some packets.
type term struct {
	conditions
	class   uint32
	actions []action
	where   string
	unknown bool // what it does is not known
}

// terms returns the terms of a place, for packets that meet conditions, in the order in which packets meet them. It leaves out
// those that none of these packets meets.
func (d *device) terms(at uint32, outer conditions) (all []term) {
	var before object
	for i, o := range d.Filters[at] {
		first := i == 0 || o.priority() != before.priority() || o.chain() != before.chain()
		before = o
		switch {
		case o.kind == "u32" && first:
			all = append(all, d.u32Terms(at, o, outer)...)
		case o.kind != "u32" && !own(o):
			all = append(all, d.plainTerm(at, o, outer))
		}
	}
	return slices.DeleteFunc(all, func(t term) bool { return len(t.networks) == 0 })
}

// own reports whether an object is one of shapectl's own filters, or the head of a list.
func own(o object) bool {
	return o.kind == "bpf" && strings.HasPrefix(o.options.text(nl.TCA_BPF_NAME), "shapectl") || len(o.attributes[nl.TCA_OPTIONS]) == 0
}

// term returns the term of a filter without conditions of its own.
func (d *device) term(at uint32, o object, outer conditions) term {
	t := term{conditions: outer, class: o.options.u32(filterKinds[o.kind].class), actions: o.actions}
	id := fmt.Sprintf("%#x", o.Handle)
	if o.kind == "u32" {
		id = fmt.Sprintf("%x:%x:%x", o.Handle>>20, o.Handle>>12&0xff, o.Handle&u32Node)
	}
	t.where = fmt.Sprintf("%s filter %s pref %d %s %s", d.Device, handle(at), o.priority(), o.kind, id)
	if chain := o.chain(); chain != 0 {
		t.restrict(fmt.Sprintf("chain %d", chain))
	}
	return t
}

// plainTerm returns the term of a filter that is not u32.
func (d *device) plainTerm(at uint32, o object, outer conditions) term {
	t := d.term(at, o, outer)
	t.ofProtocol(o.protocol())
	switch o.kind {
	case "matchall":
		const count = 4 // package nl lacks it
		if len(o.options.others(nl.TCA_MATCHALL_CLASSID, nl.TCA_MATCHALL_ACT, nl.TCA_MATCHALL_FLAGS, count)) > 0 {
			t.restrict("another condition")
		}
	case "flower":
		t.flower(o.options)
	default:
		t.unknown = true
	}
	return t
}

// ofProtocol adds a condition on the protocol of packets.
func (t *term) ofProtocol(protocol uint16) {
	every := protocol == unix.ETH_P_ALL
	networks := families(every || protocol == unix.ETH_P_IP, every || protocol == unix.ETH_P_IPV6)
	if networks == nil {
		t.restrict(fmt.Sprintf("protocol %#04x", protocol))
		return
	}
	t.conditions = t.with(either, networks)
}

func (t *term) address(s side, value, mask []byte) {
	address, given := netip.AddrFromSlice(value)
	p, ok := masked(address, mask)
	switch {
	case given && ok:
		t.conditions = t.with(s, []netip.Prefix{p})
	case given:
		t.restrict(fmt.Sprintf("%v %v with mask %x", s, address, mask))
	}
}

func (t *term) flower(o attributes) {
	for i, key := range []uint16{nl.TCA_FLOWER_KEY_IPV4_DST, nl.TCA_FLOWER_KEY_IPV6_DST, nl.TCA_FLOWER_KEY_IPV4_SRC, nl.TCA_FLOWER_KEY_IPV6_SRC} {
		mask := o[key+1]
		if len(mask) == 0 {
			mask = slices.Repeat([]byte{0xff}, len(o[key]))
		}
		t.address(toward+side(i/2), o[key], mask)
	}
	if len(o.others(addressKeys...)) > 0 {
		t.restrict("other keys")
	}
}

// addressKeys has the keys that are about an address, or are no condition.
var addressKeys = []uint16{
	nl.TCA_FLOWER_CLASSID, nl.TCA_FLOWER_ACT, nl.TCA_FLOWER_FLAGS, nl.TCA_FLOWER_IN_HW_COUNT, nl.TCA_FLOWER_KEY_ETH_TYPE,
	nl.TCA_FLOWER_KEY_IPV4_SRC, nl.TCA_FLOWER_KEY_IPV4_SRC_MASK, nl.TCA_FLOWER_KEY_IPV4_DST, nl.TCA_FLOWER_KEY_IPV4_DST_MASK,
	nl.TCA_FLOWER_KEY_IPV6_SRC, nl.TCA_FLOWER_KEY_IPV6_SRC_MASK, nl.TCA_FLOWER_KEY_IPV6_DST, nl.TCA_FLOWER_KEY_IPV6_DST_MASK,
}

// u32Filters is the hash tables and u32 filters of a place and priority.
type u32Filters struct {
	*device
	at       uint32
	outer    conditions
	protocol uint16              // of the packets
	tables   map[uint32]uint32   // divisors
	buckets  map[uint32][]object // filters of a table and bucket, in order
	steps    int
	terms    []term
}

const (
	// Parts of a handle: a table, a bucket of the table, a node in the bucket.
	u32Table = 0xfff00000
	u32Node  = 0x00000fff
	// u32Root is the handle of the first table in requests.
	u32Root = 0xfff00000

	// u32Depth is the number of nested tables that the kernel follows.
	u32Depth = 8
	// u32Widest is the largest number of buckets of a table.
	u32Widest = 256
	// u32Steps bounds the number of buckets that are followed, because tables can form cycles.
	u32Steps = 1 << 22
)

// A header is the known bits of the first bytes of an IP packet.
type header struct{ value, mask [40]byte }

// with adds the bits of a word. possible is false if they contradict known bits, and within
// is false if they are not within the header.
func (h header) with(at int, value, mask uint32) (_ header, possible, within bool) {
	for i := range 4 {
		v, m := byte(value>>(24-8*i)), byte(mask>>(24-8*i))
		if m == 0 {
			continue
		}
		if at+i < 0 || at+i >= len(h.mask) {
			return h, true, false
		}
		if (v^h.value[at+i])&m&h.mask[at+i] != 0 {
			return h, false, true
		}
		h.value[at+i] |= v & m
		h.mask[at+i] |= m
	}
	return h, true, true
}

// u32Terms follows the tables of a place and priority from its root, as packets do. first is
// a filter of that place and priority.
func (d *device) u32Terms(at uint32, first object, outer conditions) []term {
	f := &u32Filters{device: d, at: at, outer: outer, protocol: first.protocol(), tables: map[uint32]uint32{}, buckets: map[uint32][]object{}}
	i := slices.IndexFunc(d.Roots, func(r Root) bool {
		return r.At == at && r.Info == first.Info && r.Chain == first.chain()
	})
	if i < 0 {
		d.fail(fmt.Errorf("read the filters of %s at %s: pref %d has no first hash table", d.Device, handle(at), first.priority()))
		return nil
	}
	// A filter may lead to a table that was made with another priority.
	for _, o := range d.Filters[at] {
		switch {
		case o.kind != "u32" || own(o):
		case o.Handle&^u32Table == 0:
			f.tables[o.Handle] = min(max(1, o.options.u32(nl.TCA_U32_DIVISOR)), u32Widest)
		default:
			bucket := o.Handle &^ u32Node
			f.buckets[bucket] = append(f.buckets[bucket], o)
		}
	}
	f.follow(d.Roots[i].Table, header{}, "", 0)
	return f.terms
}

// big returns the value of a field in network order.
func big(field uint32) uint32 {
	return binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, field))
}

// follow reads a bucket. partial is the conditions on the path to it that are not in h.
func (f *u32Filters) follow(bucket uint32, h header, partial string, depth int) {
	if f.steps++; f.steps > u32Steps {
		f.fail(fmt.Errorf("read the filters of %s at %s: there are too many links between hash tables", f.Device, handle(f.at)))
		return
	}
	for _, o := range f.buckets[bucket] {
		s := nl.DeserializeTcU32Sel(o.options[nl.TCA_U32_SEL])
		own, asks, possible := h, partial, true
		for _, k := range s.Keys {
			value, mask := big(k.Val), big(k.Mask)
			next, can, within := own.with(int(k.Off), value, mask)
			switch {
			case k.OffMask != 0 && mask != 0:
				asks = also(asks, fmt.Sprintf("match %08x/%08x at nexthdr+%d", value, mask, k.Off))
			case !within:
				asks = also(asks, fmt.Sprintf("match %08x/%08x at %d", value, mask, k.Off))
			case !can:
				possible = false
			default:
				own = next
			}
		}
		if !possible {
			continue
		}
		if mark := decode[[2]uint32](o.options[nl.TCA_U32_MARK]); mark[1] != 0 {
			asks = also(asks, fmt.Sprintf("mark %#x/%#x", mark[0], mark[1]))
		}
		const flags, pad = 11, 12 // package nl lacks them
		if len(o.options.others(nl.TCA_U32_CLASSID, nl.TCA_U32_HASH, nl.TCA_U32_LINK, nl.TCA_U32_DIVISOR, nl.TCA_U32_SEL, nl.TCA_U32_POLICE,
			nl.TCA_U32_ACT, nl.TCA_U32_PCNT, nl.TCA_U32_MARK, flags, pad)) > 0 {
			asks = also(asks, "another condition")
		}
		if link := o.options.u32(nl.TCA_U32_LINK); link != 0 && depth < u32Depth {
			f.hash(link, s, own, asks, depth)
		}
		if s.Flags&nl.TC_U32_TERMINAL != 0 {
			t := f.term(f.at, o, f.outer)
			t.partial = also(t.partial, asks)
			t.header(own, f.protocol)
			f.terms = append(f.terms, t)
		}
	}
}

// hash follows the buckets of a table to which a filter's packets are hashed.
func (f *u32Filters) hash(table uint32, s *nl.TcU32Sel, h header, partial string, depth int) {
	if s.Flags&nl.TC_U32_EAT != 0 {
		partial = also(partial, "data after the header")
	}
	divisor, mask, shift := f.tables[table], big(s.Hmask), 0
	if mask != 0 {
		shift = bits.TrailingZeros32(mask)
	}
	for n := range divisor {
		if n<<shift>>shift != n || n<<shift&^mask != 0 {
			continue // no packet has this hash
		}
		// Hashed bits beyond the divisor have no effect.
		next, possible, within := h.with(int(s.Hoff), n<<shift, mask&((divisor-1)<<shift))
		asks := partial
		if !within {
			asks = also(asks, fmt.Sprintf("hash of the word at %d", s.Hoff))
		}
		if possible {
			f.follow(table|n<<12, next, asks, depth+1)
		}
	}
}

// Offsets of addresses in headers.
const (
	src4, dst4, end4 = 12, 16, 20
	src6, dst6, end6 = 8, 24, 40
)

func (t *term) header(h header, protocol uint16) {
	asked := func(begin, end int) bool {
		return slices.ContainsFunc(h.mask[begin:end], func(b byte) bool { return b != 0 })
	}
	// With any protocol, a condition on one address is for IPv4 if it is at the offset of an IPv4 address.
	six := protocol == unix.ETH_P_IPV6 || protocol == unix.ETH_P_ALL && (asked(src6, src4) || asked(end4, end6))
	source, destination, end := src4, dst4, end4
	if six {
		source, destination, end = src6, dst6, end6
	}
	if t.ofProtocol(protocol); asked(0, end6) {
		t.conditions = t.with(either, families(!six, six))
	}
	if asked(destination, end) {
		t.address(toward, h.value[destination:end], h.mask[destination:end])
	}
	if asked(source, destination) {
		t.address(from, h.value[source:destination], h.mask[source:destination])
	}
	for at := 0; at < len(h.mask); at += 4 {
		if (at < source || at >= end) && asked(at, at+4) {
			t.restrict(fmt.Sprintf("match %x/%x at %d", h.value[at:at+4], h.mask[at:at+4], at))
		}
	}
}
