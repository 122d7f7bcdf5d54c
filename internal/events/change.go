package events

import (
	"fmt"
	"time"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/maps"
)

// A change is the last change of many rules, as it was when it was last looked at.
type change struct {
	began    uint64 // ns; 0 for none
	deadline uint64 // ns: when it reverts unless confirmed; 0 if it does not
	over     bool
}

// look tells what became of a change. A command may forget a change as soon as it is over; its end is known for longer.
func (c *change) look(store *maps.Store, tell func(report.Event)) {
	state, _ := store.Change()
	began, until := store.Begins(), store.Until()
	if c.began != 0 && began != c.began {
		if began == 0 && !c.over {
			c.end(until, tell)
		}
		*c = change{}
	}
	if began == 0 || state == maps.NoChange || state == maps.Armed {
		return
	}
	if c.began == 0 {
		*c = change{began: began}
		e := report.Event{Kind: report.ChangeBegun, Time: wallClock(began), Sentence: "a change of rules began"}
		if until != maps.Never {
			c.deadline = until
			e.Sentence += fmt.Sprintf("; it reverts at %s unless it is confirmed", wallClock(until).Local().Format(time.TimeOnly))
		}
		tell(e)
	}
	if !c.over && (state == maps.Expired || state == maps.Committed && c.deadline != 0) {
		c.end(until, tell)
	}
}

// end tells how a change ended. One that lasts may be rolled back later.
func (c *change) end(until uint64, tell func(report.Event)) {
	switch {
	case until == maps.Never && c.deadline == 0:
	case until == maps.Never:
		c.deadline = 0
		tell(report.Event{Kind: report.ChangeConfirmed, Sentence: "the change of rules was confirmed"})
	case until == c.deadline:
		c.over = true
		tell(report.Event{Kind: report.ChangeExpired, Time: wallClock(until), Sentence: "the change of rules reverted, because nobody confirmed it in time"})
	default:
		c.over = true
		tell(report.Event{Kind: report.ChangeReverted, Time: wallClock(until), Sentence: "the change of rules was rolled back"})
	}
}
