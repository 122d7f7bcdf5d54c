package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
)

// readersGroup is a group of Debian's, with the number of nobody.
const readersGroup = "nogroup"

// attackEnv makes the test binary try to change what is pinned in a directory.
const attackEnv = "SHAPECTL_TEST_ATTACK"

// newReadersRig is a rig whose rules nobody may read, as a member of a group. systemd mounts a bpffs like this one.
func newReadersRig(t *testing.T) (r *rig, program string) {
	t.Helper()
	program, dir := publicCopy(t)
	r = newRig(t)
	bpffs, err := os.MkdirTemp(dir, "bpffs-")
	testenv.Must(t, err)
	testenv.Must(t, unix.Mount("bpf", bpffs, "bpf", 0, "mode=0700"))
	t.Cleanup(func() { testenv.Unmount(t, bpffs) })
	r.env["SHAPECTL_BPFFS"], r.env["SHAPECTL_GROUP"] = bpffs, readersGroup
	return r, program
}

// asOutsider makes a command run as a user who is in no group that matters.
func (r *rig) asOutsider(program string, args ...string) *exec.Cmd {
	cmd := r.asNobody(program, nil, args...)
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: nobody - 1, Gid: nobody - 1}
	return cmd
}

// unknown is what commands say once that cannot tell whether rules are in force.
const unknown = "cannot tell whether the rules are in force: seeing what is attached needs CAP_NET_ADMIN"

// A member of the group reads what root does, but for what is attached by tcx: that takes CAP_NET_ADMIN.
func TestReaders(t *testing.T) {
	for _, hook := range []string{"tcx", "clsact"} {
		t.Run(hook, func(t *testing.T) {
			if hook == "tcx" && testenv.OlderThan(t, 6, 6) {
				t.Skip("this kernel has no tcx")
			}
			r, program := newReadersRig(t)
			r.env["SHAPECTL_HOOK"] = hook
			r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "8kbit", "--each", "host", "--shadow", "rate=8kbit,each=host")
			r.ok("set", "va", "ingress", "::/0", "--rate", "1mbit")
			r.send("10.0.0.7", 60, 1000)

			says, saysJSON := "shapectl: "+unknown+"\n", `{"warning":"`+unknown+"\"}\n"
			if hook == "clsact" {
				says, saysJSON = "", "" // filters are listed for anybody
			}
			read := func(says string, capabilities []uintptr, args ...string) string {
				t.Helper()
				got := r.result(r.asNobody(program, capabilities, args...))
				if got.code != exitDone || got.err != says {
					t.Errorf("%v: %+v", args, got)
				}
				return got.out
			}
			for _, args := range [][]string{
				{"export"}, {"show"}, {"show", "va"}, {"show", "--sentences"}, {"show", "--shadow"},
			} {
				if got, want := read(says, nil, args...), r.ok(args...); got != want {
					t.Errorf("%v: a member reads\n%s, and root\n%s", args, got, want)
				}
			}
			for _, args := range [][]string{{"show", "--buckets"}, {"ask", "va", "egress", "10.0.0.7"}, {"explain", "10.0.0.7"}} {
				if got := read(says, nil, args...); !strings.Contains(got, "10.0.0.7") || strings.Contains(got, "NOT IN FORCE") {
					t.Errorf("%v: %s", args, got)
				}
			}
			if got := read(says, nil, "explain", "va", "egress", "10.0.0.7"); !strings.Contains(got, "conforms, and passes") {
				t.Errorf("explain: %s", got)
			}
			policy := filepath.Join(filepath.Dir(program), "policy.yaml")
			testenv.Must(t, os.WriteFile(policy, []byte(r.ok("export")), 0o644))
			if got := read(says, nil, "diff", policy); got != "" && !strings.Contains(got, "nothing") {
				t.Errorf("diff: %s", got)
			}
			r.readsRules(read(saysJSON, nil, "show", "-j"), hook == "clsact", hook)
			r.readsRules(read("", []uintptr{unix.CAP_NET_ADMIN}, "show", "-j"), true, hook)
			r.ok("set", "up", "--new", "--rate", "2mbit", "--adapt-min", "1mbit")
			l := loader.NewLessee(loader.LineLeases)
			testenv.Must(t, l.Pools(loader.Options{BPFFS: r.bpffs()}, func(*maps.Set) bool { return true }))
			l.Close() // the lock stays, and a member cannot open it
			doctor := r.result(r.asNobody(program, nil, "doctor", "-v"))
			if doctor.code != exitDone || !strings.Contains(doctor.out, "this process may read the rules") || strings.Contains(doctor.out, "nothing else is attached") {
				t.Errorf("doctor: %+v", doctor)
			}
			r.ok("delete", "up")

			// Something else takes the program off.
			if hook == "clsact" {
				testenv.Must(t, netlink.QdiscDel(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
					LinkIndex: testenv.Link(t, "va").Attrs().Index, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0),
				}}))
			} else {
				links, err := filepath.Glob(filepath.Join(r.bpffs(), "shapectl", "*", "*-*gress", "link"))
				testenv.Must(t, err)
				for _, pin := range links {
					l, err := link.LoadPinnedLink(pin, nil)
					testenv.Must(t, err)
					testenv.Must(t, l.Detach())
					l.Close()
				}
				r.readsRules(read(saysJSON, nil, "show", "-j"), false, hook)
			}
			if got := read("", []uintptr{unix.CAP_NET_ADMIN}, "show"); strings.Count(got, "NOT IN FORCE: detached") != 2 {
				t.Errorf("a member does not see that the program was detached: %s", got)
			}
			r.run("set", "va", "egress", "10.0.0.0/24", "--rate", "8kbit") // which attaches it again
			r.run("set", "va", "ingress", "::/0", "--rate", "1mbit")
			r.readsRules(read("", []uintptr{unix.CAP_NET_ADMIN}, "show", "-j"), true, hook)
			testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
			gone := read(says, nil, "show")
			if is := strings.Contains(gone, "NOT IN FORCE"); is != (hook == "clsact") {
				t.Errorf("a link may be on a device that has moved: %s", gone)
			}
		})
	}
}

