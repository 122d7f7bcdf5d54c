package maps_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A rig is the maps and program of an egress hook. Subtests that share a rig set T.
type rig struct {
	*testing.T
	*maps.Set
	loaded *ebpf.Program
	load   func() *ebpf.Program // for as long as the set is open
	now    uint64               // the clock of packets and changes, in ns
}

// view is the number of the rig's view. It is not 0, which an skb has by default.
const view = 2

func newRig(t *testing.T, size maps.Size) *rig {
	t.Helper()
	testenv.Root(t)
	size.Views = 4
	hook := bpf.AbiHook{L2Bytes: 14, VirtualClock: 1}
	roll := rand.New(rand.NewPCG(1, 1))
	for i := range hook.Secret {
		hook.Secret[i] = roll.Uint32()
	}
	store, err := maps.New(size, hook)
	testenv.Must(t, err)
	set := store.View(view)
	t.Cleanup(func() { set.Store.Close() })
	r := &rig{T: t, Set: set, now: 1e9}
	set.Store.UseClock(r.clock)
	r.load = func() *ebpf.Program {
		p, err := program.Load(set.Store, set.Store.Hook())
		testenv.Must(t, err)
		t.Cleanup(func() { p.Close() })
		return p
	}
	return r
}

func (r *rig) clock() uint64 { return r.now }

// program loads the program on first use.
func (r *rig) program() *ebpf.Program {
	if r.loaded == nil {
		r.loaded = r.load()
	}
	return r.loaded
}

// put sets a rule, which must change something.
func (r *rig) put(rule policy.Rule) maps.Entry {
	r.Helper()
	changed, err := r.Put(rule)
	if err != nil {
		r.Fatal(err)
	}
	e, ok := r.Find(rule.Prefix)
	if !changed || !ok || e.Rule != rule {
		r.Fatalf("put %+v: changed %v, found %+v", rule, changed, e)
	}
	return e
}

// prepare prepares a change of the set to exactly these rules, and returns the steps.
func (r *rig) prepare(want ...policy.Rule) []policy.Difference {
	r.Helper()
	policy.SortRules(want)
	steps := policy.Table{Rules: r.Policy()}.Diff(policy.Table{Rules: want})
	testenv.Must(r.T, r.Prepare(steps, func(int) {}))
	return steps
}

// frame is a packet of a flow with so many bytes.
func frame(f maps.Flow, size int) []byte {
	b := make([]byte, 14, size)
	if f.Dst.Is4() {
		b[12], b[13] = 0x08, 0x00
		b = append(b, 0x45, 0, 0, 0, 0, 0, 0, 0, 64, f.Proto, 0, 0)
	} else {
		b[12], b[13] = 0x86, 0xdd
		b = append(b, 0x60, 0, 0, 0, 0, 0, f.Proto, 64)
	}
	b = append(append(b, f.Src.AsSlice()...), f.Dst.AsSlice()...)
	b = binary.BigEndian.AppendUint16(b, f.SrcPort)
	b = binary.BigEndian.AppendUint16(b, f.DstPort)
	return append(b, make([]byte, size-len(b))...)
}

// send sends a packet of a flow at the rig's time, and reports whether it passed.
func (r *rig) send(a policy.Algorithm, f maps.Flow, size int) bool {
	r.Helper()
	context := make([]byte, 192)                      // struct __sk_buff
	binary.NativeEndian.PutUint32(context[64:], view) // cb[4]
	binary.NativeEndian.PutUint64(context[152:], r.now)
	verdict, err := r.program().Run(&ebpf.RunOptions{Data: frame(f, size), Context: context})
	if err != nil {
		r.Fatal(err)
	}
	return verdict != 2
}

func to(host string) maps.Flow {
	f := maps.Flow{Src: netip.MustParseAddr("192.0.2.1"), Dst: netip.MustParseAddr(host), Proto: 17, SrcPort: 1000, DstPort: 53}
	if f.Dst.Is6() {
		f.Src = netip.MustParseAddr("2001:db8::1")
	}
	return f
}

