// Package report turns rules and what became of their packets into what people
// and programs read: tables and JSON. It writes to an io.Writer and knows
// nothing of kernels; only it knows columns and the names in the JSON.
package report

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Rule is all that is known of a rule, or of a pool, which has neither a device nor a network.
type Rule struct {
	Kind      string `json:"kind"` // rule or pool
	Device    string `json:"device"`
	Direction string `json:"direction"`
	CIDR      string `json:"cidr"`
	Name      string `json:"name"` // of the rule, its note and its plan; "" for none
	Note      string `json:"note"`
	Plan      string `json:"plan"`
	Host      string `json:"host"`  // the MAC address of the host whose addresses the limit is for; "" for none
	Owner     string `json:"owner"` // the device, its direction and the host there that a pool belongs to; "" for none
	Line      string `json:"line"`  // the device of the line that a pool is of; "" for none
	Match     string `json:"match"`
	Algorithm string `json:"algorithm"`
	Each      string `json:"each"`
	Excess    string `json:"excess"`
	Penalty   string `json:"penalty"`
	Fail      string `json:"fail"`
	// Rate and capacity are null for an unlimited rule.
	RateBits      *uint64 `json:"rate_bits_per_second"`
	CapacityBytes *uint64 `json:"capacity_bytes"`
	Queue
	ColourOptions
	Unlimited     bool   `json:"unlimited"`
	OverheadBytes int16  `json:"overhead_bytes"`
	MPUBytes      uint16 `json:"mpu_bytes"`
	Within        string `json:"within"` // the pool that it draws from; "" for none
	// GuaranteeBits is null for no guarantee.
	GuaranteeBits *uint64 `json:"guarantee_bits_per_second"`
	// WaitingBits is null unless a guarantee waits for room in the pool.
	WaitingBits *uint64 `json:"waiting_guarantee_bits_per_second"`
	Members     uint32  `json:"members"` // buckets that have the guarantee each, at most; 0 unless it has several
	Weight      uint16  `json:"weight"`  // in the shares of its pool
	Share       string  `json:"share"`   // who gets a fair share of the bucket
	// Cluster is null for a rule, and for a pool of this host alone.
	Cluster *Cluster `json:"cluster"`
	// Adapt is null for a rule, and for a pool whose rate does not adapt to a line.
	Adapt *Adapt `json:"adapt"`
	// Leased is whether the pool has a lease on a part of its cluster's rate now, or on a part of its rate that its line allows; null without a cluster and if it does not adapt.
	Leased *bool `json:"leased"`
	// LeaseBits is the rate of the lease; null without one.
	LeaseBits *uint64 `json:"lease_bits_per_second"`
	// LeaseEndsInNS is when the lease ends unless it is renewed; null without one.
	LeaseEndsInNS *uint64 `json:"lease_ends_in_ns"`
	// SafeBits is the rate without a lease, after this one if there is one; null if there never is one.
	SafeBits          *uint64 `json:"safe_bits_per_second"`
	Attached          *bool   `json:"attached"` // null for a pool
	State             string  `json:"state"`
	Hook              string  `json:"hook"`
	LevelBytes        uint64  `json:"level_bytes"`        // with colours, of C
	SecondLevelBytes  *uint64 `json:"second_level_bytes"` // of P or E; null without colours
	PassedPackets     uint64  `json:"passed_packets"`
	PassedBytes       uint64  `json:"passed_bytes"`
	ExcessPackets     uint64  `json:"excess_packets"`
	ExcessBytes       uint64  `json:"excess_bytes"`
	DroppedPackets    uint64  `json:"dropped_packets"`
	DroppedBytes      uint64  `json:"dropped_bytes"`
	RefusedPackets    uint64  `json:"refused_packets"` // of a pool: those of the dropped ones that it refused itself
	RefusedBytes      uint64  `json:"refused_bytes"`
	DelayedPackets    uint64  `json:"delayed_packets"`
	DelayedBytes      uint64  `json:"delayed_bytes"`
	MarkedPackets     uint64  `json:"marked_packets"`
	GuaranteedPackets uint64  `json:"guaranteed_packets"` // of the passed ones: those that the guarantee covered
	GuaranteedBytes   uint64  `json:"guaranteed_bytes"`
	BorrowedPackets   uint64  `json:"borrowed_packets"` // the other passed ones of what is within a pool
	BorrowedBytes     uint64  `json:"borrowed_bytes"`
	ContendedPackets  uint64  `json:"contended_packets"`
	ExemptPackets     uint64  `json:"exempt_packets"`
	SKBs              uint64  `json:"skbs"`            // passed and dropped, where packets are those on the wire
	SpilledPackets    uint64  `json:"spilled_packets"` // of all that matched: charged to the spill bucket
	ColourCounters
	Sentence string `json:"sentence"`
	// RevertsInNS is null unless the rule came with a change that is not confirmed.
	RevertsInNS *uint64 `json:"reverts_in_ns"`
	// MadeBy says who made that change; "" if that is not known.
	MadeBy string `json:"-"`
	// Confirm is the command that confirms that change.
	Confirm string `json:"-"`
	// Shadow is null for a rule without one.
	Shadow *Shadow `json:"shadow"`
	// Buckets is null unless it was asked for.
	Buckets []Bucket `json:"buckets"`
	// ActiveBuckets is how many hosts, subnets and flows have a bucket that is not empty; null unless it was asked for.
	ActiveBuckets *uint64 `json:"active_buckets"`
	// ActiveSharers is how many have a part of the shares of the bucket now; null where there are none, or unless it was asked for.
	ActiveSharers *uint64 `json:"active_sharers"`
	// IntervalNS is the time over which use and dropped were measured; null unless that was asked for.
	IntervalNS *uint64 `json:"interval_ns"`
	// UseBits is the rate of passed packets over the interval; null without one.
	UseBits *uint64 `json:"use_bits_per_second"`
	// DroppedBits is the rate of dropped packets over the interval, of a pool of those that its members lost; null without one.
	DroppedBits *uint64 `json:"dropped_bits_per_second"`
	// RefusedBits is the rate of packets that a pool itself refused; null for a rule, and without an interval.
	RefusedBits *uint64 `json:"refused_bits_per_second"`
	// BorrowedBits is the part of UseBits beyond the guarantee; null without an interval.
	BorrowedBits *uint64 `json:"borrowed_bits_per_second"`
	// GreenBits, YellowBits and RedBits are the rates of packets of each colour; null without colours, and without an interval.
	GreenBits  *uint64 `json:"green_bits_per_second"`
	YellowBits *uint64 `json:"yellow_bits_per_second"`
	RedBits    *uint64 `json:"red_bits_per_second"`
	// UsePercent is UseBits in percent of the rate, of a pool with leases in percent of what it may use now, with colours in percent of what green and yellow packets may use together; null without an interval, and where several keys have that rate each.
	UsePercent *float64 `json:"use_percent"`
	// DroppedPercent is dropped packets in percent of all that matched over the interval; null without one, and
	// where none matched.
	DroppedPercent *float64 `json:"dropped_percent"`
	// RefusedPercent is the same for packets that a pool itself refused; null for a rule.
	RefusedPercent *float64 `json:"refused_percent"`
	// ExcessPercent is the same for excess and delayed packets together.
	ExcessPercent *float64 `json:"excess_percent"`
	// Decides says whether the rule decides about the address that was searched for; null for other searches.
	Decides *bool `json:"decides"`

	prefix               netip.Prefix
	rateNow, capacityNow *uint64 // of a pool with leases; else nil
	poolRate             PoolRate
	scope                string // who has the rate; "" for all together
	matched              uint64 // packets of the rules within a pool
	lately               Sample // what was counted over the interval
}

