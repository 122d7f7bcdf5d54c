// Package program loads the eBPF program with the maps of a namespace, and the small
// program of each hook that calls it.
package program

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Name is the kernel's name of the program and of its callers.
const Name = bpf.ShapectlProgShapectl

// hookConstant is the upper byte of HOOK_CONSTANT of bpf/hook.h.
const hookConstant = 0x5c

// Load loads the programs with the maps of a store, for hooks with the constants in kind: link header, direction and matched
// address. It returns the one that a hook calls.
func Load(store *maps.Store, kind bpf.AbiHook) (*ebpf.Program, error) {
	if err := step.Try("load a program"); err != nil {
		return nil, err
	}
	spec, err := bpf.Spec()
	if err != nil {
		return nil, err
	}
	f := Kind(kind.Kind).Family()
	maps := f.maps(store)
	p, err := load(spec, f.program, maps, kind)
	if err != nil {
		return nil, err
	}
	climb, err := load(spec, f.climb, maps, kind)
	if err == nil {
		if err = maps[bpf.ShapectlMapPrograms].Put(kind.Kind, climb); err != nil {
			err = fmt.Errorf("put a program in place: %w", err)
		}
		climb.Close()
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// load loads one of the programs of the object.
func load(spec *ebpf.CollectionSpec, name string, maps map[string]*ebpf.Map, kind bpf.AbiHook) (*ebpf.Program, error) {
	spec = spec.Copy()
	spec.Programs = map[string]*ebpf.ProgramSpec{name: spec.Programs[name]}
	for name, m := range maps {
		spec.Maps[name].MaxEntries, spec.Maps[name].ValueSize = m.MaxEntries(), m.ValueSize()
	}
	if err := WriteConstants(spec.Programs[name].Instructions, kind); err != nil {
		return nil, err
	}
	options := ebpf.CollectionOptions{MapReplacements: maps}
	collection, err := ebpf.NewCollectionWithOptions(spec, options)
	if kind.Nat != 0 && errors.Is(err, ebpf.ErrNotSupported) {
		netinfo.LoadConntrack()
		if collection, err = ebpf.NewCollectionWithOptions(spec, options); errors.Is(err, ebpf.ErrNotSupported) {
			return nil, fmt.Errorf("load the program: nat is %w without conntrack; load the module nf_conntrack, or leave nat out", ebpf.ErrNotSupported)
		}
	}
	if err != nil {
		var refused *ebpf.VerifierError
		if errors.As(err, &refused) {
			return nil, fmt.Errorf("load the program: the kernel's verifier refused it: %w", err)
		}
		return nil, fmt.Errorf("load the program: %w", err)
	}
	defer collection.Close()
	return collection.DetachProgram(name), nil
}

// WriteConstants replaces the placeholders for fields of the hook's settings (HOOK of
// bpf/hook.h) by their values. Without nat, it removes what the programs ask of conntrack: the kernel may not have it, and to find
// its types takes long.
func WriteConstants(instructions asm.Instructions, hook bpf.AbiHook) error {
	settings := unsafe.Slice((*byte)(unsafe.Pointer(&hook)), unsafe.Sizeof(hook))
	for i := range instructions {
		ins := &instructions[i]
		if hook.Nat == 0 && (ins.IsKfuncCall() || btf.CORERelocationMetadata(ins) != nil) {
			*ins = asm.Mov.Imm(asm.R0, 0).WithSource(ins.Source())
		}
		if ins.OpCode != asm.Mov.Op32(asm.ImmSource) && ins.OpCode != asm.And.Op32(asm.ImmSource) || ins.Constant>>24 != hookConstant {
			continue
		}
		offset := int(ins.Constant & 0xffff)
		switch size := ins.Constant >> 16 & 0xff; {
		case size == 1 && offset < len(settings):
			ins.Constant = int64(settings[offset])
		case size == 4 && offset+4 <= len(settings):
			ins.Constant = int64(int32(binary.NativeEndian.Uint32(settings[offset:])))
		default:
			return fmt.Errorf("read the built-in program: instruction %d needs %d bytes at offset %d of the settings", i, size, offset)
		}
	}
	return nil
}

// Build identifies the programs of this build by a hash of their code and of what that refers to. To parse the rest of the object
// takes several ms.
var Build = sync.OnceValues(func() (id [16]byte, err error) {
	object, err := elf.NewFile(bytes.NewReader(bpf.Object()))
	if err != nil {
		return id, fmt.Errorf("read the built-in program: %w", err)
	}
	hash := sha256.New()
	isCode := func(s *elf.Section) bool { return s.Flags&elf.SHF_EXECINSTR != 0 }
	for _, s := range object.Sections {
		if !isCode(s) && !(s.Type == elf.SHT_REL && isCode(object.Sections[s.Info])) {
			continue
		}
		if _, err := io.Copy(hash, s.Open()); err != nil {
			return id, fmt.Errorf("read the built-in program: %w", err)
		}
	}
	copy(id[:], hash.Sum(nil))
	return id, nil
})

// Capabilities returns the effective capabilities of the calling thread as bits.
func Capabilities() (uint64, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3} // which has two words
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return 0, fmt.Errorf("read the capabilities of this process: %w", err)
	}
	return uint64(data[1].Effective)<<32 | uint64(data[0].Effective), nil
}

