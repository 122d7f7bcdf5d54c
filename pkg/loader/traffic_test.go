package loader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// These tests offer UDP at three times a rule's rate from one network namespace to another,
// where a socket counts the bytes of each stream. A bucket starts empty. While excess is
// offered, it is full to within one packet. So in a time T, with rate r and capacity C:
//
//	C + r*T - one packet < passed <= C + r*T
//
// It is not known exactly when the program saw a packet. For the upper bound, T begins before
// the stream's first packet is sent, and ends after all packets were metered. For the lower
// bound, T begins after the first packet of each stream was metered, and ends when the
// stream's last packet is due. If that packet is sent late, the bucket drains meanwhile, and
// the packets that were due fill it again three times as fast, to within one more packet.
//
// At 1 mbit and 2 s the two bounds are 0.5 % apart: a result between them is within 1 % of
// rate x time + capacity.

const (
	trafficRate     = policy.Rate(1_000_000)
	trafficCapacity = 32 << 10
	receiverPort    = 5001
	fullFrame       = 1514
	headersIPv4     = 14 + 20 + 8
	headersIPv6     = 14 + 40 + 8
)

// The networks of the near addresses.
var near4, near6 = netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8:f::/64")

// A traffic is a rig whose va and vb are in different network namespaces, with a socket behind
// the hook.
type traffic struct {
	*rig
	rule     policy.Rule
	set      *maps.Set
	entry    maps.Entry
	receiver *receiver
	sent     atomic.Uint64 // packets
}

// newTraffic creates the devices, without a rule.
func newTraffic(t *testing.T, mode Mode, d policy.Direction, rule policy.Rule) *traffic {
	t.Helper()
	x := &traffic{rig: &rig{t: t, direction: d}, rule: rule}
	from, to := near4, rule.Prefix
	if rule.Prefix.Addr().Is6() {
		from = near6
	}
	if d == policy.Ingress {
		from, to = to, from
	}
	there := testenv.NewNetns(t)
	testenv.Veth(t, "vb", "va")
	if d == policy.Egress {
		x.receiver = receive(t, "vb", from, to)
	} else {
		x.sender = testenv.NewSender(t, "vb")
	}
	x.netns = testenv.NewNetns(t) // which the test stays in
	testenv.Must(t, there.Do(func() error {
		va, err := netlink.LinkByName("va")
		if err != nil {
			return err
		}
		return netlink.LinkSetNsFd(va, x.netns.FD())
	}))
	testenv.Must(t, netlink.LinkSetUp(testenv.Link(t, "va")))
	if d == policy.Egress {
		x.sender = testenv.NewSender(t, "va")
	} else {
		x.receiver = receive(t, "va", from, to)
	}
	x.options = Options{BPFFS: testenv.BPFFS(t), Mode: mode}
	x.passed = attachForeign(t, "va", d, link.Tail())
	return x
}

func (x *traffic) counted() maps.Counters {
	x.t.Helper()
	return x.set.Store.Counters(x.entry.ID)
}

// settle waits until all sent packets were metered, and returns a time after that. On ingress,
// under load, the kernel drops packets before any program, so settle waits until no more arrive.
func (x *traffic) settle() (at uint64) {
	x.t.Helper()
	metered := uint64(math.MaxUint64)
	for quiet := 0; quiet < 200; quiet++ {
		if c := x.counted(); c.PassedPackets+c.DroppedPackets != metered {
			metered, at, quiet = c.PassedPackets+c.DroppedPackets, maps.Now(), 0
		}
		if metered == x.sent.Load() {
			return at
		}
		time.Sleep(time.Millisecond)
	}
	if x.direction == policy.Egress {
		x.t.Fatalf("%d packets were sent, and %d metered", x.sent.Load(), metered)
	}
	return at
}

// far is the n-th address of the rule's prefix; for IPv6, of its subnet-th /64.
func (x *traffic) far(subnet, n int) netip.Addr {
	a := x.rule.Prefix.Addr().AsSlice()
	if len(a) == 16 {
		binary.BigEndian.PutUint16(a[6:], binary.BigEndian.Uint16(a[6:])+uint16(subnet))
	}
	a[len(a)-1] += byte(n)
	addr, _ := netip.AddrFromSlice(a)
	return addr
}

// flow is a flow through the device to the receiver.
func (x *traffic) flow(far netip.Addr, port int) maps.Flow {
	here := near4.Addr().Next()
	if far.Is6() {
		here = near6.Addr().Next()
	}
	f := maps.Flow{Src: here, Dst: far, Proto: unix.IPPROTO_UDP, SrcPort: uint16(port), DstPort: receiverPort}
	if x.direction == policy.Ingress {
		f.Src, f.Dst = f.Dst, f.Src
	}
	return f
}

