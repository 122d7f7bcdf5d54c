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
func (e *env) exporter(o serveOptions, shared *live.Shared) *metrics.Exporter {
	var rtts func() observe.Sums
	if e.rtts != nil {
		rtts = e.rtts.Sums
	}
	return metrics.New(metrics.Options{
		RTTs: rtts, Version: version, Layout: fmt.Sprintf("%016x", maps.Layout()),
		Most:    o.metrics,
		Read:    func(ctx context.Context) (*live.Reading, error) { return shared.Now(ctx, metrics.What(o.buckets)) },
		OnError: func(err error) { o.Say(fmt.Sprintf("metrics: %v", e.advise(err))) },
	})
}

// countEvents counts events for Prometheus until ctx is done. What keeps it from that is said, and may pass.
func (e *env) countEvents(ctx context.Context, total *prometheus.CounterVec, ready func()) error {
	for _, kind := range report.EventKinds {
		total.WithLabelValues(kind) // 0 so far
	}
	ready()
	for said := ""; ctx.Err() == nil; {
		err := e.feed.Listen(ctx, nil, nil, nil, func(event report.Event) {
			if event.Kind != report.LeftOut {
				total.WithLabelValues(event.Kind).Inc()
			}
			total.WithLabelValues(report.LeftOut).Add(float64(event.LeftOut))
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