// readsRules ends the test unless JSON of two rules says that they are attached, or that this is not known.
func (r *rig) readsRules(shown string, known bool, hook string) {
	r.t.Helper()
	var rules []struct {
		shownRule
		Attached *bool `json:"attached"`
	}
	testenv.Must(r.t, json.Unmarshal([]byte(shown), &rules))
	if len(rules) != 2 {
		r.t.Fatalf("%d rules: %s", len(rules), shown)
	}
	for _, rule := range rules {
		if (rule.Attached != nil) != known || known && (!*rule.Attached || rule.Hook != hook) || !known && rule.State != "unknown" {
			r.t.Errorf("a member reads %+v, attached: %v", rule, rule.Attached)
		}
	}
}

// Neither a member of the group, nor one with the capability that shows what is attached, can change anything.
func TestReadersChangeNothing(t *testing.T) {
	r, program := newReadersRig(t)
	policy := filepath.Join(filepath.Dir(program), "policy.yaml")
	testenv.Must(t, os.WriteFile(policy, []byte("devices: {va: {egress: {10.0.0.0/24: 1mbit, 10.0.1.0/24: 1mbit}}}\n"), 0o644))
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit", "--each", "host")
	r.ok("apply", policy, "--confirm", "1h")
	state := func() string {
		var all strings.Builder
		testenv.Must(t, filepath.WalkDir(r.bpffs(), func(path string, _ fs.DirEntry, err error) error {
			var st unix.Stat_t
			testenv.Must(t, unix.Lstat(path, &st))
			fmt.Fprintln(&all, path, st.Mode, st.Uid, st.Gid, st.Ino)
			return err
		}))
		left := regexp.MustCompile(`"reverts_in_ns": \d+`)
		return all.String() + left.ReplaceAllString(r.ok("show", "va", "-j"), "")
	}
	before := state()
	for _, capabilities := range [][]uintptr{nil, {unix.CAP_NET_ADMIN}} {
		for _, line := range []string{
			"set va egress 10.0.0.0/24 --rate 2mbit", "set vb egress 10.0.0.0/24 --rate 2mbit --excess delay --setup-fq",
			"delete va egress 10.0.0.0/24", "flush va", "flush --all", "confirm", "rollback", "apply " + policy, "watch " + policy,
		} {
			got := r.result(r.asNobody(program, capabilities, strings.Fields(line)...))
			r.isRefusal(line, got, exitMissing, "; run as root, or with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN")
		}
	}
	attack := r.asNobody(program, nil)
	attack.Env = append(os.Environ(), attackEnv+"="+r.bpffs())
	if got := r.result(attack); got.code != exitDone || got.out != "" || got.err != "" {
		t.Errorf("a member could do this: %+v", got)
	}
	if after := state(); after != before {
		t.Errorf("before:\n%s, after:\n%s", before, after)
	}
}

