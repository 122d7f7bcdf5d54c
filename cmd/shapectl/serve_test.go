package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/serve"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
)

// A served is a `shapectl serve` that runs.
type served struct {
	*process
	socket string
	schema *apiSchema
}

// serve starts a serve and waits until it is ready.
func (r *rig) serve(args ...string) *served {
	r.t.Helper()
	dir, err := os.MkdirTemp("", "serve")
	testenv.Must(r.t, err)
	r.t.Cleanup(func() { os.RemoveAll(dir) })
	s := &served{socket: filepath.Join(dir, "s"), schema: newAPISchema(r.t)}
	s.process = r.launch(append([]string{"serve", "--socket", s.socket, "--listen", "none"}, args...)...)
	s.isTold("READY=1")
	return s
}

// client is one that talks to the socket.
func (s *served) client() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", s.socket)
	}}}
}

// metrics are what Prometheus would read.
func (s *served) metrics() string {
	s.t.Helper()
	answer, err := s.client().Get("http://localhost/metrics")
	testenv.Must(s.t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	testenv.Must(s.t, err)
	return string(text)
}

// ask sends a request: a GET with a query, or a POST with a body, if it is an object. The request and the answer are
// checked against the description of the API.
func (s *served) ask(status int, command string, with any, says string) []byte {
	s.t.Helper()
	client := s.client()
	client.Timeout = 20 * time.Second
	address, method := "http://localhost/api/v1/"+command, "get"
	at := "/paths/" + strings.ReplaceAll("/api/v1/"+command, "/", "~1")
	var answer *http.Response
	var err error
	if query, ok := with.(string); ok {
		_, err = url.ParseQuery(query)
		testenv.Must(s.t, err)
		answer, err = client.Get(address + "?" + query)
	} else {
		body, _ := json.Marshal(with)
		method = "post"
		if status != http.StatusBadRequest {
			s.schema.check(at+"/post/requestBody/content/application~1json/schema", body)
		}
		answer, err = client.Post(address, "application/json", bytes.NewReader(body))
	}
	testenv.Must(s.t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	testenv.Must(s.t, err)
	if answer.StatusCode != status || !strings.Contains(string(text), says) {
		s.t.Errorf("%s %v: %s, not %d and %q: %.500s", command, with, answer.Status, status, says, text)
	} else if status >= 400 {
		s.schema.check("/components/schemas/failure", text)
	} else if answer.Header.Get("Content-Type") == "application/json" {
		s.schema.check(at+"/"+method+"/responses/"+answer.Status[:3]+"/content/application~1json/schema", text)
	}
	return text
}

func TestServeAnswersAllCommands(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	s := r.serve()
	type o = object
	const policy = "pools:\n  up: 10mbit\ndevices:\n  va:\n    egress:\n      10.0.0.0/24: {rate: 1mbit, each: host, within: up}\n"
	s.ask(200, "version", "", "layout")
	s.ask(200, "show", "", "[]")
	s.ask(200, "set", o{"device": "va", "direction": "egress", "network": "10.0.0.0/24", "rate": "10mbit", "each": "host", "name": "--alice"}, "10mbit")
	s.ask(200, "set", o{"named": "--alice", "rate": "20mbit"}, "20mbit")
	s.ask(200, "set", o{"named": "home", "new": true, "rate": "100mbit"}, "100mbit")
	s.ask(200, "show", "pools=true&named=home", "100mbit")
	s.ask(200, "set", o{"kind": "pool", "named": "home", "rate": "200mbit"}, "200mbit")
	s.ask(404, "set", o{"kind": "rule", "device": "va", "direction": "egress", "network": "10.0.1.0/24", "rate": "1mbit"}, "no egress rule for 10.0.1.0/24 on va; nothing was changed")
	s.ask(200, "delete", o{"named": "home"}, "")
	s.ask(200, "show", "device=va&direction=egress&network=10.0.0.0/24&sentences=true", "20mbit")
	s.ask(200, "show", "names=true", "--alice")
	s.ask(200, "show", "tree&interval=100ms", "interval_ns")
	s.ask(200, "explain", "device=va&direction=egress&address=10.0.0.7&bytes=1000", `"pass"`)
	s.ask(404, "ask", "address=10.0.0.7", "")
	s.ask(200, "export", "", "20mbit")
	s.ask(200, "top", "", "fullest_buckets")
	s.ask(400, "top", "device=va", "unknown parameter \\\"device\\\"; use by, sort, search")
	s.ask(404, "set", o{"named": "--alic", "rate": "1mbit"}, "did you mean --alice?")
	s.ask(404, "explain", "named=nobody", "lists the names")
	s.ask(400, "show", "order=nonsense", "use address, buckets, device")
	for _, what := range []string{"sandbox", "openapi.json"} {
		s.ask(400, what, "n=abc", "takes no parameters")
	}
	s.ask(404, "top", "by=tree&under=no", "there is no pool no; by=tree lists what there is")
	s.ask(404, "top", "of=va+egress+10.0.0.1/24", "did you mean va egress 10.0.0.0/24?")
	s.ask(404, "top", "by=name&name=--alic", "did you mean --alice?")
	s.ask(400, "top", "search="+strings.Repeat("a+", 11), "at most 10")
	s.ask(200, "diff", o{"policy": policy}, "1mbit")
	s.ask(200, "apply", o{"policy": policy, "confirm": "60s"}, "reverts_in_ns")
	s.ask(409, "set", o{"device": "va", "direction": "egress", "network": "any", "rate": "1mbit"}, "confirm")
	s.ask(200, "rollback", o{}, "undone_ago_ns")
	s.ask(200, "apply", o{"policy": policy, "confirm": "60s"}, "")
	s.ask(200, "confirm", o{}, "confirmed_ago_ns")
	s.ask(207, "apply", o{"policy": policy + "  nodevice:\n    egress: {any: 1mbit}\n"}, "nodevice")
	s.ask(200, "import/tc", "device=va", "policy")
	s.ask(200, "delete", o{"device": "va", "direction": "egress", "network": "10.0.0.0/24"}, "10.0.0.0/24")
	s.ask(200, "flush", o{"all": true}, "")

	for what, with := range map[string]any{"unknown parameter": "color=red", "do not go together": "address=10.0.0.1&device=va", "too long": "interval=1h", "2 times": "device=va&device=vb"} {
		s.ask(400, "show", with, what)
	}
	s.ask(404, "show", "device=none", "none")
	s.ask(400, "apply", o{"policy": "devices: [\n"}, "mistakes")
	s.ask(400, "set", o{"named": "alice", "cir": "1mbit"}, `unknown parameter \"cir\"; use rate`)
	s.ask(400, "apply", o{"policy": policy, "last-good": "/etc/stolen"}, "unknown parameter")
	s.ask(400, "apply", o{}, "argument")
	s.ask(400, "apply", []string{"policy"}, "not a JSON object")
	s.ask(400, "set", o{"device": o{"a": 1}}, "neither")
	s.ask(400, "show", "netns=other", "unknown parameter")
	s.ask(404, "replay", "", "there is no /api/v1/replay")
	s.ask(400, "events", "count=0", `"error":"events: --count`)
	s.ask(404, "nothing", "", "there is no")
	s.ask(405, "set", "device=va", "takes POST")
	s.ends(syscall.SIGTERM)
}

// TestServeEvents sees that events come as they happen, also as server-sent events.
func TestServeEvents(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	s := r.serve()
	client := s.client()
	request, err := http.NewRequestWithContext(t.Context(), "GET", "http://localhost/api/v1/events?kind=rules-changed", nil)
	testenv.Must(t, err)
	request.Header.Set("Accept", "text/event-stream")
	answer, err := client.Do(request)
	testenv.Must(t, err)
	defer answer.Body.Close()
	if kind := answer.Header.Get("Content-Type"); kind != "text/event-stream" {
		t.Fatalf("the events are %s", kind)
	}
	done := make(chan string)
	go func() {
		text := make([]byte, 4096)
		for said := ""; ; {
			n, err := answer.Body.Read(text)
			if said += string(text[:n]); err != nil || strings.Contains(said, "data: {") {
				done <- said
				return
			}
		}
	}()
	for rate := 2; ; rate++ {
		r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", strconv.Itoa(rate)+"mbit")
		select {
		case said := <-done:
			if !strings.Contains(said, `data: {`) || !strings.Contains(said, "rules-changed") {
				t.Errorf("the stream says %q", said)
			}
			s.ends(syscall.SIGTERM) // also with a stream open
			return
		case <-time.After(100 * time.Millisecond):
			if rate > 200 {
				t.Fatal("no event")
			}
		}
	}
}

// TestServeSharesEvents sees that two clients cost one listener in the kernel, and that events are counted.
func TestServeSharesEvents(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	s := r.serve("--events")
	listeners := func() (n int) {
		ns, err := loader.Read(loader.Options{BPFFS: r.bpffs()})
		testenv.Must(t, err)
		defer ns.Close()
		store, _, err := ns.Maps()
		testenv.Must(t, err)
		defer store.Close()
		slots := store.Listeners()
		for _, lease := range slots.Change.Leases {
			if lease > slots.Now() {
				n++
			}
		}
		return n
	}
	testenv.Eventually(t, "serve listens", func() bool { return listeners() == 1 })
	for range 2 {
		answer, err := s.client().Get("http://localhost/api/v1/events?kind=overflow")
		testenv.Must(t, err)
		defer answer.Body.Close()
	}
	if n := listeners(); n != 1 {
		t.Errorf("%d listen for two clients and the count", n)
	}
	s.ends(syscall.SIGTERM)
}

// TestServeMeasuresRoundTrips sees that whoever may read gets what --rtt measures, at once.
func TestServeMeasuresRoundTrips(t *testing.T) {
	t.Parallel()
	r := newTCPRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "20mbit", "--capacity", "100kb")
	testenv.Must(t, netlink.LinkSetUp(testenv.Link(t, "lo")))
	off := r.serve("--listen", "127.0.0.1:9824")
	tcp := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(_ context.Context, network, address string) (c net.Conn, err error) {
		err = r.here.Do(func() (err error) { c, err = net.Dial(network, address); return err })
		return c, err
	}}}
	for query, want := range map[string]int{
		"rtt=true": 403, "rtt=true&running=false": 403, "rtt=true&running=false&running=true": 403, "rtt=true&running=true": 200,
		"rtt=true&running=true&running=false": 200, "rtt=true&by=host&running=true": 403,
		"by=host": 403, "by=flow&running=true": 403, "by=network&by=host": 403, "by=network": 200,
	} {
		answer, err := tcp.Get("http://127.0.0.1:9824/api/v1/top?" + query)
		testenv.Must(t, err)
		if answer.Body.Close(); answer.StatusCode != want {
			t.Errorf("without a token, %q gets %s, not %d", query, answer.Status, want)
		}
	}
	off.ask(200, "top", "rtt=true&running=true", `"interval_ns":0`)
	off.ask(200, "top", "rtt=true&interval=20ms", `"interval_ns": `)
	off.ask(200, "top", "by=host&device=va&direction=egress&network=10.0.0.0/24&interval=20ms", `"talkers": [`)
	off.ask(200, "top", "by=flow&address=10.0.0.2&interval=20ms", `"host": "10.0.0.2"`)
	off.ends(syscall.SIGTERM)
	s := r.serve("--rtt")
	s.ask(400, "top", "rtt=true&interval=1s", "leave interval")
	r.upload()
	testenv.Eventually(t, "round trips while limited", func() bool {
		var got report.RTTs
		testenv.Must(t, json.Unmarshal(s.ask(200, "top", "rtt=true&running=true", "interval_ns"), &got))
		return len(got.Rules) == 1 && got.Rules[0].Limited.Receiver.Samples > 0 && len(got.Rules[0].Hosts) == 1
	})
	text := s.metrics()
	for _, want := range []string{"shapectl_rule_rtt_median_seconds", "shapectl_rule_rtt_samples_total"} {
		if !strings.Contains(text, "\n"+want+`{device="va",direction="egress",limited="1",network="10.0.0.0/24",side="receiver"} `) {
			t.Errorf("the metrics have no %s: %s", want, text)
		}
	}
	s.ends(syscall.SIGTERM)
	if left := r.programs(); len(left) != 1 {
		t.Errorf("programs %v are left on the device", left)
	}
}

