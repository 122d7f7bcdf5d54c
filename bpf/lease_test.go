package bpf_test

import (
	"errors"
	"fmt"
	"math/big"
	"math/rand/v2"
	"testing"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A leasedPool is a pool in the kernel, and what is known of the room in its bucket without a byte clock.
type leasedPool struct {
	*rig
	rule          policy.Rule // the pool
	lease         maps.Lease
	numbers       model.Meter // those in force: only the rate and the capacity are used
	granted, safe model.Meter // those of the lease
	room          int64       // units
	at            uint64      // ns: of the room
	passed        uint64      // bytes
	allowed       int64       // units: what the rates since the start have allowed, and the room then
}

func meterOf(r policy.Rule) model.Meter { return model.NewLimit(r).Meter }

// much is more units than any bucket holds.
const much = 1 << 61

// leaked is what the rate in force allows up to a time, or much.
func (p *leasedPool) leaked(to uint64) int64 {
	if float64(p.numbers.RateUnits)*float64(to-p.at) > much<<32 {
		return much
	}
	clock := model.Meter{RateUnits: p.numbers.RateUnits}
	return int64(clock.Clock(to) - clock.Clock(p.at))
}

// advance adds the room that comes up to a time. A lease ends meanwhile.
func (p *leasedPool) advance(to uint64) {
	if end := p.lease.Until; p.rule.HasLeases() && p.at < end && end <= to {
		p.fill(end)
		p.use(p.safe)
	}
	p.fill(to)
}

func (p *leasedPool) fill(to uint64) {
	leaked := p.leaked(to)
	p.allowed = min(p.allowed, much) + leaked
	p.room, p.at = min(p.room+leaked, int64(p.numbers.Capacity)), to
}

// use switches to another rate and capacity.
func (p *leasedPool) use(m model.Meter) {
	p.numbers = m
	p.room = min(p.room, int64(m.Capacity))
}

// become is a change of the pool at the present.
func (p *leasedPool) become(rule policy.Rule) {
	had := p.rule
	p.rule = rule
	if rule.HasLeases() {
		p.renewed(inherited(p.lease, had, rule))
	} else {
		p.use(meterOf(rule))
	}
}

// inherited is the lease of a pool's own: on its rate, or what its cluster granted or its line allowed before.
func inherited(l maps.Lease, had, rule policy.Rule) maps.Lease {
	own := maps.Lease{Rate: rule.SafeRate(), Safe: rule.SafeRate()}
	part := func(of policy.Rate) policy.Rate {
		product := new(big.Int).Mul(big.NewInt(int64(of)), big.NewInt(int64(rule.Rate)))
		return max(policy.Rate(product.Div(product, big.NewInt(int64(had.Rate))).Int64()), policy.MinRate)
	}
	switch {
	case had.Lessor() != rule.Lessor() || l.Until == 0:
		return own
	case rule.Adapt.Min != 0:
		own.Rate, own.Until = min(own.Rate, l.Rate), l.Until
		return own
	case rule.Rate < had.Rate:
		l.Rate, l.Safe = part(l.Rate), part(l.Safe)
	}
	return l
}

func (p *leasedPool) renewed(l maps.Lease) {
	l.Rate, l.Safe = min(l.Rate, p.rule.Rate), min(l.Safe, p.rule.Rate)
	p.lease, p.granted, p.safe = l, meterOf(p.rule.Part(l.Rate)), meterOf(p.rule.Part(l.Safe))
	p.useLease()
}

func (p *leasedPool) useLease() {
	if p.at < p.lease.Until {
		p.use(p.granted)
	} else {
		p.use(p.safe)
	}
}

// first is the safe share of a pool that gets a cluster.
func (p *leasedPool) first(rule policy.Rule) {
	p.rule = rule
	p.renewed(maps.Lease{Rate: rule.SafeRate(), Safe: rule.SafeRate()})
}

// check compares the room in the kernel.
func (p *leasedPool) check(now uint64) {
	p.Helper()
	p.rig.at(now)
	p.advance(now)
	e, _ := p.set.Store.Pools().Find(p.rule.Prefix)
	m := p.set.Store.Meter(e)
	if room := int64(m.Capacity - p.set.Store.SharedLevel(e, now)); room != p.room || m.Capacity != p.numbers.Capacity || m.RateUnits != p.numbers.RateUnits {
		p.Fatalf("at %d ns the bucket has room for %d units of %d at %d, want %d of %d at %d\nlease %+v of %+v",
			now, room, m.Capacity, m.RateUnits, p.room, p.numbers.Capacity, p.numbers.RateUnits, p.lease, p.rule)
	}
	if l, ok := p.set.Store.Pools().Lease(p.rule.Prefix); ok != p.rule.HasLeases() || ok && l != p.lease {
		p.Fatalf("at %d ns the lease is %+v %v, want %+v", now, l, ok, p.lease)
	}
}

// send sends a packet through the pool.
func (p *leasedPool) send(now uint64, bytes int) {
	p.Helper()
	p.advance(now)
	frame, m := sized(addr("10.0.0.1"), uint64(bytes), 0, now)
	conforms := p.room == int64(p.numbers.Capacity) || p.room >= int64(min(bytes, 1514))<<model.UnitBits
	if got := sendOne(p, frame, m); got != conforms {
		p.Fatalf("at %d ns a packet of %d bytes passes: %v; there is room for %d units of %d\nlease %+v of %+v",
			now, bytes, got, p.room, p.numbers.Capacity, p.lease, p.rule)
	}
	if conforms {
		p.room -= int64(bytes) << model.UnitBits
		if p.passed += uint64(bytes); int64(p.passed)<<model.UnitBits > p.allowed+int64(1<<16)<<model.UnitBits {
			p.Fatalf("%d bytes have passed, and %d were allowed", p.passed, p.allowed>>model.UnitBits)
		}
	}
	p.check(now)
}

func sendOne(p *leasedPool, frame []byte, m meta) bool {
	verdict, _, _ := sendTimed(p, p.program(), frame, m)
	return verdict != drop
}

// Leases are renewed, end, and change in size; the pool gets a cluster and loses it, at once or by changes of many rules
// that begin, last, and revert. The bucket always keeps its room, so no more than the rates allow ever passes.
func TestLeases(t *testing.T) {
	seed := testenv.Seed(t)
	t.Parallel()
	const steps = 120
	for i := range testenv.Rounds(t, 5) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			roll := random.Uint64N
			p := &leasedPool{rig: newRig(t, maps.Size{Views: 2, Rules: 16, Buckets: 4, Labels: 64, Leases: 4, Pools: true}, bySource())}
			rate := policy.Rate(64_000) << roll(20)
			some := func() policy.Rate { return policy.MinRate + policy.Rate(roll(uint64(rate))) }
			next := func() policy.Rule {
				r := pool("gold", policy.Rule{Rate: max(some(), policy.MinRate), Capacity: 1514 + roll(1<<(8+roll(12)))})
				switch roll(5) {
				case 0, 1:
					r.Cluster.Name = "gold"
					if roll(2) == 0 {
						r.Cluster.Safe = min(some(), r.Rate)
					}
				case 2, 3:
					r.Adapt.Min = min(some(), r.Rate)
				}
				return r
			}
			now := []uint64{1e9, 1e15, 1<<62 - 1e12}[roll(3)]
			p.rig.at(now)
			first := next()
			_, err := p.set.Store.Pools().Put(first)
			testenv.Must(t, err)
			p.put(policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: policy.Unlimited, Within: "gold"}, now)
			p.rule, p.at = first, now
			p.numbers = meterOf(first)
			if first.HasLeases() {
				p.first(first)
			}
			p.room = int64(p.numbers.Capacity)
			p.allowed = p.room
			p.check(now)
			wait := func() { // until there is some room, or for much longer
				now += roll(1 << (1 + roll(uint64(20+roll(25)))))
			}
			traffic := func(until uint64) {
				for now < until && roll(30) > 0 {
					p.send(now, 60+int(roll(1455)))
					now += roll(1+8*3000*1e9/uint64(p.numbers.RateUnits>>32<<2+1)) / 64
				}
				now = max(now, until)
			}
			soon := func() uint64 { return now + 1 + roll(1<<(1+roll(30))) }
			renew := func() {
				if !p.rule.HasLeases() {
					return
				}
				l := maps.Lease{Rate: some(), Safe: some(), Until: now - min(now, 5) + roll(1<<(1+roll(34)))}
				p.rig.at(now)
				p.advance(now)
				testenv.Must(t, p.set.Store.Pools().Renew(p.rule.Prefix, l))
				p.renewed(l)
				p.check(now)
			}
			for range steps {
				switch roll(12) {
				case 0: // a change at once
					rule := next()
					p.rig.at(now)
					p.advance(now)
					_, err := p.set.Store.Pools().Put(rule)
					testenv.Must(t, err)
					p.become(rule)
				case 1:
					p.change(next(), roll, &now, soon, traffic, renew)
				case 2, 3, 4, 5:
					renew()
				case 6:
					wait()
				default:
					traffic(soon())
				}
				p.check(now)
			}
			if p.passed == 0 {
				t.Error("nothing has passed")
			}
		})
	}
}

