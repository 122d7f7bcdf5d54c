package live_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/live/livetest"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func rule(network, name string, rate policy.Rate, within policy.Within) policy.Rule {
	return policy.Rule{Prefix: netip.MustParsePrefix(network), Rate: rate, Capacity: 100_000, Within: within, Label: policy.Label{Name: name}}
}

func pool(name string, within policy.Within) policy.Rule {
	return policy.Rule{Pool: true, Prefix: policy.PoolKey(name), Rate: 8e6, Capacity: 100_000, Within: within, Label: policy.Label{Name: name}}
}

func counts(passed, dropped uint64) live.Counts {
	return live.Counts{Counters: maps.Counters{PassedPackets: 1, PassedBytes: passed, DroppedPackets: dropped, DroppedBytes: dropped}}
}

// inASecond is a reading of what was counted within a second, by name or network.
func inASecond(of map[string]live.Counts, tables ...policy.Table) *live.Reading {
	s := livetest.Scene(tables...)
	now := s.Read(2e9, livetest.Counted(of))
	now.Since(s.Read(1e9, livetest.Counted(nil)))
	return now
}

func labels(rows []live.Row) string {
	var names []string
	for _, r := range rows {
		switch {
		case r.Name != nil:
			names = append(names, r.Name.Name)
		case r.Label.Name != "":
			names = append(names, strings.Repeat(">", r.Depth)+r.Label.Name)
		default:
			names = append(names, strings.Repeat(">", r.Depth)+r.Network)
		}
	}
	return strings.Join(names, " ")
}

func TestOrders(t *testing.T) {
	a, b, c := rule("10.0.0.0/24", "bob", 1e6, ""), rule("10.0.10.0/24", "", policy.Unlimited, ""), rule("10.0.9.0/24", "alice", 2e6, "")
	figures := map[string]live.Counts{"bob": counts(3, 0), "10.0.10.0/24": counts(1, 9), "alice": counts(2, 5)}
	for name, excess := range map[string]uint64{"bob": 99, "10.0.10.0/24": 9, "alice": 5} { // bob marks and delays packets
		of := figures[name]
		of.ExcessPackets = excess
		figures[name] = of
	}
	r := inASecond(figures, policy.Table{Device: "tap10", Rules: []policy.Rule{a}}, policy.Table{Device: "tap2", Rules: []policy.Rule{b, c}})
	for by, want := range map[string]string{
		"excess": "bob 10.0.10.0/24 alice", "device": "10.0.10.0/24 alice bob", "network": "bob alice 10.0.10.0/24", "name": "alice bob 10.0.10.0/24",
		"plan": "10.0.10.0/24 alice bob", "rate": "10.0.10.0/24 alice bob", "use": "bob alice 10.0.10.0/24", "passed": "bob alice 10.0.10.0/24",
		"dropped": "10.0.10.0/24 alice bob", "percent": "alice bob 10.0.10.0/24", "level": "alice bob 10.0.10.0/24", live.Worst: "10.0.10.0/24 alice bob",
	} {
		if rows, _ := r.Rows(live.View{Sort: by}); labels(rows) != want {
			t.Errorf("by %s: %s, want %s", by, labels(rows), want)
		}
	}
	if rows, of := r.Rows(live.View{Sort: "use", Top: 1, Search: "TAP2"}); labels(rows) != "alice" || of != 3 {
		t.Errorf("a search finds %s of %d", labels(rows), of)
	}
}

