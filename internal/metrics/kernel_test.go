package metrics_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/metrics"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A rig is a namespace with limits on "va", whose peer "vb" may be in another one, and an exporter.
type rig struct {
	*testing.T
	options  loader.Options
	exporter *metrics.Exporter
	sender   *testenv.Sender
}

func newRig(t *testing.T, buckets int) *rig {
	testenv.NewNetns(t)
	r := &rig{T: t, options: loader.Options{BPFFS: testenv.BPFFS(t)}}
	testenv.Veth(t, "va", "vb")
	r.sender = testenv.NewSender(t, "va")
	here := fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid()) // as scrapes come on other threads
	reader := &live.Reader{Options: r.options, Netns: here}
	t.Cleanup(reader.Close)
	r.exporter = metrics.New(metrics.Options{
		Most:    -1,
		Read:    func(context.Context) (*live.Reading, error) { return reader.Read(metrics.What(buckets)) },
		OnError: func(err error) { t.Errorf("a reading failed: %v", err) },
	})
	return r
}

// apply makes these the rules of a device, and the pools; other rules and pools go.
func (r *rig) apply(device string, egress, ingress, pools []policy.Rule) {
	r.Helper()
	n, err := loader.Write(r.options)
	testenv.Must(r, err)
	defer n.Close()
	tables := []policy.Table{
		{Rules: pools},
		{Device: device, Direction: policy.Egress, Match: policy.MatchDst, Rules: egress},
		{Device: device, Direction: policy.Ingress, Match: policy.MatchSrc, Rules: ingress},
	}
	for _, table := range tables {
		policy.SortRules(table.Rules)
	}
	_, err = n.Apply(tables, loader.ApplyOptions{})
	testenv.Must(r, err)
}

func (r *rig) send(to string, packets, bytes int) {
	r.Helper()
	for range packets {
		testenv.Must(r, r.sender.Send(testenv.Frame(netip.MustParseAddr("10.9.9.9"), netip.MustParseAddr(to), bytes)))
	}
}

var sampleLine = regexp.MustCompile(`^(shapectl_[a-z_]+(?:\{.*\})?) (\S+)$`)

// samples are the values of an answer by their series.
func (r *rig) samples() map[string]float64 {
	r.Helper()
	values := map[string]float64{}
	for _, line := range series(scrape(r, r.exporter)) {
		part := sampleLine.FindStringSubmatch(line)
		if part == nil {
			r.Fatalf("the line %q is none", line)
		}
		if _, twice := values[part[1]]; twice {
			r.Errorf("%s is there twice", part[1])
		}
		v, err := strconv.ParseFloat(part[2], 64)
		testenv.Must(r, err)
		values[part[1]] = v
	}
	return values
}

func limit(network string, rate policy.Rate, within string) policy.Rule {
	r := policy.Rule{Rate: rate, Capacity: 60_000, Algorithm: policy.GCRA, Within: policy.Within(within)}
	if r.Prefix, _ = netip.ParsePrefix(network); rate == policy.Unlimited {
		r.Capacity = 0
	}
	return r
}

func pool(name string, rate policy.Rate, within string) policy.Rule {
	r := limit("", rate, within)
	r.Pool, r.Prefix, r.Label.Name = true, policy.PoolKey(name), name
	return r
}

