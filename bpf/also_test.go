package bpf_test

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// limited is a rule for far hosts with the given options.
func limited(tb testing.TB, options ...string) policy.Rule {
	tb.Helper()
	var l policy.Limit
	for i := 0; i < len(options); i += 2 {
		testenv.Must(tb, l.Set(options[i], options[i+1]))
	}
	r, err := l.Rule(prefix("10.0.0.0/8"))
	testenv.Must(tb, err)
	return r
}

func farHost(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}) }

// A rule with all kinds of other limits passes a packet if it conforms to all of them, and charges none if it does not. They are as
// the model of their buckets says, of the rule or of each host.
func TestOtherLimits(t *testing.T) {
	for _, each := range []string{"all", "host"} {
		t.Run(each, func(t *testing.T) {
			rule := limited(t, "rate", "500kbit", "capacity", "1600b", "each", each, "pps", "300", "pps-burst", "12",
				"new-flows", "20", "new-flows-burst", "5", "quota", "200kb/1h", "then", "64kbit")
			r := newRig(t, maps.Size{Rules: 16, Buckets: 1 << 12, Labels: 16, Also: true}, egress())
			r.put(rule, 0)
			type buckets struct{ main, flows, packets, quota, then model.Bucket }
			hosts, seen := map[int]*buckets{}, map[[2]int]uint64{}
			limits := []*model.Limit{model.NewLimit(rule)}
			for next, ok := rule.Chained(); ok; next, ok = next.Chained() {
				limits = append(limits, model.NewLimit(next))
			}
			now, passed, refused := uint64(1e9), map[bool]int{}, make([]int, len(limits))
			for i := range 30_000 {
				now += rand.Uint64N(1e6 << (i / 100 % 5)) // slow and fast senders
				host, port := rand.IntN(3), rand.IntN(4)*rand.IntN(80)
				frame := udp(addr(near4), farHost(host+1), 20+rand.IntN(190))
				frame[14+20+1], frame[14+20] = byte(port), 0
				if each == "all" {
					host = 0
				}
				if hosts[host] == nil {
					hosts[host] = &buckets{}
				}
				b, n, flow := hosts[host], uint64(len(frame)), [2]int{int(frame[33]), port}
				last, known := seen[flow]
				isNew := !known || now >= last
				fits := func(i int, of model.Bucket, n uint64) bool {
					return n == 0 || of == (model.Bucket{}) || limits[i].Level(of, now) == 0 ||
						limits[i].Level(of, now)+n<<model.BitsOf(policy.Unit(map[int]policy.Unit{1: policy.InQuota}[i])) <= limits[i].Capacity
				}
				begins := uint64(0)
				if isNew {
					begins = 1
				}
				inQuota := fits(1, b.quota, n)
				why := 0
				switch {
				case !fits(0, b.main, n):
				case !inQuota && !fits(2, b.then, n):
					why = 2
				case !fits(3, b.flows, begins):
					why = 3
				case !fits(4, b.packets, 1):
					why = 4
				default:
					why = -1
				}
				verdict, _ := send(t, r.program(), frame, meta{now: now})
				if (verdict == next) != (why < 0) {
					t.Fatalf("at %d ns: verdict %#x for %d bytes of host %d, port %d, want it refused by %d", now, verdict, n, host, port, why)
				}
				if why >= 0 {
					refused[why]++
					continue
				}
				passed[inQuota]++
				charge := func(i int, of *model.Bucket, units uint64) { limits[i].Raise(of, limits[i].Level(*of, now)+units, now) }
				charge(0, &b.main, n<<model.UnitBits)
				if isNew {
					charge(3, &b.flows, 1<<model.UnitBits)
				}
				charge(4, &b.packets, 1<<model.UnitBits)
				if inQuota {
					charge(1, &b.quota, n<<model.QuotaBits)
				} else {
					charge(2, &b.then, n<<model.UnitBits)
				}
				if left := last - min(last, now); left <= 15e9 || !known {
					seen[flow] = now + 30e9
				}
			}
			for i, n := range refused {
				if n == 0 && i != 1 {
					t.Errorf("limit %d refused nothing", i)
				}
			}
			if passed[true] == 0 || passed[false] == 0 {
				t.Errorf("passed %v packets within and beyond the quota", passed)
			}
		})
	}
}

