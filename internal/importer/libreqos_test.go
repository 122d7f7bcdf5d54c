package importer

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	newHeader = "Circuit ID,Circuit Name,Device ID,Device Name,Parent Node,Parent Node ID,Anchor Node ID,MAC,IPv4,IPv6,Download Min Mbps,Upload Min Mbps,Download Max Mbps,Upload Max Mbps,Comment,sqm\n"
	oldHeader = "Circuit ID,Circuit Name,Device ID,Device Name,Parent Node,MAC,IPv4,IPv6,Download Min,Upload Min,Download Max,Upload Max,Comment\n"
)

var flows = policy.Share{Kind: policy.ShareFlow}

func TestLibreQoS(t *testing.T) {
	for _, test := range []struct{ name, upload string }{{"subscribers", ""}, {"upload", "eth0"}} {
		t.Run(test.name, func(t *testing.T) {
			f, err := os.Open(filepath.Join("testdata", "libreqos", "subscribers.csv"))
			testenv.Must(t, err)
			defer f.Close()
			tree, err := os.Open(filepath.Join("testdata", "libreqos", "network.json"))
			testenv.Must(t, err)
			defer tree.Close()
			imported, err := LibreQoS(File{"subscribers.csv", f}, File{"network.json", tree}, LibreQoSOptions{Device: "eth1", Upload: test.upload, Share: flows})
			testenv.Must(t, err)
			golden(t, "libreqos/"+test.name+".golden", transcript(t, imported))
		})
	}
}

// TestLibreQoSExample imports LibreQoS's own example, whose rows have fewer columns than its
// header, and whose tree has five nodes above a subscriber.
func TestLibreQoSExample(t *testing.T) {
	files := testenv.Shared(t, "real/libreqos-*.example.*")
	if len(files) != 2 {
		t.Skip("LibreQoS's example is not there")
	}
	f, err := os.Open(files[0])
	testenv.Must(t, err)
	defer f.Close()
	tree, err := os.Open(files[1])
	testenv.Must(t, err)
	defer tree.Close()
	i, err := LibreQoS(File{"example", f}, File{"tree", tree}, LibreQoSOptions{Device: "eth1"})
	testenv.Must(t, err)
	transcript(t, i)
	if len(i.Left) > 0 {
		t.Errorf("left: %+v", i.Left)
	}
	if i.Rules() != 42 || i.Pools() != 2*(11+10) {
		t.Errorf("%d rules of 21 networks, %d pools of 11 nodes and 10 circuits", i.Rules(), i.Pools())
	}
	rules := map[string]policy.Rule{}
	for _, table := range i.Tables {
		for _, r := range table.Rules {
			at := r.Label.Name
			if !r.Pool {
				at = table.Direction.String() + " " + policy.NetworkText(r.Prefix)
			}
			rules[at] = r
		}
	}
	// What the packets of 6 Littleton Drive draw from: guarantee and rate.
	within := rules["ingress 100.64.0.6"].Within
	for _, want := range []string{
		"10005 up: 1mbit 18mbit", "AP_11 up: none 30mbit", "PoP_6 up: none 60mbit",
		"PoP_5 up: none 200mbit", "Site_3 up: none 500mbit", "Site_1 up: none 1gbit", ": none 0",
	} {
		p := rules[string(within)]
		if got := string(within) + ": " + p.Guarantee.String() + " " + p.Rate.String(); got != want {
			t.Errorf("%s, not %s", got, want)
		}
		within = p.Within
	}
}

// fromCSV imports a ShapedDevices.csv alone.
func fromCSV(text string) (Imported, error) {
	return LibreQoS(File{"f", strings.NewReader(text)}, File{}, LibreQoSOptions{Device: "eth1"})
}

// row returns a row with a network and rates.
func row(network, down, up string) string {
	return "1,,1,,,," + network + ",,,," + down + "," + up + ",\n"
}

