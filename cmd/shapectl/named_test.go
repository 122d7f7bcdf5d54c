package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

const customers = `plans:
  gold: {rate: 10mbit, note: pays in May}
devices:
  va:
    egress:
      10.0.0.7: {plan: gold, name: alice, capacity: 64kb}
      10.0.0.8: {plan: gold, name: bob}
      2001:db8:7::/64: {plan: gold, name: alice, excess: pass}
    ingress:
      10.0.0.7: {rate: 10mbit, name: alice, excess: ecn}
      10.0.0.9: {rate: 1mbit, name: alice b, note: circuit 1007}
  vc:
    egress:
      10.9.0.0/24: {rate: 10mbit, name: alice, each: host}
      10.0.0.7: {rate: 3mbit, name: Bakery}
`

func newNamedRig(t *testing.T) *rig {
	r := newRig(t)
	testenv.Veth(t, "vc", "vd")
	r.ok("apply", r.policy(customers))
	return r
}

// labelled is what there is of each rule, but for its counters.
func (r *rig) labelled() (rules []string) {
	r.t.Helper()
	for _, rule := range r.show() {
		rules = append(rules, fmt.Sprintf("%s %s %s %s/%s/%s %d %d", rule.Device, rule.Direction, rule.CIDR,
			rule.Name, rule.Plan, rule.Note, rule.Rate/1e6, rule.Capacity))
	}
	return rules
}

// A name stands for all its rules, on all devices. Only what the flags say changes.
func TestSetNamed(t *testing.T) {
	r := newNamedRig(t)
	r.send("10.0.0.7", 3, 1000)
	before := r.labelled()

	said := r.ok("set", "alice", "--rate", "50mbit")
	want := `va egress: 10.0.0.7 ("alice") gets 50mbit (6.25 MB/s), burst 327.7 kB (52.43 ms); excess is dropped (gcra)
va egress: 2001:db8:7::/64 ("alice") as a whole gets 50mbit (6.25 MB/s), burst 1.875 MB (300 ms); excess is counted but not dropped (gcra)
va ingress: 10.0.0.7 ("alice") gets 50mbit (6.25 MB/s), burst 1.875 MB (300 ms); excess is marked by ECN if the packet allows it, else dropped (gcra)
vc egress: each host in 10.9.0.0/24 ("alice") gets 50mbit (6.25 MB/s), burst 1.875 MB (300 ms); excess is dropped (gcra)
no longer follows the plan gold
`
	if said != want {
		t.Errorf("set alice says\n%s, not\n%s", said, want)
	}
	after := []string{
		"va egress 10.0.0.7/32 alice//pays in May 50 327680",
		"va egress 10.0.0.8/32 bob/gold/pays in May 10 375000",
		"va egress 2001:db8:7::/64 alice//pays in May 50 1875000",
		"va ingress 10.0.0.7/32 alice// 50 1875000",
		"va ingress 10.0.0.9/32 alice b//circuit 1007 1 131072",
		"vc egress 10.0.0.7/32 Bakery// 3 131072",
		"vc egress 10.9.0.0/24 alice// 50 1875000",
	}
	if got := r.labelled(); !slices.Equal(got, after) {
		t.Errorf("the rules are\n%s, not\n%s", strings.Join(got, "\n"), strings.Join(after, "\n"))
	}
	if passed := r.show("va", "egress", "10.0.0.7")[0].PassedPackets; passed != 3 {
		t.Errorf("after the change, %d packets have passed, not 3", passed)
	}
	if again := r.ok("set", "alice", "--rate", "50mbit"); again+"no longer follows the plan gold\n" != want {
		t.Errorf("repeated, it says\n%s", again)
	}

	// A plan is not a name. One direction, also for show.
	r.refused(exitInput, "a plan is changed in the policy file", "set", "gold", "--rate", "1mbit")
	if shown := r.show("alice", "ingress"); len(shown) != 1 || shown[0].CIDR != "10.0.0.7/32" || shown[0].Direction != "ingress" {
		t.Errorf("show alice ingress: %+v", shown)
	}
	if said := r.ok("set", "alice", "ingress", "--rate", "8mbit"); strings.Count(said, "\n") != 1 || !strings.HasPrefix(said, "va ingress: 10.0.0.7 ") {
		t.Errorf("set alice ingress says %s", said)
	}
	if said := r.ok("delete", "bob", "ingress"); said != "nothing to delete: no ingress rule has the name bob\n" {
		t.Errorf("delete bob ingress says %s", said)
	}
	if said := r.ok("delete", "bob", "egress"); !strings.Contains(said, "va egress: 10.0.0.8 ") {
		t.Errorf("delete bob egress says %s", said)
	}

	// Another option and name; an exemption, and a limit again.
	r.ok("set", "alice", "--excess", "drop", "--name", "Alice B.", "--note", "")
	if rule := r.show("va", "egress", "2001:db8:7::/64")[0]; rule.Name != "Alice B." || rule.Note != "" || rule.Capacity != 1875000 {
		t.Errorf("with another excess and name it is %+v", rule)
	}
	r.refused(exitInput, "no rule or pool has that name; did you mean 'Alice B.'?", "set", "alice b.", "--rate", "1mbit")
	r.ok("set", "Alice B.", "--rate", "unlimited")
	if said := r.ok("set", "Alice B.", "--rate", "5mbit"); strings.Count(said, "gets 5mbit") != 4 {
		t.Errorf("limited again: %s", said)
	}
	r.ok("apply", r.policy(customers))
	if got := r.labelled(); !slices.Equal(got, before) {
		t.Errorf("the policy again: %v", got)
	}
}

