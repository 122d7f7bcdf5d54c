package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/inforce"
	"github.com/shapectl/shapectl/internal/input"
	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// leastConfirm leaves a person time to type; maxConfirm is longer than anybody should wait.
	leastConfirm = time.Second
	maxConfirm   = 24 * time.Hour
)

type applyOptions struct {
	file       string
	lastGood   string
	absentOK   bool
	allowEmpty bool
	verbose    bool
	maxRemove  string // "" for any number
}

func applyCommand(e *env) *cobra.Command {
	var o applyOptions
	cmd := &cobra.Command{
		Use:   "apply FILE|- [flags]",
		Short: "Apply a policy file",
		Long: `Apply a policy file: set its rules and pools, and delete all others. The limits of pods, by shapectl-cni and
shapectl-kubernetes, stay, unless the policy has rules on their devices.

The file is checked first. Then all devices and pools switch at one moment: a packet meets the old rules or the new
ones. Rules and pools that stay keep their counters, and their buckets keep their room.

With --confirm, the change reverts after that time unless you run 'shapectl confirm' before. The programs in the
kernel revert it, even if no shapectl process is left.

Devices that do not exist are left out, and so are patterns that match no device. The exit code is then 4, or 0
with --absent-ok. 'shapectl serve' sets their rules when they appear.

If a pool has no room for the guarantees of all devices that match patterns, the last of them get their rules without
guarantees, and the exit code is 4. These get what the other guarantees leave, at worst nothing. A device that has its
guarantees keeps them, unless the policy gives new ones to pools or devices that it names: these come first. 'shapectl serve'
gives the others theirs when there is room.

With --max-remove, apply refuses a policy that would remove more rules and pools than that, as half of a file would, or make
them unlimited. Such a policy changes nothing.

If a policy would delete all rules because none of its devices exists, or has rules in it, apply refuses it without
--allow-empty. The policy 'devices: {}' deletes all rules.

With --last-good, apply keeps a copy of each policy that it applied. If FILE is not valid, it applies that copy
instead, with exit code 4. If there is no FILE, apply fails and changes nothing.`,
		Example: `  shapectl apply policy.yaml
  shapectl apply policy.yaml --confirm 60s
  shapectl export | sed s/10mbit/20mbit/ | shapectl apply -`,
		Args:              args(1, 1),
		ValidArgsFunction: completePolicy,
		RunE: func(cmd *cobra.Command, given []string) error {
			o.file = given[0]
			switch set := cmd.Flags().Changed; {
			case set("confirm") && set("last-good"):
				return inputf("apply: a policy that is not confirmed is not known to be good; leave --confirm or --last-good out")
			case set("last-good") && o.file == "-":
				return inputf("apply: --last-good keeps a copy of FILE; name it")
			}
			if o.lastGood != "" {
				if err := lastgood.Check(o.lastGood); err != nil {
					return inputf("apply: --last-good: %w", err)
				}
			}
			return e.apply(o)
		},
	}
	e.addConfirm(cmd.Flags())
	cmd.Flags().StringVar(&o.lastGood, "last-good", "", "keep a copy in this `file`; use it if FILE is not valid")
	e.addSetupFQ(cmd.Flags())
	cmd.Flags().BoolVar(&o.absentOK, "absent-ok", false, "exit code 0 even if devices do not exist")
	cmd.Flags().BoolVar(&o.allowEmpty, "allow-empty", false, "remove all rules if no device of FILE exists or has rules")
	cmd.Flags().Var(flagValue{"N|N%", "", func(s string) error {
		o.maxRemove = s
		_, err := atMost(s, 0)
		return err
	}}, "max-remove", "refuse to lift more limits than this, or than this part of all rules and pools")
	cmd.Flags().BoolVarP(&o.verbose, "verbose", "v", false, "list the devices that changed")
	return cmd
}

