package importer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/input"
	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	nftAccepts = reason{loosens, "limit that accepts conforming packets", "the import does not follow what becomes of excess packets",
		"if they are dropped, write the rule as 'limit rate over ... drop', which is the same limit, and import that"}
	nftNoDrop = reason{other, "limit that drops nothing", "no rule was found that drops its excess packets",
		"no rule was made; write one with excess: pass to count them"}
	nftNoDevice = reason{loosens, "limit without a device", "a rule is for one device, and the ruleset names none",
		"use --device, or add iifname or oifname to the ruleset; for a chain of a device, use a newer nft, which prints it"}
	nftBothWays = reason{loosens, "limit of both directions", "a rule is for one direction of a device", "add iifname or oifname to the ruleset"}
	nftPattern  = reason{loosens, "limit of devices by pattern", "rules are made for devices by name only",
		"no rule was made; write one by hand in a section such as tap*"}
	nftQuota   = reason{other, "quota", "a rule limits a rate, not an amount", "nothing to do if you do not need it"}
	nftUnread  = reason{other, "limit in a chain that is not read", "it is for NAT or ARP, or no rule leads there", byHand}
	nftForeign = reason{loosens, "extension of iptables", "nft does not print what it does", "write a rule by hand if it limits bytes; see iptables-save"}
)

// A held is a limit of nft, and the packets that it limits.
type held struct {
	conditions
	*limit
}

// nftWalk goes through the chains of a ruleset as packets do.
type nftWalk struct {
	*collector
	nft    *nftRuleset
	file   string
	text   []byte
	device string // for what names none; "" for none
	base   *nftChain
	// Entries whose packets skip the rest of the current chain, or of the base chain.
	returned, accepted []int
	depth              int
	at                 *nftRule          // the current rule
	limits             map[any]*limit    // by what has them: each has one bucket, however often rules lead there
	read               map[*nftRule]bool // rules that packets reach
	rules              int               // the number of rules that were read
}

const (
	// deepest is the number of nested jumps that nft allows.
	deepest = 16
	// jumpsEach and jumpsMore bound how often rules are read: a chain is read for each jump to it.
	jumpsEach, jumpsMore = 64, 1 << 16
)

// NFT imports the output of `nft -j list ruleset`. Limits of rules without a device are for
// the given one; "" for none. Mistakes in the text are an error of type policyfile.Errors,
// for the given file.
func NFT(file string, text io.Reader, device string) (Imported, error) {
	all, err := input.All(text)
	if err != nil {
		return Imported{}, err
	}
	ruleset, err := readNFT(file, all)
	if err != nil {
		return Imported{}, err
	}
	w := &nftWalk{
		collector: newCollector(), nft: ruleset, file: file, text: all, device: device, limits: map[any]*limit{}, read: map[*nftRule]bool{},
	}
	w.walk()
	for _, c := range ruleset.chains {
		for _, r := range c.rules {
			if !w.read[r] && slices.ContainsFunc(r.Expr, func(s statement) bool { return bytes.Contains(s.raw, []byte(`"rate"`)) }) {
				w.leave(nftUnread, r.where(), "chain %s", c.Name)
			}
		}
	}
	w.make()
	if len(w.tables) > 0 {
		w.note("nft counts packets without the Ethernet header, and shapectl with it: set overhead: -14 on Ethernet devices to count like nft")
	}
	return w.imported(), w.err
}

// wrong fails because of the current rule.
func (w *nftWalk) wrong(format string, args ...any) {
	w.fail(misread(w.file, w.text, w.at.at, "%s: %s", w.at.where(), fmt.Sprintf(format, args...)))
}

func (w *nftWalk) walk() {
	for _, c := range w.nft.chains {
		if c.Hook == "" || c.Type == "nat" || c.Family == "arp" {
			continue
		}
		w.base, w.accepted = c, nil
		start := every(families(c.Family != "ip6", c.Family != "ip"))
		if d, err := policy.ParseDirection(c.Hook); err == nil && len(c.Dev) > 0 {
			start.devices[d] = c.Dev
		}
		w.chain(c, start)
		w.end(w.accepted)
	}
}

// end lets packets of entries skip what follows up to here.
func (w *nftWalk) end(entries []int) {
	for _, i := range entries {
		w.entries[i].until = len(w.entries)
	}
}

