package observe

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	near, far   = "10.0.0.1:1000", "10.0.1.2:80"
	near6, far6 = "[2001:db8::1]:1000", "[2001:db8:1::2]:80"
	ms          = time.Millisecond
	full        = 1448
	wrap        = 1<<32 - 2000
)

// A step of a conversation over the device: a packet that leaves or enters it some time after the last one.
type step struct {
	after time.Duration
	tcp
	enters  bool
	refused bool
}

func send(after time.Duration, seq uint32, payload int, ts uint32) step {
	return step{after: after, tcp: tcp{src: near, dst: far, seq: seq, flags: ack, payload: payload, tsval: ts}}
}

func answer(after time.Duration, number, echo uint32) step {
	return step{after: after, enters: true, tcp: tcp{src: far, dst: near, seq: 1, ack: number, flags: ack, tsval: 7, tsecr: echo}}
}

func refused(s step) step {
	s.refused = true
	return s
}

func (r *rig) talk(steps ...step) {
	r.Helper()
	for _, s := range steps {
		r.wait(s.after)
		d := policy.Egress
		if s.enters {
			d = policy.Ingress
		}
		if s.refused {
			r.refuse(d, s.tcp)
		} else {
			r.pass(d, s.tcp)
		}
	}
}

func TestRoundTrips(t *testing.T) {
	syns := func(options []byte) []step {
		return []step{
			{tcp: tcp{src: near, dst: far, seq: 99, flags: syn, tsval: 1, options: options}},
			{after: 30 * ms, enters: true, tcp: tcp{src: far, dst: near, seq: 499, ack: 100, flags: syn | ack, tsval: 5, tsecr: 1}},
			{after: 2 * ms, tcp: tcp{src: near, dst: far, seq: 100, ack: 500, flags: ack, tsval: 33, tsecr: 5}},
		}
	}
	r, hosts := newRig(t, Options{}), 0 // each conversation is with a host of its own
	for name, c := range map[string]struct {
		steps            []step
		receiver, sender time.Duration // 0 for none
		again            uint64
		limited          bool
	}{
		"two segments": {
			steps:    []step{send(0, 100, full, 1), send(ms, 100+full, full, 2), answer(20*ms, 100+2*full, 1)},
			receiver: 20 * ms,
		},
		"a lone segment, whose acknowledgement may be delayed": {
			steps: []step{send(0, 100, full, 1), answer(20*ms, 100+full, 1)},
		},
		"two short ones": {
			steps: []step{send(0, 100, 100, 1), send(0, 200, 100, 1), answer(20*ms, 300, 1)},
		},
		"an acknowledgement between segments": {
			steps: []step{send(0, 100, full, 1), send(0, 100+full, full, 2), answer(20*ms, 100+full+7, 1)},
		},
		"sent again": {
			steps: []step{
				send(0, 100, full, 1), send(0, 100+full, full, 1), send(100*ms, 100, full, 101),
				answer(20*ms, 100+2*full, 101),
			},
			again: 1,
		},
		"sent again, unseen": { // above the device
			steps: []step{send(0, 100, full, 1), send(0, 100+full, full, 1), answer(120*ms, 100+2*full, 101)},
		},
		"sent again later": {
			steps: []step{
				send(0, 100, full, 1), send(0, 100+full, full, 1), send(100*ms, 100+full, full, 101),
				send(0, 100+2*full, full, 102), send(ms, 100+3*full, full, 103), answer(20*ms, 100+4*full, 101),
			},
			receiver: 20 * ms, again: 1,
		},
		"dropped here and sent again": {
			steps: []step{
				send(0, 100, full, 1), refused(send(0, 100+full, full, 1)), send(100*ms, 100+full, full, 101),
				answer(20*ms, 100+2*full, 1),
			},
			receiver: 20 * ms, again: 1, limited: true,
		},
		"dropped here, and others were not": {
			steps: []step{
				refused(send(0, 100, full, 1)), send(0, 100+full, full, 1), send(100*ms, 100, full, 101), answer(20*ms, 100+2*full, 1),
			},
			again: 1, limited: true,
		},
		"a handshake": {steps: syns(nil), receiver: 30 * ms, sender: 2 * ms},
		"a handshake with other options first": {
			steps: syns([]byte{2, 4, 5, 180, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7}), receiver: 30 * ms, sender: 2 * ms,
		},
		"a large packet": {
			steps: []step{
				{tcp: tcp{src: near, dst: far, seq: 100, flags: ack, payload: 2000, gso: 1000, tsval: 1}},
				answer(20*ms, 2100, 1),
			},
			receiver: 20 * ms,
		},
		"numbers that wrap": {
			steps:    []step{send(0, wrap, full, 1), send(0, wrap+full, full, 1), answer(20*ms, 896, 1)},
			receiver: 20 * ms,
		},
		"an answer that took too long": {
			steps: []step{send(0, 100, full, 1), send(0, 100+full, full, 2), answer(11*time.Second, 100+2*full, 1)},
		},
		"an acknowledgement of nothing": {
			steps: []step{send(0, 100, full, 1), send(0, 100+full, full, 2), answer(20*ms, 100+3*full, 1), answer(ms, 50, 1)},
		},
		"a reset": {
			steps: []step{send(0, 100, full, 1), send(0, 100+full, full, 2),
				{after: ms, enters: true, tcp: tcp{src: far, dst: near, ack: 100 + 2*full, flags: ack | rst, noTS: true}}},
		},
		"a far jump": { // another connection with the same ports, whose SYN was not seen
			steps: []step{
				send(0, 100, full, 1), send(0, 1<<30, full, 1), send(0, 1<<30+full, full, 2), answer(20*ms, 1<<30+2*full, 2),
			},
			receiver: 20 * ms,
		},
	} {
		for variant, change := range map[string]func(*tcp){
			"":                  func(*tcp) {},
			", no timestamps":   func(p *tcp) { p.noTS = true },
			", two tags":        func(p *tcp) { p.tags = 2 },
			", options":         func(p *tcp) { p.ipOptions = true },
			", IPv6":            func(p *tcp) { to6(p) },
			", IPv6 extensions": func(p *tcp) { to6(p); p.ipOptions = true },
		} {
			if name == "sent again, unseen" && variant == ", no timestamps" {
				continue // nobody can tell
			}
			t.Run(name+variant, func(t *testing.T) {
				hosts++
				host := fmt.Sprintf("10.0.%d.%d", 1+hosts/100, hosts%100)
				cidr := host + "/32"
				if strings.Contains(variant, "IPv6") {
					host = fmt.Sprintf("[2001:db8:1::%d]", hosts)
					cidr = strings.Trim(host, "[]") + "/128"
				}
				r.TB = t
				r.follow(ruleOf("egress", cidr))
				for _, s := range c.steps {
					change(&s.tcp)
					for _, end := range []*string{&s.tcp.src, &s.tcp.dst} {
						if *end == far || *end == far6 {
							*end = host + ":80"
						}
					}
					r.talk(s)
				}
				got := r.parts("egress", cidr)
				if got.Limited.any() != c.limited {
					t.Errorf("while limited: %+v", got.Limited)
				}
				part := got.Free
				if c.limited {
					part = got.Limited
				}
				if got := part.Receiver; !isOne(got, c.receiver) {
					t.Errorf("of the receiver %+v, want %v", got, c.receiver)
				}
				if got := part.Sender; !isOne(got, c.sender) {
					t.Errorf("of the sender %+v, want %v", got, c.sender)
				}
				if part.AgainPackets != c.again || part.AgainBytes != c.again*full {
					t.Errorf("%d packets of %d bytes were sent again, want %d", part.AgainPackets, part.AgainBytes, c.again)
				}
			})
		}
	}
}

