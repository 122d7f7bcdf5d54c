package fq

import (
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/shapectl/shapectl/internal/testenv"
)

// device creates a device in a new network namespace, and runs tc commands on it, in
// which DEV is its name.
func device(t *testing.T, queues int, lines ...string) (index int) {
	t.Helper()
	testenv.NewNetns(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.NumTxQueues = "d0", queues
	testenv.AddLink(t, &netlink.Ifb{LinkAttrs: attrs})
	if len(lines) > 0 {
		run(t, "tc -batch - <<'END'\n"+strings.Join(lines, "\n")+"\nEND")
	}
	return testenv.Link(t, "d0").Attrs().Index
}

// run runs a shell command line, in which DEV is the device.
func run(t *testing.T, line string) {
	t.Helper()
	line = strings.ReplaceAll(line, "DEV", "d0")
	if out, err := exec.Command("sh", "-c", line).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", line, err, out)
	}
}

// shown formats the qdiscs of the device in the kernel's order, without counters.
func shown(t *testing.T) string {
	t.Helper()
	all, err := qdiscs(testenv.Link(t, "d0").Attrs().Index)
	testenv.Must(t, err)
	var b strings.Builder
	for _, q := range all {
		fmt.Fprintf(&b, "%s %x parent %x %x\n", q.Kind, q.Handle, q.Parent, q.Options)
	}
	return b.String()
}

func look(t *testing.T, index int) State {
	t.Helper()
	s, err := Look(index)
	testenv.Must(t, err)
	return s
}

func TestDeviceWithoutFQ(t *testing.T) {
	for _, c := range []struct {
		queues  int
		kind    string
		command []string
	}{
		{1, "pfifo_fast", []string{"qdisc add dev DEV root pfifo_fast"}},
		{1, "htb", []string{"qdisc add dev DEV root handle 1: htb default 1", "class add dev DEV parent 1: classid 1:1 htb rate 1mbit",
			"qdisc add dev DEV parent 1:1 pfifo"}},
		{3, "mq of pfifo", []string{"qdisc add dev DEV root handle 1: mq", "qdisc replace dev DEV parent 1:1 pfifo",
			"qdisc replace dev DEV parent 1:2 pfifo", "qdisc replace dev DEV parent 1:3 pfifo"}},
		{1, "pfifo", []string{"qdisc add dev DEV root pfifo", "qdisc add dev DEV clsact"}},
	} {
		t.Run(c.kind, func(t *testing.T) {
			s := look(t, device(t, c.queues, c.command...))
			if s.HasFQ || s.Room(0) || s.Kind != c.kind {
				t.Errorf("%+v", s)
			}
		})
	}
	t.Run("noop", func(t *testing.T) {
		index := device(t, 1)
		testenv.Must(t, netlink.LinkSetDown(testenv.Link(t, "d0")))
		testenv.AddLink(t, &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "d1", TxQLen: -1}, PeerName: "d2"})
		if s := look(t, testenv.Link(t, "d2").Attrs().Index); s.HasFQ || s.Kind != "noop" {
			t.Errorf("a device that was never up: %+v", s)
		}
		if s := look(t, testenv.Link(t, "d1").Attrs().Index); s.HasFQ || s.Kind != "noqueue" {
			t.Errorf("a veth: %+v", s)
		}
		if s := look(t, index+100); s.HasFQ {
			t.Errorf("no device: %+v", s)
		}
	})
}

func TestLimiters(t *testing.T) {
	rate := func(value ...byte) []byte { return nl.NewRtAttr(2, value).Serialize() }
	s := State{all: []qdisc{
		{Kind: "htb"}, {Kind: "tbf"}, {Kind: "tbf"}, {Kind: "fq_codel"}, {Kind: "hfsc"},
		{Kind: "cake", Options: rate(0, 0, 0, 0, 0, 0, 0, 0)},
	}}
	if got := s.Limiters(); !slices.Equal(got, []string{"htb", "tbf", "hfsc"}) {
		t.Errorf("limiters are %q", got)
	}
	s.all[5].Options = rate(0, 1, 0, 0, 0, 0, 0, 0)
	if got := s.Limiters(); !slices.Contains(got, "cake") {
		t.Errorf("cake with a bandwidth is none of %q", got)
	}
}

