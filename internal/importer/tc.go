package importer

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"

	"github.com/shapectl/shapectl/internal/line"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	narrower = reason{loosens, "filter with more conditions than an address", "a rule matches one address of a packet and nothing else",
		"no rule was made; the rules of other filters count its packets"}
	byMark = reason{loosens, "filter by firewall mark", "a rule matches addresses, not marks",
		"no rule was made; write one for the addresses that are marked"}
	unreadable = reason{loosens, "filter of another kind", "its conditions cannot be read",
		"no rule was made; write one by hand if it limits anything"}
	lost = reason{other, "filter without packets", "no path through the hash tables leads there, or its condition belongs to another bucket",
		"no rule was made, because it had no effect; check whether it is in the wrong place"}
	redirects = reason{loosens, "redirection", "its packets are limited on another device, if at all",
		"if that is an ifb device, name it too; its limits become rules here"}
	unfed = reason{loosens, "limits on an ifb device", "they end when nothing redirects packets to it any more",
		"name the device whose packets are redirected, too; the limits become its rules"}
	unknownAction = reason{loosens, "action of another kind", "what it does cannot be read", "no rule was made; write one by hand if it limits anything"}
	perFlow       = reason{loosens, "rate of each flow", "fq delays the packets of each socket, and the import cannot",
		"no rule was made; write one with 'each: flow' if you need one"}
	cakes = reason{loosens, "cake", "it is a limit, a queue and fair shares in one", "no rule was made"}
	bans  = reason{other, "policer that is not a limit", "it does not pass a rate and act on excess packets",
		"no rule was made; write one by hand if you need one"}
	chains = reason{other, "jump to another chain", "the import does not follow jumps",
		"no rule was made; write one for the limits of that chain"}
	severalPolicers = reason{loosens, "several policers", "a rule has one limit",
		"no rule was made; set one on each device on the path of the packets"}
	goesOn = reason{loosens, "policer whose excess goes on to other filters", "a rule drops, marks or passes excess packets",
		"no rule was made; write one by hand"}
	peakRate   = reason{other, "peak rate", "a rule has one rate", "the rule has the other rate; a smaller capacity limits bursts"}
	packetRate = reason{loosens, "packet rate", "rules count bytes, not packets", "no rule was made; write one in bytes if you need one"}
	average    = reason{loosens, "average rate", "a rule has a bucket, not an estimate of the rate", "no rule was made; write one with that rate"}
	largest    = reason{other, "largest packet", "packets of any size conform to a rule if the bucket has room", "nothing to do"}
	cells      = reason{other, "cost of ATM cells", "a packet counts its bytes and a constant overhead", "lower the rate by a tenth"}
	framing    = reason{other, "overhead out of range", fmt.Sprintf("an overhead is %d to %d bytes, an mpu 0 to %d", policy.MinOverhead, policy.MaxOverhead, policy.MaxMPU),
		"the rule has none"}
	priority  = reason{other, "priority of a class", "rules and pools have no priority", "give the class a guarantee, or a higher weight"}
	noNetwork = reason{loosens, "class without an address", "a rule needs a network", "no rule was made; write one if its packets have their own addresses"}
	inside    = reason{loosens, "limit inside a queue", "only some packets come there, by more than their address", "no rule was made; write one by hand"}
	otherKind = reason{loosens, "queueing discipline of another kind", "only htb and tbf can be read",
		"no rule was made; write one for any if it limits the device"}
)

// TC imports the traffic control of devices: policers of filters, classes of htb that
// filters by address select, and tbf. Limits of an ifb device are for the devices that feed it.
// Commands that it names are for a network namespace; "" for the current one. The error is for
// a kernel message that cannot be read.
func TC(dumps []Dump, netns string) (Imported, error) {
	s := &ruleset{collector: newCollector()}
	all, policers := map[string]*device{}, map[uint32]*limit{}
	for _, d := range dumps {
		c, err := parse(d)
		if err != nil {
			return Imported{}, err
		}
		all[d.Device] = &device{control: c, ruleset: s, all: all, policers: policers, buckets: map[uint32]*limit{}, reported: map[uint32]bool{}}
	}
	for _, ifbs := range []bool{false, true} {
		for _, dump := range dumps {
			if d := all[dump.Device]; d.IFB == ifbs && d.feeder == nil {
				before := len(s.entries)
				if err := d.read(); err != nil {
					return Imported{}, err
				}
				if d.IFB && len(s.entries) > before {
					s.leave(unfed, d.Device, "no given device redirects packets to it")
				}
			}
		}
	}
	for _, dump := range dumps {
		if err := all[dump.Device].rest(netns); err != nil {
			return Imported{}, err
		}
	}
	s.make()
	return s.imported(), nil
}

