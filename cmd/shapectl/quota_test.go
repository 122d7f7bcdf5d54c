package main

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// What is used of a quota is told everywhere: of a rule, of a pool, and of each host that has one.
func TestQuotaIsTold(t *testing.T) {
	r := newRig(t)
	r.ok("set", "quotas", "--new", "--rate", "1gbit", "--quota", "100kb/day", "--then", "drop")
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1gbit", "--quota", "50kb/month", "--then", "8kbit", "--within", "quotas")
	r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "1gbit", "--quota", "50kb/30d", "--then", "drop", "--each", "host")
	r.ok("set", "va", "egress", "10.0.2.0/24", "--pps", "100")
	w := r.events("--kind", "quota")
	for host, packets := range map[string]int{"10.0.0.7": 60, "10.0.1.8": 42, "10.0.1.9": 5} {
		r.send(host, packets, 1000)
	}
	for _, want := range []string{"quota-80 10.0.0.0/24 ", "quota-used-up 10.0.0.0/24 ", "quota-80 10.0.1.0/24 10.0.1.8"} {
		w.tells(0, want, func(e report.Event) bool { return e.Kind+" "+e.Network+" "+e.Key == want && *e.CapacityBytes == 50<<10 })
	}
	w.stops(syscall.SIGTERM)
	if all := w.told(); len(all) != 3 || !strings.Contains(all[1].Sentence, "of 51.2 kB; 8kbit is in force") {
		t.Errorf("told %+v", all)
	}
	r.ok("set", "spent", "--new", "--rate", "1gbit", "--quota", "2kb/month", "--quota-zone", "Asia/Tokyo", "--then", "drop")
	r.ok("set", "va", "egress", "10.0.3.0/24", "--rate", "unlimited", "--within", "spent")
	r.ok("set", "va", "egress", "10.0.4.0/24", "--each", "host", "--rate", "1gbit", "--quota", "10kb/day", "--then", "drop")
	r.send("10.0.3.7", 3, 1000)
	r.send("10.0.4.7", 9, 1000)
	tokyo, err := policy.Zone("Asia/Tokyo").Location()
	testenv.Must(t, err)
	here, err := policy.Zone("").Location()
	testenv.Must(t, err)
	ends := func(in *time.Location) string {
		return policy.Period("month").Begins(time.Now().In(in), 1).Format("2006-01-02 15:04")
	}
	for _, test := range []struct {
		args string
		says []string
	}{
		{"show", []string{"LEFT", "used up: 8kbit", "42.4 kB", "100 pps"}},
		{"show --buckets --sort quota", []string{"10.0.1.8", "42.0 kB", "9.20 kB", "10.0.1.9", "5.00 kB"}},
		{"top --once", []string{"used up: 8kbit"}},
		{"show va egress 10.0.0.0/24", []string{"used up (51.0 kB), so 8kbit is in force; the period ends in"}},
		{"explain va egress 10.0.0.7", []string{"the rule used 0 of 8kbit", "quota used up (51.0 kB), so 8kbit is in force", "quota: 60.0 kB used, 42.4 kB left, then packets are dropped", "up to 33.9kbit, its first second 339kbit"}},
		{"explain va egress 10.0.0.7", []string{"to 10.0.0.7, by va egress: 10.0.0.0/24 has used up its quota of 51.2 kB and gets 8kbit until " + ends(here) + "; a packet"}},
		{"explain va egress 10.0.3.7", []string{"to 10.0.3.7, by va egress: pool spent has used up its quota of 2.05 kB and gets nothing until " + ends(tokyo) + " (Asia/Tokyo); a packet"}},
		{"explain spent", []string{"pool spent has used up its quota of 2.05 kB and gets nothing until " + ends(tokyo) + " (Asia/Tokyo); in the last"}},
		{"explain va egress 10.0.1.8", []string{"42.0 kB used, 9.20 kB left, then packets are dropped; it comes back steadily", "room for 6 such packets (9200 bytes)"}},
		{"explain va egress 10.0.2.8", []string{"room for 64 such packets"}},
	} {
		got := r.ok(strings.Fields(test.args)...)
		for _, want := range test.says {
			if !strings.Contains(bare(got), want) {
				t.Errorf("%s does not say %q:\n%s", test.args, want, got)
			}
		}
	}
	r.ok("set", "va", "egress", "10.0.2.0/24", "--pps", "1", "--pps-burst", "1")
	for host, says := range map[string]string{"10.0.1.8": "and gets nothing until enough of it comes back; a packet of 1514 bytes is dropped now by 10.0.1.0/24, as the quota is used up; it conforms in 19h", "10.0.2.8": "as there are too many packets; it conforms in"} {
		r.send(host, 9, 1000)
		if got := r.ok("explain", "va", "egress", host); !strings.Contains(bare(got), says) {
			t.Errorf("%s: not %q:\n%s", host, says, got)
		}
	}
	buckets := r.show("--buckets", "va", "egress", "10.0.1.0/24")[0].Buckets
	if i := slices.IndexFunc(buckets, func(b live.Bucket) bool { return b.Name == "10.0.1.8" }); i < 0 || *buckets[i].UsedBytes != 51000 || *buckets[i].LeftBytes != 200 {
		t.Errorf("the buckets are %+v", buckets)
	}
	w = r.events("--kind", "quota-restored")
	r.ok("topup", "spent", "all")
	r.ok("topup", "va", "egress", "10.0.4.0/24", "10.0.4.7", "all")
	w.tells(0, "the host", func(e report.Event) bool {
		return e.Network == "10.0.4.0/24" && e.Key == "10.0.4.7" && *e.LevelBytes == 0
	})
	w.tells(0, "the pool", func(e report.Event) bool {
		return e.Sentence == `pool "spent": has more left of its quota again: 0 of 2.05 kB are used; the full rate is in force again`
	})
	w.stops(syscall.SIGTERM)
}

