package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf/asm"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A limit is the rate and the burst of a limiter: for all packets, or for each host
// if the limiter distinguishes hosts.
type limit struct {
	rate     policy.Rate
	capacity uint64 // bytes
}

// A competitor is a limiter that can be set up on the near end of an arena.
type competitor struct {
	name string
	note string // what a fair comparison must consider
	// uncounted are the bytes of a frame that it does not count, by design.
	uncounted uint64
	ecn       bool // TCP in the suite queue negotiates ECN
	set       func(ctx context.Context, a *arena, l limit) error
}

// The destination of all traffic, and the prefixes of our rules.
var everything, everything6 = netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8:1::/48")

// shapectl is a mode of shapectl, for both families.
func shapectl(algorithm policy.Algorithm, each policy.EachKind, mode loader.Mode) competitor {
	name := fmt.Sprintf("shapectl %v, each %v", algorithm, policy.Each{Kind: each})
	if mode == loader.Clsact {
		name += ", clsact"
	}
	return competitor{name: name, set: func(_ context.Context, a *arena, l limit) error {
		rule := policy.Rule{Rate: l.rate, Capacity: l.capacity, Algorithm: algorithm, Each: policy.Each{Kind: each}}
		if algorithm.HasColours() {
			rule.Colours = coloursOf(rule)
		}
		return a.putRules(mode, rule, everything, everything6)
	}}
}

// coloursOf gives packets of a rule with colours as much beyond the CIR.
func coloursOf(r policy.Rule) policy.Colours {
	c := policy.Colours{Green: policy.ActionPass, Yellow: policy.ActionPass, Red: policy.ActionDrop}
	switch r.Algorithm {
	case policy.TRTCM:
		c.PIR, c.PBS = 2*r.Rate, r.Capacity
	case policy.RFC4115:
		c.EIR, c.EBS = r.Rate, r.Capacity
	default:
		c.EBS = r.Capacity
	}
	return c
}

// emptyTCX has the cost of any tcx program, and clockTCX that of any meter.
var (
	emptyTCX = competitor{name: emptyProgram, set: onward("empty", nil)}
	clockTCX = competitor{name: clockProgram, set: onward("clock", readClock())}
)

// onward attaches a program that runs code and passes the packet on.
func onward(name string, code asm.Instructions) func(context.Context, *arena, limit) error {
	return func(_ context.Context, a *arena, _ limit) error {
		return a.assemble(a.near, name, slices.Concat(code, exit()))
	}
}

// byTC sets a limiter up with commands of tc. %[1]s is the device, %[2]d the rate in bit/s,
// and %[3]d the burst in bytes.
func byTC(commands string) func(context.Context, *arena, limit) error {
	return func(ctx context.Context, a *arena, l limit) error {
		return a.tc(ctx, fmt.Sprintf(commands, nearDevice, uint64(l.rate), l.capacity))
	}
}

var (
	// police is the action with the fastest classifier.
	police = competitor{name: "tc police", set: byTC(`qdisc add dev %[1]s clsact
filter add dev %[1]s egress matchall action police rate %[2]dbit burst %[3]d conform-exceed drop/ok
`)}
	tbf = competitor{name: "TBF", set: byTC("qdisc add dev %[1]s root tbf rate %[2]dbit burst %[3]d latency 50ms\n")}
	htb = competitor{name: "HTB with 1 class", set: byTC(`qdisc add dev %[1]s root handle 1: htb default 1
class add dev %[1]s parent 1: classid 1:1 htb rate %[2]dbit burst %[3]d cburst %[3]d quantum 1514
`)}
	// cake has no flow isolation, like the others.
	cake = competitor{
		name: "CAKE", note: "besteffort flowblind; no burst",
		set: byTC("qdisc add dev %[1]s root cake bandwidth %[2]dbit besteffort flowblind\n"),
	}
)

// The netdev hook is the earliest one of nft; packets skip all other chains.
const nftNote = "counts the headers of a GSO packet once; its burst is at least one second of the rate"

var nftOneLimit = competitor{name: "nft limit", note: nftNote, set: func(ctx context.Context, a *arena, l limit) error {
	return a.nft(ctx, "", fmt.Sprintf("limit rate over %d bytes/second burst %d bytes drop", l.rate/8, l.capacity))
}}

