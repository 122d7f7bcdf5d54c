package maps

import (
	"fmt"
	"testing"

	"github.com/cilium/ebpf/btf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
)

// Any change of a type in the maps, or of a constant, makes a different layout.
func TestAnyChangeIsAnotherLayout(t *testing.T) {
	spec, err := bpf.LoadAbi()
	testenv.Must(t, err)
	var types *btf.Struct
	testenv.Must(t, spec.Types.TypeByName("abi", &types))
	seen := map[uint64]string{layoutOf(types): "the type as it is"}
	if this, err := Layout(); err != nil || seen[this] == "" {
		t.Fatalf("the layout of this build is %x, %v", this, err)
	}
	differs := func(what string) {
		t.Helper()
		layout := layoutOf(types)
		if other, same := seen[layout]; same {
			t.Errorf("%s: the layout is that of %s", what, other)
		}
		seen[layout] = what
	}
	members := func(name string, size *uint32, members []btf.Member) {
		*size += 8
		differs("size of " + name)
		*size -= 8
		for i := range members {
			m := &members[i]
			was, what := *m, fmt.Sprintf("%s, member %d %s: ", name, i, m.Name)
			m.Name += "_"
			differs(what + "name")
			*m = was
			m.Offset += 8
			differs(what + "offset")
			*m = was
			m.BitfieldSize = 3
			differs(what + "bits")
			*m = was
			m.Type = &btf.Int{Size: 2, Encoding: btf.Signed}
			if m.Name != "overhead" { // which is of that type
				differs(what + "type")
			}
			*m = was
		}
	}
	visited := map[btf.Type]bool{}
	var visit func(btf.Type)
	visit = func(typ btf.Type) {
		typ = btf.UnderlyingType(typ)
		if visited[typ] {
			return
		}
		visited[typ] = true
		switch typ := typ.(type) {
		case *btf.Struct:
			members("struct "+typ.Name, &typ.Size, typ.Members)
			for _, m := range typ.Members {
				visit(m.Type)
			}
		case *btf.Array:
			typ.Nelems++
			differs(fmt.Sprintf("number of %v", typ.Type))
			typ.Nelems--
			visit(typ.Type)
		case *btf.Enum:
			for i := range typ.Values {
				v := &typ.Values[i]
				was := *v
				v.Value++
				differs("value of " + v.Name)
				*v = was
				v.Name += "_"
				differs("name of " + was.Name)
				*v = was
			}
		}
	}
	visit(types)
	for _, name := range []string{"RULE_ECN", "UNIT_BITS", "PHASE_BY_TIME"} { // each kind of constant is among them
		if !contains(seen, "value of "+name) {
			t.Errorf("%s has no part in the layout", name)
		}
	}
	if layout := layoutOf(types); seen[layout] != "the type as it is" {
		t.Error("the types are not as they were")
	}
	// The maps, and the names of their pins.
	pinned["another"] = "another"
	differs("one map more")
	delete(pinned, "another")
}

func contains(seen map[uint64]string, what string) bool {
	for _, s := range seen {
		if s == what {
			return true
		}
	}
	return false
}
