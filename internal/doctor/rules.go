package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// jerk is how long one packet may take at a rate without a note: 64 KiB at 10mbit
// take longer.
const jerk = 50 * time.Millisecond

func checkMerged(f Facts, s Hook, d *Device) []report.Finding {
	if d == nil {
		return nil
	}
	p := f.biggest(s, d)
	if p.why == "" {
		return s.finding(report.OK, "packets", "each frame gets its own verdict", "")
	}
	all := fmt.Sprintf("%s: one verdict for up to %d bytes", p.why, p.bytes)
	limited := s.Limits.limited()
	if len(limited) == 0 {
		return s.finding(report.OK, "packets", all+", which count as their frames", "")
	}
	slowest := slices.MinFunc(limited, func(a, b Rule) int { return cmp.Compare(a.Rate, b.Rate) })
	if took := drain(p.bytes, slowest.Rate); took > jerk {
		advice := p.less
		if advice != "" {
			advice = "if that matters: " + advice
		}
		return s.finding(report.Note, "packets",
			fmt.Sprintf("%s, which take %s at the %v of %s: the rate is right in the long run, but traffic is bursty, and one drop loses as much",
				all, report.About(uint64(took)), slowest.Rate, slowest.Prefix), advice)
	}
	return s.finding(report.OK, "packets", all+", which count as their frames; at these rates that is little", "")
}

// drain is how long so many bytes take at a rate.
func drain(bytes uint64, r policy.Rate) time.Duration {
	return time.Duration(float64(bytes) * 8 / float64(r) * float64(time.Second))
}

// bytesIn is what passes at a rate in a time.
func bytesIn(t time.Duration, r policy.Rate) uint64 {
	return uint64(float64(r) / 8 * t.Seconds())
}

// checkCapacity finds buckets too small for their packets or their rate. It reports the
// worst of each rule, and of rules alike the first.
func checkCapacity(f Facts, s Hook, d *Device) []report.Finding {
	if d == nil {
		return nil
	}
	var findings []report.Finding
	p := f.biggest(s, d)
	alike := map[string][]Rule{}
	for _, r := range s.Limits.limited() {
		if r.Algorithm.HasColours() {
			continue // checkColours has them
		}
		kind, _, _ := tooSmall(p, d, r)
		alike[kind] = append(alike[kind], r)
	}
	for _, kind := range kinds {
		if rules := alike[kind]; len(rules) > 0 {
			_, finding, advice := tooSmall(p, d, rules[0])
			if len(rules) > 1 {
				finding += fmt.Sprintf(" (alike: %s)", prefixes(rules[1:]))
			}
			status := report.Warning
			if kind != "frame" && !slices.ContainsFunc(rules, func(r Rule) bool { return r.Excess != policy.ECN }) {
				// Such a rule may be there to keep the queue of a line short, which a larger burst would fill.
				status, advice = report.Note, "if the rate matters more than a short queue behind this device: "+advice
			}
			findings = append(findings, s.finding(status, "capacity", finding, advice)...)
		}
	}
	return findings
}

// tooSmall says for what a rule's capacity is too small; kind is "" if it is not.
func tooSmall(p packet, d *Device, r Rule) (kind, finding, advice string) {
	frame := d.FullFrame()
	holds := r.Capacity + r.Queue // the most that it admits, also with excess delay
	what, empty := "bucket", "the bucket is empty"
	switch {
	case r.Queue > 0:
		what, empty = "bucket with its queue", "both are empty"
	case r.Excess == policy.Delay:
		what, empty = "queue", "the queue is empty"
	}
	of := fmt.Sprintf("%s: a %s of %d bytes is ", r.Prefix, what, holds)
	advice = raise(r, p.bytes)
	switch {
	case holds < frame:
		return "frame", of + fmt.Sprintf("less than one full frame (%d): such a frame passes only while %s", frame, empty), advice
	// TCP that is delayed sends smaller packets: it reaches the rate with the default.
	case holds < p.bytes && (r.Excess != policy.Delay || holds < policy.DefaultQueue(r.Rate)):
		if advice != "" && p.less != "" {
			advice += ", or: "
		}
		return "packet", of + fmt.Sprintf("less than the largest packet (%d), as %s: such a packet passes only while %s, and TCP may stay far below %v",
			p.bytes, p.why, empty, r.Rate), advice + p.less
	case holds < bytesIn(10*time.Millisecond, r.Rate):
		return "rate", of + fmt.Sprintf("only %s of %v: TCP sends larger bursts, and may not reach that rate",
			report.About(uint64(drain(holds, r.Rate))), r.Rate), advice
	}
	return "", "", ""
}