// addConfirm adds --confirm.
func (e *env) addConfirm(f *pflag.FlagSet) {
	confirm := duration(&e.confirm)
	parse := confirm.set
	confirm.set = func(s string) error {
		err := parse(s)
		if err == nil && (e.confirm < leastConfirm || e.confirm > maxConfirm) {
			err = fmt.Errorf("confirm %v is out of range; use %v to %v", e.confirm, leastConfirm, maxConfirm)
		}
		return err
	}
	f.Var(confirm, "confirm", "revert after this `time` (60s, 5m) unless confirmed")
}

// how are the flags that were given and that say how to make a change, each after a space.
func (e *env) how() (flags string) {
	if e.confirm > 0 {
		flags += " --confirm " + e.confirm.String()
	}
	if e.setupFQ {
		flags += " --setup-fq"
	}
	return flags
}

// asked are the options of a change, as the flags say.
func (e *env) asked() loader.ApplyOptions {
	return loader.ApplyOptions{Confirm: e.confirm, Author: e.author()}
}

// author is the user of this process, or of sudo, and the command.
func (e *env) author() string {
	name := e.getenv("SUDO_USER")
	if name == "" {
		name = "the user " + strconv.Itoa(os.Getuid())
		if u, err := user.Current(); err == nil {
			name = u.Username
		}
	}
	return name + "\x00" + e.typed
}

// pending is when the change that was made now reverts; 0 for never.
func (e *env) pending(n *loader.Namespace, doing string, done []loader.Applied) (until uint64, err error) {
	if p := n.Pending(); p != nil {
		return p.Until, nil
	}
	if e.confirm > 0 && slices.ContainsFunc(done, func(d loader.Applied) bool { return d.Rules != maps.Difference{} }) {
		err = e.degraded("%s: the change was reverted: it took longer than the %v of --confirm", doing, e.confirm)
	}
	return 0, err
}

// readPolicy reads a policy file, or for "-" standard input, with those that it includes. If the policy is not valid, it still
// returns the text.
func (e *env) readPolicy(name string) (f *policyfile.File, text []byte, err error) {
	read := input.File
	if e.contents != nil {
		read = e.readAll
	}
	if text, err = e.readAll(name); err == nil {
		text, err = policyfile.Include(inputName(name), text, read)
	}
	if err != nil {
		return nil, nil, inputError(err)
	}
	if f, err = policyfile.Parse(inputName(name), text); err != nil {
		return nil, text, inputError(err)
	}
	return f, text, nil
}

func (e *env) readAll(name string) ([]byte, error) {
	if text, given := e.contents[name]; given {
		return text, nil
	} else if e.contents != nil {
		return nil, fmt.Errorf("the request has no %s", plain.Line(name))
	}
	file, err := e.open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no file %s", name)
	} else if err != nil {
		return nil, err
	}
	defer file.Close()
	if f, ok := file.(*os.File); ok {
		err = input.Trusted(f)
	}
	var text []byte
	if err == nil {
		text, err = input.All(file)
	}
	if err != nil && !errors.As(err, new(*fs.PathError)) { // which names it
		err = fmt.Errorf("read %s: %w", inputName(name), err)
	}
	return text, err
}

// A goal is what a policy wants of the devices that exist.
type goal struct {
	tables            []policy.Table
	absent, unmatched []string // devices, and patterns that match no device
}

func goalOf(n *loader.Namespace, f *policyfile.File) (g goal, err error) {
	devices, err := policyDevices(n, f)
	if err != nil {
		return g, err
	}
	if g.tables, g.absent, err = f.Tables(devices); err != nil {
		return g, inputError(err)
	}
	g.unmatched = f.Unmatched(devices)
	return g, nil
}

// waiting returns who has no guarantee yet, and why the first of them has none.
func waiting(n *loader.Namespace) (who []string, why *policy.PoolError) {
	for _, c := range n.Claims {
		if c.NoRoom != nil {
			who, why = append(who, c.Who), cmp.Or(why, c.NoRoom)
		}
	}
	return who, why
}

