package live_test

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A rig is a namespace with limits on "va", and a Reader of it.
type rig struct {
	testing.TB
	options loader.Options
	reader  *live.Reader
	sender  *testenv.Sender
}

func newRig(tb testing.TB) *rig {
	testenv.NewNetns(tb)
	r := &rig{TB: tb, options: loader.Options{BPFFS: testenv.BPFFS(tb)}}
	testenv.Veth(tb, "va", "vb")
	r.sender = testenv.NewSender(tb, "va")
	// A Shared reads on after the test, on other threads.
	r.reader = &live.Reader{Options: r.options, Netns: fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())}
	return r
}

func (r *rig) write(f func(n *loader.Namespace) error) {
	r.Helper()
	n, err := loader.Write(r.options)
	testenv.Must(r, err)
	defer n.Close()
	testenv.Must(r, f(n))
}

func (r *rig) put(rules ...policy.Rule) {
	r.Helper()
	r.write(func(n *loader.Namespace) error {
		_, err := n.Put(loader.ApplyOptions{}, policy.Table{Device: "va", Direction: policy.Egress, Match: policy.MatchDst, Rules: rules})
		return err
	})
}

func (r *rig) read(what live.What) *live.Reading {
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

func slow(network, name string) policy.Rule {
	return policy.Rule{
		Prefix: netip.MustParsePrefix(network), Rate: 8_000, Capacity: 10_000, Algorithm: policy.GCRA, Label: policy.Label{Name: name},
	}
}

// What is set is read anew after each change, also one that replaces the maps, and only then.
func TestReadingsFollowRules(t *testing.T) {
	r := newRig(t)
	defer r.reader.Close()
	if now := r.read(live.What{}); len(now.Items) != 0 || now.Interval != 0 {
		t.Errorf("without rules: %+v", now)
	}
	r.put(slow("10.0.0.0/24", "first"))
	now := r.read(live.What{})
	if len(now.Items) != 1 || now.Items[0].Label.Name != "first" || now.Interval <= 0 {
		t.Fatalf("after a rule was set: %+v", now)
	}
	r.send("10.0.0.1", 20)
	next := r.read(live.What{})
	if it := &next.Items[0]; it.PassedPackets < 10 || it.DroppedPackets == 0 || it.UseBits().N == 0 || it.DroppedBits().N == 0 || !it.Place.InForce || it.Device != "va" {
		t.Errorf("20 packets into a bucket of 10: %+v", it)
	}
	if next.Items[0].Limit != now.Items[0].Limit {
		t.Error("rules that did not change were read again")
	}
	name := func() string { return r.read(live.What{}).Items[0].Label.Name }
	r.put(slow("10.0.0.0/24", "second"))
	if got := name(); got != "second" {
		t.Errorf("the name is %q after it was changed", got)
	}
	r.write(func(n *loader.Namespace) error {
		_, err := n.Put(loader.ApplyOptions{Confirm: time.Second}, policy.Table{Device: "va", Direction: policy.Egress, Match: policy.MatchDst, Rules: []policy.Rule{slow("10.0.0.0/24", "pending")}})
		return err
	})
	if now := r.read(live.What{}); now.RevertsInNS == nil || now.Items[0].Label.Name != "pending" {
		t.Errorf("while a change is pending: %+v", now)
	}
	testenv.Eventually(t, "the change to revert by time", func() bool { return name() == "second" && r.read(live.What{}).RevertsInNS == nil })
	testenv.Must(t, netlink.LinkSetName(testenv.Link(t, "va"), "vz"))
	testenv.Eventually(t, "the device to be renamed", func() bool { return r.read(live.What{}).Items[0].Device == "vz" })
	testenv.Must(t, netlink.LinkSetName(testenv.Link(t, "vz"), "va"))
	r.write(func(n *loader.Namespace) error {
		h, err := n.Find("va", policy.Egress)
		testenv.Must(t, err)
		defer h.Close()
		return n.Flush(h)
	})
	if now := r.read(live.What{}); len(now.Items) != 0 {
		t.Errorf("after a flush: %+v", now.Items)
	}
	r.put(slow("10.1.0.0/24", "third")) // with an id that another rule had
	if it := r.read(live.What{}).Items; len(it) != 1 || it[0].Label.Name != "third" || it[0].UseBits().Known {
		t.Errorf("after a flush and a new rule: %+v", it)
	}
	each := slow("10.2.0.0/24", "hosts") // buckets for each host need a table, which comes with other maps
	each.Each.Kind = policy.EachHost
	r.put(each)
	r.read(live.What{})
	r.send("10.2.0.7", 20)
	now = r.read(live.What{Fullest: 5, Slots: true, Buckets: true})
	it := now.Find(live.Key{Device: "va", Direction: "egress", Network: "10.2.0.0/24"})
	if it == nil || it.PassedPackets < 10 || *it.ActiveBuckets != 1 || now.Slots.InUse != 1 {
		t.Errorf("after the maps were replaced: %+v, %+v", it, now.Slots)
	}
	if full := now.Fullest; len(full) != 1 || full[0].Bucket.Name != "10.2.0.7" || full[0].Item != it || full[0].Percent < 80 {
		t.Errorf("the fullest buckets are %+v", full)
	}
}

// The bucket and the quota of the only host of a rule are those of the rule, also with --each host.
func TestFiguresOfOneHost(t *testing.T) {
	r := newRig(t)
	defer r.reader.Close()
	rule := slow("10.0.0.7/32", "")
	rule.Each.Kind, rule.Also = policy.EachHost, policy.Also{Quota: policy.Quota{Bytes: 5000, Period: "month"}}
	r.put(rule)
	r.send("10.0.0.7", 7)
	it := &r.read(live.What{}).Items[0]
	if it.Level == 0 || it.Used.UsedBytes != 5000 || it.Used.LeftBytes != 0 || !it.Used.UsedUp() || it.Used.EndsNS == 0 {
		t.Errorf("after 5 packets of 7: level %d, %+v", it.Level, it.Used)
	}
}

// Both clocks of a reading are of one instant, however long the reading takes: else a report would say that the wall clock
// was set.
func TestReadingHasOneTime(t *testing.T) {
	r := newRig(t)
	defer r.reader.Close()
	rules := make([]policy.Rule, 50_000)
	for i := range rules {
		rules[i] = slow(fmt.Sprintf("10.%d.%d.%d/32", i>>16, i>>8&255, i&255), "")
	}
	r.put(rules...)
	ahead := func(wall time.Time, now uint64) time.Duration { return time.Duration(wall.UnixNano() - int64(now)) }
	for range 3 {
		now := r.read(live.What{})
		if off := ahead(now.Time, now.At) - ahead(maps.Clocks()); off.Abs() > 5*time.Millisecond {
			t.Errorf("a reading of %d rules has times that are %v apart", len(now.Items), off)
		}
	}
}

// The fullest buckets are first, and one that fills up later is found.
func TestFullest(t *testing.T) {
	r := newRig(t)
	defer r.reader.Close()
	each := slow("10.0.0.0/16", "")
	each.Each.Kind = policy.EachHost
	r.put(each)
	for i := range 200 {
		r.send(fmt.Sprintf("10.0.1.%d", i), 1)
	}
	r.send("10.0.0.1", 8)
	r.send("10.0.0.2", 5)
	keys := func() (keys []string) {
		for _, b := range r.read(live.What{Fullest: 3}).Fullest {
			keys = append(keys, b.Bucket.Name)
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

// All who watch share readings with equal intervals, also while others want a reading now.
func TestShared(t *testing.T) {
	r := newRig(t)
	r.put(slow("10.0.0.0/24", ""))
	const interval = 250 * time.Millisecond
	shared := live.NewShared(r.reader, interval)
	taken, began := make(chan *live.Reading), time.Now()
	for n := range 8 {
		go func() {
			var last *live.Reading
			for range 200 {
				now, err := shared.Watch(t.Context(), live.What{Fullest: n % 2})
				if err != nil {
					t.Error(err)
				}
				if now != last {
					last = now
					taken <- now
				}
				if n%2 == 1 {
					if now, err := shared.Now(t.Context(), live.What{Slots: true}); err != nil || len(now.Items) != 1 {
						t.Errorf("a reading of now: %v, %v", now, err)
					}
				}
				time.Sleep(10 * time.Millisecond)
			}
			taken <- nil
		}()
	}
	seen := map[*live.Reading]int{}
	for left := 8; left > 0; {
		if now := <-taken; now != nil {
			seen[now]++
		} else {
			left--
		}
	}
	for now := range seen {
		if now.Interval < interval/4 { // a busy machine makes some longer than others
			t.Errorf("an interval is %v", now.Interval)
		}
	}
	if most := 2 + int(time.Since(began)/(interval/2)); len(seen) < 4 || len(seen) > most {
		t.Errorf("%d readings, at most %d are due: those who watch do not share them", len(seen), most)
	}
	r.send("10.0.0.1", 5)
	testenv.Eventually(t, "a later reading to show what was sent", func() bool {
		now, err := shared.Watch(t.Context(), live.What{})
		testenv.Must(t, err)
		return now.Items[0].PassedPackets >= 5
	})
}

// What somebody uses stays as it is. What nobody uses any more is the memory of a later reading.
func TestRelease(t *testing.T) {
	r := newRig(t)
	r.put(slow("10.0.0.0/24", ""))
	shared := live.NewShared(r.reader, 10*time.Millisecond)
	next := func(last *live.Reading) (now *live.Reading) {
		testenv.Eventually(t, "another reading", func() (is bool) {
			var err error
			now, err = shared.Watch(t.Context(), live.What{})
			testenv.Must(t, err)
			if is = now != last; !is {
				now.Release()
			}
			return is
		})
		return now
	}
	held := next(nil)
	had := held.Items[0].PassedPackets
	r.send("10.0.0.1", 5)
	seen, again := []*live.Item{}, 0
	for last, i := held, 0; i < 20; i++ {
		last = next(last)
		if at := &last.Items[0]; slices.Contains(seen, at) {
			again++
		} else {
			seen = append(seen, at)
		}
		last.Release()
	}
	if held.Items[0].PassedPackets != had || slices.Contains(seen, &held.Items[0]) {
		t.Errorf("a reading that is in use has %d packets now, not %d", held.Items[0].PassedPackets, had)
	}
	if again == 0 {
		t.Errorf("%d readings share no memory", len(seen))
	}
}
