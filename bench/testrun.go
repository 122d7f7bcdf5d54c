package main

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// An arm is one subject of a contest: a program and the packet that it is run with.
type arm struct {
	subject string
	program *ebpf.Program
	// clock is the clock program behind whatever stands before program, so that
	// only the program itself is counted; nil where nothing does.
	clock  *ebpf.Program
	packet []byte
	repeat int // how many packets make a sample
	note   string
}

// A contest has its arms take turns, round by round, so that a machine whose
// speed changes changes it for all of them.
type contest struct {
	empty, clock *ebpf.Program
	arms         []arm
}

// costs are ns a packet of each arm, by round.
type costs struct {
	empty, clock []float64
	arms         [][]float64
}

// warmUpPackets is how many packets an arm handles before it is measured.
const warmUpPackets = 10_000

func (c contest) run(ctx context.Context, rounds int) (costs, error) {
	out := costs{arms: make([][]float64, len(c.arms))}
	for _, a := range c.arms {
		if _, err := nanoseconds(a.program, a.packet, warmUpPackets); err != nil {
			return costs{}, fmt.Errorf("%s: %w", a.subject, err)
		}
	}
	const reference = 50_000
	for range rounds {
		if err := ctx.Err(); err != nil {
			return costs{}, err
		}
		empty, err := nanoseconds(c.empty, c.arms[0].packet, reference)
		if err != nil {
			return costs{}, err
		}
		clock, err := nanoseconds(c.clock, c.arms[0].packet, reference)
		if err != nil {
			return costs{}, err
		}
		out.empty, out.clock = append(out.empty, empty), append(out.clock, clock)
		behind := map[*ebpf.Program]float64{}
		for i, a := range c.arms {
			cost, err := nanoseconds(a.program, a.packet, a.repeat)
			if err != nil {
				return costs{}, fmt.Errorf("%s: %w", a.subject, err)
			}
			if a.clock != nil {
				if behind[a.clock] == 0 {
					if behind[a.clock], err = nanoseconds(a.clock, a.packet, a.repeat); err != nil {
						return costs{}, err
					}
				}
				cost -= behind[a.clock] - clock
			}
			out.arms[i] = append(out.arms[i], cost)
		}
	}
	return out, nil
}

// results are the figures of all arms in one case.
func (c contest) results(name string, of costs) (results []Result) {
	for i, a := range c.arms {
		for _, r := range []Result{
			newResult(name, a.subject, unitNanoseconds, of.arms[i]),
			newResult(name, a.subject, unitClock, ratios(of.arms[i], of.clock)),
			newResult(name, a.subject, unitEmpty, ratios(of.arms[i], of.empty)),
		} {
			r.Note = a.note
			results = append(results, r)
		}
	}
	return results
}

// ratios are those of two arms in each round.
func ratios(of, by []float64) []float64 {
	r := make([]float64, len(of))
	for i := range of {
		r[i] = of[i] / by[i]
	}
	return r
}

// nanoseconds is what one run of a program takes, of so many in a row. It
// counts the time of this thread alone, not that of others who had the CPU.
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

// cpus are those that this process may run on.
func cpus() (list []int, err error) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return nil, fmt.Errorf("ask which CPUs may be used: %w", err)
	}
	for cpu := range len(allowed) * 64 {
		if allowed.IsSet(cpu) {
			list = append(list, cpu)
		}
	}
	return list, nil
}

// pinned runs f on a thread that stays on one CPU.
func pinned(cpu int, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		var one unix.CPUSet
		one.Set(cpu)
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			done <- fmt.Errorf("stay on CPU %d: %w", cpu, err)
			return
		}
		done <- f()
	}()
	return <-done
}
