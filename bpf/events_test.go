package bpf_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/listener"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

var allEvents = []listener.EventKind{listener.Overflow, listener.PenaltyStarts, listener.GuaranteeFails}

// listen listens at a virtual time.
func (r *rig) listen(now uint64, most uint32, kinds ...listener.EventKind) *listener.Listener {
	r.Helper()
	r.at(now)
	l, err := r.set.Store.Listeners().Listen(most, kinds...)
	testenv.Must(r, err)
	r.Cleanup(func() { l.Close() })
	return l
}

// heard are the events that a listener was told of since the last call.
func (r *rig) heard(l *listener.Listener) (all []listener.Event) {
	r.Helper()
	for {
		e, err := l.Next(time.Unix(0, 1)) // of the past: it does not wait
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return all
		}
		testenv.Must(r, err)
		all = append(all, e)
	}
}

const ms = uint64(time.Millisecond)

// start is a virtual time that is not close to 0.
const start = uint64(100 * time.Second)

func TestOverflowIsOneEventOfAnEpisode(t *testing.T) {
	for _, tt := range []struct {
		name string
		rule policy.Rule
		key  string
		kind listener.EventKind
		fate listener.Fate
	}{
		{"shared bucket", policy.Rule{}, "10.1.0.0/16", listener.Overflow, listener.Dropped},
		{"each host", policy.Rule{Each: policy.Each{Kind: policy.EachHost}}, "10.1.0.7", listener.Overflow, listener.Dropped},
		{"each subnet", policy.Rule{Each: policy.Each{Kind: policy.EachSubnet, Bits: 24}}, "10.1.0.0/24", listener.Overflow, listener.Dropped},
		{"each flow", policy.Rule{Each: policy.Each{Kind: policy.EachFlow}}, "udp,10.9.9.9:1,10.1.0.7:53", listener.Overflow, listener.Dropped},
		{"pass", policy.Rule{Excess: policy.Pass}, "10.1.0.0/16", listener.Overflow, listener.Passed},
		{"framing", policy.Rule{Framing: policy.Framing{Overhead: 24}}, "10.1.0.0/16", listener.Overflow, listener.Dropped},
		{"penalty", policy.Rule{Algorithm: policy.Leaky, Penalty: policy.Penalty{Kind: policy.PenaltyFill}}, "10.1.0.0/16", listener.PenaltyStarts, listener.Dropped},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 8, Buckets: 64}, egress())
			tt.rule.Prefix, tt.rule.Rate, tt.rule.Capacity = prefix("10.1.0.0/16"), 8_000, 1000
			e := r.put(tt.rule, start)
			l := r.listen(start, 100, allEvents...)
			frame := udp(addr("10.9.9.9"), addr("10.1.0.7"), 100)
			frame[34], frame[35] = 0, 1
			now := start
			offer := func(n int) {
				for range n {
					send(t, r.program(), frame, meta{now: now})
					now += ms
				}
			}
			offer(7) // 994 bytes, or with overhead more
			all := r.heard(l)
			offer(100)
			all = append(all, r.heard(l)...)
			if len(all) != 1 {
				t.Fatalf("%d events of one episode: %+v", len(all), all)
			}
			cause, ok := r.set.Store.Cause(all[0])
			if !ok || cause.Rule.Prefix != e.Prefix || cause.Key != tt.key || cause.From != addr("10.1.0.7") || cause.Pool != "" ||
				all[0].Kind != tt.kind || all[0].Fate != tt.fate || all[0].Capacity != 1000 || all[0].Level < 800 || all[0].Level > 1000 {
				t.Fatalf("told %+v\nof %+v", all[0], cause)
			}
			now += 1100 * ms // a second without an excess packet; 1000 bytes have drained
			r.at(now)
			testenv.Must(t, l.Renew())
			offer(100)
			if all := r.heard(l); len(all) != 1 {
				t.Fatalf("%d events of the second episode: %+v", len(all), all)
			}
		})
	}
}

// told are the events with their causes: "pool up dropped 10.1.0.7".
func (r *rig) told(l *listener.Listener) (all []string) {
	r.Helper()
	for _, e := range r.heard(l) {
		c, ok := r.set.Store.Cause(e)
		if !ok {
			r.Fatalf("the cause of %+v is not known", e)
		}
		at := c.Rule.Prefix.String()
		if c.Pool != "" {
			at = "pool " + c.Pool
		}
		all = append(all, fmt.Sprint(kindsOfEvents[e.Kind], " ", at, " ", fates[e.Fate], " ", c.Key))
	}
	return all
}

