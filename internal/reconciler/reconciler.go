// Package reconciler applies a policy's rules to devices as they appear, and removes
// leftovers of deleted devices and namespaces. In a direction of a device that has rules
// in force, it changes only those for addresses of hosts, which it follows, and those in
// a pool of the name that the device had before.
package reconciler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/pulse"
	"github.com/shapectl/shapectl/pkg/loader"
	shapemaps "github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// settle is the time to wait for more devices that appear together.
	settle = 20 * time.Millisecond
	// sweepAfter is how long leftovers of a deleted device may stay, so that many that leave together cost one sweep, which
	// holds up none that appear meanwhile.
	sweepAfter = 500 * time.Millisecond
	// Other commands wait up to ten seconds for the lock, so it is released every turnTime.
	turnTime, pause = 500 * time.Millisecond, 50 * time.Millisecond
	// turnDevices is the maximum number of devices whose rules are applied under one lock.
	turnDevices = 64
	// retry is the interval for devices whose rules could not be applied, because
	// another command had the lock or a change was pending.
	retry = time.Second
	// lookEvery is the interval of looks for room while a guarantee waits.
	lookEvery = 2 * time.Second
)

// sweepEvery is the interval of searches for leftovers of network namespaces, whose end is no event here.
// Rules that something else has detached limit nothing until then.
var sweepEvery = 10 * time.Second

// rollbackFor is how long a change can be rolled back: hooks without rules use memory until then.
var rollbackFor = time.Hour

// A Reconciler applies a policy to the devices of a network namespace: the one in force, or that of the file of Load.
type Reconciler struct {
	Options     loader.Options
	OnApply     func(Event)  // is called when rules were applied
	OnNotice    func(string) // is called with messages about the policy
	OnWarning   func(error)  // is called for errors that do not end Run
	pulse.Pulse              // of Run

	file, lastGood string
	policy         lastgood.Policy
	read           string       // versionsOf file and those that it includes, when they were read
	missing        bool         // there was no file when it was read
	packed         packedPolicy // the last one that was recorded
	unrecorded     bool         // it was read, and is to be recorded
	undone         bool         // it was reverted, there is no other, and OnNotice was called
	pending        bool         // devices wait for the end of a pending change, and OnWarning was called

	failed map[int]netinfo.Device // whose rules could not be applied, by index
	warned map[string]bool        // what warnOnce has reported
	hosts  followed

	waits   map[string]bool // who waits for room for his guarantees
	granted shapemaps.Stamp // of the rules among which guarantees were given
}

// An Event says that rules were applied to a direction of a device.
type Event struct {
	Device    string
	Direction policy.Direction
	Rules     int
	Policy    string // its path
	Change    loader.Change
}

func (e Event) String() string {
	return fmt.Sprintf("%s %s: %s of %s", e.Device, e.Direction, plain.Count(e.Rules, "rule"), e.Policy)
}

// nothing is a policy without rules.
func nothing(file string) lastgood.Policy {
	f, _ := policyfile.Parse(file, []byte("devices: {}")) // which is valid
	return lastgood.Policy{File: f}
}

// Load reads the policy in file. If it is not valid, it reads the one in lastGood, unless
// that is "". If there is no file, the error is fs.ErrNotExist. Then devices that appear get no rules until there is one.
func (r *Reconciler) Load(file, lastGood string) error {
	r.file, r.lastGood = file, lastGood
	r.read = versions(file, r.policy)
	p, err := lastgood.Load(file, lastGood)
	if r.missing = errors.Is(err, fs.ErrNotExist); r.missing && r.policy.File == nil {
		r.policy = nothing(file)
	}
	if err != nil {
		return err
	}
	if r.policy, r.unrecorded, r.undone = p, true, false; len(p.Included()) > 0 {
		r.read = versions(file, p)
	}
	if p.Problem != nil {
		r.OnNotice(fmt.Sprintf("%v\nusing the last good policy, %s", p.Problem, p.Path))
	}
	return nil
}

