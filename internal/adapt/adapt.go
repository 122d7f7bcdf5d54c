// Package adapt decides how far the rates of pools are lowered while a line is slower than they are, by how long pings
// through it take. It does no I/O and reads no clock. Times are in ns on the monotonic clock.
package adapt

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// Every is the time between two pings, to one reflector after the other.
	Every = 200 * time.Millisecond
	// LeaseFor is how long a lowered rate lasts unless it is renewed.
	LeaseFor = 10 * time.Second

	renewEvery = LeaseFor / 4
	// silentAfter is how long after its last answer a reflector no longer counts, or pingsUnheard pings to it if these
	// take longer.
	silentAfter  = 5 * time.Second
	pingsUnheard = 3
	// silentEvery is the time between two pings to a reflector that does not answer.
	silentEvery = 10 * time.Second
	// useFor is the time over which the use of a pool is measured.
	useFor = time.Second
	// quietFor is how long no pool may have been in use before latency that rises is the line's own.
	quietFor = 2 * time.Second

	loaded  = 0.75 // of the rate in force
	lower   = 0.9  // one step down
	deeper  = 0.7  // the same if latency is extreme
	deepest = 0.5  // the largest step down, to what the line lets through

	raise      = 0.05             // a second, while the pool is loaded
	raiseIdle  = 0.01             // a second, while it is not
	raiseNear  = 0.02             // a second, near the rate that was too high lately
	raiseFar   = 0.1              // a second, far above it: the line is another one now
	near, past = 0.85, 1.02       // of that rate
	far        = 1.2              // of it
	lately     = 30 * time.Second // then it no longer says anything
	onset      = 0.95             // of the rate when latency is noticed, which rose meanwhile

	takesEffect = time.Second     // before this a step down shows in no latency that is not extreme
	extreme     = 4               // times the bound
	stillFull   = 0.9             // the queue does not drain if latency is above this part of the highest one since the last step
	drainsIn    = 2 * time.Second // after this a slow drain does not count
	worthwhile  = 0.05            // a smaller change is not written: while a pool is loaded, its rate never rests
)

// A Pool is a pool that adapts, as it is now.
type Pool struct {
	Name    string
	Rate    policy.Rate // as configured: the highest
	Min     policy.Rate // the lowest
	Above   time.Duration
	To      []netip.Addr
	InForce policy.Rate   // what packets meet
	Passed  uint64        // bytes since the pool exists
	Waits   time.Duration // how long a packet that comes now waits in the queue of the pool itself
}

// A Lease is the rate that a pool should have for LeaseFor.
type Lease struct {
	Pool string
	Rate policy.Rate
	Why  string // why the rate changes; "" if it does not
}

// A Controller decides on the leases of the pools of a network namespace.
type Controller struct {
	reflectors map[netip.Addr]*reflector
	order      []netip.Addr // of pings
	turn       int
	pools      map[string]*state
	busy       uint64        // when any pool was last in use
	waits      time.Duration // how long a ping may wait in the queues of pools
}

// A reflector is an address that is pinged.
type reflector struct {
	usual  time.Duration // the baseline: the latency of an idle line; 0 before the first answer
	since  uint64        // when it was first pinged; 0 for never
	pinged uint64        // when it was last pinged
	waits  time.Duration // how long the ping may have waited in queues of our own
	heard  uint64        // when the last answer came; 0 for never
	// Of the last answer:
	sent   uint64
	excess time.Duration // how much longer than usual it took
	late   time.Duration // the excess of the answer before
}

// A state is what a Controller knows about a pool.
type state struct {
	rate    float64 // what the lease should be, of which only larger changes are written
	granted policy.Rate
	written uint64
	marks   []mark        // of the counter of passed bytes, for useFor
	lowered uint64        // when it was last lowered
	delay   time.Duration // the most excess since then
	tooHigh float64       // the rate with which latency rose then
	decided uint64
}

type mark struct{ at, passed uint64 }

// New returns a Controller that knows nothing yet.
func New() *Controller {
	return &Controller{reflectors: map[netip.Addr]*reflector{}, pools: map[string]*state{}}
}

// Next is the reflector to ping now; false if there is none.
func (c *Controller) Next(now uint64) (to netip.Addr, ok bool) {
	if len(c.order) == 0 {
		return netip.Addr{}, false
	}
	for range c.order {
		to = c.order[c.turn%len(c.order)]
		c.turn++
		if r := c.reflectors[to]; !c.isSilent(r, now) || now-r.pinged >= uint64(silentEvery) {
			break
		}
	}
	r := c.reflectors[to]
	r.since, r.pinged, r.waits = cmp.Or(r.since, now), now, c.waits
	return to, true
}

