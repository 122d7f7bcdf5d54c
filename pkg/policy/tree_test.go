package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// forest returns tables of pools and rules. Each is written such as "ap-1: within=uplink guarantee=2mbit"; one whose
// name is a network is a rule on eth0.
func forest(t *testing.T, lines ...string) []Table {
	t.Helper()
	tables := []Table{{}, {Device: "eth0", Direction: Egress, Match: MatchDst}}
	for _, line := range lines {
		at := strings.LastIndex(line, ":")
		name, options := line[:at], line[at+1:]
		l := limitOf(t, strings.Fields(options))
		if prefix, err := ParsePrefix(name); err == nil {
			r, err := l.Rule(prefix)
			if err != nil {
				t.Fatal(line, err)
			}
			tables[1].Rules = append(tables[1].Rules, r)
			continue
		}
		r, err := l.Pool(name)
		if err != nil {
			t.Fatal(line, err)
		}
		tables[0].Rules = append(tables[0].Rules, r)
	}
	return tables
}

func TestTree(t *testing.T) {
	tables := forest(t, "ap-1: within=site guarantee=3mbit", "site: within=uplink", "uplink: rate=20mbit", "other:",
		"10.0.0.1: within=ap-1 guarantee=1mbit", "10.0.0.0/24: each=host within=ap-1 guarantee=10kbit members=50", "10.0.1.0/24: within=site guarantee=2mbit", "10.0.2.0/24:")
	tree := NewTree(tables)
	if problems := tree.Problems(); len(problems) > 0 {
		t.Fatal(problems)
	}
	var chain []string
	for n := tree.Find("ap-1"); n != nil; n = n.Above {
		below := make([]string, len(n.Below))
		for i, b := range n.Below {
			below[i] = b.Pool.Label.Name
		}
		chain = append(chain, fmt.Sprint(n.Pool.Label.Name, " ", n.Depth, " ", n.Members, " ", len(n.Rules), " ", below))
	}
	// The guarantee of ap-1 counts in site, instead of those within ap-1.
	want := []string{"ap-1 2 1.5mbit 2 []", "site 1 5mbit 1 [ap-1]", "uplink 0 5mbit 0 [site]"}
	if !slices.Equal(chain, want) {
		t.Errorf("got %v, want %v", chain, want)
	}
	if m := tree.Find("site").Rules[0]; m.Table != &tables[1] || m.Rule != &tables[1].Rules[2] {
		t.Errorf("site has the rule %+v", m.Rule)
	}
	if len(tree.Nodes) != 4 || tree.Nodes[1] != tree.Find("other") || tree.Find("none") != nil || tree.Find("") != nil {
		t.Errorf("the tree has %d pools", len(tree.Nodes))
	}
}