// Rules with different rates do not get one by their name alone.
func TestSetNamedDifferentRates(t *testing.T) {
	r := newNamedRig(t)
	r.ok("set", "alice", "ingress", "--rate", "2mbit")
	before := r.labelled()
	r.refused(exitInput, "set alice: these rules have different rates: va egress 10.0.0.7/32 has 10mbit, va ingress 10.0.0.7/32 has 2mbit; nothing was changed; "+
		"give a direction, as in 'shapectl set --rate 20mbit --note x alice egress', or name a network, as in 'shapectl set --rate 20mbit --note x va egress 10.0.0.7/32'",
		"set", "alice", "--rate", "20mbit", "--note", "x")
	if got := r.labelled(); !slices.Equal(got, before) {
		t.Errorf("refused, but the rules are\n%s", strings.Join(got, "\n"))
	}

	// As after an import with --upload: both directions are egress.
	r.ok("set", "vc", "egress", "10.9.0.0/24", "--rate", "1mbit", "--each", "host")
	r.refused(exitInput, "va egress 10.0.0.7/32 has 10mbit, vc egress 10.9.0.0/24 has 1mbit; nothing was changed", "set", "alice", "egress", "--rate", "20mbit")
	r.ok("set", "alice", "--excess", "drop") // no rate is no question
	if said := r.ok("set", "alice", "--rate", "unlimited"); strings.Count(said, "\n") != 5 {
		t.Errorf("an exemption of all: %s", said)
	}
}

// A device that has moved to another namespace is named as such.
func TestSetNamedMoved(t *testing.T) {
	r := newNamedRig(t)
	_, other := testenv.NewNamedNetns(t)
	testenv.Must(t, netlink.LinkSetNsFd(testenv.Link(t, "vc"), other.FD()))
	r.refused(exitInput, "vc egress: its rules are in force on the device that had this name and has moved", "set", "Bakery", "--rate", "14mbit")
}

// To set what is so already leaves the last change alone: it can be rolled back.
func TestSetOfWhatIsSo(t *testing.T) {
	r := newNamedRig(t)
	before := r.labelled()
	r.ok("apply", r.policy(strings.Replace(customers, "10mbit", "30mbit", 1)), "--confirm", "1h")
	if said := r.ok("set", "bob", "--rate", "30mbit"); !strings.HasSuffix(said, "unless confirmed by 'shapectl confirm'\n") {
		t.Errorf("set says %q", said)
	}
	r.ok("set", "alice", "ingress", "--rate", "10mbit")
	r.ok("rollback")
	if got := r.labelled(); !slices.Equal(got, before) {
		t.Errorf("after rollback: %v", got)
	}
}

// set changes what its flags say, and nothing else: not the name or the burst's time.
func TestSetChangesWhatFlagsSay(t *testing.T) {
	r := newRig(t)
	r.ok("apply", r.policy("plans: {gold: {rate: 10mbit, each: host, capacity: 100ms}}\ndevices: {va: {egress: {10.0.0.0/24: {plan: gold, name: alice}}}}\n"))
	r.send("10.0.0.7", 2, 1000)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "20mbit")
	rule := r.show("va", "egress", "10.0.0.0/24")[0]
	if rule.Rate != 20e6 || rule.Each != "host" || rule.Name != "alice" || rule.Capacity != 250_000 || rule.PassedPackets != 2 {
		t.Errorf("after set the rule is %+v", rule)
	}
	r.ok("set", "va", "egress", "10.0.0.0/24", "--setup-fq")
	r.refused(exitInput, "rate is missing", "set", "va", "egress", "10.0.1.0/24", "--each", "host")
	r.refused(exitInput, "what to change is missing", "set", "va", "egress", "10.0.0.0/24")
}

