package maps

import (
	"bytes"
	"slices"
	"testing"

	"github.com/shapectl/shapectl/bpf"
)

// Any change of a type in the maps, of a constant, or of the name of a pin makes a different layout.
func TestAnyChangeIsAnotherLayout(t *testing.T) {
	for _, name := range []string{"RULE_ECN", "UNIT_BITS", "PHASE_BY_TIME"} { // a constant of each kind
		at := bytes.Index(bpf.Types(), []byte(name+"\x00"))
		if at < 0 {
			t.Fatalf("%s has no part in the layout", name)
		}
		types := slices.Clone(bpf.Types())
		types[at]++
		if layoutOf(types) == Layout() {
			t.Errorf("with another name of %s, the layout is the same", name)
		}
	}
	pinned["another"] = "another"
	defer delete(pinned, "another")
	if layoutOf(bpf.Types()) == Layout() {
		t.Error("with one map more, the layout is the same")
	}
}
