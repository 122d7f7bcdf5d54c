package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// found are the rules that show has in JSON, by device, direction and network.
func (r *rig) found(args ...string) string {
	r.t.Helper()
	var found []string
	for _, rule := range r.show(args...) {
		found = append(found, rule.Device+" "+rule.Direction+" "+rule.CIDR)
	}
	return strings.Join(found, ", ")
}

func TestHasPart(t *testing.T) {
	for text, has := range map[string]bool{"vm3": true, "vm30": false, "vm30 to vm3": true, "vm3a": true, "VM": false, "xvm3-up": true} {
		if hasPart(text, "vm3") != has {
			t.Errorf("%q: %v", text, !has)
		}
	}
	if !hasPart("becker", "beck") || hasPart("", "beck") || !hasPart("9677 77a", "77") || hasPart("9677", "77") {
		t.Error("beck is a part of becker, and of nothing; 77 is none of 9677")
	}
}

func TestShowSearches(t *testing.T) {
	r := newRig(t)
	r.taps(1)
	r.ok("apply", r.policy(`devices:
  tap0: {egress: {10.0.0.0/8: 1mbit, "2001:db8::/32": 1mbit}}
  va: {egress: {0.0.0.0/0: 1gbit, 10.0.3.0/24: 10mbit, 10.0.3.7: 2mbit}, ingress: {10.0.0.0/16: 10mbit}}
`))
	for arg, want := range map[string]string{
		"10.0.3.7":         "tap0 egress 10.0.0.0/8, va egress 10.0.3.7/32, va egress 10.0.3.0/24, va egress 0.0.0.0/0, va ingress 10.0.0.0/16",
		"10.0.3.0/24":      "va egress 10.0.3.0/24, va egress 10.0.3.7/32",
		"10.0.0.0/16":      "va egress 10.0.3.0/24, va egress 10.0.3.7/32, va ingress 10.0.0.0/16",
		"10.0.9.0/24":      "tap0 egress 10.0.0.0/8, va egress 0.0.0.0/0, va ingress 10.0.0.0/16",
		"2001:db8::1":      "tap0 egress 2001:db8::/32",
		"2001:db8:7::/48":  "tap0 egress 2001:db8::/32",
		"2001:db9::1":      "",
		"ingress":          "va ingress 10.0.0.0/16",
		"tap0":             "tap0 egress 10.0.0.0/8, tap0 egress 2001:db8::/32",
		"t*":               "tap0 egress 10.0.0.0/8, tap0 egress 2001:db8::/32",
		"vb":               "",
		"va --sort rate":   "va egress 0.0.0.0/0, va egress 10.0.3.0/24, va ingress 10.0.0.0/16, va egress 10.0.3.7/32",
		"va --top 2":       "va egress 0.0.0.0/0, va egress 10.0.3.0/24",
		"egress --top 1":   "tap0 egress 10.0.0.0/8",
		"va egress --wide": "va egress 0.0.0.0/0, va egress 10.0.3.0/24, va egress 10.0.3.7/32",
	} {
		if got := r.found(strings.Fields(arg)...); got != want {
			t.Errorf("show %s: %s, want %s", arg, got, want)
		}
	}
	var rules []shownRule
	testenv.Must(t, json.Unmarshal([]byte(r.ok("show", "-j", "10.0.3.7")), &rules))
	for i, decides := range []bool{true, true, false, false, true} {
		if got := rules[i].Decides; got == nil || *got != decides {
			t.Errorf("%s %s decides: %v", rules[i].Device, rules[i].CIDR, got)
		}
	}
	if out := r.ok("show", "2001:db8::1"); !strings.HasPrefix(out, "tap0 egress: 2001:db8::/32 as a whole gets 1mbit") || !strings.Contains(out, "\n  state      in force") {
		t.Errorf("one rule: %s", out)
	}
	for args, says := range map[string]string{
		"alice":                   "there is no device alice, and no rule, plan or pool has that name",
		"a*":                      "there is no device that matches a*, and no rule, plan or pool has such a name",
		"a/*":                     "there is no device that matches a/*, and no rule, plan or pool has such a name",
		"a[":                      "malformed pattern",
		"--plan gold":             "no rules with plan gold; 'shapectl show' lists all rules",
		"10.0.3.7/24":             "host bits",
		"10.0.3.7 --plan gold":    "no rule for 10.0.3.7 with plan gold; 'shapectl show' lists all rules",
		"va egress 10.0.3.9":      "no egress rule for 10.0.3.9/32 on va; 'shapectl show va' lists its rules",
		"--sort size":             "use one of worst, use",
		"--top 0":                 "use 1 or more",
		"--interval 0s":           "out of range",
		"--interval 2h":           "out of range",
		"--buckets --shadow":      "give one of them",
		"--sentences --buckets":   "give one of them",
		"--wide --shadow":         "give one of them",
		"va egress 10.0.3.7 more": "takes",
	} {
		r.refused(exitInput, says, append([]string{"show"}, strings.Fields(args)...)...)
	}
	// A name with an end of line is shown as one line.
	r.refused(exitInput, `there is no device a\nb, and`, "show", "a\nb")
	r.refused(exitInput, `there is no device a\nb, and`, "show", "a\nb", "egress")
	// A device is meant before a direction or an address of that name.
	testenv.Must(t, addVeth("egress", "p1"))
	testenv.Must(t, netlink.LinkSetName(testenv.Link(t, "p1"), "10.0.3.7"))
	if got := r.found("egress") + r.found("10.0.3.7"); got != "" {
		t.Errorf("rules of devices without any: %s", got)
	}
}

