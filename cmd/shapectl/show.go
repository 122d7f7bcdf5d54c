package main

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// filterRules narrows rules down.
type filterRules struct {
	device    string            // "" for any
	direction *policy.Direction // nil for both
	prefix    *netip.Prefix     // nil for all
	buckets   bool              // with the buckets that owe something
	hurt      bool              // with those whom shadows would have hurt
}

func (e *env) showCommand() *cobra.Command {
	var stats, buckets, shadows bool
	cmd := &cobra.Command{
		Use:               "show [DEV [ingress|egress [CIDR]]]",
		Short:             "Show rules, and what became of their packets",
		Args:              args(0, 3),
		ValidArgsFunction: e.completeRule,
		RunE: func(_ *cobra.Command, given []string) error {
			want, err := parseFilter("show", given)
			if err != nil {
				return err
			}
			if shadows && (stats || buckets) {
				return inputf("show: --shadow is a table of its own; leave --stats and --buckets out")
			}
			want.buckets, want.hurt = buckets, shadows || e.json
			switch {
			case shadows:
				return e.show(want, report.Shadows)
			case stats:
				return e.show(want, report.Stats)
			}
			return e.show(want, report.Sentences)
		},
	}
	cmd.Flags().BoolVar(&stats, "stats", false, "count packets and bytes (JSON always does)")
	cmd.Flags().BoolVar(&shadows, "shadow", false, "tell what proposed limits would have refused, and of whom")
	cmd.Flags().BoolVar(&buckets, "buckets", false, "list the hosts, subnets and flows that owe something now, and how long a packet would wait")
	return cmd
}

func parseFilter(cmd string, given []string) (want filterRules, err error) {
	if len(given) > 0 {
		want.device = given[0]
	}
	if len(given) > 1 {
		d, err := direction(cmd, given[1])
		if err != nil {
			return want, err
		}
		want.direction = &d
	}
	if len(given) > 2 {
		p, err := policy.ParsePrefix(given[2])
		if err != nil {
			return want, inputf("%s: %w", cmd, err)
		}
		want.prefix = &p
	}
	return want, nil
}

func (e *env) show(want filterRules, print func(io.Writer, []report.Rule) error) error {
	return e.with(loader.Read, "show", func(n *loader.Namespace) error {
		rules, unread := findRules(n, want)
		if len(rules) == 0 && unread != nil {
			return unread
		}
		if len(rules) == 0 && want.device != "" {
			if _, err := device(want.device); err != nil {
				return err
			}
			if want.prefix != nil {
				return noRule(want)
			}
		}
		return errors.Join(e.printRules(rules, print), unread)
	})
}

func (e *env) printRules(rules []report.Rule, print func(io.Writer, []report.Rule) error) error {
	switch {
	case e.json:
		return report.JSON(e.out, rules)
	case len(rules) == 0:
		_, err := fmt.Fprintln(e.out, "no rules")
		return err
	}
	return print(e.out, rules)
}

func noRule(want filterRules) error {
	return inputf("%s %s has no rule for %s; %s lists those there are",
		want.device, want.direction, want.prefix, plain.Suggest("show", want.device))
}

// findRules are the rules that a filter lets through; never nil, as JSON would
// show that. With the error come those that could be read.
func findRules(n *loader.Namespace, want filterRules) (rules []report.Rule, err error) {
	rules = []report.Rule{}
	hooks, unread := want.hooks(n)
	for _, h := range hooks {
		defer h.Close()
		hurt := map[uint32][]maps.Hurt{}
		if want.hurt {
			if hurt, err = h.Set.Hurt(); err != nil {
				return rules, err
			}
		}
		entries := want.entries(h.Set)
		rules = slices.Grow(rules, len(entries))
		for _, entry := range entries {
			r := describe(h, entry, hurt[entry.ID])
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

// entries are the rules of a hook that the filter lets through.
func (want filterRules) entries(s *maps.Set) []maps.Entry {
	if want.prefix == nil {
		return s.Rules()
	}
	if entry, ok := s.Find(*want.prefix); ok {
		return []maps.Entry{entry}
	}
	return nil
}

// hooks are those that the filter lets through.
func (want filterRules) hooks(n *loader.Namespace) ([]*loader.Hook, error) {
	if want.device == "" {
		return n.Hooks()
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
	return hooks, errors.Join(unread...)
}

// describe is all that is known of a rule; hurt may be nil.
func describe(h *loader.Hook, entry maps.Entry, hurt []maps.Hurt) report.Rule {
	level := model.Bytes(h.Set.OwnLevel(entry, maps.Now()))
	r := report.NewRule(place(h), entry.Rule, h.Set.Counters(entry.ID), level)
	if shadow, ok := h.Set.Shadow(entry); ok {
		r.Shadow = report.NewShadow(shadow.Rule, h.Set.Counters(shadow.ID), hurt, h.Set.Size().Hurt)
	}
	return r
}

func place(h *loader.Hook) report.Place {
	var reverts *uint64
	if change, until := h.Set.Change(); change == maps.Pending {
		reverts = ahead(until)
	}
	return report.Place{
		RevertsInNS: reverts,
		Device:      h.Name(), Direction: h.Direction, Match: h.Match(),
		Attached: h.InForce(), State: h.Status(), Hook: string(h.Mode),
	}
}

// bucketOf is what there is to say of a bucket of a rule.
func bucketOf(h *loader.Hook, entry maps.Entry, b maps.Bucket) report.Bucket {
	out := report.Bucket{Sharer: sharer(b), LevelBytes: b.LevelBytes}
	packet := model.Packet{Bytes: model.Counted(h.Device.FullFrame(), entry.Framing)}
	o := model.NewLimit(entry.Rule).Decide(model.State{Level: b.LevelBytes << model.UnitBits, FIFO: true}, packet)
	if entry.Excess == policy.Delay && !o.Excess {
		out.WaitNS = &o.Wait
	}
	return out
}

func sharer(b maps.Bucket) string {
	if !b.Subnet.IsValid() {
		return b.Flow.String()
	}
	if b.Subnet.IsSingleIP() {
		return b.Subnet.Addr().String()
	}
	return b.Subnet.String()
}
