// Package metrics answers Prometheus's scrapes with what was counted of rules and pools. How many series there are
// depends on these alone, and never on traffic.
package metrics

import (
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"

	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/observe"
	"github.com/shapectl/shapectl/internal/report"
)

// Options are what serve knows.
type Options struct {
	Version, Layout string
	// Read reads rules, pools and the buckets to show. With the error comes what could be read, or nil.
	Read func() (*measure.Reading, error)
	// RTTs are what is measured of round-trip times; nil if nothing is.
	RTTs    func() observe.Sums
	OnError func(error) // is told of a reading that failed, unless the one before failed in the same way
}

// What is what an exporter needs of a reading, with the levels of so many of the fullest buckets.
func What(buckets int) measure.What {
	return measure.What{Fullest: buckets, Slots: true, Active: true, Lacks: true}
}

// An Exporter answers scrapes.
type Exporter struct {
	o      Options
	others *prometheus.Registry

	mutex  sync.Mutex // one reading at a time
	lost   report.Losses
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
	*measure.Reading
	rules, pools []*report.Rule
	err          error
	took         time.Duration
	errors       uint64
}

func (e *Exporter) scrape() *scrape {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	began := time.Now()
	reading, err := e.o.Read()
	if reading == nil {
		reading = &measure.Reading{}
	}
	s, said := &scrape{Reading: reading, err: err, took: time.Since(began)}, ""
	if err != nil {
		e.errors++
		if said = err.Error(); said != e.last && e.o.OnError != nil {
			e.o.OnError(err)
		}
	}
	s.errors, e.last = e.errors, said
	s.rules, s.pools = reading.Rules.Once()
	e.lost.Count(s.rules, s.pools, err == nil)
	return s
}

// ServeHTTP answers a scrape. If a reading fails, shapectl_up is 0, and the other metrics are what could be read: a
// scrape that fails as a whole would hide them.
func (e *Exporter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s := e.scrape()
	others, _ := e.others.Gather() // what can be had of them
	to, done := answer(w, r)
	p := newPage(to, max(len(s.rules), len(s.pools), len(s.Fullest), len(s.Lacks), 1))
	s.write(p, e.o)
	if e.o.RTTs != nil {
		writeRTTs(p, e.o.RTTs())
	}
	for _, family := range others {
		if p.err == nil {
			p.err = to.Encode(family)
		}
	}
	if p.err == nil {
		done() // an error here, as the ones before, is that the client is gone
	}
}

func (s *scrape) write(p *page, o Options) {
	p.values(buildInfo, func(add func(float64, ...string)) { add(1, runtime.Version(), o.Layout, o.Version) })
	writeFigures(p, "shapectl_", whole, []*scrape{s}, [][]*dto.LabelPair{nil})
	p.values(attached, func(add func(float64, ...string)) {
		told := map[[2]string]bool{}
		for _, r := range s.rules {
			if hook := [2]string{r.Device, r.Direction}; r.Attached != nil && !told[hook] {
				told[hook] = true
				add(truth(*r.Attached), r.Device, r.Direction)
			}
		}
	})
	p.values(missingRules, func(add func(float64, ...string)) {
		for _, l := range s.Lacks {
			add(float64(len(l.Missing)), l.Device, l.Direction.String())
		}
	})
	p.values(bucketLevel, func(add func(float64, ...string)) {
		for _, b := range s.Fullest {
			add(float64(b.LevelBytes), b.Device, b.Direction, b.Key, b.CIDR)
		}
	})
	p.values(ruleInfo, func(add func(float64, ...string)) {
		for _, r := range s.rules {
			add(1, r.Algorithm, r.Device, r.Direction, r.Each, r.Excess, r.Name, r.CIDR, r.Plan, r.Within)
		}
	})
	labels := make([][]*dto.LabelPair, len(s.rules))
	for i, r := range s.rules {
		labels[i] = labelPairs(ruleLabels, r.Device, r.Direction, r.CIDR)
	}
	writeFigures(p, rulePrefix, ofRules, s.rules, labels)
	p.values(poolInfo, func(add func(float64, ...string)) {
		for _, r := range s.pools {
			add(1, r.Plan, r.Name, r.Share, r.Within)
		}
	})
	labels = labels[:0]
	for _, r := range s.pools {
		labels = append(labels, labelPairs(poolLabels, r.Name))
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
