package importer

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/shapectl/shapectl/internal/line"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	unreadable = reason{loosens, "filter of another kind", "its conditions or actions cannot be read", byHand}
	redirects  = reason{loosens, "redirection", "its packets are limited on another device, if at all",
		"if that is an ifb device, name it too; its limits become rules here"}
	unfed = reason{loosens, "limits on an ifb device", "they end when nothing redirects packets to it any more",
		"name the device whose packets are redirected, too; the limits become its rules"}
	sized      = reason{loosens, "largest packet of a policer", "it drops larger packets whatever its rate, and a rule has no such limit", "filter them by nftables if you need it"}
	cakes      = reason{loosens, "cake", "it is a limit, a queue and fair shares in one", "no rule was made"}
	oddPolicer = reason{loosens, "policer that no rule can have", "only one with a rate in bytes that drops excess packets becomes a rule", byHand}
	adaptive   = reason{loosens, "cake with autorate-ingress", "its rate follows that of the packets", "no rule was made; a pool with adapt-min follows the latency"}
	counted    = reason{other, "peak rate, size table, ATM cells or large overhead", "a rule has one rate, and a packet counts its bytes and a small constant overhead",
		"give the rules a lower rate or capacity, or an overhead"}
	priority  = reason{other, "priority of a class", "rules and pools have no priority", "give the class a guarantee, or a higher weight"}
	noNetwork = reason{loosens, "class without an address", "a rule needs a network", byHand}
	inside    = reason{loosens, "limit inside a queue", "only some packets come there, by more than their address", byHand}
	otherKind = reason{loosens, "queueing discipline of another kind", "only htb and tbf can be read, and fq limits each flow", byHand}
)

// TC imports the traffic control of devices: policers of filters, classes of htb that
// filters by address select, and tbf. Limits of an ifb device are for the devices that feed it.
// Commands that it names are for a network namespace; "" for the current one. The error is for too many hash tables.
func TC(dumps []Dump, netns string) (Imported, error) {
	s := newCollector()
	all, policers := map[string]*device{}, map[uint32]*limit{}
	for _, d := range dumps {
		all[d.Device] = &device{
			Dump: d, collector: s, all: all, policers: policers, inner: d.parents(), buckets: map[uint32]*limit{}, reported: map[uint32]bool{},
			outer: term{conditions: conditions{networks: everything}},
		}
	}
	for _, ifbs := range []bool{false, true} {
		for _, dump := range dumps {
			if d := all[dump.Device]; d.IFB == ifbs && d.feeder == nil {
				before := len(s.entries)
				d.read()
				if d.IFB && len(s.entries) > before {
					s.leave(unfed, d.Device, "no given device redirects packets to it")
				}
			}
		}
	}
	for _, dump := range dumps {
		d := all[dump.Device]
		d.rest()
		d.leaveCake(netns)
	}
	s.make()
	return s.imported(), s.err
}

// A device converts the traffic control of a device.
type device struct {
	Dump
	*collector
	all      map[string]*device
	inner    map[uint32]bool   // classes with children
	policers map[uint32]*limit // by index
	buckets  map[uint32]*limit // of classes, by handle
	reported map[uint32]bool   // classes with a rule, or reported as left
	// Of htb: its classes, also in order, the qdisc, and the default class.
	classes  map[uint32]*class
	order    []*class
	root     object
	fallback uint32
	cakes    [2]object // by direction: the qdisc of the device, or of an ifb device that it feeds
	cakesAt  [2]string

	// Of an ifb device: the device that feeds it, in which direction, and with which packets.
	feeder *device
	fed    policy.Direction
	outer  term
}

// unlimited lists the kinds of qdisc that have no rate.
var unlimited = []string{"bfifo", "choke", "codel", "drr", "dualpi2", "ets", "fq_codel", "fq_pie", "gred", "hhf", "mq", "multiq", "noqueue",
	"pfifo", "pfifo_fast", "pfifo_head_drop", "pie", "prio", "qfq", "red", "sfb", "sfq", "skbprio"}

