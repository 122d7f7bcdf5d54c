package loader

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A rig has a device "va" and its peer "vb" in a separate network namespace, a separate bpffs,
// and a foreign program that counts the packets that pass a limit on one direction of va.
type rig struct {
	t         *testing.T
	netns     *testenv.Netns
	options   Options
	direction policy.Direction
	sender    *testenv.Sender
	passed    *foreign
}

// eachHook runs a test for both modes and both directions, in parallel because they share
// nothing.
func eachHook(t *testing.T, test func(t *testing.T, r *rig)) {
	for _, mode := range []Mode{TCX, Clsact} {
		for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
			t.Run(string(mode)+" "+d.String(), func(t *testing.T) {
				t.Parallel()
				test(t, newRig(t, mode, d))
			})
		}
	}
}

// eachMode is eachHook for egress only.
func eachMode(t *testing.T, test func(t *testing.T, r *rig)) {
	for _, mode := range []Mode{TCX, Clsact} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			test(t, newRig(t, mode, policy.Egress))
		})
	}
}

func newRig(t *testing.T, mode Mode, d policy.Direction) *rig {
	t.Helper()
	r := &rig{t: t, netns: testenv.NewNetns(t), direction: d}
	r.options = Options{BPFFS: testenv.BPFFS(t), Mode: mode}
	r.addDevice()
	return r
}

// addDevice creates va, or creates it again, with its sender and its foreign program.
func (r *rig) addDevice() {
	r.t.Helper()
	testenv.Veth(r.t, "va", "vb")
	from := "va"
	if r.direction == policy.Ingress {
		from = "vb"
	}
	r.sender = testenv.NewSender(r.t, from)
	r.passed = attachForeign(r.t, "va", r.direction, link.Tail())
}

// write opens the rig's namespace for changes, as a command does, and runs f.
func (r *rig) write(f func(n *Namespace) error) {
	r.t.Helper()
	if err := r.try(f); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) try(f func(n *Namespace) error) error {
	n, err := Write(r.options)
	if err != nil {
		return err
	}
	defer n.Close()
	return f(n)
}

// put sets rules on va.
func (r *rig) put(rules ...policy.Rule) (change Change) {
	r.t.Helper()
	r.write(func(n *Namespace) (err error) {
		for _, rule := range rules {
			if change, err = r.putIn(n, rule); err != nil {
				return err
			}
		}
		return nil
	})
	return change
}

func (r *rig) putIn(n *Namespace, rule policy.Rule) (Change, error) {
	return put(n, "va", r.direction, r.direction.FarSide(), rule)
}

// put sets rules in a direction of a device.
func put(n *Namespace, device string, d policy.Direction, match policy.Match, rules ...policy.Rule) (Change, error) {
	done, err := n.Put(ApplyOptions{}, policy.Table{Device: device, Direction: d, Match: match, Rules: rules})
	if err != nil {
		return Change{}, err
	}
	return done[0].Hook, nil
}

func (r *rig) delete(rule policy.Rule) {
	r.t.Helper()
	r.write(func(n *Namespace) error {
		h, err := n.Find("va", r.direction)
		if err != nil {
			return err
		}
		defer h.Close()
		if _, found := h.Set.Find(rule.Prefix); !found {
			r.t.Errorf("there is no %v to delete", rule.Prefix)
		}
		return deleteFrom(n, []*Hook{h}, rule.Prefix)
	})
}

// deleteFrom deletes the rules of networks from each hook.
func deleteFrom(n *Namespace, hooks []*Hook, networks ...netip.Prefix) error {
	_, err := n.Delete(ApplyOptions{}, func(*Hook) []netip.Prefix { return networks }, hooks...)
	return err
}

// deletePools deletes pools.
func deletePools(n *Namespace, names ...string) error {
	pools := n.Pools()
	defer pools.Close()
	var keys []netip.Prefix
	for _, name := range names {
		keys = append(keys, policy.PoolKey(name))
	}
	return deleteFrom(n, []*Hook{pools}, keys...)
}

// flushEverything removes all hooks and pools, also those of another layout.
func flushEverything(n *Namespace) error {
	hooks, err := n.Hooks()
	if other, ok := errors.AsType[*OtherLayoutError](err); ok {
		hooks = other.Hooks
	} else if err != nil {
		return err
	}
	hooks = append(hooks, n.Pools())
	defer CloseHooks(hooks)
	return n.Flush(hooks...)
}

func (r *rig) flush() {
	r.t.Helper()
	r.write(func(n *Namespace) error {
		h, err := n.Find("va", r.direction)
		if err != nil || h == nil {
			return err
		}
		defer h.Close()
		return n.Flush(h)
	})
}

// hook is the hook of a device, open for reading until the test ends; nil for none.
func (r *rig) hook(name string) *Hook {
	r.t.Helper()
	return r.openHook(Read, name)
}

