package history

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Request is for what rules or pools delivered.
type Request struct {
	Since, Until time.Time
	Name         string   // of rules, a pool or a device; "" for the rules of Device with one of Networks
	Device       string   // without a name
	Direction    string   // "" for both
	Networks     []string // with a name, those that it stands for besides
	Committed    uint64   // bits per second, to check in place of what is committed; 0 for that
}

func (q *Request) means(s *Series) bool {
	if q.Direction != "" && s.Direction != q.Direction {
		return false
	}
	if q.Name == "" {
		return s.Device == q.Device && slices.Contains(q.Networks, s.Network)
	}
	return s.Name == q.Name || s.Pool == q.Name || s.Device == q.Name || slices.Contains(q.Networks, s.Network)
}

// ErrUnknown means that nothing recorded has the name that a request is for, and something else has a similar one.
var ErrUnknown = errors.New("the history has nothing")

// similar is the nearest name that is recorded; "" for none.
func (q *Request) similar(seen map[Key]*Series) string {
	var names []string
	for _, s := range seen {
		if names = append(names, s.Device); q.Name != "" {
			names = append(names, s.Name, s.Pool)
		}
	}
	name := cmp.Or(q.Name, q.Device)
	if slices.Contains(names, name) {
		return ""
	}
	return plain.SimilarName(name, names)
}

// mostDeliveries is how many deliveries and networks one report can have.
const mostDeliveries = 100

// Deliveries says what those delivered that a request means, and pools that only they draw from. Rules that have only the rate
// of the same pool are summed up by direction, and so are all rules of a device.
func (r *Reader) Deliveries(q Request) ([]*Delivery, error) {
	seen := map[Key]*Series{}
	err := r.Query(q.Since, q.Until, func(s *Series) bool {
		if was := seen[s.Key]; was == nil || q.means(s) || !q.means(was) { // what was renamed is meant for a part of the time
			seen[s.Key] = s
		}
		return false
	}, func(*Reading) {})
	if err != nil {
		return nil, err
	}
	q.Name = cmp.Or(policy.FindName(q.Name, func(yield func(string) bool) {
		for _, s := range seen {
			if !yield(s.Name) || !yield(s.Pool) || !yield(s.Device) {
				return
			}
		}
	}), q.Name)
	t := &tally{subjects: subjects(&q, seen)}
	if len(t.subjects) == 0 {
		if similar := q.similar(seen); similar != "" {
			return nil, fmt.Errorf("%w of that name; did you mean %s?", ErrUnknown, plain.Word(similar))
		}
	}
	if len(t.subjects) > mostDeliveries {
		return nil, fmt.Errorf("more than %d rules and pools match; name fewer", mostDeliveries)
	}
	given := map[string]bool{} // in each direction
	for _, s := range t.subjects {
		if q.Committed == 0 || s.Kind == KindPool && t.subjects[0].Kind != KindPool { // it is the rate of the rules
			continue
		}
		if given[s.Direction] {
			return nil, errors.New("a committed rate is that of one rule or pool, and more than one matches; name a pool, or device, direction and network of a rule")
		}
		given[s.Direction], s.given = true, q.Committed
	}
	wanted := map[Key]bool{}
	for key, s := range seen {
		wanted[key] = slices.ContainsFunc(t.subjects, func(of *subject) bool { return of.role(s, seen) != none })
	}
	if err := r.Query(q.Since, q.Until, func(s *Series) bool { return wanted[s.Key] }, t.add); err != nil {
		return nil, err
	}
	all := []*Delivery{}
	for _, s := range t.subjects {
		if s.series != nil {
			s.finish(&q, r.damaged)
			all = append(all, &s.Delivery)
		}
	}
	if len(all) == 0 && r.damaged > 0 {
		return nil, fmt.Errorf("the history is damaged: %d bytes of it cannot be read", r.damaged)
	}
	return all, nil
}

// A subject is what a delivery is of.
type subject struct {
	delivering
	q      *Request
	keys   map[Key]bool // the rules or the pool
	within string       // the pool that all of them draw from
	parts  []part       // of the last reading
}

// A part is a sample that says something about a subject.
type part struct {
	sample int
	role   role
}

type role int

const (
	none  role = iota
	own        // of the rules or the pool
	free       // of a rule within the pool that only pools limit
	rated      // of another rule within it
	below      // of a pool within it
	above      // of a pool above it
)

