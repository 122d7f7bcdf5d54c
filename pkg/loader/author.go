package loader

import (
	"encoding/binary"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/pkg/maps"
)

// authorPin keeps who made a change that is to be confirmed.
const authorPin = "author"

// An Author is who made a pending change, with which command, and when in ns of maps.Now; zero if that is not known.
type Author struct {
	Who   string // a user, a zero byte, and the command
	Began uint64
}

// KeepAuthor records who made the change that is pending, unless that is recorded already.
func (n *Namespace) KeepAuthor(who string) error {
	if n.pins.state() != maps.Pending || n.Author() != (Author{}) {
		return nil
	}
	record := append(binary.NativeEndian.AppendUint64(nil, n.pins.store.Begins()), who...)
	spec := &ebpf.MapSpec{Name: "shapectl_author", Type: ebpf.Array, ValueSize: uint32(len(record))}
	return n.pins.dir.replaceRecord(authorPin, spec, record)
}

// Author is that of the pending change.
func (n *Namespace) Author() Author { return n.pins.author() }

// pending is the error that a change is pending.
func (s *bpfState) pending() error { return &PendingError{s.store.Until(), s.author()} }

func (s *bpfState) author() Author {
	if s.state() != maps.Pending {
		return Author{}
	}
	record, err := readRecord(s.dir.pin(authorPin))
	if err != nil || len(record) < 8 || binary.NativeEndian.Uint64(record) != s.store.Begins() {
		return Author{} // of an earlier change
	}
	return Author{string(record[8:]), s.store.Begins()}
}
