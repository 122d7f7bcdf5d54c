package plain

import "testing"

func TestNatural(t *testing.T) {
	names := []string{"", "eth0", "tap", "tap1", "tap2", "tap010", "tap10a", "tap10b", "tap99999999999999999999", "wg0"}
	for i, a := range names {
		for j, b := range names {
			if got := Natural(a, b); got > 0 != (i > j) || got < 0 != (i < j) {
				t.Errorf("%q and %q compare as %d", a, b, got)
			}
		}
	}
}
