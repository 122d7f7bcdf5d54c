package doctor

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// drain is how long so many bytes take at a rate.
func drain(bytes uint64, r policy.Rate) time.Duration {
	return time.Duration(float64(bytes) * 8 / float64(r) * float64(time.Second))
}

// biggest is the largest packet that may come to a hook, and why it may be more than a frame; "" if it may not.
func (f *Facts) biggest(s *Hook, d *Device) (bytes uint64, why string) {
	bytes = d.FullFrame()
	grow := func(to int, because string) {
		if uint64(to) > bytes {
			bytes, why = uint64(to), because
		}
	}
	const merged = "frames are merged on arrival (GRO, LRO)"
	if s.Direction == policy.Ingress && !d.Loopback {
		switch d.Kind {
		case "veth", "netkit", "tuntap":
			grow(d.GSOMax, "the other end of "+d.Name+" sends packets that are not segmented yet (GSO)")
		case "bridge", "bond", "team", "vlan", "macvlan", "ipvlan", "vrf":
			grow(d.GROMax, merged)
		default:
			if d.Offloads.GRO || d.Offloads.LRO {
				grow(d.GROMax, merged)
			}
		}
		return bytes, why
	}
	// With ethtool -K gso off or tso off TCP still passes large packets to the hook: these settings only change where behind it
	// they are segmented.
	grow(d.GSOMax, "TCP sends large packets that are segmented later (GSO)")
	// No device splits a merged packet before it leaves (ip_finish_output_gso checks the segments only).
	master := f.byIndex[d.Master]
	for i := range f.Devices {
		o := &f.Devices[i]
		bridged := master != nil && master.Kind == "bridge" && o.Master == d.Master
		if o.Index != d.Index && o.Up && (bridged || o.Forwards4 || o.Forwards6) && (o.Offloads.GRO || o.Offloads.LRO || o.Kind == "veth" || o.Kind == "tuntap") {
			grow(o.GROMax, "forwarded packets arrive merged (GRO) at "+o.Name)
		}
	}
	return bytes, why
}

// checkCapacity finds buckets too small for their packets or their rate. It reports the
// worst of each rule, and of rules alike the first.
func (f *Facts) checkCapacity(s *Hook, d *Device) {
	if d == nil {
		return
	}
	bytes, why := f.biggest(s, d)
	alike := map[string][]Rule{}
	for _, r := range s.Limits.limited() {
		kind, _ := tooSmall(bytes, why, d, r)
		alike[kind] = append(alike[kind], r)
	}
	for _, kind := range []string{"frame", "packet", "rate"} {
		rules := alike[kind]
		if len(rules) == 0 {
			continue
		}
		_, finding := tooSmall(bytes, why, d, rules[0])
		if len(rules) > 1 {
			finding += fmt.Sprintf(" (alike: %s)", prefixes(rules[1:]))
		}
		status, advice := report.Warning, raise(rules[0], bytes, d.Name)
		if kind != "frame" && !slices.ContainsFunc(rules, func(r Rule) bool { return r.Excess != policy.ECN }) {
			// Such a rule may be there to keep the queue of a line short, which a larger burst would fill.
			status, advice = report.Note, "if the rate matters more than a short queue behind this device: "+advice
		}
		f.say(s, status, "capacity", finding, advice)
	}
}

// checkSpeedTest finds rules with a burst longer than the default, which makes a speed test show more than the rate.
func (f *Facts) checkSpeedTest(s *Hook, _ *Device) {
	for _, r := range s.Limits.limited() {
		if first := r.MostIn(time.Second); first != policy.Unlimited && r.Capacity > policy.DefaultCapacity(r.Rate) && first > r.Rate {
			f.say(s, report.Note, "speed test", fmt.Sprintf("%s: its burst is longer than the default: %s", policy.CIDR(r.Prefix), report.SpeedTest(uint64(r.MostIn(10*time.Second)), uint64(first))),
				"if it should show the rate, set a shorter --capacity")
			return
		}
	}
}

