package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// result runs a command as a process, to its end.
func (r *rig) result(cmd *exec.Cmd) result {
	r.t.Helper()
	var out, err strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &err
	var exit *exec.ExitError
	if e := cmd.Run(); e != nil && !errors.As(e, &exit) {
		r.t.Fatal(e)
	}
	return result{out.String(), err.String(), cmd.ProcessState.ExitCode()}
}

// The first two commands of a namespace know of each other: only one makes a pool.
func TestNewPoolAtOnce(t *testing.T) {
	r := newRig(t)
	for range 5 {
		var both [2]*exec.Cmd
		var told [2]strings.Builder
		for i := range both {
			both[i] = r.command("set", "up", "--new", "--rate", fmt.Sprint(i+1, "mbit"))
			both[i].Stderr = &told[i]
			testenv.Must(t, both[i].Start())
		}
		for i := range both {
			both[i].Wait()
		}
		first := slices.IndexFunc(both[:], func(cmd *exec.Cmd) bool { return cmd.ProcessState.Success() })
		if first < 0 || !strings.Contains(told[1-first].String(), "there already is a pool up with other values") || r.show("--pools")[0].Rate != uint64(first+1)*1e6 {
			t.Fatal(told[0].String(), told[1].String(), r.labelled())
		}
		r.ok("flush", "--all")
	}
}

// nothingLeft ends the test if the bpffs still has a pin, or va a program.
func (r *rig) nothingLeft() {
	r.t.Helper()
	if pins := r.pins(); len(pins) > 0 {
		r.t.Errorf("pins are left: %v", pins)
	}
	// Seen from another bpffs, programs of ours would be somebody else's.
	other := &rig{r.t, map[string]string{"SHAPECTL_BPFFS": testenv.BPFFS(r.t)}}
	if got := other.run("set", "va", "egress", "10.9.0.0/24", "--rate", "1mbit"); got.code != exitDone {
		r.t.Errorf("programs are left: %s", got.err)
	}
	other.ok("flush", "va")
}

// nobody is a user without any rights of its own.
const nobody = 65534

// asNobody makes a command run without root, but with these capabilities; the
// program must lie where anyone may run it.
func (r *rig) asNobody(program string, capabilities []uintptr, args ...string) *exec.Cmd {
	cmd := r.command(args...)
	cmd.Path = program
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: nobody, Gid: nobody},
		AmbientCaps: capabilities,
	}
	return cmd
}

// publicCopy is this program where everyone may run it.
func publicCopy(t *testing.T) (program, dir string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "shapectl-test-")
	testenv.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	testenv.Must(t, os.Chmod(dir, 0o755))
	self, err := os.ReadFile("/proc/self/exe")
	testenv.Must(t, err)
	program = filepath.Join(dir, "shapectl")
	testenv.Must(t, os.WriteFile(program, self, 0o755))
	return program, dir
}

func TestPermissions(t *testing.T) {
	t.Parallel()
	program, dir := publicCopy(t)
	newRig := func(t *testing.T) *rig {
		r := newRig(t)
		bpffs, err := os.MkdirTemp(dir, "bpffs-")
		testenv.Must(t, err)
		testenv.Must(t, unix.Mount("bpf", bpffs, "bpf", 0, "mode=0700"))
		t.Cleanup(func() { testenv.Unmount(t, bpffs) })
		r.env["SHAPECTL_BPFFS"] = bpffs
		return r
	}
	commands := []string{ // for one direction at a time, as each change of what a program is for loads it for each direction again
		"set va egress 10.0.0.0/24 --rate 1mbit", "set va egress 10.0.1.0/24 --rate 1mbit --algorithm leaky --each host",
		"set va egress 10.0.0.0/24 --rate 2mbit", "show", "show --wide --buckets", "explain va egress 10.0.0.7",
		"delete va egress 10.0.1.0/24", "flush va",
		"set uplink --new --rate 1mbit --share host", "set va ingress 10.0.2.0/24 --rate 1mbit --within uplink",
		"set va ingress 10.0.3.0/24 --algorithm trtcm --cir 1mbit --pir 2mbit", "flush --all", "show",
	}
	enough := []uintptr{unix.CAP_BPF, unix.CAP_NET_ADMIN, unix.CAP_PERFMON}
	for _, hook := range []string{"tcx", "clsact"} {
		t.Run("enough with "+hook, func(t *testing.T) {
			r := newRig(t)
			r.env["SHAPECTL_HOOK"] = hook
			testenv.Must(t, os.Chown(r.bpffs(), nobody, nobody))
			for _, line := range commands {
				got := r.result(r.asNobody(program, enough, strings.Fields(line)...))
				if got.code != exitDone || got.err != "" {
					t.Fatalf("%s: exit %d: %s", line, got.code, got.err)
				}
				if strings.HasPrefix(line, "set") {
					var rules []shownRule
					shown := r.result(r.asNobody(program, enough, "show", "va", "-j"))
					testenv.Must(t, json.Unmarshal([]byte(shown.out), &rules))
					for _, rule := range rules {
						if !rule.Attached || rule.Hook != hook {
							t.Errorf("%s: %+v", line, rule)
						}
					}
				}
			}
			r.nothingLeft()
		})
	}
	for name, capabilities := range map[string][]uintptr{
		"none": nil, "CAP_BPF alone": {unix.CAP_BPF}, "CAP_NET_ADMIN alone": {unix.CAP_NET_ADMIN}, "no CAP_PERFMON": enough[:2],
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			testenv.Must(t, os.Chown(r.bpffs(), nobody, nobody))
			line := "set va egress 10.0.0.0/24 --rate 1mbit"
			got := r.result(r.asNobody(program, capabilities, strings.Fields(line)...))
			r.isRefusal(line, got, exitMissing, "lacks CAP_")
			r.nothingLeft()
		})
	}
	t.Run("rules of root", func(t *testing.T) {
		r := newRig(t)
		r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
		shown, pins := r.ok("show", "-j"), r.pins()
		for _, line := range commands {
			got := r.result(r.asNobody(program, nil, strings.Fields(line)...))
			r.isRefusal(line, got, exitMissing, "CAP_BPF and CAP_PERFMON and CAP_NET_ADMIN; run as root, or ")
		}
		if r.ok("show", "-j") != shown || !slices.Equal(r.pins(), pins) {
			t.Error("something was changed")
		}
	})
}

