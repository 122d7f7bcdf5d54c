package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// What a name may be of, for --kind.
const (
	kindRule   = report.KindRule
	kindPool   = report.KindPool
	kindDevice = "device"
)

// addKind adds --kind.
func addKind(f *pflag.FlagSet, kind *string) {
	f.Var(choice(kind, kindRule, kindPool, kindDevice), "kind", "only what is there, and only of this kind")
}

// A namedHook is a hook and some of its rules.
type namedHook struct {
	*loader.Hook
	rules []maps.Entry
}

// mayBe reports whether the name may be that of this kind of thing.
func (want target) mayBe(kind string) bool {
	return want.kind == kind || want.kind == "" && (kind != kindPool || want.direction == nil)
}

// what is what a name may stand for.
func (want target) what() string {
	switch {
	case want.direction != nil:
		return want.direction.String() + " rule"
	case want.kind != "":
		return want.kind
	}
	return "rule or pool"
}

// again is a command about the same name, in a sentence; kind may be "".
func (e *env) again(of target, kind string) string {
	verb := of.command
	if kind != "" {
		verb += " --kind " + kind
	}
	return e.suggest(verb+of.flags, append(of.words(), of.rest...)...)
}

// hasHost reports whether a pool is that of a host with the name.
func (want target) hasHost(p policy.Rule) bool {
	o := p.Label.Owner
	return o.Host == want.name && (want.direction == nil || o.Direction == *want.direction)
}

// A search is what was found for a name.
type search struct {
	kind     string      // of the only thing that is meant; "" if nothing has the name
	rules    []namedHook // with that name
	isDevice bool
	device   []namedHook // with the rules for any of that device
	others   int         // the other rules of that device
	pool     policy.Rule // the one of that name, if its Pool is set
	otherWay bool        // rules of the other direction have that name
	host     bool        // a host of that name has a pool, which delete means
	advice   string      // what to do if nothing has the name
	isPlan   bool        // rules follow a plan with that name
}

// meantName returns the name of rules that somebody means who writes a name or an ID. It returns what was written if that is a
// device or a pool, or no rule of these hooks has such a name.
func meantName(n *loader.Namespace, hooks []*loader.Hook, written string) string {
	_, isPool := findPool(n, written)
	if _, err := netinfo.DeviceByName(written); isPool || err == nil {
		return written
	}
	return cmp.Or(policy.FindName(written, slices.Values(target{}.ruleNames(hooks))), written)
}

// ruleNames are the names of the rules of hooks in a direction of the target.
func (want target) ruleNames(hooks []*loader.Hook) (names []string) {
	for _, h := range hooks {
		if want.direction != nil && h.Direction != *want.direction {
			continue
		}
		for _, r := range h.Rules() {
			names = append(names, r.Label.Name)
		}
	}
	return names
}

// withNamed runs f on what was found for exactly this name.
func (e *env) withNamed(of target, f func(n *loader.Namespace, of target, found search) error) error {
	return e.with(loader.Write, of.command+" "+plain.Line(of.name), func(n *loader.Namespace) error {
		hooks, err := n.Hooks()
		defer loader.CloseHooks(hooks)
		if err != nil {
			return err
		}
		if !of.isNew {
			of.name = meantName(n, hooks, of.name)
		}
		name, device := of.name, target{name: of.name}
		var found search
		if found.isDevice, err = device.isThere(n); err != nil {
			return err
		}
		for _, h := range hooks {
			rules := h.Rules()
			if of.direction != nil && h.Direction != *of.direction {
				found.otherWay = found.otherWay || slices.ContainsFunc(rules, func(r policy.Rule) bool { return r.Label.Name == name })
				continue
			}
			its := namedHook{Hook: h}
			for i := range rules {
				if l := &rules[i].Label; l.Name == name {
					entry, _ := h.Set.Find(rules[i].Prefix)
					its.rules = append(its.rules, entry)
				} else if l.Plan == name {
					found.isPlan = true
				}
			}
			if its.rules != nil {
				found.rules = append(found.rules, its)
			}
			if h.Name() == device.name {
				all := target{networks: policy.Everything[:]}.entries(h.Set)
				if found.others += len(rules) - len(all); all != nil {
					found.device = append(found.device, namedHook{h, all})
				}
			}
		}
		found.pool, _ = findPool(n, name)
		for _, pools := range poolsOf(n) {
			found.host = of.command == "delete" && slices.ContainsFunc(pools.Rules(), of.hasHost)
			pools.Close()
		}
		if found.kind, err = e.meaning(n, of, found); err != nil {
			return err
		}
		if found.kind == "" && !of.isNew {
			found.advice = didYouMean(of.name, othersLike(n, of, hooks), e.suggest("show --sort name")+" lists the names.")
		}
		return f(n, of, found)
	})
}

