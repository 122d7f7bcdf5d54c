// Package replay computes what limits would do to recorded traffic, without
// touching any. Its engines meter packets at the times of a trace: with the
// programs of the data path, or with the model of them. A summary and a chart
// are made from the results of an engine.
package replay

import (
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// An Engine meters packets.
type Engine interface {
	// Offer meters the next packet. Times are as close together as those of a trace.Reader. The result is valid until the
	// next call.
	Offer(*trace.Packet) (Result, error)
	Close() error
}

// Limits are the rules that a trace is replayed against. They are those of one hook
// and match the same address of a packet.
type Limits struct {
	Rules []policy.Rule // with different prefixes, and capacities from 1 byte
	Pools []policy.Rule // which policy.CheckPools accepts, those above others first
	Match policy.Match
}

// all returns the rules, then the pools. Chains and names number them so.
func (l Limits) all() []policy.Rule { return slices.Concat(l.Rules, l.Pools) }

// Alone reports whether one bucket decides about a packet: no rule has fair shares, colours or other limits, or is within a pool.
func (l Limits) Alone() bool {
	return len(l.Pools) == 0 && !l.HasColours() &&
		!slices.ContainsFunc(l.Rules, func(r policy.Rule) bool { return r.Share.Kind != policy.ShareNone || r.Also != policy.Also{} })
}

// HasColours reports whether some rules give packets colours.
func (l Limits) HasColours() bool {
	return slices.ContainsFunc(l.Rules, func(r policy.Rule) bool { return r.Algorithm.HasColours() })
}

// chains are, for each rule, its number and those of the pools above it, the lowest first.
func (l Limits) chains() [][]int {
	pools := map[policy.Within]int{}
	for i, pool := range l.Pools {
		pools[policy.Within(pool.Label.Name)] = i
	}
	chains := make([][]int, len(l.Rules))
	for i, r := range l.Rules {
		chains[i] = []int{i}
		for within := r.Within; within != ""; {
			pool := pools[within]
			chains[i] = append(chains[i], len(l.Rules)+pool)
			within = l.Pools[pool].Within
		}
	}
	return chains
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

	Colours // of a packet whose rule has colours; else zero

	// The rule or pool that refused the packet, and the lowest one whose guarantee let it pass: a network or the name of
	// a pool, or "" for none.
	RefusedBy, GuaranteedBy string
	Pools                   [policy.MaxDepth]uint64 // the levels of the pools above the rule afterwards, in units

	// Of the kernel alone: the packet was charged to the spill bucket, as its key found
	// no slot, or its bucket could not be updated in time.
	Spilled, Contended bool

	key    bucketKey
	sharer maps.Flow // of a rule with fair shares: as in a bucketKey
}

// Colours are the result of a meter with colours. Excess packets are those that are not green.
type Colours struct {
	Colour policy.Colour
	Second uint64 // of the second bucket afterwards, in units: of E, or with trtcm of P
	DSCP   uint8  // of a packet that passes, afterwards
}

// SecondBucket is the name of the second bucket of an algorithm with colours.
func SecondBucket(a policy.Algorithm) string {
	if a == policy.TRTCM {
		return "P"
	}
	return "E"
}

// Departure is the departure time of a packet that is not dropped, in ns.
func (r Result) Departure() uint64 { return r.Time + r.Wait }

// LevelBytes is the level in bytes, rounded up.
func (r Result) LevelBytes() uint64 { return model.Bytes(r.Level) }

// SecondBytes is the level of the second bucket in bytes, rounded up.
func (r Result) SecondBytes() uint64 { return model.Bytes(r.Second) }

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
	rules    []policy.Rule  // and pools
	chains   [][]int
	names    []string // of rules and pools
}

func compile(l Limits) compiled {
	c := compiled{Limits: l, byPrefix: map[netip.Prefix]int{}, lengths: map[bool][]int{}, rules: l.all(), chains: l.chains()}
	for _, r := range c.rules {
		name := r.Label.Name
		if !r.Pool {
			name = policy.CIDR(r.Prefix)
		}
		c.names = append(c.names, name)
	}
	for i, r := range l.Rules {
		if policy.IsMark(r.Prefix) {
			continue // a trace has none
		}
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
	return bucketKey{rule, c.scoped(c.Rules[rule].Each, p)}
}

// scoped returns what a bucket scope makes of the flow of a packet, see bucketKey.
func (c *compiled) scoped(each policy.Each, p packet) maps.Flow {
	bits := p.flow.Src.BitLen()
	switch each.Kind {
	case policy.EachAll:
		return maps.Flow{}
	case policy.EachFlow:
		return p.flow
	case policy.EachSubnet:
		bits = min(bits, int(each.Bits)) // a pool may share among longer subnets of IPv6
	}
	far, _ := p.flow.Far(c.Match).Prefix(bits) // the rule was validated
	if c.Match == policy.MatchSrc {
		return maps.Flow{Src: far.Addr()}
	}
	return maps.Flow{Dst: far.Addr()}
}

// sharerScopes are the bucket scopes that tell sharers apart as shares do.
var sharerScopes = [...]policy.EachKind{
	policy.ShareHost: policy.EachHost, policy.ShareSubnet: policy.EachSubnet, policy.ShareFlow: policy.EachFlow, policy.ShareMember: policy.EachAll,
}

func sharerScope(s policy.Share) policy.Each {
	return policy.Each{Kind: sharerScopes[s.Kind], Bits: s.Bits}
}

// sharer returns what the share of a rule or pool makes of the flow of a packet. It is empty without a share.
func (c *compiled) sharer(number int, p packet) maps.Flow {
	return c.scoped(sharerScope(c.rules[number].Share), p)
}

// Key returns the bucket key of a packet that matched a rule, as text.
func (l Limits) Key(r Result) string {
	return maps.KeyName(maps.Entry{Rule: l.Rules[r.key.rule]}, l.Match, r.key.flow)
}

// Sharer returns the sharer of a packet that matched a rule with fair shares, as text.
func (l Limits) Sharer(r Result) string {
	return maps.SharerName(maps.Entry{Rule: l.Rules[r.Rule]}, maps.Entry{}, l.Match, r.sharer)
}

// A Run is limits that meet a trace, summed up and as a chart.
type Run struct {
	Engine
	*Summary
	*Chart
}

// NewRun returns a run without packets.
func NewRun(e Engine, l Limits) *Run { return &Run{e, NewSummary(l), NewChart(l)} }

// Offer meters the next packet.
func (r *Run) Offer(p *trace.Packet) (Result, error) {
	result, err := r.Engine.Offer(p)
	if err == nil {
		r.Summary.Add(result)
		r.Chart.Add(result)
	}
	return result, err
}
