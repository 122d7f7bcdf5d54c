package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/policy"
)

// Three senders in one rate: TCP with Cubic, TCP with BBR, and UDP that sends twice the rate. Each has an address.

const (
	noDelay = "Cubic, BBR and UDP, without delay"
	delayed = "Cubic, BBR and UDP, 20 ms round trip"
)

// sendersAddrs are the destinations of the three senders, the last one of UDP.
var sendersAddrs = []netip.Addr{addressOf(0), addressOf(1), addressOf(2)}

// sendersUnits are the units of their parts.
var sendersUnits = []string{unitCubic, unitBBR, unitUDP}

// addressOf is the destination of the packets of a subscriber or sender.
func addressOf(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, 2, byte(i)}) }

var sharedRates = []policy.Rate{20e6, 100e6, 500e6}

// sharingSubjects are the subjects that a machine has whose kernel has HTB only.
func sharingSubjects() []competitor {
	return []competitor{
		mode("share flow", policy.Limit{Share: policy.Share{Kind: policy.ShareFlow}}), mode("no share", policy.Limit{}), htbOfThree,
	}
}

// htbOfThree has a class for each sender, with a queue as long as shapectl's burst for its part.
var htbOfThree = competitor{
	name: "HTB, a class each", note: "each class has a third of the rate, and borrows",
	set: func(ctx context.Context, a *arena, l limit) error {
		t := tree{rate: l.rate}
		for range sendersAddrs {
			t.members = append(t.members, &tree{rate: l.rate, guarantee: policy.Guarantee(l.rate) / policy.Guarantee(len(sendersAddrs))})
		}
		return a.tc(ctx, t.htb())
	},
}

// sharing sends the three senders through each limiter at each rate.
func sharing(ctx context.Context, o options, table string, roundTrip time.Duration, subjects []competitor) error {
	settle, part, rates := 4*time.Second, 3*time.Second, sharedRates
	if o.quick {
		settle, part, rates = time.Second/2, time.Second/5, rates[:1]
	}
	for _, rate := range rates {
		for _, s := range subjects {
			if !o.chosen(s.name) {
				continue
			}
			windows, err := share(ctx, s, rate, roundTrip, settle, part, o.rounds(5))
			name := fmt.Sprintf("%s: %v", table, rate)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", name, s.name, err)
			}
			for _, w := range windows {
				total, worst := w.total(), 0.0
				for _, bytes := range w.bytes {
					worst = max(worst, math.Abs(float64(bytes)/total*float64(len(w.bytes))-1))
				}
				o.add(name, s.name, unitOffThird, s.note, 100*worst)
				for i, bytes := range w.bytes {
					o.add(name, s.name, sendersUnits[i], s.note, 100*float64(bytes)/total)
				}
				o.add(name, s.name, unitTotal, s.note, w.part(rate))
			}
		}
	}
	return nil
}

// share returns the bytes of each of the three senders that pass a limiter, in several windows.
func share(ctx context.Context, s competitor, rate policy.Rate, roundTrip, settle, part time.Duration, rounds int) (windows []window, err error) {
	p, err := newPath(ctx, roundTrip)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	if err := p.welcome(ctx); err != nil {
		return nil, err
	}
	arrived, err := p.count(len(sendersAddrs), next)
	if err != nil {
		return nil, err
	}
	last := len(sendersAddrs) - 1
	udp, err := p.newSender(p.source, floodPayload, sendersAddrs[last])
	if err != nil {
		return nil, err
	}
	if err := s.set(ctx, p.arena, limit{rate, policy.DefaultCapacity(rate)}); err != nil {
		return nil, err
	}
	tcp, err := p.open(p.source, sendersAddrs[:last]...)
	if err != nil {
		return nil, err
	}
	defer tcp.close()
	for i, control := range []string{"cubic", "bbr"} {
		if err := tcp[i].control(control); err != nil {
			return nil, err
		}
		tcp[i].fill()
	}
	end := flooding(ctx, udp, 2*rate)
	defer func() { err = errors.Join(err, end()) }()
	return arrived.windows(ctx, settle, part, rounds)
}

// control sets the congestion control of a connection.
func (s stream) control(name string) error {
	raw, err := s.out.SyscallConn()
	if err != nil {
		return err
	}
	other := raw.Control(func(fd uintptr) { err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, name) })
	if err := errors.Join(err, other); err != nil {
		return fmt.Errorf("use %s: %w", name, err)
	}
	return nil
}

// welcome makes the far end accept packets to all addresses of the rules, and UDP.
func (p *path) welcome(ctx context.Context) error {
	if err := ip(ctx, p.far, fmt.Sprintf("route add local %v dev %s\n", everything, farDevice)); err != nil {
		return fmt.Errorf("accept packets to %v: %w", everything, err)
	}
	fd, err := p.socket(p.far, unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	return unix.Bind(fd, &unix.SockaddrInet4{Port: farPort})
}

// A window is what arrived within a time for each address.
type window struct {
	seconds float64
	bytes   []uint64
}

func (w window) total() (bytes float64) {
	for _, b := range w.bytes {
		bytes += float64(b)
	}
	return bytes
}

// part is what arrived in all, in % of a rate.
func (w window) part(of policy.Rate) float64 { return 100 * w.total() * 8 / w.seconds / float64(of) }

// windows returns several windows, the first of which begins after a time.
func (c *counter) windows(ctx context.Context, settle, part time.Duration, n int) (windows []window, err error) {
	if err := sleep(ctx, settle); err != nil {
		return nil, err
	}
	since, before, err := c.bytes()
	for err == nil && len(windows) < n {
		var at time.Time
		var now []uint64
		if err = sleep(ctx, part); err == nil {
			at, now, err = c.bytes()
		}
		w := window{at.Sub(since).Seconds(), slices.Clone(now)}
		for i := range w.bytes {
			w.bytes[i] -= before[i]
		}
		windows, since, before = append(windows, w), at, now
	}
	return windows, err
}

// bytes are those that have arrived for each address.
func (c *counter) bytes() (at time.Time, bytes []uint64, err error) {
	for i := range c.counts.MaxEntries() {
		now, err := c.read(i)
		if err != nil {
			return at, nil, err
		}
		bytes = append(bytes, now.Bytes)
	}
	return time.Now(), bytes, nil
}
