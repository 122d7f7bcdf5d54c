package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

// newPoolRig has pools, of which one is within another, and rules within them.
func newPoolRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	r.ok("set", "uplink", "--new", "--rate", "1gbit", "--share", "member")
	r.ok("set", "ap-1", "--new", "--rate", "100mbit", "--within", "uplink", "--guarantee", "20mbit", "--note", "roof")
	r.ok("set", "va", "egress", "10.0.0.7", "--rate", "20mbit", "--within", "ap-1", "--guarantee", "5mbit", "--name", "alice")
	r.ok("set", "va", "egress", "2001:db8:7::/48", "--within", "ap-1")
	r.ok("set", "va", "ingress", "10.0.0.7", "--rate", "1mbit")
	return r
}

// rows are the rules and pools that show has in JSON, with what is of pools.
func (r *rig) rows(args ...string) (rows []shownRule) {
	r.t.Helper()
	testenv.Must(r.t, json.Unmarshal([]byte(r.ok(append(args, "-j")...)), &rows))
	return rows
}

func names(rows []shownRule) string {
	var all []string
	for _, row := range rows {
		if row.Kind == report.KindPool {
			all = append(all, "pool "+row.Name)
		} else {
			all = append(all, fmt.Sprint(row.Device, " ", row.Direction, " ", row.CIDR))
		}
	}
	return strings.Join(all, ", ")
}

// TestShowPoolRate sees the rate of the lowest pool in each flat table, also where the pool is not in it, and not in a tree.
func TestShowPoolRate(t *testing.T) {
	r := newPoolRig(t)
	for args, rate := range map[string]string{
		"show": "100mbit/pool", "show va": "100mbit/pool", "show ap-1": "100mbit/pool", "show va egress 2001:db8:7::/48 --wide": "100mbit/pool",
		"show --tree": "as pool",
	} {
		line := ""
		for _, l := range strings.Split(r.ok(strings.Fields(args)...), "\n") {
			if strings.Contains(l, "2001:db8:7::/48") {
				line = l
			}
		}
		if !strings.Contains(line+" ", "  "+rate+" ") {
			t.Errorf("%s: %q, want %s in it", args, line, rate)
		}
	}
	r.ok("set", "va", "egress", "10.0.0.9", "--rate", "200mbit")
	var order []string
	for _, row := range r.rows("show", "va", "--sort", "rate") {
		order = append(order, row.CIDR)
	}
	if got := strings.Join(order, " "); got != "10.0.0.9/32 2001:db8:7::/48 10.0.0.7/32 10.0.0.7/32" {
		t.Errorf("by rate: %s", got)
	}
	// In force is the lease of a pool, or its safe share.
	r.ok("set", "customer", "--new", "--rate", "100mbit", "--cluster", "c")
	r.ok("set", "vb", "egress", "10.0.0.7", "--within", "customer")
	if out := r.ok("show", "vb"); !strings.Contains(out, " 8.00kbit safe of 100mbit/pool\n") {
		t.Errorf("without a lease: %s", out)
	}
}

// A pattern is not the name of a new pool, and set takes none.
func TestNewPoolLikePattern(t *testing.T) {
	r := newRig(t)
	for _, name := range []string{"vnet*", "tap?1?"} {
		r.refused(exitInput, "set NAME takes no pattern; to change several at one moment, edit the policy file, and run 'shapectl apply FILE'", "set", name, "--rate", "3mbit")
		r.refused(exitInput, "a new pool cannot have *, ? or [ in its name", "set", name, "--new", "--rate", "3mbit")
	}
	r.ok("apply", r.policy("pools: {'tap*': 1mbit}\ndevices: {}\n"))
	r.ok("set", "tap*", "--rate", "2mbit") // which exists
}

// A typo makes no pool, and a new one that is repeated is a success.
func TestMisspeltPool(t *testing.T) {
	r := newRig(t)
	r.ok("set", "uplink", "--new", "--rate", "1gbit")
	before := r.ok("export")
	r.refused(exitInput, "no rule or pool has that name; did you mean uplink? --new makes a pool", "set", "uplnik", "--rate", "2gbit")
	r.refused(exitInput, "there already is a pool uplink with other values; nothing was changed; to change it, leave --new out", "set", "uplink", "--new", "--rate", "2gbit")
	r.ok("set", "uplink", "--new", "--rate", "1gbit")
	if after := r.ok("export"); after != before {
		t.Errorf("the pools were changed:\n%s", after)
	}
}

