package main

import (
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/testenv"
)

// Prometheus scrapes serve, and has of each rule what show says.
func TestMetricsOfServe(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	testenv.Must(t, netlink.LinkSetUp(testenv.Link(t, "lo")))
	r.ok("set", "home", "--new", "--rate", "80mbit")
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "80kbit", "--each", "host", "--name", "alice", "--within", "home")
	serve := r.command("serve", "--socket", "none", "--metrics-buckets", "1", "--metrics-rules", "all")
	serve.Stderr = os.Stderr
	testenv.Must(t, serve.Start())
	t.Cleanup(func() {
		serve.Process.Kill()
		serve.Wait()
	})
	r.send("10.0.0.1", 200, 1000)
	r.send("10.0.0.2", 20, 1000)

	prometheus := testenv.StartPrometheus(t)
	shown := r.show()
	pool, rule := shown[0], shown[1]
	if rule.PassedBytes == 0 || rule.DroppedPackets == 0 || pool.PassedBytes != rule.PassedBytes {
		t.Fatalf("show says %+v", shown)
	}
	for _, of := range []struct {
		expr string
		want uint64
	}{
		{`up{job="shapectl"}`, 1},
		{`shapectl_up`, 1},
		{`shapectl_rule_passed_bytes_total{device="va",direction="egress",network="10.0.0.0/24"}`, rule.PassedBytes},
		{`shapectl_rule_dropped_packets_total{device="va"}`, rule.DroppedPackets},
		{`shapectl_pool_passed_packets_total{pool="home"}`, pool.PassedPackets},
		{`shapectl_rule_rate_bits_per_second`, 80_000},
		{`shapectl_attached{device="va",direction="egress"}`, 1},
		{`count(shapectl_rule_info{name="alice",pool="home",each="host"})`, 1},
	} {
		want := fmt.Sprint(of.want) // a scrape may take too long on a busy machine, so the first value may be another
		testenv.Eventually(t, "Prometheus to have "+want+" for "+of.expr, func() bool { return slices.Equal(prometheus.Query(of.expr), []string{want}) })
	}
	// Only buckets that were charged lately are looked at.
	testenv.Eventually(t, "Prometheus to have a bucket", func() bool {
		r.send("10.0.0.1", 1, 1000)
		got := prometheus.Query(`count(shapectl_bucket_level_bytes)`)
		return len(got) == 1 && got[0] == "1"
	})
}
