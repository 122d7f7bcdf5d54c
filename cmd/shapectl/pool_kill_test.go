package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

var treeKills = flag.Int("tree-kills", 12, "how often TestKilledInTree kills a command")

// randomTree is a policy of an uplink, some access points and their subscribers.
func randomTree(random *rand.Rand) string {
	one := func(of ...string) string { return of[random.IntN(len(of))] }
	var pools, rules strings.Builder
	aps := 2 + random.IntN(3)
	fmt.Fprintf(&pools, "pools:\n  uplink: {rate: %s, share: member}\n", one("50mbit", "80mbit", "120mbit"))
	for ap := range aps {
		fmt.Fprintf(&pools, "  ap-%d: {rate: %s, share: member, within: uplink, guarantee: %s, weight: %s}\n",
			ap, one("20mbit", "30mbit"), one("8mbit", "10mbit"), one("1", "2", "5"))
	}
	for i := range 12 {
		within := fmt.Sprintf("ap-%d", random.IntN(aps))
		if random.IntN(3) == 0 {
			home := fmt.Sprintf("home-%d", i)
			fmt.Fprintf(&pools, "  %s: {rate: %s, share: flow, within: %s, guarantee: %s}\n", home, one("5mbit", "10mbit"), within, one("100kbit", "200kbit"))
			fmt.Fprintf(&rules, "      10.0.%d.0/24: {within: %s}\n", i, home)
			continue
		}
		fmt.Fprintf(&rules, "      10.0.%d.0/24: {rate: %s, within: %s, weight: %s, guarantee: %s}\n", i, one("4mbit", "6mbit"), within, one("1", "3"), one("100kbit", "300kbit"))
	}
	return fmt.Sprintf("%sdevices:\n  va:\n    egress:\n%s  vb:\n    egress:\n%s", &pools, &rules, &rules)
}

// A command that changes a tree of pools is killed at a random moment. The old tree or the new one is then in force as a
// whole, and each packet is charged to its rule and to all pools above. The same command, run again, does the rest.
func TestKilledInTree(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	random := rand.New(rand.NewPCG(testenv.Seed(t), 0))
	senders := map[string]*testenv.Sender{"va": testenv.NewSender(t, "va"), "vb": testenv.NewSender(t, "vb")}
	r.ok("apply", r.policy(randomTree(random)))
	long := map[string]time.Duration{}
	ends := map[string]int{}
	most := *treeKills
	if testing.Short() {
		most /= 3
	}
	for kills := 0; kills < most; {
		policy := r.policy(randomTree(random))
		args := []string{"apply", policy}
		switch random.IntN(6) {
		case 0:
			args = []string{"set", "ap-1", "--rate", fmt.Sprint(20+random.IntN(20), "mbit"), "--weight", fmt.Sprint(1 + random.IntN(9))}
		case 1:
			args = []string{"set", "va", "egress", fmt.Sprintf("10.0.%d.0/24", random.IntN(12)), "--within", "ap-0", "--guarantee", "150kbit"}
		}
		before := r.ok("export")
		cmd := r.command(args...)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		began := time.Now()
		testenv.Must(t, cmd.Start())
		patience := 100 * time.Millisecond
		if took := long[args[0]]; took > 0 {
			patience = time.Duration(random.Int64N(int64(took)))
		}
		timer := time.AfterFunc(patience, func() { cmd.Process.Kill() })
		cmd.Wait()
		timer.Stop()
		status := cmd.ProcessState.Sys().(syscall.WaitStatus)
		if !status.Signaled() {
			long[args[0]] = max(long[args[0]], time.Since(began))
			if status.ExitStatus() != exitDone {
				t.Fatalf("%v: exit %d: %s", args, status.ExitStatus(), &stderr)
			}
		} else {
			kills++
		}
		time.Sleep(25 * time.Millisecond) // an armed change begins
		now := r.ok("export")
		r.inForceInTree(senders)
		if again := r.run(args...); again.code != exitDone {
			t.Errorf("%v, again: exit %d: %s", args, again.code, again.err)
		}
		after := r.ok("export")
		var end string
		switch {
		case !status.Signaled() && now == after:
			end = "not killed"
		case !status.Signaled() || now != before && now != after:
			t.Errorf("kill %d, after %v, of %v: the tree is\n%s\nbefore it was\n%s\nafter it, want\n%s", kills, patience, args, now, before, after)
		case now == before:
			end = "the old tree"
		default:
			end = "the new tree"
		}
		ends[end]++
		if args[0] == "apply" {
			r.ok("diff", policy)
		}
		r.inForceInTree(senders)
		if t.Failed() {
			t.FailNow()
		}
	}
	t.Logf("%d kills: %v", most, ends)
	r.ok("flush", "--all")
	r.nothingLeft()
}

// inForceInTree ends the test unless each rule, and each pool above, meters each packet of the rule once.
func (r *rig) inForceInTree(senders map[string]*testenv.Sender) {
	r.t.Helper()
	find := func(rows []shownRule, name string) int {
		return slices.IndexFunc(rows, func(row shownRule) bool { return row.Kind == report.KindPool && row.Name == name })
	}
	before := r.rows("show")
	for _, row := range before {
		if row.Kind == report.KindPool {
			continue
		}
		if !row.Attached {
			r.t.Errorf("%s %s is not in force: %s", row.Device, row.CIDR, row.State)
		}
		frame := frameTo(strings.TrimSuffix(row.CIDR, "0/24")+"7", 200)
		for range 3 {
			testenv.Must(r.t, senders[row.Device].Send(frame))
		}
	}
	after := r.rows("show")
	want := make([]uint64, len(before))
	for i, row := range before {
		if row.Kind == report.KindPool {
			continue
		}
		for want[i] = 3; row.Within != ""; {
			at := find(before, row.Within)
			want[at] += 3
			row = before[at]
		}
	}
	for i, row := range after {
		if got := row.PassedPackets - before[i].PassedPackets; got != want[i] {
			r.t.Errorf("%s %s%s passed %d packets, want %d", row.Device, row.CIDR, row.Name, got, want[i])
		}
	}
}
