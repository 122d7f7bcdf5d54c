// Package netns finds network namespaces by name, path or process, and enters them.
package netns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// ErrNone means that there is no network namespace with that name, path or process id.
var ErrNone = errors.New("no such network namespace")

// In runs f on a thread in a network namespace: a name of `ip netns`, a path (with a slash), or
// the id of a process in it. A name wins over an id. "" is the caller's namespace. The error wraps
// ErrNone if there is no such namespace.
func In(name string, f func() error) error {
	if name == "" {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		return f()
	}
	target, err := open(name)
	if err != nil {
		return err
	}
	defer target.Close()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := netns.Set(target)
		switch {
		case errors.Is(err, unix.EINVAL):
			err = fmt.Errorf("%w: %s is something else", ErrNone, name)
		case err != nil:
			err = fmt.Errorf("enter network namespace %s: %w", name, err)
		default:
			err = f()
		}
		done <- err
	}()
	return <-done
}

// Dir has the names that `ip netns` knows.
const Dir = "/run/netns"

// Stay is In for an f that goes on until its context is done. It ends f, and returns an error that wraps ErrNone, once
// a namespace with this name is gone, or another one has the name: limits in the old one serve nobody. A namespace that is
// named by a process stays when the process ends.
func Stay(ctx context.Context, name string, f func(context.Context) error) error {
	if name == "" {
		return In(name, func() error { return f(ctx) })
	}
	first, err := ID(name)
	if err != nil {
		return err
	}
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	_, notPID := strconv.ParseUint(name, 10, 31)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(stayEvery):
			}
			switch now, err := ID(name); {
			case err == nil && now != first:
				end(fmt.Errorf("%w: another one has the name %s now", ErrNone, name))
			case errors.Is(err, ErrNone) && notPID != nil:
				end(err)
			}
		}
	}()
	err = In(name, func() error { return f(ctx) })
	if cause := context.Cause(ctx); err == nil && errors.Is(cause, ErrNone) {
		return cause
	}
	return err
}

// stayEvery is how often Stay looks at a name.
const stayEvery = time.Second

func open(name string) (netns.NsHandle, error) {
	openPath := func(path string) (netns.NsHandle, error) {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0) // a FIFO must not block
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("open network namespace %s: %w", path, err)
		}
		return netns.NsHandle(fd), err
	}
	path := name
	if !strings.Contains(name, "/") {
		path = filepath.Join(Dir, name)
	}
	fd, err := openPath(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return fd, err
	}
	if _, notPID := strconv.ParseUint(name, 10, 31); notPID != nil {
		return fd, fmt.Errorf("%w: there is no %s", ErrNone, path)
	}
	fd, err = openPath("/proc/" + name + "/ns/net")
	if errors.Is(err, fs.ErrNotExist) {
		return fd, fmt.Errorf("%w: there is neither %s nor a process %s", ErrNone, path, name)
	}
	return fd, err
}

// Named is the name in Dir of the thread's network namespace; "" for none. first says that it is that of the host, or of the container.
func Named() (name string, first bool) {
	var own unix.Stat_t
	if unix.Stat("/proc/thread-self/ns/net", &own) != nil {
		return "", false
	}
	is := func(path string) bool {
		var st unix.Stat_t
		return unix.Stat(path, &st) == nil && st.Dev == own.Dev && st.Ino == own.Ino
	}
	if cookie, _ := Cookie(); cookie == hostCookie || is("/proc/1/ns/net") { // which units may not see
		return "", true
	}
	names, _ := os.ReadDir(Dir)
	for _, e := range names {
		if is(filepath.Join(Dir, e.Name())) {
			return e.Name(), false
		}
	}
	var init unix.Stat_t
	return "", unix.Stat("/proc/1/ns/net", &init) == unix.EACCES // a unit of a container, which may not see the first process
}

// hostCookie is the first that the kernel uses.
const hostCookie = 1

// ID identifies a network namespace, which is named as for In.
func ID(name string) (id string, err error) {
	err = In(name, func() error {
		cookie, err := Cookie()
		id = strconv.FormatUint(cookie, 10)
		return err
	})
	return id, err
}

// Cookie identifies the thread's network namespace. Unlike its inode, the kernel never
// uses a cookie again.
func Cookie() (uint64, error) {
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
