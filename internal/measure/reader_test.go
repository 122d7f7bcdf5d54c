package measure_test

import (
	"fmt"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A rig is a namespace with limits on "va", and a Reader of it.
type rig struct {
	testing.TB
	options loader.Options
	reader  *measure.Reader
	sender  *testenv.Sender
}

func newRig(tb testing.TB) *rig {
	testenv.NewNetns(tb)
	r := &rig{TB: tb, options: loader.Options{BPFFS: testenv.BPFFS(tb)}}
	testenv.Veth(tb, "va", "vb")
	r.sender = testenv.NewSender(tb, "va")
	r.reader = &measure.Reader{Options: r.options}
	tb.Cleanup(r.reader.Close)
	return r
}

func (r *rig) write(f func(n *loader.Namespace) error) {
	r.Helper()
	n, err := loader.Write(r.options)
	testenv.Must(r, err)
	defer n.Close()
	testenv.Must(r, f(n))
}

func (r *rig) put(device string, rules ...policy.Rule) {
	r.Helper()
	r.write(func(n *loader.Namespace) error {
		_, err := n.Put(loader.ApplyOptions{}, policy.Table{Device: device, Direction: policy.Egress, Match: policy.MatchDst, Rules: rules})
		return err
	})
}

func (r *rig) read(what measure.What) *measure.Reading {
	r.Helper()
	now, err := r.reader.Read(what)
	testenv.Must(r, err)
	return now
}

// send sends packets of 1000 bytes to a host.
func (r *rig) send(to string, packets int) {
	r.Helper()
	for range packets {
		testenv.Must(r, r.sender.Send(testenv.Frame(netip.MustParseAddr("10.9.9.9"), netip.MustParseAddr(to), 1000)))
	}
}

func rule(network, name string) policy.Rule {
	return policy.Rule{
		Prefix: netip.MustParsePrefix(network), Rate: 8_000, Capacity: 10_000, Algorithm: policy.GCRA, Label: policy.Label{Name: name},
	}
}

func find(rules report.Rules, cidr string) *report.Rule {
	for i := range rules {
		if rules[i].CIDR == cidr {
			return &rules[i]
		}
	}
	return nil
}

// Readings follow all changes of rules, also those that replace the maps, and measure what rules did in between.
func TestReadingsFollowRules(t *testing.T) {
	r := newRig(t)
	if now := r.read(measure.What{}); len(now.Rules) != 0 || now.Interval != 0 {
		t.Errorf("without rules: %+v", now)
	}
	r.put("va", rule("10.0.0.0/24", "first"))
	now := r.read(measure.What{})
	if len(now.Rules) != 1 || now.Rules[0].Name != "first" || now.Interval <= 0 {
		t.Fatalf("after a rule was set: %+v", now)
	}
	r.send("10.0.0.1", 20)
	now = r.read(measure.What{})
	if got := now.Rules[0]; got.PassedPackets < 10 || got.DroppedPackets == 0 || got.UseBits == nil || *got.UseBits == 0 || *got.DroppedBits == 0 {
		t.Errorf("20 packets into a bucket of 10: %+v", got)
	}
	// The label changes, and an id gets another rule.
	r.put("va", rule("10.0.0.0/24", "second"))
	if got := r.read(measure.What{}).Rules; got[0].Name != "second" {
		t.Errorf("the name is %q after it was changed", got[0].Name)
	}
	r.write(func(n *loader.Namespace) error {
		h, err := n.Find("va", policy.Egress)
		testenv.Must(t, err)
		defer h.Close()
		return n.Flush(h)
	})
	if got := r.read(measure.What{}).Rules; len(got) != 0 {
		t.Errorf("after a flush: %+v", got)
	}
	r.put("va", rule("10.1.0.0/24", "third"))
	if got := r.read(measure.What{}).Rules; len(got) != 1 || got[0].Name != "third" || got[0].UseBits != nil {
		t.Errorf("after a flush and a new rule: %+v", got)
	}
	// Buckets for each host need a table, which comes with other maps.
	each := rule("10.2.0.0/24", "hosts")
	each.Each.Kind = policy.EachHost
	r.put("va", each)
	r.read(measure.What{})
	r.send("10.2.0.7", 20)
	now = r.read(measure.What{Fullest: 5, Slots: true, Active: true})
	if got := find(now.Rules, "10.2.0.0/24"); got == nil || got.PassedPackets < 10 || *got.ActiveBuckets != 1 {
		t.Errorf("after the maps were replaced: %+v", got)
	}
	if now.Slots.InUse != 1 {
		t.Errorf("%d slots in use", now.Slots.InUse)
	}
	if len(now.Fullest) != 1 || now.Fullest[0].Key != "10.2.0.7" || now.Fullest[0].CIDR != "10.2.0.0/24" || now.Fullest[0].FullPercent < 80 {
		t.Errorf("the fullest buckets are %+v", now.Fullest)
	}
}

// The fullest buckets are first, and one that fills up later is found.
// TestReadingHasOneTime sees that both clocks of a reading are of one instant, however long the reading takes: else a report
// would say that the wall clock was set.
func TestReadingHasOneTime(t *testing.T) {
	r := newRig(t)
	rules := make([]policy.Rule, 50_000)
	for i := range rules {
		rules[i] = rule(fmt.Sprintf("10.%d.%d.%d/32", i>>16, i>>8&255, i&255), "")
	}
	r.put("va", rules...)
	ahead := func(wall time.Time, now uint64) time.Duration { return time.Duration(wall.UnixNano() - int64(now)) }
	for range 3 {
		now := r.read(measure.What{})
		if off := ahead(now.Time, now.At) - ahead(maps.Clocks()); off.Abs() > 5*time.Millisecond {
			t.Errorf("a reading of %d rules has times that are %v apart", len(now.Rules), off)
		}
	}
}

func TestFullest(t *testing.T) {
	r := newRig(t)
	each := rule("10.0.0.0/16", "")
	each.Each.Kind = policy.EachHost
	r.put("va", each)
	for i := range 200 {
		r.send(fmt.Sprintf("10.0.1.%d", i), 1)
	}
	for host, packets := range map[string]int{"10.0.0.1": 8, "10.0.0.2": 5} {
		r.send(host, packets)
	}
	keys := func() (keys []string) {
		for _, b := range r.read(measure.What{Fullest: 3}).Fullest {
			keys = append(keys, b.Key)
		}
		return keys
	}
	if got := keys(); len(got) != 3 || got[0] != "10.0.0.1" || got[1] != "10.0.0.2" {
		t.Errorf("the fullest are %v", got)
	}
	r.send("10.0.1.9", 9)
	if got := keys(); got[0] != "10.0.1.9" || got[1] != "10.0.0.1" {
		t.Errorf("after another filled up: %v", got)
	}
}

// The first rule of a Top is the one that refuses most, not the one that uses most.
func TestWorstIsFirst(t *testing.T) {
	r := newRig(t)
	big := rule("10.0.0.0/24", "big")
	big.Rate, big.Capacity = 1e9, 1e6
	r.put("va", big, rule("10.1.0.0/24", "flooded"), rule("10.2.0.0/24", "idle"))
	r.read(measure.What{})
	r.send("10.0.0.1", 200)
	r.send("10.1.0.1", 50)
	top := r.read(measure.What{}).Top()
	if top.Rules[0].Name != "flooded" || top.Rules[1].Name != "big" {
		t.Errorf("the order is %v", report.Rules(top.Rules).Names())
	}
}

// Those who ask at once share readings, and each has measured an interval.
func TestLive(t *testing.T) {
	r := newRig(t)
	r.put("va", rule("10.0.0.0/24", ""))
	// Live reads on after the test, so the reader is its own.
	reader := &measure.Reader{Options: r.reader.Options, Netns: fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())}
	live := measure.NewLive(reader, measure.What{}, 200*time.Millisecond)
	var readings [8]*measure.Reading
	var all sync.WaitGroup
	for i := range readings {
		all.Go(func() {
			var err error
			if readings[i], err = live.Latest(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	taken := map[*measure.Reading]bool{}
	for _, reading := range readings {
		if taken[reading] = true; reading.Interval <= 0 || len(reading.Rules) != 1 {
			t.Errorf("one who asks gets %+v", reading)
		}
	}
	if len(taken) == len(readings) {
		t.Error("each who asks gets a reading of his own")
	}
	r.send("10.0.0.1", 5)
	testenv.Eventually(t, "a later reading shows what was sent", func() bool {
		reading, err := live.Latest(t.Context())
		testenv.Must(t, err)
		return reading.Rules[0].PassedPackets >= 5
	})
}

// BenchmarkReadDevices reads many devices with four rules each.
func BenchmarkReadDevices(b *testing.B) {
	r := newRig(b)
	const devices = 300
	var tables []policy.Table
	for i := range devices {
		name := fmt.Sprintf("d%d", i)
		testenv.AddLink(b, &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}})
		table := policy.Table{Device: name, Direction: policy.Egress, Match: policy.MatchDst}
		for j := range 4 {
			table.Rules = append(table.Rules, rule(fmt.Sprintf("10.%d.%d.0/24", j, i%256), "customer "+name))
		}
		tables = append(tables, table)
	}
	r.write(func(n *loader.Namespace) error {
		_, err := n.Apply(tables, loader.ApplyOptions{})
		return err
	})
	r.read(measure.What{})
	for b.Loop() {
		r.read(measure.What{Fullest: 20})
	}
}

// BenchmarkReadBuckets reads a table with many buckets, all charged lately.
func BenchmarkReadBuckets(b *testing.B) {
	r := newRig(b)
	each := rule("10.0.0.0/8", "")
	each.Rate, each.Capacity = 8, 1_000_000
	each.Each.Kind = policy.EachHost
	r.put("va", each)
	began := time.Now()
	for i := range 700_000 {
		to := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		testenv.Must(b, r.sender.Send(testenv.Frame(netip.MustParseAddr("10.9.9.9"), to, 100)))
	}
	b.Logf("filled in %v", time.Since(began))
	b.Logf("%+v", r.read(measure.What{Slots: true}).Slots)
	for b.Loop() {
		r.read(measure.What{Fullest: 20})
	}
}
