package cluster

import (
	"math"
	"slices"
)

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
	known, seen, moved                                float64
	members                                           map[string]simMember
}

type simMember struct {
	order, proven, claim, safe, rate, weight, floor, share, wants, demand, speaks float64
	boot, turn, seq, sent, counted, lost, lease                                   float64
	anchors                                                                       []simAnchor
}

type simAnchor struct{ order, sent, heard float64 }

const (
	leaseUs, silentUs, earlyUs = 2e6, 3.5e6, 5e5
	anchors, spacingUs         = 6, 1e6
	slowUs, fastUs             = 1e6, 200e3
	never                      = 1 << 53
	floors                     = 100
	stir                       = 3
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

func (c *simCluster) lookBack(anchors []simAnchor, sent float64) (horizon float64) {
	horizon, spans := never, false
	for _, a := range anchors {
		if sent-a.heard >= leaseUs {
			c.lapsed = max(c.lapsed, a.order)
		}
		if sent-a.heard >= leaseUs-earlyUs {
			c.early = max(c.early, a.order)
		}
		if sent-a.sent > silentUs {
			spans = true
		} else {
			horizon = min(horizon, a.order)
		}
	}
	if spans && horizon < never {
		c.silent = max(c.silent, horizon-1)
	}
	return horizon
}

func (s *simStore) renew(key, name string, q Request) Answer {
	c := s.clusters[key]
	refuse := func(status Status) Answer { return Answer{Status: status, Epoch: c.epoch, Again: slowUs} }
	if c != nil && c.version > Version {
		return refuse(Newer)
	}
	if c == nil || c.server != s.server || q.Epoch > c.epoch {
		epoch := q.Epoch
		if c != nil {
			epoch = max(epoch, c.epoch)
		}
		c = &simCluster{server: s.server, epoch: epoch + 1, members: map[string]simMember{}}
		s.clusters[key] = c
	}
	before, known := c.members[name]
	turn, has, safe, proven, lost := q.Turn, q.Has, q.Safe, 0.0, 0.0
	var list []simAnchor
	if known {
		same := turn == before.turn
		if turn != 0 && !same {
			return refuse(Replaced)
		}
		if same && q.Seq <= before.seq {
			return refuse(Old)
		}
		if q.Boot == before.boot {
			list = slices.Clone(before.anchors)
		}
		counted := before.counted
		if before.order <= c.scanned {
			counted = before.counts(c.scannedLapsed, c.scannedSilent)
		}
		c.claims -= counted
		c.safes -= before.safe
		if same {
			proven, lost = before.proven, before.lost
			if q.Answered == before.seq {
				if lost > 0 {
					c.seen += q.Safe
					lost = 0
				}
				if before.lease >= 0 {
					proven = before.order
				}
				if n := len(list); n == 0 || q.Sent-list[n-1].sent >= spacingUs {
					if n == anchors {
						list = slices.Delete(list, 0, 1)
					}
					list = append(list, simAnchor{before.order, before.sent, q.Heard})
				}
			}
		} else {
			turn = before.turn + 1
			has, safe = max(has, counted), max(safe, before.safe)
		}
	} else {
		turn = max(turn, 1)
		c.known = max(c.known, q.Known)
		if q.Epoch != c.epoch {
			lost = q.Granted
		}
		c.count++
	}
	c.order++
	horizon := c.lookBack(list, q.Sent)
	if q.Rate == 0 {
		delete(c.members, name)
		if !known {
			c.seen += q.Safe
		}
		c.count--
		c.changed++
		return Answer{Status: OK, Turn: turn, Epoch: c.epoch, Again: slowUs, Members: c.count, Rate: c.rate}
	}
	m := simMember{
		order: c.order, proven: proven, claim: has, safe: safe, rate: q.Rate, weight: q.Weight, floor: q.Floor, share: q.Share,
		wants: q.Wants, demand: q.Demand, speaks: q.Speaks, boot: q.Boot, turn: turn, seq: q.Seq, sent: q.Sent, lost: lost, lease: -1,
		anchors: list,
	}
	c.asked++
	if m.hasChanged(before, known) {
		c.changed++
	}
	if c.rate == 0 || c.lapsed >= c.oldest || c.silent >= c.oldestProven ||
		c.oldestProven < horizon && horizon < never && c.lapsed > 0 || c.changed > 0 && c.asked*8 >= c.count {
		c.scan(name, &m)
	}
	all := max(0, c.rate-c.missing())
	out := Answer{Status: OK, Turn: turn, Epoch: c.epoch, Again: slowUs, Goal: c.goalOf(&m)}
	if c.lapsed == 0 {
		out.Status, out.Again = Quiet, fastUs
	} else {
		granted := c.equal
		if q.Wants > 0 {
			granted = math.Floor(q.Wants * c.wanted)
		}
		granted = max(0, min(granted, all-c.safes))
		if lost > 0 {
			granted = min(granted, safe)
		}
		out.Lease = out.Goal
		if out.Lease > has {
			out.Lease = min(out.Lease, max(2*has, safe, c.leastOf(&m)))
		} else if q.Use > has/2 {
			out.Lease = max(out.Lease, math.Floor(has/2))
		}
		if c.oldestProven < horizon {
			out.Lease = min(out.Lease, granted)
		}
		out.Lease = max(0, min(out.Lease, all-c.claims))
		if out.Lease < has && differs(out.Lease, has, 1.02) || differs(out.Lease, out.Goal, 1.02) || granted < safe || known && differs(m.demand, before.demand, 1.125) ||
			c.order-c.moved < stir*c.count {
			out.Again = fastUs
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
	c.members[name] = m
	out.Known, out.Members, out.Rate = c.safes+c.missing(), c.count, c.rate
	return out
}
