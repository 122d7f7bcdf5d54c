package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/policy"
)

// floodPayload makes a frame of maximum length.
const floodPayload = maxFrame - headers

// gaps returns the times between packets behind a limiter at an offered load of twice the
// rate, relative to the time of a packet at the rate.
func gaps(ctx context.Context, s competitor, at pace) (ratios []float64, err error) {
	p, err := newPath(ctx, time.Millisecond)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	arrivals, err := p.listen()
	if err != nil {
		return nil, err
	}
	from, err := p.newSender(p.source, floodPayload, target)
	if err != nil {
		return nil, err
	}
	l := limit{at.rate, policy.DefaultCapacity(at.rate)}
	if err := s.set(ctx, p.arena, l); err != nil {
		return nil, err
	}
	ideal := time.Duration(maxFrame * 8 * uint64(time.Second) / uint64(at.rate))
	end := flooding(ctx, from, 2*at.rate)
	defer func() { err = errors.Join(err, end()) }()
	// Twice the rate fills a bucket in the time that it takes to drain.
	full := time.Now().Add(2 * time.Duration(l.capacity*8*uint64(time.Second)/uint64(l.rate)))
	packet := make([]byte, maxFrame)
	var last time.Time
	for len(ratios) < at.gaps {
		_, now, err := receive(arrivals, packet)
		if err := errors.Join(err, ctx.Err()); err != nil {
			return nil, fmt.Errorf("wait for a packet: %w", err)
		}
		if now.Before(full) {
			continue
		}
		if !last.IsZero() {
			ratios = append(ratios, float64(now.Sub(last))/float64(ideal))
		}
		last = now
	}
	return ratios, nil
}

// listen opens a socket at the far end that timestamps its packets.
func (p *path) listen() (fd int, err error) {
	if fd, err = p.socket(p.far, unix.AF_INET, unix.SOCK_DGRAM, 0); err != nil {
		return -1, err
	}
	if err := errors.Join(
		unix.Bind(fd, &unix.SockaddrInet4{Addr: target.As4(), Port: farPort}),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
		tellTimes(fd),
	); err != nil {
		return -1, fmt.Errorf("set up a socket: %w", err)
	}
	return fd, nil
}

// flooding sends packets of maximum length at a rate, until the function that it returns is called.
func flooding(ctx context.Context, from *sender, rate policy.Rate) (end func() error) {
	ctx, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		done <- aside(func() error {
			return from.flood(ctx, time.Duration(maxFrame*8*uint64(time.Second)/uint64(rate)))
		})
	}()
	return func() error {
		stop()
		return <-done
	}
}

// flood sends packets until ctx is done, with random gaps from 0 to twice the mean. Behind a
// limiter that drops every second one, evenly sent packets would be even.
func (s *sender) flood(ctx context.Context, every time.Duration) error {
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("wake up in time: %w", err)
	}
	random := newRandom()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("read the clock: %w", err)
	}
	for next := now.Nano(); ctx.Err() == nil; {
		next += int64(2 * random.Float64() * float64(every))
		until := unix.NsecToTimespec(next)
		err := unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &until, nil)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for the next packet's time: %w", err)
		}
		if _, err := s.send(1); err != nil {
			return err
		}
	}
	return nil
}