// TestServeNamesNoFiles sees that no request reads a file of the server.
func TestServeNamesNoFiles(t *testing.T) {
	r := newRig(t)
	s := r.serve()
	secret := filepath.Join(t.TempDir(), "secret")
	testenv.Must(t, os.WriteFile(secret, []byte("devices: {va: {egress: {any: 77mbit}}}\n"), 0o600))
	for command, with := range map[string]object{
		"apply": {"policy": secret}, "diff": {"policy": secret},
	} {
		if text := s.ask(400, command, with, ""); bytes.Contains(text, []byte("77mbit")) {
			t.Errorf("%s reads the file: %s", command, text)
		}
	}
}

func TestServeWatches(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	write := func(rate string) {
		testenv.Must(t, os.WriteFile(policy, []byte("devices:\n  v*:\n    egress: {10.0.0.0/24: "+rate+"}\n"), 0o600))
	}
	r.env["WATCHDOG_USEC"] = "2000000"
	token := filepath.Join(t.TempDir(), "token")
	testenv.Must(t, os.WriteFile(token, []byte("0123456789abcdef"), 0o600))
	s := r.serve(policy, "--token-file", token) // there is no such policy yet
	s.isTold("WATCHDOG=1")
	write("7mbit")
	testenv.Must(t, os.Remove(token))
	testenv.Must(t, s.cmd.Process.Signal(syscall.SIGHUP))
	s.isTold("RELOADING=1\nMONOTONIC_USEC=")
	s.isTold("READY=1")
	s.says("still using the one that was read before")
	s.says("was read again")
	testenv.Veth(t, "vc", "vd")
	testenv.Eventually(t, "the device that appears has a rule", func() bool { return len(r.show("vc")) == 1 })
	other := r.result(r.command("serve", r.policy("devices: {va: {ingress: {10.0.0.0/24: 1mbit}}}\n"), "--listen", "none", "--socket", s.socket))
	if other.code != exitKernel || !strings.Contains(other.err, "another process listens there") || len(r.show("va")) != 1 {
		t.Errorf("where another one listens, it is not an error after devices are limited: %+v", other)
	}
	s.ends(syscall.SIGTERM)
	if rules := r.show("vc"); len(rules) != 1 || rules[0].Rate != 7e6 || !rules[0].Attached {
		t.Errorf("after it ended, there is %v", rules)
	}
}

