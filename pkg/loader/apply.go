package loader

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrNoChange means that there is no change to confirm, or to take back.
var ErrNoChange = errors.New("there is no such change")

// ErrConfirmed means that the last change lasts already: it was confirmed, or never had to be.
var ErrConfirmed = errors.New("it lasts already")

// ErrTooLate means that a change was not confirmed in time.
var ErrTooLate = errors.New("it is over: it was not confirmed in time, or taken back, and all is as it was before it")

// ErrBusy means that nothing was changed, as this machine could not ready so many rules for one moment.
var ErrBusy = errors.New("this machine is too busy for so many rules to change at one moment")

const (
	// confirmMargin is how long before its end a change can be confirmed at the latest.
	confirmMargin = 5 * time.Millisecond
	// leastLead is how long before it begins a change is readied at the least. A process that is held up for half of
	// that, between its last look at the clock and the store that arms the change, lets it begin too late.
	leastLead = 20 * time.Millisecond
	// spareLead is how much of that is left at the least once all is ready, or half of it.
	spareLead = 50 * time.Millisecond
	// othersTime is how long a command that changes one hook may spend on others that took part in an earlier
	// change: detaching a program takes the kernel up to 20 ms.
	othersTime = time.Second
	// leadTries is how often that is tried, soon with the longest time that there may be.
	leadTries = 20
)

// ApplyOptions say how a policy is to come into force.
type ApplyOptions struct {
	// Confirm is after what time all is as before again, unless Confirm is called; 0 for never.
	Confirm time.Duration
	// Progress is told how many rules are ready, of how many; it may be nil.
	Progress func(ready, of int)
	// Only is the name of the one device whose rules are to change, for good; "" for all.
	Only string
}

// Applied is what became of the rules of a hook.
type Applied struct {
	Device    string
	Direction policy.Direction
	Rules     maps.Difference
	Hook      Change
	// Began is when the change that was taken back had begun, in ns of maps.Now; 0 but for Rollback.
	Began uint64
}

// Tables are the rules of all hooks whose device is here, sorted.
func (n *Namespace) Tables() ([]policy.Table, error) {
	hooks, err := n.Hooks()
	defer closeHooks(hooks)
	if err != nil {
		return nil, err
	}
	tables := []policy.Table{}
	for _, h := range hooks {
		if h.Device.Name == "" {
			continue
		}
		t := policy.Table{Device: h.Device.Name, Direction: h.Direction, Match: h.Match(), Rules: h.Set.Policy()}
		if len(t.Rules) > 0 {
			tables = append(tables, t)
		}
	}
	policy.SortTables(tables)
	return tables, nil
}

func closeHooks(hooks []*Hook) {
	for _, h := range hooks {
		h.Close()
	}
}

// An application is a policy on its way into force: each hook with the rules that it is to have.
type application struct {
	*Hook
	want    policy.Table
	created bool
	hold    holding
	done    Applied
}

// Apply brings a policy into force: all tables, each of a device that is here,
// with valid rules in the order of policy.SortRules, and nothing else. All
// hooks switch at one moment: a packet sees what was before or what is after.
// Rules that stay keep buckets and counters. On failure all is as it was.
// Where nothing is to be changed, nothing is touched.
func (n *Namespace) Apply(tables []policy.Table, o ApplyOptions) ([]Applied, error) {
	hooks, err := n.applications(tables, o.Only)
	same := !slices.ContainsFunc(hooks, func(a *application) bool { return !a.asWanted() })
	closeAll(hooks)
	if err != nil || same {
		return nil, err
	}
	if n.dir == "" {
		if err := n.found(); err != nil {
			return nil, err
		}
	}
	if o.Only == "" {
		if err := n.endChange(nil); err != nil {
			return nil, err
		}
	}
	// Once more, as hooks may have gone with the end of the last change.
	hooks, err = n.applications(tables, o.Only)
	defer func() { closeAll(hooks) }()
	if err != nil {
		return nil, err
	}
	for _, a := range hooks {
		if a.created {
			continue
		}
		if state, _ := a.Set.Change(); state == maps.Pending {
			return nil, ErrPending
		}
	}
	if err := n.changeAll(hooksOf(hooks), func() error { return n.apply(hooks, o) }); err != nil {
		return nil, err
	}
	var done []Applied
	for _, a := range hooks {
		a.done.Hook.Changed = a.done.Rules != maps.Difference{}
		if a.done.Hook != (Change{Lacks: a.done.Hook.Lacks}) {
			done = append(done, a.done)
		}
	}
	return done, nil
}

