package importer

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	nftPackets = reason{loosens, "limit in packets", "rules count bytes, not packets", "no rule was made; write one in bytes if you need one"}
	nftPartial = reason{loosens, "limit with more conditions than an address", "a rule matches one address of a packet and nothing else",
		"no rule was made; write one by hand if it may limit all packets of the address"}
	nftNoDrop = reason{other, "limit that drops nothing", "no rule was found that drops its excess packets",
		"no rule was made; write one with excess: pass to count them"}
	nftNoDevice = reason{loosens, "limit without a device", "a rule is for one device, and the ruleset names none",
		"use --device, or add iifname or oifname to the ruleset"}
	nftLostDevice = reason{loosens, "limit at the hook of a device", "this version of nft does not print which device that is",
		"use a newer nft, or set the limit by hand"}
	nftBothWays = reason{loosens, "limit of both directions", "a rule is for one direction of a device",
		"no rule was made; write one for each direction, or add iifname or oifname to the ruleset"}
	nftPattern = reason{loosens, "limit of devices by pattern", "the import makes rules for devices by name only",
		"no rule was made; write one by hand in a section such as tap*"}
	nftQuota   = reason{other, "quota", "a rule limits a rate, not an amount", "nothing to do if you do not need it"}
	nftRounded = reason{other, "fractional rate", "rates are whole bits per second", "it was rounded down"}
	nftUnread  = reason{other, "limit in a chain that is not read", "it is for NAT or ARP, or no rule leads there", "no rule was made; write one by hand if it limits packets"}
	nftForeign = reason{loosens, "extension of iptables", "nft does not print what it does", "write a rule by hand if it limits bytes; see iptables-save"}
)

// conditions are those that packets of a rule of nft must meet.
type conditions struct {
	addresses [3]addresses // by side; those on either are the families
	devices   devices
	partial   string // other conditions
}

// addresses are a condition on the addresses of one side.
type addresses struct{ only, except []netip.Prefix }

// any reports whether all addresses meet the condition.
func (a addresses) any() bool { return slices.Equal(a.only, everything) && len(a.except) == 0 }

func (a *conditions) restrict(what string) { a.partial = also(a.partial, what) }

// side returns the side with a condition, and whether there is at most one.
func (a conditions) side() (side, bool) {
	switch to, source := !a.addresses[toward].any(), !a.addresses[from].any(); {
	case to:
		return toward, !source
	case source:
		return from, true
	}
	return either, true
}

// prefixes returns the networks on a side, limited to the families.
func (a conditions) prefixes(s side) (only, except []netip.Prefix) {
	on, families := a.addresses[s], a.addresses[either].only
	return common(on.only, families), common(on.except, families)
}

// with adds a condition on the addresses of a side.
func (a conditions) with(s side, networks []netip.Prefix, not bool) conditions {
	on := &a.addresses[s]
	if not {
		on.except = slices.Concat(on.except, networks)
	} else {
		on.only = common(on.only, networks)
	}
	// A condition on an address, also a negated one, is one on its family, too.
	families := &a.addresses[either].only
	*families = slices.DeleteFunc(slices.Clone(*families), func(all netip.Prefix) bool {
		return !slices.ContainsFunc(networks, all.Overlaps)
	})
	return a
}

// covers reports whether all packets that meet b meet a.
func (a conditions) covers(b conditions) bool {
	if a.partial != "" {
		return false
	}
	for d, mine := range a.devices {
		theirs := b.devices[d]
		other := func(name string) bool { return !slices.Contains(mine, name) }
		if mine != nil && (theirs == nil || slices.ContainsFunc(theirs, other)) {
			return false
		}
	}
	for s, mine := range a.addresses {
		theirs := b.addresses[s]
		if len(mine.except) > 0 && !slices.Equal(mine.except, theirs.except) {
			return false
		}
		if slices.ContainsFunc(theirs.only, func(p netip.Prefix) bool {
			return !slices.ContainsFunc(mine.only, func(q netip.Prefix) bool { return q.Bits() <= p.Bits() && q.Overlaps(p) })
		}) {
			return false
		}
	}
	return true
}

