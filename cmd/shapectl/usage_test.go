package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
)

// objects are the lines that a command wrote on stderr with -j.
func objects(t *testing.T, text string) (all []map[string]any) {
	t.Helper()
	for line := range strings.Lines(text) {
		var object map[string]any
		if err := json.Unmarshal([]byte(line), &object); err != nil {
			t.Fatalf("not a line of JSON: %q: %v", line, err)
		}
		all = append(all, object)
	}
	return all
}

// Wherever -j stands, an error is one object, and says what it says without -j.
func TestErrorsInJSON(t *testing.T) {
	r := newRig(t)
	for _, c := range badInput {
		plain := r.run(strings.Fields(c.args)...)
		for _, args := range [][]string{append([]string{"-j"}, strings.Fields(c.args)...), append(strings.Fields(c.args), "--json")} {
			if strings.HasSuffix(c.args, " -n") || strings.HasSuffix(c.args, " --rate") {
				continue // -j would be their argument
			}
			got := r.run(args...)
			told := objects(t, got.err)
			if got.out != "" || got.code != exitInput || len(told) != 1 || told[0]["exit_code"] != float64(exitInput) {
				t.Errorf("%q: %+v", args, got)
				continue
			}
			if want := strings.TrimSpace(strings.TrimPrefix(plain.err, "shapectl: ")); told[0]["error"] != want {
				t.Errorf("%q: the error is %q, not %q", args, told[0]["error"], want)
			}
		}
	}
	// An error that is no mistake of the user has another exit code.
	r.env["SHAPECTL_BPFFS"] = "/proc"
	got := r.run("set", "-j", "va", "egress", "any", "--rate", "1mbit")
	if told := objects(t, got.err); len(told) != 1 || told[0]["exit_code"] != float64(got.code) || got.code == exitInput {
		t.Errorf("%+v", got)
	}
}

// A namespace is a name, a path or a process, and commands that are suggested are for the same one.
func TestNetnsIsRepeated(t *testing.T) {
	r := newRig(t)
	name, ns := testenv.NewNamedNetns(t)
	var process *exec.Cmd
	testenv.Must(t, ns.Do(func() error {
		testenv.Veth(t, "va", "vb")
		process = exec.Command("sleep", "60")
		return process.Start()
	}))
	defer func() { process.Process.Kill(); process.Wait() }()
	pid := fmt.Sprint(process.Process.Pid)
	r.ok("set", "-n", pid, "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	for _, netns := range []string{name, "/run/netns/" + name, "/proc/" + pid + "/ns/net", pid} {
		if rules := r.show("-n", netns); len(rules) != 1 {
			t.Errorf("-n %s: rules are %+v", netns, rules)
		}
		for args, says := range map[string]string{
			"show va egress 10.9.0.0/16": "'shapectl -n " + netns + " show va' lists",
			"rollback":                   "see 'shapectl -n " + netns + " show'",
		} {
			r.refused(exitInput, says, append(strings.Fields(args), "-n", netns)...)
		}
	}
	if out := r.ok("apply", "-n", name, "--confirm", "60s", r.policy("devices: {va: {egress: {10.0.0.0/24: 2mbit}}}\n")); !strings.HasSuffix(out, ", unless confirmed by 'shapectl -n "+name+" confirm'\n") {
		t.Errorf("apply says %q", out)
	}
	r.ok("rollback", "-n", name)
	e := &env{netns: "blue"}
	says := "--setup-fq sets it up until 'shapectl -n blue flush va'"
	if got := e.adviseFQ(&loader.UnqueuedError{Device: "va"}); !strings.Contains(got, says) {
		t.Errorf("a device without fq: %s", got)
	}
	r.refused(exitInput, "there is neither /run/netns/999999999 nor a process 999999999; give a name that 'ip netns' lists", "show", "-n", "999999999")
	r.refused(exitInput, "there is no /nosuch", "show", "-n", "/nosuch")
	if out := r.run("__complete", "show", "-n", name[:5]).out; !strings.HasPrefix(out, name+"\n") && !strings.Contains(out, "\n"+name+"\n") {
		t.Errorf("names are completed by %q", out)
	}
	r.ok("flush", "-n", name, "va")
}

// However many rules follow a plan, the others are found.
func TestCompletionAfterManyRules(t *testing.T) {
	r := newRig(t)
	var rules strings.Builder
	for i := range mostSuggested + 1 {
		fmt.Fprintf(&rules, "10.0.%d.%d: gold, ", i/256, i%256)
	}
	r.ok("apply", r.policy("plans: {gold: 1mbit, silver: 2mbit}\ndevices: {vb: {egress: {"+rules.String()+"10.1.0.0: silver}}}\n"))
	if got := r.run("__complete", "show", "--plan", ""); got.out != "gold\nsilver\n:4\n" {
		t.Errorf("%+v", got)
	}
}

// A limit of the process that cannot be raised is named, with what to do.
func TestOpenFiles(t *testing.T) {
	r := newRig(t)
	cmd := r.command("set", "va", "egress", "any", "--rate", "1mbit")
	cmd.Args = append([]string{"sh", "-c", `ulimit -n 12; exec "$0" "$@"`, cmd.Path}, cmd.Args[1:]...)
	cmd.Path = "/bin/sh"
	var errs strings.Builder
	cmd.Stderr = &errs
	err := cmd.Run()
	if err == nil || cmd.ProcessState.ExitCode() != exitMissing || !strings.Contains(errs.String(), "it is 12, and a command needs 256; raise it by 'ulimit -n 1024'") {
		t.Errorf("%v: %s", err, errs.String())
	}
}

// A process that runs commands for weeks keeps none of them, nor what it wrote.
func TestCommandsAreForgotten(t *testing.T) {
	gone := make(chan struct{})
	func() {
		e := &env{out: io.Discard, err: io.Discard, getenv: func(string) string { return "" }}
		if code := e.run([]string{"version"}); code != exitDone {
			t.Fatalf("exits with %d", code)
		}
		runtime.AddCleanup(e, func(gone chan struct{}) { close(gone) }, gone)
	}()
	testenv.Eventually(t, "the end of the command", func() bool {
		runtime.GC()
		select {
		case <-gone:
			return true
		default:
			return false
		}
	})
}