func closeAll(hooks []*application) {
	for _, a := range hooks {
		a.Close()
	}
}

// applications are the hooks that there are and are to be, of one device or ""
// for all, with what each is to have, if that is possible.
func (n *Namespace) applications(tables []policy.Table, only string) (all []*application, err error) {
	hooks, err := n.Hooks()
	for _, h := range hooks {
		if only != "" && h.Name() != only || h.Device.Name == "" {
			h.Close()
			continue
		}
		all = append(all, &application{Hook: h})
	}
	if err != nil {
		return all, err
	}
	for _, t := range tables {
		i := slices.IndexFunc(all, func(a *application) bool { return a.Device.Name == t.Device && a.Direction == t.Direction })
		if i >= 0 {
			all[i].want = t
			continue
		}
		if len(t.Rules) == 0 {
			continue
		}
		dev, err := netinfo.DeviceByName(t.Device)
		if err != nil {
			return all, fmt.Errorf("%s: %w", t.Device, err)
		}
		h := &Hook{Direction: t.Direction, Device: dev, Was: dev.Name, index: dev.Index, path: n.hookPath(dev.Index, t.Direction), State: Detached}
		all = append(all, &application{Hook: h, want: t, created: true})
	}
	for _, a := range all {
		a.done.Device, a.done.Direction = a.Device.Name, a.Direction
		if err := a.check(n); err != nil {
			return all, fmt.Errorf("%s %s: %w", a.Device.Name, a.Direction, err)
		}
	}
	return all, nil
}

// check reports why a hook can not get its rules.
func (a *application) check(n *Namespace) error {
	if err := a.Device.CheckReadable(); err != nil {
		return err
	}
	var err error
	if a.hold, err = n.holdBack(a.Device, a.Direction, a.want.Rules); err != nil {
		return err
	}
	a.done.Hook.Lacks = a.hold.lacks
	if a.created {
		moved, err := n.Find(a.Device.Name, a.Direction)
		if err != nil {
			return err
		}
		if moved != nil {
			defer moved.Close()
			if moved.State == Moved {
				return ErrMoved
			}
		}
		return n.elsewhere(a.Device, a.Direction)
	}
	// Without a rule in force, a hook is kept only for a rollback, and gone with the end of the last change.
	if len(a.want.Rules) > 0 && a.Match() != a.want.Match && !a.Set.Has(nil) {
		return fmt.Errorf("%w (%s)", ErrMatch, a.Match())
	}
	return nil
}

// asWanted reports whether nothing is to be done for a hook.
func (a *application) asWanted() bool {
	return !a.created && a.State == Attached && !a.hold.setup && a.Set.Has(a.want.Rules)
}

func hooksOf(applications []*application) []*Hook {
	hooks := make([]*Hook, len(applications))
	for i, a := range applications {
		hooks[i] = a.Hook
	}
	return hooks
}

// changeAll is change for several hooks.
func (n *Namespace) changeAll(hooks []*Hook, f func() error) error {
	if len(hooks) == 0 {
		return f()
	}
	return n.change(hooks[0].index, hooks[0].Direction, func() error { return n.changeAll(hooks[1:], f) })
}

func (n *Namespace) apply(hooks []*application, o ApplyOptions) (err error) {
	of, ready := 0, 0
	for _, a := range hooks {
		of += len(a.want.Rules)
	}
	defer func() {
		if err == nil {
			return
		}
		for _, a := range hooks {
			if a.Set != nil {
				a.Set.Abandon()
			}
		}
	}()
	for _, a := range hooks {
		if err := n.ready(a, func(rules int) {
			if o.Progress != nil {
				o.Progress(ready+rules, of)
			}
		}); err != nil {
			return fmt.Errorf("%s %s: %w", a.Device.Name, a.Direction, err)
		}
		ready += len(a.want.Rules)
	}
	changed := slices.DeleteFunc(slices.Clone(hooks), func(a *application) bool { return a.done.Rules == maps.Difference{} })
	from, err := armAll(changed, o.Confirm)
	if err != nil {
		return err
	}
	waitUntil(from)
	for _, a := range changed {
		a.Set.Commit()
		if o.Only != "" {
			a.Set.Finish()
		}
	}
	return nil
}

