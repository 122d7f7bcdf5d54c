package report

import (
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Way is how packets come to this host or leave it, and what they meet.
type Way struct {
	Packets string `json:"packets"` // which they are
	How     string `json:"how"`
	Hooks   []Stop `json:"hooks"` // in the order in which they are met
	// Elsewhere are rules for the same addresses on hooks that are not met, or not by all of the packets.
	Elsewhere []Elsewhere `json:"elsewhere"`
}

// A Stop is a hook that packets meet.
type Stop struct {
	Device    string `json:"device"`
	Direction string `json:"direction"`
	Match     string `json:"match"`
	Address   string `json:"address"` // on that side of the packet, "" where it is not known
	// Chain is all that is attached, in order; null where the device is not here, or where it may not be asked for.
	Chain []Attached `json:"chain"`
	// Warnings say what may keep packets from what decides over them.
	Warnings []string `json:"warnings"`
	Rule     *string  `json:"rule"`     // null where none matches, or none can be read
	Attached *bool    `json:"attached"` // null where it is not known
	State    string   `json:"state"`    // of the rules here, "" where there are none
	Sentence string   `json:"sentence"`
	// Hides are rules that would decide if all that are narrower were not there, the narrowest first.
	Hides   []Brief  `json:"hides"`
	Counted *Counted `json:"counted"` // null where no rule matches
	Bucket  *Level   `json:"bucket"`  // null where there is none, and where it can not be told which it is
	// Verdict is pass, drop, mark or delay; unknown with the rules or the bucket; lost where no ifb lets it come in again.
	Verdict string `json:"verdict"`
	// HeldBack says whether an fq holds back what is to wait; null where nothing is, and where that cannot be told.
	HeldBack *bool  `json:"held_back"`
	Note     string `json:"note"` // what else is to be said, "" for nothing
	// Proposed is null for a rule without a shadow, and where its bucket can not be told.
	Proposed *Proposed `json:"proposed"`
	// RevertsInNS is null unless the rules here wait to be confirmed.
	RevertsInNS *uint64 `json:"reverts_in_ns"`
}

// Proposed is what the shadow of a rule would make of a packet.
type Proposed struct {
	Sharer        string `json:"sharer"`
	Bytes         uint64 `json:"bytes"` // as it counts them
	LevelBytes    uint64 `json:"level_bytes"`
	CapacityBytes uint64 `json:"capacity_bytes"`
	Conforms      bool   `json:"conforms"`
}

// Attached is a program, filter, chain, ifb or qdisc that packets meet.
type Attached struct {
	At        string `json:"at"` // xdp, netfilter, tcx, clsact, ifb or qdisc
	ProgramID uint32 `json:"program_id"`
	Name      string `json:"name"`
	Ours      bool   `json:"ours"`
	Decides   bool   `json:"decides"` // it sees to the rule that matches
}

// Brief is as much of a rule as one has to know who is not asked about it.
type Brief struct {
	Rule     string  `json:"rule"`
	RateBits *uint64 `json:"rate_bits_per_second"` // null if it is unlimited
	Each     string  `json:"each"`
	Sentence string  `json:"sentence"`
}

// NewBrief is the rule of a direction of a device, where match is the side that its prefix is compared with.
func NewBrief(r policy.Rule, device string, d policy.Direction, match policy.Match) Brief {
	rate, _ := limit(r)
	return Brief{Rule: r.Prefix.String(), RateBits: rate, Each: r.Each.String(), Sentence: r.Sentence(device, d, match)}
}

func (b Brief) String() string {
	all := policy.Each{}
	switch {
	case b.RateBits == nil:
		return b.Rule + " (not limited)"
	case b.Each == all.String():
		return fmt.Sprintf("%s (%s)", b.Rule, policy.Rate(*b.RateBits))
	}
	return fmt.Sprintf("%s (%s for each %s)", b.Rule, policy.Rate(*b.RateBits), b.Each)
}

// Elsewhere is a rule that packets do not meet, or that only some do.
type Elsewhere struct {
	Device    string `json:"device"`
	Direction string `json:"direction"`
	Brief
	Attached *bool  `json:"attached"` // null where it is not known
	State    string `json:"state"`
	Met      string `json:"met"` // whether and when it is
}

// Counted is what a packet counts.
type Counted struct {
	PacketBytes   uint64 `json:"packet_bytes"` // of each segment, at layer 2
	Segments      uint64 `json:"segments"`
	TagBytes      uint64 `json:"tag_bytes"`      // of each
	OverheadBytes int16  `json:"overhead_bytes"` // of each
	MPUBytes      uint16 `json:"mpu_bytes"`      // of each, at least
	Bytes         uint64 `json:"bytes"`          // in all
}

// Level is how full a bucket is, and what that means for a packet.
type Level struct {
	Sharer        string `json:"sharer"`  // whose it is
	Spilled       bool   `json:"spilled"` // the table has no room for it: this is the rule's spill bucket
	LevelBytes    uint64 `json:"level_bytes"`
	CapacityBytes uint64 `json:"capacity_bytes"`
	Queue
	EmptyNS       uint64  `json:"empty_ns"` // until it is empty, if nothing more comes
	Conforms      bool    `json:"conforms"`
	RoomPackets   uint64  `json:"room_packets"` // how many such packets fit now, one after the other
	RoomBytes     uint64  `json:"room_bytes"`
	AtOncePackets uint64  `json:"at_once_packets"`        // how many of them need not wait
	SpeedBits     *uint64 `json:"device_bits_per_second"` // null where the device does not say
	FullNS        *uint64 `json:"full_ns"`                // until it is full at that; null where it never is, or is not known
	WaitNS        uint64  `json:"wait_ns"`                // how long the packet is held back, or until it conforms if nothing else comes
	Excess        string  `json:"excess"`
	Penalty       string  `json:"penalty"`
	HeldNS        uint64  `json:"held_ns"`            // how long a penalty still keeps it full
	HeldUntil     uint64  `json:"held_until_unix_ns"` // 0 where none does
}

const (
	explainWidth = 100
	labelWidth   = len("elsewhere")
	// fewElsewhere is how many lines of rules that are not met help more than they hide.
	fewElsewhere = 4
)

// Ways are all that packets that were asked about may take.
type Ways []Way

// Text writes ways for people to read.
func (ways Ways) Text(w io.Writer) error {
	var s strings.Builder
	for i, way := range ways {
		if i > 0 {
			s.WriteByte('\n')
		}
		way.text(&s)
	}
	_, err := io.WriteString(w, s.String())
	return err
}

func (w Way) text(s *strings.Builder) {
	s.WriteString(plain.Fold(plain.Line("packets "+w.Packets+" "+w.How), explainWidth, "", "    "))
	for _, stop := range w.Hooks {
		stop.text(s)
	}
	for i, e := range w.Elsewhere {
		if i == fewElsewhere && len(w.Elsewhere) > fewElsewhere+1 {
			fact(s, "elsewhere", fmt.Sprintf("%d more, which -j lists", len(w.Elsewhere)-fewElsewhere))
			break
		}
		fact(s, "elsewhere", fmt.Sprintf("%s %s %s: %s%s", e.Device, e.Direction, e.Brief, e.Met,
			remark(Rule{Attached: e.Attached, State: e.State})))
	}
}

func (p Stop) text(s *strings.Builder) {
	s.WriteString(p.Device + " " + p.Direction + p.otherSide() + "\n")
	for _, a := range p.Chain {
		a.text(s)
	}
	for _, warning := range p.Warnings {
		fact(s, "warning", warning)
	}
	switch {
	case p.Rule != nil:
		_, says, _ := strings.Cut(p.Sentence, ": ")
		fact(s, "rule", says+remark(Rule{Attached: p.Attached, State: p.State}))
		if len(p.Hides) > 0 {
			fact(s, "hides", hides(p.Hides))
		}
		fact(s, "counted", p.Counted.words())
		if p.Bucket != nil {
			p.Bucket.text(s)
			if p.Bucket.Spilled {
				fact(s, "spilled", noRoom(p.Bucket.Sharer))
			}
		}
		p.now(s)
		if p.Proposed != nil {
			would := "would pass"
			if !p.Proposed.Conforms {
				would = "would be refused"
			}
			fact(s, "proposed", fmt.Sprintf("%s: bucket of %s with %d of %d bytes",
				would, p.Proposed.Sharer, p.Proposed.LevelBytes, p.Proposed.CapacityBytes))
		}
	case p.Address != "" && p.Verdict != "unknown":
		fact(s, "rule", "none matches "+p.Address+"; it passes")
	}
	if p.Note != "" {
		fact(s, "note", p.Note)
	}
	if p.RevertsInNS != nil {
		fact(s, "note", reverts(*p.RevertsInNS))
	}
}

// otherSide is what there is to say of rules that do not go by the far side.
func (p Stop) otherSide() string {
	switch {
	case p.Direction == policy.Egress.String() && p.Match == policy.MatchSrc.String():
		return ", by source address"
	case p.Direction == policy.Ingress.String() && p.Match == policy.MatchDst.String():
		return ", by destination address"
	}
	return ""
}

// hides says which rule would decide if none but the first of all were gone, and so on.
func hides(rules []Brief) string {
	var names []string
	for _, r := range rules {
		names = append(names, r.String())
	}
	return strings.Join(names, ", which hides ")
}

func (a Attached) text(s *strings.Builder) {
	whose, what := "theirs", a.Name
	if a.Ours {
		whose = "ours"
	}
	if a.At == "qdisc" {
		whose = ""
	}
	switch {
	case a.ProgramID != 0 && a.Name == "":
		what = fmt.Sprintf("program %d", a.ProgramID)
	case a.ProgramID != 0:
		what += fmt.Sprintf(" (program %d)", a.ProgramID)
	}
	if a.Decides {
		what += ", which decides"
	}
	fact(s, a.At, fmt.Sprintf("%-6s  %s", whose, what))
}

// now is the verdict, and when there will be another one.
func (p Stop) now(s *strings.Builder) {
	b := p.Bucket
	switch {
	case NotInForce(p.Attached):
		fact(s, "now", "passes: NOTHING METERS IT")
	case p.Verdict == "unknown":
	case b == nil:
		fact(s, "now", "passes: it is not limited")
	case b.delays():
		p.queued(s)
	case b.Conforms && p.Counted.Bytes > b.CapacityBytes:
		fact(s, "now", "conforms, and passes: it is bigger than the bucket, but that is empty")
	case b.Conforms:
		fact(s, "now", fmt.Sprintf("conforms, and passes; there is room for %s (%d bytes)", plain.Count(b.RoomPackets, "such packet"), b.RoomBytes))
		b.later(s, "excess")
	default:
		fact(s, "now", "excess: "+b.fate(p.Verdict))
		b.drained(s, p.Counted.Bytes)
	}
}

// queued is the verdict of a rule that delays, and when there will be another one.
func (p Stop) queued(s *strings.Builder) {
	b := p.Bucket
	if !b.Conforms {
		fact(s, "now", "dropped: there is no room for it")
		b.drained(s, p.Counted.Bytes)
		return
	}
	if p.Verdict == "lost" {
		fact(s, "now", "lost: no ifb lets it come in again")
		return
	}
	text := "leaves at once"
	if b.WaitNS > 0 {
		text = "waits " + about(b.WaitNS)
		if p.HeldBack != nil && !*p.HeldBack {
			text = "passes: nothing holds it back for " + about(b.WaitNS)
		}
	}
	if p.Verdict == "mark" {
		text += ", and is marked by ECN where it can be, as that is more than " + about(*b.ECNAboveNS)
	}
	text += fmt.Sprintf("; there is room for %s (%d bytes)", plain.Count(b.RoomPackets, "such packet"), b.RoomBytes)
	if b.WaitNS == 0 && b.AtOncePackets < b.RoomPackets {
		text += fmt.Sprintf(", of which %d would leave at once", b.AtOncePackets)
	}
	fact(s, "now", text)
	b.later(s, "dropped")
}

func (b Level) text(s *strings.Builder) {
	label, full, _ := strings.Cut(b.filled(b.Sharer, b.LevelBytes, b.CapacityBytes), " ")
	switch {
	case b.LevelBytes == 0:
		full = fmt.Sprintf("of %s: empty, of %d bytes", b.Sharer, b.CapacityBytes)
		if b.beyond > 0 {
			full += fmt.Sprintf(", with a queue of %d", b.beyond)
		}
		fact(s, label, full)
		return
	case b.HeldNS > 0:
		until := time.Unix(0, int64(b.HeldUntil)).Format(time.TimeOnly)
		full = fmt.Sprintf("of %s: full, and kept so by the penalty for another %s, until %s", b.Sharer, about(b.HeldNS), until)
	}
	fact(s, label, fmt.Sprintf("%s; empty in %s if nothing more comes", full, about(b.EmptyNS)))
}

// later says when what conforms now is excess, or what else it is then.
func (b Level) later(s *strings.Builder, then string) {
	if b.SpeedBits == nil {
		return
	}
	speed := policy.Rate(*b.SpeedBits)
	if b.FullNS == nil {
		fact(s, "later", fmt.Sprintf("conforms, as the device's %s can not fill the bucket", speed))
		return
	}
	fact(s, "later", fmt.Sprintf("%s after %s of such packets at the device's %s", then, about(*b.FullNS), speed))
}

// fate is what becomes of an excess packet.
func (b Level) fate(verdict string) string {
	ecn := b.Excess == policy.ECN.String()
	switch {
	case verdict == "mark":
		return "marked by ECN where it can be, else dropped"
	case verdict == "drop" && ecn:
		return "dropped, and not marked by ECN, as twice the capacity would not hold it"
	case verdict == "drop":
		return "dropped"
	}
	return "counted, and passes"
}

// drained says when what is excess now conforms.
func (b Level) drained(s *strings.Builder, bytes uint64) {
	text := "conforms in " + about(b.WaitNS)
	if bytes > b.holds(b.CapacityBytes) {
		text += ", when the bucket is empty, as it is bigger than that"
	}
	text += ", if nothing else comes"
	switch {
	case b.Penalty == policy.Penalty{Kind: policy.PenaltyFill}.String():
		text += "; each excess packet until then fills the bucket again"
	case b.Penalty != policy.Penalty{}.String():
		text += "; each excess packet until then keeps the bucket full for " + b.Penalty + " again"
	}
	fact(s, "later", text)
}

func (c Counted) words() string {
	parts := []string{fmt.Sprintf("%d at layer 2", c.PacketBytes)}
	one := int64(c.PacketBytes) + int64(c.TagBytes) + int64(c.OverheadBytes)
	if c.TagBytes > 0 {
		parts = append(parts, fmt.Sprintf("+ %d VLAN tag", c.TagBytes))
	}
	switch {
	case c.OverheadBytes > 0:
		parts = append(parts, fmt.Sprintf("+ %d overhead", c.OverheadBytes))
	case c.OverheadBytes < 0:
		parts = append(parts, fmt.Sprintf("- %d overhead", -int(c.OverheadBytes)))
	}
	sum := strings.Join(parts, " ")
	if one < int64(c.MPUBytes) {
		sum = fmt.Sprintf("the least that one counts, as %s is %d", sum, one)
		one = int64(c.MPUBytes)
	}
	switch {
	case c.Segments > 1 && len(parts) == 1 && one == int64(c.PacketBytes):
		return fmt.Sprintf("%d bytes: %d segments of %s", c.Bytes, c.Segments, sum)
	case c.Segments > 1:
		return fmt.Sprintf("%d bytes: %d segments of %d (%s)", c.Bytes, c.Segments, one, sum)
	case len(parts) == 1 && one == int64(c.PacketBytes):
		return fmt.Sprintf("%d bytes at layer 2", c.Bytes)
	}
	return fmt.Sprintf("%d bytes: %s", c.Bytes, sum)
}

// about rounds a time up to four digits.
func about(ns uint64) string {
	d, digits := time.Duration(min(ns, math.MaxInt64/2)), time.Duration(1)
	for d/digits >= 10000 {
		digits *= 10
	}
	d = (d + digits - 1) / digits * digits
	return strings.ReplaceAll(d.String(), "µ", "u")
}

func fact(s *strings.Builder, label, text string) {
	first := fmt.Sprintf("  %-*s  ", labelWidth, label)
	s.WriteString(plain.Fold(plain.Line(text), explainWidth, first, strings.Repeat(" ", len(first))))
}
