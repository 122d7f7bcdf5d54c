package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/explain"
	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// explainInterval is how long explain counts packets: long enough to tell what limits a rule of some packets a second.
const explainInterval = 500 * time.Millisecond

func explainCommand(e *env) *cobra.Command {
	var q explain.Question
	var flow, dscp string
	cmd := &cobra.Command{
		Use:   "explain [DEV [ingress|egress]] ADDRESS | NAME [ingress|egress] [flags]",
		Short: "Say whether packets of an address pass now, what limits them, and why",
		Long: `Say whether packets to and from an address pass now, and why. Nothing is charged or changed. NAME is the exact
name of rules, or an ID in parentheses at its end, such as 10001 of 'School (10001)'; explain then takes an address from
each of their networks. If nothing but pools limits these rules, and these pools limit no others, or if a pool has the
name, and no rule, explain says what limits the pools: themselves, or one above. It shows what each uses, borrows and
refuses, and who uses most within a pool. For a device, it explains the pools of its own, such as tap0 and tap0 ingress,
or else its rules for any. With --flow, it is always about a packet.

First comes the answer: whether a packet passes, which rule or pool decides, and how long the packet waits, or until it
would pass. Then, for each device on the path: the rule, its bucket, what it dropped so far, the pools above it with
their levels and shares, and the programs that run there. What repeats is said once; -j says all. Where there are pools,
explain counts packets for the --interval, and names the rule or pool that limited them meanwhile. Of a rule with
colours, the answer has the colour of the packet; if the rule is colour-aware, give the packet's --dscp.

explain finds the devices from the routes, also below a bridge, a VLAN or a veth pair. With DEV, it looks at that
device alone, and so it does for a rule with NAME whose device is not on the routes. Without a route, as on a bridge,
it looks at each device that has a rule for ADDRESS. With --flow, both ends of the packets are known, and ADDRESS may
be left out; of rules with NAME, explain takes those for the flow. Give --flow where each flow has a bucket or a share.
With --order sparse-first and without --flow, the answer is about a flow that has packets queued already.

nftables chains are shown if they belong to the device itself. The other netfilter hooks run between ingress and
egress.

Exit codes: 0 done, whether packets pass or not; 4 a rule for the packets is not in force.`,
		Example: `  shapectl explain 10.0.0.7
  shapectl explain alice
  shapectl explain ap-1
  shapectl explain eth0 egress 10.0.0.7 --bytes 100
  shapectl explain --flow tcp,10.0.0.7:40000,192.0.2.1:443`,
		Args:              args(0, 3),
		ValidArgsFunction: e.complete(e.labels(false), directions),
		RunE: func(cmd *cobra.Command, given []string) (err error) {
			if q.Bytes > model.MaxPacket || cmd.Flags().Changed("bytes") && q.Bytes == 0 {
				return inputf("explain: a packet of %d bytes is out of range; use 1 to %d", q.Bytes, model.MaxPacket)
			}
			if q.DSCP, err = policy.ParseDSCP(dscp); err != nil {
				return inputf("explain: %w", err)
			}
			if flow != "" {
				f, err := maps.ParseFlow(flow)
				if err != nil {
					return inputf("explain: %w", err)
				}
				q.Flow = &f
			}
			q.Netns = e.netns
			if err := parseQuestion(&q, given); err != nil {
				return err
			}
			if err := checkInterval(cmd, q.Interval); err != nil {
				return err
			}
			return e.explain(q)
		},
	}
	cmd.Flags().Var(byteCount(&q.Bytes), "bytes", "bytes of the packet at layer 2 (default: full)")
	q.Interval = explainInterval
	cmd.Flags().Var(duration(&q.Interval), "interval", "count packets in pools over this `time` (default: 500ms)")
	cmd.Flags().StringVar(&flow, "flow", "", "the packets' `flow`: protocol,source:port,destination:port")
	cmd.Flags().StringVar(&dscp, "dscp", policy.DSCPName(0), "the packets' DSCP: `name` or number, for rules that are colour-aware")
	return cmd
}

