package live

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Figure is something that is known of a rule or pool. JSON, metrics and columns come from Figures.
type Figure struct {
	Key    string             // in JSON, with the unit; the name of a metric that counts ends in _total
	Type   string             // in JSON
	Doc    string             // for the reference, and the help of the metric
	Of     func(it *Item) any // a text, boolean, uint64, float64, or another type of this file; nil where it is not known
	Head   string             // of its column; "" for none
	Metric Metric
	Total  bool             // it counts since the limit was set
	Only   string           // where the metric means something, in words, and
	Means  func(*Item) bool // as a function; nil for everywhere
	Shadow bool             // it is also of a shadow, which is a limit, too
}

// Metric says which of rules and pools have a figure as a metric.
type Metric int

const (
	OfRules Metric = 1 << iota
	OfPools
	OfAll = OfRules | OfPools
)

const (
	isText   = "string"
	isBool   = "boolean"
	isNumber = "number"
	orNull   = " or null"
	byColour = ": `pass`, `drop`, `ecn` or `dscp:NAME`"
	now      = ", over the interval"
	sinceSet = ", over the interval, or since it was set"
)

// Figures are all that is known of rules and pools, in the order of their JSON.
var Figures = []Figure{
	text("kind", "`rule`, or `pool`, which has no device, direction, network and match", func(it *Item) string { return kindNames[it.IsPool()] }),
	text("device", "name of the device", func(it *Item) string { return it.Device }),
	text("direction", "`ingress` or `egress`", func(it *Item) string { return it.Direction }),
	text("cidr", "network of the rule", func(it *Item) string { return it.Network }),
	text("name", "name of the rule or pool", func(it *Item) string { return it.Label.Name }),
	text("note", "note on it", func(it *Item) string { return it.Label.Note }).head("NOTE"),
	text("plan", "plan of the policy file that it follows", func(it *Item) string { return it.Label.Plan }).head("PLAN"),
	text("host", "the MAC address of the host whose addresses the limit is for", func(it *Item) string { return it.Label.Host.String() }),
	text("owner", "the device, its direction and the host there that a pool belongs to", func(it *Item) string { return it.Label.Owner.String() }),
	text("line", "the device of the line that a pool is of", func(it *Item) string { return string(it.Label.Line) }),
	text("match", "address that the network is compared with: `src` or `dst`", func(it *Item) string {
		if it.IsPool() {
			return ""
		}
		return it.Place.Match.String()
	}),
	text("algorithm", "`gcra` or `leaky`; with colours `srtcm`, `trtcm` or `rfc4115`", func(it *Item) string { return it.Algorithm.String() }).head("ALGORITHM"),
	text("each", "bucket scope: `all`, `host`, `/N` or `flow`", func(it *Item) string { return it.Each.String() }).shadow(),
	text("excess", "what happens to excess packets: `drop`, `ecn`, `pass` or `delay`; empty with colours, where `yellow` and `red` say it", func(it *Item) string {
		if it.HasColours() {
			return ""
		}
		return it.Excess.String()
	}),
	text("penalty", "`none`, `fill` or a time", func(it *Item) string { return it.Penalty.String() }).shadow(),
	text("fail", "verdict if a bucket cannot be updated: `open` or `closed`", func(it *Item) string { return it.Fail.String() }),
	optional("rate_bits_per_second", "rate; null without a limit, and where only the pool has one", func(it *Item) *uint64 { return rate(it.Rate) }).as(OfAll).shadow(),
	optional("capacity_bytes", "burst: how many bytes a bucket can hold; null without a limit", func(it *Item) *uint64 { return it.ifLimited(it.Capacity) }).as(OfAll).shadow().head("BURST"),
	number("queue_bytes", "size of the queue", func(it *Item) uint64 { bytes, _ := it.Waiting(); return bytes }).head("QUEUE"),
	number("longest_wait_ns", "longest wait that the queue allows", func(it *Item) uint64 { _, longest := it.Waiting(); return uint64(longest) }),
	optional("ecn_above_ns", "packets that would wait longer are marked", func(it *Item) *uint64 {
		if bytes, _ := it.Waiting(); bytes == 0 || it.ECNAbove == policy.Never {
			return nil
		}
		return new(uint64(it.ECNAbove))
	}),
	text("order", "`fifo` or `sparse-first`", func(it *Item) string { return it.Rule.Order.String() }),
	optional("pir_bits_per_second", "peak information rate", func(it *Item) *uint64 { return it.ifColours(policy.TRTCM, uint64(it.Colours.PIR)) }).as(OfRules).shadow(),
	optional("pbs_bytes", "peak burst size", func(it *Item) *uint64 { return it.ifColours(policy.TRTCM, it.Colours.PBS) }).as(OfRules).shadow().head("PBS"),
	optional("eir_bits_per_second", "excess information rate", func(it *Item) *uint64 { return it.ifColours(policy.RFC4115, uint64(it.Colours.EIR)) }).as(OfRules).shadow(),
	optional("ebs_bytes", "excess burst size", func(it *Item) *uint64 {
		if it.Algorithm == policy.TRTCM {
			return nil
		}
		return it.ifColours(it.Algorithm, it.Colours.EBS)
	}).as(OfRules).shadow().head("EBS"),
	{Key: "colour_aware", Type: isBool + orNull, Doc: "true if packets come in with the colour of their DSCP", Shadow: true, Of: func(it *Item) any {
		if !it.HasColours() {
			return nil
		}
		return it.Colours.Aware
	}},
	coloured("colours", "DSCPs with the colours of incoming packets, as the flag has them", func(c *policy.Colours) string {
		if !c.Aware {
			return ""
		}
		return c.In.String()
	}),
	coloured("green", "what happens to green packets"+byColour, func(c *policy.Colours) string { return c.Green.String() }),
	coloured("yellow", "what happens to yellow packets"+byColour, func(c *policy.Colours) string { return c.Yellow.String() }),
	coloured("red", "what happens to red packets"+byColour, func(c *policy.Colours) string { return c.Red.String() }),
	{Key: "unlimited", Type: isBool, Doc: "true for rate `unlimited`", Of: func(it *Item) any { return it.Rate == policy.Unlimited }},
	{Key: "overhead_bytes", Type: isNumber, Doc: "bytes added to each packet", Of: func(it *Item) any { return int64(it.Framing.Overhead) }, Shadow: true},
	number("mpu_bytes", "smallest size that a packet counts", func(it *Item) uint64 { return uint64(it.Framing.MPU) }).shadow(),
	text("within", "pool that it draws from", func(it *Item) string { return string(it.Within) }).head("WITHIN"),
	optional("guarantee_bits_per_second", "rate that the pool always has for it", func(it *Item) *uint64 { return history.NotZero(uint64(it.Guarantee)) }).as(OfAll).head("GUARANTEE"),
	optional("waiting_guarantee_bits_per_second", "guarantee that waits for room in the pool", func(it *Item) *uint64 { return history.NotZero(uint64(it.Label.Waits)) }).as(OfAll),
	number("members", "the most buckets that have the guarantee each; 0 unless it has several", func(it *Item) uint64 { return uint64(it.Rule.Members) }),
	number("weight", "its weight among the shares of its pool", func(it *Item) uint64 { return uint64(it.Weight.Value()) }),
	text("share", "who gets a fair share of the bucket, as in policies", func(it *Item) string { return it.Share.String() }).head("SHARE"),
	{Key: "nat", Type: isBool, Doc: "true if its hosts and subnets are those behind NAT", Of: func(it *Item) any { return it.Rule.NAT }},
	{Key: "cluster", Type: "Cluster" + orNull, Doc: "how a pool shares its rate with other hosts; null for a rule, and for a pool of this host alone", Of: func(it *Item) any { return clusterOf(&it.Cluster) }},
	{Key: "adapt", Type: "Adapt" + orNull, Doc: "how a pool adapts its rate to the latency of its line", Of: func(it *Item) any { return adaptOf(&it.Adapt) }},
	{Key: "leased", Type: isBool + orNull, Doc: "whether a pool has a lease now, by its cluster or its line; null without both", Metric: OfPools, Of: func(it *Item) any {
		if !hasLeases(it) {
			return nil
		}
		return it.Leased()
	}},
	leased("lease_bits_per_second", "rate of the lease", (*Item).Leased, func(it *Item) uint64 { return uint64(it.Lease.Rate) }).as(OfPools),
	leased("lease_ends_in_ns", "time until the lease ends unless it is renewed", (*Item).Leased, func(it *Item) uint64 { return it.Lease.Until - it.At }),
	leased("safe_bits_per_second", "rate without a lease, after this one if there is one", hasLeases, func(it *Item) uint64 { return uint64(it.Lease.Safe) }).as(OfPools),
	optional("pps", "most packets per second", func(it *Item) *uint64 { return history.NotZero(uint64(it.Also.Packets)) }),
	optional("pps_burst_packets", "packets that may come at once", func(it *Item) *uint64 { return history.NotZero(uint64(it.Also.PacketBurst)) }),
	optional("new_flows_per_second", "most new flows per second", func(it *Item) *uint64 { return history.NotZero(uint64(it.Also.Flows)) }),
	optional("new_flows_burst", "new flows that may come at once", func(it *Item) *uint64 { return history.NotZero(uint64(it.Also.FlowBurst)) }),
	optional("quota_bytes", "quota of a period", func(it *Item) *uint64 { return it.ifQuota(it.Also.Quota.Bytes) }).as(OfAll),
	text("quota_period", "the period of the quota, as in policies", func(it *Item) string { return string(it.Also.Quota.Period) }),
	text("quota_zone", "its time zone; empty for that of the host", func(it *Item) string { return string(it.Also.Zone) }),
	optional("grace_bytes", "bytes beyond the quota that have the full rate", func(it *Item) *uint64 { return it.ifQuota(it.Also.Grace) }),
	optional("then_bits_per_second", "rate once the quota is used up; 0 if packets are dropped then", func(it *Item) *uint64 {
		if it.Also.Then == policy.ThenDrop {
			return new(uint64)
		}
		return it.ifQuota(uint64(it.Also.Then))
	}),
	optional("quota_used_bytes", "bytes of the quota that are used, grace included; null where each host, subnet or flow has a quota", func(it *Item) *uint64 { return it.quotaOfAll(it.Used.UsedBytes) }).as(OfAll),
	optional("quota_left_bytes", "what is left of it and of the grace", func(it *Item) *uint64 { return it.quotaOfAll(it.Used.LeftBytes) }).as(OfAll).head("LEFT"),
	optional("quota_ends_in_ns", "time until the period ends; null if the quota comes back steadily", func(it *Item) *uint64 { return history.NotZero(it.Used.EndsNS) }),
	{Key: "quota_used_up", Type: isBool + orNull, Doc: "whether the rate after the quota is in force, as no full packet has room in it; null without a quota of all", Metric: OfAll, Of: func(it *Item) any {
		if it.quotaOfAll(0) == nil {
			return nil
		}
		return it.Used.UsedUp()
	}},
	{Key: "attached", Type: isBool, Doc: "whether it is in force", Of: func(it *Item) any { return it.Place.InForce }},
	text("state", "`attached`, or why it is not in force", func(it *Item) string { return it.Place.Status }),
	text("hook", "`tcx` or `clsact`", func(it *Item) string { return string(it.Place.Mode) }),
	number("level_bytes", "bytes in the shared bucket, or in the spill bucket where each host, subnet or flow has a bucket", func(it *Item) uint64 { return it.Level }).as(OfAll).where((*Item).isLimited, "of those with a rate").head("LEVEL"),
	optional("second_level_bytes", "level of the second shared bucket, or of the second spill bucket: E, or with `trtcm` P", func(it *Item) *uint64 { return it.ifColours(it.Algorithm, it.Second) }).as(OfRules).head("LEVEL 2"),
	number("passed_packets", "packets passed, marked and delayed ones included", func(it *Item) uint64 { return it.PassedPackets }).total(OfAll).head("PACKETS"),
	number("passed_bytes", "bytes of the passed packets", func(it *Item) uint64 { return it.PassedBytes }).total(OfAll).head("PASSED"),
	number("excess_packets", "packets that did not conform, also those that passed; with colours yellow and red ones", func(it *Item) uint64 { return it.ExcessPackets }).total(OfAll).head("EXCESS"),
	number("excess_bytes", "bytes of the excess packets", func(it *Item) uint64 { return it.ExcessBytes }).total(OfAll),
	number("dropped_packets", "packets dropped, whether the rule or a pool refused them", func(it *Item) uint64 { return it.Offered().DroppedPackets }).total(OfRules).head("DROPS"),
	number("dropped_bytes", "bytes of the dropped packets", func(it *Item) uint64 { return it.Offered().DroppedBytes }).total(OfRules),
	number("refused_packets", "packets that the pool itself refused", func(it *Item) uint64 { return it.ifPool(it.Counters.DroppedPackets) }).total(OfPools),
	number("refused_bytes", "bytes of the packets that the pool itself refused", func(it *Item) uint64 { return it.ifPool(it.Counters.DroppedBytes) }).total(OfPools),
	number("pps_refused_packets", "of the dropped or excess packets, those that were too many by `pps`", func(it *Item) uint64 { return it.TooManyPackets }).total(OfAll).where(func(it *Item) bool { return it.Also.Packets != 0 }, "of those with a limit of packets"),
	number("new_flows_refused_packets", "those that began too many flows", func(it *Item) uint64 { return it.TooManyFlows }).total(OfAll).where(func(it *Item) bool { return it.Also.Flows != 0 }, "of those with a limit of new flows"),
	number("quota_refused_packets", "those that were beyond the quota, and the rate after it", func(it *Item) uint64 { return it.BeyondQuota }).total(OfAll).where(func(it *Item) bool { return it.Also.Quota.Bytes != 0 }, "of those with a quota"),
	number("delayed_packets", "passed packets that had to wait in the queue", func(it *Item) uint64 { return it.DelayedPackets }).total(OfAll).where((*Item).delays, "where excess packets are delayed").head("DELAYED"),
	number("delayed_bytes", "bytes of the delayed packets", func(it *Item) uint64 { return it.DelayedBytes }).total(OfAll).where((*Item).delays, "where excess packets are delayed"),
	number("marked_packets", "packets marked CE", func(it *Item) uint64 { return it.MarkedPackets }).total(OfAll).where((*Item).marks, "where packets may be marked").head("MARKED"),
	number("guaranteed_packets", "of the passed packets, those that the guarantee covered", func(it *Item) uint64 { return it.GuaranteedPackets }).total(OfAll).where(hasGuarantee, "of those with a guarantee"),
	number("guaranteed_bytes", "bytes of the passed packets that the guarantee covered", func(it *Item) uint64 { return it.GuaranteedBytes }).total(OfAll).where(hasGuarantee, "of those with a guarantee"),
	number("borrowed_packets", "the other passed packets of a rule or pool that is within a pool", func(it *Item) uint64 { return it.borrowed(it.PassedPackets, it.GuaranteedPackets) }),
	number("borrowed_bytes", "bytes of the borrowed packets", func(it *Item) uint64 { return it.borrowed(it.PassedBytes, it.GuaranteedBytes) }),
	number("contended_packets", "packets whose bucket could not be updated because of contention", func(it *Item) uint64 { return it.ContendedPackets }).total(OfAll).head("CONTENDED"),
	number("exempt_packets", "genuine neighbour discovery, which is never limited; in no other counter", func(it *Item) uint64 { return it.ExemptPackets }).total(OfRules).
		where(func(it *Item) bool { return it.Prefix.Addr().Is6() }, "of IPv6 rules").head("EXEMPT"),
	number("skbs", "passed and dropped packets as the kernel handled them, before segmentation", func(it *Item) uint64 { return it.SKBs() }),
	number("spilled_packets", "packets charged to the spill bucket, because the bucket table had no room for their key", func(it *Item) uint64 { return it.SpilledPackets }).total(OfRules).where((*Item).hasBuckets, "where hosts, subnets or flows have buckets of their own").head("SPILLED"),
	counted("green_packets", "green packets, passed or dropped", func(it *Item) uint64 { return it.GreenPackets }).head("GREEN"),
	counted("green_bytes", "bytes of the green packets", func(it *Item) uint64 { return it.GreenBytes }),
	counted("yellow_packets", "yellow packets, which are excess packets, passed or dropped", func(it *Item) uint64 { return it.YellowPackets }).head("YELLOW"),
	counted("yellow_bytes", "bytes of the yellow packets", func(it *Item) uint64 { return it.YellowBytes }),
	counted("red_packets", "red packets, which are excess packets, passed or dropped", func(it *Item) uint64 { return it.RedPackets }).head("RED"),
	counted("red_bytes", "bytes of the red packets", func(it *Item) uint64 { return it.RedBytes }),
	optional("reverts_in_ns", "time until the change that it came with reverts; null if that is confirmed", func(it *Item) *uint64 { return it.RevertsInNS }),
	{Key: "shadow", Type: "Shadow" + orNull, Doc: "the rule's shadow", Of: func(it *Item) any {
		if it.Shadow == nil {
			return nil
		}
		return it.Shadow
	}},
	optional("active_buckets", "hosts, subnets or flows whose bucket is not empty", func(it *Item) *uint64 { return it.ActiveBuckets }).as(OfRules).where((*Item).hasBuckets, "where hosts, subnets or flows have buckets of their own").head("BUCKETS"),
	optional("active_sharers", "how many have a part of the fair shares now", func(it *Item) *uint64 { return it.ActiveSharers }).as(OfAll).head("SHARERS"),
	optional("interval_ns", "time over which rates and percentages were measured", func(it *Item) *uint64 { return history.NotZero(uint64(it.Interval)) }),
	value("use_bits_per_second", "rate of the passed packets"+now, (*Item).UseBits).head("USE"),
	value("dropped_bits_per_second", "rate of the dropped packets"+now, (*Item).DroppedBits),
	value("refused_bits_per_second", "rate of the packets that the pool itself refused"+now, (*Item).RefusedBits),
	value("borrowed_bits_per_second", "rate of the borrowed bytes"+now, (*Item).BorrowedBits),
	value("green_bits_per_second", "rate of green packets"+now, func(it *Item) Value { green, _, _ := it.ColourBits(); return green }).head("GREEN"),
	value("yellow_bits_per_second", "rate of yellow packets"+now, func(it *Item) Value { _, yellow, _ := it.ColourBits(); return yellow }).head("YELLOW"),
	value("red_bits_per_second", "rate of red packets"+now, func(it *Item) Value { _, _, red := it.ColourBits(); return red }).head("RED"),
	value("use_percent", "`use_bits_per_second` in percent of the rate in force; null without `--interval`, and where several keys have that rate each", (*Item).UsePercent).head("OF RATE"),
	value("dropped_percent", "dropped packets in percent of the offered ones"+sinceSet, (*Item).DroppedPercent).head("DROPPED"),
	value("refused_percent", "refused packets in percent of those that the pool itself passed or refused"+sinceSet, (*Item).RefusedPercent).head("REFUSED"),
	value("excess_percent", "excess and delayed packets in percent of those that it passed or dropped itself"+sinceSet, (*Item).ExcessPercent).head("EXCESS"),
}

