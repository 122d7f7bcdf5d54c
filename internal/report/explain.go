package report

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// An Answer says whether a packet would pass now, and which limit decides.
type Answer struct {
	// Verdict is pass, drop, mark or delay; unknown where the rules or the bucket are; lost where there is no ifb
	// for delayed packets.
	Verdict  string `json:"verdict"`
	Conforms bool   `json:"conforms"` // to the rule and its pools
	// DecidedBy is the rule or pool that refuses the packet, or limited others just now, else the one that it conforms to;
	// null without a limit.
	DecidedBy *string `json:"decided_by"`
	// WaitNS is how long the packet is queued or, if it does not conform, the time until it would.
	WaitNS        uint64  `json:"wait_ns"`
	LevelBytes    *uint64 `json:"level_bytes"` // of what decides; null where that is not known
	CapacityBytes *uint64 `json:"capacity_bytes"`
	Device        string  `json:"device"` // where it is
	Direction     string  `json:"direction"`
	Rule          *string `json:"rule"`     // null where none matches, or none can be read
	Attached      *bool   `json:"attached"` // null where there are no rules
	Bytes         uint64  `json:"bytes"`    // as the rule counts the packet
}

// A Path is the path of packets into this host or out of it, and the rules there. Its answer is that of the hook that decides.
type Path struct {
	Answer
	Packets string `json:"packets"` // which they are
	How     string `json:"how"`
	Hooks   []Stop `json:"hooks"` // in the order in which packets pass them
	// Elsewhere are rules for the same addresses on hooks that the packets do not pass, or not all of them; those
	// that they may pass first.
	Elsewhere []Elsewhere `json:"elsewhere"`
}

// A Stop is a hook that packets pass.
type Stop struct {
	Answer
	Match   string `json:"match"`
	Address string `json:"address"` // on that side of the packet, "" where it is not known
	// Chain is all that is attached, in order; null where the device is not here.
	Chain []Attached `json:"chain"`
	// Warnings say what may keep packets from the rule that decides about them.
	Warnings []string `json:"warnings"`
	State    string   `json:"state"` // of the rules here, "" where there are none
	Sentence string   `json:"sentence"`
	// RateBits is the rate of the rule for all its packets together; null for none.
	RateBits *uint64 `json:"rate_bits_per_second"`
	// Hides are the wider rules that match, too, the narrowest first.
	Hides  []Brief `json:"hides"`
	Bucket *Level  `json:"bucket"` // null where there is none, and where it is not known which it is
	Passage
	// HeldBack says whether an fq qdisc delays packets; null where none are delayed, and where that is not known.
	HeldBack *bool  `json:"held_back"`
	Note     string `json:"note"` // a remark; "" for none
	// RevertsInNS is null unless the rules here are not confirmed.
	RevertsInNS *uint64 `json:"reverts_in_ns"`
	// What became of the packets of the rule since it was set.
	PassedPackets  uint64 `json:"passed_packets"`
	ExcessPackets  uint64 `json:"excess_packets"`
	DroppedPackets uint64 `json:"dropped_packets"`
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
	Rule     string `json:"rule"`
	Sentence string `json:"sentence"`
	limit    string
}

// NewBrief is the rule of a direction of a device, where match is the side that its prefix is compared with.
func NewBrief(r policy.Rule, device string, d policy.Direction, match policy.Match) Brief {
	b := Brief{Rule: r.Prefix.String(), Sentence: r.Sentence(device, d, match), limit: r.Rate.String()}
	switch scope := live.Scope(&r); {
	case r.Rate == policy.Unlimited && r.Within != "":
		b.limit = "limited by pool " + string(r.Within)
	case r.Rate == policy.Unlimited:
		b.limit = "not limited"
	case scope != "":
		b.limit += " for each " + scope
	}
	return b
}

func (b Brief) String() string { return b.Rule + " (" + b.limit + ")" }

// Elsewhere is a rule of a hook that packets do not pass, or only some.
type Elsewhere struct {
	Device    string `json:"device"`
	Direction string `json:"direction"`
	Brief
	Attached bool   `json:"attached"`
	State    string `json:"state"`
	Met      bool   `json:"met"`  // whether packets may pass it
	When     string `json:"when"` // they pass it, or would
}

