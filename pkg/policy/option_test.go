package policy

import (
	"cmp"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table of options into README")

// samples holds a value of each option that is not the default, and the other options that
// it needs.
var samples = map[string][]string{
	"rate":      {"9mbit"},
	"capacity":  {"123456b"},
	"algorithm": {"leaky"},
	"each":      {"host"},
	"excess":    {"ecn"},
	"queue":     {"54321b", "excess=delay"},
	"ecn-above": {"3ms", "excess=delay"},
	"order":     {"sparse-first", "excess=delay"},
	"penalty":   {"30s", "algorithm=leaky"},
	"fail":      {"closed"},
	"overhead":  {"-4"},
	"mpu":       {"64"},
	"name":      {"Müller & Söhne"},
	"note":      {"pays in May"},
}

// limitOf is a limit of 8mbit and of options such as excess=delay.
func limitOf(t *testing.T, options []string) (l Limit) {
	t.Helper()
	l.Rate = 8e6
	for _, o := range options {
		key, value, _ := strings.Cut(o, "=")
		if err := l.Set(key, value); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

// TestOptions converts each option from text to a rule and back.
func TestOptions(t *testing.T) {
	prefix, names := netip.MustParsePrefix("10.0.0.0/24"), map[string]bool{}
	for _, o := range Options {
		for _, name := range append(slices.Clone(o.Aliases), o.Name) {
			if names[name] || FindOption(name) != o || LimitKey(name) != o.Name {
				t.Errorf("%s is not one option", name)
			}
			names[name] = true
		}
		with := samples[o.Name]
		if with == nil {
			t.Errorf("%s has no value to test", o.Name)
			continue
		}
		value := with[0]
		l := limitOf(t, with[1:])
		without, err := l.Rule(prefix, 14)
		if err != nil {
			t.Fatal(err)
		}
		plain := l
		if err := l.Set(o.Name, value); err != nil {
			t.Fatal(err)
		}
		r, err := l.Rule(prefix, 14)
		if err != nil {
			t.Fatal(err)
		}
		if o.Same(&without, &r) || !o.Same(&r, &r) || o.Text(&r) != value || o.Value(&l).String() != value || !o.Useful(&r) {
			t.Errorf("%s: the rule has %q, and the limit %q", o.Name, o.Text(&r), o.Value(&l))
		}
		if o.Reset(&l); o.Name != "rate" && l != plain {
			t.Errorf("%s: %+v is left", o.Name, l)
		}
		if _, err := ParseShadow(o.Name + "=" + value); (err == nil) != o.Shadow {
			t.Errorf("%s in a shadow: %v", o.Name, err)
		}
		unlimited := Limit{Rate: Unlimited}
		unlimited.Set(o.Name, value)
		_, err = unlimited.Rule(prefix, 14)
		if ignored := o.Name == "queue"; (err == nil) == o.LimitedOnly && !ignored {
			t.Errorf("%s of an unlimited rule: %v", o.Name, err)
		}
	}
}

// TestReadme checks that the table of options in README is that of the code.
func TestReadme(t *testing.T) {
	const path, begin, end = "../../README.md", "<!-- options: written by 'go test ./pkg/policy -update' -->\n", "<!-- end of options -->"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, _ := strings.Cut(string(text), begin)
	_, after, found := strings.Cut(rest, end)
	if !found {
		t.Fatal("README has no table of options")
	}
	var table strings.Builder
	table.WriteString("| flag | what | default |\n|---|---|---|\n")
	for _, o := range Options {
		flags := "`--" + strings.Join(append([]string{o.Name}, o.Aliases...), "`, `--") + "`"
		byDefault := cmp.Or(o.DocDefault, "`"+o.Value(new(Limit)).String()+"`")
		fmt.Fprintf(&table, "| %s | %s | %s |\n", flags, o.Doc, byDefault)
	}
	table.WriteString("| `--shadow` | a limit that is only proposed, such as `rate=50mbit,each=host`: it counts what it would have refused | none |\n")
	want := before + begin + table.String() + end + after
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if string(text) != want {
		t.Errorf("the table of options in README is not that of the code, which is\n%s", table.String())
	}
}