// tooSmall says for what a rule's capacity is too small; kind is "" if it is not.
func tooSmall(bytes uint64, why string, d *Device, r Rule) (kind, finding string) {
	frame, holds := d.FullFrame(), r.Capacity+r.Queue // the most that it admits, also with excess delay
	what, passes := "bucket", "passes only while the bucket is empty"
	switch {
	case r.Algorithm.HasColours():
		what, passes = "CBS", "is never green"
	case r.Queue > 0:
		what, passes = "bucket with its queue", "passes only while both are empty"
	case r.Excess == policy.Delay:
		what, passes = "queue", "passes only while the queue is empty"
	}
	of := fmt.Sprintf("%s: a %s of %d bytes is ", policy.CIDR(r.Prefix), what, holds)
	switch {
	case holds < frame:
		return "frame", of + fmt.Sprintf("less than one full frame (%d): such a frame %s", frame, passes)
	// TCP that is delayed sends smaller packets: it reaches the rate with the default.
	case holds < bytes && (r.Excess != policy.Delay || holds < policy.DefaultQueue(r.Rate)):
		return "packet", of + fmt.Sprintf("less than the largest packet (%d), as %s: such a packet %s, and TCP may stay far below %v", bytes, why, passes, r.Rate)
	case drain(holds, r.Rate) < 10*time.Millisecond:
		return "rate", of + fmt.Sprintf("only %s of %v: TCP sends larger bursts, and may not reach that rate", report.About(uint64(drain(holds, r.Rate))), r.Rate)
	}
	return "", ""
}

// raise is advice for at least the default size, and for a packet of so many bytes, unless a queue that long would delay
// packets for too long.
func raise(r Rule, bytes uint64, device string) string {
	flag, to := "capacity", max(policy.DefaultCapacity(r.Rate), bytes)
	switch {
	case r.Algorithm.HasColours():
		flag = "cbs"
	case r.Excess == policy.Delay:
		if to = max(policy.DefaultQueue(r.Rate), bytes); drain(to, r.Rate) > policy.MaxWait {
			return fmt.Sprintf("let %s carry smaller packets: ip link set dev %s gso_max_size 4096", device, plain.Word(device))
		}
		if r.Algorithm == policy.GCRA {
			flag = "queue"
		}
	}
	return fmt.Sprintf("raise --%s to %db", flag, to)
}

// checkFamilies finds directions whose rules are all for one family, while packets of the other one pass.
func (f *Facts) checkFamilies(s *Hook, d *Device) {
	limited := slices.DeleteFunc(s.Limits.metered(), func(r Rule) bool {
		return r.Label.Host != policy.MAC{} || policy.IsMark(r.Prefix) // whose other addresses get rules as they become known
	})
	if d == nil || len(limited) == 0 {
		return
	}
	any4 := slices.ContainsFunc(s.Limits.Rules, func(r Rule) bool { return r.Prefix.Addr().Is4() })
	any6 := slices.ContainsFunc(s.Limits.Rules, func(r Rule) bool { return r.Prefix.Addr().Is6() && !policy.IsMark(r.Prefix) })
	if any4 && any6 {
		return
	}
	has, other, all, addresses, forwards := "IPv4", "IPv6", "::/0", d.IPv6, d.Forwards6
	if any6 {
		has, other, all, addresses, forwards = "IPv6", "IPv4", "0.0.0.0/0", d.IPv4, d.Forwards4
	}
	isWhole := func(r Rule) bool { return r.Prefix.Bits() == 0 }
	whole, exempt := slices.ContainsFunc(limited, isWhole), slices.ContainsFunc(s.Limits.Rules, isWhole)
	how := "the device has " + other + " addresses"
	switch master := f.byIndex[d.Master]; {
	case addresses:
	case !whole:
		return
	case forwards:
		how = "this host forwards " + other
	case master != nil && master.Kind == "bridge":
		how = "bridge " + master.Name + " forwards both"
	default:
		return
	}
	status := report.Warning
	if exempt && !whole { // all but some networks
		status = report.Note
	}
	advice := plain.Quoted(plain.Command(f.Netns, "set", s.Name, s.Direction.String(), all)+" --rate RATE") + "; each rule has its own bucket: split the rate between them, or put both in a pool (--within)"
	if !slices.ContainsFunc(limited, func(r Rule) bool { return !policy.IsHost(r.Prefix) }) {
		advice = "set rules for the " + other + " addresses of these hosts, or name the hosts by their MAC addresses in a policy, which limits each with all its addresses"
	}
	f.say(s, status, "families", fmt.Sprintf("all rules are for %s, and %s: %s traffic bypasses the limit", has, how, other), advice)
}

