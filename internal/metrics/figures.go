package metrics

import (
	"slices"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	counter = dto.MetricType_COUNTER
	gauge   = dto.MetricType_GAUGE
)

// A figure is a metric of things such as rules. It has no value for those for which that would mean nothing.
type figure[T any] struct {
	name  string // without the prefix
	kind  dto.MetricType
	help  string
	value func(T) (v float64, ok bool)
}

const (
	rulePrefix = "shapectl_rule_"
	poolPrefix = "shapectl_pool_"
)

// Labels are in the order of their names.
var (
	ruleLabels = []string{"device", "direction", "network"}
	poolLabels = []string{"pool"}
)

// These are counted by rules and pools alike.
var counted = []figure[*live.Item]{
	count("passed_bytes_total", "Bytes that passed.", always, func(it *live.Item) uint64 { return it.PassedBytes }),
	count("passed_packets_total", "Packets that passed.", always, func(it *live.Item) uint64 { return it.PassedPackets }),
	count("excess_bytes_total", "Bytes of packets that did not conform, whatever happened to them then.", always, func(it *live.Item) uint64 { return it.ExcessBytes }),
	count("excess_packets_total", "Packets that did not conform, whatever happened to them then.", always, func(it *live.Item) uint64 { return it.ExcessPackets }),
	count("delayed_bytes_total", "Bytes of packets that were queued. Only where excess packets are delayed.", delays, func(it *live.Item) uint64 { return it.DelayedBytes }),
	count("delayed_packets_total", "Packets that were queued. Only where excess packets are delayed.", delays, func(it *live.Item) uint64 { return it.DelayedPackets }),
	count("marked_packets_total", "Packets that were marked by ECN. Only where packets may be marked.", marks, func(it *live.Item) uint64 { return it.MarkedPackets }),
	count("contended_packets_total", "Packets whose bucket could not be updated in time.", always, func(it *live.Item) uint64 { return it.ContendedPackets }),
	count("guaranteed_bytes_total", "Bytes, of those that passed, that the guarantee covered. The others were borrowed.", guarantees, func(it *live.Item) uint64 { return it.GuaranteedBytes }),
	count("guaranteed_packets_total", "Packets, of those that passed, that the guarantee covered. The others were borrowed.", guarantees, func(it *live.Item) uint64 { return it.GuaranteedPackets }),
}

// These are the parameters of rules and pools, and what they are now.
var known = []figure[*live.Item]{
	now("rate_bits_per_second", "The rate. Not of rules that are unlimited or have only the rate of their pool.", func(it *live.Item) *uint64 { return rate(it.Rate) }),
	now("capacity_bytes", "The burst: how many bytes a bucket can hold.", func(it *live.Item) *uint64 { return ifLimited(it, it.Capacity) }),
	now("guarantee_bits_per_second", "The guarantee. Only of those that have one.", func(it *live.Item) *uint64 { return optional(uint64(it.Guarantee)) }),
	now("waiting_guarantee_bits_per_second", "The guarantee that waits for room in the pool above. Only while one does.", func(it *live.Item) *uint64 { return optional(uint64(it.Label.Waits)) }),
	now("level_bytes", "Bytes in the shared bucket now; in the spill bucket where hosts, subnets or flows have buckets of their own.", func(it *live.Item) *uint64 { return ifLimited(it, it.Level) }),
	now("active_sharers", "How many have a part of the fair shares now. Only where there are shares.", func(it *live.Item) *uint64 { return it.ActiveSharers }),
}