// A Bucket is a bucket of a rule that is not empty.
type Bucket struct {
	Key              string  `json:"key"` // the host, subnet or flow
	LevelBytes       uint64  `json:"level_bytes"`
	SecondLevelBytes *uint64 `json:"second_level_bytes"` // of P or E; null without colours
	// WaitNS is how long a full packet that came now would wait; null where it
	// would be dropped, and where the rule delays no packets.
	WaitNS *uint64 `json:"wait_ns"`
}

// NewRule puts together what is known of a rule: its parameters, its counters and the level of its shared bucket, in
// bytes. Whether it is in force, and until when, is for the caller; so is Sentence.
func NewRule(device string, d policy.Direction, match policy.Match, r policy.Rule, c maps.Counters, level uint64) Rule {
	rate, capacity := limit(r)
	out := Rule{
		Kind: KindRule, Within: string(r.Within), GuaranteeBits: optionalRate(r.Guarantee), Members: uint32(r.Members), Weight: r.Weight.Value(),
		Share: r.Share.String(), Cluster: newCluster(r.Cluster), Adapt: newAdapt(r.Adapt), Name: r.Label.Name, Note: r.Label.Note, Plan: r.Label.Plan, Host: r.Label.Host.String(),
		Owner: r.Label.Owner.String(), Line: string(r.Label.Line),
		WaitingBits: optionalRate(r.Label.Waits), prefix: r.Prefix, scope: scope(r),
		Device: device, Direction: d.String(), CIDR: r.Prefix.String(), Match: match.String(),
		Algorithm: r.Algorithm.String(), Each: r.Each.String(), Excess: r.Excess.String(),
		Penalty: r.Penalty.String(), Fail: r.Fail.String(), RateBits: rate, CapacityBytes: capacity, Unlimited: rate == nil,
		OverheadBytes: r.Framing.Overhead, MPUBytes: r.Framing.MPU, LevelBytes: level,
		PassedPackets: c.PassedPackets, PassedBytes: c.PassedBytes,
		ExcessPackets: c.ExcessPackets, ExcessBytes: c.ExcessBytes,
		DroppedPackets: c.DroppedPackets, DroppedBytes: c.DroppedBytes,
		DelayedPackets: c.DelayedPackets, DelayedBytes: c.DelayedBytes,
		Queue: NewQueue(r), MarkedPackets: c.MarkedPackets, ContendedPackets: c.ContendedPackets,
		ExemptPackets: c.ExemptPackets, SpilledPackets: c.SpilledPackets, SKBs: c.SKBs(),
		ColourOptions: NewColourOptions(r), ColourCounters: newColourCounters(c),
	}
	if out.HasColours() {
		out.Excess = "" // what happens depends on the colour
	}
	if r.Pool {
		out.RefusedPackets, out.RefusedBytes, out.DroppedPackets, out.DroppedBytes = c.DroppedPackets, c.DroppedBytes, 0, 0
		out.Kind, out.Device, out.Direction, out.CIDR, out.Match, out.prefix = KindPool, "", "", "", "", netip.Prefix{}
	}
	return out
}

