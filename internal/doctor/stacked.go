package doctor

import (
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/policy"
)

// checkStacked finds packets that pass more than one device, and so may be limited
// twice, or bypass the device that has the rules.
func (f *Facts) checkStacked(s *Hook, d *Device) {
	if d == nil {
		return
	}
	for i := range f.Devices {
		f.checkTwice(s, d, &f.Devices[i])
	}
	if s.Limits != nil && len(s.Limits.metered()) == 0 {
		return
	}
	ports := f.names(func(o *Device) bool { return isPort(o, d) })
	above := f.names(func(o *Device) bool { return o.Parent == d.Index })
	tunnels := f.names(func(o *Device) bool { return carries(d, o) })
	master := f.byIndex[d.Master]
	switch {
	case d.Kind == "bridge":
		f.say(s, report.Note, "path", "packets that this host sends, receives or routes pass the bridge; packets between its ports are not limited", "to limit those, set rules on its ports: "+plain.List(ports))
	case master != nil && (master.Kind == "bond" || master.Kind == "team"):
		others := f.names(func(o *Device) bool { return isPort(o, master) && o.Index != d.Index })
		status := report.Warning
		if others == nil || s.Limits == nil {
			status = report.Note
		}
		f.say(s, status, "path", fmt.Sprintf("%s is one port of %s %s: packets that pass its other ports are not limited here: %s", d.Name, master.Kind, master.Name, plain.List(others)),
			"set the rule on "+master.Name+" to limit all ports together")
	}
	if above != nil {
		f.say(s, report.Note, "path", "packets of the devices on top pass here, too: "+plain.List(above), "set rules there to limit them separately; limit the same packets only there or only here")
	}
	if tunnels != nil {
		f.say(s, report.Note, "path", "packets of tunnels have the addresses of the tunnel's ends here, not those inside: "+plain.List(tunnels), "set rules on the tunnel to limit by the addresses inside")
	}
}

// checkTwice warns of rules on two devices that the same packets pass.
func (f *Facts) checkTwice(s *Hook, d, other *Device) {
	how, direction := meet(s, d, other)
	if how == "" || !s.inForce() {
		return
	}
	there := f.limits(other, direction)
	told := f.judged(other.Name) && (other.Index < s.Index || other.Index == s.Index && direction < s.Direction) // by the finding of the other device
	if there == nil || told || !overlap(s, d, there, other) {
		return
	}
	f.say(s, report.Warning, "counted twice", fmt.Sprintf("%s, and %s %s has rules for them, too: both charge them, and the lower rate decides", how, other.Name, direction),
		"keep the rules of one of the two")
}

// meet says how packets of a hook also pass another device, and in which direction; ""
// if they do not.
func meet(s *Hook, d, other *Device) (how string, there policy.Direction) {
	passAsWell := func(kind, upper, lower string) string {
		return fmt.Sprintf("packets of %s %s pass %s as well", kind, upper, lower)
	}
	opposite := policy.Ingress + policy.Egress - s.Direction
	switch {
	case d.Index == other.Index && d.Loopback:
		return "each packet leaves and enters " + d.Name, opposite
	case d.Index == other.Index:
		return "", 0
	case d.Peer == other.Index:
		return fmt.Sprintf("packets that leave one of %s and %s enter the other", d.Name, other.Name), opposite
	}
	for _, pair := range [][2]*Device{{d, other}, {other, d}} {
		switch upper, lower := pair[0], pair[1]; {
		case isPort(lower, upper), upper.Parent == lower.Index:
			return passAsWell(upper.Kind, upper.Name, lower.Name), s.Direction
		case carries(lower, upper):
			return passAsWell("tunnel", upper.Name, lower.Name) + ", wrapped in packets between the tunnel's ends", s.Direction
		}
	}
	return "", 0
}

// passPorts are the kinds of master whose packets pass a port of it as well.
var passPorts = map[string]bool{"bridge": true, "bond": true, "team": true}

func isPort(d, master *Device) bool { return d.Master == master.Index && passPorts[master.Kind] }

func carries(d, tunnel *Device) bool {
	return tunnel.Tunnel != nil && tunnel.Tunnel.Underlay == d.Index
}

// overlap reports whether rules of two devices on one path can be for the same packets.
func overlap(s *Hook, d *Device, there *Limits, other *Device) bool {
	// Of a tunnel, the device below sees the outer addresses only.
	switch {
	case carries(d, other):
		return holds(s.Limits, other.Tunnel)
	case carries(other, d):
		return holds(there, d.Tunnel)
	}
	return slices.ContainsFunc(s.Limits.metered(), func(a Rule) bool {
		return slices.ContainsFunc(there.metered(), func(b Rule) bool {
			if s.Limits.Match != there.Match { // different addresses of a packet: it may match both
				return a.Prefix.Addr().Is4() == b.Prefix.Addr().Is4()
			}
			return a.Prefix.Overlaps(b.Prefix)
		})
	})
}

// holds reports whether rules may be for the packets that a tunnel makes.
func holds(l *Limits, t *netinfo.Tunnel) bool {
	return slices.ContainsFunc(l.metered(), func(r Rule) bool { return !t.Remote.IsValid() || r.Prefix.Contains(t.Remote) })
}

func (f *Facts) names(is func(*Device) bool) (names []string) {
	for i := range f.Devices {
		if is(&f.Devices[i]) {
			names = append(names, f.Devices[i].Name)
		}
	}
	return names
}
