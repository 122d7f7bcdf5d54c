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
	"strings"
	"unicode/utf8"

	"github.com/shapectl/shapectl/internal/input"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/policy"
)

// nftRuleset is the objects of a ruleset that limits need.
type nftRuleset struct {
	chains []*nftChain // chains of a hook are in the order in which packets traverse them
	named  map[nftName]*nftChain
	sets   map[nftName]*nftSet
	limits map[nftName]*nftLimit
	rules  int
}

// Objects that nft prints.
type (
	// An nftName is a name in a table.
	nftName struct{ Family, Table, Name string }

	nftChain struct {
		nftName
		Type, Hook, Policy string // "" for a chain that others jump to
		Dev                oneOrMore[string]
		rules              []*nftRule
	}

	nftRule struct {
		Family, Table, Chain, Comment string
		Handle                        uint64
		Expr                          []statement
		at                            int64 // offset in the text, from 1
	}

	// An nftSet is a set or map.
	nftSet struct {
		nftName
		Elem  []json.RawMessage
		Stmt  []statement // for elements without statements of their own
		Flags oneOrMore[string]
	}

	nftLimit struct {
		nftName
		Per         string
		Rate, Burst uint64
		RateUnit    string `json:"rate_unit"`
		BurstUnit   string `json:"burst_unit"`
		Inv         bool
	}

	// A statement of a rule: its name, and the rest.
	statement struct {
		kind string
		body json.RawMessage
	}

	// A body is the rest of a statement, with the fields of all kinds that limits need.
	body struct {
		nftLimit                              // limit
		reference   string                    // limit, by name
		Map         *struct{ Key, Data expr } // limit, by key
		Op          string                    // match
		Left, Right expr                      // match
		Key, Data   expr                      // vmap, and Key of meter
		Elem        expr                      // set
		Stmt        oneOrMore[statement]      // set and meter
		Target      string                    // jump and goto
	}

	// An expr is a value, or a field of packets.
	expr struct {
		raw    json.RawMessage
		text   string // a string; "" for anything else
		Prefix *struct {
			Addr string
			Len  int
		}
		Range []string
		Elem  *struct {
			Val   expr
			Limit *nftLimit
		}
		Set      []json.RawMessage
		Payload  *struct{ Protocol, Field string }
		Meta, Ct *struct{ Key string }
		And      []expr `json:"&"`
	}

	oneOrMore[T any] []T
)

func (l *oneOrMore[T]) UnmarshalJSON(text []byte) error {
	var one T
	if json.Unmarshal(text, &one) == nil {
		*l = oneOrMore[T]{one}
		return nil
	}
	return json.Unmarshal(text, (*[]T)(l))
}

func (s *statement) UnmarshalJSON(text []byte) error {
	var kinds map[string]json.RawMessage
	err := json.Unmarshal(text, &kinds)
	for s.kind, s.body = range kinds {
	}
	return err
}

// UnmarshalJSON accepts any value. Unknown forms have only raw.
func (e *expr) UnmarshalJSON(text []byte) error {
	type object expr
	e.raw = bytes.Clone(text)
	if json.Unmarshal(text, &e.text) != nil && json.Unmarshal(text, (*object)(e)) != nil {
		*e = expr{raw: e.raw}
	}
	return nil
}

// read parses a statement that limits need.
func (s statement) read() (b body, err error) {
	switch {
	case s.kind == "limit" && bytes.HasPrefix(s.body, []byte(`"`)):
		err = json.Unmarshal(s.body, &b.reference)
	case slices.Contains([]string{"match", "limit", "set", "meter", "vmap", "jump", "goto"}, s.kind):
		err = json.Unmarshal(s.body, &b)
	}
	if err != nil {
		err = fmt.Errorf("a %s does not have the form that nft writes: %w", s.kind, err)
	}
	return b, err
}

func (r *nftRule) where() string {
	return fmt.Sprintf("table %s %s chain %s handle %d", r.Family, r.Table, r.Chain, r.Handle)
}

// named returns a name in the rule's table.
func (r *nftRule) named(name string) nftName { return nftName{r.Family, r.Table, name} }

