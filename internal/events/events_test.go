package events

import (
	"encoding/binary"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

func TestFilter(t *testing.T) {
	packet := report.Event{Kind: report.Overflow, Device: "tap7", Network: "10.0.0.0/16", Address: "10.0.3.7", Name: "alice", Pool: "ap-1"}
	rules := report.Event{Kind: report.RulesChanged, Device: "tap8", Network: "10.1.0.0/16"}
	change := report.Event{Kind: report.ChangeBegun}
	leftOut := report.Event{Kind: report.LeftOut}
	several := report.Event{Kind: report.RulesChanged, Device: "eth1", Changed: []report.ChangedRule{{Network: "192.0.2.0/24"}, {Network: "10.1.3.0/24", Name: "bob"}}}
	for _, tt := range []struct {
		args string
		want []bool // of these five
	}{
		{"", []bool{true, true, true, true, true}},
		{"tap7", []bool{true, false, false, true, false}},
		{"tap*", []bool{true, true, false, true, false}},
		{"ap-1", []bool{true, false, false, true, false}},
		{"al*", []bool{true, false, false, true, false}},
		{"10.0.3.7", []bool{true, false, false, true, false}},
		{"10.0.3.8", []bool{false, false, false, true, false}},
		{"10.1.3.8", []bool{false, true, false, true, true}},
		{"10.0.0.0/15", []bool{true, true, false, true, true}},
		{"eth0 bob tap8", []bool{false, true, false, true, true}},
		{"eth1", []bool{false, false, false, true, true}},
		{"2001:db8::/32", []bool{false, false, false, true, false}},
	} {
		f, err := ParseFilter(strings.Fields(tt.args))
		testenv.Must(t, err)
		got := []bool{f.Matches(packet), f.Matches(rules), f.Matches(change), f.Matches(leftOut), f.Matches(several)}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%q lets %v through, want %v", tt.args, got, tt.want)
		}
	}
	for _, wrong := range []string{"[", "10.0.0.0/99", "2001:db8::/x"} {
		if _, err := ParseFilter([]string{wrong}); err == nil {
			t.Errorf("%q is no error", wrong)
		}
	}
}

func overflow() report.Event {
	level, capacity := uint64(900), uint64(1000)
	e := report.Event{Kind: report.Overflow, Device: "eth0", Direction: "egress", Network: "10.0.0.0/24", Key: "10.0.0.7", Address: "10.0.0.7",
		Excess: "dropped", LevelBytes: &level, CapacityBytes: &capacity}
	e.DescribePacket()
	return e
}

// parseJournal reads an entry as journald does.
func parseJournal(t *testing.T, entry []byte) map[string]string {
	fields := map[string]string{}
	for text := string(entry); text != ""; {
		line, rest, _ := strings.Cut(text, "\n")
		name, value, short := strings.Cut(line, "=")
		if !short {
			n := binary.LittleEndian.Uint64([]byte(rest[:8]))
			value, rest = rest[8:8+n], rest[8+n+1:]
		}
		fields[name], text = value, rest
	}
	return fields
}

func TestJournal(t *testing.T) {
	dir, err := os.MkdirTemp("", "journal") // a socket's path may not be as long as t.TempDir's are
	testenv.Must(t, err)
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "socket")
	if _, err := OpenJournal(path); err == nil {
		t.Error("a journal that does not exist is no error")
	}
	journald, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	testenv.Must(t, err)
	j, err := OpenJournal(path)
	testenv.Must(t, err)
	defer j.Close()
	testenv.Must(t, j.Write(overflow()))
	journald.Close() // it is restarted
	testenv.Must(t, os.Remove(path))
	journald, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	testenv.Must(t, err)
	defer journald.Close()
	e := overflow()
	e.Name = "two\nPRIORITY=0"
	testenv.Must(t, j.Write(e))
	entry := make([]byte, 1<<16)
	n, err := journald.Read(entry)
	testenv.Must(t, err)
	got := parseJournal(t, entry[:n])
	for name, want := range map[string]string{
		"MESSAGE": e.Sentence, "PRIORITY": "4", "SYSLOG_IDENTIFIER": "shapectl", "SHAPECTL_KIND": "overflow", "SHAPECTL_DEVICE": "eth0",
		"SHAPECTL_KEY": "10.0.0.7", "SHAPECTL_LEVEL_BYTES": "900", "SHAPECTL_NAME": e.Name,
	} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
}