// set changes only what its flags say, and says what the pool is then.
func TestPoolSet(t *testing.T) {
	r := newRig(t)
	r.prints("pool \"uplink\" gets 100mbit (12.5 MB/s), burst 1 MB (80 ms); excess is dropped (gcra)\n",
		"set", "uplink", "--new", "--rate", "100mbit", "--burst", "80ms")
	r.ok("set", "ap-1", "--new", "--rate", "10mbit", "--within", "uplink", "--guarantee", "5mbit", "--weight", "3")
	r.prints("pool \"uplink\" gets 200mbit (25 MB/s), burst 2 MB (80 ms), shared fairly by its members; excess is dropped (gcra)\n",
		"set", "uplink", "--rate", "200mbit", "--share", "member")
	r.prints("pool \"uplink\" gets 200mbit (25 MB/s), burst 2 MB (80 ms), shared fairly by its members; excess is dropped (gcra)\n",
		"set", "uplink", "--rate", "200mbit") // as before
	r.prints("pool \"ap-1\" gets 10mbit (1.25 MB/s), burst 375 kB (300 ms), within pool \"uplink\", 6mbit of it guaranteed, weight 3; excess is dropped (gcra)\n",
		"set", "ap-1", "--guarantee", "6mbit")
	r.prints("pool \"ap-1\" gets 10mbit (1.25 MB/s), burst 375 kB (300 ms); excess is dropped (gcra)\n", "set", "ap-1", "--within", "none")
	for args, says := range map[string]string{
		"set new":                                      "what to change is missing",
		"set new --new --share member":                 "rate is missing",
		"set new --new --within uplink":                "a new pool needs a rate of its own; for all that pool uplink has, give --rate 200mbit",
		"set ap-1 --rate unlimited":                    "a pool always has a rate",
		"set ap-1 --rate none":                         "a pool always has a rate",
		"set none --new --rate 1mbit":                  "cannot be called none",
		"set new --rate 1mbit --within ap-2":           "there is no pool ap-2; did you mean ap-1?",
		"set new --rate 1mbit --within z":              "there is no pool z; make it first: 'shapectl set --new --rate RATE z'",
		"set uplink --within uplink":                   "is the pool itself",
		"set new --new --rate 1mbit --each host":       "each has no use in a pool",
		"set new --new --rate 1mbit --guarantee 1kbit": "",
	} {
		r.refused(exitInput, says, strings.Fields(args)...)
	}
	r.ok("set", "ap-1", "--within", "uplink", "--guarantee", "10mbit")
	r.refused(exitInput, "add up to 10mbit", "set", "uplink", "--rate", "9mbit")
}

// A pool goes once nothing is within it.
// A pool has a shadow until it is told to have none. Policies have it, too.
func TestPoolShadow(t *testing.T) {
	r := newRig(t)
	const of = `; shadow: pool "up" gets 5mbit (625 kB/s), burst 187.5 kB (300 ms)`
	r.ok("set", "up", "--new", "--rate", "50mbit")
	if got := r.ok("set", "up", "--shadow", "rate=5mbit"); !strings.Contains(got, of) {
		t.Errorf("set says\n%s, want %q in it", got, of)
	}
	if got := r.ok("set", "up", "--rate", "60mbit"); !strings.Contains(got, of) {
		t.Errorf("with another rate, set says\n%s, want %q in it", got, of)
	}
	r.ok("set", "va", "egress", "0.0.0.0/0", "--within", "up")
	if got := r.ok("show", "--shadow"); !strings.HasPrefix(got, "POOL OR RULE  SHADOW  SEEN  WOULD DROP\nup             5mbit     0") {
		t.Errorf("show --shadow says\n%s", got)
	}
	policy := r.policy(r.ok("export"))
	if got := r.ok("set", "up", "--share", "member"); !strings.Contains(got, of+", without shares\n") {
		t.Errorf("with shares, set says\n%s", got)
	}
	r.ok("set", "up", "--shadow", "none")
	if got := r.ok("show", "--shadow"); !strings.HasPrefix(got, "no rule has a shadow") {
		t.Errorf("after --shadow none, show --shadow says\n%s", got)
	}
	r.ok("apply", policy)
	if rows := r.rows("show", "--pools"); len(rows) != 1 || rows[0].Shadow == nil || rows[0].Shadow.Rate != 5e6 {
		t.Errorf("after apply, the pools are %+v", rows)
	}
}

func TestPoolDelete(t *testing.T) {
	r := newPoolRig(t)
	r.refused(exitInput, "within it is ap-1", "delete", "uplink")
	r.refused(exitInput, "within it is va egress 10.0.0.7/32, va egress 2001:db8:7::/48; delete these first", "delete", "ap-1")
	r.run("flush", "va") // which says that pools are left
	if out := r.ok("delete", "ap-1"); !strings.HasPrefix(out, `deleted: pool "ap-1" gets 100mbit`) {
		t.Errorf("delete: %s", out)
	}
	r.refused(exitInput, "no rule or pool has that name; did you mean uplink?", "delete", "uplnk")
	r.ok("delete", "uplink")
	if pins := r.pins(); len(pins) > 0 {
		t.Errorf("left over: %v", pins)
	}
}

func TestFlushAllDeletesPools(t *testing.T) {
	r := newPoolRig(t)
	for i := range 5 {
		r.ok("set", fmt.Sprint("ap-", 10-i), "--new", "--rate", "1gbit")
	}
	out := r.ok("flush", "--all")
	if strings.Count(out, "deleted: pool") != 7 || strings.Count(out, "deleted: va") != 3 {
		t.Errorf("flush: %s", out)
	}
	for i := range 4 {
		_, out, _ = strings.Cut(out, fmt.Sprintf(`"ap-%d" gets`, i+6))
	}
	if !strings.Contains(out, `"ap-10" gets`) {
		t.Error("flush does not sort pools by their names")
	}
	if pins := r.pins(); len(pins) > 0 {
		t.Errorf("left over: %v", pins)
	}
}

// More than ten rules and pools are counted. JSON has all.
func TestManyDeleted(t *testing.T) {
	r := newRig(t)
	const policy = `pools: {ap-2: 1mbit, ap-10: 1mbit, ap-1: 1mbit, a: 1mbit, b: 1mbit}
devices:
  va: {egress: {10.0.0.1: 1mbit, 10.0.0.2: 1mbit, 10.0.0.3: 1mbit}, ingress: {any: 1mbit}}
  vb: {egress: {10.0.0.1: 1mbit}}
`
	for args, want := range map[string]string{
		"flush --all":    "deleted: 6 rules on 2 devices: va, vb\ndeleted: 5 pools: a, ap-1, ap-2 and 2 more\n",
		"flush va":       "",
		"flush --all -j": "",
	} {
		r.ok("apply", r.policy(policy))
		switch out := r.ok(strings.Fields(args)...); {
		case want != "" && out != want:
			t.Errorf("%s: %s", args, out)
		case args == "flush va" && strings.Count(out, "deleted: va ") != 5:
			t.Errorf("%s: %s", args, out)
		case strings.HasSuffix(args, "-j") && strings.Count(out, `"sentence"`) != 11:
			t.Errorf("%s: %s", args, out)
		}
	}
}

