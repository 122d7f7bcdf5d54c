package loader

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrNoTCX means that tcx was asked for and the kernel, older than 6.6, has none.
var ErrNoTCX = errors.New("this kernel has no tcx (Linux 6.6 does)")

// ErrOneProgram means that another program keeps ours out of a cgroup.
var ErrOneProgram = errors.New("another program is attached to this cgroup or to one above it, without BPF_F_ALLOW_MULTI")

// ErrNoClsact means that neither tcx nor the qdisc that stands in for it is there.
var ErrNoClsact = errors.New("this kernel has neither tcx nor a clsact qdisc")

// ErrNoClsBPF means that neither tcx nor the filter that runs programs in a clsact qdisc is there.
var ErrNoClsBPF = errors.New("this kernel has neither tcx nor cls_bpf filters")

type filter = *netlink.BpfFilter

// An attachment is what puts a hook's program on its device: a tcx link, or a filter
// that runs the program.
type attachment struct {
	hookDir
	link     link.Link      // nil if none is pinned
	program  ebpf.ProgramID // that is pinned or, if something deleted the pin, that the link or filter runs; 0 for none
	unpinned bool           // something did
	filters  []filter       // that run it
}

// Pins of a hook. They are the same in every layout, as flush needs them.
const (
	linkPin    = "link"
	programPin = "program"
)

func (at hookDir) pin(name string) string { return filepath.Join(at.dir, name) }

// openAttachment opens what is pinned for a hook, in any layout; nothing where the directory is not there.
func openAttachment(at hookDir) (*attachment, error) {
	a := &attachment{hookDir: at}
	if err := bpffs.TrustDir(a.dir); errors.Is(err, fs.ErrNotExist) {
		return a, nil
	} else if err != nil {
		return nil, err
	}
	var err error
	if a.program, err = pinnedProgram(a.pin(programPin)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open the program of device %d %s: %w", a.index, a.direction, err)
	}
	if a.link, err = link.LoadPinnedLink(a.pin(linkPin), nil); err == nil {
		if a.index == 0 || a.program == 0 {
			info, index, err := a.ask()
			if err != nil {
				a.close()
				return nil, err
			}
			if a.unpinned = a.program == 0; a.unpinned {
				a.program = info.Program
			}
			a.index = cmp.Or(a.index, index)
		}
		return a, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open the link of device %d %s: %w", a.index, a.direction, err)
	}
	return a, a.findFilters()
}

func pinnedProgram(pin string) (id ebpf.ProgramID, err error) {
	p, err := ebpf.LoadPinnedProgram(pin, nil)
	if err != nil {
		return 0, err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return 0, fmt.Errorf("ask for the program: %w", err)
	}
	id, _ = info.ID()
	return id, nil
}

