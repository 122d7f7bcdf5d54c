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
	what         string
	done, of     int64 // of is 0 if it is not known
	begun, shown time.Time
}

func (p *progress) set(done int64) {
	now := time.Now()
	p.done = done
	if p.to == nil || now.Sub(p.begun) < quietFor || now.Sub(p.shown) < progressEvery {
		return
	}
	p.shown = now
	share := ""
	if p.of > 0 {
		share = fmt.Sprintf(" of %d, %d %%", p.of, 100*done/p.of)
	}
	fmt.Fprintf(p.to, "%s%s: %d%s", clearLine, p.what, done, share)
}

// at says how much of a part of the work is done. What is said after a part stands alone on its line.
func (p *progress) at(what string, done, of int) {
	p.what, p.of = what, int64(of)
	if p.set(int64(done)); done == of {
		p.clear()
	}
}

// Write counts bytes.
func (p *progress) Write(b []byte) (int, error) {
	p.set(p.done + int64(len(b)))
	return len(b), nil
}

// finish removes the line for good.
func (p *progress) finish() {
	p.clear()
	p.to = nil
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
