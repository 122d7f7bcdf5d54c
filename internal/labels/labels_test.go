package labels

import (
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Each field of a label is kept, whatever the others are.
func TestLabelsAreKept(t *testing.T) {
	testenv.Root(t)
	spec, err := bpf.Spec()
	testenv.Must(t, err)
	spec.Maps[bpf.ShapectlMapLabels].MaxEntries = 100
	m, err := ebpf.NewMap(spec.Maps[bpf.ShapectlMapLabels])
	testenv.Must(t, err)
	defer m.Close()
	var parts uint32
	l, roll := Labels{Map: m, Parts: &parts}, rand.New(rand.NewPCG(testenv.Seed(t), 1))
	for range 1000 {
		var want params.Texts
		for _, f := range fields {
			v := f.in(&want)
			switch some := roll.Uint64(); {
			case some%2 == 0: // zero
			case v.CanUint():
				v.SetUint(some)
			case v.CanInt():
				v.SetInt(int64(some))
			case v.Kind() == reflect.Bool:
				v.SetBool(true)
			default:
				v.SetString(strings.Repeat("é x"[:roll.IntN(5)], roll.IntN(50)))
			}
		}
		rule := policy.Rule{Label: want.Label, Cluster: want.Cluster, Adapt: want.Adapt, Also: want.Also}
		testenv.Must(t, l.Write(7, 1, rule))
		if int(parts) != len(Parts(rule)) {
			t.Fatalf("%d parts are counted, want %d", parts, len(Parts(rule)))
		}
		if got := l.Read(7, 1); got != want {
			t.Fatalf("wrote %+v, read %+v", want, got)
		}
		l.Discard(7, params.Version{AbiParams: &bpf.AbiParams{Flags: params.Label}, Index: 1})
		if parts != 0 || l.Read(7, 1) != (params.Texts{}) {
			t.Fatalf("discarded, %d parts are left of %+v", parts, want)
		}
	}
}
