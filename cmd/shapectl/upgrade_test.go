package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// earlierBuilds are commits whose pins have other layouts than those of this build.
var earlierBuilds = []struct{ commit, why string }{
	{"259e853", "the second layout, without changes of many rules"},
	{"7c22767", "the third, without a queue"},
	{"204a9f3", "the fourth"},
	{"2742705", "the fourth by its number, with other offsets in struct rule"},
	{"5a96c5f", "one that says on which devices there are rules of another build"},
}

// buildOf builds the program of an earlier commit from the history of this repository.
func buildOf(t *testing.T, commit string) (program string) {
	t.Helper()
	archive, err := exec.Command("git", "-C", "../..", "archive", commit).Output()
	if err != nil {
		testenv.Skip(t, "there is no history with commit "+commit+" to build an earlier version from")
	}
	dir := t.TempDir()
	unpack := exec.Command("tar", "x", "-C", dir)
	unpack.Stdin = bytes.NewReader(archive)
	program = filepath.Join(dir, "earlier")
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", program, "./cmd/shapectl")
	build.Dir, build.Env = dir, append(os.Environ(), "CGO_ENABLED=0") // as by make, whose packages are in the cache
	for _, cmd := range []*exec.Cmd{unpack, build} {
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", cmd.Args, err, out)
		}
	}
	return program
}

// Limits that an earlier build has set stay in force, and no command of this one
// changes anything of them until they are flushed.
func TestLimitsOfEarlierBuilds(t *testing.T) {
	for _, earlier := range earlierBuilds {
		t.Run(earlier.commit, func(t *testing.T) {
			t.Parallel()
			program := buildOf(t, earlier.commit)
			for _, hook := range []loader.Mode{loader.TCX, loader.Clsact} {
				t.Run(string(hook), func(t *testing.T) { testEarlierBuild(t, program, hook) })
			}
		})
	}
}

// A build is another version of shapectl, at work in a rig.
type build struct {
	*rig
	program string
}

func (b build) run(args ...string) result {
	b.t.Helper()
	cmd := b.command(args...)
	cmd.Path = b.program
	return b.result(cmd)
}

func (b build) ok(line string) string {
	b.t.Helper()
	got := b.run(strings.Fields(line)...)
	if got.code != exitDone {
		b.t.Fatalf("the earlier build: %s: exit %d, %s", line, got.code, got.err)
	}
	return got.out
}

// meters sends packets, and ends the test unless the build's rule counts each
// of them, and what it lets through is what arrives.
func (b build) meters() {
	b.t.Helper()
	counted := func() (passed, dropped, received uint64) {
		var rules []shownRule
		if err := json.Unmarshal([]byte(b.ok("show -j va egress")), &rules); err != nil || len(rules) != 1 {
			b.t.Fatalf("show -j: %v, %v", rules, err)
		}
		return rules[0].PassedPackets, rules[0].DroppedPackets, testenv.Link(b.t, "vb").Attrs().Statistics.RxPackets
	}
	passed, dropped, received := counted()
	b.send("10.0.0.7", 20, 1000)
	passed2, dropped2, received2 := counted()
	if passed2-passed+dropped2-dropped != 20 || received2-received != passed2-passed || dropped2 == dropped {
		b.t.Errorf("of 20 packets %d passed and %d were dropped, and %d arrived", passed2-passed, dropped2-dropped, received2-received)
	}
}

// attached is all pins but alive and lock, which have no rules, and what is attached to va.
func (r *rig) attached() []string {
	index := testenv.Link(r.t, "va").Attrs().Index
	chain, err := netinfo.Chain(index, policy.Egress, nil)
	testenv.Must(r.t, err)
	found := slices.DeleteFunc(r.pins(), func(pin string) bool { return slices.Contains([]string{"alive", "lock"}, filepath.Base(pin)) })
	for _, entry := range chain {
		text, err := json.Marshal(entry)
		testenv.Must(r.t, err)
		found = append(found, string(text))
	}
	return found
}