// chain reads a chain for the packets that reach it.
func (w *nftWalk) chain(c *nftChain, a conditions) {
	if w.depth == deepest {
		return
	}
	w.depth++
	outer, at := w.returned, w.at
	w.returned = nil
	for _, r := range c.rules {
		w.at = r
		if w.rules++; w.rules > jumpsEach*w.nft.rules+jumpsMore {
			w.wrong("rules jump to chains more often than can be followed")
		}
		if w.err != nil {
			return
		}
		w.rule(a)
	}
	w.end(w.returned)
	w.returned, w.at = outer, at
	w.depth--
}

// unconditional lists statements after which all packets go on.
var unconditional = []string{"comment", "counter", "ct helper", "ct timeout", "dup", "flow", "last", "log", "mangle", "notrack", "secmark", "tproxy"}

// conditional reports whether a statement keeps some packets.
func conditional(all []statement) bool {
	return slices.ContainsFunc(all, func(s statement) bool { return !slices.Contains(unconditional, s.kind) })
}

// rule applies the current rule to the packets that reach it.
func (w *nftWalk) rule(a conditions) {
	var limits []held
	w.read[w.at] = true
	for n := range w.at.Expr {
		s := &w.at.Expr[n]
		if limits != nil && (s.kind == "match" || s.kind == "limit") {
			for i := range limits {
				limits[i].restrict("a " + s.kind + " after the limit")
			}
			continue
		}
		switch s.kind {
		case "match":
			if limits = w.elements(s, a); limits == nil {
				a = w.meet(s.Left, s.Op, s.Right, a)
			}
		case "limit":
			limits = w.limited(s, a)
		case "set", "meter":
			if l := limitOf(s.Stmt); l != nil {
				limits = []held{w.each(s, l, a)}
			} else if conditional(s.Stmt) {
				a.restrict("conditions of a set")
			}
		case "vmap":
			w.pairs(s.Key, s.Data, a, func(a conditions, value expr) {
				var v statement
				if err := json.Unmarshal(value.raw, &v); err != nil {
					w.wrong("a verdict does not have the form that nft writes: %v", err)
				}
				w.verdict(v.kind, v.Target, a, limits)
			})
			return
		case "accept", "drop", "reject", "return", "continue", "jump", "goto":
			w.verdict(s.kind, s.Target, a, limits)
			return
		case "quota":
			w.leave(nftQuota, w.at.where(), "%s for %s", compact(s.raw), a.describe())
			a.restrict("a quota")
		case "xt":
			w.leave(nftForeign, w.at.where(), "%s", compact(s.raw))
			a.restrict("an extension of iptables")
		default:
			if !slices.Contains(unconditional, s.kind) {
				a.restrict(s.kind)
			}
		}
	}
	if limits != nil {
		w.verdict("continue", "", a, limits)
	}
}

// verdict applies the verdict of a rule, after its limits.
func (w *nftWalk) verdict(verdict, target string, a conditions, limits []held) {
	to := w.nft.named[w.at.named(target)]
	if len(limits) == 0 {
		w.plain(verdict, to, a)
	}
	if to != nil && w.nft.drops(to) {
		verdict = "drop"
	}
	for _, h := range limits {
		switch {
		case h.packets && verdict == "continue":
			// It limits only logging or counting.
		case h.packets:
			w.leave(inPackets, w.at.where(), "%s", h.describe())
		case h.over && (verdict == "drop" || verdict == "reject"):
			w.hold(h)
		case !h.over && (verdict == "accept" || verdict == "return"):
			w.leave(nftAccepts, w.at.where(), "%v for %s", h.Rate, h.describe())
		default:
			w.leave(nftNoDrop, w.at.where(), "%v for %s", h.Rate, h.describe())
		}
	}
}

// plain applies the verdict of a rule without a limit.
func (w *nftWalk) plain(verdict string, to *nftChain, a conditions) {
	switch verdict {
	case "jump", "goto":
		if to != nil {
			w.chain(to, a)
		}
		if verdict == "goto" {
			w.plain("return", nil, a)
		}
	case "accept":
		w.accepted = append(w.accepted, w.exempt(a, false)...)
	case "return":
		w.returned = append(w.returned, w.exempt(a, false)...)
	case "drop", "reject":
		for _, i := range w.exempt(a, true) {
			w.entries[i].until = everyEntry
		}
	}
}

// exempt adds entries for packets that pass or are dropped without a limit.
func (w *nftWalk) exempt(a conditions, drops bool) []int {
	for _, names := range a.devices {
		if slices.Equal(names, []string{"lo"}) {
			return nil // the loopback device has no rules
		}
	}
	s, only, except := a.networks()
	if len(except) > 0 {
		a.restrict("an address that is negated")
	}
	e := entry{conditions: a, side: s, drops: drops, where: w.at.where()}
	e.label.Name = w.fit(e.where, w.at.Comment, policy.MaxName)
	return w.enter(e, only)
}

