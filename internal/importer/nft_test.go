package importer

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

func TestNFTRulesets(t *testing.T) {
	for _, test := range []struct{ name, device, golden string }{
		{"devices", "", "devices"},
		{"devices", "eth1", "devices-eth1"},
		{"totals", "", "totals"},
		{"plans", "", "plans"},
		{"plans", "eth1", "plans-eth1"},
	} {
		t.Run(test.golden, func(t *testing.T) {
			f, err := os.Open(filepath.Join("testdata", "nft", test.name+".json"))
			testenv.Must(t, err)
			defer f.Close()
			imported, err := NFT(test.name, f, test.device)
			testenv.Must(t, err)
			golden(t, "nft/"+test.golden+".golden", transcript(t, imported))
		})
	}
}

func document(objects ...string) string {
	return `{"nftables": [` + strings.Join(objects, ",\n") + "]}"
}

const (
	chainObject = `{"chain": {"family": "ip", "table": "t", "name": "c", "type": "filter", "hook": "forward", "prio": 0, "policy": "accept"}}`
	toHost      = `{"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}}, "right": "10.0.0.1"}}`
)

func ruleObject(statements ...string) string {
	return `{"rule": {"family": "ip", "table": "t", "chain": "c", "handle": 4, "expr": [` + strings.Join(statements, ", ") + `]}}`
}

// TestNFTLimits checks rates and bursts. A bucket of nft holds the burst and the bytes of one
// unit of time; a kbyte has 1024 bytes.
func TestNFTLimits(t *testing.T) {
	for _, test := range []struct {
		limit    string
		rate     policy.Rate
		capacity uint64
		kind     string // of what is left, "" for nothing
	}{
		{`"rate": 1, "burst": 0, "per": "second", "rate_unit": "mbytes", "burst_unit": "bytes"`, 8 << 20, 1 << 20, ""},
		{`"rate": 125000, "burst": 64, "per": "second", "rate_unit": "bytes", "burst_unit": "kbytes"`, 1e6, 125000 + 64<<10, ""},
		{`"rate": 60, "burst": 0, "per": "minute", "rate_unit": "kbytes"`, 8192, 61440, ""},
		{`"rate": 100, "per": "minute", "rate_unit": "kbytes"`, 13653, 102400, ""},
		{`"rate": 10, "per": "minute", "rate_unit": "mbytes"`, 1398101, 10 << 20, ""}, // off by less than 1 in 10^6
		{`"rate": 7, "per": "week", "rate_unit": "mbytes"`, 0, 0, outside.Kind},
		{`"rate": 1000, "per": "second", "rate_unit": "bytes"`, 8000, policy.MinCapacity, raised.Kind},
		{`"rate": 1, "per": "week", "rate_unit": "bytes"`, 0, 0, outside.Kind},
		{`"rate": 18446744073709551615, "per": "second", "rate_unit": "mbytes"`, 0, 0, outside.Kind},
		{`"rate": 10, "burst": 5, "per": "second"`, 0, 0, inPackets.Kind},
		{`"rate": 10, "burst": 5, "per": "second", "rate_unit": "packets"`, 0, 0, inPackets.Kind},
	} {
		text := document(chainObject, ruleObject(toHost, `{"limit": {`+test.limit+`, "inv": true}}`, `{"drop": null}`))
		i, err := NFT("f", strings.NewReader(text), "eth1")
		if err != nil {
			t.Errorf("%s: %v", test.limit, err)
			continue
		}
		var got policy.Rule
		if i.Rules() == 1 {
			got = i.Tables[0].Rules[0]
		}
		if got.Rate != test.rate || got.Capacity != test.capacity {
			t.Errorf("%s is %v, %d bytes; want %v, %d bytes", test.limit, got.Rate, got.Capacity, test.rate, test.capacity)
		}
		for _, l := range i.Left {
			if l.Kind == test.kind {
				test.kind = ""
			}
		}
		if test.kind != "" {
			t.Errorf("%s: %q is not left: %+v", test.limit, test.kind, i.Left)
		}
	}
}

