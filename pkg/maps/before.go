package maps

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/shapectl/shapectl/internal/step"
)

// ErrLate means that the moment for which a change was prepared is over or too near. Nothing was changed.
var ErrLate = errors.New("the moment for which the change was prepared is over")

// notice is the least time between a store of before and its moment. Interrupts may delay the program that stores.
const notice = time.Millisecond

// before stores when a change reverts and what its phase is, at least notice before a moment (ns). A process that
// stores could be preempted after its last look at the clock, for any time. So a program does both: the kernel does
// not preempt it. The error may wrap ErrLate.
func (p *progress) before(moment uint64, what string, until uint64, to phase) error {
	if p.virtual {
		store(what, &p.change.Until, until)
		store(what, &p.change.Phase, to)
		return nil
	}
	if err := step.Try(what); err != nil {
		return err
	}
	const late = "late"
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "shapectl_before", Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.FnKtimeGetNs.Call(),
			asm.LoadImm(asm.R1, int64(moment-uint64(notice)), asm.DWord),
			asm.JGT.Reg(asm.R0, asm.R1, late),
			asm.LoadMapValue(asm.R2, p.pinned.FD(), 0),
			asm.LoadImm(asm.R1, int64(until), asm.DWord),
			asm.StoreMem(asm.R2, int16(unsafe.Offsetof(p.change.Until)), asm.R1, asm.DWord),
			asm.Mov.Imm(asm.R1, int32(to)),
			asm.StoreMem(asm.R2, int16(unsafe.Offsetof(p.change.Phase)), asm.R1, asm.DWord),
			asm.Mov.Imm(asm.R0, 0),
			asm.Return(),
			asm.Mov.Imm(asm.R0, 1).WithSymbol(late),
			asm.Return(),
		},
	})
	if err != nil {
		return fmt.Errorf("%s: load a program: %w", what, err)
	}
	defer program.Close()
	isLate, err := program.Run(&ebpf.RunOptions{Data: make([]byte, 14)})
	switch {
	case err != nil:
		return fmt.Errorf("%s: run a program: %w", what, err)
	case isLate != 0:
		return ErrLate
	}
	return nil
}
