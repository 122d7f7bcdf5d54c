package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// Programs for comparison. They parse a plain IPv4 or IPv6 frame with UDP, and have no
// checks and counters beyond their purpose.

// Offsets in a frame, and in struct __sk_buff (linux/bpf.h).
const (
	ethernetBytes = 14
	ipv4Protocol  = ethernetBytes + 9
	ipv4Source    = ethernetBytes + 12
	ipv4Dest      = ethernetBytes + 16
	ipv4Ports     = ethernetBytes + 20
	ipv6Source    = ethernetBytes + 8
	ipv6Dest      = ethernetBytes + 24
	ipv6Ports     = ethernetBytes + 40

	skbLength  = 0
	skbData    = 76
	skbDataEnd = 80
)

const (
	next = -1 // TCX_NEXT: the next program sees the packet, as with conforming packets of shapectl
	drop = 2  // TCX_DROP
)

// owned are the resources of a case.
type owned []io.Closer

func (o *owned) keep(c io.Closer) { *o = append(*o, c) }

func (o *owned) Close() error {
	var errs []error
	for _, c := range *o {
		errs = append(errs, c.Close())
	}
	*o = nil
	return errors.Join(errs...)
}

func (o *owned) program(name string, code asm.Instructions) (*ebpf.Program, error) {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: name, Type: ebpf.SchedCLS, Instructions: code, License: "Dual BSD/GPL",
	})
	if err != nil {
		return nil, fmt.Errorf("load the program %s: %w", name, err)
	}
	o.keep(p)
	return p, nil
}

func (o *owned) newMap(spec ebpf.MapSpec) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(&spec)
	if err != nil {
		return nil, fmt.Errorf("make a map of %d entries (%v): %w", spec.MaxEntries, spec.Type, err)
	}
	o.keep(m)
	return m, nil
}

func exit() asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R0, next).WithSymbol("exit"), asm.Return()}
}

// frame points R6 to a packet if it has so many bytes, or jumps to "exit".
func frame(bytes int32) asm.Instructions {
	return asm.Instructions{
		asm.LoadMem(asm.R6, asm.R1, skbData, asm.Word),
		asm.LoadMem(asm.R2, asm.R1, skbDataEnd, asm.Word),
		asm.Mov.Reg(asm.R3, asm.R6),
		asm.Add.Imm(asm.R3, bytes),
		asm.JGT.Reg(asm.R3, asm.R2, "exit"),
	}
}

// lookup looks up the key at R10 plus an offset, or jumps to a label.
func lookup(m *ebpf.Map, key int32, missing string) asm.Instructions {
	return asm.Instructions{
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.R10),
		asm.Add.Imm(asm.R2, key),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, missing),
	}
}

// copyWords copies words of a packet (R6) to the stack (R10).
func copyWords(from, to int16, words int) (code asm.Instructions) {
	for i := range int16(words) {
		code = append(code,
			asm.LoadMem(asm.R1, asm.R6, from+4*i, asm.Word),
			asm.StoreMem(asm.R10, to+4*i, asm.R1, asm.Word),
		)
	}
	return code
}

// trieProgram looks the destination up in an LPM trie. The code then has the number of the
// prefix in R0.
func (o *owned) trieProgram(trie *ebpf.Map, ipv6 bool, then asm.Instructions) (*ebpf.Program, error) {
	at, words := int16(ipv4Dest), 1
	if ipv6 {
		at, words = ipv6Dest, 4
	}
	const key = -24
	return o.program("trie", slices.Concat(
		frame(int32(at)+4*int32(words)),
		asm.Instructions{asm.StoreImm(asm.R10, key, 32*int64(words), asm.Word)},
		copyWords(at, key+4, words),
		lookup(trie, key, "exit"),
		asm.Instructions{asm.LoadMem(asm.R0, asm.R0, 0, asm.Word)},
		then,
		exit(),
	))
}

// chargeWord reads the clock and charges the word with the number in R0: GCRA at a fixed rate,
// with one compare-and-swap.
func chargeWord(words *ebpf.Map) asm.Instructions {
	const (
		key   = -32
		cost  = 1
		burst = 1 << 30 // ns: never used up
	)
	return slices.Concat(
		asm.Instructions{
			asm.StoreMem(asm.R10, key, asm.R0, asm.Word),
			asm.FnKtimeGetNs.Call(),
			asm.Mov.Reg(asm.R8, asm.R0),
		},
		lookup(words, key, "exit"),
		asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R0),
			asm.LoadMem(asm.R0, asm.R6, 0, asm.DWord),
			asm.Mov.Reg(asm.R1, asm.R0),
			asm.JGT.Reg(asm.R1, asm.R8, "not_empty"),
			asm.Mov.Reg(asm.R1, asm.R8),
			asm.Add.Imm(asm.R1, cost).WithSymbol("not_empty"),
			asm.Mov.Reg(asm.R2, asm.R1),
			asm.Sub.Reg(asm.R2, asm.R8),
			asm.JGT.Imm(asm.R2, burst, "exit"),
			asm.CmpXchg.Mem(asm.R6, asm.R1, asm.DWord, 0),
		},
	)
}

