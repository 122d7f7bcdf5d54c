//go:build guest

package fq

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
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

// setUp calls Setup, and returns the record.
func setUp(t *testing.T, index int) (record []byte) {
	t.Helper()
	testenv.Must(t, Setup(index, 0, func(r []byte) error { record = r; return nil }))
	if record == nil {
		t.Fatal("Setup did nothing")
	}
	return record
}

func restore(t *testing.T, index int, record []byte) Outcome {
	t.Helper()
	o, err := Restore(index, record)
	testenv.Must(t, err)
	return o
}

var restorable = []struct {
	name     string
	queues   int
	standard string // the default qdisc; fq_codel if ""
	commands []string
}{
	{"fq_codel by default", 1, "", nil},
	{"pfifo_fast by default", 1, "pfifo_fast", nil},
	{"fq by default", 1, "fq", nil},
	{"mq by default", 3, "", nil},
	{"mq of fq by default", 3, "fq", nil},
	{"noqueue", 1, "", []string{"qdisc add dev DEV root noqueue"}},
	{"pfifo", 1, "", []string{"qdisc add dev DEV root handle 9: pfifo limit 77"}},
	{"bfifo", 1, "", []string{"qdisc add dev DEV root bfifo limit 7777"}},
	{"pfifo_fast", 1, "", []string{"qdisc add dev DEV root pfifo_fast"}},
	{"fq_codel", 1, "", []string{"qdisc add dev DEV root fq_codel"}},
	{"fq_codel with options", 1, "", []string{
		"qdisc add dev DEV root fq_codel target 3ms interval 77ms ce_threshold 1234us limit 500 flows 64 quantum 300 memory_limit 4Mb noecn drop_batch 8"}},
	{"codel", 1, "", []string{"qdisc add dev DEV root codel limit 99 target 7ms interval 71ms ce_threshold 9ms ecn"}},
	{"sfq", 1, "", []string{"qdisc add dev DEV root sfq perturb 10 limit 200 divisor 512 quantum 1600 headdrop"}},
	{"sfq with red", 1, "", []string{"qdisc add dev DEV root sfq limit 300 depth 60 redflowlimit 100000 min 8000 max 60000 probability 0.2 ecn"}},
	{"cake", 1, "", []string{"qdisc add dev DEV root cake"}},
	{"cake with options", 1, "", []string{
		"qdisc add dev DEV root cake bandwidth 20mbit diffserv4 wash overhead 38 mpu 64 ack-filter memlimit 4mb dual-srchost fwmark 0xff rtt 50ms ingress no-split-gso atm"}},
	{"mq", 3, "", []string{"qdisc add dev DEV root handle 9: mq"}},
	{"mq of three", 3, "", []string{"qdisc add dev DEV root handle 9: mq", "qdisc replace dev DEV parent 9:1 pfifo limit 5",
		"qdisc replace dev DEV parent 9:2 handle 77: fq limit 300"}},
	{"mq of pfifo", 2, "", []string{"qdisc add dev DEV root handle 9: mq", "qdisc replace dev DEV parent 9:1 pfifo limit 5",
		"qdisc replace dev DEV parent 9:2 handle 77: sfq"}},
	{"fq", 1, "", []string{"qdisc add dev DEV root fq limit 300"}},
	{"fq with options", 1, "", []string{"qdisc add dev DEV root fq limit 999999 flow_limit 50 quantum 2000 initial_quantum 9000 maxrate 1gbit " +
		"nopacing buckets 64 refill_delay 80ms orphan_mask 255 ce_threshold 3ms timer_slack 20us horizon 2s horizon_cap"}},
	{"beside clsact", 1, "", []string{"qdisc add dev DEV clsact"}},
}

func TestSetupAndRestore(t *testing.T) {
	for _, c := range restorable {
		t.Run(c.name, func(t *testing.T) {
			standard := c.standard
			if standard == "" {
				standard = "fq_codel"
			}
			byDefault(t, standard)
			index := device(t, c.queues, c.commands...)
			testSetupAndRestore(t, index)
		})
	}
	t.Run("veth", func(t *testing.T) {
		testenv.NewNetns(t)
		testenv.Veth(t, "d0", "d1")
		testSetupAndRestore(t, testenv.Link(t, "d0").Attrs().Index)
	})
	t.Run("veth without a queue length", func(t *testing.T) {
		testenv.NewNetns(t)
		testenv.Veth(t, "d0", "d1")
		link := testenv.Link(t, "d0")
		testenv.Must(t, netlink.LinkSetTxQLen(link, 0))
		testSetupAndRestore(t, link.Attrs().Index)
		if n := testenv.Link(t, "d0").Attrs().TxQLen; n != 0 {
			t.Errorf("the queue length is %d, want 0", n)
		}
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
			testSetupAndRestore(t, index)
			record := setUp(t, index)
			testenv.Must(t, netlink.LinkSetUp(link))
			if s := look(t, index); s.Kind != up[1] || !s.HasFQ {
				t.Errorf("set up and then up: %+v", s)
			}
			if o := restore(t, index, record); !o.Restored || o.Differs || o.Kind != up[0] {
				t.Errorf("restored while up: %+v", o)
			}
		})
	}
}