// Pools come before rules. The name of a pool stands for all that is within it.
func TestShowPools(t *testing.T) {
	r := newPoolRig(t)
	const rules = "va egress 10.0.0.7/32, va egress 2001:db8:7::/48"
	for args, want := range map[string]string{
		"show":                     "pool ap-1, pool uplink, " + rules + ", va ingress 10.0.0.7/32",
		"show --sort rate --top 1": "pool uplink",
		"show uplink":              "pool ap-1, pool uplink, " + rules,
		"show ap-1":                "pool ap-1, " + rules,
		"show ap":                  "pool ap-1, " + rules,
		"show roof":                "pool ap-1, " + rules,
		"show alice":               "va egress 10.0.0.7/32",
		"show va":                  rules + ", va ingress 10.0.0.7/32",
		"show ::/0":                "va egress 2001:db8:7::/48",
		"show va --tree":           "pool uplink, pool ap-1, " + rules + ", va ingress 10.0.0.7/32",
		"show --tree --top 1":      "pool uplink, pool ap-1, va egress 10.0.0.7/32",
		"show alice --tree":        "pool uplink, pool ap-1, va egress 10.0.0.7/32",
		"show --shadow":            "",
		"show --pools":             "pool ap-1, pool uplink",
		"show --pools uplink":      "pool uplink",
		"show --pools --top 1":     "pool ap-1",
		"show --pools AP-*":        "pool ap-1",
		"show --pools *":           "pool ap-1, pool uplink",
		"show --pools * --top 1":   "pool ap-1",
		"show --pools --sort rate": "pool uplink, pool ap-1",
		"export":                   "pool ap-1, pool uplink, " + rules + ", va ingress 10.0.0.7/32",
	} {
		if got := names(r.rows(strings.Fields(args)...)); got != want {
			t.Errorf("%s: %s, want %s", args, got, want)
		}
	}
	r.ok("set", "va", "ingress", "10.0.0.8", "--rate", "1mbit", "--name", "upper") // similar to the name of the next pool
	r.ok("set", "up", "--new", "--rate", "1mbit")
	r.ok("set", "vb", "--new", "--rate", "1mbit")
	for args, says := range map[string]string{
		"show --pools ap-2":                                       "there is no pool ap-2; did you mean ap-1?",
		"show --pools quiet":                                      "there is no pool quiet; 'shapectl show --pools' lists the pools",
		"show --pools home-*":                                     "there is no pool that matches home-*; 'shapectl show --pools' lists the pools",
		"show --pools home-[":                                     "home-[",
		"show --pools ap-1 more":                                  "direction \"more\" is unknown",
		"show --tree --buckets":                                   "give one of them",
		"show --pools ap-1 egress":                                "leave the other arguments out",
		"set vb egress --rate 2mbit":                              "vb is a device without a rule for any",
		"set va --rate 1mbit":                                     "va is a device without a rule for any; write 'shapectl set --rate 1mbit va egress any'",
		"set up --each host --rate 1mbit":                         "each has no use in a pool",
		"set va egress 10.0.0.9 --note x":                         "rate is missing",
		"set va egress 10.0.0.9 --within ap-1 --guarantee 16mbit": "add up to 21mbit",
	} {
		r.refused(exitInput, says, strings.Fields(args)...)
	}
}

// What a pool above refuses is lost to the pool of its sender, and a pool says apart what it refused itself.
func TestShowWhoLoses(t *testing.T) {
	r := newRig(t)
	r.ok("set", "ap", "--new", "--rate", "8kbit", "--capacity", "20000", "--share", "member")
	for _, name := range []string{"flooder", "quiet"} {
		r.ok("set", name, "--new", "--rate", "1gbit", "--within", "ap")
	}
	r.ok("set", "elsewhere", "--new", "--rate", "1gbit")
	r.ok("set", "va", "egress", "10.0.0.7", "--within", "flooder")
	r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "8kbit", "--burst", "2000b", "--within", "flooder")
	r.ok("set", "va", "egress", "10.0.0.8", "--within", "quiet")
	r.send("10.0.0.8", 3, 1000)
	r.send("10.0.1.7", 10, 1000) // the rule itself passes two of them
	r.send("10.0.0.7", 100, 1000)
	dropped := func(args ...string) map[string][3]uint64 {
		of := map[string][3]uint64{}
		for _, row := range r.rows(args...) {
			of[row.Name+row.CIDR] = [3]uint64{row.DroppedPackets, row.DroppedBytes, row.RefusedPackets}
		}
		return of
	}
	all := dropped("show", "--tree")
	host := all["10.0.0.7/32"]
	if host[0] < 80 || host[1] != 1000*host[0] || host[2] != 0 || all["10.0.1.0/24"] != [3]uint64{8, 8000, 0} {
		t.Fatalf("the rules: %v", all)
	}
	want := map[string][3]uint64{
		"ap": {host[0] + 8, host[1] + 8000, host[0]}, "flooder": {host[0] + 8, host[1] + 8000, 0}, "quiet": {}, "elsewhere": {},
	}
	for _, args := range [][]string{{"show", "--tree"}, {"show"}, {"show", "--tree", "10.0.0.8"}, {"show", "--pools"}, {"show", "--pools", "flooder"}} {
		for name, of := range dropped(args...) {
			if pool, isPool := want[name]; isPool && of != pool {
				t.Errorf("%s: packets and bytes dropped, and packets refused by %s: %v, want %v", args, name, of, pool)
			}
		}
	}
	if got := r.ok("show", "--pools", "flooder"); !strings.Contains(got, "  dropped    ") {
		t.Errorf("show --pools says\n%s", got)
	}
	rows := r.rows("show", "ap", "--interval", "20ms")
	if rows[0].DroppedPercent != nil || rows[0].RefusedPercent != nil {
		t.Errorf("without packets: %+v", rows[0])
	}
}

