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

// nftRuleset is what nft lists, as far as limits go.
type nftRuleset struct {
	chains  []*nftChain // in the order in which packets meet those of a hook
	named   map[nftName]*nftChain
	sets    map[nftName]*nftSet
	limits  map[nftName]limitJSON
	foreign []*nftRule // rules that iptables made
	rules   int

	resolved map[nftName]*nftLimit
}

// nftName is a name in a table.
type nftName struct{ family, table, name string }

type nftChain struct {
	nftName
	kind, hook, policy string // "" for a chain that others jump to
	devices            []string
	rules              []*nftRule
}

type nftRule struct {
	nftName // of its chain
	handle  uint64
	comment string
	body    []statement
	at      int64 // where in the text it begins, from 1
}

// A statement of a rule: what it is called, and the rest.
type statement struct {
	kind string
	body json.RawMessage
}

type nftSet struct {
	elements []json.RawMessage
	own      *limitJSON // that each element gets that has none
	dynamic  bool
}

func (r *nftRule) where() string {
	return fmt.Sprintf("table %s %s chain %s handle %d", r.family, r.table, r.nftName.name, r.handle)
}

// name is what a rule is called.
func (r *nftRule) name() string {
	return cmp.Or(r.comment, fmt.Sprintf("%s %s handle %d", r.table, r.nftName.name, r.handle))
}

// What nft prints.
type (
	objectJSON struct {
		Table *struct{}
		Chain *chainJSON
		Rule  *ruleJSON
		Set   *setJSON
		Map   *setJSON
		Limit *limitJSON
	}
	chainJSON struct {
		Family, Table, Name, Type, Hook, Policy string
		Dev                                     stringsJSON
	}
	ruleJSON struct {
		Family, Table, Chain, Comment string
		Handle                        uint64
		Expr                          []map[string]json.RawMessage
	}
	setJSON struct {
		Family, Table, Name string
		Elem                []json.RawMessage
		Stmt                []map[string]json.RawMessage
		Flags               stringsJSON
	}
	limitJSON struct {
		Family, Table, Name, Per string
		Rate, Burst              uint64
		RateUnit                 string `json:"rate_unit"`
		BurstUnit                string `json:"burst_unit"`
		Inv                      bool
	}
	// stringsJSON is one string or a list of them.
	stringsJSON []string
)

func (s *stringsJSON) UnmarshalJSON(text []byte) error {
	var one string
	if json.Unmarshal(text, &one) == nil {
		*s = stringsJSON{one}
		return nil
	}
	return json.Unmarshal(text, (*[]string)(s))
}

// NFT reads what `nft -j list ruleset` prints, called file in errors. Limits of
// rules that name no device are for the given one; "" for none. The error is of
// type policyfile.Errors if the text is to blame.
func NFT(file string, text io.Reader, device string) (Imported, error) {
	all, err := input.All(text)
	if err != nil {
		return Imported{}, err
	}
	all = bytes.TrimPrefix(all, []byte(byteOrderMark))
	rules, err := readNFT(file, all)
	if err != nil {
		return Imported{}, err
	}
	w := &nftWalk{ruleset: &ruleset{collector: newCollector()}, nft: rules, device: device}
	for _, r := range rules.foreign {
		w.leave(nftForeign, r.where(), "a rule")
	}
	if err := w.walk(); err != nil {
		line, column := position(all, w.at.at)
		return Imported{}, policyfile.Errors{{File: file, Line: line, Column: column, Message: err.Error()}}
	}
	w.make()
	if len(w.tables) > 0 {
		w.note("nft counts packets from the IP header on, and shapectl with their Ethernet header, too: set overhead: -14 on Ethernet devices to count as nft does")
	}
	return w.imported(), nil
}

func readNFT(file string, text []byte) (*nftRuleset, error) {
	var document struct{ Nftables []json.RawMessage }
	wrong := func(offset int64, format string, args ...any) error {
		line, column := position(text, offset)
		return policyfile.Errors{{File: file, Line: line, Column: column, Message: fmt.Sprintf(format, args...)}}
	}
	const use = "give what 'nft -j list ruleset' prints"
	if err := json.Unmarshal(text, &document); err != nil {
		var syntax *json.SyntaxError
		var kind *json.UnmarshalTypeError
		switch {
		case errors.As(err, &syntax):
			return nil, wrong(syntax.Offset, "this is not JSON: %v; %s", err, use)
		case errors.As(err, &kind):
			return nil, wrong(kind.Offset, "there is a %s where nft has none; %s", kind.Value, use)
		}
		return nil, wrong(0, "%v; %s", err, use)
	}
	if document.Nftables == nil {
		return nil, wrong(0, "there is no list called nftables; %s", use)
	}
	n := &nftRuleset{
		named: map[nftName]*nftChain{}, sets: map[nftName]*nftSet{},
		limits: map[nftName]limitJSON{}, resolved: map[nftName]*nftLimit{},
	}
	at := int64(0)
	for _, raw := range document.Nftables {
		// Where an object begins: each is a copy of what is in the text.
		at += int64(bytes.Index(text[at:], raw))
		if err := n.object(raw, at+1); err != nil {
			return nil, wrong(at+1, "%v; %s", err, use)
		}
		at += int64(len(raw))
	}
	return n, nil
}