// NFT imports the output of `nft -j list ruleset`. Limits of rules without a device are for
// the given one; "" for none. Mistakes in the text are an error of type policyfile.Errors,
// for the given file.
func NFT(file string, text io.Reader, device string) (Imported, error) {
	all, err := input.All(text)
	if err != nil {
		return Imported{}, err
	}
	all = bytes.TrimPrefix(all, []byte(byteOrderMark))
	wrong := func(offset int64, err error) (Imported, error) {
		line, column := position(all, offset-1)
		return Imported{}, policyfile.Errors{{File: file, Line: line, Column: column, Message: err.Error()}}
	}
	rules, at, err := readNFT(all)
	if err != nil {
		return wrong(at, fmt.Errorf("%w; use the output of 'nft -j list ruleset'", err))
	}
	w := &nftWalk{
		ruleset: &ruleset{collector: newCollector()}, nft: rules, device: device, limits: map[any]*limit{}, read: map[*nftRule]bool{},
	}
	w.leaveForeign()
	if err := w.walk(); err != nil {
		return wrong(w.at.at, fmt.Errorf("%s: %w", w.at.where(), err))
	}
	w.leaveUnread()
	w.make()
	if len(w.tables) > 0 {
		w.note("nft counts packets without the Ethernet header, and shapectl with it: set overhead: -14 on Ethernet devices to count like nft")
	}
	return w.imported(), nil
}

// readNFT parses a text. An error comes with the offset after the byte that caused it.
func readNFT(text []byte) (n *nftRuleset, at int64, err error) {
	var document struct{ Nftables []json.RawMessage }
	if err := json.Unmarshal(text, &document); err != nil {
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			return nil, syntax.Offset, fmt.Errorf("this is not JSON: %w", err)
		}
		if kind, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return nil, kind.Offset, fmt.Errorf("there is a %s where nft has none", kind.Value)
		}
		return nil, 0, err
	}
	if document.Nftables == nil {
		return nil, 0, errors.New("there is no list called nftables")
	}
	n = &nftRuleset{named: map[nftName]*nftChain{}, sets: map[nftName]*nftSet{}, limits: map[nftName]*nftLimit{}}
	for _, raw := range document.Nftables {
		// Find where the object begins, since raw is a copy.
		at += int64(bytes.Index(text[at:], raw))
		if err := n.object(raw, at+1); err != nil {
			return nil, at + 1, err
		}
		at += int64(len(raw))
	}
	return n, 0, nil
}

// position returns the line and column, in characters, of an offset.
func position(text []byte, offset int64) (line, column int) {
	before := text[:max(0, min(offset, int64(len(text))))]
	start := bytes.LastIndexByte(before, '\n') + 1
	return 1 + bytes.Count(before, []byte("\n")), 1 + utf8.RuneCount(before[start:])
}

// object adds an object of the list. Limits do not need objects of unknown kinds.
func (n *nftRuleset) object(raw json.RawMessage, at int64) error {
	var o struct {
		Chain    *nftChain
		Rule     *nftRule
		Set, Map *nftSet
		Limit    *nftLimit
	}
	if err := json.Unmarshal(raw, &o); err != nil {
		return fmt.Errorf("an object does not have the form that nft writes: %w", err)
	}
	switch {
	case o.Chain != nil:
		n.chains = append(n.chains, o.Chain)
		n.named[o.Chain.nftName] = o.Chain
	case o.Rule != nil:
		c := n.named[o.Rule.named(o.Rule.Chain)]
		if c == nil {
			return fmt.Errorf("rule %d is in chain %s, which does not come before it", o.Rule.Handle, o.Rule.Chain)
		}
		o.Rule.at = at
		c.rules = append(c.rules, o.Rule)
		n.rules++
	case o.Set != nil, o.Map != nil:
		s := cmp.Or(o.Set, o.Map)
		n.sets[s.nftName] = s
	case o.Limit != nil:
		n.limits[o.Limit.nftName] = o.Limit
	}
	return nil
}

// drops reports whether a chain drops all packets.
func (n *nftRuleset) drops(c *nftChain) bool {
	for _, r := range c.rules {
		for _, s := range r.Expr {
			switch s.kind {
			case "drop", "reject":
				return true
			case "counter", "log", "comment":
			default:
				return false
			}
		}
	}
	return false
}

// afterLimit describes statements after a limit that are conditions, too.
var afterLimit = map[string]string{"match": "a match after the limit", "limit": "a second limit"}

// unconditional lists statements after which all packets go on.
var unconditional = []string{"comment", "counter", "ct helper", "ct timeout", "dup", "flow", "last", "log", "mangle", "notrack", "secmark", "tproxy"}

