package netinfo

import (
	"fmt"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A follower is a network namespace, at first with only lo, and its Arrivals.
type follower struct {
	*testing.T
	netns *testenv.Netns
	*Arrivals
}

func follow(t *testing.T) *follower {
	f := &follower{t, testenv.NewNetns(t), NewArrivals()}
	t.Cleanup(f.Close)
	f.takes("lo")
	return f
}

// takes ends the test unless Take returns exactly these devices, in one or more calls.
func (f *follower) takes(names ...string) {
	f.Helper()
	var have []string
	for deadline := time.After(10 * time.Second); len(have) < len(names); {
		devices, _, err := f.Take()
		testenv.Must(f, err)
		for _, d := range devices {
			have = append(have, d.Name)
			now, there, err := DeviceByIndex(d.Index)
			if err != nil || !there || now.Name == d.Name && (now.L2Bytes != d.L2Bytes || now.Kind != d.Kind) {
				f.Errorf("Take returned %+v, but DeviceByIndex %+v, %v", d, now, err)
			}
		}
		if len(have) < len(names) {
			select {
			case <-f.More():
			case <-deadline:
				f.Fatalf("Take returned %v, want %v", have, names)
			}
		}
	}
	if fmt.Sprint(have) != fmt.Sprint(names) {
		f.Fatalf("Take returned %v, want %v", have, names)
	}
}

// add creates a veth pair, and takes both devices.
func (f *follower) add(name string) {
	f.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	testenv.Must(f, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name + "p"}))
	f.takes(name+"p", name) // in order of creation
}

func TestArrivals(t *testing.T) {
	f := follow(t)
	f.add("va")
	va := testenv.Link(t, "va")

	testenv.Must(t, netlink.LinkSetMTU(va, 1400)) // causes a message, but no arrival
	testenv.Must(t, netlink.LinkSetName(va, "tap0"))
	f.takes("tap0")
	testenv.Must(t, netlink.LinkSetName(va, "va"))
	f.takes("va")

	testenv.Must(t, netlink.LinkDel(va))
	f.add("va")

	// A device that is deleted and created again with the same index is a new arrival.
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "fixed", 1000
	for range 2 {
		testenv.Must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
		f.takes("fixed")
		testenv.Must(t, netlink.LinkDel(testenv.Link(t, "fixed")))
	}
	// A device that is deleted before Take is not returned.
	testenv.Must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "fixed")))
	f.add("vb")
}

// A device that moves to another namespace and back is a new arrival, even with the same index.
func TestArrivalsFromAnotherNamespace(t *testing.T) {
	f := follow(t)
	_, other := testenv.NewNamedNetns(t)
	f.add("va")
	index := testenv.Link(t, "va").Attrs().Index
	testenv.Must(t, netlink.LinkSetNsFd(testenv.Link(t, "va"), other.FD()))
	err := other.Do(func() error {
		va, err := netlink.LinkByName("va")
		if err != nil {
			return err
		}
		return netlink.LinkSetNsFd(va, f.netns.FD())
	})
	testenv.Must(t, err)
	f.takes("va")
	if now := testenv.Link(t, "va").Attrs().Index; now != index {
		t.Errorf("its index was %d, and is %d", index, now)
	}
}

// When a port leaves its bridge, the kernel sends the same type of message as for a deleted device.
func TestArrivalsAndBridgePorts(t *testing.T) {
	f := follow(t)
	f.add("va")
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "br"
	testenv.Must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
	f.takes("br")
	va := testenv.Link(t, "va")
	testenv.Must(t, netlink.LinkSetMaster(va, testenv.Link(t, "br")))
	testenv.Must(t, netlink.LinkSetNoMaster(va))
	testenv.Must(t, netlink.LinkSetMTU(va, 1400))
	f.add("vb")
}

// After lost messages, Take returns all devices again, and then new ones.
func TestArrivalsAfterLostMessages(t *testing.T) {
	f := follow(t)
	f.Close()
	f.buffer = 1 // the kernel rounds it up to its minimum
	f.takes("lo")

	f.mu.Lock() // only the first two messages are read, which are no arrivals
	for mtu := range 2 {
		if err := netlink.LinkSetMTU(testenv.Link(t, "lo"), 60000+mtu); err != nil {
			f.mu.Unlock()
			t.Fatal(err)
		}
	}
	names := []string{"lo"}
	for i := range 20 {
		name := fmt.Sprintf("v%d", i)
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name + "p"}); err != nil {
			f.mu.Unlock()
			t.Fatal(err)
		}
		names = append(names, name+"p", name)
	}
	f.buffer = eventBytes
	f.mu.Unlock()
	select {
	case <-f.More():
	case <-time.After(10 * time.Second):
		t.Fatal("timeout waiting for the loss to be noticed")
	}
	f.takes(names...)
	f.add("va")
}