// ShadowFigures are those of a shadow alone, beside the Figures that it has in common with rules.
var ShadowFigures = []Figure{
	number("seen_packets", "packets that the shadow has seen", func(it *Item) uint64 { return it.PassedPackets + it.DroppedPackets }).total(OfRules),
	number("seen_bytes", "bytes that the shadow has seen", func(it *Item) uint64 { return it.PassedBytes + it.DroppedBytes }).total(OfRules),
	number("refused_packets", "packets that the shadow would have refused", func(it *Item) uint64 { packets, _ := it.Shadow.Refused(); return packets }).total(OfRules),
	number("refused_bytes", "bytes that the shadow would have refused", func(it *Item) uint64 { _, bytes := it.Shadow.Refused(); return bytes }).total(OfRules),
	number("affected_hosts", "number of affected hosts, or of subnets with `each: /N`", func(it *Item) uint64 { return uint64(len(it.Shadow.Affected)) }),
	number("affected_limit", "about how many hosts all shadows of the namespace can remember together", func(it *Item) uint64 { return uint64(it.Shadow.Room) }),
	{Key: "affected", Type: "list of Affected", Doc: "hosts or subnets whose packets the shadow would have refused, most bytes first", Of: func(it *Item) any { return append([]Affected{}, it.Shadow.Affected...) }},
}