// attack tries to change each file below a directory, and prints with what it succeeded.
func attack(dir string) {
	tell := func(what string, err error) {
		if err == nil {
			fmt.Println(what)
		}
	}
	seen := 0
	home, _ := filepath.Glob(filepath.Join(dir, "shapectl", "*"))
	for _, root := range append(home, filepath.Join(dir, "shapectl"), dir) {
		filepath.WalkDir(root, func(path string, _ fs.DirEntry, _ error) error {
			seen++
			tell("chmod "+path, os.Chmod(path, 0o777))
			tell("chown "+path, os.Chown(path, nobody, nobody))
			tell("rename "+path, os.Rename(path, path+"-new"))
			tell("link "+path, os.Link(path, path+"-link"))
			tell("make "+path, os.Mkdir(filepath.Join(path, "new"), 0o700))
			tell("remove "+path, os.Remove(path))
			if m, err := ebpf.LoadPinnedMap(path, nil); err == nil {
				fmt.Println("write map", path, m)
			}
			if m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true}); err == nil {
				tell("update "+path, m.Put(uint32(0), make([]byte, m.ValueSize())))
				tell("delete from "+path, m.Delete(uint32(0)))
				tell("freeze "+path, m.Freeze())
				_, err = unix.Mmap(m.FD(), 0, int(m.ValueSize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
				tell("map "+path, err)
				tell("pin "+path, m.Pin(filepath.Join(dir, "shapectl", "mine")))
				m.Close()
			}
			l, err := link.LoadPinnedLink(path, nil)
			tell("open link "+path, err)
			if err == nil {
				tell("detach "+path, l.Detach())
			}
			_, err = ebpf.LoadPinnedProgram(path, nil)
			tell("open program "+path, err)
			return nil
		})
	}
	_, program := ebpf.NewProgramFromID(1)
	_, mapped := ebpf.NewMapFromID(1)
	_, linked := link.NewFromID(1)
	for _, err := range []error{program, mapped, linked} {
		if !errors.Is(err, unix.EPERM) {
			fmt.Println("open by number:", err)
		}
	}
	if seen < 20 {
		fmt.Println("there are only", seen, "files to try")
	}
}

// A member can keep the lock that readers take. Neither changes nor readers wait for that for long: a change can be
// confirmed in time.
func TestReaderKeepsTheLock(t *testing.T) {
	t.Parallel()
	r, _ := newReadersRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	homes, err := filepath.Glob(filepath.Join(r.bpffs(), "shapectl", "*"))
	testenv.Must(t, err)
	if r.another("ls", filepath.Join(homes[0], "lock")) == nil {
		t.Error("a member can open the lock of those who change rules")
	}
	cmd := exec.Command("flock", homes[0], "sh", "-c", "echo locked; exec sleep 60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, Setpgid: true}
	said, err := cmd.StdoutPipe()
	testenv.Must(t, err)
	testenv.Must(t, cmd.Start())
	t.Cleanup(func() { syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); cmd.Wait() })
	_, err = said.Read(make([]byte, 8))
	testenv.Must(t, err)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "2mbit")
	r.ok("apply", r.policy("devices: {va: {egress: {10.0.0.0/24: 3mbit}}}\n"), "--confirm", "8s")
	r.ok("confirm")
	if rules := r.show(); len(rules) != 1 || rules[0].Rate != 3e6 {
		t.Errorf("rules are %+v", rules)
	}
}