// What drops or refuses most is first, the rule before its pool. A pool that only has rules within it that drop comes where
// its use does.
func TestWorst(t *testing.T) {
	refuses := counts(1000, 9000)
	s := livetest.Scene(
		policy.Table{Rules: []policy.Rule{pool("around", ""), pool("refuses", "")}},
		policy.Table{Device: "eth0", Rules: []policy.Rule{
			rule("10.0.0.1/32", "idle", 8e6, ""), rule("10.0.0.2/32", "near", 8e6, ""), rule("10.0.0.3/32", "less", 8e6, ""), rule("10.0.0.4/32", "drops", 8e6, "refuses"),
			rule("10.0.0.6/32", "within", 8e6, "around"),
		}},
		policy.Table{Device: "gone", Rules: []policy.Rule{rule("10.0.0.5/32", "detached", 8e6, "")}})
	now := s.Read(2e9, livetest.Counted(map[string]live.Counts{
		"around": counts(500, 0), "refuses": refuses, "near": counts(990_000, 0), "less": counts(100, 10), "drops": counts(100, 9000), "within": counts(10, 5),
	}))
	now.Since(s.Read(1e9, livetest.Counted(nil)))
	now.Find(live.Key{Device: "gone", Direction: "ingress", Network: "10.0.0.5/32"}).Place.InForce = false
	if rows, _ := now.Rows(live.View{}); labels(rows) != "detached drops refuses less within near around idle" {
		t.Errorf("the order is %s", labels(rows))
	}
}

// A pool has lost what its rules lost, however deep; its part of the shares of an interval begins anew with each.
func TestPoolsLoseWhatRulesLose(t *testing.T) {
	tables := []policy.Table{
		{Rules: []policy.Rule{pool("top", ""), pool("home", "top")}},
		{Device: "eth0", Rules: []policy.Rule{rule("10.0.0.1/32", "a", 8e6, "home"), rule("10.0.0.2/32", "b", 8e6, "top"), rule("10.0.0.3/32", "c", 8e6, "")}},
	}
	s := livetest.Scene(tables...)
	first := s.Read(1e9, livetest.Counted(map[string]live.Counts{"a": counts(9, 9), "c": counts(9, 9)}))
	second := s.Read(2e9, livetest.Counted(map[string]live.Counts{"a": counts(9, 12), "b": counts(0, 5), "c": counts(9, 99)}))
	second.Since(first)
	tables[1].Rules = []policy.Rule{tables[1].Rules[1], rule("10.0.0.3/32", "c", 8e6, "top")} // a leaves, and c joins
	third := livetest.Scene(tables...).Read(3e9, livetest.Counted(map[string]live.Counts{"b": counts(0, 6), "c": counts(9, 199)}))
	third.Since(second)
	for _, want := range []struct {
		r                           *live.Reading
		pool                        string
		members, lost, droppedBytes uint64
	}{{first, "top", 9, 0, 0}, {second, "home", 12, 3, 3}, {second, "top", 17, 8, 8}, {third, "home", 0, 3, 0}, {third, "top", 205, 9, 1}} {
		it := want.r.Find(live.Key{Pool: want.pool})
		if bits := it.DroppedBits(); it.Members.DroppedPackets != want.members || it.LostPackets != want.lost || bits.N != float64(8*want.droppedBytes) {
			t.Errorf("%s at %d: its members lost %d, since the beginning %d, now %v bit/s; want %+v", want.pool, want.r.At, it.Members.DroppedPackets, it.LostPackets, bits, want)
		}
	}
}

