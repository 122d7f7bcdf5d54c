package policyfile

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"sort"
	"unicode/utf8"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Merge writes the file like with the rules in tables, which are those of devices. It keeps
// unchanged rules, comments and sections of other devices as they are. Changed rules get
// new values, removed rules disappear, and new rules are added after the others of their
// direction. A device that differs from the rules of its pattern gets its own section, unless it only waits for guarantees.
// Plans that the file does not have are added. A pool disappears unless something that stays
// is within it. Rules must be valid, and as
// policy.Limit.Rule makes them. The error is a LeftOutError if all but some devices were
// written.
func Merge(w io.Writer, like *File, devices []Device, tables []policy.Table) error {
	if err := like.hides(); err != nil {
		return err
	}
	tables, waited := like.withGuarantees(tables, devices)
	pools, live, err := byDevice(tables)
	if err != nil {
		return fmt.Errorf("write a policy: %w", err)
	}
	absent, exists := maps.Clone(live), map[string]bool{}
	for _, d := range devices {
		delete(absent, d.Name)
		exists[d.Name] = true
	}
	pools, hosts := foldHosts(pools, live, func(device string) bool { return exists[device] })
	for name := range absent {
		return fmt.Errorf("write a policy: device %s has rules but does not exist", name)
	}
	for _, of := range live {
		for i := range of {
			of[i].Rules = slices.Clone(of[i].Rules)
			policy.SortRules(of[i].Rules)
		}
	}
	m := merger{
		editor: editor{source: like.source, newline: "\n", indent: 2}, like: like, live: live, pools: pools, hosts: hosts, users: usersOf(pools, live),
		own: map[string]bool{}, used: map[string]*plan{}, gone: map[uint32]bool{},
	}
	if end := like.lineEnd(1); bytes.HasPrefix(like.text[end:], []byte("\r")) {
		m.newline = "\r\n"
	}
	if len(like.devices) > 0 && !like.braces {
		m.indent = m.column(like.place.start)
	}
	left := m.devices(devices)
	elsewhere := func(s *section) bool { return s.pattern || !exists[s.name()] }
	own, err := m.leaveOwn(exists)
	if err != nil {
		return fmt.Errorf("write a policy: %w", err)
	}
	m.keepPools(elsewhere)
	for _, of := range hosts {
		for _, h := range of {
			if h.pool != nil {
				own = append(own, *h.pool)
			}
		}
	}
	tree := policy.NewTree(append([]policy.Table{{Rules: slices.Concat(m.pools, own)}}, slices.DeleteFunc(slices.Clone(tables), policy.Table.IsPools)...))
	like.addTo(tree, elsewhere)
	for _, problem := range tree.Problems() {
		if !problem.NoRoom || !waited {
			return fmt.Errorf("write a policy: %w", problem)
		}
	}
	m.addPlans()
	m.changePools()
	if len(m.added) > 0 {
		m.apply(change{place: like.root, key: like.key, entries: like.root.spans, last: m.added})
	}
	if err := m.writeTo(w); err != nil {
		return fmt.Errorf("write a policy: %w", err)
	}
	return left.orNil()
}

// hides returns an error for a character that is escaped when the file is printed, because
// the printed file would differ. In lines with only a comment that does not matter.
func (f *File) hides() error {
	for line := range f.lines {
		text := f.lineText(line + 1)
		if bytes.HasPrefix(bytes.TrimLeft(text, " \t"), []byte("#")) {
			continue
		}
		for i, c := range string(text) {
			if one := string(c); c != '\t' && plain.Line(one) != one {
				return Error{f.name, line + 1, 1 + utf8.RuneCount(text[:i]), fmt.Sprintf(
					"character %U cannot be shown as it is; write it as \"\\U%08x\" in double quotes, or put the comment in its own line", c, c)}
			}
		}
	}
	return nil
}

type merger struct {
	editor
	like    *File
	live    map[string][]policy.Table // by device, in the order of policy.SortTables
	pools   []policy.Rule             // by name
	hosts   map[side][]liveHost
	users   map[policy.Within]map[user]bool
	own     map[string]bool  // pools of devices that sections go on to define, and whether they are live
	made    map[string]*plan // plans for the live rules, by how they are shown; nil until one is needed
	used    map[string]*plan // those of made that must be added
	added   []fresh          // keys of the file that it does not have
	gone    map[uint32]bool  // removed devices and directions, by the offsets of their keys
	current *section         // whose entries are changed; nil for others
}

