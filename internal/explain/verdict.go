package explain

import (
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
	cidr := r.Prefix.String()
	out.Rule, out.Sentence, out.Share = &cidr, r.Sentence(h.Name, h.Direction, h.Match), r.Share.String()
	for _, wider := range r.Hides {
		out.Hides = append(out.Hides, report.NewBrief(wider, h.Name, h.Direction, h.Match))
	}
	counted := countPacket(s.Frame, s.Tags, p.Segments, r.Framing)
	out.Counted, out.RevertsInNS = &counted, h.RevertsInNS
	out.PassedPackets, out.ExcessPackets, out.DroppedPackets = r.Counters.PassedPackets, r.Counters.ExcessPackets, r.Counters.DroppedPackets
	switch h.State {
	case loader.Detached:
		out.Note = "something else detached shapectl's program from the device; set one of its rules again to attach it"
	case loader.Gone:
		out.Note = "the device was deleted; the next command that changes a rule removes this one"
	}
	if b := r.Shadow; b != nil {
		bytes := countPacket(s.Frame, s.Tags, p.Segments, b.Framing).Bytes
		out.Proposed = &report.Proposed{Key: b.Key, Bytes: bytes, LevelBytes: model.Bytes(b.Level), CapacityBytes: b.Capacity}
		if b.Colours != nil {
			l, _ := b.Colours.Judge(bytes, p.DSCP, 0)
			out.Proposed.LevelBytes, out.Proposed.Conforms, out.Proposed.Colour = l.LevelBytes, l.Conforms, l.Colour
			out.Proposed.SecondLevelBytes, out.Proposed.SecondCapacityBytes = l.SecondLevelBytes, l.SecondCapacityBytes
		} else {
			out.Proposed.Conforms = !model.NewLimit(b.Rule).Decide(b.State, model.Packet{Bytes: bytes}).Excess
		}
	}
	inForce := !report.NotInForce(out.Attached)
	if r.Rate != policy.Unlimited && r.Bucket == nil {
		if len(r.Stages.Levels) > 0 {
			out.Pools = r.Stages.Judge(counted.Bytes).Pools
		}
		if inForce {
			out.Verdict = "unknown"
			out.Note = fmt.Sprintf("each %s has a bucket; try --flow %s", r.Each, p.anyFlow())
		}
		return
	}
	if r.Colours != nil {
		level, verdict := r.Colours.Judge(counted.Bytes, p.DSCP, r.SpeedBits)
		out.Bucket, out.WaitNS = &level, level.WaitNS
		if inForce {
			out.Verdict = verdict.String()
		}
		if level.Colour == policy.Red.String() && inForce {
			out.RefusedBy, out.RefusedReason = &cidr, report.Capacity
		}
		return
	}
	if r.Rate != policy.Unlimited {
		level, verdict := judgeBucket(r.Rule, *r.Bucket, counted.Bytes, r.SpeedBits)
		out.Bucket, out.WaitNS = &level, level.WaitNS
		if inForce {
			out.Verdict, out.Note = verdict.String(), OfWhichFlow(r.Rule, p.Flow, verdict)
		}
	}
	if len(r.Stages.Levels) > 0 {
		judgeStages(out, p, r.Stages, inForce)
	}
}

// judgeStages explains the pools above a rule, and the shares of all.
func judgeStages(out *report.Stop, p *Packets, stages Stages, inForce bool) {
	v := stages.Judge(out.Counted.Bytes)
	out.Passage, out.WaitNS = v.Passage, v.WaitNS
	if !inForce {
		out.RefusedBy, out.RefusedReason, out.BorrowedBy, out.Guaranteed, out.GuaranteedBy = nil, "", []string{}, false, nil
		return
	}
	out.Verdict = v.Verdict.String()
	if l := stages.NeedsFlow(); l != nil && out.Note == "" {
		out.Note = fmt.Sprintf("%s is shared by flow, which is left out here; try --flow %s", l.Name(), p.anyFlow())
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

// checkSize reports as an error that there is no packet of so many segments of that length.
func checkSize(frame uint64, segments uint16) error {
	if frame*uint64(segments) > model.MaxPacket {
		return &QuestionError{fmt.Errorf("a packet of %d segments of %d bytes is out of range; it has %d bytes at most", segments, frame, model.MaxPacket)}
	}
	return nil
}

// countPacket is how many bytes a packet counts whose segments are frames of that length:
// measure of bpf/packet.h, except that there the last one may be shorter.
func countPacket(frame uint64, tags int, segments uint16, f policy.Framing) report.Counted {
	c := report.Counted{
		PacketBytes: frame, Segments: uint64(segments), TagBytes: 4 * uint64(tags),
		OverheadBytes: f.Overhead, MPUBytes: f.MPU,
	}
	c.Bytes = min(model.Counted(c.PacketBytes+c.TagBytes, f)*c.Segments, model.MaxPacket)
	return c
}

// fullIn is how many ns it takes to fill so much room at the speed of a device; nil for never.
func fullIn(roomBytes, rateBits, speedBits uint64) *uint64 {
	if speedBits <= rateBits {
		return nil
	}
	return new(uint64(float64(roomBytes) * 8 / (float64(speedBits-rateBits) / 1e9)))
}

// OfWhichFlow is a note that says for which flow a verdict holds, if none was given and
// the verdict is not the same for all; else "".
func OfWhichFlow(r policy.Rule, given *maps.Flow, v model.Verdict) string {
	if given != nil || r.Order != policy.SparseFirst || v != model.Delay && v != model.Mark {
		return ""
	}
	return "this is for a flow that has packets waiting; give --flow for another, which may go ahead"
}

// judgeBucket says how full a bucket is, and what that means for packets that count so
// many bytes on a device of that speed, 0 if it is not known. They may be marked.
func judgeBucket(r policy.Rule, b Bucket, bytes, speedBits uint64) (report.Level, model.Verdict) {
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
		LevelBytes: model.Bytes(b.Level), CapacityBytes: r.Capacity, Excess: r.Excess.String(), Penalty: r.Penalty.String(),
		Queue: report.NewQueue(r), Conforms: !o.Excess, WaitNS: o.Wait,
		EmptyNS: m.Drain(b.Level),
	}
	cost := max(bytes<<model.UnitBits, 1)
	room := m.Capacity - min(b.Level, m.Capacity)
	if l.Conforms {
		l.RoomBytes = room >> model.UnitBits
		l.RoomPackets = max(room/cost, 1)
		l.AtOncePackets = l.RoomPackets
	}
	if r.Excess == policy.Delay {
		l.AtOncePackets = (m.Burst - min(b.Level, m.Burst)) / cost
		if l.Conforms && l.WaitNS == 0 { // also one that is larger than the burst
			l.AtOncePackets = max(l.AtOncePackets, 1)
		}
	}
	if speedBits > 0 {
		l.SpeedBits, l.FullNS = &speedBits, fullIn(l.RoomBytes, uint64(r.Rate), speedBits)
	}
	if r.Penalty.Kind == policy.PenaltyHold {
		l.HeldNS = m.Wait(b.Level, 0) // a packet of 0 bytes waits until the level is at the capacity
	}
	if l.HeldNS > 0 {
		l.HeldUntil = uint64(b.Seen.Add(time.Duration(l.HeldNS)).UnixNano())
	}
	return l, o.Verdict
}
