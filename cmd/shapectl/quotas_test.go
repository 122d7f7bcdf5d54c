package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/pulse"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// used is what is used of the only quota of a host or rule.
func (r *rig) used(of string) (bytes uint64) {
	r.t.Helper()
	got := r.run(strings.Fields("topup " + of + " 4000tb")...) // refused
	if _, says, found := strings.Cut(got.err, "only "); !found {
		r.t.Fatal(got.err)
	} else if n, _ := fmt.Sscanf(says, "%d B", &bytes); n == 0 {
		r.t.Fatal(got.err)
	}
	return bytes
}

// What is used of quotas outlives a kill of serve, a reboot, devices and rules. Bytes that are given back stay so.
func TestQuotasAreKept(t *testing.T) {
	r := newRig(t)
	r.env["SHAPECTL_STATE"] = t.TempDir()
	file := filepath.Join(r.env["SHAPECTL_STATE"], "quotas.json")
	const each, shared = "va egress 10.0.0.0/24", "va egress 10.1.0.0/24"
	set := func() {
		t.Helper()
		r.run(strings.Fields("set " + each + " --each host --rate 1gbit --quota 1mb/month --then drop")...)
		r.ok(strings.Fields("set up --new --rate 1gbit --quota 1mb/999d --then 1mbit")...)
		r.ok(strings.Fields("set " + shared + " --within up --name alice")...)
	}
	isUsed := func(what string, host, pool uint64) {
		t.Helper()
		if a, b := r.used(each+" 10.0.0.7"), r.used("alice"); a != host || b+1 < pool || b > pool {
			t.Errorf("%s: %d and %d bytes are used, want %d and %d", what, a, b, host, pool)
		}
	}
	send := func() {
		t.Helper()
		sender := testenv.NewSender(t, "va")
		testenv.Must(t, sender.Send(frameTo("10.0.0.7", 300)))
		testenv.Must(t, sender.Send(frameTo("10.1.0.7", 200)))
	}
	remake := func() {
		t.Helper()
		testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
		testenv.Veth(t, "va", "vb")
		set()
	}
	reboot := func() {
		t.Helper()
		testenv.Must(t, os.RemoveAll(filepath.Join(r.bpffs(), "shapectl")))
		remake()
	}
	set()
	send()
	isUsed("after packets", 300, 200)
	s := r.serve()
	testenv.Must(t, s.cmd.Process.Kill())
	s.cmd.Wait()
	reboot()
	isUsed("after a reboot", 300, 200)
	send()
	r.ok("delete", "va", "egress", "10.0.0.0/24")
	r.ok("delete", "alice")
	set()
	isUsed("after delete", 600, 400)
	send()
	remake()
	isUsed("of another device", 900, 600)
	if says := r.ok(strings.Fields("topup " + each + " 10.0.0.7 100b")...); says != each+" 10.0.0.7: 800 B of 1.05 MB are used\n" {
		t.Error(says)
	}
	r.refused(exitInput, " 10.0.0.8: only 0 B are used", strings.Fields("topup "+each+" 10.0.0.8 1b")...)
	r.refused(exitInput, "there is no quota of 2001:db8::1; ", strings.Fields("topup "+each+" 2001:db8::1 1b")...)
	r.refused(exitInput, "each host has a quota of its own", strings.Fields("topup "+each+" 1b")...)
	r.refused(exitInput, "pool up: 10.0.0.7 has no quota of its own there", strings.Fields("topup alice 10.0.0.7 1b")...)
	reboot()
	isUsed("after topup and a reboot", 800, 600)
	s = r.serve()
	var all []toppedUp
	testenv.Must(t, json.Unmarshal(s.ask(200, "topup", map[string]any{"named": "alice", "size": "all"}, "alice: 0 of"), &all))
	if len(all) != 1 || all[0].Pool != "up" || all[0].UsedBytes != 0 {
		t.Errorf("%+v", all)
	}
	send()
	s.ends(syscall.SIGTERM)
	r.ok("topup", "va", "egress", "10.0.0.0/24", "all")
	isUsed("after all", 0, 200)
	reboot()
	isUsed("after all and a reboot", 0, 200)
	for what, spoil := range map[string]func() error{
		"invalid character": func() error { return os.WriteFile(file, []byte("{x"), 0o640) },
		"other users can":   func() error { return os.Chmod(file, 0o666) },
		"belongs to user":   func() error { return os.Chown(file, nobody, nobody) },
	} {
		r.run("flush", "--all") // warns of the last one
		testenv.Must(t, spoil())
		got := r.run(strings.Fields("set " + shared + " --rate 1gbit --quota 1mb/month --then drop --name alice")...)
		if got.code != exitDone || !strings.Contains(got.err, what) || !strings.Contains(got.err, "begin at 0") {
			t.Errorf("%s: exit %d, %s", what, got.code, got.err)
		}
	}
}

