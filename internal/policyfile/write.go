package policyfile

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"

	"github.com/shapectl/shapectl/pkg/policy"
)

// Write writes a policy file of which Parse and File.Tables make these tables
// again, with rules in their order. A comment, if there is such a function and it
// has one, ends the line of its rule. A device and direction has one table only.
func Write(w io.Writer, tables []policy.Table, comment func(device string, d policy.Direction, p netip.Prefix) string) error {
	tables = slices.DeleteFunc(slices.Clone(tables), func(t policy.Table) bool { return len(t.Rules) == 0 })
	policy.SortTables(tables)
	out := bufio.NewWriter(w)
	if len(tables) == 0 {
		fmt.Fprintln(out, "devices: {}")
	} else {
		fmt.Fprintln(out, "devices:")
	}
	none := newLimits(nil)
	for i, t := range tables {
		if i == 0 || t.Device != tables[i-1].Device {
			key, err := deviceKey(t.Device)
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "  %s:\n", key)
		} else if t.Direction == tables[i-1].Direction {
			return fmt.Errorf("write a policy: %s %v has two tables", t.Device, t.Direction)
		}
		fmt.Fprintf(out, "    %v:\n", t.Direction)
		if t.Match != t.Direction.FarSide() {
			fmt.Fprintf(out, "      match: %v\n", t.Match)
		}
		for _, r := range t.Rules {
			fmt.Fprintf(out, "      %s: %s", networkKey(r.Prefix), spell(none, r))
			if comment != nil {
				if text := harmless(comment(t.Device, t.Direction, r.Prefix)); text != "" {
					fmt.Fprintf(out, "  # %s", text)
				}
			}
			out.WriteByte('\n')
		}
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("write a policy: %w", err)
	}
	return nil
}

// deviceKey is the key of a section of just this device.
func deviceKey(device string) (string, error) {
	if !utf8.ValidString(device) {
		return "", fmt.Errorf("write a policy: the name of device %q is not UTF-8, which a file has to be; rename it", device)
	}
	key, err := yaml.Dump(escape(device))
	if err != nil {
		return "", fmt.Errorf("write a policy: device %q: %w", device, err)
	}
	return strings.TrimSuffix(string(key), "\n"), nil
}

// networkKey is an address where it is one, unless YAML would see more colons in it.
func networkKey(p netip.Prefix) string {
	if s := p.Addr().String(); p.IsSingleIP() && !strings.HasSuffix(s, ":") {
		return s
	}
	return p.String()
}

// harmless is a text that fits behind # in a line.
func harmless(comment string) string {
	comment = strings.Map(func(c rune) rune {
		if unicode.IsGraphic(c) && c != '\uFEFF' {
			return c
		}
		return ' '
	}, strings.ToValidUTF8(comment, " "))
	return strings.Join(strings.Fields(comment), " ")
}

// spell is a value that makes r of a direction's defaults, as short as it can be.
func spell(of *limits, r policy.Rule) string {
	parts := needed(of, r)
	if len(parts) == 1 && parts[0].key == "rate" {
		return parts[0].text
	}
	return braces(parts)
}

func braces(parts []part) string {
	var s strings.Builder
	for i, p := range parts {
		if i > 0 {
			s.WriteString(", ")
		}
		s.WriteString(p.key + ": " + p.text)
	}
	return "{" + s.String() + "}"
}

// needed is the parts that make r of a direction's defaults.
func needed(of *limits, r policy.Rule) []part {
	usual := of.usual
	if r.Rate == policy.Unlimited {
		usual = of.hole
	}
	parts := differing(usual, r)
	switch proposed, ok := r.Proposed(); {
	case ok && !sameShadow(usual.Shadow, r):
		parts = append(parts, part{key: "shadow", text: braces(differing(policy.Limit{}, proposed))})
	case !ok && usual.Shadow != nil:
		parts = append(parts, part{key: "shadow", text: noShadow})
	}
	return parts
}

// sameShadow says whether a shadow that a limit may have makes that of r, on a
// device of any kind.
func sameShadow(shadow *policy.Limit, r policy.Rule) bool {
	if shadow == nil {
		return false
	}
	for _, l2Bytes := range []uint8{0, 14} {
		limit := policy.Limit{Rate: policy.Unlimited, Algorithm: r.Algorithm, Shadow: shadow}
		if made, err := limit.Rule(r.Prefix, l2Bytes); err != nil || made.Shadow != r.Shadow {
			return false
		}
	}
	return true
}

// differing is the parts but the shadow that make r of a limit, on a device of any kind.
func differing(l policy.Limit, r policy.Rule) (parts []part) {
	add := func(key, text string) { parts = append(parts, part{key: key, text: text}) }
	if l.Rate != r.Rate {
		add("rate", r.Rate.String())
	}
	if r.Rate != policy.Unlimited && capacity(l, r.Rate) != r.Capacity {
		add("capacity", inBytes(r.Capacity))
	}
	if l.Algorithm != r.Algorithm {
		add("algorithm", r.Algorithm.String())
	}
	if l.Each.Canonical(r.Prefix) != r.Each {
		add("each", r.Each.String())
	}
	if l.Excess != r.Excess {
		add("excess", r.Excess.String())
	}
	if l.Penalty != r.Penalty {
		add("penalty", r.Penalty.String())
	}
	if l.Fail != r.Fail {
		add("fail", r.Fail.String())
	}
	if !sameFraming(l, r.Framing) {
		if l.Overhead != "" || r.Framing.Overhead != 0 {
			add("overhead", policy.Framing{Overhead: r.Framing.Overhead}.String())
		}
		if l.MPU != 0 || r.Framing.MPU != 0 {
			add("mpu", policy.MPU(r.Framing.MPU).String())
		}
	}
	return parts
}

// capacity is what a limit holds at a rate, in bytes; 0 if it can not.
func capacity(l policy.Limit, r policy.Rate) uint64 {
	if l.Capacity == (policy.Capacity{}) {
		return policy.DefaultCapacity(r)
	}
	bytes, err := l.Capacity.Resolve(r)
	if err != nil {
		return 0
	}
	return bytes
}

func inBytes(capacity uint64) string {
	var c policy.Capacity
	if err := c.Set(fmt.Sprint(capacity)); err != nil {
		return fmt.Sprint(capacity) // more than a rule takes
	}
	return c.String()
}

func sameFraming(l policy.Limit, f policy.Framing) bool {
	for _, l2Bytes := range []uint8{0, 14} {
		made := policy.Framing{}
		if l.Overhead != "" {
			var err error
			if made, err = policy.ParseFraming(l.Overhead, l2Bytes); err != nil {
				return false
			}
		}
		if l.MPU != 0 {
			made.MPU = uint16(l.MPU)
		}
		if made != f {
			return false
		}
	}
	return true
}
