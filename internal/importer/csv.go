package importer

import (
	"cmp"
	"regexp"
	"strconv"
	"strings"

	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	unknownColumn = reason{other, "column of unknown meaning", "only some names of columns are known", "it was left out; rename it if it has a limit"}
	unknownPool   = reason{loosens, "unknown pool", "no row without an address has that name, so no pool limits this one",
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
	quota  policy.Also
	within string
	where  string
	pool   policy.Within // that of its rules, or of the rows that name it
	seen   bool          // by addPools
}

type customers struct {
	*shapedDevices
	then  policy.Then
	all   []*customer
	named map[string]*customer // those that are pools
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
		for _, h := range s.header {
			if h != "" && csvNames[s.headerName(h)] == "" {
				s.leave(unknownColumn, "line 1", "%s", h)
			}
		}
	}
	if err := s.read(table.Text); err != nil {
		return Imported{}, err
	}
	for _, c := range s.all {
		s.addPools(c)
	}
	return s.imported(), nil
}

// row takes a row.
func (s *customers) row() {
	before := len(s.errors)
	networks := append(append(s.networks("address"), s.networks(ipv4)...), s.networks(ipv6)...)
	c := &customer{circuit: &circuit{}, quota: s.quota(), within: cut(oneLine(s.cell("pool")), maxID), where: s.where}
	if c.name = cut(oneLine(s.cell("name")), maxID); c.name == "" && len(networks) > 0 {
		c.name = policy.NetworkText(networks[0])
	}
	c.id, c.title, c.who = c.name, c.name, strconv.Quote(c.name)
	for w, column := range [ways]string{"download", "upload"} {
		c.rates[w], c.whys[w] = s.anySpeed(column)
	}
	switch {
	case len(s.errors) > before:
		return
	case len(networks) > 0:
		s.own(&csvRow{of: c.circuit, where: s.where, note: cut(oneLine(s.cell("note")), policy.MaxNote)}, networks)
	case c.name == "" || s.named[c.name] != nil || c.rates[down]+c.rates[up] == 0:
		s.leave(noAddress, s.where, "%s", c.who)
		return
	default:
		s.named[c.name] = c
	}
	s.all, s.order = append(s.all, c), append(s.order, c.circuit)
}

var writtenRate = regexp.MustCompile(`^([0-9.]+) *([kmg])(bps|bit/s|b/s|bits?)?$`)

// anySpeed reads a rate: a number of megabits per second, or with a unit of bits.
func (s *customers) anySpeed(column string) (rate policy.Rate, why reason) {
	parts := writtenRate.FindStringSubmatch(strings.ToLower(s.cell(column)))
	if parts == nil {
		return s.speed(column)
	}
	rate, err := policy.ParseRate(parts[1] + parts[2] + "bit")
	if err != nil {
		why = outside
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
	if !strings.Contains(size, "/") {
		period := cmp.Or(strings.ToLower(s.cell("period")), "month")
		size += "/" + cmp.Or(map[string]string{"daily": "day", "weekly": "week", "monthly": "month"}[period], period)
	}
	if err := a.Quota.Set(size); err != nil {
		s.problem(s.at["quota"], "%v", err)
	}
	a.Then = s.then
	if text := s.cell("then"); strings.EqualFold(text, policy.ThenDrop.String()) {
		a.Then = policy.ThenDrop
	} else if text != "" {
		rate, why := s.anySpeed("then")
		if a.Then = policy.Then(rate); rate == 0 || why != (reason{}) {
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
	if above := s.named[c.within]; above != nil {
		c.pool = s.addPools(above)
	} else if c.within != "" {
		s.leave(unknownPool, c.where, "%s is within %s", c.who, c.within)
	}
	rate := c.rates[down] + c.rates[up]
	pool := policy.Rule{Rate: rate, Capacity: policy.DefaultCapacity(rate), Within: c.pool, Also: c.quota}
	if c.rows == nil {
		pool.Share.Kind = policy.ShareMember
	}
	if (c.rows == nil || c.quota != policy.Also{}) && rate != 0 {
		c.pool = cmp.Or(s.collector.addPool(c.name, "", pool, c.where), c.pool)
	}
	c.node = &node{pool: [ways]policy.Within{c.pool, c.pool}}
	for w := range ways {
		if c.rows != nil {
			s.limit(c.circuit, w)
		}
	}
	return c.pool
}
