package policy

import (
	"testing"
	"time"
)

// valueOf is an option of an empty limit.
func valueOf(option string) Value { return FindOption(option).Value(new(Limit)) }

// TestSet parses each word, and then what the value prints; both values must print the
// same.
func TestSet(t *testing.T) {
	for _, test := range []struct {
		fresh   func() Value
		kind    string
		words   map[string]string // read, printed
		refused map[string]string // read, part of the error
	}{
		{
			func() Value { return new(Direction) }, "ingress|egress",
			map[string]string{"ingress": "ingress", "egress": "egress"},
			map[string]string{"": "use ingress or egress", "in": `direction "in"`, "a\nb": "unknown"},
		}, {
			func() Value { return new(Match) }, "dst|src",
			map[string]string{"dst": "dst", "src": "src"},
			map[string]string{"both": "use dst or src"},
		}, {
			func() Value { return new(Algorithm) }, "gcra|leaky|srtcm|trtcm|rfc4115",
			map[string]string{"gcra": "gcra", "leaky": "leaky", "srTCM": "srtcm", "TRTCM": "trtcm", "rfc4115": "rfc4115", "RFC2697": "srtcm", "rfc2698": "trtcm"},
			map[string]string{"tbf": "use gcra, leaky, srtcm, trtcm or rfc4115"},
		}, {
			func() Value { return valueOf("pbs") }, "size|time",
			map[string]string{"64K": "64kb", "0.1s": "100ms"},
			map[string]string{"0": "pbs \"0\" is zero"},
		}, {
			func() Value { return valueOf("ebs") }, "size|time",
			map[string]string{"64K": "64kb", "0.1s": "100ms", "0": "0"},
			map[string]string{"0ms": "ebs \"0ms\" is zero"},
		}, {
			func() Value { return new(Switch) }, "bool",
			map[string]string{"true": "true", "false": "false"},
			map[string]string{"yes": `"yes" is neither true nor false`},
		}, {
			func() Value { return new(Action) }, "pass|drop|ecn|dscp:NAME",
			map[string]string{
				"pass": "pass", "drop": "drop", "ecn": "ecn", "dscp:AF12": "dscp:AF12", "dscp:0": "dscp:CS0", "dscp:be": "dscp:CS0",
				"dscp:DF": "dscp:CS0", "dscp:63": "dscp:63", "dscp:46": "dscp:EF", "dscp:le": "dscp:LE", "dscp:va": "dscp:VA",
			},
			map[string]string{
				"": "use pass, drop, ecn, or a DSCP such as dscp:AF12", "AF12": `action "AF12" is unknown`, "dscp:": "dscp \"\" is unknown",
				"dscp:64": "from 0 to 63", "dscp:AF14": `dscp "AF14" is unknown; use CS0 to CS7, AF11 to AF43, EF, VA, LE, DF, or a number`,
			},
		}, {
			func() Value { return new(ColourMap) }, "dscp=colour,...",
			map[string]string{
				"AF12=yellow,AF13=red": "AF12=yellow,AF13=red", "63=red,cs1=yellow": "CS1=yellow,63=red", "10=green,af12=red": "AF12=red",
				"BE=red": "CS0=red",
			},
			map[string]string{
				"": "colours has neither yellow nor red", "AF12": "write them like AF12=yellow,AF13=red", "AF12=yellow,": "write them like",
				"AF12=blue": `colours: colour "blue" is unknown; use green, yellow or red`, "AF14=red": `colours: dscp "AF14" is unknown`,
				"AF12=red,12=red": "AF12 is given twice", "AF12=green,12=red": "AF12 is given twice",
				"AF11=green": "colours has neither yellow nor red, so it has no use; add some",
			},
		}, {
			func() Value { return new(Excess) }, "drop|ecn|pass|delay",
			map[string]string{"drop": "drop", "ecn": "ecn", "pass": "pass", "delay": "delay"},
			map[string]string{"mark": "use drop, ecn, pass or delay"},
		}, {
			func() Value { return new(ECNAbove) }, "time|never",
			map[string]string{"5ms": "5ms", "0.5S": "500ms", "never": "never"},
			map[string]string{"0ms": "zero", "5": "unit of time", "-1ms": "negative", "always": "never or 5ms", "Never": "never or 5ms"},
		}, {
			func() Value { return new(Order) }, "fifo|sparse-first",
			map[string]string{"fifo": "fifo", "sparse-first": "sparse-first"},
			map[string]string{"sparse": "use fifo or sparse-first"},
		}, {
			func() Value { return new(Fail) }, "open|closed",
			map[string]string{"open": "open", "closed": "closed"},
			map[string]string{"close": "use open or closed"},
		}, {
			func() Value { return new(Each) }, "all|host|/N|flow",
			map[string]string{"all": "all", "host": "host", "flow": "flow", "/64": "/64", "/0": "/0", "/128": "/128"},
			map[string]string{"/129": "prefix length", "/-1": "prefix length", "/": "prefix length", "/N": "prefix length", "64": "use all, host, /N or flow"},
		}, {
			func() Value { return new(Penalty) }, "none|fill|time",
			map[string]string{"none": "none", "fill": "fill", "30s": "30s", "1.5S": "1500ms", "86400s": "86400s"},
			map[string]string{"0s": "zero", "-1s": "negative", "30": "unit of time", "5min": "unit of time", "time": "none, fill or 30s", "86401s": "longer than 86400s", "0.1ns": "nanoseconds"},
		}, {
			func() Value { return new(Rate) }, "rate",
			map[string]string{"1.5mbit": "1.5mbit"},
			map[string]string{"10mbps": "ambiguous"},
		}, {
			func() Value { return new(Capacity) }, "size|time",
			map[string]string{"64K": "64kb", "0.1s": "100ms"},
			map[string]string{"0": "zero"},
		}, {
			func() Value { return valueOf("within") }, "pool",
			map[string]string{"uplink": "uplink", "Site 7: down": "Site 7: down", "none": "", "": ""},
			map[string]string{" ": "only blanks", "a\nb": "control character"},
		}, {
			func() Value { return new(Guarantee) }, "rate|none",
			map[string]string{"5mbit": "5mbit", "1.5MB/s": "12mbit", "none": "none"},
			map[string]string{"unlimited": "must be a rate such as 5mbit", "0": "is zero", "10mbps": "did you mean"},
		}, {
			func() Value { return valueOf("members") }, "number",
			map[string]string{"1": "1", "4294967295": "4294967295"},
			map[string]string{"0": "whole number", "-1": "whole number", "4294967296": "whole number", "": "whole number"},
		}, {
			func() Value { return valueOf("weight") }, "number",
			map[string]string{"1": "1", "2": "2", "256": "256"},
			map[string]string{"0": "from 1 to 256", "257": "from 1 to 256", "1.5": "from 1 to 256", "65537": "from 1 to 256"},
		}, {
			func() Value { return new(Share) }, "none|host|/N|flow|member",
			map[string]string{"none": "none", "host": "host", "/64": "/64", "/0": "/0", "flow": "flow", "member": "member"},
			map[string]string{"/129": "prefix length", "members": "use none, host, /N, flow or member"},
		},
	} {
		if got := test.fresh().Type(); got != test.kind {
			t.Errorf("%T has the type %q, want %q", test.fresh(), got, test.kind)
		}
		for in, want := range test.words {
			v, again := test.fresh(), test.fresh()
			if err := v.Set(in); err != nil || v.String() != want {
				t.Errorf("%T of %q prints %q, %v; want %q", v, in, v, err, want)
			}
			if err := again.Set(v.String()); err != nil || again.String() != want {
				t.Errorf("%T of %q prints %q, %v; want the same", v, v, again, err)
			}
		}
		for in, part := range test.refused {
			v := test.fresh()
			wantError(t, v.Set(in), part)
			if v.String() != test.fresh().String() {
				t.Errorf("%T refused %q, but became %v", v, in, v)
			}
		}
	}
}

func TestFarSide(t *testing.T) {
	if d, err := ParseDirection("egress"); err != nil || d.FarSide() != MatchDst {
		t.Errorf("far side of %v is %v, %v", d, d.FarSide(), err)
	}
	if d, err := ParseDirection("ingress"); err != nil || d.FarSide() != MatchSrc {
		t.Errorf("far side of %v is %v, %v", d, d.FarSide(), err)
	}
}

func TestStringOfUnknown(t *testing.T) {
	for got, want := range map[string]string{
		Excess(9).String():                             "unknown(9)",
		Colour(9).String():                             "unknown(9)",
		Action(74).String():                            "unknown(9)",
		Share{Kind: 9}.String():                        "unknown(9)",
		Each{Kind: 9}.String():                         "unknown(9)",
		Penalty{Kind: 9, Duration: time.Hour}.String(): "unknown(9)",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
