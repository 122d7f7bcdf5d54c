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

// A Netns is a network namespace made for one test.
type Netns struct {
	handle netns.NsHandle
}

// NewNetns moves the test, which must run as root, into a network namespace of
// its own. Its thread is the test's alone until the test is over; other
// goroutines stay where they were, and reach the namespace by Do. Devices have
// no IPv6 of their own, so that nothing is sent that the test did not send.
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

// NewNamedNetns makes a network namespace that `ip netns` knows by the name that
// is returned, and leaves the test where it is.
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

// DoomedNetns runs each f on a thread in a network namespace of its own, one after
// another, and returns when none of these namespaces exists any more. An f must not end the test.
func DoomedNetns(tb testing.TB, fs ...func() error) {
	tb.Helper()
	Root(tb)
	here, err := netns.Get()
	Must(tb, err)
	defer here.Close()
	done, end := make(chan error), make(chan struct{})
	for i, f := range fs {
		go func() {
			runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
			done <- inDoomed(here, doomed(i), f)
			<-end
			netns.Set(here) // as the first thread of a process does not end before it
			done <- nil
		}()
		Must(tb, <-done)
	}
	close(end)
	for range fs {
		<-done
	}
	for i := range fs {
		Eventually(tb, "the end of a network namespace", func() bool {
			_, err := netlink.LinkByName(doomed(i))
			return err != nil
		})
	}
}

// doomed is the device here whose other end is in a namespace that is to end.
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

// FD is the namespace's descriptor, for a device to be moved there.
func (n *Netns) FD() int { return int(n.handle) }

// Do runs f on a thread in the namespace, and waits for it. f must not end the test.
func (n *Netns) Do(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err := netns.Set(n.handle); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

// BPFFS mounts a bpffs for the test alone.
func BPFFS(tb testing.TB) string {
	tb.Helper()
	Root(tb)
	dir := tb.TempDir()
	Must(tb, unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"))
	tb.Cleanup(func() { Unmount(tb, dir) })
	return dir
}

// Unmount takes a file system away that a test has mounted, and with it all pins.
func Unmount(tb testing.TB, dir string) {
	tb.Helper()
	if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
		tb.Errorf("unmount %s: %v", dir, err)
	}
}

// Veth makes two devices, connected and up, in the calling thread's namespace.
func Veth(tb testing.TB, name, peer string) {
	tb.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	AddLink(tb, &netlink.Veth{LinkAttrs: attrs, PeerName: peer})
	Must(tb, netlink.LinkSetUp(Link(tb, peer)))
	WaitUp(tb, name)
	WaitUp(tb, peer)
}

// WaitUp waits until a device sends: the kernel notices in its own time that
// the other end of a pair is up, too, and drops packets until then.
func WaitUp(tb testing.TB, name string) {
	tb.Helper()
	Eventually(tb, name+" to be up", func() bool { return Link(tb, name).Attrs().OperState == netlink.OperUp })
}

// AddLink makes a device and sets it up.
func AddLink(tb testing.TB, l netlink.Link) {
	tb.Helper()
	Must(tb, netlink.LinkAdd(l))
	Must(tb, netlink.LinkSetUp(Link(tb, l.Attrs().Name)))
}

// Link looks a device up that must be there.
func Link(tb testing.TB, name string) netlink.Link {
	tb.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		tb.Fatalf("device %s: %v", name, err)
	}
	return l
}

// A Sender sends packets out of a device, below routing and addresses.
type Sender struct {
	fd int
	to unix.SockaddrLinklayer
}

// NewSender opens a device of the calling thread's namespace.
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

// Send sends one frame. That it is dropped on the way is no error.
func (s *Sender) Send(frame []byte) error {
	for {
		err := unix.Sendto(s.fd, frame, 0, &s.to)
		if errors.Is(err, unix.ENOBUFS) { // how a drop on egress, or a full queue, reads here
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

const etherBytes = 14

// Frame is an Ethernet frame of that many bytes with a UDP packet over IPv4.
func Frame(src, dst netip.Addr, bytes int) []byte {
	b := make([]byte, etherBytes, bytes)
	copy(b, []byte{0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1})
	binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IP)
	return append(b, Packet(src, dst, bytes-etherBytes)...)
}

// Packet is a UDP packet over IPv4 of that many bytes, without a link header.
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

// Eventually waits for what happens in its own time, such as a packet's
// arrival, and ends the test if it does not.
func Eventually(tb testing.TB, what string, happened func() bool) {
	tb.Helper()
	for deadline := time.Now().Add(10 * time.Second); !happened(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			tb.Fatalf("waited in vain: %s", what)
		}
	}
}

// Pins are all files and directories below that of shapectl in a bpffs.
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
