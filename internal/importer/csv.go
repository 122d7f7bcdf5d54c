package importer

import (
	"cmp"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	unknownColumn = reason{other, "column of unknown meaning", "only some names of columns are known", "it was left out; rename it if it has a limit"}
	unknownPool   = reason{loosens, "unknown pool", "no row without an address has that name, or it is within this one, so no pool limits this one",
		"add a row with its name and rates, but without an address"}
)

// csvNames are the columns of common CSV by headerName.
var csvNames = func() map[string]string {
	all := map[string]string{}
	for _, names := range []string{
		"name customer customername client subscriber user username", "address addresses ip ips ipaddress ipaddresses network networks prefix subnet cidr",
		ipv4, ipv6, "download down downloadmax maxdownload downloadrate downloadspeed", "upload up uploadmax maxupload uploadrate uploadspeed",
		"quota datacap cap volume", "period quotaperiod per", "then throttle afterquota", "pool parent parentnode within group", "note notes comment remark",
	} {
		for _, name := range strings.Fields(names) {
			all[name] = strings.Fields(names)[0]
		}
	}
	return all
}()

// CSVOptions say what to make of common CSV.
type CSVOptions struct {
	Device, Upload string      // see LibreQoSOptions
	Then           policy.Then // of quotas without one; 0 for an error
	SkipBad        bool
}

// A customer is a row; without an address it is a pool that others name.
type customer struct {
	*circuit
	limit  policy.Rule // its pool, if it is pooled
	pooled bool
	within string
	where  string
	pool   policy.Within // that of its rules, or of the rows that name it
	seen   bool          // by addPools
	named  bool          // by another row, as its pool
}

type customers struct {
	*shapedDevices
	then  policy.Then
	all   []*customer
	named map[string]*customer
}

// CSV imports a table of customers, whose first line names the columns. Mistakes in the rows are an error of type policyfile.Errors.
func CSV(table File, o CSVOptions) (Imported, error) {
	s := &customers{newShapedDevices(table, LibreQoSOptions{Device: o.Device, Upload: o.Upload, SkipBad: o.SkipBad}), o.Then, nil, map[string]*customer{}}
	s.names, s.such, s.take, s.semicolons = csvNames, "name, address, download, upload and quota", s.row, true
	s.check = func() {
		s.need("download", "download")
		s.need("upload", "upload")
		if !s.has(ipv4) && !s.has(ipv6) {
			s.need("address", "address")
		}
		for i, h := range s.header {
			if h == "" || csvNames[s.headerName(h)] != "" {
				continue
			}
			if known := plain.Similar(h, slices.Sorted(maps.Keys(csvNames))); known != "" {
				s.problem(i, "unknown column %q; did you mean %q? if not, name it otherwise", h, known)
			} else {
				s.leave(unknownColumn, "line 1", "%s", h)
			}
		}
		if len(s.errors) == 0 && !s.has("quota") && (s.has("then") || s.has("period") || s.then != 0) {
			s.problem(s.at["then"], "then or period without quota: nobody would have one; is the column quota missing or misspelt?")
		}
	}
	if err := s.read(table.Text); err != nil {
		return Imported{}, err
	}
	for _, c := range s.all {
		s.addPools(c)
	}
	for _, c := range s.all {
		if c.rows == nil && !c.named {
			s.leave(noAddress, c.where, "%s, a pool that no row names", c.who)
		}
	}
	return s.imported(), nil
}

// row takes a row.
func (s *customers) row() {
	before := len(s.errors)
	networks := append(append(s.networks("address"), s.networks(ipv4)...), s.networks(ipv6)...)
	c, quota := &customer{circuit: &circuit{}, within: cut(oneLine(s.cell("pool")), maxID), where: s.where}, s.quota()
	if c.name = cut(oneLine(s.cell("name")), maxID); c.name == "" && len(networks) > 0 {
		c.name = policy.NetworkText(networks[0])
	}
	c.id, c.title, c.who = c.name, c.name, strconv.Quote(c.name)
	for w, column := range [ways]string{"download", "upload"} {
		c.rates[w], c.whys[w] = s.anySpeed(column)
	}
	rate := c.rates[down] + c.rates[up]
	c.limit = policy.Rule{Pool: true, Prefix: policy.PoolKey(c.name), Label: policy.Label{Name: c.name},
		Rate: rate, Capacity: policy.DefaultCapacity(rate), Also: quota}
	c.pooled = len(networks) == 0 || quota != policy.Also{}
	invalid, first := c.limit.Validate(), s.named[c.name]
	switch {
	case len(s.errors) > before:
	case strings.HasSuffix(c.name, " "+down.String()), strings.HasSuffix(c.name, " "+up.String()):
		s.problem(s.at["name"], "the name %s ends as those of the pools of a customer with several addresses; give it another end", c.who)
	case len(networks) == 0 && (c.name == "" || rate == 0):
		s.leave(noAddress, s.where, "%s", c.who)
	case first != nil:
		s.problem(s.at["name"], "the name %s was in %s; give each customer one name and one row", c.who, first.where)
	case c.pooled && invalid != nil:
		s.problem(s.at["download"], "the pool of %s has the sum of both rates: %v", c.who, invalid)
	default:
		if len(networks) > 0 {
			s.own(&csvRow{of: c.circuit, where: s.where, note: cut(oneLine(s.cell("note")), policy.MaxNote)}, networks)
		}
		s.named[c.name], s.all, s.order = c, append(s.all, c), append(s.order, c.circuit)
	}
}