// An answer without rules says what show looked for.
func TestShowFindsNothing(t *testing.T) {
	r := newRig(t)
	r.prints("no rules\n", "show")
	r.ok("set", "va", "egress", "2001:db8::/32", "--rate", "1mbit")
	for args, says := range map[string]string{
		"any":                  "no rule for any",
		"0.0.0.0/0":            "no rule for 0.0.0.0/0",
		"10.0.0.7":             "no rule for 10.0.0.7",
		"ingress":              "no ingress rules",
		"vb":                   "no rules on vb",
		"va ingress":           "no ingress rules on va",
		"va --plan gold":       "no rules with plan gold on va",
		"vb*":                  "no rules on a device that matches vb*",
		"v* ingress":           "no ingress rules on a device that matches v*",
		"v* egress 10.0.0.0/8": "no egress rule for 10.0.0.0/8 on a device that matches v*",
	} {
		r.prints(says+"; 'shapectl show' lists all rules\n", append([]string{"show"}, strings.Fields(args)...)...)
	}
}

// A name is found exactly, else by a pattern, else by a part of it, else by a part of its note.
func TestLabelRank(t *testing.T) {
	for _, test := range []struct {
		asked, name, plan string
		want              int
	}{
		{"alice", "alice", "", 4}, {"alice", "", "alice", 4}, {"al*", "alice", "gold", 3}, {"g?ld", "alice", "gold", 3}, {"LIC", "alice", "", 2},
		{"alice", "Alice B", "", 2}, {"alice", "bob", "gold", 0}, {"alice", "", "", 0}, {"a[", "aa[", "", 2}, {"", "", "", 1}, {"SITE 7", "bob", "", 1},
		{"*lee 41*", "Lee / Lindenallee 41 / Router", "", 3}, {"lee*rout?r", "Lee / Router", "", 3}, {"lee[^a-z]*", "Lee/B", "", 3}, {"[a/b]", "/", "", 3},
	} {
		l := policy.Label{Name: test.name, Plan: test.plan, Note: "site 7"}
		if got := (filterRules{label: test.asked}).ranks()(l); got != test.want {
			t.Errorf("%q of %+v has rank %d, want %d", test.asked, l, got, test.want)
		}
		if test.plan != "" {
			if got := (filterRules{plan: test.plan}).ranks()(l); got != leastRank {
				t.Errorf("plan %s has rank %d", test.plan, got)
			}
			if got := (filterRules{plan: "other"}).ranks()(l); got != 0 {
				t.Errorf("another plan has rank %d", got)
			}
		}
	}
}

// While it measures, show keeps nobody from changing rules.
func TestShowInterval(t *testing.T) {
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1gbit")
	r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "8kbit", "--capacity", "2000", "--each", "host")
	r.send("10.0.0.7", 5, 1000)
	show := r.start("show", "-j", "--interval", "1s", "va")
	sender := testenv.NewSender(t, "va")
	for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		for _, to := range []string{"10.0.0.7", "10.0.1.7"} {
			testenv.Must(t, sender.Send(frameTo(to, 1000)))
		}
		r.ok("set", "va", "ingress", "10.0.0.0/24", "--rate", "1mbit")
	}
	got := show.result()
	var rules []shownRule
	testenv.Must(t, json.Unmarshal([]byte(got.out), &rules))
	if len(rules) < 2 || rules[0].UseBits == nil || *rules[0].UseBits == 0 || rules[0].UsePercent == nil || *rules[0].UsePercent == 0 ||
		rules[0].DroppedPercent == nil || *rules[0].DroppedPercent != 0 || rules[0].IntervalNS == nil || *rules[0].IntervalNS < 1e9 {
		t.Errorf("a rule that is used: %+v", rules[0])
	}
	if rules[1].UsePercent != nil || rules[1].UseBits == nil || rules[1].DroppedPercent == nil || *rules[1].DroppedPercent < 50 {
		t.Errorf("a rule for each host: %+v", rules[1])
	}
	if out := r.ok("show", "--interval", "20ms", "--sort", "use", "va"); !strings.Contains(out, "USE") || strings.Contains(out, "PASSED") {
		t.Errorf("as text: %s", out)
	}
}

