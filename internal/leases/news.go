package leases

import (
	"fmt"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/cluster"
	"github.com/shapectl/shapectl/internal/plain"
)

// leaseNews tells what becomes of leases: of each change once.
type leaseNews struct {
	*Keeper
	leased   map[string]bool           // whether a pool has a lease
	lostAt   uint64                    // ns: when the store ceased to answer; 0 if it answers
	statuses map[string]cluster.Status // of the last answer for a pool
	replaced uint64                    // ns: when it was told that another process acts for this host
}

// listed is what a word names: one or several.
func listed(word string, names []string) string {
	if len(names) > 1 {
		word += "s"
	}
	return word + " " + plain.List(plain.Lines(names))
}

// seen takes note of the pools with a cluster, as they are now.
func (n *leaseNews) seen(now uint64, pools []cluster.Pool) {
	idle := ""
	if len(pools) == 0 {
		idle = "no pool has a cluster; waiting for one"
	}
	n.once("pools", idle)
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

// leasesEnd says what happens without the store or serve.
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

// takeTurns is for how long another process is of interest after it acted for this host: two of them take turns.
const takeTurns = uint64(time.Minute)

// statusNews are what statuses mean, of clusters that follow.
var statusNews = []struct {
	cluster.Status
	says string
}{
	{cluster.Replaced, "another process acts for this host in %s; give each host a name of its own with --cluster-host"},
	{cluster.Newer, "the store has records of a newer version for %s; install a newer build here"},
	{cluster.Broken, "the key of %s in the store holds something else; delete it there, or use another --prefix"},
	{cluster.Quiet, "the store was emptied or may have lost writes; leases for %s come again when those from before have ended"},
}

// heard takes note of what the store answered.
func (n *leaseNews) heard(now uint64, calls []cluster.Call, answers []cluster.Answer) {
	changed := map[cluster.Status][]string{}
	taken := n.replaced != 0 && now < n.replaced+takeTurns // by another process, lately
	for i, c := range calls {
		id, status := c.Cluster+"\n"+c.Member, answers[i].Status
		was := n.statuses[id]
		switch {
		case status == cluster.Replaced:
			if !taken {
				n.replaced = now
				changed[status] = append(changed[status], c.Cluster)
			}
			continue
		case c.Request.Rate == 0:
			delete(n.statuses, id)
			continue
		case status == cluster.Old, status == cluster.Quiet && taken:
			continue // two processes with one name take their leases from each other
		}
		if n.statuses[id] = status; status != was && (status != cluster.Quiet || c.Request.Granted == 1) {
			changed[status] = append(changed[status], c.Cluster)
		}
	}
	for _, s := range statusNews {
		if clusters := changed[s.Status]; clusters != nil {
			n.tell(s.says, listed("cluster", slices.Compact(slices.Sorted(slices.Values(clusters)))))
		}
	}
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
