package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/replay"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/serve/page"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/policy"
)

// policyFlags select the rules of a policy file.
type policyFlags struct {
	file      string
	device    string
	direction policy.Direction
}

type replayOptions struct {
	trace    string
	networks []netip.Prefix
	limit    limitFlags
	policy   policyFlags
	matched  bool   // addresses decide: by --match, --each or --order
	engine   string // kernel or model
	plot     string
	summary  bool
}

func replayCommand(e *env) *cobra.Command {
	o := replayOptions{engine: "model"}
	cmd := &cobra.Command{
		Use:   "replay TRACE [CIDR|any...] --rate RATE | --policy FILE [flags]",
		Short: "Show what a limit would do to recorded traffic",
		Long: `Show what a limit would do to recorded traffic. No device is touched.

TRACE is a pcap or a CSV of time_ns,bytes. It may be compressed with gzip; - is standard input. Each
CIDR is a rule with the same limit; without one, it is any: 0.0.0.0/0 and ::/0, each with a bucket of its own.
Packets of a CSV have no addresses: they share one bucket and are one sharer, and all of them allow ECN. If the
header of a CSV has a column dscp, that is the DSCP of each packet, such as AF12 or 12. Packets count with their length
on the wire, even if the capture stored only their first bytes.

With --policy, rules draw from the pools of the file. Packets of other devices and directions are not in the trace,
so they do not use the pools.

--engine model computes verdicts in user space. --engine kernel runs the programs of the data path on the clock of
the trace, and needs the same permissions as set.

With -j, each packet is a line: time_ns, bytes (as counted), verdict (pass, drop, mark or delay), depart_ns
(null if dropped), level_bytes (of the bucket after it), conforms, and in captures the rule and its bucket key. With
an algorithm with colours a packet has its colour (green, yellow or red; only green ones conform), second_level_bytes
(of the bucket of the EBS or PBS) and dscp_out (after the action for its colour; null if dropped). With fair shares
a packet has its sharer, and with pools the rule or pool that refused it (refused_by) and the one whose guarantee let
it pass (guaranteed_by).
With --summary, one object describes the whole trace.`,
		Example: `  shapectl replay dump.pcap 10.0.0.0/24 --rate 10mbit --each host
  shapectl replay dump.pcap --policy policy.yaml --device eth0 --direction egress
  tcpdump -i eth0 -s 96 -w - | shapectl replay - any --match src --rate 1gbit`,
		Args: args(1, 1<<16),
		ValidArgsFunction: func(_ *cobra.Command, given []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(given) == 0 {
				return nil, cobra.ShellCompDirectiveDefault
			}
			return nil, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, given []string) error {
			o.trace = given[0]
			o.matched = cmd.Flags().Changed("match") || o.limit.Each.Kind != policy.EachAll || o.limit.Order != policy.FIFO
			for _, s := range given[1:] {
				given, err := policy.ParseNetworks(s)
				if err != nil {
					return inputf("replay: %w", err)
				}
				for _, p := range given {
					if slices.Contains(o.networks, p) {
						return inputf("replay: network %s is given twice", policy.CIDR(p))
					}
				}
				o.networks = append(o.networks, given...)
			}
			switch {
			case e.netns != "":
				return inputf("replay: -n has no meaning here; leave it out")
			case o.policy.file != "":
				if err := o.policy.check(cmd.Flags(), o.networks); err != nil {
					return inputf("replay: %w", err)
				}
			case o.policy.device != "" || cmd.Flags().Changed("direction"):
				return inputf("replay: --device and --direction need --policy FILE; add it, or leave them out")
			case !cmd.Flags().Changed("rate") && o.limit.Also == policy.Also{}:
				return inputf("replay: --rate is missing; say how much, such as --rate 10mbit")
			case o.limit.Within != "":
				return inputf("replay: --within needs the pools of a policy; leave it out, or use --policy FILE")
			case o.limit.Rate == policy.Unlimited:
				return inputf("replay: rate unlimited would pass everything; write a rate such as 10mbit, or leave --rate out beside --pps, --new-flows or --quota")
			}
			if err := o.checkPlot(cmd.Flags().Changed("plot")); err != nil {
				return inputf("replay: %w", err)
			}
			return e.replay(o)
		},
	}
	o.limit.add(cmd.Flags(), "dst", func(o *policy.Option) bool { return !o.Label && !o.PoolOnly && o.Name != "shadow" })
	cmd.Flags().StringVar(&o.policy.file, "policy", "", "take the rules of this policy `file`")
	must(cmd.MarkFlagFilename("policy", "yaml", "yml"))
	cmd.Flags().StringVar(&o.policy.device, "device", "", "for this `device`")
	once(cmd.Flags(), &o.policy.direction, "direction", "and for this direction")
	cmd.Flags().Lookup("direction").DefValue = "" // it has none
	once(cmd.Flags(), choice(&o.engine, "model", "kernel"), "engine", "what computes the verdicts")
	cmd.Flags().StringVar(&o.plot, "plot", "", "draw plots of rates and levels into this `file` (.html)")
	must(cmd.MarkFlagFilename("plot", "html"))
	cmd.Flags().BoolVar(&o.summary, "summary", false, "with -j, one object instead of a line per packet")
	return cmd
}

