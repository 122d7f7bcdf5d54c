package loader

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A device may be deleted while a command changes its rules.
func TestDeviceMadeAgainDuringACommand(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		one, two := rule("10.0.0.0/24"), rule("10.0.1.0/24")
		r.put(one)
		r.write(func(n *Namespace) error {
			testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
			r.addDevice()
			_, err := r.putIn(n, two)
			return err
		})
		r.inForce(two)
		r.meters(two, "10.0.1.7", 5)
		r.flush()
		r.nothingLeft()
	})
}

func TestRenamedDevice(t *testing.T) {
	eachMode(t, func(t *testing.T, r *rig) {
		only := rule("10.0.0.0/24")
		r.put(only)
		ids := r.programIDs()
		rename(t, "va", "vx")
		h := r.hook("vx")
		if h == nil || h.State != Attached || h.Name() != "vx" || h.Was != "va" || h.Status() != "attached, was va" {
			t.Fatalf("hook of a renamed device: %+v", h)
		}
		if r.hook("va") != nil {
			t.Error("it is still found by its old name")
		}
		r.write(func(n *Namespace) error {
			change, err := put(n, "vx", r.direction, policy.MatchDst, only)
			if change != (Change{}) {
				t.Errorf("the same rule by the new name: %+v", change)
			}
			return err
		})
		// Another device with the old name is not affected by these rules.
		testenv.Veth(t, "va", "vc")
		if h := r.hook("va"); h != nil {
			t.Errorf("a new device by the old name has a hook: %+v", h)
		}
		testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
		rename(t, "vx", "va")
		r.inForce(only)
		r.meters(only, "10.0.0.7", 5)
		if now := r.programIDs(); len(now) != 1 || now[0] != ids[0] {
			t.Errorf("programs were %v and are %v", ids, now)
		}
	})
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	l := testenv.Link(t, from)
	testenv.Must(t, netlink.LinkSetDown(l))
	testenv.Must(t, netlink.LinkSetName(l, to))
	testenv.Must(t, netlink.LinkSetUp(l))
	testenv.WaitUp(t, to)
}

// One of several devices is deleted during an apply, at any of its steps. The other devices get their
// rules, and nothing stays pinned for the deleted one.
func TestDeviceDeletedWhileSeveralGetRules(t *testing.T) {
	t.Parallel()
	var tables []policy.Table
	for _, name := range []string{"absent", "va", "w0", "w1"} {
		for _, d := range bothDirections {
			tables = append(tables, policy.Table{Device: name, Direction: d, Match: d.FarSide(), Rules: []policy.Rule{one}})
		}
	}
	for name, get := range map[string]func(n *Namespace) error{
		"apply": func(n *Namespace) error { _, err := n.Apply(tables, ApplyOptions{}); return err },
		"apply new": func(n *Namespace) error {
			done, err := n.ApplyNew(tables, nil, nil)
			if wrong := slices.ContainsFunc(done, func(d Applied) bool { return d.Device == "absent" }); wrong || len(done) < 4 {
				t.Errorf("rules were applied to %v, want va, w1 and maybe w0", done)
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachMode(t, func(t *testing.T, r *rig) {
				testenv.Veth(t, "w1", "w1p")
				// again applies the rules to all devices, of which w0 is new.
				again := func(ahead func(stop)) (s *stepper) {
					r.flushAll()
					if l, err := netlink.LinkByName("w0"); err == nil {
						testenv.Must(t, netlink.LinkDel(l))
					}
					testenv.Veth(t, "w0", "w0p")
					s = &stepper{came: map[string]int{}, ahead: ahead}
					r.write(func(n *Namespace) error {
						steppers.Store(unix.Gettid(), s)
						defer steppers.Delete(unix.Gettid())
						return get(n)
					})
					return s
				}
				all := again(nil)
				random := rand.New(rand.NewPCG(testenv.Seed(t), 0))
				for i, at := range all.steps {
					if !all.canFail[i] || all.leftOut(at, random, testenv.Rounds(t, 1)) {
						continue
					}
					again(func(now stop) {
						if now == at {
							testenv.Must(t, netlink.LinkDel(testenv.Link(t, "w0")))
						}
					})
					have := r.severalStates()
					for _, hook := range []string{"va egress", "va ingress", "w1 egress", "w1 ingress"} {
						if want := fmt.Sprint(Attached, []policy.Rule{one}); have[hook] != want {
							t.Errorf("%s: %s", hook, have[hook])
						}
					}
					if hooks, err := filepath.Glob(filepath.Join(r.options.BPFFS, "shapectl", "*", "*gress-*")); len(hooks) != len(have) || err != nil {
						t.Errorf("of hooks %v there are the pins %v, %v", have, hooks, err)
					}
					if t.Failed() {
						t.Fatalf("that was at %s", at)
					}
				}
				r.flushAll()
			})
		})
	}
}

