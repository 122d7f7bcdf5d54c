package observe

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/live/livetest"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A limitRig is a device "va" with limits.
type limitRig struct {
	testing.TB
	options loader.Options
	sender  *testenv.Sender
}

func newLimitRig(tb testing.TB, rules ...policy.Rule) *limitRig {
	tb.Helper()
	if testenv.OlderThan(tb, 6, 6) {
		tb.Skip("this kernel has no tcx")
	}
	testenv.NewNetns(tb)
	r := &limitRig{TB: tb, options: loader.Options{BPFFS: testenv.BPFFS(tb)}}
	testenv.Veth(tb, "va", "vb")
	r.sender = testenv.NewSender(tb, "va")
	if len(rules) > 0 {
		r.put(rules...)
	}
	return r
}

func (r *limitRig) put(rules ...policy.Rule) {
	r.Helper()
	n, err := loader.Write(r.options)
	testenv.Must(r, err)
	defer n.Close()
	_, err = n.Put(loader.ApplyOptions{}, policy.Table{Device: "va", Direction: policy.Egress, Match: policy.MatchDst, Rules: rules})
	testenv.Must(r, err)
}

func (r *limitRig) flush() {
	r.Helper()
	n, err := loader.Write(r.options)
	testenv.Must(r, err)
	defer n.Close()
	h, err := n.Find("va", policy.Egress)
	testenv.Must(r, err)
	defer h.Close()
	testenv.Must(r, n.Flush(h))
}

// send sends packets of 1000 bytes to a host.
func (r *limitRig) send(to string, packets int) {
	r.Helper()
	for range packets {
		testenv.Must(r, r.sender.Send(testenv.Frame(netip.MustParseAddr("10.9.9.9"), netip.MustParseAddr(to), 1000)))
	}
}

func (r *limitRig) start(o TalkersOptions) *Talkers {
	r.Helper()
	t, err := StartTalkers(o)
	testenv.Must(r, err)
	r.Cleanup(func() { testenv.Must(r, t.Close()) })
	return t
}

func limit(network string) policy.Rule {
	return policy.Rule{Prefix: netip.MustParsePrefix(network), Rate: 8_000, Capacity: 10_000, Algorithm: policy.GCRA}
}

// talkersOf are the options for the first of some rules on egress of "va".
func talkersOf(rules ...policy.Rule) TalkersOptions {
	reading := livetest.Scene(policy.Table{Device: "va", Direction: policy.Egress, Match: policy.MatchDst, Rules: rules}).Read(1, func(l *live.Limit) live.Item { return live.Item{Limit: l} })
	return TalkersOf(reading.Items, reading.Items[0].Limit)
}

func read(t testing.TB, of *Talkers) TalkersReading {
	t.Helper()
	got, err := of.Read()
	testenv.Must(t, err)
	return got
}

func TestTalkers(t *testing.T) {
	r := newLimitRig(t, limit("10.0.0.0/8"), limit("10.7.0.0/16"))
	o := talkersOf(limit("10.0.0.0/8"), limit("10.7.0.0/16"))
	hosts := r.start(o)
	o.ByFlow = true
	flows := r.start(o)
	if hosts.read.Before(hosts.hooks.looked) {
		t.Error("the interval began before packets were counted")
	}
	r.send("10.0.0.1", 4)
	r.send("10.7.0.1", 5) // of the longer rule
	r.send("10.0.0.2", 30)
	r.send("192.0.2.1", 5) // of no rule
	for _, of := range []*Talkers{hosts, flows} {
		got := read(t, of)
		if len(got.Talkers) != 2 || !strings.Contains(got.Talkers[0].Key, "10.0.0.2") || !strings.Contains(got.Talkers[1].Key, "10.0.0.1") {
			t.Fatalf("who sends is %+v", got.Talkers)
		}
		if want := (Traffic{Packets: 30, Bytes: 30_000, PassedPackets: 6, PassedBytes: 6_000}); got.Talkers[0].Traffic != want {
			t.Errorf("one who is limited sent %+v, want %+v", got.Talkers[0].Traffic, want)
		}
		if want := (Traffic{Packets: 4, Bytes: 4_000, PassedPackets: 4, PassedBytes: 4_000}); got.Talkers[1].Traffic != want {
			t.Errorf("one who is not limited sent %+v, want %+v", got.Talkers[1].Traffic, want)
		}
		if want := (Traffic{Packets: 34, Bytes: 34_000, PassedPackets: 10, PassedBytes: 10_000}); got.Total != want || got.Others != (Traffic{}) || got.PassedUnknown || got.Interval <= 0 {
			t.Errorf("all sent %+v, want %+v, and others %+v", got.Total, want, got.Others)
		}
		if again := read(t, of); len(again.Talkers) != 0 || again.Total != (Traffic{}) {
			t.Errorf("nothing was sent since: %+v", again)
		}
	}
	r.send("10.0.0.1", 1)
	if got := read(t, flows).Talkers; len(got) != 1 || !strings.HasPrefix(got[0].Key, "udp,10.9.9.9:") || !strings.Contains(got[0].Key, ",10.0.0.1:") {
		t.Errorf("the flow is %+v", got)
	}
}