// TestNFTConditions checks that rules with more conditions than an address are not imported.
func TestNFTConditions(t *testing.T) {
	const (
		over  = `{"limit": {"rate": 1, "per": "second", "rate_unit": "mbytes", "inv": true}}`
		under = `{"limit": {"rate": 1, "per": "second", "rate_unit": "mbytes"}}`
		drop  = `{"drop": null}`
		pass  = `{"accept": null}`
		from6 = `{"match": {"op": "==", "left": {"payload": {"protocol": "ip6", "field": "saddr"}}, "right": {"prefix": {"addr": "2001:db8::", "len": 32}}}}`
	)
	toNet := strings.Replace(toHost, `"10.0.0.1"`, `{"prefix": {"addr": "10.0.0.0", "len": 24}}`, 1)
	device := func(key, name string) string {
		return `{"match": {"op": "==", "left": {"meta": {"key": "` + key + `"}}, "right": "` + name + `"}}`
	}
	match := func(op, left, right string) string {
		return `{"match": {"op": "` + op + `", "left": ` + left + `, "right": ` + right + `}}`
	}
	protocol := func(name string) string { return match("==", `{"meta": {"key": "nfproto"}}`, `"`+name+`"`) }
	natChain := strings.Replace(chainObject, `"type": "filter"`, `"type": "nat"`, 1)
	set := `{"set": {"family": "ip", "table": "t", "name": "s", "flags": ["dynamic"], "elem": ["10.0.0.1"]}}`
	for _, test := range []struct {
		name    string
		objects []string
		rules   int
		kinds   []string
	}{
		{"nothing", []string{chainObject, ruleObject(toHost, over, drop)}, 1, nil},
		{"another chain", []string{natChain, ruleObject(toHost, over, drop)}, 0, []string{nftUnread.Kind}},
		{"a device that is not printed", []string{strings.Replace(chainObject, `"forward"`, `"ingress"`, 1), ruleObject(toHost, over, drop)}, 0, []string{nftNoPlace.Kind}},
		{"what comes after the limit", []string{chainObject, ruleObject(over, toHost, drop)}, 0, []string{narrower.Kind}},
		{"a second limit", []string{chainObject, ruleObject(toHost, over, over, drop)}, 0, []string{narrower.Kind}},
		{"a quota", []string{chainObject, ruleObject(toHost, `{"quota": {"val": 1}}`, over, drop)}, 0, []string{nftUnread.Kind, narrower.Kind}},
		{"an extension", []string{chainObject, ruleObject(toHost, `{"xt": null}`, over, drop)}, 0, []string{nftUnread.Kind, narrower.Kind}},
		{"one device", []string{chainObject, ruleObject(device("oifname", "eth7"), device("oifname", "eth7"), toHost, over, drop)}, 1, nil},
		{"two devices", []string{chainObject, ruleObject(device("oifname", "eth7"), device("oifname", "eth8"), toHost, over, drop)}, 0, []string{narrower.Kind}},
		{"a set that packets add to", []string{set, chainObject, ruleObject(strings.Replace(toHost, "10.0.0.1", "@s", 1), over, drop)}, 0, []string{narrower.Kind}},
		{"a set that counts after the limit", []string{set, chainObject, ruleObject(toHost, over, `{"set": {"op": "add", "set": "@s", "elem": {"payload": {"protocol": "ip", "field": "saddr"}}}}`, drop)}, 1, nil},
		{"a set that stays", []string{strings.Replace(set, "dynamic", "constant", 1), chainObject, ruleObject(strings.Replace(toHost, "10.0.0.1", "@s", 1), over, drop)}, 1, nil},
		{"an address of the other family", []string{chainObject, ruleObject(from6, over, drop)}, 0, nil},
		{"a family", []string{strings.Replace(chainObject, `"ip"`, `"inet"`, 1), strings.Replace(ruleObject(device("iifname", "eth7"), protocol("ipv6"), over, drop), `"ip"`, `"inet"`, 1)}, 1, nil},
		{"both families", []string{strings.Replace(chainObject, `"ip"`, `"inet"`, 1), strings.Replace(ruleObject(device("iifname", "eth7"), over, drop), `"ip"`, `"inet"`, 1)}, 2, nil},
		{"an address under a mask", []string{chainObject, ruleObject(match("==", `{"&": [{"payload": {"protocol": "ip", "field": "daddr"}}, "255.0.0.255"]}`, `"10.0.0.1"`), over, drop)}, 0, []string{narrower.Kind}},
		{"less than an address", []string{chainObject, ruleObject(match("<", `{"payload": {"protocol": "ip", "field": "daddr"}}`, `"10.0.0.1"`), over, drop)}, 0, []string{narrower.Kind}},

		{"the rest is dropped", []string{chainObject, ruleObject(toHost, under, pass), ruleObject(toHost, drop)}, 0, []string{nftAccepts.Kind}},
		{"the rest returns", []string{chainObject, ruleObject(toHost, under, `{"return": null}`), ruleObject(toHost, drop)}, 0, []string{nftAccepts.Kind}},
		{"conforming packets go on", []string{chainObject, ruleObject(toHost, over, drop), ruleObject(toNet, over, drop)}, 2, nil},
		{"conforming packets are dropped", []string{chainObject, ruleObject(toHost, under, drop)}, 0, []string{nftNoDrop.Kind}},
		{"excess packets are accepted", []string{chainObject, ruleObject(toHost, over, pass)}, 0, []string{nftNoDrop.Kind}},
		{"packets, for a log", []string{chainObject, ruleObject(toHost, `{"limit": {"rate": 1, "per": "minute"}}`, `{"log": null}`)}, 0, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			i, err := NFT("f", strings.NewReader(document(test.objects...)), "eth1")
			testenv.Must(t, err)
			var kinds []string
			for _, l := range i.Left {
				kinds = append(kinds, l.Kind)
			}
			if !slices.Equal(kinds, test.kinds) {
				t.Errorf("left: %q, not %q", kinds, test.kinds)
			}
			if i.Rules() != test.rules {
				t.Errorf("%d rules, not %d: %+v", i.Rules(), test.rules, i.Tables)
			}
		})
	}
}

