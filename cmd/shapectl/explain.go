package main

import (
	"errors"
	"io"
	"net/netip"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

type explainOptions struct {
	device    string            // "" for those that routes tell
	direction *policy.Direction // of the device; nil for both
	address   netip.Addr        // the zero Addr where the flow says both
	bytes     byteCount         // of each segment; 0 for full ones
	segments  uint16
	flow      *maps.Flow
}

func (e *env) explainCommand() *cobra.Command {
	var o explainOptions
	var flow string
	cmd := &cobra.Command{
		Use:   "explain [DEV [ingress|egress]] ADDRESS [flags]",
		Short: "Explain what packets meet, what decides over them, and when that changes",
		Long: `Explain the whole way of packets to and from an address: by which devices they
leave and come in, what runs there and in which order, which rule decides and
which ones it hides, what a packet counts, how full its bucket is, and what
becomes of it, now and later. Nothing is charged or changed.

Routes tell the devices, also those below a bridge, a VLAN or a veth pair; with
DEV it is that device alone. A flow says both ends of its packets, so that their
way in and their way out are known, and ADDRESS may be left out. Where sparse
flows go first, the answer without --flow is for one that has packets waiting.

Netfilter is shown as far as nftables has chains at the device itself; what
routing and its other hooks do comes between ingress and egress, and is not.

Exit codes: 0 done, also if no rule matches; 4 a rule for the packets is not in force.`,
		Example: `  shapectl explain 10.0.0.7
  shapectl explain eth0 egress 10.0.0.7 --bytes 1514 --segments 43
  shapectl explain --flow tcp,10.0.0.7:40000,192.0.2.1:443`,
		Args:              args(0, 3),
		ValidArgsFunction: e.completeRule,
		RunE: func(cmd *cobra.Command, given []string) (err error) {
			if flow != "" {
				f, err := maps.ParseFlow(flow)
				if err != nil {
					return inputf("explain: %w", err)
				}
				o.flow = &f
			}
			if err := o.parse(given); err != nil {
				return err
			}
			if o.bytes >= 1<<model.PacketBits || cmd.Flags().Changed("bytes") && o.bytes == 0 {
				return inputf("explain: a packet of %d bytes is out of range; use 1 to %d", o.bytes, 1<<model.PacketBits-1)
			}
			if o.segments == 0 {
				return inputf("explain: a packet of no segments is none; use 1 to 65535")
			}
			return e.explain(o)
		},
	}
	cmd.Flags().Var(&o.bytes, "bytes", "length of the packet at layer 2, or of each of its segments (default: a full one of the device)")
	cmd.Flags().Uint16Var(&o.segments, "segments", 1, "`number` of segments that a packet stands for, as by GSO and GRO")
	cmd.Flags().StringVar(&flow, "flow", "", "the packets' `protocol,source:port,destination:port`")
	return cmd
}

func (o *explainOptions) parse(given []string) (err error) {
	switch len(given) {
	case 0:
		if o.flow == nil {
			return inputf("explain: an address is missing; say which, such as 10.0.0.7, or give --flow")
		}
		return nil
	case 3:
		d, err := direction("explain", given[1])
		if err != nil {
			return err
		}
		o.direction = &d
		fallthrough
	case 2:
		o.device = given[0]
	}
	last := given[len(given)-1]
	o.address, err = netip.ParseAddr(last)
	if err != nil || o.address.Zone() != "" || o.address.Is4In6() {
		return inputf("explain: %q is not an address; write one such as 10.0.0.7 or 2001:db8::7", last)
	}
	if o.flow != nil && o.address != o.flow.Src && o.address != o.flow.Dst {
		return inputf("explain: the flow goes from %s to %s; %s is neither, leave it out", o.flow.Src, o.flow.Dst, o.address)
	}
	return nil
}

func (o explainOptions) String() string {
	s := "explain"
	if o.address.IsValid() {
		s += " " + o.address.String()
	} else {
		s += " " + o.flow.String()
	}
	if o.device != "" {
		s += " on " + o.device
	}
	return s
}

func (e *env) explain(o explainOptions) error {
	return e.with(loader.Read, o.String(), func(n *loader.Namespace) error {
		x := explainer{n, o}
		var ways []report.Way
		var err error
		if o.device != "" {
			ways, err = x.onDevice()
		} else {
			ways, err = x.onRoutes()
		}
		if ways == nil {
			return err
		}
		// With the error come the ways that could be told.
		print := report.Explain
		if e.json {
			print = func(w io.Writer, ways []report.Way) error { return report.JSON(w, ways) }
		}
		if err := errors.Join(print(e.out, ways), err); err != nil {
			return err
		}
		if !inForce(ways) {
			return errDegraded
		}
		return nil
	})
}

// inForce reports whether all rules are that the packets meet, or would.
func inForce(ways []report.Way) bool {
	for _, w := range ways {
		for _, s := range w.Hooks {
			if s.Rule != nil && !s.Attached {
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

// An explainer answers one question.
type explainer struct {
	n *loader.Namespace
	o explainOptions
}

// An askedPacket is what is known of those that are asked about.
type askedPacket struct {
	src, dst netip.Addr // the zero Addr where it may be any
	flow     *maps.Flow // nil where it may be any between them
	frame    uint64     // bytes at layer 2 of each segment, without VLAN tags
}

// side is the address that rules go by.
func (p askedPacket) side(m policy.Match) netip.Addr {
	if m == policy.MatchSrc {
		return p.src
	}
	return p.dst
}

// onDevice explains the hooks of one device.
func (x explainer) onDevice() ([]report.Way, error) {
	directions := []policy.Direction{policy.Egress, policy.Ingress}
	if x.o.direction != nil {
		directions = []policy.Direction{*x.o.direction}
	}
	var ways []report.Way
	var refused inputError
	for _, d := range directions {
		way, err := x.onHook(d)
		if x.o.flow != nil && errors.As(err, &refused) {
			continue // of two directions, it is one that a flow goes in
		}
		if err != nil {
			return nil, err
		}
		ways = append(ways, way)
	}
	if ways == nil {
		return nil, refused
	}
	return ways, nil
}

// onHook explains one direction of the device that was named.
func (x explainer) onHook(d policy.Direction) (way report.Way, err error) {
	h, err := x.n.Find(x.o.device, d)
	if err != nil {
		return way, err
	}
	var dev netinfo.Device
	match := d.FarSide()
	if h != nil {
		defer h.Close()
		dev, match = h.Device, h.Match()
	} else if dev, err = device(x.n, x.o.device); err != nil {
		return way, err
	}
	p := askedPacket{flow: x.o.flow, frame: fullPacket(x.o.bytes, dev)}
	switch {
	case p.flow != nil:
		p.src, p.dst = p.flow.Src, p.flow.Dst
		if far := p.side(match); far != x.o.address {
			return way, inputf("the flow's %s is %s; the rules of %s go by that side, so it must be the address asked for", match, far, d)
		}
	case match == policy.MatchSrc:
		p.src = x.o.address
	default:
		p.dst = x.o.address
	}
	stop, err := x.stop(h, netinfo.Hop{Device: dev, Direction: d}, p)
	how := "that leave by "
	if d == policy.Ingress {
		how = "that come in by "
	}
	return report.Way{
		Packets: p.String(), How: how + stop.Device, Hooks: []report.Stop{stop}, Elsewhere: []report.Elsewhere{},
	}, err
}

func (p askedPacket) String() string {
	switch {
	case p.flow != nil:
		return "of " + p.flow.String()
	case p.src.IsValid():
		return "from " + p.src.String()
	}
	return "to " + p.dst.String()
}