// A Cluster is how a pool shares its rate with other hosts.
type Cluster struct {
	Name   string `json:"name"`
	Weight uint16 `json:"weight"` // of this host
	// FloorBits is null for none.
	FloorBits *uint64 `json:"floor_bits_per_second"`
	// ShareBits is null unless the lease is fixed.
	ShareBits *uint64 `json:"share_bits_per_second"`
	// SafeBits is null if the rate without a lease is an equal part.
	SafeBits *uint64 `json:"safe_bits_per_second"`
}

func newCluster(c policy.Cluster) *Cluster {
	if c.Name == "" {
		return nil
	}
	return &Cluster{
		Name: string(c.Name), Weight: c.Weight.Value(), FloorBits: optionalRate(policy.Guarantee(c.Floor)),
		ShareBits: optionalRate(policy.Guarantee(c.Share)), SafeBits: optionalRate(policy.Guarantee(c.Safe)),
	}
}

// An Adapt is how a pool adapts its rate to the latency of its line.
type Adapt struct {
	MinBits uint64   `json:"min_bits_per_second"` // the lowest rate
	AboveNS uint64   `json:"above_ns"`            // how far the latency may rise above the usual one
	To      []string `json:"to"`                  // the addresses that are pinged
}

func newAdapt(a policy.Adapt) *Adapt {
	if a.Min == 0 {
		return nil
	}
	out := &Adapt{MinBits: uint64(a.Min), AboveNS: uint64(a.Above.Value())}
	for _, addr := range a.To.Addrs() {
		out.To = append(out.To, addr.String())
	}
	return out
}

// Kinds of a Rule.
const (
	KindRule = "rule"
	KindPool = "pool"
)

// IsPool reports whether this is a pool.
func (r *Rule) IsPool() bool { return r.Kind == KindPool }

// A Key tells a rule or pool from all others, now and later.
type Key = history.Key