// raise is advice for at least the default size, and for a packet of so many bytes; ""
// where a queue that long would delay packets for too long.
func raise(r Rule, bytes uint64) string {
	if r.Excess != policy.Delay {
		return fmt.Sprintf("raise --capacity to %db", max(policy.DefaultCapacity(r.Rate), bytes))
	}
	to := max(policy.DefaultQueue(r.Rate), bytes)
	if drain(to, r.Rate) > policy.MaxWait {
		return ""
	}
	return fmt.Sprintf("raise %s to %db", queueFlag(r), to)
}

// queueFlag is the flag for the queue of a rule that delays packets.
func queueFlag(r Rule) string {
	if r.Algorithm == policy.GCRA {
		return "--queue"
	}
	return "--capacity"
}

// checkBurst finds larger bursts and longer queues than people may intend.
func checkBurst(_ Facts, s Hook, _ *Device) []report.Finding {
	var long, slow []Rule
	for _, r := range s.Limits.limited() {
		burst := r.Capacity
		waiting, longest := r.Waiting()
		if waiting > 0 && r.Algorithm == policy.Leaky {
			burst = 0
		}
		if burst > max(policy.DefaultCapacity(r.Rate), bytesIn(time.Second, r.Rate)) {
			long = append(long, r)
		}
		if longest > time.Second && waiting > policy.DefaultQueue(r.Rate) {
			slow = append(slow, r)
		}
	}
	var findings []report.Finding
	if len(long) > 0 {
		r := long[0]
		findings = s.finding(report.Note, "capacity",
			fmt.Sprintf("%s: after a pause, a burst of %d bytes passes, more than %v carries in a second", prefixes(long), r.Capacity, r.Rate),
			fmt.Sprintf("if that is not intended, lower --capacity; the default is %db", policy.DefaultCapacity(r.Rate)))
	}
	if len(slow) > 0 {
		r := slow[0]
		_, longest := r.Waiting()
		findings = append(findings, s.finding(report.Note, "queue",
			fmt.Sprintf("%s: packets wait up to %s, which most senders take for a loss", prefixes(slow), report.About(uint64(longest))),
			fmt.Sprintf("if that is not intended, lower %s; the default is %db", queueFlag(r), policy.DefaultQueue(r.Rate)))...)
	}
	return findings
}

// checkFamilies finds directions whose rules are all for one family.
func checkFamilies(f Facts, s Hook, d *Device) []report.Finding {
	limited := slices.DeleteFunc(s.Limits.metered(), func(r Rule) bool {
		return r.Label.Host != policy.MAC{} // whose other addresses get rules as they become known
	})
	if d == nil || len(limited) == 0 {
		return nil
	}
	is4 := func(r Rule) bool { return r.Prefix.Addr().Is4() }
	is6 := func(r Rule) bool { return r.Prefix.Addr().Is6() }
	lacks := func(has, other, all string, addresses, forwards bool) []report.Finding {
		whole := slices.ContainsFunc(limited, func(r Rule) bool { return r.Prefix.Bits() == 0 })
		how := ""
		switch master := f.byIndex[d.Master]; {
		case addresses:
			how = "the device has " + other + " addresses"
		case forwards:
			how = "this host forwards " + other
		case master != nil && master.Kind == "bridge":
			how = "bridge " + master.Name + " forwards both"
		}
		switch {
		case whole && how != "":
			return s.finding(report.Warning, "families",
				fmt.Sprintf("all %s traffic is limited, and no rule is for %s, which bypasses the limit: %s", has, other, how),
				plain.Quoted(plain.Command(f.Netns, "set", s.Name, s.Direction.String(), all)+" --rate RATE")+"; each rule has its own bucket: split the rate between them, or put both in a pool (--within)")
		case whole:
			return s.finding(report.Note, "families",
				fmt.Sprintf("all rules are for %s; the device has no %s address, and this host does not forward %s", has, other, other),
				fmt.Sprintf("if that may change, set rules for its networks or for %s", all))
		case addresses:
			level := report.Warning
			if slices.ContainsFunc(s.Limits.Rules, func(r Rule) bool { return r.Prefix.Bits() == 0 }) {
				level = report.Note // all but some networks are exempt anyway
			}
			return s.finding(level, "families",
				fmt.Sprintf("all rules are for %s, and the device has %s addresses, too: %s traffic is not limited", has, other, other),
				fmt.Sprintf("set rules for its networks or for %s, perhaps with --rate unlimited", all))
		}
		return nil
	}
	switch {
	case !slices.ContainsFunc(s.Limits.Rules, is6):
		return lacks("IPv4", "IPv6", "::/0", d.IPv6, d.Forwards6)
	case !slices.ContainsFunc(s.Limits.Rules, is4):
		return lacks("IPv6", "IPv4", "0.0.0.0/0", d.IPv4, d.Forwards4)
	}
	return nil
}

