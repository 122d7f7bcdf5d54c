package policy

import (
	"slices"
	"strings"
	"testing"
)

func TestLabel(t *testing.T) {
	for _, good := range []string{"", "a", " a ", "Müller & Söhne #7", "\u0646\u0627\u0645\u0647\u200c\u0627\u06cc", strings.Repeat("n", MaxName)} {
		n := valueOf("name")
		if err := n.Set(good); err != nil || n.String() != good {
			t.Errorf("name %q: %q, %v", good, n, err)
		}
		r := ruleOn("10.0.0.0/24", func(r *Rule) { r.Label = Label{Plan: good, Name: good, Note: good} })
		if err := r.Validate(); err != nil {
			t.Errorf("rule with label %q: %v", good, err)
		}
	}
	for bad, part := range map[string]string{
		strings.Repeat("n", MaxName+1): "... has 65 bytes, and at most 64 are allowed; shorten it",
		"  \u00a0":                     "has only blanks",
		"a\nb":                         "control character",
		"\x1b[31m":                     "control character",
		"a\u0085b":                     "control character",
		"a\u2028b":                     "control character",
		"\xff":                         "not valid UTF-8",
	} {
		n := valueOf("name")
		_ = n.Set("as it was")
		wantError(t, n.Set(bad), "name ", part)
		if n.String() != "as it was" {
			t.Errorf("%q is refused, but the name is %q", bad, n)
		}
		wantError(t, CheckPlan(bad), "plan ", part)
		for what, l := range map[string]Label{"plan ": {Plan: bad}, "name ": {Name: bad}} {
			r := ruleOn("10.0.0.5/32", unlimited, func(r *Rule) { r.Label = l })
			wantError(t, r.Validate(), what, part)
		}
	}
	n := valueOf("note")
	if err := n.Set(strings.Repeat("n", MaxNote)); err != nil {
		t.Error(err)
	}
	wantError(t, n.Set(strings.Repeat("n", MaxNote+1)), "note ", "at most 256")
	wantError(t, CheckPlan(""), "empty")
}

func TestFindName(t *testing.T) {
	names := []string{"School (10001)", "School (10001)", "Oak (7)", "Elm (7)", "10002", "Ash (10002)", ""}
	for written, want := range map[string]string{
		"School (10001)": "School (10001)", "10001": "School (10001)", "10002": "10002", "7": "", "0001": "", "School": "", "": "",
	} {
		if got := FindName(written, slices.Values(names)); got != want {
			t.Errorf("%q is %q, want %q", written, got, want)
		}
	}
}

func TestShortName(t *testing.T) {
	long := strings.Repeat("ü", 100)
	if got := ShortName(long); CheckPoolName(got) != nil || got == ShortName(long+"n") {
		t.Errorf("a long name: %q", got)
	}
	if got := ShortName("shop/web"); got != "shop/web" {
		t.Errorf("a short name: %q", got)
	}
}

// A note has at least the rate of a network.
func TestPodNote(t *testing.T) {
	var network Draft
	if err := network.GiveAll(map[string]string{"rate": "40mbit", "within": "uplink", "share": "flow"}, func(*Option) bool { return true }); err != nil {
		t.Fatal(err)
	}
	for id, whole := range map[string]bool{"3f2a": true, strings.Repeat("n", 200): false} {
		pod := "cni pods " + id + " eth0"
		note, all := PodNote(pod, network, whole)
		of, got, annotated := CutPodNote(note)
		if of != pod || annotated != whole || all != whole || got.Rate != 40e6 || got.Gives("share") != whole || got.Gives("within") || len(note) > MaxNote {
			t.Errorf("%s: %s, %v, annotated %v, whole %v", note, of, got.Rate, annotated, all)
		}
	}
}
