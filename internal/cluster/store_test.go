package cluster

import "math"

// A simStore is store.lua in Go, for simulations. TestStoreAsInLua compares them.
type simStore struct {
	server   string // changes as if Redis was restarted, or a replica took over
	clusters map[string]*simCluster
}

type simCluster struct {
	server                                            string
	version, epoch, order                             float64
	lapsed, early, silent                             float64
	scanned, scannedLapsed, scannedSilent             float64
	oldest, oldestProven, asked, changed, count, rate float64
	claims, safes                                     float64
	level, spare, fixed, pressed, equal, wanted       float64
	known, seen, moved, unseen                        float64
	day, spent, spentKnown, spentSeen                 float64
	members                                           map[string]simMember
}

type simMember struct {
	order, proven, claim, safe, rate, weight, floor, share, wants, demand, speaks float64
	turn, seq, counted, lost, lease                                               float64
	day, instance, earlier, limit                                                 float64
}

const (
	slowUs, fastUs, ackUs = 1e6, 200e3, 20e3
	many                  = 100
	never                 = 1 << 53
	floors                = 100
	leastRate             = 8000
	stir                  = 4
)

func (m *simMember) counts(lapsed, silent float64) float64 {
	if m.order <= lapsed || m.claim < m.safe && m.proven <= silent {
		return m.safe
	}
	return m.claim
}

func (c *simCluster) leastOf(m *simMember) float64 {
	if m.floor > 0 {
		return m.floor
	}
	return max(leastRate, math.Floor(c.rate/c.count/floors))
}

func (c *simCluster) soon() float64 { return min(slowUs, math.Floor(fastUs*max(1, c.count/many))) }

func (c *simCluster) scans() float64 {
	if c.count > many {
		return 2
	}
	return 8
}

func (c *simCluster) missing() float64 { return max(0, c.known-c.seen) }

type simPart struct{ weight, least, demand float64 }

func findLevel(list []simPart, free, weights float64) float64 {
	low, high, level := 0.0, free, free/weights
	for range 60 {
		sum, open := 0.0, 0.0
		for _, p := range list {
			switch part := p.weight * level; {
			case part >= p.demand:
				sum += p.demand
			case part <= p.least:
				sum += p.least
			default:
				open += p.weight
			}
		}
		rest := free - sum - float64(open*level)
		if rest >= 0 {
			low = level
		} else {
			high = level
		}
		if rest > -1 && rest < 1 {
			return level
		}
		if step := level + rest/open; open > 0 && step > low && step < high {
			level = step
		} else {
			level = (low + high) / 2
		}
	}
	return low
}

func (c *simCluster) scan(name string, own *simMember) {
	others := make([]*simMember, 0, len(c.members)+1)
	c.count, c.rate, c.claims, c.safes, c.oldest, c.oldestProven = 1, own.rate, 0, 0, never, never
	speaks, wants, wanting := own.speaks, own.wants, 0.0
	if own.wants > 0 {
		wanting = 1
	}
	for other, m := range c.members {
		if other == name {
			continue
		}
		others = append(others, &m)
		c.count++
		c.safes += m.safe
		c.claims += m.counts(c.lapsed, c.silent)
		if m.wants > 0 {
			wants += m.wants
			wanting++
		}
		if m.order > c.lapsed {
			c.oldest = min(c.oldest, m.order)
			if m.claim < m.safe && m.proven > c.silent {
				c.oldestProven = min(c.oldestProven, m.proven)
			}
			c.rate = min(c.rate, m.rate)
			speaks = min(speaks, m.speaks)
		}
	}
	c.version = max(c.version, min(Version, speaks))
	all := max(0, c.rate-c.missing())
	free, fixed, least, demand, weights := all, 0.0, 0.0, 0.0, 0.0
	var list []simPart
	for _, m := range append(others, own) {
		switch {
		case m != own && m.order <= c.early:
			free -= max(m.counts(c.lapsed, c.silent), m.safe)
		case m.share > 0:
			fixed += m.share
		default:
			p := simPart{weight: m.weight, least: c.leastOf(m)}
			p.demand = max(m.demand, p.least)
			list = append(list, p)
			least, demand, weights = least+p.least, demand+p.demand, weights+p.weight
		}
	}
	free = max(0, free)
	c.fixed = 1
	if fixed > free {
		c.fixed = free / fixed
	}
	free = max(0, free-math.Floor(fixed*c.fixed))
	c.pressed = 1
	if least > free {
		c.pressed = free / least
	}
	level := c.level
	c.level, c.spare = never, 0
	switch {
	case least > free:
		c.level = 0
	case demand > free:
		c.level = findLevel(list, free, weights)
	case weights > 0:
		c.spare = (free - demand) / weights
	}
	if differs(c.level, level, 1.02) {
		c.moved = c.order
	}
	c.wanted = 1
	if wants > all {
		c.wanted = all / wants
	}
	c.equal = 0
	if wanting < c.count {
		c.equal = math.Floor(max(0, all-wants) / (c.count - wanting))
	}
	c.scanned, c.scannedLapsed, c.scannedSilent, c.asked, c.changed = c.order, c.lapsed, c.silent, 0, 0
}

