//go:build guest

package main

import (
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

// A path's delay is found to 5 %, while the rule limits and while it does not.
func TestRTTOfPath(t *testing.T) {
	for _, delay := range []time.Duration{20 * time.Millisecond, 200 * time.Millisecond} {
		t.Run(delay.String(), func(t *testing.T) {
			r := newTCPRig(t)
			r.sh("ip netns exec " + r.thereName + " tc qdisc add dev vb root netem delay " + delay.String())
			r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1gbit")
			r.upload()
			is := func(got report.RTTPart) {
				t.Helper()
				if got.Receiver.Samples == 0 {
					t.Fatalf("no samples: %+v", got)
				}
				for _, ns := range []uint64{*got.Receiver.MinNS, *got.Receiver.P50NS} {
					if measured := time.Duration(ns); (measured - delay).Abs() > delay/20 {
						t.Errorf("measured %v, want %v", measured, delay)
					}
				}
				t.Logf("%d samples: %v to %v, median %v", got.Receiver.Samples, time.Duration(*got.Receiver.MinNS),
					time.Duration(*got.Receiver.MaxNS), time.Duration(*got.Receiver.P50NS))
			}
			free := r.rtt("--interval", "4s").Rules[0]
			if free.Limited.PayloadPackets > 0 {
				t.Errorf("limited by 1gbit: %+v", free.Limited)
			}
			is(free.NotLimited)
			r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "4mbit", "--capacity", "100kb")
			testenv.Eventually(t, "drops", func() bool { return r.show()[0].DroppedPackets > 0 })
			is(r.rtt("--interval", "6s").Rules[0].Limited)
		})
	}
}

// The wait in the queue of a rule is part of the round trip, and while packets wait the rule limits their host.
func TestRTTOfQueue(t *testing.T) {
	r := newTCPRig(t)
	r.run(fields("set va egress 10.0.0.0/24 --each host --rate 4mbit --algorithm leaky --capacity 60ms --excess delay --setup-fq")...)
	r.upload()
	var got report.RTTs
	testenv.Eventually(t, "round trips while packets wait", func() bool {
		got = r.rtt("--interval", "2s")
		return len(got.Rules) == 1 && got.Rules[0].Limited.Receiver.Samples > 10
	})
	if p50 := time.Duration(*got.Rules[0].Limited.Receiver.P50NS); p50 < 20*time.Millisecond || p50 > 70*time.Millisecond {
		t.Errorf("the median is %v, and the queue is 60ms long", p50)
	}
	if free := got.Rules[0].NotLimited; free.PayloadPackets > got.Rules[0].Limited.PayloadPackets/10 {
		t.Errorf("the rule does not limit: %+v", got.Rules[0])
	}
}

// Linux before 6.6 cannot run the programs.
func TestRTTRefused(t *testing.T) {
	if !testenv.OlderThan(t, 6, 6) {
		t.Skip("this kernel has tcx")
	}
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "20mbit")
	r.refused(exitMissing, "this kernel has no tcx; Linux has it from 6.6 on", "top", "--rtt", "--once", "--interval", "20ms")
}
