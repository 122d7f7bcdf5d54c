// Package fq sees to the qdisc fq, which holds packets back until their
// departure time, on the devices whose packets are to be delayed, and to the
// ifb devices by which packets that enter a device reach one. It works on the
// network namespace of the calling thread.
//
// A device's qdisc is its owner's. Setup replaces it when it is told to, and
// Restore puts back what was there.
package fq

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/plain"
)

// ErrNoFQ means that the kernel has no fq.
var ErrNoFQ = errors.New("this kernel has no qdisc fq, which holds packets back (its module is sch_fq)")

const (
	// leastPackets and leastOfFlow are how many packets Setup lets an fq hold at the
	// least, all together and of one flow, where it has 10000 and 100 by itself. They
	// take no memory before they are there.
	leastPackets = 1 << 20
	leastOfFlow  = 1 << 17
	// buckets is how many full ones Setup lets an fq hold at the least, as rules and
	// hosts share it: full of the shortest packets, and so of many more if they are longer.
	buckets = 16
	// flows is how many flows an fq tells apart of what no connected socket of
	// this host sends, where it has 1024 by itself. What shares a flow with a packet
	// that waits may wait as long.
	flows = 1 << 18
	// horizon is how far ahead a departure time may be.
	horizon = 10 * time.Second
)

// A State is what holds packets back that leave a device.
type State struct {
	// Kind names its qdisc: "noqueue", "mq of fq_codel".
	Kind string
	// Holds: all packets pass an fq. It is at the root, or there is one for each
	// transmit queue below an mq or mqprio. Below a qdisc that schedules by itself it does not count.
	Holds bool
	// Limit and FlowLimit are how many packets an fq holds, and how many of one
	// flow; the least of all. Beyond them it drops.
	Limit, FlowLimit uint32
	// Flows is how many flows an fq tells apart of what no connected socket of this
	// host sends, the least of all.
	Flows uint64
	// Horizon is how far ahead a departure time may be, the least of all. A
	// packet beyond it is dropped if HorizonDrop, else it leaves at the horizon.
	Horizon     time.Duration
	HorizonDrop bool
	// Drops are packets that fqs have dropped, all by limits of their own; each counts in 32 bits.
	Drops uint64
	// Waiting is how many packets they hold now.
	Waiting uint64

	index  int
	all    []qdisc // in no order
	tree   tree
	queues int // that each are to have an fq; 0 for one at the root
}

// Look looks at the qdiscs of a device.
func Look(index int) (State, error) {
	all, err := qdiscs(index)
	if err != nil {
		return State{}, err
	}
	t := arrange(all)
	s := State{Kind: t.String(), index: index, all: all, tree: t, queues: len(t.queues)}
	if t.root == nil {
		// The kernel gives each transmit queue a qdisc when a device that was never up comes up.
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
		apart := uint64(1) << bits.OnesCount32(q.number(nl.TCA_FQ_ORPHAN_MASK)) // values of hash & mask
		ahead := time.Duration(q.number(nl.TCA_FQ_HORIZON)) * time.Microsecond
		if i == 0 {
			s.Holds, s.Limit, s.FlowLimit, s.Flows, s.Horizon = true, limit, flowLimit, apart, ahead
		}
		s.Limit, s.FlowLimit = min(s.Limit, limit), min(s.FlowLimit, flowLimit)
		s.Flows, s.Horizon = min(s.Flows, apart), min(s.Horizon, ahead)
		s.HorizonDrop = s.HorizonDrop || q.number(nl.TCA_FQ_HORIZON_DROP) != 0
		s.Drops += uint64(q.drops)
		s.Waiting += uint64(q.packets)
	}
	return s, nil
}

// linkByIndex is the device with an index; nil if there is none.
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

// room is how many packets Setup lets an fq hold, all together and of one flow,
// where so many may have to wait for one bucket.
func room(packets uint32) (limit, flowLimit uint32) {
	all := min(buckets*uint64(packets), math.MaxUint32)
	return max(uint32(all), leastPackets), max(packets, leastOfFlow)
}

// Room reports whether so many packets can wait, also if they are of one flow.
func (s State) Room(packets uint32) bool {
	return s.Holds && s.Limit >= packets && s.FlowLimit >= packets
}

// TellsApart reports whether an fq tells as many flows apart as Setup lets it. It
// does not replace one for that.
func (s State) TellsApart() bool { return s.Flows >= flows }

// Ready reports whether Setup would leave all as it is.
func (s State) Ready(packets uint32) bool {
	limit, flowLimit := room(packets)
	return s.Holds && s.Limit >= limit && s.FlowLimit >= flowLimit && s.Horizon >= horizon
}

// Command is what a person would type for a device of that name, in a network namespace
// that is given as a name, path or process id ("" for the one this is), to have an fq in
// which so many packets can wait for each of several buckets, in place of what
// State tells of. An fq that is there keeps what it has more of.
func (s State) Command(device, netns string, packets uint32) string {
	tc := tcIn(netns)
	limit, flowLimit := room(packets)
	limit, flowLimit = max(limit, s.Limit), max(flowLimit, s.FlowLimit)
	replace := func(where, what string) string {
		return fmt.Sprintf("%s qdisc replace dev %s %s %s", tc, plain.Word(device), where, what)
	}
	options := fmt.Sprintf("fq limit %d flow_limit %d orphan_mask %d", limit, flowLimit, max(flows, s.Flows)-1)
	if s.Holds && s.Horizon < horizon {
		options += " horizon 10s"
	}
	if s.queues == 0 {
		return replace("root", options)
	}
	var b strings.Builder
	handle := uint32(1)
	if s.tree.root != nil && s.tree.root.Handle != 0 {
		handle = s.tree.root.Handle >> 16
	} else {
		b.WriteString(replace("root handle 1:", "mq") + "; ")
	}
	fmt.Fprintf(&b, "for q in $(seq %d); do %s; done", s.queues, replace(fmt.Sprintf("parent %x:$(printf %%x $q)", handle), options))
	return b.String()
}

// tcIn is the command tc in a network namespace that was given as loader.In takes it.
// tc itself takes only names.
func tcIn(netns string) string {
	path := netns
	_, notPID := strconv.ParseUint(netns, 10, 31)
	_, noName := os.Stat(filepath.Join("/run/netns", netns))
	switch {
	case netns == "":
		return "tc"
	case notPID == nil && noName != nil:
		path = "/proc/" + netns + "/ns/net"
	case !strings.Contains(netns, "/"):
		return "tc -n " + plain.Word(netns)
	}
	return "nsenter --net=" + plain.Word(path) + " tc"
}

// Check reports whether the kernel has fq, by trying to give the loopback device
// one with an option that is too short. The error wraps ErrNoFQ.
func Check() error {
	const loopback = 1 // in each network namespace
	err := put(loopback, qdisc{Kind: "fq", Parent: root, Options: nl.NewRtAttr(nl.TCA_FQ_PLIMIT, []byte{0}).Serialize()})
	switch {
	case errors.Is(err, unix.ENOENT):
		return ErrNoFQ
	case errors.Is(err, unix.ERANGE), errors.Is(err, unix.EINVAL):
		return nil
	}
	return fmt.Errorf("look for fq: %w", err)
}

// Drain waits until an fq of the device holds no packets, but no longer than patience.
func Drain(index int, patience time.Duration) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		s, err := Look(index)
		if err != nil || s.Waiting == 0 || time.Now().After(deadline) {
			return err
		}
	}
}
