//go:build guest

package wire

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

const tcpPort = 5001

// A transfer is what a TCP connection has done from its first byte on, for as long as it was to send.
type transfer struct {
	bytes uint64 // that the receiving application got
	took  time.Duration
	info  unix.TCPInfo // of the sender
	early uint32       // segments that were sent again in the first second
}

func (f transfer) goodput() float64 { return float64(f.bytes) * 8 / f.took.Seconds() }

func (f transfer) String() string {
	return fmt.Sprintf("goodput %.3f Mbit/s, %d of %d segments sent again (%d in the first second), %d timeouts, %d delivered with CE",
		f.goodput()/1e6, f.info.Total_retrans, f.info.Data_segs_out, f.early, f.info.Total_rto, f.info.Delivered_ce)
}

// A pending transfer goes on beside the test.
type pending struct {
	t      *testing.T
	result chan transfer
	failed chan error
}

func (p pending) wait() transfer {
	p.t.Helper()
	for range 2 {
		if err := <-p.failed; err != nil {
			p.t.Fatal(err)
		}
	}
	return <-p.result
}

// transfer has one namespace send to another for so long as fast as it can.
func (r *rig) transfer(from, at *testenv.Netns, to netip.Addr, d time.Duration) pending {
	r.t.Helper()
	p := pending{r.t, make(chan transfer, 1), make(chan error, 2)}
	listening, received := make(chan struct{}), make(chan uint64, 1)
	go func() { p.failed <- at.Do(func() error { return receive(listening, received, d) }) }()
	go func() {
		p.failed <- from.Do(func() error {
			<-listening
			f, err := sendAll(netip.AddrPortFrom(to, tcpPort), d)
			f.bytes = <-received
			p.result <- f
			return err
		})
	}()
	return p
}

// receive takes one connection, and says how many bytes came in the time d after the first ones.
func receive(listening chan<- struct{}, received chan<- uint64, d time.Duration) error {
	defer close(received)
	listener, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0) // of both families
	if err != nil {
		close(listening)
		return err
	}
	defer unix.Close(listener)
	err = errors.Join(unix.SetsockoptInt(listener, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		unix.Bind(listener, &unix.SockaddrInet6{Port: tcpPort}), unix.Listen(listener, 1))
	close(listening)
	if err != nil {
		return fmt.Errorf("listen for TCP: %w", err)
	}
	fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var sum uint64
	var end time.Duration
	for {
		// The kernel forgets what it has, and nobody looks at it.
		n, _, errno := unix.Syscall6(unix.SYS_RECVFROM, uintptr(fd), 0, 1<<20, unix.MSG_TRUNC, 0, 0)
		if errno == unix.EINTR {
			continue
		}
		if end == 0 {
			end = now() + d
		}
		if errno != 0 || n == 0 {
			received <- sum
			return nil
		}
		if now() < end {
			sum += uint64(n)
		}
	}
}

// sendAll connects, sends for a time d, and ends the connection at once.
func sendAll(address netip.AddrPort, d time.Duration) (f transfer, err error) {
	fd, err := unix.Socket(addressFamily(address.Addr()), unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return f, err
	}
	defer unix.Close(fd)
	if err := giveWay(); err != nil {
		return f, err
	}
	if err := unix.Connect(fd, sockaddr(address)); err != nil {
		return f, fmt.Errorf("connect to %v: %w", address, err)
	}
	// No last words, and no waiting longer than d.
	err = errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Usec: 100_000}))
	if err != nil {
		return f, err
	}
	data := make([]byte, 256<<10)
	began := now()
	for now() < began+d {
		if f.info, err = tcpInfo(fd); err != nil {
			return f, err
		}
		if now() < began+time.Second {
			f.early = f.info.Total_retrans
		}
		_, _, errno := unix.Syscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&data[0])), uintptr(len(data)), 0, 0, 0)
		if errno != 0 && errno != unix.EAGAIN && errno != unix.EINTR {
			return f, fmt.Errorf("send to %v: %w", address, errno)
		}
	}
	f.took = d
	return f, nil
}

func tcpInfo(fd int) (unix.TCPInfo, error) {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return unix.TCPInfo{}, err
	}
	return *info, nil
}

// A load is a TCP connection through a limit, with a ping beside it in the same bucket.
type load struct {
	*family
	direction policy.Direction
	local     bool // sent by the router itself on egress, and to it on ingress
	offload   bool // segmentation by devices, and merging
	excess    policy.Excess
	ecn       bool // TCP asks for marks, and the rule gives them
	sparse    bool // sparse flows go first, and ten frames leave at once
}

func (l load) String() string {
	name := fmt.Sprintf("%v %s, forwarded", l.direction, l.name)
	if l.local {
		name = fmt.Sprintf("%v %s, local", l.direction, l.name)
	}
	if !l.offload {
		name += ", without GSO and GRO"
	}
	name += fmt.Sprint(", ", l.excess)
	if l.ecn {
		name += " and ECN"
	}
	if l.sparse {
		name += ", sparse flows first"
	}
	return name
}

const tcpRate = 20_000_000 // bit/s

// tcpTime is how long a load goes on.
func tcpTime() time.Duration {
	if *full {
		return 10 * time.Second
	}
	return 2 * time.Second
}

