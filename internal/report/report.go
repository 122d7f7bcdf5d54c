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
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/loader"
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

	it *live.Item
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

// NewBucket is a bucket of a rule or pool.
func NewBucket(it *live.Item, b live.Bucket) Bucket {
	out := Bucket{Key: b.Name, LevelBytes: b.Bytes}
	if it.Algorithm.HasColours() {
		out.SecondLevelBytes = &b.SecondBytes
	}
	if b.Waits {
		out.WaitNS = &b.WaitNS
	}
	return out
}

// NewRule is all that is known of a rule or pool, but for its sentence and its buckets.
func NewRule(it *live.Item) Rule {
	r, at := &it.Rule, it.Place
	rate, capacity := limit(*r)
	out := Rule{
		it: it, Kind: KindRule, Device: at.Device, Direction: at.Direction.String(), CIDR: r.Prefix.String(), Match: at.Match.String(),
		Name: r.Label.Name, Note: r.Label.Note, Plan: r.Label.Plan, Host: r.Label.Host.String(), Owner: r.Label.Owner.String(), Line: string(r.Label.Line),
		Algorithm: r.Algorithm.String(), Each: r.Each.String(), Excess: r.Excess.String(), Penalty: r.Penalty.String(), Fail: r.Fail.String(),
		RateBits: rate, CapacityBytes: capacity, Queue: NewQueue(*r), ColourOptions: NewColourOptions(*r), Unlimited: rate == nil,
		OverheadBytes: r.Framing.Overhead, MPUBytes: r.Framing.MPU,
		Within: string(r.Within), GuaranteeBits: optionalRate(r.Guarantee), WaitingBits: optionalRate(r.Label.Waits), Members: uint32(r.Members),
		Weight: r.Weight.Value(), Share: r.Share.String(), Cluster: newCluster(r.Cluster), Adapt: newAdapt(r.Adapt),
		Attached: &at.InForce, State: at.Status, Hook: string(at.Mode),
		LevelBytes: it.Level, PassedPackets: it.PassedPackets, PassedBytes: it.PassedBytes, ExcessPackets: it.ExcessPackets, ExcessBytes: it.ExcessBytes,
		DroppedPackets: it.DroppedPackets, DroppedBytes: it.DroppedBytes, DelayedPackets: it.DelayedPackets, DelayedBytes: it.DelayedBytes,
		MarkedPackets: it.MarkedPackets, ContendedPackets: it.ContendedPackets, ExemptPackets: it.ExemptPackets, SpilledPackets: it.SpilledPackets,
		SKBs: it.SKBs(), ColourCounters: newColourCounters(it.Counters),
		RevertsInNS: it.RevertsInNS, ActiveBuckets: it.ActiveBuckets, ActiveSharers: it.ActiveSharers,
	}
	if out.HasColours() {
		out.Excess, out.SecondLevelBytes = "", &it.Second // what happens depends on the colour
	}
	if it.IsPool() {
		out.RefusedPackets, out.RefusedBytes, out.DroppedPackets, out.DroppedBytes = it.DroppedPackets, it.DroppedBytes, it.Members.DroppedPackets, it.Members.DroppedBytes
		out.Kind, out.Device, out.Direction, out.CIDR, out.Match = KindPool, "", "", "", ""
	}
	if r.Within != "" {
		out.GuaranteedPackets, out.GuaranteedBytes = it.GuaranteedPackets, it.GuaranteedBytes
		out.BorrowedPackets, out.BorrowedBytes = it.PassedPackets-min(it.PassedPackets, it.GuaranteedPackets), it.PassedBytes-min(it.PassedBytes, it.GuaranteedBytes)
	}
	if l := it.Lease; l != nil {
		out.Leased, out.SafeBits = new(it.At < l.Until), new(uint64(l.Safe))
		if *out.Leased {
			out.LeaseBits, out.LeaseEndsInNS = new(uint64(l.Rate)), new(l.Until-it.At)
		}
	}
	if it.Shadow != nil {
		out.Shadow = NewShadow(it.Shadow)
	}
	if it.Interval == 0 {
		return out
	}
	green, yellow, red := it.ColourBits()
	out.IntervalNS, out.UseBits, out.DroppedBits, out.RefusedBits = new(uint64(it.Interval)), bits(it.UseBits()), bits(it.DroppedBits()), bits(it.RefusedBits())
	out.BorrowedBits, out.GreenBits, out.YellowBits, out.RedBits = bits(it.BorrowedBits()), bits(green), bits(yellow), bits(red)
	out.UsePercent, out.DroppedPercent = percentOrNull(it.UsePercent()), percentOrNull(it.DroppedPercent())
	out.RefusedPercent, out.ExcessPercent = percentOrNull(it.RefusedPercent()), percentOrNull(it.ExcessPercent())
	return out
}

// Describe is all that is known of a rule or pool that is read alone.
func Describe(h *loader.Hook, e maps.Entry) Rule {
	it := live.ReadLimit(h, e)
	r := NewRule(&it)
	r.Sentence = it.Sentence()
	return r
}

// NewRules are items in their order.
func NewRules(items []*live.Item) Rules {
	rules := make(Rules, len(items)) // in JSON a list, also of none
	for i, it := range items {
		rules[i] = NewRule(it)
	}
	return rules
}

func bits(v live.Value) *uint64 {
	if !v.Known {
		return nil
	}
	return new(uint64(v.N))
}

func percentOrNull(v live.Value) *float64 {
	if !v.Known {
		return nil
	}
	return &v.N
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

func optionalRate(g policy.Guarantee) *uint64 {
	if g == 0 {
		return nil
	}
	return (*uint64)(&g)
}

// percentOr writes a share; "" where it is not known.
func percentOr(v live.Value) string {
	if !v.Known {
		return ""
	}
	return percentText(v.N)
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
		dropped += ", " + percentText(percentOf(r.DroppedPackets, r.it.Offered())) + " of packets"
	}
	refused := r.DroppedPackets
	if r.IsPool() {
		refused = r.RefusedPackets
		if dropped != "" {
			dropped += "; " + percentText(percentOf(refused, r.it.Offered())) + " refused by this pool"
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
			if r.it.Scope() == "" {
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
			text += rateText(r.rateNow())
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
	whose, spill := "the bucket", ""
	if r.it.Scope() != "" {
		whose, spill = "the spill bucket", "the spill buckets, "
	}
	fill := func(level, full uint64, whose string) string {
		return fmt.Sprintf("%s of %s, %s of %s", bytesText(level), bytesText(full), percentOr(live.Percent(level, full)), whose)
	}
	_, capacity, limited := r.it.InForce()
	switch second := r.SecondLevelBytes; {
	case !limited:
	case second != nil && r.LevelBytes+*second > 0:
		return spill + fill(r.LevelBytes, capacity, "C") + "; " + fill(*second, *r.SecondBytes(), r.secondName())
	case r.LevelBytes > 0:
		return fill(r.LevelBytes, r.holds(capacity), whose)
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
