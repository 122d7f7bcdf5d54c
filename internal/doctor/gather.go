package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/inforce"
	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Gather collects facts about the system, and in the calling thread's network namespace
// about one device or, without a name, about all that have rules.
// The error wraps netinfo.ErrNoDevice if there is neither a device nor a rule of that name.
// follows is the policy that a serve follows, if it is known.
func Gather(o loader.Options, name string, follows lastgood.Policy) (Facts, error) {
	f := Facts{}
	var err error
	if f.System, err = system(o); err != nil {
		return f, err
	}
	n, err := loader.Read(o)
	if err != nil {
		if errors.Is(err, bpffs.ErrUntrusted) {
			f.System.BPFFS.Untrusted = err
		} else if f.System.BPFFS.Untrusted == nil {
			f.unread("", "", err)
		}
		if errors.Is(err, fs.ErrPermission) {
			return f, nil // nobody knows what has rules
		}
		n = new(loader.Namespace) // which has no rules
	} else {
		defer n.Close()
		if f.Left, err = loader.Leftovers(o); err != nil {
			f.unread("", "", err)
		}
		f.Lost = n.Lost
		f.Elsewhere, f.KnowsOthers = loader.Elsewhere(n, func(string, policy.Direction) bool { return true })
	}
	devices, err := netinfo.Devices()
	if err != nil {
		return f, err
	}
	for _, d := range devices {
		added := Device{Device: d, Tunnel: d.Tunnel()}
		added.Forwards4, added.Forwards6 = d.Forwards()
		f.Devices = append(f.Devices, added)
	}
	f.MadeBy = report.MadeBy(n.Pending())
	f.pools(n)
	if err := f.allHooks(n); errors.Is(err, bpffs.ErrUntrusted) {
		f.System.BPFFS.Untrusted = err
	} else if err != nil {
		f.unread("", "", err)
	} else if f.Lacks, f.Policy, err = inforce.Lacks(n, follows); err != nil {
		f.unread("", "", err)
	}
	if name != "" {
		if err := f.ask(n, name); err != nil {
			return f, err
		}
	}
	f.details()
	f.watched(o)
	f.findPools()
	ours, err := fq.Devices()
	if err != nil {
		f.unread("", "", err)
	}
	for i := range f.Hooks {
		s := &f.Hooks[i]
		s.HasOurFQ = s.Direction == policy.Egress && slices.Contains(ours, s.Index)
		f.attached(n, s)
	}
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
	s.JIT, s.Probe = probe()
	return s, nil
}

// probe loads the program with maps of its own, and closes it. It reports whether the kernel
// compiles programs to machine code. The error says what this process may not do, or this
// kernel cannot.
func probe() (jited bool, err error) {
	store, err := maps.New(maps.Size{Rules: 1, Buckets: uint32(bpf.AbiLayoutLINE_SLOTS)}, bpf.AbiHook{L2Bytes: netinfo.EthernetBytes})
	if err != nil {
		return false, err
	}
	defer store.Close()
	p, err := program.Load(store, store.Hook())
	if err != nil {
		return false, err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return false, fmt.Errorf("ask for the program: %w", err)
	}
	_, err = info.JitedSize()
	return err == nil, nil
}

// pools adds the pools, and the sharers of all shared buckets.
func (f *Facts) pools(n *loader.Namespace) {
	h := n.Pools()
	defer h.Close()
	if h.Set == nil {
		return
	}
	f.changeOf(h.Set)
	f.sharers = h.Set.Store.ActiveSharers()
	f.Periods, f.Unset = h.Set.Store.Periods(), time.Now().Year() < 2020
	for _, e := range h.Set.Rules() {
		r := f.ruleFacts(h.Set, e)
		if e.Cluster.Name != "" {
			r.Lease, _ = h.Set.Lease(e.Prefix)
			r.Leased = maps.Now() < r.Lease.Until
		}
		f.Pools = append(f.Pools, r)
	}
}

// changeOf adds the last change, which all sets of a namespace share.
func (f *Facts) changeOf(set *maps.Set) {
	f.Change, f.Until = set.Store.Change()
	f.Until -= min(f.Until, maps.Now())
	if f.Change == maps.Committed && set.Store.Begins() == 0 {
		f.Change = maps.NoChange // it cannot be rolled back any more
	}
}

func (f *Facts) ruleFacts(set *maps.Set, e maps.Entry) Rule {
	return Rule{Rule: e.Rule, Counters: set.Store.Counters(e.ID), Sharers: f.sharers[e.ID]}
}

