package main

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/explain"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func askCommand(e *env) *cobra.Command {
	var p packetFlags
	cmd := &cobra.Command{
		Use:   "ask DEV ingress|egress ADDRESS | ADDRESS|NAME [ingress|egress] [flags]",
		Short: "Ask whether a packet would pass now",
		Long: `Ask whether a packet to or from an address would pass now, and how long it would wait.

The answer has the rule, the level of its bucket and of the pools above, and the delay of the packet or the time
until it would conform. It names the rule or pool that would refuse the packet, and says when each pool has room.
Nothing is charged or changed.

Without DEV, rules must match the address on one device and in one direction only; else the error lists what to ask.
So it is with NAME, the exact name of rules: one of them must be for a single address, or for the flow.

Of a rule with colours, the answer has the colour that the packet would get, what happens to it, and both buckets. If
the rule is colour-aware, say by --dscp with which DSCP the packet comes.

Give --flow where each flow has a bucket or a share. With --order sparse-first, the answer without --flow is about a
flow that already has packets in the queue.`,
		Example: `  shapectl ask 10.0.0.7 egress
  shapectl ask eth0 egress 10.0.0.7
  shapectl ask eth0 egress 10.0.0.7 --flow udp,192.0.2.1:5000,10.0.0.7:53`,
		Args:              args(1, 3),
		ValidArgsFunction: e.labelled(e.completeRule, nameOf),
		RunE: func(cmd *cobra.Command, given []string) error {
			words, what := given, given[0]
			if len(given) == 3 {
				words, what = given[:2], given[2]
			}
			where, err := parseFilter("ask", words)
			if err != nil {
				return err
			}
			address, noAddress := parseAddress(cmd, what)
			if noAddress != nil && (len(given) == 3 || !isName(what)) {
				return noAddress
			}
			if err := p.parse(cmd); err != nil {
				return err
			}
			if len(given) < 3 {
				where.device = ""
			}
			if noAddress != nil {
				return e.askNamed(where, what, p, noAddress)
			}
			return e.ask(where, address, p)
		},
	}
	cmd.Flags().Var(byteCount(&p.bytes), "bytes", "length at layer 2 (default: a full packet of the device)")
	p.add(cmd, "the packet's")
	return cmd
}

// packetFlags are the flags for the packets in question.
type packetFlags struct {
	bytes uint64 // 0 if not given
	text  string // of the flow
	flow  *maps.Flow
	class string // DSCP as it is given
	dscp  uint8
}

// add adds the flags that do not depend on the command. whose is the packet or packets.
func (p *packetFlags) add(cmd *cobra.Command, whose string) {
	cmd.Flags().StringVar(&p.text, "flow", "", whose+" `flow`: protocol,source:port,destination:port")
	cmd.Flags().StringVar(&p.class, "dscp", policy.DSCPName(0), whose+" DSCP: `name` or number, for rules that are colour-aware")
}

func (p *packetFlags) parse(cmd *cobra.Command) error {
	if p.bytes > model.MaxPacket || cmd.Flags().Changed("bytes") && p.bytes == 0 {
		return inputf("%s: a packet of %d bytes is out of range; use 1 to %d", cmd.Name(), p.bytes, model.MaxPacket)
	}
	var err error
	if p.dscp, err = policy.ParseDSCP(p.class); err != nil {
		return inputf("%s: %w", cmd.Name(), err)
	}
	if p.text == "" {
		return nil
	}
	flow, err := maps.ParseFlow(p.text)
	if err != nil {
		return inputf("%s: %w", cmd.Name(), err)
	}
	p.flow = &flow
	return nil
}

func parseAddress(cmd *cobra.Command, s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" || a.Is4In6() {
		err = fmt.Errorf("%q is not an address; write one such as 10.0.0.7 or 2001:db8::7; 'shapectl show' finds rules by name", s)
		return a, inputf("%s: %w", cmd.Name(), argumentError{err})
	}
	return a, nil
}

// onlyHook makes the filter that of the only hook with rules for an address.
func (e *env) onlyHook(n *loader.Namespace, where *filterRules, address netip.Addr) error {
	hooks, err := where.hooks(n)
	defer loader.CloseHooks(hooks)
	if err != nil {
		return err
	}
	var commands []string
	for _, h := range hooks {
		if _, found := h.Set.Match(address); found {
			commands = append(commands, e.suggest("ask", h.Name(), h.Direction.String(), address.String()))
			where.device, where.direction = h.Name(), &h.Direction
		}
	}
	switch len(commands) {
	case 0:
		return missingf("no rule matches the address, so nothing limits it; %s lists all rules", e.suggest("show"))
	case 1:
		return nil
	}
	return inputf("rules match the address in several places; %s", e.either(commands))
}

