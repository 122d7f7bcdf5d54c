package model

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A sender offers packets of some sizes to a bucket with fair shares.
type sender struct {
	weight       uint64
	rate         float64 // bytes/s
	size         uint64
	jitter       float64 // of the time between two packets, as a part of it
	next         float64 // ns
	sharer       Sharer
	offered, got []uint64 // bytes, by slice of time
}

type senders []*sender

func (s senders) Len() int           { return len(s) }
func (s senders) Less(i, j int) bool { return s[i].next < s[j].next }
func (s senders) Swap(i, j int)      { s[i], s[j] = s[j], s[i] }
func (s *senders) Push(x any)        { *s = append(*s, x.(*sender)) }
func (s *senders) Pop() any          { panic("senders never end") }

const sliceNS = 250_000_000

// play offers all packets for some seconds, and checks the bound of the bucket.
func (all senders) play(t *testing.T, random *rand.Rand, rule policy.Rule, seconds int) {
	limit := NewLimit(rule)
	share := &Share{ShareParams: limit.ShareParams()}
	bucket := limit.WithLevel(0, 0)
	for _, s := range all {
		s.offered, s.got = make([]uint64, seconds*1e9/sliceNS), make([]uint64, seconds*1e9/sliceNS)
	}
	queue := slices.Clone(all)
	for _, s := range queue { // not all at once
		s.next = random.Float64() * float64(s.size) / s.rate * 1e9
	}
	heap.Init(&queue)
	var passed, largest uint64
	for {
		s := queue[0]
		now := uint64(s.next)
		at := now / sliceNS
		if at >= uint64(len(s.offered)) {
			return
		}
		n := s.size
		largest = max(largest, n)
		s.offered[at] += n
		level := limit.Level(bucket, now)
		share.keepTime(limit.Meter, now, level, nil)
		if limit.Conforms(level, n) && share.Judge(limit.Meter, &s.sharer, s.weight, n, level, new(Load)) == WithinShare {
			limit.Charge(&bucket, now, n<<UnitBits)
			share.Charge(&s.sharer, s.weight, n)
			s.got[at] += n
			passed += n
		}
		if most := rule.Capacity + largest + uint64(float64(rule.Rate)/8e9*s.next) + 1; passed > most {
			t.Fatalf("%d bytes passed in %d ns, and at most %d may", passed, now, most)
		}
		s.next += float64(n) / s.rate * 1e9 * (1 + s.jitter*(2*random.Float64()-1))
		heap.Fix(&queue, 0)
	}
}

// parts divides bytes among demands by weighted max-min.
func (all senders) parts(demand []float64, bytes float64) []float64 {
	part, open := make([]float64, len(all)), make([]bool, len(all))
	for i := range open {
		open[i] = true
	}
	for {
		weights := 0.0
		for i, s := range all {
			if open[i] {
				weights += float64(s.weight)
			}
		}
		if weights == 0 {
			return part
		}
		each, settled := bytes/weights, false
		for i, s := range all {
			if open[i] && demand[i] <= each*float64(s.weight) {
				part[i], open[i], settled = demand[i], false, true
				bytes -= demand[i]
			}
		}
		if settled {
			continue
		}
		for i, s := range all {
			if open[i] {
				part[i] = each * float64(s.weight)
			}
		}
		return part
	}
}

// worst is the largest error of any sender's bytes in any window of some seconds from the first second on, but for one packet, as a part of its
// fair share; the least part of the rate that passed in any window; and the largest part of its bytes that a sender below 90 % of its
// share lost.
func (all senders) worst(seconds int, rate float64) (worst, least, lost float64) {
	const second = 1e9 / sliceNS
	least = math.Inf(1)
	demand, got := make([]float64, len(all)), make([]float64, len(all))
	for begin := int(second); begin+seconds*second <= len(all[0].got); begin++ {
		total := 0.0
		for i, s := range all {
			demand[i], got[i] = 0, 0
			for k := begin; k < begin+seconds*second; k++ {
				demand[i] += float64(s.offered[k])
				got[i] += float64(s.got[k])
			}
			total += got[i]
		}
		least = min(least, total/(rate*float64(seconds)))
		level, weight := 0.0, 0.0 // of those that get less than they offer
		parts := all.parts(demand, total)
		for i, part := range parts {
			if part < demand[i] {
				level, weight = part/float64(all[i].weight), 1
			}
		}
		for i, part := range parts {
			if part == 0 {
				continue
			}
			worst = max(worst, (math.Abs(got[i]-part)-float64(all[i].size))/part)
			if weight > 0 && demand[i] < 0.9*level*float64(all[i].weight) {
				lost = max(lost, (demand[i]-got[i]-float64(all[i].size))/demand[i])
			}
		}
	}
	return worst, least, lost
}

