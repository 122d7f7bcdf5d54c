package importer

import (
	"bytes"
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/shapectl/shapectl/internal/input"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	guaranteed = reason{other, "guaranteed rate", "no pool with a rate is above it, so nothing can be guaranteed",
		"give its parent node in network.json a rate"}
	highGuarantee = reason{other, "guaranteed rate above the rate", "a rule or pool never gets more than its rate",
		"it was lowered to the rate; correct one of them"}
	noTree = reason{loosens, "parent node", "the tree of nodes is not here, so a node's rate does not limit its subscribers together",
		"give it with --network network.json"}
	unknownNode = reason{loosens, "unknown parent node", "network.json has no node of that name",
		"its subscribers are in no pool; correct the name"}
	unlike = reason{other, "row unlike the first of its circuit", "a circuit has one rate and one parent node",
		"those of its first row were used, as LibreQoS does; correct the row"}
	zeroRate = reason{unblocks, "rate of 0", "no rule can have it, so this direction has no limit at all",
		"to block it, write a small rate such as 0.1, or block the address in a firewall"}
	noRate = reason{loosens, "missing rate", "the source has no rate",
		"no rule was made, so this direction is not limited; write a rate"}
	noAddress = reason{loosens, "row without an address", "a rule needs a network",
		"no rule was made; write an IPv4 or IPv6 address"}
	skipped  = reason{unblocks, "row that cannot be read", "--skip-bad leaves it out", "its subscriber has no limit; correct the row"}
	hostBits = reason{other, "address with the prefix length of a network", "a rule is for a whole network",
		"the network was used; leave out the length if only the address was meant"}
	disciplines = reason{other, "queue discipline", "rules drop excess packets by default",
		"set excess: delay in rules that should queue them"}
	noSuchGuarantee = reason{other, "guaranteed rate that no rule can have", fmt.Sprintf("rates are whole bits per second, %v to %v", policy.MinRate, policy.MaxRate),
		"it was left out; write another rate"}
	noSuchRate = reason{loosens, "rate that no rule can have", fmt.Sprintf("rates are whole bits per second, %v to %v", policy.MinRate, policy.MaxRate),
		"no rule was made for it; write another rate"}
)

// columnNames has the columns of ShapedDevices.csv by headerName, including the names of
// earlier versions.
var columnNames = map[string]column{
	"circuitid": circuitID, "circuitiddonotduplicate": circuitID, "id": anchorID, "circuitname": circuitName, "devicename": deviceName, "hostname": deviceName,
	"parentnode": parentNode, "ap": parentNode, "ipv4": ipv4, "ipv6": ipv6,
	"downloadmin": downloadMin, "uploadmin": uploadMin, "downloadmax": downloadMax, "uploadmax": uploadMax,
	"parentnodeid": nodeID, "anchornodeid": anchorID, "comment": remark, "sqm": sqm,
}

type column int

const (
	circuitID column = iota
	circuitName
	deviceName
	parentNode
	nodeID
	anchorID
	ipv4
	ipv6
	downloadMin
	uploadMin
	downloadMax
	uploadMax
	remark
	sqm
	columns
)

// headerName returns a column's name without case, punctuation and unit, which differ
// between versions.
func headerName(s string) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsLetter(r) || unicode.IsDigit(r) {
			return unicode.ToLower(r)
		}
		return -1
	}, s)
	return strings.TrimSuffix(s, "mbps")
}

// shapedDevices reads a ShapedDevices.csv.
type shapedDevices struct {
	*collector
	file   string
	text   []byte
	csv    *csv.Reader
	at     layout
	header []string
	errors policyfile.Errors // with columns in bytes
	torn   bool              // quotes took one row for several, so nobody knows which are bad
	short  []string          // rows without the columns for numbers of nodes
	rows   []*subscriber

	nodes    *nodes // nil if there is no network.json
	keys     [ways]tableKey
	circuits map[string]*circuit
	order    []*circuit
	LibreQoSOptions
	protected map[string]bool // patterns of Protect that a circuit matched
}

// A subscriber is the circuit of a row.
type subscriber struct {
	where    string
	name     string // of its rules
	note     string
	networks []netip.Prefix
}

