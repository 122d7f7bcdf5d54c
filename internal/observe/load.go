package observe

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"runtime"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A pair is the two programs of a kind of hook: before all programs of shapectl, and behind them.
type pair struct{ before, behind *ebpf.Program }

func (p pair) close() {
	p.before.Close()
	p.behind.Close()
}

// names are the names of a pair's programs in bpf/observe.c.
type names struct{ before, behind string }

var (
	rttPrograms     = names{bpf.ObserveProgRttBefore, bpf.ObserveProgRttBehind}
	talkersPrograms = names{bpf.ObserveProgTalkersBefore, bpf.ObserveProgTalkersBehind}
)

// objects are the maps of a process that looks, and its programs by kind of hook.
type objects struct {
	names    names
	settings bpf.ObserveWatching
	secret   [len(bpf.AbiHook{}.Secret)]uint32 // so that no sender chooses whether its flows are followed
	nat      bool                              // hosts are those behind NAT
	virtual  bool                              // time is that of the packets, for tests
	maps     map[string]*ebpf.Map
	kinds    map[program.Kind]pair
}

// newObjects makes the maps of these sizes. A budget is at most so many a second on all CPUs together.
func newObjects(of names, sizes map[string]uint32, settings bpf.ObserveWatching) (*objects, error) {
	o := &objects{names: of, settings: settings, maps: map[string]*ebpf.Map{}, kinds: map[program.Kind]pair{}}
	rand.Read(unsafe.Slice((*byte)(unsafe.Pointer(&o.secret)), unsafe.Sizeof(o.secret)))
	spec, err := bpf.ObserveSpec()
	if err != nil {
		return nil, err
	}
	for name, size := range sizes {
		m := spec.Maps[name]
		m.MaxEntries = size
		if o.maps[name], err = ebpf.NewMap(m); err != nil {
			o.close()
			return nil, fmt.Errorf("make the map %s: %w", name, err)
		}
	}
	return o, nil
}

// windows is how many budgets there are in a second: WINDOW_BITS of bpf/observe.c.
const windows = 1e9 / (1 << 27)

// budget is the share of one CPU and window in so many a second.
func budget(perSecond int) uint32 {
	return uint32(max(1, float64(perSecond)/windows/float64(runtime.NumCPU())))
}

// pair loads the programs of a kind, once.
func (o *objects) pair(d policy.Direction, match policy.Match, l2Bytes uint8) (pair, error) {
	kind := program.KindOf(d, match, netinfo.Device{L2Bytes: l2Bytes})
	if p, ok := o.kinds[kind]; ok {
		return p, nil
	}
	spec, err := bpf.ObserveSpec()
	if err != nil {
		return pair{}, err
	}
	hook := kind.Settings(bpf.AbiHook{Secret: o.secret})
	if o.nat {
		hook.Nat = 1
	}
	if o.virtual {
		hook.VirtualClock = 1
	}
	settings, constants := spec.Variables[bpf.ObserveVarSettings], spec.Variables[bpf.ObserveVarHook]
	if err := errors.Join(settings.Set(o.settings), constants.Set(hook)); err != nil {
		return pair{}, fmt.Errorf("set the constants of a program: %w", err)
	}
	for name, p := range spec.Programs {
		if name != o.names.before && name != o.names.behind {
			delete(spec.Programs, name)
		} else if err := program.WriteConstants(p.Instructions, hook); err != nil {
			return pair{}, err
		} else {
			p.Name = netinfo.LookName
		}
	}
	maps.DeleteFunc(spec.Variables, func(_ string, v *ebpf.VariableSpec) bool { return v != settings && v != constants })
	for name := range spec.Maps {
		if m := o.maps[name]; m != nil {
			spec.Maps[name].MaxEntries = m.MaxEntries()
		} else if name != ".rodata" {
			delete(spec.Maps, name)
		}
	}
	c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: o.maps})
	if err != nil {
		return pair{}, fmt.Errorf("load a program: %w", err)
	}
	defer c.Close()
	p := pair{c.DetachProgram(o.names.before), c.DetachProgram(o.names.behind)}
	o.kinds[kind] = p
	return p, nil
}

func (o *objects) close() {
	for _, p := range o.kinds {
		p.close()
	}
	for _, m := range o.maps {
		if m != nil {
			m.Close()
		}
	}
}

// lost is what the budgets left out, of samples and of flows, hosts and talkers.
func (o *objects) lost() (samples, flows uint64, err error) {
	var all []bpf.ObserveSpending
	if err := o.maps[bpf.ObserveMapBudget].Lookup(uint32(0), &all); err != nil {
		return 0, 0, fmt.Errorf("read what was left out: %w", err)
	}
	for _, cpu := range all {
		samples += cpu.Lost[bpf.ObserveExpenseSAMPLES]
		flows += cpu.Lost[bpf.ObserveExpenseELEMENTS]
	}
	return samples, flows, nil
}

// checkTCX says why no programs can run beside those of shapectl.
func checkTCX() error {
	if _, err := netinfo.TCXPrograms(1, policy.Egress); errors.Is(err, fs.ErrPermission) {
		return err
	}
	if !netinfo.HasTCX() {
		return ErrNoTCX
	}
	return nil
}

// ErrNoTCX means that the kernel cannot run programs beside those of shapectl.
var ErrNoTCX = errors.New("this kernel has no tcx; Linux has it from 6.6 on")
