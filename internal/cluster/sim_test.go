package cluster

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
	shapemaps "github.com/shapectl/shapectl/pkg/maps"
)

// A world runs agents in virtual time, with a store in Redis, which knows no time. What is slow, lost or stopped in it is
// decided by chance.
type world struct {
	*rand.Rand
	t                testing.TB
	now              uint64 // ns of real time, which nobody in it knows
	events           events
	count            uint64
	store            *simStore
	stops            uint64 // when the store goes on
	hosts            []*simHost
	pools            map[string][]*simPool // of each cluster
	rates            map[string]uint64     // of the clusters
	granted, unknown map[string]bool       // since then: it has granted leases, without knowing of all safe shares
	lost             map[string]uint64     // the safe shares of all hosts when the store was last lost
	faults           faults
	story            []string // what happened, for failures
	most             float64  // the largest sum of rates in force, as a part of the rate
	quota            uint64   // bytes of all hosts in each period; 0 for none
	period           time.Duration
	used             map[uint32]float64 // bytes of the quota, by day
	instances        uint32
	forgotten        bool // since then it has granted without knowing of all that may be used of it
}

// faults say how often things go wrong.
type faults struct {
	delay      time.Duration // the longest in one direction that is usual
	lost, late float64       // of requests and answers
	drift      float64       // of clocks, at most
}

type event struct {
	at, order uint64
	do        func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].order < e[j].order
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// A simHost has pools, whose leases end by themselves, and an agent, which may be stopped or killed.
type simHost struct {
	w       *world
	name    string
	speed   float64 // of its clock
	start   float64
	behind  float64 // ns: its wall clock
	pools   []*simPool
	agent   *Agent // nil if killed
	life    int    // raised when the agent is killed
	resumes uint64 // when the agent goes on
	cut     uint64 // until when nothing passes between it and the store
	wakes   uint64 // local time of the next wake-up
	kept    float64
	keptDay uint32 // of what it used of the quota before its pool was gone
}

type simPool struct {
	Pool
	host            *simHost
	ends            uint64  // local time when the lease does; it may have less than the safe share for longer
	demand          float64 // bits per second that senders offer; they do not care for drops
	counted         uint64  // local time up to which Passed and Refused are
	passed, refused float64 // bytes, with fractions
	used            float64 // of the quota
}

func newWorld(s *simStore, seed uint64, f faults) *world {
	w := &world{
		Rand: rand.New(rand.NewPCG(seed, 1)), t: s.t, store: s, faults: f, rates: map[string]uint64{}, pools: map[string][]*simPool{}, lost: map[string]uint64{},
		granted: map[string]bool{}, unknown: map[string]bool{}, used: map[uint32]float64{},
	}
	s.begin(nil)
	return w
}

func (w *world) after(d time.Duration, do func()) {
	w.count++
	heap.Push(&w.events, event{w.now + uint64(d), w.count, do})
}

func (w *world) tell(format string, a ...any) {
	w.story = append(w.story, fmt.Sprintf("%8.3f ", float64(w.now)/1e9)+fmt.Sprintf(format, a...))
}

// run goes on for some time.
func (w *world) run(d time.Duration) {
	end := w.now + uint64(d)
	for len(w.events) > 0 && w.events[0].at <= end {
		e := heap.Pop(&w.events).(event)
		w.now = e.at
		e.do()
	}
	w.now = end
}

func (h *simHost) local() uint64 { return uint64(h.start + float64(h.w.now)*h.speed) }

// wait calls do at a local time, if the agent is not killed before. A stopped agent does it later.
func (h *simHost) wait(until uint64, do func()) {
	life, d := h.life, time.Duration(0)
	if now := h.local(); until > now {
		d = time.Duration(float64(until-now)/h.speed) + 1
	}
	h.w.after(d, func() { h.unlessStopped(life, do) })
}

func (h *simHost) unlessStopped(life int, do func()) {
	switch {
	case h.life != life || h.agent == nil:
	case h.resumes > h.w.now:
		h.w.after(time.Duration(h.resumes-h.w.now), func() { h.unlessStopped(life, do) })
	default:
		do()
	}
}

func (w *world) addHost(name string) *simHost {
	h := &simHost{w: w, name: name, speed: 1 + w.faults.drift*(2*w.Float64()-1), start: 1e9 * (1 + 1e6*w.Float64())}
	w.hosts = append(w.hosts, h)
	return h
}

