package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/testenv"
)

var update = flag.Bool("update", false, "write what the commands print now into testdata")

// mainEnv makes the test binary be shapectl: a process of its own that can be killed.
const mainEnv = "SHAPECTL_TEST_MAIN"

// socketEnv is where such a process asks serve.
const socketEnv = "SHAPECTL_TEST_SOCKET"

func TestMain(m *testing.M) {
	if os.Getenv(mainEnv) != "" {
		serveSocket = cmp.Or(os.Getenv(socketEnv), serveSocket)
		main()
	}
	if what := os.Getenv(trafficEnv); what != "" {
		traffic(what)
	}
	flag.Set("test.parallel", "4") // unless the command line says otherwise: tests mostly wait
	os.Exit(m.Run())
}

// A rig is a network namespace with a device va, and its peer vb, and what
// shapectl needs of its environment.
type rig struct {
	t   *testing.T
	env map[string]string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	testenv.NewNetns(t)
	testenv.Veth(t, "va", "vb")
	return &rig{t, map[string]string{"SHAPECTL_BPFFS": testenv.BPFFS(t)}}
}

func (r *rig) bpffs() string { return r.env["SHAPECTL_BPFFS"] }

// bare is a text as if its lines had no end.
func bare(text string) string { return strings.Join(strings.Fields(text), " ") }

type result struct {
	out, err string
	code     int
}

// run runs a command line in this process.
func (r *rig) run(args ...string) result {
	var out, err bytes.Buffer
	e := &env{out: &out, err: &err, getenv: func(name string) string { return r.env[name] }}
	code := e.run(args)
	return result{out.String(), err.String(), code}
}

// ok runs a command line that must succeed, and returns what it prints.
func (r *rig) ok(args ...string) string {
	r.t.Helper()
	got := r.run(args...)
	if got.code != exitDone || got.err != "" {
		r.t.Fatalf("shapectl %s: exit %d, %s", strings.Join(args, " "), got.code, got.err)
	}
	return got.out
}

// prints ends the test unless a command line succeeds and prints just that.
func (r *rig) prints(want string, args ...string) {
	r.t.Helper()
	if got := r.ok(args...); got != want {
		r.t.Errorf("shapectl %s: prints %q, not %q", strings.Join(args, " "), got, want)
	}
}

// refused ends the test unless a command line is refused as the contract wants
// it: an exit code, one line that says all of these, and nothing else.
func (r *rig) refused(code int, says string, args ...string) {
	r.t.Helper()
	got := r.run(args...)
	name := "shapectl " + strings.Join(args, " ")
	r.isRefusal(name, got, code, says)
}

func (r *rig) isRefusal(name string, got result, code int, says string) {
	r.t.Helper()
	if got.code != code {
		r.t.Errorf("%s: exit %d, not %d: %s", name, got.code, code, got.err)
	}
	if got.out != "" {
		r.t.Errorf("%s: prints %q", name, got.out)
	}
	if told := (failure{}); json.Unmarshal([]byte(got.err), &told) == nil { // with -j
		if told.ExitCode != code || !strings.Contains(told.Error, says) {
			r.t.Errorf("%s: does not say %d and %q: %s", name, code, says, got.err)
		}
		return
	}
	// One line, but for mistakes in a policy file: these have a line each before it.
	lines := strings.SplitAfter(got.err, "\n")
	last := len(lines) - 2
	if last < 0 || lines[last+1] != "" || !strings.HasPrefix(lines[last], "shapectl: ") ||
		last > 0 && !strings.HasSuffix(lines[last], "; nothing was changed\n") {
		r.t.Errorf("%s: not one line: %q", name, got.err)
	}
	if !strings.Contains(got.err, says) {
		r.t.Errorf("%s: does not say %q: %s", name, says, got.err)
	}
}

// command is a command line as a process, in the rig's network namespace.
func (r *rig) command(args ...string) *exec.Cmd {
	r.t.Helper()
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), mainEnv+"=1")
	for name, value := range r.env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	return cmd
}

