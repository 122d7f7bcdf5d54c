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

// An echo is how long it took from a packet's start until its answer was there, by when it started.
type echo struct {
	at   time.Time
	took time.Duration // 0 where no answer came
}

const (
	pingPayload = 8
	pingFrame   = 14 + 20 + 8 + pingPayload // bytes

	// patience is how long an answer is waited for.
	patience = time.Second
)

// ping sends echo requests to the far end, at random times that are so far apart in the mean, until ctx is done.
func (p *path) ping(ctx context.Context, from netns.NsHandle, every time.Duration) (echoes []echo, err error) {
	fd, err := p.socket(from, unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(unix.Connect(fd, &unix.SockaddrInet4{Addr: target.As4()}), tellTimes(fd)); err != nil {
		return nil, fmt.Errorf("set up a socket to ping from: %w", err)
	}
	answers := make(chan map[uint16]time.Time)
	go func() { answers <- pongs(ctx, fd) }()
	random := newRandom()
	request := make([]byte, 8+pingPayload)
	request[0] = 8
	for i := uint16(0); err == nil && sleep(ctx, aboutEvery(random, every)) == nil; i++ {
		binary.BigEndian.PutUint16(request[6:], i)
		sum := 8<<8 + uint32(i) // all other words are zero
		binary.BigEndian.PutUint16(request[2:], ^uint16(sum+sum>>16))
		echoes = append(echoes, echo{at: time.Now()})
		// The limiter may say that it has dropped it.
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

// pongs are when answers came, by their number, until none has come for as
// long as one is waited for and ctx is done.
func pongs(ctx context.Context, fd int) map[uint16]time.Time {
	times := map[uint16]time.Time{}
	packet := make([]byte, 256)
	for {
		n, at, err := receive(fd, packet)
		switch {
		case err != nil && !errors.Is(err, unix.EINTR) && ctx.Err() != nil:
			return times
		case err == nil && n >= 20+8+pingPayload && packet[20] == 0: // an answer, behind its IP header
			times[binary.BigEndian.Uint16(packet[26:])] = at
		}
	}
}

// tellTimes has a socket tell when its packets came, and stop waiting for one after patience.
func tellTimes(fd int) error {
	atMost := unix.NsecToTimeval(int64(patience))
	return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &atMost))
}

// receive takes a packet from a socket, with the time at which the kernel got it.
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
