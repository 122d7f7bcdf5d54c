package policyfile

import (
	"fmt"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
)

const (
	ofISP = `plans: {gold: 50mbit}
pools:
  Hill: 1gbit
  7 down: {rate: 20mbit, within: Hill}
devices:
  eth1:
    egress:
      10.0.0.7: {within: 7 down, name: "#7: Inn"}
      10.0.0.8: gold
      10.0.0.9: gold
`
	own = `include: [isp.yaml, more.yaml]
defaults: {excess: ecn}
pools:
  uplink: {rate: 10gbit, share: member}
  Hill: {within: uplink}
  Hil: 1mbit
devices:
  eth1:
    egress:
      10.0.0.8/32: {shadow: 10mbit, name: mine}
      10.0.0.9: {shadow: 10mbit, cir: 5mbit}
      10.0.0.0/8: 1mbit
  eth2:
    ingress:
      0.0.0.0/0: {note: all}
`
	more = "---\ndevices:\n  eth2: {ingress: {any: 3mbit}}\n  eth1: {egress: {10.0.0.7: {note: late}}}\n"
)

// parts reads included files from memory.
func parts(files map[string]string) func(string) ([]byte, error) {
	return func(name string) ([]byte, error) {
		if text, ok := files[name]; ok {
			return []byte(text), nil
		}
		return nil, fmt.Errorf("no file %s", name)
	}
}

// A policy is merged with the files that it includes, and wins over them. Its text then has all of them.
func TestInclude(t *testing.T) {
	text, err := Include("/etc/p/own.yaml", []byte(own), parts(map[string]string{"/etc/p/isp.yaml": "\uFEFF" + ofISP, "/etc/p/more.yaml": more}))
	testenv.Must(t, err)
	again, err := Include("elsewhere", text, nil)
	if err != nil || string(again) != string(text) {
		t.Errorf("included again: %v, %s", err, again)
	}
	f, err := Parse("own.yaml", text)
	testenv.Must(t, err)
	if got := f.Warnings().Error(); got != `own.yaml:6:3: nothing is within pool Hil, also in the files that are included; correct the name, or remove it` {
		t.Error(got)
	}
	tables, _, err := f.Tables([]Device{{Name: "eth1"}, {Name: "eth2"}})
	testenv.Must(t, err)
	var got strings.Builder
	testenv.Must(t, Write(&got, tables))
	const want = `plans:
  gold: {rate: 50mbit, excess: ecn, shadow: {rate: 10mbit}}
pools:
  7 down: {rate: 20mbit, excess: ecn, within: Hill}
  Hil: {rate: 1mbit, excess: ecn}
  Hill: {rate: 1gbit, excess: ecn, within: uplink}
  uplink: {rate: 10gbit, excess: ecn, share: member}
devices:
  eth1:
    egress:
      10.0.0.0/8: {rate: 1mbit, excess: ecn}
      10.0.0.7: {within: 7 down, name: "#7: Inn", note: late}
      10.0.0.8: {plan: gold, name: mine}
      10.0.0.9: {plan: gold, rate: 5mbit}
  eth2:
    ingress:
      0.0.0.0/0: {rate: 3mbit, excess: ecn, note: all}
      ::/0: {rate: 3mbit, excess: ecn}
`
	if got.String() != want {
		t.Errorf("merged:\n%s\nnot\n%s", got.String(), want)
	}
}

// Errors name the file, and for a conflict both places.
func TestIncludeRefuses(t *testing.T) {
	for _, test := range []struct {
		main string
		more map[string]string
		want string
	}{
		{"include: isp.yaml\n", nil, "p/own.yaml:1:1: include is not a list of files; write it such as include: [isp.yaml]"},
		{"# mine\ninclude:\n- isp.yaml\n", nil, "p/own.yaml:3:3: include p/isp.yaml: no file p/isp.yaml"},
		{"include: [a]\n", map[string]string{"p/a": "include: [b]\n"}, "p/own.yaml:1:11: include p/a: it includes files itself; include them here instead"},
		{" include: [a]\n", nil, "p/own.yaml:1:2: this includes no file; write it at the start of a line, such as include: [isp.yaml]"},
		{"include: [a]\n", map[string]string{"p/a": "# nothing\n"}, "p/own.yaml:1:1: devices is missing; write devices: {} for a policy without rules"},
		{"include: [a]\n", map[string]string{"p/a": "\ndevices: []\n"}, "p/a:2:10: devices cannot be a list; write it like eth0: {egress: {10.0.0.0/24: 10mbit}}"},
		{"include: [a]\n", map[string]string{"p/a": "devices:\n  eth0: {egress: {10.0.0.7: {rate 5mbit}}}\n"}, "p/a:2:"},
		{"include: [a]\n", map[string]string{"p/a": "- devices\n"}, "p/a:1:1: this is not a mapping such as devices:"},
		{"include: [a]\ndevices: {}\n", map[string]string{"p/a": "devices:\n\teth0: {}\n"}, "p/a:2:1: a tab indents this line; use spaces"},
		{"include: [a, b]\n", map[string]string{"p/a": "pools: {x: {rate: 1mbit}}\ndevices: {}\n", "p/b": "pools:\n  x: {rate: 2mbit}\n"},
			"p/b:2:7: rate is also in line 1 of p/a, with another value; remove one of them"},
		{"include: [a, b]\n", map[string]string{"p/a": "devices:\n  eth0: {egress: {10.0.0.7/32: 2mbit}}\n", "p/b": "devices: {eth0: {egress: {10.0.0.7: {cir: 3mbit}}}}\n"},
			"p/b:1:38: cir is also in line 2 of p/a, with another value; remove one of them"},
		{"include: [a, b]\n", map[string]string{"p/a": "devices: {eth0: {egress: {any: 2mbit}}}\n", "p/b": "devices: {eth0: {egress: {'::/0': 3mbit}}}\n"},
			"p/b:1:27: ::/0 is also in line 1 of p/a, with another value; remove one of them"},
		{"include: [a]\n", map[string]string{"p/a": "devices: {}\n---\ndevices: {}\n"}, "p/a:2:1: a second document begins here"},
	} {
		text, err := Include("p/own.yaml", []byte(test.main), parts(test.more))
		if err == nil {
			_, err = Parse("p/own.yaml", text)
		}
		if err == nil || !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%q: %v, not %s", test.main, err, test.want)
		}
	}
}
