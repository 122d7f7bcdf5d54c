package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/doctor"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

func setCommand(e *env) *cobra.Command {
	var limit limitFlags
	var kind string
	var isNew bool
	cmd := &cobra.Command{
		Use:   "set DEV ingress|egress CIDR|any | NAME [ingress|egress] [flags]",
		Short: "Set a rule or pool, or change it",
		Long: `Set a rule, or change what the flags say of it. A new rule needs --rate or --within, and has defaults for the rest. At a
new rate, a burst or queue lasts as long as before; one below the default stays below it. With colours, burst sizes other
than the default stay. A rule whose limit changes follows its plan no longer.

any sets two rules, 0.0.0.0/0 and ::/0. Each has its own bucket and gets the whole rate. CIDR may also be mark:0x10, for
packets with a mark of nftables, or vlan:12. These rules are for both families, and decide before those for addresses.

DEV and NAME may also be unit:backup.service, container:web or cgroup:/PATH. The first rules of one need no direction.

NAME is the exact name of something that is there. All of it changes at one moment:

  rules      all with this name, on all devices
  a pool     It has no direction: with one, NAME is that of rules or a device.
  a device   its rules for any: what a pattern gave it

If NAME may mean several of these, set changes nothing, and lists a command for each. --kind says which is meant; with it,
set makes no new rule.

Rules without a rate have that of their pools. If nothing else is within these pools, --rate and what goes with a rate,
--guarantee and --weight change the pools, and other flags the rules. --within moves pools of devices and pods. Rules or
pools with different rates, such as for down and up, do not get one rate by NAME: give a direction, too. The error lists
their rates.

With --new, NAME is a new pool: a rate that rules share, on any device and in both directions. A packet passes if its rule
and all pools above have room. It is then charged to all of them; if one refuses it, to none. If the pool exists already
with what the flags say, that is a success; if it differs, nothing is changed.

With --within, a rule or pool draws from a pool. A rule within a pool needs no rate of its own. It leaves its pool with
--within none.

With --confirm, the change reverts after that time unless you run 'shapectl confirm' before, as with
'shapectl apply'.`,
		Example: `  shapectl set eth0 egress 10.0.0.0/24 --rate 10mbit --each host
  shapectl set eth0 ingress any --rate 1gbit
  shapectl set alice egress --rate 50mbit
  shapectl set vm102 --rate 400mbit --confirm 60s
  shapectl set unit:backup.service --rate 20mbit
  shapectl set uplink --new --rate 1gbit --share member
  shapectl set eth0 egress 10.0.0.7 --rate 200mbit --within uplink --guarantee 20mbit`,
		Args: func(cmd *cobra.Command, given []string) error {
			if len(given) == 4 {
				if _, err := policy.ParseRate(given[3]); err == nil {
					return inputf("set: write the rate as a flag: --rate %s", given[3])
				}
			}
			return args(1, 3)(cmd, given)
		},
		ValidArgsFunction: e.completeNamed(false, func() bool { return isNew || kind == kindPool }),
		RunE: func(cmd *cobra.Command, given []string) error {
			limit.mark(cmd.Flags())
			e.noteRates(cmd)
			switch {
			case isNew && len(given) > 2:
				return inputf("set: --new makes a pool, and takes only its name; a new rule needs no flag")
			case isNew && kind != "" && kind != kindPool:
				return inputf("set: --new makes a pool; leave --kind %s out", kind)
			case isNew && !limit.any():
				return inputf("set: the rate of the new pool is missing; give one, such as --rate 10mbit")
			case !limit.any() && !e.setupFQ:
				return inputf("set: what to change is missing; give a flag, such as --rate 10mbit")
			case isNew:
				kind = kindPool
			}
			of, err := parseTarget("set", kind, given)
			of.isNew = isNew
			switch {
			case err != nil:
				return err
			case of.networks == nil:
				return e.setNamed(of, limit)
			}
			return e.set(of, limit)
		},
	}
	limit.add(cmd.Flags(), "dst on egress, src on ingress", func(*policy.Option) bool { return true })
	cmd.Flags().BoolVar(&isNew, "new", false, "make a pool")
	groupFlags(cmd.Flags(), poolFlagsTitle, "new")
	e.addConfirm(cmd.Flags())
	e.addSetupFQ(cmd.Flags())
	groupFlags(cmd.Flags(), queueFlagsTitle, "setup-fq")
	addKind(cmd.Flags(), &kind)
	e.completesValue(cmd, "within", e.pools)
	return cmd
}