// What passed is divided into what the guarantee covered and what was borrowed.
func TestShowBorrowed(t *testing.T) {
	r := newRig(t)
	r.ok("set", "uplink", "--new", "--rate", "100mbit")
	r.ok("set", "va", "egress", "10.0.0.7", "--rate", "50mbit", "--within", "uplink", "--guarantee", "8kbit")
	r.send("10.0.0.7", 100, 1000)
	rows := r.rows("show")
	uplink, rule := rows[0], rows[1]
	if uplink.PassedPackets != 100 || uplink.BorrowedPackets != 0 || uplink.GuaranteedPackets != 0 {
		t.Errorf("the pool: %+v", uplink)
	}
	if rule.GuaranteedBytes < 30e3 || rule.GuaranteedBytes > 34e3 || rule.BorrowedBytes != rule.PassedBytes-rule.GuaranteedBytes {
		t.Errorf("of %d bytes, %d were guaranteed and %d borrowed", rule.PassedBytes, rule.GuaranteedBytes, rule.BorrowedBytes)
	}
	rows = r.rows("show", "--interval", "20ms")
	if rows[1].BorrowedBits == nil || *rows[1].BorrowedBits != 0 {
		t.Errorf("borrowed without packets: %v", rows[1].BorrowedBits)
	}
}

// apply, diff, export and rollback treat pools as they treat rules.
func TestPoliciesWithPools(t *testing.T) {
	r := newRig(t)
	const text = `pools:
  uplink: {rate: 1gbit, share: member}
  ap-1: {rate: 100mbit, within: uplink}
devices:
  va: {egress: {10.0.0.7: {rate: 20mbit, within: ap-1}, 10.0.0.8: {within: uplink}}}
`
	path := r.policy(text)
	out := r.run("diff", path)
	if want := `2 rules to add on 1 device
2 pools to add
pools
  + ap-1      100mbit, within uplink
  + uplink    1gbit, share member
va egress
  + 10.0.0.7  20mbit, within ap-1
  + 10.0.0.8  within uplink
`; out.out != want || out.code != exitDiffers {
		t.Errorf("diff: %d, %s", out.code, out.out)
	}
	r.prints("2 rules added on 1 device\n2 pools added\n", "apply", path)
	r.prints("nothing to change\n", "diff", path)
	r.prints("nothing to change\n", "apply", path)
	again := r.policy(r.ok("export"))
	r.prints("nothing to change\n", "diff", again)

	other := r.policy(strings.NewReplacer("ap-1", "ap-2", "1gbit", "2gbit").Replace(text))
	out = r.run("diff", other)
	if want := `1 rule to change on 1 device
1 pool to add, 1 to change, 1 to remove
pools
  - ap-1      100mbit, within uplink
  + ap-2      100mbit, within uplink
  ~ uplink    rate 1gbit -> 2gbit
va egress
  ~ 10.0.0.7  within ap-1 -> ap-2
`; out.out != want {
		t.Errorf("diff: %s", out.out)
	}
	var differences []report.Difference
	testenv.Must(t, json.Unmarshal([]byte(r.run("diff", "-j", other).out), &differences))
	if d := differences[0]; d.Kind != report.KindPool || d.Pool != "ap-1" || d.Device != "" || d.CIDR != "" || d.Change != "remove" {
		t.Errorf("diff -j: %+v", d)
	}
	var applied report.Applied
	testenv.Must(t, json.Unmarshal([]byte(r.ok("apply", "-j", other)), &applied))
	if applied.Pools != (report.PoolChange{Added: 1, Changed: 1, Removed: 1}) || len(applied.Hooks) != 1 {
		t.Errorf("apply -j: %+v", applied)
	}
	if out := r.ok("rollback"); !strings.HasSuffix(out, "\n1 rule changed on 1 device\n1 pool added, 1 changed, 1 removed\n") {
		t.Errorf("rollback: %s", out)
	}
	r.prints("nothing to change\n", "diff", path)
	if got := r.run("apply", r.policy("devices: {nosuch: {egress: {10.0.0.7: 1mbit}}}\npools: {uplink: 1gbit}")); got.code != exitInput || !strings.Contains(got.err, "it would remove all 2 rules of va") {
		t.Errorf("apply without any device: %+v", got)
	}
}

func TestCompletionOfPools(t *testing.T) {
	r := newPoolRig(t)
	for args, want := range map[string]string{
		"set u":                            "uplink\n:4\n",
		"show --pools a":                   "ap-1\n:4\n",
		"set --kind pool a":                "ap-1\n:4\n",
		"delete --kind pool a":             "ap-1\n:4\n",
		"set --new a":                      "ap-1\n:4\n",
		"set x --share ":                   "none\nhost\nflow\nmember\n:4\n",
		"set x --within a":                 "ap-1\n:4\n",
		"set va egress 10.0.0.9 --within ": "ap-1\nuplink\n:4\n",
		"show a":                           "alice\nap-1\n:4\n",
		"delete a":                         "alice\nap-1\n:4\n",
		"explain a":                        "alice\nap-1\n:4\n",
	} {
		if got := r.run(strings.Split("__complete "+args, " ")...); got.out != want {
			t.Errorf("%s: %+v, want %q", args, got, want)
		}
	}
}

