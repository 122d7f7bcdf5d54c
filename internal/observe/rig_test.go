package observe

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/live/livetest"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A rig is an Observer whose programs no device runs. Time is that of the packets.
type rig struct {
	testing.TB
	*Observer
	pairs map[policy.Direction]pair
	now   time.Duration
}

// device is that of test runs: loopback.
const device, deviceIndex = "lo", 1

func newRig(tb testing.TB, o Options, rules ...*live.Item) *rig {
	tb.Helper()
	testenv.Root(tb)
	o.virtual = true
	w, err := Start(o)
	testenv.Must(tb, err)
	r := &rig{tb, w, map[policy.Direction]pair{}, 1e12}
	tb.Cleanup(func() {
		clear(w.hooks.at)
		testenv.Must(tb, w.Close())
	})
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		w.hooks.at[hookKey{device, d}] = &hook{index: deviceIndex, match: d.FarSide()}
		r.pairs[d], err = w.objects.pair(d, d.FarSide(), 14)
		testenv.Must(tb, err)
	}
	r.follow(rules...)
	return r
}

// follow is Follow at the time of the packets.
func (r *rig) follow(rules ...*live.Item) {
	for _, it := range rules {
		r.note(it, uint64(r.now))
	}
}

func ruleOf(direction, cidr string) *live.Item {
	d, _ := policy.ParseDirection(direction)
	return itemsOf(policy.Table{Device: device, Direction: d, Match: d.FarSide(), Rules: []policy.Rule{{Prefix: netip.MustParsePrefix(cidr)}}})[0]
}

// itemsOf are the rules of tables.
func itemsOf(tables ...policy.Table) []*live.Item {
	return livetest.Scene(tables...).Read(1, func(l *live.Limit) live.Item { return live.Item{Limit: l} }).Once()
}

// A tcp is a TCP packet.
type tcp struct {
	src, dst     string // with ports
	seq, ack     uint32
	flags        uint8
	tsval, tsecr uint32
	noTS         bool
	payload      int
	tags         int
	ipOptions    bool
	options      []byte // of TCP, instead of timestamps
	gso          int    // bytes in a segment, of a GSO packet
}

const (
	fin, syn, rst, psh, ack = 1, 2, 4, 8, 16
)

func (p tcp) frame() []byte {
	src, dst := netip.MustParseAddrPort(p.src), netip.MustParseAddrPort(p.dst)
	frame := make([]byte, 12, 128+p.payload)
	for range p.tags {
		frame = append(frame, 0x81, 0, 0, 7)
	}
	h := make([]byte, 20)
	binary.BigEndian.PutUint16(h[0:], src.Port())
	binary.BigEndian.PutUint16(h[2:], dst.Port())
	binary.BigEndian.PutUint32(h[4:], p.seq)
	binary.BigEndian.PutUint32(h[8:], p.ack)
	h[13] = p.flags
	switch {
	case p.options != nil:
		h = append(h, p.options...)
	case !p.noTS:
		h = append(h, 1, 1, 8, 10)
		h = binary.BigEndian.AppendUint32(h, p.tsval)
		h = binary.BigEndian.AppendUint32(h, p.tsecr)
	}
	h[12] = byte(len(h) / 4 << 4)
	length := len(h) + p.payload
	if src.Addr().Is4() {
		ip := make([]byte, 20)
		ip[0], ip[8], ip[9] = 0x45, 64, 6
		if p.ipOptions {
			ip[0] = 0x46
			ip = append(ip[:20], 1, 1, 1, 1)
		}
		binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+length))
		copy(ip[12:], src.Addr().AsSlice())
		copy(ip[16:], dst.Addr().AsSlice())
		frame = append(append(frame, 8, 0), ip...)
	} else {
		ip := make([]byte, 40)
		ip[0], ip[6], ip[7] = 0x60, 6, 64
		if p.ipOptions {
			ip[6] = 0 // hop-by-hop options, with padding
			length += 8
		}
		binary.BigEndian.PutUint16(ip[4:], uint16(length))
		copy(ip[8:], src.Addr().AsSlice())
		copy(ip[24:], dst.Addr().AsSlice())
		frame = append(append(frame, 0x86, 0xdd), ip...)
		if p.ipOptions {
			frame = append(frame, 6, 0, 1, 4, 0, 0, 0, 0)
		}
	}
	frame = append(append(frame, h...), make([]byte, p.payload)...)
	// Ethernet pads short frames.
	return append(frame, make([]byte, max(0, 60-len(frame)))...)
}

const (
	next = uint32(0xffffffff) // TCX_NEXT
)

func (r *rig) run(p *ebpf.Program, t tcp) {
	r.Helper()
	frame := t.frame()
	context := make([]byte, 192)
	binary.NativeEndian.PutUint64(context[152:], uint64(r.now))
	if t.gso > 0 {
		binary.NativeEndian.PutUint32(context[164:], uint32((t.payload+t.gso-1)/t.gso))
		binary.NativeEndian.PutUint32(context[176:], uint32(t.gso))
	}
	after := make([]byte, len(frame)+64)
	o := ebpf.RunOptions{Data: frame, DataOut: after, Context: context}
	verdict, err := p.Run(&o)
	if err != nil {
		r.Fatalf("run with %d bytes: %v", len(frame), err)
	}
	if verdict != next || string(o.DataOut) != string(frame) {
		r.Errorf("a packet was changed, or its verdict is %d", int32(verdict))
	}
}

// pass sends a packet, which no program drops.
func (r *rig) pass(d policy.Direction, t tcp) {
	r.Helper()
	r.run(r.pairs[d].before, t)
	r.run(r.pairs[d].behind, t)
}

// refuse sends a packet that another program drops.
func (r *rig) refuse(d policy.Direction, t tcp) {
	r.Helper()
	r.run(r.pairs[d].before, t)
}

func (r *rig) wait(d time.Duration) { r.now += d }

func keyOf(device, direction, network string) live.Key {
	return live.Key{Device: device, Direction: direction, Network: network}
}

// parts reads what was measured of a rule.
func (r *rig) parts(direction, cidr string) Parts {
	r.Helper()
	got, err := r.Read()
	testenv.Must(r, err)
	if p := got.Rules[keyOf(device, direction, cidr)]; p != nil {
		return *p
	}
	return Parts{}
}