// Missing names the capabilities without which a process with these can load no program, and attach none. Without
// CAP_PERFMON the verifier also checks what a CPU may do speculatively, and refuses the program.
func Missing(have uint64) (names []string) {
	if have&(1<<unix.CAP_SYS_ADMIN) == 0 { // which includes both
		if have&(1<<unix.CAP_BPF) == 0 {
			names = append(names, "CAP_BPF")
		}
		if have&(1<<unix.CAP_PERFMON) == 0 {
			names = append(names, "CAP_PERFMON")
		}
	}
	if have&(1<<unix.CAP_NET_ADMIN) == 0 {
		names = append(names, "CAP_NET_ADMIN")
	}
	return names
}

// A Kind is a kind of hook. The program of a kind has the properties of these hooks as
// constants. A Kind is the program's index in the map of programs, below Kinds.
type Kind uint32

const (
	ingress Kind = 1 << iota
	matchSrc
	noLinkHeader
	cgroup
	Kinds // the number of kinds: KINDS of abi.h
)

// A Family is the kinds whose programs have the same type, which those in one map of programs must have.
type Family struct {
	Pin            string // of the map of programs that hooks call
	Called         string // the pin of the map of those that these call
	program, climb string // of the object
	maps           func(*maps.Store) map[string]*ebpf.Map
	programType    uint32
	attachTo       uint32           // the type of attachment that the programs are loaded for
	before         asm.Instructions // of the program of a hook
	next           int32            // what that returns if it can call none
}

// Families are the families. The kernel empties each of their maps with its last pin.
var Families = [...]*Family{
	{
		Pin: "kinds", Called: "programs", program: Name, climb: bpf.ShapectlProgClimb, maps: (*maps.Store).Replacements,
		programType: unix.BPF_PROG_TYPE_SCHED_CLS, next: -1, // TCX_NEXT
	},
	{
		Pin: "kinds-cgroup", Called: "programs-cgroup", program: bpf.ShapectlProgShapectlCgroup, climb: bpf.ShapectlProgClimbCgroup, maps: (*maps.Store).OfCgroups,
		programType: unix.BPF_PROG_TYPE_CGROUP_SKB, attachTo: unix.BPF_CGROUP_INET_EGRESS, next: 1,
		before: asm.Instructions{ // local traffic passes: every namespace has its loopback device at this index
			asm.LoadMem(asm.R2, asm.R1, ifindexInSKB, asm.Word),
			asm.JEq.Imm(asm.R2, netinfo.Loopback, "next"),
		},
	},
}

// Family is that of the kind.
func (k Kind) Family() *Family { return Families[k&cgroup/cgroup] }

