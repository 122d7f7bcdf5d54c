package loader

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A command that holds a namespace without pins keeps others away from changes.
func TestHold(t *testing.T) {
	testenv.NewNetns(t)
	o := Options{BPFFS: testenv.BPFFS(t), Patience: time.Millisecond}
	first, err := Write(o)
	testenv.Must(t, err)
	second, err := Write(o)
	testenv.Must(t, err)
	testenv.Must(t, first.Hold())
	if err := second.Hold(); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("while another command holds the namespace: %v", err)
	}
	first.Close()
	testenv.Must(t, second.Hold())
	second.Close()
	if left, err := os.ReadDir(second.place.top()); err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
}

// However many commands read, one that changes rules gets its turn.
func TestWritersGoFirst(t *testing.T) {
	dir := home(t.TempDir())
	reader, err := dir.lock(false, 0)
	testenv.Must(t, err)
	written := make(chan error, 1)
	go func() {
		unlock, err := dir.lock(true, lockPatience)
		if err == nil {
			unlock()
		}
		written <- err
	}()
	testenv.Eventually(t, "another reader to be held up", func() bool {
		unlock, err := dir.lock(false, 0)
		if err == nil {
			unlock()
		}
		return errors.Is(err, unix.EWOULDBLOCK)
	})
	reader()
	testenv.Must(t, <-written)
	last, err := dir.lock(false, 0)
	testenv.Must(t, err)
	last()
}
