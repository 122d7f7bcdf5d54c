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
	// RateBits is the rate of the rule for all its packets together, or the one after its quota that is in force; null for none.
	RateBits        *uint64 `json:"rate_bits_per_second"`
	SpeedTestBits   *uint64 `json:"speed_test_bits_per_second"`   // the most that a speed test of 10 s shows, by the bursts of the rule and its pools; null if that is not known
	FirstSecondBits *uint64 `json:"first_second_bits_per_second"` // the same for its first second
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
	return Brief{policy.CIDR(r.Prefix), r.Sentence(device, d, match), options(&r)}
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
	HoldsBytes    uint64 `json:"holds_bytes"` // the bucket and its queue together
	EmptyNS       uint64 `json:"empty_ns"`    // until it is empty, if nothing more comes
	Conforms      bool   `json:"conforms"`
	RoomPackets   uint64 `json:"room_packets"` // how many such packets conform now
	RoomBytes     uint64 `json:"room_bytes"`
	WaitNS        uint64 `json:"wait_ns"` // how long the packet is queued, or until it conforms if no others come
	HeldNS        uint64 `json:"held_ns"` // how long a penalty still keeps it full
	AnyRate       bool   `json:"-"`       // only other limits limit the rule
	Colouring
}

const (
	labelWidth = len("elsewhere")
	// fewElsewhere is how many rules elsewhere are listed as text.
	fewElsewhere = 4
)

// Paths are all paths that the packets in question may take.
type Paths []Path

// Text writes paths for people to read: first which rules decide and how, then why.
func (paths Paths) Text(w io.Writer) error {
	var s strings.Builder
	told := map[string]bool{} // pools
	for i := range paths {
		if i > 0 {
			s.WriteByte('\n')
		}
		paths[i].text(&s, told)
	}
	_, err := io.WriteString(w, s.String())
	return err
}

