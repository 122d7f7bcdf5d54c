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
	nftPackets = reason{"limit in packets", "rules count bytes, not packets", "no rule was made; write one in bytes if one is meant"}
	nftPartial = reason{"limit of packets with more than an address", "a rule goes by one address of a packet and nothing else",
		"no rule was made; write one by hand if all of the address's packets may be held to it"}
	nftNoDrop = reason{"limit that drops nothing", "nothing drops what exceeds it, as far as can be told",
		"no rule was made; write one with excess: pass to count"}
	nftNoDevice = reason{"limit without a device", "a rule is for one device, and the ruleset names none",
		"say --device, or add iifname or oifname to the ruleset"}
	nftBothWays = reason{"limit of both directions", "a rule is for one direction of a device",
		"no rule was made; write one for each direction, or add iifname or oifname to the ruleset"}
	nftPattern = reason{"limit of devices by pattern", "a rule here is made for one device, by its name",
		"no rule was made; write one in a section such as tap* by hand"}
	nftQuota   = reason{"quota", "a rule limits a rate, not an amount", "nothing is to be done if it may go"}
	nftRounded = reason{"rate that is no whole number of bits per second", "rates are whole bits per second", "it was rounded down"}
	nftForeign = reason{"extension of iptables", "nft does not tell what it does", "write a rule by hand if it limits by bytes; see iptables-save"}
)

// asks is what packets have to be for a rule of nft to see them.
type asks struct {
	addresses [3]addresses // by side; those on either are the families
	devices   devices
	partial   string // what else
}

// addresses are those on one side that a rule asks for.
type addresses struct{ only, except []netip.Prefix }

// any reports whether nothing is asked.
func (a addresses) any() bool { return slices.Equal(a.only, everything) && len(a.except) == 0 }

func (a *asks) restrict(what string) { a.partial = also(a.partial, what) }

// side is where the addresses are that a rule asks for, and whether that is one side at most.
func (a asks) side() (side, bool) {
	switch to, source := !a.addresses[toward].any(), !a.addresses[from].any(); {
	case to:
		return toward, !source
	case source:
		return from, true
	}
	return either, true
}

// prefixes are the networks on a side, of the families.
func (a asks) prefixes(s side) (only, except []netip.Prefix) {
	on, families := a.addresses[s], a.addresses[either].only
	return common(on.only, families), common(on.except, families)
}

// with adds addresses on a side.
func (a asks) with(s side, networks []netip.Prefix, not bool) asks {
	on := &a.addresses[s]
	if not {
		on.except = slices.Concat(on.except, networks)
	} else {
		on.only = common(on.only, networks)
	}
	// Whoever asks for an address asks for its family; one who does not want it asks for that, too.
	families := &a.addresses[either].only
	*families = slices.DeleteFunc(slices.Clone(*families), func(all netip.Prefix) bool {
		return !slices.ContainsFunc(networks, all.Overlaps)
	})
	return a
}

// covers reports whether all packets that b asks for are among a's.
func (a asks) covers(b asks) bool {
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

// A held is packets that a limit of nft is for.
type held struct {
	asks
	*limit
}

// nftWalk goes through the chains of a ruleset as packets do.
type nftWalk struct {
	*ruleset
	nft    *nftRuleset
	device string // for what names none; "" for none
	base   *nftChain
	// Entries whose packets go past what is left of the chain that is being read, or of the base chain.
	returned, accepted []int
	// Limits for what conforms, whose excess nobody has dropped yet.
	open  []openLimit
	depth int
	at    *nftRule // the rule that is being read
	rules int      // that were read
}

// An openLimit is some entries that let pass what conforms.
type openLimit struct {
	held
	entries []int
	where   string
}

const (
	// deepest is how many chains nft lets rules jump through.
	deepest = 16
	// jumpsEach and jumpsMore bound how often rules are read: those of a chain are for each jump to it.
	jumpsEach, jumpsMore = 64, 1 << 16
)

func (w *nftWalk) walk() error {
	for _, c := range w.nft.chains {
		if c.Hook == "" || c.Type == "nat" || c.Family == "arp" {
			continue
		}
		w.base, w.open, w.accepted = c, nil, nil
		var start asks
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
			w.leave(nftNoDrop, o.where, "%v for %s", o.Rate, o.asks.says())
		}
		w.end(w.accepted)
	}
	return nil
}

// end ends the way of entries past what comes after them.
func (w *nftWalk) end(entries []int) {
	for _, i := range entries {
		w.entries[i].until = len(w.entries)
	}
}

// chain reads a chain for packets that come to it.
func (w *nftWalk) chain(c *nftChain, a asks) error {
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

// close says that what exceeds is dropped, by now.
func (w *nftWalk) close(o openLimit) {
	for _, i := range o.entries {
		w.entries[i].excessUntil = len(w.entries)
	}
}

// verdict does what a rule does to packets, after its limits.
func (w *nftWalk) verdict(verdict, target string, a asks, limits []held, r *nftRule) error {
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
			// It is for what the rule logs or counts.
		case h.packets:
			w.leave(nftPackets, r.where(), "%s", h.asks.says())
		case h.over && (verdict == "drop" || verdict == "reject"):
			w.hold(h, r, "")
		case !h.over && (verdict == "accept" || verdict == "return"):
			w.hold(h, r, verdict)
		default:
			w.leave(nftNoDrop, r.where(), "%v for %s", h.Rate, h.asks.says())
		}
	}
	return nil
}

