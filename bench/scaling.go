package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// References for the cost of a word that CPUs share.
const (
	sharedAdd   = "atomic add to the word"
	sharedCAS   = "compare-and-swap of the word"
	sharedClock = "clock, then compare-and-swap of the word"
)

// A pair is a program that two CPUs run at the same time, and the packet of each.
type pair struct {
	column, subject string
	program         *ebpf.Program
	packets         [2][]byte
}

// twoCPUs measures the throughput of two CPUs, relative to one of them alone.
func (l *lab) twoCPUs(ctx context.Context) error {
	on, err := cpus()
	if err != nil {
		return err
	}
	if len(on) < 2 {
		l.say("  two CPUs: this machine has one")
		return nil
	}
	l.say("  two CPUs")
	pairs, err := l.pairs()
	if err != nil {
		return err
	}
	long := 60 * time.Millisecond
	if l.quick {
		long = 20 * time.Millisecond
	}
	for range l.rounds(31) {
		for _, p := range pairs {
			if err := ctx.Err(); err != nil {
				return err
			}
			alone, err := packetRate(on[1:2], p, long)
			if err != nil {
				return err
			}
			both, err := packetRate(on[:2], p, long)
			if err != nil {
				return err
			}
			l.add("Throughput of two CPUs: "+p.column, p.subject, unitOneCPU, "", both/alone)
			l.add("Time between packets, two CPUs: "+p.column, p.subject, unitNanoseconds, "", 1e9/both)
		}
	}
	return nil
}

func (l *lab) pairs() (pairs []pair, err error) {
	same := udp(false, payload)
	other := slices.Clone(same)
	copy(other[ipv4Dest:], netip.MustParseAddr("172.16.0.1").AsSlice())
	for _, a := range algorithms {
		p, err := l.shapectl(maps.Size{Rules: 2, Buckets: 1}, []policy.Rule{
			generous(everything, a),
			generous(netip.MustParsePrefix("172.16.0.0/12"), a),
		})
		if err != nil {
			return nil, err
		}
		pairs = append(pairs,
			pair{"one bucket", name(a), p, [2][]byte{same, same}},
			pair{"one bucket each", name(a), p, [2][]byte{same, other}})
	}
	for _, word := range []struct {
		subject      string
		before, code asm.Instructions
	}{
		{sharedAdd, nil, addToWord()},
		{sharedCAS, nil, swapWord()},
		{sharedClock, readClock(), swapWord()},
	} {
		p, err := l.wordProgram(word.before, word.code)
		if err != nil {
			return nil, err
		}
		pairs = append(pairs, pair{"one bucket", word.subject, p, [2][]byte{same, same}})
	}
	return append(pairs, pair{"one bucket each", clockProgram, l.clock, [2][]byte{same, same}}), nil
}

// packetRate returns the packets per second of some CPUs together. All run for the same time.
func packetRate(on []int, p pair, long time.Duration) (rate float64, err error) {
	const burst = 5000
	rates, errs := make([]float64, len(on)), make([]error, len(on))
	begin, ready, done := make(chan struct{}), sync.WaitGroup{}, sync.WaitGroup{}
	var stop atomic.Bool
	ready.Add(len(on))
	for i, cpu := range on {
		done.Go(func() {
			arrive := sync.OnceFunc(ready.Done)
			defer arrive()
			errs[i] = pinned(cpu, func() error {
				arrive()
				<-begin
				var all, bursts float64 // ns
				for bursts == 0 || !stop.Load() {
					ns, err := nanoseconds(p.program, p.packets[i], burst)
					if err != nil {
						return fmt.Errorf("%s: %w", p.subject, err)
					}
					all, bursts = all+ns, bursts+1
				}
				rates[i] = 1e9 / (all / bursts)
				return nil
			})
		})
	}
	ready.Wait()
	close(begin)
	time.Sleep(long)
	stop.Store(true)
	done.Wait()
	for _, r := range rates {
		rate += r
	}
	return rate, errors.Join(errs...)
}
