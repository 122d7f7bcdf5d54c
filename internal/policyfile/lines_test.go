package policyfile

import (
	"reflect"
	"strings"
	"testing"
)

// TestClearLines reads lines without the YAML library, which reads the same in them.
func TestClearLines(t *testing.T) {
	const head = "plans: {gold: 1mbit}\ndevices:\n  eth0:\n    egress:\n      10.9.0.0/16: 1mbit\n"
	for line, clear := range map[string]bool{
		`10.0.0.1: {plan: gold, name: "#1, {é} \"\\", note: 'it''s'}  # it's "one`: true,
		`2001:db8::/48: {rate: 1mbit, shadow: {rate: 50kbit}}`:                     true,
		"\"10.2.0.0/16\": 2mbit  ":                                                 true,
		`10.0.0.1: {rate: 1mbit, name: "\x41"}`:                                    false,
		`10.0.0.1: {name: a:, rate: 1mbit}`:                                        false,
		`10.0.0.1: {rate: 1mbit,}`:                                                 false,
		`10.0.0.1: null`:                                                           false,
		`10.0.0.1: 1mbit # a`:                                                      true,
		`10.0.0.1: 1mbit# a`:                                                       false,
		`10.0.0.1: {rate: 1mbit} b`:                                                false,
		`10.0.0.1: {rate: 1mbit}#b`:                                                false,
		`10.0.0.1: [1mbit]`:                                                        false,
		`10.0.0.1: 1mbit: 2`:                                                       false,
		`10.0.0.1: !x 1mbit`:                                                       false,
		`10.0.0.1: *x`:                                                             false,
		`10.0.0.1: {}`:                                                             false,
		`10.0.0.1: {shadow: {rate: {a: {b: c}}}}`:                                  false,
		`10.0.0.1: "1mbit`:                                                         false,
	} {
		text := []byte(head + "      # another\n\n      " + line + "\n")
		s, _, err := newSource("f", text)
		if err != nil {
			t.Fatal(err)
		}
		if cut, _ := s.cut(); len(cut) != map[bool]int{true: 1}[clear] {
			t.Errorf("%s: cut %v", line, cut)
		}
		f, err := Parse("f", text)
		if whole, errWhole := parse("f", text, false); !reflect.DeepEqual(f, whole) || !reflect.DeepEqual(err, errWhole) {
			t.Errorf("%s: %v; by the library %v", line, err, errWhole)
		}
	}
}

// TestUnclearLines has lines that only look like entries, where the library sees something else.
func TestUnclearLines(t *testing.T) {
	const lines = "      10.0.0.1: 1mbit\n      10.0.0.2: 2mbit\n"
	for _, text := range []string{
		"devices:\n  eth0:\n    note: |\n" + lines, "devices:\n  eth0:\n    note: \"a\n" + lines + "    b\"\n",
		"devices:\n  eth0:\n    note: a\n" + lines, "devices: {eth0: {egress: {\n" + lines + "}}}\n",
		"devices:\n  eth0:\n    egress:\n      - a\n" + lines, "devices:\n  eth0:\n    egress:\n" + lines + "---\n" + lines,
		"devices:\n  eth0:\n    egress:\n" + strings.ReplaceAll(lines, "mbit\n", "mbit\n        x\n"),
	} {
		if f, err := Parse("f", []byte(text)); err == nil {
			t.Errorf("%q is read as %+v", text, f)
		} else if _, whole := parse("f", []byte(text), false); !reflect.DeepEqual(err, whole) {
			t.Errorf("%q: %v; by the library %v", text, err, whole)
		}
	}
}
