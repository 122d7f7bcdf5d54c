package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	spec "github.com/containernetworking/cni/pkg/version"

	"github.com/shapectl/shapectl/internal/plain"
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

// options are those of a policy file, by their names. In JSON, they may be just a rate.
type options map[string]string

func (o *options) UnmarshalJSON(text []byte) error {
	if text[0] == '"' {
		text = fmt.Appendf(nil, `{"rate": %s}`, text)
	}
	var values map[string]json.RawMessage
	if err := json.Unmarshal(text, &values); err != nil || values == nil {
		return err
	}
	*o = options{}
	for key, value := range values {
		var s string
		switch value[0] {
		case '{', '[', 'n':
			return fmt.Errorf("the value of %q must be a text, a number, true or false", key)
		case '"':
			_ = json.Unmarshal(value, &s) // it is valid
		default:
			s = string(value)
		}
		(*o)[key] = s
	}
	return nil
}

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

// keys are those of the configuration: of the CNI specification and its conventions, and of this plugin.
var keys = strings.Fields("cniVersion name type capabilities args dns ipam ipMasq prevResult runtimeConfig " +
	"ingressRate ingressBurst egressRate egressBurst shapedSubnets unshapedSubnets ingress egress pools")

// decode decodes one key at a time, so that an error can name it.
func (c *network) decode(stdin []byte) error {
	var all map[string]json.RawMessage
	if err := json.Unmarshal(stdin, &all); err != nil {
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(all)) {
		if !slices.ContainsFunc(keys, func(k string) bool { return strings.EqualFold(k, key) }) && !strings.HasPrefix(key, "cni.dev/") {
			return unknown("key", key, keys)
		}
		one, _ := json.Marshal(map[string]json.RawMessage{key: all[key]}) // it is valid
		err := json.Unmarshal(one, c)
		var pools map[string]json.RawMessage
		if err != nil && key == "pools" && json.Unmarshal(all[key], &pools) == nil {
			for _, name := range slices.Sorted(maps.Keys(pools)) {
				if failed := json.Unmarshal(pools[name], &options{}); failed != nil {
					key, err = "pools."+name, failed
					break
				}
			}
		}
		if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return fmt.Errorf("%q cannot be of the JSON type %s", key, e.Value)
		} else if err != nil {
			return fmt.Errorf("%q: %w", key, err)
		}
	}
	for name := range c.Capabilities {
		if name != "bandwidth" && plain.Similar(name, []string{"bandwidth"}) != "" {
			return unknown("capability", name, []string{"bandwidth"})
		}
	}
	return nil
}

func unknown(what, name string, names []string) error {
	if similar := plain.Similar(name, names); similar != "" {
		return fmt.Errorf("unknown %s %q; did you mean %q?", what, name, similar)
	}
	return fmt.Errorf("unknown %s %q; remove it", what, name)
}

func parse(stdin []byte) (c network, result *current.Result, err error) {
	if err = c.decode(stdin); err != nil {
		return c, nil, types.NewError(types.ErrDecodingFailure, "the network configuration is not valid", err.Error())
	}
	if interfaces, _ := c.RawPrevResult["interfaces"].([]any); slices.Contains(interfaces, nil) {
		return c, nil, types.NewError(types.ErrDecodingFailure, "an interface of prevResult is null", "")
	}
	if c.RawPrevResult != nil {
		if err = spec.ParsePrevResult(&c.PluginConf); err == nil {
			result, err = current.NewResultFromResult(c.PrevResult)
		}
	}
	return c, result, err
}

// A pod is an attachment of a container to a network.
type pod struct {
	note   string // tells whose pools and rules are: see network.noteOf
	device string // inside the pod
	name   string // NAMESPACE/POD in Kubernetes, or the container's ID
	ns     string // the namespace in Kubernetes
}

// note is the note of pools that belong to a network.
func (c *network) note() string { return policy.CNINote + c.Name }

// noteOf is the note of pools and rules of an attachment, by which DEL and GC find them.
func (c *network) noteOf(container, device string) string {
	return c.note() + " " + container + " " + device
}

func (c *network) podOf(args *skel.CmdArgs) (p pod) {
	p = pod{note: c.noteOf(args.ContainerID, args.IfName), device: args.IfName, name: args.ContainerID}
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
	return p
}

