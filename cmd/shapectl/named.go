package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A namedHook is a hook and those of its rules that have a name.
type namedHook struct {
	*loader.Hook
	rules []maps.Entry
}

// ruleName is what NAME [ingress|egress] means.
type ruleName struct {
	name      string
	direction *policy.Direction // nil for both
	isNew     bool              // it is that of a new pool
	flags     string            // those that were given, each after a space, for commands that an error suggests
}

func parseName(verb string, given []string) (ruleName, error) {
	filter, err := parseFilter(verb, given)
	return ruleName{name: filter.device, direction: filter.direction}, err
}

// what is what a name may stand for.
func (of ruleName) what() string {
	if of.direction != nil {
		return of.direction.String() + " rule"
	}
	return "rule or pool"
}

// A search is what was found for a name.
type search struct {
	hooks   []namedHook // with the rules of that name
	device  []namedHook // with the rules for any of the device of that name
	pool    policy.Rule // the one of that name, if its Pool is set; a name with a direction is of rules
	similar string      // without any of these: another name that may be meant, or "". It is
	noted   bool        // that of the only rules whose note has the word
	isPlan  bool        // rules follow a plan with that name
}

// elsewhere is a hook with rules of the name that are not within the pool of that name; nil if there is none.
func (found search) elsewhere() *namedHook {
	for _, h := range found.hooks {
		for _, r := range h.rules {
			if string(r.Within) != found.pool.Label.Name {
				return &namedHook{h.Hook, []maps.Entry{r}}
			}
		}
	}
	return nil
}

// hint asks whether another name is meant, after what was searched for.
func (found search) hint() string {
	hint := "did you mean " + plain.Line(found.similar)
	if found.noted {
		hint += ", whose note has it"
	}
	return hint + "?"
}

// withNamed runs f on what was found for exactly this name.
func (e *env) withNamed(verb string, of ruleName, f func(n *loader.Namespace, found search) error) error {
	name := of.name
	if name == "" {
		return inputf("%s: the name is empty; write the name of rules, or a device, a direction and a network", verb)
	}
	return e.with(loader.Write, verb+" "+plain.Line(name), func(n *loader.Namespace) error {
		hooks, err := n.Hooks()
		defer loader.CloseHooks(hooks)
		if err != nil {
			return err
		}
		var found search
		var others, noted []string
		rank := filterRules{label: name}.ranks() // as show searches
		for _, h := range hooks {
			if of.direction != nil && h.Direction != *of.direction {
				continue
			}
			its := namedHook{Hook: h}
			for _, entry := range h.Set.Rules() {
				if entry.Label.Name == name {
					its.rules = append(its.rules, entry)
				} else {
					others = append(others, entry.Label.Name)
					if entry.Label.Name != "" && rank(entry.Label) == leastRank {
						noted = append(noted, entry.Label.Name)
					}
				}
				found.isPlan = found.isPlan || entry.Label.Plan == name
			}
			if its.rules != nil {
				found.hooks = append(found.hooks, its)
			}
			if h.Name() == name {
				if all := (filterRules{networks: policy.Everything[:]}).entries(h.Set); all != nil {
					found.device = append(found.device, namedHook{h, all})
				}
			}
		}
		if of.direction == nil {
			found.pool, _ = findPool(n, name)
		}
		if err := e.checkName(n, verb, of, found); err != nil {
			return err
		}
		if found.hooks == nil && found.device == nil && !found.pool.Pool && !of.isNew {
			pools, err := e.findRules(n, filterRules{pools: true}, measure.Details{})
			if err != nil {
				return err
			}
			found.similar = plain.SimilarName(name, append(others, pools.Names()...))
			slices.Sort(noted)
			if noted = slices.Compact(noted); found.similar == "" && len(noted) == 1 {
				found.similar, found.noted = noted[0], true
			}
		}
		return f(n, found)
	})
}

