package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
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
		p := prefixes[random.IntN(len(prefixes))]
		b := p.Addr().As4()
		host := random.Uint32N(1 << (32 - p.Bits()))
		binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])|host)
		targets[i] = netip.AddrFrom4(b)
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
	set: func(ctx context.Context, a *arena, l limit) error {
		return a.run(ctx, "", "iptables-legacy", "-t", "raw", "-A", "OUTPUT", "-o", nearDevice, "-m", "hashlimit", "--hashlimit-name", "limits",
			"--hashlimit-mode", "dstip", "--hashlimit-dstmask", fmt.Sprint(manyBits),
			"--hashlimit-htable-size", "131072", "--hashlimit-htable-max", "262144", "--hashlimit-htable-expire", "600000",
			"--hashlimit-above", fmt.Sprintf("%db/s", l.rate/8), "--hashlimit-burst", fmt.Sprintf("%db", leastHashlimit(l)), "-j", "DROP")
	},
}

// maxClasses of an HTB: a class's number has 16 bits, and two of them are taken.
const maxClasses = 65_534

// htbMany has a class for each prefix, found by two hash tables, of the
// second and of the third byte of an address; a bucket of the second holds
// prefixes that differ in the fourth byte alone.
func htbMany(prefixes []netip.Prefix) competitor {
	s := competitor{name: "HTB, u32 hash tables", note: fmt.Sprintf("has no more than %d classes", maxClasses)}
	s.set = func(ctx context.Context, a *arena, l limit) error {
		var b strings.Builder
		line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
		const filter = "filter add dev " + nearDevice + " parent 1: prio 1 protocol ip "
		line("qdisc add dev %s root handle 1: htb", nearDevice)
		if len(prefixes) > 1 {
			line(filter + "u32")
			line(filter + "handle 2: u32 divisor 256")
			line(filter + "u32 ht 800:: match ip dst 10.0.0.0/8 hashkey mask 0x00ff0000 at 16 link 2:")
		}
		table, seen := uint8(0), false
		for i, p := range prefixes {
			line("class add dev %s parent 1: classid 1:%x htb rate %dbit burst %d cburst %d quantum 1514",
				nearDevice, i+1, uint64(l.rate), l.capacity, l.capacity)
			ip := p.Addr().As4()
			if len(prefixes) == 1 {
				line(filter+"u32 match ip dst %v flowid 1:1", p)
				continue
			}
			if !seen || ip[1] != table {
				table, seen = ip[1], true
				line(filter+"handle %x: u32 divisor 256", 0x100+int(table))
				line(filter+"u32 ht 2:%x: match u32 0 0 hashkey mask 0x0000ff00 at 16 link %x:", table, 0x100+int(table))
			}
			line(filter+"u32 ht %x:%x: match ip dst %v flowid 1:%x", 0x100+int(table), ip[2], p, i+1)
		}
		return a.run(ctx, b.String(), "tc", "-batch", "-")
	}
	return s
}
