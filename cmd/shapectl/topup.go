package main

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func topupCommand(e *env) *cobra.Command {
	var kind string
	var back bool
	cmd := &cobra.Command{
		Use:   "topup DEV ingress|egress CIDR|any [HOST] SIZE|all | NAME [ingress|egress|HOST] SIZE|all",
		Short: "Add to what is left of a quota",
		Long: `Add bytes to what is left of a quota. What is more than the quota lasts until the period ends. Some quotas take no more than is
used: those of each host, of a cluster, and those that come back steadily, as by 30d. If fewer are used of one, nothing is changed,
and the error says how many. After all, the quota is as at the beginning of a period, also if it had more. --undo takes back what
was added to another by mistake.

NAME names rules, a pool or a device, as for 'shapectl set'. Each of its quotas gets SIZE back. If its rules have
no quota, the pools do that only they are in. HOST is the address of one that has a quota of its own by --each; without HOST,
all gives back those of all hosts.`,
		Example: `  shapectl topup alice 20gb
  shapectl topup eth0 egress 10.0.0.0/24 10.0.0.7 all`,
		Args:              args(2, 5),
		ValidArgsFunction: e.completeNamed(false, func() bool { return kind == kindPool }),
		RunE: func(_ *cobra.Command, given []string) error {
			last := len(given) - 1
			t := topup{e: e, bytes: maps.All, back: back}
			if given[last] == "all" && back {
				return inputf("topup: write how much --undo takes back")
			} else if given[last] != "all" {
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
			want, err := parseTarget("topup", kind, which)
			if err != nil {
				return err
			}
			if want.networks == nil {
				want.rest = given[len(which):]
				return e.withNamed(want, t.named)
			}
			return e.with(loader.Write, "topup", func(n *loader.Namespace) error {
				hooks, err := want.hooksToChange(n)
				defer loader.CloseHooks(hooks)
				if err != nil {
					return err
				}
				rules := want.rules(hooks)
				if rules == nil {
					if _, err := device(want.name); err != nil {
						return err
					}
					return missingf("%s; %s lists its rules", want.none(), e.suggest("show", want.name))
				}
				return t.do(n, "", rules)
			})
		},
	}
	addKind(cmd.Flags(), &kind)
	cmd.Flags().BoolVar(&back, "undo", false, "take SIZE back, which was added by mistake")
	return cmd
}

// A topup says what is given back.
type topup struct {
	e     *env
	host  netip.Addr // invalid for none
	bytes uint64     // maps.All for all
	back  bool       // are taken back
}

// A toppedUp is a quota of which some was given back.
type toppedUp struct {
	Device     string `json:"device"`
	Direction  string `json:"direction"`   // empty for a pool
	Network    string `json:"network"`     // empty for a pool
	Pool       string `json:"pool"`        // its name
	Host       string `json:"host"`        // the one whose quota it is; empty where all share one
	UsedBytes  uint64 `json:"used_bytes"`  // of the quota
	AheadBytes uint64 `json:"ahead_bytes"` // beyond the quota, until the period ends
	QuotaBytes uint64 `json:"quota_bytes"` // with the grace
	Sentence   string `json:"sentence"`
}

// named gives back to the quotas of a name: of its rules, or else of the pools that only they are in.
func (t topup) named(n *loader.Namespace, of target, found search) error {
	rules, its := found.rules, []string(nil)
	switch found.kind {
	case "":
		return t.e.nothingNamed(of, found)
	case kindPool:
		rules, its = nil, []string{of.name}
	case kindDevice:
		rules = found.device
	}
	if anyQuota(rules) {
		return t.do(n, of.name, rules)
	}
	within := map[string]int{}
	for _, h := range rules {
		for _, r := range h.rules {
			within[string(r.Within)]++
		}
	}
	tree := poolTree(n)
	for name, members := range within {
		if users(tree, name) == members {
			its = append(its, name)
		}
	}
	pools := n.Pools()
	defer pools.Close()
	found.rules = nil
	for _, name := range slices.Sorted(slices.Values(its)) {
		if entry, has := pools.Set.Find(policy.PoolKey(name)); has {
			found.rules = append(found.rules, namedHook{pools, []maps.Entry{entry}})
		}
	}
	return t.do(n, of.name, found.rules)
}

// poolWithQuota is the lowest pool with a quota above rules; "" for none.
func poolWithQuota(n *loader.Namespace, rules []namedHook) string {
	tree := poolTree(n)
	for _, h := range rules {
		for _, r := range h.rules {
			for node := tree.Find(string(r.Within)); node != nil; node = node.Above {
				if node.Pool.Also.Quota.Bytes > 0 {
					return node.Pool.Label.Name
				}
			}
		}
	}
	return ""
}

func anyQuota(rules []namedHook) bool {
	return slices.ContainsFunc(rules, func(h namedHook) bool {
		return slices.ContainsFunc(h.rules, func(e maps.Entry) bool { return e.Also.Quota.Bytes > 0 })
	})
}

// do gives back to all quotas of rules and pools, which have a name or "". It changes nothing if one of them refuses.
func (t topup) do(n *loader.Namespace, name string, rules []namedHook) error {
	var all []toppedUp
	var give []func() maps.Quota
	for _, h := range rules {
		for _, r := range h.rules {
			quota, has := h.Set.Store.Quota(r)
			if !has {
				continue
			}
			store, key := h.Set.Store, maps.Key{}
			is := toppedUp{Device: h.Name(), Direction: h.Direction.String(), Network: policy.CIDR(r.Prefix), QuotaBytes: quota.Capacity}
			says := is.Device + " " + is.Direction + " " + is.Network
			if r.Pool {
				is.Device, is.Direction, is.Network, is.Pool = "", "", "", r.Label.Name
				says = "pool " + r.Label.Name
			}
			each := r.Each.Kind != policy.EachAll
			switch {
			case t.host.IsValid() && r.Prefix.Addr().Is4() != t.host.Is4() && !policy.IsMark(r.Prefix) && !r.Pool:
				continue // of the other family
			case t.host.IsValid() && (!each || r.Each.Kind == policy.EachFlow || !r.Prefix.Contains(t.host) && !policy.IsMark(r.Prefix)):
				return inputf("%s: %s has no quota of its own there; nothing was changed", plain.Line(says), t.host)
			case t.host.IsValid():
				is.Host, key = t.host.String(), maps.KeyOf(quota, t.host)
				says += " " + is.Host
				if !store.HasBucket(key) {
					return inputf("%s: the table is full, so the host shares one bucket with others; see %s; nothing was changed", plain.Line(says), t.e.suggest("doctor"))
				}
			case each && t.bytes < maps.All:
				return inputf("%s: each %v has a quota of its own; name a host, or give back all; nothing was changed", plain.Line(says), r.Each)
			}
			switch is := store.TopUp(quota, key, 0); {
			case t.back && !quota.TakesAhead():
				return inputf("%s: --undo takes nothing back from a quota of each host, of a cluster, or that comes back steadily; nothing was changed", plain.Line(says))
			case t.bytes == maps.All, t.back && t.bytes <= is.LeftBytes:
			case t.back:
				return inputf("%s: only %d B are left; take back less; nothing was changed", plain.Line(says), is.LeftBytes)
			case is.UsedBytes < t.bytes && !quota.TakesAhead():
				return inputf("%s: only %d B are used; give back less, or all; nothing was changed", plain.Line(says), is.UsedBytes)
			case is.AheadBytes+t.bytes-min(t.bytes, is.UsedBytes) > maps.MostAhead:
				return inputf("%s: at most %s can be ahead of a quota; nothing was changed", plain.Line(says), report.Bytes(maps.MostAhead))
			}
			is.Sentence = says
			all, give = append(all, is), append(give, func() maps.Quota {
				switch {
				case t.back:
					return store.TakeBack(quota, key, t.bytes)
				case each && key == (maps.Key{}):
					return store.TopUpAll(quota)
				}
				return store.TopUp(quota, key, t.bytes)
			})
		}
	}
	if len(all) == 0 {
		if t.host.IsValid() {
			return missingf("there is no quota of %s; %s lists those that there are", t.host, t.e.suggest("show --buckets --sort quota"))
		}
		if above := poolWithQuota(n, rules); above != "" {
			return missingf("there is no quota; that of the pool %s is in force: %s", plain.Line(above), t.e.suggest("topup", above, "SIZE"))
		}
		return missingf("there is no quota; %s sets one", t.e.suggest("set --quota 100gb/month --then 5mbit", "NAME"))
	}
	if len(all) == 1 && name != "" {
		all[0].Sentence = strings.TrimSpace(name + " " + all[0].Host)
	}
	for i := range all {
		is := &all[i]
		q := give[i]()
		is.UsedBytes, is.AheadBytes = q.UsedBytes, q.AheadBytes
		is.Sentence += fmt.Sprintf(": %s of %s are used", report.Bytes(is.UsedBytes), report.Bytes(is.QuotaBytes))
		if is.AheadBytes > 0 {
			is.Sentence += fmt.Sprintf(", and %s more are left until the period ends", report.Bytes(is.AheadBytes))
		}
	}
	unkept, err := n.KeepUsed(), n.EndChange()
	if err != nil {
		return err
	}
	err = t.e.print(all, func(w io.Writer) (err error) {
		for _, is := range all {
			_, err = fmt.Fprintln(w, plain.Line(is.Sentence))
		}
		return err
	})
	if unkept != nil && err == nil {
		return t.e.degraded("topup: a reboot would undo it: %w", unkept)
	}
	return err
}
