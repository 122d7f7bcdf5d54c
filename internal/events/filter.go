package events

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
)

// A Filter is devices, networks, addresses and names of rules and pools, of which an event must have one. Devices and names
// may be patterns. An empty filter lets all events through.
type Filter []filter

type filter struct {
	name    string
	pattern bool
	network netip.Prefix // valid if the name is a network or an address
}

// ParseFilter reads the arguments of a command.
func ParseFilter(args []string) (f Filter, err error) {
	for _, arg := range args {
		one := filter{name: arg, pattern: policyfile.IsPattern(arg)}
		if one.pattern {
			if err := policyfile.CheckPattern(arg); err != nil {
				return nil, err
			}
		}
		if address, err := netip.ParseAddr(arg); err == nil {
			one.network = netip.PrefixFrom(address, address.BitLen())
		} else if network, err := netip.ParsePrefix(arg); err == nil {
			one.network = network.Masked()
		} else if address, _, found := strings.Cut(arg, "/"); found {
			if _, noAddress := netip.ParseAddr(address); noAddress == nil {
				return nil, fmt.Errorf("%q is not a network: %w", arg, err)
			}
		}
		f = append(f, one)
	}
	return f, nil
}

// Matches reports whether the filter lets an event through.
func (f Filter) Matches(e report.Event) bool {
	if len(f) == 0 || e.Kind == report.LeftOut {
		return true
	}
	for _, one := range f {
		if one.matches(e) {
			return true
		}
		for _, rule := range e.Changed {
			if one.matches(report.Event{Network: rule.Network, Name: rule.Name}) {
				return true
			}
		}
	}
	return false
}

func (f filter) matches(e report.Event) bool {
	for _, name := range []string{e.Device, e.Name, e.Pool} {
		if name != "" && (name == f.name || f.pattern && policyfile.Matches(f.name, name)) {
			return true
		}
	}
	if !f.network.IsValid() {
		return f.name == e.Network // a mark or VLAN
	}
	if address, err := netip.ParseAddr(e.Address); err == nil {
		return f.network.Contains(address)
	}
	network, err := netip.ParsePrefix(e.Network)
	return err == nil && f.network.Overlaps(network)
}
