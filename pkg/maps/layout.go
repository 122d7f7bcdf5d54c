package maps

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/labels"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Layout identifies the maps that this build makes and reads. It is a hash of the names of
// all maps and pins, the types and constants of bpf/abi.h as they were compiled, and the bytes
// of some sample rules, prefixes and keys. So nobody has to remember to change it.
var Layout = sync.OnceValue(func() uint64 { return layoutOf(bpf.Types()) })

func layoutOf(types []byte) uint64 {
	hash := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(pinned)) {
		fmt.Fprintln(hash, name, pinned[name])
	}
	hash.Write(types)
	writeSamples(hash)
	return binary.BigEndian.Uint64(hash.Sum(nil))
}

// checkLayout returns an error that wraps ErrOtherLayout if maps of another layout are pinned in a directory.
func checkLayout(dir string) error {
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, pinned[hookMap]), &ebpf.LoadPinOptions{ReadOnly: true})
	if errors.Is(err, fs.ErrNotExist) {
		err = PinError(filepath.Join(dir, pinned[hookMap]))
	}
	if err != nil {
		return fmt.Errorf("open the hook's settings: %w", err)
	}
	defer m.Close()
	settings, err := m.LookupBytes(uint32(0))
	if err != nil {
		return fmt.Errorf("read the hook's settings: %w", err)
	}
	if len(settings) != int(unsafe.Sizeof(bpf.AbiHook{})) || binary.NativeEndian.Uint64(settings) != Layout() {
		return fmt.Errorf("%w (this one has layout %016x)", ErrOtherLayout, Layout())
	}
	return nil
}

// writeSamples writes what types do not tell: how user space encodes rules, prefixes and
// keys. Tests compare the programs with that.
func writeSamples(w io.Writer) {
	const rules = 128
	hook := &bpf.AbiHook{LineMask: rules/2 - 1}
	for i := range hook.Secret {
		hook.Secret[i] = uint32(i+1) * 0x9e3779b9
	}
	prefixes.Configure(hook, rules)
	t := prefixes.Tables{
		Hook: hook, Change: &bpf.AbiChange{}, Views: []bpf.AbiView{0: {}, 1: {Mix4: 1 << 40, Mix6: [2]uint64{3, 5}}},
		Lines4: make([]bpf.AbiPrefixes4, hook.Prefixes4Mask+1), Lines6: make([]bpf.AbiPrefixes6, hook.Prefixes6Mask+1),
		Filter: make([]uint64, hook.FilterMask+1),
	}
	s := &buckets{}
	s.hook = hook
	write := func(values ...any) {
		for _, v := range values {
			binary.Write(w, binary.NativeEndian, v)
		}
	}
	limit := policy.Rule{Rate: 8_000_000, Capacity: 100_000}
	penalty, queue := limit, limit
	penalty.Algorithm, penalty.Penalty = policy.Leaky, policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Second}
	penalty.Framing, penalty.Each = policy.Framing{Overhead: -4, MPU: 64}, policy.Each{Kind: policy.EachSubnet, Bits: 56}
	queue.Excess, queue.Queue, queue.Order, queue.ECNAbove = policy.Delay, 50_000, policy.SparseFirst, policy.ECNAbove(time.Millisecond)
	member := limit
	member.Within, member.Weight, member.Guarantee, member.Members = "pool", 3, 1_000_000, 7
	member.Share = policy.Share{Kind: policy.ShareSubnet, Bits: 64}
	also := limit
	also.Also = policy.Also{Packets: 9, PacketBurst: 5, Flows: 4, FlowBurst: 3, Quota: policy.Quota{Bytes: 1 << 40, Period: "30d"}, Then: 8000}
	samples := []policy.Rule{limit, penalty, queue, {Rate: policy.Unlimited}, member, also}
	for next, ok := also.Chained(); ok; next, ok = next.Chained() {
		samples = append(samples, next)
	}
	for i, r := range samples {
		v := params.Version{AbiParams: new(bpf.AbiParams), AbiColdParams: new(bpf.AbiColdParams)}
		v.Encode(r, 1, 2, params.IDs{3, 4, 5})
		write(v.AbiParams, v.AbiColdParams)
		for j, address := range []string{"192.0.2.77", "2001:db8:1:2:3:4:5:6"} {
			addr := netip.MustParseAddr(address)
			prefix, _ := addr.Prefix(max(addr.BitLen()-9*i, 0))
			t.Place(t.Key(1, prefix), uint32(2*i+j)) // there is room
			flow := Flow{Src: addr, Dst: addr.Next(), Proto: 17, SrcPort: 5000, DstPort: 53}
			for _, p := range s.places(makeKey(uint32(i), policy.Each{Kind: policy.EachKind(i % 4)}, policy.MatchDst, flow), uint32(j)) {
				write(p.line, p.fingerprint)
			}
		}
	}
	write(t.Lines4, t.Lines6, t.Filter)
	write(labels.Parts(policy.Rule{
		Label: policy.Label{
			Plan: "plan", Name: "name", Note: "note", Host: policy.MAC{8}, Waits: 9, Line: "line",
			Owner: policy.Owner{Device: "device", Direction: policy.Egress, Host: "host"},
		},
		Cluster: policy.Cluster{Name: "cluster", Weight: 2, Floor: 3, Share: 4, Safe: 5},
		Adapt:   policy.Adapt{Min: 6, Above: 7, To: "192.0.2.1"},
		Also:    policy.Also{Packets: 8, PacketBurst: 9, Flows: 1, FlowBurst: 2, Quota: policy.Quota{Bytes: 3, Period: "day"}, Grace: 4, Zone: "UTC", Then: 5},
	}))
}
