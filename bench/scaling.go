package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"sync"
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

// A burst is a sequence of packets on one CPU.
type burst struct {
	start, end time.Duration // since the run began
	took       time.Duration // CPU time of the thread
}

const burstPackets = 5000

// packetRate returns the packets per second of some CPUs together, while all of them are running.
func packetRate(on []int, p pair, long time.Duration) (float64, error) {
	for range 10 {
		bursts, err := bursts(on, p, long)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", p.subject, err)
		}
		if rate, ok := together(bursts); ok {
			return rate, nil
		}
	}
	return 0, fmt.Errorf("%s: the CPUs are too busy with other work to run together", p.subject)
}

// bursts runs packets on each CPU for a time, starting simultaneously.
func bursts(on []int, p pair, long time.Duration) ([][]burst, error) {
	all := make([][]burst, len(on))
	errs := make([]error, len(on))
	epoch := time.Now()
	begin := make(chan struct{})
	var ready, done sync.WaitGroup
	ready.Add(len(on))
	for i, cpu := range on {
		done.Go(func() {
			arrive := sync.OnceFunc(ready.Done)
			defer arrive()
			errs[i] = pinned(cpu, func() error {
				arrive()
				<-begin
				for until := time.Since(epoch) + long; time.Since(epoch) < until; {
					start := time.Since(epoch)
					ns, err := nanoseconds(p.program, p.packets[i], burstPackets)
					if err != nil {
						return err
					}
					all[i] = append(all[i], burst{start, time.Since(epoch), time.Duration(ns * burstPackets)})
				}
				return nil
			})
		})
	}
	ready.Wait()
	close(begin)
	done.Wait()
	return all, errors.Join(errs...)
}

// together returns the packet rate in the time in which all CPUs were running, or false
// if there is no such time.
func together(bursts [][]burst) (rate float64, ok bool) {
	first, last := time.Duration(0), time.Duration(math.MaxInt64)
	for _, list := range bursts {
		first, last = max(first, list[0].start), min(last, list[len(list)-1].end)
	}
	for _, list := range bursts {
		var packets int
		var took time.Duration
		for _, b := range list {
			if b.start >= first && b.end <= last {
				packets += burstPackets
				took += b.took
			}
		}
		if packets == 0 {
			return 0, false
		}
		rate += float64(packets) / took.Seconds()
	}
	return rate, true
}
