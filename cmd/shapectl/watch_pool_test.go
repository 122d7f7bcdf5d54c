package main

import (
	"encoding/json"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

const guaranteedTaps = `pools: {uplink: {rate: 10mbit, share: member}}
devices:
  tap*: {egress: {10.0.0.0/24: {rate: 5mbit, within: uplink, guarantee: 4mbit, note: sold}}}
`

func (r *rig) remove(device string) {
	r.t.Helper()
	testenv.Must(r.t, netlink.LinkDel(testenv.Link(r.t, device)))
}

// guarantees returns who has a guarantee.
func (r *rig) guarantees(args ...string) string {
	r.t.Helper()
	var who []string
	for _, row := range r.rows(args...) {
		if row.GuaranteeBits != 0 {
			who = append(who, names([]shownRule{row}))
		}
	}
	return strings.Join(who, ", ")
}

// isAgreed checks that diff and apply find rules as serve has set them, and say the same of guarantees without room.
func (r *rig) isAgreed(file, says string) {
	r.t.Helper()
	if got := r.run("diff", file); got.code != exitDone || got.out != "nothing to change\n" || !strings.Contains(got.err, says) {
		r.t.Errorf("diff: %+v", got)
	}
	if got := r.run("apply", file); got.code != exitDegraded || got.out != "nothing to change\n" || !strings.Contains(got.err, says) {
		r.t.Errorf("apply: %+v", got)
	}
}

// apply and diff limit more devices of a pattern than have room for their guarantees. Those with a guarantee keep it.
func TestApplyWithoutRoom(t *testing.T) {
	r := newRig(t)
	testenv.Must(t, addVeth("old", "peer8"))
	r.taps(2)
	file := r.policy(`pools: {uplink: {rate: 10mbit, share: member}}
devices:
  tap*:
    pool: {rate: 9mbit, within: uplink, guarantee: 4mbit}
    egress: {any: {guarantee: 1mbit}}
`)
	r.ok("apply", file)
	r.remove("tap0")
	testenv.Must(t, addVeth("tap2", "peer2"))
	if got := r.run("apply", file); got.code != exitDone {
		t.Errorf("apply: %+v", got)
	}
	rename(t, "old", "tap0") // which takes nothing from those that have guarantees
	says := "shapectl: no room for the guarantees of 1 of 3 devices: tap0; until there is room, they get what other guarantees leave, at worst nothing\n" +
		file + `:1:9: pool "uplink": rate 10mbit is less than the guarantees within the pool, which add up to 12mbit; raise it, or lower them` + "\n"
	if got := r.run("diff", file); got.code != exitDiffers || got.err != says {
		t.Errorf("diff: %+v", got)
	}
	got := r.run("apply", file, "-j")
	var applied report.Applied
	testenv.Must(t, json.Unmarshal([]byte(got.out), &applied))
	if got.code != exitDegraded || len(applied.Waiting) != 1 || applied.Waiting[0] != "tap0" {
		t.Errorf("apply: %+v", got)
	}
	const guaranteed = "pool tap1, pool tap2, tap1 egress 0.0.0.0/0, tap1 egress ::/0, tap2 egress 0.0.0.0/0, tap2 egress ::/0"
	if got := r.guarantees("show"); got != guaranteed {
		t.Errorf("guarantees of %s; want %s", got, guaranteed)
	}
	r.isAgreed(file, says)

	exported := strings.Replace(r.ok("export"), "rate: 10mbit", "rate: 12mbit", 1)
	w := r.watch(file) // which did not set these rules
	r.ok("set", "uplink", "--rate", "12mbit")
	r.remove("vb") // so that serve looks
	w.says("tap0 has its guarantees now")
	w.ends(syscall.SIGTERM)
	if got := r.run("apply", r.policy(exported)); !strings.Contains(exported, "waits: 4mbit") || got.out != "nothing to change\n" {
		t.Errorf("a policy in which tap0 waits takes its guarantees: %+v", got)
	}

	// Without room even for others, the policy is refused.
	r.refused(exitInput, "which add up to 11mbit", "apply", r.policy(`pools: {uplink: {rate: 10mbit}}
devices: {tap1: {egress: {10.0.0.0/24: {within: uplink, guarantee: 11mbit}}}, tap*: {egress: {any: {within: uplink, guarantee: 1mbit}}}}`))
}

// A device whose guarantee has no room gets its rate. It gets the guarantee as soon as there is room.
func TestWatchWithoutRoom(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.taps(2)
	file := r.policy(guaranteedTaps)
	w := r.watch(file)
	testenv.Must(t, addVeth("tap2", "peer2"))
	w.says("tap2 egress: 1 rule of " + file)
	w.says(`serve: tap2 has its guarantees only when there is room, and until then what other guarantees leave: pool "uplink": rate 10mbit is less than the guarantees within the pool, which add up to 12mbit; raise it, or lower them` + "\n")
	for _, row := range r.rows("show", "tap*") {
		if row.Rate != 5_000_000 {
			t.Errorf("%s: %s", row.Device, row.Sentence)
		}
	}
	if got, want := r.guarantees("show"), "tap0 egress 10.0.0.0/24, tap1 egress 10.0.0.0/24"; got != want {
		t.Errorf("guarantees of %s; want %s", got, want)
	}
	r.isAgreed(file, "no room for the guarantees of 1 of 3 devices: tap2;")
	got := r.run("doctor", "tap2")
	if want := `there is no room in pool "uplink" for the guarantee of 10.0.0.0/24 (4mbit): it gets what other guarantees leave, at worst nothing`; got.code != exitDegraded || !strings.Contains(strings.Join(strings.Fields(got.out), " "), want) {
		t.Errorf("exit %d: %s%s", got.code, got.out, got.err)
	}

	testenv.Must(t, addVeth("tap11", "peer11"))
	w.says("tap11 egress: 1 rule of " + file)
	r.remove("tap0")
	w.says("tap2 has its guarantees now") // before a newer device
	if got, want := r.guarantees("show"), "tap1 egress 10.0.0.0/24, tap2 egress 10.0.0.0/24"; got != want {
		t.Errorf("guarantees of %s; want %s", got, want)
	}
	r.ok("set", "uplink", "--rate", "12mbit") // which is no event of a device
	w.says("tap11 has its guarantees now")
	r.remove("tap11")
	r.run("set", "uplink", "--rate", "10mbit") // which may say that it removed the rules of tap11
	if got := r.run("doctor", "tap2"); got.code != exitDone {
		t.Errorf("exit %d: %s%s", got.code, got.out, got.err)
	}
	if out := r.ok("diff", file); !strings.Contains(out, "nothing to change") {
		t.Errorf("it is not as the policy says: %s", out)
	}
	if got := w.ends(syscall.SIGTERM); strings.Count(got.err, "only when there is room") != 2 { // tap2 and tap11
		t.Errorf("who waits is not told once: %s", got.err)
	}
}

// A device that has rules in one direction has its pool for those of the other one.
func TestWatchPoolOfOtherDirection(t *testing.T) {
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "7mbit")
	r.ok("set", "vb", "ingress", "10.0.0.0/24", "--rate", "7mbit")
	w := r.watch(r.policy("devices: {v*: {pool: 5mbit, egress: {any: {}}, ingress: {any: {}}}}\n"))
	if got, want := names(r.rows("show", "--pools")), "pool va, pool vb"; got != want {
		t.Errorf("there are %s; want %s", got, want)
	}
	w.ends(syscall.SIGTERM)
}

