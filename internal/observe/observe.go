// Package observe looks at packets beside the limits: how long round trips of TCP take and
// what is sent again, and which hosts or flows send how much. Its programs are attached
// only while a process looks. They change no packet, and the kernel removes them with the
// process. docs/watch.md says what is measured.
package observe

import (
	"fmt"
	"maps"
	"net/netip"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/pkg/loader"
	shapemaps "github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Bounds of what is kept. Nothing that senders do makes it more.
const (
	MaxRules = 1 << 16
	maxFlows = 1 << 14
	maxHosts = 1 << 14
	// A sample is 64 bytes with its header. The ring holds those of a second, and Follow empties it.
	maxSamples  = 30_000 // a second
	ringBytes   = 1 << 21
	maxNewFlows = 20_000 // a second
)

// Options say how to look.
type Options struct {
	Netns string // as netns.In takes it
	// OneIn is of how many flows one is followed, a power of two; 0 is 1.
	OneIn uint32

	virtual bool // for tests, see objects
}

// A Part is what was measured of a rule or host, while it limited or while it did not.
type Part struct {
	// Receiver are round trips between the device and those who receive what the rule
	// limits, with the wait in its queue. Sender are those between the device and who sends.
	Receiver, Sender Times
	// Of packets with payload, as on the wire; Again were sent again.
	Packets, Bytes, AgainPackets, AgainBytes uint64
}

func (p *Part) count(c bpf.ObserveCounts) {
	p.Packets += c.Packets
	p.Bytes += c.Bytes
	p.AgainPackets += c.AgainPackets
	p.AgainBytes += c.AgainBytes
}

// Parts are while a rule limited, and while it did not: it limits until a second after it
// last dropped, delayed or marked a packet.
type Parts struct{ Limited, Free Part }

func (p *Parts) part(limited bool) *Part {
	if limited {
		return &p.Limited
	}
	return &p.Free
}

// A HostKey is a host that a rule matches.
type HostKey struct {
	live.Key
	Host netip.Addr
}

// A Reading is what was measured since the reading before.
type Reading struct {
	Interval time.Duration
	// Rules and Hosts have those with anything measured. A round trip counts for the rules of both directions.
	Rules map[live.Key]*Parts
	Hosts map[HostKey]*Parts
	// LostSamples, LostFlows and LostRules were left out, as there were too many.
	LostSamples, LostFlows uint64
	LostRules              int
}

// An Observer follows the TCP flows of rules. Its methods must not run at the same time.
type Observer struct {
	options Options
	objects *objects
	hooks   hooks
	ring    *ringbuf.Reader
	memory  []byte
	states  []bpf.ObserveState // the same: the map rules
	rules   map[live.Key]*rule
	byPlace []*rule // nil where free
	free    []uint32
	left    []uint32 // of deleted rules, until Read has forgotten what was measured of them
	over    int      // rules without a place
	hosts   map[bpf.ObserveHost]*host
	samples map[HostKey]*Parts
	round   uint64 // numbers the calls of Follow and Read
	read    time.Time
	lost    [2]uint64
}

type rule struct {
	live.Key
	place    uint32
	prefixes []bpf.ObservePrefix
	limited  uint64 // packets that it dropped, delayed or marked, up to the last Follow
	round    uint64 // when it was last seen
	counts   [2]bpf.ObserveCounts
	parts    Parts
}

type host struct {
	counts [2]bpf.ObserveCounts
	round  uint64
}

// Start begins to look. Nothing is attached before Follow.
func Start(o Options) (*Observer, error) {
	if err := checkTCX(); err != nil {
		return nil, fmt.Errorf("follow TCP flows: %w", err)
	}
	if o.OneIn == 0 {
		o.OneIn = 1
	}
	if o.OneIn&(o.OneIn-1) != 0 {
		return nil, fmt.Errorf("follow TCP flows: one of %d is no power of two", o.OneIn)
	}
	settings := bpf.ObserveWatching{SampleMask: o.OneIn - 1, Most: [2]uint32{budget(maxSamples), budget(maxNewFlows)}}
	objects, err := newObjects(rttPrograms, map[string]uint32{
		bpf.ObserveMapPrefixes: 2 * MaxRules, bpf.ObserveMapRules: MaxRules, bpf.ObserveMapHosts: maxHosts,
		bpf.ObserveMapFlows: maxFlows, bpf.ObserveMapBudget: 1, bpf.ObserveMapSamples: ringBytes,
	}, settings)
	if err != nil {
		return nil, fmt.Errorf("follow TCP flows: %w", err)
	}
	objects.virtual = o.virtual
	w := &Observer{
		options: o, objects: objects, hooks: hooks{netns: o.Netns, objects: objects, at: map[hookKey]*hook{}}, rules: map[live.Key]*rule{},
		hosts: map[bpf.ObserveHost]*host{}, samples: map[HostKey]*Parts{}, read: time.Now(),
	}
	w.ring, err = ringbuf.NewReader(objects.maps[bpf.ObserveMapSamples])
	if err == nil {
		size := MaxRules * int(unsafe.Sizeof(bpf.ObserveState{}))
		w.memory, err = unix.Mmap(objects.maps[bpf.ObserveMapRules].FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err == nil {
		w.states = unsafe.Slice((*bpf.ObserveState)(unsafe.Pointer(&w.memory[0])), MaxRules)
	}
	if err != nil {
		w.Close()
		return nil, fmt.Errorf("follow TCP flows: %w", err)
	}
	return w, nil
}

// Close ends looking: nothing is left on the devices.
func (w *Observer) Close() error {
	err := w.hooks.close()
	if w.ring != nil {
		w.ring.Close()
	}
	if w.memory != nil {
		unix.Munmap(w.memory)
	}
	w.objects.close()
	return err
}

// Follow looks at the packets of these rules from now on, and at no others. It takes note of
// what they limited and of round trips since the last call, so call it several times a second,
// or with each reading of the rules. The error is about devices where packets cannot be seen; a device
// that is gone is none.
func (w *Observer) Follow(rules []*live.Item) error {
	w.round++
	w.drain()
	now := shapemaps.Now()
	w.over = 0
	wanted := map[hookKey]policy.Match{}
	for _, it := range rules {
		if it.IsPool() {
			continue
		}
		wanted[hookKey{it.Device, it.Place.Direction}] = it.Place.Match
		// Acknowledgements come the other way.
		for _, other := range []policy.Direction{policy.Egress, policy.Ingress} {
			if at := (hookKey{it.Device, other}); other != it.Place.Direction {
				if _, known := wanted[at]; !known {
					wanted[at] = other.FarSide()
				}
			}
		}
		w.note(it, now)
	}
	for key, r := range w.rules {
		if r.round != w.round {
			w.drop(key)
		}
	}
	return w.hooks.place(wanted, w.moved)
}

// note follows a rule, and notes whether it limited anything since the last time.
func (w *Observer) note(it *live.Item, now uint64) {
	limited := it.DroppedPackets + it.DelayedPackets + it.MarkedPackets
	have := w.rules[it.Key]
	if have == nil {
		if have = w.add(it.Key, limited); have == nil {
			w.over++
			return
		}
	}
	have.round = w.round
	state := &w.states[have.place]
	state.Flags = flagsOf(it.Limit)
	if limited > have.limited && state.Flags&uint32(bpf.ObserveStateFlagSTATE_BY_KEY) == 0 {
		state.LimitedUntil = max(state.LimitedUntil, now+uint64(time.Second))
	}
	have.limited = limited
}

// flagsOf are the enum state_flag of a rule. A clsact filter runs behind all tcx programs,
// and on ingress packets of rules that queue go another way.
func flagsOf(l *live.Limit) (flags uint32) {
	if l.Place.Mode != loader.TCX || l.Place.Direction == policy.Ingress && queues(l) {
		return uint32(bpf.ObserveStateFlagSTATE_UNSEEN)
	}
	if l.Each.Kind != policy.EachAll || l.Share.Kind != policy.ShareNone {
		flags |= uint32(bpf.ObserveStateFlagSTATE_BY_KEY)
	}
	return flags
}

// queues reports whether a rule or a pool above it may queue packets. A pool that is not known may.
func queues(l *live.Limit) bool {
	for ; l.Excess != policy.Delay; l = l.Above {
		if l.Above == nil {
			return l.Within != ""
		}
	}
	return true
}

// add gives a rule a place; nil if there is none left.
func (w *Observer) add(key live.Key, limited uint64) *rule {
	place := uint32(len(w.byPlace))
	if n := len(w.free); n > 0 {
		place, w.free = w.free[n-1], w.free[:n-1]
	} else if place == MaxRules {
		return nil
	} else {
		w.byPlace = append(w.byPlace, nil)
	}
	w.states[place] = bpf.ObserveState{}
	r := &rule{Key: key, place: place, limited: limited}
	w.rules[key], w.byPlace[place] = r, r
	if index := w.hooks.index(key); index != 0 {
		w.match(r, index)
	}
	return r
}

// match makes packets of a device find a rule; 0 for no device.
func (w *Observer) match(r *rule, ifindex int) {
	prefixes := w.objects.maps[bpf.ObserveMapPrefixes]
	for _, p := range r.prefixes {
		prefixes.Delete(p)
	}
	r.prefixes = nil
	network, err := netip.ParsePrefix(r.Network)
	if err != nil || ifindex == 0 {
		return
	}
	p := prefixOf(ifindex, r.Direction == policy.Ingress.String(), network)
	// A full map leaves the rule out, as if it were one too many.
	if prefixes.Put(p, r.place) == nil {
		r.prefixes = append(r.prefixes, p)
	} else {
		w.over++
	}
}

// moved makes packets of a device find its rules, after it got another index.
func (w *Observer) moved(at hookKey, ifindex int) {
	for _, r := range w.rules {
		if r.Device == at.device && r.Direction == at.direction.String() {
			w.match(r, ifindex)
		}
	}
}

func (w *Observer) drop(key live.Key) {
	r := w.rules[key]
	w.match(r, 0)
	delete(w.rules, key)
	w.byPlace[r.place] = nil
	w.left = append(w.left, r.place)
}

// Read returns what was measured since the last Read, or since Start.
func (w *Observer) Read() (Reading, error) {
	w.round++
	w.drain()
	now := time.Now()
	out := Reading{Interval: now.Sub(w.read), Rules: map[live.Key]*Parts{}, Hosts: w.samples, LostRules: w.over}
	w.read, w.samples = now, map[HostKey]*Parts{}
	for key, r := range w.rules {
		counts := w.states[r.place].Counts
		for limited, c := range counts {
			r.parts.part(limited == 1).count(since(c, r.counts[limited]))
		}
		r.counts = counts
		if p := r.parts; p.Limited.any() || p.Free.any() {
			out.Rules[key] = &p
			r.parts = Parts{}
		}
	}
	if err := w.readHosts(out.Hosts); err != nil {
		return out, err
	}
	samples, flows, err := w.objects.lost()
	out.LostSamples, out.LostFlows = samples-w.lost[0], flows-w.lost[1]
	w.lost = [2]uint64{samples, flows}
	return out, err
}

func (p Part) any() bool { return p.Packets > 0 || p.Receiver.Samples > 0 || p.Sender.Samples > 0 }

// since is what was counted since earlier; all, if counting began anew.
func since(now, earlier bpf.ObserveCounts) bpf.ObserveCounts {
	if now.Packets < earlier.Packets || now.Bytes < earlier.Bytes {
		return now
	}
	now.Packets -= earlier.Packets
	now.Bytes -= earlier.Bytes
	now.AgainPackets -= min(earlier.AgainPackets, now.AgainPackets)
	now.AgainBytes -= min(earlier.AgainBytes, now.AgainBytes)
	return now
}

// readHosts adds what hosts sent since the last Read, and forgets hosts of deleted rules.
func (w *Observer) readHosts(out map[HostKey]*Parts) error {
	var gone []bpf.ObserveHost
	known := w.objects.maps[bpf.ObserveMapHosts]
	err := each(known, maxHosts, func(k bpf.ObserveHost, state bpf.ObserveState) {
		if int(k.Rule) >= len(w.byPlace) || w.byPlace[k.Rule] == nil {
			gone = append(gone, k)
			return
		}
		have := w.hosts[k]
		if have == nil {
			have = &host{}
			w.hosts[k] = have
		}
		have.round = w.round
		for limited, c := range state.Counts {
			if fresh := since(c, have.counts[limited]); fresh.Packets > 0 {
				w.hostParts(out, k).part(limited == 1).count(fresh)
			}
		}
		have.counts = state.Counts
	})
	maps.DeleteFunc(w.hosts, func(_ bpf.ObserveHost, h *host) bool { return h.round != w.round })
	if err != nil {
		return err
	}
	for _, k := range gone {
		known.Delete(k) // if it is not there any more, so be it
	}
	w.free, w.left = append(w.free, w.left...), nil
	return nil
}

func (w *Observer) hostParts(out map[HostKey]*Parts, k bpf.ObserveHost) *Parts {
	r := w.byPlace[k.Rule]
	network, _ := netip.ParsePrefix(r.Network)
	key := HostKey{r.Key, addrOf(k.Addr, network.Addr().Is4())}
	if out[key] == nil {
		out[key] = &Parts{}
	}
	return out[key]
}

// drain takes samples out of the ring.
func (w *Observer) drain() {
	w.ring.SetDeadline(time.Unix(1, 0)) // what is there, without waiting
	var record ringbuf.Record
	for {
		if err := w.ring.ReadInto(&record); err != nil {
			return
		}
		if len(record.RawSample) < int(unsafe.Sizeof(bpf.ObserveRoundTrip{})) {
			continue
		}
		s := *(*bpf.ObserveRoundTrip)(unsafe.Pointer(&record.RawSample[0]))
		for side, k := range s.Host {
			if int(k.Rule) >= len(w.byPlace) || w.byPlace[k.Rule] == nil {
				continue
			}
			limited := s.Limited[side] != 0
			parts := []*Part{w.byPlace[k.Rule].parts.part(limited)}
			if len(w.samples) < maxHosts {
				parts = append(parts, w.hostParts(w.samples, k).part(limited))
			}
			for _, p := range parts {
				if side == 0 {
					p.Receiver.add(time.Duration(s.Rtt))
				} else {
					p.Sender.add(time.Duration(s.Rtt))
				}
			}
		}
	}
}