// TestNFTLabels makes names of comments, and cuts those that are too long.
func TestNFTLabels(t *testing.T) {
	comment := strings.Repeat("n", policy.MaxName+1)
	named := func(rule, comment string) string {
		return strings.Replace(rule, `"handle": 4`, `"handle": 4, "comment": "`+comment+`"`, 1)
	}
	limit := ruleObject(toHost, `{"limit": {"rate": 1, "per": "second", "rate_unit": "mbytes", "inv": true}}`, `{"drop": null}`)
	jump := ruleObject(`{"jump": {"target": "d"}}`)
	i, err := NFT("f", strings.NewReader(document(chainObject, `{"chain": {"family": "ip", "table": "t", "name": "d"}}`,
		named(strings.Replace(limit, `"chain": "c"`, `"chain": "d"`, 1), comment), jump, jump,
		named(strings.Replace(limit, "10.0.0.1", "10.0.0.2", 1), "bob"),
		strings.Replace(limit, "10.0.0.1", "10.0.0.3", 1))), "eth1")
	testenv.Must(t, err)
	want := map[string]policy.Label{"10.0.0.1/32": {Name: comment[1:]}, "10.0.0.2/32": {Name: "bob"}, "10.0.0.3/32": {Note: "t c handle 4"}}
	for _, r := range i.Tables[0].Rules {
		if label := want[r.Prefix.String()]; r.Label != label {
			t.Errorf("%v: %+v, want %+v", r.Prefix, r.Label, label)
		}
	}
	if i.Rules() != 3 || len(i.Left) > 0 {
		t.Errorf("%d rules, left: %+v", i.Rules(), i.Left)
	}
}