// TestServeWithoutItsHistory sees that devices have their rules although the disk is full, or there is a file in place of the history.
func TestServeWithoutItsHistory(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	disk := t.TempDir()
	testenv.Must(t, unix.Mount("none", disk, "tmpfs", 0, "size=600k"))
	defer unix.Unmount(disk, unix.MNT_DETACH)
	file, filler := filepath.Join(disk, "history"), filepath.Join(disk, "filler")
	policy := r.policy("devices:\n  v*:\n    egress: {10.0.0.0/24: 7mbit}\n")
	serves := func(says string) {
		t.Helper()
		s := r.serve(policy, "--history", file)
		s.says(says)
		if rules := r.show("va"); len(rules) != 1 || !rules[0].Attached {
			t.Errorf("there is %v", rules)
		}
		s.ends(syscall.SIGTERM)
		r.ok("flush", "--all")
	}
	_ = os.WriteFile(filler, make([]byte, 600<<10), 0o600)
	serves("no space left on device; until that works there is a gap")
	testenv.Must(t, os.RemoveAll(file))
	testenv.Must(t, os.Remove(filler))
	testenv.Must(t, os.WriteFile(file, []byte("notes"), 0o600))
	serves("it is not a directory; move it away, or name another one; until that works there is a gap")
	if text, err := os.ReadFile(file); string(text) != "notes" {
		t.Errorf("the file is now %q, %v", text, err)
	}
}

