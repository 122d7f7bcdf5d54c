package explain

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/internal/doctor"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// packets are those in question, with the ends left out.
func (q *Question) packets() Packets {
	return Packets{Flow: q.Flow, DSCP: q.DSCP, Name: q.Name, Network: q.Network, Netns: q.Netns}
}

// A view is what is read of a namespace.
type view struct {
	*loader.Namespace
	hooks  []*loader.Hook // all, if a question is about routes
	active map[uint32]int // sharers; nil unless it was asked for
}

// sharers are how many sharers of each rule and pool are active: a pass over all keys.
func (n *view) sharers(s *maps.Store) map[uint32]int {
	if n.active == nil {
		n.active = s.ActiveSharers()
	}
	return n.active
}

// throughNAT lets a question follow packets, where it is about a device on which no packet has the address.
func (q *Question) throughNAT() error {
	if q.Device == "" || q.Flow != nil || !q.Address.IsValid() {
		return nil
	}
	d, err := netinfo.DeviceByName(q.Device)
	if errors.Is(err, netinfo.ErrNoDevice) {
		return nil
	}
	inside, err := hides(d, q.Address)
	if inside {
		q.Device = ""
	}
	return err
}

// hides reports whether an address is behind NAT, and so on no packet of a device.
func hides(d netinfo.Device, a netip.Addr) (bool, error) {
	behind, err := d.BehindLine()
	return behind.Hides(netip.PrefixFrom(a, a.BitLen())) != "", err
}

func (q *Question) gather(n *view) ([]Facts, error) {
	if q.Device == "" {
		return onRoutes(n, *q)
	}
	all, err := onDevice(n, *q)
	if err != nil || !q.Routes {
		return all, err
	}
	for i := range all {
		path, err := routed(n, all[i].Packets, q.Bytes)
		if err != nil {
			return nil, err
		}
		hop := all[i].Stops[0].Hop
		for j := range path.Stops {
			if s := &path.Stops[j]; s.Index == hop.Index && s.Direction == hop.Direction {
				all[i] = path
			}
		}
	}
	return all, nil
}