// sayNoRoom says which devices have no guarantee yet.
func (e *env) sayNoRoom(n *loader.Namespace, f *policyfile.File) {
	if who, why := waiting(n); why != nil {
		e.say("shapectl: no room for the guarantees of %d of %s: %s; until there is room, they get what other guarantees leave, at worst nothing",
			len(who), plain.Count(len(n.Claims), "device"), plain.List(plain.Lines(who)))
		e.warnOf(f.AtPool(*why))
	}
}

// sayUnseen tells which hosts are not limited yet, as no address of them is known.
func (e *env) sayUnseen(f *policyfile.File, devices ...policyfile.Device) {
	var hosts []string
	for _, d := range devices {
		of, _ := f.HostsOf(d) // an error was told before
		for _, h := range of {
			says := h.MAC.Called(plain.Line(h.Name)) + " on " + plain.Line(d.Name)
			if h.Limited && len(h.Rules) == 0 && !slices.Contains(hosts, says) { // once for both directions
				hosts = append(hosts, says)
			}
		}
	}
	if hosts != nil {
		e.say("no address is known of %s: not limited until the kernel's neighbour table has one ('ip neigh'), and %s adds its rule",
			plain.List(hosts), e.suggest("serve", "FILE"))
	}
}

// removesAll reports as an error that a policy with devices would remove all rules, because none of these exist or because
// they have no rules: more likely than not its patterns are misspelt, or it is cut off.
func removesAll(n *loader.Namespace, f *policyfile.File, want goal) error {
	if slices.ContainsFunc(want.tables, func(t policy.Table) bool { return !t.IsPools() && len(t.Rules) > 0 }) || len(f.Devices()) == 0 {
		return nil
	}
	have, err := n.Tables(loader.Attached)
	have = slices.DeleteFunc(policy.PodTables(have, false), policy.Table.IsPools)
	if err != nil || len(have) == 0 {
		return err
	}
	rules := 0
	var devices []string
	for _, t := range have {
		rules += len(t.Rules)
		if name := plain.Line(t.Device); !slices.Contains(devices, name) {
			devices = append(devices, name)
		}
	}
	why := "the policy has no rule for any device; complete it"
	if missing := append(want.absent, want.unmatched...); len(missing) > 0 {
		why = "no device is " + plain.List(plain.Lines(missing)) + "; correct the names"
	}
	return inputf("it would remove all %s of %s, as %s, or give --allow-empty; nothing was changed", plain.Count(rules, "rule"), plain.List(devices), why)
}

// atMost is the number that --max-remove stands for if there are this many rules and pools.
func atMost(s string, all int) (int, error) {
	number, percent := strings.CutSuffix(s, "%")
	most, err := strconv.ParseUint(number, 10, 31)
	if err != nil || percent && most > 100 {
		return 0, fmt.Errorf("max-remove %.64q is no number; write one such as 100, or a part of all such as 10%%", s)
	}
	if percent {
		most = most * uint64(all) / 100
	}
	return int(most), nil
}

// checkLifted returns an error if a change would lift more limits than --max-remove allows.
func (o *applyOptions) checkLifted(lifted, of int) error {
	if most, err := atMost(o.maxRemove, of); err != nil || lifted <= most {
		return err
	}
	return inputf("it would remove %d of %d rules and pools, or make them unlimited, more than --max-remove %s; nothing was changed; if the policy is complete, give a larger --max-remove, or leave it out",
		lifted, of, o.maxRemove)
}

// policyDevices are the devices of a namespace as a policy file sees them.
func policyDevices(n *loader.Namespace, f *policyfile.File) ([]policyfile.Device, error) {
	all, err := netinfo.Devices()
	cgroups := netinfo.Cgroups(f.Cgroups())
	hooks, _ := n.Hooks()
	defer loader.CloseHooks(hooks)
	for _, h := range hooks {
		if h.Device.IsCgroup() && !slices.ContainsFunc(cgroups, func(d netinfo.Device) bool { return d.Name == h.Device.Name }) {
			cgroups = append(cgroups, h.Device) // which nobody sees here
		}
	}
	all = append(all, cgroups...)
	var neighbours map[int]map[policy.MAC][]netip.Addr
	if macs := f.MACs(); len(macs) > 0 && err == nil {
		neighbours, err = netinfo.ListNeighbours(macs)
	}
	devices := make([]policyfile.Device, len(all))
	for i, d := range all {
		devices[i] = policyfile.Device{Name: d.Name, L2Bytes: d.L2Bytes, Neighbours: neighbours[d.Index]}
	}
	return devices, err
}