// run returns what TCP did, and how long the pings took that arrived.
func (l load) run(t *testing.T) (transfer, []time.Duration) {
	r := newRig(t, 1)
	r.fq(toReceiver, fqPackets)
	r.sink()
	r.offload(l.offload)
	for _, n := range []*testenv.Netns{r.sender, r.router, r.receiver} {
		if l.ecn {
			r.in(n, func() error { return sysctl("net/ipv4/tcp_ecn", "1") })
		}
	}
	limit := policy.Limit{Rate: tcpRate, Algorithm: policy.Leaky, Excess: l.excess}
	if l.excess == policy.Delay {
		limit.ECNAbove = policy.Never
		if l.ecn {
			limit.ECNAbove = policy.ECNAbove(5 * time.Millisecond)
		}
	}
	if l.sparse {
		limit.Algorithm, limit.Order = policy.GCRA, policy.SparseFirst
		testenv.Must(t, limit.Capacity.Set("15140"))
	}
	from, at, to := r.sender, r.receiver, l.host(1)
	far := netip.PrefixFrom(l.host(0), l.host(0).BitLen()-4)
	if l.direction == policy.Ingress {
		far = l.sender.Masked()
	}
	switch {
	case l.local && l.direction == policy.Ingress:
		at, to = r.router, l.router.Addr()
	case l.local:
		from = r.router
	}
	rule := must(limit.Rule(far, 14))
	r.limit(r.limited(l.direction), l.direction, rule)
	c := r.capture(r.receiver, "r0", int(tcpTime().Seconds()*(tcpRate/8/500)))
	p := r.transfer(from, at, to, tcpTime())
	pinged := l.host(2)
	ping := &stream{to: netip.AddrPortFrom(pinged, sinkPort), bytes: 98, every: 10 * time.Millisecond}
	r.send(r.sender, tcpTime(), ping)
	f := p.wait()
	var waits []time.Duration
	for _, p := range where(c.take(), func(p packet) bool { return p.to == pinged }) {
		waits = append(waits, p.at-p.sent)
	}
	t.Logf("%v: %v; %d of %d pings arrived, after %s", l, f, len(waits), ping.number, quantiles(waits))
	if l.excess != policy.Delay {
		return f, waits
	}
	if share := f.goodput() / tcpRate; share < 0.93 {
		t.Errorf("%v: a goodput of %.1f %% of the rate", l, share*100)
	}
	if f.info.Total_rto > 0 {
		t.Errorf("%v: %d timeouts", l, f.info.Total_rto)
	}
	waiting, _ := rule.Waiting()
	longest := even(tcpRate, int(waiting))
	if l.sparse {
		longest = 0
	}
	if slices.Max(waits) > longest+time.Millisecond {
		t.Errorf("%v: a ping took %v, and is to wait %v at most", l, slices.Max(waits), longest)
	}
	return f, waits
}

// What is held back and not dropped need not be sent again, and a ping beside
// waits no longer than the queue is; where TCP takes marks, nothing is dropped
// at all, and the longest wait of a ping is shorter than half of them were without.
func TestTCP(t *testing.T) {
	dropped, _ := load{direction: policy.Egress, family: v4, offload: true, excess: policy.Drop}.run(t)
	compare(t, dropped, policy.Egress, []load{
		{family: v4, offload: true}, {family: v4, offload: true, ecn: true}, {family: v6}, {family: v6, local: true},
	})
}

// Where sparse flows go first, a ping does not wait for TCP, which keeps its rate and its order.
// No load here loses a packet: the queue refuses one that stands for 40 segments as a whole. Its
// sender repeats it within microseconds, while the queue is still full, and then has to wait for
// a timeout, whatever the order of the queue is.
func TestTCPSparseFirst(t *testing.T) {
	for _, l := range []load{{family: v4, offload: true, sparse: true, ecn: true}, {family: v6, local: true, sparse: true}} {
		l.direction, l.excess = policy.Egress, policy.Delay
		f, _ := l.run(t)
		if f.info.Total_retrans > 0 || f.info.Reord_seen > 0 {
			t.Errorf("%v: %d segments were sent again, and packets were seen out of order %d times", l, f.info.Total_retrans, f.info.Reord_seen)
		}
	}
}

// The same is true of what enters.
func TestTCPIngress(t *testing.T) {
	const in = policy.Ingress
	if *full {
		dropped, _ := load{direction: in, family: v4, offload: true, excess: policy.Drop}.run(t)
		compare(t, dropped, in, nil)
		return
	}
	compare(t, transfer{}, in, []load{{family: v6, local: true}, {family: v4, offload: true, ecn: true}})
}

// compare runs loads of a direction, or all that there are, and compares them
// with each other and with one of which packets were dropped.
func compare(t *testing.T, dropped transfer, d policy.Direction, loads []load) {
	t.Helper()
	if *full {
		loads = nil
		for _, f := range []*family{v4, v6} {
			for n := range 8 {
				loads = append(loads, load{family: f, local: n&4 > 0, offload: n&2 > 0, ecn: n&1 > 0})
			}
		}
	}
	medians := map[load]time.Duration{}
	for _, l := range loads {
		l.direction, l.excess = d, policy.Delay
		f, waits := l.run(t)
		again, most := f.info.Total_retrans, uint32(0)
		switch {
		case l.ecn || l.local && d == policy.Egress:
		case l.offload: // up to 64 KiB are dropped at a time
			most = dropped.info.Total_retrans / 2
		default:
			most = f.info.Data_segs_out / 100
		}
		if again > most {
			t.Errorf("%v: of %d segments %d were sent again, and with drops %d", l, f.info.Data_segs_out, again, dropped.info.Total_retrans)
		}
		longest := slices.Max(waits)
		if !l.ecn {
			medians[l] = quantile(waits, 0.5)
			continue
		}
		l.ecn = false
		if median, ok := medians[l]; ok && longest > median {
			t.Errorf("%v: a ping took up to %v with marks, and half of them %v without", l, longest, median)
		}
	}
}