func (w *Path) text(s *strings.Builder, told map[string]bool) {
	line := func(indent, text string) { s.WriteString(plain.Fold(plain.Line(text), screenWidth, indent, "    ")) }
	answer := w.Packets + ": a packet passes; no rule limits it"
	if slices.ContainsFunc(w.Elsewhere, func(e Elsewhere) bool { return e.Met }) {
		answer = w.Packets + ": a packet passes, unless it meets one of the other rules below"
	}
	decides := slices.IndexFunc(w.Hooks, func(p Stop) bool { return p.where() == w.where() && w.says() })
	if decides >= 0 {
		answer = w.Packets + ", by " + w.where() + ": " + w.Hooks[decides].now()
	}
	line("", answer)
	line("  ", "they "+w.How)
	for i := range w.Hooks {
		stop := &w.Hooks[i]
		text := stop.where() + ": " + stop.decision()
		if i != decides && stop.says() {
			text += "; " + stop.now()
		}
		line("  ", text)
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
	if len(w.Elsewhere) > 0 {
		s.WriteString("\nother rules for these packets:\n")
	}
	for i := range w.Elsewhere {
		e := &w.Elsewhere[i]
		if i == fewElsewhere {
			fmt.Fprintf(s, "  %d more, which -j lists\n", len(w.Elsewhere)-i)
			break
		}
		line("  ", fmt.Sprintf("%s %s %s: %s%s", e.Device, e.Direction, e.Brief, e.When, remark(e.Attached, e.State)))
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
	if i := p.Pool(p.DecidedBy); i >= 0 {
		text = *p.Rule + " matches, and pool " + p.Pools[i].Name + " decides"
	}
	if p.WatchedNS == 0 {
		return text
	}
	used := optional(p.UseBits, Bits)
	if p.RateBits != nil {
		used = useText(p.UseBits, *p.RateBits)
	}
	text += fmt.Sprintf("; in the last %.1f s, the rule used %s", float64(p.WatchedNS)/1e9, used)
	if p.RecentDrops > 0 {
		text += ", and " + percentText(percentOf(p.RecentDrops, p.RecentPackets)) + " of " + plain.Count(p.RecentPackets, "packet") + " were dropped"
	}
	return text
}

// text says why. Pools that were told of are only named.
func (p *Stop) text(s *strings.Builder, told map[string]bool) {
	var before []string // the pools that were told of
	if p.Rule != nil {
		fact(s, "rule", p.Sentence+remark(!NotInForce(p.Attached), p.State))
		if p.Bucket != nil {
			p.Bucket.text(s)
		}
		if p.Quota != nil {
			fact(s, "quota", p.Quota.text())
		}
		if shares := p.Sharing.text(); shares != "" {
			fact(s, "shares", shares)
		}
		if p.SpeedTestBits != nil && !NotInForce(p.Attached) && *p.FirstSecondBits*100 > *p.SpeedTestBits*103 {
			fact(s, "speed", SpeedTest(*p.SpeedTestBits, *p.FirstSecondBits))
		}
		if all := p.PassedPackets + p.DroppedPackets; all > 0 {
			text := fmt.Sprintf("the rule dropped %d of %s (%s)", p.DroppedPackets, plain.Count(all, "packet"), percentText(percentOf(p.DroppedPackets, all)))
			if p.ExcessPackets != p.DroppedPackets {
				text += fmt.Sprintf(", %d excess", p.ExcessPackets)
			}
			fact(s, "so far", text)
		}
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
	if p.Note != "" && p.Verdict != "unknown" {
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
	var wider []string
	for _, r := range p.Hides {
		wider = append(wider, r.String())
	}
	if wider != nil {
		fact(s, "wider", "overrides "+strings.Join(wider, ", "))
	}
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

// SpeedTest says what a speed test of ten seconds shows at most.
func SpeedTest(bits, firstSecond uint64) string {
	return fmt.Sprintf("a 10 s speed test shows up to %s, its first second %s; of payload alone, about 5%% less", Bits(bits), Bits(firstSecond))
}

// now says which quota is used up, what happens to a packet at this moment, and when that changes.
func (p *Stop) now() string {
	if quota := p.usedUp(); quota != "" && !NotInForce(p.Attached) && p.Verdict != "lost" {
		return quota + "; " + p.fate()
	}
	return p.fate()
}

// usedUp says which quota of the rule and its pools is used up, of several the one that leaves least; "" for none.
func (p *Stop) usedUp() (says string) {
	who, least := "", uint64(math.MaxUint64)
	if p.Bucket != nil {
		who = p.Bucket.Key
	} else if p.Rule != nil {
		who = *p.Rule
	}
	note := func(who string, q *QuotaUse) {
		if text := q.usedUp(who); text != "" && q.ThenBits < least {
			says, least = text, q.ThenBits
		}
	}
	note(who, p.Quota)
	for i := range p.Pools {
		note("pool "+p.Pools[i].Name, p.Pools[i].Quota)
	}
	return says
}

// fate says what happens to a packet at this moment, and when that changes.
func (p *Stop) fate() string {
	b, text := p.Bucket, fmt.Sprintf("a packet of %d bytes ", p.Bytes)
	switch {
	case p.Verdict == "unknown" && p.DecidedBy != nil:
		return p.limit(p.DecidedBy) + " limits them now; " + p.Note
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
	case p.WaitNS > 0 && p.HeldBack != nil && !*p.HeldBack:
		text += "passes now: nothing delays it by " + About(p.WaitNS)
	case p.WaitNS > 0:
		text += "waits " + About(p.WaitNS)
	case b == nil && len(p.Pools) == 0:
		return text + "passes, without a limit"
	default:
		text += "passes now" + p.covers()
	}
	if p.Verdict == "mark" {
		text += ", and is marked by ECN if it allows that"
	}
	switch {
	case p.LimitedBy != nil:
		text += p.limitedText()
	case b != nil && len(p.Pools) == 0:
		text += fmt.Sprintf("; %s has room for %s (%d bytes)", *p.Rule, plain.Count(b.RoomPackets, "such packet"), b.RoomBytes)
	}
	return text
}

// refused says which limit an excess packet exceeds, what happens to it, and when it would conform.
func (p *Stop) refused() string {
	by, sharer := p.limit(p.RefusedBy), p.Sharer
	if pool := p.Pool(p.RefusedBy); pool >= 0 {
		sharer = p.Pools[pool].Sharer
	}
	text := "is dropped now by " + by
	switch p.Verdict {
	case "pass":
		text = "passes now, counted as excess by " + by
	case "mark":
		text = "is marked by ECN now by " + by + " if it allows that, else dropped"
	}
	switch p.RefusedReason {
	case Share:
		text += ", as it is beyond the fair share of " + sharer
	case TooManyPackets:
		text += ", as there are too many packets"
	case TooManyFlows:
		text += ", if it begins a flow, as too many begin"
	case UsedUp:
		text += ", as the quota is used up"
	}
	text += "; it conforms in " + About(p.WaitNS) + ", if no others come"
	if p.Pool(p.LimitedBy) > p.Pool(p.RefusedBy) {
		text += p.limitedText()
	}
	return text
}

func (b *Level) text(s *strings.Builder) {
	label, full := "bucket", filled(b.LevelBytes, b.HoldsBytes)
	switch {
	case b.Colour != "":
		label, full = "buckets", "C "+full+", "+map[bool]string{false: "E ", true: "P "}[b.Peak]+filled(*b.SecondLevelBytes, *b.SecondCapacityBytes)
	case b.HeldNS > 0:
		full = "full, and kept full by the penalty for another " + About(b.HeldNS)
	}
	if b.EmptyNS > 0 {
		full += "; empty in " + About(b.EmptyNS) + " if no more come"
	}
	if !b.AnyRate {
		fact(s, label, "of "+b.Key+": "+full)
	}
	if b.Spilled {
		fact(s, "spilled", "the bucket table has no room for "+b.Key+": this is the rule's spill bucket, which all keys without a bucket share")
	}
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
