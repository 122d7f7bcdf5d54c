package fq

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/step"
)

// ErrNoIfb means that the kernel has no ifb devices.
var ErrNoIfb = errors.New("this kernel has no ifb devices, through which packets that enter can be held back (the module is ifb)")

// ErrOldIfb means that the kernel drops what a program sends to an ifb: only mirred could.
var ErrOldIfb = errors.New("this kernel loses packets that a program sends to an ifb, through which those that enter could be held back (Linux 6.4 does not)")

// ErrTaken means that another device has the name, or the number, of an ifb that is to be made.
var ErrTaken = errors.New("there is another device in the place of the one that shapectl would make")

const (
	// firstIfb and the index of a device make the index of its ifb. It tells what
	// is ours from the moment it is there, and it is far from what others have: a
	// device that is moved to another network namespace goes on to send to that index there.
	firstIfb = 0x5ac0_0000
	// maxDevice is the greatest index that fits into a name.
	maxDevice = 9_999_999
	// frame is what an ifb's fq lets a flow send in a turn, twice. By itself it would be the MTU.
	frame = 1514
	// ifbMTU is more than any packet has, as it does not matter to an ifb.
	ifbMTU = 1 << 16
)

// An Ifb is the device that holds back packets that have entered another one.
// What is sent there is received once more by that one, past its ingress hook.
type Ifb struct {
	Index int
	Name  string
	Up    bool
	State State
}

// Whole reports whether packets that are sent to the ifb are held back, and come out again.
func (i *Ifb) Whole() bool { return i.Up && i.State.Ready(0) }

// IfbIndex is the index of the ifb of a device, whether it is there or not.
func IfbIndex(device int) int { return firstIfb + device }

// CheckIfb reports whether packets that enter can be held back. The error wraps ErrNoFQ or ErrOldIfb.
func CheckIfb() error {
	if err := Check(); err != nil {
		return err
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return fmt.Errorf("ask for the kernel's name: %w", err)
	}
	return checkRelease(unix.ByteSliceToString(name.Release[:]))
}

// checkRelease goes by the version, as what such a kernel forgets to say of a
// packet shows only in that the packet is lost.
func checkRelease(release string) error {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err == nil && (major < 6 || major == 6 && minor < 4) {
		return ErrOldIfb
	}
	return nil
}

// FindIfb finds the ifb of a device by the device's index; nil if there is none.
func FindIfb(device int) (*Ifb, error) {
	link, err := findIfb(device)
	if link == nil || err != nil {
		return nil, err
	}
	a := link.Attrs()
	s, err := Look(a.Index)
	return &Ifb{Index: a.Index, Name: a.Name, Up: a.RawFlags&unix.IFF_UP != 0, State: s}, err
}

func findIfb(device int) (netlink.Link, error) {
	if device > maxDevice {
		return nil, nil
	}
	link, err := linkByIndex(IfbIndex(device))
	if link == nil || link.Type() != "ifb" {
		return nil, err
	}
	return link, nil
}

// MakeIfb makes the ifb of a device, in which so many packets can wait for each of
// several buckets, and returns its index. One that is there is made as it should be. The error wraps
// ErrNoIfb or ErrNoFQ where the kernel lacks either, and ErrTaken.
func MakeIfb(device int, name string, packets uint32) (int, error) {
	link, err := findIfb(device)
	if err != nil {
		return 0, err
	}
	made := link == nil
	if made {
		if link, err = addIfb(device); err != nil {
			return 0, err
		}
	}
	if err := prepareIfb(link, name, packets); err != nil {
		if made {
			err = errors.Join(err, netlink.LinkDel(link))
		}
		return 0, err
	}
	return link.Attrs().Index, nil
}

func addIfb(device int) (netlink.Link, error) {
	if device > maxDevice {
		return nil, fmt.Errorf("make an ifb: device number %d is too big for a name (the kernel gives smaller ones by itself)", device)
	}
	ifb := &netlink.Ifb{LinkAttrs: netlink.NewLinkAttrs()}
	ifb.Name, ifb.Index = fmt.Sprintf("shapectl%d", device), IfbIndex(device)
	ifb.MTU, ifb.NumTxQueues, ifb.NumRxQueues = ifbMTU, 1, 1
	if err := step.Try("make an ifb"); err != nil {
		return nil, err
	}
	err := netlink.LinkAdd(ifb)
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		return nil, ErrNoIfb
	case errors.Is(err, unix.EEXIST), errors.Is(err, unix.EBUSY):
		return nil, fmt.Errorf("%w: rename %s, or delete it: see 'ip link'", ErrTaken, ifb.Name)
	case err != nil:
		return nil, fmt.Errorf("make an ifb: %w", err)
	}
	return ifb, nil
}

func prepareIfb(link netlink.Link, name string, packets uint32) error {
	if alias := "shapectl: holds back what enters " + name; link.Attrs().Alias != alias {
		if err := netlink.LinkSetAlias(link, alias); err != nil {
			return fmt.Errorf("say what an ifb is for: %w", err)
		}
	}
	// It has nothing to say; where there is no IPv6, it could not.
	err := netlink.LinkSetIP6AddrGenMode(link, nl.IN6_ADDR_GEN_MODE_NONE)
	if err != nil && !errors.Is(err, unix.EAFNOSUPPORT) {
		return fmt.Errorf("keep an ifb from having addresses: %w", err)
	}
	now, err := Look(link.Attrs().Index)
	if err != nil {
		return err
	}
	var have qdisc
	if now.Holds {
		have = *now.tree.root
	}
	fq := qdisc{Kind: "fq", Handle: have.Handle, Parent: root, Options: append(limits(have, packets),
		append(u32(nl.TCA_FQ_QUANTUM, 2*frame), u32(nl.TCA_FQ_INITIAL_QUANTUM, 10*frame)...)...)}
	err = put(link.Attrs().Index, fq)
	if errors.Is(err, unix.ENOENT) {
		return ErrNoFQ
	}
	if err != nil {
		return fmt.Errorf("give an ifb its fq: %w", err)
	}
	if err := step.Try("set an ifb up"); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set an ifb up: %w", err)
	}
	return nil
}

// RemoveIfb deletes the ifb of a device, if there is one. Packets that wait in it are lost.
func RemoveIfb(device int) error {
	link, err := findIfb(device)
	if link == nil || err != nil {
		return err
	}
	if err := step.Try("delete an ifb"); err != nil {
		return err
	}
	if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete an ifb: %w", err)
	}
	return nil
}
