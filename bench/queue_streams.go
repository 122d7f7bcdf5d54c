package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// A stream is a TCP connection to the far end of an arena.
type stream struct{ out, in *net.TCPConn }

type streams []stream

const (
	// openTime is the longest time to connect, with retransmissions.
	openTime = 30 * time.Second
	// answerTime is the longest time until the answer to a request, with several retransmissions.
	answerTime = 30 * time.Second
)

// open opens a connection from a namespace to each of several addresses of the far end.
func (a *arena) open(from netns.NsHandle, to ...netip.Addr) (list streams, err error) {
	var listener *net.TCPListener
	if err := in(a.far, func() (err error) {
		listener, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.IPv4Unspecified(), 0)))
		return err
	}); err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	defer listener.Close()
	if err := listener.SetDeadline(time.Now().Add(openTime)); err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	defer func() {
		if err != nil {
			list.close()
		}
	}()
	port := listener.Addr().(*net.TCPAddr).AddrPort().Port()
	for _, addr := range to {
		var out net.Conn
		if err := in(from, func() (err error) {
			out, err = net.DialTimeout("tcp", netip.AddrPortFrom(addr, port).String(), openTime)
			return err
		}); err != nil {
			return list, fmt.Errorf("connect: %w", err)
		}
		accepted, err := listener.AcceptTCP()
		if err != nil {
			out.Close()
			return list, fmt.Errorf("accept a connection: %w", err)
		}
		list = append(list, stream{out.(*net.TCPConn), accepted})
	}
	return list, nil
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
	go repeat(s.out.Write, 64<<10)
	go repeat(s.in.Read, 256<<10)
}

// repeat calls do with a buffer of so many bytes until it fails.
func repeat(do func([]byte) (int, error), bytes int) {
	data := make([]byte, bytes)
	for err := error(nil); err == nil; {
		_, err = do(data)
	}
}

// progress are counters of connections.
type progress struct {
	bytes         uint64 // received payload
	sent, arrived uint64 // segments with payload
	retransmitted uint64 // segments
}

// A mark is the progress of connections at a time.
type mark struct {
	at time.Time
	progress
}

// watch returns marks at the beginning, and at the end of each of several parts of a time.
func (list streams) watch(ctx context.Context, parts int, part time.Duration) (marks []mark, err error) {
	for i := range parts + 1 {
		if i > 0 {
			if err := sleep(ctx, part); err != nil {
				return nil, err
			}
		}
		m := mark{at: time.Now()}
		for _, s := range list {
			out, err := tcpInfo(s.out)
			in, other := tcpInfo(s.in)
			if err := errors.Join(err, other); err != nil {
				return nil, fmt.Errorf("ask for the state of a connection: %w", err)
			}
			m.bytes += in.Bytes_received
			m.sent += uint64(out.Data_segs_out)
			m.arrived += uint64(in.Data_segs_in)
			m.retransmitted += uint64(out.Total_retrans)
		}
		marks = append(marks, m)
	}
	return marks, nil
}

func tcpInfo(c *net.TCPConn) (info *unix.TCPInfo, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return &unix.TCPInfo{}, err
	}
	other := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	return info, errors.Join(err, other)
}

// questionBytes is the payload of a request and of its answer.
const questionBytes = 64

// ask sends requests to the far end at random times and waits for their answers, until ctx is done.
func (s stream) ask(ctx context.Context, every time.Duration) (echoes []echo, err error) {
	go io.Copy(s.in, s.in) // until the connection is closed
	random := newRandom()
	answer := make([]byte, questionBytes)
	for sleep(ctx, aboutEvery(random, every)) == nil {
		start := time.Now()
		err := s.out.SetDeadline(start.Add(answerTime))
		if err == nil {
			_, err = s.out.Write(answer)
		}
		if err == nil {
			_, err = io.ReadFull(s.out, answer)
		}
		if err != nil {
			return nil, fmt.Errorf("ask over TCP: %w", err)
		}
		echoes = append(echoes, echo{start, time.Since(start)})
	}
	return echoes, nil
}

// aboutEvery returns a random time from 0.5 to 1.5 of the mean. Even times could be in phase with a limiter.
func aboutEvery(random *rand.Rand, every time.Duration) time.Duration {
	return time.Duration(float64(every) * (0.5 + random.Float64()))
}
