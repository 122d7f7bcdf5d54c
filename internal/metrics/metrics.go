// Package metrics answers Prometheus's scrapes with what was counted of rules and pools. How many series there are
// depends on these alone, and never on traffic.
package metrics

import (
	"context"
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/observe"
)

// Options are what serve knows.
type Options struct {
	Version, Layout string
	// Read reads rules, pools and the buckets to show. With the error comes what could be read, or nil.
	Read func(context.Context) (*live.Reading, error)
	// RTTs are what is measured of round-trip times; nil if nothing is.
	RTTs func() observe.Sums
	// Most is how many rules and pools have metrics, beside the pools that several names draw from: the rules in no pool, if
	// they are so few, and what does worst; negative for all rules and pools.
	Most    int
	OnError func(error) // is told of a reading that failed, unless the one before failed in the same way
}

// What is what an exporter needs of a reading, with the levels of so many of the fullest buckets.
func What(buckets int) live.What {
	return live.What{Fullest: buckets, Slots: true, Buckets: true, Sharers: true, Lacks: true}
}

// An Exporter answers scrapes.
type Exporter struct {
	o      Options
	others *prometheus.Registry

	mutex  sync.Mutex // one reading at a time
	errors uint64
	last   string // error; "" for none
}

// New makes an exporter. It also has the metrics of the Go runtime and of the process.
func New(o Options) *Exporter {
	e := &Exporter{o: o, others: prometheus.NewRegistry()}
	e.Register(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return e
}

// Register adds metrics of other parts of serve.
func (e *Exporter) Register(c ...prometheus.Collector) { e.others.MustRegister(c...) }

// A scrape is what there is to answer.
type scrape struct {
	*live.Reading
	all          live.Summary
	rules, pools []*live.Item // that have metrics
	err          error
	took         time.Duration
	errors       uint64
}

func (e *Exporter) scrape(ctx context.Context) *scrape {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	began := time.Now()
	reading, err := e.o.Read(ctx)
	if reading == nil {
		reading = live.NewScene(nil, nil).Read(0, nil)
	}
	s, said := &scrape{Reading: reading, err: err, took: time.Since(began)}, ""
	if err != nil {
		e.errors++
		if said = err.Error(); said != e.last && e.o.OnError != nil {
			e.o.OnError(err)
		}
	}
	s.errors, e.last = e.errors, said
	s.all = reading.Summary(nil)
	for _, it := range reading.Exported(e.o.Most) {
		if it.IsPool() {
			s.pools = append(s.pools, it)
		} else {
			s.rules = append(s.rules, it)
		}
	}
	return s
}

// ServeHTTP answers a scrape. If a reading fails, shapectl_up is 0, and the other metrics are what could be read: a
// scrape that fails as a whole would hide them.
func (e *Exporter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s := e.scrape(r.Context())
	defer s.Release()
	others, _ := e.others.Gather() // what can be had of them
	format := expfmt.NegotiateAccept(r.Header, expfmt.DefaultOpenMetricsAcceptedFormats()...)
	w.Header().Set("Content-Type", string(format))
	w.Header().Set("Vary", "Accept")
	to := expfmt.NewEncoder(w, format)
	p := newPage(to, max(len(s.rules), len(s.pools), len(s.Places()), len(s.Fullest), len(s.Lacks), 1))
	s.write(p, e.o)
	if e.o.RTTs != nil {
		writeRTTs(p, e.o.RTTs())
	}
	for _, family := range others {
		if p.err == nil {
			p.err = to.Encode(family)
		}
	}
	if c, ok := to.(expfmt.Closer); ok && p.err == nil {
		c.Close() // an error here, as the ones before, is that the answer is too large
	}
}

func (s *scrape) write(p *page, o Options) {
	p.values(buildInfo, func(add func(float64, ...string)) { add(1, runtime.Version(), o.Layout, o.Version) })
	writeFigures(p, "shapectl_", whole, []*scrape{s}, [][]*dto.LabelPair{nil})
	p.values(attached, func(add func(float64, ...string)) {
		for _, at := range s.Places() {
			add(truth(at.InForce), at.Device, at.Direction.String())
		}
	})
	p.values(missingRules, func(add func(float64, ...string)) {
		for _, l := range s.Lacks {
			add(float64(len(l.Missing)), l.Device, l.Direction.String())
		}
	})
	p.values(bucketLevel, func(add func(float64, ...string)) {
		for _, b := range s.Fullest {
			add(float64(b.Bytes), b.Device, b.Direction, b.Bucket.Name, b.Network)
		}
	})
	p.values(ruleInfo, func(add func(float64, ...string)) {
		for _, it := range s.rules {
			excess := it.Excess.String()
			if it.HasColours() {
				excess = "" // what happens depends on the colour
			}
			add(1, it.Algorithm.String(), it.Device, it.Direction, it.Each.String(), excess, it.Who(), it.Network, it.Label.Plan, string(it.Within))
		}
	})
	labels := make([][]*dto.LabelPair, len(s.rules))
	for i, it := range s.rules {
		labels[i] = labelPairs(ruleLabels, it.Device, it.Direction, it.Network)
	}
	writeFigures(p, rulePrefix, ofRules, s.rules, labels)
	p.values(poolInfo, func(add func(float64, ...string)) {
		for _, it := range s.pools {
			add(1, it.Label.Plan, it.Key.Pool, it.Share.String(), string(it.Within))
		}
	})
	labels = labels[:0]
	for _, it := range s.pools {
		labels = append(labels, labelPairs(poolLabels, it.Key.Pool))
	}
	writeFigures(p, poolPrefix, ofPools, s.pools, labels)
}

// writeFigures writes the figures of things, which have these labels.
func writeFigures[T any](p *page, prefix string, figures []figure[T], things []T, labels [][]*dto.LabelPair) {
	for _, f := range figures {
		p.write(prefix+f.name, f.help, f.kind, func(add func([]*dto.LabelPair, float64)) {
			for i := range things {
				if v, ok := f.value(things[i]); ok {
					add(labels[i], v)
				}
			}
		})
	}
}
