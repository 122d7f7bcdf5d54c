package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/top"
	"github.com/shapectl/shapectl/pkg/loader"
)

type topOptions struct {
	interval time.Duration
	by, sort string
	once     bool
	top      int // 0 for all
	rtt      bool
	oneIn    uint32
}

const (
	leastTopInterval = 100 * time.Millisecond
	usualRTTInterval = 5 * time.Second
	onceInterval     = 250 * time.Millisecond
)

// topViews are what --by takes, and lookViews those of them that look at packets.
var (
	lookViews = []string{"host", "flow"}
	topViews  = slices.Concat(live.Views, lookViews)
)

// looks reports whether packets are looked at.
func (o *topOptions) looks() bool { return o.rtt || slices.Contains(lookViews, o.by) }

func topCommand(e *env) *cobra.Command {
	o := topOptions{interval: usualInterval, oneIn: 1, by: live.Views[0], sort: live.Orders[0]}
	var plan string
	cmd := &cobra.Command{
		Use:   "top [DEV [ingress|egress [CIDR|any]] | ADDRESS|CIDR|NAME|PLAN [ingress|egress]] [flags]",
		Short: "Watch what rules, pools, hosts and flows use and drop now",
		Long: `Watch what rules and pools use and drop now. The rule that drops most comes first, then the rules nearest to their
rate. Arguments choose rules as in 'shapectl show'; the pools of these rules are shown, too.

--once prints one table after one interval. -j prints a line of JSON for each interval, or one document with --once;
rules have the keys of 'shapectl show -j'. The screen needs a terminal: without one, or with TERM=dumb, use --once or
-j. NO_COLOR turns colours off.

Rows with ! drop packets now: rules, and pools that refuse packets themselves. X marks rules that are not in force. USE is
the rate of packets that passed, OF RATE is USE in percent of the rate. DROPS is the rate of dropped packets, and DROPPED
their share of all packets. LEVEL is how full the bucket is, or the fullest one of many. LAST MINUTE is USE, where a full
cell is the rate; without a shared rate, it is the highest use.

Press ? for the keys, such as enter to see a rule's hosts, and r to change a rate.

--by host and --by flow measure who uses rules: OFFERED is what a host or flow sent, PASSED what left the rule again,
LEVEL and FULL how full its bucket is, if it has one of its own. An ADDRESS stands for the rules that decide over it.

--rtt measures whether limits slow TCP down. It compares round-trip times and retransmissions while a rule is limiting
with those at other times. A rule is limiting until one second after it last dropped, delayed or marked a packet. If
each host has its own bucket, this applies to each host. LIMITED and OTHERWISE are median round-trip times between the
device and the receivers, including the delay in the rule's queue; P95 is the 95th percentile. SENDER is the median
between the device and the senders. RESENT is the share of packets with payload that were sent again. For a single
rule, its hosts are listed, too.

--by host, --by flow and --rtt attach programs that look at packets, only while the command runs. They need Linux 6.6.`,
		Example: `  shapectl top
  shapectl top --by tree
  shapectl top eth0 egress --sort use
  shapectl top alice --by host
  shapectl top 10.0.3.7 egress --by flow --once
  shapectl top alice --rtt --once --interval 30s
  shapectl top --once -j`,
		Args:              args(0, 3),
		ValidArgsFunction: e.completeNamed(true, nil),
		RunE: func(cmd *cobra.Command, given []string) error {
			set := cmd.Flags().Changed
			least := leastTopInterval
			if o.looks() {
				least = leastInterval
			}
			switch {
			case o.interval < least || o.interval > maxInterval:
				return inputf("top: --interval %v is out of range; use %v to %v", o.interval, least, maxInterval)
			case set("top") && o.top < 1:
				return inputf("top: --top %d shows nothing; use 1 or more", o.top)
			case o.rtt && (set("by") || set("sort") || set("top")):
				return inputf("top: --rtt has a table of its own; leave --by, --sort and --top out")
			case set("one-in") && !o.rtt:
				return inputf("top: --one-in needs --rtt")
			case !isOneIn(o.oneIn):
				return inputf("top: --one-in %d is out of range; use a power of two up to 65536", o.oneIn)
			case o.rtt && !set("interval"):
				o.interval = usualRTTInterval
			case o.once && !set("interval") && !o.looks():
				o.interval = onceInterval
			}
			want, err := parseTarget("top", "", given)
			if err != nil {
				return err
			}
			want.plan = plan
			return e.top(want, o)
		},
	}
	flags := cmd.Flags()
	flags.Var(choice(&o.by, topViews...), "by", "`view`: "+strings.Join(topViews, ", "))
	flags.Var(choice(&o.sort, live.Orders...), "sort", "`order`: "+strings.Join(live.Orders, ", "))
	flags.BoolVar(&o.rtt, "rtt", false, "measure round-trip times and retransmissions of TCP")
	flags.Uint32Var(&o.oneIn, "one-in", o.oneIn, "follow one flow in `N` for that, a power of two; for busy devices")
	flags.Var(duration(&o.interval), "interval", "measure over this `time` (default: 1s; 250ms with --once; 5s with --rtt)")
	flags.BoolVar(&o.once, "once", false, "print one table and exit")
	flags.IntVar(&o.top, "top", 0, "with --once or -j, only the first `N` rows; of a tree, in each pool")
	flags.StringVar(&plan, "plan", "", "only rules that follow this plan")
	e.completesValue(cmd, "plan", e.plans)
	return cmd
}

