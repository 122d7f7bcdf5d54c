package maps

import (
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/listener"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Cause is what an event is about, in words of the policy.
type Cause struct {
	Set  *Set       // of the rule
	Rule Entry      // without a prefix if the rule has gone since
	Key  string     // of the bucket, as people read it
	From netip.Addr // of the packet: the address that rules match
	Pool string     // that had too little room; "" if that was the rule
	// Sharer took more than its fair share, of Pool or of the rule; "" if there was too little room. Fair shares refuse
	// what a full pool above does not leave them: then Pool is that one.
	Sharer   string
	Unit     policy.Unit
	Then     policy.Then // after the quota of Pool or the rule, where Unit is of that
	Level    uint64      // in the bucket of Pool or the rule: bytes, or what Unit says
	Capacity uint64      // of the same bucket
}

// Cause explains an event. ok is false if the store is too old to know its rule.
func (s *Store) Cause(e bpf.AbiEvent) (c Cause, ok bool) {
	if e.Key.Id >= s.room() || e.Limit >= s.room() || s.rule(e.Key.Id).View >= uint32(len(s.prefixes.Views)) {
		return c, false
	}
	now := s.phase()
	c.Level, c.Capacity = e.Level, e.Capacity
	c.Set = s.View(s.rule(e.Key.Id).View)
	v := s.versionIn(e.Key.Id, now)
	if e.Limit != e.Key.Id {
		c.Pool = s.poolName(e.Limit, now)
	}
	flow := flowOf(e.Key)
	if v.Flags&params.Flow == 0 {
		flow = Flow{Src: flow.Src, Dst: flow.Src} // the far address, whichever side that is
	}
	far := flow.Far(c.Set.Side())
	c.Rule = s.entry(e.Key.Id, netip.Prefix{}, v, now)
	for bits := far.BitLen(); bits >= 0; bits-- {
		p, _ := far.Prefix(bits)
		if id, found := s.prefixes.Find(c.Set.number, p); found && id == e.Key.Id {
			c.Rule.Prefix = p
			break
		}
	}
	for _, p := range c.Set.Marks() {
		if id, found := s.prefixes.Find(c.Set.number, p); found && id == e.Key.Id {
			c.Rule.Prefix = p
		}
	}
	if c.From = far; c.Rule.Prefix.IsValid() || c.Rule.Each.Kind != policy.EachAll {
		c.Key = KeyName(c.Rule, c.Set.Side(), flow)
	}
	full := e.Level+uint64(bpf.AbiLayoutSHARED_BYTES) > e.Capacity
	if e.Limit != e.Key.Id && (c.Pool == "" || !full) { // only pools have names
		s.findOther(&c, e.Limit, flow)
	}
	if e.Kind == listener.Overflow && e.Fate == listener.Dropped && !full && c.Unit == policy.Bytes {
		s.findSharer(&c, e, flow)
	}
	return c, true
}

// findOther completes the cause of an event of another limit. Of a rule, the event has the id of that one; of a pool, it has that of
// the pool, so it is the one that is nearly full.
func (s *Store) findOther(c *Cause, id uint32, flow Flow) {
	entries, stages := s.Stages(c.Rule, c.Set.Side(), flow, s.now())
	for i, e := range entries {
		for j, other := range slices.Backward(s.Others(e)) { // a quota may be nearly used for days
			switch o := &stages[i].Others[j]; {
			case other.ID == id:
				c.Unit, c.Then = o.Unit, e.Also.Then
				return
			case e.ID == id && o.Level >= o.Capacity/10*9:
				c.Unit, c.Then, c.Level, c.Capacity = o.Unit, e.Also.Then, model.BytesOf(o.Unit, o.Level), o.Capacity>>model.BitsOf(o.Unit)
				return
			}
		}
	}
}

// findSharer completes the cause of an event of a bucket that had room: its fair shares refused the packet.
func (s *Store) findSharer(c *Cause, e bpf.AbiEvent, flow Flow) {
	entries, stages := s.Stages(c.Rule, c.Set.Side(), flow, s.now())
	at := slices.IndexFunc(entries, func(l Entry) bool { return l.ID == e.Limit })
	if at < 0 || entries[at].Share.Kind == policy.ShareNone {
		return
	}
	// The clock of fair shares also goes by the next ones above, if those are of members: see look_above in bpf/fair.h.
	for i := at + 1; i < len(entries); i++ {
		pool := entries[i].Rule
		if pool.Share.Kind == policy.ShareNone && pool.Guarantee == 0 {
			continue
		}
		if pool.Share.Kind != policy.ShareMember {
			break
		}
		if level := model.Bytes(stages[i].State.Level); model.AtRate(level, pool.Capacity, true) {
			at, c.Pool, c.Level, c.Capacity = i, pool.Label.Name, level, pool.Capacity
			break
		}
	}
	c.Sharer = SharerName(entries[at], entries[max(at-1, 0)], c.Set.Side(), flow)
	if share := entries[at].Share.Kind; share == policy.ShareFlow && c.Rule.Each.Kind != policy.EachFlow {
		c.Sharer = "a flow of " + c.From.String() // the event does not have which
	}
}