var kindNames = map[bool]string{false: "rule", true: "pool"}

func text(key, doc string, of func(*Item) string) Figure {
	return Figure{Key: key, Type: isText, Doc: doc, Of: func(it *Item) any { return of(it) }}
}

func number(key, doc string, of func(*Item) uint64) Figure {
	return Figure{Key: key, Type: isNumber, Doc: doc, Of: func(it *Item) any { return of(it) }}
}

func optional(key, doc string, of func(*Item) *uint64) Figure {
	return Figure{Key: key, Type: isNumber + orNull, Doc: doc, Of: func(it *Item) any {
		if n := of(it); n != nil {
			return *n
		}
		return nil
	}}
}

// value is a rate, which is whole, or a percentage.
func value(key, doc string, of func(*Item) Value) Figure {
	return Figure{Key: key, Type: isNumber + orNull, Doc: doc, Of: func(it *Item) any {
		if v := of(it); v.Known {
			return v.N
		}
		return nil
	}}
}

func counted(key, doc string, of func(*Item) uint64) Figure {
	return number(key, doc, of).total(OfRules).where((*Item).HasColours, "of rules with colours").shadow()
}

func leased(key, doc string, has func(*Item) bool, of func(*Item) uint64) Figure {
	return Figure{Key: key, Type: isNumber + orNull, Doc: doc, Of: func(it *Item) any {
		if !has(it) {
			return nil
		}
		return of(it)
	}}
}