func (d *device) read() {
	// Packets leave through clsact first.
	slices.SortStableFunc(d.Qdiscs, func(a, b object) int { return compare(a.kind != "clsact", b.kind != "clsact") })
	for _, q := range d.Qdiscs {
		first := len(d.entries)
		d.qdisc(q)
		for i := range d.entries[first:] {
			if e := &d.entries[first+i]; e.until == everyEntry && !e.drops {
				e.until = len(d.entries)
			}
		}
	}
}

// Attributes of cake, which package nl lacks: linux/pkt_sched.h.
const (
	cakeRate64, cakeTins, cakeCells, cakeMode, cakeOverhead, cakeAutorate = 2, 3, 4, 5, 6, 9
	cakeRaw, cakeWash, cakeMPU, cakeIngress, cakeACKFilter, cakeFwmark    = 12, 13, 14, 15, 16, 18

	cakeFlows, cakeBestEffort = 4, 3 // of cakeMode and cakeTins
)

// lostOfCake are the options of cake that line lacks, and the values without them.
var lostOfCake = []struct {
	attribute uint16
	without   uint32
	name      string
}{
	{cakeTins, cakeBestEffort, "diffserv"}, {cakeCells, 0, "atm or ptm"}, {cakeWash, 0, "wash"},
	{cakeIngress, 0, "ingress"}, {cakeACKFilter, 0, "ack-filter"}, {cakeFwmark, 0, "fwmark"},
}

func (d *device) qdisc(q object) {
	where, atTop, rate := d.of("qdisc", q), q.Parent == atRoot, bitRate(decode[uint64](q.options[cakeRate64])) // of cake
	switch {
	case q.kind == "clsact" || q.kind == "ingress":
		at := map[string]uint32{"clsact": atIngress, "ingress": q.Handle}[q.kind]
		if d.feeder == nil {
			d.filters(at, policy.Ingress, d.outer.conditions, -1)
		}
		if q.kind == "clsact" {
			d.filters(atEgress, policy.Egress, d.outer.conditions, -1)
		}
		return
	case q.kind == "htb" && atTop:
		d.htb(q)
		return
	case q.kind == "tbf" && atTop:
		d.tbf(q)
		return
	case q.kind == "cake" && q.options.u32(cakeAutorate) != 0:
		d.leave(adaptive, where, "%v so far", rate)
	case q.kind == "cake" && rate == 0:
	case q.kind == "cake" && (rate < policy.MinRate || rate > policy.MaxRate):
		d.leave(outside, where, "%v", rate)
	case q.kind == "cake" && atTop && d.outer.partial == "":
		of, dir := d, policy.Egress
		if d.feeder != nil {
			of, dir = d.feeder, d.fed
		}
		of.cakes[dir], of.cakesAt[dir] = q, where
	case q.kind == "fq" && slices.Contains([]uint32{0, math.MaxUint32}, q.options.u32(nl.TCA_FQ_FLOW_MAX_RATE)):
	case slices.Contains(unlimited, q.kind):
	case atTop:
		d.leave(otherKind, where, "%s", q.kind)
	default:
		d.leave(inside, where, "%s below class %s", q.kind, handle(q.Parent))
	}
	if atTop && q.Handle != 0 {
		d.filters(q.Handle, policy.Egress, d.outer.conditions, -1)
	}
}

func (d *device) of(what string, o object) string {
	return fmt.Sprintf("%s %s %s", d.Device, what, handle(o.Handle))
}

// everyEntry is the value of until that skips all entries.
const everyEntry = math.MaxInt

func (d *device) enter(dir policy.Direction, t term, e entry) {
	e.key, e.where = tableKey{d.Device, dir}, t.where
	if d.feeder != nil {
		e.key = tableKey{d.feeder.Device, d.fed}
	}
	e.conditions = t.conditions
	d.collector.enter(e)
}

