// Package loader keeps programs attached: it makes the maps and programs of a
// hook (a device and a direction), pins them in a bpffs so that they outlive
// the command, attaches them by tcx or clsact, finds them again, replaces them
// and takes them away. What else there is in the namespace, internal/netinfo tells.
//
// What is pinned, below shapectl/ in the bpffs:
//
//	<namespace cookie>/alive                    whether the namespace exists (collect.go)
//	<namespace cookie>/<ifindex>-<direction>/   a hook
//		g<n>/                               a generation: its maps and program
//		link                                what attaches it, with tcx
//	<namespace cookie>/qdisc-<ifindex>          what was there before an fq
//	<namespace cookie>/ifb-<ifindex>/           the device has an ifb
//
// A generation is built aside and renamed whole. It takes effect as its
// program is attached, and a rule takes effect by one store (pkg/maps), so a
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
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
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
	// SetupFQ gives devices an fq, where rules need one and there is none.
	SetupFQ bool
}

// A Namespace is the hooks of one network namespace: that of the calling
// thread, which must not change it while the Namespace is in use.
type Namespace struct {
	options Options
	cookie  uint64
	root    string // of the file system with the bpffs: another process's view, or ""
	lasting bool   // whether root is known to be the right one
	dir     string // of the hooks; "" where nothing was ever pinned
	writing bool
	unlock  func()

	collected []string // see Collected
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
	if errors.Is(err, fs.ErrNotExist) || strings.Contains(name, "/") {
		return fmt.Errorf("%w: %s", ErrNoNamespace, name)
	}
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", name, err)
	}
	defer target.Close()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := netns.Set(target)
		if errors.Is(err, unix.EINVAL) {
			done <- fmt.Errorf("%w: %s is not one", ErrNoNamespace, name)
			return
		}
		if err != nil {
			done <- fmt.Errorf("enter network namespace %s: %w", name, err)
			return
		}
		done <- f()
	}()
	return <-done
}

// Read opens the calling thread's namespace for reading: it finds what is
// there and changes nothing.
func Read(o Options) (*Namespace, error) { return open(o, false) }

// Write opens the calling thread's namespace for changes, alone. It takes away
// what a command that was killed has left, and what is left of devices and
// namespaces that no longer exist.
func Write(o Options) (*Namespace, error) {
	n, err := open(o, true)
	if err != nil {
		return n, err
	}
	if n.dir != "" {
		if err := n.heal(); err != nil {
			n.Close()
			return nil, err
		}
		n.collectDevices()
	}
	n.collectNamespaces()
	return n, nil
}

// locate tells where the state of the calling thread's namespace is, or would be.
func locate(o Options) (n *Namespace, err error) {
	n = &Namespace{options: o, unlock: func() {}}
	if o.Mode == "" {
		n.options.Mode = Auto
	}
	n.lasting = true
	if o.BPFFS == "" {
		n.options.BPFFS = DefaultBPFFS
		n.root, n.lasting = lastingRoot()
	}
	n.cookie, err = netnsCookie()
	return n, err
}

func open(o Options, writing bool) (*Namespace, error) {
	have, err := Capabilities()
	if err != nil {
		return nil, err
	}
	var lacking []string
	if have&(1<<unix.CAP_BPF|1<<unix.CAP_SYS_ADMIN) == 0 {
		lacking = append(lacking, "CAP_BPF")
	}
	if have&(1<<unix.CAP_NET_ADMIN) == 0 {
		lacking = append(lacking, "CAP_NET_ADMIN")
	}
	if lacking != nil {
		return nil, fmt.Errorf("%w: this process lacks %s", fs.ErrPermission, strings.Join(lacking, " and "))
	}
	n, err := locate(o)
	if err != nil {
		return nil, err
	}
	n.writing = writing
	mounted, err := isBPFFS(n.bpffs())
	if err == nil && !mounted && !n.lasting && have&(1<<unix.CAP_SYS_ADMIN) == 0 {
		err = fmt.Errorf("there is no bpffs on %s, and whether there is one outside of this mount namespace can not be seen: %w",
			n.bpffs(), fs.ErrPermission)
	}
	if err != nil || !mounted {
		return n, err
	}
	err = n.enter()
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return n, err
}

func (n *Namespace) bpffs() string { return n.root + n.options.BPFFS }

// home is the directory of the namespace's hooks.
func (n *Namespace) home() string {
	return filepath.Join(n.top(), strconv.FormatUint(n.cookie, 10))
}

// enter locks the state, and from then on knows what is in it.
func (n *Namespace) enter() error {
	if err := n.trust(); err != nil {
		return err
	}
	unlock, err := lock(n.home(), n.writing, lockPatience)
	if err != nil {
		return fmt.Errorf("open the pins: %w", err)
	}
	n.unlock, n.dir = unlock, n.home()
	return nil
}

