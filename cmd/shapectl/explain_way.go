package main

import (
	"errors"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// onRoutes explains all hooks that packets meet by the routes there are.
func (x explainer) onRoutes() ([]report.Way, error) {
	hooks, unread := x.n.Hooks()
	defer func() {
		for _, h := range hooks {
			h.Close()
		}
	}()
	asked := []askedPacket{{dst: x.o.address}, {src: x.o.address}}
	if f := x.o.flow; f != nil {
		asked = []askedPacket{{src: f.Src, dst: f.Dst, flow: f}}
	}
	var ways []report.Way
	for _, p := range asked {
		way, err := x.way(p, hooks)
		if err != nil {
			return nil, err
		}
		ways = append(ways, way)
	}
	return ways, unread
}

// A leg is one half of a way: into this host, or out of it.
type leg struct {
	known  bool   // by which devices it goes, if by any
	how    string // what packets do, "leave by eth0"; "" where nothing is known of them
	why    string // that is so
	device netinfo.Device
	own    bool // the address at its end is this host's own
	netinfo.Descent
}

// way explains the hooks that packets meet, of those that have rules, and what they meet on their device in any case.
func (x explainer) way(p askedPacket, hooks []*loader.Hook) (way report.Way, err error) {
	in, err := x.in(p.src)
	if err != nil {
		return way, err
	}
	out, err := x.out(p, in)
	if err != nil {
		return way, err
	}
	if in.own && out.own { // what stays here passes the loopback, which is the device of both routes
		out.how = "stay on this host, by " + out.device.Name
		in = leg{known: true, how: out.how, own: true}
		for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
			out.Hops = append(out.Hops, netinfo.Hop{Device: out.device, Direction: d})
		}
	}
	way = report.Way{Packets: p.String(), Hooks: []report.Stop{}, Elsewhere: []report.Elsewhere{}}
	way.How = in.how + in.why
	switch {
	case in.how == "":
		way.How = out.how + out.why
	case out.how != "" && out.how != in.how:
		way.How += ", and " + out.how + out.why
	}
	met := map[*loader.Hook]bool{}
	for _, l := range []leg{in, out} {
		p.frame = fullPacket(x.o.bytes, l.device)
		for _, hop := range l.Hops {
			h := hookOn(hooks, hop)
			if h == nil && hop.Index != l.device.Index {
				continue
			}
			met[h] = true
			stop, err := x.stop(h, hop, p)
			if err != nil {
				return way, err
			}
			way.Hooks = append(way.Hooks, stop)
		}
	}
	for _, h := range hooks {
		if !met[h] {
			way.Elsewhere = append(way.Elsewhere, elsewhere(h, p, in, out)...)
		}
	}
	return way, nil
}

func hookOn(hooks []*loader.Hook, hop netinfo.Hop) *loader.Hook {
	for _, h := range hooks {
		if h.Device.Index == hop.Index && h.Direction == hop.Direction {
			return h
		}
	}
	return nil
}

// in is how packets from an address come in: by where those to it leave.
func (x explainer) in(src netip.Addr) (leg, error) {
	if !src.IsValid() {
		return leg{}, nil
	}
	r, err := netinfo.RouteTo(src)
	switch {
	case errors.Is(err, netinfo.ErrNoRoute):
		return leg{how: "come in by any device, if at all", why: " (to " + src.String() + ": " + kernelReason(err) + ")"}, nil
	case err != nil:
		return leg{}, err
	case r.Own:
		return leg{known: true, how: "are this host's own", device: r.Device, own: true}, nil
	}
	down, err := netinfo.Descend(r.Device, r.Next)
	l := leg{known: true, device: r.Device, Descent: down.Reverse()}
	l.how, l.why = "come in by "+deviceNames(l.Hops)+beyond(down, "from"), " (where those to "+src.String()+" leave)"
	return l, err
}

