package live

import (
	gomaps "maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shapectl/shapectl/internal/inforce"
	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Reader reads all rules and pools of a network namespace again and again. Between two readings it keeps the maps open
// and holds no lock. Its methods must not run at the same time.
type Reader struct {
	Options loader.Options
	Netns   string // as netns.In takes it

	kept    loader.Kept
	fullest maps.Fullest
	scene   *Scene
	last    *Reading
	old     *Reading // the one before
	reuses  bool     // the memory of a reading that nobody uses is for a later one
}

// A Scene is what is set: it changes only with the rules, and with the state of devices.
type Scene struct {
	places   []Place
	limits   []Limit
	pools    []*Limit       // those within another pool, each before the one that it is within
	allPools int            // their number, and of those within none
	ofID     map[uint32]int // the place in limits of an id
	once     []int          // the places of limits, each key once: see Once
	names    func() []*Name

	generation loader.Generation
	stamp      maps.Stamp
}

// NewScene puts the rules of places together. The pools have the first place.
func NewScene(places []Place, rules [][]maps.Entry) *Scene {
	s, count := &Scene{places: places, ofID: map[uint32]int{}}, 0
	for _, of := range rules {
		count += len(of)
	}
	s.limits = make([]Limit, 0, count) // which does not move: limits point to each other
	pools := map[policy.Within]*Limit{}
	for i, of := range rules {
		for j := range of {
			n, e := len(s.limits), &of[j]
			s.limits, s.ofID[e.ID] = append(s.limits, newLimit(&s.places[i], e)), n
			if s.limits[n].index = n; e.Rule.Pool {
				pools[policy.Within(e.Label.Name)] = &s.limits[n]
				s.allPools = n + 1 // they come first
			}
		}
	}
	for i := range s.limits {
		s.limits[i].Above = pools[s.limits[i].Within]
	}
	deep := map[int][]*Limit{} // pools by the number of pools above
	for i := range s.limits {
		l := &s.limits[i]
		depth := 0
		for above := l.Above; above != nil; above = above.Above {
			if depth++; depth > policy.MaxDepth { // a change was halfway: pools would be within each other
				l.Above = nil
				break
			}
		}
		if l.Above == nil {
			continue
		}
		if l.Above.members = append(l.Above.members, l); l.IsPool() {
			deep[depth] = append(deep[depth], l)
		}
	}
	owned := map[*Limit]bool{} // pools that have a rule
	for i := range s.limits {
		l := &s.limits[i]
		for above := l.Above; above != nil && !l.IsPool(); above = above.Above {
			who := l.Who()
			if l.Label.Name == "" && above.Label.Owner.Device != who { // others may join
				who = ""
			}
			if !owned[above] {
				above.owner = who
			} else if above.owner != who {
				above.owner = ""
			}
			owned[above] = true
		}
	}
	for _, depth := range slices.Backward(slices.Sorted(gomaps.Keys(deep))) {
		s.pools = append(s.pools, deep[depth]...)
	}
	at := make(map[Key]int, len(s.limits))
	for i := range s.limits {
		l := &s.limits[i]
		n, twice := at[l.Key]
		switch {
		case !twice:
			at[l.Key], s.once = len(s.once), append(s.once, i)
		case s.limits[s.once[n]].Place.Status != string(loader.Attached):
			s.once[n] = i
		}
	}
	s.names = sync.OnceValue(func() []*Name { return s.namesOf(func(*Limit) bool { return true }) })
	return s
}

// Read makes a reading of what is counted of each limit at a time, by maps.Now.
func (s *Scene) Read(at uint64, count func(*Limit) Item) *Reading {
	out := s.read(nil, nil, at, count)
	out.addMembers()
	return out
}

// read is Read without Members, with the memory of a reading that nobody uses any more; nil for none. It measures what was done since
// the last reading, nil for none, if that is of the scene, as long as each item is in the cache of the CPU.
func (s *Scene) read(free, last *Reading, at uint64, count func(*Limit) Item) *Reading {
	out := &Reading{At: at, scene: s}
	if free != nil && len(free.Items) == len(s.limits) {
		out.Items, out.before = free.Items, free.before[:0]
	} else {
		out.Items = make([]Item, len(s.limits))
	}
	for i := range s.limits {
		out.Items[i] = count(&s.limits[i])
		out.Items[i].in, out.Items[i].At = out, at
		if last != nil && last.scene == s {
			out.since(&out.Items[i], &last.Items[i])
		}
	}
	return out
}

// A Reading is what all rules and pools had counted at one time.
type Reading struct {
	At       uint64        // by maps.Now
	Time     time.Time     // the same by the clock of the wall
	Interval time.Duration // since the reading before; 0 for the first
	// Items are all pools, and then all rules by device and direction. Their Place may be up to 10 s old.
	Items   []Item
	Fullest []FullBucket
	// RevertsInNS is nil unless a change is pending.
	RevertsInNS *uint64
	// Slots is how full the table of buckets is; zero unless it was asked for.
	Slots maps.Slots
	// Lacks are rules that should be in force and are not; nil unless they were asked for.
	Lacks []inforce.Lack

	scene  *Scene
	before []Counts     // of items, where they are others now
	anew   bool         // a rule or pool was set anew, or is new
	users  atomic.Int32 // of a Shared: see Release
}

// What to read beside what rules and pools counted.
type What struct {
	Fullest int  // so many of the fullest buckets of hosts, subnets and flows
	Slots   bool // how full the table is: a pass over all keys
	Buckets bool // the number of active buckets of each rule: a pass over all keys
	Sharers bool // the number of active sharers of each rule and pool: likewise
	Lacks   bool // rules that should be in force
}

// Close closes the maps. Another reading opens them again.
func (r *Reader) Close() { r.kept.Close() }

// Read reads all rules and pools. With the error comes what could be read, nil if nothing could.
func (r *Reader) Read(what What) (out *Reading, err error) {
	err = netns.In(r.Netns, func() error {
		n, err := r.kept.Read(r.Options)
		if err != nil {
			return err
		}
		defer n.Close()
		out, err = r.In(n, what)
		return err
	})
	return out, err
}

// In is Read within a namespace that is open.
func (r *Reader) In(n *loader.Namespace, what What) (*Reading, error) {
	hooks, unread := n.Hooks()
	if pools := n.Pools(); pools.Set != nil {
		hooks = append([]*loader.Hook{pools}, hooks...)
	}
	defer func() { loader.CloseHooks(hooks) }()
	if len(hooks) == 0 && unread != nil { // or it would look as if nothing were set
		return nil, unread
	}
	out := NewScene(nil, nil).Read(maps.Now(), nil)
	if len(hooks) > 0 {
		store, generation, err := n.Maps()
		if err != nil {
			return nil, err
		}
		defer store.Close()
		r.look(hooks, store, generation)
		at := maps.Now()
		if r.old != nil && (!r.reuses || r.old.users.Load() > 0) {
			r.old = nil
		}
		out = r.scene.read(r.old, r.last, at, func(l *Limit) Item { return l.read(store, at) })
		if out.Add(store, what); what.Fullest > 0 {
			out.findFullest(store, what.Fullest, &r.fullest)
		}
	}
	wall, now := maps.Clocks() // of one instant: else a slow reading would look like a clock that was set
	out.Time = wall.Add(-time.Duration(now - out.At))
	switch {
	case r.last == nil:
		out.addMembers()
	case r.last.scene == out.scene:
		out.addLately(r.last)
	default:
		out.Since(r.last)
	}
	r.old, r.last = r.last, out
	if what.Lacks && unread == nil {
		out.Lacks, _, unread = inforce.Lacks(n, lastgood.Policy{})
	}
	return out, unread
}

// look reads what is set, unless that is what it was.
func (r *Reader) look(hooks []*loader.Hook, store *maps.Store, generation loader.Generation) {
	places := make([]Place, len(hooks))
	for i, h := range hooks {
		places[i] = placeOf(h)
	}
	stamp := store.Stamp() // before the rules: what changes meanwhile makes another one
	if r.scene != nil && r.scene.generation == generation && r.scene.stamp == stamp && slices.Equal(r.scene.places, places) {
		return
	}
	all, rules := store.AllRules(), make([][]maps.Entry, len(hooks))
	for i, h := range hooks {
		rules[i] = all[h.Set.Number()]
	}
	r.scene = NewScene(places, rules)
	r.scene.generation, r.scene.stamp = generation, stamp
	for i := range r.scene.limits {
		r.scene.limits[i].companions(store)
	}
}

// Add adds what is to be read beside what rules and pools counted, but for the fullest buckets and what is missing.
func (out *Reading) Add(store *maps.Store, what What) {
	if what.Slots {
		out.Slots = store.Slots(out.At)
	}
	if state, until := store.Change(); state == maps.Pending {
		out.RevertsInNS = Ahead(until)
	}
	if what.Sharers {
		active := store.ActiveSharers()
		for i := range out.Items {
			if it := &out.Items[i]; it.Share.Kind != policy.ShareNone {
				it.ActiveSharers = new(uint64(active[it.ID]))
			}
		}
	}
	if what.Buckets {
		var each []*Item // those with several buckets
		var entries []maps.Entry
		for i := range out.Items {
			it := &out.Items[i]
			if it.ActiveBuckets = new(uint64); it.Each.Kind != policy.EachAll {
				each, entries = append(each, it), append(entries, *it.Entry)
			} else if it.Level|it.Second > 0 {
				*it.ActiveBuckets = 1
			}
		}
		for i := range store.Buckets(entries, maps.Now) {
			*each[i].ActiveBuckets++
		}
	}
}

func (out *Reading) findFullest(store *maps.Store, n int, fullest *maps.Fullest) {
	for _, b := range fullest.Find(store, n, maps.Now(), func(id uint32) *maps.Entry {
		if it := out.of(id); it != nil {
			return it.Entry
		}
		return nil
	}) {
		it := out.of(b.ID)
		out.AddFullest(it, it.bucket(b.Bucket), b.Percent)
	}
}

// AddFullest adds one of the fullest buckets.
func (out *Reading) AddFullest(it *Item, b Bucket, percent float64) {
	it.fullest = max(it.fullest, percent)
	out.Fullest = append(out.Fullest, FullBucket{it, b, percent})
}

// of is the item with an id; nil for none.
func (out *Reading) of(id uint32) *Item {
	if i, known := out.scene.ofID[id]; known {
		return &out.Items[i]
	}
	return nil
}

// addMembers adds up what all rules within each pool lost.
func (out *Reading) addMembers() {
	for i := range out.Items {
		if it := &out.Items[i]; !it.IsPool() && it.Above != nil {
			out.Items[it.Above.index].Members.add(it.Offered())
		}
	}
	for _, pool := range out.scene.pools {
		out.Items[pool.Above.index].Members.add(out.Items[pool.index].Members)
	}
}

// Since measures what was done since the reading before.
func (out *Reading) Since(last *Reading) {
	before := make(map[Key]*Item, len(last.Items))
	for _, it := range last.Once() {
		before[it.Key] = it
	}
	for i := range out.Items {
		if was := before[out.Items[i].Key]; was != nil {
			out.since(&out.Items[i], was)
		}
	}
	out.anew = true // another rule may be in a pool
	out.addLately(last)
}

// since measures what an item did since the reading before.
func (out *Reading) since(it, before *Item) {
	counts := &it.Counts // which most still have
	if it.Counters != before.Counters || it.GuaranteedBytes != before.GuaranteedBytes {
		out.before = append(out.before, before.Counts) // else each reading would keep the one before it, which would keep the one before that
		counts = &out.before[len(out.before)-1]
	}
	it.Since(before.At, counts)
	it.LostPackets, it.LostBytes, it.Members = before.LostPackets, before.LostBytes, before.Members
	switch {
	case it.before == nil:
		out.anew = true
	case it.before != &it.Counts && it.Above != nil && !it.IsPool() && before.Within != "": // else it was in no pool
		loss, _ := it.offeredLately()
		out.Items[it.Above.index].lately.add(loss)
	}
}

// addLately adds up what rules within each pool did since the last reading.
func (out *Reading) addLately(last *Reading) {
	out.Interval = time.Duration(out.At - last.At)
	for _, pool := range out.scene.pools {
		out.Items[pool.Above.index].lately.add(out.Items[pool.index].lately)
	}
	for i := range out.Items[:out.scene.allPools] {
		it := &out.Items[i]
		if it.LostPackets, it.LostBytes = it.LostPackets+it.lately.DroppedPackets, it.LostBytes+it.lately.DroppedBytes; out.anew {
			it.Members = Loss{}
		} else {
			it.Members.add(it.lately)
		}
	}
	if out.anew {
		out.addMembers()
	}
}

// Ahead is how far a time of maps.Now is ahead, in ns; nil for 0, which is none.
func Ahead(at uint64) *uint64 {
	if at == 0 {
		return nil
	}
	return new(at - min(at, maps.Now()))
}

// Find returns the item with a key; nil for none.
func (out *Reading) Find(key Key) *Item {
	for i := range out.Items {
		if out.Items[i].Key == key {
			return &out.Items[i]
		}
	}
	return nil
}

// Once are the items, each key once. A device that moved to another namespace may have left rules beside those of a new
// device with its name: these count.
func (out *Reading) Once() []*Item {
	all := make([]*Item, len(out.scene.once))
	for i, at := range out.scene.once {
		all[i] = &out.Items[at]
	}
	return all
}

// Places are where rules are, without the pools, each once. Where a device may have left rules, those of its namesake count.
func (out *Reading) Places() (places []Place) {
	for _, p := range out.scene.places {
		same := func(o Place) bool { return o.Device == p.Device && o.Direction == p.Direction }
		switch at := slices.IndexFunc(places, same); {
		case p.Device == "": // the pools
		case at < 0:
			places = append(places, p)
		case p.InForce:
			places[at] = p
		}
	}
	return places
}

// Exported are the items that metrics are for: all if they are at most so many, or most is negative. Else they are the pools that
// several names draw from, and at most so many others: the rules in no pool, if they are so few, and what does worst. Each key is
// there once.
func (out *Reading) Exported(most int) []*Item {
	all := out.Once()
	if most < 0 || len(all) <= most {
		return all
	}
	left, some := make(map[*Item]bool, len(all)), []*Item{}
	var free []*Item // rules in no pool
	for _, it := range all {
		switch {
		case it.IsPool() && it.owner == "":
			some = append(some, it)
			continue
		case !it.IsPool() && it.Above == nil:
			free = append(free, it)
		}
		left[it] = true
	}
	if len(free) <= most {
		most, some = most-len(free), append(some, free...)
		for _, it := range free {
			delete(left, it)
		}
	}
	if most == 0 {
		return some
	}
	worst, _ := out.Rows(View{Top: most, Chosen: func(it *Item) bool { return left[it] && (!it.Place.InForce || it.Refusing() > 0) }})
	for _, r := range worst {
		some = append(some, r.Item)
	}
	return some
}

// Scene is what was set.
func (out *Reading) Scene() *Scene { return out.scene }
