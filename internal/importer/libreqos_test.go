package importer

import (
	"errors"
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

func TestLibreQoS(t *testing.T) {
	for _, test := range []struct{ name, upload string }{{"subscribers", ""}, {"upload", "eth0"}} {
		t.Run(test.name, func(t *testing.T) {
			f, err := os.Open(filepath.Join("testdata", "libreqos", "subscribers.csv"))
			testenv.Must(t, err)
			defer f.Close()
			imported, err := LibreQoS("subscribers.csv", f, "eth1", test.upload)
			testenv.Must(t, err)
			golden(t, "libreqos/"+test.name+".golden", transcript(t, imported))
		})
	}
}

// TestLibreQoSExample imports LibreQoS's own example, whose rows have fewer columns than its
// header.
func TestLibreQoSExample(t *testing.T) {
	files := testenv.Shared(t, "real/libreqos-ShapedDevices.example.csv")
	if len(files) == 0 {
		t.Skip("LibreQoS's example is not there")
	}
	f, err := os.Open(files[0])
	testenv.Must(t, err)
	defer f.Close()
	i, err := LibreQoS("example", f, "eth1", "")
	testenv.Must(t, err)
	transcript(t, i)
	if n := i.Rules(); n != 42 {
		t.Errorf("%d rules of 21 networks", n)
	}
	rates := map[string]policy.Rate{}
	for _, table := range i.Tables {
		for _, r := range table.Rules {
			rates[table.Direction.String()+" "+name(r.Prefix)] = r.Rate
		}
	}
	for at, want := range map[string]policy.Rate{
		"egress 100.64.0.2": 155_000_000, "egress fdd7:b724:0:200::/56": 2_500_000, "ingress 100.64.0.5": 50_250_000, "ingress 100.64.0.11": 18_000_000,
	} {
		if rates[at] != want {
			t.Errorf("%s has %v, not %v", at, rates[at], want)
		}
	}
}

// row returns a row with a network and rates.
func row(network, down, up string) string {
	return "1,,1,,,," + network + ",,,," + down + "," + up + ",\n"
}

// TestLibreQoSFormats imports the same row in different formats.
func TestLibreQoSFormats(t *testing.T) {
	for name, text := range map[string]string{
		"plain":                  oldHeader + row("10.0.0.1", "2.5", "1"),
		"CRLF":                   strings.ReplaceAll(oldHeader+row("10.0.0.1", "2.5", "1"), "\n", "\r\n"),
		"byte order mark":        byteOrderMark + oldHeader + row("10.0.0.1", "2.5", "1"),
		"no end of line":         strings.TrimSuffix(oldHeader+row("10.0.0.1", "2.5", "1"), "\n"),
		"comments":               "# made by hand\n" + oldHeader + "#1,,1,,,,10.0.0.2,,,,1,1,\n" + row("10.0.0.1", "2.5", "1") + "# end\n",
		"spaces":                 strings.ReplaceAll(oldHeader+row(" 10.0.0.1 ", " 2.5", "1 "), "IPv4", " IPv4 "),
		"empty rows":             oldHeader + "\n" + row("10.0.0.1", "2.5", "1") + ",,,,,,,,,,,,\n\n",
		"more digits":            oldHeader + row("10.0.0.1", "2.500000", "01.0"),
		"quotes":                 `"` + strings.ReplaceAll(strings.TrimSpace(oldHeader), ",", `","`) + "\"\n" + row(`"10.0.0.1"`, `"2.5"`, "1"),
		"a prefix length":        oldHeader + row("10.0.0.1/32", "2.5", "1"),
		"the same address":       oldHeader + row(`"10.0.0.1, 10.0.0.1"`, "2.5", "1"),
		"no last column":         oldHeader + "1,,1,,,,10.0.0.1,,,,2.5,1\n",
		"another order":          "Upload Max Mbps,IPv4,Download Max Mbps\n1,10.0.0.1,2.5\n",
		"names as in a program":  "circuit_id,download_max_mbps,upload_max_mbps,ipv4,ipv6\n7,2.5,1,10.0.0.1,\n",
		"the first version":      "ID,AP,MAC,Hostname,IPv4,IPv6,Download Min,Upload Min,Download Max,Upload Max\n3,,,,10.0.0.1,,,,2.5,1\n",
		"numbers of nodes":       newHeader + "1,,1,,,N1,A1,,10.0.0.1,,,,2.5,1,,\n",
		"old rows":               newHeader + row("10.0.0.1", "2.5", "1"),
		"rows without the end":   newHeader + "1,,1,,,N1,A1,,10.0.0.1,,,,2.5,1\n",
		"a node like an address": newHeader + "1,,1,,,N1,10.0.0.9,,10.0.0.1,,,,2.5,1\n",
		"Latin-1":                oldHeader + "1,M\xfcller,1,,,,10.0.0.1,,,,2.5,1,\n",
	} {
		t.Run(name, func(t *testing.T) {
			i, err := LibreQoS("f", strings.NewReader(text), "eth1", "")
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
		{"a rate of 0", row("10.0.0.1", "1", "0.0"), 1, []reason{noRate}},
		{"a rate of half a bit", row("10.0.0.1", "0.0000005", "1"), 1, []reason{noSuchRate}},
		{"a rate of 1 bit", row("10.0.0.1", "0.000001", "1"), 1, []reason{noSuchRate}},
		{"a rate of 2 tbit", row("10.0.0.1", "2000000", "1"), 1, []reason{noSuchRate}},
		{"no address", row("", "1", "1"), 0, []reason{noAddress}},
		{"host bits", row("10.0.0.7/24", "1", "1"), 2, []reason{hostBits}},
		{"two rows", row("10.0.0.1", "1", "1") + strings.Replace(row("10.0.0.1", "2", "2"), "1", "2", 1), 2, []reason{twice, twice}},
		{"two addresses", row(`"10.0.0.1,10.0.0.2"`, "1", "1"), 4, []reason{shared}},
		{"two rows of a circuit", row("10.0.0.1", "1", "1") + row("10.0.0.2", "1", "1"), 4, []reason{shared}},
		{"two circuits without a number", strings.ReplaceAll(row("10.0.0.1", "1", "1")+row("10.0.0.2", "1", "1"), "1,,1", ",,1"), 4, nil},
		{"a guaranteed rate", "1,,1,,,,10.0.0.1,,0.5,0,1,1,\n", 2, []reason{guaranteed}},
		{"a node", "1,,1,,Tower,,10.0.0.1,,,,1,1,\n", 2, []reason{parents}},
		{"no node", "1,,1,,none,,10.0.0.1,,,,1,1,\n", 2, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			i, err := LibreQoS("f", strings.NewReader(oldHeader+test.rows), "eth1", "")
			testenv.Must(t, err)
			var kinds, want []string
			for _, l := range i.Left {
				kinds = append(kinds, l.Kind)
			}
			for _, r := range test.kinds {
				want = append(want, r.kind)
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

// TestLibreQoSLabels cuts texts that are too long, and reports that once for a row.
func TestLibreQoSLabels(t *testing.T) {
	long := strings.Repeat("é", 40)
	for _, test := range []struct {
		row  string
		want policy.Label
		left []reason
	}{
		{"7,Smith,1,Router,Mast,,10.0.0.1,,,,1,1,pays late\n", policy.Label{Name: "Smith / Router", Note: "circuit 7; site Mast; pays late"}, []reason{parents}},
		{"7,Smith,1,Smith,none,,10.0.0.1,,,,1,1,Smith\n", policy.Label{Name: "Smith", Note: "circuit 7"}, nil},
		{"7,,1,,,,10.0.0.1,,,,1,1,\n", policy.Label{Name: "circuit 7"}, nil},
		{",,1,,,,10.0.0.1,,,,1,1,\n", policy.Label{}, nil},
		{"7,\" a\n\x01b\xff \",1,,,,10.0.0.1,,,,1,1,\n", policy.Label{Name: "a b\ufffd", Note: "circuit 7"}, nil},
		{"7,x" + long + ",1,,,,10.0.0.1,,,,1,1,\n", policy.Label{Name: "x" + long[:62], Note: "circuit 7"}, []reason{longName}},
		{"7,Smith,1,,,,10.0.0.1,,,,1,1," + strings.Repeat(long, 4) + "\n",
			policy.Label{Name: "Smith", Note: "circuit 7; " + strings.Repeat(long, 4)[:244]}, []reason{longNote}},
	} {
		i, err := LibreQoS("f", strings.NewReader(oldHeader+test.row), "eth1", "")
		testenv.Must(t, err)
		var left []reason
		for _, l := range i.Left {
			left = append(left, reason{l.Kind, l.Why, l.Advice})
		}
		if !slices.Equal(left, test.left) {
			t.Errorf("%q: left: %+v", test.row, i.Left)
		}
		for _, table := range i.Tables {
			if got := table.Rules[0].Label; got != test.want {
				t.Errorf("%q: got %+v, want %+v", test.row, got, test.want)
			}
		}
	}
}

// TestLibreQoSRefuses checks that all mistakes are reported by line and column.
func TestLibreQoSRefuses(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       []string
	}{
		{"nothing", "", []string{"f:1:1: there is no header"}},
		{"comments alone", "# nothing\n", []string{"f:1:1: there is no header"}},
		{"no header", row("10.0.0.1", "1", "1"), []string{"f:1:1: there is no column IPv4"}},
		{"semicolons", strings.ReplaceAll(oldHeader, ",", ";"), []string{"f:1:1: there is no column IPv4"}},
		{"no rates", "IPv4,IPv6\n", []string{"f:1:1: there is no column Download Max Mbps"}},
		{"a column twice", "IPv4,Download Max,Upload Max,IPv4\n", []string{`f:1:30: the column "IPv4" appears twice`}},
		{"UTF-16", "\xff\xfeI\x00P\x00", []string{"f:1:1: the text is UTF-16"}},
		{"a quote that is not closed", oldHeader + "1,\"968 Circle St.\n", []string{"f:2:"}},
		{"a quote within", oldHeader + "1,5\" pipe,1\n", []string{"f:2:4: a quote is in the middle of a cell"}},
		{"too many columns", oldHeader + "1,968 Circle St., Gurnee,1,,,,10.0.0.1,,,,1,1,x\n", []string{"f:2:47: 14 columns where the header has 13"}},
		{"no number", oldHeader + row("10.0.0.1", "fast", "1"), []string{`f:2:21: Download Max "fast" is not a number`}},
		{"a unit", oldHeader + row("10.0.0.1", "10M", "1"), []string{`f:2:21: Download Max "10M"`}},
		{"a comma in a number", oldHeader + row("10.0.0.1", `"2,5"`, "1"), []string{`"2,5" is not a number`}},
		{"a sign", oldHeader + row("10.0.0.1", "-1", "1"), []string{`"-1" is not a number`}},
		{"an exponent", oldHeader + row("10.0.0.1", "1e3", "1"), []string{`"1e3" is not a number`}},
		{"a point", oldHeader + row("10.0.0.1", ".", "1"), []string{`"." is not a number`}},
		{"no address", oldHeader + row("10.0.0.256", "1", "1"), []string{`f:2:9: network "10.0.0.256" is not a CIDR or an address`}},
		{"the other family", oldHeader + row("2001:db8::1", "1", "1"), []string{"f:2:9: 2001:db8::1 is in the column IPv4"}},
		{"IPv4 as IPv6", oldHeader + "1,,1,,,,,::ffff:10.0.0.1,,,1,1,\n", []string{"did you mean 10.0.0.1/32"}},
		{"IPv4 as IPv6, with a length", oldHeader + "1,,1,,,,,::ffff:10.0.0.1/128,,,1,1,\n", []string{"did you mean 10.0.0.1/32"}},
		{"a later line first", "Circuit ID,Upload Max,Circuit Name,IPv4,Download Max\né,x,\"a\nb\",10.0.0,1\n", []string{`f:2:3: Upload Max "x"`, `f:3:4: network "10.0.0"`}},
		{"behind letters of two bytes", oldHeader + "1,Müller,1,,,,10.0.0.256,,,,1,1,\n", []string{"f:2:15: network"}},
		{"in a row of two lines", oldHeader + "1,\"Müller\nHamburg\",1,,,,10.0.0.256,,,,1,1,\n", []string{"f:3:15: network"}},
		{"more than one", oldHeader + row("10.0.0.1", "x", "y") + row("10.0.0", "1", "1"),
			[]string{`f:2:21: Download Max "x"`, `f:2:23: Upload Max "y"`, `f:3:9: network "10.0.0"`}},
		{"a short row that is wrong either way", newHeader + row("10.0.0.256", "1", "x"), []string{`f:2:`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			i, err := LibreQoS("f", strings.NewReader(test.text), "eth1", "")
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

// TestLibreQoSLines imports 10 000 subscribers; the report must have few lines.
func TestLibreQoSLines(t *testing.T) {
	var text strings.Builder
	text.WriteString(oldHeader)
	for i := range 10_000 {
		text.WriteString(strings.Replace("N,,1,,Tower,,10.A.B.C,,1,1,10,2,\n", "A.B.C", strings.Trim(strings.Join([]string{
			strconv.Itoa(i / 10000), strconv.Itoa(i / 100 % 100), strconv.Itoa(i % 100)}, "."), " "), 1))
	}
	i, err := LibreQoS("f", strings.NewReader(text.String()), "eth1", "")
	testenv.Must(t, err)
	if i.Rules() != 20_000 || len(i.Left) < 20_000 {
		t.Errorf("%d rules, %d left", i.Rules(), len(i.Left))
	}
	for _, line := range i.Lines() {
		if len(line) > 1000 || strings.Contains(line, "\n") {
			t.Errorf("a line of %d bytes: %s", len(line), line)
		}
	}
	if n := len(i.Lines()); n != 3 {
		t.Errorf("%d lines: %q", n, i.Lines())
	}
}
