package report

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Path is the path of packets into this host or out of it, and the rules there.
type Path struct {
	Packets string `json:"packets"` // which they are
	How     string `json:"how"`
	Hooks   []Stop `json:"hooks"` // in the order in which packets pass them
	// Elsewhere are rules for the same addresses on hooks that the packets do not pass, or not all of them; those
	// that they may pass first.
	Elsewhere []Elsewhere `json:"elsewhere"`
}

// A Stop is a hook that packets pass.
type Stop struct {
	Device    string `json:"device"`
	Direction string `json:"direction"`
	Match     string `json:"match"`
	Address   string `json:"address"` // on that side of the packet, "" where it is not known
	// Chain is all that is attached, in order; null where the device is not here.
	Chain []Attached `json:"chain"`
	// Warnings say what may keep packets from the rule that decides about them.
	Warnings []string `json:"warnings"`
	Rule     *string  `json:"rule"`     // null where none matches, or none can be read
	Attached *bool    `json:"attached"` // null where there are no rules
	State    string   `json:"state"`    // of the rules here, "" where there are none
	Sentence string   `json:"sentence"`
	// RateBits is the rate of the rule for all its packets together; null for none.
	RateBits *uint64 `json:"rate_bits_per_second"`
	// Hides are the wider rules that match, too, the narrowest first.
	Hides   []Brief  `json:"hides"`
	Counted *Counted `json:"counted"` // null where no rule matches
	Bucket  *Level   `json:"bucket"`  // null where there is none, and where it is not known which it is
	Passage
	// WaitNS is how long the packet is queued or, if it does not conform to the rule and its pools, the time until it would.
	WaitNS uint64 `json:"wait_ns"`
	// Verdict is pass, drop, mark or delay; unknown where the rules or the bucket are; lost where there is no ifb
	// for delayed packets.
	Verdict string `json:"verdict"`
	// HeldBack says whether an fq qdisc delays packets; null where none are delayed, and where that is not known.
	HeldBack *bool  `json:"held_back"`
	Note     string `json:"note"` // a remark; "" for none
	// Proposed is null for a rule without a shadow, and where its bucket is not known.
	Proposed *Proposed `json:"proposed"`
	// RevertsInNS is null unless the rules here are not confirmed.
	RevertsInNS *uint64 `json:"reverts_in_ns"`
	// What became of the packets of the rule since it was set.
	PassedPackets  uint64 `json:"passed_packets"`
	ExcessPackets  uint64 `json:"excess_packets"`
	DroppedPackets uint64 `json:"dropped_packets"`
}

// Proposed is the verdict of a rule's shadow on a packet.
type Proposed struct {
	Key           string `json:"key"`   // of the bucket
	Bytes         uint64 `json:"bytes"` // as it counts them
	LevelBytes    uint64 `json:"level_bytes"`
	CapacityBytes uint64 `json:"capacity_bytes"`
	Conforms      bool   `json:"conforms"`
	Colour        string `json:"colour"` // "" without colours
	// The second bucket is P or E; both are null without colours.
	SecondLevelBytes    *uint64 `json:"second_level_bytes"`
	SecondCapacityBytes *uint64 `json:"second_capacity_bytes"`
}

// Attached is a program, filter, chain, ifb or qdisc that packets pass.
type Attached struct {
	At        string `json:"at"` // xdp, netfilter, tcx, clsact, ifb or qdisc
	ProgramID uint32 `json:"program_id"`
	Name      string `json:"name"`
	Ours      bool   `json:"ours"`
	Decides   bool   `json:"decides"` // it enforces the rule that matches
	Limits    bool   `json:"limits"`  // true for another limiter of the rate
}

// Brief is what matters of a rule that does not decide.
type Brief struct {
	Rule     string  `json:"rule"`
	RateBits *uint64 `json:"rate_bits_per_second"` // null if it is unlimited
	Each     string  `json:"each"`
	Within   string  `json:"within"` // "" for no pool
	Sentence string  `json:"sentence"`
	rates    string  // of a rule with colours; else ""
}