var ofRules = slices.Concat(counted, []figure[*live.Item]{
	count("dropped_bytes_total", "Bytes of packets that were dropped, by the rule or by a pool above it.", always, func(it *live.Item) uint64 { return it.DroppedBytes }),
	count("dropped_packets_total", "Packets that were dropped, by the rule or by a pool above it.", always, func(it *live.Item) uint64 { return it.DroppedPackets }),
	count("exempt_packets_total", "Packets of IPv6 neighbour discovery, which no rule limits. Only of IPv6 rules.", ipv6, func(it *live.Item) uint64 { return it.ExemptPackets }),
	count("spilled_packets_total", "Packets that were charged to the spill bucket, as the bucket table had no room for their key. Only where hosts, subnets or flows have buckets of their own.", hasBuckets, func(it *live.Item) uint64 { return it.SpilledPackets }),
	count("green_bytes_total", "Bytes of green packets, whatever happened to them then."+onlyColours, hasColours, func(it *live.Item) uint64 { return it.GreenBytes }),
	count("green_packets_total", "Green packets, whatever happened to them then."+onlyColours, hasColours, func(it *live.Item) uint64 { return it.GreenPackets }),
	count("yellow_bytes_total", "Bytes of yellow packets, which are excess packets, whatever happened to them then."+onlyColours, hasColours, func(it *live.Item) uint64 { return it.YellowBytes }),
	count("yellow_packets_total", "Yellow packets, which are excess packets, whatever happened to them then."+onlyColours, hasColours, func(it *live.Item) uint64 { return it.YellowPackets }),
	count("red_bytes_total", "Bytes of red packets, which are excess packets, whatever happened to them then."+onlyColours, hasColours, func(it *live.Item) uint64 { return it.RedBytes }),
	count("red_packets_total", "Red packets, which are excess packets, whatever happened to them then."+onlyColours, hasColours, func(it *live.Item) uint64 { return it.RedPackets }),
	now("peak_bits_per_second", "The peak rate (PIR). Only with trtcm.", func(it *live.Item) *uint64 { return ifColours(it, policy.TRTCM, uint64(it.Colours.PIR)) }),
	now("excess_bits_per_second", "The excess rate (EIR). Only with rfc4115.", func(it *live.Item) *uint64 { return ifColours(it, policy.RFC4115, uint64(it.Colours.EIR)) }),
	now("second_capacity_bytes", "How many bytes the second bucket can hold: the peak or excess burst size (PBS, EBS)."+onlyColours, func(it *live.Item) *uint64 { return ifColours(it, it.Algorithm, it.Colours.Burst()) }),
	now("second_level_bytes", "Bytes in the second shared bucket, P or E, now; in the spill bucket where hosts, subnets or flows have buckets of their own."+onlyColours, func(it *live.Item) *uint64 { return ifColours(it, it.Algorithm, it.Second) }),
	count("shadow_seen_bytes_total", "Bytes that the shadow limit saw. Only of rules that have one.", hasShadow, func(it *live.Item) uint64 { return it.Shadow.PassedBytes + it.Shadow.DroppedBytes }),
	count("shadow_refused_bytes_total", "Bytes that the shadow limit would have refused. Only of rules that have one.", hasShadow, func(it *live.Item) uint64 { _, bytes := it.Shadow.Refused(); return bytes }),
	count("shadow_refused_packets_total", "Packets that the shadow limit would have refused. Only of rules that have one.", hasShadow, func(it *live.Item) uint64 { packets, _ := it.Shadow.Refused(); return packets }),
	now("active_buckets", "Hosts, subnets or flows whose bucket is not empty. Only where they have buckets of their own.", func(it *live.Item) *uint64 {
		if !hasBuckets(it) {
			return nil
		}
		return it.ActiveBuckets
	}),
}, known)