// The shares of a pool are those of its own packets. What rules lost since another time is not shown beside what it passed.
func TestPoolOlderThanItsRules(t *testing.T) {
	of := func(passed, dropped uint64) live.Counts {
		return live.Counts{Counters: maps.Counters{PassedPackets: passed, DroppedPackets: dropped, ExcessPackets: dropped}}
	}
	s := livetest.Scene(policy.Table{Rules: []policy.Rule{pool("up", "")}}, policy.Table{Device: "eth0", Rules: []policy.Rule{rule("10.0.0.1/32", "a", 8e6, "up")}})
	for _, test := range []struct {
		pool, rule live.Counts
		same       bool
	}{{of(200, 600), of(200, 600), true}, {of(199, 597), of(200, 600), true}, {of(200, 600), of(1, 9), false}, {of(200, 600), of(0, 0), false}, {of(1, 3), of(200, 600), false}} {
		first := s.Read(1e9, livetest.Counted(map[string]live.Counts{"up": test.pool, "a": test.rule}))
		it := first.Find(live.Key{Pool: "up"})
		if it.RefusedPercent().N != 75 || it.ExcessPercent().N != 75 || it.SameBegin() != test.same || it.DroppedPercent().Known != test.same {
			t.Errorf("%+v: refused %v, excess %v, dropped %v", test, it.RefusedPercent(), it.ExcessPercent(), it.DroppedPercent())
		}
		test.pool.PassedPackets, test.pool.DroppedPackets = test.pool.PassedPackets+10, test.pool.DroppedPackets+30
		test.rule.PassedPackets, test.rule.DroppedPackets = test.rule.PassedPackets+10, test.rule.DroppedPackets+90 // 60 of them itself
		second := s.Read(2e9, livetest.Counted(map[string]live.Counts{"up": test.pool, "a": test.rule}))
		second.Since(first)
		if it := second.Find(live.Key{Pool: "up"}); it.RefusedPercent().N != 75 || it.DroppedPercent().N != 90 {
			t.Errorf("%+v over an interval: refused %v, dropped %v", test, it.RefusedPercent(), it.DroppedPercent())
		}
	}
}

// What is measured is not known of a rule that was set anew meanwhile.
func TestSetAnew(t *testing.T) {
	table := policy.Table{Device: "eth0", Rules: []policy.Rule{rule("10.0.0.1/32", "a", 8e6, "")}}
	s := livetest.Scene(table)
	before := s.Read(1e9, livetest.Counted(map[string]live.Counts{"a": counts(500_000, 25)}))
	now := s.Read(2e9, livetest.Counted(map[string]live.Counts{"a": counts(1_000_000, 125)}))
	now.Since(before)
	if it := &now.Items[0]; it.UseBits().N != 4e6 || it.UsePercent().N != 50 || it.DroppedPercent().N != 100 || it.Interval != 1e9 {
		t.Errorf("%v bit/s, %v %%, dropped %v %%", it.UseBits(), it.UsePercent(), it.DroppedPercent())
	}
	anew := s.Read(3e9, livetest.Counted(map[string]live.Counts{"a": counts(500_000, 25)}))
	anew.Since(now)
	if it := &anew.Items[0]; it.UseBits().Known || it.UsePercent().Known || it.DroppedPercent().Known {
		t.Errorf("after it was set anew: %v", it.UseBits())
	}
}

// A tree has the pools that match with all that is within them, and what matches with the pools above. A pool is a node
// unless one name has all its rules.
func TestTrees(t *testing.T) {
	r := inASecond(map[string]live.Counts{"bob": counts(1, 9)},
		policy.Table{Rules: []policy.Rule{pool("mast", ""), pool("alice's", "mast"), pool("bob's", "mast"), pool("empty", "")}},
		policy.Table{Device: "eth0", Rules: []policy.Rule{
			rule("10.0.0.1/32", "alice", 8e6, "alice's"), rule("10.0.0.2/32", "alice", 8e6, "alice's"), rule("10.0.0.3/32", "bob", 8e6, "bob's"), rule("10.0.0.4/32", "", 8e6, "mast"),
		}})
	for _, test := range []struct {
		view live.View
		want string
	}{
		{live.View{By: "tree"}, "mast >bob's >>bob >alice's >>alice >>alice >10.0.0.4/32 empty"},
		{live.View{By: "tree", Sort: "name", Top: 1}, "empty"},
		{live.View{By: "tree", Search: "bob"}, "mast >bob's >>bob"},
		{live.View{By: "tree", Under: "bob's"}, "bob's >bob"},
		{live.View{By: "node"}, "mast empty"},
		{live.View{By: "name"}, "bob alice 10.0.0.4/32"},
		{live.View{Name: "alice"}, "alice alice"},
	} {
		if rows, _ := r.Rows(test.view); labels(rows) != test.want {
			t.Errorf("%+v: %s, want %s", test.view, labels(rows), test.want)
		}
	}
}

