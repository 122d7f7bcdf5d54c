package loader

import (
	"encoding/binary"
)

// authorPin keeps who made a change that is to be confirmed.
const authorPin = "author"

// An Author is who made a pending change, with which command, and when in ns of maps.Now; zero if that is not known.
type Author struct {
	Who   string // see ApplyOptions
	Began uint64
}

// keepAuthor records who made the change that is pending. If that fails, nobody is told who it was.
func (s *bpfState) keepAuthor(who string) {
	s.dir.replaceRecord(authorPin, append(binary.NativeEndian.AppendUint64(nil, s.store.Begins()), who...))
}

// pending describes the change that is pending.
func (s *bpfState) pending() *PendingError {
	p := &PendingError{Until: s.store.Until()}
	record, err := readRecord(s.dir.pin(authorPin))
	if err == nil && len(record) >= 8 && binary.NativeEndian.Uint64(record) == s.store.Begins() { // else of an earlier change
		p.Author = Author{string(record[8:]), s.store.Begins()}
	}
	return p
}
