package main

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/metrics"
	"github.com/shapectl/shapectl/internal/observe"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/maps"
)

// mostBucketSeries is of how many buckets the levels may be told: Prometheus keeps each that it ever saw.
const mostBucketSeries = 1000

// exporter answers the scrapes of Prometheus.
func (e *env) exporter(o serveOptions, shared *live.Shared) (*metrics.Exporter, error) {
	layout, err := maps.Layout()
	if err != nil {
		return nil, err
	}
	var rtts func() observe.Sums
	if e.rtts != nil {
		rtts = e.rtts.Sums
	}
	return metrics.New(metrics.Options{
		RTTs: rtts, Version: version, Layout: fmt.Sprintf("%016x", layout),
		Most:    o.metrics,
		Read:    func(ctx context.Context) (*live.Reading, error) { return shared.Now(ctx, metrics.What(o.buckets)) },
		OnError: func(err error) { o.Say(fmt.Sprintf("metrics: %v", e.advise(err))) },
	}), nil
}

// An eventCounter counts events for Prometheus.
type eventCounter struct{ total *prometheus.CounterVec }

func newEventCounter() eventCounter {
	c := eventCounter{metrics.NewEvents()}
	for _, kind := range report.EventKinds {
		c.total.WithLabelValues(kind)
	}
	return c
}

// run counts until ctx is done. What keeps it from that is said, and may pass.
func (c eventCounter) run(ctx context.Context, e *env, ready func()) error {
	ready()
	for said := ""; ctx.Err() == nil; {
		err := e.feed.Listen(ctx, nil, nil, nil, func(event report.Event) {
			if event.Kind != report.LeftOut {
				c.total.WithLabelValues(event.Kind).Inc()
			}
			c.total.WithLabelValues(report.LeftOut).Add(float64(event.LeftOut))
		})
		if err != nil && err.Error() != said {
			said = err.Error()
			e.note(fmt.Sprintf("events: %v", e.advise(err)))
		}
		select {
		case <-ctx.Done():
		case <-time.After(5 * time.Second):
		}
	}
	return nil
}
