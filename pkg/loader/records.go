package loader

import (
	"github.com/shapectl/shapectl/internal/bpffs"
)

// Pins of records, each a map with a text of JSON.
const (
	policyPin     = "policy"
	authorPin     = "author"
	reattachedPin = "reattached"
)

// An Author is who made the last change, with which command, and when in ns of maps.Now; zero if that is not known.
type Author struct {
	Who   string // see ApplyOptions
	Began uint64
}

// pending describes the change that is pending.
func (s *bpfState) pending() *PendingError {
	p := &PendingError{Until: s.store.Until()}
	if err := bpffs.Recorded(s.dir.pin(authorPin), &p.Author); err != nil || p.Author.Began != s.store.Begins() {
		p.Author = Author{} // of an earlier change
	}
	return p
}

// Reattached is what Reattach did last.
type Reattached struct {
	At    uint64 // in ns of maps.Now; 0 if it did nothing yet
	Hooks []Side
}

// LastReattached is what Reattach did last, in any process.
func LastReattached(o Options) (r Reattached, err error) {
	at, err := locate(o)
	if err == nil {
		err = bpffs.Recorded(at.home().pin(reattachedPin), &r)
	}
	return r, err
}