// TestLibreQoSFormats imports the same row in different formats.
func TestLibreQoSFormats(t *testing.T) {
	for name, text := range map[string]string{
		"plain":                 oldHeader + row("10.0.0.1", "2.5", "1"),
		"CRLF":                  strings.ReplaceAll(oldHeader+row("10.0.0.1", "2.5", "1"), "\n", "\r\n"),
		"byte order mark":       byteOrderMark + oldHeader + row("10.0.0.1", "2.5", "1"),
		"no end of line":        strings.TrimSuffix(oldHeader+row("10.0.0.1", "2.5", "1"), "\n"),
		"comments":              "# made by hand\n" + oldHeader + "#1,,1,,,,10.0.0.2,,,,1,1,\n" + row("10.0.0.1", "2.5", "1") + "# end\n",
		"spaces":                strings.ReplaceAll(oldHeader+row(" 10.0.0.1 ", " 2.5", "1 "), "IPv4", " IPv4 "),
		"empty rows":            oldHeader + "\n" + row("10.0.0.1", "2.5", "1") + ",,,,,,,,,,,,\n\n",
		"more digits":           oldHeader + row("10.0.0.1", "2.500000", "01.0"),
		"quotes":                `"` + strings.ReplaceAll(strings.TrimSpace(oldHeader), ",", `","`) + "\"\n" + row(`"10.0.0.1"`, `"2.5"`, "1"),
		"a prefix length":       oldHeader + row("10.0.0.1/32", "2.5", "1"),
		"the same address":      oldHeader + row(`"10.0.0.1, 10.0.0.1"`, "2.5", "1"),
		"another order":         "Upload Max Mbps,IPv4,Download Max Mbps\n1,10.0.0.1,2.5\n",
		"names as in a program": "circuit_id,download_max_mbps,upload_max_mbps,ipv4,ipv6\n7,2.5,1,10.0.0.1,\n",
		"the first version":     "ID,AP,MAC,Hostname,IPv4,IPv6,Download Min,Upload Min,Download Max,Upload Max\n3,,,,10.0.0.1,,,,2.5,1\n",
		"no comment":            strings.Replace(oldHeader, ",Comment", "", 1) + "1,,1,,,,10.0.0.1,,,,2.5,1\n",
		"no numbers of nodes":   strings.Replace(newHeader, ",sqm", "", 1) + row("10.0.0.1", "2.5", "1"),
		"numbers of nodes":      newHeader + "1,,1,,,N1,A1,,10.0.0.1,,,,2.5,1,,\n",
	} {
		t.Run(name, func(t *testing.T) {
			i, err := fromCSV(text)
			testenv.Must(t, err)
			if len(i.Left) > 0 {
				t.Errorf("left: %+v", i.Left)
			}
			if i.Rules() != 2 || len(i.Tables) != 2 {
				t.Fatalf("rules: %+v", i.Tables)
			}
			for k, want := range []policy.Rate{2_500_000, 1_000_000} {
				r := i.Tables[k].Rules[0]
				if r.Prefix.String() != "10.0.0.1/32" || r.Rate != want || r.Capacity != policy.DefaultCapacity(want) {
					t.Errorf("%v: %+v", i.Tables[k].Direction, r)
				}
			}
			transcript(t, i)
		})
	}
}