// A rule that leaves its pool loses what has no use outside.
func TestSetNamedWithin(t *testing.T) {
	r := newPoolRig(t)
	r.prints("va egress: 10.0.0.7 (\"alice\") gets 20mbit (2.5 MB/s), burst 750 kB (300 ms), within pool \"uplink\", 5mbit of it guaranteed; excess is dropped (gcra)\n",
		"set", "alice", "--within", "uplink")
	r.prints("va egress: 10.0.0.7 (\"alice\") gets 20mbit (2.5 MB/s), burst 750 kB (300 ms); excess is dropped (gcra)\n",
		"set", "alice", "--within", "none")
	if rows := r.rows("show", "alice"); !slices.ContainsFunc(rows, func(row shownRule) bool { return row.Within == "" && row.GuaranteeBits == 0 }) {
		t.Errorf("alice: %+v", rows)
	}
}

// serve adds the pools that the rules of a new device need, and leaves those that exist.
func TestWatchAddsPools(t *testing.T) {
	r := newRig(t)
	r.ok("set", "uplink", "--new", "--rate", "2gbit")
	r.watch(r.policy(`pools: {uplink: 1gbit, ap-1: {rate: 10mbit, within: uplink}, ap-2: 20mbit}
devices: {vc: {egress: {10.0.0.7: {within: ap-1}}}}
`))
	testenv.Veth(t, "vc", "vd")
	testenv.Eventually(t, "rules of vc", func() bool { return len(r.rows("show", "vc")) > 0 })
	r.prints("pool \"ap-1\" gets 10mbit (1.25 MB/s), burst 375 kB (300 ms), within pool \"uplink\"; excess is dropped (gcra)\n"+
		"pool \"uplink\" gets 2gbit (250 MB/s), burst 75 MB (300 ms); excess is dropped (gcra)\n"+
		"vc egress: 10.0.0.7 is limited only by pool \"ap-1\"\n", "show", "--sentences")
}

// Who has a part of the shares now is counted.
func TestShowSharers(t *testing.T) {
	r := newRig(t)
	r.ok("set", "uplink", "--new", "--rate", "8kbit", "--capacity", "100000", "--share", "member")
	for _, host := range []string{"10.0.0.7", "10.0.0.8", "10.0.0.9"} {
		r.ok("set", "va", "egress", host, "--within", "uplink")
	}
	r.send("10.0.0.7", 9, 1000)
	r.send("10.0.0.8", 9, 1000)
	for _, args := range [][]string{{"show", "--pools"}, {"show", "--tree"}, {"show", "--wide"}} {
		if rows := r.rows(args...); rows[0].ActiveSharers == nil || *rows[0].ActiveSharers != 2 || len(rows) > 1 && rows[1].ActiveSharers != nil {
			t.Errorf("%s: %+v", args, rows)
		}
	}
}

// asked is the only hook that is explained, without a count of packets.
func (r *rig) asked(args string) report.Stop {
	r.t.Helper()
	return r.explain(append([]string{"--interval", "10ms"}, strings.Fields(args)...)...).Hooks[0]
}

func TestExplainPools(t *testing.T) {
	r := newRig(t)
	r.ok("set", "uplink", "--new", "--rate", "8kbit", "--capacity", "60000")
	r.ok("set", "ap-1", "--new", "--rate", "8kbit", "--capacity", "4000", "--within", "uplink")
	r.ok("set", "uplink", "--share", "member") // the store grows: setSlow needs room for more labels
	r.setSlow("va egress 10.0.0.7 --rate 8kbit --within ap-1 --guarantee 8kbit", "va egress 2001:db8:7::/48 --within ap-1")
	r.send("10.0.0.7", 4, 1000)
	if a := r.asked("va egress 10.0.0.7"); !a.Conforms || a.Verdict != "pass" || a.GuaranteedBy == nil || *a.GuaranteedBy != "10.0.0.7/32" || a.RefusedBy != nil || a.WaitNS != 0 {
		t.Errorf("what is guaranteed: %+v", a)
	}
	a := r.asked("va egress 2001:db8:7::1 --bytes 1000")
	if a.Conforms || a.Verdict != "drop" || a.GuaranteedBy != nil || len(a.BorrowedBy) > 0 || a.RefusedBy == nil ||
		*a.RefusedBy != "ap-1" || a.RefusedReason != report.Capacity || a.Bucket != nil || *a.DecidedBy != "ap-1" || *a.CapacityBytes != 4000 {
		t.Errorf("what a pool has no room for: %+v", a)
	}
	if second := uint64(1e9); a.WaitNS < 900*second || a.WaitNS > 1000*second {
		t.Errorf("it would conform in %d ns", a.WaitNS)
	}
	ap, uplink := a.Pools[0], a.Pools[1]
	if ap.Name != "ap-1" || ap.Within != "uplink" || ap.Conforms || ap.LevelBytes < 3900 || ap.CapacityBytes != 4000 || ap.PassedPackets != 4 || ap.RefusedPackets != 0 {
		t.Errorf("the pool: %+v", ap)
	}
	if uplink.Name != "uplink" || !uplink.Conforms || uplink.Share != "member" || uplink.Sharer != "ap-1" || uplink.WithinShare == nil || !*uplink.WithinShare {
		t.Errorf("the pool above: %+v", uplink)
	}
}