// checkName returns an error for the name of a device that cannot be meant, and for a network that is no name.
func (e *env) checkName(n *loader.Namespace, verb string, of ruleName, found search) error {
	name, direction := of.name, policy.Egress
	if of.direction != nil {
		direction = *of.direction
	}
	is, with := plain.Line(name), verb+of.flags
	ofDevice := e.suggest(with, name, direction.String(), "CIDR")
	isDevice, err := filterRules{device: name}.isDevice(n)
	if err != nil {
		return err
	}
	_, notNetwork := policy.ParseNetworks(name)
	switch {
	case isDevice && found.hooks != nil:
		h := found.hooks[0]
		return inputf("%s is a device, and rules have that name, too; write %s for a rule of the device, and %s for one with the name",
			is, ofDevice, e.suggest(with, h.Name(), h.Direction.String(), h.rules[0].Prefix.String()))
	case found.hooks != nil || found.pool.Pool || of.isNew || verb == "set" && found.device != nil:
		return nil
	case isDevice && verb == "set":
		return inputf("%s is a device without a rule for any, and neither a rule nor a pool has that name; write %s for a rule of the device", is, ofDevice)
	case isDevice:
		return inputf("%s is a device, and neither a rule nor a pool has that name; write %s for a rule of the device", is, ofDevice)
	case notNetwork == nil:
		return inputf("%s is a network, and neither a rule nor a pool has that name; write a device and a direction, too, as in %s",
			is, e.suggest(with, "DEV", "egress", name))
	}
	return nil
}

// setNamed changes what has a name in the options that were given: the rules for any of a device, a pool, or rules. It
// makes a new pool.
func (e *env) setNamed(of ruleName, limit limitFlags) error {
	return e.withNamed("set", of, func(n *loader.Namespace, found search) error {
		if err := e.checkWithin(n, limit); err != nil {
			return err
		}
		switch {
		case found.device != nil && !of.isNew:
			found.hooks = found.device
		case found.pool.Pool || of.isNew:
			return e.setPool(n, of, found, limit)
		case found.hooks == nil && found.isPlan:
			return inputf("no %s has that name, but a plan does; a plan is changed in the policy file", of.what())
		case found.hooks == nil && policyfile.IsPattern(of.name):
			return inputf("no %s has that name, and set takes no pattern; to change several at one moment, edit what %s prints, and run %s",
				of.what(), e.suggest("export"), e.suggest("apply", "FILE"))
		case found.similar != "":
			return inputf("no %s has that name; %s --new makes a pool", of.what(), found.hint())
		case found.hooks == nil:
			return inputf("no %s has that name; %s lists the names; --new makes a pool", of.what(), e.suggest("show --sort name"))
		}
		if done, err := e.setOwnPool(n, of, found, limit); done || err != nil {
			return err
		}
		if err := e.checkOneRate(of, found, limit); err != nil {
			return err
		}
		var tables []policy.Table
		for _, h := range found.hooks {
			if h.State == loader.Moved {
				return fmt.Errorf("%s %s: %w", plain.Line(h.Name()), h.Direction, loader.ErrMoved)
			}
			dev, err := device(h.Name())
			if err != nil {
				return err
			}
			t := policy.Table{Device: dev.Name, Direction: h.Direction, Match: h.Match()}
			if limit.given("match") {
				t.Match = limit.match
			}
			for _, entry := range h.rules {
				rule, err := limit.over(&entry.Rule, dev.L2Bytes)
				if err != nil {
					return inputf("%s %s %s: %w; nothing was changed", plain.Line(dev.Name), h.Direction, entry.Prefix, err)
				}
				t.Rules = append(t.Rules, rule)
			}
			tables = append(tables, t)
		}
		return e.put(n, tables...)
	})
}