// What passed is, by rule and direction, exactly what an independent capture at the other end of the cable sees, and the
// sum of the rules is that of their pool.
func TestSumsEqualCapture(t *testing.T) {
	r := newRig(t, 20)
	_, far := testenv.NewNamedNetns(t)
	testenv.Must(t, netlink.LinkSetNsFd(testenv.Link(t, "vb"), far.FD()))
	offloadOff(t, "va")
	address(t, "va", "10.0.0.1/8")
	r.in(far, func() { offloadOff(t, "vb") })
	r.in(far, func() {
		for _, local := range []string{"10.0.0.2/8", "10.0.0.3/8", "10.0.0.4/8"} {
			address(t, "vb", local)
		}
	})
	testenv.WaitUp(t, "va")
	const home, unlimited = "home", policy.Unlimited
	bucket := limit("10.0.0.4/32", 400_000, "")
	bucket.Each.Kind = policy.EachHost
	r.apply("va", []policy.Rule{limit("10.0.0.2/32", unlimited, home), limit("10.0.0.3/32", 2_000_000, home), bucket},
		[]policy.Rule{limit("10.0.0.2/32", unlimited, home), limit("10.0.0.3/32", unlimited, "")}, []policy.Rule{pool(home, 80_000_000, "")})
	before := r.samples()
	seen := r.capture(far, "vb")
	r.tcp(far, "10.0.0.2:5001", 500_000)
	r.udp("10.0.0.3:5002", 900, 900)
	r.udp("10.0.0.4:5002", 300, 1400)
	captured, now := seen(), r.samples()
	sum := 0.0
	for _, c := range []struct{ direction, network string }{
		{"egress", "10.0.0.2/32"}, {"egress", "10.0.0.3/32"}, {"egress", "10.0.0.4/32"}, {"ingress", "10.0.0.2/32"}, {"ingress", "10.0.0.3/32"},
	} {
		labels := fmt.Sprintf(`{device="va",direction=%q,network=%q}`, c.direction, c.network)
		passed, dropped := now["shapectl_rule_passed_bytes_total"+labels], now["shapectl_rule_dropped_bytes_total"+labels]
		packets := now["shapectl_rule_passed_packets_total"+labels]
		if c.direction == "ingress" { // the capture is before the limit
			passed, packets = passed+dropped, packets+now["shapectl_rule_dropped_packets_total"+labels]
		}
		got := captured[c.direction+" "+strings.TrimSuffix(c.network, "/32")]
		t.Logf("%s %s: %.0f bytes in %.0f packets passed, %.0f bytes dropped", c.direction, c.network, passed, packets, dropped)
		if passed != got.bytes || packets != got.packets {
			t.Errorf("%s %s: counted %.0f bytes in %.0f packets, captured %.0f in %.0f", c.direction, c.network, passed, packets, got.bytes, got.packets)
		}
		if strings.HasSuffix(c.network, ".2/32") || labels == `{device="va",direction="egress",network="10.0.0.3/32"}` {
			sum += now["shapectl_rule_passed_bytes_total"+labels]
		}
	}
	if got := now[`shapectl_pool_passed_bytes_total{pool="home"}`]; got != sum || got == 0 {
		t.Errorf("the pool passed %.0f bytes, its rules %.0f", got, sum)
	}
	lost := now[`shapectl_pool_dropped_bytes_total{pool="home"}`]
	for key, v := range now {
		if strings.HasPrefix(key, "shapectl_rule_dropped_bytes_total{") && !strings.Contains(key, "10.0.0.4") && !strings.Contains(key, `"ingress",network="10.0.0.3`) {
			lost -= v
		}
		if strings.Contains(key, "_total") && v < before[key] {
			t.Errorf("%s fell from %v to %v", key, before[key], v)
		}
	}
	if lost != 0 {
		t.Errorf("the pool's drops are %+.0f bytes off those of its rules", lost)
	}
	if now[`shapectl_rule_dropped_bytes_total{device="va",direction="egress",network="10.0.0.4/32"}`] == 0 {
		t.Error("nothing was dropped")
	}
}

func offloadOff(t *testing.T, device string) {
	e, err := ethtool.NewEthtool()
	testenv.Must(t, err)
	defer e.Close()
	testenv.Must(t, e.Change(device, map[string]bool{
		"tx-tcp-segmentation": false, "tx-tcp6-segmentation": false, "tx-tcp-ecn-segmentation": false, "tx-generic-segmentation": false,
		"tx-checksum-ip-generic": false, "rx-gro": false,
	}))
}

