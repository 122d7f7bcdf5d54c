package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/safchain/ethtool"
	"github.com/vishvananda/netns"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite accuracy offers each limiter more than its rate, and compares the bytes that arrive
// in windows of time with the rate. They are counted behind the limiter as on a wire: GSO packets
// are segmented by then.

var accuracyRates = []policy.Rate{1e6, 20e6, 500e6}

// slow is the highest rate that emulated CPUs sustain. Several limiters can run at it at the same time.
const slow = 20e6

// accuracy compares limiters on this machine.
func accuracy(ctx context.Context, o options) error {
	return accuracyMeter{options: o, ctx: ctx}.all([]competitor{
		shapectl(policy.GCRA, policy.EachAll, loader.TCX), shapectl(policy.Leaky, policy.EachAll, loader.TCX),
		nftOneLimit, nftSet, hashlimitAll, tbf, htb,
	})
}

// guestAccuracy compares limiters in a guest, because not every kernel has these peers.
func guestAccuracy(ctx context.Context, o options) error {
	return accuracyMeter{options: o, ctx: ctx, guest: true}.all([]competitor{
		shapectl(policy.GCRA, policy.EachAll, loader.TCX), police, cake,
	})
}

type accuracyMeter struct {
	options
	ctx   context.Context
	guest bool
}

// all measures limiters at all rates, with UDP and with TCP.
func (m accuracyMeter) all(subjects []competitor) error {
	subjects = slices.DeleteFunc(subjects, func(s competitor) bool { return !m.chosen(s.name) })
	for _, rate := range accuracyRates {
		if m.quick && rate != accuracyRates[1] {
			continue
		}
		if err := m.each("UDP", subjects, rate, false, m.udp); err != nil {
			return err
		}
		if m.guest && rate > slow {
			continue
		}
		if err := m.each("TCP", subjects, rate, rate <= slow, m.tcp); err != nil {
			return err
		}
	}
	return nil
}

// each measures and reports limiters one after another, or at the same time.
func (m accuracyMeter) each(protocol string, subjects []competitor, rate policy.Rate, atOnce bool,
	measure func(competitor, policy.Rate) (shares []float64, err error)) error {
	shares, errs := make([][]float64, len(subjects)), make([]error, len(subjects))
	var running sync.WaitGroup
	for i, s := range subjects {
		running.Go(func() { shares[i], errs[i] = measure(s, rate) })
		if !atOnce {
			running.Wait()
		}
	}
	running.Wait()
	for i, s := range subjects {
		if errs[i] != nil {
			return fmt.Errorf("%s at %v, %s: %w", s.name, rate, protocol, errs[i])
		}
		if shares[i] != nil {
			m.figures(protocol, s, rate, shares[i])
		}
	}
	return nil
}

// figures reports the delivered shares, and their distance from the rate.
func (m accuracyMeter) figures(protocol string, s competitor, rate policy.Rate, shares []float64) {
	where := ""
	if m.guest {
		where = " in a virtual machine"
	}
	m.add(fmt.Sprintf("Delivered%s, %s: %v", where, protocol, rate), s.name, unitDelivered, s.note, shares...)
	if protocol != "UDP" {
		return // rate that a TCP sender does not use is no error of the limiter
	}
	var off []float64
	for _, share := range shares {
		off = append(off, math.Abs(share-1)*1e6)
	}
	m.add(fmt.Sprintf("Rate error%s: %v", where, rate), s.name, unitMillionths, s.note, off...)
}

// oneSecond is a limit with the smallest burst that nft and hashlimit support.
func oneSecond(rate policy.Rate) limit { return limit{rate, uint64(rate) / 8} }

// udp offers as many datagrams as the system can send. If that is not well above the rate, it returns no shares.
func (m accuracyMeter) udp(s competitor, rate policy.Rate) ([]float64, error) {
	a, err := newArena(m.ctx)
	if err != nil {
		return nil, err
	}
	defer a.Close()
	arrived, err := a.count(1, drop)
	if err != nil {
		return nil, err
	}
	payload := 1400
	if rate == accuracyRates[0] {
		payload = 100
	}
	from, err := a.newSender(a.near, payload, target)
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
		done <- aside(func() (err error) {
			for err == nil && !stop.Load() {
				const some = 100
				_, err = from.send(some)
				offered.Add(some)
			}
			return err
		})
	}()
	before, start := offered.Load(), time.Now()
	samples, err := m.shares(arrived, s, rate, 1500*time.Millisecond, 500*time.Millisecond)
	speed := float64(offered.Load()-before) * float64(payload+headers) * 8 / time.Since(start).Seconds()
	stop.Store(true)
	if err := errors.Join(err, <-done); err != nil || speed < 1.3*float64(rate) {
		return nil, err
	}
	return samples, nil
}

// headers of Ethernet, IPv4 and UDP.
const headers = 14 + 20 + 8