// What limits all of a device is called as the device, and so are the pools that are its own.
func TestDevicesByName(t *testing.T) {
	own := pool("vm2 egress", "uplink")
	own.Label.Owner.Device = "vm2"
	r := inASecond(map[string]live.Counts{"::/0": counts(1, 9)},
		policy.Table{Rules: []policy.Rule{pool("line", ""), pool("uplink", ""), own}},
		policy.Table{Device: "eth0", Rules: []policy.Rule{rule("0.0.0.0/0", "", 8e6, "line")}},
		policy.Table{Device: "vm1", Rules: []policy.Rule{rule("0.0.0.0/0", "", 8e6, "uplink"), rule("10.0.0.0/8", "", policy.Unlimited, "")}},
		policy.Table{Device: "vm2", Rules: []policy.Rule{rule("0.0.0.0/0", "", 8e6, "vm2 egress"), rule("::/0", "", 8e6, "vm2 egress")}})
	for _, test := range []struct {
		view live.View
		want string
	}{
		{live.View{By: "name"}, "vm2 eth0 vm1 10.0.0.0/8"},
		{live.View{By: "node", Sort: "name"}, "line uplink"},
		{live.View{Name: "vm2"}, "::/0 0.0.0.0/0"},
	} {
		if rows, _ := r.Rows(test.view); labels(rows) != test.want {
			t.Errorf("%+v: %s, want %s", test.view, labels(rows), test.want)
		}
	}
	if s := r.Summary(nil); s.Named != 4 || s.Rules != 5 {
		t.Errorf("%+v", s)
	}
}

// Pools that are within each other, as a reader may see them during a change, end no reading.
func TestPoolsWithinEachOther(t *testing.T) {
	r := inASecond(map[string]live.Counts{"a": counts(1, 9)},
		policy.Table{Rules: []policy.Rule{pool("x", "y"), pool("y", "x")}}, policy.Table{Device: "eth0", Rules: []policy.Rule{rule("10.0.0.1/32", "a", 8e6, "x")}})
	if rows, _ := r.Rows(live.View{By: "tree"}); len(rows) != 3 {
		t.Errorf("the tree is %s", labels(rows))
	}
}

// Downloads and uploads that are egress of two devices are never added up: each side has its own limit.
func TestSides(t *testing.T) {
	r := inASecond(map[string]live.Counts{"10.0.0.1/32": counts(0, 0), "10.0.0.2/32": counts(950_000, 0), "10.0.0.3/32": counts(100_000, 0)},
		policy.Table{Rules: []policy.Rule{pool("down", "")}},
		policy.Table{Device: "lan", Rules: []policy.Rule{rule("10.0.0.2/32", "ann", policy.Unlimited, "down"), rule("10.0.0.4/32", "ben", 8e6, "")}},
		policy.Table{Device: "wan", Rules: []policy.Rule{rule("10.0.0.3/32", "ann", 80e6, "")}})
	rows, _ := r.Rows(live.View{By: "name", Top: 1})
	ann := &rows[0]
	if labels(rows) != "ann" || ann.Activity() != "near" || ann.OfRate != 95 || ann.Use != 8*1_050_000 {
		t.Fatalf("%s is %s with %v %% and %v bit/s", labels(rows), ann.Activity(), ann.OfRate, ann.Use)
	}
	for i, c := range live.SideColumns(rows) {
		want := []struct {
			head      string
			rate, use float64
		}{{"lan", 8e6, 8 * 950_000}, {"wan", 80e6, 8 * 100_000}}[i]
		if s := ann.Side(c); c.Head() != want.head || s.Rate.N != want.rate || ann.Done(s).UseBits.N != want.use {
			t.Errorf("%s has %v of %v", c.Head(), ann.Done(s).UseBits, s.Rate)
		}
	}
}
