package policy

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"strings"
)

// A Tree is the pools of a policy, with what draws from each.
type Tree struct {
	Nodes    []*Node // by name
	byName   map[Within]*Node
	problems []PoolError
}

// A Node is a pool of a Tree.
type Node struct {
	Pool    *Rule
	Above   *Node    // the pool that it draws from; nil for none
	Below   []*Node  // the pools directly within it, by name
	Rules   []Member // the rules directly within it
	Depth   int      // the number of pools above it
	Members Rate     // what the guarantees within it add up to

	walk int // the number of the walk that has visited it, from 1
}

// A Member is a rule and its table, or a pool without a table.
type Member struct {
	Table *Table
	Rule  *Rule
}

// A PoolError is why a rule or pool cannot draw from its pool.
type PoolError struct {
	Member
	Message string // begins with the name of an option
}

func (e PoolError) Error() string {
	who := fmt.Sprintf("pool %q", e.Rule.Label.Name)
	if t := e.Table; t != nil {
		who = fmt.Sprintf("%s %v %v", t.Device, t.Direction, CIDR(e.Rule.Prefix))
	}
	return who + ": " + e.Message
}

// Above returns the pools that rules are within, and those above these, each once. find finds a pool by its name.
func Above(rules []Rule, find func(Within) (Rule, bool)) (pools []Rule) {
	found := map[Within]bool{}
	for i := range rules {
		for within := rules[i].Within; within != "" && !found[within]; {
			p, ok := find(within)
			if !ok {
				break
			}
			found[within] = true
			pools, within = append(pools, p), p.Within
		}
	}
	return pools
}

// CheckPools returns the first problem of the pools of tables, which are all tables of a namespace.
func CheckPools(tables []Table) error {
	if problems := NewTree(tables).Problems(); len(problems) > 0 {
		return problems[0]
	}
	return nil
}

// NewTree makes a tree, whose Problems say what is wrong with it. It refers to the rules of tables, which must
// not move.
func NewTree(tables []Table) *Tree {
	t := &Tree{byName: map[Within]*Node{}}
	for i := range tables {
		if tables[i].IsPools() {
			t.addPools(tables[i].Rules)
		}
	}
	for i := range tables {
		if table := &tables[i]; !table.IsPools() {
			for j := range table.Rules {
				t.Add(table, &table.Rules[j])
			}
		}
	}
	return t
}

// Find returns a pool, or nil.
func (t *Tree) Find(name string) *Node { return t.byName[Within(name)] }

// Add adds a rule to its pool. A rule that is in no pool is left out.
func (t *Tree) Add(table *Table, r *Rule) {
	if r.Within == "" {
		return
	}
	n := t.byName[r.Within]
	if n == nil {
		t.missing(Member{table, r})
		return
	}
	n.Rules = append(n.Rules, Member{table, r})
	t.checkCluster(n, Member{table, r})
	n.promise(r)
}

func (t *Tree) problem(m Member, format string, args ...any) {
	t.problems = append(t.problems, PoolError{Member: m, Message: fmt.Sprintf(format, args...)})
}

func (t *Tree) missing(m Member) {
	t.problem(m, "within %q: there is no such pool; make it first, or name another one", m.Rule.Within)
}

func (t *Tree) addPools(pools []Rule) {
	for i := range pools {
		n := &Node{Pool: &pools[i]}
		t.Nodes = append(t.Nodes, n)
		t.byName[Within(n.Pool.Label.Name)] = n
	}
	slices.SortFunc(t.Nodes, func(a, b *Node) int { return cmp.Compare(a.Pool.Label.Name, b.Pool.Label.Name) })
	for _, n := range t.Nodes {
		if n.Above = t.byName[n.Pool.Within]; n.Above == nil && n.Pool.Within != "" {
			t.missing(Member{Rule: n.Pool})
		}
	}
	t.cutCycles()
	clusters := map[ClusterName]*Rule{}
	var order []*Node // pools before those within them
	for _, n := range t.Nodes {
		name := n.Pool.Cluster.Name
		if other := clusters[name]; other != nil {
			t.problem(Member{Rule: n.Pool}, "cluster %q is that of pool %s, too, and has one pool on each host; put one of them within the other",
				string(name), quoteIfNeeded(other.Label.Name))
		} else if name != "" {
			clusters[name] = n.Pool
		}
		if n.Above == nil {
			order = append(order, n)
		} else {
			n.Above.Below = append(n.Above.Below, n)
			n.Above.promise(n.Pool)
			t.checkCluster(n.Above, Member{Rule: n.Pool})
		}
	}
	for i := 0; i < len(order); i++ {
		n := order[i]
		for _, below := range n.Below {
			below.Depth = n.Depth + 1
		}
		order = append(order, n.Below...)
		if n.Depth == MaxDepth {
			t.problem(Member{Rule: n.Pool}, "within %q makes a chain of %d pools, and at most %d are allowed; leave some of them out",
				n.Pool.Within, MaxDepth+1, MaxDepth)
		}
	}
}