// explain watches packets for a while, and finds the pool that refuses them.
func TestExplainWatches(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.ok("set", "ap", "--new", "--rate", "10gbit", "--share", "member")
	r.ok("set", "home", "--new", "--rate", "8kbit", "--capacity", "2000", "--within", "ap")
	r.ok("set", "va", "egress", "10.0.0.7", "--within", "home")
	sender := testenv.NewSender(t, "va")
	frame := frameTo("10.0.0.7", 1000)
	stop, stopped := make(chan bool), make(chan error)
	go func() {
		for {
			select {
			case <-stop:
				close(stopped)
				return
			default:
				if err := sender.Send(frame); err != nil {
					stopped <- err
					return
				}
			}
		}
	}()
	var paths []report.Path
	testenv.Must(t, json.Unmarshal([]byte(r.ok("explain", "va", "egress", "10.0.0.7", "-j")), &paths))
	text := bare(r.ok("explain", "va", "egress", "10.0.0.7"))
	close(stop)
	testenv.Must(t, <-stopped)
	hook := paths[0].Hooks[0]
	if hook.LimitedBy == nil || *hook.LimitedBy != "home" || hook.RecentDrops == 0 || hook.RecentDrops > hook.RecentPackets || hook.WatchedNS < 5e8 ||
		hook.Pools[0].RecentRefusals == 0 || hook.Pools[1].RecentRefusals != 0 {
		t.Errorf("%+v", hook.Passage)
	}
	if !strings.Contains(text, "matches, and pool home decides; in the last ") || !strings.Contains(text, " home: 8kbit; full") {
		t.Errorf("it says %s", text)
	}
}

// explain takes the name of a pool, if no rule has it.
func TestExplainPool(t *testing.T) {
	t.Parallel()
	r := newPoolRig(t)
	var pool struct {
		report.ExplainedPool
		Levels  []shownRule `json:"levels"`
		Members []shownRule `json:"members"`
	}
	testenv.Must(t, json.Unmarshal([]byte(r.ok("explain", "ap-1", "-j")), &pool))
	if pool.Pool != "ap-1" || pool.LimitedBy != nil || names(pool.Levels) != "pool ap-1, pool uplink" ||
		names(pool.Members) != "va egress 10.0.0.7/32, va egress 2001:db8:7::/48" || pool.Levels[0].UseBits == nil {
		t.Errorf("%+v", pool)
	}
	testenv.Must(t, json.Unmarshal([]byte(r.ok("explain", "ap-1", "-j", "--interval", "2s")), &pool))
	if interval := pool.Levels[0].IntervalNS; interval == nil || *interval < 2e9 {
		t.Errorf("it counted for %v ns", interval)
	}
	r.refused(exitInput, "explain: --interval 1ms is out of range; use 10ms to 1h0m0s", "explain", "ap-1", "--interval", "1ms")
	if got := r.ok("explain", "uplink"); !strings.HasPrefix(got, "in the last ") || !strings.Contains(got, "pool uplink limited none of its packets") {
		t.Errorf("it says %s", got)
	}
	r.ok("set", "va", "--new", "--rate", "8mbit")
	r.ok("set", "va ingress", "--new", "--rate", "1mbit", "--within", "va")
	for _, test := range []struct{ question, want string }{
		{"va", "pool va limited none of its packets|pool va ingress limited none of its packets"}, {"va ingress", "pool va ingress limited none of its packets"},
	} {
		got := r.ok(append([]string{"explain", "--interval", "10ms"}, strings.Fields(test.question)...)...)
		for i, part := range strings.Split(got, "\n\n") {
			if parts := strings.Split(test.want, "|"); i >= len(parts) || !strings.Contains(part, parts[i]) {
				t.Errorf("explain %s says %s", test.question, got)
			}
		}
	}
	r.ok("set", "alice", "--new", "--rate", "1mbit")
	if got := r.ok("explain", "alice"); !strings.Contains(got, "10.0.0.7/32 decides") {
		t.Errorf("of the name of rules and of a pool, it says %s", got)
	}
	r.refused(exitInput, "no rule or pool has that name; did you mean 'shapectl explain uplink'?", "explain", "uplnik")
	r.refused(exitInput, "such as 'shapectl explain va egress 10.0.0.7'; 'shapectl show va egress' lists what limits it", "explain", "va", "egress")
}

// Of a chain of pools, the one that is full is named, with the wait for room there.
func TestExplainPoolInTheMiddle(t *testing.T) {
	r := newRig(t)
	r.ok("set", "uplink", "--new", "--rate", "8kbit", "--capacity", "60000")
	r.ok("set", "ap-1", "--new", "--rate", "8kbit", "--capacity", "4000", "--within", "uplink")
	r.ok("set", "home-7", "--new", "--rate", "16kbit", "--capacity", "60000", "--within", "ap-1")
	r.setSlow("va egress 10.0.0.7 --within home-7")
	r.send("10.0.0.7", 4, 1000)
	a := r.asked("va egress 10.0.0.7 --bytes 1500")
	home, ap, uplink := a.Pools[0], a.Pools[1], a.Pools[2]
	if a.RefusedBy == nil || *a.RefusedBy != "ap-1" || a.RefusedReason != report.Capacity || home.Full || !home.Conforms || !ap.Full || ap.Conforms || uplink.Full || !uplink.Conforms {
		t.Errorf("%+v", a)
	}
	// At 1 B/s, 1500 of 4000 bytes are free after some 1500 s.
	if second := uint64(1e9); ap.WaitNS < 1400*second || ap.WaitNS > 1500*second || a.WaitNS != ap.WaitNS || home.WaitNS+uplink.WaitNS != 0 {
		t.Errorf("the packet waits %d ns, and %d, %d and %d for room", a.WaitNS, home.WaitNS, ap.WaitNS, uplink.WaitNS)
	}
	text := bare(r.ok("explain", "va", "egress", "10.0.0.7", "--bytes", "1500", "--interval", "10ms"))
	if !strings.HasPrefix(text, "to 10.0.0.7, by va egress: a packet of 1500 bytes is dropped now by pool ap-1; it conforms in ") || !strings.Contains(text, " ap-1: 8bit; full") {
		t.Error(text)
	}
}