// Over a year with a leap day and changes of the clock, a quota passes its bytes in each period of the calendar, to the byte, and
// nothing beyond.
func TestQuotaOfAYear(t *testing.T) {
	for _, c := range []struct{ period, zone string }{
		{"day", "Europe/Berlin"}, {"week@sun", "America/Santiago"}, {"month", "Europe/Berlin"}, {"month@15", "Asia/Kathmandu"}, {"day", "America/Havana"},
	} {
		t.Run(c.period+" "+c.zone, func(t *testing.T) {
			zone, err := time.LoadLocation(c.zone)
			testenv.Must(t, err)
			const quota = 10_000
			rule := limited(t, "quota", "10000b/"+c.period, "quota-zone", c.zone, "then", "drop", "each", "host")
			r := newRig(t, maps.Size{Rules: 16, Buckets: 1 << 8, Labels: 16, Also: true}, egress())
			start := time.Date(2027, 11, 20, 5, 0, 0, 0, zone)
			now, end := uint64(start.UnixNano()), uint64(start.AddDate(1, 1, 0).UnixNano())
			r.put(rule, now)
			used, renewed := map[[2]string]uint64{}, now
			refused := 0
			for now < end {
				if now += rand.Uint64N(uint64(5 * time.Hour)); rand.IntN(3) == 0 { // around midnight
					at := time.Unix(0, int64(now)).In(zone)
					now = max(now, uint64(time.Date(at.Year(), at.Month(), at.Day()+1, 0, 0, 0, 0, zone).UnixNano())+rand.Uint64N(6e9)-3e9)
				}
				if r.at(now); now-renewed > uint64(90*24*time.Hour) {
					testenv.Must(t, r.set.Store.RenewCalendars())
					renewed = now
				}
				host := 1 + rand.IntN(2)
				frame := udp(addr(near4), farHost(host), rand.IntN(200))
				n := uint64(len(frame))
				// A period begins with the first tick from its time on.
				period := [2]string{periodOf(time.Unix(0, int64(now&^(1<<30-1))).In(zone), c.period), farHost(host).String()}
				for range 60 {
					verdict, _ := send(t, r.program(), frame, meta{now: now})
					want := used[period]+n <= quota
					if (verdict == next) != want {
						t.Fatalf("%v: verdict %#x with %d of %d bytes used in %v, and a packet of %d", time.Unix(0, int64(now)).In(zone), verdict, used[period], quota, period, n)
					}
					if !want {
						refused++
						break
					}
					used[period] += n
				}
			}
			if len(used) < 20 || refused < len(used)/2 {
				t.Errorf("%d periods of two hosts, %d packets refused", len(used), refused)
			}
		})
	}
}

// periodOf names the day, week or month of a time.
func periodOf(at time.Time, period string) string {
	at = time.Date(at.Year(), at.Month(), at.Day(), 12, 0, 0, 0, at.Location()) // each day has a noon
	switch period {
	case "week@sun":
		for at.Weekday() != time.Sunday {
			at = at.AddDate(0, 0, -1)
		}
	case "month":
		return at.Format("2006-01")
	case "month@15":
		return at.AddDate(0, 0, -14).Format("2006-01")
	}
	return at.Format("2006-01-02")
}

// A flow begins with the SYN of TCP, and else with its first packet, also after 30 s without.
func TestFlowsBegin(t *testing.T) {
	tcp := func(port byte, flags byte) []byte {
		return slices.Concat([]byte{0, port, 0, 80}, zeros(8), []byte{0x50, flags}, zeros(6))
	}
	r := newRig(t, maps.Size{Rules: 16, Buckets: 1 << 8, Labels: 16, Also: true}, egress())
	rule := limited(t, "new-flows", "1", "new-flows-burst", "1000")
	six := rule
	six.Prefix = prefix("2001:db8::/32")
	others := []maps.Entry{r.set.Store.Others(r.put(rule, 0))[0], r.set.Store.Others(r.put(six, 0))[0]}
	now := uint64(1e9)
	for i, c := range []struct {
		frame  []byte
		begins uint64
	}{
		{ether(typeIPv4, ip4{proto: protoTCP}.with(tcp(1, 0x02))), 1}, // SYN
		{ether(typeIPv4, ip4{proto: protoTCP}.with(tcp(1, 0x02))), 1}, // again
		{ether(typeIPv4, ip4{proto: protoTCP}.with(tcp(1, 0xc2))), 1}, // with ECN
		{ether(typeIPv4, ip4{proto: protoTCP}.with(tcp(1, 0x12))), 0}, // SYN, ACK
		{ether(typeIPv4, ip4{proto: protoTCP}.with(tcp(2, 0x10))), 0},
		{ether(typeIPv4, ip4{proto: protoTCP}.with(tcp(3, 0x10)[:13])), 1}, // its flags are in another fragment
		{ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2))), 1},
		{ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2))), 0},
		{ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(2, 2))), 1},
		{ether(typeIPv6, ip6{proto: protoTCP}.with(tcp(1, 0x02))), 1},
		{ether(typeIPv6, ip6{proto: protoUDP}.with(udpHeader(1, 2))), 1},
		{ether(typeIPv6, ip6{proto: protoUDP}.with(udpHeader(1, 2))), 0},
		{nil, 0}, // 29 s
		{ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2))), 0},
		{nil, 0},
		{ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2))), 0},
		{ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(2, 2))), 1},
	} {
		if c.frame == nil {
			now += 29e9
			continue
		}
		before := r.set.Store.SharedLevel(others[0], now) + r.set.Store.SharedLevel(others[1], now)
		send(t, r.program(), c.frame, meta{now: now})
		if got := r.set.Store.SharedLevel(others[0], now) + r.set.Store.SharedLevel(others[1], now) - before; got != c.begins<<model.UnitBits {
			t.Errorf("packet %d counts %d units of a flow, want %d flows", i, got, c.begins)
		}
	}
}

