package adapt

import (
	"maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A line is a queue in front of a bottleneck, in virtual time.
type line struct {
	capacity func(seconds float64) float64 // bits per second
	offered  func(seconds float64) float64 // what hosts want to send
	own      float64                       // seconds: a queue of the pool itself, full under load, in which pings wait, too
	incoming bool                          // the pool is behind the bottleneck: it counts what that lets through
	ping     func(i int, seconds float64, rtt time.Duration) (_ time.Duration, answers bool)

	queue, passed float64 // bits
	flow          float64 // what hosts send behind the bottleneck, where they learn of drops only after a while
}

const (
	tick    = time.Millisecond
	start   = uint64(1e15)
	usual   = 12 * time.Millisecond
	fullest = 0.6 // seconds of the bottleneck's queue
)

// step lets a tick pass, with a pool that passes so much.
func (l *line) step(at float64, rate policy.Rate) (used, capacity float64) {
	dt := tick.Seconds()
	capacity = l.capacity(at)
	limit := math.Min(l.offered(at), float64(rate))
	if l.incoming { // senders come close to what reaches them, some 100 ms late, and probe for a little more
		l.flow += (math.Min(l.offered(at), 1.05*float64(rate)) - l.flow) * dt / 0.1
		limit = l.flow
	}
	before := l.queue
	l.queue = math.Min(math.Max(l.queue+(limit-capacity)*dt, 0), fullest*capacity)
	used = math.Min(capacity, limit+before/dt)
	if l.incoming {
		l.passed += math.Min(used, float64(rate)) * dt
	} else {
		l.passed += limit * dt
	}
	return used, capacity
}

func always(v float64) func(float64) float64 { return func(float64) float64 { return v } }

// after is a load that begins then, when the usual latency is known.
func after(begin, v float64) func(float64) float64 {
	return func(at float64) float64 {
		if at < begin {
			return 0
		}
		return v
	}
}

// A result is what a simulation measured.
type result struct {
	utilisation, delay float64       // of the time after the first ten seconds; seconds
	rates              []policy.Rate // every 100 ms
	leases             []Lease
	silent             bool
}

func (r *result) rate(at time.Duration) policy.Rate { return r.rates[at/(100*time.Millisecond)] }

// run lets a controller adapt a pool between 5 and 50 mbit for some time.
func (l *line) run(t *testing.T, length time.Duration) (r result) {
	c := New()
	pool := Pool{Name: "p", Rate: 50e6, Min: 5e6, Above: policy.DefaultAdaptAbove, InForce: 50e6}
	for i := range 3 {
		pool.To = append(pool.To, netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}))
	}
	type answer struct {
		at, sent uint64
		from     netip.Addr
	}
	var answers []answer
	var lease, until uint64
	var used, could float64
	if l.ping == nil {
		l.ping = func(_ int, _ float64, rtt time.Duration) (time.Duration, bool) { return rtt, true }
	}
	for after := time.Duration(0); after < length; after += tick {
		now, at := start+uint64(after), after.Seconds()
		if pool.InForce = pool.Rate; now < until {
			pool.InForce = policy.Rate(lease)
		}
		u, capacity := l.step(at, pool.InForce)
		if after > 10*time.Second {
			want := math.Min(capacity, math.Min(l.offered(at), float64(pool.Rate)))
			used, could = used+math.Min(u, want), could+want
			r.delay += l.queue / capacity * tick.Seconds()
		}
		answers = slices.DeleteFunc(answers, func(a answer) bool {
			if a.at <= now {
				c.Heard(now, a.from, a.sent)
			}
			return a.at <= now
		})
		if after%(100*time.Millisecond) == 0 {
			r.rates = append(r.rates, pool.InForce)
		}
		if after%Every != 0 {
			continue
		}
		pool.Passed, pool.Waits = uint64(l.passed/8), 0
		if l.offered(at) > float64(pool.InForce) {
			pool.Waits = time.Duration(l.own * 1e9)
		}
		for _, got := range c.Decide(now, []Pool{pool}) {
			if got.Rate < pool.Min || got.Rate > pool.Rate || got.Pool != "p" {
				t.Fatalf("after %v: %+v", after, got)
			}
			r.leases = append(r.leases, got)
			lease, until = uint64(got.Rate), now+uint64(LeaseFor)
		}
		if to, ok := c.Next(now); ok {
			rtt := usual + pool.Waits + time.Duration(l.queue/capacity*1e9)
			if took, ok := l.ping(slices.Index(pool.To, to), at, rtt); ok {
				answers = append(answers, answer{now + uint64(took), now, to})
			}
		}
		r.silent = r.silent || c.Silent(now)
	}
	r.utilisation, r.delay = used/could, r.delay/(length-10*time.Second).Seconds()
	return r
}

