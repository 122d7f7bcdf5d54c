package cluster

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	shapemaps "github.com/shapectl/shapectl/pkg/maps"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

var loadHosts = flag.Int("hosts", 1000, "how many `hosts` BenchmarkThousandHosts has")

// BenchmarkThousandHosts lets a thousand agents renew a hundred leases each in a real Redis, once per second. It reports the
// CPU time of Redis, and that of one agent without its host's maps, as parts of one core.
func BenchmarkThousandHosts(b *testing.B) {
	for name, changing := range map[string]float64{"steady": 0, "a hundredth of the demands changes each second": 0.01} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				runLoad(b, changing)
			}
		})
	}
}

func runLoad(b *testing.B, changing float64) {
	const clusters, warmUp, measured = 100, 12, 20
	hosts := *loadHosts
	options := Options{URL: testenv.NewRedis(b, "--tcp-backlog", "4096").URL, Prefix: "t"}
	watch := openRedis(b, options)
	ctx := context.Background()
	start := time.Now()
	var mutex sync.Mutex
	var calls, lost int
	used := func() (store, own float64) {
		var r unix.Rusage
		unix.Getrusage(unix.RUSAGE_SELF, &r)
		return redisCPU(b, watch), float64(r.Utime.Nano()+r.Stime.Nano()) / 1e9
	}
	var all sync.WaitGroup
	for h := range hosts {
		all.Go(func() {
			random := rand.New(rand.NewPCG(uint64(h), 1))
			agent, pools, demands := New(fmt.Sprint("h", h), uint64(h)), make([]Pool, clusters), make([]uint64, clusters)
			for i := range pools {
				pools[i] = Pool{Name: "p", Cluster: fmt.Sprint("c", i), Rate: 10e9, Weight: 1, Lease: shapemaps.Lease{Safe: leastRate}}
				demands[i] = random.Uint64N(2e7)
			}
			time.Sleep(time.Duration(random.Uint64N(1e9)))
			s, _ := Open(options)
			defer s.Close()
			last := uint64(time.Since(start))
			for time.Since(start) < (warmUp+measured)*time.Second {
				now := 1e12 + uint64(time.Since(start))
				for i := range pools {
					rate := uint64(pools[i].Lease.At(now))
					elapsed := now - 1e12 - last
					pools[i].Passed += min(rate, demands[i]) / 8 * elapsed / 1e9
					pools[i].Refused += (max(rate, demands[i]) - rate) / 8 * elapsed / 1e9
					if random.Float64() < changing*float64(elapsed)/1e9 {
						demands[i] = random.Uint64N(2e7)
					}
				}
				last = now - 1e12
				asked := agent.Ask(now, pools, false)
				answers, _ := s.Renew(ctx, asked)
				heard := 1e12 + uint64(time.Since(start))
				for i, c := range asked {
					if i >= len(answers) {
						agent.Lost(heard, c)
					} else if _, lease, ok := agent.Hear(heard, c, answers[i]); ok {
						n, _ := strconv.Atoi(c.Cluster[1:])
						pools[n].Lease = lease
					}
				}
				mutex.Lock()
				calls, lost = calls+len(asked), lost+len(asked)-len(answers)
				mutex.Unlock()
				if next, ok := agent.Next(); ok {
					time.Sleep(time.Duration(next - min(next, 1e12+uint64(time.Since(start)))))
				}
			}
		})
	}
	time.Sleep(warmUp * time.Second)
	mutex.Lock()
	calls, lost = 0, 0
	mutex.Unlock()
	before, own := used()
	time.Sleep(measured * time.Second)
	after, ownAfter := used()
	mutex.Lock()
	b.ReportMetric(float64(calls)/measured, "leases/s")
	b.ReportMetric(float64(lost)/float64(calls)*100, "%lost")
	mutex.Unlock()
	b.ReportMetric((after-before)/measured*100, "%core-redis")
	b.ReportMetric((ownAfter-own)/measured*100/float64(hosts), "%core-agent")
	all.Wait()
}

// redisCPU is the CPU time that Redis has used, in seconds.
func redisCPU(b *testing.B, watch *Store) (seconds float64) {
	for line := range strings.Lines(do(b, watch, "INFO", "cpu")) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name == "used_cpu_sys" || name == "used_cpu_user" {
			n, err := strconv.ParseFloat(value, 64)
			if err != nil {
				b.Fatal(err)
			}
			seconds += n
		}
	}
	return seconds
}
