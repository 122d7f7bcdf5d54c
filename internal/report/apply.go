package report

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Applied is what an apply, a confirm or a rollback changed, or left changed.
type Applied struct {
	Hooks  []HookChange `json:"hooks"` // those that changed
	Pools  PoolChange   `json:"pools"`
	Absent []string     `json:"absent"` // devices that the policy names and that do not exist
	// Unmatched are patterns of the policy that no device matches.
	Unmatched []string `json:"unmatched"`
	// Waiting are devices of patterns whose guarantees wait for room in a pool.
	Waiting []string `json:"waiting"`
	// RevertsInNS is null unless the change is not confirmed.
	RevertsInNS *uint64 `json:"reverts_in_ns"`
	// UndoneAgoNS is how long ago the change was made that a rollback reverted; null for an apply.
	UndoneAgoNS *uint64 `json:"undone_ago_ns"`
	// Undone is the command that made it; "" if that is not known.
	Undone string `json:"undone_command"`
	// ConfirmedAgoNS is how long ago the change was made that a confirm has confirmed; null for others.
	ConfirmedAgoNS *uint64 `json:"confirmed_ago_ns"`
	// NoTimer says that there is nothing to confirm though --confirm was given: RevertsInNS is null.
	NoTimer bool `json:"-"`
	// Confirm is the command that confirms the change.
	Confirm string `json:"-"`
	// Verbose has Text write a line for each hook.
	Verbose bool `json:"-"`
}

// PoolChange is how many pools changed.
type PoolChange struct {
	Added   int `json:"added_pools"`
	Changed int `json:"changed_pools"`
	Removed int `json:"removed_pools"`
}

// HookChange is what changed on a direction of a device.
type HookChange struct {
	Device     string `json:"device"`
	Direction  string `json:"direction"`
	Added      int    `json:"added_rules"`
	Changed    int    `json:"changed_rules"`
	Removed    int    `json:"removed_rules"`
	Upgraded   bool   `json:"upgraded"`   // programs of another build were replaced
	Reattached string `json:"reattached"` // the state of a hook that was attached again; else ""
}

// Text writes how much changed, and a line for each hook that was not as expected.
func (a Applied) Text(w io.Writer) error {
	text := bufio.NewWriter(w)
	if a.UndoneAgoNS != nil {
		fmt.Fprintf(text, "reverted %s", changeOf(*a.UndoneAgoNS))
		if a.Undone != "" {
			fmt.Fprintf(text, ", by %s", plain.Quoted(plain.Line(a.Undone)))
		}
		fmt.Fprintln(text)
	}
	if a.ConfirmedAgoNS != nil {
		fmt.Fprintf(text, "confirmed %s, which stays\n", changeOf(*a.ConfirmedAgoNS))
	}
	var all Changes
	devices, upgraded := map[string]bool{}, false
	for _, h := range a.Hooks {
		all = Changes{all[0] + h.Added, all[1] + h.Changed, all[2] + h.Removed}
		devices[h.Device], upgraded = true, upgraded || h.Upgraded
	}
	pools := Changes{a.Pools.Added, a.Pools.Changed, a.Pools.Removed}
	writeChanges(text, all, pools, len(devices), "added", "changed", "removed")
	switch {
	case len(a.Hooks) > 0 && all == Changes{}:
		fmt.Fprintf(text, "no rule changed on %s\n", plain.Count(len(devices), "device"))
	case len(a.Hooks) == 0 && pools == Changes{}:
		text.WriteString("nothing to change\n")
	}
	if upgraded && !a.Verbose {
		text.WriteString("replaced the programs of another build\n")
	}
	for _, h := range a.Hooks {
		var parts []string
		if c := (Changes{h.Added, h.Changed, h.Removed}); a.Verbose && c != (Changes{}) {
			parts = append(parts, c.Words("rule", "added", "changed", "removed"))
		}
		if h.Reattached != "" {
			parts = append(parts, "attached again (was: "+h.Reattached+")")
		}
		if h.Upgraded && a.Verbose {
			parts = append(parts, "replaced the program of another build")
		}
		if len(parts) > 0 {
			fmt.Fprintf(text, "%s %s: %s\n", plain.Line(h.Device), h.Direction, strings.Join(parts, "; "))
		}
	}
	if a.NoTimer {
		text.WriteString("no rule was changed, so there is nothing to confirm, and nothing reverts\n")
	}
	if a.RevertsInNS != nil {
		fmt.Fprintf(text, "%s by %s\n", notConfirmed(*a.RevertsInNS), a.Confirm)
	}
	return text.Flush()
}

// changeOf names a change by its time, which was ns ago.
func changeOf(ns uint64) string {
	ago := time.Duration(ns)
	return fmt.Sprintf("the change of %s, %v ago", time.Now().Add(-ago).Format(time.DateTime), ago.Round(time.Second/10))
}

// Changes are how many rules were added, changed and removed.
type Changes [3]int

