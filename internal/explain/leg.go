package explain

import (
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netinfo"
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
	return in.words(true), out.words(false)
}

// words assume that packets come in where those to their source leave.
func (l *Leg) words(in bool) legWords {
	switch {
	case !l.End.IsValid():
		return legWords{}
	case l.NoRoute != nil && in:
		return legWords{how: "come in by any device, if at all", why: " (to " + l.End.String() + ": " + kernelReason(l.NoRoute) + ")"}
	case l.NoRoute != nil:
		return legWords{known: true, how: "have no route", why: " (" + kernelReason(l.NoRoute) + ")"}
	case l.Route.Local && in:
		return legWords{known: true, how: "are this host's own"}
	case l.Route.Local:
		return legWords{known: true, how: "are for this host itself"}
	case in:
		return legWords{known: true, how: "come in by " + deviceNames(l.Hops) + beyond(l, "from"), why: " (where those to " + l.End.String() + " leave)"}
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

// metWhen says whether packets may pass a hook that is not on their path, and when.
func metWhen(h *Hook, in, out *Leg) (bool, string) {
	comesIn, leaves := judgeLegs(in, out)
	here, there, words, come, does := in, out, comesIn, "they come in by ", "receives"
	if h.Direction == policy.Egress {
		here, there, words, come, does = out, in, leaves, "they leave by ", "sends"
	}
	switch {
	case h.Device.IsCgroup() && here.passes() && !there.passes(): // neither local nor forwarded
		return true, "met if " + h.Name + " " + does + " them"
	case slices.ContainsFunc(here.Ports, func(port netinfo.Device) bool { return port.Index == h.Device.Index }):
		return true, "met if " + h.Name + " is the port that they take"
	case h.Device.Name == "" || words.known:
		return false, "not on this path"
	}
	return true, "met if " + come + h.Name
}
