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
func checkStacked(f Facts, s Hook, d *Device) []report.Finding {
	if d == nil {
		return nil
	}
	var findings []report.Finding
	for i := range f.Devices {
		findings = append(findings, twice(f, s, d, &f.Devices[i])...)
	}
	if len(s.Limits.metered()) > 0 || s.Limits == nil {
		findings = append(findings, unseen(f, s, d)...)
	}
	return findings
}

// twice warns of rules on two devices that the same packets pass.
func twice(f Facts, s Hook, d, other *Device) []report.Finding {
	how, direction := meet(s, d, other)
	if how == "" {
		return nil
	}
	there := f.limits(other, direction)
	if !s.inForce() || there == nil || !overlap(s, d, there, other) || told(f, s, other, direction) {
		return nil
	}
	return s.finding(report.Warning, "counted twice",
		fmt.Sprintf("%s, and %s %s has rules for them, too: both charge them, and the lower rate decides", how, other.Name, direction),
		"keep the rules of one of the two")
}

// told reports whether the finding of the other device says so already.
func told(f Facts, s Hook, other *Device, direction policy.Direction) bool {
	return f.judged(other.Name) && (other.Index < s.Index || other.Index == s.Index && direction < s.Direction)
}

// meet says how packets of a hook also pass another device, and in which direction; ""
// if they do not.
func meet(s Hook, d, other *Device) (how string, there policy.Direction) {
	opposite := policy.Ingress
	if s.Direction == policy.Ingress {
		opposite = policy.Egress
	}
	switch {
	case d.Index == other.Index && d.Loopback:
		return "each packet leaves and enters " + d.Name, opposite
	case d.Index == other.Index:
		return "", 0
	case d.Peer == other.Index:
		return fmt.Sprintf("packets that leave one of %s and %s enter the other", d.Name, other.Name), opposite
	case isPort(other, d):
		return portOf(other, d), s.Direction
	case isPort(d, other):
		return portOf(d, other), s.Direction
	case other.Parent == d.Index:
		return fmt.Sprintf("packets of %s (%s) pass %s as well", other.Name, other.Kind, d.Name), s.Direction
	case d.Parent == other.Index:
		return fmt.Sprintf("packets of %s (%s) pass %s as well", d.Name, d.Kind, other.Name), s.Direction
	case carries(d, other):
		return wrapped(other, d), s.Direction
	case carries(other, d):
		return wrapped(d, other), s.Direction
	}
	return "", 0
}

// passPorts are the kinds of master whose packets pass a port of it as well.
var passPorts = map[string]bool{"bridge": true, "bond": true, "team": true}

func isPort(d, master *Device) bool { return d.Master == master.Index && passPorts[master.Kind] }

func carries(d, tunnel *Device) bool {
	return tunnel.Tunnel != nil && tunnel.Tunnel.Underlay == d.Index
}

func portOf(port, master *Device) string {
	return fmt.Sprintf("packets of %s %s pass its port %s as well", master.Kind, master.Name, port.Name)
}

func wrapped(tunnel, underlay *Device) string {
	return fmt.Sprintf("packets of tunnel %s pass %s as well, wrapped in packets between the tunnel's ends", tunnel.Name, underlay.Name)
}

// overlap reports whether rules of two devices on one path can be for the same packets.
func overlap(s Hook, d *Device, there *Limits, other *Device) bool {
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

// unseen notes packets that rules on this device miss, or see besides.
func unseen(f Facts, s Hook, d *Device) []report.Finding {
	var findings []report.Finding
	note := func(finding, advice string) {
		findings = append(findings, s.finding(report.Note, "path", finding, advice)...)
	}
	ports := f.names(func(o *Device) bool { return isPort(o, d) })
	above := f.names(func(o *Device) bool { return o.Parent == d.Index })
	wrapping := f.names(func(o *Device) bool { return carries(d, o) })
	switch {
	case d.Loopback:
		note("packets between programs of this host pass "+d.Name+" twice, out and in", "use one direction, egress or ingress, not both")
	case d.Kind == "bridge":
		advice := ""
		if len(ports) > 0 {
			advice = "to limit those, set rules on its ports: " + plain.List(ports)
		}
		note("packets that this host sends, receives or routes pass the bridge; packets between its ports are not limited", advice)
	case d.Master != 0:
		findings = append(findings, ofPort(f, s, d)...)
	case d.Tunnel != nil && d.Tunnel.Underlay == 0:
		note("the packets pass another device as well, wrapped; it is not known which", "a rule for the tunnel's other end on that device would charge them twice")
	}
	if len(above) > 0 {
		note("packets of the devices on top pass here, too: "+plain.List(above), "set rules there to limit them separately; limit the same packets only there or only here")
	}
	if len(wrapping) > 0 {
		note("packets of tunnels have the addresses of the tunnel's ends here, not those inside: "+plain.List(wrapping), "set rules on the tunnel to limit by the addresses inside")
	}
	return findings
}

// ofPort says that rules on the port of a bond are for that port alone.
func ofPort(f Facts, s Hook, d *Device) []report.Finding {
	master := f.byIndex[d.Master]
	if master == nil || master.Kind != "bond" && master.Kind != "team" {
		return nil
	}
	bond := master.Kind + " " + master.Name
	advice := "set the rule on " + master.Name + " to limit all ports together"
	others := f.names(func(o *Device) bool { return isPort(o, master) && o.Index != d.Index })
	if len(others) == 0 {
		return s.finding(report.Note, "path", d.Name+" is the only port of "+bond+" now: packets on ports that are added are not limited here", advice)
	}
	status := report.Warning
	if s.Limits == nil {
		status = report.Note
	}
	return s.finding(status, "path",
		fmt.Sprintf("%s is one port of %s: the limit is for this port alone; packets of the bond also pass, and are not limited here: %s", d.Name, bond, plain.List(others)), advice)
}

// checkIfb finds rules on an ifb device that gets no packets.
func checkIfb(_ Facts, s Hook, d *Device) []report.Finding {
	if d == nil || !d.Unfed {
		return nil
	}
	status := report.Warning
	if s.Limits == nil {
		status = report.Note
	}
	return s.finding(status, "path", "no filter redirects packets to this ifb device, so rules here limit nothing",
		"set the rules on ingress of the device that the packets enter; or redirect them here with tc's action mirred")
}

func (f Facts) names(is func(*Device) bool) []string {
	var names []string
	for i := range f.Devices {
		if is(&f.Devices[i]) {
			names = append(names, f.Devices[i].Name)
		}
	}
	return names
}