// units is the level of the bucket of a flow now.
func (r *rig) units(e maps.Entry, f maps.Flow) uint64 {
	return r.Store.State(e, policy.MatchDst, f, r.now).Level
}

// privateBPFFS mounts a bpffs for one test, and returns an empty directory in it.
func privateBPFFS(t *testing.T) string {
	t.Helper()
	testenv.Root(t)
	dir := t.TempDir()
	if err := unix.Mount("bpffs", dir, "bpf", 0, ""); err != nil {
		t.Fatalf("mount a bpffs on %s: %v", dir, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	pins := filepath.Join(dir, "pins") // dir also has files of the kernel
	if err := os.Mkdir(pins, 0o700); err != nil {
		t.Fatal(err)
	}
	return pins
}

func TestSize(t *testing.T) {
	testenv.Root(t)
	for _, c := range []struct{ want, got uint32 }{{0, 4}, {1, 4}, {4, 4}, {5, 8}, {8, 8}, {9, 16}, {1000, 1024}, {4096, 4096}} {
		set, err := maps.New(maps.Size{Rules: 3, Buckets: c.want}, bpf.AbiHook{})
		testenv.Must(t, err)
		if got := set.Size(); got != (maps.Size{Views: 2, Rules: 3, Buckets: c.got, Labels: 1, Shares: 1, Leases: 1}) {
			t.Errorf("room for %d buckets: %+v, want %d", c.want, got, c.got)
		}
		set.Close()
	}
}

func TestPinAndOpen(t *testing.T) {
	dir := privateBPFFS(t)
	r := newRig(t, maps.Size{Rules: 8, Buckets: 64})
	rules := []policy.Rule{
		{Prefix: netip.MustParsePrefix("10.0.0.0/8"), Rate: 8000, Capacity: 2000},
		{Prefix: netip.MustParsePrefix("2001:db8:1::/48"), Rate: 1e9, Capacity: 1 << 20, Algorithm: policy.Leaky, Each: policy.Each{Kind: policy.EachFlow}},
	}
	for _, rule := range rules {
		r.put(rule)
	}
	r.send(policy.GCRA, to("10.1.1.1"), 1000)
	r.send(policy.Leaky, to("2001:db8:1::7"), 500)
	if err := r.Store.Pin(dir); err != nil {
		t.Fatal(err)
	}
	// Pinned twice, as when a new directory is built beside the old one.
	second := filepath.Join(dir, "second")
	if err := os.Mkdir(second, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := r.Store.Pin(second); err != nil {
		t.Fatal(err)
	}
	hook, size := r.Store.Hook(), r.Store.Size()
	r.Set.Store.Close()
	for _, dir := range []string{dir, second} {
		store, err := maps.Open(dir, true)
		if err != nil {
			t.Fatal(err)
		}
		defer store.Close()
		set := store.View(view)
		if set.Store.Hook() != hook || set.Store.Size() != size {
			t.Errorf("opened with %+v %+v, want %+v %+v", set.Store.Hook(), set.Store.Size(), hook, size)
		}
		var got []policy.Rule
		for _, e := range set.Rules() {
			got = append(got, e.Rule)
		}
		if !slices.Equal(got, rules) {
			t.Errorf("opened with rules %+v, want %+v", got, rules)
		}
		for _, c := range []struct {
			flow  maps.Flow
			bytes uint64
		}{{to("10.1.1.1"), 1000}, {to("2001:db8:1::7"), 500}} {
			e, _ := set.Match(c.flow.Dst)
			if got := set.Store.State(e, policy.MatchDst, c.flow, r.now).Level >> 20; got != c.bytes {
				t.Errorf("opened, the level of %v is %d bytes, want %d", c.flow.Dst, got, c.bytes)
			}
			if counted := set.Store.Counters(e.ID); counted.PassedBytes != c.bytes {
				t.Errorf("opened, counters are %+v", counted)
			}
		}
	}
}

// A store that grows keeps the affected hosts of shadows.
func TestGrowthKeepsAffectedHosts(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 4, Buckets: 64, Affected: 16})
	shadowed := rule("10.0.0.0/8", 1e9, 1<<20)
	shadowed.Shadow = policy.Shadow{Rate: 8000, Capacity: 2000, Each: policy.Each{Kind: policy.EachHost}}
	e := r.put(shadowed)
	for range 3 {
		r.send(policy.GCRA, to("10.0.0.7"), 1000)
	}
	want := []maps.Affected{{Subnet: netip.MustParsePrefix("10.0.0.7/32"), Packets: 1, Bytes: 1000}}
	size := r.Store.Size()
	for range 2 {
		size.Rules *= 2
		grown, err := r.Store.Derive(size, r.Store.Hook())
		testenv.Must(t, err)
		defer grown.Close()
		got, err := grown.Affected(grown.View(view).Rules())
		testenv.Must(t, err)
		if !slices.Equal(got[e.ID], want) {
			t.Errorf("with room for %d rules, these were affected: %+v, want %+v", size.Rules, got[e.ID], want)
		}
	}
}

// A store can grow until it uses all maps of rules. Packets find the rules in each map, and rules keep their counters.
func TestGrowthToTheLastMap(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 1, Buckets: 4, Shares: 1, Pools: true})
	host := func(n int) string { return fmt.Sprint("10.0.0.", n) }
	for n := 1; ; n++ {
		r.put(rule(host(n)+"/32", 1e9, 1<<20))
		for i := 1; i <= n; i++ {
			r.send(policy.GCRA, to(host(i)), 1000)
		}
		for i, e := range r.Rules() {
			if got, want := r.Store.Counters(e.ID).PassedPackets, uint64(n-i); got != want {
				t.Errorf("in %d maps, rule %d has counted %d packets, want %d", n, i, got, want)
			}
		}
		size := r.Store.Size()
		size.Rules++
		grown, err := r.Store.Derive(size, r.Store.Hook())
		if n == int(bpf.AbiLayoutRULE_MAPS) {
			if !errors.Is(err, maps.ErrFull) {
				t.Errorf("in %d maps, once more: error %v, want ErrFull", n, err)
			}
			return
		}
		testenv.Must(t, err)
		defer grown.Close()
		r.loaded, err = program.Load(grown, grown.Hook())
		testenv.Must(t, err)
		defer r.loaded.Close()
		r.Set = grown.View(view)
		r.Store.UseClock(r.clock)
	}
}

