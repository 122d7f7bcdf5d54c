package explain

import (
	"encoding/json"
	"testing"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

func TestCountPacket(t *testing.T) {
	for _, test := range []struct {
		frame   uint64
		tags    int
		framing policy.Framing
		want    uint64
	}{
		{1514, 0, policy.Framing{}, 1514},
		{1514, 2, policy.Framing{}, 1522},
		{1514, 1, policy.Framing{Overhead: 20}, 1538},
		{60, 1, policy.Framing{Overhead: 10, MPU: 84}, 84},
		{60, 0, policy.Framing{Overhead: -64}, 0},
		{60, 0, policy.Framing{Overhead: -64, MPU: 50}, 50},
		{1<<24 - 1, 0, policy.Framing{Overhead: 38}, 1<<24 - 1}, // as the programs bound it
	} {
		if got := countPacket(test.frame, test.tags, test.framing); got != test.want {
			t.Errorf("%+v counts %d", test, got)
		}
	}
}

func TestLevelOfBucket(t *testing.T) {
	const byteNS = 512 // of a rate that the byte clock keeps without rounding
	limit := policy.Rule{Rate: 15_625_000, Capacity: 5000}
	held := limit
	held.Algorithm, held.Penalty = policy.Leaky, policy.Penalty{Kind: policy.PenaltyHold, Duration: 30000 * byteNS}
	mark := limit
	mark.Excess = policy.ECN
	leaky, burst := limit, limit
	leaky.Algorithm, leaky.Excess, leaky.ECNAbove = policy.Leaky, policy.Delay, 2000*byteNS
	burst.Excess, burst.Queue, burst.ECNAbove = policy.Delay, 7000, policy.Never
	shared := limit
	shared.Share.Kind = policy.ShareFlow
	for _, test := range []struct {
		name         string
		rule         policy.Rule
		level, bytes uint64 // of the bucket, and of the packet
		want         report.Level
		verdict      string
	}{
		{"empty", limit, 0, 1000, report.Level{Conforms: true, RoomPackets: 5, RoomBytes: 5000}, "pass"},
		{"just fits", limit, 4000, 1000, report.Level{Conforms: true, RoomPackets: 1, RoomBytes: 1000, EmptyNS: 4000 * byteNS}, "pass"},
		{"does not fit", limit, 4001, 1000, report.Level{EmptyNS: 4001 * byteNS, WaitNS: byteNS}, "drop"},
		{"shared", shared, 4000, 1000, report.Level{Conforms: true, RoomPackets: 1, RoomBytes: 1000, EmptyNS: 4000 * byteNS}, "pass"},
		{"bigger than the bucket", limit, 0, 6000, report.Level{Conforms: true, RoomPackets: 1, RoomBytes: 5000}, "pass"},
		{"bigger, and not empty", limit, 1000, 6000, report.Level{EmptyNS: 1000 * byteNS, WaitNS: 1000 * byteNS}, "drop"},
		{"held", held, 35000, 1000, report.Level{
			EmptyNS: 35000 * byteNS, WaitNS: 31000 * byteNS, HeldNS: 30000 * byteNS,
		}, "drop"},
		{"full, not held", held, 5000, 1000, report.Level{EmptyNS: 5000 * byteNS, WaitNS: 1000 * byteNS}, "drop"},
		{"marked", mark, 9000, 1000, report.Level{EmptyNS: 9000 * byteNS, WaitNS: 5000 * byteNS}, "mark"},
		{"too full to be marked", mark, 9001, 1000, report.Level{EmptyNS: 9001 * byteNS, WaitNS: 5001 * byteNS}, "drop"},
		{"empty queue", leaky, 0, 1000, report.Level{
			Conforms: true, RoomPackets: 5, RoomBytes: 5000,
		}, "pass"},
		{"waits", leaky, 2000, 1000, report.Level{Conforms: true, RoomPackets: 3, RoomBytes: 3000, EmptyNS: 2000 * byteNS, WaitNS: 2000 * byteNS}, "delay"},
		{"waits longer", leaky, 2001, 1000, report.Level{Conforms: true, RoomPackets: 2, RoomBytes: 2999, EmptyNS: 2001 * byteNS, WaitNS: 2001 * byteNS}, "mark"},
		{"does not fit the queue", leaky, 4001, 1000, report.Level{EmptyNS: 4001 * byteNS, WaitNS: byteNS}, "drop"},
		{"leaves at once", burst, 2000, 1000, report.Level{Conforms: true, RoomPackets: 10, RoomBytes: 10000, EmptyNS: 2000 * byteNS}, "pass"},
		{"waits behind a burst", burst, 5000, 1000, report.Level{Conforms: true, RoomPackets: 7, RoomBytes: 7000, EmptyNS: 5000 * byteNS, WaitNS: 1000 * byteNS}, "delay"},
		{"does not fit, behind a burst", burst, 11500, 1000, report.Level{EmptyNS: 11500 * byteNS, WaitNS: 500 * byteNS}, "drop"},
		{"bigger than what leaves at once", burst, 0, 6000, report.Level{Conforms: true, RoomPackets: 2, RoomBytes: 12000}, "pass"},
	} {
		r := test.rule
		got, verdict := judgeBucket(r, Bucket{State: model.State{Level: test.level << model.UnitBits}}, test.bytes, 0)
		want := test.want
		want.LevelBytes, want.CapacityBytes, want.HoldsBytes = test.level, r.Capacity, r.Capacity+r.Queue
		if g, w := plainJSON(t, got), plainJSON(t, want); g != w {
			t.Errorf("%s: it is\n%s, want\n%s", test.name, g, w)
		}
		if verdict.String() != test.verdict {
			t.Errorf("%s: the verdict is %s, want %s", test.name, verdict, test.verdict)
		}
	}
	// What counts nothing always finds room.
	b := Bucket{State: model.State{Level: 1000 << model.UnitBits}}
	if l, _ := judgeBucket(limit, b, 0, 0); !l.Conforms || l.RoomPackets < 1e9 {
		t.Errorf("no bytes: %+v", l)
	}
}

func plainJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	testenv.Must(t, err)
	return string(b)
}
