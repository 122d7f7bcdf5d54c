package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/term"
)

const (
	quietFor      = 500 * time.Millisecond // shorter work shows no progress
	progressEvery = 100 * time.Millisecond
	clearLine     = "\r\x1b[K"
)

// progress is a line on a terminal that says how much of some work is done.
type progress struct {
	to           io.Writer // nil shows nothing
	begun, shown time.Time
}

// at says how much of a part of the work is done. What is said after a part stands alone on its line.
func (p *progress) at(what string, done, of int) {
	now := time.Now()
	switch {
	case done == of:
		p.clear()
	case p.to != nil && now.Sub(p.begun) >= quietFor && now.Sub(p.shown) >= progressEvery:
		p.shown = now
		fmt.Fprintf(p.to, "%s%s: %d of %d, %d %%", clearLine, what, done, of, 100*done/of)
	}
}

func (p *progress) clear() {
	if !p.shown.IsZero() {
		fmt.Fprint(p.to, clearLine)
	}
	p.shown = time.Time{}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