// filters adds entries for the filters of a place, for packets that meet conditions. depth is that of its class; -1 for places
// that have no classes.
func (d *device) filters(at uint32, dir policy.Direction, outer conditions, depth int) {
	for _, t := range d.terms(at, outer) {
		v := d.verdict(t, dir)
		var c *class
		if depth >= 0 {
			c = d.classes[t.class]
		}
		switch {
		case v.left:
		case v.to != nil:
			v.to.feed(d, dir, t)
			d.enter(dir, t, entry{until: everyEntry})
		case t.partial != "" && c != nil && c.Handle != d.fallback:
			d.reported[c.Handle] = true
			d.leavePartial(t, bitRate(c.ceil.bytes))
		case t.partial != "" && v.limit != nil:
			d.leavePartial(t, v.limit.Rate)
		case v.limit != nil:
			if c != nil {
				d.reported[c.Handle] = true
				d.leave(stacked, d.of("class", c.object), "%v for %s, which have %v already", bitRate(c.ceil.bytes), t.describe(), v.limit.Rate)
			}
			d.enter(dir, t, v.entry)
		case v.until == 0:
		case v.drops || depth < 0:
			d.enter(dir, t, v.entry)
		case c != nil && !c.leaf && depth < policy.MaxDepth:
			d.filters(c.Handle, dir, t.conditions, depth+1)
			d.lead(d.fallback, t)
		default:
			d.lead(t.class, t)
		}
	}
}

func (d *device) leavePartial(t term, rate policy.Rate) {
	d.leave(narrower, t.where, "%v for %s", rate, t.describe())
}

// feed reads an ifb device for packets of a term of another device.
func (d *device) feed(from *device, dir policy.Direction, t term) {
	if d.feeder != nil && d.feeder != from {
		d.note(fmt.Sprintf("%s limited the packets of several devices together, and so do these pools", d.Device))
	}
	d.feeder, d.fed, d.outer = from, dir, t
	d.read()
}

// harmless lists the kinds of action that limit nothing.
var harmless = []string{"connmark", "csum", "ct", "ctinfo", "mpls", "nat", "pedit", "sample", "simple", "skbedit", "skbmod", "tunnel_key", "vlan"}

// A verdict is the effect of a filter's actions.
type verdict struct {
	entry
	left bool    // it cannot be carried over, which was reported
	to   *device // an ifb device to which the packets go
}

// nothing reports what is left, and returns the verdict for it.
func (d *device) nothing(r reason, where, format string, args ...any) verdict {
	d.leave(r, where, format, args...)
	return verdict{left: true}
}

// verdict follows the actions of a filter for the packets that conform to its policer, if it has one.
func (d *device) verdict(t term, dir policy.Direction) verdict {
	var policer attributes
	next := netlink.TC_ACT_PIPE // of conforming packets
	if t.unknown {
		return d.nothing(unreadable, t.where, "it may limit packets")
	}
	for _, a := range t.actions {
		if next != netlink.TC_ACT_PIPE {
			break
		}
		control := netlink.TcAct(decode[nl.TcGen](a.attributes[nl.TCA_GACT_PARMS]).Action)
		switch {
		case a.kind == "police" && policer != nil:
			return d.nothing(oddPolicer, t.where, "several policers")
		case a.kind == "police":
			policer, next = a.attributes, netlink.TcAct(a.u32(nl.TCA_POLICE_RESULT))
		case a.kind == "gact" && (control>>netlink.TC_ACT_EXT_SHIFT == 2 || len(a.attributes[nl.TCA_GACT_PROB]) > 0):
			return d.nothing(unreadable, t.where, "gact with a jump or by chance")
		case a.kind == "gact":
			next = control
		case a.kind == "mirred":
			m := decode[nl.TcMirred](a.attributes[nl.TCA_MIRRED_PARMS])
			if way := netlink.MirredAct(m.Eaction); way != netlink.TCA_EGRESS_REDIR && way != netlink.TCA_INGRESS_REDIR {
				continue
			}
			name := cmp.Or(d.Devices[m.Ifindex], fmt.Sprintf("device %d", m.Ifindex))
			if to := d.all[name]; to != nil && to.IFB && policer == nil && d.feeder == nil {
				return verdict{to: to}
			}
			return d.nothing(redirects, t.where, "to %s", name)
		case !slices.Contains(harmless, a.kind):
			return d.nothing(unreadable, t.where, "%s", a.kind)
		}
	}
	if policer != nil {
		return d.policed(t, policer, dir, next)
	}
	// Without actions, a filter with a class decides, and one at a hook passes packets.
	v := verdict{entry: entry{drops: drops(next)}}
	if next != netlink.TC_ACT_UNSPEC && (next != netlink.TC_ACT_PIPE || len(t.actions) == 0) {
		v.until = everyEntry
	}
	return v
}