// Level is the level of a bucket, and what that means for a packet.
type Level struct {
	Key           string `json:"key"`     // the host, subnet or flow, or the network
	Spilled       bool   `json:"spilled"` // the table has no room for the key: this is the rule's spill bucket
	LevelBytes    uint64 `json:"level_bytes"`
	CapacityBytes uint64 `json:"capacity_bytes"`
	Queue
	EmptyNS     uint64 `json:"empty_ns"` // until it is empty, if nothing more comes
	Conforms    bool   `json:"conforms"`
	RoomPackets uint64 `json:"room_packets"` // how many such packets conform now
	RoomBytes   uint64 `json:"room_bytes"`
	WaitNS      uint64 `json:"wait_ns"` // how long the packet is queued, or until it conforms if no others come
	Excess      string `json:"excess"`
	Penalty     string `json:"penalty"`
	HeldNS      uint64 `json:"held_ns"` // how long a penalty still keeps it full
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
		if p.Rule == nil || p.Bucket != nil || p.Verdict == "unknown" || p.RevertsInNS != nil {
			return ""
		}
		key += fmt.Sprintln(p.Device, p.Direction, p.Match, p.State, p.Bytes, p.Warnings)
		for j := range p.Pools {
			key += fmt.Sprintln(p.Pools[j].Name, p.Pools[j].Sharer)
		}
	}
	return key
}