// plain does what a rule without a limit does.
func (w *nftWalk) plain(verdict string, to *nftChain, a asks, r *nftRule) error {
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
			covered := a.covers(o.asks)
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

// exempt adds entries for packets that pass, or that are dropped, wherever limits may be.
func (w *nftWalk) exempt(a asks, drops bool, r *nftRule) []int {
	for _, names := range a.devices {
		if slices.Equal(names, []string{"lo"}) {
			return nil // there is no limit on these
		}
	}
	s, single := a.side()
	if !single {
		only, _ := a.prefixes(from)
		a.restrict("source " + names(only))
	}
	only, except := a.prefixes(s)
	for _, p := range except {
		a.restrict("not " + name(p))
	}
	e := entry{side: s, drops: drops, partial: a.partial, devices: a.devices, where: r.where()}
	e.label = w.label(e.where, r.Comment, "")
	return w.enter(e, only)
}

// hold adds entries for packets that are held to a limit: those that conform go on, or, where there is a verdict, have that.
func (w *nftWalk) hold(h held, r *nftRule, conforming string) {
	s, single := h.side()
	if !single {
		h.restrict("both addresses")
	}
	if len(h.devices[policy.Ingress]) > 0 && len(h.devices[policy.Egress]) > 0 {
		h.restrict("both iifname and oifname")
	}
	if h.partial != "" {
		w.leave(nftPartial, r.where(), "%v for %s", h.Rate, h.asks.says())
		return
	}
	keys := w.places(h, s, r)
	if len(keys) > 0 {
		w.hooked()
	}
	only, except := h.prefixes(s)
	o := openLimit{held: h, where: r.where()}
	for _, key := range keys {
		// What is not meant is an exception from this limit alone.
		e := entry{key: key, side: s, where: r.where()}
		holes := w.enter(e, except)
		e.limit, e.hook, e.label = h.limit, w.base.Hook, w.label(e.where, r.Comment, "")
		if r.Comment == "" {
			e.comment = fmt.Sprintf("%s %s handle %d", r.Table, r.Chain, r.Handle)
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

// hooked says what else a rule is for than a limit at the hook of the base chain.
func (w *nftWalk) hooked() {
	switch w.base.Hook {
	case "forward":
		w.note("limits at the hook forward were for what is forwarded; rules are for what this host itself sends and gets, too")
	case "input", "output":
		w.note("limits at the hooks input and output were for what this host itself gets and sends; rules are for what is forwarded, too")
	}
}

// places are the devices and directions of a limit.
func (w *nftWalk) places(h held, s side, r *nftRule) (keys []tableKey) {
	d, hook := policy.Ingress, w.base.Hook
	if len(h.devices[policy.Egress]) > 0 {
		d = policy.Egress
	}
	devices := h.devices[d]
	if len(devices) == 0 {
		devices = []string{w.device}
		switch {
		case w.device == "":
			w.leave(nftNoDevice, r.where(), "%v for %s", h.Rate, h.asks.says())
			return nil
		case hook == "output" || hook == "egress":
			d = policy.Egress
		case hook == "input" || hook == "ingress":
		case s == either:
			w.leave(nftBothWays, r.where(), "%v for %s", h.Rate, h.asks.says())
			return nil
		case s == toward:
			d = policy.Egress
		}
	}
	for _, device := range devices {
		if strings.HasSuffix(device, "*") {
			w.leave(nftPattern, r.where(), "%v for %s", h.Rate, h.asks.says())
			continue
		}
		keys = append(keys, tableKey{device, d})
	}
	return keys
}

// says is what packets are meant, for people.
func (a asks) says() string {
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
	words = append(words, a.devices.says()...)
	if a.partial != "" {
		words = append(words, "with "+a.partial)
	}
	if len(words) == 0 {
		return "all packets"
	}
	return "packets " + strings.Join(words, " ")
}

// ranged is the networks that make up the addresses from first to last.
func ranged(first, last netip.Addr) (all []netip.Prefix) {
	for first.Compare(last) <= 0 {
		length := first.BitLen()
		// As wide as the first address can begin, and no further than the last.
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

// lastOf is the last address of a network.
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

// newLimit makes a limit of what nft writes: its bucket holds what the rate lets
// through in a whole unit of time, and the burst.
func (w *nftWalk) newLimit(of *nftLimit, where string) (*limit, error) {
	l := &limit{over: of.Inv, where: where}
	if of.RateUnit == "" || of.RateUnit == "packets" {
		l.packets = true
		return l, nil
	}
	size, seconds, burstSize := nftBytes[of.RateUnit], nftSeconds[of.Per], nftBytes[cmp.Or(of.BurstUnit, "bytes")]
	if size == 0 || seconds == 0 || burstSize == 0 {
		return nil, fmt.Errorf("a limit of %d %s/%s burst %d %s has a unit that is not known", of.Rate, of.RateUnit, of.Per, of.Burst, of.BurstUnit)
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
