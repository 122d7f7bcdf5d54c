// Package labels keeps the texts of rules, which no packet reads, in a hash map.
package labels

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	partBytes = int(bpf.AbiLayoutLABEL_BYTES)
	lineBreak = "\n" // between the fields of texts, none of which contains one
)

// Labels are in a hash map, as few rules of many namespaces have one. Each of a rule's two sets of parameters has
// its own label, so labels revert with their change.
type Labels struct {
	Map   *ebpf.Map
	Parts *uint32 // an upper bound of the parts in the map

	all   map[uint64]uint32 // where each part is in parts; nil unless all were fetched
	parts []bpf.AbiLabel
}

// Fetch reads all labels, if so many will be read that a system call for each would cost more, until forget is called.
func (l *Labels) Fetch(rules int) (forget func()) {
	const few, many = 1 << 10, 1 << 14
	if rules < few || l.all != nil {
		return func() {}
	}
	expected := atomic.LoadUint32(l.Parts)
	l.all, l.parts = make(map[uint64]uint32, expected), make([]bpf.AbiLabel, 0, expected+many)
	keys := make([]bpf.AbiLabelKey, many)
	var cursor ebpf.MapBatchCursor
	for err := error(nil); err == nil; {
		var n int
		have := len(l.parts)
		l.parts = slices.Grow(l.parts, many)[:have+many]
		n, err = l.Map.BatchLookup(&cursor, keys, l.parts[have:], nil)
		l.parts = l.parts[:have+n]
		for i, key := range keys[:n] {
			l.all[word(key)] = uint32(have + i)
		}
	}
	return func() { l.all, l.parts = nil, nil }
}

// word is a key as a number, which maps find faster.
func word(k bpf.AbiLabelKey) uint64 { return uint64(k.Id)<<32 | uint64(k.Version)<<16 | uint64(k.Part) }

// A field is a string, number or bool in params.Texts.
type field struct {
	offset uintptr
	of     reflect.Type
}

var fields = fieldsOf(reflect.TypeFor[params.Texts](), 0)

func fieldsOf(t reflect.Type, at uintptr) (all []field) {
	switch t.Kind() {
	case reflect.Struct:
		for i := range t.NumField() {
			all = append(all, fieldsOf(t.Field(i).Type, at+t.Field(i).Offset)...)
		}
	case reflect.Array:
		for i := range t.Len() {
			all = append(all, fieldsOf(t.Elem(), at+uintptr(i)*t.Elem().Size())...)
		}
	default:
		all = []field{{at, t}}
	}
	return all
}

func (f field) in(t *params.Texts) reflect.Value {
	return reflect.NewAt(f.of, unsafe.Add(unsafe.Pointer(t), f.offset)).Elem()
}

// Parts are the label of a rule in parts: a text that ends with a zero byte, because a killed command may have left parts of a longer one.
func Parts(r policy.Rule) (parts []bpf.AbiLabel) {
	if !params.HasTexts(r) {
		return nil
	}
	text, texts := make([]byte, 0, 4*partBytes), params.TextsOf(r)
	for _, f := range fields {
		switch v := f.in(&texts); {
		case v.IsZero():
		case v.CanUint():
			text = strconv.AppendUint(text, v.Uint(), 10)
		case v.CanInt():
			text = strconv.AppendInt(text, v.Int(), 10)
		case v.Kind() == reflect.Bool:
			text = append(text, "true"...)
		default:
			text = append(text, v.String()...)
		}
		text = append(text, lineBreak...)
	}
	text = append(bytes.TrimRight(text, lineBreak), 0)
	for chunk := range slices.Chunk(text, partBytes) {
		var part bpf.AbiLabel
		copy(part.Text[:], chunk)
		parts = append(parts, part)
	}
	return parts
}

// Write stores the texts of a rule for a version that has none.
func (l *Labels) Write(id, index uint32, r policy.Rule) error {
	for n, part := range Parts(r) {
		atomic.AddUint32(l.Parts, 1)
		if err := step.Try("store a label"); err != nil {
			return err
		}
		if err := l.Map.Put(keyOf(id, index, n), part); err != nil {
			return fmt.Errorf("store the label of a rule: %w", err)
		}
	}
	return nil
}

// Read is the label of a version.
func (l *Labels) Read(id, index uint32) (t params.Texts) {
	text := make([]byte, 0, 4*partBytes)
	for n := 0; ; n++ {
		var part bpf.AbiLabel
		key := keyOf(id, index, n)
		if at, fetched := l.all[word(key)]; fetched {
			part = l.parts[at]
		} else if l.Map.Lookup(key, &part) != nil {
			break
		}
		text = append(text, part.Text[:]...)
		if part.Text[partBytes-1] == 0 {
			break
		}
	}
	text, _, _ = bytes.Cut(text, []byte{0})
	rest := string(text)
	for _, f := range fields {
		var line string
		line, rest, _ = strings.Cut(rest, lineBreak)
		switch v := f.in(&t); {
		case line == "":
			if rest == "" {
				return t
			}
		case v.CanUint():
			n, _ := strconv.ParseUint(line, 10, 64)
			v.SetUint(n)
		case v.CanInt():
			n, _ := strconv.ParseInt(line, 10, 64)
			v.SetInt(n)
		case v.Kind() == reflect.Bool:
			v.SetBool(true)
		default:
			v.SetString(line)
		}
	}
	return t
}

// Discard deletes the label of a version, if it has one.
func (l *Labels) Discard(id uint32, v params.Version) {
	if v.Flags&params.Label == 0 {
		return
	}
	for n := 0; l.Map.Delete(keyOf(id, v.Index, n)) == nil; n++ {
		atomic.AddUint32(l.Parts, ^uint32(0))
	}
	v.Flags &^= params.Label
}

func keyOf(id, index uint32, part int) bpf.AbiLabelKey {
	return bpf.AbiLabelKey{Id: id, Version: uint16(index), Part: uint16(part)}
}

// CopyTo copies the labels to a bigger map, and counts their parts again.
func (l *Labels) CopyTo(bigger *ebpf.Map) error {
	var parts uint32
	var key bpf.AbiLabelKey
	var text bpf.AbiLabel
	all := l.Map.Iterate()
	for all.Next(&key, &text) {
		if err := bigger.Put(key, text); err != nil {
			return fmt.Errorf("copy the labels of rules: %w", err)
		}
		parts++
	}
	if err := all.Err(); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("read the labels of rules: %w", err)
	}
	atomic.StoreUint32(l.Parts, parts)
	return nil
}
