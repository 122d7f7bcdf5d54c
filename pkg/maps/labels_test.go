package maps_test

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	longestLabel = 3 * 200
	labelParts   = longestLabel/int(bpf.AbiLayoutLABEL_BYTES) + 1
)

// randomLabel may be empty, and may fill its last part exactly.
func randomLabel(roll *rand.Rand) policy.Label {
	text := func() string { return strings.Repeat(string(rune('a'+roll.IntN(26))), roll.IntN(4)*roll.IntN(50)) }
	return policy.Label{Plan: text(), Name: text(), Note: text()}
}

// storedLabels counts the parts in the map.
func storedLabels(r *rig) (parts int) {
	r.Helper()
	var key bpf.AbiLabelKey
	var part bpf.AbiLabel
	all := r.Store.Replacements()[bpf.ShapectlMapLabels].Iterate()
	for all.Next(&key, &part) {
		parts++
	}
	testenv.Must(r.T, all.Err())
	return parts
}

// A store that grows keeps its labels, and knows how many parts they have.
func TestLabelsGrow(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 8, Buckets: 4, Labels: 8})
	named := rule("10.0.0.7/32", 8000, 2000)
	named.Label = policy.Label{Plan: "gold", Name: strings.Repeat("n", 40), Note: "note"}
	r.put(named)
	size := r.Store.Size()
	size.Labels *= 4
	derived, err := r.Store.Derive(size, r.Store.Hook())
	testenv.Must(t, err)
	defer derived.Close()
	set := derived.View(view)
	if e, ok := set.Find(named.Prefix); !ok || e.Rule != named {
		t.Errorf("after growth, the rule is %+v", e.Rule)
	}
	if got, want := derived.Lacks(maps.Size{Labels: size.Labels}).Labels, uint32(2); got != want {
		t.Errorf("the labels have %d parts, want %d", got, want)
	}
}

// A new name changes neither buckets nor counters.
func TestRename(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 1, Buckets: 4, Labels: 8})
	have := rule("10.0.0.7/32", 8000, 2000)
	e := r.put(have)
	r.send(policy.GCRA, to("10.0.0.7"), 1500)
	before, counters := r.units(e, to("10.0.0.7")), r.Store.Counters(e.ID)
	have.Label.Name = "alice"
	if again := r.put(have); again.ID != e.ID {
		t.Errorf("the renamed rule has id %d, want %d", again.ID, e.ID)
	}
	if after := r.units(e, to("10.0.0.7")); after != before || r.Store.Counters(e.ID) != counters {
		t.Errorf("renamed, the level is %d units and not %d, counters are %+v and not %+v", after, before, r.Store.Counters(e.ID), counters)
	}
}