// counting are the limits that have counted such packets, and their sum.
func (s Hook) counting(such func(maps.Counters) uint64) (packets uint64, rules []Rule) {
	for _, r := range s.Limits.limited() {
		if n := such(r.Counters); n > 0 {
			packets += n
			rules = append(rules, r)
		}
	}
	return packets, rules
}

func checkContended(_ Facts, s Hook, _ *Device) []report.Finding {
	packets, contended := s.counting(func(c maps.Counters) uint64 { return c.ContendedPackets })
	if packets == 0 {
		return nil
	}
	return s.finding(report.Warning, "contended",
		fmt.Sprintf("%s of %s could not be metered, and passed or were dropped as --fail says: many CPUs contended for one bucket, or a mark could not be written",
			plain.Count(packets, "packet"), prefixes(contended)),
		"spread the load with --each, or receive on fewer CPUs; --fail closed drops such packets")
}

// fullTable is the use of the bucket table, in percent, from which on some keys find no slot.
const fullTable = 75

func checkSpilled(_ Facts, s Hook, _ *Device) []report.Finding {
	packets, spilled := s.counting(func(c maps.Counters) uint64 { return c.SpilledPackets })
	if packets == 0 {
		return nil
	}
	slots := s.Limits.Slots
	found := fmt.Sprintf("%s of %s were charged to the rule's spill bucket, as their keys found no slot; %d of the table's %d slots (%.0f %%) are in use now",
		plain.Count(packets, "packet"), prefixes(spilled), slots.InUse, slots.All, 100*float64(slots.InUse)/float64(max(slots.All, 1)))
	advice := "use fewer buckets (--each /24, or /64 for IPv6), or free them sooner: a shorter --penalty, a smaller --capacity, a higher --rate; drop spoofed sources before the limit"
	if slots.InUse*100 < slots.All*fullTable {
		return s.finding(report.Note, "spilled", found+": there is room again", "if it recurs, "+advice)
	}
	return s.finding(report.Warning, "spilled", found, advice)
}

func checkUnmatched(_ Facts, s Hook, _ *Device) []report.Finding {
	if !s.inForce() {
		return nil
	}
	idle := slices.DeleteFunc(slices.Clone(s.Limits.Rules), func(r Rule) bool {
		return r.Counters.PassedPackets+r.Counters.DroppedPackets > 0
	})
	if len(idle) == 0 {
		return nil
	}
	means, side := "egress is what leaves the device", "destination"
	if s.Direction == policy.Ingress {
		means = "ingress is what enters the device"
	}
	if s.Limits.Match == policy.MatchSrc {
		side = "source"
	}
	return s.finding(report.Note, "traffic",
		"no packet has matched yet: "+prefixes(idle),
		fmt.Sprintf("if some should have, check the direction (%s) and the address (compared with the %s)", means, side))
}