// writeChanges writes how many rules of some devices changed, and how many pools.
func writeChanges(w io.Writer, rules, pools Changes, devices int, verbs ...string) {
	if rules != (Changes{}) {
		fmt.Fprintf(w, "%s on %s\n", rules.Words("rule", verbs...), plain.Count(devices, "device"))
	}
	if pools != (Changes{}) {
		fmt.Fprintln(w, pools.Words("pool", verbs...))
	}
}

// Words is "2 rules added, 1 changed" for such a thing and verbs.
func (c Changes) Words(thing string, verbs ...string) string {
	var parts []string
	for i, n := range c {
		switch {
		case n == 0:
		case parts == nil:
			parts = append(parts, plain.Count(n, thing)+" "+verbs[i])
		default:
			parts = append(parts, fmt.Sprint(n, " ", verbs[i]))
		}
	}
	return strings.Join(parts, ", ")
}

// Reverts says when a change reverts that nobody confirms: "reverts in 1m0s, at 22:43:22".
func Reverts(ns uint64) string {
	left, to := time.Duration(ns), time.Second
	if left < 10*time.Second {
		to /= 10
	}
	return fmt.Sprintf("reverts in %v, at %s", left.Round(to), time.Now().Add(left).Format(time.TimeOnly))
}

// notConfirmed says it after the change.
func notConfirmed(ns uint64) string { return "not confirmed: " + Reverts(ns) + ", unless confirmed" }

// lastReverts says it of a change that another command made.
func lastReverts(ns uint64, madeBy string) string {
	return LastNotConfirmed(madeBy) + Reverts(ns) + ", unless confirmed"
}

// LastNotConfirmed begins a sentence, up to "it", on a change that somebody made; "" if that is not known.
func LastNotConfirmed(madeBy string) string {
	if madeBy != "" {
		madeBy += "; "
	}
	return "the last change is not confirmed: " + madeBy + "it "
}

// Differences are what apply would change.
type Differences []Difference

// A Difference is a rule or a pool that apply would add, remove or change.
type Difference struct {
	Kind      string `json:"kind"`   // rule or pool
	Pool      string `json:"pool"`   // the name of the pool; "" for a rule
	Device    string `json:"device"` // "" for a pool, as are direction and cidr
	Direction string `json:"direction"`
	CIDR      string `json:"cidr"`
	Change    string `json:"change"` // add, remove or change
	// Have and Want are the rule or pool before and after; null where there is none.
	Have *string `json:"have"`
	Want *string `json:"want"`
	// Options are those that differ; empty unless Change is change.
	Options []OptionChange `json:"options"`

	what string // the name of the pool, or CIDR as people read it
	name string // of the rule; "" for none, and for a pool
	says string // what would change of it, or what it is
}

// An OptionChange is an option of a rule that differs. Values are as in policy files; "" is none.
type OptionChange struct {
	Option string `json:"option"`
	Have   string `json:"have"`
	Want   string `json:"want"`
}

// NewDifferences describes differences.
func NewDifferences(differences []policy.Difference) Differences {
	out := Differences{}
	for _, d := range differences {
		rule := cmp.Or(d.Want, d.Have)
		r := Difference{Kind: KindRule, Device: d.Device, Direction: d.Direction.String(), CIDR: policy.CIDR(rule.Prefix), Change: "change", Options: []OptionChange{}}
		r.what, r.name = policy.NetworkText(rule.Prefix), rule.Label.Name
		if rule.Pool {
			r.Kind, r.Pool, r.what, r.Direction, r.CIDR, r.name = KindPool, r.name, plain.Line(r.name), "", "", ""
		}
		if d.Have != nil {
			r.Have = new(d.Have.Sentence(d.Device, d.Direction, d.HaveMatch))
		}
		if d.Want != nil {
			r.Want = new(d.Want.Sentence(d.Device, d.Direction, d.WantMatch))
		}
		var parts []string
		switch {
		case d.Have == nil:
			r.Change = "add"
		case d.Want == nil:
			r.Change = "remove"
		default:
			for _, c := range policy.Changes(d.Have, d.Want) {
				r.Options = append(r.Options, OptionChange(c))
				if c.Option == "rate" && d.Want.Rate == policy.Unlimited && d.Want.Within != "" {
					parts = append(parts, "rate "+c.Have+" -> that of its pool")
				} else {
					parts = append(parts, c.String())
				}
			}
		}
		if r.says = strings.Join(parts, ", "); parts == nil {
			r.says = options(rule)
		} else if r.name != "" && d.Have.Label.Name == r.name {
			r.says = strconv.Quote(r.name) + ": " + r.says
		}
		out = append(out, r)
	}
	sort.SliceStable(out, func(i, j int) bool {
		return cmp.Or(plain.Natural(out[i].Device, out[j].Device), plain.Natural(out[i].Pool, out[j].Pool)) < 0
	})
	return out
}

