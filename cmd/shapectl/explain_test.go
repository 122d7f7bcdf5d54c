package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// What depends on when and where a test runs: the numbers of programs, levels, and times.
var passing = []struct{ pattern, with string }{
	{`id [0-9]+`, "id …"},
	{`program [0-9]+`, "program …"},
	{`[0-9]+ of ([0-9]+ bytes) \([0-9.<]+% full\)`, "… of $1 (… full)"},
	{`[0-9.<]+% full`, "…% full"},
	{`last [0-9.]+ s,`, "last … s,"},
	{`(empty in|conforms in|room in|another) [0-9][0-9a-z.]*`, "$1 …"},
}

// folded are texts with such numbers, whose lines would end elsewhere with others.
var folded = regexp.MustCompile(`(?m)^((?:to|from|of) .*|  (?:bucket|queue|path|pool) .*)\n(?: {13}| {4}\b)`)

// explained is what a terminal would show of explanations.
func (r *rig) explained(lines ...string) string {
	r.t.Helper()
	text := r.transcript(lines...)
	for before := ""; text != before; {
		before, text = text, folded.ReplaceAllString(text, "$1 ")
	}
	for _, p := range passing {
		text = regexp.MustCompile(p.pattern).ReplaceAllString(text, p.with)
	}
	return text
}

func (r *rig) setRules(lines ...string) {
	r.t.Helper()
	for _, line := range lines {
		r.ok(append([]string{"set"}, strings.Fields(line)...)...)
	}
}

// setSlow is setRules for va's egress, a thousand times slower, as are all pools: so slow that no rule can be, as
// buckets are not to drain while a test looks at them.
func (r *rig) setSlow(lines ...string) {
	r.t.Helper()
	r.setRules(lines...)
	n, err := loader.Write(loader.Options{BPFFS: r.bpffs()})
	testenv.Must(r.t, err)
	defer n.Close()
	h, err := n.Find("va", policy.Egress)
	testenv.Must(r.t, err)
	defer h.Close()
	for _, set := range []*maps.Set{h.Set.Store.Pools(), h.Set} {
		for _, rule := range set.Policy() {
			_, err := set.Put(slow(rule))
			testenv.Must(r.t, err)
		}
	}
}

func slow(rule policy.Rule) policy.Rule {
	if rule.Rate != policy.Unlimited {
		rule.Rate /= 1000
	}
	rule.Guarantee /= 1000
	rule.Colours.PIR /= 1000
	rule.Colours.EIR /= 1000
	if rule.ECNAbove < policy.ECNAbove(policy.MaxWait) { // else it is never
		rule.ECNAbove *= 1000
	}
	return rule
}

// address gives va an address, and with it a route.
func (r *rig) address(cidr string) {
	r.t.Helper()
	testenv.Must(r.t, address("va", cidr))
}

// router gives va the network 10.0.0.0/24, and makes a device wan, by which all others leave.
func (r *rig) router() {
	r.t.Helper()
	r.address("10.0.0.1/24")
	testenv.Veth(r.t, "wan", "isp")
	testenv.Must(r.t, address("wan", "198.51.100.2/24"))
	testenv.Must(r.t, netlink.RouteAdd(&netlink.Route{Gw: net.IPv4(198, 51, 100, 1)}))
}

// attachFirst attaches a program of somebody else's to va's egress, ahead of all others.
func (r *rig) attachFirst(name string) { r.attach(name, ebpf.AttachTCXEgress, link.Head()) }

func (r *rig) attach(name string, to ebpf.AttachType, where link.Anchor) {
	r.t.Helper()
	l, err := link.AttachTCX(link.TCXOptions{
		Interface: testenv.Link(r.t, "va").Attrs().Index, Program: foreignProgram(r.t, name), Attach: to, Anchor: where,
	})
	testenv.Must(r.t, err)
	r.t.Cleanup(func() { l.Close() })
}