// Flows are measured for as long as they last, however often their sequence numbers wrap.
func TestLongFlow(t *testing.T) {
	r := newRig(t, Options{}, ruleOf("egress", "10.0.1.0/24"))
	const step = 50 << 20
	seq, rounds := uint32(100), uint64(3<<32/step)
	for range rounds {
		r.talk(send(0, seq, full, 1), send(0, seq+full, full, 2), answer(20*ms, seq+2*full, 1))
		seq += step
	}
	if n := r.parts("egress", "10.0.1.0/24").Free.Receiver.Samples; n != rounds {
		t.Errorf("%d of %d round trips were measured", n, rounds)
	}
}

// Acknowledgements that went another way for a while do not end the measurement.
func TestUnseenAcknowledgements(t *testing.T) {
	r := newRig(t, Options{}, ruleOf("egress", "10.0.1.0/24"))
	seq := uint32(100)
	for range 4 {
		r.talk(send(0, seq, full, 1))
		seq += 50 << 20
	}
	r.talk(send(0, seq, full, 1), send(0, seq+full, full, 2), answer(20*ms, seq+2*full, 1))
	r.talk(send(0, seq+2*full, full, 3), send(0, seq+3*full, full, 3), answer(20*ms, seq+4*full, 3))
	if n := r.parts("egress", "10.0.1.0/24").Free.Receiver.Samples; n != 2 {
		t.Errorf("%d of 2 round trips were measured", n)
	}
}