func coloured(key, doc string, of func(*policy.Colours) string) Figure {
	return Figure{Key: key, Type: isText + orNull, Doc: doc, Shadow: true, Of: func(it *Item) any {
		if said := of(&it.Colours); it.HasColours() && said != "" {
			return said
		}
		return nil
	}}
}

func (f Figure) head(head string) Figure { f.Head = head; return f }
func (f Figure) as(of Metric) Figure     { f.Metric = of; return f }
func (f Figure) total(of Metric) Figure  { f.Total = true; return f.as(of) }
func (f Figure) where(means func(*Item) bool, only string) Figure {
	f.Means, f.Only = means, " Only "+only+"."
	return f
}
func (f Figure) shadow() Figure { f.Shadow = true; return f }

// Figured is the figure with a key; nil for none.
func Figured(key string) *Figure {
	if i := slices.IndexFunc(Figures, func(f Figure) bool { return f.Key == key }); i >= 0 {
		return &Figures[i]
	}
	return nil
}

// AppendJSON appends the figures of an item as an object.
func (it *Item) AppendJSON(b []byte) ([]byte, error) { return appendJSON(b, Figures, it) }

// MarshalJSON is the shadow as an object.
func (s *Shadow) MarshalJSON() ([]byte, error) {
	return appendJSON(nil, OfShadow, s.Item())
}

