package report

import (
	"bytes"
	"encoding/json"
	"testing"
)

// TestJSONOfLists writes lists of any length as the standard library would.
func TestJSONOfLists(t *testing.T) {
	rate := uint64(1e6)
	rule := Rule{Device: "eth0", CIDR: "10.0.0.0/24", RateBits: &rate, Sentence: "<a> & b", Buckets: []Bucket{{"10.0.0.1", 7}, {"10.0.0.2", 8}}}
	for _, v := range []any{
		[]Rule{}, []Rule{rule}, []Rule{rule, {}, rule}, []any{1, "two", nil, []int{}}, Differences{{CIDR: "::/0"}}, rule, nil,
	} {
		var got, want bytes.Buffer
		e := json.NewEncoder(&want)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		if err := e.Encode(v); err != nil {
			t.Fatal(err)
		}
		if err := JSON(&got, v); err != nil || got.String() != want.String() {
			t.Errorf("JSON of %T: %v, got\n%swant\n%s", v, err, got.String(), want.String())
		}
	}
}
