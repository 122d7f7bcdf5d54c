package events

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/shapectl/shapectl/internal/report"
)

// Limits of a Runner.
const (
	runsPerMinute = 30
	runQueue      = 16 // events that wait for their turn
	runFor        = time.Minute
)

// A Runner runs a command for events, one after another. Events beyond its limits are counted and left out.
type Runner struct {
	command  string
	output   io.Writer
	failed   func(error)
	events   chan report.Event
	done     chan struct{}
	mu       sync.Mutex
	leftOut  uint64 // since the last run
	all      uint64
	begun    []time.Time // of the runs of the last minute
	deadline time.Duration
	ctx      context.Context
	end      context.CancelFunc
}

// NewRunner finds the command, a program without arguments, and is ready to run it. What it prints goes to output.
func NewRunner(command string, output io.Writer, failed func(error)) (*Runner, error) {
	path, err := exec.LookPath(command)
	if err != nil {
		return nil, err
	}
	r := &Runner{
		command: path, output: output, failed: failed, events: make(chan report.Event, runQueue), done: make(chan struct{}), deadline: runFor,
	}
	r.ctx, r.end = context.WithCancel(context.Background())
	go func() {
		defer close(r.done)
		for e := range r.events {
			r.run(e)
		}
	}()
	return r, nil
}

// Run runs the command for an event, soon.
func (r *Runner) Run(e report.Event) {
	select {
	case r.events <- e:
	default:
		r.leave()
	}
}

func (r *Runner) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leftOut++
	r.all++
}

// Close waits for the command to run for the events that wait, but not for longer than for one that hangs. It returns how
// many events were left out.
func (r *Runner) Close() uint64 {
	close(r.events)
	late := time.AfterFunc(r.deadline, r.end)
	<-r.done
	late.Stop()
	r.end()
	return r.all
}

// mayRun reports whether there were few enough runs in the last minute, and counts this one.
func (r *Runner) mayRun(now time.Time) (leftOut uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.begun = slices.DeleteFunc(r.begun, func(t time.Time) bool { return now.Sub(t) >= time.Minute })
	if len(r.begun) >= runsPerMinute || r.ctx.Err() != nil {
		r.leftOut++
		r.all++
		return 0, false
	}
	r.begun = append(r.begun, now)
	leftOut, r.leftOut = r.leftOut, 0
	return leftOut, true
}

func (r *Runner) run(e report.Event) {
	leftOut, ok := r.mayRun(time.Now())
	if !ok {
		return
	}
	var text bytes.Buffer
	if err := e.JSONLine(&text); err != nil {
		r.failed(err)
		return
	}
	ctx, cancel := context.WithTimeout(r.ctx, r.deadline)
	defer cancel()
	// No shell and no arguments: what senders choose is only data.
	cmd := exec.CommandContext(ctx, r.command)
	cmd.Env = os.Environ()
	for _, f := range fieldsOf(text.Bytes()) {
		cmd.Env = append(cmd.Env, f.name+"="+f.value)
	}
	cmd.Env = append(cmd.Env, fmt.Sprintf("SHAPECTL_RUNS_LEFT_OUT=%d", leftOut))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = &text, r.output, r.output
	// A kill also ends what the command has started.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second // for what left its process group
	if err := cmd.Run(); err != nil {
		r.failed(fmt.Errorf("run %s for an event: %w", r.command, err))
	}
}

// fieldsOf are the values of a JSON object that are not null, by key.
func fieldsOf(object []byte) (all []field) {
	var values map[string]any
	decoder := json.NewDecoder(bytes.NewReader(object))
	decoder.UseNumber()
	if decoder.Decode(&values) != nil {
		return nil
	}
	for key, value := range values {
		if value != nil {
			all = append(all, field{"SHAPECTL_" + strings.ToUpper(key), fmt.Sprint(value)})
		}
	}
	slices.SortFunc(all, func(a, b field) int { return strings.Compare(a.name, b.name) })
	return all
}
