package importer

import (
	"bytes"
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/shapectl/shapectl/internal/input"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	guaranteed = reason{"guaranteed rate", "a rule limits its packets, and guarantees no rate",
		"set the other limits low enough to leave this rate free"}
	parents = reason{"parent node", "rules have no tree, so the node's rate does not limit what is below it",
		"limit the node's device, or a network that contains all below the node, on another device"}
	shared = reason{"shared rate", "each network has its own rule with the full rate",
		"replace them by one network, or divide the rate among them"}
	noRate = reason{"missing rate", "the source has no rate, or a rate of 0",
		"no rule was made, so this direction is not limited; write a rate above 0"}
	noAddress = reason{"row without an address", "a rule needs a network",
		"no rule was made; write an IPv4 or IPv6 address"}
	hostBits = reason{"address with the prefix length of a network", "a rule is for a whole network",
		"the network was used; leave out the length if only the address was meant"}
	disciplines = reason{"queue discipline", "rules drop excess packets by default",
		"set excess: delay in rules that should queue them"}
	noSuchRate = reason{"rate that no rule can have", fmt.Sprintf("rates are whole bits per second, %v to %v", policy.MinRate, policy.MaxRate),
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
	short  []string          // rows with fewer columns than the header

	download, upload tableKey
	circuits         map[string]*circuit
	order            []*circuit
}

// A circuit is the rows that share a rate.
type circuit struct {
	rows     []string
	name     string
	rates    string
	networks []netip.Prefix
}

