package main

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Rates that no link has are refused wherever one can be said, with what was meant.
func TestRatesThatNobodyMeans(t *testing.T) {
	r := newRig(t)
	trace := r.policy("time_ns,bytes\n0,100\n")
	for rate, says := range map[string]string{"10": "did you mean 10mbit?", "500gbit": "did you mean 500mbit or unlimited?"} {
		file := r.policy("devices: {va: {egress: {10.0.0.0/24: " + rate + "}}}\n")
		shadow := r.policy("devices: {va: {egress: {10.0.0.0/24: {rate: 1mbit, shadow: {rate: " + rate + "}}}}}\n")
		for _, args := range [][]string{
			{"set", "va", "egress", "10.0.0.0/24", "--rate", rate},
			{"set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit", "--shadow", "rate=" + rate},
			{"apply", file}, {"apply", shadow}, {"diff", file},
			{"replay", trace, "--rate", rate},
		} {
			r.refused(exitInput, says, args...)
		}
	}
	if rules := r.show(); len(rules) > 0 {
		t.Errorf("rules: %+v", rules)
	}
}

// Such rates that an older version set are in force, and every command copes with them.
func TestRatesOfOlderVersions(t *testing.T) {
	for _, rate := range []policy.Rate{10, 1_000_000_000_000} {
		t.Run(rate.String(), func(t *testing.T) {
			r := newRig(t)
			n, err := loader.Write(loader.Options{BPFFS: r.bpffs()})
			testenv.Must(t, err)
			dev, err := netinfo.DeviceByName("va")
			testenv.Must(t, err)
			rule := policy.Rule{Prefix: netip.MustParsePrefix("10.0.0.0/24"), Rate: rate, Capacity: 1 << 17}
			_, err = n.Put(dev, policy.Egress, policy.MatchDst, rule)
			testenv.Must(t, err)
			n.Close()

			for _, args := range []string{
				"show", "show --stats", "show --buckets", "show -j", "ask va egress 10.0.0.7", "explain va egress 10.0.0.7", "export -j",
				"set va egress 10.0.1.0/24 --rate 1mbit",
			} {
				if out := r.ok(strings.Fields(args)...); args != "export -j" && out == "" {
					t.Errorf("%s says nothing", args)
				}
			}
			if rules := r.show("va", "egress", "10.0.0.0/24"); len(rules) != 1 || rules[0].Rate != uint64(rate) || !rules[0].Attached {
				t.Errorf("rules: %+v", rules)
			}
			if got := r.run("doctor", "-v", "va"); !strings.Contains(got.out, "va egress") {
				t.Errorf("doctor: %+v", got)
			}
			if got := r.run("diff", r.policy("devices: {}\n")); got.code != exitDiffers || !strings.Contains(got.out, "- 10.0.0.0/24  "+rate.String()) {
				t.Errorf("diff: %+v", got)
			}
			r.refused(exitInput, "va egress 10.0.0.0/24: rate "+rate.String()+" is ", "export")
			r.ok("delete", "va", "egress", "10.0.0.0/24")
			r.ok("flush", "va")
		})
	}
}