// The name of a device stands for what limits all of it: its rules for any, or the pools that only these are in.
func TestSetDevice(t *testing.T) {
	r := newRig(t)
	r.ok("set", "va", "egress", "any", "--rate", "10mbit")
	r.ok("set", "va", "ingress", "any", "--rate", "10mbit")
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	r.ok("set", "va", "--rate", "40mbit", "--confirm", "60s")
	for _, rule := range r.show("va") {
		if want := map[bool]uint64{true: 40e6, false: 1e6}[rule.CIDR != "10.0.0.0/24"]; rule.Rate != want {
			t.Errorf("%s %s has %d", rule.Direction, rule.CIDR, rule.Rate)
		}
	}
	r.ok("rollback")
	r.ok("set", "va", "ingress", "--rate", "20mbit")
	r.refused(exitInput, "these rules have different rates", "set", "va", "--rate", "30mbit")
	r.refused(exitInput, "a device without a rule for any", "set", "vb", "--rate", "30mbit")

	r.ok("apply", r.policy("pools: {va egress: 10mbit, va ingress: 10mbit}\ndevices: {va: {egress: {any: {within: va egress}}, ingress: {any: {within: va ingress}}}}\n"))
	r.ok("set", "va", "--rate", "50mbit")
	for _, pool := range r.show("--pools") {
		if pool.Rate != 50e6 {
			t.Errorf("pool %s has %d", pool.Name, pool.Rate)
		}
	}
}

// delete takes what set takes of a device: its rules for any. It says what the device keeps.
func TestDeleteDevice(t *testing.T) {
	r := newRig(t)
	for _, args := range []string{"va egress any", "va ingress any", "va egress 10.0.0.0/24", "vb egress 10.0.0.0/24"} {
		r.ok(append([]string{"set", "--rate", "10mbit"}, strings.Fields(args)...)...)
	}
	before := r.ok("export")
	if said := r.ok("delete", "va", "--confirm", "1h"); strings.Count(said, "deleted: va ") != 4 ||
		!strings.HasSuffix(said, "all else on va is unlimited now\nva keeps 1 other rule; 'shapectl flush va' deletes all\n") {
		t.Errorf("delete va says\n%s", said)
	}
	r.ok("rollback")
	if after := r.ok("export"); after != before {
		t.Errorf("rolled back, the rules are\n%s", after)
	}
	if said := r.ok("delete", "va", "ingress"); !strings.HasSuffix(said, "\nva ingress is unlimited now\n") {
		t.Errorf("delete va ingress says\n%s", said)
	}
	r.ok("delete", "--kind", "device", "va")
	r.prints("nothing to delete: no rule for any on va\nva keeps 1 other rule; 'shapectl flush va' deletes all\n", "delete", "va")
	r.refused(exitInput, "there is no device vaa; did you mean va?", "delete", "--kind", "device", "vaa")
	r.prints("[]\n", "delete", "-j", "vb")
}

// A pool is one thing with rules that have only its rate. With other rules of that name, nobody knows what is meant.
func TestSetPoolOrRules(t *testing.T) {
	r := newRig(t)
	r.ok("set", "alice", "--new", "--rate", "10mbit")
	r.ok("set", "va", "egress", "10.0.0.7", "--within", "alice", "--name", "alice")
	r.ok("set", "alice", "--rate", "20mbit")
	r.ok("set", "va", "egress", "10.0.0.7", "--rate", "5mbit")
	r.ok("set", "alice", "egress", "--rate", "6mbit")
	r.refused(exitInput, "the name stands for several things; nothing was changed; write 'shapectl set --kind rule --rate 7mbit alice' "+
		"for the rules with that name, or 'shapectl set --kind pool --rate 7mbit alice' for the pool", "set", "alice", "--rate", "7mbit")
	if rule, pool := r.show("va")[0], r.show("--pools")[0]; rule.Rate != 6e6 || pool.Rate != 20e6 {
		t.Errorf("the rule has %d, the pool %d", rule.Rate, pool.Rate)
	}
	r.refused(exitInput, "each has no use in a pool", "set", "--kind", "pool", "alice", "--each", "host")
	r.refused(exitInput, "a pool keeps its name", "set", "--kind", "pool", "alice", "--name", "bob")
	r.refused(exitInput, "--match is of rules", "set", "--kind", "pool", "alice", "--match", "src")
	r.refused(exitInput, "a pool has no direction", "set", "new", "egress", "--new", "--rate", "7mbit")
	r.refused(exitInput, "takes only its name", "set", "va", "egress", "any", "--new", "--rate", "7mbit")
	r.refused(exitInput, "leave --kind rule out", "set", "new", "--new", "--kind", "rule", "--rate", "7mbit")
	r.refused(exitInput, "the rate of the new pool is missing", "set", "new", "--new")
	r.ok("delete", "alice")
	if left := r.show(); len(left) > 0 {
		t.Errorf("left: %+v", left)
	}
}