// A device converts the traffic control of a device.
type device struct {
	control
	*ruleset
	all      map[string]*device
	policers map[uint32]*limit // by index
	buckets  map[uint32]*limit // of classes, by handle
	reported map[uint32]bool   // classes with a rule, or reported as left
	tree     *htb
	cakes    [2]cake // by direction

	// Of an ifb device: the device that feeds it, in which direction, and with which packets.
	feeder *device
	fed    policy.Direction
	outer  term
}

// A cake is a qdisc of that kind, of a device or of an ifb device that it feeds.
type cake struct {
	options attributes
	where   string
}

// unlimited lists the kinds of qdisc that have no rate.
var unlimited = []string{"bfifo", "choke", "codel", "drr", "dualpi2", "ets", "fq_codel", "fq_pie", "gred", "hhf", "mq", "multiq", "noqueue",
	"pfifo", "pfifo_fast", "pfifo_head_drop", "pie", "prio", "qfq", "red", "sfb", "sfq", "skbprio"}

func (d *device) read() error {
	if d.feeder == nil {
		d.outer.prefixes = everything
	}
	// Packets leave through clsact first.
	slices.SortStableFunc(d.qdiscs, func(a, b object) int { return compare(a.kind != "clsact", b.kind != "clsact") })
	for _, q := range d.qdiscs {
		first := len(d.entries)
		if err := d.qdisc(q); err != nil {
			return err
		}
		for i := range d.entries[first:] {
			if e := &d.entries[first+i]; e.until == everyEntry && !e.drops {
				e.until = len(d.entries)
			}
		}
	}
	return nil
}

// rest reports what is left of a device after all devices were read.
func (d *device) rest(netns string) error {
	if d.tree != nil {
		d.tree.rest()
	}
	d.leaveCake(netns)
	return d.leaveFilters()
}

func (d *device) qdisc(q object) error {
	where := d.of("qdisc", q)
	atTop := q.parent == atRoot
	switch {
	case q.kind == "clsact" && d.feeder == nil:
		if err := d.filters(atIngress, policy.Ingress); err != nil {
			return err
		}
		return d.filters(atEgress, policy.Egress)
	case q.kind == "clsact":
		return d.filters(atEgress, policy.Egress)
	case q.kind == "ingress":
		if d.feeder == nil {
			return d.filters(q.handle, policy.Ingress)
		}
		return nil
	case q.kind == "htb" && atTop:
		return d.htb(q)
	case q.kind == "tbf" && atTop:
		d.tbf(q)
		return nil
	case q.kind == "cake" && q.options[cakeRate64].u64(0) == 0:
	case q.kind == "cake" && atTop && d.outer.partial == "":
		of, dir := d, policy.Egress
		if d.feeder != nil {
			of, dir = d.feeder, d.fed
		}
		of.cakes[dir] = cake{q.options, where}
	case q.kind == "fq":
		if rate := q.options[nl.TCA_FQ_FLOW_MAX_RATE].u32(0); rate != 0 && rate != math.MaxUint32 {
			d.leave(perFlow, where, "%v", bitRate(uint64(rate)))
		}
	case slices.Contains(unlimited, q.kind):
	case atTop:
		d.leave(otherKind, where, "%s", q.kind)
	default:
		d.leave(inside, where, "%s below class %s", q.kind, handle(q.parent))
	}
	if atTop && q.handle != 0 {
		return d.filters(q.handle, policy.Egress)
	}
	return nil
}

func (d *device) of(what string, o object) string {
	return fmt.Sprintf("%s %s %s", d.Device, what, handle(o.handle))
}

// everyEntry is the value of until that skips all entries.
const everyEntry = math.MaxInt