// Lines of all kinds: queues stay short on average, and most of the capacity is used.
func TestLines(t *testing.T) {
	seed := testenv.Seed(t)
	random := rand.New(rand.NewPCG(seed, 1))
	jitter := func(most time.Duration) func(int, float64, time.Duration) (time.Duration, bool) {
		return func(_ int, _ float64, rtt time.Duration) (time.Duration, bool) {
			return rtt + time.Duration(random.Int64N(int64(most))), true
		}
	}
	steps := func(at float64) float64 {
		if int(at/60)%2 == 0 {
			return 50e6
		}
		return 20e6
	}
	var walked float64
	var walk []float64
	for range 700 {
		walked = math.Min(math.Max(walked+random.NormFloat64()*0.05, -1), 1)
		walk = append(walk, 28e6*math.Exp(0.6*walked))
	}
	lines := map[string]line{
		"steps":     {capacity: steps},
		"sine":      {capacity: func(at float64) float64 { return 30e6 + 15e6*math.Sin(at*2*math.Pi/120) }},
		"random":    {capacity: func(at float64) float64 { return walk[int(at)] }},
		"constant":  {capacity: always(20e6)},
		"own queue": {capacity: steps, own: 0.05},
		"very slow": {capacity: always(7e6)},
		"jitter":    {capacity: steps, ping: jitter(20 * time.Millisecond)},
		"one dies":  {capacity: steps, ping: func(i int, at float64, rtt time.Duration) (time.Duration, bool) { return rtt, i != 1 || at < 90 }},
		"one is lossy": {capacity: steps, ping: func(i int, _ float64, rtt time.Duration) (time.Duration, bool) {
			return rtt, i != 1 || random.IntN(2) > 0
		}},
		"one is erratic": {capacity: steps, ping: func(i int, _ float64, rtt time.Duration) (time.Duration, bool) {
			if i == 1 {
				rtt += time.Duration(random.Int64N(int64(time.Second)))
			}
			return rtt, true
		}},
	}
	for _, name := range slices.Sorted(maps.Keys(lines)) { // in one order, so that the seed repeats it
		l := lines[name]
		for _, incoming := range []bool{false, true} {
			l.incoming, l.offered, l.queue, l.passed, l.flow = incoming, after(5, 60e6), 0, 0, 0
			r := l.run(t, 600*time.Second)
			t.Logf("%s, incoming %v: %.1f %% used, %.0f ms in the queue, %d leases", name, incoming, 100*r.utilisation, 1000*r.delay, len(r.leases))
			if r.utilisation < 0.85 || r.delay > 0.05 {
				t.Errorf("%s, incoming %v: %.1f %% used, %.0f ms in the queue", name, incoming, 100*r.utilisation, 1000*r.delay)
			}
			if r.silent {
				t.Errorf("%s: silent", name)
			}
		}
	}
}

// After a step of the capacity the rate follows within seconds.
func TestRecovery(t *testing.T) {
	for _, incoming := range []bool{false, true} {
		l := line{incoming: incoming, offered: always(60e6), capacity: func(at float64) float64 {
			if at >= 60 && at < 120 {
				return 20e6
			}
			return 55e6
		}}
		r := l.run(t, 200*time.Second)
		if first := r.rate(59 * time.Second); first != 50e6 {
			t.Errorf("incoming %v: a line that is fast enough gets %v", incoming, first)
		}
		if got := r.rate(68 * time.Second); got > 22e6 {
			t.Errorf("incoming %v: 8 s after the line is slower, the rate is %v", incoming, got)
		}
		if got := r.rate(165 * time.Second); got != 50e6 {
			t.Errorf("incoming %v: 45 s after the line is fast again, the rate is %v", incoming, got)
		}
	}
}

// What is not the pools' doing changes nothing: latency without load, and unreachable reflectors.
func TestNoLoad(t *testing.T) {
	random := rand.New(rand.NewPCG(testenv.Seed(t), 2))
	lines := map[string]line{
		"late pings": {offered: always(1e6), ping: func(_ int, at float64, rtt time.Duration) (time.Duration, bool) {
			return rtt + time.Duration(100e6*(1+math.Sin(at))) + time.Duration(random.Int64N(50e6)), true
		}},
		"no answers":         {offered: always(60e6), ping: func(int, float64, time.Duration) (time.Duration, bool) { return 0, false }},
		"a queue of its own": {offered: after(5, 60e6), own: 0.05},
		"one erratic reflector": {offered: always(40e6), ping: func(i int, _ float64, rtt time.Duration) (time.Duration, bool) {
			if i == 2 {
				rtt += time.Duration(random.Int64N(int64(time.Second)))
			}
			return rtt, true
		}},
		"loaded, with jitter": {offered: always(50e6), ping: func(_ int, _ float64, rtt time.Duration) (time.Duration, bool) {
			return rtt + time.Duration(random.Int64N(20e6)), true
		}},
	}
	for _, name := range slices.Sorted(maps.Keys(lines)) {
		l := lines[name]
		l.capacity = always(51e6)
		r := l.run(t, 120*time.Second)
		if len(r.leases) > 0 {
			t.Errorf("%s: %d leases, first %+v", name, len(r.leases), r.leases[0])
		}
		if r.silent != strings.HasPrefix(name, "no ") {
			t.Errorf("%s: silent is %v", name, r.silent)
		}
	}
}

