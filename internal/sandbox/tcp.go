package sandbox

import (
	"cmp"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/replay"
)

const (
	initialWindow = 10                     // RFC 6928
	minRTO        = 200 * time.Millisecond // of Linux
)

// tcp is a sender that always has data, with the congestion control of RFC 5681. It is no TCP: a
// lost packet is noticed with the next acknowledgement or a timeout, and acknowledgements are never lost or delayed.
// One that reacts to delay keeps 2 to 4 packets queued, as Vegas does.
type tcp struct {
	clock
	rtt, interval uint64
	byDelay       bool
	now, free     uint64  // free: when its line is
	window        float64 // packets
	threshold     float64 // above it the window grows by one packet in a round trip

	sequence  uint64 // of the next packet
	recovered uint64 // a loss of an earlier packet belongs to the last reduction
	unacked   int
	lost      []uint64 // sequences of lost packets that were not noticed yet
	notices   []notice // by time
}

// A notice is what the sender hears of a packet.
type notice struct {
	at, sequence, wait uint64
	marked, timeout    bool
}

func newTCP(c clock, rtt uint64, byDelay bool) *tcp {
	return &tcp{clock: c, rtt: rtt, interval: uint64(1e9 / c.perSecond), byDelay: byDelay, now: c.start, window: initialWindow, threshold: MaxPackets}
}

func (t *tcp) next() (at uint64, ok bool) {
	for t.now < t.until {
		open := t.unacked < int(t.window)
		at = max(t.now, t.free)
		if len(t.notices) == 0 || open && t.notices[0].at > at {
			return at, open && at < t.until
		}
		t.hear(t.notices[0])
		t.notices = t.notices[1:]
	}
	return 0, false
}

func (t *tcp) told(r replay.Result) {
	n := notice{at: r.Departure() + t.rtt, sequence: t.sequence, wait: r.Wait, marked: r.Verdict == model.Mark}
	if r.Verdict == model.Drop {
		t.lost = append(t.lost, t.sequence)
		n.at, n.timeout = r.Time+max(uint64(minRTO), 2*t.rtt), true
	}
	i, _ := slices.BinarySearchFunc(t.notices, n.at+1, func(n notice, at uint64) int { return cmp.Compare(n.at, at) })
	t.notices = slices.Insert(t.notices, i, n)
	t.sequence++
	t.unacked++
	t.now, t.free = r.Time, r.Time+t.interval
}

func (t *tcp) hear(n notice) {
	t.now = max(t.now, n.at)
	if n.timeout {
		if len(t.lost) > 0 && t.lost[0] <= n.sequence { // else it was noticed before
			t.unacked -= len(t.lost)
			t.lost = t.lost[:0]
			t.threshold, t.window, t.recovered = max(t.window/2, 2), 1, t.sequence
		}
		return
	}
	t.unacked--
	reduce := n.marked && n.sequence >= t.recovered
	for len(t.lost) > 0 && t.lost[0] < n.sequence {
		reduce = reduce || t.lost[0] >= t.recovered
		t.lost = t.lost[1:]
		t.unacked--
	}
	queued := t.window * float64(n.wait) / float64(t.rtt+n.wait)
	switch {
	case reduce:
		t.threshold = max(t.window/2, 2)
		t.window, t.recovered = t.threshold, t.sequence
	case t.byDelay && queued > 4:
		t.threshold = min(t.threshold, t.window)
		t.window = max(t.window-1/t.window, 2)
	case t.byDelay && queued > 2:
		t.threshold = min(t.threshold, t.window)
	case t.window < t.threshold:
		t.window++
	default:
		t.window += 1 / t.window
	}
}