// enter adds an entry for each network of a term.
func (d *device) enter(dir policy.Direction, t term, e entry) {
	e.key, e.side, e.partial, e.where = tableKey{d.Device, dir}, t.side, t.partial, t.where
	if d.feeder != nil {
		e.key = tableKey{d.feeder.Device, d.fed}
	}
	d.ruleset.enter(e, t.prefixes)
}

// filters adds the policers of a place that has no classes.
func (d *device) filters(at uint32, dir policy.Direction) error {
	terms, err := d.terms(at)
	if err != nil {
		return err
	}
	for _, t := range terms {
		t, possible := d.outer.and(t)
		if !possible {
			continue
		}
		v := d.verdict(t, dir)
		switch {
		case v.left:
		case v.to != nil:
			if err := v.to.feed(d, dir, t); err != nil {
				return err
			}
			d.enter(dir, t, entry{until: everyEntry})
		case t.partial != "" && v.limit != nil:
			d.leavePartial(t, v.limit.Rate)
		case v.limit != nil || v.until > 0:
			d.enter(dir, t, v.entry)
		}
	}
	return nil
}

// A verdict is the effect of a filter's actions.
type verdict struct {
	entry
	left bool    // it cannot be carried over, which was reported
	to   *device // an ifb device to which the packets go
}

// feed reads an ifb device for packets of a term of another device.
func (d *device) feed(from *device, dir policy.Direction, t term) error {
	if d.feeder != nil && d.feeder != from {
		d.note(fmt.Sprintf("%s limited the packets of several devices together, and so do these pools", d.Device))
	}
	d.feeder, d.fed, d.outer = from, dir, t
	return d.read()
}

// harmless lists the kinds of action that limit nothing.
var harmless = []string{"connmark", "csum", "ct", "ctinfo", "mpls", "nat", "pedit", "sample", "simple", "skbedit", "skbmod", "tunnel_key", "vlan"}

// nothing reports what is left, and returns the verdict for it.
func (d *device) nothing(r reason, where, format string, args ...any) verdict {
	d.leave(r, where, format, args...)
	return verdict{left: true}
}

// Controls: the next step of a packet after an action.
const (
	controlNext       = -1 // the next filter
	controlOK         = 0
	controlReclassify = 1
	controlShot       = 2
	controlPipe       = 3 // the next action
	controlChain      = 2 // in the bits from controlShift on: another chain
	controlShift      = 28
)

// verdict follows the actions of a filter, for conforming and for excess packets.
func (d *device) verdict(t term, dir policy.Direction) verdict {
	var p *policer
	conforming, exceeding := int32(controlPipe), int32(controlPipe)
	if t.unknown {
		return d.nothing(unreadable, t.where, "it may limit packets")
	}
	for _, a := range t.actions {
		if conforming != controlPipe && (p == nil || exceeding != controlPipe) {
			break
		}
		switch {
		case a.kind == "police" && p != nil:
			return d.nothing(severalPolicers, t.where, "%s", d.rates(t.actions))
		case a.kind == "police":
			p, conforming, exceeding = &a.police, a.police.conforming, a.police.exceeded
		case a.kind == "gact" && a.control>>controlShift == controlChain:
			return d.nothing(chains, t.where, "chain %d", a.control&(1<<controlShift-1))
		case a.kind == "gact" && !a.random:
			for _, fate := range []*int32{&conforming, &exceeding} {
				if *fate == controlPipe {
					*fate = a.control
				}
			}
		case a.kind == "mirred" && a.steals:
			to := d.all[d.name(a.to)]
			if to != nil && to.IFB && p == nil && d.feeder == nil {
				return verdict{to: to}
			}
			return d.nothing(redirects, t.where, "to %s", d.name(a.to))
		case a.kind == "gact":
			return d.nothing(bans, t.where, "gact by chance")
		case a.kind != "mirred" && !slices.Contains(harmless, a.kind):
			return d.nothing(unknownAction, t.where, "%s", a.kind)
		}
	}
	if p == nil {
		// Without actions, a filter with a class decides, and one at a hook passes packets.
		v := verdict{entry: entry{drops: conforming == controlShot || conforming == controlReclassify}}
		if conforming != controlNext && (conforming != controlPipe || len(t.actions) == 0) {
			v.until = everyEntry
		}
		return v
	}
	return d.policed(t, p, dir, conforming, exceeding)
}

func (d *device) name(index uint32) string {
	return cmp.Or(d.Devices[index], fmt.Sprintf("device %d", index))
}