// Item is the shadow as a limit of its own; nil for none.
func (s *Shadow) Item() *Item {
	if s == nil {
		return nil
	}
	l := newLimit(&Place{}, &maps.Entry{Rule: s.Rule})
	return &Item{Limit: &l, Counts: Counts{Counters: s.Counters}, Shadow: s}
}

// OfShadow are all figures of a shadow.
var OfShadow = append(slices.DeleteFunc(slices.Clone(Figures), func(f Figure) bool { return !f.Shadow }), ShadowFigures...)

func appendJSON(b []byte, figures []Figure, it *Item) ([]byte, error) {
	for i := range figures {
		b = append(append(append(b, "{,"[min(i, 1)], '"'), figures[i].Key...), '"', ':')
		v := figures[i].Of(it)
		switch v := v.(type) { // what most are, quickly
		case nil:
			b = append(b, "null"...)
			continue
		case uint64:
			b = strconv.AppendUint(b, v, 10)
			continue
		case bool:
			b = strconv.AppendBool(b, v)
			continue
		case string:
			if !strings.ContainsFunc(v, func(c rune) bool { return c < ' ' || c > '~' || c == '"' || c == '\\' }) {
				b = append(append(append(b, '"'), v...), '"')
				continue
			}
		}
		var text bytes.Buffer
		e := json.NewEncoder(&text)
		e.SetEscapeHTML(false)
		if err := e.Encode(v); err != nil {
			return nil, err
		}
		b = append(b, bytes.TrimSuffix(text.Bytes(), []byte("\n"))...)
	}
	return append(b, '}'), nil
}

