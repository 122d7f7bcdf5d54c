package report

import (
	"io"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// shownPool is a pool as show has it.
func shownPool(name string, within policy.Within, guarantee policy.Guarantee, passedBytes, guaranteedBytes uint64) Rule {
	r := policy.Rule{Pool: true, Prefix: policy.PoolKey(name), Rate: 1e8, Within: within, Guarantee: guarantee, Label: policy.Label{Name: name}}
	return asRead(policy.Table{Rules: []policy.Rule{r}}, live.Item{Counts: live.Counts{
		Counters:        maps.Counters{PassedPackets: passedBytes / 1000, PassedBytes: passedBytes, DroppedPackets: 1},
		GuaranteedBytes: guaranteedBytes, Members: live.Loss{MatchedPackets: passedBytes/1000 + 4, DroppedPackets: 4, DroppedBytes: 4000},
	}})
}

func pooled() Rules {
	within := func(pool policy.Within) func(*policy.Rule) { return func(r *policy.Rule) { r.Within = pool } }
	alice := remade(shown("eth0", policy.Egress, "10.0.0.7/32", 2e7, within("ap-1")), func(it *live.Item) { it.Label.Name = "alice" })
	return Rules{
		shown("eth0", policy.Egress, "10.0.0.9/32", 1e6, nil),
		alice,
		shown("eth0", policy.Egress, "2001:db8:7::/48", policy.Unlimited, within("ap-1")),
		shown("eth0", policy.Ingress, "10.0.0.7/32", 1e6, within("uplink")),
		shownPool("uplink", "", 0, 3_000_000_000, 0),
		shownPool("ap-10", "uplink", 0, 0, 0),
		shownPool("ap-1", "uplink", 2e7, 1_000_000, 600_000),
	}
}

// inView are the rules and pools of a view.
func inView(rules Rules, v live.View) (out Rules, rows []live.Row) {
	rows, _ = readingOf(rules).Rows(v)
	for _, r := range rows {
		out = append(out, NewRule(r.Item))
	}
	return out, rows
}

// Pools have a table of their own, before that of the rules.
func TestPoolTable(t *testing.T) {
	all, _ := inView(pooled(), live.View{Sort: "device"})
	same(t, "a table", text(t, Table{Rules: all, Of: len(all), Width: 80}.Text), `
POOL    WITHIN     RATE  GUARANTEE   PASSED  BORROWED  DROPPED  REFUSED
ap-1    uplink  100mbit     20mbit  1.00 MB    400 kB     0.4%     0.1%
ap-10   uplink  100mbit                   0               100%     100%
uplink          100mbit             3.00 GB                 0%       0%

NAME   DEVICE        NETWORK          WITHIN          RATE
       eth0 egress   10.0.0.9                        1mbit
alice  eth0 egress   10.0.0.7         ap-1          20mbit
       eth0 egress   2001:db8:7::/48  ap-1    100mbit/pool
       eth0 ingress  10.0.0.7         uplink         1mbit
`)
	same(t, "one pool", text(t, Table{Rules: all[:1], Of: 3, Width: 80}.Text), `
POOL  WITHIN     RATE  GUARANTEE   PASSED  BORROWED  DROPPED  REFUSED
ap-1  uplink  100mbit     20mbit  1.00 MB    400 kB     0.4%     0.1%
1 of 3 pools
`)
}

// Drops since another time than that of the passed packets are shown nowhere.
func TestOlderPool(t *testing.T) {
	pool := remade(shownPool("up", "", 0, 3_000_000, 0), func(it *live.Item) { it.Members.MatchedPackets = 1000 })
	for _, wide := range []bool{false, true} {
		if got := text(t, Table{Rules: Rules{pool}, Of: 1, Width: 200, Wide: wide}.Text); strings.Contains(got, "DROP") || !strings.Contains(got, "REFUSED") {
			t.Errorf("got\n%s", got)
		}
	}
	if got := text(t, pool.Detail); strings.Contains(got, "dropped  ") {
		t.Errorf("got\n%s", got)
	}
}

// Below each pool comes what is within it.
func TestTree(t *testing.T) {
	tree := func(r *live.Reading, v live.View, wide bool, width int) string {
		v.By = "tree"
		rows, of := r.Rows(v)
		var rules Rules
		for _, r := range rows {
			rules = append(rules, NewRule(r.Item))
		}
		return text(t, func(w io.Writer) error { return Tree(w, rows, rules, of, wide, width) })
	}
	all := readingOf(pooled())
	same(t, "a tree", tree(all, live.View{Sort: "device"}, false, 100), `
POOL OR RULE         DEVICE        NETWORK      RATE  GUARANTEE   PASSED  BORROWED  DROPPED  REFUSED
uplink                                       100mbit             3.00 GB                 0%       0%
  ap-1                                       100mbit     20mbit  1.00 MB    400 kB     0.4%     0.1%
    alice            eth0 egress   10.0.0.7   20mbit                   0
    2001:db8:7::/48  eth0 egress             as pool                   0
  ap-10                                      100mbit                   0               100%     100%
  10.0.0.7           eth0 ingress              1mbit                   0
10.0.0.9             eth0 egress               1mbit                   0
`)
	head, _, _ := strings.Cut(tree(all, live.View{Sort: "device"}, true, 80), "\n")
	same(t, "columns of a wide tree", strings.Join(strings.Fields(head), " "),
		"POOL OR RULE DEVICE NETWORK RATE ON EXCESS ALGORITHM BURST GUARANTEE PACKETS PASSED DROPS DROPPED REFUSED BORROWED")
	same(t, "the first in each pool", tree(all, live.View{Sort: "passed", Top: 1}, false, 100), `
POOL OR RULE  DEVICE       NETWORK      RATE  GUARANTEE   PASSED  BORROWED  DROPPED  REFUSED
uplink                               100mbit             3.00 GB                 0%       0%
  ap-1                               100mbit     20mbit  1.00 MB    400 kB     0.4%     0.1%
    alice     eth0 egress  10.0.0.7   20mbit                   0
3 of 7 limits
`)
	if got := tree(busyFor1s(all), live.View{Sort: "device"}, false, 110); !strings.Contains(got, " 20mbit  8.00mbit     8.0%  3.20mbit") {
		t.Errorf("measured:\n%s", got)
	}
}

// subscribers are named rules with long names in pools, on devices.
func subscribers(devices ...string) (rules Rules) {
	for _, device := range devices {
		for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
			r := shown(device, d, "2001:db8:2::/56", 2e7, func(r *policy.Rule) {
				r.Within, r.Guarantee, r.Label.Name, r.Label.Plan = "Mast Oak Hill north", 5e6, "School Oak Hill, 3rd floor", "gold-100"
			})
			rules = append(rules, passed(r, 3000, 3_000_000, 0))
		}
	}
	return append(rules, shownPool("Mast Oak Hill north", "", 0, 3_000_000_000, 0))
}