// subjects finds those of a request among all series.
func subjects(q *Request, seen map[Key]*Series) (all []*subject) {
	found := map[Key]*subject{}
	add := func(id Key, kind string, s *Series) {
		of := found[id]
		if of == nil {
			of = &subject{q: q, keys: map[Key]bool{}, delivering: newDelivering(q, kind)}
			of.Device, of.Direction, of.Name, of.within = s.Device, s.Direction, cmp.Or(s.Pool, s.Name), s.Within
			found[id], all = of, append(all, of)
		}
		for of, s := range map[*string]string{&of.Device: s.Device, &of.Name: cmp.Or(s.Pool, s.Name), &of.within: s.Within} {
			if *of != s {
				*of = "" // there are several
			}
		}
		of.keys[s.Key] = true
	}
	rules, meant, ofDevice := map[string]int{}, map[string]int{}, false // within each pool
	for _, s := range seen {
		means := q.means(s)
		if s.Pool != "" {
			if means {
				add(s.Key, KindPool, s)
			}
			continue
		}
		for pool := range lineage(s.Within, seen) {
			if rules[pool.Pool]++; means {
				meant[pool.Pool]++
			}
		}
		switch {
		case !means:
		case s.Device == q.Name && s.Name != q.Name && !slices.Contains(q.Networks, s.Network):
			ofDevice = true
			add(Key{Device: s.Device, Direction: s.Direction}, KindRules, s)
		case s.Within != "" && s.Rate == 0 && s.Guarantee == 0:
			add(Key{Pool: s.Within, Direction: s.Direction}, KindRules, s)
		default:
			add(s.Key, KindRule, s)
		}
	}
	var pools []*Series
	for pool, n := range meant {
		s := seen[Key{Pool: pool}]
		topmost := meant[s.Within] == 0 || meant[s.Within] < rules[s.Within]
		if n == rules[pool] && (topmost || !ofDevice) {
			pools = append(pools, s)
		}
	}
	for _, s := range pools {
		if !ofDevice || len(pools) < mostDeliveries/2 {
			add(s.Key, KindPool, s)
		}
	}
	for _, s := range all {
		for key := range s.keys {
			if key.Pool == "" {
				s.Rules++
				s.Networks = append(s.Networks, key.Network)
			}
		}
		if s.Rules == 1 {
			s.Kind = KindRule
		}
		slices.Sort(s.Networks)
		s.Networks = slices.Compact(s.Networks)
		s.Networks = s.Networks[:min(len(s.Networks), mostDeliveries)]
		for pool := range lineage(s.within, seen) {
			s.Pools = append(s.Pools, DeliveryPool{pool.Pool, NotZero(pool.Rate), NotZero(pool.Guarantee)})
		}
	}
	slices.SortFunc(all, func(a, b *subject) int {
		return cmp.Or(strings.Compare(b.Kind[:4], a.Kind[:4]), strings.Compare(a.Device, b.Device), strings.Compare(a.Direction, b.Direction),
			slices.Compare(a.Networks, b.Networks), strings.Compare(a.Name, b.Name))
	})
	return all
}

// lineage is a pool and those above it.
func lineage(pool string, seen map[Key]*Series) func(yield func(*Series) bool) {
	return func(yield func(*Series) bool) {
		const most = 16 // deeper than pools nest; they may have been changed between two readings
		for range most {
			s := seen[Key{Pool: pool}]
			if s == nil || !yield(s) {
				return
			}
			pool = s.Within
		}
	}
}

// role says what a series says about the subject.
func (s *subject) role(of *Series, seen map[Key]*Series) role {
	if s.keys[of.Key] && (s.Kind == KindPool || s.q.means(of)) {
		return own
	}
	if s.Kind != KindPool {
		return none
	}
	for pool := range lineage(of.Within, seen) {
		switch {
		case !s.keys[pool.Key]:
		case of.Pool != "":
			return below
		case of.Rate == 0:
			return free
		default:
			return rated
		}
	}
	for key := range s.keys {
		for pool := range lineage(seen[key].Within, seen) {
			if pool.Key == of.Key {
				return above
			}
		}
	}
	return none
}

// A tally sums up readings for subjects.
type tally struct {
	subjects []*subject
	before   *Reading
	at       []int // of each sample in the reading before; -1 for none
}

// add adds a reading.
func (t *tally) add(r *Reading) {
	t.index(r)
	before := t.before
	if t.before = r; before == nil {
		return
	}
	it := between(before, r)
	grew := make([]growth, len(r.Samples))
	for i, s := range r.Samples {
		g := growth{Counters: s.Counters, anew: true, after: s.Series}
		if t.at[i] >= 0 {
			was := before.Samples[t.at[i]]
			if g.before = was.Series; before.boot == r.boot {
				g.Counters, g.anew = s.since(was.Counters)
			}
		}
		grew[i] = g
	}
	for _, s := range t.subjects {
		s.sum(it, grew)
	}
}

// A growth is what a sample counted in an interval.
type growth struct {
	Counters
	anew          bool
	before, after *Series
}

// index finds the samples of a reading in the one before, and what they say about the subjects.
func (t *tally) index(r *Reading) {
	if t.before != nil && slices.EqualFunc(t.before.Samples, r.Samples, func(a, b Sample) bool { return a.Series == b.Series }) {
		for i := range t.at {
			t.at[i] = i
		}
		return
	}
	was, now := map[Key]int{}, make(map[Key]*Series, len(r.Samples))
	if t.before != nil {
		for i, s := range t.before.Samples {
			was[s.Key] = i + 1
		}
	}
	t.at = t.at[:0]
	for _, s := range r.Samples {
		t.at, now[s.Key] = append(t.at, was[s.Key]-1), s.Series
	}
	for _, of := range t.subjects {
		of.parts = of.parts[:0]
		for key := range of.keys {
			if of.Kind == KindPool && now[key] == nil {
				now[key] = &Series{Key: key}
			}
		}
		for i, s := range r.Samples {
			if role := of.role(s.Series, now); role != none {
				of.parts = append(of.parts, part{i, role})
			}
		}
	}
}

// sum adds what the parts of a subject counted in an interval.
func (s *subject) sum(it interval, grew []growth) {
	var of [above + 1]Counters
	for _, p := range s.parts {
		g := grew[p.sample]
		of[p.role] = of[p.role].plus(g.Counters)
		if p.role == own {
			it.before, it.series, it.anew = g.before, g.after, it.anew || g.anew
		}
	}
	it.passed, it.dropped, it.refused = of[own].Passed, of[own].Dropped, of[own].Refused
	it.perhaps = it.dropped
	if s.Kind == KindPool {
		// What the pool or one above refused, as far as that is known: a rule with a rate of its own may have dropped its
		// packets itself.
		most := it.refused + of[above].Refused
		less := func(dropped uint64) uint64 { return dropped - min(dropped, of[below].Refused) }
		it.dropped = max(it.refused, min(most, less(of[free].Dropped)))
		it.perhaps = max(it.dropped, min(most, less(of[free].Dropped+of[rated].Dropped)))
	}
	s.add(it)
}
