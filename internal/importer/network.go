package importer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/shapectl/shapectl/internal/policyfile"
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

// nodes reads a network.json.
type nodes struct {
	*collector
	file  string
	text  []byte
	json  *json.Decoder
	roots []*node
	named map[string]*node // by name, and by other names where no node has it as name
	ids   map[string]*node
}

// A misplaced error is for a place in the text.
type misplaced struct {
	at  int64
	why string
}

func (m misplaced) Error() string { return m.why }

func misplace(at int64, format string, args ...any) error {
	return misplaced{at, fmt.Sprintf(format, args...)}
}

// read reads all nodes and adds their pools. Mistakes are an error of type policyfile.Errors.
func (n *nodes) read() error {
	n.text = bytes.TrimPrefix(n.text, []byte(byteOrderMark))
	n.json = json.NewDecoder(bytes.NewReader(n.text))
	n.json.UseNumber()
	err := n.all()
	if err == nil {
		err = n.addPools(n.roots, [ways]policy.Within{}, 0)
	}
	if err == nil {
		return nil
	}
	at := n.next()
	if m, ok := errors.AsType[misplaced](err); ok {
		at = m.at
	} else if _, ok := errors.AsType[*json.SyntaxError](err); ok {
		err = fmt.Errorf("this is not JSON: %w; give LibreQoS's network.json", err)
	} else {
		err = errors.New("the text ends within an object; is the file cut off?")
	}
	line, column := position(n.text, at)
	return policyfile.Errors{{File: n.file, Line: line, Column: column, Message: err.Error()}}
}

// next returns where the next token begins.
func (n *nodes) next() int64 {
	at := n.json.InputOffset()
	for ; at < int64(len(n.text)) && strings.IndexByte(" \t\r\n,:", n.text[at]) >= 0; at++ {
	}
	return at
}

// all reads the file.
func (n *nodes) all() (err error) {
	at := n.next()
	switch start, err := n.json.Token(); {
	case err != nil:
		return err
	case start != json.Delim('{'):
		return misplace(at, "this is not an object of nodes; give LibreQoS's network.json")
	}
	if n.roots, err = n.level(); err != nil {
		return err
	}
	at = n.next()
	if _, err := n.json.Token(); err != io.EOF {
		return misplace(at, "something follows the last node; remove it")
	}
	return nil
}

// level reads the nodes of an object that was begun.
func (n *nodes) level() (all []*node, err error) {
	for n.json.More() {
		at := n.next()
		key, err := n.json.Token()
		if err != nil {
			return nil, err
		}
		name, _ := key.(string)
		line, _ := position(n.text, at)
		v := &node{name: oneLine(name), at: at, where: fmt.Sprintf("%s line %d", n.file, line)}
		switch start, err := n.json.Token(); {
		case err != nil:
			return nil, err
		case start == json.Delim('['):
			return nil, misplace(at, "%.60q is a list; write a node as an object with downloadBandwidthMbps and uploadBandwidthMbps", name)
		case start != json.Delim('{'):
			continue // LibreQoS ignores it, too
		}
		if v.name == "" {
			return nil, misplace(at, "a node has no name; write one such as Site_1")
		}
		if first := n.named[v.name]; first != nil && first.name == v.name {
			return nil, misplace(at, "node %.60q was in %s; give each node its own name", v.name, first.where)
		}
		n.named[v.name] = v
		if err := n.node(v); err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	_, err = n.json.Token()
	return all, err
}

// node reads an object that was begun.
func (n *nodes) node(v *node) (err error) {
	rates := map[string]*speed{
		"downloadBandwidthMbps": &v.rates[down], "uploadBandwidthMbps": &v.rates[up],
		"downloadBandwidthMbpsMin": &v.least[down], "uploadBandwidthMbpsMin": &v.least[up],
	}
	for n.json.More() {
		key, err := n.json.Token()
		if err != nil {
			return err
		}
		name, _ := key.(string)
		at := n.next()
		if name == "children" && at < int64(len(n.text)) && n.text[at] == '{' {
			if _, err = n.json.Token(); err == nil {
				v.children, err = n.level()
			}
			if err != nil {
				return err
			}
			continue
		}
		var value any
		if err := n.json.Decode(&value); err != nil {
			return err
		}
		text := strings.TrimSpace(fmt.Sprint(value))
		switch {
		case value == nil || text == "":
		case rates[name] != nil:
			if !plainNumber.MatchString(text) {
				return misplace(at, "%s of %.60q is no number of megabits per second; write one such as 25 or 2.5", name, v.name)
			}
			*rates[name] = n.speed(text, fmt.Sprintf("%s for %q", name, v.name), v.where, strings.HasSuffix(name, "Min"))
		case name == "virtual":
			v.virtual = v.virtual || value == true
		case name == "type":
			v.virtual = v.virtual || strings.EqualFold(text, "virtual")
		case name == "id" && n.ids[text] == nil:
			n.ids[text] = v
		case (name == "name" || name == "active_attachment_name") && n.named[oneLine(text)] == nil:
			n.named[oneLine(text)] = v
		}
	}
	_, err = n.json.Token()
	return err
}

// addPools adds the pools of nodes, below those of the nodes above.
func (n *nodes) addPools(level []*node, above [ways]policy.Within, depth int) error {
	for _, v := range level {
		if v.pool = above; !v.virtual {
			for w := range ways {
				n.addPool(v, w)
			}
		}
		below := depth
		if v.limits {
			below++
		}
		// A subscriber may have a pool of its own.
		if below >= policy.MaxDepth {
			return misplace(v.at, "node %.60q is below %d nodes with rates, and at most %d can be above a subscriber; remove the rate of one",
				v.name, depth, policy.MaxDepth-1)
		}
		if err := n.addPools(v.children, v.pool, below); err != nil {
			return err
		}
	}
	return nil
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
	if least := v.least[w]; least.Rate != 0 && above != "" {
		r.Guarantee = policy.Guarantee(min(least.Rate, rate.Rate))
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
