package policyfile

import (
	"bytes"
	"fmt"
	"io"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// million is a policy of a million rules for networks of mixed lengths, each of
// which says what value says.
func million(value string) []byte {
	var text bytes.Buffer
	text.WriteString("devices:\n  eth0:\n    egress:\n")
	for i := range 1_000_000 {
		network := fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)
		switch {
		case i%4 == 0:
			network = fmt.Sprintf("2001:db8:%x:%x::/64", i>>16, i&0xffff)
		case i%256 == 1:
			network = fmt.Sprintf("10.%d.%d.0/24", i>>16, i>>8&255)
		}
		fmt.Fprintf(&text, "      %s: "+value+"\n", network, 1+i%100)
	}
	return text.Bytes()
}

var values = []struct{ name, text string }{
	{"short", "%dmbit"},
	{"comments", "%dmbit  # customer"},
	{"parts", "{rate: %dmbit, each: host, capacity: 64kb}"},
}

func BenchmarkMillion(b *testing.B) {
	device := Device{"eth0", 14}
	for _, value := range values {
		text := million(value.text)
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
				if err := Write(io.Discard, tables, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("Merge/"+value.name, func(b *testing.B) {
			for b.Loop() {
				rules := tables[0].Rules
				for i := range rules {
					if i%10 == 0 {
						rules[i].Rate, rules[i].Capacity = 1234, 123456
					}
				}
				if err := Merge(io.Discard, f, []Device{device}, tables); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