// onDevice is about both directions of the device that was named, or one.
func onDevice(n *view, q Question) ([]Facts, error) {
	directions := []policy.Direction{policy.Egress, policy.Ingress}
	if q.Direction != nil {
		directions = []policy.Direction{*q.Direction}
	}
	var places []place
	for _, d := range directions {
		p, err := placeOn(n, q.Device, d)
		if err != nil {
			return nil, err
		}
		if p.hook != nil {
			defer p.hook.Close()
		}
		places = append(places, p)
	}
	if len(places) == 2 && places[0].match == places[1].match { // no packet has the address on that side in both
		return nil, &QuestionError{fmt.Errorf("the rules of both directions compare the %s; name a direction, as in %s",
			sideNames[places[0].match], plain.Suggest(q.Netns, "explain", q.Device, "egress", q.Address.String()))}
	}
	var all []Facts
	var refused *QuestionError
	for _, p := range places {
		f, err := p.explain(n, q)
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

// A place is a direction of the device that was named.
type place struct {
	netinfo.Hop
	hook  *loader.Hook // nil where there are no rules
	match policy.Match // of its rules
}

func placeOn(n *view, device string, d policy.Direction) (p place, err error) {
	h, err := n.Find(device, d)
	if err != nil {
		return p, err
	}
	if h != nil {
		return placeOf(h), nil
	}
	p.Direction, p.match = d, d.FarSide()
	if p.Device, err = netinfo.DeviceByName(device); errors.Is(err, netinfo.ErrNoDevice) {
		err = &QuestionError{err}
	}
	return p, err
}

func placeOf(h *loader.Hook) place {
	return place{netinfo.Hop{Device: h.Device, Direction: h.Direction}, h, h.Match()}
}

func (p place) explain(n *view, q Question) (f Facts, err error) {
	f.Packets = q.packets()
	switch {
	case q.Flow != nil:
		f.Src, f.Dst = q.Flow.Src, q.Flow.Dst
		if far := f.side(p.match); far != q.Address {
			return f, &QuestionError{fmt.Errorf("the flow's %s is %s; the rules of %s go by that side, so it must be the address asked for",
				p.match, far, p.Direction)}
		}
	case p.match == policy.MatchSrc:
		f.Src = q.Address
	default:
		f.Dst = q.Address
	}
	s, err := stopAt(n, p.hook, p.Hop, f.Packets, cmp.Or(q.Bytes, p.FullFrame()))
	f.Stops = []Stop{s}
	if err != nil || !p.Device.IsCgroup() {
		return f, err
	}
	hooks, err := n.Hooks()
	defer loader.CloseHooks(hooks)
	at, names := map[string]*loader.Hook{}, []string{}
	for _, h := range hooks {
		if h.Device.IsCgroup() && h.Direction == p.Direction {
			at[h.Name()], names = h, append(names, h.Name())
		}
	}
	for _, name := range netinfo.CgroupsAbove(p.Name, names) {
		if s, err = stopAt(n, at[name], placeOf(at[name]).Hop, f.Packets, cmp.Or(q.Bytes, p.FullFrame())); err != nil {
			return f, err
		}
		f.Stops = append(f.Stops, s)
	}
	return f, err
}

// onRoutes is about all hooks that packets pass by the present routes.
func onRoutes(n *view, q Question) ([]Facts, error) {
	to, from := q.packets(), q.packets()
	to.Dst, from.Src = q.Address, q.Address
	asked := []Packets{to, from}
	if q.Flow != nil {
		to.Src, to.Dst = q.Flow.Src, q.Flow.Dst
		asked = []Packets{to}
	}
	var all []Facts
	for _, p := range asked {
		f, err := routed(n, p, q.Bytes)
		if err != nil {
			return nil, err
		}
		bridged, err := f.bridged(n, q)
		if err != nil {
			return nil, err
		}
		if bridged == nil {
			bridged = []Facts{f}
		}
		all = append(all, bridged...)
	}
	return all, nil
}

// bridged is about each hook with a rule for the packets, if there is no route for them: a bridge needs none.
func (f *Facts) bridged(n *view, q Question) (all []Facts, err error) {
	if f.Flow != nil || f.In.NoRoute == nil && f.Out.NoRoute == nil {
		return nil, nil
	}
	for _, h := range n.hooks {
		address := f.side(h.Match())
		if _, found := h.Set.Match(address); !address.IsValid() || !found {
			continue
		}
		on, err := placeOf(h).explain(n, q)
		if err != nil {
			return nil, err
		}
		all = append(all, on)
	}
	return all, nil
}

// routed is about the hooks with rules that packets pass, and about their device in any case.
func routed(n *view, p Packets, bytes uint64) (f Facts, err error) {
	f = Facts{Packets: p, Routed: true}
	if f.In, err = legIn(p.Src); err != nil {
		return f, err
	}
	if f.Out, err = legOut(p.Dst, f.In); err != nil {
		return f, err
	}
	beyond, err := f.toOutside()
	if err != nil {
		return f, err
	}
	legs := []Leg{f.In, f.Out}
	if len(beyond.Hops) > 0 {
		if hidden, err := hides(beyond.Route.Device, cmp.Or(p.Src, p.Dst)); err != nil {
			return f, err
		} else if hidden {
			f.NAT = beyond.Route.Device.Name
			legs[slices.IndexFunc(legs, func(l Leg) bool { return !l.End.IsValid() })] = beyond
		}
	}
	met := map[*loader.Hook]bool{}
	for _, l := range legs {
		for _, hop := range l.Hops {
			h := n.hookOn(hop)
			if h == nil && hop.Index != l.Route.Device.Index && !loader.OtherLayout(n.Readable(), hop.Index, hop.Direction) {
				continue
			}
			met[h] = true
			here := p
			here.hidden = f.NAT != "" && l.End == beyond.End
			s, err := stopAt(n, h, hop, here, cmp.Or(bytes, l.Route.Device.FullFrame()))
			if err != nil {
				return f, err
			}
			f.Stops = append(f.Stops, s)
		}
	}
	for _, h := range n.hooks {
		if met[h] {
			continue
		}
		back := &f.Out // by whose device packets do not come in again
		if h.Direction == policy.Egress {
			back = &f.In
		}
		address := p.side(h.Match())
		if !address.IsValid() && slices.ContainsFunc(beyond.Hops, func(hop netinfo.Hop) bool { return isOn(h, hop) }) {
			address = outside(p.ipv6())
		}
		if !address.IsValid() || h.Device.Index != 0 && h.Device.Index == back.Route.Device.Index {
			continue
		}
		if e, found := h.Set.Match(address); found && (e.Limits() || p.named(e.Rule, h.Name())) {
			f.Elsewhere = append(f.Elsewhere, Elsewhere{hookOf(h), e.Rule})
		}
	}
	return f, nil
}

// toOutside is how packets of which one end is known reach the Internet, or come from there, if they pass this host.
func (f *Facts) toOutside() (l Leg, err error) {
	switch {
	case f.Flow != nil:
	case f.In.passes():
		l, err = legOut(outside(f.ipv6()), Leg{})
	case f.Out.passes():
		l, err = legIn(outside(f.ipv6()))
	}
	if l.Route.Device.Index == f.In.Route.Device.Index || l.Route.Device.Index == f.Out.Route.Device.Index {
		return Leg{}, err
	}
	return l, err
}

func (n *view) hookOn(hop netinfo.Hop) *loader.Hook {
	if i := slices.IndexFunc(n.hooks, func(h *loader.Hook) bool { return isOn(h, hop) }); i >= 0 {
		return n.hooks[i]
	}
	return nil
}

func isOn(h *loader.Hook, hop netinfo.Hop) bool {
	return h.Device.Index == hop.Index && h.Direction == hop.Direction
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
func (l *Leg) passes() bool { return l.Route.Device.Name != "" && !l.Route.Local }

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
func stopAt(n *view, h *loader.Hook, hop netinfo.Hop, p Packets, frame uint64) (s Stop, err error) {
	s = Stop{Hop: hop, Frame: frame}
	if hop.Name != "" {
		if s.Path, err = doctor.PathOf(n.Namespace, hop.Device, hop.Direction); err != nil {
			return s, err
		}
		if err := n.Readable(); loader.OtherLayout(err, hop.Index, hop.Direction) {
			s.Unreadable = err
		}
	}
	if h == nil {
		return s, nil
	}
	hook := hookOf(h)
	s.Hook = &hook
	address := p.side(hook.Match)
	e, found, same := maps.Entry{}, false, true
	if policy.IsMark(p.Network) {
		e, found = h.Set.Find(p.Network)
	} else {
		s.Marks = h.Set.Marks()
	}
	switch {
	case found && p.Flow == nil:
		address = netip.Addr{} // it may be any
	case found:
	case p.hidden:
		e, found = h.Set.Match(outside(p.ipv6()))
		address = netip.Addr{}
	case address.IsValid():
		e, found = h.Set.Match(address)
	default:
		e, found, same = h.Set.MatchAny(p.ipv6())
	}
	s.Undecided = !same
	if found {
		s.Rule = ruleFor(n, h, e, address, &p)
	}
	if s.Rule != nil && (s.Rule.Excess == policy.Delay || s.Rule.Stages.delays()) && deciderOf(s.Path) >= 0 {
		s.Queue, err = doctor.QueueOf(hop.Index, hop.Direction)
	}
	return s, err
}

func hookOf(h *loader.Hook) Hook {
	hook := Hook{
		Name: h.Name(), Device: h.Device, Direction: h.Direction, Match: h.Match(), Mode: h.Mode, State: h.State, Status: h.Status(),
	}
	if change, until := h.Set.Store.Change(); change == maps.Pending && until != 0 {
		left := until - min(until, maps.Now())
		hook.RevertsInNS = &left
	}
	return hook
}

// ruleFor is a rule that matches an address, the zero Addr for one that is not known.
func ruleFor(n *view, h *loader.Hook, e maps.Entry, address netip.Addr, p *Packets) *Rule {
	r := &Rule{Rule: e.Rule, Counters: h.Set.Store.Counters(e.ID)}
	for bits := e.Prefix.Bits() - 1; bits >= 0 && !policy.IsMark(e.Prefix); bits-- {
		prefix := netip.PrefixFrom(e.Prefix.Addr(), bits).Masked()
		if wider, ok := h.Set.Find(prefix); ok {
			r.Hides = append(r.Hides, wider.Rule)
		}
	}
	if e.Rate != policy.Unlimited {
		r.Bucket = bucketFor(h, e, address, p.Flow)
	}
	if !e.Algorithm.HasColours() && e.Limits() {
		r.Stages = stagesFor(n, h.Set, e, h.Match(), p.Flow, address)
		if r.Bucket != nil {
			r.Bucket.State = r.Stages.Model[0].State
		}
	}
	return r
}

// bucketFor is the bucket of a rule for packets; nil where it depends on what is not known of them.
func bucketFor(h *loader.Hook, e maps.Entry, address netip.Addr, given *maps.Flow) *Bucket {
	if e.NAT && e.Each.Kind != policy.EachAll || given == nil && (e.Each.Kind == policy.EachFlow || !address.IsValid() && e.Each.Kind != policy.EachAll) {
		return nil
	}
	flow := flowOf(given, address)
	b := &Bucket{maps.KeyName(e, h.Match(), flow), h.Set.Store.State(e, h.Match(), flow, maps.Now())}
	b.FIFO = b.FIFO || given == nil
	return b
}