// drops reports whether packets are dropped: those that are classified again come to the same filter until the kernel drops them.
func drops(control netlink.TcAct) bool {
	return control == netlink.TC_ACT_SHOT || control == netlink.TC_ACT_RECLASSIFY
}

const (
	policeRate64 = 8 // package nl lacks it
	// usualMTU is the size of the largest packet that conforms to a policer, if tc was told none.
	usualMTU = 2040
)

func (d *device) policed(t term, a attributes, dir policy.Direction, conforming netlink.TcAct) verdict {
	p := decode[nl.TcPolice](a[nl.TCA_POLICE_TBF])
	rate := rateOf(p.Rate, a[policeRate64])
	switch {
	case rate.bytes == 0 || drops(conforming):
		return d.nothing(oddPolicer, t.where, "policer %d without a rate in bytes that passes packets", p.Index)
	case !drops(netlink.TcAct(p.Action)):
		return d.nothing(oddPolicer, t.where, "%v, whose excess packets go on", bitRate(rate.bytes))
	}
	l := d.policers[p.Index] // several devices may have it
	if l == nil {
		l = &limit{Rule: policy.Rule{Rate: bitRate(rate.bytes), Capacity: burst(p.Burst, rate.bytes)}, where: fmt.Sprintf("%s police index %d", d.Device, p.Index)}
		d.policers[p.Index] = l
		d.frame(l, rate, object{}, dir, p.PeakRate.Rate != 0)
		if p.Mtu < usualMTU {
			d.leave(sized, l.where, "%d bytes", p.Mtu)
		}
	}
	v := verdict{entry: entry{limit: l, label: policy.Label{Note: fmt.Sprintf("police index %d", p.Index)}}}
	if conforming != netlink.TC_ACT_UNSPEC {
		v.until = everyEntry
	}
	return v
}

// A rateSpec is a rate and what a packet counts.
type rateSpec struct {
	nl.TcRateSpec
	bytes uint64 // per second
}

// rateOf returns a rate; rate64 is the attribute that it has if it does not fit its structure.
func rateOf(spec nl.TcRateSpec, rate64 []byte) rateSpec {
	if len(rate64) > 0 {
		return rateSpec{spec, decode[uint64](rate64)}
	}
	return rateSpec{spec, uint64(spec.Rate)}
}

// bitRate converts bytes per second. The result is above policy.MaxRate if it is too large.
func bitRate(bytes uint64) policy.Rate {
	return policy.Rate(8 * min(bytes, uint64(policy.MaxRate)/8+1))
}

const (
	// tick is the kernel's unit of time for bursts, in nanoseconds.
	tick = 64
	// uncounted is the largest rounding error of a burst's ticks in nanoseconds: tc counts in microseconds.
	uncounted = 1000 + tick
)

// burst returns the bytes that a rate drains in so many ticks. tc rounds down twice, so burst returns the roundest size that has
// these ticks.
func burst(ticks uint32, rate uint64) uint64 {
	least := float64(ticks) * tick * float64(min(rate, uint64(policy.MaxRate))) / 1e9
	for unit := float64(1 << 30); unit > 1; unit /= 1 << 10 {
		if round := math.Ceil(least/unit) * unit; round > 0 && round <= least+uncounted*float64(rate)/1e9 {
			return uint64(round)
		}
	}
	return uint64(math.Ceil(least))
}

// frame sets the framing of a limit; q is its qdisc, which may have a size table. It lists what no framing expresses, and a peak rate.
func (d *device) frame(l *limit, r rateSpec, q object, dir policy.Direction, peak bool) {
	overhead := int(r.Overhead)
	if dir == policy.Ingress && d.L2Bytes > 0 {
		overhead -= int(d.L2Bytes)
		d.note(fmt.Sprintf("tc counts ingress packets without the Ethernet header, so these rules have an overhead of -%d", d.L2Bytes))
	}
	l.Framing = policy.Framing{Overhead: int16(min(overhead, policy.MaxOverhead)), MPU: min(r.Mpu, policy.MaxMPU)}
	if peak || len(q.attributes[nl.TCA_STAB]) > 0 || r.Linklayer&nl.TC_LINKLAYER_MASK == nl.LINKLAYER_ATM ||
		int(l.Framing.Overhead) != overhead || l.Framing.MPU != r.Mpu {
		d.leave(counted, l.where, "%v", l.Rate)
	}
}

