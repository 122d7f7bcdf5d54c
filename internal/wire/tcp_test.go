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

// A transfer is the result of a TCP connection.
type transfer struct {
	bytes uint64 // received by the application
	took  time.Duration
	info  unix.TCPInfo // of the sender
	early uint32       // retransmissions in the first second
}

func (f transfer) goodput() float64 { return float64(f.bytes) * 8 / f.took.Seconds() }

func (f transfer) String() string {
	return fmt.Sprintf("goodput %.3f Mbit/s, %d of %d segments retransmitted (%d in the first second), %d timeouts, %d delivered with CE",
		f.goodput()/1e6, f.info.Total_retrans, f.info.Data_segs_out, f.early, f.info.Total_rto, f.info.Delivered_ce)
}

// A pending transfer runs concurrently with the test.
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

// transfer sends from one namespace to another for a time d, as fast as possible.
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

// receive accepts one connection, and counts the bytes received in the time d after the first ones.
func receive(listening chan<- struct{}, received chan<- uint64, d time.Duration) error {
	defer close(received)
	listener, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0) // for both families
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
		// MSG_TRUNC: the kernel discards the data.
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

// sendAll connects, sends for a time d, and resets the connection.
func sendAll(address netip.AddrPort, d time.Duration) (f transfer, err error) {
	fd, err := unix.Socket(addressFamily(address.Addr()), unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return f, err
	}
	defer unix.Close(fd)
	if err := lowerPriority(); err != nil {
		return f, err
	}
	if err := unix.Connect(fd, sockaddr(address)); err != nil {
		return f, fmt.Errorf("connect to %v: %w", address, err)
	}
	// Discards unsent data on close, and limits the time of a send.
	err = errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Usec: 100_000}))
	if err != nil {
		return f, err
	}
	data := make([]byte, 256<<10)
	start := now()
	for now() < start+d {
		if f.info, err = tcpInfo(fd); err != nil {
			return f, err
		}
		if now() < start+time.Second {
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

// A load is a TCP connection through a limit, with a concurrent ping in the same bucket.
type load struct {
	*family
	direction policy.Direction
	local     bool // from the router on egress, to the router on ingress
	offload   bool // segmentation offload and GRO
	excess    policy.Excess
	ecn       bool // TCP negotiates ECN, and the rule marks
	sparse    bool // with sparse-first and a burst of ten frames
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

const (
	tcpRate = 20_000_000      // bit/s
	tcpTime = 2 * time.Second // of a load
)

// run returns the result of TCP, and the delays of the pings that arrived.
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
	rule := must(limit.Rule(far))
	r.limit(r.limited(l.direction), l.direction, rule)
	c := r.capture(r.receiver, "r0", int(tcpTime.Seconds()*(tcpRate/8/500)))
	p := r.transfer(from, at, to, tcpTime)
	pinged := l.host(2)
	ping := &stream{to: netip.AddrPortFrom(pinged, sinkPort), bytes: 98, every: 10 * time.Millisecond}
	r.send(r.sender, tcpTime, ping)
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
		t.Errorf("%v: the goodput is %.1f %% of the rate", l, share*100)
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
		t.Errorf("%v: a ping took %v, want at most %v", l, slices.Max(waits), longest)
	}
	return f, waits
}

// Delayed packets need no retransmission, and a ping is delayed by no more than the queue.
// With ECN nothing is dropped, and the longest delay of a ping is less than the median
// without ECN.
func TestTCP(t *testing.T) {
	dropped, _ := load{direction: policy.Egress, family: v4, offload: true, excess: policy.Drop}.run(t)
	compare(t, dropped, policy.Egress, []load{
		{family: v4, offload: true}, {family: v4, offload: true, ecn: true}, {family: v6}, {family: v6, local: true},
	})
}

// With sparse-first, TCP does not delay a ping, and keeps its rate and order. No load here
// has drops: the queue would drop a GSO packet of 40 segments as a whole, its sender would
// retransmit within microseconds, while the queue is still full, and then run into a
// timeout with any order.
func TestTCPSparseFirst(t *testing.T) {
	for _, l := range []load{{family: v4, offload: true, sparse: true, ecn: true}, {family: v6, local: true, sparse: true}} {
		l.direction, l.excess = policy.Egress, policy.Delay
		f, _ := l.run(t)
		if f.info.Total_retrans > 0 || f.info.Reord_seen > 0 {
			t.Errorf("%v: %d segments were retransmitted, and packets were seen out of order %d times", l, f.info.Total_retrans, f.info.Reord_seen)
		}
	}
}

// The same on ingress.
func TestTCPIngress(t *testing.T) {
	compare(t, transfer{}, policy.Ingress, []load{{family: v6, local: true}, {family: v4, offload: true, ecn: true}})
}

// compare runs loads of a direction, and compares them with each other and with a load that had drops.
func compare(t *testing.T, dropped transfer, d policy.Direction, loads []load) {
	t.Helper()
	medians := map[load]time.Duration{}
	for _, l := range loads {
		l.direction, l.excess = d, policy.Delay
		f, waits := l.run(t)
		again, most := f.info.Total_retrans, uint32(0)
		switch {
		case l.ecn || l.local && d == policy.Egress:
		case l.offload: // a drop affects up to 64 KiB
			most = dropped.info.Total_retrans / 2
		default:
			most = f.info.Data_segs_out / 100
		}
		if again > most {
			t.Errorf("%v: of %d segments %d were retransmitted, and with drops %d", l, f.info.Data_segs_out, again, dropped.info.Total_retrans)
		}
		longest := slices.Max(waits)
		if !l.ecn {
			medians[l] = quantile(waits, 0.5)
			continue
		}
		l.ecn = false
		if median, ok := medians[l]; ok && longest > median {
			t.Errorf("%v: a ping took up to %v with marks, but the median without is %v", l, longest, median)
		}
	}
}
