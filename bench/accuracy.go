package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netns"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite accuracy offers each limiter more than its rate, and compares what
// arrives in windows of time with the rate, from one arrival to another. What
// arrives is counted as it would be on a wire: what TCP hands down in one piece
// is split by then, which is after limiters have seen it.

// accuracySubjects are compared here.
func accuracySubjects() []competitor {
	return []competitor{
		shapectl(policy.GCRA, policy.EachAll, loader.TCX), shapectl(policy.Leaky, policy.EachAll, loader.TCX),
		nftOneLimit, nftSet, hashlimit("iptables-legacy", ""), tbf, htb,
	}
}

// accuracyGuestSubjects are compared in a guest, as not every kernel has the peers among them.
func accuracyGuestSubjects() []competitor {
	return []competitor{shapectl(policy.GCRA, policy.EachAll, loader.TCX), police, cake}
}

var accuracyRates = []policy.Rate{1e6, 20e6, 500e6}

// slow is the fastest rate that emulated CPUs keep up with, and of which several at once are no load.
const slow = 20e6

// accuracy measures here, and what needs other kernels in a guest.
func accuracy(ctx context.Context, o options) (results []Result, err error) {
	windows := o.rounds(5)
	m := accuracyMeter{ctx: ctx, windows: windows, quick: o.quick, report: func(r Result) error {
		o.say("  %s, %s: %.6g %s", r.Case, r.Subject, r.Median, r.Unit)
		results = append(results, r)
		return nil
	}}
	if err := m.all(accuracySubjects(), o.only); err != nil {
		return nil, err
	}
	there, err := inGuest(ctx, o, guestTask{Suite: "accuracy", Only: o.only, Rounds: windows, Quick: o.quick}, "-c", "2")
	return append(results, there...), err
}

// guestAccuracy measures in the guest.
func guestAccuracy(ctx context.Context, t guestTask, report func(Result) error) error {
	return accuracyMeter{ctx: ctx, windows: t.Rounds, quick: t.Quick, guest: true, report: report}.all(accuracyGuestSubjects(), t.Only)
}

type accuracyMeter struct {
	ctx     context.Context
	windows int
	quick   bool
	guest   bool
	report  func(Result) error
}

// all measures limiters at all rates, with UDP and with TCP.
func (m accuracyMeter) all(subjects []competitor, only string) error {
	subjects = slices.DeleteFunc(subjects, func(s competitor) bool { return !chosen(only, s.name) })
	for _, rate := range accuracyRates {
		if m.quick && rate != accuracyRates[1] {
			continue
		}
		for _, s := range subjects {
			shares, err := m.udp(s, rate)
			if err := m.figures("UDP", s, rate, shares, err); err != nil {
				return err
			}
		}
		if m.guest && rate > slow {
			continue
		}
		if err := m.tcpAll(subjects, rate); err != nil {
			return err
		}
	}
	return nil
}

// tcpAll measures limiters with TCP, at the same time where that is little traffic.
func (m accuracyMeter) tcpAll(subjects []competitor, rate policy.Rate) error {
	shares, errs := make([][]float64, len(subjects)), make([]error, len(subjects))
	var running sync.WaitGroup
	for i, s := range subjects {
		running.Go(func() { shares[i], errs[i] = m.tcp(s, rate) })
		if rate > slow {
			running.Wait()
		}
	}
	running.Wait()
	for i, s := range subjects {
		if err := m.figures("TCP", s, rate, shares[i], errs[i]); err != nil {
			return err
		}
	}
	return nil
}

// figures reports what was delivered, and how far that is from the rate; nothing where it could not be measured.
func (m accuracyMeter) figures(protocol string, s competitor, rate policy.Rate, shares []float64, err error) error {
	if err != nil {
		return fmt.Errorf("%s at %v, %s: %w", s.name, rate, protocol, err)
	}
	if shares == nil {
		return nil
	}
	where := ""
	if m.guest {
		where = " in a virtual machine"
	}
	delivered := newResult(fmt.Sprintf("Delivered%s, %s: %v", where, protocol, rate), s.name, unitDelivered, shares)
	delivered.Note = s.note
	if err := m.report(delivered); err != nil || protocol != "UDP" {
		return err // what a TCP sender leaves unused is not the limiter's error
	}
	off := make([]float64, len(shares))
	for i, share := range shares {
		off[i] = math.Abs(share-1) * 1e6
	}
	figure := newResult(fmt.Sprintf("Rate error%s: %v", where, rate), s.name, unitMillionths, off)
	figure.Note = s.note
	return m.report(figure)
}

// oneSecond is a limit with a burst that nft and hashlimit can not go below.
func oneSecond(rate policy.Rate) limit { return limit{rate, uint64(rate) / 8} }

// udp offers as many datagrams as the system sends: well above the rate, or there is no figure.
func (m accuracyMeter) udp(s competitor, rate policy.Rate) ([]float64, error) {
	a, err := newArena(m.ctx)
	if err != nil {
		return nil, err
	}
	defer a.Close()
	arrived, err := a.count(countAndDrop)
	if err != nil {
		return nil, err
	}
	payload := 1400
	if rate == accuracyRates[0] {
		payload = 100
	}
	from, err := a.newSender(payload, target)
	if err != nil {
		return nil, err
	}
	if err := s.set(m.ctx, a, oneSecond(rate)); err != nil {
		return nil, err
	}
	var stop atomic.Bool
	var offered atomic.Uint64
	done := make(chan error)
	go func() {
		done <- aside(func() error {
			for !stop.Load() {
				const some = 100
				if _, err := from.send(some); err != nil {
					return err
				}
				offered.Add(some)
			}
			return nil
		})
	}()
	before, start := offered.Load(), time.Now()
	samples, err := m.shares(arrived, s, rate, 1500*time.Millisecond, 500*time.Millisecond)
	speed := float64(offered.Load()-before) * float64(payload+headers) * 8 / time.Since(start).Seconds()
	stop.Store(true)
	if err := errors.Join(err, <-done); err != nil {
		return nil, err
	}
	if speed < 1.3*float64(rate) {
		return nil, nil
	}
	return samples, nil
}

