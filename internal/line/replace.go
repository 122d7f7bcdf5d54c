package line

import (
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Split is the tables of a namespace, divided into those of the line of a device and all others. Both are sorted.
type Split struct {
	Line, Others []policy.Table

	netns, device string
}

// Divide finds what a line has made: its pools, and the rules for all addresses of the device within them. The device may have had another name then. netns is that of the tables, for commands that errors suggest.
func Divide(netns, device string, tables []policy.Table) Split {
	s := Split{netns: netns, device: device}
	pools := map[policy.Within]policy.Label{} // of lines
	for _, t := range tables {
		for _, r := range t.Rules {
			if r.Label.Line != "" {
				pools[policy.Within(r.Label.Name)] = r.Label
			}
		}
	}
	forAll := func(r policy.Rule) bool { return slices.Contains(policy.Everything[:], r.Prefix) }
	for _, t := range tables {
		for _, r := range t.Rules {
			if pool := pools[r.Within]; t.Device == s.device && pool.Line != "" && forAll(r) {
				device = string(pool.Line)
			}
		}
	}
	isOwn := func(r policy.Rule) bool {
		if r.Pool {
			return string(r.Label.Line) == device
		}
		return string(pools[r.Within].Line) == device && forAll(r)
	}
	for _, t := range tables {
		own, others := t, t
		own.Rules, others.Rules = nil, nil
		for _, r := range t.Rules {
			if isOwn(r) {
				own.Rules = append(own.Rules, r)
			} else {
				others.Rules = append(others.Rules, r)
			}
		}
		if len(own.Rules) > 0 {
			s.Line = append(s.Line, own)
		}
		if len(others.Rules) > 0 {
			s.Others = append(s.Others, others)
		}
	}
	return s
}

// Devices are those on which the line has rules.
func (s Split) Devices() (names []string) {
	for _, t := range s.Line {
		if !t.IsPools() && !slices.Contains(names, t.Device) {
			names = append(names, t.Device)
		}
	}
	return names
}

// Limits reports whether the line limits a direction of its device.
func (s Split) Limits(d policy.Direction) bool {
	return slices.ContainsFunc(s.Line, func(t policy.Table) bool { return t.Device == s.device && t.Direction == d })
}

// Match is the address of packets that other rules of a direction of the device match; the far side's if there are none.
func (s Split) Match(d policy.Direction) policy.Match {
	for _, t := range s.Others {
		if t.Device == s.device && t.Direction == d {
			return t.Match
		}
	}
	return d.FarSide()
}

// With returns the other tables together with those of a line, sorted. The error says why both cannot be in force; it
// is for users, who can correct that.
func (s Split) With(line []policy.Table) ([]policy.Table, error) {
	all := slices.Clone(s.Others)
	for _, t := range line {
		same := func(o policy.Table) bool { return o.Device == t.Device && o.Direction == t.Direction }
		if i := slices.IndexFunc(s.Line, same); i >= 0 && s.Line[i].Match != t.Match {
			return nil, fmt.Errorf("the line on %s is shared by %s, and now would be by %s; to change that, remove it first: %s",
				plain.Line(s.device), sharers(s.Line), sharers(line), s.suggest("line", s.device, "off"))
		}
		i := slices.IndexFunc(all, same)
		if i < 0 {
			all = append(all, t)
			continue
		}
		if err := s.checkBeside(all[i], t); err != nil {
			return nil, err
		}
		all[i].Rules = slices.Concat(all[i].Rules, t.Rules)
		policy.SortRules(all[i].Rules)
	}
	policy.SortTables(all)
	if err := policy.CheckPools(all); err != nil {
		return nil, fmt.Errorf("other limits need pools of the line that would go; delete them first, or move them with --within none: %w", err)
	}
	return all, nil
}

// sharers are who shares a line.
func sharers(line []policy.Table) string {
	for _, t := range line {
		for _, r := range t.Rules {
			switch {
			case r.NAT:
				return "hosts behind NAT"
			case r.Share.Kind == policy.ShareHost:
				return "hosts with addresses of their own"
			}
		}
	}
	return "connections"
}

// checkBeside returns an error if the rules of a line cannot be beside others.
func (s Split) checkBeside(others, line policy.Table) error {
	for have, want := range policy.Pairs(others.Rules, line.Rules, func(a, b policy.Rule) int { return policy.ComparePrefix(a.Prefix, b.Prefix) }) {
		if have == nil || want == nil {
			continue
		}
		if have.Pool {
			return fmt.Errorf("there is a pool %q that this line did not make; delete it, or give it another name: %s",
				have.Label.Name, s.suggest("delete", have.Label.Name))
		}
		return fmt.Errorf("%s %v has a rule for %v that this line did not make; delete it first: %s", plain.Line(others.Device), others.Direction, have.Prefix,
			s.suggest("delete", others.Device, others.Direction.String(), have.Prefix.String()))
	}
	if !line.IsPools() && others.Match != line.Match {
		instead := ""
		if others.Device == s.device {
			instead = ", or give --fair flow"
		}
		return fmt.Errorf("the rules of %s %v, such as that for %v, match the %v address of packets, and those of the line must match the other one; delete them first%s",
			plain.Line(others.Device), others.Direction, others.Rules[0].Prefix, others.Match, instead)
	}
	return nil
}

func (s Split) suggest(verb string, args ...string) string {
	return plain.Suggest(s.netns, verb, args...)
}