func (r *rig) openHook(open func(Options) (*Namespace, error), name string) *Hook {
	r.t.Helper()
	n, err := open(r.options)
	if err != nil {
		r.t.Fatal(err)
	}
	defer n.Close()
	h, err := n.Find(name, r.direction)
	if err != nil {
		r.t.Fatal(err)
	}
	if h != nil {
		r.t.Cleanup(h.Close)
	}
	return h
}

// inForce ends the test unless va has exactly these rules, attached.
func (r *rig) inForce(rules ...policy.Rule) *Hook {
	r.t.Helper()
	h := r.hook("va")
	if h == nil {
		r.t.Fatalf("there is no hook, and %d rules ought to be in force", len(rules))
	}
	if h.State != Attached {
		r.t.Errorf("state is %q", h.State)
	}
	r.sameRules(h, rules...)
	if ours := r.ours("va"); len(ours) != 1 {
		r.t.Errorf("programs of ours on the device: %v", ours)
	}
	return h
}

func (r *rig) sameRules(h *Hook, want ...policy.Rule) {
	r.t.Helper()
	var have []policy.Rule
	for _, e := range h.Set.Rules() {
		have = append(have, e.Rule)
	}
	byAddress := func(a, b policy.Rule) int { return a.Prefix.Addr().Compare(b.Prefix.Addr()) }
	want = slices.Clone(want)
	slices.SortFunc(want, byAddress)
	slices.SortFunc(have, byAddress)
	if !slices.Equal(have, want) {
		r.t.Errorf("rules are\n%v, and ought to be\n%v", have, want)
	}
}

// ours are the names of shapectl's programs on a direction of a device, found without pins.
func (r *rig) ours(device string) (names []string) {
	r.t.Helper()
	index := testenv.Link(r.t, device).Attrs().Index
	ids, err := netinfo.TCXPrograms(index, r.direction)
	testenv.Must(r.t, err)
	for _, id := range ids {
		if name := netinfo.ProgramName(id); strings.HasPrefix(name, "shapectl") {
			names = append(names, "tcx "+name)
		}
	}
	filters, err := bpfFilters(index, r.direction)
	testenv.Must(r.t, err)
	for _, f := range filters {
		if strings.HasPrefix(f.Name, "shapectl") {
			names = append(names, "clsact "+f.Name)
		}
	}
	return names
}

// nothingLeft ends the test if programs or pins of shapectl are left.
func (r *rig) nothingLeft() {
	r.t.Helper()
	for _, l := range []string{"va", "vb"} {
		if _, err := netlink.LinkByName(l); err == nil {
			if ours := r.ours(l); len(ours) > 0 {
				r.t.Errorf("%s: programs are left: %v", l, ours)
			}
		}
	}
	if pins := r.pins(); len(pins) > 0 {
		r.t.Errorf("pins are left: %v", pins)
	}
}

// pins are all files and directories below shapectl's directory in the bpffs.
func (r *rig) pins() []string { return testenv.Pins(r.t, r.options.BPFFS) }

// send sends packets of that many bytes whose far address is far.
func (r *rig) send(far string, packets, bytes int) {
	r.t.Helper()
	frame := r.frame(far, bytes)
	for range packets {
		if err := r.sender.Send(frame); err != nil {
			r.t.Fatal(err)
		}
	}
}

// near is the near address of all packets.
var near = netip.MustParseAddr("192.0.2.1")

func (r *rig) frame(far string, bytes int) []byte {
	if r.direction == policy.Egress {
		return testenv.Frame(near, netip.MustParseAddr(far), bytes)
	}
	return testenv.Frame(netip.MustParseAddr(far), near, bytes)
}

// meters sends packets, and ends the test unless the rule for far counts each of them once, and
// the next program sees the passed ones.
func (r *rig) meters(rule policy.Rule, far string, packets int) {
	r.t.Helper()
	h := r.hook("va")
	if h == nil {
		r.t.Fatal("there is no hook")
	}
	before, out := r.counters(h, rule), r.passed.count(r.t)
	r.send(far, packets, 200)
	matched := func() uint64 {
		now := r.counters(h, rule)
		return now.PassedPackets + now.DroppedPackets - before.PassedPackets - before.DroppedPackets
	}
	if r.direction == policy.Ingress { // the kernel may hand packets over later
		testenv.Eventually(r.t, "packets on ingress", func() bool { return matched() >= uint64(packets) })
	}
	if matched() != uint64(packets) {
		r.t.Errorf("%v: of %d packets %d were metered", rule.Prefix, packets, matched())
	}
	now := r.counters(h, rule).PassedPackets - before.PassedPackets
	if seen := r.passed.count(r.t).packets - out.packets; seen != now {
		r.t.Errorf("%v: %d packets passed, and the next program saw %d", rule.Prefix, now, seen)
	}
}

func (r *rig) entry(h *Hook, rule policy.Rule) maps.Entry {
	r.t.Helper()
	e, ok := h.Set.Find(rule.Prefix)
	if !ok {
		r.t.Fatalf("no rule for %v", rule.Prefix)
	}
	return e
}

