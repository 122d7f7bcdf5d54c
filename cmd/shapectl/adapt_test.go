package main

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// line makes va a line to 10.9.0.2 and 10.9.0.3, which answer pings in a namespace of their own. It returns how many they
// were sent.
func (r *rig) line() (pings func() int) {
	r.t.Helper()
	name, far := testenv.NewNamedNetns(r.t)
	testenv.Must(r.t, netlink.LinkSetNsFd(testenv.Link(r.t, "vb"), far.FD()))
	testenv.Must(r.t, far.Do(func() error {
		r.sh("ip address add 10.9.0.2/24 dev vb; ip address add 10.9.0.3/24 dev vb; ip link set vb up")
		return nil
	}))
	r.address("10.9.0.1/24")
	testenv.WaitUp(r.t, "va")
	return func() (n int) {
		at := -1
		for line := range strings.Lines(r.sh("ip netns exec " + name + " cat /proc/net/snmp")) { // the names of the counters, then their values
			if fields := strings.Fields(line); fields[0] == "Icmp:" && at < 0 {
				at = slices.Index(fields, "InEchos")
			} else if fields[0] == "Icmp:" {
				var err error
				n, err = strconv.Atoi(fields[at])
				testenv.Must(r.t, err)
			}
		}
		return n
	}
}

// carries makes the line have a rate, and a queue in front of it that holds half a second.
func (r *rig) carries(rate string) {
	r.t.Helper()
	r.sh("tc qdisc replace dev va root tbf rate " + rate + " burst 10kb latency 500ms")
}

// upload sends about 24 mbit through the line until the test ends.
func (r *rig) upload() {
	r.t.Helper()
	c, err := net.Dial("udp", "10.9.0.2:9")
	testenv.Must(r.t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for packet := make([]byte, 1000); ; time.Sleep(time.Millisecond) {
			for range 3 {
				if _, err := c.Write(packet); err != nil && strings.Contains(err.Error(), "closed") {
					return
				}
			}
		}
	}()
	r.t.Cleanup(func() {
		c.Close()
		<-done
	})
}

// rateNow is the rate of a pool that packets meet.
func (r *rig) rateNow(pool string) policy.Rate { return r.lease(pool).At(maps.Now()) }

// waits is testenv.Eventually for what takes a rate some time.
func (r *rig) waits(what string, happened func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(testenv.Patience); !happened(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("timeout waiting for %s; the rate is %v", what, r.rateNow("up"))
		}
	}
}

// A line becomes slower and fast again under load, and serve adapts the pool. When serve is killed, the rate of the
// policy is in force again.
func TestAdapt(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pings := r.line()
	file := filepath.Join(t.TempDir(), "policy.yaml")
	const text = `
pools:
  up: {rate: 20mbit, adapt-min: 2mbit, adapt-above: 60ms, adapt-to: "10.9.0.2,10.9.0.3"}
devices:
  va: {egress: {any: {within: up}}}
`
	testenv.Must(t, os.WriteFile(file, []byte(text), 0o600))
	r.ok("apply", file)
	r.carries("100mbit")
	w := r.watch(file)
	r.waits("the usual latency to be known", func() bool { return pings() >= 4 })
	r.upload()
	before := r.ok("export")

	r.carries("10mbit")
	w.says(`pool "up" now gets `)
	r.waits("the rate to be that of the line", func() bool { return r.rateNow("up") < 12e6 })
	if shown := r.show("--pools", "up")[0]; shown.LeaseBits == 0 || shown.LeaseBits >= 20e6 || shown.Adapt == nil || shown.Adapt.MinBits != 2e6 {
		t.Errorf("show has %+v", shown)
	}
	if after := r.ok("export"); after != before {
		t.Errorf("export is %s, and was %s", after, before)
	}
	if !strings.Contains(w.err.String(), "of 20mbit: pings to 10.9.0.") {
		t.Errorf("it does not say why: %s", &w.err)
	}

	// A change of the pool has a lease of its own, and so has the pool after it reverts.
	r.ok("set", "up", "--rate", "15mbit", "--confirm", "60s")
	if got := r.rateNow("up"); got > 15e6 {
		t.Errorf("after the change the rate is %v", got)
	}
	r.ok("rollback")

	r.carries("100mbit")
	r.waits("all of the rate", func() bool { return r.rateNow("up") == 20e6 })
	w.says("now gets 20mbit of 20mbit: pings take their usual time")

	r.carries("10mbit")
	r.waits("the rate to fall again", func() bool { return r.rateNow("up") < 12e6 })
	testenv.Must(t, w.cmd.Process.Signal(syscall.SIGKILL))
	lease := r.lease("up")
	r.waits("the lease to end", func() bool { return isOver(r.lease("up")) })
	if last := r.lease("up"); last.Safe != 20e6 || r.rateNow("up") != 20e6 || last.Until != lease.Until {
		t.Errorf("after serve was killed: %+v", last)
	}
	if shown := r.show("--pools", "up")[0]; *shown.Leased || shown.SafeBits != 20e6 {
		t.Errorf("show has %+v", shown)
	}
}