// parseQuestion reads [DEV [ingress|egress]] ADDRESS|NAME, or NAME ingress|egress.
func parseQuestion(q *explain.Question, given []string) (err error) {
	if len(given) == 0 {
		if q.Flow == nil {
			return inputf("explain: the address is missing; give one such as 10.0.0.7, or --flow")
		}
		return nil
	}
	last := len(given) - 1
	if last == 1 && isName(given[0]) {
		if d, err := policy.ParseDirection(given[1]); err == nil {
			q.Name, q.Direction = given[0], &d
			return nil
		}
	}
	where, err := parseTarget("explain", "", given[:last])
	if err != nil {
		return err
	}
	q.Device, q.Direction = where.name, where.direction
	if mark, _ := policy.ParsePrefix(given[last]); policy.IsMark(mark) {
		q.Name, q.Network = policy.CIDR(mark), mark
		return nil
	}
	if isName(given[last]) {
		q.Name = given[last]
		return nil
	}
	if q.Address, err = parseAddress(given[last]); err != nil {
		return err
	}
	if q.Flow != nil && q.Address != q.Flow.Src && q.Address != q.Flow.Dst {
		return inputf("explain: the flow goes from %s to %s; %s is neither, leave it out", q.Flow.Src, q.Flow.Dst, q.Address)
	}
	return nil
}

func parseAddress(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" || a.Is4In6() {
		err = fmt.Errorf("%q is not an address; write one such as 10.0.0.7 or 2001:db8::7; 'shapectl show' finds rules by name", s)
		return a, inputf("explain: %w", err)
	}
	return a, nil
}

// isName reports whether a word may be the name of a rule, as it is nothing else.
func isName(s string) bool {
	_, noAddress := netip.ParseAddr(s)
	_, noNetwork := netip.ParsePrefix(s)
	_, noDirection := policy.ParseDirection(s)
	return s != "" && noAddress != nil && noNetwork != nil && noDirection != nil
}

func (e *env) explain(q explain.Question) error {
	doing := "explain " + q.Address.String()
	switch {
	case q.Name != "":
		doing = "explain " + plain.Line(q.Name)
	case !q.Address.IsValid():
		doing = "explain " + q.Flow.String()
	}
	if q.Device != "" {
		doing += " on " + plain.Line(q.Device)
	}
	var pools []string
	err := e.with(loader.Read, doing, func(n *loader.Namespace) (err error) {
		questions := []explain.Question{q}
		if q.Name != "" {
			if questions, pools, err = e.questions(n, q); questions == nil {
				return err
			}
		}
		paths, err := explain.Explain(n, questions...)
		var refused *explain.QuestionError
		switch {
		case errors.Is(err, netinfo.ErrNoDevice):
			return noDevice(q.Device)
		case errors.As(err, &refused):
			return inputError(err)
		case paths == nil:
			return err
		}
		// With the error come the paths that are known.
		if err := errors.Join(e.print(paths, paths.Text), err); err != nil {
			return err
		}
		if !inForce(paths) {
			return errDegraded
		}
		return nil
	})
	if pools != nil && err == nil {
		return e.explainPools(pools, q.Interval)
	}
	return err
}

// poolsNamed are the pools that a question means: the one with that name, and those of the directions of a device.
func poolsNamed(n *loader.Namespace, q explain.Question) (found []string) {
	names := []string{q.Name, q.Name + " " + policy.Ingress.String(), q.Name + " " + policy.Egress.String()}
	if q.Direction != nil {
		names = []string{q.Name + " " + q.Direction.String()}
	}
	for _, name := range names {
		if _, there := findPool(n, name); there {
			found = append(found, name)
		}
	}
	return found
}

