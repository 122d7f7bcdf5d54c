package report

import (
	"bufio"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// Applied is what a policy changed as it came into force, or was taken back.
type Applied struct {
	Hooks  []HookChange `json:"hooks"`  // those that changed
	Absent []string     `json:"absent"` // devices that the policy names and that are not there
	// RevertsInNS is null unless the change waits to be confirmed.
	RevertsInNS *uint64 `json:"reverts_in_ns"`
	// UndoneAgoNS is how long ago the change was made that a rollback took back; null but for that.
	UndoneAgoNS *uint64 `json:"undone_ago_ns"`
	// NoTimer says that there is nothing to confirm, though it was asked to wait for that: RevertsInNS is null.
	NoTimer bool `json:"-"`
	// Confirm is the command that confirms the change.
	Confirm string `json:"-"`
}

// HookChange is what changed on a direction of a device.
type HookChange struct {
	Device     string `json:"device"`
	Direction  string `json:"direction"`
	Added      int    `json:"added_rules"`
	Changed    int    `json:"changed_rules"`
	Removed    int    `json:"removed_rules"`
	Upgraded   bool   `json:"upgraded"`   // programs of another build were replaced
	Reattached string `json:"reattached"` // what had become of the hook, where it was attached anew
}

// Text says what changed, a line for each hook.
func (a Applied) Text(w io.Writer) error {
	text := bufio.NewWriter(w)
	if a.UndoneAgoNS != nil {
		ago := time.Duration(*a.UndoneAgoNS)
		fmt.Fprintf(text, "returned to the rules from before the change of %s, %v ago:\n",
			time.Now().Add(-ago).Format(time.DateTime), ago.Round(time.Second/10))
	}
	for _, h := range a.Hooks {
		var parts []string
		for i, n := range []int{h.Added, h.Changed, h.Removed} {
			if n > 0 {
				parts = append(parts, fmt.Sprint(n, []string{" added", " changed", " removed"}[i]))
			}
		}
		if h.Reattached != "" {
			parts = append(parts, "attached again ("+h.Reattached+")")
		}
		if h.Upgraded {
			parts = append(parts, "programs of another build replaced")
		}
		fmt.Fprintf(text, "%s %s: %s\n", h.Device, h.Direction, strings.Join(parts, ", "))
	}
	if len(a.Hooks) == 0 {
		text.WriteString("nothing to change\n")
	}
	if a.NoTimer {
		text.WriteString("no rule was changed, so there is nothing to confirm, and nothing reverts\n")
	}
	if a.RevertsInNS != nil {
		fmt.Fprintf(text, "%s by %s\n", reverts(*a.RevertsInNS), a.Confirm)
	}
	return text.Flush()
}

// reverts says when a change that is not confirmed is over.
func reverts(ns uint64) string {
	left := time.Duration(ns)
	return fmt.Sprintf("not confirmed: the change reverts in %v, at %s, unless confirmed",
		left.Round(time.Second/10), time.Now().Add(left).Format(time.TimeOnly))
}

// Differences are what apply would change.
type Differences []Difference

// A Difference is a rule that would come, go, or be another.
type Difference struct {
	Device    string `json:"device"`
	Direction string `json:"direction"`
	CIDR      string `json:"cidr"`
	Change    string `json:"change"` // add, remove or change
	// Have and Want are the rule as it is and as it is to be; null where there is none.
	Have *string `json:"have"`
	Want *string `json:"want"`
}

// NewDifferences tells of differences.
func NewDifferences(differences []policy.Difference) Differences {
	out := Differences{}
	for _, d := range differences {
		r := Difference{Device: d.Device, Direction: d.Direction.String(), Change: "change"}
		say := func(rule *policy.Rule, match policy.Match) *string {
			if rule == nil {
				return nil
			}
			r.CIDR = rule.Prefix.String()
			sentence := rule.Sentence(d.Device, d.Direction, match)
			return &sentence
		}
		r.Have, r.Want = say(d.Have, d.HaveMatch), say(d.Want, d.WantMatch)
		switch {
		case d.Have == nil:
			r.Change = "add"
		case d.Want == nil:
			r.Change = "remove"
		}
		out = append(out, r)
	}
	return out
}

// Text writes a line for each rule that would go, and for each that would come.
func (d Differences) Text(w io.Writer) error {
	text := bufio.NewWriter(w)
	for _, r := range d {
		if r.Have != nil {
			fmt.Fprintln(text, "- "+*r.Have)
		}
		if r.Want != nil {
			fmt.Fprintln(text, "+ "+*r.Want)
		}
	}
	return text.Flush()
}
