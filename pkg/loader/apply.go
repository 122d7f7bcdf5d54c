package loader

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrNoChange means that there is no change to confirm or to roll back.
var ErrNoChange = errors.New("no change can be confirmed or undone")

// ErrConfirmed means that the last change needs no confirmation any more, or never did.
var ErrConfirmed = errors.New("it lasts already")

// ErrTooLate means that a change has reverted: it was not confirmed in time.
var ErrTooLate = errors.New("the last change was not confirmed in time, so it reverted; the rules from before it are in force")

// ErrFaster means that another command made the first rules of the namespace after this one had looked. Nothing was changed. It
// has to look again.
var ErrFaster = errors.New("another command was faster")

// ErrBusy means that a change could not be prepared in time. Nothing was changed.
var ErrBusy = errors.New("the host is too busy to prepare this change in time")

const (
	// leastLead is the least time between the preparation of a change and its beginning.
	leastLead = 20 * time.Millisecond
	// leadTries is how often a longer lead is tried, up to maps.MaxLead.
	leadTries = 20
)

// ApplyOptions say how a change comes into force.
type ApplyOptions struct {
	// Confirm is the time after which the change reverts unless it is confirmed; 0 for never.
	Confirm time.Duration
	// Author is who makes a change, a zero byte, and the command.
	Author string
	// Allow, unless it is nil, is asked before a change that would remove so many of all rules and pools. Its error refuses that.
	Allow func(removed, of int) error
	// Final: the change cannot be rolled back, so what only that would need is removed at once. Not with Confirm.
	Final bool
	// Devices are those whose rules the tables replace; nil for all. Others keep their rules, whatever the tables say.
	Devices []string
	// Policy is recorded as the one in force, unless it is nil: see KeepPolicy.
	Policy []byte

	check   bool // see Check
	beside  bool // the hooks had no rules in force, and the last change goes on
	returns func(device string) bool
}

// Applied is what a command did to a hook, or to the pools.
type Applied struct {
	Device    string // "" for the pools
	Direction policy.Direction
	Rules     maps.Difference
	Hook      Change
	// Began is when the change that was confirmed or rolled back had begun, in ns of maps.Now; else 0.
	Began uint64
}

// Tables are the pools, and the rules of all hooks in one of these states, sorted. The rules must not be changed.
func (n *Namespace) Tables(states ...State) ([]policy.Table, error) {
	hooks, err := n.Hooks()
	defer CloseHooks(hooks)
	if err != nil {
		return nil, err
	}
	pools := n.Pools()
	defer pools.Close()
	if pools.Set == nil {
		return []policy.Table{}, nil
	}
	hooks = append(hooks, pools)
	for {
		state, tables, rules := n.pins.state(), []policy.Table{}, n.pins.policies()
		for _, h := range hooks {
			if of := rules[h.Set.Number()]; len(of) > 0 && (h == pools || slices.Contains(states, h.State)) {
				tables = append(tables, policy.Table{Device: h.Name(), Direction: h.Direction, Match: h.Match(), Rules: of})
			}
		}
		policy.SortTables(tables)
		if n.pins.state() == state { // else the change has begun or reverted meanwhile, which no lock prevents
			return tables, nil
		}
	}
}

// Check returns why Apply would refuse tables, and the pools and rules of attached hooks, in the order of Tables; nil if they cannot
// be read. It gives the guarantees that wait in tables as far as there is room.
func (n *Namespace) Check(tables []policy.Table) (have []policy.Table, refused error) {
	all, refused := planner{n}.plan(onlyThese, ApplyOptions{check: true}, tables)
	defer all.close()
	if all == nil {
		return nil, refused
	}
	have = []policy.Table{}
	for _, o := range all {
		if o.Set != nil && o.State == Attached && len(o.have) > 0 {
			have = append(have, policy.Table{Device: o.Name(), Direction: o.Direction, Match: o.Match(), Rules: o.have})
		}
	}
	policy.SortTables(have)
	if refused == nil && all.haveWork() && n.pins.state() == maps.Pending {
		refused = n.pins.pending()
	}
	return have, refused
}

// Apply brings a policy into force: these tables and no other rules or pools. Each table is of a
// device that is here, with valid rules in the order of policy.SortRules. All hooks and pools switch
// at one moment: a packet meets the old rules or the new ones. Rules that stay keep
// buckets and counters. On failure nothing is changed, but for devices that were deleted
// meanwhile: these get no rules, and the others do. Guarantees that wait are given as far as there is room: see Claims. With
// Final, a failure may also be that of removing what is not needed any more.
func (n *Namespace) Apply(tables []policy.Table, o ApplyOptions) (done []Applied, err error) {
	var all orders
	for again := true; again; {
		all, err = n.pins.carryOut(func() (orders, error) { return planner{n}.plan(onlyThese, o, tables) }, o)
		// The rules of a device that has gone meanwhile may need pools that go.
		_, again = errors.AsType[policy.PoolError](err)
		again = again && o.Devices == nil && n.pins.collectDevices(nil) != nil
	}
	if err == nil && o.Policy != nil && all.steps() == 0 {
		err = n.KeepPolicy(o.Policy)
	}
	if err != nil {
		return nil, err
	}
	return all.done(func(o *order) bool { return o.gone == nil && o.done.Hook != (Change{Lacks: o.done.Hook.Lacks}) }), nil
}