func address(t *testing.T, device, local string) {
	a, err := netlink.ParseAddr(local)
	testenv.Must(t, err)
	testenv.Must(t, netlink.AddrAdd(testenv.Link(t, device), a))
	testenv.Must(t, netlink.LinkSetUp(testenv.Link(t, device)))
}

// in runs f in a namespace.
func (r *rig) in(n *testenv.Netns, f func()) {
	testenv.Must(r, n.Do(func() error { f(); return nil }))
}

type bytesAndPackets struct{ bytes, packets float64 }

// capture begins to capture IPv4 at a device. The function returns what was seen, by direction and far address of the
// other end.
func (r *rig) capture(n *testenv.Netns, device string) func() map[string]bytesAndPackets {
	var fd int
	r.in(n, func() {
		var err error
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		testenv.Must(r, err)
		testenv.Must(r, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 256<<20))
		all := uint16(unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8)
		testenv.Must(r, unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: testenv.Link(r, device).Attrs().Index}))
	})
	return func() map[string]bytesAndPackets {
		defer unix.Close(fd)
		seen := map[string]bytesAndPackets{}
		head := make([]byte, 64)
		for {
			n, from, err := unix.Recvfrom(fd, head, unix.MSG_TRUNC)
			if err == unix.EAGAIN {
				break
			}
			testenv.Must(r, err)
			if head[12] != 8 || head[13] != 0 {
				continue // not IPv4
			}
			key, far := "egress", head[30:34]
			if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
				key, far = "ingress", head[26:30]
			}
			key += " " + netip.AddrFrom4([4]byte(far)).String()
			seen[key] = bytesAndPackets{seen[key].bytes + float64(n), seen[key].packets + 1}
		}
		stats, err := unix.GetsockoptTpacketStats(fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
		testenv.Must(r, err)
		if stats.Drops > 0 {
			r.Fatalf("the capture missed %d packets", stats.Drops)
		}
		return seen
	}
}

// tcp sends so many bytes over a connection to a server in a namespace, which answers when it has all of them.
func (r *rig) tcp(n *testenv.Netns, to string, bytes int) {
	r.Helper()
	var l net.Listener
	r.in(n, func() {
		var err error
		l, err = net.Listen("tcp", to)
		testenv.Must(r, err)
	})
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			defer c.Close()
			_, err = io.CopyN(io.Discard, c, int64(bytes))
			c.Write([]byte("all"))
		}
		done <- err
	}()
	c, err := net.Dial("tcp", to)
	testenv.Must(r, err)
	_, err = c.Write(make([]byte, bytes))
	testenv.Must(r, err)
	testenv.Must(r, <-done)
	_, err = io.ReadAll(c)
	testenv.Must(r, err)
	testenv.Must(r, c.Close())
	r.quiet()
}

// udp sends packets of up to so many bytes of payload.
func (r *rig) udp(to string, packets, bytes int) {
	r.Helper()
	c, err := net.Dial("udp", to)
	testenv.Must(r, err)
	defer c.Close()
	for i := range packets {
		if _, err := c.Write(make([]byte, 1+i*7919%bytes)); err != nil && !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ENOBUFS) {
			r.Fatal(err)
		}
	}
	r.quiet()
}

// quiet waits until the device has sent what there is: no counter of its rules changes any more.
func (r *rig) quiet() {
	r.Helper()
	last := map[string]float64{}
	testenv.Eventually(r, "the network to be quiet", func() bool {
		time.Sleep(300 * time.Millisecond)
		now := r.samples()
		maps.DeleteFunc(now, func(key string, _ float64) bool { return !strings.Contains(key, "_total{") })
		same := maps.Equal(now, last)
		last = now
		return same
	})
}