// moveAway moves va to another namespace, and returns that.
func (r *rig) moveAway() (where string, ns *testenv.Netns) {
	r.t.Helper()
	where, ns = testenv.NewNamedNetns(r.t)
	testenv.Must(r.t, netlink.LinkSetNsFd(testenv.Link(r.t, "va"), ns.FD()))
	return where, ns
}

func TestDeviceMovedToAnotherNamespace(t *testing.T) {
	t.Run("tcx", func(t *testing.T) {
		r := newRig(t, TCX, policy.Ingress) // its sender, vb, stays
		only := rule("10.0.0.0/24", slow)
		r.put(only)
		_, ns := r.moveAway()
		h := r.hook("va")
		if h == nil || h.State != Moved || h.Name() != "va" {
			t.Fatalf("hook of a moved device: %+v", h)
		}
		testenv.Must(t, ns.Do(func() error {
			l, err := netlink.LinkByName("va")
			if err != nil {
				return err
			}
			return netlink.LinkSetUp(l)
		}))
		testenv.WaitUp(t, "vb")
		r.send("10.0.0.7", 150, 1000)
		testenv.Eventually(t, "packets metered in the other namespace", func() bool {
			c := r.counters(h, only)
			return c.PassedPackets+c.DroppedPackets == 150
		})
		if c := r.counters(h, only); c.DroppedPackets == 0 {
			t.Errorf("150000 bytes passed a bucket of 100000: %+v", c)
		}
		// A new device with the name cannot get rules while rules of that name are in force on the old one.
		testenv.Veth(t, "va", "vc")
		err := r.try(func(n *Namespace) error {
			_, err := r.putIn(n, only)
			return err
		})
		if !errors.Is(err, ErrMoved) {
			t.Errorf("a rule for a new device by the name: %v", err)
		}
		if h := r.hook("va"); h == nil || h.State != Moved {
			t.Errorf("hook of a moved device, once there is another: %+v", h)
		}
		testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
		r.delete(only)
		testenv.Must(t, ns.Do(func() error {
			if left := r.ours("va"); len(left) > 0 {
				t.Errorf("programs are left on the moved device: %v", left)
			}
			return nil
		}))
		r.nothingLeft()
	})
	t.Run("clsact", func(t *testing.T) {
		r := newRig(t, Clsact, policy.Egress)
		r.put(rule("10.0.0.0/24"))
		r.moveAway() // the kernel deletes its qdiscs, and with them the filter
		h := r.hook("va")
		if h == nil || h.State == Attached || h.State == Moved {
			t.Fatalf("hook of a moved device: %+v", h)
		}
		r.flush()
		r.nothingLeft()
	})
}

func TestLimitsPinnedElsewhere(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	r.put(rule("10.0.0.0/24"))
	r.options.BPFFS = testenv.BPFFS(t)
	err := r.try(func(n *Namespace) error {
		_, err := r.putIn(n, rule("10.0.1.0/24"))
		return err
	})
	if !errors.Is(err, ErrElsewhere) {
		t.Errorf("limits that are pinned elsewhere: %v", err)
	}
	if ours := r.ours("va"); len(ours) != 1 {
		t.Errorf("programs of ours: %v", ours)
	}
}

// A new device with a reused index does not get the rules of the old one.
func TestAnotherDeviceOfTheSameIndex(t *testing.T) {
	eachMode(t, func(t *testing.T, r *rig) {
		old := rule("10.0.0.0/24")
		r.put(old)
		l := testenv.Link(t, "va")
		testenv.Must(t, netlink.LinkDel(l))
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.Index = "vz", l.Attrs().Index
		testenv.AddLink(t, &netlink.Veth{LinkAttrs: attrs, PeerName: "vy"})
		if now := testenv.Link(t, "vz").Attrs().Index; now != l.Attrs().Index {
			t.Fatalf("index is %d", now)
		}
		if h := r.hook("vz"); h != nil {
			t.Errorf("a new device has the rules of %s, which is gone: state %q", h.Was, h.State)
		}
		fresh := rule("10.0.1.0/24")
		r.write(func(n *Namespace) error {
			_, err := put(n, "vz", r.direction, policy.MatchDst, fresh)
			return err
		})
		h := r.hook("vz")
		if h == nil || h.State != Attached {
			t.Fatalf("hook of the new device: %+v", h)
		}
		r.sameRules(h, fresh)
		if pins, err := filepath.Glob(filepath.Join(r.options.BPFFS, "shapectl", "*", "g*")); err != nil || len(pins) != 1 {
			t.Errorf("generations are %v, %v, where there is one hook", pins, err)
		}
	})
}