// limits returns the pools that a pod may need, and its rules on its device on the host, which it looks for; nil for none. Notices
// say what differs from what is asked for.
func (c *network) limits(p pod, hostDevice func() (string, error)) (tables []policy.Table, notices []string, err error) {
	asked, annotated := c.bandwidth, false
	if asked.IngressRate|asked.IngressBurst|asked.EgressRate|asked.EgressBurst == 0 {
		asked, annotated = c.RuntimeConfig.Bandwidth, true
	}
	shaped := append(slices.Clip(c.ShapedSubnets), c.RuntimeConfig.Bandwidth.ShapedSubnets...)
	unshaped := append(slices.Clip(c.UnshapedSubnets), c.RuntimeConfig.Bandwidth.UnshapedSubnets...)
	switch {
	case len(shaped) > 0 && len(unshaped) > 0:
		return nil, nil, errors.New("shapedSubnets and unshapedSubnets exclude each other; leave one of them out")
	case len(shaped) == 0:
		shaped = []string{policy.Any}
	}
	var pools []policy.Rule
	device := ""
	for _, side := range []struct {
		name        string
		direction   policy.Direction
		match       policy.Match // of what the pod talks to: it may forge its own address
		rate, burst uint64
		options
	}{
		{"ingress", policy.Egress, policy.MatchSrc, asked.IngressRate, asked.IngressBurst, c.Ingress},
		{"egress", policy.Ingress, policy.MatchDst, asked.EgressRate, asked.EgressBurst, c.Egress},
	} {
		if side.rate == 0 && side.burst != 0 {
			return nil, nil, fmt.Errorf("%sBurst needs %sRate; give both, or leave both out", side.name, side.name)
		}
		if side.rate == 0 && side.options == nil {
			continue
		}
		if device == "" {
			if device, err = hostDevice(); err != nil {
				return nil, nil, err
			}
		}
		network, err := p.draft(side.options)
		var pod policy.Draft // what is asked for this pod
		if side.rate != 0 {
			pod.Rate = policy.Rate(min(max(side.rate, uint64(policy.MinRate)), uint64(policy.MaxRate)))
			pod.Mark(policy.FindOption("rate"))
		}
		switch {
		case side.rate == 0:
		case pod.Rate > policy.Rate(side.rate):
			notices = append(notices, fmt.Sprintf("%sRate %d is below 8 kbit/s, the slowest rate; the pod gets 8 kbit/s", side.name, side.rate))
		case pod.Rate < policy.Rate(side.rate):
			notices = append(notices, fmt.Sprintf("%sRate %d is above 400 Gbit/s, the fastest rate; the pod gets 400 Gbit/s", side.name, side.rate))
		}
		if side.burst > 0 && side.burst < noBurst {
			bytes := max(side.burst/8, policy.MinCapacity)
			pod.Capacity.Set(fmt.Sprintf("%db", bytes))
			pod.Mark(policy.FindOption("capacity"))
			if bytes != side.burst/8 {
				notices = append(notices, fmt.Sprintf("%sBurst %d is below one full packet; the pod gets %d bits", side.name, side.burst, 8*bytes))
			}
		}
		if !annotated {
			pod, network = policy.Draft{}, pod.Over(network)
		}
		note, whole := policy.PodNote(p.note, network, annotated && side.rate != 0)
		if !whole {
			notices = append(notices, side.name+" has too many options; after a change of its annotation, the pod keeps only the rate of them")
		}
		limit := pod.OnNetwork(network)
		limit.Owner, limit.Note = policy.Owner{Device: device, Direction: side.direction}, note
		var pool policy.Rule
		if err == nil {
			pool, err = limit.Pool(policy.PodPool(p.name, p.device, side.direction))
		}
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", side.name, err)
		}
		pools = append(pools, pool)
		byNetwork := map[netip.Prefix]policy.Rule{}
		err = cmp.Or(p.rules(byNetwork, policy.Limit{Within: policy.Within(pool.Label.Name)}, shaped),
			p.rules(byNetwork, policy.Limit{Rate: policy.Unlimited}, unshaped))
		if err != nil {
			return nil, nil, err
		}
		rules := slices.Collect(maps.Values(byNetwork))
		policy.SortRules(rules)
		tables = append(tables, policy.Table{Device: device, Direction: side.direction, Match: side.match, Rules: rules})
	}
	if tables == nil {
		return nil, nil, nil
	}
	for name, options := range c.Pools {
		limit, err := p.draft(options)
		limit.Note = c.note()
		var pool policy.Rule
		if full, braces := p.inNamespace(name); cmp.Or(err, braces) == nil {
			pool, err = limit.Pool(full)
		} else {
			err = cmp.Or(err, braces)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("pool %q: %w", name, err)
		}
		pools = append(pools, pool)
	}
	policy.SortRules(pools)
	return append([]policy.Table{{Rules: pools}}, tables...), notices, nil
}

// inNamespace writes the namespace of a pod into the name of a pool.
func (p pod) inNamespace(s string) (string, error) {
	name := strings.ReplaceAll(s, "{namespace}", p.ns)
	switch {
	case name != s && p.ns == "": // else all such pods would be one namespace
		return "", fmt.Errorf("%q needs a namespace, but the runtime gave no K8S_POD_NAMESPACE; use a name without {namespace}", s)
	case strings.ContainsAny(name, "{}"):
		return "", fmt.Errorf("%q has braces; only {namespace} may have them", s)
	case name != s:
		return policy.ShortName(name), nil
	}
	return s, nil
}

// draft makes a draft of options.
func (p pod) draft(of options) (d policy.Draft, err error) {
	for key, value := range of {
		if of[key], err = p.inNamespace(value); err != nil {
			return d, fmt.Errorf("%s %w", key, err)
		}
	}
	err = d.GiveAll(of, func(o *policy.Option) bool { return !o.RuleOnly && !o.Label && !o.Fact })
	return d, err
}

// rules gives networks a limit each.
func (p pod) rules(byNetwork map[netip.Prefix]policy.Rule, l policy.Limit, networks []string) error {
	l.Name, l.Note = policy.ShortName(p.name), p.note
	for _, text := range networks {
		if prefix, err := netip.ParsePrefix(text); err == nil {
			text = prefix.Masked().String() // as in the reference plugin
		}
		prefixes, err := policy.ParseNetworks(text)
		for _, prefix := range prefixes {
			r, failed := l.Rule(prefix)
			byNetwork[prefix], err = r, cmp.Or(err, failed)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
