package policyfile

import (
	"bytes"
	"reflect"
	"testing"
)

const small = `# a comment
defaults:
  each: host
plans:
  gold: {rate: 100mbit, capacity: 100ms}
  silver: {rate: 50mbit, shadow: {rate: 40mbit}}
devices:
  tap*:
    egress:
      10.0.0.0/24: 10mbit
      10.0.0.9: unlimited
      10.0.1.7: gold
      2001:db8::/32: {plan: gold, each: /64, excess: ecn}
    ingress:
      match: dst
      0.0.0.0/0: {rate: 1gbit, shadow: {rate: 500mbit, each: host}, overhead: ethernet}
      ::/0: silver
`

// TestWrite writes what a file says of two devices, and reads that again.
func TestWrite(t *testing.T) {
	f, err := Parse("p.yaml", []byte(small))
	if err != nil {
		t.Fatal(err)
	}
	devices := []Device{{"tap0", 14}, {"wg0", 0}}
	tables, absent, err := f.Tables(devices)
	if err != nil || len(absent) != 0 {
		t.Fatal(absent, err)
	}
	var out bytes.Buffer
	if err := Write(&out, tables, nil); err != nil {
		t.Fatal(err)
	}
	want := `devices:
  tap0:
    egress:
      10.0.0.0/24: {rate: 10mbit, each: host}
      10.0.0.9: unlimited
      10.0.1.7: {rate: 100mbit, capacity: 1250000b, each: host}
      2001:db8::/32: {rate: 100mbit, capacity: 1250000b, each: /64, excess: ecn}
    ingress:
      match: dst
      0.0.0.0/0: {rate: 1gbit, each: host, overhead: 24, mpu: 84, shadow: {rate: 500mbit, each: host}}
      ::/0: {rate: 50mbit, each: host, shadow: {rate: 40mbit}}
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
	again, err := Parse("again.yaml", out.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if same, _, err := again.Tables(devices); err != nil || !reflect.DeepEqual(same, tables) {
		t.Errorf("got %v, %v", same, err)
	}
}