// Who has used up a limit of packets or new flows is the fullest, and no rate is told of where there is none.
func TestPacketsAndFlowsAreTold(t *testing.T) {
	r := newRig(t)
	r.ok(strings.Fields("set strangers --new --pps 1 --pps-burst 1000")...)
	r.ok(strings.Fields("set va egress 10.0.0.0/16 --each /24 --pps 1 --pps-burst 1000 --new-flows 1 --new-flows-burst 100")...)
	r.ok(strings.Fields("set va egress 10.0.1.0/24 --pps 1m --within strangers")...)
	r.send("10.0.1.1", 100, 100)
	r.send("10.0.2.1", 200, 100)
	r.send("10.0.3.1", 1100, 100)
	for i := range 60 {
		r.send(fmt.Sprint("10.0.4.", i), 1, 100)
	}
	for args, want := range map[string]string{
		"show":                       "1 pps, 1 new/s per /24",
		"show --buckets --top 1":     "FULL 10.0.3.0/24 10.0.0.0/16 va egress 0 ",
		"explain va egress 10.0.3.1": "(gcra) speed",
		"explain va egress 10.0.1.1": "decides; in the last 0.5 s, the rule used 0 rule",
		"explain va egress 10.0.1.2": "pool strangers: 1 pps; not full; 0% refused",
	} {
		if got := r.ok(strings.Fields(args)...); !strings.Contains(bare(got), want) {
			t.Errorf("%s does not say %q:\n%s", args, want, got)
		}
	}
	var told []string
	for _, b := range r.show("--buckets", "va", "egress", "10.0.0.0/16")[0].Buckets {
		told = append(told, fmt.Sprint(b.Name, " ", *b.Packets > 100, *b.Flows > 40))
	}
	if !slices.Equal(told, []string{"10.0.3.0/24 true false", "10.0.4.0/24 false true", "10.0.2.0/24 true false"}) {
		t.Errorf("the buckets are %q", told)
	}
}
