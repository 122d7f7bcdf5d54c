package main

import (
	"fmt"

	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/metrics"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
)

// mostBucketSeries is of how many buckets the levels may be told: Prometheus keeps each that it ever saw.
const mostBucketSeries = 1000

// exporter answers the scrapes of Prometheus.
func (e *env) exporter(o serveOptions, options loader.Options) (*metrics.Exporter, error) {
	layout, err := maps.Layout()
	if err != nil {
		return nil, err
	}
	reader := &measure.Reader{Options: options, Netns: e.netns}
	return metrics.New(metrics.Options{
		Version: version, Layout: fmt.Sprintf("%016x", layout),
		Read:    func() (*measure.Reading, error) { return reader.Read(metrics.What(o.buckets)) },
		OnError: func(err error) { o.Say(fmt.Sprintf("metrics: %v", e.advise(err))) },
	}), nil
}
