package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/doctor"
	"github.com/shapectl/shapectl/internal/line"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// lineOptions are the flags of line.
type lineOptions struct {
	down, up, min  policy.Rate
	link           policy.Overhead
	fair           string // "" for what the line needs
	adapt, noQueue bool
	reflectors     []string
	dryRun         bool
	command        string // that asks for this line
}

func lineCommand(e *env) *cobra.Command {
	var o lineOptions
	cmd := &cobra.Command{
		Use:   "line DEV [off] [flags]",
		Short: "Limit a home or office line, so that it has no bufferbloat",
		Long: `Limit a line to 95 % of its rates, so that packets queue here and not in the modem. Downloads that cannot be
queued, such as with --no-queue, get 85 %. While the line is full, each host gets an equal part of it, also behind the NAT
of this host; where no hosts pass DEV, each connection. Excess packets wait in the fq qdisc, which line sets up, for 30 ms
at most. DEV is the device of the line: downloads enter it, and
uploads leave it. On a PPPoE line, it is the ppp device.

To change something, give the whole command again, with all flags. Counters and queued packets stay. A direction without
a rate is not limited. line makes the pools "DEV egress" and "DEV ingress", and changes no other rules and pools.

off removes all that line has made for DEV, and the fq qdisc.

With --adapt, 'shapectl serve' lowers the rates while round-trip times are long, and raises them again.

With --dry-run, line prints the policy that it would bring into force. Keep it for the next boot, or change and apply it.`,
		Example: `  shapectl line eth0 --down 50mbit --up 10mbit --link docsis
  shapectl line eth0 --down 50mbit --up 10mbit --dry-run >policy.yaml
  shapectl line eth0 off`,
		Args:              args(1, 2),
		ValidArgsFunction: e.complete(devices, oneOf("off")),
		RunE: func(cmd *cobra.Command, given []string) error {
			if len(given) == 2 {
				if given[1] != "off" {
					return inputf("line: %.64q is unknown; write off to remove the limits of %s, and rates as flags, such as --down 50mbit", given[1], plain.Line(given[0]))
				}
				var extra string
				cmd.Flags().Visit(func(f *pflag.Flag) {
					if cmd.InheritedFlags().Lookup(f.Name) == nil {
						extra = f.Name
					}
				})
				if extra != "" {
					return inputf("line: off takes no --%s; leave it out", extra)
				}
				return e.lineOff(given[0])
			}
			switch {
			case given[0] == "off":
				return inputf("line: the device is missing; write it before off")
			case o.down == 0 && o.up == 0:
				return inputf("line: the rates are missing; give those of a speed test, such as --down 50mbit --up 10mbit; off removes the limits")
			case o.min != 0 && !o.adapt:
				return inputf("line: --min is for a line that adapts; give --adapt, too")
			case o.reflectors != nil && !o.adapt:
				return inputf("line: --reflector is for a line that adapts; give --adapt, too")
			case o.dryRun && e.confirm > 0:
				return inputf("line: --dry-run changes nothing that --confirm could revert; leave one of them out")
			}
			if o.reflectors != nil {
				var to policy.Reflectors
				if err := to.Set(strings.Join(o.reflectors, ",")); err != nil {
					return inputf("line: --reflector: %w", err)
				}
			}
			if o.up > o.down && o.down != 0 {
				e.say("%s: uploads are faster than downloads; if the rates are swapped, give --down %v --up %v", plain.Line(given[0]), o.up, o.down)
			}
			e.noteRates(cmd)
			o.command = e.commandLine(cmd, given, "dry-run", "confirm")
			return e.line(given[0], o)
		},
	}
	f := cmd.Flags()
	once(f, lineRate(&o.down), "down", "the line's rate of downloads, from a speed test")
	once(f, lineRate(&o.up), "up", "the line's rate of uploads")
	once(f, flagValue{"bytes", "", o.link.Set}, "link", "`bytes` that the line adds; or "+strings.Join(policy.FramingNames, ", "))
	once(f, choice(&o.fair, "host", "flow"), "fair", "who has an equal part of a full line")
	f.BoolVar(&o.adapt, "adapt", false, "lower the rates while the line is slow")
	once(f, lineRate(&o.min), "min", "with --adapt: the lowest rate; a fifth of the rate by default")
	f.StringArrayVar(&o.reflectors, "reflector", nil, "with --adapt: the `address` whose round-trip times tell that the line is slow")
	f.BoolVar(&o.noQueue, "no-queue", false, "mark or drop excess packets, without the fq qdisc")
	f.BoolVar(&o.dryRun, "dry-run", false, "print the policy, and change nothing")
	e.addConfirm(f)
	e.completes(cmd, "link", cobra.FixedCompletions(policy.FramingNames, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func lineRate(r *policy.Rate) flagValue {
	return flagValue{"rate", "", func(s string) error {
		rate, err := policy.ParseRate(s)
		if err == nil && rate == policy.Unlimited {
			err = errors.New("rate unlimited is no rate of a line; leave the flag out for a direction without a limit")
		}
		*r = rate
		return err
	}}
}

// line limits a line.
func (e *env) line(name string, o lineOptions) error {
	open, limited := loader.Write, ""
	if o.dryRun {
		open = loader.Read
	}
	e.setupFQ = !o.noQueue
	err := e.with(open, "line "+plain.Line(name), func(n *loader.Namespace) error {
		dev, err := device(name)
		if err != nil {
			return err
		}
		tables, err := n.Tables(loader.Attached, loader.Detached)
		if err != nil {
			return err
		}
		if dev.IsCgroup() {
			return inputf("a line is a device; for one rate of %s in each direction, write %s", plain.Line(dev.Name), e.suggest("set", dev.Name, "--rate", "20mbit"))
		}
		if dev.Loopback {
			return inputf("%s is the loopback device, which leads nowhere; give the device of the line, see 'ip route show default'", plain.Line(dev.Name))
		}
		have := line.Divide(e.netns, dev.Name, tables)
		l, err := e.lineOf(dev, have, o)
		if err != nil {
			return err
		}
		text, err := l.Policy()
		if err != nil {
			return inputError(err)
		}
		want, tables, err := planLine(n, have, text)
		if err != nil {
			return err
		}
		answer := report.Line{Device: dev.Name, Directions: directionsOf(l), Policy: string(text)}
		if o.dryRun {
			if l.Queues() && errors.Is(fq.Check(), fq.ErrNoFQ) {
				return noFQ(fq.ErrNoFQ)
			}
			return e.print(answer, answer.Text)
		}
		var degraded error
		if answer.Applied, degraded, err = e.applyLine(n, l, have, want, tables); err != nil {
			return err
		}
		limited = dev.Name
		if err := e.print(answer, answer.Text); err != nil {
			return err
		}
		e.sayLost(l, have)
		if l.Adapt {
			e.say("%s: its rates adapt only while %s runs", plain.Line(l.Device), e.suggest("serve"))
		}
		return degraded
	})
	if limited != "" && (err == nil || wasTold(err)) {
		return errors.Join(err, e.warnOfLine(limited))
	}
	return err
}

// lineOf is the line that the flags ask for on a device.
func (e *env) lineOf(dev netinfo.Device, have line.Split, o lineOptions) (l line.Line, err error) {
	var share policy.Share
	if err := share.Set(o.fair); o.fair != "" && err != nil {
		return l, err
	}
	l = line.Line{
		Device: dev.Name, Link: string(o.link), Share: share.Kind, Adapt: o.adapt, Reflectors: o.reflectors, Command: o.command,
		Up:   line.Direction{Rate: o.up, Drops: o.noQueue, Min: o.min},
		Down: line.Direction{Down: true, Rate: o.down, Drops: o.noQueue, Min: o.min},
	}
	for _, d := range []line.Direction{l.Up, l.Down} {
		if d.Rate != 0 && d.Min > d.PoolRate() {
			return l, inputf("--min %v is above %v, which is what a line of %v gets; lower it", d.Min, d.PoolRate(), d.Rate)
		}
	}
	behind, err := dev.Behind()
	if err != nil {
		return l, err
	}
	if l.Inside = behind.Line != ""; l.Inside && o.dryRun { // else doctor says it
		e.say("%s: the default route leaves by %s; if that is the line, give its name instead", plain.Line(dev.Name), plain.Line(behind.Line))
	}
	switch {
	case o.fair != "":
	case behind.Hosts:
		l.Share = policy.ShareHost
	default:
		l.Share = policy.ShareFlow
	}
	if l.NAT = l.Share == policy.ShareHost && len(behind.NAT) > 0; l.NAT {
		l.Why = fmt.Sprintf("The hosts of %v on %s have one address on the line (NAT)", behind.NAT[0].Network, plain.Line(behind.NAT[0].Device))
	}
	// Hosts are told apart by the address of the near side. Otherwise the rules match what others of the device match.
	l.Up.Match, l.Down.Match = have.Match(policy.Egress), have.Match(policy.Ingress)
	if l.Share == policy.ShareHost && !l.NAT {
		l.Up.Match, l.Down.Match = policy.Ingress.FarSide(), policy.Egress.FarSide()
	}
	if why := unqueued(dev); o.down != 0 && !l.Down.Drops && why != nil {
		l.Down.Drops, l.Down.Why = true, "Excess packets cannot be queued: "+why.Error()
		e.say("%s ingress: downloads cannot be queued, so excess packets are marked by ECN or dropped: %w", plain.Line(dev.Name), why)
	}
	return l, nil
}

// unqueued is why packets that enter a device cannot be queued, though the kernel may have fq.
func unqueued(dev netinfo.Device) error {
	if dev.L2Bytes == 0 {
		return fmt.Errorf("%s has no Ethernet header", plain.Line(dev.Name))
	}
	if err := fq.CheckIfb(); errors.Is(err, fq.ErrOldIfb) {
		return err
	}
	return nil
}

// directionsOf says what a line is limited to.
func directionsOf(l line.Line) []report.LineDirection {
	all := []report.LineDirection{}
	for _, of := range []struct {
		line.Direction
		is   policy.Direction
		what string
	}{{l.Up, policy.Egress, "uploads"}, {l.Down, policy.Ingress, "downloads"}} {
		if of.Rate == 0 {
			continue
		}
		if l.Inside {
			of.what = "packets"
		}
		slow := ""
		if l.Adapt {
			slow = fmt.Sprintf(", or down to %v while the line is slow", of.LeastRate())
		}
		who, excess, then := "connections", policy.Delay, "wait in a queue of "+of.Queue()
		if l.Share == policy.ShareHost {
			who = "hosts"
		}
		if l.NAT {
			who = "hosts behind NAT"
		}
		if of.Drops {
			excess, then = policy.ECN, "are marked by ECN if they allow it, else dropped"
		}
		all = append(all, report.LineDirection{
			Direction: of.is.String(), LineRate: uint64(of.Rate), Rate: uint64(of.PoolRate()), Share: policy.Share{Kind: l.Share}.String(), Excess: excess.String(),
			Sentence: fmt.Sprintf("%s %v: %s get %v, %d %% of %v%s, in equal parts for all %s; excess packets %s",
				plain.Line(l.Device), of.is, of.what, of.PoolRate(), of.Percent(), of.Rate, slow, who, then),
		})
	}
	return all
}

// planLine returns the tables of the policy of a line, and with them all that no line has made.
func planLine(n *loader.Namespace, have line.Split, text []byte) (want, tables []policy.Table, err error) {
	f, err := policyfile.Parse("the policy of the line", text)
	if err != nil {
		return nil, nil, err
	}
	made, err := goalOf(n, f)
	if err != nil {
		return nil, nil, err
	}
	if want, err = have.With(made.tables); err != nil {
		return nil, nil, inputf("%w; nothing was changed", err)
	}
	return want, made.tables, nil
}

// applyLine brings into force what planLine returned.
func (e *env) applyLine(n *loader.Namespace, l line.Line, have line.Split, want, tables []policy.Table) (_ *report.Applied, degraded, err error) {
	concerned := have.Devices() // some of which may have no part in the line any more
	for _, t := range tables {
		concerned = append(concerned, t.Device)
	}
	done, err := n.Apply(want, loader.ApplyOptions{Confirm: e.confirm, Author: e.author(), Devices: concerned})
	if errors.Is(err, fq.ErrNoFQ) || errors.Is(err, fq.ErrNoIfb) {
		return nil, nil, noFQ(err)
	}
	if err != nil {
		return nil, nil, err
	}
	return e.lineApplied(n, l.Device, done)
}

func noFQ(err error) error {
	return exitError{fmt.Errorf("%w; load that module, use a kernel that has it, or give --no-queue", err), exitMissing}
}

// sayLost tells what an earlier command limited and this one does not.
func (e *env) sayLost(l line.Line, have line.Split) {
	for _, of := range []struct {
		is   policy.Direction
		what string
		rate policy.Rate
	}{{policy.Egress, "uploads", l.Up.Rate}, {policy.Ingress, "downloads", l.Down.Rate}} {
		if of.rate == 0 && have.Limits(of.is) {
			e.say("%s: %s are not limited any more; to limit them, give both --down and --up", plain.Line(l.Device), of.what)
		}
	}
}

// lineApplied says what was done for a line. What is degraded is in force all the same.
func (e *env) lineApplied(n *loader.Namespace, device string, done []loader.Applied) (_ *report.Applied, degraded, err error) {
	pending, err := e.pending(n, "line", done)
	if err != nil {
		return nil, nil, err
	}
	for _, d := range done {
		if was := d.Hook.Replaced; was != "" && d.Device == device {
			e.say("%s: its qdisc is now fq instead of %s; %s brings the default back", plain.Line(d.Device), was, e.suggest("line", device, "off"))
			d.Hook.Replaced = ""
		}
		degraded = errors.Join(degraded, e.queued(n, d.Device, d.Hook))
	}
	a := e.changed(done, pending)
	return &a, degraded, nil
}

// warnOfLine writes what doctor finds on the device of a line.
func (e *env) warnOfLine(name string) error {
	facts, err := e.facts(name)
	if err != nil {
		return fmt.Errorf("line %s: it is limited, but: %w", plain.Line(name), err)
	}
	for _, f := range doctor.Judge(facts) {
		if f.Device == name && (f.Status == report.Warning || f.Status == report.Failed) {
			e.sayFinding(f)
		}
	}
	return nil
}

// lineOff removes what line has made for a device.
func (e *env) lineOff(name string) error {
	return e.with(loader.Write, "line "+plain.Line(name)+" off", func(n *loader.Namespace) error {
		if dev, err := netinfo.DeviceByName(name); err == nil {
			name = dev.Name // which may be given by an alternative one
		}
		tables, err := n.Tables(loader.Attached, loader.Detached)
		if err != nil {
			return err
		}
		have := line.Divide(e.netns, name, tables)
		if have.Line == nil {
			return e.noLine(n, name)
		}
		rest, err := have.With(nil)
		if err != nil {
			return inputf("%w; nothing was changed", err)
		}
		done, err := n.Apply(rest, loader.ApplyOptions{Final: true, Devices: append(have.Devices(), name)})
		if err != nil {
			return err
		}
		if err := e.removeIdleFQs(n, append(have.Devices(), name)...); err != nil {
			return err
		}
		answer, degraded, err := e.lineApplied(n, name, done)
		if err != nil {
			return err
		}
		return errors.Join(e.print(answer, answer.Text), degraded)
	})
}

// noLine answers that there is no line to remove. It removes what is left of one whose command was killed, or that has
// reverted.
func (e *env) noLine(n *loader.Namespace, name string) error {
	dev, err := device(name)
	if err != nil {
		return err
	}
	devices, err := fq.Devices()
	if err == nil && slices.Contains(devices, dev.Index) {
		if err = n.EndOldChange(0); err == nil {
			err = e.removeIdleFQs(n, dev.Name)
		}
	}
	if err != nil {
		return err
	}
	return e.nothing(e.changed(nil, 0), "nothing to remove: there is no line on "+plain.Line(name))
}

// removeIdleFQs removes the fqs of --setup-fq from devices on which nothing is queued any more.
func (e *env) removeIdleFQs(n *loader.Namespace, names ...string) error {
	_, err := e.removeFQs(func(dev netinfo.Device) (bool, error) {
		if !slices.Contains(names, dev.Name) {
			return false, nil
		}
		h, err := n.Find(dev.Name, policy.Egress)
		if h == nil || err != nil {
			return err == nil, err
		}
		defer h.Close()
		return !h.Set.Any(maps.Delays), nil
	})
	return err
}