// out is how packets leave.
func (x explainer) out(p askedPacket, in leg) (leg, error) {
	if !p.dst.IsValid() {
		return leg{}, nil
	}
	var unwilling error // of the kernel, to forward them
	r, err := netinfo.RouteTo(p.dst)
	if err == nil && p.src.IsValid() && !in.own && in.device.Name != "" {
		var forward netinfo.Route
		if forward, unwilling = netinfo.Forward(p.src, p.dst, in.device); unwilling == nil {
			r = forward
		} else if !errors.Is(unwilling, netinfo.ErrNoRoute) {
			return leg{}, unwilling
		}
	}
	switch {
	case errors.Is(err, netinfo.ErrNoRoute):
		return leg{known: true, how: "have no way out", why: " (" + kernelReason(err) + ")"}, nil
	case err != nil:
		return leg{}, err
	case r.Own:
		return leg{known: true, how: "are for this host itself", device: r.Device, own: true}, nil
	}
	down, err := netinfo.Descend(r.Device, r.Next)
	l := leg{known: true, how: "leave by " + deviceNames(down.Hops) + beyond(down, "to"), device: r.Device, Descent: down}
	if r.Next != p.dst {
		l.why = ", to " + r.Next.String()
	}
	if unwilling != nil {
		l.how, l.why = "would "+l.how, l.why+", if this host forwarded them ("+kernelReason(unwilling)+")"
	}
	return l, err
}

// kernelReason is what the kernel calls it.
func kernelReason(err error) string {
	var errno unix.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

func deviceNames(hops []netinfo.Hop) string {
	var names []string
	for _, h := range hops {
		names = append(names, h.Name)
	}
	return strings.Join(names, ", then ")
}

// beyond is how packets go on below the devices that are known; preposition leads to the other end of a tunnel.
func beyond(w netinfo.Descent, preposition string) string {
	switch {
	case len(w.Ports) > 0:
		return ", by one of its ports"
	case w.Tunnel != nil && w.Tunnel.Remote.IsValid():
		return ", wrapped, " + preposition + " " + w.Tunnel.Remote.String()
	case w.Tunnel != nil:
		return ", wrapped"
	}
	return ""
}

// elsewhere is the limit that a hook has for packets which do not meet it, or only some of them.
func elsewhere(h *loader.Hook, p askedPacket, in, out leg) []report.Elsewhere {
	here := in
	if h.Direction == policy.Egress {
		here = out
	}
	address, met := p.side(h.Match()), metWhen(h, in, out)
	if t := here.Tunnel; t != nil && t.Underlay == h.Device.Index && t.Underlay != 0 && h.Match() == h.Direction.FarSide() {
		address, met = t.Remote, "met by them wrapped: "+plain.Suggest("explain", h.Name(), h.Direction.String(), t.Remote.String())
	}
	if !address.IsValid() {
		return nil
	}
	rule, found := h.Set.Match(address)
	if !found || rule.Rate == policy.Unlimited {
		return nil
	}
	return []report.Elsewhere{{
		Device: h.Name(), Direction: h.Direction.String(), Brief: report.NewBrief(rule.Rule, h.Name(), h.Direction, h.Match()),
		Attached: h.InForce(), State: place(h).State, Met: met,
	}}
}

// metWhen says in which case packets meet a hook that is not on their way for sure.
func metWhen(h *loader.Hook, in, out leg) string {
	here, come := in, "they come in by "
	if h.Direction == policy.Egress {
		here, come = out, "they leave by "
	}
	for _, port := range here.Ports {
		if port.Index == h.Device.Index {
			return "met if " + h.Name() + " is the port that they take"
		}
	}
	switch {
	case h.Device.Name == "":
		return "not met"
	case h.Device.Loopback && (in.own && out.how == "" || out.own && in.how == ""):
		return "met if they stay on this host"
	case here.known:
		return "not met, as they " + here.how
	}
	return "met if " + come + h.Name()
}