// plans returns the plans of the file that are shown by a text, or else a new one.
func (m *merger) plans(shown string) (plans []*plan) {
	for _, p := range sortedPlans(m.like.plans) {
		if p.shown == shown {
			plans = append(plans, p)
		}
	}
	if len(plans) > 0 {
		return plans
	}
	if m.made == nil {
		m.made = plansOf(m.live, m.like.plans)
	}
	m.used[shown] = m.made[shown]
	return []*plan{m.made[shown]}
}

// addPlans adds the new plans that rules use.
func (m *merger) addPlans() {
	var last []fresh
	for _, p := range sortedPlans(m.used) {
		last = append(last, fresh{key: word(p.key), value: p.value()})
	}
	switch {
	case len(last) == 0:
	case m.like.plansPlace.end > 0:
		at := m.like.plansPlace
		m.apply(change{place: at, key: m.like.plansKey, inside: m.like.root.braces, entries: at.spans, last: last})
	default:
		m.added = append(m.added, fresh{key: "plans", inner: last})
	}
}

// devices changes the sections of all devices but those that it returns.
func (m *merger) devices(devices []Device) (left LeftOutError) {
	c := change{place: m.like.place, key: m.like.key, inside: m.like.root.braces, gone: map[uint32]bool{}}
	for i := range m.like.devices {
		c.entries = append(c.entries, m.like.devices[i].span)
	}
	sorted := slices.Clone(devices)
	sort.Slice(sorted, func(i, j int) bool { return sorted[i].Name < sorted[j].Name })
	for _, d := range sorted {
		d.Neighbours = nil // which hosts are in force is known from their pools and rules
		matching, _ := m.like.section(d.Name)
		var pools []policy.Rule
		if matching != nil {
			pools, _ = m.like.poolsOn(matching, d, matching.own)
		}
		lent := m.lent(pools, d.Name)
		if s := m.like.exactly[d.Name]; s != nil && lent {
			c.gone[s.span.key], m.gone[s.span.key] = true, true
		} else if s != nil {
			if m.section(s, d) {
				c.gone[s.span.key], m.gone[s.span.key] = true, true
			}
			continue
		}
		live := m.live[d.Name]
		rules := slices.DeleteFunc(slices.Clone(live), func(t policy.Table) bool { return len(t.Rules) == 0 })
		if said, err := m.like.For(d); err == nil && slices.EqualFunc(said, rules, sameTable) && m.areLive(pools) && m.hostsAreLive(matching, d) && !lent {
			for _, p := range pools {
				m.own[p.Label.Name] = true
			}
			continue
		}
		key, err := DeviceKey(d.Name)
		if err != nil {
			left = append(left, err.Error())
			continue
		}
		own := fresh{key: key, value: "{}"}
		for _, t := range live {
			own.inner = append(own.inner, m.freshTable(m.like.usual, t, d))
		}
		c.last = append(c.last, own)
	}
	m.apply(c)
	return left
}

func sameTable(a, b policy.Table) bool {
	return a.Direction == b.Direction && a.Match == b.Match && slices.Equal(a.Rules, b.Rules)
}

func (m *merger) freshTable(usual policy.Limit, t policy.Table, d Device) fresh {
	f := fresh{key: t.Direction.String()}
	if t.Match != t.Direction.FarSide() {
		f.inner = append(f.inner, fresh{key: "match", value: t.Match.String()})
	}
	spell := newSpeller(usual, d.L2Bytes, m.plans)
	for i := range t.Rules {
		f.inner = append(f.inner, freshRule(spell, &t.Rules[i]))
	}
	its := side{d.Name, t.Direction}
	for _, h := range m.hosts[its] {
		f.inner = append(f.inner, freshHost(usual, h, its, d.L2Bytes))
	}
	return f
}

func freshRule(spell *speller, r *policy.Rule) fresh {
	return fresh{key: networkKey(r.Prefix), value: spell.value(r)}
}

func freshParts(parts []part) (entries []fresh) {
	for _, p := range parts {
		entries = append(entries, fresh{key: p.key, value: p.value()})
	}
	return entries
}

