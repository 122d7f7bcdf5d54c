package policyfile

import (
	"fmt"
	"strings"
	"testing"
)

// TestPieces parses a file that is mostly in pieces.
func TestPieces(t *testing.T) {
	var text strings.Builder
	text.WriteString("plans: {gold: 1mbit}\ndevices:\n")
	for device := range 2 {
		fmt.Fprintf(&text, "  eth%d:\n    egress:\n", device)
		for i := range 10 {
			fmt.Fprintf(&text, "      10.0.0.%d: {plan: gold, name: \"#%d, {é} \\\"\", note: 'it''s'}  # it's \"one\n\n      # another\n      2001:db8:%x::/48: {rate: 1mbit, shadow: {rate: 50kbit}}\n", i, i, i)
		}
		text.WriteString("      match: src\n      10.1.0.0/16: unlimited\n      \"10.2.0.0/16\": 2mbit\n")
	}
	for lines, pieces := range map[int]int{1: 2 * 39, 20: 2 * 2, 39: 2, 40: 0} {
		source, _, err := newSource("f", []byte(text.String()))
		if err != nil {
			t.Fatal(err)
		}
		r := newReader(&File{source: source, exactly: map[string]*section{}, pools: map[string]*pool{}})
		var rest []byte
		r.pieces, rest = cut(source, lines)
		n := 0
		for _, of := range r.pieces {
			n += len(of)
		}
		if n != pieces {
			t.Errorf("there are %d pieces of %d lines, want %d", n, lines, pieces)
		}
		root, err := r.yaml(rest, 0)
		if err != nil {
			t.Fatal(err)
		}
		r.policy(&root[0])
		if r.broken || len(r.pieces) > 0 || len(r.problems) > 0 {
			t.Errorf("pieces of %d lines: left are %v, problems are %v", lines, r.pieces, r.problems)
		}
		for _, s := range r.file.devices {
			if rules := s.tables[0].rules; len(rules) != 22 {
				t.Errorf("pieces of %d lines: %s has %d rules", lines, s.key, len(rules))
			}
		}
	}
}