// set sets rules by their networks: with a kind, only those that are there.
func (e *env) set(which target, limit limitFlags) error {
	doing := fmt.Sprintf("set %s on %s %s", which.networks, plain.Line(which.name), which.direction)
	return e.with(loader.Write, doing, func(n *loader.Namespace) error {
		dev, err := device(which.name)
		if err != nil {
			return err
		}
		if err := e.checkWithin(n, limit); err != nil {
			return err
		}
		h, err := n.Find(dev.Name, *which.direction)
		if err != nil {
			return err
		}
		if h != nil {
			defer h.Close()
		}
		t, err := limit.table(dev, *which.direction, h, which.networks, which.kind != "")
		if err != nil {
			return inputError(err)
		}
		if t.Rules == nil {
			return missingf("%s; nothing was changed", which.none())
		}
		if err := e.put(n, limit, t); err != nil {
			return err
		}
		return errors.Join(e.unmet(dev, t), e.bypassed(n, dev, t.Direction))
	})
}

// bypassed says which packets bypass the rules of a direction of a device.
func (e *env) bypassed(n *loader.Namespace, dev netinfo.Device, d policy.Direction) error {
	h, err := n.Find(dev.Name, d)
	if h == nil || err != nil || dev.IsCgroup() {
		return err
	}
	defer h.Close()
	found, err := doctor.Families(e.netns, dev, d, h.Set.Policy())
	for _, f := range found {
		e.sayFinding(f)
	}
	return err
}

// unmet says which rules no packet on a device will match.
func (e *env) unmet(dev netinfo.Device, t policy.Table) error {
	behind, err := dev.BehindLine()
	for _, r := range t.Rules {
		if network := policy.CIDR(r.Prefix); t.Direction == policy.Ingress && !dev.IsCgroup() && strings.HasPrefix(network, "mark:") {
			e.say("%s ingress: nftables marks packets after this rule sees them; set the rule for %s where they leave", plain.Line(dev.Name), network)
		}
		inside := behind.Hides(r.Prefix)
		if inside != "" {
			e.say("%s %s: no packet here has an address of %s, which is behind NAT; set this rule on %s", plain.Line(dev.Name), t.Direction, policy.CIDR(r.Prefix), plain.Line(inside))
		}
		switch where := plain.Line(dev.Name) + " " + t.Direction.String(); {
		case r.NAT && behind.NAT == nil:
			e.say("%s: no host is known to be behind NAT here; unless one is, leave --nat out, or give it on the device of the line", where)
		case r.NAT && inside != "":
			e.say("%s: a rule with --nat is for the addresses of other hosts, such as 0.0.0.0/0", where)
		}
	}
	return err
}