var ofPools = slices.Concat(counted, []figure[*live.Item]{
	count("refused_bytes_total", "Bytes of packets that the pool itself refused.", always, func(it *live.Item) uint64 { return it.DroppedBytes }),
	count("refused_packets_total", "Packets that the pool itself refused.", always, func(it *live.Item) uint64 { return it.DroppedPackets }),
	count("dropped_bytes_total", droppedOfPool, always, func(it *live.Item) uint64 { return it.LostBytes }),
	count("dropped_packets_total", droppedOfPool, always, func(it *live.Item) uint64 { return it.LostPackets }),
}, known, []figure[*live.Item]{
	now("leased", "1 if the pool has a lease on a part of its cluster's rate, or its line allows only a part of its rate; 0 if its safe share or all of its rate is in force. Only of pools with a cluster or --adapt-min.", func(it *live.Item) *uint64 {
		if it.Lease == nil {
			return nil
		}
		return new(uint64(truth(it.At < it.Lease.Until)))
	}),
	now("lease_bits_per_second", "The lease. Only of pools that have one.", func(it *live.Item) *uint64 {
		if it.Lease == nil || it.At >= it.Lease.Until {
			return nil
		}
		return rate(it.Lease.Rate)
	}),
	now("safe_bits_per_second", "The rate without a lease. Only of pools with a cluster or --adapt-min.", func(it *live.Item) *uint64 {
		if it.Lease == nil {
			return nil
		}
		return rate(it.Lease.Safe)
	}),
})

const onlyColours = " Only of rules with colours."

const droppedOfPool = "What the rules within the pool lost, whoever dropped it, since serve was started."

// count is a counter. A rule that cannot count it has none, unless it did when it had other parameters.
func count(name, help string, can func(*live.Item) bool, of func(*live.Item) uint64) figure[*live.Item] {
	return figure[*live.Item]{name, counter, help, func(it *live.Item) (float64, bool) {
		if can(it) {
			return float64(of(it)), true
		}
		return 0, false
	}}
}

// now is a gauge; nil is unknown.
func now(name, help string, of func(*live.Item) *uint64) figure[*live.Item] {
	return figure[*live.Item]{name, gauge, help, func(it *live.Item) (float64, bool) {
		if v := of(it); v != nil {
			return float64(*v), true
		}
		return 0, false
	}}
}

// rate is a rate in bit/s; nil for none.
func rate(r policy.Rate) *uint64 {
	if r == policy.Unlimited {
		return nil
	}
	return new(uint64(r))
}

func optional(n uint64) *uint64 {
	if n == 0 {
		return nil
	}
	return &n
}

func ifLimited(it *live.Item, n uint64) *uint64 {
	if it.Rate == policy.Unlimited {
		return nil
	}
	return &n
}

func ifColours(it *live.Item, by policy.Algorithm, n uint64) *uint64 {
	if !it.Algorithm.HasColours() || it.Algorithm != by {
		return nil
	}
	return &n
}

func always(*live.Item) bool    { return true }
func delays(it *live.Item) bool { bytes, _ := it.Waiting(); return bytes > 0 || it.DelayedPackets > 0 }
func marks(it *live.Item) bool {
	c := &it.Colours
	return it.Excess == policy.ECN || hasColours(it) && slices.Contains([]policy.Action{c.Green, c.Yellow, c.Red}, policy.ActionECN) ||
		delays(it) && it.ECNAbove != policy.Never || it.MarkedPackets > 0
}
func guarantees(it *live.Item) bool { return it.Guarantee != 0 }
func hasColours(it *live.Item) bool { return it.Algorithm.HasColours() }
func ipv6(it *live.Item) bool       { return it.Prefix.Addr().Is6() }
func hasBuckets(it *live.Item) bool {
	return it.Each.Kind != policy.EachAll && it.Rate != policy.Unlimited || it.SpilledPackets > 0
}
func hasShadow(it *live.Item) bool { return it.Shadow != nil }