// queued sets the capacity of a limit that delayed excess packets, and notes the differences. At least as much as the capacity
// leaves at once. Others queue, which those of a rule cannot if it drops excess packets.
func (d *device) queued(l *limit, ticks uint32, rate uint64) {
	l.Rate = bitRate(rate)
	l.Capacity = max(burst(ticks, rate), policy.DefaultCapacity(l.Rate))
	d.note("htb and tbf delay excess packets, and these rules drop them: a rule has at least the default capacity for its rate")
	if d.feeder == nil {
		d.note("rules with 'excess: delay' and a capacity of a few packets delay them, too, if the device has the fq qdisc in place of htb or tbf")
	}
}

// A class is one of htb.
type class struct {
	object
	nl.TcHtbCopt
	rate, ceil rateSpec
	leaf       bool
	weight     policy.Weight
}

func (d *device) htb(q object) {
	if d.classes == nil {
		d.root, d.classes = q, map[uint32]*class{}
		d.fallback = q.Handle&^0xffff | decode[nl.TcHtbGlob](q.options[nl.TCA_HTB_INIT]).Defcls&0xffff
		d.readClasses()
	}
	d.filters(q.Handle, policy.Egress, d.outer.conditions, 0)
	t := d.outer
	t.where = d.of("qdisc", q) + " default"
	d.lead(d.fallback, t)
}

func (d *device) readClasses() {
	for _, o := range d.Classes {
		if o.kind != "htb" || o.Handle>>16 != d.root.Handle>>16 {
			continue
		}
		p := decode[nl.TcHtbCopt](o.options[nl.TCA_HTB_PARMS])
		c := &class{object: o, TcHtbCopt: p, leaf: !d.inner[o.Handle]}
		c.rate, c.ceil = rateOf(p.Rate, o.options[nl.TCA_HTB_RATE64]), rateOf(p.Ceil, o.options[nl.TCA_HTB_CEIL64])
		d.classes[o.Handle] = c
		d.order = append(d.order, c)
	}
	weigh(d.order)
}

// lead adds entries for packets that a filter sends to a class. The qdisc itself and classes
// with children do not limit them. If the class does not exist, the default class does.
func (d *device) lead(to uint32, t term) {
	c := d.classes[to]
	if c == nil && to != d.root.Handle {
		to = d.fallback
		c = d.classes[to]
	}
	if c == nil || !c.leaf {
		d.enter(policy.Egress, t, entry{until: everyEntry})
		return
	}
	d.reported[to] = true
	d.enter(policy.Egress, t, entry{limit: d.limit(c), until: everyEntry, label: policy.Label{Note: "tc class " + handle(to)}})
}

// limit returns the limit of a class within those above. A class at the qdisc cannot borrow, so its rate limits it.
func (d *device) limit(c *class) *limit {
	if l := d.buckets[c.Handle]; l != nil {
		return l
	}
	l := &limit{where: d.of("class", c.object)}
	d.buckets[c.Handle] = l
	rate, ticks := c.ceil, c.Cbuffer
	if above := d.classes[c.Parent]; above != nil {
		if l.in, l.Weight = d.limit(above), c.weight; !l.in.possible() {
			d.leave(outside, l.in.where, "%d bit/s", uint64(l.in.Rate))
			l.in = l.in.in
		}
		if rate := bitRate(min(c.rate.bytes, c.ceil.bytes)); rate >= policy.MinRate { // else it is nothing
			l.Guarantee = policy.Guarantee(rate)
		}
	} else if c.rate.bytes < c.ceil.bytes {
		rate, ticks = c.rate, c.Buffer
	}
	d.queued(l, ticks, rate.bytes)
	if !c.leaf {
		l.Share.Kind = policy.ShareMember
	}
	d.frame(l, rate, d.root, policy.Egress, false)
	return l
}

