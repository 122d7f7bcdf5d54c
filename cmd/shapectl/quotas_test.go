package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/testenv"
)

// used is what is used of the only quota of a host or rule.
func (r *rig) used(of string) (bytes uint64) {
	r.t.Helper()
	got := r.run(strings.Fields("topup " + of + " 4000tb")...) // refused
	if _, says, found := strings.Cut(got.err, "only "); !found {
		r.t.Fatal(got.err)
	} else if n, _ := fmt.Sscanf(says, "%d B", &bytes); n == 0 && !strings.HasPrefix(says, "0 ") {
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
		r.ok(strings.Fields("set up --new --rate 1gbit --quota 1mb/30d --then 1mbit")...)
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
	r.refused(exitInput, "10.0.0.8: only 0 are used", strings.Fields("topup "+each+" 10.0.0.8 1b")...)
	r.refused(exitInput, "each host has a quota of its own", strings.Fields("topup "+each+" 1b")...)
	r.refused(exitInput, "it has no quota of its own", strings.Fields("topup alice 10.0.0.7 1b")...)
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
		if got.code != exitDone || !strings.Contains(got.err, what) || !strings.Contains(got.err, "new ones begin at 0") {
			t.Errorf("%s: exit %d, %s", what, got.code, got.err)
		}
	}
}