// LibreQoS imports a ShapedDevices.csv. Downloads leave device, which faces the
// subscribers. Uploads enter device; or, if upload is not "", they leave that device, which
// faces the Internet, and are matched by source. Mistakes in the text are an error of type
// policyfile.Errors, for the given file.
func LibreQoS(file string, text io.Reader, device, upload string) (Imported, error) {
	s := &shapedDevices{
		collector: newCollector(), file: file,
		download: tableKey{device, policy.Egress}, upload: tableKey{device, policy.Ingress},
		circuits: map[string]*circuit{},
	}
	if upload != "" {
		s.upload = tableKey{upload, policy.Egress}
	}
	s.note("LibreQoS queues excess packets, and these rules drop them: each rule has the default capacity for its rate")
	var err error
	if s.text, err = input.All(text); err != nil {
		return Imported{}, err
	}
	if err := s.open(); err != nil {
		return Imported{}, err
	}
	for {
		record, err := s.csv.Read()
		if err == io.EOF {
			break
		}
		if err != nil {
			return Imported{}, s.syntax(err)
		}
		s.read(record)
	}
	if len(s.errors) > 0 {
		return Imported{}, s.located()
	}
	for _, c := range s.order {
		if len(c.networks) > 1 {
			s.leave(shared, some(c.rows), "%s has %s for %s together", c.name, c.rates, names(c.networks))
		}
	}
	if len(s.short) > 0 {
		s.note(fmt.Sprintf("%s: fewer columns than the header; read without Parent Node ID and Anchor Node ID", some(s.short)))
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
	s.csv = csv.NewReader(bytes.NewReader(s.text))
	s.csv.Comment, s.csv.TrimLeadingSpace, s.csv.FieldsPerRecord, s.csv.ReuseRecord = '#', true, -1, true
	header, err := s.csv.Read()
	if err == io.EOF {
		return s.wrong(1, 1, "there is no header; the first line names the columns, such as IPv4 and Download Max Mbps")
	}
	if err != nil {
		return s.syntax(err)
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
	slices.SortStableFunc(s.errors, func(a, b policyfile.Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
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

// syntax converts an error of package csv.
func (s *shapedDevices) syntax(err error) error {
	bad, ok := errors.AsType[*csv.ParseError](err)
	if !ok {
		return err
	}
	why := "a quote is in the middle of a cell"
	if errors.Is(bad.Err, csv.ErrQuote) {
		why = "a quote is not closed, or something follows it"
	}
	return s.wrong(bad.Line, bad.Column, why+"; put quotes around a whole cell, and write a quote inside as two")
}

// A shapedDevice is a row: a device of a subscriber.
type shapedDevice struct {
	*shapedDevices
	layout
	record      []string
	where, name string
	label       policy.Label
}

// read reads a row.
func (s *shapedDevices) read(record []string) {
	if !slices.ContainsFunc(record, func(cell string) bool { return strings.TrimSpace(cell) != "" }) {
		return // spreadsheets write empty rows at the end
	}
	if n := len(s.header); len(record) > n && strings.TrimSpace(strings.Join(record[n:], "")) != "" {
		s.problem(n, "%d columns where the header has %d; put quotes around a cell with a comma", len(record), n)
		return
	}
	line, _ := s.csv.FieldPos(0)
	r := shapedDevice{shapedDevices: s, layout: s.at, record: record, where: fmt.Sprintf("line %d", line)}
	if short, gone := s.withoutNumbers(); gone > 0 && len(record)+gone <= len(s.header) && !r.plausible() {
		if r.layout = short; r.plausible() {
			s.short = append(s.short, r.where)
		} else {
			r.layout = s.at
		}
	}
	r.name, r.label = r.subscriber()
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
	for _, c := range []column{downloadMax, uploadMax} {
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

// rules makes the rules of a row.
func (r *shapedDevice) rules() {
	before := len(r.errors)
	networks := append(r.networks(ipv4), r.networks(ipv6)...)
	down, up := r.speed(downloadMax), r.speed(uploadMax)
	if least := both(r.speed(downloadMin), r.speed(uploadMin)); least != "" {
		r.leave(guaranteed, r.where, "%s for %s", least, r.name)
	}
	if len(r.errors) > before {
		return
	}
	if node := r.node(); node != "" {
		r.leave(parents, r.where, "%s is below %s", r.name, node)
	}
	if queue := r.cell(sqm); queue != "" {
		r.leave(disciplines, r.where, "%s for %s", queue, r.name)
	}
	if len(networks) == 0 {
		r.leave(noAddress, r.where, "%s", r.name)
		return
	}
	made := r.limit(networks, r.download, policy.MatchDst, down)
	for _, p := range r.limit(networks, r.upload, policy.MatchSrc, up) {
		if !slices.Contains(made, p) {
			made = append(made, p)
		}
	}
	r.share(both(down, up), made)
}

// node returns the name of the parent node; "" for none.
func (r *shapedDevice) node() string {
	if node := r.cell(parentNode); !strings.EqualFold(node, "none") {
		return node
	}
	return ""
}

// subscriber returns a name of a row for reports, and the label of its rules. Circuit and
// device become the name; circuit ID, node and comment become the note.
func (r *shapedDevice) subscriber() (name string, label policy.Label) {
	var names, notes []string
	for _, c := range []column{circuitName, deviceName} {
		if s := r.cell(c); s != "" && !slices.Contains(names, s) {
			names = append(names, s)
		}
	}
	if id := r.cell(circuitID); id != "" {
		notes = append(notes, "circuit "+id)
	}
	if len(names) == 0 {
		names, notes = notes, nil
	}
	if node := r.node(); node != "" {
		notes = append(notes, "site "+node)
	}
	if s := r.cell(remark); s != "" && !slices.Contains(names, s) {
		notes = append(notes, s)
	}
	name = "the row"
	if len(names) > 0 {
		name = fmt.Sprintf("%.60q", names[0])
	}
	return name, r.shapedDevices.label(r.where, strings.Join(names, " / "), strings.Join(notes, "; "))
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
	left bool // no rule can have the rate, which was reported
}

func (r *shapedDevice) speed(c column) speed {
	text := r.cell(c)
	switch {
	case strings.Trim(text, "0.") == "" && text != ".":
		return speed{}
	case !plainNumber.MatchString(text):
		r.problem(r.layout[c], "%s %.40q is not a number of megabits per second; write one such as 25 or 2.5", r.header[r.layout[c]], text)
		return speed{}
	}
	rate, err := policy.ParseRate(text + "mbit")
	if err != nil {
		r.leave(noSuchRate, r.where, "%s %s: %v", r.header[r.layout[c]], text, err)
	}
	return speed{rate, err != nil}
}

// both describes two rates.
func both(down, up speed) string {
	var words []string
	if down.Rate != 0 {
		words = append(words, down.String()+" down")
	}
	if up.Rate != 0 {
		words = append(words, up.String()+" up")
	}
	return list(words)
}

// limit adds a rule for each network, and returns the networks that got one.
func (r *shapedDevice) limit(networks []netip.Prefix, key tableKey, m policy.Match, rate speed) (made []netip.Prefix) {
	if rate.Rate == 0 {
		if !rate.left {
			r.leave(noRate, r.where, "%s %v of %s", key.device, key.direction, names(networks))
		}
		return nil
	}
	for _, p := range networks {
		rule := policy.Rule{Prefix: p, Rate: rate.Rate, Capacity: policy.DefaultCapacity(rate.Rate), Label: r.label}
		if r.add(key, m, rule, r.where, "") {
			made = append(made, p)
		}
	}
	return made
}

// share remembers the networks that share a rate.
func (r *shapedDevice) share(rates string, networks []netip.Prefix) {
	id := r.cell(circuitID)
	c := r.circuits[id]
	if c == nil || id == "" {
		c = &circuit{name: r.name, rates: rates}
		r.circuits[id] = c
		r.order = append(r.order, c)
	}
	c.rows = append(c.rows, r.where)
	c.networks = append(c.networks, networks...)
}
