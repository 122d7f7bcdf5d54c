package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/internal/testenv/browser"
)

// Traces of these tests: see TestReplayTraces.
const (
	csvTrace     = "testdata/traces/burst.csv"
	pcapTrace    = "testdata/traces/hosts.pcap"
	dscpTrace    = "testdata/traces/dscps.csv"
	colouredPcap = "testdata/traces/colours.pcap"
)

// What replay prints, as a manual would show it.
func TestReplayTranscripts(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	r := &rig{t: t}
	golden(t, "replay.golden", r.transcript(
		"replay "+csvTrace+" --rate 8mbit --capacity 3000",
		"replay "+csvTrace+" --rate 8mbit --capacity 3000 -j",
		"replay "+csvTrace+" --rate 8mbit --capacity 3000 -j --excess ecn --engine kernel",
		"replay "+csvTrace+" --rate 8mbit --capacity 3000 --algorithm leaky --penalty 5ms --engine kernel",
		"replay "+csvTrace+" --cir 8mbit --cbs 7000 --excess pass -j --summary",
		"replay "+csvTrace+" --rate 8mbit --capacity 3000 -j --algorithm leaky --excess delay --ecn-above 2ms --engine kernel",
		"replay "+csvTrace+" --rate 8mbit --capacity 1400 -j --excess delay --queue 1600 --ecn-above never --engine kernel",
		"replay "+csvTrace+" --rate 8mbit --capacity 2000 --excess delay --queue 1000 --engine kernel",
		"replay "+csvTrace+" --rate 8mbit --capacity 3000 --excess delay --algorithm leaky --ecn-above 2ms --summary -j",
		"replay "+pcapTrace+" --rate 64kbit --capacity 2000 --engine kernel",
		"replay "+pcapTrace+" 10.0.0.0/24 --rate 64kbit --capacity 2000 --each host --algorithm leaky --excess delay --ecn-above 100ms --engine kernel",
		"replay "+pcapTrace+" 10.0.0.0/24 --rate 64kbit --capacity 2000 --excess delay --queue 6000 -j --engine kernel",
		"replay "+pcapTrace+" 10.0.0.0/24 --rate 64kbit --capacity 2000 --excess delay --queue 6000 --order sparse-first -j --engine kernel",
		"replay "+csvTrace+" --rate 8mbit --capacity 2000 --excess delay --order sparse-first",
		"replay "+pcapTrace+" 10.0.0.0/24 --rate 64kbit --capacity 2000 --each host",
		"replay "+pcapTrace+" 10.0.0.0/24 2001:db8::/32 --rate 64kbit --capacity 2000 --each flow --excess ecn -j",
		"replay "+pcapTrace+" 192.0.2.0/24 --match src --rate 64kbit --capacity 2000 --each /26 --overhead ethernet --engine kernel",
		"replay "+pcapTrace+" 198.51.100.0/24 --rate 64kbit",
		"replay "+csvTrace+" --rate 8mbit --capacity 3000 --share flow --engine kernel",
		"replay "+pcapTrace+" 10.0.0.0/24 --rate 64kbit --capacity 4000 --share host --engine kernel",
		"replay "+pcapTrace+" --policy testdata/traces/pools.yaml --device eth0 --direction egress --engine kernel",
		"replay "+pcapTrace+" --policy testdata/traces/pools.yaml --device eth0 --direction egress --engine kernel -j",
		"replay "+csvTrace+" --cir 8mbit --cbs 2000 --algorithm srtcm --ebs 1500 --engine kernel -j",
		"replay "+dscpTrace+" --cir 8mbit --cbs 2000 --algorithm rfc4115 --eir 4mbit --ebs 1500 --colour-aware --yellow dscp:AF12 --red ecn --engine kernel -j",
		"replay "+dscpTrace+" --cir 8mbit --cbs 2000 --algorithm trtcm --pir 9mbit --pbs 3000 --colour-aware --engine kernel",
		"replay "+dscpTrace+" --cir 8mbit --cbs 1 --algorithm trtcm --pir 9mbit --pbs 600 --engine kernel -j --summary",
		"replay "+colouredPcap+" 10.0.0.0/24 --cir 16kbit --cbs 2000 --algorithm srtcm --ebs 3000 --each host --colour-aware --engine kernel",
		"replay "+colouredPcap+" --policy testdata/traces/colours.yaml --device eth0 --direction egress --engine kernel",
		"replay "+colouredPcap+" --policy testdata/traces/colours.yaml --device eth0 --direction egress --engine kernel -j",
		"replay "+csvTrace+" --pps 1 --pps-burst 2 --engine kernel",
		"replay testdata/traces/nothing.csv --rate 64kbit",
		"replay testdata/traces/cut.pcap --rate 64kbit --capacity 2000",
	))
}