// A held is a limit of nft, and the packets that it limits.
type held struct {
	conditions
	*limit
}

// nftWalk goes through the chains of a ruleset as packets do.
type nftWalk struct {
	*ruleset
	nft    *nftRuleset
	device string // for what names none; "" for none
	base   *nftChain
	// Entries whose packets skip the rest of the current chain, or of the base chain.
	returned, accepted []int
	// Limits that accept conforming packets, and whose excess no rule has dropped yet.
	open   []openLimit
	depth  int
	at     *nftRule          // the current rule
	limits map[any]*limit    // by what has them: each has one bucket, however often rules lead there
	read   map[*nftRule]bool // rules that packets reach
	rules  int               // the number of rules that were read
}

// An openLimit is entries that accept conforming packets.
type openLimit struct {
	held
	entries []int
	where   string
}

const (
	// deepest is the number of nested jumps that nft allows.
	deepest = 16
	// jumpsEach and jumpsMore bound how often rules are read: a chain is read for each jump to it.
	jumpsEach, jumpsMore = 64, 1 << 16
)

func (w *nftWalk) walk() error {
	for _, c := range w.nft.chains {
		if c.Hook == "" || c.Type == "nat" || c.Family == "arp" {
			continue
		}
		w.base, w.open, w.accepted = c, nil, nil
		var start conditions
		start.addresses[either].only = families(c.Family != "ip6", c.Family != "ip")
		start.addresses[toward].only, start.addresses[from].only = everything, everything
		if d, err := policy.ParseDirection(c.Hook); err == nil && len(c.Dev) > 0 {
			start.devices[d] = c.Dev
		}
		if err := w.chain(c, start); err != nil {
			return err
		}
		for _, o := range w.open {
			if c.Policy == "drop" {
				w.close(o)
				continue
			}
			for _, i := range o.entries {
				w.entries[i] = entry{}
			}
			w.leave(nftNoDrop, o.where, "%v for %s", o.Rate, o.conditions.describe())
		}
		w.end(w.accepted)
	}
	return nil
}

// end lets packets of entries skip what follows up to here.
func (w *nftWalk) end(entries []int) {
	for _, i := range entries {
		w.entries[i].until = len(w.entries)
	}
}

// chain reads a chain for the packets that reach it.
func (w *nftWalk) chain(c *nftChain, a conditions) error {
	if w.depth == deepest {
		return nil
	}
	w.depth++
	outer, at := w.returned, w.at
	w.returned = nil
	for _, r := range c.rules {
		w.at = r
		if w.rules++; w.rules > jumpsEach*w.nft.rules+jumpsMore {
			return errors.New("rules jump to chains more often than can be followed")
		}
		if err := w.rule(r, a); err != nil {
			return err
		}
	}
	w.end(w.returned)
	w.returned, w.at = outer, at
	w.depth--
	return nil
}

// close records that excess packets are dropped here.
func (w *nftWalk) close(o openLimit) {
	for _, i := range o.entries {
		w.entries[i].excessUntil = len(w.entries)
	}
}

// verdict applies the verdict of a rule, after its limits.
func (w *nftWalk) verdict(verdict, target string, a conditions, limits []held, r *nftRule) error {
	to := w.nft.named[r.named(target)]
	if len(limits) == 0 {
		return w.plain(verdict, to, a, r)
	}
	if to != nil && w.nft.drops(to) {
		verdict = "drop"
	}
	for _, h := range limits {
		switch {
		case h.packets && verdict == "continue":
			// It limits only logging or counting.
		case h.packets:
			w.leave(nftPackets, r.where(), "%s", h.conditions.describe())
		case h.over && (verdict == "drop" || verdict == "reject"):
			w.hold(h, r, "")
		case !h.over && (verdict == "accept" || verdict == "return"):
			w.hold(h, r, verdict)
		default:
			w.leave(nftNoDrop, r.where(), "%v for %s", h.Rate, h.conditions.describe())
		}
	}
	return nil
}

