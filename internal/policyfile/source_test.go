package policyfile

import (
	"math/rand/v2"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/shapectl/shapectl/internal/testenv"
)

// TestCursor finds offsets and positions in any order.
func TestCursor(t *testing.T) {
	r := rand.New(rand.NewPCG(testenv.Seed(t), 0))
	text := "\uFEFFab\r\n\n\u00e9\U0001F600x\n" + strings.Repeat("y\u00e9", 20) + "\nend"
	s, _, err := newSource("f", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	cursor := s.cursor()
	for range 1000 {
		offset := r.IntN(len(text) + 1)
		for !utf8.RuneStart((text + "x")[offset]) || offset == 0 {
			offset = r.IntN(len(text) + 1)
		}
		before := strings.TrimPrefix(text[:offset], "\uFEFF")
		want := position{1 + strings.Count(before, "\n"), 1 + utf8.RuneCountInString(before[strings.LastIndex(before, "\n")+1:])}
		if r.IntN(2) == 0 {
			if got := cursor.at(offset); got != want {
				t.Fatalf("offset %d is at %v, want %v", offset, got, want)
			}
		} else if got := cursor.find(want); got != offset {
			t.Fatalf("%v has the offset %d, want %d", want, got, offset)
		}
	}
}