func (h *simHost) addPool(cluster string, weight uint64) *simPool {
	p := &simPool{host: h, Pool: Pool{Name: "p", Cluster: cluster, Rate: h.w.rates[cluster], Weight: weight, Lease: shapemaps.Lease{Safe: leastRate}}, counted: h.local()}
	p.newQuota(0)
	h.pools = append(h.pools, p)
	h.w.pools[cluster] = append(h.w.pools[cluster], p)
	return p
}

func (h *simHost) startAgent() {
	h.agent = New(h.name, h.w.Uint64())
	h.life++
	h.wake()
}

func (h *simHost) wake() {
	now := h.local()
	pools := make([]Pool, len(h.pools))
	for i, p := range h.pools {
		p.count(now)
		pools[i] = p.Pool
	}
	for _, c := range h.agent.Ask(now, pools, false) {
		h.send(c)
	}
	h.sleep()
}

// sleep wakes the agent when a request is due.
func (h *simHost) sleep() {
	next, ok := h.agent.Next()
	if !ok {
		return
	}
	h.wakes = max(next, h.local())
	at := h.wakes
	h.wait(at, func() {
		if h.wakes == at {
			h.wakes = 0
			h.wake()
		}
	})
}

// count charges what was offered since the last count.
func (p *simPool) count(now uint64) {
	for p.counted < now {
		to, rate := now, float64(p.Lease.At(p.counted))
		if p.counted < p.Lease.Until && p.Lease.Until < now {
			to = p.Lease.Until
		}
		to = p.sameDay(to)
		seconds := float64(to-p.counted) / 1e9
		p.passed += min(rate, p.demand) * seconds / 8
		p.use(min(rate, p.demand) * seconds / 8)
		p.refused += max(0, p.demand-rate) * seconds / 8
		p.counted = to
	}
	p.Passed, p.Refused = uint64(p.passed), uint64(p.refused)
}

func (h *simHost) delay() time.Duration {
	w := h.w
	d := time.Duration(w.Float64() * float64(w.faults.delay))
	if w.Float64() < w.faults.late {
		d += time.Duration(w.Float64() * float64(8*time.Second))
	}
	return d
}

func (h *simHost) lost() bool { return h.cut > h.w.now || h.w.Float64() < h.w.faults.lost }

// send brings a call to the store and its answer back.
func (h *simHost) send(c Call) {
	w, life, agent := h.w, h.life, h.agent
	answered := false
	h.wait(h.local()+uint64(Timeout), func() {
		if !answered && h.agent == agent {
			agent.Lost(h.local(), c)
			h.sleep()
		}
	})
	if h.lost() {
		return
	}
	var arrive func()
	arrive = func() {
		if w.stops > w.now {
			w.after(time.Duration(w.stops-w.now), arrive)
			return
		}
		answer := w.store.renew(c)
		if most := float64(w.quota + 1514*uint64(w.instances)); w.quota != 0 && w.faults.late == 0 && answer.Spent > most {
			w.fail("%.0f of %d bytes count as used", answer.Spent, w.quota) // late requests may count twice
		}
		if answer.Status == OK && !w.granted[c.Cluster] {
			w.granted[c.Cluster] = true
			w.forgotten = w.forgotten || w.lost[c.Cluster] > 0 && h.overspends(c.Cluster, answer.Limit)
			w.unknown[c.Cluster] = w.unknown[c.Cluster] || uint64(w.store.state(c.Cluster).Known) < w.lost[c.Cluster]
		}
		if h.lost() {
			return
		}
		w.after(h.delay(), func() {
			h.unlessStopped(life, func() {
				answered = true
				pool, lease, ok := agent.Hear(h.local(), c, answer)
				if ok {
					// The process may be stopped before it puts the lease in force.
					h.unlessStopped(life, func() { h.apply(c.Cluster, pool, lease) })
				}
				h.sleep()
			})
		})
	}
	w.after(h.delay(), arrive)
}

func (h *simHost) apply(cluster, pool string, lease shapemaps.Lease) {
	w := h.w
	for _, p := range h.pools {
		if p.Cluster != cluster || p.Name != pool {
			continue
		}
		p.count(h.local())
		before := p.Lease
		if lease.Grant.Instance == p.Quota.Instance {
			p.Quota.Bytes = lease.Grant.Bytes
		}
		p.Lease, p.ends = lease, min(lease.Until, h.local()+uint64(Length))
		if lease.Rate > before.At(h.local()) {
			w.check(cluster)
		}
		if lease.Safe > lease.Rate {
			until := lease.Until - min(lease.Until, h.local())
			w.after(time.Duration(float64(until)/h.speed)+1, func() { w.check(cluster) })
		}
	}
}