// With --kind, a name is only that of such a thing.
func TestKind(t *testing.T) {
	r := newRig(t)
	r.ok("set", "va", "egress", "any", "--rate", "10mbit")
	r.ok("set", "va", "ingress", "10.0.0.7", "--rate", "10mbit", "--name", "alice")
	before := r.ok("export")
	for args, says := range map[string]string{
		"set --kind pool va --rate 1mbit":                 "no pool has that name",
		"set --kind pool alice --rate 1mbit":              "no pool has that name",
		"delete --kind pool alice":                        "no pool has that name",
		"set --kind pool va egress any --rate 1mbit":      "a pool has only a name",
		"set --kind rule va --rate 1mbit":                 "no rule has that name",
		"set --kind device alice --rate 1mbit":            "there is no device alice",
		"set --kind roof alice --rate 1mbit":              "use one of rule, pool, device",
		"set --kind rule va egress 10.0.0.9 --rate 1mbit": "no egress rule for 10.0.0.9/32 on va; nothing was changed",
		"delete --kind pool va egress any":                "a pool has only a name",
	} {
		r.refused(exitInput, says, strings.Fields(args)...)
	}
	if after := r.ok("export"); after != before {
		t.Errorf("the rules are\n%s", after)
	}
	r.ok("set", "--kind", "rule", "va", "egress", "any", "--rate", "2mbit")
	r.ok("set", "--kind", "device", "va", "--rate", "3mbit")
	r.ok("delete", "--kind", "rule", "alice")
	if rules := r.show(); len(rules) != 2 || rules[0].Rate != 3e6 {
		t.Errorf("the rules are %+v", rules)
	}
}

// A pool may have the name of a device, as those of a policy have, and rules, too. Each command of an error works.
func TestSetPoolOfDevice(t *testing.T) {
	r := newRig(t)
	r.ok("apply", r.policy("devices: {va: {pool: 50mbit, egress: {any: {}}, ingress: {any: {}}}}\n"))
	r.ok("set", "va", "--rate", "60mbit")
	r.refused(exitInput, "these rules share the rate of a pool with others: va has 60mbit; nothing was changed; "+
		"name a pool, as in 'shapectl set --kind pool --rate 7mbit va', or a rule, as in 'shapectl set --rate 7mbit va egress 0.0.0.0/0'", "set", "va", "egress", "--rate", "7mbit")
	r.ok("set", "va", "egress", "any", "--rate", "5mbit")
	r.refused(exitInput, "write 'shapectl set --kind pool --rate 7mbit va' for the pool, 'shapectl set --rate 7mbit va egress' for egress, or 'shapectl set --rate 7mbit va ingress' for ingress",
		"set", "va", "--rate", "7mbit")
	r.ok("set", "--kind", "pool", "--rate", "7mbit", "va")
	r.ok("set", "--kind", "device", "--fail", "closed", "va")
	for _, row := range r.rows("show") {
		if row.Kind == report.KindPool && row.Rate != 7e6 || row.Kind == report.KindRule && row.Fail != "closed" {
			t.Errorf("%+v", row)
		}
	}

	// The device's own rules may have its name.
	r.ok("set", "va", "egress", "any", "--within", "none", "--name", "va")
	r.ok("set", "va", "ingress", "any", "--within", "none", "--rate", "5mbit", "--name", "va")
	r.ok("delete", "--kind", "pool", "va")
	r.ok("set", "va", "--rate", "6mbit")
	r.ok("set", "va", "--new", "--rate", "1gbit")
	r.ok("delete", "--kind", "pool", "va")
	if out := r.ok("delete", "va"); strings.Count(out, "deleted: ") != 4 {
		t.Errorf("delete va says %s", out)
	}
}

