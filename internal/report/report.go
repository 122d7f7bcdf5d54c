// Package report turns rules and what became of their packets into what people
// and programs read: tables and JSON. It writes to an io.Writer and knows
// nothing of kernels; only it knows columns and the names in the JSON.
package report

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Rule is a rule or pool, with what a command knows of it beside its figures. Its JSON has these, too.
type Rule struct {
	*live.Item `json:"-"`
	Sentence   string        `json:"sentence"`
	Buckets    []live.Bucket `json:"buckets"` // null unless they were asked for
	Decides    *bool         `json:"decides"` // whether the rule decides about the address that was searched for; null for other searches
	// Confirm is the command that confirms the change that it came with, and MadeBy says who made that; "" if that is not known.
	Confirm string `json:"-"`
	MadeBy  string `json:"-"`

	depth int       // the number of pools above it, in a tree
	now   *live.Row // of a view; nil elsewhere
}

// MarshalJSON has the figures first.
func (r Rule) MarshalJSON() ([]byte, error) {
	figures, err := r.AppendJSON(nil)
	type others Rule
	return oneObject(figures, others(r), err)
}

// oneObject is an object with other keys added.
func oneObject(object []byte, more any, err error) ([]byte, error) {
	var text bytes.Buffer
	if err := cmp.Or(err, encoder(&text, "", "").Encode(more)); err != nil {
		return nil, err
	}
	object = append(bytes.TrimSuffix(object, []byte("}")), ',')
	return append(object, bytes.TrimSpace(text.Bytes())[1:]...), nil
}

// NewRule is all that is known of a rule or pool, but for its sentence and its buckets.
func NewRule(it *live.Item) Rule { return Rule{Item: it} }

// Describe is all that is known of a rule or pool that is read alone.
func Describe(h *loader.Hook, e maps.Entry) Rule {
	it := live.ReadLimit(h, e)
	return Rule{Item: &it, Sentence: it.Sentence()}
}

// NewRules are items in their order.
func NewRules(items []*live.Item) Rules {
	rules := make(Rules, len(items)) // in JSON a list, also of none
	for i, it := range items {
		rules[i] = NewRule(it)
	}
	return rules
}

func bits(v live.Value) *uint64 {
	if !v.Known {
		return nil
	}
	return new(uint64(v.N))
}

func percentOrNull(v live.Value) *float64 {
	if !v.Known {
		return nil
	}
	return &v.N
}

// Kinds of what is limited.
const (
	KindRule = "rule"
	KindPool = "pool"
)

// percentOr writes a share; "" where it is not known.
func percentOr(v live.Value) string {
	if !v.Known {
		return ""
	}
	return percentText(v.N)
}

// JSON writes a value as one indented document; a list, which may be long, one element after another.
func JSON(w io.Writer, v any) error {
	const indent = "  "
	list := reflect.ValueOf(v)
	if list.Kind() != reflect.Slice || list.Len() == 0 {
		return encoder(w, "", indent).Encode(v)
	}
	var text bytes.Buffer
	one := encoder(&text, indent, indent)
	for i := range list.Len() {
		text.WriteString([]string{"[\n", ",\n"}[min(i, 1)] + indent)
		if err := one.Encode(list.Index(i).Interface()); err != nil {
			return err
		}
		text.Truncate(text.Len() - len("\n"))
		if _, err := text.WriteTo(w); err != nil {
			return err
		}
	}
	_, err := io.WriteString(w, "\n]\n")
	return err
}

func encoder(w io.Writer, prefix, indent string) *json.Encoder {
	e := json.NewEncoder(w)
	e.SetIndent(prefix, indent)
	e.SetEscapeHTML(false)
	return e
}

// Rules are rules to be shown.
type Rules []Rule

// Sentences writes a line for each rule, and what is unusual about it. Lines are folded to a width; 0 is no limit.
func (rules Rules) Sentences(w io.Writer, width int) error {
	text := bufio.NewWriter(w)
	for _, r := range rules {
		text.WriteString(plain.Fold(plain.Line(r.Sentence+remark(r.Place.InForce, r.Place.Status)+r.marks()), cmp.Or(width, math.MaxInt), "", "    "))
	}
	rules.pending(text, func(ns uint64, _ string) string { return notConfirmed(ns) })
	return text.Flush()
}

// pending writes until when a change waits to be confirmed, if one does.
func (rules Rules) pending(w io.Writer, says func(ns uint64, madeBy string) string) {
	if i := slices.IndexFunc(rules, func(r Rule) bool { return r.RevertsInNS != nil }); i >= 0 {
		fmt.Fprintf(w, "%s by %s\n", says(*rules[i].RevertsInNS, rules[i].MadeBy), rules[i].Confirm)
	}
}

// mostDeleted is how many deleted rules and pools have a line each.
const mostDeleted = 10

