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
	guaranteed = reason{other, "guaranteed rate without a node", "no pool with a rate is above it, so nothing can be guaranteed",
		"give its parent node in network.json a rate"}
	highGuarantee = reason{other, "guaranteed rate above the rate", "a rule or pool never gets more than its rate",
		"it was lowered to the rate; correct one of them"}
	outOfRange  = reason{other, "guaranteed rate out of range", outside.Why, "it was left out; write one in that range"}
	unknownNode = reason{loosens, "unknown parent node", "no network.json has a node of that name, so no node's rate limits these subscribers",
		"correct the name, or give the tree of nodes with --network network.json"}
	unlike = reason{other, "row unlike the first of its circuit", "a circuit has one rate and one parent node",
		"those of its first row were used, as LibreQoS does; correct the row"}
	zeroRate = reason{unblocks, "rate of 0", "no rule can have it, so this direction has no limit at all",
		"to block it, write a small rate such as 0.1, or block the address in a firewall"}
	noRate = reason{loosens, "missing rate", "the source has no rate",
		"no rule was made, so this direction is not limited; write a rate"}
	noAddress = reason{loosens, "row without an address", "a rule needs a network",
		"no rule was made; write an IPv4 or IPv6 address"}
	skipped = reason{unblocks, "row that cannot be read", "--skip-bad leaves it out", "its subscriber has no limit; correct the row"}
)

// Columns of ShapedDevices.csv by headerName, and names of earlier versions for them.
const (
	circuitID, circuitName, deviceName, parentNode, nodeID, anchorID = "circuitid", "circuitname", "devicename", "parentnode", "parentnodeid", "anchornodeid"

	ipv4, ipv6, downloadMin, uploadMin, downloadMax, uploadMax, remark = "ipv4", "ipv6", "downloadmin", "uploadmin", "downloadmax", "uploadmax", "comment"
)

var libreqosNames = map[string]string{"circuitiddonotduplicate": circuitID, "id": circuitID, "hostname": deviceName, "ap": parentNode}

// maxID leaves room for the ending of a pool's name.
const maxID = policy.MaxName - 8

// headerName returns a column's name without case, punctuation and unit, which differ
// between versions.
func (s *shapedDevices) headerName(of string) string {
	of = strings.Map(func(r rune) rune {
		if unicode.IsLetter(r) || unicode.IsDigit(r) {
			return unicode.ToLower(r)
		}
		return -1
	}, of)
	of = strings.TrimSuffix(of, "mbps")
	return cmp.Or(s.names[of], of)
}

// shapedDevices reads a ShapedDevices.csv.
type shapedDevices struct {
	*collector
	LibreQoSOptions
	file       string
	text       []byte
	lines      [][]byte
	csv        *csv.Reader
	at         map[string]int // the index of each column
	header     []string
	names      map[string]string // other names of columns
	such       string            // columns that the header may have, for advice
	check      func()            // checks the header
	take       func()            // takes a row
	semicolons bool              // may be between columns
	errors     policyfile.Errors

	// The current row: a device of a subscriber.
	fields int // in the file
	record []string
	where  string

	nodes     *nodes // nil if there is no network.json
	keys      [ways]tableKey
	circuits  map[string]*circuit // by ID
	order     []*circuit
	owners    map[netip.Prefix]*csvRow
	protected map[string]bool // patterns of Protect that a circuit matched
	noIDs     []string        // rows
}

// A circuit is the rows that share an ID, and so a name and rates.
type circuit struct {
	id, title    string
	name         string // of its rules
	who          string // for reports
	rows         []*csvRow
	protected    bool
	rates, least [ways]policy.Rate
	whys         [ways]reason // why it has no rate
	node         *node
}

