package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite queue sends TCP through each limiter, with a ping beside it, and UDP at twice
// the rate. It runs in a guest whose clock counts instructions: only the limiter delays a
// packet there, whatever the host does.

// roundTrip is typical of a path within a country.
const roundTrip = 20 * time.Millisecond

// A pace is the duration of a measurement at a rate. It has enough packets for quartiles.
type pace struct {
	rate         policy.Rate
	settle, part time.Duration
	gaps         int // between packets
}

// An offer is TCP traffic through a limiter.
type offer struct {
	pace
	table     string
	roundTrip time.Duration // without the limiter
	local     bool          // sent by the limiter's host, rather than forwarded
	flows     int           // bulk connections
}

// queueSubjects are the subjects of the suite queue. Where the length of their queue or bucket is
// configurable, it is the default of shapectl.
func queueSubjects() []limiter {
	gcra, leaky := policy.Limit{Excess: policy.Delay}, policy.Limit{Algorithm: policy.Leaky, Excess: policy.Delay}
	sparse := gcra
	sparse.Order = policy.SparseFirst
	return []limiter{
		queueTBF, htbCoDel, withECN(htbCoDel), isolatingCAKE, withECN(isolatingCAKE), police,
		shaping("drop", policy.Limit{}),
		shaping("delay", leaky), withECN(shaping("delay", leaky)),
		shaping("delay", gcra), shaping("delay, sparse first", sparse),
	}
}

// queue measures in the guest.
func queue() {
	subjects := queueSubjects()
	paces := []pace{
		{1e6, 4 * time.Second, 5 * time.Second, 1000},
		{10e6, 3 * time.Second, 1500 * time.Millisecond, 2000},
		{100e6, 3 * time.Second, 1500 * time.Millisecond, 2000},
	}
	common := paces[1]
	if *quick {
		common = pace{paces[0].rate, time.Second / 2, time.Second / 4, 20}
		paces = []pace{common}
	}
	var offers []offer
	for _, p := range paces {
		offers = append(offers, offer{pace: p, table: "One TCP flow", roundTrip: roundTrip, flows: 1})
	}
	offers = append(offers,
		offer{pace: common, table: "One TCP flow from the limiter's host", roundTrip: roundTrip, flows: 1, local: true},
		offer{pace: common, table: "Four TCP flows and a sparse one", roundTrip: roundTrip, flows: 4})
	for _, o := range offers {
		for _, s := range subjects {
			// Peers with ECN are measured at the common rate only.
			if !s.ecn || ours(s.name) || !o.local && o.rate == common.rate {
				o.add(fmt.Sprintf("%s: %v", o.table, o.rate), s)
			}
		}
	}
	for _, p := range paces {
		for _, s := range subjects {
			if s.ecn {
				continue // UDP here is not marked
			}
			ratios := gaps(s, p)
			name := fmt.Sprintf("Spacing of packets: %v", p.rate)
			add(name, s.name, "gap p1", s.note, quantile(ratios, 0.01))
			add(name, s.name, "gap p50", s.note, quantile(ratios, 0.5))
			add(name, s.name, "gap p99", s.note, quantile(ratios, 0.99))
		}
	}
}

// add sends an offer through a limiter, with pings beside it, and records the result for each part of the time.
func (o offer) add(name string, s limiter) {
	a := newPath(o.roundTrip)
	defer a.Close()
	from, via := a.source, "198.51.100.2"
	if o.local {
		from, via = a.near, "192.0.2.2"
	}
	if s.ecn {
		in(from, func() { sysctl("ipv4/tcp_ecn", "1") })
	}
	s.set(a, limit{o.rate, policy.DefaultCapacity(o.rate)})
	// A larger initial window than the default of 10 segments shortens slow start.
	window := int(o.roundTrip/frameTime(o.rate)) / o.flows
	ip(from, fmt.Sprintf("route replace default via %s initcwnd %d\n", via, max(10, window)))
	flows := a.open(from, slices.Repeat([]netip.Addr{target}, o.flows)...)
	defer flows.close()
	for _, s := range flows {
		s.fill()
	}
	sleep(o.settle)
	// Pings use at most 1 % of the rate.
	every := max(5*time.Millisecond, 100*frameTime(o.rate)*pingFrame/maxFrame)
	for range rounds(4) {
		start, before := time.Now(), flows.progress()
		pings, lost := ping(from, every, int(o.part/every))
		took, after := time.Since(start).Seconds(), flows.progress()
		bytes := float64(after.bytes - before.bytes)
		add(name, s.name, "goodput, %", s.note, 100*bytes*8/took/(float64(o.rate)*fullPayload/maxFrame))
		add(name, s.name, "retransmitted per MB", s.note, float64(after.retransmitted-before.retransmitted)/max(bytes/1e6, 1e-6))
		if len(pings) > 0 {
			add(name, s.name, "ping p50, ms", s.note, quantile(pings, 0.5))
			add(name, s.name, "ping p99, ms", s.note, quantile(pings, 0.99))
		}
		add(name, s.name, "pings lost, %", s.note, lost)
	}
}

