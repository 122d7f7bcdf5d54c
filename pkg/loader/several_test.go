package loader

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/hurry"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// severalDevices have two hooks each: enough that a command expedites grace periods.
var severalDevices = []string{"va", "w0", "w1", "w2"}

var bothDirections = []policy.Direction{policy.Egress, policy.Ingress}

// severalHooks sets a rule on all of these hooks, and a second one on every other device.
func severalHooks(r *rig) {
	var tables []policy.Table
	for i, name := range severalDevices {
		for _, d := range bothDirections {
			t := policy.Table{Device: name, Direction: d, Match: d.FarSide(), Rules: []policy.Rule{one}}
			if i%2 == 0 {
				t.Rules = append(t.Rules, stays)
			}
			policy.SortRules(t.Rules)
			tables = append(tables, t)
		}
	}
	r.write(func(n *Namespace) error { _, err := n.Apply(tables, ApplyOptions{}); return err })
}

func withHooks(n *Namespace, f func(hooks []*Hook) error) error {
	hooks, err := n.Hooks()
	defer CloseHooks(hooks)
	if err != nil {
		return err
	}
	return f(hooks)
}

// several are commands that change several hooks, one after the other.
var several = []steppedCommand{
	{"flush several hooks", true, severalHooks, func(n *Namespace) error {
		return withHooks(n, func(hooks []*Hook) error { return n.Flush(hooks...) })
	}},
	{"flush all hooks", true, severalHooks, flushEverything},
}

// severalStates are the state and the rules of each hook of several devices.
func (r *rig) severalStates() map[string]string {
	r.t.Helper()
	n, err := Read(r.options)
	testenv.Must(r.t, err)
	defer n.Close()
	states := map[string]string{}
	testenv.Must(r.t, withHooks(n, func(hooks []*Hook) error {
		for _, h := range hooks {
			states[fmt.Sprint(h.Name(), " ", h.Direction)] = fmt.Sprint(h.State, h.Set.Policy())
		}
		return nil
	}))
	return states
}

// wholeHooks ends the test unless each hook has its state before a command or after it, and its
// program. After the next command, healed, nothing else may be left.
func (r *rig) wholeHooks(before, after map[string]string, healed bool) (now map[string]string) {
	r.t.Helper()
	now = r.severalStates()
	direction := r.direction
	defer func() { r.direction = direction }()
	for _, name := range severalDevices {
		for _, r.direction = range bothDirections {
			hook := fmt.Sprint(name, " ", r.direction)
			state, has := now[hook]
			if state != before[hook] && state != after[hook] {
				r.t.Errorf("%s is\n%s\nbefore the command it was\n%s\nafter it, want\n%s", hook, state, before[hook], after[hook])
			}
			want := 0
			if has {
				want = 1
			}
			if ours := r.ours(name); len(ours) < want || healed && len(ours) > want {
				r.t.Errorf("%s has the programs %v, of %d", hook, ours, want)
			}
		}
	}
	hooks := 0
	for _, pin := range r.pins() {
		name := filepath.Base(pin)
		if isHook, _ := filepath.Match("*gress-*", name); isHook {
			hooks++
		}
		if healed && (name == busyPin || strings.HasPrefix(name, bpffs.TrashPrefix)) {
			r.t.Errorf("left over: %s", pin)
		}
	}
	if healed && hooks != len(now) {
		r.t.Errorf("%d hooks have pins, of %v", hooks, now)
	}
	return now
}

// leftOut leaves out all steps of a name but the one in the middle, and in one of three cases the first and the last, more
// often with more rounds.
func (s *stepper) leftOut(at stop, random *rand.Rand, rounds int) bool {
	last := s.came[at.name] - 1
	return at.before != last/2 && (at.before != 0 && at.before != last || random.IntN(3) >= rounds)
}

