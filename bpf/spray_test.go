package bpf_test

import (
	"encoding/binary"
	"flag"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

var sprayed = flag.Int("sprayed", 20_000, "one-packet flows that a sender of TestSprayOfSharers opens")

// A talker sends packets of one size to a host at a constant rate. With spray, each is of another flow.
type talker struct {
	frame     []byte
	every     float64 // ns
	next      float64
	spray     bool
	packets   int
	sent, got float64 // bytes
}

func newTalker(host string, size int, rate float64, spray bool) *talker {
	frame := ether(typeIPv4, ip4{dst: host, proto: protoUDP}.with(udpHeader(1, 2)))
	return &talker{frame: append(frame, make([]byte, size-len(frame))...), every: float64(size) * 8e9 / rate, spray: spray}
}

const portsAt = 14 + 20

// talk sends the packets of all talkers until a time (ns), or until one has sent so many; 0 for any number. It counts from
// another time on.
func (f *forest) talk(all []*talker, count, end float64, packets int) (now float64) {
	f.Helper()
	for {
		next := slices.MinFunc(all, func(a, b *talker) int { return int(a.next - b.next) })
		if now = next.next; now > end || packets > 0 && next.packets == packets {
			return now
		}
		if next.spray {
			binary.BigEndian.PutUint32(next.frame[portsAt:], uint32(next.packets))
		}
		next.packets++
		verdict, _, _ := sendTimed(f, f.program(), next.frame, meta{now: 1e9 + uint64(now)})
		if now >= count {
			next.sent += float64(len(next.frame))
			if verdict != drop {
				next.got += float64(len(next.frame))
			}
		}
		next.next += next.every
	}
}

// One sender opens very many flows of one packet in a pool that two others overload. By hosts and by members, each of the
// three has a third. By flows, each packet of the spray has a share of its own: the others have what it leaves.
func TestSprayOfSharers(t *testing.T) {
	const rate = policy.Rate(20e6)
	for _, share := range []policy.ShareKind{policy.ShareFlow, policy.ShareHost, policy.ShareMember} {
		for _, times := range []float64{0.5, 2} {
			t.Run(fmt.Sprintf("share %v, spray of %v times the rate", policy.Share{Kind: share}, times), func(t *testing.T) {
				t.Parallel()
				f := &forest{rig: newRig(t, maps.Size{Views: 2, Rules: 8, Buckets: 1 << 16, Labels: 8, Shares: 1, Pools: true}, egress())}
				f.putIn(pool("uplink", policy.Rule{Rate: rate, Capacity: policy.DefaultCapacity(rate), Share: policy.Share{Kind: share}}), 0)
				for i := range 3 {
					f.putIn(policy.Rule{Prefix: prefix(fmt.Sprintf("10.0.0.%d/32", i)), Rate: policy.Unlimited, Within: "uplink"}, 0)
				}
				all := []*talker{
					newTalker("10.0.0.0", 1514, 2*float64(rate), false), newTalker("10.0.0.1", 1514, 2*float64(rate), false),
					newTalker("10.0.0.2", 300, times*float64(rate), true),
				}
				const count = 0.5e9
				took := f.talk(all, count, 1e18, *sprayed) - count
				part := 1.0 / 3
				if share == policy.ShareFlow {
					part = max(0, 1-times) / 2
				}
				var got []float64
				for i, a := range all {
					got = append(got, a.got/took*8e9/float64(rate))
					if least := part - 0.02; i < 2 && got[i] < least {
						t.Errorf("of the rate, sender %d gets %.3f, want at least %.3f", i, got[i], least)
					}
				}
				t.Logf("%d flows in %.1f s: of the rate, the others get %.3f and %.3f, the spray %.3f", all[2].packets, took/1e9, got[0], got[1], got[2])
			})
		}
	}
}

// A spray of flows into one pool costs sharers of another one nothing: it does not fill the table that they share.
func TestSprayBesideAnotherPool(t *testing.T) {
	const rate, other = policy.Rate(100e6), policy.Rate(10e6)
	f := &forest{rig: newRig(t, maps.Size{Views: 2, Rules: 8, Buckets: 1 << 16, Labels: 8, Shares: 2, Pools: true}, egress())}
	f.putIn(pool("sprayed", policy.Rule{Rate: rate, Capacity: policy.DefaultCapacity(rate), Share: policy.Share{Kind: policy.ShareFlow}}), 0)
	f.putIn(pool("other", policy.Rule{Rate: other, Capacity: policy.DefaultCapacity(other), Share: policy.Share{Kind: policy.ShareHost}}), 0)
	f.putIn(policy.Rule{Prefix: prefix("10.0.0.1/32"), Rate: policy.Unlimited, Within: "sprayed"}, 0)
	f.putIn(policy.Rule{Prefix: prefix("10.1.0.0/16"), Rate: policy.Unlimited, Within: "other"}, 0)
	spray := newTalker("10.0.0.1", 600, 2*float64(rate), true)
	now := f.talk([]*talker{spray}, 0, 1e18, 300_000)
	// Ten hosts offer six times their part, and ten offer half of theirs.
	var hosts []*talker
	for i := range 20 {
		part := float64(other) / 20 * []float64{6, 0.5}[i%2]
		h := newTalker(netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}).String(), 1000, part, false)
		h.next = now + float64(i)*1e5
		hosts = append(hosts, h)
	}
	const count, end = 1e9, 2e9
	f.talk(append(hosts, spray), now+count, now+end, 0)
	for i, h := range hosts {
		most := 0.9 * float64(other) / 8 / 10 * (end - count) / 1e9 // of what the others leave
		if light := i%2 == 1; light && h.got < h.sent || !light && h.got > most {
			t.Errorf("host %d got %.0f bytes of %.0f", i, h.got, h.sent)
		}
	}
}

// In a small bucket, a host that sends two packets at once at 80 % of its part loses nothing to a flood.
func TestSharesInSmallBuckets(t *testing.T) {
	const rate = policy.Rate(2e6)
	for _, share := range []policy.ShareKind{policy.ShareHost, policy.ShareMember} {
		t.Run(fmt.Sprintf("share %v", policy.Share{Kind: share}), func(t *testing.T) {
			f := &forest{rig: newRig(t, maps.Size{Views: 2, Rules: 8, Buckets: 64, Labels: 8, Shares: 1, Pools: true}, egress())}
			r := policy.Rule{Rate: rate, Capacity: 12_500, Share: policy.Share{Kind: share}}
			if share == policy.ShareMember {
				f.putIn(pool("uplink", r), 0)
				f.putIn(policy.Rule{Prefix: prefix("10.0.0.1/32"), Rate: policy.Unlimited, Within: "uplink"}, 0)
				r = policy.Rule{Rate: policy.Unlimited, Within: "uplink"}
			}
			r.Prefix = prefix("10.0.0.0/24")
			f.putIn(r, 0)
			light := newTalker("10.0.0.1", 1514, 0.4*float64(rate)/2, false)
			twin, flood := *light, newTalker("10.0.0.2", 1514, 5*float64(rate), false)
			f.talk([]*talker{light, &twin, flood}, 0, 20e9, 0)
			if light.got+twin.got < light.sent+twin.sent {
				t.Errorf("it lost %.1f %%", 100-100*(light.got+twin.got)/(light.sent+twin.sent))
			}
			if all := light.got + twin.got + flood.got; all < 0.99*float64(rate)/8*20 {
				t.Errorf("%.0f bytes passed", all)
			}
		})
	}
}