// doctor tells of pools that adapt while no serve does it.
func TestDoctorOfAdapting(t *testing.T) {
	r := newRig(t)
	r.ok("set", "up", "--new", "--rate", "20mbit", "--adapt-min", "2mbit")
	const warning = `the rate of pools follows their line only while 'shapectl serve' runs, and none does: "up"`
	if got := r.warnings("adapt"); !slices.Equal(got, []string{warning}) {
		t.Errorf("without a serve: %q", got)
	}
	l := loader.NewLessee(loader.LineLeases)
	defer l.Close()
	testenv.Must(t, l.Pools(loader.Options{BPFFS: r.bpffs()}, func(*maps.Set) bool { return true }))
	if got := r.warnings("adapt"); len(got) != 0 {
		t.Errorf("with one: %q", got)
	}
}

// findings are all that doctor finds.
func (r *rig) findings() (found []report.Finding, code int) {
	r.t.Helper()
	got := r.run("doctor", "-j")
	testenv.Must(r.t, json.Unmarshal([]byte(got.out), &found))
	return found, got.code
}

// warnings returns what doctor warns of by a check.
func (r *rig) warnings(check string) (found []string) {
	r.t.Helper()
	all, code := r.findings()
	for _, f := range all {
		if f.Check == check && f.Status == report.Warning {
			found = append(found, strings.TrimSpace(f.Device+" "+f.Direction+" "+f.Finding))
		}
	}
	if len(found) > 0 && code != exitDegraded {
		r.t.Errorf("exit code %d, want %d", code, exitDegraded)
	}
	return found
}

// A pool that adapts keeps its rate in each phase of a change, also if nobody runs that adapts it.
func TestChangeOfAdapting(t *testing.T) {
	r := newRig(t)
	r.ok("set", "up", "--new", "--rate", "20mbit", "--adapt-min", "2mbit")
	renew := func(rate policy.Rate) {
		t.Helper()
		l := loader.NewLessee(loader.LineLeases)
		defer l.Close()
		testenv.Must(t, l.Renew(loader.Options{BPFFS: r.bpffs()}, func(pools *maps.Set) {
			testenv.Must(t, pools.Renew(policy.PoolKey("up"), maps.Lease{Rate: rate, Safe: 50e6, Until: maps.Now() + 3600e9}))
		}))
	}
	is := func(when string, rate policy.Rate) {
		t.Helper()
		if got := r.rateNow("up"); got != rate {
			t.Errorf("%s the rate is %v, not %v", when, got, rate)
		}
	}
	is("at first", 20e6)
	renew(8e6)
	is("adapted", 8e6)
	r.ok("set", "up", "--note", "x")
	is("after another option changed", 8e6)
	r.ok("set", "up", "--rate", "5mbit", "--confirm", "60s")
	is("lowered", 5e6)
	renew(3e6)
	is("adapted meanwhile", 3e6)
	r.ok("rollback")
	is("as before", 8e6)
	r.ok("set", "up", "--rate", "40mbit", "--confirm", "60s")
	renew(30e6)
	is("raised, in a trial", 30e6)
	r.ok("confirm")
	is("confirmed", 30e6)
	r.ok("rollback")
	is("rolled back", 8e6)
	r.ok("set", "up", "--adapt-min", "none")
	if shown := r.show("--pools", "up")[0]; shown.Leased != nil || shown.Adapt != nil || shown.Rate != 20e6 {
		t.Errorf("without adaptation show has %+v", shown)
	}
}