// A flush of several hooks is killed at steps of each name. Each hook then has its rules and its program, or neither. The next
// command completes the detaching and stops expediting RCU. A second flush does the rest.
func TestSeveralHooksKilled(t *testing.T) {
	t.Parallel()
	for _, c := range several {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			eachMode(t, func(t *testing.T, r *rig) {
				for _, name := range severalDevices[1:] {
					testenv.Veth(t, name, name+"p")
				}
				c.ready(r)
				before := r.severalStates()
				all, err := stepping(stop{}, func() error { return command(r.options, c.run) })
				testenv.Must(t, err)
				after := r.severalStates()
				partly, random := false, rand.New(rand.NewPCG(testenv.Seed(t), 0))
				for _, at := range all.steps {
					if all.leftOut(at, random, testenv.Rounds(t, 1)) {
						continue
					}
					c.ready(r)
					if !r.killed(c.name, at) {
						continue // its steps differ, because ready left another state
					}
					r.wholeHooks(before, after, false)
					r.write(func(*Namespace) error { return nil })
					now := r.wholeHooks(before, after, true)
					isPart := !maps.Equal(now, before) && !maps.Equal(now, after)
					partly = partly || isPart
					if detaches := at.name == "detach a link" || at.name == "delete a filter"; detaches && isPart && strings.HasPrefix(c.name, "flush") {
						t.Errorf("rules of some hooks were in force when others were detached: %v", now)
					}
					r.write(c.run)
					if now = r.wholeHooks(before, after, true); !maps.Equal(now, after) {
						t.Errorf("once more: %v", now)
					}
					if t.Failed() {
						t.Fatalf("that was a kill at %s", at)
					}
				}
				if !partly {
					t.Error("no kill came between two hooks")
				}
				r.flushAll()
			})
		})
	}
}

// Hooks of another layout are detached together, with expedited grace periods.
func TestHooksOfAnotherLayoutTogether(t *testing.T) {
	if err := unix.Access(hurry.File, unix.W_OK); err != nil {
		testenv.Skip(t, "grace periods cannot be expedited here: "+err.Error())
	}
	r := newRig(t, TCX, policy.Egress)
	for _, name := range severalDevices[1:] {
		testenv.Veth(t, name, name+"p")
	}
	severalHooks(r)
	r.anotherLayout()
	all := &stepper{came: map[string]int{}}
	slow := 0
	old := step.Hook
	defer func() { step.Hook = old }()
	step.Hook = func(name string, canFail bool) error {
		if name == "detach a link" && expedited() == "0" {
			slow++
		}
		return all.step(name, canFail)
	}
	r.write(flushEverything)
	if hooks := 2 * len(severalDevices); all.came["detach a link"] != hooks || slow == hooks { // a command with a /sys of its own may relax them
		t.Errorf("of %d hooks %d were discarded, %d without expedited grace periods", hooks, all.came["detach a link"], slow)
	}
	r.nothingLeft()
}

func expedited() string {
	number, _ := os.ReadFile(hurry.File)
	return strings.TrimSpace(string(number))
}

// A reading command also ends the expedited grace periods of a killed one.
func TestReadEndsHurry(t *testing.T) {
	// Tests of other packages may be in a hurry; only the administrator's number stays.
	if now := expedited(); unix.Access(hurry.File, unix.W_OK) != nil || now != "0" && now != hurry.Number {
		testenv.Skip(t, "grace periods cannot be expedited here, or the administrator has set them")
	}
	testenv.NewNetns(t)
	o := Options{BPFFS: testenv.BPFFS(t)}
	testenv.Must(t, os.WriteFile(hurry.File, []byte(hurry.Number), 0))
	testenv.Eventually(t, "an end of the hurry", func() bool { // other tests may be in one
		n, err := Read(o)
		testenv.Must(t, err)
		n.Close()
		return expedited() != hurry.Number
	})
}

// A command needs no open file for each hook: there may be more hooks than files that a process may open.
func TestNoFileForEachHook(t *testing.T) {
	r := newRig(t, Auto, policy.Egress)
	for _, name := range severalDevices[1:] {
		testenv.Veth(t, name, name+"p")
	}
	files := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		testenv.Must(t, err)
		return len(entries)
	}
	var at []int
	old := step.Hook
	defer func() { step.Hook = old }()
	step.Hook = func(name string, _ bool) error {
		if name == "attach a program to tcx" || name == "add a filter" || name == "rename pins" {
			at = append(at, files())
		}
		return nil
	}
	same := func(what string) {
		t.Helper()
		if len(at) < 2*len(severalDevices) || at[len(at)-1] > at[1]+2 {
			t.Errorf("%s: files that are open: %v", what, at)
		}
		at = nil
	}
	severalHooks(r)
	same("apply")
	n, err := Read(r.options)
	testenv.Must(t, err)
	before := files()
	testenv.Must(t, withHooks(n, func(hooks []*Hook) error {
		if now := files(); now > before || len(hooks) != 2*len(severalDevices) {
			t.Errorf("%d hooks: %d files are open, and were %d", len(hooks), now, before)
		}
		return nil
	}))
	n.Close()
	r.write(func(n *Namespace) error { return withHooks(n, func(hooks []*Hook) error { return n.Flush(hooks...) }) })
	same("flush")
	r.nothingLeft()
}