// checkCluster reports a guarantee of a member of n that would pass the lease of a pool.
func (t *Tree) checkCluster(n *Node, m Member) {
	for ; n != nil && m.Rule.Guarantee != 0; n = n.Above {
		if n.Pool.Cluster.Name != "" {
			t.problem(m, "guarantee %v is within pool %s, whose rate depends on other hosts; leave it out, or give the pool no cluster",
				m.Rule.Guarantee, quoteIfNeeded(n.Pool.Label.Name))
			return
		}
	}
}

// mostPromised is what larger sums are taken for.
const mostPromised Rate = 1e18

// cutCycles reports cycles, and makes the pool with which each was found one that is within no pool.
func (t *Tree) cutCycles() {
	for i, first := range t.Nodes {
		n := first
		for ; n != nil && n.walk == 0; n = n.Above {
			n.walk = i + 1
		}
		if n == nil || n.walk != i+1 {
			continue
		}
		names := []string{quoteIfNeeded(n.Pool.Label.Name)}
		for at := n.Above; at != n && len(names) < MaxDepth; at = at.Above {
			names = append(names, quoteIfNeeded(at.Pool.Label.Name))
		}
		names = append(names, names[0])
		t.problem(Member{Rule: n.Pool}, "within %q makes a cycle: %s; take one of them out", n.Pool.Within, strings.Join(names, " within "))
		n.Above = nil
	}
}

// promised is what a pool keeps for a rule or pool within it.
func (r *Rule) promised() Rate {
	high, low := bits.Mul64(uint64(r.Guarantee), uint64(max(r.Members, 1)))
	if high > 0 {
		return mostPromised
	}
	return min(Rate(low), mostPromised)
}

// keepers are the pools that have to keep what is promised to a member of n: up to the first one that has a guarantee itself,
// which is counted instead.
func (n *Node) keepers(yield func(*Node) bool) {
	for ; n != nil && yield(n) && n.Pool.Guarantee == 0; n = n.Above {
	}
}

// promise counts the guarantee of a member.
func (n *Node) promise(member *Rule) {
	if promised := member.promised(); promised != 0 {
		for keeper := range n.keepers {
			keeper.Members = min(keeper.Members+promised, mostPromised)
		}
	}
}

// Problems lists what is wrong: pools that do not exist, cycles, too many pools above another, and guarantees
// that a pool cannot keep.
func (t *Tree) Problems() []PoolError {
	all := t.problems[:len(t.problems):len(t.problems)]
	for _, n := range t.Nodes {
		if p := n.noRoom(); p != nil {
			all = append(all, *p)
		}
	}
	return all
}

// noRoom says that the pool cannot keep the guarantees within it; nil if it can.
func (n *Node) noRoom() *PoolError {
	what, most := "rate", n.Pool.Rate
	if n.Pool.Guarantee != 0 {
		what, most = "guarantee", Rate(n.Pool.Guarantee)
	}
	if lowest := n.Pool.Adapt.Min; lowest != 0 && lowest < most {
		what, most = "adapt-min", lowest
	}
	if n.Members <= most {
		return nil
	}
	sum := n.Members.String()
	if n.Members >= mostPromised {
		sum = "more than " + mostPromised.String()
	}
	return &PoolError{Member{Rule: n.Pool}, fmt.Sprintf(
		"%s %v is less than the guarantees within the pool, which add up to %s; raise it, or lower them", what, most, sum)}
}
