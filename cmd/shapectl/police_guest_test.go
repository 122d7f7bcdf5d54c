//go:build guest

package main

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
)

// The kernel's forwarding tests of tc police (tc_police.sh), with rules instead of policers, and with policers: these show that
// the set-up is right. A router gets frames of 1042 bytes for h2 as fast as they can be sent. From 0.9 to 1.1 of the rate
// must arrive there, and the same at h3, if a filter behind the limiter mirrors what passes.
func TestTCPolice(t *testing.T) {
	const rate, frame, seconds = 80e6, 1042, 2
	const mirror = " action mirred egress mirror dev rp3"
	const rx, tx = "set rp1 ingress 192.0.2.1 --rate 80mbit --burst 16k", "set rp2 egress 198.51.100.1 --rate 80mbit --burst 16k"
	const shared = "set all --new --rate 80mbit --burst 16k; set rp1 ingress 192.0.2.1 --within all; set rp2 egress 192.0.2.3 --match src --within all"
	const filter, police = "tc filter add dev ", " action police rate 80mbit burst 16k conform-exceed drop/"
	const rxFilter, txFilter = filter + "rp1 ingress protocol ip flower src_ip 192.0.2.1", filter + "rp2 egress protocol ip flower dst_ip 198.51.100.1"
	const sharedPolicer = rxFilter + police + "ok index 10; " + filter + "rp2 egress protocol ip flower src_ip 192.0.2.3 action police index 10"
	for _, test := range []struct {
		name, from    string // the senders
		rules, filter string // of shapectl, and a filter behind them
		policers      string
		arrives       []string
	}{
		{"rx", "192.0.2.1", rx, "", rxFilter + police + "ok", []string{"h2"}},
		{"tx", "192.0.2.1", tx, "", txFilter + police + "ok", []string{"h2"}},
		{"shared rx", "192.0.2.1", shared, "", sharedPolicer, []string{"h2"}},
		{"shared tx", "192.0.2.3", shared, "", sharedPolicer, []string{"h2"}},
		{"shared both", "192.0.2.1 192.0.2.3", shared, "", sharedPolicer, []string{"h2"}}, // not one of the kernel's
		{"rx and mirror", "192.0.2.1", rx, rxFilter + mirror, rxFilter + police + "pipe" + mirror, []string{"h2", "h3"}},
		{"tx and mirror", "192.0.2.1", tx, txFilter + mirror, txFilter + police + "pipe" + mirror, []string{"h2", "h3"}},
	} {
		for _, limiter := range []string{"rules", "policers"} {
			t.Run(test.name+"/"+limiter, func(t *testing.T) {
				r, hosts := newRouter(t)
				if limiter == "policers" {
					r.sh(test.policers)
				} else {
					for line := range strings.SplitSeq(test.rules, "; ") {
						r.ok(fields(line)...)
					}
					r.sh(test.filter)
				}
				var frames [][]byte
				for _, from := range fields(test.from) {
					frames = append(frames, testenv.Frame(netip.MustParseAddr(from), netip.MustParseAddr("198.51.100.1"), frame))
				}
				received := func() (bytes []float64) {
					for _, name := range test.arrives {
						bytes = append(bytes, float64(testenv.Link(t, name).Attrs().Statistics.RxBytes))
					}
					return bytes
				}
				testenv.Must(t, hosts.Do(func() error {
					s := testenv.NewSender(t, "h1")
					var before []float64
					var begun time.Time
					for i := 0; i <= 100 || time.Since(begun) < seconds*time.Second; i++ {
						if i == 100 { // the burst is over
							before, begun = received(), time.Now()
						}
						testenv.Must(t, s.Send(frames[i%len(frames)]))
					}
					after, took := received(), time.Since(begun)
					for i, name := range test.arrives {
						share := 8 * (after[i] - before[i]) / (rate * took.Seconds())
						t.Logf("%s gets %.2f %% of the rate", name, 100*share)
						if share < .9 || share > 1.1 {
							t.Errorf("%s gets %.2f of the rate", name, share)
						}
					}
					return nil
				}))
			})
		}
	}
}

// newRouter returns a namespace that forwards between rp1, rp2 and rp3, and the one of their peers h1, h2 and h3.
func newRouter(t *testing.T) (*rig, *testenv.Netns) {
	t.Helper()
	testenv.NewNetns(t)
	r := &rig{t, map[string]string{"SHAPECTL_BPFFS": testenv.BPFFS(t)}}
	name, hosts := testenv.NewNamedNetns(t)
	for i, address := range []string{"192.0.2.2/24", "198.51.100.2/24", "203.0.113.2/24"} {
		n := string(rune('1' + i))
		r.sh("ip link add rp" + n + " address 02:00:00:00:00:02 type veth peer name h" + n + " netns " + name +
			"; ip addr add " + address + " dev rp" + n + "; ip link set rp" + n + " up; ip -n " + name + " link set h" + n + " up; tc qdisc add dev rp" + n + " clsact")
		testenv.WaitUp(t, "rp"+n)
	}
	r.sh("echo 1 >/proc/sys/net/ipv4/ip_forward; ip neigh add 198.51.100.1 lladdr 02:00:00:00:00:03 dev rp2")
	return r, hosts
}
