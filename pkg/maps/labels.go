package maps

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	labelBytes = int(bpf.AbiLayoutLABEL_BYTES)
	labelBreak = "\n" // between the fields of texts, none of which contains one
)

// labels are in a hash map, as few rules of many namespaces have one. Each of a rule's two sets of parameters has
// its own label, so labels revert with their change.
type labels struct {
	texts *ebpf.Map
	parts *uint32 // an upper bound of the parts in the map
}

// eachText calls f for each string, number and bool in texts, in order.
func eachText(v reflect.Value, f func(reflect.Value)) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			eachText(v.Field(i), f)
		}
	case reflect.Array:
		for i := range v.Len() {
			eachText(v.Index(i), f)
		}
	default:
		f(v)
	}
}

// labelParts is a text that ends with a zero byte, because a killed command may have left parts of a longer one.
func labelParts(r policy.Rule) (parts []bpf.AbiLabel) {
	if !params.HasTexts(r) {
		return nil
	}
	var text []byte
	eachText(reflect.ValueOf(params.TextsOf(r)), func(v reflect.Value) {
		switch {
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
		text = append(text, labelBreak...)
	})
	text = append(bytes.TrimRight(text, labelBreak), 0)
	for chunk := range slices.Chunk(text, labelBytes) {
		var part bpf.AbiLabel
		copy(part.Text[:], chunk)
		parts = append(parts, part)
	}
	return parts
}

// write stores the texts of a rule for a version that has none.
func (l *labels) write(id, version uint32, r policy.Rule) error {
	for n, part := range labelParts(r) {
		atomic.AddUint32(l.parts, 1)
		if err := step.Try("store a label"); err != nil {
			return err
		}
		if err := l.texts.Put(labelKey(id, version, n), part); err != nil {
			return fmt.Errorf("store the label of a rule: %w", err)
		}
	}
	return nil
}

// A knownLabel is a label that was read before, of a version of a rule with these properties. They tell it from any
// later label of that id.
type knownLabel struct {
	texts                  params.Texts
	version, retired, view uint32
}

// RememberLabels keeps labels once they are read. Each costs a system call at least, so a process that reads all rules
// again and again needs this.
func (rs *rules) RememberLabels() { rs.knownLabels = map[labelID]knownLabel{} }

// A labelID names one of the two labels of a rule.
type labelID struct{ id, index uint32 }

// label is what a version of a rule has in labels.
func (rs *rules) label(id, index uint32) params.Texts {
	r := rs.rule(id)
	known := knownLabel{version: atomic.LoadUint32(&r.Sets), retired: r.Retired, view: r.View}
	have, ok := rs.knownLabels[labelID{id, index}]
	known.texts = have.texts
	if ok && have == known {
		return known.texts
	}
	known.texts = rs.labels.read(id, index)
	if rs.knownLabels != nil {
		rs.knownLabels[labelID{id, index}] = known
	}
	return known.texts
}

func (l *labels) read(id, version uint32) (t params.Texts) {
	var text []byte
	var part bpf.AbiLabel
	for n := 0; l.texts.Lookup(labelKey(id, version, n), &part) == nil; n++ {
		text = append(text, part.Text[:]...)
		if part.Text[labelBytes-1] == 0 {
			break
		}
	}
	text, _, _ = bytes.Cut(text, []byte{0})
	rest := string(text)
	eachText(reflect.ValueOf(&t).Elem(), func(v reflect.Value) {
		var line string
		line, rest, _ = strings.Cut(rest, labelBreak)
		switch {
		case v.CanUint():
			n, _ := strconv.ParseUint(line, 10, 64)
			v.SetUint(n)
		case v.CanInt():
			n, _ := strconv.ParseInt(line, 10, 64)
			v.SetInt(n)
		case v.Kind() == reflect.Bool:
			v.SetBool(line != "")
		default:
			v.SetString(line)
		}
	})
	return t
}

// discard deletes the label of a version, if it has one.
func (l *labels) discard(id uint32, v params.Version) {
	if v.Flags&params.Label == 0 {
		return
	}
	for n := 0; l.texts.Delete(labelKey(id, v.Index, n)) == nil; n++ {
		atomic.AddUint32(l.parts, ^uint32(0))
	}
	v.Flags &^= params.Label
}

// discardLabels deletes the labels of both versions of a rule.
func (rs *rules) discardLabels(id uint32) {
	rs.labels.discard(id, rs.version(id, 0))
	rs.labels.discard(id, rs.version(id, 1))
}

func labelKey(id, version uint32, part int) bpf.AbiLabelKey {
	return bpf.AbiLabelKey{Id: id, Version: uint16(version & 1), Part: uint16(part)}
}

// copyTo copies the labels to the bigger map of another store, and counts their parts again.
func (l *labels) copyTo(bigger *ebpf.Map) error {
	var parts uint32
	var key bpf.AbiLabelKey
	var text bpf.AbiLabel
	all := l.texts.Iterate()
	for all.Next(&key, &text) {
		if err := bigger.Put(key, text); err != nil {
			return fmt.Errorf("copy the labels of rules: %w", err)
		}
		parts++
	}
	if err := all.Err(); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("read the labels of rules: %w", err)
	}
	atomic.StoreUint32(l.parts, parts)
	return nil
}