var (
	kindsOfEvents = map[listener.EventKind]string{listener.Overflow: "overflow", listener.PenaltyStarts: "penalty", listener.GuaranteeFails: "guarantee"}
	fates         = map[listener.Fate]string{listener.Dropped: "dropped", listener.Marked: "marked", listener.Delayed: "delayed", listener.Passed: "passed"}
)

func TestEventsOfPoolsQueuesAndMarks(t *testing.T) {
	pool := func(r policy.Rule) policy.Rule {
		r.Pool, r.Prefix, r.Label.Name, r.Rate, r.Capacity = true, policy.PoolKey("up"), "up", 8_000, 2000
		return r
	}
	within := policy.Rule{Prefix: prefix("10.1.0.0/16"), Rate: policy.Unlimited, Within: "up"}
	for _, tt := range []struct {
		name       string
		pool, rule policy.Rule
		ect        bool
		want       []string // in any order
	}{
		{"refused", pool(policy.Rule{}), within, false, []string{"overflow pool up dropped 10.1.0.0/16"}},
		{"refused on the slow path", pool(policy.Rule{}), with(within, func(r *policy.Rule) { r.Framing.Overhead = 4 }), false,
			[]string{"overflow pool up dropped 10.1.0.0/16"}},
		{"key of a refused packet", pool(policy.Rule{}), with(within, func(r *policy.Rule) {
			r.Rate, r.Capacity, r.Each = 80_000_000, 100_000, policy.Each{Kind: policy.EachHost}
		}), false, []string{"overflow pool up dropped 10.1.0.7"}},
		{"marked by the pool", pool(policy.Rule{Excess: policy.ECN}), within, true,
			[]string{"overflow pool up marked 10.1.0.0/16", "overflow pool up dropped 10.1.0.0/16"}},
		{"delayed by the pool", pool(policy.Rule{Excess: policy.Delay, Queue: 1000}), within, false,
			[]string{"overflow pool up delayed 10.1.0.0/16", "overflow pool up dropped 10.1.0.0/16"}},
		{"the rule below a pool", pool(policy.Rule{}), with(within, func(r *policy.Rule) { r.Rate, r.Capacity = 8_000, 1000 }), false,
			[]string{"overflow 10.1.0.0/16 dropped 10.1.0.0/16"}},
		{"delayed by the rule", pool(policy.Rule{}), policy.Rule{Prefix: within.Prefix, Rate: 8_000, Capacity: 1000, Excess: policy.Delay, Queue: 1000}, false,
			[]string{"overflow 10.1.0.0/16 delayed 10.1.0.0/16", "overflow 10.1.0.0/16 dropped 10.1.0.0/16"}},
		{"marked by the rule", pool(policy.Rule{}), policy.Rule{Prefix: within.Prefix, Rate: 8_000, Capacity: 1000, Excess: policy.ECN}, true,
			[]string{"overflow 10.1.0.0/16 marked 10.1.0.0/16", "overflow 10.1.0.0/16 dropped 10.1.0.0/16"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newForest(t, 64)
			f.putIn(tt.pool, start)
			f.putIn(tt.rule, start)
			l := f.listen(start, 100, allEvents...)
			f.at(start + 10*uint64(time.Second)) // by the clock of these tests, a delayed packet is told of when it leaves
			testenv.Must(t, l.Renew())
			for range 60 {
				frame, m := sized(addr("10.1.0.7"), 100, 0, start)
				if tt.ect {
					frame[15] |= 2
				}
				send(t, f.program(), frame, m)
			}
			got := f.told(l)
			slices.Sort(got)
			slices.Sort(tt.want)
			if !slices.Equal(got, tt.want) {
				t.Fatalf("told %q, want %q", got, tt.want)
			}
		})
	}
}

// with returns a rule with a change.
func with(r policy.Rule, change func(*policy.Rule)) policy.Rule {
	change(&r)
	return r
}

