package metrics

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/observe"
)

var events = labelled{"shapectl_events_total", "Events by kind, as shapectl events tells them. The kind left-out counts those that were left out. Only with serve --events.", []string{"kind"}}

// NewEvents are counters of events.
func NewEvents() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: events.name, Help: events.help}, events.labels)
}

// An rttFigure has values for each rule with TCP that serve --rtt measured.
type rttFigure struct {
	labelled
	kind   dto.MetricType
	values func(s *observe.Sum, add func(v float64, more ...string))
}

var (
	partLabels = []string{"device", "direction", "limited", "network"}
	sideLabels = []string{"device", "direction", "limited", "network", "side"}
)

// sides are values of round-trip times, which have two sides.
func sides(of func(observe.SumOfTimes) (float64, bool)) func(*observe.Sum, func(float64, ...string)) {
	return func(s *observe.Sum, add func(float64, ...string)) {
		if v, ok := of(s.Receiver); ok {
			add(v, "receiver")
		}
		if v, ok := of(s.Sender); ok {
			add(v, "sender")
		}
	}
}

var ofRTTs = []rttFigure{
	{labelled{"shapectl_rule_rtt_median_seconds", "Median round-trip time of TCP over the last 5 s, while the rule limited (limited=1) or did not. side is receiver, with the wait in the rule's queue, or sender. Only with serve --rtt.", sideLabels}, gauge,
		sides(func(t observe.SumOfTimes) (float64, bool) { return t.Median.Seconds(), t.Median > 0 })},
	{labelled{"shapectl_rule_rtt_seconds_total", "Sum of all measured round-trip times. Its rate divided by that of the next metric is their mean. Only with serve --rtt.", sideLabels}, counter,
		sides(func(t observe.SumOfTimes) (float64, bool) { return float64(t.All) / float64(time.Second), true })},
	{labelled{"shapectl_rule_rtt_samples_total", "Round-trip times that were measured. Only with serve --rtt.", sideLabels}, counter,
		sides(func(t observe.SumOfTimes) (float64, bool) { return float64(t.Samples), true })},
	{labelled{"shapectl_rule_tcp_packets_total", "Packets of TCP with payload, of the flows that are followed. Only with serve --rtt.", partLabels}, counter,
		func(s *observe.Sum, add func(float64, ...string)) { add(float64(s.Packets)) }},
	{labelled{"shapectl_rule_tcp_resent_packets_total", "Those of them that were sent again. Only with serve --rtt.", partLabels}, counter,
		func(s *observe.Sum, add func(float64, ...string)) { add(float64(s.Again)) }},
}

// writeRTTs writes what was measured of round-trip times.
func writeRTTs(p *page, sums observe.Sums) {
	type one struct {
		live.Key
		limited int
		sum     observe.Sum
	}
	var all []one
	for key, parts := range sums.Rules {
		for limited, sum := range parts {
			all = append(all, one{key, limited, sum})
		}
	}
	slices.SortFunc(all, func(a, b one) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Direction, b.Direction), cmp.Compare(a.Network, b.Network), cmp.Compare(a.limited, b.limited))
	})
	values := newPage(p.to, 2*len(all))
	values.err = p.err
	for _, f := range ofRTTs {
		values.write(f.name, f.help, f.kind, func(add func([]*dto.LabelPair, float64)) {
			for i := range all {
				o := &all[i]
				f.values(&o.sum, func(v float64, more ...string) {
					add(labelPairs(f.labels, append([]string{o.Device, o.Direction, strconv.Itoa(o.limited), o.Network}, more...)...), v)
				})
			}
		})
	}
	p.err = values.err
}
