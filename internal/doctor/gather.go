package doctor

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Gather finds out about the system, and in the calling thread's network
// namespace about one device, or, without a name, about all that have rules.
// The error wraps netinfo.ErrNoDevice where there is neither a device nor a rule of that name.
func Gather(o loader.Options, name string) (Facts, error) {
	f := Facts{}
	var err error
	if f.System, err = system(o); err != nil {
		return f, err
	}
	n, err := loader.Read(o)
	if err != nil {
		if errors.Is(err, loader.ErrUntrusted) {
			f.System.BPFFS.Untrusted = err
		} else if f.System.BPFFS.Untrusted == nil {
			f.unread("", "", err)
		}
		n = new(loader.Namespace) // which has no rules
	} else {
		defer n.Close()
		if f.Left, err = n.Leftovers(); err != nil {
			f.unread("", "", err)
		}
	}
	if err := f.allDevices(); err != nil {
		return f, err
	}
	if err := f.allSides(n); errors.Is(err, loader.ErrUntrusted) {
		f.System.BPFFS.Untrusted = err
	} else if err != nil {
		f.unread("", "", err)
	}
	if name != "" {
		if err := f.ask(name); err != nil {
			return f, err
		}
	}
	f.details()
	f.chains(n)
	f.queues(n)
	return f, nil
}

func (f *Facts) unread(device, direction string, err error) {
	f.Unread = append(f.Unread, Unread{Device: device, Direction: direction, Err: err})
}

func system(o loader.Options) (System, error) {
	var s System
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return s, fmt.Errorf("ask for the kernel's name: %w", err)
	}
	s.Kernel = "Linux " + unix.ByteSliceToString(name.Release[:])
	var err error
	if s.Capabilities, err = program.Capabilities(); err != nil {
		return s, err
	}
	if s.BPFFS, err = loader.FindBPFFS(o); err != nil {
		return s, err
	}
	s.Hook, s.HookErr = loader.HookMode(o)
	s.JIT, s.Probe = loader.Probe()
	return s, nil
}

func (f *Facts) allDevices() error {
	devices, err := netinfo.Devices()
	if err != nil {
		return err
	}
	for _, d := range devices {
		f.Devices = append(f.Devices, Device{Device: d, Tunnel: d.Tunnel()})
	}
	return nil
}

// allSides are those that have rules, as stacked devices are judged together.
func (f *Facts) allSides(n *loader.Namespace) error {
	hooks, err := n.Hooks() // with the error come those that could be read
	for _, h := range hooks {
		s, err := side(h)
		h.Close()
		if err != nil {
			f.unread(s.Name, s.Direction.String(), err)
			continue
		}
		if len(s.Limits.Rules) == 0 {
			f.Kept = append(f.Kept, s.Name+" "+s.Direction.String())
			continue
		}
		f.Sides = append(f.Sides, s)
	}
	return err
}

func side(h *loader.Hook) (Side, error) {
	s := Side{Name: h.Name(), Index: h.Device.Index, Direction: h.Direction}
	l := &Limits{State: h.State, Mode: h.Mode, Was: h.Was, Match: h.Match()}
	l.Change, l.Until = h.Set.Change()
	l.Until -= min(l.Until, maps.Now())
	if l.Change == maps.Committed && h.Set.Begins() == 0 {
		l.Change = maps.NoChange // it can not be taken back any more
	}
	var err error
	if l.OtherBuild, err = h.OtherBuild(); err != nil {
		return s, err
	}
	for _, e := range h.Set.Rules() {
		r := Rule{Rule: e.Rule, Counters: h.Set.Counters(e.ID)}
		l.Rules = append(l.Rules, r)
		if r.Counters.SpilledPackets > 0 && l.Slots.All == 0 {
			l.Slots = h.Set.Slots(maps.Now())
		}
	}
	s.Limits = l
	return s, nil
}

// ask adds both directions of a device, and leaves the others for comparison only.
func (f *Facts) ask(name string) error {
	d, err := netinfo.DeviceByName(name)
	switch {
	case err == nil:
		name = d.Name // it may have been an alternative one
	case !errors.Is(err, netinfo.ErrNoDevice):
		return err
	}
	f.Only = name
	found := false
	for _, direction := range []policy.Direction{policy.Egress, policy.Ingress} {
		if f.has(name, direction) {
			found = true
		} else if err == nil {
			f.Sides = append(f.Sides, Side{Name: name, Index: d.Index, Direction: direction})
		}
	}
	if err != nil && !found {
		return err
	}
	return nil
}

func (f *Facts) has(name string, direction policy.Direction) bool {
	for _, s := range f.Sides {
		if s.Name == name && s.Direction == direction {
			return true
		}
	}
	return false
}

// details asks for what only the devices that are judged are asked for.
func (f *Facts) details() {
	for i := range f.Devices {
		d := &f.Devices[i]
		if !f.judged(d.Name) || !f.has(d.Name, policy.Egress) && !f.has(d.Name, policy.Ingress) {
			continue
		}
		d.Unreadable = d.CheckReadable()
		var err error
		if d.Offloads, err = d.Device.Offloads(); err != nil {
			f.unread(d.Name, "", err)
		}
		if d.IPv4, d.IPv6, err = d.Addresses(); err != nil {
			f.unread(d.Name, "", err)
		}
	}
}

func (f *Facts) chains(n *loader.Namespace) {
	for i := range f.Sides {
		s := &f.Sides[i]
		d := f.device(s.Index)
		if d == nil || !f.judged(s.Name) {
			continue
		}
		ours, err := n.Programs(d.Index, s.Direction)
		if err == nil {
			s.Chain, err = netinfo.Chain(d.Index, s.Direction, ours)
		}
		if err != nil {
			f.unread(s.Name, s.Direction.String(), err)
		} else if s.Chain == nil {
			s.Chain = []netinfo.ChainEntry{}
		}
	}
}

// queues looks at what holds packets back, where rules delay, and where it is left from when they did.
func (f *Facts) queues(n *loader.Namespace) {
	for i := range f.Sides {
		s := &f.Sides[i]
		s.GivenFQ = s.Direction == policy.Egress && n.GivenFQ(s.Index)
		if len(s.delaying()) == 0 || !s.inForce() || !f.judged(s.Name) {
			continue
		}
		var q Queue
		var err error
		if s.Direction == policy.Egress {
			q.State, err = fq.Look(s.Index)
		} else if q.Ifb, err = fq.FindIfb(s.Index); q.Ifb != nil {
			q.State = q.Ifb.State
		}
		if err != nil {
			f.unread(s.Name, s.Direction.String(), err)
			continue
		}
		s.Queue = &q
	}
}