// A bucket that has room may refuse a packet for its fair shares. The event says whose share of what that is.
func TestEventsOfFairShares(t *testing.T) {
	pool := func(name string, share policy.ShareKind, within policy.Within) policy.Rule {
		return policy.Rule{Pool: true, Prefix: policy.PoolKey(name), Label: policy.Label{Name: name}, Rate: 8_000_000, Capacity: 100_000,
			Share: policy.Share{Kind: share}, Within: within}
	}
	rule := policy.Rule{Prefix: prefix("10.1.0.0/16"), Rate: 80_000_000, Capacity: 1_000_000, Within: "up"}
	shared := with(rule, func(r *policy.Rule) { r.Share.Kind = policy.ShareFlow })
	large := func(r policy.Rule) policy.Rule { r.Rate, r.Capacity = 80_000_000, 1_000_000; return r }
	for _, tt := range []struct {
		name  string
		rules []policy.Rule
		want  string
	}{
		{"a rule below a full pool", []policy.Rule{pool("up", policy.ShareMember, ""), shared}, "pool up: 10.1.0.0/16"},
		{"a flow of a rule alone", []policy.Rule{with(shared, func(r *policy.Rule) { r.Within, r.Rate, r.Capacity = "", 8_000_000, 100_000 })}, "pool : a flow of 10.1.0.7"},
		{"a host of a pool", []policy.Rule{pool("up", policy.ShareHost, ""), rule}, "pool up: 10.1.0.7"},
		{"a rule of a pool", []policy.Rule{pool("up", policy.ShareMember, ""), rule}, "pool up: 10.1.0.0/16"},
		{"a pool below a full pool", []policy.Rule{pool("top", policy.ShareMember, ""), large(pool("up", policy.ShareFlow, "top")), rule}, "pool top: up"},
		{"a full pool without shares", []policy.Rule{pool("up", policy.ShareNone, ""), shared}, "pool up: "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newForest(t, 64)
			for _, r := range tt.rules {
				f.putIn(r, start)
			}
			l := f.listen(start, 100, allEvents...)
			var all []listener.Event
			for now := start; len(all) == 0 && now < start+2000*ms; now += ms / 4 { // 6 times the rate, and another host has a tenth of it
				frame, m := sized(addr("10.1.0.7"), 1500, 0, now)
				send(t, f.program(), frame, m)
				if now%(20*ms) == 0 {
					frame, m = sized(addr("10.1.0.8"), 250, 0, now)
					send(t, f.program(), frame, m)
				}
				f.at(now)
				all = f.heard(l)
			}
			if len(all) == 0 {
				t.Fatal("no event")
			}
			c, ok := f.set.Store.Cause(all[0])
			if got := "pool " + c.Pool + ": " + c.Sharer; !ok || got != tt.want {
				t.Errorf("%q is the cause, want %q: %+v, %+v", got, tt.want, all[0], c)
			}
			if c.Level < c.Capacity/4 || c.Sharer == "" && c.Level < c.Capacity*9/10 {
				t.Errorf("the bucket has %d bytes of %d", c.Level, c.Capacity)
			}
		})
	}
}

// Two hosts are guaranteed a rate for one. So the second is refused within its own guarantee.
func TestGuaranteeThatIsRefusedIsAnEvent(t *testing.T) {
	f := newForest(t, 64)
	f.putIn(policy.Rule{Pool: true, Prefix: policy.PoolKey("up"), Label: policy.Label{Name: "up"}, Rate: 80_000, Capacity: 2000}, start)
	f.putIn(policy.Rule{Prefix: prefix("10.1.0.0/16"), Rate: 800_000, Capacity: 100_000, Within: "up", Each: policy.Each{Kind: policy.EachHost},
		Guarantee: 80_000, Members: 1}, start)
	l := f.listen(start, 100, allEvents...)
	offer := func(host string, n int) {
		for range n {
			frame, m := sized(addr(host), 1000, 0, start)
			send(t, f.program(), frame, m)
		}
	}
	offer("10.1.0.7", 50)
	if got, want := f.told(l), []string{"overflow pool up dropped 10.1.0.7"}; !slices.Equal(got, want) {
		t.Fatalf("told %q of a host beyond its guarantee, want %q", got, want)
	}
	offer("10.1.0.8", 1)
	if got, want := f.told(l), []string{"guarantee pool up dropped 10.1.0.8"}; !slices.Equal(got, want) {
		t.Fatalf("told %q of a host within its guarantee, want %q", got, want)
	}
}

// flood sends packets of so many hosts, each one beyond its bucket.
func (r *rig) flood(hosts int, now uint64) {
	r.Helper()
	for i := range hosts {
		frame, m := sized(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 1000, 0, now)
		send(r, r.program(), frame, m)
		send(r, r.program(), frame, m)
	}
}

