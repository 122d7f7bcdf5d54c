package main

import (
	"errors"
	"net/netip"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// filterRules says which rules are meant.
type filterRules struct {
	command   string            // for errors; "" for show
	device    string            // "" for any
	pattern   bool              // device is a pattern: resolve decides
	direction *policy.Direction // nil for both
	networks  networks          // exactly these; nil for all
	pools     bool              // pools, and no rules
	lost      bool              // there are limits whose pins are not here; found by rules
	pool      string            // with pools: exactly this one, else those that match it; "" for all

	// What show searches for; each only if set.
	address netip.Addr    // rules whose network contains it, the one that decides first
	network *netip.Prefix // rules for it or for networks in it; if there are none, the one that contains it
	wider   bool          // only that one
	label   string        // a rule's name or plan: exactly, else by a pattern, else a part of it; else a part of the note
	plan    string        // exactly
}

// networks are the networks that one argument names.
type networks []netip.Prefix

func (n networks) String() string {
	if len(n) > 1 {
		return policy.Any
	}
	return n[0].String()
}

// parseSearch reads the arguments of a command that takes those of show. search is whether the first one may be something
// else than a device.
func parseSearch(cmd string, given []string) (want filterRules, search bool, err error) {
	if len(given) > 0 && given[0] == "" {
		return want, false, inputf("%s: the first argument is empty; leave it out for all rules", cmd)
	}
	want, err = parseFilter(cmd, given)
	return want, len(given) == 1 || len(given) == 2, err
}

// parseFilter reads [DEV [ingress|egress [CIDR]]] of a command.
func parseFilter(cmd string, given []string) (want filterRules, err error) {
	want.command = cmd
	if len(given) > 0 {
		want.device = given[0]
	}
	if len(given) > 1 {
		d, err := policy.ParseDirection(given[1])
		if err != nil {
			return want, inputf("%s: %w", cmd, directionError(given[1], err))
		}
		want.direction = &d
	}
	if len(given) > 2 {
		if want.networks, err = policy.ParseNetworks(given[2]); err != nil {
			return want, inputf("%s: %w", cmd, argumentError{err})
		}
	}
	return want, nil
}

// noRules is what none says of a filter that lets all rules through.
const noRules = "no rules"

// none says that no rule passes the filter.
func (want filterRules) none() string {
	if want.pools && policyfile.IsPattern(want.pool) {
		return "there is no pool that matches " + plain.Line(want.pool)
	}
	if want.pools && want.pool != "" {
		return "there is no pool " + plain.Line(want.pool)
	}
	if want.pools {
		return "no pools"
	}
	network, rules, article, direction := "", "rules", "", ""
	switch {
	case want.networks != nil:
		network = want.networks.String()
	case want.address.IsValid():
		network = want.address.String()
	case want.network != nil:
		network = want.network.String()
	}
	if network != "" {
		rules, article = "rule for "+network, "an "
	}
	if want.plan != "" {
		rules += " with plan " + plain.Line(want.plan)
	}
	if want.direction != nil {
		direction = want.direction.String() + " "
	}
	switch device := plain.Line(want.device); {
	case device == "":
		return "no " + direction + rules
	case !want.pattern:
		return device + " " + direction + "has no " + rules
	case direction == "":
		return "no device that matches " + device + " has " + rules
	default:
		return "no device that matches " + device + " has " + article + direction + rules
	}
}

// isSingle reports whether a filter is for one rule or pool rather than for many.
func (want filterRules) isSingle() bool {
	return !want.pattern && (want.networks != nil || want.label != "" || want.address.IsValid() || want.pool != "" && !policyfile.IsPattern(want.pool))
}

// search finds out what the only argument of show means: a device, the name of rules or a pool, a direction, an
// address, a network, a pattern of devices, or a part of a name, plan or note.
func (want *filterRules) search(n *loader.Namespace) error {
	if there, err := want.isDevice(n); there || err != nil {
		return err
	}
	named := *want
	named.device, named.label = "", want.device
	if err := want.searchFor(n); want.label == "" && named.isName(n) {
		*want = named // as set and delete understand it
	} else if err != nil {
		return err
	}
	return nil
}

// isName reports whether rules or a pool have exactly the name that the filter is for.
func (want filterRules) isName(n *loader.Namespace) bool {
	hooks, _ := want.searched(n) // of those that cannot be read, the caller learns when it asks again
	defer loader.CloseHooks(hooks)
	return slices.ContainsFunc(hooks, func(h *loader.Hook) bool {
		return slices.ContainsFunc(h.Set.Rules(), func(entry maps.Entry) bool { return entry.Label.Name == want.label })
	})
}

// searchFor is search for what is no device.
func (want *filterRules) searchFor(n *loader.Namespace) error {
	what := want.device
	want.device = ""
	if d, err := policy.ParseDirection(what); err == nil {
		want.direction = &d
		return nil
	}
	if what == policy.Any {
		want.networks = policy.Everything[:]
		return nil
	}
	if address, err := netip.ParseAddr(what); err == nil && address.Zone() == "" && !address.Is4In6() {
		want.address = address
		return nil
	}
	if _, err := netip.ParsePrefix(what); err == nil {
		prefix, err := policy.ParsePrefix(what)
		if err != nil {
			return inputError(err)
		}
		want.network = &prefix
		return nil
	}
	if policyfile.CheckDevice(what) == nil && strings.ContainsAny(what, `*?[\`) {
		if !policyfile.IsPattern(what) {
			want.device = policyfile.Unescape(what)
			return nil
		}
		of := filterRules{device: what, pattern: true}
		if there, err := of.matchesAny(n); there || err != nil {
			want.device, want.pattern = what, there
			return err
		}
	}
	want.label = what
	return nil
}

// isDevice reports whether the filter names one device exactly: one that is there, or had rules.
func (want filterRules) isDevice(n *loader.Namespace) (bool, error) {
	if _, err := netinfo.DeviceByName(want.device); !errors.Is(err, netinfo.ErrNoDevice) {
		return err == nil, err
	}
	hooks, err := filterRules{device: want.device}.hooks(n)
	loader.CloseHooks(hooks)
	// If they cannot be read, the caller asks for them again and gets the error.
	unread := err != nil && n.Readable() == nil
	return len(hooks) > 0 || unread || slices.Contains(n.Collected, want.device), nil
}

// matchesAny reports whether a pattern matches any device: one that is there, or had rules.
func (want filterRules) matchesAny(n *loader.Namespace) (bool, error) {
	devices, err := netinfo.Devices()
	if err != nil || slices.ContainsFunc(devices, func(d netinfo.Device) bool { return want.matchesDevice(d.Name) }) {
		return err == nil, err
	}
	hooks, err := want.hooks(n)
	loader.CloseHooks(hooks)
	return len(hooks) > 0 || err != nil, nil // the caller asks for them again and gets the error
}

// checkThere reports as an error that a filter that no rule passes names what does not exist.
func (e *env) checkThere(n *loader.Namespace, want filterRules) error {
	name, advice := plain.Line(want.label), e.suggest("show")+" lists all rules"
	switch {
	case want.pool != "":
		if err := policyfile.CheckPattern(want.pool); err != nil {
			return inputError(err)
		}
		return inputf("%s; %s lists the pools", want.none(), e.suggest("show --pools"))
	case strings.ContainsAny(want.label, `*?[\`):
		if err := policyfile.CheckPattern(want.label); err != nil {
			return inputError(err)
		}
		return missingf("there is no device that matches %s, and no rule, plan or pool has such a name; %s", name, advice)
	case want.label != "":
		all, _ := e.findRules(n, filterRules{}, measure.Details{})
		if similar := nearest(want.label, all.Names()); similar != "" {
			advice = "did you mean " + plain.Line(similar) + "?"
		}
		return missingf("there is no device %s, and no rule, plan or pool has that name; %s", name, advice)
	case want.device == "" && want.plan != "":
		return inputf("%s; %s", want.none(), advice)
	case want.device == "" || want.pattern:
		return nil
	}
	if _, err := device(want.device); err != nil || want.networks == nil {
		return err
	}
	return inputf("%s; %s lists its rules", want.none(), e.suggest("show", want.device))
}

// matches are the rules of hooks that pass the filter.
func (want filterRules) matches(hooks []*loader.Hook) []measure.Found {
	found := want.best(hooks)
	if want.network != nil && len(found) == 0 {
		want.wider = true
		found = want.best(hooks)
	}
	if want.label != "" {
		found = withMembers(found, hooks)
	}
	return found
}

// withMembers adds all that is within the pools that were found.
func withMembers(found []measure.Found, hooks []*loader.Hook) []measure.Found {
	pools, there := map[policy.Within]bool{}, map[uint32]bool{}
	for _, m := range found {
		if there[m.ID] = true; m.Pool {
			pools[policy.Within(m.Label.Name)] = true
		}
	}
	if len(pools) == 0 {
		return found
	}
	add := func(h *loader.Hook) (added bool) {
		for _, entry := range h.Set.Rules() {
			if there[entry.ID] || !pools[entry.Within] {
				continue
			}
			found, there[entry.ID] = append(found, measure.Found{Entry: &entry, Hook: h}), true
			if entry.Pool {
				pools[policy.Within(entry.Label.Name)], added = true, true
			}
		}
		return added
	}
	for _, h := range hooks {
		for add(h) { // pools within pools, which come in any order
		}
	}
	return found
}

// withPools adds the pools that those which were found draw from.
func withPools(found []measure.Found, pools []*loader.Hook) []measure.Found {
	there := map[policy.Within]bool{}
	for _, m := range found {
		if m.Pool {
			there[policy.Within(m.Label.Name)] = true
		}
	}
	for i := 0; i < len(found); i++ { // found grows
		within := found[i].Within
		if within == "" || there[within] {
			continue
		}
		for _, h := range pools {
			if entry, ok := h.Set.Find(policy.PoolKey(string(within))); ok {
				found, there[within] = append(found, measure.Found{Entry: &entry, Hook: h}), true
			}
		}
	}
	return found
}

// best are the rules of hooks that pass the filter with the highest rank.
func (want filterRules) best(hooks []*loader.Hook) (found []measure.Found) {
	rank, best := want.ranks(), leastRank
	for _, h := range hooks {
		entries := want.entries(h.Set)
		for i := range entries {
			r := rank(entries[i].Label)
			if r > best {
				best, found = r, found[:0]
			}
			if r < best {
				continue
			}
			m := measure.Found{Entry: &entries[i], Hook: h}
			if want.address.IsValid() {
				decides := i == 0
				m.Decides = &decides
			}
			found = append(found, m)
		}
	}
	return found
}

// leastRank is that of a rule which passes a filter; one that passes it better hides the others.
const leastRank = 1

// ranks returns how well a rule passes the filter by its label: less than leastRank if it does not.
func (want filterRules) ranks() func(policy.Label) int {
	part, pattern := strings.ToLower(want.label), policyfile.IsPattern(want.label)
	contains := func(text string) bool { return strings.Contains(strings.ToLower(text), part) }
	rankOf := func(name string) int {
		switch {
		case name == "":
			return 0
		case name == want.label:
			return leastRank + 3
		case pattern && matchesName(want.label, name):
			return leastRank + 2
		case contains(name):
			return leastRank + 1
		}
		return 0
	}
	return func(l policy.Label) int {
		if want.plan != "" && l.Plan != want.plan {
			return 0
		}
		if want.label == "" {
			return leastRank
		}
		rank := max(rankOf(l.Name), rankOf(l.Plan))
		if rank == 0 && (contains(l.Note) || contains(l.Host.String())) {
			rank = leastRank
		}
		return rank
	}
}

// matchesName reports whether a name matches a pattern, whose * also matches a slash.
func matchesName(pattern, name string) bool {
	plain := func(text string) string { return strings.ReplaceAll(strings.ToLower(text), "/", "\x00") }
	return policyfile.Matches(plain(pattern), plain(name))
}

// entries are the rules of a set that pass a filter by their network.
func (want filterRules) entries(s *maps.Set) (entries []maps.Entry) {
	switch {
	case want.pool != "":
		if entry, ok := s.Find(policy.PoolKey(want.pool)); ok {
			return append(entries, entry)
		}
		return slices.DeleteFunc(s.Rules(), func(e maps.Entry) bool {
			return !policyfile.IsPattern(want.pool) || !matchesName(want.pool, e.Label.Name)
		})
	case want.networks != nil:
		for _, p := range want.networks {
			if entry, ok := s.Find(p); ok {
				entries = append(entries, entry)
			}
		}
		return entries
	case want.address.IsValid():
		return containing(s, netip.PrefixFrom(want.address, want.address.BitLen()))
	case want.wider:
		narrowest := containing(s, *want.network)
		return narrowest[:min(1, len(narrowest))]
	case want.network != nil:
		return slices.DeleteFunc(s.Rules(), func(e maps.Entry) bool {
			return e.Prefix.Bits() < want.network.Bits() || !e.Prefix.Overlaps(*want.network)
		})
	}
	return s.Rules()
}

// containing are the rules whose network contains all of p, the narrowest first.
func containing(s *maps.Set, p netip.Prefix) (entries []maps.Entry) {
	for bits := p.Bits(); bits >= 0; bits-- {
		if wider, err := p.Addr().Prefix(bits); err == nil {
			if entry, ok := s.Find(wider); ok {
				entries = append(entries, entry)
			}
		}
	}
	return entries
}

// resolve finds out whether the device of a filter is a pattern. A name wins over a
// pattern, and over one with escapes: that of a device which is there, or which had it and still has rules.
func (want *filterRules) resolve(n *loader.Namespace) error {
	if !strings.ContainsAny(want.device, `*?[\`) {
		return nil
	}
	if there, err := want.isDevice(n); there || err != nil {
		return err
	}
	if err := policyfile.CheckDevice(want.device); err != nil {
		return inputError(err)
	}
	if want.pattern = policyfile.IsPattern(want.device); !want.pattern {
		want.device = policyfile.Unescape(want.device)
	}
	return nil
}

// hooksToChange resolves a filter that must name devices, and finds their hooks. It returns the errors of hooks.
func (want *filterRules) hooksToChange(n *loader.Namespace) ([]*loader.Hook, error) {
	if want.device == "" {
		return nil, noDevice("") // and not all hooks
	}
	if err := want.resolve(n); err != nil {
		return nil, err
	}
	return want.hooks(n)
}

func (want filterRules) matchesHook(device string, d policy.Direction) bool {
	return (want.direction == nil || *want.direction == d) && want.matchesDevice(device)
}

func (want filterRules) matchesDevice(name string) bool {
	return want.device == "" || name == want.device || want.pattern && policyfile.Matches(want.device, name)
}

// searched are the hooks that pass the filter, after the pools if these may pass it, too.
func (want filterRules) searched(n *loader.Namespace) ([]*loader.Hook, error) {
	hooks, err := want.hooks(n)
	if !want.pools && want.device == "" && want.direction == nil && want.networks == nil && !want.address.IsValid() && want.network == nil {
		hooks = append(poolsOf(n), hooks...)
	}
	return hooks, err
}

// poolsOf is the hook of the pools, if there can be any.
func poolsOf(n *loader.Namespace) []*loader.Hook {
	if h := n.Pools(); h.Set != nil {
		return []*loader.Hook{h}
	}
	return nil
}

// hooks are those that pass the filter. With the error come those that could be read.
func (want filterRules) hooks(n *loader.Namespace) ([]*loader.Hook, error) {
	if err := n.Readable(); err != nil {
		return nil, err
	}
	if want.pools {
		return poolsOf(n), nil
	}
	if want.device == "" && want.direction == nil {
		return n.Hooks()
	}
	if want.device == "" || want.pattern {
		hooks, err := n.Hooks()
		hooks = slices.DeleteFunc(hooks, func(h *loader.Hook) bool {
			matches := want.matchesHook(h.Name(), h.Direction)
			if !matches {
				h.Close()
			}
			return !matches
		})
		return hooks, err
	}
	directions := []policy.Direction{policy.Egress, policy.Ingress}
	if want.direction != nil {
		directions = []policy.Direction{*want.direction}
	}
	var hooks []*loader.Hook
	var unread []error
	for _, d := range directions {
		h, err := n.Find(want.device, d)
		if err != nil {
			unread = append(unread, err)
		} else if h != nil {
			hooks = append(hooks, h)
		}
	}
	return hooks, errors.Join(unread...)
}
