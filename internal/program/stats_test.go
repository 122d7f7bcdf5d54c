package program

import (
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
)

// The verifier looks at few instructions, so programs load quickly on any kernel.
func TestVerifierIsQuick(t *testing.T) {
	testenv.Root(t)
	for _, size := range []maps.Size{{}, {Pools: true}, {Colours: true}, {Pools: true, Colours: true, Affected: 8}} {
		size.Rules, size.Buckets = 256, 1<<16
		store, err := maps.New(size, bpf.AbiHook{})
		testenv.Must(t, err)
		defer store.Close()
		all := 0
		for _, name := range []string{Name, bpf.ShapectlProgClimb} {
			spec, err := bpf.Spec()
			testenv.Must(t, err)
			spec.Programs = map[string]*ebpf.ProgramSpec{name: spec.Programs[name]}
			for name, m := range store.Replacements() {
				spec.Maps[name].MaxEntries, spec.Maps[name].ValueSize = m.MaxEntries(), m.ValueSize()
			}
			testenv.Must(t, WriteConstants(spec.Programs[name].Instructions, ingress.Settings(store.Hook())))
			began := time.Now()
			c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
				MapReplacements: store.Replacements(), Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats},
			})
			if err != nil {
				t.Errorf("%+v: %s: %v", size, name, err)
				continue
			}
			took := time.Since(began)
			log := c.Programs[name].VerifierLog
			c.Close()
			n, err := strconv.Atoi(regexp.MustCompile(`processed (\d+) insns`).FindStringSubmatch(log)[1])
			testenv.Must(t, err)
			all += n
			t.Logf("%+v %s %d in %v: %s", size, name, n, took, log)
		}
		if all > 50_000 {
			t.Errorf("%+v: the verifier looks at %d instructions", size, all)
		}
	}
}