// Deleted writes which rules and pools are no more, in the order of SortByDevice: a line for each, or how many of each device.
func (rules Rules) Deleted(w io.Writer) error {
	text := bufio.NewWriter(w)
	if len(rules) > mostDeleted {
		pools, others := rules.Split()
		if len(others) > 0 {
			var devices []string
			for _, r := range others {
				devices = append(devices, plain.Line(r.Device))
			}
			devices = slices.Compact(devices)
			fmt.Fprintf(text, "deleted: %s on %s: %s\n", plain.Count(len(others), "rule"), plain.Count(len(devices), "device"), plain.List(devices))
		}
		if len(pools) > 0 {
			fmt.Fprintf(text, "deleted: %s: %s\n", plain.Count(len(pools), "pool"), plain.Line(plain.List(pools.Names())))
		}
	} else {
		for _, r := range rules {
			fmt.Fprintln(text, plain.Line("deleted: "+r.Sentence))
		}
	}
	rules.pending(text, func(ns uint64, _ string) string { return notConfirmed(ns) })
	return text.Flush()
}

// Detail writes the sentence of one rule, and below it the columns of a wide table that it does not say.
func (r *Rule) Detail(w io.Writer) error {
	var text strings.Builder
	text.WriteString(plain.Fold(plain.Line(r.Sentence), screenWidth, "", "    "))
	fact(&text, "state", cmp.Or(r.Unusual(), strings.TrimSuffix("in force, by "+string(r.Place.Mode), ", by ")))
	if r.Label.Waits != 0 {
		fact(&text, "guarantee", r.waits())
	}
	columns := figures([]column[Rule]{cell("HOST", false, func(r *Rule) string { return r.Label.Host.String() }), cell("LEASE", false, (*Rule).lease), full})
	if r.Scope() == "" && r.Also.Quota.Bytes != 0 {
		fact(&text, "quota", NewQuotaUse(r.Also, r.Used).text())
	}
	said := []string{"quota_left_bytes", "algorithm", "capacity_bytes", "queue_bytes", "pbs_bytes", "ebs_bytes", "within", "guarantee_bits_per_second", "share", "passed_bytes", "dropped_percent"}
	for _, c := range columns {
		says, what := c.cell(r), strings.ToLower(c.head)
		if slices.Contains(said, c.key) || says == "" || (says == "0" || says == "0%") && c.key != "passed_packets" || c.key == "excess_packets" && r.ExcessPackets == r.Offered().DroppedPackets {
			continue
		}
		if of, packets := strings.CutSuffix(c.key, "_packets"); packets {
			what = of
			if says += " packets"; says == "1 packets" {
				says = "1 packet"
			}
			if bytes := live.Figured(of + "_bytes"); bytes != nil && says != "0 packets" {
				says = figureText(bytes, r.Item) + " in " + says
			}
			if of == "dropped" {
				says += ", " + r.figure("dropped_percent")
			}
		}
		fact(&text, what, says)
	}
	if r.RevertsInNS != nil {
		fact(&text, "pending", lastReverts(*r.RevertsInNS, r.MadeBy))
	}
	_, err := io.WriteString(w, text.String())
	return err
}

// figure is the text of a figure.
func (r *Rule) figure(key string) string { return figureText(live.Figured(key), r.Item) }

// waits is what is to be guaranteed once there is room.
func (r *Rule) waits() string { return fmt.Sprint(r.Label.Waits, " waits for room in the pool") }

// NotInForce reports whether a rule is not in force, by its key attached.
func NotInForce(attached *bool) bool { return attached != nil && !*attached }

// remark says what is unusual about the state of a rule, after its sentence.
func remark(inForce bool, status string) string { return bracketed("", unusual(inForce, status)) }

// marks are what else a sentence does not say.
func (r *Rule) marks() (text string) {
	if r.Label.Waits != 0 {
		text = bracketed("guarantee: ", r.waits())
	}
	return bracketed("lease: ", r.lease()) + text
}

func bracketed(label, text string) string {
	if text == "" {
		return ""
	}
	return " [" + label + text + "]"
}

// Unusual is what is unusual about the state of the rule; "" for nothing.
func (r *Rule) Unusual() string { return unusual(r.Place.InForce, r.Place.Status) }

func unusual(inForce bool, status string) string {
	switch {
	case !inForce:
		return "NOT IN FORCE: " + status
	case status != string(loader.Attached):
		return status
	}
	return ""
}

func rateText(bits *uint64) string {
	if bits == nil {
		return "unlimited"
	}
	return policy.Rate(*bits).String()
}

// filled says how full a bucket or queue is.
func filled(level, of uint64) string {
	return fmt.Sprintf("%d of %d bytes (%s full)", level, of, percentText(percentOf(level, of)))
}