func eachHost() policy.Rule {
	return policy.Rule{Prefix: prefix("10.1.0.0/16"), Rate: 8_000, Capacity: 1000, Each: policy.Each{Kind: policy.EachHost}}
}

func TestEventsBeyondTheMostAreCounted(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 8, Buckets: 1 << 14}, bySource())
	r.put(eachHost(), start)
	const most, hosts = 10, 3000
	few, all := r.listen(start, most, allEvents...), r.listen(start, hosts, allEvents...)
	ring := 0 // a ring holds some hundred events
	for i := 0; i < hosts; i += 100 {
		for host := i; host < i+100; host++ {
			frame, m := sized(netip.AddrFrom4([4]byte{10, 1, byte(host >> 8), byte(host)}), 1000, 0, start)
			send(t, r.program(), frame, m)
			send(t, r.program(), frame, m)
		}
		ring += len(r.heard(all))
	}
	if ring < hosts*8/10 || ring+int(all.LeftOut()) != hosts { // its memory is for 4096, and some have no place in it
		t.Errorf("a listener that takes all was told of %d of %d events, and %d were left out", ring, hosts, all.LeftOut())
	}
	if told := r.heard(few); len(told) != most || few.LeftOut() != hosts-most {
		t.Errorf("a listener that takes %d was told of %d, and %d were left out", most, len(told), few.LeftOut())
	}
	// In the next tick it is told again, and how many were left out.
	later := start + 2<<30
	r.at(later)
	testenv.Must(t, few.Renew())
	frame, m := sized(addr("10.1.250.1"), 1000, 0, later)
	send(t, r.program(), frame, m)
	send(t, r.program(), frame, m)
	if told := r.heard(few); len(told) != 1 || told[0].LeftOut != hosts-most {
		t.Errorf("after that it was told %+v, want one event with %d left out", told, hosts-most)
	}
}

// Under a spray, whether a packet begins an episode is not known for all. These are left out, and none is told twice.
func TestSprayIsToldOnce(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 8, Buckets: 1 << 16}, bySource())
	r.put(eachHost(), start)
	l := r.listen(start, 1<<20, allEvents...)
	told := map[string]int{}
	const hosts = 8000 // twice the memory of a listener
	for range 2 {
		for i := 0; i < hosts; i += 200 {
			for host := i; host < i+200; host++ {
				frame, m := sized(netip.AddrFrom4([4]byte{10, 1, byte(host >> 8), byte(host)}), 1000, 0, start)
				send(t, r.program(), frame, m)
				send(t, r.program(), frame, m)
			}
			for _, line := range r.told(l) {
				told[line]++
			}
		}
	}
	for line, n := range told {
		if n > 1 {
			t.Errorf("told %d times: %s", n, line)
		}
	}
	if len(told) < 2000 || len(told)+int(l.LeftOut()) < hosts {
		t.Errorf("%d were told and %d left out, of %d hosts", len(told), l.LeftOut(), hosts)
	}
}

func (r *rig) listeners() (n int) {
	slots := r.set.Store.Listeners()
	for _, lease := range slots.Change.Leases {
		if lease > slots.Now() {
			n++
		}
	}
	return n
}

func (r *rig) isHeard() bool { return r.set.Store.Listeners().Change.ListenedUntil != 0 }

func TestKilledListenerCostsNothingAndIsReplaced(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 8, Buckets: 4096}, bySource())
	r.put(eachHost(), start)
	if r.flood(100, start); r.isHeard() {
		t.Fatal("packets look for listeners though there never was one")
	}
	const slots = 8
	for range slots { // none of these is closed
		_, err := r.set.Store.Listeners().Listen(100, allEvents...)
		testenv.Must(t, err)
	}
	if _, err := r.set.Store.Listeners().Listen(100, allEvents...); !errors.Is(err, listener.ErrFull) {
		t.Fatalf("a ninth listener: %v", err)
	}
	if n := r.listeners(); n != slots {
		t.Errorf("%d listen, want %d", n, slots)
	}
	now := start + uint64(listener.Lease) + ms
	if r.at(now); !r.isHeard() {
		t.Fatal("no packet looks for listeners")
	}
	if r.flood(1, now); r.isHeard() {
		t.Error("packets still look for listeners after all leases have ended")
	}
	l := r.listen(now, 100, allEvents...)
	if n := r.listeners(); n != 1 {
		t.Errorf("%d listen, want 1", n)
	}
	r.flood(1, now+uint64(2*time.Second))
	if told := r.heard(l); len(told) != 1 {
		t.Errorf("the new listener was told %+v", told)
	}
	testenv.Must(t, l.Close())
	if r.flood(1, now+uint64(2*time.Second)); r.isHeard() {
		t.Error("packets look for listeners after the last one has ended")
	}
}