// conditional reports whether a statement keeps some packets.
func conditional(all []statement) bool {
	return slices.ContainsFunc(all, func(s statement) bool { return !slices.Contains(unconditional, s.kind) })
}

// leaveForeign reports parts of rules that iptables made.
func (w *nftWalk) leaveForeign() {
	for _, c := range w.nft.chains {
		for _, r := range c.rules {
			for _, s := range r.Expr {
				if s.kind == "xt" {
					w.leave(nftForeign, r.where(), "%s", compact(s.body))
				}
			}
		}
	}
}

// leaveUnread reports limits of rules that were not read.
func (w *nftWalk) leaveUnread() {
	for _, c := range w.nft.chains {
		for _, r := range c.rules {
			if !w.read[r] && slices.ContainsFunc(r.Expr, func(s statement) bool { return bytes.Contains(s.body, []byte(`"rate"`)) }) {
				w.leave(nftUnread, r.where(), "chain %s", c.Name)
			}
		}
	}
}

// rule applies a rule to the packets that reach it.
func (w *nftWalk) rule(r *nftRule, a conditions) error {
	var limits []held
	w.read[r] = true
	for n := range r.Expr {
		s := &r.Expr[n]
		if what := afterLimit[s.kind]; limits != nil && what != "" {
			for i := range limits {
				limits[i].restrict(what)
			}
			continue
		}
		b, err := s.read()
		if err != nil {
			return err
		}
		switch s.kind {
		case "match":
			a, limits, err = w.match(b, a, r)
		case "limit":
			limits, err = w.limited(s, b, a, r)
		case "set", "meter":
			var dynamic []held
			if dynamic, err = w.dynamic(s, b, a, r); dynamic != nil {
				limits = dynamic
			} else if conditional(b.Stmt) {
				a.restrict("conditions of a set")
			}
		case "vmap":
			return w.pairs(b.Key, b.Data, a, r, func(a conditions, value expr) error {
				var s statement
				if err := json.Unmarshal(value.raw, &s); err != nil {
					return fmt.Errorf("a verdict does not have the form that nft writes: %w", err)
				}
				b, err := s.read()
				if err != nil {
					return err
				}
				return w.verdict(s.kind, b.Target, a, limits, r)
			})
		case "accept", "drop", "reject", "return", "continue", "jump", "goto":
			return w.verdict(s.kind, b.Target, a, limits, r)
		case "quota":
			w.leave(nftQuota, r.where(), "%s for %s", compact(s.body), a.describe())
			a.restrict("a quota")
		case "xt":
			a.restrict("an extension of iptables")
		default:
			if !slices.Contains(unconditional, s.kind) {
				a.restrict(s.kind)
			}
		}
		if err != nil {
			return err
		}
	}
	if limits != nil {
		return w.verdict("continue", "", a, limits, r)
	}
	return nil
}

// match adds the condition of a match statement. If the elements of a set have limits, it
// returns these.
func (w *nftWalk) match(b body, a conditions, r *nftRule) (conditions, []held, error) {
	equal, unequal := b.Op == "==" || b.Op == "in" || b.Op == "", b.Op == "!="
	left := b.Left.part()
	switch {
	case !equal && !unequal:
	case left.side != either && left.mask == nil:
		networks, limits, ok, err := w.networks(b.Right, r)
		if err != nil {
			return a, nil, err
		}
		if ok && limits == nil {
			return a.with(left.side, networks, unequal), nil, nil
		}
		if ok && equal {
			var all []held
			for i, p := range networks {
				all = append(all, held{a.with(left.side, []netip.Prefix{p}, false), limits[i]})
			}
			return a, all, nil
		}
	case left.device && equal:
		if names, ok := b.Right.deviceNames(); ok {
			return a.on(left.direction, names), nil, nil
		}
	case left.family && equal:
		switch b.Right.text {
		case "ip", "ipv4":
			return a.with(either, everything[:1], false), nil, nil
		case "ip6", "ipv6":
			return a.with(either, everything[1:], false), nil, nil
		}
	}
	what := left.text
	if unequal {
		what += " !="
	}
	a.restrict(what + " " + compact(b.Right.raw))
	return a, nil, nil
}

// on adds a condition on the devices that packets enter or leave.
func (a conditions) on(d policy.Direction, names []string) conditions {
	if before := a.devices[d]; before != nil {
		names = slices.DeleteFunc(slices.Clone(before), func(n string) bool { return !slices.Contains(names, n) })
		if len(names) == 0 {
			a.restrict("two devices")
		}
	}
	a.devices[d] = names
	return a
}

