package loader

import (
	"errors"
	"slices"
	"time"

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
	// leadTries is how often that is tried, soon with the longest time that there may be.
	leadTries = 20
)

// ApplyOptions say how a policy is to come into force.
type ApplyOptions struct {
	// Confirm is after what time all is as before again, unless Confirm is called; 0 for never.
	Confirm time.Duration
	// Progress is told how many rules are ready, of how many; it may be nil.
	Progress func(ready, of int)
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

// Tables are the rules of all hooks in one of these states, sorted.
func (n *Namespace) Tables(states ...State) ([]policy.Table, error) {
	hooks, err := n.Hooks()
	defer CloseHooks(hooks)
	if err != nil {
		return nil, err
	}
	tables := []policy.Table{}
	for _, h := range hooks {
		if !slices.Contains(states, h.State) {
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

// Apply brings a policy into force: all tables, each of a device that is here,
// with valid rules in the order of policy.SortRules, and nothing else. All
// hooks switch at one moment: a packet sees what was before or what is after.
// Rules that stay keep buckets and counters. On failure all is as it was.
// Where nothing is to be changed, nothing is touched. A device that is deleted
// meanwhile gets no rules, and keeps no other from them.
func (n *Namespace) Apply(tables []policy.Table, o ApplyOptions) (done []Applied, err error) {
	plan := func() (orders, error) { return n.plan(tables) }
	orders, err := n.planned(plan)
	defer func() { orders.close() }()
	if err != nil || !orders.haveWork() {
		return nil, err
	}
	if orders, err = n.endBefore(orders, plan, nil); err != nil {
		return nil, err
	}
	if err := n.pins.changing(func() error { return orders.apply(&n.pins, n.options, o) }); err != nil {
		return nil, err
	}
	for _, o := range orders {
		o.done.Rules = maps.Count(o.steps)
		o.done.Hook.Changed = len(o.steps) > 0
		if o.gone == nil && o.done.Hook != (Change{Lacks: o.done.Hook.Lacks}) {
			done = append(done, o.done)
		}
	}
	return done, nil
}

// arm lets what was prepared switch at a moment that is so far ahead that no packet
// can come between the moment for which the byte clocks are set and the change. It
// returns that moment. The error wraps ErrBusy.
func arm(store *maps.Store, confirm time.Duration) (from uint64, err error) {
	from, err = readied(maps.Now, maps.Never, func(from uint64) {
		until := maps.Never
		if confirm > 0 {
			until = from + uint64(confirm)
		}
		store.Settle()
		store.Time(from, until)
	})
	if err == nil {
		store.Arm()
	}
	return from, err
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

// PendingChange tells until when a change is in force that nobody has confirmed
// yet, in ns of maps.Now; 0 where there is none. Expired is when one ended that nobody confirmed.
func (n *Namespace) PendingChange() (until, expired uint64, err error) {
	if n.pins.store == nil {
		return 0, 0, n.pins.noState(nil)
	}
	switch state, at := n.pins.store.Change(); state {
	case maps.Pending:
		until = at
	case maps.Expired:
		expired = at
	}
	return until, expired, nil
}

// Confirm lets a pending change last. The error wraps ErrConfirmed where it does already, ErrNoChange where there is
// none, ErrTooLate where it was not in time.
func (n *Namespace) Confirm() error {
	if n.pins.store == nil || len(n.pins.others) > 0 {
		return n.pins.noState(ErrNoChange)
	}
	switch state, until := n.pins.store.Change(); {
	case state == maps.Expired, state == maps.Pending && maps.Now()+uint64(confirmMargin) > until:
		return ErrTooLate
	case state == maps.Pending:
		n.pins.store.Confirm()
		return nil
	case state == maps.Committed && n.pins.store.Begins() != 0:
		return ErrConfirmed
	}
	return ErrNoChange
}

// Rollback takes the last change back, on all hooks at one moment, confirmed or
// not. The error wraps ErrNoChange where there is none, or another has come since.
func (n *Namespace) Rollback() (done []Applied, err error) {
	if n.pins.store == nil {
		return nil, n.pins.noState(ErrNoChange)
	}
	until := maps.Never
	switch state, at := n.pins.store.Change(); {
	case state == maps.Expired:
		return nil, ErrTooLate
	case state == maps.Pending:
		until = at
	case state != maps.Committed, n.pins.store.Begins() == 0: // a command was killed that was to end it
		return nil, ErrNoChange
	}
	hooks, err := n.Hooks()
	defer CloseHooks(hooks)
	if err != nil {
		return nil, err
	}
	err = n.pins.changing(func() error {
		if err := back(n.pins.store, until); err != nil {
			return err
		}
		for _, h := range hooks {
			if rules := h.Set.Undone(); rules != (maps.Difference{}) {
				done = append(done, Applied{Device: h.Name(), Direction: h.Direction, Rules: rules, Began: n.pins.store.Begins()})
			}
		}
		return n.pins.finish()
	})
	return done, err
}

// back takes the change back at a moment before until, when it would end anyway. It
// returns when that has passed. The error wraps ErrBusy.
func back(store *maps.Store, until uint64) error {
	at, err := readied(maps.Now, until, func(at uint64) {
		store.Settle()
		store.TimeRevert(at)
	})
	if at == 0 {
		store.TimeRevert(until) // as it was, before another moment was tried
	}
	if err != nil {
		return err
	}
	if at == 0 {
		waitUntil(until)
		return nil
	}
	store.Revert(at)
	waitUntil(at)
	return nil
}

// waitUntil returns at a time in ns of maps.Now.
func waitUntil(at uint64) {
	for now := maps.Now(); now < at; now = maps.Now() {
		time.Sleep(time.Duration(at - now))
	}
}