func TestExplain(t *testing.T) {
	t.Parallel()
	for name, show := range map[string]func(r *rig) string{
		"none": func(r *rig) string {
			before := r.explained("explain va egress 10.0.0.7", "explain va 10.0.0.7")
			r.setRules("va egress 10.0.1.0/24 --rate 1mbit")
			return before + r.explained("explain va egress 10.0.0.7")
		},
		"wider": func(r *rig) string {
			r.setRules("va egress 0.0.0.0/0 --rate 1gbit --each /24", "va egress 10.0.0.0/8 --rate 100mbit",
				"va egress 10.0.0.0/24 --rate 10mbit --each host --capacity 100ms", "va egress 10.0.0.9 --rate unlimited",
				"va egress 10.0.1.0/24 --rate 1mbit")
			return r.explained("explain va egress 10.0.0.7", "explain va egress 10.0.0.9", "explain va egress 10.1.0.7")
		},
		"full": func(r *rig) string {
			r.setSlow("va egress 10.0.0.0/24 --rate 8kbit --capacity 4000", "va egress 10.0.1.0/24 --rate 8kbit --capacity 4000 --excess ecn",
				"va egress 10.0.2.0/24 --rate 8kbit --capacity 4000 --excess pass", "va egress 10.0.3.0/24 --rate 8kbit --capacity 4000 --algorithm leaky --penalty fill")
			for _, to := range []string{"10.0.0.7", "10.0.1.7", "10.0.2.7", "10.0.3.7"} {
				r.send(to, 5, 1000)
			}
			return r.explained("explain va egress 10.0.0.7", "explain va egress 10.0.0.7 --bytes 5000", "explain va egress 10.0.1.7",
				"explain va egress 10.0.1.7 --bytes 6000", "explain va egress 10.0.2.7", "explain va egress 10.0.3.7")
		},
		"queue": func(r *rig) string {
			// As slow as a queue can be that holds a full packet.
			r.setUnheldSlow("va egress 10.0.0.0/24 --rate 1.6mbit --capacity 1800 --algorithm leaky --excess delay")
			r.setUnheld("va egress 10.0.1.0/24 --rate 1gbit --capacity 30000 --excess delay --queue 60000 --ecn-above never")
			before := r.explained("explain va egress 10.0.0.7", "explain va egress 10.0.1.7")
			r.send("10.0.0.7", 2, 850)
			return before + r.explained("explain va egress 10.0.0.7")
		},
		"pools": func(r *rig) string {
			r.ok("set", "uplink", "--new", "--rate", "16kbit", "--capacity", "8000")
			r.ok("set", "ap-1", "--new", "--rate", "8kbit", "--capacity", "4000", "--within", "uplink")
			r.ok("set", "home", "--new", "--rate", "8kbit", "--capacity", "60000", "--share", "host")
			r.setSlow("va egress 10.0.0.7 --rate 8kbit --capacity 5000 --within ap-1 --guarantee 8kbit", "va egress 10.0.0.8 --within ap-1",
				"va egress 10.0.1.0/24 --within home", "va egress 10.0.2.0/24 --rate 8kbit --capacity 60000 --share host")
			text := r.explained("explain va egress 10.0.0.8")
			r.send("10.0.0.7", 1, 1000)
			r.send("10.0.0.8", 5, 1000)
			text += r.explained("explain va egress 10.0.0.7", "explain va egress 10.0.0.8")
			r.send("10.0.1.7", 6, 1000)
			r.send("10.0.2.7", 6, 1000)
			return text + r.explained("explain va egress 10.0.1.7 --bytes 1000", "explain va egress 10.0.1.8",
				"explain va egress 10.0.2.7 --bytes 1000")
		},
		"ifb": func(r *rig) string {
			const index = 77 // it is told, as it is part of the ifb's name
			testenv.Must(r.t, netlink.LinkDel(testenv.Link(r.t, "va")))
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.Index = "va", index
			testenv.AddLink(r.t, &netlink.Veth{LinkAttrs: attrs, PeerName: "vb"})
			r.setUnheld("va ingress 10.0.0.0/24 --rate 1gbit --capacity 60000 --algorithm leaky --excess delay")
			r.setRules("va ingress 10.0.1.0/24 --rate 1mbit")
			r.attach("behind", ebpf.AttachTCXIngress, link.Tail())
			before := r.explained("explain va ingress 10.0.0.7")
			attrs.Name, attrs.Index = fmt.Sprintf("shapectl%d", index), fq.IfbIndex(index)
			// As the kernel may have no fq, it has another qdisc.
			ifb := &netlink.Ifb{LinkAttrs: attrs}
			testenv.Must(r.t, netlink.LinkAdd(ifb))
			testenv.Must(r.t, netlink.QdiscReplace(&netlink.GenericQdisc{
				QdiscAttrs: netlink.QdiscAttrs{LinkIndex: attrs.Index, Parent: netlink.HANDLE_ROOT}, QdiscType: "pfifo",
			}))
			before += r.explained("explain va ingress 10.0.0.7")
			testenv.Must(r.t, netlink.LinkSetUp(ifb))
			return before + r.explained("explain va ingress 10.0.0.7", "explain va ingress 10.0.1.7")
		},
		"penalty": func(r *rig) string {
			r.setRules("va egress 10.0.0.0/24 --rate 8kbit --capacity 3000 --algorithm leaky --penalty 3600s")
			r.send("10.0.0.7", 4, 1000)
			return r.explained("explain va egress 10.0.0.7")
		},
		"bytes": func(r *rig) string {
			r.setRules("va egress 10.0.0.0/24 --rate 1gbit --capacity 100000 --overhead 24 --mpu 84")
			return r.explained("explain va egress 10.0.0.7", "explain va egress 10.0.0.7 --bytes 42",
				"explain va egress 10.0.0.7 --bytes 9000")
		},
		"flow": func(r *rig) string {
			r.setRules("va egress 10.0.0.0/24 --rate 1mbit --each flow", "va ingress 10.0.0.0/24 --rate 1mbit --each flow --match dst",
				"vb ingress 2001:db8::/32 --rate 1mbit --each flow")
			return r.explained("explain va egress 10.0.0.7", "explain va egress 10.0.0.7 --flow udp,192.0.2.1:5000,10.0.0.7:53",
				"explain va ingress 10.0.0.7", "explain vb ingress 2001:db8::7", "explain vb 192.0.2.1 --flow udp,192.0.2.1:5000,10.0.0.7:53")
		},
		"foreign": func(r *rig) string {
			r.setRules("va egress 10.0.0.0/24 --rate 1mbit", "va ingress 10.0.0.0/24 --rate 1mbit")
			r.attachFirst("shapectl") // as of another bpffs
			r.attachFirst("foreign")
			xdp, err := ebpf.NewProgram(&ebpf.ProgramSpec{
				Name: "early", Type: ebpf.XDP, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2 /* XDP_PASS */), asm.Return()},
			})
			testenv.Must(r.t, err)
			defer xdp.Close()
			l, err := link.AttachXDP(link.XDPOptions{
				Program: xdp, Interface: testenv.Link(r.t, "va").Attrs().Index, Flags: link.XDPGenericMode,
			})
			testenv.Must(r.t, err)
			defer l.Close()
			return r.explained("explain va egress 10.0.0.7", "explain va ingress 10.0.0.7")
		},
		"clsact": func(r *rig) string {
			r.env["SHAPECTL_HOOK"] = "clsact"
			r.setRules("va egress 10.0.0.0/24 --rate 1mbit", "va egress 10.0.1.0/24 --rate 1mbit --algorithm leaky")
			r.attachFirst("foreign")
			before := r.explained("explain va egress 10.0.0.7", "explain va egress 10.0.1.7")
			qdiscs, err := netlink.QdiscList(testenv.Link(r.t, "va"))
			testenv.Must(r.t, err)
			for _, q := range qdiscs {
				if q.Type() == "clsact" {
					testenv.Must(r.t, netlink.QdiscDel(q))
				}
			}
			return before + r.explained("explain va egress 10.0.0.7")
		},
		"ipv6": func(r *rig) string {
			r.setRules("va ingress 2001:db8::/32 --rate 50mbit --each /64", "va ingress ::/0 --rate 1gbit", "va ingress 0.0.0.0/0 --rate 1mbit")
			return r.explained("explain va ingress 2001:db8:0:5::7")
		},
		"routes": func(r *rig) string {
			r.address("10.0.0.1/24")
			testenv.Must(r.t, netlink.LinkSetUp(testenv.Link(r.t, "lo")))
			_, all, _ := net.ParseCIDR("192.0.2.0/24")
			testenv.Must(r.t, netlink.RouteAdd(&netlink.Route{Dst: all, Gw: net.IPv4(10, 0, 0, 254)}))
			r.setRules("va egress 10.0.0.0/24 --rate 1mbit", "va ingress 10.0.0.0/24 --rate 2mbit", "vb ingress 10.0.0.0/24 --match dst --rate 3mbit",
				"vb egress 10.0.0.0/24 --match src --rate unlimited", "lo egress 10.0.0.0/8 --rate 1gbit")
			return r.explained("explain 10.0.0.7", "explain 10.0.0.1", "explain 192.0.2.7", "explain 198.51.100.7",
				"explain --flow udp,10.0.0.1:5000,10.0.0.7:53", "explain --flow udp,192.0.2.7:5000,10.0.0.7:53",
				"explain 10.0.0.1 --flow udp,10.0.0.7:5000,10.0.0.1:53", "explain --flow udp,10.0.0.1:5000,10.0.0.1:53",
				"explain --flow udp,10.0.0.1:5000,198.51.100.7:53")
		},
		"side": func(r *rig) string {
			r.address("10.0.0.1/24")
			r.setRules("va egress 192.0.2.0/24 --match src --rate 1mbit", "va ingress 10.0.0.7 --match dst --rate 1mbit")
			return r.explained("explain 10.0.0.7", "explain 192.0.2.7", "explain --flow udp,192.0.2.7:5000,10.0.0.7:53")
		},
		"match": func(r *rig) string {
			r.router()
			r.setRules("va ingress 10.0.0.0/24 --match dst --rate 1mbit", "wan ingress 10.0.0.0/24 --match dst --rate 2mbit", "wan egress 10.0.0.7 --rate 3mbit")
			return r.explained("explain va 10.0.0.7", "explain 10.0.0.7", "explain wan ingress 10.0.0.7")
		},
		"any": func(r *rig) string {
			r.router()
			r.setRules("va ingress any --match dst --rate 1mbit", "wan egress any --match src --rate 1mbit --each host")
			return r.explained("explain 10.0.0.7", "explain 192.0.2.7")
		},
		"others": func(r *rig) string {
			r.router()
			testenv.Veth(r.t, "tap0", "tap1")
			r.setRules("tap0 egress any --rate 1mbit", "tap0 ingress any --rate 1mbit", "tap1 egress 10.0.0.0/8 --rate 2mbit", "lo egress 10.0.0.7 --rate 3mbit",
				"va egress 10.0.0.0/24 --rate 4mbit", "wan egress 10.0.0.0/24 --rate 5mbit", "wan ingress any --match dst --rate 6mbit")
			before := r.explained("explain 10.0.0.7")
			testenv.Must(r.t, netlink.LinkDel(testenv.Link(r.t, "tap0")))
			return before + r.explained("explain 10.0.0.7")
		},
		"outside": func(r *rig) string {
			r.router()
			r.setRules("wan egress any --rate 3mbit", "wan ingress 0.0.0.0/0 --rate 4mbit")
			return r.explained("explain 10.0.0.7", "explain 192.0.2.7")
		},
		"twice": func(r *rig) string {
			r.router()
			r.ok("set", "uplink", "--new", "--rate", "1gbit")
			r.ok("set", "home", "--new", "--rate", "1mbit", "--within", "uplink")
			r.setRules("va egress 10.0.0.0/24 --within home", "wan ingress any --within uplink")
			return r.explained("explain 10.0.0.7", "explain --flow udp,192.0.2.7:53,10.0.0.7:5000")
		},
		"name": func(r *rig) string {
			r.router()
			r.ok("apply", r.policy(`devices:
  va:
    egress:
      10.0.0.0/24: {rate: 1mbit, each: host, name: lan}
      10.0.0.2: {rate: 2mbit, name: printer}
      2001:db8::/64: {rate: 1mbit, name: lan}
  wan:
    egress: {any: {rate: 3mbit, name: line}}
    ingress: {any: {rate: 4mbit, name: line}}
`))
			return r.explained("explain lan", "explain printer", "explain line", "explain va lan")
		},
		"limiter": func(r *rig) string {
			r.router()
			r.setRules("va egress 10.0.0.0/24 --rate 1mbit")
			for _, device := range []string{"va", "wan"} {
				testenv.Must(r.t, netlink.QdiscReplace(&netlink.Tbf{
					QdiscAttrs: netlink.QdiscAttrs{LinkIndex: testenv.Link(r.t, device).Attrs().Index, Parent: netlink.HANDLE_ROOT},
					Rate:       1_000_000, Limit: 1 << 20, Buffer: 1 << 20,
				}))
			}
			return r.explained("explain va egress 10.0.0.7", "explain wan egress 10.0.0.7")
		},
		"gone": func(r *rig) string {
			r.setRules("va egress 10.0.0.0/24 --rate 1mbit")
			testenv.Must(r.t, netlink.LinkDel(testenv.Link(r.t, "va")))
			return r.explained("explain va egress 10.0.0.7", "explain 10.0.0.7", "explain va egress 192.0.2.7")
		},
	} {
		t.Run(name, func(t *testing.T) {
			golden(t, "explain-"+name+".golden", show(newRig(t)))
		})
	}
}