// The rules may be attached again meanwhile, and the device may go.
func TestTalkersFollowTheDevice(t *testing.T) {
	r := newLimitRig(t, limit("10.0.0.0/8"))
	o := talkersOf(limit("10.0.0.0/8"))
	hosts := r.start(o)
	r.flush()
	r.send("10.0.0.1", 30)
	if got := read(t, hosts).Total; got != (Traffic{Packets: 30, Bytes: 30_000, PassedPackets: 30, PassedBytes: 30_000}) {
		t.Errorf("without a limit: %+v", got)
	}
	r.put(limit("10.0.0.0/8"))
	read(t, hosts) // finds that the limit is not between the programs
	r.send("10.0.0.1", 30)
	if got := read(t, hosts).Total; got != (Traffic{Packets: 30, Bytes: 30_000, PassedPackets: 10, PassedBytes: 10_000}) {
		t.Errorf("with a new limit: %+v", got)
	}
	deleteLink(t, "va")
	if got := read(t, hosts).Total; got != (Traffic{}) {
		t.Errorf("the device is gone: %+v", got)
	}
	testenv.Veth(t, "va", "vb")
	r.sender = testenv.NewSender(t, "va")
	read(t, hosts)
	r.send("10.0.0.1", 3)
	if got := read(t, hosts).Total; got != (Traffic{Packets: 3, Bytes: 3_000, PassedPackets: 3, PassedBytes: 3_000}) {
		t.Errorf("the device is back: %+v", got)
	}
	hosts.total.Packets, hosts.total.Bytes = hosts.total.Packets-1, hosts.total.Bytes-1000 // as if one packet had come during the last Read
	if got := read(t, hosts); got.Total.Packets != 1 || got.Others != (Traffic{}) {
		t.Errorf("a packet during Read: %+v", got)
	}
}

// A spray of hosts needs no more memory, and does not hide who sends much.
func TestTalkersUnderASpray(t *testing.T) {
	r := newLimitRig(t)
	hosts := r.start(TalkersOptions{Device: "va", Direction: policy.Egress, Network: netip.MustParsePrefix("10.0.0.0/8")})
	const sprayed = 40_000
	for i := range sprayed {
		if i%100 == 0 {
			r.send("10.255.0.1", 2)
		}
		r.send(fmt.Sprintf("10.%d.%d.%d", i>>14, i>>7&127, i&127), 1)
	}
	got := read(t, hosts)
	if len(got.Talkers) > maxTalkers {
		t.Errorf("%d talkers are kept, at most %d have room", len(got.Talkers), maxTalkers)
	}
	if first := got.Talkers[0]; first.Key != "10.255.0.1" || first.Packets < sprayed/100 {
		t.Errorf("who sends most is %+v", first)
	}
	var sum Traffic
	for _, one := range got.Talkers {
		sum.Packets += one.Packets
	}
	if want := uint64(sprayed + 2*sprayed/100); got.Total.Packets != want || sum.Packets+got.Others.Packets != want {
		t.Errorf("all sent %d packets, want %d; those that are kept %d, others %d", got.Total.Packets, want, sum.Packets, got.Others.Packets)
	}
}

func deleteLink(t testing.TB, name string) {
	t.Helper()
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, name)))
}

// Packets of a rule that queues what enters a device cannot be seen behind it. Those of others can, also in a pool.
func TestPassedIsUnknown(t *testing.T) {
	pool := func(name, within string, excess policy.Excess) policy.Rule {
		return policy.Rule{Pool: true, Prefix: policy.PoolKey(name), Label: policy.Label{Name: name}, Within: policy.Within(within), Excess: excess}
	}
	pools := []policy.Rule{pool("drops", "top", policy.Drop), pool("top", "", policy.ECN), pool("inner", "queues", policy.Drop), pool("queues", "", policy.Delay)}
	for _, tt := range []struct {
		direction policy.Direction
		excess    policy.Excess
		within    policy.Within
		hook      loader.Mode
		want      bool
	}{
		{policy.Ingress, policy.Drop, "", loader.TCX, false},
		{policy.Ingress, policy.Delay, "", loader.TCX, true},
		{policy.Egress, policy.Delay, "", loader.TCX, false},
		{policy.Egress, policy.Drop, "", loader.Clsact, true},
		{policy.Ingress, policy.Drop, "drops", loader.TCX, false},
		{policy.Ingress, policy.Drop, "inner", loader.TCX, true},
		{policy.Egress, policy.Drop, "inner", loader.TCX, false},
		{policy.Ingress, policy.Drop, "unknown", loader.TCX, true},
	} {
		r := limit("10.0.0.0/8")
		r.Excess, r.Within = tt.excess, tt.within
		items := itemsOf(policy.Table{Rules: pools}, policy.Table{Device: "va", Direction: tt.direction, Rules: []policy.Rule{r}})
		of := items[len(pools)]
		of.Place.Mode = tt.hook
		if o := TalkersOf(nil, of.Limit); o.PassedUnknown != tt.want {
			t.Errorf("%+v: unknown is %v", tt, o.PassedUnknown)
		}
	}
}
