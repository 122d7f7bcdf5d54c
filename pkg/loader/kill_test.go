package loader

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// workerEnv makes the test binary a process that works on the hook of va until
// it is killed; its value is the mode and the seed of what to do.
const workerEnv = "SHAPECTL_TEST_WORKER"

func TestMain(m *testing.M) {
	if how := os.Getenv(workerEnv); how != "" {
		if err := work(how, os.Getenv("SHAPECTL_BPFFS")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// work does one thing after another, and says before each what the rules will be.
func work(how, bpffs string) error {
	var mode string
	var seed uint64
	if _, err := fmt.Sscanf(how, "%s %d", &mode, &seed); err != nil {
		return err
	}
	random := rand.New(rand.NewPCG(seed, 0))
	for {
		if err := workOnce(Options{BPFFS: bpffs, Mode: Mode(mode)}, random); err != nil {
			return err
		}
	}
}

// workOnce is one command.
func workOnce(o Options, random *rand.Rand) error {
	n, err := Write(o)
	if err != nil {
		return err
	}
	defer n.Close()
	dev, err := n.Device("va")
	if err != nil {
		return err
	}
	h, err := n.Find("va", policy.Egress)
	if err != nil {
		return err
	}
	rules := map[netip.Prefix]policy.Rule{}
	if h != nil {
		defer h.Close()
		for _, e := range h.Set.Rules() {
			rules[e.Prefix] = e.Rule
		}
	}
	announce := func() { fmt.Println(describeRules(rules)) }
	changed := rule(fmt.Sprintf("10.0.%d.0/24", random.IntN(3)))
	switch action := random.IntN(12); {
	case action == 0 && h != nil:
		clear(rules)
		announce()
		return n.Flush(h)
	case action <= 2 && h != nil:
		old := rules[changed.Prefix]
		delete(rules, changed.Prefix)
		announce()
		_, err := n.Delete(h, old)
		return err
	case action <= 5 && h != nil:
		announce()
		return renewAsAnotherBuild(n, policy.Egress)
	}
	changed.Rate += policy.Rate(random.IntN(1000))
	changed.Algorithm = policy.Algorithm(random.IntN(2))
	if random.IntN(2) == 0 {
		eachHost(&changed)
	}
	rules[changed.Prefix] = changed
	announce()
	_, err = n.Put(dev, policy.Egress, policy.MatchDst, changed)
	return err
}

// describeRules is one line for a set of rules, the same for the same rules.
func describeRules(rules map[netip.Prefix]policy.Rule) string {
	lines := []string{}
	for _, r := range rules {
		lines = append(lines, fmt.Sprint(r))
	}
	slices.Sort(lines)
	return strings.Join(lines, ";")
}

// rulesOf are the rules of va, as describeRules has them; nothing for no hook.
func (r *rig) rulesOf(h *Hook) (rules map[netip.Prefix]policy.Rule) {
	rules = map[netip.Prefix]policy.Rule{}
	if h != nil {
		for _, e := range h.Set.Rules() {
			rules[e.Prefix] = e.Rule
		}
	}
	return rules
}

// Killed at any moment, a command leaves the rules as they were or as they were
// to be, and what rules there are in force; and the next command works.
func TestKilledAtAnyMoment(t *testing.T) {
	kills := 60
	if testing.Short() {
		kills = 10
	}
	eachMode(t, func(t *testing.T, r *rig) {
		if r.direction != policy.Egress {
			t.Fatal("the worker works on egress")
		}
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		random := rand.New(rand.NewPCG(seed, 1))
		for kill := range kills {
			t.Logf("kill %d", kill)
			before := describeRules(r.rulesOf(r.hook("va")))
			// A command takes 10 to 200 ms; the first in a process is often one that makes a hook.
			said := r.killWorker(random.Uint64N(1<<40), time.Duration(random.IntN(250))*time.Millisecond)
			allowed := append([]string{before}, said...)
			allowed = allowed[max(0, len(allowed)-2):]
			r.survived(allowed)
			if t.Failed() {
				return
			}
			if random.IntN(8) == 0 {
				r.flushWhateverIsThere()
				r.nothingLeft()
			}
		}
		r.put(rule("10.0.0.0/24"), rule("10.0.1.0/24", leaky, eachHost))
		r.meters(rule("10.0.0.0/24"), "10.0.0.7", 5)
		r.meters(rule("10.0.1.0/24"), "10.0.1.7", 5)
		r.flushWhateverIsThere()
		r.nothingLeft()
	})
}

// flushWhateverIsThere flushes also what has no rule in it.
func (r *rig) flushWhateverIsThere() {
	r.t.Helper()
	r.flush()
	r.write(func(n *Namespace) error {
		dev, err := n.Device("va")
		if err != nil {
			return err
		}
		return n.discard(dev.Index, r.direction)
	})
}

// killWorker starts a process in the rig's namespaces, kills it some time after
// it has begun, and returns what it said.
func (r *rig) killWorker(seed uint64, after time.Duration) (said []string) {
	r.t.Helper()
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d", workerEnv, r.options.Mode, seed), "SHAPECTL_BPFFS="+r.options.BPFFS)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	if lines.Scan() {
		said = append(said, lines.Text())
	}
	time.AfterFunc(after, func() { cmd.Process.Kill() })
	for lines.Scan() {
		said = append(said, lines.Text())
	}
	cmd.Wait() // killed, as it should be
	if stderr.Len() > 0 {
		r.t.Errorf("a command that started where another was killed: %s", stderr.String())
	}
	return said
}

// survived ends the test unless va has one of the sets of rules, in force.
func (r *rig) survived(allowed []string) {
	r.t.Helper()
	h := r.hook("va")
	rules := r.rulesOf(h)
	if have := describeRules(rules); !slices.Contains(allowed, have) {
		r.t.Errorf("rules are\n%s, and ought to be one of\n%s", have, strings.Join(allowed, "\n"))
	}
	if h != nil && h.State != Attached {
		r.t.Errorf("state of the survivor is %q", h.State)
	}
	for _, rule := range rules {
		r.meters(rule, strings.TrimSuffix(rule.Prefix.Addr().String(), "0")+"7", 3)
	}
	if h == nil {
		out := r.passed.count(r.t).packets
		r.send("10.0.0.7", 300, 1000)
		if seen := r.passed.count(r.t).packets - out; seen != 300 {
			r.t.Errorf("no rule is left, and %d of 300 packets pass", seen)
		}
	}
}

// A command that took a program off its device and was killed before it could
// take its pin away has left a pin that means nothing.
func TestInterruptedTrim(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		one, two := rule("10.0.0.0/24"), rule("10.0.1.0/24", leaky)
		r.put(one, two)
		r.write(func(n *Namespace) error {
			h, err := n.Find("va", r.direction)
			if err != nil {
				return err
			}
			defer h.Close()
			h.Set.Delete(two.Prefix)
			return n.detach(h, policy.Leaky)
		})
		r.inForce(one)
		r.put(two)
		r.inForce(one, two)
		r.meters(one, "10.0.0.7", 5)
		r.meters(two, "10.0.1.7", 5)
		r.flush()
		r.nothingLeft()
	})
}