// rates lists the rates of the policers among actions.
func (d *device) rates(actions []action) string {
	var words []string
	for _, a := range actions {
		if a.kind == "police" {
			words = append(words, bitRate(a.police.rate.bytes).String())
		}
	}
	return plain.List(words)
}

// policed returns the verdict of a policer.
func (d *device) policed(t term, p *policer, dir policy.Direction, conforming, exceeding int32) verdict {
	// A packet that is classified again meets the same policer, until the kernel drops it.
	if exceeding == controlReclassify {
		exceeding = controlShot
	}
	excess := policy.Pass
	switch {
	case p.rate.bytes == 0 && p.packets:
		return d.nothing(packetRate, t.where, "policer %d", p.index)
	case p.rate.bytes == 0 && p.average:
		return d.nothing(average, t.where, "policer %d", p.index)
	case p.rate.bytes == 0 || conforming == controlShot || conforming == controlReclassify:
		return d.nothing(bans, t.where, "policer %d", p.index)
	case exceeding == controlNext || exceeding>>controlShift == controlChain:
		return d.nothing(goesOn, t.where, "%v", bitRate(p.rate.bytes))
	case exceeding == controlShot:
		excess = policy.Drop
	}
	l := d.policers[p.index] // several devices may have it
	if l == nil {
		where := fmt.Sprintf("%s police index %d", d.Device, p.index)
		l = &limit{Rule: policy.Rule{Rate: bitRate(p.rate.bytes), Capacity: burst(p.burst, p.rate.bytes), Excess: excess}, where: where}
		d.policers[p.index] = l
		d.frame(l, p.rate, stab{}, where, dir)
		if p.peak {
			d.leave(peakRate, where, "with the rate %v", l.Rate)
		}
		if p.mtu != unsetMTU && p.mtu < math.MaxUint16 {
			d.leave(largest, where, "%d bytes", p.mtu)
		}
	}
	v := verdict{entry: entry{limit: l, label: policy.Label{Note: fmt.Sprintf("police index %d", p.index)}}}
	if conforming != controlNext {
		v.until = everyEntry
	}
	return v
}

// unsetMTU is the default of a policer's largest packet.
const unsetMTU = 255 << 3

// bitRate converts bytes per second. The result is above policy.MaxRate if it is too large.
func bitRate(bytes uint64) policy.Rate {
	if hi, lo := bits.Mul64(bytes, 8); hi == 0 && lo < uint64(policy.Unlimited) {
		return policy.Rate(lo)
	}
	return policy.MaxRate + 1
}

const (
	// tick is the kernel's unit of time for bursts, in nanoseconds.
	tick = 64
	// uncounted is the largest rounding error of a burst's ticks in nanoseconds: tc counts in microseconds.
	uncounted = 1000 + tick
)

// burst returns the bytes that a rate drains in so many ticks. tc rounds down twice, so
// burst returns the roundest size that has these ticks.
func burst(ticks uint32, rate uint64) uint64 {
	least, most := drained(uint64(ticks)*tick, rate), drained(uint64(ticks)*tick+uncounted, rate)
	for unit := uint64(1 << 30); unit > 1; unit >>= 10 {
		if round := (least + unit - 1) / unit * unit; round > 0 && round <= most {
			return round
		}
	}
	return least
}

// drained returns the bytes that a rate drains in so many nanoseconds, rounded up; at most
// math.MaxInt64.
func drained(nanoseconds, rate uint64) uint64 {
	const second = 1e9
	hi, lo := bits.Mul64(nanoseconds, rate)
	lo, carry := bits.Add64(lo, second-1, 0)
	if hi += carry; hi >= second/2 {
		return math.MaxInt64
	}
	v, _ := bits.Div64(hi, lo, second)
	return v
}

// A stab is the size table of a qdisc, which changes what packets count.
type stab struct {
	overhead int
	mpu      int
	cells    bool
}

func parseStab(o object) (s stab, err error) {
	a, err := o.attributes.nested(nl.TCA_STAB)
	if f := a[stabBase]; err == nil && len(f) > 0 {
		s = stab{overhead: int(int32(f.u32(4))), cells: f.u32(8) == nl.LINKLAYER_ATM, mpu: int(f.u32(12))}
	}
	return s, err
}

