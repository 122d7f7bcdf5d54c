package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// badInput is refused with exit code 1 whatever rules there are; each line has
// the arguments, and what the message must say.
var badInput = []struct{ args, says string }{
	{"", "shapectl --help"},
	{"frobnicate", "frobnicate"},
	{"--frobnicate", "frobnicate"},
	{"show --frobnicate", "frobnicate"},
	{"completion", "bash"},
	{"completion csh", "csh"},
	{"set", "takes"},
	{"set va", "what to change is missing"},
	{"set va egress --rate 1mbit", "'shapectl set --rate 1mbit va egress any'"},
	{"set va egress 10.0.0.0/24 extra --rate 1mbit", "takes"},
	{"set va egress 10.0.0.0/24", "--rate"},
	{"set va egress 10.0.0.0/24 --rate", "--rate"},
	{"set nosuch0 egress 10.0.0.0/24 --rate 1mbit", "no device nosuch0"},
	{"set nosuch.100 egress 10.0.0.0/24 --rate 1mbit", "no device nosuch.100"},
	{"set abcdefghijklmnopqrstuvwxyz egress 10.0.0.0/24 --rate 1mbit", "no device abcdefghijklmnopqrstuvwxyz"},
	{"set va sideways 10.0.0.0/24 --rate 1mbit", "sideways"},
	{"set va Egress 10.0.0.0/24 --rate 1mbit", "egress"},
	{"set va egress 10.0.0.7/24 --rate 1mbit", "did you mean 10.0.0.0/24"},
	{"set va egress example.org --rate 1mbit", "example.org"},
	{"set va egress 10.0.0.0/24 --rate -5mbit", "-5mbit"},
	{"set va egress 10.0.0.0/24 --rate 1e400gbit", "1e400gbit"},
	{"set va egress 10.0.0.0/24 --rate 1mbit --rate 2mbit", "already"},
	{"set va egress 10.0.0.0/24 --rate 1mbit --cir 2mbit", "already"},
	{"set va egress 10.0.0.0/24 --rate 1mbit --capacity 100", "full packet"},
	{"set va egress 10.0.0.0/24 --rate unlimited --capacity 64kb", "unlimited"},
	{"set va egress 10.0.0.0/24 --rate 1mbit --match both", "both"},
	{"set va egress 10.0.0.0/24 --rate 1mbit --queue 50ms", "queue has no use with excess drop; leave it out, or use excess delay"},
	{"set va egress 10.0.0.0/24 --rate 1mbit --mpu 99999999999999999999", "mpu"},
	{"set va --rate 1mbit", "va is a device without a rule for any; write 'shapectl set --rate 1mbit va egress any' for one"},
	{"set 10.0.0.0/24 --rate 1mbit", "'shapectl set --rate 1mbit DEV egress 10.0.0.0/24'"},
	{"set va egress 10.0.0.0/24 1mbit", "write the rate as a flag: --rate 1mbit"},
	{"set va egress 0.0.0.0 --rate 1mbit", "did you mean 0.0.0.0/0?"},
	{"set av egress 10.0.0.0/24 --rate 1mbit", "there is no device av; did you mean va?"},
	{"set alice --rate 1mbit", "no rule or pool has that name"},
	{"set alice --rate fast", "fast"},
	{"delete 10.0.0.0/24", "'shapectl delete DEV egress 10.0.0.0/24'"},
	{"delete", "takes"},
	{"delete alice sideways", "sideways"},
	{"set va ingress --rate 1mbit", "'shapectl set --rate 1mbit va ingress any'"},
	{"set alice egress --rate 1mbit", "no egress rule has that name"},
	{"delete nosuch0 egress 10.0.0.0/24", "no device nosuch0"},
	{"delete va sideways 10.0.0.0/24", "sideways"},
	{"flush", "takes"},
	{"flush va egress 10.0.0.0/24", "takes"},
	{"flush nosuch0", "no device nosuch0"},
	{"flush va sideways", "sideways"},
	{"show va egress 10.0.0.0/24 extra", "takes"},
	{"show nosuch0", "no device nosuch0"},
	{"show va sideways", "sideways"},
	{"show va egress 10.77.0.0/24", "no egress rule for 10.77.0.0/24"},
	{"explain va egress 10.0.0.0/24", "10.0.0.0/24"},
	{"explain va egress 10.0.0.1 --bytes=-1", "-1"},
	{"explain va egress 10.0.0.1 --bytes 99999999999", "99999999999"},
	{"explain va egress 10.0.0.1 --flow udp", "udp"},
	{"explain va egress 10.0.0.1 --flow warp,192.0.2.1:1,10.0.0.1:2", "warp"},
	{"explain va egress 10.0.0.1 --flow udp,192.0.2.1:99999,10.0.0.1:2", "192.0.2.1:99999"},
	{"explain va egress 10.0.0.1 --flow udp,2001:db8::1,10.0.0.1", "udp,2001:db8::1,10.0.0.1"},
	{"serve a b", "takes"},
	{"serve --cluster-store http://127.0.0.1", "redis://HOST:6379"},
	{"serve --cluster-store unix:///s --cluster-prefix {a}", "braces"},
	{"serve --cluster-store unix:///s --cluster-password-file /nosuch", "/nosuch"},
	{"serve --cluster-store redis://h --cluster-ca /nosuch", "rediss://"},
	{"serve --cluster-store rediss://h --cluster-ca /nosuch", "/nosuch"},
	{"watch", "did you mean 'shapectl serve'?"},
	{"agent", "did you mean 'shapectl serve'?"},
	{"cluster", "status|forget"},
	{"cluster frobnicate", "frobnicate"},
	{"cluster status", "--store"},
	{"cluster forget a --store unix:///s", "--missing"},
	{"cluster forget a b --missing --store unix:///s", "--missing"},
	{"version extra", "takes"},
	{"show -n shapectl-no-such-netns", "shapectl-no-such-netns"},
	{"set va egress 10.0.0.0/24 --rate 1mbit -n shapectl-no-such-netns", "shapectl-no-such-netns"},
	{"show -n ../../etc/passwd", "etc/passwd"},
	{"set va egress 10.0.0.0/24 --rate 1mbit -n", "argument"},
}

