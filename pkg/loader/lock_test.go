package loader

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

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