// allHooks adds all hooks that have rules, as stacked devices are judged together.
func (f *Facts) allHooks(n *loader.Namespace) error {
	hooks, err := n.Hooks() // with the error come those that could be read
	for _, h := range hooks {
		s, err := f.hookFacts(h)
		h.Close()
		if err != nil {
			f.unread(s.Name, s.Direction.String(), err)
			continue
		}
		if len(s.Limits.Rules) == 0 {
			f.Kept = append(f.Kept, s.Name+" "+s.Direction.String())
			continue
		}
		f.Hooks = append(f.Hooks, s)
	}
	return err
}

func (f *Facts) hookFacts(h *loader.Hook) (Hook, error) {
	s := Hook{Name: h.Name(), Index: h.Device.Index, Direction: h.Direction}
	l := &Limits{State: h.State, Mode: h.Mode, Unpinned: h.Unpinned, Was: h.Was, Match: h.Match()}
	l.OtherFrames, l.OtherBytes = h.Set.Others()
	f.changeOf(h.Set)
	var err error
	if l.OtherBuild, err = h.OtherBuild(); err != nil {
		return s, err
	}
	for _, e := range h.Set.Rules() {
		r := f.ruleFacts(h.Set, e)
		l.Rules = append(l.Rules, r)
		if r.Counters.SpilledPackets > 0 && l.Slots.All == 0 {
			l.Slots = h.Set.Store.Slots(maps.Now())
		}
	}
	s.Limits = l
	return s, nil
}

// ask adds both directions of a device, and leaves the others for comparison only.
func (f *Facts) ask(n *loader.Namespace, name string) error {
	d, err := netinfo.DeviceByName(name)
	gone := errors.Is(err, netinfo.ErrNoDevice) && (f.has(name, policy.Egress) || f.has(name, policy.Ingress))
	if err != nil && !gone {
		return err
	}
	f.Only = name
	if gone {
		return nil
	}
	f.Only = d.Name // name may have been an alternative one
	for _, direction := range []policy.Direction{policy.Egress, policy.Ingress} {
		if !f.has(d.Name, direction) {
			other := loader.OtherLayout(n.Readable(), d.Index, direction)
			f.Hooks = append(f.Hooks, Hook{Name: d.Name, Index: d.Index, Direction: direction, Other: other})
		}
	}
	return nil
}

func (f *Facts) has(name string, direction policy.Direction) bool {
	return slices.ContainsFunc(f.Hooks, func(s Hook) bool { return s.Name == name && s.Direction == direction })
}

// details adds the offloads of all devices, where the cgroups are, and what is only needed of those that are judged.
func (f *Facts) details() {
	var cgroups []string
	for i := range f.Hooks {
		if s := &f.Hooks[i]; netinfo.IsCgroup(s.Index) {
			cgroups = append(cgroups, s.Name)
		}
	}
	f.Cgroups = netinfo.CgroupDirs(cgroups)
	for i := range f.Devices {
		d := &f.Devices[i]
		judged := f.judged(d.Name) && (f.has(d.Name, policy.Egress) || f.has(d.Name, policy.Ingress))
		var err error
		if d.Offloads, err = d.Device.Offloads(); err != nil && judged {
			f.unread(d.Name, "", err)
		}
		if !judged {
			continue
		}
		d.Unreadable = d.CheckReadable()
		if d.IPv4, d.IPv6, err = d.Addresses(); err != nil {
			f.unread(d.Name, "", err)
		}
		if d.Behind, err = d.BehindLine(); err != nil {
			f.unread(d.Name, "", err)
		}
	}
}

// attached adds what else is attached to a hook, and the qdisc or ifb that delays packets there.
func (f *Facts) attached(n *loader.Namespace, s *Hook) {
	if !f.judged(s.Name) {
		return
	}
	if i := slices.IndexFunc(f.Devices, func(d Device) bool { return d.Index == s.Index }); i >= 0 {
		var err error
		if s.Path, err = PathOf(n, f.Devices[i].Device, s.Direction); err != nil {
			f.unread(s.Name, s.Direction.String(), err)
		}
	}
	if len(f.delaying(s)) == 0 || !s.inForce() {
		return
	}
	var err error
	if s.Queue, err = QueueOf(s.Index, s.Direction); err != nil {
		f.unread(s.Name, s.Direction.String(), err)
		s.Queue = nil
	}
}

// watched adds what tells whether a serve is at work where one is needed.
func (f *Facts) watched(o loader.Options) {
	if slices.ContainsFunc(f.Pools, Rule.adapts) {
		adapted, err := loader.HasLessee(o, loader.LineLeases)
		f.Unadapted = !adapted && err == nil
		if err != nil {
			f.unread("", "", err)
		}
	}
	macs := map[policy.MAC]bool{}
	for h := range f.hosts() {
		macs[h.mac] = true
	}
	if len(macs) == 0 {
		return
	}
	var err error
	if f.Neighbours, err = netinfo.ListNeighbours(macs); err != nil {
		f.unread("", "", err)
	}
}