func (e *env) apply(o applyOptions) error {
	f, err := e.policyToApply(o)
	if err != nil {
		return fmt.Errorf("apply: %w", err)
	}
	e.warnOf(f.File.Warnings())
	err = e.with(loader.Write, "apply "+f.Path, func(n *loader.Namespace) error {
		want, err := goalOf(n, f.File)
		if err != nil {
			return err
		}
		if !o.allowEmpty {
			if err := removesAll(n, f.File, want); err != nil {
				return err
			}
		}
		how := e.asked()
		how.Policy = inforce.Pack(f.File, f.Path, f.Text)
		if o.maxRemove != "" {
			how.Allow = o.checkLifted
		}
		done, err := n.Apply(want.tables, how)
		if err != nil {
			return err
		}
		pending, err := e.pending(n, "apply "+f.Path, done)
		if err != nil {
			return err
		}
		devices, err := policyDevices(n, f.File) // some may have come or gone
		if err != nil {
			return err
		}
		noRoom, _ := waiting(n)
		a := e.changed(done, pending)
		a.Absent, a.Unmatched = append(a.Absent, f.Absent(devices)...), append(a.Unmatched, f.Unmatched(devices)...)
		a.Waiting, a.Verbose = append(a.Waiting, noRoom...), o.verbose
		err = e.applied(a, o.absentOK)
		e.sayUnseen(f.File, devices...)
		if e.sayNoRoom(n, f.File); noRoom != nil && err == nil {
			err = errDegraded
		}
		for _, d := range done {
			if lacks := e.queued(n, d.Device, d.Hook); err == nil {
				err = lacks
			}
		}
		return err
	})
	if err != nil && !errors.Is(err, errDegraded) {
		return err
	}
	if o.lastGood != "" && f.Problem == nil {
		if err := lastgood.Keep(o.lastGood, f.Text); err != nil {
			return e.degraded("apply %s: the policy is in force, but %w", f.Path, err)
		}
	}
	if f.Problem != nil {
		if mistakes, ok := errors.AsType[policyfile.Errors](f.Problem); ok {
			e.warnOf(mistakes)
		} else {
			e.say("%w", f.Problem)
		}
		return e.degraded("apply %s: it is not valid; the last good policy, %s, was applied instead", o.file, f.Path)
	}
	return err
}

// policyToApply is the policy of the file, or the last good one.
func (e *env) policyToApply(o applyOptions) (lastgood.Policy, error) {
	if o.lastGood == "" {
		f, text, err := e.readPolicy(o.file)
		return lastgood.Policy{File: f, Path: o.file, Text: text}, err
	}
	f, err := lastgood.Load(o.file, o.lastGood)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return f, inputf("there is no file %s; nothing was changed; --last-good %s is used only if FILE is not valid", o.file, o.lastGood)
	case err != nil:
		return f, inputError(err)
	}
	return f, nil
}