// gaps returns the times between packets behind a limiter at an offered load of twice the
// rate, relative to the time of a packet at the rate, sorted.
func gaps(s limiter, at pace) (ratios []float64) {
	a := newPath(time.Millisecond)
	defer a.Close()
	l := limit{at.rate, policy.DefaultCapacity(at.rate)}
	// Twice the rate fills a bucket in the time that it takes to drain. In twice that time, three times as much passes.
	first := int(3*l.capacity/maxFrame) + 1
	p, maps := a.reference("arrivals", first+at.gaps+1, nil)
	a.attach(a.far, p)
	s.set(a, l)
	arrival := func(i int) (at uint64) {
		check(maps["times"].Lookup(uint32(i), &at))
		return at
	}
	a.newSender(a.source, floodPayload, target).flooding(2*at.rate, func() {
		for arrival(first+at.gaps) == 0 {
			sleep(100 * time.Millisecond)
		}
	})
	for i := range at.gaps {
		ratios = append(ratios, float64(arrival(first+i+1)-arrival(first+i))/float64(frameTime(at.rate)))
	}
	slices.Sort(ratios)
	return ratios
}

const pingFrame = 14 + 20 + 8 + 16 // bytes

var pingTime = regexp.MustCompile(` time=([0-9.]+) ms`)

// ping sends so many echo requests to the far end, and returns the times until the answers in ms, sorted, and how many of
// them are lost in %.
func ping(from netns.NsHandle, every time.Duration, requests int) (times []float64, lost float64) {
	var output bytes.Buffer
	in(from, func() {
		c := exec.CommandContext(ctx, "ping", "-i", fmt.Sprint(every.Seconds()), "-c", strconv.Itoa(requests), "-s", "16", "-W", "1", target.String())
		c.Stdout = &output
		if err := c.Run(); !errors.As(err, new(*exec.ExitError)) { // it fails if all are lost
			check(err)
		}
	})
	for _, found := range pingTime.FindAllStringSubmatch(output.String(), -1) {
		times = append(times, must(strconv.ParseFloat(found[1], 64)))
	}
	slices.Sort(times)
	return times, 100 - 100*float64(len(times))/float64(requests)
}

// A stream is a TCP connection to the far end of an arena.
type stream struct{ out, in *net.TCPConn }

type streams []stream

// patience is the longest time to connect or to get an answer, with several retransmissions.
const patience = 30 * time.Second

// open opens a connection from a namespace to each of several addresses of the far end.
func (a *arena) open(from netns.NsHandle, to ...netip.Addr) (list streams) {
	var listener *net.TCPListener
	in(a.far, func() { listener = must(net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4zero})) })
	defer listener.Close()
	check(listener.SetDeadline(time.Now().Add(patience)))
	port := listener.Addr().(*net.TCPAddr).AddrPort().Port()
	for _, addr := range to {
		in(from, func() {
			out := must(net.DialTimeout("tcp", netip.AddrPortFrom(addr, port).String(), patience))
			list = append(list, stream{out.(*net.TCPConn), must(listener.AcceptTCP())})
		})
	}
	return list
}

// close resets connections. One with unsent data would keep its namespace alive and go on sending.
func (list streams) close() {
	for _, s := range list {
		s.out.SetLinger(0)
		s.out.Close()
		s.in.Close()
	}
}

// fill sends as fast as possible, until the connection is closed.
func (s stream) fill() {
	repeat := func(do func([]byte) (int, error), bytes int) {
		data := make([]byte, bytes)
		for err := error(nil); err == nil; {
			_, err = do(data)
		}
	}
	go repeat(s.out.Write, 64<<10)
	go repeat(s.in.Read, 256<<10)
}

// onSocket calls f with the descriptor of a connection.
func onSocket(c *net.TCPConn, f func(fd int) error) {
	var err error
	check(must(c.SyscallConn()).Control(func(fd uintptr) { err = f(int(fd)) }))
	check(err)
}

// control sets the congestion control of a connection.
func (s stream) control(name string) {
	onSocket(s.out, func(fd int) error { return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name) })
}

// progress are counters of connections.
type progress struct {
	bytes         uint64 // received payload
	retransmitted uint64 // segments
}

func (list streams) progress() (p progress) {
	info := func(c *net.TCPConn) (info *unix.TCPInfo) {
		onSocket(c, func(fd int) (err error) {
			info, err = unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			return err
		})
		return info
	}
	for _, s := range list {
		p.bytes += info(s.in).Bytes_received
		p.retransmitted += uint64(info(s.out).Total_retrans)
	}
	return p
}
