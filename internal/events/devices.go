package events

import (
	"maps"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/report"
)

// A device that appears gets rules a moment later, for instance from serve. Only then it is told of.
const newFor = 5 * time.Second

// devices are those of the namespace, and cgroups with rules, by index.
type devices struct {
	names   map[int]string
	cgroups []string   // the names of those that are followed
	fresh   []newcomer // that had no rules yet
}

type newcomer struct {
	name string
	at   time.Time
}

// follow tells of devices that came, went or were renamed. The first time it only takes note of them.
func (s *session) follow() error {
	fresh, gone, err := s.arrivals.Take()
	if err != nil {
		return err
	}
	followed := s.devices.cgroups
	s.devices.cgroups = slices.Sorted(maps.Keys(s.rules.cgroups))
	cgroups, left, _ := s.cgroups.Take(s.devices.cgroups) // with an error, it learns of some later
	now := map[int]string{}
	if s.devices.names == nil || gone || left {
		if fresh, err = netinfo.Devices(); err != nil {
			return err
		}
		for _, name := range s.devices.cgroups {
			if d, err := netinfo.KnownDevice(name); err == nil {
				cgroups = append(cgroups, d)
			}
		}
	} else {
		now = maps.Clone(s.devices.names)
	}
	for _, d := range append(fresh, cgroups...) {
		now[d.Index] = d.Name
	}
	was := s.devices.names
	s.devices.names = now
	if was == nil {
		return nil
	}
	for index, name := range was {
		if now[index] != name && s.rules.had[name] {
			s.tell(report.Event{Kind: report.DeviceGone, Device: name, Sentence: "device " + name + " is gone"})
		}
	}
	for index, name := range now {
		if was[index] != name && (!netinfo.IsCgroup(index) || slices.Contains(followed, name)) {
			s.devices.fresh = append(s.devices.fresh, newcomer{name, time.Now()})
		}
	}
	s.newcomers()
	return nil
}

// followCgroups begins to follow cgroups that have got rules.
func (s *session) followCgroups() error {
	if len(s.devices.cgroups) == len(s.rules.cgroups) {
		return nil
	}
	return s.follow()
}

// newcomers tells of devices that came and have rules.
func (s *session) newcomers() {
	var wait []newcomer
	for _, d := range s.devices.fresh {
		switch {
		case s.rules.had[d.name]:
			s.tell(report.Event{Kind: report.DeviceAppeared, Time: d.at, Device: d.name, Sentence: "device " + d.name + " appeared"})
		case time.Since(d.at) < newFor:
			wait = append(wait, d)
		}
	}
	s.devices.fresh = wait
}
