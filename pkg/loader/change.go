package loader

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// leastRules is room for rules that a hook has from the start: 1.5 MiB with two CPUs. It grows.
	leastRules = 4096
	// manyRules take 100 MiB with two CPUs.
	manyRules = 1 << 18
	// tableBuckets is how many hosts, subnets and flows of one hook can owe
	// something at the same time: 16 MiB of slots and 48 MiB of keys.
	tableBuckets = 1 << 20
	// noBuckets is for a hook whose rules all have one bucket.
	noBuckets = uint32(bpf.AbiLayoutLINE_SLOTS)
	// hurtHosts is how many hosts and subnets are remembered that shadows would have hurt: 8 MiB.
	hurtHosts = 1 << 16
)

// A Change is what a command did besides what it was told to.
type Change struct {
	Changed    bool
	Reattached string // what had become of the hook, where it was attached anew
	Upgraded   bool   // the program of another build was replaced
	Replaced   string // the qdisc in whose place an fq was set up
	Redirected bool   // from now on, packets that enter take the way through an ifb, if their rule delays
	// Lacks is how many packets may have to wait, where the fq that there is has no room for so many.
	Lacks uint32
}

// ErrMatch means that the rules of a hook compare the other side of packets.
var ErrMatch = errors.New("other rules of this device and direction compare the other side of packets")

// ErrPending means that a change waits to be confirmed.
var ErrPending = errors.New("the last change is not confirmed yet")

// ErrElsewhere means that programs of shapectl are on the device that this namespace's pins do not know.
var ErrElsewhere = errors.New("limits of shapectl are already on the device, set from another network namespace or another bpffs")

// ErrMoved means that rules are in force on a device that had the name and is in another namespace.
var ErrMoved = errors.New("its rules are in force on the device that had this name and has moved to another namespace")

// Put sets a valid rule on a direction of a device, and attaches what it needs.
func (n *Namespace) Put(dev netinfo.Device, d policy.Direction, match policy.Match, rule policy.Rule) (Change, error) {
	var change Change
	if err := dev.CheckReadable(); err != nil {
		return change, err
	}
	hold, err := n.holdBack(dev, d, []policy.Rule{rule})
	if err != nil {
		return change, err
	}
	if n.dir == "" {
		if err := n.elsewhere(dev, d); err != nil {
			return change, err
		}
		if err := n.found(); err != nil {
			return change, err
		}
	}
	h, err := n.Find(dev.Name, d)
	if err != nil {
		return change, err
	}
	if h != nil && h.State == Moved {
		h.Close()
		return change, ErrMoved
	}
	created := h == nil
	if created {
		h = &Hook{Direction: d, Device: dev, Was: dev.Name, index: dev.Index, path: n.hookPath(dev.Index, d), State: Detached}
	} else if h.State != Attached {
		change.Reattached = string(h.State)
	}
	defer h.Close()
	if change.Reattached != "" { // all that it has is to be in force, on what may be another device
		if hold, err = n.holdBack(dev, d, append(h.Set.Policy(), rule)); err != nil {
			return change, err
		}
	}
	change.Lacks = hold.lacks
	if err := n.endChange(h); err != nil {
		return change, err
	}
	err = n.change(dev.Index, d, func() (err error) {
		if created {
			if err := n.create(h, match, maps.Size{Rules: leastRules, Buckets: noBuckets}); err != nil {
				return err
			}
		}
		if h.Match() != match {
			if others := h.Set.Rules(); len(others) > 1 || len(others) == 1 && others[0].Prefix != rule.Prefix {
				return fmt.Errorf("%w (%s)", ErrMatch, h.Match())
			}
		}
		if hold.setup {
			if change.Replaced, err = n.setupFQ(dev, hold.packets); err != nil {
				return err
			}
		}
		if err := n.prepare(h, dev, match, []policy.Rule{rule}, &change); err != nil {
			return err
		}
		if change.Changed, err = h.Set.Put(rule); err != nil {
			return err
		}
		return n.trimIfb(h)
	})
	return change, err
}

// Delete takes a rule off a hook, and the hook off its device with the last
// one. It reports whether there was such a rule.
func (n *Namespace) Delete(h *Hook, rule policy.Rule) (deleted bool, err error) {
	if err := n.endChange(h); err != nil {
		return false, err
	}
	err = n.change(h.index, h.Direction, func() error {
		if deleted = h.Set.Delete(rule.Prefix); !deleted {
			return nil
		}
		if h.Set.Empty() {
			return n.takeOff(h)
		}
		return n.trimIfb(h)
	})
	return deleted, err
}