// tcp sends over one connection as fast as possible, with the system's congestion control.
func (m accuracyMeter) tcp(s competitor, rate policy.Rate) ([]float64, error) {
	a, err := newArena(m.ctx)
	if err != nil {
		return nil, err
	}
	defer a.Close()
	arrived, err := a.count(1, next)
	if err != nil {
		return nil, err
	}
	if err := a.noOffload(); err != nil {
		return nil, err
	}
	if err := s.set(m.ctx, a, oneSecond(rate)); err != nil {
		return nil, err
	}
	flows, err := a.open(a.near, target)
	if err != nil {
		return nil, err
	}
	defer flows.close()
	flows[0].fill()
	return m.shares(arrived, s, rate, 3*time.Second, 1500*time.Millisecond)
}

// shares returns the bytes that arrive in each of several windows, relative to the rate, after the
// first burst. A window begins and ends with the arrival that is furthest ahead of the rate for
// a while: then the bucket is full, and not half empty because the sender waited for its CPU.
func (m accuracyMeter) shares(c *counter, s competitor, rate policy.Rate,
	settle, window time.Duration) (shares []float64, err error) {
	if m.quick {
		settle, window = settle/2, window/2
	}
	if err := sleep(m.ctx, settle); err != nil {
		return nil, err
	}
	var from arrivals
	for i := range m.rounds(5) + 1 {
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

// most returns the arrival within a time that is furthest ahead of the rate.
func (m accuracyMeter) most(c *counter, rate policy.Rate, while time.Duration) (best arrivals, err error) {
	first, err := c.read(0)
	if err != nil {
		return best, err
	}
	best = first
	lead := 0.0 // bytes ahead of the rate since the first arrival
	for start := time.Now(); time.Since(start) < while; {
		if err := sleep(m.ctx, time.Millisecond); err != nil {
			return best, err
		}
		now, err := c.read(0)
		if err != nil {
			return best, err
		}
		if l := float64(now.Bytes-first.Bytes) - float64(now.Last-first.Last)*float64(rate)/8e9; l >= lead {
			best, lead = now, l
		}
	}
	return best, nil
}

// noOffload turns offloads off, so that packets are sent and received as on a wire.
func (a *arena) noOffload() error {
	for device, namespace := range map[string]netns.NsHandle{nearDevice: a.near, farDevice: a.far} {
		if err := in(namespace, func() error {
			e, err := ethtool.NewEthtool()
			if err != nil {
				return err
			}
			defer e.Close()
			return e.Change(device, map[string]bool{
				"tx-tcp-segmentation": false, "tx-tcp6-segmentation": false, "tx-tcp-ecn-segmentation": false,
				"tx-tcp-mangleid-segmentation": false, "tx-generic-segmentation": false, "rx-gro": false,
			})
		}); err != nil {
			return fmt.Errorf("turn off the offloads of %s: %w", device, err)
		}
	}
	return nil
}

// A counter counts the frames that arrive at the far end, at layer 2, in the same way for all limiters: all of them, or
// those for each address of addressOf.
type counter struct{ counts *ebpf.Map }

// Arrivals are the packets and bytes until the last frame, and the time of that frame.
type arrivals struct {
	Packets, Bytes uint64
	Last           uint64 // ns of the system's monotonic clock
}

// count attaches a counter to the far end for n addresses, or for all packets if n is 1. It returns a verdict for all.
func (a *arena) count(n int, verdict int32) (*counter, error) {
	const lastByte, segments = 14 + 19, 164 // of the destination, and the offset of gso_segs
	m, err := a.newMap(ebpf.MapSpec{Name: "counts", Type: ebpf.Array, KeySize: 4, ValueSize: 24, MaxEntries: uint32(n)})
	if err != nil {
		return nil, err
	}
	which := asm.Mov.Imm(asm.R0, 0)
	if n > 1 {
		which = asm.LoadAbs(lastByte, asm.Byte)
	}
	return &counter{m}, a.assemble(a.far, "count", slices.Concat(
		asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			which,
			asm.StoreMem(asm.R10, -4, asm.R0, asm.Word),
			asm.FnKtimeGetNs.Call(),
			asm.Mov.Reg(asm.R7, asm.R0),
		},
		lookup(m, -4, "out"),
		asm.Instructions{
			asm.LoadMem(asm.R2, asm.R6, skbLength, asm.Word),
			// A GSO packet has the headers of its first segment only.
			asm.LoadMem(asm.R3, asm.R6, segments, asm.Word),
			asm.JEq.Imm(asm.R3, 0, "add"),
			asm.Sub.Imm(asm.R3, 1),
			asm.Mul.Imm(asm.R3, maxFrame-fullPayload),
			asm.Add.Reg(asm.R2, asm.R3),
			asm.Mov.Imm(asm.R1, 1).WithSymbol("add"),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.StoreMem(asm.R0, 16, asm.R7, asm.DWord),
			asm.Add.Imm(asm.R0, 8),
			asm.StoreXAdd(asm.R0, asm.R2, asm.DWord),
			asm.Mov.Imm(asm.R0, verdict).WithSymbol("out"),
			asm.Return(),
		},
	))
}

// read returns a consistent count of an address.
func (c *counter) read(address uint32) (now arrivals, err error) {
	for {
		before := now
		if err := c.counts.Lookup(address, &now); err != nil {
			return now, fmt.Errorf("read the counter: %w", err)
		}
		if now == before {
			return now, nil
		}
		time.Sleep(2 * time.Microsecond) // longer than the program runs for a frame
	}
}
