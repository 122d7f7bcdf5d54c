package netinfo

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	tablet = policy.MAC{2, 0, 0, 0, 0, 1}
	phone  = policy.MAC{2, 0, 0, 0, 0, 2}
	other  = policy.MAC{2, 0, 0, 0, 0, 3}
)

// A table is the neighbours of device va, and who follows them.
type table struct {
	*testing.T
	*Neighbours
	index int
}

func newTable(t *testing.T) *table {
	testenv.NewNetns(t)
	testenv.Veth(t, "va", "vb")
	tab := &table{t, NewNeighbours(), testenv.Link(t, "va").Attrs().Index}
	t.Cleanup(tab.Close)
	return tab
}

func (t *table) entry(address string, mac policy.MAC, state int) *netlink.Neigh {
	return &netlink.Neigh{LinkIndex: t.index, State: state, IP: net.ParseIP(address), HardwareAddr: mac[:]}
}

func (t *table) set(address string, mac policy.MAC, state int) {
	t.Helper()
	testenv.Must(t, netlink.NeighSet(t.entry(address, mac, state)))
}

func (t *table) remove(address string) {
	t.Helper()
	testenv.Must(t, netlink.NeighDel(t.entry(address, policy.MAC{}, 0)))
}

// text is the addresses of each MAC address on va.
func (t *table) text(of map[int]map[policy.MAC][]netip.Addr) string {
	var all []string
	for index, macs := range of {
		if index != t.index {
			t.Errorf("device %d has neighbours", index)
		}
		for mac, addresses := range macs {
			for _, a := range addresses {
				all = append(all, fmt.Sprintf("%v %v", mac[5], a))
			}
		}
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

var followed = map[policy.MAC]bool{tablet: true, phone: true}

// has waits until Take has said that va has changed, or all devices, and the neighbours are these.
func (t *table) has(all bool, want string) {
	t.Helper()
	for deadline := time.After(10 * time.Second); ; {
		changed, listed, err := t.Take(followed)
		testenv.Must(t, err)
		if got := t.text(t.Of()); got == want && (listed && all || changed[t.index]) {
			break
		}
		select {
		case <-t.More():
		case <-deadline:
			t.Fatalf("got %s; want %s", t.text(t.Of()), want)
		}
	}
	listed, err := ListNeighbours(followed)
	testenv.Must(t, err)
	if got := t.text(listed); got != want {
		t.Errorf("listed %s; want %s", got, want)
	}
}

func TestNeighbours(t *testing.T) {
	tab := newTable(t)
	tab.set("10.0.0.1", tablet, netlink.NUD_STALE)
	tab.has(true, "1 10.0.0.1")
	tab.set("10.0.0.2", tablet, netlink.NUD_PERMANENT)
	tab.has(false, "1 10.0.0.1, 1 10.0.0.2")

	// Another neighbour has the address now, one that is followed or not.
	tab.set("10.0.0.2", phone, netlink.NUD_PERMANENT)
	tab.has(false, "1 10.0.0.1, 2 10.0.0.2")
	tab.set("10.0.0.1", other, netlink.NUD_STALE)
	tab.has(false, "2 10.0.0.2")
	tab.set("10.0.0.1", tablet, netlink.NUD_STALE)
	tab.has(false, "1 10.0.0.1, 2 10.0.0.2")
	tab.remove("10.0.0.2")
	tab.has(false, "1 10.0.0.1")

	// These are no addresses of neighbours that pass a gateway, and the same again is no news.
	tab.set("169.254.0.1", tablet, netlink.NUD_STALE)
	tab.set("224.0.0.1", tablet, netlink.NUD_STALE)
	tab.set("10.0.0.3", tablet, netlink.NUD_NOARP)
	tab.set("10.0.0.4", other, netlink.NUD_STALE)
	tab.set("10.0.0.1", tablet, netlink.NUD_PERMANENT)
	tab.set("10.0.0.5", phone, netlink.NUD_STALE)
	tab.has(false, "1 10.0.0.1, 2 10.0.0.5")
}

// An address that does not answer stays until the kernel forgets it.
func TestNeighbourThatDoesNotAnswer(t *testing.T) {
	tab := newTable(t)
	tab.set("10.0.0.1", tablet, netlink.NUD_STALE)
	tab.has(true, "1 10.0.0.1")
	tab.set("10.0.0.1", policy.MAC{}, netlink.NUD_FAILED)
	tab.set("10.0.0.2", tablet, netlink.NUD_STALE)
	for deadline := time.After(10 * time.Second); tab.text(tab.Of()) != "1 10.0.0.1, 1 10.0.0.2"; {
		select {
		case <-tab.More():
		case <-deadline:
			t.Fatal(tab.text(tab.Of()))
		}
	}
	listed, err := ListNeighbours(followed)
	testenv.Must(t, err)
	if got := tab.text(listed); got != "1 10.0.0.2" {
		t.Errorf("listed %s", got)
	}
	tab.remove("10.0.0.1")
	tab.has(false, "1 10.0.0.2")
}

// With other MAC addresses, and after lost messages, all devices may have other neighbours.
func TestNeighboursAgain(t *testing.T) {
	tab := newTable(t)
	tab.set("10.0.0.1", tablet, netlink.NUD_STALE)
	if _, all, err := tab.Take(map[policy.MAC]bool{phone: true}); err != nil || !all || len(tab.Of()) > 0 {
		t.Errorf("%v %v %v", all, err, tab.Of())
	}
	tab.has(true, "1 10.0.0.1")
	tab.Close()
	tab.buffer = 1 // the kernel rounds it up to its minimum
	tab.has(true, "1 10.0.0.1")

	tab.mu.Lock()
	for i := range 100 {
		if err := netlink.NeighSet(tab.entry(fmt.Sprintf("10.0.1.%d", i), other, netlink.NUD_STALE)); err != nil {
			tab.mu.Unlock()
			t.Fatal(err)
		}
	}
	err := netlink.NeighSet(tab.entry("10.0.0.2", tablet, netlink.NUD_STALE))
	tab.buffer = eventBytes
	tab.mu.Unlock()
	testenv.Must(t, err)
	tab.has(true, "1 10.0.0.1, 1 10.0.0.2")
}
