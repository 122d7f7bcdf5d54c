package loader

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A stop is a step of a command. before is the number of earlier steps with that name.
type stop struct {
	name   string
	before int
}

func (s stop) String() string { return fmt.Sprintf("%s %d", s.name, s.before) }

var errStopped = errors.New("a test has stopped this")

// A stepper records the steps of the commands of one thread.
type stepper struct {
	steps   []stop
	canFail []bool
	fail    stop // fails, as do all later steps with its name
	came    map[string]int
	ahead   func(stop) // called before each step; may be nil
}

func (s *stepper) step(name string, canFail bool) error {
	now := stop{name, s.came[name]}
	s.came[name]++
	if s.ahead != nil {
		s.ahead(now)
	}
	s.steps, s.canFail = append(s.steps, now), append(s.canFail, canFail)
	if s.fail.name == name && s.fail.before <= now.before {
		return errStopped
	}
	return nil
}

// steppers are by thread, because a command stays on its thread.
var steppers sync.Map

// stepping runs a command in which a step fails, and all later steps with its name.
func stepping(fail stop, command func() error) (*stepper, error) {
	s := &stepper{fail: fail, came: map[string]int{}}
	steppers.Store(unix.Gettid(), s)
	defer steppers.Delete(unix.Gettid())
	return s, command()
}

// killEnv makes the test binary run a command and kill itself at a step.
const killEnv = "SHAPECTL_TEST_KILL"

func TestMain(m *testing.M) {
	if how := os.Getenv(killEnv); how != "" {
		killSelf(strings.Split(how, "\t"))
	}
	step.Hook = func(name string, canFail bool) error {
		if s, ok := steppers.Load(unix.Gettid()); ok {
			return s.(*stepper).step(name, canFail)
		}
		return nil
	}
	sweepTime = time.Hour
	os.Exit(m.Run())
}