// checkPlot reports errors of --plot before a long run, not after it.
func (o *replayOptions) checkPlot(given bool) error {
	if !given {
		return nil
	}
	if filepath.Ext(o.plot) != ".html" {
		return fmt.Errorf("cannot draw %q; name the file .html", o.plot)
	}
	_, err := os.Stat(filepath.Dir(o.plot))
	return cmp.Or(err, checkRegular(o.plot))
}

func (e *env) replay(o replayOptions) error {
	file, err := e.open(o.trace)
	if err != nil {
		return inputf("replay: %w", err)
	}
	defer file.Close()
	ctx, stop := signal.NotifyContext(e.context(), os.Interrupt)
	defer stop()
	in, err := trace.Open(interruptible(ctx, file))
	if err == nil {
		err = e.replayAll(ctx, o, in)
	} else if ctx.Err() == nil {
		err = inputError(err)
	}
	switch {
	case err == nil || errors.Is(err, errDegraded): // which was told
		return err
	case errors.Is(err, context.Canceled):
		return e.degraded("replay %s: interrupted after 0 packets", inputName(o.trace))
	}
	return fmt.Errorf("replay %s: %w", inputName(o.trace), err)
}

// replayAll replays a trace and reports what happened to its packets, also if the trace ends early.
func (e *env) replayAll(ctx context.Context, o replayOptions, in *trace.Reader) error {
	limits, err := o.limits(in)
	if o.policy.file != "" {
		limits, err = e.policyLimits(o.policy, in)
	}
	if err != nil {
		return inputError(err)
	}
	var engine replay.Engine = replay.NewModel(limits)
	if o.engine == "kernel" {
		engine, err = replay.NewKernel(limits)
	}
	if errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w; run as root, with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN, or use --engine model", err)
	}
	if err != nil {
		return err
	}
	defer engine.Close()
	run := replay.NewRun(engine, limits)
	var lines *bufio.Writer // nil unless each packet has a line
	each := func(replay.Result) bool { return true }
	if e.json && !o.summary {
		lines = bufio.NewWriterSize(e.out, 1<<16)
		encoder := json.NewEncoder(lines)
		each = func(r replay.Result) bool { // Flush returns the same error
			return encoder.Encode(report.NewPacket(r, limits, in.Addressed)) == nil
		}
	}
	ended := e.offerAll(ctx, run, in, each)
	if lines != nil { // also before an error
		err = lines.Flush()
	}
	early := errors.As(ended, new(trace.DamagedError)) || errors.Is(ended, context.Canceled)
	if ended != nil && !early {
		return errors.Join(ended, err)
	}
	answer := report.NewReplay(limits, run.Summary)
	answer.Trace, answer.Engine, answer.Complete = inputName(o.trace), o.engine, !early
	for _, r := range slices.Concat(limits.Rules, limits.Pools) {
		sentence := r.Says(limits.Match)
		if !in.Addressed {
			sentence = "the trace as a whole gets " + r.Gets()
			answer.MostExcess = nil
		}
		answer.Sentences = append(answer.Sentences, sentence)
	}
	if lines == nil {
		err = e.print(answer, answer.Text)
	}
	if err != nil {
		return e.degraded("replay %s: the answer could not be written: %w", answer.Trace, err)
	}
	if o.plot != "" {
		if err := o.draw(run.Chart, answer.Sentences); err != nil {
			return e.degraded("replay %s: the plots could not be drawn: %w", answer.Trace, err)
		}
	}
	if errors.Is(ended, context.Canceled) {
		return e.degraded("replay %s: interrupted after %d packets", answer.Trace, run.Packets())
	} else if early {
		return e.degraded("replay %s: %w; %d packets before that were replayed", answer.Trace, ended, run.Packets())
	}
	return nil
}

