package loader

import (
	"errors"
	"fmt"
	"io"
	gomaps "maps"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// These tests send all kinds of packets through rules with colours, and compare what arrives with the counters: as many
// packets and bytes of each DSCP as the rule says that it gave this colour.

// Packets get these DSCPs by their colour. Their senders use another one.
var (
	dscps      = [...]uint8{policy.Green: 10, policy.Yellow: 12, policy.Red: 14}
	dscpOfTest = uint8(26)
)

// onceOnly is next to nothing while a test runs, so that buckets fill once.
const onceOnly = policy.Rate(8000)

// inColours gives a rule colours: the first 150 kB are green, the next 150 kB yellow. Each is room for two GSO packets.
func inColours(a policy.Algorithm, red policy.Action) func(*policy.Rule) {
	const burst = 150_000
	return func(r *policy.Rule) {
		r.Algorithm, r.Rate, r.Capacity = a, onceOnly, burst
		r.Colours = policy.Colours{Green: policy.SetDSCP(dscps[policy.Green]), Yellow: policy.SetDSCP(dscps[policy.Yellow]), Red: red}
		switch a {
		case policy.SRTCM:
			r.Colours.EBS = burst
		case policy.TRTCM:
			r.Colours.PIR, r.Colours.PBS = r.Rate, 2*burst
		case policy.RFC4115:
			r.Colours.EIR, r.Colours.EBS = r.Rate, burst
		}
	}
}

// A paintbox is a rig whose va and vb are in different network namespaces with addresses of both families. va has the
// limit. The receiver has an observer behind it.
type paintbox struct {
	*rig
	from, to *testenv.Netns
	near     [2]netip.Addr // of va, by family
	observer *observer

	lostBefore uint64 // what lost was before these packets
}

// lost is how many packets of the sender the kernel has dropped before any program, because it was busy.
func (x *paintbox) lost() (packets uint64) {
	x.t.Helper()
	testenv.Must(x.t, x.from.Do(func() error {
		vb, err := netlink.LinkByName("vb")
		if err == nil {
			packets = vb.Attrs().Statistics.TxDropped - x.lostBefore
		}
		return err
	}))
	return packets
}

var farPrefixes = [2]netip.Prefix{netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("2001:db8:1::/64")}

// nth is the n-th address of a prefix.
func nth(p netip.Prefix, n int) netip.Addr {
	b := p.Addr().AsSlice()
	b[len(b)-1] = byte(n)
	a, _ := netip.AddrFromSlice(b)
	return a
}

// farHosts is how many far addresses there are in each family. Each has a rule of its own.
const farHosts = 50

func newPaintbox(t *testing.T, mode Mode, d policy.Direction) *paintbox {
	t.Helper()
	x := &paintbox{rig: &rig{t: t, direction: d}}
	there := testenv.NewNetns(t)
	testenv.Veth(t, "vb", "va")
	here := testenv.NewNetns(t) // which the test stays in
	testenv.Must(t, there.Do(func() error {
		va, err := netlink.LinkByName("va")
		if err != nil {
			return err
		}
		return netlink.LinkSetNsFd(va, here.FD())
	}))
	var far []netip.Addr
	for i, p := range farPrefixes {
		x.near[i] = nth(p, 254)
		for n := range farHosts {
			far = append(far, nth(p, n+1))
		}
	}
	testenv.Must(t, here.Do(func() error { return addresses("va", x.near[:]) }))
	testenv.Must(t, there.Do(func() error { return addresses("vb", far) }))
	testenv.WaitUp(t, "va")
	x.netns, x.options = here, Options{BPFFS: testenv.BPFFS(t), Mode: mode}
	x.from, x.to = here, there
	behind := "vb"
	if d == policy.Ingress {
		x.from, x.to, behind = there, here, "va"
	}
	testenv.Must(t, x.to.Do(func() (err error) {
		x.observer, err = observe(t, behind, d)
		return err
	}))
	x.receive("4")
	x.receive("6")
	return x
}

// addresses gives a device addresses. Both ends have the same hardware address and no ARP: the kernel then sends frames
// to the address of the device itself.
func addresses(device string, all []netip.Addr) error {
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("0"), 0); err != nil {
		return err
	}
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	err = errors.Join(netlink.LinkSetDown(l), netlink.LinkSetHardwareAddr(l, receiverMAC), netlink.LinkSetARPOff(l), netlink.LinkSetUp(l))
	for _, a := range all {
		bits := farPrefixes[0].Bits()
		if a.Is6() {
			bits = farPrefixes[1].Bits()
		}
		err = errors.Join(err, netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, bits)), Flags: unix.IFA_F_NODAD}))
	}
	return err
}