// While a store that grows is copied, a CPU may be advancing a fair clock. The clock of the copy goes on all the same: a flood
// has what another host leaves, and that host loses nothing.
func TestGrowthKeepsFairClocks(t *testing.T) {
	const bytesPerSecond = 1e6
	r := newRig(t, maps.Size{Rules: 1, Buckets: 64, Shares: 1, Pools: true})
	shared := rule("10.0.0.0/24", 8*bytesPerSecond, 200_000)
	shared.Share.Kind = policy.ShareHost
	r.put(shared)
	traffic := func(seconds int) (flood, steady int) {
		for range seconds * 1000 {
			r.now += 1e6
			for range 3 {
				if r.send(policy.GCRA, to("10.0.0.7"), 1000) {
					flood++
				}
			}
			if r.now/1e6%4 == 0 && r.send(policy.GCRA, to("10.0.0.8"), 1000) {
				steady++
			}
		}
		return flood, steady
	}
	traffic(2)
	shares, share := r.Store.Replacements()[bpf.ShapectlMapShares], bpf.AbiShare{}
	testenv.Must(t, shares.Lookup(uint32(0), &share))
	share.Lock = 1
	share.Weight += 3 // a sharer has no bin at this moment
	testenv.Must(t, shares.Put(uint32(0), &share))
	size := r.Store.Size()
	size.Shares++
	grown, err := r.Store.Derive(size, r.Store.Hook())
	testenv.Must(t, err)
	defer grown.Close()
	r.loaded, err = program.Load(grown, grown.Hook())
	testenv.Must(t, err)
	defer r.loaded.Close()
	if flood, steady := traffic(4); steady != 1000 || flood < 2800 || flood > 3200 {
		t.Errorf("in 4 s, %d packets of the flood passed, want about 3000, and %d of the other host, want 1000", flood, steady)
	}
}

