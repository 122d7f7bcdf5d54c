package policy

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

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
