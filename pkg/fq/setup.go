package fq

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/shapectl/shapectl/internal/netmsg"
	"github.com/shapectl/shapectl/internal/step"
)

// ErrFixed means that Restore could not restore the existing qdisc of a device.
var ErrFixed = errors.New("the existing qdisc cannot be restored later")

// root is the parent of a device's root qdisc.
const root = netlink.HANDLE_ROOT

// ourHandle is the first handle that Setup uses. The kernel allocates handles from 8000: on.
const ourHandle = 0x5ac0_0000

// A record has the qdiscs before Setup, and those that it set. It is stored as JSON,
// because another version of shapectl may have to read it.
type record struct {
	Before []qdisc `json:"before"` // from the root down
	Set    []qdisc `json:"set"`
	// NoQueueLength means that the length of the device's transmit queue was 0. The kernel
	// changes that when a device that needs no qdisc gets one.
	NoQueueLength bool `json:"no_queue_length,omitempty"`
}

// exact has the qdiscs that can be recreated from what the kernel reports.
var exact = map[string]bool{
	"noqueue": true, "mq": true, "pfifo": true, "bfifo": true, "pfifo_fast": true, "fq": true,
	"codel": true, "fq_codel": true, "sfq": true, "cake": true,
}

// Replaceable returns an error that wraps ErrFixed if Setup would refuse to replace the
// existing qdisc.
func (s State) Replaceable() error {
	for _, q := range s.tree.all() {
		if q.Handle != 0 && !exact[q.Kind] {
			return fmt.Errorf("%w: the kernel does not report all options of %s", ErrFixed, q.Kind)
		}
		if q.special != "" {
			return fmt.Errorf("%w: %s with %s", ErrFixed, q.Kind, q.special)
		}
		if q.Kind == "fq" || perQueue[q.Kind] || q.Handle == 0 && q.Parent != root {
			continue // it has no filters
		}
		device := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: s.index}}
		filters, err := netmsg.List(func() ([]netlink.Filter, error) { return netlink.FilterList(device, q.Handle) })
		if err != nil {
			return fmt.Errorf("list the filters of %s: %w", q.Kind, err)
		}
		if len(filters) > 0 {
			return fmt.Errorf("%w: %s with filters", ErrFixed, q.Kind)
		}
	}
	return nil
}

// Setup sets up fq for all packets that leave a device, with room for the given number of
// packets for each of several buckets: at the root, or for each transmit queue below
// mq. It does nothing if the device is ready. Packets queued in the replaced qdisc are
// lost.
//
// Setup calls keep with the record for Restore before it changes anything. If keep
// fails, or the kernel refuses, nothing is changed. The error wraps ErrNoFQ if the
// kernel has no fq, or ErrFixed if Restore could not restore the existing qdisc.
func Setup(index int, packets uint32, keep func(record []byte) error) error {
	s, err := Look(index)
	if err != nil || s.Ready(packets) {
		return err
	}
	if err := Check(); err != nil {
		return err
	}
	if err := s.Replaceable(); err != nil {
		return err
	}
	link, err := netlink.LinkByIndex(index)
	if err != nil {
		return fmt.Errorf("look up device %d: %w", index, err)
	}
	r := record{Before: s.tree.all(), Set: s.plan(packets), NoQueueLength: link.Attrs().TxQLen == 0}
	text, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode the existing qdiscs: %w", err)
	}
	if err := keep(text); err != nil {
		return err
	}
	return r.apply(index)
}

func (r record) apply(index int) error {
	for _, q := range r.Set {
		if err := put(index, q); err != nil {
			_, undo := r.restore(index)
			return errors.Join(fmt.Errorf("set %s: %w", q.Kind, err), undo)
		}
	}
	return nil
}

