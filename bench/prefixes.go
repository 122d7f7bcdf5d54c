package main

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"

	"github.com/shapectl/shapectl/pkg/policy"
)

// Addresses of packets.
var (
	sourceIPv4 = netip.MustParseAddr("192.0.2.1")
	destIPv4   = netip.MustParseAddr("10.0.0.1")
	sourceIPv6 = netip.MustParseAddr("2001:db8::1")
	destIPv6   = netip.MustParseAddr("2001:db8:1::1")
)

// newRandom returns the same sequence in each run, so that all runs measure the same rules.
func newRandom() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }

// mixedPrefixes returns n different prefixes of one family, similar to those of a provider.
// IPv4: 40 % /24, 20 % hosts, the rest evenly from /16 to /31. IPv6, only global addresses:
// 40 % /48, 20 % /64, 10 % hosts, the rest evenly from /32 to /63.
func mixedPrefixes(r *rand.Rand, ipv6 bool, n int) []netip.Prefix {
	return differentPrefixes(n, func() netip.Prefix {
		return netip.PrefixFrom(randomAddress(r, ipv6), mixedLength(r, ipv6))
	})
}

// mixedRules returns rules for n mixed prefixes, half of each family.
func mixedRules(r *rand.Rand, n int) (rules []policy.Rule) {
	for _, p := range append(mixedPrefixes(r, false, n/2), mixedPrefixes(r, true, n-n/2)...) {
		rules = append(rules, ruleOf(p, someRate(r)))
	}
	return rules
}

// ruleOf returns the rule of a policy file that gives only a rate.
func ruleOf(p netip.Prefix, r policy.Rate) policy.Rule {
	return policy.Rule{Prefix: p, Rate: r, Capacity: policy.DefaultCapacity(r)}
}

// differentPrefixes returns n different results of next.
func differentPrefixes(n int, next func() netip.Prefix) []netip.Prefix {
	seen := make(map[netip.Prefix]bool, n)
	prefixes := make([]netip.Prefix, 0, n)
	for len(prefixes) < n {
		p := next().Masked()
		if !seen[p] {
			seen[p] = true
			prefixes = append(prefixes, p)
		}
	}
	return prefixes
}

func mixedLength(r *rand.Rand, ipv6 bool) int {
	lengths, least, others := []int{24, 24, 24, 24, 32, 32}, 16, 16
	if ipv6 {
		lengths, least, others = []int{48, 48, 48, 48, 64, 64, 128}, 32, 32
	}
	if tenth := r.IntN(10); tenth < len(lengths) {
		return lengths[tenth]
	}
	return least + r.IntN(others)
}

// randomAddress returns any IPv4 address, or any global IPv6 address.
func randomAddress(r *rand.Rand, ipv6 bool) netip.Addr {
	var b [16]byte
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	if !ipv6 {
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	b[0] = b[0]&0x1f | 0x20
	return netip.AddrFrom16(b)
}

// addressIn returns a random address of a prefix.
func addressIn(r *rand.Rand, p netip.Prefix) netip.Addr {
	a, in := randomAddress(r, p.Addr().Is6()).AsSlice(), p.Addr().AsSlice()
	for i := range a {
		host := byte(0xff >> min(max(p.Bits()-8*i, 0), 8))
		a[i] = a[i]&host | in[i]
	}
	address, _ := netip.AddrFromSlice(a)
	return address
}

// scrambled returns n different IPv4 addresses without an order: the finalizer of murmur3
// maps words one to one.
func scrambled(n uint32) []netip.Addr {
	addresses := make([]netip.Addr, n)
	for i := range n {
		h := i
		h ^= h >> 16
		h *= 0x85ebca6b
		h ^= h >> 13
		h *= 0xc2b2ae35
		h ^= h >> 16
		addresses[i] = netip.AddrFrom4([4]byte(binary.NativeEndian.AppendUint32(nil, h)))
	}
	return addresses
}

// generous returns a rule to which all packets conform.
func generous(p netip.Prefix, a policy.Algorithm) policy.Rule {
	return policy.Rule{Prefix: p, Rate: policy.MaxRate, Capacity: 1 << 30, Algorithm: a}
}