func (r *rig) counters(h *Hook, rule policy.Rule) maps.Counters {
	r.t.Helper()
	return h.Set.Store.Counters(r.entry(h, rule).ID)
}

// level is the level of a rule's shared bucket now, in bytes.
func (r *rig) level(h *Hook, rule policy.Rule) uint64 {
	r.t.Helper()
	return model.Bytes(h.Set.Store.SharedLevel(r.entry(h, rule), maps.Now()))
}

// rule is a rule of 1 mbit for a prefix.
func rule(prefix string, changes ...func(*policy.Rule)) policy.Rule {
	r := policy.Rule{Prefix: netip.MustParsePrefix(prefix), Rate: 1e6, Capacity: 20000}
	for _, change := range changes {
		change(&r)
	}
	return r
}

func leaky(r *policy.Rule)    { r.Algorithm = policy.Leaky }
func eachHost(r *policy.Rule) { r.Each.Kind = policy.EachHost }

// slow makes a rule's buckets keep their level for the length of a test.
func slow(r *policy.Rule) { r.Rate, r.Capacity = 8000, 100000 }

// A foreign program counts packets, which then meet the next program.
type foreign struct {
	program *ebpf.Program
	counts  *ebpf.Map
}

type count struct{ packets, bytes uint64 }

func newForeign(t *testing.T) *foreign {
	t.Helper()
	counts, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 16, MaxEntries: 1})
	testenv.Must(t, err)
	t.Cleanup(func() { counts.Close() })
	const next = -1 // TCX_NEXT and TC_ACT_UNSPEC
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "foreign", Type: ebpf.SchedCLS, License: "MIT",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.StoreImm(asm.R10, -4, 0, asm.Word),
			asm.LoadMapPtr(asm.R1, counts.FD()),
			asm.Mov.Reg(asm.R2, asm.R10),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
			asm.LoadMem(asm.R2, asm.R6, 0, asm.Word), // skb->len
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.Add.Imm(asm.R0, 8),
			asm.StoreXAdd(asm.R0, asm.R2, asm.DWord),
			asm.Mov.Imm(asm.R0, next).WithSymbol("out"),
			asm.Return(),
		},
	})
	testenv.Must(t, err)
	t.Cleanup(func() { program.Close() })
	return &foreign{program, counts}
}

func (f *foreign) count(t *testing.T) count {
	t.Helper()
	var c [2]uint64
	if err := f.counts.Lookup(uint32(0), &c); err != nil {
		t.Fatal(err)
	}
	return count{c[0], c[1]}
}

// attachForeign attaches a foreign program to a device: before or after the tcx programs, or, for
// the tail, as the last filter.
func attachForeign(t *testing.T, device string, d policy.Direction, where link.Anchor) *foreign {
	t.Helper()
	f := newForeign(t)
	if where == link.Tail() {
		// After filters and after tcx, so it follows our program in both modes.
		addForeignFilter(t, f, device, d, 60000)
		return f
	}
	l, err := link.AttachTCX(link.TCXOptions{
		Interface: testenv.Link(t, device).Attrs().Index, Program: f.program, Attach: netinfo.TCXType(d), Anchor: where,
	})
	testenv.Must(t, err)
	t.Cleanup(func() { l.Close() })
	return f
}

// addForeignFilter adds a direct-action filter, and clsact if there is none.
func addForeignFilter(t *testing.T, f *foreign, device string, d policy.Direction, priority uint16) {
	t.Helper()
	l := testenv.Link(t, device)
	testenv.Must(t, addClsact(l.Attrs().Index))
	testenv.Must(t, netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: l.Attrs().Index, Parent: netinfo.FilterParent(d), Handle: 1, Protocol: unix.ETH_P_ALL, Priority: priority,
		},
		Fd: f.program.FD(), Name: "foreign", DirectAction: true,
	}))
}

var far7 = netip.MustParseAddr("10.0.0.7")

// anotherLayout pins settings as a build with another layout would.
func (r *rig) anotherLayout() {
	r.t.Helper()
	n, err := Read(r.options)
	testenv.Must(r.t, err)
	defer n.Close()
	h := n.Pools() // whose set is in the same maps as that of any hook
	defer h.Close()
	old := h.Set.Store.Replacements()[".rodata"]
	settings := h.Set.Store.Hook()
	settings.Layout++
	spec := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: old.ValueSize(), MaxEntries: 1}
	m, err := ebpf.NewMap(spec)
	testenv.Must(r.t, err)
	defer m.Close()
	testenv.Must(r.t, m.Put(uint32(0), settings))
	pin := filepath.Join(string(n.pins.dir), "g0", "hook")
	testenv.Must(r.t, os.Remove(pin))
	testenv.Must(r.t, m.Pin(pin))
}

func isOtherLayout(err error) bool { return errors.Is(err, maps.ErrOtherLayout) }

func confirm(n *Namespace) error {
	_, err := n.Confirm()
	return err
}
