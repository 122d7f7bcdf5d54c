package main

import (
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

func clsactRig(t *testing.T) (r *rig, va netlink.Link) {
	r = newRig(t)
	r.env["SHAPECTL_HOOK"] = "clsact"
	return r, testenv.Link(t, "va")
}

// filterQdisc is the kind of va's qdisc for filters, "" for none.
func (r *rig) filterQdisc() string {
	r.t.Helper()
	kind, err := netinfo.FilterQdisc(testenv.Link(r.t, "va"))
	testenv.Must(r.t, err)
	return kind
}

func clsactQdisc(l netlink.Link) netlink.Qdisc {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0)}}
}

func ingressQdisc(l netlink.Link) netlink.Qdisc {
	// With the handle that tc gives it, the kernel does not replace a clsact qdisc by it.
	return &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS}}
}

// With the last rule, shapectl removes the qdisc that it added, so that other tools can add theirs.
func TestClsactLeavesWithTheLastRule(t *testing.T) {
	t.Parallel()
	for _, order := range [][]string{{"egress", "ingress"}, {"ingress", "egress"}} {
		r, va := clsactRig(t)
		for _, direction := range order {
			r.ok("set", "va", direction, "any", "--rate", "50mbit")
		}
		r.ok("flush", "va", order[0])
		r.prints("nothing to change\n", "diff", r.policy("devices: {va: {"+order[1]+": {any: 50mbit}}}\n"))
		if kind := r.filterQdisc(); kind != "clsact" {
			t.Errorf("with rules for %s only, there is %q", order[1], kind)
		}
		r.ok("flush", "va")
		testenv.Must(t, netlink.QdiscAdd(ingressQdisc(va)))
		r.ok("set", "va", "ingress", "any", "--rate", "50mbit")
		r.ok("flush", "va")
		if kind := r.filterQdisc(); kind != "ingress" {
			t.Errorf("the ingress qdisc of another tool became %q", kind)
		}
	}
}

// A clsact qdisc that another tool added, or uses, stays.
func TestClsactOfAnotherToolStays(t *testing.T) {
	r, va := clsactRig(t)
	testenv.Must(t, netlink.QdiscAdd(clsactQdisc(va)))
	r.ok("set", "va", "egress", "any", "--rate", "50mbit")
	r.ok("set", "va", "ingress", "any", "--rate", "50mbit")
	r.ok("flush", "va")
	if kind := r.filterQdisc(); kind != "clsact" {
		t.Errorf("a clsact qdisc that was there became %q", kind)
	}
	testenv.Must(t, netlink.QdiscDel(clsactQdisc(va)))
	r.ok("set", "va", "egress", "any", "--rate", "50mbit")
	testenv.Must(t, netlink.FilterAdd(&netlink.U32{FilterAttrs: netlink.FilterAttrs{
		LinkIndex: va.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: 7, Protocol: 3,
	}}))
	r.ok("flush", "va")
	if filters, err := netinfo.Filters(va.Attrs().Index, policy.Ingress); len(filters) == 0 || err != nil {
		t.Errorf("a filter of another tool is gone: %v, %v", filters, err)
	}
}

// In an ingress qdisc of another tool there is room for ingress rules, and none for egress. Each message says so.
func TestIngressQdiscOfAnotherTool(t *testing.T) {
	r, va := clsactRig(t)
	testenv.Must(t, netlink.QdiscAdd(ingressQdisc(va)))
	egress := []string{"set", "va", "egress", "any", "--rate", "50mbit"}
	const why = "an ingress qdisc is in its place"
	r.refused(exitKernel, why, egress...)
	r.ok("set", "va", "ingress", "any", "--rate", "50mbit")
	r.refused(exitKernel, why, egress...)
	for _, line := range []string{"explain va egress 10.0.0.7", "show", "doctor"} {
		if got := r.run(strings.Fields(line)...); strings.Contains(got.out+got.err, "another network namespace") {
			t.Errorf("%s takes shapectl's own program for another one: %s%s", line, got.out, got.err)
		}
	}
}
