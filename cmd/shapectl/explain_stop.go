package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// stop explains a hook, which has no rules if h is nil; the Device of hop is the zero one if it is not here.
func (x explainer) stop(h *loader.Hook, hop netinfo.Hop, p askedPacket) (report.Stop, error) {
	s := report.Stop{Device: hop.Name, Direction: hop.Direction.String(), Warnings: []string{}, Hides: []report.Brief{}, Verdict: "pass"}
	match := hop.Direction.FarSide()
	if h != nil {
		s.Device, s.State, s.Attached, match = h.Name(), place(h).State, h.InForce(), h.Match()
	}
	s.Match = match.String()
	var path []netinfo.ChainEntry
	if hop.Name != "" {
		ours, err := x.n.Programs(hop.Index, hop.Direction)
		if err != nil {
			return s, err
		}
		if path, err = netinfo.Path(hop.Device, hop.Direction, ours); err != nil {
			return s, err
		}
		s.Chain = []report.Attached{}
	}
	decides, delays := -1, false
	address := p.side(match)
	switch {
	case address.IsValid():
		s.Address = address.String()
		if h == nil {
			break
		}
		entry, found := h.Set.Match(address)
		if !found {
			break
		}
		decides, delays = deciderOf(path), entry.Excess == policy.Delay
		if err := x.rule(&s, h, entry, hop.Tags, p); err != nil {
			return s, err
		}
	case h != nil:
		s.Verdict = "unknown"
		s.Note = fmt.Sprintf("the rules here go by the %s; give --flow, which says it", sideNames[match])
	}
	var held holder
	if delays && decides >= 0 {
		var err error
		if held, err = heldBackBy(hop); err != nil {
			return s, err
		}
		s.HeldBack = &held.holds
	}
	for i, e := range path {
		s.Chain = append(s.Chain, report.Attached{At: e.At, ProgramID: e.ID, Name: e.Name, Ours: e.Ours, Decides: i == decides})
		switch {
		case e.Ours:
		case i < decides:
			s.Warnings = append(s.Warnings, runsBefore(e))
		case held.reenters:
			s.Warnings = append(s.Warnings, called(e)+" runs after the limit, and does not see what comes in through the ifb")
		}
		if i == decides {
			s.Chain = append(s.Chain, held.chain...)
		}
	}
	if held.warning != "" {
		s.Warnings = append(s.Warnings, held.warning)
	}
	if held.loses && s.Bucket != nil && s.Bucket.Conforms {
		s.Verdict, s.Note = "lost", ""
	}
	return s, nil
}

// A holder is what holds back the packets of a rule that delays.
type holder struct {
	holds    bool
	reenters bool              // packets come in behind all that runs after the limit
	loses    bool              // they do not come out again
	chain    []report.Attached // what they meet where they leave the chain, on ingress
	warning  string            // why nothing is held back, or all is lost
}

// heldBackBy looks at the fq of a device, or at the ifb by which packets enter it.
func heldBackBy(hop netinfo.Hop) (holder, error) {
	if hop.Direction == policy.Egress {
		state, err := fq.Look(hop.Index)
		if err != nil || state.Holds {
			return holder{holds: state.Holds}, err
		}
		return holder{warning: holdsNothing(hop.Name, state.Kind) + "'shapectl set' with --setup-fq sets fq"}, nil
	}
	const mends = "set one of the rules here again, which mends that"
	ifb, err := fq.FindIfb(hop.Index)
	switch {
	case err != nil:
		return holder{}, err
	case ifb == nil:
		return holder{reenters: true, loses: true, warning: "the ifb by which packets are held back is gone, so those that conform are lost; " + mends}, nil
	}
	held := holder{reenters: true, chain: []report.Attached{{At: "ifb", Name: ifb.Name, Ours: true}, {At: "qdisc", Name: ifb.State.Kind}}}
	switch {
	case !ifb.Up:
		held.loses, held.warning = true, ifb.Name+", by which packets are held back, is down, so those that conform are lost; "+mends
	case !ifb.State.Holds:
		held.warning = holdsNothing(ifb.Name, ifb.State.Kind) + mends
	default:
		held.holds = true
	}
	return held, nil
}

// holdsNothing says what becomes of a rule that delays where the qdisc of its device is not fq.
func holdsNothing(device, qdisc string) string {
	return fmt.Sprintf("nothing is held back, as only the qdisc fq does that, and %s has %s: what is to wait passes at once, and the rate is kept by drops alone; ",
		device, qdisc)
}

