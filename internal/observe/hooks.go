package observe

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/hurry"
	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/policy"
)

type hookKey struct {
	device    string
	direction policy.Direction
}

// A hook is a direction of a device with programs of a pair.
type hook struct {
	index  int
	match  policy.Match
	before link.Link
	behind link.Link
	ids    [2]ebpf.ProgramID
}

func (h *hook) close() error { return errors.Join(h.before.Close(), h.behind.Close()) }

// hooks are those where packets are seen.
type hooks struct {
	netns   string
	objects *objects
	at      map[hookKey]*hook
	looked  time.Time // when place last looked at all of them
}

// lookAgain is how long the order of programs is taken for granted while the wanted hooks stay the same.
const lookAgain = time.Second

// place attaches programs to the wanted hooks and to no others. A program of shapectl may have come later, or
// from elsewhere, so the order is looked at again and again. moved is called for hooks on a device with another index.
func (h *hooks) place(wanted map[hookKey]policy.Match, moved func(hookKey, int)) error {
	changes := 0
	for key := range h.at {
		if _, still := wanted[key]; !still {
			changes++
		}
	}
	for key, match := range wanted {
		if have := h.at[key]; have == nil || have.match != match {
			changes++
		}
	}
	if changes == 0 && time.Since(h.looked) < lookAgain {
		return nil
	}
	h.looked = time.Now()
	return netns.In(h.netns, func() error {
		return hurry.Up(changes, func() error { return h.placeAll(wanted, moved) })
	})
}

func (h *hooks) placeAll(wanted map[hookKey]policy.Match, moved func(hookKey, int)) error {
	var failed []error
	for key, have := range h.at {
		if _, still := wanted[key]; !still {
			delete(h.at, key)
			have.close()
		}
	}
	for key, match := range wanted {
		if err := h.placeAt(key, match, moved); err != nil && !isGone(err) {
			failed = append(failed, fmt.Errorf("look at packets of %s %s: %w", key.device, key.direction, err))
		}
	}
	return errors.Join(failed...)
}

// isGone reports whether an error is about a device that is not there any more.
func isGone(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, netinfo.ErrNoDevice)
}

func (h *hooks) placeAt(key hookKey, match policy.Match, moved func(hookKey, int)) error {
	dev, err := netinfo.DeviceByName(key.device)
	if err == nil && dev.IsCgroup() { // in which nobody looks at packets
		err = netinfo.ErrNoDevice
	}
	have := h.at[key]
	var ids []ebpf.ProgramID
	if err == nil {
		ids, err = netinfo.TCXPrograms(dev.Index, key.direction)
	}
	if err == nil && have != nil && have.index == dev.Index && have.match == match && isAround(ids, have.ids) {
		return nil
	}
	if have != nil {
		delete(h.at, key)
		have.close()
		ids = slices.DeleteFunc(ids, func(id ebpf.ProgramID) bool { return slices.Contains(have.ids[:], id) })
	}
	if err != nil {
		moved(key, 0)
		return err
	}
	p, err := h.objects.pair(key.direction, match, dev.L2Bytes)
	if err != nil {
		return err
	}
	fresh := &hook{index: dev.Index, match: match}
	for i, of := range []*ebpf.Program{p.before, p.behind} {
		info, err := of.Info()
		if err != nil {
			return fmt.Errorf("read a program: %w", err)
		}
		fresh.ids[i], _ = info.ID()
	}
	first, last := anchors(ids)
	if fresh.before, err = attach(p.before, dev.Index, key.direction, first); err != nil {
		return err
	}
	if fresh.behind, err = attach(p.behind, dev.Index, key.direction, last); err != nil {
		fresh.before.Close()
		return err
	}
	h.at[key] = fresh
	moved(key, dev.Index)
	return nil
}

func attach(p *ebpf.Program, index int, d policy.Direction, at link.Anchor) (link.Link, error) {
	l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: p, Attach: netinfo.TCXType(d), Anchor: at})
	if err != nil {
		return nil, fmt.Errorf("attach to tcx: %w", err)
	}
	return l, nil
}

// anchors are the places directly before the programs of shapectl among those of a hook, and directly behind
// them. Other programs may end the way of a packet, and are no limits of shapectl.
func anchors(ids []ebpf.ProgramID) (first, last link.Anchor) {
	isOurs := func(id ebpf.ProgramID) bool { return netinfo.ProgramName(id) == program.Name }
	i := slices.IndexFunc(ids, isOurs)
	if i < 0 {
		return link.Head(), link.Tail()
	}
	j := len(ids) - 1
	for !isOurs(ids[j]) {
		j--
	}
	return link.BeforeProgramByID(ids[i]), link.AfterProgramByID(ids[j])
}

// isAround reports whether all programs of shapectl are between these two.
func isAround(ids []ebpf.ProgramID, ours [2]ebpf.ProgramID) bool {
	before, behind := slices.Index(ids, ours[0]), slices.Index(ids, ours[1])
	if before < 0 || behind < before {
		return false
	}
	return !slices.ContainsFunc(append(slices.Clone(ids[:before]), ids[behind+1:]...), func(id ebpf.ProgramID) bool {
		return netinfo.ProgramName(id) == program.Name
	})
}

// index is that of a rule's device where packets are seen, else 0.
func (h *hooks) index(of live.Key) int {
	d, err := policy.ParseDirection(of.Direction)
	if have := h.at[hookKey{of.Device, d}]; err == nil && have != nil {
		return have.index
	}
	return 0
}

func (h *hooks) close() error {
	err := hurry.Up(len(h.at), func() (err error) {
		for _, have := range h.at {
			err = errors.Join(err, have.close())
		}
		return err
	})
	clear(h.at)
	return err
}

// prefixOf is a network as the programs match it: see rule_for in bpf/observe.c.
func prefixOf(ifindex int, ingress bool, network netip.Prefix) bpf.ObservePrefix {
	p := bpf.ObservePrefix{Length: 32 + uint32(network.Bits()), Hook: uint32(ifindex) << 2}
	if ingress {
		p.Hook |= 2
	}
	if network.Addr().Is6() {
		p.Hook |= 1
	}
	for i, word := 0, network.Addr().AsSlice(); i < len(word); i += 4 {
		p.Addr[i/4] = binary.NativeEndian.Uint32(word[i:])
	}
	return p
}

// addrOf is an address as the programs have it.
func addrOf(words [4]uint32, is4 bool) netip.Addr {
	var all [16]byte
	for i, w := range words {
		binary.NativeEndian.PutUint32(all[4*i:], w)
	}
	if is4 {
		return netip.AddrFrom4([4]byte(all[:4]))
	}
	return netip.AddrFrom16(all)
}

// each calls f for all elements of a map of at most size elements. Some may be missed or come twice while others
// come and go.
func each[K comparable, V any](m *ebpf.Map, size int, f func(K, V)) error {
	var cursor ebpf.MapBatchCursor
	keys, values := make([]K, 1024), make([]V, 1024)
	for seen := 0; seen <= 2*size; {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			f(keys[i], values[i])
		}
		seen += n
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the map %s: %w", m, err)
		}
	}
	return nil
}