// makeOtherLayout makes the pins of one rule such as another version would have.
func (r *rig) makeOtherLayout() {
	r.t.Helper()
	pins, err := filepath.Glob(filepath.Join(r.bpffs(), "shapectl", "*", "g*", "hook"))
	if err != nil || len(pins) != 1 {
		r.t.Fatalf("pins of settings: %v, %v", pins, err)
	}
	old, err := ebpf.LoadPinnedMap(pins[0], nil)
	testenv.Must(r.t, err)
	defer old.Close()
	settings, err := old.LookupBytes(uint32(0))
	testenv.Must(r.t, err)
	settings[0]++
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: old.ValueSize(), MaxEntries: 1})
	testenv.Must(r.t, err)
	defer m.Close()
	testenv.Must(r.t, m.Put(uint32(0), settings))
	home := filepath.Dir(filepath.Dir(pins[0]))
	testenv.Must(r.t, errors.Join(os.Remove(pins[0]), m.Pin(pins[0]), os.Remove(filepath.Join(home, "kinds-cgroup"))))
}

// attached is all pins but alive and lock, which have no rules, and what is attached to va.
func (r *rig) attached() []string {
	chain, err := netinfo.Chain(testenv.Link(r.t, "va").Attrs().Index, policy.Egress, nil)
	testenv.Must(r.t, err)
	found := slices.DeleteFunc(r.pins(), func(pin string) bool { return slices.Contains([]string{"alive", "lock"}, filepath.Base(pin)) })
	for _, entry := range chain {
		text, err := json.Marshal(entry)
		testenv.Must(r.t, err)
		found = append(found, string(text))
	}
	return found
}

// A command that does not see the bpffs because of mounts of its own, as in `ip netns exec`, changes nothing and says what to do.
func TestOwnMounts(t *testing.T) {
	newRig(t) // for its network namespace
	self, err := os.Executable()
	testenv.Must(t, err)
	for _, line := range []string{"set va egress 10.0.0.0/24 --rate 1mbit", "show", "flush va", "doctor"} {
		cmd := exec.Command("sh", "-c", "umount -l /sys && mount -t sysfs inner /sys && \"$0\" "+line, self)
		cmd.Env = append(os.Environ(), mainEnv+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), bpffs.ErrMounts.Error()) || !strings.Contains(string(out), "'shapectl -n NAME'") {
			t.Errorf("%s: %v: %s", line, err, out)
		}
	}
	if chain, err := netinfo.Chain(testenv.Link(t, "va").Attrs().Index, policy.Egress, nil); len(chain) > 0 || err != nil {
		t.Errorf("attached: %v, %v", chain, err)
	}
}

func TestExitCodesOfErrors(t *testing.T) {
	for _, c := range []struct {
		err  error
		code int
	}{
		{inputf("x"), exitInput},
		{fmt.Errorf("x: %w", inputf("y")), exitInput},
		{fmt.Errorf("x: %w", fs.ErrPermission), exitMissing},
		{fmt.Errorf("x: %w", unix.EPERM), exitMissing},
		{fmt.Errorf("x: %w", ebpf.ErrNotSupported), exitMissing},
		{fmt.Errorf("x: %w", maps.ErrOtherLayout), exitKernel},
		{errors.New("x"), exitKernel},
	} {
		if got := exitCode(c.err); got != c.code {
			t.Errorf("%v: exit %d, not %d", c.err, got, c.code)
		}
	}
}