// Over every window of t, at most burst + rate*t packets or new flows pass, and at least rate*t - burst - 1 while more are offered. A
// quota passes what is left of it and, steadily, quota*t/period; beyond it, what the rate after it allows.
func TestWindowsOfOtherLimits(t *testing.T) {
	for _, c := range []struct {
		options     []string
		burst, rate float64 // in packets, or bytes
		bytes       bool
	}{
		{[]string{"pps", "700", "pps-burst", "20"}, 20, 700, false},
		{[]string{"new-flows", "300", "new-flows-burst", "7"}, 7, 300, false},
		{[]string{"quota", "50000b/1h", "then", "drop"}, 50000, 50000. / 3600, true},
		{[]string{"quota", "50000b/month", "then", "1mbit"}, 50000 + 131072, 125000, true},
	} {
		t.Run(c.options[0]+" "+c.options[1], func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 16, Buckets: 1 << 14, Labels: 16, Also: true}, egress())
			r.put(limited(t, c.options...), 0)
			var at, sum []float64 // of packets that passed: when, in s, and how many there were before
			now, passed, largest := uint64(1e9), 0.0, 1.0
			for i := range 6000 {
				now += rand.Uint64N(600_000)
				frame := udp(addr(near4), farHost(1), rand.IntN(200))
				frame[34], frame[35] = byte(i>>8), byte(i) // each begins a flow
				if verdict, _ := send(t, r.program(), frame, meta{now: now}); verdict != next {
					continue
				}
				at, sum = append(at, float64(now)/1e9), append(sum, passed)
				n := 1.0
				if c.bytes {
					n, largest = float64(len(frame)), max(largest, float64(len(frame)))
				}
				passed += n
			}
			sum = append(sum, passed)
			for i := range at {
				for j := i; j < len(at); j++ {
					if in, most := sum[j+1]-sum[i], c.burst+c.rate*(at[j]-at[i]); in > most+1e-6 {
						t.Fatalf("%v passed in %v s, want at most %v", in, at[j]-at[i], most)
					}
				}
			}
			if least := c.rate*(at[len(at)-1]-at[0]) - c.burst - largest; passed < least || len(at) == 6000 {
				t.Errorf("%v passed, want at least %v", passed, least)
			}
		})
	}
}

// What is used of a limit stays while others come and go, at once or by a change that lasts or reverts. No id is lost.
func TestOtherLimitsStay(t *testing.T) {
	seed := testenv.Seed(t)
	limits := [][]string{{"quota", "10000b/month", "then", "8kbit"}, {"then", "drop"}, {"new-flows", "1"}, {"pps", "2"}, {"rate", "1mbit"}}
	for i, each := range []string{"all", "host"} {
		t.Run(each, func(t *testing.T) {
			roll, now := rand.New(rand.NewPCG(seed, uint64(i))), uint64(1e9)
			r := newRig(t, maps.Size{Rules: 24, Buckets: 1 << 8, Labels: 64, Also: true}, egress())
			some := func() policy.Rule {
				options := []string{"each", each}
				for i, l := range limits {
					if roll.IntN(2) == 0 && (i != 1 || slices.Contains(options, "quota")) {
						options = append(options, l...)
					}
				}
				if len(options) == 2 {
					options = append(options, "rate", "1mbit")
				}
				return limited(t, options...)
			}
			levels := func() map[policy.Unit]uint64 {
				e, _ := r.set.Find(prefix("10.0.0.0/8"))
				_, stages := r.set.Store.Stages(e, policy.MatchDst, maps.Flow{Dst: farHost(1)}, now)
				all := map[policy.Unit]uint64{}
				for _, o := range stages[0].Others {
					all[o.Unit] = o.Level
				}
				return all
			}
			r.put(some(), now)
			for range testenv.Rounds(t, 100) {
				for range roll.IntN(4) {
					send(t, r.program(), udp(addr(near4), farHost(1), 100+roll.IntN(1000)), meta{now: now})
				}
				was, planned := levels(), roll.IntN(2) == 0
				r.at(now)
				if planned {
					r.prepare(some())
					r.set.Store.Time(now+1, now+3)
					testenv.Must(t, r.set.Store.Arm())
				} else {
					r.put(some(), now)
				}
				now += 2
				r.at(now)
				is := levels()
				same := func(phase string) {
					for unit, before := range was {
						if after, has := levels()[unit]; has && after-before+7 > 14 { // 4 ns drain 5 units of 2^-20 byte, and each of two changes rounds to one
							t.Fatalf("%s: the level of unit %d was %d, and is %d", phase, unit, before, after)
						}
					}
				}
				same("after the change")
				if planned && roll.IntN(2) == 0 {
					testenv.Must(t, r.set.Store.Confirm())
				} else if planned {
					now += 2
					r.at(now)
					if same("reverted"); len(levels()) != len(was) {
						t.Fatalf("after the revert: %v, and before the change %v", levels(), was)
					}
				}
				if planned {
					r.set.Store.Finish()
					was = is
					same("in the end")
				}
			}
		})
	}
}
