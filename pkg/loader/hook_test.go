package loader

import (
	"errors"
	"net/netip"
	"sync"
	"testing"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func TestFirstRuleAttachesAndLastDetaches(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		first, second := rule("10.0.0.0/24"), rule("10.0.1.0/24")
		if change := r.put(first); !change.Changed || change.Upgraded || change.Reattached != "" {
			t.Errorf("the first rule: %+v", change)
		}
		h := r.inForce(first)
		if h.Mode != r.options.Mode {
			t.Errorf("attached by %s", h.Mode)
		}
		r.meters(first, "10.0.0.7", 5)
		r.put(second)
		r.inForce(first, second)
		r.meters(second, "10.0.1.7", 5)
		r.delete(first)
		r.inForce(second)
		out := r.passed.count(t).packets
		r.send("10.0.0.7", 200, 1000) // ten times the capacity of a bucket
		testenv.Eventually(t, "packets that no rule matches", func() bool { return r.passed.count(t).packets == out+200 })
		r.delete(second)
		r.nothingLeft()
		if r.hook("va") != nil {
			t.Error("the hook is still there")
		}
	})
}

// programIDs are those of the programs that hooks call.
func (r *rig) programIDs() (ids []uint32) {
	r.t.Helper()
	n, err := Write(r.options)
	testenv.Must(r.t, err)
	defer n.Close()
	for index := range program.Kinds {
		var id uint32
		if n.pins.kinds[index.Family()].Lookup(index, &id) == nil {
			ids = append(ids, id)
		}
	}
	return ids
}

func TestChangeOfAlgorithmKeepsBucketAndCounters(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		was, is := rule("10.0.0.0/24", slow), rule("10.0.0.0/24", slow, leaky)
		r.put(was)
		r.send("10.0.0.7", 60, 1000)
		h := r.hook("va")
		testenv.Eventually(t, "60 packets", func() bool { return r.counters(h, was).PassedPackets == 60 })
		began := maps.Now()
		for _, next := range []policy.Rule{is, was, is} {
			r.put(next)
			h = r.inForce(next)
			if c := r.counters(h, next); c.PassedPackets != 60 || c.PassedBytes != 60000 {
				t.Errorf("%v: counters are %+v", next.Algorithm, c)
			}
			r.wantLevel(h, next, 60000, began)
		}
		r.meters(is, "10.0.0.7", 5)
	})
}

// wantLevel ends the test unless the level of a slow rule's bucket is the bytes that were charged
// since began, less what may have drained since then.
func (r *rig) wantLevel(h *Hook, rule policy.Rule, bytes, began uint64) {
	r.t.Helper()
	r.wantDrained(rule, r.level(h, rule), bytes, began)
}

// wantDrained checks the level of a bucket of a rule that was charged with these bytes since began.
func (r *rig) wantDrained(rule policy.Rule, level, bytes, began uint64) {
	r.t.Helper()
	drained := (maps.Now()-began)/1e6*uint64(rule.Rate)/8000 + 1001 // sending takes less than a second
	if level > bytes || level+drained < bytes {
		r.t.Errorf("the level of %v is %d bytes, of %d with at most %d drained", rule.Prefix, level, bytes, drained)
	}
}

func TestTableIsMadeBesideRulesInForce(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		all, hosts := rule("10.0.0.0/24", slow), rule("10.0.1.0/24", slow, eachHost)
		r.put(all)
		if size := r.hook("va").Set.Store.Size(); size.Buckets != noBuckets {
			t.Fatalf("room for %d buckets that no rule needs", size.Buckets)
		}
		began := maps.Now()
		r.send("10.0.0.7", 60, 1000)
		h := r.hook("va")
		testenv.Eventually(t, "60 packets", func() bool { return r.counters(h, all).PassedPackets == 60 })
		r.put(hosts)
		h = r.inForce(all, hosts)
		if size := h.Set.Store.Size(); size.Buckets != tableBuckets(memory()) {
			t.Errorf("room for %d buckets", size.Buckets)
		}
		if c := r.counters(h, all); c.PassedPackets != 60 || c.PassedBytes != 60000 {
			t.Errorf("counters are %+v", c)
		}
		r.wantLevel(h, all, 60000, began)
		r.meters(hosts, "10.0.1.7", 5)
		r.meters(hosts, "10.0.1.8", 5)
		keys := 0
		for _, b := range h.Set.Store.Buckets([]maps.Entry{r.entry(h, hosts)}, maps.Now) {
			keys++
			if b.LevelBytes > 1000 || b.LevelBytes == 0 {
				t.Errorf("the level of %v is %d bytes", b.Subnet, b.LevelBytes)
			}
		}
		if keys != 2 {
			t.Errorf("%d hosts have a level, of 2", keys)
		}
		// The same rule changes from all to host: its shared bucket becomes the spill bucket.
		r.put(rule("10.0.0.0/24", slow, eachHost))
		r.meters(all, "10.0.0.9", 5)
	})
}

