package loader

import (
	libmaps "maps"
	"time"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// judgedFor is how long a kept State of a hook counts. To find it out takes some system calls for each hook.
const judgedFor = 10 * time.Second

// A Kept is what stays open and known between two readings of a namespace: the maps in memory, the labels of rules,
// and, for 10 s, the State of hooks. It holds no lock between the readings. The zero Kept keeps nothing yet.
type Kept struct {
	generation Generation
	store      *maps.Store
	writing    bool // the maps are open for changes
	judged     map[hookID]judgement
}

// A hookID names a hook: a set in use by a device.
type hookID struct {
	set       uint32
	index     int
	device    string
	direction policy.Direction
}

// A judgement is what judge found out about a hook.
type judgement struct {
	state  State
	mode   Mode
	device netinfo.Device
	at     time.Time
}

// Read is Read for a process that reads the namespace again and again.
func (k *Kept) Read(o Options) (*Namespace, error) { return read(o, k) }

// Close closes what was kept.
func (k *Kept) Close() {
	if k == nil {
		return
	}
	if k.store != nil {
		k.store.Close()
	}
	*k = Kept{writing: k.writing}
}

// take returns the kept maps if they are those of a generation, nil if they are not.
func (k *Kept) take(generation string) (*maps.Store, error) {
	if k == nil || k.store == nil {
		return nil, nil
	}
	is, err := identify(generation)
	if err != nil {
		return nil, err
	}
	if is != k.generation {
		k.Close()
		return nil, nil
	}
	libmaps.DeleteFunc(k.judged, func(_ hookID, was judgement) bool { return time.Since(was.at) >= judgedFor })
	return k.store.Hold(), nil
}

// put keeps the maps of a generation.
func (k *Kept) put(generation string, store *maps.Store) (err error) {
	if k == nil {
		return nil
	}
	if k.generation, err = identify(generation); err != nil {
		return err
	}
	store.RememberLabels()
	k.store, k.judged = store.Hold(), map[hookID]judgement{}
	return nil
}

// judge finds the state of a hook, and its device.
func (k *Kept) judge(h *Hook) error {
	if k == nil {
		return h.judge()
	}
	id := hookID{h.Set.Number(), h.Set.Ifindex(), h.Was, h.Direction}
	if was, ok := k.judged[id]; ok {
		h.State, h.Mode, h.Device = was.state, was.mode, was.device
		return nil
	}
	if err := h.judge(); err != nil {
		return err
	}
	k.judged[id] = judgement{h.State, h.Mode, h.Device, time.Now()}
	return nil
}
