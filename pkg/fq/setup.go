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

// ErrFixed means that what a device has in the place of an fq could not be put back as it is.
var ErrFixed = errors.New("shapectl could not put back what is there")

// root is the parent of a device's root qdisc.
const root = netlink.HANDLE_ROOT

// ourHandle is the first of the handles that Setup gives. The kernel gives those from 8000: on.
const ourHandle = 0x5ac0_0000

// A record is what Setup found, and what it set. It is kept as JSON: another
// version of shapectl may have to read it.
type record struct {
	Before []qdisc `json:"before"` // from the root down
	Set    []qdisc `json:"set"`
	// NoQueueLength: the device's transmit queue was 0 packets long. The kernel takes
	// that for a mistake, and changes it, where a device that needs no qdisc gets one.
	NoQueueLength bool `json:"no_queue_length,omitempty"`
}

// exact are the qdiscs that can be made again from what the kernel tells of them.
var exact = map[string]bool{
	"noqueue": true, "mq": true, "pfifo": true, "bfifo": true, "pfifo_fast": true, "fq": true,
	"codel": true, "fq_codel": true, "sfq": true, "cake": true,
}

// Replaceable reports why Setup would not put an fq in the place of what there
// is, by an error that wraps ErrFixed.
func (s State) Replaceable() error {
	for _, q := range s.tree.all() {
		if q.Handle != 0 && !exact[q.Kind] {
			return fmt.Errorf("%w: %s, of which the kernel does not tell all", ErrFixed, q.Kind)
		}
		if q.special != "" {
			return fmt.Errorf("%w: %s with %s", ErrFixed, q.Kind, q.special)
		}
		if q.Kind == "fq" || perQueue[q.Kind] || q.Handle == 0 && q.Parent != root {
			continue // no place for filters
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

// Setup lets all packets that leave a device pass an fq in which so many can wait
// for each of several buckets: at the root, or below an mq for each transmit queue.
// What is so already is left alone. Packets that wait in the qdisc that was there are lost.
//
// What Restore needs is given to keep before anything is changed. If that
// fails, or the kernel refuses, all is as it was. The error wraps ErrNoFQ where the
// kernel has none, ErrFixed where what is there could not be put back.
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
		return fmt.Errorf("write down what is there: %w", err)
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

// plan are the qdiscs to make, or to change, so that there is room where so many
// packets may have to wait for one bucket, from the root down.
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
	} else if s.queues > 0 { // below the kernel's own nothing can be named
		parent = handle()
		set = append(set, qdisc{Kind: "mq", Handle: parent, Parent: root})
	}
	for _, q := range leaves {
		fq := qdisc{Kind: "fq", Parent: parent}
		if parent != root {
			fq.Parent |= q.Parent &^ major
		}
		if q.Kind == fq.Kind && q.Handle != 0 {
			fq.Handle = q.Handle // it stays, with other limits
		} else {
			fq.Handle, q = handle(), qdisc{}
		}
		fq.Options = limits(q, packets)
		set = append(set, fq)
	}
	return set
}

// limits are the options of an fq that has room where so many packets may have to wait
// for one bucket, and of which none is less than that of q.
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

// An Outcome is what became of what Setup had set.
type Outcome struct {
	// Restored: what was there before is there again.
	Restored bool
	// Replaced: somebody has put something else in its place since, which stays.
	Replaced bool
	// Differs: what is restored is not in all as it was. The kernel may have another default now.
	Differs bool
	// Was is what was there before, Kind what is there now, as in State.
	Was, Kind string
	// Lost is how many packets waited in what is no more.
	Lost uint64
}

// Restore puts back what was there before the Setup that made a record, if what
// it set is there still. Packets that wait in it are lost.
func Restore(index int, text []byte) (Outcome, error) {
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		return Outcome{}, fmt.Errorf("read what was there before fq: %w", err)
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
	if err := r.putBack(index, s.tree); err != nil {
		return o, fmt.Errorf("put %s back: %w", o.Was, err)
	}
	set := s.tree.leaves()
	if s, err = Look(index); err != nil {
		return o, err
	}
	o.Restored, o.Kind = true, s.Kind
	for _, q := range set { // one that was there before has only other limits again
		if !slices.ContainsFunc(s.tree.leaves(), func(now qdisc) bool { return now.Handle == q.Handle }) {
			o.Lost += uint64(q.packets)
		}
	}
	_, o.Differs = record{Before: r.Before}.compare(s.tree)
	return o, nil
}

// compare reports if anything is there that Setup has set, and if anything is
// that was neither there before nor set by it. As Setup may have been killed, there may be some of both.
func (r record) compare(t tree) (ours, theirs bool) {
	if t.root == nil {
		return false, len(r.Before) > 0
	}
	for _, q := range t.all() {
		isSet := func(set qdisc) bool { return q.Parent == set.Parent && q.has(set) }
		// The options that the kernel gives to one that it makes by itself go by the MTU.
		isAsBefore := func(before qdisc) bool {
			return q.Parent == before.Parent && q.Kind == before.Kind && q.Handle == before.Handle &&
				(q.Handle == 0 || bytes.Equal(q.Options, before.Options))
		}
		switch {
		case slices.ContainsFunc(r.Set, isSet):
			ours = true
		case slices.ContainsFunc(r.Before, isAsBefore):
		// The kernel makes some by itself: below an mq, and where a device comes up that had none.
		case q.Handle != 0 || q.Parent == root && len(r.Before) > 0:
			theirs = true
		}
	}
	return ours, theirs
}

func (r record) putBack(index int, now tree) error {
	before := arrange(r.Before)
	again := before.all()
	byKernel := func(q qdisc) bool { return q.Handle == 0 }
	if before.root == nil || slices.ContainsFunc(again, byKernel) {
		// Only with another root does the kernel put there what it did before.
		if err := remove(index, *now.root); err != nil {
			return err
		}
		again = slices.DeleteFunc(again, byKernel)
	} else if len(before.queues) > 0 {
		again = before.queues
	}
	for _, q := range again {
		if err := put(index, q.again()); err != nil {
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
