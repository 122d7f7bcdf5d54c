package policyfile

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// million returns a policy of a million rules for networks of mixed lengths, in braces or
// in lines. If the value has a name, every tenth rule has its own name, and the others
// have none.
func million(braces bool, value string) []byte {
	var text bytes.Buffer
	pools := ""
	for i := range 100 {
		pools += fmt.Sprintf("  ap-%d: {rate: 1gbit, share: member}\n", 1+i)
	}
	begin, between, end := "plans: {gold: 1mbit}\npools:\n"+pools+"devices:\n  eth0:\n    egress:\n      ", "\n      ", "\n"
	if braces {
		begin, between, end = "{plans: {gold: 1mbit}, devices: {eth0: {egress: {", ", ", "}}}}"
	}
	text.WriteString(begin)
	for i := range 1_000_000 {
		network := fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)
		switch {
		case i%4 == 0:
			network = fmt.Sprintf("2001:db8:%x:%x::/64", i>>16, i&0xffff)
		case i%256 == 1:
			network = fmt.Sprintf("10.%d.%d.0/24", i>>16, i>>8&255)
		}
		if i > 0 {
			text.WriteString(between)
		}
		rule := fmt.Sprintf(value, 1+i%100)
		if before, after, named := strings.Cut(rule, "NAME"); named {
			rule = "gold"
			if i%10 == 0 {
				rule = fmt.Sprintf("%sMüller & Co %d%s", before, i, after)
			}
		}
		text.WriteString(network + ": " + rule)
	}
	text.WriteString(end)
	return text.Bytes()
}

var values = []struct {
	name   string
	braces bool
	text   string
}{
	{"short", false, "%dmbit"},
	{"comments", false, "%dmbit  # customer"},
	{"parts", false, "{rate: %dmbit, each: host, capacity: 64kb}"},
	{"names", false, `{plan: gold, rate: %dmbit, name: "NAME"}`},
	{"line", true, "%dmbit"}, // all of it in one
	{"pools", false, "{within: ap-%d}"},
}

func BenchmarkMillion(b *testing.B) {
	device := Device{Name: "eth0", L2Bytes: 14}
	for _, value := range values {
		text := million(value.braces, value.text)
		var f *File
		b.Run("Parse/"+value.name, func(b *testing.B) {
			for b.Loop() {
				var err error
				if f, err = Parse("million.yaml", text); err != nil {
					b.Fatal(err)
				}
			}
		})
		var tables []policy.Table
		b.Run("Tables/"+value.name, func(b *testing.B) {
			for b.Loop() {
				var err error
				if tables, _, err = f.Tables([]Device{device}); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("Write/"+value.name, func(b *testing.B) {
			for b.Loop() {
				if err := Write(io.Discard, tables); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