// receive takes TCP connections and reads them to their end. UDP is never read: the kernel drops it and sends no errors.
func (x *paintbox) receive(family string) {
	x.t.Helper()
	var listener *net.TCPListener
	var udp *net.UDPConn
	testenv.Must(x.t, x.to.Do(func() (err error) {
		if listener, err = net.ListenTCP("tcp"+family, &net.TCPAddr{Port: receiverPort}); err != nil {
			return err
		}
		udp, err = net.ListenUDP("udp"+family, &net.UDPAddr{Port: receiverPort})
		return err
	}))
	var done sync.WaitGroup
	done.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			if _, err := io.Copy(io.Discard, conn); err != nil {
				x.t.Error(err)
			}
			conn.Close()
		}
	})
	x.t.Cleanup(func() {
		udp.Close()
		listener.Close()
		done.Wait()
	})
}

// ends are the addresses of packets of a rule.
func (x *paintbox) ends(r policy.Rule) (from, to netip.AddrPort) {
	near, far := x.near[0], r.Prefix.Addr()
	if far.Is6() {
		near = x.near[1]
	}
	if x.direction == policy.Ingress {
		return netip.AddrPortFrom(far, 0), netip.AddrPortFrom(near, receiverPort)
	}
	return netip.AddrPortFrom(near, 0), netip.AddrPortFrom(far, receiverPort)
}

// segmentBytes is the payload of a segment of GSO over UDP.
const segmentBytes = 1000

// udp sends datagrams of n bytes with the class dscpOfTest and ECT(0). If they are longer than a segment and segmented is
// true, they are GSO packets; else the kernel fragments those that are longer than the MTU.
func (x *paintbox) udp(r policy.Rule, count, n int, segmented bool) error {
	from, to := x.ends(r)
	conn, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(from), net.UDPAddrFromAddrPort(to))
	if err != nil {
		return err
	}
	defer conn.Close()
	level, option := unix.IPPROTO_IP, unix.IP_TOS
	if from.Addr().Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_TCLASS
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = raw.Control(func(fd uintptr) {
		if set = unix.SetsockoptInt(int(fd), level, option, int(classOfTest)); segmented && set == nil {
			set = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, segmentBytes)
		}
	})
	if err = errors.Join(err, set); err != nil {
		return err
	}
	payload := make([]byte, n)
	for range count {
		if _, err := conn.Write(payload); err != nil {
			return err
		}
	}
	return nil
}

const ect0 = 2

var classOfTest = dscpOfTest<<2 | ect0

// tcp sends n bytes, which the kernel makes GSO packets of, and returns when both ends have closed.
func (x *paintbox) tcp(r policy.Rule, n int) error {
	from, to := x.ends(r)
	conn, err := net.DialTCP("tcp", net.TCPAddrFromAddrPort(from), net.TCPAddrFromAddrPort(to))
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err = conn.Write(make([]byte, n)); err != nil {
		return err
	}
	if err = conn.CloseWrite(); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, conn)
	return err
}

// tagged sends frames of n bytes with a VLAN tag. They have no ECN.
func (x *paintbox) tagged(r policy.Rule, count, n int) error {
	from, to := x.ends(r)
	device := "va"
	if x.direction == policy.Ingress {
		device = "vb"
	}
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	plain := datagram(maps.Flow{Src: from.Addr(), Dst: to.Addr(), Proto: unix.IPPROTO_UDP, SrcPort: 1, DstPort: to.Port()}, n-tagBytes)
	frame := append(append(append([]byte{}, plain[:12]...), 0x81, 0, 0, 7), plain[12:]...)
	for range count {
		err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: l.Attrs().Index})
		if err != nil && !errors.Is(err, unix.ENOBUFS) { // a drop on egress
			return err
		}
	}
	return nil
}

