package main

import (
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// sendDSCP sends a packet to 10.0.0.7 with a DSCP.
func (r *rig) sendDSCP(dscp uint8, bytes int) {
	r.t.Helper()
	frame := frameTo("10.0.0.7", bytes)
	frame[15] = dscp << 2
	testenv.Must(r.t, testenv.NewSender(r.t, "va").Send(frame))
}

// near reports whether two levels are those of one bucket, which drains by a byte or two in a second.
func near(a, b uint64) bool { return max(a, b)-min(a, b) < 100 }

// What explain says of the next packet is what becomes of it, and show counts it so.
func TestColoursAgreeWithPackets(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.ok(strings.Fields("set vb egress 10.0.0.0/24 --rate 1mbit --algorithm trtcm --pir 2mbit --each host")...) // keeps the programs loaded
	for _, meter := range []string{
		"--algorithm srtcm --ebs 2500", "--algorithm srtcm --ebs 0", "--algorithm trtcm --pir 16kbit --pbs 6500",
		"--algorithm rfc4115 --eir 8kbit --ebs 2500 --red dscp:LE", "--algorithm rfc4115 --eir 8kbit --ebs 0", "--algorithm srtcm --ebs 2500 --colour-aware",
		"--algorithm trtcm --pir 16kbit --pbs 6500 --colour-aware --yellow drop", "--algorithm srtcm --ebs 2500 --overhead 24",
	} {
		for _, each := range []string{"all", "host"} {
			rule := meter + " --each " + each
			r.setSlow("va egress 10.0.0.0/24 --rate 8kbit --capacity 4000 " + rule)
			before := r.show()[0]
			for packet := range 11 {
				dscp := []string{"CS0", "AF12", "AF13"}[packet%3]
				class, err := policy.ParseDSCP(dscp)
				testenv.Must(t, err)
				a := r.explain("va", "egress", "10.0.0.7", "--bytes", "1000", "--dscp", dscp).Hooks[0]
				colour := a.Bucket.Colour
				if a.Conforms != (colour == "green") {
					t.Errorf("%s, packet %d: %+v", rule, packet, a)
				}
				r.sendDSCP(class, 1000)
				after := r.show()[0]
				want := map[string]uint64{colour: 1}
				for other, n := range map[string]uint64{
					"green": after.GreenPackets - before.GreenPackets, "yellow": after.YellowPackets - before.YellowPackets, "red": after.RedPackets - before.RedPackets,
				} {
					if n != want[other] {
						t.Errorf("%s, packet %d, %s: %d are %s, and it was to be %s", rule, packet, dscp, n, other, colour)
					}
				}
				if dropped := after.DroppedPackets > before.DroppedPackets; dropped != (a.Verdict == "drop") {
					t.Errorf("%s, packet %d: %s is expected, and it was dropped: %v", rule, packet, a.Verdict, dropped)
				}
				before = after
			}
			if all := before; all.GreenPackets == 0 || all.RedPackets == 0 || (all.YellowPackets == 0) != strings.Contains(meter, "--ebs 0") {
				t.Errorf("%s: too few colours to test with: %+v", rule, all)
			}
			buckets := r.show("--buckets")[0]
			a := r.explain("va", "egress", "10.0.0.7").Hooks[0].Bucket
			if of := buckets.Buckets; len(of) != 1 || !near(of[0].Bytes, a.LevelBytes) || !near(*of[0].SecondBytes, *a.SecondLevelBytes) {
				t.Errorf("%s: buckets are %+v, and explain says %d and %d", rule, of, a.LevelBytes, *a.SecondLevelBytes)
			}
			if each == "all" && !near(buckets.SecondLevelBytes, *a.SecondLevelBytes) {
				t.Errorf("%s: the shared bucket is at %d, and explain says %d", rule, buckets.SecondLevelBytes, *a.SecondLevelBytes)
			}
			r.ok("delete", "va", "egress", "10.0.0.0/24")
		}
	}
}

// A bucket of which only the second one has a level is told of, too.
func TestSecondBucketAlone(t *testing.T) {
	r := newRig(t)
	r.setSlow("va egress 10.0.0.0/24 --rate 8kbit --capacity 4000 --algorithm rfc4115 --eir 8kbit --ebs 4000 --colour-aware --each host")
	r.sendDSCP(12, 1000) // comes in yellow
	if text := r.ok("show", "--buckets"); !strings.Contains(text, " 0  1.00 kB 25%") {
		t.Error(text)
	}
	if text := r.ok("show", "va", "egress", "10.0.0.0/24"); !strings.Contains(text, "yellow     1.00 kB in 1 packet\n") {
		t.Error(text)
	}
}