// Where packets pass several devices, each that has rules is explained, in order; others that
// they may pass are named.
func TestExplainStacked(t *testing.T) {
	r := newRig(t)
	testenv.Veth(t, "vc", "vd")
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "br"
	testenv.AddLink(t, &netlink.Bridge{LinkAttrs: attrs})
	for _, port := range []string{"va", "vc"} {
		testenv.Must(t, netlink.LinkSetMaster(testenv.Link(t, port), testenv.Link(t, "br")))
	}
	testenv.Must(t, address("br", "10.0.0.1/24"))
	attrs.Name = "tun"
	testenv.AddLink(t, &netlink.Vxlan{LinkAttrs: attrs, VxlanId: 5, Group: net.IPv4(10, 0, 0, 9), Port: 4789})
	testenv.Must(t, address("tun", "192.0.2.1/24"))
	for _, device := range []string{"br", "va", "vc"} {
		r.setRules(device+" egress 10.0.0.0/24 --rate 1mbit", device+" ingress 10.0.0.0/24 --rate 1mbit")
	}
	golden(t, "explain-stacked.golden", r.explained("explain 10.0.0.7", "explain 192.0.2.7"))
	testenv.Must(t, netlink.LinkSetNoMaster(testenv.Link(t, "vc")))
	golden(t, "explain-port.golden", r.explained("explain 10.0.0.7"))
}

