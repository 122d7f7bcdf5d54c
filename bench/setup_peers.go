package main

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/pkg/policy"
)

// Peers are set up in one transaction of their tool, from a prepared text. Parsing it is a part
// of their time.

// peerRules returns a script that creates n rules of a peer in the thread's namespace, with a rate for each.
type peerRules func(ctx context.Context, n int, rate func() policy.Rate) (script string, change changeRule)

// loadPeer loads rules with a command in a new arena, and changes some.
func loadPeer(rules peerRules, command string, args ...string) loadFunc {
	return func(ctx context.Context, n, changes int) (out outcome, err error) {
		a, err := newArena(ctx)
		if err != nil {
			return out, err
		}
		defer a.Close()
		random := newRandom()
		err = in(a.near, func() error {
			script, change := rules(ctx, n, func() policy.Rate { return someRate(random) })
			before := settledMemory()
			start := time.Now()
			if err := runCommand(ctx, script, command, args...); err != nil {
				return err
			}
			out.Seconds, out.KernelMiB = []float64{time.Since(start).Seconds()}, []float64{kernelMemory() - before}
			out.Random, out.Same, err = changeRules(random, n, changes, change)
			return err
		})
		return out, err
	}
}

// htbRules has a class for each address of a /16.
func htbRules(_ context.Context, n int, rate func() policy.Rate) (script string, change changeRule) {
	prefixes := make([]netip.Prefix, n)
	for i := range prefixes {
		prefixes[i] = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 32)
	}
	script = htbBatch(prefixes, 2, func() string { return fmt.Sprintf("rate %dbit burst 1mb", uint64(rate())) })
	return script, func(i int) func() error {
		l, err := lookUp(nearDevice)
		if err != nil {
			return func() error { return err }
		}
		class := netlink.NewHtbClass(netlink.ClassAttrs{
			LinkIndex: l.Attrs().Index, Parent: netlink.MakeHandle(1, 0), Handle: netlink.MakeHandle(1, uint16(i+1)),
		}, netlink.HtbClassAttrs{Rate: uint64(rate()), Buffer: 1 << 20})
		return func() error { return netlink.ClassChange(class) }
	}
}

// nftMapRules adds a new limit for each change, because a limit in use cannot be changed.
func nftMapRules(ctx context.Context, n int, rate func() policy.Rate) (script string, change changeRule) {
	var b strings.Builder
	b.WriteString("table ip bench {\n")
	for i := range n {
		fmt.Fprintf(&b, "limit l%d { %s; }\n", i, nftRate(rate()))
	}
	b.WriteString("map rates { type ipv4_addr : limit; flags interval; elements = {\n")
	for i := range n {
		fmt.Fprintf(&b, "%s : \"l%d\",\n", nftPrefix(i), i)
	}
	b.WriteString("} }\nchain out { type filter hook output priority 0; limit name ip daddr map @rates drop\n}\n}\n")
	turn := 0
	return b.String(), func(i int) func() error {
		turn++
		return nftChange(ctx, "add limit ip bench t%[1]d { %[2]s; }\n"+
			"delete element ip bench rates { %[3]s }\nadd element ip bench rates { %[3]s : \"t%[1]d\" }\n",
			turn, nftRate(rate()), nftPrefix(i))
	}
}

func nftSetRules(ctx context.Context, n int, rate func() policy.Rate) (script string, change changeRule) {
	var b strings.Builder
	b.WriteString("table ip bench {\n")
	b.WriteString("set rates { type ipv4_addr; flags interval; limit rate over 1 mbytes/second; elements = {\n")
	for i := range n {
		fmt.Fprintf(&b, "%s limit %s,\n", nftPrefix(i), nftRate(rate()))
	}
	b.WriteString("} }\nchain out { type filter hook output priority 0; ip daddr @rates drop\n}\n}\n")
	return b.String(), func(i int) func() error {
		return nftChange(ctx, "delete element ip bench rates { %[1]s }\nadd element ip bench rates { %[1]s limit %[2]s }\n",
			nftPrefix(i), nftRate(rate()))
	}
}

func nftRate(rate policy.Rate) string {
	return fmt.Sprintf("rate over %d bytes/second burst 1048576 bytes", rate/8)
}

// nftPrefix returns the i-th of many prefixes that do not overlap.
func nftPrefix(i int) netip.Prefix {
	n := 10<<24 + i*16
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}), 28)
}

func nftChange(ctx context.Context, format string, args ...any) func() error {
	script := fmt.Sprintf(format, args...)
	return func() error { return runCommand(ctx, script, "nft", "-f", "-") }
}