// offerAll offers all packets, until each returns false. It returns nil at the end of the trace.
func (e *env) offerAll(ctx context.Context, run *replay.Run, in *trace.Reader, each func(replay.Result) bool) error {
	for p, n := (trace.Packet{}), 0; ; n++ {
		if n%1024 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		switch err := in.Next(&p); {
		case err == nil:
		case err == io.EOF:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.As(err, new(trace.DamagedError)):
			return err
		default:
			return inputError(err)
		}
		if result, err := run.Offer(&p); err != nil || !each(result) {
			return err
		}
	}
}

// inputName is the name of an input in messages.
func inputName(name string) string {
	if name == "-" {
		return "standard input"
	}
	return name
}

// open opens an input.
func (e *env) open(name string) (io.ReadCloser, error) {
	if name == "-" {
		return io.NopCloser(e.in), nil
	}
	return os.Open(name)
}

// interruptible reads until ctx is done. It also ends a read that waits for data.
func interruptible(ctx context.Context, from io.Reader) io.Reader {
	r, w := io.Pipe()
	go func() {
		_, err := io.Copy(w, from)
		w.CloseWithError(err)
	}()
	context.AfterFunc(ctx, func() { w.CloseWithError(context.Canceled) })
	return r
}

// limits are the rules of the flags, for the link of the trace.
func (o *replayOptions) limits(in *trace.Reader) (replay.Limits, error) {
	l := replay.Limits{Match: o.limit.match}
	networks := o.networks
	switch {
	case bool(o.limit.NAT):
		return l, errors.New("a trace does not tell which hosts are behind NAT; leave --nat out")
	case in.Addressed && len(networks) == 0:
		networks, _ = policy.ParseNetworks("any")
	case !in.Addressed && (len(networks) > 0 || o.matched):
		return l, errors.New("packets of a CSV have no addresses; leave CIDR, --each, --order and --match out, or replay a pcap")
	case bool(o.limit.Colours.Aware) && !in.HasDSCPs:
		return l, errors.New("packets of a CSV have a colour only with a column dscp; add it, or leave --colour-aware out")
	case slices.ContainsFunc(networks, policy.IsMark):
		return l, errors.New("a trace does not tell of marks and VLANs; name a network instead")
	case !in.Addressed:
		networks = []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0)}
	}
	for _, p := range networks {
		r, err := o.limit.Tiny(p)
		if err != nil {
			return l, err
		}
		l.Rules = append(l.Rules, r.On(in.L2Bytes))
	}
	return l, nil
}

