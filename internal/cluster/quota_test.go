package cluster

import (
	"fmt"
	"math"
	"testing"
	"time"

	shapemaps "github.com/shapectl/shapectl/pkg/maps"
)

// newQuota has the kernel of a host know no more of its pool's quota than what was kept.
func (p *simPool) newQuota(kept float64) {
	if w := p.host.w; w.quota != 0 {
		w.instances++
		p.Quota = shapemaps.ClusterQuota{Grant: shapemaps.Grant{Instance: w.instances}, Whole: w.quota, Day: p.day(p.counted)}
		p.used, p.Quota.Used = kept, uint64(math.Ceil(kept))
	}
}

// comeBack gives a host its pool again, which goes on from what was kept when it left.
func (h *simHost) comeBack(cluster string, weight uint64) *simPool {
	p := h.addPool(cluster, weight)
	if p.Quota.Day == h.keptDay {
		p.newQuota(h.kept)
	}
	h.wait(h.local(), h.wake)
	return p
}

// day is that of a host's local time, by its wall clock.
func (p *simPool) day(local uint64) uint32 {
	h := p.host
	return 1 + uint32(max(0, (float64(local)-h.start)/h.speed-h.behind)/float64(h.w.period))
}

// sameDay is a time from that on which nothing is counted yet, but not beyond the day of that. It begins the day.
func (p *simPool) sameDay(until uint64) uint64 {
	if p.Quota.Whole == 0 {
		return until
	}
	h := p.host
	if day := p.day(p.counted); day > p.Quota.Day {
		p.Quota.Day, p.used = day, 0
	}
	ends := h.start + (float64(p.Quota.Day)*float64(h.w.period)+h.behind)*h.speed
	return min(until, max(p.counted, uint64(ends))+1)
}

// use uses the quota for so many bytes, as far as they conform: the first packet always does.
func (p *simPool) use(bytes float64) {
	const packet = 1514
	passes := max(0, min(bytes, float64(p.Quota.Bytes)-p.used))
	if p.used == 0 {
		passes = max(passes, min(bytes, packet))
	}
	p.used += passes
	p.host.w.used[p.Quota.Day] += passes
	p.Quota.Used = uint64(math.Ceil(p.used))
}

// reboot has a host lose its agent and lease, and what it used or only the last of it.
func (h *simHost) reboot() {
	h.agent = nil
	h.life++
	for _, p := range h.pools {
		p.count(h.local())
		p.Lease = shapemaps.Lease{Safe: leastRate}
		p.newQuota(p.used * float64(h.w.IntN(2)) * h.w.Float64())
	}
	h.startAgent()
}

// overspends reports whether hosts may use more of the quota than the store knows when it gives this one a limit.
func (h *simHost) overspends(cluster string, limit float64) bool {
	w, c := h.w, h.w.store.state(cluster)
	may := 0.0
	for _, p := range w.pools[cluster] {
		if p.count(p.host.local()); float64(p.Quota.Day) == c.Day {
			may -= p.used
		}
		if may += max(p.used, float64(p.Quota.Bytes)); p.host == h {
			may += max(0, limit-float64(p.Quota.Bytes))
		}
	}
	return w.quota != 0 && c.Members > 0 && may+w.used[uint32(c.Day)] > c.Spent+max(0, c.SpentKnown-c.SpentSeen)+1514*float64(w.instances)
}

// checkQuota fails if more passed in a period than the quota, and a packet of each instance.
func (w *world) checkQuota() {
	for day, used := range w.used {
		if most := float64(w.quota + 1514*uint64(w.instances)); w.quota != 0 && !w.forgotten && used > most {
			w.fail("on day %d, %.0f of %d bytes were used", day, used, w.quota)
		}
	}
}

// TestQuotaIsUsedUp has busy hosts use all of a quota, whatever their share, and idle ones strand nothing.
func TestQuotaIsUsedUp(t *testing.T) {
	store := newSimStore(t)
	for _, hosts := range []int{1, 3, 20, 100} {
		w := newWorld(store, uint64(hosts), faults{delay: 10 * time.Millisecond, lost: 1e-3, drift: 5e-4})
		w.rates[theCluster] = 10e9
		w.quota, w.period = 100<<30, 3*time.Minute
		for i := range hosts {
			h := w.addHost(fmt.Sprint("h", i))
			h.behind = w.Float64() * 3e9
			h.addPool(theCluster, 1).demand = 20e9 / float64(1+i) * float64((i+1)%2)
			w.after(time.Duration(w.Float64()*1e9), h.startAgent)
		}
		w.run(3 * w.period)
		for _, h := range w.hosts {
			h.pools[0].count(h.local())
		}
		w.checkQuota()
		for day := uint32(1); day <= 3; day++ {
			left := float64(w.quota) - w.used[day]
			t.Logf("%d hosts, day %d: %.0f bytes are left", hosts, day, left)
			if left > 1e6 {
				t.Errorf("%d hosts leave %.0f bytes", hosts, left)
			}
		}
	}
}

// What a host used that left counts, also if it was the last one, and once if it comes back.
func TestQuotaOfHostsThatComeBack(t *testing.T) {
	w := newWorld(newSimStore(t), 1, faults{})
	w.rates[theCluster], w.quota, w.period = 1e9, 1e9, time.Minute
	w.addHost("a").startAgent()
	w.addHost("b").startAgent()
	for turn := range 30 {
		h := w.hosts[turn%2]
		h.comeBack(theCluster, 1).demand = 5e8
		w.run(5 * time.Second)
		h.leave()
		w.run(time.Second)
	}
	w.checkQuota()
}