// A Cluster is how a pool shares its rate with other hosts.
type Cluster struct {
	Name      string  `json:"name"`
	Weight    uint16  `json:"weight"`                // of this host
	FloorBits *uint64 `json:"floor_bits_per_second"` // its least lease; null for none
	ShareBits *uint64 `json:"share_bits_per_second"` // its fixed lease; null for one by demand
	SafeBits  *uint64 `json:"safe_bits_per_second"`  // the rate without a lease; null for an equal part
}

func clusterOf(c *policy.Cluster) any {
	if c.Name == "" {
		return nil
	}
	return Cluster{string(c.Name), c.Weight.Value(), history.NotZero(uint64(c.Floor)), history.NotZero(uint64(c.Share)), history.NotZero(uint64(c.Safe))}
}

// An Adapt is how a pool adapts its rate to the latency of its line.
type Adapt struct {
	MinBits uint64   `json:"min_bits_per_second"` // the lowest rate
	AboveNS uint64   `json:"above_ns"`            // how far the latency may rise above the usual one
	To      []string `json:"to"`                  // the addresses that are pinged
}

func adaptOf(a *policy.Adapt) any {
	if a.Min == 0 {
		return nil
	}
	out := Adapt{MinBits: uint64(a.Min), AboveNS: uint64(a.Above.Value())}
	for _, addr := range a.To.Addrs() {
		out.To = append(out.To, addr.String())
	}
	return out
}

