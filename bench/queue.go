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

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite queue sends TCP through each limiter, with a ping beside it. It runs in a guest whose clock counts
// instructions: only the limiter delays a packet there, whatever the host does.

// roundTrip is typical of a path within a country.
const roundTrip = 20 * time.Millisecond

// A pace is the duration of a measurement at a rate.
type pace struct {
	rate         policy.Rate
	settle, part time.Duration
}

// An offer is TCP traffic through a limiter.
type offer struct {
	pace
	table string
	flows int // bulk connections
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
		{1e6, 4 * time.Second, 5 * time.Second},
		{10e6, 3 * time.Second, 1500 * time.Millisecond},
		{100e6, 3 * time.Second, 1500 * time.Millisecond},
	}
	common := paces[1]
	if *quick {
		common = pace{paces[0].rate, time.Second / 2, time.Second / 4}
		paces = []pace{common}
	}
	var offers []offer
	for _, p := range paces {
		offers = append(offers, offer{pace: p, table: "One TCP flow", flows: 1})
	}
	offers = append(offers, offer{pace: common, table: "Four TCP flows and a sparse one", flows: 4})
	for _, o := range offers {
		for _, s := range subjects {
			// Peers with ECN are measured at the common rate only.
			if !s.ecn || ours(s.name) || o.rate == common.rate {
				o.add(fmt.Sprintf("%s: %v", o.table, o.rate), s)
			}
		}
	}
}

// add sends an offer through a limiter, with pings beside it, and records the result for each part of the time.
func (o offer) add(name string, s limiter) {
	a := newPath()
	defer a.Close()
	if s.ecn {
		in(a.source, func() { sysctl("ipv4/tcp_ecn", "1") })
	}
	s.set(a, limit{o.rate, policy.DefaultCapacity(o.rate)})
	// A larger initial window than the default of 10 segments shortens slow start.
	window := int(roundTrip/frameTime(o.rate)) / o.flows
	ip(a.source, fmt.Sprintf("route replace default via 198.51.100.2 initcwnd %d\n", max(10, window)))
	flows := a.open(slices.Repeat([]netip.Addr{target}, o.flows)...)
	defer flows.close()
	for _, s := range flows {
		s.fill()
	}
	sleep(o.settle)
	// Pings use at most 1 % of the rate.
	every := max(5*time.Millisecond, 100*frameTime(o.rate)*pingFrame/maxFrame)
	for range rounds(4) {
		start, before := time.Now(), flows.received()
		pings := a.ping(every, int(o.part/every))
		took := time.Since(start).Seconds()
		add(name, s.name, "goodput, %", s.note, 100*float64(flows.received()-before)*8/took/(float64(o.rate)*fullPayload/maxFrame))
		if len(pings) > 0 {
			add(name, s.name, "ping p99, ms", s.note, quantile(pings, 0.99))
		}
	}
}

const pingFrame = 14 + 20 + 8 + 16 // bytes

var pingTime = regexp.MustCompile(` time=([0-9.]+) ms`)

// ping sends so many echo requests from the source to the far end, and returns the times until the answers in ms, sorted.
func (a *arena) ping(every time.Duration, requests int) (times []float64) {
	var output bytes.Buffer
	in(a.source, func() {
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
	return times
}

// A stream is a TCP connection to the far end of an arena.
type stream struct{ out, in *net.TCPConn }

type streams []stream

// patience is the longest time to connect or to get an answer, with several retransmissions.
const patience = 30 * time.Second

// open opens a connection from the source to each of several addresses of the far end.
func (a *arena) open(to ...netip.Addr) (list streams) {
	var listener *net.TCPListener
	in(a.far, func() { listener = must(net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4zero})) })
	defer listener.Close()
	check(listener.SetDeadline(time.Now().Add(patience)))
	port := listener.Addr().(*net.TCPAddr).AddrPort().Port()
	for _, addr := range to {
		in(a.source, func() {
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

// received is the payload that connections have received, in bytes.
func (list streams) received() (bytes uint64) {
	for _, s := range list {
		onSocket(s.in, func(fd int) error {
			info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			if err == nil {
				bytes += info.Bytes_received
			}
			return err
		})
	}
	return bytes
}
