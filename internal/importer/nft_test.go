package importer

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// What nft printed of each ruleset makes the policy that it did.
func TestNFTOfRulesets(t *testing.T) {
	for _, test := range []struct{ name, device, golden string }{
		{"devices", "", "devices"},
		{"devices", "eth1", "devices-eth1"},
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

// A bucket of nft holds what passes in a whole unit of time, and the burst; kbytes are 1024.
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
		{`"rate": 100, "per": "minute", "rate_unit": "kbytes"`, 13653, 102400, nftRounded.kind},
		{`"rate": 10, "per": "minute", "rate_unit": "mbytes"`, 1398101, 10 << 20, ""}, // off by less than 1 in 10^6
		{`"rate": 7, "per": "week", "rate_unit": "mbytes"`, 97, 7 << 20, nftRounded.kind},
		{`"rate": 1000, "per": "second", "rate_unit": "bytes"`, 8000, policy.MinCapacity, raised.kind},
		{`"rate": 1, "per": "week", "rate_unit": "bytes"`, 0, 0, outside.kind},
		{`"rate": 18446744073709551615, "per": "second", "rate_unit": "mbytes"`, 0, 0, outside.kind},
		{`"rate": 10, "burst": 5, "per": "second"`, 0, 0, nftPackets.kind},
		{`"rate": 10, "burst": 5, "per": "second", "rate_unit": "packets"`, 0, 0, nftPackets.kind},
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

// What can not be read is told by line and column.
func TestNFTRefuses(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"nothing", "", "f:1:1: this is not JSON"},
		{"text", "table inet filter {\n}", "f:1:2: this is not JSON"},
		{"cut off", "{\"nftables\": [\n{\"table\"", "f:2:8: this is not JSON"},
		{"another document", `{"rules": []}`, "f:1:1: there is no list called nftables; give what 'nft -j list ruleset' prints"},
		{"a list", `[1, 2]`, "where nft has none"},
		{"a rule without its chain", document(`{"metainfo": {}}`, ruleObject(toHost)), "f:2:1: rule 4 is in chain c"},
		{"an object of another shape", document(chainObject, `{"rule": 7}`), "f:2:1: an object is not as nft writes it"},
		{"a negative rate", document(chainObject, ruleObject(`{"limit": {"rate": -1, "per": "second"}}`, `{"drop": null}`)), "f:2:1: "},
		{"a limit that is not there", document(chainObject, ruleObject(`{"limit": "gold"}`, `{"drop": null}`)), `f:2:1: table ip t chain c handle 4: there is no limit "gold"`},
		{"a set that is not there", document(chainObject, ruleObject(strings.Replace(toHost, "10.0.0.1", "@gold", 1))), "f:2:1: table ip t chain c handle 4: there is no set gold"},
		{"an unknown unit", document(chainObject, ruleObject(`{"limit": {"rate": 1, "per": "month", "rate_unit": "bytes", "inv": true}}`, `{"drop": null}`)), "unit that is not known"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := NFT("f", strings.NewReader(test.text), "eth1")
			var errs policyfile.Errors
			if !errors.As(err, &errs) || len(errs) == 0 {
				t.Fatalf("the error is %v", err)
			}
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("the error is %v; want %s", err, test.want)
			}
		})
	}
}

// Chains that jump to each other more and more often end, too.
func TestNFTEnds(t *testing.T) {
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

// A range is the fewest networks that hold just its addresses.
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
			next = lastOf(p).Next()
		}
		if len(all) > 0 && next != last.Next() {
			t.Errorf("%s-%s ends before %v", test.first, test.last, next)
		}
	}
}
