package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// Where this machine lacks a peer, or a clock that counts instructions, the
// program runs itself in a virtual machine.

// guestKernel is one that has tcx and all peers.
const guestKernel = "6.12"

// guestModules are what it needs there, with those of peers.
var guestModules = []string{
	"veth", "sch_ingress", "cls_bpf", "cls_matchall", "cls_u32", "act_police", "sch_tbf", "sch_htb", "sch_cake",
	"sch_fq", "sch_fq_codel", "sch_netem",
	"nf_tables", "nft_limit", "nft_compat", "ip_tables", "iptable_raw", "xt_hashlimit",
}

// A guestTask is what the program in the guest is to measure.
type guestTask struct {
	Suite  string
	Only   string // subjects, as the option -only has them
	Rounds int
	Quick  bool
}

// guestMark begins the lines with figures, of all that a guest prints.
const guestMark = "@figure "

// guest does a task in the guest, and writes a line for each figure.
func guest(ctx context.Context, text string, w io.Writer) error {
	var t guestTask
	if err := json.Unmarshal([]byte(text), &t); err != nil {
		return fmt.Errorf("-guest %s: %w", text, err)
	}
	report := func(r Result) error {
		line, err := json.Marshal(r)
		if err == nil {
			_, err = fmt.Fprintf(w, "%s%s\n", guestMark, line)
		}
		return err
	}
	switch t.Suite {
	case "instructions":
		return guestInstructions(ctx, t, report)
	case "queue":
		return guestQueue(ctx, t, report)
	case "accuracy":
		return guestAccuracy(ctx, t, report)
	default:
		return fmt.Errorf("-guest %s: there is no such suite", text)
	}
}

// inGuest has a task done in a guest, with those options of guest.sh, and returns its figures.
func inGuest(ctx context.Context, o options, t guestTask, how ...string) ([]Result, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	task, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	call := append([]string{guestKernel}, how...)
	for _, m := range guestModules {
		call = append(call, "-M", m)
	}
	for _, p := range []string{"tc", "nft", "iptables-legacy"} {
		call = append(call, "-p", p)
	}
	call = append(call, "-f", self+":/bench", "--", "/bench", "-guest", string(task))
	c := exec.CommandContext(ctx, "scripts/guest.sh", call...)
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) } // it has a guest to end
	c.Stderr = o.log
	output, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, fmt.Errorf("start a guest: %w", err)
	}
	var results []Result
	var others bytes.Buffer
	for lines := bufio.NewScanner(output); lines.Scan(); {
		line, marked := strings.CutPrefix(lines.Text(), guestMark)
		if !marked {
			fmt.Fprintln(&others, line)
			continue
		}
		var r Result
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			c.Cancel()
			c.Wait()
			return nil, fmt.Errorf("read a figure of the guest: %w", err)
		}
		o.say("  %s, %s: %.6g %s", r.Case, r.Subject, r.Median, r.Unit)
		results = append(results, r)
	}
	if err := c.Wait(); err != nil {
		last := "the first figure"
		if n := len(results); n > 0 {
			last = results[n-1].Case + ", " + results[n-1].Subject
		}
		return nil, fmt.Errorf("measure in a guest, after %s: %w: %s", last, err, bytes.TrimSpace(others.Bytes()))
	}
	return results, nil
}

// chosen reports whether a subject is in a list, with semicolons in between, of how names begin.
func chosen(list, subject string) bool {
	return slices.ContainsFunc(strings.Split(list, ";"), func(begin string) bool { return strings.HasPrefix(subject, begin) })
}