func TestLostLease(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 8, Buckets: 64}, bySource())
	l := r.listen(start, 100, allEvents...)
	r.at(start + uint64(listener.Lease) + ms)
	r.set.Store.Listeners().Drop()
	if err := l.Renew(); !errors.Is(err, listener.ErrLost) {
		t.Errorf("renewed a slot that was freed: %v", err)
	}
	other := r.listen(start+uint64(listener.Lease)+ms, 100, allEvents...)
	testenv.Must(t, l.Close())
	if n := r.listeners(); n != 1 {
		t.Errorf("%d listen after a listener without a slot has ended, want the other one", n)
	}
	testenv.Must(t, other.Renew())
}

// Ears compare the events of packets with those that the model predicts.
type ears struct {
	*listener.Listener
	last map[string]uint64 // ns: of an episode, as the listener's memory has it
}

// listenAgain begins without a memory. Nobody listens where packets are delayed: their events have the time of departure if the
// clock is virtual, and a memory needs times in order.
func (f *forest) listenAgain(now uint64) {
	f.Helper()
	if f.ears != nil {
		testenv.Must(f, f.ears.Close())
		f.ears = nil
	}
	if slices.ContainsFunc(slices.Concat(f.rules, f.pools), func(s *mirroredStage) bool { return s.rule.Excess == policy.Delay }) {
		return
	}
	f.at(now)
	l, err := f.set.Store.Listeners().Listen(1<<20, allEvents...)
	testenv.Must(f, err)
	f.ears = &ears{l, map[string]uint64{}}
}

// renew renews the lease beyond the departure of a packet, which is the time of its event where the clock is virtual.
func (e *ears) renew(f *forest, now uint64) {
	f.Helper()
	f.at(now + uint64(time.Hour))
	testenv.Must(f, e.Renew())
	f.at(now)
}

// hear compares what was told of a packet with what the model says of its stages.
func (e *ears) hear(f *forest, stages []*mirroredStage, want model.Passage, host netip.Addr) {
	f.Helper()
	rule, at := stages[0].rule, max(want.Refuses, 0)
	fate := listener.Dropped
	if want.Verdict != model.Drop {
		for i := range stages {
			if want.At[i].Verdict != model.Pass {
				at = i
			}
		}
		switch {
		case want.Verdict == model.Mark:
			fate = listener.Marked
		case want.Verdict == model.Delay:
			fate = listener.Delayed
		default:
			fate = listener.Passed
		}
	}
	told := f.heard(e.Listener)
	if fate == listener.Passed && !want.Excess {
		if len(told) != 0 {
			f.Fatalf("packet %d conforms, but told %+v", f.packets, told)
		}
		return
	}
	kind, quiet := listener.Overflow, uint64(time.Second)
	if (fate == listener.Dropped || fate == listener.Passed) && at == 0 && rule.Penalty.Kind != policy.PenaltyNone {
		kind, quiet = listener.PenaltyStarts, max(quiet, uint64(rule.Penalty.Duration))
	}
	if at > 0 && rule.Guarantee != 0 {
		return // the frame is shorter than the packet that it stands for, so it may seem to be within its guarantee
	}
	episode := fmt.Sprint(stages[0].entry.ID, stages[at].entry.ID, fate)
	if at == 0 {
		episode += fmt.Sprint(keyOf(rule, host))
	}
	now := want.Departure
	last, known := e.last[episode]
	if !known || last+uint64(time.Second)>>4 < now {
		e.last[episode] = now
	}
	if known && last+quiet > now {
		if len(told) != 0 {
			f.Fatalf("packet %d: told %+v of an episode that goes on", f.packets, told)
		}
		return
	}
	if len(told) != 1 || told[0].Kind != kind || told[0].Fate != fate || told[0].Key.Id != stages[0].entry.ID || told[0].Limit != stages[at].entry.ID {
		f.Fatalf("packet %d of %v: told %+v, want kind %d, fate %d, rule %d, limit %d (stage %d)\n%+v\n%+v", f.packets, host, told, kind, fate,
			stages[0].entry.ID, stages[at].entry.ID, at, want, rule)
	}
}
