package main

import (
	"bytes"
	"testing"
	"time"
)

// Long work shows its progress and removes it at the end. Short work, and work without a terminal, shows nothing.
func TestProgress(t *testing.T) {
	var screen bytes.Buffer
	p := progress{to: &screen}
	p.at("programs", 4, 10)
	p.at("programs", 5, 10)  // too soon to be shown
	p.at("programs", 10, 10) // the end of a part
	p.at("rules", 1, 2)
	p.clear()
	p.clear()
	(&progress{to: &screen, begun: time.Now().Add(time.Hour)}).at("rules", 1, 2)
	new(progress).at("rules", 1, 2)
	if want := clearLine + "programs: 4 of 10, 40 %" + clearLine + clearLine + "rules: 1 of 2, 50 %" + clearLine; screen.String() != want {
		t.Errorf("%q, want %q", screen.String(), want)
	}
}