// patience is silentAfter for all reflectors together, which are pinged one after the other.
func (c *Controller) patience() uint64 {
	return uint64(max(silentAfter, time.Duration(pingsUnheard*len(c.order))*Every))
}

// answers reports whether a reflector counts.
func (c *Controller) answers(r *reflector, now uint64) bool {
	return r.heard != 0 && now-r.heard < c.patience()
}

// isSilent reports whether a reflector was pinged in vain for some time.
func (c *Controller) isSilent(r *reflector, now uint64) bool {
	return r.since != 0 && now-max(r.since, r.heard) >= c.patience()
}

// Heard takes the answer to a ping.
func (c *Controller) Heard(now uint64, from netip.Addr, sent uint64) {
	r := c.reflectors[from]
	if r == nil || sent >= now || sent < r.sent {
		return
	}
	took := time.Duration(now - sent)
	again := !c.answers(r, now)
	r.heard, r.sent, r.late = now, sent, r.excess
	switch excess := took - r.usual; {
	case r.usual == 0, excess < 0, again && c.quiet(now):
		r.usual, r.excess, r.late = took, 0, 0
	default:
		// A line that nobody uses has its usual latency, whatever that was before. Beside traffic only a long time tells.
		part := time.Duration(1024)
		if c.quiet(now) {
			part = 16
		}
		// Pings may go through the queues of the pools, or past them.
		r.excess = max(excess-r.waits, 0)
		r.usual += r.excess / part
	}
}

func (c *Controller) quiet(now uint64) bool { return now-c.busy > uint64(quietFor) }

// A view is what the reflectors of a pool say.
type view struct {
	voters int // that answer
	late   bool
	calm   bool // no majority is late by half as much
	// The median of those that are late:
	of            netip.Addr
	usual, excess time.Duration
}

// look asks the reflectors of a pool, of which answers to pings before a time say nothing about the rate since.
func (c *Controller) look(now uint64, p *Pool, since uint64) (v view) {
	type vote struct {
		by netip.Addr
		*reflector
	}
	var late []vote
	half := 0
	for _, addr := range p.To {
		r := c.reflectors[addr]
		if !c.answers(r, now) {
			continue
		}
		v.voters++
		if r.excess > p.Above/2 {
			half++
		}
		if r.excess > p.Above && r.sent >= since {
			late = append(late, vote{addr, r})
		}
	}
	v.calm = v.voters > 0 && 2*half <= v.voters
	if 2*len(late) <= v.voters || v.voters == 1 && late[0].late <= p.Above {
		return v
	}
	slices.SortFunc(late, func(a, b vote) int { return cmp.Compare(a.excess, b.excess) })
	median := late[(len(late)-1)/2] // of two the lower one: the other may be wrong
	v.late, v.of, v.usual, v.excess = true, median.by, median.usual, median.excess
	return v
}

// Silent reports whether no reflector answers. Then rates stay.
func (c *Controller) Silent(now uint64) bool {
	for _, r := range c.reflectors {
		if !c.isSilent(r, now) {
			return false
		}
	}
	return len(c.reflectors) > 0
}

// Reflectors are the addresses to ping.
func (c *Controller) Reflectors() []netip.Addr { return c.order }

// Decide returns the leases to write now, given all pools that adapt.
func (c *Controller) Decide(now uint64, pools []Pool) (leases []Lease) {
	c.follow(now, pools)
	uses := make([]float64, len(pools))
	var there, back time.Duration // a ping may pass one pool in each direction
	for i := range pools {
		p := &pools[i]
		there, back = max(there, p.Waits), max(back, min(there, p.Waits))
		uses[i] = c.pools[p.Name].use(now, p.Passed)
		if uses[i] > float64(p.Min) {
			c.busy = now
		}
	}
	c.waits = there + back
	// A round trip does not tell which direction is slow. So the pools are lowered that use most of their rates. On a line that is
	// much slower than the rates, no pool can do that. Then all are lowered that pass more than their lowest rate.
	culprit := func(i int) bool { return uses[i] > float64(pools[i].Min) }
	full := func(i int) bool {
		return uses[i] >= loaded*float64(pools[i].InForce) && c.pools[pools[i].Name].rate > float64(pools[i].Min)
	}
	for i := range pools {
		if full(i) && c.look(now, &pools[i], c.pools[pools[i].Name].lowered).late {
			culprit = full
			break
		}
	}
	for i := range pools {
		p := &pools[i]
		s := c.pools[p.Name]
		why := s.move(now, p, c.look(now, p, s.lowered), uses[i], culprit(i))
		if l, due := s.lease(now, p, why); due {
			leases = append(leases, l)
		}
	}
	return leases
}