// A circuit is the rows that share a rate.
type circuit struct {
	rows         []*subscriber
	id           string                // what its pools are named after
	has          map[netip.Prefix]bool // networks of its rows
	name         string                // for reports
	protected    bool
	rates, least [ways]speed
	node         *node
}

// A File is a text with the name that errors have.
type File struct {
	Name string
	Text io.Reader
}

// LibreQoSOptions say what to make of the files of LibreQoS.
type LibreQoSOptions struct {
	Device  string       // faces the subscribers: downloads leave it, and uploads enter it
	Upload  string       // uploads leave this device instead, which faces the Internet, and are matched by source; "" for none
	Share   policy.Share // of each circuit
	Protect []string     // patterns, as of path.Match: guarantees of circuits with such an ID, name or comment are not lowered
	SkipBad bool         // rows that cannot be read are left out
}

// LibreQoS imports a ShapedDevices.csv, and the tree of nodes in a network.json unless its Text is
// nil. Mistakes in the texts are an error of type policyfile.Errors.
func LibreQoS(devices, network File, o LibreQoSOptions) (Imported, error) {
	s := &shapedDevices{
		collector: newCollector(), file: devices.Name, LibreQoSOptions: o,
		keys:     [ways]tableKey{{o.Device, policy.Egress}, {o.Device, policy.Ingress}},
		circuits: map[string]*circuit{}, protected: map[string]bool{},
	}
	if o.Upload != "" {
		s.keys[up] = tableKey{o.Upload, policy.Egress}
	}
	s.note("LibreQoS queues excess packets, and these rules drop them; to mark them first, write 'defaults: {excess: ecn}' above devices")
	var err error
	if network.Text != nil {
		s.nodes = &nodes{collector: s.collector, file: network.Name, named: map[string]*node{}, ids: map[string]*node{}}
		if s.nodes.text, err = input.All(network.Text); err == nil {
			err = s.nodes.read()
		}
		if err != nil {
			return Imported{}, err
		}
	}
	if s.text, err = input.All(devices.Text); err != nil {
		return Imported{}, err
	}
	if err := s.open(); err != nil {
		return Imported{}, err
	}
	header, _ := s.csv.FieldPos(0)
	for {
		record, err := s.csv.Read()
		if err == io.EOF {
			break
		}
		if err != nil {
			s.syntax(err)
		} else {
			s.read(record)
		}
	}
	if s.SkipBad && !s.torn {
		for _, e := range s.located() {
			s.leave(skipped, fmt.Sprintf("line %d", e.Line), "%s", e.Message)
		}
	} else if len(s.errors) > 0 {
		return Imported{}, s.located()
	}
	if len(s.rows) == 0 {
		return Imported{}, s.wrong(header, 1, "no row follows the header; is the file cut off?")
	}
	if s.text[len(s.text)-1] != '\n' {
		s.note("the last line does not end with a line break: if the file is cut off, rows are missing and the last cell may be wrong")
	}
	s.room = 5 * len(s.order) / 2 // two families, and some with more addresses
	if t := s.tables[pools]; t != nil {
		t.Rules = slices.Grow(t.Rules, s.room)
	}
	for _, c := range s.order {
		for w := range ways {
			s.limit(c, w)
		}
	}
	for _, pattern := range s.Protect {
		if !s.protected[pattern] {
			s.note(fmt.Sprintf("no circuit has an ID, name or comment that matches %q, so no guarantee is protected by it", pattern))
		}
	}
	if len(s.short) > 0 {
		s.note(fmt.Sprintf("%s had fewer columns than the header, such as %s: read without Parent Node ID and Anchor Node ID; check one of them",
			plain.Count(len(s.short), "row"), s.short[0]))
	}
	return s.imported(), nil
}

const byteOrderMark = "\ufeff"

