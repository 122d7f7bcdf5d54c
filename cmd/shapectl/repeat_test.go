package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// An apply that had nothing to change is none to confirm, or to return from: that is the one before it.
func TestNothingToConfirm(t *testing.T) {
	t.Parallel()
	eachHook(t, func(t *testing.T, r *rig) {
		a, b := r.policy(policyA), r.policy(policyB)
		r.ok("apply", a)
		r.ok("apply", b)
		const says = "nothing to change\nno rule was changed, so there is nothing to confirm, and nothing reverts\n"
		if out := r.ok("apply", b, "--confirm", "60s"); out != says {
			t.Errorf("apply of what is in force: %q", out)
		}
		if did := r.applied("apply", b, "--confirm", "60s"); len(did.Hooks) != 0 || did.RevertsInNS != nil {
			t.Errorf("apply -j of what is in force: %+v", did)
		}
		if r.pending() != 0 {
			t.Error("something is pending")
		}
		if out := r.ok("confirm"); !strings.HasPrefix(out, "nothing to confirm: ") {
			t.Errorf("confirm: %q", out)
		}
		out := r.ok("rollback")
		want := `^reverted the change of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, [0-9.]+m?s ago
2 rules added, 1 changed, 1 removed on 1 device
$`
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("rollback: %q", out)
		}
		r.has(rulesA...)
		r.refused(exitInput, "no change can be confirmed or undone", "confirm")

		r.ok("apply", b)
		if did := r.applied("rollback"); did.UndoneAgoNS == nil || *did.UndoneAgoNS == 0 || *did.UndoneAgoNS > 60e9 {
			t.Errorf("rollback -j: %+v", did)
		}
	})
}

// confirm names the change that it confirms. While that is pending, whatever it keeps from happening says until when.
func TestConfirmSays(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.ok("apply", r.policy(policyA))
	r.env["SUDO_USER"] = "al\nice" // whoever else sees the change is told who made it
	r.ok("apply", r.policy(policyB), "--confirm", "1h")
	delete(r.env, "SUDO_USER")
	by := `al\\+nice made it with 'apply \S+ --confirm 1h' at \d\d:\d\d:\d\d`
	pending := regexp.MustCompile(`"the last change is not confirmed: ` + by + `; it reverts in \S+"`)
	if out := r.run("doctor", "-j").out; len(pending.FindAllString(out, -1)) != 1 {
		t.Errorf("doctor: %s", out)
	}
	at := ` \(` + by + `\), and reverts in \S+, at \d\d:\d\d:\d\d; 'shapectl confirm' it or 'shapectl rollback' first`
	for _, args := range []string{"set va egress 10.0.0.9 --rate 1mbit", "flush --all"} {
		if got := r.run(strings.Fields(args)...); !regexp.MustCompile("the last change is not confirmed yet" + at + "\n$").MatchString(got.err) {
			t.Errorf("%s: %s", args, got.err)
		}
	}
	if out := r.ok("show"); !regexp.MustCompile(`\nthe last change is not confirmed: ` + by + `; it reverts in \S+, at \d\d:\d\d:\d\d, unless confirmed by 'shapectl confirm'\n$`).MatchString(out) {
		t.Errorf("show: %s", out)
	}
	want := `^confirmed the change of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, [0-9.]+m?s ago, which stays
1 rule added, 1 changed, 2 removed on 1 device
$`
	if out := r.ok("confirm"); !regexp.MustCompile(want).MatchString(out) {
		t.Errorf("confirm: %s", out)
	}
	r.ok("set", "uplink", "--new", "--rate", "1mbit", "--confirm", "1h")
	if did := r.applied("confirm"); did.Pools.Added != 1 || did.ConfirmedAgoNS == nil || did.RevertsInNS != nil {
		t.Errorf("confirm -j: %+v", did)
	}
	if did := r.applied("confirm"); did.ConfirmedAgoNS != nil {
		t.Errorf("confirm -j again: %+v", did)
	}
}