// othersLike are the names of all that a name may stand for.
func othersLike(n *loader.Namespace, of target, hooks []*loader.Hook) (others []string) {
	if of.mayBe(kindRule) {
		others = of.ruleNames(hooks)
	}
	if of.mayBe(kindPool) {
		others = append(others, poolNames(n)...)
	}
	if of.mayBe(kindDevice) {
		return withDevices(others)
	}
	return others
}

// meaning returns the kind of the one thing that a name stands for; "" for none. If there are several, the error has a command
// for each. A device is the same thing as rules that have its name and are its rules for any, and a pool is the same thing as
// rules that are limited only by it. A pool that is in use is not to be deleted.
func (e *env) meaning(n *loader.Namespace, of target, found search) (kind string, err error) {
	rule := of.mayBe(kindRule) && (found.rules != nil || found.host)
	device := of.mayBe(kindDevice) && found.isDevice && (rule || found.device != nil) && !(rule && sameRules(found.rules, found.device))
	pool := of.mayBe(kindPool) && found.pool.Pool
	if one := rule != device; pool && one {
		pool = !limitedOnlyBy(of.name, slices.Concat(found.rules, found.device)) && (of.command != "delete" || users(poolTree(n), of.name) == 0)
	}
	if of.command == "topup" && pool && found.pool.Also.Quota.Bytes > 0 {
		tree := poolTree(n)
		hasNone := func(rules []namedHook) bool { return !anyQuota(rules) && onlyIn(tree, of.name, rules) } // but that of the pool
		rule, device = rule && !hasNone(found.rules), device && !hasNone(found.device)
	}
	if !rule && !pool && of.mayBe(kindDevice) && found.isDevice {
		return kindDevice, nil
	}
	var commands []string
	if rule {
		kind = kindRule
		commands = append(commands, e.again(of, kind)+" for the rules with that name")
	}
	if pool {
		kind = kindPool
		commands = append(commands, e.again(of, kind)+" for the pool")
	}
	switch {
	case device && pool && of.command == "set":
		kind = kindDevice
		for _, h := range found.device { // which may have a pool of its own
			its := of
			its.direction = &h.Direction
			commands = append(commands, e.again(its, "")+" for "+h.Direction.String())
		}
	case device:
		kind = kindDevice
		commands = append(commands, e.again(of, kind)+" for the rules for any of the device")
	}
	if len(commands) > 1 {
		last := len(commands) - 1
		return "", inputf("the name stands for several things; nothing was changed; write %s, or %s", strings.Join(commands[:last], ", "), commands[last])
	}
	return kind, nil
}

// poolTree is the tree of a namespace's pools, with all rules in them.
func poolTree(n *loader.Namespace) *policy.Tree {
	tables, _ := n.Tables(loader.Attached, loader.Detached, loader.Moved, loader.Gone) // delete refuses what cannot be read
	return policy.NewTree(tables)
}