// follow takes note of pools that are new, gone, or have another rate than they were given.
func (c *Controller) follow(now uint64, pools []Pool) {
	names, addrs := map[string]bool{}, map[netip.Addr]bool{}
	for i := range pools {
		p := &pools[i]
		names[p.Name] = true
		s := c.pools[p.Name]
		if s == nil {
			s = &state{decided: now}
			c.pools[p.Name] = s
		}
		if p.InForce != s.granted {
			s.rate, s.granted = float64(p.InForce), p.InForce
		}
		for _, addr := range p.To {
			addrs[addr] = true
			if c.reflectors[addr] == nil {
				c.reflectors[addr] = &reflector{}
				c.order = append(c.order, addr)
			}
		}
	}
	for name := range c.pools {
		if !names[name] {
			delete(c.pools, name)
		}
	}
	c.order = slices.DeleteFunc(c.order, func(addr netip.Addr) bool {
		if !addrs[addr] {
			delete(c.reflectors, addr)
		}
		return !addrs[addr]
	})
}

// use is what a pool passed lately, in bits per second.
func (s *state) use(now, passed uint64) float64 {
	if n := len(s.marks); n > 0 && passed < s.marks[n-1].passed {
		s.marks = nil // it was set anew
	}
	s.marks = append(s.marks, mark{now, passed})
	for len(s.marks) > 2 && now-s.marks[1].at >= uint64(useFor) {
		s.marks = s.marks[1:]
	}
	first := s.marks[0]
	if now-first.at < uint64(Every) {
		return 0
	}
	return float64(passed-first.passed) * 8 * 1e9 / float64(now-first.at)
}

// move moves the rate of a pool, and says why.
func (s *state) move(now uint64, p *Pool, v view, use float64, culprit bool) (why string) {
	seconds := min(float64(now-s.decided)/1e9, 1)
	s.decided = now
	since := time.Duration(now - s.lowered)
	switch {
	case v.voters == 0: // nobody knows
	case v.late && !culprit: // it is not for this pool, or not ours at all
	case v.late && s.lowered != 0 && (since < drainsIn && v.excess < time.Duration(stillFull*float64(s.delay)) ||
		since < takesEffect && v.excess < extreme*p.Above):
		s.delay = max(s.delay, v.excess)
	case v.late:
		s.tooHigh, s.lowered, s.delay = onset*s.rate, now, v.excess
		step := lower
		if v.excess > extreme*p.Above {
			step = deeper
		}
		s.rate = max(min(step*s.rate, lower*use), deepest*s.rate, float64(p.Min))
		why = fmt.Sprintf("pings to %v take %s more than the usual %s", v.of, text(v.excess), text(v.usual))
	case !v.calm:
	case use < loaded*float64(p.InForce):
		s.rate *= math.Pow(1+raiseIdle, seconds)
		why = "pings take their usual time, and the pool has little use"
	default:
		speed := raise
		switch {
		case s.lowered == 0, since > lately, s.rate > far*s.tooHigh:
			speed = raiseFar
		case s.rate > near*s.tooHigh && s.rate < past*s.tooHigh:
			speed = raiseNear
		}
		s.rate *= math.Pow(1+speed, seconds)
		why = "pings take their usual time"
	}
	s.rate = min(max(s.rate, float64(p.Min)), float64(p.Rate))
	return why
}

// lease is the lease to write, if one is due.
func (s *state) lease(now uint64, p *Pool, why string) (l Lease, due bool) {
	rate := min(max(readable(s.rate), p.Min), p.Rate)
	change := math.Abs(float64(rate)-float64(s.granted)) / float64(s.granted)
	waits := rate > s.granted && now-s.written < uint64(time.Second) // each costs a lock
	switch {
	case rate != s.granted && !waits && (change >= worthwhile || rate == p.Rate || rate == p.Min):
		s.granted, s.written = rate, now
		return Lease{p.Name, rate, why}, true
	case s.granted < p.Rate && now-s.written >= uint64(renewEvery):
		s.written = now
		return Lease{p.Name, s.granted, ""}, true
	}
	return Lease{}, false
}

// readable rounds a rate down to three digits.
func readable(rate float64) policy.Rate {
	unit := math.Pow(10, math.Floor(math.Log10(rate))-2)
	return policy.Rate(math.Floor(rate/unit) * unit)
}

// text writes a latency as people say it.
func text(d time.Duration) string {
	ms := d.Seconds() * 1e3
	if ms < 10 {
		return fmt.Sprintf("%.1f ms", ms)
	}
	return fmt.Sprintf("%.0f ms", ms)
}