// Key is the key of the rule.
func (r *Rule) Key() Key {
	if r.IsPool() {
		return Key{Pool: r.Name}
	}
	return Key{Device: r.Device, Direction: r.Direction, Network: r.CIDR}
}

func optionalRate(g policy.Guarantee) *uint64 {
	if g == 0 {
		return nil
	}
	return (*uint64)(&g)
}

// Guaranteed divides what passed by the counters of the guarantee, which are zero without one.
func (r *Rule) Guaranteed(c maps.Counters) {
	if r.Within == "" {
		return
	}
	r.GuaranteedPackets, r.GuaranteedBytes = c.PassedPackets, c.PassedBytes
	r.BorrowedPackets = r.PassedPackets - min(r.PassedPackets, c.PassedPackets)
	r.BorrowedBytes = r.PassedBytes - min(r.PassedBytes, c.PassedBytes)
}

// Lost says what became of the packets of a pool in all the rules within it.
func (r *Rule) Lost(l maps.Loss) {
	r.matched, r.DroppedPackets, r.DroppedBytes = l.MatchedPackets, l.DroppedPackets, l.DroppedBytes
}

// offered is the packets of a rule, or of the rules within a pool.
func (r *Rule) offered() uint64 {
	if r.IsPool() {
		return r.matched
	}
	return r.PassedPackets + r.DroppedPackets
}

// scope is who has a bucket of a rule that more than one key may have; else "".
func scope(r policy.Rule) string {
	each := r.Each.Canonical(r.Prefix)
	if r.Rate == policy.Unlimited || each.Kind == policy.EachAll || each.Kind == policy.EachHost && r.Prefix.IsSingleIP() {
		return ""
	}
	return each.String()
}

// partOf is percentOf; nil if the whole is 0.
func partOf(part, whole uint64) *float64 {
	if whole == 0 {
		return nil
	}
	p := percentOf(part, whole)
	return &p
}

// dropped is the share of dropped packets over the interval, or else since the rule was set; nil where none matched.
func (r *Rule) dropped() *float64 {
	if r.IntervalNS != nil {
		return r.DroppedPercent
	}
	return partOf(r.DroppedPackets, r.offered())
}

// refused is the same for packets that a pool itself refused; nil for a rule.
func (r *Rule) refused() *float64 {
	switch {
	case !r.IsPool():
		return nil
	case r.IntervalNS != nil:
		return r.RefusedPercent
	}
	return partOf(r.RefusedPackets, r.offered())
}

// excess is the same for packets that were excess or delayed.
func (r *Rule) excess() *float64 {
	if r.IntervalNS != nil {
		return r.ExcessPercent
	}
	return partOf(r.ExcessPackets+r.DelayedPackets, r.offered())
}

// A Sample is the counters of a rule at one time.
type Sample struct {
	passedBytes, borrowedBytes        uint64
	droppedBytes, refusedBytes        uint64
	offered, dropped, refused, excess uint64 // packets
	green, yellow, red                uint64 // bytes
}

// Sample is the rule's counters.
func (r *Rule) Sample() Sample {
	return Sample{
		r.PassedBytes, r.BorrowedBytes, r.DroppedBytes, r.RefusedBytes,
		r.offered(), r.DroppedPackets, r.RefusedPackets, r.ExcessPackets + r.DelayedPackets,
		r.GreenBytes, r.YellowBytes, r.RedBytes,
	}
}

// counted is the packets over the interval, or else since the rule was set.
func (r *Rule) counted() Sample {
	if r.IntervalNS != nil {
		return r.lately
	}
	return r.Sample()
}

