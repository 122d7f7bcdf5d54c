package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

func names(rows []shownRule) string {
	var all []string
	for _, row := range rows {
		if row.Kind == report.KindPool {
			all = append(all, "pool "+row.Name)
		} else {
			all = append(all, fmt.Sprint(row.Device, " ", row.Direction, " ", row.CIDR))
		}
	}
	return strings.Join(all, ", ")
}

// What a pool above refuses is lost to the pool of its sender, and a pool says apart what it refused itself.
func TestShowWhoLoses(t *testing.T) {
	r := newRig(t)
	r.ok("set", "ap", "--new", "--rate", "8kbit", "--capacity", "20000", "--share", "member")
	for _, name := range []string{"flooder", "quiet"} {
		r.ok("set", name, "--new", "--rate", "1gbit", "--within", "ap")
	}
	r.ok("set", "elsewhere", "--new", "--rate", "1gbit")
	r.ok("set", "va", "egress", "10.0.0.7", "--within", "flooder")
	r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "8kbit", "--burst", "2000b", "--within", "flooder")
	r.ok("set", "va", "egress", "10.0.0.8", "--within", "quiet")
	r.send("10.0.0.8", 3, 1000)
	r.send("10.0.1.7", 10, 1000) // the rule itself passes two of them
	r.send("10.0.0.7", 100, 1000)
	dropped := func(args ...string) map[string][3]uint64 {
		of := map[string][3]uint64{}
		for _, row := range r.show(args...) {
			of[row.Name+row.CIDR] = [3]uint64{row.DroppedPackets, row.DroppedBytes, row.RefusedPackets}
		}
		return of
	}
	all := dropped("--tree")
	host := all["10.0.0.7/32"]
	if host[0] < 80 || host[1] != 1000*host[0] || host[2] != 0 || all["10.0.1.0/24"] != [3]uint64{8, 8000, 0} {
		t.Fatalf("the rules: %v", all)
	}
	want := map[string][3]uint64{
		"ap": {host[0] + 8, host[1] + 8000, host[0]}, "flooder": {host[0] + 8, host[1] + 8000, 0}, "quiet": {}, "elsewhere": {},
	}
	for _, args := range [][]string{{"--tree"}, nil, {"--tree", "10.0.0.8"}, {"--pools"}, {"--pools", "flooder"}} {
		for name, of := range dropped(args...) {
			if pool, isPool := want[name]; isPool && of != pool {
				t.Errorf("%s: packets and bytes dropped, and packets refused by %s: %v, want %v", args, name, of, pool)
			}
		}
	}
	if got := r.ok("show", "--pools", "flooder"); !strings.Contains(got, "  dropped    ") {
		t.Errorf("show --pools says\n%s", got)
	}
	rows := r.show("ap", "--interval", "20ms")
	if rows[0].DroppedPercent != nil || rows[0].RefusedPercent != nil {
		t.Errorf("without packets: %+v", rows[0])
	}
}

// What passed is divided into what the guarantee covered and what was borrowed.
func TestShowBorrowed(t *testing.T) {
	r := newRig(t)
	r.ok("set", "uplink", "--new", "--rate", "100mbit")
	r.ok("set", "va", "egress", "10.0.0.7", "--rate", "50mbit", "--within", "uplink", "--guarantee", "8kbit")
	r.send("10.0.0.7", 100, 1000)
	rows := r.show()
	uplink, rule := rows[0], rows[1]
	if uplink.PassedPackets != 100 || uplink.BorrowedPackets != 0 || uplink.GuaranteedPackets != 0 {
		t.Errorf("the pool: %+v", uplink)
	}
	if rule.GuaranteedBytes < 30e3 || rule.GuaranteedBytes > 34e3 || rule.BorrowedBytes != rule.PassedBytes-rule.GuaranteedBytes {
		t.Errorf("of %d bytes, %d were guaranteed and %d borrowed", rule.PassedBytes, rule.GuaranteedBytes, rule.BorrowedBytes)
	}
	rows = r.show("--interval", "20ms")
	if rows[1].BorrowedBits == nil || *rows[1].BorrowedBits != 0 {
		t.Errorf("borrowed without packets: %v", rows[1].BorrowedBits)
	}
}

// asked is the only hook that is explained, without a count of packets.
func (r *rig) asked(args string) report.Stop {
	r.t.Helper()
	return r.explain(append([]string{"--interval", "10ms"}, strings.Fields(args)...)...).Hooks[0]
}