// No number of hosts changes the number of series, but for that of the buckets, which --metrics-buckets bounds.
func TestSeriesUnderSpray(t *testing.T) {
	const most = 5
	r := newRig(t, most)
	hosts, flows := limit("10.0.0.0/8", 8, ""), limit("11.0.0.0/8", 8, "crowd") // so slow that no bucket empties meanwhile
	hosts.Each.Kind, flows.Each.Kind = policy.EachHost, policy.EachFlow
	crowd := pool("crowd", 80_000_000, "")
	crowd.Share.Kind = policy.ShareHost
	r.apply("va", []policy.Rule{hosts, flows}, nil, []policy.Rule{crowd})
	without := len(r.samples())
	sprayed := testenv.Rounds(t, 1e5)
	frame := testenv.Frame(netip.MustParseAddr("10.9.9.9"), netip.MustParseAddr("10.0.0.0"), 60)
	for i := range sprayed {
		frame[30], frame[31], frame[32], frame[33] = byte(10+i&1), byte(i>>16), byte(i>>8), byte(i)
		testenv.Must(t, r.sender.Send(frame))
	}
	began := time.Now()
	now := r.samples()
	buckets := 0
	for key := range now {
		if strings.HasPrefix(key, "shapectl_bucket_level_bytes{") {
			buckets++
		}
	}
	t.Logf("%d series, %d of them of buckets, %.0f of %.0f buckets in use, read in %v", len(now), buckets,
		now["shapectl_buckets_in_use"], now["shapectl_buckets_size"], time.Since(began))
	if buckets != most || len(now) != without+most {
		t.Errorf("%d series, %d of them of buckets; there were %d without traffic", len(now), buckets, without)
	}
	if in := now["shapectl_buckets_in_use"]; in < float64(sprayed)/3 {
		t.Errorf("only %.0f buckets in use, so this shows nothing", in)
	}
}

// Whatever happens to a rule, no counter falls, and no byte counts twice.
func TestCountersGoOn(t *testing.T) {
	r := newRig(t, 0)
	some := func(within, and string) []policy.Rule {
		a := limit("10.0.0.1/32", 80_000, within)
		a.Label.Name = and
		return []policy.Rule{a, limit("10.0.0.2/32", 80_000, "one")}
	}
	pools := []policy.Rule{pool("one", 8_000_000, "top"), pool("two", 8_000_000, "top"), pool("top", 8_000_000, "")}
	r.apply("va", some("one", "alice"), nil, pools)
	last := r.samples()
	check := func(when, device string) {
		t.Helper()
		r.send("10.0.0.1", 100, 1000)
		r.send("10.0.0.2", 100, 1000)
		now := r.samples()
		for key, v := range last {
			if is, there := now[key]; strings.Contains(key, "_total") && there && is < v {
				t.Errorf("%s: %s falls from %v to %v", when, key, v, is)
			}
		}
		grew := func(key string) float64 { return now[key] - last[key] }
		dropped := 0.0
		for _, network := range []string{"10.0.0.1/32", "10.0.0.2/32"} {
			dropped += grew(fmt.Sprintf(`shapectl_rule_dropped_packets_total{device=%q,direction="egress",network=%q}`, device, network))
		}
		one, two, top := grew(`shapectl_pool_dropped_packets_total{pool="one"}`), grew(`shapectl_pool_dropped_packets_total{pool="two"}`), grew(`shapectl_pool_dropped_packets_total{pool="top"}`)
		if one+two != dropped || top != dropped || dropped < 80 || dropped > 200 {
			t.Errorf("%s: the pools lost %v, %v and %v, their rules %v", when, one, two, top, dropped)
		}
		last = now
	}
	check("at first", "va")
	r.apply("va", some("one", "bob"), nil, pools)
	check("renamed", "va")
	r.apply("va", some("two", "bob"), nil, pools)
	check("moved to another pool", "va")
	each := limit("10.1.0.0/24", 80_000, "")
	each.Each.Kind = policy.EachHost
	r.apply("va", append(some("two", "bob"), each), nil, pools)
	check("with maps of another size", "va")
}