// datagram is a frame of a flow with that many bytes.
func datagram(f maps.Flow, size int) []byte {
	b := make([]byte, size)
	copy(b, receiverMAC)
	copy(b[6:], []byte{0x02, 0, 0, 0, 0, 1})
	ip, udp := b[14:], b[headersIPv4-8:]
	var pseudo uint32 // RFC 8200, 8.1; the checksum of IPv4's UDP may be left out
	if f.Dst.Is4() {
		binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IP)
		ip[0], ip[8], ip[9] = 0x45, 64, f.Proto
		binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)))
		copy(ip[12:], f.Src.AsSlice())
		copy(ip[16:], f.Dst.AsSlice())
		binary.BigEndian.PutUint16(ip[10:], onesComplement(0, ip[:20]))
	} else {
		udp = b[headersIPv6-8:]
		binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IPV6)
		ip[0], ip[6], ip[7] = 0x60, f.Proto, 64
		binary.BigEndian.PutUint16(ip[4:], uint16(len(udp)))
		copy(ip[8:], f.Src.AsSlice())
		copy(ip[24:], f.Dst.AsSlice())
		pseudo = uint32(f.Proto) + uint32(len(udp))
	}
	binary.BigEndian.PutUint16(udp, f.SrcPort)
	binary.BigEndian.PutUint16(udp[2:], f.DstPort)
	binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
	if pseudo != 0 {
		binary.BigEndian.PutUint16(udp[6:], onesComplement(pseudo, b[14+8:headersIPv6]))
	}
	return b
}

// onesComplement is the checksum of RFC 1071 over an even number of bytes.
func onesComplement(sum uint32, b []byte) uint16 {
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

var receiverMAC = net.HardwareAddr{0x02, 0, 0, 0, 0, 2}

// A receiver counts datagrams to its port by flow, in bytes at layer 2.
type receiver struct {
	conn    *net.UDPConn
	packets atomic.Uint64
	mutex   sync.Mutex
	bytes   map[maps.Flow]uint64
}

// receive starts a receiver in the calling thread's namespace. All addresses in to are local there, and
// those in from are behind device.
func receive(t *testing.T, device string, from, to netip.Prefix) *receiver {
	t.Helper()
	network, level, option, headers := "udp4", unix.IPPROTO_IP, unix.IP_PKTINFO, headersIPv4
	if to.Addr().Is6() {
		network, level, option, headers = "udp6", unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, headersIPv6
		testenv.Must(t, os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("0"), 0))
	}
	lo, l := testenv.Link(t, "lo"), testenv.Link(t, device)
	testenv.Must(t, netlink.LinkSetUp(lo))
	testenv.Must(t, netlink.LinkSetHardwareAddr(l, receiverMAC))
	for _, route := range []netlink.Route{
		{Dst: ipNet(to), LinkIndex: lo.Attrs().Index, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST},
		{Dst: ipNet(from), LinkIndex: l.Attrs().Index, Scope: netlink.SCOPE_LINK},
	} {
		testenv.Must(t, netlink.RouteAdd(&route))
	}
	conn, err := net.ListenUDP(network, &net.UDPAddr{Port: receiverPort})
	testenv.Must(t, err)
	raw, err := conn.SyscallConn()
	testenv.Must(t, err)
	var failed error
	testenv.Must(t, raw.Control(func(fd uintptr) {
		failed = errors.Join(
			unix.SetsockoptInt(int(fd), level, option, 1),
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20),
		)
	}))
	testenv.Must(t, failed)
	r := &receiver{conn: conn, bytes: map[maps.Flow]uint64{}}
	var done sync.WaitGroup
	done.Go(func() {
		if err := r.count(headers); !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		conn.Close()
		done.Wait()
	})
	return r
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func (r *receiver) count(headers int) error {
	payload, control := make([]byte, 2048), make([]byte, 128)
	for {
		n, oob, _, src, err := r.conn.ReadMsgUDPAddrPort(payload, control)
		if err != nil {
			return err
		}
		f := maps.Flow{Src: src.Addr().Unmap(), Proto: unix.IPPROTO_UDP, SrcPort: src.Port(), DstPort: receiverPort}
		messages, err := unix.ParseSocketControlMessage(control[:oob])
		if err != nil || len(messages) != 1 {
			return fmt.Errorf("a datagram from %v says not where it went: %v", src, err)
		}
		// struct in_pktinfo has the address last, and struct in6_pktinfo first.
		if info := messages[0].Data; f.Src.Is4() {
			f.Dst = netip.AddrFrom4([4]byte(info[8:12]))
		} else {
			f.Dst = netip.AddrFrom16([16]byte(info[:16]))
		}
		r.mutex.Lock()
		r.bytes[f] += uint64(headers + n)
		r.mutex.Unlock()
		r.packets.Add(1)
	}
}

