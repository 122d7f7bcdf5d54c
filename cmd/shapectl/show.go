package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
)

type showOptions struct {
	wide, sentences, buckets, shadows, tree, names bool

	interval time.Duration // 0 for none
	sort     string
	top      int // 0 for all
}

const (
	leastInterval = 10 * time.Millisecond
	usualInterval = time.Second
	maxInterval   = time.Hour
)

// showCommand is that of pools, or of all.
func showCommand(e *env, pools bool) *cobra.Command {
	var o showOptions
	var plan string
	cmd := &cobra.Command{
		Use:   "show [DEV [ingress|egress [CIDR|any]] | ADDRESS|CIDR|NAME|PLAN [ingress|egress]] [flags]",
		Short: "Show rules and what happened to their packets",
		Long: `Show rules and what happened to their packets. A device, direction and network name one rule, which is shown in
full. Instead of a device, write an address, a network, or a name:

  ADDRESS   the rules whose network contains it; the first one decides
  CIDR      the rules for it and for parts of it, else the one that contains it
  NAME      the rules with that name or plan, or with a part of it or of the note;
            NAME may be a pattern, whose * also matches /; the name of a pool
            stands for it and for all that is within it;
            the exact name of a rule or pool wins over an address

PASSED and DROPPED count since a rule was set. With --interval, USE and DROPPED are measured over that time. OF RATE
is USE in percent of the rate, if a rule has one bucket. DROPPED is a share of packets. With --sort excess, EXCESS
is the share of packets that were excess or delayed. A RATE such as 5mbit/pool is that of the pool: all that is within
the pool shares it. With --shadow, use, dropped and excess all sort by WOULD DROP.
With --names, each name of rules has a line with both directions, summed up. A rate there is the most that its rules
and the pools that only it has let through; POOL is the one above, which it shares with others. Orders are name, rate,
use, passed and dropped. With --buckets, FULL is LEVEL in percent of what the bucket and its queue can hold. It is more than 100 % while a
penalty keeps the bucket full, after a packet larger than the bucket, and while --excess ecn marks packets.
With --tree, each pool comes with all that is within it, in the order of --sort; --top counts in each pool. BORROWED
is what passed beyond a guarantee. DROPPED of a pool is what the packets of all rules within it lost since these were
set, whoever dropped them; REFUSED is what the pool dropped itself. Both are shares of all packets of these rules.
Columns without values are left out, and on a narrow screen without --wide also others, which a line below names. An
argument that matches no device and no rule is an error (exit code 1).

any stands for 0.0.0.0/0 and ::/0. DEV may be a pattern, see 'shapectl help patterns'.`,
		Example: `  shapectl show eth0
  shapectl show 10.0.3.7
  shapectl show --sort use --top 10
  shapectl show --tree --interval 1s
  shapectl show --names --sort use --top 10
  shapectl show 'tap*' egress --wide
  shapectl show --pools 'home-*' --sort dropped`,
		Args: args(0, 3),
		ValidArgsFunction: func(cmd *cobra.Command, given []string, typed string) ([]string, cobra.ShellCompDirective) {
			return e.completeNamed(pools, nameAndPlanOf)(cmd, given, typed)
		},
		RunE: func(cmd *cobra.Command, given []string) error {
			if err := o.check(cmd, pools); err != nil {
				return err
			}
			want, search, err := parseSearch("show", given)
			if err != nil {
				return err
			}
			if pools {
				if len(given) > 1 {
					return inputf("show: --pools takes the name of a pool, or a pattern; leave the other arguments out")
				}
				want, search = filterRules{pools: true, pool: want.device}, false
			}
			if want.plan = plan; plan == "" && cmd.Flags().Changed("plan") {
				return inputf("show: --plan is empty; leave it out for all rules")
			}
			return e.show(want, search, o)
		},
	}
	flags := cmd.Flags()
	flags.Var(duration(&o.interval), "interval", "measure use and drops over this `time`, such as 1s")
	flags.StringVar(&o.sort, "sort", "device", "`order`: "+strings.Join(report.Sorts, ", ")+"; use measures over 1s unless --interval is given")
	flags.IntVar(&o.top, "top", 0, "show only the first `N` rules, pools or buckets")
	flags.BoolVar(&o.wide, "wide", false, "show all columns")
	if !pools {
		flags.BoolVar(&pools, "pools", false, "show only pools: all, or those with this name or pattern")
	}
	flags.StringVar(&plan, "plan", "", "only rules that follow this plan")
	flags.BoolVar(&o.tree, "tree", false, "show pools with all that is within them")
	flags.BoolVar(&o.names, "names", false, "show a line for each name, with both directions")
	flags.BoolVar(&o.sentences, "sentences", false, "describe each rule in a sentence")
	flags.BoolVar(&o.buckets, "buckets", false, "list buckets that are not empty, and how long a packet would wait")
	flags.BoolVar(&o.shadows, "shadow", false, "show what shadow limits would have refused")
	e.completes(cmd, "sort", cobra.FixedCompletions(report.Sorts, cobra.ShellCompDirectiveNoFileComp))
	e.completes(cmd, "plan", e.completePlan)
	return cmd
}