// setOwnPool changes the pool of rules that have no rate of their own, if nothing else draws from it: whoever gives the
// name of these rules a rate means one rate for all of them. Of several such pools, as for both directions, it changes all,
// unless their rates differ. It reports whether it did.
func (e *env) setOwnPool(n *loader.Namespace, of ruleName, found search, limit limitFlags) (done bool, err error) {
	flags, ofRules := limit.split()
	var pools, commands []string
	var first string // a rule without a rate
	rules, without := 0, 0
	for _, h := range found.hooks {
		for _, r := range h.rules {
			pool := string(r.Within)
			if rules++; r.Rate != policy.Unlimited || pool == "" {
				continue
			}
			if without++; slices.Contains(pools, pool) {
				continue
			}
			pools, commands = append(pools, pool), append(commands, e.suggest("set"+flags+e.how(), pool))
			if first == "" {
				within := " --within " + plain.Word(pool)
				if limit.given("within") {
					within = ""
				}
				first = e.suggest("set"+within+flags+e.how(), h.Name(), h.Direction.String(), r.Prefix.String())
			}
		}
	}
	if flags == "" || without == 0 {
		return false, nil
	}
	own, users, same := ownPools(n, pools)
	if without == rules && users == rules && same {
		if ofRules != "" {
			return false, inputf("%s is for the rules, and%s for their pool %s; give them in two commands; nothing was changed",
				ofRules, flags, plain.List(lines(pools)))
		}
		return true, e.changePools(n, limit, own...)
	}
	if !slices.ContainsFunc(policy.Options, func(o *policy.Option) bool {
		return limit.has(o) && !o.RuleOnly && (o.LimitedOnly || o.Name == "rate" || o.Name == "algorithm")
	}) {
		return false, nil
	}
	if without == rules && users == rules {
		if byName := e.byDirection(of, found, flags); byName != nil && ownByDirection(n, found) {
			commands = byName
		}
		var rates []string
		for _, pool := range own {
			rates = append(rates, fmt.Sprintf("%s has %v", plain.Line(pool.Label.Name), pool.Rate))
		}
		return false, inputf("the pools of these rules have different rates: %s; nothing was changed; %s", plain.List(rates), e.either(commands))
	}
	why := "other rules or pools, too, are within pool " + plain.Line(pools[0])
	switch {
	case len(pools) > 1:
		why = "rules with this name are in several pools"
	case without < rules:
		why = "only some rules with this name have a rate of their own, and the others that of pool " + plain.Line(pools[0])
	}
	return false, inputf("%s; nothing was changed; write %s for a whole pool, or %s for one rule", why, strings.Join(commands, " or "), first)
}

// ownPools returns pools, how many rules and pools draw from them, and whether they have the same rate.
func ownPools(n *loader.Namespace, names []string) (pools []policy.Rule, users int, same bool) {
	same = true
	for _, name := range names {
		pool, _ := findPool(n, name)
		pools = append(pools, pool)
		users += len(n.Within(name))
		same = same && pool.Rate == pools[0].Rate
	}
	return pools, users, same
}

// ownByDirection reports whether the rules of each direction have pools of their own, of one rate.
func ownByDirection(n *loader.Namespace, found search) bool {
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		var pools []string
		rules := 0
		for _, h := range found.of(d) {
			for _, r := range h.rules {
				pools = append(pools, string(r.Within))
				rules++
			}
		}
		slices.Sort(pools)
		if _, users, same := ownPools(n, slices.Compact(pools)); !same || users != rules {
			return false
		}
	}
	return true
}

// of returns the hooks of a direction.
func (found search) of(d policy.Direction) (hooks []namedHook) {
	for _, h := range found.hooks {
		if h.Direction == d {
			hooks = append(hooks, h)
		}
	}
	return hooks
}

// byDirection returns commands that set the rules with a name in each direction; nil if they have only one.
func (e *env) byDirection(of ruleName, found search, flags string) (commands []string) {
	if len(found.of(policy.Egress)) == 0 || len(found.of(policy.Ingress)) == 0 {
		return nil
	}
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		commands = append(commands, e.suggest("set"+flags+e.how(), of.name, d.String()))
	}
	return commands
}

// either tells of several commands that somebody may mean. Only one of them can be pending.
func (e *env) either(commands []string) string {
	if len(commands) == 1 {
		return "write " + commands[0]
	}
	const few = 3
	write := "write " + strings.Join(commands[:min(few, len(commands))], " or ")
	if len(commands) > few {
		write += ", and so on"
	}
	if e.confirm > 0 {
		write += fmt.Sprintf("; to change several at one moment, edit what %s prints, and run %s",
			e.suggest("export"), e.suggest("apply"+e.how(), "FILE"))
	}
	return write
}

// checkOneRate returns an error if rules with different rates would get one: whoever gave them different rates, such as
// for down and up, hardly means one rate for all. An exemption is meant for all.
func (e *env) checkOneRate(of ruleName, found search, limit limitFlags) error {
	if !limit.given("rate") || limit.Rate == policy.Unlimited || sameRate(found.hooks) {
		return nil
	}
	var rates, commands []string
	for _, h := range found.hooks {
		if where := plain.Line(h.Name()) + " " + h.Direction.String(); sameRate([]namedHook{h}) {
			rates = append(rates, fmt.Sprintf("%s has %v", where, h.rules[0].Rate))
		} else {
			for _, r := range h.rules {
				rates = append(rates, fmt.Sprintf("%s %v has %v", where, r.Prefix, r.Rate))
			}
		}
	}
	byName := e.byDirection(of, found, limit.all())
	for i, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		hooks := found.of(d)
		if byName != nil && sameRate(hooks) {
			commands = append(commands, byName[i])
			continue
		}
		for _, h := range hooks {
			for _, r := range h.rules {
				commands = append(commands, e.suggest("set"+limit.all()+e.how(), h.Name(), d.String(), r.Prefix.String()))
			}
		}
	}
	return inputf("these rules have different rates: %s; nothing was changed; %s", plain.List(rates), e.either(commands))
}