var onVz = steppedCommand{name: "first rule of vz", run: func(n *Namespace) error {
	_, err := put(n, "vz", policy.Egress, policy.MatchDst, two)
	return err
}}

// A device gets the index of one that moved to another namespace. The rules of the moved device
// stay in force, even if a command is killed.
func TestNumberOfAMovedDevice(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	r.put(one)
	index := testenv.Link(t, "va").Attrs().Index
	_, ns := r.moveAway()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "vz", index
	testenv.AddLink(t, &netlink.Veth{LinkAttrs: attrs, PeerName: "vy"})
	program := func() (names []string) {
		testenv.Must(t, ns.Do(func() error { names = r.ours("va"); return nil }))
		return names
	}
	for _, at := range []string{"claim a view", "attach a program to tcx", ""} {
		if killed := r.killed(onVz.name, stop{at, 0}); killed != (at != "") {
			t.Errorf("killed at %q: %t", at, killed)
		}
		r.write(func(*Namespace) error { return nil })
		h := r.hook("va")
		if h == nil || h.State != Moved || len(program()) != 1 {
			t.Fatalf("hook of the moved device: %+v, programs on it: %v; that was a kill at %q", h, program(), at)
		}
		r.sameRules(h, one)
	}
	h := r.hook("vz")
	if h == nil || h.State != Attached {
		t.Fatalf("hook of the new device: %+v", h)
	}
	r.sameRules(h, two)
	testenv.Must(t, ns.Do(func() error { return netlink.LinkSetNsFd(testenv.Link(t, "va"), r.netns.FD()) }))
	r.put(two)
	r.inForce(one, two)
	r.flush()
	if h := r.hook("vz"); h == nil || h.State != Attached || len(r.ours("vz")) != 1 {
		t.Errorf("hook of the new device after a flush of the other: %+v", h)
	}
	r.flushAll()
}

// detachByOthers detaches the program of va without the loader.
func (r *rig) detachByOthers() {
	r.t.Helper()
	h := r.hook("va")
	if h.Mode == TCX {
		l, err := link.LoadPinnedLink(filepath.Join(h.at.dir, linkPin), nil)
		testenv.Must(r.t, err)
		defer l.Close()
		testenv.Must(r.t, l.Detach())
		return
	}
	filters, err := bpfFilters(h.Set.Ifindex(), r.direction)
	testenv.Must(r.t, err)
	for _, f := range filters {
		if f.Name == program.Name {
			testenv.Must(r.t, netlink.FilterDel(f))
			return
		}
	}
	r.t.Fatal("no filter of ours")
}

func TestDetachedByOthersIsRepaired(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		one, two := rule("10.0.0.0/24", slow), rule("10.0.1.0/24", slow, leaky)
		r.put(one, two)
		r.meters(one, "10.0.0.7", 10)
		r.detachByOthers()
		if h := r.hook("va"); h == nil || h.State != Detached {
			t.Fatalf("hook without its program: %+v", h)
		}
		if change := r.put(one); change.Reattached != string(Detached) {
			t.Errorf("the repair: %+v", change)
		}
		h := r.inForce(one, two)
		if c := r.counters(h, one); c.PassedPackets != 10 {
			t.Errorf("counters are %+v", c)
		}
		r.meters(one, "10.0.0.7", 5)
		r.meters(two, "10.0.1.7", 5)
		r.flush()
		r.nothingLeft()
	})
}

func TestQdiscDeletedUnderUs(t *testing.T) {
	r := newRig(t, Clsact, policy.Egress)
	only := rule("10.0.0.0/24")
	r.put(only)
	l := testenv.Link(t, "va")
	testenv.Must(t, netlink.QdiscDel(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0),
	}}))
	if h := r.hook("va"); h == nil || h.State != Detached {
		t.Fatalf("hook without its qdisc: %+v", h)
	}
	r.put(only)
	addForeignFilter(t, r.passed, "va", r.direction, 60000) // it was deleted, too
	r.inForce(only)
	r.meters(only, "10.0.0.7", 5)
}

