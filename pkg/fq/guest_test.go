//go:build guest

package fq

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// byDefault sets the default qdisc. It must be called before the test enters its namespace.
func byDefault(t *testing.T, kind string) {
	t.Helper()
	const file = "/proc/sys/net/core/default_qdisc"
	before, err := os.ReadFile(file)
	testenv.Must(t, err)
	testenv.Must(t, os.WriteFile(file, []byte(kind), 0))
	t.Cleanup(func() { testenv.Must(t, os.WriteFile(file, before, 0)) })
}

func setUp(t *testing.T, index int, replaces string) {
	t.Helper()
	if replaced, err := Setup(index, 0); err != nil || replaced != replaces {
		t.Fatalf("Setup replaced %q, want %q: %v", replaced, replaces, err)
	}
}

// bringBack calls Remove, which brings a default qdisc back.
func bringBack(t *testing.T, index int, kind string, lost uint64) {
	t.Helper()
	if o, err := Remove(index); err != nil || o != (Removal{Kind: kind, Lost: lost}) {
		t.Errorf("Remove: %+v, want %s, %d lost: %v", o, kind, lost, err)
	}
}

func TestSetupAndRemove(t *testing.T) {
	for _, c := range []struct {
		standard string
		queues   int
		kind     string
	}{
		{"fq_codel", 1, "fq_codel"}, {"pfifo_fast", 1, "pfifo_fast"}, {"fq", 1, "fq"}, {"fq_codel", 3, "mq of fq_codel"}, {"fq", 3, "mq of fq"},
	} {
		t.Run(c.kind, func(t *testing.T) {
			byDefault(t, c.standard)
			testSetupAndRemove(t, device(t, c.queues), c.kind)
		})
	}
	t.Run("beside clsact", func(t *testing.T) {
		byDefault(t, "fq_codel")
		testSetupAndRemove(t, device(t, 1, "qdisc add dev DEV clsact"), "fq_codel")
	})
	t.Run("veth", func(t *testing.T) {
		testenv.NewNetns(t)
		testenv.Veth(t, "d0", "d1")
		testSetupAndRemove(t, testenv.Link(t, "d0").Attrs().Index, "noqueue")
	})
	for _, queues := range []int{1, 3} {
		t.Run(fmt.Sprintf("never up, %d queues", queues), func(t *testing.T) {
			byDefault(t, "fq_codel")
			testenv.NewNetns(t)
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.NumTxQueues = "d0", queues
			testenv.Must(t, netlink.LinkAdd(&netlink.Ifb{LinkAttrs: attrs}))
			link := testenv.Link(t, "d0")
			index := link.Attrs().Index
			up := map[int][]string{1: {"fq_codel", "fq"}, 3: {"mq of fq_codel", "mq of fq"}}[queues]
			testSetupAndRemove(t, index, "noop")
			setUp(t, index, "noop")
			testenv.Must(t, netlink.LinkSetUp(link))
			if s := look(t, index); s.Kind != up[1] || !s.HasFQ {
				t.Errorf("set up and then up: %+v", s)
			}
			bringBack(t, index, up[0], 0)
		})
	}
}

func testSetupAndRemove(t *testing.T, index int, kind string) {
	before := shown(t)
	setUp(t, index, kind)
	s := look(t, index)
	if !s.Ready(0) || !s.Ours() {
		t.Errorf("after Setup: %+v: %s", s, shown(t))
	}
	if kind != "noop" && strings.HasPrefix(kind, "mq") != strings.HasPrefix(s.Kind, "mq of fq") {
		t.Errorf("Setup replaced %s by %s", kind, s.Kind)
	}
	if devices, err := Devices(); err != nil || !slices.Equal(devices, []int{index}) {
		t.Errorf("devices of Setup are %v, want %d: %v", devices, index, err)
	}
	setUp(t, index, "")
	if _, err := Setup(index, 200_000); err != nil || !look(t, index).Room(200_000) {
		t.Errorf("with more room: %+v, %v", look(t, index), err)
	}
	bringBack(t, index, kind, 0)
	if after := shown(t); after != before {
		t.Errorf("before:\n%safter:\n%s", before, after)
	}
	bringBack(t, index, "", 0)
}

// Setup completes what a killed one has begun, and Remove removes it.
func TestKilledSetup(t *testing.T) {
	byDefault(t, "fq_codel")
	index := device(t, 3)
	before := shown(t)
	for range 2 {
		run(t, "tc qdisc add dev DEV root handle 5ac0: mq")
		run(t, "tc qdisc add dev DEV parent 5ac0:1 handle 5ac1: fq limit 2000000 flow_limit 131072 orphan_mask 262143 horizon 10s")
		if s := look(t, index); s.HasFQ || !s.Ours() {
			t.Errorf("after half of the changes: %+v", s)
		}
		bringBack(t, index, "mq of fq_codel", 0)
		if after := shown(t); after != before {
			t.Errorf("was %s, is %s", before, after)
		}
	}
	run(t, "tc qdisc add dev DEV root handle 5ac0: mq")
	setUp(t, index, "")
	if s := look(t, index); !s.Ready(0) {
		t.Errorf("completed: %+v", s)
	}
}