// A command that was killed amid an upgrade has replaced one program of two.
func TestInterruptedUpgrade(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		one, two := rule("10.0.0.0/24"), rule("10.0.1.0/24", leaky)
		for _, next := range []func(){
			func() { r.put(one) },
			func() { r.put(rule("10.0.2.0/24", eachHost)) },
			func() { r.flush() },
		} {
			r.put(one, two)
			r.halfUpgrade()
			r.inForce(one, two)
			r.meters(one, "10.0.0.7", 5)
			r.meters(two, "10.0.1.7", 5)
			next()
			if r.hook("va") != nil {
				r.meters(one, "10.0.0.7", 5)
				r.meters(two, "10.0.1.7", 5)
				r.flush()
			}
			r.nothingLeft()
		}
	})
}

// halfUpgrade does what renew does until it has replaced the program of gcra.
func (r *rig) halfUpgrade() {
	r.t.Helper()
	r.write(func(n *Namespace) error {
		h, err := n.Find("va", r.direction)
		if err != nil {
			return err
		}
		defer h.Close()
		settings, err := h.settings(h.Device, h.Match())
		if err != nil {
			return err
		}
		settings.Build[0] ^= 0xff
		next, err := h.Set.Derive(h.Set.Size(), settings)
		if err != nil {
			return err
		}
		h.Set.Close()
		h.Set, h.generation = next, "g7"
		dir := filepath.Join(h.path, h.generation)
		if err := os.Mkdir(dir, 0o750); err != nil {
			return err
		}
		if err := next.Pin(dir); err != nil {
			return err
		}
		return n.attach(h, []policy.Algorithm{policy.GCRA})
	})
}
