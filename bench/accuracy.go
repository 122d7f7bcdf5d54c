package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netns"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite accuracy offers each limiter more than its rate, and compares what
// arrives in windows of time with the rate, from one arrival to another. Nothing
// merges or splits packets on the way, so that all count the same ones.

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

const (
	inGuestNote = "in a virtual machine"
	// guestTCP is the fastest rate for TCP there, as emulated CPUs do not keep up.
	guestTCP = 20e6
)

// accuracy measures here, and what needs other kernels in a guest.
func accuracy(ctx context.Context, o options) ([]Result, error) {
	windows := o.rounds(5)
	m := accuracyMeter{ctx: ctx, windows: windows, quick: o.quick}
	var results []Result
	for _, s := range accuracySubjects() {
		if !chosen(o.only, s.name) {
			continue
		}
		figures, err := m.subject(s)
		if err != nil {
			return nil, err
		}
		for _, r := range figures {
			o.say("  %s, %s: %.6g %s", r.Case, r.Subject, r.Median, r.Unit)
		}
		results = append(results, figures...)
	}
	there, err := inGuest(ctx, o, guestTask{Suite: "accuracy", Only: o.only, Rounds: windows, Quick: o.quick}, "-c", "2")
	return append(results, there...), err
}

// guestAccuracy measures in the guest.
func guestAccuracy(ctx context.Context, t guestTask, report func(Result) error) error {
	m := accuracyMeter{ctx: ctx, windows: t.Rounds, quick: t.Quick, guest: true}
	for _, s := range accuracyGuestSubjects() {
		if !chosen(t.Only, s.name) {
			continue
		}
		s.name += ", " + inGuestNote
		figures, err := m.subject(s)
		if err != nil {
			return err
		}
		for _, r := range figures {
			if err := report(r); err != nil {
				return err
			}
		}
	}
	return nil
}

type accuracyMeter struct {
	ctx     context.Context
	windows int
	quick   bool
	guest   bool
}

// subject measures a limiter at all rates, with UDP and with TCP.
func (m accuracyMeter) subject(s competitor) (results []Result, err error) {
	for _, rate := range accuracyRates {
		if m.quick && rate != accuracyRates[1] {
			continue
		}
		udp, err := m.udp(s, rate)
		if err != nil {
			return nil, fmt.Errorf("%s at %v, UDP: %w", s.name, rate, err)
		}
		results = append(results, udp...)
		if m.guest && rate > guestTCP {
			continue
		}
		tcp, err := m.tcp(s, rate)
		if err != nil {
			return nil, fmt.Errorf("%s at %v, TCP: %w", s.name, rate, err)
		}
		results = append(results, tcp...)
	}
	return results, nil
}

// udp offers as many datagrams as the system sends: at least a tenth more than the rate, or there is no figure.
func (m accuracyMeter) udp(s competitor, rate policy.Rate) ([]Result, error) {
	a, err := newArena(m.ctx)
	if err != nil {
		return nil, err
	}
	defer a.close()
	arrived, err := a.count(countAndDrop)
	if err != nil {
		return nil, err
	}
	payload := 1400
	if rate < 100e6 { // the finer the packets, the finer the figure
		payload = 100
	}
	from, err := a.newSender(payload, target)
	if err != nil {
		return nil, err
	}
	// Small, so that what the sender misses while other things run is not made up for in another window.
	if err := s.set(m.ctx, a, limit{rate, max(4096, uint64(rate)/8/50)}); err != nil {
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
	samples, err := m.windowsOf(arrived, s, rate, 1500*time.Millisecond, 500*time.Millisecond)
	speed := float64(offered.Load()-before) * float64(payload+headers) * 8 / time.Since(start).Seconds()
	stop.Store(true)
	if err := errors.Join(err, <-done); err != nil {
		return nil, err
	}
	if speed < 1.1*float64(rate) {
		return nil, nil
	}
	return accuracyResults("UDP", s, rate, samples), nil
}

// headers of Ethernet, IPv4 and UDP.
const headers = 14 + 20 + 8

// tcp sends as fast as one connection goes, with the system's congestion control.
func (m accuracyMeter) tcp(s competitor, rate policy.Rate) ([]Result, error) {
	a, err := newArena(m.ctx)
	if err != nil {
		return nil, err
	}
	defer a.close()
	arrived, err := a.count(countAndNext)
	if err != nil {
		return nil, err
	}
	if err := a.noOffload(); err != nil {
		return nil, err
	}
	if err := s.set(m.ctx, a, limit{rate, policy.DefaultCapacity(rate)}); err != nil {
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
	samples, err := m.windowsOf(arrived, s, rate, 2*time.Second, time.Second)
	from.Close()
	to.Close()
	<-done
	<-done
	if err != nil {
		return nil, err
	}
	return accuracyResults("TCP", s, rate, samples), nil
}

// windowsOf are the shares of the rate that arrive in each of several windows, after the first burst is over.
func (m accuracyMeter) windowsOf(c *counter, s competitor, rate policy.Rate, settle, window time.Duration) (shares []float64, err error) {
	if m.quick {
		settle, window = settle/2, window/2
	}
	if err := sleep(m.ctx, settle); err != nil {
		return nil, err
	}
	from, err := c.read()
	if err != nil {
		return nil, err
	}
	for range m.windows {
		if err := sleep(m.ctx, window); err != nil {
			return nil, err
		}
		to, err := c.read()
		if err != nil {
			return nil, err
		}
		if to.Last == from.Last {
			shares = append(shares, 0)
			continue
		}
		bytes := to.Bytes - from.Bytes - (to.Packets-from.Packets)*s.uncounted
		shares = append(shares, float64(bytes)*8*1e9/float64(to.Last-from.Last)/float64(rate))
		from = to
	}
	return shares, nil
}

// accuracyResults are what was delivered, and how far that is from the rate.
func accuracyResults(protocol string, s competitor, rate policy.Rate, shares []float64) []Result {
	errs := make([]float64, len(shares))
	for i, share := range shares {
		errs[i] = math.Abs(share-1) * 1e6
	}
	delivered := newResult(fmt.Sprintf("Delivered, %s: %v", protocol, rate), s.name, unitDelivered, shares)
	off := newResult(fmt.Sprintf("Rate error, %s: %v", protocol, rate), s.name, unitMillionths, errs)
	delivered.Note, off.Note = s.note, s.note
	return []Result{delivered, off}
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
