// Package explain finds which devices packets pass, which rule decides about them,
// and what its verdict is. It gathers facts first, and neither charges nor changes
// anything. Judge, which needs no kernel, says what the facts mean.
package explain

import (
	"cmp"
	"net/netip"
	"slices"
	"sort"
	"time"

	"github.com/shapectl/shapectl/internal/doctor"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Question says which packets to explain, and where.
type Question struct {
	Device    string            // "" for those of the routes
	Direction *policy.Direction // of the device; nil for both
	Address   netip.Addr        // the zero Addr where the flow has both
	Name      string            // "", or that of a rule of Device, and
	Network   netip.Prefix      // its network, which has the address
	Routes    bool              // explain all of the path if the routes have Device
	Flow      *maps.Flow        // nil for any
	DSCP      uint8             // of the packets
	Bytes     uint64            // at layer 2, without VLAN tags; 0 for a full one of the device
	Netns     string            // network namespace of suggested commands; "" for that of the caller
	Interval  time.Duration     // for how long packets are counted where there are pools
}

// A QuestionError says why a question has no answer. It wraps
// netinfo.ErrNoDevice where there is neither a device nor a rule of that name.
type QuestionError struct{ err error }

func (e *QuestionError) Error() string { return e.err.Error() }
func (e *QuestionError) Unwrap() error { return e.err }

// Explain answers questions about the namespace of the calling thread. The
// error is, or wraps, a *QuestionError where a question has no answer. With an
// error about hooks that could not be read it returns the answers for the others.
func Explain(n *loader.Namespace, questions ...Question) (paths report.Paths, unread error) {
	v := &view{Namespace: n}
	for i := range questions {
		if err := questions[i].throughNAT(); err != nil {
			return nil, err
		}
	}
	if slices.ContainsFunc(questions, func(q Question) bool { return q.Device == "" || q.Routes }) {
		v.hooks, unread = n.Hooks()
		defer func() { loader.CloseHooks(v.hooks) }()
	}
	told := map[string]bool{} // the ends of packets whose path is explained
	var all []Facts
	for _, q := range questions {
		facts, err := q.gather(v)
		if err != nil {
			return nil, err
		}
		for _, f := range facts {
			ends := f.Src.String() + " " + f.Dst.String()
			if f.Routed && told[ends] {
				continue
			}
			told[ends] = told[ends] || f.Routed
			all = append(all, f)
		}
	}
	if len(questions) > 0 {
		watch(n, all, questions[0].Interval)
	}
	for _, f := range all {
		paths = append(paths, Judge(f))
	}
	return paths, unread
}

// Facts are about packets, and the hooks that they pass.
type Facts struct {
	Packets
	Routed    bool   // the stops are those of routes; else there is one, which was asked for
	In, Out   Leg    // known if Routed
	NAT       string // the device on which the packets have the address of this host, as their host is behind NAT; "" for none
	Stops     []Stop
	Elsewhere []Elsewhere
}

// Packets are those that are asked about.
type Packets struct {
	Src, Dst netip.Addr // the zero Addr for any
	Flow     *maps.Flow // nil for any between them
	DSCP     uint8
	Name     string       // see Question
	Network  netip.Prefix // see Question
	Netns    string       // see Question
	hidden   bool         // they have the address of this host here, and any on the Internet
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
	Hook        *Hook          // nil where there are no rules, or
	Unreadable  error          // why rules here cannot be read
	Undecided   bool           // the address that the rules compare is not known, and decides which one matches
	Rule        *Rule          // nil where none matches, or if Undecided
	Marks       []netip.Prefix // that have rules here; none for a question about one
	Queue       *doctor.Queue  // of a rule that is attached and delays packets, or whose pool does; else nil
}

// A Hook is a direction of a device that has rules.
type Hook struct {
	Name        string // of the device now, or when the hook was made
	Device      netinfo.Device
	Direction   policy.Direction
	Match       policy.Match
	Mode        loader.Mode
	State       loader.State
	Status      string  // the state for people to read
	RevertsInNS *uint64 // nil unless a change waits to be confirmed
}

// A Rule is one that matches.
type Rule struct {
	policy.Rule
	Counters maps.Counters
	Hides    []policy.Rule // wider rules that match, the narrowest first
	Bucket   *Bucket       // nil for an unlimited rule, and where it depends on the flow
	Stages   Stages        // of the rule, and the pools above; none for a rule without a limit, and for one with colours
}

// A Bucket is the one that a packet is charged to.
type Bucket struct {
	Key string
	model.State
}

// Elsewhere is a limit for packets on a hook that they may not pass.
type Elsewhere struct {
	Hook
	Rule policy.Rule
}

// Judge says what the facts mean.
func Judge(f Facts) report.Path {
	path := report.Path{Packets: f.Packets.String(), Hooks: []report.Stop{}, Elsewhere: []report.Elsewhere{}}
	for i := range f.Stops {
		path.Hooks = append(path.Hooks, judgeStop(&f.Packets, &f.Stops[i]))
	}
	path.Answer = answer(path.Hooks)
	if !f.Routed {
		path.How = "leave by " + path.Hooks[0].Device
		if f.Stops[0].Direction == policy.Ingress {
			path.How = "come in by " + path.Hooks[0].Device
		}
		return path
	}
	in, out := judgeLegs(&f.In, &f.Out)
	path.How = in.how + in.why
	switch {
	case in.how == "":
		path.How = out.how + out.why
	case out.how != "" && out.how != in.how:
		path.How += ", and " + out.how + out.why
	}
	if f.NAT != "" {
		path.How += "; on " + f.NAT + ", they have the address of this host (NAT)"
	}
	for _, e := range f.Elsewhere {
		met, when := metWhen(&e.Hook, &f.In, &f.Out)
		if !met && !f.expects(&e) {
			continue
		}
		if e.Name == f.NAT {
			when = "never met, as the address is behind NAT"
		}
		path.Elsewhere = append(path.Elsewhere, report.Elsewhere{
			Device: e.Name, Direction: e.Direction.String(), Brief: report.NewBrief(e.Rule, e.Name, e.Direction, e.Match),
			Attached: e.State.InForce(), State: e.Status, Met: met, When: when,
		})
	}
	sort.SliceStable(path.Elsewhere, func(i, j int) bool {
		a, b := &path.Elsewhere[i], &path.Elsewhere[j]
		if a.Met != b.Met {
			return a.Met
		}
		return cmp.Or(plain.Natural(a.Device, b.Device), cmp.Compare(a.Direction, b.Direction)) < 0
	})
	return path
}

// weights order verdicts by what they mean for the packets. A limit that others exceeded lately counts more than one that
// nobody meets.
var weights = map[string]int{"pass": 0, "delay": 4, "mark": 5, "unknown": 6, "drop": 7, "lost": 7}

// answer is that of the hook that decides: the first of those that do worst to the packets.
func answer(stops []report.Stop) report.Answer {
	worst, most := report.Answer{Verdict: model.Pass.String(), Conforms: true}, -1
	for i := range stops {
		s := &stops[i]
		weight := 4 * weights[s.Verdict]
		switch {
		case s.LimitedBy != nil:
			weight += 3
		case s.DecidedBy != nil:
			weight += 2
		case s.Rule != nil:
			weight++
		}
		if weight > most {
			worst, most = s.Answer, weight
		}
		if s.Verdict == "drop" || s.Verdict == "lost" {
			break // nothing comes to the hooks behind
		}
	}
	return worst
}

// expects reports whether somebody may expect a rule to decide that packets do not pass. It
// is asked for, or is for a narrower network than the rule that decides. Where none decides,
// it is not for all addresses, or not in force.
func (f *Facts) expects(e *Elsewhere) bool {
	decides := 0
	if !e.State.InForce() {
		decides = -1
	}
	for _, s := range f.Stops {
		if s.Rule != nil && s.Direction == e.Direction {
			decides = max(decides, s.Rule.Prefix.Bits())
		}
	}
	return f.named(e.Rule, e.Name) || e.Rule.Prefix.Bits() > decides
}

func (p *Packets) String() string {
	switch {
	case policy.IsMark(p.Network):
		return "with " + policy.CIDR(p.Network)
	case p.Flow != nil:
		return "of " + p.Flow.String()
	case p.Src.IsValid():
		return "from " + p.end(p.Src)
	}
	return "to " + p.end(p.Dst)
}

// end is one end of the packets, and the name that was asked for.
func (p *Packets) end(a netip.Addr) string {
	switch {
	case p.Name == "":
		return a.String()
	case p.Network.Bits() == 0 && a.Is4():
		return "any IPv4 address (" + p.Name + ")"
	case p.Network.Bits() == 0:
		return "any IPv6 address (" + p.Name + ")"
	case p.Network.IsSingleIP():
		return a.String() + " (" + p.Name + ")"
	}
	return a.String() + " (" + p.Name + ": " + p.Network.String() + ")"
}

// named reports whether a rule is one whose name was asked for.
func (p *Packets) named(r policy.Rule, device string) bool {
	return p.Name != "" && r.CalledOn(device) == p.Name
}

func (p *Packets) ipv6() bool { return p.Src.Is6() || p.Dst.Is6() }

// side is the address that rules compare.
func (p *Packets) side(m policy.Match) netip.Addr {
	if m == policy.MatchSrc {
		return p.Src
	}
	return p.Dst
}