// Several full buckets can be queued together, even with the shortest packets.
func TestRoom(t *testing.T) {
	for _, c := range []struct{ packets, limit, flowLimit uint32 }{
		{0, 1 << 20, 1 << 17}, {1 << 16, 1 << 20, 1 << 17}, {1<<16 + 1, 1<<20 + 16, 1 << 17}, {1 << 28, 1<<32 - 1, 1 << 28},
	} {
		limit, flowLimit := room(c.packets)
		if limit != c.limit || flowLimit != c.flowLimit {
			t.Errorf("%d packets: limit %d, flow limit %d", c.packets, limit, flowLimit)
		}
		s := State{HasFQ: true, Limit: limit, FlowLimit: flowLimit, Horizon: horizon}
		fewer, fewerOfFlow := s, s
		fewer.Limit--
		fewerOfFlow.FlowLimit--
		if !s.Ready(c.packets) || fewer.Ready(c.packets) || fewerOfFlow.Ready(c.packets) {
			t.Errorf("%d packets: %+v is ready: %v", c.packets, s, s.Ready(c.packets))
		}
	}
}

// Setup replaces no qdisc that somebody has configured.
func TestConfiguredQdiscStays(t *testing.T) {
	if err := look(t, device(t, 1)).Replaceable(); err != nil {
		t.Errorf("the default qdisc is not replaceable: %v", err)
	}
	for name, c := range map[string]struct {
		queues   int
		commands []string
	}{
		"htb":        {1, []string{"qdisc add dev DEV root handle 1: htb"}},
		"pfifo":      {1, []string{"qdisc add dev DEV root pfifo limit 77"}},
		"our handle": {1, []string{"qdisc add dev DEV root handle 5ac0: pfifo"}},
		"mq":         {2, []string{"qdisc add dev DEV root handle 1: mq"}},
		"one queue":  {2, []string{"qdisc add dev DEV root handle 5ac0: mq", "qdisc add dev DEV parent 5ac0:2 pfifo"}},
	} {
		t.Run(name, func(t *testing.T) {
			index := device(t, c.queues, c.commands...)
			before, want := shown(t), ErrConfigured
			if errors.Is(Check(), ErrNoFQ) {
				want = ErrNoFQ
			}
			if err := look(t, index).Replaceable(); !errors.Is(err, ErrConfigured) {
				t.Errorf("it is replaceable: %v", err)
			}
			if _, err := Setup(index, 0); !errors.Is(err, want) {
				t.Errorf("Setup: %v", err)
			}
			if o, err := Remove(index); err != nil || o != (Removal{}) {
				t.Errorf("Remove: %+v, %v", o, err)
			}
			if after := shown(t); after != before {
				t.Errorf("was %s, is %s", before, after)
			}
		})
	}
}

func TestIfbRefused(t *testing.T) {
	testenv.NewNetns(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "shapectl7"
	testenv.AddLink(t, &netlink.Ifb{LinkAttrs: attrs})
	if _, err := MakeIfb(7, "eth0", 0); !errors.Is(err, ErrTaken) || !strings.Contains(err.Error(), "shapectl7") {
		t.Errorf("created despite another device with its name: %v", err)
	}
	if _, err := MakeIfb(10_000_000, "eth0", 0); err == nil {
		t.Error("created with a name that is too long")
	}
	if err := RemoveIfb(7); err != nil {
		t.Error(err)
	}
	testenv.Link(t, "shapectl7") // which is not ours
	_, err := MakeIfb(8, "eth0", 0)
	if lacks := Check(); !errors.Is(err, lacks) {
		t.Errorf("created: %v; fq: %v", err, lacks)
	}
	if ifb, _ := FindIfb(8); (ifb != nil) != (err == nil) {
		t.Errorf("%v, and left over: %+v", err, ifb)
	}
}

func TestReleases(t *testing.T) {
	for release, old := range map[string]bool{"6.1.0-50-cloud-amd64": true, "5.15.0": true, "6.3.9": true, "6.4.0-rc1": false, "6.12.1": false, "10.0": false} {
		if err := checkRelease(release); errors.Is(err, ErrOldIfb) != old {
			t.Errorf("%s: %v", release, err)
		}
	}
}