// TestLibreQoSLeaves checks what is left, and that the rest of a row is imported.
func TestLibreQoSLeaves(t *testing.T) {
	for _, test := range []struct {
		name, rows string
		rules      int
		kinds      []reason
	}{
		{"no rate down", row("10.0.0.1", "", "1"), 1, []reason{noRate}},
		{"a rate of 0", row("10.0.0.1", "1", "0.0"), 1, []reason{zeroRate}},
		{"a rate of 0 last", row(`"10.0.0.1,10.0.0.2"`, "1", "") + strings.Replace(row("10.0.0.3", "1", "0"), "1", "2", 1), 3,
			[]reason{zeroRate, noRate}},
		{"a rate of half a bit", row("10.0.0.1", "0.0000005", "1"), 1, []reason{outside}},
		{"a rate of 1 bit", row("10.0.0.1", "0.000001", "1"), 1, []reason{outside}},
		{"a rate of 2 tbit", row("10.0.0.1", "2000000", "1"), 1, []reason{outside}},
		{"no address", row("", "1", "1"), 0, []reason{noAddress}},
		{"two rows", row("10.0.0.1", "1", "1") + strings.Replace(row("10.0.0.1", "2", "2"), "1", "2", 1), 2, []reason{twice}},
		{"two addresses", row(`"10.0.0.1,10.0.0.2"`, "1", "1"), 4, nil},
		{"two rows of a circuit", row("10.0.0.1", "1", "1") + row("10.0.0.2", "1", "1"), 4, nil},
		{"two rows with one address", row("10.0.0.1", "1", "1") + row("10.0.0.1", "1", "1"), 2, nil},
		{"two rows with other rates", row("10.0.0.1", "1", "1") + row("10.0.0.2", "1", "2"), 4, []reason{unlike}},
		{"two rows with other nodes", row("10.0.0.1", "1", "1") + "1,,1,,Tower,,10.0.0.2,,,,1,1,\n", 4, []reason{unknownNode}},
		{"two circuits without a number", strings.ReplaceAll(row("10.0.0.1", "1", "1")+row("10.0.0.2", "1", "1"), "1,,1", ",,1"), 4, nil},
		{"an address of a circuit with a rate of 0", row("10.0.0.1", "0", "0") + strings.Replace(row("10.0.0.1", "2", "2"), "1", "2", 1), 0,
			[]reason{zeroRate, zeroRate, twice}},
		{"a guaranteed rate", "1,,1,,,,10.0.0.1,,0.5,0,1,1,\n", 2, []reason{guaranteed}},
		{"a guaranteed rate of 1 bit", "1,,1,,,,10.0.0.1,,0.000001,0,1,1,\n", 2, []reason{outOfRange}},
		{"a node", "1,,1,,Tower,,10.0.0.1,,,,1,1,\n", 2, []reason{unknownNode}},
		{"no node", "1,,1,,none,,10.0.0.1,,,,1,1,\n", 2, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			i, err := fromCSV(oldHeader + test.rows)
			testenv.Must(t, err)
			var kinds, want []string
			for _, l := range i.Left {
				kinds = append(kinds, l.Kind)
			}
			for _, r := range test.kinds {
				want = append(want, r.Kind)
			}
			if !slices.Equal(kinds, want) {
				t.Errorf("left: %q, not %q", kinds, want)
			}
			if i.Rules() != test.rules {
				t.Errorf("%d rules, not %d: %+v", i.Rules(), test.rules, i.Tables)
			}
		})
	}
}

// TestLibreQoSLabels cuts texts that are too long.
func TestLibreQoSLabels(t *testing.T) {
	long := strings.Repeat("é", 40)
	for _, test := range []struct {
		row  string
		want policy.Label
		left []reason
	}{
		{"7,Smith,1,Router,Mast,,10.0.0.1,,,,1,1,pays late\n",
			policy.Label{Name: "Smith (7)", Note: "device Router; site Mast; pays late"}, []reason{unknownNode}},
		{"7,Smith,1,Smith,none,,10.0.0.1,,,,1,1,Smith\n", policy.Label{Name: "Smith (7)"}, nil},
		{"7,,1,Router,,,10.0.0.1,,,,1,1,\n", policy.Label{Name: "7", Note: "device Router"}, nil},
		{",,1,Router,,,10.0.0.1,,,,1,1,late\n", policy.Label{Name: "10.0.0.1", Note: "device Router; late"}, nil},
		{",Smith,1,,,,10.0.0.1,,,,1,1,\n", policy.Label{Name: "Smith (10.0.0.1)"}, nil},
		{"7,\" a\n\x01b\u2028 \",1,,,,10.0.0.1,,,,1,1,\n", policy.Label{Name: "a b (7)"}, nil},
		{"7,x" + long + ",1,,,,10.0.0.1,,,,1,1,\n", policy.Label{Name: "x" + long[:58] + " (7)"}, nil},
		{"7,Smith,1,,,,10.0.0.1,,,,1,1," + strings.Repeat(long, 4) + "\n",
			policy.Label{Name: "Smith (7)", Note: strings.Repeat(long, 4)[:256]}, nil},
	} {
		i, err := fromCSV(oldHeader + test.row)
		testenv.Must(t, err)
		var left []reason
		for _, l := range i.Left {
			left = append(left, l.reason)
		}
		if !slices.Equal(left, test.left) {
			t.Errorf("%q: left: %+v", test.row, i.Left)
		}
		for _, table := range i.Tables {
			got := table.Rules[0].Label
			if got.Plan = ""; got != test.want {
				t.Errorf("%q: got %+v, want %+v", test.row, got, test.want)
			}
		}
	}
}

