package importer

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	update  = flag.Bool("update", false, "write the results into testdata")
	capture = flag.String("capture", "", "print the kernel's dump of this set-up of traffic control")
)

// live lists the set-ups that need only htb, tbf and u32. testdata/tc/capture.sh captures the
// other ones on a kernel that has all.
var live = []string{"htb", "tree", "borrow", "hash", "tbf", "ifb", "block"}

// captured lists the set-ups of which testdata has a dump.
var captured = append([]string{"police", "hosts", "unread", "cake"}, live...)

func (i Imported) Rules() int { _, n := i.Count(); return n }
func (i Imported) Pools() int { n, _ := i.Count(); return n }

// A test keeps objects as messages.
func (o object) MarshalJSON() ([]byte, error) { return json.Marshal(o.message) }

func (o *object) UnmarshalJSON(text []byte) error {
	var message []byte
	err := json.Unmarshal(text, &message)
	if err == nil {
		*o, err = parseObject(message)
	}
	return err
}

// setUp makes two devices and an ifb device, and runs tc commands.
func setUp(t *testing.T, name string) []Dump {
	t.Helper()
	testenv.NewNetns(t)
	testenv.Veth(t, "va", "vb")
	testenv.AddLink(t, &netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "ifb0"}})
	commands, err := os.ReadFile(filepath.Join("testdata", "tc", name+".tc"))
	testenv.Must(t, err)
	tc := exec.Command("tc", "-batch", "-")
	tc.Stdin = bytes.NewReader(commands)
	if out, err := tc.CombinedOutput(); err != nil {
		t.Fatalf("tc: %v: %s", err, out)
	}
	var dumps []Dump
	for _, device := range []string{"va", "vb", "ifb0"} {
		d, err := ReadTC(device, testenv.Link(t, device).Attrs().Index, 14)
		testenv.Must(t, err)
		dumps = append(dumps, d)
	}
	return dumps
}

// transcript returns the result of an import, and checks that its policy parses to the same
// rules.
func transcript(t *testing.T, i Imported) string {
	t.Helper()
	var text strings.Builder
	testenv.Must(t, policyfile.Write(&text, i.Tables))
	back, err := policyfile.Parse("policy", []byte(text.String()))
	testenv.Must(t, err)
	testenv.Must(t, policy.CheckPools(i.Tables))
	var tables []policy.Table
	if pools := back.Pools(); len(pools.Rules) > 0 {
		tables = append(tables, pools)
	}
	devices := map[string]bool{"": true}
	for _, table := range i.Tables {
		policy.SortRules(table.Rules)
		if devices[table.Device] {
			continue
		}
		devices[table.Device] = true
		of, err := back.For(policyfile.Device{Name: table.Device, L2Bytes: 14})
		testenv.Must(t, err)
		tables = append(tables, of...)
	}
	if differences := policy.Diff(i.Tables, tables); len(differences) > 0 {
		t.Errorf("the policy parses to other rules: %+v", differences)
	}
	for _, l := range i.Left {
		fmt.Fprintf(&text, "%s: %s (%s)\n", l.Kind, l.Where, l.What)
	}
	for _, n := range i.Notes {
		fmt.Fprintf(&text, "note: %s\n", n)
	}
	return text.String()
}

// golden compares text with a file in testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		testenv.Must(t, os.WriteFile(path, []byte(got), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	testenv.Must(t, err)
	if got != string(want) {
		t.Errorf("%s differs (go test -update writes it anew); it is now:\n%s", path, got)
	}
}

func TestCapture(t *testing.T) {
	if *capture == "" {
		return
	}
	dumps := setUp(t, *capture)
	out := bufio.NewWriter(os.Stdout)
	e := json.NewEncoder(out)
	e.SetIndent("", "\t")
	testenv.Must(t, e.Encode(dumps))
	testenv.Must(t, out.Flush())
}

// TestTCDumps imports dumps of Debian's kernel.
func TestTCDumps(t *testing.T) {
	for _, name := range captured {
		t.Run(name, func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join("testdata", "tc", name+".json"))
			testenv.Must(t, err)
			var dumps []Dump
			testenv.Must(t, json.Unmarshal(text, &dumps))
			imported, err := TC(dumps, "")
			testenv.Must(t, err)
			golden(t, "tc/"+name+".golden", transcript(t, imported))
		})
	}
}

// TestTCLive imports the same set-ups from this kernel.
func TestTCLive(t *testing.T) {
	for _, name := range live {
		t.Run(name, func(t *testing.T) {
			imported, err := TC(setUp(t, name), "")
			testenv.Must(t, err)
			golden(t, "tc/"+name+".golden", transcript(t, imported))
		})
	}
}

// TestFlower reads each address that a flower filter can have.
func TestFlower(t *testing.T) {
	for key, want := range map[uint16]string{
		nl.TCA_FLOWER_KEY_IPV4_DST: "to 10.0.0.1", nl.TCA_FLOWER_KEY_IPV4_SRC: "from 10.0.0.1",
		nl.TCA_FLOWER_KEY_IPV6_DST: "to 2001:db8::1", nl.TCA_FLOWER_KEY_IPV6_SRC: "from 2001:db8::1",
	} {
		_, address, _ := strings.Cut(want, " ")
		f := term{conditions: conditions{networks: everything}}
		if f.flower(attributes{key: netip.MustParseAddr(address).AsSlice()}); f.describe() != "packets "+want {
			t.Errorf("%s instead of packets %s", f.describe(), want)
		}
	}
}

// TestTCCake names the command that does the same as cake.
func TestTCCake(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "tc", "cake.json"))
	testenv.Must(t, err)
	var dumps []Dump
	testenv.Must(t, json.Unmarshal(text, &dumps))
	imported, err := TC(dumps, "lab")
	testenv.Must(t, err)
	all := strings.Join(imported.Lines(), "\n")
	for _, command := range []string{
		"'shapectl -n lab line --down 26.316mbit --up 39.474mbit --link 30/84 va' does the same; it limits to 95 % of the rates that it is given\n",
		"'shapectl -n lab line --up 1.053mbit --fair flow vb' does the same; it limits to 95 % of the rates that it is given, and leaves out diffserv, atm or ptm",
	} {
		if !strings.Contains(all, command) {
			t.Errorf("%s is not in: %s", command, all)
		}
	}
}
