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
var ErrNoIfb = errors.New("this kernel has no ifb devices, which delay packets on ingress (module ifb)")

// ErrOldIfb means that the kernel drops packets that a program redirects to an ifb; before Linux 6.4 only mirred can.
var ErrOldIfb = errors.New("this kernel drops packets that a program redirects to an ifb device, so it cannot delay packets on ingress (Linux 6.4 can)")

// ErrTaken means that another device has the name or index of the ifb to create.
var ErrTaken = errors.New("another device has the name or index of the ifb device that shapectl needs")

const (
	// firstIfb plus the index of a device is the index of its ifb. The index identifies
	// our ifb as soon as it exists. No other device must have it, because a device that
	// moves to another namespace still redirects to that index there.
	firstIfb = 0x5ac0_0000
	// maxDevice is the largest index whose decimal form leaves the ifb's name short enough.
	maxDevice = 9_999_999
	// frame is half of the quantum of an ifb's fq, which depends on the MTU by default.
	frame = 1514
	// ifbMTU exceeds any packet. An ifb does not enforce it.
	ifbMTU = 1 << 16
)

// An Ifb is an ifb device that delays packets that have entered another device. The other
// device then receives them again, after its ingress hook.
type Ifb struct {
	Index int
	Name  string
	Up    bool
	State State
}

// Whole reports whether the ifb is up and has a suitable fq. Otherwise redirected packets are lost or not delayed.
func (i *Ifb) Whole() bool { return i.Up && i.State.Ready(0) }

// IfbIndex returns the index of the ifb of a device, whether it exists or not.
func IfbIndex(device int) int { return firstIfb + device }

// CheckIfb returns an error that wraps ErrNoFQ or ErrOldIfb if the kernel cannot delay packets on ingress.
func CheckIfb() error {
	if err := Check(); err != nil {
		return err
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return fmt.Errorf("query the kernel release: %w", err)
	}
	return checkRelease(unix.ByteSliceToString(name.Release[:]))
}

// checkRelease compares versions, because the only symptom of an old kernel is that packets
// are lost.
func checkRelease(release string) error {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err == nil && (major < 6 || major == 6 && minor < 4) {
		return ErrOldIfb
	}
	return nil
}

// FindIfb returns the ifb of the device with an index, or nil if there is none.
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

// MakeIfb creates the ifb of a device, or corrects the existing one, and returns its index.
// Its fq has room for the given number of packets for each of several buckets. The error
// wraps ErrNoIfb or ErrNoFQ if the kernel lacks either, or ErrTaken.
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
		return nil, fmt.Errorf("create an ifb device: device index %d is too large for its name; indexes that the kernel chooses are smaller", device)
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
		return nil, fmt.Errorf("%w: rename or delete %s; see 'ip link'", ErrTaken, ifb.Name)
	case err != nil:
		return nil, fmt.Errorf("create an ifb device: %w", err)
	}
	return ifb, nil
}

func prepareIfb(link netlink.Link, name string, packets uint32) error {
	if alias := "shapectl: delays packets that enter " + name; link.Attrs().Alias != alias {
		if err := netlink.LinkSetAlias(link, alias); err != nil {
			return fmt.Errorf("set the alias of an ifb device: %w", err)
		}
	}
	// An ifb must not send IPv6 packets. EAFNOSUPPORT means that there is no IPv6.
	err := netlink.LinkSetIP6AddrGenMode(link, nl.IN6_ADDR_GEN_MODE_NONE)
	if err != nil && !errors.Is(err, unix.EAFNOSUPPORT) {
		return fmt.Errorf("disable IPv6 addresses of an ifb device: %w", err)
	}
	now, err := Look(link.Attrs().Index)
	if err != nil {
		return err
	}
	var have qdisc
	if now.HasFQ {
		have = *now.tree.root
	}
	fq := qdisc{Kind: "fq", Handle: have.Handle, Parent: root, Options: append(limits(have, packets),
		append(u32(nl.TCA_FQ_QUANTUM, 2*frame), u32(nl.TCA_FQ_INITIAL_QUANTUM, 10*frame)...)...)}
	err = put(link.Attrs().Index, fq)
	if errors.Is(err, unix.ENOENT) {
		return ErrNoFQ
	}
	if err != nil {
		return fmt.Errorf("set the fq of an ifb device: %w", err)
	}
	if err := step.Try("set an ifb up"); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set an ifb device up: %w", err)
	}
	return nil
}

// RemoveIfb deletes the ifb of a device, if there is one. Queued packets are lost.
func RemoveIfb(device int) error {
	link, err := findIfb(device)
	if link == nil || err != nil {
		return err
	}
	if err := step.Try("delete an ifb"); err != nil {
		return err
	}
	if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete an ifb device: %w", err)
	}
	return nil
}