// askNamed asks for the address of the only rule with a name. noAddress is the error if no rule has it.
func (e *env) askNamed(where filterRules, name string, p packetFlags, noAddress error) error {
	var address netip.Addr
	unknown := false
	err := e.with(loader.Read, "ask for "+plain.Line(name), func(n *loader.Namespace) error {
		hooks, err := where.hooks(n)
		defer loader.CloseHooks(hooks)
		if err != nil {
			return err
		}
		q := explain.Question{Name: name, Flow: p.flow}
		found := explain.Named(hooks, q)
		if q.Flow = nil; found == nil && explain.Named(hooks, q) != nil {
			return e.notForFlow(name, p.flow)
		}
		var commands []string
		for _, at := range found {
			commands = append(commands, e.suggest("ask", at.Device, at.Direction.String(), at.Address.String()))
		}
		switch {
		case found == nil:
			unknown = true
			return nil
		case len(found) > 1:
			return inputf("several rules have that name; %s", e.either(commands))
		case p.flow == nil && !found[0].Network.IsSingleIP():
			return inputf("the rule with that name is for %s; give an address of it, as in %s", found[0].Network, commands[0])
		}
		where.device, where.direction, address = found[0].Device, found[0].Direction, found[0].Address
		return nil
	})
	if err != nil {
		return err
	}
	if unknown {
		return noAddress
	}
	return e.ask(where, address, p)
}

func (e *env) ask(where filterRules, address netip.Addr, p packetFlags) error {
	doing := fmt.Sprintf("ask for %s", address)
	if where.device != "" {
		doing += fmt.Sprintf(" on %s %s", plain.Line(where.device), where.direction)
	}
	return e.with(loader.Read, doing, func(n *loader.Namespace) error {
		if where.device == "" {
			if err := e.onlyHook(n, &where, address); err != nil {
				return err
			}
		}
		name, d := where.device, *where.direction
		h, err := n.Find(name, d)
		if err != nil {
			return err
		}
		answer := report.Answer{
			Device: name, Direction: d.String(), Address: address.String(),
			Bytes: p.bytes, Conforms: true, Verdict: "pass",
			Passage: report.Passage{BorrowedBy: []string{}, Pools: []report.PoolLevel{}},
		}
		if h == nil {
			dev, err := device(name)
			if err != nil {
				return err
			}
			answer.Bytes = cmp.Or(answer.Bytes, dev.FullFrame())
			return e.print(answer, answer.Text)
		}
		defer h.Close()
		answer.Bytes = cmp.Or(answer.Bytes, h.Device.FullFrame())
		entry, found := h.Set.Match(address)
		if !found {
			return e.print(answer, answer.Text)
		}
		flow, err := p.packet(address, entry, h.Match())
		if err != nil {
			return err
		}
		cidr := entry.Prefix.String()
		answer.Rule, answer.Attached = &cidr, h.State.InForce()
		answer.Sentence, answer.Share = entry.Sentence(h.Name(), h.Direction, h.Match()), entry.Share.String()
		if entry.Rate == policy.Unlimited && entry.Within == "" {
			return e.print(answer, answer.Text)
		}
		if entry.Algorithm.HasColours() {
			answer.Bytes = model.Counted(answer.Bytes, entry.Framing)
			l, verdict := explain.ColoursFor(h.Set, entry, h.Match(), flow).Judge(answer.Bytes, p.dscp, 0)
			answer.Key, answer.Spilled, answer.LevelBytes, answer.CapacityBytes = l.Key, l.Spilled, l.LevelBytes, &entry.Capacity
			answer.Colouring, answer.Conforms, answer.Verdict, answer.WaitNS = l.Colouring, l.Conforms, verdict.String(), l.WaitNS
			answer.Queue = l.Queue
			if l.Colour == policy.Red.String() {
				answer.RefusedBy, answer.RefusedReason = &cidr, report.Capacity
			}
			return e.print(answer, answer.Text)
		}
		stages := explain.StagesFor(h.Set, entry, h.Match(), flow, p.flow != nil)
		if l := stages.NeedsFlow(); l != nil {
			return inputf("%s is shared by flow; give --flow, such as --flow udp,192.0.2.1:5000,%s:53", plain.Line(l.Name()), address)
		}
		answer.Bytes = model.Counted(answer.Bytes, entry.Framing)
		v := stages.Judge(answer.Bytes)
		answer.Passage, answer.Conforms, answer.Verdict, answer.WaitNS = v.Passage, v.Conforms, v.Verdict.String(), v.WaitNS
		answer.Note = explain.OfWhichFlow(entry.Rule, p.flow, v.Verdict)
		if entry.Rate != policy.Unlimited {
			state := stages.Model[0].State
			answer.Spilled, answer.LevelBytes = state.Spilled, model.Bytes(state.Level)
			answer.CapacityBytes, answer.Queue = &entry.Capacity, report.NewQueue(entry.Rule)
			answer.Key = maps.KeyName(entry, h.Match(), flow)
		}
		return e.print(answer, answer.Text)
	})
}

// packet is the packet in question, as far as it matters to the rule.
func (p packetFlags) packet(address netip.Addr, entry maps.Entry, match policy.Match) (maps.Flow, error) {
	flow := maps.Flow{Src: address, Dst: address}
	if p.flow != nil {
		flow = *p.flow
	}
	far := flow.Far(match)
	switch {
	case far != address:
		return flow, inputf("the flow's %s is %s, but the address is %s; the rules of this direction compare the %s, so give that address", match, far, address, match)
	case p.flow == nil && entry.Each.Kind == policy.EachFlow:
		return flow, inputf("%s has a bucket for each flow; give --flow, such as --flow udp,192.0.2.1:5000,%s:53", entry.Prefix, address)
	}
	return flow, nil
}
