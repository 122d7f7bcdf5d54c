package loader

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// queuedFrame is the least size of a queued packet, so that a queue has room for as many as there can be.
	queuedFrame = 64
	// drainPatience is how long queued packets may still leave before their ifb is removed.
	drainPatience = time.Second

	// ifbPrefix begins the name of a directory that marks a device with an ifb, clsactPrefix of one that marks a device to
	// which shapectl added a clsact qdisc.
	ifbPrefix, clsactPrefix = "ifb-", "clsact-"
)

// An UnqueuedError says why a device cannot queue the packets that its rules delay.
type UnqueuedError struct {
	Device  string
	State   fq.State
	Packets uint32        // that may be queued
	Longest time.Duration // that a packet may be queued
	// Fixed is why --setup-fq does not help; nil where it does.
	Fixed error
}

func (e *UnqueuedError) Error() string {
	if e.State.HasFQ {
		return fmt.Sprintf("the fq on %s queues packets for at most %v, and the rules delay them for up to %v",
			e.Device, e.State.Horizon, e.Longest)
	}
	return fmt.Sprintf("%s cannot delay packets: its qdisc is %s, and only fq can, at the root or below mq for each transmit queue", e.Device, e.State.Kind)
}

// Waiting is how many packets of rules, in the shortest frames, may be in one queue, and
// for how long; 0 if no rule delays.
func Waiting(lists ...[]policy.Rule) (packets uint32, longest time.Duration) {
	for _, rules := range lists {
		for _, r := range rules {
			bytes, wait := r.Waiting()
			packets = max(packets, uint32(min((bytes+queuedFrame-1)/queuedFrame, math.MaxUint32)))
			longest = max(longest, wait)
		}
	}
	return packets, longest
}

// ErrCgroup means that rules would queue packets of a cgroup, change their DSCP, or look behind NAT.
var ErrCgroup = errors.New("in a cgroup, packets can only pass, be marked (ECN) or be dropped, and no hosts are behind NAT")

// ErrUntagged means that a rule is for a VLAN where packets have no tags.
var ErrUntagged = errors.New("packets have no VLAN tags there, so no rule for a VLAN would match")

// checkCgroup returns ErrCgroup if the programs of a cgroup cannot do what rules say.
func checkCgroup(lists ...[]policy.Rule) error {
	isDSCP := func(a policy.Action) bool { return a != 0 && a < policy.ActionPass }
	for _, r := range slices.Concat(lists...) {
		if bytes, _ := r.Waiting(); bytes > 0 || r.NAT || isDSCP(r.Colours.Green) || isDSCP(r.Colours.Yellow) || isDSCP(r.Colours.Red) {
			return ErrCgroup
		}
	}
	return nil
}

// planQueue finds out what the device needs so that rules and pools can delay. It changes nothing. The error is an *UnqueuedError, or wraps netinfo.ErrUnsupportedDevice, fq.ErrNoFQ or
// fq.ErrOldIfb.
func (o *order) planQueue(setupFQ bool, rules ...[]policy.Rule) error {
	untagged := o.dev.IsCgroup() || o.dev.Loopback && o.Direction == policy.Egress
	isVLAN := func(r policy.Rule) bool { return strings.HasPrefix(policy.CIDR(r.Prefix), "vlan:") }
	if untagged && slices.ContainsFunc(slices.Concat(rules...), isVLAN) {
		return ErrUntagged
	}
	if o.dev.IsCgroup() {
		return checkCgroup(rules...)
	}
	packets, longest := Waiting(rules...)
	if packets == 0 {
		return nil
	}
	if o.Direction == policy.Ingress {
		if o.dev.L2Bytes == 0 {
			return fmt.Errorf("%w: without an Ethernet header, arriving packets cannot be delayed", netinfo.ErrUnsupportedDevice)
		}
		o.ifb = packets
		return fq.CheckIfb()
	}
	s, err := fq.Look(o.dev.Index)
	if err != nil {
		return err
	}
	holds, fixed := s.HasFQ && s.Horizon > longest, s.Replaceable()
	setup := setupFQ && !s.Ready(packets) && fixed == nil
	if setup || !holds {
		if err := fq.Check(); err != nil {
			return err
		}
	}
	switch {
	case setup:
		o.fq = packets
	case !holds:
		return &UnqueuedError{Device: o.dev.Name, State: s, Packets: packets, Longest: longest, Fixed: fixed}
	case !s.Room(packets):
		o.done.Hook.Lacks = packets
	}
	return nil
}

// makeIfb makes or repairs the ifb of a device, and marks the device.
func (dir home) makeIfb(dev netinfo.Device, packets uint32) error {
	if err := bpffs.MakeDir(dir.ifbMark(dev.Index)); err != nil {
		return err
	}
	_, err := fq.MakeIfb(dev.Index, dev.Name, packets)
	if err != nil {
		dir.dropIfb(dev.Index)
	}
	return err
}

// dropIfb deletes the ifb of a device, if there is one. No packets may be sent to it any more.
func (dir home) dropIfb(device int) error {
	mark := dir.ifbMark(device)
	if !bpffs.Exists(mark) {
		return nil
	}
	if _, err := fq.Drain(fq.IfbIndex(device), drainPatience); err != nil {
		return err
	}
	if err := fq.RemoveIfb(device); err != nil {
		return err
	}
	return bpffs.Unlink(mark)
}

func (dir home) ifbMark(index int) string {
	return dir.pin(ifbPrefix + strconv.Itoa(index))
}

// healMarks removes the ifbs and the marks of deleted devices, and repairs ifbs that rules need.
func (p *pins) healMarks() error {
	entries, err := bpffs.List(string(p.dir))
	for _, e := range entries {
		index, isIfb := numbered(e.Name(), ifbPrefix)
		if !isIfb {
			var isClsact bool
			if index, isClsact = numbered(e.Name(), clsactPrefix); !isClsact {
				continue
			}
		}
		dev, here, err := netinfo.DeviceByIndex(index)
		if err != nil {
			return err
		}
		needs := func(set *maps.Set) bool { return set.Ifindex() == index && set.Direction() == policy.Ingress }
		switch {
		case !isIfb && !here:
			err = bpffs.Unlink(p.dir.pin(e.Name()))
		case isIfb && (!here || p.foreign == nil && !slices.ContainsFunc(p.sets(), needs)):
			err = p.dir.dropIfb(index)
		case isIfb:
			if ifb, failed := fq.FindIfb(index); failed != nil {
				err = failed
			} else if ifb == nil || !ifb.Whole() {
				fq.MakeIfb(index, dev.Name, 0) // a command does its work even if this fails; doctor reports that
			}
		}
		if err != nil {
			return err
		}
	}
	return err
}

func numbered(name, prefix string) (number int, ok bool) {
	text, ok := strings.CutPrefix(name, prefix)
	if !ok {
		return 0, false
	}
	number, err := strconv.Atoi(text)
	return number, err == nil
}