// options are the rate of a rule or pool, and its options that are not as usual.
func options(r *policy.Rule) string {
	usual := policy.Rule{Pool: r.Pool, Rate: r.Rate}
	parts := []string{r.Rate.String()}
	if r.Rate != policy.Unlimited {
		usual.Capacity = policy.DefaultCapacity(r.Rate)
	} else if r.Within != "" {
		parts = nil
	}
	if r.Pool {
		usual.Label.Name = r.Label.Name
	}
	for _, c := range policy.Changes(&usual, r) {
		parts = append(parts, c.Option+" "+c.Want)
	}
	return strings.Join(parts, ", ")
}

// mostWidth is how wide a column of networks is: longer ones are not aligned.
const mostWidth = len("2001:db8:1234:5678::/64")

// Text writes how much would change, then the changes of each direction of a device.
func (d Differences) Text(w io.Writer) error {
	text := bufio.NewWriter(w)
	if len(d) == 0 {
		text.WriteString("nothing to change\n")
		return text.Flush()
	}
	d.counts(text)
	where, widest := "", 0
	for _, r := range d {
		widest = max(widest, min(len(r.what), mostWidth))
	}
	for _, r := range d {
		at := plain.Line(r.Device) + " " + r.Direction
		if r.Kind == KindPool {
			at = "pools"
		}
		if at != where {
			where = at
			fmt.Fprintln(text, where)
		}
		first := fmt.Sprintf("  %s %-*s  ", map[string]string{"add": "+", "change": "~", "remove": "-"}[r.Change], widest, r.what)
		text.WriteString(plain.Fold(plain.Line(r.says), screenWidth, first, strings.Repeat(" ", len(first))))
	}
	return text.Flush()
}

// kinds of changes, in the order of changes.
var changeKinds = []string{"add", "change", "remove"}

// counts says how many rules and pools would change.
func (d Differences) counts(w io.Writer) {
	var all, pools Changes
	devices := map[string]bool{}
	for _, r := range d {
		if r.Kind == KindPool {
			pools[slices.Index(changeKinds, r.Change)]++
		} else {
			all[slices.Index(changeKinds, r.Change)]++
			devices[r.Device] = true
		}
	}
	writeChanges(w, all, pools, len(devices), "to add", "to change", "to remove")
}

// A ChangeSummary is how many rules and pools apply would add, remove, or change an option of.
type ChangeSummary struct {
	Change string `json:"change"` // add, remove or change
	Option string `json:"option"` // that changes; "" unless Change is change
	Rules  int    `json:"rules"`
	Pools  int    `json:"pools"`
	// Names are those of the pools and rules, each once; of a rule without one, its network.
	Names []string `json:"names"`
}

// Summary is the differences by kind and option, in the order of the first of each.
func (d Differences) Summary() []ChangeSummary {
	type key struct{ change, option string }
	type named struct {
		key
		name string
	}
	out, at, seen := []ChangeSummary{}, map[key]int{}, map[named]bool{}
	for _, r := range d {
		options := r.Options
		if r.Change != "change" {
			options = []OptionChange{{}}
		}
		for _, o := range options {
			k := key{r.Change, o.Option}
			i, found := at[k]
			if !found {
				i = len(out)
				at[k], out = i, append(out, ChangeSummary{Change: k.change, Option: k.option})
			}
			s := &out[i]
			if r.Kind == KindPool {
				s.Pools++
			} else {
				s.Rules++
			}
			if who := (named{k, cmp.Or(r.name, r.what)}); !seen[who] {
				seen[who], s.Names = true, append(s.Names, who.name)
			}
		}
	}
	return out
}

// SummaryText writes how much would change, and of each kind the first names.
func (d Differences) SummaryText(all []ChangeSummary) func(io.Writer) error {
	return func(w io.Writer) error {
		text := bufio.NewWriter(w)
		if len(d) == 0 {
			text.WriteString("nothing to change\n")
		}
		d.counts(text)
		for _, s := range all {
			first := fmt.Sprintf("  %-19s %6d  ", strings.TrimSpace(s.Change+" "+s.Option), s.Rules+s.Pools)
			names := plain.List(plain.Lines(s.Names))
			if len(s.Names) != s.Rules+s.Pools {
				names = fmt.Sprintf("of %d names: %s", len(s.Names), names)
			}
			text.WriteString(plain.Fold(names, screenWidth, first, strings.Repeat(" ", len(first))))
		}
		return text.Flush()
	}
}

// MadeBy says who made the change that is pending; "" if that is not known.
func MadeBy(pending *loader.PendingError) string {
	if pending == nil {
		return ""
	}
	a := pending.Author
	user, command, known := strings.Cut(a.Who, "\x00")
	if !known {
		return ""
	}
	began := time.Now().Add(-time.Duration(maps.Now() - min(a.Began, maps.Now())))
	return fmt.Sprintf("%s made it with %s at %s", plain.Line(user), plain.Quoted(plain.Line(command)), began.Format(time.TimeOnly))
}
