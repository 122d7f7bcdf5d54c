package maps

import (
	"encoding/binary"
	"net/netip"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/pkg/policy"
)

// makeKey is the bucket key of a packet, as narrow in bpf/key.h makes it.
func makeKey(id uint32, each policy.Each, match policy.Match, f Flow) bpf.AbiKey {
	key := bpf.AbiKey{Id: id, Family: 6}
	if f.Src.Is4() || f.Dst.Is4() {
		key.Family = 4
	}
	if each.Kind == policy.EachFlow {
		key.Src, key.Dst, key.Proto = prefixes.Words(f.Src), prefixes.Words(f.Dst), f.Proto
		key.Sport, key.Dport = networkPort(f.SrcPort), networkPort(f.DstPort)
		return key
	}
	far := f.Far(match)
	key.Src = prefixes.Words(netip.PrefixFrom(far, eachBits(each, far)).Masked().Addr())
	return key
}

// flowOf is the flow of which a key is made.
func flowOf(k bpf.AbiKey) Flow {
	return Flow{prefixes.Address(k.Src, k.Family), prefixes.Address(k.Dst, k.Family), k.Proto, networkPort(k.Sport), networkPort(k.Dport)}
}

// isFlow tells the key of a flow from that of a host or subnet.
func isFlow(k bpf.AbiKey) bool { return k.Dst != [4]uint32{} }

// eachBits is the length of the prefix that has a bucket.
func eachBits(each policy.Each, far netip.Addr) int {
	if each.Kind == policy.EachHost {
		return far.BitLen()
	}
	return min(int(each.Bits), far.BitLen()) // a pool, and a rule for a mark, have both families
}

// networkPort converts a port between host and network order. It is its own inverse.
func networkPort(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)
	return binary.NativeEndian.Uint16(b[:])
}

// A place is a line of the table in which a key may have its slot, and the key's fingerprint there.
type place struct{ line, fingerprint uint32 }

// places are the two places of a key, in the order in which packets look: hash_flow of
// bpf/flow.h leads to the first.
func (bs *buckets) places(k bpf.AbiKey, salt uint32) [2]place {
	secret := &bs.hook.Secret
	if k.Sharer != 0 {
		salt = ^salt
	}
	nh := func(i int, a, b uint32) uint64 { return uint64(a+secret[2*i]) * uint64(b+secret[2*i+1]) }
	h := nh(0, k.Src[0], k.Dst[0]) + nh(1, uint32(k.Dport)<<16|uint32(k.Sport), salt^uint32(k.Proto))
	if k.Family == 6 {
		h += nh(2, k.Src[1], k.Dst[1]) + nh(3, k.Src[2], k.Dst[2]) + nh(4, k.Src[3], k.Dst[3])
	}
	h ^= h >> 32
	h *= 0xc4ceb9fe1a85ec53
	h ^= h >> 32
	first := place{uint32(h) & bs.hook.LineMask, uint32(h>>32) | 1}
	return [2]place{first, bs.second(first)}
}

// second is the second place of a key whose first place is given.
func (bs *buckets) second(first place) place {
	p := place{(first.line ^ first.fingerprint>>3) & bs.hook.LineMask, first.fingerprint - 1}
	if p.fingerprint == 0 {
		p.fingerprint = 2
	}
	return p
}

// isFirst reports whether a fingerprint is that of a key in its first place.
func isFirst(fingerprint uint32) bool { return fingerprint&1 != 0 }
