package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// An echo is a request, and the time until its answer.
type echo struct {
	at   time.Time
	took time.Duration // 0 without an answer
}

const (
	pingPayload = 8
	pingFrame   = 14 + 20 + 8 + pingPayload // bytes

	// patience is the longest time until an answer.
	patience = time.Second
)

// ping sends echo requests to the far end, at random times with a mean distance, until ctx is done.
func (p *path) ping(ctx context.Context, from netns.NsHandle, every time.Duration) (echoes []echo, err error) {
	fd, err := p.socket(from, unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(unix.Connect(fd, &unix.SockaddrInet4{Addr: target.As4()}), tellTimes(fd)); err != nil {
		return nil, fmt.Errorf("set up a socket to ping from: %w", err)
	}
	answers := make(chan map[uint16]time.Time)
	go func() { answers <- replies(ctx, fd) }()
	random := newRandom()
	request := make([]byte, 8+pingPayload)
	request[0] = 8
	for i := uint16(0); err == nil && sleep(ctx, aboutEvery(random, every)) == nil; i++ {
		binary.BigEndian.PutUint16(request[6:], i)
		sum := 8<<8 + uint32(i) // all other words are zero
		binary.BigEndian.PutUint16(request[2:], ^uint16(sum+sum>>16))
		echoes = append(echoes, echo{at: time.Now()})
		// The kernel reports drops by the limiter.
		if _, err = unix.Write(fd, request); errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EPERM) {
			err = nil
		}
	}
	for i, at := range <-answers {
		echoes[i].took = at.Sub(echoes[i].at)
	}
	if err != nil {
		return nil, fmt.Errorf("send an echo request: %w", err)
	}
	return echoes, nil
}

// replies returns the times of answers by their number. It ends when ctx is done and no answer
// has come for the time patience.
func replies(ctx context.Context, fd int) map[uint16]time.Time {
	times := map[uint16]time.Time{}
	packet := make([]byte, 256)
	for {
		n, at, err := receive(fd, packet)
		switch {
		case err != nil && !errors.Is(err, unix.EINTR) && ctx.Err() != nil:
			return times
		case err == nil && n >= 20+8+pingPayload && packet[20] == 0: // an echo reply, after its IP header
			times[binary.BigEndian.Uint16(packet[26:])] = at
		}
	}
}

// tellTimes turns receive timestamps of a socket on, and sets its timeout to patience.
func tellTimes(fd int) error {
	atMost := unix.NsecToTimeval(int64(patience))
	return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &atMost))
}

// receive reads a packet from a socket, with its receive timestamp.
func receive(fd int, packet []byte) (n int, at time.Time, err error) {
	var control [64]byte
	n, m, _, _, err := unix.Recvmsg(fd, packet, control[:], 0)
	if err != nil {
		return 0, at, err
	}
	header, data, _, err := unix.ParseOneSocketControlMessage(control[:m])
	if err != nil {
		return 0, at, fmt.Errorf("read the time of a packet: %w", err)
	}
	if header.Type != unix.SO_TIMESTAMPNS || len(data) < 16 {
		return 0, at, fmt.Errorf("a packet has a message of type %d instead of its time", header.Type)
	}
	return n, time.Unix(int64(binary.NativeEndian.Uint64(data)), int64(binary.NativeEndian.Uint64(data[8:]))), nil
}