// put sets the rules of tables beside the others of their devices, and describes them.
func (e *env) put(n *loader.Namespace, limit limitFlags, tables ...policy.Table) error {
	met := passed(tables)
	done, err := n.Put(e.asked(), tables...)
	if err != nil {
		return err
	}
	for i, now := range passed(tables) {
		for _, id := range met[i] {
			if !slices.Contains(now, id) {
				e.say("shapectl: warning: packets of %s no longer pass program %d (%s), as it was attached to a cgroup above without BPF_F_ALLOW_MULTI",
					plain.Line(tables[i].Device), id, plain.Line(netinfo.ProgramName(id)))
			}
		}
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
	set, err := e.described(n, tables)
	if err != nil {
		return err
	}
	above := limitedAbove(n, limit, tables) + twice(tables) + nested(n, tables)
	if limit.left != nil {
		above += "no longer follows the plan " + plain.List(plain.Lines(limit.left)) + "\n"
	}
	err = e.print(set, func(w io.Writer) error {
		err := e.sentences(set)(w)
		if _, rules := set.Split(); len(rules) > mostUncounted {
			fmt.Fprintln(w, plain.Count(len(rules), "rule"))
		}
		fmt.Fprint(w, above)
		return err
	})
	for _, d := range done {
		if lacks := e.queued(n, d.Device, d.Hook); err == nil {
			err = lacks
		}
	}
	return err
}

// described are the rules and pools of tables as they are in force.
func (e *env) described(n *loader.Namespace, tables []policy.Table) (set report.Rules, err error) {
	for _, t := range tables {
		h := n.Pools()
		if !t.IsPools() {
			if h, err = n.Find(t.Device, t.Direction); h == nil || err != nil {
				return set, err
			}
		}
		for _, r := range t.Rules {
			if entry, ok := h.Set.Find(r.Prefix); ok {
				r := report.Describe(h, entry)
				r.Confirm, r.MadeBy = e.suggest("confirm"), report.MadeBy(n.Pending())
				set = append(set, r)
			}
		}
		h.Close()
	}
	return set, nil
}

// twice says that IPv4 and IPv6 have a rate each, where one command gives it to both.
func twice(tables []policy.Table) string {
	isAny := func(r policy.Rule) bool {
		return r.Prefix.Bits() == 0 && r.Rate != policy.Unlimited && r.Each.Kind == policy.EachAll && r.Within == ""
	}
	for _, t := range tables {
		if !t.IsPools() && len(t.Rules) == len(policy.Everything) && isAny(t.Rules[0]) && isAny(t.Rules[1]) {
			return "IPv4 and IPv6 have this rate each; a pool gives both together one rate\n"
		}
	}
	return ""
}

// passed are the programs that packets of each table pass, if it is of a cgroup.
func passed(tables []policy.Table) (programs [][]ebpf.ProgramID) {
	for _, t := range tables {
		var ids []ebpf.ProgramID
		if policy.IsCgroup(t.Device) {
			ids, _ = netinfo.CgroupPrograms(t.Device, t.Direction) // none if it has just gone
			ids = slices.DeleteFunc(ids, func(id ebpf.ProgramID) bool { return strings.HasPrefix(netinfo.ProgramName(id), "shapectl") })
		}
		programs = append(programs, ids)
	}
	return programs
}

// nested says which cgroups above or below have rules, too, a line for each.
func nested(n *loader.Namespace, tables []policy.Table) (says string) {
	if !slices.ContainsFunc(tables, func(t policy.Table) bool { return policy.IsCgroup(t.Device) }) {
		return ""
	}
	hooks, _ := n.Hooks()
	defer loader.CloseHooks(hooks)
	var names []string
	for _, t := range tables {
		names = append(names, t.Device)
	}
	for _, h := range hooks {
		names = append(names, h.Name())
	}
	names = slices.DeleteFunc(names, func(name string) bool { return !policy.IsCgroup(name) })
	dirs, tree := netinfo.CgroupDirs(names), poolTree(n)
	for _, t := range tables {
		for _, h := range hooks {
			lower, upper := t.Device, h.Name()
			for range 2 {
				if above := dirs[upper]; h.Direction == t.Direction && above != "" && strings.HasPrefix(dirs[lower], above+"/") {
					line := fmt.Sprintf("%s also counts the packets that %s drops; for an exact total, delete its rules, and give the units below one pool\n", plain.Line(upper), plain.Line(lower))
					if pool := commonPool(tree, t.Rules, h.Rules()); pool != "" {
						line = fmt.Sprintf("packets of %s draw from pool %s twice, as %s is within it, too; keep in it the rules of one of the two\n", plain.Line(lower), plain.Line(pool), plain.Line(upper))
					}
					if !strings.Contains(says, line) {
						says += line
					}
				}
				lower, upper = upper, lower
			}
		}
	}
	return says
}

// commonPool is the highest pool that a packet draws from by rules of both; "" for none.
func commonPool(tree *policy.Tree, a, b []policy.Rule) string {
	highest := func(r policy.Rule) (name string) {
		for n := tree.Find(string(r.Within)); n != nil; n = n.Above {
			name = n.Pool.Label.Name
		}
		return name
	}
	for _, r := range a {
		pool := highest(r)
		if pool != "" && slices.ContainsFunc(b, func(other policy.Rule) bool { return pool == highest(other) && r.Prefix.Overlaps(other.Prefix) }) {
			return pool
		}
	}
	return ""
}

// mostUncounted is how many rules somebody counts at a glance.
const mostUncounted = 10

// limitedAbove says which pools let less through than the rate that rules in them have got, a line for each.
func limitedAbove(n *loader.Namespace, limit limitFlags, tables []policy.Table) (says string) {
	if !limit.Gives("rate") || limit.Rate == policy.Unlimited {
		return ""
	}
	var pools []string
	for _, t := range tables {
		for _, r := range t.Rules {
			name := string(r.Within)
			if slices.Contains(pools, name) {
				continue
			}
			if pool, _ := findPool(n, name); pool.Pool && pool.Rate < r.Rate {
				pools = append(pools, name)
				says += fmt.Sprintf("pool %s still limits this to %v\n", plain.Line(name), pool.Rate)
			}
		}
	}
	return says
}