// An order by use needs a measurement, and shares of excess packets have a column where they order rules.
func TestShowSorted(t *testing.T) {
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "8kbit", "--capacity", "2000", "--excess", "pass")
	r.send("10.0.0.7", 5, 1000)
	var rules []shownRule
	testenv.Must(t, json.Unmarshal([]byte(r.ok("show", "-j", "--sort", "use")), &rules))
	if len(rules) != 1 || rules[0].IntervalNS == nil || *rules[0].IntervalNS < 1e9 {
		t.Errorf("--sort use: %+v", rules)
	}
	if out := r.ok("show", "--sort", "excess"); !strings.Contains(out, "EXCESS") || !strings.Contains(out, "60%") {
		t.Errorf("--sort excess: %s", out)
	}
}

// Shadows are sorted and counted by themselves.
func TestShowShadows(t *testing.T) {
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "8kbit", "--capacity", "2000")
	r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "1gbit", "--shadow", "rate=1gbit")
	r.ok("set", "va", "egress", "10.0.2.0/24", "--rate", "1gbit", "--shadow", "rate=8kbit,capacity=2000")
	for _, to := range []string{"10.0.0.7", "10.0.1.7", "10.0.2.7"} {
		r.send(to, 5, 1000)
	}
	if got := r.found("--shadow", "--sort", "dropped", "--top", "1"); got != "va egress 10.0.2.0/24" {
		t.Errorf("the one that would drop most: %s", got)
	}
	if out := r.ok("show", "--shadow", "--sort", "use", "--top", "1"); !strings.Contains(out, "10.0.2.0/24") || !strings.HasSuffix(out, "\n1 of 2 rules\n") {
		t.Errorf("one of the shadows: %s", out)
	}
	if got := r.found("10.0.0.7", "--shadow"); got != "" {
		t.Errorf("rules without a shadow: %s", got)
	}
}

// Buckets of many rules come the fullest first, and --top leaves the fullest of all.
func TestShowBuckets(t *testing.T) {
	r := newRig(t)
	for _, network := range []string{"10.0.0.0/24", "10.0.1.0/24"} {
		r.ok("set", "va", "egress", network, "--rate", "8kbit", "--capacity", "9000", "--each", "host")
	}
	for to, packets := range map[string]int{"10.0.0.7": 2, "10.0.0.8": 6, "10.0.1.7": 4} {
		r.send(to, packets, 1000)
	}
	order := func(out string) (keys []string) {
		for _, field := range strings.Fields(out) {
			if _, err := netip.ParseAddr(field); err == nil {
				keys = append(keys, field)
			}
		}
		return keys
	}
	if keys := strings.Join(order(r.ok("show", "--buckets")), " "); keys != "10.0.0.8 10.0.1.7 10.0.0.7" {
		t.Errorf("buckets are in the order %s", keys)
	}
	if out := r.ok("show", "--buckets", "--top", "2"); strings.Join(order(out), " ") != "10.0.0.8 10.0.1.7" || !strings.HasSuffix(out, "\n2 of 3 buckets\n") {
		t.Errorf("the fullest two: %s", out)
	}
	var rules []shownRule
	testenv.Must(t, json.Unmarshal([]byte(r.ok("show", "-j", "--buckets", "--top", "2")), &rules))
	if len(rules) != 2 || len(rules[0].Buckets) != 1 || rules[0].Buckets[0].Name != "10.0.0.8" || len(rules[1].Buckets) != 1 || *rules[0].ActiveBuckets != 2 {
		t.Errorf("in JSON: %+v", rules)
	}
	if out := r.ok("show", "--wide"); !strings.Contains(out, "BUCKETS") {
		t.Errorf("wide: %s", out)
	}
}