// rollback and confirm say why there is no change.
func TestWhyNoChange(t *testing.T) {
	r := newRig(t)
	says := func(why string) {
		t.Helper()
		for _, verb := range []string{"rollback", "confirm"} {
			r.refused(exitInput, verb+": no change can be confirmed or undone: "+why+"; see 'shapectl show'", verb)
		}
	}
	set := func(rate string) { t.Helper(); r.ok("set", "va", "ingress", "10.0.9.0/24", "--rate", rate) }
	says("there are no rules")
	set("1mbit")
	says("since the first rule was set, no policy was applied, and nothing was set with --confirm")
	a, b := r.policy(policyA), r.policy(policyB)
	r.ok("apply", a)
	set("2mbit")
	says("another command or serve changed rules since the last one; to go back, apply the old policy")
	r.ok("apply", a)
	r.ok("rollback")
	says("the last one was reverted already; what is set or deleted without --confirm cannot be undone")
	r.ok("apply", b, "--confirm", "1h")
	r.ok("rollback")
	set("3mbit")
	says("the last one was reverted already; what is set or deleted without --confirm cannot be undone")
	r.ok("apply", b, "--confirm", "1h")
	r.ok("confirm")
	set("4mbit")
	says("another command or serve changed rules since the last one; to go back, apply the old policy")
}

// What is so already is a success, and said.
func TestVerbsCanBeRepeated(t *testing.T) {
	r := newRig(t)
	const nothing = "nothing to delete: no egress rule for 10.0.0.0/24 on va\n"
	if out := r.ok("delete", "va", "egress", "10.0.0.0/24"); out != nothing {
		t.Errorf("delete without any rule: %q", out)
	}
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "1mbit")
	first := r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "2mbit")
	if again := r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "2mbit"); again != first {
		t.Errorf("set: %q, again: %q", first, again)
	}
	r.ok("delete", "va", "egress", "10.0.0.0/24")
	if out := r.ok("delete", "va", "egress", "10.0.0.0/24"); out != nothing {
		t.Errorf("delete again: %q", out)
	}
	if out := r.ok("delete", "-j", "va", "egress", "10.0.0.0/24"); out != "[]\n" {
		t.Errorf("delete -j again: %q", out)
	}
	r.refused(exitInput, "there is no device vaa", "delete", "vaa", "egress", "10.0.0.0/24")
	for range 2 {
		r.ok("flush", "va")
		r.ok("apply", r.policy("devices: {}\n"))
	}
}

// Files of any kind are read as far as a policy may be long, and a copy is kept of none in a directory.
func TestFilesOfAnyKind(t *testing.T) {
	r := newRig(t)
	dir := t.TempDir()
	good := r.policy("devices: {va: {egress: {10.0.0.0/24: 1mbit}}}\n")
	fifo := filepath.Join(dir, "fifo")
	testenv.Must(t, unix.Mkfifo(fifo, 0o600))
	for _, command := range []string{"apply", "diff", "import nft", "import libreqos --device va", "replay testdata/traces/burst.csv --device va --direction egress --policy"} {
		r.refused(exitInput, "more than 128 MiB", append(strings.Fields(command), "/dev/zero")...)
	}
	for _, args := range [][]string{{"apply", fifo, "--last-good", filepath.Join(dir, "kept")}, {"serve", fifo}, {"serve", "/dev/zero"}} {
		r.refused(exitInput, "it is not a regular file", args...)
	}
	directory := filepath.Join(dir, "d")
	testenv.Must(t, os.Mkdir(directory, 0o700))
	r.refused(exitInput, directory+" is not a regular file", "apply", good, "--last-good", directory)
	if rules := r.show(); len(rules) > 0 {
		t.Errorf("rules: %+v", rules)
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	testenv.Must(t, err)
	if len(left) != 2 {
		t.Errorf("left behind: %v", left)
	}
	// What comes by a FIFO is a policy like any other.
	go os.WriteFile(fifo, []byte("devices: {va: {egress: {10.0.0.0/24: 1mbit}}}\n"), 0)
	r.ok("apply", fifo)
	r.has("va egress 10.0.0.0/24 1000000")
}
