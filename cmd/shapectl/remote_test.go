package main

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

// newRemoteRig is a rig with a serve that answers the group of nobody. In the directory, all users may read files.
func newRemoteRig(t *testing.T, args ...string) (r *rig, s *served, program, dir string) {
	t.Helper()
	program, dir = publicCopy(t)
	r = newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "8kbit", "--each", "host", "--name", "alice")
	r.ok("set", "va", "ingress", "::/0", "--rate", "1mbit")
	r.send("10.0.0.7", 60, 1000)
	s = r.serve(args...)
	testenv.Must(t, os.Chmod(filepath.Dir(s.socket), 0o755))
	testenv.Must(t, os.Chown(s.socket, -1, nobody))
	testenv.Must(t, os.Chmod(s.socket, 0o660))
	r.env[socketEnv] = s.socket
	return r, s, program, dir
}

// Who is in the group of the socket gets what root gets: output, errors and exit code.
func TestReadByServe(t *testing.T) {
	r, _, program, dir := newRemoteRig(t, "--rtt")
	policy := filepath.Join(dir, "policy")
	testenv.Must(t, os.WriteFile(policy, []byte("devices: {va: {egress: {10.0.0.0/24: 1mbit}}, nowhere: {egress: {any: 1mbit}}}\n"), 0o644))
	for _, columns := range []string{"", "60"} {
		r.env["COLUMNS"] = columns
		for _, line := range []string{
			"show", "show va", "show --wide", "show --sentences", "-j show va ingress", "show va ingress ::/0", "export", "export -j", "doctor -v",
			"show nowhere", "-j explain nowhere", "ask va", "show --nonsense", "show --sort nonsense", "ask va egress 10.1.0.7", "diff nonsense",
		} {
			want, got := r.run(strings.Fields(line)...), r.result(r.asNobody(program, nil, strings.Fields(line)...))
			if got != want {
				t.Errorf("%s: a member gets\n%+v, and root\n%+v", line, got, want)
			}
		}
	}
	for line, says := range map[string]string{
		"show --buckets": "10.0.0.7", "ask va egress 10.0.0.7": "bucket of 10.0.0.7", "explain va egress 10.0.0.7": "10.0.0.0/24",
		"top --once --interval 100ms": "alice egress", "top va ingress --once --interval 100ms": "::/0", "rtt": "no TCP packets",
	} {
		got := r.result(r.asNobody(program, nil, strings.Fields(line)...))
		if got.code != exitDone || got.err != "" || !strings.Contains(got.out, says) {
			t.Errorf("%s: %+v", line, got)
		}
	}
	var top report.Top
	testenv.Must(t, json.Unmarshal([]byte(r.result(r.asNobody(program, nil, "top", "--once", "-j", "--interval", "100ms")).out), &top))
	if len(top.Rules) != 2 {
		t.Errorf("top: %+v", top)
	}
	testenv.Must(t, os.Chmod(policy, 0o600)) // nobody may not read it, and serve may
	want := r.run("diff", policy)
	if got := r.result(r.asNobody(program, nil, "diff", policy)); got.code != exitInput || !strings.Contains(got.err, "permission denied") {
		t.Errorf("diff of another user's file: %+v", got)
	}
	testenv.Must(t, os.Chmod(policy, 0o644))
	if got := r.result(r.asNobody(program, nil, "diff", policy)); got.out != want.out || got.code != exitDiffers || !strings.Contains(got.err, "nowhere") {
		t.Errorf("diff: %+v, and by root %+v", got, want)
	}
	for _, pin := range r.pins() {
		var st unix.Stat_t
		testenv.Must(t, unix.Lstat(pin, &st))
		if st.Gid != 0 || st.Mode&0o077 != 0 {
			t.Errorf("%s has group %d and mode %#o", pin, st.Gid, st.Mode)
		}
	}
}

// All that changes something, reads files or measures is refused, and so is who may not connect.
func TestRefusedByServe(t *testing.T) {
	r, s, program, dir := newRemoteRig(t)
	policy := filepath.Join(dir, "policy")
	testenv.Must(t, os.WriteFile(policy, []byte("devices: {}\n"), 0o644))
	before := r.ok("export")
	const byRoot = "; run as root, or with CAP_BPF"
	refused := func(line, says string) {
		t.Helper()
		r.isRefusal(line, r.result(r.asNobody(program, nil, strings.Fields(line)...)), exitMissing, says)
	}
	for _, line := range []string{
		"set va egress 10.0.0.0/24 --rate 2mbit", "delete va egress 10.0.0.0/24", "flush --all", "confirm", "rollback", "apply " + policy,
		"rtt --interval 20ms", "talkers va --interval 20ms", "-n 1 show",
		"pool show up",
	} {
		refused(line, byRoot)
	}
	refused("top -j", "; run as root, or use --once")
	refused("top --once --interval 20s --interval 1s", "; run as root; serve says: top: interval 20s is too long for a request")
	for query, header := range map[string]http.Header{
		"show":           {columnsHeader: {"-1"}, netnsHeader: {"net:[1]"}},
		"show?sort=name": {columnsHeader: {"0"}, netnsHeader: {"net:[1]"}},
		"show?json=1":    {columnsHeader: {"0"}, netnsHeader: {"net:[1]"}},
		"top?once=false": {columnsHeader: {"0"}, netnsHeader: {"net:[1]"}},
	} {
		request, err := http.NewRequest(http.MethodGet, "http://localhost/api/v1/"+query, nil)
		testenv.Must(t, err)
		request.Header = header
		answer, err := s.client().Do(request)
		testenv.Must(t, err)
		if answer.Body.Close(); answer.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: %s", query, answer.Status)
		}
	}
	outsider := r.asNobody(program, nil, "show")
	outsider.SysProcAttr.Credential = &syscall.Credential{Uid: nobody - 1, Gid: nobody - 1}
	r.isRefusal("show", r.result(outsider), exitMissing, "; run as root, or ask root to add you to the group shapectl")
	testenv.Must(t, os.Remove(s.socket))
	refused("show", "; run as root, or ask root to start 'shapectl serve'")
	if after := r.ok("export"); after != before {
		t.Errorf("before:\n%s, after:\n%s", before, after)
	}
}