func killSelf(how []string) {
	came := map[string]int{}
	step.Hook = func(name string, _ bool) error {
		if slices.Contains(how[3:], stop{name, came[name]}.String()) {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		came[name]++
		return nil
	}
	all := slices.Concat(stepped, several, []steppedCommand{onVz})
	c := all[slices.IndexFunc(all, func(c steppedCommand) bool { return c.name == how[0] })]
	if err := command(Options{BPFFS: how[1], Mode: Mode(how[2])}, c.run); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// command opens a namespace for changes, as a command does, and runs f.
func command(o Options, run func(n *Namespace) error) error {
	return netns.In("", func() error {
		n, err := Write(o)
		if err != nil {
			return err
		}
		defer n.Close()
		return run(n)
	})
}

// A steppedCommand is a command that is stopped at each of its steps.
type steppedCommand struct {
	name   string
	clsact bool         // it has other steps without tcx
	ready  func(r *rig) // sets up the state before it
	run    func(n *Namespace) error
}

// stays is a rule that exists before and after each command.
var stays = rule("10.0.9.0/24")

var (
	one     = rule("10.0.0.0/24")
	other   = rule("10.0.0.0/24", leaky, func(r *policy.Rule) { r.Rate = 2e6 })
	two     = rule("10.0.1.0/24", leaky)
	v6      = rule("2001:db8::/32", leaky)
	shadows = rule("10.0.1.0/24", func(r *policy.Rule) { r.Shadow = policy.Shadow{Rate: 5e5, Capacity: 20000} })
)

func putOn(n *Namespace, rules ...policy.Rule) error {
	for _, rule := range rules {
		if err := together(n, rule); err != nil {
			return err
		}
	}
	return nil
}

// together sets rules at one moment.
func together(n *Namespace, rules ...policy.Rule) error {
	_, err := put(n, "va", policy.Egress, policy.MatchDst, rules...)
	return err
}

func withHook(n *Namespace, f func(h *Hook) error) error {
	h, err := n.Find("va", policy.Egress)
	if err == nil && h == nil {
		err = errors.New("there is no hook")
	}
	if err != nil {
		return err
	}
	defer h.Close()
	return f(h)
}

// both are rules for both directions of va, or for egress alone.
func both(egress, ingress []policy.Rule) []policy.Table {
	tables := []policy.Table{{Device: "va", Direction: policy.Egress, Match: policy.MatchDst, Rules: egress}}
	if ingress != nil {
		tables = append(tables, policy.Table{Device: "va", Direction: policy.Ingress, Match: policy.MatchSrc, Rules: ingress})
	}
	for _, t := range tables {
		policy.SortRules(t.Rules)
	}
	return tables
}

// policyOn applies rules for both directions of va.
func policyOn(n *Namespace, o ApplyOptions, egress, ingress []policy.Rule) error {
	_, err := n.Apply(both(egress, ingress), o)
	return err
}

// onBoth makes hooks for both directions of va, of which one keeps a rule.
func onBoth(r *rig) {
	r.write(func(n *Namespace) error {
		return policyOn(n, ApplyOptions{}, []policy.Rule{stays, one}, []policy.Rule{one})
	})
}

func ready(rules ...policy.Rule) func(r *rig) {
	return func(r *rig) { r.put(rules...) }
}

// full leaves no room for another rule in a hook, so that the store must grow for the next one.
func full(r *rig) {
	r.put(stays, two)
	r.write(func(n *Namespace) error {
		return withHook(n, func(h *Hook) error { return h.Set.Load(fillers(leastRules - 2)) })
	})
}

var fillerNet = netip.MustParsePrefix("172.16.0.0/12")

// fillers are rules that matter only by their number.
func fillers(n int) (rules []policy.Rule) {
	for i := range n {
		rules = append(rules, rule(fmt.Sprintf("172.16.%d.%d/32", i/256, i%256)))
	}
	return rules
}

// next are other rules on two hooks, one of them new: rules are added, removed, changed and kept.
func next(n *Namespace, o ApplyOptions) error {
	o.Policy = []byte("next")
	return policyOn(n, o, []policy.Rule{stays, other, shadows, v6}, []policy.Rule{one})
}

func appliedBefore(o ApplyOptions) func(r *rig) {
	return func(r *rig) {
		r.put(stays, one, two)
		r.write(func(n *Namespace) error { return next(n, o) })
	}
}

var stepped = []steppedCommand{
	{"first rule", true, func(r *rig) {}, func(n *Namespace) error { return putOn(n, one) }},
	{"rule of another length", false, ready(stays, one), func(n *Namespace) error { return putOn(n, v6) }},
	{"another algorithm", true, ready(stays, one), func(n *Namespace) error { return putOn(n, other) }},
	{"first shadow", true, ready(stays, one, two), func(n *Namespace) error { return putOn(n, shadows) }},
	{"first rules together", true, func(r *rig) {}, func(n *Namespace) error { return together(n, v6, one) }},
	{"rules together", false, ready(stays, one), func(n *Namespace) error { return together(n, v6, other, shadows) }},
	{"another build", false, func(r *rig) { r.put(stays, one, two); r.renewAsAnotherBuild() }, func(n *Namespace) error { return putOn(n, one) }},
	{"growth", false, full, func(n *Namespace) error { return putOn(n, one) }},
	{"delete", true, ready(stays, two), func(n *Namespace) error {
		return withHook(n, func(h *Hook) error { return deleteFrom(n, []*Hook{h}, two.Prefix) })
	}},
	{"delete together", false, ready(stays, one, v6), func(n *Namespace) error {
		return withHook(n, func(h *Hook) error { return deleteFrom(n, []*Hook{h}, one.Prefix, two.Prefix, v6.Prefix) })
	}},
	{"delete all together", false, ready(one, v6), func(n *Namespace) error {
		return withHook(n, func(h *Hook) error { return deleteFrom(n, []*Hook{h}, one.Prefix, v6.Prefix) })
	}},
	{"rules together on two hooks", false, onBoth, func(n *Namespace) error {
		_, err := n.Put(ApplyOptions{}, both([]policy.Rule{v6, other}, []policy.Rule{two})...)
		return err
	}},
	{"delete together on two hooks", false, onBoth, func(n *Namespace) error {
		hooks, err := n.Hooks()
		defer CloseHooks(hooks)
		if err == nil {
			err = deleteFrom(n, hooks, one.Prefix)
		}
		return err
	}},
	{"flush", true, ready(stays, two), func(n *Namespace) error { return withHook(n, func(h *Hook) error { return n.Flush(h) }) }},
	{"first shadow after a delete that was killed", true, func(r *rig) {
		r.put(stays, two)
		r.killed("delete", stop{"detach a link", 0}, stop{"delete a filter", 0})
	}, func(n *Namespace) error { return putOn(n, shadows) }},
	{"device made again", true, func(r *rig) {
		r.put(stays, one)
		testenv.Must(r.t, netlink.LinkDel(testenv.Link(r.t, "va")))
		r.addDevice()
	}, func(n *Namespace) error { return putOn(n, two) }},
	{"repair", true, func(r *rig) {
		r.put(stays, one)
		r.detachByOthers()
	}, func(n *Namespace) error { return putOn(n, one) }},
	{"apply until confirmed", false, ready(stays, one, two), func(n *Namespace) error { return next(n, ApplyOptions{Confirm: time.Hour}) }},
	{"apply after another", false, appliedBefore(ApplyOptions{}), func(n *Namespace) error {
		return policyOn(n, ApplyOptions{Policy: []byte("last")}, []policy.Rule{stays, one}, nil)
	}},
	{"confirm", false, appliedBefore(ApplyOptions{Confirm: time.Hour}), confirm},
	{"rollback", false, appliedBefore(ApplyOptions{}), func(n *Namespace) error { _, err := n.Rollback(); return err }},
	{"rollback of what is not confirmed", false, appliedBefore(ApplyOptions{Confirm: time.Hour}), func(n *Namespace) error {
		_, err := n.Rollback()
		return err
	}},
}

// A command fails or is killed at its steps. The old rules are in force, or from some step on the new ones. The next
// command works, and nothing is left over. A step is tested between the same two steps in one command at least; in a
// command of many steps, a random sixteenth of all others.
func TestStoppedAtAnyStep(t *testing.T) {
	t.Parallel()
	var tested sync.Map
	commands := slices.Clone(stepped)
	random := rand.New(rand.NewPCG(testenv.Seed(t), 0))
	random.Shuffle(len(commands), func(i, j int) { commands[i], commands[j] = commands[j], commands[i] })
	for _, c := range commands {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			eachMode(t, func(t *testing.T, r *rig) {
				if r.options.Mode == TCX || c.clsact {
					(&stopped{rig: r, steppedCommand: c, tested: &tested}).test()
				}
			})
		})
	}
}

