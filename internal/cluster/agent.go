package cluster

import (
	"cmp"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	shapemaps "github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Pool is a pool of this host that belongs to a cluster. Rates are in bits per second.
type Pool struct {
	Name, Cluster   string
	Rate            uint64 // of the cluster
	Weight          uint64
	Floor           uint64 // 0 for the default
	Share           uint64 // a fixed lease; 0 for one by demand
	Wants           uint64 // the safe share by the policy; 0 for an equal part
	Lease           shapemaps.Lease
	Passed, Refused uint64 // bytes since the pool exists
	Quota           shapemaps.ClusterQuota
}

// An Agent asks for the leases of a host's pools. It keeps no lease itself: what is in force is in the pools.
type Agent struct {
	host     string
	random   *rand.Rand
	sessions map[session]*state
	looked   uint64 // when it last saw the pools, in ns on the monotonic clock
}

// A session is what an agent has with the store for one pool.
type session struct{ cluster, pool string }

// A state is that of a session. Times are in ns on the monotonic clock.
type state struct {
	turn, seq, epoch float64
	known            float64 // 0 if only the lease says it
	sent             uint64  // when the last request was
	answers          []past  // of this epoch, not much older than silence
	answered         float64
	due              uint64
	waits            bool // for an answer
	fails            int  // requests without an answer since the last one that had one
	pool             Pool // as it was last seen
	demand           demand
	told             uint64  // the demand in the last request
	spent            float64 // of the quota, by the last answer
	day              uint32  // of the period of that
}

// New returns the agent of a host, which has a name that no other host of its clusters has. seed is a random number.
func New(host string, seed uint64) *Agent {
	return &Agent{host: host, random: rand.New(rand.NewPCG(seed, 0)), sessions: map[session]*state{}}
}

// A Call is a request for one pool.
type Call struct {
	Cluster, Member string
	Request         Request
	session         session
}

// slack is by how much a request may come early, to be sent together with others.
const slack = uint64(50 * time.Millisecond)

// Ask returns the requests that are due, given all pools that belong to clusters. A pool that is no longer among them
// leaves its cluster, or stays a silent member if it may come back: pending says so. Each Call must be followed by Hear or
// Lost, before which there is no other one for its pool.
func (a *Agent) Ask(now uint64, pools []Pool, pending bool) (calls []Call) {
	a.looked = now
	gone := maps.Clone(a.sessions)
	for _, p := range pools {
		id := session{p.Cluster, p.Name}
		delete(gone, id)
		s := a.sessions[id]
		if s == nil {
			s = &state{}
			a.sessions[id] = s
		}
		s.pool = p
		s.demand.measure(now, p)
		if s.isDue(now) || s.hasNews() {
			calls = append(calls, a.call(now, id, s))
		}
	}
	for id, s := range gone {
		s.pool.Rate = 0
		if s.turn == 0 {
			delete(a.sessions, id) // the store never knew of it
		} else if pending {
			s.due = now + uint64(look)
		} else if s.isDue(now) {
			calls = append(calls, a.call(now, id, s))
		}
	}
	slices.SortFunc(calls, func(a, b Call) int { return cmp.Or(cmp.Compare(a.Cluster, b.Cluster), cmp.Compare(a.Member, b.Member)) })
	return calls
}

// hasNews reports whether the store should hear of the demand before the next request is due: if it is half as much again as
// the one that the store knows, or the other way round.
func (s *state) hasNews() bool {
	d := &s.demand
	needs, frees := d.limited == d.at && d.wanted > s.told+s.told/2, d.wanted+d.wanted/2 < min(s.told, d.rate)
	return (needs || frees) && !s.waits && s.fails == 0 && s.epoch != 0
}

func (s *state) isDue(now uint64) bool { return !s.waits && now+slack >= s.due }

const nsPerUs = 1000

// A past request has an order in the store. It was sent and its answer heard at these times.
type past struct {
	order       float64
	sent, heard uint64
}

// lookBack tells what the past requests say of the age of all requests, at a time when another one is sent.
func (q *Request) lookBack(now uint64, answers []past) {
	q.Horizon = none
	for _, p := range answers {
		if now-p.heard >= uint64(Length) {
			q.Lapsed = max(q.Lapsed, p.order)
		}
		if now-p.heard >= uint64(Length-early) {
			q.Early = max(q.Early, p.order)
		}
		if now-p.sent <= uint64(silence) {
			q.Horizon = min(q.Horizon, p.order)
		}
	}
	if len(answers) > 0 && now-answers[0].sent > uint64(silence) && q.Horizon < none {
		q.Silent = q.Horizon - 1
	}
}

// none is the horizon if there is no past request in sight.
const none = 1 << 53

func (a *Agent) call(now uint64, id session, s *state) Call {
	s.seq++
	s.sent, s.waits, s.told = now, true, s.demand.wanted
	p, epoch := s.pool, s.epoch
	if epoch == 0 {
		epoch = float64(p.Lease.Epoch) // of an earlier process
	}
	q := Request{
		Speaks: Version, Turn: s.turn, Seq: s.seq, Epoch: epoch, Answered: s.answered,
		Has: float64(p.Lease.At(now)), Safe: float64(p.Lease.Safe), Known: max(s.known, float64(p.Lease.Known)),
		Rate: float64(p.Rate), Weight: float64(p.Weight), Floor: float64(p.Floor), Share: float64(p.Share), Wants: float64(p.Wants),
		Demand: float64(s.demand.wanted), Keeps: float64(s.demand.keeps), Use: float64(s.demand.use),
	}
	if p.Lease.Until != 0 {
		q.Granted = 1
	}
	if own := p.Quota; own.Whole != 0 {
		q.Quota, q.Day, q.Instance, q.Used, q.Limit = float64(own.Whole), float64(own.Day), float64(own.Instance), float64(own.Used), float64(own.Bytes)
		if s.day == own.Day {
			q.Spent = s.spent
		}
	}
	q.lookBack(now, s.answers)
	q.New = float64(1 + a.random.Uint64N(none-1))
	return Call{Cluster: id.cluster, Member: Member(a.host, id.pool), Request: q, session: id}
}

// Hear takes the answer to a call. It returns the lease to put in force, if there is a new one.
func (a *Agent) Hear(now uint64, c Call, answer Answer) (pool string, lease shapemaps.Lease, ok bool) {
	s := a.sessions[c.session]
	if s == nil || !s.waits || s.seq != c.Request.Seq {
		return "", shapemaps.Lease{}, false
	}
	if now > s.sent+2*uint64(Timeout) { // of several answers the first ones may have waited for the last
		a.Lost(now, c)
		return "", shapemaps.Lease{}, false
	}
	s.waits, s.fails = false, 0
	s.due = now + uint64(answer.Again)*nsPerUs
	switch answer.Status {
	case Replaced:
		if s.pool.Rate == 0 {
			delete(a.sessions, c.session)
			return "", shapemaps.Lease{}, false
		}
		// If that process is on another host, both use the share of one.
		s.turn, s.answered, s.answers = 0, 0, nil
		lease = s.pool.Lease
		lease.Rate, lease.Until = policy.MinRate, now+uint64(Rise)
		return c.session.pool, lease, true
	case Old, Newer, Broken:
		return "", shapemaps.Lease{}, false
	}
	if !answer.plausible() {
		return "", shapemaps.Lease{}, false // a store that somebody has written into must not open a limit
	}
	if s.pool.Rate == 0 {
		delete(a.sessions, c.session)
		return "", shapemaps.Lease{}, false
	}
	if s.epoch != answer.Epoch {
		s.answers = nil
	}
	s.turn, s.epoch, s.answered = answer.Turn, answer.Epoch, c.Request.Seq
	// One that is older than silence stays, to tell that all before it are.
	for len(s.answers) > 1 && now-s.answers[1].sent > uint64(silence+Interval) {
		s.answers = s.answers[1:]
	}
	s.answers = append(s.answers, past{answer.Order, s.sent, now})
	if answer.Status == Quiet {
		s.known = max(s.known, answer.Known)
		return "", shapemaps.Lease{}, false
	}
	s.known = 0
	lease = shapemaps.Lease{
		Rate: s.pool.within(answer.Lease), Safe: s.pool.within(answer.Safe),
		Known: uint64(answer.Known), Epoch: uint64(answer.Epoch),
	}
	if c.Request.Quota != 0 {
		s.spent, s.day = answer.Spent, uint32(answer.Day)
		lease.Grant = shapemaps.Grant{Bytes: uint64(min(answer.Limit, c.Request.Quota)), Instance: uint32(c.Request.Instance)}
	}
	lease.Until = s.sent + uint64(Length-Length/drift)
	if lease.Rate < lease.Safe {
		lease.Until = now + uint64(Rise)
	}
	return c.session.pool, lease, true
}

// plausible reports whether rates and bytes are numbers in their ranges.
func (a *Answer) plausible() bool {
	for _, n := range []float64{a.Lease, a.Safe, a.Known, a.Spent, a.Day, a.Limit} {
		if !(n >= 0 && n <= none) {
			return false
		}
	}
	return true
}

// within is a rate that the store has granted, which may be older than the pool's.
func (p *Pool) within(granted float64) policy.Rate {
	return max(min(policy.Rate(granted), policy.Rate(p.Rate)), policy.MinRate)
}

// Lost takes note that there is no answer to a call.
func (a *Agent) Lost(now uint64, c Call) {
	if s := a.sessions[c.session]; s != nil && s.seq == c.Request.Seq {
		s.waits, s.due = false, now+uint64(soon)<<min(s.fails, maxFails)
		s.fails++
	}
}

// Next is when to call Ask again; false if there are no pools.
func (a *Agent) Next() (at uint64, ok bool) {
	at, ok = a.looked+uint64(look), len(a.sessions) > 0
	for _, s := range a.sessions {
		if !s.waits {
			at = min(at, s.due)
		}
	}
	return at, ok
}
