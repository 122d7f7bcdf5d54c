package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/explain"
	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/top"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

type topOptions struct {
	interval time.Duration
	by, sort string
	once     bool
}

const leastTopInterval = 100 * time.Millisecond

func topCommand(e *env) *cobra.Command {
	o := topOptions{interval: usualInterval}
	var plan string
	cmd := &cobra.Command{
		Use:   "top [DEV [ingress|egress [CIDR|any]] | ADDRESS|CIDR|NAME|PLAN [ingress|egress]] [flags]",
		Short: "Watch what rules and pools use and drop now",
		Long: `Watch what rules and pools use and drop now. The rule that drops most comes first, then the rules nearest to their
rate. Arguments choose rules as in 'shapectl show'; the pools of these rules are shown, too. Nothing changes unless you
press r to change a rate, and r asks first.

Keys: up and down select a row, enter opens it (a pool's members, a name's rules, a rule's hosts, a host's flows), esc
goes back. s changes the order, v the view, / filters, r changes a rate, e explains what limits the row, c confirms a
pending change, p pauses, q quits, and ? lists all keys.

--once prints one table after one interval. -j prints a line of JSON for each interval, or one document with --once;
rules have the keys of 'shapectl show -j'. The screen needs a terminal: without one, or with TERM=dumb, use --once or
-j. NO_COLOR turns colours off.

Columns: USE is the rate of packets that passed, OF is USE in percent of the rate. DROPPED is the rate of dropped packets, and
LOST their share of all packets. LEVEL is how full the bucket is, or the fullest one of many.`,
		Example: `  shapectl top
  shapectl top --by tree
  shapectl top eth0 egress --sort use
  shapectl top alice
  shapectl top --once -j`,
		Args:              args(0, 3),
		ValidArgsFunction: e.orPool(e.labelled(e.completeNetwork, nameAndPlanOf)),
		RunE: func(cmd *cobra.Command, given []string) error {
			switch {
			case o.interval < leastTopInterval || o.interval > maxInterval:
				return inputf("top: --interval %v is out of range; use %v to %v", o.interval, leastTopInterval, maxInterval)
			case !slices.Contains(top.Views, o.by):
				return inputf("top: --by %q is unknown; use one of %s", o.by, strings.Join(top.Views, ", "))
			case !slices.Contains(top.Sorts, o.sort):
				return inputf("top: --sort %q is unknown; use one of %s", o.sort, strings.Join(top.Sorts, ", "))
			}
			want, search, err := parseSearch("top", given)
			if err != nil {
				return err
			}
			if want.plan = plan; plan == "" && cmd.Flags().Changed("plan") {
				return inputf("top: --plan is empty; leave it out for all rules")
			}
			return e.top(chosenRules{want, len(given) > 0 || plan != "", search}, o)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.by, "by", top.Views[0], "`view`: "+strings.Join(top.Views, ", "))
	flags.StringVar(&o.sort, "sort", top.Sorts[0], "`order`: "+strings.Join(top.Sorts, ", "))
	flags.Var(duration(&o.interval), "interval", "measure over this `time` (default: 1s)")
	flags.BoolVar(&o.once, "once", false, "print one table and exit")
	flags.StringVar(&plan, "plan", "", "only rules that follow this plan")
	e.completes(cmd, "by", cobra.FixedCompletions(top.Views, cobra.ShellCompDirectiveNoFileComp))
	e.completes(cmd, "sort", cobra.FixedCompletions(top.Sorts, cobra.ShellCompDirectiveNoFileComp))
	e.completes(cmd, "plan", e.completePlan)
	return cmd
}

// chosenRules are those that arguments choose.
type chosenRules struct {
	want   filterRules
	some   bool // not all
	search bool // the first argument may be something else than a device
}

func (e *env) top(chosen chosenRules, o topOptions) error {
	if !o.once && !e.json {
		if err := e.checkScreen(); err != nil {
			return err
		}
	}
	options, err := e.options()
	if err != nil {
		return err
	}
	s := &topSource{e: e, reader: &measure.Reader{Options: options, Netns: e.netns}, chosen: chosen}
	first, err := s.Read() // before there is a screen: an error is a line
	if err != nil && len(first.Rules) == 0 {
		return fmt.Errorf("top: %w", e.advise(err))
	}
	screen := top.Options{Host: hostname(), Interval: o.interval, View: o.by, Sort: o.sort}
	if !o.once && !e.json {
		screen.Colour, screen.UTF8 = e.getenv("NO_COLOR") == "", e.isUTF8()
		// A reading may outlast the screen. So nothing closes the reader here but the end of the process.
		err := top.Run(top.New(s, screen), os.Stdin, e.terminal, os.Environ())
		if err != nil {
			return fmt.Errorf("top: %w", err)
		}
		return nil
	}
	defer s.reader.Close()
	ctx, stop := signal.NotifyContext(e.context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	tick := time.NewTicker(o.interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		t, err := s.Read()
		switch {
		case err != nil && len(t.Rules) == 0:
			return fmt.Errorf("top: %w", e.advise(err))
		case !o.once:
			err = errors.Join(json.NewEncoder(e.out).Encode(t), err)
		case o.once:
			return errors.Join(e.print(t, func(w io.Writer) error { return top.Text(w, t, screen, e.columns) }), err)
		}
		if err != nil {
			return e.degraded("top: %w", err)
		}
	}
}

// checkScreen returns an error unless there is a terminal that can show a screen.
func (e *env) checkScreen() error {
	const instead = "use --once for one table, or -j for lines of JSON"
	switch kind := e.getenv("TERM"); {
	case e.terminal == nil || !isTerminal(os.Stdin):
		return inputf("top: the screen needs a terminal for input and output; %s", instead)
	case kind == "dumb" || kind == "":
		return inputf("top: this terminal (TERM=%s) cannot show a screen; %s", plain.Line(kind), instead)
	}
	return nil
}

// isUTF8 reports whether the terminal shows UTF-8, by the variables of the locale.
func (e *env) isUTF8() bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if locale := strings.ToLower(e.getenv(name)); locale != "" {
			return strings.Contains(locale, "utf-8") || strings.Contains(locale, "utf8")
		}
	}
	return false
}