// ready makes all that a hook's rules need, and prepares them.
func (n *Namespace) ready(a *application, progress func(rules int)) (err error) {
	if a.created {
		size := roomFor(a.want.Rules, maps.Size{Rules: leastRules, Buckets: noBuckets})
		need := uint32(ids(a.want.Rules))
		size.Rules = max(size.Rules, need+need/32) // a few more do not make it grow
		if err := n.create(a.Hook, a.want.Match, size); err != nil {
			return err
		}
	} else if a.State != Attached {
		a.done.Hook.Reattached = string(a.State)
	}
	if a.hold.setup {
		if a.done.Hook.Replaced, err = n.setupFQ(a.Device, a.hold.packets); err != nil {
			return err
		}
	}
	if err := n.prepare(a.Hook, a.Device, a.Match(), a.want.Rules, &a.done.Hook); err != nil {
		return err
	}
	a.done.Rules, err = a.Set.Prepare(a.want.Rules, progress)
	return err
}

// ids is how many rules and shadows there are.
func ids(rules []policy.Rule) int {
	n := len(rules)
	for _, r := range rules {
		if _, ok := r.Proposed(); ok {
			n++
		}
	}
	return n
}

// armAll lets all hooks switch at one moment, which is so far ahead that no
// packet can come between the moment for which the byte clocks are set and the
// change. It returns that moment. The error wraps ErrBusy.
func armAll(hooks []*application, confirm time.Duration) (from uint64, err error) {
	from, err = readied(maps.Now, maps.Never, func(from uint64) {
		until := maps.Never
		if confirm > 0 {
			until = from + uint64(confirm)
		}
		for _, a := range hooks {
			a.Set.Settle()
			a.Set.Time(from, until)
		}
	})
	if err != nil {
		return 0, err
	}
	for _, a := range hooks {
		a.Set.Arm()
	}
	return from, nil
}

// readied finds a moment (ns) so soon ahead that all could be readied for it with
// time to spare: 0 where there is none before latest. The error wraps ErrBusy.
func readied(clock func() uint64, latest uint64, ready func(at uint64)) (at uint64, err error) {
	lead := uint64(leastLead)
	for range leadTries {
		now := clock()
		if now+2*lead > latest {
			return 0, nil
		}
		ready(now + lead)
		took := clock() - now
		if took+min(lead/2, uint64(spareLead)) <= lead {
			return now + lead, nil
		}
		lead = min(max(2*lead, 3*took), maps.MaxLead)
	}
	return 0, ErrBusy
}

// endChange ends the last change of all hooks for good, so that another can
// begin, or h be changed. The error wraps ErrPending where it is to be confirmed
// first; one in which h has no part, such as a new hook, goes on.
func (n *Namespace) endChange(h *Hook) error {
	involved := h == nil
	if h != nil && h.Set != nil {
		state, _ := h.Set.Change()
		involved = state != maps.NoChange
	}
	hooks := n.changing()
	defer closeHooks(hooks)
	var over []*Hook
	for _, other := range hooks {
		switch state, _ := other.Set.Change(); {
		case state == maps.Pending && involved:
			return ErrPending
		case state == maps.Pending:
			return nil
		case involved, state != maps.Expired, other.Set.Has(nil): // that a change has expired is to be seen
			over = append(over, other)
		}
	}
	// Said of all before the first is ended, lest the rest be taken back alone if this is killed.
	for _, other := range over {
		other.Set.End()
	}
	if h != nil && h.Set != nil {
		h.Set.Finish()
	}
	began := time.Now()
	for _, other := range over {
		if h != nil && time.Since(began) > othersTime {
			break // the next command goes on
		}
		if err := n.finish(other); err != nil {
			return err
		}
	}
	return nil
}

// finish ends the change of a hook for good, which is not pending, and takes off what it needs no more.
func (n *Namespace) finish(h *Hook) error {
	if state, _ := h.Set.Change(); state == maps.NoChange {
		return nil
	}
	return n.change(h.index, h.Direction, func() error {
		if h.Set.Has(nil) {
			return n.takeOff(h)
		}
		h.Set.Finish()
		return n.trimIfb(h)
	})
}

// PendingChange tells until when a change is in force that nobody has confirmed
// yet, in ns of maps.Now; 0 where there is none. Expired is when one ended that nobody confirmed.
func (n *Namespace) PendingChange() (until, expired uint64, err error) {
	hooks, err := n.Hooks()
	defer closeHooks(hooks)
	for _, h := range hooks {
		switch state, at := h.Set.Change(); state {
		case maps.Pending:
			until = at
		case maps.Expired:
			expired = at
		}
	}
	return until, expired, err
}

