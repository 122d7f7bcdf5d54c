package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// alivePin is a device map that holds the loopback device of a home's namespace. The
	// kernel removes the entry with the device when the namespace ends, and never before.
	alivePin = "alive"
	// loopback is the index of that device in every namespace.
	loopback = 1
)

// markAlive pins the mark that isDead reads. It must be the first pin of a home.
func (dir home) markAlive() error {
	pin := dir.pin(alivePin)
	if bpffs.Exists(pin) {
		return nil
	}
	spec := &ebpf.MapSpec{Name: "shapectl_alive", Type: ebpf.DevMap, ValueSize: 4}
	if err := bpffs.Value(pin, spec, uint32(loopback)); err != nil {
		return fmt.Errorf("mark the pins as those of this network namespace: %w", err)
	}
	return nil
}

// isDead reports whether the namespace of a home no longer exists. The error wraps
// fs.ErrNotExist if a killed command has not marked the home.
func (dir home) isDead() (bool, error) {
	if err := bpffs.TrustDir(string(dir)); err != nil {
		return false, err
	}
	m, err := ebpf.LoadPinnedMap(dir.pin(alivePin), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return false, err
	}
	defer m.Close()
	var index uint32
	err = m.Lookup(uint32(0), &index)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return true, nil
	}
	return false, err
}

// locks are the directories of a home that processes lock. A home without rules has no others.
var locks = []string{string(ClusterLeases), string(LineLeases), lockPin}

func isState(e os.DirEntry) bool { return e.IsDir() && !slices.Contains(locks, e.Name()) }

// remove removes a home without rules.
func (dir home) remove() {
	entries, err := os.ReadDir(string(dir))
	if err != nil || slices.ContainsFunc(entries, isState) {
		return
	}
	for _, e := range entries {
		if !e.IsDir() && bpffs.Unlink(dir.pin(e.Name())) != nil {
			return
		}
	}
	for _, name := range locks {
		bpffs.Unlink(dir.pin(name))
	}
	bpffs.Unlink(string(dir)) // refused unless empty
}

// collectDevices removes the hooks of devices that no longer exist and that nobody keeps, and returns their names. It skips a hook that
// cannot be judged or removed, because the command must not fail for that.
func (p *pins) collectDevices(keep func(device string) bool) (names []string) {
	devices, err := netinfo.Devices()
	if p.store == nil || err != nil {
		return nil
	}
	called, here := map[int]string{}, map[string]bool{}
	for _, dev := range devices {
		called[dev.Index], here[dev.Name] = dev.Name, true
	}
	haveRules := p.store.Have(maps.Exists)
	hooks, gone, _ := p.hooksOf(func(set *maps.Set) bool {
		return called[set.Ifindex()] != set.Device() && haveRules[set.Number()]
	})
	defer CloseHooks(hooks)
	defer CloseHooks(gone)
	for _, h := range hooks { // one that is here again has other rules
		if h.State == Gone && (keep == nil || !keep(h.Was) || here[h.Was]) {
			gone = append(gone, h)
		}
	}
	if gone == nil || p.flush(ApplyOptions{Final: true, beside: true}, gone) != nil {
		return nil
	}
	for _, h := range gone {
		names = append(names, h.Was)
	}
	return names
}

// collectPools removes the pools of devices that no longer exist, unless anything is within them.
func (p *pins) collectPools() error {
	return p.dropPools(func(pool policy.Rule) bool {
		if pool.Label.Owner.Device == "" {
			return false
		}
		_, err := netinfo.KnownDevice(pool.Label.Owner.Device)
		return errors.Is(err, netinfo.ErrNoDevice)
	})
}

// DropPools removes some pools, unless anything is within them. The last change goes on without them.
func (n *Namespace) DropPools(which func(policy.Rule) bool) error { return n.pins.dropPools(which) }

func (p *pins) dropPools(which func(policy.Rule) bool) error {
	if p.store == nil {
		return nil
	}
	unused := p.store.Unused(which)
	if unused == nil {
		return nil
	}
	return p.changing(func() error {
		p.store.Pools().Remove(unused...)
		return p.drop()
	})
}

// collectNamespaces removes the homes of namespaces that no longer exist, with hooks on devices that left them in time.
func (at place) collectNamespaces() {
	for _, dir := range at.others() {
		dead, err := dir.isDead()
		if !dead && !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		unlock, err := dir.lock(true, 0)
		if err != nil {
			continue // another command is using it
		}
		if dead {
			dir.clear()
		}
		dir.remove() // also a home that a killed command made and did not mark
		unlock()
	}
}

// clear removes the hooks and maps of a namespace that no longer exists.
func (dir home) clear() {
	hooks, _, err := dir.hookDirs()
	for _, at := range hooks {
		at.index = -1 // filters ended with the namespace
		err = errors.Join(err, removeHook(at))
	}
	if err != nil {
		return // a hook may use the maps
	}
	entries, _ := bpffs.List(string(dir))
	for _, e := range entries {
		if isState(e) {
			bpffs.RemoveAll(dir.pin(e.Name()))
		}
	}
}

// Leftovers are the directories of namespaces that no longer exist. With an error they are those that could be read.
func Leftovers(o Options) (left []string, err error) {
	at, err := locate(o)
	for _, dir := range at.others() {
		dead, failed := dir.isDead()
		if dead {
			left = append(left, string(dir))
		} else if !errors.Is(failed, fs.ErrNotExist) && !errors.Is(failed, fs.ErrPermission) { // only root may read those of another user
			err = errors.Join(err, failed)
		}
	}
	return left, err
}

// Elsewhere returns the directions of devices, among those for which which is true, that have limits of ErrElsewhere, as
// far as this process may look. others is whether other namespaces have pins: these limits may be theirs, as devices move.
func Elsewhere(n *Namespace, which func(device string, d policy.Direction) bool) (found []string, others bool) {
	if found = n.elsewhere(which); found != nil && !n.pins.writing { // another command may have attached them since n was opened
		if now, err := Read(n.pins.options); err == nil {
			found = now.elsewhere(which)
			now.Close()
		}
	}
	return found, len(n.pins.place.others()) > 0
}

func (n *Namespace) elsewhere(which func(device string, d policy.Direction) bool) (found []string) {
	devices, _ := netinfo.Devices()
	for _, dev := range devices {
		for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
			if which(dev.Name, d) && errors.Is(elsewhere(n, dev, d), ErrElsewhere) {
				found = append(found, dev.Name+" "+d.String())
			}
		}
	}
	return found
}

// EndOldChange ends the last change for good if it is over, older than an age, and has
// left hooks without a rule, which are kept only for a rollback.
func (n *Namespace) EndOldChange(age time.Duration) error {
	if n.pins.store == nil {
		return nil
	}
	at := n.pins.store.Begins() // 0 if a command has ended the change already
	switch state, expired := n.pins.store.Change(); state {
	case maps.Pending:
		return nil
	case maps.Expired:
		at = expired
	}
	if at != 0 && at+uint64(age) > maps.Now() {
		return nil
	}
	sets := n.pins.sets() // none if there are only pools
	haveRules := n.pins.store.Have(maps.InForce)
	if len(sets) > 0 && !slices.ContainsFunc(sets, func(set *maps.Set) bool { return !haveRules[set.Number()] }) {
		return nil
	}
	return n.pins.endChange()
}
