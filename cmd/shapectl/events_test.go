package main

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

// events starts a `shapectl events -j` and waits until it listens.
func (r *rig) events(args ...string) *process {
	r.t.Helper()
	w := r.launch(append([]string{"events", "-j"}, args...)...)
	w.isTold("READY=1")
	return w
}

// stops tells it to end, which it does well.
func (w *process) stops(by os.Signal) {
	w.t.Helper()
	testenv.Must(w.t, w.cmd.Process.Signal(by))
	if err := w.cmd.Wait(); err != nil || w.err.String() != "" {
		w.t.Errorf("told to end, it ends with %v: %s", err, &w.err)
	}
}

// told are the events that it has told of so far.
func (w *process) told() (all []report.Event) {
	w.t.Helper()
	text := w.out.String()
	for line := range strings.Lines(text[:strings.LastIndexByte(text, '\n')+1]) {
		var e report.Event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			w.t.Fatalf("%v in %q", err, line)
		}
		all = append(all, e)
	}
	return all
}

// tells waits for an event after the first ones, and returns how many there are with it.
func (w *process) tells(after int, what string, is func(report.Event) bool) int {
	w.t.Helper()
	var at int
	testenv.Eventually(w.t, what+" to be told", func() bool {
		all := w.told()
		at = slices.IndexFunc(all[min(after, len(all)):], is)
		return at >= 0
	})
	return after + at + 1
}

func (w *process) tellsKind(after int, kind string) int {
	w.t.Helper()
	return w.tells(after, kind, func(e report.Event) bool { return e.Kind == kind })
}

// flood sends packets to a host through va, more than any rule of these tests lets pass.
func (r *rig) flood(host string) {
	r.t.Helper()
	r.send(host, 40, 1000)
}

func overflowOf(network, key string) func(report.Event) bool {
	return func(e report.Event) bool {
		return e.Kind == report.Overflow && e.Device == "va" && e.Direction == "egress" && e.Network == network && e.Key == key &&
			e.Excess == "dropped" && e.LevelBytes != nil && *e.LevelBytes > 0 && *e.CapacityBytes > 0
	}
}

// Events go on whatever happens to the maps: none, the first, bigger ones, none again, others.
func TestEvents(t *testing.T) {
	r := newRig(t)
	w, other := r.events(), r.events("--kind", "overflow", "--kind", "rules", "10.0.2.0/23")
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "80kbit", "--capacity", "5000", "--name", "office")
	n := w.tells(0, "a new rule", func(e report.Event) bool {
		return e.Kind == report.RulesChanged && e.Device == "va" && e.Network == "10.0.0.0/24" && e.Name == "office"
	})
	r.flood("10.0.0.7")
	n = w.tells(n, "an overflow", overflowOf("10.0.0.0/24", "10.0.0.0/24"))
	if e := w.told()[n-1]; e.Name != "office" || e.Address != "10.0.0.7" || !strings.Contains(e.Sentence, "va egress 10.0.0.0/24") {
		t.Errorf("told %+v", e)
	}
	// The first --each makes other maps and programs. Listeners stay.
	r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "80kbit", "--capacity", "5000", "--each", "host")
	n = w.tellsKind(n, report.RulesChanged)
	r.flood("10.0.1.9")
	n = w.tells(n, "an overflow of a host", overflowOf("10.0.1.0/24", "10.0.1.9"))

	r.ok("flush", "--all")
	n = w.tellsKind(n, report.RulesChanged)
	r.flood("10.0.1.9")
	// One event tells of both rules. Who asks for one of them hears it, too.
	r.ok("apply", r.policy("pools: {up: 1gbit, down: 1gbit}\ndevices: {va: {egress: {10.0.2.0/24: {rate: 80kbit, capacity: 5000}, 192.0.2.0/24: 80kbit}}}\n"))
	w.tells(n, "new pools", func(e report.Event) bool { return e.Sentence == "pools: 2 pools added: down, up" })
	n = w.tellsKind(n, report.RulesChanged)
	seen := other.tellsKind(0, report.RulesChanged)
	r.flood("10.0.2.9")
	n = w.tells(n, "an overflow after a flush", overflowOf("10.0.2.0/24", "10.0.2.0/24"))
	other.tells(seen, "the same overflow", overflowOf("10.0.2.0/24", "10.0.2.0/24"))

	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
	gone := func(kind string) func(report.Event) bool {
		return func(e report.Event) bool { return e.Kind == kind && e.Device == "va" }
	}
	n = w.tells(n, "a device that is gone", gone(report.DeviceGone))
	testenv.Veth(t, "va", "vb")
	w.tells(n, "a device that is there again", gone(report.DeviceAppeared))
	for _, e := range other.told() {
		several := e.Kind == report.RulesChanged && e.Network == ""
		if e.Network != "10.0.2.0/24" && !several {
			t.Errorf("told %+v to one who asks for others", e)
		}
	}
	for _, w := range []*process{w, other} {
		w.stops(syscall.SIGINT)
	}
}

