package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/maps"
)

// A Generation identifies the maps of a namespace. Growth, another build, and the first rule after none make others. It
// is the zero value where there are none.
type Generation struct {
	device, inode uint64        // of its directory
	changed       unix.Timespec // tells it from a later one with the same inode
}

// identify identifies the generation in a directory.
func identify(dir string) (Generation, error) {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return Generation{}, fmt.Errorf("look at the pins in %s: %w", dir, err)
	}
	return Generation{st.Dev, st.Ino, st.Ctim}, nil
}

// CurrentGeneration is that of the calling thread's namespace.
func CurrentGeneration(o Options) (Generation, error) {
	at, err := locate(o)
	if err != nil {
		return Generation{}, err
	}
	return at.home().generation()
}

func (dir home) generation() (Generation, error) {
	for {
		names, err := generationsIn(string(dir))
		if err != nil || len(names) == 0 {
			if errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
			return Generation{}, err
		}
		newest, err := identify(dir.pin(names[len(names)-1]))
		if !errors.Is(err, fs.ErrNotExist) { // else a command has replaced it just now
			return newest, err
		}
	}
}

// Listen opens the maps of the calling thread's namespace for Store.Listen, and keeps them open without the lock. The
// store is nil where there are no rules. What the caller may change in it are listeners.
func Listen(o Options) (*maps.Store, Generation, error) {
	n, err := open(o, true, nil)
	if err != nil {
		return nil, Generation{}, err
	}
	defer n.Close()
	if n.pins.store == nil {
		return nil, Generation{}, n.pins.readable()
	}
	generation, err := n.pins.dir.generation()
	if err != nil {
		return nil, Generation{}, err
	}
	return n.pins.store.Hold(), generation, nil
}

// Look calls f with the maps of the calling thread's namespace for reading, while no command changes them; with nil where there
// are no rules. The error wraps unix.EWOULDBLOCK if a command is at work.
func Look(o Options, f func(*maps.Store) error) error {
	o.Patience = lookPatience
	n, err := Read(o)
	if err != nil {
		return err
	}
	defer n.Close()
	if err := n.pins.readable(); err != nil {
		return err
	}
	return f(n.pins.store)
}

// lookPatience is short: whoever looks, looks again.
const lookPatience = 50 * time.Millisecond