// users is how many rules and pools are directly within a pool.
func users(tree *policy.Tree, pool string) int {
	if node := tree.Find(pool); node != nil {
		return len(node.Rules) + len(node.Below)
	}
	return 0
}

// limitedOnlyBy reports whether all rules are within the pool of that name and have no rate of their own.
func limitedOnlyBy(pool string, rules []namedHook) bool {
	return !slices.ContainsFunc(rules, func(h namedHook) bool {
		return slices.ContainsFunc(h.rules, func(r maps.Entry) bool { return r.Rate != policy.Unlimited || string(r.Within) != pool })
	})
}

// onlyIn reports whether all rules are within the pool of that name, or within one that is.
func onlyIn(tree *policy.Tree, pool string, rules []namedHook) bool {
	return !slices.ContainsFunc(rules, func(h namedHook) bool {
		return slices.ContainsFunc(h.rules, func(r maps.Entry) bool {
			node := tree.Find(string(r.Within))
			for node != nil && node.Pool.Label.Name != pool {
				node = node.Above
			}
			return node == nil
		})
	})
}

func sameRules(a, b []namedHook) bool {
	return slices.EqualFunc(a, b, func(a, b namedHook) bool {
		return a.Hook == b.Hook && slices.EqualFunc(a.rules, b.rules, func(a, b maps.Entry) bool { return a.ID == b.ID })
	})
}

// setNamed changes what has a name in the options that were given: rules, a pool, or the rules for any of a device. It makes a
// new pool.
func (e *env) setNamed(of target, limit limitFlags) error {
	of.flags = limit.all() + e.how()
	return e.withNamed(of, func(n *loader.Namespace, of target, found search) error {
		if err := e.checkWithin(n, limit); err != nil {
			return err
		}
		rules := found.rules
		switch {
		case of.isNew || found.kind == kindPool:
			return e.setPool(n, of, found.pool, limit)
		case found.kind == "":
			return e.nothingNamed(of, found)
		case found.kind == kindDevice && found.device == nil && policy.IsCgroup(of.name): // its first rules for any
			var tables []policy.Table
			for _, d := range of.directions() {
				t, err := limit.table(netinfo.Device{Name: of.name}, d, nil, policy.Everything[:], false)
				if err != nil {
					return inputError(err)
				}
				tables = append(tables, t)
			}
			return e.put(n, limit, tables...)
		case found.kind == kindDevice && found.device == nil:
			return inputf("%s is a device without a rule for any; write %s for one", plain.Line(of.name),
				e.suggest("set"+of.flags, of.name, cmp.Or(of.direction, new(policy.Egress)).String(), policy.Any))
		case found.kind == kindDevice:
			rules = found.device
		}
		if done, err := e.setOwnPools(n, of, rules, limit); done || err != nil {
			return err
		}
		if err := e.checkOneRate(of, rules, limit); err != nil {
			return err
		}
		var tables []policy.Table
		for _, h := range rules {
			if h.State == loader.Moved {
				return fmt.Errorf("%s %s: %w", plain.Line(h.Name()), h.Direction, loader.ErrMoved)
			}
			dev, err := device(h.Name())
			if err != nil {
				return err
			}
			var its networks
			for _, entry := range h.rules {
				its = append(its, entry.Prefix)
			}
			t, err := limit.table(dev, h.Direction, h.Hook, its, true)
			if err != nil {
				return inputf("%s %s %s: %w; nothing was changed", plain.Line(dev.Name), h.Direction, policy.CIDR(its[len(t.Rules)]), err)
			}
			tables = append(tables, t)
		}
		return e.put(n, limit, tables...)
	})
}

