package policy

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

func TestChanges(t *testing.T) {
	rule := func(options string) *Rule {
		l := Limit{Rate: 10e6}
		plan := ""
		for _, o := range strings.Fields(options) {
			key, value, _ := strings.Cut(o, "=")
			var err error
			switch key {
			case "plan":
				plan = value
			case "shadow":
				l.Shadow, err = ParseShadow(value)
			default:
				err = l.Set(key, strings.ReplaceAll(value, "+", " "))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		r, err := l.Rule(netip.MustParsePrefix("10.0.0.0/24"))
		if err != nil {
			t.Fatal(err)
		}
		r.Label.Plan = plan
		return &r
	}
	for _, test := range []struct{ have, want, changes string }{
		{"", "", "[]"},
		{"", "rate=20mbit", "[rate 10mbit -> 20mbit]"},
		{"name=alice", "rate=20mbit name=bob", "[rate 10mbit -> 20mbit name alice -> bob]"},
		{"capacity=64kb", "rate=20mbit", "[rate 10mbit -> 20mbit capacity 64kb -> 750000b]"},
		{"capacity=64kb", "capacity=64kb rate=20mbit each=host", "[rate 10mbit -> 20mbit each all -> host]"},
		{"name=Alice+B note=x", "name=none", `[name "Alice B" -> none note x -> none]`},
		{"plan=gold", "plan=silver", "[plan gold -> silver]"},
		{"", "excess=delay", "[excess drop -> delay]"},
		{"excess=delay", "excess=delay queue=20ms", "[queue 62500b -> 25000b]"},
		{"excess=delay algorithm=leaky", "excess=delay", "[algorithm leaky -> gcra]"},
		{"rate=unlimited", "fail=closed", "[rate unlimited -> 10mbit fail open -> closed]"},
		{"shadow=rate=5mbit", "shadow=rate=5mbit,each=host,capacity=64kb", "[shadow rate=5mbit -> rate=5mbit,capacity=64kb,each=host]"},
		{"", "overhead=38/84", "[overhead 0 -> 38 mpu 0 -> 84]"},
		{"", "shadow=rate=5mbit,overhead=4", "[shadow none -> rate=5mbit,overhead=4]"},
		{"shadow=rate=5mbit", "", "[shadow rate=5mbit -> none]"},
		{"", "within=ap+1 guarantee=5mbit weight=4 share=host", `[within none -> "ap 1" guarantee none -> 5mbit weight 1 -> 4 share none -> host]`},
		{"", "algorithm=trtcm pir=20mbit", "[algorithm gcra -> trtcm pir none -> 20mbit]"},
		{"algorithm=trtcm pir=20mbit", "algorithm=trtcm pir=30mbit rate=20mbit", "[rate 10mbit -> 20mbit pir 20mbit -> 30mbit]"},
		{"algorithm=srtcm excess=drop", "excess=ecn", "[algorithm srtcm -> gcra excess drop -> ecn]"},
		{"", "algorithm=srtcm yellow=dscp:AF12", "[algorithm gcra -> srtcm yellow none -> dscp:AF12]"},
		{"", "algorithm=srtcm ebs=0", "[algorithm gcra -> srtcm ebs none -> 0]"},
		{"algorithm=srtcm ebs=0", "algorithm=srtcm", "[ebs 0 -> 375000b]"},
		{"algorithm=srtcm", "algorithm=srtcm colour-aware=true ebs=64kb", "[ebs 375000b -> 64kb colour-aware false -> true]"},
		{"algorithm=srtcm colour-aware=true", "algorithm=srtcm colour-aware=true colours=CS1=red,CS2=yellow",
			`[colours AF12=yellow,AF13=red,AF22=yellow,AF23=red,AF32=yellow,AF33=red,AF42=yellow,AF43=red -> CS1=red,CS2=yellow]`},
		{"algorithm=trtcm pir=20mbit shadow=rate=5mbit", "algorithm=trtcm pir=20mbit shadow=rate=5mbit,pir=9mbit,pbs=64kb",
			"[shadow rate=5mbit -> rate=5mbit,pir=9mbit,pbs=64kb]"},
		{"within=a", "within=none", "[within a -> none]"},
		{"within=a each=host guarantee=1mbit members=5", "within=a each=host guarantee=1mbit members=6", "[members 5 -> 6]"},
		{"within=a each=host share=none", "within=a rate=unlimited", "[rate 10mbit -> unlimited]"},
		{"pps=100 new-flows=5 new-flows-burst=7", "", "[pps 100 -> none new-flows 5 -> none new-flows-burst 7 -> none]"},
		{"pps=100 excess=delay", "within=a rate=unlimited", "[rate 10mbit -> unlimited within none -> a pps 100 -> none]"},
		{"quota=1gb/month then=drop grace=1mb", "rate=unlimited", "[rate 10mbit -> unlimited quota 1gb/month -> none then drop -> none grace 1mb -> none]"},
		{"within=a rate=unlimited", "within=b rate=unlimited", "[within a -> b]"},
	} {
		if got := fmt.Sprint(Changes(rule(test.have), rule(test.want))); got != test.changes {
			t.Errorf("%q, %q: got %s, want %s", test.have, test.want, got, test.changes)
		}
	}
}