// A narrow screen leaves out what is the same everywhere, and then columns, before it cuts names to less than 20 columns.
func TestNarrow(t *testing.T) {
	_, one := subscribers("eth0").Split()
	table := Table{Rules: one, Of: len(one), Width: 80}
	same(t, "one device", text(t, table.Text), `
NAME                        DEVICE        NETWORK            RATE   PASSED
School Oak Hill, 3rd floor  eth0 egress   2001:db8:2::/56  20mbit  3.00 MB
School Oak Hill, 3rd floor  eth0 ingress  2001:db8:2::/56  20mbit  3.00 MB
not shown in 80 columns: PLAN, GUARANTEE, WITHIN
`)
	_, two := subscribers("eth0", "eth1").Split()
	two = Rules{two[0], two[3]}
	table = Table{Rules: two, Of: len(two), Width: 60}
	if got := text(t, table.Text); !strings.Contains(got, "eth1 ingress") {
		t.Errorf("rules with one name and network cannot be told apart:\n%s", got)
	}
	two[0] = remade(two[0], func(it *live.Item) { it.Label.Name = "Mill Lane" })
	same(t, "two devices", text(t, table.Text), `
NAME                  DEVICE        NETWORK            RATE   PASSED
Mill Lane             eth0 egress   2001:db8:2::/56  20mbit  3.00 MB
School Oa...rd floor  eth1 ingress  2001:db8:2::/56  20mbit  3.00 MB
not shown in 60 columns: PLAN, GUARANTEE, WITHIN
`)
	two[0] = remade(two[0], func(it *live.Item) { it.Label.Name = "" })
	if got := text(t, table.Text); !strings.Contains(got, "DEVICE") {
		t.Errorf("without the name of a rule, its device is not shown:\n%s", got)
	}
	if got := text(t, Table{Rules: one, Of: len(one), Width: 80, Wide: true}.Text); !strings.Contains(got, "GUARANTEE") {
		t.Errorf("a wide table:\n%s", got)
	}
	all, rows := inView(subscribers("eth0"), live.View{By: "tree"})
	same(t, "a tree", text(t, func(w io.Writer) error { return Tree(w, rows, all, len(all), false, 70) }), `
POOL OR RULE           DEVICE        NETWORK             RATE   PASSED
Mast Oak Hill north                                   100mbit  3.00 GB
  School ...3rd floor  eth0 egress   2001:db8:2::/56   20mbit  3.00 MB
  School ...3rd floor  eth0 ingress  2001:db8:2::/56   20mbit  3.00 MB
not shown in 70 columns: BORROWED, GUARANTEE
`)
}

