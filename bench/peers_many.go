package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// manyBits is the length of all prefixes, as hashlimit and a hashed nft map know but one.
const manyBits = 28

// randomPrefixes are different ones in 10.0.0.0/8 of those lengths, by address.
func randomPrefixes(n int, lengths ...int) []netip.Prefix {
	chosen, random := map[netip.Prefix]bool{}, newRandom()
	for len(chosen) < n {
		a := netip.AddrFrom4([4]byte{10, byte(random.Uint32()), byte(random.Uint32()), byte(random.Uint32())})
		chosen[netip.PrefixFrom(a, lengths[random.IntN(len(lengths))]).Masked()] = true
	}
	return slices.SortedFunc(maps.Keys(chosen), func(a, b netip.Prefix) int { return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits()) })
}

// randomTargets are random addresses in random ones of those prefixes.
func randomTargets(prefixes []netip.Prefix, n int) []netip.Addr {
	targets, random := make([]netip.Addr, n), newRandom()
	for i := range targets {
		targets[i] = addressIn(random, prefixes[random.IntN(len(prefixes))])
	}
	return targets
}

// nftMap leads from the network of an address to a limit of its own: a hash
// table, as all prefixes are of one length; of several, it would be a tree.
func nftMap(prefixes []netip.Prefix) competitor {
	return competitor{
		name: "nft map to limits", note: "hashed, as all prefixes are of one length",
		set: func(ctx context.Context, a *arena, l limit) error {
			var limits, elements strings.Builder
			for i, p := range prefixes {
				fmt.Fprintf(&limits, "limit l%d { rate over %d bytes/second burst %d bytes; }\n", i, l.rate/8, l.capacity)
				fmt.Fprintf(&elements, "%v : \"l%d\",\n", p.Addr(), i)
			}
			mask := netip.PrefixFrom(netip.AddrFrom4([4]byte{255, 255, 255, 255}), manyBits).Masked().Addr()
			return a.nft(ctx, fmt.Sprintf("%s\nmap limits { type ipv4_addr : limit; elements = { %s } }", limits.String(), elements.String()),
				fmt.Sprintf("limit name ip daddr & %v map @limits drop", mask))
		},
	}
}

// hashlimitPrefix makes buckets as it goes, all of one rate.
var hashlimitPrefix = competitor{
	name: "hashlimit by prefix", note: "one rate for all",
	set: hashlimit("--hashlimit-mode", "dstip", "--hashlimit-dstmask", strconv.Itoa(manyBits),
		"--hashlimit-htable-size", "131072", "--hashlimit-htable-max", "262144", "--hashlimit-htable-expire", "600000"),
}

// maxClasses of an HTB: a class's number has 16 bits, and two of them are taken.
const maxClasses = 65_534

// htbMany has a class for each prefix; a bucket of the second hash table holds
// prefixes that differ in the fourth byte alone.
func htbMany(prefixes []netip.Prefix) competitor {
	return competitor{
		name: "HTB, u32 hash tables", note: fmt.Sprintf("has no more than %d classes", maxClasses),
		set: func(ctx context.Context, a *arena, l limit) error {
			class := fmt.Sprintf("rate %dbit burst %d cburst %[2]d", uint64(l.rate), l.capacity)
			return a.tc(ctx, htbBatch(prefixes, 1, func() string { return class }))
		},
	}
}

// htbBatch is how tc makes a class for each prefix, which two levels of hash tables of the u32 classifier
// find: by one byte of the destination, in which prefixes are in order, and by the next one.
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