// A csvRow has the addresses of a circuit that no row before has.
type csvRow struct {
	of          *circuit
	where, note string
	networks    []netip.Prefix
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
// nil. Mistakes in the rows are an error of type policyfile.Errors.
func LibreQoS(devices, network File, o LibreQoSOptions) (Imported, error) {
	s := newShapedDevices(devices, o)
	s.names, s.such, s.take = libreqosNames, "IPv4 and Download Max Mbps", s.device
	s.check = func() {
		if !s.has(ipv6) || s.has(ipv4) {
			s.need(ipv4, "IPv4")
		}
		s.need(downloadMax, "Download Max Mbps")
		s.need(uploadMax, "Upload Max Mbps")
	}
	s.protect = ", or keep some by --protect"
	s.note("LibreQoS queues excess packets, and these rules drop them; to mark them first, write 'defaults: {excess: ecn}' above devices")
	var err error
	if network.Text != nil {
		if s.nodes, err = readNodes(s.collector, network); err != nil {
			return Imported{}, err
		}
	}
	if err := s.read(devices.Text); err != nil {
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
	if s.noIDs != nil {
		s.note(fmt.Sprintf("%s without a Circuit ID, in %s: the first address stands for it, also in the name; write an ID if addresses change",
			plain.Count(len(s.noIDs), "row"), plain.List(s.noIDs)))
	}
	return s.imported(), nil
}

func newShapedDevices(devices File, o LibreQoSOptions) *shapedDevices {
	s := &shapedDevices{
		collector: newCollector(), file: devices.Name, LibreQoSOptions: o,
		keys:     [ways]tableKey{{o.Device, policy.Egress}, {o.Device, policy.Ingress}},
		circuits: map[string]*circuit{}, owners: map[netip.Prefix]*csvRow{}, protected: map[string]bool{}, at: map[string]int{},
	}
	if o.Upload != "" {
		s.keys[up] = tableKey{o.Upload, policy.Egress}
	}
	return s
}

// read reads all rows. Mistakes in them are an error of type policyfile.Errors.
func (s *shapedDevices) read(from io.Reader) (err error) {
	if s.text, err = input.All(from); err != nil {
		return err
	}
	if !s.readHeader() {
		return s.errors
	}
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
	if len(s.order) == 0 && len(s.Left) == 0 && len(s.errors) == 0 {
		s.wrong(1, 1, "no row follows the header; is the file cut off?")
		return s.errors
	}
	switch {
	case s.err != nil:
		return s.err
	case s.SkipBad && len(s.errors) > 0 && len(s.order) == 0:
		return fmt.Errorf("%w; no row can be read", s.errors)
	case !s.SkipBad && len(s.errors) > 0:
		return fmt.Errorf("%w; --skip-bad leaves out rows that cannot be read", s.errors)
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
	s.csv = csv.NewReader(bytes.NewReader(s.text))
	s.csv.Comment, s.csv.TrimLeadingSpace, s.csv.FieldsPerRecord, s.csv.ReuseRecord = '#', true, -1, true
	if first := s.lines[0]; s.semicolons && bytes.ContainsRune(first, ';') && !bytes.ContainsRune(first, ',') {
		s.csv.Comma = ';'
	}
	header, err := s.csv.Read()
	switch {
	case err == io.EOF:
		s.wrong(1, 1, "there is no header; the first line names the columns, such as %s", s.such)
		return false
	case err != nil:
		s.syntax(err)
		return false
	}
	s.header, s.fields = slices.Clone(header), len(header)
	for i, h := range s.header {
		s.at[s.headerName(h)] = i
	}
	s.check()
	for i, h := range s.header {
		if last := s.at[s.headerName(h)]; len(s.errors) == 0 && last != i && h != "" {
			s.problem(last, "the column %.40q appears twice; remove one", h)
		}
	}
	return len(s.errors) == 0
}

func (s *shapedDevices) has(column string) bool { _, found := s.at[column]; return found }

// need adds an error if a column does not exist, unless there is one already.
func (s *shapedDevices) need(column, name string) {
	if !s.has(column) && len(s.errors) == 0 {
		s.problem(0, "there is no column %s; the columns are %.100q; give a file with columns such as %s, and commas between them",
			name, strings.Join(s.header, ","), s.such)
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
	s.wrong(bad.Line, bad.Column, "a quote is not closed or is within a cell; put quotes around a whole cell, and write a quote inside as two")
	s.tear(bad.Line != bad.StartLine)
}

// tear refuses a file if rows may be missing after the last error: also if the text ends within its row.
func (s *shapedDevices) tear(torn bool) {
	if s.SkipBad && (torn || !s.ended() && s.csv.InputOffset() == int64(len(s.text))) {
		s.fail(policyfile.Errors{s.errors[len(s.errors)-1]})
	}
}

func (s *shapedDevices) row(record []string) {
	if !slices.ContainsFunc(record, func(cell string) bool { return strings.TrimSpace(cell) != "" }) {
		return // spreadsheets write empty rows at the end
	}
	line, _ := s.csv.FieldPos(0)
	s.record, s.where = record, fmt.Sprintf("line %d", line)
	n := len(s.header)
	notText := slices.IndexFunc(record, func(cell string) bool { return !utf8.ValidString(cell) })
	switch {
	case notText >= 0:
		s.problem(notText, "the text is not UTF-8; convert it, for Latin-1 with 'iconv -f latin1 -t utf-8'")
		return
	case len(record) > n && strings.TrimSpace(strings.Join(record[n:], "")) != "":
		s.problem(n, "%d columns where the header has %d; put quotes around a cell with a comma", len(record), n)
		return
	case len(record) >= n:
		s.take()
		return
	}
	// Some files have the columns for numbers of nodes only in the header.
	for i, h := range s.header {
		if h := s.headerName(h); h == nodeID || h == anchorID {
			s.record = slices.Insert(slices.Clone(s.record), min(i, len(s.record)), "")
		}
	}
	before := len(s.errors)
	if len(s.record) == n {
		if s.take(); len(s.errors) == before {
			s.note("rows with fewer columns than the header were read without Parent Node ID and Anchor Node ID; check one of them")
			return
		}
	}
	s.errors = s.errors[:before]
	s.problem(len(record)-1, "%s where the header has %d; is the row cut off?", plain.Count(len(record), "column"), n)
	s.tear(false)
}

// cell returns the cell of a column, "" for none.
func (s *shapedDevices) cell(column string) string {
	if i, found := s.at[column]; found && i < len(s.record) {
		return strings.TrimSpace(s.record[i])
	}
	return ""
}

// device adds a row to its circuit, which is new if no row before has its ID.
func (s *shapedDevices) device() {
	before := len(s.errors)
	networks := append(s.networks(ipv4), s.networks(ipv6)...)
	c := s.circuit(networks)
	if len(s.errors) > before {
		return
	}
	site := s.findNode(c)
	if len(networks) == 0 {
		s.leave(noAddress, s.where, "%s", c.who)
		return
	}
	if s.cell(circuitID) == "" {
		s.noIDs = append(s.noIDs, s.where)
	}
	first := s.circuits[c.id]
	switch {
	case first == nil:
		first, s.circuits[c.id] = c, c
		s.order = append(s.order, c)
		for _, pattern := range s.Protect {
			if matches(pattern, c.id) || matches(pattern, c.title) || matches(pattern, s.cell(remark)) {
				c.protected, s.protected[pattern] = true, true
			}
		}
	case c.rates != first.rates || c.least != first.least || c.node != first.node:
		s.leave(unlike, s.where, "%s, first in %s", c.who, first.rows[0].where)
	}
	r := &csvRow{of: first, where: s.where}
	var notes []string
	note := func(what, text string) {
		if text != "" && text != first.title && !slices.Contains(notes, text) {
			notes = append(notes, what+text)
		}
	}
	note("", c.title)
	note("device ", oneLine(s.cell(deviceName)))
	note("site ", site)
	note("", oneLine(s.cell(remark)))
	r.note = cut(strings.Join(notes, "; "), policy.MaxNote)
	s.own(r, networks)
}

// own adds a row to its circuit, with those of its addresses that no other circuit has.
func (s *shapedDevices) own(r *csvRow, networks []netip.Prefix) {
	first := r.of
	for _, p := range networks {
		switch owner := s.owners[p]; {
		case owner == nil:
			s.owners[p] = r
			r.networks = append(r.networks, p)
		case owner.of != first:
			s.leave(twice, s.where, "%s was in %s", policy.NetworkText(p), owner.where)
		}
	}
	first.rows = append(first.rows, r)
	for w := range ways {
		if first.rates[w] == 0 && len(r.networks) > 0 { // each address may have to be blocked
			s.leave(first.whys[w], s.where, "%s %v for %s", first.who, w, strings.Join(networkTexts(r.networks), ", "))
		}
	}
}

// circuit reads the circuit of a row. The first address stands for an ID that is missing.
func (s *shapedDevices) circuit(networks []netip.Prefix) *circuit {
	c := &circuit{id: oneLine(s.cell(circuitID)), title: oneLine(s.cell(circuitName))}
	switch {
	case len(c.id) > maxID:
		s.problem(s.at[circuitID], "the Circuit ID has %d bytes, and at most %d fit into names; shorten it", len(c.id), maxID)
	case c.id == "" && len(networks) > 0:
		c.id = policy.NetworkText(networks[0])
	}
	if c.name = cmp.Or(c.id, c.title); c.title != "" && c.title != c.name {
		c.name = ended(c.title, " ("+c.id+")")
	}
	c.who = strconv.Quote(c.name)
	for w, columns := range [ways][2]string{down: {downloadMax, downloadMin}, up: {uploadMax, uploadMin}} {
		c.rates[w], c.whys[w] = s.speed(columns[0])
		least, why := s.speed(columns[1])
		if c.least[w] = least; why == outside {
			s.leave(outOfRange, s.where, "%v for %s", way(w), c.who)
		}
	}
	return c
}

// findNode finds the parent node of a circuit, and returns its name unless its pool tells it.
func (s *shapedDevices) findNode(c *circuit) string {
	site := oneLine(s.cell(parentNode))
	if strings.EqualFold(site, "none") {
		site = ""
	}
	c.node = s.nodes.find(site, s.cell(nodeID))
	switch {
	case c.node != nil && c.node.limits:
		return ""
	case c.node == nil && site != "" && (s.nodes == nil || len(s.nodes.roots) > 0): // {} is LibreQoS's flat network
		s.leave(unknownNode, s.where, "%s is below %s", c.who, site)
	}
	return site
}

// matches reports whether a valid pattern matches a text, in which a slash is a character like any other.
func matches(pattern, text string) bool {
	slash := strings.NewReplacer("/", "\x00")
	match, _ := path.Match(slash.Replace(pattern), slash.Replace(text))
	return match
}

// networks are those in a cell of a column, which is for one family if it is ipv4 or ipv6.
func (s *shapedDevices) networks(column string) (all []netip.Prefix) {
	separates := func(r rune) bool { return r == ',' || r == ';' || unicode.IsSpace(r) }
	for _, word := range strings.FieldsFunc(s.cell(column), separates) {
		switch p, err := policy.ParsePrefix(word); {
		case err != nil:
			s.problem(s.at[column], "%v", err)
		case column == ipv4 && p.Addr().Is6(), column == ipv6 && p.Addr().Is4():
			s.problem(s.at[column], "%s is in the column %s; move it to the other one", word, s.header[s.at[column]])
		default:
			all = append(all, p)
		}
	}
	return all
}

// speed reads a cell. If there is no rate, it returns the reason.
func (s *shapedDevices) speed(column string) (policy.Rate, reason) {
	text := s.cell(column)
	rate, why, ok := parseMbit(text)
	if !ok {
		s.problem(s.at[column], "%s %.40q is not a number of megabits per second; write one such as 25 or 2.5", s.header[s.at[column]], text)
	}
	return rate, why
}

var plainNumber = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?$`)

// parseMbit reads a number of megabits per second, which may be missing. If there is no rate, it returns the reason.
func parseMbit(text string) (rate policy.Rate, why reason, ok bool) {
	rate, err := policy.ParseRate(text + "mbit")
	switch {
	case text == "":
		return 0, noRate, true
	case !plainNumber.MatchString(text):
		return 0, noRate, false
	case strings.Trim(text, "0.") == "":
		return 0, zeroRate, true
	case err != nil:
		return 0, outside, true
	}
	return rate, reason{}, true
}

// limit adds the rules of a circuit for one way, and a pool if there are several.
func (s *shapedDevices) limit(c *circuit, w way) {
	key, rate, where := s.keys[w], c.rates[w], c.rows[0].where
	var rules []policy.Rule
	for _, r := range c.rows {
		for _, p := range r.networks {
			rules = append(rules, policy.Rule{Prefix: p, Label: policy.Label{Name: c.name, Note: r.note}})
		}
	}
	if rate == 0 || len(rules) == 0 {
		return
	}
	terms := policy.Rule{Rate: rate, Capacity: policy.DefaultCapacity(rate), Share: s.Share}
	if c.node != nil {
		terms.Within = c.node.pool[w]
	}
	switch least := c.least[w]; {
	case least == 0:
	case terms.Within == "":
		s.leave(guaranteed, where, "%v %v for %s", least, w, c.who)
	case least > rate:
		s.leave(highGuarantee, where, "%v of %v %v for %s", least, rate, w, c.who)
		fallthrough
	default:
		terms.Guarantee = policy.Guarantee(min(least, rate))
	}
	limited := place{key, rules[0].Prefix} // which has the guarantee
	if len(rules) == 1 {
		terms.Prefix, terms.Label = rules[0].Prefix, rules[0].Label
		terms.Label.Plan = fmt.Sprintf("%v-%s-%s", w, inMbit(c.rates[down]), inMbit(c.rates[up]))
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
	for _, r := range rules {
		s.add(key, [ways]policy.Match{down: policy.MatchDst, up: policy.MatchSrc}[w], r, where)
	}
	if at := s.origins[limited]; at != nil {
		at.who, at.kept = fmt.Sprintf("%s %v", c.who, w), c.protected
	}
}

func inMbit(r policy.Rate) string { return strconv.FormatFloat(float64(r)/1e6, 'f', -1, 64) }
