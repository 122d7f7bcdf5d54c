package main

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A target is what the arguments of a command mean: rules, pools or devices.
type target struct {
	command   string            // for errors
	name      string            // of a device; without networks, it may be any name; "" for all
	kind      string            // the name is only of this; "" for anything
	pattern   bool              // the name is a pattern of devices: resolve decides
	direction *policy.Direction // nil for both
	networks  networks          // exactly these; nil for all
	lost      bool              // there are limits whose pins are not here; found by rules

	// What show searches for; each only if set.
	address netip.Addr    // rules whose network contains it, the one that decides first
	network *netip.Prefix // rules for it or for networks in it; if there are none, the one that contains it
	wider   bool          // only that one
	label   string        // a rule's name or plan: exactly, else by a pattern, else a part of it; else a part of the note
	plan    string        // exactly

	// What a command that changes something has, too.
	isNew bool     // the name is that of a new pool
	rest  []string // the arguments behind it, for commands that an error suggests
	flags string   // those that were given, each after a space, for commands that an error suggests
}

// networks are the networks that one argument names.
type networks []netip.Prefix

func (n networks) String() string {
	if len(n) > 1 {
		return policy.Any
	}
	return policy.CIDR(n[0])
}

func (want target) String() string { return strings.Join(want.words(), " ") }

// words are the device or name, and the direction.
func (want target) words() []string {
	if want.direction == nil {
		return []string{want.name}
	}
	return []string{want.name, want.direction.String()}
}

// parseTarget reads [DEV [ingress|egress [CIDR]]] of a command, or NAME [ingress|egress] of this kind; "" for any.
func parseTarget(cmd, kind string, given []string) (want target, err error) {
	want.command, want.kind = cmd, kind
	if len(given) > 2 && kind != "" && kind != kindRule {
		return want, inputf("%s: a %s has only a name; leave the network out", cmd, kind)
	}
	if len(given) > 0 {
		want.name = given[0]
	}
	if len(given) > 1 {
		d, err := policy.ParseDirection(given[1])
		if err != nil {
			return want, inputf("%s: %w", cmd, directionError(given, err))
		}
		want.direction = &d
		if kind == kindPool {
			return want, inputf("%s: a pool has no direction; leave %v out", cmd, d)
		}
	}
	if len(given) > 2 {
		if want.networks, err = policy.ParseNetworks(given[2]); err != nil {
			if !strings.ContainsAny(given[2], ".:/") {
				err = fmt.Errorf("%w; if that is a name, leave the device out: %s %s", err, plain.Word(given[2]), given[1])
			}
			return want, inputf("%s: %w", cmd, err)
		}
	}
	return want, nil
}

// noRules is what none says of a filter that lets all rules through.
const noRules = "no rules"

// none says that no rule passes the filter.
func (want target) none() string {
	what := "rules"
	switch {
	case want.kind == kindPool && policyfile.IsPattern(want.name):
		return "there is no pool that matches " + plain.Line(want.name)
	case want.kind == kindPool && want.name != "":
		return "there is no pool " + plain.Line(want.name)
	case want.kind == kindPool:
		return "no pools"
	case want.networks != nil:
		what = "rule for " + want.networks.String()
	case want.address.IsValid():
		what = "rule for " + want.address.String()
	case want.network != nil:
		what = "rule for " + want.network.String()
	}
	if want.plan != "" {
		what += " with plan " + plain.Line(want.plan)
	}
	if want.direction != nil {
		what = want.direction.String() + " " + what
	}
	switch {
	case want.pattern:
		what += " on a device that matches " + plain.Line(want.name)
	case want.name != "":
		what += " on " + plain.Line(want.name)
	}
	return "no " + what
}

// isSome reports whether arguments choose some of all rules.
func (want target) isSome() bool { return want.name != "" || want.plan != "" }

// isSingle reports whether a filter is for one rule or pool rather than for many.
func (want target) isSingle() bool {
	return !want.pattern && (want.networks != nil || want.label != "" || want.address.IsValid() ||
		want.kind == kindPool && want.name != "" && !policyfile.IsPattern(want.name))
}

// search finds out what the first argument of show means: a device, the name of rules or a pool, a direction, an
// address, a network, a pattern of devices, or a part of a name, plan or note.
func (want *target) search(n *loader.Namespace, all *live.Reading) error {
	if there, err := want.isThere(n); there || err != nil {
		return err
	}
	named := *want
	named.name, named.label = "", want.name
	if err := want.searchFor(n); want.label == "" && named.isName(all) {
		*want = named // as set and delete understand it
	} else if err != nil {
		return err
	}
	return nil
}

// isName reports whether rules or a pool have exactly the name that the filter is for.
func (want target) isName(all *live.Reading) bool {
	return slices.ContainsFunc(all.Items, func(it live.Item) bool { return it.Label.Name == want.label && want.passes(&it) })
}