// frame sets the framing of a limit.
func (d *device) frame(l *limit, r rateSpec, s stab, where string, dir policy.Direction) {
	overhead := s.overhead + int(r.overhead)
	mpu := int(r.mpu)
	if s.mpu > 0 {
		mpu = max(mpu, s.mpu+int(r.overhead))
	}
	if dir == policy.Ingress && d.L2Bytes > 0 {
		overhead -= int(d.L2Bytes)
		d.note(fmt.Sprintf("tc counts ingress packets without the Ethernet header, so these rules have an overhead of -%d", d.L2Bytes))
	}
	if s.cells || r.linkLayer == nl.LINKLAYER_ATM {
		d.leave(cells, where, "%v", l.Rate)
	}
	f, err := policy.ParseFraming(fmt.Sprintf("%d/%d", overhead, mpu))
	if err != nil {
		d.leave(framing, where, "overhead %d, mpu %d", overhead, mpu)
	}
	l.Framing = f
}

// queues notes the differences from a limit that delayed excess packets.
func (d *device) queues() {
	d.note("htb and tbf delay excess packets, and these rules drop them: a rule has at least the default capacity for its rate")
	if d.feeder == nil {
		d.note("rules with 'excess: delay' and a capacity of a few packets delay them, too, if the device has the fq qdisc in place of htb or tbf")
	}
}

// A class is one of htb.
type class struct {
	object
	rate, ceil       rateSpec
	burst, ceilBurst uint32 // ticks
	quantum          uint32
	priority         uint32
	leaf             bool
	weight           policy.Weight
}

// htb adds the classes of a qdisc.
func (d *device) htb(q object) error {
	h, err := d.tree, error(nil)
	if h == nil {
		if h, err = d.parseHTB(q); err != nil {
			return err
		}
		d.tree = h
	}
	if err := h.classify(q.handle, d.outer, 0); err != nil {
		return err
	}
	first := len(d.entries)
	t, _ := d.outer.and(term{prefixes: everything, where: d.of("qdisc", q) + " default"})
	h.lead(h.fallback, t)
	for i := range d.entries[first:] {
		d.entries[first+i].fallback = true
	}
	return nil
}

// parseHTB reads the classes of a qdisc.
func (d *device) parseHTB(q object) (*htb, error) {
	h := &htb{device: d, classes: map[uint32]*class{}, root: q.handle, fallback: q.handle&^0xffff | q.options[nl.TCA_HTB_INIT].u32(8)&0xffff}
	var err error
	if h.stab, err = parseStab(q); err != nil {
		return nil, fmt.Errorf("read %s: %w", d.of("qdisc", q), err)
	}
	for _, o := range d.classes {
		if o.kind != "htb" || o.handle>>16 != q.handle>>16 {
			continue
		}
		parms := o.options[nl.TCA_HTB_PARMS]
		c := &class{
			object: o, rate: parseRate(parms, o.options[nl.TCA_HTB_RATE64]),
			ceil:  parseRate(parms[min(12, len(parms)):], o.options[nl.TCA_HTB_CEIL64]),
			burst: parms.u32(24), ceilBurst: parms.u32(28), quantum: parms.u32(32), priority: parms.u32(40), leaf: !d.inner[o.handle],
		}
		h.classes[o.handle] = c
		h.order = append(h.order, c)
	}
	for _, c := range h.order {
		levels := 1
		for above := h.classes[c.parent]; above != nil; above = h.classes[above.parent] {
			if levels++; levels > policy.MaxDepth {
				return nil, fmt.Errorf("read %s: more than %d classes are above each other, and as many pools can be; remove some levels",
					d.of("class", c.object), policy.MaxDepth)
			}
		}
	}
	weigh(h.order)
	return h, nil
}

// htb converts a tree of classes.
type htb struct {
	*device
	classes  map[uint32]*class
	order    []*class
	root     uint32 // the qdisc
	fallback uint32 // the default class
	stab     stab
}

// classDepth is the largest number of levels of classes.
const classDepth = 8