// NewBrief is the rule of a direction of a device, where match is the side that its prefix is compared with.
func NewBrief(r policy.Rule, device string, d policy.Direction, match policy.Match) Brief {
	rate, _ := limit(r)
	b := Brief{Rule: r.Prefix.String(), RateBits: rate, Each: r.Each.String(), Within: string(r.Within), Sentence: r.Sentence(device, d, match)}
	if r.Algorithm.HasColours() {
		options := NewColourOptions(r)
		b.rates = options.rate(rateText(rate))
	}
	return b
}

func (b Brief) String() string {
	all, rate := policy.Each{}, b.rates
	if b.RateBits != nil && rate == "" {
		rate = rateText(b.RateBits)
	}
	switch {
	case b.RateBits == nil && b.Within != "":
		return b.Rule + " (limited by pool " + b.Within + ")"
	case b.RateBits == nil:
		return b.Rule + " (not limited)"
	case b.Each == all.String():
		return fmt.Sprintf("%s (%s)", b.Rule, rate)
	}
	return fmt.Sprintf("%s (%s for each %s)", b.Rule, rate, b.Each)
}

// Elsewhere is a rule of a hook that packets do not pass, or only some.
type Elsewhere struct {
	Device    string `json:"device"`
	Direction string `json:"direction"`
	Brief
	Attached bool   `json:"attached"`
	State    string `json:"state"`
	Met      string `json:"met"` // whether and when packets pass it
}

// Counted is how many bytes a packet counts.
type Counted struct {
	PacketBytes   uint64 `json:"packet_bytes"` // of each segment, at layer 2
	Segments      uint64 `json:"segments"`
	TagBytes      uint64 `json:"tag_bytes"`      // of each
	OverheadBytes int16  `json:"overhead_bytes"` // of each
	MPUBytes      uint16 `json:"mpu_bytes"`      // of each, at least
	Bytes         uint64 `json:"bytes"`          // in all
}

// Level is the level of a bucket, and what that means for a packet.
type Level struct {
	Key           string `json:"key"`     // the host, subnet or flow, or the network
	Spilled       bool   `json:"spilled"` // the table has no room for the key: this is the rule's spill bucket
	LevelBytes    uint64 `json:"level_bytes"`
	CapacityBytes uint64 `json:"capacity_bytes"`
	Queue
	EmptyNS       uint64  `json:"empty_ns"` // until it is empty, if nothing more comes
	Conforms      bool    `json:"conforms"`
	RoomPackets   uint64  `json:"room_packets"` // how many such packets conform now
	RoomBytes     uint64  `json:"room_bytes"`
	AtOncePackets uint64  `json:"at_once_packets"`        // how many of them are not delayed
	SpeedBits     *uint64 `json:"device_bits_per_second"` // null where the device does not say
	FullNS        *uint64 `json:"full_ns"`                // until it is full at that; null where it never is, or is not known
	WaitNS        uint64  `json:"wait_ns"`                // how long the packet is queued, or until it conforms if no others come
	Excess        string  `json:"excess"`
	Penalty       string  `json:"penalty"`
	HeldNS        uint64  `json:"held_ns"`            // how long a penalty still keeps it full
	HeldUntil     uint64  `json:"held_until_unix_ns"` // 0 without such a penalty
	Colouring
}

const (
	labelWidth = len("elsewhere")
	// fewElsewhere is how many rules elsewhere are listed as text.
	fewElsewhere = 4
)

// Paths are all paths that the packets in question may take.
type Paths []Path

// Text writes paths for people to read: first which rules decide and how, then why. Paths that differ only in their
// addresses are one text.
func (paths Paths) Text(w io.Writer) error {
	var s strings.Builder
	told := map[string]bool{} // pools
	written := make([]bool, len(paths))
	for i := range paths {
		if written[i] {
			continue
		}
		var same []*Path
		for j := i + 1; j < len(paths); j++ {
			if key := paths[i].buckets(); key != "" && !written[j] && paths[j].buckets() == key {
				same, written[j] = append(same, &paths[j]), true
			}
		}
		if i > 0 {
			s.WriteByte('\n')
		}
		paths[i].text(&s, same, told)
	}
	_, err := io.WriteString(w, s.String())
	return err
}