// hold adds entries for packets whose excess is dropped.
func (w *nftWalk) hold(h held) {
	if len(h.devices[policy.Ingress]) > 0 && len(h.devices[policy.Egress]) > 0 {
		h.restrict("both iifname and oifname")
	}
	if h.partial != "" {
		w.leave(narrower, w.at.where(), "%v for %s", h.Rate, h.describe())
		return
	}
	s, only, except := h.networks()
	for _, key := range w.places(h, s) {
		switch w.base.Hook {
		case "forward":
			w.note("limits at the hook forward were for forwarded packets; rules also limit packets of this host")
		case "input", "output":
			w.note("limits at the hooks input and output were for packets of this host; rules also limit forwarded packets")
		}
		// Negated addresses are an exception from this limit only.
		e := entry{key: key, side: s, where: w.at.where()}
		holes := w.enter(e, except)
		e.limit, e.hook, e.label.Name = h.limit, w.base.Hook, w.fit(e.where, w.at.Comment, policy.MaxName)
		if w.at.Comment == "" {
			e.label.Note = cut(oneLine(fmt.Sprintf("%s %s handle %d", w.at.Table, w.at.Chain, w.at.Handle)), policy.MaxNote)
		}
		w.enter(e, only)
		w.end(holes)
	}
}

// places returns the devices and directions of a limit.
func (w *nftWalk) places(h held, s side) (keys []tableKey) {
	d, hook, why := policy.Ingress, w.base.Hook, reason{}
	if len(h.devices[policy.Egress]) > 0 || hook == "output" || s == toward && hook != "input" {
		d = policy.Egress
	}
	if len(h.devices[policy.Ingress]) > 0 {
		d = policy.Ingress
	}
	devices := h.devices[d]
	if len(devices) == 0 {
		devices = []string{w.device}
		switch {
		case w.device == "" || hook == "egress" || hook == "ingress":
			why = nftNoDevice
		case s == either && hook != "output" && hook != "input":
			why = nftBothWays
		}
	}
	for _, device := range devices {
		if strings.HasSuffix(device, "*") {
			why = nftPattern
		}
		if why != (reason{}) {
			w.leave(why, w.at.where(), "%v for %s", h.Rate, h.describe())
			continue
		}
		keys = append(keys, tableKey{device, d})
	}
	return keys
}