// check fails if the hosts of a cluster may use more than its rate. What a host without a lease has is no part of it.
// Neither are safe shares after the store was lost, and nobody who knew of all of them had come back when it granted leases.
func (w *world) check(cluster string) {
	var leases, safes, rate uint64
	for _, p := range w.pools[cluster] {
		rate = p.Rate
		now := p.host.local()
		use := max(uint64(p.Lease.At(now)), leastRate) - leastRate
		if now < p.ends {
			leases += use
		} else {
			safes += use
		}
	}
	if rate == 0 {
		return // all have left
	}
	w.most = max(w.most, float64(leases)/float64(rate))
	if !w.unknown[cluster] {
		leases += safes
	}
	if leases > rate {
		w.fail("%s: %d and in safe shares %d of %d bits per second are in force", cluster, leases, safes, rate)
	}
}

// lose replaces the store by one with these records, as a server without some writes has them; nil for none.
func (w *world) lose(by records) {
	for cluster, pools := range w.pools {
		var safes uint64
		for _, p := range pools {
			if p.Lease.Until != 0 {
				safes += uint64(p.Lease.Safe)
			}
		}
		w.lost[cluster] = max(safes, uint64(w.store.state(cluster).Safes)) // with answers on their way
	}
	clear(w.granted)
	w.store.begin(by)
}

func (w *world) fail(format string, a ...any) {
	w.t.Helper()
	w.tell(format, a...)
	for _, h := range w.hosts {
		for _, p := range h.pools {
			w.tell("%s %s: demand %.0f, %+v at %d: %d", h.name, p.Cluster, p.demand, p.Lease, h.local(), p.Lease.At(h.local()))
		}
	}
	for name := range w.pools {
		w.tell("%s: %+v", name, w.store.state(name))
	}
	for _, line := range w.story {
		w.t.Log(line)
	}
	w.t.FailNow()
}

// asks is the demand with the headroom, or the floor.
func (p *simPool) asks(w *world) float64 {
	return max(p.demand*(1+1./headroom), float64(p.Rate)/float64(len(w.pools[p.Cluster]))/floors, leastRate)
}

// exact is the weighted max-min fair part of each pool of a cluster.
func (w *world) exact(cluster string) map[*simPool]float64 {
	parts := map[*simPool]float64{}
	var open []*simPool
	free, weights := float64(w.rates[cluster]), 0.0
	for _, p := range w.pools[cluster] {
		open = append(open, p)
		weights += float64(p.Weight)
	}
	slices.SortFunc(open, func(a, b *simPool) int {
		return int(math.Copysign(1, a.asks(w)/float64(a.Weight)-b.asks(w)/float64(b.Weight)))
	})
	for _, p := range open {
		parts[p] = min(p.asks(w), free*float64(p.Weight)/weights)
		free -= parts[p]
		weights -= float64(p.Weight)
	}
	return parts
}

// TestSumOfLeases lets things go wrong in random histories.
func TestSumOfLeases(t *testing.T) {
	var most float64
	store := newSimStore(t)
	unknown, quotas, forgotten, used := 0, 0, 0, 0.0
	histories := testenv.Rounds(t, 200)
	for seed := range uint64(histories) {
		w := randomHistory(store, seed)
		most = max(most, w.most)
		if w.unknown[theCluster] {
			unknown++
		}
		if w.quota != 0 {
			quotas++
		}
		if w.forgotten {
			forgotten++
		} else if w.quota != 0 {
			for _, bytes := range w.used {
				used = max(used, bytes/float64(w.quota))
			}
		}
	}
	t.Logf("%d histories; at most %.4f of the rate was in leases; in %d, safe shares were forgotten", histories, most, unknown)
	t.Logf("%d with quotas, of which at most %.6f was used; in %d, its use was forgotten", quotas, used, forgotten)
}

const theCluster = "c"