// found makes a place for pins, and mounts a bpffs for it where there is none.
func (n *Namespace) found() error {
	mounted, err := isBPFFS(n.bpffs())
	if err != nil {
		return err
	}
	if !mounted {
		if err := mountBPFFS(n.root, n.options.BPFFS); err != nil {
			return err
		}
	}
	for {
		// Not below a directory that somebody else made.
		if err := makeDir(n.top()); err != nil {
			return err
		}
		if err := errors.Join(trustBase(n.bpffs()), trustDir(n.top())); err != nil {
			return err
		}
		if err := makeDir(n.home()); err != nil {
			return err
		}
		err := n.enter()
		if err == nil {
			return n.heal()
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		// Another command has just removed it, as there was nothing in it.
	}
}

const (
	// busyPrefix begins the name of a directory that names a hook which a command
	// is changing; one that is left over belongs to a command that was killed.
	busyPrefix = "busy-"
	// trashPrefix begins the name of pins that are being removed.
	trashPrefix = "trash-"
	// asideName is that of a generation that is being made.
	asideName = "new"
)

// change marks a hook as being changed while f changes it, and looks after it
// if f fails; or the next command does, if this one is killed.
func (n *Namespace) change(index int, d policy.Direction, f func() error) error {
	mark := filepath.Join(n.dir, busyPrefix+filepath.Base(n.hookPath(index, d)))
	if err := makeDir(mark); err != nil {
		return err
	}
	err := f()
	if err == nil {
		err = unlink(mark)
	} else if n.healHook(index, d) == nil {
		unlink(mark)
	}
	return err
}

// parseBusy is the hook that a mark is for.
func parseBusy(name string) (index int, d policy.Direction, ok bool) {
	hook, ok := strings.CutPrefix(name, busyPrefix)
	if !ok {
		return 0, d, false
	}
	return parseHookName(hook)
}

// heal finishes what killed commands were at.
func (n *Namespace) heal() error {
	if err := n.markAlive(); err != nil {
		return err
	}
	entries, err := os.ReadDir(n.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read the pins: %w", err)
	}
	if err := n.rollForward(entries); err != nil {
		return err
	}
	if err := n.healQueues(entries); err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), trashPrefix) {
			if err := removeAll(filepath.Join(n.dir, e.Name())); err != nil {
				return fmt.Errorf("remove pins: %w", err)
			}
		}
		index, d, ok := parseBusy(e.Name())
		if !ok {
			continue
		}
		err := n.healHook(index, d)
		if errors.Is(err, maps.ErrOtherLayout) {
			continue // not ours to judge
		}
		if err != nil {
			return err
		}
		if err := unlink(filepath.Join(n.dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// rollForward completes changes that a command which was killed has begun, confirmed
// or taken back on the first hooks only.
func (n *Namespace) rollForward(entries []os.DirEntry) error {
	changes := map[uint64][]*Hook{} // by when they begin
	for _, e := range entries {
		index, d, ok := parseBusy(e.Name())
		if !ok {
			continue
		}
		h, err := n.openHook(index, d)
		if err != nil || h == nil {
			continue // which is healHook's to see to
		}
		defer h.Close()
		if at := h.Set.Begins(); at != 0 {
			changes[at] = append(changes[at], h)
		}
	}
	for _, hooks := range changes {
		if err := agree(hooks); err != nil {
			return err
		}
	}
	return nil
}

// healHook sees to a hook at which a command failed, or was killed: it removes one
// in which no rule is in force, and completes one with rules.
func (n *Namespace) healHook(index int, d policy.Direction) error {
	h, err := n.openHook(index, d)
	if err != nil {
		return err
	}
	if h != nil {
		defer h.Close()
		if state, _ := h.Set.Change(); state == maps.NoChange {
			h.Set.Abandon() // what was prepared, and not armed
		}
		if !h.Set.Empty() {
			return n.complete(h)
		}
	}
	return n.discard(index, d)
}

// complete lets a hook that is attached run one generation, and takes away what no rule needs.
func (n *Namespace) complete(h *Hook) error {
	left, err := n.leftBy(h)
	if err != nil {
		return err
	}
	if left != nil {
		defer left.Close()
		unneeded := left
		if h.State == Detached { // the command did not come so far
			unneeded = h
		}
		if err := n.discard(unneeded.index, h.Direction); err != nil || unneeded == h {
			return err
		}
	}
	// Before pins go by which filters are known.
	if err := n.trimIfb(h); err != nil {
		return err
	}
	generations, err := h.generations()
	if err != nil {
		return err
	}
	if len(generations) > 1 && h.State == Attached {
		if err := n.attach(h); err != nil {
			return err
		}
		if err := h.discardAllBut(h.generation, generations); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(h.path)
	if err != nil {
		return fmt.Errorf("read the pins: %w", err)
	}
	for _, e := range entries {
		if e.Name() != asideName && !strings.HasPrefix(e.Name(), trashPrefix) {
			continue
		}
		if err := removeAll(filepath.Join(h.path, e.Name())); err != nil {
			return fmt.Errorf("remove pins: %w", err)
		}
	}
	return nil
}

// leftBy is the hook that a device had before it was made again, and got h with the
// same rules; nil if there is none.
func (n *Namespace) leftBy(h *Hook) (*Hook, error) {
	if h.Device.Name == "" {
		return nil, nil
	}
	indices, err := n.indices(h.Direction)
	if err != nil {
		return nil, err
	}
	for _, index := range indices {
		if was, err := n.deviceWas(index, h.Direction); index == h.index || err == nil && was != h.Was {
			continue
		}
		left, err := n.openHook(index, h.Direction)
		if err != nil || left == nil {
			continue // which is for flush to take away
		}
		if left.State == Gone && left.Set.SameRules(h.Set) {
			return left, nil
		}
		left.Close()
	}
	return nil, nil
}

// Close lets other commands in. A namespace with no hooks leaves nothing behind.
func (n *Namespace) Close() {
	if n.writing && n.dir != "" {
		removeHome(n.dir)
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
