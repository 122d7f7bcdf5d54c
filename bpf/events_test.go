package bpf_test

import (
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

var allEvents = []maps.EventKind{maps.Overflow, maps.PenaltyStarts, maps.GuaranteeFails}

// listen listens at a virtual time.
func (r *rig) listen(now uint64, most uint32, kinds ...maps.EventKind) *maps.Listener {
	r.Helper()
	r.at(now)
	l, err := r.set.Listen(most, kinds...)
	testenv.Must(r, err)
	r.Cleanup(func() { l.Close() })
	return l
}

// heard are the events that a listener was told of since the last call.
func (r *rig) heard(l *maps.Listener) (all []maps.Event) {
	r.Helper()
	for {
		e, err := l.Next(time.Unix(0, 1)) // of the past: it does not wait
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return all
		}
		testenv.Must(r, err)
		all = append(all, e)
	}
}

const ms = uint64(time.Millisecond)

// start is a virtual time that is not close to 0.
const start = uint64(100 * time.Second)

func TestOverflowIsOneEventOfAnEpisode(t *testing.T) {
	for _, tt := range []struct {
		name string
		rule policy.Rule
		key  string
		kind maps.EventKind
		fate maps.Fate
	}{
		{"shared bucket", policy.Rule{}, "10.1.0.0/16", maps.Overflow, maps.Dropped},
		{"each host", policy.Rule{Each: policy.Each{Kind: policy.EachHost}}, "10.1.0.7", maps.Overflow, maps.Dropped},
		{"each subnet", policy.Rule{Each: policy.Each{Kind: policy.EachSubnet, Bits: 24}}, "10.1.0.0/24", maps.Overflow, maps.Dropped},
		{"each flow", policy.Rule{Each: policy.Each{Kind: policy.EachFlow}}, "udp,10.9.9.9:1,10.1.0.7:53", maps.Overflow, maps.Dropped},
		{"pass", policy.Rule{Excess: policy.Pass}, "10.1.0.0/16", maps.Overflow, maps.Passed},
		{"framing", policy.Rule{Framing: policy.Framing{Overhead: 24}}, "10.1.0.0/16", maps.Overflow, maps.Dropped},
		{"penalty", policy.Rule{Algorithm: policy.Leaky, Penalty: policy.Penalty{Kind: policy.PenaltyFill}}, "10.1.0.0/16", maps.PenaltyStarts, maps.Dropped},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 8, Buckets: 64}, egress())
			tt.rule.Prefix, tt.rule.Rate, tt.rule.Capacity = prefix("10.1.0.0/16"), 8_000, 1000
			e := r.put(tt.rule, start)
			l := r.listen(start, 100, allEvents...)
			frame := udp(addr("10.9.9.9"), addr("10.1.0.7"), 100)
			frame[34], frame[35] = 0, 1
			now := start
			offer := func(n int) {
				for range n {
					send(t, r.program(), frame, meta{now: now})
					now += ms
				}
			}
			offer(7) // 994 bytes, or with overhead more
			all := r.heard(l)
			offer(100)
			all = append(all, r.heard(l)...)
			if len(all) != 1 {
				t.Fatalf("%d events of one episode: %+v", len(all), all)
			}
			cause, ok := r.set.Cause(all[0])
			if !ok || cause.Rule.Prefix != e.Prefix || cause.Key != tt.key || cause.From != addr("10.1.0.7") || cause.Pool != "" ||
				all[0].Kind != tt.kind || all[0].Fate != tt.fate || all[0].Capacity != 1000 || all[0].Level < 800 || all[0].Level > 1000 {
				t.Fatalf("told %+v\nof %+v", all[0], cause)
			}
			now += 1100 * ms // a second without an excess packet; 1000 bytes have drained
			r.at(now)
			testenv.Must(t, l.Renew())
			offer(100)
			if all := r.heard(l); len(all) != 1 {
				t.Fatalf("%d events of the second episode: %+v", len(all), all)
			}
		})
	}
}

var _ netip.Addr