// plain applies the verdict of a rule without a limit.
func (w *nftWalk) plain(verdict string, to *nftChain, a conditions, r *nftRule) error {
	switch verdict {
	case "jump", "goto":
		if to != nil {
			if err := w.chain(to, a); err != nil {
				return err
			}
		}
		if verdict == "goto" {
			return w.plain("return", nil, a, r)
		}
	case "accept":
		w.accepted = append(w.accepted, w.exempt(a, false, r)...)
	case "return":
		w.returned = append(w.returned, w.exempt(a, false, r)...)
	case "drop", "reject":
		w.open = slices.DeleteFunc(w.open, func(o openLimit) bool {
			covered := a.covers(o.conditions)
			if covered {
				w.close(o)
			}
			return covered
		})
		for _, i := range w.exempt(a, true, r) {
			w.entries[i].until = everyEntry
		}
	}
	return nil
}

// exempt adds entries for packets that pass or are dropped without a limit.
func (w *nftWalk) exempt(a conditions, drops bool, r *nftRule) []int {
	for _, names := range a.devices {
		if slices.Equal(names, []string{"lo"}) {
			return nil // the loopback device has no rules
		}
	}
	s, single := a.side()
	if !single {
		only, _ := a.prefixes(from)
		a.restrict("source " + names(only))
	}
	only, except := a.prefixes(s)
	for _, p := range except {
		a.restrict("not " + policy.NetworkText(p))
	}
	e := entry{side: s, drops: drops, partial: a.partial, devices: a.devices, where: r.where()}
	e.label = w.label(e.where, r.Comment)
	return w.enter(e, only)
}

// hold adds entries for limited packets. Conforming packets go on, or get the verdict
// conforming if it is not "".
func (w *nftWalk) hold(h held, r *nftRule, conforming string) {
	s, single := h.side()
	if !single {
		h.restrict("both addresses")
	}
	if len(h.devices[policy.Ingress]) > 0 && len(h.devices[policy.Egress]) > 0 {
		h.restrict("both iifname and oifname")
	}
	if h.partial != "" {
		w.leave(nftPartial, r.where(), "%v for %s", h.Rate, h.conditions.describe())
		return
	}
	keys := w.places(h, s, r)
	if len(keys) > 0 {
		w.hooked()
	}
	only, except := h.prefixes(s)
	o := openLimit{held: h, where: r.where()}
	for _, key := range keys {
		// Negated addresses are an exception from this limit only.
		e := entry{key: key, side: s, where: r.where()}
		holes := w.enter(e, except)
		e.limit, e.hook, e.label = h.limit, w.base.Hook, w.label(e.where, r.Comment)
		if r.Comment == "" {
			e.label.Note = cut(oneLine(fmt.Sprintf("%s %s handle %d", r.Table, r.Chain, r.Handle)), policy.MaxNote)
		}
		o.entries = append(o.entries, w.enter(e, only)...)
		w.end(holes)
	}
	if conforming == "" {
		return
	}
	for _, i := range o.entries {
		w.entries[i].excessUntil = everyEntry
	}
	if conforming == "accept" {
		w.accepted = append(w.accepted, o.entries...)
	} else {
		w.returned = append(w.returned, o.entries...)
	}
	w.open = append(w.open, o)
}

// hooked notes which packets a rule limits that the hook of the base chain did not see.
func (w *nftWalk) hooked() {
	switch w.base.Hook {
	case "forward":
		w.note("limits at the hook forward were for forwarded packets; rules also limit packets of this host")
	case "input", "output":
		w.note("limits at the hooks input and output were for packets of this host; rules also limit forwarded packets")
	}
}

