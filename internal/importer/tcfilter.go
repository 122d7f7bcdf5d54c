package importer

import (
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A term is what a filter does to packets of some networks.
type term struct {
	kind     string // of filter
	side     side
	prefixes []netip.Prefix
	partial  string // other conditions; "" for none
	class    uint32
	actions  []action
	where    string
	unknown  bool // what it does is not known
}

// terms returns the terms of a place in the order in which packets meet them.
func (c control) terms(at uint32) (all []term, err error) {
	c.seen[at] = true
	var before object
	for i, o := range c.filters[at] {
		sameList := i > 0 && o.priority() == before.priority() && o.chain() == before.chain()
		before = o
		var found []term
		switch {
		case o.kind != "u32":
			found, err = c.plainTerms(at, o)
		case !sameList:
			found, err = c.u32Terms(at, o)
		}
		if err != nil {
			return nil, err
		}
		if chain := o.chain(); chain != 0 {
			for i := range found {
				found[i].restrict(fmt.Sprintf("chain %d", chain))
			}
		}
		all = append(all, found...)
	}
	return all, nil
}

// chain returns the chain of a filter. Packets begin in chain 0.
func (o object) chain() uint32 { return o.attributes[nl.TCA_CHAIN].u32(0) }

// restrict adds a condition.
func (t *term) restrict(what string) {
	t.partial = also(t.partial, what)
}

// describe returns the packets of a term for people.
func (t term) describe() string {
	words := "packets"
	if t.side != either {
		words += " " + prepositions[t.side] + names(t.prefixes)
	}
	if t.partial != "" {
		words += " with " + t.partial
	}
	return words
}

func (c control) where(at uint32, o object, id string) string {
	return fmt.Sprintf("%s filter %s pref %d %s %s", c.Device, handle(at), o.priority(), o.kind, id)
}

// shown returns the networks of the packets of a protocol; none if they are not IP.
func shown(protocol uint16) []netip.Prefix {
	every := protocol == unix.ETH_P_ALL
	return families(every || protocol == unix.ETH_P_IP, every || protocol == unix.ETH_P_IPV6)
}

// ownPrograms is the prefix of the names of shapectl's own filters.
const ownPrograms = "shapectl"

// plainTerms returns the term of a filter that is not u32. It returns none for the head of a
// list and for shapectl's own filters.
func (c control) plainTerms(at uint32, o object) ([]term, error) {
	own := o.kind == "bpf" && strings.HasPrefix(o.options.text(nl.TCA_BPF_NAME), ownPrograms)
	if own || len(o.attributes[nl.TCA_OPTIONS]) == 0 {
		return nil, nil
	}
	t := term{kind: o.kind, where: c.where(at, o, o.id()), prefixes: shown(o.protocol())}
	if t.prefixes == nil {
		t.prefixes = everything
		t.restrict(fmt.Sprintf("protocol %#04x", o.protocol()))
	}
	kind, known := filterKinds[o.kind]
	t.class = o.options[kind.class].u32(0)
	switch o.kind {
	case "matchall":
		if len(o.options.others(nl.TCA_MATCHALL_CLASSID, nl.TCA_MATCHALL_ACT, nl.TCA_MATCHALL_FLAGS, matchAllCount)) > 0 {
			t.restrict("an unknown attribute")
		}
	case "flower":
		t.flower(o.options)
	case "fw":
		if len(o.options) == 0 {
			t.class = o.handle // a filter without options: the mark is the class
		}
		t.restrict(fmt.Sprintf("mark %#x", o.handle))
	case "basic":
		conditions, err := o.options.nested(basicEmatches)
		if err != nil || conditions[ematchHeader].u16(0) > 0 {
			t.restrict("conditions of basic")
		}
	default:
		t.restrict("conditions of " + o.kind)
		t.unknown = !known || o.options[nl.TCA_BPF_FLAGS].u32(0)&nl.TCA_BPF_FLAG_ACT_DIRECT != 0
	}
	err := t.act(o.options[kind.actions], o.options[kind.police])
	return []term{t}, err
}

// filterKinds has the attributes of the kinds of filters whose actions can be read; 0 for none.
var filterKinds = map[string]struct{ class, actions, police uint16 }{
	"u32":      {nl.TCA_U32_CLASSID, nl.TCA_U32_ACT, nl.TCA_U32_POLICE},
	"matchall": {nl.TCA_MATCHALL_CLASSID, nl.TCA_MATCHALL_ACT, 0},
	"flower":   {nl.TCA_FLOWER_CLASSID, nl.TCA_FLOWER_ACT, 0},
	"fw":       {nl.TCA_FW_CLASSID, nl.TCA_FW_ACT, nl.TCA_FW_POLICE},
	"basic":    {basicClass, basicActions, basicPolice},
	"bpf":      {nl.TCA_BPF_CLASSID, nl.TCA_BPF_ACT, nl.TCA_BPF_POLICE},
}

// act reads the actions of a term's filter.
func (t *term) act(list, police fields) (err error) {
	if t.actions, err = parseActions(list, police); err != nil {
		return fmt.Errorf("read %s: %w", t.where, err)
	}
	return nil
}

// address adds a condition on an address with a mask, if there is one.
func (t *term) address(s side, value, mask []byte) {
	address, given := netip.AddrFromSlice(value)
	p, ok := masked(address, mask)
	switch {
	case !given:
	case !ok:
		t.restrict(fmt.Sprintf("%v %v with mask %x", s, address, mask))
	case t.side != either:
		t.restrict(fmt.Sprintf("%v %s", s, policy.NetworkText(p)))
	default:
		t.side, t.prefixes = s, []netip.Prefix{p}
	}
}

// flower adds the conditions of a flower filter.
func (t *term) flower(o attributes) {
	for _, a := range []struct {
		side      side
		key, mask uint16
	}{
		{toward, nl.TCA_FLOWER_KEY_IPV4_DST, nl.TCA_FLOWER_KEY_IPV4_DST_MASK},
		{toward, nl.TCA_FLOWER_KEY_IPV6_DST, nl.TCA_FLOWER_KEY_IPV6_DST_MASK},
		{from, nl.TCA_FLOWER_KEY_IPV4_SRC, nl.TCA_FLOWER_KEY_IPV4_SRC_MASK},
		{from, nl.TCA_FLOWER_KEY_IPV6_SRC, nl.TCA_FLOWER_KEY_IPV6_SRC_MASK},
	} {
		mask := o[a.mask]
		if len(mask) == 0 {
			mask = slices.Repeat([]byte{0xff}, len(o[a.key]))
		}
		t.address(a.side, o[a.key], mask)
	}
	for _, key := range o.others() {
		what, known := flowerKeys[key]
		if !known {
			what = fmt.Sprintf("flower's key %d", key)
		}
		if what != "" {
			t.restrict(what)
		}
	}
}

// flowerKeys has the known keys; "" for those that are about an address, or belong to
// another key.
var flowerKeys = map[uint16]string{
	nl.TCA_FLOWER_CLASSID: "", nl.TCA_FLOWER_ACT: "", nl.TCA_FLOWER_FLAGS: "", nl.TCA_FLOWER_IN_HW_COUNT: "",
	nl.TCA_FLOWER_KEY_ETH_TYPE: "", nl.TCA_FLOWER_KEY_IPV4_SRC: "", nl.TCA_FLOWER_KEY_IPV4_SRC_MASK: "",
	nl.TCA_FLOWER_KEY_IPV4_DST: "", nl.TCA_FLOWER_KEY_IPV4_DST_MASK: "", nl.TCA_FLOWER_KEY_IPV6_SRC: "",
	nl.TCA_FLOWER_KEY_IPV6_SRC_MASK: "", nl.TCA_FLOWER_KEY_IPV6_DST: "", nl.TCA_FLOWER_KEY_IPV6_DST_MASK: "",
	nl.TCA_FLOWER_INDEV: "indev", nl.TCA_FLOWER_KEY_ETH_DST: "dst_mac", nl.TCA_FLOWER_KEY_ETH_DST_MASK: "",
	nl.TCA_FLOWER_KEY_ETH_SRC: "src_mac", nl.TCA_FLOWER_KEY_ETH_SRC_MASK: "", nl.TCA_FLOWER_KEY_IP_PROTO: "ip_proto",
	nl.TCA_FLOWER_KEY_TCP_SRC: "src_port", nl.TCA_FLOWER_KEY_TCP_SRC_MASK: "",
	nl.TCA_FLOWER_KEY_TCP_DST: "dst_port", nl.TCA_FLOWER_KEY_TCP_DST_MASK: "",
	nl.TCA_FLOWER_KEY_UDP_SRC: "src_port", nl.TCA_FLOWER_KEY_UDP_SRC_MASK: "",
	nl.TCA_FLOWER_KEY_UDP_DST: "dst_port", nl.TCA_FLOWER_KEY_UDP_DST_MASK: "",
	nl.TCA_FLOWER_KEY_VLAN_ID: "vlan_id", nl.TCA_FLOWER_KEY_VLAN_PRIO: "vlan_prio", nl.TCA_FLOWER_KEY_VLAN_ETH_TYPE: "vlan_ethtype",
	nl.TCA_FLOWER_KEY_IP_TOS: "ip_tos", nl.TCA_FLOWER_KEY_IP_TOS_MASK: "", nl.TCA_FLOWER_KEY_IP_TTL: "ip_ttl", nl.TCA_FLOWER_KEY_IP_TTL_MASK: "",
	nl.TCA_FLOWER_KEY_TCP_FLAGS: "tcp_flags", nl.TCA_FLOWER_KEY_TCP_FLAGS_MASK: "",
	nl.TCA_FLOWER_KEY_FLAGS: "ip_flags", nl.TCA_FLOWER_KEY_FLAGS_MASK: "",
}

// masked returns the network of an address with a mask; false if the mask has gaps.
func masked(address netip.Addr, mask []byte) (netip.Prefix, bool) {
	length := 0
	for i, b := range mask {
		ones := bits.LeadingZeros8(^b)
		if b<<ones != 0 || ones > 0 && length < 8*i {
			return netip.Prefix{}, false
		}
		length += ones
	}
	return netip.PrefixFrom(address, length).Masked(), true
}

// u32Filters is the hash tables and u32 filters of a place and priority.
type u32Filters struct {
	control
	at       uint32
	protocol uint16              // of the packets
	tables   map[uint32]uint32   // divisors
	buckets  map[uint32][]object // filters of a table and bucket, in order
	steps    int
	terms    []term
}

// Parts of a handle: a table, a bucket of the table, a node in the bucket.
const (
	u32Table  = 0xfff00000
	u32Bucket = 0x000ff000
	u32Node   = 0x00000fff
	// u32Root is the handle of the first table in requests.
	u32Root = 0xfff00000
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
func (c control) u32Terms(at uint32, first object) ([]term, error) {
	f := &u32Filters{control: c, at: at, protocol: first.protocol(), tables: map[uint32]uint32{}, buckets: map[uint32][]object{}}
	i := slices.IndexFunc(c.Roots, func(r Root) bool {
		return r.At == at && r.Info == first.info && r.Chain == first.chain()
	})
	if i < 0 {
		return nil, fmt.Errorf("read the filters of %s at %s: pref %d has no first hash table", c.Device, handle(at), first.priority())
	}
	// A filter may lead to a table that was made with another priority.
	for _, o := range c.filters[at] {
		switch {
		case o.kind != "u32" || len(o.attributes[nl.TCA_OPTIONS]) == 0:
		case o.handle&^u32Table == 0:
			f.tables[o.handle] = min(max(1, o.options[nl.TCA_U32_DIVISOR].u32(0)), u32Widest)
		default:
			bucket := o.handle &^ u32Node
			f.buckets[bucket] = append(f.buckets[bucket], o)
		}
	}
	err := f.follow(c.Roots[i].Table, header{}, "", 0)
	return f.terms, err
}

// leaveFilters reports filters that limit packets at places that were not read, and u32 filters that no packet can
// reach and match. Each place of a qdisc lists the u32 filters of all places.
func (d *device) leaveFilters() error {
	unread := map[uint32]bool{} // qdiscs
	for at, filters := range d.control.filters {
		unread[at>>16] = unread[at>>16] || len(filters) > 0 && !d.seen[at]
	}
	for _, at := range d.places() {
		for _, o := range d.control.filters[at] {
			if o.kind == "u32" {
				f := u32Filter{at >> 16, o.handle}
				if o.handle&u32Node == 0 || d.met[f] {
					continue
				}
				d.met[f] = true // report it once
			}
			switch {
			case !d.seen[at]:
				if err := d.leaveFilter(at, o); err != nil {
					return err
				}
			case o.kind == "u32" && !unread[at>>16]:
				to := "it has no class"
				if class := o.options[nl.TCA_U32_CLASSID].u32(0); class != 0 {
					to = "class " + handle(class)
				}
				d.leave(lost, d.where(at, o, o.id()), "%s", to)
			}
		}
	}
	return nil
}

// leaveFilter reports a filter if it may limit packets.
func (d *device) leaveFilter(at uint32, o object) error {
	terms, err := d.plainTerms(at, o)
	for _, t := range terms {
		switch {
		case t.unknown:
			d.leave(unreadable, t.where, "it may limit packets")
		case len(t.actions) > 0:
			d.leave(inside, t.where, "%s", also(t.does(), d.rates(t.actions)))
		}
	}
	return err
}

// does lists the actions of a filter.
func (t term) does() string {
	var words []string
	for _, a := range t.actions {
		words = append(words, a.kind)
	}
	return plain.List(words)
}

// A u32Filter identifies a u32 filter. Handles are unique in a qdisc.
type u32Filter struct{ qdisc, handle uint32 }

const (
	// u32Depth is the number of nested tables that the kernel follows.
	u32Depth = 8
	// u32Widest is the largest number of buckets of a table.
	u32Widest = 256
	// u32Steps bounds the number of buckets that are followed, because tables can form cycles.
	u32Steps = 1 << 22
)

// follow reads a bucket. partial is the conditions on the path to it that are not in h.
func (f *u32Filters) follow(bucket uint32, h header, partial string, depth int) error {
	if f.steps++; f.steps > u32Steps {
		return fmt.Errorf("read the filters of %s at %s: there are too many links between hash tables", f.Device, handle(f.at))
	}
	for _, o := range f.buckets[bucket] {
		s := selector(o.options[nl.TCA_U32_SEL])
		own, asks := h, partial
		possible := true
		for _, k := range s.keys() {
			next, can, within := own.with(k.at, k.value, k.mask)
			switch {
			case k.offsetMask != 0 && k.mask != 0 || !within:
				asks = also(asks, fmt.Sprintf("match %08x/%08x at %s%d", k.value, k.mask, map[bool]string{true: "nexthdr+"}[k.offsetMask != 0], k.at))
			case !can:
				possible = false
			default:
				own = next
			}
		}
		if !possible {
			continue
		}
		f.met[u32Filter{f.at >> 16, o.handle}] = true
		if len(o.options[nl.TCA_U32_MARK]) > 0 && o.options[nl.TCA_U32_MARK].u32(4) != 0 {
			asks = also(asks, fmt.Sprintf("mark %#x/%#x", o.options[nl.TCA_U32_MARK].u32(0), o.options[nl.TCA_U32_MARK].u32(4)))
		}
		if len(o.options[nl.TCA_U32_INDEV]) > 0 {
			asks = also(asks, "indev "+o.options.text(nl.TCA_U32_INDEV))
		}
		if len(o.options.others(nl.TCA_U32_CLASSID, nl.TCA_U32_HASH, nl.TCA_U32_LINK, nl.TCA_U32_DIVISOR, nl.TCA_U32_SEL, nl.TCA_U32_POLICE,
			nl.TCA_U32_ACT, nl.TCA_U32_INDEV, nl.TCA_U32_PCNT, nl.TCA_U32_MARK, u32Flags, u32Pad)) > 0 {
			asks = also(asks, "an unknown attribute")
		}
		if link := o.options[nl.TCA_U32_LINK].u32(0); link != 0 && depth < u32Depth {
			if err := f.hash(link, s, own, asks, depth); err != nil {
				return err
			}
		}
		if s.flags()&nl.TC_U32_TERMINAL != 0 {
			if err := f.terminal(o, own, asks); err != nil {
				return err
			}
		}
	}
	return nil
}

// hash follows the buckets of a table to which a filter's packets are hashed.
func (f *u32Filters) hash(table uint32, s selector, h header, partial string, depth int) error {
	if s.flags()&nl.TC_U32_EAT != 0 {
		partial = also(partial, "data after the header")
	}
	divisor, mask := f.tables[table], s.hashMask()
	shift := 0
	if mask != 0 {
		shift = bits.TrailingZeros32(mask)
	}
	for n := range divisor {
		if n<<shift>>shift != n || n<<shift&^mask != 0 {
			continue // no packet has this hash
		}
		// Hashed bits beyond the divisor have no effect.
		next, possible, within := h.with(s.hashAt(), n<<shift, mask&((divisor-1)<<shift))
		if !possible {
			continue
		}
		asks := partial
		if !within {
			asks = also(asks, fmt.Sprintf("hash of the word at %d", s.hashAt()))
		}
		if err := f.follow(table|n<<12, next, asks, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func (f *u32Filters) terminal(o object, h header, partial string) error {
	t := term{kind: o.kind, where: f.where(f.at, o, o.id()), partial: partial, class: o.options[nl.TCA_U32_CLASSID].u32(0)}
	t.addresses(h, f.protocol)
	err := t.act(o.options[nl.TCA_U32_ACT], o.options[nl.TCA_U32_POLICE])
	f.terms = append(f.terms, t)
	return err
}

// id formats the handle of a filter like tc.
func (o object) id() string {
	if o.kind != "u32" {
		return fmt.Sprintf("%#x", o.handle)
	}
	bucket := ""
	if b := o.handle & u32Bucket >> 12; b != 0 {
		bucket = fmt.Sprintf("%x", b)
	}
	return fmt.Sprintf("%x:%s:%x", o.handle>>20, bucket, o.handle&u32Node)
}

// Offsets of addresses in headers.
const (
	src4, dst4, end4 = 12, 16, 20
	src6, dst6, end6 = 8, 24, 40
)

// addresses adds the conditions of a header.
func (t *term) addresses(h header, protocol uint16) {
	version, versionMask := h.value[0]&0xf0, h.mask[0]&0xf0
	h.value[0], h.mask[0] = h.value[0]&0x0f, h.mask[0]&0x0f
	asked := func(begin, end int) bool {
		return slices.ContainsFunc(h.mask[begin:end], func(b byte) bool { return b != 0 })
	}
	six := protocol == unix.ETH_P_IPV6
	if protocol == unix.ETH_P_ALL {
		// A condition on one address is for IPv4 if it is at the offset of an IPv4 address.
		six = version == 0x60 || versionMask == 0 && (asked(src6, src4) || asked(end4, end6))
	}
	t.prefixes = shown(protocol)
	switch {
	case t.prefixes == nil:
		t.prefixes = everything
		t.restrict(fmt.Sprintf("protocol %#04x", protocol))
		return
	case versionMask != 0 && (versionMask != 0xf0 || version != map[bool]byte{false: 0x40, true: 0x60}[six]):
		t.restrict(fmt.Sprintf("version %x/%x", version>>4, versionMask>>4))
	case protocol == unix.ETH_P_ALL && (versionMask != 0 || asked(0, end6)):
		t.prefixes = families(!six, six)
	}
	source, destination, end := src4, dst4, end4
	if six {
		source, destination, end = src6, dst6, end6
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

// A selector is struct tc_u32_sel, with its keys.
type selector fields

const (
	selectorBytes = 16
	keyBytes      = 16
)

func (s selector) flags() uint8     { return fields(s).u8(0) }
func (s selector) hashAt() int      { return int(int16(fields(s).u16(10))) }
func (s selector) hashMask() uint32 { return fields(s).be32(12) }

// A key is a condition on a word of the packet.
type key struct {
	mask, value uint32
	at          int
	offsetMask  uint32 // not 0 for a word after the IP header
}

func (s selector) keys() (all []key) {
	for i := range int(fields(s).u8(2)) {
		k := fields(fields(s).bytes(selectorBytes+i*keyBytes, keyBytes))
		all = append(all, key{mask: k.be32(0), value: k.be32(4), at: int(int32(k.u32(8))), offsetMask: k.u32(12)})
	}
	return all
}