// position is the line and column, in characters, of the byte before an offset.
func position(text []byte, offset int64) (line, column int) {
	before := text[:max(0, min(offset-1, int64(len(text))))]
	start := bytes.LastIndexByte(before, '\n') + 1
	return 1 + bytes.Count(before, []byte("\n")), 1 + utf8.RuneCount(before[start:])
}

// object takes in an object of the list. Kinds that are not known are none that limits need.
func (n *nftRuleset) object(raw json.RawMessage, at int64) error {
	var o objectJSON
	if err := json.Unmarshal(raw, &o); err != nil {
		return fmt.Errorf("an object is not as nft writes it: %w", err)
	}
	switch {
	case o.Chain != nil:
		c := &nftChain{nftName{o.Chain.Family, o.Chain.Table, o.Chain.Name}, o.Chain.Type, o.Chain.Hook, o.Chain.Policy, o.Chain.Dev, nil}
		n.chains = append(n.chains, c)
		n.named[c.nftName] = c
	case o.Rule != nil:
		r := &nftRule{nftName: nftName{o.Rule.Family, o.Rule.Table, o.Rule.Chain}, handle: o.Rule.Handle, comment: o.Rule.Comment, at: at}
		c := n.named[r.nftName]
		if c == nil {
			return fmt.Errorf("rule %d is in chain %s, which comes nowhere before it", r.handle, o.Rule.Chain)
		}
		for _, e := range o.Rule.Expr {
			for kind, body := range e {
				r.body = append(r.body, statement{kind, body})
				if kind == "xt" {
					n.foreign = append(n.foreign, r)
				}
			}
		}
		c.rules = append(c.rules, r)
		n.rules++
	case o.Set != nil, o.Map != nil:
		s := cmp.Or(o.Set, o.Map)
		set := &nftSet{elements: s.Elem, dynamic: slices.Contains(s.Flags, "dynamic")}
		for _, stmt := range s.Stmt {
			if l, found := stmt["limit"]; found {
				set.own = new(limitJSON)
				if err := json.Unmarshal(l, set.own); err != nil {
					return fmt.Errorf("the limit of set %s is not as nft writes it: %w", s.Name, err)
				}
			}
		}
		n.sets[nftName{s.Family, s.Table, s.Name}] = set
	case o.Limit != nil:
		n.limits[nftName{o.Limit.Family, o.Limit.Table, o.Limit.Name}] = *o.Limit
	}
	return nil
}