// isOne reports whether the only sample is want, or that there is none if want is 0.
func isOne(got Times, want time.Duration) bool {
	if want == 0 {
		return got.Samples == 0
	}
	return got.Samples == 1 && got.Min == want && got.Max == want && got.Mean() == want
}

func to6(p *tcp) {
	for _, a := range []*string{&p.src, &p.dst} {
		if *a == near {
			*a = near6
		} else {
			*a = far6
		}
	}
}

// A rule limits until a second after it dropped a packet. With a bucket for each host, a host that is dropped says
// nothing about another.
func TestWhileLimited(t *testing.T) {
	const other = "10.0.1.3:80"
	pair := func(to string, seq uint32) []step {
		steps := []step{send(0, seq, full, 1), send(0, seq+full, full, 2), answer(20*ms, seq+2*full, 1)}
		for i := range steps {
			for _, a := range []*string{&steps[i].src, &steps[i].dst} {
				if *a == far {
					*a = to
				}
			}
		}
		return steps
	}
	for each, others := range map[policy.EachKind]uint64{policy.EachAll: 1, policy.EachHost: 0} {
		t.Run(policy.Each{Kind: each}.String(), func(t *testing.T) {
			one := ruleOf("egress", "10.0.1.0/24")
			one.Each.Kind = each
			r := newRig(t, Options{}, one)
			samples := func() (limited, free uint64) {
				p := r.parts("egress", "10.0.1.0/24")
				return p.Limited.Receiver.Samples, p.Free.Receiver.Samples
			}
			is := func(what string, wantLimited, wantFree uint64) {
				t.Helper()
				if limited, free := samples(); limited != wantLimited || free != wantFree {
					t.Errorf("%s: %d samples while limited and %d otherwise, want %d and %d", what, limited, free, wantLimited, wantFree)
				}
			}
			r.talk(pair(far, 100)...)
			r.talk(pair(other, 100)...)
			is("before", 0, 2)
			r.talk(refused(send(0, 100+2*full, full, 3)), send(ms, 100+3*full, full, 3), send(ms, 100+2*full, full, 4))
			r.wait(ms)
			r.talk(pair(far, 100+4*full)...)
			r.talk(pair(other, 100+2*full)...)
			is("after a drop", 1+others, 1-others)
			r.wait(time.Second)
			r.talk(pair(far, 100+6*full)...)
			is("a second later", 0, 1)
		})
	}
}

// The counters of a rule tell what the programs cannot see.
func TestLimitedByCounters(t *testing.T) {
	one := ruleOf("egress", "10.0.1.0/24")
	one.Place.Mode = loader.Clsact
	r := newRig(t, Options{}, one)
	r.talk(refused(send(0, 100, full, 1))) // nothing is seen behind
	r.talk(refused(send(0, 100+full, full, 1)), answer(20*ms, 100+2*full, 1))
	if p := r.parts("egress", "10.0.1.0/24"); p.Free.Receiver.Samples != 1 || p.Limited.any() {
		t.Errorf("nothing was dropped: %+v", p)
	}
	one.DroppedPackets++
	r.follow(one)
	r.talk(refused(send(ms, 100+2*full, full, 1)), refused(send(0, 100+3*full, full, 1)), answer(20*ms, 100+4*full, 1))
	if p := r.parts("egress", "10.0.1.0/24"); p.Limited.Receiver.Samples != 1 || p.Free.any() {
		t.Errorf("the rule has dropped a packet: %+v", p)
	}
}

