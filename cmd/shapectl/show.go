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

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
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

// byDevice is the order of show unless another one is asked for.
const byDevice = "device"

func showCommand(e *env) *cobra.Command {
	o := showOptions{sort: byDevice}
	var plan string
	var pools bool
	cmd := &cobra.Command{
		Use:   "show [DEV [ingress|egress [CIDR|any]] | ADDRESS|CIDR|NAME|PLAN [ingress|egress]] [flags]",
		Short: "Show rules and what happened to their packets",
		Long: `Show rules and what happened to their packets. A device, direction and network name one rule, which is shown in
full. Instead of a device, write an address, a network, or a name:

  ADDRESS   the rules whose network contains it; the first one decides
  CIDR      the rules for it and for parts of it, else the one that contains it
  NAME      the rules with that name or plan, or with a part of it or of the note;
            vm3 is no part of vm30; NAME may be a pattern, whose * also matches /;
            the name of a pool stands for it and for all that is within it;
            the exact name of a rule or pool wins over an address

Columns without values are left out, and on a narrow screen without --wide also others, which a line below names:

  PASSED    since the rule was set
  DROPPED   the share of packets, since then or over the --interval; of a pool, the
            share that all rules within it lost, whoever dropped them; left out
            without --interval if rules were set after the pool or before it
  REFUSED   the share of packets that the pool dropped itself
  EXCESS    the share of packets that were excess or delayed
  USE       the rate that passed over the --interval; OF RATE is its share of the
            rate, if the rule has one bucket
  RATE      5mbit/pool is the rate of the pool, which all within it share
  FULL      how full bucket and queue are; above 100 % while a penalty lasts, after
            a packet larger than the bucket, and while --excess ecn marks packets;
            with --buckets, of the rate, --pps and --new-flows the fullest
  BORROWED  what passed beyond a guarantee
  LEFT      of the quota and its grace; once that is used up, the rate in force. Of
            each host, --buckets lists it

With --names, each name has a line with both directions, summed up. Its RATE is the most that its rules, and the pools
that only it has, let through; POOL is the one above, which it shares with others; LEFT is for the one of its quotas
that is used most. With --tree, each pool comes with all that is within it, in the order of --sort; --top counts in
each pool. With --shadow, use, dropped and excess all sort by WOULD DROP. An argument that matches no device and no
rule is an error (exit code 1).

any stands for 0.0.0.0/0 and ::/0. DEV may be a pattern, see 'shapectl help patterns'.`,
		Example: `  shapectl show eth0
  shapectl show 10.0.3.7
  shapectl show --sort use --top 10
  shapectl show --tree --interval 1s
  shapectl show --names --sort use --top 10
  shapectl show 'tap*' egress --wide
  shapectl show --pools 'home-*' --sort dropped`,
		Args:              args(0, 3),
		ValidArgsFunction: e.completeNamed(true, func() bool { return pools }),
		RunE: func(cmd *cobra.Command, given []string) error {
			if err := o.check(cmd, pools); err != nil {
				return err
			}
			want, err := parseTarget("show", "", given)
			if err != nil {
				return err
			}
			want.plan = plan
			if pools {
				if len(given) > 1 {
					return inputf("show: --pools takes the name of a pool, or a pattern; leave the other arguments out")
				}
				want.kind = kindPool
			}
			return e.show(want, o)
		},
	}
	flags := cmd.Flags()
	flags.Var(duration(&o.interval), "interval", "measure use and drops over this `time`, such as 1s")
	flags.Var(choice(&o.sort, live.Orders...), "sort", "`order`: "+strings.Join(live.Orders, ", ")+"; use measures over 1s unless --interval is given")
	flags.IntVar(&o.top, "top", 0, "show only the first `N` rules, pools or buckets")
	flags.BoolVar(&o.wide, "wide", false, "show all columns")
	flags.BoolVar(&pools, "pools", false, "show only pools: all of them, or with NAME those with this name or pattern")
	flags.StringVar(&plan, "plan", "", "only rules that follow this plan")
	flags.BoolVar(&o.tree, "tree", false, "show pools with all that is within them")
	flags.BoolVar(&o.names, "names", false, "show a line for each name, with both directions")
	flags.BoolVar(&o.sentences, "sentences", false, "describe each rule in a sentence")
	flags.BoolVar(&o.buckets, "buckets", false, "list buckets that are not empty, and how long a packet would wait")
	flags.BoolVar(&o.shadows, "shadow", false, "show what shadow limits would have refused")
	e.completesValue(cmd, "plan", e.plans)
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

func (e *env) show(want target, o showOptions) error {
	if o.sort == "use" && o.interval == 0 && !o.shadows {
		o.interval = usualInterval
	}
	read := reads{
		what:    live.What{Buckets: o.wide || o.buckets || want.kind == kindPool, Sharers: o.wide || o.buckets || o.tree || want.kind == kindPool},
		buckets: o.buckets, affected: e.json || o.shadows, interval: o.interval,
	}
	seen, err := e.readRules(&want, read)
	if seen == nil {
		return err
	}
	if want.lost && !e.json {
		return errDegraded // there may be rules
	}
	found := seen.found
	if o.tree {
		found = withPools(found)
	}
	view := live.View{Sort: o.sort, Top: o.top, Chosen: chosen(found, o.shadows)}
	switch {
	case o.names:
		if view.By = "name"; o.sort == byDevice {
			view.Sort = "name"
		}
	case o.tree:
		view.By = "tree"
	case o.buckets || o.shadows:
		view.Top = 0
	}
	rows, of := seen.Rows(view)
	if o.shadows && slices.Contains([]string{"use", "dropped", "excess"}, o.sort) {
		slices.SortStableFunc(rows, func(a, b live.Row) int {
			return cmp.Compare(b.Shadow.RefusedPercent().Or(0), a.Shadow.RefusedPercent().Or(0))
		})
	}
	if o.shadows && o.top > 0 {
		rows = rows[:min(o.top, len(rows))]
	}
	if want.address.IsValid() && o.sort == byDevice && !o.tree { // those that decide first
		at := map[*live.Item]int{}
		for i, it := range found {
			at[it] = i
		}
		slices.SortStableFunc(rows, func(a, b live.Row) int { return at[a.Item] - at[b.Item] })
	}
	rules, names := report.Rules{}, []report.Named{}
	for i := range rows {
		if rows[i].Name != nil {
			names = append(names, report.NewNamed(&rows[i]))
		} else {
			rules = append(rules, e.rule(seen, rows[i].Item, want, e.json || o.sentences || len(found) == 1))
		}
	}
	var answer any = rules
	switch {
	case o.names:
		answer = names
	case o.buckets:
		of = rules.KeepFullest(o.top, o.sort)
	}
	// The state is closed, so that nobody waits for the reader of a long answer.
	written := e.print(answer, func(w io.Writer) error {
		switch {
		case len(found) == 0:
			says := want.none()
			if says != noRules && want.kind != kindPool {
				says += "; " + e.suggest("show") + " lists all rules"
			}
			_, err := fmt.Fprintln(w, says)
			return err
		case o.names && len(names) == 0:
			_, err := fmt.Fprintln(w, "no rule has a name")
			return err
		case o.names:
			return report.Names(w, slices.DeleteFunc(rows, func(r live.Row) bool { return r.Name == nil }), of-len(rules), len(rules), e.columns)
		case o.tree:
			return report.Tree(w, rows, rules, of, o.wide, e.columns)
		case o.shadows:
			return rules.Shadows(w, of, e.columns)
		case o.buckets:
			return rules.BucketsText(w, o.sort, of, e.columns)
		case o.sentences:
			return e.sentences(rules)(w)
		case len(found) == 1 && want.isSingle() && !o.wide:
			return rules[0].Detail(w)
		}
		return report.Table{Rules: rules, Of: of, Wide: o.wide, Excess: o.sort == "excess", Width: e.columns}.Text(w)
	})
	if written != nil {
		return e.degraded("show: done, but the answer could not be written: %w", written)
	}
	if want.lost {
		return errDegraded
	}
	return err
}

// chosen says which items were found; with shadows, only those that have one.
func chosen(found []*live.Item, shadows bool) func(*live.Item) bool {
	there := map[*live.Item]bool{}
	for _, it := range found {
		there[it] = !shadows || it.Shadow != nil
	}
	return func(it *live.Item) bool { return there[it] }
}

// reads are what to read of rules.
type reads struct {
	what     live.What
	buckets  bool // that are not empty
	affected bool // the hosts that shadows would have affected
	interval time.Duration
	reader   *live.Reader // that has read the rules before; nil for none
}

// seen is what was read, and what of it was asked for.
type seen struct {
	*live.Reading
	found    []*live.Item
	buckets  map[*live.Item][]live.Bucket
	affected map[uint32][]maps.Affected
	madeBy   string // who made the change that is pending
}

// readRules reads what passes a filter, which is resolved. With the error comes what could be read, nil for nothing.
func (e *env) readRules(want *target, read reads) (out *seen, err error) {
	reader := cmp.Or(read.reader, new(live.Reader))
	if read.interval > 0 {
		first := *want
		if once, err := e.readRules(&first, reads{reader: reader}); once == nil {
			return nil, err
		}
		if err := wait(e.context(), read.interval); err != nil {
			return nil, err
		}
	}
	err = e.with(loader.Read, cmp.Or(want.command, "show"), func(n *loader.Namespace) error {
		all, unread := reader.In(n, live.What{})
		if all == nil {
			return unread
		}
		if out, err = e.find(n, all, unread, want); out == nil {
			return err
		}
		if want.isSingle() {
			read.what.Buckets, read.what.Sharers = true, true
		}
		return errors.Join(err, out.details(n, read))
	})
	return out, err
}

// find finds what passes a filter, which is resolved, in a reading of a namespace. unread is why some of it is missing. With the
// error comes what was found, nil for nothing.
func (e *env) find(n *loader.Namespace, all *live.Reading, unread error, want *target) (*seen, error) {
	if want.name != "" && want.kind != kindPool {
		resolve := want.resolve
		if want.networks == nil {
			resolve = func(n *loader.Namespace) error { return want.search(n, all) }
		}
		if err := resolve(n); err != nil {
			return nil, err
		}
	}
	s := &seen{Reading: all, found: want.matches(all), madeBy: report.MadeBy(n.Pending())}
	if len(s.found) > 0 {
		return s, unread
	}
	if unread == nil {
		unread = e.checkThere(all, *want)
	}
	if unread != nil {
		return nil, unread
	}
	if want.kind != kindPool {
		found, others := e.sayElsewhere(n, *want)
		want.lost = found && !others
	}
	return s, nil
}

// details reads what goes beyond the figures.
func (s *seen) details(n *loader.Namespace, read reads) error {
	store, _, err := n.Maps()
	if store == nil {
		return err
	}
	defer store.Close()
	s.Add(store, read.what)
	if read.buckets {
		s.buckets = map[*live.Item][]live.Bucket{}
		for i, of := range live.Buckets(store, s.found) {
			s.buckets[s.found[i]] = of
		}
	}
	if read.affected {
		var entries []maps.Entry
		for _, it := range s.found {
			entries = append(entries, *it.Entry)
		}
		s.affected, err = store.Affected(entries)
	}
	return err
}

// rule is all that was read of an item.
func (e *env) rule(s *seen, it *live.Item, want target, sentence bool) report.Rule {
	r := report.Rule{Item: it}
	if sentence {
		r.Sentence = it.Sentence()
	}
	if s.buckets != nil {
		r.Buckets = append([]live.Bucket{}, s.buckets[it]...)
	}
	if r.Shadow != nil {
		r.Shadow.Affected = live.AffectedOf(s.affected[it.ID])
	}
	if want.address.IsValid() && !it.IsPool() {
		first := slices.IndexFunc(s.found, func(other *live.Item) bool { return other.Place == it.Place })
		r.Decides = new(s.found[first] == it)
	}
	r.Confirm, r.MadeBy = e.suggest("confirm"), s.madeBy
	return r
}