// drops reports whether a chain drops all that comes to it.
func (n *nftRuleset) drops(c *nftChain) bool {
	for _, r := range c.rules {
		for _, s := range r.body {
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

// rule does what a rule does to packets that come to it.
func (w *nftWalk) rule(r *nftRule, a asks) error {
	var limits []held
	for _, s := range r.body {
		var err error
		switch s.kind {
		case "match":
			if limits != nil {
				restrict(limits, "what comes after the limit")
				break
			}
			a, limits, err = w.match(s.body, a, r)
		case "limit":
			if limits != nil {
				restrict(limits, "a second limit")
				break
			}
			limits, err = w.limited(s.body, a, r)
		case "set", "meter":
			var dynamic []held
			if dynamic, err = w.dynamic(s, a, r); dynamic != nil {
				limits = dynamic
			}
		case "vmap":
			return w.verdicts(s.body, a, limits, r)
		case "jump", "goto":
			var to struct{ Target string }
			if err := json.Unmarshal(s.body, &to); err != nil {
				return fmt.Errorf("%s: a %s is not as nft writes it: %w", r.where(), s.kind, err)
			}
			return w.verdict(s.kind, w.nft.named[nftName{r.family, r.table, to.Target}], a, limits, r)
		case "accept", "drop", "reject", "return", "continue":
			return w.verdict(s.kind, nil, a, limits, r)
		case "quota":
			w.leave(nftQuota, r.where(), "%s for %s", compact(s.body), a.says())
			a.restrict("a quota")
		case "xt":
			a.restrict("an extension of iptables")
		}
		if err != nil {
			return fmt.Errorf("%s: %w", r.where(), err)
		}
	}
	if limits != nil {
		return w.verdict("continue", nil, a, limits, r)
	}
	return nil
}

// restrict says what else packets have to be to be held.
func restrict(limits []held, what string) {
	for i := range limits {
		limits[i].restrict(what)
	}
}

// match adds a condition to what is asked of packets. Where elements of a set have limits of their own, it returns these.
func (w *nftWalk) match(body json.RawMessage, a asks, r *nftRule) (asks, []held, error) {
	var m struct {
		Op          string
		Left, Right json.RawMessage
	}
	if err := json.Unmarshal(body, &m); err != nil {
		return a, nil, fmt.Errorf("a match is not as nft writes it: %w", err)
	}
	equal, unequal := m.Op == "==" || m.Op == "in" || m.Op == "", m.Op == "!="
	left := leftOf(m.Left)
	switch {
	case !equal && !unequal:
	case left.side != either && left.mask == nil:
		networks, limits, ok, err := w.networks(m.Right, r)
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
		if names, ok := deviceNames(m.Right); ok {
			return a.on(left.out, names), nil, nil
		}
	case left.family && equal:
		switch text(m.Right) {
		case "ip", "ipv4":
			a.six = false
			return a, nil, nil
		case "ip6", "ipv6":
			a.four = false
			return a, nil, nil
		}
	}
	what := left.says + " " + compact(m.Right)
	if unequal {
		what = left.says + " != " + compact(m.Right)
	}
	a.restrict(what)
	return a, nil, nil
}

// on adds the devices that packets enter, or leave.
func (a asks) on(out bool, names []string) asks {
	devices := &a.in
	if out {
		devices = &a.out
	}
	if *devices != nil {
		if names = slices.DeleteFunc(slices.Clone(*devices), func(n string) bool { return !slices.Contains(names, n) }); len(names) == 0 {
			a.restrict("two devices at once")
		}
	}
	*devices = names
	return a
}

// leftSide is what a match looks at.
type leftSide struct {
	side                side
	six                 bool
	mask                *netip.Addr // that the address is reduced by
	device, out, family bool
	says                string
}

func leftOf(raw json.RawMessage) (l leftSide) {
	var e struct {
		Payload *struct{ Protocol, Field string }
		Meta    *struct{ Key string }
		Ct      *struct{ Key string }
		And     []json.RawMessage `json:"&"`
	}
	if json.Unmarshal(raw, &e) != nil {
		return leftSide{says: compact(raw)}
	}
	switch {
	case e.Payload != nil:
		l.says = e.Payload.Protocol + " " + e.Payload.Field
		l.six = e.Payload.Protocol == "ip6"
		l.family = l.says == "ether type"
		if l.six || e.Payload.Protocol == "ip" {
			switch e.Payload.Field {
			case "daddr":
				l.side = toward
			case "saddr":
				l.side = from
			}
		}
	case e.Meta != nil:
		l.says = "meta " + e.Meta.Key
		switch e.Meta.Key {
		case "iif", "iifname":
			l.device = true
		case "oif", "oifname":
			l.device, l.out = true, true
		case "nfproto", "protocol":
			l.family = true
		}
	case e.Ct != nil:
		l.says = "ct " + e.Ct.Key
	case len(e.And) == 2:
		l = leftOf(e.And[0])
		mask, err := netip.ParseAddr(text(e.And[1]))
		if err != nil || l.side == either {
			return leftSide{says: compact(raw)}
		}
		l.mask = &mask
		l.says += " & " + mask.String()
	default:
		l.says = compact(raw)
	}
	return l
}

// text is a string, "" for anything else.
func text(raw json.RawMessage) (s string) {
	if json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}

// compact is a value as it is written, without quotes, as far as there is room for it.
func compact(raw json.RawMessage) string {
	s := strings.NewReplacer(`"`, "", "{", "", "}", "", "[", "", "]", "", ",", ", ", ":", " ").Replace(string(raw))
	s = strings.Join(strings.Fields(s), " ")
	const room = 60
	if len(s) > room {
		return strings.ToValidUTF8(s[:room], "") + "..."
	}
	return s
}

func deviceNames(raw json.RawMessage) (names []string, ok bool) {
	if name := text(raw); name != "" {
		return []string{name}, !strings.HasPrefix(name, "@")
	}
	var set struct{ Set []string }
	if json.Unmarshal(raw, &set) != nil || len(set.Set) == 0 {
		return nil, false
	}
	return set.Set, true
}

// networks are those that a match or a key is compared with; limits are those of elements that have one, or nil.
func (w *nftWalk) networks(raw json.RawMessage, r *nftRule) (all []netip.Prefix, limits []*nftLimit, ok bool, err error) {
	elements := []json.RawMessage{raw}
	var own *limitJSON
	var anonymous struct{ Set []json.RawMessage }
	if name, named := strings.CutPrefix(text(raw), "@"); named {
		set := w.nft.sets[nftName{r.family, r.table, name}]
		if set == nil {
			return nil, nil, false, fmt.Errorf("there is no set %s", name)
		}
		if set.dynamic {
			return nil, nil, false, nil
		}
		elements, own = set.elements, set.own
	} else if json.Unmarshal(raw, &anonymous) == nil && anonymous.Set != nil {
		elements = anonymous.Set
	}
	var found bool
	for _, e := range elements {
		networks, l, ok := element(e)
		if !ok {
			return nil, nil, false, nil
		}
		if l == nil {
			l = own
		}
		var held *nftLimit
		if l != nil {
			found = true
			if held, err = w.nftLimit(*l, r.where()); err != nil {
				return nil, nil, false, err
			}
		}
		for range networks {
			limits = append(limits, held)
		}
		all = append(all, networks...)
	}
	if !found {
		limits = nil
	}
	if slices.Contains(limits, nil) {
		return nil, nil, false, nil // some without a limit; nft does not make such
	}
	return all, limits, true, nil
}

// element is the networks of an address, prefix or range, and the limit of an element of a set, if it has one.
func element(raw json.RawMessage) (all []netip.Prefix, l *limitJSON, ok bool) {
	var e struct {
		Prefix *struct {
			Addr string
			Len  int
		}
		Range []string
		Elem  *struct {
			Val   json.RawMessage
			Limit *limitJSON
		}
	}
	if s := text(raw); s != "" {
		p, err := policy.ParsePrefix(s)
		return []netip.Prefix{p}, nil, err == nil
	}
	if json.Unmarshal(raw, &e) != nil {
		return nil, nil, false
	}
	switch {
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
		all, _, ok = element(e.Elem.Val)
		return all, e.Elem.Limit, ok
	}
	return nil, nil, false
}

// limited is the limits of a limit statement: one, a named one, or one for each of some addresses.
func (w *nftWalk) limited(body json.RawMessage, a asks, r *nftRule) ([]held, error) {
	if name := text(body); name != "" {
		l, err := w.namedLimit(name, r)
		return []held{{a, l}}, err
	}
	var byKey struct {
		Map *struct{ Key, Data json.RawMessage }
	}
	if err := json.Unmarshal(body, &byKey); err != nil {
		return nil, fmt.Errorf("a limit is not as nft writes it: %w", err)
	}
	if byKey.Map == nil {
		var l limitJSON
		if err := json.Unmarshal(body, &l); err != nil {
			return nil, fmt.Errorf("a limit is not as nft writes it: %w", err)
		}
		n, err := w.nftLimit(l, r.where())
		return []held{{a, n}}, err
	}
	var all []held
	err := w.pairs(byKey.Map.Key, byKey.Map.Data, a, r, func(a asks, value json.RawMessage) error {
		l, err := w.namedLimit(text(value), r)
		all = append(all, held{a, l})
		return err
	})
	return all, err
}

// namedLimit is a limit that rules share.
func (w *nftWalk) namedLimit(name string, r *nftRule) (*nftLimit, error) {
	at := nftName{r.family, r.table, name}
	if l := w.nft.resolved[at]; l != nil {
		return l, nil
	}
	l, found := w.nft.limits[at]
	if !found {
		return nil, fmt.Errorf("there is no limit %q", name)
	}
	n, err := w.nftLimit(l, fmt.Sprintf("table %s %s limit %s", r.family, r.table, name))
	w.nft.resolved[at] = n
	return n, err
}

// pairs goes through a map from keys to values, for packets that have the key.
func (w *nftWalk) pairs(key, data json.RawMessage, a asks, r *nftRule, do func(asks, json.RawMessage) error) error {
	var anonymous struct{ Set [][2]json.RawMessage }
	pairs := anonymous.Set
	if name, named := strings.CutPrefix(text(data), "@"); named {
		set := w.nft.sets[nftName{r.family, r.table, name}]
		if set == nil {
			return fmt.Errorf("there is no map %s", name)
		}
		for _, e := range set.elements {
			var pair [2]json.RawMessage
			if err := json.Unmarshal(e, &pair); err != nil {
				return fmt.Errorf("map %s is not as nft writes it: %w", name, err)
			}
			pairs = append(pairs, pair)
		}
	} else if err := json.Unmarshal(data, &anonymous); err != nil {
		return fmt.Errorf("a map is not as nft writes it: %w", err)
	} else {
		pairs = anonymous.Set
	}
	left := leftOf(key)
	for _, pair := range pairs {
		matched := a
		switch networks, _, ok := element(pair[0]); {
		case left.side != either && left.mask == nil && ok:
			matched = a.with(left.side, networks, false)
		case left.device && text(pair[0]) != "":
			matched = a.on(left.out, []string{text(pair[0])})
		default:
			matched.restrict(left.says + " " + compact(pair[0]))
		}
		if err := do(matched, pair[1]); err != nil {
			return err
		}
	}
	return nil
}

// verdicts does what a map of verdicts says.
func (w *nftWalk) verdicts(body json.RawMessage, a asks, limits []held, r *nftRule) error {
	var m struct{ Key, Data json.RawMessage }
	if err := json.Unmarshal(body, &m); err != nil {
		return fmt.Errorf("%s: a map is not as nft writes it: %w", r.where(), err)
	}
	err := w.pairs(m.Key, m.Data, a, r, func(a asks, value json.RawMessage) error {
		var verdict map[string]*struct{ Target string }
		if err := json.Unmarshal(value, &verdict); err != nil {
			return fmt.Errorf("a verdict is not as nft writes it: %w", err)
		}
		for kind, to := range verdict {
			var chain *nftChain
			if to != nil {
				chain = w.nft.named[nftName{r.family, r.table, to.Target}]
			}
			if err := w.verdict(kind, chain, a, limits, r); err != nil {
				return err
			}
		}
		return nil
	})
	return err
}

// dynamic is the limit of a set or meter that packets add themselves to; nil if it has none.
func (w *nftWalk) dynamic(s statement, a asks, r *nftRule) ([]held, error) {
	var set struct {
		Elem, Key json.RawMessage
		Op        string
		Stmt      json.RawMessage
	}
	if err := json.Unmarshal(s.body, &set); err != nil {
		return nil, fmt.Errorf("a %s is not as nft writes it: %w", s.kind, err)
	}
	var stmts []map[string]json.RawMessage
	var one map[string]json.RawMessage
	if json.Unmarshal(set.Stmt, &one) == nil {
		stmts = append(stmts, one)
	} else if set.Stmt != nil {
		if err := json.Unmarshal(set.Stmt, &stmts); err != nil {
			return nil, fmt.Errorf("a %s is not as nft writes it: %w", s.kind, err)
		}
	}
	for _, stmt := range stmts {
		raw, found := stmt["limit"]
		if !found {
			continue
		}
		var l limitJSON
		if err := json.Unmarshal(raw, &l); err != nil {
			return nil, fmt.Errorf("a limit is not as nft writes it: %w", err)
		}
		n, err := w.nftLimit(l, r.where())
		if err != nil {
			return nil, err
		}
		key := set.Elem
		if s.kind == "meter" {
			key = set.Key
		}
		return []held{{w.each(key, a, n), n}}, nil
	}
	return nil, nil
}

// each is what a key asks of packets, of which each has a bucket of its own.
func (w *nftWalk) each(key json.RawMessage, a asks, n *nftLimit) asks {
	var wrapped struct{ Elem struct{ Val json.RawMessage } }
	if json.Unmarshal(key, &wrapped) == nil && wrapped.Elem.Val != nil {
		key = wrapped.Elem.Val
	}
	left := leftOf(key)
	if left.side == either {
		a.restrict("a bucket for each " + left.says)
		return a
	}
	all := everything()[:1]
	if left.six {
		all = everything()[1:]
	}
	a = a.with(left.side, all, false)
	n.each = policy.Each{Kind: policy.EachHost}
	if left.mask != nil {
		p, ok := masked(*left.mask, left.mask.AsSlice())
		if !ok {
			a.restrict("a bucket for each " + left.says)
			return a
		}
		n.each = policy.Each{Kind: policy.EachSubnet, Bits: uint8(p.Bits())}
	}
	return a
}