var nftSet = competitor{
	name: "nft dynamic set, each host", note: nftNote,
	set: func(ctx context.Context, a *arena, l limit) error {
		rule := fmt.Sprintf("limit rate over %d bytes/second burst %d bytes", l.rate/8, l.capacity)
		return a.nft(ctx, "set hosts { type ipv4_addr; size 65535; timeout 1m; flags dynamic; }",
			"update @hosts { ip daddr "+rule+" } drop")
	},
}

// nft sets up one rule, with the declarations that it needs.
func (a *arena) nft(ctx context.Context, declarations, rule string) error {
	return a.run(ctx, fmt.Sprintf(`table netdev limits {
	%s
	chain egress {
		type filter hook egress device %s priority 0; policy accept;
		%s
	}
}
`, declarations, nearDevice, rule), "nft", "-f", "-")
}

// iptables is the variant with its own code in the kernel, rather than that of nft.
const iptables = "iptables-legacy"

const hashlimitNote = iptables + "; counts IP bytes in steps of 16, and " + nftNote

var (
	hashlimitAll  = competitor{name: "hashlimit", uncounted: ethernetBytes, note: hashlimitNote, set: hashlimit()}
	hashlimitHost = competitor{
		name: "hashlimit, each host", uncounted: ethernetBytes, note: hashlimitNote,
		set: hashlimit("--hashlimit-mode", "dstip"),
	}
)

// hashlimit sets one up in the raw table, the first one of a packet. Its minimum burst is
// one second of the rate, in its own steps.
func hashlimit(options ...string) func(context.Context, *arena, limit) error {
	return func(ctx context.Context, a *arena, l limit) error {
		burst := max(l.capacity, uint64(l.rate)/8*21/20+64)
		return a.run(ctx, "", iptables, slices.Concat([]string{
			"-t", "raw", "-A", "OUTPUT", "-o", nearDevice, "-m", "hashlimit", "--hashlimit-name", "limits",
			"--hashlimit-above", fmt.Sprintf("%db/s", l.rate/8), "--hashlimit-burst", fmt.Sprintf("%db", burst), "-j", "DROP",
		}, options)...)
	}
}

// putRules sets the rule for each of the prefixes, like the command.
func (a *arena) putRules(mode loader.Mode, rule policy.Rule, prefixes ...netip.Prefix) error {
	var tables []policy.Table
	for _, p := range prefixes {
		rule.Prefix = p
		tables = append(tables, rulesOf(rule))
	}
	return a.putTables(mode, tables...)
}

// rulesOf are rules of the limited direction, which is the egress of the near end.
func rulesOf(rules ...policy.Rule) policy.Table {
	return policy.Table{Device: nearDevice, Direction: policy.Egress, Match: policy.MatchDst, Rules: rules}
}

// putTables sets the rules or pools of tables, with a change for each table.
func (a *arena) putTables(mode loader.Mode, tables ...policy.Table) error {
	return in(a.near, func() error {
		n, err := loader.Write(loader.Options{BPFFS: a.bpffs, Mode: mode})
		if err != nil {
			return err
		}
		defer n.Close()
		for _, t := range tables {
			if _, err := n.Put(loader.ApplyOptions{}, t); err != nil {
				return fmt.Errorf("set limits: %w", err)
			}
		}
		return nil
	})
}

// shapectlMany has a rule with one bucket for each prefix.
func shapectlMany(prefixes []netip.Prefix) competitor {
	return competitor{name: "shapectl gcra, one rule each", set: func(_ context.Context, a *arena, l limit) error {
		rules := make([]policy.Rule, len(prefixes))
		for i, p := range prefixes {
			rules[i] = policy.Rule{Prefix: p, Rate: l.rate, Capacity: l.capacity}
		}
		p, err := a.shapectl(maps.Size{Rules: uint32(len(rules)), Buckets: 1}, rules)
		if err != nil {
			return err
		}
		return a.attach(a.near, p)
	}}
}

// manyBits is the length of all prefixes. hashlimit and a hashed nft map support only one.
const manyBits = 28

// randomPrefixes returns n different prefixes in 10.0.0.0/8, sorted by address.
func randomPrefixes(n int) []netip.Prefix {
	random := newRandom()
	prefixes := differentPrefixes(n, func() netip.Prefix {
		return netip.PrefixFrom(addressIn(random, everything), manyBits)
	})
	slices.SortFunc(prefixes, netip.Prefix.Compare)
	return prefixes
}

