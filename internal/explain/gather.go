package explain

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"time"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// onDevice is about both directions of the device that was named, or one.
func onDevice(n *loader.Namespace, q Question) ([]Facts, error) {
	directions := []policy.Direction{policy.Egress, policy.Ingress}
	if q.Direction != nil {
		directions = []policy.Direction{*q.Direction}
	}
	var all []Facts
	var refused *QuestionError
	for _, d := range directions {
		f, err := onHook(n, q, d)
		if q.Flow != nil && errors.As(err, &refused) {
			continue // of two directions, it is one that a flow goes in
		}
		if err != nil {
			return nil, err
		}
		all = append(all, f)
	}
	if all == nil {
		return nil, refused
	}
	return all, nil
}

// onHook is about one direction of the device that was named.
func onHook(n *loader.Namespace, q Question, d policy.Direction) (f Facts, err error) {
	h, err := n.Find(q.Device, d)
	if err != nil {
		return f, err
	}
	var dev netinfo.Device
	match := d.FarSide()
	if h != nil {
		defer h.Close()
		dev, match = h.Device, h.Match()
	} else if dev, err = netinfo.DeviceByName(q.Device); errors.Is(err, netinfo.ErrNoDevice) {
		return f, &QuestionError{err}
	} else if err != nil {
		return f, err
	}
	f.Packets = Packets{Flow: q.Flow, Segments: q.Segments}
	switch {
	case q.Flow != nil:
		f.Src, f.Dst = q.Flow.Src, q.Flow.Dst
		if far := f.side(match); far != q.Address {
			return f, &QuestionError{fmt.Errorf("the flow's %s is %s; the rules of %s go by that side, so it must be the address asked for", match, far, d)}
		}
	case match == policy.MatchSrc:
		f.Src = q.Address
	default:
		f.Dst = q.Address
	}
	s, err := stopAt(n, h, netinfo.Hop{Device: dev, Direction: d}, f.Packets, cmp.Or(q.Bytes, dev.FullFrame()))
	f.Stops = []Stop{s}
	return f, err
}

// onRoutes is about all hooks that packets pass by the present routes.
func onRoutes(n *loader.Namespace, q Question) ([]Facts, error) {
	hooks, unread := n.Hooks()
	defer loader.CloseHooks(hooks)
	asked := []Packets{{Dst: q.Address, Segments: q.Segments}, {Src: q.Address, Segments: q.Segments}}
	if q.Flow != nil {
		asked = []Packets{{Src: q.Flow.Src, Dst: q.Flow.Dst, Flow: q.Flow, Segments: q.Segments}}
	}
	var all []Facts
	for _, p := range asked {
		f, err := routed(n, p, q.Bytes, hooks)
		if err != nil {
			return nil, err
		}
		all = append(all, f)
	}
	return all, unread
}

// routed is about the hooks with rules that packets pass, and about their device in any case.
func routed(n *loader.Namespace, p Packets, bytes uint64, hooks []*loader.Hook) (f Facts, err error) {
	f = Facts{Packets: p, Routed: true}
	if f.In, err = legIn(p.Src); err != nil {
		return f, err
	}
	if f.Out, err = legOut(p.Dst, f.In); err != nil {
		return f, err
	}
	met := map[*loader.Hook]bool{}
	for _, l := range []Leg{f.In, f.Out} {
		for _, hop := range l.Hops {
			h := hookOn(hooks, hop)
			if h == nil && hop.Index != l.Route.Device.Index && n.OtherLayout(hop.Index, hop.Direction) == nil {
				continue
			}
			met[h] = true
			s, err := stopAt(n, h, hop, p, cmp.Or(bytes, l.Route.Device.FullFrame()))
			if err != nil {
				return f, err
			}
			f.Stops = append(f.Stops, s)
		}
	}
	for _, h := range hooks {
		if met[h] {
			continue
		}
		e := Elsewhere{Hook: hookOf(h)}
		address := addressAt(e.Hook, p, f.In, f.Out)
		if !address.IsValid() {
			continue
		}
		if entry, found := h.Set.Match(address); found && entry.Rate != policy.Unlimited {
			e.Rule = entry.Rule
			f.Elsewhere = append(f.Elsewhere, e)
		}
	}
	return f, nil
}

func hookOn(hooks []*loader.Hook, hop netinfo.Hop) *loader.Hook {
	for _, h := range hooks {
		if h.Device.Index == hop.Index && h.Direction == hop.Direction {
			return h
		}
	}
	return nil
}

// legTo has the route to an address, but not yet the devices below.
func legTo(end netip.Addr) (l Leg, err error) {
	if l.End = end; !end.IsValid() {
		return l, nil
	}
	l.Route, err = netinfo.RouteTo(end)
	if errors.Is(err, netinfo.ErrNoRoute) {
		return Leg{End: end, NoRoute: err}, nil
	}
	return l, err
}