func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return "this host"
	}
	return name
}

// A topSource is the limits of this host.
type topSource struct {
	e      *env
	reader *measure.Reader
	chosen chosenRules
	// all is the rules of the last reading, also those that are not chosen.
	all atomic.Pointer[report.Rules]

	// Which rules were chosen, when there were these.
	shown map[ruleID]bool
	of    []ruleID
}

// A ruleID is a rule or pool, and what arguments may choose it by.
type ruleID struct {
	report.Key
	name, plan string
}

func idOf(r *report.Rule) ruleID { return ruleID{r.Key(), r.Name, r.Plan} }

// fullestBuckets is how many of the fullest buckets a reading has.
const fullestBuckets = 20

// Read implements top.Source.
func (s *topSource) Read() (report.Top, error) {
	reading, err := s.reader.Read(measure.What{Fullest: fullestBuckets})
	if reading == nil {
		return report.Top{}, err
	}
	all := reading.Rules
	s.all.Store(&all)
	if s.chosen.some {
		if chose := s.choose(reading.Rules); chose != nil {
			return report.Top{}, chose
		}
		reading.Rules = slices.DeleteFunc(slices.Clone(reading.Rules), func(r report.Rule) bool { return !s.shown[idOf(&r)] })
		reading.Fullest = slices.DeleteFunc(reading.Fullest, func(b report.FullBucket) bool {
			return !slices.ContainsFunc(reading.Rules, func(r report.Rule) bool { return r.Key() == b.RuleKey() })
		})
	}
	return reading.Top(), err
}