func (c *simCluster) goalOf(m *simMember) float64 {
	if m.share > 0 {
		return math.Floor(m.share * c.fixed)
	}
	least := c.leastOf(m) * c.pressed
	demand := max(m.demand, least)
	if c.level == never {
		return math.Floor(demand + float64(m.weight*c.spare))
	}
	return math.Floor(max(least, min(demand, m.weight*c.level)))
}

func differs(a, b, by float64) bool { return a > float64(b*by) || b > float64(a*by) }

func (m *simMember) hasChanged(before simMember, known bool) bool {
	return !known || m.rate != before.rate || m.weight != before.weight || m.floor != before.floor || m.share != before.share ||
		m.wants != before.wants || m.speaks != before.speaks || differs(m.demand, before.demand, 1.02)
}

func (c *simCluster) spentUnseen() float64 { return max(0, c.spentKnown-c.spentSeen) }

func (c *simCluster) takeOut(before simMember, known bool, q Request) float64 {
	if q.Day > c.day {
		if c.spentKnown = c.spentUnseen(); c.missing() == 0 {
			c.spentKnown = 0
		}
		c.day, c.spent, c.spentSeen = q.Day, 0, 0
		for _, m := range c.members {
			c.spent += m.limit
		}
	}
	if q.Epoch != c.epoch && q.Day == c.day {
		c.spentKnown = max(c.spentKnown, q.Spent)
	}
	if !known {
		return 0
	}
	earlier := 0.0
	if before.day == c.day {
		earlier = before.earlier
	}
	c.spent -= earlier + before.limit
	if q.Instance == before.instance {
		return earlier
	}
	if earlier += before.limit; q.Limit == 0 {
		earlier -= min(q.Used, before.limit)
	}
	return earlier
}

func (c *simCluster) limitOf(q Request, earlier float64, quiet bool) float64 {
	if quiet || q.Day != c.day || q.Quota == 0 {
		return q.Limit
	}
	left := q.Quota - c.spent - c.spentUnseen() - earlier - q.Used
	wants := max(q.Use/8*600, q.Rate/8*2)
	return q.Used + max(0, math.Floor(min(left/(2*c.count), wants)))
}