// headers of Ethernet, IPv4 and UDP.
const headers = 14 + 20 + 8

// tcp sends as fast as one connection goes, with the system's congestion control.
func (m accuracyMeter) tcp(s competitor, rate policy.Rate) ([]float64, error) {
	a, err := newArena(m.ctx)
	if err != nil {
		return nil, err
	}
	defer a.Close()
	arrived, err := a.count(countAndNext)
	if err != nil {
		return nil, err
	}
	if err := a.noOffload(); err != nil {
		return nil, err
	}
	if err := s.set(m.ctx, a, oneSecond(rate)); err != nil {
		return nil, err
	}
	from, to, err := a.connect(target)
	if err != nil {
		return nil, err
	}
	done := make(chan struct{}, 2)
	go func() {
		data := make([]byte, 64<<10)
		for {
			if _, err := from.Write(data); err != nil { // it is closed
				break
			}
		}
		done <- struct{}{}
	}()
	go func() {
		data := make([]byte, 256<<10)
		for {
			if _, err := to.Read(data); err != nil {
				break
			}
		}
		done <- struct{}{}
	}()
	samples, err := m.shares(arrived, s, rate, 3*time.Second, 1500*time.Millisecond)
	from.Close()
	to.Close()
	<-done
	<-done
	if err != nil {
		return nil, err
	}
	return samples, nil
}

// shares are what arrives in each of several windows, by what the rate allows, after the first burst is over.
// A window goes from one arrival to another, each chosen among those of a
// while: that by which most had arrived for its time. There the bucket is empty, and
// not half full because the sender had to wait for its CPU.
func (m accuracyMeter) shares(c *counter, s competitor, rate policy.Rate, settle, window time.Duration) (shares []float64, err error) {
	if m.quick {
		settle, window = settle/2, window/2
	}
	if err := sleep(m.ctx, settle); err != nil {
		return nil, err
	}
	var from arrivals
	for i := range m.windows + 1 {
		to, err := m.most(c, rate, window/5)
		if err != nil {
			return nil, err
		}
		switch {
		case i == 0:
		case to.Last == from.Last:
			shares = append(shares, 0)
		default:
			bytes := to.Bytes - from.Bytes - (to.Packets-from.Packets)*s.uncounted
			shares = append(shares, float64(bytes)*8*1e9/float64(to.Last-from.Last)/float64(rate))
		}
		from = to
		if err := sleep(m.ctx, window-window/5); err != nil {
			return nil, err
		}
	}
	return shares, nil
}

// most is, of the arrivals in so long a time, the one that is the furthest ahead of the rate.
func (m accuracyMeter) most(c *counter, rate policy.Rate, while time.Duration) (best arrivals, err error) {
	first, err := c.read()
	if err != nil {
		return best, err
	}
	best = first
	lead := 0.0 // bytes, before what the rate allows since the first one
	for start := time.Now(); time.Since(start) < while; {
		if err := sleep(m.ctx, time.Millisecond); err != nil {
			return best, err
		}
		now, err := c.read()
		if err != nil {
			return best, err
		}
		if l := float64(now.Bytes-first.Bytes) - float64(now.Last-first.Last)*float64(rate)/8e9; l >= lead {
			best, lead = now, l
		}
	}
	return best, nil
}

// noOffload has packets sent and received as they are on a wire.
func (a *arena) noOffload() error {
	for _, end := range []struct {
		namespace netns.NsHandle
		device    string
	}{{a.near, nearDevice}, {a.far, farDevice}} {
		if err := in(end.namespace, func() error {
			e, err := ethtool.NewEthtool()
			if err != nil {
				return err
			}
			defer e.Close()
			return e.Change(end.device, map[string]bool{
				"tx-tcp-segmentation": false, "tx-tcp6-segmentation": false, "tx-tcp-ecn-segmentation": false,
				"tx-tcp-mangleid-segmentation": false, "tx-generic-segmentation": false, "rx-gro": false,
			})
		}); err != nil {
			return fmt.Errorf("turn off the offloads of %s: %w", end.device, err)
		}
	}
	return nil
}

// connect makes a TCP connection from the near end to an address at the far one.
func (a *arena) connect(to netip.Addr) (from, accepted net.Conn, err error) {
	var listener net.Listener
	if err := in(a.far, func() (err error) {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(to, farPort).String())
		return err
	}); err != nil {
		return nil, nil, fmt.Errorf("listen: %w", err)
	}
	defer listener.Close()
	if err := a.inNear(func() (err error) {
		from, err = net.DialTimeout("tcp", listener.Addr().String(), 5*time.Second)
		return err
	}); err != nil {
		return nil, nil, fmt.Errorf("connect: %w", err)
	}
	if accepted, err = listener.Accept(); err != nil {
		from.Close()
		return nil, nil, fmt.Errorf("accept a connection: %w", err)
	}
	return from, accepted, nil
}
