package main

import (
	"context"
	"fmt"
	"time"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// queueSubjects are compared there. Each has the queue or the bucket that
// shapectl gives a rule of that rate, where it has one to be chosen.
func queueSubjects() []competitor {
	gcra, leaky := policy.Limit{Excess: policy.Delay}, policy.Limit{Algorithm: policy.Leaky, Excess: policy.Delay}
	sparse := gcra
	sparse.Order = policy.SparseFirst
	return []competitor{
		queueTBF, htbCoDel, withECN(htbCoDel), isolatingCAKE, withECN(isolatingCAKE), police,
		told("drop", policy.Limit{}),
		told("delay", leaky), withECN(told("delay", leaky)),
		told("delay", gcra), told("delay, sparse first", sparse),
	}
}

// withECN is a limiter of traffic that asks for ECN.
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

// maxFrame is the largest frame without its check sequence.
const maxFrame = 1514

// htbCoDel lets CoDel at a slow rate have the time that a frame and a half takes, as its authors advise.
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

// told is a limiter of ours that is told so much; the rest is chosen as the command does.
func told(name string, l policy.Limit) competitor {
	name = fmt.Sprintf("shapectl %v, %s", l.Algorithm, name)
	return competitor{name: name, set: func(ctx context.Context, a *arena, to limit) error {
		l := l
		l.Rate = to.rate
		rule, err := l.Resolve(everything, ethernetBytes)
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