// open reads the header.
func (s *shapedDevices) open() error {
	if bytes.HasPrefix(s.text, []byte("\xff\xfe")) || bytes.HasPrefix(s.text, []byte("\xfe\xff")) {
		return s.wrong(1, 1, "the text is UTF-16; save it as UTF-8")
	}
	s.text = bytes.TrimPrefix(s.text, []byte(byteOrderMark))
	if valid := validPrefix(s.text); len(valid) < len(s.text) {
		line, column := 1+bytes.Count(valid, []byte("\n")), len(valid)-bytes.LastIndexByte(valid, '\n')
		return s.wrong(line, column, "the text is not UTF-8; convert it, for Latin-1 with 'iconv -f latin1 -t utf-8'")
	}
	if bytes.HasPrefix(bytes.TrimSpace(s.text), []byte("{")) {
		return s.wrong(1, 1, "this is JSON, perhaps network.json; give ShapedDevices.csv here, and network.json with --network")
	}
	s.csv = csv.NewReader(bytes.NewReader(s.text))
	s.csv.Comment, s.csv.TrimLeadingSpace, s.csv.FieldsPerRecord, s.csv.ReuseRecord = '#', true, -1, true
	header, err := s.csv.Read()
	if err == io.EOF {
		return s.wrong(1, 1, "there is no header; the first line names the columns, such as IPv4 and Download Max Mbps")
	}
	if err != nil {
		s.syntax(err)
		return s.located()
	}
	s.header = slices.Clone(header)
	for i := range s.at {
		s.at[i] = -1
	}
	for i, h := range header {
		c, known := columnNames[headerName(h)]
		if !known {
			continue
		}
		if s.at[c] >= 0 {
			s.problem(i, "the column %.40q appears twice, first as %.40q; remove one", h, s.header[s.at[c]])
			continue
		}
		s.at[c] = i
	}
	for _, c := range []struct {
		need []column
		name string
	}{{[]column{ipv4, ipv6}, "IPv4"}, {[]column{downloadMax}, "Download Max Mbps"}, {[]column{uploadMax}, "Upload Max Mbps"}} {
		if !slices.ContainsFunc(c.need, func(c column) bool { return s.at[c] >= 0 }) {
			s.problem(0, "there is no column %s; the columns are %.100q; is this a ShapedDevices.csv, with commas between columns?",
				c.name, strings.Join(header, ","))
			break
		}
	}
	if len(s.errors) > 0 {
		return s.located()
	}
	return nil
}

// validPrefix returns the text before the first byte that is not UTF-8.
func validPrefix(text []byte) []byte {
	for at := 0; at < len(text); {
		r, size := utf8.DecodeRune(text[at:])
		if r == utf8.RuneError && size == 1 {
			return text[:at]
		}
		at += size
	}
	return text
}

// problem adds an error with a cell.
func (s *shapedDevices) problem(field int, format string, args ...any) {
	line, column := s.csv.FieldPos(field)
	s.errors = append(s.errors, policyfile.Error{File: s.file, Line: line, Column: column, Message: fmt.Sprintf(format, args...)})
}

// wrong returns all errors and a last one, whose column is in bytes.
func (s *shapedDevices) wrong(line, column int, message string) error {
	s.errors = append(s.errors, policyfile.Error{File: s.file, Line: line, Column: column, Message: message})
	return s.located()
}

// located returns the errors in the order of the file, with columns in characters.
func (s *shapedDevices) located() policyfile.Errors {
	sort.SliceStable(s.errors, func(i, j int) bool {
		a, b := s.errors[i], s.errors[j]
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column)) < 0
	})
	line, rest := 1, s.text
	for i, e := range s.errors {
		for ; line < e.Line; line++ {
			_, rest, _ = bytes.Cut(rest, []byte("\n"))
		}
		s.errors[i].Column = 1 + utf8.RuneCount(rest[:max(0, min(len(rest), e.Column-1))])
	}
	return s.errors
}

// syntax adds an error of package csv, which reads from memory.
func (s *shapedDevices) syntax(err error) {
	bad, _ := errors.AsType[*csv.ParseError](err)
	why := "a quote is in the middle of a cell"
	if errors.Is(bad.Err, csv.ErrQuote) {
		why = "a quote is not closed, or something follows it"
	}
	s.torn = s.torn || bad.Line != bad.StartLine
	s.errors = append(s.errors, policyfile.Error{File: s.file, Line: bad.Line, Column: bad.Column,
		Message: why + "; put quotes around a whole cell, and write a quote inside as two"})
}

