package metrics_test

import (
	"context"
	"fmt"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/metrics"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// BenchmarkScrape is the cost of a scrape of ten thousand rules in the kernel, in a hundred pools.
func BenchmarkScrape(b *testing.B) {
	testenv.NewNetns(b)
	options := loader.Options{BPFFS: testenv.BPFFS(b)}
	testenv.Veth(b, "va", "vb")
	dev, err := netinfo.DeviceByName("va")
	testenv.Must(b, err)
	var rules, pools []policy.Rule
	for i := range 100 {
		pools = append(pools, pool(fmt.Sprintf("pool %d", i), 1e9, ""))
	}
	for i := range 10_000 {
		r := limit(fmt.Sprintf("10.%d.%d.0/24", i/256, i%256), 1e6, fmt.Sprintf("pool %d", i%100))
		r.Label.Name = fmt.Sprintf("customer %d", i)
		rules = append(rules, r)
	}
	policy.SortRules(pools)
	n, err := loader.Write(options)
	testenv.Must(b, err)
	_, err = n.Apply([]policy.Table{{Rules: pools}, {Device: dev.Name, Direction: policy.Egress, Match: policy.MatchDst, Rules: rules}}, loader.ApplyOptions{})
	testenv.Must(b, err)
	n.Close()
	reader := &live.Reader{Options: options, Netns: fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())}
	defer reader.Close()
	for _, part := range []string{"read", "text"} {
		b.Run(part, func(b *testing.B) {
			b.ReportAllocs()
			e := metrics.New(metrics.Options{Most: -1, Read: func(context.Context) (*live.Reading, error) { return reader.Read(metrics.What(20)) }})
			request := httptest.NewRequest("GET", "/metrics", nil)
			for b.Loop() {
				if part == "read" {
					_, err := reader.Read(metrics.What(20))
					testenv.Must(b, err)
					continue
				}
				w := httptest.NewRecorder()
				e.ServeHTTP(w, request)
				b.ReportMetric(float64(w.Body.Len()), "bytes/scrape")
				if part == "text" {
					b.ReportMetric(float64(strings.Count(w.Body.String(), "\nshapectl_")), "series")
				}
			}
			var now runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&now)
			b.ReportMetric(float64(now.HeapAlloc), "heap")
		})
	}
}