func TestReplayRefusals(t *testing.T) {
	r := &rig{t: t}
	dir := t.TempDir()
	write := func(name, data string) string {
		path := filepath.Join(dir, name)
		testenv.Must(t, os.WriteFile(path, []byte(data), 0o644))
		return path
	}
	radio, err := os.ReadFile(pcapTrace)
	testenv.Must(t, err)
	radio[20] = 127
	link := filepath.Join(dir, "link.html")
	testenv.Must(t, os.Symlink(write("target", ""), link))
	for _, c := range []struct{ args, says string }{
		{"", "takes"},
		{"x.csv", "--rate"},
		{"/no/such.csv --rate 1mbit", "/no/such.csv: no such file"},
		{dir + " --rate 1mbit", "is a directory"},
		{csvTrace + " --rate unlimited --pps 1", "unlimited would pass everything; write a rate such as 10mbit, or leave --rate out beside --pps"},
		{csvTrace + " --rate 1mbit --queue 50ms", "queue has no use with excess drop"},
		{csvTrace + " --rate 1mbit --engine warp", "use one of model, kernel"},
		{csvTrace + " --rate 1mbit -n blue", "-n has no meaning here"},
		{csvTrace + " --rate 1mbit --plot x.png", "name the file .html"},
		{csvTrace + " --rate 1mbit --plot=", "--plot is empty"},
		{csvTrace + " --rate 1mbit --plot /no/such/x.html", "/no/such"},
		{csvTrace + " --rate 1mbit --plot " + link, "is not a regular file"},
		{csvTrace + " 10.0.0.0/8 --rate 1mbit", "no addresses"},
		{csvTrace + " --rate 1mbit --each host", "no addresses"},
		{pcapTrace + " --rate 1mbit --share host --nat", "does not tell which hosts are behind NAT; leave --nat out"},
		{pcapTrace + " --rate 1mbit --within uplink", "--within needs the pools of a policy"},
		{csvTrace + " --rate 1mbit --match src", "no addresses"},
		{csvTrace + " --rate 1mbit --algorithm srtcm --colour-aware", "only with a column dscp"},
		{pcapTrace + " 10.0.0.0/8 10.0.0.0/8 --rate 1mbit", "10.0.0.0/8 is given twice"},
		{pcapTrace + " 10.0.0.0/24 --each /64 --rate 1mbit", "/64 does not divide 10.0.0.0/24"},
		{write("empty.csv", "") + " --rate 1mbit", "empty.csv: it is empty"},
		{write("negative.csv", "0,1\n-1,5\n") + " --rate 1mbit", `negative.csv: line 2: time_ns "-1"`},
		{write("zero.csv", "0,1\n1,0\n") + " --rate 1mbit", "zero.csv: line 2: a packet of 0 bytes"},
		{write("giant.csv", "0,16777216\n") + " --rate 1mbit", "giant.csv: line 1: a packet of 16777216 bytes"},
		{write("late.csv", "99999999999999999999,1\n") + " --rate 1mbit", "out of range"},
		{write("elf", "\x7fELF") + " --rate 1mbit", "begins with 7f 45 4c 46"},
		{write("radio.pcap", string(radio)) + " --rate 1mbit", "link type 127 (see pcap-linktype(7))"},
	} {
		r.refused(exitInput, c.says, append([]string{"replay"}, strings.Fields(c.args)...)...)
	}
}