var sideNames = map[policy.Match]string{policy.MatchSrc: "source address", policy.MatchDst: "destination address"}

// deciderOf is which of a path is shapectl, -1 if none is.
func deciderOf(path []netinfo.ChainEntry) int {
	return slices.IndexFunc(path, func(e netinfo.ChainEntry) bool { return e.Ours })
}

// called is a program, filter or chain by its name, if it may be asked for.
func called(e netinfo.ChainEntry) string {
	if e.ID != 0 && e.Name == "" {
		return fmt.Sprintf("program %d", e.ID)
	}
	return e.Name
}

// runsBefore says what somebody else's that runs before a limit may do to it.
func runsBefore(e netinfo.ChainEntry) string {
	name := called(e)
	switch {
	case strings.HasPrefix(name, "shapectl"):
		return name + ", set from another network namespace or another bpffs, limits them before: the lower rate decides"
	case e.At == "xdp":
		return "the XDP program sees packets first: what it drops, sends back or redirects never gets to the limit"
	case e.At == "netfilter":
		return name + " runs before the limit: what it drops or redirects never gets there"
	}
	return name + " runs before the limit: what it drops, redirects, or passes on by ending the chain never gets there"
}

// rule explains the rule that matches, and what it makes of a packet with so many VLAN tags.
func (x explainer) rule(s *report.Stop, h *loader.Hook, e maps.Entry, tags int, p askedPacket) error {
	cidr, address := e.Prefix.String(), p.side(h.Match())
	s.Rule, s.Sentence = &cidr, e.Sentence(h.Name(), h.Direction, h.Match())
	for bits := e.Prefix.Bits() - 1; bits >= 0; bits-- {
		prefix, err := address.Prefix(bits)
		if err != nil {
			return err
		}
		if wider, ok := h.Set.Find(prefix); ok {
			s.Hides = append(s.Hides, report.NewBrief(wider.Rule, h.Name(), h.Direction, h.Match()))
		}
	}
	counted, err := countPacket(p.frame, tags, x.o.segments, e.Framing)
	if err != nil {
		return err
	}
	s.Counted = &counted
	switch h.State {
	case loader.Detached:
		s.Note = "something else took shapectl's program off the device; set one of its rules again, which attaches it"
	case loader.Gone:
		s.Note = "the device was deleted; the next command that changes a rule removes this one"
	}
	if change, until := h.Set.Change(); change == maps.Pending {
		s.RevertsInNS = ahead(until)
	}
	if shadow, ok := h.Set.Shadow(e); ok {
		proposed, err := x.proposed(h, shadow, tags, p)
		if err != nil {
			return err
		}
		s.Proposed = proposed
	}
	if e.Rate == policy.Unlimited {
		return nil
	}
	flow := maps.Flow{Src: address, Dst: address}
	if p.flow != nil {
		flow = *p.flow
	} else if e.Each.Kind == policy.EachFlow {
		if s.Attached {
			s.Verdict = "unknown"
			s.Note = "each flow has a bucket of its own; say which with --flow, such as --flow " + anyFlow(address, h.Match()).String()
		}
		return nil
	}
	meter, now := h.Set.Meter(e), maps.Now()
	spilled := h.Set.Spills(e, h.Match(), flow, now)
	e.Rule = chargedBy(e.Rule, spilled)
	b := bucketNow{rule: e.Rule, meter: meter, units: h.Set.Level(e, h.Match(), flow, now)}
	b.ahead = p.flow != nil && h.Set.GoesAhead(e, flow, now, counted.Bytes)
	level := b.level(counted.Bytes, h.Device.Speed(), time.Now())
	level.Sharer, level.Spilled = maps.Sharer(e, h.Match(), flow), spilled
	s.Bucket = &level
	if s.Attached {
		s.Verdict, _ = fate(e.Rule, meter, b.units, counted.Bytes, b.ahead)
		s.Note = ofWhichFlow(e.Rule, p.flow, s.Verdict)
	}
	return nil
}