// TestNFTRefuses checks that mistakes are reported by rule, or by line and column.
func TestNFTRefuses(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"nothing", "", "f:1:1: the text ends within an object"},
		{"text", "table inet filter {\n}", "f:1:2: this is not JSON"},
		{"cut off", "{\"nftables\": [\n{\"table\"", "f:2:8: the text ends within an object"},
		{"another document", `{"rules": []}`, "there is no list called nftables; use the output of 'nft -j list ruleset'"},
		{"a list", `[1, 2]`, "there is no list called nftables"},
		{"a rule without its chain", document(`{"metainfo": {}}`, ruleObject(toHost)), "table ip t chain c handle 4: the chain does not come before the rule"},
		{"an object of another shape", document(chainObject, `{"rule": 7}`), "the chain does not come before the rule"},
		{"a limit that is not there", document(chainObject, ruleObject(`{"limit": "gold"}`, `{"drop": null}`)), `table ip t chain c handle 4: there is no limit "gold"`},
		{"a set that is not there", document(chainObject, ruleObject(strings.Replace(toHost, "10.0.0.1", "@gold", 1))), "table ip t chain c handle 4: there is no set gold"},
		{"an unknown unit", document(chainObject, ruleObject(`{"limit": {"rate": 1, "per": "month", "rate_unit": "bytes", "inv": true}}`, `{"drop": null}`)), "has an unknown unit"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := NFT("f", strings.NewReader(test.text), "eth1")
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("the error is %v; want %s", err, test.want)
			}
		})
	}
}

// TestNFTJumps has chains with exponentially many paths.
func TestNFTJumps(t *testing.T) {
	objects := []string{chainObject}
	for i := range 15 {
		objects = append(objects, fmt.Sprintf(`{"chain": {"family": "ip", "table": "t", "name": "c%d"}}`, i))
	}
	jumps := func(from, to string) string {
		jump := fmt.Sprintf(`{"rule": {"family": "ip", "table": "t", "chain": "%s", "handle": 9, "expr": [{"jump": {"target": "%s"}}]}}`, from, to)
		return strings.Join([]string{jump, jump, jump}, ",")
	}
	objects = append(objects, jumps("c", "c0"))
	for i := range 14 {
		objects = append(objects, jumps(fmt.Sprintf("c%d", i), fmt.Sprintf("c%d", i+1)))
	}
	_, err := NFT("f", strings.NewReader(document(objects...)), "eth1")
	if err == nil || !strings.Contains(err.Error(), "more often than can be followed") {
		t.Errorf("the error is %v", err)
	}
}

// TestRanged checks that the networks of a range are the fewest with exactly its addresses.
func TestRanged(t *testing.T) {
	for _, test := range []struct{ first, last, want string }{
		{"10.0.0.0", "10.0.0.255", "10.0.0.0/24"},
		{"10.0.0.7", "10.0.0.7", "10.0.0.7/32"},
		{"10.0.0.5", "10.0.0.10", "10.0.0.5/32 10.0.0.6/31 10.0.0.8/31 10.0.0.10/32"},
		{"0.0.0.0", "255.255.255.255", "0.0.0.0/0"},
		{"0.0.0.1", "255.255.255.255", ""},
		{"2001:db8::", "2001:db8:0:1:ffff:ffff:ffff:ffff", "2001:db8::/63"},
		{"ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe/127"},
		{"10.0.0.2", "10.0.0.1", ""},
	} {
		first, last := netip.MustParseAddr(test.first), netip.MustParseAddr(test.last)
		all := ranged(first, last)
		if test.want != "" && strings.Trim(fmt.Sprint(all), "[]") != test.want {
			t.Errorf("%s-%s is %v; want %s", test.first, test.last, all, test.want)
		}
		next := first
		for _, p := range all {
			if p.Addr() != next || p != p.Masked() {
				t.Errorf("%s-%s: %v does not begin at %v", test.first, test.last, p, next)
			}
			next = policy.Last(p).Next()
		}
		if len(all) > 0 && next != last.Next() {
			t.Errorf("%s-%s ends before %v", test.first, test.last, next)
		}
	}
}
