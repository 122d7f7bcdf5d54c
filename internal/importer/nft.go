package importer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/shapectl/shapectl/internal/input"
	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	nftAccepts = reason{loosens, "limit that accepts conforming packets", "the import does not follow what becomes of excess packets",
		"if they are dropped, write the rule as 'limit rate over ... drop', which is the same limit, and import that"}
	nftNoDrop = reason{other, "limit that drops nothing", "no rule was found that drops its excess packets",
		"no rule was made; write one with excess: pass to count them"}
	nftNoPlace = reason{loosens, "limit without a device and direction", "a rule is for one direction of a device that the ruleset names",
		"add iifname or oifname to the ruleset, or use --device; for devices such as tap*, write a rule by hand"}
	nftUnread = reason{loosens, "limit that is not read", "it is a quota, of iptables, of set elements or for NAT or ARP, or no rule leads there", byHand}
)

// get returns a value within objects of JSON; nil if there is none.
func get(v any, path ...string) any {
	for _, key := range path {
		of, _ := v.(map[string]any)
		v = of[key]
	}
	return v
}

func text(v any, path ...string) string {
	s, _ := get(v, path...).(string)
	return s
}

func number(v any, path ...string) uint64 {
	n, _ := get(v, path...).(json.Number)
	u, _ := strconv.ParseUint(n.String(), 10, 64)
	return u
}

// list returns the elements of a list, or another value as its only element.
func list(v any, path ...string) []any {
	switch v := get(v, path...).(type) {
	case nil:
		return nil
	case []any:
		return v
	default:
		return []any{v}
	}
}

// kindOf returns the member of an object that has one, such as a statement.
func kindOf(v any) (kind string, body any) {
	of, _ := v.(map[string]any)
	for kind, body = range of {
	}
	return kind, body
}

// compact returns a value as it is written, without quotes, cut if it is long.
func compact(v any) string {
	raw, _ := json.Marshal(v)
	s := strings.NewReplacer(`"`, "", "{", "", "}", "", "[", "", "]", "", ",", ", ", ":", " ").Replace(string(raw))
	const room = 60
	if s = strings.Join(strings.Fields(s), " "); len(s) > room {
		return strings.ToValidUTF8(s[:room], "") + "..."
	}
	return s
}

// An nftName is a name in a table.
type nftName struct{ family, table, name string }

func named(of any, name string) nftName { return nftName{text(of, "family"), text(of, "table"), name} }

type nftChain struct {
	of    any
	rules []*nftRule
}

type nftRule struct{ of any }

func (r *nftRule) where() string {
	return fmt.Sprintf("table %s %s chain %s handle %d", text(r.of, "family"), text(r.of, "table"), text(r.of, "chain"), number(r.of, "handle"))
}

// A held is a limit of nft, and the packets that it limits.
type held struct {
	conditions
	*limit
}

// nftWalk goes through the chains of a ruleset as packets do.
type nftWalk struct {
	*collector
	device string      // for what names none; "" for none
	chains []*nftChain // those of a hook are in the order in which packets traverse them
	named  map[nftName]*nftChain
	sets   map[nftName]any // and maps
	shared map[nftName]any // named limits
	all    int             // rules

	base *nftChain
	// Entries whose packets skip the rest of the current chain, or of the base chain.
	returned, accepted []int
	at                 *nftRule          // the current rule
	limits             map[any]*limit    // by what has them: each has one bucket, however often rules lead there
	read               map[*nftRule]bool // rules that packets reach
	rules              int               // the number of rules that were read
}

const (
	// jumpsEach and jumpsMore bound how often rules are read: a chain is read for each jump to it.
	jumpsEach, jumpsMore = 64, 1 << 16
)

// NFT imports the output of `nft -j list ruleset`. Limits of rules without a device are for
// the given one; "" for none.
func NFT(file string, from io.Reader, device string) (Imported, error) {
	all, err := input.All(from)
	if err != nil {
		return Imported{}, err
	}
	w := &nftWalk{
		collector: newCollector(), device: device, named: map[nftName]*nftChain{}, sets: map[nftName]any{},
		shared: map[nftName]any{}, limits: map[any]*limit{}, read: map[*nftRule]bool{},
	}
	const advice = "use the output of 'nft -j list ruleset'"
	document, err := readJSON(file, all, advice)
	if err != nil {
		return Imported{}, err
	}
	objects, ok := get(document, "nftables").([]any)
	if !ok {
		return Imported{}, errors.New("there is no list called nftables; " + advice)
	}
	for _, o := range objects {
		w.object(o)
	}
	w.walk()
	for _, c := range w.chains {
		for _, r := range c.rules {
			if raw, _ := json.Marshal(r.of); !w.read[r] && bytes.Contains(raw, []byte(`"rate"`)) {
				w.leave(nftUnread, r.where(), "chain %v", get(c.of, "name"))
			}
		}
	}
	w.make()
	if len(w.tables) > 0 {
		w.note("nft counts packets without the Ethernet header, and shapectl with it: set overhead: -14 on Ethernet devices to count like nft")
	}
	return w.imported(), w.err
}