// FamilyOf is that of the hooks of a device.
func FamilyOf(index int) *Family { return KindOf(0, 0, netinfo.Device{Index: index}).Family() }

// KindOf returns the kind of hooks of a device. Its packets have a link header of 14 bytes, or none.
func KindOf(d policy.Direction, match policy.Match, dev netinfo.Device) (k Kind) {
	if d == policy.Ingress {
		k |= ingress
	}
	if match == policy.MatchSrc {
		k |= matchSrc
	}
	if dev.L2Bytes == 0 {
		k |= noLinkHeader
	}
	if dev.IsCgroup() {
		k |= cgroup
	}
	return k
}

// Settings returns the settings of a store with the constants of a kind.
func (k Kind) Settings(of bpf.AbiHook) bpf.AbiHook {
	of.Kind, of.L2Bytes, of.Ingress, of.MatchSrc = uint32(k), netinfo.EthernetBytes, uint8(k&ingress/ingress), uint8(k&matchSrc/matchSrc)
	if k&noLinkHeader != 0 {
		of.L2Bytes = 0
	}
	of.AddsHeaders = uint32(k & (ingress | cgroup))
	if k&cgroup != 0 {
		of.Nat = 0 // such programs may not ask conntrack
	}
	return of
}

// NewKinds creates an empty map of programs.
func NewKinds() (*ebpf.Map, error) {
	if err := step.Try("make a map"); err != nil {
		return nil, err
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "shapectl_kinds", Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: uint32(Kinds),
	})
	if err != nil {
		return nil, fmt.Errorf("make the map of programs: %w", err)
	}
	return m, nil
}

// LoadCaller loads the program that a hook attaches. It stores the number of the hook's
// view and calls the program of its kind. The kernel verifies it quickly. The device's
// index cannot identify the view: a device that moves to another namespace keeps its
// link, and may get an index that another device has here.
func LoadCaller(kinds *ebpf.Map, kind Kind, view uint32) (*ebpf.Program, error) {
	if err := step.Try("load a program"); err != nil {
		return nil, err
	}
	f := kind.Family()
	var code bytes.Buffer
	err := append(slices.Clone(f.before),
		asm.Mov.Imm32(asm.R2, int32(view)),
		asm.StoreMem(asm.R1, viewInSKB, asm.R2, asm.Word),
		asm.LoadMapPtr(asm.R2, kinds.FD()),
		asm.Mov.Imm(asm.R3, int32(kind)),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, f.next).WithSymbol("next"),
		asm.Return(),
	).Marshal(&code, binary.LittleEndian)
	if err != nil {
		return nil, fmt.Errorf("load the program of a hook: %w", err)
	}
	// ebpf.NewProgram first reads all mounts, to find a BPF token, and loads programs to find out what the kernel can do.
	attributes := struct { // union bpf_attr of linux/bpf.h
		programType, count uint32
		code, license      *byte
		logAndVersion      [3]uint64
		name               [16]byte
		ifindex, attachTo  uint32
	}{
		programType: f.programType, count: uint32(code.Len() / asm.InstructionSize), code: &code.Bytes()[0],
		license: unsafe.StringData("Dual BSD/GPL\x00"), attachTo: f.attachTo,
	}
	copy(attributes.name[:15], Name)
	fd, errno := uintptr(0), unix.EAGAIN
	for tries := 0; errno == unix.EAGAIN && tries < 30; tries++ { // a signal ends the verification
		fd, _, errno = unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_LOAD, uintptr(unsafe.Pointer(&attributes)), unsafe.Sizeof(attributes))
	}
	if errno != 0 {
		return nil, fmt.Errorf("load the program of a hook: %w", errno)
	}
	return ebpf.NewProgramFromFD(int(fd))
}

// These are the offsets of ifindex and of cb[VIEW_CB] of bpf/abi.h in struct __sk_buff.
const (
	ifindexInSKB = 40
	viewInSKB    = 48 + 4*4
)
