package explain

import (
	"errors"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// legWords describe a leg.
type legWords struct {
	known bool   // it is known which devices packets pass, if any
	how   string // "leave by eth0"; "" where nothing is known
	why   string // the reason
}

func judgeLegs(in, out *Leg) (legWords, legWords) {
	if in.Route.Local && out.Route.Local {
		stay := legWords{known: true, how: "stay on this host, by " + out.Route.Device.Name}
		return stay, stay
	}
	return judgeIn(in), judgeOut(out)
}

// judgeIn assumes that packets come in where those to their source leave.
func judgeIn(l *Leg) legWords {
	switch {
	case !l.End.IsValid():
		return legWords{}
	case l.NoRoute != nil:
		return legWords{how: "come in by any device, if at all", why: " (to " + l.End.String() + ": " + kernelReason(l.NoRoute) + ")"}
	case l.Route.Local:
		return legWords{known: true, how: "are this host's own"}
	}
	return legWords{known: true, how: "come in by " + deviceNames(l.Hops) + beyond(l, "from"), why: " (where those to " + l.End.String() + " leave)"}
}

func judgeOut(l *Leg) legWords {
	switch {
	case !l.End.IsValid():
		return legWords{}
	case l.NoRoute != nil:
		return legWords{known: true, how: "have no route", why: " (" + kernelReason(l.NoRoute) + ")"}
	case l.Route.Local:
		return legWords{known: true, how: "are for this host itself"}
	}
	words := legWords{known: true, how: "leave by " + deviceNames(l.Hops) + beyond(l, "to")}
	if l.Route.Next != l.End {
		words.why = ", to " + l.Route.Next.String()
	}
	if l.Unwilling != nil {
		words.how, words.why = "would "+words.how, words.why+", if this host forwarded them ("+kernelReason(l.Unwilling)+")"
	}
	return words
}

// kernelReason is the kernel's own error.
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

// beyond is how packets go on below the known devices; preposition is for the other end of a tunnel.
func beyond(l *Leg, preposition string) string {
	switch {
	case len(l.Ports) > 0:
		return ", by one of its ports"
	case l.Tunnel != nil && l.Tunnel.Remote.IsValid():
		return ", wrapped, " + preposition + " " + l.Tunnel.Remote.String()
	case l.Tunnel != nil:
		return ", wrapped"
	}
	return ""
}

// addressAt is the address of the packets that the rules of a hook compare: their own, or the
// other end of the tunnel that wraps them first.
func addressAt(h *Hook, p *Packets, in, out *Leg) netip.Addr {
	if t := tunnelOver(h, in, out); t != nil {
		return t.Remote
	}
	return p.side(h.Match)
}

// tunnelOver is the tunnel whose packets pass a hook that sees the addresses of its ends; nil for none.
func tunnelOver(h *Hook, in, out *Leg) *netinfo.Tunnel {
	here := in
	if h.Direction == policy.Egress {
		here = out
	}
	if t := here.Tunnel; t != nil && t.Underlay != 0 && t.Underlay == h.Device.Index && h.Match == h.Direction.FarSide() {
		return t
	}
	return nil
}

// turnBack reports whether packets that pass a hook would pass its device in the other
// direction, too. Below a VLAN they may.
func turnBack(h *Hook, in, out *Leg) bool {
	other := out
	if h.Direction == policy.Egress {
		other = in
	}
	return slices.ContainsFunc(other.Hops, func(hop netinfo.Hop) bool {
		return hop.Index == h.Device.Index && hop.Direction != h.Direction && hop.Tags == 0 &&
			(hop.Index == other.Route.Device.Index || hop.Master != 0)
	})
}

// metWhen says whether packets may pass a hook that is not on their path, and when.
func metWhen(netns string, h *Hook, in, out *Leg) (bool, string) {
	if t := tunnelOver(h, in, out); t != nil {
		return true, "met by them wrapped: " + plain.Suggest(netns, "explain", h.Name, h.Direction.String(), t.Remote.String())
	}
	comesIn, leaves := judgeLegs(in, out)
	here, words, come := in, comesIn, "they come in by "
	if h.Direction == policy.Egress {
		here, words, come = out, leaves, "they leave by "
	}
	for _, port := range here.Ports {
		if port.Index == h.Device.Index {
			return true, "met if " + h.Name + " is the port that they take"
		}
	}
	switch {
	case h.Device.Name == "":
		return false, "not on this path"
	case h.Device.Loopback && (in.Route.Local && leaves.how == "" || out.Route.Local && comesIn.how == ""):
		return true, "met if they stay on this host"
	case words.known && h.Device.Master != 0 && !slices.ContainsFunc(here.Hops, func(hop netinfo.Hop) bool { return hop.Index == h.Device.Master }):
		return false, "not on this path, unless they are bridged"
	case words.known:
		return false, "not on this path"
	}
	return true, "met if " + come + h.Name
}
