package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
)

// applied is what apply, confirm or rollback say in JSON; they must succeed.
func (r *rig) applied(args ...string) (a report.Applied) {
	r.t.Helper()
	out := r.ok(append([]string{"-j"}, args...)...)
	if err := json.Unmarshal([]byte(out), &a); err != nil {
		r.t.Fatalf("%v: %v: %s", args, err, out)
	}
	return a
}

// pending is until when a change is in force that waits to be confirmed, in ns of maps.Now; 0 for none.
func (r *rig) pending() (until uint64) {
	r.t.Helper()
	n, err := loader.Read(loader.Options{BPFFS: r.bpffs()})
	testenv.Must(r.t, err)
	defer n.Close()
	until, _, err = n.PendingChange()
	testenv.Must(r.t, err)
	return until
}

func sleepUntil(at uint64) {
	for now := maps.Now(); now < at; now = maps.Now() {
		time.Sleep(time.Duration(at - now))
	}
}

// Two policies that differ in all that they can, for both directions of va.
const (
	policyA = `devices:
  va:
    egress:
      10.0.0.0/24: {rate: 1mbit, capacity: 20kb}
      10.0.1.0/24: {rate: 2mbit, capacity: 20kb, algorithm: leaky, each: host}
    ingress:
      10.0.0.0/24: 3mbit
`
	policyB = `devices:
  va:
    egress:
      10.0.0.0/24: {rate: 4mbit, capacity: 20kb, algorithm: leaky}
      10.0.2.0/24: unlimited
`
)

var (
	rulesA = []string{"va egress 10.0.0.0/24 1000000", "va egress 10.0.1.0/24 2000000", "va ingress 10.0.0.0/24 3000000"}
	rulesB = []string{"va egress 10.0.0.0/24 4000000", "va egress 10.0.2.0/24 0"}
)

// eachHook runs a test for both hooks.
func eachHook(t *testing.T, test func(t *testing.T, r *rig)) {
	for _, hook := range []string{"tcx", "clsact"} {
		t.Run(hook, func(t *testing.T) {
			r := newRig(t)
			r.env["SHAPECTL_HOOK"] = hook
			test(t, r)
		})
	}
}

// A change that is confirmed in time lasts, and can be taken back once.
func TestConfirmInTime(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		a, b := r.policy(policyA), r.policy(policyB)
		r.ok("apply", a)
		if did := r.applied("apply", b, "--confirm", "1s"); did.RevertsInNS == nil || *did.RevertsInNS > 1e9 {
			t.Errorf("apply --confirm 1s: %+v", did)
		}
		until := r.pending()
		r.has(rulesB...)
		if out := r.ok("confirm"); out != "confirmed\n" {
			t.Errorf("confirm: %q", out)
		}
		r.refused(exitInput, "there is none", "confirm")
		sleepUntil(until)
		r.has(rulesB...)
		if out := r.ok("apply", b); out != "nothing to change\n" {
			t.Errorf("apply of what is in force: %q", out)
		}
		if out := r.ok("rollback"); !strings.Contains(out, "va egress: 1 added, 1 changed, 1 removed\nva ingress: 1 added\n") {
			t.Errorf("rollback: %q", out)
		}
		r.has(rulesA...)
		r.refused(exitInput, "there is none", "rollback")
		r.refused(exitInput, "there is none", "confirm")
		r.has(rulesA...)
		r.ok("flush", "va")
		r.nothingLeft()
	})
}