// If the kernel refuses to load programs, a command that needs another one changes nothing.
// Rules in force can still be deleted.
func TestNoProgramLoads(t *testing.T) {
	eachMode(t, func(t *testing.T, r *rig) {
		full(r)
		before, pins := r.state(), r.pins()
		_, err := stepping(stop{"load a program", 0}, func() error {
			if err := r.try(func(n *Namespace) error { return putOn(n, one) }); !errors.Is(err, errStopped) {
				t.Errorf("set: %v", err)
			}
			if now := r.state(); now != before || !slices.Equal(r.pins(), pins) {
				t.Errorf("there is\n%v\nand ought to be\n%v", now, before)
			}
			r.delete(stays)
			r.passes("10.0.9.7")
			r.meters(two, "10.0.1.7", 3)
			r.flush()
			return nil
		})
		testenv.Must(t, err)
		r.nothingLeft()
	})
}

// A stopped is a command that is stopped at each step in turn.
type stopped struct {
	*rig
	steppedCommand
	before, after state
	pins          []string  // before
	tested        *sync.Map // steps between two others, by how they were stopped
	done          bool      // from this step on, the new rules are in force
}

func (s *stopped) test() {
	s.ready(s.rig)
	s.before, s.pins = s.state(), s.rig.pins()
	all, err := stepping(stop{}, func() error { return command(s.options, s.run) })
	testenv.Must(s.t, err)
	s.after = s.state()
	s.tidy()
	s.flushAll()
	fresh, random := false, rand.New(rand.NewPCG(testenv.Seed(s.t), 0))
	for _, how := range []string{"fail", "kill"} {
		s.done = false
		for i, at := range all.steps {
			before, after := "", ""
			if i > 0 {
				before = all.steps[i-1].name
			}
			if i < len(all.steps)-1 {
				after = all.steps[i+1].name
			}
			if before == at.name && after == at.name || how == "fail" && !all.canFail[i] {
				continue
			}
			_, again := s.tested.LoadOrStore([4]string{how, before, at.name, after}, true)
			if again && len(all.steps) > 20 && random.IntN(16) >= testenv.Rounds(s.t, 1) {
				continue
			}
			if !fresh {
				s.ready(s.rig)
				s.pins = s.rig.pins()
			}
			if now := s.state(); now != s.before {
				s.t.Fatalf("it begins with %v, want %v", now, s.before)
			}
			s.stop(how, at)
			if fresh = s.state() == s.before && slices.Equal(s.rig.pins(), s.pins); !fresh {
				s.flushAll()
			}
			if s.t.Failed() {
				s.t.Fatalf("%s at %s, step %d of %d", how, at, i, len(all.steps))
			}
		}
	}
	if fresh {
		s.flushAll()
	}
}

