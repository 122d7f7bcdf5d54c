package main

import (
	"context"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// An arm is a subject of a contest: a program, and the packet for it.
type arm struct {
	subject string
	program *ebpf.Program
	// clock is the clock program behind the same walk as program. It allows to subtract the
	// cost of the walk. It is nil without a walk.
	clock  *ebpf.Program
	packet []byte
	repeat int // packets per sample
	note   string
}

// warmUpPackets is the number of packets of an arm before it is measured.
const warmUpPackets = 10_000

// A turn is the cost of a packet in one round, in ns.
type turn struct {
	empty, clock float64 // in these programs
	arms         []float64
}

// contest runs all arms in each round, so that changes of the machine's speed affect all
// of them. It calls each with the costs of a round.
func (l *lab) contest(ctx context.Context, rounds int, arms []arm, each func(turn)) error {
	packet := arms[0].packet
	all := append([]arm{
		{subject: emptyProgram, program: l.empty, packet: packet, repeat: hotPackets},
		{subject: clockProgram, program: l.clock, packet: packet, repeat: hotPackets},
	}, arms...)
	for _, a := range all {
		if _, err := nanoseconds(a.program, a.packet, warmUpPackets); err != nil {
			return fmt.Errorf("%s: %w", a.subject, err)
		}
	}
	for range rounds {
		if err := ctx.Err(); err != nil {
			return err
		}
		var costs []float64
		behind := map[*ebpf.Program]float64{}
		for _, a := range all {
			cost, err := nanoseconds(a.program, a.packet, a.repeat)
			if err == nil && a.clock != nil && behind[a.clock] == 0 {
				behind[a.clock], err = nanoseconds(a.clock, a.packet, a.repeat)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", a.subject, err)
			}
			if a.clock != nil {
				cost -= behind[a.clock] - costs[1]
			}
			costs = append(costs, cost)
		}
		each(turn{costs[0], costs[1], costs[2:]})
	}
	return nil
}

// addTurn reports the costs of arms in one round of a case.
func (l *lab) addTurn(name string, arms []arm, t turn) {
	for i, a := range arms {
		l.add(name, a.subject, unitNanoseconds, a.note, t.arms[i])
		l.add(name, a.subject, unitClock, a.note, t.arms[i]/t.clock)
		l.add(name, a.subject, unitEmpty, a.note, t.arms[i]/t.empty)
	}
}

// nanoseconds returns the mean CPU time of a run of a program. It is the time of this
// thread, without that of other users of the CPU.
func nanoseconds(p *ebpf.Program, packet []byte, repeat int) (float64, error) {
	start := threadTime()
	_, _, err := p.Benchmark(packet, repeat, func() { start = threadTime() })
	return float64(threadTime()-start) / float64(repeat), err
}

func threadTime() time.Duration {
	var t unix.Timespec
	unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return time.Duration(t.Nano())
}

// cpus returns the CPUs that this process may run on.
func cpus() (list []int, err error) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return nil, fmt.Errorf("get the CPU affinity: %w", err)
	}
	for cpu := range len(allowed) * 64 {
		if allowed.IsSet(cpu) {
			list = append(list, cpu)
		}
	}
	return list, nil
}

// onLastCPU runs f on a thread on the last CPU, because interrupts mostly go to the first one.
func onLastCPU(f func() error) error {
	list, err := cpus()
	if err != nil {
		return err
	}
	return pinned(list[len(list)-1], f)
}

// pinned runs f on a thread on one CPU.
func pinned(cpu int, f func() error) error {
	return aside(func() error {
		var one unix.CPUSet
		one.Set(cpu)
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return fmt.Errorf("pin the thread to CPU %d: %w", cpu, err)
		}
		return f()
	})
}