// A part is the part of a packet that a match compares.
type part struct {
	side      side
	six       bool
	mask      *netip.Addr // of the address
	device    bool
	direction policy.Direction // of the device
	family    bool
	text      string
}

func (e expr) part() (p part) {
	switch {
	case e.Payload != nil:
		p.text = e.Payload.Protocol + " " + e.Payload.Field
		p.six = e.Payload.Protocol == "ip6"
		p.family = p.text == "ether type"
		switch p.text {
		case "ip daddr", "ip6 daddr":
			p.side = toward
		case "ip saddr", "ip6 saddr":
			p.side = from
		}
	case e.Meta != nil:
		p.text = "meta " + e.Meta.Key
		switch e.Meta.Key {
		case "iif", "iifname":
			p.device, p.direction = true, policy.Ingress
		case "oif", "oifname":
			p.device, p.direction = true, policy.Egress
		case "nfproto", "protocol":
			p.family = true
		}
	case e.Ct != nil:
		p.text = "ct " + e.Ct.Key
	case len(e.And) == 2:
		p = e.And[0].part()
		mask, err := netip.ParseAddr(e.And[1].text)
		if err != nil || p.side == either {
			return part{text: compact(e.raw)}
		}
		p.mask = &mask
		p.text += " & " + mask.String()
	default:
		p.text = compact(e.raw)
	}
	return p
}

// compact returns a value as it is written, without quotes, cut if it is long.
func compact(raw json.RawMessage) string {
	s := strings.NewReplacer(`"`, "", "{", "", "}", "", "[", "", "]", "", ",", ", ", ":", " ").Replace(string(raw))
	s = strings.Join(strings.Fields(s), " ")
	const room = 60
	if len(s) > room {
		return strings.ToValidUTF8(s[:room], "") + "..."
	}
	return s
}

func (e expr) deviceNames() (names []string, ok bool) {
	if e.text != "" {
		return []string{e.text}, !strings.HasPrefix(e.text, "@")
	}
	for _, raw := range e.Set {
		var name string
		if json.Unmarshal(raw, &name) != nil {
			return nil, false
		}
		names = append(names, name)
	}
	return names, len(names) > 0
}

// set returns the set or map that an expression is or names.
func (w *nftWalk) set(e expr, kind string, r *nftRule) (*nftSet, error) {
	name, named := strings.CutPrefix(e.text, "@")
	set := w.nft.sets[r.named(name)]
	switch {
	case named && set == nil:
		return nil, fmt.Errorf("there is no %s %s", kind, name)
	case named:
		return set, nil
	case e.Set != nil:
		return &nftSet{Elem: e.Set}, nil
	}
	return &nftSet{Elem: []json.RawMessage{e.raw}}, nil
}

// networks returns the networks of a match, and the limits of its elements, if they have any.
func (w *nftWalk) networks(e expr, r *nftRule) (all []netip.Prefix, limits []*limit, ok bool, err error) {
	set, err := w.set(e, "set", r)
	if err != nil || slices.Contains(set.Flags, "dynamic") {
		return nil, nil, false, err
	}
	own, err := limitOf(set.Stmt)
	if err != nil || conditional(set.Stmt) && own == nil {
		return nil, nil, false, err
	}
	for n, raw := range set.Elem {
		var e expr
		if err := json.Unmarshal(raw, &e); err != nil {
			return nil, nil, false, err
		}
		networks, l, ok := e.networks()
		if !ok {
			return nil, nil, false, nil
		}
		var made *limit
		if l = cmp.Or(l, own); l != nil {
			if made, err = w.newLimit(&set.Elem[n], l, r.where()); err != nil {
				return nil, nil, false, err
			}
		}
		all = append(all, networks...)
		limits = append(limits, slices.Repeat([]*limit{made}, len(networks))...)
	}
	if !slices.ContainsFunc(limits, func(l *limit) bool { return l != nil }) {
		return all, nil, true, nil
	}
	// nft does not make sets where only some elements have a limit.
	return all, limits, !slices.Contains(limits, nil), nil
}