// choose finds out which rules are chosen, unless they are the same as before.
func (s *topSource) choose(rules report.Rules) error {
	if s.shown != nil && slices.EqualFunc(rules, s.of, func(r report.Rule, id ruleID) bool { return idOf(&r) == id }) {
		return nil
	}
	e, _ := s.e.inner()
	want := s.chosen.want
	found, _, err := e.rules(&want, s.chosen.search, measure.Details{Sharers: true})
	if found == nil && s.shown == nil {
		return err
	}
	s.shown, s.of = map[ruleID]bool{}, nil
	for i := range found {
		s.shown[idOf(&found[i])] = true
	}
	for i := range rules {
		s.of = append(s.of, idOf(&rules[i]))
	}
	return nil
}

// inner is an environment for another command, whose answer and warnings are a text.
func (e *env) inner() (*env, *bytes.Buffer) {
	text := &bytes.Buffer{}
	return &env{in: strings.NewReader(""), out: text, err: text, getenv: e.getenv, netns: e.netns}, text
}

// Explain implements top.Source.
func (s *topSource) Explain(t top.Target) (string, error) {
	e, text := s.e.inner()
	q := explain.Question{Segments: 1, Interval: usualInterval, Netns: e.netns, Name: t.Name}
	if t.Rule == nil {
		err := e.explain(q)
		return text.String(), err
	}
	if t.Rule.IsPool() {
		err := e.explainPools([]string{t.Rule.Name}, usualInterval)
		return text.String(), err
	}
	direction, prefix, err := ruleAt(t.Rule)
	if err != nil {
		return "", err
	}
	q.Device, q.Direction = t.Rule.Device, &direction
	if flow, err := maps.ParseFlow(t.Key); err == nil {
		q.Flow = &flow
	} else if address, err := netip.ParseAddr(t.Key); err == nil {
		q.Address = address
	} else if subnet, err := netip.ParsePrefix(t.Key); err == nil {
		q.Address = subnet.Addr()
	} else {
		err := e.with(loader.Read, "explain", func(n *loader.Namespace) error {
			h, err := n.Find(t.Rule.Device, direction)
			if err != nil || h == nil {
				return cmp.Or(err, errRuleGone)
			}
			defer h.Close()
			q.Address = explain.Example(h, prefix)
			return nil
		})
		if err != nil {
			return "", err
		}
	}
	err = e.explain(q)
	return text.String(), err
}

var errRuleGone = inputf("the rule was just deleted")

// ruleAt is the direction and the network of a rule.
func ruleAt(r *report.Rule) (policy.Direction, netip.Prefix, error) {
	direction, err := policy.ParseDirection(r.Direction)
	if err != nil {
		return direction, netip.Prefix{}, err
	}
	prefix, err := netip.ParsePrefix(r.CIDR)
	return direction, prefix, err
}

// SetRate implements top.Source. It is 'shapectl set NAME --rate', for one rule or pool: all other options stay, and
// buckets keep what they hold.
func (s *topSource) SetRate(t top.Target, rate string, confirm time.Duration) (string, error) {
	e, text := s.e.inner()
	e.confirm = confirm
	var limit limitFlags
	err := limit.Give(policy.FindOption("rate"), rate)
	if err != nil {
		return "", err
	}
	switch {
	case t.Rule == nil:
		of := ruleName{name: t.Name}
		if t.Direction != "" {
			d, err := policy.ParseDirection(t.Direction)
			if err != nil {
				return "", err
			}
			of.direction = &d
		}
		err = e.setNamed(of, limit)
	case t.Rule.IsPool():
		err = e.setNamed(ruleName{name: t.Rule.Name, kind: kindPool}, limit)
	default:
		var direction policy.Direction
		var prefix netip.Prefix
		if direction, prefix, err = ruleAt(t.Rule); err == nil {
			err = e.set(filterRules{device: t.Rule.Device, direction: &direction, networks: []netip.Prefix{prefix}}, limit, true)
		}
	}
	return text.String(), err
}

// Confirm implements top.Source.
func (s *topSource) Confirm() (string, error) { return s.run("confirm") }

// Rollback implements top.Source.
func (s *topSource) Rollback() (string, error) { return s.run("rollback") }

// run runs a command line.
func (s *topSource) run(args ...string) (string, error) {
	e, text := s.e.inner()
	e.run(args)
	return text.String(), nil // an error is in the text
}