// While no reflector answers any more, a lowered rate stays. When they answer again, it goes on.
func TestSilence(t *testing.T) {
	l := line{capacity: always(20e6), offered: always(60e6), ping: func(_ int, at float64, rtt time.Duration) (time.Duration, bool) {
		return rtt, at < 60 || at > 120
	}}
	r := l.run(t, 180*time.Second)
	before := r.rate(66 * time.Second)
	for at := 66 * time.Second; at < 120*time.Second; at += time.Second {
		if got := r.rate(at); got != before || got == 50e6 {
			t.Fatalf("after %v the rate is %v, and was %v", at, got, before)
		}
	}
	if r.delay > 0.25 || !r.silent {
		t.Errorf("%.0f ms in the queue, silent %v", 1000*r.delay, r.silent)
	}
	c := New()
	c.Decide(start, []Pool{{Name: "p", Rate: 10e6, Min: 1e6, InForce: 10e6, To: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}})
	c.Next(start)
	if c.Silent(start + uint64(Every)) {
		t.Error("a reflector is silent at once")
	}
}

// A line whose usual latency rises for good, such as by another route, is adapted to once nobody uses it.
func TestAnotherRoute(t *testing.T) {
	l := line{capacity: always(100e6), offered: func(at float64) float64 {
		if int(at)%10 < 3 {
			return 1e6
		}
		return 45e6
	}, ping: func(_ int, at float64, rtt time.Duration) (time.Duration, bool) {
		if at > 60 {
			rtt += 60 * time.Millisecond
		}
		return rtt, true
	}}
	r := l.run(t, 400*time.Second)
	if got := r.rate(100 * time.Second); got == 50e6 {
		t.Error("the route changed nothing at all")
	}
	if got := r.rate(399 * time.Second); got < 49e6 {
		t.Errorf("after minutes the rate is still %v", got)
	}
}

// Latency is for the pool that uses what it has; without one, for all that pass more than their lowest rate.
func TestDirections(t *testing.T) {
	to := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	for _, test := range []struct {
		up, down float64 // what they pass, in mbit
		lowered  string
	}{
		{1, 48, "down"}, {9, 20, "up"}, {9, 48, "down up"}, {3, 20, "down up"}, {1, 20, "down"}, {3, 4, "up"}, {1, 4, ""},
	} {
		c, now := New(), start
		pools := []Pool{
			{Name: "up", Rate: 10e6, Min: 2e6, InForce: 10e6, Above: 30 * time.Millisecond, To: to},
			{Name: "down", Rate: 50e6, Min: 10e6, InForce: 50e6, Above: 30 * time.Millisecond, To: to},
		}
		var lowered []string
		for i := range 20 {
			now += uint64(Every)
			pools[0].Passed += uint64(test.up * 1e6 / 8 * Every.Seconds())
			pools[1].Passed += uint64(test.down * 1e6 / 8 * Every.Seconds())
			for _, l := range c.Decide(now, pools) {
				lowered = append(lowered, l.Pool)
			}
			if len(lowered) > 0 {
				break
			}
			addr, _ := c.Next(now)
			took := usual
			if i > 10 {
				took += 40 * time.Millisecond
			}
			c.Heard(now+uint64(took), addr, now)
		}
		if slices.Sort(lowered); strings.Join(lowered, " ") != test.lowered {
			t.Errorf("up passes %v mbit and down %v: %v is lowered", test.up, test.down, lowered)
		}
	}
}

// However many reflectors the pools have, those that answer count.
func TestManyReflectors(t *testing.T) {
	c, now := New(), start
	var pools []Pool
	for i := range byte(60) {
		pools = append(pools, Pool{
			Name: string(rune('A' + i)), Rate: 10e6, Min: 1e6, InForce: 10e6, Above: policy.DefaultAdaptAbove,
			To: []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, i})},
		})
	}
	for range 10 * len(pools) {
		c.Decide(now, pools)
		addr, _ := c.Next(now)
		c.Heard(now+uint64(usual), addr, now)
		now += uint64(Every)
	}
	for i := range pools {
		if c.look(now, &pools[i], 0).voters != 1 {
			t.Errorf("the reflector of pool %d does not count", i)
		}
	}
}