// Families says which packets bypass the rules of a direction of a device, as these are all for the other family.
func Families(netns string, dev netinfo.Device, direction policy.Direction, rules []policy.Rule) (report.Findings, error) {
	d, s := Device{Device: dev}, Hook{Name: dev.Name, Direction: direction, Limits: &Limits{}}
	for _, r := range rules {
		s.Limits.Rules = append(s.Limits.Rules, Rule{Rule: r})
	}
	d.Forwards4, d.Forwards6 = dev.Forwards()
	var err, failed error
	d.IPv4, d.IPv6, err = dev.Addresses()
	f := Facts{Netns: netns, byIndex: map[int]*Device{}}
	if dev.Master != 0 {
		var master Device
		master.Device, _, failed = netinfo.DeviceByIndex(dev.Master)
		f.byIndex[dev.Master] = &master
	}
	f.checkFamilies(&s, &d)
	return f.findings, errors.Join(err, failed)
}

// fullTable is the use of the bucket table, in percent, from which on some keys find no slot.
const fullTable = 75

// checkCounters finds packets that were not metered as their rule says, or did not come at all.
func (f *Facts) checkCounters(s *Hook, d *Device) {
	l := s.Limits
	if l == nil {
		return
	}
	counting := func(such func(maps.Counters) uint64) (packets uint64, rules []Rule) {
		for _, r := range l.limited() {
			if n := such(r.Counters); n > 0 {
				packets, rules = packets+n, append(rules, r)
			}
		}
		return packets, rules
	}
	if packets, rules := counting(func(c maps.Counters) uint64 { return c.ContendedPackets }); packets > 0 {
		f.say(s, report.Warning, "contended",
			fmt.Sprintf("%s of %s could not be metered, and passed or were dropped as --fail says: many CPUs contended for one bucket, or a mark could not be written",
				plain.Count(packets, "packet"), prefixes(rules)), "spread the load with --each, or receive on fewer CPUs; --fail closed drops such packets")
	}
	if packets, rules := counting(func(c maps.Counters) uint64 { return c.SpilledPackets }); packets > 0 {
		found := fmt.Sprintf("%s of %s were charged to the rule's spill bucket, as their keys found no slot; %d of the table's %d slots (%.0f %%) are in use now",
			plain.Count(packets, "packet"), prefixes(rules), l.Slots.InUse, l.Slots.All, 100*float64(l.Slots.InUse)/float64(max(l.Slots.All, 1)))
		status, advice := report.Warning, "use fewer buckets (--each /24, or /64 for IPv6), or free them sooner: a shorter --penalty, a smaller --capacity, a higher --rate; drop spoofed sources before the limit"
		if l.Slots.InUse*100 < l.Slots.All*fullTable {
			status, found, advice = report.Note, found+": there is room again", "if it recurs, "+advice
		}
		f.say(s, status, "spilled", found, advice)
	}
	seen, idle, hidden, inside := l.OtherBytes, []Rule{}, []Rule{}, ""
	for _, r := range l.Rules {
		seen += r.Counters.PassedBytes
		switch {
		case r.Counters.PassedPackets+r.Counters.DroppedPackets > 0:
		case d != nil && d.Behind.Hides(r.Prefix) != "":
			hidden, inside = append(hidden, r), d.Behind.Hides(r.Prefix)
		default:
			idle = append(idle, r)
		}
	}
	if len(hidden) > 0 {
		f.say(s, report.Warning, "nat", "behind NAT: no packet has these addresses here, and none has matched yet: "+prefixes(hidden),
			"delete these rules, and set them on "+plain.Line(inside))
	}
	const few, percent = 1e6, 1 // as of LLDP and spanning trees, on many links
	if l.OtherBytes >= few && l.OtherBytes*100 >= seen*percent {
		f.say(s, report.Warning, "not-ip", fmt.Sprintf("%d frames with %s were not IP, and passed unlimited: no rule can match them, for example PPPoE", l.OtherFrames, report.Bytes(l.OtherBytes)),
			"limit PPPoE sessions where they end, on their PPP devices; tcpdump -i "+plain.Word(s.Name)+" 'not ip and not ip6 and not arp' shows the frames")
	}
	if s.inForce() && len(idle) > 0 {
		side := map[policy.Match]string{policy.MatchSrc: "source", policy.MatchDst: "destination"}[l.Match]
		f.say(s, report.Note, "traffic", "no packet has matched yet: "+prefixes(idle),
			fmt.Sprintf("if some should have, check the direction (egress leaves the device, ingress enters it) and the address (compared with the %s)", side))
	}
}