// arm lets a prepared change begin. It returns after that. The error may wrap ErrBusy.
func arm(store *maps.Store, confirm time.Duration) error {
	from, err := inTime(maps.Now, maps.Never, func(from uint64) error {
		until := maps.Never
		if confirm > 0 {
			until = from + uint64(confirm)
		}
		store.Time(from, until)
		return store.Arm()
	})
	if err != nil {
		return err
	}
	waitUntil(from)
	store.Commit()
	return nil
}

// inTime chooses a moment (ns) for something that must be prepared before, and prepares it. If prepare returns
// maps.ErrLate, it tries a later moment. It returns 0 if there is none before latest. The error may wrap ErrBusy.
func inTime(clock func() uint64, latest uint64, prepare func(moment uint64) error) (moment uint64, err error) {
	lead := uint64(leastLead)
	for range leadTries {
		now := clock()
		if now+2*lead > latest {
			return 0, nil
		}
		switch err := prepare(now + lead); {
		case err == nil:
			return now + lead, nil
		case !errors.Is(err, maps.ErrLate):
			return 0, err
		}
		lead = min(max(2*lead, 3*(clock()-now)), maps.MaxLead)
	}
	return 0, ErrBusy
}

// Pending is the change that is pending; nil for none.
func (n *Namespace) Pending() *PendingError {
	if n.pins.state() != maps.Pending {
		return nil
	}
	return n.pins.pending()
}

// LastAuthor is who made the last change.
func (n *Namespace) LastAuthor() Author {
	if n.pins.store == nil {
		return Author{}
	}
	return n.pins.pending().Author
}

// lastChange is the state of the last change, Pending or Committed, and when it reverts. The error wraps ErrNoChange where there
// is no change, and ErrTooLate where it has reverted.
func (s *bpfState) lastChange() (state maps.ChangeState, until uint64, err error) {
	if s.store != nil {
		state, until = s.store.Change()
	}
	switch {
	case state == maps.Expired:
		return state, 0, ErrTooLate
	case state == maps.Pending:
		return state, until, nil
	case state == maps.Committed && s.store.Begins() != 0: // 0: a killed command was about to end it
		return state, maps.Never, nil
	}
	return state, 0, s.noChange()
}

// Confirm confirms a pending change, and returns what that has changed. The error wraps ErrConfirmed where it lasts
// already, ErrNoChange where there is no change, and ErrTooLate where it has reverted.
func (n *Namespace) Confirm() (done []Applied, err error) {
	state, _, err := n.pins.lastChange()
	if err == nil && state == maps.Committed {
		err = ErrConfirmed
	}
	if err == nil {
		err = n.pins.store.Confirm()
	}
	if errors.Is(err, maps.ErrLate) {
		err = ErrTooLate
	}
	if err != nil {
		return nil, err
	}
	done, _ = revertDoes(n) // it is confirmed, also where a hook cannot be read
	for i := range done {
		rules := &done[i].Rules
		rules.Added, rules.Removed = rules.Removed, rules.Added
	}
	return done, nil
}

// revertDoes returns what a revert of the last change does.
func revertDoes(n *Namespace) (done []Applied, err error) {
	hooks, err := n.Hooks()
	hooks = append([]*Hook{n.Pools()}, hooks...)
	defer CloseHooks(hooks)
	for _, h := range hooks {
		if rules := h.Set.Undone(); rules != (maps.Difference{}) {
			done = append(done, Applied{Device: h.Name(), Direction: h.Direction, Rules: rules, Began: n.pins.store.Begins()})
		}
	}
	return done, err
}

// noChange is why there is no change to confirm or to roll back. The error wraps ErrNoChange, unless the rules are of
// another layout.
func (s *bpfState) noChange() error {
	if err := s.readable(); err != nil {
		return err
	}
	why := "another command or serve changed rules since the last one; to go back, apply the old policy"
	switch {
	case s.store == nil:
		why = "there are no rules"
	case s.store.Until() == 0:
		why = "since the first rule was set, no policy was applied, and nothing was set with --confirm"
	case s.store.Until() != maps.Never:
		why = "the last one was reverted already; what is set or deleted without --confirm cannot be undone"
	}
	return fmt.Errorf("%w: %s", ErrNoChange, why)
}

// Rollback reverts the last change, confirmed or not, on all hooks at one moment. It returns nothing if the devices that the
// change concerned were deleted. The error wraps ErrTooLate, or wraps
// ErrNoChange where there is none, or a single rule was changed since.
func (n *Namespace) Rollback() (done []Applied, err error) {
	_, until, err := n.pins.lastChange()
	if err != nil {
		return nil, err
	}
	if done, err = revertDoes(n); err != nil {
		return nil, err
	}
	return done, n.pins.changing(func() error {
		if err := revert(n.pins.store, until); err != nil {
			return err
		}
		return n.pins.finish()
	})
}

// revert reverts the change at a moment before until, when it would revert anyway. It
// returns after that moment. The error may wrap ErrBusy.
func revert(store *maps.Store, until uint64) error {
	if !store.Reverts() { // else a killed rollback has chosen the moment
		store.ReadyRevert()
		at, err := inTime(maps.Now, until, func(at uint64) error {
			store.TimeRevert(at)
			return store.Revert(at)
		})
		if err != nil {
			return err
		}
		until = cmp.Or(at, until)
	}
	waitUntil(until)
	return nil
}

// waitUntil returns at a time in ns of maps.Now.
func waitUntil(at uint64) {
	for now := maps.Now(); now < at; now = maps.Now() {
		time.Sleep(time.Duration(at - now))
	}
}