// check refuses flags that --policy excludes.
func (p policyFlags) check(given *pflag.FlagSet, networks []netip.Prefix) error {
	if len(networks) > 0 {
		return errors.New("the networks are those of the policy; leave CIDR out")
	}
	if p.device == "" || !given.Changed("direction") {
		return errors.New("--policy needs --device and --direction")
	}
	own := []string{"policy", "device", "direction", "engine", "plot", "summary", "json"}
	var other error
	given.Visit(func(f *pflag.Flag) {
		if !slices.Contains(own, f.Name) {
			other = fmt.Errorf("the limits are those of the policy; leave --%s out", f.Name)
		}
	})
	return other
}

// policyLimits are the rules of a policy file for the link of the trace, without their shadows, and their pools, without
// clusters: a trace has no leases.
func (e *env) policyLimits(p policyFlags, in *trace.Reader) (l replay.Limits, err error) {
	f, _, err := e.readPolicy(p.file)
	if err != nil {
		return l, err
	}
	if !in.Addressed {
		return l, errors.New("packets of a CSV have no addresses for the rules of a policy; replay a pcap")
	}
	device := policyfile.Device{Name: p.device, L2Bytes: in.L2Bytes}
	tables, err := f.For(device)
	if err != nil {
		return l, err
	}
	own, err := f.OwnPools(device)
	if err != nil {
		return l, err
	}
	hosts, err := f.HostsOf(device)
	if err != nil {
		return l, err
	}
	if slices.ContainsFunc(hosts, func(h policyfile.Host) bool { return h.Direction == p.direction }) {
		e.say("shapectl: replay: hosts with a MAC address are left out: which addresses they had then is not known")
	}
	for _, t := range tables {
		if t.Direction == p.direction {
			l.Match = t.Match
			for _, r := range t.Rules {
				r.Shadow = policy.Shadow{}
				l.Rules = append(l.Rules, r)
			}
		}
	}
	if l.Rules == nil {
		return l, fmt.Errorf("%s has no rules for %s %s", p.file, p.device, p.direction)
	}
	l.Pools = poolsAbove(l.Rules, policy.Table{Rules: append(f.Pools().Rules, own...)})
	nat, marks := false, false
	for _, rules := range [][]policy.Rule{l.Rules, l.Pools} {
		for i := range rules {
			nat, rules[i].NAT = nat || rules[i].NAT, false
			marks = marks || policy.IsMark(rules[i].Prefix)
			rules[i].Cluster, rules[i].Adapt = policy.Cluster{}, policy.Adapt{}
		}
	}
	if nat {
		e.say("shapectl: replay: hosts have their addresses of the trace, which does not tell of NAT")
	}
	if marks {
		e.say("shapectl: replay: rules for marks and VLANs match nothing, because a trace does not tell of these")
	}
	return l, nil
}

// poolsAbove are the pools that rules draw from, those above others first.
func poolsAbove(rules []policy.Rule, pools policy.Table) (above []policy.Rule) {
	tree, nodes := policy.NewTree([]policy.Table{pools}), map[*policy.Node]bool{}
	for _, r := range rules {
		for n := tree.Find(string(r.Within)); n != nil && !nodes[n]; n = n.Above {
			nodes[n] = true
		}
	}
	for _, n := range slices.SortedFunc(maps.Keys(nodes), func(a, b *policy.Node) int {
		return cmp.Or(cmp.Compare(a.Depth, b.Depth), cmp.Compare(a.Pool.Label.Name, b.Pool.Label.Name))
	}) {
		above = append(above, *n.Pool)
	}
	return above
}

// draw draws a chart, with the sentences of the first rules as its title.
func (o *replayOptions) draw(c *replay.Chart, sentences []string) error {
	const room = 3
	if n := len(sentences); n > room {
		sentences = append(slices.Clone(sentences[:room-1]), fmt.Sprintf("and %d more", n-room+1))
	}
	charts := []map[string]any{{"name": "rate", "panel": c.Rates(replay.MostBins)}, {"name": "level", "panel": c.Levels()}}
	return writeFile(o.plot, func(w io.Writer) error { return page.WriteChart(w, inputName(o.trace), sentences, charts) })
}
