package main

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

var clusterPhase = flag.Duration("cluster-phase", 2*time.Second, "for how `long` demand stays where it is in TestClusterTraffic")

const (
	clusterHosts = 8
	clusterRate  = 64_000_000 // bits per second
	clusterBurst = 2_000_000  // bytes
)

// A clusterHost is a network namespace whose device va sends to the namespace of all receivers.
type clusterHost struct {
	t      *testing.T
	number int
	name   string // of the namespace
	netns  *testenv.Netns
	sends  atomic.Bool
	daemon *exec.Cmd
	mutex  sync.Mutex
	passed []passedPacket
}

type passedPacket struct {
	at    int64 // ns
	bytes uint64
}

// TestClusterTraffic has eight hosts with one rate, TCP and UDP, daemons that are killed and stopped, and a Redis that is
// killed and comes back empty. No window may have more than the rate and the bursts allow. How much is delivered depends
// on this machine, so it is only printed.
func TestClusterTraffic(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	redis := testenv.NewRedis(t)
	_, sink := testenv.NewNamedNetns(t)
	hosts := make([]*clusterHost, clusterHosts)
	for i := range hosts {
		hosts[i] = newClusterHost(t, i, sink)
	}
	stop := make(chan struct{})
	var all sync.WaitGroup
	t.Cleanup(all.Wait)
	t.Cleanup(func() { close(stop) })
	for _, h := range hosts {
		r.ok("-n", h.name, "set", "c", "--new", "--rate", fmt.Sprint(clusterRate), "--capacity", fmt.Sprint(clusterBurst, "b"), "--cluster", "c")
		r.ok("-n", h.name, "set", "va", "egress", "0.0.0.0/0", "--within", "c")
		h.start(r, redis.URL)
		h.capture(&all, stop)
		if h.number < 6 {
			h.sendTCP(&all, stop)
		} else {
			h.sendUDP(&all, stop)
		}
	}
	demand := func(numbers ...int) {
		for _, h := range hosts {
			h.sends.Store(slices.Contains(numbers, h.number))
		}
	}
	demand(0, 1, 2, 3, 4, 5, 6, 7)
	testenv.Eventually(t, "leases", func() bool { return leased(r, hosts) })
	time.Sleep(*clusterPhase)

	begin := time.Now()
	for _, numbers := range [][]int{{0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 6}, {2, 3, 4, 5, 7}, {0}, {1, 2, 3}, {0, 1, 2, 3, 4, 5, 6, 7}} {
		demand(numbers...)
		time.Sleep(*clusterPhase)
		t.Logf("%.4f with %v", sum(hosts, *clusterPhase)/clusterRate, numbers)
	}
	t.Logf("%.4f of the rate while demand moved", sum(hosts, time.Since(begin))/clusterRate)

	hosts[2].daemon.Process.Kill()
	hosts[5].daemon.Process.Signal(unix.SIGSTOP)
	stopped := time.Now()
	demand(0, 1, 2, 3)
	time.Sleep(*clusterPhase)
	t.Logf("%.4f with one daemon killed and one stopped", sum(hosts, *clusterPhase/2)/clusterRate)
	redis.Kill()
	time.Sleep(*clusterPhase)
	t.Logf("%.4f without a store", sum(hosts, *clusterPhase/2)/clusterRate)
	time.Sleep(time.Until(stopped.Add(3 * *clusterPhase)))
	redis.Start()
	healed := time.Now()
	hosts[2].start(r, redis.URL)
	hosts[5].daemon.Process.Signal(unix.SIGCONT)
	for sum(hosts, time.Second/2) < 0.95*clusterRate && time.Since(healed) < 10*time.Second {
		time.Sleep(50 * time.Millisecond)
	}
	t.Logf("95 %% of the rate %v after healing", time.Since(healed).Round(time.Second/10))
	testenv.Eventually(t, "leases again", func() bool { return leased(r, hosts) })
	time.Sleep(*clusterPhase)
	t.Logf("%.4f after that", sum(hosts, *clusterPhase)/clusterRate)

	var packets []passedPacket
	for _, h := range hosts {
		h.mutex.Lock()
		packets = append(packets, h.passed...)
		h.mutex.Unlock()
	}
	slices.SortFunc(packets, func(a, b passedPacket) int { return cmp.Compare(a.at, b.at) })
	var windows testenv.Windows
	var most int64
	for i, p := range packets {
		if i > 0 {
			windows.Leak(clusterRate, p.at-packets[i-1].at)
		}
		over, _ := windows.Packet(p.bytes)
		most = max(most, over)
	}
	t.Logf("%d packets; the worst window has %d bytes more than the rate allows, of %d", len(packets), most/1e6, clusterBurst)
	if most > (clusterBurst+clusterHosts*1514)*1e6 {
		t.Error("more than the rate and all bursts")
	}
}

// leased reports whether all hosts have a lease in force.
func leased(r *rig, hosts []*clusterHost) bool {
	for _, h := range hosts {
		var pools []struct {
			Leased bool `json:"leased"`
		}
		if err := json.Unmarshal([]byte(r.ok("-n", h.name, "-j", "show", "--pools")), &pools); err != nil || len(pools) != 1 {
			h.t.Fatal(pools, err)
		}
		if !pools[0].Leased {
			return false
		}
	}
	return true
}

// sum is what hosts passed in the last d, in bits per second.
func sum(hosts []*clusterHost, d time.Duration) float64 {
	since := time.Now().Add(-d).UnixNano()
	var bytes uint64
	for _, h := range hosts {
		h.mutex.Lock()
		for i := len(h.passed) - 1; i >= 0 && h.passed[i].at >= since; i-- {
			bytes += h.passed[i].bytes
		}
		h.mutex.Unlock()
	}
	return float64(bytes) * 8 / d.Seconds()
}

