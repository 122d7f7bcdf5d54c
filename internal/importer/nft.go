package importer

import (
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
	four, six bool // families
	to, from  addresses
	in, out   []string // devices; nil for any
	partial   string   // what else
}

// addresses are those on one side that a rule asks for.
type addresses struct {
	any    bool
	only   []netip.Prefix // unless any
	except []netip.Prefix
}

func (a *asks) restrict(what string) { a.partial = also(a.partial, what) }

// side is where the addresses are that a rule asks for, and whether that is one side at most.
func (a asks) side() (side, bool) {
	switch to, from_ := !a.to.all(), !a.from.all(); {
	case to && from_:
		return either, false
	case to:
		return toward, true
	case from_:
		return from, true
	}
	return either, true
}

func (a addresses) all() bool { return a.any && len(a.except) == 0 }

// prefixes are the networks on a side, of the families.
func (a asks) prefixes(s side) (only, except []netip.Prefix) {
	all := everything()
	var families []netip.Prefix
	if a.four {
		families = append(families, all[0])
	}
	if a.six {
		families = append(families, all[1])
	}
	on := a.to
	if s == from {
		on = a.from
	}
	if s == either || on.any {
		only = families
	} else {
		only = common(on.only, families)
	}
	if s == either {
		return only, nil
	}
	return only, common(on.except, families)
}

// with adds addresses on a side.
func (a asks) with(s side, networks []netip.Prefix, not bool) asks {
	on := &a.to
	if s == from {
		on = &a.from
	}
	switch {
	case not:
		on.except = append(slices.Clone(on.except), networks...)
	case on.any:
		on.any, on.only = false, networks
	default:
		on.only = common(on.only, networks)
	}
	// Whoever asks for an address asks for its family; one who does not want it asks for that, too.
	four := slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Addr().Is4() })
	six := slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Addr().Is6() })
	a.four, a.six = a.four && four, a.six && six
	return a
}

// covers reports whether all packets that b asks for are among a's.
func (a asks) covers(b asks) bool {
	if a.partial != "" || b.four && !a.four || b.six && !a.six || !among(b.in, a.in) || !among(b.out, a.out) {
		return false
	}
	for _, s := range []struct{ a, b addresses }{{a.to, b.to}, {a.from, b.from}} {
		if len(s.a.except) > 0 && !slices.Equal(s.a.except, s.b.except) {
			return false
		}
		if s.a.any {
			continue
		}
		if s.b.any || slices.ContainsFunc(s.b.only, func(p netip.Prefix) bool {
			return !slices.ContainsFunc(s.a.only, func(q netip.Prefix) bool { return q.Bits() <= p.Bits() && q.Overlaps(p) })
		}) {
			return false
		}
	}
	return true
}

// among reports whether all names are among those of a list, of which nil has any.
func among(names, of []string) bool {
	return of == nil || names != nil && !slices.ContainsFunc(names, func(n string) bool { return !slices.Contains(of, n) })
}

// A held is packets that a limit of nft is for.
type held struct {
	asks
	*nftLimit
}

