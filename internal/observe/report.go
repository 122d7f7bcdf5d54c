package observe

import (
	"cmp"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
)

// Report is the reading for people and programs. named has the rules that it is about.
func (r Reading) Report(named []*live.Item) report.RTTs {
	out := report.RTTs{
		IntervalNS: uint64(r.Interval), Rules: []report.RTT{}, LeftOutSamples: r.LostSamples, LeftOutFlows: r.LostFlows, LeftOutRules: r.LostRules,
	}
	hosts := map[live.Key][]report.RTT{}
	for key, parts := range r.Hosts {
		one := rttOf(key.Key, parts)
		one.Host = key.Host.String()
		hosts[key.Key] = append(hosts[key.Key], one)
	}
	for i := range named {
		key := named[i].Key
		parts := r.Rules[key]
		if parts == nil {
			continue
		}
		one := rttOf(key, parts)
		one.Name, one.Hosts = named[i].Label.Name, slices.Concat([]report.RTT{}, hosts[key])
		slices.SortFunc(one.Hosts, func(a, b report.RTT) int {
			return cmp.Or(cmp.Compare(payload(b), payload(a)), plain.Natural(a.Host, b.Host))
		})
		out.Rules = append(out.Rules, one)
	}
	return out
}

func payload(r report.RTT) uint64 { return r.Limited.PayloadBytes + r.NotLimited.PayloadBytes }

func rttOf(key live.Key, p *Parts) report.RTT {
	return report.RTT{
		Device: key.Device, Direction: key.Direction, CIDR: key.Network, Limited: partOf(p.Limited), NotLimited: partOf(p.Free),
	}
}

func partOf(p Part) report.RTTPart {
	return report.RTTPart{
		Receiver: timesOf(p.Receiver), Sender: timesOf(p.Sender),
		PayloadPackets: p.Packets, PayloadBytes: p.Bytes, RetransmittedPackets: p.AgainPackets, RetransmittedBytes: p.AgainBytes,
	}
}

func timesOf(t Times) report.RTTTimes {
	out := report.RTTTimes{Samples: t.Samples}
	if t.Samples > 0 {
		ns := func(d time.Duration) *uint64 { return new(uint64(d)) }
		out.MinNS, out.MeanNS, out.MaxNS = ns(t.Min), ns(t.Mean()), ns(t.Max)
		out.P50NS, out.P95NS = ns(t.Quantile(0.5)), ns(t.Quantile(0.95))
	}
	return out
}
