package report

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/shapectl/shapectl/internal/importer"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/policy"
)

// An Imported is the policy that another tool's limits make, and what it lacks of them.
type Imported struct {
	Policy string         `json:"policy"` // the file
	Pools  []ImportedPool `json:"pools"`  // of the policy, above their members
	Rules  []ImportedRule `json:"rules"`
	Left   []Left         `json:"not_carried_over"`
	Notes  []string       `json:"notes"`
}

// An ImportedPool is a pool of the policy.
type ImportedPool struct {
	Name          string  `json:"name"`
	Within        string  `json:"within"` // empty for none
	RateBits      uint64  `json:"rate_bits_per_second"`
	GuaranteeBits *uint64 `json:"guarantee_bits_per_second"` // null for none
	CapacityBytes uint64  `json:"capacity_bytes"`
	Weight        uint16  `json:"weight"` // 1 or more
	Share         string  `json:"share"`  // who gets a fair share
	Sentence      string  `json:"sentence"`
}

// An ImportedRule is a rule of the policy.
type ImportedRule struct {
	Device    string `json:"device"`
	Direction string `json:"direction"`
	CIDR      string `json:"cidr"`
	Match     string `json:"match"`
	Each      string `json:"each"`
	Excess    string `json:"excess"`
	// Rate and capacity are null for an unlimited rule.
	RateBits      *uint64 `json:"rate_bits_per_second"`
	CapacityBytes *uint64 `json:"capacity_bytes"`
	Unlimited     bool    `json:"unlimited"`
	Within        string  `json:"within"`                    // its pool; empty for none
	GuaranteeBits *uint64 `json:"guarantee_bits_per_second"` // null for none
	Weight        uint16  `json:"weight"`                    // 1 or more
	OverheadBytes int16   `json:"overhead_bytes"`
	MPUBytes      uint16  `json:"mpu_bytes"`
	Name          string  `json:"name"`
	Note          string  `json:"note"`
	Plan          string  `json:"plan"`
	Sentence      string  `json:"sentence"`
}

// A Left is something that was not carried over, or not as it was.
type Left struct {
	Kind   string `json:"kind"`
	Where  string `json:"where"`
	What   string `json:"what"`
	Why    string `json:"why"`
	Advice string `json:"advice"`
}

// ImportedPolicy is the policy of an import, under what it lacks; command is what it was made by.
func ImportedPolicy(command string, i importer.Imported) (string, error) {
	var text bytes.Buffer
	comment(&text, "", "Made by '"+command+"': "+summary(i))
	for _, line := range i.Lines() {
		comment(&text, "- ", line)
	}
	for _, note := range i.Notes {
		comment(&text, "- ", "Note: "+note)
	}
	text.WriteByte('\n')
	err := policyfile.Write(&text, i.Tables)
	return text.String(), err
}

// NewImported is all that is known of an import, with its policy.
func NewImported(policy string, i importer.Imported) Imported {
	r := Imported{Policy: policy, Pools: []ImportedPool{}, Rules: []ImportedRule{}, Left: []Left{}, Notes: append([]string{}, i.Notes...)}
	for _, t := range i.Tables {
		for _, rule := range t.Rules {
			if rule.Pool {
				r.Pools = append(r.Pools, importedPool(rule))
				continue
			}
			r.Rules = append(r.Rules, importedRule(t, rule))
		}
	}
	for _, l := range i.Left {
		r.Left = append(r.Left, Left{l.Kind, l.Where, l.What, l.Why, l.Advice})
	}
	return r
}

// ImportedLines says how much there is of all, what is left, in a line for each kind, and what is otherwise.
func ImportedLines(w io.Writer, i importer.Imported) error {
	text := bufio.NewWriter(w)
	fmt.Fprintln(text, summary(i))
	for _, line := range i.Lines() {
		fmt.Fprintln(text, plain.Line(line))
	}
	for _, note := range i.Notes {
		fmt.Fprintln(text, plain.Line("note: "+note))
	}
	return text.Flush()
}

func importedPool(p policy.Rule) ImportedPool {
	return ImportedPool{
		Name: p.Label.Name, Within: p.Within.String(), RateBits: uint64(p.Rate), GuaranteeBits: guarantee(p), CapacityBytes: p.Capacity,
		Weight: p.Weight.Value(), Share: p.Share.String(), Sentence: p.Says(0),
	}
}

func guarantee(r policy.Rule) *uint64 {
	if r.Guarantee == 0 {
		return nil
	}
	bits := uint64(r.Guarantee)
	return &bits
}

func importedRule(t policy.Table, r policy.Rule) ImportedRule {
	rate, capacity := limit(r)
	return ImportedRule{
		Device: t.Device, Direction: t.Direction.String(), CIDR: r.Prefix.String(), Match: t.Match.String(),
		Each: r.Each.String(), Excess: r.Excess.String(), RateBits: rate, CapacityBytes: capacity, Unlimited: rate == nil,
		Within: r.Within.String(), GuaranteeBits: guarantee(r), Weight: r.Weight.Value(),
		OverheadBytes: r.Framing.Overhead, MPUBytes: r.Framing.MPU,
		Name: r.Label.Name, Note: r.Label.Note, Plan: r.Label.Plan, Sentence: r.Sentence(t.Device, t.Direction, t.Match),
	}
}

func summary(i importer.Imported) string {
	pools, rules := i.Count()
	text := plain.Count(rules, "rule")
	if rules == 0 {
		text = "no rules"
	}
	if pools > 0 {
		text = plain.Count(pools, "pool") + ", " + text
	}
	if len(i.Left) == 0 {
		return text + "; nothing was left out"
	}
	return fmt.Sprintf("%s; %s left out or changed (-j lists all, and why)", text, plain.Count(len(i.Left), "thing"))
}

// comment writes one in lines that fit a screen.
func comment(w *bytes.Buffer, bullet, text string) {
	text = strings.Join(strings.Fields(plain.Line(text)), " ")
	w.WriteString(plain.Fold(text, 100, "# "+bullet, "# "+strings.Repeat(" ", len(bullet))))
}
