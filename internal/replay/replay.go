// Package replay computes what limits would do to recorded traffic, without
// touching any. Its engines meter packets at the times of a trace: with the
// programs of the data path, or with the model of them. A summary and a chart
// are made from the results of an engine.
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
	// Offer meters the next packet. The result is valid until the next call.
	Offer(*trace.Packet) (Result, error)
	Close() error
}

// Limits are the rules that a trace is replayed against. They are those of one hook
// and match the same address of a packet.
type Limits struct {
	Rules []policy.Rule // with different prefixes, and capacities from 1 byte
	Match policy.Match
}

// NoRule is the Result.Rule of a packet that matches none.
const NoRule = -1

// A Result is the verdict on one packet, and its effect.
type Result struct {
	Rule    int    // index in Limits.Rules, or NoRule
	Limited bool   // IP and not neighbour discovery: a rule can match it
	Time    uint64 // ns
	Bytes   uint64 // as the rule counts them; as in the trace if no rule matches
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

// A bucketKey identifies the bucket that a packet is charged to.
type bucketKey struct {
	rule int
	// flow depends on the bucket scope. For flows it is the flow; for hosts and subnets only the address that
	// rules match, or its first one; for all it is empty. So keys of different scopes differ.
	flow maps.Flow
}

// compiled are rules, indexed for matching.
type compiled struct {
	Limits
	byPrefix map[netip.Prefix]int
	lengths  map[bool][]int // prefix lengths of IPv4 (true) and IPv6, longest first
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

// match returns the index of the rule with the longest matching prefix, or NoRule.
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

// key returns the bucket key of a packet that matches a rule.
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

// name returns a bucket key as text.
func (l Limits) name(k bucketKey) string {
	return maps.KeyName(maps.Entry{Rule: l.Rules[k.rule]}, l.Match, k.flow)
}

// Key returns the bucket key of a packet that matched a rule, as text.
func (l Limits) Key(r Result) string { return l.name(r.key) }

// A Disagreement is a packet for which two engines have different results.
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
		s.WriteString(" (the spill bucket, because the table is full)")
	}
	if r.Contended {
		s.WriteString(" (contended)")
	}
	return s.String()
}

// Both offers each packet to the kernel and to the model. It fails with a
// Disagreement at the first packet for which they differ.
type Both struct {
	kernel  *Kernel
	model   *Model
	packets uint64
}

// NewBoth returns both engines. For errors see NewKernel.
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
