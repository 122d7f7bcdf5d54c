package main

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
)

func TestPages(t *testing.T) {
	roll := rand.New(rand.NewPCG(1, 2))
	var all pages
	var want, got bytes.Buffer
	for want.Len() < 5*mostPage {
		text := make([]byte, roll.IntN(1+roll.IntN(3*firstPage)))
		for i := range text {
			text[i] = byte(roll.Uint32())
		}
		want.Write(text)
		if n, err := all.Write(text); n != len(text) || err != nil {
			t.Fatalf("wrote %d of %d bytes: %v", n, len(text), err)
		}
	}
	for _, page := range all {
		if len(page) > mostPage {
			t.Errorf("a page has %d bytes", len(page))
		}
	}
	if n, err := all.WriteTo(&got); n != int64(want.Len()) || err != nil || !bytes.Equal(got.Bytes(), want.Bytes()) {
		t.Errorf("%d bytes came out of %d, error %v, or they are others", n, want.Len(), err)
	}
}

// A brokenPipe takes one write.
type brokenPipe struct{ writes int }

func (b *brokenPipe) Write(text []byte) (int, error) {
	if b.writes++; b.writes > 1 {
		return 1, errors.New("broken pipe")
	}
	return len(text), nil
}

func TestPagesIntoABrokenPipe(t *testing.T) {
	var all pages
	all.Write(make([]byte, 4*firstPage))
	if n, err := all.WriteTo(new(brokenPipe)); err == nil || n != firstPage+1 {
		t.Errorf("wrote %d bytes, error %v", n, err)
	}
}
