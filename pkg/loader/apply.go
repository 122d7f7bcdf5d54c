package loader

import (
	"errors"
	"slices"
	"time"

	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrNoChange means that there is no change to confirm or to roll back.
var ErrNoChange = errors.New("there is no such change")

// ErrConfirmed means that the last change needs no confirmation any more, or never did.
var ErrConfirmed = errors.New("it lasts already")

// ErrTooLate means that a change has reverted: it was not confirmed in time, or rolled back.
var ErrTooLate = errors.New("the change was not confirmed in time, or rolled back; the rules from before it are in force")

// ErrBusy means that a change could not be prepared in time. Nothing was changed.
var ErrBusy = errors.New("the host is too busy to prepare this change in time")

const (
	// confirmMargin is how long before it reverts a change can be confirmed at the latest.
	confirmMargin = 5 * time.Millisecond
	// leastLead is the least time between the preparation of a change and its beginning. A process that is
	// delayed for half of it, between its last look at the clock and the store that arms the change, is too late.
	leastLead = 20 * time.Millisecond
	// spareLead is the least time that must be left once all is ready, or half of the lead if that is less.
	spareLead = 50 * time.Millisecond
	// leadTries is how often a longer lead is tried, up to maps.MaxLead.
	leadTries = 20
)

// ApplyOptions say how a policy comes into force.
type ApplyOptions struct {
	// Confirm is the time after which the change reverts unless it is confirmed; 0 for never.
	Confirm time.Duration
	// Progress is called with the number of rules that are ready; it may be nil.
	Progress func(ready, of int)
}

// Applied is what a command did to a hook.
type Applied struct {
	Device    string
	Direction policy.Direction
	Rules     maps.Difference
	Hook      Change
	// Began is when the change that was rolled back had begun, in ns of maps.Now; else 0.
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

// Apply brings a policy into force: these tables and no other rules. Each table is of a
// device that is here, with valid rules in the order of policy.SortRules. All hooks switch
// at one moment: a packet meets the old rules or the new ones. Rules that stay keep
// buckets and counters. On failure nothing is changed, but for devices that were deleted
// meanwhile: these get no rules, and the others do.
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

// arm lets a prepared change begin at a moment so far ahead that the store that arms it
// comes before that moment. It returns after that moment. The error wraps ErrBusy.
func arm(store *maps.Store, confirm time.Duration) error {
	from, err := readied(maps.Now, maps.Never, func(from uint64) {
		until := maps.Never
		if confirm > 0 {
			until = from + uint64(confirm)
		}
		store.Settle()
		store.Time(from, until)
	})
	if err != nil {
		return err
	}
	store.Arm()
	waitUntil(from)
	store.Commit()
	return nil
}

// readied finds the next moment (ns) for which ready can end with time to spare; 0 if there
// is none before latest. The error wraps ErrBusy.
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

// PendingChange is when a pending change reverts, in ns of maps.Now, and when an expired
// change reverted; 0 where there is none.
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

// Confirm confirms a pending change. The error wraps ErrConfirmed where it lasts already, ErrNoChange where there is
// no change, and ErrTooLate where it has reverted.
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

// Rollback reverts the last change, confirmed or not, on all hooks at one moment. The error
// wraps ErrNoChange where there is none, or a single rule was changed since.
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
	case state != maps.Committed, n.pins.store.Begins() == 0: // 0: a killed command was about to end it
		return nil, ErrNoChange
	}
	hooks, err := n.Hooks()
	defer CloseHooks(hooks)
	if err != nil {
		return nil, err
	}
	err = n.pins.changing(func() error {
		if err := revert(n.pins.store, until); err != nil {
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

// revert reverts the change at a moment before until, when it would revert anyway. It
// returns after that moment. The error wraps ErrBusy.
func revert(store *maps.Store, until uint64) error {
	at, err := readied(maps.Now, until, func(at uint64) {
		store.Settle()
		store.TimeRevert(at)
	})
	if at == 0 {
		store.TimeRevert(until) // undoes the attempts of readied
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
