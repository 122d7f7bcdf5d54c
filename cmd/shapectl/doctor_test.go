package main

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// bridged makes va a port of a bridge br.
func (r *rig) bridged() {
	r.t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "br"
	testenv.AddLink(r.t, &netlink.Bridge{LinkAttrs: attrs})
	testenv.Must(r.t, netlink.LinkSetMaster(testenv.Link(r.t, "va"), testenv.Link(r.t, "br")))
}

// examined is "status device direction check" of all that doctor finds and is not ok. A packet that nobody sent is no news here.
func (r *rig) examined(args ...string) (found result) {
	r.t.Helper()
	found = r.run(append([]string{"doctor", "-j"}, args...)...)
	var objects []map[string]string
	if err := json.Unmarshal([]byte(found.out), &objects); err != nil {
		r.t.Fatalf("%v in %+v", err, found)
	}
	found.out = ""
	for _, o := range objects {
		keys := slices.Sorted(maps.Keys(o))
		if want := []string{"advice", "check", "device", "direction", "finding", "status"}; !slices.Equal(keys, want) {
			r.t.Errorf("fields %q, want %q", keys, want)
		}
		if o["status"] != "ok" && o["check"] != "traffic" {
			found.out += strings.Join([]string{o["status"], o["device"], o["direction"], o["check"]}, " ") + "\n"
		}
	}
	return found
}

// doctorFinds ends the test unless that is what doctor finds.
func (r *rig) doctorFinds(code int, want ...string) {
	r.t.Helper()
	if got := r.examined(); got.code != code || !slices.Equal(slices.Collect(strings.Lines(got.out)), want) {
		r.t.Errorf("doctor: exit %d, found %q, want %q", got.code, got.out, want)
	}
}

// foreignProgram passes packets on.
func foreignProgram(t *testing.T, name string) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: name, Type: ebpf.SchedCLS, License: "MIT",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1 /* TCX_NEXT */), asm.Return()},
	})
	testenv.Must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func TestDoctorOnChain(t *testing.T) {
	r := newRig(t)
	r.bridged()
	va, foreign := testenv.Link(t, "va"), foreignProgram(t, "foreign")
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "100mbit")

	testenv.Must(t, netlink.QdiscAdd(clsactQdisc(va)))
	testenv.Must(t, netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: va.Attrs().Index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1,
		},
		Fd: foreign.FD(), Name: "their_filter", DirectAction: true,
	}))
	r.doctorFinds(exitDone, "note va egress chain\n")

	r.attachFirst("foreign")
	r.doctorFinds(exitDegraded, "warning va egress chain\n", "note va egress chain\n")
	if text := r.run("doctor", "-j").out; !strings.Contains(text, "program foreign (tcx, ") || !strings.Contains(text, "program their_filter (clsact, ") {
		t.Errorf("the programs are not named in\n%s", text)
	}

	// What it advises helps.
	r.ok("flush", "va", "egress")
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "100mbit")
	r.doctorFinds(exitDone, "note va egress chain\n")
}

func TestDoctorWithoutPermissions(t *testing.T) {
	r := newRig(t)
	r.bridged()
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "100mbit")
	// Of this thread only, which is the test's own.
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var have, none [2]unix.CapUserData
	testenv.Must(t, unix.Capget(&header, &have[0]))
	none = have
	none[0].Effective, none[1].Effective = 0, 0
	testenv.Must(t, unix.Capset(&header, &none[0]))
	got := func() result {
		defer func() { testenv.Must(t, unix.Capset(&header, &have[0])) }()
		return r.run("doctor", "-v", "va")
	}()
	out, stderr := got.out, got.err
	if got.code != exitMissing || !strings.Contains(out, "failed   permissions: this process lacks CAP_BPF and CAP_PERFMON") || strings.Contains(out, "no rules") {
		t.Errorf("doctor says\n%s", out)
	}
	if strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, "permissions") {
		t.Errorf("on stderr: %q", stderr)
	}
	r.doctorFinds(exitDone)
}

func TestDoctorOnRouter(t *testing.T) {
	r := newRig(t)
	r.bridged()
	br := testenv.Link(t, "br")
	testenv.Must(t, netlink.LinkSetGSOMaxSize(br, 4096))
	for _, family := range []string{"ipv4", "ipv6"} {
		testenv.Must(t, os.WriteFile("/proc/sys/net/"+family+"/conf/all/forwarding", []byte("0"), 0))
	}
	r.ok("set", "br", "egress", "0.0.0.0/0", "--rate", "1mbit", "--capacity", "4096b")
	r.doctorFinds(exitDone, "note br egress path\n")

	for _, set := range []string{"ipv4/conf/all/forwarding=1", "ipv6/conf/all/forwarding=1", "ipv6/conf/br/disable_ipv6=0"} {
		file, value, _ := strings.Cut(set, "=")
		testenv.Must(t, os.WriteFile("/proc/sys/net/"+file, []byte(value), 0))
	}
	r.doctorFinds(exitDegraded, "warning br egress capacity\n", "note br egress path\n", "warning br egress families\n")
	r.doctorSays(exitDegraded, "less than the largest packet (65536), as forwarded packets arrive merged (GRO) at v", "'shapectl set br egress ::/0 --rate RATE'")
}

