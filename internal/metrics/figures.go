package metrics

import (
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/shapectl/shapectl/internal/live"
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

// Of rules and pools, the metrics are live.Figures.
var ofRules, ofPools = ofItems(live.OfRules), append(ofItems(live.OfPools), lost("bytes", func(it *live.Item) uint64 { return it.LostBytes }), lost("packets", func(it *live.Item) uint64 { return it.LostPackets }))

// lost counts what rules within a pool dropped: figures of the pool decrease when a rule leaves it.
func lost(what string, of func(*live.Item) uint64) figure[*live.Item] {
	const help = "What the rules within the pool lost, whoever dropped it, since serve was started."
	return figure[*live.Item]{"dropped_" + what + "_total", counter, help, func(it *live.Item) (float64, bool) { return float64(of(it)), true }}
}

func ofItems(kind live.Metric) (all []figure[*live.Item]) {
	add := func(prefix, more string, figures []live.Figure, of func(*live.Item) *live.Item) {
		for i := range figures {
			f := &figures[i]
			if f.Metric&kind == 0 {
				continue
			}
			name, type_ := prefix+f.Key, gauge
			if f.Total {
				name, type_ = name+"_total", counter
			}
			help := strings.ToUpper(f.Doc[:1]) + strings.ReplaceAll(f.Doc[1:], "null", "none") + "." + f.Only + more
			all = append(all, figure[*live.Item]{name, type_, help, func(it *live.Item) (float64, bool) {
				if it = of(it); it == nil || f.Means != nil && !f.Means(it) {
					return 0, false
				}
				switch v := f.Of(it).(type) {
				case uint64:
					return float64(v), true
				case bool:
					return truth(v), true
				}
				return 0, false
			}})
		}
	}
	add("", "", live.Figures, func(it *live.Item) *live.Item { return it })
	if kind == live.OfRules {
		add("shadow_", " Only of rules with a shadow.", live.ShadowFigures, func(it *live.Item) *live.Item { return it.Shadow.Item() })
	}
	return all
}

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
	attached     = labelled{"shapectl_attached", "1 if the rules of the device and direction are in force, else 0. Left out where serve lacks the permission to see it.", []string{"device", "direction"}}
	missingRules = labelled{"shapectl_missing_rules", "How many rules of the policy in force a device and direction lack, or how many of its rules are detached. Only where some are.", []string{"device", "direction"}}
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
