package main

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A limit is the rate and the burst of a limiter: for all packets, or for each host
// if the limiter distinguishes hosts.
type limit struct {
	rate     policy.Rate
	capacity uint64 // bytes
}

// ample is a limit to which all packets conform.
var ample = limit{rate: 10e9, capacity: 10 << 20}

// A limiter can be set up on the near end of an arena.
type limiter struct {
	name string
	note string // what a fair comparison must consider
	ecn  bool   // TCP in the suite queue negotiates ECN
	set  func(a *arena, l limit)
}

// The destination of all traffic, and the prefixes of our rules.
var everything, everything6 = netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8:1::/48")

var onClsact = limiter{name: "shapectl gcra, each all, clsact", set: func(a *arena, l limit) {
	a.putRules(loader.Clsact, policy.Rule{Rate: l.rate, Capacity: l.capacity})
}}

// shapectlModes returns the modes of shapectl to compare, for both families.
func shapectlModes() (modes []limiter) {
	for _, a := range algorithms {
		for _, each := range []policy.Each{{}, {Kind: policy.EachHost}, {Kind: policy.EachFlow}} {
			modes = append(modes, limiter{name: fmt.Sprintf("shapectl %v, each %v", a, each), set: func(in *arena, l limit) {
				in.putRules(loader.TCX, policy.Rule{Rate: l.rate, Capacity: l.capacity, Algorithm: a, Each: each})
			}})
		}
	}
	return modes
}

// shaping is a mode of shapectl. Everything but the rate has the default of the command.
func shaping(name string, l policy.Limit) limiter {
	return limiter{name: fmt.Sprintf("shapectl %v, %s", l.Algorithm, name), set: func(a *arena, to limit) {
		l := l
		l.Rate = to.rate
		rule := must(l.Resolve(everything))
		if rule.Excess == policy.Delay {
			a.tc("qdisc replace dev near root fq limit 131072 flow_limit 131072\n")
		}
		a.put(loader.TCX, rulesOf(rule))
	}}
}

// putRules sets the rule for each of our prefixes, like the command.
func (a *arena) putRules(mode loader.Mode, rule policy.Rule) {
	other := rule
	rule.Prefix, other.Prefix = everything, everything6
	a.put(mode, rulesOf(rule), rulesOf(other))
}

// rulesOf are rules of the limited direction, which is the egress of the near end.
func rulesOf(rules ...policy.Rule) policy.Table {
	return policy.Table{Device: nearDevice, Direction: policy.Egress, Match: policy.MatchDst, Rules: rules}
}

// put sets the rules or pools of tables, with a change for each table.
func (a *arena) put(mode loader.Mode, tables ...policy.Table) {
	in(a.near, func() {
		n := must(loader.Write(loader.Options{BPFFS: a.bpffs, Mode: mode}))
		defer n.Close()
		for _, t := range tables {
			must(n.Put(loader.ApplyOptions{}, t))
		}
	})
}

// emptyTCX has the cost of any tcx program, and clockTCX that of any meter.
var (
	emptyTCX = limiter{name: emptyProgram, set: func(a *arena, _ limit) { a.attach(a.near, a.plain("empty")) }}
	clockTCX = limiter{name: clockProgram, set: func(a *arena, _ limit) { a.attach(a.near, a.plain("clock")) }}
	bare     = limiter{name: noLimiter, set: func(*arena, limit) {}}
)

// peer is a limiter that a shell script sets up, with the rate in bit/s, the burst in bytes, and the queue of shapectl in
// bytes.
func peer(name, note, script string) limiter {
	return limiter{name: name, note: note, set: func(a *arena, l limit) {
		values := fmt.Sprintf("rate=%d burst=%d queue=%d\n", uint64(l.rate), l.capacity, policy.DefaultQueue(l.rate))
		in(a.near, func() { runCommand(values+script, "sh", "-e") })
	}}
}

// iptables is the variant with its own code in the kernel, rather than that of nft.
const iptables = "iptables-legacy"

const (
	nftNote       = "counts the headers of a GSO packet once; its burst is at least one second of the rate"
	hashlimitNote = iptables + "; counts IP bytes in steps of 16, and " + nftNote
	// The netdev hook is the earliest one of nft; packets skip all other chains.
	nftChain = "chain egress { type filter hook egress device near priority 0; policy accept; "
	// The raw table is the first one of a packet. The minimum burst is one second of the rate, in steps of hashlimit.
	hashlimit = `least=$((rate / 8 * 21 / 20 + 64))
` + iptables + ` -t raw -A OUTPUT -o near -j DROP -m hashlimit --hashlimit-name limits --hashlimit-above $((rate / 8))b/s \
	--hashlimit-burst $((burst > least ? burst : least))b`
)