const tagBytes = 4

// An observer counts the packets that pass a limit by far address and traffic class.
type observer struct {
	mutex   sync.Mutex
	counts  map[netip.Addr]map[uint8]count
	sockets []int
}

// observe counts packets that arrive on a device, with sockets for one protocol each: these come behind programs on ingress,
// and sockets for all protocols before them.
func observe(t *testing.T, device string, d policy.Direction) (*observer, error) {
	o := &observer{counts: map[netip.Addr]map[uint8]count{}}
	l, err := netlink.LinkByName(device)
	if err != nil {
		return nil, err
	}
	var done sync.WaitGroup
	stop := make(chan struct{})
	t.Cleanup(func() {
		close(stop)
		done.Wait()
		for _, fd := range o.sockets {
			unix.Close(fd)
		}
	})
	for _, protocol := range []uint16{unix.ETH_P_IP, unix.ETH_P_IPV6} {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		o.sockets = append(o.sockets, fd)
		err = errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 256<<20),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 10_000}),
			unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: l.Attrs().Index, Protocol: protocol<<8 | protocol>>8}),
		)
		if err != nil {
			return nil, err
		}
		done.Go(func() {
			frame := make([]byte, 1<<17)
			for {
				n, from, err := unix.Recvfrom(fd, frame, 0)
				select {
				case <-stop:
					return
				default:
				}
				switch {
				case errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR):
				case err != nil:
					t.Errorf("receive: %v", err)
					return
				case from.(*unix.SockaddrLinklayer).Pkttype != unix.PACKET_OUTGOING:
					if err := o.take(frame[:n], d); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	return o, nil
}

// take counts a frame: as segments, if it is a GSO packet.
func (o *observer) take(frame []byte, d policy.Direction) error {
	var class, proto uint8
	var src, dst []byte
	headers, ip := 14, frame[14:]
	if ip[0]>>4 == 4 {
		class, proto, src, dst, headers = ip[1], ip[9], ip[12:16], ip[16:20], headers+20
		if onesComplement(0, ip[:20]) != 0 {
			return fmt.Errorf("wrong checksum in %x", ip[:20])
		}
	} else {
		class, proto, src, dst, headers = ip[0]<<4|ip[1]>>4, ip[6], ip[8:24], ip[24:40], headers+40
	}
	far, _ := netip.AddrFromSlice(dst)
	if d == policy.Ingress {
		far, _ = netip.AddrFromSlice(src)
	}
	segment := segmentBytes
	if proto == unix.IPPROTO_TCP {
		headers += int(frame[headers+12] >> 4 * 4)
		segment = 1514 - headers
	} else {
		headers += 8
	}
	packets := uint64(1)
	if len(frame) > 1514 {
		packets = uint64((len(frame) - headers + segment - 1) / segment)
	}
	o.mutex.Lock()
	defer o.mutex.Unlock()
	if o.counts[far] == nil {
		o.counts[far] = map[uint8]count{}
	}
	c := o.counts[far][class]
	o.counts[far][class] = count{c.packets + packets, c.bytes + uint64(len(frame)) + (packets-1)*uint64(headers)}
	return nil
}

// arrived is what the observer saw of a far address, by class.
func (o *observer) arrived(far netip.Addr) (all map[uint8]count, packets uint64) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	all = map[uint8]count{}
	for class, c := range o.counts[far] {
		all[class] = c
		packets += c.packets
	}
	return all, packets
}

// complete ends the test if a socket had no room for a packet.
func (o *observer) complete(t *testing.T) {
	t.Helper()
	for _, fd := range o.sockets {
		s, err := unix.GetsockoptTpacketStats(fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
		testenv.Must(t, err)
		if s.Drops > 0 {
			t.Fatalf("the observer lost %d of %d packets", s.Drops, s.Packets)
		}
	}
}

func TestColoursOnTheWire(t *testing.T) {
	kinds := []struct {
		name string
		skbs uint64 // 0 for TCP, of which both ends know when all has arrived
		ecn  uint8
		tag  uint64 // bytes of each packet that the observer does not see
		send func(*paintbox, policy.Rule) error
	}{
		{"UDP", 500, ect0, 0, func(x *paintbox, r policy.Rule) error { return x.udp(r, 500, 1000, false) }},
		{"UDP with GSO", 9, ect0, 0, func(x *paintbox, r policy.Rule) error { return x.udp(r, 9, 50_500, true) }},
		{"fragments", 400, ect0, 0, func(x *paintbox, r policy.Rule) error { return x.udp(r, 100, 5000, false) }},
		{"TCP", 0, 0, 0, func(x *paintbox, r policy.Rule) error { return x.tcp(r, 600_000) }},
		{"VLAN", 500, 0, tagBytes, func(x *paintbox, r policy.Rule) error { return x.tagged(r, 500, 1000) }},
	}
	algorithms := []policy.Algorithm{policy.SRTCM, policy.TRTCM, policy.RFC4115}
	for i, hook := range []struct {
		mode      Mode
		direction policy.Direction
	}{{TCX, policy.Egress}, {TCX, policy.Ingress}, {Clsact, policy.Egress}, {Clsact, policy.Ingress}} {
		t.Run(fmt.Sprintf("%s %v", hook.mode, hook.direction), func(t *testing.T) {
			t.Parallel()
			x := newPaintbox(t, hook.mode, hook.direction)
			host := 0
			a := algorithms[i%len(algorithms)] // how packets are marked is the same for all
			for _, red := range []policy.Action{policy.SetDSCP(dscps[policy.Red]), policy.ActionDrop} {
				for _, kind := range kinds {
					host++
					for _, prefix := range farPrefixes {
						r := rule(fmt.Sprintf("%v/%d", nth(prefix, host), prefix.Addr().BitLen()), inColours(a, red))
						if kind.name == "TCP" && red == policy.ActionDrop {
							refill(&r)
						}
						x.put(r)
						if hook.direction == policy.Ingress {
							x.lostBefore += x.lost()
						}
						testenv.Must(t, x.from.Do(func() error { return kind.send(x, r) }))
						if err := x.check(r, kind.skbs, kind.ecn, kind.tag); err != nil {
							t.Errorf("%s through %v, red %v, to %v: %v", kind.name, a, red, r.Prefix, err)
						}
					}
				}
			}
			x.observer.complete(t)
		})
	}
}

// refill makes a rule fast, so that TCP comes to an end although packets are dropped.
func refill(r *policy.Rule) {
	r.Rate = 100e6
	switch r.Algorithm {
	case policy.TRTCM:
		r.Colours.PIR = 200e6
	case policy.RFC4115:
		r.Colours.EIR = 100e6
	}
}

// check waits for all packets of a rule, and compares the classes of those that passed with its counters.
func (x *paintbox) check(r policy.Rule, skbs uint64, ecn uint8, tag uint64) error {
	x.t.Helper()
	h := x.hook("va")
	var c maps.Counters
	var got map[uint8]count
	testenv.Eventually(x.t, "all packets", func() bool {
		var packets uint64
		c = x.counters(h, r)
		got, packets = x.observer.arrived(r.Prefix.Addr())
		return packets == c.PassedPackets && (x.direction == policy.Egress || c.PassedPackets+c.DroppedPackets-c.ExtraPackets+x.lost() >= skbs)
	})
	var dropped count
	want := map[uint8]count{}
	for colour, n := range []count{{c.GreenPackets, c.GreenBytes}, {c.YellowPackets, c.YellowBytes}, {c.RedPackets, c.RedBytes}} {
		switch {
		case n.packets == 0 && r.Rate == onceOnly:
			return fmt.Errorf("no packet is %v", policy.Colour(colour))
		case policy.Colour(colour) == policy.Red && r.Colours.Red == policy.ActionDrop:
			dropped = n
		case n.packets > 0:
			want[dscps[colour]<<2|ecn] = count{n.packets, n.bytes - n.packets*tag}
		}
	}
	if !gomaps.Equal(got, want) {
		return fmt.Errorf("packets and bytes by traffic class: %v arrived, want %v", got, want)
	}
	if (count{c.DroppedPackets, c.DroppedBytes}) != dropped || c.MarkedPackets+c.ContendedPackets > 0 {
		return fmt.Errorf("counters are %+v, want %+v dropped", c, dropped)
	}
	return nil
}