// proposed is what a shadow would make of a packet; nil where that takes a flow that was not given.
func (x explainer) proposed(h *loader.Hook, shadow maps.Entry, tags int, p askedPacket) (*report.Proposed, error) {
	address := p.side(h.Match())
	flow := maps.Flow{Src: address, Dst: address}
	if p.flow != nil {
		flow = *p.flow
	} else if shadow.Each.Kind == policy.EachFlow {
		return nil, nil
	}
	counted, err := countPacket(p.frame, tags, x.o.segments, shadow.Framing)
	if err != nil {
		return nil, err
	}
	meter, level := h.Set.Meter(shadow), h.Set.Level(shadow, h.Match(), flow, maps.Now())
	return &report.Proposed{
		Sharer: maps.Sharer(shadow, h.Match(), flow), Bytes: counted.Bytes,
		LevelBytes: model.Bytes(level), CapacityBytes: shadow.Capacity, Conforms: meter.Conforms(level, counted.Bytes),
	}, nil
}

// anyFlow is one to or from an address, to show how flows are written.
func anyFlow(a netip.Addr, m policy.Match) maps.Flow {
	const udp = 17
	other := netip.AddrFrom4([4]byte{192, 0, 2, 1})
	if a.Is6() {
		other = netip.MustParseAddr("2001:db8::1")
	}
	if m == policy.MatchSrc {
		return maps.Flow{Proto: udp, Src: a, SrcPort: 5000, Dst: other, DstPort: 53}
	}
	return maps.Flow{Proto: udp, Src: other, SrcPort: 5000, Dst: a, DstPort: 53}
}

const tagBytes = 4

// countPacket is what a packet counts whose segments are frames of that length:
// framed_bytes in bpf/packet.h, but that there the last one may be shorter.
func countPacket(frame uint64, tags int, segments uint16, f policy.Framing) (report.Counted, error) {
	const most = 1<<model.PacketBits - 1
	c := report.Counted{
		PacketBytes: frame, Segments: uint64(segments), TagBytes: uint64(tags) * tagBytes,
		OverheadBytes: f.Overhead, MPUBytes: f.MPU,
	}
	if c.PacketBytes*c.Segments > most {
		return c, inputf("a packet of %d segments of %d bytes is out of range; it has %d bytes at most", segments, frame, most)
	}
	one := max(int64(c.PacketBytes+c.TagBytes)+int64(f.Overhead), int64(f.MPU))
	c.Bytes = min(uint64(one)*c.Segments, most)
	return c, nil
}

// A bucketNow is that of a rule, with what it owes, in units.
type bucketNow struct {
	rule  policy.Rule
	meter model.Meter
	units uint64
	ahead bool // of packets that wait, as a sparse flow's
}

// level says how full the bucket is now, and what that means for packets that
// count so many bytes on a device of that speed, 0 if it is not known.
func (b bucketNow) level(bytes, speedBits uint64, now time.Time) report.Level {
	r, m := b.rule, b.meter
	_, wait := fate(r, m, b.units, bytes, b.ahead)
	l := report.Level{
		LevelBytes: model.Bytes(b.units), CapacityBytes: r.Capacity, Excess: r.Excess.String(), Penalty: r.Penalty.String(),
		Queue: report.NewQueue(r), Conforms: m.Conforms(b.units, bytes), WaitNS: wait,
		EmptyNS: m.Wait(b.units, r.Capacity+r.Queue), // as what fills the bucket waits until it is empty
	}
	cost := max(bytes<<model.UnitBits, 1)
	room := m.Capacity - min(b.units, m.Capacity)
	if l.Conforms {
		l.RoomBytes = room >> model.UnitBits
		l.RoomPackets = max(room/cost, 1)
		l.AtOncePackets = l.RoomPackets
	}
	if r.Excess == policy.Delay {
		l.AtOncePackets = (m.AtOnce - min(b.units, m.AtOnce)) / cost
		if l.Conforms && l.WaitNS == 0 { // also one that is bigger than all that leaves at once
			l.AtOncePackets = max(l.AtOncePackets, 1)
		}
	}
	if speedBits > 0 {
		l.SpeedBits = &speedBits
		if speedBits > uint64(r.Rate) {
			bitsPerNS := float64(speedBits-uint64(r.Rate)) / 1e9
			full := uint64(float64(l.RoomBytes) * 8 / bitsPerNS)
			l.FullNS = &full
		}
	}
	if r.Penalty.Kind == policy.PenaltyHold {
		l.HeldNS = m.Wait(b.units, 0) // what counts nothing waits until the level is not above the capacity
	}
	if l.HeldNS > 0 {
		l.HeldUntil = uint64(now.Add(time.Duration(l.HeldNS)).UnixNano())
	}
	return l
}
