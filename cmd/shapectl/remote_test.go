package main

import (
	"encoding/json"
	"net"
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
	t.Parallel()
	r, _, program, dir := newRemoteRig(t, "--rtt")
	policy := filepath.Join(dir, "policy")
	testenv.Must(t, os.WriteFile(policy, []byte("devices: {va: {egress: {10.0.0.0/24: 1mbit}}, nowhere: {egress: {any: 1mbit}}}\n"), 0o644))
	for _, columns := range []string{"", "60"} {
		r.env["COLUMNS"] = columns
		for _, line := range []string{
			"show", "show va", "show --wide", "show --sentences", "-j show va ingress", "show va ingress ::/0", "export", "export -j", "doctor -v",
			"show nowhere", "-j explain nowhere", "show --nonsense", "show --sort nonsense", "explain va egress 10.1.0.7", "diff nonsense",
		} {
			want, got := r.run(strings.Fields(line)...), r.result(r.asNobody(program, nil, strings.Fields(line)...))
			if got != want {
				t.Errorf("%s: a member gets\n%+v, and root\n%+v", line, got, want)
			}
		}
	}
	for line, says := range map[string]string{
		"show --buckets": "10.0.0.7", "explain va egress 10.0.0.7": "of 10.0.0.7: ",
		"top --once --interval 100ms": "alice egress", "top va ingress --once --interval 100ms": "::/0", "top --rtt --once": "no TCP packets",
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
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	testenv.Must(t, err)
	defer full.Close()
	var told strings.Builder
	cmd := r.asNobody(program, nil, "show")
	cmd.Stdout, cmd.Stderr = full, &told
	if cmd.Run(); cmd.ProcessState.ExitCode() != exitDegraded || !strings.Contains(told.String(), "show: done, but the answer could not be written") {
		t.Errorf("show >/dev/full: exit %d, %s", cmd.ProcessState.ExitCode(), &told)
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
	t.Parallel()
	r, s, program, dir := newRemoteRig(t)
	policy := filepath.Join(dir, "policy")
	testenv.Must(t, os.WriteFile(policy, []byte("devices: {}\n"), 0o644))
	before := r.ok("export")
	const byRoot = "; run as root, or with CAP_BPF"
	refusedAs := func(code int, line, says string) {
		t.Helper()
		r.isRefusal(line, r.result(r.asNobody(program, nil, strings.Fields(line)...)), code, says)
	}
	refused := func(line, says string) {
		t.Helper()
		refusedAs(exitMissing, line, says)
	}
	for _, line := range []string{
		"set va egress 10.0.0.0/24 --rate 2mbit", "delete va egress 10.0.0.0/24", "flush --all", "confirm", "rollback", "apply " + policy,
		"top --rtt --once --interval 20ms", "top va --by host --once --interval 20ms", "-n 1 show",
	} {
		refused(line, byRoot)
	}
	refused("top -j", "; run as root, or use --once")
	refusedAs(exitInput, "top --once --interval 20s --interval 1s", "shapectl: top: interval 20s is too long for a request")
	refusedAs(exitInput, "report nobody", "report: the history has no readings")
	for _, line := range []string{"show", "report alice"} {
		elsewhere := r.asNobody(program, nil, strings.Fields(line)...)
		elsewhere.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
		r.isRefusal(line, r.result(elsewhere), exitInput, "serve is for another network namespace")
	}
	for query, header := range map[string]http.Header{
		"show":           {columnsHeader: {"-1"}},
		"show?sort=name": {netnsHeader: {"net:[1]"}},
		"show?json=1":    {columnsHeader: {"0"}},
		"top?once=false": {columnsHeader: {"0"}},
		"version":        {columnsHeader: {"0"}},
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
	for _, line := range []string{"show", "report alice"} {
		outsider := r.asNobody(program, nil, strings.Fields(line)...)
		outsider.SysProcAttr.Credential = &syscall.Credential{Uid: nobody - 1, Gid: nobody - 1}
		r.isRefusal(line, r.result(outsider), exitMissing, ", or ask root to add you to the group shapectl")
	}
	pipe := filepath.Join(dir, "pipe")
	testenv.Must(t, unix.Mkfifo(pipe, 0o644))
	write := func(text string) { go os.WriteFile(pipe, []byte(text), 0) } // once
	write("devices: 1\n")
	if got := r.result(r.asNobody(program, nil, "diff", pipe)); got.code != exitInput || !strings.HasPrefix(got.err, pipe+":1:") {
		t.Errorf("diff of a pipe with a mistake: %+v", got)
	}
	testenv.Must(t, os.Remove(s.socket))
	refused("show", "; run as root, or ask root to start 'shapectl serve'")
	write("devices: {}\n")
	refused("diff "+pipe, "; run as root, or ask root to start 'shapectl serve'")
	other, err := net.Listen("unix", s.socket)
	testenv.Must(t, err)
	defer other.Close()
	testenv.Must(t, os.Chmod(s.socket, 0o666))
	go http.Serve(other, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/v1/export" {
			http.Redirect(w, r, "/api/v1/show", http.StatusFound)
		}
		w.Header().Set("Shapectl-Exit-Code", "0")
		w.Header().Set(outputHeader, "-1")
	}))
	refused("show", "; run as root; serve is of another version")
	refusedAs(exitKernel, "export", "serve answers 302 Found")
	if after := r.ok("export"); after != before {
		t.Errorf("before:\n%s, after:\n%s", before, after)
	}
}