// Flush takes all rules off a hook, and the hook off its device.
func (n *Namespace) Flush(h *Hook) error {
	if err := n.endChange(h); err != nil {
		return err
	}
	return n.flush(h)
}

func (n *Namespace) flush(h *Hook) error {
	return n.change(h.index, h.Direction, func() error {
		h.Set.Clear()
		return n.takeOff(h)
	})
}

// FlushAll is Flush for all hooks of the namespace, also those that another version of shapectl has made.
// told is called before with each that this version can read, discarded after with each that it cannot.
func (n *Namespace) FlushAll(told func(*Hook), discarded func(*OtherLayoutError)) error {
	if err := n.endChange(nil); err != nil {
		return err
	}
	var failed []error
	for _, d := range []policy.Direction{policy.Ingress, policy.Egress} {
		indices, err := n.indices(d)
		if err != nil {
			return err
		}
		for _, index := range indices {
			var other *OtherLayoutError
			h, err := n.openHook(index, d)
			switch {
			case h != nil:
				told(h)
				err = n.flush(h)
				h.Close()
			case errors.As(err, &other):
				if err = n.Discard(other); err == nil {
					discarded(other)
				}
			case err == nil:
				err = n.takeOff(&Hook{Direction: d, index: index, path: n.hookPath(index, d)})
			}
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// create makes the maps of a hook with no rules; nothing is attached.
func (n *Namespace) create(h *Hook, match policy.Match, size maps.Size) error {
	if err := n.elsewhere(h.Device, h.Direction); err != nil {
		return err
	}
	settings, err := h.settings(h.Device, match)
	if err != nil {
		return err
	}
	secret := make([]byte, 4*len(settings.Secret))
	rand.Read(secret)
	for i := range settings.Secret {
		settings.Secret[i] = binary.NativeEndian.Uint32(secret[4*i:])
	}
	h.Set, err = maps.New(size, settings)
	return err
}

// settings are what the programs of a hook are to be told.
func (h *Hook) settings(dev netinfo.Device, match policy.Match) (bpf.AbiHook, error) {
	id, err := build()
	if err != nil {
		return bpf.AbiHook{}, err
	}
	s := bpf.AbiHook{L2Bytes: dev.L2Bytes, Ifindex: uint32(dev.Index), Build: id}
	if h.Set != nil {
		had := h.Set.Hook()
		s.Secret = had.Secret
		if had.Ifindex == s.Ifindex {
			s.Ifb = had.Ifb
		}
	}
	copy(s.Device[:], dev.Name)
	if h.Direction == policy.Ingress {
		s.Ingress = 1
	}
	if match == policy.MatchSrc {
		s.MatchSrc = 1
	}
	return s, nil
}

// prepare makes a hook such that rules can be put in it: attached to that
// device, by a program of this build that compares that side, with room for what
// they need. What is so already is left alone.
func (n *Namespace) prepare(h *Hook, dev netinfo.Device, match policy.Match, rules []policy.Rule, change *Change) error {
	want, err := h.settings(dev, match)
	if err != nil {
		return err
	}
	have := h.Set.Hook()
	size := roomFor(rules, h.Set.Size())
	if lacks := uint32(h.Set.Lacks(rules)); lacks > 0 {
		size.Rules = max(growth(size.Rules), (size.Rules+lacks)/4*5)
	}
	if n.needsIfb(h, rules) {
		want.Ifb = uint32(fq.IfbIndex(dev.Index))
		packets, _ := Waiting(rules)
		if err := n.makeIfb(dev, packets); err != nil {
			return err
		}
	}
	// The name is only for people to read, and a new one no reason to touch anything.
	asIs := have.Build == want.Build && have.Ifindex == want.Ifindex && have.L2Bytes == want.L2Bytes &&
		have.MatchSrc == want.MatchSrc && have.Ifb == want.Ifb && size == h.Set.Size() && h.generation != ""
	if asIs && h.State == Attached {
		return n.attach(h)
	}
	change.Upgraded = h.generation != "" && have.Build != want.Build
	change.Redirected = want.Ifb != 0 && want.Ifb != have.Ifb
	return n.renew(h, dev, want, size)
}

// growth is room for how many rules there is once that for so many is full. As a
// set can grow only so often it is for many more, but where those are many already.
func growth(rules uint32) uint32 {
	if rules < manyRules {
		return 4 * rules
	}
	return 2 * rules
}

// roomFor is a size with room for sharers, flows and shadows, if rules have any.
func roomFor(rules []policy.Rule, size maps.Size) maps.Size {
	for _, r := range rules {
		proposed, ok := r.Proposed()
		if ok {
			size.Hurt = max(size.Hurt, hurtHosts)
		}
		if size.Buckets == noBuckets && (maps.HasSlots(r) || maps.HasSlots(proposed)) {
			size.Buckets = tableBuckets
		}
	}
	return size
}

// renew builds the next generation of a hook and attaches it in place of what is there.
func (n *Namespace) renew(h *Hook, dev netinfo.Device, settings bpf.AbiHook, size maps.Size) error {
	next, err := h.Set.Derive(size, settings)
	if err != nil {
		return err
	}
	h.Set.Close()
	h.Set = next
	old, moving := *h, h.index != dev.Index
	if moving {
		// The device moved away and came back with another index: a hook of its own, that shares the rules.
		h.path, h.index = n.hookPath(dev.Index, h.Direction), dev.Index
		h.closeLinks()
		h.links, h.filters, h.Mode = nil, nil, ""
		if err := n.remove(&Hook{Direction: h.Direction, Device: dev, index: dev.Index, path: h.path}); err != nil {
			return err
		}
	}
	h.Device = dev
	generations, err := h.generations()
	if err != nil {
		return err
	}
	h.generation = "g0"
	if len(generations) > 0 {
		var last int
		fmt.Sscanf(generations[len(generations)-1], "g%d", &last)
		h.generation = fmt.Sprintf("g%d", last+1)
	}
	aside := filepath.Join(h.path, asideName)
	if err := removeAll(aside); err != nil {
		return fmt.Errorf("clear %s: %w", aside, err)
	}
	if err := makeDir(h.path); err != nil {
		return err
	}
	if err := makeDir(aside); err != nil {
		return err
	}
	if err := h.Set.Pin(aside); err != nil {
		return err
	}
	if err := renamePins(aside, filepath.Join(h.path, h.generation)); err != nil {
		return fmt.Errorf("put pins in place: %w", err)
	}
	if err := n.attach(h); err != nil {
		return err
	}
	if err := h.discardAllBut(h.generation, generations); err != nil {
		return err
	}
	if moving {
		if err := discard(old.path); err != nil {
			return fmt.Errorf("remove pins: %w", err)
		}
		return n.dropIfb(old.index)
	}
	return nil
}

func (h *Hook) discardAllBut(generation string, generations []string) error {
	for _, g := range generations {
		if g == generation {
			continue
		}
		if err := discard(filepath.Join(h.path, g)); err != nil {
			return fmt.Errorf("remove pins: %w", err)
		}
	}
	return nil
}

// attach makes the hook run the program of its generation.
func (n *Namespace) attach(h *Hook) error {
	ids, err := h.programs(h.generation)
	if err != nil {
		return err
	}
	pin := filepath.Join(h.path, h.generation, programPin)
	if len(ids) > 0 {
		if runs, err := h.runs(ids[0]); runs || err != nil {
			return err
		}
		// A command was killed between pinning and attaching, or detaching and unpinning.
		if err := unlink(pin); err != nil {
			return err
		}
	}
	p, err := Load(h.Set)
	if err != nil {
		return err
	}
	defer p.Close()
	if h.Mode == "" {
		if h.Mode, err = HookMode(n.options); err != nil {
			return err
		}
	}
	// Before it is attached: a filter is known again by the pin of its program.
	if err := pinAt(p, pin); err != nil {
		return fmt.Errorf("pin the program: %w", err)
	}
	if h.Mode == Clsact {
		err = h.attachClsact(p)
	} else {
		err = h.attachTCX(p)
	}
	if err == nil {
		h.State = Attached
	}
	return err
}

// runs reports whether a program is what the hook has attached.
func (h *Hook) runs(id ebpf.ProgramID) (bool, error) {
	for _, f := range h.filters {
		if ebpf.ProgramID(f.Id) == id {
			return true, nil
		}
	}
	l := h.links[linkPin]
	if l == nil {
		return false, nil
	}
	info, err := l.Info()
	if err != nil {
		return false, fmt.Errorf("ask for the link: %w", err)
	}
	on := info.TCX()
	return info.Program == id && on != nil && int(on.Ifindex) == h.index, nil
}

// attachTCX puts a program on the device, in place of the one that the hook has there, if any.
func (h *Hook) attachTCX(p *ebpf.Program) error {
	old := h.links[linkPin]
	if old != nil {
		if err := step.Try("replace the program of a link"); err != nil {
			return err
		}
		// A link that something else detached can not be brought back.
		if err := old.Update(p); !errors.Is(err, unix.ENOLINK) {
			if err != nil {
				err = fmt.Errorf("replace the attached program: %w", err)
			}
			return err
		}
	}
	l, err := attachTCX(p, h.index, h.Direction)
	if err != nil {
		return err
	}
	path := filepath.Join(h.path, linkPin)
	err = unlink(path) // of a dead link
	if err == nil {
		if err = pinAt(l, path); err != nil {
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
	h.links = map[string]link.Link{linkPin: l}
	return nil
}

// pinAt pins a program, link or map.
func pinAt(object interface{ Pin(path string) error }, path string) error {
	if err := step.Try("pin"); err != nil {
		return err
	}
	return object.Pin(path)
}

// attachClsact is attachTCX for kernels without tcx.
func (h *Hook) attachClsact(p *ebpf.Program) error {
	if h.filters != nil {
		return swapClsact(p, h.filters[0])
	}
	f, err := attachClsact(p, h.index, h.Direction)
	if err == nil {
		h.filters = []filter{f}
	}
	return err
}

// needsIfb reports whether a hook's program sends packets to an ifb: those of
// such rules, or of others that it has.
func (n *Namespace) needsIfb(h *Hook, rules []policy.Rule) bool {
	if h.Direction != policy.Ingress {
		return false
	}
	packets, _ := Waiting(rules)
	return packets > 0 || h.Set.Hook().Ifb != 0 && h.Set.Delays()
}

// trimIfb deletes the ifb of a hook that does not need it any more.
func (n *Namespace) trimIfb(h *Hook) error {
	if h.Direction != policy.Ingress || n.needsIfb(h, nil) {
		return nil
	}
	return n.dropIfb(h.index)
}

// detach takes the hook's programs off the device, if they are there.
func (n *Namespace) detach(h *Hook) error {
	for _, f := range h.filters {
		if err := step.Try("delete a filter"); err != nil {
			return err
		}
		if err := netlink.FilterDel(f); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("delete a filter: %w", err)
		}
	}
	h.filters = nil
	for pin, l := range h.links {
		if err := step.Try("detach a link"); err != nil {
			return err
		}
		// Without this, the program would stay for as long as anybody has the link open.
		if err := l.Detach(); err != nil && !errors.Is(err, unix.ENOLINK) {
			return fmt.Errorf("detach the %s: %w", pin, err)
		}
		l.Close()
		delete(h.links, pin)
		if err := unlink(filepath.Join(h.path, pin)); err != nil {
			return err
		}
	}
	return nil
}

// remove takes a hook off its device, and its pins away, whoever made them:
// also another version of shapectl, or a command that was killed halfway.
func (n *Namespace) remove(h *Hook) error {
	generations, err := h.generations()
	if err != nil {
		return err
	}
	if h.links == nil {
		if err := h.openLinks(); err != nil {
			return err
		}
	}
	if err := h.openFilters(generations); err != nil {
		return err
	}
	if err := n.detach(h); err != nil {
		return err
	}
	if err := discard(h.path); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	return nil
}

// takeOff is remove, and takes away what the hook had besides.
func (n *Namespace) takeOff(h *Hook) error {
	if err := n.remove(h); err != nil || h.Direction != policy.Ingress {
		return err
	}
	return n.dropIfb(h.index)
}

// Discard takes a hook of another layout off its device, and its pins away.
func (n *Namespace) Discard(e *OtherLayoutError) error { return n.discard(e.index, e.Direction) }

func (n *Namespace) discard(index int, d policy.Direction) error {
	return n.takeOff(&Hook{Direction: d, index: index, path: n.hookPath(index, d)})
}

// elsewhere reports, as far as this process may look, programs of shapectl on
// a device where this namespace knows of none.
func (n *Namespace) elsewhere(dev netinfo.Device, d policy.Direction) error {
	chain, err := netinfo.Chain(dev.Index, d, nil)
	if err != nil {
		return err
	}
	for _, link := range chain {
		if strings.HasPrefix(link.Name, programName) && !n.isOurs(dev, d) {
			return ErrElsewhere
		}
	}
	return nil
}

// isOurs reports whether this namespace has pins for the device, if only such as an interrupted command left.
func (n *Namespace) isOurs(dev netinfo.Device, d policy.Direction) bool {
	if n.dir == "" {
		return false
	}
	_, err := os.Stat(n.hookPath(dev.Index, d))
	return err == nil
}
