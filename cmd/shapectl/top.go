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
	"github.com/shapectl/shapectl/internal/live"
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
	top      int // 0 for all
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

Columns: USE is the rate of packets that passed, OF is USE in percent of the rate. DROPS is the rate of dropped packets, and
DROPPED their share of all packets. LEVEL is how full the bucket is, or the fullest one of many.`,
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
			case !slices.Contains(live.Views, o.by):
				return inputf("top: --by %q is unknown; use one of %s", o.by, strings.Join(live.Views, ", "))
			case !slices.Contains(live.Orders, o.sort):
				return inputf("top: --sort %q is unknown; use one of %s", o.sort, strings.Join(live.Orders, ", "))
			case cmd.Flags().Changed("top") && o.top < 1:
				return inputf("top: --top %d shows nothing; use 1 or more", o.top)
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
	flags.StringVar(&o.by, "by", live.Views[0], "`view`: "+strings.Join(live.Views, ", "))
	flags.StringVar(&o.sort, "sort", live.Orders[0], "`order`: "+strings.Join(live.Orders, ", "))
	flags.Var(duration(&o.interval), "interval", "measure over this `time` (default: 1s)")
	flags.BoolVar(&o.once, "once", false, "print one table and exit")
	flags.IntVar(&o.top, "top", 0, "with --once or -j, only the first `N` rows; of a tree, in each pool")
	flags.StringVar(&plan, "plan", "", "only rules that follow this plan")
	e.completes(cmd, "by", cobra.FixedCompletions(live.Views, cobra.ShellCompDirectiveNoFileComp))
	e.completes(cmd, "sort", cobra.FixedCompletions(live.Orders, cobra.ShellCompDirectiveNoFileComp))
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
	s := &topSource{e: e, reader: &live.Reader{Options: options, Netns: e.netns}, arguments: chosen}
	if first, err := s.Read(); first == nil { // before there is a screen: an error is a line
		return fmt.Errorf("top: %w", e.advise(err))
	}
	if !o.once && !e.json {
		screen := top.Options{Host: hostname(), Interval: o.interval, View: o.by, Sort: o.sort, Colour: e.getenv("NO_COLOR") == "", UTF8: e.isUTF8()}
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
	view := live.View{By: o.by, Sort: o.sort, Top: o.top, Chosen: s.Chosen}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		r, err := s.Read()
		switch {
		case r == nil:
			return fmt.Errorf("top: %w", e.advise(err))
		case !o.once:
			err = errors.Join(json.NewEncoder(e.out).Encode(report.NewTop(r, view)), err)
		case e.json:
			return errors.Join(e.print(report.NewTop(r, view), nil), err)
		default:
			return errors.Join(e.print(nil, func(w io.Writer) error { return top.Text(w, r, view, e.columns) }), err)
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
	e         *env
	reader    *live.Reader
	arguments chosenRules
	// all is the last reading, and chosen what of it the arguments choose; nil for all.
	all    atomic.Pointer[live.Reading]
	chosen atomic.Pointer[map[live.Key]bool]
}

// fullestBuckets is how many of the fullest buckets a reading has.
const fullestBuckets = 20

// Read implements top.Source.
func (s *topSource) Read() (*live.Reading, error) {
	r, err := s.reader.Read(live.What{Fullest: fullestBuckets})
	if r == nil {
		return nil, err
	}
	if last := s.all.Swap(r); s.arguments.some && (last == nil || r.Scene() != last.Scene()) {
		chose := s.choose(r)
		if chose != nil && s.chosen.Load() == nil {
			return nil, chose
		}
	}
	return r, err
}

// choose finds out which rules and pools the arguments choose.
func (s *topSource) choose(r *live.Reading) error {
	e, _ := s.e.inner()
	want := s.arguments.want
	var seen *seen
	err := e.with(loader.Read, "top", func(n *loader.Namespace) (err error) {
		seen, err = e.find(n, r, nil, &want, s.arguments.search)
		return err
	})
	chosen := map[live.Key]bool{}
	if seen != nil {
		for _, it := range withPools(seen.found) {
			chosen[it.Key] = true
		}
		err = nil
	}
	if err == nil || s.chosen.Load() != nil { // rules that have gone since are none
		s.chosen.Store(&chosen)
	}
	return err
}

// Chosen implements top.Source.
func (s *topSource) Chosen(it *live.Item) bool {
	chosen := s.chosen.Load()
	return chosen == nil || (*chosen)[it.Key]
}

// inner is an environment for another command, whose answer and warnings are a text.
func (e *env) inner() (*env, *bytes.Buffer) {
	text := &bytes.Buffer{}
	return &env{in: strings.NewReader(""), out: text, err: text, getenv: e.getenv, netns: e.netns}, text
}

// Explain implements top.Source.
func (s *topSource) Explain(t top.Target) (string, error) {
	e, text := s.e.inner()
	q := explain.Question{Interval: explainInterval, Netns: e.netns, Name: t.Name}
	if t.Rule == nil {
		err := e.explain(q)
		return text.String(), err
	}
	if t.Rule.IsPool() {
		err := e.explainPools([]string{t.Rule.Key.Pool}, explainInterval)
		return text.String(), err
	}
	direction, prefix := t.Rule.Place.Direction, t.Rule.Prefix
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
	err := e.explain(q)
	return text.String(), err
}

var errRuleGone = inputf("the rule was just deleted")

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
		err = e.setNamed(ruleName{name: t.Rule.Key.Pool, kind: kindPool}, limit)
	default:
		err = e.set(filterRules{device: t.Rule.Device, direction: &t.Rule.Place.Direction, networks: networks{t.Rule.Prefix}}, limit, true)
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