// By which device a packet is forwarded may depend on where it comes from.
func TestExplainForwarded(t *testing.T) {
	r := newRig(t)
	r.address("10.0.0.1/24")
	testenv.Must(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	_, far, _ := net.ParseCIDR("192.0.2.0/24")
	testenv.Must(t, netlink.RouteAdd(&netlink.Route{Dst: far, Gw: net.IPv4(10, 0, 0, 254)}))
	rule := netlink.NewRule()
	rule.Src, rule.Table = &net.IPNet{IP: net.IPv4(10, 0, 0, 7), Mask: net.CIDRMask(32, 32)}, 77
	testenv.Must(t, netlink.RuleAdd(rule))
	testenv.Must(t, netlink.RouteAdd(&netlink.Route{
		Dst: far, LinkIndex: testenv.Link(t, "vb").Attrs().Index, Table: 77, Scope: unix.RT_SCOPE_LINK,
	}))
	flow := []string{"va", "egress", "--flow", "tcp,10.0.0.8:40000,192.0.2.1:443"}
	if path := r.explain(flow...); path.Hooks[0].Device != "va" || path.Hooks[0].Direction != "egress" {
		t.Errorf("on va egress they %s", path.How)
	}
	for from, want := range map[string]string{"10.0.0.7": "vb", "10.0.0.8": "va"} {
		path := r.explain("--flow", "tcp,"+from+":40000,192.0.2.1:443")
		last := path.Hooks[len(path.Hooks)-1]
		if last.Device != want || last.Direction != "egress" {
			t.Errorf("from %s they %s, want by %s", from, path.How, want)
		}
	}
}

// explain is the only path that is explained.
func (r *rig) explain(args ...string) report.Path {
	r.t.Helper()
	var paths []report.Path
	out := r.ok(append([]string{"explain", "-j"}, args...)...)
	if err := json.Unmarshal([]byte(out), &paths); err != nil || len(paths) != 1 {
		r.t.Fatalf("explain %v: %v in\n%s", args, err, out)
	}
	return paths[0]
}

// A question leaves every counter and every word of every bucket as it was.
func TestExplainChangesNothing(t *testing.T) {
	r := newRig(t)
	r.address("10.0.0.1/24")
	r.setRules("va egress 10.0.0.0/24 --rate 8kbit --capacity 5000", "va egress 10.0.1.0/24 --rate 8kbit --capacity 5000 --each host",
		"va egress 10.0.2.0/24 --rate 8kbit --capacity 5000 --algorithm leaky --each flow --penalty 30s")
	for _, to := range []string{"10.0.0.7", "10.0.1.7", "10.0.2.7"} {
		r.send(to, 8, 1000)
	}
	before := r.state()
	for _, args := range []string{
		"10.0.0.7", "va 10.0.0.7 --bytes 9000", "va egress 10.0.1.7", "va egress 10.0.1.8 --bytes 64", "va egress 192.0.2.9",
		"va egress 10.0.2.7 --flow udp,192.0.2.1:5000,10.0.2.7:53", "va egress 10.0.2.8 --flow udp,192.0.2.1:5000,10.0.2.8:53",
	} {
		r.ok(append([]string{"explain"}, strings.Fields(args)...)...)
	}
	if after := r.state(); !bytes.Equal(before, after) {
		t.Error("counters or buckets are not what they were")
	}
}

// The answer agrees with what the next packet meets, and what it counts is what is counted.
func TestExplainAgreesWithPackets(t *testing.T) {
	for _, each := range []string{"all", "host", "flow"} {
		r := newRig(t)
		r.setSlow("va egress 10.0.0.0/24 --rate 8kbit --capacity 5000 --overhead 24 --mpu 200 --each " + each)
		for packet := range 12 {
			size := []int{900, 60}[packet%2]
			before := r.show()[0]
			a := r.explain("va", "egress", "10.0.0.7", "--bytes", fmt.Sprint(size), "--flow", "udp,192.0.2.1:5000,10.0.0.7:53").Answer
			r.send("10.0.0.7", 1, size)
			after := r.show()[0]
			if dropped := after.DroppedPackets > before.DroppedPackets; dropped != (a.Verdict == "drop") || a.Conforms == dropped || *a.DecidedBy != "10.0.0.0/24" {
				t.Errorf("each %s, packet %d: %+v is expected, and it was dropped: %v", each, packet, a, dropped)
			}
			if counted := after.PassedBytes - before.PassedBytes; a.Verdict == "pass" && counted != a.Bytes {
				t.Errorf("each %s, packet %d: counts %d, and %d are explained", each, packet, counted, a.Bytes)
			}
		}
		if r.show()[0].DroppedPackets == 0 {
			t.Error("nothing was dropped")
		}
	}
}

// As many packets as there is room for pass, and no more.
func TestExplainRoomIsRight(t *testing.T) {
	r := newRig(t)
	r.setSlow("va egress 10.0.0.0/24 --rate 8kbit --capacity 50000")
	r.send("10.0.0.7", 7, 999)
	stop := r.explain("va", "egress", "10.0.0.7", "--bytes", "1001").Hooks[0]
	r.send("10.0.0.7", int(stop.Bucket.RoomPackets), 1001)
	if rule := r.show()[0]; rule.PassedPackets != 7+stop.Bucket.RoomPackets || rule.DroppedPackets != 0 {
		t.Errorf("of %d packets with room, %d were dropped", stop.Bucket.RoomPackets, rule.DroppedPackets)
	}
	r.send("10.0.0.7", 1, 1001)
	if rule := r.show()[0]; rule.DroppedPackets != 1 {
		t.Errorf("one more was not dropped: %+v", rule)
	}
}

// Which other limit refused packets is counted for a while.
func TestExplainTooManyPackets(t *testing.T) {
	r := newRig(t)
	r.ok(strings.Fields("set up --new --rate 1gbit")...)
	r.ok(strings.Fields("set va egress 10.0.0.7 --rate 1gbit --pps 2k --within up")...)
	sender, done := testenv.NewSender(t, "va"), make(chan bool)
	var wait sync.WaitGroup
	wait.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				sender.Send(frameTo("10.0.0.7", 100))
			}
		}
	})
	var paths report.Paths
	testenv.Must(t, json.Unmarshal([]byte(r.ok("explain", "va", "egress", "10.0.0.7", "-j")), &paths))
	close(done)
	wait.Wait()
	if p := &paths[0].Hooks[0]; p.LimitedBy == nil || *p.LimitedBy != "10.0.0.7/32" || p.LimitedReason != report.TooManyPackets {
		t.Errorf("%+v", p.Passage)
	}
}
