package inforce

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
)

func parse(t *testing.T, text string) lastgood.Policy {
	t.Helper()
	f, err := policyfile.Parse("/etc/p", []byte(text))
	testenv.Must(t, err)
	return lastgood.Policy{File: f, Path: "/etc/p", Text: []byte(text)}
}

// A record has the text as it was, and a path that is good anywhere.
func TestPack(t *testing.T) {
	p := parse(t, "devices: {va: {egress: {any: 1mbit}}}")
	here, err := filepath.Abs("p")
	testenv.Must(t, err)
	for path, want := range map[string]string{"p": here, "/etc/p": "/etc/p", "-": "-"} {
		got, text, err := Pack(p.File, path, []byte("a\x00b")).Unpack()
		if err != nil || got != want || string(text) != "a\x00b" {
			t.Errorf("%s became %q with %q: %v", path, got, text, err)
		}
	}
	if packed := Pack(parse(t, "devices: {}").File, "p", nil); len(packed) > 0 {
		t.Errorf("a policy without devices became %q", packed)
	}
	mine := lastgood.Policy{File: &policyfile.File{}, Text: []byte("devices: {}")}
	for text, own := range map[string]bool{"devices: {}": true, "unreadable": true, "devices: {vb: {egress: {any: 1mbit}}}": false} {
		packed := Pack(p.File, "q", []byte(text))
		recent.policies = nil // the text is not that of the file
		if got := Parsed(packed, mine); (got.File == mine.File) != own || !own && !got.Names("vb") {
			t.Errorf("%s became %+v", text, got)
		}
	}
}

// A device that appears gets the policy of whoever gives it rules, unless a change to that is pending or has reverted.
func TestPhases(t *testing.T) {
	m, o := []byte("m"), []byte("o")
	policies := map[string]lastgood.Policy{"m": {File: &policyfile.File{}, Path: "m"}, "o": {File: &policyfile.File{}, Path: "o"}, "": {Path: "?"}}
	for _, c := range []struct {
		last loader.Policies
		want string
	}{
		{loader.Policies{}, "m m"},
		{loader.Policies{Now: o, Reverted: o}, "m m"},
		{loader.Policies{Now: m, Reverted: o}, "m o"},
		{loader.Policies{Now: m}, "m "},
		{loader.Policies{Now: o, Reverted: m}, "o m"},
		{loader.Policies{Now: o}, "m m"},
		{loader.Policies{Now: m, Reverted: o, Lasts: true}, "m o"},
		{loader.Policies{Now: o, Reverted: m, Lasts: true}, "m m"},
		{loader.Policies{Now: o, Reverted: o, Undone: m}, "o o"},
		{loader.Policies{Undone: m}, " "},
		{loader.Policies{Now: m, Reverted: m, Undone: o}, "m m"},
	} {
		now, reverted := phases(c.last, policies["m"], func(p Packed) lastgood.Policy { return policies[string(p)] })
		if got := now.Path + " " + reverted.Path; got != c.want {
			t.Errorf("%+v: %q, not %q", c.last, got, c.want)
		}
	}
}

// Rules that the policy in force has are missing, or not in force. A device that several patterns match has none.
func TestLacks(t *testing.T) {
	testenv.NewNetns(t)
	testenv.Veth(t, "va", "both")
	p := parse(t, "devices: {va: {egress: {10.0.0.0/24: 1mbit, 10.0.1.0/24: 1mbit}, ingress: {10.0.2.0/24: 1mbit}}, lo: {egress: {10.0.3.0/24: 1mbit}}, 'b*': {egress: {any: 1mbit}}, '*h': {egress: {any: 1mbit}}}")
	tables, err := p.For(policyfile.Device{Name: "va"})
	testenv.Must(t, err)
	one := tables[0]
	one.Rules = one.Rules[:1]
	n, err := loader.Write(loader.Options{BPFFS: testenv.BPFFS(t), Mode: loader.Clsact})
	testenv.Must(t, err)
	defer n.Close()
	_, err = n.Put(loader.ApplyOptions{}, one, tables[1])
	testenv.Must(t, err)
	lacks := func(want string) {
		t.Helper()
		if lacks, _, err := Lacks(n, lastgood.Policy{}); err != nil || fmt.Sprint(lacks) != want {
			t.Errorf("%v, not %s: %v", lacks, want, err)
		}
	}
	lacks("[]")
	packed := Pack(p.File, p.Path, p.Text)
	testenv.Must(t, n.KeepPolicy(packed))
	if again, err := slices.Clone(packed).Parse(); err != nil || again.File != p.File {
		t.Errorf("the policy was parsed again: %v", err)
	}
	lacks("[{lo egress [10.0.3.0/24] 1 false} {va egress [10.0.1.0/24] 2 false}]")
	lacks("[{lo egress [10.0.3.0/24] 1 false} {va egress [10.0.1.0/24] 2 false}]")
	filters, err := netlink.FilterList(testenv.Link(t, "va"), netlink.HANDLE_MIN_EGRESS)
	testenv.Must(t, err)
	testenv.Must(t, netlink.FilterDel(filters[0]))
	testenv.Must(t, n.KeepPolicy(nil))
	lacks("[{va egress [10.0.0.0/24] 1 true}]")
}