// Rules that have only the rate of their own pool give it what is meant for it, and keep what is theirs.
func TestSetRulesOfPool(t *testing.T) {
	r := newRig(t)
	r.ok("apply", r.policy("pools: {up: {rate: 100mbit, share: member}, a: {rate: 20mbit, within: up}}\n"+
		"devices: {va: {egress: {10.0.0.7: {within: a, name: a}, 10.0.0.8: {within: up, name: b}}}}\n"))
	r.ok("set", "a", "--guarantee", "5mbit", "--weight", "4")
	r.ok("set", "b", "--weight", "2")
	for _, row := range r.rows("show") {
		if want := map[string]uint16{"pool a": 4, "rule b": 2}[row.Kind+" "+row.Name]; want != 0 && row.Weight != want {
			t.Errorf("%s %s has the weight %d, not %d", row.Kind, row.Name, row.Weight, want)
		}
	}
	r.refused(exitInput, "--within is an option of these rules, but --capacity 20kb of their pool: a has 20mbit; give them in two commands",
		"set", "a", "--burst", "20kb", "--within", "up")
	r.ok("set", "a", "--rate", "unlimited")
	r.ok("set", "a", "--rate", "5mbit", "--within", "none")
	for _, row := range r.rows("show") {
		if row.Name == "a" && (row.Kind == report.KindPool) != (row.Rate == 20e6) || row.Kind == report.KindRule && row.Name == "a" && row.Within != "" {
			t.Errorf("%+v", row)
		}
	}
}

// The pool of rules may go with a pending change that reverts meanwhile.
func TestSetRulesOfDeletedPool(t *testing.T) {
	r := newRig(t)
	n, err := loader.Read(loader.Options{BPFFS: r.bpffs()})
	testenv.Must(t, err)
	defer n.Close()
	limit := limitGiven(t, "--rate 1mbit")
	rules := []namedHook{{n.Pools(), []maps.Entry{{Rule: policy.Rule{Rate: policy.Unlimited, Within: "up"}}}}}
	_, err = new(env).setOwnPools(n, ruleName{name: "alice"}, rules, *limit)
	if err == nil || err.Error() != "pool up was just deleted; nothing was changed; see 'shapectl show alice'" {
		t.Error(err)
	}
}

// With a direction, a name is that of rules or a device. Errors say what else has it.
func TestNamedDirection(t *testing.T) {
	r := newRig(t)
	for _, name := range []string{"any", "10.0.0.0/24", "uplink"} {
		r.ok("set", name, "--new", "--rate", "1mbit")
		r.refused(exitInput, "no egress rule has that name, but a pool does, which has no direction; write 'shapectl set --kind pool --rate 2mbit "+name+"'",
			"set", name, "egress", "--rate", "2mbit")
		r.ok("set", "--kind", "pool", "--rate", "2mbit", name)
	}
}