// object adds an object of a ruleset, which comes after those that it names.
func (w *nftWalk) object(o any) {
	switch kind, of := kindOf(o); kind {
	case "chain":
		c := &nftChain{of: of}
		w.chains = append(w.chains, c)
		w.named[named(of, text(of, "name"))] = c
	case "rule":
		r := &nftRule{of}
		if c := w.named[named(of, text(of, "chain"))]; c != nil {
			c.rules = append(c.rules, r)
			w.all++
			break
		}
		w.fail(fmt.Errorf("%s: the chain does not come before the rule; use the output of 'nft -j list ruleset'", r.where()))
	case "set", "map":
		w.sets[named(of, text(of, "name"))] = of
	case "limit":
		w.shared[named(of, text(of, "name"))] = of
	}
}

func (w *nftWalk) wrong(format string, args ...any) {
	w.fail(fmt.Errorf("%s: %s", w.at.where(), fmt.Sprintf(format, args...)))
}

func (w *nftWalk) walk() {
	for _, c := range w.chains {
		family, hook := text(c.of, "family"), text(c.of, "hook")
		if hook == "" || text(c.of, "type") == "nat" || family == "arp" {
			continue
		}
		w.base, w.accepted = c, nil
		start := conditions{networks: families(family != "ip6", family != "ip")}
		if d, err := policy.ParseDirection(hook); err == nil {
			start.devices[d] = texts(list(c.of, "dev"))
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
	outer, at := w.returned, w.at
	w.returned = nil
	for _, r := range c.rules {
		w.at = r
		if w.rules++; w.rules > jumpsEach*w.all+jumpsMore {
			w.wrong("rules jump to chains more often than can be followed")
		}
		if w.err != nil {
			return
		}
		w.rule(a)
	}
	w.end(w.returned)
	w.returned, w.at = outer, at
}

// unconditional lists statements after which all packets go on.
var unconditional = []string{"comment", "counter", "ct helper", "ct timeout", "dup", "flow", "last", "log", "mangle", "notrack", "secmark", "tproxy"}

// conditional reports whether a statement keeps some packets.
func conditional(all []any) bool {
	return slices.ContainsFunc(all, func(s any) bool { kind, _ := kindOf(s); return !slices.Contains(unconditional, kind) })
}

// rule applies the current rule to the packets that reach it.
func (w *nftWalk) rule(a conditions) {
	var limits []held
	w.read[w.at] = true
	all := list(w.at.of, "expr")
	for n := range all {
		kind, s := kindOf(all[n])
		if limits != nil && (kind == "match" || kind == "limit") {
			for i := range limits {
				limits[i].restrict("a " + kind + " after the limit")
			}
			continue
		}
		switch kind {
		case "limit":
			limits = w.limited(&all[n], s, a)
		case "match":
			a = w.meet(get(s, "left"), text(s, "op"), get(s, "right"), a)
		case "set", "meter":
			if of := limitOf(list(s, "stmt")); of != nil {
				limits = []held{w.dynamic(&all[n], of, cmp.Or(get(s, "elem"), get(s, "key")), a)}
			} else if conditional(list(s, "stmt")) {
				a.restrict("conditions of a set")
			}
		case "vmap":
			w.pairs(s, a, func(a conditions, value any) {
				kind, v := kindOf(value)
				w.verdict(kind, text(v, "target"), a, limits)
			})
			return
		case "accept", "drop", "reject", "return", "continue", "jump", "goto":
			w.verdict(kind, text(s, "target"), a, limits)
			return
		case "quota", "xt":
			w.leave(nftUnread, w.at.where(), "%s %s for %s", kind, compact(s), a.describe())
			a.restrict(kind)
		default:
			if !slices.Contains(unconditional, kind) {
				a.restrict(kind)
			}
		}
	}
	if limits != nil {
		w.verdict("continue", "", a, limits)
	}
}

// verdict applies the verdict of a rule, after its limits.
func (w *nftWalk) verdict(verdict, target string, a conditions, limits []held) {
	to := w.named[named(w.at.of, target)]
	if len(limits) == 0 {
		w.plain(verdict, to, a)
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
	e := entry{conditions: a, drops: drops, where: w.at.where()}
	e.label.Name = cut(oneLine(text(w.at.of, "comment")), policy.MaxName)
	return w.enter(e)
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
	hook, comment := text(w.base.of, "hook"), text(w.at.of, "comment")
	for _, key := range w.places(h) {
		if apart[hook] {
			w.note("limits at the hooks forward, input and output were for forwarded packets, or for those of this host; rules limit both")
		}
		e := entry{conditions: h.conditions, key: key, limit: h.limit, hook: hook, where: w.at.where()}
		e.label.Name = cut(oneLine(comment), policy.MaxName)
		if comment == "" {
			e.label.Note = cut(oneLine(fmt.Sprintf("%v %v handle %v", get(w.at.of, "table"), get(w.at.of, "chain"), get(w.at.of, "handle"))), policy.MaxNote)
		}
		w.enter(e)
	}
}

// places returns the devices and directions of a limit.
func (w *nftWalk) places(h held) (keys []tableKey) {
	d, hook := policy.Ingress, text(w.base.of, "hook")
	if len(h.devices[policy.Ingress]) == 0 && (len(h.devices[policy.Egress]) > 0 || hook == "output" || h.side == toward && hook != "input") {
		d = policy.Egress
	}
	devices := h.devices[d]
	if len(devices) == 0 && w.device != "" && (h.side != either || hook == "output" || hook == "input") && hook != "egress" && hook != "ingress" {
		devices = []string{w.device}
	}
	for _, device := range devices {
		if !strings.HasSuffix(device, "*") {
			keys = append(keys, tableKey{device, d})
		}
	}
	if len(keys) < max(1, len(devices)) {
		w.leave(nftNoPlace, w.at.where(), "%v for %s", h.Rate, h.describe())
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
func (w *nftWalk) newLimit(key, of any, where string) *limit {
	if l := w.limits[key]; l != nil {
		return l
	}
	l := &limit{over: get(of, "inv") == true, where: where}
	w.limits[key] = l
	unit, per, rate, burst := text(of, "rate_unit"), text(of, "per"), number(of, "rate"), number(of, "burst")
	if unit == "" || unit == "packets" {
		l.packets = true
		return l
	}
	size, seconds, burstSize := nftBytes[unit], nftSeconds[per], nftBytes[cmp.Or(text(of, "burst_unit"), "bytes")]
	const most = 1 << 40 // beyond it, the products may overflow
	switch {
	case size == 0 || seconds == 0 || burstSize == 0:
		w.wrong("a limit of %d %s/%s burst %d %s has an unknown unit", rate, unit, per, burst, text(of, "burst_unit"))
	case rate > most || burst > most:
		l.Rate = policy.MaxRate + 1
	default:
		l.Rate, l.Capacity = policy.Rate(8*rate*size/seconds), rate*size+burst*burstSize
	}
	return l
}

// A part is the part of a packet that a match compares.
type part struct {
	side      side
	mask      netip.Addr // of the address; not valid for none
	device    bool
	direction policy.Direction // of the device
	family    bool
	text      string
}

func partOf(v any) (p part) {
	kind, of := kindOf(v)
	switch and := list(v, "&"); {
	case kind == "payload":
		p.text = text(of, "protocol") + " " + text(of, "field")
		p.family = p.text == "ether type"
		p.side = map[string]side{"ip daddr": toward, "ip6 daddr": toward, "ip saddr": from, "ip6 saddr": from}[p.text]
	case kind == "meta":
		p.text = "meta " + text(of, "key")
		switch text(of, "key") {
		case "iif", "iifname":
			p.device, p.direction = true, policy.Ingress
		case "oif", "oifname":
			p.device, p.direction = true, policy.Egress
		case "nfproto", "protocol":
			p.family = true
		}
	case kind == "ct":
		p.text = "ct " + text(of, "key")
	case len(and) == 2:
		p = partOf(and[0])
		if mask, err := netip.ParseAddr(text(and[1])); err == nil && p.side != either {
			p.mask = mask
			p.text += " & " + mask.String()
			break
		}
		fallthrough
	default:
		return part{text: compact(v)}
	}
	return p
}

// meet adds the condition that a part of packets is, or is not, a value or an element of a set.
func (w *nftWalk) meet(of any, op string, value any, a conditions) conditions {
	left, equal := partOf(of), op == "==" || op == "in" || op == ""
	switch {
	case left.side != either && !left.mask.IsValid() && equal:
		if networks, ok := w.networks(value); ok {
			return a.with(left.side, networks)
		}
	case left.device && equal:
		names := texts(append(list(value, "set"), value))
		if all := len(list(value, "set")); len(names) == max(1, all) && !strings.HasPrefix(names[0], "@") {
			return a.on(left.direction, names)
		}
	case left.family && equal:
		switch text(value) {
		case "ip", "ipv4":
			return a.with(either, everything[:1])
		case "ip6", "ipv6":
			return a.with(either, everything[1:])
		}
	}
	if !equal {
		left.text += " " + op
	}
	a.restrict(left.text + " " + compact(value))
	return a
}

func texts(all []any) (texts []string) {
	for _, v := range all {
		if text(v) != "" {
			texts = append(texts, text(v))
		}
	}
	return texts
}

// set returns the set or map that an expression is or names.
func (w *nftWalk) set(v any, kind string) any {
	name, isNamed := strings.CutPrefix(text(v), "@")
	switch set := w.sets[named(w.at.of, name)]; {
	case isNamed && set == nil:
		w.wrong("there is no %s %s", kind, name)
		return nil
	case isNamed:
		return set
	case get(v, "set") != nil:
		return map[string]any{"elem": get(v, "set")}
	}
	return map[string]any{"elem": []any{v}}
}

func (w *nftWalk) networks(v any) (all []netip.Prefix, ok bool) {
	set := w.set(v, "set")
	if limitOf(list(set, "stmt")) != nil {
		w.leave(nftUnread, w.at.where(), "limits of the elements of set %v", get(set, "name"))
	}
	if slices.Contains(list(set, "flags"), any("dynamic")) || conditional(list(set, "stmt")) {
		return nil, false
	}
	for _, e := range list(set, "elem") {
		networks, ok := networksOf(e)
		if !ok {
			return nil, false
		}
		all = append(all, networks...)
	}
	return all, true
}

// networksOf returns the networks of an address, prefix or range.
func networksOf(v any) (all []netip.Prefix, ok bool) {
	kind, of := kindOf(v)
	switch ends := texts(list(of)); {
	case text(v) != "":
		p, err := policy.ParsePrefix(text(v))
		return []netip.Prefix{p}, err == nil
	case kind == "prefix":
		a, err := netip.ParseAddr(text(of, "addr"))
		p := netip.PrefixFrom(a, int(number(of, "len"))).Masked()
		return []netip.Prefix{p}, err == nil && p.IsValid()
	case kind == "range" && len(ends) == 2:
		first, err := netip.ParseAddr(ends[0])
		last, bad := netip.ParseAddr(ends[1])
		if err != nil || bad != nil || first.BitLen() != last.BitLen() {
			return nil, false
		}
		return ranged(first, last), true
	case kind == "elem":
		return networksOf(get(of, "val"))
	}
	return nil, false
}

// limited returns the limits of a limit statement: its own, a named one, or one for each key
// of a map.
func (w *nftWalk) limited(key, s any, a conditions) (all []held) {
	switch {
	case get(s, "map") != nil:
		w.pairs(get(s, "map"), a, func(a conditions, value any) {
			all = append(all, held{a, w.namedLimit(text(value))})
		})
		return all
	case text(s) != "":
		return []held{{a, w.namedLimit(text(s))}}
	}
	return []held{{a, w.newLimit(key, s, w.at.where())}}
}

// namedLimit returns a limit that rules share.
func (w *nftWalk) namedLimit(name string) *limit {
	id := named(w.at.of, name)
	if w.shared[id] == nil {
		w.wrong("there is no limit %q", name)
	}
	return w.newLimit(id, w.shared[id], fmt.Sprintf("table %s %s limit %s", id.family, id.table, name))
}

// pairs calls do for each value of a map, with the conditions of its key.
func (w *nftWalk) pairs(of any, a conditions, do func(conditions, any)) {
	for _, e := range list(w.set(get(of, "data"), "map"), "elem") {
		pair := list(e)
		if len(pair) != 2 {
			w.wrong("a map does not have the form that nft writes")
			return
		}
		do(w.meet(get(of, "key"), "==", pair[0], a), pair[1])
	}
}

// limitOf returns the limit among the statements of a set; nil for none.
func limitOf(all []any) any {
	for _, s := range all {
		if l := get(s, "limit"); l != nil {
			return l
		}
	}
	return nil
}

// dynamic returns the limit of a set or meter to which packets add elements, and sets its bucket scope.
func (w *nftWalk) dynamic(id, of, key any, a conditions) held {
	l, left := w.newLimit(id, of, w.at.where()), partOf(cmp.Or(get(key, "elem", "val"), key))
	subnet, whole := masked(left.mask, left.mask.AsSlice())
	if left.side == either || left.mask.IsValid() && !whole {
		a.restrict("a bucket for each " + left.text)
		return held{a, l}
	}
	six := strings.HasPrefix(left.text, "ip6 ")
	l.Each = policy.Each{Kind: policy.EachHost}
	if left.mask.IsValid() {
		l.Each = policy.Each{Kind: policy.EachSubnet, Bits: uint8(subnet.Bits())}
	}
	return held{a.with(left.side, families(!six, six)), l}
}
