package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/testenv"
)

const subscribers = `Circuit ID,Circuit Name,Device ID,Device Name,Parent Node,MAC,IPv4,IPv6,Download Min Mbps,Upload Min Mbps,Download Max Mbps,Upload Max Mbps,Comment
C1,"Bakery, Mill Lane 3",D1,Router,,,198.51.100.1,,,,50.5,10,
`

const leftover = `C2,Farm,D2,Barn,Mast,,198.51.100.2,2001:db8:2::/56,1,1,2.5,0,
C3,Mill,D3,Mill,Mast,,198.51.100.3,,1,1,50.5,10,
`

// A desk is where files are imported: no device is needed, and nobody is root.
type desk struct {
	rig
	in string
}

func (d *desk) file(name, text string) string {
	d.t.Helper()
	path := filepath.Join(d.t.TempDir(), name)
	testenv.Must(d.t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// run runs a command line, with a standard input.
func (d *desk) run(args ...string) result {
	var out, err bytes.Buffer
	e := &env{in: strings.NewReader(d.in), out: &out, err: &err, getenv: func(string) string { return "" }}
	code := e.run(args)
	return result{out.String(), err.String(), code}
}

// What import prints, as a manual would show it.
func TestImportTranscript(t *testing.T) {
	d := &desk{rig: rig{t: t}}
	var s strings.Builder
	for _, step := range []struct{ in, line string }{
		{subscribers, "import libreqos - --device eth1"},
		{subscribers + leftover, "import libreqos - --device eth1 --upload eth0"},
		{subscribers + leftover, "import libreqos - --device eth1 --upload eth0 --network testdata/import-network.json"},
		{subscribers + leftover, "import libreqos - --device eth1 --network testdata/import-network.json -j"},
		{strings.SplitAfter(subscribers, "\n")[0], "import libreqos - --device eth1"},
		{strings.Replace(subscribers, "50.5", "fast", 1) + strings.Replace(leftover, "198.51.100.2", "198.51.100", 1), "import libreqos - --device eth1"},
		{strings.Replace(subscribers, "50.5", "fast", 1) + leftover, "import libreqos - --device eth1 --share none --protect Farm --skip-bad"},
		{"Name,IP,Down,Up,Quota\nFarm,198.51.100.1,50,10,100GB\nMill,198.51.100.2,50,x,\n", "import csv - --device eth1 --then 5mbit --skip-bad"},
		{`{"nftables": []}`, "import nft -"},
		{"table inet filter {\n}\n", "import nft -"},
	} {
		d.in = step.in
		got := d.run(strings.Fields(step.line)...)
		fmt.Fprintf(&s, "$ shapectl %s\n%s", step.line, got.out)
		for line := range strings.Lines(got.err) {
			s.WriteString("2> " + line)
		}
		if got.code != 0 {
			fmt.Fprintf(&s, "exit %d\n", got.code)
		}
	}
	golden(t, "import.golden", s.String())
}

// The tree of nodes beside a file is found, and one that is named wins.
func TestImportFindsNetwork(t *testing.T) {
	d := &desk{rig: rig{t: t}}
	csv := d.file("ShapedDevices.csv", strings.ReplaceAll(subscribers+leftover, ",0,\n", ",1,\n"))
	beside := filepath.Join(filepath.Dir(csv), "network.json")
	if got := d.run("import", "libreqos", csv, "--device", "eth1"); got.code != exitDegraded || !strings.Contains(got.err, "unknown parent node, 2 times, such as line 3") {
		t.Errorf("without it: exit %d: %s", got.code, got.err)
	}
	testenv.Must(t, os.WriteFile(beside, []byte(`{"Mast": {"downloadBandwidthMbps": 20, "uploadBandwidthMbps": 10}}`), 0o600))
	got := d.run("import", "libreqos", csv, "--device", "eth1")
	if got.code != exitDone || !strings.Contains(got.out, "  Mast down: {rate: 20mbit, share: member}\n") || !strings.Contains(got.err, "note: the tree of nodes is that of "+beside) {
		t.Errorf("beside: exit %d: %s%s", got.code, got.out, got.err)
	}
	other := d.file("tree", `{"Mast": {"downloadBandwidthMbps": 30, "uploadBandwidthMbps": 10}}`)
	got = d.run("import", "libreqos", csv, "--device", "eth1", "--network", other)
	if got.code != exitDone || !strings.Contains(got.out, "  Mast down: {rate: 30mbit, share: member}\n") || strings.Contains(got.err, beside) {
		t.Errorf("named: exit %d: %s%s", got.code, got.out, got.err)
	}
	testenv.Must(t, os.WriteFile(beside, []byte("{"), 0o600))
	if got := d.run("import", "libreqos", csv, "--device", "eth1"); got.code != exitInput || got.out != "" || !strings.Contains(got.err, beside+":1:1: the text ends") {
		t.Errorf("cut off: exit %d: %s%s", got.code, got.out, got.err)
	}
	d.in = subscribers
	t.Chdir(filepath.Dir(csv))
	if got := d.run("import", "libreqos", "-", "--device", "eth1"); got.code != exitDone {
		t.Errorf("for standard input: exit %d: %s", got.code, got.err)
	}
}

// All was carried over, or not: the exit code says which, and the policy reads back in either case.
func TestImportIsAPolicy(t *testing.T) {
	d := &desk{rig: rig{t: t}}
	for name, test := range map[string]struct {
		text string
		code int
	}{
		"all":      {subscribers, exitDone},
		"not all":  {subscribers + leftover, exitDegraded},
		"a marked": {"\ufeff" + subscribers, exitDone},
	} {
		t.Run(name, func(t *testing.T) {
			got := d.run("import", "libreqos", d.file("ShapedDevices.csv", test.text), "--device", "eth1")
			if got.code != test.code {
				t.Fatalf("exit %d, not %d: %s", got.code, test.code, got.err)
			}
			if _, err := policyfile.Parse("policy", []byte(got.out)); err != nil {
				t.Errorf("%v: %s", err, got.out)
			}
			for line := range strings.Lines(got.err) {
				if strings.HasPrefix(line, "shapectl: ") {
					t.Errorf("an error: %s", line)
				}
			}
			var object struct {
				Policy    string
				Sentences []string
				Left      []map[string]string `json:"not_carried_over"`
				Notes     []string
			}
			asJSON := d.run("import", "libreqos", d.file("ShapedDevices.csv", test.text), "--device", "eth1", "-j")
			if err := json.Unmarshal([]byte(asJSON.out), &object); err != nil {
				t.Fatalf("%v: %s", err, asJSON.out)
			}
			if asJSON.code != test.code || asJSON.err != "" {
				t.Errorf("with -j: exit %d, %s", asJSON.code, asJSON.err)
			}
			if (len(object.Left) > 0) != (test.code == exitDegraded) || object.Sentences == nil || object.Left == nil {
				t.Errorf("sentences %q, left %v", object.Sentences, object.Left)
			}
			body := func(policy string) string { return policy[strings.Index(policy, "\ndevices:"):] }
			if body(object.Policy) != body(got.out) {
				t.Errorf("the policies differ:\n%s\n%s", object.Policy, got.out)
			}
		})
	}
}

// Bad usage and input is refused, and nothing is printed but why.
func TestImportRefuses(t *testing.T) {
	d := &desk{rig: rig{t: t}, in: subscribers}
	for _, test := range []struct{ args, says string }{
		{"import", "libreqos|tc|nft"},
		{"import wondershaper", "'shapectl import --help' lists"},
		{"import libreqos", "takes"},
		{"import libreqos - -", "takes"},
		{"import libreqos -", "--device is missing"},
		{"import libreqos - --device eth1 --upload eth1", "the same device"},
		{"import libreqos - --device eth1 --upload=", "is empty; give it a value"},
		{"import libreqos - --device eth1 --network=", "--network is empty"},
		{"import libreqos - --device eth1 --network -", "needs a file of its own"},
		{"import libreqos - --device eth1 --network /nonexistent", "/nonexistent"},
		{"import libreqos - --device eth1 --share member", "use flow, host or none"},
		{"import libreqos - --device eth1 --protect [", "malformed pattern"},
		{"import libreqos - --device eth1 -n blue", "-n has no meaning here"},
		{"import libreqos - --device eth1 --frobnicate", "frobnicate"},
		{"import libreqos /nonexistent --device eth1", "/nonexistent"},
		{"import libreqos / --device eth1", "is a directory"},
		{"import nft", "takes"},
		{"import nft - --device=", "is empty; give it a value"},
		{"import nft - -n blue", "-n has no meaning here"},
		{"import tc", "takes"},
		{"import tc nosuch0", "no device nosuch0"},
		{"import tc lo lo", "appears twice"},
		{"import tc lo -n nosuch-namespace", "nosuch-namespace"},
	} {
		d.isRefusal(test.args, d.run(strings.Fields(test.args)...), exitInput, test.says)
	}
}

// A policy that can not be written to the end is not taken for a whole one.
func TestImportThatIsCutOff(t *testing.T) {
	var errs bytes.Buffer
	e := &env{in: strings.NewReader(subscribers), out: closedPipe{}, err: &errs, getenv: func(string) string { return "" }}
	if code := e.run([]string{"import", "libreqos", "-", "--device", "eth1"}); code != exitDegraded || !strings.Contains(errs.String(), "could not be written") {
		t.Errorf("exit %d: %s", code, &errs)
	}
}

type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) { return 0, errors.New("broken pipe") }

// A device without limits of its own makes an empty policy, here and in a named namespace.
func TestImportTCOfNothing(t *testing.T) {
	r := newRig(t)
	name, ns := testenv.NewNamedNetns(t)
	testenv.Must(t, ns.Do(func() error { testenv.Veth(t, "there", "peer"); return nil }))
	for _, args := range [][]string{{"import", "tc", "va", "vb"}, {"import", "tc", "there", "-n", name}} {
		got := r.run(args...)
		if got.code != exitDone || !strings.Contains(got.out, "devices: {}\n") || got.err != "no rules; nothing was left out\n" {
			t.Errorf("%v: exit %d: %s%s", args, got.code, got.out, got.err)
		}
	}
	r.refused(exitInput, "no device va", "import", "tc", "va", "-n", name)
}

// What was imported is applied as it is, and then nothing differs from it.
func TestImportApplies(t *testing.T) {
	r := newRig(t)
	csv := filepath.Join(t.TempDir(), "ShapedDevices.csv")
	testenv.Must(t, os.WriteFile(csv, []byte(subscribers+leftover), 0o600))
	got := r.run("import", "libreqos", csv, "--device", "va", "--upload", "vb", "--network", "testdata/import-network.json")
	if got.code != exitDegraded {
		t.Fatalf("exit %d: %s", got.code, got.err)
	}
	file := filepath.Join(t.TempDir(), "policy.yaml")
	testenv.Must(t, os.WriteFile(file, []byte(got.out), 0o600))
	r.ok("apply", file)
	r.ok("diff", file)
	all := r.show()
	pools := slices.IndexFunc(all, func(s shownRule) bool { return s.Device != "" }) // they come first
	if rules := all[max(pools, 0):]; pools != 5 || len(rules) != 6 || rules[0].CIDR != "198.51.100.1/32" || rules[0].Rate != 50_500_000 {
		t.Errorf("%d pools, rules: %+v", pools, rules)
	}
}

// Rules of shapectl's own are no limits of another tool's.
func TestImportTCBesideRules(t *testing.T) {
	for _, hook := range []string{"tcx", "clsact"} {
		r := newRig(t)
		r.env["SHAPECTL_HOOK"] = hook
		r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
		if got := r.run("import", "tc", "va"); got.code != exitDone || !strings.Contains(got.out, "devices: {}\n") {
			t.Errorf("%s: exit %d: %s%s", hook, got.code, got.out, got.err)
		}
		r.ok("flush", "va")
	}
}