// classify adds the filters of a qdisc or class, for packets of a term.
func (h *htb) classify(at uint32, outer term, depth int) error {
	terms, err := h.terms(at)
	if err != nil {
		return err
	}
	for _, t := range terms {
		t, possible := outer.and(t)
		if !possible {
			continue
		}
		v := h.verdict(t, policy.Egress)
		c := h.classes[t.class]
		switch {
		case v.left:
		case v.to != nil:
			if err := v.to.feed(h.device, policy.Egress, t); err != nil {
				return err
			}
			h.enter(policy.Egress, t, entry{until: everyEntry})
		case t.partial != "" && c != nil && c.handle != h.fallback:
			h.reported[c.handle] = true
			h.leavePartial(t, bitRate(c.ceil.bytes))
		case t.partial != "" && v.limit != nil:
			h.leavePartial(t, v.limit.Rate)
		case v.limit != nil:
			if c != nil {
				h.reported[c.handle] = true
				h.leave(stacked, h.of("class", c.object), "%v for %s, which have %v already", bitRate(c.ceil.bytes), names(t.prefixes), v.limit.Rate)
			}
			h.enter(policy.Egress, t, v.entry)
		case v.drops:
			h.enter(policy.Egress, t, v.entry)
		case v.until == 0:
		case c != nil && !c.leaf && depth < classDepth:
			if err := h.classify(c.handle, t, depth+1); err != nil {
				return err
			}
			h.lead(h.fallback, t)
		default:
			h.lead(t.class, t)
		}
	}
	return nil
}

// leavePartial reports a filter that has other conditions than an address.
func (d *device) leavePartial(t term, rate policy.Rate) {
	r := unreadable
	switch t.kind {
	case "fw":
		r = byMark
	case "u32", "flower", "matchall":
		r = narrower
	}
	d.leave(r, t.where, "%v for %s", rate, t.describe())
}

// lead adds entries for packets that a filter sends to a class. The qdisc itself and classes
// with children do not limit them. If the class does not exist, the default class does.
func (h *htb) lead(to uint32, t term) {
	c := h.classes[to]
	if c == nil && to != h.root {
		to = h.fallback
		c = h.classes[to]
	}
	if c == nil || !c.leaf {
		h.enter(policy.Egress, t, entry{until: everyEntry})
		return
	}
	h.reported[to] = true
	h.queues()
	h.enter(policy.Egress, t, entry{limit: h.limit(c), until: everyEntry, label: policy.Label{Note: "tc class " + handle(to)}})
}

// limit returns the limit of a class within those above. A class at the qdisc cannot borrow, so its rate limits it.
func (h *htb) limit(c *class) *limit {
	if l := h.buckets[c.handle]; l != nil {
		return l
	}
	l := &limit{where: h.of("class", c.object)}
	h.buckets[c.handle] = l
	rate, ticks := c.ceil, c.ceilBurst
	if above := h.classes[c.parent]; above != nil {
		l.in, l.Weight = h.limit(above), c.weight
		l.Guarantee = h.guarantee(bitRate(min(c.rate.bytes, c.ceil.bytes)), l.where)
	} else if c.rate.bytes < c.ceil.bytes {
		rate, ticks = c.rate, c.burst
	}
	l.Rate = bitRate(rate.bytes)
	l.Capacity = max(burst(ticks, rate.bytes), policy.DefaultCapacity(l.Rate))
	if !c.leaf {
		l.Share.Kind = policy.ShareMember
	}
	h.frame(l, rate, h.stab, l.where, policy.Egress)
	return l
}

// weigh sets the weights of classes with the same parent, which borrow in proportion to their quanta. The quantum of a
// class with children has no effect, so its siblings have no weights either.
func weigh(classes []*class) {
	siblings := map[uint32][]*class{}
	for _, c := range classes {
		siblings[c.parent] = append(siblings[c.parent], c)
	}
	for _, all := range siblings {
		if slices.ContainsFunc(all, func(c *class) bool { return !c.leaf || c.quantum == 0 }) {
			continue
		}
		var common, most uint32
		for _, c := range all {
			common, most = divisor(common, c.quantum), max(most, c.quantum)
		}
		for _, c := range all {
			n := c.quantum / common
			if most/common > policy.MaxWeight {
				n = max(1, uint32(uint64(c.quantum)*policy.MaxWeight/uint64(most)))
			}
			if n > 1 { // 0 is 1
				c.weight = policy.Weight(n)
			}
		}
	}
}