// One that is not is over at its deadline, and what comes then works as ever.
func TestConfirmTooLate(t *testing.T) {
	for next, then := range map[string]func(r *rig, a, b string){
		"confirm":  func(r *rig, a, b string) { r.refused(exitInput, "was not confirmed in time", "confirm") },
		"rollback": func(r *rig, a, b string) { r.refused(exitInput, "was not confirmed in time", "rollback") },
		"apply the same": func(r *rig, a, b string) {
			if did := r.applied("apply", b); len(did.Hooks) != 2 || did.RevertsInNS != nil {
				r.t.Errorf("apply again: %+v", did)
			}
			r.has(rulesB...)
		},
		"apply what was before": func(r *rig, a, b string) {
			if out := r.ok("apply", a); out != "nothing to change\n" {
				r.t.Errorf("apply of what was before: %q", out)
			}
		},
		"set": func(r *rig, a, b string) {
			r.ok("set", "va", "egress", "10.0.5.0/24", "--rate", "5mbit")
			r.has(append(append([]string{}, rulesA...), "va egress 10.0.5.0/24 5000000")...)
			r.refused(exitInput, "there is none", "rollback")
			r.ok("delete", "va", "egress", "10.0.5.0/24")
		},
		"delete": func(r *rig, a, b string) {
			r.ok("delete", "va", "ingress", "10.0.0.0/24")
			r.has(rulesA[:2]...)
			r.ok("set", "va", "ingress", "10.0.0.0/24", "--rate", "3mbit")
		},
		"doctor": func(r *rig, a, b string) {
			if out := r.run("doctor").out; strings.Contains(out, "waits to be confirmed") {
				r.t.Errorf("doctor: %s", out)
			}
		},
		"flush": func(r *rig, a, b string) {
			r.ok("flush", "va")
			r.nothingLeft()
			r.ok("apply", a)
		},
	} {
		t.Run(next, func(t *testing.T) {
			r := newRig(t)
			a, b := r.policy(policyA), r.policy(policyB)
			r.ok("apply", a)
			r.ok("apply", b, "--confirm", "1s")
			until := r.pending()
			r.has(rulesB...)
			sleepUntil(until)
			r.has(rulesA...)
			then(r, a, b)
			if next != "apply the same" {
				r.has(rulesA...)
			}
			r.ok("flush", "va")
			r.nothingLeft()
		})
	}
}

// What is pending is in nobody's way but of those who would change it.
func TestWhilePending(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		testenv.Veth(t, "vc", "vd")
		a, b := r.policy(policyA), r.policy(policyB)
		r.ok("apply", a)
		r.ok("apply", b, "--confirm", "1h")
		until := r.pending()
		for _, line := range []string{
			"apply " + a, "apply " + a + " --confirm 1m", "set va egress 10.0.0.0/24 --rate 1mbit", "delete va egress 10.0.0.0/24",
		} {
			r.refused(exitInput, "not confirmed yet; 'shapectl confirm' it or 'shapectl rollback' first", strings.Fields(line)...)
		}
		if did := r.applied("apply", b); len(did.Hooks) != 0 || did.RevertsInNS == nil {
			t.Errorf("apply of what is pending: %+v", did)
		}
		if r.pending() != until {
			t.Error("the deadline has moved")
		}
		r.has(rulesB...)
		if out := r.ok("diff", b); out != "" {
			t.Errorf("diff with what is pending: %q", out)
		}
		for _, line := range []string{"show", "doctor"} {
			if got := r.run(line); !strings.Contains(got.out, "shapectl confirm") {
				t.Errorf("%s does not tell of what is pending: %s%s", line, got.out, got.err)
			}
		}
		// Another device has nothing to do with it.
		r.ok("set", "vc", "egress", "10.0.0.0/24", "--rate", "5mbit")
		r.ok("flush", "vc")
		r.ok("rollback")
		if r.pending() != 0 {
			t.Error("pending after a rollback")
		}
		r.has(rulesA...)

		// What is flushed does not come back.
		r.ok("apply", b, "--confirm", "1s")
		until = r.pending()
		r.ok("flush", "va")
		r.has()
		sleepUntil(until)
		r.has()
		r.nothingLeft()
	})
}

func TestConfirmOutOfRange(t *testing.T) {
	r := newRig(t)
	a := r.policy(policyA)
	for _, confirm := range []string{"0", "0s", "500ms", "25h", "-1s", "soon", "60"} {
		r.refused(exitInput, "--confirm", "apply", a, "--confirm", confirm)
	}
	r.has()
	r.nothingLeft()
}
