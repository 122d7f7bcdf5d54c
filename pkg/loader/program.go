package loader

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/maps"
)

// programName is that of the program in the kernel.
const programName = bpf.ShapectlProgShapectl

// hookConstant is the upper byte of HOOK_CONSTANT of bpf/maps.h.
const hookConstant = 0x5c

// ErrPerfmon means that the kernel's verifier refused the program of a process that lacks CAP_PERFMON, of
// which it demands more: that nothing be read past a limit even in branches that are not taken. Before
// Linux 6.17 it refuses what it could also have made safe by itself.
var ErrPerfmon = errors.New("this kernel's verifier wants CAP_PERFMON, too")

// Load loads the program onto a set of maps.
func Load(set *maps.Set) (*ebpf.Program, error) {
	if err := step.Try("load a program"); err != nil {
		return nil, err
	}
	spec, err := bpf.LoadShapectl()
	if err != nil {
		return nil, fmt.Errorf("read the built-in program: %w", err)
	}
	for name, m := range set.Replacements() {
		spec.Maps[name].MaxEntries, spec.Maps[name].ValueSize = m.MaxEntries(), m.ValueSize()
	}
	if err := writeConstants(spec.Programs[programName].Instructions, set.Hook()); err != nil {
		return nil, err
	}
	collection, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: set.Replacements()})
	if err != nil {
		var refused *ebpf.VerifierError
		if errors.As(err, &refused) {
			if have, _ := Capabilities(); have&(1<<unix.CAP_PERFMON|1<<unix.CAP_SYS_ADMIN) == 0 {
				return nil, fmt.Errorf("load the program: %w: %w", ErrPerfmon, err)
			}
			return nil, fmt.Errorf("load the program: the kernel's verifier refused it: %w", err)
		}
		return nil, fmt.Errorf("load the program: %w", err)
	}
	defer collection.Close()
	return collection.DetachProgram(programName), nil
}

// writeConstants gives the instructions that stand for fields of the hook's
// settings (HOOK of bpf/maps.h) the fields' values.
func writeConstants(instructions asm.Instructions, hook bpf.AbiHook) error {
	settings := unsafe.Slice((*byte)(unsafe.Pointer(&hook)), unsafe.Sizeof(hook))
	for i := range instructions {
		ins := &instructions[i]
		if ins.OpCode != asm.Mov.Op32(asm.ImmSource) || ins.Constant>>24 != hookConstant {
			continue
		}
		offset := int(ins.Constant & 0xffff)
		switch size := ins.Constant >> 16 & 0xff; {
		case size == 1 && offset < len(settings):
			ins.Constant = int64(settings[offset])
		case size == 4 && offset+4 <= len(settings):
			ins.Constant = int64(int32(binary.NativeEndian.Uint32(settings[offset:])))
		default:
			return fmt.Errorf("read the built-in program: instruction %d asks for %d bytes at %d of the settings", i, size, offset)
		}
	}
	return nil
}

// build tells the program of this build from that of another.
var build = sync.OnceValues(func() (id [12]byte, err error) {
	spec, err := bpf.LoadShapectl()
	if err != nil {
		return id, fmt.Errorf("read the built-in program: %w", err)
	}
	hash := sha256.New()
	if err := spec.Programs[programName].Instructions.Marshal(hash, spec.ByteOrder); err != nil {
		return id, fmt.Errorf("read the built-in program: %w", err)
	}
	copy(id[:], hash.Sum(nil))
	return id, nil
})