// What a limit of packets counts is told as packets, whose limit it is, and that a quota is used up.
func TestEventsOfOtherLimits(t *testing.T) {
	r := newRig(t)
	r.ok(strings.Fields("set up --new --rate 1gbit --pps 1 --pps-burst 10 --quota 11000b/day --then drop")...)
	r.ok(strings.Fields("set va egress 10.0.0.0/24 --rate 1gbit --pps 1 --pps-burst 3 --each host")...)
	r.ok(strings.Fields("set va egress 10.0.1.0/24 --rate 1gbit --within up")...)
	r.ok(strings.Fields("set spent --new --rate 1gbit --quota 1kb/day --then 8kbit")...)
	r.ok(strings.Fields("set va egress 10.0.2.0/24 --rate 1gbit --within spent")...)
	r.ok(strings.Fields("set va egress 10.0.3.0/24 --rate 1gbit --quota 1kb/day --then drop --each host")...)
	w := r.events("--kind", "overflow")
	for _, host := range []string{"10.0.0.7", "10.0.0.8", "10.0.1.7", "10.0.3.7"} {
		r.flood(host)
	}
	r.send("10.0.2.7", 150, 1000)
	const bucket = "va egress 10.0.0.0/24: the bucket of "
	for _, want := range []string{bucket + "10.0.0.7 is full (3 of 3 packets); ", bucket + "10.0.0.8 is full (3 of 3 packets); ", `va egress 10.0.1.0/24: pool "up" is full (10 of 10 packets); `,
		`va egress 10.0.2.0/24: pool "spent" exceeds 8kbit, as its quota is used up; `, "va egress 10.0.3.0/24: the bucket of 10.0.3.7 has used up its quota; "} {
		w.tells(0, want, func(e report.Event) bool { return strings.HasPrefix(e.Sentence, want) })
	}
	w.stops(syscall.SIGTERM)
}

func TestEventsOfChanges(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "80kbit")
	w := r.events("--kind", "change")
	file := func(rate string) string {
		return r.policy("devices: {va: {egress: {10.0.0.0/24: " + rate + "}}}\n")
	}
	r.run("apply", file("90kbit"), "--confirm", "1s")
	n := w.tellsKind(0, report.ChangeBegun)
	n = w.tellsKind(n, report.ChangeExpired)
	r.run("apply", file("91kbit"), "--confirm", "60s")
	n = w.tellsKind(n, report.ChangeBegun)
	r.ok("confirm")
	n = w.tellsKind(n, report.ChangeConfirmed)
	r.ok("rollback")
	n = w.tellsKind(n, report.ChangeReverted)
	r.run("apply", file("92kbit"), "--confirm", "60s")
	n = w.tellsKind(n, report.ChangeBegun)
	r.ok("rollback")
	n = w.tellsKind(n, report.ChangeReverted)
	r.ok("apply", file("93kbit"))
	w.tellsKind(n, report.ChangeBegun)
	w.stops(syscall.SIGTERM)
	var kinds []string
	for _, e := range w.told() {
		kinds = append(kinds, e.Kind)
	}
	want := []string{
		report.ChangeBegun, report.ChangeExpired, report.ChangeBegun, report.ChangeConfirmed, report.ChangeReverted,
		report.ChangeBegun, report.ChangeReverted, report.ChangeBegun,
	}
	if !slices.Equal(kinds, want) {
		t.Errorf("told %q, want %q", kinds, want)
	}
}

// A listener that was killed keeps nobody else from listening.
func TestEventsAfterKills(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "80kbit", "--capacity", "5000")
	for range 8 {
		w := r.events()
		w.cmd.Process.Kill()
		w.cmd.Wait()
	}
	testenv.Eventually(t, "a slot to be free", func() bool {
		got := r.run("events", "--for", "1ms")
		return got.code == exitDone
	})
	w := r.events("--count", "1", "--kind", "overflow")
	r.flood("10.0.0.7")
	w.tells(0, "an overflow", overflowOf("10.0.0.0/24", "10.0.0.0/24"))
	testenv.Must(t, w.cmd.Wait()) // by --count
}