func randomHistory(s *simStore, seed uint64) *world {
	w := newWorld(s, seed, faults{})
	w.faults = faults{
		delay: time.Duration(w.Float64() * float64(Timeout) * 0.6), lost: w.Float64() * 0.2, late: w.Float64() * 0.1, drift: 5e-4,
	}
	const cluster = theCluster
	w.rates[cluster] = 1e6 * (1 + w.Uint64N(1e5))
	if w.IntN(2) == 0 {
		w.quota, w.period = w.rates[cluster]*(1+w.Uint64N(5))/8, 20*time.Second
	}
	for i := range 2 + w.IntN(8) {
		h := w.addHost(fmt.Sprint("h", i))
		h.behind = w.Float64() * 3e9
		p := h.addPool(cluster, 1+w.Uint64N(4))
		p.demand = w.someDemand(cluster)
		if w.IntN(8) == 0 {
			p.Wants = w.Uint64N(w.rates[cluster]/8) + leastRate
		}
		if w.IntN(8) == 0 {
			p.Floor = w.Uint64N(w.rates[cluster]/8) + leastRate
		}
		if w.IntN(16) == 0 {
			p.Share = w.Uint64N(w.rates[cluster]/4) + leastRate
		}
	}
	for _, h := range w.hosts {
		w.after(time.Duration(w.Float64()*20e9)*time.Duration(w.IntN(2)), h.startAgent)
	}
	for range 40 {
		w.run(time.Duration(w.ExpFloat64() * 1.5e9))
		w.something(cluster)
	}
	w.run(10 * time.Second)
	w.checkQuota()
	return w
}

func (w *world) someDemand(cluster string) float64 {
	return math.Floor(float64(w.rates[cluster]) * math.Pow(10, -3*w.Float64()) * float64(w.IntN(4)) / 2)
}

// something happens in the world.
func (w *world) something(cluster string) {
	h := w.hosts[w.IntN(len(w.hosts))]
	d := time.Duration(w.ExpFloat64() * 3e9)
	switch w.IntN(12) {
	case 11:
		w.tell("%s: rebooted", h.name)
		h.reboot()
	case 0:
		if h.agent != nil {
			w.tell("%s: agent killed", h.name)
			h.agent = nil
			h.life++
		}
	case 1:
		if h.agent == nil {
			w.tell("%s: agent started", h.name)
			h.startAgent()
		}
	case 2:
		w.tell("%s: agent stopped for %v", h.name, d)
		h.resumes = max(h.resumes, w.now+uint64(d))
	case 3:
		w.tell("%s: partitioned for %v", h.name, d)
		h.cut = max(h.cut, w.now+uint64(d))
	case 4:
		w.tell("store stopped for %v", d)
		w.stops = w.now + uint64(d)
	case 5:
		if w.IntN(2) == 0 {
			break
		}
		w.tell("store restarted empty")
		w.lose(nil)
	case 6:
		w.tell("store fails over in %v, with the writes until now", d)
		kept := w.store.records()
		w.after(d, func() { w.lose(kept) })
	case 7:
		if len(h.pools) == 0 {
			w.tell("%s: gets its pool again", h.name)
			h.kept *= float64(w.IntN(2))
			h.comeBack(cluster, 1+w.Uint64N(4)).demand = w.someDemand(cluster)
		} else if w.IntN(4) == 0 {
			w.tell("%s: its pool is gone", h.name)
			h.leave()
		}
	default:
		for _, p := range h.pools {
			p.count(h.local())
			p.demand = w.someDemand(cluster)
			w.tell("%s: demand %.0f", h.name, p.demand)
		}
	}
}

// leave takes a host out of its clusters.
func (h *simHost) leave() {
	for _, p := range h.pools {
		p.count(h.local())
		h.kept, h.keptDay = p.used, p.Quota.Day
		all := h.w.pools[p.Cluster]
		h.w.pools[p.Cluster] = slices.DeleteFunc(all, func(other *simPool) bool { return other == p })
	}
	h.pools = nil
}

// TestThousandHosts has clusters whose hosts are cut off, stopped and killed, and whose store is lost.
func TestThousandHosts(t *testing.T) {
	const hosts = 1000
	w := newWorld(newSimStore(t), 1, faults{delay: 10 * time.Millisecond, lost: 1e-3, late: 1e-3, drift: 5e-4})
	for i := range hosts {
		h := w.addHost(fmt.Sprint("h", i))
		for c := range testenv.Rounds(t, 1) {
			cluster := fmt.Sprint("c", c)
			w.rates[cluster] = 10e9
			h.addPool(cluster, 1+w.Uint64N(4)).demand = w.someDemand(cluster)
		}
		w.after(time.Duration(w.Float64()*1e9), h.startAgent)
	}
	w.run(5 * time.Second)
	for i := range 50 {
		h := w.hosts[w.IntN(hosts)]
		switch until := w.now + uint64(w.Float64()*5e9); {
		case i < 10 && h.agent != nil:
			h.agent = nil
			h.life++
		case i < 30:
			h.resumes = until
		default:
			h.cut = until
		}
	}
	w.run(2 * time.Second)
	w.lose(nil)
	w.run(5 * time.Second)
	t.Logf("at most %.4f of a rate was in leases", w.most)
	if w.most < 0.95 {
		t.Fail()
	}
}