// The worst errors from the first second on, by exact water-filling of what passed: at most 10 % over any 2 s with up to
// 200 senders, and 25 % over any 5 s with up to 4000, but for one packet of the sender.
func TestSharesAreMaxMin(t *testing.T) {
	numbers := []int{375, 399, 966} // those who send most have little weight, and others with more come and go
	for i := range testenv.Rounds(t, 4) {
		numbers = append(numbers, i)
	}
	for _, i := range numbers {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(13, uint64(i)))
			rate := policy.Rate(math.Exp(math.Log(10e6) + random.Float64()*math.Log(100)))
			n, window, most := 2+random.IntN(199), 2, 0.10
			if i%4 == 0 {
				n, window, most = 200+random.IntN(3800), 5, 0.25
			}
			capacity := max(128<<10, uint64(rate)/8000*[]uint64{50, 100, 300}[random.IntN(3)])
			all := crowd(random, n, float64(rate)/8, float64(window))
			all.play(t, random, policy.Rule{Rate: rate, Capacity: capacity, Share: policy.Share{Kind: policy.ShareHost}}, 2*window+2)
			worst, least, lost := all.worst(window, float64(rate)/8)
			// A window may begin with a full bucket and end with one that is half full.
			if most := float64(capacity) / (float64(rate) / 8 * float64(window)) / 2; least < 1-most {
				t.Errorf("%.1f %% of the rate passed in a window", 100*least)
			}
			if worst > most || lost > 0.01 {
				t.Errorf("%d senders, %v, %d bytes: error %.1f %%, least total %.1f %%, senders below 90 %% of their share lost up to %.2f %%",
					n, rate, capacity, 100*worst, 100*least, 100*lost)
			}
		})
	}
}

// A sharer that is alone is never beyond its share, however its packets come: TCP sends large ones in bursts, and after a
// loss only one in a while.
func TestShareOfOne(t *testing.T) {
	const burst, size = 20, 65226
	for _, gap := range []uint64{1_000_000, 53_000_000, 212_000_000, 900_000_000} {
		limit := NewLimit(policy.Rule{Rate: 200_000_000, Capacity: 7_500_000, Share: policy.Share{Kind: policy.ShareMember}})
		share, sharer, now, passed := &Share{ShareParams: limit.ShareParams(), Last: NotYet}, Sharer{}, uint64(0), uint64(0)
		bucket := limit.WithLevel(0, 0)
		for i := range 2000 {
			level := limit.Level(bucket, now)
			share.keepTime(limit.Meter, now, level, nil)
			if v := share.Judge(limit.Meter, &sharer, 1, size, level, new(Load)); v != WithinShare {
				t.Errorf("gaps of %d ns: packet %d at %d ns is beyond the share, while the level is %d bytes", gap, i, now, level>>UnitBits)
				break
			}
			limit.Charge(&bucket, now, size<<UnitBits)
			share.Charge(&sharer, 1, size)
			passed += size
			if i%burst == 0 || i > 1000 { // bursts, then single packets
				now += gap
			}
			if due := passed * 8 * 1e9 / 150_000_000; now < due {
				now = due
			}
		}
	}
}

// crowd is senders with random weights, sizes and rates that offer more than a rate (bytes/s) in all. Each sends at least some packets
// in a window of so many seconds: of fewer, one more or less is a large part.
func crowd(random *rand.Rand, n int, rate, window float64) (all senders) {
	weights := 0.0
	for range n {
		s := &sender{weight: 1 + random.Uint64N(8), jitter: random.Float64() / 2}
		weights += float64(s.weight)
		all = append(all, s)
	}
	for _, s := range all {
		part := rate * float64(s.weight) / weights
		s.rate = part * math.Exp(math.Log(.05)+random.Float64()*math.Log(400))
		largest := min(max(part*window/20, 64), 65226)
		s.size = uint64(math.Exp(math.Log(64) + random.Float64()*math.Log(largest/64)))
	}
	all[0].rate += rate
	return all
}

// A packet beyond the share of its rule, which may pass it all the same, has no claim in the pool above.
func TestLoadBeyondShare(t *testing.T) {
	limit := NewLimit(policy.Rule{Rate: 8_000_000, Capacity: 100_000, Share: policy.Share{Kind: policy.ShareHost}})
	m := limit.Meter
	s := &Share{ShareParams: limit.ShareParams()}
	s.keepTime(m, 1e9, 0, nil)
	s.Ahead, s.Most, s.Credit = 1<<40, math.MaxUint32, 1<<40
	var b Sharer
	s.Charge(&b, 1, 100)
	load := Heavy
	if got := s.Judge(m, &b, 1, 100, 0, &load); got != WithinShare || load != Light {
		t.Fatalf("in an empty bucket it is %v, with load %v", got, load)
	}
	if got := s.Judge(m, &b, 1, 100, m.Capacity, &load); got != BeyondShare || load != Heavy {
		t.Errorf("in a full bucket it is %v, with load %v", got, load)
	}
}