// buckets identifies all that packets meet on a path, if they meet only buckets of pools; else it is "".
func (w *Path) buckets() (key string) {
	for i := range w.Hooks {
		p := &w.Hooks[i]
		if p.Rule == nil || p.Bucket != nil || p.Verdict == "unknown" || p.Proposed != nil || p.RevertsInNS != nil {
			return ""
		}
		key += fmt.Sprintln(p.Device, p.Direction, p.Match, p.State, *p.Counted, p.Warnings)
		for j := range p.Pools {
			key += fmt.Sprintln(p.Pools[j].Name, p.Pools[j].Sharer)
		}
	}
	return key
}

// text writes a path, and what is different on others that are alike.
func (w Path) text(s *strings.Builder, same []*Path, told map[string]bool) {
	s.WriteString(plain.Fold(plain.Line("packets "+w.Packets+" "+w.How), screenWidth, "", "    "))
	for i := range w.Hooks {
		stop := &w.Hooks[i]
		s.WriteString(plain.Fold(plain.Line(stop.where()+": "+stop.answer()+stop.limiters()), screenWidth, "  ", "    "))
		others := ""
		for _, path := range same {
			others += ", " + path.Hooks[i].network()
		}
		if others != "" {
			s.WriteString(plain.Fold(plain.Line("the same for "+others[2:]), screenWidth, "  ", "    "))
		}
	}
	for i := range w.Hooks {
		stop := &w.Hooks[i]
		foreign := func(a Attached) bool { return !a.Ours && a.At != "qdisc" }
		if stop.Rule != nil || len(stop.Warnings) > 0 || stop.Verdict == "unknown" || slices.ContainsFunc(stop.Chain, foreign) {
			s.WriteByte('\n')
			if len(w.Hooks) > 1 {
				s.WriteString(plain.Line(stop.where()) + "\n")
			}
			stop.text(s, told)
		}
	}
	for _, path := range same {
		w.Elsewhere = append(w.Elsewhere, path.Elsewhere...)
	}
	elsewhere(w.Elsewhere, s)
}

