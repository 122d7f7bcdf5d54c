package main

import (
	"fmt"
	"net/netip"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

type askOptions struct {
	device    string
	direction policy.Direction
	address   netip.Addr
	bytes     byteCount
	flow      *maps.Flow
}

func (e *env) askCommand() *cobra.Command {
	var o askOptions
	var flow string
	cmd := &cobra.Command{
		Use:   "ask DEV ingress|egress ADDRESS [flags]",
		Short: "Ask whether a packet would pass now, and when",
		Long: `Ask whether a packet to or from an address would pass now, how full its bucket
is, and how long it would be held back, or in how long it would conform. Where
sparse flows go first, the answer without --flow is for one that has packets
waiting. Nothing is charged or changed.`,
		Example: `  shapectl ask eth0 egress 10.0.0.7
  shapectl ask eth0 egress 10.0.0.7 --bytes 9000 --flow udp,192.0.2.1:5000,10.0.0.7:53`,
		Args:              args(3, 3),
		ValidArgsFunction: e.completeRule,
		RunE: func(cmd *cobra.Command, given []string) error {
			var err error
			o.device = given[0]
			if o.direction, err = direction("ask", given[1]); err != nil {
				return err
			}
			if o.address, err = netip.ParseAddr(given[2]); err != nil || o.address.Zone() != "" || o.address.Is4In6() {
				return inputf("ask: %q is not an address; write one such as 10.0.0.7 or 2001:db8::7", given[2])
			}
			if o.bytes >= 1<<model.PacketBits || cmd.Flags().Changed("bytes") && o.bytes == 0 {
				return inputf("ask: a packet of %d bytes is out of range; use 1 to %d", o.bytes, 1<<model.PacketBits-1)
			}
			if flow != "" {
				f, err := maps.ParseFlow(flow)
				if err != nil {
					return inputf("ask: %w", err)
				}
				o.flow = &f
			}
			return e.ask(o)
		},
	}
	cmd.Flags().Var(&o.bytes, "bytes", "length of the packet at layer 2 (default: a full one of the device)")
	cmd.Flags().StringVar(&flow, "flow", "", "the packet's `protocol,source:port,destination:port`")
	return cmd
}

func (e *env) ask(o askOptions) error {
	doing := fmt.Sprintf("ask for %s on %s %s", o.address, o.device, o.direction)
	return e.with(loader.Read, doing, func(n *loader.Namespace) error {
		h, err := n.Find(o.device, o.direction)
		if err != nil {
			return err
		}
		answer := report.Answer{
			Device: o.device, Direction: o.direction.String(), Address: o.address.String(),
			Bytes: uint64(o.bytes), Conforms: true, Verdict: "pass",
		}
		if h == nil {
			dev, err := device(n, o.device)
			if err != nil {
				return err
			}
			answer.Bytes = fullPacket(o.bytes, dev)
			return e.answer(answer)
		}
		defer h.Close()
		answer.Bytes = fullPacket(o.bytes, h.Device)
		entry, found := h.Set.Match(o.address)
		if !found {
			return e.answer(answer)
		}
		flow, err := o.packet(entry, h.Match())
		if err != nil {
			return err
		}
		cidr := entry.Prefix.String()
		answer.Rule, answer.Attached = &cidr, h.InForce()
		answer.Sentence = entry.Sentence(h.Name(), h.Direction, h.Match())
		if entry.Rate == policy.Unlimited {
			return e.answer(answer)
		}
		meter, now := h.Set.Meter(entry), maps.Now()
		level := h.Set.Level(entry, h.Match(), flow, now)
		answer.Spilled = h.Set.Spills(entry, h.Match(), flow, now)
		entry.Rule = chargedBy(entry.Rule, answer.Spilled)
		answer.Bytes = charged(answer.Bytes, entry.Framing)
		answer.LevelBytes, answer.CapacityBytes, answer.Queue = model.Bytes(level), &entry.Capacity, report.NewQueue(entry.Rule)
		answer.Conforms, answer.Sharer = meter.Conforms(level, answer.Bytes), maps.Sharer(entry, h.Match(), flow)
		ahead := o.flow != nil && h.Set.GoesAhead(entry, flow, now, answer.Bytes)
		answer.Verdict, answer.WaitNS = fate(entry.Rule, meter, level, answer.Bytes, ahead)
		answer.Note = ofWhichFlow(entry.Rule, o.flow, answer.Verdict)
		return e.answer(answer)
	})
}

// chargedBy is a rule as it treats packets that are charged to its spill bucket,
// if spilled: without a penalty, and without marks beyond the capacity.
func chargedBy(r policy.Rule, spilled bool) policy.Rule {
	if spilled {
		r.Penalty = policy.Penalty{}
		if r.Excess == policy.ECN {
			r.Excess = policy.Drop
		}
	}
	return r
}

// charged is what a packet of that length counts.
func charged(bytes uint64, f policy.Framing) uint64 {
	return uint64(max(int64(bytes)+int64(f.Overhead), int64(f.MPU), 0))
}

// fate is what becomes of a packet that counts so many bytes and finds that
// level, in units: the verdict, and how long it is held back, if it does not go
// ahead of others, or if it is excess, in how long it would conform. Where ECN can not mark, it drops.
func fate(r policy.Rule, m model.Meter, level, bytes uint64, ahead bool) (verdict string, waitNS uint64) {
	if m.Conforms(level, bytes) {
		if r.Excess == policy.Delay && !ahead {
			waitNS = m.Held(level, bytes)
		}
		switch {
		case waitNS == 0:
			return "pass", 0
		case waitNS > uint64(r.ECNAbove):
			return "mark", waitNS
		}
		return "delay", waitNS
	}
	verdict = "drop"
	switch {
	case r.Excess == policy.Pass:
		verdict = "pass"
	case r.Excess == policy.ECN && m.Marks(level, bytes):
		verdict = "mark"
	}
	return verdict, m.Wait(level, bytes)
}

// ofWhichFlow says what an answer is for where it is not the same for all flows, and
// none was given: a note, "" where there is none.
func ofWhichFlow(r policy.Rule, given *maps.Flow, verdict string) string {
	if given != nil || r.Order != policy.SparseFirst || verdict != "delay" && verdict != "mark" {
		return ""
	}
	return "that is for a flow that has packets waiting; --flow tells of another, which may go ahead"
}

func fullPacket(bytes byteCount, d loader.Device) uint64 {
	switch {
	case bytes == 0 && d.MTU == 0: // a device that is not here
		return policy.MinCapacity
	case bytes == 0:
		return uint64(d.MTU) + uint64(d.L2Bytes)
	}
	return uint64(bytes)
}

// packet is the packet that was asked for, as far as the rule tells packets apart.
func (o askOptions) packet(entry maps.Entry, match policy.Match) (maps.Flow, error) {
	flow := maps.Flow{Src: o.address, Dst: o.address}
	if o.flow != nil {
		flow = *o.flow
	}
	far := flow.Dst
	if match == policy.MatchSrc {
		far = flow.Src
	}
	switch {
	case far != o.address:
		return flow, inputf("the flow's %s is %s; the rules of this direction go by that side, so it must be the address asked for", match, far)
	case o.flow == nil && entry.Each.Kind == policy.EachFlow:
		return flow, inputf("%s has a bucket for each flow; say which with --flow, such as --flow udp,192.0.2.1:5000,%s:53", entry.Prefix, o.address)
	}
	return flow, nil
}

func (e *env) answer(a report.Answer) error {
	if e.json {
		return report.JSON(e.out, a)
	}
	return a.Text(e.out)
}