// nothingNamed says that nothing has a name, and what may be meant.
func (e *env) nothingNamed(of target, found search) error {
	says, makes := "no "+of.what()+" has that name", ""
	if of.command == "set" && of.mayBe(kindPool) {
		makes = " --new makes a pool"
	}
	_, notNetwork := policy.ParseNetworks(of.name)
	switch {
	case of.kind == kindDevice || policy.IsCgroup(of.name):
		return noDevice(of.name)
	case found.pool.Pool && of.kind == "":
		return inputf("%s, but a pool does, which has no direction; write %s", says, e.again(target{command: of.command, name: of.name, flags: of.flags}, kindPool))
	case found.isPlan:
		return inputf("%s, but a plan does; a plan is changed in the policy file", says)
	case notNetwork == nil:
		return inputf("%s; for the network, write a device and a direction, too, as in %s", says, e.suggest(of.command+of.flags, "DEV", "egress", of.name))
	case policyfile.IsPattern(of.name):
		return inputf("%s, and %s NAME takes no pattern; to change several at one moment, edit the policy file, and run %s", says, of.command, e.suggest("apply", "FILE"))
	}
	return missingf("%s; %s%s", says, found.advice, makes)
}

// setOwnPools changes the pools of rules that have no rate of their own, if nothing else draws from these pools, or the only one
// has the name: whoever gives such rules a rate means one for all of them. Pools of devices and pods move in place of their rules.
// It reports whether it did.
func (e *env) setOwnPools(n *loader.Namespace, of target, rules []namedHook, limit limitFlags) (done bool, err error) {
	if of.kind != "" {
		return false, nil
	}
	var pools []policy.Rule
	var rates []string
	all, own, within, tree := 0, 0, 0, poolTree(n)
	for _, h := range rules {
		for _, r := range h.rules {
			name := string(r.Within)
			if r.Rate == policy.Unlimited && name == "" { // an exemption
				continue
			}
			if all++; r.Rate != policy.Unlimited {
				own++
				continue
			}
			if slices.ContainsFunc(pools, func(p policy.Rule) bool { return p.Label.Name == name }) {
				continue
			}
			pool, found := findPool(n, name)
			if !found { // a change that was pending has reverted
				return false, inputf("pool %s was just deleted; nothing was changed; see %s", plain.Line(name), e.suggest("show", of.name))
			}
			pools, within = append(pools, pool), within+users(tree, name)
			rates = append(rates, fmt.Sprintf("%s has %v", plain.Line(name), pool.Rate))
		}
	}
	moves := limit.Gives("within") && !slices.ContainsFunc(pools, func(p policy.Rule) bool { return p.Label.Owner.Device == "" })
	isOfRule := func(o *policy.Option) bool { return o.Name == "guarantee" || o.Name == "weight" }
	ofPool := func(o *policy.Option) bool { // the guarantee of rules that move is one in the other pool
		return moves && o.Name == "within" || isOfPool(o) && (moves || !limit.Gives("within") || !isOfRule(o))
	}
	flags, ofRules := limit.written(ofPool)
	exempts := limit.Gives("rate") && (limit.Rate == policy.Unlimited && own > 0 || limit.Gives("within") && !moves)
	shared := within > all && (of.direction != nil || len(pools) > 1 || pools[0].Label.Name != of.name)
	var why string
	switch {
	case pools == nil, flags == "", exempts, shared && !slices.ContainsFunc(limit.Given(), func(o *policy.Option) bool { return ofPool(o) && !isOfRule(o) }):
		return false, nil
	case ofRules != "":
		return false, inputf("%s is an option of these rules, but%s of their pool: %s; give them in two commands; nothing was changed",
			ofRules, flags, plain.List(rates))
	case own > 0:
		why = "only some of these rules have a rate of their own, and others that of a pool"
	case shared:
		why = "these rules share the rate of a pool with others"
	case limit.Gives("rate") && slices.ContainsFunc(pools, func(p policy.Rule) bool { return p.Rate != pools[0].Rate }):
		why = "the pools of these rules have different rates"
	default:
		return true, e.changePools(n, limit, pools...)
	}
	h := rules[0]
	return false, inputf("%s: %s; nothing was changed; name a pool, as in %s, or a rule, as in %s", why, plain.List(rates),
		e.suggest("set --kind pool"+flags+e.how(), pools[0].Label.Name),
		e.suggest("set"+of.flags, h.Name(), h.Direction.String(), policy.CIDR(h.rules[0].Prefix)))
}