// nftLimit is a limit of nft, in bytes or packets.
type nftLimit struct {
	*limit
	packets bool
	over    bool // it is for what exceeds
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
		if c.hook == "" || c.kind == "nat" || c.family == "arp" {
			continue
		}
		w.base, w.open, w.accepted = c, nil, nil
		start := asks{four: c.family != "ip6", six: c.family != "ip", to: addresses{any: true}, from: addresses{any: true}}
		if len(c.devices) > 0 {
			switch c.hook {
			case "ingress":
				start.in = c.devices
			case "egress":
				start.out = c.devices
			}
		}
		if err := w.chain(c, start); err != nil {
			return err
		}
		for _, o := range w.open {
			if c.policy == "drop" {
				w.close(o)
				continue
			}
			for _, i := range o.entries {
				w.entries[i] = entry{}
			}
			w.leave(nftNoDrop, o.where, "%v for %s", o.rate, o.asks.says())
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
	if w.depth++; w.depth > deepest {
		w.depth--
		return nil
	}
	outer := w.returned
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
	w.returned = outer
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
func (w *nftWalk) verdict(verdict string, to *nftChain, a asks, limits []held, r *nftRule) error {
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
			w.hold(h, r, nil)
		case !h.over && (verdict == "accept" || verdict == "return"):
			w.hold(h, r, &verdict)
		default:
			w.leave(nftNoDrop, r.where(), "%v for %s", h.rate, h.asks.says())
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
func (w *nftWalk) exempt(a asks, drops bool, r *nftRule) (added []int) {
	if loopback := []string{"lo"}; slices.Equal(a.in, loopback) || slices.Equal(a.out, loopback) {
		return nil // there is no limit on these
	}
	s, single := a.side()
	if !single {
		only, _ := a.prefixes(from)
		a.restrict("source " + names(only))
		s = toward
	}
	only, except := a.prefixes(s)
	for _, p := range except {
		a.restrict("not " + name(p))
	}
	e := entry{side: s, drops: drops, partial: a.partial, in: a.in, out: a.out, where: r.where()}
	for _, p := range only {
		e.prefix = p
		w.entries = append(w.entries, e)
		added = append(added, len(w.entries)-1)
	}
	return added
}

// hold adds entries for packets that are held to a limit: those that conform go on, or, where there is a verdict, have that.
func (w *nftWalk) hold(h held, r *nftRule, conforming *string) {
	s, single := h.side()
	if !single {
		h.restrict("both addresses")
	}
	if len(h.in) > 0 && len(h.out) > 0 {
		h.restrict("both iifname and oifname")
	}
	if h.partial != "" {
		w.leave(nftPartial, r.where(), "%v for %s", h.rate, h.asks.says())
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
		var holes []int
		for _, p := range except {
			w.entries = append(w.entries, entry{key: key, side: s, prefix: p, where: r.where()})
			holes = append(holes, len(w.entries)-1)
		}
		for _, p := range only {
			w.entries = append(w.entries, entry{key: key, side: s, prefix: p, limit: h.limit, hook: w.base.hook, where: r.where(), comment: r.name()})
			o.entries = append(o.entries, len(w.entries)-1)
		}
		w.end(holes)
	}
	if conforming == nil {
		return
	}
	for _, i := range o.entries {
		w.entries[i].excessUntil = everyEntry
	}
	if *conforming == "accept" {
		w.accepted = append(w.accepted, o.entries...)
	} else {
		w.returned = append(w.returned, o.entries...)
	}
	w.open = append(w.open, o)
}

// hooked says what else a rule is for than a limit at the hook of the base chain.
func (w *nftWalk) hooked() {
	switch w.base.hook {
	case "forward":
		w.note("limits at the hook forward were for what is forwarded; rules are for what this host itself sends and gets, too")
	case "input", "output":
		w.note("limits at the hooks input and output were for what this host itself gets and sends; rules are for what is forwarded, too")
	}
}

// places are the devices and directions of a limit.
func (w *nftWalk) places(h held, s side, r *nftRule) (keys []tableKey) {
	d, devices := policy.Ingress, h.in
	switch {
	case len(h.out) > 0:
		d, devices = policy.Egress, h.out
	case len(h.in) > 0:
	case w.device == "":
		w.leave(nftNoDevice, r.where(), "%v for %s", h.rate, h.asks.says())
		return nil
	default:
		devices = []string{w.device}
		switch hook := w.base.hook; {
		case hook == "output" || hook == "egress":
			d = policy.Egress
		case hook == "input" || hook == "ingress":
		case s == either:
			w.leave(nftBothWays, r.where(), "%v for %s", h.rate, h.asks.says())
			return nil
		case s == toward:
			d = policy.Egress
		}
	}
	for _, device := range devices {
		if strings.HasSuffix(device, "*") {
			w.leave(nftPattern, r.where(), "%v for %s", h.rate, h.asks.says())
			continue
		}
		keys = append(keys, tableKey{device, d})
	}
	return keys
}

// says is what packets are meant, for people.
func (a asks) says() string {
	var words []string
	for _, s := range []struct {
		name string
		addresses
	}{{"to", a.to}, {"from", a.from}} {
		if !s.any {
			words = append(words, s.name+" "+names(s.only))
		}
		if len(s.except) > 0 {
			words = append(words, s.name+" any but "+names(s.except))
		}
	}
	if a.in != nil {
		words = append(words, "entering "+some(a.in))
	}
	if a.out != nil {
		words = append(words, "leaving "+some(a.out))
	}
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

// limit is the limit that nft writes as l: its bucket holds what the rate lets
// through in a whole unit of time, and the burst.
func (w *ruleset) nftLimit(l limitJSON, where string) (*nftLimit, error) {
	n := &nftLimit{over: l.Inv, limit: &limit{where: where}}
	size, inBytes := nftBytes[l.RateUnit]
	if l.RateUnit == "" || l.RateUnit == "packets" {
		n.packets = true
		return n, nil
	}
	seconds := nftSeconds[l.Per]
	burstSize := nftBytes[l.BurstUnit]
	if l.BurstUnit == "" {
		burstSize = 1
	}
	if !inBytes || seconds == 0 || burstSize == 0 {
		return nil, fmt.Errorf("%s: a limit of %d %s/%s burst %d %s has a unit that is not known", where, l.Rate, l.RateUnit, l.Per, l.Burst, l.BurstUnit)
	}
	hi, bytes := bits.Mul64(l.Rate, size)
	high, burst := bits.Mul64(l.Burst, burstSize)
	if hi != 0 || high != 0 || bytes > 1<<60 || burst > 1<<60 {
		n.rate = policy.MaxRate + 1
		return n, nil
	}
	n.rate, n.capacity = policy.Rate(8*bytes/seconds), bytes+burst
	if rest := 8 * bytes % seconds; rest*1e6 > 8*bytes && n.rate >= policy.MinRate {
		w.leave(nftRounded, where, "%d %s/%s is %v", l.Rate, l.RateUnit, l.Per, n.rate)
	}
	return n, nil
}