func TestLinkTypes(t *testing.T) {
	for _, mode := range []Mode{TCX, Clsact} {
		for _, kind := range []string{"tun", "lo", "bridge", "macvlan"} {
			t.Run(string(mode)+" "+kind, func(t *testing.T) {
				r := &rig{t: t, netns: testenv.NewNetns(t), direction: policy.Egress}
				r.options = Options{BPFFS: testenv.BPFFS(t), Mode: mode}
				onLinkType(t, r, kind)
			})
		}
	}
}

// onLinkType sends a packet from a device with the link header that its driver expects, and, if
// possible, to the device.
func onLinkType(t *testing.T, r *rig, kind string) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "dev0"
	frame, l2 := r.frame("10.0.0.7", 200), uint8(netinfo.EthernetBytes)
	var fromDriver func()
	switch kind {
	case "tun":
		tun := &netlink.Tuntap{LinkAttrs: attrs, Mode: netlink.TUNTAP_MODE_TUN, NonPersist: true,
			Flags: netlink.TUNTAP_NO_PI | netlink.TUNTAP_ONE_QUEUE, Queues: 1}
		testenv.AddLink(t, tun)
		driver := tun.Fds[0]
		t.Cleanup(func() { driver.Close() })
		frame, l2 = testenv.Packet(near, far7, 200), 0
		fromDriver = func() {
			if _, err := driver.Write(testenv.Packet(far7, near, 200)); err != nil {
				t.Fatal(err)
			}
		}
	case "lo":
		attrs.Name = "lo"
		testenv.Must(t, netlink.LinkSetUp(testenv.Link(t, "lo")))
	case "bridge":
		testenv.AddLink(t, &netlink.Bridge{LinkAttrs: attrs})
	case "macvlan":
		testenv.Veth(t, "va", "vb")
		attrs.ParentIndex = testenv.Link(t, "va").Attrs().Index
		testenv.AddLink(t, &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE})
	}
	put := func(d policy.Direction) *Hook {
		r.direction = d
		r.write(func(n *Namespace) error {
			dev, err := netinfo.DeviceByName(attrs.Name)
			if err != nil {
				return err
			}
			if dev.L2Bytes != l2 {
				t.Errorf("%s has a link header of %d bytes", kind, dev.L2Bytes)
			}
			_, err = put(n, dev.Name, d, d.FarSide(), rule("10.0.0.0/24"))
			return err
		})
		h := r.hook(attrs.Name)
		if h == nil || h.State != Attached {
			t.Fatalf("hook: %+v", h)
		}
		return h
	}
	counted := func(h *Hook) {
		t.Helper()
		testenv.Eventually(t, "a packet on "+kind, func() bool { return r.counters(h, rule("10.0.0.0/24")).PassedPackets == 1 })
		if c := r.counters(h, rule("10.0.0.0/24")); c.PassedBytes != 200 {
			t.Errorf("a packet of 200 bytes: %+v", c)
		}
	}
	out := put(policy.Egress)
	testenv.Must(t, testenv.NewSender(t, attrs.Name).Send(frame))
	counted(out)
	if fromDriver != nil {
		in := put(policy.Ingress)
		fromDriver()
		counted(in)
	}
	for _, d := range []policy.Direction{policy.Ingress, policy.Egress} {
		r.direction = d
		r.write(func(n *Namespace) error {
			h, err := n.Find(attrs.Name, d)
			if h == nil {
				return err
			}
			defer h.Close()
			return n.Flush(h)
		})
		if left := r.ours(attrs.Name); len(left) > 0 {
			t.Errorf("programs are left: %v", left)
		}
	}
	r.nothingLeft()
}

