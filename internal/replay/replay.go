// Package replay says what limits would do to recorded traffic, without
// touching any: its engines meter packets at the times that a trace gives them,
// by the programs of the data path or by the model of them, and its summary and
// chart are made of what an engine says of each packet.
package replay

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// An Engine meters packets.
type Engine interface {
	// Offer brings the next packet to the rules. What it returns is good until the next one.
	Offer(*trace.Packet) (Result, error)
	Close() error
}

// Limits is what to replay a trace against: rules of one hook, which all go by
// the same side.
type Limits struct {
	Rules []policy.Rule // each of another prefix, and of any capacity from 1 byte on
	Match policy.Match
}

// NoRule is the Result.Rule of a packet that none decides over.
const NoRule = -1

// A Result is what became of one packet.
type Result struct {
	Rule    int    // index in Limits.Rules, or NoRule
	Limited bool   // IP, and not neighbour discovery: what a rule could match
	Time    uint64 // ns
	Bytes   uint64 // as the rule counts them; without a rule, as in the trace
	Verdict Verdict
	Excess  bool   // did not conform, whatever became of it
	Held    uint64 // ns that it is held back for
	Level   uint64 // of the bucket afterwards, in units of 2^-20 byte

	// Of the kernel alone: there was no room for a bucket of this sharer's own, or
	// the bucket could not be updated.
	Spare, Unsure bool

	sharer sharer
}

// A Verdict is what happens to a packet.
type Verdict uint8

const (
	Pass Verdict = iota
	Drop
	Mark  // passes, marked by ECN; in a queue after a wait
	Delay // passes after a wait
)

func (v Verdict) String() string { return [...]string{"pass", "drop", "mark", "delay"}[v] }

// Leaves is when a packet leaves that is not dropped, in ns.
func (r Result) Leaves() uint64 { return r.Time + r.Held }

// LevelBytes is the level in bytes, rounded up.
func (r Result) LevelBytes() uint64 { return model.Bytes(r.Level) }

// A sharer is whose bucket a packet is charged to: an address, the first one of
// a subnet, or a flow. With a bucket for all it is nobody.
type sharer struct {
	rule         int
	src, dst     [16]byte
	sport, dport uint16
	proto        uint8
	is4          bool
}

// compiled is the rules as packets meet them.
type compiled struct {
	Limits
	byPrefix map[netip.Prefix]int
	lengths  map[bool][]int // of the prefixes of IPv4 and others, longest first
}

func compile(l Limits) compiled {
	c := compiled{Limits: l, byPrefix: map[netip.Prefix]int{}, lengths: map[bool][]int{}}
	for i, r := range l.Rules {
		c.byPrefix[r.Prefix] = i
		is4 := r.Prefix.Addr().Is4()
		c.lengths[is4] = append(c.lengths[is4], r.Prefix.Bits())
	}
	for is4, lengths := range c.lengths {
		slices.Sort(lengths)
		slices.Reverse(lengths)
		c.lengths[is4] = slices.Compact(lengths)
	}
	return c
}

// match is the rule that decides over a packet, by the longest prefix.
func (c *compiled) match(p packet) int {
	if !p.ip || p.nd {
		return NoRule
	}
	far := p.side(c.Match)
	for _, bits := range c.lengths[far.Is4()] {
		prefix, _ := far.Prefix(bits) // it is no longer than the address
		if i, ok := c.byPrefix[prefix]; ok {
			return i
		}
	}
	return NoRule
}

// sharer is whose bucket a packet is charged to under a rule.
func (c *compiled) sharer(rule int, p packet) sharer {
	s := sharer{rule: rule}
	bits := 0
	switch each := c.Rules[rule].Each; each.Kind {
	case policy.EachAll:
		return s
	case policy.EachFlow:
		return flowOf(rule, p)
	case policy.EachSubnet:
		bits = int(each.Bits)
	default:
		bits = p.flow.Src.BitLen()
	}
	far, _ := p.side(c.Match).Prefix(bits) // the rule was validated
	s.is4, s.src = far.Addr().Is4(), far.Addr().As16()
	return s
}

// flowOf is the flow of a packet, which has a bucket of its own under a rule.
func flowOf(rule int, p packet) sharer {
	return sharer{
		rule: rule, is4: p.flow.Src.Is4(), src: p.flow.Src.As16(), dst: p.flow.Dst.As16(),
		proto: p.flow.Proto, sport: p.flow.SrcPort, dport: p.flow.DstPort,
	}
}

// name says who a sharer is: an address, a subnet, a flow, or the whole network of a rule.
func (l Limits) name(s sharer) string {
	rule := l.Rules[s.rule]
	address := func(b [16]byte) netip.Addr {
		a := netip.AddrFrom16(b)
		if s.is4 {
			a = a.Unmap()
		}
		return a
	}
	switch rule.Each.Kind {
	case policy.EachFlow:
		return maps.Flow{Src: address(s.src), Dst: address(s.dst), Proto: s.proto, SrcPort: s.sport, DstPort: s.dport}.String()
	case policy.EachSubnet:
		return netip.PrefixFrom(address(s.src), int(rule.Each.Bits)).String()
	case policy.EachHost:
		return address(s.src).String()
	}
	return rule.Prefix.String()
}

// Sharer names whose bucket a packet that matched a rule was charged to.
func (l Limits) Sharer(r Result) string { return l.name(r.sharer) }

// counted is what a packet counts under a rule: its bytes, and what the link adds.
func counted(f policy.Framing, bytes uint64) uint64 {
	return uint64(min(max(int64(bytes)+int64(f.Overhead), int64(f.MPU)), trace.MaxBytes))
}

// A Disagreement is a packet of which two engines say different things.
type Disagreement struct {
	Packet        uint64 // counted from 1
	Kernel, Model Result
	limits        Limits
}

func (d *Disagreement) Error() string {
	return fmt.Sprintf("packet %d: the kernel says %s; the model says %s", d.Packet, d.say(d.Kernel), d.say(d.Model))
}

func (d *Disagreement) say(r Result) string {
	var s strings.Builder
	fmt.Fprintf(&s, "%v at %d ns with %d bytes", r.Verdict, r.Time, r.Bytes)
	switch {
	case r.Rule == NoRule:
		s.WriteString(", no rule")
	default:
		if r.Held > 0 {
			fmt.Fprintf(&s, ", held back for %d ns", r.Held)
		}
		fmt.Fprintf(&s, ", level %d/1048576 bytes of %s", r.Level, d.limits.Sharer(r))
	}
	if r.Spare {
		s.WriteString(" (the spare bucket, as its table is full)")
	}
	if r.Unsure {
		s.WriteString(" (unsure)")
	}
	return s.String()
}

// Both offers each packet to the kernel and to the model, and fails with a
// Disagreement on the first of which they differ.
type Both struct {
	kernel  *Kernel
	model   *Model
	packets uint64
}

// NewBoth makes both engines; see NewKernel.
func NewBoth(l Limits) (*Both, error) {
	kernel, err := NewKernel(l)
	if err != nil {
		return nil, err
	}
	return &Both{kernel: kernel, model: NewModel(l)}, nil
}

// Offer implements Engine.
func (b *Both) Offer(p *trace.Packet) (Result, error) {
	b.packets++
	kernel, err := b.kernel.Offer(p)
	if err != nil {
		return kernel, err
	}
	model, err := b.model.Offer(p)
	if err == nil && kernel != model {
		err = &Disagreement{Packet: b.packets, Kernel: kernel, Model: model, limits: b.model.Limits}
	}
	return kernel, err
}

// Close implements Engine.
func (b *Both) Close() error { return b.kernel.Close() }