// Since measures what the rule did since a sample was taken, which is ns ago. Nothing is
// known where it, or a rule within the pool, was set anew since.
func (r *Rule) Since(s Sample, ns uint64) {
	r.IntervalNS, r.DroppedPercent, r.RefusedPercent, r.ExcessPercent, r.lately = &ns, nil, nil, nil, Sample{}
	now := r.Sample()
	if now.passedBytes < s.passedBytes || now.offered < s.offered || now.dropped < s.dropped || now.refused < s.refused || now.excess < s.excess {
		return
	}
	perSecond := func(bytes uint64) *uint64 {
		bits := uint64(float64(bytes) * 8e9 / float64(max(ns, 1)))
		return &bits
	}
	r.UseBits = perSecond(now.passedBytes - s.passedBytes)
	r.DroppedBits = perSecond(now.droppedBytes - min(now.droppedBytes, s.droppedBytes))
	r.BorrowedBits = perSecond(now.borrowedBytes - min(now.borrowedBytes, s.borrowedBytes))
	if r.HasColours() {
		r.GreenBits = perSecond(now.green - min(now.green, s.green))
		r.YellowBits = perSecond(now.yellow - min(now.yellow, s.yellow))
		r.RedBits = perSecond(now.red - min(now.red, s.red))
	}
	if rate := r.RateNow(); rate != nil && r.scope == "" {
		p := percentOf(*r.UseBits, *rate)
		r.UsePercent = &p
	}
	all := now.offered - s.offered
	r.lately.offered, r.lately.dropped = all, now.dropped-s.dropped
	r.DroppedPercent, r.ExcessPercent = partOf(now.dropped-s.dropped, all), partOf(now.excess-s.excess, all)
	if r.IsPool() {
		r.RefusedPercent = partOf(now.refused-s.refused, all)
		r.RefusedBits = perSecond(now.refusedBytes - min(now.refusedBytes, s.refusedBytes))
	}
}

// limit is the rate and the capacity of a rule, nil for an unlimited one.
func limit(r policy.Rule) (rate, capacity *uint64) {
	if r.Rate == policy.Unlimited {
		return nil, nil
	}
	return (*uint64)(&r.Rate), &r.Capacity
}

// JSON writes a value as one indented document; a list, which may be long, one element after another.
func JSON(w io.Writer, v any) error {
	const indent = "  "
	list := reflect.ValueOf(v)
	if list.Kind() != reflect.Slice || list.Len() == 0 {
		return encoder(w, "", indent).Encode(v)
	}
	var text bytes.Buffer
	one := encoder(&text, indent, indent)
	for i := range list.Len() {
		text.WriteString([]string{"[\n", ",\n"}[min(i, 1)] + indent)
		if err := one.Encode(list.Index(i).Interface()); err != nil {
			return err
		}
		text.Truncate(text.Len() - len("\n"))
		if _, err := text.WriteTo(w); err != nil {
			return err
		}
	}
	_, err := io.WriteString(w, "\n]\n")
	return err
}

func encoder(w io.Writer, prefix, indent string) *json.Encoder {
	e := json.NewEncoder(w)
	e.SetIndent(prefix, indent)
	e.SetEscapeHTML(false)
	return e
}

// Rules are rules to be shown.
type Rules []Rule

// Sentences writes a line for each rule, and what is unusual about it. Lines are folded to a width; 0 is no limit.
func (rules Rules) Sentences(w io.Writer, width int) error {
	text := bufio.NewWriter(w)
	for _, r := range rules {
		text.WriteString(plain.Fold(plain.Line(r.Sentence+remark(r)), cmp.Or(width, math.MaxInt), "", "    "))
	}
	rules.pending(text, func(ns uint64, _ string) string { return notConfirmed(ns) })
	return text.Flush()
}

// pending writes until when a change waits to be confirmed, if one does.
func (rules Rules) pending(w io.Writer, says func(ns uint64, madeBy string) string) {
	if i := slices.IndexFunc(rules, func(r Rule) bool { return r.RevertsInNS != nil }); i >= 0 {
		fmt.Fprintf(w, "%s by %s\n", says(*rules[i].RevertsInNS, rules[i].MadeBy), rules[i].Confirm)
	}
}

// mostDeleted is how many deleted rules and pools have a line each.
const mostDeleted = 10

// Deleted writes which rules and pools are no more, in the order of SortByDevice: a line for each, or how many of each device.
func (rules Rules) Deleted(w io.Writer) error {
	text := bufio.NewWriter(w)
	if len(rules) > mostDeleted {
		pools, others := rules.Split()
		var devices []string
		for first := 0; first < len(others); {
			next := first
			for next < len(others) && others[next].Device == others[first].Device {
				next++
			}
			devices = append(devices, fmt.Sprintf("%s (%d)", plain.Line(others[first].Device), next-first))
			first = next
		}
		if len(others) > 0 {
			fmt.Fprintf(text, "deleted: %s on %s: %s\n", plain.Count(len(others), "rule"), plain.Count(len(devices), "device"), plain.List(devices))
		}
		if len(pools) > 0 {
			fmt.Fprintf(text, "deleted: %s: %s\n", plain.Count(len(pools), "pool"), plain.Line(plain.List(pools.Names())))
		}
	} else {
		for _, r := range rules {
			fmt.Fprintln(text, plain.Line("deleted: "+r.Sentence))
		}
	}
	rules.pending(text, func(ns uint64, _ string) string { return notConfirmed(ns) })
	return text.Flush()
}

