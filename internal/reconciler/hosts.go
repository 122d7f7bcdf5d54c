package reconciler

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// followEvery is the least time between two changes of the addresses of hosts: there may be thousands a second.
	followEvery = time.Second
	// maxLines is the largest number of addresses of a host and a change that have a line each in the log.
	maxLines = 20
)

// followed is what is known of the hosts of the policy.
type followed struct {
	*netinfo.Neighbours
	devices map[int]bool // whose neighbours may differ from the rules, by index
	all     bool         // those of all devices may
	last    time.Time    // when rules were compared with neighbours
	limited map[side]bool
	pending bool // they wait for the end of a pending change, and OnWarning was called
}

// A side is one direction of a device. In limited are those that were seen with rules in force, so that another command
// has deleted these if there are none now.
type side struct {
	device    int
	direction policy.Direction
}

func newFollowed() followed {
	return followed{Neighbours: netinfo.NewNeighbours(), devices: map[int]bool{}, limited: map[side]bool{}}
}

// moved reports whether neighbours may differ from rules.
func (f *followed) moved() bool { return f.all || len(f.devices) > 0 }

// wait is how long followHosts cannot do more.
func (f *followed) wait() time.Duration {
	if left := followEvery - time.Since(f.last); left > 0 {
		return left
	}
	return retry // another command has the lock
}

// take learns which neighbours are other ones. Those of fresh devices are, and those of all devices if it is due.
func (f *followed) take(macs map[policy.MAC]bool, fresh []netinfo.Device, due bool) error {
	for _, dev := range fresh {
		for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
			delete(f.limited, side{dev.Index, d})
		}
	}
	if len(macs) == 0 {
		f.Close()
		f.devices, f.all = map[int]bool{}, false
		return nil
	}
	changed, all, err := f.Take(macs)
	if err != nil {
		return err
	}
	f.all = f.all || all || due
	for index := range changed {
		f.devices[index] = true
	}
	for _, dev := range fresh {
		f.devices[dev.Index] = true
	}
	return nil
}

// A move is the rules of addresses to add in a direction of a device, and those to delete.
type move struct {
	dev       netinfo.Device
	add, drop policy.Table
}

// followHosts adds rules for the addresses that hosts of the policy have now, and deletes those of the addresses that they
// had. While a change is pending or another command has the lock, it leaves that for later.
func (r *Reconciler) followHosts() error {
	if !r.hosts.moved() || r.missing || time.Since(r.hosts.last) < followEvery {
		return nil
	}
	n, err := r.write()
	if err != nil || n == nil {
		return err
	}
	defer n.Close()
	r.hosts.last = time.Now()
	moves, err := r.moves(n)
	if err != nil {
		r.OnWarning(fmt.Errorf("follow hosts: %w", err))
	}
	if p := n.Pending(); p != nil && len(moves) > 0 {
		if !r.hosts.pending {
			r.hosts.pending = true
			r.OnWarning(fmt.Errorf("cannot follow the addresses of hosts yet: %w", p))
		}
		return nil
	}
	r.hosts.devices, r.hosts.all, r.hosts.pending = map[int]bool{}, false, false
	allOrEach(moves, func(some ...move) error { return r.hosts.move(n, some, r.OnNotice, r.OnWarning) }, func(m move, err error) { r.warn(m.dev, err) })
	return nil
}

// moves compares the rules of hosts with the neighbours.
func (r *Reconciler) moves(n *loader.Namespace) (moves []move, err error) {
	devices, err := netinfo.Devices()
	if err != nil {
		return nil, err
	}
	hooks, err := n.Hooks()
	defer loader.CloseHooks(hooks)
	pools := n.Pools()
	defer pools.Close()
	at := map[side]*loader.Hook{}
	for _, h := range hooks {
		at[side{h.Device.Index, h.Direction}] = h
	}
	known := r.hosts.Of()
	exist := map[int]bool{}
	for _, dev := range devices {
		exist[dev.Index] = true
		if !r.hosts.all && !r.hosts.devices[dev.Index] {
			continue
		}
		hosts, _ := r.policy.HostsOf(policyfile.Device{Name: dev.Name, L2Bytes: dev.L2Bytes, Neighbours: known[dev.Index]}) // serve reports errors
		for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
			here := slices.DeleteFunc(slices.Clone(hosts), func(h policyfile.Host) bool { return h.Direction != d })
			if len(here) == 0 {
				continue
			}
			m := r.hosts.movesOn(dev, d, here, at[side{dev.Index, d}], pools, r.warnOnce)
			if len(m.add.Rules)+len(m.drop.Rules) > 0 {
				moves = append(moves, m)
			}
		}
	}
	maps.DeleteFunc(r.hosts.limited, func(s side, _ bool) bool { return !exist[s.device] })
	return moves, err
}