// check reports options that are wrong or do not go together.
func (o showOptions) check(cmd *cobra.Command, pools bool) error {
	set := cmd.Flags().Changed
	views := 0
	for _, view := range []bool{o.buckets, o.names, pools, o.shadows, o.sentences, o.tree} {
		if view {
			views++
		}
	}
	switch {
	case views > 1 || o.shadows && o.wide:
		return inputf("show: --buckets, --names, --pools, --shadow, --sentences and --tree are screens of their own; give one of them")
	case o.names && set("wide"):
		return inputf("show: --names has columns of its own; leave --wide out")
	case o.names && set("sort") && !slices.Contains(report.NameSorts, o.sort):
		return inputf("show: --names cannot sort by %q; use one of %s", o.sort, strings.Join(report.NameSorts, ", "))
	case !slices.Contains(report.Sorts, o.sort):
		return inputf("show: --sort %q is unknown; use one of %s", o.sort, strings.Join(report.Sorts, ", "))
	case set("top") && o.top < 1:
		return inputf("show: --top %d shows nothing; use 1 or more", o.top)
	}
	return checkInterval(cmd, o.interval)
}

// checkInterval reports an --interval that is out of range.
func checkInterval(cmd *cobra.Command, interval time.Duration) error {
	if cmd.Flags().Changed("interval") && (interval < leastInterval || interval > maxInterval) {
		return inputf("%s: --interval %v is out of range; use %v to %v", cmd.Name(), interval, leastInterval, maxInterval)
	}
	return nil
}

func (e *env) show(want filterRules, search bool, o showOptions) error {
	if o.sort == "use" && o.interval == 0 && !o.shadows {
		o.interval = usualInterval
	}
	rules, err := e.measured(&want, search, o.interval, measure.Details{
		Sentences: e.json || o.sentences, Buckets: o.buckets, Active: o.wide || o.buckets, Affected: e.json || o.shadows, Sharers: o.tree,
		PoolRates: !o.tree && !o.names,
	})
	if rules == nil {
		return err
	}
	found := len(rules)
	if want.lost && !e.json {
		return errDegraded // there may be rules
	}
	if o.shadows {
		rules = rules.WithShadow()
	}
	if o.names && found > 0 {
		return errors.Join(e.showNames(rules, o), err)
	}
	rules.Sort(o.sort, o.shadows)
	pools, others := rules.Split()
	of, ofPools := len(others), len(pools)
	switch {
	case o.buckets:
		of = rules.KeepFullest(o.top)
	case o.tree && o.top > 0:
		rules = rules.KeepTop(o.top)
	case o.top > 0:
		pools, others = pools[:min(o.top, ofPools)], others[:min(o.top, of)]
		rules = slices.Concat(pools, others)
	}
	// The state is closed, so that nobody waits for the reader of a long answer.
	written := e.print(rules, func(w io.Writer) error {
		switch {
		case found == 0:
			says := want.none()
			if says != noRules && !want.pools {
				says += "; " + e.suggest("show") + " lists all rules"
			}
			_, err := fmt.Fprintln(w, says)
			return err
		case o.tree:
			return rules.Tree(w, found, o.wide, e.columns)
		case o.shadows:
			return rules.Shadows(w, of+ofPools, e.columns)
		case o.buckets:
			return rules.BucketsText(w, of, e.columns)
		case o.sentences:
			return e.sentences(rules)(w)
		case of+ofPools == 1 && want.isSingle() && !o.wide:
			return rules[0].Detail(w)
		}
		return report.Table{
			Pools: pools, Rules: others, OfPools: ofPools, Of: of, Wide: o.wide, Excess: o.sort == "excess", Width: e.columns,
		}.Text(w)
	})
	if written != nil {
		return e.degraded("show: done, but the answer could not be written: %w", written)
	}
	if want.lost {
		return errDegraded
	}
	return err
}