// A shapedDevice is a row: a device of a subscriber.
type shapedDevice struct {
	*shapedDevices
	layout
	record      []string
	where, name string
}

// read reads a row.
func (s *shapedDevices) read(record []string) {
	if !slices.ContainsFunc(record, func(cell string) bool { return strings.TrimSpace(cell) != "" }) {
		return // spreadsheets write empty rows at the end
	}
	line, _ := s.csv.FieldPos(0)
	r := shapedDevice{shapedDevices: s, layout: s.at, record: record, where: fmt.Sprintf("line %d", line)}
	switch n := len(s.header); {
	case len(record) > n && strings.TrimSpace(strings.Join(record[n:], "")) != "":
		s.problem(n, "%d columns where the header has %d; put quotes around a cell with a comma", len(record), n)
		return
	case len(record) < n:
		short, gone := s.withoutNumbers()
		if r.layout = short; len(record)+gone != n || !r.plausible() {
			s.problem(len(record)-1, "%s where the header has %d; is the row cut off?", plain.Count(len(record), "column"), n)
			return
		}
		s.short = append(s.short, r.where)
	}
	r.rules()
}

// withoutNumbers returns the layout of rows without the columns for numbers of nodes, and
// the number of these columns. Some files have them only in the header.
func (s *shapedDevices) withoutNumbers() (at layout, gone int) {
	at = s.at
	for _, c := range []column{nodeID, anchorID} {
		if s.at[c] < 0 {
			continue
		}
		gone++
		for i := range at {
			if s.at[i] > s.at[c] {
				at[i]--
			}
		}
		at[c] = -1
	}
	return at, gone
}

// A layout is the index of each column; -1 if it does not exist.
type layout [columns]int

// cell returns the cell of a column, "" for none.
func (r *shapedDevice) cell(c column) string {
	if i := r.layout[c]; i >= 0 && i < len(r.record) {
		return strings.TrimSpace(r.record[i])
	}
	return ""
}

// plausible reports whether the layout finds addresses and rates in a row.
func (r *shapedDevice) plausible() bool {
	addresses := append(words(r.cell(ipv4)), words(r.cell(ipv6))...)
	for _, a := range addresses {
		address, _, _ := strings.Cut(a, "/")
		if _, err := netip.ParseAddr(address); err != nil {
			return false
		}
	}
	for _, c := range []column{downloadMin, uploadMin, downloadMax, uploadMax} {
		if rate := r.cell(c); rate != "" && !plainNumber.MatchString(rate) {
			return false
		}
	}
	return len(addresses) > 0
}

// words returns the addresses of a cell.
func words(cell string) []string {
	return strings.FieldsFunc(cell, func(r rune) bool { return r == ',' || r == ';' || unicode.IsSpace(r) })
}

// rules adds a row to its circuit.
func (r *shapedDevice) rules() {
	v := r.subscriber()
	before := len(r.errors)
	networks := append(r.networks(ipv4), r.networks(ipv6)...)
	c := circuit{name: r.name, id: cmp.Or(oneLine(r.cell(circuitID)), v.name, r.where), has: map[netip.Prefix]bool{}}
	for _, pattern := range r.Protect {
		for _, text := range []string{r.cell(circuitID), r.cell(circuitName), r.cell(remark)} {
			if matches(pattern, text) {
				c.protected, r.protected[pattern] = true, true
			}
		}
	}
	for w, columns := range [ways][2]column{down: {downloadMax, downloadMin}, up: {uploadMax, uploadMin}} {
		c.rates[w], c.least[w] = r.speed(columns[0]), r.speed(columns[1])
	}
	if len(r.errors) > before {
		return
	}
	if queue := r.cell(sqm); queue != "" {
		r.leave(disciplines, r.where, "%s for %s", queue, r.name)
	}
	c.node = r.node()
	if len(networks) == 0 {
		r.leave(noAddress, r.where, "%s", r.name)
		return
	}
	of := r.circuit(&c)
	for _, p := range networks {
		if !of.has[p] {
			of.has[p] = true
			v.networks = append(v.networks, p)
		}
	}
	of.rows = append(of.rows, v)
}

