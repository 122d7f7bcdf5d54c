package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// A counter counts the frames that arrive at the far end, at layer 2, the same
// for whichever limiter they have passed.
type counter struct {
	counts *ebpf.Map
}

// Arrivals are what has arrived until the last frame, and when that was.
type arrivals struct {
	Packets, Bytes uint64
	Last           uint64 // ns of the system's monotonic clock
}

// count makes the far end count what arrives, and then say that of it.
func (a *arena) count(verdict int32) (*counter, error) {
	m, err := a.newMap(ebpf.MapSpec{Name: "counts", Type: ebpf.Array, KeySize: 4, ValueSize: 24, MaxEntries: 1})
	if err != nil {
		return nil, err
	}
	return &counter{m}, a.assemble(a.far, "count", slices.Concat(
		asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.FnKtimeGetNs.Call(),
			asm.Mov.Reg(asm.R7, asm.R0),
			asm.StoreImm(asm.R10, -4, 0, asm.Word),
		},
		lookup(m, -4, "out"),
		asm.Instructions{
			asm.LoadMem(asm.R2, asm.R6, skbLength, asm.Word),
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.StoreMem(asm.R0, 16, asm.R7, asm.DWord),
			asm.Add.Imm(asm.R0, 8),
			asm.StoreXAdd(asm.R0, asm.R2, asm.DWord),
			asm.Mov.Imm(asm.R0, verdict).WithSymbol("out"),
			asm.Return(),
		},
	))
}

// read returns a count of which no part is newer than the others.
func (c *counter) read() (now arrivals, err error) {
	for {
		var again arrivals
		if err := c.counts.Lookup(uint32(0), &now); err != nil {
			return now, fmt.Errorf("read the counter: %w", err)
		}
		time.Sleep(2 * time.Microsecond) // longer than the program takes for a frame
		if err := c.counts.Lookup(uint32(0), &again); err != nil {
			return now, fmt.Errorf("read the counter: %w", err)
		}
		if now == again {
			return now, nil
		}
	}
}