// Detail writes the sentence of one rule, and its figures, a line each.
func (r Rule) Detail(w io.Writer) error {
	var text strings.Builder
	text.WriteString(plain.Fold(plain.Line(r.Sentence), screenWidth, "", "    "))
	state := cmp.Or(state(r), "in force, by "+r.Hook)
	if r.IsPool() {
		state = "" // there is no other
	}
	traffic := func(packets, bytes uint64) string {
		if packets == 0 {
			return ""
		}
		return fmt.Sprintf("%s in %s packets", bytesText(bytes), countText(packets))
	}
	dropped := traffic(r.DroppedPackets, r.DroppedBytes)
	if dropped != "" {
		dropped += ", " + percentText(percentOf(r.DroppedPackets, r.offered())) + " of packets"
	}
	refused := r.DroppedPackets
	if r.IsPool() {
		refused = r.RefusedPackets
		if dropped != "" {
			dropped += "; " + percentText(percentOf(refused, r.offered())) + " refused by this pool"
		}
	}
	excess := ""
	if r.ExcessPackets != refused && !r.HasColours() {
		excess = traffic(r.ExcessPackets, r.ExcessBytes)
	}
	packets := func(n uint64) string {
		if n == 0 {
			return ""
		}
		return plain.Count(n, "packet")
	}
	name, pool := r.Name, plain.Line(r.Within)
	if r.IsPool() {
		name = "" // which the sentence has
	}
	if r.GuaranteeBits != nil {
		pool += fmt.Sprintf(", %s guaranteed, %s borrowed", bytesText(r.GuaranteedBytes), bytesText(r.BorrowedBytes))
	}
	for _, f := range []struct{ label, text string }{
		{"name", name}, {"plan", r.Plan}, {"note", r.Note}, {"host", r.Host}, {"guarantee", r.waits()}, {"state", state}, {"lease", r.lease()}, {"use", r.use()},
		{"passed", cmp.Or(traffic(r.PassedPackets, r.PassedBytes), "nothing yet")}, {"of pool", pool}, {"dropped", dropped}, {"excess", excess},
		{"green", traffic(r.GreenPackets, r.GreenBytes)}, {"yellow", traffic(r.YellowPackets, r.YellowBytes)}, {"red", traffic(r.RedPackets, r.RedBytes)},
		{"delayed", traffic(r.DelayedPackets, r.DelayedBytes)}, {"marked", packets(r.MarkedPackets)}, {"contended", packets(r.ContendedPackets)},
		{"spilled", packets(r.SpilledPackets)}, {"exempt", packets(r.ExemptPackets)}, {"level", r.level()},
		{"buckets", optional(r.ActiveBuckets, func(n uint64) string {
			if r.scope == "" {
				return ""
			}
			return countText(n) + " in use"
		})},
		{"sharers", optional(r.ActiveSharers, countText)},
		{"pending", optional(r.RevertsInNS, func(ns uint64) string { return lastReverts(ns, r.MadeBy) })},
	} {
		if f.text != "" {
			fact(&text, f.label, f.text)
		}
	}
	_, err := io.WriteString(w, text.String())
	return err
}

// waits is what is to be guaranteed once there is room.
func (r *Rule) waits() string {
	return optional(r.WaitingBits, func(bits uint64) string { return policy.Rate(bits).String() + " waits for room in the pool" })
}

// use is what the rule let through over the interval.
func (r *Rule) use() string {
	if r.UseBits == nil {
		return ""
	}
	text := cmp.Or(bitsText(*r.UseBits), "nothing")
	if r.UsePercent != nil {
		text += ", " + percentText(*r.UsePercent) + " of "
		switch {
		case r.HasColours():
			text += rateText(r.RateNow())
		case r.Leased != nil:
			text += "the rate in force"
		default:
			text += "the rate"
		}
	}
	text += fmt.Sprintf(", over %v", time.Duration(*r.IntervalNS).Round(time.Millisecond))
	if r.DroppedPercent != nil && *r.DroppedPercent > 0 {
		text += "; " + percentText(*r.DroppedPercent) + " of packets dropped"
	}
	return text
}

