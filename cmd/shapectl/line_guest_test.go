//go:build guest

package main

import (
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/fq"
)

const queuedLine = "line va --down 50mbit --up 10mbit"

// qdiscs are what packets leave any device by.
func (r *rig) qdiscs() string {
	return r.sh("tc qdisc show | grep -v 'qdisc clsact' || true; ip -o link | wc -l")
}

// A line sets up fq, and an ifb for downloads where the kernel can; off removes both.
func TestLineSetsUpFQ(t *testing.T) {
	r := newRig(t)
	before := r.qdiscs()
	old := fq.CheckIfb() != nil
	got := r.run(fields(queuedLine)...)
	if got.code != exitDone || !strings.Contains(got.err, "va: its qdisc is now fq instead of noqueue; 'shapectl line va off' brings the default back\n") {
		t.Errorf("exit %d, %s", got.code, got.err)
	}
	if says := strings.Contains(got.err, "va ingress: downloads cannot be queued, so excess packets are marked by ECN or dropped: this kernel drops"); says != old {
		t.Errorf("it says that downloads cannot be queued: %v; %s", says, got.err)
	}
	for direction, queues := range map[string]bool{"egress": true, "ingress": !old} {
		if pool := r.show("--pools", "va "+direction)[0]; (pool.Excess == "delay") != queues {
			t.Errorf("%s: excess %s", direction, pool.Excess)
		}
	}
	if ifbs := r.ifbs(); len(ifbs) == 0 != old {
		t.Errorf("ifb devices: %v", ifbs)
	}
	r.finds("ok", "va egress queue", "delays packets")
	with := r.qdiscs()
	if got := r.run(fields(queuedLine)...); got.code != exitDone || !strings.HasSuffix(got.out, "\nnothing to change\n") {
		t.Errorf("once more: exit %d, %s%s", got.code, got.out, got.err)
	}
	if got := r.run(fields("line va --down 60mbit --up 20mbit")...); got.code != exitDone || !strings.HasSuffix(got.out, "\n2 pools changed\n") {
		t.Errorf("with other rates: exit %d, %s%s", got.code, got.out, got.err)
	}
	if now := r.qdiscs(); now != with {
		t.Errorf("with other rates, the qdiscs were\n%sand are\n%s", with, now)
	}
	r.says(exitDone, "va: its qdisc is the default again: noqueue\n", fields("line va off")...)
	if after := r.qdiscs(); after != before {
		t.Errorf("qdiscs were\n%sand are\n%s", before, after)
	}
	if ifbs, pins := r.ifbs(), r.pins(); ifbs != nil || len(pins) != 0 {
		t.Errorf("left behind: %v, %v", ifbs, pins)
	}
}

// off leaves the fq and the ifb to other rules that delay, and takes them from those that do not.
func TestLineOffBesideOthers(t *testing.T) {
	if fq.CheckIfb() != nil {
		testenv.Skip(t, "this kernel cannot queue packets on ingress")
	}
	r := newRig(t)
	before := r.qdiscs()
	r.run(fields(queuedLine)...)
	with := r.qdiscs()
	const own = "10.9.0.0/24 --rate 10mbit --excess delay"
	r.ok(fields("set va egress " + own)...)
	r.ok(fields("set va ingress " + own)...)
	r.ok(fields("line va off")...)
	if now := r.qdiscs(); now != with || len(r.ifbs()) != 1 {
		t.Errorf("others need fq: qdiscs were\n%sand are\n%s", with, now)
	}
	if rules := r.show(); len(rules) != 2 || !rules[0].Attached || !rules[1].Attached {
		t.Errorf("rules are %+v", rules)
	}
	r.run(fields(queuedLine)...)
	for _, rule := range []string{"va egress", "va ingress"} {
		if got := r.run(fields("set " + rule + " 10.9.0.0/24 --excess drop")...); got.code != exitDone {
			t.Fatalf("exit %d, %s", got.code, got.err)
		}
	}
	r.says(exitDone, "va: its qdisc is the default again: noqueue\n", fields("line va off")...)
	if after := r.qdiscs(); after != before || r.ifbs() != nil {
		t.Errorf("qdiscs were\n%sand are\n%s", before, after)
	}
	if rules := r.show(); len(rules) != 2 || !rules[0].Attached || !rules[1].Attached {
		t.Errorf("rules are %+v", rules)
	}
}

// A line changes no other device, even one whose own rules are not in force as they should be.
func TestLineLeavesOtherDevices(t *testing.T) {
	r := newRig(t)
	testenv.Veth(t, "xa", "xb")
	r.run(fields("set xa egress 10.0.0.0/24 --rate 10mbit --excess delay --setup-fq")...)
	r.sh("tc qdisc replace dev xa root pfifo limit 7")
	before := r.sh("tc qdisc show dev xa")
	for _, line := range []string{queuedLine, queuedLine + " --no-queue", "line va off"} {
		if got := r.run(fields(line)...); got.code != exitDone {
			t.Errorf("%s: exit %d, %s", line, got.code, got.err)
		}
		if now := r.sh("tc qdisc show dev xa"); now != before {
			t.Errorf("%s: xa had %s, and has %s", line, before, now)
		}
	}
	if rules := r.show("xa"); len(rules) != 1 {
		t.Errorf("rules of xa: %+v", rules)
	}
}

// Packets of a line wait, in both directions.
func TestLineQueues(t *testing.T) {
	if fq.CheckIfb() != nil {
		testenv.Skip(t, "this kernel cannot queue packets on ingress")
	}
	r := newRig(t)
	r.addressed()
	r.run(fields("line va --down 200kbit --up 200kbit")...) // slower than any machine sends
	if n := r.entered(8); n != 8 {
		t.Errorf("%d of 8 packets came through", n)
	}
	r.send("10.0.0.7", 8, 1000)
	for _, pool := range []string{"va egress", "va ingress"} {
		if out := r.ok("show", "--pools", pool, "-j"); !strings.Contains(out, `"dropped_packets": 0`) || strings.Contains(out, `"delayed_packets": 0`) {
			t.Errorf("%s: %s", pool, out)
		}
	}
}