// TestWatchdogNoticesALoopThatStands sees that the service manager hears nothing while a loop makes no progress.
func TestWatchdogNoticesALoopThatStands(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "n")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	testenv.Must(t, err)
	defer manager.Close()
	t.Setenv("NOTIFY_SOCKET", socket)
	said := new(transcript)
	d := &daemon{env: &env{err: said}}
	d.add("good", nil, func(context.Context) error { return nil }, nil)
	d.checkLoops(t.Context(), time.Minute)
	message := make([]byte, 100)
	testenv.Must(t, manager.SetReadDeadline(time.Now().Add(10*time.Second)))
	if n, err := manager.Read(message); string(message[:n]) != "WATCHDOG=1" {
		t.Errorf("all loops are well, and it hears %q: %v", message[:n], err)
	}
	d.add("bad", nil, func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}, nil)
	d.checkLoops(t.Context(), time.Millisecond)
	testenv.Eventually(t, "it to say so", func() bool { return strings.Contains(said.String(), "bad does not answer") })
	testenv.Must(t, manager.SetReadDeadline(time.Now()))
	if n, err := manager.Read(message); err == nil {
		t.Errorf("a loop stands, and it hears %q", message[:n])
	}
}

func TestServeFlags(t *testing.T) {
	r := &rig{t, map[string]string{}}
	for says, args := range map[string]string{
		"remove --listen none": "--listen none --socket none --rtt", "needs TLS and a token": "--listen 0.0.0.0:0 --socket none", "needs FILE": "--last-good x",
		"--last-good is empty": "policy.yaml --last-good=", "out of range": "--max-body 1", "1024 is too little": "--history-size 1KB", `"10s" is a time`: "--history-size 10s", "read the token": "--token-file /nonexistent", "both a certificate": "--tls-cert x",
	} {
		r.refused(exitInput, says, append([]string{"serve"}, strings.Fields(args)...)...)
	}
}

