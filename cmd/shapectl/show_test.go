package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

func TestHasPart(t *testing.T) {
	for text, has := range map[string]bool{"vm3": true, "vm30": false, "vm30 to vm3": true, "vm3a": true, "VM": false, "xvm3-up": true} {
		if hasPart(text, "vm3") != has {
			t.Errorf("%q: %v", text, !has)
		}
	}
	if !hasPart("becker", "beck") || hasPart("", "beck") || !hasPart("9677 77a", "77") || hasPart("9677", "77") {
		t.Error("beck is a part of becker, and of nothing; 77 is none of 9677")
	}
}

// A name is found exactly, else by a pattern, else by a part of it, else by a part of its note.
func TestLabelRank(t *testing.T) {
	for _, test := range []struct {
		asked, name, plan string
		want              int
	}{
		{"alice", "alice", "", 4}, {"alice", "", "alice", 4}, {"al*", "alice", "gold", 3}, {"g?ld", "alice", "gold", 3}, {"LIC", "alice", "", 2},
		{"alice", "Alice B", "", 2}, {"alice", "bob", "gold", 0}, {"alice", "", "", 0}, {"a[", "aa[", "", 2}, {"", "", "", 1}, {"SITE 7", "bob", "", 1},
		{"*lee 41*", "Lee / Lindenallee 41 / Router", "", 3}, {"lee*rout?r", "Lee / Router", "", 3}, {"lee[^a-z]*", "Lee/B", "", 3}, {"[a/b]", "/", "", 3},
	} {
		l := policy.Label{Name: test.name, Plan: test.plan, Note: "site 7"}
		if got := (target{label: test.asked}).ranks()(l); got != test.want {
			t.Errorf("%q of %+v has rank %d, want %d", test.asked, l, got, test.want)
		}
		if test.plan != "" {
			if got := (target{plan: test.plan}).ranks()(l); got != leastRank {
				t.Errorf("plan %s has rank %d", test.plan, got)
			}
			if got := (target{plan: "other"}).ranks()(l); got != 0 {
				t.Errorf("another plan has rank %d", got)
			}
		}
	}
}

// While it measures, show keeps nobody from changing rules.
func TestShowInterval(t *testing.T) {
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1gbit")
	r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "8kbit", "--capacity", "2000", "--each", "host")
	r.send("10.0.0.7", 5, 1000)
	show := r.command("show", "-j", "--interval", "1s", "va")
	var out bytes.Buffer
	show.Stdout = &out
	testenv.Must(t, show.Start())
	sender := testenv.NewSender(t, "va")
	for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		for _, to := range []string{"10.0.0.7", "10.0.1.7"} {
			testenv.Must(t, sender.Send(frameTo(to, 1000)))
		}
		r.ok("set", "va", "ingress", "10.0.0.0/24", "--rate", "1mbit")
	}
	testenv.Must(t, show.Wait())
	var rules []shownRule
	testenv.Must(t, json.Unmarshal(out.Bytes(), &rules))
	if len(rules) < 2 || rules[0].UseBits == nil || *rules[0].UseBits == 0 || rules[0].UsePercent == nil || *rules[0].UsePercent == 0 ||
		rules[0].DroppedPercent == nil || *rules[0].DroppedPercent != 0 || rules[0].IntervalNS == nil || *rules[0].IntervalNS < 1e9 {
		t.Errorf("a rule that is used: %+v", rules[0])
	}
	if rules[1].UsePercent != nil || rules[1].UseBits == nil || rules[1].DroppedPercent == nil || *rules[1].DroppedPercent < 50 {
		t.Errorf("a rule for each host: %+v", rules[1])
	}
	if out := r.ok("show", "--interval", "20ms", "--sort", "use", "va"); !strings.Contains(out, "USE") || strings.Contains(out, "PASSED") {
		t.Errorf("as text: %s", out)
	}
}

// While nobody reads what show has to say, others change rules.
func TestShowToASlowReader(t *testing.T) {
	r := newRig(t)
	var rules strings.Builder
	for i := range 250 {
		fmt.Fprintf(&rules, "10.0.%d.0/24: 1mbit, ", i)
	}
	r.ok("apply", r.policy("devices: {va: {egress: {"+rules.String()+"}}}\n"))
	show := r.command("show", "-j")
	out, err := show.StdoutPipe()
	testenv.Must(t, err)
	testenv.Must(t, show.Start())
	_, err = out.Read(make([]byte, 1)) // the rest is more than a pipe holds
	testenv.Must(t, err)
	began := time.Now()
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "2mbit")
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("another command waited %v", took)
	}
	rest, err := io.ReadAll(out)
	testenv.Must(t, err)
	testenv.Must(t, show.Wait())
	if len(rest) < 1<<17 {
		t.Errorf("only %d bytes", len(rest))
	}
}
