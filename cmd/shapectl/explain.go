package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/explain"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
)

func explainCommand(e *env) *cobra.Command {
	var q explain.Question
	var p packetFlags
	cmd := &cobra.Command{
		Use:   "explain [DEV [ingress|egress]] ADDRESS [flags]",
		Short: "Explain which rule decides about packets, and why",
		Long: `Explain what happens to packets to and from an address. Nothing is charged or changed.

First comes the answer: which rule decides, and what happens to the packets now. Then, for each device on the
path: the rule, its bucket, what it dropped so far, and the programs that run there.

Routes tell by which devices the packets leave and enter, also below a bridge, a VLAN or a veth pair. With DEV,
explain looks at that device alone. With --flow, both ends of the packets are known, and ADDRESS may be left
out. With --order sparse-first and without --flow, the answer is about a flow that has packets queued already.

nftables chains are shown if they belong to the device itself. The other netfilter hooks run between ingress and
egress.

Exit codes: 0 done, also if no rule matches; 4 a rule for the packets is not in force.`,
		Example: `  shapectl explain 10.0.0.7
  shapectl explain eth0 egress 10.0.0.7 --bytes 1514 --segments 43
  shapectl explain --flow tcp,10.0.0.7:40000,192.0.2.1:443`,
		Args:              args(0, 3),
		ValidArgsFunction: e.completeRule,
		RunE: func(cmd *cobra.Command, given []string) (err error) {
			if err := p.parse(cmd); err != nil {
				return err
			}
			q.Bytes, q.Flow, q.Netns = p.bytes, p.flow, e.netns
			if err := parseQuestion(&q, cmd, given); err != nil {
				return err
			}
			if q.Segments == 0 {
				return inputf("explain: --segments 0 is out of range; use 1 to 65535")
			}
			return e.explain(q)
		},
	}
	cmd.Flags().Var(byteCount(&p.bytes), "bytes", "bytes of each segment at layer 2 (default: full)")
	cmd.Flags().Uint16Var(&q.Segments, "segments", 1, "`number` of segments of a GSO or GRO packet")
	cmd.Flags().StringVar(&p.text, "flow", "", "the packets' `flow`: protocol,source:port,destination:port")
	return cmd
}

// parseQuestion reads [DEV [ingress|egress]] ADDRESS.
func parseQuestion(q *explain.Question, cmd *cobra.Command, given []string) (err error) {
	if len(given) == 0 {
		if q.Flow == nil {
			return inputf("explain: the address is missing; give one such as 10.0.0.7, or --flow")
		}
		return nil
	}
	last := len(given) - 1
	where, err := parseFilter("explain", given[:last])
	if err != nil {
		return err
	}
	q.Device, q.Direction = where.device, where.direction
	if q.Address, err = parseAddress(cmd, given[last]); err != nil {
		return err
	}
	if q.Flow != nil && q.Address != q.Flow.Src && q.Address != q.Flow.Dst {
		return inputf("explain: the flow goes from %s to %s; %s is neither, leave it out", q.Flow.Src, q.Flow.Dst, q.Address)
	}
	return nil
}

func (e *env) explain(q explain.Question) error {
	doing := "explain " + q.Address.String()
	if !q.Address.IsValid() {
		doing = "explain " + q.Flow.String()
	}
	if q.Device != "" {
		doing += " on " + plain.Line(q.Device)
	}
	return e.with(loader.Read, doing, func(n *loader.Namespace) error {
		paths, err := explain.Explain(n, q)
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
			if report.NotInForce(r.Attached) {
				return false
			}
		}
	}
	return true
}