// networks returns the networks of an address, prefix or range, and the limit of an element
// of a set, nil for none.
func (e expr) networks() (all []netip.Prefix, l *nftLimit, ok bool) {
	switch {
	case e.text != "":
		p, err := policy.ParsePrefix(e.text)
		return []netip.Prefix{p}, nil, err == nil
	case e.Prefix != nil:
		a, err := netip.ParseAddr(e.Prefix.Addr)
		p := netip.PrefixFrom(a, e.Prefix.Len).Masked()
		return []netip.Prefix{p}, nil, err == nil && p.IsValid()
	case len(e.Range) == 2:
		first, err := netip.ParseAddr(e.Range[0])
		last, bad := netip.ParseAddr(e.Range[1])
		if err != nil || bad != nil || first.BitLen() != last.BitLen() {
			return nil, nil, false
		}
		return ranged(first, last), nil, true
	case e.Elem != nil:
		all, _, ok = e.Elem.Val.networks()
		return all, e.Elem.Limit, ok
	}
	return nil, nil, false
}

// limited returns the limits of a limit statement: its own, a named one, or one for each key
// of a map.
func (w *nftWalk) limited(s *statement, b body, a conditions, r *nftRule) (all []held, err error) {
	if b.Map != nil {
		err = w.pairs(b.Map.Key, b.Map.Data, a, r, func(a conditions, value expr) error {
			l, err := w.namedLimit(value.text, r)
			all = append(all, held{a, l})
			return err
		})
		return all, err
	}
	var l *limit
	if b.reference != "" {
		l, err = w.namedLimit(b.reference, r)
	} else {
		l, err = w.newLimit(s, &b.nftLimit, r.where())
	}
	return []held{{a, l}}, err
}

// namedLimit returns a limit that rules share.
func (w *nftWalk) namedLimit(name string, r *nftRule) (*limit, error) {
	l := w.nft.limits[r.named(name)]
	if l == nil {
		return nil, fmt.Errorf("there is no limit %q", name)
	}
	return w.newLimit(l, l, fmt.Sprintf("table %s %s limit %s", r.Family, r.Table, name))
}

// pairs calls do for each value of a map, with the conditions of its key.
func (w *nftWalk) pairs(key, data expr, a conditions, r *nftRule, do func(conditions, expr) error) error {
	of, err := w.set(data, "map", r)
	if err != nil {
		return err
	}
	left := key.part()
	for _, raw := range of.Elem {
		var pair [2]expr
		if err := json.Unmarshal(raw, &pair); err != nil {
			return fmt.Errorf("a map does not have the form that nft writes: %w", err)
		}
		matched := a
		switch networks, _, ok := pair[0].networks(); {
		case left.side != either && left.mask == nil && ok:
			matched = a.with(left.side, networks, false)
		case left.device && pair[0].text != "":
			matched = a.on(left.direction, []string{pair[0].text})
		default:
			matched.restrict(left.text + " " + compact(pair[0].raw))
		}
		if err := do(matched, pair[1]); err != nil {
			return err
		}
	}
	return nil
}

// limitOf returns the limit among the statements of a set; nil for none.
func limitOf(all []statement) (*nftLimit, error) {
	for _, s := range all {
		if s.kind == "limit" {
			b, err := s.read()
			return &b.nftLimit, err
		}
	}
	return nil, nil
}

// dynamic returns the limit of a set or meter to which packets add elements; nil for none.
func (w *nftWalk) dynamic(s *statement, b body, a conditions, r *nftRule) ([]held, error) {
	l, err := limitOf(b.Stmt)
	if l == nil || err != nil {
		return nil, err
	}
	made, err := w.newLimit(s, l, r.where())
	if err != nil {
		return nil, err
	}
	key := b.Elem
	if s.kind == "meter" {
		key = b.Key
	}
	return []held{{key.each(a, made), made}}, nil
}

// each returns the conditions of a key, and sets the bucket scope of its limit.
func (e expr) each(a conditions, l *limit) conditions {
	if e.Elem != nil {
		e = e.Elem.Val
	}
	left := e.part()
	if left.side == either {
		a.restrict("a bucket for each " + left.text)
		return a
	}
	a = a.with(left.side, families(!left.six, left.six), false)
	l.Each = policy.Each{Kind: policy.EachHost}
	if left.mask != nil {
		p, ok := masked(*left.mask, left.mask.AsSlice())
		if !ok {
			a.restrict("a bucket for each " + left.text)
			return a
		}
		l.Each = policy.Each{Kind: policy.EachSubnet, Bits: uint8(p.Bits())}
	}
	return a
}
