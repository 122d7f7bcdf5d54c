package doctor

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

const allCapabilities = 1<<41 - 1

// healthy is a system on which eth0 has one rule, and nothing is to be said.
func healthy() *Facts {
	return &Facts{
		System: System{
			Kernel: "Linux 6.6.0", Capabilities: allCapabilities, Hook: loader.TCX, JIT: true,
			BPFFS: loader.BPFFS{Path: "/sys/fs/bpf", Mounted: true, Writable: true},
		},
		Devices: []Device{device(1, "eth0", "device"), device(2, "eth1", "device")},
		Hooks:   []Hook{limitedHook(1, "eth0", policy.Egress, "10.0.0.0/24")},
	}
}

func device(index int, name, kind string) Device {
	return Device{
		Device:   netinfo.Device{Name: name, Index: index, Kind: kind, L2Bytes: 14, MTU: 1500, GSOMax: 65536, GROMax: 65536, Up: true},
		Offloads: netinfo.Offloads{GRO: true},
		IPv4:     true,
	}
}

// limitedHook has rules of 100mbit that have seen packets.
func limitedHook(index int, name string, d policy.Direction, cidrs ...string) Hook {
	s := Hook{Name: name, Index: index, Direction: d, Path: []netinfo.ChainEntry{{At: "tcx", ID: 7, Name: "shapectl", Ours: true}}}
	s.Limits = &Limits{State: loader.Attached, Mode: loader.TCX, Was: name, Match: d.FarSide()}
	for _, cidr := range cidrs {
		r := Rule{Rule: policy.Rule{Prefix: netip.MustParsePrefix(cidr), Rate: 100_000_000}}
		r.Capacity = policy.DefaultCapacity(r.Rate)
		r.Counters.PassedPackets = 1
		s.Limits.Rules = append(s.Limits.Rules, r)
	}
	return s
}

func (f *Facts) rule() *Rule { return &f.Hooks[0].Limits.Rules[0] }

// line makes the rules some for all traffic.
func (f *Facts) line(cidrs ...string) { f.Hooks[0] = limitedHook(1, "eth0", policy.Egress, cidrs...) }

// router lets packets come from eth1, and keeps those of the host small.
func (f *Facts) router() {
	f.Devices[0].GSOMax, f.Devices[1].Forwards4 = 4096, true
}

// onIngress makes the rule one for ingress.
func (f *Facts) onIngress() *Hook {
	f.Hooks[0] = limitedHook(1, "eth0", policy.Ingress, "10.0.0.0/24")
	return &f.Hooks[0]
}

// leaky lets the rule queue so many bytes.
func (f *Facts) leaky(bytes uint64) {
	r := f.rule()
	r.Algorithm, r.Capacity, r.Excess, r.ECNAbove = policy.Leaky, bytes, policy.Delay, policy.Never
}

// queued lets the rule queue so many bytes beyond its capacity.
func (f *Facts) queued(capacity, queue uint64) {
	r := f.rule()
	r.Algorithm, r.Capacity, r.Queue, r.Excess, r.ECNAbove = policy.GCRA, capacity, queue, policy.Delay, policy.Never
}

// pool adds a pool of 100mbit that the rule is within.
func (f *Facts) pool(name string) *Rule {
	p := Rule{Rule: policy.Rule{Pool: true, Prefix: policy.PoolKey(name), Label: policy.Label{Name: name}, Rate: 100_000_000}}
	p.Capacity = policy.DefaultCapacity(p.Rate)
	f.Pools = append(f.Pools, p)
	f.rule().Within = policy.Within(name)
	return &f.Pools[len(f.Pools)-1]
}

var tablet = policy.MAC{0x3c, 0x22, 0xfb, 0x12, 0x34, 0x56}

// follow makes the rules those of addresses of the tablet.
func (f *Facts) follow(addresses ...string) {
	var networks []string
	for _, a := range addresses {
		networks = append(networks, a+"/32")
	}
	f.line(networks...)
	for i := range f.Hooks[0].Limits.Rules {
		f.Hooks[0].Limits.Rules[i].Label = policy.Label{Name: "tablet", Note: "of Ann", Host: tablet}
	}
}

// hostPool adds a pool of the tablet that no rule is within.
func (f *Facts) hostPool(name string) {
	within := f.rule().Within
	label := &f.pool(name).Label
	label.Host = tablet
	_ = label.Owner.Set(name)
	f.rule().Within = within
}

// neighbour makes these the addresses of the tablet on a device.
func (f *Facts) neighbour(device int, addresses ...string) {
	f.Neighbours = map[int]map[policy.MAC][]netip.Addr{device: {}}
	for _, a := range addresses {
		f.Neighbours[device][tablet] = append(f.Neighbours[device][tablet], netip.MustParseAddr(a))
	}
}

// forwards adds a rule for what enters eth1, whose packets are forwarded, within a pool that the other rule is within.
func (f *Facts) forwards(network, pool string) {
	f.pool(pool)
	f.Devices[1].Forwards4 = true
	limits := *f.Hooks[0].Limits
	limits.Was, limits.Rules, limits.Match = "eth1", slices.Clone(limits.Rules), policy.MatchSrc
	limits.Rules[0].Prefix = netip.MustParsePrefix(network)
	f.Hooks = append(f.Hooks, Hook{Name: "eth1", Index: f.Devices[1].Index, Direction: policy.Ingress, Limits: &limits})
}

// delays makes it delay packets.
func (r *Rule) delays() {
	r.Excess, r.Queue, r.ECNAbove = policy.Delay, policy.DefaultQueue(r.Rate), policy.Never
}

// held lets a qdisc delay packets of the rule, by 50 ms at most.
func (f *Facts) held(by fq.State) *Queue {
	f.leaky(625_000)
	f.Hooks[0].Queue = &Queue{State: by}
	return f.Hooks[0].Queue
}

// enough is an fq that does.
var enough = fq.State{Kind: "fq", HasFQ: true, Limit: 10000, FlowLimit: 10000, Horizon: 10 * time.Second, HorizonDrop: true}

func unlikeFQ(change func(*fq.State)) fq.State {
	s := enough
	change(&s)
	return s
}

// stack adds a device and rules on it.
func (f *Facts) stack(d Device, hooks ...Hook) {
	f.Devices = append(f.Devices, d)
	f.Hooks = append(f.Hooks, hooks...)
}