// divisor returns the greatest common divisor.
func divisor(a, b uint32) uint32 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// rest reports what rules cannot express of the classes.
func (h *htb) rest() {
	var leaf *class
	for _, c := range h.order {
		switch {
		case !c.leaf:
		case !h.reported[c.handle]:
			h.leave(noNetwork, h.of("class", c.object), "%v", bitRate(c.ceil.bytes))
		case leaf == nil:
			leaf = c
		case leaf.priority != c.priority:
			h.leave(priority, h.of("class", c.object), "%d, others have %d", c.priority, leaf.priority)
		}
	}
}

// tbf adds a qdisc that limits all packets that leave a device.
func (d *device) tbf(q object) {
	parms := q.options[nl.TCA_TBF_PARMS]
	rate := parseRate(parms, q.options[nl.TCA_TBF_RATE64])
	where := d.of("qdisc", q)
	s, err := parseStab(q)
	if err != nil {
		d.leave(unreadable, where, "its size table")
	}
	l := d.buckets[q.handle] // several filters may redirect to it
	if l == nil {
		l = &limit{where: where}
		d.buckets[q.handle] = l
	}
	l.Rate = bitRate(rate.bytes)
	// As much leaves at once. Packets up to tbf's limit queue, which a rule cannot if it drops excess packets.
	l.Capacity = max(burst(parms.u32(28), rate.bytes), policy.DefaultCapacity(l.Rate))
	d.queues()
	d.frame(l, rate, s, where, policy.Egress)
	if parms.u32(20) != 0 {
		d.leave(peakRate, where, "with the rate %v", l.Rate)
	}
	t, _ := d.outer.and(term{prefixes: everything, where: where})
	if t.partial != "" {
		d.leavePartial(t, l.Rate)
		return
	}
	d.enter(policy.Egress, t, entry{limit: l, until: everyEntry, label: policy.Label{Note: "tbf " + handle(q.handle)}})
}

// leaveCake reports the cake qdiscs of a device, with the command that does the same.
func (d *device) leaveCake(netns string) {
	var link, how string
	var where, rates []string
	command := "line"
	for dir, flag := range []string{policy.Ingress: " --down ", policy.Egress: " --up "} {
		q := d.cakes[dir]
		if q.where == "" {
			continue
		}
		rate := bitRate(q.options[cakeRate64].u64(0))
		where, rates = append(where, q.where), append(rates, rate.String())
		const kilobit = 1000
		command += flag + ((rate*100/line.Percent + kilobit - 1) / kilobit * kilobit).String()
		overhead, mpu := int(int32(q.options[cakeOverhead].u32(0))), q.options[cakeMPU].u32(0)
		if len(q.options[cakeRaw]) == 0 {
			overhead -= int(d.L2Bytes) // cake adds it to the IP packet
		}
		if overhead != 0 || mpu != 0 {
			link = fmt.Sprintf(" --link %d/%d", overhead, mpu)
		}
		if q.options[cakeCells].u32(0) == cakeATM {
			d.leave(cells, q.where, "%v", rate)
		}
		if q.options[cakeMode].u32(0) == cakeFlows {
			how = " --fair flow"
		}
	}
	if where == nil {
		return
	}
	r := cakes
	r.Advice = fmt.Sprintf("no rule was made; %s does the same; it limits to %d %% of the rates that it is given", plain.Suggest(netns, command+link+how, d.Device), line.Percent)
	d.leave(r, plain.List(where), "%s", plain.List(rates))
}

// and returns the inner term with the conditions of both; false if no packet meets them.
func (t term) and(inner term) (term, bool) {
	inner.partial = cmp.Or(inner.partial, t.partial)
	inner.kind = cmp.Or(inner.kind, t.kind)
	if t.side != either && inner.side != either && t.side != inner.side {
		inner.restrict(fmt.Sprintf("%v %s", t.side, names(t.prefixes)))
		return inner, true
	}
	inner.side = cmp.Or(t.side, inner.side)
	inner.prefixes = common(t.prefixes, inner.prefixes)
	return inner, len(inner.prefixes) > 0
}

// common returns the networks that are in both.
func common(a, b []netip.Prefix) (both []netip.Prefix) {
	for _, p := range a {
		for _, q := range b {
			if !p.Overlaps(q) {
				continue
			}
			if p.Bits() < q.Bits() {
				both = append(both, q)
			} else {
				both = append(both, p)
			}
		}
	}
	return both
}
