package events

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/inforce"
	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
)

// lacks are the devices and directions that lacked rules at the last look.
type lacks struct {
	told  map[loader.Side]bool // whether it was told
	again uint64               // when programs were attached again last
	next  time.Time            // not before
}

// lookAtLacks tells which devices lack rules that should be in force, if they do at two looks: one that appears gets its
// rules in between. It also tells which have them again.
func (s *session) lookAtLacks() error {
	begun := time.Now()
	if begun.Before(s.lacks.next) || !s.wants(report.RulesMissing) && !s.wants(report.RulesRestored) {
		return nil
	}
	n, err := loader.Read(s.Loader)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil // another command is at work: soon
	}
	if err != nil {
		return s.report(err)
	}
	found, _, err := inforce.Lacks(n, lastgood.Policy{})
	again, failed := loader.LastReattached(s.Loader)
	n.Close()
	err = errors.Join(err, failed)
	if errors.Is(err, maps.ErrOtherLayout) {
		return nil
	}
	if err != nil {
		return err
	}
	was := s.lacks.told
	if was != nil && again.At != s.lacks.again {
		for _, at := range again.Hooks {
			s.tell(restored(at, "attached again; something else had detached shapectl's program, and its rules limited nothing"))
			delete(was, at)
		}
	}
	s.lacks.told, s.lacks.again = map[loader.Side]bool{}, again.At
	for _, l := range found {
		at := loader.Side{Device: l.Device, Direction: l.Direction}
		told, seen := was[at]
		s.lacks.told[at] = seen
		if seen && !told {
			s.tell(missing(l))
		}
		delete(was, at)
	}
	for at, told := range was {
		if told {
			s.tell(restored(at, "no rule is missing any more"))
		}
	}
	s.lacks.next = time.Now().Add(rest * time.Since(begun))
	return nil
}

func restored(at loader.Side, says string) report.Event {
	d := at.Direction.String()
	return report.Event{Kind: report.RulesRestored, Device: at.Device, Direction: d, Sentence: fmt.Sprintf("%s %s: %s", at.Device, d, says)}
}

func missing(l inforce.Lack) report.Event {
	e := report.Event{Kind: report.RulesMissing, Device: l.Device, Direction: l.Direction.String()}
	e.Sentence = fmt.Sprintf("%s %s: %d of %d rules of the policy in force are missing", l.Device, l.Direction, len(l.Missing), l.Of)
	if l.Detached {
		e.Sentence = fmt.Sprintf("%s %s: something else has detached shapectl's program; its rules limit nothing", l.Device, l.Direction)
	}
	return e
}