// change makes a change of many rules that lasts, or reverts.
func (p *leasedPool) change(rule policy.Rule, roll dice, now *uint64, soon func() uint64, traffic func(uint64), renew func()) {
	p.Helper()
	p.rig.at(*now)
	p.advance(*now)
	have := policy.Table{Rules: p.set.Store.Pools().Policy()}
	testenv.Must(p, p.set.Store.Pools().Prepare(have.Diff(policy.Table{Rules: []policy.Rule{rule}}), func(int) {}))
	if roll(8) == 0 {
		p.set.Store.Abandon()
		return
	}
	before, lease := p.rule, p.lease
	from, until := min(soon(), *now+maps.MaxLead), maps.Never
	if roll(2) == 0 {
		until = from + maps.MaxLead + 1 + roll(1<<(1+roll(36)))
	}
	p.set.Store.Time(from, until)
	testenv.Must(p, p.set.Store.Arm())
	traffic(from)
	*now = from
	p.advance(from)
	p.become(rule)
	p.rig.at(from)
	p.set.Store.Commit()
	p.check(from)
	for range roll(4) {
		if *now+maps.MaxLead >= until {
			break
		}
		traffic(min(soon(), until-maps.MaxLead))
		*now = min(*now, until-maps.MaxLead)
		if renew(); before.Cluster.Name != "" && before.Lessor() == rule.Lessor() {
			lease = inherited(p.lease, rule, before)
		}
	}
	if until == maps.Never {
		p.set.Store.Finish()
		return
	}
	traffic(until)
	*now = until
	p.advance(until)
	if p.rule = before; before.HasLeases() {
		p.renewed(lease)
	} else {
		p.use(meterOf(before))
	}
	p.check(*now)
	if roll(2) == 0 {
		*now += roll(1 << (1 + roll(34)))
	}
	if roll(2) == 0 {
		traffic(soon())
	}
	renew()
	p.rig.at(*now)
	p.advance(*now)
	p.set.Store.Finish()
	p.check(*now)
}

