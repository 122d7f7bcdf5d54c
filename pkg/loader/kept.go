package loader

import (
	"errors"
	"fmt"
	"io/fs"
	libmaps "maps"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Generation identifies the maps of a namespace. Growth, another build, and the first rule after none make others. It
// is the zero value where there are none.
type Generation struct {
	device, inode uint64        // of its directory
	changed       unix.Timespec // tells it from a later one with the same inode
}

// identify identifies the generation in a directory.
func identify(dir string) (Generation, error) {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return Generation{}, fmt.Errorf("look at the pins in %s: %w", dir, err)
	}
	return Generation{st.Dev, st.Ino, st.Ctim}, nil
}

// CurrentGeneration is that of the calling thread's namespace.
func CurrentGeneration(o Options) (Generation, error) {
	at, err := locate(o)
	if err != nil {
		return Generation{}, err
	}
	for {
		names, err := generationsIn(string(at.home()))
		if errors.Is(err, fs.ErrNotExist) || err == nil && len(names) == 0 {
			return Generation{}, nil
		} else if err != nil {
			return Generation{}, err
		}
		newest, err := identify(at.home().pin(names[len(names)-1]))
		if !errors.Is(err, fs.ErrNotExist) { // else a command has replaced it just now
			return newest, err
		}
	}
}

// judgedFor is how long a kept State of a hook counts. To find it out takes some system calls for each hook.
const judgedFor = 10 * time.Second

// A Kept is what stays open and known between two readings of a namespace: the maps in memory
// and, for 10 s, the State of hooks. It holds no lock between the readings. The zero Kept keeps nothing yet. A nil one never does.
type Kept struct {
	generation Generation
	store      *maps.Store
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
func (k *Kept) Read(o Options) (*Namespace, error) {
	n, err := open(o, false, k)
	if err == nil && n.pins.store == nil {
		k.Close() // there are no rules any more
	}
	return n, err
}

// Close closes what was kept.
func (k *Kept) Close() {
	if k == nil {
		return
	}
	if k.store != nil {
		k.store.Close()
	}
	*k = Kept{}
}

// take returns the kept maps if they are those of a generation, nil if they are not.
func (k *Kept) take(is Generation) *maps.Store {
	if k == nil || k.store == nil {
		return nil
	}
	if is != k.generation {
		k.Close()
		return nil
	}
	libmaps.DeleteFunc(k.judged, func(_ hookID, was judgement) bool { return time.Since(was.at) >= judgedFor })
	return k.store.Hold()
}

// put keeps the maps of a generation.
func (k *Kept) put(generation Generation, store *maps.Store) {
	if k != nil {
		*k = Kept{generation, store.Hold(), map[hookID]judgement{}}
	}
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
