package fq

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"sort"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netmsg"
	"github.com/shapectl/shapectl/internal/step"
)

// A qdisc is a qdisc as the kernel reports it.
type qdisc struct {
	Kind           string
	Handle         uint32 // 0 for a default qdisc of the kernel
	Parent         uint32
	Options        []byte // of TCA_OPTIONS
	packets, drops uint32 // packets in it now, and dropped so far
}

// A tree has the qdiscs that packets leaving a device pass.
type tree struct {
	root   *qdisc  // nil for a device that was never up
	queues []qdisc // one per transmit queue, in order, if the root has such
}

// perQueue has the qdiscs that only have a qdisc for each transmit queue.
var perQueue = map[string]bool{"mq": true, "mqprio": true}

// all returns the qdiscs from the root down.
func (t tree) all() []qdisc {
	if t.root == nil {
		return nil
	}
	return append([]qdisc{*t.root}, t.queues...)
}

// leaves returns the qdiscs that queue packets.
func (t tree) leaves() []qdisc {
	if t.root == nil || perQueue[t.root.Kind] {
		return t.queues
	}
	return []qdisc{*t.root}
}

// String names the kinds: "fq_codel", "mq of fq and pfifo".
func (t tree) String() string {
	if t.root == nil {
		return "noop"
	}
	var kinds []string
	for _, q := range t.queues {
		if !slices.Contains(kinds, q.Kind) {
			kinds = append(kinds, q.Kind)
		}
	}
	if kinds == nil {
		return t.root.Kind
	}
	return t.root.Kind + " of " + strings.Join(kinds, " and ")
}

const major = 0xffff0000 // of a handle; the minor number identifies a class

// dump returns the kernel's messages about the qdiscs of all devices.
func dump() ([][]byte, error) {
	messages, err := netmsg.List(func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(unix.RTM_GETQDISC, unix.NLM_F_DUMP)
		request.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL})
		return request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWQDISC)
	})
	if err != nil {
		return nil, fmt.Errorf("list the qdiscs: %w", err)
	}
	return messages, nil
}

// qdiscs returns all qdiscs of a device, in no order.
func qdiscs(index int) (all []qdisc, err error) {
	messages, err := dump()
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		header := nl.DeserializeTcMsg(m)
		if int(header.Ifindex) != index {
			continue
		}
		q := qdisc{Handle: header.Handle, Parent: header.Parent}
		if err := q.parse(m[header.Len():]); err != nil {
			return nil, fmt.Errorf("list the qdiscs: %w", err)
		}
		all = append(all, q)
	}
	return all, nil
}

func (q *qdisc) parse(attributes []byte) error {
	return netmsg.Each(attributes, func(kind uint16, value []byte) error {
		switch kind {
		case nl.TCA_KIND:
			q.Kind = unix.ByteSliceToString(value)
		case nl.TCA_OPTIONS:
			q.Options = bytes.Clone(value)
		case nl.TCA_STATS2:
			return q.parseStats(value)
		}
		return nil
	})
}

func (q *qdisc) parseStats(attributes []byte) error {
	return netmsg.Each(attributes, func(kind uint16, value []byte) error {
		if kind != nl.TCA_STATS_QUEUE {
			return nil
		}
		if len(value) < 12 {
			return unix.EINVAL
		}
		q.packets, q.drops = binary.NativeEndian.Uint32(value), binary.NativeEndian.Uint32(value[8:])
		return nil
	})
}

// number returns an option of 1 or 4 bytes, or 0 if it is missing.
func (q qdisc) number(option uint16) (n uint32) {
	netmsg.Each(q.Options, func(kind uint16, value []byte) error {
		switch {
		case kind == option && len(value) == 1:
			n = uint32(value[0])
		case kind == option && len(value) == 4:
			n = binary.NativeEndian.Uint32(value)
		}
		return nil
	})
	return n
}

// limits reports whether q limits a rate. cake does if it has a bandwidth.
func (q qdisc) limits() bool {
	const cakeRate = 2 // TCA_CAKE_BASE_RATE64 of linux/pkt_sched.h; 0 for unlimited
	limits := q.Kind == "tbf" || q.Kind == "htb" || q.Kind == "hfsc"
	if q.Kind == "cake" {
		netmsg.Each(q.Options, func(kind uint16, value []byte) error {
			limits = limits || kind == cakeRate && slices.ContainsFunc(value, func(b byte) bool { return b != 0 })
			return nil
		})
	}
	return limits
}

// arrange returns the qdiscs that packets pass.
func arrange(all []qdisc) (t tree) {
	i := slices.IndexFunc(all, func(q qdisc) bool { return q.Parent == netlink.HANDLE_ROOT })
	if i < 0 {
		return t
	}
	t.root = &all[i]
	if !perQueue[t.root.Kind] {
		return t
	}
	for _, q := range all {
		if q.Parent&major == t.root.Handle && q.Parent&^major != 0 && q.Parent&major != netlink.HANDLE_INGRESS&major {
			t.queues = append(t.queues, q)
		}
	}
	sort.Slice(t.queues, func(i, j int) bool { return t.queues[i].Parent < t.queues[j].Parent })
	return t
}

// put creates a qdisc in place of the existing one, or changes the options of the one with
// its handle.
func put(index int, q qdisc) error {
	if err := step.Try("put a qdisc"); err != nil {
		return err
	}
	request := nl.NewNetlinkRequest(unix.RTM_NEWQDISC, unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	request.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(index), Handle: q.Handle, Parent: q.Parent})
	request.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated(q.Kind)))
	if q.Options != nil {
		request.AddData(nl.NewRtAttr(nl.TCA_OPTIONS, q.Options))
	}
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// remove deletes the root qdisc of Setup, which the kernel replaces by its default.
func remove(index int) error {
	if err := step.Try("delete a qdisc"); err != nil {
		return err
	}
	request := nl.NewNetlinkRequest(unix.RTM_DELQDISC, unix.NLM_F_ACK)
	request.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(index), Handle: ourHandle, Parent: root})
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

func u32(kind int, n uint32) []byte { return nl.NewRtAttr(kind, nl.Uint32Attr(n)).Serialize() }