// A rule that is changed on its own does not change the plan for others that follow it.
func TestExportAfterSet(t *testing.T) {
	r := newRig(t)
	r.ok("apply", r.policy("plans: {gold: 10mbit}\ndevices: {va: {egress: {10.0.0.7: {plan: gold, name: alice}, 10.0.0.8: gold}}}\n"))
	r.ok("set", "alice", "--name", "Alice")
	if shown := r.show("Alice"); shown[0].Plan != "gold" {
		t.Errorf("renamed: %+v", shown)
	}
	r.ok("set", "va", "egress", "10.0.0.7", "--rate", "20mbit")
	const want = "plans:\n  gold: 10mbit\ndevices:\n  va:\n    egress:\n      10.0.0.7: {rate: 20mbit, name: Alice}\n      10.0.0.8: gold\n"
	if out := r.ok("export"); out != want {
		t.Errorf("export prints\n%s", out)
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

// An ID in parentheses at the end of a name stands for the name, for all commands. A name that is suggested can be typed.
func TestNamedByID(t *testing.T) {
	r := newRig(t)
	r.ok("set", "10001 down", "--new", "--rate", "5mbit")
	for _, network := range []string{"10.0.0.7", "2001:db8:7::/64"} {
		r.ok("set", "va", "egress", network, "--within", "10001 down", "--name", "School (10001)")
	}
	for command, want := range map[string]string{
		"show 10001": "10.0.0.7", "explain 10001": "pool 10001 down limited none", "explain 10001 --flow udp,192.0.2.1:1,10.0.0.7:2": "10.0.0.7/32 matches",
		"set 10001 --rate 4mbit": "4mbit",
	} {
		if out := r.ok(strings.Fields(command)...); !strings.Contains(out, want) {
			t.Errorf("%q does not say %q: %s", command, want, out)
		}
	}
	r.ok("set", "va", "egress", "10.0.0.8", "--within", "10001 down") // the pool is no longer only theirs
	if out := r.ok("explain", "10001"); !strings.Contains(out, "to 10.0.0.7") {
		t.Errorf("explain of a name with a pool of several: %s", out)
	}
	r.ok("delete", "va", "egress", "10.0.0.8")
	r.refused(exitInput, "did you mean '10001 down'?", "set", "10001 don", "--rate", "1mbit")
	if r.ok("delete", "10001"); len(r.show()) > 0 {
		t.Errorf("delete 10001 left %+v", r.show())
	}
}

// What a name cannot mean is refused, and changes nothing.
func TestNamedRefused(t *testing.T) {
	r := newNamedRig(t)
	before := r.labelled()
	r.refused(exitInput, "no rule or pool has that name; did you mean alice?", "set", "alcie", "--rate", "1mbit")
	r.refused(exitInput, "no rule, plan or pool has that name; did you mean alice?", "show", "alcie")
	r.refused(exitInput, "no rule or pool has that name; did you mean Bakery?", "set", "bakery", "--rate", "1mbit")
	r.refused(exitInput, "there is no device vaa; did you mean va?", "set", "vaa", "--kind", "device", "--rate", "1mbit")
	r.refused(exitInput, "no rule or pool has that name; 'shapectl show --sort name' lists", "set", "pays", "--rate", "1mbit")
	for _, name := range []string{"gold", "zelda", "mallory\x1b31m"} {
		says := "no rule or pool has that name; 'shapectl show --sort name' lists the names"
		if name == "gold" {
			says = "no rule or pool has that name, but a plan does"
		}
		r.refused(exitInput, says, "set", name, "--rate", "1mbit")
		r.refused(exitInput, says, "delete", name)
	}
	r.refused(exitInput, "no rule or pool has that name; did you mean alice?", "delete", "alcie")
	r.refused(exitInput, "argument 1 is empty", "set", "", "--rate", "1mbit")
	r.refused(exitInput, "va egress 10.0.0.7/32: each /64", "set", "alice", "--each", "/64")
	if got := r.labelled(); !slices.Equal(got, before) {
		t.Errorf("refused, but the rules are\n%s", strings.Join(got, "\n"))
	}
	if got := r.run("rollback"); got.code != exitDone {
		t.Errorf("refused, but the policy cannot be rolled back: %+v", got)
	}

	r.ok("set", "vc", "egress", "10.0.0.7", "--rate", "1mbit", "--name", "va")
	for _, verb := range []string{"set", "delete"} {
		args := []string{verb, "va"}
		if verb == "set" {
			args = append(args, "--rate", "1mbit")
		}
		with := strings.Join(append([]string{verb}, args[2:]...), " ")
		kind := strings.Replace(with, verb, verb+" --kind rule", 1)
		r.refused(exitInput, fmt.Sprintf("write 'shapectl %s va' for the rules with that name, or 'shapectl %s va' for the rules for any of the device",
			kind, strings.Replace(kind, kindRule, kindDevice, 1)), args...)
	}
	r.refused(exitInput, "write shapectl set --each host --rate 1mbit --shadow 'rate=5mbit' --match dst --confirm 1m0s --setup-fq vd ingress any for one",
		"set", "vd", "ingress", "--setup-fq", "--each", "host", "--confirm", "60s", "--rate", "1mbit", "--shadow", "rate=5mbit", "--match", "dst")
}

// A word means the same to show and set: a name before an address, a direction or a pattern.
func TestNamesLikeOtherWords(t *testing.T) {
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.7", "--rate", "1mbit")
	for i, name := range []string{"10.0.0.7", "10.0.0.0/24", "egress", "any", "v*"} {
		cidr := fmt.Sprintf("10.1.0.%d/32", i)
		r.ok("set", "va", "ingress", cidr, "--rate", "1mbit", "--name", name)
		r.ok("set", name, "--rate", "2mbit")
		if rules := r.show(name); len(rules) != 1 || rules[0].CIDR != cidr || rules[0].Rate != 2e6 {
			t.Errorf("show %s: %+v", name, rules)
		}
	}
}

// explain takes the words of set, and then asks about the devices of the rules in that direction.
func TestExplainNamedDirection(t *testing.T) {
	r := newNamedRig(t)
	var paths []report.Path
	testenv.Must(t, json.Unmarshal([]byte(r.ok("explain", "-j", "alice", "egress")), &paths))
	var got []string
	for _, p := range paths {
		for _, s := range p.Hooks {
			got = append(got, s.Device+" "+s.Direction+" "+*s.Rule)
		}
	}
	if want := []string{"va egress 10.0.0.7/32", "va egress 2001:db8:7::/64", "vc egress 10.9.0.0/24"}; !slices.Equal(got, want) {
		t.Errorf("explain alice egress: %v, want %v", got, want)
	}
}

// With a flow, explain takes those rules of a name that are for it. A direction may follow a name as it follows a device.
func TestExplainNamedFlow(t *testing.T) {
	r := newNamedRig(t)
	for args, want := range map[string]string{
		"alice --flow udp,192.0.2.1:443,10.0.0.7:53":            "va egress 10.0.0.7/32",
		"alice egress --flow udp,192.0.2.1:443,10.9.0.3:53":     "vc egress 10.9.0.0/24",
		"alice ingress --flow udp,10.0.0.7:53,192.0.2.1:443":    "va ingress 10.0.0.7/32",
		"va alice --flow udp,192.0.2.1:443,10.0.0.7:53":         "va egress 10.0.0.7/32",
		"alice --flow udp,[2001:db8::1]:443,[2001:db8:7::1]:53": "va egress 2001:db8:7::/64",
		"va egress --flow udp,192.0.2.1:443,10.0.0.8:53":        "va egress 10.0.0.8/32",
	} {
		var paths []report.Path
		testenv.Must(t, json.Unmarshal([]byte(r.ok(append([]string{"explain", "-j"}, strings.Fields(args)...)...)), &paths))
		var got []string
		for _, p := range paths {
			for _, s := range p.Hooks {
				got = append(got, s.Device+" "+s.Direction+" "+*s.Rule)
			}
		}
		if !slices.Equal(got, []string{want}) {
			t.Errorf("explain %s: %v, want %s", args, got, want)
		}
	}
	r.ok("set", "ap-1", "--new", "--rate", "1mbit")
	r.refused(exitInput, "leave --flow out", "explain", "ap-1", "--flow", "udp,192.0.2.1:443,10.0.0.7:53")
}

// All rules of a name go, and no others.
func TestDeleteNamed(t *testing.T) {
	r := newNamedRig(t)
	said := r.ok("delete", "alice")
	if strings.Count(said, "deleted: ") != 4 || strings.Contains(said, "Bakery") {
		t.Errorf("delete alice says %s", said)
	}
	want := []string{
		"va egress 10.0.0.8/32 bob/gold/pays in May 10 375000",
		"va ingress 10.0.0.9/32 alice b//circuit 1007 1 131072",
		"vc egress 10.0.0.7/32 Bakery// 3 131072",
	}
	if got := r.labelled(); !slices.Equal(got, want) {
		t.Errorf("the rules are\n%s, not\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if got := r.run("__complete", "delete", "b"); got.out != "bob\n:4\n" {
		t.Errorf("completed: %+v", got)
	}
	for _, name := range []string{"bob", "Bakery", "alice b"} {
		r.ok("delete", name)
	}
	if got := r.ok("show"); got != "no rules\n" {
		t.Errorf("all are deleted, but show says %s", got)
	}
}

// With the rules of a name go the pools that are their rate, and no others: neither what another name draws from, nor the
// pools above, nor the pool of rules with a rate of their own.
func TestDeleteNamedWithPools(t *testing.T) {
	r := newRig(t)
	r.ok("apply", r.policy(`pools: {mast: 1gbit, alice: {rate: 9mbit, within: mast}, alice up: {rate: 1mbit, within: alice}, home: 5mbit, plan: 3mbit}
devices:
  va:
    egress:
      10.0.0.1: {name: alice, within: alice}
      2001:db8:1::/64: {name: alice, within: alice}
      10.0.0.2: {name: bob, within: home}
      10.0.0.3: {name: carol, within: home}
      10.0.0.4: {name: dave, rate: 1mbit, within: plan}
    ingress:
      10.0.0.1: {name: alice, within: alice up}
`))
	for _, c := range []struct{ deleted, left string }{
		{"alice ingress", "pool alice, pool home, pool mast, pool plan"},
		{"alice --confirm 1h", "pool home, pool mast, pool plan"},
		{"dave", "pool home, pool mast, pool plan"},
		{"bob", "pool home, pool mast, pool plan"},
		{"carol", "pool mast, pool plan"},
	} {
		if got := r.run(append([]string{"delete"}, strings.Fields(c.deleted)...)...); got.code != exitDone {
			t.Errorf("delete %s: %+v", c.deleted, got)
		}
		if left := names(r.rows("show", "--pools")); left != c.left {
			t.Errorf("delete %s leaves %s, want %s", c.deleted, left, c.left)
		}
		r.run("confirm")
	}
}

// A pool that the last change removed, which can be undone, has no name any more.
func TestSetNameOfRemovedPool(t *testing.T) {
	r := newRig(t)
	r.ok("apply", r.policy("devices: {va: {pool: 9mbit, egress: {any: {}}}}\n"))
	r.ok("apply", r.policy("devices: {va: {egress: {any: 1mbit}}}\n"))
	if said := r.ok("set", "va", "--rate", "2mbit"); strings.Count(said, " gets 2mbit") != 2 {
		t.Errorf("set va says %s", said)
	}
}

// A deletion can revert, and says what limits the packets until then.
func TestDeleteUntilConfirmed(t *testing.T) {
	r := newNamedRig(t)
	was := r.labelled()
	says := func(what string, args ...string) {
		t.Helper()
		if said := r.ok(args...); !strings.Contains(said, what) {
			t.Errorf("%q says\n%swithout %q", args, said, what)
		}
	}
	says(" unless confirmed by 'shapectl confirm'\nalice is unlimited now\n", "delete", "alice", "--confirm", "1h")
	if now := r.labelled(); len(now) != len(was)-4 {
		t.Errorf("the rules are\n%s", strings.Join(now, "\n"))
	}
	r.ok("rollback")
	if now := r.labelled(); !slices.Equal(now, was) {
		t.Errorf("the rules are\n%s, not\n%s", strings.Join(now, "\n"), strings.Join(was, "\n"))
	}
	r.ok("set", "up", "--new", "--rate", "1mbit")
	r.ok("set", "va", "egress", "0.0.0.0/0", "--rate", "unlimited", "--within", "up")
	says("bob is limited only by pool up now\n", "delete", "bob", "--confirm", "1h")
	r.ok("confirm")
	r.ok("set", "va", "egress", "10.0.0.0/8", "--rate", "1mbit")
	r.ok("set", "va", "egress", "10.0.0.9", "--rate", "1mbit")
	says("va egress 10.0.0.9 is limited by the rule for 10.0.0.0/8 now\n", "delete", "va", "egress", "10.0.0.9")
	r.ok("set", "down", "--new", "--rate", "1mbit")
	r.ok("delete", "down", "--confirm", "1h")
	r.ok("rollback")
	r.ok("delete", "down")
}

// flush can revert, too, with all pools.
func TestFlushUntilConfirmed(t *testing.T) {
	r := newRig(t)
	r.ok("apply", r.policy("pools: {up: 1gbit}\ndevices: {va: {pool: {rate: 1mbit, within: up}, egress: {any: {}}}, vb: {egress: {any: 1mbit}}}\n"))
	was := r.ok("export")
	if said := r.ok("flush", "va", "--confirm", "1h"); !strings.HasSuffix(said, " unless confirmed by 'shapectl confirm'\nva is unlimited now\n") {
		t.Errorf("flush va says\n%s", said)
	}
	leaves := func(command string) {
		t.Helper()
		if now := names(r.rows("show")); now != "pool up, vb egress 0.0.0.0/0, vb egress ::/0" {
			t.Errorf("%s leaves %s", command, now)
		}
	}
	leaves("flush va")
	r.refused(exitInput, "not confirmed yet", "flush", "--all", "--confirm", "1h")
	r.ok("rollback")
	r.ok("flush", "--all", "--confirm", "1h")
	r.prints("no rules\n", "show")
	r.ok("rollback")
	if now := r.ok("export"); now != was {
		t.Errorf("rolled back, the rules are\n%s", now)
	}
	r.ok("delete", "va", "egress", "any")
	leaves("delete va egress any") // the pool of va goes with its last rule
	r.ok("apply", r.policy("pools: {up: 1gbit, va: {rate: 1mbit, within: up, owner: va}}\ndevices: {vb: {egress: {any: 1mbit}}}\n"))
	r.ok("flush", "va", "--confirm", "1h")
	r.ok("rollback")
	if now := names(r.rows("show")); !strings.HasPrefix(now, "pool up, pool va, ") {
		t.Errorf("rolled back, the pool of a device without rules is not among %s", now)
	}
	if said := r.ok("flush", "v*", "--confirm", "1h"); strings.Contains(said, "v* ") {
		t.Errorf("flush 'v*' says\n%s", said)
	}
	r.ok("rollback")
	r.ok("flush", "--all", "--confirm", "1h")
	r.ok("confirm")
	r.prints("no rules are left\n", "flush", "--all", "--confirm", "1h")
}

// While a change of the policy is pending, a name neither changes nor deletes rules.
func TestNamedPending(t *testing.T) {
	r := newNamedRig(t)
	r.ok("apply", "--confirm", "1h", r.policy("devices: {va: {egress: {10.0.0.7: {rate: 1mbit, name: alice}, 10.0.0.8: {rate: 1mbit, name: alice}}}}"))
	r.refused(exitInput, "'shapectl confirm'", "set", "alice", "--rate", "2mbit")
	r.refused(exitInput, "'shapectl confirm'", "delete", "alice")
}