// total is the bytes of all flows.
func (r *receiver) total() (bytes uint64) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, b := range r.bytes {
		bytes += b
	}
	return bytes
}

// got is the bytes of some flows.
func (r *receiver) got(flows ...maps.Flow) (bytes uint64) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, f := range flows {
		bytes += r.bytes[f]
	}
	return bytes
}

// A stream sends packets of its flows in turn. The flows share one bucket, which no other stream uses.
type stream struct {
	flows  []maps.Flow
	frames map[int][][]byte // by size, of each flow

	// Times in ns: before the first packet was sent; after it was metered; when the last one
	// was due.
	began, known, due uint64

	last    uint64  // ns: when a packet was last sent
	room    float64 // bytes: of the bucket then, by that time
	starved float64 // bytes: what pauses may have left unused, because the bucket was empty
}

func (x *traffic) newStream(sizes []int, flows ...maps.Flow) *stream {
	s := &stream{flows: flows, frames: map[int][][]byte{}}
	for _, size := range append([]int{fullFrame}, sizes...) {
		if s.frames[size] == nil {
			for _, f := range flows {
				s.frames[size] = append(s.frames[size], datagram(f, size))
			}
		}
	}
	return s
}

func (x *traffic) transmit(frame []byte) {
	if err := x.sender.Send(frame); err != nil {
		x.t.Error(err)
	}
	x.sent.Add(1)
}

// begin sends the first packet of each stream.
func (x *traffic) begin(streams ...*stream) {
	x.t.Helper()
	for _, s := range streams {
		s.began = maps.Now()
		x.transmit(s.frames[fullFrame][0])
	}
	known := x.settle()
	for _, s := range streams {
		s.known = known
	}
}

// fill fills the buckets of streams that have begun, so that none is empty when its sender is
// late.
func (x *traffic) fill(streams ...*stream) {
	for i := range x.rule.Capacity / fullFrame {
		for _, s := range streams {
			x.transmit(s.frames[fullFrame][int(i)%len(s.flows)])
		}
	}
}

// offer sends three times the rate of each stream, in packets of those sizes in turn, until stop
// returns true. It sends late packets, too.
func (x *traffic) offer(streams []*stream, sizes []int, stop func(now uint64) bool) {
	const times = 3
	start, offered := maps.Now(), uint64(0)
	for _, s := range streams {
		s.last = start
	}
	for round := 0; ; round++ {
		size := sizes[round%len(sizes)]
		for _, s := range streams {
			due := start + offered*8e9/(times*uint64(x.rule.Rate)*uint64(len(streams)))
			now := maps.Now()
			for ; now < due; now = maps.Now() {
				time.Sleep(time.Millisecond)
			}
			if stop(now) {
				return
			}
			// Several pauses may leave the bucket empty, too. It is metered later than here, so half of it must not drain.
			if s.room += x.lets(now - s.last); s.room > float64(x.rule.Capacity)/2 {
				s.starved += s.room - float64(x.rule.Capacity)/2
				s.room = float64(x.rule.Capacity) / 2
			}
			if float64(size) <= s.room {
				s.room -= float64(size)
			}
			s.last = now
			x.transmit(s.frames[size][round%len(s.flows)])
			s.due = due
			offered += uint64(size)
		}
	}
}

// lets is the bytes that the rule's rate allows in a time in ns.
func (x *traffic) lets(ns uint64) float64 { return float64(x.rule.Rate) / 8e9 * float64(ns) }

// bounds are the least and most bytes of a stream by now, with one byte for rounding.
func (x *traffic) bounds(s *stream, now uint64) (least, most float64) {
	c := float64(x.rule.Capacity)
	return c + x.lets(s.due-s.known) - s.starved - 2*fullFrame, c + x.lets(now-s.began) + 1
}