// A rule that had fair shares once, and has them again, does not use those that another rule got meanwhile.
func TestSharesAreFreed(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 3, Buckets: 4, Shares: 2, Pools: true})
	put := func(network string, kind policy.ShareKind) error {
		shared := rule(network, 1e6, 1<<16)
		shared.Share.Kind = kind
		_, err := r.Put(shared)
		return err
	}
	const first, second = "10.0.0.0/24", "10.0.1.0/24"
	testenv.Must(t, errors.Join(put(first, policy.ShareHost), put(first, policy.ShareNone), put(second, policy.ShareHost), put(first, policy.ShareHost)))
	if err := put("10.0.2.0/24", policy.ShareHost); !errors.Is(err, maps.ErrFull) {
		t.Errorf("a third rule has fair shares: %v", err)
	}
}

// Sharers count as active until their part has been sent, or no packet has come for a while: only packets advance the clock.
func TestActiveSharers(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 1, Buckets: 4, Shares: 1, Pools: true})
	shared := rule("10.0.0.0/24", 8000, 1<<20)
	shared.Share.Kind = policy.ShareHost
	e := r.put(shared)
	for range 9 {
		r.send(policy.GCRA, to("10.0.0.7"), 1000) // for 9 s at this rate
	}
	for _, test := range []struct {
		after  uint64 // ns
		active int
	}{{0, 1}, {4e9, 1}, {8e9, 0}} {
		r.now += test.after
		if got := r.Store.ActiveSharers()[e.ID]; got != test.active {
			t.Errorf("after %d ns: %d active sharers, want %d", test.after, got, test.active)
		}
	}
}

// Pins of another layout are refused with a typed error, whatever the difference is.
func TestOpenOtherLayout(t *testing.T) {
	pinned := func(t *testing.T) string {
		dir := privateBPFFS(t)
		set, err := maps.New(maps.Size{Rules: 2, Buckets: 4}, bpf.AbiHook{L2Bytes: 14})
		testenv.Must(t, err)
		defer set.Close()
		if err := set.Pin(dir); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	// replace pins another map where one was.
	replace := func(t *testing.T, path string, valueSize uint32, contents ...ebpf.MapKV) {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		m, err := ebpf.NewMap(&ebpf.MapSpec{
			Type: ebpf.Array, KeySize: 4, ValueSize: valueSize, MaxEntries: 4, Flags: unix.BPF_F_MMAPABLE, Contents: contents,
		})
		testenv.Must(t, err)
		defer m.Close()
		if err := m.Pin(path); err != nil {
			t.Fatal(err)
		}
	}
	for name, spoil := range map[string]func(t *testing.T, dir string){
		"another number": func(t *testing.T, dir string) {
			hook := bpf.AbiHook{Layout: maps.Layout() + 1}
			replace(t, filepath.Join(dir, "hook"), uint32(unsafe.Sizeof(hook)), ebpf.MapKV{Key: uint32(0), Value: hook})
		},
		"no maps":            func(t *testing.T, dir string) { removeAll(t, dir) },
		"one map less":       func(t *testing.T, dir string) { os.Remove(filepath.Join(dir, bpf.ShapectlMapKeys)) },
		"settings of a size": func(t *testing.T, dir string) { replace(t, filepath.Join(dir, "hook"), 64) },
		"rules of a size":    func(t *testing.T, dir string) { replace(t, filepath.Join(dir, bpf.ShapectlMapRules), 64) },
		"buckets of a size":  func(t *testing.T, dir string) { replace(t, filepath.Join(dir, "table"), 8) },
		"views of a size":    func(t *testing.T, dir string) { replace(t, filepath.Join(dir, "views"), 8) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := pinned(t)
			spoil(t, dir)
			set, err := maps.Open(dir, true)
			if !errors.Is(err, maps.ErrOtherLayout) {
				t.Errorf("opened with error %v, want ErrOtherLayout", err)
			}
			if err == nil {
				set.Close()
			}
		})
	}
}

