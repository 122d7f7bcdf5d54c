package report

import (
	"strings"
	"testing"
)

func TestFindings(t *testing.T) {
	findings := Findings{
		{Status: OK, Check: "kernel", Finding: "Linux"},
		{Status: Note, Check: "traffic", Device: "tap0", Direction: "egress", Finding: "no packet"},
		{Status: Warning, Check: "chain", Device: "tap0", Direction: "egress", Finding: "a program runs before it and may do what it likes to packets", Advice: "look at it"},
		{Status: Warning, Check: "chain", Device: "tap\n1", Direction: "egress", Finding: "a program runs before it and may do what it likes to packets", Advice: "look at it"},
		{Status: Failed, Check: "state", Device: "tap2", Direction: "egress"},
		{Status: Failed, Check: "state", Device: "tap2", Direction: "ingress"},
	}
	findings[4].OfRules(1, " not in force")
	findings[5].OfRules(12, " not in force")
	same(t, "problems", text(t, findings.Problems), `
warning  tap0 egress, tap\n1 egress chain: a program runs before it and may do
         what it likes to packets
         -> look at it
failed   tap2 egress, tap2 ingress state: 13 rules not in force
6 checks on 3 devices: 2 failed, 2 warnings, 1 note (-v shows all)
`)
	if all := text(t, findings.Text); !strings.HasPrefix(all, "ok       kernel: Linux\nnote     tap0 egress traffic: no packet\nwarning") ||
		!strings.HasSuffix(all, "6 checks on 3 devices: 2 failed, 2 warnings, 1 note\n") {
		t.Errorf("all: %s", all)
	}
	same(t, "none", text(t, Findings{findings[0]}.Problems), "1 check on 0 devices: 0 failed, 0 warnings, 0 notes\n")
}