func unlike(d Device, change func(*Device)) Device {
	change(&d)
	return d
}

var foreignTCX = netinfo.ChainEntry{At: "tcx", ID: 9, Name: "their_program"}
var foreignFilter = netinfo.ChainEntry{At: "clsact", Name: "flower filter, priority 1"}

func TestJudge(t *testing.T) {
	queue := policy.DefaultQueue(100_000_000) // the rate of the rule
	for _, test := range []struct {
		name   string
		change func(*Facts)
		want   []string // every finding that is not ok, as "status device direction check"
		says   []string // what one of them says
	}{
		{"healthy", func(*Facts) {}, nil, nil},

		{"no permissions", func(f *Facts) { f.System.Capabilities = 0; f.System.Probe = errors.New("EPERM") },
			[]string{"failed permissions", "note hook"}, []string{"CAP_BPF and CAP_PERFMON and CAP_NET_ADMIN", "run as root"}},
		{"no CAP_NET_ADMIN", func(f *Facts) { f.System.Capabilities &^= 1 << 12 },
			[]string{"failed permissions", "note hook"}, []string{"lacks CAP_NET_ADMIN,"}},
		{"no CAP_SYS_ADMIN", func(f *Facts) { f.System.Capabilities &^= 1 << 21 },
			[]string{"note permissions"}, []string{"names of other programs are not known"}},
		{"no CAP_PERFMON", func(f *Facts) { f.System.Capabilities &^= 1<<21 | 1<<38 },
			[]string{"failed permissions"}, []string{"lacks CAP_PERFMON,"}},
		{"CAP_SYS_ADMIN includes the others", func(f *Facts) { f.System.Capabilities &^= 1<<38 | 1<<39 }, nil, nil},
		{"programs refused", func(f *Facts) { f.System.Probe = errors.New("no such\nhelper") },
			[]string{"failed programs"}, []string{"no such; helper"}},
		{"interpreter", func(f *Facts) { f.System.JIT = false }, []string{"note programs"}, []string{"bpf_jit_enable=1"}},
		{"tcx asked for and missing", func(f *Facts) { f.System.HookErr = loader.ErrNoTCX },
			[]string{"failed hook"}, []string{"SHAPECTL_HOOK=tcx"}},
		{"clsact", func(f *Facts) { f.System.Hook = loader.Clsact }, nil, nil},
		{"no bpffs", func(f *Facts) { f.System.BPFFS.Mounted = false }, nil, nil},
		{"no bpffs and none to be mounted", func(f *Facts) { f.System.BPFFS.Mounted = false; f.System.Capabilities &^= 1 << 21 },
			[]string{"note permissions", "failed bpffs"}, []string{"mount -t bpf bpf /sys/fs/bpf"}},
		{"bpffs of somebody else", func(f *Facts) { f.System.BPFFS.Writable = false },
			[]string{"failed bpffs"}, []string{"may not write"}},
		{"a directory of somebody else", func(f *Facts) {
			f.System.BPFFS.Untrusted = fmt.Errorf("%q belongs to user 7: %w; remove it", "/sys/fs/bpf/shapectl", bpffs.ErrUntrusted)
		}, []string{"failed bpffs"}, []string{`"/sys/fs/bpf/shapectl" belongs to user 7`, "not used: "}},
		{"kept for a rollback", func(f *Facts) { f.Kept = []string{"a egress", "b egress", "c egress", "d egress", "e egress"} },
			[]string{"note leftovers"}, []string{"5 device directions", "c egress and 2 more", "their state is kept for a rollback"}},
		{"namespaces that no longer exist", func(f *Facts) {
			f.Left = []string{"/p/1", "/p/2"}
		}, []string{"note leftovers"}, []string{"2 network namespaces that no longer exist: /p/1, /p/2"}},
		{"rules of another version", func(f *Facts) { f.Hooks[0].Limits, f.Hooks[0].Other = nil, true },
			[]string{"warning eth0 egress state"}, []string{"are attached", "shapectl flush eth0 egress"}},
		{"rules of another version that are not attached", func(f *Facts) {
			f.Hooks[0] = Hook{Name: "eth0", Index: f.Hooks[0].Index, Direction: policy.Egress, Path: []netinfo.ChainEntry{}, Other: true}
		}, []string{"warning eth0 egress state"}, []string{"are not attached"}},
		{"rules of another version elsewhere", func(f *Facts) { f.Unread = []Unread{{Err: fmt.Errorf("a: %w", maps.ErrOtherLayout)}} },
			[]string{"warning access"}, []string{"use that version to see them; 'shapectl flush --all'"}},
		{"not to be looked at", func(f *Facts) { f.Unread = []Unread{{Err: errors.New("made by another version")}} },
			[]string{"warning access"}, []string{"made by another version"}},

		{"detached", func(f *Facts) { f.Hooks[0].Limits.State = loader.Detached },
			[]string{"failed eth0 egress state"}, []string{"1 rule not in force", "shapectl flush eth0 egress"}},
		{"gone", func(f *Facts) { f.Hooks[0].Limits.State = loader.Gone; f.Hooks[0].Index = 0; f.Devices = f.Devices[1:] },
			[]string{"failed eth0 egress state"}, []string{"removes them"}},
		{"created again", func(f *Facts) { f.Hooks[0].Limits.State = loader.Gone; f.Hooks[0].Index = 0 },
			[]string{"failed eth0 egress state"}, []string{"created again"}},
		{"moved", func(f *Facts) {
			f.Hooks[0].Limits.State = loader.Moved
			f.Hooks[0].Index = 0
			f.Devices = f.Devices[1:]
		},
			[]string{"warning eth0 egress state"}, []string{"has moved"}},
		{"renamed", func(f *Facts) { f.Hooks[0].Limits.Was = "lan0" }, []string{"note eth0 egress state"}, []string{"was lan0"}},
		{"another build", func(f *Facts) { f.Hooks[0].Limits.OtherBuild = true }, []string{"note eth0 egress build"}, nil},
		{"link type", func(f *Facts) { f.Devices[0].Unreadable = netinfo.ErrUnsupportedDevice },
			[]string{"failed eth0 egress link type"}, []string{"no rule can be set"}},

		{"program before", func(f *Facts) { f.Hooks[0].Path = slices.Insert(f.Hooks[0].Path, 0, foreignTCX) },
			[]string{"warning eth0 egress chain"}, []string{"before the limit, packets pass program their_program (tcx, id 9): ", "attach them first"}},
		{"program without a name before", func(f *Facts) {
			f.Hooks[0].Path = slices.Insert(f.Hooks[0].Path, 0, netinfo.ChainEntry{At: "tcx", ID: 9})
		}, []string{"warning eth0 egress chain"}, []string{"before the limit, packets pass program 9 (tcx)"}},
		{"program between ours", func(f *Facts) {
			c := f.Hooks[0].Path
			f.Hooks[0].Path = []netinfo.ChainEntry{c[0], foreignTCX, {At: "tcx", ID: 8, Ours: true}}
		}, []string{"warning eth0 egress chain"}, nil},
		{"program after", func(f *Facts) { f.Hooks[0].Path = append(f.Hooks[0].Path, foreignTCX) },
			[]string{"note eth0 egress chain"}, []string{"were charged already"}},
		{"filter before clsact", func(f *Facts) {
			f.Hooks[0].Limits.Mode = loader.Clsact
			f.Hooks[0].Path = slices.Insert(f.Hooks[0].Path, 0, foreignFilter)
		}, []string{"warning eth0 egress chain"}, []string{"packets pass flower filter, priority 1 (clsact)", "higher priority number"}},
		{"tcx before clsact", func(f *Facts) {
			f.Hooks[0].Limits.Mode = loader.Clsact
			f.Hooks[0].Path = slices.Insert(f.Hooks[0].Path, 0, foreignTCX)
		}, []string{"warning eth0 egress chain"}, []string{"unset SHAPECTL_HOOK"}},
		{"limits of another namespace", func(f *Facts) {
			f.Hooks[0].Path = slices.Insert(f.Hooks[0].Path, 0, netinfo.ChainEntry{At: "tcx", ID: 9, Name: "shapectl"})
		}, []string{"warning eth0 egress chain"}, []string{"another network namespace", "flush them there"}},
		{"chain unknown", func(f *Facts) { f.Hooks[0].Path = nil }, nil, nil},

		{"XDP on ingress", func(f *Facts) {
			s := f.onIngress()
			s.Path = slices.Insert(s.Path, 0, netinfo.ChainEntry{At: "xdp", Name: "native"})
		},
			[]string{"note eth0 ingress xdp"}, []string{"AF_XDP"}},
		{"hardware", func(f *Facts) { f.Devices[0].Offloads.HardwareTC = true },
			[]string{"note eth0 egress offload"}, []string{"ethtool -K eth0 hw-tc-offload off"}},

		{"a router merges packets", func(f *Facts) { f.router(); f.rule().Capacity = 65535 },
			[]string{"warning eth0 egress capacity"}, []string{
				"less than the largest packet (65536), as forwarded packets arrive merged (GRO) at eth1: such",
				"raise --capacity to 3750000b"}},
		{"a port of a bridge gets merged packets from another", func(f *Facts) {
			f.Devices[0].GSOMax, f.Devices[0].Master, f.Devices[1].Master, f.rule().Capacity = 4096, 3, 3, 65535
			f.stack(device(3, "br0", "bridge"))
			f.stack(device(4, "eth2", "device"))
		}, []string{"warning eth0 egress capacity"}, []string{"forwarded packets arrive merged (GRO) at eth1: such"}},
		{"another limiter as qdisc", func(f *Facts) {
			f.Hooks[0].Path = append(f.Hooks[0].Path, netinfo.ChainEntry{At: "qdisc", Name: "htb", Limits: true})
		}, []string{"warning eth0 egress qdisc"}, []string{"the qdisc htb limits packets, too", "'tc qdisc del dev eth0 root'"}},

		{"capacity below a frame", func(f *Facts) { f.Devices[0].MTU = 9000; f.rule().Capacity = 9013 },
			[]string{"warning eth0 egress capacity"}, []string{"one full frame (9014)"}},
		{"capacity of a frame", func(f *Facts) {
			f.onIngress()
			f.rule().Rate, f.rule().Capacity, f.Devices[0].Offloads.GRO = 1_000_000, 1514, false
		}, nil, nil},
		{"capacity below a packet", func(f *Facts) { f.rule().Capacity = 65535 },
			[]string{"warning eth0 egress capacity"}, []string{"raise --capacity to"}},
		{"capacity of a packet but less than 10 ms", func(f *Facts) { f.rule().Capacity = 65536 },
			[]string{"warning eth0 egress capacity"}, []string{"5.24ms of 100mbit"}},
		{"CBS below a frame", func(f *Facts) {
			f.Devices[0].MTU = 9000
			r := f.rule()
			r.Algorithm, r.Colours.EBS, r.Capacity = policy.SRTCM, r.Capacity, 9013
		},
			[]string{"warning eth0 egress capacity"}, []string{"a CBS of 9013 bytes is less than one full frame (9014): such a frame is never green", "raise --cbs to 3750000b"}},
		{"capacity of 10 ms", func(f *Facts) { f.rule().Capacity = 125_000 }, nil, nil},
		{"a burst longer than the default", func(f *Facts) { f.rule().Capacity = 12_500_000 },
			[]string{"note eth0 egress speed test"}, []string{"its burst is longer than the default: a 10 s speed test shows up to 110mbit, its first second 200mbit;"}},
		{"a long queue", func(f *Facts) { f.leaky(12_500_000) }, nil, nil},
		{"BIG TCP", func(f *Facts) { f.Devices[0].GSOMax = 5 << 20 },
			[]string{"warning eth0 egress capacity"}, []string{"raise --capacity to 5242880b"}},

		{"a queue", func(f *Facts) { f.leaky(queue) }, nil, nil},
		{"a queue below a packet", func(f *Facts) { f.leaky(65535) },
			[]string{"warning eth0 egress capacity"}, []string{"a queue of 65535 bytes is less than the largest packet (65536)", fmt.Sprintf("raise --capacity to %db", queue)}},
		{"a queue below a frame", func(f *Facts) { f.leaky(1514); f.Devices[0].MTU = 9000 },
			[]string{"warning eth0 egress capacity"}, []string{"one full frame (9014): such a frame passes only while the queue is empty"}},
		{"a queue of less than 10 ms", func(f *Facts) { f.leaky(65536) },
			[]string{"warning eth0 egress capacity"}, []string{"a queue of 65536 bytes is only 5.24ms of 100mbit"}},
		{"a queue at a rate that is too low for big packets", func(f *Facts) { f.leaky(12_000); f.rule().Rate = 50_000 },
			[]string{"warning eth0 egress capacity"}, []string{"stay far below 50kbit; let eth0 carry smaller packets: ip link set dev eth0 gso_max_size"}},
		{"an fq that no rule needs any more", func(f *Facts) { f.Hooks[0].HasOurFQ = true },
			[]string{"note eth0 egress queue"}, []string{"'shapectl flush eth0 egress' brings the default qdisc back"}},
		{"no fq", func(f *Facts) {
			f.leaky(queue)
			f.Hooks[0].Queue = &Queue{State: fq.State{Kind: "noqueue"}}
		}, []string{"failed eth0 egress queue"}, []string{"only the fq qdisc does that, and eth0 has noqueue", "use --setup-fq with"}},
		{"an fq with limits of its own", func(f *Facts) {
			f.leaky(625_000)
			f.Hooks[0].HasOurFQ = true
			f.Hooks[0].Queue = &Queue{State: fq.State{Kind: "fq", HasFQ: true, Limit: 10000, FlowLimit: 100, Horizon: 40 * time.Millisecond, HorizonDrop: true, Drops: 7}}
		}, []string{"failed eth0 egress queue", "warning eth0 egress queue", "warning eth0 egress queue"},
			[]string{"delays packets by 40ms at most, and rules by up to 50ms: packets with a longer delay are dropped", "up to 9766 packets may be queued", "has dropped 7 packets"}},
		{"an ifb that is gone", func(f *Facts) { f.onIngress(); f.leaky(queue); f.Hooks[0].Queue = &Queue{} },
			[]string{"failed eth0 ingress queue"}, []string{"the ifb device for delayed packets is gone: those that conform are lost"}},
		{"a bucket of one frame and a queue", func(f *Facts) { f.queued(1514, queue) }, nil, nil},
		{"a bucket with its queue below a packet", func(f *Facts) { f.queued(30_000, 30_000) },
			[]string{"warning eth0 egress capacity"}, []string{"a bucket with its queue of 60000 bytes is less than", fmt.Sprintf("raise --queue to %db", queue)}},
		{"many small ones", func(f *Facts) {
			f.Hooks[0] = limitedHook(1, "eth0", policy.Egress, "10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/24")
			for i := range f.Hooks[0].Limits.Rules {
				f.Hooks[0].Limits.Rules[i].Capacity = 2000
			}
		}, []string{"warning eth0 egress capacity"}, []string{"alike: 10.0.1.0/24, 10.0.2.0/24"}},
		{"unlimited", func(f *Facts) { f.rule().Rate, f.rule().Capacity = policy.Unlimited, 0 }, nil, nil},

		{"IPv6 unlimited", func(f *Facts) { f.Devices[0].IPv6 = true },
			[]string{"warning eth0 egress families"}, []string{"IPv6 traffic bypasses the limit", "::/0"}},
		{"IPv4 unlimited", func(f *Facts) { f.Hooks[0] = limitedHook(1, "eth0", policy.Egress, "2001:db8::/32") },
			[]string{"warning eth0 egress families"}, []string{"IPv4 traffic bypasses the limit"}},
		{"a host by its MAC address", func(f *Facts) {
			f.Devices[0].IPv6 = true
			f.rule().Label.Host = tablet
		}, nil, nil},
		{"IPv6 of hosts", func(f *Facts) { f.line("10.0.0.7/32", "10.0.0.8/32"); f.Devices[0].IPv6 = true },
			[]string{"warning eth0 egress families"}, []string{"set rules for the IPv6 addresses of these hosts, or name the hosts by their MAC addresses"}},
		{"both families", func(f *Facts) {
			f.Devices[0].IPv6 = true
			f.Hooks[0] = limitedHook(1, "eth0", policy.Egress, "10.0.0.0/24", "2001:db8::/32")
		}, nil, nil},

		{"all IPv4, and the device has IPv6", func(f *Facts) { f.line("0.0.0.0/0"); f.Devices[0].IPv6 = true },
			[]string{"warning eth0 egress families"}, []string{"all rules are for IPv4, and the device has IPv6 addresses: IPv6 traffic bypasses the limit; 'shapectl set eth0 egress ::/0 --rate RATE'"}},
		{"all IPv4, and the host forwards IPv6", func(f *Facts) { f.line("0.0.0.0/0"); f.Devices[0].Forwards6 = true },
			[]string{"warning eth0 egress families"}, []string{"this host forwards IPv6"}},
		{"all IPv4, and the device is a port of a bridge", func(f *Facts) {
			f.line("0.0.0.0/0")
			f.Devices[0].Master = 3
			f.stack(device(3, "br0", "bridge"))
		}, []string{"warning eth0 egress families"}, []string{"bridge br0 forwards both"}},
		{"all IPv4 is exempt", func(f *Facts) {
			f.line("0.0.0.0/0", "10.0.0.0/24")
			f.rule().Rate, f.Devices[0].IPv6 = policy.Unlimited, true
		}, []string{"note eth0 egress families"}, []string{"all rules are for IPv4"}},
		{"all IPv6, and the host forwards IPv4", func(f *Facts) {
			f.line("::/0")
			f.Devices[0].IPv4, f.Devices[0].Forwards4 = false, true
		}, []string{"warning eth0 egress families"}, []string{"'shapectl set eth0 egress 0.0.0.0/0 --rate RATE'"}},
		{"all IPv4, and a part of IPv6", func(f *Facts) { f.line("0.0.0.0/0", "2001:db8::/32"); f.Devices[0].IPv6 = true }, nil, nil},

		{"contended", func(f *Facts) { f.rule().Counters.ContendedPackets = 3 },
			[]string{"warning eth0 egress contended"}, []string{"3 packets of 10.0.0.0/24"}},
		{"spilled, and the table is full", func(f *Facts) {
			f.rule().Counters.SpilledPackets = 3
			f.Hooks[0].Limits.Slots = maps.Slots{All: 200, InUse: 190}
		}, []string{"warning eth0 egress spilled"}, []string{"3 packets of 10.0.0.0/24 were charged to the rule's spill bucket", "190 of the table's 200 slots (95 %)", "--each /24"}},
		{"spilled, and the table is not full any more", func(f *Facts) {
			f.rule().Counters.SpilledPackets = 3
			f.Hooks[0].Limits.Slots = maps.Slots{All: 200, InUse: 20}
		}, []string{"note eth0 egress spilled"}, []string{"there is room again"}},
		{"no traffic", func(f *Facts) { f.rule().Counters.PassedPackets = 0 },
			[]string{"note eth0 egress traffic"}, []string{"egress leaves the device", "the destination"}},
		{"a host behind NAT", func(f *Facts) {
			f.rule().Counters.PassedPackets = 0
			f.Devices[0].Behind.NAT = []netinfo.Inside{{Network: netip.MustParsePrefix("10.0.0.0/8"), Device: "lan0"}}
		}, []string{"warning eth0 egress nat"}, []string{"no packet has these addresses here, and none has matched yet: 10.0.0.0/24; delete these rules, and set them on lan0"}},
		{"all dropped is traffic", func(f *Facts) { f.rule().Counters.PassedPackets, f.rule().Counters.DroppedPackets = 0, 1 }, nil, nil},

		{"bridge and port", func(f *Facts) {
			f.Devices[0].Master = 3
			f.stack(device(3, "br0", "bridge"), limitedHook(3, "br0", policy.Egress, "10.0.0.0/16"))
		}, []string{"warning eth0 egress counted twice", "note br0 egress path"}, []string{"packets of bridge br0 pass eth0 as well", "set rules on its ports: eth0"}},
		{"bridge and port, other networks", func(f *Facts) {
			f.Devices[0].Master = 3
			f.stack(device(3, "br0", "bridge"), limitedHook(3, "br0", policy.Egress, "10.0.1.0/24"))
		}, []string{"note br0 egress path"}, nil},
		{"bridge and port, other directions", func(f *Facts) {
			f.Devices[0].Master = 3
			f.stack(device(3, "br0", "bridge"), limitedHook(3, "br0", policy.Ingress, "10.0.0.0/24"))
		}, []string{"note br0 ingress path"}, nil},
		{"bridge and port, not in force", func(f *Facts) {
			f.Devices[0].Master = 3
			f.stack(device(3, "br0", "bridge"), limitedHook(3, "br0", policy.Egress, "10.0.0.0/24"))
			f.Hooks[1].Limits.State = loader.Detached
		}, []string{"failed br0 egress state", "note br0 egress path"}, nil},
		{"asked about the port", func(f *Facts) {
			f.Only, f.Devices[0].Master = "eth0", 3
			f.stack(device(3, "br0", "bridge"), limitedHook(3, "br0", policy.Egress, "10.0.0.0/24"))
		}, []string{"warning eth0 egress counted twice"}, []string{"br0 egress has rules for them"}},
		{"port of a bond", func(f *Facts) {
			f.Devices[0].Master, f.Devices[1].Master = 3, 3
			f.stack(device(3, "bond0", "bond"))
		}, []string{"warning eth0 egress path"}, []string{"its other ports are not limited here: eth1", "set the rule on bond0"}},
		{"bond and port", func(f *Facts) {
			f.Devices[0].Master = 3
			f.stack(device(3, "bond0", "bond"), limitedHook(3, "bond0", policy.Egress, "10.0.0.0/24"))
		}, []string{"note eth0 egress path", "warning eth0 egress counted twice"}, nil},
		{"VRF", func(f *Facts) {
			f.Devices[0].Master = 3
			f.stack(device(3, "vrf0", "vrf"), limitedHook(3, "vrf0", policy.Egress, "10.0.0.0/24"))
		}, nil, nil},
		{"VLAN below rules", func(f *Facts) {
			f.stack(unlike(device(3, "eth0.5", "vlan"), func(d *Device) { d.Parent = 1 }))
		}, []string{"note eth0 egress path"}, []string{"pass here, too: eth0.5"}},
		{"VLAN and parent", func(f *Facts) {
			f.stack(unlike(device(3, "eth0.5", "vlan"), func(d *Device) { d.Parent = 1 }),
				limitedHook(3, "eth0.5", policy.Egress, "10.0.0.0/24"))
		}, []string{"note eth0 egress path", "warning eth0 egress counted twice"}, []string{"packets of vlan eth0.5 pass eth0 as well"}},
		{"asked about the VLAN", func(f *Facts) {
			f.Only = "eth0.5"
			f.stack(unlike(device(3, "eth0.5", "vlan"), func(d *Device) { d.Parent = 1 }),
				limitedHook(3, "eth0.5", policy.Egress, "10.0.0.0/24"))
		}, []string{"warning eth0.5 egress counted twice"}, []string{"packets of vlan eth0.5 pass eth0 as well"}},
		{"veth with both ends", func(f *Facts) {
			f.Devices[0].Peer = 3
			f.stack(unlike(device(3, "p0", "veth"), func(d *Device) { d.Peer = 1 }), limitedHook(3, "p0", policy.Ingress, "10.9.0.0/24"))
		}, []string{"warning eth0 egress counted twice"}, []string{"leave one of eth0 and p0"}},
		{"veth with both ends, other ways", func(f *Facts) {
			f.Devices[0].Peer = 3
			f.stack(unlike(device(3, "p0", "veth"), func(d *Device) { d.Peer = 1 }), limitedHook(3, "p0", policy.Egress, "10.0.0.0/24"))
		}, nil, nil},
		{"lo, both ways", func(f *Facts) {
			f.Devices[0].Loopback = true
			f.Hooks = append(f.Hooks, limitedHook(1, "eth0", policy.Ingress, "10.0.0.0/24"))
		}, []string{"warning eth0 ingress counted twice"}, nil},
		{"tunnel over rules for its end", func(f *Facts) {
			f.stack(unlike(device(3, "tun0", "ipip"), func(d *Device) { d.Tunnel = &netinfo.Tunnel{Underlay: 1, Remote: netip.MustParseAddr("10.0.0.9")} }),
				limitedHook(3, "tun0", policy.Egress, "192.0.2.0/24"))
		}, []string{"note eth0 egress path", "warning eth0 egress counted twice"}, []string{"packets of tunnel tun0 pass eth0"}},
		{"tunnel over rules for others", func(f *Facts) {
			f.stack(unlike(device(3, "tun0", "ipip"), func(d *Device) { d.Tunnel = &netinfo.Tunnel{Underlay: 1, Remote: netip.MustParseAddr("10.0.1.9")} }),
				limitedHook(3, "tun0", policy.Egress, "10.0.0.0/24"))
		}, []string{"note eth0 egress path"}, nil},

		{"delayed", func(f *Facts) { f.held(enough) }, nil, nil},
		{"no fq", func(f *Facts) { f.Netns = "there"; f.held(fq.State{Kind: "noqueue"}) },
			[]string{"failed eth0 egress queue"}, []string{
				"only the fq qdisc does that, and eth0 has noqueue. Delayed packets leave at once, and more are dropped: 10.0.0.0/24",
				"use --setup-fq with 'shapectl -n there set' or 'apply'"}},
		{"fq with a short horizon", func(f *Facts) { f.held(unlikeFQ(func(s *fq.State) { s.Horizon = 50 * time.Millisecond })) },
			[]string{"failed eth0 egress queue"}, []string{"delays packets by 50ms at most, and rules by up to 50ms: packets with a longer delay are dropped, and"}},
		{"sent too early", func(f *Facts) {
			f.held(unlikeFQ(func(s *fq.State) { s.Horizon, s.HorizonDrop = time.Millisecond, false }))
		}, []string{"failed eth0 egress queue"}, []string{"are sent too early, and"}},
		{"too little room", func(f *Facts) { f.held(unlikeFQ(func(s *fq.State) { s.FlowLimit = 9765 })) },
			[]string{"warning eth0 egress queue"}, []string{"up to 9766 packets may be queued, and the fq of eth0 has room for 10000, and for 9765 of one flow"}},
		{"just room enough", func(f *Facts) { f.held(unlikeFQ(func(s *fq.State) { s.FlowLimit = 9766 })) }, nil, nil},
		{"dropped by fq", func(f *Facts) { f.held(unlikeFQ(func(s *fq.State) { s.Drops = 1 })) },
			[]string{"warning eth0 egress queue"}, []string{"the fq of eth0 has dropped 1 packet by its own limits"}},
		{"not looked at", func(f *Facts) { f.leaky(625_000) }, nil, nil},
		{"not in force", func(f *Facts) { f.held(fq.State{Kind: "noqueue"}); f.Hooks[0].Limits.State = loader.Detached },
			[]string{"failed eth0 egress state"}, nil},
		{"ifb", func(f *Facts) { f.onIngress(); f.held(enough).Ifb = &fq.Ifb{Name: "shapectl1", Up: true} }, nil, nil},
		{"ifb down", func(f *Facts) { f.onIngress(); f.held(enough).Ifb = &fq.Ifb{Name: "shapectl1"} },
			[]string{"failed eth0 ingress queue"}, []string{"shapectl1, the ifb device for delayed packets, is down: those that conform are lost"}},
		{"ifb without fq", func(f *Facts) {
			f.onIngress()
			f.held(fq.State{Kind: "pfifo_fast"}).Ifb = &fq.Ifb{Name: "shapectl1", Up: true}
		}, []string{"failed eth0 ingress queue"}, []string{"and shapectl1 has pfifo_fast", "set one of the rules again to repair that"}},
		{"moved without its ifb", func(f *Facts) {
			f.onIngress().Limits.State = loader.Moved
			f.leaky(625_000)
			f.Hooks[0].Index = 0
			f.Devices = f.Devices[1:]
		}, []string{"warning eth0 ingress state", "failed eth0 ingress queue"}, []string{"those that conform are lost there: 10.0.0.0/24; 'shapectl flush eth0 ingress' here"}},
		{"behind an ifb", func(f *Facts) {
			f.onIngress()
			f.held(enough).Ifb = &fq.Ifb{Name: "shapectl1", Up: true}
			f.Hooks[0].Path = append(f.Hooks[0].Path, foreignTCX)
		}, []string{"warning eth0 ingress chain"}, []string{"but not those of 10.0.0.0/24"}},

		{"a pool", func(f *Facts) { f.pool("a") }, nil, nil},
		{"unused pools", func(f *Facts) { f.pool("a"); f.pool("b"); f.Netns = "blue" },
			[]string{"note pools"}, []string{"no rule or pool is within a; ", "'shapectl -n blue delete a'"}},
		{"the pool of a device that nothing is within", func(f *Facts) {
			f.pool("eth0 egress").Label.Owner = policy.Owner{Device: "eth0"}
			f.pool("a")
		}, []string{"warning pools"}, []string{"limits nothing, as no rule is within it: eth0 egress; add any: {}", "shapectl delete 'eth0 egress'"}},
		{"the pool of a deleted device", func(f *Facts) { f.pool("tap7").Label.Owner = policy.Owner{Device: "tap7", Whole: true}; f.pool("a") },
			[]string{"note pools"}, nil},
		{"a pool that only a pool is within", func(f *Facts) { f.pool("a"); f.pool("b").Within = "a" }, nil, nil},
		{"pools that rules may be within which cannot be read", func(f *Facts) {
			f.pool("a")
			f.rule().Within = ""
			f.Unread = []Unread{{Err: errors.New("no")}}
		}, []string{"warning access"}, nil},
		{"forwarded packets that are charged twice", func(f *Facts) { f.forwards("10.0.0.0/8", "a") },
			[]string{"warning pools"}, []string{`may be charged to pool "a" twice: eth1 ingress 10.0.0.0/8 and eth0 egress 10.0.0.0/24 are within it; keep`}},
		{"packets of a unit that leave by a device", func(f *Facts) {
			f.pool("a")
			f.Hooks = append(f.Hooks, limitedHook(netinfo.CgroupIndex(7), "unit:b", policy.Egress, "0.0.0.0/0"))
			f.Hooks[1].Limits.Rules[0].Within, f.Cgroups = "a", map[string]string{"unit:b": "/b"}
		}, []string{"warning pools"}, []string{`pool "a" twice: unit:b egress 0.0.0.0/0 and eth0 egress 10.0.0.0/24 are within it; keep`}},
		{"forwarded packets of narrower rules", func(f *Facts) { f.forwards("10.0.0.7/32", "a") },
			[]string{"warning pools"}, []string{"eth1 ingress 10.0.0.7/32 and eth0 egress 10.0.0.0/24 are within it"}},
		{"forwarded packets in two pools", func(f *Facts) {
			f.forwards("10.0.0.0/8", "b")
			f.pool("a")
			for i, within := range []policy.Within{"b", "a"} {
				l := f.Hooks[i].Limits
				l.Rules = append(l.Rules, l.Rules[0])
				l.Rules[1].Within = within
			}
		}, []string{"warning pools"}, []string{`pool "a" twice`}},
		{"forwarded packets of the wider of two rules", func(f *Facts) {
			f.forwards("10.0.1.0/24", "a")
			l := f.Hooks[1].Limits
			l.Rules = append(l.Rules, l.Rules[0])
			l.Rules[1].Prefix = netip.MustParsePrefix("10.0.0.0/8")
		}, []string{"warning pools"}, []string{"eth1 ingress 10.0.0.0/8 and eth0 egress 10.0.0.0/24 are within it"}},
		{"other addresses forwarded", func(f *Facts) { f.forwards("10.0.1.0/24", "a") }, nil, nil},
		{"another pool forwarded", func(f *Facts) { f.forwards("10.0.0.0/8", "b"); f.pool("a") }, nil, nil},
		{"not forwarded", func(f *Facts) { f.forwards("10.0.0.0/8", "a"); f.Devices[1].Forwards4 = false }, nil, nil},
		{"both directions of a device", func(f *Facts) {
			f.forwards("10.0.0.0/8", "a")
			f.Hooks[1].Name, f.Hooks[1].Limits.Was, f.Hooks[1].Index = "eth0", "eth0", 2
			f.Devices[0].Forwards4 = true
		}, nil, nil},
		{"guarantees of a detached rule", func(f *Facts) {
			f.pool("a")
			f.rule().Guarantee = 5_000_000
			f.Hooks[0].Limits.State = loader.Detached
		}, []string{"failed eth0 egress state"}, nil},
		{"a pending change", func(f *Facts) {
			f.Change, f.Until, f.MadeBy = maps.Pending, 5e9, "alice made it with 'apply p' at 14:02:11"
		}, []string{"note change"}, []string{"not confirmed: alice made it with 'apply p' at 14:02:11; it reverts in 5s"}},
		{"guarantees that wait for room", func(f *Facts) {
			f.pool("a")
			f.pool("b").Within = "a"
			f.Pools[0].Rate, f.Pools[1].Guarantee, f.rule().Guarantee = 2_500_000, 3_000_000, 2_000_000
			f.Pools[1].Rule, f.rule().Rule = f.Pools[1].WithoutGuarantee(), f.rule().WithoutGuarantee()
			f.Pools[1].Label.Owner.Device, f.Netns = "eth0", "blue"
		}, []string{"warning guarantees", "warning eth0 egress guarantees"},
			[]string{`there is no room in pool "a" for the guarantee of pool "b" (3mbit): it gets`, `there is no room in pool "a" for the guarantee of 10.0.0.0/24 (2mbit): it gets`, "'shapectl -n blue serve' then gives them"}},
		{"guarantees that have room again", func(f *Facts) {
			f.pool("a")
			f.pool("b").Within = "a"
			f.pool("c").Within = "a"
			f.Pools[0].Rate, f.Pools[1].Guarantee, f.Pools[2].Guarantee = 5_000_000, 2_000_000, 3_000_000
			f.Pools[1].Rule = f.Pools[1].WithoutGuarantee()
		}, []string{"note pools", "warning guarantees"}, []string{`there is room now for the guarantee of pool "b" (2mbit), but it is not in force`, "gives it within seconds; or apply"}},
		{"pools without a lease", func(f *Facts) {
			for i, name := range []string{"a", "b", "c"} {
				p := f.pool(name)
				p.Cluster.Name, p.Lease, p.Leased = "customer", maps.Lease{Safe: 8000, Until: uint64(i)}, i == 2
			}
			f.Pools[0].Within, f.Pools[1].Within, f.Netns = "c", "c", "blue"
			f.Hooks[0].Limits.Rules = append(f.Hooks[0].Limits.Rules, *f.rule(), *f.rule())
			f.Hooks[0].Limits.Rules[1].Within, f.Hooks[0].Limits.Rules[2].Within = "a", "b"
		}, []string{"warning leases"}, []string{"no lease was ever granted to a (8kbit); the lease ended of b (8kbit): the safe share is in force", "'shapectl -n blue serve --cluster-store URL' runs"}},
		{"quotas by a clock that was never set", func(f *Facts) {
			f.Unset, f.Periods = true, []maps.Period{{Name: "day", Known: 10}, {Name: "month Atlantis", Known: 9, Err: errors.New("unknown time zone Atlantis")}}
		}, []string{"warning quotas", "warning quotas", "warning quotas"}, []string{`"month Atlantis" is not known here: unknown time zone`, `only 9 later periods of quotas by "month Atlantis"`, "never set"}},
		{"a pool with a lease", func(f *Facts) { p := f.pool("a"); p.Cluster.Name, p.Leased = "customer", true }, nil, nil},
		{"too many sharers of a rule", func(f *Facts) { f.rule().Share.Kind, f.rule().Sharers = policy.ShareFlow, 4001 },
			[]string{"warning eth0 egress shares"}, []string{"10.0.0.0/24: 4001 sharers are active", "--share /24"}},
		{"delayed by a pool", func(f *Facts) { f.pool("a").delays(); f.Hooks[0].Queue = &Queue{State: enough} }, nil, nil},
		{"delayed by a pool above, without fq", func(f *Facts) {
			f.pool("a").delays()
			f.pool("b").Within = "a"
			f.rule().Rate = policy.Unlimited
			f.Hooks[0].Queue = &Queue{State: fq.State{Kind: "noqueue"}}
		}, []string{"failed eth0 egress queue"}, []string{"eth0 has noqueue", "10.0.0.0/24"}},
		{"delayed by a pool for too long", func(f *Facts) {
			f.pool("a").delays()
			f.Hooks[0].Queue = &Queue{State: unlikeFQ(func(s *fq.State) { s.Horizon = time.Millisecond })}
		}, []string{"failed eth0 egress queue"}, []string{"by 1ms at most"}},
		{"only pools limit IPv4", func(f *Facts) {
			f.line("0.0.0.0/0")
			f.pool("a")
			f.rule().Rate, f.Devices[0].IPv6 = policy.Unlimited, true
		}, []string{"warning eth0 egress families"}, []string{"put both in a pool"}},
		{"pools that nobody adapts", func(f *Facts) {
			f.pool("a").Adapt.Min = 1_000_000
			f.Unadapted, f.Netns = true, "blue"
		}, []string{"warning adapt"}, []string{`follows their line only while 'shapectl -n blue serve' runs, and none does: "a"; start it`}},
		{"a pool that adapts", func(f *Facts) { f.pool("a").Adapt.Min = 1_000_000 }, nil, nil},
		{"nothing to adapt", func(f *Facts) { f.pool("a"); f.Unadapted = true }, nil, nil},

		{"addresses of a host without rules", func(f *Facts) {
			f.follow("10.0.0.7")
			f.neighbour(1, "2001:db8::9", "10.0.0.7", "10.0.0.8", "2001:db8::8")
			f.Netns = "blue"
		}, []string{"warning eth0 egress hosts"},
			[]string{"tablet (3c:22:fb:12:34:56) has no rule for its address 10.0.0.8 and 2 more; run 'shapectl -n blue serve FILE', which follows"}},
		{"an address of a host that has a rule of its own", func(f *Facts) {
			f.follow("10.0.0.7")
			f.line("10.0.0.0/24", "10.0.0.8/32")
			f.neighbour(1, "10.0.0.8")
			f.hostPool("eth0 egress tablet")
		}, nil, nil},
		{"an address of a host that was another's", func(f *Facts) {
			f.follow("10.0.0.7", "10.0.0.8")
			r := &f.Hooks[0].Limits.Rules[1]
			r.Label.Host = policy.MAC{2}
			f.neighbour(1, "10.0.0.7", "10.0.0.8")
		}, []string{"warning eth0 egress hosts"}, []string{"has no rule for its address 10.0.0.8; "}},
		{"a host without a name", func(f *Facts) {
			f.follow("10.0.0.7")
			f.rule().Label.Name = ""
			f.neighbour(1, "10.0.0.8")
		}, []string{"warning eth0 egress hosts"}, []string{"3c:22:fb:12:34:56 has no rule for its address 10.0.0.8; "}},
		{"a pool of a host without rules", func(f *Facts) {
			f.hostPool("eth1 ingress tablet")
			f.neighbour(2, "2001:db8::7")
		}, []string{"warning eth1 ingress hosts"}, []string{"tablet (3c:22:fb:12:34:56) has no rule for its address 2001:db8::7; "}},
		{"a pool of a host whose rules cannot be read", func(f *Facts) {
			f.hostPool("eth1 ingress tablet")
			f.neighbour(2, "2001:db8::7")
			f.Unread = []Unread{{Device: "eth1", Direction: "ingress", Err: errors.New("no")}}
		}, []string{"warning eth1 ingress access"}, nil},
		{"a pool of a host on a device that is gone", func(f *Facts) {
			f.hostPool("eth7 ingress tablet")
			f.neighbour(0, "2001:db8::7")
		}, []string{"note pools"}, nil},
		{"a host on a device that was not asked about", func(f *Facts) {
			f.hostPool("eth1 ingress tablet")
			f.neighbour(2, "2001:db8::7")
			f.Only = "eth0"
		}, nil, nil},
		{"a neighbour on another device", func(f *Facts) { f.follow("10.0.0.7"); f.neighbour(2, "10.0.0.8") }, nil, nil},
		{"a host whose rules are not in force", func(f *Facts) {
			f.follow("10.0.0.7")
			f.neighbour(1, "10.0.0.8")
			f.Hooks[0].Limits.State = loader.Detached
		}, []string{"failed eth0 egress state"}, nil},
		{"a host where rules match the near side", func(f *Facts) {
			f.follow("10.0.0.7")
			f.neighbour(1, "10.0.0.8")
			f.Hooks[0].Limits.Match = policy.MatchSrc
		}, nil, nil},
		{"a host with too many addresses", func(f *Facts) {
			var all []string
			for a := netip.MustParseAddr("10.0.0.1"); len(all) < policyfile.MaxAddresses; a = a.Next() {
				all = append(all, a.String())
			}
			f.follow(all...)
			f.neighbour(1, "10.9.0.1")
		}, []string{"warning eth0 egress hosts"}, []string{"address 10.9.0.1; only 2048 addresses of a host are limited"}},

		{"no rules yet", func(f *Facts) {
			f.Only = "eth1"
			f.Hooks = append(f.Hooks, Hook{Name: "eth1", Index: 2, Direction: policy.Ingress, Path: []netinfo.ChainEntry{{At: "xdp", Name: "generic"}, foreignTCX}})
		}, []string{"note eth1 ingress chain", "note eth1 ingress xdp"}, []string{"attached already: program their_program"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := healthy()
			test.change(f)
			var got, said []string
			for _, finding := range Judge(*f) {
				if finding.Status == report.OK {
					continue
				}
				if finding.Finding == "" || strings.Contains(finding.Finding+finding.Advice, "\n") {
					t.Errorf("not a line: %q; %q", finding.Finding, finding.Advice)
				}
				place := strings.Join(strings.Fields(finding.Device+" "+finding.Direction+" "+finding.Check), " ")
				got = append(got, string(finding.Status)+" "+place)
				said = append(said, finding.Finding+"; "+finding.Advice)
			}
			slices.Sort(got)
			want := slices.Sorted(slices.Values(test.want))
			if !slices.Equal(got, want) {
				t.Errorf("found %q, want %q\n%s", got, want, strings.Join(said, "\n"))
			}
			for _, text := range test.says {
				if !strings.Contains(strings.Join(said, "\n")+"\n", text) {
					t.Errorf("%q is not in\n%s", text, strings.Join(said, "\n"))
				}
			}
		})
	}
}

func TestStateOfSeveralHooks(t *testing.T) {
	f := healthy()
	f.Hooks = append(f.Hooks, limitedHook(1, "eth0", policy.Ingress, "10.0.0.0/24", "10.0.1.0/24"))
	for i := range f.Hooks {
		f.Hooks[i].Limits.State = loader.Gone
	}
	var text strings.Builder
	testenv.Must(t, Judge(*f).Problems(&text))
	if want := "eth0 egress, eth0 ingress state: 3 rules not in force: "; !strings.Contains(text.String(), want) {
		t.Errorf("%q is not in\n%s", want, &text)
	}
}
