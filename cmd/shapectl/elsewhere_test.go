package main

import (
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
)

// Commands that find no rules tell of limits that were set with another bpffs, as diff does.
func TestElsewhere(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		other := &rig{r.t, map[string]string{"SHAPECTL_BPFFS": testenv.BPFFS(t), "SHAPECTL_HOOK": r.env["SHAPECTL_HOOK"]}}
		other.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
		const says = "limits of shapectl are already on the device, set from another network namespace or another bpffs"
		for line, code := range map[string]int{
			"show": exitDegraded, "show va": exitDegraded, "show --tree": exitDegraded, "show -j": exitDegraded,
			"flush --all": exitDegraded, "flush va": exitDegraded, "flush va egress": exitDegraded, "flush -j va": exitDegraded,
		} {
			got := r.run(strings.Fields(line)...)
			if got.code != code || !strings.Contains(got.err, "va egress: "+says) || strings.Contains(got.out, "no rules are left") {
				t.Errorf("%s: exit %d: %s%s", line, got.code, got.out, got.err)
			}
			if strings.Contains(line, "-j") && got.out != "[]\n" {
				t.Errorf("%s: it prints %q", line, got.out)
			}
		}
		if got := r.run("doctor"); got.code != exitDegraded || !strings.Contains(bare(got.out), "failed va egress") {
			t.Errorf("doctor: exit %d: %s%s", got.code, got.out, got.err)
		}
		if out := r.ok("explain", "va", "egress", "10.0.0.7"); !strings.Contains(strings.Join(strings.Fields(out), " "), "va egress: not known: "+says) {
			t.Errorf("explain: %s", out)
		}
		r.prints("no ingress rules on va; 'shapectl show' lists all rules\n", "show", "va", "ingress")
		other.ok("flush", "--all")
		r.prints("no rules\n", "show")
	})
}