// A policy none of whose devices exist removes no rules, unless that is what it says.
func TestApplyThatRemovesAll(t *testing.T) {
	r := newRig(t)
	r.ok("apply", r.policy("devices: {va: {egress: {10.0.0.0/24: 1mbit, 10.0.1.0/24: 1mbit}}}\n"))
	for text, missing := range map[string]string{
		"devices: {'tpa*': {egress: {10.0.0.0/24: 1mbit}}}\n":                "tpa*",
		"devices: {vaa: {egress: {10.0.0.0/24: 1mbit}}}\n":                   "vaa",
		"devices: {vaa: {egress: {10.0.0.0/24: 1mbit}}, 'x*': {}, va: {}}\n": "vaa, x*",
	} {
		file := r.policy(text)
		says := "it would remove all 2 rules of va, as no device is " + missing
		for _, args := range [][]string{{"apply", file}, {"apply", file, "--absent-ok"}, {"apply", file, "--confirm", "60s"}} {
			r.refused(exitInput, says, args...)
		}
		if got := r.run("diff", file); got.code != exitDiffers || !strings.HasPrefix(got.out, "2 rules to remove on 1 device\n") ||
			!strings.Contains(got.err, "shapectl: apply would refuse this: "+says) {
			t.Errorf("diff: %+v", got)
		}
	}
	r.has("va egress 10.0.0.0/24 1000000", "va egress 10.0.1.0/24 1000000")
	none := r.policy("devices: {'tpa*': {egress: {10.0.0.0/24: 1mbit}}}\n")
	if got := r.run("apply", none, "--allow-empty"); got.code != exitDegraded || got.out != "2 rules removed on 1 device\n" || got.err != "shapectl: no device matches tpa*\n" {
		t.Errorf("apply --allow-empty: %+v", got)
	}
	// With nothing in force there is nothing to lose, and with --absent-ok no fault.
	if got := r.run("apply", none); got.code != exitDegraded || got.out != "nothing to change\n" {
		t.Errorf("apply of none: %+v", got)
	}
	if got := r.run("apply", none, "--absent-ok"); got.code != exitDone {
		t.Errorf("apply --absent-ok: %+v", got)
	}
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	r.prints("1 rule removed on 1 device\n", "apply", r.policy("devices: {}\n"))
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	for _, text := range []string{"devices: {va: {}}\n", "devices: {'v*': {egress: {match: dst}}}\n"} {
		r.refused(exitInput, "it would remove all 1 rule of va, as the policy has no rule for any device; complete it", "apply", r.policy(text))
	}
	r.prints("1 rule removed on 1 device\n", "apply", r.policy("devices: {va: {}}\n"), "--allow-empty")
}

// While nobody reads what show has to say, others change rules.
func TestShowToASlowReader(t *testing.T) {
	r := newRig(t)
	var rules strings.Builder
	for i := range 250 {
		fmt.Fprintf(&rules, "10.0.%d.0/24: 1mbit, ", i)
	}
	r.ok("apply", r.policy("devices: {va: {egress: {"+rules.String()+"}}}\n"))
	show := r.command("show", "-j")
	out, err := show.StdoutPipe()
	testenv.Must(t, err)
	testenv.Must(t, show.Start())
	_, err = out.Read(make([]byte, 1)) // the rest is more than a pipe holds
	testenv.Must(t, err)
	began := time.Now()
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "2mbit")
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("another command waited %v", took)
	}
	rest, err := io.ReadAll(out)
	testenv.Must(t, err)
	testenv.Must(t, show.Wait())
	if len(rest) < 1<<17 {
		t.Errorf("only %d bytes", len(rest))
	}
}

// Rules with a name are one line, whatever else selects, sorts and counts them.
func TestShowNames(t *testing.T) {
	r := newRig(t)
	r.prints("no rules\n", "show", "--names")
	r.ok("set", "ap", "--new", "--rate", "100mbit")
	r.ok("set", "alice", "--new", "--rate", "50mbit", "--within", "ap")
	r.ok("set", "va", "egress", "10.0.0.7", "--within", "alice", "--name", "alice")
	r.ok("set", "va", "ingress", "10.0.0.7", "--within", "alice", "--name", "alice")
	r.ok("set", "va", "egress", "10.0.0.8", "--rate", "10mbit", "--within", "ap", "--name", "bob")
	r.ok("set", "va", "egress", "10.0.0.9", "--rate", "10mbit")
	r.send("10.0.0.8", 3, 1000)
	names := func(args ...string) string {
		var all []report.Named
		testenv.Must(t, json.Unmarshal([]byte(r.ok(append(args, "--names", "-j")...)), &all))
		var found []string
		for _, n := range all {
			found = append(found, n.Name)
		}
		return strings.Join(found, " ")
	}
	for args, want := range map[string]string{
		"show": "alice bob", "show --sort passed": "bob alice", "show --sort passed --top 1": "bob", "show al*": "alice", "show va ingress": "alice",
		"show ap": "alice bob", "show alice": "alice", "show 10.0.0.8 --interval 10ms": "bob", "show 10.0.0.9": "",
	} {
		if got := names(strings.Fields(args)...); got != want {
			t.Errorf("%s: %q, want %q", args, got, want)
		}
	}
	r.prints("NAME  POOL  EGRESS   PASSED\nbob   ap    10mbit  3.00 kB\n", "show", "bob", "--names")
	r.prints("no rule has a name\n", "show", "10.0.0.9", "--names")
	r.refused(exitInput, "--names has columns of its own", "show", "--names", "--wide")
	r.refused(exitInput, "give one of them", "show", "--names", "--tree")
}