func newClusterHost(t *testing.T, number int, sink *testenv.Netns) *clusterHost {
	t.Helper()
	h := &clusterHost{t: t, number: number}
	h.name, h.netns = testenv.NewNamedNetns(t)
	far := fmt.Sprint("far", number)
	testenv.Must(t, h.netns.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.GSOMaxSegs = "va", 1 // so that a captured packet is one on the wire
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: far, PeerNamespace: netlink.NsFd(sink.FD())}); err != nil {
			return err
		}
		return addressUp("va", h.address(2))
	}))
	testenv.Must(t, sink.Do(func() error {
		if err := addressUp(far, h.address(1)); err != nil {
			return err
		}
		l, err := net.Listen("tcp", h.address(1)+":9")
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					_, _ = io.Copy(io.Discard, c) // until the sender ends
				}()
			}
		}()
		return nil
	}))
	return h
}

func (h *clusterHost) address(host int) string { return fmt.Sprintf("10.9.%d.%d", h.number, host) }

func addressUp(device, address string) error {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	a, err := netlink.ParseAddr(address + "/24")
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(l, a); err != nil {
		return err
	}
	return netlink.LinkSetUp(l)
}

func (h *clusterHost) start(r *rig, store string) {
	daemon := r.command(pageless("-n", h.name, "--cluster-store", store, "--cluster-host", fmt.Sprint("host", h.number))...)
	var said strings.Builder
	daemon.Stderr = &said
	testenv.Must(h.t, daemon.Start())
	h.daemon = daemon
	h.t.Cleanup(func() {
		daemon.Process.Kill()
		daemon.Wait()
		if h.t.Failed() {
			h.t.Logf("serve of host %d: %s", h.number, said.String())
		}
	})
}

// capture notes each packet that va sends, directly behind the limit.
func (h *clusterHost) capture(all *sync.WaitGroup, stop <-chan struct{}) {
	var fd int
	testenv.Must(h.t, h.netns.Do(func() (err error) {
		l, err := netlink.LinkByName("va")
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		for _, option := range [][2]int{{unix.SO_TIMESTAMPNS, 1}, {unix.SO_RCVBUFFORCE, 64 << 20}} {
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, option[0], option[1]); err != nil {
				return err
			}
		}
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 200_000}); err != nil {
			return err
		}
		var protocol [2]byte
		binary.BigEndian.PutUint16(protocol[:], unix.ETH_P_ALL)
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: binary.NativeEndian.Uint16(protocol[:]), Ifindex: l.Attrs().Index})
	}))
	all.Go(func() {
		defer unix.Close(fd)
		frame, control := make([]byte, 2048), make([]byte, 256)
		for !closed(stop) {
			n, oob, _, from, err := unix.Recvmsg(fd, frame, control, 0)
			if err != nil {
				continue
			}
			if l, ok := from.(*unix.SockaddrLinklayer); !ok || l.Pkttype != unix.PACKET_OUTGOING || frame[12] != 8 || frame[13] != 0 {
				continue // not sent, or no IPv4
			}
			messages, err := unix.ParseSocketControlMessage(control[:oob])
			if err != nil || len(messages) == 0 {
				continue
			}
			time := messages[0].Data
			at := int64(binary.NativeEndian.Uint64(time))*1e9 + int64(binary.NativeEndian.Uint64(time[8:]))
			h.mutex.Lock()
			h.passed = append(h.passed, passedPacket{at, uint64(n)})
			h.mutex.Unlock()
		}
	})
}

func closed(stop <-chan struct{}) bool {
	select {
	case <-stop:
		return true
	default:
		return false
	}
}

// sendTCP sends as much as three connections can while the host has demand.
func (h *clusterHost) sendTCP(all *sync.WaitGroup, stop <-chan struct{}) {
	for range 3 {
		all.Go(func() {
			buffer := make([]byte, 64<<10)
			var c net.Conn
			for !closed(stop) {
				switch {
				case !h.sends.Load():
					time.Sleep(10 * time.Millisecond)
				case c == nil:
					// Without a lease there is hardly room for a handshake.
					_ = h.netns.Do(func() (err error) {
						if c, err = net.DialTimeout("tcp", h.address(1)+":9", 2*time.Second); err != nil {
							return err
						}
						return c.(*net.TCPConn).SetWriteBuffer(64 << 10) // so that the demand ends soon after the test says so
					})
				default:
					c.SetWriteDeadline(time.Now().Add(time.Second / 2))
					c.Write(buffer)
				}
			}
			if c != nil {
				c.Close()
			}
		})
	}
}

// sendUDP sends a third of the rate while the host has demand.
func (h *clusterHost) sendUDP(all *sync.WaitGroup, stop <-chan struct{}) {
	var sender *testenv.Sender
	testenv.Must(h.t, h.netns.Do(func() error {
		sender = testenv.NewSender(h.t, "va")
		return nil
	}))
	frame := testenv.Frame(netip.MustParseAddr(h.address(2)), netip.MustParseAddr(h.address(1)), 1214)
	all.Go(func() {
		owed := 0.0
		for last := time.Now(); !closed(stop); time.Sleep(2 * time.Millisecond) {
			now := time.Now()
			if h.sends.Load() {
				owed += now.Sub(last).Seconds() * clusterRate / 3 / 8
			}
			for last = now; owed > float64(len(frame)); owed -= float64(len(frame)) {
				if err := sender.Send(frame); err != nil {
					h.t.Error(err)
					return
				}
			}
		}
	})
}