// flowProgram is a limiter as they are often written: a hash map from the 5-tuple to the
// TAT of the flow. It has no atomic operation: two CPUs admit more than one.
func (o *owned) flowProgram(flows *ebpf.Map) (*ebpf.Program, error) {
	const (
		key, value = -16, -24
		burst      = 1 << 30 // ns: never used up
		perByte    = 4       // 2^-perByte ns a byte
	)
	return o.program("flows", slices.Concat(
		asm.Instructions{asm.LoadMem(asm.R7, asm.R1, skbLength, asm.Word)},
		frame(ipv4Ports+4),
		copyWords(ipv4Source, key, 2),
		copyWords(ipv4Ports, key+8, 1),
		asm.Instructions{
			asm.LoadMem(asm.R1, asm.R6, ipv4Protocol, asm.Byte),
			asm.StoreMem(asm.R10, key+12, asm.R1, asm.Word),
			asm.FnKtimeGetNs.Call(),
			asm.Mov.Reg(asm.R8, asm.R0),
			asm.RSh.Imm(asm.R7, perByte),
		},
		lookup(flows, key, "new"),
		asm.Instructions{
			asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
			asm.JGT.Reg(asm.R1, asm.R8, "not_empty"),
			asm.Mov.Reg(asm.R1, asm.R8),
			asm.Add.Reg(asm.R1, asm.R7).WithSymbol("not_empty"),
			asm.Mov.Reg(asm.R2, asm.R1),
			asm.Sub.Reg(asm.R2, asm.R8),
			asm.JGT.Imm(asm.R2, burst, "excess"),
			asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
		},
		exit(),
		asm.Instructions{
			asm.StoreMem(asm.R10, value, asm.R8, asm.DWord).WithSymbol("new"),
			asm.LoadMapPtr(asm.R1, flows.FD()),
			asm.Mov.Reg(asm.R2, asm.R10),
			asm.Add.Imm(asm.R2, key),
			asm.Mov.Reg(asm.R3, asm.R10),
			asm.Add.Imm(asm.R3, value),
			asm.Mov.Imm(asm.R4, 0), // BPF_ANY
			asm.FnMapUpdateElem.Call(),
			asm.Ja.Label("exit"),
			asm.Mov.Imm(asm.R0, drop).WithSymbol("excess"),
			asm.Return(),
		},
	))
}

// floorProgram reads the clock and one cache line, selected by a hash of the source address.
// Every limiter with as many buckets does at least this.
func (o *owned) floorProgram(lines uint32) (*ebpf.Program, error) {
	const line, key = 64, -4
	memory, err := o.newMap(ebpf.MapSpec{
		Type: ebpf.Array, KeySize: 4, ValueSize: line, MaxEntries: lines, Flags: mmapable,
	})
	if err != nil {
		return nil, err
	}
	return o.program("floor", slices.Concat(
		frame(ipv4Dest),
		asm.Instructions{
			asm.LoadMem(asm.R7, asm.R6, ipv4Source, asm.Word),
			asm.LoadImm(asm.R1, fibonacci-1<<64, asm.DWord),
			asm.Mul.Reg(asm.R7, asm.R1),
			asm.RSh.Imm(asm.R7, 32),
			asm.And.Imm(asm.R7, int32(lines-1)),
			asm.StoreMem(asm.R10, key, asm.R7, asm.Word),
			asm.FnKtimeGetNs.Call(),
		},
		lookup(memory, key, "exit"),
		asm.Instructions{
			asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
			asm.JGT.Imm(asm.R1, 0, "exit"), // wait for the loaded value
		},
		exit(),
	))
}

const (
	fibonacci = 0x9e3779b97f4a7c15
	mmapable  = 1 << 10 // BPF_F_MMAPABLE: values are in pages of 4 KiB, like large arrays of the kernel
)

// wordProgram changes one word that all CPUs share. The code has its address in R0.
func (o *owned) wordProgram(before, code asm.Instructions) (*ebpf.Program, error) {
	const key = -4
	word, err := o.newMap(ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 64, MaxEntries: 1, Flags: mmapable})
	if err != nil {
		return nil, err
	}
	return o.program("word", slices.Concat(
		before,
		asm.Instructions{asm.StoreImm(asm.R10, key, 0, asm.Word)},
		lookup(word, key, "exit"),
		code,
		exit(),
	))
}