func testSetupAndRestore(t *testing.T, index int) {
	before, kind := shown(t), look(t, index).Kind
	record := setUp(t, index)
	s := look(t, index)
	if !s.Ready(0) || !s.TellsApart() {
		t.Errorf("after Setup: %+v: %s", s, shown(t))
	}
	if kind != "noop" && strings.HasPrefix(kind, "mq") != strings.HasPrefix(s.Kind, "mq of fq") {
		t.Errorf("Setup replaced %s by %s", kind, s.Kind)
	}
	if err := Setup(index, 0, func([]byte) error { return errors.New("set up twice") }); err != nil {
		t.Error(err)
	}
	o := restore(t, index, record)
	if !o.Restored || o.Was != kind || o.Kind != kind || o.Differs {
		t.Errorf("Restore of %s returned %+v", kind, o)
	}
	if after := shown(t); after != before {
		t.Errorf("before:\n%safter:\n%s", before, after)
	}
	if o := restore(t, index, record); o.Restored || o.Replaced {
		t.Errorf("second Restore: %+v", o)
	}
}

// The suggested command has the same effect as Setup, whatever the qdisc before.
func TestCommandEqualsSetup(t *testing.T) {
	for _, c := range restorable {
		if c.standard != "" || !slices.Contains([]string{"mq by default", "mq of three", "pfifo", "fq", "fq with options"}, c.name) {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			byDefault(t, "fq_codel")
			index := device(t, c.queues, c.commands...)
			run(t, look(t, index).Command("d0", "", 200_000))
			if s := look(t, index); !s.Room(200_000) || !s.TellsApart() {
				t.Errorf("state %+v: %s", s, shown(t))
			}
			if err := Setup(index, 200_000, func([]byte) error { return errors.New("set up, too") }); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestKilledSetup(t *testing.T) {
	byDefault(t, "fq_codel")
	index := device(t, 3)
	before := shown(t)
	var record []byte
	unkept := errors.New("not kept")
	if err := Setup(index, 0, func(r []byte) error { record = r; return unkept }); !errors.Is(err, unkept) {
		t.Fatalf("Setup: %v", err)
	}
	if after := shown(t); after != before {
		t.Errorf("without a record, %s was changed to %s", before, after)
	}
	if o := restore(t, index, record); o.Restored || o.Replaced || shown(t) != before {
		t.Errorf("killed before the first change: %+v, %s", o, shown(t))
	}
	run(t, "tc qdisc add dev DEV root handle 5ac0: mq")
	run(t, "tc qdisc add dev DEV parent 5ac0:1 handle 5ac1: fq limit 1048576 flow_limit 131072 orphan_mask 262143 horizon 10s")
	if s := look(t, index); s.HasFQ {
		t.Errorf("Ready after half of the changes: %+v", s)
	}
	if o := restore(t, index, record); !o.Restored || shown(t) != before {
		t.Errorf("killed half way: %+v, %s", o, shown(t))
	}
}

func TestFailedSetup(t *testing.T) {
	for name, commands := range map[string][]string{
		"mq by default": nil,
		"mq":            {"qdisc add dev DEV root handle 9: mq", "qdisc replace dev DEV parent 9:2 handle 77: fq limit 300"},
	} {
		t.Run(name, func(t *testing.T) {
			byDefault(t, "fq_codel")
			index := device(t, 3, commands...)
			before := shown(t)
			var r record
			testenv.Must(t, Setup(index, 0, func(text []byte) error { return json.Unmarshal(text, &r) }))
			testenv.Must(t, r.putBefore(index, look(t, index).tree))
			r.Set[len(r.Set)-1].Kind = "no such qdisc"
			if err := r.apply(index); !errors.Is(err, unix.ENOENT) {
				t.Errorf("Setup: %v", err)
			}
			if after := shown(t); after != before {
				t.Errorf("before:\n%safter:\n%s", before, after)
			}
		})
	}
}

func TestRestoreAfterReplacement(t *testing.T) {
	for name, c := range map[string]struct {
		queues  int
		command string
	}{
		"root":         {1, "tc qdisc replace dev DEV root pfifo limit 5"},
		"another fq":   {1, "tc qdisc replace dev DEV root handle 1: fq limit 1048576 flow_limit 131072 orphan_mask 262143"},
		"other limits": {1, "tc qdisc replace dev DEV root fq limit 5"},
		"deleted":      {3, "tc qdisc del dev DEV root; tc qdisc add dev DEV root handle 1: mq"},
		"one queue":    {3, "tc qdisc replace dev DEV parent 5ac0:2 sfq"},
	} {
		t.Run(name, func(t *testing.T) {
			byDefault(t, "fq_codel")
			index := device(t, c.queues)
			record := setUp(t, index)
			run(t, c.command)
			before := shown(t)
			if o := restore(t, index, record); o.Restored || !o.Replaced {
				t.Errorf("Restore: %+v", o)
			}
			if after := shown(t); after != before {
				t.Errorf("before %s, after %s", before, after)
			}
		})
	}
}

func TestRestoreWithOtherDefault(t *testing.T) {
	const file = "/proc/sys/net/core/default_qdisc"
	byDefault(t, "fq_codel")
	index := device(t, 1)
	record := setUp(t, index)
	// The file does not exist in a test's namespace.
	testenv.Must(t, exec.Command("nsenter", "-t", "1", "-n", "sh", "-c", "echo pfifo_fast >"+file).Run())
	if o := restore(t, index, record); !o.Restored || !o.Differs || o.Was != "fq_codel" || o.Kind != "pfifo_fast" {
		t.Errorf("%+v", o)
	}
}

func TestSetupKeepsFilters(t *testing.T) {
	byDefault(t, "fq_codel")
	for name, commands := range map[string][]string{
		"by default":  {"filter add dev DEV bpf bytecode '1,6 0 0 0'"},
		"of fq_codel": {"qdisc add dev DEV root handle 9: fq_codel", "filter add dev DEV parent 9: bpf bytecode '1,6 0 0 0'"},
	} {
		t.Run(name, func(t *testing.T) {
			index := device(t, 1, commands...)
			before := shown(t)
			if err := Setup(index, 0, func([]byte) error { return nil }); !errors.Is(err, ErrFixed) {
				t.Errorf("Setup: %v", err)
			}
			if after := shown(t); after != before {
				t.Errorf("before %s, after %s", before, after)
			}
		})
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
	run(t, "ip addr add 10.0.0.1/24 dev DEV; ip neigh add 10.0.0.2 lladdr 02:00:00:00:00:02 dev DEV; tc qdisc add dev DEV root fq limit 7 flow_limit 6 orphan_mask 255")
	later(t, 300*time.Millisecond)
	later(t, 20*time.Second)
	s := look(t, index)
	if s.Waiting != 1 || s.Drops != 1 || s.Limit != 7 || s.FlowLimit != 6 || s.Flows != 256 || s.TellsApart() || s.Horizon != 10*time.Second || !s.HorizonDrop || s.Kind != "fq" {
		t.Errorf("%+v", s)
	}
	if s.Room(7) || !s.Room(6) {
		t.Errorf("room for 7: %v, for 6: %v", s.Room(7), s.Room(6))
	}
	testenv.Must(t, Drain(index, time.Minute))
	if s := look(t, index); s.Waiting != 0 {
		t.Errorf("after Drain: %+v", s)
	}
	later(t, 9*time.Second)
	testenv.Must(t, Drain(index, 10*time.Millisecond))
	if s := look(t, index); s.Waiting != 1 {
		t.Errorf("after a Drain that was too short: %+v", s)
	}
}

// Restore counts packets queued in an fq that it deletes. An fq that only changes its limits keeps them.
func TestLost(t *testing.T) {
	for before, lost := range map[string]uint64{"pfifo": 2, "fq limit 30": 0, "mq": 2} {
		t.Run(before, func(t *testing.T) {
			testenv.NewNetns(t)
			testenv.Veth(t, "d0", "d1")
			index := testenv.Link(t, "d0").Attrs().Index
			run(t, "ip addr add 10.0.0.1/24 dev DEV; ip neigh add 10.0.0.2 lladdr 02:00:00:00:00:02 dev DEV; tc qdisc add dev DEV root handle 9: "+before)
			record := setUp(t, index)
			later(t, 9*time.Second)
			later(t, 9*time.Second)
			if o := restore(t, index, record); !o.Restored || o.Lost != lost {
				t.Errorf("restored with two queued packets: %+v", o)
			}
			if s := look(t, index); s.Waiting != 2-lost {
				t.Errorf("%d packets are queued afterwards", s.Waiting)
			}
		})
	}
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
