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

// A Result is what happened to one packet.
type Result struct {
	Rule    int    // index in Limits.Rules, or NoRule
	Limited bool   // IP, and not neighbour discovery: what a rule could match
	Time    uint64 // ns
	Bytes   uint64 // as the rule counts them; without a rule, as in the trace
	Verdict model.Verdict
	Excess  bool   // it did not conform, whatever its verdict
	Wait    uint64 // ns that it is queued
	Level   uint64 // of the bucket afterwards, in units of 2^-20 byte

	// Of the kernel alone: the packet was charged to the spill bucket, as its key found
	// no slot, or its bucket could not be updated in time.
	Spilled, Contended bool

	key bucketKey
}

// Departure is the departure time of a packet that is not dropped, in ns.
func (r Result) Departure() uint64 { return r.Time + r.Wait }

// LevelBytes is the level in bytes, rounded up.
func (r Result) LevelBytes() uint64 { return model.Bytes(r.Level) }

// A bucketKey says who has the bucket that a packet is charged to.
type bucketKey struct {
	rule int
	// flow is the flow that has it. Where a host or a subnet has it, flow has nothing but its address, or its first
	// one, on the side that rules match; where all packets have it, flow is empty. So none of these is another's.
	flow maps.Flow
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
	far := p.flow.Far(c.Match)
	for _, bits := range c.lengths[far.Is4()] {
		prefix, _ := far.Prefix(bits) // it is no longer than the address
		if i, ok := c.byPrefix[prefix]; ok {
			return i
		}
	}
	return NoRule
}

// key is the bucket key of a packet under a rule.
func (c *compiled) key(rule int, p packet) bucketKey {
	bits := p.flow.Src.BitLen()
	switch each := c.Rules[rule].Each; each.Kind {
	case policy.EachAll:
		return bucketKey{rule: rule}
	case policy.EachFlow:
		return bucketKey{rule, p.flow}
	case policy.EachSubnet:
		bits = int(each.Bits)
	}
	far, _ := p.flow.Far(c.Match).Prefix(bits) // the rule was validated
	if c.Match == policy.MatchSrc {
		return bucketKey{rule, maps.Flow{Src: far.Addr()}}
	}
	return bucketKey{rule, maps.Flow{Dst: far.Addr()}}
}

// name is a bucket key as people read it.
func (l Limits) name(k bucketKey) string {
	return maps.KeyName(maps.Entry{Rule: l.Rules[k.rule]}, l.Match, k.flow)
}

// Key names the bucket that a packet was charged to, of a packet that matched a rule.
func (l Limits) Key(r Result) string { return l.name(r.key) }

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
		if r.Wait > 0 {
			fmt.Fprintf(&s, ", queued for %d ns", r.Wait)
		}
		fmt.Fprintf(&s, ", level %d/1048576 bytes of %s", r.Level, d.limits.Key(r))
	}
	if r.Spilled {
		s.WriteString(" (the spill bucket, as its table is full)")
	}
	if r.Contended {
		s.WriteString(" (contended)")
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
	want, err := b.model.Offer(p)
	if err == nil && kernel != want {
		err = &Disagreement{Packet: b.packets, Kernel: kernel, Model: want, limits: b.model.Limits}
	}
	return kernel, err
}

// Close implements Engine.
func (b *Both) Close() error { return b.kernel.Close() }