func TestChangeOfMatch(t *testing.T) {
	eachMode(t, func(t *testing.T, r *rig) {
		only, other := rule("10.0.0.0/24"), rule("10.0.1.0/24")
		near := func(n *Namespace, rule policy.Rule) error {
			_, err := put(n, "va", r.direction, policy.MatchSrc, rule)
			return err
		}
		r.put(only, other)
		err := r.try(func(n *Namespace) error { return near(n, only) })
		if !errors.Is(err, ErrMatch) {
			t.Fatalf("one of two rules would match the other address: %v", err)
		}
		r.inForce(only, other)
		r.delete(other)
		r.meters(only, "10.0.0.7", 5)
		r.write(func(n *Namespace) error { return near(n, only) })
		h := r.inForce(only)
		if h.Match() != policy.MatchSrc {
			t.Error("the rule still matches the destination")
		}
		before := r.counters(h, only)
		r.send("10.0.0.7", 5, 200)
		if after := r.counters(h, only); after != before {
			t.Error("packets to the network are metered by a rule for those from it")
		}
		r.direction = policy.Ingress // so that frame has the addresses of a packet from far to near
		frame := r.frame("10.0.0.7", 200)
		r.direction = policy.Egress
		if err := r.sender.Send(frame); err != nil {
			t.Fatal(err)
		}
		if after := r.counters(h, only); after.PassedPackets != before.PassedPackets+1 {
			t.Error("a packet from the network is not metered")
		}
		r.flush()
		r.nothingLeft()
	})
}