// What is used belongs to the name that a device has now. Another one that gets its old name begins at 0.
func TestQuotaOfARenamedDevice(t *testing.T) {
	r := newRig(t)
	r.env["SHAPECTL_STATE"] = t.TempDir()
	set := func(device string) {
		t.Helper()
		r.run("set", device, "egress", "10.0.0.0/24", "--each", "host", "--rate", "1gbit", "--quota", "1mb/month", "--then", "drop")
	}
	isUsed := func(what, device string, want uint64) {
		t.Helper()
		if n := r.used(device + " egress 10.0.0.0/24 10.0.0.7"); n != want {
			t.Errorf("%s: %d bytes are used, want %d", what, n, want)
		}
	}
	set("va")
	r.send("10.0.0.7", 3, 300)
	rename(t, "va", "vx")
	testenv.Veth(t, "va", "vc")
	r.run("delete", "vx", "egress", "10.0.0.0/24")
	set("va")
	isUsed("by the old name", "va", 0)
	r.send("10.0.0.7", 1, 300)
	r.run("set", "vx", "egress", "10.1.0.0/24", "--rate", "1gbit")
	set("vx")
	isUsed("of a hook that was made before", "vx", 900)
	r.ok("topup", "vx", "egress", "10.0.0.0/24", "10.0.0.7", "100b")
	testenv.Must(t, os.RemoveAll(filepath.Join(r.bpffs(), "shapectl")))
	for _, name := range []string{"va", "vx"} { // the kernel detaches programs a moment after their pins went
		testenv.Eventually(t, "nothing is attached to "+name, func() bool {
			ids, _ := netinfo.TCXPrograms(testenv.Link(t, name).Attrs().Index, policy.Egress)
			return len(ids) == 0
		})
	}
	set("va")
	set("vx")
	isUsed("after a reboot, by the old name", "va", 300)
	isUsed("after a reboot", "vx", 800)

	// Names are swapped, and the devices go.
	r.send("10.0.0.7", 1, 300) // va has used 600
	rename(t, "va", "vy")
	rename(t, "vx", "va")
	rename(t, "vy", "vx")
	r.run("topup", "va", "egress", "10.0.0.0/24", "10.0.0.7", "100b")
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "vx")))
	r.run("set", "lo", "egress", "10.9.0.0/24", "--rate", "1gbit")
	testenv.Veth(t, "va", "vb")
	testenv.Veth(t, "vx", "vc")
	set("va")
	set("vx")
	isUsed("of a device with the name of another one", "va", 700)
	isUsed("of the other one", "vx", 600)
}

// What is used of a quota by the calendar is not less once the quota was smaller than that, whatever the file says.
func TestQuotaThatWasSmaller(t *testing.T) {
	r := newRig(t)
	r.env["SHAPECTL_STATE"] = t.TempDir()
	const rule = "va egress 10.0.0.0/24"
	set := func(each, quota string) {
		t.Helper()
		r.run(strings.Fields("set " + rule + " --rate 1gbit --then drop --each " + each + " --quota " + quota)...)
	}
	set("host", "1mb/month")
	r.send("10.0.0.7", 3, 300)
	r.ok(strings.Fields("delete " + rule)...)
	set("host", "100b/month")
	set("host", "1mb/month")
	if n := r.used(rule + " 10.0.0.7"); n != 900 {
		t.Errorf("%d bytes are used, want 900", n)
	}
	for _, period := range []string{"month", "30d"} {
		for _, bytes := range []uint64{1 << 55, 1 << 56, 1<<64 - 1} {
			r.ok(strings.Fields("delete " + rule)...)
			text := fmt.Sprintf(`{"of":%q,"period":%q,"time":%q,"used_bytes":%d}`, rule, period, time.Now().Format(time.RFC3339Nano), bytes)
			testenv.Must(t, os.WriteFile(filepath.Join(r.env["SHAPECTL_STATE"], "quotas.json"), []byte(text), 0o640))
			set("all", "1kb/"+period)
			if says := r.ok("show", "va", "egress", "10.0.0.0/24"); !strings.Contains(says, "used up") {
				t.Errorf("%d bytes used in a %s: %s", bytes, period, says)
			}
		}
	}
}