// Which flow shares a pool must be known.
func TestExplainPoolSharedByFlow(t *testing.T) {
	r := newRig(t)
	r.ok("set", "uplink", "--new", "--rate", "1mbit", "--share", "flow")
	r.ok("set", "va", "egress", "10.0.0.7", "--within", "uplink")
	const flow = "udp,192.0.2.1:5000,10.0.0.7:53"
	if a := r.asked("va egress 10.0.0.7 --flow " + flow); a.Pools[0].Sharer != flow {
		t.Errorf("the flow: %+v", a.Pools[0])
	}
	s := r.explain("va", "egress", "10.0.0.7").Hooks[0]
	if p := s.Pools[0]; s.Verdict != "pass" || p.Sharer != "" || p.WithinShare != nil || *p.ActiveSharers != 0 ||
		!strings.Contains(s.Note, "up to 1mbit, shared by the flows of uplink: one that sends less than its part loses nothing; for one of them, try --flow "+flow) {
		t.Errorf("without a flow: %+v", s)
	}
}

// A subscriber with several addresses, which have a pool of their own.
func newSubscriberRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	r.ok("set", "ap-1", "--new", "--rate", "100mbit")
	r.ok("set", "ap-2", "--new", "--rate", "100mbit")
	r.ok("set", "home", "--new", "--rate", "50mbit", "--within", "ap-1")
	r.ok("set", "va", "egress", "10.0.0.7", "--within", "home", "--name", "alice")
	r.ok("set", "va", "egress", "2001:db8:7::/48", "--within", "home", "--name", "alice")
	return r
}

// Whoever names all rules of a pool means the pool.
func TestSetNamedWithOwnPool(t *testing.T) {
	r := newSubscriberRig(t)
	r.prints("pool \"home\" gets 60mbit (7.5 MB/s), burst 2.25 MB (300 ms), within pool \"ap-1\"; excess is dropped (gcra)\n",
		"set", "alice", "--rate", "60mbit")
	r.prints("pool \"home\" gets 60mbit (7.5 MB/s), burst 750 kB (100 ms), shared fairly by its flows, within pool \"ap-1\"; excess is dropped (gcra)\n",
		"set", "alice", "egress", "--share", "flow", "--burst", "100ms")
	// Where the rules are is of the rules.
	if out := r.ok("set", "alice", "--within", "ap-1", "--weight", "2"); strings.Count(out, `is limited only by pool "ap-1"`) != 2 {
		t.Errorf("within another pool: %s", out)
	}
	r.ok("set", "alice", "--within", "home", "--weight", "1")
	for _, row := range r.rows("show", "alice") {
		if row.Kind == report.KindRule && (row.Rate != 0 || row.Within != "home") {
			t.Errorf("a rule of alice: %+v", row)
		}
	}
	if out := r.ok("set", "alice", "--shadow", "rate=5mbit"); strings.Count(out, "\n") != 1 || !strings.Contains(out, `shadow: pool "home" gets 5mbit`) {
		t.Errorf("a shadow: %s", out)
	}
	r.refused(exitInput, "--fail is an option of these rules, but --rate 70mbit of their pool: home has 60mbit; give them in two commands", "set", "alice", "--rate", "70mbit", "--fail", "closed")
	if out := r.ok("set", "alice", "--fail", "closed"); strings.Count(out, `is limited only by pool "home"; what cannot be metered is dropped`) != 2 {
		t.Errorf("an option of rules: %s", out)
	}

	// The error names the pools, and commands that say what is meant.
	r.ok("set", "va", "ingress", "10.0.0.7", "--within", "ap-1", "--name", "alice")
	r.ok("set", "va", "ingress", "10.0.0.8", "--within", "ap-1")
	r.refused(exitInput, "these rules share the rate of a pool with others: home has 60mbit, ap-1 has 100mbit; nothing was changed; "+
		"name a pool, as in 'shapectl set --kind pool --rate 8mbit --confirm 1m0s home', or a rule, as in 'shapectl set --rate 8mbit --confirm 1m0s va egress 10.0.0.7/32'",
		"set", "alice", "--rate", "8mbit", "--confirm", "60s")
	r.refused(exitInput, "these rules share the rate of a pool with others: ap-1 has 100mbit; nothing was changed; ", "set", "alice", "ingress", "--rate", "8mbit")
	r.ok("set", "--within", "home", "--rate", "8mbit", "va", "ingress", "10.0.0.7/32")
	r.refused(exitInput, "only some of these rules have a rate of their own, and others that of a pool: home has 60mbit", "set", "alice", "--rate", "9mbit")
	r.prints("va ingress: 10.0.0.7 (\"alice\") gets 9mbit (1.125 MB/s), burst 337.5 kB (300 ms), within pool \"home\"; excess is dropped (gcra)\n",
		"set", "alice", "ingress", "--rate", "9mbit")
}

// Whoever names all rules of pools with one rate, as of both directions of a machine, means all these pools.
func TestSetNamedWithOwnPools(t *testing.T) {
	r := newRig(t)
	for _, direction := range []string{"egress", "ingress"} {
		r.ok("set", "tap "+direction, "--new", "--rate", "50mbit")
		for _, network := range []string{"0.0.0.0/0", "::/0"} {
			r.ok("set", "va", direction, network, "--within", "tap "+direction, "--name", "bigco")
		}
	}
	out := r.ok("set", "bigco", "--rate", "60mbit", "--confirm", "1h")
	for _, says := range []string{`pool "tap egress" gets 60mbit`, `pool "tap ingress" gets 60mbit`, "not confirmed: reverts in"} {
		if !strings.Contains(out, says) {
			t.Errorf("set says %q, want %q in it", out, says)
		}
	}
	r.ok("rollback")
	r.ok("set", "bigco", "egress", "--rate", "70mbit")
	r.refused(exitInput, "the pools of these rules have different rates: tap egress has 70mbit, tap ingress has 50mbit; nothing was changed; ", "set", "bigco", "--rate", "80mbit")
	r.ok("set", "--rate", "80mbit", "bigco", "ingress")
	r.ok("set", "va", "egress", "any", "--rate", "80mbit", "--within", "none")
}

