package importer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"strings"

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
	where    string
	at       int64 // in the text
	virtual  bool  // it is for people, and limits nothing
	rates    [ways]speed
	least    [ways]speed
	children []*node
	pool     [ways]policy.Within // what its subscribers draw from: its pool, or that of a node above; "" for none
	limits   bool                // it has a pool
}

type nodes struct {
	*collector
	file  string
	text  []byte
	roots []*node
	named map[string]*node // by name, and by other names where no node has it as name
	ids   map[string]*node
}

// A member of a JSON object.
type member struct {
	name  string
	value json.RawMessage
	at    int64 // where the value is in the text
}

// members returns the members of a valid object.
func (m member) members() (all []member) {
	d := json.NewDecoder(bytes.NewReader(m.value))
	_, _ = d.Token()
	for d.More() {
		key, _ := d.Token()
		name, _ := key.(string)
		of := member{name: name}
		_ = d.Decode(&of.value)
		of.at = m.at + d.InputOffset() - int64(len(of.value))
		all = append(all, of)
	}
	return all
}

// text returns a string, or the text of another value; "" for null.
func (m member) text() (s string) {
	if json.Unmarshal(m.value, &s) != nil {
		s = string(m.value)
	}
	return strings.TrimSpace(s)
}

func (n *nodes) wrong(at int64, format string, args ...any) {
	n.fail(misread(n.file, n.text, at+1, format, args...))
}

// read reads all nodes and adds their pools. Mistakes are an error of type policyfile.Errors.
func (n *nodes) read() {
	root := member{}
	n.text = bytes.TrimPrefix(n.text, []byte(byteOrderMark))
	end, err := readJSON(n.file, n.text, &root.value, "give LibreQoS's network.json")
	switch root.at = end - int64(len(root.value)); {
	case err != nil:
		n.fail(err)
	case root.value[0] != '{':
		n.wrong(root.at, "this is not an object of nodes; give LibreQoS's network.json")
	default:
		n.roots = n.level(root)
		n.addPools(n.roots, [ways]policy.Within{}, 0)
	}
}

// level reads the nodes of an object. LibreQoS ignores other values, too.
func (n *nodes) level(of member) (all []*node) {
	for _, m := range of.members() {
		v := &node{name: oneLine(m.name), at: m.at, where: fmt.Sprintf("%s line %d", n.file, 1+bytes.Count(n.text[:m.at], []byte("\n")))}
		first := n.named[v.name]
		switch {
		case m.value[0] == '[':
			n.wrong(m.at, "%.60q is a list; write a node as an object with downloadBandwidthMbps and uploadBandwidthMbps", m.name)
		case m.value[0] != '{':
		case v.name == "":
			n.wrong(m.at, "a node has no name; write one such as Site_1")
		case first != nil && first.name == v.name:
			n.wrong(m.at, "node %.60q was in %s; give each node its own name", v.name, first.where)
		default:
			n.named[v.name] = v
			n.node(v, m)
			all = append(all, v)
		}
	}
	return all
}

func (n *nodes) node(v *node, of member) {
	rates := map[string]*speed{
		"downloadBandwidthMbps": &v.rates[down], "uploadBandwidthMbps": &v.rates[up],
		"downloadBandwidthMbpsMin": &v.least[down], "uploadBandwidthMbpsMin": &v.least[up],
	}
	for _, m := range of.members() {
		switch text := m.text(); {
		case text == "":
		case m.name == "children" && text[0] == '{':
			v.children = n.level(m)
		case rates[m.name] != nil && !plainNumber.MatchString(text):
			n.wrong(m.at, "%s of %.60q is no number of megabits per second; write one such as 25 or 2.5", m.name, v.name)
		case rates[m.name] != nil:
			r := map[bool]reason{true: noSuchGuarantee, false: noSuchRate}[strings.HasSuffix(m.name, "Min")]
			*rates[m.name] = n.speed(text, v.where, r, "%s for %q", m.name, v.name)
		case m.name == "virtual" && text == "true" || m.name == "type" && strings.EqualFold(text, "virtual"):
			v.virtual = true
		case m.name == "id" && n.ids[text] == nil:
			n.ids[text] = v
		case (m.name == "name" || m.name == "active_attachment_name") && n.named[oneLine(text)] == nil:
			n.named[oneLine(text)] = v
		}
	}
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
			n.wrong(v.at, "node %.60q is below %d nodes with rates, and at most %d can be above a subscriber; remove the rate of one",
				v.name, depth, policy.MaxDepth-1)
		}
		n.addPools(v.children, v.pool, below)
	}
}

// addPool adds the pool of a node for one way, unless it has no rate.
func (n *nodes) addPool(v *node, w way) {
	rate, above := v.rates[w], v.pool[w]
	if rate.Rate == 0 {
		if rate.zero {
			n.leave(zeroRate, v.where, "%q %v", v.name, w)
		}
		return
	}
	r := policy.Rule{
		Rate: rate.Rate, Capacity: policy.DefaultCapacity(rate.Rate), Within: above, Share: policy.Share{Kind: policy.ShareMember},
	}
	if above != "" {
		r.Guarantee = policy.Guarantee(min(v.least[w].Rate, rate.Rate))
	}
	if name := n.collector.addPool(v.name, " "+w.String(), r, v.where); name != "" {
		v.pool[w], v.limits = name, true
	}
}

// find returns the node of a name, else of an ID; nil for none.
func (n *nodes) find(name, id string) *node {
	if n == nil {
		return nil
	}
	return cmp.Or(n.named[oneLine(name)], n.ids[id])
}
