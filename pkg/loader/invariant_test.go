package loader

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"

	"math"
	"net/netip"
	"slices"
	"sync"

	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/cilium/ebpf/ringbuf"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// An oracle checks the window bound packet by packet while policies are switched. Each packet
// carries the time at which it was sent, and a witness behind the limits records the time at
// which it passed: it was metered between the two. The times of the switches are known
// exactly. From these times the oracle computes the most room that each bucket can have
// after each passed packet: as if the packet was charged as early as possible, and the room
// was read as late as possible. A change keeps the room, up to the new capacity. If even that room is below 0, more than
// the room at the beginning and rate * time passed in some window. The tolerance is one byte, for rounding.

// A passage is a packet that passed the limits. Its sender has written Sent and Far into it.
type passage struct {
	Sent   uint64 // ns of maps.Now
	Far    [4]byte
	Bytes  uint32
	Passed uint64 // ns of maps.Now
}

// A witness records passages.
type witness struct {
	lost   *ebpf.Map
	reader *ringbuf.Reader
	mutex  sync.Mutex
	noted  []passage
}

const (
	stampAt    = headersIPv6 // offset in a frame of the data that the sender writes
	stampBytes = 8 + 4
)

// witness attaches a witness behind all limits of a direction of a device.
func (r *rig) witness(device string, d policy.Direction) *witness {
	r.t.Helper()
	ring, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.RingBuf, MaxEntries: 4 << 20})
	testenv.Must(r.t, err)
	r.t.Cleanup(func() { ring.Close() })
	lost, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	testenv.Must(r.t, err)
	r.t.Cleanup(func() { lost.Close() })
	const (
		size     = 24
		next     = -1 // TCX_NEXT and TC_ACT_UNSPEC
		noWakeup = 1  // BPF_RB_NO_WAKEUP
	)
	instructions := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.Mov.Imm(asm.R2, stampAt),
		asm.Mov.Reg(asm.R3, asm.R10), asm.Add.Imm(asm.R3, -size), asm.Mov.Imm(asm.R4, stampBytes),
		asm.FnSkbLoadBytes.Call(),
		asm.JNE.Imm(asm.R0, 0, "out"),
		asm.LoadMem(asm.R2, asm.R6, 0, asm.Word), // skb->len
		asm.StoreMem(asm.R10, 12-size, asm.R2, asm.Word),
		asm.FnKtimeGetNs.Call(),
		asm.StoreMem(asm.R10, 16-size, asm.R0, asm.DWord),
		asm.LoadMapPtr(asm.R1, ring.FD()),
		asm.Mov.Reg(asm.R2, asm.R10), asm.Add.Imm(asm.R2, -size), asm.Mov.Imm(asm.R3, size), asm.Mov.Imm(asm.R4, noWakeup),
		asm.FnRingbufOutput.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.StoreImm(asm.R10, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, lost.FD()),
		asm.Mov.Reg(asm.R2, asm.R10), asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, next).WithSymbol("out"),
		asm.Return(),
	}
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "witness", Type: ebpf.SchedCLS, License: "GPL", Instructions: instructions})
	testenv.Must(r.t, err)
	r.t.Cleanup(func() { program.Close() })
	addForeignFilter(r.t, &foreign{program: program}, device, d, 60001)
	reader, err := ringbuf.NewReader(ring)
	testenv.Must(r.t, err)
	r.t.Cleanup(func() { reader.Close() })
	w := &witness{lost: lost, reader: reader}
	stop := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() { // so that a long switch does not fill the ring
		for tick := time.Tick(50 * time.Millisecond); ; {
			select {
			case <-stop:
				return
			case <-tick:
				if err := w.note(); err != nil {
					r.t.Error(err)
					return
				}
			}
		}
	})
	r.t.Cleanup(func() {
		close(stop)
		done.Wait()
	})
	return w
}