// Each device of a pattern has a pool, also one that appears. The pool goes with its device, and makes room.
func TestWatchOwnPools(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.taps(2)
	file := r.policy(`pools: {uplink: {rate: 10mbit, share: member}}
devices:
  tap*:
    pool: {rate: 5mbit, within: uplink, guarantee: 4mbit}
    egress: {any: {}}
    ingress: {pool: 1mbit, any: {}}
`)
	w := r.watch(file)
	if got, want := names(r.rows("show", "--pools")), "pool tap0, pool tap0 ingress, pool tap1, pool tap1 ingress, pool uplink"; got != want {
		t.Errorf("there are %s; want %s", got, want)
	}
	if out := r.ok("diff", file); !strings.Contains(out, "nothing to change") {
		t.Errorf("it is not as the policy says: %s", out)
	}
	if again := r.policy(r.ok("export")); !strings.Contains(r.ok("diff", again), "nothing to change") {
		t.Errorf("an export differs: %s", r.ok("export"))
	}
	testenv.Must(t, addVeth("tap2", "peer2"))
	w.says("tap2 ingress: 2 rules of " + file)
	if got, want := r.guarantees("show", "--pools"), "pool tap0, pool tap1"; got != want {
		t.Errorf("guarantees of %s; want %s", got, want)
	}
	if got := r.run("doctor"); got.code != exitDegraded || !strings.Contains(strings.Join(strings.Fields(got.out), " "), `there is no room in pool "uplink" for the guarantee of pool "tap2" (4mbit)`) {
		t.Errorf("exit %d: %s%s", got.code, got.out, got.err)
	}
	w.ends(syscall.SIGTERM)

	if got := r.ok("set", "--kind", "pool", "tap2", "--weight", "2"); !strings.Contains(got, " [guarantee: 4mbit waits for room in the pool]\n") {
		t.Errorf("set tap2 says %s", got)
	}
	r.ok("set", "tap7", "--new", "--rate", "3mbit") // made by hand: it is not the policy's
	r.remove("tap0")
	w = r.watch(file) // which knows nothing of the other one
	w.says("tap2 has its guarantees now")
	if got, want := r.guarantees("show", "--pools"), "pool tap1, pool tap2"; got != want {
		t.Errorf("guarantees of %s; want %s", got, want)
	}
	r.remove("tap1")
	testenv.Eventually(t, "the pools of tap1 to go", func() bool {
		return names(r.rows("show", "--pools")) == "pool tap2, pool tap2 ingress, pool tap7, pool uplink"
	})
	w.ends(syscall.SIGTERM)
}