// What is within pools is known for all devices, also for those that are gone.
func TestDoctorWithPools(t *testing.T) {
	r := newRig(t)
	r.bridged()
	r.ok("set", "uplink", "--new", "--rate", "100mbit", "--share", "host")
	r.ok("set", "spare", "--new", "--rate", "100mbit")
	r.ok("set", "vb", "egress", "10.0.0.0/8", "--rate", "100mbit", "--within", "uplink", "--guarantee", "10mbit", "--name", "home")
	r.doctorFinds(exitDone, "note   pools\n")

	n, err := loader.Write(loader.Options{BPFFS: r.bpffs()})
	testenv.Must(t, err)
	h := n.Pools()
	uplink, _ := h.Set.Find(policy.PoolKey("uplink"))
	uplink.Excess, uplink.Queue, uplink.ECNAbove = policy.Delay, 10_000, policy.Never // as if the fq of vb had gone since
	_, err = h.Set.Put(uplink.Rule)
	testenv.Must(t, err)
	h.Close()
	n.Close()
	r.doctorFinds(exitDegraded, "note   pools\n", "failed vb egress queue\n")

	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "vb")))
	r.doctorFinds(exitDegraded, "note   pools\n", "failed vb egress state\n")
}

// Frames that are not IP pass any limit. doctor counts them, once they are more than those of a link's protocols.
func TestDoctorCountsFramesThatAreNotIP(t *testing.T) {
	t.Parallel()
	eachHook(t, func(t *testing.T, r *rig) {
		r.ok("set", "va", "egress", "any", "--rate", "1mbit")
		frame := frameTo("10.0.0.7", 1000)
		frame[12], frame[13] = 0x88, 0x64 // a PPPoE session
		sender := testenv.NewSender(t, "va")
		for range 999 {
			testenv.Must(t, sender.Send(frame))
		}
		if got := r.run("doctor"); strings.Contains(got.out, "not IP") {
			t.Errorf("after 999 frames: %s", got.out)
		}
		testenv.Must(t, sender.Send(frame))
		if got := r.run("doctor"); got.code != exitDegraded || !strings.Contains(got.out, "1000 frames with 1.00 MB were not IP") {
			t.Errorf("after 1000 frames: exit code %d, %s", got.code, got.out)
		}
		r.ok("flush", "va")
		r.ok("set", "va", "egress", "any", "--rate", "1mbit")
		if got := r.run("doctor"); strings.Contains(got.out, "not IP") {
			t.Errorf("after a new rule: %s", got.out)
		}
	})
}

// A limit stays in force while something deletes the pin of its own program, and not without that of all. doctor says which are gone,
// and its advice helps.
func TestDoctorOfDeletedPins(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		lose := func(pin string) {
			pins, err := filepath.Glob(filepath.Join(r.bpffs(), "shapectl", "*", pin))
			testenv.Must(t, err)
			for _, path := range pins {
				testenv.Must(t, os.Remove(path))
			}
		}
		programs := func(want int) {
			t.Helper()
			chain, err := netinfo.Chain(testenv.Link(t, "va").Attrs().Index, policy.Egress, nil)
			if err != nil || len(chain) != want {
				t.Errorf("attached are %+v, %v, want %d", chain, err, want)
			}
		}
		file := r.policy("devices: {va: {egress: {10.0.0.0/24: 1mbit}}}")
		r.ok("apply", file)
		for _, mend := range [][]string{{"apply", file}, {"set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit"}} {
			lose("*/program")
			r.doctorSays(exitDegraded, "deleted the pin of the program that is attached -> set one of them again", "1 warning")
			if got := r.ok("explain", "va", "egress", "10.0.0.7"); !strings.Contains(bare(got), ", decides") || strings.Contains(got, "another bpffs") {
				t.Errorf("explain says %s", got)
			}
			r.ok(mend...)
			r.doctorSays(exitDone, "0 warnings")
			programs(1)
		}
		for _, pin := range []string{"g*/programs", "kinds"} {
			lose(pin)
			r.doctorSays(exitMissing, "something deleted the pin "+r.bpffs(), "apply the policy again", "not in force: the programs are gone")
			if got := r.ok("show"); !strings.Contains(got, "NOT IN FORCE") {
				t.Errorf("show says %s", got)
			}
			if got := r.run("apply", file); got.code != exitDone || !strings.Contains(got.err, "restored limits that were not in force, as something had deleted the pin "+r.bpffs()) {
				t.Errorf("apply: %+v", got)
			}
			r.doctorSays(exitDone, "0 warnings")
			programs(1)
		}
		lose("g*/rules")
		r.doctorSays(exitDegraded, "/rules", "something deleted the pin", "flush --all")
		r.refused(exitKernel, "/rules; rules may still be in force; nothing was changed", "set", "va", "egress", "10.0.0.0/24", "--rate", "2mbit")
		r.ok("flush", "--all")
		programs(0)
		r.doctorSays(exitDone, "0 warnings")
	})
}