func TestArgumentsInABody(t *testing.T) {
	for body, want := range map[string]string{
		`{}`: `{}`, ` {"a": "b", "c": [1.50, true, "x"], "d": null, "e": [], "": ""} `: `{"":[""],"a":["b"],"c":["1.50","true","x"]}`,
		`{"a": {"b": 1}}`: "neither", `{"a": [["b"]]}`: "neither", `{"a": [{}]}`: "neither",
		``: "not a JSON object", `null`: "not a JSON object", `["a"]`: "not a JSON object", `{"a"}`: "not a JSON object", `{"a": 1`: "not a JSON object",
		`{1: 2}`: "not a JSON object", `{"a": [1 2]}`: "not a JSON object", `{"a": 1,}`: "not a JSON object", `{"a": 1 "b": 2}`: "not a JSON object", `{"a": null, "b": 1, "\u0061": 2}`: `"a" was given twice`,
		`{} {}`: "more than one", `{}]`: "more than one",
	} {
		given, err := argumentsIn([]byte(body))
		got, _ := json.Marshal(given)
		if err != nil {
			got = []byte(err.Error())
		}
		if err == nil && string(got) != want || err != nil && !strings.Contains(string(got), want) {
			t.Errorf("%.60s gives %.100s, not %s", body, got, want)
		}
	}
}

// FuzzRequestedLine sees that no request becomes a command line with other flags or commands than it may have.
func FuzzRequestedLine(f *testing.F) {
	f.Add("show", "device", "va", "direction", "--json")
	f.Add("set", "named", "-n", "rate", "x --confirm=1s")
	f.Add("apply", "policy", "a\x00b", "last-good", "x")
	f.Fuzz(func(t *testing.T, command, name1, value1, name2, value2 string) {
		for _, c := range apiCommands {
			if c.name != command {
				continue
			}
			e := &env{out: io.Discard, err: io.Discard, getenv: func(string) string { return "" }}
			line, err := e.requested(c, arguments{name1: {value1}, name2: {value2}})
			if err != nil {
				continue
			}
			root := e.command()
			cmd, rest, err := root.Find(line)
			if err != nil || strings.TrimPrefix(cmd.CommandPath(), "shapectl ") != command {
				t.Fatalf("%q is another command: %v", line, err)
			}
			if cmd.ParseFlags(rest) != nil {
				continue // refused
			}
			for _, name := range []string{"json", "netns", "help", "last-good"} {
				if given := cmd.Flags().Lookup(name); given != nil && given.Changed {
					t.Fatalf("%q sets --%s", line, name)
				}
			}
		}
	})
}

// TestTopAccess sees that a request whose answer may be large takes one of few places.
func TestTopAccess(t *testing.T) {
	for query, want := range map[string]serve.Access{
		"": serve.Computes, "by=tree": serve.Computes, "by=tree&top=1": serve.Computes, "top=1001": serve.Computes, "once=true": serve.Computes,
		"top=1000": serve.Reads, "by=tree&most=400": serve.Reads, "by=tree&of=pool+up&top=100": serve.Reads, "rtt=true&running=true": serve.Reads,
		"by=host": serve.Measures, "rtt=true": serve.Measures,
	} {
		r := httptest.NewRequest(http.MethodGet, "/api/v1/top?"+query, nil)
		if got := (&api{&env{}}).topAccess(r); got != want {
			t.Errorf("%q has access %d, not %d", query, got, want)
		}
	}
}

// TestServeWithoutRights sees that somebody who may not read the rules still has the sandbox.
func TestServeWithoutRights(t *testing.T) {
	program, _ := publicCopy(t)
	cmd := newRig(t).asNobody(program, nil, "serve", "--socket", "none", "--listen", "127.0.0.1:0")
	var said transcript
	cmd.Stderr = &said
	testenv.Must(t, cmd.Start())
	defer cmd.Process.Kill()
	testenv.Eventually(t, "it to listen", func() bool { return strings.Contains(said.String(), "listening on http://127.0.0.1") })
	if !strings.Contains(said.String(), "devices that appear get no rules: ") {
		t.Errorf("it says %s", &said)
	}
	testenv.Must(t, cmd.Process.Signal(syscall.SIGTERM))
	if err := cmd.Wait(); err != nil {
		t.Errorf("told to end, it ends with %v: %s", err, &said)
	}
}