func (s *simStore) renew(key, name string, q Request) Answer {
	c := s.clusters[key]
	refuse := func(status Status) Answer {
		return Answer{Status: status, Epoch: c.epoch, Order: c.order, Members: c.count, Rate: c.rate, Again: slowUs, Spent: c.spent + c.spentUnseen(), Day: c.day}
	}
	if c != nil && c.version > Version {
		return refuse(Newer)
	}
	if c == nil || c.server != s.server {
		c = &simCluster{server: s.server, epoch: q.New, members: map[string]simMember{}}
		s.clusters[key] = c
	}
	before, known := c.members[name]
	turn, has, safe, proven, lost, horizon := q.Turn, q.Has, q.Safe, 0.0, 0.0, float64(never)
	if known {
		same := turn == before.turn
		lost = before.lost
		if turn != 0 && !same {
			return refuse(Replaced)
		}
		if same && q.Seq <= before.seq {
			return refuse(Old)
		}
		counted := before.counted
		if before.order <= c.scanned {
			counted = before.counts(c.scannedLapsed, c.scannedSilent)
		}
		c.claims -= counted
		c.safes -= before.safe
		if same {
			proven = before.proven
			if q.Answered == before.seq {
				if lost > 0 {
					c.seen += q.Safe
					c.unseen -= lost
					c.changed++
					lost = 0
					if q.Limit > 0 {
						c.spentSeen += max(q.Used, q.Limit)
					}
				}
				if before.lease >= 0 {
					proven = before.order
				}
			}
		} else {
			turn = q.New
			has, safe = max(has, counted), max(safe, before.safe)
		}
	} else {
		if turn == 0 {
			turn = q.New
		}
		if q.Epoch != c.epoch {
			c.known = max(c.known, q.Known)
			if q.Granted > 0 {
				c.unseen, lost = c.unseen+safe, safe
			}
		}
		c.count++
	}
	c.order++
	if q.Epoch == c.epoch {
		c.lapsed, c.early, c.silent = max(c.lapsed, q.Lapsed), max(c.early, q.Early), max(c.silent, q.Silent)
		horizon = q.Horizon
	}
	if q.Rate == 0 {
		delete(c.members, name)
		c.unseen -= lost
		c.count--
		c.changed++
		if c.count == 0 && c.missing() == 0 {
			delete(s.clusters, key)
		}
		out := refuse(OK)
		out.Turn = turn
		return out
	}
	earlier := c.takeOut(before, known, q)
	m := simMember{
		day: c.day, instance: q.Instance, earlier: earlier,
		order: c.order, proven: proven, claim: has, safe: safe, rate: q.Rate, weight: q.Weight, floor: q.Floor, share: q.Share,
		wants: q.Wants, demand: q.Demand, speaks: q.Speaks, turn: turn, seq: q.Seq, lost: lost, lease: -1,
	}
	c.asked++
	if m.hasChanged(before, known) {
		c.changed++
	}
	if c.rate == 0 || c.lapsed >= c.oldest || c.silent >= c.oldestProven ||
		c.oldestProven < horizon && horizon < never && c.lapsed > 0 || c.changed > 0 && c.asked*c.scans() >= c.count {
		c.scan(name, &m)
	}
	all := max(0, c.rate-c.missing())
	out := Answer{Status: OK, Turn: turn, Epoch: c.epoch, Order: c.order, Again: slowUs, Goal: c.goalOf(&m)}
	if c.lapsed == 0 {
		out.Status, out.Again = Quiet, c.soon()
	} else {
		granted := c.equal
		if q.Wants > 0 {
			granted = math.Floor(q.Wants * c.wanted)
		}
		granted = max(0, min(granted, all-c.safes))
		if lost > 0 {
			granted = q.Safe
		}
		out.Lease = max(out.Goal, min(has, q.Keeps))
		if c.oldestProven < horizon {
			out.Lease = min(out.Lease, granted)
		}
		out.Lease = max(0, min(out.Lease, all-c.claims))
		switch lowered := out.Lease < has && differs(out.Lease, has, 1.02); {
		case lowered && max(out.Lease, leastRate) < has && !(known && before.lease == out.Lease):
			out.Again = ackUs
		case lowered, differs(out.Lease, out.Goal, 1.02), granted < safe, known && differs(m.demand, before.demand, 1.125),
			c.order-c.moved < stir*c.count:
			out.Again = c.soon()
		}
		m.lease, m.claim = out.Lease, max(has, out.Lease)
		m.safe = max(safe, granted)
		safe = granted
	}
	out.Safe = safe
	m.counted = m.counts(c.lapsed, c.silent)
	c.claims += m.counted
	c.safes += m.safe
	if m.counted < m.safe {
		c.oldestProven = min(c.oldestProven, proven)
	}
	out.Limit = c.limitOf(q, earlier, out.Status == Quiet || lost > 0)
	m.limit = max(q.Used, q.Limit, out.Limit)
	if known && turn != before.turn && q.Instance == before.instance {
		m.limit = max(m.limit, before.limit)
	}
	c.spent += earlier + m.limit
	out.Spent, out.Day = c.spent+c.spentUnseen(), c.day
	c.members[name] = m
	out.Known, out.Members, out.Rate = c.safes+max(0, c.missing()-c.unseen), c.count, c.rate
	return out
}