// matches reports whether a valid pattern matches a text, in which a slash is a character like any other.
func matches(pattern, text string) bool {
	slash := strings.NewReplacer("/", "\x00")
	match, _ := path.Match(slash.Replace(pattern), slash.Replace(text))
	return match
}

// circuit returns the circuit of a row, which is new if no row before had the circuit ID. A row without one has its own.
func (r *shapedDevice) circuit(c *circuit) *circuit {
	id := r.cell(circuitID)
	if first := r.circuits[id]; first != nil && id != "" {
		if c.rates != first.rates || c.least != first.least || c.node != first.node {
			r.leave(unlike, r.where, "%s, first in %s", c.name, first.rows[0].where)
		}
		return first
	}
	r.circuits[id] = c
	r.order = append(r.order, c)
	return c
}

// networks returns the networks of all rows.
func (c *circuit) networks() (all []netip.Prefix) {
	for _, r := range c.rows {
		all = append(all, r.networks...)
	}
	return all
}

// site returns the name of the parent node; "" for none.
func (r *shapedDevice) site() string {
	if site := oneLine(r.cell(parentNode)); !strings.EqualFold(site, "none") {
		return site
	}
	return ""
}

// node returns the parent node; nil for none.
func (r *shapedDevice) node() *node {
	site := r.site()
	found := r.nodes.find(site, r.cell(nodeID))
	switch {
	case found != nil || site == "" || r.nodes != nil && len(r.nodes.roots) == 0: // {} is LibreQoS's flat network
	case r.nodes == nil:
		r.leave(noTree, r.where, "%s is below %s", r.name, site)
	default:
		r.leave(unknownNode, r.where, "%s is below %s", r.name, site)
	}
	return found
}

// subscriber describes the subscriber of a row: for reports, in the note of its rules, and in their name, which has the
// circuit ID, so that namesakes are told apart. A circuit without a name is named by its ID, else by the device.
func (r *shapedDevice) subscriber() *subscriber {
	id, device := oneLine(r.cell(circuitID)), oneLine(r.cell(deviceName))
	title, ending, notes := oneLine(r.cell(circuitName)), "", []string(nil)
	switch {
	case title == "" && id != "":
		title = "circuit " + id
	case title == "":
		title = device
	case id != "" && id != title:
		ending = " (" + cut(id, policy.MaxName/2) + ")"
	}
	if device != "" && device != title {
		notes = append(notes, "device "+device)
	}
	site := r.site()
	if n := r.nodes.find(site, r.cell(nodeID)); site != "" && (n == nil || !n.limits) { // else its pool tells
		notes = append(notes, "site "+site)
	}
	if s := r.cell(remark); s != "" && s != title && s != device {
		notes = append(notes, s)
	}
	if len(title+ending) > policy.MaxName {
		r.leave(longName, r.where, "%.60q", title+ending)
	}
	v := &subscriber{where: r.where, name: ended(title, ending)}
	if r.name = "the row"; v.name != "" {
		r.name = strconv.Quote(v.name)
	}
	v.note = r.fit(r.where, strings.Join(notes, "; "), policy.MaxNote, longNote)
	r.rows = append(r.rows, v)
	return v
}

// networks returns the networks of a cell.
func (r *shapedDevice) networks(c column) (all []netip.Prefix) {
	for _, word := range words(r.cell(c)) {
		p, err := policy.ParsePrefix(word)
		if loose, bad := netip.ParsePrefix(word); err != nil && bad == nil && !loose.Addr().Is4In6() {
			p, err = loose.Masked(), nil
			r.leave(hostBits, r.where, "%s was read as %v", word, p)
		}
		if err == nil && p.Addr().Is4() != (c == ipv4) {
			err = fmt.Errorf("%s is in the column %s; move it to the other one", word, r.header[r.layout[c]])
		}
		if err != nil {
			r.problem(r.layout[c], "%v", err)
			continue
		}
		if !slices.Contains(all, p) {
			all = append(all, p)
		}
	}
	return all
}