// A shownRule is what tests look at of a rule in JSON.
type shownRule struct {
	Match          string `json:"match"`
	Device         string `json:"device"`
	Direction      string `json:"direction"`
	CIDR           string `json:"cidr"`
	Name           string `json:"name"`
	Note           string `json:"note"`
	Plan           string `json:"plan"`
	Algorithm      string `json:"algorithm"`
	Each           string `json:"each"`
	Rate           uint64 `json:"rate_bits_per_second"`
	Capacity       uint64 `json:"capacity_bytes"`
	Attached       bool   `json:"attached"`
	State          string `json:"state"`
	Hook           string `json:"hook"`
	PassedPackets  uint64 `json:"passed_packets"`
	PassedBytes    uint64 `json:"passed_bytes"`
	DroppedPackets uint64 `json:"dropped_packets"`
	SKBs           uint64 `json:"skbs"`
	LevelBytes     uint64 `json:"level_bytes"`

	Kind              string        `json:"kind"`
	Decides           *bool         `json:"decides"`
	Host              string        `json:"host"`
	Excess            string        `json:"excess"`
	Within            string        `json:"within"`
	Fail              string        `json:"fail"`
	Sentence          string        `json:"sentence"`
	GuaranteeBits     uint64        `json:"guarantee_bits_per_second"`
	SecondLevelBytes  uint64        `json:"second_level_bytes"`
	DroppedBytes      uint64        `json:"dropped_bytes"`
	QuotaLeftBytes    uint64        `json:"quota_left_bytes"`
	RefusedBytes      uint64        `json:"refused_bytes"`
	RefusedPackets    uint64        `json:"refused_packets"`
	BorrowedPackets   uint64        `json:"borrowed_packets"`
	BorrowedBytes     uint64        `json:"borrowed_bytes"`
	GuaranteedPackets uint64        `json:"guaranteed_packets"`
	GuaranteedBytes   uint64        `json:"guaranteed_bytes"`
	Weight            uint16        `json:"weight"`
	GreenPackets      uint64        `json:"green_packets"`
	YellowPackets     uint64        `json:"yellow_packets"`
	RedPackets        uint64        `json:"red_packets"`
	Leased            *bool         `json:"leased"`
	LeaseBits         uint64        `json:"lease_bits_per_second"`
	SafeBits          uint64        `json:"safe_bits_per_second"`
	Adapt             *live.Adapt   `json:"adapt"`
	ActiveBuckets     *uint64       `json:"active_buckets"`
	ActiveSharers     *uint64       `json:"active_sharers"`
	IntervalNS        *uint64       `json:"interval_ns"`
	UseBits           *uint64       `json:"use_bits_per_second"`
	BorrowedBits      *uint64       `json:"borrowed_bits_per_second"`
	UsePercent        *float64      `json:"use_percent"`
	DroppedPercent    *float64      `json:"dropped_percent"`
	RefusedPercent    *float64      `json:"refused_percent"`
	Buckets           []live.Bucket `json:"buckets"`
	Shadow            *struct {
		Rate uint64 `json:"rate_bits_per_second"`
	} `json:"shadow"`
}

func (r *rig) show(args ...string) (rules []shownRule) {
	r.t.Helper()
	out := r.ok(append([]string{"show", "-j"}, args...)...)
	if err := json.Unmarshal([]byte(out), &rules); err != nil {
		r.t.Fatalf("show -j: %v: %s", err, out)
	}
	return rules
}

// send sends packets out of va that a rule for the address decides over.
func (r *rig) send(to string, packets, bytes int) {
	r.t.Helper()
	sender, frame := testenv.NewSender(r.t, "va"), frameTo(to, bytes)
	for range packets {
		if err := sender.Send(frame); err != nil {
			r.t.Fatal(err)
		}
	}
}

// sh runs a script in the namespace of the calling thread, and returns what it prints.
func (r *rig) sh(script string) string {
	r.t.Helper()
	out, err := exec.Command("sh", "-ec", script).CombinedOutput()
	if err != nil {
		r.t.Errorf("%s: %v: %s", script, err, out)
	}
	return string(out)
}

// remove deletes a device.
func (r *rig) remove(device string) {
	r.t.Helper()
	testenv.Must(r.t, netlink.LinkDel(testenv.Link(r.t, device)))
}

func frameTo(to string, bytes int) []byte {
	return testenv.Frame(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr(to), bytes)
}

// pins are all files and directories in the bpffs but the one that is always there.
func (r *rig) pins() []string { return testenv.Pins(r.t, r.bpffs()) }

// golden compares text with a file in testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (go test -update writes it anew); it is now:\n%s", path, got)
	}
}
