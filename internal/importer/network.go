package importer

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/input"
	"github.com/shapectl/shapectl/pkg/policy"
)

// way is the way of a subscriber's packets.
type way int

const (
	down way = iota
	up
	ways
)

func (w way) String() string { return [...]string{"down", "up"}[w] }

// A node is a site or access point in LibreQoS's network.json.
type node struct {
	name     string
	virtual  bool // it is for people, and limits nothing
	rates    [ways]policy.Rate
	whys     [ways]reason // why it has no rate
	children []*node
	pool     [ways]policy.Within // what its subscribers draw from: its pool, or that of a node above; "" for none
	limits   bool                // it has a pool
}

type nodes struct {
	*collector
	file  string
	roots []*node
	named map[string]*node
	ids   map[string]*node
}

// readNodes reads a network.json, and adds the pools of its nodes.
func readNodes(c *collector, from File) (*nodes, error) {
	n := &nodes{collector: c, file: from.Name, named: map[string]*node{}, ids: map[string]*node{}}
	text, err := input.All(from.Text)
	if err != nil {
		return nil, err
	}
	const advice = "give LibreQoS's network.json"
	root, err := readJSON(n.file, text, advice)
	if err != nil {
		return nil, err
	}
	if _, ok := root.(map[string]any); !ok {
		return nil, fmt.Errorf("%s is not an object of nodes; %s", n.file, advice)
	}
	n.roots = n.level(root)
	n.addPools(n.roots, [ways]policy.Within{}, 0)
	return n, n.err
}

func (n *nodes) wrong(v *node, format string, args ...any) {
	n.fail(fmt.Errorf("%s: node %.60q %s", n.file, v.name, fmt.Sprintf(format, args...)))
}

// level reads the nodes of an object. LibreQoS ignores other values, too.
func (n *nodes) level(of any) (all []*node) {
	members, _ := of.(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(members)) {
		if _, ok := members[name].(map[string]any); !ok {
			continue
		}
		v := &node{name: oneLine(name)}
		switch {
		case v.name == "":
			n.wrong(v, "needs a name such as Site_1")
		case n.named[v.name] != nil:
			n.wrong(v, "appears twice; give each node its own name")
		}
		n.named[v.name] = v
		n.node(v, members[name])
		all = append(all, v)
	}
	return all
}

func (n *nodes) node(v *node, of any) {
	for w, key := range [ways]string{down: "downloadBandwidthMbps", up: "uploadBandwidthMbps"} {
		var ok bool
		if v.rates[w], v.whys[w], ok = parseMbit(written(of, key)); !ok {
			n.wrong(v, "has a %s of %.40q; write a number of megabits per second such as 25 or 2.5", key, written(of, key))
		}
	}
	v.virtual = written(of, "virtual") == "true" || strings.EqualFold(written(of, "type"), "virtual")
	if id := written(of, "id"); id != "" {
		n.ids[id] = v
	}
	v.children = n.level(get(of, "children"))
}

// written returns a value as text; "" for none.
func written(of any, key string) string {
	if v := get(of, key); v != nil {
		return strings.TrimSpace(fmt.Sprint(v))
	}
	return ""
}

// addPools adds the pools of nodes, below those of the nodes above.
func (n *nodes) addPools(level []*node, above [ways]policy.Within, depth int) {
	for _, v := range level {
		below := depth
		if v.pool = above; !v.virtual {
			for w := range ways {
				n.addPool(v, w)
			}
		}
		if v.limits {
			below++
		}
		if below >= policy.MaxDepth { // a subscriber may have a pool of its own
			n.wrong(v, "is below %d nodes with rates, and at most %d can be above a subscriber; remove the rate of one", depth, policy.MaxDepth-1)
		}
		n.addPools(v.children, v.pool, below)
	}
}

// addPool adds the pool of a node for one way, unless it has no rate.
func (n *nodes) addPool(v *node, w way) {
	rate, above := v.rates[w], v.pool[w]
	if rate == 0 {
		if v.whys[w] != noRate {
			n.leave(v.whys[w], n.file, "%q %v", v.name, w)
		}
		return
	}
	r := policy.Rule{Rate: rate, Capacity: policy.DefaultCapacity(rate), Within: above, Share: policy.Share{Kind: policy.ShareMember}}
	if name := n.collector.addPool(v.name, " "+w.String(), r, n.file); name != "" {
		v.pool[w], v.limits = name, true
	}
}

// find returns the node of a name, else of an ID; nil for none.
func (n *nodes) find(name, id string) *node {
	if n == nil {
		return nil
	}
	return cmp.Or(n.named[name], n.ids[id])
}