// Concurrent commands wait for each other: no rule is lost, and no reader sees half of a
// change.
func TestWritersAndReadersTakeTurns(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	const writers = 10
	rules := make([]policy.Rule, writers)
	var group sync.WaitGroup
	for i := range rules {
		rules[i] = rule("10.0." + string(rune('0'+i)) + ".0/24")
		if i%2 == 1 {
			leaky(&rules[i])
		}
		if i%3 == 2 {
			eachHost(&rules[i])
		}
		group.Go(func() {
			err := ErrFaster
			for errors.Is(err, ErrFaster) { // which only the first rules make
				err = r.netns.Do(func() error {
					return r.try(func(n *Namespace) error {
						_, err := r.putIn(n, rules[i])
						return err
					})
				})
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	stop := make(chan struct{})
	var reader sync.WaitGroup
	reader.Go(func() {
		for seen := 0; ; {
			select {
			case <-stop:
				return
			default:
			}
			err := r.netns.Do(func() error {
				n, err := Read(r.options)
				if err != nil {
					return err
				}
				defer n.Close()
				hooks, err := n.Hooks()
				for _, h := range hooks {
					if have := len(h.Set.Rules()); have < seen {
						t.Errorf("%d rules where there were %d", have, seen)
					} else {
						seen = have
					}
					if h.State != Attached {
						t.Errorf("state is %q", h.State)
					}
					h.Close()
				}
				return err
			})
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	group.Wait()
	close(stop)
	reader.Wait()
	r.inForce(rules...)
	r.flush()
	r.nothingLeft()
}

func TestForeignProgramsAndQdiscsAreLeftAlone(t *testing.T) {
	for _, root := range []string{"tbf", "htb"} {
		t.Run(root, func(t *testing.T) {
			eachMode(t, func(t *testing.T, r *rig) { leavesForeignAlone(t, r, root) })
		})
	}
}

func leavesForeignAlone(t *testing.T, r *rig, root string) {
	device := testenv.Link(t, "va")
	addRootQdisc(t, device, root)
	head := attachForeign(t, "va", r.direction, link.Head())
	addTerminalU32(t, device, "10.9.9.9", 50)
	middle := newForeign(t)
	addForeignFilter(t, middle, "va", r.direction, 40)
	// Before the filter that ends the chain for one address, after it, and before all filters.
	watched := map[string]*foreign{"tcx": head, "filter": middle, "last filter": r.passed}

	one, two := rule("10.0.0.0/24"), rule("10.0.1.0/24", leaky)
	steps := []struct {
		name string
		do   func()
	}{
		{"before", func() {}},
		{"set", func() { r.put(one) }},
		{"set another", func() { r.put(two) }},
		{"change", func() { r.put(rule("10.0.0.0/24", eachHost)) }},
		{"change algorithm", func() { r.put(rule("10.0.0.0/24", eachHost, leaky)) }},
		{"delete", func() { r.delete(one) }},
		{"flush", func() { r.flush() }},
		{"set again", func() { r.put(one, two) }},
		{"flush again", func() { r.flush() }},
	}
	for _, step := range steps {
		step.do()
		before := map[string]uint64{}
		for name, f := range watched {
			before[name] = f.count(t).packets
		}
		queued := rootPackets(t, device, root)
		// One packet conforms, one matches no rule, one matches the foreign u32 filter.
		for _, far := range []string{"10.0.0.7", "10.5.5.5", "10.9.9.9"} {
			r.send(far, 1, 100)
		}
		for name, want := range map[string]uint64{"tcx": 3, "filter": 3, "last filter": 2} {
			if got := watched[name].count(t).packets - before[name]; got != want {
				t.Errorf("%s: the foreign %s program saw %d packets of %d", step.name, name, got, want)
			}
		}
		testenv.Eventually(t, step.name+": 3 packets in the foreign root qdisc", func() bool {
			return rootPackets(t, device, root) == queued+3
		})
	}
	if chain, err := netinfo.Filters(device.Attrs().Index, r.direction); err != nil || len(chain) < 3 {
		t.Errorf("filters are %v, %v", chain, err)
	}
	r.nothingLeft()
}

func addRootQdisc(t *testing.T, l netlink.Link, kind string) {
	t.Helper()
	attrs := netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
	if kind == "tbf" {
		testenv.Must(t, netlink.QdiscAdd(&netlink.Tbf{QdiscAttrs: attrs, Rate: 125_000_000, Limit: 1 << 20, Buffer: 1 << 20}))
		return
	}
	htb := netlink.NewHtb(attrs)
	htb.Defcls = 1
	testenv.Must(t, netlink.QdiscAdd(htb))
	testenv.Must(t, netlink.ClassAdd(netlink.NewHtbClass(netlink.ClassAttrs{
		LinkIndex: l.Attrs().Index, Parent: netlink.MakeHandle(1, 0), Handle: netlink.MakeHandle(1, 1),
	}, netlink.HtbClassAttrs{Rate: 1e9, Buffer: 1 << 20})))
}

func rootPackets(t *testing.T, l netlink.Link, kind string) uint64 {
	t.Helper()
	qdiscs, err := netlink.QdiscList(l)
	testenv.Must(t, err)
	for _, q := range qdiscs {
		if q.Type() == kind && q.Attrs().Parent == netlink.HANDLE_ROOT {
			return uint64(q.Attrs().Statistics.Basic.Packets)
		}
	}
	t.Fatalf("the foreign %s is gone", kind)
	return 0
}

// addTerminalU32 adds a u32 filter that ends the chain for packets to an address. Other packets
// meet the next filter.
func addTerminalU32(t *testing.T, l netlink.Link, to string, priority uint16) {
	t.Helper()
	a := testenv.Frame(near, netip.MustParseAddr(to), 60)[14+16:]
	testenv.Must(t, netlink.FilterAdd(&netlink.U32{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: l.Attrs().Index, Parent: netinfo.FilterParent(policy.Egress), Protocol: 0x0800, Priority: priority,
		},
		ClassId: netlink.MakeHandle(1, 1),
		Sel: &netlink.TcU32Sel{
			Flags: 1, // TC_U32_TERMINAL
			Keys:  []netlink.TcU32Key{{Mask: 0xffffffff, Val: uint32(a[0])<<24 | uint32(a[1])<<16 | uint32(a[2])<<8 | uint32(a[3]), Off: 16}},
			Nkeys: 1,
		},
	}))
}

// The table of buckets takes at most a part of the memory.
func TestTableBuckets(t *testing.T) {
	for memory, want := range map[uint64]uint32{
		0: 1 << 12, 64 << 20: 1 << 15, 256 << 20: 1 << 17, 1000 << 20: 1 << 18, 2 << 30: 1 << 20, 1 << 40: 1 << 20,
	} {
		if got := tableBuckets(memory); got != want {
			t.Errorf("with %d bytes of memory: %d slots, want %d", memory, got, want)
		}
	}
}
