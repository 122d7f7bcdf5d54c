package explain

import (
	"cmp"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// judgeRule explains the rule that matches, and its verdict.
func judgeRule(out *report.Stop, p *Packets, s *Stop) {
	h, r := s.Hook, s.Rule
	if r.Rate != policy.Unlimited && r.Each.Kind == policy.EachAll {
		out.RateBits = new(uint64(r.Rate))
	}
	cidr := policy.CIDR(r.Prefix)
	out.Rule, out.Sentence, out.Share = &cidr, r.Sentence(h.Name, h.Direction, h.Match), r.Share.String()
	for _, wider := range r.Hides {
		out.Hides = append(out.Hides, report.NewBrief(wider, h.Name, h.Direction, h.Match))
	}
	out.Bytes, out.RevertsInNS = countPacket(s.Frame, s.Tags, r.Framing), h.RevertsInNS
	out.SpeedTestBits, out.FirstSecondBits = r.Stages.mostIn(10*time.Second, out.Bytes), r.Stages.mostIn(time.Second, out.Bytes)
	out.PassedPackets, out.ExcessPackets, out.DroppedPackets = r.Counters.PassedPackets, r.Counters.ExcessPackets, r.Counters.DroppedPackets
	verdict := model.Pass
	if r.Bucket != nil {
		var level report.Level
		level, verdict = judgeBucket(r.Rule, *r.Bucket, out.Bytes, p.DSCP)
		out.Bucket, out.WaitNS, out.Conforms = &level, level.WaitNS, level.Conforms
		if !level.Conforms && (level.Colour == "" || level.Colour == policy.Red.String()) {
			out.RefusedBy, out.RefusedReason = &cidr, report.Capacity
		}
	}
	if len(r.Stages.Levels) > 0 {
		out.Passage, verdict, out.WaitNS = r.Stages.Judge(out.Bytes)
		out.Conforms = out.RefusedBy == nil
		switch q := out.Quota; {
		case out.RateBits != nil && q != nil && q.UsedUp:
			out.RateBits = &q.ThenBits
		case r.AnyRate():
			out.RateBits = nil
		}
		if b := out.Bucket; b != nil && b.Conforms {
			packets, bytes := r.Stages.room()
			b.RoomPackets = min(b.RoomPackets, packets, bytes/max(out.Bytes, 1))
			if b.RoomBytes = min(b.RoomBytes, bytes); b.RoomPackets == packets {
				b.RoomBytes = min(b.RoomBytes, packets*out.Bytes)
			}
		}
	}
	needsMore := r.Stages.NeedsMore()
	switch {
	case h.State == loader.Detached:
		out.Note = "something else detached shapectl's program from the device; set one of its rules again to attach it"
	case h.State == loader.Gone:
		out.Note = "the device was deleted; the next command that changes a rule removes this one"
	case r.Rate != policy.Unlimited && r.Bucket == nil && r.NAT:
		out.Note = fmt.Sprintf("each %s behind NAT has a bucket, and conntrack knows whose this is; 'shapectl show --buckets' lists them", r.Each)
	case r.Rate != policy.Unlimited && r.Bucket == nil:
		out.Note = fmt.Sprintf("each %s has a bucket; try --flow %s", r.Each, p.anyFlow())
	case p.Flow == nil && r.Order == policy.SparseFirst && (verdict == model.Delay || verdict == model.Mark):
		out.Note = "this is for a flow that has packets waiting; give --flow for another, which may go ahead"
	case needsMore != nil && needsMore.NAT:
		out.Note = fmt.Sprintf("up to %v, shared by the hosts behind NAT of %s: one that sends less than its part loses nothing", needsMore.Rate, needsMore.Name())
	case needsMore != nil:
		out.Note = fmt.Sprintf("up to %v, shared by the flows of %s: one that sends less than its part loses nothing; for one of them, try --flow %s",
			needsMore.Rate, needsMore.Name(), p.anyFlow())
	case r.IsHasty():
		out.Note = "its burst is short: TCP to hosts nearer than 10 ms may get a small part of the rate"
	}
	byFlow := needsMore != nil && out.RefusedBy == nil && out.FullFrom(0) >= 0 // the pool serves some flows, and others not
	switch {
	case report.NotInForce(out.Attached) || r.Rate != policy.Unlimited && r.Bucket == nil: // the verdict is that of nothing
		out.RefusedBy, out.RefusedReason, out.BorrowedBy, out.GuaranteedBy, out.WaitNS = nil, "", []string{}, nil, 0
		if r.Bucket == nil {
			out.Quota = nil
		}
		if out.Conforms = true; !report.NotInForce(out.Attached) {
			out.Verdict, out.Conforms = "unknown", false
		}
		return
	case byFlow:
		out.DecidedBy = cmp.Or(out.LimitedBy, &out.Pools[out.FullFrom(0)].Name)
		out.Conforms, out.WaitNS = false, 0
	case out.LimitedBy != nil:
		out.DecidedBy = out.LimitedBy
	case out.RefusedBy != nil:
		out.DecidedBy = out.RefusedBy
		// A pool whose fair shares refuse the packet may have room itself: then a full pool above leaves it less than its rate.
		if full := out.FullFrom(max(out.Pool(out.RefusedBy), 0)); full >= 0 && out.RefusedReason == report.Share {
			out.DecidedBy = &out.Pools[full].Name
		}
	case out.Bucket != nil:
		out.DecidedBy = &cidr
	case len(out.Pools) > 0:
		out.DecidedBy = &out.Pools[0].Name
	}
	if out.Verdict = verdict.String(); byFlow {
		out.Verdict = "unknown"
	}
	if out.Bucket != nil {
		out.LevelBytes, out.CapacityBytes = &out.Bucket.LevelBytes, &out.Bucket.CapacityBytes
	}
	if i := out.Pool(out.DecidedBy); i >= 0 {
		out.LevelBytes, out.CapacityBytes = &out.Pools[i].LevelBytes, &out.Pools[i].CapacityBytes
	}
}

// anyFlow is an example of a flow of the packets.
func (p *Packets) anyFlow() maps.Flow {
	flow := maps.Flow{Proto: unix.IPPROTO_UDP, Src: p.Src, SrcPort: 5000, Dst: p.Dst, DstPort: 53}
	for _, end := range []*netip.Addr{&flow.Src, &flow.Dst} {
		if !end.IsValid() {
			*end = outside(p.ipv6())
		}
	}
	return flow
}

// outside is an address for examples.
func outside(ipv6 bool) netip.Addr {
	if ipv6 {
		return netip.MustParseAddr("2001:db8::1")
	}
	return netip.AddrFrom4([4]byte{192, 0, 2, 1})
}

// countPacket is how many bytes a packet counts that has one segment of that length: measure of bpf/packet.h.
func countPacket(frame uint64, tags int, f policy.Framing) uint64 {
	return min(model.Counted(frame+4*uint64(tags), f), model.MaxPacket)
}

// judgeBucket says how full the bucket of a rule is, and what that means for packets that count so many bytes. They may be
// marked.
func judgeBucket(r policy.Rule, b Bucket, bytes uint64, dscp uint8) (report.Level, model.Verdict) {
	if r.Algorithm.HasColours() {
		return judgeColours(r, b, bytes, dscp)
	}
	if b.Spilled { // a spill bucket has neither
		r.Penalty = policy.Penalty{}
		if r.Excess == policy.ECN {
			r.Excess = policy.Drop
		}
	}
	m := model.NewLimit(r)
	o := m.Decide(b.State, model.Packet{Bytes: bytes, ECT: true})
	l := report.Level{
		Key: b.Key, Spilled: b.Spilled,
		LevelBytes: model.Bytes(b.Level), CapacityBytes: r.Capacity, HoldsBytes: r.Capacity + r.Queue,
		Conforms: !o.Excess, WaitNS: o.Wait, AnyRate: r.AnyRate(),
		EmptyNS: m.Drain(b.Level),
	}
	cost := max(bytes<<model.UnitBits, 1)
	room := m.Capacity - min(b.Level, m.Capacity)
	if l.Conforms {
		l.RoomBytes = room >> model.UnitBits
		l.RoomPackets = max(room/cost, 1)
	}
	if r.Penalty.Kind == policy.PenaltyHold {
		l.HeldNS = m.Wait(b.Level, 0) // a packet of 0 bytes waits until the level is at the capacity
	}
	return l, o.Verdict
}
