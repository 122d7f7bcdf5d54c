package testenv

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// A Netns is a network namespace of one test.
type Netns struct {
	handle netns.NsHandle
}

// NewNetns moves the test, which must run as root, into a new network namespace, and
// locks its thread until the test ends. Other goroutines stay in their namespace, and
// enter this one by Do. IPv6 is disabled, so that the kernel sends no packets by
// itself.
func NewNetns(tb testing.TB) *Netns {
	tb.Helper()
	Root(tb)
	runtime.LockOSThread()
	before, err := netns.Get()
	Must(tb, err)
	handle, err := netns.New()
	Must(tb, err)
	tb.Cleanup(func() {
		handle.Close()
		defer before.Close()
		if err := netns.Set(before); err != nil {
			tb.Errorf("leave the test's network namespace: %v", err)
			return // the thread stays locked, and ends with the test
		}
		runtime.UnlockOSThread()
	})
	noIPv6(tb)
	return &Netns{handle}
}

// NewNamedNetns creates a network namespace and returns its name for `ip netns`. The test
// does not enter it.
func NewNamedNetns(tb testing.TB) (string, *Netns) {
	tb.Helper()
	Root(tb)
	name := fmt.Sprintf("shapectl-test-%d-%d", os.Getpid(), namedCount.Add(1))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := netns.Get()
	Must(tb, err)
	defer before.Close()
	handle, err := netns.NewNamed(name)
	Must(tb, err)
	tb.Cleanup(func() {
		handle.Close()
		if err := netns.DeleteNamed(name); err != nil {
			tb.Errorf("delete network namespace %s: %v", name, err)
		}
	})
	noIPv6(tb)
	Must(tb, netns.Set(before))
	return name, &Netns{handle}
}

// DoomedNetns runs each f in a new network namespace, one after another, and returns when
// all these namespaces are deleted. An f must not end the test.
func DoomedNetns(tb testing.TB, fs ...func() error) {
	tb.Helper()
	Root(tb)
	here, err := netns.Get()
	Must(tb, err)
	defer here.Close()
	done, end := make(chan error), make(chan struct{})
	for i, f := range fs {
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			done <- inDoomed(here, doomed(i), f)
			<-end
			netns.Set(here) // because the first thread of a process never ends before it
			done <- nil
		}()
		Must(tb, <-done)
	}
	close(end)
	for range fs {
		<-done
	}
	for i := range fs {
		Eventually(tb, "a network namespace to be deleted", func() bool {
			_, err := netlink.LinkByName(doomed(i))
			return err != nil
		})
	}
}

// doomed names a device whose peer is in a namespace that will be deleted.
func doomed(i int) string { return fmt.Sprintf("doomed%d", i) }

func inDoomed(here netns.NsHandle, witness string, f func() error) error {
	there, err := netns.New()
	if err != nil {
		return err
	}
	defer there.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = witness
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: witness, PeerNamespace: netlink.NsFd(here)}); err != nil {
		return err
	}
	return f()
}

var namedCount atomic.Int32

func noIPv6(tb testing.TB) {
	tb.Helper()
	for _, scope := range []string{"all", "default"} {
		err := os.WriteFile("/proc/sys/net/ipv6/conf/"+scope+"/disable_ipv6", []byte("1"), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			tb.Fatal(err)
		}
	}
}

// FD returns the namespace's file descriptor, for moving a device there.
func (n *Netns) FD() int { return int(n.handle) }

