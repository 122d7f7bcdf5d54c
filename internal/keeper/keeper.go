// Package keeper gives devices that appear the rules that a policy has for them,
// and has removed what is left of devices and namespaces that no longer exist.
// What is in force in a direction of a device it leaves alone.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// settle is how long a device waits for others that appear with it.
	settle = 20 * time.Millisecond
	// Commands wait up to ten seconds for their turn, so it is given up every now and then.
	turnTime, pause = 500 * time.Millisecond, 50 * time.Millisecond
	// turnDevices get their rules in one turn at the most.
	turnDevices = 64
	// retry is when devices are tried again for which others left no turn.
	retry = time.Second
	// rollbackFor is how long a change can be taken back that left hooks without a rule: they take memory until then.
	rollbackFor = time.Hour
)

// sweepEvery is how often leftovers are looked for that no device told of: those of network namespaces.
var sweepEvery = time.Minute

// A Keeper looks after the devices of a network namespace.
type Keeper struct {
	Options loader.Options
	Told    func(Event)  // what was done
	Noted   func(string) // what became of the policy
	Warned  func(error)  // what could not be done; it goes on

	file, lastGood string
	policy         lastgood.Policy
	read           version // of file, when it was read
	pending        bool    // devices wait for a change to be confirmed, or to be over, and that was told
}

// An Event is that rules of a direction of a device are in force now.
type Event struct {
	Device    string
	Direction policy.Direction
	Rules     int
	Policy    string // the path of the one that has them
	Change    loader.Change
}

func (e Event) String() string {
	rules := "1 rule"
	if e.Rules != 1 {
		rules = fmt.Sprintf("%d rules", e.Rules)
	}
	return fmt.Sprintf("%s %s: %s of %s", e.Device, e.Direction, rules, e.Policy)
}

// A version tells contents of a file from earlier ones.
type version struct {
	inode, bytes     uint64
	changed, written unix.Timespec
}

// Load reads the policy to keep to: that in file or, where it does not validate,
// the one in lastGood, if that is not "". Without either there is nothing to Run for.
func (k *Keeper) Load(file, lastGood string) error {
	k.file, k.lastGood = file, lastGood
	k.read = versionOf(k.file)
	p, err := lastgood.Load(file, lastGood)
	if err != nil {
		return err
	}
	k.policy = p
	if p.Problem != nil {
		k.Noted(fmt.Sprintf("%v\nusing the last good policy, %s", p.Problem, p.Path))
	}
	return nil
}

// Devices are the devices and patterns for which the policy has rules.
func (k *Keeper) Devices() []string { return k.policy.Devices() }

// reload reads the policy again, for devices that appear from now on.
func (k *Keeper) reload() {
	if err := k.Load(k.file, k.lastGood); err != nil {
		k.Noted(fmt.Sprintf("%v\nkeeping to the policy as it was read before, from %s", err, k.policy.Path))
	} else if k.policy.Problem == nil {
		k.Noted(k.file + " was read again: it holds for devices that appear from now on")
	}
}

// Run looks after the network namespace of the calling thread until ctx is
// done. Devices that are there already are treated as such that appear; ready
// is called when they are done. A value on reread has the policy read again,
// which happens by itself, too, if the file has changed when a device appears.
func (k *Keeper) Run(ctx context.Context, reread <-chan os.Signal, ready func()) error {
	arrivals := netinfo.NewArrivals()
	defer arrivals.Close()
	sweeps := time.NewTicker(sweepEvery)
	defer sweeps.Stop()
	var waiting []netinfo.Device
	due := false
	for ctx.Err() == nil {
		fresh, deleted, err := arrivals.Take()
		if err != nil {
			return err
		}
		if len(fresh) > 0 && versionOf(k.file) != k.read {
			k.reload()
		}
		waiting = append(waiting, fresh...)
		if deleted || due {
			if err := k.sweep(ctx); err != nil {
				return err
			}
		}
		due = false
		if waiting, err = k.serve(ctx, waiting); err != nil {
			return err
		}
		if ready != nil {
			ready()
			ready = nil
		}
		var again <-chan time.Time
		if len(waiting) > 0 {
			again = time.After(retry)
		}
		select {
		case <-ctx.Done():
		case <-reread:
			k.reload()
		case <-again:
		case <-sweeps.C:
			due = true
		case <-arrivals.More():
			sleep(ctx, settle)
		}
	}
	return nil
}