// TestLibreQoSNames knows circuits by their IDs: rules have them in their names, and pools as names.
func TestLibreQoSNames(t *testing.T) {
	long, id := strings.Repeat("é", 32), strings.Repeat("2", maxID)
	for _, test := range []struct {
		name, rows   string
		rules, pools []string
	}{
		{"namesakes", "1,Smith,\"10.0.0.1,10.0.0.2\"\n2,Smith,\"10.0.0.3,10.0.0.4\"\n", []string{"Smith (1)", "Smith (1)", "Smith (2)", "Smith (2)"}, []string{"1 down", "1 up", "2 down", "2 up"}},
		{"two rows", "1,Smith,10.0.0.1\n1,Smith's barn,10.0.0.2\n", []string{"Smith (1)", "Smith (1)"}, []string{"1 down", "1 up"}},
		{"without IDs", ",Smith,\"10.0.0.1,10.0.0.2\"\n,Smith,\"10.0.0.3,10.0.0.4\"\n", []string{"Smith (10.0.0.1)", "Smith (10.0.0.1)", "Smith (10.0.0.3)", "Smith (10.0.0.3)"},
			[]string{"10.0.0.1 down", "10.0.0.1 up", "10.0.0.3 down", "10.0.0.3 up"}},
		{"the ID as name", "1,1,10.0.0.1\n", []string{"1"}, nil},
		{"long", "1," + long + "," + "10.0.0.1\n" + id + ",Smith,\"10.0.0.3,10.0.0.4\"\n", []string{long[:60] + " (1)", "Smith (" + id + ")", "Smith (" + id + ")"},
			[]string{id + " down", id + " up"}},
	} {
		i, err := fromCSV("Circuit ID,Circuit Name,IPv4,Download Max,Upload Max\n" + strings.ReplaceAll(test.rows, "\n", ",1,1\n"))
		testenv.Must(t, err)
		for _, table := range i.Tables {
			var got []string
			for _, r := range table.Rules {
				got = append(got, r.Label.Name)
			}
			want := test.rules
			if table.IsPools() {
				slices.Sort(got)
				want = test.pools
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s: names are %q, not %q", test.name, got, want)
			}
		}
		if noted := strings.Contains(strings.Join(i.Notes, "\n"), "2 rows without a Circuit ID, in line 2, line 3"); len(i.Left) > 0 || noted != (test.name == "without IDs") {
			t.Errorf("%s: left: %+v, notes: %q", test.name, i.Left, i.Notes)
		}
		transcript(t, i)
	}
}

// TestLibreQoSTouchesOnlyThoseConcerned compares an import with that of one more circuit: nothing else differs.
func TestLibreQoSTouchesOnlyThoseConcerned(t *testing.T) {
	const nodes = `{"Mast": {"downloadBandwidthMbps": 35, "uploadBandwidthMbps": 20}}`
	rows := "Circuit ID,Circuit Name,IPv4,IPv6,Parent Node,Download Min,Upload Min,Download Max,Upload Max\n"
	for n := range 30 {
		rows += fmt.Sprintf("%d,Smith,10.0.0.%d,2001:db8:0:%d::/64,Mast,2,1,50,10\n", n, n, n)
	}
	tables := func(rows string) []policy.Table {
		i, err := LibreQoS(File{"f", strings.NewReader(rows)}, File{"n", strings.NewReader(nodes)}, LibreQoSOptions{Device: "eth1", Share: flows})
		testenv.Must(t, err)
		for _, table := range i.Tables {
			policy.SortRules(table.Rules)
		}
		return i.Tables
	}
	for _, d := range policy.Diff(tables(rows), tables(rows+"77,Smith,10.0.0.77,,Mast,2,1,50,10\n")) {
		if d.Have != nil || policy.NetworkText(d.Want.Prefix) != "10.0.0.77" {
			t.Errorf("%v -> %v", d.Have, d.Want)
		}
	}
}

