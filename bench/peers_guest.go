package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// Some peers, and a clock that counts instructions, are not on every machine. For them
// the program runs itself in a virtual machine.

// guestKernel has tcx and all peers.
const guestKernel = "6.12"

// guestModules are the kernel modules of the suites and the peers.
var guestModules = []string{
	"veth", "sch_ingress", "cls_bpf", "cls_matchall", "cls_u32", "act_police", "sch_tbf", "sch_htb", "sch_cake",
	"sch_fq", "sch_fq_codel", "sch_netem", "tcp_bbr",
	"nf_tables", "nft_limit", "nft_compat", "ip_tables", "iptable_raw", "xt_hashlimit",
}

// A guestTask tells the program in the guest what to measure.
type guestTask struct {
	Suite string
	Only  string // subjects, as the option -only has them
	Quick bool
}

// guestMark begins the lines with samples in the output of a guest.
const guestMark = "@samples "

// guest runs a task in the guest, and writes a line with the samples of each figure.
func guest(ctx context.Context, text string, w io.Writer) error {
	var t guestTask
	if err := json.Unmarshal([]byte(text), &t); err != nil {
		return fmt.Errorf("-guest %s: %w", text, err)
	}
	i := slices.IndexFunc(suites, func(s suite) bool { return s.name == t.Suite && s.guest != nil })
	if i < 0 {
		return fmt.Errorf("-guest %s: the suite does not exist", text)
	}
	var failed error
	err := suites[i].guest(ctx, options{quick: t.Quick, only: t.Only, log: w, report: func(t measurement) {
		line, err := json.Marshal(t)
		if err == nil {
			_, err = fmt.Fprintf(w, "%s%s\n", guestMark, line)
		}
		failed = errors.Join(failed, err)
	}})
	return errors.Join(err, failed)
}

// inGuest runs a task in a guest, with options of guest.sh, and reports its samples.
func inGuest(ctx context.Context, o options, t guestTask, how []string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	task, err := json.Marshal(t)
	if err != nil {
		return err
	}
	call := append([]string{guestKernel}, how...)
	for _, m := range guestModules {
		call = append(call, "-M", m)
	}
	call = append(call, "-p", "ip", "-p", "tc", "-p", "nft", "-p", iptables, "-f", self+":/bench",
		"--", "/bench", "-guest", string(task))
	c := exec.CommandContext(ctx, "scripts/guest.sh", call...)
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) } // guest.sh must stop its guest
	c.Stderr = o.log
	output, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return fmt.Errorf("start a guest: %w", err)
	}
	last := "the first figure"
	var others bytes.Buffer
	for lines := bufio.NewScanner(output); lines.Scan(); {
		line, marked := strings.CutPrefix(lines.Text(), guestMark)
		if !marked {
			fmt.Fprintln(&others, line)
			continue
		}
		var t measurement
		if err := json.Unmarshal([]byte(line), &t); err != nil {
			c.Cancel()
			c.Wait()
			return fmt.Errorf("read a figure of the guest: %w", err)
		}
		o.report(t)
		last = t.Case + ", " + t.Subject
	}
	if err := c.Wait(); err != nil {
		return fmt.Errorf("measure in a guest, after %s: %w: %s", last, err, bytes.TrimSpace(others.Bytes()))
	}
	return nil
}
