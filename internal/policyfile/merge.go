package policyfile

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"unicode/utf8"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Merge writes the file like with what is in tables: of the devices that there are,
// it says the same as they. What still holds stays as it is written, and so do
// comments; rules that changed have new values, those that are gone are taken out,
// new ones stand behind the others of their direction. A device for which a pattern
// no longer holds gets a section of its own; what the file says of devices that are
// not there stays. Tables are of some of the devices, with valid rules as
// policy.Limit.Rule makes them.
func Merge(w io.Writer, like *File, devices []Device, tables []policy.Table) error {
	if err := like.hides(); err != nil {
		return err
	}
	live, err := byDevice(tables)
	if err != nil {
		return err
	}
	absent := maps.Clone(live)
	for _, d := range devices {
		delete(absent, d.Name)
	}
	for name := range absent {
		return fmt.Errorf("write a policy: device %s has rules, but is not there", name)
	}
	for _, of := range live {
		for i := range of {
			of[i].Rules = slices.Clone(of[i].Rules)
			policy.SortRules(of[i].Rules)
		}
	}
	m := merger{editor: editor{source: like.source, newline: "\n", indent: 2}, like: like, live: live}
	if end := like.lineEnd(1); bytes.HasPrefix(like.text[end:], []byte("\r")) {
		m.newline = "\r\n"
	}
	if len(like.devices) > 0 && !like.braces {
		m.indent = m.column(like.place.start)
	}
	if err := m.devices(devices); err != nil {
		return err
	}
	if err := m.writeTo(w); err != nil {
		return fmt.Errorf("write a policy: %w", err)
	}
	return nil
}

// hides reports what the file has that is not printed as it is there, so that what is
// printed would not say the same. In lines of comments alone that does not matter.
func (f *File) hides() error {
	for line := range f.lines {
		text := f.lineText(line + 1)
		if bytes.HasPrefix(bytes.TrimLeft(text, " \t"), []byte("#")) {
			continue
		}
		for i, c := range string(text) {
			if one := string(c); c != '\t' && plain.Line(one) != one {
				return Error{f.name, line + 1, 1 + utf8.RuneCount(text[:i]), fmt.Sprintf(
					"character %U is not shown as it is; write it as \"\\U%08x\" in double quotes, or a comment in a line of its own", c, c)}
			}
		}
	}
	return nil
}

type merger struct {
	editor
	like *File
	live map[string][]policy.Table // by device, in the order of policy.SortTables
}

// devices changes the sections of all devices that there are.
func (m *merger) devices(devices []Device) error {
	c := change{place: m.like.place, key: m.like.key, inside: m.like.inside, gone: map[uint32]bool{}}
	for i := range m.like.devices {
		c.entries = append(c.entries, m.like.devices[i].span)
	}
	sorted := slices.SortedFunc(slices.Values(devices), func(a, b Device) int { return cmp.Compare(a.Name, b.Name) })
	for _, d := range sorted {
		if s := m.like.exactly[d.Name]; s != nil {
			if m.section(s, d) {
				c.gone[s.span.key] = true
			}
			continue
		}
		live := m.live[d.Name]
		if said, err := m.like.For(d); err == nil && slices.EqualFunc(said, live, sameTable) {
			continue
		}
		key, err := deviceKey(d.Name)
		if err != nil {
			return err
		}
		own := fresh{key: key, value: "{}"}
		for _, t := range live {
			own.inner = append(own.inner, freshTable(m.like.usual, t, d))
		}
		c.last = append(c.last, own)
	}
	m.apply(c)
	return nil
}

func sameTable(a, b policy.Table) bool {
	return a.Direction == b.Direction && a.Match == b.Match && slices.Equal(a.Rules, b.Rules)
}

func freshTable(usual policy.Limit, t policy.Table, d Device) fresh {
	f := fresh{key: t.Direction.String()}
	if t.Match != t.Direction.FarSide() {
		f.inner = append(f.inner, fresh{key: "match", value: t.Match.String()})
	}
	spell := speller(usual, d.L2Bytes)
	for i := range t.Rules {
		f.inner = append(f.inner, freshRule(spell, &t.Rules[i]))
	}
	return f
}

func freshRule(spell func(*policy.Rule) string, r *policy.Rule) fresh {
	return fresh{key: networkKey(r.Prefix), value: spell(r)}
}

func freshParts(parts []part) (entries []fresh) {
	for _, p := range parts {
		entries = append(entries, fresh{key: p.key, value: p.text})
	}
	return entries
}