// explainPools explains what limits pools.
func (e *env) explainPools(names []string, interval time.Duration) error {
	s, err := e.readRules(&target{command: "explain"}, reads{what: live.What{Sharers: true}, interval: interval})
	if s == nil {
		return err
	}
	pools := make(report.ExplainedPools, len(names))
	for i, name := range names {
		pool := s.Find(live.Key{Pool: name})
		if pool == nil {
			return inputf("pool %s was just deleted", plain.Line(name))
		}
		pools[i] = report.ExplainPool(pool)
	}
	if i := slices.IndexFunc(pools, func(p *report.ExplainedPool) bool { return p.LimitedBy != nil }); i > 0 {
		pools[0], pools[i] = pools[i], pools[0] // what limits is the answer
	}
	if len(pools) == 1 {
		return errors.Join(e.print(pools[0], pools.Text), err)
	}
	return errors.Join(e.print(pools, pools.Text), err)
}

// mostExplained is how many rules somebody reads about at most.
const mostExplained = 100

// questions are those about the networks of the rules with a name or, if none has it, the pools with it.
func (e *env) questions(n *loader.Namespace, q explain.Question) (questions []explain.Question, pools []string, err error) {
	of := target{name: q.Name, direction: q.Direction}
	if q.Device == "" {
		pools = poolsNamed(n, q)
		device := of
		there, err := device.isThere(n)
		switch {
		case there && q.Flow != nil && q.Direction != nil:
			if q.Device, q.Name, q.Address = q.Name, "", q.Flow.Dst; *q.Direction == policy.Ingress {
				q.Address = q.Flow.Src
			}
			return []explain.Question{q}, nil, nil
		case err != nil || there && pools != nil:
			return nil, pools, err
		case there:
			hooks, err := device.hooks(n)
			defer loader.CloseHooks(hooks)
			if hooks == nil && err == nil {
				return nil, nil, inputf("%s", device.none())
			}
			if questions, _, _ = explain.Named(hooks, q); questions != nil {
				return questions, nil, err
			}
			return nil, nil, inputf("the address is missing; give one, such as %s; %s lists what limits it", e.suggest("explain", append(of.words(), "10.0.0.7")...), e.suggest("show", of.words()...))
		}
	}
	hooks, err := target{name: q.Device, direction: q.Direction}.hooks(n)
	defer loader.CloseHooks(hooks)
	questions, own, names := explain.Named(hooks, q)
	switch {
	case own != nil && pools == nil:
		return nil, own, err // what they do says more than the packets of each network
	case len(questions) > mostExplained:
		return nil, nil, inputf("%d rules have that name; explain takes at most %d; %s lists them", len(questions), mostExplained, e.suggest("show", q.Name))
	case questions != nil:
		return questions, nil, nil
	case pools != nil && q.Flow != nil:
		return nil, nil, inputf("a pool has that name, and no rule; what limits a pool does not depend on a flow, so leave --flow out")
	case pools != nil || err != nil:
		return nil, pools, err
	case policy.FindName(q.Name, slices.Values(names)) != "":
		return nil, nil, inputf("the flow goes from %s to %s, and no rule with that name is for that; %s lists its rules", q.Flow.Src, q.Flow.Dst, e.suggest("show", q.Name))
	}
	what := of.what()
	if q.Device != "" {
		what, of.direction = "rule there", nil
		if _, err := device(q.Device); err != nil && hooks == nil {
			return nil, nil, err
		}
	} else if names = withDevices(names); q.Direction == nil {
		names = append(names, poolNames(n)...)
	}
	if of.name = plain.SimilarName(q.Name, names); of.name != "" {
		return nil, nil, missingf("no %s has that name; did you mean %s?", what, e.suggest("explain", of.words()...))
	}
	return nil, nil, missingf("it is not an address, and no %s has that name; %s lists the names", what, e.suggest("show"))
}

// inForce reports whether all rules for the packets are in force.
func inForce(paths []report.Path) bool {
	for _, w := range paths {
		for _, s := range w.Hooks {
			if s.Rule != nil && report.NotInForce(s.Attached) {
				return false
			}
		}
		for _, r := range w.Elsewhere {
			if !r.Attached {
				return false
			}
		}
	}
	return true
}