// TestLibreQoSProtects lowers the guarantees of others, and names first who loses most.
func TestLibreQoSProtects(t *testing.T) {
	const rows = "Circuit ID,Circuit Name,IPv4,Parent Node,Download Min,Upload Min,Download Max,Upload Max,Comment\n" +
		"1,Inn,10.0.0.1,Mast,2,,9,9,\n2,Farm,10.0.0.2,Mast,8,,9,9,\n3,Mill,10.0.0.3,Mast,4,,9,9,SLA 4/4 kept\n"
	for _, test := range []struct {
		protect    []string
		want, line string
		notes      int
	}{
		{nil, "1mbit 4mbit 2mbit", `less: lowered guarantee, 3 times, such as line 3 ("Farm (2)" down: 4mbit of 8mbit, because 14mbit are guaranteed within "Mast down", whose rate is 10mbit); `, 1},
		{[]string{"*SLA*"}, "1mbit 4mbit 4mbit", "", 1},
		{[]string{"Inn", "Farm"}, "2mbit 8mbit none", "", 1},     // which just fit
		{[]string{"3", "Farm", "4"}, "1mbit 4mbit 2mbit", "", 2}, // as even these do not fit
	} {
		i, err := LibreQoS(File{"f", strings.NewReader(rows)}, File{"n", strings.NewReader(`{"Mast": {"downloadBandwidthMbps": 10}}`)},
			LibreQoSOptions{Device: "eth1", Protect: test.protect})
		testenv.Must(t, err)
		var got []string
		for _, r := range i.Tables[slices.IndexFunc(i.Tables, func(t policy.Table) bool { return t.Direction == policy.Egress && !t.IsPools() })].Rules {
			got = append(got, r.Guarantee.String())
		}
		if s := strings.Join(got, " "); s != test.want || len(i.Notes) != test.notes || !strings.HasPrefix(i.Lines()[0], test.line) || !strings.HasSuffix(i.Lines()[0], "or keep some by --protect") {
			t.Errorf("protect %q: %s, not %s; %q, %q", test.protect, s, test.want, i.Lines(), i.Notes)
		}
	}
}

// TestLibreQoSSkipsBad leaves out rows that cannot be read, and names each.
func TestLibreQoSSkipsBad(t *testing.T) {
	text := oldHeader + row("10.0.0.1", "1", "1") + row("10.0.0", "1", "1") + "2,5\" pipe\n3,M\xfcller\n" + strings.Replace(row("10.0.0.4", "1", "1"), "1", "4", 1)
	i, err := LibreQoS(File{"f", strings.NewReader(text)}, File{}, LibreQoSOptions{Device: "eth1", SkipBad: true})
	testenv.Must(t, err)
	if line := i.Lines()[0]; i.Rules() != 4 || len(i.Left) != 3 ||
		!strings.Contains(line, "line 3 (network") || !strings.Contains(line, "line 4 (a quote") || !strings.Contains(line, "line 5 (the text is not UTF-8") {
		t.Errorf("%d rules; %s", i.Rules(), line)
	}
	if i, err := LibreQoS(File{"f", strings.NewReader(oldHeader + row("10.0.0", "1", "1"))}, File{}, LibreQoSOptions{Device: "eth1", SkipBad: true}); err == nil {
		t.Errorf("a file without a good row: %+v", i)
	}
	torn := oldHeader + "1,\"Inn\n" + row("10.0.0.1", "1", "1") + "2,\"Farm\",1\n"
	if i, err := LibreQoS(File{"f", strings.NewReader(torn)}, File{}, LibreQoSOptions{Device: "eth1", SkipBad: true}); err == nil {
		t.Errorf("an open quote swallows rows: %+v", i)
	}
	for _, cut := range []string{"5", "5,\"Inn", "5,,1,,,,10.0.0.5,,,,1"} {
		i, err := LibreQoS(File{"f", strings.NewReader(text + cut)}, File{}, LibreQoSOptions{Device: "eth1", SkipBad: true})
		if err == nil || !strings.HasPrefix(err.Error(), "f:7:") || strings.Contains(err.Error(), "\n") {
			t.Errorf("a file that ends with %q: %v, %d rules", cut, err, i.Rules())
		}
		if i, err = LibreQoS(File{"f", strings.NewReader(text + cut + "\n")}, File{}, LibreQoSOptions{Device: "eth1", SkipBad: true}); err != nil || len(i.Left) != 4 {
			t.Errorf("a row of %q: %v, left %+v", cut, err, i.Left)
		}
	}
}

