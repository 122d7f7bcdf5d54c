package explain

import (
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Stages are a rule and the pools above it, the lowest first, with the state that packets would meet.
type Stages struct {
	Levels []Level
	Model  []model.Stage // of Levels
	Now    uint64        // ns
	// Watched is for how many ns after Now packets were counted; 0 if they were not.
	Watched uint64
}

// A Level is a rule or pool among Stages. Of a pool with a cluster it has the part of the rate that is in force on this host.
type Level struct {
	maps.Entry
	Counters maps.Counters
	Lately   maps.Counters // of these, what was counted while Stages were watched
	Last     uint64        // its level at the end of that, in bytes
	Others   []Other       // its other limits
	Sharer   string        // of the packets; "" without shares, and where it is not known
	Active   *int          // how many sharers share now; nil if that is not known
}

// An Other is another limit of a rule or pool.
type Other struct {
	maps.Entry
	Refused uint64 // packets in all; once Stages were watched, those meanwhile
}

// stagesFor are the stages of a rule for packets of a flow, or if given is nil, of any flow of an address, which may be unknown,
// too.
func stagesFor(n *view, set *maps.Set, e maps.Entry, match policy.Match, given *maps.Flow, address netip.Addr) (s Stages) {
	flow := flowOf(given, address)
	known := func(r *policy.Rule) bool {
		return r.Share.Kind == policy.ShareMember || !r.NAT && (given != nil || r.Share.Kind != policy.ShareFlow && address.IsValid())
	}
	s.Now = maps.Now()
	entries, stages := set.Store.Stages(e, match, flow, s.Now)
	s.Model = stages
	s.Model[0].FIFO = s.Model[0].FIFO || given == nil
	for i, entry := range entries {
		l := Level{Entry: entry, Counters: set.Store.Counters(entry.ID)}
		for _, other := range set.Store.Others(entry) {
			l.Others = append(l.Others, Other{other, set.Store.Counters(other.ID).DroppedPackets})
		}
		if entry.Pool {
			if lease, ok := set.Store.Pools().Lease(entry.Prefix); ok {
				l.Rule = l.Rule.Part(lease.At(s.Now)) // what packets meet
			}
		}
		if entry.Share.Kind != policy.ShareNone {
			l.Active = new(n.sharers(set.Store)[entry.ID])
		}
		switch {
		case s.Model[i].Share == nil:
		case !known(&entry.Rule):
			s.Model[i].Share = nil // it is left out of the verdict
		default:
			l.Sharer = maps.SharerName(entry, entries[max(i-1, 0)], match, flow)
		}
		s.Levels = append(s.Levels, l)
	}
	return s
}

// watch counts packets for a while: a level changes with each packet, and that of one moment misleads.
func watch(n *loader.Namespace, facts []Facts, interval time.Duration) {
	var all []*Stages
	for i := range facts {
		for j := range facts[i].Stops {
			if r := facts[i].Stops[j].Rule; r != nil && len(r.Stages.Levels) > 1 {
				all = append(all, &r.Stages)
			}
		}
	}
	if all == nil {
		return
	}
	time.Sleep(interval)
	pools := n.Pools()
	defer pools.Close()
	for _, s := range all {
		s.Watched = maps.Now() - s.Now
		for i := range s.Levels {
			l := &s.Levels[i]
			l.Lately = pools.Set.Store.Counters(l.ID).Since(l.Counters)
			for j := range l.Others {
				o := &l.Others[j]
				o.Refused = pools.Set.Store.Counters(o.ID).DroppedPackets - o.Refused
			}
			l.Last = model.Bytes(pools.Set.Store.SharedLevel(l.Entry, s.Now+s.Watched))
		}
	}
}

// refuses reports whether a level refused, marked or delayed packets lately. The rule also counts those that pools
// refused, and a few more or less, as others come while counters are read.
func (s Stages) refuses(level int) bool {
	of := func(c maps.Counters) uint64 { return c.ExcessPackets + c.DelayedPackets }
	all := of(s.Levels[level].Lately)
	if level > 0 {
		return all > 0
	}
	excess := all
	for i := 1; i < len(s.Levels); i++ {
		excess -= min(excess, of(s.Levels[i].Lately))
	}
	return s.Levels[0].Rate != policy.Unlimited && 20*excess > all
}

// spends reports whether the rule used all of its rate lately: its bucket was never empty. Such a bucket drains by the
// rate all the time, so its level tells. A packet of each end may be in the counters, and not in the level.
func (s Stages) spends() bool {
	l := &s.Levels[0]
	if l.rate() == 0 || l.Lately.PassedPackets == 0 {
		return false
	}
	drained := float64(l.Lately.PassedBytes) + float64(model.Bytes(s.Model[0].State.Level)) - float64(l.Last)
	packet := float64(l.Lately.PassedBytes) / float64(l.Lately.PassedPackets)
	return drained+2*packet >= float64(l.Rate)/8*float64(s.Watched)/1e9
}

// limiter is the level that limits the packets by what was counted lately; report.NoLimiter if none does.
func (s Stages) limiter() int {
	if l := s.Levels[0].Lately; l.ExcessPackets+l.DelayedPackets == 0 {
		return report.NoLimiter // the rule also counts what pools do to its packets
	}
	loads := make([]report.Load, len(s.Levels))
	for i := range s.Levels {
		loads[i] = s.load(i)
	}
	loads[0].Spends = s.spends()
	return report.Limiter(loads)
}

// mostIn is the highest mean rate of packets of so many bytes that all levels let through in d; nil without a limit, and where a
// guarantee passes a full pool.
func (s Stages) mostIn(d time.Duration, bytes uint64) *uint64 {
	most := policy.Unlimited
	for i := range s.Levels {
		if s.Levels[i].Guarantee != 0 {
			return nil
		}
		most = min(most, s.mostOf(i, d, bytes))
	}
	if most >= policy.MaxRate { // also of Unlimited
		return nil
	}
	return new(uint64(most))
}

// mostOf is the same for a level, by its bucket, its limit of packets and its quota.
func (s Stages) mostOf(level int, d time.Duration, bytes uint64) policy.Rate {
	l := &s.Levels[level]
	most := l.MostIn(d)
	if a := l.Also; a.Packets > 0 {
		packets := float64(a.PacketBurst) + float64(a.Packets)*d.Seconds()
		most = min(most, policy.Rate(packets*float64(8*bytes)/d.Seconds()))
	}
	if q := s.quota(level); q != nil {
		beyond := policy.Rate(float64(q.LeftBytes) * 8 / d.Seconds())
		if rate := policy.Rate(q.ThenBits); rate > 0 {
			beyond += policy.Rule{Rate: rate, Capacity: policy.DefaultCapacity(rate)}.MostIn(d)
		}
		most = min(most, beyond)
	}
	return most
}

// quota is how much is used of the quota of a level; nil without one.
func (s Stages) quota(level int) *report.QuotaUse {
	q := maps.Quota{}
	for _, o := range s.Model[level].Others {
		if o.Unit == policy.InQuota {
			q = maps.NewQuota(o.Capacity>>model.QuotaBits, model.BytesOf(o.Unit, o.Level))
			q.EndsNS = o.Ends
		}
	}
	return report.NewQuotaUse(s.Levels[level].Also, q)
}

// room is how many packets and bytes the other limits of the rule let through now.
func (s Stages) room() (packets, bytes uint64) {
	packets, bytes = math.MaxUint64, math.MaxUint64
	left := uint64(0) // of the quota, and by the limit after it
	for _, o := range s.Model[0].Others {
		switch room := (o.Capacity - min(o.Capacity, o.Level)) >> model.BitsOf(o.Unit); o.Unit {
		case policy.Packets:
			packets = room
		case policy.InQuota, policy.AfterQuota:
			left += room
			bytes = left
		}
	}
	return packets, bytes
}

func (s Stages) load(level int) report.Load {
	l, m := &s.Levels[level], &s.Model[level]
	return report.Load{
		Use: s.use(level), Rate: l.rate(), Refuses: s.refuses(level), Shares: l.Share.Kind != policy.ShareNone,
		Full: l.isFull(m) || l.atRate(l.Last, l.Capacity),
	}
}

// rate is the rate for all packets together; 0 for none.
func (l *Level) rate() uint64 {
	if l.Rate == policy.Unlimited || !l.Pool && l.Each.Kind != policy.EachAll {
		return 0
	}
	return uint64(l.Rate)
}

// use is the rate of the packets that a level passed lately.
func (s Stages) use(level int) uint64 {
	return uint64(float64(s.Levels[level].Lately.PassedBytes) * 8e9 / float64(max(s.Watched, 1)))
}

// NeedsMore is the first level whose fair shares depend on a flow that was not given, or on NAT; nil if there is none.
func (s Stages) NeedsMore() *Level {
	i := slices.IndexFunc(s.Levels, func(l Level) bool { return (l.Share.Kind == policy.ShareFlow || l.NAT) && l.Sharer == "" })
	if i < 0 {
		return nil
	}
	return &s.Levels[i]
}

// Name is the name of a pool, or the network of a rule.
func (l *Level) Name() string {
	if l.Pool {
		return l.Label.Name
	}
	return policy.CIDR(l.Prefix)
}

// Judge says what happens to a packet that counts so many bytes and may be marked. waitNS is how long it is queued, or until it
// conforms if no others come.
func (s Stages) Judge(bytes uint64) (v report.Passage, verdict model.Verdict, waitNS uint64) {
	p := model.Packet{Time: s.Now, Bytes: bytes, ECT: true}
	passage, tests := forecast(s.Model, p), tests(s.Model, p)
	verdict, waitNS = passage.Verdict, passage.Wait
	exceeds, beyond, other := passage.Refuses, passage.Beyond, passage.Other
	if exceeds == model.NoStage {
		p.ECT = false // else packets may be marked, and pass
		passage := forecast(s.Model, p)
		if exceeds, beyond, other = passage.Refuses, passage.Beyond, passage.Other; exceeds == model.NoStage && passage.Excess {
			exceeds, beyond = 0, tests[0].share != model.WithinShare
		}
	}
	conforms := exceeds == model.NoStage
	if !conforms {
		v.RefusedBy, v.RefusedReason = new(s.Levels[exceeds].Name()), report.Capacity
		if beyond {
			v.RefusedReason = report.Share
		}
		if other != model.NoStage {
			v.RefusedReason = reasons[s.Model[exceeds].Others[other].Unit]
		}
		waitNS = waits(s.Model, p)
	}
	v.BorrowedBy = []string{}
	for i := 0; conforms && v.GuaranteedBy == nil && i < len(s.Levels); i++ {
		switch l := &s.Levels[i]; {
		case i == passage.Guaranteed:
			v.GuaranteedBy = new(l.Name())
		case l.Guarantee != 0:
			v.BorrowedBy = append(v.BorrowedBy, l.Name())
		}
	}
	v.Sharing, v.Pools, v.Quota = s.sharing(0, tests), s.pools(bytes, tests), s.quota(0)
	if v.WatchedNS = s.Watched; s.Watched == 0 {
		return v, verdict, waitNS
	}
	if i := s.limiter(); i != report.NoLimiter {
		l := &s.Levels[i]
		v.LimitedBy, v.Limited = new(l.Name()), l.Also
		for _, o := range l.Others {
			if 2*o.Refused > l.Lately.ExcessPackets {
				v.LimitedReason = reasons[o.Unit]
			}
		}
	}
	rule := s.Levels[0].Lately
	v.UseBits = new(s.use(0))
	v.RecentPackets, v.RecentDrops = rule.PassedPackets+rule.DroppedPackets, rule.DroppedPackets
	return v, verdict, waitNS
}

// reasons are why other limits refuse a packet.
var reasons = map[policy.Unit]string{
	policy.Packets: report.TooManyPackets, policy.Flows: report.TooManyFlows, policy.InQuota: report.UsedUp, policy.AfterQuota: report.UsedUp,
}

// isFull reports whether the level of a pool is as high as it gets.
func (l *Level) isFull(m *model.Stage) bool {
	return l.atRate(m.State.Level, m.Capacity)
}

func (l *Level) atRate(level, capacity uint64) bool {
	return model.AtRate(level, capacity, l.Share.Kind != policy.ShareNone)
}

// pools are the levels of the pools, given how each stage judges a packet.
func (s Stages) pools(bytes uint64, tests []test) []report.PoolLevel {
	pools, limiter := []report.PoolLevel{}, s.limiter()
	for i := 1; i < len(s.Levels); i++ {
		l, m := &s.Levels[i], &s.Model[i]
		pool := report.NewPoolLevel(l.Rule, m.State.Level)
		pool.Full, pool.WaitNS = !tests[i].conforms || l.isFull(m), m.Wait(m.State.Level, bytes)
		if l.Lately.PassedPackets > 0 { // its level at one moment says less
			pool.Full = i == limiter || s.load(i).AtRate()
		}
		pool.Conforms, pool.Guarantees, pool.Sharing = tests[i].conforms, tests[i].guarantees, s.sharing(i, tests)
		pool.Quota = s.quota(i)
		pool.PassedPackets, pool.RefusedPackets = l.Counters.PassedPackets, l.Counters.DroppedPackets
		if s.Watched > 0 {
			pool.UseBits, pool.RecentRefusals = new(s.use(i)), l.Lately.DroppedPackets
		}
		pools = append(pools, pool)
	}
	return pools
}

func (s Stages) sharing(i int, tests []test) report.Sharing {
	l := &s.Levels[i]
	shares := report.Sharing{Share: l.Share.String(), Sharer: l.Sharer}
	if l.Sharer != "" {
		shares.WithinShare = new(tests[i].share == model.WithinShare)
	}
	if l.Active != nil {
		shares.ActiveSharers = new(uint64(*l.Active))
	}
	return shares
}

// delays reports whether the rule or a pool delays packets.
func (s Stages) delays() bool {
	for i := range s.Levels {
		if s.Levels[i].Excess == policy.Delay {
			return true
		}
	}
	return false
}

// flowOf is the flow that was given, or one of which only the far address is known, and perhaps not even that.
func flowOf(given *maps.Flow, far netip.Addr) maps.Flow {
	if given != nil {
		return *given
	}
	return maps.Flow{Src: far, Dst: far}
}
