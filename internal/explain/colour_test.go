package explain

import (
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/policy"
)

// meter is a rule of 1 kbyte/s with a CBS of 5000 bytes, and a second limit of 2 kbyte/s with 4000 bytes; with srtcm only
// the bytes.
func meter(kind policy.Algorithm, aware bool) policy.Rule {
	r := limited(policy.Egress).Rule.Rule
	r.Rate, r.Algorithm = 8e3, kind
	r.Colours = policy.Colours{Aware: aware, Green: policy.ActionPass, Yellow: policy.SetDSCP(12), Red: policy.ActionDrop}
	switch kind {
	case policy.TRTCM:
		r.Colours.PIR, r.Colours.PBS = 16e3, 4000
	case policy.RFC4115:
		r.Colours.EIR = 16e3
		fallthrough
	default:
		r.Colours.EBS = 4000
	}
	if aware {
		r.Colours.In = policy.DefaultColours
	}
	return r
}

// The verdict says which bucket decided, what happens, and when a packet would have a better colour.
func TestJudgeColours(t *testing.T) {
	const af12, af13 = 12, 14
	srtcm, trtcm, rfc4115 := policy.SRTCM, policy.TRTCM, policy.RFC4115
	for _, test := range []struct {
		name          string
		kind          policy.Algorithm
		aware         bool
		dscp          uint8
		first, second uint64 // bytes
		bytes         uint64
		verdict       string
		says          string
	}{
		{"green", srtcm, false, af12, 1000, 1000, 1000, "pass",
			"a packet of 1000 bytes is green, and passes; room for 4 such packets"},
		{"yellow", srtcm, false, 0, 4500, 5500, 1000, "pass",
			"is yellow, and gets AF12, and passes; it would be green in 500ms, if no others come"},
		{"red", srtcm, false, 0, 5000, 8500, 1000, "drop",
			"is red, and is dropped; it would be green in 1s, if no others come"},
		{"yellow first", rfc4115, false, 0, 5000, 3500, 1000, "drop",
			"is dropped; it would be green in 1s, if no others come"},
		{"larger than CBS", rfc4115, false, 0, 0, 0, 6000, "drop",
			"is red, and is dropped; it would never be green"},
		{"larger than PBS", trtcm, false, 0, 0, 0, 4500, "drop",
			"is red, and is dropped; it would never be green"},
		{"beyond the PIR", trtcm, false, 0, 0, 3500, 1000, "drop",
			"is red, and is dropped; it would be green in 250ms, if no others come"},
		{"within the PIR", trtcm, false, 0, 0, 3000, 1000, "pass", "P 3000 of 4000 bytes (75% full); empty in 1.5s if no more come"},
		{"comes in yellow", trtcm, true, af12, 0, 0, 1000, "pass",
			"a packet of 1000 bytes that comes in yellow (AF12) stays yellow, and gets AF12, and passes; it would never be green"},
		{"comes in red", srtcm, true, af13, 0, 0, 1000, "drop",
			"stays red, and is dropped; it would never be green"},
		{"comes in green", srtcm, true, 10, 0, 0, 1000, "pass", "that comes in green (AF11) is green, and passes; room for 5 such packets"},
	} {
		s := limited(policy.Egress)
		s.Frame, s.Rule.Rule = test.bytes, meter(test.kind, test.aware)
		s.Rule.Bucket = &Bucket{"10.0.0.7", model.State{Level: test.first << model.UnitBits, Second: test.second << model.UnitBits}}
		p := Packets{Dst: far, DSCP: test.dscp}
		stop := judgeStop(&p, s)
		var text strings.Builder
		if err := (report.Paths{{Answer: stop.Answer, Packets: "p", Hooks: []report.Stop{stop}}}).Text(&text); err != nil {
			t.Fatal(err)
		}
		got := strings.Join(strings.Fields(text.String()), " ")
		if stop.Verdict != test.verdict || !strings.Contains(got, test.says) {
			t.Errorf("%s: %s, want %s, %q: %s", test.name, stop.Verdict, test.verdict, test.says, text.String())
		}
		if in := stop.Bucket.GreenInNS; in != nil && stop.Verdict == "drop" && stop.WaitNS != *in {
			t.Errorf("%s: it waits %d ns for green, not %d", test.name, stop.WaitNS, *in)
		}
		if conforms := stop.Bucket.Conforms; conforms != (stop.Bucket.Colour == "green") || (stop.RefusedBy != nil) != (stop.Bucket.Colour == "red") {
			t.Errorf("%s: %s, conforms: %v, refused by %v", test.name, stop.Bucket.Colour, conforms, stop.RefusedBy)
		}
	}
}
