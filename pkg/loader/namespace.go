// Package loader keeps programs attached: it makes the maps and programs of a
// hook (a device and a direction), pins them in a bpffs so that they outlive
// the command, attaches them by tcx or clsact, finds them again, replaces them
// and removes them. Package netinfo reads everything else in the namespace.
//
// Commands call a Namespace. It plans orders (plan.go) and carries them out (order.go) on its pins:
// hooks that are made, moved and removed (pins.go), over one bpfState (state.go), all in a home
// (home.go). An attachment attaches a hook to its device (attach.go).
//
// docs/architecture.md shows what is pinned. A generation of maps is built aside and
// renamed whole. A rule takes effect by one store (pkg/maps), so a command that is killed
// leaves either the old rules or the new ones. Anything else that it leaves has no rules, and
// the next command removes it.
package loader

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/hurry"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Mode is how programs are attached.
type Mode string

const (
	Auto   Mode = "auto" // tcx if the kernel has it, else clsact
	TCX    Mode = "tcx"
	Clsact Mode = "clsact"
	Cgroup Mode = "cgroup" // the only one of a cgroup
)

// ErrFewFiles means that the process may not open as many files as a command needs.
var ErrFewFiles = errors.New("the limit of open files (RLIMIT_NOFILE) is too low")

// leastFiles is how many files a command needs. The number does not grow with devices or rules.
const leastFiles = 256

// Options say where and how to keep programs. Only tests need other values than zero.
type Options struct {
	BPFFS string // bpffs.Default if empty
	State string // the directory for what is used of quotas; if empty StateDir, or none with another BPFFS
	Mode  Mode   // Auto if empty
	// SetupFQ sets up an fq on devices whose rules need one and that have none.
	SetupFQ bool
	// Patience is how long to wait for another command; 10 s if 0.
	Patience time.Duration
	// Renews says that a process which only reads renews leases, or listens to packets.
	Renews bool
	// Progress, unless it is nil, is told how many things of a kind a change has done.
	Progress func(what string, done, of int)
}

func (o *Options) progress(what string, done, of int) {
	if o.Progress != nil {
		o.Progress(what, done, of)
	}
}

// A Namespace is the hooks of one network namespace: that of the calling
// thread, which must not change it while the Namespace is in use.
type Namespace struct {
	pins pins

	Lost      string          // the pin of programs that something deleted: no rule counts as in force
	Restored  string          // the same after Write has restored all
	Collected []string        // the names of deleted devices whose rules Write has removed, sorted
	Claims    []*policy.Claim // what was done last about guarantees that wait for room, in turn
}

// Read opens the calling thread's namespace for reading, and changes nothing. It needs what Write
// needs: without CAP_NET_ADMIN nobody knows what is attached.
func Read(o Options) (*Namespace, error) { return open(o, false, nil) }

// Maps are the maps, which the caller closes, and their generation; nil where there are no rules.
func (n *Namespace) Maps() (*maps.Store, Generation, error) {
	if n.pins.store == nil {
		return nil, Generation{}, n.pins.readable()
	}
	return n.pins.store.Hold(), n.pins.generation, nil
}

// Write opens the calling thread's namespace for changes, and locks out other commands. It
// removes leftovers of killed commands, and of deleted devices and namespaces.
func Write(o Options) (*Namespace, error) {
	n, err := WriteFirst(o)
	if err == nil {
		if err = n.Collect(nil); err != nil {
			n.Close()
		}
	}
	if err != nil {
		return nil, err
	}
	return n, nil
}

// Collect removes leftovers of deleted devices and namespaces. If keep is not nil, it tells of which deleted devices the
// rules stay, for ApplyNew.
func (n *Namespace) Collect(keep func(device string) bool) error {
	if n.pins.dir != "" {
		if err := n.pins.sweep(); err != nil { // an earlier command may have had no time for all hooks
			return err
		}
		n.Collected = slices.Compact(slices.Sorted(slices.Values(append(n.Collected, n.pins.collectDevices(keep)...))))
		if err := n.pins.collectPools(); err != nil {
			return err
		}
	}
	if n.pins.store != nil {
		n.pins.store.Listeners().Drop()
	}
	n.pins.place.collectNamespaces()
	return nil
}

// WriteFirst is Write for what cannot wait: it leaves the leftovers of deleted devices and namespaces to Collect.
func WriteFirst(o Options) (*Namespace, error) {
	n, err := open(o, true, nil)
	if err == nil && n.pins.dir != "" {
		if err = n.pins.heal(); err != nil {
			n.Close()
		}
	}
	if err != nil {
		return nil, err
	}
	n.Lost, n.Restored = "", n.Lost
	return n, nil
}

// open opens a namespace. kept is nil unless it is read again and again.
func open(o Options, writing bool, kept *Kept) (*Namespace, error) {
	have, err := program.Capabilities()
	if err != nil {
		return nil, err
	}
	if lacking := program.Missing(have); lacking != nil {
		return nil, fmt.Errorf("%w: this process lacks %s", fs.ErrPermission, strings.Join(lacking, " and "))
	}
	var files unix.Rlimit // otherwise errors would blame the kernel
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err == nil && files.Cur < leastFiles {
		return nil, fmt.Errorf("%w: it is %d, and a command needs %d", ErrFewFiles, files.Cur, leastFiles)
	}
	at, err := locate(o)
	if err != nil {
		return nil, err
	}
	n := &Namespace{pins: pins{options: o, place: at, unlock: func() {}, bpfState: bpfState{writing: writing, renews: o.Renews, kept: kept}}}
	hurry.Relax() // after a command that was killed in hurry
	mounted, err := bpffs.Mounted(at.bpffs)
	if err != nil || !mounted {
		return n, err
	}
	err = n.pins.enter()
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	n.Lost = n.pins.lost
	return n, err
}

// enter locks the home, and opens the state in it.
func (p *pins) enter() error {
	if err := p.place.trust(); err != nil {
		return err
	}
	unlock, err := p.place.home().lock(p.writing, cmp.Or(p.options.Patience, lockPatience))
	if err != nil {
		return fmt.Errorf("open the pins: %w", err)
	}
	p.unlock, p.dir = unlock, p.place.home()
	if err = p.open(); err != nil {
		p.leave()
		p.unlock, p.dir = func() {}, ""
	}
	return err
}

// leave is the reverse of enter.
func (p *pins) leave() {
	p.close()
	p.unlock()
}

// makeHome makes the namespace's home and enters it. It mounts a bpffs if there is none.
func (p *pins) makeHome() error {
	if err := bpffs.Mount(p.place.bpffs); err != nil {
		return err
	}
	for {
		// A home must not be below a directory that somebody else made.
		if err := bpffs.MakeDir(p.place.top()); err != nil {
			return err
		}
		if err := p.place.trustTop(); err != nil {
			return err
		}
		if err := bpffs.MakeDir(string(p.place.home())); err != nil {
			return err
		}
		err := p.enter()
		if err == nil {
			return p.heal()
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		// Another command has just removed the home, because it was empty.
	}
}

// asideName is the name of a generation that is being made.
const asideName = "new"

// Close unlocks the namespace. It removes the home of a namespace without hooks.
func (n *Namespace) Close() {
	n.pins.close()
	if n.pins.writing && n.pins.dir != "" {
		n.pins.dir.remove()
	}
	n.pins.unlock()
}