// TestLibreQoSCutOff cuts a file at each byte. Its last cell is empty, so each cut loses at least a column.
func TestLibreQoSCutOff(t *testing.T) {
	for _, header := range []string{oldHeader, newHeader} {
		cells := make([]string, strings.Count(header, ",")+1)
		for i, h := range strings.Split(strings.TrimSpace(header), ",") {
			switch newShapedDevices(File{}, LibreQoSOptions{}).headerName(h) {
			case "circuitname":
				cells[i] = `"Müller, Lindenallee"`
			case "ipv4":
				cells[i] = `"10.0.0.1, 10.0.0.2"`
			case "downloadmax", "uploadmax":
				cells[i] = "100"
			}
		}
		text := header + strings.Join(cells, ",")
		for end := range len(text) {
			if i, err := fromCSV(text[:end]); !errors.As(err, new(policyfile.Errors)) {
				t.Errorf("%q: %v, %d rules", text[:end], err, i.Rules())
			}
		}
		i, err := fromCSV(text)
		testenv.Must(t, err)
		if i.Rules() != 4 {
			t.Errorf("%d rules", i.Rules())
		}
	}
}

// TestLibreQoSPlans makes plans of the rates of circuits with one address. Rules are in the order of the file.
func TestLibreQoSPlans(t *testing.T) {
	i, err := fromCSV("Circuit ID,IPv4,IPv6,Download Max,Upload Max\n1,10.0.0.9,,50,2.5\n2,10.0.0.1,,50.0,2.5\n3,10.0.0.2,2001:db8::/56,50,2.5\n4,10.0.0.3,,0,10\n")
	testenv.Must(t, err)
	got := map[policy.Direction]string{}
	for _, table := range i.Tables {
		for _, r := range table.Rules {
			if !table.IsPools() {
				got[table.Direction] += policy.NetworkText(r.Prefix) + ":" + r.Label.Plan + " "
			}
		}
	}
	if down, up := got[policy.Egress], got[policy.Ingress]; down != "10.0.0.9:down-50-2.5 10.0.0.1:down-50-2.5 10.0.0.2: 2001:db8::/56: " ||
		up != "10.0.0.9:up-50-2.5 10.0.0.1:up-50-2.5 10.0.0.2: 2001:db8::/56: 10.0.0.3:up-0-10 " {
		t.Errorf("down %s, up %s", down, up)
	}
	transcript(t, i)
}