// isOneIn reports whether one flow in n can be followed: n is a power of two up to 65536.
func isOneIn(n uint32) bool { return bits.OnesCount32(n) == 1 && n <= 1<<16 }

func (e *env) top(chosen target, o topOptions) error {
	onScreen := !o.once && !e.json
	if onScreen {
		if err := e.checkScreen(); err != nil {
			return err
		}
	}
	options, err := e.options()
	if err != nil {
		return err
	}
	s := &topSource{e: e, reader: &live.Reader{Options: options, Netns: e.netns}, arguments: chosen, topOptions: o, onScreen: onScreen}
	if first, err := s.Read(); first == nil { // before there is a screen: an error is a line
		return err
	}
	by := o.by
	if o.rtt {
		by = "rtt"
	}
	if onScreen {
		screen := top.Options{Host: hostname(), Interval: o.interval, By: by, Sort: o.sort}
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
	view := live.View{By: o.by, Sort: o.sort, Top: o.top, Chosen: s.Chosen}
	var failed error
	print := func(answer any, text func(io.Writer, int) error, err error) {
		if err != nil {
			err = e.degraded("top: %w", err)
		}
		written := error(nil)
		if o.once {
			written = e.print(answer, func(w io.Writer) error { return text(w, e.columns) })
		} else {
			written = json.NewEncoder(e.out).Encode(answer)
		}
		if failed = errors.Join(written, err); failed != nil || o.once {
			stop()
		}
	}
	if o.looks() {
		err := s.Look(ctx, top.Subject{By: by}, func(seen top.Seen) {
			if seen.RTTs != nil {
				print(seen.RTTs, seen.RTTs.Text, seen.Err)
				return
			}
			talkers := report.NewTalkers(o.interval, seen.Uses, view)
			print(talkers, talkers.Text, seen.Err)
		})
		return errors.Join(err, failed)
	}
	tick := time.NewTicker(o.interval)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		r, err := s.Read()
		if r == nil {
			return err
		}
		var answer any
		if e.json {
			answer = report.NewTop(r, view)
		}
		print(answer, func(w io.Writer, width int) error { return report.TopText(w, r, view, width) }, err)
	}
	return failed
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
	arguments target
	topOptions
	onScreen bool
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
		return nil, fmt.Errorf("top: %w", s.e.advise(err))
	}
	if last := s.all.Swap(r); s.arguments.isSome() && (last == nil || r.Scene() != last.Scene()) {
		found, _, wrong := s.find(r)
		if wrong != nil && last == nil {
			return nil, wrong
		}
		chosen := map[live.Key]bool{} // rules that have gone since are none
		for _, it := range withPools(found) {
			chosen[it.Key] = true
		}
		s.chosen.Store(&chosen)
	}
	return r, err
}

// find finds the rules and pools that the arguments choose, and what these mean.
func (s *topSource) find(r *live.Reading) (found []*live.Item, want target, err error) {
	if want = s.arguments; !want.isSome() {
		return r.Once(), want, nil
	}
	e, _ := s.e.inner()
	err = e.with(loader.Read, "top", func(n *loader.Namespace) error {
		seen, err := e.find(n, r, nil, &want)
		if seen != nil {
			found = seen.found
		}
		return err
	})
	return found, want, err
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

// Run implements top.Source.
func (s *topSource) Run(args ...string) (string, bool) {
	e, text := s.e.inner()
	code := e.run(args)
	return text.String(), code == exitDone
}