// section changes that of a device, or says that it is to go.
func (m *merger) section(s *section, d Device) (gone bool) {
	live := m.live[d.Name]
	if len(live) == 0 && !m.like.pattern(d.Name) {
		return slices.ContainsFunc(s.tables, func(t table) bool { return len(t.rules) > 0 })
	}
	c := change{place: s.place, key: s.span.key, inside: m.like.braces, entries: slices.Clone(s.spans), gone: map[uint32]bool{}}
	egressFirst := func(a table, b policy.Table) int { return cmp.Compare(b.Direction, a.direction) }
	for t, l := range policy.Pairs(s.tables, live, egressFirst) {
		if t == nil {
			c.last = append(c.last, freshTable(s.usual, *l, d))
			continue
		}
		c.entries = append(c.entries, t.span)
		if l != nil {
			m.table(t, *l, d, s.braces)
		} else if len(t.rules) > 0 {
			c.gone[t.span.key] = true
		}
	}
	m.apply(c)
	return false
}

// pattern says whether some pattern matches a device.
func (f *File) pattern(device string) bool {
	return slices.ContainsFunc(f.devices, func(s section) bool { return s.pattern && Matches(s.key, device) })
}

// table changes a direction to what is live.
func (m *merger) table(t *table, live policy.Table, d Device, inside bool) {
	c := change{place: t.place, key: t.span.key, inside: inside, entries: slices.Clone(t.spans), gone: map[uint32]bool{}}
	if live.Match != t.match {
		if t.side != (span{}) {
			m.replace(int(t.side.value), int(t.side.end), live.Match.String())
		} else {
			c.first = []fresh{{key: "match", value: live.Match.String()}}
		}
	}
	spell := speller(t.usual, d.L2Bytes)
	inOrder := func(a rule, b policy.Rule) int { return policy.ComparePrefix(a.prefix, b.Prefix) }
	for r, live := range policy.Pairs(t.rules, live.Rules, inOrder) {
		if r == nil {
			c.last = append(c.last, freshRule(spell, live))
			continue
		}
		c.entries = append(c.entries, r.span)
		if live == nil {
			c.gone[r.key] = true
		} else if r.on(d) != *live {
			m.rule(t, r.span, live, d)
		}
	}
	m.apply(c)
}

func (m *merger) rule(t *table, at span, live *policy.Rule, d Device) {
	from := m.lines[m.line(at.value)-1]
	if len(bytes.TrimLeft(m.text[from:at.value], " ")) > 0 {
		from = at.value // which has its own line only if it goes over several
	}
	value, _, err := newSource(m.text[from:at.end])
	if err != nil {
		panic(err) // Parse read it
	}
	r := &reader{File: File{source: value}}
	root, err := r.yaml(value.text, 0)
	if err != nil {
		panic(err)
	}
	root.shift(from)
	m.limit(r, &entry{node{start: at.key}, *root}, t.usual, live, d, t.braces)
}

// limit changes the limit that is the value of a rule, or of its shadow, part by part.
func (m *merger) limit(r *reader, e *entry, usual policy.Limit, live *policy.Rule, d Device, inside bool) {
	if e.value.kind != mapping {
		m.replace(int(e.value.start), int(e.value.end), spell(usual, live, d.L2Bytes))
		return
	}
	usual = usualAt(live.Rate, usual)
	kept := r.stillSo(e.value.entries, usual, live, d)
	wanted := needed(over(usual, kept), live, d.L2Bytes)
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
			s, _ := proposed(live)
			m.limit(r, one, policy.Limit{}, &s, d, e.value.braces)
		default:
			m.replace(int(one.value.start), int(one.value.end), wanted[at].text)
		}
		wanted = slices.Delete(wanted, at, at+1)
	}
	c.last = freshParts(wanted)
	m.apply(c)
}

// stillSo is the parts of a rule, or a shadow, that hold for what is live.
func (r *reader) stillSo(entries []entry, usual policy.Limit, live *policy.Rule, d Device) (kept []part) {
	var ofFraming []part
	for i := range entries {
		key, value := policy.LimitKey(entries[i].key.text), &entries[i].value
		switch key {
		case "plan":
		case "overhead", "mpu":
			ofFraming = append(ofFraming, r.part(key, value)...)
		case "shadow":
			parts := r.part(key, value)
			s, ok := proposed(live)
			if l := parts[0].shadow; !ok && l == nil || ok && sameShadow(l, &s, d.L2Bytes) {
				kept = append(kept, parts...)
			}
		default:
			parts := r.part(key, value)
			said := over(usual, parts)
			wrong := slices.ContainsFunc(differing(said, live, d.L2Bytes), func(p part) bool { return p.key == key })
			if o := policy.FindOption(key); !wrong && o.Text(live) != "" && o.Useful(live) {
				kept = append(kept, parts...)
			}
		}
	}
	if madeOf(over(usual, ofFraming), live, d.L2Bytes).Framing == live.Framing {
		kept = append(kept, ofFraming...)
	}
	return kept
}
