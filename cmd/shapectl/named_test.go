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

// Options that have no use beside the given ones are not kept. The others are; a burst and a queue last as long as before.
func TestKeptOptions(t *testing.T) {
	const trtcm = "--rate 10mbit --algorithm trtcm --pir 20mbit --pbs 1000000 --colour-aware --colours CS1=red"
	const sparse = "--rate 10mbit --within up --guarantee 1mbit --excess delay --ecn-above never"
	for _, test := range []struct{ have, flags, want string }{
		{"--rate 10mbit --capacity 64kb --fail closed", "--rate 50mbit", "--rate 50mbit --capacity 320kb --fail closed"},
		{"--rate 10mbit --excess delay --queue 20ms --each host", "--excess drop", "--rate 10mbit --each host"},
		{"--rate 10mbit --excess delay --queue 20ms", "--rate 20mbit", "--rate 20mbit --excess delay --queue 50000"},
		{"--rate 10mbit --capacity 64kb --shadow rate=5mbit --fail closed", "--rate unlimited", "--rate unlimited --shadow rate=5mbit --fail closed"},
		{"--rate 10mbit --shadow rate=5mbit", "--shadow none", "--rate 10mbit"},
		{"--rate 10mbit --overhead ethernet --name alice", "--name bob --note=", "--rate 10mbit --overhead ethernet --name bob"},
		{"--rate 10mbit --algorithm leaky --penalty fill", "--algorithm gcra", "--rate 10mbit"},
		{sparse + " --queue 20ms", "--rate 20mbit", strings.Replace(sparse, "10mbit", "20mbit", 1) + " --queue 50000"},
		{trtcm, "--pir 40mbit", strings.Replace(trtcm, "20mbit", "40mbit", 1)},
		{trtcm, "--colour-aware=false", "--rate 10mbit --algorithm trtcm --pir 20mbit --pbs 1000000"},
		{trtcm, "--algorithm rfc4115 --eir 1mbit", "--rate 10mbit --algorithm rfc4115 --eir 1mbit --colour-aware --colours CS1=red"},
		{trtcm, "--algorithm gcra", "--rate 10mbit"},
		{trtcm, "--rate unlimited", "--rate unlimited --algorithm trtcm"},
		{"--rate 10mbit --excess ecn --share host", "--algorithm srtcm --ebs 1mb", "--rate 10mbit --algorithm srtcm --ebs 1mb"},
		{"--rate 10mbit --algorithm srtcm --ebs 1000000", "--rate 20mbit", "--rate 20mbit --algorithm srtcm --ebs 1000000"},
		{"--rate 10mbit --algorithm rfc4115 --eir 1mbit --ebs 100000", "--rate 20mbit", "--rate 20mbit --algorithm rfc4115 --eir 1mbit --ebs 100000"},
		{"--rate 10mbit --algorithm rfc4115 --eir 1mbit --ebs 100000", "--eir 2mbit", "--rate 10mbit --algorithm rfc4115 --eir 2mbit --ebs 100000"},
	} {
		prefix := netip.MustParsePrefix("10.0.0.0/24")
		have, err := limitGiven(t, test.have).Rule(prefix)
		testenv.Must(t, err)
		want, err := limitGiven(t, test.want).Rule(prefix)
		testenv.Must(t, err)
		have, want = have.On(14), want.On(14)
		if got, err := limitGiven(t, test.flags).over(&have, 14); err != nil || got != want {
			t.Errorf("%s, then %s: %v, %+v, want %+v", test.have, test.flags, err, got, want)
		}
	}
}