// Rules of another layout are refused as a whole, with an error that says so. They stay in force until they are flushed, by
// device or all.
func TestPinsOfAnotherVersion(t *testing.T) {
	eachMode(t, func(t *testing.T, r *rig) {
		table := policy.Table{Device: "va", Direction: policy.Ingress, Rules: []policy.Rule{one}}
		apply := func(n *Namespace) error {
			_, err := n.Apply([]policy.Table{{Device: "va", Direction: r.direction, Rules: []policy.Rule{one, stays}}}, ApplyOptions{Confirm: time.Hour})
			return err
		}
		r.put(one)
		hook := r.hook("va")
		r.write(apply)
		r.anotherLayout()
		before := r.pins()
		for name, f := range map[string]func(n *Namespace) error{
			"hooks":     func(n *Namespace) error { _, err := n.Hooks(); return err },
			"find":      func(n *Namespace) error { _, err := n.Find("va", r.direction); return err },
			"put":       func(n *Namespace) error { _, err := r.putIn(n, one); return err },
			"put anew":  func(n *Namespace) error { _, err := put(n, "va", policy.Ingress, policy.MatchSrc, one); return err },
			"delete":    func(n *Namespace) error { return deleteFrom(n, []*Hook{hook}, one.Prefix) },
			"apply":     apply,
			"apply new": func(n *Namespace) error { _, err := n.ApplyNew([]policy.Table{table}, nil, nil); return err },
			"confirm":   confirm,
			"rollback":  func(n *Namespace) error { _, err := n.Rollback(); return err },
		} {
			var other *OtherLayoutError
			if err := r.try(f); !isOtherLayout(err) || !errors.As(err, &other) || len(other.Hooks) != 1 || other.Hooks[0].Name() != "va" {
				t.Errorf("%s: %v", name, err)
			}
		}
		if now := r.pins(); !slices.Equal(now, before) {
			t.Errorf("pins were %v, and are %v", before, now)
		}
		if ours := r.ours("va"); len(ours) != 1 {
			t.Errorf("programs of ours: %v", ours)
		}
		r.write(func(n *Namespace) error {
			return n.Flush(n.pins.foreign.Hooks...)
		})
		r.nothingLeft()
		r.put(one)
		r.inForce(one)
		h := r.hook("va") // an earlier layout had the index of the device in the name
		testenv.Must(t, os.Rename(h.at.dir, filepath.Join(filepath.Dir(h.at.dir), fmt.Sprintf("%d-%s", h.at.index, r.direction))))
		if err := r.try(func(n *Namespace) error { _, err := n.Hooks(); return err }); !isOtherLayout(err) {
			t.Errorf("pins of an earlier layout: %v", err)
		}
		r.write(flushEverything)
		r.nothingLeft()
	})
}

// ApplyNew does not change devices that have rules by now.
func TestApplyNewKeepsOtherRules(t *testing.T) {
	r := newRig(t, Auto, policy.Egress)
	r.put(one)
	r.write(func(n *Namespace) error {
		done, err := n.ApplyNew([]policy.Table{r.table(two)}, nil, nil)
		if len(done) > 0 {
			t.Errorf("rules were applied to %v", done)
		}
		return err
	})
	r.inForce(one)
	r.flush()
	r.nothingLeft()
}

// The device of rules within its own pool goes during a command, and the policy to apply has neither.
func TestDeviceGoesWithItsPool(t *testing.T) {
	r := newRig(t, "", policy.Egress)
	r.write(func(n *Namespace) error {
		_, err := n.Apply([]policy.Table{{Rules: []policy.Rule{pool("va")}}, {Device: "va", Direction: policy.Egress, Match: policy.MatchDst, Rules: []policy.Rule{rule("10.0.0.0/24", in("va"))}}}, ApplyOptions{})
		return err
	})
	r.write(func(n *Namespace) error {
		testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
		tables, err := n.Tables(Attached, Gone)
		if err != nil || len(tables) != 2 || tables[1].Device != "va" {
			t.Errorf("%v, tables %+v", err, tables)
		}
		_, err = n.Apply([]policy.Table{{Rules: []policy.Rule{pool("other")}}}, ApplyOptions{})
		return err
	})
	r.write(func(n *Namespace) error {
		tables, err := n.Tables(Attached, Gone)
		if len(tables) != 1 || tables[0].Rules[0].Label.Name != "other" {
			t.Errorf("after that, tables %+v", tables)
		}
		return err
	})
}

// A device with a pool is deleted. Its pool goes, and the change that made both can still be undone.
func TestRollbackWithoutADevice(t *testing.T) {
	r := newRig(t, "", policy.Egress)
	testenv.Veth(t, "w0", "w1")
	own := pool("w0")
	own.Label.Owner = policy.Owner{Device: "w0", Whole: true}
	r.put(one)
	r.write(func(n *Namespace) error {
		_, err := n.Apply([]policy.Table{{Rules: []policy.Rule{own}}, r.table(two),
			{Device: "w0", Direction: policy.Egress, Match: policy.MatchDst, Rules: []policy.Rule{rule("10.0.0.0/24", in("w0"))}}}, ApplyOptions{})
		return err
	})
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "w0")))
	r.write(func(n *Namespace) error {
		if tables, err := n.Tables(Attached, Gone); len(tables) != 1 || err != nil {
			t.Errorf("rules are left: %+v, %v", tables, err)
		}
		_, err := n.Rollback()
		return err
	})
	r.inForce(one)
	r.flush()
	r.nothingLeft()
}