// randomTargets returns n random addresses in random ones of the prefixes.
func randomTargets(prefixes []netip.Prefix, n int) []netip.Addr {
	targets, random := make([]netip.Addr, n), newRandom()
	for i := range targets {
		targets[i] = addressIn(random, prefixes[random.IntN(len(prefixes))])
	}
	return targets
}

// nftMap maps the network of an address to a limit. It is a hash table, because all
// prefixes have the same length; otherwise it would be a tree.
func nftMap(prefixes []netip.Prefix) competitor {
	return competitor{
		name: "nft map to limits", note: "a hash table, because all prefixes have the same length",
		set: func(ctx context.Context, a *arena, l limit) error {
			var limits, elements strings.Builder
			for i, p := range prefixes {
				fmt.Fprintf(&limits, "limit l%d { rate over %d bytes/second burst %d bytes; }\n", i, l.rate/8, l.capacity)
				fmt.Fprintf(&elements, "%v : \"l%d\",\n", p.Addr(), i)
			}
			mask := netip.PrefixFrom(netip.AddrFrom4([4]byte{255, 255, 255, 255}), manyBits).Masked().Addr()
			declarations := fmt.Sprintf("%v\nmap limits { type ipv4_addr : limit; elements = { %v } }", &limits, &elements)
			return a.nft(ctx, declarations, fmt.Sprintf("limit name ip daddr & %v map @limits drop", mask))
		},
	}
}

// hashlimitPrefix creates buckets on demand, all with the same rate.
var hashlimitPrefix = competitor{
	name: "hashlimit by prefix", note: "one rate for all prefixes",
	set: hashlimit("--hashlimit-mode", "dstip", "--hashlimit-dstmask", strconv.Itoa(manyBits),
		"--hashlimit-htable-size", "131072", "--hashlimit-htable-max", "262144", "--hashlimit-htable-expire", "600000"),
}

// maxClasses of an HTB: the number of a class has 16 bits, and two values are reserved.
const maxClasses = 65_534

// htbMany has a class for each prefix. The prefixes in a bucket of the second hash table
// differ only in the fourth byte.
func htbMany(prefixes []netip.Prefix) competitor {
	return competitor{
		name: "HTB, u32 hash tables", note: fmt.Sprintf("at most %d classes", maxClasses),
		set: func(ctx context.Context, a *arena, l limit) error {
			class := fmt.Sprintf("rate %dbit burst %d cburst %[2]d", uint64(l.rate), l.capacity)
			return a.tc(ctx, htbBatch(prefixes, 1, func() string { return class }))
		},
	}
}

// htbBatch returns commands of tc that create a class for each prefix. Two levels of u32 hash tables find
// it: by one byte of the destination, by which the prefixes are sorted, and by the next byte.
func htbBatch(prefixes []netip.Prefix, first int, class func() string) string {
	const filter = "filter add dev " + nearDevice + " parent 1: prio 1 protocol ip "
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("qdisc add dev %s root handle 1: htb", nearDevice)
	if len(prefixes) > 1 {
		all := netip.PrefixFrom(prefixes[0].Addr(), 8*first).Masked()
		line(filter + "u32")
		line(filter + "handle 2: u32 divisor 256")
		line(filter+"u32 ht 800:: match ip dst %v hashkey mask %#08x at 16 link 2:", all, 0xff000000>>(8*first))
	}
	table := 0
	for i, p := range prefixes {
		line("class add dev %s parent 1: classid 1:%x htb %s quantum 1514", nearDevice, i+1, class())
		if len(prefixes) == 1 {
			line(filter+"u32 match ip dst %v flowid 1:1", p)
			continue
		}
		ip := p.Addr().As4()
		if t := 0x100 + int(ip[first]); t != table {
			table = t
			line(filter+"handle %x: u32 divisor 256", table)
			line(filter+"u32 ht 2:%x: match u32 0 0 hashkey mask %#08x at 16 link %x:", ip[first], 0xff0000>>(8*first), table)
		}
		line(filter+"u32 ht %x:%x: match ip dst %v flowid 1:%x", table, ip[first+1], p, i+1)
	}
	return b.String()
}
