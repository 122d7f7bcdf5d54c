package main

import (
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// setUnheld sets rules on va, as the arguments of set, that delay though nothing
// may hold packets back there: as if its fq had gone since.
func (r *rig) setUnheld(lines ...string) {
	r.t.Helper()
	r.putUnheld(func(rule policy.Rule) policy.Rule { return rule }, lines)
}

// setUnheldSlow is setUnheld for rules as slow as those of setSlow.
func (r *rig) setUnheldSlow(lines ...string) {
	r.t.Helper()
	r.putUnheld(slow, lines)
}

func (r *rig) putUnheld(as func(policy.Rule) policy.Rule, lines []string) {
	r.t.Helper()
	for _, line := range lines {
		args := strings.Fields(line)
		var l limitFlags
		flags := pflag.NewFlagSet("set", pflag.ContinueOnError)
		l.add(flags, "", func(*policy.Option) bool { return true })
		testenv.Must(r.t, flags.Parse(args[3:]))
		l.mark(flags)
		prefix, err := policy.ParsePrefix(args[2])
		testenv.Must(r.t, err)
		rule, err := l.Rule(prefix)
		testenv.Must(r.t, err)
		r.ok("set", args[0], args[1], args[2], "--rate", rule.Rate.String(), "--algorithm", rule.Algorithm.String())
		direction, err := policy.ParseDirection(args[1])
		testenv.Must(r.t, err)
		n, err := loader.Write(loader.Options{BPFFS: r.bpffs()})
		testenv.Must(r.t, err)
		h, err := n.Find(args[0], direction)
		testenv.Must(r.t, err)
		_, err = h.Set.Put(as(rule))
		testenv.Must(r.t, err)
		h.Close()
		n.Close()
	}
}

// Where nothing would hold packets back, nothing is changed: exit code 5 if the
// kernel has no fq at all, and else the command that sets one.
func TestDelayRefused(t *testing.T) {
	r := newRig(t)
	code, says := exitInput, "its qdisc is noqueue, and only fq can, at the root or below mq for each transmit queue; "+
		"--setup-fq sets it up until 'shapectl flush va'"
	if fq.Check() != nil {
		code, says = exitMissing, "this kernel has no fq qdisc, which delays packets (module sch_fq); load that module, use"
	}
	delaying := []string{"10.0.0.0/24", "--rate", "1mbit", "--excess", "delay"}
	file := r.policy("devices: {va: {egress: {10.0.0.0/24: {rate: 1mbit, excess: delay}}}}")
	refused := func() {
		t.Helper()
		before := r.pins()
		r.refused(code, says, append([]string{"set", "va", "egress"}, delaying...)...)
		r.refused(code, says, "apply", file)
		if after := r.pins(); len(after) != len(before) {
			t.Errorf("left behind: %v, before %v", after, before)
		}
	}
	refused()
	r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "1mbit")
	refused()
	if code == exitMissing {
		r.refused(code, says, append([]string{"set", "va", "ingress", "--setup-fq"}, delaying...)...)
		r.refused(code, says, append([]string{"set", "va", "egress", "--setup-fq"}, delaying...)...)
		before := r.pins()
		for _, line := range []string{"line vb --up 1mbit", "line vb --up 1mbit --dry-run"} {
			r.refused(code, "load that module, use a kernel that has it, or give --no-queue", fields(line)...)
		}
		if after := r.pins(); len(after) != len(before) {
			t.Errorf("left behind by line: %v, before %v", after, before)
		}
	}
	if rules := r.show(); len(rules) != 1 {
		t.Errorf("rules are %v", rules)
	}
}

// Who asks for a flow that goes ahead of those that wait is told that it does.
func TestExplainSparseFirst(t *testing.T) {
	r := newRig(t)
	r.setUnheldSlow("va egress 10.0.0.0/24 --rate 1600kbit --capacity 1600 --excess delay --queue 1700 --order sparse-first --ecn-above never")
	r.send("10.0.0.7", 3, 850) // the first one leaves at once, the others as a sparse flow's
	const packet = "va egress 10.0.0.7 --bytes 745"
	for flow, want := range map[string]string{
		"": "delay", " --flow udp,192.0.2.1:5000,10.0.0.7:9": "pass", " --flow udp,192.0.2.1:5000,10.0.0.7:53": "delay",
	} {
		if got := r.ok(strings.Fields("explain -j " + packet + flow)...); !strings.Contains(got, `"verdict": "`+want+`"`) {
			t.Errorf("%s: it is not %s: %s", flow, want, got)
		}
		for _, command := range []string{"explain ", "explain -j "} {
			got := strings.Join(strings.Fields(r.ok(strings.Fields(command+packet+flow)...)), " ")
			if says := strings.Contains(got, "this is for a flow that has packets waiting; give --flow for another"); says != (flow == "") {
				t.Errorf("%s%s: it says for which flow that is: %v: %s", command, flow, says, got)
			}
		}
	}
}
