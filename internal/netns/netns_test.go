package netns

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A network namespace is found by its name, by a path, and by a process in it.
func TestInNetns(t *testing.T) {
	name, ns := testenv.NewNamedNetns(t)
	var want uint64
	testenv.Must(t, ns.Do(func() (err error) { want, err = Cookie(); return err }))
	own, err := Cookie()
	testenv.Must(t, err)
	process := exec.Command("sleep", "infinity") // one of this process's threads may be in any namespace
	testenv.Must(t, process.Start())
	defer func() { process.Process.Kill(); process.Wait() }()
	pid := fmt.Sprint(process.Process.Pid)
	for given, want := range map[string]uint64{
		name: want, Dir + "/" + name: want, "/proc/" + pid + "/ns/net": own, pid: own,
	} {
		var got uint64
		if err := In(given, func() (err error) { got, err = Cookie(); return err }); err != nil || got != want {
			t.Errorf("%s: in the namespace %d, want %d: %v", given, got, want, err)
		}
	}
}

// The error names what was tried.
func TestNoNetns(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	testenv.Must(t, unix.Mkfifo(fifo, 0o600))
	for given, says := range map[string]string{
		"nosuch":         "there is no /run/netns/nosuch",
		"999999999":      "there is neither /run/netns/999999999 nor a process 999999999",
		dir + "/nosuch":  "there is no " + dir + "/nosuch",
		fifo:             fifo + " is something else",
		"/proc/self/exe": "/proc/self/exe is something else",
		"..":             ".. is something else",
		"-1":             "there is no /run/netns/-1",
	} {
		err := In(given, func() error { t.Errorf("%s is a namespace", given); return nil })
		if !errors.Is(err, ErrNone) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want an error with %q", given, err, says)
		}
	}
}

// What goes on in a namespace ends when another one gets its name.
func TestStay(t *testing.T) {
	name, _ := testenv.NewNamedNetns(t)
	other, _ := testenv.NewNamedNetns(t)
	path := filepath.Join(t.TempDir(), "ns")
	testenv.Must(t, os.Symlink(filepath.Join(Dir, name), path))
	testenv.Must(t, os.Symlink(filepath.Join(Dir, other), path+"2"))
	begun := make(chan bool)
	ended := make(chan error)
	go func() {
		ended <- Stay(t.Context(), path, func(ctx context.Context) error {
			close(begun)
			<-ctx.Done()
			return nil
		})
	}()
	<-begun
	testenv.Must(t, os.Rename(path+"2", path))
	if err := <-ended; !errors.Is(err, ErrNone) || !strings.Contains(err.Error(), "another one has the name") {
		t.Errorf("it ends with %v", err)
	}
}
