package netinfo

import (
	"fmt"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A follower is a network namespace with only lo in it at first, and what is told of it.
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

// takes ends the test unless these devices are what there is to be taken, by and by.
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
				f.Errorf("taken as %+v, and looked up as %+v, %v", d, now, err)
			}
		}
		if len(have) < len(names) {
			select {
			case <-f.More():
			case <-deadline:
				f.Fatalf("%v are to be taken, and ought to be %v", have, names)
			}
		}
	}
	if fmt.Sprint(have) != fmt.Sprint(names) {
		f.Fatalf("%v are to be taken, and ought to be %v", have, names)
	}
}

// add makes a veth pair; its names are to be taken.
func (f *follower) add(name string) {
	f.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	testenv.Must(f, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name + "p"}))
	f.takes(name+"p", name) // as they are made
}

func TestArrivals(t *testing.T) {
	f := follow(t)
	f.add("va")
	va := testenv.Link(t, "va")

	testenv.Must(t, netlink.LinkSetMTU(va, 1400)) // is told of, and nothing new
	testenv.Must(t, netlink.LinkSetName(va, "tap0"))
	f.takes("tap0")
	testenv.Must(t, netlink.LinkSetName(va, "va"))
	f.takes("va")

	testenv.Must(t, netlink.LinkDel(va))
	f.add("va")

	// Made again at once, with the number that it had, it is another device.
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "fixed", 1000
	for range 2 {
		testenv.Must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
		f.takes("fixed")
		testenv.Must(t, netlink.LinkDel(testenv.Link(t, "fixed")))
	}
	// One that is gone before it is taken was never there.
	testenv.Must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "fixed")))
	f.add("vb")
}

// A device that moves out and back has come, also if it has the number that it had.
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
		t.Errorf("its number was %d, and is %d", index, now)
	}
}

// That a port leaves its bridge is told in the words that tell of a device's end.
func TestArrivalsAndBridges(t *testing.T) {
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

// Where the kernel had more to tell than fits, all devices are told once more, and then each that comes.
func TestArrivalsLost(t *testing.T) {
	f := follow(t)
	f.Close()
	f.buffer = 1 // the kernel rounds it up to the least there is
	f.takes("lo")

	f.mu.Lock() // nothing is read but the first, which is no news
	if err := netlink.LinkSetMTU(testenv.Link(t, "lo"), 60000); err != nil {
		f.mu.Unlock()
		t.Fatal(err)
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
		t.Fatal("waited in vain for the loss to be told")
	}
	f.takes(names...)
	f.add("va")
}
