package loader

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// BPFFS is the file system that holds the pins.
type BPFFS struct {
	Path              string
	Mounted, Writable bool
	// Untrusted is why pins there are not used: the error wraps ErrUntrusted.
	Untrusted error
}

// FindBPFFS is where pins are kept, or would be. It mounts nothing.
func FindBPFFS(o Options) (BPFFS, error) {
	at, err := locate(o)
	if err != nil {
		return BPFFS{}, err
	}
	path := at.bpffs
	fs := BPFFS{Path: path}
	if fs.Mounted, err = at.mounted(); err != nil || !fs.Mounted {
		return fs, err
	}
	if err := at.trust(); errors.Is(err, ErrUntrusted) {
		fs.Untrusted = err
	}
	// Once shapectl's directory exists, only that needs to be writable.
	if exists(at.top()) {
		path = at.top()
	}
	fs.Writable = unix.Faccessat(unix.AT_FDCWD, path, unix.W_OK|unix.X_OK, unix.AT_EACCESS) == nil
	return fs, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, os.ErrNotExist) // in doubt it does: rules without pins are removed
}

// Probe loads the program with maps of its own, and closes it. It reports whether the kernel
// compiles programs to machine code. The error says what this process may not do, or this
// kernel cannot.
func Probe() (jited bool, err error) {
	store, err := maps.New(maps.Size{Rules: 1, Buckets: noBuckets}, bpf.AbiHook{L2Bytes: netinfo.EthernetBytes})
	if err != nil {
		return false, err
	}
	defer store.Close()
	p, err := program.Load(store, store.Hook())
	if err != nil {
		return false, err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return false, fmt.Errorf("ask for the program: %w", err)
	}
	_, err = info.JitedSize()
	return err == nil, nil
}

// HookMode is how a new hook would be attached.
func HookMode(o Options) (Mode, error) {
	switch {
	case o.Mode == Clsact:
		return Clsact, nil
	case netinfo.HasTCX():
		return TCX, nil
	case o.Mode == TCX:
		return TCX, ErrNoTCX
	}
	return Clsact, nil
}

// TryClsact attaches a program by clsact in a network namespace of its own. The error wraps ErrNoClsact or ErrNoClsBPF if
// the kernel cannot; without CAP_SYS_ADMIN nothing is known.
func TryClsact() error {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		return fmt.Errorf("load a program: %w", err)
	}
	defer p.Close()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and the namespace with the thread
		done <- tryClsact(p)
	}()
	return <-done
}

func tryClsact(p *ebpf.Program) error {
	const loopback = 1 // the index of lo in each namespace
	if err := unix.Unshare(unix.CLONE_NEWNET); errors.Is(err, unix.EPERM) {
		return nil
	} else if err != nil {
		return fmt.Errorf("make a network namespace: %w", err)
	}
	if err := addClsact(loopback); err != nil {
		return err
	}
	_, err := addFilter(loopback, policy.Egress, p)
	return err
}