func readClock() asm.Instructions { return asm.Instructions{asm.FnKtimeGetNs.Call()} }

func addToWord() asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R1, 1), asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, 0)}
}

// swapWord adds one by compare-and-swap, in up to eight attempts.
func swapWord() asm.Instructions {
	code := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R0)}
	for range 8 {
		code = append(code,
			asm.LoadMem(asm.R0, asm.R6, 0, asm.DWord),
			asm.Mov.Reg(asm.R7, asm.R0),
			asm.Mov.Reg(asm.R1, asm.R0),
			asm.Add.Imm(asm.R1, 1),
			asm.CmpXchg.Mem(asm.R6, asm.R1, asm.DWord, 0),
			asm.JEq.Reg(asm.R0, asm.R7, "exit"),
		)
	}
	return code
}

// A walk writes the next address of a list in random order into each packet, because a test run repeats a
// single packet. A list is cheaper than random numbers, and the CPU prefetches it.
type walk struct {
	addresses *ebpf.Map
	count     int   // a power of two
	words     int   // 32-bit words of an address
	at        int16 // offset in the frame
}

// newWalk returns a walk through addresses of one family. Their number must be a power of two.
func (o *owned) newWalk(addresses []netip.Addr, at int16) (w walk, err error) {
	w = walk{count: len(addresses), words: addresses[0].BitLen() / 32, at: at}
	w.addresses, err = o.newMap(ebpf.MapSpec{
		Type: ebpf.Array, KeySize: 4, ValueSize: uint32(4 * w.words), MaxEntries: uint32(w.count),
	})
	for i := 0; i < w.count && err == nil; i++ {
		err = w.addresses.Put(uint32(i), addresses[i].AsSlice())
	}
	return w, err
}

// before returns a program that walks, and tail-calls another one.
func (o *owned) before(w walk, then *ebpf.Program) (*ebpf.Program, error) {
	chain, err := o.newMap(ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return nil, err
	}
	if err := chain.Put(uint32(0), then); err != nil {
		return nil, err
	}
	cursor, err := o.newMap(ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		return nil, err
	}
	const key = -4
	code := slices.Concat(
		asm.Instructions{
			asm.Mov.Reg(asm.R8, asm.R1),
			asm.StoreImm(asm.R10, key, 0, asm.Word),
		},
		lookup(cursor, key, "exit"),
		asm.Instructions{
			asm.LoadMem(asm.R1, asm.R0, 0, asm.Word),
			asm.StoreMem(asm.R10, key, asm.R1, asm.Word),
			asm.Add.Imm(asm.R1, 1),
			asm.And.Imm(asm.R1, int32(w.count-1)),
			asm.StoreMem(asm.R0, 0, asm.R1, asm.Word),
		},
		lookup(w.addresses, key, "exit"),
		asm.Instructions{asm.Mov.Reg(asm.R1, asm.R8)},
		frame(int32(w.at)+4*int32(w.words)),
	)
	for i := range int16(w.words) {
		code = append(code,
			asm.LoadMem(asm.R1, asm.R0, 4*i, asm.Word),
			asm.StoreMem(asm.R6, w.at+4*i, asm.R1, asm.Word),
		)
	}
	return o.program("walk", slices.Concat(code, asm.Instructions{
		asm.Mov.Reg(asm.R1, asm.R8),
		asm.LoadMapPtr(asm.R2, chain.FD()),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
	}, exit()))
}

// udp returns a UDP frame with so many bytes of payload.
func udp(ipv6 bool, payload int) []byte {
	b := make([]byte, ethernetBytes, 256)
	length := uint16(8 + payload)
	if ipv6 {
		b[12], b[13] = 0x86, 0xdd
		b = append(b, 0x60, 0, 0, 0, byte(length>>8), byte(length), 17, 64)
		b = append(b, sourceIPv6.AsSlice()...)
		b = append(b, destIPv6.AsSlice()...)
	} else {
		b[12], b[13] = 0x08, 0x00
		b = append(b, 0x45, 0, byte((20+length)>>8), byte(20+length), 0, 0, 0, 0, 64, 17, 0, 0)
		b = append(b, sourceIPv4.AsSlice()...)
		b = append(b, destIPv4.AsSlice()...)
	}
	b = binary.BigEndian.AppendUint16(b, 5000)
	b = binary.BigEndian.AppendUint16(b, 53)
	b = binary.BigEndian.AppendUint16(b, length)
	return append(append(b, 0, 0), make([]byte, payload)...)
}