// searchFor is search for what is no device.
func (want *target) searchFor(n *loader.Namespace) error {
	what := want.name
	want.name = ""
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
	if mark, _ := policy.ParsePrefix(what); policy.IsMark(mark) {
		want.networks = networks{mark}
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
			want.name = policyfile.Unescape(what)
			return nil
		}
		of := target{name: what, pattern: true}
		if there, err := of.isThere(n); there || err != nil {
			want.name, want.pattern = what, there
			return err
		}
	}
	want.label = what
	return nil
}

// isThere reports whether the device is there, or had rules; of a pattern, whether any that matches is. It takes the device's
// own name, as it may have been given by another one.
func (want *target) isThere(n *loader.Namespace) (bool, error) {
	if !want.pattern {
		dev, err := netinfo.DeviceByName(want.name)
		if err == nil {
			want.name = dev.Name
		}
		if !errors.Is(err, netinfo.ErrNoDevice) {
			return err == nil, err
		}
	} else if devices, err := netinfo.Devices(); err != nil || slices.ContainsFunc(devices, func(d netinfo.Device) bool { return want.matchesDevice(d.Name) }) {
		return err == nil, err
	}
	hooks, err := target{name: want.name, pattern: want.pattern}.hooks(n)
	loader.CloseHooks(hooks)
	// If they cannot be read, the caller asks for them again and gets the error.
	unread := err != nil && n.Readable() == nil
	return len(hooks) > 0 || unread || slices.ContainsFunc(n.Collected, want.matchesDevice), nil
}

