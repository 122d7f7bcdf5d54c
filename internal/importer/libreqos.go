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
	noSuchGuarantee = reason{other, "guaranteed rate that no rule can have", fmt.Sprintf("rates are whole bits per second, %v to %v", policy.MinRate, policy.MaxRate),
		"it was left out; write another rate"}
	noSuchRate = reason{loosens, "rate that no rule can have", fmt.Sprintf("rates are whole bits per second, %v to %v", policy.MinRate, policy.MaxRate),
		"no rule was made for it; write another rate"}
)

// Columns of ShapedDevices.csv by headerName, and names of earlier versions for them.
const (
	circuitID, circuitName, deviceName, parentNode, nodeID, anchorID = "circuitid", "circuitname", "devicename", "parentnode", "parentnodeid", "anchornodeid"

	ipv4, ipv6, downloadMin, uploadMin, downloadMax, uploadMax, remark = "ipv4", "ipv6", "downloadmin", "uploadmin", "downloadmax", "uploadmax", "comment"
)

var columnNames = map[string]string{"circuitiddonotduplicate": circuitID, "hostname": deviceName, "ap": parentNode}

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
	LibreQoSOptions
	file   string
	text   []byte
	lines  [][]byte
	csv    *csv.Reader
	at     map[string]int // the index of each column
	header []string
	errors policyfile.Errors // in rows that --skip-bad leaves out
	torn   policyfile.Errors // others: rows may be missing
	short  []string          // rows without the columns for numbers of nodes
	rows   int

	// The current row: a device of a subscriber.
	fields int // in the file
	record []string
	where  string
	who    string // for reports

	nodes     *nodes // nil if there is no network.json
	keys      [ways]tableKey
	circuits  map[string]*circuit
	order     []*circuit
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
		circuits: map[string]*circuit{}, protected: map[string]bool{}, at: map[string]int{},
	}
	if o.Upload != "" {
		s.keys[up] = tableKey{o.Upload, policy.Egress}
	}
	s.note("LibreQoS queues excess packets, and these rules drop them; to mark them first, write 'defaults: {excess: ecn}' above devices")
	var err error
	if network.Text != nil {
		s.nodes = &nodes{collector: s.collector, file: network.Name, named: map[string]*node{}, ids: map[string]*node{}}
		if s.nodes.text, err = input.All(network.Text); err != nil {
			return Imported{}, err
		}
		if s.nodes.read(); s.err != nil {
			return Imported{}, s.err
		}
	}
	if s.text, err = input.All(devices.Text); err != nil {
		return Imported{}, err
	}
	if err := s.read(); err != nil {
		return Imported{}, err
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

// read reads all rows. An error is of type policyfile.Errors.
func (s *shapedDevices) read() error {
	if !s.readHeader() {
		return s.errors
	}
	header, _ := s.csv.FieldPos(0)
	for {
		record, err := s.csv.Read()
		if err == io.EOF {
			break
		}
		if s.fields = len(record); err != nil {
			s.syntax(err)
		} else {
			s.row(record)
		}
	}
	if s.rows == 0 && len(s.errors) == 0 {
		s.wrong(header, 1, "no row follows the header; is the file cut off?")
		s.torn = s.errors
	}
	slices.SortStableFunc(s.errors, func(a, b policyfile.Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	switch {
	case s.SkipBad && len(s.torn) > 0:
		return s.torn
	case !s.SkipBad && len(s.errors) > 0:
		return s.errors
	}
	for _, e := range s.errors {
		s.leave(skipped, fmt.Sprintf("line %d", e.Line), "%s", e.Message)
	}
	if !s.ended() {
		s.note("the last line does not end with a line break: if the file is cut off, rows are missing and the last cell may be wrong")
	}
	return nil
}

func (s *shapedDevices) ended() bool { return bytes.HasSuffix(s.text, []byte("\n")) }

const byteOrderMark = "\ufeff"

// readHeader reads the header, and reports whether it can be used.
func (s *shapedDevices) readHeader() bool {
	s.text = bytes.TrimPrefix(s.text, []byte(byteOrderMark))
	s.lines = bytes.Split(s.text, []byte("\n"))
	switch {
	case !utf8.Valid(s.text):
		bad := slices.IndexFunc(s.lines, func(l []byte) bool { return !utf8.Valid(l) })
		s.wrong(1+bad, 1, "the text is not UTF-8; convert it, for Latin-1 with 'iconv -f latin1 -t utf-8'")
		return false
	case bytes.HasPrefix(bytes.TrimSpace(s.text), []byte("{")):
		s.wrong(1, 1, "this is JSON, perhaps network.json; give ShapedDevices.csv here, and network.json with --network")
		return false
	}
	s.csv = csv.NewReader(bytes.NewReader(s.text))
	s.csv.Comment, s.csv.TrimLeadingSpace, s.csv.FieldsPerRecord, s.csv.ReuseRecord = '#', true, -1, true
	header, err := s.csv.Read()
	switch {
	case err == io.EOF:
		s.wrong(1, 1, "there is no header; the first line names the columns, such as IPv4 and Download Max Mbps")
		return false
	case err != nil:
		s.syntax(err)
		return false
	}
	s.header, s.fields = slices.Clone(header), len(header)
	var twice []int
	for i, h := range header {
		c := cmp.Or(columnNames[headerName(h)], headerName(h))
		if s.has(c) && c != "" {
			twice = append(twice, i)
		}
		s.at[c] = i
	}
	if !s.has(ipv6) || s.has(ipv4) {
		s.need(ipv4, "IPv4")
	}
	s.need(downloadMax, "Download Max Mbps")
	s.need(uploadMax, "Upload Max Mbps")
	if len(s.errors) == 0 {
		for _, i := range twice {
			s.problem(i, "the column %.40q appears twice; remove one", header[i])
		}
	}
	return len(s.errors) == 0
}

func (s *shapedDevices) has(column string) bool { _, found := s.at[column]; return found }

// need adds an error if a column does not exist, unless there is one already.
func (s *shapedDevices) need(column, name string) {
	if !s.has(column) && len(s.errors) == 0 {
		s.problem(0, "there is no column %s; the columns are %.100q; is this a ShapedDevices.csv, with commas between columns?",
			name, strings.Join(s.header, ","))
	}
}

// problem adds an error with a cell.
func (s *shapedDevices) problem(field int, format string, args ...any) {
	line, column := s.csv.FieldPos(min(field, s.fields-1))
	s.wrong(line, column, format, args...)
}

// wrong adds an error, whose column is in bytes.
func (s *shapedDevices) wrong(line, column int, format string, args ...any) {
	of := s.lines[line-1]
	column = 1 + utf8.RuneCount(of[:min(len(of), column-1)])
	s.errors = append(s.errors, policyfile.Error{File: s.file, Line: line, Column: column, Message: fmt.Sprintf(format, args...)})
}

// syntax adds an error of package csv, which reads from memory. If a quote took one row for several, nobody knows which are bad.
func (s *shapedDevices) syntax(err error) {
	bad, _ := errors.AsType[*csv.ParseError](err)
	why := "a quote is in the middle of a cell"
	if errors.Is(bad.Err, csv.ErrQuote) {
		why = "a quote is not closed, or something follows it"
	}
	s.wrong(bad.Line, bad.Column, "%s; put quotes around a whole cell, and write a quote inside as two", why)
	s.tear(bad.Line != bad.StartLine)
}

// tear records whether the last error is one after which rows may be missing: also if the text ends within its row.
func (s *shapedDevices) tear(torn bool) {
	if torn || !s.ended() && s.csv.InputOffset() == int64(len(s.text)) {
		s.torn = append(s.torn, s.errors[len(s.errors)-1])
	}
}

func (s *shapedDevices) row(record []string) {
	if !slices.ContainsFunc(record, func(cell string) bool { return strings.TrimSpace(cell) != "" }) {
		return // spreadsheets write empty rows at the end
	}
	line, _ := s.csv.FieldPos(0)
	s.record, s.where = record, fmt.Sprintf("line %d", line)
	n := len(s.header)
	if len(record) > n && strings.TrimSpace(strings.Join(record[n:], "")) != "" {
		s.problem(n, "%d columns where the header has %d; put quotes around a cell with a comma", len(record), n)
		return
	}
	if len(record) < n {
		// Some files have the columns for numbers of nodes only in the header.
		for i, h := range s.header {
			if h := headerName(h); h == nodeID || h == anchorID {
				s.record = slices.Insert(slices.Clone(s.record), min(i, len(s.record)), "")
			}
		}
		before := len(s.errors)
		if len(s.record) == n {
			s.device()
		}
		if len(s.record) == n && len(s.errors) == before {
			s.short = append(s.short, s.where)
			return
		}
		s.errors = s.errors[:before]
		s.problem(len(record)-1, "%s where the header has %d; is the row cut off?", plain.Count(len(record), "column"), n)
		s.tear(false)
		return
	}
	s.device()
}

// cell returns the cell of a column, "" for none.
func (s *shapedDevices) cell(column string) string {
	if i, found := s.at[column]; found && i < len(s.record) {
		return strings.TrimSpace(s.record[i])
	}
	return ""
}

func words(cell string) []string {
	return strings.FieldsFunc(cell, func(r rune) bool { return r == ',' || r == ';' || unicode.IsSpace(r) })
}

// device adds a row to its circuit, which is new if no row before had the circuit ID. A row without one has its own.
func (s *shapedDevices) device() {
	id, site := s.cell(circuitID), oneLine(s.cell(parentNode))
	if strings.EqualFold(site, "none") {
		site = ""
	}
	node, before := s.nodes.find(site, s.cell(nodeID)), len(s.errors)
	v := s.subscriber(site, node)
	networks := append(s.networks(ipv4), s.networks(ipv6)...)
	c := &circuit{name: s.who, id: cmp.Or(oneLine(id), v.name, s.where), node: node, has: map[netip.Prefix]bool{}}
	for _, pattern := range s.Protect {
		for _, text := range []string{id, s.cell(circuitName), s.cell(remark)} {
			if matches(pattern, text) {
				c.protected, s.protected[pattern] = true, true
			}
		}
	}
	for w, columns := range [ways][2]string{down: {downloadMax, downloadMin}, up: {uploadMax, uploadMin}} {
		c.rates[w], c.least[w] = s.speed(columns[0], noSuchRate), s.speed(columns[1], noSuchGuarantee)
	}
	first := s.circuits[id]
	switch {
	case len(s.errors) > before:
		return
	case node != nil || site == "" || s.nodes != nil && len(s.nodes.roots) == 0: // {} is LibreQoS's flat network
	case s.nodes == nil:
		s.leave(noTree, s.where, "%s is below %s", s.who, site)
	default:
		s.leave(unknownNode, s.where, "%s is below %s", s.who, site)
	}
	switch {
	case len(networks) == 0:
		s.leave(noAddress, s.where, "%s", s.who)
		return
	case first == nil || id == "":
		first, s.circuits[id] = c, c
		s.order = append(s.order, c)
	case c.rates != first.rates || c.least != first.least || c.node != first.node:
		s.leave(unlike, s.where, "%s, first in %s", s.who, first.rows[0].where)
	}
	for _, p := range networks {
		if !first.has[p] {
			first.has[p] = true
			v.networks = append(v.networks, p)
		}
	}
	first.rows = append(first.rows, v)
}

// matches reports whether a valid pattern matches a text, in which a slash is a character like any other.
func matches(pattern, text string) bool {
	slash := strings.NewReplacer("/", "\x00")
	match, _ := path.Match(slash.Replace(pattern), slash.Replace(text))
	return match
}

// subscriber describes the subscriber of a row: for reports, in the note of its rules, and in their name, which has the
// circuit ID, so that namesakes are told apart. A circuit without a name is named by its ID, else by the device.
func (s *shapedDevices) subscriber(site string, parent *node) *subscriber {
	id, device := oneLine(s.cell(circuitID)), oneLine(s.cell(deviceName))
	title, ending, notes := oneLine(s.cell(circuitName)), "", []string(nil)
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
	if site != "" && (parent == nil || !parent.limits) { // else its pool tells
		notes = append(notes, "site "+site)
	}
	if s := s.cell(remark); s != "" && s != title && s != device {
		notes = append(notes, s)
	}
	if len(title+ending) > policy.MaxName {
		s.leave(longText, s.where, "%.60q", title+ending)
	}
	v := &subscriber{where: s.where, name: ended(title, ending)}
	if s.who = "the row"; v.name != "" {
		s.who = strconv.Quote(v.name)
	}
	v.note = s.fit(s.where, strings.Join(notes, "; "), policy.MaxNote)
	s.rows++
	return v
}

func (s *shapedDevices) networks(column string) (all []netip.Prefix) {
	for _, word := range words(s.cell(column)) {
		p, err := policy.ParsePrefix(word)
		if loose, bad := netip.ParsePrefix(word); err != nil && bad == nil && !loose.Addr().Is4In6() {
			p, err = loose.Masked(), nil
			s.leave(hostBits, s.where, "%s was read as %v", word, p)
		}
		switch {
		case err != nil:
			s.problem(s.at[column], "%v", err)
		case p.Addr().Is4() != (column == ipv4):
			s.problem(s.at[column], "%s is in the column %s; move it to the other one", word, s.header[s.at[column]])
		case !slices.Contains(all, p):
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

// speed reads a cell. The reason is for a rate that no rule can have.
func (s *shapedDevices) speed(column string, r reason) speed {
	switch text := s.cell(column); {
	case text == "":
		return speed{}
	case !plainNumber.MatchString(text):
		s.problem(s.at[column], "%s %.40q is not a number of megabits per second; write one such as 25 or 2.5", s.header[s.at[column]], text)
		return speed{}
	default:
		return s.collector.speed(text, s.where, r, "%s %s for %s", s.header[s.at[column]], text, s.who)
	}
}

// speed converts a plain number. It lists one that no rule can have.
func (c *collector) speed(text, where string, r reason, format string, args ...any) speed {
	if strings.Trim(text, "0.") == "" {
		return speed{zero: true}
	}
	rate, err := policy.ParseRate(text + "mbit")
	if err != nil {
		c.leave(r, where, format, args...)
	}
	return speed{Rate: rate, left: err != nil}
}

// mbit returns the rate in megabits per second.
func (s speed) mbit() string { return strconv.FormatFloat(float64(s.Rate)/1e6, 'f', -1, 64) }

// limit adds the rules of a circuit for one way, and a pool if there are several.
func (s *shapedDevices) limit(c *circuit, w way) {
	key, rate, where := s.keys[w], c.rates[w], c.rows[0].where
	var rules []policy.Rule
	var from, addresses []string
	for _, r := range c.rows {
		for _, p := range r.networks {
			addresses = append(addresses, policy.NetworkText(p))
			if rate.Rate != 0 && !s.taken(place{key, p}, r.where) {
				rules = append(rules, policy.Rule{Prefix: p, Label: policy.Label{Name: r.name, Note: r.note}})
				from = append(from, r.where)
			}
		}
	}
	if rate.Rate == 0 && !rate.left {
		why := noRate
		if rate.zero {
			why = zeroRate
		}
		// All addresses, which may have to be blocked
		s.leave(why, where, "%s on %s %v for %s", c.name, key.device, key.direction, strings.Join(addresses, ", "))
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
		fallthrough
	default:
		terms.Guarantee = policy.Guarantee(min(least, rate.Rate))
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
