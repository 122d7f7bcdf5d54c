package live

import (
	"cmp"
	"iter"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Row is a line of a view: a rule or pool, a part of one, or a name with all its rules.
type Row struct {
	*Item       // nil for a name
	Name  *Name // nil for a rule or pool
	Part  *Part // nil unless it is a part of the item
	Depth int   // the number of pools above it, in a tree

	Use      float64 // bit/s
	Dropped  float64 // bit/s; of a pool, of all rules within it
	Refusing float64 // bit/s that a rule drops, or a pool itself refuses
	// These are in percent, and negative where they are not known.
	OfRate, DroppedPercent, ExcessPercent, Level float64

	in       *Reading // of a name
	idle     bool     // it is not in force, or a part of it
	foremost *Row     // of a tree, the worst one of it and all rows within it; nil for itself
}

// A View is which rows to show, and in which order.
type View struct {
	By     string // one of Views; "" for the first
	Sort   string // one of Orders; "" for the first
	Search string // words that are in what people know a rule by, or addresses that it is for; "" for all
	Show   string // only rows with this activity, or a worse one that includes it: one of Activities; "" for all
	Kind   string // only rules or pools: one of Kinds; of a tree, pool leaves out rules in no pool; "" for both
	Under  string // the pool that a tree is of; "" for all
	Name   string // only rules with this name; of a tree, with the pools above them; "" for all
	// Of is the key, as text, of a rule or pool to show alone; of a tree, with the pools above it and what is directly
	// within it; "" for all.
	Of   string
	Open []string // the pools of a tree whose members are shown, unless there is a search; nil for all
	Top  int      // only the first so many rows; of a tree, in each pool; 0 for all
	Most int      // of a tree, only the first so many rows in all; 0 for all
	// Chosen says which rules and pools count; nil for all.
	Chosen func(*Item) bool
}

// Kinds are what rows can be restricted to.
var Kinds = []string{"rule", "pool"}

// Activities are what rows do now, the worst first: some rules are not in force; rules drop packets, or pools refuse some;
// they are near their rate; packets pass; or none do.
var Activities = []string{"out", "dropping", "near", "busy", "idle"}

// Activity is the worst of Activities that applies.
func (r *Row) Activity() string {
	switch {
	case r.idle:
		return "out"
	case r.Refusing > 0:
		return "dropping"
	case r.OfRate >= Near:
		return "near"
	case r.Use > 0:
		return "busy"
	}
	return "idle"
}

// does reports whether a row has an activity: what drops is also near its rate, and all that is near it is busy.
func (r *Row) does(activity string) bool {
	is, want := slices.Index(Activities, r.Activity()), slices.Index(Activities, activity)
	return is == want || 0 < is && is < want && activity != "idle"
}

// Views are what rows are grouped by: rules and pools, pools with what is within them, names, the pools that several names
// draw from, and the fullest buckets.
var Views = []string{"network", "tree", "name", "node", "bucket"}

// Worst is the order of what is not in force first. Then come those that drop, and pools that refuse, most now, those with
// the largest share of excess packets, and those nearest to their rate. docs/watch.md says so.
const Worst = "worst"

// An order compares rows: figures from the largest on, names from the first on.
type order struct {
	name    string
	compare func(a, b *Row) int
}

func figure(name string, of func(*Row) float64) order {
	return order{name, func(a, b *Row) int { return cmp.Compare(of(b), of(a)) }}
}

func ofText(name string, of func(*Row) string) order {
	return order{name, func(a, b *Row) int {
		x, y := of(a), of(b)
		if (x == "") != (y == "") { // what has none comes last
			return cmp.Compare(y, x)
		}
		return plain.Natural(x, y)
	}}
}

var orders = []order{
	{Worst, (*Row).worse},
	figure("use", func(r *Row) float64 { return r.Use }),
	figure("percent", func(r *Row) float64 { return r.OfRate }),
	figure("dropped", func(r *Row) float64 { return r.DroppedPercent }),
	figure("excess", func(r *Row) float64 { return r.ExcessPercent }),
	figure("passed", func(r *Row) float64 { return r.sum(func(it *Item) float64 { return float64(it.PassedBytes) }) }),
	figure("rate", (*Row).rate),
	figure("level", func(r *Row) float64 { return r.Level }),
	figure("quota", (*Row).QuotaPercent),
	ofText("name", (*Row).Called),
	ofText("plan", func(r *Row) string { return r.first().Label.Plan }),
	{"device", func(a, b *Row) int { return a.first().Compare(b.first()) }},
	{"network", func(a, b *Row) int { return policy.ComparePrefix(a.first().network(), b.first().network()) }},
}

// Orders are the names of the orders that rows can have.
var Orders = func() (names []string) {
	for _, o := range orders {
		names = append(names, o.name)
	}
	return names
}()

// first is the rule or pool, or the first rule of a name.
func (r *Row) first() *Item {
	if r.Item != nil {
		return r.Item
	}
	return &r.in.Items[r.Name.Sides[0].Rules[0]]
}

// All are the rule or pool, or the rules of a name.
func (r *Row) All() (all []*Item) {
	if r.Item != nil {
		return []*Item{r.Item}
	}
	for _, s := range r.Name.Sides {
		all = append(all, r.Of(s)...)
	}
	return all
}

// Of are the rules of a side of the row's name.
func (r *Row) Of(s *Side) (all []*Item) {
	if r.Item != nil {
		return []*Item{r.Item}
	}
	for _, at := range s.Rules {
		all = append(all, &r.in.Items[at])
	}
	return all
}

func (r *Row) sum(of func(*Item) float64) (sum float64) {
	for _, it := range r.All() {
		sum += of(it)
	}
	return sum
}

// QuotaPercent is how much of a quota and its grace is used, of several the most; 0 without one.
func (r *Row) QuotaPercent() float64 {
	if r.Part != nil && r.Part.UsedBytes != nil {
		return Percent(*r.Part.UsedBytes, *r.Part.UsedBytes+*r.Part.LeftBytes).N
	}
	if it := r.Quota(); r.Part == nil && it != nil {
		return it.quotaPercent()
	}
	return 0
}

func (it *Item) quotaPercent() float64 {
	return Percent(it.Used.UsedBytes, it.Used.UsedBytes+it.Used.LeftBytes).N
}

// Quota is the rule, or the pool that only rules with the row's name are in, of whose quota most is used; nil without a quota.
func (r *Row) Quota() (most *Item) {
	for _, it := range r.All() {
		for at := it; at != nil && (at == it || r.Name != nil && at.owner == r.Name.Name); at = at.Parent() {
			if at.quotaOfAll(0) != nil && (most == nil || at.quotaPercent() > most.quotaPercent()) {
				most = at
			}
		}
	}
	return most
}

func (r *Row) rate() float64 {
	if r.Name != nil {
		return r.Name.rate()
	}
	if r.Limit.Rate == policy.Unlimited && r.Above != nil {
		return float64(r.Above.Rate)
	}
	return float64(r.Limit.Rate)
}

// Called is the key of a part, or the name of a rule or pool; of a rule without one, its place.
func (r *Row) Called() string {
	switch {
	case r.Name != nil:
		return r.Name.Name
	case r.Part != nil:
		return r.Part.Name
	}
	return cmp.Or(r.Label.Name, r.Key.String())
}

// ID is what the row is about, in every reading.
func (r *Row) ID() string {
	switch {
	case r.Name != nil:
		return "name\x00" + r.Name.Name
	case r.Part != nil:
		return r.Key.String() + "\x00" + r.Part.Name
	}
	return r.Key.String()
}

// Compare sorts by device and direction, and pools, which come first, by name.
func (it *Item) Compare(o *Item) int {
	if it.Place == o.Place && !it.IsPool() {
		return 0
	}
	return cmp.Or(plain.Natural(it.Device, o.Device), cmp.Compare(it.Direction, o.Direction), plain.Natural(it.Key.Pool, o.Key.Pool))
}

func (l *Limit) network() (p netip.Prefix) {
	if !l.IsPool() {
		p = l.Prefix
	}
	return p
}

// worse is Worst.
func (r *Row) worse(o *Row) int {
	if r.idle != o.idle {
		if r.idle {
			return -1
		}
		return 1
	}
	c := cmp.Compare(o.Refusing, r.Refusing)
	if c == 0 && r.Refusing > 0 && r.first().IsPool() != o.first().IsPool() { // the same packets: the rule says whose they are
		if r.first().IsPool() {
			return 1
		}
		return -1
	}
	near := func(r *Row) float64 { // in whole percent, so that the order is calm
		if r.OfRate >= 0 {
			return math.Round(r.OfRate)
		}
		return math.Round(r.Level)
	}
	return cmp.Or(c, cmp.Compare(max(o.ExcessPercent, 0), max(r.ExcessPercent, 0)), cmp.Compare(near(o), near(r)), cmp.Compare(o.Use, r.Use))
}

// row is the row of the item.
func (it *Item) row() Row {
	r := Row{Item: it, idle: !it.Place.InForce, Use: it.UseBits().Or(0), Dropped: it.DroppedBits().Or(0), Refusing: it.Refusing(), OfRate: it.UsePercent().Or(-1),
		DroppedPercent: it.DroppedPercent().Or(-1), ExcessPercent: it.ExcessPercent().Or(-1), Level: it.FullPercent(it.Level).Or(-1)}
	if r.Level >= 0 {
		r.Level = max(r.Level, it.fullest)
	}
	return r
}

// Rows are those of a view. of is how many there were without Search and Top.
func (out *Reading) Rows(v View) (rows []Row, of int) {
	c := v.choice()
	var r Row // one for all: most are not chosen
	if v.By == "bucket" {
		for _, b := range out.Fullest {
			if v.Chosen == nil || v.Chosen(b.Item) {
				r = b.PartRow(Part{Bucket: b.Bucket, Full: known(b.Percent)})
				c.add(&r)
			}
		}
		return c.first(), c.of
	}
	tree, picked := v.By == "tree" || v.By == "node", out.picked(v)
	wants := func(it *Item) bool {
		ofKind := v.Kind == "" || it.IsPool() == (v.Kind == "pool") || tree && it.Above != nil
		return ofKind && (v.Chosen == nil || v.Chosen(it)) && (picked == nil || picked[it.Limit])
	}
	switch {
	case tree:
		return out.tree(wants, v)
	case v.By != "name":
		for i := range out.Items {
			if it := &out.Items[i]; wants(it) {
				r = it.row()
				c.add(&r)
			}
		}
	default:
		names := out.scene.names
		if v.Kind != "" || v.Chosen != nil || picked != nil {
			names = func() []*Name { return out.scene.namesOf(func(l *Limit) bool { return wants(&out.Items[l.index]) }) }
		}
		for _, n := range names() {
			r = out.name(n)
			c.add(&r)
		}
	}
	return c.first(), c.of
}

// Arrange leaves of rows what Search and Show want, and the first of them by the order. of is how many there were.
func (v View) Arrange(all []Row) (rows []Row, of int) {
	c := v.choice()
	for i := range all {
		c.add(&all[i])
	}
	return c.first(), c.of
}

// picked are what Name and Of pick; nil for all.
func (out *Reading) picked(v View) map[*Limit]bool {
	if v.Name == "" && v.Of == "" {
		return nil
	}
	some := map[*Limit]bool{}
	for i := range out.Items {
		l := out.Items[i].Limit
		if v.Name != "" && (l.IsPool() || l.Who() != v.Name) || v.Of != "" && l.Key.String() != v.Of {
			continue
		}
		some[l] = true
		if v.By == "tree" {
			for above := l.Above; above != nil; above = above.Above {
				some[above] = true
			}
			for _, below := range l.members {
				some[below] = true
			}
		}
	}
	return some
}

// A choice takes the rows that Search and Show want, and of these the first ones by the order, as many as Top says.
type choice struct {
	most    int
	wanted  func(*Row) bool // nil for all
	compare func(a, b *Row) int
	rows    []Row
	of      int // how many rows there were
}

func (v View) choice() *choice {
	c := &choice{most: v.Top, wanted: v.wanted(), compare: worst}
	if o := orders[max(0, slices.IndexFunc(orders, func(o order) bool { return o.name == v.Sort }))]; o.name != Worst {
		c.compare = func(a, b *Row) int { return cmp.Or(o.compare(a, b), a.tie(b)) }
	}
	return c
}

func (c *choice) add(r *Row) {
	c.of++
	last := len(c.rows) - 1
	switch full := c.most > 0 && len(c.rows) == c.most; {
	case c.wanted != nil && !c.wanted(r), full && c.compare(r, &c.rows[last]) >= 0:
		return
	case c.most == 0: // they are sorted in the end
		c.rows = append(c.rows, *r)
		return
	case full:
		c.rows = c.rows[:last]
	}
	at := len(c.rows)
	for at > 0 && c.compare(r, &c.rows[at-1]) < 0 {
		at--
	}
	c.rows = slices.Insert(c.rows, at, *r)
}

func (c *choice) first() []Row {
	if c.most > 0 {
		return c.rows
	}
	at := make([]*Row, len(c.rows)) // rows are large
	for i := range at {
		at[i] = &c.rows[i]
	}
	slices.SortStableFunc(at, c.compare)
	sorted := make([]Row, len(at))
	for i, r := range at {
		sorted[i] = *r
	}
	return sorted
}

// worst compares rows by Worst, of a tree by the worst row within them.
func worst(a, b *Row) int {
	a, b = cmp.Or(a.foremost, a), cmp.Or(b.foremost, b)
	return cmp.Or(a.worse(b), a.tie(b))
}

// tie orders what is otherwise alike: names and pools by name, and rules by their places.
func (r *Row) tie(o *Row) int {
	if r.Name != nil && o.Name != nil || r.Part != nil && o.Part != nil {
		return plain.Natural(r.Called(), o.Called())
	}
	return r.first().Compare(o.first())
}

// wanted says whether a row is what Search and Show ask for; nil for all rows.
func (v View) wanted() func(*Row) bool {
	words := strings.Fields(strings.ToLower(v.Search))
	if len(words) == 0 && v.Show == "" {
		return nil
	}
	addresses := make([]netip.Addr, len(words))
	for i, word := range words {
		addresses[i], _ = netip.ParseAddr(word) // most words are none
	}
	return func(r *Row) bool {
		if v.Show != "" && !r.does(v.Show) {
			return false
		}
		for i, word := range words {
			isPart := r.Part != nil && strings.Contains(r.Part.Name, word)
			if !isPart && !slices.ContainsFunc(r.All(), func(it *Item) bool { return it.matches(word, addresses[i]) }) {
				return false
			}
		}
		return true
	}
}

// matches reports whether a word, in lower case, is in what people know a rule or pool by, or an address is in its network.
func (l *Limit) matches(word string, a netip.Addr) bool {
	if a.IsValid() && !l.IsPool() && l.Prefix.Contains(a) {
		return true
	}
	for _, text := range [...]string{l.Label.Name, l.Label.Plan, l.Label.Note, l.Label.Host.String(), string(l.Within), l.Key.String()} {
		if strings.Contains(strings.ToLower(text), word) {
			return true
		}
	}
	return false
}

// tree are pools with what is within them below, each level in the order. What the search leaves has those above it.
func (out *Reading) tree(wants func(*Item) bool, v View) (rows []Row, of int) {
	var all []Row
	if v.Of == "" && v.Name == "" {
		all = make([]Row, 0, len(out.Items)) // rows are large
	}
	for i := range out.Items {
		if it := &out.Items[i]; wants(it) {
			all = append(all, it.row())
		}
	}
	at := make([]*Row, len(out.Items)) // the row of an item
	for i := range all {
		at[all[i].index] = &all[i]
	}
	above := func(l *Limit) *Row {
		if l.Above == nil {
			return nil
		}
		return at[l.Above.index]
	}
	lift := func(l *Limit) { // a pool comes where the worst row within it does
		if r, pool := at[l.index], above(l); r != nil && pool != nil && worst(r, pool) < 0 {
			pool.foremost = cmp.Or(r.foremost, r)
		}
	}
	for i := range all {
		if !all[i].IsPool() {
			lift(all[i].Limit)
		}
	}
	for _, pool := range out.scene.pools {
		lift(pool)
	}
	wanted := v.wanted()
	ordered := v
	if ordered.Search, ordered.Show = "", ""; wanted != nil {
		ordered.Top = 0 // as some have no row
	}
	var grow func(r Row, depth int, whole bool)
	level := func(below iter.Seq[*Limit], depth int, whole bool) {
		c, left := ordered.choice(), v.Top
		for l := range below {
			if r := at[l.index]; r != nil && (v.By != "node" || r.IsPool() && r.owner == "") {
				c.add(r)
			}
		}
		for _, r := range c.first() {
			begin := len(rows)
			if grow(r, depth, whole); len(rows) > begin {
				if left--; left == 0 {
					break
				}
			}
		}
	}
	grow = func(r Row, depth int, whole bool) {
		begin := len(rows)
		if v.Most > 0 && begin >= v.Most {
			return
		}
		whole = whole || wanted == nil || wanted(&r)
		r.Depth = depth
		if rows = append(rows, r); r.IsPool() && (v.Open == nil || wanted != nil || slices.Contains(v.Open, r.Key.Pool)) {
			level(slices.Values(r.members), depth+1, whole)
		}
		if !whole && len(rows) == begin+1 {
			rows = rows[:begin]
		}
	}
	if v.Under != "" {
		if it := out.Find(Key{Pool: v.Under}); it != nil && at[it.index] != nil {
			grow(*at[it.index], 0, false)
		}
		return rows, max(len(rows), 1)
	}
	level(func(yield func(*Limit) bool) {
		for i := range out.scene.limits {
			if l := &out.scene.limits[i]; above(l) == nil && !yield(l) {
				return
			}
		}
	}, 0, false)
	return rows, len(all)
}
