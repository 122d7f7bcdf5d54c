package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"runtime"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// The devices of an arena.
const (
	nearDevice = "near"
	farDevice  = "far"
)

// The destinations of limited packets.
var target, target6 = netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("2001:db8:1::7")

// Commands of ip for the two ends. Their neighbours are known, so that they send no other packets.
const (
	nearSetup = `link set near address 02:00:00:00:00:01 up
addr add 192.0.2.1/24 dev near
addr add 2001:db8::1/64 dev near nodad
neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev near
neigh add 2001:db8::2 lladdr 02:00:00:00:00:02 dev near
route add default via 192.0.2.2
route add default via 2001:db8::2 dev near
`
	farSetup = `link set far address 02:00:00:00:00:02 up
addr add 192.0.2.2/24 dev far
addr add 2001:db8::2/64 dev far nodad
addr add 10.1.2.3/32 dev far
addr add 2001:db8:1::7/128 dev far nodad
neigh add 192.0.2.1 lladdr 02:00:00:00:00:01 dev far
neigh add 2001:db8::1 lladdr 02:00:00:00:00:01 dev far
`
)

// An arena is a veth pair between two network namespaces. A limiter is set up on the
// egress of the near end, which sends everything to the far end. An arena has no name
// outside this process, so it ends with the process.
type arena struct {
	near, far netns.NsHandle
	bpffs     string // a mount that is not in the file system
	owned
}

// A descriptor is a file descriptor without another type that closes it.
type descriptor int

func (d descriptor) Close() error { return unix.Close(int(d)) }

// newArena returns an arena without a limiter.
func newArena(ctx context.Context) (_ *arena, err error) {
	a := &arena{near: netns.None(), far: netns.None()}
	defer func() {
		if err != nil {
			a.Close()
		}
	}()
	if a.bpffs, err = a.mountBPFFS(); err != nil {
		return nil, fmt.Errorf("mount a bpffs: %w", err)
	}
	if a.near, err = a.newNamespace(); err != nil {
		return nil, err
	}
	if a.far, err = a.newNamespace(); err != nil {
		return nil, err
	}
	if err := in(a.near, func() error { return addVeth(nearDevice, farDevice, netlink.NsFd(a.far)) }); err != nil {
		return nil, err
	}
	if err := errors.Join(ip(ctx, a.far, farSetup), ip(ctx, a.near, nearSetup)); err != nil {
		return nil, err
	}
	return a, errors.Join(waitUp(ctx, a.near, nearDevice), waitUp(ctx, a.far, farDevice))
}

// addVeth adds a veth pair to the namespace of the calling thread. Its peer is in another namespace, unless that is nil.
func addVeth(name, peer string, peerNamespace any) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peer, PeerNamespace: peerNamespace}); err != nil {
		return fmt.Errorf("add the veth pair %s, %s: %w", name, peer, err)
	}
	return nil
}

// lookUp finds a device in the namespace of the calling thread.
func lookUp(device string) (netlink.Link, error) {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return nil, fmt.Errorf("look up device %s: %w", device, err)
	}
	return l, nil
}

// mountBPFFS creates a detached mount of a bpffs. It exists as long as its descriptor is open.
func (a *arena) mountBPFFS() (string, error) {
	context, err := unix.Fsopen("bpf", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return "", err
	}
	defer unix.Close(context)
	if err := unix.FsconfigCreate(context); err != nil {
		return "", err
	}
	mount, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	a.keep(descriptor(mount))
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), mount), nil
}

// newNamespace creates a network namespace in which the kernel sends nothing on its own.
func (a *arena) newNamespace() (handle netns.NsHandle, err error) {
	err = aside(func() (err error) {
		if handle, err = netns.New(); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		for _, scope := range []string{"all", "default"} {
			for name, value := range map[string]string{"accept_dad": "0", "router_solicitations": "0", "addr_gen_mode": "1"} {
				file := "/proc/sys/net/ipv6/conf/" + scope + "/" + name
				if err := os.WriteFile(file, []byte(value), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
					return fmt.Errorf("set up a network namespace: %w", err)
				}
			}
		}
		return nil
	})
	if err == nil {
		a.keep(descriptor(handle))
	}
	return handle, err
}

// ip runs commands of ip in a namespace, one per line.
func ip(ctx context.Context, namespace netns.NsHandle, commands string) error {
	return in(namespace, func() error { return runCommand(ctx, commands, "ip", "-batch", "-") })
}

// upTime is much longer than the kernel needs to notice that a device is up.
const upTime = 30 * time.Second

// waitUp waits until a device is operational. The kernel drops packets until both ends of a pair are.
func waitUp(ctx context.Context, namespace netns.NsHandle, device string) error {
	ctx, stop := context.WithTimeout(ctx, upTime)
	defer stop()
	return in(namespace, func() error {
		for {
			l, err := lookUp(device)
			if err != nil || l.Attrs().OperState == netlink.OperUp {
				return err
			}
			if err := sleep(ctx, time.Millisecond); err != nil {
				return fmt.Errorf("wait for %s to be up: %w", device, err)
			}
		}
	})
}

// in runs f on its own thread in a namespace.
func in(namespace netns.NsHandle, f func() error) error {
	return aside(func() error {
		if err := netns.Set(namespace); err != nil {
			return fmt.Errorf("enter a network namespace: %w", err)
		}
		return f()
	})
}

// aside runs f on its own thread. f may change the state of the thread.
func aside(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // not unlocked, so the thread ends with the goroutine
		done <- f()
	}()
	return <-done
}

// run runs a command in the near namespace, with its standard input.
func (a *arena) run(ctx context.Context, input, name string, args ...string) error {
	return in(a.near, func() error { return runCommand(ctx, input, name, args...) })
}

// tc runs commands of tc in the near namespace, one per line.
func (a *arena) tc(ctx context.Context, commands string) error {
	return a.run(ctx, commands, "tc", "-batch", "-")
}

// attach attaches a program with tcx: to the egress of the near end, or the ingress of the far end.
func (a *arena) attach(end netns.NsHandle, p *ebpf.Program) error {
	device, hook := nearDevice, ebpf.AttachTCXEgress
	if end == a.far {
		device, hook = farDevice, ebpf.AttachTCXIngress
	}
	return in(end, func() error {
		l, err := lookUp(device)
		if err != nil {
			return err
		}
		on, err := link.AttachTCX(link.TCXOptions{Interface: l.Attrs().Index, Program: p, Attach: hook})
		if err != nil {
			return fmt.Errorf("attach a program to %s: %w", device, err)
		}
		a.keep(on)
		return nil
	})
}

// assemble attaches a program with these instructions.
func (a *arena) assemble(end netns.NsHandle, name string, code asm.Instructions) error {
	p, err := a.program(name, code)
	if err != nil {
		return err
	}
	return a.attach(end, p)
}

// socket opens a socket in a namespace.
func (a *arena) socket(namespace netns.NsHandle, family, kind, protocol int) (fd int, err error) {
	err = in(namespace, func() (err error) {
		fd, err = unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol)
		return err
	})
	if err != nil {
		return -1, fmt.Errorf("make a socket: %w", err)
	}
	a.keep(descriptor(fd))
	return fd, nil
}

// sent returns the number of packets that have left the near end.
func (a *arena) sent() (packets uint64, err error) {
	err = in(a.near, func() error {
		l, err := lookUp(nearDevice)
		if err == nil {
			packets = l.Attrs().Statistics.TxPackets
		}
		return err
	})
	return packets, err
}

// sleep waits for a time, or until ctx is cancelled.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