// section changes the section of a device; gone is true if it must be removed instead.
func (m *merger) section(s *section, d Device) (gone bool) {
	live := m.live[d.Name]
	isLive := func(p *pool) bool { return m.livePool(p.rule.Label.Name) != nil }
	if len(live) == 0 && !m.like.pattern(d.Name) && !slices.ContainsFunc(s.own, isLive) {
		return len(s.own) > 0 || slices.ContainsFunc(s.tables, func(t table) bool { return len(t.rules)+t.pooledHosts() > 0 })
	}
	c := change{place: s.place, key: s.span.key, inside: m.like.braces, entries: slices.Clone(s.spans), gone: map[uint32]bool{}}
	m.current = s
	m.changeOwn(&c, s, d.Name)
	egressFirst := func(a table, b policy.Table) int { return cmp.Compare(b.Direction, a.direction) }
	for t, l := range policy.Pairs(s.tables, live, egressFirst) {
		if t == nil {
			c.last = append(c.last, m.freshTable(s.usual, *l, d))
			continue
		}
		c.entries = append(c.entries, t.span)
		switch {
		case l != nil:
			m.table(s, t, *l, d, s.braces)
		case len(t.rules)+len(t.hosts) > 0 && t.pooledHosts() == len(t.hosts) && m.livePool(d.Name+" "+t.direction.String()) == nil:
			c.gone[t.span.key], m.gone[t.span.key] = true, true
		default:
			m.table(s, t, policy.Table{Direction: t.direction, Match: t.match}, d, s.braces)
		}
	}
	m.apply(c)
	return false
}

// pattern reports whether a pattern matches a device.
func (f *File) pattern(device string) bool {
	return slices.ContainsFunc(f.devices, func(s section) bool { return s.pattern && Matches(s.key, device) })
}

// table changes a direction to the live rules.
func (m *merger) table(s *section, t *table, live policy.Table, d Device, inside bool) {
	c := change{place: t.place, key: t.span.key, inside: inside, entries: slices.Clone(t.spans), gone: map[uint32]bool{}}
	m.changeOwn(&c, s, d.Name+" "+t.direction.String())
	if live.Match != t.match {
		if t.matchSpan != (span{}) {
			m.replace(int(t.matchSpan.value), int(t.matchSpan.end), live.Match.String())
		} else {
			c.first = []fresh{{key: "match", value: live.Match.String()}}
		}
	}
	spell := newSpeller(t.usual, d.L2Bytes, m.plans)
	inOrder := func(a rule, b policy.Rule) int { return policy.ComparePrefix(a.prefix, b.Prefix) }
	var first *rule // of the two rules of a key any
	var firstLive *policy.Rule
	for r, live := range policy.Pairs(t.rules, live.Rules, inOrder) {
		switch {
		case r == nil:
			c.last = append(c.last, freshRule(spell, live))
			continue
		case first != nil && first.key == r.key:
			m.families(&c, spell, [2]*rule{first, r}, [2]*policy.Rule{firstLive, live}, d, t.braces)
			continue
		}
		c.entries = append(c.entries, r.span)
		switch {
		case r.prefix == policy.Everything[0] && m.isAny(r.key):
			first, firstLive = r, live
		case live == nil:
			c.gone[r.key] = true
		case r.on(d) != *live:
			m.rule(spell, r.span, live, d, t.braces)
		}
	}
	m.changeHosts(&c, s, t, live, d)
	m.apply(c)
}

// isAny reports whether the key of a rule is any, perhaps in quotes.
func (m *merger) isAny(key uint32) bool {
	return bytes.HasPrefix(bytes.TrimLeft(m.text[key:], `"'`), []byte(policy.Any))
}

// families changes the entry of a key any, which has a rule for each family. It is split if the
// two rules differ.
func (m *merger) families(c *change, spell *speller, said [2]*rule, live [2]*policy.Rule, d Device, inside bool) {
	was := [2]policy.Rule{said[0].on(d), said[1].on(d)}
	alike := func(a, b policy.Rule) bool { return withoutNetwork(a) == withoutNetwork(b) }
	switch {
	case live[0] == nil || live[1] == nil || !alike(*live[0], *live[1]) || !alike(was[0], was[1]):
		if live[0] != nil && live[1] != nil && *live[0] == was[0] && *live[1] == was[1] {
			return
		}
		c.gone[said[0].key] = true
		for _, r := range live {
			if r != nil {
				c.last = append(c.last, freshRule(spell, r))
			}
		}
	case was[0] != *live[0]:
		m.rule(spell, said[0].span, live[0], d, inside)
	}
}

