package cluster

import (
	"math"
	"testing"
	"time"

	shapemaps "github.com/shapectl/shapectl/pkg/maps"
)

const testTime = uint64(1e12)

// ask returns the only call of an agent for one pool.
func ask(t *testing.T, a *Agent, now uint64, p Pool) Call {
	t.Helper()
	calls := a.Ask(now, []Pool{p}, false)
	if len(calls) != 1 {
		t.Fatalf("%d calls", len(calls))
	}
	return calls[0]
}

var testPool = Pool{Name: "p", Cluster: "c", Rate: 1e9, Weight: 1, Lease: shapemaps.Lease{Safe: leastRate}}

func TestLeaseEndsFromSending(t *testing.T) {
	a := New("h", 1)
	c := ask(t, a, testTime, testPool)
	_, lease, ok := a.Hear(testTime+uint64(300*time.Millisecond), c, Answer{Turn: 1, Epoch: 1, Lease: 5e8, Safe: 1e8, Again: slowUs, Known: 1e9})
	if want := (shapemaps.Lease{Rate: 5e8, Safe: 1e8, Until: testTime + uint64(1980*time.Millisecond), Known: 1e9, Epoch: 1}); !ok || lease != want {
		t.Errorf("%+v, not %+v", lease, want)
	}
}

func TestSmallLeaseLastsLonger(t *testing.T) {
	a := New("h", 1)
	c := ask(t, a, testTime, testPool)
	_, lease, ok := a.Hear(testTime+uint64(300*time.Millisecond), c, Answer{Turn: 1, Epoch: 1, Lease: 1e7, Safe: 1e8, Again: slowUs, Known: 1e9})
	if want := (shapemaps.Lease{Rate: 1e7, Safe: 1e8, Until: testTime + uint64(6300*time.Millisecond), Known: 1e9, Epoch: 1}); !ok || lease != want {
		t.Errorf("%+v, not %+v", lease, want)
	}
}

// TestNoUseOfAnswer has answers from which no lease follows.
func TestNoUseOfAnswer(t *testing.T) {
	grant := Answer{Turn: 1, Epoch: 1, Lease: 5e8, Safe: 1e8, Again: slowUs}
	for name, test := range map[string]struct {
		after  time.Duration
		answer Answer
	}{
		"late":   {2*Timeout + 1, grant},
		"broken": {0, Answer{Status: Broken}},
		"old":    {0, Answer{Status: Old}},
		"newer":  {0, Answer{Status: Newer}},
		"quiet":  {0, Answer{Status: Quiet, Turn: 1, Epoch: 1}},
		"absurd": {0, Answer{Turn: 1, Epoch: 1, Lease: math.NaN(), Safe: 1e8}},
	} {
		t.Run(name, func(t *testing.T) {
			a := New("h", 1)
			c := ask(t, a, testTime, testPool)
			if _, lease, ok := a.Hear(testTime+uint64(test.after), c, test.answer); ok {
				t.Errorf("%+v", lease)
			}
		})
	}
	a := New("h", 1)
	c := ask(t, a, testTime, testPool)
	a.Lost(testTime+uint64(Timeout), c)
	ask(t, a, testTime+uint64(time.Second), testPool)
	if _, lease, ok := a.Hear(testTime+uint64(time.Second), c, grant); ok {
		t.Errorf("the answer to an earlier request: %+v", lease)
	}
}

// TestNews has senders that begin and end, of which the store must hear before the next request is due.
func TestNews(t *testing.T) {
	a, now, p := New("h", 1), testTime, testPool
	p.Lease = shapemaps.Lease{Rate: 1e6, Safe: 1e8, Until: now + uint64(time.Hour)}
	answer := Answer{Turn: 1, Epoch: 1, Lease: 1e6, Safe: 1e8, Again: slowUs}
	send := func(passed, refused uint64) (asked []Request) {
		now += uint64(look)
		p.Passed, p.Refused = p.Passed+passed, p.Refused+refused
		for _, c := range a.Ask(now, []Pool{p}, false) {
			a.Hear(now, c, answer)
			asked = append(asked, c.Request)
		}
		return asked
	}
	if asked := send(0, 0); asked[0].Demand != 1e6 || asked[0].Keeps != 1e6 {
		t.Errorf("it knows nothing yet, and asked: %+v", asked)
	}
	send(1000, 0)
	if asked := send(1000, 0); len(asked) > 0 {
		t.Errorf("it has enough, and asked: %+v", asked)
	}
	if asked := send(25_000, 25_000); len(asked) != 1 || asked[0].Demand < 1e8 {
		t.Errorf("it needs more, and asked: %+v", asked)
	}
	p.Lease.Rate = 1e8
	if asked := send(2_500_000, 25_000); len(asked) != 1 || asked[0].Keeps != 5e7 {
		t.Errorf("it needs still more, and asked: %+v", asked)
	}
	var frees bool
	for range 4 { // less than an interval
		for _, q := range send(0, 0) {
			frees = frees || q.Demand < 5e7
		}
	}
	if !frees {
		t.Error("it did not say that it needs less")
	}
}

// TestPoolThatIsGone leaves its cluster, until the store has heard it.
func TestPoolThatIsGone(t *testing.T) {
	a := New("h", 1)
	c := ask(t, a, testTime, testPool)
	a.Hear(testTime, c, Answer{Turn: 7, Epoch: 1, Again: slowUs})
	now := testTime + uint64(time.Second)
	for range 2 {
		calls := a.Ask(now, nil, false)
		if len(calls) != 1 || calls[0].Request.Rate != 0 || calls[0].Request.Turn != 7 {
			t.Fatalf("%+v", calls)
		}
		a.Lost(now, calls[0])
		now += uint64(time.Second)
	}
	c = a.Ask(now, nil, false)[0]
	a.Hear(now, c, Answer{Turn: 7, Epoch: 1, Again: slowUs})
	if calls := a.Ask(now+uint64(time.Minute), nil, false); len(calls) > 0 {
		t.Errorf("it left, and still asks: %+v", calls)
	}
}

// TestPoolThatMayComeBack stays a member, without asking, while the change that removed it may be reverted.
func TestPoolThatMayComeBack(t *testing.T) {
	a := New("h", 1)
	c := ask(t, a, testTime, testPool)
	a.Hear(testTime, c, Answer{Turn: 7, Epoch: 1, Again: slowUs})
	now := testTime + uint64(time.Minute)
	if calls := a.Ask(now, nil, true); len(calls) > 0 {
		t.Errorf("it left: %+v", calls)
	}
	if next, _ := a.Next(); next <= now {
		t.Error("it would ask in a loop")
	}
	now += uint64(time.Minute)
	if c := ask(t, a, now, testPool); c.Request.Turn != 7 || c.Request.Rate == 0 {
		t.Errorf("it came back, and asked %+v", c.Request)
	}
}

// TestReplaced has the agent of a host that another one acts for: both must not use the same share.
func TestReplaced(t *testing.T) {
	a := New("h", 1)
	p := testPool
	p.Lease = shapemaps.Lease{Rate: 5e8, Safe: 1e8, Until: testTime + uint64(time.Second)}
	c := ask(t, a, testTime, p)
	_, lease, ok := a.Hear(testTime, c, Answer{Status: Replaced, Again: slowUs})
	if !ok || lease.Rate != leastRate || lease.Until != testTime+uint64(Rise) {
		t.Errorf("%+v %v", lease, ok)
	}
}
