package fq

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/shapectl/shapectl/internal/netmsg"
)

// ErrConfigured means that somebody has configured the qdisc of a device, so Setup does not replace it.
var ErrConfigured = errors.New("shapectl replaces only qdiscs that the kernel makes by default; to have it replaced, delete it with 'tc qdisc del dev DEVICE root'")

const (
	// root is the parent of a device's root qdisc.
	root = netlink.HANDLE_ROOT
	// ourHandle is the handle of the root qdisc of Setup. It tells which qdiscs are Setup's: the
	// kernel allocates handles from 8000: on.
	ourHandle = 0x5ac0_0000
	// drainPatience is how long queued packets may still leave before Remove deletes their qdisc.
	drainPatience = time.Second
)

// ours reports whether Setup has made q.
func (q qdisc) ours() bool {
	if q.Parent == root {
		return q.Handle == ourHandle && (q.Kind == "fq" || q.Kind == "mq")
	}
	return q.Handle == handleBelow(q.Parent) && q.Kind == "fq"
}

// handleBelow returns the handle of Setup's qdisc for a transmit queue.
func handleBelow(parent uint32) uint32 { return ourHandle + parent<<16 }

// Configured reports whether the device has a qdisc that neither the kernel nor Setup has made.
func (s State) Configured() bool {
	return slices.ContainsFunc(s.tree.all(), func(q qdisc) bool { return q.Handle != 0 && !q.ours() })
}

// Ours reports whether Setup has made the root qdisc of the device, and nobody has configured one below it.
func (s State) Ours() bool { return s.tree.root != nil && s.tree.root.ours() && !s.Configured() }

// Replaceable returns an error that wraps ErrConfigured if Setup would refuse to replace the
// existing qdisc.
func (s State) Replaceable() error {
	if s.Configured() {
		return fmt.Errorf("somebody has configured %s: %w", s.Kind, ErrConfigured)
	}
	if s.tree.root == nil || s.queues > 0 || s.Ours() {
		return nil // it has no filters
	}
	device := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: s.index}}
	filters, err := netmsg.List(func() ([]netlink.Filter, error) { return netlink.FilterList(device, s.tree.root.Handle) })
	if err != nil {
		return fmt.Errorf("list the filters of %s: %w", s.Kind, err)
	}
	if len(filters) > 0 {
		return fmt.Errorf("somebody has added filters to %s: %w", s.Kind, ErrConfigured)
	}
	return nil
}

// Setup sets up fq for all packets that leave a device, with room for the given number of
// packets for each of several buckets: at the root, or for each transmit queue below
// mq. It does nothing if the device is ready. Packets queued in the replaced qdisc are
// lost. Setup returns the kind of the default qdisc that it replaced, or "" for none.
//
// If the kernel refuses, the device gets its default again. The error wraps ErrNoFQ if the
// kernel has no fq, or ErrConfigured.
func Setup(index int, packets uint32) (replaced string, err error) {
	s, err := Look(index)
	if err != nil || s.Ready(packets) {
		return "", err
	}
	if err := Check(); err != nil {
		return "", err
	}
	if err := s.Replaceable(); err != nil {
		return "", err
	}
	for i, q := range s.plan(packets) {
		if err := put(index, q); err != nil {
			err = fmt.Errorf("set %s: %w", q.Kind, err)
			if i > 0 && !s.Ours() {
				err = errors.Join(err, remove(index))
			}
			return "", err
		}
	}
	if !s.Ours() {
		replaced = s.Kind
	}
	return replaced, nil
}

// plan returns the qdiscs to create or change, from the root down, so that the given number
// of packets can be queued for one bucket.
func (s State) plan(packets uint32) (set []qdisc) {
	leaves := s.tree.leaves()
	if s.tree.root == nil {
		leaves = make([]qdisc, max(1, s.queues))
		for i := range leaves {
			leaves[i].Parent = uint32(i) + 1
		}
	}
	if s.queues > 0 && !s.Ours() {
		set = append(set, qdisc{Kind: "mq", Handle: ourHandle, Parent: root})
	}
	for _, q := range leaves {
		fq := qdisc{Kind: "fq", Handle: ourHandle, Parent: root}
		if s.queues > 0 {
			fq.Parent = ourHandle | q.Parent&^major
			fq.Handle = handleBelow(fq.Parent)
		}
		if !q.ours() {
			q = qdisc{} // it does not keep its limits
		}
		fq.Options = limits(q, packets)
		set = append(set, fq)
	}
	return set
}

// limits returns the options of an fq in which the given number of packets can be queued
// for one bucket. No option is less than that of q.
func limits(q qdisc, packets uint32) (options []byte) {
	limit, flowLimit := room(packets)
	for _, o := range []struct {
		option int
		least  uint32
	}{
		{nl.TCA_FQ_PLIMIT, limit}, {nl.TCA_FQ_FLOW_PLIMIT, flowLimit},
		{nl.TCA_FQ_ORPHAN_MASK, flows - 1}, {nl.TCA_FQ_HORIZON, uint32(horizon.Microseconds())},
	} {
		options = append(options, u32(o.option, max(q.number(uint16(o.option)), o.least))...)
	}
	return options
}

// Devices returns the indexes of the devices whose root qdisc Setup has made.
func Devices() (indexes []int, err error) {
	messages, err := dump()
	for _, m := range messages {
		if header := nl.DeserializeTcMsg(m); header.Handle == ourHandle && header.Parent == root {
			indexes = append(indexes, int(header.Ifindex))
		}
	}
	return indexes, err
}

// A Removal is the result of Remove.
type Removal struct {
	Kind string // of State: the kernel's default; "" if nothing was removed
	Lost uint64 // the number of packets that were queued
}

// Remove deletes the qdiscs of Setup, if they exist, and the kernel's default takes their place.
// It gives queued packets a second to leave; the others are lost.
func Remove(index int) (Removal, error) {
	s, err := Look(index)
	if err != nil || !s.Ours() {
		return Removal{}, err
	}
	if s, err = Drain(index, drainPatience); err != nil {
		return Removal{}, err
	}
	if err := remove(index); err != nil {
		return Removal{}, fmt.Errorf("delete %s: %w", s.Kind, err)
	}
	now, err := Look(index)
	return Removal{Kind: now.Kind, Lost: s.Waiting}, err
}