// A chart is drawn, of a trace that comes by a pipe, too.
func TestReplayPlots(t *testing.T) {
	r := &rig{t: t}
	capture, err := os.Open(pcapTrace)
	testenv.Must(t, err)
	defer capture.Close()
	path := filepath.Join(t.TempDir(), "chart.html")
	cmd := r.command("replay", "-", "10.0.0.0/8", "--rate", "64kbit", "--capacity", "2000", "--plot", path)
	cmd.Stdin = capture
	if got := r.result(cmd); got.code != exitDone || got.err != "" || !strings.Contains(got.out, "offered") {
		t.Fatalf("%+v", got)
	}
	tab := browser.New(t)
	tab.Open("file://" + path)
	tab.Until("two plots", `document.querySelectorAll("canvas").length === 2 && document.querySelectorAll(".legend li").length === 7`)
	if text := tab.Text("main"); !strings.Contains(text, "10.0.0.0/8 as a whole gets 64kbit (8 kB/s), burst 2 kB (250 ms); excess is dropped (gcra)") || !strings.Contains(strings.Join(strings.Fields(text), " "), "burst 2.00 kB") {
		t.Errorf("the page says %s", text)
	}
	tab.Harmless("file://" + path)
}

// Without permissions the kernel's engine says what to do; the model's needs none.
func TestReplayAsNobody(t *testing.T) {
	testenv.Root(t)
	program, dir := publicCopy(t)
	r := &rig{t: t}
	path := filepath.Join(dir, "trace.csv")
	testenv.Must(t, os.WriteFile(path, []byte("0,1000\n"), 0o644))
	line := []string{"replay", path, "--rate", "1mbit", "--engine"}
	r.isRefusal("kernel", r.result(r.asNobody(program, nil, append(line, "kernel")...)), exitMissing, "or use --engine model")
	if got := r.result(r.asNobody(program, nil, append(line, "model")...)); got.code != exitDone || got.err != "" {
		t.Errorf("%+v", got)
	}
}

// endless is a CSV that goes on until nobody reads it.
type endless struct {
	packets uint64
	rest    []byte
}

func (e *endless) Read(p []byte) (n int, err error) {
	for len(e.rest) < len(p) {
		e.packets++
		e.rest = fmt.Appendf(e.rest, "%d,1000\n", e.packets*1000)
	}
	n = copy(p, e.rest)
	e.rest = e.rest[n:]
	return n, nil
}

// Interrupted, it tells what it has; with nobody to tell, it ends.
func TestReplayEndsEarly(t *testing.T) {
	r := &rig{t: t}
	t.Run("interrupted", func(t *testing.T) {
		cmd := r.command("replay", "-", "--rate", "1gbit")
		in, err := cmd.StdinPipe()
		testenv.Must(t, err)
		var out, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &stderr
		testenv.Must(t, cmd.Start())
		packets := &endless{}
		_, err = io.CopyN(in, packets, 1<<20) // when this returns, much of it has been read
		testenv.Must(t, err)
		go io.Copy(in, packets)
		testenv.Must(t, cmd.Process.Signal(syscall.SIGINT))
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != exitDegraded || !strings.Contains(stderr.String(), "interrupted after ") || !strings.Contains(out.String(), "offered") {
			t.Errorf("exit %d, %s%s", code, out.String(), stderr.String())
		}
	})
	t.Run("broken pipe", func(t *testing.T) {
		cmd := r.command("replay", "-", "--rate", "1gbit", "-j")
		in, err := cmd.StdinPipe()
		testenv.Must(t, err)
		out, err := cmd.StdoutPipe()
		testenv.Must(t, err)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		testenv.Must(t, cmd.Start())
		go io.Copy(in, &endless{})
		if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || !strings.HasPrefix(line, `{"time_ns":1000,`) {
			t.Errorf("%q, %v", line, err)
		}
		out.Close()
		err = cmd.Wait()
		var exit *exec.ExitError
		if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !errors.As(err, &exit) || !ok || status.Signal() != syscall.SIGPIPE || stderr.Len() > 0 {
			t.Errorf("%v, %s", err, stderr.String())
		}
	})
	t.Run("bad line", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "bad.csv")
		testenv.Must(t, os.WriteFile(path, []byte("0,1\n1,1\n2,x\n"), 0o644))
		got := r.run("replay", path, "--rate", "1mbit", "-j")
		if got.code != exitInput || strings.Count(got.out, "\n") != 2 || !strings.Contains(got.err, "bad.csv: line 3: ") {
			t.Errorf("%+v", got)
		}
	})
	t.Run("full disk", func(t *testing.T) {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		testenv.Must(t, err)
		defer full.Close()
		for _, args := range [][]string{{}, {"-j"}, {"-j", "--summary"}} {
			var stderr bytes.Buffer
			e := &env{out: full, err: &stderr, getenv: os.Getenv}
			if code := e.run(append([]string{"replay", csvTrace, "--rate", "1gbit"}, args...)); code != exitDegraded || !strings.Contains(stderr.String(), "could not be written") {
				t.Errorf("%v: exit %d, %s", args, code, stderr.String())
			}
		}
	})
}