// places returns the devices and directions of a limit.
func (w *nftWalk) places(h held, s side, r *nftRule) (keys []tableKey) {
	d, hook := policy.Ingress, w.base.Hook
	if len(h.devices[policy.Egress]) > 0 {
		d = policy.Egress
	}
	devices := h.devices[d]
	if len(devices) == 0 {
		devices = []string{w.device}
		switch {
		case hook == "egress" || hook == "ingress":
			w.leave(nftLostDevice, r.where(), "%v for %s", h.Rate, h.conditions.describe())
			return nil
		case w.device == "":
			w.leave(nftNoDevice, r.where(), "%v for %s", h.Rate, h.conditions.describe())
			return nil
		case hook == "output":
			d = policy.Egress
		case hook == "input":
		case s == either:
			w.leave(nftBothWays, r.where(), "%v for %s", h.Rate, h.conditions.describe())
			return nil
		case s == toward:
			d = policy.Egress
		}
	}
	for _, device := range devices {
		if strings.HasSuffix(device, "*") {
			w.leave(nftPattern, r.where(), "%v for %s", h.Rate, h.conditions.describe())
			continue
		}
		keys = append(keys, tableKey{device, d})
	}
	return keys
}

// describe returns the conditions for people.
func (a conditions) describe() string {
	var words []string
	for _, s := range []side{toward, from} {
		on := a.addresses[s]
		if !slices.Equal(on.only, everything) {
			words = append(words, prepositions[s]+names(on.only))
		}
		if len(on.except) > 0 {
			words = append(words, prepositions[s]+"any but "+names(on.except))
		}
	}
	words = append(words, a.devices.describe()...)
	if a.partial != "" {
		words = append(words, "with "+a.partial)
	}
	if len(words) == 0 {
		return "all packets"
	}
	return "packets " + strings.Join(words, " ")
}

// ranged returns the networks that contain exactly the addresses from first to last.
func ranged(first, last netip.Addr) (all []netip.Prefix) {
	for first.Compare(last) <= 0 {
		length := first.BitLen()
		// The widest network that begins at first and does not reach beyond last.
		for length > 0 {
			wider := netip.PrefixFrom(first, length-1)
			if wider.Masked().Addr() != first || lastOf(wider).Compare(last) > 0 {
				break
			}
			length--
		}
		p := netip.PrefixFrom(first, length)
		all = append(all, p)
		if first = lastOf(p).Next(); !first.IsValid() {
			break
		}
	}
	return all
}

// lastOf returns the last address of a network.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// units of nft, in bytes and in seconds.
var (
	nftBytes   = map[string]uint64{"bytes": 1, "kbytes": 1 << 10, "mbytes": 1 << 20}
	nftSeconds = map[string]uint64{"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
)

// newLimit converts a limit of nft. Its bucket holds the burst, and the bytes of one unit of
// time at the rate.
func (w *nftWalk) newLimit(key any, of *nftLimit, where string) (*limit, error) {
	if l := w.limits[key]; l != nil {
		return l, nil
	}
	l := &limit{over: of.Inv, where: where}
	w.limits[key] = l
	if of.RateUnit == "" || of.RateUnit == "packets" {
		l.packets = true
		return l, nil
	}
	size, seconds, burstSize := nftBytes[of.RateUnit], nftSeconds[of.Per], nftBytes[cmp.Or(of.BurstUnit, "bytes")]
	if size == 0 || seconds == 0 || burstSize == 0 {
		return nil, fmt.Errorf("a limit of %d %s/%s burst %d %s has an unknown unit", of.Rate, of.RateUnit, of.Per, of.Burst, of.BurstUnit)
	}
	hi, bytes := bits.Mul64(of.Rate, size)
	high, burst := bits.Mul64(of.Burst, burstSize)
	if hi != 0 || high != 0 || bytes > 1<<60 || burst > 1<<60 {
		l.Rate = policy.MaxRate + 1
		return l, nil
	}
	l.Rate, l.Capacity = policy.Rate(8*bytes/seconds), bytes+burst
	if rest := 8 * bytes % seconds; rest*1e6 > 8*bytes && l.Rate >= policy.MinRate {
		w.leave(nftRounded, where, "%d %s/%s is %v", of.Rate, of.RateUnit, of.Per, l.Rate)
	}
	return l, nil
}
