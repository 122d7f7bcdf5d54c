// Package explain tells what packets meet on their way, which rule decides over
// them, and what it makes of them. It first finds the facts out, and charges and
// changes nothing; Judge, which knows no kernel, says what they mean.
package explain

import (
	"net/netip"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Question says which packets to explain, and where.
type Question struct {
	Device    string            // "" for those that routes tell
	Direction *policy.Direction // of the device; nil for both
	Address   netip.Addr        // the zero Addr where the flow says both
	Flow      *maps.Flow        // nil for any
	Bytes     uint64            // of each segment at layer 2, without VLAN tags; 0 for full ones of the device
	Segments  uint16            // at least 1
	Netns     string            // network namespace of suggested commands; "" for that of the caller
}

// A QuestionError says why a question has no answer. It wraps
// netinfo.ErrNoDevice where there is neither a device nor a rule of that name.
type QuestionError struct{ err error }

func (e *QuestionError) Error() string { return e.err.Error() }
func (e *QuestionError) Unwrap() error { return e.err }

// Explain answers a question about the namespace of the calling thread. The
// error is, or wraps, a *QuestionError where the question has no answer. With
// an error about hooks that could not be read comes what the others do.
func Explain(n *loader.Namespace, q Question) (ways report.Ways, err error) {
	gather := onDevice
	if q.Device == "" {
		gather = onRoutes
	}
	facts, err := gather(n, q)
	for _, f := range facts {
		f.Netns = q.Netns
		ways = append(ways, Judge(f))
	}
	return ways, err
}

// Facts are what was found out about packets, and about what they meet.
type Facts struct {
	Packets
	Routed    bool // routes tell the stops; else there is one, which was asked for
	In, Out   Leg  // known if Routed
	Stops     []Stop
	Elsewhere []Elsewhere
	Netns     string // see Question
}

// Packets are those that are asked about.
type Packets struct {
	Src, Dst netip.Addr // the zero Addr where it may be any
	Flow     *maps.Flow // nil where it may be any between them
	Segments uint16
}

// A Leg is one half of the path of packets: into this host, or out of it.
type Leg struct {
	End       netip.Addr    // where they come from or go to; the zero Addr for anywhere, and then nothing is known
	Route     netinfo.Route // to there; the zero Route where there is none
	NoRoute   error         // why there is none
	Unwilling error         // why this host does not forward the packets
	netinfo.Descent
}

// A Stop is a direction of a device that packets pass.
type Stop struct {
	netinfo.Hop        // with the zero Device where that is not here
	Frame       uint64 // bytes of each segment at layer 2, without VLAN tags
	Path        []netinfo.ChainEntry
	Unlisted    bool  // Path is not known, as that takes CAP_NET_ADMIN
	Hook        *Hook // nil where there are no rules, or
	Unreadable  bool  // where another version has set them
	Rule        *Rule // nil where none matches
	// What holds back the packets of a rule that delays: on egress the device's
	// qdisc, on ingress an ifb, which is nil where there is none.
	Qdisc fq.State
	Ifb   *fq.Ifb
}

// A Hook is a direction of a device that has rules.
type Hook struct {
	Name        string // of the device now, or when the hook was made
	Device      netinfo.Device
	Direction   policy.Direction
	Match       policy.Match
	State       loader.State
	Status      string  // the state for people to read
	RevertsInNS *uint64 // nil unless a change waits to be confirmed
}

// A Rule is one that matches, with what a packet finds there.
type Rule struct {
	policy.Rule
	Hides     []policy.Rule // those that match as well, the narrowest first
	Bucket    *Bucket       // nil for an unlimited rule, and where only a flow would tell which it is
	SpeedBits uint64        // of the device; 0 where it does not say
	Shadow    *Shadow       // nil where there is none, and where only a flow would tell its bucket
}

// A Bucket is the one that a packet is charged to.
type Bucket struct {
	Sharer string
	model.State
	Seen time.Time
}

// A Shadow is the shadow of a rule.
type Shadow struct {
	policy.Rule
	Bucket
}

// Elsewhere is a limit for packets on a hook that they do not meet for sure.
type Elsewhere struct {
	Hook
	Rule policy.Rule
}

// Judge says what the facts mean.
func Judge(f Facts) report.Way {
	way := report.Way{Packets: f.Packets.String(), Hooks: []report.Stop{}, Elsewhere: []report.Elsewhere{}}
	for _, s := range f.Stops {
		way.Hooks = append(way.Hooks, judgeStop(f.Packets, s))
	}
	if !f.Routed {
		way.How = "that leave by " + way.Hooks[0].Device
		if f.Stops[0].Direction == policy.Ingress {
			way.How = "that come in by " + way.Hooks[0].Device
		}
		return way
	}
	in, out := judgeLegs(f.In, f.Out)
	way.How = in.how + in.why
	switch {
	case in.how == "":
		way.How = out.how + out.why
	case out.how != "" && out.how != in.how:
		way.How += ", and " + out.how + out.why
	}
	for _, e := range f.Elsewhere {
		way.Elsewhere = append(way.Elsewhere, report.Elsewhere{
			Device: e.Name, Direction: e.Direction.String(), Brief: report.NewBrief(e.Rule, e.Name, e.Direction, e.Match),
			Attached: e.State.InForce(), State: e.Status, Met: metWhen(f.Netns, e.Hook, f.In, f.Out),
		})
	}
	return way
}

func (p Packets) String() string {
	switch {
	case p.Flow != nil:
		return "of " + p.Flow.String()
	case p.Src.IsValid():
		return "from " + p.Src.String()
	}
	return "to " + p.Dst.String()
}

// side is the address that rules go by.
func (p Packets) side(m policy.Match) netip.Addr {
	if m == policy.MatchSrc {
		return p.Src
	}
	return p.Dst
}
