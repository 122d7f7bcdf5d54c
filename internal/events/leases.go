package events

import (
	"fmt"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/maps"
)

// lookAtLeases tells which pools with a cluster have got a lease, and which have none any more. The first time it only
// takes note of them.
func (s *session) lookAtLeases() {
	was := s.leased
	s.leased = map[string]bool{}
	if s.store == nil {
		return
	}
	now := maps.Now()
	for prefix, name := range s.rules.clustered {
		l, ok := s.store.Pools().Lease(prefix)
		if !ok {
			continue
		}
		leased := now < l.Until
		s.leased[name] = leased
		had, known := was[name]
		switch e := (report.Event{Pool: name, Name: name}); {
		case leased == had || was == nil || !known && !leased:
		case leased:
			e.Kind, e.Sentence = report.LeaseBegun, fmt.Sprintf("pool %q: a lease of %v is in force", name, l.Rate)
			s.tell(e)
		default:
			e.Kind, e.Time = report.LeaseEnded, wallClock(l.Until)
			e.Sentence = fmt.Sprintf("pool %q: the lease ended; the safe share of %v is in force", name, l.Safe)
			s.tell(e)
		}
	}
}