// Who is not in the group is told what to do, in one line.
func TestOutsiders(t *testing.T) {
	r, program := newReadersRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	policy := filepath.Join(filepath.Dir(program), "policy.yaml")
	testenv.Must(t, os.WriteFile(policy, []byte("devices: {}\n"), 0o644))
	for _, line := range []string{"show", "show -j", "ask va egress 10.0.0.7", "explain 10.0.0.7", "export", "diff " + policy} {
		got := r.result(r.asOutsider(program, strings.Fields(line)...))
		r.isRefusal(line, got, exitMissing, "permission denied; run as root, or ask root to add you to the group shapectl")
	}
	if got := r.result(r.asOutsider(program, "doctor")); got.code != exitMissing || !strings.Contains(strings.Join(strings.Fields(got.out), " "), "this user may not read the rules") {
		t.Errorf("doctor: %+v", got)
	}
	r.env["SHAPECTL_GROUP"] = "no-such-group"
	r.refused(exitInput, "no such group: no-such-group; name a group that there is", "flush", "va")
}

// A group that is made later may read rules that are there, and none may once it is gone. What other
// users may do with the bpffs stays as it is.
func TestReadersComeAndGo(t *testing.T) {
	for _, mode := range []os.FileMode{0o700, 0o755, 0o777 | os.ModeSticky} {
		t.Run(mode.String(), func(t *testing.T) {
			r, program := newReadersRig(t)
			testenv.Must(t, os.Chmod(r.bpffs(), mode))
			bpffs, err := os.Stat(r.bpffs())
			testenv.Must(t, err)
			delete(r.env, "SHAPECTL_GROUP")
			set := func() { t.Helper(); r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit", "--each", "host") }
			reads := func(want bool) {
				t.Helper()
				got := r.result(r.asNobody(program, []uintptr{unix.CAP_NET_ADMIN}, "show", "-j", "va"))
				if (got.code == exitDone) != want || want && !strings.Contains(got.out, `"attached": true`) {
					t.Errorf("%+v", got)
				}
				if got := r.result(r.asOutsider(program, "show")); got.code != exitMissing {
					t.Errorf("an outsider reads: %+v", got)
				}
			}
			set()
			reads(false)
			r.env["SHAPECTL_GROUP"] = readersGroup
			set()
			reads(true)
			r.ok("set", "va", "ingress", "10.0.0.0/24", "--rate", "1mbit") // what is made later is like that, too
			r.ok("set", "vb", "egress", "10.0.0.0/24", "--rate", "1mbit")
			reads(true)
			delete(r.env, "SHAPECTL_GROUP")
			set()
			reads(false)
			for _, pin := range r.pins() {
				var st unix.Stat_t
				testenv.Must(t, unix.Lstat(pin, &st))
				if st.Gid != 0 || st.Mode&0o077 != 0 {
					t.Errorf("%s has group %d and mode %#o", pin, st.Gid, st.Mode)
				}
			}
			if now, err := os.Stat(r.bpffs()); err != nil || now.Mode() != bpffs.Mode() || now.Sys().(*syscall.Stat_t).Gid != 0 {
				t.Errorf("the bpffs had %v, and has %v, %v", bpffs.Mode(), now.Mode(), err)
			}
			r.ok("flush", "--all")
			if !slices.Equal(r.pins(), nil) {
				t.Errorf("pins are left: %v", r.pins())
			}
		})
	}
}
