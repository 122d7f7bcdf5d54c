package main

import (
	"bytes"
	"testing"
	"time"
)

// Long work shows its progress and removes it at the end. Short work, and work without a terminal, shows nothing.
func TestProgress(t *testing.T) {
	for _, c := range []struct {
		p    progress
		want string
	}{
		{progress{what: "rules", of: 1000}, clearLine + "rules: 400 of 1000, 40 %" + clearLine},
		{progress{what: "bytes"}, clearLine + "bytes: 400" + clearLine},
		{progress{what: "rules", of: 1000, begun: time.Now().Add(time.Hour)}, ""},
	} {
		var screen bytes.Buffer
		c.p.to = &screen
		c.p.Write(make([]byte, 400))
		c.p.Write(make([]byte, 400)) // too soon to be shown
		c.p.finish()
		c.p.set(900)
		if got := screen.String(); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	var screen bytes.Buffer
	parts := progress{to: &screen}
	parts.at("programs", 4, 10)
	parts.at("programs", 10, 10) // too soon to be shown, and the end of a part
	parts.at("rules", 1, 2)
	if want := clearLine + "programs: 4 of 10, 40 %" + clearLine + clearLine + "rules: 1 of 2, 50 %"; screen.String() != want {
		t.Errorf("%q, want %q", screen.String(), want)
	}
	var none progress
	none.set(1)
	none.finish()
}