func TestSetupKeepsFilters(t *testing.T) {
	byDefault(t, "fq_codel")
	index := device(t, 1, "filter add dev DEV bpf bytecode '1,6 0 0 0'")
	before := shown(t)
	if _, err := Setup(index, 0); !errors.Is(err, ErrConfigured) {
		t.Errorf("Setup: %v", err)
	}
	if after := shown(t); after != before {
		t.Errorf("before %s, after %s", before, after)
	}
}

// later sends a packet with a departure time in the future, by a device with an address.
func later(t *testing.T, by time.Duration) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	testenv.Must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	txtime := [2]uint32{unix.CLOCK_MONOTONIC, 0} // struct sock_txtime
	testenv.Must(t, unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_TXTIME, string(unsafe.Slice((*byte)(unsafe.Pointer(&txtime)), 8))))
	var now unix.Timespec
	testenv.Must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
	control := make([]byte, unix.CmsgSpace(8))
	header := (*unix.Cmsghdr)(unsafe.Pointer(&control[0]))
	header.Level, header.Type = unix.SOL_SOCKET, unix.SCM_TXTIME
	header.SetLen(unix.CmsgLen(8))
	binary.NativeEndian.PutUint64(control[unix.CmsgLen(0):], uint64(now.Nano()+by.Nanoseconds()))
	err = unix.Sendmsg(fd, []byte("later"), control, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{10, 0, 0, 2}}, 0)
	if err != nil && !errors.Is(err, unix.ENOBUFS) {
		t.Fatal(err)
	}
}

func TestStateCounts(t *testing.T) {
	testenv.NewNetns(t)
	testenv.Veth(t, "d0", "d1")
	index := testenv.Link(t, "d0").Attrs().Index
	run(t, "ip addr add 10.0.0.1/24 dev DEV; ip neigh add 10.0.0.2 lladdr 02:00:00:00:00:02 dev DEV; tc qdisc add dev DEV root fq limit 7 flow_limit 6")
	later(t, 300*time.Millisecond)
	later(t, 20*time.Second)
	s := look(t, index)
	if s.Waiting != 1 || s.Drops != 1 || s.Limit != 7 || s.FlowLimit != 6 || s.Horizon != 10*time.Second || !s.HorizonDrop || s.Kind != "fq" {
		t.Errorf("%+v", s)
	}
	if s.Room(7) || !s.Room(6) {
		t.Errorf("room for 7: %v, for 6: %v", s.Room(7), s.Room(6))
	}
	if s, err := Drain(index, time.Minute); err != nil || s.Waiting != 0 {
		t.Errorf("after Drain: %+v, %v", s, err)
	}
	later(t, 9*time.Second)
	if s, err := Drain(index, 10*time.Millisecond); err != nil || s.Waiting != 1 {
		t.Errorf("after a Drain that was too short: %+v, %v", s, err)
	}
}

// Remove counts the packets that are queued in the fq.
func TestLost(t *testing.T) {
	testenv.NewNetns(t)
	testenv.Veth(t, "d0", "d1")
	index := testenv.Link(t, "d0").Attrs().Index
	run(t, "ip addr add 10.0.0.1/24 dev DEV; ip neigh add 10.0.0.2 lladdr 02:00:00:00:00:02 dev DEV")
	setUp(t, index, "noqueue")
	later(t, 9*time.Second)
	later(t, 9*time.Second)
	bringBack(t, index, "noqueue", 2)
}

func TestIfb(t *testing.T) {
	testenv.NewNetns(t)
	testenv.Must(t, os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("0"), 0))
	if ifb, err := FindIfb(7); ifb != nil || err != nil {
		t.Fatalf("it exists already: %+v, %v", ifb, err)
	}
	index, err := MakeIfb(7, "eth0", 0)
	testenv.Must(t, err)
	whole := func(why string) {
		t.Helper()
		ifb, err := FindIfb(7)
		testenv.Must(t, err)
		if ifb == nil || ifb.Index != index || ifb.Name != "shapectl7" || !ifb.Up || !ifb.State.Ready(0) {
			t.Errorf("%s: %+v", why, ifb)
		}
	}
	whole("made")
	link := testenv.Link(t, "shapectl7")
	a := link.Attrs()
	if !strings.Contains(a.Alias, "eth0") || a.NumTxQueues != 1 || a.MTU != ifbMTU {
		t.Errorf("%+v", a)
	}
	if addresses, err := netlink.AddrList(link, netlink.FAMILY_ALL); err != nil || len(addresses) > 0 {
		t.Errorf("it has addresses: %v, %v", addresses, err)
	}
	testenv.Must(t, netlink.LinkSetDown(link))
	run(t, "tc qdisc replace dev shapectl7 root pfifo")
	if ifb, err := FindIfb(7); err != nil || ifb.Up || ifb.State.HasFQ {
		t.Errorf("down, and without an fq: %+v, %v", ifb, err)
	}
	again, err := MakeIfb(7, "eth1", 0)
	testenv.Must(t, err)
	if again != index {
		t.Errorf("created again with index %d, want %d", again, index)
	}
	whole("made again")
	if a := testenv.Link(t, "shapectl7").Attrs().Alias; !strings.Contains(a, "eth1") {
		t.Errorf("alias %q", a)
	}
	testenv.Must(t, RemoveIfb(7))
	if ifb, err := FindIfb(7); ifb != nil || err != nil {
		t.Errorf("after RemoveIfb: %+v, %v", ifb, err)
	}
	testenv.Must(t, RemoveIfb(7))
}