// measured is rules, and what they did over an interval unless it is 0.
func (e *env) measured(want *filterRules, search bool, interval time.Duration, read measure.Details) (report.Rules, error) {
	since := func(report.Rules, uint64) {}
	if interval > 0 {
		first := *want
		rules, began, err := e.rules(&first, search, measure.Details{Sharers: read.Sharers})
		if rules == nil {
			return nil, err
		}
		since = measure.Sampled(rules, began)
		if err := e.wait(interval); err != nil {
			return nil, err
		}
	}
	rules, at, err := e.rules(want, search, read)
	since(rules, at)
	return rules, err
}

// showNames shows a line for each name of rules.
func (e *env) showNames(rules report.Rules, o showOptions) error {
	all, _, err := e.rules(&filterRules{}, false, measure.Details{})
	if all == nil {
		return err
	}
	names, unnamed := rules.ByName(all)
	by := o.sort
	if !slices.Contains(report.NameSorts, by) {
		by = "name"
	}
	names.Sort(by)
	of := len(names)
	if o.top > 0 {
		names = names[:min(o.top, of)]
	}
	return e.print(names, func(w io.Writer) error {
		if of == 0 {
			_, err := fmt.Fprintln(w, "no rule has a name")
			return err
		}
		return names.Text(w, rules, of, unnamed, e.columns)
	})
}

// rules are those of a filter, and the time at which they were read. With the error come
// those that could be read, nil if there are none. The filter is resolved.
func (e *env) rules(want *filterRules, search bool, read measure.Details) (rules report.Rules, at uint64, err error) {
	err = e.with(loader.Read, cmp.Or(want.command, "show"), func(n *loader.Namespace) error {
		resolve := want.resolve
		if search {
			resolve = want.search
		}
		if err := resolve(n); err != nil {
			return err
		}
		read.Sentences = read.Sentences || want.isSingle()
		read.Active = read.Active || want.isSingle() || want.pools
		read.At = &at
		found, unread := e.findRules(n, *want, read)
		if len(found) == 0 && unread == nil {
			unread = e.checkThere(n, *want)
		}
		if len(found) == 0 && unread == nil && !want.pools {
			want.lost = e.sayElsewhere(n, *want) && !n.OthersExist()
		}
		if len(found) > 0 || unread == nil {
			rules = found
		}
		return unread
	})
	return rules, at, err
}

// findRules are the rules that pass a filter; never nil, as JSON would
// show that. With the error come those that could be read.
func (e *env) findRules(n *loader.Namespace, want filterRules, read measure.Details) (report.Rules, error) {
	hooks, unread := want.searched(n)
	defer func() { loader.CloseHooks(hooks) }()
	found := want.matches(hooks)
	if read.Sharers {
		pools := poolsOf(n)
		hooks, found = append(hooks, pools...), withPools(found, pools)
	}
	rules, err := read.Rows(found)
	confirm, by := e.suggest("confirm"), measure.MadeBy(n.Pending())
	for i := range rules {
		rules[i].Confirm, rules[i].MadeBy = confirm, by
	}
	return rules, errors.Join(err, unread)
}