// Watches says what Run watches for. Call it after Load and not during Run, except in ready.
func (r *Reconciler) Watches() string {
	from := cmp.Or(r.file, "the policy in force")
	switch {
	case r.missing:
		return "there is no file " + from + "; until there is, devices that appear get no rules"
	case r.file == "" && r.policy.Path == "":
		return "no policy is in force; until one is applied, devices that appear get no rules"
	}
	return fmt.Sprintf("watching for %s, of %s", cmp.Or(plain.List(plain.Lines(r.policy.Devices())), "no devices"), from)
}

// reload reads the policy again. It does not affect devices that exist.
func (r *Reconciler) reload(ctx context.Context) {
	if r.file == "" {
		return
	}
	err := r.Load(r.file, r.lastGood)
	if r.missing {
		sleep(ctx, pause) // an editor may be replacing it
		err = r.Load(r.file, r.lastGood)
	}
	switch {
	case r.missing:
		r.OnNotice("there is no file " + r.file + " any more; until it is there again, devices that appear get no rules")
	case err != nil:
		r.OnNotice(fmt.Sprintf("%v\nstill using the policy that was read before from %s", err, r.policy.Path))
	case r.policy.Problem == nil:
		r.OnNotice(r.file + " was read again; it applies to devices that appear from now on; for those that are there, run 'shapectl apply " + plain.Word(r.file) + "'")
	}
}

// Run applies the policy in the network namespace of the calling thread until ctx is
// done. It begins with all existing devices, and then calls ready. It reads the policy
// again after a value on reread, or if the file has changed when devices need rules. Without Load, it follows the policy in
// force.
func (r *Reconciler) Run(ctx context.Context, reread <-chan os.Signal, ready func()) error {
	arrivals := netinfo.NewArrivals()
	defer arrivals.Close()
	var cgroups netinfo.CgroupArrivals
	defer cgroups.Close()
	r.failed, r.warned, r.waits = map[int]netinfo.Device{}, map[string]bool{}, map[string]bool{}
	r.hosts = newFollowed()
	defer r.hosts.Close()
	sweeps := time.NewTicker(sweepEvery)
	defer sweeps.Stop()
	var waiting []netinfo.Device
	news := false         // a cgroup was made or removed
	due := true           // devices may have gone while no process watched
	sweepAt := time.Now() // zero if nothing has gone
	for ctx.Err() == nil {
		fresh, deleted, err := arrivals.Take()
		if err != nil {
			return err
		}
		waiting = append(waiting, fresh...)
		if due {
			waiting = slices.AppendSeq(waiting, maps.Values(r.failed))
			clear(r.failed)
		}
		if news = news || len(waiting) > 0; r.file == "" && (due || news) {
			if err := r.adopt(); err != nil {
				return err
			}
		} else if news && versions(r.file, r.policy) != r.read {
			r.reload(ctx)
		}
		made, removed, err := cgroups.Take(r.policy.Cgroups())
		if err != nil {
			r.warnOnce(err)
		}
		waiting, deleted, news = append(waiting, made...), deleted || removed, false
		if err := r.hosts.take(r.policy.MACs(), fresh, due); err != nil {
			return err
		}
		if waiting, err = r.serve(ctx, waiting); err != nil { // first, because new devices have no limit yet
			return err
		}
		if due {
			sweepAt = time.Now()
		} else if deleted && sweepAt.IsZero() {
			sweepAt = time.Now().Add(sweepAfter)
		}
		swept := !sweepAt.IsZero() && !time.Now().Before(sweepAt)
		if swept {
			if err := r.sweep(); err != nil {
				return err
			}
			sweepAt = time.Time{}
		}
		if swept || len(r.waits) > 0 {
			if err := r.guarantee(); err != nil {
				return err
			}
		}
		if due {
			if err := r.reattach(); err != nil {
				return err
			}
		}
		due = false
		if err := r.followHosts(); err != nil {
			return err
		}
		if ready != nil {
			ready()
			ready = nil
		}
		again := make(<-chan time.Time)
		if wait := r.wait(len(waiting) > 0, sweepAt); wait < sweepEvery {
			again = time.After(wait)
		}
		select {
		case <-ctx.Done():
		case <-reread:
			r.reload(ctx)
			sweepAt = time.Now()
		case <-r.Pulse:
		case <-again:
		case <-sweeps.C:
			due = true
		case <-cgroups.More():
			news = true
			sleep(ctx, settle)
		case <-arrivals.More():
			sleep(ctx, settle)
		case <-r.hosts.More():
			sleep(ctx, settle)
		}
	}
	if !sweepAt.IsZero() {
		return r.sweep()
	}
	return nil
}