// sweep opens the namespace for changes, which removes leftovers, and frees what a
// change has left. What others leave no time for is left to the next one.
func (k *Keeper) sweep(ctx context.Context) error {
	for more := true; more && ctx.Err() == nil; {
		n, err := loader.Write(k.Options)
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil
		}
		if err != nil {
			return err
		}
		more, err = n.EndOldChange(rollbackFor)
		n.Close()
		if err != nil {
			k.Warned(fmt.Errorf("free what a change has left: %w", err))
			return nil
		}
		if more {
			sleep(ctx, pause)
		}
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// versionOf is the zero version of a file that can not be looked at.
func versionOf(path string) version {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return version{}
	}
	return version{st.Ino, uint64(st.Size), st.Ctim, st.Mtim}
}

// serve gives devices what the policy has for them, and returns those whose turn did not come.
func (k *Keeper) serve(ctx context.Context, devices []netinfo.Device) ([]netinfo.Device, error) {
	for len(devices) > 0 && ctx.Err() == nil {
		done, err := k.serveSome(ctx, devices)
		devices = devices[done:]
		pending, busy := errors.Is(err, loader.ErrPending), errors.Is(err, unix.EWOULDBLOCK)
		if busy || pending && !k.pending {
			k.Warned(fmt.Errorf("rules wait, of %s: %w", plain.Count(len(devices), "device"), err))
		}
		if k.pending = pending; pending || busy {
			break
		}
		if err != nil {
			return devices, err
		}
		if len(devices) > 0 {
			sleep(ctx, pause)
		}
	}
	return devices, nil
}

// serveSome does as many as there is time for in one turn.
func (k *Keeper) serveSome(ctx context.Context, devices []netinfo.Device) (done int, err error) {
	n, err := loader.Write(k.Options)
	if err != nil {
		return 0, err
	}
	defer n.Close()
	until, expired, err := n.PendingChange()
	if err != nil {
		k.Warned(err)
	}
	if until != 0 {
		return 0, loader.ErrPending // what lasts is not known yet
	}
	from := k.policy
	if expired != 0 && k.lastGood != "" {
		if last, err := lastgood.Load(k.lastGood, ""); err == nil {
			from = last // the file may well have what nobody confirmed
		}
	}
	hooks, err := n.Hooks()
	if err != nil {
		k.Warned(err)
	}
	defer loader.CloseHooks(hooks)
	limited := map[int][]policy.Direction{} // by index: where devices have rules in force
	lost := map[string][]*loader.Hook{}     // by name: where they have rules that are not in force
	for _, h := range hooks {
		if h.InForce() {
			limited[h.Device.Index] = append(limited[h.Device.Index], h.Direction)
		} else {
			lost[h.Name()] = append(lost[h.Name()], h)
		}
	}
	var gifts []gift
	for began := time.Now(); done < len(devices) && time.Since(began) < turnTime && len(gifts) < turnDevices && ctx.Err() == nil; done++ {
		dev := devices[done]
		has := limited[dev.Index]
		if len(has) == 2 || !isThere(dev) {
			continue
		}
		tables, err := from.For(policyfile.Device{Name: dev.Name, L2Bytes: dev.L2Bytes})
		tables = slices.DeleteFunc(tables, func(t policy.Table) bool { return slices.Contains(has, t.Direction) })
		if err == nil && len(tables) > 0 {
			if err = n.Flush(lost[dev.Name]...); err == nil {
				gifts = append(gifts, gift{dev, tables})
			}
		}
		if err != nil {
			k.warn(dev, err)
		}
	}
	k.give(n, gifts, from.Path)
	return done, nil
}

// isThere reports whether a device is there still, and has its name; one that has
// another name, or was made again, is told of once more.
func isThere(dev netinfo.Device) bool {
	now, err := netinfo.DeviceByName(dev.Name)
	return err != nil && !errors.Is(err, netinfo.ErrNoDevice) || err == nil && now.Index == dev.Index
}