// level is how full the shared bucket is.
func (r *Rule) level() string {
	_, capacity := r.inForce()
	if capacity == nil {
		return ""
	}
	whose := "the bucket"
	if r.scope != "" {
		whose = "the spill bucket"
	}
	fill := func(level, full uint64, whose string) string {
		return fmt.Sprintf("%s of %s, %s of %s", bytesText(level), bytesText(full), percentText(percentOf(level, full)), whose)
	}
	switch second := r.SecondLevelBytes; {
	case second != nil && r.LevelBytes+*second > 0:
		spill := ""
		if r.scope != "" {
			spill = "the spill buckets, "
		}
		return spill + fill(r.LevelBytes, *capacity, "C") + "; " + fill(*second, *r.SecondBytes(), r.secondName())
	case r.LevelBytes > 0:
		return fill(r.LevelBytes, r.holds(*capacity), whose)
	}
	return ""
}

// NotInForce reports whether a rule is not in force, by its key attached.
func NotInForce(attached *bool) bool { return attached != nil && !*attached }

func remark(r Rule) (text string) {
	if state := state(r); state != "" {
		text = " [" + state + "]"
	} else if lease := r.lease(); lease != "" {
		text = " [lease: " + lease + "]"
	}
	if waits := r.waits(); waits != "" {
		text += " [guarantee: " + waits + "]"
	}
	return text
}

// state is what is unusual about the state of a rule; "" for nothing.
func state(r Rule) string {
	switch {
	case r.Attached == nil:
		return "" // of a pool
	case !*r.Attached:
		return "NOT IN FORCE: " + r.State
	case r.State != "attached":
		return r.State
	}
	return ""
}

func rateText(bits *uint64) string {
	if bits == nil {
		return "unlimited"
	}
	return policy.Rate(*bits).String()
}

// noRoom says why a packet is charged to the spill bucket.
func noRoom(key string) string {
	return "the bucket table has no room for " + key + ": this is the rule's spill bucket, which all keys without a bucket share"
}

func percent(part, whole uint64) string {
	if whole == 0 {
		return "no room"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(whole))
}

// Queue is how much a rule may queue, and for how long.
type Queue struct {
	QueueBytes    uint64 `json:"queue_bytes"`     // 0 for a rule that delays no packets
	LongestWaitNS uint64 `json:"longest_wait_ns"` // of any packet
	// ECNAboveNS is the wait above which packets are marked; null where none are.
	ECNAboveNS *uint64 `json:"ecn_above_ns"`
	Order      string  `json:"order"` // in which packets leave
	beyond     uint64  // of QueueBytes, those beyond the capacity
}

// NewQueue is the queue of a rule.
func NewQueue(r policy.Rule) Queue {
	bytes, longest := r.Waiting()
	q := Queue{QueueBytes: bytes, LongestWaitNS: uint64(longest), Order: r.Order.String(), beyond: r.Queue}
	if bytes > 0 && r.ECNAbove != policy.Never {
		above := uint64(r.ECNAbove)
		q.ECNAboveNS = &above
	}
	return q
}

// holds is the bytes that a bucket and its queue hold together.
func (q Queue) holds(capacity uint64) uint64 { return capacity + q.beyond }

// delays reports whether the rule delays packets.
func (q Queue) delays() bool { return q.QueueBytes > 0 }

// filled says how full the bucket or queue of a key is. what is which of them.
func (q Queue) filled(key string, level, capacity uint64) (what, text string) {
	fill := func(level, of uint64) string {
		return fmt.Sprintf("%d of %d bytes (%s full)", level, of, percent(level, of))
	}
	switch {
	case !q.delays():
		return "bucket", "of " + key + ": " + fill(level, capacity)
	case q.beyond == 0:
		return "queue", "of " + key + ": " + fill(level, capacity)
	}
	inside := min(level, capacity)
	return "bucket", "of " + key + ": " + fill(inside, capacity) + ", queue: " + fill(level-inside, q.beyond)
}
