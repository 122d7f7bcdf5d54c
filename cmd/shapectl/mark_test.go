package main

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

// What nftables marks meets the rule for its mark, and frames with a tag that for their VLAN: on the way out, and where they come
// in. All commands read and write both.
func TestMarksOfTraffic(t *testing.T) {
	r := newRig(t)
	r.sh(`echo 0 >/proc/sys/net/ipv6/conf/all/disable_ipv6
		ip address add 10.9.0.1/24 dev va; ip address add fd00:9::1/64 dev va nodad
		ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:01 dev va; ip neighbour add fd00:9::2 lladdr 02:00:00:00:00:01 dev va
		nft 'table inet m { chain out { type filter hook output priority mangle; udp dport 16 meta mark set 0x10; udp dport 17 meta mark set 0x11; }; }'`)
	for _, hook := range []string{"va egress", "vb ingress"} {
		device, direction, _ := strings.Cut(hook, " ")
		r.in("set " + hook + " any --rate 1gbit")
		r.in("set " + hook + " mark:16 --rate 8kbit --capacity 3000 --each host --name marked")
		r.in("set " + hook + " mark:0x11 --rate unlimited")
		r.in("set " + hook + " vlan:12 --rate 1gbit")
		if got := r.ok("explain", device, direction, "mark:0x10"); !strings.Contains(got, "mark:0x10 decides") {
			t.Errorf("explain a mark: %s", got)
		}
		if got := bare(r.ok("explain", device, direction, "10.9.0.2")); !strings.Contains(got, "packets with a mark or VLAN may meet other rules: mark:0x10, mark:0x11, vlan:12") {
			t.Errorf("explain an address: %s", got)
		}
	}
	listens := r.events("mark:0x10")
	send := func(to string) {
		c, err := net.Dial("udp", to)
		testenv.Must(t, err)
		defer c.Close()
		for range 4 {
			_, err = c.Write(make([]byte, 1000))
			testenv.Must(t, err)
		}
	}
	counted := func(hook string) (all []string) {
		for _, rule := range r.show(fields(hook + " --buckets")...) {
			if n := rule.PassedPackets + rule.DroppedPackets; n >= 4 { // the kernel itself sends others
				all = append(all, fmt.Sprintf("%s %d dropped %d buckets", rule.CIDR, rule.DroppedPackets, len(rule.Buckets)))
			}
		}
		slices.Sort(all)
		return all
	}
	for _, to := range []string{"10.9.0.2:16", "[fd00:9::2]:16", "10.9.0.2:17", "10.9.0.2:18"} {
		send(to)
	}
	frame, sender := testenv.Frame(netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("10.9.0.2"), 100), testenv.NewSender(t, "va")
	for priorities := range 4 { // tags without a VLAN before that
		tags := append(bytes.Repeat([]byte{0x81, 0, 0, 0}, priorities), 0x81, 0, 0, 12)
		testenv.Must(t, sender.Send(slices.Insert(slices.Clone(frame), 12, tags...)))
	}
	for hook, want := range map[string]string{
		"va egress":  "[0.0.0.0/0 0 dropped 0 buckets mark:0x10 4 dropped 2 buckets mark:0x11 0 dropped 0 buckets vlan:12 0 dropped 0 buckets]",
		"vb ingress": "[0.0.0.0/0 0 dropped 0 buckets mark:0x10 0 dropped 2 buckets mark:0x11 0 dropped 0 buckets vlan:12 0 dropped 0 buckets]",
	} {
		if got := fmt.Sprint(counted(hook)); got != want {
			t.Errorf("%s: %s, want %s", hook, got, want)
		}
	}
	listens.tells(0, "an event of the mark", func(e report.Event) bool {
		return e.Network == "mark:0x10" && e.Name == "marked" && e.Address == "10.9.0.2"
	})
	r.in("set va egress mark:0x10 --rate 16kbit")
	listens.tells(0, "a change of its rule", func(e report.Event) bool { return e.Kind == report.RulesChanged && e.Network == "mark:0x10" })
	file := t.TempDir() + "/policy.yaml"
	policy := r.ok("export")
	testenv.Must(t, os.WriteFile(file, []byte(policy), 0o600))
	if got := r.ok("diff", file); !strings.Contains(policy, "mark:0x11: unlimited") || !strings.Contains(policy, "vlan:12: 1gbit") || !strings.Contains(got, "nothing to change") {
		t.Errorf("%s: %s", policy, got)
	}
	r.in("delete marked")
	r.in("apply --confirm 1m " + file)
	r.in("rollback")
	if got := r.in("show mark:0x10"); !strings.Contains(got, "no rule for mark:0x10") {
		t.Errorf("after a rollback: %s", got)
	}
}
