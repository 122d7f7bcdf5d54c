package main

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// putRules sets that rule for each of the prefixes, as the command does.
func (a *arena) putRules(mode loader.Mode, rule policy.Rule, prefixes ...netip.Prefix) error {
	return in(a.near, func() error {
		n, err := loader.Write(loader.Options{BPFFS: a.bpffs, Mode: mode})
		if err != nil {
			return err
		}
		defer n.Close()
		dev, err := netinfo.DeviceByName(nearDevice)
		if err != nil {
			return fmt.Errorf("look up device %s: %w", nearDevice, err)
		}
		for _, p := range prefixes {
			rule.Prefix = p
			if _, err := n.Put(dev, policy.Egress, policy.MatchDst, rule); err != nil {
				return fmt.Errorf("limit %v: %w", rule.Prefix, err)
			}
		}
		return nil
	})
}

// shapectlMany has a rule for each prefix, with a bucket for all of it.
func shapectlMany(prefixes []netip.Prefix) competitor {
	return competitor{name: "shapectl gcra, a rule each", set: func(_ context.Context, a *arena, l limit) error {
		rules := make([]policy.Rule, len(prefixes))
		for i, p := range prefixes {
			rules[i] = policy.Rule{Prefix: p, Rate: l.rate, Capacity: l.capacity}
		}
		p, err := a.shapectl(maps.Size{Rules: uint32(len(rules)), Buckets: 1}, rules)
		if err != nil {
			return err
		}
		return a.attach(a.near, p)
	}}
}
