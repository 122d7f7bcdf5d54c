package observe

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/live"
	shapemaps "github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Bounds of what is kept of talkers. Those beyond them are only in the sum.
const (
	maxTalkers     = 1 << 14
	maxNewTalkers  = 100_000 // a second
	countsHere     = 0       // the place of a prefix whose packets count
	countsNotAtAll = 1
)

// TalkersOptions say whose packets count.
type TalkersOptions struct {
	Netns     string // as netns.In takes it
	Device    string
	Direction policy.Direction
	Match     policy.Match
	Network   netip.Prefix
	Except    []netip.Prefix // networks in it that have rules of their own
	Framing   policy.Framing
	ByFlow    bool // else by the address that rules match,
	NAT       bool // or the one behind NAT
	OfHost    bool // Network is a host, which may be behind NAT
	// PassedUnknown says that packets may pass without being seen behind the rule.
	PassedUnknown bool
}

// TalkersOf are the options for the packets of a rule. all are the rules of its namespace.
func TalkersOf(all []live.Item, of *live.Limit) TalkersOptions {
	o := TalkersOptions{
		Device: of.Device, Direction: of.Place.Direction, Match: of.Place.Match, Network: of.Prefix, Framing: of.Framing,
		PassedUnknown: flagsOf(of)&uint32(bpf.ObserveStateFlagSTATE_UNSEEN) != 0,
	}
	for l := of; l != nil; l = l.Above {
		o.NAT = o.NAT || l.NAT
	}
	for i := range all {
		if p := all[i].Prefix; all[i].Place == of.Place && p.Bits() > o.Network.Bits() && o.Network.Contains(p.Addr()) {
			o.Except = append(o.Except, p)
		}
	}
	return o
}

// Traffic is packets and bytes on the wire.
type Traffic = bpf.ObserveTraffic

func add(t *Traffic, c Traffic) {
	t.Packets, t.Bytes = t.Packets+c.Packets, t.Bytes+c.Bytes
	t.PassedPackets, t.PassedBytes = t.PassedPackets+c.PassedPackets, t.PassedBytes+c.PassedBytes
}

// A Talker is a host or flow that sent something since the last Read.
type Talker struct {
	Key string // the address that rules match, or the flow
	Traffic
}

// A TalkersReading is what was sent since the last Read.
type TalkersReading struct {
	Interval time.Duration
	Talkers  []Talker // those that sent most first
	Total    Traffic
	Others   Traffic // of those that there was no room for
	// PassedUnknown: the passed packets and bytes say nothing.
	PassedUnknown bool
}

// Talkers count who sends how much. Its methods must not run at the same time.
type Talkers struct {
	options TalkersOptions
	objects *objects
	hooks   hooks
	placed  []bpf.ObservePrefix
	last    map[bpf.AbiKey]*talker
	total   Traffic
	round   uint64
	read    time.Time
}

type talker struct {
	Traffic
	round uint64
}

// StartTalkers begins to count on a device. The device may go and come back.
func StartTalkers(o TalkersOptions) (*Talkers, error) {
	if err := checkTCX(); err != nil {
		return nil, fmt.Errorf("count who sends: %w", err)
	}
	if len(o.Except) >= MaxRules {
		return nil, fmt.Errorf("count who sends: %d rules are inside %v, too many to leave out", len(o.Except), o.Network)
	}
	settings := bpf.ObserveWatching{
		Most: [2]uint32{bpf.ObserveExpenseELEMENTS: budget(maxNewTalkers)}, Overhead: int32(o.Framing.Overhead), Mpu: uint32(o.Framing.MPU),
	}
	if o.ByFlow {
		settings.ByFlow = 1
	}
	if o.OfHost {
		settings.OfHost = 1
	}
	objects, err := newObjects(talkersPrograms, map[string]uint32{
		bpf.ObserveMapPrefixes: uint32(len(o.Except)) + 1, bpf.ObserveMapTalkers: maxTalkers, bpf.ObserveMapBudget: 1, bpf.ObserveMapTotal: 1,
	}, settings)
	if err != nil {
		return nil, fmt.Errorf("count who sends: %w", err)
	}
	objects.nat = o.NAT
	t := &Talkers{
		options: o, objects: objects, hooks: hooks{netns: o.Netns, objects: objects, at: map[hookKey]*hook{}},
		last: map[bpf.AbiKey]*talker{},
	}
	if err := t.place(); err != nil {
		t.Close()
		return nil, err
	}
	t.read = time.Now()
	return t, nil
}

