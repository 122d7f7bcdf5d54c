package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/policy"
)

// The devices of an arena.
const (
	nearDevice   = "near"
	farDevice    = "far"
	sourceDevice = "source"
	uplinkDevice = "uplink"
)

// The destination of limited packets.
var target = netip.MustParseAddr("10.1.2.3")

// Commands of ip for each end. Their neighbours are known, so that they send no other packets.
const (
	nearSetup = `link set near address 02:00:00:00:00:01 up
addr add 192.0.2.1/24 dev near
neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev near
route add default via 192.0.2.2
`
	farSetup = `link set far address 02:00:00:00:00:02 up
addr add 192.0.2.2/24 dev far
addr add 10.1.2.3/32 dev far
neigh add 192.0.2.1 lladdr 02:00:00:00:00:01 dev far
`
	uplinkSetup = `link set uplink address 02:00:00:00:01:02 up
addr add 198.51.100.2/24 dev uplink
neigh add 198.51.100.1 lladdr 02:00:00:00:01:01 dev uplink
`
	sourceSetup = `link set source address 02:00:00:00:01:01 up
addr add 198.51.100.1/24 dev source
neigh add 198.51.100.2 lladdr 02:00:00:00:01:02 dev source
route add default via 198.51.100.2
`
)

// An arena is a veth pair between two network namespaces. A limiter is set up on the
// egress of the near end, which sends everything to the far end. An arena has no name
// outside this process, so it ends with the process.
type arena struct {
	near, far netns.NsHandle
	source    netns.NsHandle // behind the near end, which is a router then
	bpffs     string         // a mount that is not in the file system
	owned
}

// newArena returns an arena without a limiter.
func newArena() *arena {
	a := &arena{}
	a.bpffs = a.mountBPFFS()
	a.near, a.far = a.newNamespace(), a.newNamespace()
	in(a.near, func() { addVeth(nearDevice, farDevice, netlink.NsFd(a.far)) })
	ip(a.far, farSetup)
	ip(a.near, nearSetup)
	waitUp(a.near, nearDevice)
	waitUp(a.far, farDevice)
	return a
}

// newPath returns an arena with a source. Packets from it to the far end go through the limiter, and only the limiter
// delays them. Packets on the path back have a constant delay, as on a path through a network.
func newPath() *arena {
	a := newArena()
	a.source = a.newNamespace()
	in(a.near, func() {
		addVeth(uplinkDevice, sourceDevice, netlink.NsFd(a.source))
		sysctl("ipv4/ip_forward", "1")
	})
	ip(a.near, uplinkSetup)
	ip(a.source, sourceSetup)
	ip(a.far, "route add default via 192.0.2.1\n")
	for _, end := range []netns.NsHandle{a.source, a.near, a.far} {
		in(end, func() { // so large that no receiver limits TCP
			sysctl("ipv4/tcp_rmem", "4096 4194304 67108864")
			sysctl("ipv4/tcp_wmem", "4096 131072 67108864")
		})
	}
	waitUp(a.source, sourceDevice)
	waitUp(a.near, uplinkDevice)
	in(a.far, func() {
		runCommand("", "tc", "qdisc", "add", "dev", farDevice, "root", "netem", "delay", roundTrip.String(), "limit", "1000000")
	})
	return a
}

// sysctl sets a parameter of the thread's network namespace.
func sysctl(name, value string) { check(os.WriteFile("/proc/sys/net/"+name, []byte(value), 0)) }

// addVeth adds a veth pair to the namespace of the calling thread. Its peer is in another namespace, unless that is nil.
func addVeth(name, peer string, peerNamespace any) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	check(netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peer, PeerNamespace: peerNamespace}))
}

// mountBPFFS creates a detached mount of a bpffs. It exists as long as its descriptor is open.
func (a *arena) mountBPFFS() string {
	context := must(unix.Fsopen("bpf", unix.FSOPEN_CLOEXEC))
	defer unix.Close(context)
	check(unix.FsconfigCreate(context))
	mount := must(unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, 0))
	a.keepFD(mount)
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), mount)
}

// newNamespace creates a network namespace in which the kernel sends nothing on its own.
func (a *arena) newNamespace() (handle netns.NsHandle) {
	aside(func() {
		handle = must(netns.New())
		for _, scope := range []string{"all/", "default/"} {
			for name, value := range map[string]string{"accept_dad": "0", "router_solicitations": "0", "addr_gen_mode": "1"} {
				err := os.WriteFile("/proc/sys/net/ipv6/conf/"+scope+name, []byte(value), 0)
				if !errors.Is(err, fs.ErrNotExist) {
					check(err)
				}
			}
		}
	})
	a.keepFD(int(handle))
	return handle
}

// waitUp waits until a device is operational. The kernel drops packets until both ends of a pair are.
func waitUp(namespace netns.NsHandle, device string) {
	in(namespace, func() {
		for must(netlink.LinkByName(device)).Attrs().OperState != netlink.OperUp {
			sleep(time.Millisecond)
		}
	})
}

// ip runs commands of ip in a namespace, one per line.
func ip(namespace netns.NsHandle, commands string) {
	in(namespace, func() { runCommand(commands, "ip", "-batch", "-") })
}

// tc runs commands of tc in the near namespace, one per line.
func (a *arena) tc(commands string) {
	in(a.near, func() { runCommand(commands, "tc", "-batch", "-") })
}

// runCommand runs a command in the calling thread's network namespace, with its standard input.
func runCommand(input, name string, args ...string) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(input)
	check(runWell(cmd))
}

