package leases

import (
	"fmt"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/cluster"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// leaseNews tells what becomes of leases: of each change once.
type leaseNews struct {
	say      func(string)
	idle     bool                      // there are no pools with a cluster
	leased   map[string]bool           // whether a pool has a lease
	lostAt   uint64                    // ns: when the store ceased to answer; 0 if it answers
	problem  string                    // why pools cannot be read; "" if they can
	statuses map[string]cluster.Status // of the last answer for a pool
	replaced uint64                    // ns: when another agent last acted for this host
	told     uint64                    // ns: when that was last told
	limits   map[string]string         // how the policies of other hosts limit a pool; "" for not at all
}

func newLeaseNews(say func(string)) *leaseNews {
	return &leaseNews{say: say, leased: map[string]bool{}, statuses: map[string]cluster.Status{}, limits: map[string]string{}}
}

func (n *leaseNews) tell(format string, args ...any) { n.say(fmt.Sprintf(format, args...)) }

// listed is what a word names: one or several.
func listed(word string, names []string) string {
	if len(names) > 1 {
		word += "s"
	}
	return word + " " + plain.List(plain.Lines(names))
}

// seen takes note of the pools with a cluster, as they are now.
func (n *leaseNews) seen(now uint64, pools []cluster.Pool) {
	n.problem = ""
	if idle := len(pools) == 0; idle != n.idle {
		if n.idle = idle; idle {
			n.tell("no pool has a cluster; waiting for one")
		}
	}
	was := n.leased
	n.leased = make(map[string]bool, len(pools))
	var got, lost []string
	for _, p := range pools {
		has := now < p.Lease.Until
		n.leased[p.Name] = has
		switch {
		case has && !was[p.Name]:
			got = append(got, p.Name)
		case !has && was[p.Name]:
			lost = append(lost, p.Name)
		}
	}
	if lost != nil {
		n.tell("%s: the lease ended, and the safe share is in force", listed("pool", lost))
	}
	if got != nil {
		n.tell("%s: a lease is in force", listed("pool", got))
	}
}

// failed tells why pools cannot be read.
func (n *leaseNews) failed(err error) {
	if text := plain.OneLine(err); text != n.problem {
		n.problem = text
		n.tell("cannot renew leases: %s", text)
	}
}

// leasesEnd says what happens without the store or the agent.
var leasesEnd = fmt.Sprintf("leases end within %v, those below the safe share within %v; then the safe shares are in force", cluster.Length, cluster.Rise)

// reached takes note of whether the store answers.
func (n *leaseNews) reached(now uint64, store string, err error) {
	switch {
	case err != nil && n.lostAt == 0:
		n.lostAt = now
		n.tell("cannot get leases from the store at %s: %s; %s", store, plain.OneLine(err), leasesEnd)
	case err == nil && n.lostAt != 0:
		n.tell("the store at %s gives leases again, after %v", store, time.Duration(now-n.lostAt).Round(time.Second))
		n.lostAt = 0
	}
}

// takeTurns is for how long another agent is of interest after it acted for this host: two of them take turns.
const takeTurns = uint64(time.Minute)

// heard takes note of what the store answered.
func (n *leaseNews) heard(now uint64, host string, calls []cluster.Call, answers []cluster.Answer) {
	changed := map[cluster.Status][]string{}
	remind := n.told == 0 || now >= n.told+takeTurns
	for i, c := range calls {
		id, status := c.Cluster+"\n"+c.Member, answers[i].Status
		was := n.statuses[id]
		if status == cluster.Replaced {
			if n.replaced = now; remind {
				n.told = now
				changed[status] = append(changed[status], c.Cluster)
			}
			continue
		}
		if c.Request.Rate == 0 {
			delete(n.statuses, id)
			delete(n.limits, id)
			continue
		}
		if status == cluster.Old || n.replaced != 0 && now < n.replaced+takeTurns && status == cluster.Quiet {
			continue // two agents with one name take their leases from each other
		}
		if status == cluster.OK {
			n.answered(id, c, answers[i])
		}
		if n.statuses[id] = status; status != was && (status != cluster.Quiet || c.Request.Granted == 1) {
			changed[status] = append(changed[status], c.Cluster)
		}
	}
	clusters := func(s cluster.Status) string {
		return listed("cluster", slices.Compact(slices.Sorted(slices.Values(changed[s]))))
	}
	if changed[cluster.Replaced] != nil {
		n.tell("another agent acts for host %s in %s; give each host a name of its own with --host", plain.Line(host), clusters(cluster.Replaced))
	}
	if changed[cluster.Newer] != nil {
		n.tell("the store has records of a newer version for %s; install a newer build here", clusters(cluster.Newer))
	}
	if changed[cluster.Broken] != nil {
		n.tell("the key of %s in the store holds something else; delete it there, or use another --prefix", clusters(cluster.Broken))
	}
	if changed[cluster.Quiet] != nil {
		n.tell("the store was emptied or may have lost writes; leases for %s come again when those from before have ended", clusters(cluster.Quiet))
	}
}

// answered takes note of what a pool does not get because of the policies of other hosts.
func (n *leaseNews) answered(id string, c cluster.Call, a cluster.Answer) {
	var why string
	switch q := &c.Request; {
	case a.Rate < q.Rate:
		why = fmt.Sprintf("the policy of another host has a rate of %v, and that is in force for all", policy.Rate(a.Rate))
	case a.Goal < 0.99*max(q.Floor, q.Share):
		why = "floors and fixed shares of all hosts, and what is reserved for silent ones, are together more than the rate, so this host gets less than its own"
	}
	if why != "" && why != n.limits[id] {
		n.tell("cluster %s: %s", plain.Line(c.Cluster), why)
	}
	n.limits[id] = why
}

// stops tells what becomes of leases without the renewer.
func (n *leaseNews) stops() {
	for _, has := range n.leased {
		if has {
			n.tell("stopped; %s", leasesEnd)
			return
		}
	}
}