var plainNumber = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?$`)

// A speed is the rate in a cell; 0 for none.
type speed struct {
	policy.Rate
	zero bool // the cell has a 0
	left bool // no rule can have the rate, which was reported
}

func (r *shapedDevice) speed(c column) speed {
	text := r.cell(c)
	switch {
	case text == "":
		return speed{}
	case !plainNumber.MatchString(text):
		r.problem(r.layout[c], "%s %.40q is not a number of megabits per second; write one such as 25 or 2.5", r.header[r.layout[c]], text)
		return speed{}
	}
	return r.collector.speed(text, fmt.Sprintf("%s %s for %s", r.header[r.layout[c]], text, r.name), r.where, c == downloadMin || c == uploadMin)
}

// speed converts a plain number. It lists one that no rule can have, or guarantee.
func (c *collector) speed(text, what, where string, guarantee bool) speed {
	if strings.Trim(text, "0.") == "" {
		return speed{zero: true}
	}
	rate, err := policy.ParseRate(text + "mbit")
	switch {
	case err != nil && guarantee:
		c.leave(noSuchGuarantee, where, "%s", what)
	case err != nil:
		c.leave(noSuchRate, where, "%s", what)
	}
	return speed{Rate: rate, left: err != nil}
}

// mbit returns the rate in megabits per second.
func (s speed) mbit() string { return strconv.FormatFloat(float64(s.Rate)/1e6, 'f', -1, 64) }

// limit adds the rules of a circuit for one way, and a pool if there are several.
func (s *shapedDevices) limit(c *circuit, w way) {
	key, rate, where := s.keys[w], c.rates[w], c.rows[0].where
	if rate.Rate == 0 {
		why := noRate
		if rate.zero {
			why = zeroRate
		}
		if !rate.left {
			var addresses []string // all of them, which may have to be blocked
			for _, p := range c.networks() {
				addresses = append(addresses, policy.NetworkText(p))
			}
			s.leave(why, where, "%s on %s %v for %s", c.name, key.device, key.direction, strings.Join(addresses, ", "))
		}
		return
	}
	var rules []policy.Rule
	var from []string
	for _, r := range c.rows {
		for _, p := range r.networks {
			if !s.taken(place{key, p}, r.where) {
				rules = append(rules, policy.Rule{Prefix: p, Label: policy.Label{Name: r.name, Note: r.note}})
				from = append(from, r.where)
			}
		}
	}
	if len(rules) == 0 {
		return
	}
	terms := policy.Rule{Rate: rate.Rate, Capacity: policy.DefaultCapacity(rate.Rate), Share: s.Share}
	if c.node != nil {
		terms.Within = c.node.pool[w]
	}
	switch least := c.least[w].Rate; {
	case least == 0:
	case terms.Within == "":
		s.leave(guaranteed, where, "%v %v for %s", least, w, c.name)
	case least > rate.Rate:
		s.leave(highGuarantee, where, "%v of %v %v for %s", least, rate, w, c.name)
		terms.Guarantee = policy.Guarantee(rate.Rate)
	default:
		terms.Guarantee = policy.Guarantee(least)
	}
	limited := place{key, rules[0].Prefix} // which has the guarantee
	if len(rules) == 1 {
		terms.Prefix, terms.Label = rules[0].Prefix, rules[0].Label
		terms.Label.Plan = fmt.Sprintf("%v-%s-%s", w, c.rates[down].mbit(), c.rates[up].mbit())
		rules[0] = terms
	} else {
		within := s.addPool(c.id, " "+w.String(), terms, where)
		if within == "" {
			return
		}
		limited = place{pools, policy.PoolKey(string(within))}
		for i := range rules {
			rules[i].Rate, rules[i].Within = policy.Unlimited, within
		}
	}
	for i, r := range rules {
		s.add(key, [ways]policy.Match{down: policy.MatchDst, up: policy.MatchSrc}[w], r, from[i])
	}
	if at := s.origins[limited]; at != nil {
		at.who, at.kept = fmt.Sprintf("%s %v", c.name, w), c.protected
	}
}
