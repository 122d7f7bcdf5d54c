// Package loader keeps programs attached: it makes the maps and programs of a
// hook (a device and a direction), pins them in a bpffs so that they outlive
// the command, attaches them by tcx or clsact, finds them again, replaces them
// and takes them away. It is the one package that knows netlink and links.
//
// What is pinned, below shapectl/ in the bpffs:
//
//	<namespace cookie>/<ifindex>-<direction>/   a hook
//		g<n>/                               a generation: its maps and programs
//		link_gcra, link_leaky               what attaches them, with tcx
//
// A generation is built aside and renamed whole. It takes effect as its
// programs are attached, and a rule takes effect by one store (pkg/maps), so a
// command that is killed leaves the rules as they were or as they were to be.
// What it leaves besides has no rule in it, and the next command on that device
// takes it away.
package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Mode is how programs are attached.
type Mode string

const (
	Auto   Mode = "auto" // tcx where the kernel has it, else clsact
	TCX    Mode = "tcx"
	Clsact Mode = "clsact"
)

// ErrNoNamespace means that no network namespace has that name.
var ErrNoNamespace = errors.New("no such network namespace")

// Options say where and how to keep programs; the zero value is right but for tests.
type Options struct {
	BPFFS string // DefaultBPFFS if empty
	Mode  Mode   // Auto if empty
}

// A Namespace is the hooks of one network namespace: that of the calling
// thread, which must not change it while the Namespace is in use.
type Namespace struct {
	options Options
	cookie  uint64
	dir     string // of its hooks; "" before anything was ever pinned
	writing bool
	unlock  func()
}

// In runs f on a thread in the network namespace that `ip netns` knows by that
// name, or just here if it is empty. The error wraps ErrNoNamespace where there is none.
func In(name string, f func() error) error {
	if name == "" {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		return f()
	}
	target, err := netns.GetFromName(name)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s", ErrNoNamespace, name)
	}
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", name, err)
	}
	defer target.Close()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err := netns.Set(target); err != nil {
			done <- fmt.Errorf("enter network namespace %s: %w", name, err)
			return
		}
		done <- f()
	}()
	return <-done
}

// Read opens the calling thread's namespace for reading: it finds what is
// there and changes nothing.
func Read(o Options) (*Namespace, error) {
	n, _, bpffs, err := open(o)
	if err != nil || !isBPFFS(bpffs) {
		return n, err
	}
	return n, n.enter(bpffs, false)
}

// Write opens the calling thread's namespace for changes, alone. It mounts a
// bpffs where there is none.
func Write(o Options) (*Namespace, error) {
	n, root, bpffs, err := open(o)
	if err != nil {
		return nil, err
	}
	if !isBPFFS(bpffs) {
		if err := mountBPFFS(root, n.options.BPFFS); err != nil {
			return nil, err
		}
	}
	if err := os.MkdirAll(filepath.Join(bpffs, "shapectl"), 0o750); err != nil {
		return nil, fmt.Errorf("make a directory for pins: %w", err)
	}
	if err := n.enter(bpffs, true); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(n.dir, 0o750); err != nil {
		n.Close()
		return nil, fmt.Errorf("make a directory for pins: %w", err)
	}
	return n, nil
}

// open finds where the bpffs is, or is to be: below root, which is another
// process's view of the file system or "".
func open(o Options) (n *Namespace, root, bpffs string, err error) {
	if o.Mode == "" {
		o.Mode = Auto
	}
	if o.BPFFS == "" {
		o.BPFFS = DefaultBPFFS
		root = lastingRoot()
	}
	cookie, err := netnsCookie()
	if err != nil {
		return nil, "", "", err
	}
	return &Namespace{options: o, cookie: cookie, unlock: func() {}}, root, root + o.BPFFS, nil
}

// enter locks the state below a bpffs.
func (n *Namespace) enter(bpffs string, exclusive bool) error {
	base := filepath.Join(bpffs, "shapectl")
	unlock, err := lock(base, exclusive)
	if errors.Is(err, fs.ErrNotExist) && !exclusive {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the pins: %w", err)
	}
	n.unlock, n.writing = unlock, exclusive
	n.dir = filepath.Join(base, strconv.FormatUint(n.cookie, 10))
	return nil
}

// Close lets other commands in. A namespace with no hooks leaves nothing behind.
func (n *Namespace) Close() {
	if n.writing {
		os.Remove(n.dir) // refused unless empty, as it should be
	}
	n.unlock()
}

// netnsCookie names a network namespace for as long as the kernel runs; unlike
// its inode, it is never used again.
func netnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("tell which network namespace this is: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("tell which network namespace this is (the kernel's SO_NETNS_COOKIE, from 5.14): %w", err)
	}
	return cookie, nil
}
