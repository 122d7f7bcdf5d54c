package main

import (
	"fmt"
	"io"
	"math"
	"net/netip"
	"slices"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func topupCommand(e *env) *cobra.Command {
	var kind string
	cmd := &cobra.Command{
		Use:   "topup DEV ingress|egress CIDR|any [HOST] SIZE|all | NAME [ingress|egress|HOST] SIZE|all",
		Short: "Give back what is used of a quota",
		Long: `Give back bytes that are used of a quota, or all. If fewer are used, nothing is changed, and the error says how many.

NAME is the exact name of rules, a pool or a device, as for 'shapectl set'. Each of its quotas gets SIZE back. If its rules have
no quota, the pools do that only they are in. HOST is the address of one that has a quota of its own by --each; without HOST,
all gives back those of all hosts.`,
		Example: `  shapectl topup alice 20gb
  shapectl topup eth0 egress 10.0.0.0/24 10.0.0.7 all`,
		Args:              args(2, 5),
		ValidArgsFunction: e.completeNamed(false, func() bool { return kind == kindPool }),
		RunE: func(_ *cobra.Command, given []string) error {
			last := len(given) - 1
			t := topup{e: e, bytes: math.MaxUint64}
			if given[last] != "all" {
				var err error
				if t.bytes, err = policy.ParseVolume("size", given[last]); err != nil {
					return inputf("topup: %w", err)
				}
			}
			which := given[:last]
			if _, err := policy.ParseDirection(which[min(1, last-1)]); len(which) == 4 || len(which) == 2 && err != nil {
				if t.host, err = netip.ParseAddr(which[len(which)-1]); err != nil || t.host.Zone() != "" {
					return inputf("topup: host %.100q is not an address; write one such as 10.0.0.7", which[len(which)-1])
				}
				which = which[:len(which)-1]
			}
			if len(which) < 3 {
				of, err := parseName("topup", kind, which)
				if err != nil {
					return err
				}
				of.rest = given[len(which):]
				return e.withNamed("topup", of, t.named)
			}
			if err := checkRuleKind("topup", kind); err != nil {
				return err
			}
			want, err := parseFilter("topup", which)
			if err != nil {
				return err
			}
			return e.with(loader.Write, fmt.Sprintf("topup %s %s %s", plain.Line(want.device), want.direction, want.networks), func(n *loader.Namespace) error {
				hooks, err := want.hooksToChange(n)
				defer loader.CloseHooks(hooks)
				if err != nil {
					return err
				}
				var found []namedHook
				for _, h := range hooks {
					found = append(found, namedHook{h, want.entries(h.Set)})
				}
				return t.do(n, "", found)
			})
		},
	}
	addKind(cmd.Flags(), &kind)
	return cmd
}

// A topup says what is given back.
type topup struct {
	e     *env
	host  netip.Addr // invalid for none
	bytes uint64     // MaxUint64 for all
}

// A toppedUp is a quota of which some was given back.
type toppedUp struct {
	Device     string `json:"device"`
	Direction  string `json:"direction"`   // empty for a pool
	Network    string `json:"network"`     // empty for a pool
	Pool       string `json:"pool"`        // its name
	Host       string `json:"host"`        // the one whose quota it is; empty where all share one
	UsedBytes  uint64 `json:"used_bytes"`  // of the quota; of several hosts the most
	QuotaBytes uint64 `json:"quota_bytes"` // with the grace
	Sentence   string `json:"sentence"`

	store   *maps.Store
	holders []maps.Holder
}

// named gives back to the quotas of a name.
func (t topup) named(n *loader.Namespace, of ruleName, found search) error {
	rules := found.rules
	if found.kind == kindDevice {
		rules = found.device
	}
	pools := n.Pools()
	defer pools.Close()
	var its []string
	within, own := map[string]int{}, false
	switch found.kind {
	case "":
		return t.e.nothingNamed("topup", of, found)
	case kindPool:
		rules, its = nil, []string{of.name}
	default:
		for _, h := range rules {
			for _, r := range h.rules {
				own = own || r.Also.Quota.Bytes > 0
				within[string(r.Within)]++
			}
		}
		tree := poolTree(n)
		for name, members := range within {
			if !own && users(tree, name) == members {
				its = append(its, name)
			}
		}
		slices.Sort(its)
	}
	for _, name := range its {
		if entry, has := pools.Set.Find(policy.PoolKey(name)); has {
			rules = append(rules, namedHook{pools, []maps.Entry{entry}})
		}
	}
	return t.do(n, of.name, rules)
}

// do gives back to all quotas of rules and pools, which have a name or "".
func (t topup) do(n *loader.Namespace, name string, rules []namedHook) error {
	all := []toppedUp{}
	for _, h := range rules {
		for _, r := range h.rules {
			quota, has := h.Set.Store.Quota(r)
			if !has {
				continue
			}
			is := toppedUp{Device: h.Name(), Direction: h.Direction.String(), Network: policy.CIDR(r.Prefix), QuotaBytes: quota.Capacity, store: h.Set.Store}
			who := fmt.Sprintf("%s %s %s", is.Device, is.Direction, is.Network)
			if r.Pool {
				is.Device, is.Direction, is.Network, is.Pool = "", "", "", r.Label.Name
				who = "pool " + r.Label.Name
			}
			of := "" // what doing does not say
			if name != "" {
				of, who = who+": ", name
			}
			if t.host.IsValid() {
				is.Host = t.host.String()
				of, who = of+is.Host+": ", who+" "+is.Host
			}
			switch each := r.Each.Kind != policy.EachAll; {
			case t.host.IsValid() && (!each || r.Each.Kind == policy.EachFlow || !r.Prefix.Contains(t.host) && !policy.IsMark(r.Prefix)):
				return inputf("%sit has no quota of its own there; nothing was changed", plain.Line(of))
			case t.host.IsValid():
			case each && t.bytes < math.MaxUint64:
				return inputf("%seach %v has a quota of its own; name a host, or give back all; nothing was changed", plain.Line(of), r.Each)
			case each:
				is.holders = is.store.Holders(quota)
			}
			if is.holders == nil {
				is.holders = []maps.Holder{is.store.HolderOf(quota, t.host)}
			}
			if used := is.store.TopUp(is.holders[0], 0).UsedBytes; t.bytes < math.MaxUint64 && used < t.bytes {
				return inputf("%sonly %s are used; give back less, or all; nothing was changed", plain.Line(of), report.Bytes(used))
			}
			is.Sentence = who
			all = append(all, is)
		}
	}
	if len(all) == 0 {
		return missingf("there is no quota; %s sets one", t.e.suggest("set --quota 100gb/month --then 5mbit", "NAME"))
	}
	for i := range all {
		is := &all[i]
		for _, h := range is.holders {
			is.UsedBytes = max(is.UsedBytes, is.store.TopUp(h, t.bytes).UsedBytes)
		}
		is.Sentence = fmt.Sprintf("%s: %s of %s are used", is.Sentence, report.Bytes(is.UsedBytes), report.Bytes(is.QuotaBytes))
	}
	if err := n.KeepUsed(); err != nil { // a crash would undo it
		t.e.say("shapectl: %w", err)
	}
	return t.e.print(all, func(w io.Writer) (err error) {
		for _, is := range all {
			if err == nil {
				_, err = fmt.Fprintln(w, plain.Line(is.Sentence))
			}
		}
		return err
	})
}