// Affected is a host or subnet of which packets would have been refused.
type Affected struct {
	Subnet         string `json:"subnet"`
	RefusedPackets uint64 `json:"refused_packets"`
	RefusedBytes   uint64 `json:"refused_bytes"`
}

// AffectedOf are the hosts of which packets would have been refused.
func AffectedOf(hosts []maps.Affected) []Affected {
	all := []Affected{}
	for _, h := range hosts {
		all = append(all, Affected{policy.NetworkText(h.Subnet), h.Packets, h.Bytes})
	}
	return all
}

// rate is a rate in bit/s; nil for none.
func rate(r policy.Rate) *uint64 {
	if r == policy.Unlimited {
		return nil
	}
	return new(uint64(r))
}

func (it *Item) isLimited() bool { return it.limited }

func (it *Item) ifLimited(n uint64) *uint64 {
	if !it.isLimited() {
		return nil
	}
	return &n
}

func (it *Limit) ifColours(by policy.Algorithm, n uint64) *uint64 {
	if !it.HasColours() || it.Algorithm != by {
		return nil
	}
	return &n
}

func (it *Item) ifPool(n uint64) uint64 {
	if !it.IsPool() {
		return 0
	}
	return n
}

// borrowed is what passed beyond the guarantee of something within a pool.
func (it *Item) borrowed(passed, guaranteed uint64) uint64 {
	if it.Within == "" {
		return 0
	}
	return passed - min(passed, guaranteed)
}

// HasColours reports whether packets get colours.
func (l *Limit) HasColours() bool { return l.Algorithm.HasColours() }

// Leased reports whether a lease is in force.
func (it *Item) Leased() bool { return it.Lease != nil && it.At < it.Lease.Until }

func hasGuarantee(it *Item) bool { return it.Guarantee != 0 }
func hasLeases(it *Item) bool    { return it.Lease != nil }

func (it *Item) delays() bool { bytes, _ := it.Waiting(); return bytes > 0 || it.DelayedPackets > 0 }

func (it *Item) marks() bool {
	c := &it.Colours
	return it.Excess == policy.ECN || it.HasColours() && slices.Contains([]policy.Action{c.Green, c.Yellow, c.Red}, policy.ActionECN) ||
		it.delays() && it.ECNAbove != policy.Never || it.MarkedPackets > 0
}

func (it *Item) hasBuckets() bool {
	return it.Each.Kind != policy.EachAll && it.Rate != policy.Unlimited || it.SpilledPackets > 0
}
