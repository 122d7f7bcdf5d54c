package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// newSharedRig is a rig with a bpffs in a directory that others may enter.
func newSharedRig(t *testing.T, dir string, mode os.FileMode) *rig {
	t.Helper()
	r := newRig(t)
	bpffs, err := os.MkdirTemp(dir, "bpffs-")
	testenv.Must(t, err)
	testenv.Must(t, unix.Mount("bpf", bpffs, "bpf", 0, ""))
	t.Cleanup(func() { testenv.Unmount(t, bpffs) })
	testenv.Must(t, os.Chmod(bpffs, mode))
	r.env["SHAPECTL_BPFFS"] = bpffs
	return r
}

// another runs a command of the system as another user, below the bpffs.
func (r *rig) another(args ...string) error {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir = r.bpffs()
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	return cmd.Run()
}

// distrusts ends the test unless commands refuse what is in the bpffs, and doctor says why.
func (r *rig) distrusts(says string) {
	r.t.Helper()
	for _, line := range []string{"set va egress 10.0.0.0/24 --rate 1mbit", "show", "flush va", "export", "rollback"} {
		r.refused(exitMissing, says, strings.Fields(line)...)
		r.refused(exitMissing, "could replace what is pinned there; ", strings.Fields(line)...)
	}
	got := r.run("doctor")
	if got.code != exitMissing || !strings.Contains(strings.Join(strings.Fields(got.out), " "), says) {
		r.t.Errorf("doctor does not say %q: %+v", says, got)
	}
}

// Where other users may write to the bpffs, their directories are not taken for
// those of shapectl, and nobody can replace what it has pinned.
func TestBPFFSThatOthersMayWriteTo(t *testing.T) {
	program, dir := publicCopy(t)
	const sticky = 0o777 | os.ModeSticky
	t.Run("theirs is first", func(t *testing.T) {
		r := newSharedRig(t, dir, sticky)
		top := filepath.Join(r.bpffs(), "shapectl")
		testenv.Must(t, r.another("mkdir", "shapectl"))
		r.distrusts(`shapectl" belongs to user 65534`)
		testenv.Must(t, os.Remove(top)) // as it is empty still

		r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
		if r.another("mv", "shapectl", "theirs") == nil {
			t.Error("another user has renamed it")
		}
		testenv.Must(t, r.another("mkdir", "theirs"))
		r.ok("flush", "va")
		r.nothingLeft()
	})
	t.Run("symbolic link", func(t *testing.T) {
		r := newSharedRig(t, dir, sticky)
		testenv.Must(t, r.another("mkdir", "theirs"))
		testenv.Must(t, r.another("ln", "-s", "theirs", "shapectl"))
		r.distrusts(`shapectl" is not a directory`)
		if made, err := os.ReadDir(filepath.Join(r.bpffs(), "theirs")); err != nil || len(made) > 0 {
			t.Errorf("something was made below the link: %v, %v", made, err)
		}
	})
	t.Run("not sticky", func(t *testing.T) {
		r := newSharedRig(t, dir, 0o777)
		r.distrusts(`has mode 0777`)
		r.nothingPinned()
	})
	t.Run("what was made writable", func(t *testing.T) {
		r := newSharedRig(t, dir, sticky)
		r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
		for path := filepath.Join(r.bpffs(), "shapectl", "*", "g0"); path != r.bpffs(); path = filepath.Dir(path) {
			level, err := filepath.Glob(path)
			testenv.Must(t, err)
			testenv.Must(t, os.Chmod(level[0], 0o770))
			r.distrusts(filepath.Base(level[0]) + `" has mode 0770`)
			testenv.Must(t, os.Chmod(level[0], 0o750))
			testenv.Must(t, os.Chown(level[0], nobody, nobody))
			r.distrusts(filepath.Base(level[0]) + `" belongs to user 65534`)
			testenv.Must(t, os.Chown(level[0], 0, 0))
		}
		r.ok("flush", "va")
		r.nothingLeft()
	})
	t.Run("a user with capabilities", func(t *testing.T) {
		r := newSharedRig(t, dir, sticky)
		for _, line := range []string{"set va egress 10.0.0.0/24 --rate 1mbit", "show", "flush va"} {
			got := r.result(r.asNobody(program, []uintptr{unix.CAP_BPF, unix.CAP_NET_ADMIN, unix.CAP_PERFMON}, strings.Fields(line)...))
			if got.code != exitDone || got.err != "" {
				t.Errorf("%s: %+v", line, got)
			}
			if line != "flush va" {
				r.distrusts(`shapectl" belongs to user 65534`)
			}
		}
	})
}

// nothingPinned ends the test if there is a directory of shapectl.
func (r *rig) nothingPinned() {
	r.t.Helper()
	if _, err := os.Stat(filepath.Join(r.bpffs(), "shapectl")); err == nil {
		r.t.Error("pins were made")
	}
}

// TestFilesOfOthers sees that root takes no policy and no token from a file that another user owns or can write to, unless
// that user called sudo.
func TestFilesOfOthers(t *testing.T) {
	r := newRig(t)
	policy, token := r.policy("devices: {va: {egress: {10.0.0.0/24: 1mbit}}}\n"), filepath.Join(t.TempDir(), "token")
	testenv.Must(t, os.WriteFile(token, []byte("0123456789abcdef0123456789abcdef"), 0o600))
	refused := func(says string) {
		t.Helper()
		for _, command := range []string{"apply", "diff", "serve --listen none --socket s"} {
			r.refused(exitInput, says, append(strings.Fields(command), policy)...)
		}
	}
	testenv.Must(t, errors.Join(os.Chown(policy, nobody, 0), os.Chown(token, nobody, 0)))
	refused("it belongs to user 65534, who could change it at any time; run 'chown root' on it")
	r.refused(exitInput, "it belongs to user 65534", "serve", "--listen", "none", "--socket", "s", "--token-file", token)
	testenv.Must(t, errors.Join(os.Chown(policy, 0, 0), os.Chmod(policy, 0o620)))
	refused("other users can write to it; run 'chmod go-w' on it")
	if rules := r.show(); len(rules) != 0 {
		t.Errorf("there is %v", rules)
	}
	testenv.Must(t, errors.Join(os.Chown(policy, nobody, nobody), os.Chmod(policy, 0o644)))
	t.Setenv("SUDO_UID", "65534")
	r.ok("apply", policy)
}
