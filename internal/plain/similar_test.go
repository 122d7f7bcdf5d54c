package plain

import "testing"

func TestSimilar(t *testing.T) {
	words := []string{"burst", "capacity", "rate", "queue", "ecn-above"}
	for word, want := range map[string]string{
		"burts": "burst", "brst": "burst", "BURST": "burst", "cap": "capacity", "capcity": "capacity", "rat": "rate",
		"ecn": "ecn-above", "frobnicate": "", "x": "", "": "", "delay": "",
	} {
		if got := Similar(word, words); got != want {
			t.Errorf("Similar(%q) is %q, want %q", word, got, want)
		}
	}
	if got := Similar("co", []string{"confirm", "completion"}); got != "" {
		t.Errorf("of two words that begin so it takes %q", got)
	}
}