// findFilters finds the filters that run the pinned program on the device, or if that is not known, on any. Without the pin,
// they are those that run a program with its name.
func (a *attachment) findFilters() error {
	devices := []netinfo.Device{{Index: a.index}}
	switch {
	case a.program == 0 && a.index == 0, netinfo.IsCgroup(a.index):
		return nil
	case a.index == 0:
		var err error
		if devices, err = netinfo.Devices(); err != nil {
			return err
		}
	}
	a.unpinned = a.program == 0
	for _, dev := range devices {
		if _, err := netlink.LinkByIndex(dev.Index); err != nil {
			continue
		}
		all, err := bpfFilters(dev.Index, a.direction)
		for _, f := range all {
			if a.program == 0 && f.Name == program.Name {
				a.program = ebpf.ProgramID(f.Id)
			}
			if ebpf.ProgramID(f.Id) == a.program {
				a.filters, a.index = append(a.filters, f), dev.Index
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func bpfFilters(index int, d policy.Direction) (found []filter, err error) {
	all, err := netinfo.Filters(index, d)
	for _, f := range all {
		if b, ok := f.(filter); ok && b.Id != 0 {
			found = append(found, b)
		}
	}
	return found, err
}

func (a *attachment) close() {
	if a.link != nil {
		a.link.Close()
	}
}

// mode is how the hook is attached, "" where it is not.
func (a *attachment) mode() Mode {
	switch {
	case a.link != nil && netinfo.IsCgroup(a.index):
		return Cgroup
	case a.link != nil:
		return TCX
	case len(a.filters) > 0:
		return Clsact
	}
	return ""
}

// put attaches a program to the device, of which a cgroup needs the name. It replaces the hook's program there, if any.
func (a *attachment) put(p *ebpf.Program, mode Mode, name string) error {
	// The pin comes before the filter, because a filter is recognised by the pin of its program. A rename
	// replaces the old pin, because without one nobody would recognise the filter that is there.
	pin := a.pin(programPin)
	aside := pin + bpffs.AsideSuffix
	err := bpffs.Unlink(aside)
	if err == nil {
		err = bpffs.Pin(p, aside)
	}
	if err == nil {
		err = bpffs.Rename(aside, pin)
	}
	if err != nil {
		return fmt.Errorf("pin the program: %w", err)
	}
	if mode == Clsact {
		return a.putFilter(p)
	}
	return a.putLink(p, mode, name)
}

func (a *attachment) putLink(p *ebpf.Program, mode Mode, name string) error {
	old, stays := a.link, a.link != nil
	if stays && mode == Cgroup { // one that is removed has its link for a while
		_, index, err := a.ask()
		if err != nil {
			return err
		}
		stays = index == a.index
	}
	if stays {
		if err := step.Try("replace the program of a link"); err != nil {
			return err
		}
		// A link that something else detached cannot be attached again.
		if err := old.Update(p); !errors.Is(err, unix.ENOLINK) {
			if err != nil {
				err = fmt.Errorf("replace the attached program: %w", err)
			}
			return err
		}
	}
	l, err := a.newLink(p, mode, name)
	if err != nil {
		return err
	}
	path := a.pin(linkPin)
	err = bpffs.Unlink(path) // of a dead link
	if err == nil {
		if err = bpffs.Pin(l, path); err != nil {
			err = fmt.Errorf("pin the link: %w", err)
		}
	}
	if err != nil {
		l.Close()
		return err
	}
	if old != nil {
		old.Close()
	}
	a.link = l
	return nil
}

// newLink attaches a program to the device, or to the cgroup of that name.
func (a *attachment) newLink(p *ebpf.Program, mode Mode, name string) (link.Link, error) {
	if err := step.Try("attach a program to " + string(mode)); err != nil {
		return nil, err
	}
	if mode == Cgroup {
		dir, dev, err := netinfo.OpenCgroup(name)
		if err != nil {
			return nil, err
		}
		defer dir.Close()
		if dev.Index != a.index {
			return nil, netinfo.ErrNoDevice // it was made again meanwhile
		}
		l, err := link.AttachRawLink(link.RawLinkOptions{Target: int(dir.Fd()), Program: p, Attach: netinfo.CgroupType(a.direction)})
		if errors.Is(err, unix.EPERM) {
			return nil, ErrOneProgram
		}
		if err != nil {
			return nil, fmt.Errorf("attach to the cgroup: %w", err)
		}
		return l, nil
	}
	// Before all others, so that it meets packets before others change them or end the chain.
	l, err := link.AttachTCX(link.TCXOptions{Interface: a.index, Program: p, Attach: netinfo.TCXType(a.direction), Anchor: link.Head()})
	if errors.Is(err, ebpf.ErrNotSupported) {
		return nil, ErrNoTCX
	}
	if err != nil {
		return nil, fmt.Errorf("attach to tcx: %w", err)
	}
	return l, nil
}

func (a *attachment) putFilter(p *ebpf.Program) error {
	if len(a.filters) == 0 {
		return a.addFilter(p)
	}
	next := *a.filters[0] // in its place, so that no packet bypasses the rules
	next.Fd, next.Id = p.FD(), 0
	if err := step.Try("replace the program of a filter"); err != nil {
		return err
	}
	if err := netlink.FilterReplace(&next); err != nil {
		return fmt.Errorf("replace the program of a filter: %w", err)
	}
	return nil
}

// addFilter adds a direct-action filter for a program, at the first free priority.
func (a *attachment) addFilter(p *ebpf.Program) error {
	if err := a.ensureClsact(); err != nil {
		return err
	}
	all, err := netinfo.Filters(a.index, a.direction)
	priority := uint16(1)
	for slices.ContainsFunc(all, func(f netlink.Filter) bool { return f.Attrs().Priority == priority }) {
		priority++
	}
	f := &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: a.index, Parent: netinfo.FilterParent(a.direction), Handle: 1, Protocol: unix.ETH_P_ALL, Priority: priority,
		},
		Fd: p.FD(), Name: program.Name, DirectAction: true,
	}
	if err == nil {
		err = step.Try("add a filter")
	}
	if err == nil {
		err = netlink.FilterAdd(f)
	}
	if errors.Is(err, unix.ENOENT) { // of a device that has gone: ENODEV
		err = ErrNoClsBPF
	}
	if err != nil {
		return errors.Join(fmt.Errorf("add a filter to clsact: %w", err), a.dropClsact())
	}
	a.filters = []filter{f}
	return nil
}

// remove detaches all programs of the hook from its device, and removes the hook's pins.
func (a *attachment) remove() error {
	for _, f := range a.filters {
		if err := step.Try("delete a filter"); err != nil {
			return err
		}
		if err := netlink.FilterDel(f); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("delete a filter: %w", err)
		}
	}
	if len(a.filters) > 0 {
		if err := a.dropClsact(); err != nil {
			return err
		}
	}
	a.filters = nil
	if a.link != nil {
		if err := step.Try("detach a link"); err != nil {
			return err
		}
		// Without this, the program would stay for as long as anybody has the link open.
		if err := a.link.Detach(); err != nil && !errors.Is(err, unix.ENOLINK) {
			return fmt.Errorf("detach the link: %w", err)
		}
	}
	if err := bpffs.Discard(a.dir); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	return nil
}

// on returns the device in this namespace to which the link is attached, the zero Device for
// none. anywhere is whether it is attached to a device of any namespace. A cgroup is found by the name that the caller knows.
func (a *attachment) on(name string) (device netinfo.Device, anywhere bool, err error) {
	if a.link == nil {
		return netinfo.Device{}, false, nil
	}
	info, index, err := a.ask()
	if err != nil || index == 0 {
		return netinfo.Device{}, false, err
	}
	if netinfo.IsCgroup(index) {
		// Perhaps nobody sees it here. One that was removed is limited until its last socket is closed.
		return netinfo.Cgroup(name, index), true, nil
	}
	// The index may be that of a device in another namespace, and a device here may have it, too.
	device, here, err := netinfo.DeviceByIndex(index)
	if err != nil {
		return netinfo.Device{}, false, err
	}
	if here {
		programs, err := netinfo.TCXPrograms(index, a.direction)
		if err != nil && !errors.Is(err, unix.ENODEV) {
			return netinfo.Device{}, false, err
		}
		if slices.Contains(programs, info.Program) {
			return device, true, nil
		}
	}
	_, index, err = a.ask() // if the device was deleted meanwhile, the link has no device now
	return netinfo.Device{}, index != 0, err
}

// ask asks for the link's program, and the index of its device; 0 for none.
func (a *attachment) ask() (*link.Info, int, error) {
	info, err := a.link.Info()
	if err != nil {
		return nil, 0, fmt.Errorf("ask for the link of device %d %s: %w", a.index, a.direction, err)
	}
	if on := info.TCX(); on != nil {
		return info, int(on.Ifindex), nil
	}
	if on := info.Cgroup(); on != nil && on.CgroupId != 0 {
		return info, netinfo.CgroupIndex(on.CgroupId), nil
	}
	return info, 0, nil
}

// removeHook detaches a hook from its device, and removes its pins.
func removeHook(at hookDir) error {
	a, err := openAttachment(at)
	if err != nil {
		return err
	}
	defer a.close()
	return a.remove()
}

// ensureClsact adds a clsact qdisc to the device of a hook, or finds that it has one.
func (a *attachment) ensureClsact() error {
	l, err := netlink.LinkByIndex(a.index)
	if err != nil {
		return fmt.Errorf("look up device %d: %w", a.index, err)
	}
	qdisc, err := netinfo.FilterQdisc(l)
	switch {
	case err != nil:
		return err
	case qdisc == "ingress" && a.direction == policy.Egress:
		return errors.New("add a clsact qdisc: an ingress qdisc is in its place, which has no egress side; " +
			"if nothing needs it, remove it with 'tc qdisc del dev " + plain.Word(l.Attrs().Name) + " ingress'")
	case qdisc != "":
		return nil
	}
	if err := bpffs.MakeDir(a.clsactMark()); err != nil {
		return err
	}
	if err := step.Try("add a clsact qdisc"); err != nil {
		return err
	}
	return addClsact(a.index)
}

// clsactMark is a directory in the home: shapectl added the qdisc of the device, and removes it.
func (at hookDir) clsactMark() string {
	return filepath.Join(filepath.Dir(at.dir), clsactPrefix+strconv.Itoa(at.index))
}

func addClsact(index int) error {
	err := netlink.QdiscAdd(clsact(index))
	if errors.Is(err, unix.ENOENT) {
		return ErrNoClsact
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add a clsact qdisc: %w", err)
	}
	return nil
}

func clsact(index int) *netlink.Clsact {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0),
	}}
}

// dropClsact deletes the clsact qdisc that shapectl added, unless it has filters. Beside it, no other tool could add an
// ingress qdisc.
func (a *attachment) dropClsact() error {
	if !bpffs.Exists(a.clsactMark()) {
		return nil
	}
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		all, err := netinfo.Filters(a.index, d)
		if err != nil {
			return err
		}
		if ours := func(f netlink.Filter) bool { b, ok := f.(filter); return ok && b.Name == program.Name }; slices.ContainsFunc(all, ours) {
			return nil // of the other direction
		}
		if len(all) > 0 { // now it is of whoever added these
			return bpffs.Unlink(a.clsactMark())
		}
	}
	if err := step.Try("delete a clsact qdisc"); err != nil {
		return err
	}
	if err := netlink.QdiscDel(clsact(a.index)); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("delete a clsact qdisc: %w", err)
	}
	return bpffs.Unlink(a.clsactMark())
}
