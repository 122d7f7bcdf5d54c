package metrics

import (
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/shapectl/shapectl/internal/plain"
)

// A page is an answer to a scrape. It is written metric by metric: all values of ten thousand rules at once would take
// forty times the memory.
type page struct {
	to  expfmt.Encoder
	err error // the first one

	// The values of one metric. These are used again for the next one.
	family   dto.MetricFamily
	numbers  []float64
	counters []dto.Counter
	gauges   []dto.Gauge
	samples  []dto.Metric
	pointers []*dto.Metric
}

// newPage has room for so many values of a metric.
func newPage(to expfmt.Encoder, room int) *page {
	p := &page{to: to, numbers: make([]float64, room), counters: make([]dto.Counter, room), gauges: make([]dto.Gauge, room),
		samples: make([]dto.Metric, room), pointers: make([]*dto.Metric, room)}
	for i := range room {
		p.counters[i].Value, p.gauges[i].Value, p.pointers[i] = &p.numbers[i], &p.numbers[i], &p.samples[i]
	}
	return p
}

// write writes a metric with all its values, if there are any.
func (p *page) write(name, help string, kind dto.MetricType, values func(add func(labels []*dto.LabelPair, v float64))) {
	n := 0
	values(func(labels []*dto.LabelPair, v float64) {
		p.numbers[n] = v
		s := &p.samples[n]
		s.Label, s.Counter, s.Gauge = labels, nil, nil
		if kind == counter {
			s.Counter = &p.counters[n]
		} else {
			s.Gauge = &p.gauges[n]
		}
		n++
	})
	if n == 0 || p.err != nil {
		return
	}
	p.family.Name, p.family.Help, p.family.Type, p.family.Metric = &name, &help, &kind, p.pointers[:n]
	p.err = p.to.Encode(&p.family)
}

// values writes a metric whose values have labels of their own.
func (p *page) values(m labelled, values func(add func(v float64, of ...string))) {
	p.write(m.name, m.help, gauge, func(add func([]*dto.LabelPair, float64)) {
		values(func(v float64, of ...string) { add(labelPairs(m.labels, of...), v) })
	})
}

// labelPairs are labels with their values. Names of devices may hold any bytes; an answer is UTF-8. Two names never
// become the same, as that would be the same series twice.
func labelPairs(names []string, values ...string) []*dto.LabelPair {
	pairs, labels := make([]dto.LabelPair, len(values)), make([]*dto.LabelPair, len(values))
	for i := range values {
		value := values[i]
		if plain.Line(value) != value || strings.HasPrefix(value, `"`) {
			value = strconv.Quote(value)
		}
		pairs[i].Name, pairs[i].Value = &names[i], &value
		labels[i] = &pairs[i]
	}
	return labels
}