func (m *merger) rule(s *speller, at span, live *policy.Rule, d Device, inside bool) {
	from := m.lines[m.line(at.value)-1]
	if len(bytes.TrimLeft(m.text[from:at.value], " ")) > 0 {
		from = at.value // only a mapping in lines begins in its own line
	}
	value, _, err := newSource(m.text[from:at.end])
	if err != nil {
		panic(err) // Parse accepted it
	}
	r := &reader{File: File{source: value, pools: m.like.pools}, current: m.current}
	root, err := r.yaml(value.text, 0)
	if err != nil {
		panic(err)
	}
	root.shift(from)
	m.limit(s, r, &entry{node{start: at.key}, *root}, live, inside)
}

// limit changes the value of a rule, or of its shadow, part by part.
func (m *merger) limit(s *speller, r *reader, e *entry, live *policy.Rule, inside bool) {
	if e.value.kind != mapping {
		m.replace(int(e.value.start), int(e.value.end), s.value(live))
		return
	}
	var p *plan
	var kept, wanted []part
	for i := range e.value.entries {
		if one := &e.value.entries[i]; one.key.text == "plan" && m.like.plans[one.value.text].shown == live.Label.Plan {
			p, kept = m.like.plans[one.value.text], []part{{key: "plan"}}
		}
	}
	if p == nil {
		if p, _ = s.parts(live); p != nil {
			wanted = []part{{key: "plan", text: p.key}}
		}
	}
	still := r.unchanged(e.value.entries, usualAt(live.Rate, p.over(s.usual)), live, s.l2Bytes)
	kept, wanted = append(kept, still...), append(wanted, s.missing(p, still, live)...)
	c := change{place: e.value.place(), key: e.key.start, inside: inside, gone: map[uint32]bool{}}
	for i := range e.value.entries {
		one := &e.value.entries[i]
		c.entries = append(c.entries, one.span())
		name := policy.LimitKey(one.key.text)
		named := func(p part) bool { return p.key == name }
		at := slices.IndexFunc(wanted, named)
		switch {
		case slices.ContainsFunc(kept, named):
			continue
		case at < 0:
			c.gone[one.key.start] = true
			continue
		case name == "shadow" && one.value.kind == mapping && wanted[at].text != noShadow:
			shadow, _ := live.Proposed()
			m.limit(newSpeller(policy.Limit{}.Inherit(live), s.l2Bytes, nil), r, one, &shadow, e.value.braces)
		default:
			m.replace(int(one.value.start), int(one.value.end), wanted[at].value())
		}
		wanted = slices.Delete(wanted, at, at+1)
	}
	c.last = freshParts(wanted)
	m.apply(c)
}

// unchanged returns the parts of a rule, or a shadow, that the live rule has too.
func (r *reader) unchanged(entries []entry, usual policy.Limit, live *policy.Rule, l2Bytes uint8) (kept []part) {
	var ofFraming []part
	for i := range entries {
		key, value := policy.LimitKey(entries[i].key.text), &entries[i].value
		switch key {
		case "plan":
		case "overhead", "mpu":
			ofFraming = append(ofFraming, r.part(key, value)...)
		case "shadow":
			parts := r.part(key, value)
			_, ok := live.Proposed()
			if l := parts[0].shadow; !ok && l == nil || sameShadow(l, live, l2Bytes) {
				kept = append(kept, parts...)
			}
		default:
			parts := r.part(key, value)
			said := over(usual, parts)
			wrong := slices.ContainsFunc(differing(said, live, l2Bytes), func(p part) bool { return p.key == key })
			if o := policy.FindOption(key); !wrong && o.Text(live) != "" && o.Useful(live) {
				kept = append(kept, parts...)
			}
		}
	}
	if madeOf(over(usual, ofFraming), live, l2Bytes).Framing == live.Framing {
		kept = append(kept, ofFraming...)
	}
	return kept
}