func TestCheckPools(t *testing.T) {
	chain := []string{"p0:"}
	for i := 1; i < MaxDepth; i++ {
		chain = append(chain, fmt.Sprintf("p%d: within=p%d", i, i-1))
	}
	chain = append(chain, "10.0.0.1: within=p15 guarantee=8mbit")
	const most = "more than 1000000tbit"
	for _, test := range []struct {
		lines []string
		want  []string
	}{
		{nil, nil},
		{chain, nil},
		{[]string{"a:", "10.0.0.1: within=a guarantee=3mbit", "10.0.0.2: within=a guarantee=5mbit"}, nil},
		{[]string{"10.0.0.1: within=ap", "a: within=b"}, []string{
			`pool "a": within "b": there is no such pool; make it first, or name another one`,
			`eth0 egress 10.0.0.1/32: within "ap": there is no such pool; make it first, or name another one`}},
		{append(chain, "p17: within=p16", "p16: within=p15"), []string{
			`pool "p16": within "p15" makes a chain of 17 pools, and at most 16 are allowed; leave some of them out`}},
		{[]string{"x: within=a", "a: within=b&", "b&: within=c", "c: within=a", "d: within=e", "e: within=d", "10.0.0.1: within=x guarantee=8mbit"}, []string{
			`pool "a": within "b&" makes a cycle: a within "b&" within c within a; take one of them out`,
			`pool "d": within "e" makes a cycle: d within e within d; take one of them out`}},
		{[]string{"a:", "10.0.0.1: within=a guarantee=3mbit", "10.0.0.2: within=a guarantee=5.001mbit"}, []string{
			`pool "a": rate 8mbit is less than the guarantees within the pool, which add up to 8.001mbit; raise it, or lower them`}},
		{[]string{"a:", "10.0.0.0/24: within=a guarantee=1mbit each=host members=9"}, []string{
			`pool "a": rate 8mbit is less than the guarantees within the pool, which add up to 9mbit; raise it, or lower them`}},
		// What is within b is the promise of b. What is within c is that of a, because c has no guarantee.
		{[]string{"a:", "b: within=a guarantee=2mbit", "c: within=a", "10.0.0.1: within=b guarantee=3mbit", "10.0.0.2: within=c guarantee=7mbit"}, []string{
			`pool "a": rate 8mbit is less than the guarantees within the pool, which add up to 9mbit; raise it, or lower them`,
			`pool "b": guarantee 2mbit is less than the guarantees within the pool, which add up to 3mbit; raise it, or lower them`}},
		// A guarantee would pass the lease. That of a pool with a cluster does not.
		{[]string{"up:", "a: within=up cluster=gold guarantee=1mbit", "b: within=a cluster=silver", "10.0.0.1: within=b"}, nil},
		{[]string{"a: cluster=gold", "b: within=a guarantee=1mbit", "c: within=a", "10.0.0.1: within=c guarantee=2mbit"}, []string{
			`pool "b": guarantee 1mbit is within pool a, whose rate depends on other hosts; leave it out, or give the pool no cluster`,
			`eth0 egress 10.0.0.1/32: guarantee 2mbit is within pool a, whose rate depends on other hosts; leave it out, or give the pool no cluster`}},
		{[]string{"b: cluster=gold", "a b: cluster=gold"}, []string{
			`pool "b": cluster "gold" is that of pool "a b", too, and has one pool on each host; put one of them within the other`}},
		{[]string{"a: rate=400gbit", "0.0.0.0/0: rate=400gbit within=a guarantee=400gbit each=host members=4294967295", "::/0: rate=400gbit within=a guarantee=400gbit each=host members=4294967295"}, []string{
			`pool "a": rate 400gbit is less than the guarantees within the pool, which add up to ` + most + `; raise it, or lower them`}},
		{[]string{"a: rate=400gbit", "0.0.0.0/0: rate=400gbit within=a guarantee=10gbit each=host members=1800000000", "::/0: rate=400gbit within=a guarantee=10gbit each=host members=1800000000"}, []string{
			`pool "a": rate 400gbit is less than the guarantees within the pool, which add up to ` + most + `; raise it, or lower them`}},
	} {
		tables := forest(t, test.lines...)
		var got []string
		for _, p := range NewTree(tables).Problems() {
			got = append(got, p.Error())
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%q:\n got %q\nwant %q", test.lines, got, test.want)
		}
		if err := CheckPools(tables); (err == nil) != (len(test.want) == 0) || err != nil && err.Error() != test.want[0] {
			t.Errorf("%q: %v", test.lines, err)
		}
	}
}

// BenchmarkCheckPools checks a million rules, none or all of which are in one of a thousand pools.
func BenchmarkCheckPools(b *testing.B) {
	for _, within := range []bool{false, true} {
		tables := []Table{{}, {Device: "eth0"}}
		for i := range 1000 {
			tables[0].Rules = append(tables[0].Rules, poolOf(fmt.Sprint("p", i), func(r *Rule) {
				if i > 0 {
					r.Within = Within(fmt.Sprint("p", (i-1)/2))
				}
			}))
		}
		for i := range 1_000_000 {
			r := Rule{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 32), Rate: 1e6}
			if within {
				r.Within = Within(fmt.Sprint("p", i%1000))
			}
			tables[1].Rules = append(tables[1].Rules, r)
		}
		b.Run(fmt.Sprintf("within=%v", within), func(b *testing.B) {
			for b.Loop() {
				if err := CheckPools(tables); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