// forbidden are writes to a store, which must fail if it was opened for reading.
var forbidden = map[string]func(*maps.Set){
	"delete": func(s *maps.Set) { s.Delete(netip.MustParsePrefix("10.0.0.0/8")) },
	"clear":  func(s *maps.Set) { s.Store.Clear(s) },
	"put":    func(s *maps.Set) { s.Put(rule("10.0.0.0/8", 1000, 1000)) },
	"ifb":    func(s *maps.Set) { s.SetIfb(7) },
	"end":    func(s *maps.Set) { s.Store.End() },
}

// forbiddenEnv makes TestStoreForReading do one of them, on pins in a directory.
const forbiddenEnv = "SHAPECTL_TEST_FORBIDDEN"

// A write to a store that was opened for reading ends the process, and changes nothing. The test starts another process
// for each write, because nothing recovers from the fault under the race detector.
func TestStoreForReading(t *testing.T) {
	if name, dir, ok := strings.Cut(os.Getenv(forbiddenEnv), " "); ok {
		store, err := maps.Open(dir, false)
		testenv.Must(t, err)
		fmt.Println("opened")
		forbidden[name](store.View(view))
		fmt.Println("written")
		return
	}
	r := newRig(t, maps.Size{Rules: 16, Buckets: 64})
	rule := rule("10.0.0.0/8", 1e6, 100000)
	e := r.put(rule)
	dir := testenv.BPFFS(t)
	testenv.Must(t, r.Store.Pin(dir))
	writable, _ := mappings(t)
	store, err := maps.Open(dir, false)
	testenv.Must(t, err)
	defer store.Close()
	now, readable := mappings(t)
	if now != writable || readable == 0 {
		t.Errorf("%d maps are writable, want %d as before; %d are read-only", now, writable, readable)
	}
	if got := store.View(view).Policy(); !slices.Equal(got, []policy.Rule{e.Rule}) {
		t.Errorf("rules are %+v", got)
	}
	for name := range forbidden {
		cmd := exec.Command(os.Args[0], "-test.run=^TestStoreForReading$")
		cmd.Env = append(os.Environ(), forbiddenEnv+"="+name+" "+dir)
		said, err := cmd.Output()
		if err == nil || !strings.HasPrefix(string(said), "opened\n") || strings.Contains(string(said), "written") {
			t.Errorf("%s: the store could be written to: %v, %s", name, err, said)
		}
	}
	if got := r.Policy(); !slices.Equal(got, []policy.Rule{e.Rule}) || r.Ifb() != 0 {
		t.Errorf("rules are %+v, ifb %d", got, r.Ifb())
	}
}

// mappings counts the maps in the memory of this process.
func mappings(t *testing.T) (writable, readable int) {
	t.Helper()
	all, err := os.ReadFile("/proc/self/maps")
	testenv.Must(t, err)
	for line := range strings.Lines(string(all)) {
		switch {
		case !strings.Contains(line, "bpf-map"):
		case strings.Contains(line, " rw-s "):
			writable++
		case strings.Contains(line, " r--s "):
			readable++
		}
	}
	return writable, readable
}

func removeAll(t *testing.T, dir string) {
	t.Helper()
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if err := os.Remove(filepath.Join(dir, f.Name())); err != nil {
			t.Fatal(err)
		}
	}
}