// These are of everything together.
var whole = []figure[*scrape]{
	one("up", gauge, "1 if all rules and pools could be read, else 0. Then only some of them, or none, have metrics.", func(s *scrape) float64 { return truth(s.err == nil) }),
	one("rules", gauge, "Rules.", func(s *scrape) float64 { return float64(s.all.Rules) }),
	one("pools", gauge, "Pools.", func(s *scrape) float64 { return float64(s.all.Pools) }),
	one("change_pending", gauge, "1 while a change waits to be confirmed, else 0.", func(s *scrape) float64 { return truth(s.RevertsInNS != nil) }),
	{"change_reverts_timestamp_seconds", gauge, "When the pending change reverts, in seconds since 1970. Only while one is pending.", func(s *scrape) (float64, bool) {
		if s.RevertsInNS == nil {
			return 0, false
		}
		return float64(s.Time.Add(time.Duration(*s.RevertsInNS)).UnixMilli()) / 1e3, true
	}},
	one("devices_without_rules", gauge, "Devices that lack rules which should be in force: of the policy in force, or detached by something else.", func(s *scrape) float64 {
		devices := map[string]bool{}
		for _, l := range s.Lacks {
			devices[l.Device] = true
		}
		return float64(len(devices))
	}),
	one("buckets_in_use", gauge, "Slots of the bucket table that are in use: by hosts, subnets, flows and sharers.", func(s *scrape) float64 { return float64(s.Slots.InUse) }),
	one("buckets_size", gauge, "Slots of the bucket table. Until there is a rule that needs buckets, it has none.", func(s *scrape) float64 { return float64(s.Slots.All) }),
	one("scrape_duration_seconds", gauge, "How long it took to read what was counted.", func(s *scrape) float64 { return s.took.Seconds() }),
	one("scrape_errors_total", counter, "Readings that failed, at least in part.", func(s *scrape) float64 { return float64(s.errors) }),
}

func one(name string, kind dto.MetricType, help string, of func(*scrape) float64) figure[*scrape] {
	return figure[*scrape]{name, kind, help, func(s *scrape) (float64, bool) { return of(s), true }}
}

func truth(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// A labelled metric has values with labels of its own.
type labelled struct {
	name, help string
	labels     []string // in the order of their names
}

var (
	buildInfo    = labelled{"shapectl_build_info", "1, with the version, the layout of its pins, and the Go release that it was built with.", []string{"goversion", "layout", "version"}}
	attached     = labelled{"shapectl_attached", "1 if the rules of the device and direction are in force, else 0. Not where that takes a permission that serve lacks.", []string{"device", "direction"}}
	missingRules = labelled{"shapectl_missing_rules", "How many rules of the policy in force a device and direction lack, or how many rules are detached. Only where some are.", []string{"device", "direction"}}
	bucketLevel  = labelled{"shapectl_bucket_level_bytes", "Bytes in the fullest buckets; --metrics-buckets says how many.", []string{"device", "direction", "key", "network"}}
	ruleInfo     = labelled{"shapectl_rule_info", "1, with what may change of a rule while its counters go on. pool is the pool that it is within.", []string{"algorithm", "device", "direction", "each", "excess", "name", "network", "plan", "pool"}}
	poolInfo     = labelled{"shapectl_pool_info", "1, with what may change of a pool while its counters go on. within is the pool above it.", []string{"plan", "pool", "share", "within"}}
)

// A Metric is what the reference says of a metric.
type Metric struct {
	Name, Type string
	Labels     []string
	Help       string
}

// All are the metrics of shapectl. Those of the Go runtime and of the process come with client_golang.
func All() (all []Metric) {
	add := func(m labelled) { all = append(all, Metric{m.name, "gauge", m.labels, m.help}) }
	add(buildInfo)
	all = append(all, metricsOf("shapectl_", nil, whole)...)
	add(attached)
	add(missingRules)
	add(bucketLevel)
	add(ruleInfo)
	all = append(all, metricsOf(rulePrefix, ruleLabels, ofRules)...)
	add(poolInfo)
	all = append(all, metricsOf(poolPrefix, poolLabels, ofPools)...)
	all = append(all, Metric{events.name, "counter", events.labels, events.help})
	for _, f := range ofRTTs {
		all = append(all, Metric{f.name, strings.ToLower(f.kind.String()), f.labels, f.help})
	}
	return all
}

func metricsOf[T any](prefix string, labels []string, figures []figure[T]) (all []Metric) {
	for _, f := range figures {
		all = append(all, Metric{prefix + f.name, strings.ToLower(f.kind.String()), labels, f.help})
	}
	return all
}
