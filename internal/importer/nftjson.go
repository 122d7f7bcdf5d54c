package importer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"unicode/utf8"

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
		Elem  []expr
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

	// A statement of a rule, with the fields of all kinds that limits need.
	statement struct {
		kind string
		raw  json.RawMessage // the rest
		statementFields
		reference string // limit, by name
	}
	statementFields struct {
		nftLimit                              // limit
		Map         *struct{ Key, Data expr } // limit, by key
		Op          string                    // match
		Left, Right expr                      // match
		Key, Data   expr                      // vmap, and Key of meter
		Elem        expr                      // set
		Stmt        oneOrMore[statement]      // set and meter
		Target      string                    // jump and goto
	}

	// An expr is a value, or a field of packets. Unknown forms have only raw.
	expr struct {
		raw    json.RawMessage
		text   string // a string; "" for anything else
		list   []expr // a key of a map and its value
		Prefix *struct {
			Addr string
			Len  int
		}
		Range []string
		Elem  *struct {
			Val   expr
			Limit *nftLimit
		}
		Set      []expr
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
	for s.kind, s.raw = range kinds {
	}
	switch s.kind {
	case "limit":
		if bytes.HasPrefix(s.raw, []byte(`"`)) {
			return json.Unmarshal(s.raw, &s.reference)
		}
		fallthrough
	case "match", "set", "meter", "vmap", "jump", "goto":
		return json.Unmarshal(s.raw, &s.statementFields)
	}
	return err
}

func (e *expr) UnmarshalJSON(text []byte) error {
	type object expr
	e.raw = bytes.Clone(text)
	switch text[0] {
	case '"':
		return json.Unmarshal(text, &e.text)
	case '[':
		return json.Unmarshal(text, &e.list)
	case '{':
		if json.Unmarshal(text, (*object)(e)) != nil {
			*e = expr{raw: e.raw}
		}
	}
	return nil
}

func (r *nftRule) where() string {
	return fmt.Sprintf("table %s %s chain %s handle %d", r.Family, r.Table, r.Chain, r.Handle)
}

// named returns a name in the rule's table.
func (r *nftRule) named(name string) nftName { return nftName{r.Family, r.Table, name} }

// misread returns an error of type policyfile.Errors, which is about what ends at an offset of a text.
func misread(file string, text []byte, end int64, format string, args ...any) error {
	before := text[:max(0, min(end, int64(len(text))))]
	start := bytes.LastIndexByte(before, '\n') + 1
	line, column := 1+bytes.Count(before, []byte("\n")), utf8.RuneCount(before[start:])
	return policyfile.Errors{{File: file, Line: line, Column: max(1, column), Message: fmt.Sprintf(format, args...)}}
}

// readJSON reads a text, which has one value, and returns the offset of its end. The error is of type policyfile.Errors.
func readJSON(file string, text []byte, value any, advice string) (end int64, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	err = d.Decode(value)
	end = d.InputOffset()
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		return end, misread(file, text, syntax.Offset, "this is not JSON: %v; %s", err, advice)
	}
	if kind, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return end, misread(file, text, kind.Offset, "there is a %s where none can be; %s", kind.Value, advice)
	}
	if err != nil {
		return end, misread(file, text, int64(len(text)), "the text ends within an object; is the file cut off?")
	}
	if _, err := d.Token(); err != io.EOF {
		return end, misread(file, text, d.InputOffset(), "something follows the object; remove it")
	}
	return end, nil
}

// readNFT parses a text.
func readNFT(file string, text []byte) (*nftRuleset, error) {
	const advice = "use the output of 'nft -j list ruleset'"
	var document struct{ Nftables []json.RawMessage }
	if _, err := readJSON(file, text, &document, advice); err != nil {
		return nil, err
	}
	if document.Nftables == nil {
		return nil, misread(file, text, 0, "there is no list called nftables; %s", advice)
	}
	n := &nftRuleset{named: map[nftName]*nftChain{}, sets: map[nftName]*nftSet{}, limits: map[nftName]*nftLimit{}}
	at := int64(0)
	for _, raw := range document.Nftables {
		// Find where the object begins, since raw is a copy.
		at += int64(bytes.Index(text[at:], raw))
		if err := n.object(raw, at+1); err != nil {
			return nil, misread(file, text, at+1, "%v; %s", err, advice)
		}
		at += int64(len(raw))
	}
	return n, nil
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

// A part is the part of a packet that a match compares.
type part struct {
	side      side
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
		p.family = p.text == "ether type"
		p.side = map[string]side{"ip daddr": toward, "ip6 daddr": toward, "ip saddr": from, "ip6 saddr": from}[p.text]
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

// devices returns the names of devices; nil if they are not listed.
func (e expr) devices() (names []string) {
	for _, name := range append(e.Set, e) {
		switch {
		case name.text != "" && !strings.HasPrefix(name.text, "@"):
			names = append(names, name.text)
		case name.Set == nil:
			return nil
		}
	}
	return names
}

// networks returns the networks of an address, prefix or range.
func (e expr) networks() (all []netip.Prefix, ok bool) {
	switch {
	case e.text != "":
		p, err := policy.ParsePrefix(e.text)
		return []netip.Prefix{p}, err == nil
	case e.Prefix != nil:
		a, err := netip.ParseAddr(e.Prefix.Addr)
		p := netip.PrefixFrom(a, e.Prefix.Len).Masked()
		return []netip.Prefix{p}, err == nil && p.IsValid()
	case len(e.Range) == 2:
		first, err := netip.ParseAddr(e.Range[0])
		last, bad := netip.ParseAddr(e.Range[1])
		return ranged(first, last), err == nil && bad == nil && first.BitLen() == last.BitLen()
	case e.Elem != nil:
		return e.Elem.Val.networks()
	}
	return nil, false
}
