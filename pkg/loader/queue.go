package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// queuedFrame is the size of the packets that a queue is taken to hold: as many as there can be.
	queuedFrame = 64
	// drainPatience is how long what waits may still leave, where its qdisc is to go.
	drainPatience = time.Second

	// qdiscPrefix begins the name of a pinned map with what a device had before it was given an fq.
	qdiscPrefix = "qdisc-"
	// ifbPrefix begins the name of a directory that says of which device there is an ifb.
	ifbPrefix = "ifb-"
)

// An UnheldError says why a device would not hold back what its rules delay.
type UnheldError struct {
	Device  string
	State   fq.State
	Packets uint32        // that may have to wait
	Longest time.Duration // that one may have to
	// Fixed is why --setup-fq would not do, if it was asked for or not; nil where it would.
	Fixed error
}

func (e *UnheldError) Error() string {
	if e.State.HasFQ {
		return fmt.Sprintf("the fq on %s holds packets back for %v at most, and its rules are to do so for up to %v",
			e.Device, e.State.Horizon, e.Longest)
	}
	return fmt.Sprintf("nothing on %s would hold packets back: its qdisc is %s, and only fq does that, at the root or below mq for each transmit queue", e.Device, e.State.Kind)
}

// Waiting is how many packets of rules, in the shortest frames, may have to wait in one
// queue, and for how long; 0 where none delays.
func Waiting(rules []policy.Rule) (packets uint32, longest time.Duration) {
	for _, r := range rules {
		bytes, wait := r.Waiting()
		packets = max(packets, uint32(min((bytes+queuedFrame-1)/queuedFrame, math.MaxUint32)))
		longest = max(longest, wait)
	}
	return packets, longest
}

// holdBack finds out what is to be done so that rules can delay. Nothing is
// changed. The error is an *UnheldError, or wraps
// netinfo.ErrUnsupportedDevice, fq.ErrNoFQ or fq.ErrOldIfb.
func (o *order) holdBack(rules []policy.Rule, setupFQ bool) error {
	packets, longest := Waiting(rules)
	if packets == 0 {
		return nil
	}
	if o.Direction == policy.Ingress {
		if o.dev.L2Bytes == 0 {
			return fmt.Errorf("%w: they have no Ethernet header, without which what enters can not be held back", netinfo.ErrUnsupportedDevice)
		}
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
		return &UnheldError{Device: o.dev.Name, State: s, Packets: packets, Longest: longest, Fixed: fixed}
	case !s.Room(packets):
		o.done.Hook.Lacks = packets
	}
	return nil
}

// setupFQ gives a device an fq, and keeps what it had, which it returns.
func (dir home) setupFQ(dev netinfo.Device, packets uint32) (was string, err error) {
	pin := dir.qdiscPin(dev.Index)
	// A setup that was killed has changed a part of what there was.
	before, err := readRecord(pin)
	if err != nil {
		return "", err
	}
	if before != nil {
		if _, err := fq.Restore(dev.Index, before); err != nil {
			return "", err
		}
	}
	s, err := fq.Look(dev.Index)
	if err != nil {
		return "", err
	}
	return s.Kind, fq.Setup(dev.Index, packets, func(record []byte) error { return keepRecord(pin, record) })
}

// RestoreQdisc puts back what a device had before it was given an fq. Nothing
// becomes of one that was not.
func (n *Namespace) RestoreQdisc(dev netinfo.Device) (o fq.Outcome, err error) {
	if n.pins.dir == "" {
		return o, nil
	}
	pin := n.pins.dir.qdiscPin(dev.Index)
	record, err := readRecord(pin)
	if record == nil || err != nil {
		return o, err
	}
	if err := fq.Drain(dev.Index, drainPatience); err != nil {
		return o, err
	}
	if o, err = fq.Restore(dev.Index, record); err != nil {
		return o, err
	}
	return o, unlink(pin)
}

// GivenFQ reports whether a device was given an fq that RestoreQdisc has not taken away.
func (n *Namespace) GivenFQ(device int) bool {
	return n.pins.dir != "" && exists(n.pins.dir.qdiscPin(device))
}

func (dir home) qdiscPin(index int) string {
	return dir.pin(qdiscPrefix + strconv.Itoa(index))
}

// readRecord is what was kept at a pin, nil if nothing was.
func readRecord(pin string) ([]byte, error) {
	m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", pin, err)
	}
	defer m.Close()
	record, err := m.LookupBytes(uint32(0))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", pin, err)
	}
	return record, nil
}

// keepRecord keeps it in a map, which is there for as long as the qdiscs are that it tells of.
func keepRecord(pin string, record []byte) error {
	err := unlink(pin)
	if err == nil {
		spec := &ebpf.MapSpec{Name: "shapectl_qdisc", Type: ebpf.Array, ValueSize: uint32(len(record))}
		err = pinValue(pin, spec, record)
	}
	if err != nil {
		return fmt.Errorf("keep what qdisc there was: %w", err)
	}
	return nil
}

// makeIfb makes the ifb of a device, or makes it as it should be, and marks that there is one.
func (dir home) makeIfb(dev netinfo.Device, packets uint32) error {
	if err := makeDir(dir.ifbMark(dev.Index)); err != nil {
		return err
	}
	_, err := fq.MakeIfb(dev.Index, dev.Name, packets)
	if err != nil {
		dir.dropIfb(dev.Index)
	}
	return err
}

// dropIfb deletes the ifb of a device, to which nothing is sent any more, if it was made.
func (dir home) dropIfb(device int) error {
	mark := dir.ifbMark(device)
	if !exists(mark) {
		return nil
	}
	if err := fq.Drain(fq.IfbIndex(device), drainPatience); err != nil {
		return err
	}
	if err := fq.RemoveIfb(device); err != nil {
		return err
	}
	return unlink(mark)
}

func (dir home) ifbMark(index int) string {
	return dir.pin(ifbPrefix + strconv.Itoa(index))
}

// healQueues sees to what is kept of qdiscs and to ifbs: those of devices that are
// gone go, and an ifb that rules need and that is not as it should be is made so.
func (dir home) healQueues() error {
	entries, err := readDir(string(dir))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if index, ok := numbered(e.Name(), qdiscPrefix); ok {
			_, here, err := netinfo.DeviceByIndex(index)
			if err == nil && !here {
				err = unlink(dir.qdiscPin(index))
			}
			if err != nil {
				return err
			}
		}
		if index, ok := numbered(e.Name(), ifbPrefix); ok {
			if err := dir.healIfb(index); err != nil {
				return err
			}
		}
	}
	return nil
}

func (dir home) healIfb(index int) error {
	dev, here, err := netinfo.DeviceByIndex(index)
	if err != nil {
		return err
	}
	if !here || !exists(dir.hookDir(index, policy.Ingress).dir) {
		return dir.dropIfb(index)
	}
	ifb, err := fq.FindIfb(index)
	if err != nil || ifb != nil && ifb.Whole() {
		return err
	}
	// What can not be mended is no reason for the command not to do what it is for; doctor tells of it.
	fq.MakeIfb(index, dev.Name, 0)
	return nil
}

func numbered(name, prefix string) (number int, ok bool) {
	text, ok := strings.CutPrefix(name, prefix)
	if !ok {
		return 0, false
	}
	number, err := strconv.Atoi(text)
	return number, err == nil
}
