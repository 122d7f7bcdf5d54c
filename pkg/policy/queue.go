package policy

import (
	"cmp"
	"fmt"
	"math"
	"time"
)

// MaxWait is the longest delay of a packet. It is less than the 10 s after which fq drops
// packets by default (linux/net/sched/sch_fq.c).
const MaxWait = 9 * time.Second

// ECNAbove is the delay in ns above which a packet is marked; 0 if it is not set.
type ECNAbove time.Duration

// Never marks no packets.
const Never ECNAbove = math.MaxInt64

// Set parses a time such as "5ms" in s, ms, us or ns, or "never".
func (e *ECNAbove) Set(s string) error {
	if s == "never" {
		*e = Never
		return nil
	}
	d, err := parseTime("ecn-above", s, "never or 5ms")
	*e = ECNAbove(d)
	return err
}

func (e ECNAbove) String() string {
	switch e {
	case 0:
		return ""
	case Never:
		return "never"
	}
	return timeString(time.Duration(e))
}

func (e ECNAbove) Type() string { return "time|never" }

func resolveQueue(l *Limit, r *Rule) (err error) {
	r.Queue, err = l.Queue.resolve("queue", r.Rate, DefaultQueue, r.Excess == Delay && r.Algorithm == GCRA)
	return err
}

func resolveECNAbove(l *Limit, r *Rule) error {
	r.ECNAbove = l.ECNAbove
	if r.ECNAbove == 0 && r.Excess == Delay && r.Rate != Unlimited {
		_, longest := r.Waiting()
		r.ECNAbove = defaultECNAbove(longest)
	}
	return nil
}

// Waiting returns the length of r's queue in bytes, and the longest delay; both are 0 for
// a rule that does not delay packets.
func (r Rule) Waiting() (bytes uint64, longest time.Duration) {
	switch {
	case r.Excess != Delay || r.Rate == 0 || r.Rate == Unlimited:
		return 0, 0
	case r.Algorithm == Leaky:
		bytes = r.Capacity
	default:
		bytes = r.Queue
	}
	return bytes, time.Duration(min(scaleUp(bytes, bitNanoseconds, uint64(r.Rate)), math.MaxInt64))
}

// validateWait returns an error if r can delay packets for longer than MaxWait.
func (r Rule) validateWait() error {
	bytes, longest := r.Waiting()
	if longest <= MaxWait {
		return nil
	}
	what := "capacity"
	if r.Algorithm == GCRA {
		what = "queue"
	}
	return fmt.Errorf("%s of %d bytes at %v delays packets for up to %s, and %s is the longest delay; use %s or less",
		what, bytes, r.Rate, drainTime(bytes, r.Rate), timeString(MaxWait), timeString(MaxWait))
}

func checkExcess(r *Rule) error {
	return cmp.Or(checkName(r.Excess, "excess", excessNames), r.validateWait())
}

func checkQueue(r *Rule) error {
	if r.Queue < MinCapacity {
		return fmt.Errorf("queue of %d bytes (%s at %v) is less than one full packet; use %d or more",
			r.Queue, drainTime(r.Queue, r.Rate), r.Rate, MinCapacity)
	}
	both := r.Capacity + r.Queue
	return checkMaxCapacity("capacity", func() string { return fmt.Sprintf("and queue of %d bytes together", both) }, both)
}

func checkECNAbove(r *Rule) error {
	if r.ECNAbove <= 0 {
		return fmt.Errorf("ecn-above of %d ns is not above zero; write a time such as 5ms, or never", r.ECNAbove)
	}
	return nil
}