// isOfPool reports whether an option of rules that have only the rate of their own pool is meant for that.
func isOfPool(o *policy.Option) bool {
	return !o.RuleOnly && (o.LimitedOnly || o.PoolOnly || slices.Contains([]string{"rate", "algorithm", "guarantee", "weight", "shadow"}, o.Name))
}

// checkOneRate returns an error if rules with different rates would get one: whoever gave them different rates, such as
// for down and up, hardly means one rate for all. An exemption is meant for all.
func (e *env) checkOneRate(of target, rules []namedHook, limit limitFlags) error {
	if !limit.Gives("rate") || limit.Rate == policy.Unlimited {
		return nil
	}
	var rates []string // an example of each
	known := map[policy.Rate]bool{}
	for _, h := range rules {
		for _, r := range h.rules {
			if !known[r.Rate] {
				known[r.Rate] = true
				rates = append(rates, fmt.Sprintf("%s %s %v has %v", plain.Line(h.Name()), h.Direction, policy.CIDR(r.Prefix), r.Rate))
			}
		}
	}
	if len(rates) < 2 {
		return nil
	}
	h, network := rules[0], policy.Any
	if first := h.rules[0].Prefix; first.Bits() > 0 {
		network = policy.CIDR(first)
	}
	advice := "name a network, as in " + e.suggest("set"+of.flags, h.Name(), h.Direction.String(), network)
	if of.direction == nil {
		advice = "give a direction, as in " + e.suggest("set"+of.flags, of.name, h.Direction.String()) + ", or " + advice
	}
	return inputf("these rules have different rates: %s; nothing was changed; %s", plain.List(rates), advice)
}

// deleteNamed deletes the rules that have a name, those for any of a device, or the pool.
func (e *env) deleteNamed(of target) error {
	of.flags = e.how()
	return e.withNamed(of, func(n *loader.Namespace, of target, found search) error {
		switch found.kind {
		case kindDevice:
			return e.deleteForAny(n, of, found)
		case kindPool:
			pools := n.Pools()
			defer pools.Close()
			return e.remove(n, "", target{networks: networks{found.pool.Prefix}}.rules([]*loader.Hook{pools})...)
		case "":
			if !found.otherWay {
				return e.nothingNamed(of, found)
			}
			return e.nothing(report.Rules{}, "nothing to delete: no "+of.what()+" has the name "+plain.Line(of.name))
		}
		limits := map[string]bool{of.name: true} // the pools that are the rate of these rules
		for _, h := range found.rules {
			for _, r := range h.rules {
				limits[string(r.Within)] = limits[string(r.Within)] || r.Rate == policy.Unlimited
			}
		}
		own := func(p policy.Rule) bool { return of.hasHost(p) || p.Label.Owner.Device == "" && limits[p.Label.Name] }
		return e.removeWithPools(n, of.String(), own, found.rules)
	})
}

// deleteForAny deletes the rules for any of a device, and says how many others it keeps.
func (e *env) deleteForAny(n *loader.Namespace, of target, found search) (err error) {
	who := of.String()
	if found.others > 0 {
		who = "all else on " + who
	}
	if found.device == nil {
		err = e.nothing(report.Rules{}, "nothing to delete: "+target{name: of.name, direction: of.direction, networks: policy.Everything[:]}.none())
	} else {
		err = e.removeWithPools(n, who, nil, found.device)
	}
	if found.others > 0 && !e.json && err == nil {
		_, err = fmt.Fprintf(e.out, "%s keeps %s; %s deletes all\n", plain.Line(of.String()), plain.Count(found.others, "other rule"), e.suggest("flush", of.words()...))
	}
	return err
}