// A renamed device leaves its own pool to the next device of its old name.
func TestRenamedDeviceLeavesItsPool(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.taps(1)
	file := r.policy("devices: {tap*: {pool: 5mbit, egress: {any: {}}, ingress: {any: {rate: 1mbit, within: none}}}}\n")
	r.ok("apply", file)
	rename(t, "tap0", "tap5")
	testenv.Must(t, addVeth("tap0", "peer5"))
	shares := `warning tap5 egress pools: since the device was renamed, it shares pool "tap0" with tap0`
	r.ok("set", "vb", "egress", "any", "--rate", "1mbit", "--confirm", "1h")
	w := r.watch(file) // which changes no rules while a change is pending
	w.says("tap0 ingress: 2 rules of " + file)
	r.doctorSays(exitDegraded, shares)
	r.ok("confirm")
	r.ok("delete", "vb", "egress", "any")
	w.says("tap5 egress: 2 rules of " + file)
	r.doctorSays(exitDone)
	if out := r.ok("diff", file); !strings.Contains(out, "nothing to change") {
		t.Errorf("it is not as the policy says: %s", out)
	}
	w.ends(syscall.SIGTERM)
}

// serve warns once of a pool that is there and is not as in the policy, and does not change it.
func TestWatchWarnsOfPools(t *testing.T) {
	r := newRig(t)
	r.taps(1)
	r.ok("set", "uplink", "--new", "--rate", "500mbit")
	file := r.policy("pools: {uplink: {rate: 10mbit, share: member}}\ndevices:\n  tap*: {egress: {10.0.0.0/24: {within: uplink}}}\n")
	w := r.watch(file)
	w.says(`pool "uplink" is not as in ` + file + ", and serve does not change it: to change rate 500mbit -> 10mbit, share none -> member, apply the file")
	w.says("tap0 egress: 1 rule of " + file)
	testenv.Must(t, addVeth("tap1", "peer1"))
	w.says("tap1 egress: 1 rule of " + file)
	if got := w.ends(syscall.SIGTERM); strings.Count(got.err, "is not as in") != 1 {
		t.Errorf("it did not warn once: %s", got.err)
	}
}