// A flood of events runs a program one at a time and only so often, and it learns how many it was not run for.
func TestRunner(t *testing.T) {
	dir := t.TempDir()
	script, log := filepath.Join(dir, "hook"), filepath.Join(dir, "log")
	testenv.Must(t, os.WriteFile(script, []byte("#!/bin/sh\nmkdir "+dir+"/runs || echo twice at once >>"+log+
		"\necho $SHAPECTL_RUNS_LEFT_OUT >>"+log+"\nrmdir "+dir+"/runs\n"), 0o700))
	r, err := NewRunner(script, os.Stderr, func(err error) { t.Error(err) })
	testenv.Must(t, err)
	const events = 1000
	for i := range events {
		if r.Run(overflow()); i%10 == 0 {
			time.Sleep(time.Millisecond)
		}
	}
	leftOut := r.Close()
	text, err := os.ReadFile(log)
	testenv.Must(t, err)
	ran := strings.Fields(string(text))
	if len(ran) == 0 || len(ran) > runsPerMinute || len(ran)+int(leftOut) != events || strings.Contains(string(text), "twice") {
		t.Errorf("of %d events it ran for %d, and %d were left out: %q", events, len(ran), leftOut, text)
	}
}

func TestRunnerEndsWhatHangs(t *testing.T) {
	script := filepath.Join(t.TempDir(), "hook")
	testenv.Must(t, os.WriteFile(script, []byte("#!/bin/sh\nsleep 1000 &\nsleep 1000\n"), 0o700))
	held, output, err := os.Pipe()
	testenv.Must(t, err)
	defer held.Close()
	var failed error
	r, err := NewRunner(script, output, func(err error) { failed = err })
	testenv.Must(t, err)
	r.deadline = 50 * time.Millisecond
	r.Run(overflow())
	if r.Close(); failed == nil {
		t.Error("a program that was killed is no error")
	}
	testenv.Must(t, output.Close())
	testenv.Must(t, held.SetReadDeadline(time.Now().Add(10*time.Second)))
	if _, err := io.ReadAll(held); err != nil {
		t.Errorf("what the program has started goes on: %v", err)
	}
}

func TestSentences(t *testing.T) {
	e := overflow()
	check := func(want string) {
		t.Helper()
		if e.DescribePacket(); e.Sentence != want {
			t.Errorf("%q\nwant %q", e.Sentence, want)
		}
	}
	check("eth0 egress 10.0.0.0/24: the bucket of 10.0.0.7 is full (900 B of 1.00 kB); excess packets are dropped")
	e.Colours = &policy.Colours{Green: policy.ActionPass, Yellow: policy.ActionECN, Red: policy.ActionDrop}
	check("eth0 egress 10.0.0.0/24: packets of 10.0.0.7 are yellow or red, and are dropped")
	if e.Colour != "yellow or red" {
		t.Errorf("the colour is %q", e.Colour)
	}
	e.Colours.Red, e.Excess = policy.SetDSCP(12), "passed"
	check("eth0 egress 10.0.0.0/24: packets of 10.0.0.7 are red, and get AF12, and pass")
	e.Colours, e.Excess = nil, "delayed"
	check("eth0 egress 10.0.0.0/24: the bucket of 10.0.0.7 is over its burst (900 B of 1.00 kB); packets are queued")
	e.Pool, e.Excess = "ap-1", "dropped"
	check(`eth0 egress 10.0.0.0/24: pool "ap-1" starts to refuse packets (900 B of 1.00 kB); first address: 10.0.0.7`)
	e.Kind = report.GuaranteeFails
	check(`eth0 egress 10.0.0.0/24: pool "ap-1" refuses packets of 10.0.0.7 within its guarantee: it has no room for all guarantees`)
	e.Kind, e.Key = report.PenaltyStarts, e.Network
	check("eth0 egress 10.0.0.0/24: a penalty starts for the bucket (900 B of 1.00 kB)")

	e = overflow()
	e.Name, e.Sharer = "alice", "a flow of 10.0.0.7"
	check(`eth0 egress 10.0.0.0/24 ("alice"): a flow of 10.0.0.7 takes more than its share (900 B of 1.00 kB); excess packets are dropped`)
	e.Pool, e.Sharer = "ap-1", "10.0.0.0/24"
	check(`eth0 egress 10.0.0.0/24 ("alice") takes more than its share of pool "ap-1" (900 B of 1.00 kB); excess packets are dropped`)
	e.Sharer = "home-7"
	check(`eth0 egress 10.0.0.0/24 ("alice"): home-7 takes more than its share of pool "ap-1" (900 B of 1.00 kB); excess packets are dropped`)
	e = overflow()
	e.Network, e.Key = "10.0.0.7/32", "10.0.0.7/32"
	check("eth0 egress 10.0.0.7: the bucket is full (900 B of 1.00 kB); excess packets are dropped")
	e.Network, e.Key, e.Name = "2001:db8::/32", "2001:db8::7/128", "a\x1bb"
	check(`eth0 egress 2001:db8::/32 ("a\x1bb"): the bucket of 2001:db8::7 is full (900 B of 1.00 kB); excess packets are dropped`)
}