var (
	// police is the action with the fastest classifier.
	police = peer("tc police", "", `tc qdisc add dev near clsact
tc filter add dev near egress matchall action police rate ${rate}bit burst $burst conform-exceed drop/ok`)
	tbf = peer("TBF", "", "tc qdisc add dev near root tbf rate ${rate}bit burst $burst latency 50ms")
	htb = peer("HTB with 1 class", "", `tc qdisc add dev near root handle 1: htb default 1
tc class add dev near parent 1: classid 1:1 htb rate ${rate}bit burst $burst cburst $burst quantum 1514`)
	// cake has no flow isolation, like the others.
	cake          = peer("CAKE", "besteffort flowblind; no burst", "tc qdisc add dev near root cake bandwidth ${rate}bit besteffort flowblind")
	isolatingCAKE = peer("CAKE", "besteffort", "tc qdisc add dev near root cake bandwidth ${rate}bit besteffort")
	queueTBF      = peer("TBF", "burst of 1 ms, at least two frames; a queue as long as shapectl's", `burst=$((rate / 8000))
[ $burst -ge 3028 ] || burst=3028
tc qdisc add dev near root tbf rate ${rate}bit burst $burst limit $((burst + queue))`)
	// The authors of CoDel recommend a target of at least the time of 1.5 frames for slow links.
	htbCoDel = peer("HTB + fq_codel", "CoDel target: 5 ms, or the time of 1.5 frames", `target=$((18168000000 / rate))
[ $target -ge 5000 ] || target=5000
tc qdisc add dev near root handle 1: htb default 1
tc class add dev near parent 1: classid 1:1 htb rate ${rate}bit quantum 1514
tc qdisc add dev near parent 1:1 fq_codel target ${target}us interval $((target + 95000))us`)
	nftLimit = peer("nft limit", nftNote, `nft "table netdev limits {
`+nftChain+`limit rate over $((rate / 8)) bytes/second burst $burst bytes drop; }
}"`)
	nftSet = peer("nft dynamic set, each host", nftNote, `nft "table netdev limits {
set hosts { type ipv4_addr; size 65535; timeout 1m; flags dynamic; }
`+nftChain+`update @hosts { ip daddr limit rate over $((rate / 8)) bytes/second burst $burst bytes } drop; }
}"`)
	hashlimitAll  = peer("hashlimit", hashlimitNote, hashlimit)
	hashlimitHost = peer("hashlimit, each host", hashlimitNote, hashlimit+" --hashlimit-mode dstip")
)

// withECN returns a limiter for traffic that negotiates ECN.
func withECN(s limiter) limiter {
	s.name, s.ecn = s.name+", ECN", true
	return s
}

// A batch is commands of tc.
type batch struct{ strings.Builder }

func (b *batch) line(format string, args ...any) { fmt.Fprintf(b, format+"\n", args...) }

const u32Filter = "filter add dev near parent 1: prio 1 protocol ip "

// hash begins an HTB whose filter has a table of buckets by one byte of the destination, in a network.
func (b *batch) hash(network netip.Prefix, mask uint32) {
	b.line(u32Filter + "u32")
	b.line(u32Filter + "handle 2: u32 divisor 256")
	b.line(u32Filter+"u32 ht 800:: match ip dst %v hashkey mask %#08x at 16 link 2:", network, mask)
}

// A tree is a pool with its members, or a subscriber, who has none.
type tree struct {
	rate      policy.Rate
	guarantee policy.Guarantee
	share     policy.Share // of a pool
	members   []*tree
}

// addressOf is the destination of the packets of a subscriber or sender.
func addressOf(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, 2, byte(i)}) }

// put sets shapectl up: a pool for each pool, and a rule for each subscriber.
func (t *tree) put(a *arena) {
	var tables []policy.Table
	subscribers := 0
	var add func(t *tree, within string)
	add = func(t *tree, within string) {
		l := policy.Limit{Rate: t.rate, Guarantee: t.guarantee, Share: t.share, Within: policy.Within(within)}
		if t.members == nil {
			tables = append(tables, rulesOf(must(l.Rule(netip.PrefixFrom(addressOf(subscribers), 32)))))
			subscribers++
			return
		}
		name := fmt.Sprintf("pool-%d", len(tables))
		tables = append(tables, policy.Table{Rules: []policy.Rule{must(l.Pool(name))}})
		for _, m := range t.members {
			add(m, name)
		}
	}
	add(t, "")
	a.put(loader.TCX, tables...)
}

// htb returns commands of tc for the same tree of classes. A subscriber's queue holds 100 ms of its rate.
func (t *tree) htb() string {
	var b batch
	b.line("qdisc add dev near root handle 1: htb")
	b.hash(netip.PrefixFrom(addressOf(0), 24), 0xff)
	subscribers, inner := 0, 0x1000
	var add func(t *tree, parent string)
	add = func(t *tree, parent string) {
		number := subscribers + 1
		if t.members == nil {
			b.line(u32Filter+"u32 ht 2:%x: match ip dst %v flowid 1:%x", subscribers, addressOf(subscribers), number)
			subscribers++
		} else {
			number = inner
			inner++
		}
		class := fmt.Sprintf("1:%x", number)
		b.line("class add dev near parent %s classid %s htb rate %dbit ceil %dbit quantum %d",
			parent, class, max(uint64(t.guarantee), 8), uint64(t.rate), maxFrame)
		if t.members == nil {
			b.line("qdisc add dev near parent %s pfifo limit %d", class, max(10, uint64(t.rate)/8/10/maxFrame))
		}
		for _, m := range t.members {
			add(m, class)
		}
	}
	all := *t
	all.guarantee = policy.Guarantee(t.rate)
	add(&all, "1:")
	return b.String()
}