// units of nft, in bytes and in seconds.
var (
	nftBytes   = map[string]uint64{"bytes": 1, "kbytes": 1 << 10, "mbytes": 1 << 20}
	nftSeconds = map[string]uint64{"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
)

// newLimit converts a limit of nft. Its bucket holds the burst, and the bytes of one unit of
// time at the rate.
func (w *nftWalk) newLimit(key any, of *nftLimit, where string) *limit {
	if l := w.limits[key]; l != nil {
		return l
	}
	l := &limit{over: of.Inv, where: where}
	w.limits[key] = l
	if of.RateUnit == "" || of.RateUnit == "packets" {
		l.packets = true
		return l
	}
	size, seconds, burstSize := nftBytes[of.RateUnit], nftSeconds[of.Per], nftBytes[cmp.Or(of.BurstUnit, "bytes")]
	const most = 1 << 40 // beyond it, the products may overflow
	switch {
	case size == 0 || seconds == 0 || burstSize == 0:
		w.wrong("a limit of %d %s/%s burst %d %s has an unknown unit", of.Rate, of.RateUnit, of.Per, of.Burst, of.BurstUnit)
	case of.Rate > most || of.Burst > most:
		l.Rate = policy.MaxRate + 1
	default:
		l.Rate, l.Capacity = policy.Rate(8*of.Rate*size/seconds), of.Rate*size+of.Burst*burstSize
	}
	return l
}

// meet adds the condition that a part of packets is, or is not, a value or an element of a set.
func (w *nftWalk) meet(of expr, op string, value expr, a conditions) conditions {
	left, equal, unequal := of.part(), op == "==" || op == "in" || op == "", op == "!="
	switch {
	case left.side != either && left.mask == nil && (equal || unequal):
		if networks, ok := w.networks(value); ok {
			return a.with(left.side, networks, unequal)
		}
	case left.device && equal:
		if names := value.devices(); names != nil {
			return a.on(left.direction, names)
		}
	case left.family && equal:
		switch value.text {
		case "ip", "ipv4":
			return a.with(either, everything[:1], false)
		case "ip6", "ipv6":
			return a.with(either, everything[1:], false)
		}
	}
	if unequal {
		left.text += " !="
	}
	a.restrict(left.text + " " + compact(value.raw))
	return a
}

// elements returns the limits of the elements of a set; nil if they have none.
func (w *nftWalk) elements(s *statement, a conditions) (all []held) {
	set := w.set(s.Right, "set")
	own := limitOf(set.Stmt)
	for n := range set.Elem {
		e, l := set.Elem[n], own
		if e.Elem != nil {
			e, l = e.Elem.Val, cmp.Or(e.Elem.Limit, own)
		}
		if l == nil || slices.Contains(set.Flags, "dynamic") {
			return nil
		}
		all = append(all, held{w.meet(s.Left, s.Op, e, a), w.newLimit(&set.Elem[n], l, w.at.where())})
	}
	return all
}

// set returns the set or map that an expression is or names.
func (w *nftWalk) set(e expr, kind string) *nftSet {
	name, named := strings.CutPrefix(e.text, "@")
	if !named && e.Set != nil {
		return &nftSet{Elem: e.Set}
	}
	if !named {
		return &nftSet{Elem: []expr{e}}
	}
	if set := w.nft.sets[w.at.named(name)]; set != nil {
		return set
	}
	w.wrong("there is no %s %s", kind, name)
	return &nftSet{}
}

// networks returns the networks of a value or set.
func (w *nftWalk) networks(e expr) (all []netip.Prefix, ok bool) {
	set := w.set(e, "set")
	if slices.Contains(set.Flags, "dynamic") || conditional(set.Stmt) {
		return nil, false
	}
	for _, e := range set.Elem {
		networks, ok := e.networks()
		if !ok {
			return nil, false
		}
		all = append(all, networks...)
	}
	return all, true
}

// limited returns the limits of a limit statement: its own, a named one, or one for each key
// of a map.
func (w *nftWalk) limited(s *statement, a conditions) (all []held) {
	switch {
	case s.Map != nil:
		w.pairs(s.Map.Key, s.Map.Data, a, func(a conditions, value expr) {
			all = append(all, held{a, w.namedLimit(value.text)})
		})
		return all
	case s.reference != "":
		return []held{{a, w.namedLimit(s.reference)}}
	}
	return []held{{a, w.newLimit(s, &s.nftLimit, w.at.where())}}
}

// namedLimit returns a limit that rules share.
func (w *nftWalk) namedLimit(name string) *limit {
	l := w.nft.limits[w.at.named(name)]
	if l == nil {
		w.wrong("there is no limit %q", name)
		return &limit{}
	}
	return w.newLimit(l, l, fmt.Sprintf("table %s %s limit %s", w.at.Family, w.at.Table, name))
}

// pairs calls do for each value of a map, with the conditions of its key.
func (w *nftWalk) pairs(key, data expr, a conditions, do func(conditions, expr)) {
	for _, pair := range w.set(data, "map").Elem {
		if len(pair.list) != 2 {
			w.wrong("a map does not have the form that nft writes")
			return
		}
		do(w.meet(key, "==", pair.list[0], a), pair.list[1])
	}
}

// limitOf returns the limit among the statements of a set; nil for none.
func limitOf(all []statement) *nftLimit {
	if i := slices.IndexFunc(all, func(s statement) bool { return s.kind == "limit" }); i >= 0 {
		return &all[i].nftLimit
	}
	return nil
}

// each returns the limit of a set or meter to which packets add elements, and sets its bucket scope.
func (w *nftWalk) each(s *statement, of *nftLimit, a conditions) held {
	key := s.Elem
	if s.kind == "meter" {
		key = s.Key
	}
	if key.Elem != nil {
		key = key.Elem.Val
	}
	l, left := w.newLimit(s, of, w.at.where()), key.part()
	subnet, whole := netip.Prefix{}, true
	if left.mask != nil {
		subnet, whole = masked(*left.mask, left.mask.AsSlice())
	}
	if left.side == either || !whole {
		a.restrict("a bucket for each " + left.text)
		return held{a, l}
	}
	six := strings.HasPrefix(left.text, "ip6 ")
	l.Each = policy.Each{Kind: policy.EachHost}
	if left.mask != nil {
		l.Each = policy.Each{Kind: policy.EachSubnet, Bits: uint8(subnet.Bits())}
	}
	return held{a.with(left.side, families(!six, six), false), l}
}