// networks are those in a cell of a column. Two customers cannot have the same.
func (s *customers) networks(column string) []netip.Prefix {
	all := s.shapedDevices.networks(column)
	for _, p := range all {
		if owner := s.owners[p]; owner != nil {
			s.problem(s.at[column], "%s was in %s; remove it from one of them", policy.NetworkText(p), owner.where)
		}
	}
	return all
}

var writtenRate = regexp.MustCompile(`^([0-9]+(?:\.[0-9]+)?) *([kmg])(bps|bit/s|b/s|bits?)?$`)

// anySpeed reads a rate: a number of megabits per second, or with a unit of bits.
func (s *customers) anySpeed(column string) (rate policy.Rate, why reason) {
	text := s.cell(column)
	if parts := writtenRate.FindStringSubmatch(strings.ToLower(text)); parts == nil {
		rate, why = s.speed(column)
	} else if r, err := policy.ParseRate(parts[1] + parts[2] + "bit"); err != nil {
		why = outside
	} else {
		rate = r
	}
	if why == outside {
		s.problem(s.at[column], "%s %.40q is too small or too large; %s, and numbers without a unit are Mbit/s", s.header[s.at[column]], text, outside.Why)
	}
	return rate, why
}

// quota reads the quota of a row, in gigabytes if there is no unit, and by default for a month.
func (s *customers) quota() (a policy.Also) {
	size := strings.ReplaceAll(strings.ToLower(s.cell("quota")), " ", "")
	if size == "" || size == "unlimited" || size == "none" {
		return a
	}
	if plainNumber.MatchString(size) {
		size += "gb"
	}
	period := strings.ToLower(s.cell("period"))
	period = cmp.Or(map[string]string{"daily": "day", "weekly": "week", "monthly": "month"}[period], period)
	if _, own, found := strings.Cut(size, "/"); !found {
		size += "/" + cmp.Or(period, "month")
	} else if period != "" && period != own {
		s.problem(s.at["period"], "the period is %s, but that of the quota %s; remove one", period, own)
	}
	if err := a.Quota.Set(size); err != nil {
		s.problem(s.at["quota"], "%v; none, unlimited or an empty cell mean no quota", err)
	}
	a.Then = s.then
	if text := s.cell("then"); strings.EqualFold(text, policy.ThenDrop.String()) {
		a.Then = policy.ThenDrop
	} else if text != "" {
		before := len(s.errors)
		rate, why := s.anySpeed("then")
		if a.Then = policy.Then(rate); rate == 0 && why != outside {
			s.errors = s.errors[:before] // that does not know drop
			s.problem(s.at["then"], "then %q is neither a rate such as 5mbit nor drop", text)
		}
	} else if a.Then == 0 {
		s.problem(s.at["quota"], "nothing says what comes after the quota; add a column then with a rate or drop, or give --then")
	}
	return a
}

// addPools adds the pools of a row after those above it, and its rules within them.
func (s *customers) addPools(c *customer) policy.Within {
	if c.seen {
		return c.pool
	}
	c.seen = true
	above := s.named[c.within]
	isPool := above != nil && above.rows == nil
	if isPool {
		above.named = true
	}
	switch {
	case isPool && (above.node != nil || !above.seen):
		c.pool = s.addPools(above)
	case c.within != "":
		s.leave(unknownPool, c.where, "%s is within %s", c.who, c.within)
	}
	c.limit.Within = c.pool
	if c.rows == nil {
		c.limit.Share.Kind = policy.ShareMember
	}
	if c.pooled {
		c.pool = cmp.Or(s.collector.addPool(c.name, "", c.limit, c.where), c.pool)
	}
	c.node = &node{pool: [ways]policy.Within{c.pool, c.pool}}
	for w := range ways {
		if c.rows != nil {
			s.limit(c.circuit, w)
		}
	}
	return c.pool
}
