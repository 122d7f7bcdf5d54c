// Package fq sets up the fq qdisc, which queues packets until their departure time, on
// devices with rules that delay. For ingress it sets up ifb devices, to which packets
// are redirected. It works in the network namespace of the calling thread.
//
// Setup replaces the default qdisc of a device, and Remove brings the default back.
package fq

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// ErrNoFQ means that the kernel has no fq.
var ErrNoFQ = errors.New("this kernel has no fq qdisc, which delays packets (module sch_fq)")

const (
	// leastPackets and leastOfFlow are Setup's minimum for the packet limits of an fq, in
	// total and per flow. The defaults are 10000 and 100. A limit uses no memory.
	leastPackets = 1 << 20
	leastOfFlow  = 1 << 17
	// buckets is the minimum number of full buckets that Setup makes room for, because rules
	// and hosts share the fq. It assumes the shortest packets.
	buckets = 16
	// flows is the number of flows that Setup lets an fq distinguish among packets without
	// a connected local socket. The default is 1024. A delayed packet blocks the later
	// packets of its fq flow on older kernels.
	flows = 1 << 18
	// horizon is the latest departure time, from now.
	horizon = 10 * time.Second
)

// A State is the state of the qdiscs of a device.
type State struct {
	// Kind names the qdisc: "noqueue", "mq of fq_codel".
	Kind string
	// HasFQ means that all packets pass an fq. It is at the root, or there is one for each
	// transmit queue below mq or mqprio. An fq below any other qdisc does not count.
	HasFQ bool
	// Limit and FlowLimit are the maximum number of packets in an fq, and of one flow in
	// it; the minimum of all fqs. An fq drops packets beyond them.
	Limit, FlowLimit uint32
	// Horizon is the latest departure time, from now; the minimum of all fqs. A packet
	// beyond it is dropped if HorizonDrop is set, else it leaves at the horizon.
	Horizon     time.Duration
	HorizonDrop bool
	// Drops is the number of packets that fqs have dropped by their limits. Each fq counts
	// in 32 bits.
	Drops uint64
	// Waiting is the number of packets in the fqs.
	Waiting uint64

	index  int
	all    []qdisc // in no order
	tree   tree
	queues int // transmit queues that each need an fq; 0 for one fq at the root
}

// Look returns the state of the qdiscs of a device.
func Look(index int) (State, error) {
	all, err := qdiscs(index)
	if err != nil {
		return State{}, err
	}
	t := arrange(all)
	s := State{Kind: t.String(), index: index, all: all, tree: t, queues: len(t.queues)}
	if t.root == nil {
		// When a device comes up for the first time, each transmit queue gets a qdisc.
		link, err := linkByIndex(index)
		if link == nil {
			return s, err
		}
		if n := link.Attrs().NumTxQueues; n != 1 {
			s.queues = n
		}
	}
	leaves := t.leaves()
	if slices.ContainsFunc(leaves, func(q qdisc) bool { return q.Kind != "fq" }) {
		return s, nil
	}
	for i, q := range leaves {
		limit, flowLimit := q.number(nl.TCA_FQ_PLIMIT), q.number(nl.TCA_FQ_FLOW_PLIMIT)
		ahead := time.Duration(q.number(nl.TCA_FQ_HORIZON)) * time.Microsecond
		if i == 0 {
			s.HasFQ, s.Limit, s.FlowLimit, s.Horizon = true, limit, flowLimit, ahead
		}
		s.Limit, s.FlowLimit, s.Horizon = min(s.Limit, limit), min(s.FlowLimit, flowLimit), min(s.Horizon, ahead)
		s.HorizonDrop = s.HorizonDrop || q.number(nl.TCA_FQ_HORIZON_DROP) != 0
		s.Drops += uint64(q.drops)
		s.Waiting += uint64(q.packets)
	}
	return s, nil
}

// Limiters returns the kinds of the qdiscs that limit a rate, at any depth.
func (s State) Limiters() (kinds []string) {
	for _, q := range s.all {
		if q.limits() && !slices.Contains(kinds, q.Kind) {
			kinds = append(kinds, q.Kind)
		}
	}
	return kinds
}

// linkByIndex returns the device with an index, or nil if there is none.
func linkByIndex(index int) (netlink.Link, error) {
	link, err := netlink.LinkByIndex(index)
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up device %d: %w", index, err)
	}
	return link, nil
}

// room returns Setup's packet limits of an fq, in total and per flow, if the given number
// of packets may be queued for one bucket.
func room(packets uint32) (limit, flowLimit uint32) {
	all := min(buckets*uint64(packets), math.MaxUint32)
	return max(uint32(all), leastPackets), max(packets, leastOfFlow)
}

// Room reports whether an fq can queue the given number of packets, even of one flow.
func (s State) Room(packets uint32) bool {
	return s.HasFQ && s.Limit >= packets && s.FlowLimit >= packets
}

// Ready reports whether Setup would change nothing.
func (s State) Ready(packets uint32) bool {
	limit, flowLimit := room(packets)
	return s.HasFQ && s.Limit >= limit && s.FlowLimit >= flowLimit && s.Horizon >= horizon
}

// Advice is how to have an fq with enough room set up, where setup does that. Setup does not replace a qdisc that somebody has
// configured.
func (s State) Advice(setup string) string {
	if s.Configured() {
		return "delete the qdisc with 'tc qdisc del dev DEVICE root', and then " + setup
	}
	return setup
}

// Check returns an error that wraps ErrNoFQ if the kernel has no fq. It tries to add one
// with an invalid option to the loopback device.
func Check() error {
	const loopback = 1 // in each network namespace
	err := put(loopback, qdisc{Kind: "fq", Parent: root, Options: nl.NewRtAttr(nl.TCA_FQ_PLIMIT, []byte{0}).Serialize()})
	switch {
	case errors.Is(err, unix.ENOENT):
		return ErrNoFQ
	case errors.Is(err, unix.ERANGE), errors.Is(err, unix.EINVAL):
		return nil
	}
	return fmt.Errorf("check for fq: %w", err)
}

// Drain waits until the fqs of the device are empty, but no longer than patience, and returns
// their state then.
func Drain(index int, patience time.Duration) (State, error) {
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		s, err := Look(index)
		if err != nil || s.Waiting == 0 || time.Now().After(deadline) {
			return s, err
		}
	}
}
