package main

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf/asm"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A limit is what a limiter is told to hold: one rate for all that is sent, or
// to each host of it for limiters that tell hosts apart.
type limit struct {
	rate     policy.Rate
	capacity uint64 // bytes
}

// A competitor is a limiter, and one way to set up a limit on the near end of an arena.
type competitor struct {
	name string
	note string // what a reader must know to compare it fairly
	// uncounted are the bytes of a frame that it leaves out on purpose.
	uncounted uint64
	set       func(ctx context.Context, a *arena, l limit) error
}

// everything is what our own rules are for: where all the traffic goes.
var everything, everything6 = netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8:1::/48")

// shapectl is a limiter of ours, for either family.
func shapectl(algorithm policy.Algorithm, each policy.EachKind, mode loader.Mode) competitor {
	name := fmt.Sprintf("shapectl %v, each %v", algorithm, policy.Each{Kind: each})
	if mode == loader.Clsact {
		name += ", clsact"
	}
	return competitor{name: name, set: func(_ context.Context, a *arena, l limit) error {
		return a.limitPrefixes(mode, l, policy.Rule{Algorithm: algorithm, Each: policy.Each{Kind: each}}, everything, everything6)
	}}
}

// emptyTCX does what any tcx program must, and clockTCX what any meter must.
var (
	emptyTCX = competitor{name: emptyProgram, set: onward("empty")}
	clockTCX = competitor{name: clockProgram, set: onward("clock", asm.FnKtimeGetNs.Call())}
)

// onward attaches a program that does that and lets the packet go on.
func onward(name string, instructions ...asm.Instruction) func(context.Context, *arena, limit) error {
	return func(_ context.Context, a *arena, _ limit) error {
		return a.assemble(a.near, name, append(instructions, asm.Mov.Imm(asm.R0, next), asm.Return())...)
	}
}

// police is the action behind the leanest classifier.
var police = competitor{name: "tc police", set: func(ctx context.Context, a *arena, l limit) error {
	return a.tc(ctx, `qdisc add dev %s clsact
filter add dev %[1]s egress matchall action police rate %dbit burst %d conform-exceed drop/ok
`, nearDevice, uint64(l.rate), l.capacity)
}}

var tbf = competitor{name: "TBF", set: func(ctx context.Context, a *arena, l limit) error {
	return a.tc(ctx, "qdisc add dev %s root tbf rate %dbit burst %d latency 50ms\n", nearDevice, uint64(l.rate), l.capacity)
}}

var htb = competitor{name: "HTB with 1 class", set: func(ctx context.Context, a *arena, l limit) error {
	return a.tc(ctx, `qdisc add dev %s root handle 1: htb default 1
class add dev %[1]s parent 1: classid 1:1 htb rate %dbit burst %d cburst %[3]d quantum 1514
`, nearDevice, uint64(l.rate), l.capacity)
}}

// cake without the isolation of flows, which the others do not have either.
var cake = competitor{
	name: "CAKE", note: "besteffort flowblind; it has no burst",
	set: func(ctx context.Context, a *arena, l limit) error {
		return a.tc(ctx, "qdisc add dev %s root cake bandwidth %dbit besteffort flowblind\n", nearDevice, uint64(l.rate))
	},
}

// The netdev hook is the earliest that nft has, and spares a packet all other chains.
const nftNote = "counts the headers of what TCP hands down in one piece once; its burst is a second's worth at least"

var nftOneLimit = competitor{name: "nft limit", note: nftNote, set: func(ctx context.Context, a *arena, l limit) error {
	return a.nft(ctx, "", fmt.Sprintf("limit rate over %d bytes/second burst %d bytes drop", l.rate/8, l.capacity))
}}

var nftSet = competitor{name: "nft dynamic set, each host", note: nftNote, set: func(ctx context.Context, a *arena, l limit) error {
	return a.nft(ctx, "set hosts { type ipv4_addr; size 65535; timeout 1m; flags dynamic; }",
		fmt.Sprintf("update @hosts { ip daddr limit rate over %d bytes/second burst %d bytes } drop", l.rate/8, l.capacity))
}}

// nft sets up one rule, with what it refers to.
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

// leastHashlimit is what hashlimit accepts for a burst at least: what comes in a second, in its own steps.
func leastHashlimit(l limit) uint64 { return max(l.capacity, uint64(l.rate)/8*21/20+64) }

// The raw table is the first that a packet meets.
func hashlimit(iptables, mode string) competitor {
	name, options := "hashlimit", []string(nil)
	if mode != "" {
		name, options = "hashlimit, each host", []string{"--hashlimit-mode", mode}
	}
	return competitor{
		name: name, uncounted: 14, note: iptables + "; counts IP bytes in steps of 16, and " + nftNote,
		set: func(ctx context.Context, a *arena, l limit) error {
			return a.run(ctx, "", iptables, append([]string{
				"-t", "raw", "-A", "OUTPUT", "-o", nearDevice, "-m", "hashlimit", "--hashlimit-name", "limits",
				"--hashlimit-above", fmt.Sprintf("%db/s", l.rate/8), "--hashlimit-burst", fmt.Sprintf("%db", leastHashlimit(l)), "-j", "DROP",
			}, options...)...)
		},
	}
}