// movesOn compares the rules of a direction, whose hook is nil if it has none, with the neighbours.
func (f *followed) movesOn(dev netinfo.Device, d policy.Direction, hosts []policyfile.Host, h, pools *loader.Hook, warn func(error)) (m move) {
	m = move{dev: dev, add: policy.Table{Device: dev.Name, Direction: d, Match: d.FarSide()}}
	m.drop = m.add
	var rules []policy.Rule
	if h != nil {
		if h.State != loader.Attached || h.Match() != d.FarSide() {
			return m
		}
		rules = h.Set.Policy()
	}
	have := map[netip.Prefix]policy.MAC{} // the host of each rule, zero for none
	for _, rule := range rules {
		mac := rule.Label.Host
		if !slices.ContainsFunc(hosts, func(h policyfile.Host) bool { return h.MAC == mac && mayBeOf(h, rule) }) {
			mac = policy.MAC{}
		}
		have[rule.Prefix] = mac
	}
	key := side{dev.Index, d}
	flushed := f.limited[key] && len(rules) == 0
	f.limited[key] = len(rules) > 0 || flushed
	want := map[netip.Prefix]policy.MAC{}
	for _, host := range hosts {
		for _, rule := range host.Rules {
			want[rule.Prefix] = host.MAC
		}
	}
	count := map[policy.MAC]int{}
	for prefix, mac := range have {
		if want[prefix] == mac {
			count[mac]++
		}
	}
	moved := map[netip.Prefix]bool{} // to another host
	for _, host := range hosts {
		for _, rule := range host.Rules {
			mac, found := have[rule.Prefix]
			if found && (mac == host.MAC || mac == policy.MAC{}) {
				continue // a rule of the policy, or of a person, wins
			}
			if !inForceOf(pools, rule) || host.Pool == "" && flushed {
				break // another command deleted the pool, or all rules
			}
			if count[host.MAC]++; count[host.MAC] > policyfile.MaxAddresses {
				warn(fmt.Errorf("%s %v: %s has more than %d addresses, and only %d of a host are limited; does it make them up? To limit it all, limit the networks that it can use",
					dev.Name, d, called(&rule), policyfile.MaxAddresses, policyfile.MaxAddresses))
				break
			}
			m.add.Rules, moved[rule.Prefix] = append(m.add.Rules, rule), true
		}
	}
	for i := range rules {
		prefix := rules[i].Prefix
		if mac := have[prefix]; mac != (policy.MAC{}) && mac != want[prefix] && !moved[prefix] {
			m.drop.Rules = append(m.drop.Rules, rules[i])
		}
	}
	return m
}

// mayBeOf reports whether a rule with the note of a host is one of it. A person may have given the address a limit of its
// own, with which the note stays.
func mayBeOf(h policyfile.Host, r policy.Rule) bool {
	return h.Pool == "" && r.Rate == policy.Unlimited || h.Pool != "" && string(r.Within) == h.Pool
}

// inForceOf reports whether the pool of a rule is in force, if it is within one.
func inForceOf(pools *loader.Hook, r policy.Rule) bool {
	if r.Within == "" {
		return true
	}
	if pools.Set == nil {
		return false
	}
	_, found := pools.Set.Find(policy.PoolKey(string(r.Within)))
	return found
}

// called is how the host of a rule is called.
func called(rule *policy.Rule) string {
	return rule.Label.Host.Called(rule.Label.Name)
}

// move makes changes together.
func (f *followed) move(n *loader.Namespace, moves []move, say func(string), warn func(error)) error {
	var tables []policy.Table
	drop := map[side][]netip.Prefix{}
	for _, m := range moves {
		if len(m.add.Rules) > 0 {
			tables = append(tables, m.add)
		}
		for _, rule := range m.drop.Rules {
			key := side{m.dev.Index, m.drop.Direction}
			drop[key] = append(drop[key], rule.Prefix)
		}
	}
	if len(tables) > 0 {
		if _, err := n.Put(loader.ApplyOptions{}, tables...); err != nil {
			return err
		}
		for _, m := range moves {
			if len(m.add.Rules) > 0 {
				f.limited[side{m.dev.Index, m.add.Direction}] = true
			}
		}
	}
	if len(drop) > 0 {
		if err := f.drop(n, drop); err != nil {
			warn(fmt.Errorf("delete rules of addresses that hosts no longer have: %w", err))
			for i := range moves {
				moves[i].drop.Rules = nil // which of them are gone is not known
			}
		}
	}
	sayMoves(moves, say)
	return nil
}

// drop deletes rules. No other command is the reason if a direction has no rule left.
func (f *followed) drop(n *loader.Namespace, drop map[side][]netip.Prefix) error {
	hooks, err := n.Hooks() // others than before rules were added
	defer loader.CloseHooks(hooks)
	networks := func(h *loader.Hook) []netip.Prefix { return drop[side{h.Device.Index, h.Direction}] }
	var having []*loader.Hook
	for _, h := range hooks {
		if len(networks(h)) > 0 {
			having = append(having, h)
			if len(networks(h)) == len(h.Set.Policy()) {
				delete(f.limited, side{h.Device.Index, h.Direction})
			}
		}
	}
	if _, failed := n.Delete(loader.ApplyOptions{}, networks, having...); failed != nil {
		return failed
	}
	return err
}

// sayMoves says of each address that it was added or removed, unless there are too many.
func sayMoves(moves []move, say func(string)) {
	type key struct {
		device, did, who string
		address          netip.Addr // none for all
	}
	directions, number := map[key][]string{}, map[key]int{}
	var keys []key
	for _, m := range moves {
		for i, t := range []policy.Table{m.add, m.drop} {
			for _, rule := range t.Rules {
				all := key{device: t.Device, did: []string{"added", "removed"}[i], who: called(&rule)}
				k := all
				if k.address = rule.Prefix.Addr(); directions[k] == nil {
					keys = append(keys, k)
					number[all]++
				}
				directions[k] = append(directions[k], t.Direction.String())
			}
		}
	}
	for _, k := range keys {
		all := key{device: k.device, did: k.did, who: k.who}
		switch n := number[all]; {
		case n > maxLines:
			say(fmt.Sprintf("%s: %s %d addresses of %s", k.device, k.did, n, k.who))
			number[all] = 0
		case n > 0:
			say(fmt.Sprintf("%s: %s %v of %s, %s", k.device, k.did, k.address, k.who, strings.Join(directions[k], " and ")))
		}
	}
}