// runWell runs a command. An error has what it says.
func runWell(cmd *exec.Cmd) error {
	var stderr strings.Builder
	cmd.Stderr = &stderr
	err := cmd.Run()
	if err != nil {
		err = fmt.Errorf("%s: %w: %.300s", cmd, err, stderr.String())
	}
	return err
}

// attach attaches a program with tcx: to the egress of the near end, or the ingress of the far end.
func (a *arena) attach(end netns.NsHandle, p *ebpf.Program) {
	device, hook := nearDevice, ebpf.AttachTCXEgress
	if end == a.far {
		device, hook = farDevice, ebpf.AttachTCXIngress
	}
	in(end, func() {
		index := must(netlink.LinkByName(device)).Attrs().Index
		on := must(link.AttachTCX(link.TCXOptions{Interface: index, Program: p, Attach: hook}))
		a.keep(func() { on.Close() })
	})
}

// socket opens a UDP socket in a namespace.
func (a *arena) socket(namespace netns.NsHandle) (fd int) {
	in(namespace, func() { fd = must(unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)) })
	a.keepFD(fd)
	return fd
}

// sent returns the number of packets that have left the near end.
func (a *arena) sent() (packets uint64) {
	in(a.near, func() { packets = must(netlink.LinkByName(nearDevice)).Attrs().Statistics.TxPackets })
	return packets
}

const (
	headers      = 14 + 20 + 8 // of Ethernet, IPv4 and UDP
	smallPayload = 18          // bytes: makes the smallest Ethernet frame
	smallFrame   = headers + smallPayload
	maxFrame     = 1514 // without FCS
	floodPayload = maxFrame - headers
	fullPayload  = maxFrame - 14 - 20 - 32 // of TCP
	farPort      = 9                       // discard
)

// A sender sends UDP packets as fast as possible, with one system call for each: if
// netfilter drops a packet of sendmmsg, the others are not sent.
type sender struct {
	fd      int
	payload []byte
	packets int // that it has sent
}

// newSender returns a sender in a namespace, with so many bytes of payload per packet, to an IPv4 address.
func (a *arena) newSender(namespace netns.NsHandle, payload int, target netip.Addr) *sender {
	s := &sender{fd: a.socket(namespace), payload: make([]byte, payload)}
	// Larger than any queue, so that a full queue drops packets and does not block the sender.
	check(unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 256<<20))
	check(unix.Connect(s.fd, &unix.SockaddrInet4{Port: farPort, Addr: target.As4()}))
	return s
}

// send sends packets, and returns the mean time of one in ns. A drop on the path is no error.
func (s *sender) send(packets int) (nanoseconds float64) {
	start := time.Now()
	for range packets {
		// A raw call skips the scheduler of Go.
		_, _, err := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(s.fd), uintptr(unsafe.Pointer(&s.payload[0])), uintptr(len(s.payload)), unix.MSG_DONTWAIT, 0, 0)
		if err != 0 && err != unix.EPERM && err != unix.ENOBUFS { // these are drops
			check(err)
		}
	}
	s.packets += packets
	return float64(time.Since(start)) / float64(packets)
}

// frameTime is the time of a packet of maximum length at a rate.
func frameTime(rate policy.Rate) time.Duration {
	return time.Duration(maxFrame * 8 * uint64(time.Second) / uint64(rate))
}

// flooding sends packets of maximum length at a rate while f runs, or as many as it can if the rate is 0. The gaps are
// random, from 0 to twice the mean: behind a limiter that drops every second one, evenly sent packets would be even.
func (s *sender) flooding(rate policy.Rate, f func()) {
	during, end := context.WithCancel(ctx)
	together(func() {
		defer end()
		f()
	}, func() {
		aside(func() {
			check(unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)) // to wake up in time
			random := newRandom()
			var now unix.Timespec
			check(unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
			for next := now.Nano(); during.Err() == nil; s.send(1) {
				if rate == 0 {
					continue
				}
				next += int64(2 * random.Float64() * float64(frameTime(rate)))
				until := unix.NsecToTimespec(next)
				if err := unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &until, nil); !errors.Is(err, unix.EINTR) {
					check(err)
				}
			}
		})
	})
}

// A counter counts the frames that arrive at the far end, at layer 2, in the same way for all limiters: all of them, or
// those for each address of addressOf.
type counter struct{ counts *ebpf.Map }

// arrivals are the packets and bytes until the last frame, and the time of that frame.
type arrivals struct {
	Packets, Bytes uint64
	Last           uint64 // ns of the system's monotonic clock
}

// count attaches a counter to the far end for n addresses, or for all packets if n is 1.
func (a *arena) count(n int, program string) counter {
	p, maps := a.reference(program, n, nil)
	a.attach(a.far, p)
	return counter{maps["counts"]}
}

// read returns a consistent count of an address.
func (c counter) read(address uint32) (now arrivals) {
	for {
		before := now
		check(c.counts.Lookup(address, &now))
		if now == before {
			return now
		}
		time.Sleep(2 * time.Microsecond) // longer than the program runs for a frame
	}
}

// A window has the bytes that arrived within a time for each address.
type window []uint64

// windows returns several windows, the first of which begins after a time.
func (c counter) windows(settle, part time.Duration, n int) (windows []window) {
	read := func() (bytes window) {
		for i := range c.counts.MaxEntries() {
			bytes = append(bytes, c.read(i).Bytes)
		}
		return bytes
	}
	sleep(settle)
	before := read()
	for range n {
		sleep(part)
		now := read()
		for i := range now {
			before[i] = now[i] - before[i]
		}
		windows, before = append(windows, before), now
	}
	return windows
}