// What is within no pool borrows nothing, and without a guarantee everything is borrowed.
func TestBorrowed(t *testing.T) {
	for _, test := range []struct {
		pool                 Rule
		guaranteed, borrowed uint64
	}{
		{shownPool("a", "", 0, 5000, 0), 0, 0},
		{shownPool("a", "b", 0, 5000, 0), 0, 5000},
		{shownPool("a", "b", 1e6, 5000, 2000), 2000, 3000},
		{shownPool("a", "b", 1e6, 5000, 6000), 6000, 0}, // read a moment later
	} {
		if figure := func(key string) any { return live.Figured(key).Of(test.pool.Item) }; figure("guaranteed_bytes") != test.guaranteed || figure("borrowed_bytes") != test.borrowed {
			t.Errorf("%+v", test.pool)
		}
	}
}

// Sentences are folded at spaces.
func TestSentencesFolded(t *testing.T) {
	all := Rules{shown("eth0", policy.Egress, "10.0.0.9/32", 1e6, nil)}
	same(t, "a line", text(t, func(w io.Writer) error { return all.Sentences(w, 0) }),
		"eth0 egress: 10.0.0.9 gets 1mbit (125 kB/s), burst 131.1 kB (1.049 s); excess is dropped (gcra)\n")
	same(t, "a narrow screen", text(t, func(w io.Writer) error { return all.Sentences(w, 50) }), `
eth0 egress: 10.0.0.9 gets 1mbit (125 kB/s), burst
    131.1 kB (1.049 s); excess is dropped (gcra)
`)
}

// A tree that is printed once has rows that do something, and the pools above them.
func TestTopTreeOnce(t *testing.T) {
	within := func(pool policy.Within) func(*policy.Rule) { return func(r *policy.Rule) { r.Within = pool } }
	pool := func(name string, within policy.Within) Rule {
		return asRead(policy.Table{Rules: []policy.Rule{{Pool: true, Prefix: policy.PoolKey(name), Rate: 1e8, Within: within, Label: policy.Label{Name: name}}}}, live.Item{})
	}
	r := busyFor1s(readingOf(Rules{
		pool("uplink", ""), pool("mast", "uplink"), pool("idle", "uplink"),
		shown("eth0", policy.Egress, "10.0.0.1/32", 1e6, within("idle")),
		passed(shown("eth0", policy.Egress, "10.0.0.2/32", 1e6, within("mast")), 0, 0, 9),
		shown("eth0", policy.Egress, "10.0.0.3/32", 1e6, within("mast")),
		shown("eth0", policy.Egress, "10.0.0.4/32", 1e6, nil),
	}))
	same(t, "a tree", text(t, func(w io.Writer) error { return TopText(w, r, live.View{By: "tree"}, 80) }), `
  POOL OR RULE                 RATE       USE  OF RATE     DROPS  DROPPED  LEVEL
  uplink                    100mbit         0       0%  72.0kbit     100%
    mast                    100mbit         0       0%  72.0kbit     100%
 !    eth0 egress 10.0.0.2    1mbit         0       0%  72.0kbit     100%     0%
3 of 7; 4 idle ones are left out
`)
}
