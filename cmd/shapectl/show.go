package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// filterRules narrows rules down.
type filterRules struct {
	device    string            // "" for any
	pattern   bool              // device is a pattern: resolve tells
	direction *policy.Direction // nil for both
	networks  networks          // nil for all
	buckets   bool              // with the buckets that owe something
	affected  bool              // with those whom shadows would have affected
}

// networks are those of one argument.
type networks []netip.Prefix

func (n networks) String() string {
	if len(n) > 1 {
		return "any"
	}
	return n[0].String()
}

func showCommand(e *env) *cobra.Command {
	var stats, buckets, shadows bool
	cmd := &cobra.Command{
		Use:   "show [DEV [ingress|egress [CIDR|any]]] [flags]",
		Short: "Show rules and what happened to their packets",
		Long: `Show rules and what happened to their packets.

any stands for 0.0.0.0/0 and ::/0. DEV may be a pattern, see 'shapectl help patterns'.`,
		Example: `  shapectl show eth0
  shapectl show 'tap*' egress --stats`,
		Args:              args(0, 3),
		ValidArgsFunction: e.completeShow,
		RunE: func(_ *cobra.Command, given []string) error {
			want, err := parseFilter("show", given)
			if err != nil {
				return err
			}
			if shadows && (stats || buckets) {
				return inputf("show: --shadow is a table of its own; leave --stats and --buckets out")
			}
			want.buckets, want.affected = buckets, shadows || e.json
			switch {
			case shadows:
				return e.show(want, report.Rules.Shadows)
			case stats:
				return e.show(want, report.Rules.Stats)
			}
			return e.show(want, report.Rules.Sentences)
		},
	}
	cmd.Flags().BoolVar(&stats, "stats", false, "count packets and bytes, as JSON always does")
	cmd.Flags().BoolVar(&shadows, "shadow", false, "show what shadow limits would have refused")
	cmd.Flags().BoolVar(&buckets, "buckets", false, "list the buckets that are not empty, and the delay of a packet")
	return cmd
}

// parseFilter reads [DEV [ingress|egress [CIDR]]] for a command.
func parseFilter(cmd string, given []string) (want filterRules, err error) {
	if len(given) > 0 {
		want.device = given[0]
	}
	if len(given) > 1 {
		d, err := policy.ParseDirection(given[1])
		if err != nil {
			return want, inputf("%s: %w", cmd, directionError(given[1], err))
		}
		want.direction = &d
	}
	if len(given) > 2 {
		if want.networks, err = policy.ParseNetworks(given[2]); err != nil {
			return want, inputf("%s: %w", cmd, argumentError{err})
		}
	}
	return want, nil
}

func (e *env) show(want filterRules, text func(report.Rules, io.Writer) error) error {
	return e.with(loader.Read, "show", func(n *loader.Namespace) error {
		if err := want.resolve(n); err != nil {
			return err
		}
		rules, unread := findRules(n, want)
		if len(rules) == 0 && unread != nil {
			return unread
		}
		if len(rules) == 0 && want.device != "" && !want.pattern {
			if _, err := device(want.device); err != nil {
				return err
			}
			if want.networks != nil {
				return e.noRule(want)
			}
		}
		err := e.print(rules, func(w io.Writer) error {
			if len(rules) == 0 {
				_, err := fmt.Fprintln(w, "no rules")
				return err
			}
			return text(rules, w)
		})
		return errors.Join(err, unread)
	})
}

func (e *env) noRule(want filterRules) error {
	return inputf("%s %s has no rule for %s; %s lists those there are",
		want.device, want.direction, want.networks, e.suggest("show", want.device))
}

// findRules are the rules that a filter lets through; never nil, as JSON would
// show that. With the error come those that could be read.
func findRules(n *loader.Namespace, want filterRules) (rules report.Rules, err error) {
	rules = report.Rules{}
	hooks, unread := want.hooks(n)
	defer loader.CloseHooks(hooks)
	for _, h := range hooks {
		affected := map[uint32][]maps.Affected{}
		if want.affected {
			if affected, err = h.Set.Affected(); err != nil {
				return rules, err
			}
		}
		entries := want.entries(h.Set)
		rules = slices.Grow(rules, len(entries))
		for _, entry := range entries {
			r := describe(h, entry, affected[entry.ID])
			if want.buckets {
				r.Buckets = []report.Bucket{}
				for b := range h.Set.Buckets(entry, maps.Now()) {
					r.Buckets = append(r.Buckets, bucketOf(h, entry, b))
				}
			}
			rules = append(rules, r)
		}
	}
	return rules, unread
}

func (want filterRules) entries(s *maps.Set) (entries []maps.Entry) {
	if want.networks == nil {
		return s.Rules()
	}
	for _, p := range want.networks {
		if entry, ok := s.Find(p); ok {
			entries = append(entries, entry)
		}
	}
	return entries
}

