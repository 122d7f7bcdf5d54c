package report

import (
	"bufio"
	"fmt"
	"io"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/replay"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Packet is what happened to a packet.
type Packet struct {
	TimeNS     uint64  `json:"time_ns"`
	Bytes      uint64  `json:"bytes"`
	Verdict    string  `json:"verdict"`
	DepartNS   *uint64 `json:"depart_ns"`
	LevelBytes uint64  `json:"level_bytes"`
	Conforms   bool    `json:"conforms"`
	*PacketColours
	*PacketBucket
	*PacketPools
}

// PacketColours is of packets of rules with colours.
type PacketColours struct {
	Colour           string `json:"colour"`
	SecondLevelBytes uint64 `json:"second_level_bytes"`
	DSCPOut          *uint8 `json:"dscp_out"`
}

// PacketBucket is of packets with addresses.
type PacketBucket struct {
	Rule   *string `json:"rule"`
	Key    *string `json:"key"`
	Sharer string  `json:"sharer,omitempty"`
}

// PacketPools is of packets where there are pools: who refused or guaranteed them.
type PacketPools struct {
	RefusedBy    *string `json:"refused_by"`
	GuaranteedBy *string `json:"guaranteed_by"`
}

// NewPacket is the result of a packet, which has addresses or none.
func NewPacket(r replay.Result, l replay.Limits, addressed bool) Packet {
	p := Packet{TimeNS: r.Time, Bytes: r.Bytes, Verdict: r.Verdict.String(), LevelBytes: r.LevelBytes(), Conforms: !r.Excess}
	if r.Verdict != model.Drop {
		p.DepartNS = new(r.Departure())
	}
	if addressed {
		p.PacketBucket = new(PacketBucket)
	}
	if len(l.Pools) > 0 {
		p.PacketPools = &PacketPools{notEmpty(r.RefusedBy), notEmpty(r.GuaranteedBy)}
	}
	if r.Rule == replay.NoRule {
		return p
	}
	rule := &l.Rules[r.Rule]
	if rule.Algorithm.HasColours() {
		p.PacketColours = &PacketColours{Colour: r.Colour.String(), SecondLevelBytes: r.SecondBytes()}
		if r.Verdict != model.Drop {
			p.DSCPOut = &r.DSCP
		}
	}
	if addressed {
		p.Rule, p.Key = new(policy.CIDR(rule.Prefix)), new(l.Key(r))
		if rule.Share.Kind != policy.ShareNone {
			p.Sharer = l.Sharer(r)
		}
	}
	return p
}

func notEmpty(name string) *string {
	if name == "" {
		return nil
	}
	return &name
}

// A Replay is the effect of limits on a trace.
type Replay struct {
	Trace     string   `json:"trace"`
	Engine    string   `json:"engine"`
	Sentences []string `json:"sentences"` // of each rule, then of each pool

	// Mixed is true if the rules of a policy differ. The next fields are those of the first one.
	Mixed         bool   `json:"mixed"`
	Algorithm     string `json:"algorithm"`
	Match         string `json:"match"`
	Each          string `json:"each"`
	Excess        string `json:"excess"`
	RateBits      uint64 `json:"rate_bits_per_second"`
	CapacityBytes uint64 `json:"capacity_bytes"`
	QueueBytes    uint64 `json:"queue_bytes"`

	// Complete is true if the trace was read to its end.
	Complete bool `json:"complete"`

	replay.Figures

	limits replay.Limits
}

// NewReplay returns what limits and a summary say. The caller adds the trace, the engine, the
// sentences, and whether it is complete.
func NewReplay(l replay.Limits, s *replay.Summary) Replay {
	rule := l.Rules[0]
	r := Replay{
		Algorithm: rule.Algorithm.String(), Match: l.Match.String(), Each: rule.Each.String(), Excess: rule.Excess.String(),
		RateBits: uint64(rule.Rate), CapacityBytes: rule.Capacity,
		Figures: s.Sum(), limits: l,
	}
	r.QueueBytes, _ = rule.Waiting()
	for _, other := range l.Rules {
		other.Prefix = rule.Prefix
		r.Mixed = r.Mixed || other != rule
	}
	return r
}

// Text writes a table and some lines.
func (r Replay) Text(w io.Writer) error {
	text := bufio.NewWriter(w)
	for _, sentence := range r.Sentences {
		fmt.Fprintln(text, sentence)
	}
	fmt.Fprintln(text)
	if err := r.table(text); err != nil {
		return err
	}
	fmt.Fprintln(text)
	r.facts(text)
	for i, p := range r.Pools {
		if i == 0 {
			fmt.Fprintln(text, "\npools:")
		}
		fmt.Fprintf(text, "    %s: passed %d packets, %d bytes; refused %d packets, %d bytes\n",
			plain.Line(p.Name), p.PassedPackets, p.PassedBytes, p.RefusedPackets, p.RefusedBytes)
	}
	for i, x := range r.MostExcess {
		if i == 0 {
			fmt.Fprintln(text, "\nmost excess:")
		}
		fmt.Fprintf(text, "    %s: %d packets, %d bytes\n", x.Key, x.Packets, x.Bytes)
	}
	return text.Flush()
}

func (r *Replay) table(w io.Writer) error {
	type row struct {
		name           string
		packets, bytes uint64
	}
	rows := []row{{"offered", r.OfferedPackets, r.OfferedBytes}, {"passed", r.PassedPackets, r.PassedBytes}, {"excess", r.ExcessPackets, r.ExcessBytes}}
	for _, more := range []row{
		{"dropped", r.DroppedPackets, r.DroppedBytes}, {"delayed", r.DelayedPackets, r.DelayedBytes}, {"marked", r.MarkedPackets, r.MarkedBytes},
		{"green", r.GreenPackets, r.GreenBytes}, {"yellow", r.YellowPackets, r.YellowBytes}, {"red", r.RedPackets, r.RedBytes},
		{"guaranteed", r.GuaranteedPackets, r.GuaranteedBytes}, {"borrowed", r.BorrowedPackets, r.BorrowedBytes},
	} {
		if more.packets > 0 {
			rows = append(rows, more)
		}
	}
	count := func(head string, of func(*row) uint64) []column[row] {
		return []column[row]{
			{head: head, right: true, always: true, cell: func(r *row) string { return fmt.Sprint(of(r)) }},
			{right: true, cell: func(r *row) string { return percentOr(live.Percent(of(r), of(&rows[0]))) }},
		}
	}
	columns := []column[row]{{cell: func(r *row) string { return r.name }}}
	columns = append(columns, count("PACKETS", func(r *row) uint64 { return r.packets })...)
	return writeTable(w, rows, append(columns, count("BYTES", func(r *row) uint64 { return r.bytes })...), 0)
}

func (r *Replay) facts(w io.Writer) {
	fact := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-18s  %s\n", name, fmt.Sprintf(format, args...))
	}
	if r.OutsidePackets > 0 {
		fact("other addresses", "%d packets, %d bytes: they match no rule", r.OutsidePackets, r.OutsideBytes)
	}
	if r.UnlimitedPackets > 0 {
		fact("never limited", "%d packets, %d bytes: not IP, or neighbour discovery", r.UnlimitedPackets, r.UnlimitedBytes)
	}
	fact("duration", "%s", About(r.DurationNS))
	switch {
	case r.DroppedPackets == 0:
		fact("longest gap", "none: no packet was dropped")
	case r.LongestGapNS == 0 && r.DelayedPackets > 0:
		fact("longest gap", "none: packets were queued at every drop")
	default:
		fact("longest gap", "%s without a passed packet, from %s on", About(r.LongestGapNS), About(r.LongestGapFromNS-min(r.FirstNS, r.LongestGapFromNS)))
	}
	if r.DelayedPackets > 0 {
		fact("longest delay", "%s; the mean of delayed packets is %s", About(r.LongestDelayNS), About(r.MeanDelayNS))
	}
	holds := r.CapacityBytes + r.limits.Rules[0].Queue
	level := func(name string, most, holds uint64) {
		if r.Mixed {
			fact(name, "%d bytes", most)
		} else {
			fact(name, "%s", filled(most, holds))
		}
	}
	level("highest level", r.HighestLevelBytes, holds)
	if r.limits.HasColours() {
		level("highest P or E", r.HighestSecondLevelBytes, r.limits.Rules[0].Colours.Burst())
	}
	switch least := r.LosslessCapacityBytes; {
	case r.OfferedPackets == 0 || !r.limits.Alone():
	case least == nil:
		fact("lossless capacity", "none: it would be above %d bytes", uint64(policy.MaxCapacity))
	case *least == 0:
		fact("lossless capacity", "any: each packet found an empty bucket")
	case holds > r.CapacityBytes:
		fact("lossless capacity", "%d bytes with the queue: the smallest without excess packets", *least)
	default:
		fact("lossless capacity", "%d bytes: the smallest without excess packets", *least)
	}
	if r.SpilledPackets > 0 {
		fact("spill bucket", "%d packets: the kernel's table had no room for their bucket key", r.SpilledPackets)
	}
	if r.ContendedPackets > 0 {
		fact("contended", "%d packets", r.ContendedPackets)
	}
	fact("engine", "%s", r.Engine)
}
