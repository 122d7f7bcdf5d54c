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
	guaranteed = reason{"guaranteed rate", "a limit only holds down, and guarantees nothing to anybody",
		"keep the limits of others so low that it is left over"}
	parents = reason{"parent node", "a rule knows no tree: what is below a node is not held to the node's rate",
		"limit the node's own device, or a network that holds all below it, on another device"}
	shared = reason{"shared rate", "each network has a rule and so the full rate of its own",
		"join them in one network, or divide the rate among them"}
	noRate = reason{"rate that is not set", "nothing says what the limit is",
		"no rule was made, so it is not limited that way; write a rate above 0"}
	noAddress = reason{"row without an address", "a rule is for a network",
		"no rule was made; write an IPv4 or IPv6 address"}
	hostBits = reason{"address with a prefix length that holds more", "a rule is for a whole network, as it was there",
		"the network was taken; leave the length out if only the address was meant"}
	disciplines = reason{"queue discipline", "shapectl drops what exceeds a limit, and has no queues",
		"nothing is to be done"}
	noSuchRate = reason{"rate that no rule can have", fmt.Sprintf("rates are whole bits per second, %v to %v", policy.MinRate, policy.MaxRate),
		"no rule was made for it; write another one"}
)

// Columns of ShapedDevices.csv, as headerName spells them, with the names that earlier versions gave them.
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

// headerName is a column's name without what versions spell differently.
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
	short  []string          // rows that lack columns of the header

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

// LibreQoS reads LibreQoS's ShapedDevices.csv: what subscribers download leaves
// device, which faces them. What they upload enters it, or, where upload is
// named, leaves that one, which faces the Internet, and is known by its source.
// The error is of type policyfile.Errors if the text is to blame, which is
// called file there.
func LibreQoS(file string, text io.Reader, device, upload string) (Imported, error) {
	s := &shapedDevices{
		collector: newCollector(), file: file,
		download: tableKey{device, policy.Egress}, upload: tableKey{device, policy.Ingress},
		circuits: map[string]*circuit{},
	}
	if upload != "" {
		s.upload = tableKey{upload, policy.Egress}
	}
	s.note("LibreQoS queues what exceeds a rate, and shapectl drops it: each rule has the default capacity for its rate")
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
		s.note(fmt.Sprintf("%s: fewer columns than the header, so read as without Parent Node ID and Anchor Node ID", some(s.short)))
	}
	return s.imported(), nil
}

const byteOrderMark = "\ufeff"

// open reads as far as the header.
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
			s.problem(i, "the column %.40q is there twice, as %.40q before; take one out", h, s.header[s.at[c]])
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

// wrong is all errors, the last of which is this one; column counts bytes.
func (s *shapedDevices) wrong(line, column int, message string) error {
	s.errors = append(s.errors, policyfile.Error{File: s.file, Line: line, Column: column, Message: message})
	return s.located()
}

// located is the errors in the order of the file, with columns in characters.
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

// syntax is an error of package csv.
func (s *shapedDevices) syntax(err error) error {
	bad, ok := errors.AsType[*csv.ParseError](err)
	if !ok {
		return err
	}
	why := "a quote stands in the middle of a cell"
	if errors.Is(bad.Err, csv.ErrQuote) {
		why = "a quote is not closed, or something follows it"
	}
	return s.wrong(bad.Line, bad.Column, why+"; put quotes around a whole cell, and write two for one within")
}

// A shapedDevice is a row: one device of a subscriber's.
type shapedDevice struct {
	*shapedDevices
	layout
	record      []string
	where, name string
	label       policy.Label
}

// read reads the row that csv has read.
func (s *shapedDevices) read(record []string) {
	if !slices.ContainsFunc(record, func(cell string) bool { return strings.TrimSpace(cell) != "" }) {
		return // what a spreadsheet leaves behind the last
	}
	if n := len(s.header); len(record) > n && strings.TrimSpace(strings.Join(record[n:], "")) != "" {
		s.problem(n, "%d columns where the header has %d; put quotes around a cell that has a comma", len(record), n)
		return
	}
	line, _ := s.csv.FieldPos(0)
	r := shapedDevice{shapedDevices: s, layout: s.at, record: record, where: fmt.Sprintf("line %d", line)}
	if short, gone := s.withoutNumbers(); gone > 0 && len(record)+gone <= len(s.header) && !r.fits() {
		if r.layout = short; r.fits() {
			s.short = append(s.short, r.where)
		} else {
			r.layout = s.at
		}
	}
	r.name, r.label = r.subscriber()
	r.rules()
}

// withoutNumbers is where columns are in rows that lack those for the numbers of
// nodes, which headers have been given where rows were not; and how many these are.
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

// A layout is where columns are; -1 for those that there are not.
type layout [columns]int

// cell is what a row says in a column, "" where it has none.
func (r *shapedDevice) cell(c column) string {
	if i := r.layout[c]; i >= 0 && i < len(r.record) {
		return strings.TrimSpace(r.record[i])
	}
	return ""
}

// fits reports whether addresses and rates of a row are where they are to be.
func (r *shapedDevice) fits() bool {
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

// words are the addresses of a cell.
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

// node is the name of the node that a row is below; "" for none.
func (r *shapedDevice) node() string {
	if node := r.cell(parentNode); !strings.EqualFold(node, "none") {
		return node
	}
	return ""
}

// subscriber is a name for a row in reports, and the label of its rules: circuit and
// device are the name, and the note is what else helps to find the subscriber.
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

// networks are the addresses of a cell.
func (r *shapedDevice) networks(c column) (all []netip.Prefix) {
	for _, word := range words(r.cell(c)) {
		p, err := policy.ParsePrefix(word)
		if loose, bad := netip.ParsePrefix(word); err != nil && bad == nil && !loose.Addr().Is4In6() {
			p, err = loose.Masked(), nil
			r.leave(hostBits, r.where, "%s was taken as %v", word, p)
		}
		if err == nil && p.Addr().Is4() != (c == ipv4) {
			err = fmt.Errorf("%s is in the column %s; put it into the other one", word, r.header[r.layout[c]])
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

// A speed is what a cell says of a rate; 0 for none.
type speed struct {
	policy.Rate
	left bool // it is no rate that a rule can have, and that was said
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

// both says what is known of two rates.
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

// limit makes a rule for each network, and returns those that there are now.
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

// share remembers who shares a rate.
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
