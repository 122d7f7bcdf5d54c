package plain

import "testing"

func TestSimilar(t *testing.T) {
	words := []string{"burst", "capacity", "rate", "queue", "ecn-above", "Bakery, Mill Lane"}
	for word, want := range map[string]string{
		"burts": "burst", "brst": "burst", "BURST": "burst", "cap": "capacity", "capcity": "capacity", "rat": "rate",
		"ecn": "ecn-above", "bakery": "Bakery, Mill Lane", "Bakery, Mil Lane": "Bakery, Mill Lane", "frobnicate": "", "x": "", "": "", "delay": "",
	} {
		if got := Similar(word, words); got != want {
			t.Errorf("Similar(%q) is %q, want %q", word, got, want)
		}
	}
	if got := Similar("co", []string{"confirm", "completion"}); got != "" {
		t.Errorf("of two words that begin so it takes %q", got)
	}
}

// One who lives elsewhere is not meant, though his name has fewer other letters.
func TestSimilarName(t *testing.T) {
	names := []string{"", "Lehmann, Lindenallee 9", "Lehmann, Lindenallee 41 / Router", "Meier, Ring 4", "Meier, Ring 412", "Meier, Ring 413", "Bakery, Mill Lane 1", "AP1 down", "AP1 up", "AP10 down", "AP10 up"}
	for name, want := range map[string]string{
		"Lehmann, Lindenallee 41": "Lehmann, Lindenallee 41 / Router", "lehmann, lindenallee 41 / ruter": "Lehmann, Lindenallee 41 / Router",
		"Lehman, Lindenallee 41": "", "Lehman, Lindenallee 8": "Lehmann, Lindenallee 9", "Meier, Ring 41": "", "Meyer, Ring 4": "Meier, Ring 4",
		"Meier": "", "Bakery, Mil Lane": "Bakery, Mill Lane 1", "frobnicate": "", "": "",
		"ap1": "AP1 down", "AP": "",
	} {
		if got := SimilarName(name, names); got != want {
			t.Errorf("SimilarName(%q) is %q, want %q", name, got, want)
		}
	}
}