// place attaches the programs where they are not, because the device was made or its rules were attached again.
func (t *Talkers) place() error {
	t.hooks.looked = time.Time{}
	wanted := map[hookKey]policy.Match{{t.options.Device, t.options.Direction}: t.options.Match}
	return t.hooks.place(wanted, func(_ hookKey, ifindex int) { t.match(ifindex) })
}

// match makes packets of a device count; 0 for no device.
func (t *Talkers) match(ifindex int) {
	prefixes := t.objects.maps[bpf.ObserveMapPrefixes]
	for _, p := range t.placed {
		prefixes.Delete(p)
	}
	t.placed = nil
	if ifindex == 0 {
		return
	}
	put := func(network netip.Prefix, place uint32) {
		p := prefixOf(ifindex, t.options.Direction == policy.Ingress, network)
		if prefixes.Put(p, place) == nil {
			t.placed = append(t.placed, p)
		}
	}
	for _, network := range t.options.Except {
		put(network, countsNotAtAll)
	}
	put(t.options.Network, countsHere)
}

// Close ends counting: nothing is left on the device.
func (t *Talkers) Close() error {
	err := t.hooks.close()
	t.objects.close()
	return err
}

// Read returns who sent how much since the last Read, or since StartTalkers. With an error
// about the device comes what could be read.
func (t *Talkers) Read() (TalkersReading, error) {
	placed := t.place()
	now := time.Now()
	out := TalkersReading{Interval: now.Sub(t.read), PassedUnknown: t.options.PassedUnknown}
	t.read = now
	t.round++
	var sum Traffic
	err := each(t.objects.maps[bpf.ObserveMapTalkers], maxTalkers, func(k bpf.AbiKey, now Traffic) {
		have := t.last[k]
		if have == nil {
			have = &talker{}
			t.last[k] = have
		}
		if have.round == t.round {
			return // it came twice
		}
		have.round = t.round
		fresh := trafficSince(now, have.Traffic)
		if have.Traffic = now; fresh != (Traffic{}) {
			add(&sum, fresh)
			out.Talkers = append(out.Talkers, Talker{t.keyOf(k), fresh})
		}
	})
	if err != nil {
		return out, err
	}
	maps.DeleteFunc(t.last, func(_ bpf.AbiKey, v *talker) bool { return v.round != t.round })
	var cpus []Traffic
	if err := t.objects.maps[bpf.ObserveMapTotal].Lookup(uint32(0), &cpus); err != nil {
		return out, fmt.Errorf("read the sum of all: %w", err)
	}
	var total Traffic
	for _, c := range cpus {
		add(&total, c)
	}
	out.Total, t.total = trafficSince(total, t.total), total
	if len(t.last) > maxTalkers/2 { // else there was room for all, and only packets that came during Read make a difference
		out.Others.Packets, out.Others.Bytes = less(out.Total.Packets, sum.Packets), less(out.Total.Bytes, sum.Bytes)
		out.Others.PassedPackets, out.Others.PassedBytes = less(out.Total.PassedPackets, sum.PassedPackets), less(out.Total.PassedBytes, sum.PassedBytes)
	}
	slices.SortFunc(out.Talkers, func(a, b Talker) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Key, b.Key))
	})
	return out, placed
}

// less is a - b, but not below 0: both were read while packets passed.
func less(a, b uint64) uint64 { return a - min(a, b) }

// trafficSince is what was counted since earlier; all, if counting began anew.
func trafficSince(now, earlier Traffic) Traffic {
	if now.Packets < earlier.Packets || now.Bytes < earlier.Bytes || now.PassedBytes < earlier.PassedBytes {
		return now
	}
	now.Packets -= earlier.Packets
	now.Bytes -= earlier.Bytes
	now.PassedPackets = less(now.PassedPackets, earlier.PassedPackets)
	now.PassedBytes -= earlier.PassedBytes
	return now
}

func (t *Talkers) keyOf(k bpf.AbiKey) string {
	is4 := k.Family == 4
	if !t.options.ByFlow {
		return addrOf(k.Src, is4).String()
	}
	port := func(networkOrder uint16) uint16 {
		return binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, networkOrder))
	}
	return shapemaps.Flow{Src: addrOf(k.Src, is4), Dst: addrOf(k.Dst, is4), Proto: k.Proto, SrcPort: port(k.Sport), DstPort: port(k.Dport)}.String()
}
