package measure

import (
	"time"

	"github.com/shapectl/shapectl/internal/inforce"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
)

// A Reader reads all rules and pools of a network namespace again and again. Between two readings it keeps the maps open
// and holds no lock. Its methods must not run at the same time.
type Reader struct {
	Options loader.Options
	Netns   string // as netns.In takes it

	kept    loader.Kept
	fullest maps.Fullest
	inforce inforce.Reader
	last    report.Rules
	at      uint64 // when last was read, by maps.Now
}

// A Reading is what a Reader read at one time.
type Reading struct {
	At       uint64        // by maps.Now
	Time     time.Time     // the same by the clock of the wall
	Interval time.Duration // since the reading before; 0 for the first
	// Rules are all pools, and then all rules by device, direction and network. From the second reading on they have what
	// they did over the interval. They are not sorted otherwise, and their State may be up to 10 s old.
	Rules   report.Rules
	Fullest []report.FullBucket
	// RevertsInNS is nil unless a change is pending.
	RevertsInNS *uint64
	// Slots is how full the table of buckets is; zero unless it was asked for.
	Slots maps.Slots
	// Lacks are rules that should be in force and are not; nil unless they were asked for.
	Lacks []inforce.Lack
}

// Top is the reading as 'shapectl top' and the web page show it.
func (r *Reading) Top() report.Top {
	return report.NewTop(r.Time, r.Interval, r.Rules, r.Fullest, r.RevertsInNS)
}

// What to read beside rules and pools.
type What struct {
	Fullest   int  // so many of the fullest buckets of hosts, subnets and flows
	Slots     bool // how full the table is: a pass over all keys
	Active    bool // the number of buckets and sharers of each rule: a pass over all keys
	Lacks     bool // rules that should be in force
	Sentences bool
}

// Close closes the maps.
func (r *Reader) Close() { r.kept.Close() }

// forget makes the next reading a first one, without an interval.
func (r *Reader) forget() { r.last, r.at = nil, 0 }

// Read reads all rules and pools. With the error comes what could be read, nil if nothing could.
func (r *Reader) Read(what What) (out *Reading, err error) {
	err = netns.In(r.Netns, func() error {
		n, err := r.kept.Read(r.Options)
		if err != nil {
			return err
		}
		defer n.Close()
		out, err = r.read(n, what)
		return err
	})
	return out, err
}

func (r *Reader) read(n *loader.Namespace, what What) (*Reading, error) {
	hooks, unread := n.Hooks()
	if pools := n.Pools(); pools.Set != nil {
		hooks = append([]*loader.Hook{pools}, hooks...)
	}
	defer func() { loader.CloseHooks(hooks) }()
	out := &Reading{Rules: report.Rules{}}
	if len(hooks) == 0 {
		out.At = maps.Now()
	} else if err := out.fill(hooks, what, &r.fullest); err != nil {
		return nil, err
	}
	wall, now := maps.Clocks() // of one instant: else a slow reading would look like a clock that was set
	out.Time = wall.Add(-time.Duration(now - out.At))
	if r.at != 0 {
		out.Interval = time.Duration(out.At - r.at)
		Sampled(r.last, r.at)(out.Rules, out.At)
	}
	r.last, r.at = out.Rules, out.At
	if what.Lacks && unread == nil {
		out.Lacks, unread = r.inforce.Lacks(n)
	}
	return out, unread
}

// fill reads hooks, which share one store.
func (out *Reading) fill(hooks []*loader.Hook, what What, fullest *maps.Fullest) error {
	store := hooks[0].Set.Store
	all := store.AllRules()
	var found []Found
	for _, h := range hooks {
		entries := all[h.Set.Number()]
		for i := range entries {
			found = append(found, Found{Entry: &entries[i], Hook: h})
		}
	}
	read := Details{Sentences: what.Sentences, Active: what.Active, At: &out.At}
	var err error
	if out.Rules, err = read.Rows(found); err != nil {
		return err
	}
	if what.Slots {
		out.Slots = store.Slots(out.At)
	}
	if state, until := store.Change(); state == maps.Pending {
		out.RevertsInNS = Ahead(until)
	}
	if what.Fullest > 0 {
		index := make([]int32, store.Size().Rules)
		for i, f := range found {
			index[f.ID] = int32(i) + 1
		}
		rule := func(id uint32) *maps.Entry {
			if id >= uint32(len(index)) || index[id] == 0 {
				return nil
			}
			return found[index[id]-1].Entry
		}
		for _, b := range fullest.Find(store, what.Fullest, maps.Now(), rule) {
			i := index[b.ID] - 1
			bucket := bucketOf(found[i].Hook, *found[i].Entry, b.Bucket)
			out.Fullest = append(out.Fullest, report.NewFullBucket(&out.Rules[i], bucket, b.Percent))
		}
	}
	return nil
}
