package prefixes

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
)

// PrefixSets are sets of up to n different prefixes that a policy may have, or an
// adversary may choose.
func PrefixSets(n int) map[string][]netip.Prefix {
	sets := map[string][]netip.Prefix{}
	add := func(name string, prefix func(i int) netip.Prefix) {
		for i := range n {
			sets[name] = append(sets[name], prefix(i))
		}
	}
	for name, by := range map[string]struct{ length, stride int }{
		"IPv4, consecutive /32": {32, 1}, "IPv4, consecutive /24": {24, 1 << 8}, "IPv4, consecutive /20": {20, 1 << 12},
		"IPv4, every 256th address": {32, 1 << 8}, "IPv4, every 65536th address": {32, 1 << 16},
	} {
		add(name, func(i int) netip.Prefix { return prefix4(10<<24+i*by.stride, by.length) })
	}
	add("IPv4, nested", func(i int) netip.Prefix { return prefix4(i/17<<16, 16+i%17) })
	for name, length := range map[string]int{
		"IPv6, consecutive addresses": 128, "IPv6, consecutive /120": 120, "IPv6, consecutive /112": 112, "IPv6, consecutive /96": 96,
		"IPv6, consecutive /80": 80, "IPv6, consecutive /72": 72, "IPv6, consecutive /64": 64, "IPv6, consecutive /56": 56, "IPv6, consecutive /48": 48,
	} {
		add(name, func(i int) netip.Prefix {
			if length > 64 {
				high := uint64(0)
				if length < 80 {
					high = uint64(i) >> (length - 64)
				}
				return prefix6(0x20010db8<<32+high, uint64(i)<<(128-length), length)
			}
			return prefix6(0x20010db8<<32+uint64(i)<<(64-length), 0, length)
		})
	}
	add("IPv6, both halves count", func(i int) netip.Prefix { return prefix6(0x20010db8<<32+uint64(i), uint64(i), 128) })
	add("IPv6, last byte of each half", func(i int) netip.Prefix { return prefix6(0x20010db8<<32+uint64(i&255), uint64(i>>8), 128) })
	add("IPv6, nested", func(i int) netip.Prefix { return prefix6(uint64(i/65)<<32, 0, 64+i%65) })
	add("IPv6, first byte and length add up", func(i int) netip.Prefix {
		return prefix6(uint64(128-i%64)<<56|uint64(i/64)<<32, 0, 64+i%64)
	})
	roll := rand.New(rand.NewPCG(7, 7))
	add("IPv6, equal upper halves", func(int) netip.Prefix { return prefix6(0x20010db8<<32, roll.Uint64(), 128) })
	add("IPv6, equal lower halves", func(int) netip.Prefix { return prefix6(roll.Uint64(), 1, 128) })
	add("IPv6, random", func(int) netip.Prefix { return prefix6(roll.Uint64(), roll.Uint64(), 1+roll.IntN(4)*32+31) })
	add("IPv4 and IPv6, random", func(i int) netip.Prefix {
		if i%2 == 0 {
			return prefix4(int(roll.Uint32()), 24+roll.IntN(9))
		}
		return prefix6(roll.Uint64(), roll.Uint64(), 48+roll.IntN(81))
	})
	for name, first := range map[string]netip.Prefix{"IPv4, one byte": prefix4(10<<24, 32), "IPv6, one byte": prefix6(0x20010db8<<32, 0, 128)} {
		zero := first.Addr().AsSlice()
		set := []netip.Prefix{first}
		for i := 0; i < 255*len(zero) && len(set) < n; i++ {
			b := append([]byte(nil), zero...)
			b[i/255] += byte(1 + i%255)
			a, _ := netip.AddrFromSlice(b)
			set = append(set, netip.PrefixFrom(a, first.Bits()))
		}
		sets[name] = set
	}
	return sets
}

func prefix4(addr, length int) netip.Prefix {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], uint32(addr))
	return netip.PrefixFrom(netip.AddrFrom4(b), length).Masked()
}

func prefix6(high, low uint64, length int) netip.Prefix {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], high)
	binary.BigEndian.PutUint64(b[8:], low)
	return netip.PrefixFrom(netip.AddrFrom16(b), length).Masked()
}