// A process that renews a lease is killed at each of its steps: the old lease is in force, or the new one, and either ends.
// The bucket keeps its room, and the next renewal works.
func TestRenewalStoppedAtAnyStep(t *testing.T) {
	const stopped = "stopped"
	defer func() { step.Hook = nil }()
	for at := 0; ; at++ {
		p := &leasedPool{rig: newRig(t, maps.Size{Views: 2, Rules: 16, Buckets: 4, Labels: 64, Leases: 4, Pools: true}, bySource())}
		now := uint64(1e15)
		rule := pool("gold", policy.Rule{Rate: 8e6, Capacity: 100_000, Cluster: policy.Cluster{Name: "gold"}})
		p.rig.at(now)
		_, err := p.set.Store.Pools().Put(rule)
		testenv.Must(t, err)
		p.put(policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: policy.Unlimited, Within: "gold"}, now)
		p.rule, p.at = rule, now
		p.numbers = meterOf(rule.Part(policy.MinRate))
		p.room = int64(p.numbers.Capacity)
		p.allowed = p.room
		p.first(rule)
		renew := func(l maps.Lease) (done bool) {
			defer func() { done = recover() == nil }()
			p.rig.at(now)
			p.advance(now)
			testenv.Must(t, p.set.Store.Pools().Renew(rule.Prefix, l))
			return true
		}
		old := maps.Lease{Rate: 4e6, Safe: 1e6, Until: now + 3e9}
		renew(old)
		p.renewed(old)
		for range 20 {
			p.send(now, 1000)
			now += 1e6
		}
		steps := 0
		step.Hook = func(string, bool) error {
			if steps++; steps > at {
				panic(stopped)
			}
			return nil
		}
		l := maps.Lease{Rate: 2e6, Safe: 5e5, Until: now + 2e9}
		done := renew(l)
		step.Hook = nil
		if got, _ := p.set.Store.Pools().Lease(rule.Prefix); got != old && got != l || done && got != l {
			t.Fatalf("stopped at step %d, the lease is %+v", at, got)
		} else if got == l {
			p.renewed(l)
		}
		for range 4 { // beyond its end
			p.send(now, 1000)
			now += 1e9
		}
		l.Until = now + 1e9
		renew(l)
		p.renewed(l)
		p.send(now, 1000)
		if done {
			if at < 3 {
				t.Errorf("there are only %d steps", at)
			}
			return
		}
	}
}

// A pool that loses its cluster by a change that is about to begin gets no lease any more.
func TestRenewalBeforeAChange(t *testing.T) {
	p := &leasedPool{rig: newRig(t, maps.Size{Views: 2, Rules: 16, Buckets: 4, Labels: 64, Leases: 4, Pools: true}, bySource())}
	rule := pool("gold", policy.Rule{Rate: 8e6, Capacity: 100_000, Cluster: policy.Cluster{Name: "gold"}})
	p.rig.at(1e9)
	pools := p.set.Store.Pools()
	_, err := pools.Put(rule)
	testenv.Must(t, err)
	plain := rule
	plain.Cluster = policy.Cluster{}
	testenv.Must(t, pools.Prepare([]policy.Difference{{Have: &rule, Want: &plain}}, func(int) {}))
	p.set.Store.Time(2e9, maps.Never)
	testenv.Must(t, p.set.Store.Arm())
	l := maps.Lease{Rate: 1e6, Safe: 1e6, Until: 5e9}
	if err := pools.Renew(rule.Prefix, l); !errors.Is(err, maps.ErrBeginning) {
		t.Errorf("before the change: %v", err)
	}
	p.rig.at(2e9)
	if err := pools.Renew(rule.Prefix, l); err == nil || errors.Is(err, maps.ErrBeginning) {
		t.Errorf("a pool without a cluster has got a lease: %v", err)
	}
	if err := pools.Renew(policy.PoolKey("other"), l); err == nil {
		t.Error("a pool that does not exist has got a lease")
	}
}