// stop stops the command once, and checks what is left.
func (s *stopped) stop(how string, at stop) {
	s.t.Helper()
	allowed, did := []state{s.before, s.after}, false
	var err error
	if how == "kill" {
		if !s.killed(s.name, at) {
			allowed, did = []state{s.after}, true // the command ended without that step
		}
		now := s.state()
		for i := range now.hooks { // one may be old and one new, until the next command
			if s.before.gone {
				break // rules of a deleted device: attached or not
			}
			if now.hooks[i] != s.before.hooks[i] && now.hooks[i] != s.after.hooks[i] {
				s.t.Errorf("there is\n%s\nbefore the command there was\n%s\nafter it, want\n%s", now.hooks[i], s.before.hooks[i], s.after.hooks[i])
			}
		}
	} else if _, err = stepping(at, func() error { return command(s.options, s.run) }); err == nil {
		allowed, did = []state{s.after}, true // the command does not need that step
	} else if !errors.Is(err, errStopped) {
		s.t.Errorf("it failed by %v", err)
	}
	if s.done {
		allowed = []state{s.after}
	} else if s.before.gone {
		allowed = append(allowed, state{}) // the next command removes rules of a deleted device
	}
	s.write(func(*Namespace) error { return nil })
	now := s.state()
	if !slices.ContainsFunc(allowed, func(a state) bool { return a.hooks == now.hooks }) {
		s.t.Errorf("there is\n%v\nwant one of\n%v\n(%v, %v)", now, allowed, err, did)
	}
	s.done = s.done || !did && !s.before.gone && s.after.hooks != s.before.hooks && now.hooks == s.after.hooks
	s.tidy()
	s.metersAll()
	if how == "kill" {
		s.staysCanGo()
	}
}

// killed runs a command in another process, which is killed at the first of these steps. It
// reports false if the command ended without any of them.
func (r *rig) killed(name string, at ...stop) bool {
	r.t.Helper()
	self, err := os.Executable()
	testenv.Must(r.t, err)
	var names []string
	for _, at := range at {
		names = append(names, at.String())
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), killEnv+"="+strings.Join(append([]string{name, r.options.BPFFS, string(r.options.Mode)}, names...), "\t"))
	out, err := cmd.CombinedOutput()
	if err == nil {
		return false
	}
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		r.t.Fatalf("%s, to be killed at %v: %v: %s", name, at, err, out)
	}
	return true
}

// state describes both directions of va with the policy in force, and the pools.
type state struct {
	hooks  [3]string
	change [2]maps.ChangeState
	gone   bool // the rules are those of a deleted device
}

func (r *rig) state() (s state) {
	r.t.Helper()
	s.hooks[2] = r.pools()
	n, err := Read(r.options)
	testenv.Must(r.t, err)
	defer n.Close()
	policies, err := n.Policies()
	testenv.Must(r.t, err)
	if policies.Lasts {
		policies.Reverted = policies.Now // a killed command may have ended the change
	}
	for i, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		h, err := n.Find("va", d)
		testenv.Must(r.t, err)
		if h == nil {
			continue
		}
		defer h.Close()
		var at uint64
		if s.change[i], at = h.Set.Store.Change(); s.change[i] == maps.Pending && at < maps.Now()+uint64(time.Minute) {
			waitUntil(at) // a killed command has begun to revert it
			s.change[i], _ = h.Set.Store.Change()
		}
		otherBuild, err := h.OtherBuild()
		testenv.Must(r.t, err)
		rules := h.Set.Policy()
		if len(rules) == 0 {
			continue
		}
		shown := slices.DeleteFunc(slices.Clone(rules), func(rule policy.Rule) bool { return fillerNet.Contains(rule.Prefix.Addr()) })
		how := h.State
		if how == Gone { // the rules may be attached to a new device with that name
			how, s.gone = Attached, true
		}
		s.hooks[i] = fmt.Sprintf("%s: %d rules, %v, by another build: %t, pending: %t, policies: %s %s %s", how, len(rules), shown, otherBuild, s.change[i] == maps.Pending,
			policies.Now, policies.Reverted, policies.Undone)
	}
	return s
}

