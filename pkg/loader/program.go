package loader

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// programs are the two meters; each sees to the rules of its own algorithm.
var programs = map[policy.Algorithm]struct {
	spec func() (*ebpf.CollectionSpec, error)
	name string
}{
	policy.GCRA:  {bpf.LoadGcra, bpf.GcraProgShapectlGcra},
	policy.Leaky: {bpf.LoadLeaky, bpf.LeakyProgShapectlLeaky},
}

// ErrPerfmon means that the kernel's verifier refused a program of a process that lacks CAP_PERFMON, of
// which it demands more: that nothing be read past a limit even in branches that are not taken. Before
// Linux 6.17 it refuses what it could also have made safe by itself.
var ErrPerfmon = errors.New("this kernel's verifier wants CAP_PERFMON, too")

// Load loads the program of an algorithm onto a set of maps.
func Load(algorithm policy.Algorithm, set *maps.Set) (*ebpf.Program, error) {
	p := programs[algorithm]
	if err := step.Try("load a program"); err != nil {
		return nil, err
	}
	spec, err := p.spec()
	if err != nil {
		return nil, fmt.Errorf("read the built-in program %s: %w", p.name, err)
	}
	for name, m := range set.Replacements() {
		spec.Maps[name].MaxEntries, spec.Maps[name].ValueSize = m.MaxEntries(), m.ValueSize()
	}
	collection, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: set.Replacements()})
	if err != nil {
		var refused *ebpf.VerifierError
		if errors.As(err, &refused) {
			if have, _ := Capabilities(); have&(1<<unix.CAP_PERFMON|1<<unix.CAP_SYS_ADMIN) == 0 {
				return nil, fmt.Errorf("load %s: %w: %w", p.name, ErrPerfmon, err)
			}
			return nil, fmt.Errorf("load %s: the kernel's verifier refused it: %w", p.name, err)
		}
		return nil, fmt.Errorf("load %s: %w", p.name, err)
	}
	defer collection.Close()
	return collection.DetachProgram(p.name), nil
}

// build tells the programs of this build from those of another.
var build = sync.OnceValues(func() (id [12]byte, err error) {
	hash := sha256.New()
	for _, algorithm := range []policy.Algorithm{policy.GCRA, policy.Leaky} {
		spec, err := programs[algorithm].spec()
		if err != nil {
			return id, fmt.Errorf("read the built-in programs: %w", err)
		}
		if err := spec.Programs[programs[algorithm].name].Instructions.Marshal(hash, spec.ByteOrder); err != nil {
			return id, fmt.Errorf("read the built-in programs: %w", err)
		}
	}
	copy(id[:], hash.Sum(nil))
	return id, nil
})
