package main

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// labelled is what there is of each rule, but for its counters.
func (r *rig) labelled() (rules []string) {
	r.t.Helper()
	for _, rule := range r.show() {
		rules = append(rules, fmt.Sprintf("%s %s %s %s/%s/%s %d %d", rule.Device, rule.Direction, rule.CIDR,
			rule.Name, rule.Plan, rule.Note, rule.Rate/1e6, rule.Capacity))
	}
	return rules
}

// The pool of rules may go with a pending change that reverts meanwhile.
func TestSetRulesOfDeletedPool(t *testing.T) {
	r := newRig(t)
	n, err := loader.Read(loader.Options{BPFFS: r.bpffs()})
	testenv.Must(t, err)
	defer n.Close()
	limit := limitGiven(t, "--rate 1mbit")
	rules := []namedHook{{n.Pools(), []maps.Entry{{Rule: policy.Rule{Rate: policy.Unlimited, Within: "up"}}}}}
	_, err = new(env).setOwnPools(n, target{name: "alice"}, rules, *limit)
	if err == nil || err.Error() != "pool up was just deleted; nothing was changed; see 'shapectl show alice'" {
		t.Error(err)
	}
}

// limitGiven is what flags say.
func limitGiven(t *testing.T, flags string) *limitFlags {
	var limit limitFlags
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	limit.add(f, "", func(*policy.Option) bool { return true })
	testenv.Must(t, f.Parse(strings.Fields(flags)))
	limit.mark(f)
	return &limit
}

// Options that have no use beside the given ones are not kept. The others are.
func TestKeptOptions(t *testing.T) {
	for _, c := range []struct{ have, given, want string }{
		{"--capacity 64kb --fail closed", "--rate 50mbit", "rate 10mbit -> 50mbit, capacity 64kb -> 320kb"},
		{"--excess delay --queue 20ms --each host", "--excess drop", "excess delay -> drop, queue 25000b -> none"},
		{"--excess delay --queue 20ms", "--rate 20mbit", "rate 10mbit -> 20mbit, queue 25000b -> 50000b"},
		{"--capacity 64kb --shadow rate=5mbit --fail closed", "--rate unlimited", "rate 10mbit -> unlimited"},
		{"--shadow rate=5mbit", "--shadow none", "shadow rate=5mbit -> none"},
		{"--overhead ethernet", "--name bob --note=", "name alice -> bob"},
		{"--algorithm leaky --penalty fill", "--algorithm gcra", "algorithm leaky -> gcra, penalty fill -> none"},
		{"--within up --guarantee 1mbit --excess delay --queue 20ms --ecn-above never", "--rate 20mbit", "rate 10mbit -> 20mbit, queue 25000b -> 50000b"},
	} {
		have, err := limitGiven(t, "--rate 10mbit --name alice "+c.have).Rule(netip.MustParsePrefix("10.0.0.0/24"))
		testenv.Must(t, err)
		have = have.On(14)
		given := limitGiven(t, c.given)
		got, err := given.over(&have, 14)
		testenv.Must(t, err)
		var changes []string
		for _, change := range policy.Changes(&have, &got) {
			changes = append(changes, change.String())
		}
		if got := strings.Join(changes, ", "); got != c.want {
			t.Errorf("%s, then %s: %s, not %s", c.have, c.given, got, c.want)
		}
	}
}