// elsewhere writes rules that packets do not meet, or not all of them.
func elsewhere(rules []Elsewhere, s *strings.Builder) {
	var lines []string
	for i := range rules {
		e := &rules[i]
		met := e.Met
		if strings.HasPrefix(met, "not met") {
			_, unless, _ := strings.Cut(met, ", unless")
			met = "not on this path"
			if unless != "" {
				met += ", unless" + unless
			}
		}
		line := fmt.Sprintf("%s %s %s: %s%s", e.Device, e.Direction, e.Brief, met, remark(Rule{Attached: new(e.Attached), State: e.State}))
		if !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	if len(lines) > 0 {
		s.WriteString("\nother rules for these packets:\n")
	}
	for i, line := range lines {
		if i == fewElsewhere && len(lines) > fewElsewhere+1 {
			fmt.Fprintf(s, "  %d more, which -j lists\n", len(lines)-fewElsewhere)
			break
		}
		s.WriteString(plain.Fold(plain.Line(line), screenWidth, "  ", "    "))
	}
}

func (p *Stop) where() string { return p.Device + " " + p.Direction + p.otherSide() }

// answer is which rule decides, and what happens to the packets.
func (p *Stop) answer() string {
	switch {
	case p.Rule == nil && p.Verdict == "unknown":
		return p.Note
	case p.Rule == nil && p.State == "":
		return "no rules; they pass"
	case p.Rule == nil && p.Address == "":
		return "no rule matches them; they pass"
	case p.Rule == nil:
		return "no rule matches " + p.Address + "; they pass"
	case NotInForce(p.Attached):
		return *p.Rule + " matches, but is NOT IN FORCE (" + p.State + "); they pass"
	}
	says := *p.Rule + " decides; " + p.fate()
	switch i := p.refuser(); {
	case p.byRule():
		says = *p.Rule + " is limited by its own rate; " + p.fate()
	case i >= 0:
		says = *p.Rule + " matches, and pool " + p.Pools[i].Name + " decides; " + p.fate()
	case p.Bucket == nil && len(p.Pools) > 0:
		says = *p.Rule + " matches; " + p.fate()
	}
	if p.WatchedNS > 0 && p.RecentPackets == 0 {
		says += "; the rule uses nothing now"
	}
	if full := p.full(); full != "" {
		says += "; " + full
	}
	if p.DroppedPackets > 0 {
		says += "; " + p.dropped() + " of all packets of " + *p.Rule + " were dropped so far"
	}
	return says
}

func (p *Stop) dropped() string {
	return percentText(percentOf(p.DroppedPackets, p.PassedPackets+p.DroppedPackets))
}

// network is that of the rule that matches, with what it dropped.
func (p *Stop) network() string {
	if p.DroppedPackets == 0 {
		return *p.Rule
	}
	return *p.Rule + " (" + p.dropped() + " dropped)"
}

// limiters names those that are not shapectl.
func (p *Stop) limiters() (text string) {
	for _, a := range p.Chain {
		switch {
		case a.Limits && a.At == "qdisc":
			text += "; the qdisc " + a.Name + " may limit them, too"
		case a.Limits:
			text += "; the " + a.Name + " may limit them, too"
		}
	}
	return text
}

// fate is what happens to the packets now.
func (p *Stop) fate() string {
	b := p.Bucket
	switch {
	case p.RecentPackets > 0 && p.Verdict != "lost":
		return p.lately()
	case p.Verdict == "unknown":
		return "whether they pass depends on the flow"
	case p.Verdict == "lost":
		return "they are LOST"
	case p.RefusedBy == nil && p.full() != "" && p.needsFlow():
		return "whether they pass depends on the flow" + strings.Replace(p.covers(), ", ", "; if so, ", 1)
	case !p.plain():
		return "they " + p.become()
	case b == nil:
		return "they pass, without a limit"
	case b.Colour != "":
		return "they are " + b.Colour + " now, and " + b.become()
	case p.Verdict == "drop":
		return "they are dropped now"
	case p.Verdict == "mark" && b.Conforms:
		return "they wait " + about(b.WaitNS) + ", marked by ECN"
	case p.Verdict == "mark":
		return "they are marked by ECN now"
	case p.Verdict == "delay" && p.unheld():
		return "they pass now, NOT DELAYED"
	case p.Verdict == "delay":
		return "they wait " + about(b.WaitNS)
	case !b.Conforms:
		return "they are excess, and pass"
	}
	return "they pass now"
}

// lately is what the rule used while its packets were counted, and what happened to them.
func (p *Stop) lately() string {
	used := optional(p.UseBits, bitsText)
	if p.RateBits != nil {
		used = useText(p.UseBits, *p.RateBits)
	}
	packets := plain.Count(p.RecentPackets, "packet")
	what := "none of " + packets + " was dropped"
	if p.RecentDrops > 0 {
		what = percentText(percentOf(p.RecentDrops, p.RecentPackets)) + " of " + packets + " were dropped"
	}
	return fmt.Sprintf("in the last %.1f s, the rule used %s, and %s", float64(p.WatchedNS)/1e9, used, what)
}

// text says why. Pools that were told of are only named.
func (p *Stop) text(s *strings.Builder, told map[string]bool) {
	var before []string // the pools that were told of
	if p.Rule != nil {
		_, says, _ := strings.Cut(p.Sentence, ": ")
		fact(s, "rule", says+remark(Rule{Attached: p.Attached, State: p.State}))
		p.now(s)
		if p.Bucket != nil {
			p.Bucket.text(s)
			if p.Bucket.Spilled {
				fact(s, "spilled", noRoom(p.Bucket.Key))
			}
		}
		if shares := p.Sharing.text(); shares != "" {
			fact(s, "shares", shares)
		}
		if c := p.Counted; c.Bytes != c.PacketBytes {
			fact(s, "counted", c.words())
		}
		p.counters(s)
		refuser := p.refuser()
		for i := range p.Pools {
			pool := &p.Pools[i]
			if told[pool.Name] {
				before = append(before, pool.Name)
				continue
			}
			told[pool.Name] = true
			fact(s, "pool", pool.text(i == refuser))
		}
		if before != nil {
			fact(s, "pools", "as above: "+strings.Join(before, ", "))
		}
	}
	for _, warning := range p.Warnings {
		fact(s, "warning", warning)
	}
	if told := len(p.Pools) > 0 && len(before) == len(p.Pools); p.Rule != nil && p.Note != "" && !(told && p.needsFlow()) {
		fact(s, "note", p.Note)
	}
	if p.RevertsInNS != nil {
		fact(s, "note", lastReverts(*p.RevertsInNS, ""))
	}
	var chain []string
	for _, a := range p.Chain {
		chain = append(chain, a.String())
	}
	if chain != nil {
		fact(s, "path", strings.Join(chain, "; "))
	}
	if len(p.Hides) > 0 {
		fact(s, "wider", wider(p.Hides))
	}
	if p.Proposed != nil {
		would, second := "would pass", ""
		switch {
		case p.Proposed.Colour != "":
			would = "would be " + p.Proposed.Colour
			second = fmt.Sprintf(", and %d of %d in the second one", *p.Proposed.SecondLevelBytes, *p.Proposed.SecondCapacityBytes)
		case !p.Proposed.Conforms:
			would = "would be refused"
		}
		fact(s, "shadow", fmt.Sprintf("%s: bucket of %s with %d of %d bytes%s",
			would, p.Proposed.Key, p.Proposed.LevelBytes, p.Proposed.CapacityBytes, second))
	}
}

// counters are how many packets the rule refused so far.
func (p *Stop) counters(s *strings.Builder) {
	all := p.PassedPackets + p.DroppedPackets
	if all == 0 {
		return
	}
	text := fmt.Sprintf("the rule dropped %d of %s (%s)", p.DroppedPackets, plain.Count(all, "packet"), p.dropped())
	if p.ExcessPackets != p.DroppedPackets {
		what := "excess"
		if p.Bucket != nil && p.Bucket.Colour != "" {
			what = "yellow or red"
		}
		text += fmt.Sprintf(", %d %s", p.ExcessPackets, what)
	}
	fact(s, "so far", text)
}

// otherSide is the side that the rules compare, if that is not the far side. The packets may have any address there.
func (p *Stop) otherSide() string {
	anywhere := p.Rule != nil && p.Address == ""
	switch {
	case p.Direction == policy.Egress.String() && p.Match == policy.MatchSrc.String():
		if anywhere {
			return ", from any source"
		}
		return ", by source address"
	case p.Direction == policy.Ingress.String() && p.Match == policy.MatchDst.String():
		if anywhere {
			return ", to any destination"
		}
		return ", by destination address"
	}
	return ""
}

// wider are rules that match, too, the narrowest first.
func wider(rules []Brief) string {
	var names []string
	for _, r := range rules {
		names = append(names, r.String())
	}
	return "overrides " + strings.Join(names, ", ")
}

func (a Attached) String() string {
	what := a.Name
	switch {
	case a.ProgramID != 0 && a.Name == "":
		what = fmt.Sprintf("program %d", a.ProgramID)
	case a.ProgramID != 0:
		what += fmt.Sprintf(" (program %d)", a.ProgramID)
	}
	switch {
	case a.Decides:
		what += ", decides"
	case a.Limits:
		what += ", another limiter"
	case a.At != "qdisc" && !a.Ours:
		what += ", not shapectl's"
	}
	return a.At + " " + what
}

// now is the verdict, and when there will be another one.
func (p *Stop) now(s *strings.Builder) {
	b := p.Bucket
	switch {
	case NotInForce(p.Attached):
		fact(s, "now", "passes: NOTHING METERS IT")
	case p.Verdict == "unknown":
	case !p.plain():
		p.throughPools(s)
	case b == nil:
	case b.Colour != "":
		p.coloured(s)
	case b.delays():
		p.queued(s)
	case b.Conforms && p.Counted.Bytes > b.CapacityBytes:
		fact(s, "now", p.packet()+" conforms, and passes: it is larger than the bucket, but that is empty")
	case b.Conforms:
		fact(s, "now", p.packet()+" conforms, and passes; "+b.room())
		b.later(s, "excess")
	default:
		fact(s, "now", p.packet()+" is excess: "+b.fate(p.Verdict))
		b.drained(s, p.Counted.Bytes)
	}
}

// packet is the packet that the verdict is about.
func (p *Stop) packet() string { return fmt.Sprintf("a packet of %d bytes", p.Counted.Bytes) }

func (b *Level) room() string {
	return fmt.Sprintf("room for %s (%d bytes)", plain.Count(b.RoomPackets, "such packet"), b.RoomBytes)
}

const lost = " is lost: no ifb device lets it enter again"

// queued is the verdict of a rule that delays, and when there will be another one.
func (p *Stop) queued(s *strings.Builder) {
	b := p.Bucket
	if !b.Conforms {
		fact(s, "now", p.packet()+" is dropped: the queue has no room for it")
		b.drained(s, p.Counted.Bytes)
		return
	}
	if p.Verdict == "lost" {
		fact(s, "now", p.packet()+lost)
		return
	}
	text := p.packet() + " departs immediately"
	if b.WaitNS > 0 {
		text = p.packet() + " waits " + about(b.WaitNS)
		if p.unheld() {
			text = p.packet() + " passes: nothing delays it by " + about(b.WaitNS)
		}
	}
	if p.Verdict == "mark" {
		text += ", and is marked by ECN if it allows that, as that is more than " + about(*b.ECNAboveNS)
	}
	text += "; " + b.room()
	if b.WaitNS == 0 && b.AtOncePackets < b.RoomPackets {
		text += fmt.Sprintf(", of which %d would depart immediately", b.AtOncePackets)
	}
	fact(s, "now", text)
	b.later(s, "dropped")
}

func (b *Level) text(s *strings.Builder) {
	if b.Colour != "" {
		fact(s, "buckets", fmt.Sprintf("of %s; all empty in %s if no more come", b.levels(b.Key, b.LevelBytes, b.CapacityBytes), about(b.EmptyNS)))
		return
	}
	label, full, _ := strings.Cut(b.filled(b.Key, b.LevelBytes, b.CapacityBytes), " ")
	switch {
	case b.LevelBytes == 0:
		full = fmt.Sprintf("of %s: empty, of %d bytes", b.Key, b.CapacityBytes)
		if b.beyond > 0 {
			full += fmt.Sprintf(", with a queue of %d", b.beyond)
		}
		fact(s, label, full)
		return
	case b.HeldNS > 0:
		until := time.Unix(0, int64(b.HeldUntil)).Format(time.TimeOnly)
		full = fmt.Sprintf("of %s: full, and kept full by the penalty for another %s, until %s", b.Key, about(b.HeldNS), until)
	}
	fact(s, label, fmt.Sprintf("%s; empty in %s if no more come", full, about(b.EmptyNS)))
}

// later says when such packets no longer conform; then is what happens to them.
func (b *Level) later(s *strings.Builder, then string) {
	if b.SpeedBits == nil {
		return
	}
	speed := policy.Rate(*b.SpeedBits)
	if b.FullNS == nil {
		fact(s, "later", fmt.Sprintf("conforms: the device's %s cannot fill the bucket", speed))
		return
	}
	fact(s, "later", fmt.Sprintf("%s after %s of such packets at the device's %s", then, about(*b.FullNS), speed))
}

// fate is what happens to an excess packet.
func (b *Level) fate(verdict string) string {
	if verdict == "drop" && b.Excess == policy.ECN.String() {
		return "dropped, not marked by ECN, as it exceeds twice the capacity"
	}
	return excessBecomes[verdict]
}

// drained says when such a packet conforms.
func (b *Level) drained(s *strings.Builder, bytes uint64) {
	text := "conforms in " + about(b.WaitNS)
	if bytes > b.holds(b.CapacityBytes) {
		text += ", when the bucket is empty, as it is larger than that"
	}
	text += ", if no others come"
	switch {
	case b.Penalty == policy.Penalty{Kind: policy.PenaltyFill}.String():
		text += "; each excess packet until then fills the bucket again"
	case b.Penalty != policy.Penalty{}.String():
		text += "; each excess packet until then keeps the bucket full for " + b.Penalty + " again"
	}
	fact(s, "later", text)
}

func (c *Counted) words() string {
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
		sum = fmt.Sprintf("the minimum, as %s is %d", sum, one)
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

// about rounds a time to three digits.
func about(ns uint64) string {
	d, digits := time.Duration(min(ns, math.MaxInt64/2)), time.Duration(1)
	for d/digits >= 1000 {
		digits *= 10
	}
	d = (d + digits/2) / digits * digits
	return strings.ReplaceAll(d.String(), "µ", "u")
}

func fact(s *strings.Builder, label, text string) {
	first := fmt.Sprintf("  %-*s  ", labelWidth, label)
	s.WriteString(plain.Fold(plain.Line(text), screenWidth, first, strings.Repeat(" ", len(first))))
}