// A long capture of ever new flows takes no more memory than a short one.
func TestReplayStreams(t *testing.T) {
	const packets, captured = 800_000, 240 // 205 MB
	from, into := io.Pipe()
	var most uint64
	go func() {
		out := bufio.NewWriterSize(into, 1<<16)
		w := pcapgo.NewWriterNanos(out)
		err := w.WriteFileHeader(captured, layers.LinkTypeEthernet)
		frame := frameTo("10.0.0.1", 1000)
		var m runtime.MemStats
		for i := 0; i < packets && err == nil; i++ {
			frame[31], frame[32], frame[33] = byte(i>>16), byte(i>>8), byte(i)
			info := gopacket.CaptureInfo{Timestamp: time.Unix(0, int64(i)*10_000), CaptureLength: captured, Length: len(frame)}
			err = w.WritePacket(info, frame[:captured])
			if i%40_000 == 39_999 { // the reader has begun
				runtime.GC() // what is measured is what is kept, not garbage, of which tests before leave room for more
				runtime.ReadMemStats(&m)
				most = max(most, m.HeapAlloc)
			}
		}
		into.CloseWithError(errors.Join(err, out.Flush()))
	}()
	var out, stderr bytes.Buffer
	e := &env{in: from, out: &out, err: &stderr, getenv: os.Getenv}
	var before runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	code := e.run([]string{"replay", "-", "--rate", "1gbit", "--capacity", "2000", "--each", "flow", "--plot", filepath.Join(t.TempDir(), "x.html")})
	if code != exitDone || !strings.Contains(out.String(), fmt.Sprintf("offered   %d", packets)) {
		t.Fatalf("exit %d, %s%s", code, out.String(), stderr.String())
	}
	if used := most - min(most, before.HeapAlloc); used > 64<<20 {
		t.Errorf("%d MB of heap", used>>20)
	} else {
		t.Logf("%d MB of heap", used>>20)
	}
}

// A queue may be shorter than a packet; and a policy may have queues.
func TestReplayQueues(t *testing.T) {
	r := &rig{t: t}
	for _, args := range []string{
		"--rate 8kbit --algorithm leaky --capacity 9", "--rate 8kbit --capacity 2000 --queue 9", "--rate 8kbit --capacity 1 --queue 1000",
	} {
		out := r.ok(append(strings.Fields("replay "+csvTrace+" --excess delay -j --summary"), strings.Fields(args)...)...)
		if !strings.Contains(out, `"excess": "delay"`) || strings.Contains(out, `"dropped_packets": 0`) {
			t.Errorf("%s: %s", args, out)
		}
	}
	file := filepath.Join(t.TempDir(), "policy.yaml")
	testenv.Must(t, os.WriteFile(file, []byte(`
defaults: {excess: delay, ecn-above: never}
devices: {eth0: {egress: {10.0.0.9: {rate: 64kbit, algorithm: leaky, capacity: 2000}, 10.0.0.0/24: {rate: 64kbit, excess: drop, capacity: 2000}}}}
`), 0o644))
	rows := r.ok("replay", pcapTrace, "-j", "--policy", file, "--device", "eth0", "--direction", "egress")
	delayed := 0
	for row := range strings.Lines(rows) {
		if strings.Contains(row, `"verdict":"delay"`) {
			delayed++
			if !strings.Contains(row, `"rule":"10.0.0.9/32"`) {
				t.Errorf("delayed: %s", row)
			}
		}
	}
	if delayed != 4 {
		t.Errorf("%d packets were delayed:\n%s", delayed, rows)
	}
}