// A pool and a device may have names that are alike. Older builds wrote "pool" and its name.
func TestQuotaOfAPoolThatIsCalledAsARule(t *testing.T) {
	r := newRig(t)
	r.env["SHAPECTL_STATE"] = t.TempDir()
	rename(t, "va", "pool")
	const pool = "egress 10.0.0.0/8"
	begins := fmt.Sprintf(`{"of":"pool up","period":"month","time":%q,"used_bytes":700}`, time.Now().Format(time.RFC3339Nano))
	testenv.Must(t, os.WriteFile(filepath.Join(r.env["SHAPECTL_STATE"], "quotas.json"), []byte(begins), 0o640))
	r.run(strings.Fields("set pool egress 10.0.0.0/8 --rate 1gbit --quota 1mb/month --then drop")...)
	sender := testenv.NewSender(t, "pool")
	testenv.Must(t, sender.Send(frameTo("10.0.0.7", 300)))
	r.run(strings.Fields("delete pool egress 10.0.0.0/8")...)
	for _, name := range []string{pool, "up"} {
		r.run("set", "--kind", "pool", name, "--new", "--rate", "1gbit", "--quota", "1mb/month", "--then", "drop")
	}
	for name, want := range map[string]string{pool: ": 0 of 1.05 MB", "up": ": 699 B of 1.05 MB"} {
		if got := r.run("topup", "--kind", "pool", name, "1b"); !strings.Contains(got.out, want) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// Of a file that can be neither read nor written, a command tells both. Where no quota begins, it does not say that one does.
func TestQuotasThatCannotBeKept(t *testing.T) {
	r := newRig(t)
	r.env["SHAPECTL_STATE"] = t.TempDir()
	r.run(strings.Fields("set va egress 10.0.0.0/24 --rate 1gbit --quota 1mb/month --then drop")...)
	testenv.Must(t, os.Mkdir(filepath.Join(r.env["SHAPECTL_STATE"], "quotas.json"), 0o700))
	got := r.run(strings.Fields("topup va egress 10.0.0.0/24 1b")...)
	if !strings.Contains(got.err, "name one that is; keep what is used of quotas: ") || strings.Contains(got.err, "begin") {
		t.Errorf("%+v", got)
	}
}

// A name of rules and of their pool means what has a quota.
func TestTopUpOfAName(t *testing.T) {
	r := newRig(t)
	r.ok(strings.Fields("set bob --new --rate 1gbit --quota 1mb/month --then drop")...)
	r.ok(strings.Fields("set va egress 10.2.0.0/24 --rate 1mbit --within bob --name bob")...)
	r.prints("bob: 0 of 1.05 MB are used, and 1.02 kB more are left until the period ends\n", "topup", "bob", "1kb")
	r.refused(exitInput, "only 1049600 B are left", "topup", "bob", "2mb", "--undo")
	r.prints("bob: 1.02 kB of 1.05 MB are used\n", "topup", "bob", "2kb", "--undo")
	r.refused(exitInput, "there is no device nosuch", "topup", "nosuch", "egress", "10.2.0.0/24", "1kb")
	r.refused(exitInput, "that of the pool bob is in force: 'shapectl topup bob SIZE'", "topup", "va", "egress", "10.2.0.0/24", "1kb")
	r.refused(exitInput, "no egress rule for 10.2.1.0/24 on va", "topup", "va", "egress", "10.2.1.0/24", "1kb")
	last := r.ok("export")
	r.ok("apply", r.policy(strings.Replace(last, "10.2.0.0/24", "10.2.9.0/24", 1)))
	r.ok("apply", r.policy(last))
	r.prints("bob: 0 of 1.05 MB are used\n", "topup", "bob", "1kb")
	r.refused(exitInput, "", "rollback")
	if got := r.run("doctor", "va"); strings.Contains(got.out, "policy in force") {
		t.Errorf("after a top-up, the policy before the last is in force: %+v", got)
	}
	r.ok(strings.Fields("set --kind rule bob --quota 1mb/month --then drop")...)
	r.refused(exitInput, "the name stands for several things", "topup", "bob", "1kb")
}

// A device that serve limits, and that is made again, goes on with its quota, also if something is ahead of it.
func TestQuotaOfADeviceThatComesBack(t *testing.T) {
	r := newRig(t)
	r.env["SHAPECTL_STATE"] = t.TempDir()
	file := filepath.Join(t.TempDir(), "policy.yaml")
	left := uint64(1 << 20)
	for i, match := range []string{"dst", "src", "src"} { // with the same rules, it has those of before
		testenv.Must(t, os.WriteFile(file, fmt.Appendf(nil, "devices: {va: {egress: {match: %s, 10.0.0.0/8: {rate: 1gbit, quota: 1mb/month, then: drop}}}}", match), 0o600))
		if i > 0 {
			testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
			testenv.Veth(t, "va", "vb")
		} else {
			r.serve(file)
		}
		var rules []shownRule
		testenv.Eventually(t, "the rule", func() bool {
			rules = r.show()
			return len(rules) > 0 && rules[0].Attached && rules[0].Match == match
		})
		if rules[0].QuotaLeftBytes != left {
			t.Errorf("%d bytes are left of the device's quota, want %d", rules[0].QuotaLeftBytes, left)
		}
		if i == 1 {
			const want = "va egress 10.0.0.0/8: 0 of 1.05 MB are used, and 700 B more are left until the period ends\n"
			if got := r.run("topup", "va", "egress", "10.0.0.0/8", "1000b"); got.out != want {
				t.Error(got)
			}
			left += 1000
			r.refused(exitInput, "at most 1.13 PB can be ahead", "topup", "va", "egress", "10.0.0.0/8", "1024tb")
		}
		left -= 300
		frame := frameTo("10.0.0.7", 300)
		copy(frame[26:30], []byte{10, 0, 0, 8})
		testenv.Must(t, testenv.NewSender(t, "va").Send(frame))
	}
}

// Commands that change something and serve renew the calendars of periods, and serve keeps what is used, again and again.
func TestQuotasAreRenewed(t *testing.T) {
	r := newRig(t)
	r.env["SHAPECTL_STATE"] = t.TempDir()
	r.ok(strings.Fields("set va egress 10.0.0.0/24 --rate 1gbit --quota 1mb/day --then drop")...)
	pins, err := filepath.Glob(filepath.Join(r.bpffs(), "shapectl", "*", "g*", "calendars"))
	testenv.Must(t, err)
	m, err := ebpf.LoadPinnedMap(pins[0], nil)
	testenv.Must(t, err)
	defer m.Close()
	isRenewed := func() bool {
		var all []byte
		all, err := m.LookupBytes(uint32(0))
		testenv.Must(t, err)
		return binary.NativeEndian.Uint64(all) != 0
	}
	outdate := func() {
		t.Helper()
		all, err := m.LookupBytes(uint32(0))
		testenv.Must(t, err)
		testenv.Must(t, m.Put(uint32(0), slices.Concat(make([]byte, 8), all[8:])))
	}
	outdate()
	r.ok("set", "va", "egress", "10.1.0.0/24", "--rate", "1mbit")
	if !isRenewed() {
		t.Error("a command does not renew the calendar")
	}
	keepEvery, renewEvery = time.Nanosecond, time.Nanosecond
	defer func() { keepEvery, renewEvery = time.Minute, time.Hour }()
	ctx, stop := context.WithCancel(t.Context())
	e := &env{out: io.Discard, err: io.Discard, getenv: func(name string) string { return r.env[name] }}
	o, err := e.options()
	testenv.Must(t, err)
	k := &quotaKeeper{env: e, options: o, Pulse: make(pulse.Pulse)}
	round := 0
	err = k.run(ctx, func() {
		if round++; round > 1 && !isRenewed() {
			t.Error("serve does not renew the calendar")
		}
		text, err := os.ReadFile(filepath.Join(r.env["SHAPECTL_STATE"], "quotas.json"))
		if n := strings.Count(string(text), fmt.Sprintf(`"used_bytes":%d`, 300*(round-1))); err != nil && round > 1 || n != min(round-1, 1) {
			t.Errorf("in round %d: %s, %v", round, text, err)
		}
		outdate()
		testenv.Must(t, testenv.NewSender(t, "va").Send(frameTo("10.0.0.7", 300)))
		if round == 3 {
			stop()
		}
	})
	testenv.Must(t, err)
}

// A limit of new flows remembers those that it has seen, although all have one bucket.
func TestNewFlowsOfAll(t *testing.T) {
	r := newRig(t)
	r.ok(strings.Fields("set va egress 10.0.0.0/24 --rate 1gbit --new-flows 1 --new-flows-burst 12")...)
	for i := range 36 {
		r.send(fmt.Sprintf("10.0.0.%d", 1+i%12), 1, 100)
	}
	if rule := r.show()[0]; rule.PassedPackets != 36 {
		t.Errorf("of 36 packets of 12 flows, %d passed", rule.PassedPackets)
	}
}