// Confirm lets a pending change last. The error wraps ErrConfirmed where it does already, ErrNoChange where there is
// none, ErrTooLate where it was not in time.
func (n *Namespace) Confirm() error {
	hooks, err := n.Hooks()
	defer closeHooks(hooks)
	if err != nil {
		return err
	}
	var pending []*Hook
	lasts := false
	for _, h := range hooks {
		switch state, until := h.Set.Change(); {
		case state == maps.Expired, state == maps.Pending && maps.Now()+uint64(confirmMargin) > until:
			return ErrTooLate
		case state == maps.Pending:
			pending = append(pending, h)
		case state == maps.Committed && h.Set.Begins() != 0:
			lasts = true
		}
	}
	switch {
	case pending == nil && lasts:
		return ErrConfirmed
	case pending == nil:
		return ErrNoChange
	}
	return n.changeAll(pending, func() error {
		for _, h := range pending {
			h.Set.Confirm()
		}
		return nil
	})
}

// Rollback takes the last change back, on all hooks at one moment, confirmed or
// not. The error wraps ErrNoChange where there is none, or another has come since.
func (n *Namespace) Rollback() ([]Applied, error) {
	hooks, err := n.Hooks()
	defer closeHooks(hooks)
	if err != nil {
		return nil, err
	}
	var changed, over []*Hook
	until := maps.Never
	for _, h := range hooks {
		switch state, at := h.Set.Change(); state {
		case maps.Expired: // with others that are not, a command was killed as it took them back
			over = append(over, h)
		case maps.Pending:
			until = at
			changed = append(changed, h)
		case maps.Committed:
			if h.Set.Begins() == 0 {
				return nil, ErrNoChange // a command was killed that was to end it
			}
			changed = append(changed, h)
		}
	}
	switch {
	case changed == nil && over == nil:
		return nil, ErrNoChange
	case changed == nil:
		return nil, ErrTooLate
	}
	if err := n.changeAll(changed, func() error { return backAll(changed, until) }); err != nil {
		return nil, err
	}
	var done []Applied
	for _, h := range append(changed, over...) {
		done = append(done, Applied{Device: h.Name(), Direction: h.Direction, Rules: h.Set.Undone(), Began: h.Set.Begins()})
		if err := n.finish(h); err != nil {
			return done, err
		}
	}
	return done, nil
}

// backAll takes the change of hooks back at one moment, before until, when it
// would end anyway. It returns when that has passed. The error wraps ErrBusy.
func backAll(hooks []*Hook, until uint64) error {
	at, err := readied(maps.Now, until, func(at uint64) {
		for _, h := range hooks {
			h.Set.Settle()
			h.Set.TimeBack(at)
		}
	})
	if at == 0 {
		for _, h := range hooks {
			h.Set.TimeBack(until) // as it was, before another moment was tried
		}
	}
	if err != nil {
		return err
	}
	if at == 0 {
		waitUntil(until)
		return nil
	}
	for _, h := range hooks {
		h.Set.Back(at)
	}
	waitUntil(at)
	return nil
}

// agree lets all hooks of a change go as far with it as a command that was killed let some of them.
func agree(hooks []*Hook) error {
	var begun, confirmed, ends bool
	first, last := maps.Never, uint64(0) // when it ends
	for _, h := range hooks {
		switch state, at := h.Set.Change(); state {
		case maps.Committed:
			begun, confirmed = true, true
		case maps.Pending, maps.Expired:
			begun, ends = true, true
			first, last = min(first, at), max(last, at)
		}
	}
	if !begun {
		return nil
	}
	lasts := confirmed && maps.Now()+uint64(confirmMargin) < first
	if ends && !lasts && (confirmed || first < last) {
		waitUntil(first) // for the first hooks it was taken back
	}
	var back []*Hook
	until := maps.Never
	for _, h := range hooks {
		switch state, at := h.Set.Change(); {
		case state == maps.NoChange:
			h.Set.Arm()
		case state == maps.Pending && lasts:
			h.Set.Confirm()
		case state == maps.Pending && first < last:
			back, until = append(back, h), at
		case state == maps.Committed && ends && !lasts:
			back = append(back, h)
		}
	}
	if back == nil {
		return nil
	}
	return backAll(back, until)
}

// waitUntil returns at a time in ns of maps.Now.
func waitUntil(at uint64) {
	for now := maps.Now(); now < at; now = maps.Now() {
		time.Sleep(time.Duration(at - now))
	}
}