// weigh sets the weights of classes with the same parent, which borrow in proportion to their quanta. The quantum of a
// class with children has no effect, so its siblings have no weights either.
func weigh(classes []*class) {
	siblings := map[uint32][]*class{}
	for _, c := range classes {
		siblings[c.Parent] = append(siblings[c.Parent], c)
	}
	for _, all := range siblings {
		if slices.ContainsFunc(all, func(c *class) bool { return !c.leaf || c.Quantum == 0 }) {
			continue
		}
		var divisor, most uint32 // common to all, and the largest quantum
		for _, c := range all {
			most = max(most, c.Quantum)
			for rest := c.Quantum; rest != 0; {
				divisor, rest = rest, divisor%rest
			}
		}
		for _, c := range all {
			n := c.Quantum / divisor
			if most/divisor > policy.MaxWeight {
				n = uint32(uint64(c.Quantum) * policy.MaxWeight / uint64(most))
			}
			if n > 1 { // 0 is 1
				c.weight = policy.Weight(n)
			}
		}
	}
}

// rest reports what rules cannot express of the classes.
func (d *device) rest() {
	var leaf *class
	for _, c := range d.order {
		switch {
		case !c.leaf:
		case !d.reported[c.Handle]:
			d.leave(noNetwork, d.of("class", c.object), "%v", bitRate(c.ceil.bytes))
		case leaf == nil:
			leaf = c
		case leaf.Prio != c.Prio:
			d.leave(priority, d.of("class", c.object), "%d, others have %d", c.Prio, leaf.Prio)
		}
	}
}

// tbf adds a qdisc that limits all packets that leave a device.
func (d *device) tbf(q object) {
	p, t := decode[nl.TcTbfQopt](q.options[nl.TCA_TBF_PARMS]), d.outer
	rate := rateOf(p.Rate, q.options[nl.TCA_TBF_RATE64])
	t.where = d.of("qdisc", q)
	l := d.buckets[q.Handle] // several filters may redirect to it
	if l == nil {
		l = &limit{where: t.where}
		d.buckets[q.Handle] = l
	}
	d.queued(l, p.Buffer, rate.bytes)
	d.frame(l, rate, q, policy.Egress, p.Peakrate.Rate != 0)
	if t.partial != "" {
		d.leavePartial(t, l.Rate)
		return
	}
	d.enter(policy.Egress, t, entry{limit: l, until: everyEntry, label: policy.Label{Note: "tbf " + handle(q.Handle)}})
}

// leaveCake reports the cake qdiscs of a device, with the command that does the same.
func (d *device) leaveCake(netns string) {
	var where, rates []string
	var o attributes // those of egress, if it has one
	command := "line"
	for dir, flag := range []string{policy.Ingress: " --down ", policy.Egress: " --up "} {
		if d.cakes[dir].options == nil {
			continue
		}
		o = d.cakes[dir].options
		rate := bitRate(decode[uint64](o[cakeRate64]))
		where, rates = append(where, d.cakesAt[dir]), append(rates, rate.String())
		const kilobit = 1000
		command += flag + ((rate*100/line.Percent + kilobit - 1) / kilobit * kilobit).String()
	}
	overhead := int(int32(o.u32(cakeOverhead)))
	if len(o[cakeRaw]) == 0 {
		overhead -= int(d.L2Bytes) // cake adds it to the IP packet
	}
	if mpu := o.u32(cakeMPU); overhead != 0 || mpu != 0 {
		command += fmt.Sprintf(" --link %d/%d", overhead, mpu)
	}
	if o.u32(cakeMode) == cakeFlows {
		command += " --fair flow"
	}
	if where != nil {
		r := cakes
		r.Advice = fmt.Sprintf("no rule was made; %s does the same; it limits to %d %% of the rates that it is given", plain.Suggest(netns, command, d.Device), line.Percent)
		var lost []string
		for _, l := range lostOfCake {
			if o.u32(l.attribute) != l.without {
				lost = append(lost, l.name)
			}
		}
		if lost != nil {
			r.Advice += ", and leaves out " + plain.List(lost)
		}
		d.leave(r, plain.List(where), "%s", plain.List(rates))
	}
}