// sameRate reports whether all rules of hooks have the same rate.
func sameRate(hooks []namedHook) bool {
	for _, h := range hooks {
		for _, r := range h.rules {
			if r.Rate != hooks[0].rules[0].Rate {
				return false
			}
		}
	}
	return true
}

// put sets the rules of tables beside the others of their devices, and describes them.
func (e *env) put(n *loader.Namespace, tables ...policy.Table) error {
	done, err := n.PutTogether(e.confirm, tables...)
	if err != nil {
		return err
	}
	until, err := e.pending(n, "set", done)
	if err != nil {
		return err
	}
	if e.confirm > 0 && until == 0 {
		e.say("shapectl: nothing was changed, so there is nothing to confirm, and nothing reverts")
	}
	for _, d := range done {
		if d.Hook.Upgraded {
			e.say("%s %s: the program of another build was replaced; rules, buckets and counters were kept", d.Device, d.Direction)
		}
		if d.Hook.Reattached != "" {
			e.say("%s %s: was not in force (%s); all its rules are attached again", d.Device, d.Direction, d.Hook.Reattached)
		}
	}
	set := report.Rules{}
	for _, t := range tables {
		for _, of := range filtersOf(t) {
			found, err := e.findRules(n, of, measure.Details{Sentences: true})
			if err != nil {
				return err
			}
			set = append(set, found...)
		}
	}
	set.SayPools(poolsChanged(done))
	err = e.print(set, e.sentences(set))
	for _, d := range done {
		if lacks := e.queued(n, d.Device, d.Hook); err == nil {
			err = lacks
		}
	}
	return err
}

// filtersOf returns filters for just the rules or pools of a table.
func filtersOf(t policy.Table) (filters []filterRules) {
	if t.IsPools() {
		for _, p := range t.Rules {
			filters = append(filters, filterRules{pools: true, pool: p.Label.Name})
		}
		return filters
	}
	of := filterRules{device: t.Device, direction: &t.Direction}
	for _, r := range t.Rules {
		of.networks = append(of.networks, r.Prefix)
	}
	return []filterRules{of}
}

// deleteNamed deletes the rules that have a name, or if there are none, the pool.
func (e *env) deleteNamed(of ruleName) error {
	return e.withNamed("delete", of, func(n *loader.Namespace, found search) error {
		if found.hooks == nil && found.pool.Pool {
			pool, err := e.findRules(n, filterRules{pools: true, pool: of.name}, measure.Details{Sentences: true})
			if err == nil {
				_, err = n.DeletePool(of.name)
			}
			if err != nil {
				return err
			}
			return e.deleted(pool)
		}
		if found.similar != "" {
			e.say("shapectl: no %s has the name %s; %s", of.what(), plain.Line(of.name), found.hint())
		}
		switch {
		case found.hooks == nil && e.json:
			return e.deleted(report.Rules{})
		case found.hooks == nil:
			_, err := fmt.Fprintf(e.out, "nothing to delete: no %s has the name %s\n", of.what(), plain.Line(of.name))
			return err
		}
		var deleted report.Rules
		var hooks []*loader.Hook
		networks := map[*loader.Hook][]netip.Prefix{}
		for _, h := range found.hooks {
			hooks = append(hooks, h.Hook)
			for _, entry := range h.rules {
				deleted = append(deleted, measure.Describe(h.Hook, entry))
				networks[h.Hook] = append(networks[h.Hook], entry.Prefix)
			}
		}
		if _, err := n.DeleteTogether(func(h *loader.Hook) []netip.Prefix { return networks[h] }, hooks...); err != nil {
			return err
		}
		if err := e.deleted(deleted); err != nil {
			return err
		}
		e.sayUnused(n, deleted)
		return nil
	})
}
