package main

import (
	"context"
	"fmt"
	"time"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// queueSubjects are the subjects of the suite queue. Where the length of their queue or bucket is
// configurable, it is the default of shapectl.
func queueSubjects() []competitor {
	gcra, leaky := policy.Limit{Excess: policy.Delay}, policy.Limit{Algorithm: policy.Leaky, Excess: policy.Delay}
	sparse := gcra
	sparse.Order = policy.SparseFirst
	return []competitor{
		queueTBF, htbCoDel, withECN(htbCoDel), isolatingCAKE, withECN(isolatingCAKE), police,
		mode("drop", policy.Limit{}),
		mode("delay", leaky), withECN(mode("delay", leaky)),
		mode("delay", gcra), mode("delay, sparse first", sparse),
	}
}

// withECN returns a limiter for traffic that negotiates ECN.
func withECN(s competitor) competitor {
	s.name, s.ecn = s.name+", ECN", true
	return s
}

// queueTBF has a queue as long as shapectl's.
var queueTBF = competitor{
	name: "TBF", note: "burst of 1 ms, at least two frames; a queue as long as shapectl's",
	set: func(ctx context.Context, a *arena, l limit) error {
		burst := max(2*maxFrame, uint64(l.rate)/8/1000)
		return a.tc(ctx, fmt.Sprintf("qdisc add dev %s root tbf rate %dbit burst %d limit %d\n",
			nearDevice, uint64(l.rate), burst, burst+policy.DefaultQueue(l.rate)))
	},
}

// maxFrame is the maximum length of a frame, without FCS.
const maxFrame = 1514

// htbCoDel has a target of at least the time of 1.5 frames, as the authors of CoDel recommend for slow links.
var htbCoDel = competitor{
	name: "HTB + fq_codel", note: "CoDel target: 5 ms, or the time of 1.5 frames",
	set: func(ctx context.Context, a *arena, l limit) error {
		target := max(5*time.Millisecond, time.Duration(uint64(maxFrame*8*3/2)*uint64(time.Second)/uint64(l.rate)))
		return a.tc(ctx, fmt.Sprintf(`qdisc add dev %s root handle 1: htb default 1
class add dev %[1]s parent 1: classid 1:1 htb rate %[2]dbit quantum %[3]d
qdisc add dev %[1]s parent 1:1 fq_codel target %[4]dus interval %[5]dus
`, nearDevice, uint64(l.rate), maxFrame, target.Microseconds(), (target+95*time.Millisecond).Microseconds()))
	},
}

var isolatingCAKE = competitor{
	name: "CAKE", note: "besteffort",
	set: byTC("qdisc add dev %[1]s root cake bandwidth %[2]dbit besteffort\n"),
}

// mode is a mode of shapectl. Everything but the limit has the default of the command.
func mode(name string, l policy.Limit) competitor {
	name = fmt.Sprintf("shapectl %v, %s", l.Algorithm, name)
	return competitor{name: name, set: func(ctx context.Context, a *arena, to limit) error {
		l := l
		l.Rate = to.rate
		rule, err := l.Resolve(everything)
		if err != nil {
			return err
		}
		if rule.Excess == policy.Delay {
			if err := a.tc(ctx, "qdisc replace dev "+nearDevice+" root fq limit 131072 flow_limit 131072\n"); err != nil {
				return err
			}
		}
		return a.putRules(loader.TCX, rule, everything)
	}}
}