// TestLibreQoSRefuses checks that all mistakes are reported by line and column.
func TestLibreQoSRefuses(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       []string
	}{
		{"nothing", "", []string{"f:1:1: there is no header"}},
		{"comments alone", "# nothing\n", []string{"f:1:1: there is no header"}},
		{"a header alone", "# made by hand\n" + oldHeader + ",,,,,,,,,,,,\n# end\n", []string{"f:1:1: no row follows the header"}},
		{"Latin-1", byteOrderMark + oldHeader + "1,é M\xfcller,1,,,,10.0.0.1,,,,2.5,1,\n", []string{"f:2:3: the text is not UTF-8; convert it"}},
		{"a row that is cut off", oldHeader + row("10.0.0.1", "1", "1") + "2,,1,,,,10.0.0.2,,,,1", []string{"f:3:21: 11 columns where the header has 13"}},
		{"a cell", oldHeader + "100\n", []string{"f:2:1: 1 column where the header has 13"}},
		{"rows without the end", newHeader + "1,,1,,,N1,A1,,10.0.0.1,,,,2.5,1\n", []string{"f:2:31: 14 columns where the header has 16"}},
		{"a row without numbers of nodes and the end", newHeader + row("10.0.0.1", "1", "1"), []string{"f:2:25: 13 columns where the header has 16"}},
		{"a node like an address", newHeader + "1,,1,,,N1,10.0.0.9,,10.0.0.1,,,,2.5,1\n", []string{"f:2:37: 14 columns where the header has 16"}},
		{"no header", row("10.0.0.1", "1", "1"), []string{"f:1:1: there is no column IPv4"}},
		{"semicolons", strings.ReplaceAll(oldHeader, ",", ";"), []string{"f:1:1: there is no column IPv4"}},
		{"no rates", "IPv4,IPv6\n", []string{"f:1:1: there is no column Download Max Mbps"}},
		{"a column twice", "IPv4,Download Max,Upload Max,IPv4\n", []string{`f:1:30: the column "IPv4" appears twice`}},
		{"network.json", "{\n\t\"Site_1\": {}\n}\n", []string{"f:1:1: there is no column IPv4"}},
		{"UTF-16", "\xff\xfeI\x00P\x00", []string{"f:1:1: there is no column IPv4"}},
		{"a quote that is not closed", oldHeader + "1,\"968 Circle St.\n", []string{"f:2:"}},
		{"a quote within", oldHeader + "1,5\" pipe,1\n", []string{"f:2:4: a quote is not closed or is within a cell"}},
		{"too many columns", oldHeader + "1,968 Circle St., Gurnee,1,,,,10.0.0.1,,,,1,1,x\n", []string{"f:2:47: 14 columns where the header has 13"}},
		{"no number", oldHeader + row("10.0.0.1", "fast", "1"), []string{`f:2:21: Download Max "fast" is not a number`}},
		{"a unit", oldHeader + row("10.0.0.1", "10M", "1"), []string{`f:2:21: Download Max "10M"`}},
		{"a comma in a number", oldHeader + row("10.0.0.1", `"2,5"`, "1"), []string{`"2,5" is not a number`}},
		{"a sign", oldHeader + row("10.0.0.1", "-1", "1"), []string{`"-1" is not a number`}},
		{"an exponent", oldHeader + row("10.0.0.1", "1e3", "1"), []string{`"1e3" is not a number`}},
		{"a point", oldHeader + row("10.0.0.1", ".", "1"), []string{`"." is not a number`}},
		{"no address", oldHeader + row("10.0.0.256", "1", "1"), []string{`f:2:9: network "10.0.0.256" is not a CIDR or an address`}},
		{"host bits", oldHeader + row("10.0.0.7/24", "1", "1"), []string{"f:2:9: network 10.0.0.7/24 has host bits set; did you mean 10.0.0.0/24 or 10.0.0.7/32?"}},
		{"the other family", oldHeader + row("2001:db8::1", "1", "1"), []string{"f:2:9: 2001:db8::1 is in the column IPv4"}},
		{"IPv4 as IPv6", oldHeader + "1,,1,,,,,::ffff:10.0.0.1,,,1,1,\n", []string{"did you mean 10.0.0.1/32"}},
		{"IPv4 as IPv6, with a length", oldHeader + "1,,1,,,,,::ffff:10.0.0.1/128,,,1,1,\n", []string{"did you mean 10.0.0.1/32"}},
		{"a long ID", oldHeader + strings.Repeat("7", maxID+1) + row("10.0.0.1", "1", "1"), []string{"f:2:1: the Circuit ID has 58 bytes, and at most 56"}},
		{"behind letters of two bytes", oldHeader + "1,Müller,1,,,,10.0.0.256,,,,1,1,\n", []string{"f:2:15: network"}},
		{"in a row of two lines", oldHeader + "1,\"Müller\nHamburg\",1,,,,10.0.0.256,,,,1,1,\n", []string{"f:3:15: network"}},
		{"more than one", oldHeader + row("10.0.0.1", "x", "y") + row("10.0.0", "1", "1"),
			[]string{`f:2:21: Download Max "x"`, `f:2:23: Upload Max "y"`, `f:3:9: network "10.0.0"`}},
		{"a short row that is wrong either way", newHeader + row("10.0.0.256", "1", "x"), []string{`f:2:`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			i, err := fromCSV(test.text)
			var errs policyfile.Errors
			if !errors.As(err, &errs) {
				t.Fatalf("the error is %v: %+v", err, i)
			}
			lines := strings.Split(err.Error(), "\n")
			for k, want := range test.want {
				if k >= len(lines) || !strings.Contains(lines[k], want) {
					t.Errorf("the errors are\n%v\nand number %d should be %s", err, k, want)
				}
			}
		})
	}
}