func TestBadInputChangesNothing(t *testing.T) {
	t.Run("before any rule", func(t *testing.T) {
		r := newRig(t)
		empty := t.TempDir() // no bpffs, and none must come of a bad command
		r.env["SHAPECTL_BPFFS"] = empty
		for _, c := range badInput {
			r.refused(exitInput, c.says, strings.Fields(c.args)...)
		}
		r.env["SHAPECTL_HOOK"] = "nonsense"
		r.refused(exitInput, "SHAPECTL_HOOK=nonsense", "set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
		r.refused(exitInput, "SHAPECTL_HOOK=nonsense", "show")
		r.notMounted(empty)
		// Nor of a question.
		delete(r.env, "SHAPECTL_HOOK")
		if out := r.ok("show"); out != "no rules\n" {
			t.Errorf("show: %q", out)
		}
		r.ok("explain", "va", "egress", "10.0.0.7")
		r.ok("doctor")
		r.notMounted(empty)
	})
	t.Run("with rules", func(t *testing.T) {
		r := newRig(t)
		r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "2mbit", "--each", "flow")
		r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "3mbit", "--algorithm", "leaky")
		shown, pins := r.ok("show", "-j"), r.pins()
		for _, c := range badInput {
			r.refused(exitInput, c.says, strings.Fields(c.args)...)
		}
		for _, c := range []struct{ args, says string }{
			{"explain vaa", "did you mean 'shapectl explain va'?"},
			{"set va egress 10.0.2.0/24 --rate 1mbit --match src", "dst"},
			{"set va egress 10.0.0.0/24 --rate 1mbit --match src", "dst"},
		} {
			r.refused(exitInput, c.says, strings.Fields(c.args)...)
		}
		if now := r.ok("show", "-j"); now != shown {
			t.Errorf("rules were\n%s, and are\n%s", shown, now)
		}
		if now := r.pins(); !slices.Equal(now, pins) {
			t.Errorf("pins were %v, and are %v", pins, now)
		}
	})
}

func (r *rig) notMounted(dir string) {
	r.t.Helper()
	var st unix.Statfs_t
	testenv.Must(r.t, unix.Statfs(dir, &st))
	if st.Type == unix.BPF_FS_MAGIC {
		r.t.Errorf("a bpffs was mounted")
		testenv.Unmount(r.t, dir)
	}
	entries, err := os.ReadDir(dir)
	testenv.Must(r.t, err)
	if len(entries) > 0 {
		r.t.Errorf("made: %v", entries)
	}
}

// A bpffs that is not there is mounted by the first rule.
func TestFirstRuleMounts(t *testing.T) {
	r := newRig(t)
	dir := t.TempDir()
	r.env["SHAPECTL_BPFFS"] = dir
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	t.Cleanup(func() { testenv.Unmount(t, dir) })
	if rules := r.show(); len(rules) != 1 || !rules[0].Attached {
		t.Errorf("rules: %+v", rules)
	}
}