// A round trip counts for the rules of both directions, and each host for itself.
func TestRulesAndHosts(t *testing.T) {
	r := newRig(t, Options{}, ruleOf("egress", "10.0.1.0/24"), ruleOf("ingress", "10.0.0.0/16"), ruleOf("egress", "10.0.1.3/32"))
	r.talk(send(0, 100, full, 1), send(0, 100+full, full, 2), answer(20*ms, 100+2*full, 1))
	got, err := r.Read()
	testenv.Must(t, err)
	if p := got.Rules[keyOf(device, "egress", "10.0.1.0/24")]; p == nil || !isOne(p.Free.Receiver, 20*ms) || p.Free.Packets != 2 || p.Free.Bytes != 2*full {
		t.Errorf("of egress: %+v", p)
	}
	if p := got.Rules[keyOf(device, "ingress", "10.0.0.0/16")]; p == nil || !isOne(p.Free.Sender, 20*ms) || p.Free.Packets != 0 {
		t.Errorf("of ingress: %+v", p)
	}
	if len(got.Rules) != 2 {
		t.Errorf("rules are %+v", got.Rules)
	}
	for direction, cidr := range map[string]string{"egress": "10.0.1.0/24", "ingress": "10.0.0.0/16"} {
		if p := got.Hosts[HostKey{keyOf(device, direction, cidr), netip.MustParseAddr("10.0.1.2")}]; p == nil || !p.Free.any() {
			t.Errorf("the host has nothing in %s: %+v", direction, got.Hosts)
		}
	}
	// A rule that went leaves its place to another, which begins anew.
	r.drop(keyOf(device, "egress", "10.0.1.0/24"))
	r.follow(ruleOf("egress", "10.0.1.2/32"))
	r.talk(send(ms, 100+2*full, full, 3))
	if got := r.parts("egress", "10.0.1.2/32"); got.Free.Packets != 1 || got.Free.Receiver.Samples != 0 {
		t.Errorf("the new rule has %+v", got)
	}
}

// A rule does not inherit what the hosts of a deleted one sent.
func TestRuleAfterRule(t *testing.T) {
	r := newRig(t, Options{}, ruleOf("egress", "10.0.1.0/24"))
	r.talk(send(0, 100, full, 1), send(0, 100+full, full, 2), answer(20*ms, 100+2*full, 1))
	r.drop(keyOf(device, "egress", "10.0.1.0/24"))
	for _, cidr := range []string{"10.0.2.0/24", "10.0.3.0/24"} {
		r.follow(ruleOf("egress", cidr))
		got, err := r.Read()
		testenv.Must(t, err)
		for key := range got.Hosts {
			t.Errorf("a host of another rule counts: %+v", key)
		}
		if len(got.Rules) != 0 {
			t.Errorf("the new rule has %+v", got.Rules)
		}
	}
}

// A flood of SYNs and flows grows nothing, and does not hide a flow that goes on.
func TestFlood(t *testing.T) {
	r := newRig(t, Options{}, ruleOf("egress", "10.0.0.0/8"))
	seq := uint32(100)
	const flood = 3 * maxFlows
	for i := range flood {
		s := step{tcp: tcp{src: near, dst: fmt.Sprintf("10.%d.%d.%d:80", 1+i>>14, i>>7&127, i&127), seq: 1, flags: syn, tsval: 1}}
		if i%2 == 0 {
			s.flags, s.payload = ack, 10
		}
		r.talk(s)
		if i%(flood/8) == 0 {
			r.wait(time.Second)
			r.talk(send(0, seq, full, 1), send(0, seq+full, full, 2), answer(20*ms, seq+2*full, 1))
			seq += 2 * full
		}
	}
	got, err := r.Read()
	testenv.Must(t, err)
	host := got.Hosts[HostKey{keyOf(device, "egress", "10.0.0.0/8"), netip.MustParseAddr("10.0.1.2")}]
	if host == nil || host.Free.Receiver.Samples != 8 {
		t.Errorf("of the flow that goes on %+v is known, want 8 samples", host)
	}
	if len(got.Hosts) > 2*maxHosts || got.LostFlows == 0 {
		t.Errorf("%d hosts are kept, and %d flows were left out", len(got.Hosts), got.LostFlows)
	}
}

// One flow in four is about a quarter of many, and both directions of a flow are followed, or none.
func TestSampling(t *testing.T) {
	r := newRig(t, Options{OneIn: 4}, ruleOf("egress", "10.0.0.0/8"))
	const flows = 2000
	for i := range flows {
		src := fmt.Sprintf("10.0.0.1:%d", 1000+i)
		r.wait(2 * ms)
		r.talk(step{tcp: tcp{src: src, dst: far, seq: 99, flags: syn, tsval: 1}},
			step{after: 5 * ms, enters: true, tcp: tcp{src: far, dst: src, seq: 499, ack: 100, flags: syn | ack, tsval: 5, tsecr: 1}})
	}
	if n := r.parts("egress", "10.0.0.0/8").Free.Receiver.Samples; n < flows/4-100 || n > flows/4+100 {
		t.Errorf("%d of %d flows were followed", n, flows)
	}
}
