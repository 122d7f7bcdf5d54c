package importer

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// TestNetworkTree reads trees, and finds the pools above a circuit.
func TestNetworkTree(t *testing.T) {
	const rates = `"downloadBandwidthMbps": 9, "uploadBandwidthMbps": 9`
	for _, test := range []struct {
		name, network, parent, id string
		want                      string // pools of downloads, from below
		left                      []reason
	}{
		{"flat", `{}`, "Mast", "", "", nil},
		{"one node", `{"Mast": {` + rates + `}}`, "Mast", "", "Mast down", nil},
		{"a byte order mark", byteOrderMark + `{"Mast": {` + rates + `}}`, "Mast", "", "Mast down", nil},
		{"no parent", `{"Mast": {` + rates + `}}`, "none", "", "", nil},
		{"another parent", `{"Mast": {` + rates + `}}`, "Tower", "", "", []reason{unknownNode}},
		{"an ID", `{"Mast": {"id": "M1", ` + rates + `}}`, "", "M1", "Mast down", nil},
		{"a name before an ID", `{"Mast": {"id": "M1", ` + rates + `}, "Tower": {"id": "T1", ` + rates + `}}`, "Tower", "M1", "Tower down", nil},
		{"an ID of a lost name", `{"Mast": {"id": "M1", ` + rates + `}}`, "Tower", "M1", "Mast down", nil},
		{"children first", `{"Site": {"children": {"Mast": {` + rates + `}}, ` + rates + `}}`, "Mast", "", "Mast down, Site down", nil},
		{"virtual", `{"Site": {` + rates + `, "children": {"Town": {"virtual": true, ` + rates + `, "children": {"Mast": {` + rates + `}}}}}}`,
			"Mast", "", "Mast down, Site down", nil},
		{"below a virtual node", `{"Site": {` + rates + `, "children": {"Town": {"type": "Virtual", ` + rates + `}}}}`, "Town", "", "Site down", nil},
		{"no rate", `{"Site": {` + rates + `, "children": {"Mast": {"downloadBandwidthMbps": null, "uploadBandwidthMbps": 9}}}}`,
			"Mast", "", "Site down", nil},
		{"a rate of 0", `{"Mast": {"downloadBandwidthMbps": 0, "uploadBandwidthMbps": 9}}`, "Mast", "", "", []reason{zeroRate}},
		{"a rate of 2 tbit", `{"Mast": {"downloadBandwidthMbps": 2000000, "uploadBandwidthMbps": 9}}`, "Mast", "", "", []reason{outside}},
		{"rates as texts", `{"Mast": {"downloadBandwidthMbps": "9", "uploadBandwidthMbps": "9.5"}}`, "Mast", "", "Mast down", nil},
		{"no nodes", `{"note": "by hand", "Mast": {` + rates + `, "children": []}}`, "Mast", "", "Mast down", nil},
		{"spaces", `{" Big  Mast ": {` + rates + `}}`, "Big Mast", "", "Big Mast down", nil},
		{"as deep as can be", deep(policy.MaxDepth - 1), "n1", "", strings.Repeat(", n down", policy.MaxDepth-1)[2:], nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			csv := strings.Replace(oldHeader, "Parent Node", "Parent Node,Parent Node ID", 1) +
				fmt.Sprintf("1,Smith,1,,%s,%s,,\"10.0.0.1, 10.0.0.2\",,,,1,1,\n", test.parent, test.id)
			i, err := LibreQoS(File{"f", strings.NewReader(csv)}, File{"n", strings.NewReader(test.network)}, LibreQoSOptions{Device: "eth1"})
			testenv.Must(t, err)
			testenv.Must(t, policy.CheckPools(i.Tables))
			var left []reason
			for _, l := range i.Left {
				left = append(left, l.reason)
			}
			if !slices.Equal(left, test.left) {
				t.Errorf("left: %+v", i.Left)
			}
			tree := policy.NewTree(i.Tables)
			var chain []string
			for n := tree.Find("1 down").Above; n != nil; n = n.Above {
				chain = append(chain, strings.TrimRight(strings.Replace(n.Pool.Label.Name, " down", "", 1), "123456789 0")+" down")
			}
			if got := strings.Join(chain, ", "); got != test.want {
				t.Errorf("within %s, not %s", got, test.want)
			}
		})
	}
}

// deep returns a chain of nodes, of which n1 is the last.
func deep(n int) string {
	text := "{}"
	for i := range n {
		text = fmt.Sprintf(`{"n%d": {"downloadBandwidthMbps": 9, "children": %s}}`, i+1, text)
	}
	return text
}

// TestNetworkRefuses checks that mistakes are reported by node, or by line and column.
func TestNetworkRefuses(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"nothing", "", "n:1:1: the text ends within an object"},
		{"a list", "\n []", "n is not an object of nodes"},
		{"a table", "Circuit ID,IPv4\n", "n:1:1: this is not JSON"},
		{"cut off", "{\"Mast\": {\n", "n:2:1: the text ends within an object"},
		{"cut off in a name", "{\"Mas", "n:1:5: the text ends within an object"},
		{"cut off behind a name", "{\"Mast\"", "n:1:7: the text ends within an object"},
		{"a comma", "{\n\"Mast\": {\"type\": \"AP\",}}", "n:2:23: this is not JSON"},
		{"more", "{}\n{}", "n:2:1: something follows the object"},
		{"a name twice", "{\"Mast\": {},\n \"Site\": {\"children\": {\"Mast\": {}}}}", "n: node \"Mast\" appears twice"},
		{"no name", "{\" \": {}}", "n: node \"\" needs a name"},
		{"no number", "{\"Mast\": {\"downloadBandwidthMbps\": \"fast\"}}", "n: node \"Mast\" has a downloadBandwidthMbps of \"fast\""},
		{"a negative number", "{\"Mast\": {\"uploadBandwidthMbps\": -1}}", "n: node \"Mast\" has a uploadBandwidthMbps of \"-1\""},
		{"an object as a number", "{\"Mast\": {\"uploadBandwidthMbps\": {}}}", "n: node \"Mast\" has a uploadBandwidthMbps of \"map[]\""},
		{"too deep", deep(policy.MaxDepth), "node \"n1\" is below 15 nodes with rates, and at most 15 can be above a subscriber"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := LibreQoS(File{"f", strings.NewReader(oldHeader + row("10.0.0.1", "1", "1"))}, File{"n", strings.NewReader(test.text)}, LibreQoSOptions{Device: "eth1"})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, not %s", err, test.want)
			}
		})
	}
}
