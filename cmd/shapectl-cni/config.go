package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/shapectl/shapectl/pkg/policy"
)

// bandwidth is the configuration of the reference plugin. Ingress is what a pod receives. Rates are in bits per second, bursts in
// bits; 0 for none.
type bandwidth struct {
	IngressRate     uint64   `json:"ingressRate"`
	IngressBurst    uint64   `json:"ingressBurst"`
	EgressRate      uint64   `json:"egressRate"`
	EgressBurst     uint64   `json:"egressBurst"`
	ShapedSubnets   []string `json:"shapedSubnets"` // of what a pod talks to
	UnshapedSubnets []string `json:"unshapedSubnets"`
}

// noBurst is the least burst, in bits, that runtimes give where nobody has chosen one: math.MaxInt32 or math.MaxUint32.
const noBurst = math.MaxInt32

// options are those of a policy file, by their names.
type options map[string]string

// A network is the configuration of the plugin in a network. The network's own rates come before those of the runtime.
type network struct {
	types.PluginConf
	bandwidth
	RuntimeConfig struct {
		Bandwidth bandwidth `json:"bandwidth"`
	} `json:"runtimeConfig"`
	Ingress options            `json:"ingress"` // of the pool of a pod's direction
	Egress  options            `json:"egress"`
	Pools   map[string]options `json:"pools"` // of a node or namespace, made when a pod needs them
}

func parse(stdin []byte) (c network, result *current.Result, err error) {
	if err = json.Unmarshal(stdin, &c); err != nil {
		return c, nil, types.NewError(types.ErrDecodingFailure, "the network configuration is not valid", err.Error())
	}
	if c.RawPrevResult != nil {
		if err = version.ParsePrevResult(&c.PluginConf); err == nil {
			result, err = current.NewResultFromResult(c.PrevResult)
		}
	}
	return c, result, err
}

// A pod is an attachment of a container to a network.
type pod struct {
	note string // tells whose pools and rules are: see network.noteOf
	name string // NAMESPACE/POD in Kubernetes, or the container's ID
	ns   string // the namespace in Kubernetes
}

// note is the note of pools that belong to a network.
func (c *network) note() string { return "cni " + c.Name }

// noteOf is the note of pools and rules of an attachment, by which DEL and GC find them.
func (c *network) noteOf(container, device string) string {
	return c.note() + " " + container + " " + device
}

func (c *network) podOf(args *skel.CmdArgs) (p pod) {
	p = pod{note: c.noteOf(args.ContainerID, args.IfName), name: args.ContainerID}
	var name string
	for pair := range strings.SplitSeq(args.Args, ";") {
		switch key, value, _ := strings.Cut(pair, "="); key {
		case "K8S_POD_NAMESPACE":
			p.ns = value
		case "K8S_POD_NAME":
			name = value
		}
	}
	if name != "" {
		p.name = strings.TrimPrefix(p.ns+"/"+name, "/")
	}
	if len(p.name) > policy.MaxName {
		p.name = "" // the rules are then called as their device
	}
	return p
}

// inNamespace writes the namespace of a pod into the name of a pool.
func (p pod) inNamespace(s string) string { return strings.ReplaceAll(s, "{namespace}", p.ns) }

// limits returns the rules of a pod on a host's device, and the pools that they need. Notices say what differs from what is asked for.
func (c *network) limits(p pod, device string) (tables []policy.Table, notices []string, err error) {
	asked := c.bandwidth
	if asked.IngressRate|asked.IngressBurst|asked.EgressRate|asked.EgressBurst == 0 {
		asked = c.RuntimeConfig.Bandwidth
	}
	shaped := append(slices.Clip(c.ShapedSubnets), c.RuntimeConfig.Bandwidth.ShapedSubnets...)
	unshaped := append(slices.Clip(c.UnshapedSubnets), c.RuntimeConfig.Bandwidth.UnshapedSubnets...)
	if len(shaped) > 0 && len(unshaped) > 0 {
		return nil, nil, errors.New("shapedSubnets and unshapedSubnets exclude each other; leave one of them out")
	}
	var pools []policy.Rule
	for _, side := range []struct {
		name        string
		direction   policy.Direction
		match       policy.Match // what the pod talks to: a pod may forge its own address
		rate, burst uint64
		options
	}{
		{"ingress", policy.Egress, policy.MatchSrc, asked.IngressRate, asked.IngressBurst, c.Ingress},
		{"egress", policy.Ingress, policy.MatchDst, asked.EgressRate, asked.EgressBurst, c.Egress},
	} {
		if side.rate == 0 && side.burst != 0 {
			return nil, nil, fmt.Errorf("%sBurst needs %sRate; give both, or leave both out", side.name, side.name)
		}
		if side.rate == 0 && len(side.options) == 0 {
			continue
		}
		owner := policy.Owner{Device: device, Direction: side.direction}
		limit := policy.Limit{Rate: policy.MaxRate, Owner: owner, Note: p.note}
		if side.rate != 0 {
			limit.Rate = max(policy.Rate(side.rate), policy.MinRate)
			if burst := max(side.burst/8, policy.MinCapacity); side.burst > 0 && side.burst < noBurst {
				limit.Capacity.Set(fmt.Sprintf("%db", burst))
			}
			if limit.Rate != policy.Rate(side.rate) {
				notices = append(notices, fmt.Sprintf("%sRate %d is below 8 kbit/s, the slowest rate: the pod gets 8 kbit/s", side.name, side.rate))
			}
		}
		pool, err := p.pool(limit, owner.String(), side.options)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", side.name, err)
		}
		pools = append(pools, pool)
		t := policy.Table{Device: device, Direction: side.direction, Match: side.match}
		add := func(l policy.Limit, networks ...string) error {
			for _, written := range networks {
				prefixes, err := policy.ParseNetworks(written)
				for _, prefix := range prefixes {
					var r policy.Rule
					if r, err = l.Rule(prefix); err != nil {
						break
					}
					t.Rules = append(t.Rules, r)
				}
				if err != nil {
					return err
				}
			}
			return nil
		}
		if len(shaped) == 0 {
			shaped = []string{policy.Any}
		}
		err = add(policy.Limit{Within: policy.Within(pool.Label.Name), Name: p.name, Note: p.note}, shaped...)
		if err == nil {
			err = add(policy.Limit{Rate: policy.Unlimited, Name: p.name, Note: p.note}, unshaped...)
		}
		if err != nil {
			return nil, nil, err
		}
		policy.SortRules(t.Rules)
		t.Rules = slices.CompactFunc(t.Rules, func(a, b policy.Rule) bool { return a.Prefix == b.Prefix })
		tables = append(tables, t)
	}
	if tables == nil {
		return nil, nil, nil
	}
	for _, name := range slices.Sorted(maps.Keys(c.Pools)) {
		pool, err := p.pool(policy.Limit{Note: c.note()}, p.inNamespace(name), c.Pools[name])
		if err != nil {
			return nil, nil, fmt.Errorf("pool %q: %w", name, err)
		}
		pools = append(pools, pool)
	}
	policy.SortRules(pools)
	return append(tables, policy.Table{Rules: pools}), notices, nil
}

// pool makes a pool from a limit and options.
func (p pod) pool(l policy.Limit, name string, o options) (policy.Rule, error) {
	for _, key := range slices.Sorted(maps.Keys(o)) {
		if err := l.Set(key, p.inNamespace(o[key])); err != nil {
			return policy.Rule{}, err
		}
	}
	return l.Pool(name)
}
