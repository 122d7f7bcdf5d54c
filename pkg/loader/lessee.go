package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/pkg/maps"
)

// ErrLessee means that another process renews these leases of the network namespace.
var ErrLessee = errors.New("another process renews the leases of this network namespace")

// A LeaseKind tells who grants leases. It is the name of a directory that the process locks which renews them.
type LeaseKind string

const (
	ClusterLeases LeaseKind = "lessee"
	LineLeases    LeaseKind = "lessee-line"
)

// leasePatience is short: a lease that comes late is of no use, and the next one comes soon.
const leasePatience = 300 * time.Millisecond

// claimPatience is enough for a second try, as HasLessee may have the lock for a moment.
const claimPatience = time.Millisecond

// A Lessee is the process that renews the leases of a kind of a network namespace's pools. It keeps the maps open for changes while
// there are any, and holds no lock on them between two calls.
type Lessee struct {
	kind    LeaseKind
	kept    Kept
	claimed *os.File

	none       *maps.Watch // of rules and pools among which none had leases to renew; else nil
	generation Generation  // of these
}

// NewLessee returns the Lessee of a process.
func NewLessee(kind LeaseKind) *Lessee { return &Lessee{kind: kind} }

// Close lets another process renew the leases.
func (l *Lessee) Close() {
	l.kept.Close()
	l.none.Close()
	l.release()
}

func (l *Lessee) release() {
	if l.claimed != nil {
		l.claimed.Close()
		l.claimed = nil
	}
}

// Pools calls f with the pools of the calling thread's namespace, unless there are neither rules nor pools. No command
// changes them meanwhile. If f returns true, there are leases to renew. Then the error wraps ErrLessee if there is another
// Lessee of that kind. It wraps unix.EWOULDBLOCK if a command is at work.
func (l *Lessee) Pools(o Options, f func(pools *maps.Set) (renews bool)) error {
	if is, err := CurrentGeneration(o); err == nil && is == l.generation && l.none.Same() {
		return nil
	}
	l.none.Close()
	l.none = nil
	o.Patience, o.Renews = leasePatience, true
	n, err := l.kept.Read(o)
	if err != nil {
		return err
	}
	defer n.Close()
	if n.pins.store == nil {
		return n.pins.readable()
	}
	if was := n.pins.store.Stamp(); !f(n.pins.store.Pools()) {
		l.release()
		l.generation = n.pins.generation
		l.none, err = n.pins.store.Watch(was)
		l.kept.Close()
		return err
	}
	return l.claim(n.pins.dir)
}

// claim makes this process the one that renews the leases. A home may be removed and made anew meanwhile.
func (l *Lessee) claim(dir home) error {
	path := dir.pin(string(l.kind))
	if l.claimed != nil {
		held, err1 := l.claimed.Stat()
		there, err2 := os.Stat(path)
		if err1 == nil && err2 == nil && os.SameFile(held, there) {
			return nil
		}
		l.release()
	}
	if err := bpffs.MakeDir(path); err != nil {
		return err
	}
	var err error
	if l.claimed, err = bpffs.Lock(path, true, claimPatience); errors.Is(err, unix.EWOULDBLOCK) {
		return ErrLessee
	}
	return err
}

// Renew calls f with the pools that Pools had, as far as they still exist, while no other command is at work. f may renew
// leases, and must change nothing else. The error wraps unix.EWOULDBLOCK if a command is at work.
func (l *Lessee) Renew(o Options, f func(pools *maps.Set)) error {
	o.Patience, o.Renews = leasePatience, true
	n, err := open(o, true, &l.kept)
	if err != nil {
		return fmt.Errorf("renew leases: %w", err)
	}
	defer n.pins.leave()
	if n.pins.store != nil {
		f(n.pins.store.Pools())
	}
	return nil
}

// HasLessee reports whether a process renews the leases of a kind of the namespace's pools. It tries the lock,
// because /proc/locks does not show the locks of other PID namespaces.
func HasLessee(o Options, kind LeaseKind) (bool, error) {
	at, err := locate(o)
	if err != nil {
		return false, err
	}
	locked, err := bpffs.Lock(at.home().pin(string(kind)), false, 0)
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return true, nil
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("find out whether a process renews leases: %w", err)
	}
	locked.Close()
	return false, nil
}
