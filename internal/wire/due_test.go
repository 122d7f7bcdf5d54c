//go:build guest

package wire

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A watch is a program after ours on the egress of a device. It records the departure
// time of each packet.
type watch struct {
	t            *testing.T
	count, notes *ebpf.Map
}

// Offsets in a note, which is the record of a packet.
const (
	noteNow   = 0 // the time of the program
	noteDue   = 8 // the departure time; 0 for none
	noteFrame = 16
	noteStart = 82 // bytes of the frame, up to the end of our payload over IPv6 with a tag
	noteBytes = 104
)

// watch records up to the given number of packets.
func (r *rig) watch(device string, packets int) *watch {
	r.t.Helper()
	w := &watch{t: r.t}
	var err error
	w.count, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	testenv.Must(r.t, err)
	r.t.Cleanup(func() { w.count.Close() })
	w.notes, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: noteBytes, MaxEntries: uint32(packets)})
	testenv.Must(r.t, err)
	r.t.Cleanup(func() { w.notes.Close() })
	const (
		skbTstamp = 152 // of struct __sk_buff
		unspec    = -1  // TC_ACT_UNSPEC
	)
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.LoadMapPtr(asm.R1, w.count.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
			// Not atomic: these guests have one CPU.
			asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
			asm.StoreMem(asm.RFP, -4, asm.R1, asm.Word),
			asm.Add.Imm(asm.R1, 1),
			asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
			asm.LoadMapPtr(asm.R1, w.notes.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
			asm.Mov.Reg(asm.R7, asm.R0),
			asm.FnKtimeGetNs.Call(),
			asm.StoreMem(asm.R7, noteNow, asm.R0, asm.DWord),
			asm.LoadMem(asm.R1, asm.R6, skbTstamp, asm.DWord),
			asm.StoreMem(asm.R7, noteDue, asm.R1, asm.DWord),
			asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, 0),
			asm.Mov.Reg(asm.R3, asm.R7), asm.Add.Imm(asm.R3, noteFrame),
			asm.Mov.Imm(asm.R4, noteStart),
			asm.FnSkbLoadBytes.Call(),
			asm.Mov.Imm(asm.R0, unspec).WithSymbol("out"),
			asm.Return(),
		},
	})
	testenv.Must(r.t, err)
	r.t.Cleanup(func() { program.Close() })
	r.in(r.router, func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		clsact := netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0)}
		if err := netlink.QdiscReplace(&netlink.Clsact{QdiscAttrs: clsact}); err != nil {
			return fmt.Errorf("add a clsact qdisc: %w", err)
		}
		return netlink.FilterReplace(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Protocol: unix.ETH_P_ALL,
				Priority: 60000, // after ours
			},
			Fd: program.FD(), Name: "watch", DirectAction: true,
		})
	})
	return w
}

// A name identifies one of our UDP packets.
type name struct {
	from, to netip.Addr
	number   uint64
}

// into sets the due time of each of our packets.
func (w *watch) into(packets []packet) {
	w.t.Helper()
	var count uint64
	testenv.Must(w.t, w.count.Lookup(uint32(0), &count))
	if count > uint64(w.notes.MaxEntries()) {
		w.t.Fatalf("%d packets to record, but there is only room for %d", count, w.notes.MaxEntries())
	}
	due, seen := make(map[name]time.Duration, count), make(map[name]time.Duration, count)
	note := make([]byte, noteBytes)
	for i := range uint32(count) {
		testenv.Must(w.t, w.notes.Lookup(i, note))
		var p packet
		if p.read(note[noteFrame:][:noteStart]) {
			its := name{p.from, p.to, p.number}
			due[its], seen[its] = time.Duration(binary.NativeEndian.Uint64(note[noteDue:])), time.Duration(binary.NativeEndian.Uint64(note[noteNow:]))
		}
	}
	for i := range packets {
		p := &packets[i]
		if p.protocol != unix.IPPROTO_UDP {
			continue
		}
		departs, ok := due[name{p.from, p.to, p.number}]
		if !ok {
			w.t.Fatalf("packet %d to %v arrived, but the watch did not see it", p.number, p.to)
		}
		p.due, p.delayed = cmp.Or(departs, seen[name{p.from, p.to, p.number}]), departs > 0
	}
}