// tidy ends the test if there are pins or programs that no rule needs.
func (r *rig) tidy() {
	r.t.Helper()
	pins, generations := r.pins(), map[string]int{}
	for _, pin := range pins {
		name := filepath.Base(pin)
		if name == asideName || strings.HasPrefix(name, bpffs.TrashPrefix) || name == busyPin {
			r.t.Errorf("left over: %s", pin)
		}
		if _, home := filepath.Split(filepath.Dir(pin)); strings.HasPrefix(name, "g") {
			generations[home]++
		}
	}
	for home, n := range generations {
		if n > 1 {
			r.t.Errorf("%s has %d generations", home, n)
		}
	}
	want := 0
	if h := r.hook("va"); h != nil && h.State == Attached {
		want = 1
	}
	if ours := r.ours("va"); len(ours) != want {
		r.t.Errorf("programs on the device: %v, of %d", ours, want)
	}
}

// metersAll ends the test unless each rule in force meters its packets. Without rules, all packets must pass.
func (r *rig) metersAll() {
	r.t.Helper()
	h := r.hook("va")
	if h == nil || h.State != Attached {
		r.passes("10.0.0.7")
		return
	}
	for _, rule := range h.Set.Policy() {
		if within := rule.Prefix.Addr(); within.Is4() && !fillerNet.Contains(within) {
			r.meters(rule, strings.TrimSuffix(within.String(), "0")+"7", 3)
		}
	}
}

// passes ends the test if any packet is limited.
func (r *rig) passes(far string) {
	r.t.Helper()
	before := r.passed.count(r.t).packets
	r.send(far, 100, 1000)
	if seen := r.passed.count(r.t).packets - before; seen != 100 {
		r.t.Errorf("without a rule, %d of 100 packets to %s pass", seen, far)
	}
}

// staysCanGo deletes the rule stays, unless a change is pending, and sets it again. Packets must
// see both.
func (r *rig) staysCanGo() {
	r.t.Helper()
	h := r.hook("va")
	if h == nil || h.State != Attached {
		return
	}
	if state, _ := h.Set.Store.Change(); state == maps.Pending {
		return
	}
	if _, there := h.Set.Find(stays.Prefix); there {
		r.delete(stays)
		r.passes("10.0.9.7")
		r.put(stays)
		r.meters(stays, "10.0.9.7", 3)
	}
}

// flushAll removes everything, and ends the test if anything is left.
func (r *rig) flushAll() {
	r.t.Helper()
	r.write(func(n *Namespace) error {
		if err := confirm(n); err != nil && !errors.Is(err, ErrConfirmed) && !errors.Is(err, ErrNoChange) && !errors.Is(err, ErrTooLate) {
			return err
		}
		return flushEverything(n)
	})
	r.nothingLeft()
}

// What is left of a record that was never finished is in the way of no later command.
func TestKilledWhileRecording(t *testing.T) {
	r := newRig(t, "", policy.Egress)
	r.put(stays)
	_, err := stepping(stop{"rename pins", 0}, func() error {
		return command(r.options, func(n *Namespace) error { return n.KeepPolicy([]byte("text")) })
	})
	if err == nil {
		t.Error("a record was kept without its last step")
	}
	r.put(one)
	r.flush()
	r.put(one)
	r.inForce(one)
	r.write(func(n *Namespace) error { return n.KeepPolicy([]byte("text")) })
	r.flush()
	r.nothingLeft()
}

// A policy whose change was killed before it began does not come into force with the next change.
func TestKilledBeforeChange(t *testing.T) {
	r := newRig(t, "", policy.Egress)
	r.put(stays)
	r.killed("apply until confirmed", stop{"arm a change", 0})
	r.write(func(n *Namespace) error {
		if err := together(n, one, two); err != nil {
			return err
		}
		if p, err := n.Policies(); len(p.Now) > 0 || err != nil {
			t.Errorf("the policy in force is %q: %v", p.Now, err)
		}
		return nil
	})
}
