package main

import (
	"encoding/json"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/line"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// homeLine is a line that needs no fq, so that tests of all but queues run under any kernel.
const homeLine = "line va --down 50mbit --up 10mbit --link docsis --no-queue"

// fields are the words of a command line.
func fields(line string) []string { return strings.Fields(line) }

// in runs a command line that must succeed, whatever it warns of.
func (r *rig) in(line string) string {
	r.t.Helper()
	got := r.run(fields(line)...)
	if got.code != exitDone {
		r.t.Fatalf("shapectl %s: exit %d, %s", line, got.code, got.err)
	}
	return got.out
}

// passedBytes are the bytes that passed the rules of va in a direction.
func (r *rig) passedBytes(direction string) (bytes uint64) {
	r.t.Helper()
	for _, rule := range r.show("va", direction) {
		bytes += rule.PassedBytes
	}
	return bytes
}

// A line is there after one command, and goes after another. All else stays.
func TestLine(t *testing.T) {
	t.Parallel()
	for _, hook := range []string{"tcx", "clsact"} {
		t.Run(hook, func(t *testing.T) {
			r := newRig(t)
			r.env["SHAPECTL_HOOK"] = hook
			testenv.Veth(t, "xa", "xb")
			r.ok(fields("set uplink --new --rate 1gbit")...)
			r.ok(fields("set xa egress 10.0.0.0/24 --rate 5mbit --within uplink")...)
			r.ok(fields("set va egress 192.168.100.1 --rate unlimited")...)
			before := r.ok("export")
			want := "va egress: uploads get 9.5mbit, 95 % of 10mbit, in equal parts for all connections; excess packets are marked by ECN if they allow it, else dropped\n" +
				"va ingress: downloads get 42.5mbit, 85 % of 50mbit, in equal parts for all connections; excess packets are marked by ECN if they allow it, else dropped\n"
			if got := r.ok(fields(homeLine)...); got != want+"4 rules added on 1 device\n2 pools added\n" {
				t.Errorf("it says %s", got)
			}
			if got := r.ok(fields(homeLine)...); got != want+"nothing to change\n" {
				t.Errorf("once more, it says %s", got)
			}
			with := r.ok("export")
			for _, line := range []string{
				"va egress: {rate: 9.5mbit, capacity: 59375b, excess: ecn, share: flow, owner: va egress, line: va}",
				"va ingress: {rate: 42.5mbit, capacity: 265625b, excess: ecn, share: flow, owner: va ingress, line: va}",
				"uplink: 1gbit", "192.168.100.1: unlimited", "10.0.0.0/24: {rate: 5mbit, within: uplink}",
			} {
				if !strings.Contains(with, line+"\n") {
					t.Errorf("not in force: %s; there is\n%s", line, with)
				}
			}

			r.send("10.0.0.7", 5, 1000)
			passed := r.passedBytes("egress")
			if passed == 0 {
				t.Fatal("no packet met the rules")
			}
			if got := r.ok(fields("line va --down 50mbit --up 20mbit --link docsis --no-queue")...); !strings.HasSuffix(got, "\n1 pool changed\n") {
				t.Errorf("with another rate, it says %s", got)
			}
			if now := r.passedBytes("egress"); now != passed || !strings.Contains(r.ok("export"), "va egress: {rate: 19mbit") {
				t.Errorf("after a change of the rate, the counters have %d bytes, and had %d: %s", now, passed, r.ok("export"))
			}

			if got := r.in("line va --up 10mbit --no-queue"); !strings.HasSuffix(got, "2 rules changed, 2 removed on 1 device\n1 pool changed, 1 removed\n") {
				t.Errorf("without downloads, it says %s", got)
			}
			if left := r.show("va", "ingress"); len(left) != 0 || len(r.show("va", "egress")) != 3 {
				t.Errorf("left of downloads: %+v", left)
			}
			if got := r.ok(fields("line va off")...); got != "2 rules removed on 1 device\n1 pool removed\n" {
				t.Errorf("off says %s", got)
			}
			if after := r.ok("export"); after != before {
				t.Errorf("before there was\n%sand after\n%s", before, after)
			}
			if got := r.ok(fields("line va off")...); got != "nothing to remove: there is no line on va\n" {
				t.Errorf("off once more says %s", got)
			}
			r.ok("flush", "--all")
			r.ok(fields(homeLine)...)
			r.ok(fields("line va off")...)
			if pins := r.pins(); len(pins) != 0 {
				t.Errorf("left behind: %v", pins)
			}
		})
	}
}

// What --dry-run prints is the policy that is in force without it. It changes nothing.
func TestLineDryRun(t *testing.T) {
	r := newRig(t)
	text := r.in(homeLine + " --dry-run")
	if pins := r.pins(); len(pins) != 0 {
		t.Errorf("it left behind %v", pins)
	}
	if !strings.HasPrefix(text, "# The line on va, made by:\n#\n#     shapectl "+homeLine+"\n#\n") {
		t.Errorf("it begins with other lines: %s", text)
	}
	file := r.policy(text)
	r.ok("apply", file)
	if got := r.ok(fields(homeLine)...); !strings.HasSuffix(got, "\nnothing to change\n") {
		t.Errorf("after apply, line says %s", got)
	}
	r.ok("flush", "--all")
	r.ok(fields(homeLine)...)
	r.ok("diff", file)
	if got := r.ok("apply", file); got != "nothing to change\n" {
		t.Errorf("after line, apply says %s", got)
	}
	if again := r.in(homeLine + " --dry-run"); again != text {
		t.Errorf("with the line in force, it prints %s", again)
	}
	if got := r.run(fields("line va --up 50000 --dry-run")...); !strings.Contains(got.err, "note: --up 50000 without a unit is 50000 bit/s") {
		t.Errorf("of a rate without a unit, it says %q", got.err)
	}
	// The policy of a line that queues is valid, too, though this kernel may lack fq.
	queues, err := line.Line{Device: "va", Up: line.Direction{Rate: 10_000_000}, Down: line.Direction{Rate: 50_000_000}, Share: policy.ShareFlow}.Policy()
	testenv.Must(t, err)
	file = r.policy(string(queues))
	if got := r.run("diff", file); got.code != exitDiffers || !strings.Contains(got.out, "delay") {
		t.Errorf("diff: exit %d, %s%s", got.code, got.out, got.err)
	}
}

func TestLineJSON(t *testing.T) {
	r := newRig(t)
	var l report.Line
	testenv.Must(t, json.Unmarshal([]byte(r.in(homeLine+" -j")), &l))
	if l.Device != "va" || len(l.Directions) != 2 || l.Directions[0].Rate != 9_500_000 || l.Directions[1].LineRate != 50_000_000 || l.Applied == nil || l.Applied.Pools.Added != 2 {
		t.Errorf("it is %+v", l)
	}
	text := r.in(homeLine + " --dry-run")
	testenv.Must(t, json.Unmarshal([]byte(r.in(homeLine+" --dry-run -j")), &l))
	if l.Applied != nil || l.Policy != text {
		t.Errorf("with --dry-run it is %+v", l)
	}
	var a report.Applied
	testenv.Must(t, json.Unmarshal([]byte(r.in("line va off -j")), &a))
	if a.Pools.Removed != 2 {
		t.Errorf("off: %+v", a)
	}
	testenv.Must(t, json.Unmarshal([]byte(r.in("line va off -j")), &a))
	if a.Pools.Removed != 0 || len(a.Hooks) != 0 {
		t.Errorf("off once more: %+v", a)
	}
}

// Hosts have equal parts where they have their own addresses on the line.
func TestLineFair(t *testing.T) {
	r := newRig(t)
	testenv.Veth(t, "lan", "host")
	forward := func(value string) {
		testenv.Must(t, os.WriteFile("/proc/sys/net/ipv4/conf/all/forwarding", []byte(value), 0))
	}
	is := func(flags, share, warns string) {
		t.Helper()
		got := r.run(fields(homeLine + " --dry-run" + flags)...)
		match := strings.Contains(got.out, "match: src") && strings.Contains(got.out, "match: dst")
		share, behind, _ := strings.Cut(share, " behind ")
		nat := strings.Count(got.out, "nat: true") == 2
		if got.code != exitDone || strings.Count(got.out, "share: "+share) != 2 || nat != (behind == "NAT") || match != (share == "host" && !nat) {
			t.Errorf("%s: exit %d, not shared by %s: %s%s", flags, got.code, share, got.out, got.err)
		}
		if !strings.Contains(got.err, warns) || warns == "" && got.err != "" {
			t.Errorf("%s: it warns %q, want %q", flags, got.err, warns)
		}
	}
	testenv.Must(t, address("va", "203.0.113.5/24"))
	testenv.Must(t, address("lan", "192.168.1.1/24"))
	forward("0")
	is("", "flow", "")
	is(" --fair host", "host", "")
	forward("1")
	is("", "host", "")
	hide := func(family string) {
		t.Helper()
		r.sh("nft 'table " + family + " t { chain c { type nat hook postrouting priority srcnat; }; }'")
	}
	hide("ip6")
	is("", "host", "")
	hide("ip")
	is("", "host behind NAT", "")
	is(" --fair flow", "flow", "")
	is(" --fair host", "host behind NAT", "")
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "lan")))
	testenv.Veth(t, "lan", "host")
	testenv.Must(t, address("lan", "198.51.100.1/24"))
	is("", "host", "")

	r.in(homeLine)
	for _, rule := range r.show("va") {
		if want := map[string]string{"egress": "src", "ingress": "dst"}[rule.Direction]; rule.Match != want {
			t.Errorf("%s matches %s", rule.Direction, rule.Match)
		}
	}
	// What somebody else set keeps its match, where no line needs the other one.
	r.ok("flush", "--all")
	r.ok(fields("set va egress 10.0.0.1 --rate unlimited --match src")...)
	if text := r.in(homeLine + " --fair flow --dry-run"); strings.Count(text, "match:") != 1 || !strings.Contains(text, "match: src") {
		t.Errorf("beside a rule that matches src: %s", text)
	}
	r.in(homeLine + " --fair flow")

	testenv.Must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: testenv.Link(t, "lan").Attrs().Index, Gw: net.IPv4(198, 51, 100, 2)}))
	if got := r.run(fields(homeLine + " --fair flow --dry-run")...); !strings.Contains(got.err, "va: the default route leaves by lan; if that is the line, give its name instead") {
		t.Errorf("it warns %q", got.err)
	}
}

// The page shows what line says with fq, which the kernel that tests it may lack.
func TestLinePage(t *testing.T) {
	const page = "../../docs/for/line.md"
	text, err := os.ReadFile(page)
	testenv.Must(t, err)
	l := line.Line{Device: "eth0", Share: policy.ShareHost, Up: line.Direction{Rate: 10_000_000}, Down: line.Direction{Rate: 50_000_000}}
	for _, d := range directionsOf(l) {
		if !strings.Contains(string(text), "\n"+d.Sentence+"\n") {
			t.Errorf("%s lacks: %s", page, d.Sentence)
		}
	}
}