func TestExplainPools(t *testing.T) {
	r := newRig(t)
	r.ok("set", "uplink", "--new", "--rate", "8kbit", "--capacity", "60000")
	r.ok("set", "ap-1", "--new", "--rate", "8kbit", "--capacity", "4000", "--within", "uplink")
	r.ok("set", "uplink", "--share", "member") // the store grows: setSlow needs room for more labels
	r.setSlow("va egress 10.0.0.7 --rate 8kbit --within ap-1 --guarantee 8kbit", "va egress 2001:db8:7::/48 --within ap-1")
	r.send("10.0.0.7", 4, 1000)
	if a := r.asked("va egress 10.0.0.7"); !a.Conforms || a.Verdict != "pass" || a.GuaranteedBy == nil || *a.GuaranteedBy != "10.0.0.7/32" || a.RefusedBy != nil || a.WaitNS != 0 {
		t.Errorf("what is guaranteed: %+v", a)
	}
	a := r.asked("va egress 2001:db8:7::1 --bytes 1000")
	if a.Conforms || a.Verdict != "drop" || a.GuaranteedBy != nil || len(a.BorrowedBy) > 0 || a.RefusedBy == nil ||
		*a.RefusedBy != "ap-1" || a.RefusedReason != report.Capacity || a.Bucket != nil || *a.DecidedBy != "ap-1" || *a.CapacityBytes != 4000 {
		t.Errorf("what a pool has no room for: %+v", a)
	}
	if second := uint64(1e9); a.WaitNS < 900*second || a.WaitNS > 1000*second {
		t.Errorf("it would conform in %d ns", a.WaitNS)
	}
	ap, uplink := a.Pools[0], a.Pools[1]
	if ap.Name != "ap-1" || ap.Within != "uplink" || ap.Conforms || ap.LevelBytes < 3900 || ap.CapacityBytes != 4000 || ap.PassedPackets != 4 || ap.RefusedPackets != 0 {
		t.Errorf("the pool: %+v", ap)
	}
	if uplink.Name != "uplink" || !uplink.Conforms || uplink.Share != "member" || uplink.Sharer != "ap-1" || uplink.WithinShare == nil || !*uplink.WithinShare {
		t.Errorf("the pool above: %+v", uplink)
	}
}

// explain watches packets for a while, and finds the pool that refuses them.
func TestExplainWatches(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.ok("set", "ap", "--new", "--rate", "10gbit", "--share", "member")
	r.ok("set", "home", "--new", "--rate", "8kbit", "--capacity", "2000", "--within", "ap")
	r.ok("set", "va", "egress", "10.0.0.7", "--within", "home")
	sender := testenv.NewSender(t, "va")
	frame := frameTo("10.0.0.7", 1000)
	stop, stopped := make(chan bool), make(chan error)
	go func() {
		for {
			select {
			case <-stop:
				close(stopped)
				return
			default:
				if err := sender.Send(frame); err != nil {
					stopped <- err
					return
				}
			}
		}
	}()
	var paths []report.Path
	testenv.Must(t, json.Unmarshal([]byte(r.ok("explain", "va", "egress", "10.0.0.7", "-j")), &paths))
	text := bare(r.ok("explain", "va", "egress", "10.0.0.7"))
	close(stop)
	testenv.Must(t, <-stopped)
	hook := paths[0].Hooks[0]
	if hook.LimitedBy == nil || *hook.LimitedBy != "home" || hook.RecentDrops == 0 || hook.RecentDrops > hook.RecentPackets || hook.WatchedNS < 5e8 ||
		hook.Pools[0].RecentRefusals == 0 || hook.Pools[1].RecentRefusals != 0 {
		t.Errorf("%+v", hook.Passage)
	}
	if !strings.Contains(text, "matches, and pool home decides; in the last ") || !strings.Contains(text, " home: 8kbit; full") {
		t.Errorf("it says %s", text)
	}
}

// Of a chain of pools, the one that is full is named, with the wait for room there.
func TestExplainPoolInTheMiddle(t *testing.T) {
	r := newRig(t)
	r.ok("set", "uplink", "--new", "--rate", "8kbit", "--capacity", "60000")
	r.ok("set", "ap-1", "--new", "--rate", "8kbit", "--capacity", "4000", "--within", "uplink")
	r.ok("set", "home-7", "--new", "--rate", "16kbit", "--capacity", "60000", "--within", "ap-1")
	r.setSlow("va egress 10.0.0.7 --within home-7")
	r.send("10.0.0.7", 4, 1000)
	a := r.asked("va egress 10.0.0.7 --bytes 1500")
	home, ap, uplink := a.Pools[0], a.Pools[1], a.Pools[2]
	if a.RefusedBy == nil || *a.RefusedBy != "ap-1" || a.RefusedReason != report.Capacity || home.Full || !home.Conforms || !ap.Full || ap.Conforms || uplink.Full || !uplink.Conforms {
		t.Errorf("%+v", a)
	}
	// At 1 B/s, 1500 of 4000 bytes are free after some 1500 s.
	if second := uint64(1e9); ap.WaitNS < 1400*second || ap.WaitNS > 1500*second || a.WaitNS != ap.WaitNS || home.WaitNS+uplink.WaitNS != 0 {
		t.Errorf("the packet waits %d ns, and %d, %d and %d for room", a.WaitNS, home.WaitNS, ap.WaitNS, uplink.WaitNS)
	}
	text := bare(r.ok("explain", "va", "egress", "10.0.0.7", "--bytes", "1500", "--interval", "10ms"))
	if !strings.HasPrefix(text, "to 10.0.0.7, by va egress: a packet of 1500 bytes is dropped now by pool ap-1; it conforms in ") || !strings.Contains(text, " ap-1: 8bit; full") {
		t.Error(text)
	}
}