// checkThere reports as an error that a filter that no rule passes names what does not exist.
func (e *env) checkThere(all *live.Reading, want target) error {
	name, lists := plain.Line(want.label), e.suggest("show")+" lists all rules"
	var names []string
	for i := range all.Items {
		if it := &all.Items[i]; it.IsPool() || want.kind != kindPool {
			names = append(names, it.Label.Name)
		}
	}
	switch {
	case want.kind == kindPool && want.name != "":
		if err := policyfile.CheckPattern(want.name); err != nil {
			return inputError(err)
		}
		return inputf("%s; %s", want.none(), didYouMean(want.name, names, e.suggest("show --pools")+" lists the pools"))
	case strings.ContainsAny(want.label, `*?[\`):
		if err := policyfile.CheckPattern(want.label); err != nil {
			return inputError(err)
		}
		return missingf("there is no device that matches %s, and no rule, plan or pool has such a name; %s", name, lists)
	case want.label != "":
		return missingf("there is no device %s, and no rule, plan or pool has that name; %s", name, didYouMean(want.label, withDevices(names), lists))
	case want.name == "" && want.plan != "":
		return inputf("%s; %s", want.none(), lists)
	case want.name == "" || want.pattern:
		return nil
	}
	if _, err := device(want.name); err != nil || want.networks == nil {
		return err
	}
	return inputf("%s; %s lists its rules", want.none(), e.suggest("show", want.name))
}

// matches are the rules and pools that pass the filter.
func (want target) matches(all *live.Reading) []*live.Item {
	found := want.best(all)
	if want.network != nil && len(found) == 0 {
		want.wider = true
		found = want.best(all)
	}
	if want.label == "" {
		return found
	}
	there := map[*live.Item]bool{} // and all that is within the pools that were found
	for _, it := range found {
		there[it] = true
	}
	for i := range all.Items {
		for above := &all.Items[i]; above != nil; above = above.Parent() {
			if there[above] && !there[&all.Items[i]] {
				found, there[&all.Items[i]] = append(found, &all.Items[i]), true
			}
		}
	}
	return found
}

// withPools adds the pools that those which were found draw from.
func withPools(found []*live.Item) []*live.Item {
	there := map[*live.Item]bool{}
	for _, it := range found {
		there[it] = true
	}
	for _, it := range slices.Clone(found) {
		for above := it.Parent(); above != nil && !there[above]; above = above.Parent() {
			found, there[above] = append(found, above), true
		}
	}
	return found
}

// best are the rules and pools that pass the filter with the highest rank; for an address, at each place the one that
// decides first.
func (want target) best(all *live.Reading) (found []*live.Item) {
	rank, best := want.ranks(), leastRank
	for i := range all.Items {
		it := &all.Items[i]
		if !want.passes(it) {
			continue
		}
		r := rank(it.Label)
		if r > best {
			best, found = r, found[:0]
		}
		if r == best {
			found = append(found, it)
		}
	}
	if want.address.IsValid() || want.wider {
		slices.SortStableFunc(found, func(a, b *live.Item) int { // they are in the order of places
			return cmp.Or(strings.Compare(a.Device, b.Device), cmp.Compare(a.Direction, b.Direction), cmp.Compare(b.Prefix.Bits(), a.Prefix.Bits()))
		})
	}
	if want.wider {
		found = slices.CompactFunc(found, func(a, b *live.Item) bool { return a.Place == b.Place })
	}
	return found
}

// passes reports whether a rule or pool passes the filter, but for its label.
func (want target) passes(it *live.Item) bool {
	switch {
	case want.kind == kindPool && want.name != "":
		return it.IsPool() && (it.Key.Pool == want.name || policyfile.IsPattern(want.name) && matchesName(want.name, it.Key.Pool))
	case want.kind == kindPool:
		return it.IsPool()
	case it.IsPool():
		return want.name == "" && want.direction == nil && want.networks == nil && !want.address.IsValid() && want.network == nil
	case !want.matchesHook(it.Device, it.Place.Direction):
		return false
	case want.networks != nil:
		return slices.Contains(want.networks, it.Prefix)
	case want.address.IsValid():
		return it.Prefix.Contains(want.address)
	case want.wider:
		return it.Prefix.Bits() <= want.network.Bits() && it.Prefix.Overlaps(*want.network)
	case want.network != nil:
		return !policy.IsMark(it.Prefix) && it.Prefix.Bits() >= want.network.Bits() && it.Prefix.Overlaps(*want.network)
	}
	return true
}

// leastRank is that of a rule which passes a filter; one that passes it better hides the others.
const leastRank = 1

// ranks returns how well a rule passes the filter by its label: less than leastRank if it does not.
func (want target) ranks() func(policy.Label) int {
	part, pattern := strings.ToLower(want.label), policyfile.IsPattern(want.label)
	contains := func(text string) bool { return hasPart(strings.ToLower(text), part) }
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

// hasPart reports whether a text has a part that neither begins nor ends inside a number: vm3 is not in vm30, nor 7 in vm17.
func hasPart(text, part string) bool {
	isDigit := func(s string, i int) bool { return i >= 0 && i < len(s) && s[i] >= '0' && s[i] <= '9' }
	for from := 0; ; from++ {
		at := strings.Index(text[from:], part)
		if at < 0 {
			return false
		}
		from += at
		if !(isDigit(part, len(part)-1) && isDigit(text, from+len(part)) || isDigit(part, 0) && isDigit(text, from-1)) {
			return true
		}
	}
}

// matchesName reports whether a name matches a pattern, whose * also matches a slash.
func matchesName(pattern, name string) bool {
	plain := func(text string) string { return strings.ReplaceAll(strings.ToLower(text), "/", "\x00") }
	return policyfile.Matches(plain(pattern), plain(name))
}

// rules are those of hooks that pass a filter of networks.
func (want target) rules(hooks []*loader.Hook) (found []namedHook) {
	for _, h := range hooks {
		if h.Set == nil { // there can be no pools
			continue
		}
		if entries := want.entries(h.Set); entries != nil {
			found = append(found, namedHook{h, entries})
		}
	}
	return found
}

// entries are the rules of a set that pass a filter of networks.
func (want target) entries(s *maps.Set) (entries []maps.Entry) {
	if want.networks == nil {
		return s.Rules()
	}
	for _, p := range want.networks {
		if entry, ok := s.Find(p); ok {
			entries = append(entries, entry)
		}
	}
	return entries
}

// resolve finds out whether the device of a filter is a pattern. A name wins over a
// pattern, and over one with escapes: that of a device which is there, or which had it and still has rules.
func (want *target) resolve(n *loader.Namespace) error {
	if there, err := want.isThere(n); there || err != nil || !strings.ContainsAny(want.name, `*?[\`) {
		return err
	}
	if err := policyfile.CheckDevice(want.name); err != nil {
		return inputError(err)
	}
	if want.pattern = policyfile.IsPattern(want.name); !want.pattern {
		want.name = policyfile.Unescape(want.name)
	}
	return nil
}

// hooksToChange resolves a filter that must name devices, and finds their hooks. It returns the errors of hooks.
func (want *target) hooksToChange(n *loader.Namespace) ([]*loader.Hook, error) {
	if want.name == "" {
		return nil, noDevice("") // and not all hooks
	}
	if err := want.resolve(n); err != nil {
		return nil, err
	}
	return want.hooks(n)
}

// directions are those that pass the filter.
func (want target) directions() []policy.Direction {
	if want.direction != nil {
		return []policy.Direction{*want.direction}
	}
	return []policy.Direction{policy.Egress, policy.Ingress}
}

func (want target) matchesHook(device string, d policy.Direction) bool {
	return (want.direction == nil || *want.direction == d) && want.matchesDevice(device)
}

func (want target) matchesDevice(name string) bool {
	return want.name == "" || name == want.name || want.pattern && policyfile.Matches(want.name, name)
}

// poolsOf is the hook of the pools, if there can be any.
func poolsOf(n *loader.Namespace) []*loader.Hook {
	if h := n.Pools(); h.Set != nil {
		return []*loader.Hook{h}
	}
	return nil
}

// hooks are those that pass the filter. With the error come those that could be read.
func (want target) hooks(n *loader.Namespace) ([]*loader.Hook, error) {
	if err := n.Readable(); err != nil {
		return nil, err
	}
	if want.kind == kindPool {
		return poolsOf(n), nil
	}
	if want.name == "" || want.pattern {
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
	var hooks []*loader.Hook
	var unread []error
	for _, d := range want.directions() {
		h, err := n.Find(want.name, d)
		if err != nil {
			unread = append(unread, err)
		} else if h != nil {
			hooks = append(hooks, h)
		}
	}
	return hooks, errors.Join(unread...)
}