// check ends the test unless each stream got its rate until now.
func (x *traffic) check(streams []*stream, now uint64) {
	x.t.Helper()
	lowest, highest, starved := math.Inf(1), math.Inf(-1), 0.0
	for _, s := range streams {
		got := float64(x.receiver.got(s.flows...))
		least, most := x.bounds(s, now)
		if got < least || got > most {
			x.t.Errorf("%v got %.0f bytes, want %.0f to %.0f", s.flows[0], got, least, most)
		}
		want := float64(x.rule.Capacity) + x.lets(s.due-s.began)
		lowest, highest, starved = min(lowest, 100*(got/want-1)), max(highest, 100*(got/want-1)), max(starved, s.starved)
	}
	x.t.Logf("%d streams got %+.3f %% to %+.3f %% more than rate x time + capacity, in %.3f s; %d packets sent, %d received",
		len(streams), lowest, highest, float64(now-streams[0].began)/1e9, x.sent.Load(), x.receiver.packets.Load())
	if starved > 0 {
		x.t.Logf("the sender of a stream paused, for %.0f bytes too long", starved)
	}
}

// offerAndCheck tests a rule in force.
func (x *traffic) offerAndCheck(streams []*stream, sizes []int) {
	x.t.Helper()
	x.begin(streams...)
	x.fill(streams...)
	end := streams[0].began + uint64(testenv.Rounds(x.t, 2))*1e9
	x.offer(streams, sizes, func(now uint64) bool { return now >= end })
	now := x.settle()
	c := x.counted()
	testenv.Eventually(x.t, fmt.Sprintf("%d packets that passed", c.PassedPackets), func() bool {
		return x.receiver.packets.Load() >= c.PassedPackets
	})
	x.check(streams, now)
	all := x.receiver.total()
	if packets := x.receiver.packets.Load(); packets != c.PassedPackets || all != c.PassedBytes {
		x.t.Errorf("%d packets of %d bytes were received, and counters are %+v", packets, all, c)
	}
	if c.ContendedPackets != 0 {
		x.t.Errorf("%d packets found a contended bucket", c.ContendedPackets)
	}
}

var (
	fullFrames  = []int{fullFrame}
	mixedFrames = []int{fullFrame, 64, 900, 128, 1400, 300}
)

func each(kind policy.EachKind, bits uint8) func(*policy.Rule) {
	return func(r *policy.Rule) { r.Each = policy.Each{Kind: kind, Bits: bits} }
}

func ofTraffic(r *policy.Rule) { r.Rate, r.Capacity = trafficRate, trafficCapacity }

// Each host, subnet or flow gets its rate.
func TestEachGetsItsRate(t *testing.T) {
	for _, c := range []struct {
		name      string
		mode      Mode
		direction policy.Direction
		rule      policy.Rule
		sizes     []int
		subnets   int
	}{
		{"hosts, gcra egress IPv4", TCX, policy.Egress, rule("10.0.0.0/24", ofTraffic, eachHost), fullFrames, 1},
		{"hosts, leaky ingress IPv4, mixed", Clsact, policy.Ingress, rule("10.0.0.0/24", ofTraffic, eachHost, leaky), mixedFrames, 1},
		{"hosts, leaky egress IPv6, mixed", TCX, policy.Egress, rule("2001:db8:1::/64", ofTraffic, eachHost, leaky), mixedFrames, 1},
		{"subnets, gcra ingress IPv6", TCX, policy.Ingress, rule("2001:db8:1::/48", ofTraffic, each(policy.EachSubnet, 64)), fullFrames, 5},
		{"flows, leaky egress IPv4, mixed", TCX, policy.Egress, rule("10.0.0.0/24", ofTraffic, each(policy.EachFlow, 0), leaky), mixedFrames, 1},
		{"flows, gcra ingress IPv6", TCX, policy.Ingress, rule("2001:db8:1::/64", ofTraffic, each(policy.EachFlow, 0)), fullFrames, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			x := newTraffic(t, c.mode, c.direction, c.rule)
			x.put(c.rule)
			x.set = x.hook("va").Set
			x.entry, _ = x.set.Find(c.rule.Prefix)
			var streams []*stream
			for i := range 50 {
				f := x.flow(x.far(i%c.subnets, i/c.subnets+1), 5000)
				if c.rule.Each.Kind == policy.EachFlow {
					f = x.flow(x.far(0, 7), 10000+i)
				}
				if c.rule.Each.Kind == policy.EachSubnet && i >= c.subnets { // the flows of a subnet share its stream
					streams[i%c.subnets].flows = append(streams[i%c.subnets].flows, f)
				} else {
					streams = append(streams, &stream{flows: []maps.Flow{f}})
				}
			}
			for i, s := range streams {
				streams[i] = x.newStream(c.sizes, s.flows...)
			}
			x.offerAndCheck(streams, c.sizes)
		})
	}
}