// A source that is cut off anywhere is refused, or has the rules of whole rows; or a note says that the last row may be cut.
func TestCutOffAnywhere(t *testing.T) {
	csv := "IPv4,Comment,Download Max,Upload Max\n10.0.0.1,\"a, b\",20,100\n10.0.0.2,,30,200\n"
	tree := `{"Mast": {"downloadBandwidthMbps": 20, "children": {"Tower": {"uploadBandwidthMbps": 100}}}}`
	ruleset := document(chainObject, ruleObject(toHost, `{"limit": {"rate": 1, "per": "second", "rate_unit": "mbytes"}}`, `{"accept": null}`))
	for n := range csv {
		i, err := fromCSV(csv[:n])
		if noted := strings.Contains(strings.Join(i.Notes, "\n"), "if the file is cut off"); err == nil && noted == (csv[n-1] == '\n') {
			t.Errorf("of %q, %d rules are imported with the notes %q", csv[:n], i.Rules(), i.Notes)
		}
	}
	for n := range tree {
		if i, err := LibreQoS(File{"f", strings.NewReader(csv)}, File{"n", strings.NewReader(tree[:n])}, LibreQoSOptions{Device: "eth0"}); err == nil {
			t.Errorf("with the tree %q, %d pools are imported", tree[:n], i.Pools())
		}
	}
	for n := range ruleset {
		if i, err := NFT("f", strings.NewReader(ruleset[:n]), "eth0"); err == nil {
			t.Errorf("of %q, %d rules are imported", ruleset[:n], i.Rules())
		}
	}
}

// TestLibreQoSLines imports 10 000 subscribers. The report must have few lines, first what loosens limits.
func TestLibreQoSLines(t *testing.T) {
	var text strings.Builder
	text.WriteString(oldHeader)
	for i := range 10_000 {
		text.WriteString(strings.Replace(",,1,,Tower,,10.A.B.C,,1,1,10,2,\n", "A.B.C", strings.Trim(strings.Join([]string{
			strconv.Itoa(i / 10000), strconv.Itoa(i / 100 % 100), strconv.Itoa(i % 100)}, "."), " "), 1))
	}
	i, err := fromCSV(text.String())
	testenv.Must(t, err)
	if i.Rules() != 20_000 || len(i.Left) < 20_000 {
		t.Errorf("%d rules, %d left", i.Rules(), len(i.Left))
	}
	for _, line := range i.Lines() {
		if len(line) > 1000 || strings.Contains(line, "\n") {
			t.Errorf("a line of %d bytes: %s", len(line), line)
		}
	}
	for k, want := range []string{"higher limit or none: unknown parent node, 10000 times, such as line 2 (", "different: guaranteed rate without a node, 20000 times, such as line 2 ("} {
		if lines := i.Lines(); len(lines) != 2 || !strings.HasPrefix(lines[k], want) {
			t.Errorf("line %d does not begin with %q: %q", k, want, lines)
		}
	}
}

// TestLibreQoSNamesUnlimited checks that the report counts and names what a rate of 0 leaves without a limit, and that all is left.
func TestLibreQoSNamesUnlimited(t *testing.T) {
	var rows strings.Builder
	for n := range 6 {
		fmt.Fprintf(&rows, "%d,,1,,,,\"10.%d.0.1,10.%d.0.2\",,,,0,1,\n", n, n, n)
	}
	i, err := fromCSV(oldHeader + rows.String())
	testenv.Must(t, err)
	const want = `no limit: rate of 0, 6 times, such as line 2 ("0" down for 10.0.0.1, 10.0.0.2), line 3 ("1" down for 10.1.0.1, 10.1.0.2), line 4`
	if lines := i.Lines(); len(i.Left) != 6 || len(lines) != 1 || !strings.HasPrefix(lines[0], want) {
		t.Errorf("left: %+v, lines: %q", i.Left, lines)
	}
}

// TestLines has one line for each kind, and at last counts the others.
func TestLines(t *testing.T) {
	c := newCollector()
	for n := range mostLines {
		c.leave(reason{other, fmt.Sprint("kind ", n), "why", "do it"}, "here", "that")
	}
	if lines := c.Lines(); len(lines) != mostLines || lines[mostLines-1] != "different: kind 7, here (that); do it" {
		t.Errorf("%q", lines)
	}
	c.leave(reason{other, "kind", "why", "do it"}, "here", "that")
	if lines := c.Lines(); len(lines) != mostLines || lines[mostLines-1] != "2 other kinds" {
		t.Errorf("%q", lines)
	}
}