// Do runs f in the namespace, and waits for it. f must not end the test.
func (n *Netns) Do(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := netns.Set(n.handle); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

// BPFFS mounts a bpffs for the test and returns its path.
func BPFFS(tb testing.TB) string {
	tb.Helper()
	Root(tb)
	dir := tb.TempDir()
	Must(tb, unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"))
	tb.Cleanup(func() { Unmount(tb, dir) })
	return dir
}

// Unmount unmounts a file system of the test, with all pins in it.
func Unmount(tb testing.TB, dir string) {
	tb.Helper()
	if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
		tb.Errorf("unmount %s: %v", dir, err)
	}
}

// Veth creates two connected devices in the calling thread's namespace, and sets them up.
func Veth(tb testing.TB, name, peer string) {
	tb.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	AddLink(tb, &netlink.Veth{LinkAttrs: attrs, PeerName: peer})
	Must(tb, netlink.LinkSetUp(Link(tb, peer)))
	WaitUp(tb, name)
	WaitUp(tb, peer)
}

// WaitUp waits until a device sends. The kernel drops packets until it has noticed,
// asynchronously, that the peer is up.
func WaitUp(tb testing.TB, name string) {
	tb.Helper()
	Eventually(tb, name+" to be up", func() bool { return Link(tb, name).Attrs().OperState == netlink.OperUp })
}

// AddLink creates a device and sets it up.
func AddLink(tb testing.TB, l netlink.Link) {
	tb.Helper()
	Must(tb, netlink.LinkAdd(l))
	Must(tb, netlink.LinkSetUp(Link(tb, l.Attrs().Name)))
}

// Link looks up a device that must exist.
func Link(tb testing.TB, name string) netlink.Link {
	tb.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		tb.Fatalf("device %s: %v", name, err)
	}
	return l
}

// A Sender sends frames on a device, without routing.
type Sender struct {
	fd int
	to unix.SockaddrLinklayer
}

// NewSender opens a device in the calling thread's namespace.
func NewSender(tb testing.TB, device string) *Sender {
	tb.Helper()
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	Must(tb, err)
	tb.Cleanup(func() { unix.Close(fd) })
	var protocol [2]byte
	binary.BigEndian.PutUint16(protocol[:], unix.ETH_P_IP)
	return &Sender{fd, unix.SockaddrLinklayer{
		Protocol: binary.NativeEndian.Uint16(protocol[:]), Ifindex: Link(tb, device).Attrs().Index, Halen: 6,
	}}
}

// Send sends one frame. A drop is not an error.
func (s *Sender) Send(frame []byte) error {
	for {
		err := unix.Sendto(s.fd, frame, 0, &s.to)
		if errors.Is(err, unix.ENOBUFS) { // a drop on egress, or a full queue
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

const etherBytes = 14

// Frame returns an Ethernet frame of a length with a UDP packet over IPv4.
func Frame(src, dst netip.Addr, bytes int) []byte {
	b := make([]byte, etherBytes, bytes)
	copy(b, []byte{0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1})
	binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IP)
	return append(b, Packet(src, dst, bytes-etherBytes)...)
}

// Packet returns a UDP packet over IPv4 of a length, without a link header.
func Packet(src, dst netip.Addr, bytes int) []byte {
	b := make([]byte, bytes)
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(b[2:], uint16(bytes))
	copy(b[12:], src.AsSlice())
	copy(b[16:], dst.AsSlice())
	var sum uint32
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum))
	binary.BigEndian.PutUint16(b[20:], 5000)
	binary.BigEndian.PutUint16(b[22:], 53)
	binary.BigEndian.PutUint16(b[24:], uint16(bytes-20))
	return b
}

// Patience is how long a test waits for what has to happen before it fails. In an
// emulated machine, the kernel may verify the programs for 20 s.
const Patience = 2 * time.Minute

// Eventually waits for an asynchronous event, such as a packet's arrival, and ends the
// test if it does not happen.
func Eventually(tb testing.TB, what string, happened func() bool) {
	tb.Helper()
	for deadline := time.Now().Add(Patience); ; {
		began := time.Now()
		if happened() {
			return
		}
		if began.After(deadline) {
			tb.Fatalf("timeout waiting for %s", what)
		}
		time.Sleep(time.Millisecond + 4*time.Since(began)) // leaves the CPU to what it waits for
	}
}

// Pins returns the paths of all files and directories below shapectl's directory in a bpffs.
func Pins(tb testing.TB, bpffs string) (pins []string) {
	tb.Helper()
	top := filepath.Join(bpffs, "shapectl")
	err := filepath.WalkDir(top, func(path string, _ fs.DirEntry, err error) error {
		if path != top {
			pins = append(pins, path)
		}
		return err
	})
	if err != nil && !os.IsNotExist(err) {
		tb.Fatal(err)
	}
	return pins
}