func testEarlierBuild(t *testing.T, program string, hook loader.Mode) {
	const set = "set va egress 10.0.0.0/24 --rate 8kbit --capacity 5000"
	r := newRig(t)
	r.env["SHAPECTL_HOOK"] = string(hook)
	old := build{r, program}
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	testenv.Must(t, os.WriteFile(policy, []byte("devices:\n  va:\n    egress:\n      10.0.0.0/24: 1mbit\n"), 0o600))

	old.ok(set)
	old.meters()
	shown, attached := old.ok("show"), r.attached()
	for _, line := range []string{
		"show", "show -j --wide --buckets", "ask va egress 10.0.0.7", "export", "diff " + policy, "explain va egress 10.0.0.7",
		set, "set va egress 10.0.1.0/24 --rate 1mbit --each host", "delete va egress 10.0.0.0/24",
		"apply " + policy, "apply " + policy + " --confirm 10s", "confirm", "rollback",
		"pool show", "pool show uplink", "pool set uplink --rate 1mbit", "pool delete uplink", "set va egress 10.0.1.0/24 --within uplink",
		"set vb egress 10.0.0.0/24 --rate 1mbit", // beside them nobody could export all
	} {
		got := r.run(strings.Fields(line)...)
		if got.code != exitKernel || !strings.Contains(got.err, "rules of va egress: "+maps.ErrOtherLayout.Error()) ||
			!strings.Contains(got.err, "nothing was changed") || !strings.Contains(got.err, "shapectl flush") {
			t.Errorf("shapectl %s: exit %d: %s", line, got.code, got.err)
		}
	}
	r.address("10.0.0.1/24")
	says := regexp.MustCompile(`(?s)^packets to 10.0.0.7 leave by va, then vb\n  va egress: not known; the rules here cannot be read: .*\n  path +(tcx|clsact) shapectl`)
	if got := r.run("explain", "10.0.0.7"); got.code != exitKernel || !says.MatchString(got.out) ||
		!strings.Contains(r.run("explain", "10.0.0.7", "-j").out, `"verdict": "unknown"`) {
		t.Errorf("explain: %+v", got)
	}
	if got := r.run("doctor"); got.code != exitDegraded || !strings.Contains(got.out, maps.ErrOtherLayout.Error()) {
		t.Errorf("doctor: %+v", got)
	}
	w := r.watch(policy)
	testenv.Eventually(t, "what watch says", func() bool { return strings.Contains(w.err.String(), maps.ErrOtherLayout.Error()) })
	testenv.Must(t, w.cmd.Process.Kill())
	r.ok("flush", "vb")
	if now := r.attached(); !slices.Equal(now, attached) {
		t.Errorf("this build changed\n%v, to\n%v", attached, now)
	}
	if now := old.ok("show"); now != shown {
		t.Errorf("rules were %s, and are %s", shown, now)
	}
	old.meters()

	flush := func(args ...string) {
		t.Helper()
		got := r.run(append([]string{"flush"}, args...)...)
		if got.code != exitDone || got.err != "" || got.out != "deleted: va egress: all rules, which another version of shapectl had set\n" {
			t.Errorf("flush: %+v", got)
		}
		if pins := r.pins(); len(pins) > 0 {
			t.Errorf("pins are left: %v", pins)
		}
	}
	flush("va")
	r.nothingLeft()
	old.ok(set)
	flush("--all")
	r.nothingLeft()
	old.ok(set)
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
	testenv.Veth(t, "va", "vb")
	r.removes("va", strings.Fields(set)...)
	r.ok("flush", "va")
	old.ok(set)
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
	r.removes("va", "flush", "va")
	if pins := r.pins(); len(pins) > 0 {
		t.Errorf("pins are left: %v", pins)
	}

	testenv.Veth(t, "va", "vb")
	r.ok(strings.Fields(set)...)
	attached = r.attached()
	refuses := regexp.MustCompile(`: rules of (va|device \d+) egress: .*made by another version`) // builds up to the fourth do not look for the name
	for _, line := range []string{set, "show", "delete va egress 10.0.0.0/24"} {
		if got := old.run(strings.Fields(line)...); got.code != exitKernel || !refuses.MatchString(got.err) {
			t.Errorf("the earlier build, where this one has set rules: %s: %+v", line, got)
		}
	}
	if now := r.attached(); !slices.Equal(now, attached) {
		t.Errorf("the earlier build changed\n%v, to\n%v", attached, now)
	}
	r.ok("flush", "va")
}