// passes reports whether packets pass a device other than the loopback.
func (l Leg) passes() bool { return l.Route.Device.Name != "" && !l.Route.Local }

// legIn is how packets from an address come in: by where those to it leave.
func legIn(src netip.Addr) (Leg, error) {
	l, err := legTo(src)
	if err != nil || !l.passes() {
		return l, err
	}
	down, err := netinfo.Descend(l.Route.Device, l.Route.Next)
	l.Descent = down.Reverse()
	return l, err
}

// legOut is how packets leave that came in by in.
func legOut(dst netip.Addr, in Leg) (Leg, error) {
	l, err := legTo(dst)
	if err != nil || l.Route.Device.Name == "" {
		return l, err
	}
	if in.passes() {
		forward, err := netinfo.Forward(in.End, dst, in.Route.Device)
		switch {
		case err == nil:
			l.Route = forward
		case errors.Is(err, netinfo.ErrNoRoute):
			l.Unwilling = err
		default:
			return l, err
		}
	}
	if l.passes() {
		l.Descent, err = netinfo.Descend(l.Route.Device, l.Route.Next)
	} else if in.Route.Local { // local packets pass the loopback, the device of both routes
		for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
			l.Hops = append(l.Hops, netinfo.Hop{Device: l.Route.Device, Direction: d})
		}
	}
	return l, err
}

// stopAt is about a hop, which has no rules if h is nil.
func stopAt(n *loader.Namespace, h *loader.Hook, hop netinfo.Hop, p Packets, frame uint64) (s Stop, err error) {
	s = Stop{Hop: hop, Frame: frame}
	if hop.Name != "" {
		ours, err := n.Programs(hop.Index, hop.Direction)
		if err != nil {
			return s, err
		}
		s.Path, err = netinfo.Path(hop.Device, hop.Direction, ours)
		if s.Unlisted = errors.Is(err, fs.ErrPermission); s.Unlisted {
			s.Path = nil
		} else if err != nil {
			return s, err
		}
		s.Unreadable = n.OtherLayout(hop.Index, hop.Direction) != nil
	}
	if h == nil {
		return s, nil
	}
	hook := hookOf(h)
	s.Hook = &hook
	if address := p.side(hook.Match); address.IsValid() {
		if s.Rule, err = ruleFor(h, address, p, s); err != nil {
			return s, err
		}
	}
	if !delayed(s) {
		return s, nil
	}
	if hop.Direction == policy.Egress {
		s.Qdisc, err = fq.Look(hop.Index)
	} else {
		s.Ifb, err = fq.FindIfb(hop.Index)
	}
	return s, err
}

func hookOf(h *loader.Hook) Hook {
	hook := Hook{
		Name: h.Name(), Device: h.Device, Direction: h.Direction, Match: h.Match(), State: h.State, Status: h.Status(),
	}
	if change, until := h.Set.Change(); change == maps.Pending && until != 0 {
		left := until - min(until, maps.Now())
		hook.RevertsInNS = &left
	}
	return hook
}

// ruleFor is the rule that matches an address, nil if none does.
func ruleFor(h *loader.Hook, address netip.Addr, p Packets, s Stop) (*Rule, error) {
	e, found := h.Set.Match(address)
	if !found {
		return nil, nil
	}
	if err := checkSize(s.Frame, p.Segments); err != nil {
		return nil, err
	}
	r := &Rule{Rule: e.Rule, Counters: h.Set.Counters(e.ID)}
	for bits := e.Prefix.Bits() - 1; bits >= 0; bits-- {
		prefix, err := address.Prefix(bits)
		if err != nil {
			return nil, err
		}
		if wider, ok := h.Set.Find(prefix); ok {
			r.Hides = append(r.Hides, wider.Rule)
		}
	}
	if shadow, ok := h.Set.Shadow(e); ok {
		if b := bucketFor(h, shadow, address, p.Flow); b != nil {
			r.Shadow = &Shadow{Rule: shadow.Rule, Bucket: *b}
		}
	}
	if e.Rate != policy.Unlimited {
		r.Bucket = bucketFor(h, e, address, p.Flow)
	}
	if r.Bucket != nil {
		r.SpeedBits = h.Device.Speed()
	}
	return r, nil
}

// bucketFor is the bucket of a rule for packets; nil where it depends on the flow.
func bucketFor(h *loader.Hook, e maps.Entry, address netip.Addr, given *maps.Flow) *Bucket {
	flow := maps.Flow{Src: address, Dst: address}
	if given != nil {
		flow = *given
	} else if e.Each.Kind == policy.EachFlow {
		return nil
	}
	b := &Bucket{maps.KeyName(e, h.Match(), flow), h.Set.State(e, h.Match(), flow, maps.Now()), time.Now()}
	b.FIFO = b.FIFO || given == nil
	return b
}