// Both directions may be egress of two devices.
func TestSetNamedWithOwnPoolsOfDevices(t *testing.T) {
	r := newRig(t)
	for device, pool := range map[string]string{"va": "oak down", "vb": "oak up"} {
		r.ok("set", pool, "--new", "--rate", "50mbit")
		r.ok("set", device, "egress", "10.0.0.7", "--within", pool, "--name", "oak")
	}
	r.ok("set", "oak up", "--rate", "5mbit")
	for _, words := range [][]string{{"oak"}, {"oak", "egress"}} {
		r.refused(exitInput, "the pools of these rules have different rates: oak down has 50mbit, oak up has 5mbit; nothing was changed; ",
			append([]string{"set", "--rate", "80mbit"}, words...)...)
	}
}

// A pool may let through less than the rate that a rule in it got. Somebody may not count many rules.
func TestSetSaysMore(t *testing.T) {
	r := newRig(t)
	r.ok("set", "home", "--new", "--rate", "10mbit")
	if out := r.ok("set", "va", "egress", "any", "--rate", "20mbit", "--within", "home"); !strings.HasSuffix(out, ")\npool home still limits this to 10mbit\n") {
		t.Errorf("set says %q", out)
	}
	for i := range 11 {
		r.ok("set", "va", "egress", fmt.Sprintf("10.0.0.%d", i), "--rate", "1mbit", "--name", "alice")
	}
	if out := r.ok("set", "alice", "--rate", "2mbit"); strings.Count(out, "gets 2mbit") != 11 || !strings.HasSuffix(out, "\n11 rules\n") {
		t.Errorf("set says %s", out)
	}
}

// The first rule or pool of a namespace leaves nothing if it is reverted.
func TestFirstSetConfirm(t *testing.T) {
	r := newRig(t)
	for _, args := range []string{"set ap-1 --new --rate 1mbit", "set va egress 10.0.0.9 --rate 1mbit"} {
		r.ok(append(strings.Fields(args), "--confirm", "1h")...)
		r.ok("rollback")
		if pins := r.pins(); len(pins) > 0 {
			t.Errorf("%s, reverted: %v", args, pins)
		}
	}
}

// A change by set reverts as one by apply does.
func TestSetConfirm(t *testing.T) {
	r := newSubscriberRig(t)
	before := r.ok("export")
	for _, args := range []string{"set alice --rate 60mbit", "set alice --fail closed", "set va egress 10.0.0.9 --rate 1mbit", "set vb ingress any --rate 1mbit",
		"set ap-1 --rate 200mbit", "set ap-3 --new --rate 1mbit"} {
		out := r.ok(append(strings.Fields(args), "--confirm", "1h")...)
		if !strings.Contains(out, "not confirmed: reverts in ") || r.ok("export") == before {
			t.Errorf("%s: %s", args, out)
		}
		r.refused(exitInput, "not confirmed yet", "set", "alice", "--rate", "2mbit")
		r.ok("rollback")
		if after := r.ok("export"); after != before {
			t.Errorf("%s, reverted: %s", args, after)
		}
	}
	r.ok("set", "alice", "--rate", "60mbit", "--confirm", "1h")
	if out := r.ok("confirm"); !strings.HasSuffix(out, " ago, which stays\n1 pool changed\n") {
		t.Errorf("confirm: %s", out)
	}
	if got := r.run("set", "alice", "--rate", "60mbit", "--confirm", "1h"); got.code != exitDone || got.err != "shapectl: nothing was changed, so there is nothing to confirm, and nothing reverts\n" {
		t.Errorf("repeated: %+v", got)
	}
	r.refused(exitInput, "--confirm 1ms is out of range", "set", "alice", "--rate", "70mbit", "--confirm", "1ms")
	r.ok("set", "vb", "egress", "10.0.0.7", "--rate", "1mbit")
	r.refused(exitInput, "match the other address", "set", "vb", "egress", "10.0.0.7", "--rate", "1mbit", "--match", "src", "--confirm", "1h")
}

// flush deletes the device's own pools, and says which others it leaves without a rule, and how to delete them.
func TestFlushLeavesPools(t *testing.T) {
	r := newRig(t)
	r.taps(2)
	r.ok("apply", r.policy(`pools: {uplink: {rate: 1gbit}, other: {rate: 1gbit}}
devices: {tap*: {pool: {rate: 5mbit, within: uplink}, egress: {pool: 1mbit, any: {}}, ingress: {any: {}}}}
`))
	for _, c := range []struct{ flush, left, says string }{
		{"flush tap0 egress", "pool other, pool tap0, pool tap1, pool tap1 egress, pool uplink", ""},
		{"flush tap0", "pool other, pool tap1, pool tap1 egress, pool uplink", ""},
		{"flush tap*", "pool other, pool uplink", "shapectl: 1 pool left without a rule: uplink; 'shapectl delete uplink' deletes the first, 'shapectl flush --all' all rules and pools\n"},
	} {
		got := r.run(strings.Fields(c.flush)...)
		if left := names(r.rows("show", "--pools")); got.code != exitDone || got.err != c.says || left != c.left {
			t.Errorf("%s: %+v, and leaves %s", c.flush, got, left)
		}
	}
	r.ok("flush", "--all")
}