// text writes a path, and what is different on others that are alike.
func (w Path) text(s *strings.Builder, same []*Path, told map[string]bool) {
	answer := w.Packets + ": a packet passes; no rule limits it"
	decides := slices.IndexFunc(w.Hooks, func(p Stop) bool { return p.where() == w.where() && w.says() })
	if decides >= 0 {
		answer = w.Packets + ", by " + w.where() + ": " + w.Hooks[decides].now()
	}
	s.WriteString(plain.Fold(plain.Line(answer), screenWidth, "", "    "))
	s.WriteString(plain.Fold(plain.Line("they "+w.How), screenWidth, "  ", "    "))
	for i := range w.Hooks {
		stop := &w.Hooks[i]
		line := stop.where() + ": " + stop.decision()
		if i != decides && stop.says() {
			line += "; " + stop.now()
		}
		s.WriteString(plain.Fold(plain.Line(line), screenWidth, "  ", "    "))
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
		foreign := func(a Attached) bool { return !a.Ours && (a.At != "qdisc" || a.Limits) }
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
		line := fmt.Sprintf("%s %s %s: %s%s", e.Device, e.Direction, e.Brief, e.When, remark(e.Attached, e.State))
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

func (a *Answer) where() string { return a.Device + " " + a.Direction }

// says reports whether there is a verdict of a rule, or why it is not known.
func (a *Answer) says() bool { return a.Rule != nil || a.Verdict == "unknown" }

// decision is which rule or pool decides, and what it did just now.
func (p *Stop) decision() string {
	switch {
	case p.Rule == nil && p.Verdict == "unknown":
		return "not known"
	case p.Rule == nil && p.State == "":
		return "no rules"
	case p.Rule == nil && p.Address == "":
		return "no rule matches them"
	case p.Rule == nil:
		return "no rule matches " + p.Address
	case NotInForce(p.Attached):
		return *p.Rule + " matches"
	}
	text := *p.Rule + " decides"
	switch i := p.Pool(p.DecidedBy); {
	case p.LimitedBy != nil && i < 0:
		text = *p.Rule + " is limited by its own rate"
	case i >= 0 && (p.LimitedBy != nil || p.RefusedBy != nil && p.RecentPackets == 0):
		text = *p.Rule + " matches, and pool " + p.Pools[i].Name + " decides"
	case p.Bucket == nil && len(p.Pools) > 0:
		text = *p.Rule + " matches"
	}
	switch {
	case p.RecentPackets > 0:
		text += "; " + p.lately()
	case p.WatchedNS > 0:
		text += "; the rule uses nothing now"
	}
	if full := p.full(); full != "" {
		text += "; " + full
	}
	return text
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
		fact(s, "rule", p.Sentence+remark(!NotInForce(p.Attached), p.State))
		if p.Bucket != nil {
			p.Bucket.text(s)
			if p.Bucket.Spilled {
				fact(s, "spilled", noRoom(p.Bucket.Key))
			}
		}
		if shares := p.Sharing.text(); shares != "" {
			fact(s, "shares", shares)
		}
		p.counters(s)
		for i := range p.Pools {
			pool := &p.Pools[i]
			if told[pool.Name] {
				before = append(before, pool.Name)
				continue
			}
			told[pool.Name] = true
			fact(s, "pool", pool.text())
		}
		if before != nil {
			fact(s, "pools", "as above: "+strings.Join(before, ", "))
		}
	}
	for _, warning := range p.Warnings {
		fact(s, "warning", warning)
	}
	if p.Rule != nil && p.Note != "" && p.Verdict != "unknown" {
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
}

// counters are how many packets the rule refused so far.
func (p *Stop) counters(s *strings.Builder) {
	all := p.PassedPackets + p.DroppedPackets
	if all == 0 {
		return
	}
	text := fmt.Sprintf("the rule dropped %d of %s (%s)", p.DroppedPackets, plain.Count(all, "packet"), p.dropped())
	if p.ExcessPackets != p.DroppedPackets {
		text += fmt.Sprintf(", %d excess", p.ExcessPackets)
	}
	fact(s, "so far", text)
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

// now says what happens to a packet at this moment, and when that changes.
func (p *Stop) now() string {
	b, text := p.Bucket, fmt.Sprintf("a packet of %d bytes ", p.Bytes)
	switch {
	case p.Verdict == "unknown" && p.DecidedBy != nil:
		return p.Note
	case p.Verdict == "unknown":
		return "not known: " + p.Note
	case NotInForce(p.Attached):
		return text + "passes: the rule is NOT IN FORCE (" + p.State + ")"
	case p.Verdict == "lost":
		return text + "is LOST: no ifb device lets it enter again"
	case b != nil && b.Colour != "":
		return text + p.coloured()
	case p.RefusedBy != nil:
		return text + p.refused()
	case p.WaitNS > 0 && p.unheld():
		text += "passes now: nothing delays it by " + About(p.WaitNS)
	case p.WaitNS > 0:
		text += "waits " + About(p.WaitNS)
	case b == nil && len(p.Pools) == 0:
		return text + "passes, without a limit"
	case b != nil && p.Bytes > b.CapacityBytes && !b.delays():
		return text + "passes now: it is larger than the bucket, but that is empty"
	default:
		text += "passes now" + p.covers()
	}
	if p.Verdict == "mark" {
		text += ", and is marked by ECN if it allows that"
	}
	switch {
	case p.LimitedBy != nil:
		text += "; " + p.limit(p.LimitedBy) + " limited such packets just now"
	case b != nil && len(p.Pools) == 0:
		text += "; " + *p.Rule + " has " + b.room()
	}
	return text
}

// refused says which limit an excess packet exceeds, what happens to it, and when it would conform.
func (p *Stop) refused() string {
	b, by, pool := p.Bucket, "by "+p.limit(p.RefusedBy), p.Pool(p.RefusedBy)
	text, sharer := "is dropped now "+by, p.Sharer
	switch p.Verdict {
	case "pass":
		text = "passes now, counted as excess " + by
	case "mark":
		text = "is marked by ECN now " + by + " if it allows that, else dropped"
	}
	switch {
	case p.RefusedReason == Share:
		if pool >= 0 {
			sharer = p.Pools[pool].Sharer
		}
		text += ", as it is beyond the fair share of " + sharer
	case pool >= 0 || b == nil:
	case b.delays():
		text += ", as the queue has no room for it"
	case p.Verdict == "drop" && b.Excess == policy.ECN.String():
		text += ", not marked by ECN, as it exceeds twice the capacity"
	}
	text += "; it conforms in " + About(p.WaitNS)
	if pool < 0 && b != nil && p.Bytes > b.holds(b.CapacityBytes) {
		text += ", when the bucket is empty, as it is larger than that"
	}
	text += ", if no others come"
	switch {
	case pool >= 0 || b == nil || b.Penalty == policy.Penalty{}.String():
	case b.Penalty == policy.Penalty{Kind: policy.PenaltyFill}.String():
		text += "; each excess packet until then fills the bucket again"
	default:
		text += "; each excess packet until then keeps the bucket full for " + b.Penalty + " again"
	}
	return text
}

// room is how many more packets conform.
func (b *Level) room() string {
	return fmt.Sprintf("room for %s (%d bytes)", plain.Count(b.RoomPackets, "such packet"), b.RoomBytes)
}

func (b *Level) text(s *strings.Builder) {
	label, full := b.filled(b.Key, b.LevelBytes, b.CapacityBytes)
	switch {
	case b.Colour != "":
		label, full = "buckets", "of "+b.levels(b.Key, b.LevelBytes, b.CapacityBytes)
	case b.HeldNS > 0:
		full = fmt.Sprintf("of %s: full, and kept full by the penalty for another %s", b.Key, About(b.HeldNS))
	}
	if b.EmptyNS > 0 {
		full += "; empty in " + About(b.EmptyNS) + " if no more come"
	}
	fact(s, label, full)
}

// About is a time in ns, rounded to three digits.
func About(ns uint64) string {
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