// wait is how long Run may wait for news.
func (r *Reconciler) wait(devices bool, sweepAt time.Time) time.Duration {
	wait := sweepEvery
	if !sweepAt.IsZero() {
		wait = time.Until(sweepAt)
	}
	if r.hosts.moved() {
		wait = min(wait, r.hosts.wait())
	}
	if devices {
		wait = min(wait, retry)
	}
	if len(r.waits) > 0 {
		wait = min(wait, lookEvery)
	}
	return wait
}

// write opens the namespace for changes. It returns nil without an error if another command has the lock.
func (r *Reconciler) write() (*loader.Namespace, error) {
	n, err := loader.WriteFirst(r.Options)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, nil
	}
	if err == nil && n.Restored != "" {
		r.OnNotice("restored limits that were not in force, as something had deleted the pin " + n.Restored)
	}
	return n, err
}

// sweep opens the namespace for changes, which removes leftovers, ends changes that are older than rollbackFor, and records
// the policy if it was read again. If another command has the lock, or there is too much, the next sweep does it.
func (r *Reconciler) sweep() error {
	n, err := r.write()
	if err != nil || n == nil {
		return err
	}
	defer n.Close()
	if r.unrecorded && !r.missing {
		from, _ := r.inForce(n)
		r.record(n, from)
	}
	if err := n.Collect(r.policy.Names); err != nil {
		return err
	}
	if err := n.EndOldChange(rollbackFor); err != nil {
		r.OnWarning(fmt.Errorf("free the memory of an old change: %w", err))
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// versions tells whether the file of a policy and those that it includes have changed.
func versions(file string, p lastgood.Policy) (all string) {
	files := []string{file}
	if p.File != nil {
		files = append(files, p.Included()...)
	}
	for _, path := range files {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err == nil {
			all += fmt.Sprintln(path, st.Ino, st.Size, st.Ctim, st.Mtim)
		}
	}
	return all
}

// serve applies the policy to devices, and returns those that remain for a retry.
func (r *Reconciler) serve(ctx context.Context, devices []netinfo.Device) (wait []netinfo.Device, err error) {
	warn := func(devices []netinfo.Device, err error) {
		r.OnWarning(fmt.Errorf("cannot apply rules to %s yet: %w", plain.Count(len(devices), "device"), err))
	}
	var pending error
	for len(devices) > 0 && ctx.Err() == nil {
		done, some, err := r.serveSome(ctx, devices)
		devices, wait = devices[done:], append(wait, some...)
		if errors.Is(err, unix.EWOULDBLOCK) {
			warn(devices, err)
			break
		}
		if errors.Is(err, loader.ErrPending) {
			pending = err
		} else if err != nil {
			return append(wait, devices...), err
		}
		if len(devices) > 0 {
			sleep(ctx, pause)
		}
	}
	if pending != nil && !r.pending {
		warn(wait, pending)
	}
	r.pending = pending != nil
	return append(wait, devices...), nil
}

// serveSome handles as many devices as it can in turnTime under one lock. With ErrPending, it returns those that must wait.
func (r *Reconciler) serveSome(ctx context.Context, devices []netinfo.Device) (done int, wait []netinfo.Device, err error) {
	if r.missing {
		return len(devices), nil, nil
	}
	n, err := loader.WriteFirst(r.Options)
	if err != nil {
		return 0, nil, err
	}
	defer n.Close()
	from, reverted := r.inForce(n)
	hooks, err := n.Hooks(devices...)
	if err != nil {
		r.OnWarning(err)
	}
	defer loader.CloseHooks(hooks)
	limited := map[int][]policy.Direction{} // by index: directions with rules in force
	renamed := map[int]bool{}               // by index: devices in the pools of their old names
	lost := map[string][]*loader.Hook{}     // by name: hooks with rules that are not in force; those of deleted devices can wait
	for _, h := range hooks {
		if h.State.InForce() {
			limited[h.Device.Index] = append(limited[h.Device.Index], h.Direction)
			renamed[h.Device.Index] = renamed[h.Device.Index] || inOldPool(h)
		} else if h.State != loader.Gone {
			lost[h.Name()] = append(lost[h.Name()], h)
		}
	}
	known := r.hosts.Of()
	var targets []target
	for began := time.Now(); done < len(devices) && time.Since(began) < turnTime && len(targets) < turnDevices && ctx.Err() == nil; done++ {
		dev := devices[done]
		next := target{dev: dev, renamed: renamed[dev.Index]}
		has := limited[dev.Index]
		if next.renamed {
			has = nil
		}
		if len(has) == 2 || !exists(dev) {
			continue
		}
		on := policyfile.Device{Name: dev.Name, L2Bytes: dev.L2Bytes, Neighbours: known[dev.Index]}
		next.wants, err = wantedOn(on, from, has)
		if err == nil {
			next.reverted, err = wantedOn(on, reverted, has)
		}
		if err == nil && !(next.wants.empty() && next.reverted.empty()) {
			if err = n.Flush(lost[dev.Name]...); err == nil {
				targets = append(targets, next)
			}
		}
		if err != nil {
			r.warn(dev, err)
		}
	}
	r.record(n, from)
	allOrEach(targets, func(some ...target) error { return r.apply(n, some, from, reverted) }, func(t target, err error) {
		if errors.Is(err, loader.ErrPending) {
			wait = append(wait, t.dev)
		} else {
			r.warn(t.dev, err)
		}
	})
	if p := n.Pending(); len(wait) > 0 && p != nil {
		return done, wait, p
	}
	return done, wait, nil
}

// inOldPool reports whether rules of a renamed device are still in a pool that goes with an old name, which may be a later one
// than Was.
func inOldPool(h *loader.Hook) bool {
	return slices.ContainsFunc(h.Rules(), func(r policy.Rule) bool {
		if r.Within == "" {
			return false
		}
		p, _ := h.Set.Store.Pools().Find(policy.PoolKey(string(r.Within)))
		return p.Label.Owner.Device != "" && p.Label.Owner.Device != h.Name()
	})
}

// compare makes the rules of a device those of the policy, if they are others. While a change is pending, those that a device got
// back are those of both phases already, and a renamed device waits for the next sweep.
func (r *Reconciler) compare(n *loader.Namespace, t target, from lastgood.Policy) {
	tables, pools := together([]target{t}, func(t target) wants { return t.wants }, from)
	done, err := n.ApplyTo(t.dev, append(tables, pools))
	if errors.Is(err, loader.ErrPending) {
		if t.renamed {
			r.failed[t.dev.Index] = t.dev
		}
	} else if err != nil {
		r.warn(t.dev, err)
	} else if t.renamed {
		r.tell(tables, done, from)
	}
	r.sayWaiting(n.Claims)
}

// exists reports whether a device still exists with its name. A device that was renamed or
// created again is another arrival.
func exists(dev netinfo.Device) bool {
	now, err := netinfo.KnownDevice(dev.Name)
	return err != nil && !errors.Is(err, netinfo.ErrNoDevice) || err == nil && now.Index == dev.Index
}