// plan returns the qdiscs to create or change, from the root down, so that the given number
// of packets can be queued for one bucket.
func (s State) plan(packets uint32) (set []qdisc) {
	next := uint32(ourHandle)
	handle := func() uint32 {
		for slices.ContainsFunc(s.all, func(q qdisc) bool { return q.Handle == next }) {
			next += 1 << 16
		}
		next += 1 << 16
		return next - 1<<16
	}
	parent, leaves := uint32(root), s.tree.leaves()
	if s.tree.root == nil {
		leaves = make([]qdisc, max(1, s.queues))
		for i := range leaves {
			leaves[i].Parent = uint32(i) + 1
		}
	}
	if s.queues > 0 && s.tree.root != nil && s.tree.root.Handle != 0 {
		parent = s.tree.root.Handle
	} else if s.queues > 0 { // the kernel's default root has no handle to refer to
		parent = handle()
		set = append(set, qdisc{Kind: "mq", Handle: parent, Parent: root})
	}
	for _, q := range leaves {
		fq := qdisc{Kind: "fq", Parent: parent}
		if parent != root {
			fq.Parent |= q.Parent &^ major
		}
		if q.Kind == fq.Kind && q.Handle != 0 {
			fq.Handle = q.Handle // it is kept, with other limits
		} else {
			fq.Handle, q = handle(), qdisc{}
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

// An Outcome is the result of Restore.
type Outcome struct {
	// Restored means that the qdiscs from before Setup were restored.
	Restored bool
	// Replaced means that somebody else has replaced the qdiscs of Setup, so they are kept.
	Replaced bool
	// Differs means that the restored qdiscs differ from those before. The kernel may have
	// another default now.
	Differs bool
	// Was is the Kind of State before Setup; Kind is the current one.
	Was, Kind string
	// Lost is the number of packets that were queued in deleted qdiscs.
	Lost uint64
}

// Restore restores the qdiscs from before the Setup that made a record, if those of Setup
// still exist. Packets queued in them are lost.
func Restore(index int, text []byte) (Outcome, error) {
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		return Outcome{}, fmt.Errorf("read the record of the qdiscs before fq: %w", err)
	}
	return r.restore(index)
}

func (r record) restore(index int) (Outcome, error) {
	o := Outcome{Was: arrange(r.Before).String()}
	s, err := Look(index)
	if err != nil {
		return o, err
	}
	o.Kind = s.Kind
	ours, theirs := r.compare(s.tree)
	o.Replaced = theirs
	if theirs || !ours {
		return o, nil
	}
	if err := r.putBefore(index, s.tree); err != nil {
		return o, fmt.Errorf("restore %s: %w", o.Was, err)
	}
	set := s.tree.leaves()
	if s, err = Look(index); err != nil {
		return o, err
	}
	o.Restored, o.Kind = true, s.Kind
	for _, q := range set { // a kept qdisc only gets its old limits
		if !slices.ContainsFunc(s.tree.leaves(), func(now qdisc) bool { return now.Handle == q.Handle }) {
			o.Lost += uint64(q.packets)
		}
	}
	_, o.Differs = record{Before: r.Before}.compare(s.tree)
	return o, nil
}

// compare reports whether t has a qdisc that Setup has set, and whether it has one that is
// neither from Setup nor from before. Both are possible, because Setup may have been killed.
func (r record) compare(t tree) (ours, theirs bool) {
	if t.root == nil {
		return false, len(r.Before) > 0
	}
	for _, q := range t.all() {
		isSet := func(set qdisc) bool { return q.Parent == set.Parent && q.has(set) }
		// The options of a default qdisc depend on the MTU, so they are ignored.
		isAsBefore := func(before qdisc) bool {
			return q.Parent == before.Parent && q.Kind == before.Kind && q.Handle == before.Handle &&
				(q.Handle == 0 || bytes.Equal(q.Options, before.Options))
		}
		switch {
		case slices.ContainsFunc(r.Set, isSet):
			ours = true
		case slices.ContainsFunc(r.Before, isAsBefore):
		// The kernel creates default qdiscs: below an mq, and when a device comes up for the first time.
		case q.Handle != 0 || q.Parent == root && len(r.Before) > 0:
			theirs = true
		}
	}
	return ours, theirs
}

// putBefore puts the qdiscs of r.Before.
func (r record) putBefore(index int, now tree) error {
	before := arrange(r.Before)
	qdiscs := before.all()
	byKernel := func(q qdisc) bool { return q.Handle == 0 }
	if before.root == nil || slices.ContainsFunc(qdiscs, byKernel) {
		// The kernel creates its default again only after the root is deleted.
		if err := remove(index, *now.root); err != nil {
			return err
		}
		qdiscs = slices.DeleteFunc(qdiscs, byKernel)
	} else if len(before.queues) > 0 {
		qdiscs = before.queues
	}
	for _, q := range qdiscs {
		if err := put(index, q.recreatable()); err != nil {
			return err
		}
	}
	if r.NoQueueLength {
		if err := step.Try("set the queue length"); err != nil {
			return err
		}
		return netlink.LinkSetTxQLen(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}, 0)
	}
	return nil
}