// changed says what a change did. It reverts at this time; 0 for never.
func (e *env) changed(done []loader.Applied, reverts uint64) report.Applied {
	a := report.Applied{
		Hooks: []report.HookChange{}, Absent: []string{}, Unmatched: []string{}, Waiting: []string{}, // not null in JSON
		RevertsInNS: live.Ahead(reverts), NoTimer: e.confirm > 0 && reverts == 0, Confirm: e.suggest("confirm"),
	}
	for _, d := range done {
		if d.Device == "" {
			a.Pools = report.PoolChange{Added: d.Rules.Added, Changed: d.Rules.Changed, Removed: d.Rules.Removed}
			continue
		}
		a.Hooks = append(a.Hooks, report.HookChange{
			Device: d.Device, Direction: d.Direction.String(), Added: d.Rules.Added, Changed: d.Rules.Changed, Removed: d.Rules.Removed,
			Upgraded: d.Hook.Upgraded, Reattached: d.Hook.Reattached,
		})
	}
	slices.SortStableFunc(a.Hooks, func(x, y report.HookChange) int { return plain.Natural(x.Device, y.Device) })
	return a
}

func (e *env) applied(a report.Applied, absentOK bool) error {
	if err := e.print(a, a.Text); err != nil {
		return err
	}
	e.sayMissing(a.Absent, a.Unmatched)
	if absentOK || len(a.Absent)+len(a.Unmatched) == 0 {
		return nil
	}
	return errDegraded
}

// sayMissing says for which devices and patterns of a policy no device exists.
func (e *env) sayMissing(absent, unmatched []string) {
	if len(absent) > 0 {
		e.say("shapectl: left out, as these devices do not exist: %s; %s applies their rules when they appear", plain.List(plain.Lines(absent)), e.suggest("serve", "FILE"))
	}
	if len(unmatched) > 0 {
		e.say("shapectl: no device matches %s", plain.List(plain.Lines(unmatched)))
	}
}

func confirmCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "confirm",
		Short: "Confirm a pending change",
		Long: `Confirm a pending change: keep what 'shapectl apply --confirm', or set, delete or flush with --confirm,
changed.

The answer says when the change was made, and what it changed. If the last change needs no confirmation any more,
confirm says so and succeeds.`,
		Example: `  shapectl apply policy.yaml --confirm 60s
  shapectl confirm`,
		Args: args(0, 0),
		RunE: func(*cobra.Command, []string) error {
			return e.with(loader.Write, "confirm", func(n *loader.Namespace) error {
				done, err := n.Confirm()
				a := e.changed(done, 0)
				if errors.Is(err, loader.ErrConfirmed) {
					return e.nothing(a, "nothing to confirm: the last change is permanent already")
				} else if err != nil {
					return err
				}
				a.ConfirmedAgoNS = begunAgo(done)
				return e.applied(a, false)
			})
		},
	}
}

// begunAgo is how long ago the change began that was confirmed or rolled back; nil if there was none.
func begunAgo(done []loader.Applied) *uint64 {
	if len(done) == 0 {
		return nil
	}
	ago := maps.Now() - min(done[0].Began, maps.Now())
	return &ago
}

func rollbackCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "rollback",
		Short: "Undo the last apply or line, or change with --confirm",
		Long: `Return to the rules from before the last 'shapectl apply' or 'line', or change with --confirm, that changed something.

The change may be confirmed or not. All devices switch back at one moment. Counters go on, and buckets keep their
room. The answer says when the change was made, and by which command. Devices that appeared since, and have their rules from 'shapectl
serve', get those of the policy from before the change. If all devices that the change concerned were deleted, the
exit code is 4.

rollback is refused after another command has changed rules. If the change left devices or directions without
rules, 'shapectl serve' frees their state after an hour. Then rollback is refused, too.`,
		Args: args(0, 0),
		RunE: func(*cobra.Command, []string) error {
			return e.with(loader.Write, "rollback", func(n *loader.Namespace) error {
				_, command, _ := strings.Cut(n.LastAuthor().Who, "\x00")
				done, err := n.Rollback()
				if err != nil {
					return err
				} else if len(done) == 0 {
					return e.degraded("rollback: the last change is undone, but no rule was changed: the devices that it concerned were deleted; to limit devices made since, run %s", e.suggest("apply", "OLDFILE"))
				}
				a := e.changed(done, 0)
				a.UndoneAgoNS, a.Undone = begunAgo(done), command
				return e.applied(a, false)
			})
		},
	}
}