// note reads all new passages.
func (w *witness) note() error {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if err := w.reader.Flush(); err != nil {
		return err
	}
	var record ringbuf.Record
	for {
		err := w.reader.ReadInto(&record)
		if errors.Is(err, ringbuf.ErrFlushed) {
			return nil
		}
		if err != nil {
			return err
		}
		var p passage
		if _, err := binary.Decode(record.RawSample, binary.NativeEndian, &p); err != nil {
			return err
		}
		w.noted = append(w.noted, p)
	}
}

// passages are all passages until now, in order.
func (w *witness) passages(t *testing.T) []passage {
	t.Helper()
	testenv.Must(t, w.note())
	var lost uint64
	testenv.Must(t, w.lost.Lookup(uint32(0), &lost))
	if lost > 0 {
		t.Fatalf("%d passages were not recorded", lost)
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	all := slices.Clone(w.noted)
	slices.SortStableFunc(all, func(a, b passage) int { return cmp.Compare(a.Passed, b.Passed) })
	return all
}

// A regime is the rules that are in force from a time on.
type regime struct {
	from     uint64 // ns of maps.Now
	rules    []policy.Rule
	reverted bool // the change of the previous regime was reverted: buckets are those of the regime before it
}

// decides is the rule of a regime for an address; false for none, and for an unlimited one.
func (g regime) decides(far netip.Addr) (rule policy.Rule, limited bool) {
	bits := -1
	for _, r := range g.rules {
		if r.Prefix.Contains(far) && r.Prefix.Bits() > bits {
			rule, bits = r, r.Prefix.Bits()
		}
	}
	return rule, bits >= 0 && rule.Rate != policy.Unlimited
}

// A bucketName identifies a bucket: its rule, its key, and the regime in which it was created.
type bucketName struct {
	prefix netip.Prefix
	key    string // "" for all
	since  int
}

func (b bucketName) String() string {
	return fmt.Sprintf("%v %s since regime %d", b.prefix, b.key, b.since)
}

// A clock is the byte clock of a rule: the bytes since the first regime at the start of each
// regime, and the bytes per ns in it.
type clock struct {
	at, rate []float64
	capacity []float64 // by regime; without limit for none
	since    []int     // by regime: the regime in which the rule's buckets were created; -1 for none
}

// An oracle knows which rules were in force at any time.
type oracle struct {
	regimes []regime
	clocks  map[netip.Prefix]*clock
	beyond  float64 // bytes that a bucket may hold beyond its capacity
}

func newOracle(regimes []regime) *oracle {
	o := &oracle{regimes: regimes, clocks: map[netip.Prefix]*clock{}}
	for _, g := range regimes {
		for _, r := range g.rules {
			if o.clocks[r.Prefix] == nil {
				o.clocks[r.Prefix] = o.clock(r.Prefix)
			}
		}
	}
	return o
}

func (o *oracle) clock(p netip.Prefix) *clock {
	c := new(clock)
	var at, rate float64
	for k, g := range o.regimes {
		if k > 0 {
			at += rate * float64(g.from-o.regimes[k-1].from)
		}
		since, capacity := -1, math.Inf(1)
		i := slices.IndexFunc(g.rules, func(r policy.Rule) bool { return r.Prefix == p && r.Rate != policy.Unlimited })
		if i >= 0 {
			// Without such a rule the last rate stays, because the buckets may be in use again after a revert.
			rate, capacity = float64(g.rules[i].Rate)/8e9, float64(g.rules[i].Capacity)
			switch {
			case k > 0 && c.since[k-1] >= 0:
				since = c.since[k-1]
			case g.reverted && c.since[k-2] >= 0:
				since = c.since[k-2]
			default:
				since = k
			}
		}
		c.at, c.rate = append(c.at, at), append(c.rate, rate)
		c.capacity, c.since = append(c.capacity, capacity), append(c.since, since)
	}
	return c
}

// lets returns the reading of a rule's clock at a time in a regime.
func (o *oracle) lets(c *clock, k int, now uint64) float64 {
	return c.at[k] + c.rate[k]*float64(now-o.regimes[k].from)
}

// at is the regime in force at a time.
func (o *oracle) at(now uint64) int {
	k, found := slices.BinarySearchFunc(o.regimes, now, func(g regime, now uint64) int { return cmp.Compare(g.from, now) })
	if !found {
		k--
	}
	return k
}

// A debt is the most room that a bucket can have, as the reading of its rule's clock at which it has none.
type debt struct {
	full   float64
	regime int // that of the last packet
}

// check ends the test unless all passages conform to the limits in force.
func (o *oracle) check(t *testing.T, all []passage) {
	t.Helper()
	// earliest[i] is when the first packet of passage i or any later one was sent.
	earliest := make([]uint64, len(all)+1)
	earliest[len(all)] = math.MaxUint64
	for i, p := range slices.Backward(all) {
		earliest[i] = min(p.Sent, earliest[i+1])
	}
	debts := map[bucketName]*debt{}
	beyond, worst, fullest, unclear, limited := 0, 0.0, math.Inf(-1), 0, 0
	for i, p := range all {
		far := netip.AddrFrom4(p.Far)
		first, last := o.at(p.Sent), o.at(p.Passed)
		name, rule, ok := o.bucket(last, far)
		if !ok && first == last {
			continue
		}
		limited++
		least, most := rule.Rate, rule.Rate
		for k := first; k < last; k++ {
			// It may have been metered before or after a switch.
			other, r, is := o.bucket(k, far)
			if !is || !ok || other != name {
				ok = false
				break
			}
			least, most = min(least, r.Rate), max(most, r.Rate)
		}
		if !ok {
			unclear++
			continue
		}
		c := o.clocks[name.prefix]
		d := debts[name]
		if d == nil {
			d = &debt{full: math.Inf(-1), regime: name.since}
			debts[name] = d
		}
		// A packet may be charged by the previous rate if the rule changed at that moment.
		slack := float64(most-least) / 8e9 * float64(p.Passed-p.Sent)
		o.charge(d, c, max(earliest[i], o.regimes[name.since].from), float64(p.Bytes))
		over := d.full - o.lets(c, last, p.Passed) - slack - o.beyond
		fullest = max(fullest, over)
		if over > 1 {
			if beyond++; beyond <= 5 {
				t.Errorf("packet %d, of %d bytes to %v, sent at %d, passed at %d: %v lacks %.0f bytes of room, of %d; regimes %d to %d of %d, the last one %d ns before",
					i, p.Bytes, far, p.Sent, p.Passed, name, over, rule.Capacity, first, last, len(o.regimes), p.Passed-o.regimes[last].from)
				if beyond == 1 {
					for k := max(0, last-5); k <= last; k++ {
						t.Logf("regime %d, since %d, reverted %v: %v", k, o.regimes[k].from, o.regimes[k].reverted, o.regimes[k].rules)
					}
				}
			}
			worst = max(worst, over)
		}
	}
	if beyond > 0 {
		t.Errorf("%d packets of %d exceed the bound, by up to %.0f bytes", beyond, len(all), worst)
	}
	t.Logf("%d packets passed, %d of them limited, %d of these during a switch; the fullest bucket was %.0f bytes short of full", len(all), limited, unclear, -fullest)
}

func (o *oracle) bucket(k int, far netip.Addr) (name bucketName, rule policy.Rule, limited bool) {
	rule, limited = o.regimes[k].decides(far)
	if !limited {
		return name, rule, false
	}
	name = bucketName{prefix: rule.Prefix, since: o.clocks[rule.Prefix].since[k]}
	switch rule.Each.Kind {
	case policy.EachHost:
		name.key = far.String()
	case policy.EachSubnet:
		name.key = netip.PrefixFrom(far, int(rule.Each.Bits)).Masked().String()
	}
	return name, rule, true
}

// charge charges a bucket with bytes at a time. It had no more room than the capacity of any regime since the last packet.
func (o *oracle) charge(d *debt, c *clock, now uint64, bytes float64) {
	last := o.at(now)
	for ; d.regime < last; d.regime++ {
		d.full = max(d.full, c.at[d.regime+1]-c.capacity[d.regime])
	}
	d.full = max(d.full, o.lets(c, last, now)-c.capacity[last]) + bytes
}

// A source sends packets of some sizes in turn to an address, through one hook.
type source struct {
	by     *testenv.Sender
	far    netip.Addr
	frames [][]byte
	sent   uint64
}

// source returns a source through the rig's direction of va, with frames that can hold a stamp.
func (r *rig) source(far string, sizes ...int) *source {
	from := "va"
	if r.direction == policy.Ingress {
		from = "vb"
	}
	f := &source{by: testenv.NewSender(r.t, from), far: netip.MustParseAddr(far)}
	for _, size := range sizes {
		f.frames = append(f.frames, r.frame(far, size))
	}
	return f
}

// six maps an IPv4 address to an IPv6 address, and sixNet an IPv4 network to an IPv6 network.
func six(a netip.Addr) netip.Addr {
	b := netip.MustParseAddr("2001:db8::").As16()
	copy(b[12:], a.AsSlice())
	return netip.AddrFrom16(b)
}

func sixNet(p netip.Prefix) netip.Prefix { return netip.PrefixFrom(six(p.Addr()), 96+p.Bits()) }

// A sending sends the packets of some sources.
type sending struct {
	stop   func()      // returns when the last packet was sent
	pauses [][2]uint64 // ns: begin and end of each time longer than 1 ms in which no packet was sent
	last   uint64      // ns: when the last packet was sent
}

// stamped is the next frame of a source, with the time at which it is sent.
func (f *source) stamped(now uint64) []byte {
	frame := f.frames[f.sent%uint64(len(f.frames))]
	binary.NativeEndian.PutUint64(frame[stampAt:], now)
	copy(frame[stampAt+8:], f.far.AsSlice())
	return frame
}

// keepSending sends a packet of each source in turn until it is stopped: one every so many
// ns, or as fast as possible for 0.
func (r *rig) keepSending(every uint64, sources ...*source) *sending {
	o := new(sending)
	var stop atomic.Bool
	var done sync.WaitGroup
	done.Go(func() {
		o.last = maps.Now()
		for due := o.last; !stop.Load(); {
			for _, f := range sources {
				now := maps.Now()
				for ; now < due; now = maps.Now() {
					time.Sleep(time.Duration(due - now))
				}
				due += every
				if now-o.last > 1e6 {
					o.pauses = append(o.pauses, [2]uint64{o.last, now})
				}
				o.last = now
				if err := f.by.Send(f.stamped(now)); err != nil {
					r.t.Error(err)
					return
				}
				f.sent++
			}
		}
	})
	o.stop = func() {
		stop.Store(true)
		done.Wait()
	}
	r.t.Cleanup(o.stop) // also if the test ends early
	return o
}

// between returns the bytes by which the clock of a rule, which is in all regimes, advances between two times.
func (o *oracle) between(p netip.Prefix, from, to uint64) float64 {
	c := o.clocks[p]
	return o.lets(c, o.at(to), to) - o.lets(c, o.at(from), from)
}

// matched returns how many of these packets matched a rule. A packet during a switch may have matched or not.
func (o *oracle) matched(all []passage) (least, most uint64) {
	for _, p := range all {
		far := netip.AddrFrom4(p.Far)
		some, every := false, true
		for k := o.at(p.Sent); k <= o.at(p.Passed); k++ {
			is := slices.ContainsFunc(o.regimes[k].rules, func(r policy.Rule) bool { return r.Prefix.Contains(far) })
			some, every = some || is, every && is
		}
		if every {
			least++
		}
		if some {
			most++
		}
	}
	return least, most
}