// resolve finds out whether the device of a filter is a pattern. A name wins over a
// pattern, and over one with escapes: that of a device which is there, or which had it and still has rules.
func (want *filterRules) resolve(n *loader.Namespace) error {
	if !strings.ContainsAny(want.device, `*?[\`) {
		return nil
	}
	if _, err := netinfo.DeviceByName(want.device); !errors.Is(err, netinfo.ErrNoDevice) {
		return err
	}
	hooks, err := filterRules{device: want.device}.hooks(n)
	defer loader.CloseHooks(hooks)
	if len(hooks) > 0 || err != nil || slices.Contains(n.Collected(), want.device) {
		return nil // the caller asks for the hooks again, and gets the error
	}
	if err := policyfile.CheckDevice(want.device); err != nil {
		return inputError(err)
	}
	if want.pattern = policyfile.IsPattern(want.device); !want.pattern {
		want.device = policyfile.Unescape(want.device)
	}
	return nil
}

// hooksToChange resolves a filter that must name devices, and finds their hooks. Errors are as those of hooks.
func (want *filterRules) hooksToChange(n *loader.Namespace) ([]*loader.Hook, error) {
	if want.device == "" {
		return nil, noDevice("") // and not all hooks
	}
	if err := want.resolve(n); err != nil {
		return nil, err
	}
	return want.hooks(n)
}

func (want filterRules) matches(device string, d policy.Direction) bool {
	return (want.direction == nil || *want.direction == d) && want.matchesDevice(device)
}

func (want filterRules) matchesDevice(name string) bool {
	return want.device == "" || name == want.device || want.pattern && policyfile.Matches(want.device, name)
}

// hooks are those that the filter lets through. With the error come those that could be read.
func (want filterRules) hooks(n *loader.Namespace) ([]*loader.Hook, error) {
	if want.device == "" {
		return n.Hooks()
	}
	if want.pattern {
		hooks, err := n.Hooks()
		hooks = slices.DeleteFunc(hooks, func(h *loader.Hook) bool {
			matches := want.matches(h.Name(), h.Direction)
			if !matches {
				h.Close()
			}
			return !matches
		})
		others, err := otherLayouts(err)
		return hooks, withOthers(err, slices.DeleteFunc(others, func(other *loader.OtherLayoutError) bool {
			return !want.matches(cmp.Or(other.Now, other.Device), other.Direction)
		}))
	}
	directions := []policy.Direction{policy.Egress, policy.Ingress}
	if want.direction != nil {
		directions = []policy.Direction{*want.direction}
	}
	var hooks []*loader.Hook
	var unread []error
	for _, d := range directions {
		h, err := n.Find(want.device, d)
		if err != nil {
			unread = append(unread, err)
		} else if h != nil {
			hooks = append(hooks, h)
		}
	}
	others, err := otherLayouts(errors.Join(unread...))
	return hooks, withOthers(err, others)
}

// withOthers is the inverse of otherLayouts: they become one error.
func withOthers(err error, others loader.OtherLayouts) error {
	if len(others) == 0 {
		return err
	}
	return errors.Join(err, others)
}

// otherLayouts separates errors about hooks of another layout from the others that err joins.
func otherLayouts(err error) (others loader.OtherLayouts, rest error) {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		var other *loader.OtherLayoutError
		if errors.As(err, &other) {
			return loader.OtherLayouts{other}, nil
		}
		return nil, err
	}
	for _, err := range joined.Unwrap() {
		of, left := otherLayouts(err)
		others, rest = append(others, of...), errors.Join(rest, left)
	}
	return others, rest
}

// describe is all that is known of a rule; affected may be nil.
func describe(h *loader.Hook, entry maps.Entry, affected []maps.Affected) report.Rule {
	level := model.Bytes(h.Set.SharedLevel(entry, maps.Now()))
	r := report.NewRule(h.Name(), h.Direction, h.Match(), entry.Rule, h.Set.Counters(entry.ID), level)
	r.Attached, r.State, r.Hook = h.State.InForce(), h.Status(), string(h.Mode)
	if change, until := h.Set.Change(); change == maps.Pending {
		r.RevertsInNS = ahead(until)
	}
	if shadow, ok := h.Set.Shadow(entry); ok {
		r.Shadow = report.NewShadow(shadow.Rule, h.Set.Counters(shadow.ID), affected, h.Set.Size().Affected)
	}
	return r
}

func bucketOf(h *loader.Hook, entry maps.Entry, b maps.Bucket) report.Bucket {
	out := report.Bucket{Sharer: b.Flow.String(), LevelBytes: b.LevelBytes}
	if b.Subnet.IsValid() {
		out.Sharer = report.SubnetName(b.Subnet)
	}
	packet := model.Packet{Bytes: model.Counted(h.Device.FullFrame(), entry.Framing)}
	o := model.NewLimit(entry.Rule).Decide(model.State{Level: b.LevelBytes << model.UnitBits, FIFO: true}, packet)
	if entry.Excess == policy.Delay && !o.Excess {
		out.WaitNS = &o.Wait
	}
	return out
}
