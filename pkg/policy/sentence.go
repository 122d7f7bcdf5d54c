package policy

import (
	"fmt"
	"strings"
)

// Sentence describes r on a direction of a device in English. Its prefix is compared with
// the address that match names. A pool has none of the three.
func (r Rule) Sentence(device string, dir Direction, match Match) string {
	if r.Pool {
		return r.Says(match)
	}
	by := ""
	if match != dir.FarSide() {
		by = " by " + map[Match]string{MatchDst: "destination", MatchSrc: "source"}[match] + " address"
	}
	return fmt.Sprintf("%s %v%s: %s", device, dir, by, r.Says(match))
}

// Says describes r without its device: who gets which limit.
func (r Rule) Says(match Match) string {
	says := r.subject(match)
	switch {
	case r.Rate != Unlimited:
		says += " gets " + r.Gets()
	case r.Within != "":
		says += fmt.Sprintf(" is limited only by pool %q", string(r.Within)) + r.part() + r.counts()
	default:
		says += " is not limited"
	}
	if proposed, ok := r.Proposed(); ok {
		subject := proposed.subject(match)
		if r.Pool {
			subject = r.subject(match)
		}
		says += "; shadow: " + subject + " gets " + proposed.gets()
		if r.Share.Kind != ShareNone {
			says += ", without shares"
		}
	}
	return says
}

// Gets describes the limit of r, which is not unlimited, without its network.
func (r Rule) Gets() string {
	says := r.gets() + r.Also.says() + r.Cluster.says() + r.Adapt.says(r.Rate)
	if by := r.Share.by(); by != "" {
		says += ", shared fairly by its " + by
		if r.NAT {
			says += " behind NAT"
		}
	}
	if r.Within != "" {
		says += fmt.Sprintf(", within pool %q", string(r.Within)) + r.part()
	}
	if r.Algorithm.HasColours() {
		return fmt.Sprintf("%s; %s (%v%s)%s", says, r.Colours.actions(), r.Algorithm, r.Colours.comesIn(), r.counts())
	}
	return fmt.Sprintf("%s; excess is %s%s (%v)%s", says, r.verdict(), r.Penalty.effect(), r.Algorithm, r.counts())
}

// part describes what r gets of its pool.
func (r Rule) part() (says string) {
	if r.Guarantee != 0 {
		says = fmt.Sprintf(", %v of it guaranteed", r.Guarantee)
		if r.Members != 0 {
			says += fmt.Sprintf(" to each of at most %v", r.Members)
		}
	}
	if r.Weight != 0 {
		says += fmt.Sprintf(", weight %v", r.Weight)
	}
	return says
}

// counts describes how packets are metered, if that is not as usual.
func (r Rule) counts() (says string) {
	if r.Framing != (Framing{}) {
		says = "; each packet counts " + r.Framing.effect()
	}
	if r.Fail == Closed {
		says += "; what cannot be metered is dropped"
	}
	return says
}

func (s Share) by() string {
	switch s.Kind {
	case ShareNone:
		return ""
	case ShareSubnet:
		return s.String() + " subnets"
	}
	return s.String() + "s"
}

func (r Rule) gets() string {
	if r.Algorithm.HasColours() {
		return r.Colours.rates(&r)
	}
	if r.AnyRate() {
		return "any rate"
	}
	says := fmt.Sprintf("%v (%s)", r.Rate, r.Rate.Bytes())
	if r.Excess != Delay || r.Algorithm != Leaky {
		says += ", burst " + sizeAndTime(r.Capacity, r.Rate)
	}
	if waiting, _ := r.Waiting(); waiting > 0 {
		says += ", queue " + sizeAndTime(waiting, r.Rate)
	}
	return says
}

func sizeAndTime(bytes uint64, r Rate) string {
	return fmt.Sprintf("%s (%s)", human(0, bytes, 1, sizeNames), drainTime(bytes, r))
}

// subject is who has one bucket.
func (r Rule) subject(match Match) string {
	if r.Pool {
		return fmt.Sprintf("pool %q", r.Label.Name)
	}
	where, single := NetworkText(r.Prefix), IsHost(r.Prefix)
	if r.Label.Name != "" {
		where += fmt.Sprintf(" (%q)", r.Label.Name)
	}
	each, in, of, by := r.Each.Canonical(r.Prefix), " in ", " of ", map[Match]string{MatchDst: " to ", MatchSrc: " from "}[match]
	if IsMark(r.Prefix) {
		in, of, by = " with ", " with ", " with "
	}
	if r.NAT {
		in = " behind NAT" + by
		of = in
	}
	switch {
	case each.Kind == EachFlow:
		return "each flow" + by + where
	case single && !r.NAT || r.Rate == Unlimited:
		return where
	case each.Kind == EachHost:
		return "each host" + in + where
	case each.Kind == EachSubnet:
		return fmt.Sprintf("each %v subnet%s%s", each, of, where)
	}
	return where + " as a whole"
}

func (r Rule) verdict() string {
	switch r.Excess {
	case ECN:
		return "marked by ECN if the packet allows it, else dropped"
	case Pass:
		return "counted but not dropped"
	case Delay:
		says := "delayed"
		if r.Order == SparseFirst {
			says += " but for sparse flows"
		}
		if _, longest := r.Waiting(); r.ECNAbove < ECNAbove(longest) { // else it never is
			says += ", marked by ECN beyond " + human(0, uint64(r.ECNAbove), 1, timeNames)
		}
		return says + ", and dropped beyond the queue"
	}
	return "dropped"
}

func (p Penalty) effect() string {
	switch p.Kind {
	case PenaltyFill:
		return ", and fills the bucket"
	case PenaltyHold:
		return ", and keeps the bucket full for " + p.String()
	}
	return ""
}

func (f Framing) effect() string {
	var parts []string
	switch {
	case f.Overhead > 0:
		parts = append(parts, bytesName(int(f.Overhead))+" more")
	case f.Overhead < 0:
		parts = append(parts, bytesName(-int(f.Overhead))+" less")
	}
	if f.MPU > 0 {
		parts = append(parts, "at least "+bytesName(int(f.MPU)))
	}
	return strings.Join(parts, " and ")
}

func bytesName(n int) string {
	if n == 1 {
		return "1 byte"
	}
	return fmt.Sprintf("%d bytes", n)
}
